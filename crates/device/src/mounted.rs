//! Checks whether a file or block device is in use, directly or through a loop device, and lists the parts of a block
//! device. `exclusive_use.rs` refuses a device that is in use.
//!
//! Invariants:
//! - I1. If the state is unknown (no permission, no sysfs), the device counts as not mounted. The checks protect
//!   against mistakes; the locks in `exclusive_use.rs` protect against other ubtrfs processes.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use ubtrfs_format::print::escaped;

/// How the kernel uses a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KernelUse {
    /// Mounted at this path.
    Mounted(PathBuf),
    /// Mounted at this path by a FUSE server.
    Served {
        /// The mount point.
        at: PathBuf,
        /// The filesystem type, such as `fuse.ubtrfs`.
        kind: String,
    },
    /// The kernel holds the device, although mountinfo does not list it: it is mounted in another namespace, one of
    /// several devices of a mounted btrfs, in use as swap, or part of another device.
    Exclusive,
}

/// The table of mounts. Users choose the sources of their mounts, which may have any bytes.
fn mountinfo() -> Option<String> {
    Some(String::from_utf8_lossy(&fs::read("/proc/self/mountinfo").ok()?).into_owned())
}

/// Returns how the kernel uses the block device with this number.
pub(crate) fn use_of_block_device(rdev: u64) -> Option<KernelUse> {
    let mountinfo = mountinfo()?;
    let mut points = mount_points(&mountinfo).filter(|mount| mount.rdev() == Some(rdev));
    if let Some(point) = points.find(|mount| !(mount.is_of_ubtrfs() && is_unlocked(Path::new(&mount.source)))) {
        return Some(match point.kind.starts_with("fuse") {
            true => KernelUse::Served { at: point.target, kind: point.kind },
            false => KernelUse::Mounted(point.target),
        });
    }
    // mountinfo names only one device of a btrfs with several devices; sysfs lists all of them.
    let name = block_name(rdev)?;
    let filesystems = fs::read_dir("/sys/fs/btrfs").ok()?;
    let is_member = |dir: PathBuf| dir.join("devices").join(&name).symlink_metadata().is_ok();
    filesystems.flatten().any(|entry| is_member(entry.path())).then_some(KernelUse::Exclusive)
}

/// Checks whether the kernel uses an image file through a loop device. If the kernel does not use the file, and `hold`
/// is set, returns the loop devices over the file, opened exclusively: the kernel cannot mount them while they are
/// open.
pub(crate) fn use_of_image(dev: u64, ino: u64, hold: bool) -> Result<Vec<File>, (PathBuf, KernelUse)> {
    let mut held = Vec::new();
    for name in loop_devices_of(dev, ino) {
        let node = Path::new("/dev").join(&name);
        if let Some(rdev) = block_rdev(&node)
            && let Some(kernel_use) = use_of_block_device(rdev)
        {
            return Err((node, kernel_use));
        }
        match open_exclusive(&node) {
            Ok(file) if hold => held.push(file),
            Err(error) if is_busy(&error) => return Err((node, KernelUse::Exclusive)),
            _ => {}
        }
    }
    Ok(held)
}

/// Files and block devices that a block device is made of, at any depth: the file behind a loop device, the devices
/// below a partition or a device mapper's device. Omits parts without a path in this namespace (I1).
pub(crate) fn parts_of_block_device(rdev: u64) -> Vec<PathBuf> {
    let mut parts: Vec<PathBuf> = Vec::new();
    let mut todo = vec![sysfs_dir(rdev)];
    while let Some(dir) = todo.pop() {
        let Ok(dir) = fs::canonicalize(dir) else { continue };
        // In sysfs, the directory of a partition is inside the directory of its disk.
        let disk = if dir.join("partition").exists() { dir.parent().unwrap_or(&dir).to_owned() } else { dir.clone() };
        let mut found: Vec<PathBuf> = Vec::new();
        if let Ok(file) = fs::read_to_string(disk.join("loop/backing_file")) {
            found.push(PathBuf::from(file.trim_end_matches('\n')));
        }
        let slaves = fs::read_dir(disk.join("slaves")).into_iter().flatten().flatten();
        found.extend(slaves.map(|entry| Path::new("/dev").join(entry.file_name())));
        for part in found {
            if parts.len() < PARTS_MAX && !parts.contains(&part) {
                todo.extend(block_rdev(&part).map(sysfs_dir));
                parts.push(part);
            }
        }
    }
    parts
}

/// Limit of the number of parts that are looked up for one device. Real devices have fewer parts.
const PARTS_MAX: usize = 64;

fn sysfs_dir(rdev: u64) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{}:{}", rustix::fs::major(rdev), rustix::fs::minor(rdev)))
}

/// Whether a block device refuses writes. Opening a write-protected device for writing succeeds nevertheless.
pub(crate) fn is_write_protected(rdev: u64) -> bool {
    fs::read_to_string(sysfs_dir(rdev).join("ro")).is_ok_and(|flag| flag.trim() == "1")
}

/// Whether a block device supports discards. If sysfs does not tell, the device counts as one that supports them.
pub(crate) fn takes_discards(rdev: u64) -> bool {
    let dir = sysfs_dir(rdev);
    // In sysfs, a partition is a directory inside the directory of its disk, which has the queue.
    let limits = ["queue", "../queue"].map(|queue| fs::read_to_string(dir.join(queue).join("discard_max_bytes")));
    limits.into_iter().flatten().next().is_none_or(|bytes| bytes.trim() != "0")
}

/// Whether an exclusive open failed because the device is in use.
pub(crate) fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
}

pub(crate) fn open_exclusive(node: &Path) -> io::Result<File> {
    // On a block device, O_EXCL without O_CREAT is an exclusive claim: it excludes mounts and other claims.
    let flags = i32::try_from(OFlags::EXCL.bits()).unwrap_or_default();
    File::options().read(true).custom_flags(flags).open(node)
}

/// Device and inode number of the file behind a loop device that shows all of it.
pub fn loop_file(rdev: u64) -> Option<(u64, u64)> {
    let dir = sysfs_dir(rdev).join("loop");
    let backing = fs::read_to_string(dir.join("backing_file")).ok()?;
    let offset = fs::read_to_string(dir.join("offset")).ok()?;
    let metadata = fs::metadata(backing.trim_end_matches('\n')).ok()?;
    (offset.trim() == "0").then(|| (metadata.dev(), metadata.ino()))
}

/// Names of the loop devices over this file, and of their partitions.
pub(crate) fn loop_devices_of(dev: u64, ino: u64) -> Vec<String> {
    let Ok(devices) = fs::read_dir("/sys/block") else { return Vec::new() };
    let mut names = Vec::new();
    for entry in devices.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with("loop") {
            continue;
        }
        let Ok(backing) = fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
        let Ok(metadata) = fs::metadata(backing.trim_end_matches('\n')) else { continue };
        if (metadata.dev(), metadata.ino()) != (dev, ino) {
            continue;
        }
        let partitions = fs::read_dir(entry.path()).into_iter().flatten().flatten();
        let prefix = format!("{name}p");
        names.extend(
            partitions.map(|entry| entry.file_name().to_string_lossy().into_owned()).filter(|n| n.starts_with(&prefix)),
        );
        names.push(name);
    }
    names
}

struct MountEntry {
    target: PathBuf,
    kind: String,
    source: PathBuf,
    /// Whether a user other than root made this FUSE mount.
    is_of_user: bool,
}

impl MountEntry {
    fn is_of_ubtrfs(&self) -> bool {
        matches!(self.kind.split_once('.'), Some(("fuse" | "fuseblk", "ubtrfs")))
    }

    /// The number of the mounted block device.
    ///
    /// A user may give a FUSE mount any path as its source, for example a path in a mount whose server never answers.
    /// So the source of such a mount is looked up only in the filesystem of /dev.
    fn rdev(&self) -> Option<u64> {
        if !self.is_of_user {
            return block_rdev(&self.source);
        }
        let path = self.source.strip_prefix("/dev").ok()?;
        let dev = File::open("/dev").ok()?;
        let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_MAGICLINKS;
        let node = rustix::fs::openat2(dev, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve).ok()?;
        let stat = rustix::fs::fstat(node).ok()?;
        (FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice).then_some(stat.st_rdev)
    }
}

/// Returns the mounts in the text of /proc/self/mountinfo whose source is a path.
fn mount_points(mountinfo: &str) -> impl Iterator<Item = MountEntry> + '_ {
    mountinfo.lines().filter_map(|line| {
        let (head, tail) = line.split_once(" - ")?;
        let target = head.split(' ').nth(4)?;
        let (kind, rest) = tail.split_once(' ')?;
        let (source, options) = rest.split_once(' ').unwrap_or((rest, ""));
        let is_of_user = options.split(',').any(|option| option.starts_with("user_id=") && option != "user_id=0");
        source.starts_with('/').then(|| MountEntry {
            target: unescape(target).into(),
            kind: kind.to_owned(),
            source: unescape(source).into(),
            is_of_user,
        })
    })
}

/// Undoes the escapes of mountinfo: space, tab, newline and backslash appear as three octal digits.
fn unescape(field: &str) -> String {
    field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

fn block_rdev(path: &Path) -> Option<u64> {
    let metadata = fs::metadata(path).ok()?;
    metadata.file_type().is_block_device().then(|| metadata.rdev())
}

fn block_name(rdev: u64) -> Option<std::ffi::OsString> {
    let link = fs::read_link(sysfs_dir(rdev)).ok()?;
    Some(link.file_name()?.to_owned())
}

/// Returns the process that holds a lock on this inode, in the form "pid 12 (ubtrfs check a.img)".
pub(crate) fn lock_holder(dev: u64, ino: u64) -> Option<String> {
    lock_holder_pid(dev, ino).map(process_text)
}

/// A process in messages, in the form "pid 12 (ubtrfs check a.img)".
pub(crate) fn process_text(pid: impl std::fmt::Display) -> String {
    match command_of(&pid.to_string()) {
        Some(command) => format!("pid {pid} ({command})"),
        None => format!("pid {pid}"),
    }
}

/// Whether a process that started this one, directly or through others, holds a lock on this inode.
pub(crate) fn is_locked_by_ancestor(dev: u64, ino: u64) -> bool {
    let holders = lock_holder_pids(dev, ino);
    let parent = |pid: &str| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        Some(status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().to_owned())
    };
    let ancestors = std::iter::successors(parent("self"), |pid| parent(pid));
    // The first process of the system or of a namespace has no parent.
    ancestors.take(ANCESTORS_MAX).take_while(|pid| pid != "0").any(|pid| holders.contains(&pid))
}

const ANCESTORS_MAX: usize = 100;

/// Whether the process that holds a lock on this inode was killed or is ending, so that the kernel releases the lock soon.
pub(crate) fn is_lock_holder_ending(dev: u64, ino: u64) -> bool {
    lock_holder_pid(dev, ino).is_some_and(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        is_ending(&stat, &status)
    })
}

/// Decides with the texts of `stat` and `status` in /proc (proc_pid_stat(5), proc_pid_status(5)). A process that is gone
/// has empty ones.
fn is_ending(stat: &str, status: &str) -> bool {
    const EXITING: u64 = 4; // PF_EXITING
    const KILLED: u64 = 1 << 8; // SIGKILL, the ninth signal
    // The name of the process may have spaces and brackets. The state is the first field after it, the flags the seventh.
    let flags = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(6)?.parse().ok());
    let pending = status.lines().filter_map(|line| line.strip_prefix("ShdPnd:").or(line.strip_prefix("SigPnd:")));
    let mut pending = pending.filter_map(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    flags.is_none_or(|flags: u64| flags & EXITING != 0) || pending.any(|mask| mask & KILLED != 0)
}

/// The processes that have locked this image or device, as ubtrfs does while it has it open.
pub fn lock_holders(path: &Path) -> Vec<u32> {
    let Ok(metadata) = fs::metadata(path) else { return Vec::new() };
    lock_holder_pids(metadata.dev(), metadata.ino()).iter().filter_map(|pid| pid.parse().ok()).collect()
}

/// Whether nobody has a lock on this image or device, not even one for reading. A device that left the filesystem of a mount is
/// still the source of the mount, and has no lock. Returns false if this user may not open it.
pub fn is_unlocked(path: &Path) -> bool {
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
    let Ok(file) = File::options().read(true).custom_flags(flags).open(path) else { return false };
    let is_device = file.metadata().is_ok_and(|found| found.is_file() || found.file_type().is_block_device());
    is_device && rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// Whether a server of ubtrfs has locked this image or device, and has not told its `mount` command yet that the mount
/// works. Returns false if this user may not look at the server.
pub fn is_being_mounted(path: &Path) -> bool {
    lock_holders(path).into_iter().any(|pid| {
        // A server gives up the pipe to its command then.
        let output = fs::read_link(format!("/proc/{pid}/fd/1"));
        is_server(pid) && output.is_ok_and(|output| output != Path::new("/dev/null"))
    })
}

/// Whether a server of ubtrfs in this mount namespace has locked this image or device. Returns false if this user may not
/// look at the server.
pub fn is_served_here(path: &Path) -> bool {
    let namespace = |of: &str| fs::read_link(format!("/proc/{of}/ns/mnt")).ok();
    let own = namespace("self");
    lock_holders(path).into_iter().any(|pid| is_server(pid) && own.is_some() && namespace(&pid.to_string()) == own)
}

fn is_server(pid: u32) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split(|byte| *byte == 0).any(|word| word == b"--serve")
}

/// Returns the first process that is `wanted` of those that serve the FUSE mounts on the way to a path, links included. A
/// process is known by its lock on the mount's source. The mount of a wanted process is not entered, so the process need
/// not answer.
pub fn find_server(path: &Path, wanted: &dyn Fn(u32) -> bool) -> Option<u32> {
    let full = std::path::absolute(path).ok()?;
    let mountinfo = mountinfo()?;
    let mounts: Vec<MountEntry> = mount_points(&mountinfo).filter(|mount| mount.kind.starts_with("fuse")).collect();
    let mut nr_links_left = LINKS_MAX;
    server_on_the_way(&full, &mounts, wanted, &mut nr_links_left)
}

fn server_on_the_way(
    full: &Path,
    mounts: &[MountEntry],
    wanted: &dyn Fn(u32) -> bool,
    nr_links_left: &mut usize,
) -> Option<u32> {
    let names = |path: &Path| path.components().rev().map(|name| name.as_os_str().to_owned()).collect();
    let mut todo: Vec<std::ffi::OsString> = names(full);
    let mut at = PathBuf::from("/");
    while let Some(name) = todo.pop() {
        if name == ".." {
            at.pop();
            continue;
        }
        let next = at.join(name);
        // Of several mounts at one place, the last one covers the others.
        if let Some(mount) = mounts.iter().rfind(|mount| mount.target == next) {
            *nr_links_left = nr_links_left.checked_sub(1)?;
            let server = server_on_the_way(&mount.source, mounts, wanted, nr_links_left)
                .or_else(|| server_of(mount).filter(|pid| wanted(*pid)));
            if server.is_some() {
                return server;
            }
        } else if let Ok(link) = fs::read_link(&next) {
            *nr_links_left = nr_links_left.checked_sub(1)?;
            todo.extend::<Vec<_>>(names(&link));
            continue;
        }
        at = next;
    }
    None
}

/// The process that holds a lock on the source of a mount.
fn server_of(mount: &MountEntry) -> Option<u32> {
    let source = fs::metadata(&mount.source).ok()?;
    lock_holder_pid(source.dev(), source.ino())?.parse().ok()
}

/// How many links and mounts a path may lead through.
const LINKS_MAX: usize = 40;

/// Whether this process holds the lock of a file.
pub(crate) fn is_locked_here(dev: u64, ino: u64) -> bool {
    lock_holder_pid(dev, ino).is_some_and(|pid| pid == std::process::id().to_string())
}

/// The process that holds a lock on this inode according to /proc/locks.
fn lock_holder_pid(dev: u64, ino: u64) -> Option<String> {
    lock_holder_pids(dev, ino).into_iter().next()
}

fn lock_holder_pids(dev: u64, ino: u64) -> Vec<String> {
    // A lock can be missed if the list has several pages and others end their locks between two reads.
    (0..LISTS_READ).map(|_| lock_holder_pids_once(dev, ino)).find(|pids| !pids.is_empty()).unwrap_or_default()
}

/// How often the list of locks is read for a lock that is not in it.
const LISTS_READ: u32 = 3;

/// The list of all locks. The kernel makes the text anew for each read, of a page at most. So small reads, such as those of
/// `fs::read_to_string`, pass over locks when others end theirs meanwhile.
fn locks() -> String {
    let mut text = Vec::new();
    let mut page = vec![0; 1 << 16];
    let Ok(mut file) = File::open("/proc/locks") else { return String::new() };
    while let Ok(count @ 1..) = file.read(&mut page) {
        text.extend_from_slice(page.get(..count).unwrap_or_default());
    }
    String::from_utf8_lossy(&text).into_owned()
}

fn lock_holder_pids_once(dev: u64, ino: u64) -> Vec<String> {
    let locks = locks();
    let wanted = format!("{:02x}:{:02x}:{ino}", rustix::fs::major(dev), rustix::fs::minor(dev));
    let holder = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // The line of a waiting process has "->" as its second field.
        (fields.get(1) == Some(&"FLOCK") && fields.get(5) == Some(&wanted.as_str())).then(|| fields[4].to_owned())
    };
    locks.lines().filter_map(holder).collect()
}

/// The start of the command line of a process, with the program's name for its path; of a process that hides its command
/// line, only the name.
fn command_of(pid: &str) -> Option<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    if line.is_empty() {
        return Some(escaped(fs::read(format!("/proc/{pid}/comm")).ok()?.trim_ascii_end()));
    }
    Some(shortened(&line))
}

/// The start of a command line, whose words end with a zero byte.
fn shortened(line: &[u8]) -> String {
    let program = line.split(|byte| *byte == 0).next().unwrap_or_default();
    let dir_len = program.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let words: Vec<String> = line[dir_len..].split(|byte| *byte == 0).map(escaped).collect();
    let text = words.join(" ");
    match text.trim_end().char_indices().nth(COMMAND_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.trim_end().to_owned(),
    }
}

/// How much of a command line a message contains.
const COMMAND_CHARS: usize = 80;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_found_while_others_lock_and_unlock() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let locked = |name: &str| {
            let file = File::create(dir.path().join(name)).expect("a scratch file");
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).expect("nobody else has it");
            file
        };
        let before: Vec<File> = (0..4).map(|number| locked(&number.to_string())).collect();
        let held = locked("held");
        let metadata = held.metadata().expect("it is open");
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let is_over = &is_over;
            for file in &before {
                scope.spawn(move || {
                    while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                        rustix::fs::flock(file, FlockOperation::Unlock).expect("it is locked");
                        rustix::fs::flock(file, FlockOperation::LockExclusive).expect("nobody else has it");
                    }
                });
            }
            let nr_missed = (0..20_000).filter(|_| !is_locked_here(metadata.dev(), metadata.ino())).count();
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(nr_missed, 0);
        });
    }

    #[test]
    fn a_process_is_ending_if_it_exits_was_killed_or_is_gone() {
        let stat = |flags: &str| format!("7 (a) b) R 1 7 7 0 -1 {flags} 100 0 0");
        let status = |mask: &str| format!("Name:\ta) b\nSigPnd:\t0000000000000000\nShdPnd:\t{mask}\n");
        let none = status("0000000000000000");
        assert!(!is_ending(&stat("4194304"), &none));
        assert!(!is_ending(&stat("4194304"), &status("0000000000004000")), "SIGTERM");
        assert!(is_ending(&stat("4194308"), &none));
        assert!(is_ending(&stat("4194304"), &status("0000000000000100")));
        assert!(is_ending("", ""));
    }

    #[test]
    fn mountinfo_lines_give_target_and_source() {
        let text = "36 35 0:39 / /mnt/a\\040b rw,relatime shared:1 - btrfs /dev/loop0 rw,subvol=/\n\
                    22 27 0:21 / /proc rw,relatime - proc proc rw\n";
        let mounts: Vec<MountEntry> = mount_points(text).collect();
        assert_eq!(mounts.len(), 1);
        assert_eq!(mounts[0].target, Path::new("/mnt/a b"));
        assert_eq!(mounts[0].source, Path::new("/dev/loop0"));
        assert_eq!(mounts[0].kind, "btrfs");
    }

    #[test]
    fn a_command_line_is_shortened_and_escaped() {
        assert_eq!(shortened(b"/usr/bin/ubtrfs\0check\0dir/a.img\0"), "ubtrfs check dir/a.img");
        assert_eq!(shortened(b"x\0\x1b[2J\n\xff\0"), r"x \u{1b}[2J\n\xff");
        let long = shortened(&[b"/a/b\0", vec![b'c'; 100].as_slice()].concat());
        assert_eq!(long, format!("b {}...", "c".repeat(78)));
        assert_eq!(shortened(b"/\0"), "");
    }

    #[test]
    fn the_device_of_a_users_mount_is_looked_up_in_dev_only() {
        let of = |source: &str| {
            let line = format!("36 35 0:39 / /mnt rw - fuse.x {source} rw,user_id=1000,group_id=1000\n");
            mount_points(&line).next().and_then(|mount| mount.rdev())
        };
        let node = |name: &str| block_rdev(&Path::new("/dev").join(name));
        let mut names = fs::read_dir("/dev").into_iter().flatten().flatten().map(|entry| entry.file_name());
        if let Some(name) = names.find_map(|name| node(name.to_str()?).is_some().then_some(name)) {
            let name = name.to_string_lossy();
            assert_eq!(of(&format!("/dev/{name}")), node(&name));
            for outside in [format!("/dev/../dev/{name}"), format!("/dev/shm/../{name}"), "/proc/self".to_owned()] {
                assert_eq!(of(&outside), None, "{outside}");
            }
        }
    }
}
