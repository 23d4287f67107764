//! Faults with several threads: one request of a run fails, alone or with all later ones. Each thread gets an error,
//! or the promises to that thread hold.
//!
//! - R1. No thread gets an error before the fault, and nothing hangs.
//! - R2. Everything promised to a thread, before or after the fault, is on the device.
//! - R3. Closing a filesystem that turned read-only fails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ubtrfs_device::Device;
use ubtrfs_fs::MountOptions;

use super::{REWRITTEN_LANE, Scenario, run_threads};
use crate::faults::{caught, read_all, text_of};
use crate::history::History;
use crate::{FaultDevice, FaultKind, FaultPlan, FsTarget, LANES, Medium, MediumDevice, Rng};

/// The result of one run.
#[derive(Debug)]
pub struct ThreadedFaults {
    /// Describes the run and its fault.
    pub name: String,
    /// Whether the fault happened.
    pub hit: bool,
    /// Whether a thread, or the closing of the filesystem, got an error.
    pub told: bool,
    /// The content of the device at the end.
    pub content: Medium,
}

impl ThreadedFaults {
    /// Runs the threads of a seed, with a fault that the seed determines. An error means a broken rule (R1 to R3).
    pub fn run(seed: u64) -> Result<Self> {
        let (sender, receiver) = channel();
        let thread = std::thread::Builder::new().name("run".to_owned()).spawn(move || {
            let _ = sender.send(catch_unwind(AssertUnwindSafe(|| run_here(seed))));
        })?;
        let result = match receiver.recv_timeout(TIME_LIMIT) {
            Ok(Ok(result)) => result,
            Ok(Err(panic)) => bail!("threads, seed {seed}: a panic was not caught: {}", text_of(&*panic)),
            Err(RecvTimeoutError::Timeout) => bail!("threads, seed {seed}: R1: it hangs"),
            Err(RecvTimeoutError::Disconnected) => bail!("threads, seed {seed}: the thread is gone"),
        };
        let _ = thread.join();
        result
    }
}

fn plan(rng: &mut Rng) -> FaultPlan {
    let kind = *rng.pick(&[FaultKind::Error, FaultKind::Error, FaultKind::Short, FaultKind::Panic]);
    let plan = FaultPlan { kind, persistent: kind == FaultKind::Error && rng.one_in(2), ..FaultPlan::default() };
    // Prefer later requests, because all runs begin with the same requests.
    let nth = |rng: &mut Rng, most: u64| Some(rng.below(most).max(rng.below(most)));
    match rng.below(6) {
        0 => FaultPlan { read: nth(rng, 60), ..plan },
        1 | 2 => FaultPlan { flush: nth(rng, 150), ..plan },
        _ => FaultPlan { write: nth(rng, 500), ..plan },
    }
}

fn run_here(seed: u64) -> Result<ThreadedFaults> {
    let mut scenario = Scenario::of(seed);
    // Do not refuse sectors, because refused sectors cause errors without the planned fault.
    scenario.poison = false;
    let plan = plan(&mut Rng::new(seed ^ 0xfa17));
    let name = format!("threads, seed {seed} ({}), {plan:?}", scenario.name);
    let verdict = || -> Result<ThreadedFaults> {
        let below = Arc::new(MediumDevice::new(scenario.bases()?.remove(0)));
        let device = Arc::new(FaultDevice::new(Arc::clone(&below) as Arc<dyn Device>, plan));
        let options = MountOptions::parse(&scenario.mount)?;
        let opened = caught(|| FsTarget::on_device(Arc::clone(&device) as Arc<dyn Device>, options.clone()));
        let Some(Ok(target)) = opened else {
            ensure!(device.faults() > 0, "R1: opening fails without a fault");
            return Ok(ThreadedFaults { name: name.clone(), hit: true, told: true, content: below.content() });
        };
        let fs = Arc::clone(target.fs());
        let mut record = run_threads(scenario.clone(), &target, None, Some(&device), seed)?;
        let was_read_only = fs.read_only().is_some();
        let closed = matches!(caught(|| target.close()), Some(Ok(())));
        ensure!(closed || device.faults() > 0, "R1: closing fails without a fault");
        ensure!(!(closed && was_read_only), "R3: closing a filesystem that turned read-only succeeds");
        drop(fs);
        if closed && !record.told {
            for history in &mut record.lanes {
                history.sync();
            }
        }
        let content = below.content();
        let healthy = Arc::new(MediumDevice::new(content.clone()));
        let target = FsTarget::on_device(healthy, options).context("it does not open any more")?;
        ensure!(target.fs().read_only().is_none(), "it opens read-only: {:?}", target.fs().read_only());
        let found = target.walk().context("it cannot be read any more")?;
        let mut made = [None; LANES];
        let all = record.lanes.iter().map(History::promises);
        made.iter_mut().zip(all).for_each(|(made, promises)| *made = Some(promises as u64));
        made[REWRITTEN_LANE] = Some(record.versions.len() as u64);
        made[super::SNAPSHOT_LANE] = Some(record.snapshot_promises);
        record.verify(&found, &|path| read_all(&target, path), &made).context("R2")?;
        target.close().context("closing it afterwards")?;
        let told = record.told || !closed;
        Ok(ThreadedFaults { name: name.clone(), hit: device.faults() > 0, told, content })
    };
    verdict().with_context(|| name.clone())
}

/// The time limit of a run.
const TIME_LIMIT: Duration = Duration::from_secs(120);
