//! Power cuts and faults with several threads. The threads change one filesystem while its device delays some requests,
//! so that writes, fsyncs, snapshots and deletions run between any two writes of a commit.
//!
//! ```text
//!   lane-N/    a thread's directory: its History has everything the thread does there, and the promises it got
//!   ballast/   many names that are never removed, so that trees have levels; snapshots are placed among them
//!   rewritten/ small files that some threads rewrite all the time while another thread fsyncs them
//!   poison     a file whose data the device refuses
//! ```
//! In half of the runs with free space for copies, another thread empties block groups. In half of the runs, quotas are
//! on, and another thread changes groups, relations and limits and starts rescans.
//!
//! - T1. Each lane's promises (see [`History`]) hold independently of the other threads. Other threads may commit any
//!   state.
//! - T2. A snapshot exists from the return of its creation until its deletion begins. The snapshot contains, for each
//!   lane, a state between the start and the end of the snapshot's creation. A snapshot deleted before a sync is gone
//!   after the sync.
//! - T3. If a version of a rewritten file was complete when an fsync began, then a power cut after the return of the
//!   fsync leaves this version or a later one.
//! - T4. Data that other threads sync becomes durable even if one file cannot be written and the sync therefore reports
//!   an error. An fsync of the unwritable file reports the error.
//! - T5. The seed determines the actions of each thread, the delayed requests and the cuts, but not how the threads
//!   interleave. To repeat a failure, run the seed several times, or keep the medium.
//! - T6. Even with very little free space, names can be removed, and fsync, sync and close can store accepted data.
//! - T7. With quotas on, at every cut, the quota numbers equal those that `ubtrfs check` counts, except for groups
//!   that are marked as inconsistent. No thread reaches a limit, because all limits are large.
//! - T8. Balances with random filters, pauses, cancellations and resizes change no file. A balance that a cut
//!   interrupts is resumed to its end, once by the engine and once by Linux, and no file changes meanwhile.
//! - T9. On a nearly full filesystem, a balance, a resize, a snapshot or a write may fail with ENOSPC. The rules T1,
//!   T2, T6, T7 and T8 hold nevertheless.
//! - T10. No old content lies past the end of a file, where it would appear when the file grows.

mod arrays;
mod balance;
mod device_changes;
mod faults;
mod lane;
mod member_faults;
mod snapshots;
mod verify;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ubtrfs_device::Device;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_fs::{Job, MountOptions, QgroupId, QuotaKind};
use ubtrfs_mkfs::MkfsOptions;

pub use self::arrays::{ArrayCut, ArrayCuts, Fate};
use self::balance::Balances;
pub use self::balance::random_balance;
pub use self::faults::ThreadedFaults;
use self::lane::{Lane, Work};
pub use self::member_faults::MemberFaults;
use self::snapshots::{Snapshot, Snapshots};
use crate::faults::caught;
use crate::target::{NOSPC, Target};
use crate::{
    Compare, Cut, CutBuilder, FaultDevice, FaultPlan, FsTarget, Gate, History, LANES, LinuxVerdict, Medium,
    MediumDevice, NodeKind, RecordingDevice, Rng, TreeEntry, check_medium, compare_entries,
};

/// The number under which the device records promises to the thread that makes and deletes snapshots.
const SNAPSHOT_LANE: usize = LANES - 2;
/// The number under which the device records promises about the files in `rewritten/`.
const REWRITTEN_LANE: usize = LANES - 1;
/// The content of the file `poison`: this pattern, repeated.
const POISON: [u8; 16] = *b"never on a disk!";

/// The threads of a run, and their filesystem.
#[derive(Clone, Debug)]
struct Scenario {
    name: &'static str,
    /// The size of each device.
    len_bytes: u64,
    nr_devices: usize,
    mkfs: MkfsOptions,
    mount: String,
    lanes: Vec<Work>,
    /// The number of directories in the directory `ballast`, and the number of files in each of them.
    ballast: (usize, usize),
    snapshots: usize,
    /// The number of times that a file in `rewritten/` is fsynced.
    rewrites: usize,
    poison: bool,
    /// Whether a thread continuously empties block groups.
    moves: bool,
    /// Whether a thread balances with random filters, and another one stops balances and resizes the device.
    balances: bool,
    /// The kind of quotas that are on, if any. With quotas, a thread changes quota groups.
    quotas: Option<QuotaKind>,
    /// The number of bytes that are left free when the threads start; `None` if free space is not limited. With little
    /// space, freed space is reused at once, and ENOSPC is possible.
    free: Option<u64>,
}

impl Scenario {
    /// Number of kinds of scenarios.
    const KINDS: u64 = 8;

    fn of(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x7157);
        let mut mkfs = MkfsOptions::default();
        if rng.one_in(2) {
            mkfs.nodesize = 4096;
        }
        if rng.one_in(4) {
            mkfs.metadata_profile = BlockGroupFlags::empty();
        }
        let mount = match rng.below(8) {
            0 => "commit=300,compress=zstd:1",
            1 => "commit=300,discard=sync",
            2 => "commit=1",
            _ => "commit=300",
        };
        let (busy, writeback) = (Work::Busy { steps: 70 }, Work::Writeback { steps: 150 });
        let driver = Work::Driver { steps: 120 };
        let mut scenario = Self {
            name: "",
            len_bytes: 256 << 20,
            nr_devices: 1,
            mkfs,
            mount: mount.to_owned(),
            lanes: Vec::new(),
            ballast: (0, 0),
            snapshots: 0,
            rewrites: 0,
            poison: false,
            moves: seed / Self::KINDS % 2 == 1,
            balances: false,
            quotas: matches!(seed / Self::KINDS % 4, 1 | 2).then_some(QuotaKind::Full),
            free: None,
        };
        match seed % Self::KINDS {
            0 => {
                (scenario.name, scenario.lanes) = ("busy files", vec![busy, busy, writeback, writeback]);
                if rng.one_in(2) {
                    (scenario.len_bytes, scenario.free) = (128 << 20, Some(1 << 20));
                }
            }
            1 => (scenario.name, scenario.lanes) = ("everything", vec![driver; 3]),
            2 => {
                (scenario.name, scenario.lanes) = ("rewritten files", vec![busy]);
                scenario.rewrites = 16;
            }
            3 => {
                (scenario.name, scenario.lanes) = ("a file that cannot be written", vec![busy; 3]);
                scenario.poison = true;
                // Do not compress, because compressed data does not contain the pattern.
                scenario.mount = "commit=300".to_owned();
            }
            4 => {
                (scenario.name, scenario.lanes) = ("mixed block groups", vec![busy, busy, writeback, writeback]);
                (scenario.len_bytes, scenario.free) = (32 << 20, Some(3 << 19));
            }
            5 => {
                (scenario.name, scenario.lanes) = ("nearly full", vec![Work::Fill { steps: 45 }; 3]);
                (scenario.len_bytes, scenario.free) = (20 << 20, Some(20 << 20));
                scenario.mount = "commit=300".to_owned();
            }
            6 => {
                (scenario.name, scenario.lanes) = ("snapshots inside", vec![Work::Names { steps: 150 }; 2]);
                (scenario.ballast, scenario.snapshots) = (if rng.one_in(3) { (40, 30) } else { (12, 20) }, 8);
                scenario.mkfs.nodesize = 4096;
            }
            _ => {
                (scenario.name, scenario.lanes) = ("all of it", vec![driver, busy, busy]);
                (scenario.ballast, scenario.snapshots, scenario.rewrites) = ((12, 20), 5, 6);
            }
        }
        // Do not empty block groups if the filesystem is nearly full, because then there is no room for copies.
        scenario.moves &= scenario.free.is_none();
        if matches!(seed % Self::KINDS, 4 | 5) {
            scenario.mkfs.mixed = true;
            scenario.mkfs.nodesize = 4096;
            (scenario.mkfs.data_profile, scenario.mkfs.metadata_profile) =
                (BlockGroupFlags::empty(), BlockGroupFlags::empty());
        }
        scenario
    }

    /// Returns a scenario in which balances run beside writers, snapshots and changes of quotas. Each thread has less
    /// to do than in [`Scenario::of`].
    fn balancing(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0xba1a_9ce0);
        let (busy, writeback) = (Work::Busy { steps: 20 }, Work::Writeback { steps: 30 });
        let lanes = match rng.below(3) {
            0 => vec![busy, writeback],
            1 => vec![Work::Driver { steps: 50 }, busy],
            _ => vec![Work::Driver { steps: 60 }; 2],
        };
        let mut mkfs = MkfsOptions { nodesize: *rng.pick(&[4096, 16_384]), ..MkfsOptions::default() };
        for profile in [&mut mkfs.data_profile, &mut mkfs.metadata_profile] {
            *profile = *rng.pick(&[BlockGroupFlags::DUP, BlockGroupFlags::empty()]);
        }
        let mount = *rng.pick(&["commit=300", "commit=1", "commit=300,compress=zstd:1", "commit=300,discard=sync"]);
        let mut scenario = Self {
            name: "balances",
            len_bytes: 256 << 20,
            nr_devices: 1,
            mkfs,
            mount: mount.to_owned(),
            lanes,
            ballast: (6, 12),
            snapshots: 4,
            rewrites: 0,
            poison: false,
            moves: false,
            balances: true,
            quotas: *rng.pick(&[None, Some(QuotaKind::Full), Some(QuotaKind::Full), Some(QuotaKind::Simple)]),
            free: None,
        };
        match rng.below(8) {
            0 => {
                (scenario.name, scenario.mkfs.mixed) = ("balances of mixed block groups", true);
                (scenario.mkfs.nodesize, scenario.len_bytes) = (4096, 128 << 20);
                scenario.mkfs.metadata_profile = scenario.mkfs.data_profile;
            }
            1 | 2 => {
                (scenario.name, scenario.len_bytes) = ("balances of a nearly full filesystem", 160 << 20);
                (scenario.free, scenario.snapshots) = (Some((1 + rng.below(8)) << 20), 2);
                scenario.lanes = vec![busy, writeback, Work::Fill { steps: 20 }];
            }
            _ => {}
        }
        scenario
    }

    /// Makes the filesystem with which the threads start. Returns the media of its devices.
    fn bases(&self) -> Result<Vec<Medium>> {
        let device = |_| Arc::new(MediumDevice::new(Medium::zeros(self.len_bytes)));
        let devices: Vec<Arc<MediumDevice>> = (0..self.nr_devices).map(device).collect();
        let refs: Vec<&dyn Device> = devices.iter().map(|device| &**device as &dyn Device).collect();
        ubtrfs_mkfs::make_array(&refs, &self.mkfs)?;
        let shared = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
        let mut target = FsTarget::on_devices(shared, MountOptions::default())?;
        let mut make = |path: &str, kind| {
            let mode = if kind == NodeKind::Directory { 0o755 } else { 0o644 };
            target.create(path.as_bytes(), kind, mode, (0, 0)).map_err(errno).with_context(|| path.to_owned())
        };
        for lane in 0..self.lanes.len() {
            make(&format!("lane-{lane}"), NodeKind::Directory)?;
        }
        make("ballast", NodeKind::Directory)?;
        for path in self.ballast_paths() {
            let kind = if path.contains("/file-") { NodeKind::File } else { NodeKind::Directory };
            make(&format!("ballast/{path}"), kind)?;
        }
        make("rewritten", NodeKind::Directory)?;
        for file in REWRITTEN {
            make(&format!("rewritten/{}", file.name), NodeKind::File)?;
        }
        if self.poison {
            make("poison", NodeKind::File)?;
        }
        make("filler", NodeKind::File)?;
        if let Some(kind) = self.quotas {
            target.fs().enable_quotas(kind)?;
            target.fs().wait_for_quota_rescan(&Job::new())?;
        }
        if let Some(free) = self.free {
            let all = target.fs().statfs()?;
            let mut more = (all.bavail * u64::from(all.bsize)).saturating_sub(free) >> 16 << 16;
            while more > 0 {
                match target.fallocate(b"filler", 0, more, crate::FallocateOp::Allocate) {
                    Ok(()) => break,
                    // Try a smaller size: while the last commit of a rescan needs room, the largest possible allocation
                    // is smaller than the free space that `statfs` shows.
                    Err(code) if code == NOSPC => more = more.saturating_sub(1 << 20),
                    Err(code) => return Err(errno(code)).with_context(|| format!("a filler of {more} bytes")),
                }
            }
        }
        target.close()?;
        Ok(devices.iter().map(|device| device.content()).collect())
    }

    fn ballast_paths(&self) -> Vec<String> {
        let (dirs, files) = self.ballast;
        let of_dir = |dir: usize| {
            let name = move |file: usize| format!("dir-{dir}/file-{file}-with-a-name-that-takes-room-in-a-leaf");
            std::iter::once(format!("dir-{dir}")).chain((0..files).map(name))
        };
        (0..dirs).flat_map(of_dir).collect()
    }
}

/// A file that writers repeatedly overwrite with the number of the writer and a version.
struct Rewritten {
    name: &'static str,
    len: usize,
    writers: u64,
}

/// The rewritten files: the first is inline in its leaf, the second has extents.
const REWRITTEN: [Rewritten; 2] =
    [Rewritten { name: "inline", len: 640, writers: 3 }, Rewritten { name: "blocks", len: 3 * 4096, writers: 1 }];
/// The number of low bits that hold the version in each word of a rewritten file. The writer's number is in the bits
/// above.
const VERSION_BITS: u32 = 48;
const MAX_WRITERS: usize = 3;

/// For each promise about the rewritten files: the file's index, and each writer's last version that was complete
/// before the promise.
type Versions = Vec<(usize, [u64; MAX_WRITERS])>;

/// State that the threads of a run share.
#[derive(Debug, Default)]
struct Shared {
    /// For each lane, the number of the state after its last completed operation.
    states: [AtomicUsize; LANES],
    stop: AtomicBool,
}

/// All operations of the threads of a run, and the promises made to them.
#[derive(Debug)]
struct Record {
    scenario: Scenario,
    lanes: Vec<History>,
    steps: Vec<Vec<String>>,
    snapshots: Vec<Snapshot>,
    snapshot_promises: u64,
    versions: Versions,
    balances: Balances,
    /// Whether a fault was reported to any thread.
    told: bool,
}

impl Record {
    /// The number of promises made to all threads.
    fn nr_promises(&self) -> usize {
        self.lanes.iter().map(History::promises).sum::<usize>() + self.snapshots.len() + self.versions.len()
    }
}

/// A recorded run of threads.
#[derive(Debug)]
pub struct ThreadedCuts {
    /// Describes the scenario.
    pub name: String,
    device: Arc<RecordingDevice>,
    record: Record,
    options: MountOptions,
    seed: u64,
}

impl ThreadedCuts {
    /// Records the run of this seed.
    pub fn record(seed: u64) -> Result<Self> {
        Self::record_scenario(Scenario::of(seed), seed)
    }

    /// Records a run of this seed with balances (T8).
    pub fn record_balances(seed: u64) -> Result<Self> {
        Self::record_scenario(Scenario::balancing(seed), seed)
    }

    fn record_scenario(scenario: Scenario, seed: u64) -> Result<Self> {
        let gate = Gate { seed, superblocks: 2, writes: 80, events: 40, limit: Duration::from_millis(20) };
        let device = Arc::new(RecordingDevice::new(scenario.bases()?.remove(0)).with_gate(gate));
        let options = MountOptions::parse(&scenario.mount)?;
        let mut below: Arc<dyn Device> = Arc::clone(&device) as Arc<dyn Device>;
        if scenario.poison {
            let plan = FaultPlan { refused: Some(POISON), ..FaultPlan::default() };
            below = Arc::new(FaultDevice::new(below, plan));
        }
        let what = format!("seed {seed} ({})", scenario.name);
        let name = format!("{} ({}, nodes of {})", scenario.name, scenario.mount, scenario.mkfs.nodesize);
        let target = FsTarget::on_device(below, options.clone())?;
        let mut record = run_threads(scenario, &target, Some(&device), None, seed).with_context(|| what.clone())?;
        let closed = target.close();
        if let Err(error) = &closed {
            ensure!(record.scenario.poison, "{what}: closing: {error:#}");
        }
        if !record.told && (closed.is_ok() || record.scenario.poison) {
            for (lane, history) in record.lanes.iter_mut().enumerate() {
                device.mark_lane(lane, history.sync() as u64);
            }
        }
        let name = if record.scenario.balances { format!("{name}, {:?}", record.balances) } else { name };
        Ok(Self { name, device, record, options, seed })
    }

    /// Chooses points to cut at, in ascending order: around flushes, where superblocks are written; before a delayed
    /// request; directly after a promise (the return of a call that guarantees durability, such as fsync); and
    /// anywhere.
    pub fn points(&self, cuts: usize) -> Vec<usize> {
        points(&self.device, self.seed, cuts)
    }

    /// Returns the numbers of promises, flushes and events in the recording.
    pub fn size(&self) -> (usize, usize, usize) {
        let promises = self.record.nr_promises();
        (promises, self.device.flush_points().len(), self.device.events())
    }

    /// Lists the steps of each lane, with the number of the state after each step.
    pub fn trace(&self) -> String {
        let lanes = self.record.steps.iter().enumerate();
        lanes.map(|(lane, steps)| format!("lane {lane}\n  {}\n", steps.join("\n  "))).collect()
    }

    /// Makes the builder that [`ThreadedCuts::cut`] needs.
    pub fn builder(&self) -> CutBuilder {
        self.device.cuts()
    }

    /// Returns the medium as it is after a power cut at this point. `number` selects the random choices of the cut.
    pub fn cut(&self, builder: &mut CutBuilder, number: usize, point: usize) -> Cut {
        let mut rng = Rng::new(self.seed.wrapping_mul(0x1_0001).wrapping_add(number as u64));
        let (medium, outcome) = builder.cut(point, &mut rng);
        let what = format!("threads, seed {} ({}), cut {number} at event {point}: {outcome:?}", self.seed, self.name);
        Cut { medium, number, made: 0, lanes: outcome.promised_by, what }
    }

    /// Whether the cut interrupted a balance, which the next mount resumes.
    pub fn has_balance(&self, cut: &Cut) -> Result<bool> {
        let device = Arc::new(MediumDevice::new(cut.medium.clone()));
        let options = MountOptions { read_only: true, ..self.options.clone() };
        Ok(FsTarget::on_device(device, options)?.fs().balance_status().is_some())
    }

    /// Resumes the balance that the cut interrupted, and walks the filesystem at the same time. Fails unless the walk
    /// finds the entries `before` (T8).
    fn finish_balance(&self, target: &FsTarget, before: &[TreeEntry]) -> Result<()> {
        std::thread::scope(|scope| {
            let resumed = scope.spawn(|| target.fs().resume_balance(&Job::new()));
            let amid = target.walk();
            match resumed.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
                Ok(report) => {
                    ensure!(report.failures.is_empty(), "the resumed balance fails: {:?}", report.failures);
                }
                // T9
                Err(error) if self.record.scenario.free.is_some() && error.errno() == NOSPC => {}
                Err(error) => return Err(error.into()),
            }
            compare_entries(before, &amid?, Compare::ALL).context("during the resumed balance")
        })?;
        ensure!(target.fs().balance_status().is_none(), "the balance is not over");
        compare_entries(before, &target.walk()?, Compare::ALL).context("after the resumed balance")
    }

    /// Verifies T1 to T4 and T7 to T10, and that the medium is clean before and after its log is replayed. Returns the
    /// entries of the filesystem.
    pub fn verify(&self, cut: &Cut) -> Result<Vec<TreeEntry>> {
        let verify = || {
            check_medium(&cut.medium).context("check, before the replay")?;
            let device = Arc::new(MediumDevice::new(cut.medium.clone()));
            let target = FsTarget::on_device(Arc::clone(&device) as Arc<dyn Device>, self.options.clone())
                .context("it does not open")?;
            ensure!(target.fs().read_only().is_none(), "it opens read-only: {:?}", target.fs().read_only());
            let found = target.walk().context("it cannot be read")?;
            self.record.verify(&found, &|path| crate::faults::read_all(&target, path), &cut.lanes)?;
            if cut.number.is_multiple_of(2) && target.fs().balance_status().is_some() {
                self.finish_balance(&target, &found).context("T8")?;
            }
            target.grow_files(&found).context("T10")?;
            target.close().context("it cannot be closed")?;
            check_medium(&device.content()).context("check, after the replay")?;
            Ok(found)
        };
        verify().with_context(|| cut.what.clone())
    }

    /// Verifies the cut with Linux, which must find `ours`, the entries that [`ThreadedCuts::verify`] returned.
    pub fn verify_by_linux(&self, cut: &Cut, ours: &[TreeEntry], image: &Path) -> Result<LinuxVerdict> {
        cut.verify_by_linux(ours, image, |found, read| self.record.verify(found, read, &cut.lanes))
    }
}

/// Chooses points to cut a recording at; see [`ThreadedCuts::points`].
fn points(device: &RecordingDevice, seed: u64, cuts: usize) -> Vec<usize> {
    let mut rng = Rng::new(seed ^ 0x5eed);
    let (flushes, events) = (device.flush_points(), device.events());
    let stopped = device.gate_points();
    let (marks, rewritten) = (device.mark_points(0..LANES), device.mark_points(REWRITTEN_LANE..REWRITTEN_LANE + 1));
    let mut points: Vec<usize> = (0..cuts)
        .map(|number| match number % 6 {
            0 if !flushes.is_empty() => (*rng.pick(&flushes) + rng.index(4)).saturating_sub(1),
            1 if !stopped.is_empty() => *rng.pick(&stopped),
            2 if !marks.is_empty() => *rng.pick(&marks),
            3 if !rewritten.is_empty() => *rng.pick(&rewritten),
            3 if !marks.is_empty() => *rng.pick(&marks),
            _ => rng.index(events + 1),
        })
        .collect();
    points.sort_unstable();
    points
}

fn errno(errno: i32) -> anyhow::Error {
    anyhow::anyhow!("{}", std::io::Error::from_raw_os_error(errno))
}

/// Runs all threads of a scenario to their end. If `faults` is set, an operation of a lane may fail, and the lane then
/// ends.
fn run_threads(
    scenario: Scenario,
    target: &FsTarget,
    marks: Option<&Arc<RecordingDevice>>,
    faults: Option<&Arc<FaultDevice>>,
    seed: u64,
) -> Result<Record> {
    let shared = Shared::default();
    let mut record = Record {
        lanes: Vec::new(),
        steps: Vec::new(),
        snapshots: Vec::new(),
        snapshot_promises: 0,
        versions: Vec::new(),
        balances: Balances::default(),
        told: false,
        scenario,
    };
    let scenario = record.scenario.clone();
    std::thread::scope(|scope| -> Result<()> {
        let shared = &shared;
        let lanes: Vec<_> = scenario
            .lanes
            .iter()
            .enumerate()
            .map(|(number, work)| {
                let lane = Lane::new(number, target.clone(), marks.cloned(), faults.cloned(), &scenario, seed);
                scope.spawn(move || lane.run(*work, shared))
            })
            .collect();
        let snapshots = (scenario.snapshots > 0).then(|| {
            let maker = Snapshots::new(target.clone(), marks.cloned(), faults.cloned(), &scenario, seed);
            scope.spawn(move || maker.run(shared))
        });
        let rewriters = (scenario.rewrites > 0).then(|| {
            let (nr_fsyncs, file) = (scenario.rewrites, (seed / Scenario::KINDS) as usize % REWRITTEN.len());
            scope.spawn(move || rewrite(target, marks, faults, file, nr_fsyncs))
        });
        let mover = scenario.moves.then(|| scope.spawn(move || move_block_groups(target, faults, shared, seed)));
        let quota_changer =
            scenario.quotas.map(|kind| scope.spawn(move || change_quotas(target, kind, faults, shared, seed)));
        let (is_mixed, len_bytes) = (scenario.mkfs.mixed, scenario.len_bytes);
        let balancer = scenario.balances.then(|| scope.spawn(move || balance::balance(target, is_mixed, shared, seed)));
        let disturber =
            scenario.balances.then(|| scope.spawn(move || balance::disturb(target, len_bytes, shared, seed)));
        let poisoner = scenario.poison.then(|| scope.spawn(move || poison(target, shared)));
        let mut first = Ok(());
        for lane in lanes {
            match joined(lane) {
                Ok((history, steps, told)) => {
                    record.lanes.push(history);
                    record.steps.push(steps);
                    record.told |= told;
                }
                Err(error) => first = first.and(Err(error)),
            }
        }
        shared.stop.store(true, Ordering::SeqCst);
        if let Some(maker) = snapshots {
            match joined(maker) {
                Ok((made, promises, told)) => {
                    (record.snapshots, record.snapshot_promises) = (made, promises);
                    record.told |= told;
                }
                Err(error) => first = first.and(Err(error)),
            }
        }
        if let Some(rewriters) = rewriters {
            match joined(rewriters) {
                Ok((versions, told)) => {
                    record.versions = versions;
                    record.told |= told;
                }
                Err(error) => first = first.and(Err(error)),
            }
        }
        for other in [mover, quota_changer].into_iter().flatten() {
            match joined(other) {
                Ok(told) => record.told |= told,
                Err(error) => first = first.and(Err(error)),
            }
        }
        if let Some(balancer) = balancer {
            first = first.and(joined(balancer).map(|balances| record.balances = balances));
        }
        if let Some(disturber) = disturber {
            first = first.and(joined(disturber));
        }
        if let Some(poisoner) = poisoner {
            first = first.and(joined(poisoner));
        }
        first
    })?;
    Ok(record)
}

fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Lets the writers of a file rewrite it continuously, and fsyncs it `nr_fsyncs` times (T3).
fn rewrite(
    target: &FsTarget,
    marks: Option<&Arc<RecordingDevice>>,
    faults: Option<&Arc<FaultDevice>>,
    index: usize,
    nr_fsyncs: usize,
) -> Result<(Versions, bool)> {
    let file = &REWRITTEN[index];
    let path = format!("rewritten/{}", file.name).into_bytes();
    let complete: [AtomicU64; MAX_WRITERS] = Default::default();
    let stop = AtomicBool::new(false);
    let excused = |number: Option<i32>| match faults {
        Some(faults) if faults.faults() > 0 => Ok(true),
        _ => Err(errno(number.unwrap_or(0)).context("a rewritten file")),
    };
    // Look the path up only once, because lookups would take most of the time between writes.
    let id = target.lookup(&path).map_err(errno)?.id;
    std::thread::scope(|scope| -> Result<(Versions, bool)> {
        let (complete, stop, path) = (&complete, &stop, &path);
        let writers: Vec<_> = (0..file.writers)
            .map(|writer| {
                let fs = Arc::clone(target.fs());
                scope.spawn(move || -> Result<bool> {
                    for version in 1_u64.. {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        let word = (writer << VERSION_BITS) | version;
                        match caught(|| fs.write(id, 0, &word.to_le_bytes().repeat(file.len / 8))) {
                            Some(Ok(written)) if written == file.len => {
                                complete[writer as usize].store(version, Ordering::SeqCst);
                            }
                            failed => return excused(failed.and_then(Result::err).map(|error| error.errno())),
                        }
                    }
                    Ok(false)
                })
            })
            .collect();
        let mut reader = target.clone();
        let mut versions = Versions::new();
        let mut end = Ok(false);
        while versions.len() < nr_fsyncs {
            let before = std::array::from_fn(|writer| complete[writer].load(Ordering::SeqCst));
            match caught(|| reader.fsync(path)) {
                Some(Ok(())) => {}
                failed => {
                    end = excused(failed.and_then(Result::err));
                    break;
                }
            }
            versions.push((index, before));
            if let Some(marks) = marks {
                marks.mark_lane(REWRITTEN_LANE, versions.len() as u64);
            }
        }
        stop.store(true, Ordering::SeqCst);
        let mut told = end?;
        for writer in writers {
            told |= joined(writer)?;
        }
        Ok((versions, told))
    })
}

/// Empties block groups until the other threads are done. Returns whether a fault was reported.
fn move_block_groups(target: &FsTarget, faults: Option<&Arc<FaultDevice>>, shared: &Shared, seed: u64) -> Result<bool> {
    let mut rng = Rng::new(seed ^ 0xba1a);
    let fs = target.fs();
    while !shared.stop.load(Ordering::SeqCst) {
        let group = *rng.pick(&fs.block_groups());
        let text = match caught(|| fs.relocate_block_group(group.start, &Job::new())) {
            Some(Ok(report)) if report.failures.is_empty() => continue,
            Some(Ok(report)) => format!("{:?}", report.failures),
            Some(Err(error)) => error.to_string(),
            None => "panicked".to_owned(),
        };
        // Allow these errors, because other threads make, move and remove chunks concurrently, and there may be no room for
        // a new chunk.
        if ["no space left", "there is no block group", "is already being"].iter().any(|part| text.contains(part)) {
            continue;
        }
        let has_fault = faults.is_some_and(|faults| faults.faults() > 0);
        ensure!(has_fault, "emptying block group {} fails without a fault: {text}", group.start);
        return Ok(true);
    }
    Ok(false)
}

/// The errors with which a change of quota groups may be refused: ENOENT, EBUSY, EEXIST, EINVAL, ENOSPC, ENOTCONN,
/// EINPROGRESS.
const QUOTA_REFUSALS: [i32; 7] = [2, 16, 17, 22, 28, 107, 115];

/// Changes groups, relations and limits, and starts rescans, until the other threads are done (T7). Returns whether a
/// fault was reported.
fn change_quotas(
    target: &FsTarget,
    kind: QuotaKind,
    faults: Option<&Arc<FaultDevice>>,
    shared: &Shared,
    seed: u64,
) -> Result<bool> {
    let mut rng = Rng::new(seed ^ 0x900a);
    let fs = target.fs();
    while !shared.stop.load(Ordering::SeqCst) {
        let groups: Vec<QgroupId> =
            fs.qgroups().map(|all| all.iter().map(|group| group.id).collect()).unwrap_or_default();
        let member = if groups.is_empty() { QgroupId(5) } else { *rng.pick(&groups) };
        let level = 1 + u16::try_from(rng.below(2))?;
        let parent = QgroupId::new(level, 1 + rng.below(3)).context("a small number")?;
        let limit = Some((!rng.one_in(3)).then_some(1 << 40));
        let changed = caught(|| match rng.below(12) {
            0..3 => fs.create_qgroup(parent),
            3..6 => fs.assign_qgroup(member, parent).map(drop),
            6..8 => fs.remove_qgroup(member, parent).map(drop),
            8 => fs.destroy_qgroup(parent),
            9 => fs.limit_qgroup(member, limit, limit),
            10 => fs.start_quota_rescan(),
            _ if rng.one_in(3) => fs.disable_quotas().and_then(|()| fs.enable_quotas(kind)),
            _ => fs.clear_stale_qgroups().map(drop),
        });
        match changed {
            Some(Ok(())) => {}
            // The change is impossible with the existing groups, or the filesystem is full.
            Some(Err(error)) if QUOTA_REFUSALS.contains(&error.errno()) => {}
            failed => {
                let has_fault = faults.is_some_and(|faults| faults.faults() > 0);
                ensure!(has_fault, "a change of quotas fails without a fault: {failed:?}");
                return Ok(true);
            }
        }
        std::thread::sleep(Duration::from_millis(rng.below(8)));
    }
    Ok(false)
}

/// Writes data that the device refuses, and checks that fsync fails (T4).
fn poison(target: &FsTarget, shared: &Shared) -> Result<()> {
    let mut target = target.clone();
    let mut at = 0;
    while !shared.stop.load(Ordering::SeqCst) {
        // Each sector begins with the pattern.
        target.write(b"poison", at, &POISON.repeat(512)).map_err(errno)?;
        ensure!(target.fsync(b"poison").is_err(), "T4: an fsync of a file that cannot be written succeeds");
        at = (at + 8192) % (64 << 10);
        std::thread::sleep(Duration::from_millis(2));
    }
    target.write(b"poison", 0, &POISON.repeat(512)).map_err(errno)
}
