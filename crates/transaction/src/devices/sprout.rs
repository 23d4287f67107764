//! Making a filesystem on a seed, a sprout: see `volumes::seed`.
//!
//! ```text
//! seed opened with a new fsid -> new device wiped -> metadata and system chunks on it -> commits without superblocks:
//! the chunk tree leaves the seed -> commit: device items -> superblock of the new device
//! ```
//!
//! The tree blocks that the commits change are copied to the new device. Everything else stays on the seed, which is only
//! read (E1, E4 of `volumes::seed`).

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::DevId;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_space::SpaceKind;
use ubtrfs_volumes::Volumes;
use uuid::Uuid;

use crate::devices::add::check_new_device;
use crate::engine::{CACHE_PART, Engine, EngineOptions};
use crate::extents::device_items::DeviceChange;
use crate::job::Job;
use crate::open::Loaded;

impl Engine {
    /// The devices of the filesystem that are present, including devices of its seeds.
    pub fn given_devices(&self) -> Vec<Arc<dyn Device>> {
        self.volumes.given_devices()
    }

    /// Makes a filesystem on this filesystem, which is a seed. The new filesystem gets a first device of its own.
    /// Returns the id of the device and the fsid. Everything on the device is lost, and nothing is written to the seed.
    /// The new filesystem is durable on return. To open it, pass the devices of both.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if this filesystem is not a seed, lacks devices, or cannot be written for another reason, or
    /// if the device is too small or cannot be written; [`Error::NoSpace`] if the device has no room for the first
    /// chunks; [`Error::Io`] if the device fails; an error of a commit. After an error, the seed is as it was, and the
    /// device may have lost its content.
    pub fn make_sprout(&self, device: Arc<dyn Device>, job: &Job) -> Result<(DevId, Uuid)> {
        let options = EngineOptions::default();
        let volumes = Volumes::open_sprouting(self.given_devices(), options.of_volumes())?;
        let loaded = Loaded::of_volumes(volumes, &options, options.memory_part(CACHE_PART), None)?;
        let sprout = Self::of_loaded(loaded, options)?;
        sprout.check_writable()?;
        let item = sprout.volumes.new_dev_item(device.as_ref())?;
        let (devid, fsid) = (item.devid, item.fsid);
        {
            let _alone = sprout.device_changes.begin(job)?;
            check_new_device(device.as_ref(), &item)?;
            ubtrfs_volumes::wipe(device.as_ref(), device.len_bytes())?;
            sprout.volumes.join_sprout(device, &item)?;
            sprout.update_unallocated();
            for kind in [SpaceKind::System, SpaceKind::Metadata] {
                if !sprout.add_chunk(kind)? {
                    return Err(Error::NoSpace);
                }
            }
            sprout.move_chunk_tree(job)?;
            sprout.volumes.finish_sprout();
            sprout.device_changes.request(DeviceChange::Sprout(Box::new(item)));
            sprout.commit()?;
        }
        sprout.close()?;
        Ok((devid, fsid))
    }

    /// Empties the system block groups on the seed (E4 of `volumes::seed`).
    fn move_chunk_tree(&self, job: &Job) -> Result<()> {
        let groups = self.space.block_groups().into_iter();
        for group in groups.filter(|group| group.flags.contains(BlockGroupFlags::SYSTEM)) {
            if self.is_on_seed(group.start)
                && let Some(failure) = self.relocate_block_group(group.start, job)?.failures.into_iter().next()
            {
                return Err(failure.error);
            }
        }
        Ok(())
    }

    /// Fails for a seed device.
    pub(super) fn refuse_seed(&self, devid: DevId, what: &str) -> Result<()> {
        if !self.volumes.is_seed(devid) {
            return Ok(());
        }
        Err(Error::Refused {
            what: format!("device {devid} is a seed device, which is never written and cannot be {what}"),
            hint: "move everything to other devices with: ubtrfs device remove",
        })
    }
}
