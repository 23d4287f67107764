//! [`RequestCounts`]: the number and the duration of requests by opcode, for `ubtrfs stats` and `bench compare`.
//!
//! - N1. Each thread has counters of its own, so that counting causes no cache-line contention. A reader may see that a
//!   request is counted before the request's time is added.
//! - N2. The counters of a thread that has ended are used by the next new thread.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use ubtrfs_transaction::{Metric, prometheus_text};

use crate::protocol::opcode_name;

/// The counts of one connection.
#[derive(Clone, Debug, Default)]
pub struct RequestCounts(Arc<Mutex<Vec<Arc<ThreadCounts>>>>);

/// The counts of one thread.
#[derive(Debug)]
pub(super) struct ThreadCounts {
    ops: [OpCounts; NR_OPS],
    /// `schedstat` of the thread in /proc: time on a processor, time between wake-up and running, and the number of
    /// turns. `None` if the file cannot be opened, such as in a confined server.
    sched: Mutex<Option<File>>,
    /// Nanoseconds between wake-up and running, and the number of turns, of ended threads that used these counts (N2).
    ended: [AtomicU64; 2],
}

#[derive(Debug, Default)]
struct OpCounts {
    requests: AtomicU64,
    errors: AtomicU64,
    nanos: AtomicU64,
    max_nanos: AtomicU64,
}

impl RequestCounts {
    /// Returns the counters that the calling thread is to use (N2).
    pub(super) fn of_thread(&self) -> Arc<ThreadCounts> {
        let mut threads = self.0.lock();
        let free = threads.iter().find(|counts| Arc::strong_count(counts) == 1).cloned();
        let counts = free.unwrap_or_else(|| {
            threads.push(Arc::default());
            Arc::clone(&threads[threads.len() - 1])
        });
        *counts.sched.lock() = File::open("/proc/thread-self/schedstat").ok();
        counts
    }

    /// Time between wake-up and running of all threads so far. Takes some microseconds.
    pub(super) fn waited(&self) -> Duration {
        Duration::from_nanos(self.0.lock().iter().map(|thread| thread.turns()[0]).sum())
    }

    /// All counts as text for Prometheus.
    pub fn text(&self) -> String {
        prometheus_text(&self.metrics())
    }

    /// All counts as metrics. Operations that were never requested are left out.
    pub(crate) fn metrics(&self) -> Vec<Metric> {
        let threads = self.0.lock();
        let mut out = Vec::new();
        for number in 0..NR_OPS {
            let all = || threads.iter().map(|thread| &thread.ops[number]);
            let sum = |of: fn(&OpCounts) -> &AtomicU64| all().map(|op| of(op).load(Ordering::Relaxed)).sum::<u64>();
            let requests = sum(|op| &op.requests);
            if requests == 0 {
                continue;
            }
            let name = opcode_name(u32::try_from(number).unwrap_or_default());
            let mut push = |metric: Metric| out.push(metric.label("opcode", name));
            let help = "Requests of the kernel that were answered, by operation";
            push(Metric::counter("fuse_requests_total", help, requests as f64));
            let help = "Requests that were answered with an error, such as that a name does not exist";
            push(Metric::counter("fuse_request_errors_total", help, sum(|op| &op.errors) as f64));
            let seconds = sum(|op| &op.nanos) as f64 / 1e9;
            push(Metric::counter("fuse_request_seconds_total", "Time in the server, from arrival to answer", seconds));
            let max = all().map(|op| op.max_nanos.load(Ordering::Relaxed)).max().unwrap_or_default() as f64 / 1e9;
            push(Metric::gauge("fuse_request_seconds_max", "Longest time of a request in the server", max));
        }
        let [waited, turns] = threads.iter().fold([0, 0], |[waited, turns], thread| {
            let [more_waited, more_turns] = thread.turns();
            [waited + more_waited, turns + more_turns]
        });
        if turns > 0 {
            let help = "Time that the server's threads waited for a processor after they were woken";
            out.push(Metric::counter("fuse_thread_wait_seconds_total", help, waited as f64 / 1e9));
            let help = "Times that the server's threads got a processor";
            out.push(Metric::counter("fuse_thread_turns_total", help, turns as f64));
        }
        out
    }
}

impl Default for ThreadCounts {
    fn default() -> Self {
        let ops = std::array::from_fn(|_| OpCounts::default());
        Self { ops, sched: Mutex::default(), ended: Default::default() }
    }
}

impl ThreadCounts {
    /// Counts a request. Only the thread that owns the counts calls this function (N1).
    pub(super) fn note(&self, opcode: u32, failed: bool, took: Duration) {
        let op = usize::try_from(opcode).ok().and_then(|number| self.ops.get(number)).unwrap_or(&self.ops[0]);
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let add = |counter: &AtomicU64, value| {
            counter.store(counter.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
        };
        add(&op.requests, 1);
        add(&op.errors, u64::from(failed));
        add(&op.nanos, nanos);
        if nanos > op.max_nanos.load(Ordering::Relaxed) {
            op.max_nanos.store(nanos, Ordering::Relaxed);
        }
    }

    /// Saves the waiting time and the number of turns of the calling thread, which is about to end.
    pub(super) fn thread_ends(&self) {
        let turns = self.turns();
        *self.sched.lock() = None;
        for (ended, value) in self.ended.iter().zip(turns) {
            ended.store(value, Ordering::Relaxed);
        }
    }

    /// Nanoseconds between wake-up and running, and the number of turns on a processor; ended threads (N2) are
    /// included.
    fn turns(&self) -> [u64; 2] {
        let own = self.sched.lock().as_ref().and_then(read_schedstat).unwrap_or_default();
        [0, 1].map(|index| own[index] + self.ended[index].load(Ordering::Relaxed))
    }
}

/// Reads `RUN WAIT TURNS`. Reading fails once the thread has ended.
fn read_schedstat(file: &File) -> Option<[u64; 2]> {
    let mut text = [0; 80];
    let len = file.read_at(&mut text, 0).ok()?;
    let mut fields = std::str::from_utf8(&text[..len]).ok()?.split_ascii_whitespace().skip(1);
    Some([fields.next()?.parse().ok()?, fields.next()?.parse().ok()?])
}

/// The number of opcodes that are counted separately. Requests with other opcodes are counted as opcode 0.
const NR_OPS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn value(counts: &RequestCounts, name: &str, opcode: &str) -> Option<f64> {
        let is_of = |metric: &Metric| metric.labels.iter().any(|(_, value)| value == opcode);
        counts.metrics().into_iter().find(|metric| metric.name == name && is_of(metric)).map(|metric| metric.value)
    }

    #[test]
    fn requests_of_all_threads_are_added_and_counts_of_ended_threads_stay() {
        let counts = RequestCounts::default();
        for _ in 0..3 {
            let own = counts.clone();
            let count = move || {
                let thread = own.of_thread();
                thread.note(3, false, Duration::from_nanos(500));
                thread.note(3, true, Duration::from_nanos(1500));
                thread.note(1000, false, Duration::ZERO);
                thread.thread_ends();
            };
            std::thread::spawn(count).join().unwrap();
        }
        assert_eq!(counts.0.lock().len(), 1, "N2");
        let running = counts.of_thread();
        running.note(3, false, Duration::from_nanos(100));
        let next = counts.of_thread();
        next.note(3, false, Duration::from_nanos(100));
        assert_eq!(counts.0.lock().len(), 2, "N1");
        assert_eq!(value(&counts, "fuse_requests_total", "getattr"), Some(8.0));
        assert_eq!(value(&counts, "fuse_request_errors_total", "getattr"), Some(3.0));
        let seconds = value(&counts, "fuse_request_seconds_total", "getattr").unwrap();
        assert!((seconds - 6.2e-6).abs() < 1e-12, "{seconds}");
        assert_eq!(value(&counts, "fuse_request_seconds_max", "getattr"), Some(1.5e-6));
        assert_eq!(value(&counts, "fuse_requests_total", "other"), Some(3.0));
        assert_eq!(value(&counts, "fuse_requests_total", "write"), None);
    }
}
