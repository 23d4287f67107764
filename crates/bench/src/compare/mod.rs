//! `bench compare`: runs workloads on fresh filesystems of several kinds, in turn.
//!
//! Each workload runs n times on each side. Each of these runs has the following steps: make a new filesystem in the
//! scratch directory; make the files that the workload needs, durably; mount the filesystem again and drop the
//! machine's caches; run the workload in a new process. The report shows the medians of the n runs.
//!
//! - C1. All sides use images in one directory, and the time of a side ends when the work is durable in its image (see
//!   `run`). The engine and our mount commit and flush the image. For Linux, syncfs(2) is called, and the loop device
//!   passes the flush on to the image. The null server has nothing to make durable.
//! - C2. If memory is limited, one cgroup with one limit contains the client, the server and the page cache that they
//!   fill.
//! - C3. Every exit, also after a signal, releases mounts, loop devices, processes and files.
//! - C4. The requests of FUSE sides are counted by their servers, during the measurement only.

mod report;
mod side;
mod svg;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::ValueEnum as _;
use serde::Serialize;
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};

use crate::cgroup::MemoryLimit;
use crate::record::RunResult;
use crate::target::engine::MkfsLayout;
use crate::workload::{Params, Sizes, Workload};
use crate::{machine, tarball};
use side::{CompareSide, Setup, SideKind};

/// Compare the engine, its mount, Linux's btrfs and a FUSE server that does nothing
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Workloads to run [default: all]
    workloads: Vec<Workload>,
    /// Number of runs of each workload on each side
    #[arg(short = 'n', long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Sides to compare
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = SideKind::ALL)]
    sides: Vec<SideKind>,
    /// Directory for images and mount points, on the disk to be used
    #[arg(long, value_name = "DIR", default_value = "/tmp")]
    scratch: PathBuf,
    /// Size of each image (sparse files)
    #[arg(long, value_name = "SIZE", value_parser = crate::sizes::parse_size, default_value = "32G")]
    image_size: u64,
    /// Number of devices of each filesystem
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    devices: u32,
    /// Profile of data [default: that of mkfs]
    #[arg(long, value_name = "PROFILE")]
    data: Option<String>,
    /// Profile of metadata [default: that of mkfs]
    #[arg(long, value_name = "PROFILE")]
    metadata: Option<String>,
    /// Measure without the last device
    #[arg(long)]
    degraded: bool,
    /// Size of a tree block in bytes [default: that of mkfs]
    #[arg(long, value_name = "SIZE", value_parser = crate::sizes::parse_size)]
    nodesize: Option<u64>,
    /// Memory limit for randwrite, page cache included; 0 for none. The file is twice as large unless --bytes is given
    #[arg(long, value_name = "SIZE", value_parser = crate::sizes::parse_size, default_value = "1G")]
    memory_limit: u64,
    /// Limit memory for every workload, not only for randwrite
    #[arg(long)]
    limit_all: bool,
    /// Memory budget of the engine [default: half of the memory limit, if there is one]
    #[arg(long, value_name = "SIZE", value_parser = crate::sizes::parse_size)]
    memory: Option<u64>,
    /// Put clients and servers of FUSE mounts on one processor
    #[arg(long)]
    pin: bool,
    /// Further options of `ubtrfs mount`; threads=, noio_uring, writeback_cache, idle_poll, noopen, noxattr and
    /// noallow_other apply to the null server too
    #[arg(long, value_name = "OPTIONS", default_value = "")]
    mount_options: String,
    /// Let the loop device use the page cache of the image
    #[arg(long)]
    loop_buffered: bool,
    /// Do not drop the machine's caches before each run; filesystems are still mounted again
    #[arg(long)]
    warm: bool,
    /// Run btrfs check on every filesystem at the end
    #[arg(long)]
    check: bool,
    /// Write all results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a plot
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    sizes: Sizes,
}

/// One run of one workload on one side.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SideRun {
    pub(crate) workload: Workload,
    pub(crate) side: SideKind,
    pub(crate) round: u32,
    /// Whether client and server were on one processor.
    pub(crate) pinned: bool,
    /// The memory limit in bytes.
    pub(crate) memory_limit: Option<u64>,
    /// The maximum number of bytes charged to the cgroup during the run.
    pub(crate) memory_peak: Option<u64>,
    /// Requests that the side's FUSE server answered during the measurement, by operation.
    pub(crate) requests: BTreeMap<String, f64>,
    pub(crate) result: RunResult,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    machine::need_root("bench compare")?;
    if args.sides.contains(&SideKind::Mount) {
        machine::beside("ubtrfs")?;
    }
    if args.sides.contains(&SideKind::Linux) {
        ["mkfs.btrfs", "losetup", "mount"].iter().try_for_each(|name| machine::program(name).map(drop))?;
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted))?;
    }
    let scratch = tempfile::Builder::new()
        .prefix("ubtrfs-bench-")
        .tempdir_in(&args.scratch)
        .with_context(|| format!("cannot make a directory in {}", args.scratch.display()))?;
    let compare = Compare { args, scratch: scratch.path(), interrupted: &interrupted };
    let mut runs = Vec::new();
    // Report the results even after an error, because the results of earlier runs are still useful.
    let done = compare.all(&mut runs);
    let report = report::CompareReport::new(&runs);
    if !runs.is_empty() {
        println!("{}", report.table());
        print!("{}", report.requests());
        if let Some(path) = &args.json {
            let json = serde_json::json!({
                "machine": machine::describe(),
                "command": std::env::args().collect::<Vec<_>>().join(" "),
                "summary": report.rows(),
                "runs": runs,
            });
            std::fs::write(path, format!("{json:#}\n")).with_context(|| format!("cannot write {}", path.display()))?;
        }
        if let Some(path) = &args.svg {
            std::fs::write(path, svg::plot(&report)).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    done
}

struct Compare<'a> {
    args: &'a Args,
    scratch: &'a Path,
    interrupted: &'a AtomicBool,
}

impl Compare<'_> {
    fn all(&self, runs: &mut Vec<SideRun>) -> Result<()> {
        let mut sizes = self.args.sizes.clone();
        let workloads = if self.args.workloads.is_empty() { &Workload::ALL[..] } else { &self.args.workloads };
        if sizes.tar.is_none() && workloads.iter().any(|workload| workload.needs_archive()) {
            let path = self.scratch.join("tree.tar");
            let params = Params::new(Workload::Untar, &sizes);
            tarball::write(&path, params.files, params.seed)?;
            sizes.tar = Some(path);
        }
        for workload in workloads {
            for round in 0..self.args.runs {
                let sides = self.args.sides.iter();
                for side in sides.filter(|side| !workload.needs_subvolumes() || **side != SideKind::Null) {
                    let run = self
                        .one(*workload, *side, round, &sizes)
                        .with_context(|| format!("{} on the {} side", workload.name(), side.name()))?;
                    let (seconds, result) = (run.result.seconds, report::rate(*workload, &run.result));
                    eprintln!("{:9} {:6} run {}: {seconds:8.3} s {result}", workload.name(), side.name(), round + 1);
                    runs.push(run);
                }
            }
        }
        Ok(())
    }

    fn one(&self, workload: Workload, kind: SideKind, round: u32, sizes: &Sizes) -> Result<SideRun> {
        let args = self.args;
        let limit_bytes =
            (workload.limits_memory() || args.limit_all).then_some(args.memory_limit).filter(|max| *max > 0);
        let limit = limit_bytes.map(MemoryLimit::new).transpose()?;
        let pinned = args.pin && kind.is_fuse();
        let mut exec_args: Vec<OsString> = Vec::new();
        if let Some(limit) = &limit {
            exec_args.extend(["--cgroup".into(), limit.dir().into()]);
        }
        if pinned {
            exec_args.push("--cpu=0".into());
        }
        let setup = Setup {
            scratch: self.scratch.to_owned(),
            nr_devices: args.devices as usize,
            layout: MkfsLayout {
                image_bytes: args.image_size,
                nodesize: args.nodesize.map(u32::try_from).transpose().context("--nodesize is too large")?,
                data: args.data.clone(),
                metadata: args.metadata.clone(),
            },
            loop_direct_io: !args.loop_buffered,
            mount_options: args.mount_options.clone(),
            memory_bytes: args.memory.or(limit_bytes.map(|bytes| bytes / 2)),
            exec_args: exec_args.clone(),
        };
        let mut sizes = sizes.clone();
        if let (Some(bytes), None, Workload::Randwrite) = (limit_bytes, sizes.bytes, workload) {
            sizes.bytes = Some(2 * bytes);
        }
        if workload == Workload::Receive {
            sizes.stream = Some(self.scratch.join("stream"));
        }
        // The side is dropped before the memory limit, because its server is in the limit's cgroup.
        let mut side = CompareSide::new(kind, &setup)?;
        self.bench_run(workload, &side, &sizes, "prepare", &exec_args)?;
        side.drop_caches(args.warm, args.degraded)?;
        let requests_before = side.requests()?;
        let result = self.bench_run(workload, &side, &sizes, "measure", &exec_args)?;
        let result = result.context("bench run printed no result")?;
        let mut requests = side.requests()?;
        for (opcode, count) in &mut requests {
            *count -= requests_before.get(opcode).copied().unwrap_or_default();
        }
        let memory_peak = limit.as_ref().and_then(MemoryLimit::peak_bytes);
        if args.check {
            side.check()?;
        }
        drop(side);
        Ok(SideRun { workload, side: kind, round, pinned, memory_limit: limit_bytes, memory_peak, requests, result })
    }

    /// Runs a phase of a workload in a new process.
    fn bench_run(
        &self,
        workload: Workload,
        side: &CompareSide,
        sizes: &Sizes,
        phase: &str,
        exec_args: &[OsString],
    ) -> Result<Option<RunResult>> {
        let own = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(&own);
        command.arg("exec").args(exec_args).arg("--").arg(&own).arg("run").arg(workload.name());
        command.args(["--phase", phase, "--keep", "--warm"]).args(side.target_args()).args(size_args(sizes));
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn().context("cannot start bench run")?;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if self.interrupted.load(Ordering::Relaxed) {
                let _ = child.kill();
                let _ = child.wait();
                bail!("interrupted");
            }
            std::thread::sleep(POLL);
        };
        if !status.success() {
            bail!("bench run failed ({status})");
        }
        if self.interrupted.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        // The output can be read after the process has ended, because it is one line, which fits into the pipe.
        let printed = child.stdout.take().map(std::io::read_to_string).transpose()?.unwrap_or_default();
        if printed.trim().is_empty() { Ok(None) } else { Ok(Some(serde_json::from_str(&printed)?)) }
    }
}

const POLL: Duration = Duration::from_millis(5);

fn size_args(sizes: &Sizes) -> Vec<OsString> {
    let numbers = [
        ("files", sizes.files),
        ("dirs", sizes.dirs),
        ("threads", sizes.threads),
        ("bytes", sizes.bytes),
        ("block", sizes.block),
        ("ops", sizes.ops),
        ("busy", sizes.busy),
        ("seed", Some(sizes.seed)),
    ];
    let mut args: Vec<OsString> = Vec::new();
    for (name, number) in numbers {
        args.extend(number.map(|number| format!("--{name}={number}").into()));
    }
    if let Some(tar) = &sizes.tar {
        args.extend(["--tar".into(), tar.into()]);
    }
    if let Some(source) = &sizes.source {
        args.extend(["--source".into(), source.into()]);
    }
    if let Some(balance) = sizes.balance.and_then(|balance| balance.to_possible_value()) {
        args.extend(["--balance".into(), balance.get_name().into()]);
    }
    if let Some(of) = sizes.of.to_possible_value() {
        args.extend(["--of".into(), of.get_name().into()]);
    }
    if let Some(stream) = &sizes.stream {
        args.extend(["--stream".into(), stream.into()]);
    }
    for (is_set, name) in [(sizes.quotas, "--quotas"), (sizes.incremental, "--incremental")] {
        args.extend(is_set.then(|| name.into()));
    }
    args
}
