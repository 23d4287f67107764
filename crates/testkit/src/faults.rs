//! Runs a script on a device with one planned fault, and checks the resulting filesystem.
//!
//! - F1. A fault is either repaired without an error, or reported: a step or the closing fails.
//! - F2. Acknowledged changes are found on the device when it is read without faults afterwards. A successful sync
//!   promises that all earlier changes are durable, even those that an earlier failure affected.
//! - F3. After an error with unknown effects (a flush, a commit, a panic) the filesystem is read-only and every later
//!   sync fails.
//! - F4. Nothing hangs: each run ends within [`TIME_LIMIT`].
//! - F5. A read returns the right content or an error.
//! - F6. A run starts at the last remount before the planned request, with the content that the device has at this
//!   remount in a run without faults. So a test of a late request in a long script does not repeat everything before
//!   that request. The run ends when an error is reported, or else after [`ROUNDS_AFTER`] remounts, when the filesystem
//!   is closed for the next remount.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ubtrfs_device::Device;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_fs::MountOptions;
use ubtrfs_mkfs::MkfsOptions;

use crate::fault_device::PLANNED_PANIC;
use crate::{
    FaultDevice, FaultKind, FaultPlan, FsTarget, History, Medium, MediumDevice, Model, Script, Step, Target, walk_fs,
};

/// The time limit of a run.
const TIME_LIMIT: Duration = Duration::from_secs(120);

/// The number of remounts in a run in which no error is reported (F6).
const ROUNDS_AFTER: usize = 2;

/// A script to run, and the filesystem for it.
#[derive(Clone, Debug)]
pub struct FaultRun {
    /// The place in the script where the run starts.
    pub start: Start,
    /// The steps.
    pub script: Arc<Script>,
    /// The mount options.
    pub options: MountOptions,
    /// Whether metadata has two copies.
    pub has_copies: bool,
}

/// A place between two mounts of a script.
#[derive(Clone, Debug)]
pub struct Start {
    /// The content of the device.
    pub content: Medium,
    model: Model,
    /// The number of steps before this place.
    step: usize,
    /// The numbers of reads, writes and flushes before this place.
    counts: (u64, u64, u64),
}

impl Start {
    /// Returns the place before the first step of a script. `content` is the content of the device at this place.
    pub fn empty(content: Medium) -> Self {
        Self { content, model: Model::new(), step: 0, counts: (0, 0, 0) }
    }
}

/// The result of a run.
#[derive(Debug)]
pub struct FaultOutcome {
    /// Places where a run can start (F6): the start of this run, and the place after each remount.
    pub starts: Vec<Start>,
    /// The numbers of reads, writes and flushes that the script made.
    pub counts: (u64, u64, u64),
    /// The number of faults that happened.
    pub faults: u64,
    /// Whether an error was reported.
    pub told: bool,
    /// Whether the filesystem ended read-only.
    pub read_only: bool,
    /// Names of the threads that made a request with a fault.
    pub threads: std::collections::BTreeSet<String>,
    /// The content of the device at the end.
    pub content: Medium,
}

impl FaultRun {
    /// Runs the script with this fault. An error means a broken promise (F1 to F5).
    pub fn run(&self, plan: FaultPlan) -> Result<FaultOutcome> {
        let (sender, receiver) = channel();
        let this = self.clone();
        let thread = std::thread::Builder::new().name("request".to_owned()).spawn(move || {
            let _ = sender.send(catch_unwind(AssertUnwindSafe(|| this.run_here(plan))));
        })?;
        let result = match receiver.recv_timeout(TIME_LIMIT) {
            Ok(Ok(result)) => result,
            Ok(Err(panic)) => bail!("{plan:?}: a panic was not caught: {}", text_of(&*panic)),
            Err(RecvTimeoutError::Timeout) => bail!("{plan:?}: F4: it hangs"),
            Err(RecvTimeoutError::Disconnected) => bail!("{plan:?}: the thread is gone"),
        };
        let _ = thread.join();
        result.with_context(|| format!("{plan:?}"))
    }

    fn run_here(&self, plan: FaultPlan) -> Result<FaultOutcome> {
        let below = Arc::new(MediumDevice::new(self.start.content.clone()));
        let device = Arc::new(FaultDevice::new(below.clone(), plan));
        let mut history = History::new(self.start.model.clone());
        let mut starts = vec![self.start.clone()];
        let has_faults = plan.read.or(plan.write).or(plan.flush).is_some();
        let mut told = false;
        let mut panicked = false;
        let mut read_only = false;
        let mut failed = None;
        let mut steps = self.script.steps.iter().enumerate().skip(self.start.step);
        'mounted: loop {
            let opened = caught(|| FsTarget::on_device(Arc::clone(&device) as Arc<dyn Device>, self.options.clone()));
            let mut target = match opened {
                Some(Ok(target)) => target,
                other => {
                    let text = other.map_or_else(|| "panic".to_owned(), |error| format!("{error:?}"));
                    ensure!(device.faults() > 0, "opening fails without a fault: {text}");
                    told = true;
                    break 'mounted;
                }
            };
            loop {
                let next = steps.next();
                let Some((index, step)) = next.filter(|(_, step)| !matches!(step, Step::Remount)) else {
                    told |= self.close(target, &mut history, &device, told, panicked, &mut read_only)?;
                    let Some((index, _)) = next.filter(|_| !told) else { break 'mounted };
                    let (content, model) = (below.content(), history.model().clone());
                    starts.push(Start { content, model, step: index + 1, counts: device.counts() });
                    if has_faults && starts.len() > 1 + ROUNDS_AFTER {
                        break 'mounted;
                    }
                    break;
                };
                let done = caught(|| perform(step, &mut target, &mut history));
                match done {
                    Some(Ok(Done::Fine)) => {}
                    Some(Err(error)) => return Err(error.context(format!("step {index}, {step:?}"))),
                    Some(Ok(Done::Failed(errno))) => {
                        ensure!(device.faults() > 0, "{step:?} fails without a fault: errno {errno}");
                        told = true;
                    }
                    None => {
                        ensure!(plan.kind == FaultKind::Panic, "{step:?} panicked");
                        ensure!(target.fs().read_only().is_some(), "F3: writable after a panic in {step:?}");
                        (told, panicked) = (true, true);
                    }
                }
                if told {
                    failed = Some(format!("step {index}, {step:?},"));
                    after_failure(&mut target, step, &mut history, &device, plan)?;
                    self.close(target, &mut history, &device, told, panicked, &mut read_only)?;
                    break 'mounted;
                }
            }
        }
        let content = below.content();
        let outcome = FaultOutcome {
            starts,
            counts: device.counts(),
            faults: device.faults(),
            told,
            read_only,
            threads: device.threads(),
            content,
        };
        self.verify(&outcome, plan, &history).with_context(|| match &failed {
            Some(step) => format!("after {step} failed"),
            None => "nobody was told".to_owned(),
        })?;
        Ok(outcome)
    }

    /// Closes the filesystem. Returns whether closing failed.
    fn close(
        &self,
        target: FsTarget,
        history: &mut History,
        device: &FaultDevice,
        told: bool,
        panicked: bool,
        read_only: &mut bool,
    ) -> Result<bool> {
        let fs = Arc::clone(target.fs());
        let closed = caught(|| target.close());
        *read_only = fs.read_only().is_some();
        match closed {
            Some(Ok(())) => {
                ensure!(!*read_only && !panicked, "F3: closing a filesystem that turned read-only succeeds");
                if !told {
                    history.sync();
                }
                Ok(false)
            }
            other => {
                let text = other.map_or_else(|| "panic".to_owned(), |error| format!("{error:?}"));
                ensure!(device.faults() > 0, "closing fails without a fault: {text}");
                Ok(true)
            }
        }
    }

    fn verify(&self, outcome: &FaultOutcome, plan: FaultPlan, history: &History) -> Result<()> {
        let healthy = Arc::new(MediumDevice::new(outcome.content.clone()));
        let silent = matches!(plan.kind, FaultKind::Wrong | FaultKind::Lost) && plan.write.is_some();
        let target = match FsTarget::on_device(healthy, self.options.clone()) {
            Ok(target) => target,
            // If the device silently wrote a bad block that has no other copy, reading it may fail.
            Err(_) if silent && !self.has_copies => return Ok(()),
            Err(error) => return Err(error.context("it does not open any more")),
        };
        ensure!(target.fs().read_only().is_none(), "it opens read-only: {:?}", target.fs().read_only());
        let found = match walk_fs(target.fs()) {
            Ok(found) => found,
            Err(_) if silent => return Ok(()),
            Err(error) => return Err(error.context("it cannot be read any more")),
        };
        let read = |path: &[u8]| read_all(&target, path);
        history.verify(&found, &read, history.promises(), outcome.told)?;
        target.close().context("closing it afterwards")
    }
}

/// Reads all of a file.
pub(crate) fn read_all(target: &FsTarget, path: &[u8]) -> Result<Vec<u8>> {
    let size = target.lookup(path).map_err(|errno| anyhow::anyhow!("lookup: errno {errno}"))?.size;
    target.clone().read(path, 0, usize::try_from(size)?).map_err(|errno| anyhow::anyhow!("read: errno {errno}"))
}

pub(crate) fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text")
}

enum Done {
    Fine,
    Failed(i32),
}

/// Performs a step on the filesystem and on the model. An error means a wrong answer.
fn perform(step: &Step, target: &mut FsTarget, history: &mut History) -> Result<Done> {
    match step {
        Step::Do(_, action) => {
            if let Err(errno) = action(target) {
                return Ok(Done::Failed(errno));
            }
            let mut model = history.model().clone();
            action(&mut model).map_err(|errno| anyhow::anyhow!("the model refuses it: errno {errno}"))?;
            history.push(model);
        }
        Step::Read(path, at, len) => match target.read(path, *at, *len) {
            Ok(found) => {
                let expected = history.model().clone().read(path, *at, *len);
                ensure!(expected.is_ok_and(|expected| expected == found), "F5: wrong content");
            }
            Err(errno) => return Ok(Done::Failed(errno)),
        },
        Step::Fsync(path) => {
            if let Err(errno) = target.fsync(path) {
                return Ok(Done::Failed(errno));
            }
            history.fsync(path);
        }
        Step::Sync => {
            if let Err(errno) = target.sync() {
                return Ok(Done::Failed(errno));
            }
            history.sync();
        }
        Step::Remount => {}
    }
    Ok(Done::Fine)
}

/// Checks what a filesystem does after a failed step: after a failed flush it is read-only, a read-only filesystem does
/// not sync, and a sync fails only because of the fault (F2, F3).
fn after_failure(
    target: &mut FsTarget,
    step: &Step,
    history: &mut History,
    device: &FaultDevice,
    plan: FaultPlan,
) -> Result<()> {
    if plan.flush.is_some() && device.faults() > 0 {
        ensure!(target.fs().read_only().is_some(), "F3: writable after a flush failed");
    }
    // Walk the filesystem: the walk must end, although it may fail.
    let _ = caught(|| walk_fs(target.fs()).is_ok());
    let was_read_only = target.fs().read_only().is_some();
    match caught(|| target.sync()) {
        Some(Ok(())) => {
            ensure!(!was_read_only, "F3: a sync succeeds on a filesystem that turned read-only");
            history.sync();
        }
        Some(Err(_)) | None => {
            ensure!(device.faults() > 0, "a sync fails without a fault");
        }
    }
    // A failed step may have taken effect completely, so also accept the state after the step.
    if let Step::Do(_, action) = step {
        let mut model = history.model().clone();
        if action(&mut model).is_ok() {
            history.push(model);
        }
    }
    Ok(())
}

/// Runs `work`. Returns `None` for the planned panic; any other panic propagates and fails the run.
pub(crate) fn caught<T>(work: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => Some(done),
        Err(panic) if panic.downcast_ref::<String>().is_some_and(|text| text.contains(PLANNED_PANIC)) => None,
        Err(panic) => resume_unwind(panic),
    }
}

/// All runs of one script with one kind of fault on one kind of filesystem.
#[derive(Debug)]
pub struct FaultSweep {
    /// The name of the kind of filesystem, or of the script.
    pub config: &'static str,
    run: FaultRun,
    request: Request,
    kind: FaultKind,
    persistent: bool,
    /// The outcome without faults, computed once and shared by all kinds of faults.
    healthy: Arc<OnceLock<FaultOutcome>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Read,
    Write,
    Flush,
}

impl Request {
    /// Selects the number of requests of this kind from the numbers of (reads, writes, flushes).
    fn of(self, (reads, writes, flushes): (u64, u64, u64)) -> u64 {
        match self {
            Self::Read => reads,
            Self::Write => writes,
            Self::Flush => flushes,
        }
    }
}

impl FaultSweep {
    /// Returns a sweep of each kind of fault for each kind of filesystem, for each script about one topic, and for the
    /// long script.
    pub fn all() -> Vec<Self> {
        let everything = Arc::new(Script::everything(1));
        let mut runs: Vec<_> =
            configs().into_iter().map(|(config, mkfs, mount)| (config, mkfs, mount, Arc::clone(&everything))).collect();
        for kind in 0..Script::KINDS {
            let script = Arc::new(Script::about(kind, 1));
            runs.push((script.name, MkfsOptions::default(), "commit=300", script));
        }
        let small_nodes = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
        runs.push(("long", small_nodes, "commit=300,compress=zstd:1", Arc::new(Script::long(1))));
        let mut sweeps = Vec::new();
        for (config, mkfs, mount, script) in runs {
            let base = Medium::formatted(256 << 20, &mkfs).expect("an empty filesystem can be made in memory");
            let options = MountOptions::parse(mount).expect("known options");
            let has_copies = mkfs.metadata_profile == BlockGroupFlags::DUP;
            let run = FaultRun { has_copies, start: Start::empty(base), script: Arc::clone(&script), options };
            let healthy = Arc::new(OnceLock::new());
            for (request, kind, persistent) in [
                (Request::Read, FaultKind::Error, false),
                (Request::Read, FaultKind::Error, true),
                (Request::Read, FaultKind::Short, false),
                (Request::Read, FaultKind::Wrong, false),
                (Request::Read, FaultKind::Panic, false),
                (Request::Write, FaultKind::Error, false),
                (Request::Write, FaultKind::Error, true),
                (Request::Write, FaultKind::Short, false),
                (Request::Write, FaultKind::Wrong, false),
                (Request::Write, FaultKind::Lost, false),
                (Request::Write, FaultKind::Panic, false),
                (Request::Flush, FaultKind::Error, false),
                (Request::Flush, FaultKind::Error, true),
                (Request::Flush, FaultKind::Panic, false),
            ] {
                let healthy = Arc::clone(&healthy);
                sweeps.push(Self { config, run: run.clone(), request, kind, persistent, healthy });
            }
        }
        sweeps
    }

    /// The name of the kind of fault.
    pub fn kind(&self) -> String {
        format!("{:?}-{:?}{}", self.request, self.kind, if self.persistent { "-from-then-on" } else { "" })
            .to_lowercase()
    }

    /// The number of requests of this kind that the script makes without faults. A run can make any of these requests
    /// fail.
    pub fn requests(&self) -> u64 {
        self.request.of(self.healthy().counts)
    }

    /// Runs with a fault in the `nth` request, counted from the beginning of the script. An error means a broken
    /// promise (F1 to F5).
    pub fn run(&self, nth: u64) -> Result<FaultOutcome> {
        let starts = &self.healthy().starts;
        let before = |start: &&Start| self.request.of(start.counts) <= nth;
        let start = starts.iter().rfind(before).unwrap_or(&starts[0]);
        let from_there = Some(nth - self.request.of(start.counts));
        let plan = FaultPlan { kind: self.kind, persistent: self.persistent, ..FaultPlan::default() };
        let plan = match self.request {
            Request::Read => FaultPlan { read: from_there, ..plan },
            Request::Write => FaultPlan { write: from_there, ..plan },
            Request::Flush => FaultPlan { flush: from_there, ..plan },
        };
        let run = FaultRun { start: start.clone(), ..self.run.clone() };
        run.run(plan).with_context(|| format!("{} {} {nth}, from step {}", self.config, self.kind(), start.step))
    }

    fn healthy(&self) -> &FaultOutcome {
        self.healthy.get_or_init(|| self.run.run(FaultPlan::default()).expect("the script runs without faults"))
    }

    /// Whether `btrfs check` must find the result clean. The result need not be clean if the device lost or changed
    /// written data.
    pub fn btrfs_check_applies(&self) -> bool {
        !(self.request == Request::Write && matches!(self.kind, FaultKind::Wrong | FaultKind::Lost))
    }
}

fn configs() -> Vec<(&'static str, MkfsOptions, &'static str)> {
    let small = MkfsOptions {
        nodesize: 4096,
        data_profile: BlockGroupFlags::DUP,
        metadata_profile: BlockGroupFlags::DUP,
        ..MkfsOptions::default()
    };
    let single = MkfsOptions { metadata_profile: BlockGroupFlags::empty(), ..MkfsOptions::default() };
    vec![
        ("default", MkfsOptions::default(), "commit=300,compress=zstd:1"),
        ("dup-data", small, "commit=300,compress=lzo"),
        ("single", single, "commit=300"),
    ]
}

/// Hides the messages of planned panics.
pub fn silence_planned_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // The first opening of a filesystem also changes the panic hook. So open a filesystem here, before the hook is
        // changed below: if a run changed the hook at the same time, one of both changes would be lost.
        let base =
            Medium::formatted(128 << 20, &MkfsOptions::default()).expect("an empty filesystem can be made in memory");
        drop(FsTarget::on_device(Arc::new(MediumDevice::new(base)), MountOptions::default()));
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let message = info.payload().downcast_ref::<String>().map_or("", String::as_str);
            if message.contains(PLANNED_PANIC) {
                // The panic hook that the opening of a filesystem installed must still see the panic. Only the
                // printing of the message is suppressed.
                ubtrfs_fs::note_panic(&info.to_string());
            } else {
                print(info);
            }
        }));
    });
}
