//! Devices that take the place of others, also of missing ones.
//!
//! The new device becomes the twin of the old one ([`ubtrfs_volumes::Volumes::begin_twin`]): it gets every write to it.
//! Meanwhile a walk copies what the old device has, as a scrub goes through it ([`super::scrub`]), and takes what is bad from
//! other devices. Then a commit puts the new device in the place of the old one, with its device id and UUID, so no chunk
//! changes. After that, the superblocks of the old device are wiped.
//!
//! Invariants:
//! - P1. Everything that was written before the new device became the twin is copied. The walk copies all allocated bytes,
//!   also those that no tree describes yet: the items of data follow after the data, and may do so behind the walk.
//! - P2. Until the commit that ends it, nothing on disk tells of the replacement: after a crash, the old device is there as
//!   it was.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::DevReplaceItem;
use ubtrfs_format::{DevId, Key, KeyType, RootId};
use ubtrfs_volumes::no_device;

use crate::devices::add::check_can_be_written;
use crate::devices::scrub::{DeviceScrub, ScrubFinding};
use crate::engine::Engine;
use crate::extents::device_items::DeviceChange;
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
    /// Replaces a device. `found` gets each range that was bad on the old device; with a good copy elsewhere, the new device
    /// has the good content. `scrub` has the counts at all times. Units of `job` are bytes of the old device. The change is
    /// durable on return.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is no such device, or if the new one is smaller than what the filesystem uses of the old
    /// one, or cannot be written; [`Error::BlockGroupBusy`] if chunks keep being moved to the old device;
    /// [`Error::Cancelled`]; a failure of the new device; an error of a tree or a commit. After an error, the old device is
    /// in its place. Content without a good copy is no error.
    pub fn replace_device(
        &self,
        request: &ReplaceRequest,
        scrub: &DeviceScrub,
        job: &Job,
        found: &(dyn Fn(ScrubFinding) + Sync),
    ) -> Result<()> {
        self.check_writable()?;
        let _alone = self.device_changes.begin(job)?;
        let (devid, device) = (request.devid, &request.device);
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
        check_can_be_written(device.as_ref())?;
        let started = seconds_now();
        ubtrfs_volumes::wipe(device.as_ref(), device.len_bytes())?;
        self.begin_twin(request)?;
        let ended = |replace_state, cursor| {
            Box::new(DevReplaceItem {
                src_devid: devid,
                cursor_left: cursor,
                cursor_right: cursor,
                cont_reading_from_srcdev_mode: request.avoids_source.into(),
                replace_state,
                time_started: started,
                time_stopped: seconds_now(),
                num_write_errors: 0,
                num_uncorrectable_read_errors: scrub.counts().uncorrectable_errors,
            })
        };
        let copied = self.fill_twin(request, scrub, job, found).and_then(|()| {
            let replaced = ended(DevReplaceItem::FINISHED, item.total_bytes);
            self.device_changes.request(DeviceChange::Replace(devid, replaced));
            self.commit()
        });
        let done = self.device_changes.take_done();
        let result = copied.and_then(|()| done.failure.map_or(Ok(()), Err));
        let result = result.and_then(|()| self.volumes.check_promoted(devid));
        if result.is_ok() {
            // The old device gets all writes until nothing takes it for a device of the filesystem any more.
            done.removed.into_iter().for_each(|old| old.wipe("replaced"));
        }
        self.volumes.end_twin(devid);
        if let Err(error) = &result
            && self.check_writable().is_ok()
        {
            // As in Linux, one that failed counts as cancelled.
            let mut item = ended(DevReplaceItem::CANCELED, scrub.counts().last_physical);
            item.num_write_errors = u64::from(!matches!(error, Error::Cancelled));
            self.device_changes.request(DeviceChange::NoteReplace(item));
            self.commit()?;
        }
        result
    }

    /// Makes the new device the twin of the old one. Waits for chunks that are being moved to the old one.
    fn begin_twin(&self, request: &ReplaceRequest) -> Result<()> {
        for _ in 0..MAX_WAITS {
            match self.volumes.begin_twin(request.devid, Arc::clone(&request.device)) {
                Err(Error::BlockGroupBusy { .. }) => std::thread::sleep(WAIT),
                begun => return begun,
            }
        }
        self.volumes.begin_twin(request.devid, Arc::clone(&request.device))
    }

    fn fill_twin(
        &self,
        request: &ReplaceRequest,
        scrub: &DeviceScrub,
        job: &Job,
        found: &(dyn Fn(ScrubFinding) + Sync),
    ) -> Result<()> {
        // The trees describe more after a commit, so more is verified.
        self.commit()?;
        job.add_total(self.scrub_bytes(request.devid, 0));
        self.copy_to_twin(request.devid, request.avoids_source, scrub, job, found)?;
        job.check()?;
        self.volumes.check_twin(request.devid)
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
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Maximum number of waits for chunks that other threads are moving; with [`WAIT`], one minute in all.
const MAX_WAITS: u32 = 600;
const WAIT: Duration = Duration::from_millis(100);
