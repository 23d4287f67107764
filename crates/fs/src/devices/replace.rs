//! Replacing a device, with a state that others can see.
//!
//! ```text
//! none --replace_device--> running --the new device is in place, cancel_replace, a failure--> none
//!                           ^   |
//!              the next open|   | suspend_replace, close
//!                           |   v
//!                         suspended --cancel_replace--> none
//! ```

use std::sync::Arc;

use parking_lot::Mutex;
use ubtrfs_format::DevId;
use ubtrfs_format::item::DevReplaceItem;
use ubtrfs_transaction::{DeviceScrub, Job, ReplaceRequest, ScrubCounts, ScrubFinding, SuspendedReplacement};

use crate::devices::exclusive::ExclusiveOperations;
use crate::devices::jobs::{ActiveJob, DeviceJobs};
use crate::devices::scrub::{FileDamages, Findings};
use crate::service_threads::ServiceThreads;
use crate::watched_job::watched;
use crate::{Error, Fs, Result};

/// The result of a replacement.
#[derive(Debug, Default)]
pub struct ReplaceReport {
    /// Counts of the content that was read, and of the errors.
    pub counts: ScrubCounts,
    /// The files with data that has no good copy: as in [`crate::ScrubReport`].
    pub files: FileDamages,
    /// Bytes of tree blocks without a good copy.
    pub lost_block_bytes: u64,
}

/// A replacement that is running.
#[derive(Clone, Debug)]
pub struct ReplaceStatus {
    /// The device that is replaced.
    pub devid: DevId,
    /// Bytes that were copied, and all bytes.
    pub done_bytes: (u64, u64),
    /// The counts so far.
    pub counts: ScrubCounts,
}

/// The refusal of a second replacement.
pub const REPLACE_RUNS: &str = "a device is being replaced already; see: ubtrfs replace status";

/// A replacement that runs or waits: the device that is replaced, and counts of the content that was read.
pub(crate) type RunningReplace = (DevId, Arc<DeviceScrub>);

/// The replacements of devices, and the thread that continues the replacement of an earlier session.
#[derive(Debug)]
pub(crate) struct Replaces {
    jobs: Arc<DeviceJobs<RunningReplace>>,
    thread: ServiceThreads,
    exclusive: Arc<ExclusiveOperations>,
}

impl Default for Replaces {
    fn default() -> Self {
        let jobs = Arc::default();
        let exclusive = Arc::new(ExclusiveOperations::new(Arc::clone(&jobs)));
        Self { jobs, thread: ServiceThreads::default(), exclusive }
    }
}

impl Replaces {
    /// The rule that a balance and a replacement exclude each other.
    pub(crate) fn exclusive(&self) -> Arc<ExclusiveOperations> {
        Arc::clone(&self.exclusive)
    }

    /// Begins a replacement on the calling thread, if no other one runs and there is no balance.
    fn begin(&self, devid: DevId) -> Result<ActiveJob<&DeviceJobs<RunningReplace>, RunningReplace>> {
        let one_alone = |_: &RunningReplace| Err(Error::InProgress(REPLACE_RUNS));
        let about = (devid, Arc::new(DeviceScrub::new()));
        self.exclusive.begin_replacement(|| self.jobs.begin_beside(about, one_alone))
    }

    /// Continues a suspended replacement in the background. The thread holds the filesystem only after the replacement,
    /// to name the files with bad content. So dropping the last handle closes the filesystem.
    pub(crate) fn start(&self, fs: &Arc<Fs>) {
        let Some(SuspendedReplacement { item, has_target: true }) = fs.engine.suspended_replacement() else { return };
        let (jobs, engine, fs) = (Arc::clone(&self.jobs), Arc::clone(&fs.engine), Arc::downgrade(fs));
        let begun = Arc::new(Mutex::new(Some(jobs.begin_shared((item.src_devid, Arc::default())))));
        self.thread.start("ubtrfs-replace", 1, move || {
            let Some(running) = begun.lock().take() else { return };
            let found = Mutex::new(Vec::new());
            let keep = |finding: ScrubFinding| {
                let mut found = found.lock();
                if found.len() < FINDINGS_MAX {
                    found.push(finding);
                }
            };
            tracing::info!("the replacement of device {} goes on", item.src_devid);
            let done = engine.resume_replacement(&running.about.1, &running.job, &keep);
            drop(running);
            let Some(fs) = fs.upgrade() else { return };
            let findings = Mutex::new(Findings::default());
            found.lock().iter().for_each(|finding| fs.note_finding("replace", finding, false, &findings));
            match done {
                Ok(_) => tracing::info!("device {} is replaced", item.src_devid),
                Err(error) => tracing::warn!("device {} is not replaced: {error}", item.src_devid),
            }
        });
    }

    /// Ends running replacements; the next session continues them.
    fn suspend(&self) {
        self.jobs.cancel();
        self.thread.join();
    }
}

/// Bad ranges that are kept until their files are named.
const FINDINGS_MAX: usize = 10_000;

impl Fs {
    /// Copies a device to a new device, which then takes its place; the old device leaves the filesystem. Content that
    /// is bad on the old device comes from other devices. `job` counts bytes of the old device. The change is durable
    /// on return.
    ///
    /// # Errors
    ///
    /// [`Error::InProgress`] if a replacement runs, or if a balance runs or is paused; and as for [`ubtrfs_transaction::Engine::replace_device`]. After an
    /// error, the old device is in its place.
    pub fn replace_device(&self, request: &ReplaceRequest, job: &Job) -> Result<ReplaceReport> {
        self.context.check_mounted_writable()?;
        let running = self.replaces.begin(request.devid)?;
        let (_, scrub) = &running.about;
        let findings = Mutex::new(Findings::default());
        let found = |finding: ScrubFinding| self.note_finding("replace", &finding, false, &findings);
        watched(&running.job, job, || self.engine.replace_device(request, scrub, &running.job, &found))?;
        let counts = scrub.counts();
        let Findings { files, blocks, .. } = findings.into_inner();
        let files = files.into_iter().map(|(id, (path, damage))| (id, path, damage)).collect();
        Ok(ReplaceReport { counts, files, lost_block_bytes: blocks.lost_bytes })
    }

    /// Fails if a replacement cannot begin now, because another one runs, or because a balance runs or is paused.
    ///
    /// # Errors
    ///
    /// [`Error::InProgress`], as for [`Fs::replace_device`].
    pub fn check_replace_can_begin(&self, devid: DevId) -> Result<()> {
        self.replaces.begin(devid).map(drop)
    }

    /// The replacement that runs, if there is one.
    pub fn replace_status(&self) -> Option<ReplaceStatus> {
        let running = self.replaces.jobs.running().into_iter().next()?;
        let progress = running.job.progress();
        let (devid, scrub) = &running.about;
        Some(ReplaceStatus { devid: *devid, done_bytes: (progress.done, progress.total), counts: scrub.counts() })
    }

    /// The filesystem's note about its last replacement, by ubtrfs or Linux.
    ///
    /// # Errors
    ///
    /// As for [`ubtrfs_transaction::Engine::last_replacement`].
    pub fn last_replacement(&self) -> Result<Option<DevReplaceItem>> {
        Ok(self.engine.last_replacement()?)
    }

    /// Cancels all replacements that run, wait or are suspended, and returns after they have ended.
    ///
    /// # Errors
    ///
    /// [`Error::NotRunning`] if there is no replacement; the failure of a commit.
    pub fn cancel_replace(&self) -> Result<()> {
        self.context.check_mounted_writable()?;
        let has_run = self.replaces.jobs.cancel();
        // One that was cancelled before it went on is still suspended.
        let was_suspended = self.engine.cancel_suspended_replacement(&Job::new())?;
        if has_run || was_suspended { Ok(()) } else { Err(Error::NotRunning("no device is being replaced")) }
    }

    /// The replacement that is suspended, because its new device is missing.
    pub fn suspended_replacement(&self) -> Option<SuspendedReplacement> {
        self.engine.suspended_replacement()
    }

    /// Ends running replacements, and keeps their state: the next session continues them.
    pub fn suspend_replace(&self) {
        self.engine.suspend_replacement();
        self.replaces.suspend();
    }

    /// Sets the highest rate in bytes per second of the replacement that runs; 0 means no limit. Does nothing if no
    /// replacement runs.
    pub fn limit_replace(&self, bytes_per_sec: u64) {
        self.replaces.jobs.running().iter().for_each(|running| running.about.1.set_limit(bytes_per_sec));
    }

    /// Waits until no replacement that an earlier session began runs any more.
    pub fn wait_for_replace(&self) {
        self.replaces.thread.join();
    }
}
