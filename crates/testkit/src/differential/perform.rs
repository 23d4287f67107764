//! Performs a call on one side of the pair: makes the system call below the mount point, and returns the answer as
//! comparable fields.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread::ThreadId;

use rustix::fs::{
    Access, AtFlags, CWD, FallocateFlags, FileType, FlockOperation, IFlags, Mode, OFlags, RawDir, RenameFlags,
    SeekFrom, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, XattrFlags,
};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};

use super::call::{Call, Kind, Seek, Time, name_bytes};
use super::helper::Helper;
use super::observe;
use crate::tree_entry::{join, xxh64};

/// The number of slots for open files.
pub(crate) const NR_SLOTS: usize = 6;

/// The answer of a call: fields by name, or an error.
pub(crate) type Answer = Result<Vec<(String, String)>, Errno>;

/// One side: its mount point and its open files.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) root: PathBuf,
    pub(crate) slots: Vec<Option<OwnedFd>>,
    /// The helper with the key `None` makes the calls on all mappings. Every other helper makes ioctls for the thread
    /// that is its key.
    pub(crate) helpers: HashMap<Option<ThreadId>, Helper>,
    /// The program that makes snapshots on this side, if the ioctl is not used.
    pub(crate) snapshots_by: Option<PathBuf>,
}

impl Side {
    pub(crate) fn new(root: &Path) -> Self {
        let slots = std::iter::repeat_with(|| None).take(NR_SLOTS).collect();
        Self { root: root.to_owned(), slots, helpers: HashMap::new(), snapshots_by: None }
    }

    /// Converts a path of a call to a full path.
    pub(crate) fn full(&self, path: &str) -> PathBuf {
        full(&self.root, path)
    }

    pub(crate) fn slot(&self, slot: usize) -> Result<&OwnedFd, Errno> {
        self.slots.get(slot).and_then(Option::as_ref).ok_or(Errno::BADF)
    }

    /// Performs a call with the credentials of the calling thread.
    pub(crate) fn perform(&mut self, call: &Call) -> Answer {
        match call {
            Call::Open { slot, path, flags, mode } => self.open(*slot, path, *flags, *mode),
            Call::Close { slot } => {
                self.slots[*slot] = None;
                nothing()
            }
            Call::Lseek { .. }
            | Call::Read { .. }
            | Call::Pread { .. }
            | Call::Write { .. }
            | Call::Pwrite { .. }
            | Call::Ftruncate { .. }
            | Call::Fallocate { .. }
            | Call::CopyFileRange { .. }
            | Call::Fsync { .. }
            | Call::Fchmod { .. }
            | Call::Fchown { .. }
            | Call::Flock { .. }
            | Call::Getdents { .. }
            | Call::Rewind { .. }
            | Call::LinkSlot { .. } => self.on_slot(call),
            Call::Setxattr { .. }
            | Call::SetAcl { .. }
            | Call::SetProperty { .. }
            | Call::Getxattr { .. }
            | Call::Removexattr { .. }
            | Call::Listxattr { .. } => self.on_xattr(call),
            _ if call.is_of_mapping() || call.is_of_subvolumes() => self.by_helper(call),
            _ => self.on_path(call),
        }
    }

    fn open(&mut self, slot: usize, path: &str, flags: u32, mode: u32) -> Answer {
        // Opening a FIFO must not block, and opening a terminal must not make it the controlling terminal.
        let flags = OFlags::from_bits_retain(flags) | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::open(self.full(path), flags, Mode::from_raw_mode(mode))?;
        self.slots[slot] = Some(file);
        nothing()
    }

    fn on_slot(&mut self, call: &Call) -> Answer {
        match call {
            Call::Read { slot, len } => {
                let mut buf = vec![0; *len];
                let done = rustix::io::read(self.slot(*slot)?, &mut buf[..])?;
                data(&buf[..done])
            }
            Call::Pread { slot, at, len } => {
                let mut buf = vec![0; *len];
                let done = rustix::io::pread(self.slot(*slot)?, &mut buf[..], *at)?;
                data(&buf[..done])
            }
            Call::Write { slot, data } => number(rustix::io::write(self.slot(*slot)?, &data.bytes())? as u64),
            Call::Pwrite { slot, at, data } => {
                number(rustix::io::pwrite(self.slot(*slot)?, &data.bytes(), *at)? as u64)
            }
            Call::Lseek { slot, whence, at } => {
                let unsigned = u64::try_from(*at).map_err(|_| Errno::INVAL);
                let from = match whence {
                    Seek::Set => SeekFrom::Start(unsigned?),
                    Seek::Current => SeekFrom::Current(*at),
                    Seek::End => SeekFrom::End(*at),
                    Seek::Data => return self.seek_data(*slot, unsigned?),
                    Seek::Hole => SeekFrom::Hole(unsigned?),
                };
                let file = self.slot(*slot)?;
                let position = rustix::fs::seek(file, from)?;
                if *whence != Seek::Hole {
                    return number(position);
                }
                rustix::fs::seek(file, SeekFrom::Start(unsigned?))?;
                Ok(vec![("position".to_owned(), position.to_string())])
            }
            Call::Ftruncate { slot, len } => done(rustix::fs::ftruncate(self.slot(*slot)?, *len)),
            Call::Fallocate { slot, mode, at, len } => {
                let flags = FallocateFlags::from_bits_retain(*mode);
                done(rustix::fs::fallocate(self.slot(*slot)?, flags, *at, *len))
            }
            Call::CopyFileRange { from, from_at, to, to_at, len } => {
                let (mut from_at, mut to_at) = (*from_at, *to_at);
                let (from, to) = (self.slot(*from)?, self.slot(*to)?);
                let mut copied = 0;
                // Repeat the call, because Linux's btrfs first shares the whole blocks and returns their length, which
                // is less than requested.
                while copied < *len {
                    match rustix::fs::copy_file_range(from, Some(&mut from_at), to, Some(&mut to_at), *len - copied) {
                        Ok(0) => break,
                        Ok(more) => copied += more,
                        Err(errno) if copied == 0 => return Err(errno),
                        Err(_) => break,
                    }
                }
                number(copied as u64)
            }
            Call::Fsync { slot, data_only: true } => done(rustix::fs::fdatasync(self.slot(*slot)?)),
            Call::Fsync { slot, data_only: false } => done(rustix::fs::fsync(self.slot(*slot)?)),
            Call::Fchmod { slot, mode } => done(rustix::fs::fchmod(self.slot(*slot)?, Mode::from_raw_mode(*mode))),
            Call::Fchown { slot, uid, gid } => {
                done(rustix::fs::fchown(self.slot(*slot)?, uid.map(Uid::from_raw), gid.map(Gid::from_raw)))
            }
            Call::Flock { slot, exclusive } => {
                let operation = match exclusive {
                    None => FlockOperation::NonBlockingUnlock,
                    Some(false) => FlockOperation::NonBlockingLockShared,
                    Some(true) => FlockOperation::NonBlockingLockExclusive,
                };
                done(rustix::fs::flock(self.slot(*slot)?, operation))
            }
            Call::Getdents { slot, entries } => self.getdents(*slot, *entries),
            Call::Rewind { slot } => number(rustix::fs::seek(self.slot(*slot)?, SeekFrom::Start(0))?),
            Call::LinkSlot { slot, to } => {
                // Link as `ln -L /proc/self/fd/N` does, because this way needs no capability.
                use std::os::fd::AsRawFd;
                let from = format!("/proc/self/fd/{}", self.slot(*slot)?.as_raw_fd());
                done(rustix::fs::linkat(CWD, from, CWD, self.full(to), AtFlags::SYMLINK_FOLLOW))
            }
            _ => Err(Errno::NOSYS),
        }
    }

    /// Seeks data from `at`. A filesystem may store blocks of zeros as holes or as data, but every range that is
    /// reported as a hole must contain only zeros. Afterwards the position is set to `at`, so that it is equal on both
    /// sides.
    fn seek_data(&self, slot: usize, at: u64) -> Answer {
        let file = self.slot(slot)?;
        let size = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
        let found = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(found) => found,
            Err(Errno::NXIO) if at < size => size,
            Err(errno) => return Err(errno),
        };
        rustix::fs::seek(file, SeekFrom::Start(at))?;
        let zeros = observe::is_zeros(file, at, found);
        Ok(vec![("position".to_owned(), found.to_string()), ("passes over data".to_owned(), (!zeros).to_string())])
    }

    /// Continues to read a directory with a small buffer, until it has read at least `entries` entries.
    fn getdents(&self, slot: usize, entries: usize) -> Answer {
        let mut buf = [MaybeUninit::uninit(); 400];
        let mut dir = RawDir::new(self.slot(slot)?, &mut buf);
        let mut names = Vec::new();
        // Use up each buffer, because unread entries in it would be lost.
        while names.len() < entries || !dir.is_buffer_empty() {
            let Some(entry) = dir.next() else { break };
            let entry = entry?;
            names.push(format!("{}={:?}", entry.file_name().to_bytes().escape_ascii(), entry.file_type()));
        }
        Ok(vec![("entries".to_owned(), names.join(" "))])
    }

    fn on_xattr(&self, call: &Call) -> Answer {
        match call {
            Call::Setxattr { path, name, value, flags } => {
                let flags = XattrFlags::from_bits_retain(*flags);
                done(rustix::fs::lsetxattr(self.full(path), name.as_str(), &value.bytes(), flags))
            }
            Call::SetAcl { path, default, acl } => {
                let name = if *default { "system.posix_acl_default" } else { "system.posix_acl_access" };
                done(rustix::fs::lsetxattr(self.full(path), name, &acl_bytes(acl), XattrFlags::empty()))
            }
            Call::SetProperty { path, value } => {
                done(rustix::fs::lsetxattr(self.full(path), "btrfs.compression", value.as_bytes(), XattrFlags::empty()))
            }
            Call::Getxattr { path, name } => {
                let mut value = vec![0; 64 << 10];
                let len = rustix::fs::lgetxattr(self.full(path), name.as_str(), &mut value[..])?;
                data(&value[..len])
            }
            Call::Removexattr { path, name } => done(rustix::fs::lremovexattr(self.full(path), name.as_str())),
            Call::Listxattr { path } => {
                Ok(vec![("names".to_owned(), observe::xattr_names(&self.full(path))?.join(" "))])
            }
            _ => Err(Errno::NOSYS),
        }
    }

    fn on_path(&self, call: &Call) -> Answer {
        match call {
            Call::Truncate { path, len } => {
                let file = rustix::fs::open(
                    self.full(path),
                    OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC,
                    Mode::empty(),
                )?;
                done(rustix::fs::ftruncate(file, *len))
            }
            Call::Mkdir { path, mode } => done(rustix::fs::mkdir(self.full(path), Mode::from_raw_mode(*mode))),
            Call::Mknod { path, kind, mode, major, minor } => {
                let kind = match kind {
                    Kind::File => FileType::RegularFile,
                    Kind::Fifo => FileType::Fifo,
                    Kind::Socket => FileType::Socket,
                    Kind::CharDevice => FileType::CharacterDevice,
                    Kind::BlockDevice => FileType::BlockDevice,
                };
                let device = rustix::fs::makedev(*major, *minor);
                done(rustix::fs::mknodat(CWD, self.full(path), kind, Mode::from_raw_mode(*mode), device))
            }
            Call::Symlink { path, target } => {
                assert!(!leads_out(target), "{target} leads out of the mount");
                done(rustix::fs::symlink(OsStr::from_bytes(&name_bytes(target)), self.full(path)))
            }
            Call::Link { from, to, follow } => {
                let flags = if *follow { AtFlags::SYMLINK_FOLLOW } else { AtFlags::empty() };
                done(rustix::fs::linkat(CWD, self.full(from), CWD, self.full(to), flags))
            }
            Call::Readlink { path } => data(rustix::fs::readlink(self.full(path), Vec::new())?.as_bytes()),
            Call::Unlink { path } => done(rustix::fs::unlink(self.full(path))),
            Call::Rmdir { path } => done(rustix::fs::rmdir(self.full(path))),
            Call::Rename { from, to, flags } => {
                let flags = RenameFlags::from_bits_retain(*flags);
                done(rustix::fs::renameat_with(CWD, self.full(from), CWD, self.full(to), flags))
            }
            Call::Chmod { path, mode } => done(rustix::fs::chmod(self.full(path), Mode::from_raw_mode(*mode))),
            Call::Chown { path, uid, gid, follow } => {
                let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
                done(rustix::fs::chownat(CWD, self.full(path), uid, gid, nofollow(*follow)))
            }
            Call::Utimens { path, atime, mtime, follow } => {
                let times = Timestamps { last_access: timespec(*atime), last_modification: timespec(*mtime) };
                done(rustix::fs::utimensat(CWD, self.full(path), &times, nofollow(*follow)))
            }
            Call::GetFlags { path } => {
                let flags = rustix::fs::ioctl_getflags(self.for_ioctl(path)?)?;
                Ok(vec![("flags".to_owned(), format!("{:#x}", flags.bits()))])
            }
            Call::SetFlags { path, flags } => {
                done(rustix::fs::ioctl_setflags(self.for_ioctl(path)?, IFlags::from_bits_retain(*flags)))
            }
            Call::Stat { path, follow: true } => Ok(observe::stat_fields(&rustix::fs::stat(self.full(path))?)),
            Call::Stat { path, follow: false } => Ok(observe::stat_fields(&rustix::fs::lstat(self.full(path))?)),
            Call::Access { path, mode, effective } => {
                let flags = if *effective { AtFlags::EACCESS } else { AtFlags::empty() };
                done(rustix::fs::accessat(CWD, self.full(path), Access::from_bits_retain(*mode), flags))
            }
            Call::Readdir { path } => self.readdir(path),
            _ => Err(Errno::NOSYS),
        }
    }

    fn for_ioctl(&self, path: &str) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::open(self.full(path), flags, Mode::empty())
    }

    fn readdir(&self, path: &str) -> Answer {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(self.full(path), flags, Mode::empty())?;
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::new(dir)? {
            let entry = entry?;
            names.push(format!("{}={:?}", entry.file_name().to_bytes().escape_ascii(), entry.file_type()));
        }
        Ok(vec![("entries".to_owned(), names.join(" "))])
    }
}

/// The full path of a path below a mount point.
///
/// # Panics
/// If the path would lead out of the mount.
pub(crate) fn full(root: &Path, path: &str) -> PathBuf {
    assert!(!leads_out(path), "{path} leads out of the mount");
    PathBuf::from(OsStr::from_bytes(&join(root.as_os_str().as_bytes(), &name_bytes(path))))
}

/// Whether a path, or a symlink with this target, may lead out of the mount.
fn leads_out(path: &str) -> bool {
    path.starts_with('/') || path.split('/').any(|name| name == "..")
}

fn nofollow(follow: bool) -> AtFlags {
    if follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW }
}

fn timespec(time: Time) -> Timespec {
    match time {
        Time::Now => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Time::Omit => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Time::At(sec, nsec) => Timespec { tv_sec: sec, tv_nsec: nsec.into() },
    }
}

/// Encodes an ACL as an extended attribute: version 2, then tag, permissions and id of each entry.
fn acl_bytes(acl: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut out = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in acl {
        out.extend(tag.to_le_bytes());
        out.extend(permissions.to_le_bytes());
        out.extend(id.to_le_bytes());
    }
    out
}

fn nothing() -> Answer {
    Ok(Vec::new())
}

fn done(result: Result<(), Errno>) -> Answer {
    result.map(|()| Vec::new())
}

fn number(value: u64) -> Answer {
    Ok(vec![("returned".to_owned(), value.to_string())])
}

fn data(bytes: &[u8]) -> Answer {
    let shown = bytes[..bytes.len().min(24)].escape_ascii();
    Ok(vec![("data".to_owned(), format!("{} bytes, hash {:016x}, {shown}", bytes.len(), xxh64(bytes)))])
}
