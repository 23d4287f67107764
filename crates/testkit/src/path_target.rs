//! A mounted directory as a [`Target`] whose operations are plain system calls.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, RenameFlags, Timespec, Timestamps, UTIME_OMIT, XattrFlags,
};

use crate::target::{Errno, FallocateOp, NodeKind, RenameOp, Target};

/// A directory of the running system.
#[derive(Debug)]
pub struct PathTarget {
    root: PathBuf,
}

impl PathTarget {
    /// Makes a target from a directory. Clears the process's umask, so that new files get exactly the given modes.
    pub fn new(root: &Path) -> Self {
        rustix::process::umask(Mode::empty());
        Self { root: root.to_owned() }
    }

    fn full(&self, path: &[u8]) -> PathBuf {
        self.root.join(OsStr::from_bytes(path))
    }

    fn open(&self, path: &[u8], write: bool) -> Result<File, Errno> {
        // A random operation may have put a FIFO there. Without the flag, opening it would wait for another program.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        OpenOptions::new().read(true).write(write).custom_flags(flags).open(self.full(path)).map_err(io)
    }
}

impl Target for PathTarget {
    fn create(&mut self, path: &[u8], kind: NodeKind, mode: u32, rdev: (u32, u32)) -> Result<(), Errno> {
        let full = self.full(path);
        let mode = Mode::from_raw_mode(mode);
        let file_type = match kind {
            NodeKind::Directory => return rustix::fs::mkdir(full, mode).map_err(sys),
            NodeKind::Symlink => return Err(rustix::io::Errno::INVAL.raw_os_error()),
            NodeKind::File => FileType::RegularFile,
            NodeKind::Fifo => FileType::Fifo,
            NodeKind::Socket => FileType::Socket,
            NodeKind::CharDevice => FileType::CharacterDevice,
            NodeKind::BlockDevice => FileType::BlockDevice,
        };
        rustix::fs::mknodat(CWD, full, file_type, mode, rustix::fs::makedev(rdev.0, rdev.1)).map_err(sys)
    }

    fn symlink(&mut self, path: &[u8], content: &[u8]) -> Result<(), Errno> {
        rustix::fs::symlink(OsStr::from_bytes(content), self.full(path)).map_err(sys)
    }

    fn link(&mut self, old: &[u8], new: &[u8]) -> Result<(), Errno> {
        rustix::fs::linkat(CWD, self.full(old), CWD, self.full(new), AtFlags::empty()).map_err(sys)
    }

    fn unlink(&mut self, path: &[u8]) -> Result<(), Errno> {
        rustix::fs::unlink(self.full(path)).map_err(sys)
    }

    fn rmdir(&mut self, path: &[u8]) -> Result<(), Errno> {
        rustix::fs::rmdir(self.full(path)).map_err(sys)
    }

    fn rename(&mut self, old: &[u8], new: &[u8], op: RenameOp) -> Result<(), Errno> {
        let flags = match op {
            RenameOp::Replace => RenameFlags::empty(),
            RenameOp::NoReplace => RenameFlags::NOREPLACE,
            RenameOp::Exchange => RenameFlags::EXCHANGE,
        };
        rustix::fs::renameat_with(CWD, self.full(old), CWD, self.full(new), flags).map_err(sys)
    }

    fn write(&mut self, path: &[u8], offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.open(path, true)?.write_all_at(data, offset).map_err(io)
    }

    fn read(&mut self, path: &[u8], offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        let file = self.open(path, false)?;
        let mut buf = vec![0; len];
        let mut done = 0;
        while done < len {
            match file.read_at(&mut buf[done..], offset + done as u64).map_err(io)? {
                0 => break,
                more => done += more,
            }
        }
        buf.truncate(done);
        Ok(buf)
    }

    fn truncate(&mut self, path: &[u8], len_bytes: u64) -> Result<(), Errno> {
        self.open(path, true)?.set_len(len_bytes).map_err(io)
    }

    fn fallocate(&mut self, path: &[u8], offset: u64, len_bytes: u64, op: FallocateOp) -> Result<(), Errno> {
        let flags = match op {
            FallocateOp::Allocate => FallocateFlags::empty(),
            FallocateOp::KeepSize => FallocateFlags::KEEP_SIZE,
            FallocateOp::PunchHole => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            FallocateOp::ZeroRange => FallocateFlags::ZERO_RANGE,
        };
        rustix::fs::fallocate(self.open(path, true)?, flags, offset, len_bytes).map_err(sys)
    }

    fn copy_range(&mut self, from: &[u8], from_at: u64, to: &[u8], to_at: u64, len_bytes: u64) -> Result<(), Errno> {
        let source = self.open(from, false)?;
        let sink = self.open(to, true)?;
        let (mut source_at, mut sink_at, mut left) = (from_at, to_at, len_bytes);
        while left > 0 {
            let len = usize::try_from(left).unwrap_or(usize::MAX);
            let done = rustix::fs::copy_file_range(&source, Some(&mut source_at), &sink, Some(&mut sink_at), len)
                .map_err(sys)?;
            if done == 0 {
                break;
            }
            left -= done as u64;
        }
        Ok(())
    }

    fn chmod(&mut self, path: &[u8], mode: u32) -> Result<(), Errno> {
        rustix::fs::chmod(self.full(path), Mode::from_raw_mode(mode)).map_err(sys)
    }

    fn chown(&mut self, path: &[u8], uid: u32, gid: u32) -> Result<(), Errno> {
        std::os::unix::fs::lchown(self.full(path), Some(uid), Some(gid)).map_err(io)
    }

    fn set_mtime(&mut self, path: &[u8], mtime: (i64, u32)) -> Result<(), Errno> {
        let times = Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
            last_modification: Timespec { tv_sec: mtime.0, tv_nsec: mtime.1.into() },
        };
        rustix::fs::utimensat(CWD, self.full(path), &times, AtFlags::SYMLINK_NOFOLLOW).map_err(sys)
    }

    fn set_atime(&mut self, path: &[u8], atime: (i64, u32)) -> Result<(), Errno> {
        let times = Timestamps {
            last_access: Timespec { tv_sec: atime.0, tv_nsec: atime.1.into() },
            last_modification: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        };
        rustix::fs::utimensat(CWD, self.full(path), &times, AtFlags::SYMLINK_NOFOLLOW).map_err(sys)
    }

    fn set_flags(&mut self, path: &[u8], flags: u32) -> Result<(), Errno> {
        let file = self.open(path, false)?;
        rustix::fs::ioctl_setflags(&file, rustix::fs::IFlags::from_bits_retain(flags)).map_err(sys)
    }

    fn set_xattr(&mut self, path: &[u8], name: &[u8], value: &[u8]) -> Result<(), Errno> {
        rustix::fs::lsetxattr(self.full(path), OsStr::from_bytes(name), value, XattrFlags::empty()).map_err(sys)
    }

    fn remove_xattr(&mut self, path: &[u8], name: &[u8]) -> Result<(), Errno> {
        rustix::fs::lremovexattr(self.full(path), OsStr::from_bytes(name)).map_err(sys)
    }

    fn fsync(&mut self, path: &[u8]) -> Result<(), Errno> {
        self.open(path, false)?.sync_all().map_err(io)
    }

    fn sync(&mut self) -> Result<(), Errno> {
        let dir = File::open(&self.root).map_err(io)?;
        rustix::fs::syncfs(dir).map_err(sys)
    }
}

fn sys(error: rustix::io::Errno) -> Errno {
    error.raw_os_error()
}

#[allow(clippy::needless_pass_by_value, reason = "the shape that map_err takes")]
fn io(error: std::io::Error) -> Errno {
    error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error())
}
