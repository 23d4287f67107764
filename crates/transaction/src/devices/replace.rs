//! Replacing devices, including missing devices.
//!
//! The new device becomes the twin of the old device ([`ubtrfs_volumes::Volumes::begin_twin`]): it gets every write to
//! the old device. Meanwhile a walk reads the old device as a scrub does ([`super::scrub`]) and copies its content.
//! Content that is bad there comes from other devices. Then a commit puts the new device in the place of the old one,
//! with the old device id and UUID, so no chunk changes. After that, the superblocks of the old device are wiped.
//!
//! For Linux, each commit stores the progress of the walk ([`crate::extents::replacing`]). After an interruption, the
//! new device is the twin again, and the walk begins anew.
//!
//! Invariants:
//! - P1. Everything that was written before the new device became the twin is copied. The walk copies all allocated
//!   bytes, including bytes that no tree describes yet: the items of data are put after the data is written, and the
//!   walk may have passed the data by then.
//! - P2. Until the commit that ends the replacement, the old device is complete, and an interruption leaves it in its
//!   place.
//! - P3. A resumed replacement trusts nothing that an earlier session or Linux has copied. When Linux (6.18) suspends a
//!   replacement, the cursor that it stores may lie beyond what it has copied.

use std::sync::Arc;
use std::time::Duration;

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{DevReplaceItem, Timespec};
use ubtrfs_format::{DevId, Key, KeyType, RootId};
use ubtrfs_volumes::{GivenUpTwin, no_device};

use crate::devices::add::check_can_be_written;
use crate::devices::scrub::{DeviceScrub, ScrubCounts, ScrubFinding};
use crate::engine::Engine;
use crate::extents::device_items::DeviceChange;
use crate::extents::replacing::{CopyProgress, SuspendedReplacement};
use crate::job::Job;

/// A request to replace a device.
#[derive(Clone, Debug)]
pub struct ReplaceRequest {
    /// The device that is replaced.
    pub devid: DevId,
    /// The new device. Everything on it is lost.
    pub device: Arc<dyn Device>,
    /// Whether the old device is read only where no other copy is good.
    pub avoids_source: bool,
}

impl Engine {
    /// Replaces a device. `found` gets each range that was bad on the old device. If another device has a good copy of
    /// the range, the new device gets that copy. `scrub` has the counts at all times. Units of `job` are bytes of the
    /// old device. The change is durable on return.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is no such device, if the new device is smaller than the part of the old device that
    /// the filesystem uses, or cannot be written, or if another replacement is not complete; [`Error::BlockGroupBusy`]
    /// if chunks keep being moved to the old device; [`Error::Cancelled`]; a failure of the new device; an error of a
    /// tree or a commit. After an error, the old device is in its place. Content without a good copy is no error. After
    /// [`Engine::suspend_replacement`], a cancelled replacement is not given up.
    pub fn replace_device(
        &self,
        request: &ReplaceRequest,
        scrub: &Arc<DeviceScrub>,
        job: &Job,
        found: &(dyn Fn(ScrubFinding) + Sync),
    ) -> Result<()> {
        self.check_writable()?;
        self.check_not_held()?;
        let _alone = self.device_changes.begin(job)?;
        let (devid, device) = (request.devid, &request.device);
        self.refuse_seed(devid, "replaced")?;
        let item = self.volumes.dev_item(devid).ok_or_else(|| no_device(devid))?;
        if device.len_bytes() < item.total_bytes {
            return Err(Error::Refused {
                what: format!(
                    "{} has {} bytes, and device {devid} has {}",
                    device.describe(),
                    device.len_bytes(),
                    item.total_bytes
                ),
                hint: "give a larger device, or shrink the filesystem on the old one first: ubtrfs filesystem resize",
            });
        }
        self.refuse_own_device(device.as_ref())?;
        check_can_be_written(device.as_ref())?;
        let begun = DevReplaceItem {
            src_devid: devid,
            cursor_left: 0,
            cursor_right: 0,
            cont_reading_from_srcdev_mode: request.avoids_source.into(),
            replace_state: DevReplaceItem::STARTED,
            time_started: seconds_now(),
            time_stopped: 0,
            num_write_errors: 0,
            num_uncorrectable_read_errors: 0,
        };
        ubtrfs_volumes::wipe(device.as_ref(), device.len_bytes())?;
        self.begin_twin(request, job)?;
        self.run_replacement(begun, scrub, job, found)
    }

    /// The replacement that an earlier session or Linux has begun and that does not run now.
    pub fn suspended_replacement(&self) -> Option<SuspendedReplacement> {
        self.device_changes.replacing.suspended()
    }

    /// Continues a suspended replacement. Returns false if no replacement is suspended, or if its new device is
    /// missing.
    ///
    /// # Errors
    ///
    /// As for [`Engine::replace_device`].
    pub fn resume_replacement(
        &self,
        scrub: &Arc<DeviceScrub>,
        job: &Job,
        found: &(dyn Fn(ScrubFinding) + Sync),
    ) -> Result<bool> {
        self.check_writable()?;
        let _alone = self.device_changes.begin_beside_suspended(job)?;
        let Some(SuspendedReplacement { item, has_target: true }) = self.suspended_replacement() else {
            return Ok(false);
        };
        // P3
        let item = DevReplaceItem {
            replace_state: DevReplaceItem::STARTED,
            cursor_left: 0,
            cursor_right: 0,
            time_stopped: 0,
            num_uncorrectable_read_errors: 0,
            ..item
        };
        self.run_replacement(item, scrub, job, found).map(|()| true)
    }

    /// Gives up a suspended replacement: the old device stays, and the superblocks of the new device are wiped if it
    /// was given. Returns false if no replacement is suspended. The change is durable on return.
    ///
    /// # Errors
    ///
    /// [`Error::Cancelled`] while the call waits for another change of devices; an error of a commit.
    pub fn cancel_suspended_replacement(&self, job: &Job) -> Result<bool> {
        self.check_writable()?;
        self.check_not_held()?;
        let _alone = self.device_changes.begin_beside_suspended(job)?;
        let Some(suspended) = self.suspended_replacement() else { return Ok(false) };
        self.give_up(DevReplaceItem { replace_state: DevReplaceItem::CANCELED, ..suspended.item })?;
        Ok(true)
    }

    /// Called at the end of a session. Replacements that are cancelled from now on are kept, and the next session
    /// continues them.
    pub fn suspend_replacement(&self) {
        self.device_changes.replacing.keep();
    }

    /// Copies the device to the twin, and puts the twin into the place of the device.
    fn run_replacement(
        &self,
        begun: DevReplaceItem,
        scrub: &Arc<DeviceScrub>,
        job: &Job,
        found: &(dyn Fn(ScrubFinding) + Sync),
    ) -> Result<()> {
        let devid = begun.src_devid;
        let copying = Arc::clone(scrub);
        let progress = move || {
            let ScrubCounts { last_physical: left, uncorrectable_errors, .. } = copying.counts();
            CopyProgress { left, right: copying.taken(), uncorrectable_errors }
        };
        self.device_changes.replacing.run(begun.clone(), Box::new(progress));
        let ended = |replace_state| DevReplaceItem {
            replace_state,
            cursor_left: scrub.counts().last_physical,
            cursor_right: scrub.counts().last_physical,
            time_stopped: seconds_now(),
            num_uncorrectable_read_errors: scrub.counts().uncorrectable_errors,
            ..begun.clone()
        };
        let copied = self.fill_twin(&begun, scrub, job, found).and_then(|()| {
            let end = self.volumes.dev_item(devid).map_or(0, |item| item.total_bytes);
            let replaced = DevReplaceItem { cursor_left: end, cursor_right: end, ..ended(DevReplaceItem::FINISHED) };
            self.device_changes.request(DeviceChange::Replace(devid, Box::new(replaced)));
            self.commit()
        });
        if matches!(copied, Err(Error::Cancelled)) && self.device_changes.replacing.is_kept() {
            self.device_changes.replacing.suspend(seconds_now());
            return copied;
        }
        let done = self.device_changes.take_done();
        let result = copied.and_then(|()| done.failure.map_or(Ok(()), Err));
        let result = result.and_then(|()| self.volumes.check_promoted(devid));
        if result.is_ok() {
            // The old device gets all writes until nothing takes it for a device of the filesystem any more.
            done.removed.into_iter().for_each(|old| old.wipe("replaced"));
        }
        match &result {
            Err(error) if self.check_writable().is_ok() => {
                // As in Linux, one that failed counts as cancelled.
                let failures = u64::from(!matches!(error, Error::Cancelled));
                self.give_up(DevReplaceItem { num_write_errors: failures, ..ended(DevReplaceItem::CANCELED) })?;
            }
            _ => self.volumes.end_twin(devid),
        }
        result
    }

    /// Records that a replacement was given up, and lets the new device go.
    fn give_up(&self, item: DevReplaceItem) -> Result<()> {
        let devid = item.src_devid;
        let item = DevReplaceItem { time_stopped: seconds_now(), ..item };
        self.device_changes.request(DeviceChange::GiveUpReplace(devid, Box::new(item)));
        let recorded = self.commit();
        let given_up = self.device_changes.take_done().given_up;
        self.volumes.end_twin(devid);
        recorded?;
        given_up.into_iter().for_each(GivenUpTwin::wipe);
        Ok(())
    }

    /// Makes the new device the twin of the old device. Waits for chunks that are being moved to the old device.
    fn begin_twin(&self, request: &ReplaceRequest, job: &Job) -> Result<()> {
        loop {
            match self.volumes.begin_twin(request.devid, Arc::clone(&request.device)) {
                Err(Error::BlockGroupBusy { start, .. }) if self.wait_for_block_groups(&[start], PATIENCE, job)? => {}
                begun => return begun,
            }
        }
    }

    fn fill_twin(
        &self,
        begun: &DevReplaceItem,
        scrub: &DeviceScrub,
        job: &Job,
        found: &(dyn Fn(ScrubFinding) + Sync),
    ) -> Result<()> {
        // The trees describe more after a commit, so more is verified. It also tells of the replacement.
        self.commit()?;
        let (devid, avoids_source) = (begun.src_devid, begun.cont_reading_from_srcdev_mode != 0);
        job.add_total(self.scrub_bytes(devid, 0));
        self.copy_to_twin(devid, avoids_source, scrub, job, found)?;
        job.check()?;
        self.volumes.check_twin(devid)
    }

    /// The state of the last replacement, or `None` if there was none.
    ///
    /// # Errors
    ///
    /// Fails if the device tree cannot be read or its item is corrupt.
    pub fn last_replacement(&self) -> Result<Option<DevReplaceItem>> {
        let item = self.own_tree(RootId::DEV_TREE)?.get(&Key::new(0, KeyType::DEV_REPLACE, 0))?;
        item.map(|item| DevReplaceItem::decode(&item).map_err(|cause| Error::from(cause).in_tree(RootId::DEV_TREE)))
            .transpose()
    }
}

fn seconds_now() -> u64 {
    u64::try_from(Timespec::now().sec).unwrap_or(0)
}

/// Time for which a chunk that another thread moves is awaited.
const PATIENCE: Duration = Duration::from_secs(60);
