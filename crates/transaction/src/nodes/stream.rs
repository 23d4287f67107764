//! [`NodeStream`]: writes nodes to the devices while their tree is still being changed. A commit that copies most of a
//! large tree holds only a few pieces of the tree in memory, and the devices work while the next leaves are made.
//!
//! ```text
//! apply -- push --> queue (QUEUE_PIECES at most) -- writers --> devices --> the node cache, if it has room
//! ```
//!
//! Crash argument: the nodes have new addresses, which no committed superblock reaches. The commit waits for the
//! stream's writes, then flushes, then writes its superblock, as for the nodes that the commit writes at its end.
//!
//! Owns the queue of pieces, under one lock. No other lock is taken under the lock of the queue.
//!
//! Invariants:
//! - I1. A pushed node is final: an apply makes each node once, and later changes copy it ([`crate::cow::sink`], I3).
//! - I2. No thread reads a pushed node before the stream has ended: until the end, readers see the tree as it was
//!   before the apply.
//! - I3. After a failure nothing more is written, no thread waits, and [`NodeStream::finish`] returns the first error.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};
use ubtrfs_error::{Error, Result, start_helper};
use ubtrfs_tree::Node;

use crate::nodes::write::NodeWriter;

/// A bounded queue of nodes, and the threads that write them.
pub(crate) struct NodeStream<'e> {
    writer: NodeWriter<'e>,
    queue: Mutex<NodeQueue>,
    /// Signals that a piece was added or taken, or that the stream ends.
    changed: Condvar,
    failed: AtomicBool,
    /// Whether the system started a writer. Otherwise [`NodeStream::push`] writes.
    has_writers: AtomicBool,
}

#[derive(Default)]
struct NodeQueue {
    pieces: VecDeque<Vec<Arc<Node>>>,
    ended: bool,
    failure: Option<Error>,
}

/// Ends the stream when dropped, also after a panic: the writers finish the queue and return.
struct EndNodeStream<'s, 'e>(&'s NodeStream<'e>);

/// Fails the stream if its writer panics, so that no thread waits for the writer.
struct FailNodeStream<'s, 'e>(&'s NodeStream<'e>);

impl<'e> NodeStream<'e> {
    /// Runs `make` with a stream that `make` can push nodes into. Returns after all pushed nodes are written. If both a
    /// write and `make` fail, returns the error of the write.
    pub(crate) fn with<T>(writer: NodeWriter<'e>, make: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        let (failed, has_writers) = (AtomicBool::new(false), AtomicBool::new(false));
        let stream = Self { writer, queue: Mutex::default(), changed: Condvar::new(), failed, has_writers };
        let made = std::thread::scope(|scope| {
            let _end = EndNodeStream(&stream);
            for _ in 0..NR_WRITERS {
                let started = start_helper(scope, || stream.write_pieces()).is_thread();
                stream.has_writers.fetch_or(started, Ordering::Relaxed);
            }
            make(&stream)
        });
        stream.finish()?;
        made
    }

    /// Number of nodes in a piece: enough for large writes, or fewer if the engine has little memory.
    pub(crate) fn nodes_per_piece(memory_bytes: u64, nodesize: u32) -> usize {
        let bytes = (memory_bytes / PIECE_PART).min(PIECE_BYTES);
        usize::try_from(bytes).unwrap_or(usize::MAX).div_ceil(nodesize as usize).max(PIECE_NODES_MIN)
    }

    /// Hands over a piece. Waits while the queue is full. Writes the piece if there are no writers.
    pub(crate) fn push(&self, piece: Vec<Arc<Node>>) {
        debug_assert!(
            piece.iter().all(|node| !self.writer.store.is_dirty(node.bytenr())),
            "I1: a node that may still change is written"
        );
        if !self.has_writers.load(Ordering::Relaxed) {
            return self.write_piece(piece);
        }
        let mut queue = self.queue.lock();
        while queue.pieces.len() >= QUEUE_PIECES && !self.has_failed() {
            self.changed.wait(&mut queue);
        }
        if !self.has_failed() {
            queue.pieces.push_back(piece);
            self.changed.notify_all();
        }
    }

    /// Whether a write failed, so that further nodes are useless.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    fn write_pieces(&self) {
        let _fail = FailNodeStream(self);
        while let Some(piece) = self.next_piece() {
            self.write_piece(piece);
        }
    }

    fn write_piece(&self, mut piece: Vec<Arc<Node>>) {
        piece.sort_unstable_by_key(|node| node.bytenr());
        match self.writer.write_runs(&piece, false) {
            Ok(()) => self.writer.store.streamed(piece),
            Err(error) => self.fail(Some(error)),
        }
    }

    fn next_piece(&self) -> Option<Vec<Arc<Node>>> {
        let mut queue = self.queue.lock();
        loop {
            if self.has_failed() {
                return None;
            }
            if let Some(piece) = queue.pieces.pop_front() {
                self.changed.notify_all();
                return Some(piece);
            }
            if queue.ended {
                return None;
            }
            self.changed.wait(&mut queue);
        }
    }

    fn fail(&self, error: Option<Error>) {
        let mut queue = self.queue.lock();
        self.failed.store(true, Ordering::Release);
        queue.pieces.clear();
        if queue.failure.is_none() {
            queue.failure = error;
        }
        self.changed.notify_all();
    }

    fn finish(self) -> Result<()> {
        self.queue.into_inner().failure.map_or(Ok(()), Err)
    }
}

impl Drop for EndNodeStream<'_, '_> {
    fn drop(&mut self) {
        self.0.queue.lock().ended = true;
        self.0.changed.notify_all();
    }
}

impl Drop for FailNodeStream<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail(None);
        }
    }
}

/// Number of writers: one computes checksums while the other waits for a device.
const NR_WRITERS: usize = 2;
/// Maximum number of pieces that wait for a writer.
const QUEUE_PIECES: usize = 2;
/// Maximum bytes of nodes in a piece.
const PIECE_BYTES: u64 = 2 << 20;
/// A piece takes about the engine's memory divided by this number, if that is less than [`PIECE_BYTES`].
const PIECE_PART: u64 = 256;
const PIECE_NODES_MIN: usize = 4;
