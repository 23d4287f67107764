//! Measures the processor time of this process, of a server, and of the kernel threads that work for filesystems.
//!
//! Times are read from `/proc/PID/stat`, in ticks of 10 ms. Kernel threads serve the whole machine, so their work for
//! other programs is included.

use std::collections::HashMap;
use std::fs;

use serde::{Deserialize, Serialize};

/// Seconds of processor time.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct CpuTimes {
    /// Time of the process that makes the requests, and of its children.
    pub(crate) user: f64,
    pub(crate) system: f64,
    /// Time of the server, if there is one.
    pub(crate) server_user: f64,
    pub(crate) server_system: f64,
    /// Time of the kernel threads that may work for a filesystem ([`NAMES`]).
    pub(crate) kernel_threads: f64,
}

/// The processor times at one point in time.
#[derive(Clone, Debug)]
pub(crate) struct CpuMark {
    server: Option<u32>,
    own: ProcessTimes,
    served: ProcessTimes,
    kernel: HashMap<u32, f64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct ProcessTimes {
    user: f64,
    system: f64,
}

impl CpuMark {
    /// Reads the current processor times. `server` is the process id of a server to include.
    pub(crate) fn now(server: Option<u32>) -> Self {
        Self {
            server,
            own: times_of("self", true),
            served: server.map(|pid| times_of(&pid.to_string(), false)).unwrap_or_default(),
            kernel: kernel_threads(),
        }
    }

    /// Returns the processor times that were used since `self` was read.
    pub(crate) fn elapsed(&self) -> CpuTimes {
        let now = Self::now(self.server);
        // A thread that has ended since then is not counted. A new thread is counted from its start.
        let kernel = now.kernel.iter().map(|(pid, used)| used - self.kernel.get(pid).copied().unwrap_or(0.0)).sum();
        CpuTimes {
            user: now.own.user - self.own.user,
            system: now.own.system - self.own.system,
            server_user: now.served.user - self.served.user,
            server_system: now.served.system - self.served.system,
            kernel_threads: kernel,
        }
    }
}

/// Returns the maximum resident memory of this process so far, in MiB.
pub(crate) fn peak_rss_mib() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()).and_then(|number| number.parse::<f64>().ok());
    kib.unwrap_or_default() / 1024.0
}

fn times_of(pid: &str, with_children: bool) -> ProcessTimes {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let Some((_, fields)) = split(&stat) else { return ProcessTimes::default() };
    let field = |index: usize| fields.get(index).and_then(|text| text.parse::<f64>().ok()).unwrap_or_default();
    let mut times = ProcessTimes { user: field(UTIME), system: field(UTIME + 1) };
    if with_children {
        times.user += field(UTIME + 2);
        times.system += field(UTIME + 3);
    }
    ProcessTimes { user: times.user / TICKS, system: times.system / TICKS }
}

/// Returns the processor time of each kernel thread that may work for a filesystem, by thread id.
fn kernel_threads() -> HashMap<u32, f64> {
    let mut found = HashMap::new();
    let Ok(entries) = fs::read_dir("/proc") else { return found };
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        let Some((name, fields)) = split(&stat) else { continue };
        let flags = fields.get(FLAGS).and_then(|text| text.parse::<u32>().ok()).unwrap_or_default();
        if flags & PF_KTHREAD == 0 || !NAMES.iter().any(|prefix| name.starts_with(prefix)) {
            continue;
        }
        let ticks = |index: usize| fields.get(index).and_then(|text| text.parse::<f64>().ok()).unwrap_or_default();
        found.insert(pid, (ticks(UTIME) + ticks(UTIME + 1)) / TICKS);
    }
    found
}

/// Splits a line into the name, which can contain any character, and the fields after it.
fn split(stat: &str) -> Option<(&str, Vec<&str>)> {
    let (head, tail) = stat.rsplit_once(')')?;
    let (_, name) = head.split_once('(')?;
    Some((name, tail.split_whitespace().collect()))
}

/// Indexes of fields of `/proc/PID/stat` after the name. The state, field 3 in proc(5), has index 0 here.
const FLAGS: usize = 6;
const UTIME: usize = 11;
const PF_KTHREAD: u32 = 0x0020_0000;
/// USER_HZ, which is 100 on every architecture that Linux still supports.
const TICKS: f64 = 100.0;
const NAMES: &[&str] = &["kworker", "loop", "btrfs", "kswapd", "jbd2"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_time_is_seen() {
        let mark = CpuMark::now(None);
        let started = std::time::Instant::now();
        let mut sum = 0u64;
        while started.elapsed().as_millis() < 60 {
            sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(1));
        }
        let used = mark.elapsed();
        assert!(used.user + used.system >= 0.0 && used.server_user == 0.0);
        assert!(peak_rss_mib() > 0.0);
    }

    #[test]
    fn names_with_parentheses_are_split() {
        let (name, fields) = split("7 (a) b) c) S 1 2 3").unwrap();
        assert_eq!((name, fields[0], fields[3]), ("a) b) c", "S", "3"));
    }
}
