//! Exclusive use of an image file or block device: locks the file or device, and refuses a file or device that is
//! mounted or in use.
//!
//! | | image file | block device |
//! |---|---|---|
//! | read-write | flock exclusive; its unused loop devices held with O_EXCL | O_EXCL (see I2), and flock: exclusive for a moment, then shared |
//! | read-only | flock shared | flock shared, and nobody has O_EXCL |
//! | both | refused if mounted, directly or through a loop device | refused if mounted |
//!
//! - I1. The lock on a block device includes its parts (the file behind a loop device, the devices below a device
//!   mapper's device), because a file and the loop device over it are one image.
//! - I2. If this process serves a mount of type `fuseblk`, the exclusive claim (O_EXCL) passes to the kernel's mount,
//!   and the process keeps the flock.
//! - I3. All processes lock the devices of a filesystem in the same order ([`lock_order`]). So of several processes that open
//!   it at once, one gets all devices.
//! - I4. Device managers lock block devices while they look at them, and skip devices that are locked exclusively. So a
//!   device that is open has a shared lock. The claim keeps other writers away, and readers find it.
//! - I5. A program may lock a block device for the commands that it runs on it (<https://systemd.io/BLOCK_DEVICE_LOCKING>).
//!   So a lock of a process that started this one keeps nobody away; the claim does.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::file::Access;
use crate::mounted::{self, KernelUse};
use crate::nbd_device::is_url;
use crate::open_error::OpenError;

/// Fails if an open image file or block device is in use, also under another path: locked by a process, or mounted or
/// held by the kernel. On success, `file` holds the lock until it is closed.
pub fn refuse_in_use(file: &File, path: &Path) -> Result<(), OpenError> {
    let metadata = file.metadata().map_err(|source| OpenError::Io { path: path.to_owned(), source })?;
    if check_kind(path, &metadata)? {
        refuse_mounted_block_device(path, metadata.rdev())?;
        lock(file, path, Access::ReadWrite, &metadata)?;
        return lock_parts(path, Access::ReadWrite, metadata.rdev()).map(drop);
    }
    lock(file, path, Access::ReadWrite, &metadata)?;
    claim_image(path, Access::ReadOnly, &metadata).map(drop)
}

/// The order in which the devices of a filesystem are locked, as indexes of `paths` (I3).
pub fn lock_order(paths: &[PathBuf]) -> Vec<usize> {
    let place = |path: &PathBuf| {
        let metadata = std::fs::metadata(path).ok().filter(|_| !is_url(path))?;
        let of_block = |rdev| mounted::loop_file(rdev).map_or((true, rdev, 0), |(dev, ino)| (false, dev, ino));
        Some(match metadata.file_type().is_block_device() {
            true => of_block(metadata.rdev()),
            false => (false, metadata.dev(), metadata.ino()),
        })
    };
    let mut order: Vec<usize> = (0..paths.len()).collect();
    // URLs come first.
    order.sort_by_cached_key(|index| {
        paths.get(*index).map(|path| (place(path), Some(path.as_os_str().to_owned()).filter(|_| is_url(path))))
    });
    order
}

/// Takes the kernel's exclusive claim on the block device at `path`, which must have the device number `rdev`. The
/// claim lasts until the file is closed. It keeps others from mounting or claiming the device, but not from opening it
/// without a claim.
///
/// # Errors
/// [`Errno::BUSY`] if another has claimed the device. Others may claim it for a moment, to test whether it is in use.
pub fn claim_block_device(path: &Path, rdev: u64) -> io::Result<File> {
    let file = mounted::open_exclusive(path)?;
    match file.metadata()?.rdev() == rdev {
        true => Ok(file),
        false => Err(io::Error::other("the path names another device by now")),
    }
}

/// Works like [`claim_block_device`], but waits for claims that last only a moment: those that test whether a device is in
/// use, and those of a process that is ending. It lets the locks and the claims go one after another.
pub(crate) fn claim_soon(path: &Path, rdev: u64) -> io::Result<File> {
    let is_claimed = |outcome: &io::Result<File>| outcome.as_ref().is_err_and(mounted::is_busy);
    while_claimed(|| claim_block_device(path, rdev), is_claimed)
}

/// Repeats an attempt as long as the outcome shows a claim, but not longer than claims last that are only for a moment.
fn while_claimed<T>(attempt: impl Fn() -> T, is_claimed: impl Fn(&T) -> bool) -> T {
    let begun = Instant::now();
    loop {
        let outcome = attempt();
        if !is_claimed(&outcome) || begun.elapsed() >= CLAIM_PATIENCE {
            return outcome;
        }
        std::thread::sleep(CLAIM_PAUSE);
    }
}

/// Locks the files and devices that a block device is made of (I1).
pub(crate) fn lock_parts(path: &Path, access: Access, rdev: u64) -> Result<Vec<File>, OpenError> {
    let mut locked = Vec::new();
    for part in mounted::parts_of_block_device(rdev) {
        let in_use = |backing| OpenError::BackingInUse { path: path.to_owned(), backing: Box::new(backing) };
        // Skip a part that this user cannot open: another user has attached it and is responsible for it.
        let open = |write| File::options().read(true).write(write).open(&part);
        let Ok(file) = open(access == Access::ReadWrite).or_else(|_| open(false)) else { continue };
        let Ok(metadata) = file.metadata() else { continue };
        lock(&file, &part, access, &metadata).map_err(in_use)?;
        locked.push(file);
    }
    Ok(locked)
}

pub(crate) fn refuse_mounted_block_device(path: &Path, rdev: u64) -> Result<(), OpenError> {
    mounted::use_of_block_device(rdev).map_or(Ok(()), |kernel_use| Err(in_use(path, None, kernel_use)))
}

pub(crate) fn claim_image(path: &Path, access: Access, metadata: &Metadata) -> Result<Vec<File>, OpenError> {
    let hold = access == Access::ReadWrite;
    let claimed = while_claimed(
        || mounted::use_of_image(metadata.dev(), metadata.ino(), hold),
        |claimed| matches!(claimed, Err((_, KernelUse::Exclusive))),
    );
    claimed.map_err(|(node, kernel_use)| in_use(path, Some(node), kernel_use))
}

fn in_use(path: &Path, through: Option<PathBuf>, kernel_use: KernelUse) -> OpenError {
    let path = path.to_owned();
    match kernel_use {
        KernelUse::Mounted(at) => OpenError::Mounted { path, through, at: Some(at) },
        KernelUse::Served { at, kind } => OpenError::Served { path, through, at, kind },
        KernelUse::Exclusive => OpenError::Mounted { path, through, at: None },
    }
}

/// Takes the advisory lock. Retries, because device managers lock block devices briefly while they probe them.
pub(crate) fn lock(file: &File, path: &Path, access: Access, metadata: &Metadata) -> Result<(), OpenError> {
    let operation = match access {
        Access::ReadOnly => FlockOperation::NonBlockingLockShared,
        Access::ReadWrite => FlockOperation::NonBlockingLockExclusive,
    };
    // Image files are retried too: if the previous holder of the lock forked a process, that process shares the lock
    // until its exec.
    let patience = if metadata.file_type().is_block_device() { PROBE_PATIENCE } else { FORK_PATIENCE };
    let begun = Instant::now();
    loop {
        match rustix::fs::flock(file, operation) {
            Ok(()) => return Ok(()),
            // If the filesystem of the file does not support locks, the file is opened without a lock.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOLCK) => return Ok(()),
            Err(Errno::WOULDBLOCK) => {}
            Err(errno) => return Err(OpenError::Io { path: path.to_owned(), source: errno.into() }),
        }
        if is_locked_for_us(file, metadata) {
            lock_later(file);
            return Ok(());
        }
        if begun.elapsed() >= patience {
            if mounted::is_locked_here(metadata.dev(), metadata.ino()) {
                return Err(OpenError::OpenHere { path: path.to_owned() });
            }
            let holder = mounted::lock_holder(metadata.dev(), metadata.ino());
            // The kernel releases the files of io_uring some time after a process has ended. It shows no holder then.
            let has_ended = holder.is_none() || mounted::is_lock_holder_ending(metadata.dev(), metadata.ino());
            if !has_ended || begun.elapsed() >= ENDED_PATIENCE {
                return Err(OpenError::Locked { path: path.to_owned(), by: holder });
            }
        }
        std::thread::sleep(Duration::from_millis(25));
    }
}

/// Whether a process that started this one has locked the block device, and nobody has claimed it (I5).
fn is_locked_for_us(file: &File, metadata: &Metadata) -> bool {
    metadata.file_type().is_block_device()
        && mounted::is_locked_by_ancestor(metadata.dev(), metadata.ino())
        && !is_claimed(file)
}

/// Takes a shared lock as soon as the others let it go, unless the file is closed before.
fn lock_later(file: &File) {
    let Ok(file) = file.try_clone() else { return };
    let wait = move || {
        let _ = rustix::fs::flock(&file, FlockOperation::LockShared);
    };
    let _ = std::thread::Builder::new().name("device-lock".to_owned()).spawn(wait);
}

/// Whether somebody has claimed a block device. Others test that in the same way, so a claim counts if it lasts.
fn is_claimed(file: &File) -> bool {
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    (0..CLAIM_TESTS).all(|test| {
        if test > 0 {
            std::thread::sleep(CLAIM_PAUSE);
        }
        mounted::open_exclusive(&path).is_err_and(|error| mounted::is_busy(&error))
    })
}

/// Makes the lock of a block device shared, after the device was claimed (I4).
pub(crate) fn share_lock(file: &File) {
    // If another program gets the lock in between, this process has the claim all the same.
    let _ = rustix::fs::flock(file, FlockOperation::NonBlockingLockShared);
}

/// Fails if a writer has the block device open, whose lock is shared (I4).
pub(crate) fn refuse_claimed(file: &File, path: &Path, metadata: &Metadata) -> Result<(), OpenError> {
    if !is_claimed(file) {
        return Ok(());
    }
    if mounted::is_locked_here(metadata.dev(), metadata.ino()) {
        return Err(OpenError::OpenHere { path: path.to_owned() });
    }
    Err(OpenError::Locked { path: path.to_owned(), by: mounted::lock_holder(metadata.dev(), metadata.ino()) })
}

const CLAIM_TESTS: u32 = 10;
const CLAIM_PAUSE: Duration = Duration::from_millis(50);
/// How long the claim of a process that is ending, or that tests for claims, may last.
const CLAIM_PATIENCE: Duration = Duration::from_secs(1);
/// How long a device manager may hold the lock of a block device.
const PROBE_PATIENCE: Duration = Duration::from_millis(500);
/// How long a forked process may take until its exec.
const FORK_PATIENCE: Duration = Duration::from_millis(200);
/// How long the kernel may take to release the lock of a process that was killed or has ended.
const ENDED_PATIENCE: Duration = Duration::from_secs(3);

/// Whether this is a block device. Fails if the file is neither a block device nor a regular file.
pub(crate) fn check_kind(path: &Path, metadata: &Metadata) -> Result<bool, OpenError> {
    let kind = metadata.file_type();
    let refuse = |what| Err(OpenError::NotRegular { path: path.to_owned(), what });
    match () {
        () if kind.is_block_device() => Ok(true),
        () if kind.is_file() => Ok(false),
        () if kind.is_dir() => refuse("a directory"),
        () if kind.is_char_device() => refuse("a character device"),
        () if kind.is_fifo() => refuse("a pipe"),
        () => refuse("a special file"),
    }
}
