//! SEEK_DATA and SEEK_HOLE on files whose newest data is still in the kernel's page cache.
//!
//! The kernel asks for data and holes without handing over its dirty pages first, so a file that is being written would
//! look like a hole, and a program that copies only data would lose it. While someone has the file open for writing
//! (nobody else can have dirty pages: closing writes them back), the kernel is told to give up its pages before the
//! question is answered.
//!
//! The same is done before attributes are answered of a file that seems to have no data: programs believe `st_blocks` and do
//! not ask.
//!
//! K1. Giving up pages makes the kernel send write requests and wait for them. So it only happens while another thread
//!     takes requests.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use ubtrfs_fs::{Attr, mode};

use crate::transport::{Notifier, Place};

/// Who has which file open for writing.
#[derive(Debug)]
pub(crate) struct Seeker {
    writers: Mutex<HashMap<u64, u32>>,
    notifier: Arc<OnceLock<Notifier>>,
    /// The kernel keeps what is written (`writeback_cache`), not only what is written through mappings.
    kernel_keeps_writes: bool,
}

impl Seeker {
    /// `notifier` is set once the connection exists.
    pub(crate) fn new(notifier: Arc<OnceLock<Notifier>>, kernel_keeps_writes: bool) -> Self {
        Self { writers: Mutex::default(), notifier, kernel_keeps_writes }
    }

    /// Whether writes stay in the kernel's page cache, which then keeps the times of files.
    pub(crate) fn kernel_keeps_writes(&self) -> bool {
        self.kernel_keeps_writes
    }

    /// Whether the kernel may have data that the blocks of a file do not count. Where it keeps only what is written through
    /// mappings, that matters for files without blocks alone: of others programs ask for data and holes, and their pages
    /// stay in the kernel.
    pub(crate) fn may_lack_blocks(&self, node: u64, attr: &Attr) -> bool {
        let lacks_some = match self.kernel_keeps_writes {
            true => attr.blocks == 0 || attr.blocks.saturating_mul(512) < attr.size,
            false => attr.blocks == 0 && attr.size > 0,
        };
        lacks_some && attr.mode & mode::TYPE == mode::REGULAR && self.writers.lock().contains_key(&node)
    }

    /// Has the kernel forget attributes that changed by more than the request said. Waits for nothing, unlike K1: a
    /// negative offset leaves the pages alone.
    pub(crate) fn attributes_changed(&self, node: u64) {
        if let Some(notifier) = self.notifier.get()
            && let Err(error) = notifier.inval_inode(node, -1, 0)
        {
            tracing::debug!("node {node}: the kernel keeps its attributes: {error}");
        }
    }

    /// A file was opened for writing.
    pub(crate) fn opened(&self, node: u64) {
        *self.writers.lock().entry(node).or_default() += 1;
    }

    /// Such an open ended.
    pub(crate) fn released(&self, node: u64) {
        let mut writers = self.writers.lock();
        if let Some(count) = writers.get_mut(&node) {
            *count -= 1;
            if *count == 0 {
                writers.remove(&node);
            }
        }
    }

    /// Has the kernel's dirty pages of the file arrive here, if there can be any. Says whether all data is here now; not, if
    /// so many wait for the kernel that no thread would be left to take its pages.
    pub(crate) fn fetch_all_data(&self, node: u64, place: &Place<'_>) -> bool {
        if !self.writers.lock().contains_key(&node) {
            return true;
        }
        let Some(notifier) = self.notifier.get() else { return true };
        let done = place.aside_for_kernel(|| notifier.inval_inode(node, 0, 0));
        if let Some(Err(error)) = &done {
            tracing::debug!("node {node}: the kernel keeps its pages: {error}");
        }
        done.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_are_counted() {
        let seeker = Seeker::new(Arc::default(), false);
        seeker.opened(300);
        seeker.opened(300);
        seeker.released(300);
        assert!(seeker.writers.lock().contains_key(&300));
        seeker.released(300);
        seeker.released(300);
        assert!(seeker.writers.lock().is_empty());
    }
}
