//! [`Throttle`]: the progress of the running flush of delayed items, the pauses of writers that are ahead of it, and
//! the writers that wait for its stages.
//!
//! [`crate::reservation::throttle`] decides when a writer is compared with the flush, and when it waits.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::event_count::EventCount;

/// Progress of the running flush, and the time that writers still have to sleep.
#[derive(Debug)]
pub(crate) struct Throttle {
    /// A flush begins, items are frozen, frozen items have left memory, a flush ends.
    pub(crate) stages: EventCount,
    /// Thousandths of the running flush that are done; [`IDLE`] while no flush runs.
    progress: AtomicU64,
    /// Microseconds that writers still have to sleep.
    debt_micros: AtomicU64,
}

impl Default for Throttle {
    fn default() -> Self {
        Self { stages: EventCount::default(), progress: AtomicU64::new(IDLE), debt_micros: AtomicU64::new(0) }
    }
}

/// Marks a flush as running. Dropping this value ends the flush.
pub(crate) struct FlushProgress<'a> {
    throttle: &'a Throttle,
}

impl Throttle {
    /// Begins a flush.
    pub(crate) fn begin(&self) -> FlushProgress<'_> {
        self.progress.store(0, Ordering::Relaxed);
        self.stages.note();
        FlushProgress { throttle: self }
    }

    /// Notes that `done` of `all` frozen items are applied to the trees.
    pub(crate) fn applied(&self, done: usize, all: usize) {
        let share = APPLY_SHARE.saturating_mul(done as u64).checked_div(all as u64).unwrap_or_default();
        self.progress.fetch_max(share.min(APPLY_SHARE), Ordering::Relaxed);
    }

    /// Thousandths of the running flush that are done; `None` while no flush runs.
    pub(crate) fn progress(&self) -> Option<u64> {
        Some(self.progress.load(Ordering::Relaxed)).filter(|&progress| progress != IDLE)
    }

    /// The time that this writer has to sleep now. `fill` is the progress of the writers from `start` to the limit, in
    /// thousandths.
    pub(crate) fn pause(&self, fill: u64) -> Option<Duration> {
        let ahead = fill.saturating_sub(self.progress()?);
        if ahead == 0 {
            return None;
        }
        let nap = NAP.as_micros() as u64;
        let more = ahead.saturating_mul(MICROS_AHEAD);
        let owed = self.debt_micros.fetch_add(more, Ordering::Relaxed).saturating_add(more);
        // If two writers add to a debt that suffices for one nap, only one of them sleeps. The end of the flush cancels
        // the rest of the debt.
        let pays = |debt: u64| debt.checked_sub(nap);
        if owed < nap || self.debt_micros.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pays).is_err() {
            return None;
        }
        Some(NAP)
    }
}

impl Drop for FlushProgress<'_> {
    fn drop(&mut self) {
        self.throttle.progress.store(IDLE, Ordering::Relaxed);
        self.throttle.debt_micros.store(0, Ordering::Relaxed);
        self.throttle.stages.note();
    }
}

const IDLE: u64 = u64::MAX;
/// Progress of a flush, in thousandths, when all frozen items are applied.
const APPLY_SHARE: u64 = 900;
/// Microseconds of debt that a change adds for each thousandth that its writer is ahead.
const MICROS_AHEAD: u64 = 2;
/// The length of a pause.
const NAP: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_are_slowed_by_how_far_they_are_ahead_of_the_commit() {
        let throttle = Throttle::default();
        let naps = |fill| (0..1000).filter(|_| throttle.pause(fill).is_some()).count();
        assert_eq!(naps(1000), 0, "no commit runs");
        let commit = throttle.begin();
        let (near, far) = (naps(100), naps(900));
        assert!(near > 100 && far > 5 * near / 2, "{near} {far}");
        throttle.applied(1, 2);
        assert!(naps(400) <= 1, "the commit is ahead");
        throttle.applied(1, 4);
        assert_eq!(throttle.progress(), Some(450), "it never goes back");
        drop(commit);
        assert_eq!(throttle.progress(), None);
    }
}
