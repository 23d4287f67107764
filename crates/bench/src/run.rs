//! `bench run`: runs one workload on one target and prints the result as JSON.
//!
//! - R1. `seconds` is the time of the work and of the sync that makes it durable. The sync is `Fs::sync` for an engine
//!   in this process, and syncfs(2) for a directory. On a mount of ubtrfs, syncfs(2) is followed by the mount's own
//!   sync command. The workloads `snapshot`, `balance`, `send` and `receive` measure `seconds` themselves
//!   ([`MeasuredWork::timed`]): `receive` includes a sync, and the other three need none.
//! - R2. First, the files that the workload needs are made, and synced. Then, as root and without `--warm`, the caches
//!   are dropped, but only for a workload that needs files. Then the workload runs.
//! - R3. The workload makes all files in the directory `bench` of the target. At the end, the directory is removed
//!   unless `--keep` or `--phase prepare` is given.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::cpu::{CpuMark, peak_rss_mib};
use crate::record::{MeasuredWork, RunResult};
use crate::target::BenchTarget;
use crate::target::dir::DirTarget;
use crate::target::engine::{EngineTarget, MkfsLayout, make_images};
use crate::workload::{Params, Sizes, Workload, remove_all};
use crate::{machine, tarball};

/// Run one workload on one filesystem and print the result as JSON
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Workload to run
    workload: Workload,
    /// Image to open in this process; repeat it for each device of a filesystem
    #[arg(long, value_name = "IMAGE", required_unless_present = "dir", conflicts_with = "dir")]
    engine: Vec<PathBuf>,
    /// Open the images although a device is missing
    #[arg(long, requires = "engine")]
    degraded: bool,
    /// Directory of any mounted filesystem
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Make and format the image with this size if it does not exist
    #[arg(long, value_name = "SIZE", value_parser = crate::sizes::parse_size, requires = "engine")]
    create: Option<u64>,
    /// Memory budget of the engine
    #[arg(long, value_name = "SIZE", value_parser = crate::sizes::parse_size, requires = "engine")]
    memory: Option<u64>,
    /// Unpack through the library in this process, even where `ubtrfs import` could do it
    #[arg(long, requires = "engine")]
    no_import: bool,
    /// Run only a part: make the files that the workload needs, or measure with the files made before
    #[arg(long, value_enum, default_value_t = RunPhase::All)]
    phase: RunPhase,
    /// Do not drop the machine's caches before the measurement
    #[arg(long)]
    warm: bool,
    /// Keep the files
    #[arg(long)]
    keep: bool,
    /// Process id of a server whose processor time is measured too
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    #[command(flatten)]
    sizes: Sizes,
}

/// The part of a run that is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum RunPhase {
    All,
    Prepare,
    Measure,
}

impl Args {
    /// Whether the files are removed at the end. The files stay with `--keep`, and after a run that only prepared them
    /// for a later measurement.
    fn cleans_up<T>(&self, done: &Result<T>) -> bool {
        !self.keep && (done.is_err() || self.phase != RunPhase::Prepare)
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(result) = run_phases(args)? {
        println!("{}", serde_json::to_string(&result)?);
    }
    Ok(())
}

fn run_phases(args: &Args) -> Result<Option<RunResult>> {
    let mut params = Params::new(args.workload, &args.sizes);
    if let Some(archive) = &params.tar {
        std::fs::File::open(archive).with_context(|| format!("cannot open {}", archive.display()))?;
    }
    // The temporary archive is removed when this function ends.
    let mut made_archive = None;
    if args.workload.needs_archive() && params.tar.is_none() && args.phase != RunPhase::Measure {
        let made = tempfile::Builder::new().prefix("ubtrfs-bench-").suffix(".tar").tempfile()?;
        tarball::write(made.path(), params.files, params.seed)?;
        params.tar = Some(made.path().to_owned());
        made_archive = Some(made);
    }
    let result = match (args.engine.first(), &args.dir) {
        (Some(image), _) => on_engine(args, &params, image),
        (None, Some(dir)) => on_dir(args, &params, dir),
        (None, None) => bail!("give --engine IMAGE or --dir DIR"),
    };
    drop(made_archive);
    result
}

fn on_engine(args: &Args, params: &Params, image: &Path) -> Result<Option<RunResult>> {
    if let Some(image_bytes) = args.create.filter(|_| !image.exists()) {
        make_images(&args.engine, &MkfsLayout { image_bytes, ..MkfsLayout::default() })?;
    }
    /// Opens the images, does the work, and closes them. An error of the work takes precedence over an error of closing.
    fn opened<R>(args: &Args, work: impl FnOnce(&EngineTarget) -> Result<R>) -> Result<R> {
        let target = EngineTarget::open(&args.engine, args.degraded, args.memory)?;
        let done = work(&target);
        let closed = target.close();
        let done = done?;
        closed.map(|()| done)
    }
    if args.phase != RunPhase::Measure {
        opened(args, make_base)?;
    }
    let phases = || {
        if args.phase != RunPhase::Measure {
            opened(args, |target| prepare(args, params, target))?;
        }
        if args.phase == RunPhase::Prepare {
            return Ok(None);
        }
        let import = match args.workload {
            Workload::Untar if !args.no_import && !args.degraded => machine::beside("ubtrfs").ok(),
            _ => None,
        };
        let mut result = match import {
            Some(program) => import_archive(args, params, &program, image)?,
            None => opened(args, |target| measure(args, params, target))?,
        };
        result.target = format!("engine {}", image.display());
        Ok(Some(result))
    };
    let done = phases();
    if args.cleans_up(&done) {
        opened(args, |target| clean(args, params, target))
            .or_else(|error| done.as_ref().map_or(Ok(()), |_| Err(error)))?;
    }
    done
}

fn on_dir(args: &Args, params: &Params, dir: &Path) -> Result<Option<RunResult>> {
    let target = DirTarget::open(dir)?;
    if args.phase != RunPhase::Measure {
        make_base(&target)?;
    }
    let phases = || {
        if args.phase != RunPhase::Measure {
            prepare(args, params, &target)?;
        }
        if args.phase == RunPhase::Prepare {
            return Ok(None);
        }
        let mut result = measure(args, params, &target)?;
        result.target = format!("dir {}", dir.display());
        Ok(Some(result))
    };
    let done = phases();
    if args.cleans_up(&done) {
        clean(args, params, &target).or_else(|error| done.as_ref().map_or(Ok(()), |_| Err(error)))?;
    }
    done
}

/// The directory in which the workload makes all its files (R3).
const BASE: &[u8] = b"bench";

fn make_base<T: BenchTarget>(target: &T) -> Result<()> {
    let made = target.mkdir(&target.root()?, BASE, 0o755);
    made.map(drop).context("cannot make the directory 'bench' in the target; if it is there, remove it")
}

fn prepare<T: BenchTarget>(args: &Args, params: &Params, target: &T) -> Result<()> {
    args.workload.prepare(target, params, &target.child(&target.root()?, BASE)?)?;
    target.sync()?;
    if args.workload.has_preparation() && !args.warm {
        machine::drop_caches_if_root();
    }
    Ok(())
}

fn measure<T: BenchTarget>(args: &Args, params: &Params, target: &T) -> Result<RunResult> {
    if let Some(archive) = &params.tar {
        machine::read_into_cache(archive)?;
    }
    let base = target.child(&target.root()?, BASE)?;
    let busy = BusyThreads::start(params.busy)?;
    let mark = CpuMark::now(args.server_pid);
    let started = Instant::now();
    let work = args.workload.measure(target, params, &base)?;
    let worked = started.elapsed().as_secs_f64();
    target.sync()?;
    let seconds = started.elapsed().as_secs_f64();
    let cpu = mark.elapsed();
    drop(busy);
    let mut result = result(args.workload, params, &work)?;
    let (seconds, worked) = work.timed.map_or((seconds, worked), |timed| (timed.as_secs_f64(), timed.as_secs_f64()));
    (result.seconds, result.work_seconds, result.sync_seconds) = (seconds, worked, seconds - worked);
    (result.cpu, result.peak_rss_mib) = (cpu, peak_rss_mib());
    result.engine = target.engine_metrics();
    result.set_rates();
    Ok(result)
}

/// Threads that do nothing but use processors, until this is dropped. Their time counts as the client's.
struct BusyThreads {
    stopped: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl BusyThreads {
    fn start(nr: u64) -> Result<Self> {
        let mut busy = Self { stopped: Arc::default(), threads: Vec::new() };
        for _ in 0..nr {
            let stopped = Arc::clone(&busy.stopped);
            let spins = move || {
                while !stopped.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            };
            let thread = std::thread::Builder::new().name("busy".to_owned()).spawn(spins);
            busy.threads.push(thread.context("cannot start a thread")?);
        }
        Ok(busy)
    }
}

impl Drop for BusyThreads {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn clean<T: BenchTarget>(args: &Args, params: &Params, target: &T) -> Result<()> {
    let root = target.root()?;
    let base = target.child(&root, BASE)?;
    args.workload.clean(target, params, &base)?;
    remove_all(target, &base)?;
    target.rmdir(&root, BASE)?;
    target.sync()
}

fn result(workload: Workload, params: &Params, work: &MeasuredWork) -> Result<RunResult> {
    Ok(RunResult {
        workload: workload.name().to_owned(),
        target: String::new(),
        through: "calls".to_owned(),
        seconds: 0.0,
        work_seconds: 0.0,
        sync_seconds: 0.0,
        ops: work.ops,
        ops_per_second: 0.0,
        bytes: work.bytes,
        mib_per_second: 0.0,
        latency: work.latencies.summary(),
        cpu: Default::default(),
        peak_rss_mib: 0.0,
        params: serde_json::to_value(params)?,
        engine: Default::default(),
    })
}

/// Unpacks with `ubtrfs import`. The measured time is that of the whole program: opening, work, commit and closing.
fn import_archive(args: &Args, params: &Params, program: &Path, image: &Path) -> Result<RunResult> {
    let archive = params.tar.as_ref().context("no archive was given; use --tar FILE")?;
    machine::read_into_cache(archive)?;
    let mut target = image.as_os_str().to_owned();
    target.push(":/bench");
    let mut command = Command::new(program);
    command.arg("import").arg("--json").arg(archive).arg(&target);
    if let Some(bytes) = args.memory {
        command.arg(format!("--memory={bytes}"));
    }
    let mark = CpuMark::now(args.server_pid);
    let started = Instant::now();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {}", program.display()))?;
    let seconds = started.elapsed().as_secs_f64();
    let cpu = mark.elapsed();
    if !output.status.success() {
        bail!("ubtrfs import failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let counts: serde_json::Value = serde_json::from_slice(&output.stdout).context("ubtrfs import --json")?;
    let count = |name: &str| counts[name].as_u64().unwrap_or_default();
    let mut result = result(args.workload, params, &MeasuredWork::new())?;
    (result.ops, result.bytes, result.cpu) = (count("entries"), count("bytes"), cpu);
    (result.seconds, result.work_seconds) = (seconds, seconds);
    result.through = "import".to_owned();
    result.set_rates();
    Ok(result)
}
