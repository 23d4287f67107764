//! Power cuts of arrays: threads change a filesystem on several devices, the power is cut on all of them at one moment,
//! and then as many devices as the profiles tolerate are lost, stale or full of noise.
//!
//! - A1. After a cut and any tolerated loss, the filesystem opens for writing, degraded if a device is missing. All
//!   promises hold (T1 to T4 of [`super`]).
//! - A2. The undamaged devices are clean before and after the replay of the log. Only missing devices are reported, and
//!   after the replay also devices that are not up to date yet, because the cut came before their superblock was written.
//! - A3. Linux mounts the undamaged devices, degraded if a device is missing, finds nothing wrong, and the promises hold.
//!   Linux finds the same entries, except if the cut came while superblocks were written: then some have the new commit
//!   or log, and others do not.
//! - A4. A stale device has a state that it had at an earlier cut. A device full of noise keeps its superblocks, and each
//!   of its other blocks that was ever written has random content.
//! - A5. While devices join, leave and take the place of others, a cut leaves none of them missing: without a loss, the
//!   filesystem opens without the option for missing devices. Devices that are no members any more, or not yet, are left
//!   out though they are given.
//! - A6. A replacement that the cut interrupted goes on, by us and by Linux, and then A1 to A3 hold.
//! - A7. If a lost device comes back after commits without it, it is brought up to date: all copies are clean and equal. It
//!   may have blocks of a commit that the cut interrupted, whose places and generation later blocks have.
//! - A8. In a run with all events, block groups are also converted, devices are resized and scrubbed, and parts of one
//!   device are overwritten with noise and repaired. Profiles always tolerate the losses of the run. A conversion that the
//!   cut interrupted goes on, by us and by Linux. While a device has noise, no device is lost, and the device's copies may
//!   be bad.
//! - A9. In such a run, a device may also stop answering, and the filesystem goes on without it. After a cut, the device is
//!   lost, or it returns, and is brought up to date: all copies are clean. No other device is lost then.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ubtrfs_check::{Code, Options};
use ubtrfs_device::Device;
use ubtrfs_format::Profile;
use ubtrfs_format::item::{BlockGroupFlags, DevReplaceItem};
use ubtrfs_format::superblock::{MAGIC, MAGIC_OFFSET, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use ubtrfs_fs::{Caller, Fs, Job, MountOptions, NewInode};

use super::device_changes::{ArrayEvents, Changes, Harmed, REFUSED, change_devices, flushes_until_durable};
use super::verify::Made;
use super::{Record, Scenario, Work, points, run_threads};
use crate::loop_mount::forget_unmounted_devices;
use crate::{
    Compare, CutBuilder, FsTarget, Gate, LoopMount, Medium, MediumDevice, RecordingDevice, Rng, TreeEntry,
    btrfs_check_array, compare_entries, run, walk_path,
};

/// A recorded run of threads on an array.
#[derive(Debug)]
pub struct ArrayCuts {
    /// Describes the scenario.
    pub name: String,
    devices: Vec<Arc<RecordingDevice>>,
    record: Record,
    options: MountOptions,
    /// Number of devices that the profiles of all chunks allow to lose.
    tolerated: usize,
    /// Whether devices join and leave (A5).
    is_changing: bool,
    /// The device changes of the run.
    changes: Changes,
    seed: u64,
    /// Number of replacements that went on after a cut (A6).
    nr_resumed: AtomicU64,
    nr_resumed_by_linux: AtomicU64,
    /// Number of conversions that went on after a cut (A8).
    nr_converted: AtomicU64,
    nr_converted_by_linux: AtomicU64,
}

/// What happens to a device at a cut, besides the cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Nothing.
    Kept,
    /// The device is lost.
    Lost,
    /// The device stopped at an earlier event (A4).
    Stale(usize),
    /// The device is full of noise (A4).
    Noise,
    /// The device did not answer before the cut, and is there again (A9).
    Returned,
}

/// The media that a cut left, and the promises made before it.
#[derive(Debug)]
pub struct ArrayCut {
    media: Vec<Medium>,
    fates: Vec<Fate>,
    lanes: Made,
    number: usize,
    /// The number of the device with noise, if the cut came while there was one (A8).
    noisy: Option<usize>,
    /// Describes the cut, for messages.
    pub what: String,
}

/// Number of devices that can join a filesystem.
const NR_SPARES: usize = 2;
/// Profiles of data and metadata, and numbers of devices.
const ARRAYS: [(&str, &str, usize); 10] = [
    ("raid1", "raid1", 2),
    ("raid1", "raid1", 3),
    ("single", "raid1", 2),
    ("raid0", "raid1", 3),
    ("raid1c3", "raid1c3", 3),
    ("raid1", "raid1c3", 4),
    ("raid1c4", "raid1c4", 4),
    ("raid10", "raid10", 4),
    ("raid10", "raid1c4", 5),
    ("raid0", "raid10", 2),
];

impl ArrayCuts {
    /// Number of arrays over which the seeds go in turn.
    pub const KINDS: u64 = ARRAYS.len() as u64;

    /// Records the run of this seed. Returns `None` if arrays can only be read.
    pub fn record(seed: u64) -> Result<Option<Self>> {
        let (data, metadata, nr_devices) = ARRAYS[(seed % Self::KINDS) as usize];
        Self::record_on(data, metadata, nr_devices, seed)
    }

    /// Works like [`ArrayCuts::record`], while another thread adds, removes and replaces devices (A5).
    pub fn record_changing(seed: u64) -> Result<Option<Self>> {
        let (data, metadata, nr_devices) = ARRAYS[(seed % Self::KINDS) as usize];
        Self::record_with(data, metadata, nr_devices, Some(false), seed)
    }

    /// Works like [`ArrayCuts::record_changing`], with all kinds of events (A8).
    pub fn record_eventful(seed: u64) -> Result<Option<Self>> {
        let (data, metadata, nr_devices) = ARRAYS[(seed % Self::KINDS) as usize];
        Self::record_with(data, metadata, nr_devices, Some(true), seed)
    }

    /// Works like [`ArrayCuts::record`], with these profiles and this number of devices.
    pub fn record_on(data: &str, metadata: &str, nr_devices: usize, seed: u64) -> Result<Option<Self>> {
        Self::record_with(data, metadata, nr_devices, None, seed)
    }

    /// Records a run. With `changes`, devices change, and with `Some(true)` there are all events.
    fn record_with(
        data: &str,
        metadata: &str,
        nr_devices: usize,
        changes: Option<bool>,
        seed: u64,
    ) -> Result<Option<Self>> {
        let profile = |name: &str| Profile::named(name).with_context(|| format!("no profile {name}"));
        let (data, metadata) = (profile(data)?, profile(metadata)?);
        let mut scenario = scenario(seed);
        scenario.nr_devices = nr_devices;
        (scenario.mkfs.data_profile, scenario.mkfs.metadata_profile) = (data.flag, metadata.flag);
        let what = format!("seed {seed} ({}, {} and {} on {nr_devices})", scenario.name, data.name, metadata.name);
        if nr_devices > 1 && !can_write(&scenario)? {
            return Ok(None);
        }
        let gate = Gate { seed, superblocks: 2, writes: 80, events: 40, limit: Duration::from_millis(20) };
        let device = |(number, device): (u64, RecordingDevice)| {
            Arc::new(device.with_gate(Gate { seed: gate.seed.wrapping_add(number << 32), ..gate }))
        };
        let mut bases = scenario.bases().with_context(|| what.clone())?;
        let nr_spares = if changes.is_some() { NR_SPARES } else { 0 };
        let tolerated = data.tolerated_failures.min(metadata.tolerated_failures);
        let events = match changes {
            Some(true) => ArrayEvents::All { tolerated },
            _ => ArrayEvents::Devices,
        };
        bases.extend((0..nr_spares).map(|_| Medium::zeros(scenario.len_bytes)));
        let devices: Vec<_> = (0..).zip(RecordingDevice::array(bases)).map(device).collect();
        let options = MountOptions::parse(&scenario.mount)?;
        let all: Vec<Arc<dyn Device>> = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
        let given = all.iter().take(nr_devices).cloned().collect();
        let target = FsTarget::on_devices(given, options.clone()).with_context(|| what.clone())?;
        let stop = AtomicBool::new(false);
        let mut changes = None;
        let mut record = std::thread::scope(|scope| {
            let changer =
                (nr_spares > 0).then(|| scope.spawn(|| change_devices(target.fs(), &devices, events, &stop, seed)));
            let record = run_threads(scenario, &target, Some(&devices[0]), None, seed);
            stop.store(true, Ordering::SeqCst);
            let joined = changer.map(|changer| changer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            changes = joined.transpose()?;
            record
        })
        .with_context(|| what.clone())?;
        let what = changes.as_ref().map_or_else(
            || what.clone(),
            |Changes { nr_devices, others: [converted, resized, scrubbed], noise, absences }| {
                let (noise, absences) = (noise.len(), absences.len());
                format!(
                    "{what}, {nr_devices} changes of devices, {converted} conversions, {resized} resizes, {scrubbed} scrubs, \
                     {noise} times noise, {absences} absences"
                )
            },
        );
        target.close().with_context(|| format!("{what}: closing"))?;
        for (lane, history) in record.lanes.iter_mut().enumerate() {
            devices[0].mark_lane(lane, history.sync() as u64);
        }
        Ok(Some(Self {
            name: what,
            devices,
            record,
            options,
            tolerated: tolerated.into(),
            is_changing: nr_spares > 0,
            changes: changes.unwrap_or_default(),
            seed,
            nr_resumed: AtomicU64::new(0),
            nr_resumed_by_linux: AtomicU64::new(0),
            nr_converted: AtomicU64::new(0),
            nr_converted_by_linux: AtomicU64::new(0),
        }))
    }

    /// Chooses points to cut at, in ascending order. They are chosen as in [`super::ThreadedCuts::points`].
    pub fn points(&self, cuts: usize) -> Vec<usize> {
        points(&self.devices[0], self.seed, cuts)
    }

    /// Returns the numbers of promises, flushes and events in the recording.
    pub fn size(&self) -> (usize, usize, usize) {
        (self.record.nr_promises(), self.devices[0].flush_points().len(), self.devices[0].events())
    }

    /// Makes the builder that [`ArrayCuts::cut`] needs.
    pub fn builder(&self) -> CutBuilder {
        self.devices[0].cuts()
    }

    /// Returns the media as they are after a power cut at this point and a loss. `number` selects the random choices.
    pub fn cut(&self, builder: &mut CutBuilder, number: usize, point: usize) -> ArrayCut {
        let mut rng = Rng::new(self.seed.wrapping_mul(0x1_0001).wrapping_add(number as u64));
        let (mut media, outcome) = builder.cut_all(point, &mut rng);
        let mut fates = vec![Fate::Kept; media.len()];
        let noisy = self.harmed_at(&self.changes.noise, flushes_until_durable(self.devices.len()), point);
        let absent = self.harmed_at(&self.changes.absences, 0, point);
        if let Some(absent) = absent {
            fates[absent] = if rng.one_in(2) { Fate::Lost } else { Fate::Returned };
        }
        let tolerated = if noisy.or(absent).is_some() { 0 } else { self.tolerated };
        for _ in 0..rng.index(tolerated + 1) {
            let victim = rng.index(media.len());
            fates[victim] = match rng.below(3) {
                // Which device a stale or noisy one is depends on the time (A5).
                _ if self.is_changing => Fate::Lost,
                0 => Fate::Lost,
                1 => Fate::Stale(rng.index(point + 1)),
                _ => Fate::Noise,
            };
        }
        for (index, fate) in fates.iter().enumerate() {
            match fate {
                Fate::Kept | Fate::Lost | Fate::Returned => {}
                Fate::Stale(events) => media[index] = builder.stopped_at(index, *events, &mut rng),
                Fate::Noise => media[index].add_noise(&mut rng),
            }
        }
        let primaries: Vec<String> = media.iter().map(primary_of).collect();
        let noise = noisy.map_or_else(String::new, |device| format!(", noise on medium {device}"));
        let what = format!(
            "arrays, {}, cut {number} at event {point}, {fates:?}{noise}, {primaries:?}: {outcome:?}",
            self.name
        );
        ArrayCut { media, fates, lanes: outcome.promised_by, number, noisy, what }
    }

    /// The device that is harmed after a cut at this point (A8, A9). The end is durable after this number of flushes.
    fn harmed_at(&self, harmed: &[Harmed], nr_flushes: usize, point: usize) -> Option<usize> {
        if harmed.is_empty() {
            return None;
        }
        let flushes = self.devices[0].flush_points();
        let is_harmed = |Harmed { events, .. }: &&Harmed| {
            let end = match nr_flushes {
                0 => events.end,
                nr => flushes.iter().filter(|flush| **flush > events.end).nth(nr).map_or(usize::MAX, |flush| *flush),
            };
            (events.start..=end).contains(&point)
        };
        harmed.iter().rev().find(is_harmed).map(|harmed| harmed.number)
    }

    /// Verifies A1 and A2. Returns the entries of the filesystem.
    pub fn verify(&self, cut: &ArrayCut) -> Result<Vec<TreeEntry>> {
        let verify = || {
            // A replaced device that was not wiped yet is stale if the device in its place is lost.
            let is_gone = |fate: &Fate| matches!(fate, Fate::Lost | Fate::Returned);
            let may_be_stale = self.is_changing && cut.fates.iter().any(is_gone);
            let bad = cut.noisy.and_then(|number| primary(&cut.media[number])).map(|it| it.dev_item.devid.0);
            check_except(&self.members_of(cut.undamaged())?, may_be_stale, bad).context("A2, before the replay")?;
            let devices: Vec<Option<Arc<MediumDevice>>> = cut.devices();
            let given = devices.iter().flatten().filter(|device| has_superblock(&device.content()));
            let given = given.map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
            let degraded = cut.fates.contains(&Fate::Lost);
            let options = MountOptions { degraded, ..self.options.clone() };
            let target = FsTarget::on_devices(given, options).context("A1: it does not open")?;
            ensure!(target.fs().read_only().is_none(), "A1: it opens read-only: {:?}", target.fs().read_only());
            let found = target.walk().context("A1: it cannot be read")?;
            self.record.verify(&found, &|path| crate::faults::read_all(&target, path), &cut.lanes).context("A1")?;
            if target.fs().replace_status().is_some() {
                target.fs().wait_for_replace();
                ensure!(is_replaced(target.fs())?, "A6: the replacement does not go on to its end");
                let again = target.walk().context("A6: it cannot be read")?;
                self.record.verify(&again, &|path| crate::faults::read_all(&target, path), &cut.lanes).context("A6")?;
                self.nr_resumed.fetch_add(1, Ordering::Relaxed);
            }
            if cut.number.is_multiple_of(2) && target.fs().balance_status().is_some() {
                match target.fs().resume_balance(&Job::new()) {
                    Ok(report) => ensure!(report.failures.is_empty(), "A8: it fails: {:?}", report.failures),
                    Err(error) => ensure!(REFUSED.contains(&error.errno()), "A8: it fails: {error}"),
                }
                let again = target.walk().context("A8: it cannot be read")?;
                self.record.verify(&again, &|path| crate::faults::read_all(&target, path), &cut.lanes).context("A8")?;
                self.nr_converted.fetch_add(1, Ordering::Relaxed);
            }
            let has_returned = cut.fates.contains(&Fate::Returned);
            if has_returned {
                target.fs().wait_for_resync();
            }
            target.close().context("A1: it cannot be closed")?;
            let is_kept = |(fate, device): (&Fate, &Option<Arc<MediumDevice>>)| {
                device.as_ref().filter(|_| *fate == Fate::Kept).map(|device| device.content())
            };
            let kept: Vec<Medium> = cut.fates.iter().zip(&devices).filter_map(is_kept).collect();
            check_except(&self.members_of(kept)?, true, bad).context("A2, after the replay")?;
            if has_returned {
                let all = devices.iter().flatten().map(|device| device.content()).collect();
                check_except(&self.members_of(all)?, false, None).context("A9")?;
            }
            self.verify_return(cut, devices).context("A7")?;
            Ok(found)
        };
        verify().with_context(|| cut.what.clone())
    }

    /// Verifies A7, where nothing but losses happened: changes the filesystem on `devices`, and opens it with the lost devices.
    fn verify_return(&self, cut: &ArrayCut, devices: Vec<Option<Arc<MediumDevice>>>) -> Result<()> {
        let lost: Vec<&Medium> = cut
            .fates
            .iter()
            .zip(&cut.media)
            .filter(|(fate, _)| **fate == Fate::Lost)
            .map(|(_, medium)| medium)
            .collect();
        let newest = cut.undamaged().iter().map(generation_of).max();
        // A lost device with a commit that the others do not have was written apart from them.
        let is_ahead = lost.iter().any(|medium| Some(generation_of(medium)) > newest);
        let is_simple = cut.fates.iter().all(|fate| matches!(fate, Fate::Kept | Fate::Lost));
        if self.is_changing || lost.is_empty() || is_ahead || !is_simple {
            return Ok(());
        }
        let present: Vec<Arc<MediumDevice>> = devices.into_iter().flatten().collect();
        let given = |devices: &[Arc<MediumDevice>]| devices.iter().map(|device| Arc::clone(device) as _).collect();
        let options = MountOptions { degraded: true, ..self.options.clone() };
        let target = FsTarget::on_devices(given(&present), options).context("it does not open without the device")?;
        let content = |number: u8| vec![number; 20_000];
        for number in 0..3 {
            let top = target.lookup(b"").map_err(|errno| anyhow::anyhow!("the top has no attributes: {errno}"))?.id;
            let name = format!("while a device was lost {number}");
            let id = target.fs().create(top, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT)?.id;
            target.fs().write(id, 0, &content(number))?;
            target.fs().sync()?;
        }
        target.close().context("it cannot be closed without the device")?;
        let mut all = present;
        all.extend(lost.into_iter().map(|medium| Arc::new(MediumDevice::new(medium.clone()))));
        let target =
            FsTarget::on_devices(given(&all), self.options.clone()).context("it does not open with the device")?;
        target.fs().wait_for_resync();
        for number in 0..3 {
            let name = format!("while a device was lost {number}");
            let found = crate::faults::read_all(&target, name.as_bytes())?;
            ensure!(found == content(number), "{name} has other content");
        }
        target.close().context("it cannot be closed with the device")?;
        check(&all.iter().map(|device| device.content()).collect::<Vec<_>>(), false)
    }

    /// Verifies A3. Linux must find `ours`, the entries that [`ArrayCuts::verify`] returned.
    /// Returns false if Linux does not judge the cut: if there is noise, which its scrub reports, or if Linux has no room to go on with metadata of two profiles, or if a replaced
    /// device may still be there while the device in its place is lost.
    pub fn verify_by_linux(&self, cut: &ArrayCut, ours: &[TreeEntry], dir: &Path) -> Result<bool> {
        if cut.noisy.is_some() {
            return Ok(false);
        }
        // To forget devices, while another thread mounts some, would take them from that mount.
        static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
        let _alone = self.is_changing.then(|| ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        let judge = || {
            let mut images = Vec::new();
            let mut members = self.members_of(cut.undamaged())?;
            // A replaced device that was not wiped yet is stale if the device in its place is lost.
            let newest = members.iter().map(generation_of).max().unwrap_or_default();
            let is_late = members.iter().any(|medium| generation_of(medium) != newest);
            if self.is_changing && is_late && cut.fates.iter().any(|fate| *fate != Fate::Kept) {
                return Ok(false);
            }
            members.retain(|medium| !self.is_changing || generation_of(medium) + 1 >= newest);
            for (number, medium) in members.iter().enumerate() {
                images.push(dir.join(format!("device{}", number + 1)));
                medium.save(&images[number])?;
            }
            // `btrfs check` counts the new device of a replacement as one too many.
            btrfs_check_array(&images)?;
            let last = if self.is_changing { last_replacement(&members)? } else { None };
            let is_replacing = last.as_ref().is_some_and(DevReplaceItem::is_unfinished);
            let new = cut.undamaged().into_iter().filter(|medium| is_replacing && is_target(medium));
            let new = new.max_by_key(|medium| primary(medium).map(|superblock| superblock.generation));
            if let Some(medium) = &new {
                images.push(dir.join("new"));
                medium.save(&dir.join("new"))?;
            }
            let is_lost = cut.fates.iter().any(|fate| *fate != Fate::Kept) || (is_replacing && new.is_none());
            let options = if is_lost { "degraded" } else { "" };
            if self.is_changing {
                forget_unmounted_devices()?;
            }
            let (has_balance, is_mixed) = if self.is_changing { conversion_on(&members)? } else { (false, false) };
            let mount = match LoopMount::array(&images, options) {
                // While metadata has two profiles, Linux may find no room for a log replay on these small devices.
                Err(error) if is_mixed && format!("{error:#}").contains("No space left") => {
                    return Ok(false);
                }
                other => other?,
            };
            // Linux would go on with one of both, and with the other one at the next mount.
            ensure!(new.is_none() || !has_balance, "A8: a replacement and a balance were begun beside each other");
            if new.is_some() {
                let is_finished = await_replacement(&mount)?;
                self.nr_resumed_by_linux.fetch_add(is_finished.into(), Ordering::Relaxed);
            } else if is_replacing {
                // Linux does not scrub beside a suspended replacement.
                run("btrfs", ["replace".as_ref(), "cancel".as_ref(), mount.path().as_os_str()])?;
            }
            if await_balance(&mount)? {
                self.nr_converted_by_linux.fetch_add(1, Ordering::Relaxed);
            }
            let found = walk_path(mount.path()).with_context(|| mount.kernel_log())?;
            let read = |path: &[u8]| Ok(std::fs::read(mount.path().join(OsStr::from_bytes(path)))?);
            self.record.verify(&found, &read, &cut.lanes)?;
            if cut.has_one_log() {
                compare_entries(ours, &found, Compare { root: false, ..Compare::ALL })
                    .context("our replay (first) and Linux's (second) differ")?;
            }
            // A commit writes the superblocks that the cut left old. Scrub reports them otherwise.
            std::fs::write(mount.join("new"), b"new").with_context(|| mount.kernel_log())?;
            run("sync", ["-f".as_ref(), mount.path().as_os_str()])?;
            mount.scrub()?;
            let mut complaints = mount.kernel_complaints();
            complaints.retain(|line| !(line.contains("balance: ") && line.contains(" has lower redundancy than ")));
            // If a replacement avoids its source, Linux also tries to read from the lost device, and counts that.
            if is_lost && last.is_some_and(|item| item.cont_reading_from_srcdev_mode != 0) {
                complaints.retain(|line| !line.contains("scrub: fixed up error") && !line.contains(" errs: wr 0, rd "));
            }
            if is_lost {
                // Linux does not go on with a conversion to a profile for which devices are missing.
                complaints.retain(|line| !line.contains("balance: invalid convert "));
            }
            if new.is_some() {
                complaints
                    .retain(|line| !line.contains(REPLACEMENT_WITHOUT_ROOM) && !line.contains("btrfs_scrub_dev("));
            }
            ensure!(complaints.is_empty(), "Linux complains:\n{}", complaints.join("\n"));
            mount.close()?;
            // Linux has wiped the device that was replaced.
            images.retain(|image| {
                let mut magic = [0; MAGIC.len()];
                let file = std::fs::File::open(image);
                file.and_then(|file| file.read_exact_at(&mut magic, SUPERBLOCK_OFFSETS[0] + MAGIC_OFFSET as u64))
                    .is_ok()
                    && magic == MAGIC
            });
            btrfs_check_array(&images).context("after the replay")?;
            Ok(true)
        };
        judge().with_context(|| format!("A3: {}", cut.what))
    }

    /// The media that belong to the filesystem now (A5).
    fn members_of(&self, mut media: Vec<Medium>) -> Result<Vec<Medium>> {
        if !self.is_changing {
            return Ok(media);
        }
        media.retain(has_superblock);
        // Of a device and its replacement, the newer one counts.
        let devid = |medium: &Medium| primary(medium).map_or(0, |superblock| superblock.dev_item.devid.0);
        media.sort_by_key(|medium| (devid(medium), std::cmp::Reverse(generation_of(medium))));
        media.dedup_by_key(|medium| devid(medium));
        let device = |medium: &Medium| Arc::new(MediumDevice::new(medium.clone())) as Arc<dyn Device>;
        let options = MountOptions { read_only: true, nologreplay: true, ..MountOptions::default() };
        let target = FsTarget::on_devices(media.iter().map(device).collect(), options)?;
        let members = target.fs().space_usage().devices;
        media.retain(|medium| members.iter().any(|member| member.devid.0 == devid(medium)));
        // `btrfs check` takes the sizes from the first one.
        media.sort_by_key(|medium| std::cmp::Reverse(generation_of(medium)));
        Ok(media)
    }

    /// Numbers of replacements that went on after a cut, by us and by Linux (A6).
    pub fn nr_resumed(&self) -> (u64, u64) {
        (self.nr_resumed.load(Ordering::Relaxed), self.nr_resumed_by_linux.load(Ordering::Relaxed))
    }

    /// Numbers of conversions that went on after a cut, by us and by Linux (A8).
    pub fn nr_converted(&self) -> (u64, u64) {
        (self.nr_converted.load(Ordering::Relaxed), self.nr_converted_by_linux.load(Ordering::Relaxed))
    }

    /// Lists the steps of each lane, with the number of the state after each step.
    pub fn trace(&self) -> String {
        let lanes = self.record.steps.iter().enumerate();
        lanes.map(|(lane, steps)| format!("lane {lane}\n  {}\n", steps.join("\n  "))).collect()
    }
}

impl ArrayCut {
    /// The contents of the devices that the cut left undamaged.
    fn undamaged(&self) -> Vec<Medium> {
        let is_kept = |(fate, medium): (&Fate, &Medium)| (*fate == Fate::Kept).then(|| medium.clone());
        self.fates.iter().zip(&self.media).filter_map(is_kept).collect()
    }

    /// Whether the newest superblocks of all devices but the lost ones have the same log, and an undamaged device has one
    /// of them. Linux gets the undamaged devices only.
    fn has_one_log(&self) -> bool {
        let newest_of = |media: &mut dyn Iterator<Item = &Medium>| {
            let found: Vec<Superblock> = media.filter_map(primary).collect();
            let newest = found.iter().map(|superblock| superblock.generation).max();
            let is_newest = |superblock: &&Superblock| Some(superblock.generation) == newest;
            let logs: BTreeSet<u64> = found.iter().filter(is_newest).map(|superblock| superblock.log_root.0).collect();
            (newest, logs)
        };
        let mut given =
            self.fates.iter().zip(&self.media).filter(|(fate, _)| **fate != Fate::Lost).map(|(_, medium)| medium);
        let (newest, logs) = newest_of(&mut given);
        logs.len() == 1 && newest == newest_of(&mut self.undamaged().iter()).0
    }

    /// The devices, except those that are lost.
    fn devices(&self) -> Vec<Option<Arc<MediumDevice>>> {
        let device = |(fate, medium): (&Fate, &Medium)| {
            (*fate != Fate::Lost).then(|| Arc::new(MediumDevice::new(medium.clone())))
        };
        self.fates.iter().zip(&self.media).map(device).collect()
    }

    /// Saves the undamaged devices to images in this folder.
    pub fn save(&self, dir: &Path) -> Result<Vec<std::path::PathBuf>> {
        let mut images = Vec::new();
        for (index, (fate, medium)) in self.fates.iter().zip(&self.media).enumerate() {
            if *fate == Fate::Kept && has_superblock(medium) {
                let image = dir.join(format!("device{}", index + 1));
                medium.save(&image)?;
                images.push(image);
            }
        }
        Ok(images)
    }
}

/// The generation of the primary superblock on a medium.
fn generation_of(medium: &Medium) -> u64 {
    primary(medium).map_or(0, |superblock| superblock.generation.0)
}

/// Whether a medium is the new device of a replacement.
fn is_target(medium: &Medium) -> bool {
    has_superblock(medium) && primary(medium).is_some_and(|superblock| superblock.is_replacement_target())
}

/// Whether the last replacement is complete.
fn is_replaced(fs: &Fs) -> Result<bool> {
    Ok(fs.last_replacement()?.is_some_and(|item| item.replace_state == DevReplaceItem::FINISHED))
}

/// The record of the last replacement in the trees on these devices.
fn last_replacement(media: &[Medium]) -> Result<Option<DevReplaceItem>> {
    let device = |medium: &Medium| Arc::new(MediumDevice::new(medium.clone())) as Arc<dyn Device>;
    let options = MountOptions { read_only: true, nologreplay: true, ..MountOptions::default() };
    let target = FsTarget::on_devices(media.iter().map(device).collect(), options)?;
    Ok(target.fs().last_replacement()?)
}

/// Whether a conversion runs or is paused in the trees on these devices, and whether metadata has several profiles.
fn conversion_on(media: &[Medium]) -> Result<(bool, bool)> {
    let device = |medium: &Medium| Arc::new(MediumDevice::new(medium.clone())) as Arc<dyn Device>;
    let options = MountOptions { read_only: true, nologreplay: true, ..MountOptions::default() };
    let target = FsTarget::on_devices(media.iter().map(device).collect(), options)?;
    let groups = target.fs().block_groups();
    let profiles = groups.iter().filter(|group| group.flags.contains(BlockGroupFlags::METADATA));
    let profiles: BTreeSet<u64> = profiles.map(|group| (group.flags & BlockGroupFlags::PROFILES).bits()).collect();
    let has_balance = target.fs().balance_status().is_some();
    Ok((has_balance, has_balance || profiles.len() > 1))
}

/// Linux's message if it has no room to go on with a replacement.
const REPLACEMENT_WITHOUT_ROOM: &str = "scrub: failed setting block group ro: -28";

/// Waits until Linux has gone on with a replacement to its end. Returns false if Linux has cancelled it, because the only
/// block group of a kind has to be copied, and no other one fits.
fn await_replacement(mount: &LoopMount) -> Result<bool> {
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        let path = mount.path().to_string_lossy();
        let status = run("btrfs", ["replace", "status", "-1", path.as_ref()])?;
        let is_finished = status.contains("finished on");
        if is_finished || (status.contains("canceled on") && mount.kernel_log().contains(REPLACEMENT_WITHOUT_ROOM)) {
            // Linux says so a moment before one of both devices is gone, and refuses to scrub it.
            std::thread::sleep(Duration::from_millis(300));
            return Ok(is_finished);
        }
        ensure!(status.contains("% done") && Instant::now() < until, "A6: Linux does not go on: {status}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until Linux has ended a balance that it resumed. Returns false if there was none.
fn await_balance(mount: &LoopMount) -> Result<bool> {
    let until = Instant::now() + Duration::from_secs(120);
    let mut was_there = false;
    loop {
        let status = std::process::Command::new("btrfs").args(["balance", "status"]).arg(mount.path()).output()?;
        let status = String::from_utf8_lossy(&status.stdout).into_owned();
        if status.contains("No balance found") {
            return Ok(was_there);
        }
        was_there = true;
        ensure!(Instant::now() < until, "A8: Linux does not end the balance: {status}");
        if status.contains("is paused") {
            // Linux does not resume it beside a replacement. It may have begun or ended just now.
            let cancel = std::process::Command::new("btrfs").args(["balance", "cancel"]).arg(mount.path()).output()?;
            if cancel.status.success() {
                return Ok(false);
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a medium has a primary superblock.
fn has_superblock(medium: &Medium) -> bool {
    primary(medium).is_some_and(|superblock| superblock.magic == MAGIC)
}

/// The primary superblock on a medium.
fn primary(medium: &Medium) -> Option<Superblock> {
    let mut raw = vec![0; SUPERBLOCK_SIZE];
    medium.read(SUPERBLOCK_OFFSETS[0], &mut raw);
    Superblock::decode(&raw).ok()
}

/// Generation, root and number of the log in the primary superblock, for messages.
fn primary_of(medium: &Medium) -> String {
    primary(medium).map_or_else(
        || "no superblock".to_owned(),
        |superblock| {
            format!("{} log {} number {}", superblock.generation, superblock.log_root, superblock.log_root_transid)
        },
    )
}

/// A scenario with free space, and without a file that a single device refuses.
pub(super) fn scenario(seed: u64) -> Scenario {
    let kinds = [0, 1, 2, 6, 7];
    let kind = kinds[(seed / ArrayCuts::KINDS) as usize % kinds.len()];
    let mut scenario = Scenario::of(seed / kinds.len() as u64 * Scenario::KINDS + kind);
    (scenario.len_bytes, scenario.free) = (256 << 20, None);
    if scenario.lanes.is_empty() {
        scenario.lanes = vec![Work::Busy { steps: 70 }];
    }
    scenario
}

/// Whether the engine opens the array of a scenario for writing.
pub(super) fn can_write(scenario: &Scenario) -> Result<bool> {
    let device = |_| Arc::new(MediumDevice::new(Medium::zeros(scenario.len_bytes)));
    let devices: Vec<Arc<MediumDevice>> = (0..scenario.nr_devices).map(device).collect();
    let refs: Vec<&dyn Device> = devices.iter().map(|device| &**device as &dyn Device).collect();
    ubtrfs_mkfs::make_array(&refs, &scenario.mkfs)?;
    let shared = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
    let target = FsTarget::on_devices(shared, MountOptions::default())?;
    let is_writable = target.fs().read_only().is_none();
    target.close()?;
    Ok(is_writable)
}

/// Fails with the problems that `ubtrfs-check` finds, except missing devices. If `stale` is set, also ignores devices that
/// are not up to date, and their bad copies.
pub(super) fn check(media: &[Medium], stale: bool) -> Result<()> {
    check_except(media, stale, None)
}

/// Works like [`check`], but ignores bad copies on the device `bad`, too.
pub(super) fn check_except(media: &[Medium], stale: bool, bad: Option<u64>) -> Result<()> {
    let device = |medium: &Medium| Arc::new(MediumDevice::new(medium.clone())) as Arc<dyn Device>;
    let options = Options { data_csums: true, ..Options::default() };
    let mut problems = Vec::new();
    let mut stale_devices: Vec<String> = bad.iter().map(u64::to_string).collect();
    let report = ubtrfs_check::check(media.iter().map(device).collect(), options, &(), &mut |problem| {
        // A cut between the superblocks of two devices leaves an old one.
        let mut is_expected = matches!(problem.code, Code::DeviceMissing | Code::SuperMirror);
        if stale && problem.code == Code::DeviceStale {
            // "... is device N of generation ..."
            stale_devices.extend(
                problem.text.split(" is device ").nth(1).and_then(|rest| rest.split(' ').next()).map(str::to_owned),
            );
            is_expected = true;
        }
        let is_copy = matches!(problem.code, Code::BlockCopy | Code::DataCsum | Code::DataRead);
        is_expected |=
            is_copy && stale_devices.iter().any(|devid| problem.text.contains(&format!(" on device {devid}:")));
        if !is_expected && (problem.code.is_error() || problem.code == Code::Qgroup) {
            problems.push(problem.to_string());
        }
    })?;
    problems.truncate(10);
    ensure!(report.complete && problems.is_empty(), "check: {:?}\n{}", report.counts, problems.join("\n"));
    Ok(())
}
