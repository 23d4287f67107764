//! Scrubs of a mounted or open filesystem: several devices at once, with counts that others can see.
//!
//! ```text
//! none --scrub--> running --all its devices are done, cancel_scrub, a failure--> none
//! ```
//!
//! Invariants:
//! - I1. At most one scrub runs on a device. It ends before the filesystem closes, because its caller holds the
//!   filesystem.
//! - I2. Bad data is told once for each file, with the bytes that were repaired and the bytes that are lost.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use parking_lot::Mutex;
use ubtrfs_device::IoPriority;
use ubtrfs_error::{Error as EngineError, side_by_side};
use ubtrfs_format::{DevId, Profile};
use ubtrfs_transaction::{DeviceScrub, ExtentUse, Job, ScrubCounts, ScrubFinding, ScrubRequest};

use crate::watched_job::watched;
use crate::{Error, Fs, InodeId, Result};

/// A device that is to be scrubbed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubStart {
    /// The device.
    pub devid: DevId,
    /// Where the scrub begins on the device; not 0 if an earlier scrub is continued.
    pub start: u64,
    /// The highest rate in bytes per second; 0 means no limit.
    pub limit: u64,
    /// The I/O priority of the scrub's threads; `None` means that of the calling thread.
    pub io_priority: Option<IoPriority>,
}

/// How the scrub of a device ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScrubEnd {
    /// Everything was checked.
    Finished,
    /// It was cancelled.
    Cancelled,
    /// It stopped for this reason: the device failed or is missing, or a tree cannot be read.
    Failed(String),
}

/// The end of the scrub of a device.
#[derive(Debug)]
pub struct ScrubbedDevice {
    /// The device.
    pub devid: DevId,
    /// Its counts.
    pub counts: ScrubCounts,
    /// Whether everything was checked, or the scrub was cancelled, or failed.
    pub result: Result<()>,
}

/// Bad content of a file, or of tree blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    /// Bytes that were repaired from a good copy or, if nothing is repaired, that have a good copy.
    pub repaired_bytes: u64,
    /// Bytes without a good copy.
    pub lost_bytes: u64,
}

/// Files with bad data, and their paths from the top level if they have one.
pub type FileDamages = Vec<(InodeId, Option<Vec<u8>>, Damage)>;

/// The result of a scrub.
#[derive(Debug, Default)]
pub struct ScrubReport {
    /// The devices.
    pub devices: Vec<ScrubbedDevice>,
    /// Files with bad data (I2), and their paths from the top level if they have one; at most [`FILES_MAX`].
    pub files: FileDamages,
    /// Bad tree blocks.
    pub blocks: Damage,
}

/// A device of a running scrub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrubStatus {
    /// The device.
    pub devid: DevId,
    /// The counts so far.
    pub counts: ScrubCounts,
    /// The highest rate in bytes per second; 0 means no limit.
    pub limit: u64,
    /// The end of the scrub of this device; `None` while it runs.
    pub end: Option<ScrubEnd>,
}

/// The devices of a running scrub.
pub(crate) type RunningScrub = Vec<RunningDevice>;

/// A device of a running scrub.
#[derive(Debug)]
pub(crate) struct RunningDevice {
    start: ScrubStart,
    scrub: DeviceScrub,
    /// Set when this device is done, perhaps long before the others.
    end: OnceLock<ScrubEnd>,
}

/// The bad content that a scrub or replacement has found so far.
#[derive(Default)]
pub(crate) struct Findings {
    pub(crate) files: BTreeMap<InodeId, (Option<Vec<u8>>, Damage)>,
    pub(crate) blocks: Damage,
    /// Addresses of lost content that was told already, for another copy.
    lost: BTreeSet<u64>,
}

impl Damage {
    fn add(&mut self, finding: &ScrubFinding) {
        let bytes = if finding.has_good_copy { &mut self.repaired_bytes } else { &mut self.lost_bytes };
        *bytes = bytes.saturating_add(finding.len_bytes);
    }
}

impl Fs {
    /// Scrubs devices, all at once: reads everything that they have, and repairs what is bad if `repair` is set and the
    /// filesystem is writable. `job` gets the bytes on the devices.
    ///
    /// # Errors
    ///
    /// [`Error::InProgress`] if a scrub of a device runs; [`Error::InvalidArgument`] if no device is given, or if a
    /// device is unknown, missing or failed; [`Error::NotSupported`] if there is a block group with parity. The failure
    /// of a device is in the report.
    pub fn scrub(&self, starts: &[ScrubStart], repair: bool, job: &Job) -> Result<ScrubReport> {
        let devices = self.engine.devices();
        let is_usable = |start: &ScrubStart| {
            let found = devices.iter().find(|device| device.devid == start.devid);
            found.is_some_and(|device| device.state.is_usable())
        };
        if starts.is_empty() || !starts.iter().all(is_usable) {
            return Err(Error::InvalidArgument("there is no such device, or it is missing or failed"));
        }
        if self.block_groups().iter().any(|group| Profile::of(group.flags).is_some_and(Profile::has_parity)) {
            return Err(Error::NotSupported("a scrub of RAID5 and RAID6; Linux can scrub the filesystem"));
        }
        let device = |start: &ScrubStart| {
            let scrub = DeviceScrub::new();
            scrub.set_limit(start.limit);
            RunningDevice { start: *start, scrub, end: OnceLock::new() }
        };
        let running = self.scrubs.begin_beside(starts.iter().map(device).collect(), |others: &RunningScrub| {
            let is_same = |other: &ScrubStart| starts.iter().any(|start| start.devid == other.devid);
            match others.iter().any(|other| is_same(&other.start)) {
                true => Err(Error::InProgress("a scrub is running")),
                false => Ok(()),
            }
        })?;
        let findings = Mutex::new(Findings::default());
        let found = |finding: ScrubFinding| self.note_finding("scrub", &finding, repair, &findings);
        let total = starts.iter().map(|start| self.engine.scrub_bytes(start.devid, start.start));
        running.job.add_total(total.fold(0, u64::saturating_add));
        // Runs on a thread of its own, whose priority the other threads of the device inherit.
        let scrub_one = |RunningDevice { start, scrub, end }: &RunningDevice| {
            let request = ScrubRequest { devid: start.devid, start: start.start, repair };
            let result = set_priority(start.io_priority)
                .and_then(|()| Ok(self.engine.scrub_device(&request, scrub, &running.job, &found)?));
            let device = ScrubbedDevice { devid: start.devid, counts: scrub.counts(), result };
            end.get_or_init(|| device.end());
            device
        };
        let devices = watched(&running.job, job, || {
            let scrub_one = &scrub_one;
            side_by_side(running.about.iter().map(|device| move || scrub_one(device)))
        });
        drop(running);
        let Findings { files, blocks, .. } = findings.into_inner();
        let files = files.into_iter().map(|(id, (path, damage))| (id, path, damage)).collect();
        Ok(ScrubReport { devices, files, blocks })
    }

    /// The devices of the running scrubs, also those that are done while others are not.
    pub fn scrub_status(&self) -> Vec<ScrubStatus> {
        let running = self.scrubs.running();
        let status = |RunningDevice { start, scrub, end }: &RunningDevice| ScrubStatus {
            devid: start.devid,
            counts: scrub.counts(),
            limit: scrub.limit(),
            end: end.get().cloned(),
        };
        running.iter().flat_map(|running| running.about.iter().map(status)).collect()
    }

    /// Sets the highest rate of a running scrub, of one device or of all; 0 means no limit.
    ///
    /// # Errors
    ///
    /// [`Error::NotRunning`] if no scrub of the device runs.
    pub fn limit_scrub(&self, devid: Option<DevId>, bytes_per_sec: u64) -> Result<()> {
        let running = self.scrubs.running();
        let devices = running.iter().flat_map(|running| &running.about);
        let mut chosen = devices.filter(|device| devid.is_none_or(|devid| devid == device.start.devid)).peekable();
        if chosen.peek().is_none() {
            let of_others = "no scrub of this device is running";
            return Err(Error::NotRunning(if !running.is_empty() { of_others } else { "no scrub is running" }));
        }
        chosen.for_each(|device| device.scrub.set_limit(bytes_per_sec));
        Ok(())
    }

    /// Cancels the running scrubs, and waits for their end.
    ///
    /// # Errors
    ///
    /// [`Error::NotRunning`] if no scrub runs.
    pub fn cancel_scrub(&self) -> Result<()> {
        if self.scrubs.cancel() { Ok(()) } else { Err(Error::NotRunning("no scrub is running")) }
    }

    /// Logs a finding, and notes the files that it concerns (I2).
    pub(crate) fn note_finding(
        &self,
        work: &'static str,
        finding: &ScrubFinding,
        repair: bool,
        findings: &Mutex<Findings>,
    ) {
        let ScrubFinding { devid, physical, bytenr, len_bytes, .. } = finding;
        let cause = finding.cause.as_ref().map_or_else(|| "cannot be read".to_owned(), ToString::to_string);
        let outcome = match (finding.has_good_copy, repair && self.context.read_only().is_none()) {
            (true, true) => "repaired",
            (true, false) => "another copy is good",
            (false, _) => "no copy is good",
        };
        let what = if finding.is_tree { "tree block" } else { "data" };
        tracing::warn!(
            "{work}: device {devid}, offset {physical}: {len_bytes} bytes of {what} at {bytenr}: {cause}; {outcome}"
        );
        // Each copy of lost content is a finding.
        if !finding.has_good_copy && !findings.lock().lost.insert(bytenr.0) {
            return;
        }
        if finding.is_tree {
            findings.lock().blocks.add(finding);
            return;
        }
        // The file is unknown if its extent was freed meanwhile, or if the trees cannot tell.
        let Ok(Some((offset, uses))) = self.uses_of_address(*bytenr, true, USES_MAX) else { return };
        let is_bad = |file: &&ExtentUse| {
            let end = file.extent_offset.saturating_add(file.len_bytes);
            file.compressed || (file.extent_offset < offset.saturating_add(*len_bytes) && offset < end)
        };
        for file in uses.iter().filter(is_bad) {
            let id = InodeId { root: file.root, ino: file.ino };
            let is_known = findings.lock().files.contains_key(&id);
            // A deleted file that is still open has no name.
            let path = if is_known { None } else { self.path_of(id).ok().filter(|path| !path.is_empty()) };
            let mut findings = findings.lock();
            if findings.files.len() < FILES_MAX || is_known {
                findings.files.entry(id).or_insert((path, Damage::default())).1.add(finding);
            }
        }
    }
}

impl ScrubbedDevice {
    /// Whether the scrub was cancelled.
    pub fn is_cancelled(&self) -> bool {
        matches!(self.result, Err(Error::Engine(EngineError::Cancelled)))
    }

    fn end(&self) -> ScrubEnd {
        match &self.result {
            Ok(()) => ScrubEnd::Finished,
            Err(_) if self.is_cancelled() => ScrubEnd::Cancelled,
            Err(error) => ScrubEnd::Failed(error.to_string()),
        }
    }
}

fn set_priority(priority: Option<IoPriority>) -> Result<()> {
    let Some(priority) = priority else { return Ok(()) };
    priority.set_for_this_thread().map_err(|error| {
        Error::Engine(EngineError::Refused {
            what: format!("the I/O priority of the scrub cannot be set: {error}"),
            hint: "choose another class and level (-c, -n), or leave them out",
        })
    })
}

/// The largest number of damaged files that a report names.
pub const FILES_MAX: usize = 1000;
/// The largest number of users of a bad extent that are looked up.
const USES_MAX: usize = 100;
