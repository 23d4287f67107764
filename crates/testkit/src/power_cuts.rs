//! Simulates many power cuts: a workload is recorded once, and the power is cut at many points of the recording. The
//! medium that each cut leaves is opened, checked, and compared with the promises.
//!
//! - C1. The medium opens for writing, with its log replayed.
//! - C2. `ubtrfs-check` finds the medium clean, before and after the replay.
//! - C3. The filesystem keeps its promises: see [`History`].
//! - C4. No old content lies past the end of a file, where it would appear when the file grows.
//! - C4. The seed determines the workload, the points, and the writes that each cut keeps, drops and tears. There is
//!   one exception: with little memory, the commit thread flushes delayed items at times that the seed does not
//!   determine.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use ubtrfs_device::Device;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::superblock::{Incompat, Superblock};
use ubtrfs_fs::MountOptions;
use ubtrfs_mkfs::MkfsOptions;

use crate::faults::read_all;
use crate::history::ReadFound;
use crate::loop_mount::NO_SPACE_IN_LOG;
use crate::promising::RecordingTarget;
use crate::target::NOSPC;
use crate::{
    Compare, CutBuilder, Driver, FsTarget, History, LANES, LoopMount, Medium, MediumDevice, Model, NodeKind,
    RecordingDevice, Rng, Script, Step, Target, TreeEntry, btrfs_check, check_quotas, compare_entries,
    opinion_without_quotas, second_opinion, walk_path,
};

/// A recorded workload.
#[derive(Debug)]
pub struct PowerCuts {
    /// Describes the workload and the filesystem.
    pub name: String,
    device: Arc<RecordingDevice>,
    history: History,
    options: MountOptions,
    seed: u64,
}

/// The medium that one cut left, and the promises made before the cut.
#[derive(Debug)]
pub struct Cut {
    pub(crate) medium: Medium,
    pub(crate) number: usize,
    pub(crate) made: usize,
    /// For each lane of the recording device, the number of promises made before the cut.
    pub(crate) lanes: [Option<u64>; LANES],
    /// Describes the cut, for messages.
    pub what: String,
}

/// The result of Linux's verification of a cut, if Linux found nothing wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinuxVerdict {
    /// Linux mounted the filesystem, completed its balance, and found everything right.
    Good,
    /// Linux aborted a transaction because it found no space on a device without unallocated space, so Linux did not
    /// complete the verification. The filesystem was clean before and after the abort.
    OutOfSpace,
}

impl PowerCuts {
    /// Records the workload of a seed: one of the scripts, writes to a full filesystem, or random operations. The seed
    /// also determines the kind of filesystem.
    pub fn record(seed: u64) -> Result<Self> {
        let mut rng = Rng::new(seed);
        let kind = usize::try_from(seed % (Script::KINDS as u64 + 4))?;
        let (mkfs, mount) = filesystem(&mut rng, kind == Script::KINDS);
        let len_bytes = if kind == Script::KINDS { 20 << 20 } else { 256 << 20 };
        let base = Medium::formatted(len_bytes, &mkfs)?;
        let mut options = MountOptions::parse(&mount)?;
        let little_memory = kind > Script::KINDS && (seed / (Script::KINDS as u64 + 4)) % 2 == 1;
        if little_memory {
            options.memory_bytes = LITTLE_MEMORY;
        }
        let device = Arc::new(RecordingDevice::new(base));
        let inner = FsTarget::on_device(Arc::clone(&device) as Arc<dyn Device>, options.clone())?;
        let mut history = History::new(Model::new());
        if !little_memory {
            history.only_promises_commit();
        }
        let mut target = RecordingTarget::new(inner, Arc::clone(&device));
        let name = match kind {
            kind if kind < Script::KINDS => {
                let script = Script::about(kind, seed);
                for step in &script.steps {
                    perform(step, &mut target, &mut history).with_context(|| format!("seed {seed}: {step:?}"))?;
                }
                script.name.to_owned()
            }
            Script::KINDS => {
                fill(&mut target, &mut history, &mut rng).with_context(|| format!("seed {seed}"))?;
                "no space".to_owned()
            }
            kind => {
                let mut driver = Driver::new(seed, 1 << 16);
                // If background commits happen, change only names: such commits do not write dirty data, so the
                // content of files in the states that they capture is not known.
                if little_memory || kind % 2 == 0 {
                    driver = driver.names_only();
                }
                // With little memory, do not fsync: after an fsync, delayed items are not applied to their trees before
                // the commit, but this workload tests that delayed items are applied earlier.
                let (operations, fsyncs) = if little_memory { (600, false) } else { (140, true) };
                random(&mut target, &mut history, &mut rng, driver, operations, fsyncs)?;
                "random".to_owned()
            }
        };
        let memory = if little_memory { "little memory, " } else { "" };
        let name = format!("{name} ({memory}{mount}, nodes of {}, {})", mkfs.nodesize, mkfs.csum_type.name());
        target.before(&mut history);
        target.inner.close()?;
        let made = history.sync();
        device.mark(made as u64);
        Ok(Self { name, device, history, options, seed })
    }

    /// Chooses points to cut at, in ascending order. Half of the points are around flushes, where superblocks are
    /// written.
    pub fn points(&self, cuts: usize) -> Vec<usize> {
        let mut rng = Rng::new(self.seed ^ 0x5eed);
        let (flushes, events) = (self.device.flush_points(), self.device.events());
        let mut points: Vec<usize> = (0..cuts)
            .map(|number| match number % 2 {
                0 if !flushes.is_empty() => (*rng.pick(&flushes) + rng.index(4)).saturating_sub(1),
                _ => rng.index(events + 1),
            })
            .collect();
        points.sort_unstable();
        points
    }

    /// Returns the numbers of promises, flushes and events in the recording.
    pub fn size(&self) -> (usize, usize, usize) {
        (self.history.promises(), self.device.flush_points().len(), self.device.events())
    }

    /// Makes the builder that [`PowerCuts::cut`] needs.
    pub fn builder(&self) -> CutBuilder {
        self.device.cuts()
    }

    /// Returns the medium as it is after a power cut at this point. `number` selects the random choices of the cut.
    pub fn cut(&self, builder: &mut CutBuilder, number: usize, point: usize) -> Cut {
        let mut rng = Rng::new(self.seed.wrapping_mul(0x1_0001).wrapping_add(number as u64));
        let (medium, outcome) = builder.cut(point, &mut rng);
        let made = outcome.promised.unwrap_or(1) as usize;
        let what = format!("seed {} ({}), cut {number} at event {point}: {outcome:?}", self.seed, self.name);
        Cut { medium, number, made, lanes: outcome.promised_by, what }
    }

    /// Verifies the rules C1 to C4. Returns the entries of the filesystem.
    pub fn verify(&self, cut: &Cut) -> Result<Vec<TreeEntry>> {
        self.verify_inner(cut).with_context(|| cut.what.clone())
    }

    fn verify_inner(&self, cut: &Cut) -> Result<Vec<TreeEntry>> {
        check(&cut.medium).context("C2, before the replay")?;
        let device = Arc::new(MediumDevice::new(cut.medium.clone()));
        let target = FsTarget::on_device(Arc::clone(&device) as Arc<dyn Device>, self.options.clone()).context("C1")?;
        ensure!(target.fs().read_only().is_none(), "C1: it opens read-only: {:?}", target.fs().read_only());
        let found = target.walk().context("C1: it cannot be read")?;
        self.history.verify(&found, &|path| read_all(&target, path), cut.made, false)?;
        target.grow_files(&found).context("C4")?;
        target.close().context("C1: it cannot be closed")?;
        check(&device.content()).context("C2, after the replay")?;
        Ok(found)
    }

    /// Verifies the cut with Linux: runs `btrfs check` before and after Linux's replay, and checks the promises on
    /// Linux's mount. Linux must find `ours`, the entries that [`PowerCuts::verify`] returned.
    pub fn verify_by_linux(&self, cut: &Cut, ours: &[TreeEntry], image: &Path) -> Result<LinuxVerdict> {
        cut.verify_by_linux(ours, image, |found, read| self.history.verify(found, read, cut.made, false))
    }
}

impl Cut {
    /// Runs `btrfs check` before and after Linux's replay. The entries that Linux shows must pass `promises`, must
    /// equal `ours`, and must stay equal until the end of a balance that Linux resumes. Linux's rescan of quotas must
    /// find the numbers that are on the medium after the cut. Linux 6.18 sometimes miscounts exclusive bytes and simple
    /// quotas while it balances. So after Linux's balance, quotas are counted by another rescan before they are
    /// compared, and simple quotas are not compared. If Linux aborts for lack of space (see [`Cut::mount`]), all
    /// remaining verifications except a check of the image are skipped, and the verdict is
    /// [`LinuxVerdict::OutOfSpace`].
    pub(crate) fn verify_by_linux(
        &self,
        ours: &[TreeEntry],
        image: &Path,
        promises: impl Fn(&[TreeEntry], ReadFound<'_>) -> Result<()>,
    ) -> Result<LinuxVerdict> {
        let judge = || {
            self.medium.save(image)?;
            // btrfs-progs before 6.7 do not open filesystems with simple quotas, so only our checker checks these
            // filesystems.
            let has_simple_quotas = self.has_simple_quotas();
            let check = if has_simple_quotas { second_opinion } else { btrfs_check };
            let check_after_abort = |image: &Path| {
                let check = if has_simple_quotas { opinion_without_quotas } else { btrfs_check };
                check(image).context("after Linux's abort for lack of space")?;
                Ok(LinuxVerdict::OutOfSpace)
            };
            check(image).context("before the replay")?;
            let Some(mount) = self.mount(image, "skip_balance")? else { return check_after_abort(image) };
            let counted = if has_simple_quotas { Ok(false) } else { mount.judge_quotas() };
            let is_full = counted.is_err() && self.is_allocated() && mount.ran_out_of_space();
            mount.close()?;
            if is_full {
                return check_after_abort(image);
            }
            let has_quotas = counted?;
            if has_quotas {
                check_quotas(image).context("after Linux's rescan")?;
            } else {
                check(image).context("after the replay")?;
            }
            self.medium.save(image)?;
            let Some(mount) = self.mount(image, "")? else { return check_after_abort(image) };
            let found = walk_path(mount.path())?;
            let read = |path: &[u8]| {
                use std::os::unix::ffi::OsStrExt;
                Ok(std::fs::read(mount.path().join(std::ffi::OsStr::from_bytes(path)))?)
            };
            promises(&found, &read)?;
            compare_entries(ours, &found, Compare { root: false, ..Compare::ALL })
                .context("our replay (first) and Linux's (second) differ")?;
            mount.finish_balance()?;
            compare_entries(&found, &walk_path(mount.path())?, Compare::ALL)
                .context("Linux's balance changes files")?;
            let counted = if has_quotas { mount.rescan_quotas() } else { Ok(()) };
            if self.is_allocated() && mount.ran_out_of_space() {
                mount.close()?;
                return check_after_abort(image);
            }
            counted?;
            let complaints = mount.kernel_complaints();
            ensure!(complaints.is_empty(), "Linux complains:\n{}", complaints.join("\n"));
            mount.close()?;
            if has_simple_quotas {
                opinion_without_quotas(image).context("after Linux's balance")?;
                return Ok(LinuxVerdict::Good);
            }
            check(image).context("after Linux's balance")?;
            if has_quotas {
                check_quotas(image).context("after Linux's balance")?;
            }
            Ok(LinuxVerdict::Good)
        };
        judge().with_context(|| format!("Linux: {}", self.what))
    }

    /// Mounts the image with Linux. Returns `None` if the mount fails because Linux finds no space.
    ///
    /// If chunks take the whole device, Linux 6.18 aborts transactions in two cases, and may then fail to mount. First,
    /// while metadata is converted to DUP, Linux allocates nothing in block groups of the profile single, even if there
    /// is no room for a DUP block group. Linux cannot even mount images of such a conversion that Linux itself began.
    /// Second, a balance deletes an empty block group and then makes the only metadata block group read-only, although
    /// a new block group cannot take the place of the deleted one before the next commit.
    fn mount(&self, image: &Path, options: &str) -> Result<Option<LoopMount>> {
        match LoopMount::new(image, options) {
            Err(error) if self.is_allocated() && format!("{error:#}").contains(NO_SPACE_IN_LOG) => Ok(None),
            mounted => mounted.map(Some),
        }
    }

    fn superblock(&self) -> Option<Superblock> {
        let mut sector = vec![0; 4096];
        self.medium.read(64 << 10, &mut sector);
        Superblock::decode(&sector).ok()
    }

    fn has_simple_quotas(&self) -> bool {
        self.superblock().is_some_and(|found| found.incompat().contains(Incompat::SIMPLE_QUOTA))
    }

    /// Whether chunks take more than 15/16 of the device.
    fn is_allocated(&self) -> bool {
        self.superblock().is_some_and(|found| {
            let device = &found.dev_item;
            device.total_bytes - device.bytes_used < device.total_bytes / 16
        })
    }

    /// Saves the medium to an image file.
    pub fn save(&self, image: &Path) -> Result<()> {
        self.medium.save(image)
    }
}

impl PowerCuts {
    /// Compares Linux's log replay of the cut with ours. If the two replays agree, a broken promise is not the fault
    /// of our replay.
    pub fn compare_with_linux(&self, cut: &Cut, image: &Path) -> Result<()> {
        let device: Arc<dyn Device> = Arc::new(MediumDevice::new(cut.medium.clone()));
        let target = FsTarget::on_device(device, self.options.clone())?;
        let ours = target.walk()?;
        cut.medium.save(image)?;
        let mount = LoopMount::new(image, "")?;
        let theirs = walk_path(mount.path())?;
        compare_entries(&ours, &theirs, Compare { root: false, ..Compare::ALL })
            .context("our replay (first) and Linux's (second) differ")
    }
}

/// Fails with the problems that `ubtrfs-check` finds. Also verifies checksums of data.
pub fn check(medium: &Medium) -> Result<()> {
    let device: Arc<dyn Device> = Arc::new(MediumDevice::new(medium.clone()));
    let options = ubtrfs_check::Options { data_csums: true, ..Default::default() };
    let (mut problems, mut miscounts) = (Vec::new(), false);
    let report = ubtrfs_check::check(vec![device], options, &(), &mut |problem| {
        // The checker reports wrong quota numbers only as a warning. Here they count as an error, because the engine
        // must keep quota numbers exact.
        miscounts |= problem.code == ubtrfs_check::Code::Qgroup;
        problems.push(problem.to_string());
    })?;
    if !report.is_clean() || miscounts {
        problems.truncate(10);
        bail!("check: {:?}\n{}", report.counts, problems.join("\n"));
    }
    Ok(())
}

/// A memory limit in bytes, so small that a few hundred changes trigger a flush of delayed items.
const LITTLE_MEMORY: u64 = 1 << 20;

fn filesystem(rng: &mut Rng, mixed: bool) -> (MkfsOptions, String) {
    let mut mkfs = MkfsOptions::default();
    let mut mount = "commit=300".to_owned();
    if rng.one_in(3) {
        mkfs.nodesize = 4096;
    }
    if rng.one_in(4) {
        mkfs.data_profile = BlockGroupFlags::DUP;
    }
    if rng.one_in(4) {
        mkfs.metadata_profile = BlockGroupFlags::empty();
    }
    if rng.one_in(5) {
        mkfs.csum_type = ubtrfs_format::CsumType::Xxhash;
    }
    match rng.below(8) {
        0 => mount.push_str(",compress=zstd:1"),
        1 => mount.push_str(",compress-force=lzo"),
        2 => mount.push_str(",compress=zlib"),
        3 => mount.push_str(",discard=sync"),
        4 => mount.push_str(",flushoncommit"),
        _ => {}
    }
    if mixed || rng.one_in(8) {
        mkfs.mixed = true;
        mkfs.nodesize = 4096;
        mkfs.data_profile = BlockGroupFlags::empty();
        mkfs.metadata_profile = BlockGroupFlags::empty();
    }
    (mkfs, mount)
}

fn perform(step: &Step, target: &mut RecordingTarget, history: &mut History) -> Result<()> {
    let failed = |errno: i32| anyhow::anyhow!("{}", std::io::Error::from_raw_os_error(errno));
    target.before(history);
    let mut model = history.model().clone();
    match step {
        Step::Do(_, action) => {
            action(target).map_err(failed)?;
            action(&mut model).map_err(failed)?;
        }
        Step::Fsync(path) => target.fsync(path).map_err(failed)?,
        Step::Sync => target.sync().map_err(failed)?,
        Step::Read(..) | Step::Remount => {}
    }
    target.after(history, &model);
    Ok(())
}

/// Performs random operations, and sometimes an fsync of any file or directory.
fn random(
    target: &mut RecordingTarget,
    history: &mut History,
    rng: &mut Rng,
    mut driver: Driver,
    operations: usize,
    fsyncs: bool,
) -> Result<()> {
    let mut model = history.model().clone();
    for _ in 0..operations {
        target.before(history);
        driver.run(&mut model, target, 1)?;
        target.after(history, &model);
        if fsyncs && rng.one_in(5) {
            let entries = model.entries();
            let entry = &entries[rng.index(entries.len())];
            if matches!(entry.kind, NodeKind::File | NodeKind::Directory) {
                perform(&Step::Fsync(entry.path.clone()), target, history)?;
            }
        }
        if rng.one_in(operations as u64 / 4) {
            perform(&Step::Sync, target, history)?;
        }
    }
    Ok(())
}

/// Writes until there is no space, removes some files, and repeats.
fn fill(target: &mut RecordingTarget, history: &mut History, rng: &mut Rng) -> Result<()> {
    let failed = |errno: i32| anyhow::anyhow!("{}", std::io::Error::from_raw_os_error(errno));
    let mut files: Vec<Vec<u8>> = Vec::new();
    let mut full = 0;
    for index in 0..160 {
        target.before(history);
        let mut model = history.model().clone();
        if full > 0 && !files.is_empty() && rng.one_in(2) {
            let path = files.swap_remove(rng.index(files.len()));
            target.unlink(&path).map_err(failed)?;
            model.unlink(&path).map_err(failed)?;
            full -= 1;
        } else {
            let path = format!("file-{index}").into_bytes();
            match target.create(&path, NodeKind::File, 0o644, (0, 0)) {
                Ok(()) => {
                    model.create(&path, NodeKind::File, 0o644, (0, 0)).map_err(failed)?;
                    let data = rng.bytes(100_000 + rng.clone().index(400_000));
                    let id = target.inner.lookup(&path).map_err(failed)?.id;
                    let mut at = 0;
                    // Record each write as a step of its own, because a write that lacks space for all of its data
                    // makes a commit and then writes only a part of the data.
                    while at < data.len() {
                        target.after(history, &model);
                        target.before(history);
                        match target.inner.fs().write(id, at as u64, &data[at..]) {
                            Ok(written) => {
                                model.write(&path, at as u64, &data[at..at + written]).map_err(failed)?;
                                at += written;
                            }
                            Err(error) => {
                                ensure!(error.errno() == NOSPC, "write: {error}");
                                full = 4;
                                break;
                            }
                        }
                    }
                    files.push(path);
                }
                Err(NOSPC) => full = 4,
                Err(errno) => bail!("create: errno {errno}"),
            }
        }
        target.after(history, &model);
        let step = match rng.below(10) {
            0 => Step::Sync,
            1..3 if !files.is_empty() => Step::Fsync(rng.pick(&files).clone()),
            _ => continue,
        };
        match perform(&step, target, history) {
            Ok(()) => {}
            Err(error) if error.to_string().contains("No space") => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
