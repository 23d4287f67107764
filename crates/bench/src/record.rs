//! The results of measurements: latencies of single operations, and the result of a run.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::cpu::CpuTimes;

/// A histogram of latencies of up to an hour, in nanoseconds, with a precision of three digits.
#[derive(Clone, Debug)]
pub(crate) struct Latencies(Histogram<u64>);

const LONGEST_NS: u64 = 3_600_000_000_000;
const DIGITS: u8 = 3;

impl Latencies {
    pub(crate) fn new() -> Self {
        Self(Histogram::new_with_bounds(1, LONGEST_NS, DIGITS).expect("constant bounds in order"))
    }

    /// Runs one operation and records its latency.
    pub(crate) fn time<T>(&mut self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let started = Instant::now();
        let done = work()?;
        self.note(started.elapsed());
        Ok(done)
    }

    pub(crate) fn note(&mut self, took: Duration) {
        self.0.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(LONGEST_NS).max(1));
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        // Adding cannot fail, because both histograms have equal bounds.
        let _always_fits = self.0.add(&other.0);
    }

    pub(crate) fn summary(&self) -> Option<LatencySummary> {
        if self.0.is_empty() {
            return None;
        }
        let micros = |nanos: u64| nanos as f64 / 1000.0;
        Some(LatencySummary {
            mean_us: self.0.mean() / 1000.0,
            p50_us: micros(self.0.value_at_quantile(0.5)),
            p99_us: micros(self.0.value_at_quantile(0.99)),
            p999_us: micros(self.0.value_at_quantile(0.999)),
            max_us: micros(self.0.max()),
        })
    }
}

/// The mean, percentiles and maximum of latencies, in microseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct LatencySummary {
    pub(crate) mean_us: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
    pub(crate) max_us: f64,
}

/// The operations and bytes of the measured part of a workload, and their latencies.
#[derive(Clone, Debug)]
pub(crate) struct MeasuredWork {
    /// The number of operations. Each operation handles a file, a directory entry or a block, depending on the
    /// workload.
    pub(crate) ops: u64,
    /// Bytes of file data read or written.
    pub(crate) bytes: u64,
    pub(crate) latencies: Latencies,
    /// The time to report, if only a part of the measured work is timed. `None` means the time of the whole work.
    pub(crate) timed: Option<Duration>,
}

impl MeasuredWork {
    pub(crate) fn new() -> Self {
        Self { ops: 0, bytes: 0, latencies: Latencies::new(), timed: None }
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.ops += other.ops;
        self.bytes += other.bytes;
        self.latencies.merge(&other.latencies);
    }
}

/// The printed result of one run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RunResult {
    pub(crate) workload: String,
    /// The target: `engine IMAGE` or `dir DIR`.
    pub(crate) target: String,
    /// `import` if the program `ubtrfs import` did the work, otherwise `calls`.
    pub(crate) through: String,
    /// Time of the work and of making it durable.
    pub(crate) seconds: f64,
    pub(crate) work_seconds: f64,
    pub(crate) sync_seconds: f64,
    pub(crate) ops: u64,
    pub(crate) ops_per_second: f64,
    pub(crate) bytes: u64,
    pub(crate) mib_per_second: f64,
    /// `None` if single operations were not timed.
    pub(crate) latency: Option<LatencySummary>,
    pub(crate) cpu: CpuTimes,
    /// Maximum resident memory of this process; 0 if `ubtrfs import` did the work.
    pub(crate) peak_rss_mib: f64,
    pub(crate) params: serde_json::Value,
    /// Counters of the engine since it opened the image for the measurement, by the names of `ubtrfs stats`; empty if
    /// the engine is in another process.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) engine: BTreeMap<String, f64>,
}

impl RunResult {
    /// Computes operations and bytes per second from the counts.
    pub(crate) fn set_rates(&mut self) {
        let seconds = self.seconds.max(1e-9);
        self.ops_per_second = self.ops as f64 / seconds;
        self.mib_per_second = self.bytes as f64 / f64::from(1 << 20) / seconds;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_all_threads() {
        let (mut one, mut two) = (Latencies::new(), Latencies::new());
        (0..99).for_each(|_| one.note(Duration::from_micros(10)));
        two.note(Duration::from_millis(5));
        one.merge(&two);
        let summary = one.summary().unwrap();
        assert!((9.9..10.1).contains(&summary.p50_us), "{summary:?}");
        assert!((4990.0..5010.0).contains(&summary.max_us), "{summary:?}");
        assert!(Latencies::new().summary().is_none());
    }
}
