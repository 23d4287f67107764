//! Replacing a device, with a state that others can see.
//!
//! ```text
//! none --replace_device--> running --the new device is in place, cancel_replace, a failure--> none
//! ```

use parking_lot::Mutex;
use ubtrfs_format::DevId;
use ubtrfs_format::item::DevReplaceItem;
use ubtrfs_transaction::{DeviceScrub, Job, ReplaceRequest, ScrubCounts, ScrubFinding};

use crate::devices::scrub::{FileDamages, Findings};
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
pub(crate) type RunningReplace = (DevId, DeviceScrub);

impl Fs {
    /// Copies a device to a new one, which then takes its place; the old one leaves the filesystem. What is bad comes from
    /// other devices. `job` counts bytes of the old device. The change is durable on return.
    ///
    /// # Errors
    ///
    /// [`Error::InProgress`] if a replacement runs; and as for [`ubtrfs_transaction::Engine::replace_device`]. After an error, the old device is in its place.
    pub fn replace_device(&self, request: &ReplaceRequest, job: &Job) -> Result<ReplaceReport> {
        self.context.check_mounted_writable()?;
        let one_alone = |_: &RunningReplace| Err(Error::InProgress(REPLACE_RUNS));
        let running = self.replaces.begin_beside((request.devid, DeviceScrub::new()), one_alone)?;
        let (_, scrub) = &running.about;
        let findings = Mutex::new(Findings::default());
        let found = |finding: ScrubFinding| self.note_finding("replace", &finding, false, &findings);
        watched(&running.job, job, || self.engine.replace_device(request, scrub, &running.job, &found))?;
        let counts = scrub.counts();
        let Findings { files, blocks, .. } = findings.into_inner();
        let files = files.into_iter().map(|(id, (path, damage))| (id, path, damage)).collect();
        Ok(ReplaceReport { counts, files, lost_block_bytes: blocks.lost_bytes })
    }

    /// The replacement that runs, if there is one.
    pub fn replace_status(&self) -> Option<ReplaceStatus> {
        let running = self.replaces.running().into_iter().next()?;
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

    /// Cancels all replacements that run or wait, and returns after they have ended.
    ///
    /// # Errors
    ///
    /// [`Error::NotRunning`] if there is none.
    pub fn cancel_replace(&self) -> Result<()> {
        if self.replaces.cancel() { Ok(()) } else { Err(Error::NotRunning("no device is being replaced")) }
    }
}
