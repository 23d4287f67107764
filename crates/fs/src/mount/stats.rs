//! Counters of an open filesystem, and the timeline of its work.

use ubtrfs_transaction::{MemberState, Metric, prometheus_text};

use crate::Fs;

impl Fs {
    /// All counters of the engine and the data path.
    pub fn metrics(&self) -> Vec<Metric> {
        let mut out = self.engine.metrics();
        let dirty = self.data.pool.used_bytes() as f64;
        out.push(Metric::gauge("dirty_bytes", "Memory of file data that waits to be written", dirty));
        let (nr_failures, nr_failing) = self.data.errors.counts();
        let help = "Number of failed writebacks of a file's data";
        out.push(Metric::counter("writeback_failures_total", help, nr_failures as f64));
        let help = "Files whose data could not be written back and is kept in memory";
        out.push(Metric::gauge("unwritable_files", help, nr_failing as f64));
        let is_read_only = f64::from(u8::from(self.read_only().is_some()));
        out.push(Metric::gauge("read_only", "1 if the filesystem is read-only", is_read_only));
        let limit = self.options.memory_bytes as f64;
        out.push(Metric::gauge(
            "memory_budget_bytes",
            "Memory limit for caches, delayed items and dirty data together",
            limit,
        ));
        let help = "Number of nearly empty data block groups that bg_reclaim_threshold emptied";
        out.push(Metric::counter("block_groups_reclaimed_total", help, self.reclaim.nr_reclaimed() as f64));
        let states: Vec<MemberState> = self.engine.devices().into_iter().map(|device| device.state).collect();
        let count = |is_in: fn(&MemberState) -> bool| states.iter().filter(|state| is_in(state)).count() as f64;
        let nr_missing = count(|state| matches!(state, MemberState::Missing | MemberState::Kicked));
        out.push(Metric::gauge("devices_missing", "Devices that are missing, or failed and are not used", nr_missing));
        let nr_behind = count(|state| state.behind_at().is_some());
        out.push(Metric::gauge("devices_behind", "Devices that are being brought up to date", nr_behind));
        let (walked, copied) = self.resync.done_bytes();
        let help = "Bytes of extents that were looked at to bring devices up to date";
        out.push(Metric::counter("resync_walked_bytes_total", help, walked as f64));
        let help = "Bytes that were copied to bring devices up to date";
        out.push(Metric::counter("resync_copied_bytes_total", help, copied as f64));
        let has_io_uring = f64::from(u8::from(self.engine.devices_have_io_uring()));
        let help = "1 if large reads and writes use several concurrent io_uring requests";
        out.push(Metric::gauge("device_io_uring", help, has_io_uring));
        out
    }

    /// All counters as text for Prometheus.
    pub fn metrics_text(&self) -> String {
        prometheus_text(&self.metrics())
    }

    /// Goes on with the timeline of another filesystem, which ends there.
    pub fn continue_timeline(&self, of: &Self) {
        self.engine.stats().continue_timeline(of.engine.stats());
    }

    /// Starts to write a timeline of commits and writeback to `file`, for chrome://tracing and ui.perfetto.dev.
    pub fn start_timeline(&self, file: std::fs::File) -> std::io::Result<()> {
        self.engine.stats().start_timeline(file)
    }
}
