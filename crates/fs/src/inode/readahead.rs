//! Read-ahead: background threads read and verify the next part of a file that is read sequentially.
//!
//! ```text
//!   slot:  Queued --begin()--> Reading --finish()--> Ready
//!             \--copy_to()----> Void <--failed--/
//! ```
//!
//! A slot is a part of a file that is read ahead. It holds the data of the file's extent items. Where the file has
//! dirty data, readers get the dirty data instead.
//!
//! Invariants:
//! - I1. Slots of a file are dropped under the file's state lock, held for writing, whenever the file's extent items
//!   change ([`FileData::extents_changed`](crate::inode::file_data::FileData::extents_changed)). So every slot that a
//!   reader finds was made after the last change.
//! - I2. A reader holds the state lock for reading while it waits for a slot. So the thread that fills the slot must
//!   not wait for the state lock: it takes the lock even if writers are waiting, or abandons the slot if a writer holds
//!   the lock. A reader takes over a slot that no thread has begun to fill, instead of waiting for it.
//! - I3. All files together have at most [`Readahead::max_slots`] slots. A few idle buffers take memory in addition to
//!   the slots.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "offsets in a file and lengths in memory; `MAX_SIZE` and the budget bound them"
)]

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Condvar, Mutex};
use ubtrfs_device::AlignedBuf;

use crate::inode::state::{Inode, InodeState};
use crate::service_threads::ServiceThreads;
use crate::{Fs, Result};

/// The read-ahead of a filesystem: threads and memory.
#[derive(Debug)]
pub(crate) struct Readahead {
    shared: Arc<SlotQueue>,
    threads: ServiceThreads,
    max_slots: usize,
}

#[derive(Debug, Default)]
struct SlotQueue {
    queue: Mutex<VecDeque<FillJob>>,
    wake: Condvar,
    stopped: AtomicBool,
    nr_slots: AtomicUsize,
    idle: Mutex<Vec<AlignedBuf>>,
}

#[derive(Debug)]
struct FillJob {
    inode: Arc<Inode>,
    slot: Arc<ReadaheadSlot>,
}

/// A part of a file that is read ahead.
#[derive(Debug)]
pub(crate) struct ReadaheadSlot {
    range: Range<u64>,
    content: Mutex<SlotContent>,
    done: Condvar,
    shared: Arc<SlotQueue>,
    /// Number of bytes that readers copied out of the slot.
    nr_read: AtomicU64,
}

#[derive(Debug)]
enum SlotContent {
    Queued,
    Reading,
    Ready(AlignedBuf),
    Void,
}

/// The read pattern of a file, and its slots.
#[derive(Debug, Default)]
pub(crate) struct ReadWindow {
    /// The offset where a sequential reader continues.
    next: u64,
    /// Bytes read in sequence.
    run_bytes: u64,
    slots: VecDeque<Arc<ReadaheadSlot>>,
}

impl ReadWindow {
    /// Notes a read and drops slots that are not needed any more. Returns whether the read belongs to the sequence;
    /// otherwise a new sequence begins. Reads of a sequence may arrive out of order, because several threads issue
    /// them at once.
    fn goes_on(&mut self, offset: u64, end: u64) -> bool {
        if offset > self.next.saturating_add(SLOT_BYTES) || offset.saturating_add(LAG_BYTES) < self.next {
            *self = Self { next: end, run_bytes: end - offset, slots: VecDeque::new() };
            return false;
        }
        self.next = self.next.max(end);
        self.run_bytes = self.run_bytes.saturating_add(end - offset);
        let next = self.next;
        self.slots.retain(|slot| {
            let lag = if slot.is_used_up() { SLOT_BYTES } else { LAG_BYTES };
            slot.range.end.saturating_add(lag) > next
        });
        true
    }
}

impl Readahead {
    /// Makes a read-ahead with about `max_bytes` of memory, but at least 4 MiB and at most 32 MiB.
    pub(crate) fn new(max_bytes: u64) -> Self {
        let max_slots = usize::try_from(max_bytes / SLOT_BYTES).unwrap_or(usize::MAX).clamp(SLOTS_MIN, SLOTS_MAX);
        Self { shared: Arc::default(), threads: ServiceThreads::default(), max_slots }
    }

    /// Starts the threads.
    pub(crate) fn start(&self, fs: &Arc<Fs>) {
        let (shared, weak) = (Arc::clone(&self.shared), Arc::downgrade(fs));
        self.threads.start("ubtrfs-readahead", NR_THREADS, move || run(&shared, &weak));
    }

    /// Ends the threads and waits for them. After the threads have ended, readers of queued slots read from the
    /// extents.
    pub(crate) fn stop(&self) {
        self.shared.stopped.store(true, Ordering::Release);
        let dropped = std::mem::take(&mut *self.shared.queue.lock());
        drop(dropped);
        self.shared.wake.notify_all();
        self.threads.join();
    }

    /// Notes a read of `len_bytes` at `offset`, starts read-ahead if the reads look sequential, and returns the slots
    /// that overlap the read. The caller holds the lock of `state` for reading.
    pub(crate) fn advance(
        &self,
        inode: &Arc<Inode>,
        state: &InodeState,
        offset: u64,
        len_bytes: u64,
    ) -> Vec<Arc<ReadaheadSlot>> {
        let end = offset + len_bytes;
        let mut window = state.data.read_window().lock();
        if !window.goes_on(offset, end) {
            return Vec::new();
        }
        let found = window.slots.iter().filter(|slot| slot.range.start < end && slot.range.end > offset);
        let found: Vec<_> = found.cloned().collect();
        if window.run_bytes >= RUN_BYTES && !self.shared.stopped.load(Ordering::Acquire) {
            self.extend(inode, &mut window, state.item.size);
        }
        found
    }

    fn extend(&self, inode: &Arc<Inode>, window: &mut ReadWindow, size: u64) {
        let mut at = window.next.next_multiple_of(SLOT_BYTES);
        at = at.max(window.slots.back().map_or(0, |slot| slot.range.end.next_multiple_of(SLOT_BYTES)));
        let limit = size.min(window.next.saturating_add(WINDOW_BYTES));
        let mut jobs = Vec::new();
        while at < limit && self.shared.acquire(self.max_slots) {
            let slot = Arc::new(ReadaheadSlot {
                range: at..size.min(at + SLOT_BYTES),
                content: Mutex::new(SlotContent::Queued),
                done: Condvar::new(),
                shared: Arc::clone(&self.shared),
                nr_read: AtomicU64::new(0),
            });
            window.slots.push_back(Arc::clone(&slot));
            jobs.push(FillJob { inode: Arc::clone(inode), slot });
            at += SLOT_BYTES;
        }
        if !jobs.is_empty() {
            self.shared.queue.lock().extend(jobs);
            self.shared.wake.notify_all();
        }
    }
}

impl SlotQueue {
    /// Counts a new slot. If there are `max_slots` slots already, returns false and does not count it (I3). The count
    /// falls again when the slot is dropped.
    fn acquire(&self, max_slots: usize) -> bool {
        let taken = self.nr_slots.fetch_add(1, Ordering::Relaxed) < max_slots;
        if !taken {
            self.nr_slots.fetch_sub(1, Ordering::Relaxed);
        }
        taken
    }
}

impl ReadaheadSlot {
    /// Fills `out` with the slot's bytes from the file offset `offset` on; the slot must hold all of them. Waits while
    /// a thread fills the slot. Returns false if there is nothing to copy; the caller then reads from the extents.
    pub(crate) fn copy_to(&self, offset: u64, out: &mut [u8]) -> bool {
        let mut content = self.content.lock();
        loop {
            match &*content {
                SlotContent::Ready(bytes) => {
                    let from = (offset - self.range.start) as usize;
                    out.copy_from_slice(&bytes[from..from + out.len()]);
                    self.nr_read.fetch_add(out.len() as u64, Ordering::Relaxed);
                    return true;
                }
                SlotContent::Reading => self.done.wait(&mut content),
                SlotContent::Queued | SlotContent::Void => {
                    *content = SlotContent::Void;
                    return false;
                }
            }
        }
    }

    /// Whether readers copied as many bytes as the slot holds.
    fn is_used_up(&self) -> bool {
        self.nr_read.load(Ordering::Relaxed) >= self.range.end - self.range.start
    }

    /// Begins to fill the slot. Returns false if a reader took the slot over.
    fn begin(&self) -> bool {
        let mut content = self.content.lock();
        let is_queued = matches!(&*content, SlotContent::Queued);
        if is_queued {
            *content = SlotContent::Reading;
        }
        is_queued
    }

    fn finish(&self, content: SlotContent) {
        *self.content.lock() = content;
        self.done.notify_all();
    }
}

impl Drop for ReadaheadSlot {
    fn drop(&mut self) {
        if let SlotContent::Ready(bytes) = std::mem::replace(self.content.get_mut(), SlotContent::Void) {
            let mut idle = self.shared.idle.lock();
            if idle.len() < SLOTS_MIN {
                idle.push(bytes);
            }
        }
        self.shared.nr_slots.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Finishes a slot when dropped, so that its readers wake up even if filling it panics.
struct Filling<'s> {
    slot: &'s ReadaheadSlot,
    content: SlotContent,
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        self.slot.finish(std::mem::replace(&mut self.content, SlotContent::Void));
    }
}

impl Fs {
    /// Fills `out` with the file's bytes at `offset`, from slots where they exist and from the extents elsewhere.
    pub(crate) fn read_through_slots(
        &self,
        inode: &Inode,
        state: &InodeState,
        offset: u64,
        out: &mut [u8],
        slots: &[Arc<ReadaheadSlot>],
    ) -> Result<()> {
        let end = offset + out.len() as u64;
        let mut at = offset;
        while at < end {
            let slot = slots.iter().find(|slot| slot.range.contains(&at));
            let next = slots.iter().map(|slot| slot.range.start).filter(|start| *start > at).min();
            let until = slot.map_or(next.unwrap_or(end), |slot| slot.range.end).min(end);
            let part = &mut out[(at - offset) as usize..(until - offset) as usize];
            if !slot.is_some_and(|slot| slot.copy_to(at, part)) {
                self.read_extents(inode, state, at, part)?;
            }
            at = until;
        }
        Ok(())
    }

    fn fill(&self, job: &FillJob, shared: &SlotQueue) {
        // Skip a slot that no reader can find any more, or that a reader took over.
        if Arc::strong_count(&job.slot) == 1 || !job.slot.begin() {
            return;
        }
        let mut filling = Filling { slot: &job.slot, content: SlotContent::Void };
        // A plain read lock could queue behind a writer, which waits for the reader that waits for this slot.
        let Some(state) = job.inode.state.try_read_recursive() else { return };
        let mut bytes = shared.idle.lock().pop().unwrap_or_else(|| AlignedBuf::with_capacity(SLOT_BYTES as usize));
        bytes.resize((job.slot.range.end - job.slot.range.start) as usize);
        // Ignore errors here: the reader gets them when it reads from the extents.
        if !state.dead && self.read_extents(&job.inode, &state, job.slot.range.start, &mut bytes).is_ok() {
            filling.content = SlotContent::Ready(bytes);
        }
    }
}

fn run(shared: &SlotQueue, fs: &Weak<Fs>) {
    loop {
        let job = {
            let mut queue = shared.queue.lock();
            loop {
                if shared.stopped.load(Ordering::Acquire) {
                    return;
                }
                match queue.pop_front() {
                    Some(job) => break job,
                    None => shared.wake.wait(&mut queue),
                }
            }
        };
        let Some(fs) = fs.upgrade() else { return };
        fs.fill(&job, shared);
    }
}

/// Number of threads, and so of requests in flight at the device.
const NR_THREADS: usize = 6;
const SLOT_BYTES: u64 = 1 << 20;
/// New slots begin less than this many bytes ahead of the reader.
const WINDOW_BYTES: u64 = 8 << 20;
/// A read belongs to the sequence if it begins at most this many bytes before, or at most one slot after, the end of
/// the furthest read.
const LAG_BYTES: u64 = 4 << 20;
/// Number of bytes that must be read in sequence before read-ahead starts.
const RUN_BYTES: u64 = 256 << 10;
const SLOTS_MIN: usize = 4;
const SLOTS_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use ubtrfs_device::MemoryDevice;

    use super::*;
    use crate::{Caller, MountOptions, NewInode};

    fn slot(start: u64) -> Arc<ReadaheadSlot> {
        Arc::new(ReadaheadSlot {
            range: start..start + SLOT_BYTES,
            content: Mutex::new(SlotContent::Queued),
            done: Condvar::new(),
            shared: Arc::new(SlotQueue { nr_slots: AtomicUsize::new(1), ..SlotQueue::default() }),
            nr_read: AtomicU64::new(0),
        })
    }

    #[test]
    fn a_thread_does_not_wait_behind_a_writer_for_the_lock_of_its_reader() {
        let device = Arc::new(MemoryDevice::new(1 << 30));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let fs = Fs::open(vec![device], MountOptions::default()).unwrap();
        let id = fs.create(fs.root(), b"file", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        fs.write(id, 0, &vec![7; 2 << 20]).unwrap();
        fs.sync().unwrap();
        let inode = fs.inode(id).unwrap();
        let filled = |slot: &Arc<ReadaheadSlot>| {
            fs.fill(&FillJob { inode: Arc::clone(&inode), slot: Arc::clone(slot) }, &slot.shared);
            matches!(&*slot.content.lock(), SlotContent::Ready(bytes) if bytes.iter().all(|byte| *byte == 7))
        };
        assert!(filled(&slot(0)));
        let (stuck, waiting) = (slot(SLOT_BYTES), slot(SLOT_BYTES));
        std::thread::scope(|scope| {
            let reader = inode.state.read();
            let writer = scope.spawn(|| drop(inode.state.write()));
            // Wait until the waiting writer blocks new readers.
            while inode.state.try_read().is_some() {
                std::thread::yield_now();
            }
            let thread = scope.spawn(|| filled(&stuck));
            // Wait as a reader does, with the lock held.
            let start = Instant::now();
            while !thread.is_finished() && start.elapsed() < Duration::from_secs(30) {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(thread.is_finished(), "it waits for the writer, and that one for the reader");
            drop(reader);
            writer.join().unwrap();
        });
        let mut out = [0; 10];
        if !stuck.copy_to(SLOT_BYTES, &mut out) {
            assert!(filled(&waiting) && waiting.copy_to(SLOT_BYTES, &mut out));
        }
        assert_eq!(out, [7; 10]);
        fs.close().unwrap();
    }

    fn starts(window: &ReadWindow) -> Vec<u64> {
        window.slots.iter().map(|slot| slot.range.start / SLOT_BYTES).collect()
    }

    #[test]
    fn a_sequence_out_of_order_stays_one() {
        const MIB: u64 = SLOT_BYTES;
        let mut window = ReadWindow::default();
        window.goes_on(0, MIB);
        window.slots = (1..7).map(|at| slot(at * MIB)).collect();
        // Read the slots 2, 3 and 4 before slot 1.
        for at in [2, 3, 4] {
            assert!(window.goes_on(at * MIB, (at + 1) * MIB));
            window
                .slots
                .iter()
                .find(|slot| slot.range.start == at * MIB)
                .unwrap()
                .nr_read
                .store(MIB, Ordering::Relaxed);
        }
        assert!(starts(&window).contains(&1), "{:?}", starts(&window));
        assert!(window.goes_on(MIB, 2 * MIB), "it belongs to the sequence");
        assert_eq!(window.next, 5 * MIB);
        assert!(window.goes_on(5 * MIB, 6 * MIB));
        assert!(!starts(&window).contains(&2), "taken, and behind: {:?}", starts(&window));
        assert!(!window.goes_on(0, MIB), "too far behind: from the start again");
        assert_eq!((window.next, window.slots.len()), (MIB, 0));
        assert!(!window.goes_on(3 * MIB, 4 * MIB), "a jump");
    }
}
