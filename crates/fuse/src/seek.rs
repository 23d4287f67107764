//! Makes SEEK_DATA and SEEK_HOLE right for files whose newest data is still in the kernel's page cache.
//!
//! The kernel sends LSEEK requests without first writing its dirty pages. A file that is being written would look like
//! a hole, and a program that copies only data would lose data. Only files that are open for writing can have dirty
//! pages, because closing writes them back. Before the server answers an LSEEK request for a file that is open for
//! writing, it makes the kernel give up the file's pages.
//!
//! The server also fetches dirty pages before it answers with the attributes of a file that seems to have no data:
//! programs trust `st_blocks` and never seek.
//!
//! Before an ioctl makes a snapshot, the server fetches the dirty pages of all files of the source that are open for
//! writing, as Linux's btrfs writes all dirty data of a subvolume before it makes a snapshot of it.
//!
//! K1. To give up dirty pages, the kernel sends write requests and waits for the answers. So the server makes the
//!     kernel give up pages only while another thread receives requests.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};
use ubtrfs_fs::{Attr, mode};

use crate::mount::MountConfig;
use crate::transport::{Notifier, WorkerPlace};
use crate::view::FuseView;

/// Makes the kernel write back dirty pages. For this, counts how often each file is open for writing.
#[derive(Debug)]
pub(crate) struct PageFlusher {
    /// The number of opens for writing of each node. The map is split by node id into several maps with a lock each, so
    /// that threads that open and close different files seldom wait for each other.
    writers: [Mutex<HashMap<u64, u32>>; NR_PARTS],
    notifier: Arc<OnceLock<Notifier>>,
    /// Whether the kernel keeps all written data for a while (`writeback_cache`), not only data written through
    /// mappings.
    kernel_keeps_writes: bool,
    /// Whether the kernel tells when files are opened and closed. If not, any file can be open for writing.
    hears_of_opens: bool,
}

impl PageFlusher {
    /// `notifier` is set once the connection exists.
    pub(crate) fn new(notifier: Arc<OnceLock<Notifier>>, kernel_keeps_writes: bool, hears_of_opens: bool) -> Self {
        let writers = std::array::from_fn(|_| Mutex::default());
        Self { writers, notifier, kernel_keeps_writes, hears_of_opens }
    }

    /// The flusher of a view that is mounted with these options.
    pub(crate) fn of(view: &FuseView, config: &MountConfig) -> Arc<Self> {
        let make = || Arc::new(Self::new(view.notifier.clone(), config.writeback_cache, !config.no_open));
        Arc::clone(view.pages.get_or_init(make))
    }

    /// The map of `writers` that has the node's number of opens.
    fn writers_of(&self, node: u64) -> MutexGuard<'_, HashMap<u64, u32>> {
        let part = usize::try_from(node % NR_PARTS as u64).unwrap_or_default();
        self.writers[part].lock()
    }

    /// Whether a file can be open for writing.
    fn may_have_writers(&self, node: u64) -> bool {
        !self.hears_of_opens || self.writers_of(node).contains_key(&node)
    }

    /// Whether writes stay in the kernel's page cache; the kernel then also keeps the times of files.
    pub(crate) fn kernel_keeps_writes(&self) -> bool {
        self.kernel_keeps_writes
    }

    /// Whether the kernel may have data that `st_blocks` of a file does not count. If the kernel keeps only data
    /// written through mappings, the function returns true only for files without blocks. If a file has some blocks, it
    /// does no harm that its other data is not counted: programs find the data with SEEK_DATA, and the server fetches
    /// the pages before it answers that request.
    pub(crate) fn may_lack_blocks(&self, node: u64, attr: &Attr) -> bool {
        let lacks_some = match self.kernel_keeps_writes {
            true => attr.blocks == 0 || attr.blocks.saturating_mul(512) < attr.size,
            false => attr.blocks == 0 && attr.size > 0,
        };
        lacks_some && attr.mode & mode::TYPE == mode::REGULAR && self.may_have_writers(node)
    }

    /// Makes the kernel forget the attributes of a file, after a request changed attributes in a way that the kernel
    /// does not expect. Unlike the notifications of K1, this notification does not wait: with a negative offset, the
    /// kernel keeps the pages.
    pub(crate) fn attributes_changed(&self, node: u64) {
        if let Some(notifier) = self.notifier.get() {
            notifier.forget_attributes(node);
        }
    }

    /// Counts an open for writing.
    pub(crate) fn opened(&self, node: u64) {
        *self.writers_of(node).entry(node).or_default() += 1;
    }

    /// Counts the close of a file that was open for writing.
    pub(crate) fn released(&self, node: u64) {
        let mut writers = self.writers_of(node);
        if let Some(count) = writers.get_mut(&node) {
            *count -= 1;
            if *count == 0 {
                writers.remove(&node);
            }
        }
    }

    /// Makes the kernel write back the file's dirty pages, if the kernel can have any. Returns false if the kernel
    /// refuses, or if this thread cannot wait for the kernel, because no other thread would be left to receive the
    /// pages. Some data may then stay in the kernel.
    pub(crate) fn fetch_all_data(&self, node: u64, place: &WorkerPlace<'_>) -> bool {
        if !self.may_have_writers(node) {
            return true;
        }
        let Some(notifier) = self.notifier.get() else { return true };
        let done = place.aside_for_kernel(|| notifier.inval_inode(node, 0, 0));
        if let Some(Err(error)) = &done {
            tracing::debug!("node {node}: the kernel keeps its pages: {error}");
        }
        matches!(done, Some(Ok(())))
    }

    /// Makes the kernel write back the dirty pages of the files that are open for writing and of which `is_wanted` holds.
    /// Must be called aside, as K1 demands.
    pub(crate) fn fetch_data_of(&self, is_wanted: impl Fn(u64) -> bool) {
        let Some(notifier) = self.notifier.get() else { return };
        for part in &self.writers {
            let nodes: Vec<u64> = part.lock().keys().copied().filter(|node| is_wanted(*node)).collect();
            for node in nodes {
                if let Err(error) = notifier.inval_inode(node, 0, 0) {
                    tracing::debug!("node {node}: the kernel keeps its pages: {error}");
                }
            }
        }
    }
}

/// The number of maps into which `PageFlusher::writers` is split.
const NR_PARTS: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_are_counted() {
        let seeker = PageFlusher::new(Arc::default(), false, true);
        seeker.opened(300);
        seeker.opened(300);
        seeker.released(300);
        assert!(seeker.writers_of(300).contains_key(&300));
        seeker.released(300);
        seeker.released(300);
        assert!(seeker.writers.iter().all(|part| part.lock().is_empty()));
    }
}
