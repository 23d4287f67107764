//! [`WritebackErrors`]: records the files whose data could not be written back, and the last failure that was reported
//! to each file descriptor.
//!
//! Linux keeps a writeback error with the file. Linux reports the error once to each descriptor that was open when the
//! error happened. An error that was not reported to any descriptor is reported to the next descriptor that is opened.
//! ubtrfs reports errors in the same way. Unlike Linux, ubtrfs keeps the data: the data stays dirty, every fsync tries
//! to write it again, and fsync fails until the write succeeds, even if the error was reported before.
//!
//! Invariants:
//! - I1: descriptors and failures take their numbers from one clock, so of two, the one with the lower number came
//!   first.
//! - I2: a descriptor has no entry until a failure is reported to it. So opening takes no lock, and closing takes a
//!   lock only while some descriptor has an entry.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::types::InodeId;
use crate::{Error, Fs, Result};

/// The number of an open file, for [`Fs::fsync_descriptor`]. No file has number 0.
pub type Descriptor = u64;

/// The failures of writeback.
#[derive(Debug, Default)]
pub(crate) struct WritebackErrors {
    /// The highest number given to a descriptor or a failure so far (I1).
    clock: AtomicU64,
    /// Number of failures since the filesystem was opened.
    nr_failures: AtomicU64,
    /// Number of files that have data which could not be written.
    nr_failing: AtomicU64,
    /// The number of descriptors in [`FailureTable::reported`].
    nr_reported: AtomicU64,
    state: Mutex<FailureTable>,
}

#[derive(Debug, Default)]
struct FailureTable {
    files: HashMap<InodeId, WritebackFailure>,
    /// The number of the last failure that was reported to each descriptor.
    reported: HashMap<Descriptor, u64>,
}

/// The last failure of a file.
#[derive(Debug)]
struct WritebackFailure {
    at: u64,
    errno: i32,
    /// Whether the failure was reported to a descriptor.
    is_seen: bool,
    /// Whether the data is still dirty.
    is_failing: bool,
}

impl WritebackErrors {
    /// Notes that data of a file could not be written.
    pub(crate) fn note(&self, id: InodeId, error: &Error) {
        self.nr_failures.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state.lock();
        if state.files.len() >= MOST_FILES && !state.files.contains_key(&id) {
            state.files.retain(|_, failure| failure.is_failing || !failure.is_seen);
        }
        let at = self.clock.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        let failure = WritebackFailure { at, errno: error.errno(), is_seen: false, is_failing: true };
        let was_failing = state.files.insert(id, failure).is_some_and(|old| old.is_failing);
        if !was_failing {
            self.nr_failing.fetch_add(1, Ordering::Release);
            tracing::error!("inode {} of subvolume {}: its data could not be written back: {error}", id.ino, id.root);
        }
    }

    /// Notes that a file has no dirty data any more.
    pub(crate) fn note_clean(&self, id: InodeId) {
        if !self.has_failing() {
            return;
        }
        if let Some(failure) = self.state.lock().files.get_mut(&id)
            && std::mem::take(&mut failure.is_failing)
        {
            self.nr_failing.fetch_sub(1, Ordering::Release);
        }
    }

    /// Whether any file has data that could not be written.
    pub(crate) fn has_failing(&self) -> bool {
        self.nr_failing.load(Ordering::Acquire) > 0
    }

    /// Whether this file has data that could not be written.
    pub(crate) fn is_failing(&self, id: InodeId) -> bool {
        self.has_failing() && self.state.lock().files.get(&id).is_some_and(|failure| failure.is_failing)
    }

    /// The number of failures so far, and the number of files with data that could not be written.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.nr_failures.load(Ordering::Relaxed), self.nr_failing.load(Ordering::Relaxed))
    }

    /// Returns the error number of the file's last failure, and marks the failure as reported to this descriptor.
    /// Returns `None` if the failure was reported to this descriptor already, or if it was reported to another
    /// descriptor and happened before this descriptor was opened.
    fn take(&self, id: InodeId, descriptor: Descriptor) -> Option<i32> {
        if self.nr_failures.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut state = self.state.lock();
        let FailureTable { files, reported } = &mut *state;
        let failure = files.get_mut(&id)?;
        let known = reported.get(&descriptor).copied().unwrap_or(descriptor);
        if failure.is_seen && known >= failure.at {
            return None;
        }
        failure.is_seen = true;
        reported.insert(descriptor, failure.at);
        self.nr_reported.store(reported.len() as u64, Ordering::Release);
        Some(failure.errno)
    }

    fn close(&self, descriptor: Descriptor) {
        if self.nr_reported.load(Ordering::Acquire) > 0 {
            let mut state = self.state.lock();
            state.reported.remove(&descriptor);
            self.nr_reported.store(state.reported.len() as u64, Ordering::Release);
        }
    }
}

impl Fs {
    /// Returns a number for a newly opened file descriptor, to be passed to [`Fs::fsync_descriptor`].
    pub fn open_descriptor(&self) -> Descriptor {
        self.data.errors.clock.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }

    /// Forgets a number that [`Fs::open_descriptor`] returned.
    pub fn close_descriptor(&self, descriptor: Descriptor) {
        self.data.errors.close(descriptor);
    }

    /// Calls [`Fs::fsync`] for an open file. Also reports, once, a writeback failure that happened since the file was
    /// opened, or before if no descriptor has reported it, even if the data was written later.
    pub fn fsync_descriptor(&self, id: InodeId, datasync: bool, descriptor: Descriptor) -> Result<()> {
        let synced = self.fsync(id, datasync);
        let remembered = self.data.errors.take(id, descriptor);
        synced?;
        remembered.map_or(Ok(()), |errno| Err(Error::Writeback { errno }))
    }
}

/// Above this number of files, failures that were reported and whose data was written later are forgotten.
const MOST_FILES: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use ubtrfs_format::{Ino, RootId};

    use super::*;

    const FILE: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino(257) };

    fn open(errors: &WritebackErrors) -> Descriptor {
        errors.clock.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }

    #[test]
    fn each_descriptor_hears_of_a_failure_once() {
        let errors = WritebackErrors::default();
        let (first, second) = (open(&errors), open(&errors));
        assert_eq!(errors.take(FILE, first), None);
        errors.note(FILE, &Error::Engine(ubtrfs_error::Error::NoSpace));
        for descriptor in [first, second] {
            assert_eq!(errors.take(FILE, descriptor), Some(28));
            assert_eq!(errors.take(FILE, descriptor), None);
        }
        let late = open(&errors);
        assert_eq!(errors.take(FILE, late), None, "it happened before, and somebody heard of it");
        errors.note(FILE, &Error::Engine(ubtrfs_error::Error::NoSpace));
        let later = open(&errors);
        assert_eq!(errors.take(FILE, later), Some(28), "nobody heard of it");
        assert_eq!(errors.take(FILE, late), Some(28));
        [first, second, late, later].into_iter().for_each(|descriptor| errors.close(descriptor));
        assert!(errors.state.lock().reported.is_empty());
    }

    #[test]
    fn a_file_counts_as_failing_until_its_data_is_written() {
        let errors = WritebackErrors::default();
        errors.note(FILE, &Error::NotFound);
        errors.note(FILE, &Error::NotFound);
        assert_eq!(errors.counts(), (2, 1));
        assert!(errors.is_failing(FILE));
        errors.note_clean(FILE);
        errors.note_clean(FILE);
        assert_eq!(errors.counts(), (2, 0));
    }
}
