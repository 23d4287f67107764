//! Answers: how a result of `fs` becomes what the kernel hears.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::UNIX_EPOCH;

use fuser::{
    Errno, FileAttr, FileType, FopenFlags, INodeNo, ReplyAttr, ReplyCreate, ReplyData, ReplyEmpty, ReplyEntry,
    ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
};
use ubtrfs_fs::{Error, Fs, Result};

/// Runs `work`, then answers with `done` or the errno. A panic answers EIO and stops all committing.
pub(crate) fn answer<R: Refuse, T>(fs: &Fs, reply: R, work: impl FnOnce() -> Result<T>, done: impl FnOnce(R, T)) {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => done(reply, value),
        Ok(Err(error)) => {
            if let Error::Engine(cause) = &error
                && matches!(cause, ubtrfs_format::Error::Corrupt(_) | ubtrfs_format::Error::Io { .. })
            {
                tracing::error!("{cause}");
            }
            reply.refuse(Errno::from_i32(error.errno()));
        }
        Err(_) => {
            crate::session::abort(fs, "a request handler panicked");
            reply.refuse(Errno::EIO);
        }
    }
}

/// A value whose size is asked for first (`size` 0), or that must fit.
pub(crate) fn sized_answer(reply: ReplyXattr, value: &[u8], size: u32) {
    if size == 0 {
        reply.size(u32::try_from(value.len()).unwrap_or(u32::MAX));
    } else if value.len() > size as usize {
        reply.error(Errno::ERANGE);
    } else {
        reply.data(value);
    }
}

/// Cached pages stay valid across opens, and direct writes may run side by side.
pub(crate) const OPEN_FLAGS: FopenFlags = FopenFlags::FOPEN_KEEP_CACHE.union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);

/// The attributes of an entry that says a name does not exist.
pub(crate) const NO_ATTR: FileAttr = FileAttr {
    ino: INodeNo(0),
    size: 0,
    blocks: 0,
    atime: UNIX_EPOCH,
    mtime: UNIX_EPOCH,
    ctime: UNIX_EPOCH,
    crtime: UNIX_EPOCH,
    kind: FileType::RegularFile,
    perm: 0,
    nlink: 0,
    uid: 0,
    gid: 0,
    rdev: 0,
    blksize: 0,
    flags: 0,
};

/// Answers that can carry an errno.
pub(crate) trait Refuse {
    fn refuse(self, errno: Errno);
}

macro_rules! refuse {
    ($($reply:ty),*) => { $(impl Refuse for $reply {
        fn refuse(self, errno: Errno) {
            self.error(errno);
        }
    })* };
}

refuse!(
    ReplyAttr,
    ReplyCreate,
    ReplyData,
    ReplyEmpty,
    ReplyEntry,
    ReplyIoctl,
    ReplyLseek,
    ReplyOpen,
    ReplyStatfs,
    ReplyWrite,
    ReplyXattr
);

/// Catches an errno for answers that are filled while the work runs.
pub(crate) struct Caught<'a, T>(pub(crate) &'a mut std::result::Result<T, Errno>);

impl<T> Refuse for Caught<'_, T> {
    fn refuse(self, errno: Errno) {
        *self.0 = Err(errno);
    }
}
