//! The table of mounts: /proc/PID/mountinfo.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Gid, StatxFlags, Uid, makedev, statx};

use crate::mount::SUBTYPE;
use crate::other_user::other_user_of;
use crate::remaining_mounts::User;

/// One line of /proc/self/mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MountInfo {
    /// The mount's number, which Linux may give to another mount after the unmount.
    pub(crate) id: u64,
    /// The number of the mount that this one lies in.
    pub(crate) parent: u64,
    pub(crate) dir: PathBuf,
    /// The directory of the filesystem that this mount shows, as a path from the filesystem's root. For bind mounts, it
    /// can be another directory than `/`.
    pub(crate) root: PathBuf,
    pub(crate) kind: String,
    /// Whether mounts that are made in it appear in other mounts too.
    pub(crate) is_shared: bool,
    /// `major:minor`: equal for all mount points of one filesystem, and reused after its last unmount.
    pub(crate) device: Vec<u8>,
    /// The mounted device, as given.
    pub(crate) source: OsString,
    /// Options of the mount point and of the filesystem.
    pub(crate) options: Vec<String>,
}

impl MountInfo {
    /// Whether ubtrfs serves the mount.
    pub(crate) fn is_of_ubtrfs(&self) -> bool {
        matches!(self.kind.split_once('.'), Some(("fuse" | "fuseblk", SUBTYPE)))
    }

    /// The user and the group who made this FUSE mount.
    pub(crate) fn user(&self) -> Option<(Uid, Gid)> {
        let value = |name: &str| self.options.iter().find_map(|option| option.strip_prefix(name)?.parse().ok());
        Some((Uid::from_raw(value("user_id=")?), Gid::from_raw(value("group_id=")?)))
    }

    /// The user and the group that alone may enter this mount; `None` if it admits others (`allow_other`).
    pub(crate) fn admitted_user(&self) -> Option<(Uid, Gid)> {
        let admits_others = self.options.iter().any(|option| option == "allow_other");
        self.user().filter(|_| !admits_others)
    }

    /// Whether the kernel refuses writes through all mounts of the filesystem. The options of the filesystem are the last
    /// ones.
    pub(crate) fn is_filesystem_read_only(&self) -> bool {
        self.options.iter().rfind(|option| matches!(option.as_str(), "ro" | "rw")).is_some_and(|option| option == "ro")
    }

    /// The number that `stat` shows as `st_dev`.
    pub(crate) fn device_number(&self) -> Option<u64> {
        let (major, minor) = std::str::from_utf8(&self.device).ok()?.split_once(':')?;
        Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
    }
}

/// The mount on exactly this directory; the topmost mount if there are several.
pub(crate) fn find_mount(dir: &Path) -> Option<MountInfo> {
    mounts().into_iter().rfind(|mount| mount.dir == dir)
}

/// Finds the mount that contains an existing path. Returns the mount point, and the directory that the mount shows, as
/// a path from the root of the mounted filesystem.
pub fn holding_mount(path: &Path) -> Option<(PathBuf, PathBuf)> {
    let full = std::fs::canonicalize(path).ok()?;
    let holding = mounts().into_iter().filter(|mount| full.starts_with(&mount.dir));
    // `max_by_key` returns the last of equal mount points, which is the topmost mount on that directory.
    let found = holding.max_by_key(|mount| mount.dir.as_os_str().len())?;
    Some((found.dir, found.root))
}

/// The place where ubtrfs has mounted this image or device, if there is one: the first of [`mount_points_of`].
pub fn mount_point_of(image: &Path) -> Option<PathBuf> {
    mount_points_of(image).into_iter().next()
}

/// The mount points at which ubtrfs may have mounted this image or device, for root or this user, the latest mount
/// first. The table of mounts names the device by which a filesystem was mounted, even after the device has left the
/// filesystem. So only the server of a mount knows whether the mount uses the device.
pub fn mount_points_of(image: &Path) -> Vec<PathBuf> {
    let is_url = ubtrfs_device::is_url(image);
    let full = if is_url { Ok(image.to_owned()) } else { std::fs::canonicalize(image) };
    let Ok(full) = full else { return Vec::new() };
    let is_of =
        |mount: &MountInfo| mount.is_of_ubtrfs() && Path::new(&mount.source) == full && other_user_of(mount).is_none();
    let mut points: Vec<PathBuf> = mounts().into_iter().filter(is_of).map(|mount| mount.dir).collect();
    if !points.is_empty() && !is_url && ubtrfs_device::is_unlocked(&full) {
        return Vec::new();
    }
    points.reverse();
    points
}

/// The image or device that is mounted at a path in a mount of ubtrfs; `None` for another user's mount, because that user
/// chose the path.
pub fn image_mounted_at(path: &Path) -> Option<PathBuf> {
    let full = std::fs::canonicalize(path).ok()?;
    let holding = mounts().into_iter().filter(|mount| full.starts_with(&mount.dir));
    let found = holding.max_by_key(|mount| mount.dir.as_os_str().len())?;
    let is_ours = found.is_of_ubtrfs() && other_user_of(&found).is_none();
    Some(PathBuf::from(found.source)).filter(|source| is_ours && source.is_absolute())
}

/// The number of the mount at this path that no other mount ever has, found without asking the mount's server. `None`
/// before Linux 6.8.
pub(crate) fn unique_id(path: &Path) -> Option<u64> {
    unique_id_at(CWD, path, AtFlags::SYMLINK_NOFOLLOW)
}

/// Works like [`unique_id`], for an open file of the mount.
pub(crate) fn unique_id_of(file: impl AsFd) -> Option<u64> {
    unique_id_at(file.as_fd(), Path::new(""), AtFlags::EMPTY_PATH)
}

fn unique_id_at(dir: BorrowedFd<'_>, path: &Path, how: AtFlags) -> Option<u64> {
    let wanted = StatxFlags::from_bits_retain(STATX_MNT_ID_UNIQUE);
    let found = statx(dir, path, how | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC, wanted).ok()?;
    (found.stx_mask & STATX_MNT_ID_UNIQUE != 0).then_some(found.stx_mnt_id)
}

/// A constant of linux/stat.h.
const STATX_MNT_ID_UNIQUE: u32 = 0x4000;

/// The number of the filesystem (`st_dev`) of an open file, found without a question to its server.
pub(crate) fn device_of_file(file: impl AsFd) -> io::Result<u64> {
    let how = AtFlags::EMPTY_PATH | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    let stat = statx(file.as_fd(), "", how, StatxFlags::empty())?;
    Ok(makedev(stat.stx_dev_major, stat.stx_dev_minor))
}

/// All mounts of the device with this number: `mount --bind` shows one filesystem in several places.
pub(crate) fn mounts_of_device(device: &[u8]) -> Vec<MountInfo> {
    mounts().into_iter().filter(|mount| mount.device == device).collect()
}

/// A process in another mount namespace in which this filesystem is mounted. Only processes are found whose mounts the
/// caller may see.
pub(crate) fn user_in_other_namespace(unmounted: &MountInfo) -> Option<User> {
    let namespace = |process: &Path| std::fs::read_link(process.join("ns/mnt")).ok();
    let mut seen: Vec<PathBuf> = namespace(Path::new("/proc/self")).into_iter().collect();
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let path = process.path();
        let pid = process.file_name().to_string_lossy().parse::<u32>();
        let (Ok(pid), Some(found)) = (pid, namespace(&path)) else { continue };
        if seen.contains(&found) {
            continue;
        }
        seen.push(found);
        let is_same = |mount: &MountInfo| mount.device == unmounted.device && mount.kind == unmounted.kind;
        if let Some(mount) = mounts_of_process(&path).into_iter().find(is_same) {
            let below = mount.dir.strip_prefix("/").unwrap_or(&mount.dir);
            return Some(User::new(pid, &path, path.join("root").join(below)));
        }
    }
    None
}

pub(crate) fn mounts() -> Vec<MountInfo> {
    mounts_of_process(Path::new("/proc/self"))
}

fn mounts_of_process(process: &Path) -> Vec<MountInfo> {
    let table = std::fs::read(process.join("mountinfo")).unwrap_or_default();
    table.split(|&byte| byte == b'\n').filter_map(parse_mountinfo).collect()
}

/// Fields: id, parent, device, root, mount point, options, optional fields up to `-`, type, source, options.
fn parse_mountinfo(line: &[u8]) -> Option<MountInfo> {
    let mut fields = line.split(|&byte| byte == b' ');
    let mut number = || std::str::from_utf8(fields.next()?).ok()?.parse().ok();
    let (id, parent) = (number()?, number()?);
    let device = fields.next()?.to_vec();
    let root = unescape(fields.next()?);
    let dir = unescape(fields.next()?);
    let of_mount_point = fields.next()?;
    let mut is_shared = false;
    for field in fields.by_ref().take_while(|field| *field != b"-") {
        is_shared |= field.starts_with(b"shared:");
    }
    let (kind, source, of_filesystem) = (fields.next()?, unescape(fields.next()?), fields.next().unwrap_or_default());
    let options = [of_mount_point, of_filesystem].into_iter().flat_map(|list| list.split(|&byte| byte == b','));
    Some(MountInfo {
        id,
        parent,
        dir: PathBuf::from(OsStr::from_bytes(&dir).to_owned()),
        root: PathBuf::from(OsStr::from_bytes(&root).to_owned()),
        kind: String::from_utf8_lossy(kind).into_owned(),
        is_shared,
        device,
        source: OsStr::from_bytes(&source).to_owned(),
        options: options.map(|option| String::from_utf8_lossy(option).into_owned()).collect(),
    })
}

/// Decodes the octal escapes of mountinfo: a space is written as a backslash and three digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        if let (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..]) = (first, tail) {
            out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
            rest = after;
        } else {
            out.push(*first);
            rest = tail;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_lines_are_read() {
        let line = br"36 35 98:0 / /mnt/with\040space rw,noatime master:1 - fuse.ubtrfs /dev/loop0 rw,user_id=0";
        let mount = parse_mountinfo(line).unwrap();
        let options = ["rw", "noatime", "rw", "user_id=0"].map(str::to_owned).to_vec();
        let (dir, kind) = ("/mnt/with space".into(), "fuse.ubtrfs".into());
        let expected = MountInfo {
            id: 36,
            parent: 35,
            dir,
            root: "/".into(),
            kind,
            is_shared: false,
            device: b"98:0".to_vec(),
            source: "/dev/loop0".into(),
            options,
        };
        assert_eq!(mount, expected);
        let shared = parse_mountinfo(br"36 35 98:0 / /mnt rw master:1 shared:2 - fuse.ubtrfs /dev/loop0 rw").unwrap();
        assert!(shared.is_shared && shared.source == "/dev/loop0");
        assert_eq!(parse_mountinfo(b""), None);
    }
}
