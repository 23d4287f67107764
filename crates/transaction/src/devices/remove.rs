//! Devices that leave the filesystem.
//!
//! The chunks of a device move to the other devices ([`crate::moving::migrate`]), or their extents to other block
//! groups ([`crate::moving::relocate`]). From a seed device, only extents move, because the copies of tree blocks get the
//! fsid of this filesystem. Then a commit deletes the device item, and the superblocks of the device are wiped.
//!
//! Invariants:
//! - R1. If several devices are removed together, from the first moment on no chunk is made on them or moves to them:
//!   their limit is 0.
//! - R2. Whether the profiles and the space allow the removal is checked before anything moves.

use std::collections::BTreeMap;
use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, Stripe};
use ubtrfs_format::{DevId, Profile};
use ubtrfs_volumes::{DeviceSummary, no_device};

use crate::engine::Engine;
use crate::extents::device_items::DeviceChange;
use crate::job::Job;

impl Engine {
    /// Removes devices from the filesystem, also missing ones, one after the other. On return the change is durable, and the
    /// devices that are present have no superblock of the filesystem any more. Units of `job` are bytes that have to move.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is no such device, if too few devices or too little space would be left, or if other
    /// operations keep working on block groups of the devices; [`Error::NoSpace`]; [`Error::Cancelled`]; an error of a read, a
    /// write or a commit. After an error, chunks and extents that were moved stay in their new places, and devices from which
    /// everything was moved are removed.
    pub fn remove_devices(&self, devids: &[DevId], job: &Job) -> Result<()> {
        self.check_writable()?;
        self.check_not_held()?;
        let _alone = self.device_changes.begin(job)?;
        self.check_enough_devices_without(devids)?;
        devids.iter().for_each(|devid| self.volumes.limit_device(*devid, Some(0)));
        self.update_unallocated();
        let removed = self.check_room_without(devids).and_then(|()| {
            devids.iter().try_for_each(|devid| {
                self.drain_past(*devid, 0, job)?;
                self.remove_drained(*devid)
            })
        });
        devids.iter().for_each(|devid| self.volumes.limit_device(*devid, None));
        self.update_unallocated();
        removed
    }

    /// Removes a device that no chunk uses.
    fn remove_drained(&self, devid: DevId) -> Result<()> {
        if !self.volumes.await_unused(devid) {
            return Err(Error::Refused {
                what: format!("device {devid} is still being read"),
                hint: "try again when the readers have ended",
            });
        }
        self.device_changes.request(DeviceChange::Remove(devid));
        self.commit()?;
        self.device_changes.take_done().removed.into_iter().for_each(|device| device.wipe("removed"));
        Ok(())
    }

    /// Fails if a profile needs more devices than would be left without these (R2).
    pub fn check_enough_devices_without(&self, devids: &[DevId]) -> Result<()> {
        let devices = self.volumes.devices();
        if let Some(unknown) = devids.iter().find(|devid| !devices.iter().any(|device| device.devid == **devid)) {
            return Err(no_device(*unknown));
        }
        let is_left =
            |device: &&DeviceSummary| !devids.contains(&device.devid) && device.state.is_usable() && !device.is_seed;
        let nr_left = devices.iter().filter(is_left).count();
        if nr_left == 0 {
            return Err(Error::Refused {
                what: match devices.iter().any(|device| device.is_seed) {
                    true => "the filesystem cannot lose its last device of its own".to_owned(),
                    false => "the filesystem cannot lose its last device".to_owned(),
                },
                hint: "add another device first: ubtrfs device add",
            });
        }
        // A relocation gives block groups on a seed a profile that fits the other devices.
        for group in self.space.block_groups().into_iter().filter(|group| !self.is_on_seed(group.start)) {
            let Some(profile) = Profile::of(group.flags).filter(|profile| usize::from(profile.devs_min) > nr_left)
            else {
                continue;
            };
            return Err(Error::Refused {
                what: format!(
                    "{} needs {} devices, and only {nr_left} would be left",
                    Profile::name_of(group.flags),
                    profile.devs_min
                ),
                hint: "add a device first (ubtrfs device add), or convert to another profile (ubtrfs balance start)",
            });
        }
        Ok(())
    }

    /// Fails if the other devices certainly have too little room for what is on these (R2), whose limit is 0 already: for
    /// all bytes together, or for those of one type and profile, wherever they go.
    fn check_room_without(&self, devids: &[DevId]) -> Result<()> {
        let is_leaving = |stripe: &&Stripe| devids.contains(&stripe.devid);
        let (mut needed, mut room) = (0, self.volumes.unallocated_bytes());
        let mut kinds: BTreeMap<u64, LeavingKind> = BTreeMap::new();
        for group in self.space.block_groups() {
            let Some(chunk) = self.chunk_at(group.start) else { continue };
            let nr_leaving = chunk.stripes.iter().filter(is_leaving).count() as u64;
            if self.is_on_seed(group.start) {
                needed = if nr_leaving > 0 { group.used.saturating_add(needed) } else { needed };
                continue;
            }
            let nr_stripes = chunk.stripes.len() as u64;
            let nr_data = chunk.length.checked_div(chunk.device_extent_len()).unwrap_or(1).max(1);
            let on = |bytes: u64, nr: u64| bytes.checked_div(nr_data).unwrap_or(0).saturating_mul(nr);
            needed = on(group.used, nr_leaving).saturating_add(needed);
            let free = group.len_bytes.saturating_sub(group.used);
            room = on(free, nr_stripes.saturating_sub(nr_leaving)).saturating_add(room);
            let kind = kinds.entry(group.flags.bits()).or_default();
            kind.used_bytes = kind.used_bytes.saturating_add(group.used);
            kind.is_leaving |= nr_leaving > 0;
            kind.chunks.push(chunk);
        }
        for (flags, kind) in kinds.into_iter().filter(|(_, kind)| kind.is_leaving) {
            let flags = BlockGroupFlags::from_bits_retain(flags);
            let room = self.volumes.capacity_without(devids, flags, &kind.chunks);
            check_room(kind.used_bytes, room, &format!(" as {}", Profile::name_of(flags)))?;
        }
        check_room(needed, room, "")
    }
}

/// The block groups of one type and profile, while devices leave.
#[derive(Default)]
struct LeavingKind {
    used_bytes: u64,
    /// Whether one of them has a stripe on a device that leaves.
    is_leaving: bool,
    chunks: Vec<Arc<ChunkItem>>,
}

fn check_room(needed: u64, room: u64, kind: &str) -> Result<()> {
    if needed <= room {
        return Ok(());
    }
    Err(Error::Refused {
        what: format!(
            "the other devices have room for {room} of {needed} bytes{kind}: {} bytes are missing",
            needed.saturating_sub(room)
        ),
        hint: "add a device first, or remove files",
    })
}
