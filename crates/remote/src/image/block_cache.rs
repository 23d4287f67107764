//! [`BlockCache`]: blocks that were fetched, and those that are on their way.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::error::RemoteError;

/// Blocks that follow each other, from `first` to `last`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockRun {
    pub(crate) first: u64,
    pub(crate) last: u64,
}

/// The blocks of one object. Each block that is marked as on its way is fetched by the caller that marked it.
#[derive(Debug)]
pub(crate) struct BlockCache {
    capacity: usize,
    state: Mutex<CachedBlocks>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct CachedBlocks {
    blocks: HashMap<u64, CachedBlock>,
    /// Counts uses.
    now: u64,
    /// How many blocks have arrived and are kept.
    nr_kept: usize,
    streams: [ReadStream; NR_STREAMS],
}

#[derive(Debug)]
enum CachedBlock {
    OnItsWay,
    Kept {
        bytes: Arc<[u8]>,
        used: u64,
    },
    /// It could not be fetched. Readers that began before see this; one that begins later has it fetched again.
    Failed {
        error: Arc<RemoteError>,
        at: u64,
    },
}

/// A read that begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockRead {
    /// When it began, in uses of the cache.
    pub(crate) since: u64,
    /// The last block to fetch: a later one than was asked for if the read goes on where another one ended.
    pub(crate) last: u64,
}

/// A reader of one place after another.
#[derive(Clone, Copy, Debug, Default)]
struct ReadStream {
    /// The block that it reads next, or the one that it has not read to its end.
    next: u64,
    /// How many blocks are fetched ahead.
    window: u64,
    used: u64,
}

/// Readers that are told apart.
const NR_STREAMS: usize = 16;
/// How many blocks are fetched ahead at most: 4 MiB.
const WINDOW_MAX: u64 = 32;

impl BlockCache {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, state: Mutex::default(), arrived: Condvar::new() }
    }

    /// Begins a read of these blocks.
    pub(crate) fn begin(&self, first: u64, last: u64) -> BlockRead {
        let mut state = self.state.lock();
        state.now += 1;
        let now = state.now;
        let goes_on = |stream: &&mut ReadStream| stream.used > 0 && (stream.next == first || stream.next == first + 1);
        if let Some(stream) = state.streams.iter_mut().find(goes_on) {
            // Reads inside of one block do not widen the window.
            if last >= stream.next {
                stream.window = (stream.window * 2).clamp(1, WINDOW_MAX);
            }
            (stream.next, stream.used) = (last + 1, now);
            return BlockRead { since: now, last: last + stream.window };
        }
        if let Some(oldest) = state.streams.iter_mut().min_by_key(|stream| stream.used) {
            *oldest = ReadStream { next: last + 1, window: 0, used: now };
        }
        BlockRead { since: now, last }
    }

    /// Marks the missing ones of these blocks as on their way, and returns them in runs of at most `most` blocks. The
    /// caller fetches them.
    pub(crate) fn missing(&self, read: BlockRead, first: u64, most: u64) -> Vec<BlockRun> {
        let mut state = self.state.lock();
        let mut runs: Vec<BlockRun> = Vec::new();
        for block in first..=read.last {
            match state.blocks.get(&block) {
                None => {}
                Some(CachedBlock::Failed { at, .. }) if *at < read.since => {}
                Some(_) => continue,
            }
            state.blocks.insert(block, CachedBlock::OnItsWay);
            match runs.last_mut().filter(|run| run.last + 1 == block && run.last - run.first + 1 < most) {
                Some(run) => run.last = block,
                None => runs.push(BlockRun { first: block, last: block }),
            }
        }
        runs
    }

    /// Notes the end of a fetch. Blocks have `block_len` bytes, except for the last one.
    pub(crate) fn arrived(&self, run: BlockRun, block_len: u64, fetched: Result<Vec<u8>, Arc<RemoteError>>) {
        let mut state = self.state.lock();
        let len = usize::try_from(block_len).unwrap_or(usize::MAX);
        match fetched {
            Ok(bytes) => {
                for (block, bytes) in (run.first..=run.last).zip(bytes.chunks(len)) {
                    let used = state.now;
                    state.blocks.insert(block, CachedBlock::Kept { bytes: bytes.into(), used });
                    state.nr_kept += 1;
                }
            }
            Err(error) => {
                for block in run.first..=run.last {
                    let (error, at) = (Arc::clone(&error), state.now);
                    state.blocks.insert(block, CachedBlock::Failed { error, at });
                }
            }
        }
        state.evict(self.capacity);
        self.arrived.notify_all();
    }

    /// Waits for a block that was marked during this read. `None` if it was dropped meanwhile, or if time is over.
    pub(crate) fn wait(
        &self,
        read: BlockRead,
        block: u64,
        until: Instant,
    ) -> Option<Result<Arc<[u8]>, Arc<RemoteError>>> {
        let mut state = self.state.lock();
        loop {
            state.now += 1;
            let now = state.now;
            match state.blocks.get_mut(&block)? {
                CachedBlock::Kept { bytes, used } => {
                    *used = now;
                    return Some(Ok(Arc::clone(bytes)));
                }
                CachedBlock::Failed { at, .. } if *at < read.since => return None,
                CachedBlock::Failed { error, .. } => return Some(Err(Arc::clone(error))),
                CachedBlock::OnItsWay => {}
            }
            if self.arrived.wait_until(&mut state, until).timed_out() {
                return None;
            }
        }
    }
}

impl CachedBlocks {
    /// Drops the blocks whose last use is oldest. Failures that nobody waited for go first.
    fn evict(&mut self, capacity: usize) {
        if self.nr_kept <= capacity {
            return;
        }
        // A quarter at once, so that this is rare.
        let mut uses: Vec<u64> = self.blocks.values().filter_map(CachedBlock::used).collect();
        uses.sort_unstable();
        let nr_dropped = self.nr_kept - capacity + capacity / 4;
        let oldest = uses.get(nr_dropped).copied().unwrap_or(u64::MAX);
        self.blocks.retain(|_, block| {
            !matches!(block, CachedBlock::Failed { .. }) && block.used().is_none_or(|used| used >= oldest)
        });
        self.nr_kept = self.blocks.values().filter(|block| block.used().is_some()).count();
    }
}

impl CachedBlock {
    fn used(&self) -> Option<u64> {
        match self {
            Self::Kept { used, .. } => Some(*used),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + std::time::Duration::from_secs(5)
    }

    #[test]
    fn blocks_are_fetched_once_and_in_runs() {
        let cache = BlockCache::new(100);
        let read = cache.begin(3, 9);
        let run = |first, last| BlockRun { first, last };
        assert_eq!(cache.missing(read, 3, 4), [run(3, 6), run(7, 9)]);
        let other = cache.begin(5, 12);
        assert_eq!(cache.missing(other, 5, 4), [run(10, 12)]);
        cache.arrived(run(3, 6), 2, Ok(vec![3, 3, 4, 4, 5, 5, 6, 6]));
        assert_eq!(cache.wait(other, 5, soon()).unwrap().unwrap()[..], [5, 5]);
        // The last block may be short.
        cache.arrived(run(10, 12), 2, Ok(vec![0, 0, 1, 1, 2]));
        assert_eq!(cache.wait(other, 12, soon()).unwrap().unwrap()[..], [2]);
        assert!(cache.wait(other, 7, Instant::now()).is_none(), "it is on its way");
    }

    #[test]
    fn a_failure_ends_the_reads_that_waited_and_no_later_one() {
        let cache = BlockCache::new(100);
        let (one, two) = (cache.begin(3, 3), cache.begin(3, 3));
        let run = cache.missing(one, 3, 4)[0];
        assert!(cache.missing(two, 3, 4).is_empty());
        cache.arrived(run, 2, Err(Arc::new(RemoteError::Cancelled)));
        for read in [one, two] {
            assert!(cache.wait(read, 3, soon()).unwrap().is_err());
        }
        let later = cache.begin(3, 3);
        assert!(cache.wait(later, 3, soon()).is_none());
        assert_eq!(cache.missing(later, 3, 4), [run]);
    }

    #[test]
    fn the_cache_keeps_its_limit_and_the_blocks_used_last() {
        let cache = BlockCache::new(8);
        for block in 0..40 {
            let read = cache.begin(block, block);
            for run in cache.missing(BlockRead { last: block, ..read }, block, 4) {
                cache.arrived(run, 1, Ok(vec![7; (run.last - run.first + 1) as usize]));
            }
            cache.wait(read, block, soon()).unwrap().unwrap();
            let hot = cache.begin(0, 0);
            assert!(cache.wait(hot, 0, soon()).is_some(), "block 0 is used all the time ({block})");
            let state = cache.state.lock();
            assert!(state.nr_kept <= 8 && state.blocks.len() <= 8);
        }
    }

    #[test]
    fn a_reader_of_one_place_after_another_gets_more_and_more_ahead() {
        let cache = BlockCache::new(100);
        let aheads: Vec<u64> = (0..8).map(|block| cache.begin(block, block).last - block).collect();
        assert_eq!(aheads, [0, 1, 2, 4, 8, 16, 32, 32]);
        assert_eq!(cache.begin(500, 501).last, 501);
        // Both readers are told apart.
        assert_eq!(cache.begin(8, 8).last, 40);
        assert_eq!(cache.begin(502, 502).last, 503);
    }
}
