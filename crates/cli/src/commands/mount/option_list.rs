//! The list of mount options, from which `ubtrfs mount --help` and the manual page ubtrfs(5) are made.
//!
//! I1. Every option of the list is parsed. The parsers are [`super::options`] and `ubtrfs_fs::MountOptions`.

/// One option, or several with one meaning.
pub struct MountOption {
    /// The names, separated by ", ".
    pub names: &'static str,
    /// What it does, as a sentence without a full stop.
    pub text: &'static str,
}

const fn option(names: &'static str, text: &'static str) -> MountOption {
    MountOption { names, text }
}

/// The options of btrfs, with the kernel's names.
pub const OF_BTRFS: &[MountOption] = &[
    option("ro", "mount read-only"),
    option("subvol=PATH, subvolid=ID", "the subvolume to mount (by default, the default subvolume)"),
    option(
        "compress=METHOD:LEVEL, compress-force=METHOD:LEVEL",
        "compress new data with zstd:-15 to zstd:15, zlib:1 to zlib:9 or lzo; force tries it for every piece of a file",
    ),
    option("nodatacow", "new files are overwritten in place, and have no checksums"),
    option("nodatasum", "new files have no checksums"),
    option("max_inline=BYTES", "the largest file that is stored in the tree (2048)"),
    option("commit=SECONDS", "the time between commits (30)"),
    option("noatime, relatime, strictatime", "when reading updates the access time of a file (relatime)"),
    option("nodiratime", "reading a directory does not update its access time"),
    option("discard, discard=async", "tell the devices about freed space, in each commit or in the background"),
    option(
        "bg_reclaim_threshold=PERCENT",
        "move the content of a data block group elsewhere when removals bring its usage below this (0: never)",
    ),
    option("device=PATH", "a further device of the filesystem"),
    option("degraded", "write without some devices, if every block group tolerates their loss"),
    option("user_subvol_rm_allowed", "users may delete subvolumes that they may write to"),
    option("noacl", "no POSIX ACLs"),
    option("notreelog", "fsync commits, instead of writing a log"),
    option("nologreplay", "with ro: show the last commit, without what fsync made durable since"),
    option("space_cache=v2", "the default; v1 and nospace_cache are refused if the filesystem has a free space tree"),
    option("skip_balance", "leave an interrupted balance paused"),
    option(
        "rescue=usebackuproot",
        "if the trees of the last commit are damaged, show those of an earlier one, read-only; several words of rescue= are \
         separated by colons",
    ),
    option("rescue=nologreplay", "as nologreplay"),
    option(
        "rescue=ignorebadroots",
        "with ro: go on without the trees that only writing needs, and without the data checksums, if they are damaged",
    ),
    option("rescue=ignoredatacsums", "with ro: return data that does not match its checksum"),
    option(
        "rescue=ignoremetacsums",
        "with ro: use tree blocks that do not match their checksum but are valid otherwise",
    ),
    option("rescue=ignoresuperflags", "with ro: open in spite of flags of an interrupted conversion"),
    option("rescue=all", "with ro: all of these but usebackuproot"),
    option("flushoncommit", "accepted without effect, as options that tune Linux's own caches, threads and allocation"),
];

/// The options of the mount point.
pub const OF_MOUNT_POINT: &[MountOption] = &[
    option("allow_other, noallow_other", "whether other users may enter (for root: allow_other)"),
    option("default_permissions", "the kernel checks permissions, also with noallow_other"),
    option("nonempty", "the directory may have files, which the mount hides"),
    option(
        "nodev, nosuid, noexec, nosymfollow, dirsync",
        "enforced by the kernel; nodev and nosuid are the default with --sandbox",
    ),
    option("sync", "each write is durable when it returns"),
    option("user=NAME", "accepted without effect, as all options that only mount(8) or systemd reads"),
    option("fsname=NAME", "the device that the table of mounts shows (the image)"),
    option("memory=SIZE", "memory of the server, as --memory"),
    option("threads=N", "threads that take requests from /dev/fuse, 1 to 64 (4)"),
    option("writeback_cache", "the kernel collects small writes; a lack of space is reported only at fsync and close"),
    option("noio_uring", "take requests from /dev/fuse, not through io_uring"),
    option("idle_poll=auto|on|off", "keep an idle processor awake while many requests arrive (auto)"),
    option("noxattr", "fewer requests, but no extended attributes, ACLs and capabilities of files"),
    option("noopen", "fewer requests, but a file that cannot be written fails at write instead of at open"),
    option("idmap", "allow idmapped mounts; only root and the user who mounted can then run commands on the mount"),
    option("submounts", "for root: each subvolume is a mount of its own, with its own device number, as on Linux"),
    option("fuseblk", "for root's mounts of block devices: sync and umount wait for the commit"),
];

/// The text of `ubtrfs mount --help` on the option `-o`.
pub(super) fn help() -> String {
    let mut text = String::from(
        "Mount options, separated by commas: options of btrfs and of the mount point\n\nWith remount, only ro or rw, commit=, compress=, compress-force=, datacow, datasum \
         and these options of the mount point change: dev, suid, exec, atime, symfollow, dirsync, sync and their opposites. All other options must have \
         the values of the mount; a change of them needs a new mount.\n",
    );
    for (title, options) in [("btrfs", OF_BTRFS), ("the mount point", OF_MOUNT_POINT)] {
        text.push_str(&format!("\nOptions of {title}:\n"));
        for MountOption { names, text: meaning } in options {
            text.push_str(&format!("  {names}: {meaning}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_listed_option_is_parsed() {
        let given = [
            ("threads=N", "threads=4"),
            ("METHOD:LEVEL", "zstd:3"),
            ("PATH", "/x"),
            ("ID", "5"),
            ("BYTES", "100"),
            ("SECONDS", "5"),
            ("PERCENT", "10"),
            ("NAME", "x"),
            ("=SIZE", "=200M"),
            ("auto|on|off", "on"),
        ];
        for name in OF_BTRFS.iter().chain(OF_MOUNT_POINT).flat_map(|option| option.names.split(", ")) {
            let text = given.iter().fold(name.to_owned(), |text, (word, value)| text.replace(word, value));
            let text = if name == "noopen" { format!("noallow_other,{text}") } else { text };
            assert!(super::super::options::parse(std::slice::from_ref(&text)).is_ok(), "{text}");
        }
    }
}
