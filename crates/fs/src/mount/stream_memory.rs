//! [`StreamMemory`]: the memory of sends and receives.
//!
//! - SM1. The sends and receives that run at once divide one share of the filesystem's memory, so that many of them take
//!   little more than one.
//! - SM2. Reading leaves ahead takes several MiB. A send that begins when [`READ_AHEAD_MAX`] others run does without.

use std::sync::atomic::{AtomicU64, Ordering};

/// The memory that sends and receives divide.
#[derive(Debug)]
pub(crate) struct StreamMemory {
    bytes: u64,
    running: AtomicU64,
}

/// A running send or receive, until it is dropped.
#[derive(Debug)]
pub(crate) struct RunningStream<'m> {
    memory: &'m StreamMemory,
    /// Whether it may read leaves ahead (SM2).
    pub(crate) reads_leaves_ahead: bool,
}

impl StreamMemory {
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes, running: AtomicU64::new(0) }
    }

    /// Begins a send or receive.
    pub(crate) fn begin(&self) -> RunningStream<'_> {
        let nr_others = self.running.fetch_add(1, Ordering::Relaxed);
        RunningStream { memory: self, reads_leaves_ahead: nr_others < READ_AHEAD_MAX }
    }

    /// The memory of each send and receive that runs now (SM1).
    pub(crate) fn part_bytes(&self) -> u64 {
        self.bytes.checked_div(self.running.load(Ordering::Relaxed)).unwrap_or(self.bytes)
    }
}

impl Drop for RunningStream<'_> {
    fn drop(&mut self) {
        self.memory.running.fetch_sub(1, Ordering::Relaxed);
    }
}

const READ_AHEAD_MAX: u64 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_divide_the_memory() {
        let memory = StreamMemory::new(12);
        assert_eq!(memory.part_bytes(), 12);
        let first = memory.begin();
        assert_eq!(memory.part_bytes(), 12);
        let others = [memory.begin(), memory.begin()];
        assert_eq!(memory.part_bytes(), 4);
        let read_ahead = [&first, &others[0], &others[1]].map(|stream| stream.reads_leaves_ahead);
        assert_eq!(read_ahead, [true, true, false]);
        drop((first, others));
        assert_eq!(memory.part_bytes(), 12);
    }
}
