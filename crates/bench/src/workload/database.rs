//! database: transactions as PostgreSQL makes them. Each of the threads reads some random pages of a table, and then
//! waits until its record in a write-ahead log is durable. One thread writes and syncs the log for all that wait
//! meanwhile. After a number of transactions, a checkpoint writes the changed pages and syncs the table.
//!
//! The log is a file of fixed size that is overwritten from start to end, again and again. A latency is the time of one
//! transaction.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use anyhow::{Result, anyhow};

use super::{Params, in_threads};
use crate::record::MeasuredWork;
use crate::rng::Rng;
use crate::target::BenchTarget;

const TABLE: &[u8] = b"table";
const LOG: &[u8] = b"log";
const PAGE: u64 = 8192;
const LOG_BYTES: u64 = 16 << 20;
/// Pages that a transaction reads and changes.
const PAGES: usize = 3;
/// Bytes of the log that a transaction needs.
const RECORD: u64 = 600;
/// Transactions between two checkpoints.
const CHECKPOINT: u64 = 5000;

pub(super) fn prepare<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<()> {
    for (name, bytes) in [(TABLE, params.bytes), (LOG, LOG_BYTES)] {
        let file = target.create(base, name, 0o600)?;
        let mut block = vec![0; 1 << 20];
        Rng::new(params.seed).fill(&mut block);
        for at in (0..bytes).step_by(block.len()) {
            let len = usize::try_from(bytes - at).map_or(block.len(), |left| left.min(block.len()));
            target.write(&file, at, &block[..len])?;
        }
        target.fsync(&file)?;
    }
    Ok(())
}

pub(super) fn measure<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<MeasuredWork> {
    let table = target.open(base, TABLE, true)?;
    let database = Database {
        target,
        table,
        log: target.open(base, LOG, true)?,
        state: Mutex::default(),
        durable: Condvar::new(),
        changed: Mutex::default(),
    };
    let nr_pages = (params.bytes / PAGE).max(1);
    let mut all = in_threads(params.threads, |thread| {
        let mut work = MeasuredWork::new();
        let mut rng = Rng::new(params.seed ^ thread.wrapping_mul(7919));
        let mut page = vec![0; PAGE as usize];
        for _ in 0..params.ops / params.threads {
            work.latencies.time(|| {
                let mut pages = [0; PAGES];
                for number in &mut pages {
                    *number = rng.below(nr_pages);
                    target.read(&database.table, *number * PAGE, &mut page)?;
                }
                database.commit(&pages)
            })?;
            work.ops += 1;
        }
        Ok(work)
    })?;
    database.checkpoint()?;
    all.bytes = database.state().written;
    Ok(all)
}

struct Database<'t, T: BenchTarget> {
    target: &'t T,
    table: T::File,
    log: T::File,
    state: Mutex<DatabaseLog>,
    durable: Condvar,
    /// Pages that the next checkpoint writes.
    changed: Mutex<BTreeSet<u64>>,
}

#[derive(Default)]
struct DatabaseLog {
    /// Bytes of all records so far.
    end: u64,
    /// Records up to here are durable.
    durable: u64,
    /// Whether a thread writes and syncs the log.
    is_busy: bool,
    has_failed: bool,
    nr_transactions: u64,
    /// Bytes written to the log.
    written: u64,
}

impl<T: BenchTarget> Database<'_, T> {
    fn state(&self) -> MutexGuard<'_, DatabaseLog> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns once the transaction's record is durable.
    fn commit(&self, pages: &[u64]) -> Result<()> {
        self.changed.lock().unwrap_or_else(PoisonError::into_inner).extend(pages);
        let mut state = self.state();
        state.end += RECORD;
        state.nr_transactions += 1;
        let (own, wants_checkpoint) = (state.end, state.nr_transactions.is_multiple_of(CHECKPOINT));
        while state.durable < own {
            if state.has_failed {
                return Err(anyhow!("another thread could not write the log"));
            }
            if state.is_busy {
                state = self.durable.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            // Also for the threads whose records were added meanwhile.
            state.is_busy = true;
            let (from, to) = (state.durable, state.end);
            drop(state);
            let done = self.write_log(from, to);
            state = self.state();
            state.is_busy = false;
            match &done {
                Ok(written) => (state.durable, state.written) = (to, state.written + written),
                Err(_) => state.has_failed = true,
            }
            self.durable.notify_all();
            done?;
        }
        drop(state);
        if wants_checkpoint { self.checkpoint() } else { Ok(()) }
    }

    /// Writes the pages of the log that have records from `from` to `to`, and syncs the log.
    fn write_log(&self, from: u64, to: u64) -> Result<u64> {
        let (first, last) = (from / PAGE, to.div_ceil(PAGE));
        let page = [0x5a; PAGE as usize];
        for number in first..last {
            self.target.write(&self.log, number * PAGE % LOG_BYTES, &page)?;
        }
        self.target.fsync(&self.log)?;
        Ok((last - first) * PAGE)
    }

    fn checkpoint(&self) -> Result<()> {
        let changed = std::mem::take(&mut *self.changed.lock().unwrap_or_else(PoisonError::into_inner));
        let page = [0xa5; PAGE as usize];
        for number in changed {
            self.target.write(&self.table, number * PAGE, &page)?;
        }
        self.target.fsync(&self.table)
    }
}
