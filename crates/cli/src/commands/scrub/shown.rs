//! The texts of `scrub start` and `scrub status`, as btrfs-progs prints them. Times are in UTC.

use serde_json::{Value, json};
use ubtrfs_control::scrub::Counts;

use super::record::{DeviceScrubRecord, fields};
use crate::commands::offline::text::long_time_text;
use crate::units::Units;

/// The state of a scrub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScrubPhase {
    Running,
    Finished,
    Aborted,
    Interrupted,
}

impl ScrubPhase {
    pub(super) fn of(record: &DeviceScrubRecord, is_running: bool) -> Self {
        match record {
            _ if is_running => Self::Running,
            record if record.is_cancelled => Self::Aborted,
            record if record.is_finished => Self::Finished,
            _ => Self::Interrupted,
        }
    }

    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Finished => "finished",
            Self::Aborted => "aborted",
            Self::Interrupted => "interrupted",
        }
    }
}

/// A scrub of a device, or of all devices together.
#[derive(Clone, Debug)]
pub(super) struct ShownScrub {
    pub(super) record: DeviceScrubRecord,
    pub(super) state: ScrubPhase,
    /// Bytes to scrub.
    pub(super) total: u64,
    /// The highest rate in bytes per second; 0 means no limit.
    pub(super) limit: u64,
}

impl ShownScrub {
    /// All devices together. The time is that of the device that takes longest. Devices that were never scrubbed do not
    /// count beside others.
    pub(super) fn sum(devices: &[Self], total: u64) -> Option<Self> {
        let begun: Vec<Self> = devices.iter().filter(|device| device.record.started > 0).cloned().collect();
        let (first, others) = if begun.is_empty() { devices } else { &begun }.split_first()?;
        let mut sum = Self { total, ..first.clone() };
        for other in others {
            let last_physical = sum.record.counts.last_physical.max(other.record.counts.last_physical);
            sum.record = sum.record.plus(&Counts { last_physical, ..other.record.counts });
            sum.record.started = sum.record.started.min(other.record.started);
            sum.record.resumed = sum.record.resumed.max(other.record.resumed);
            sum.record.duration = sum.record.duration.max(other.record.duration);
            sum.limit = sum.limit.saturating_add(other.limit);
            let order = [ScrubPhase::Finished, ScrubPhase::Interrupted, ScrubPhase::Aborted, ScrubPhase::Running];
            let rank = |state| order.iter().position(|other| *other == state);
            sum.state = if rank(other.state) > rank(sum.state) { other.state } else { sum.state };
        }
        Some(sum)
    }

    fn scrubbed(&self) -> u64 {
        let Counts { data_bytes_scrubbed, tree_bytes_scrubbed, .. } = self.record.counts;
        data_bytes_scrubbed.saturating_add(tree_bytes_scrubbed)
    }

    /// Bytes per second.
    fn rate(&self) -> u64 {
        self.scrubbed().checked_div(self.record.duration).unwrap_or(0)
    }

    /// The lines about the scrub; with `raw`, all counts.
    pub(super) fn text(&self, units: &Units, raw: bool, now: u64) -> String {
        if self.record.started == 0 {
            return "\tno stats available\n".to_owned() + &self.amounts(units, now);
        }
        let DeviceScrubRecord { started, resumed, duration, .. } = self.record;
        let mut text = line("Scrub started:", &time(started));
        if resumed > 0 {
            text += &line("Scrub resumed:", &time(resumed));
        }
        text += &line("Status:", self.state.word());
        text += &line("Duration:", &span(duration));
        match raw {
            true => text + &raw_counts(&self.record.counts),
            false => text + &self.amounts(units, now),
        }
    }

    fn amounts(&self, units: &Units, now: u64) -> String {
        let mut text = String::new();
        let (scrubbed, rate) = (self.scrubbed(), self.rate());
        let is_running = self.state == ScrubPhase::Running && self.record.started > 0;
        if is_running && rate > 0 {
            let left = self.total.saturating_sub(scrubbed) / rate;
            text += &line("Time left:", &span(left));
            text += &line("ETA:", &time(now.saturating_add(left)));
        }
        text += &line("Total to scrub:", &units.format(self.total));
        if is_running {
            let percent = scrubbed as f64 * 100.0 / (self.total.max(1)) as f64;
            text += &line("Bytes scrubbed:", &format!("{}  ({percent:.2}%)", units.format(scrubbed)));
        }
        let limit = match self.limit {
            0 => String::new(),
            limit => format!(" (limit {}/s)", units.format(limit)),
        };
        text += &line("Rate:", &format!("{}/s{limit}", units.format(rate)));
        text + &line("Error summary:", &errors(&self.record.counts))
    }

    pub(super) fn json(&self) -> Value {
        let counts: serde_json::Map<_, _> =
            fields(&self.record.counts).into_iter().map(|(name, value)| (name.to_owned(), json!(value))).collect();
        let DeviceScrubRecord { started, resumed, duration, .. } = self.record;
        let is_known = started > 0;
        json!({
            "status": is_known.then(|| self.state.word()),
            "started": is_known.then_some(started),
            "resumed": (resumed > 0).then_some(resumed),
            "duration_secs": duration,
            "total_bytes": self.total,
            "limit_bytes_per_sec": self.limit,
            "counts": counts,
        })
    }
}

fn line(name: &str, value: &str) -> String {
    format!("{name:<18}{value}\n")
}

fn time(secs: u64) -> String {
    long_time_text(i64::try_from(secs).unwrap_or(i64::MAX))
}

fn span(secs: u64) -> String {
    format!("{}:{:02}:{:02}", secs / 3600, secs / 60 % 60, secs % 60)
}

/// The kinds of errors with their numbers, and how many were corrected.
fn errors(counts: &Counts) -> String {
    let kinds = [
        ("read", counts.read_errors),
        ("super", counts.super_errors),
        ("verify", counts.verify_errors),
        ("csum", counts.csum_errors),
    ];
    let found: Vec<String> =
        kinds.iter().filter(|(_, count)| *count > 0).map(|(kind, count)| format!("{kind}={count}")).collect();
    if found.is_empty() {
        return "no errors found".to_owned();
    }
    format!(
        "{}\n  Corrected:      {}\n  Uncorrectable:  {}\n  Unverified:     0",
        found.join(" "),
        counts.corrected_errors,
        counts.uncorrectable_errors
    )
}

/// All counts, in the order of btrfs-progs.
fn raw_counts(counts: &Counts) -> String {
    let mut text = String::new();
    for (name, value) in fields(counts) {
        if name == "corrected_errors" {
            text += "\tunverified_errors: 0\n";
        }
        text += &format!("\t{name}: {value}\n");
    }
    text
}
