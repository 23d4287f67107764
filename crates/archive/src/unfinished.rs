//! The temporary files of this process: files of the host that do not have their final names yet. A program that is
//! interrupted removes them with [`remove_all`].
//!
//! Invariants:
//! - I1. A temporary file is made and recorded in one step under the lock. [`remove_all`] keeps the lock, so no file is
//!   made after the recorded files are removed.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::AtFlags;

/// A recorded temporary file, until this value is dropped.
#[derive(Debug)]
pub(crate) struct RegisteredFile(u64);

#[derive(Debug, Default)]
struct UnfinishedFiles {
    next: u64,
    noted: Vec<(u64, OwnedFd, String)>,
}

static FILES: Mutex<UnfinishedFiles> = Mutex::new(UnfinishedFiles { next: 0, noted: Vec::new() });

/// Makes a temporary file and records it (I1).
pub(crate) fn make<T, E>(
    dir: &OwnedFd,
    name: &str,
    make: impl FnOnce() -> Result<T, E>,
) -> Result<(T, Option<RegisteredFile>), E> {
    let mut files = lock();
    let made = make()?;
    // If the directory handle cannot be duplicated, the file is not recorded. The only harm is that an interrupt does
    // not remove the file.
    let noted = dir.try_clone().ok().map(|dir| {
        let id = files.next;
        files.next += 1;
        files.noted.push((id, dir, name.to_owned()));
        RegisteredFile(id)
    });
    Ok((made, noted))
}

/// Removes the temporary files. While the result exists, every thread that makes or completes such a file waits (I1).
/// Errors are ignored, because the program ends.
pub fn remove_all() -> RemovedFiles {
    let files = lock();
    for (_, dir, name) in &files.noted {
        let _ = rustix::fs::unlinkat(dir, name.as_str(), AtFlags::empty());
    }
    RemovedFiles { _files: files }
}

/// The lock that [`remove_all`] keeps.
#[derive(Debug)]
pub struct RemovedFiles {
    _files: MutexGuard<'static, UnfinishedFiles>,
}

impl Drop for RegisteredFile {
    fn drop(&mut self) {
        lock().noted.retain(|(id, ..)| *id != self.0);
    }
}

fn lock() -> MutexGuard<'static, UnfinishedFiles> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}
