//! Tickets: reservations wait for space in order of arrival, and the first of them reclaims space for all.
//!
//! ```text
//!   reserve --fits, no waiters--> granted
//!      \--> queue --first in it--> reclaim step by step --fits--> granted, the next ticket's turn
//!                                        \--no success--> ENOSPC, also for later tickets that do not fit
//! ```
//!
//! The thread of the first ticket in the queue reclaims space itself, so only threads that need space are slowed down.
//!
//! Invariants:
//! - I1. Turns come in order of arrival; a newcomer queues behind the waiters even if its reservation would fit.
//! - I2. A waiter holds no lock that reclaim takes: callers hold no inode lock. Callers that must reserve under an
//!   inode lock ([`Flusher::may_wait`](crate::engine::Flusher::may_wait) is false) do not queue, and neither do changes
//!   that free space.
//! - I3. A waiter does not reclaim if, while it waited, reclaim failed to help an earlier waiter: it tries its
//!   reservation once, and fails if there is still not enough space.
//!
//! Owns the queues, each under a lock. No other lock is taken under the lock of a queue.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};
use ubtrfs_error::{Error, Result};

use crate::engine::Engine;
use crate::health::metric::Metric;
use crate::health::stats::Span;
use crate::lock_rank::{self, Rank};

/// The queues of reservations that wait for space.
#[derive(Debug, Default)]
pub(crate) struct Tickets {
    pub(crate) metadata: TicketQueue,
    pub(crate) data: TicketQueue,
}

impl Tickets {
    /// Metrics of the queues.
    pub(crate) fn metrics(&self) -> Vec<Metric> {
        let mut out = Vec::new();
        for (kind, queue) in [("data", &self.data), ("metadata", &self.metadata)] {
            let (waiting, failed) = queue.counts();
            let queued = Metric::gauge("tickets_waiting", "Reservations that wait for their turn", waiting as f64);
            let failed = Metric::counter("tickets_failed_total", "Reclaims that did not help", failed as f64);
            out.extend([queued, failed].map(|metric| metric.label("kind", kind)));
        }
        out
    }
}

/// The queue of one kind of space.
#[derive(Debug, Default)]
pub(crate) struct TicketQueue {
    /// The tickets in order of arrival. The first ticket has its turn.
    tickets: Mutex<VecDeque<Arc<Condvar>>>,
    nr_waiting: AtomicU64,
    /// Number of reclaims that did not help.
    nr_failures: AtomicU64,
}

/// The right to reclaim, which ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct Turn<'q> {
    queue: &'q TicketQueue,
    /// `TicketQueue::nr_failures` when the ticket joined the queue.
    nr_failures: u64,
}

impl TicketQueue {
    /// Whether no reservation waits, so that a newcomer may take free space (I1).
    pub(crate) fn is_empty(&self) -> bool {
        self.nr_waiting.load(Ordering::Acquire) == 0
    }

    /// Number of waiting tickets, and of reclaims that failed to help.
    fn counts(&self) -> (u64, u64) {
        (self.nr_waiting.load(Ordering::Relaxed), self.nr_failures.load(Ordering::Relaxed))
    }

    /// Waits for the caller's turn.
    pub(crate) fn wait(&self) -> Turn<'_> {
        let ticket = Arc::new(Condvar::new());
        let mut tickets = self.tickets.lock();
        self.nr_waiting.fetch_add(1, Ordering::AcqRel);
        let nr_failures = self.nr_failures.load(Ordering::Acquire);
        tickets.push_back(Arc::clone(&ticket));
        while !tickets.front().is_some_and(|first| Arc::ptr_eq(first, &ticket)) {
            ticket.wait(&mut tickets);
        }
        Turn { queue: self, nr_failures }
    }
}

impl Engine {
    /// Tries `granted` repeatedly, with a round of `reclaim` between two tries. Called if a reservation did not fit, or
    /// if other reservations were waiting before it. If there is a queue and the caller may wait, waits for the
    /// caller's turn first.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`] if reclaim does not help, or an error of `granted` or `reclaim`.
    pub(crate) fn reserve_with_reclaim<T>(
        &self,
        queue: Option<&TicketQueue>,
        granted: impl Fn() -> Result<Option<T>>,
        reclaim: impl Fn(usize) -> Result<()>,
    ) -> Result<T> {
        let _waited = self.stats.span(Span::ReserveWait);
        let may_wait = || self.flusher().is_none_or(|flusher| flusher.may_wait());
        let turn = queue.filter(|_| may_wait()).map(|queue| {
            lock_rank::check_none_from(Rank::Rename, "I2: a waiter holds a lock that reclaim may take");
            queue.wait()
        });
        if turn.as_ref().is_some_and(Turn::is_hopeless) {
            return granted()?.ok_or(Error::NoSpace);
        }
        for round in 0..RECLAIMS {
            if let Some(reservation) = granted()? {
                return Ok(reservation);
            }
            reclaim(round)?;
        }
        if let Some(reservation) = granted()? {
            return Ok(reservation);
        }
        if let Some(turn) = turn {
            turn.fail();
        }
        Err(Error::NoSpace)
    }
}

impl Engine {
    /// A round of reclaim for data: writes dirty data back and commits. Before the second round, waits for the deletion
    /// of files that lost their last name: their space may have come too late for the first round.
    pub(crate) fn reclaim_data(&self, round: usize) -> Result<()> {
        if let (1.., Some(flusher)) = (round, self.flusher()) {
            flusher.wait_for_deletions();
        }
        self.flush_data()?;
        self.commit_to_reclaim()
    }
}

impl Turn<'_> {
    /// Whether reclaim failed to help an earlier waiter while this waiter waited (I3).
    pub(crate) fn is_hopeless(&self) -> bool {
        self.queue.nr_failures.load(Ordering::Acquire) != self.nr_failures
    }

    /// Notes that reclaim did not help.
    pub(crate) fn fail(&self) {
        self.queue.nr_failures.fetch_add(1, Ordering::AcqRel);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut tickets = self.queue.tickets.lock();
        let ended = tickets.pop_front();
        debug_assert!(ended.is_some(), "I1: a turn ends that did not begin");
        self.queue.nr_waiting.fetch_sub(1, Ordering::AcqRel);
        if let Some(next) = tickets.front() {
            next.notify_one();
        }
    }
}

/// Number of rounds of reclaim before a reservation fails. Data written in the first round may let the second round
/// free more space.
pub(crate) const RECLAIMS: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_are_served_in_order_and_fail_together() {
        let queue = TicketQueue::default();
        let order = std::sync::Mutex::new(Vec::new());
        assert!(queue.is_empty());
        std::thread::scope(|scope| {
            let first = queue.wait();
            for number in 0..8 {
                let (queue, order) = (&queue, &order);
                scope.spawn(move || {
                    let turn = queue.wait();
                    order.lock().unwrap().push((number, turn.is_hopeless()));
                });
                // Let the thread join the queue before the next thread starts.
                while queue.nr_waiting.load(Ordering::Acquire) < number + 2 {
                    std::thread::yield_now();
                }
            }
            assert!(!queue.is_empty() && !first.is_hopeless());
            first.fail();
        });
        assert!(queue.is_empty());
        let order = order.into_inner().unwrap();
        assert_eq!(order, (0..8).map(|number| (number, true)).collect::<Vec<_>>());
        assert!(!queue.wait().is_hopeless());
    }
}
