//! The report: medians, ratios, and the table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::SideRun;
use super::side::SideKind;
use crate::record::{LatencySummary, RunResult};
use crate::workload::Workload;

/// Medians of the runs of one workload on one side.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct CompareRow {
    pub(crate) workload: Workload,
    pub(crate) side: SideKind,
    pub(crate) pinned: bool,
    pub(crate) runs: usize,
    pub(crate) seconds: f64,
    pub(crate) sync_seconds: f64,
    pub(crate) ops_per_second: f64,
    pub(crate) mib_per_second: f64,
    /// The speed relative to Linux's btrfs, `None` if Linux's btrfs did not run.
    pub(crate) to_linux: Option<f64>,
    /// The speed relative to the null server, `None` if the null server did not run.
    pub(crate) to_null: Option<f64>,
    pub(crate) latency: Option<LatencySummary>,
    /// Processor time of the client.
    pub(crate) cpu_client: f64,
    /// Processor time of the server.
    pub(crate) cpu_server: f64,
    /// Processor time of the kernel's threads.
    pub(crate) cpu_kernel_threads: f64,
    /// The time of the fastest run.
    pub(crate) seconds_min: f64,
    /// The time of the slowest run.
    pub(crate) seconds_max: f64,
    /// The number of requests to the FUSE server that one operation of the workload causes, for each type of FUSE
    /// request.
    pub(crate) requests_per_op: BTreeMap<String, f64>,
}

/// All rows, in the order in which workloads and sides ran.
#[derive(Clone, Debug)]
pub(crate) struct CompareReport(Vec<CompareRow>);

/// Whether the rate of a workload counts bytes instead of operations.
pub(crate) fn counts_bytes(workload: Workload) -> bool {
    matches!(workload, Workload::Seqwrite | Workload::Seqread | Workload::Randwrite | Workload::Randread)
}

/// Formats the rate of a run in the unit of its workload.
pub(crate) fn rate(workload: Workload, result: &RunResult) -> String {
    shown_rate(workload, result.ops_per_second, result.mib_per_second)
}

fn shown_rate(workload: Workload, ops: f64, mib: f64) -> String {
    if counts_bytes(workload) { format!("{mib:.0} MiB/s") } else { format!("{ops:.0}/s") }
}

impl CompareReport {
    pub(crate) fn new(runs: &[SideRun]) -> Self {
        let mut keys: Vec<(Workload, SideKind)> = Vec::new();
        for run in runs {
            if !keys.contains(&(run.workload, run.side)) {
                keys.push((run.workload, run.side));
            }
        }
        let of = |workload, side| {
            runs.iter().filter(move |run| run.workload == workload && run.side == side).collect::<Vec<_>>()
        };
        let seconds = |workload, side| median(of(workload, side).iter().map(|run| run.result.seconds));
        let rows = keys.iter().map(|(workload, side)| {
            let runs = of(*workload, *side);
            let middle = |value: fn(&RunResult) -> f64| median(runs.iter().map(|run| value(&run.result)));
            let own = middle(|result| result.seconds).unwrap_or_default();
            let ratio = |other| seconds(*workload, other).map(|other| other / own.max(1e-9));
            let all = runs.iter().map(|run| run.result.seconds);
            CompareRow {
                workload: *workload,
                side: *side,
                pinned: runs.iter().any(|run| run.pinned),
                runs: runs.len(),
                seconds: own,
                sync_seconds: middle(|result| result.sync_seconds).unwrap_or_default(),
                ops_per_second: middle(|result| result.ops_per_second).unwrap_or_default(),
                mib_per_second: middle(|result| result.mib_per_second).unwrap_or_default(),
                to_linux: ratio(SideKind::Linux),
                to_null: ratio(SideKind::Null),
                latency: median_latency(&runs),
                cpu_client: middle(|result| result.cpu.user + result.cpu.system).unwrap_or_default(),
                cpu_server: middle(|result| result.cpu.server_user + result.cpu.server_system).unwrap_or_default(),
                cpu_kernel_threads: middle(|result| result.cpu.kernel_threads).unwrap_or_default(),
                seconds_min: all.clone().fold(f64::INFINITY, f64::min),
                seconds_max: all.fold(0.0, f64::max),
                requests_per_op: requests_per_op(&runs),
            }
        });
        Self(rows.collect())
    }

    /// Formats the number of requests that one operation causes, one line for each workload and FUSE side.
    pub(crate) fn requests(&self) -> String {
        let mut text = String::new();
        for row in self.0.iter().filter(|row| !row.requests_per_op.is_empty()) {
            let mut each: Vec<_> = row.requests_per_op.iter().filter(|(_, nr)| **nr >= 0.005).collect();
            each.sort_by(|one, other| other.1.total_cmp(one.1));
            let each: Vec<String> = each.iter().map(|(opcode, nr)| format!("{opcode} {nr:.2}")).collect();
            // The total omits FORGET requests, because no program waits for them.
            let is_counted = |(opcode, _): &(&String, &f64)| !opcode.contains("forget");
            let all: f64 = row.requests_per_op.iter().filter(is_counted).map(|(_, nr)| nr).sum();
            let (workload, side) = (row.workload.name(), row.side.name());
            let _ = writeln!(text, "{workload:9} {side:6} {all:6.2} requests an operation: {}", each.join(", "));
        }
        text
    }

    pub(crate) fn rows(&self) -> &[CompareRow] {
        &self.0
    }

    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        table.set_header([
            "workload",
            "side",
            "seconds",
            "(min-max)",
            "of it sync",
            "rate",
            "x linux",
            "x null",
            "p50",
            "p99",
            "p99.9",
            "max",
            "cpu client",
            "server",
            "kthreads",
        ]);
        for row in &self.0 {
            let side = if row.pinned { format!("{} (1 cpu)", row.side.name()) } else { row.side.name().to_owned() };
            let ratio = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
            let micros =
                |value: fn(&LatencySummary) -> f64| row.latency.as_ref().map_or("-".to_owned(), |all| time(value(all)));
            table.add_row([
                row.workload.name().to_owned(),
                side,
                format!("{:.3}", row.seconds),
                format!("{:.2}-{:.2}", row.seconds_min, row.seconds_max),
                format!("{:.3}", row.sync_seconds),
                shown_rate(row.workload, row.ops_per_second, row.mib_per_second),
                ratio(row.to_linux),
                ratio(row.to_null),
                micros(|all| all.p50_us),
                micros(|all| all.p99_us),
                micros(|all| all.p999_us),
                micros(|all| all.max_us),
                format!("{:.2}", row.cpu_client),
                format!("{:.2}", row.cpu_server),
                format!("{:.2}", row.cpu_kernel_threads),
            ]);
        }
        for column in table.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }
}

/// Computes how many requests of each FUSE type one operation of the workload causes. Each number is the median of all
/// runs.
fn requests_per_op(runs: &[&SideRun]) -> BTreeMap<String, f64> {
    let opcodes: BTreeSet<&String> = runs.iter().flat_map(|run| run.requests.keys()).collect();
    let of_run = |run: &&SideRun, opcode| run.requests.get(opcode).map_or(0.0, |nr| nr / run.result.ops.max(1) as f64);
    opcodes
        .into_iter()
        .filter_map(|opcode| Some((opcode.clone(), median(runs.iter().map(|run| of_run(run, opcode)))?)))
        .collect()
}

/// Formats microseconds in a suitable unit.
fn time(micros: f64) -> String {
    match micros {
        micros if micros >= 1e6 => format!("{:.2} s", micros / 1e6),
        micros if micros >= 1e3 => format!("{:.1} ms", micros / 1e3),
        micros => format!("{micros:.1} us"),
    }
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    let lower = values[(values.len() - 1) / 2];
    Some((lower + upper) / 2.0)
}

/// Computes the median of each percentile.
fn median_latency(runs: &[&SideRun]) -> Option<LatencySummary> {
    let all: Vec<LatencySummary> = runs.iter().filter_map(|run| run.result.latency).collect();
    let middle = |value: fn(&LatencySummary) -> f64| median(all.iter().map(value));
    Some(LatencySummary {
        mean_us: middle(|one| one.mean_us)?,
        p50_us: middle(|one| one.p50_us)?,
        p99_us: middle(|one| one.p99_us)?,
        p999_us: middle(|one| one.p999_us)?,
        max_us: middle(|one| one.max_us)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_numbers() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), Some(2.5));
        assert_eq!(median(std::iter::empty()), None);
    }

    #[test]
    fn times_have_fitting_units() {
        assert_eq!([time(3.25), time(4200.0), time(2.6e6)], ["3.2 us", "4.2 ms", "2.60 s"]);
    }
}
