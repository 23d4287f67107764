//! Adds devices to an open filesystem, and removes them.
//!
//! ```text
//! add:     wipe -> (the commit inserts the device item) add_device -> superblocks of all devices
//! remove:  (all chunks leave the device) -> (the commit deletes the item) remove_device -> superblocks of the others -> wipe
//! ```
//!
//! Invariants:
//! - D1. A new device has a superblock of the commit before it is added. So after a power cut between the superblocks of the
//!   commit that adds it, it is a late member, and not a missing one. Before that commit, no tree knows it, and it is left
//!   out at open (I3 of `set`).
//! - D2. A device is removed only when no chunk, no target of a migration and no reader uses it. It gets no superblock of the
//!   commit that removes it.
//! - D3. A removed device is wiped only when the commit that removes it is durable.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::clock::new_uuid;
use ubtrfs_format::item::DevItem;
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_format::{DevId, check_superblock};

use crate::commit_super::no_room_for_superblock;
use crate::member::{Member, MemberState};
use crate::set::{PlaceableDevice, Volumes};
use crate::{signature, superblock};

/// A device that was removed from the filesystem, but still has its superblock.
#[derive(Debug)]
pub struct RemovedDevice(Arc<Member>);

impl RemovedDevice {
    pub(crate) fn new(member: Arc<Member>) -> Self {
        Self(member)
    }

    /// Wipes the superblocks of the device (D3). A device that is missing or has failed is left as it is, and so is a seed
    /// device. A failure is only logged, because the device has left already; `how` says how, such as "removed".
    pub fn wipe(self, how: &str) {
        if self.0.is_seed() {
            return;
        }
        let wiped = self.0.backend().map_or(Ok(()), |device| signature::wipe_superblocks(device.as_ref()));
        if let Err(error) = wiped {
            tracing::warn!("{} was {how}, but its superblocks could not be wiped: {error}", self.0.describe());
        }
    }
}

/// The error for a device id that the filesystem does not have.
pub fn no_device(devid: DevId) -> Error {
    Error::Refused {
        what: format!("there is no device {devid}"),
        hint: "list the devices with: ubtrfs filesystem show",
    }
}

impl Volumes {
    /// Whether this object is a device of the filesystem, or the new device of a running replacement.
    pub fn uses(&self, device: &dyn Device) -> bool {
        let is_it = |own: &Arc<dyn Device>| std::ptr::addr_eq(Arc::as_ptr(own), device);
        let uses = |member: &Arc<Member>| {
            member.device().is_some_and(is_it) || member.twin().is_some_and(|twin| is_it(twin.device()))
        };
        self.members().iter().any(uses)
    }

    /// Why given devices are not used, each in a sentence.
    pub fn not_used(&self) -> Vec<String> {
        self.not_used.lock().clone()
    }

    /// The item for a new device: the next device id, a new UUID, and the whole device as its size.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if the device ids are used up.
    pub fn new_dev_item(&self, device: &dyn Device) -> Result<DevItem> {
        let last = self.devices.read().last_key_value().map_or(0, |(devid, _)| *devid);
        let fsid = self.superblock().node_fsid();
        let Some(devid) = last.checked_add(1) else {
            return Err(Error::Refused {
                what: "the device ids of this filesystem are used up".to_owned(),
                hint: "remove the device with the highest id, then add it again",
            });
        };
        let sectorsize = self.sectorsize();
        let has = device.len_bytes();
        Ok(DevItem {
            devid: DevId(devid),
            total_bytes: has.saturating_sub(has.checked_rem(sectorsize.into()).unwrap_or(0)),
            bytes_used: 0,
            io_align: sectorsize,
            io_width: sectorsize,
            sector_size: sectorsize,
            dev_type: 0,
            generation: 0,
            start_offset: 0,
            dev_group: 0,
            seek_speed: 0,
            bandwidth: 0,
            uuid: new_uuid(&fsid, &format!("device {devid}")),
            fsid,
        })
    }

    /// Makes a device, which was wiped, a member in sync. Writes the superblock of the last commit, `committed`, to it (D1).
    /// The running commit stores its item.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the device fails, and an error for a device that is too small for a superblock. The device has not
    /// joined then.
    pub fn add_device(&self, device: Arc<dyn Device>, item: &DevItem, committed: &Superblock) -> Result<()> {
        self.check_writable()?;
        let offset = SUPERBLOCK_OFFSETS[0];
        if !superblock::fits(offset, item.total_bytes) {
            return Err(no_room_for_superblock(item));
        }
        let own = Superblock { bytenr: offset, dev_item: item.clone(), ..committed.clone() };
        let raw = own.encode_with_csum();
        check_superblock(&own, &raw)?;
        let failed = |what: &'static str, source| Error::io(what, device.describe(), offset, raw.len() as u64, source);
        device.write_at(offset, &raw).map_err(|source| failed("write", source))?;
        device.flush().map_err(|source| failed("flush", source))?;
        let found_root = (committed.root, committed.generation);
        let member = Member::given(item.clone(), device, found_root, committed.generation);
        debug_assert!(member.state() == MemberState::InSync, "D1: the new device has another generation");
        member.set_known();
        let before = self.devices.write().insert(item.devid.0, Arc::new(member));
        debug_assert!(before.is_none(), "I1 of `set`: device {} exists", item.devid);
        self.nr_devices.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Corrects a superblock that counts fewer devices than the chunk tree has, as Linux does. Must be called before the
    /// first commit, once all device items are loaded.
    pub fn count_devices(&self, superblock: &mut Superblock) {
        let nr_known = self.members().iter().filter(|member| member.is_known()).count() as u64;
        if nr_known > superblock.num_devices {
            let counted = superblock.num_devices;
            tracing::warn!(
                "the number of devices in the superblock is {counted}, and {nr_known} in the chunk tree: corrected"
            );
            superblock.num_devices = nr_known;
            self.nr_devices.store(nr_known, Ordering::Release);
        }
    }

    /// Waits until no reader uses a device from which all chunks were moved (D2). Returns false if chunks are left.
    pub fn await_unused(&self, devid: DevId) -> bool {
        let until = Instant::now().checked_add(READERS_PATIENCE);
        loop {
            let Some(device) = self.member(devid).map(|member| PlaceableDevice::of(&member)) else { return true };
            // This frees the places that no reader uses any more.
            if self.with_space(&device, |space| space.used_bytes()) == 0 {
                return true;
            }
            if !self.chunks_past(devid, 0).is_empty() || until.is_none_or(|until| Instant::now() >= until) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Takes a device out of the set, which the running commit removes. `None` if there is no such device.
    ///
    /// # Errors
    ///
    /// [`Error::Bug`] if the device is in use (D2).
    pub fn remove_device(&self, devid: DevId) -> Result<Option<RemovedDevice>> {
        if self.chunks.used_bytes(devid) > 0 {
            return Err(Error::Bug { what: format!("D2: device {devid} is removed while it is in use") });
        }
        let removed = self.devices.write().remove(&devid.0);
        if removed.is_some() {
            self.nr_devices.fetch_sub(1, Ordering::AcqRel);
        }
        Ok(removed.map(RemovedDevice))
    }
}

/// How long a reader may use the old place of a chunk.
const READERS_PATIENCE: Duration = Duration::from_secs(30);
