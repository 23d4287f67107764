//! Observes a side as root, in addition to the answers: attributes of paths and open files, and whole
//! trees.

use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, Statx, StatxAttributes, StatxFlags};
use rustix::io::Errno;

use super::call::name_text;
use super::perform::{Side, full};
use crate::tree_entry::{TreeEntry, walk_path, xxh64};

/// A time (in seconds since 1970) that is earlier than the time of any call. Times that a test sets are earlier than
/// this time or later than [`LATEST_CALL`], so a time between the two is the time of a call.
pub(crate) const EARLIEST_CALL: i64 = 1_700_000_000;
/// A time (in seconds since 1970) that is later than the time of any call.
pub(crate) const LATEST_CALL: i64 = 4_000_000_000;

/// The attributes of an object that must be equal on both sides.
pub(crate) fn stat_fields(stat: &Stat) -> Vec<(String, String)> {
    let kind = FileType::from_raw_mode(stat.st_mode);
    let fields = [
        ("kind", format!("{kind:?}")),
        ("mode", format!("{:o}", stat.st_mode & 0o7777)),
        ("owner", format!("{}:{}", stat.st_uid, stat.st_gid)),
        ("nlink", stat.st_nlink.to_string()),
        ("rdev", format!("{},{}", rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev))),
        ("size", stat.st_size.to_string()),
        ("blksize", stat.st_blksize.to_string()),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The atime, mtime and ctime of an object.
pub(crate) fn times(stat: &Stat) -> [(i64, i64); 3] {
    let nsec = |value: u64| i64::try_from(value).unwrap_or(-1);
    [
        (stat.st_atime, nsec(stat.st_atime_nsec)),
        (stat.st_mtime, nsec(stat.st_mtime_nsec)),
        (stat.st_ctime, nsec(stat.st_ctime_nsec)),
    ]
}

/// An object as seen before or after a call.
#[derive(Clone, Debug)]
pub(crate) struct Observation {
    /// The word `path` and the path, or the word `slot` and the number of the slot.
    pub(crate) what: String,
    pub(crate) stat: Result<Stat, Errno>,
    /// Names and values of extended attributes.
    pub(crate) xattrs: String,
    /// Whether a file that is open in a slot has no blocks, but has non-zero content in its first MiB. `tar -S` and
    /// `cp` would treat such a file as a hole. Always false for a path.
    pub(crate) data_without_blocks: bool,
    /// Whether statx reports the file as immutable or append-only. FUSE cannot report that a file is immutable or
    /// append-only.
    pub(crate) guarded: bool,
}

impl Observation {
    pub(crate) fn is_pipe(&self) -> bool {
        self.stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo)
    }
}

/// Observes the current state of paths and slots.
pub(crate) fn look(side: &Side, paths: &[String], slots: &[usize]) -> Vec<Observation> {
    let mut seen = Vec::new();
    for path in paths {
        let full = side.full(path);
        let stat = rustix::fs::lstat(&full);
        let xattrs = if stat.is_ok() { xattr_text(&full) } else { String::new() };
        let guarded = is_guarded(rustix::fs::statx(CWD, &full, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS));
        seen.push(Observation { what: format!("path {path}"), stat, xattrs, data_without_blocks: false, guarded });
    }
    for &slot in slots {
        let stat = side.slot(slot).and_then(|file: &OwnedFd| rustix::fs::fstat(file));
        let guarded = side
            .slot(slot)
            .is_ok_and(|file| is_guarded(rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)));
        let data_without_blocks = match (&stat, side.slot(slot)) {
            (Ok(stat), Ok(file)) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => {
                stat.st_blocks == 0 && !is_zeros(file, 0, u64::try_from(stat.st_size).unwrap_or(0))
            }
            _ => false,
        };
        seen.push(Observation {
            what: format!("slot {slot}"),
            stat,
            xattrs: String::new(),
            data_without_blocks,
            guarded,
        });
    }
    seen
}

/// Whether a range of an open file contains only zeros. Checks only the first MiB of the range, as far as it can be
/// read.
pub(crate) fn is_zeros(file: &OwnedFd, from: u64, to: u64) -> bool {
    const LOOKED_AT: u64 = 1 << 20;
    let len = usize::try_from(to.saturating_sub(from).min(LOOKED_AT)).unwrap_or(0);
    let mut buf = vec![0; len];
    let done = rustix::io::pread(file, &mut buf[..], from).unwrap_or(0);
    buf[..done].iter().all(|&byte| byte == 0)
}

fn is_guarded(statx: Result<Statx, Errno>) -> bool {
    statx.is_ok_and(|statx| statx.stx_attributes.intersects(StatxAttributes::IMMUTABLE | StatxAttributes::APPEND))
}

impl Observation {
    /// The object's inode number.
    pub(crate) fn ino(&self) -> Option<u64> {
        self.stat.as_ref().ok().map(|stat| stat.st_ino)
    }

    /// See [`Entry::left_out`].
    pub(crate) fn is_left_out(&self) -> bool {
        self.stat.as_ref().is_ok_and(|stat| stat.st_ino == LEFT_OUT)
    }
}

/// The inode number of each directory that Linux shows in place of a subvolume that a snapshot left out. A directory
/// in place of a left-out subvolume is not on disk, so Linux makes up its owner and times.
const LEFT_OUT: u64 = 2;
/// The inode number of each subvolume's root directory on Linux's mount.
const SUBVOLUME_ROOT: u64 = 256;

/// Returns how a call changed an object, as fields that must be equal on both sides.
pub(crate) fn changes(before: Option<&Observation>, after: &Observation) -> Vec<(String, String)> {
    let stat = match &after.stat {
        Ok(stat) => stat,
        Err(errno) => return vec![("kind".to_owned(), errno_name(*errno))],
    };
    let mut fields = stat_fields(stat);
    fields.push(("xattrs".to_owned(), after.xattrs.clone()));
    fields.push(("data without blocks".to_owned(), after.data_without_blocks.to_string()));
    let old = before
        .and_then(|seen| seen.stat.as_ref().ok())
        .filter(|old| (old.st_dev, old.st_ino) == (stat.st_dev, stat.st_ino));
    for (index, (name, now)) in ["atime", "mtime", "ctime"].into_iter().zip(times(stat)).enumerate() {
        let value = if now.0 < EARLIEST_CALL || now.0 > LATEST_CALL {
            format!("{}.{:09}", now.0, now.1)
        } else {
            match old {
                None => "a time of a call".to_owned(),
                Some(old) if times(old)[index] == now => "kept".to_owned(),
                Some(_) => "changed".to_owned(),
            }
        };
        fields.push((name.to_owned(), value));
    }
    fields
}

/// Lists the names of extended attributes, sorted.
pub(crate) fn xattr_names(path: &Path) -> Result<Vec<String>, Errno> {
    let mut buf = vec![0u8; 64 << 10];
    let len = rustix::fs::llistxattr(path, &mut buf[..])?;
    let names = buf[..len].split(|&byte| byte == 0).filter(|name| !name.is_empty());
    let mut names: Vec<String> = names.map(name_text).collect();
    names.sort();
    Ok(names)
}

fn xattr_text(path: &Path) -> String {
    let names = match xattr_names(path) {
        Ok(names) => names,
        Err(errno) => return errno_name(errno),
    };
    let mut text = String::new();
    for name in names {
        let mut value = vec![0u8; 64 << 10];
        let value = match rustix::fs::lgetxattr(path, name.as_str(), &mut value[..]) {
            Ok(len) => format!("{len}:{:08x}", xxh64(&value[..len]) >> 32),
            Err(errno) => errno_name(errno),
        };
        let _ = write!(text, "{name}={value} ");
    }
    text
}

/// An object in a whole tree.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) entry: TreeEntry,
    /// atime, mtime, ctime.
    pub(crate) times: [(i64, i64); 3],
    /// Flags of lsattr, for files and directories.
    pub(crate) flags: Option<u32>,
    /// Allocated blocks of 512 bytes.
    pub(crate) blocks: u64,
    /// Whether the object is the empty directory in place of a subvolume that a snapshot left out. Only Linux's inode
    /// numbers identify a directory in place of a left-out subvolume.
    pub(crate) left_out: bool,
    /// Whether the object is the root of a nested subvolume. Roots of nested subvolumes are known only on Linux's
    /// mount, where their inode number is 256.
    pub(crate) is_subvolume: bool,
}

impl Entry {
    /// The fields to compare. Block counts and the exact times of calls are included only if both trees come from one
    /// image.
    pub(crate) fn fields(&self, one_image: bool) -> Vec<(String, String)> {
        let entry = &self.entry;
        let xattrs: Vec<String> = entry
            .xattrs
            .iter()
            .map(|(name, value)| format!("{}={}:{:08x}", name.escape_ascii(), value.len(), xxh64(value) >> 32))
            .collect();
        let mut fields = vec![
            ("kind", format!("{:?}", entry.kind)),
            ("mode", format!("{:o}", entry.mode)),
            ("owner", format!("{}:{}", entry.uid, entry.gid)),
            ("size", entry.size.to_string()),
            ("nlink", entry.nlink.to_string()),
            ("links", entry.link_group.as_ref().map_or_else(String::new, |path| name_text(path))),
            ("rdev", format!("{:?}", entry.rdev)),
            ("content", format!("{:016x}", entry.content)),
            ("xattrs", xattrs.join(" ")),
            ("flags", self.flags.map_or_else(String::new, |flags| format!("{flags:#x}"))),
        ];
        if one_image {
            fields.push(("blocks", self.blocks.to_string()));
        }
        for (name, time) in ["atime", "mtime", "ctime"].into_iter().zip(self.times) {
            let of_call = (EARLIEST_CALL..=LATEST_CALL).contains(&time.0);
            let text =
                if of_call && !one_image { "a time of a call".to_owned() } else { format!("{}.{:09}", time.0, time.1) };
            fields.push((name, text));
        }
        fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

/// Reads the whole tree below a mount point.
pub(crate) fn walk(root: &Path) -> Result<Vec<Entry>> {
    let mut out = Vec::new();
    for entry in walk_path(root)? {
        let full = full(root, &name_text(&entry.path));
        let stat = rustix::fs::lstat(&full).with_context(|| format!("lstat {}", full.display()))?;
        let with_flags = matches!(FileType::from_raw_mode(stat.st_mode), FileType::RegularFile | FileType::Directory);
        let left_out = stat.st_ino == LEFT_OUT;
        let flags = if with_flags && !left_out { Some(flags_of(&full)?) } else { None };
        // Do not use cached attributes: the kernel may have cached a block count from before the data was written back.
        let fresh = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
        let blocks = rustix::fs::statx(CWD, &full, fresh, StatxFlags::BASIC_STATS)?.stx_blocks;
        let is_subvolume = stat.st_ino == SUBVOLUME_ROOT && !entry.path.is_empty();
        out.push(Entry { entry, times: times(&stat), flags, blocks, left_out, is_subvolume });
    }
    Ok(out)
}

fn flags_of(path: &Path) -> Result<u32> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).with_context(|| format!("open {}", path.display()))?;
    let flags = rustix::fs::ioctl_getflags(file).with_context(|| format!("flags of {}", path.display()))?;
    Ok(flags.bits())
}

/// Returns the name of an errno.
pub(crate) fn errno_name(errno: Errno) -> String {
    const NAMES: &[(Errno, &str)] = &[
        (Errno::PERM, "EPERM"),
        (Errno::NOENT, "ENOENT"),
        (Errno::IO, "EIO"),
        (Errno::NXIO, "ENXIO"),
        (Errno::TOOBIG, "E2BIG"),
        (Errno::BADF, "EBADF"),
        (Errno::AGAIN, "EAGAIN"),
        (Errno::NOMEM, "ENOMEM"),
        (Errno::ACCESS, "EACCES"),
        (Errno::BUSY, "EBUSY"),
        (Errno::EXIST, "EEXIST"),
        (Errno::XDEV, "EXDEV"),
        (Errno::NODEV, "ENODEV"),
        (Errno::NOTDIR, "ENOTDIR"),
        (Errno::ISDIR, "EISDIR"),
        (Errno::INVAL, "EINVAL"),
        (Errno::NOTTY, "ENOTTY"),
        (Errno::TXTBSY, "ETXTBSY"),
        (Errno::FBIG, "EFBIG"),
        (Errno::NOSPC, "ENOSPC"),
        (Errno::SPIPE, "ESPIPE"),
        (Errno::ROFS, "EROFS"),
        (Errno::MLINK, "EMLINK"),
        (Errno::RANGE, "ERANGE"),
        (Errno::NAMETOOLONG, "ENAMETOOLONG"),
        (Errno::NOSYS, "ENOSYS"),
        (Errno::NOTEMPTY, "ENOTEMPTY"),
        (Errno::LOOP, "ELOOP"),
        (Errno::NODATA, "ENODATA"),
        (Errno::OVERFLOW, "EOVERFLOW"),
        (Errno::OPNOTSUPP, "EOPNOTSUPP"),
        (Errno::STALE, "ESTALE"),
        (Errno::DQUOT, "EDQUOT"),
        (Errno::UCLEAN, "EUCLEAN"),
    ];
    match NAMES.iter().find(|(other, _)| *other == errno) {
        Some((_, name)) => (*name).to_owned(),
        None => format!("errno {}", errno.raw_os_error()),
    }
}
