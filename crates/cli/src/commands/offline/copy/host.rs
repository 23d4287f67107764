//! The host's files as an end of a copy.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;

use anyhow::Context;
use rustix::fs::{AtFlags, CWD, Dev, FileType, Mode, SeekFrom, Timestamps, XattrFlags};
use ubtrfs_format::item::Timespec;
use ubtrfs_fs::mode;

use super::super::text::printable;
use super::super::{COPY_LEN, os_string, type_of};
use super::{From, Info, Piece, To};

/// This system's files.
pub(super) struct Host;

fn host_path(path: &[u8]) -> PathBuf {
    PathBuf::from(os_string(path))
}

impl From for Host {
    fn info(&self, path: &[u8], follow: bool) -> anyhow::Result<Option<Info>> {
        let path = host_path(path);
        let meta = match if follow { fs::metadata(&path) } else { fs::symlink_metadata(&path) } {
            Ok(meta) => meta,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("{}", path.display())),
        };
        let time = |sec, nsec: i64| Timespec { sec, nsec: u32::try_from(nsec).unwrap_or_default() };
        Ok(Some(Info {
            mode: meta.mode(),
            uid: meta.uid(),
            gid: meta.gid(),
            major: rustix::fs::major(meta.rdev()),
            minor: rustix::fs::minor(meta.rdev()),
            size: meta.size(),
            nlink: meta.nlink(),
            atime: time(meta.atime(), meta.atime_nsec()),
            mtime: time(meta.mtime(), meta.mtime_nsec()),
            identity: (meta.dev(), meta.ino()),
            id: None,
        }))
    }

    fn names(&self, path: &[u8]) -> anyhow::Result<Vec<Vec<u8>>> {
        let entries = fs::read_dir(host_path(path))?;
        entries.map(|entry| Ok(entry?.file_name().into_vec())).collect()
    }

    fn read_link(&self, path: &[u8]) -> anyhow::Result<Vec<u8>> {
        Ok(fs::read_link(host_path(path))?.into_os_string().into_vec())
    }

    fn xattrs(&self, path: &[u8]) -> anyhow::Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let path = host_path(path);
        let mut list = vec![0; XATTR_MAX];
        let len = match rustix::fs::llistxattr(&path, &mut list[..]) {
            Ok(len) => len,
            Err(rustix::io::Errno::NOTSUP) => 0,
            Err(error) => return Err(error).context("cannot list its attributes"),
        };
        let mut xattrs = Vec::new();
        let mut value = vec![0; XATTR_MAX];
        for name in list[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            match rustix::fs::lgetxattr(&path, os_string(name), &mut value[..]) {
                Ok(len) => xattrs.push((name.to_vec(), value[..len].to_vec())),
                // Some are listed and not shown (trusted.* to others than root), or went meanwhile.
                Err(rustix::io::Errno::NODATA | rustix::io::Errno::PERM | rustix::io::Errno::NOTSUP) => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot read its attribute {}", printable(name)));
                }
            }
        }
        Ok(xattrs)
    }

    fn data(&self, path: &[u8], info: &Info, piece: Piece<'_>) -> anyhow::Result<()> {
        let file = File::open(host_path(path))?;
        let mut buf = vec![0; COPY_LEN.min(usize::try_from(info.size).unwrap_or(COPY_LEN).max(1))];
        let mut at = 0;
        // The file may grow or shrink meanwhile: it is copied up to where it ends now.
        loop {
            match rustix::fs::seek(&file, SeekFrom::Data(at)) {
                Ok(start) => at = start,
                Err(rustix::io::Errno::NXIO) => return Ok(()),
                Err(rustix::io::Errno::INVAL) => {}
                Err(error) => return Err(error.into()),
            }
            let end = rustix::fs::seek(&file, SeekFrom::Hole(at)).unwrap_or(u64::MAX);
            while at < end {
                let len = buf.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
                let count = file.read_at(&mut buf[..len], at)?;
                if count == 0 {
                    return Ok(());
                }
                piece(at, &buf[..count])?;
                at += count as u64;
            }
        }
    }
}

impl To for Host {
    fn make_dir(&self, path: &[u8], mode: u32) -> anyhow::Result<()> {
        // Writable until its end, whatever its mode.
        fs::DirBuilder::new().mode((mode & 0o777) | 0o700).create(host_path(path))?;
        Ok(())
    }

    fn make_link(&self, path: &[u8], target: &[u8]) -> anyhow::Result<()> {
        Ok(std::os::unix::fs::symlink(os_string(target), host_path(path))?)
    }

    fn make_special(&self, path: &[u8], info: &Info) -> anyhow::Result<()> {
        let kind = match type_of(info.mode) {
            mode::CHAR => FileType::CharacterDevice,
            mode::BLOCK => FileType::BlockDevice,
            mode::SOCKET => FileType::Socket,
            _ => FileType::Fifo,
        };
        let dev: Dev = match kind {
            FileType::CharacterDevice | FileType::BlockDevice => rustix::fs::makedev(info.major, info.minor),
            _ => 0,
        };
        let mode = Mode::from_raw_mode(info.mode & 0o777);
        rustix::fs::mknodat(CWD, host_path(path), kind, mode, dev).context("cannot make the special file")
    }

    fn make_file(
        &self,
        path: &[u8],
        info: &Info,
        fill: &mut dyn FnMut(Piece<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(info.mode & 0o777).open(host_path(path))?;
        fill(&mut |offset, bytes| Ok(file.write_all_at(bytes, offset)?))?;
        // A hole at the end.
        Ok(file.set_len(info.size)?)
    }

    fn hard_link(&self, old: &[u8], new: &[u8]) -> anyhow::Result<()> {
        Ok(fs::hard_link(host_path(old), host_path(new))?)
    }

    fn unlink(&self, path: &[u8]) -> anyhow::Result<()> {
        Ok(fs::remove_file(host_path(path))?)
    }

    fn set_owner(&self, path: &[u8], owner: (u32, u32), bits: u32) -> anyhow::Result<()> {
        let path = host_path(path);
        match std::os::unix::fs::lchown(&path, Some(owner.0), Some(owner.1)) {
            // As cp -p: ordinary users keep what they can.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            other => other?,
        }
        if type_of(bits) != mode::SYMLINK {
            fs::set_permissions(&path, fs::Permissions::from_mode(bits & mode::PERMISSIONS))?;
        }
        Ok(())
    }

    fn set_xattrs(&self, path: &[u8], xattrs: &[(Vec<u8>, Vec<u8>)]) -> anyhow::Result<()> {
        use rustix::io::Errno;
        let path = host_path(path);
        for (name, value) in xattrs {
            match rustix::fs::lsetxattr(&path, os_string(name), value, XattrFlags::empty()) {
                Ok(()) => {}
                Err(Errno::PERM | Errno::NOTSUP | Errno::ACCESS) => {
                    eprintln!("ubtrfs: {}: attribute {} is not taken here", path.display(), printable(name));
                }
                Err(error) => return Err(error).with_context(|| format!("cannot set {}", printable(name))),
            }
        }
        Ok(())
    }

    fn set_times(&self, path: &[u8], info: &Info) -> anyhow::Result<()> {
        let time = |time: Timespec| rustix::fs::Timespec { tv_sec: time.sec, tv_nsec: time.nsec.into() };
        let times = Timestamps { last_access: time(info.atime), last_modification: time(info.mtime) };
        rustix::fs::utimensat(CWD, host_path(path), &times, AtFlags::SYMLINK_NOFOLLOW).context("cannot set its times")
    }
}

/// Largest attribute, and list of attributes, of Linux.
const XATTR_MAX: usize = 64 << 10;
