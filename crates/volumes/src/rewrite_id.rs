//! Changing the filesystem id in all tree blocks of an unmounted filesystem, in place.
//!
//! ```text
//! flag on all devices -> flush -> tree blocks, one by one -> flush -> final superblocks on all devices -> flush
//! ```
//!
//! While the flag `CHANGING_FSID` is set, `fsid` of the superblocks is the new id and `metadata_uuid` the old one, and
//! tree blocks and device items may have either. Nobody mounts such a filesystem.
//!
//! Invariants:
//! - R1. All devices are given and whole, as for [`crate::tune`], and the filesystem has no log, no seed and no parity.
//! - R2. Before the flag is set, the caller has read all tree blocks, and their copies are equal.
//! - R3. The write of a tree block cannot be torn: only its first sector changes, which has the id and the checksum. A leaf
//!   with device items changes in several sectors. Its copies are written one after the other, each durably, so one is
//!   always good. Without a second copy, nothing is begun.
//! - R4. After an interruption, the same change goes on: the superblocks have both ids.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{BlockGroupFlags, DevItem};
use ubtrfs_format::node::{NodeView, finish_block};
use ubtrfs_format::superblock::{Incompat, Superblock, flags};
use ubtrfs_format::{DevId, KeyType, Logical, RootId};
use uuid::Uuid;

use crate::seed::are_of_seeds;
use crate::set::Volumes;
use crate::tune::{check_together, superblocks_of, write};

/// A change of the filesystem id in all tree blocks.
#[derive(Debug)]
pub struct IdRewrite {
    devices: Vec<Arc<dyn Device>>,
    superblocks: Vec<Superblock>,
    fsid: Uuid,
}

impl IdRewrite {
    /// Looks at the devices, which must be opened for writing. Nothing is written. `fsid` is the new id; an interrupted
    /// change has its own.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if a device is missing, damaged or behind the others, or if the filesystem is in a state that
    /// does not allow the change; [`Error::Io`].
    pub fn look(devices: &[Arc<dyn Device>], fsid: Option<Uuid>) -> Result<Self> {
        let superblocks = superblocks_of(devices)?;
        if are_of_seeds(superblocks.iter()).contains(&true) {
            return Err(builds_on_seed());
        }
        check_together(&superblocks, devices, 0, flags::CHANGING_FSID)?;
        let interrupted = superblocks.iter().find(|superblock| superblock.flags & flags::CHANGING_FSID != 0);
        let begun = interrupted.map(|superblock| superblock.fsid);
        let has_changed_id = |superblock: &Superblock| superblock.incompat().contains(Incompat::METADATA_UUID);
        let refuse = |what: &str, hint: &'static str| Err(Error::Refused { what: what.to_owned(), hint });
        let of_all = superblocks.iter().fold(0, |all, superblock| all | superblock.flags);
        match () {
            () if interrupted.is_some_and(|superblock| !has_changed_id(superblock)) => {
                return refuse("another program began to change the id", "complete it with that program: btrfstune -u");
            }
            () if begun.is_some() && fsid.is_some() && fsid != begun => {
                return refuse("a change to another id was interrupted", "complete it first: ubtrfs tune -u");
            }
            () if begun.is_none() && superblocks.iter().any(|superblock| Some(superblock.fsid) == fsid) => {
                return refuse("the filesystem has this id already", "nothing was changed");
            }
            () if begun.is_none() && superblocks.iter().any(has_changed_id) => {
                return refuse(
                    "the id of the filesystem was changed without its tree blocks",
                    "give it its first id again: ubtrfs tune -M UUID",
                );
            }
            () if of_all & flags::SEEDING != 0 => {
                return refuse("cannot set the UUID on a seed device", "end the seeding first: ubtrfs tune -S 0");
            }
            () if superblocks.iter().any(|superblock| superblock.log_root.0 != 0) => {
                return refuse(
                    "the filesystem has a log that is not replayed",
                    "mount it once for writing and unmount it",
                );
            }
            () => {}
        }
        let fsid = begun.or(fsid).unwrap_or_else(Uuid::new_v4);
        Ok(Self { devices: devices.to_vec(), superblocks, fsid })
    }

    /// The new id.
    pub fn fsid(&self) -> Uuid {
        self.fsid
    }

    /// Whether an interrupted change goes on.
    pub fn is_resumed(&self) -> bool {
        self.superblocks.iter().any(|superblock| superblock.fsid == self.fsid)
    }

    /// Whether all tree blocks have the new id: a device has its final superblock.
    pub fn is_rewritten(&self) -> bool {
        let is_final = |superblock: &Superblock| superblock.node_fsid() == self.fsid;
        self.superblocks.iter().any(is_final)
    }

    /// Checks what the chunks of the filesystem tell (R1, R3).
    ///
    /// # Errors
    ///
    /// [`Error::Refused`].
    pub fn check_chunks(&self, volumes: &Volumes) -> Result<()> {
        let refuse = |what: &str, hint: &'static str| Err(Error::Refused { what: what.to_owned(), hint });
        if volumes.devices().iter().any(|device| device.is_seed) {
            return Err(builds_on_seed());
        }
        for (start, chunk) in volumes.chunks() {
            let is_of = |flags| chunk.flags.intersects(flags);
            let is_metadata = is_of(BlockGroupFlags::METADATA | BlockGroupFlags::SYSTEM);
            if is_metadata && is_of(BlockGroupFlags::RAID5 | BlockGroupFlags::RAID6) {
                return refuse("the metadata has parity", "change the id only in the superblocks: ubtrfs tune -m");
            }
            if is_of(BlockGroupFlags::SYSTEM) && volumes.num_copies(start) < 2 {
                return refuse(
                    "the chunk tree has one copy, which an interruption could damage",
                    "change the id only in the superblocks: ubtrfs tune -m; or duplicate the system block groups: ubtrfs balance start -f \
                     -sconvert=dup",
                );
            }
        }
        Ok(())
    }

    /// Marks all devices that are not marked yet.
    ///
    /// # Errors
    ///
    /// [`Error::Io`].
    pub fn begin(&mut self) -> Result<()> {
        let new = self.fsid;
        for (device, superblock) in self.devices.iter().zip(&mut self.superblocks) {
            if superblock.fsid != new {
                superblock.flags |= flags::CHANGING_FSID;
                superblock.metadata_uuid = superblock.fsid;
                superblock.fsid = new;
                superblock.incompat_flags |= Incompat::METADATA_UUID.bits();
                write(device.as_ref(), superblock)?;
            }
        }
        Ok(())
    }

    /// Gives a tree block the new id, in all copies. `node` is its content, which has been checked. After an interruption
    /// the copies may differ, so a block that has the id is written too.
    ///
    /// # Errors
    ///
    /// [`Error::Io`]; the block is not mapped.
    pub fn rewrite(&self, volumes: &Volumes, at: Logical, node: &mut [u8]) -> Result<()> {
        let csum_type = volumes.superblock().csum_type().unwrap_or_default();
        let is_whole = self.rewrite_device_items(node)?;
        set_fsid(node, self.fsid);
        finish_block(node, csum_type);
        let first_sector = usize::try_from(volumes.superblock().sectorsize).unwrap_or(usize::MAX).min(node.len());
        let written = if is_whole { &*node } else { node.get(..first_sector).unwrap_or_default() };
        for copy in 0..volumes.num_copies(at) {
            for (devid, offset, part) in volumes.places(at, written.len(), copy)? {
                let device = self.device(devid)?;
                let bytes = written.get(part).unwrap_or_default();
                device
                    .write_at(offset, bytes)
                    .map_err(|source| Error::io("write", device.describe(), offset, bytes.len() as u64, source))?;
                if is_whole {
                    flush(device)?;
                }
            }
        }
        Ok(())
    }

    /// Completes the change durably.
    ///
    /// # Errors
    ///
    /// [`Error::Io`]; then the change is interrupted.
    pub fn finish(self) -> Result<()> {
        self.devices.iter().try_for_each(|device| flush(device.as_ref()))?;
        for (device, superblock) in self.devices.iter().zip(&self.superblocks) {
            let mut last = superblock.clone();
            last.flags &= !flags::CHANGING_FSID;
            last.incompat_flags &= !Incompat::METADATA_UUID.bits();
            last.metadata_uuid = Uuid::nil();
            last.fsid = self.fsid;
            last.dev_item.fsid = self.fsid;
            write(device.as_ref(), &last)?;
        }
        Ok(())
    }

    /// Gives the device items of a leaf the new id. Returns whether it has any.
    fn rewrite_device_items(&self, node: &mut [u8]) -> Result<bool> {
        let view = NodeView::new(node)?;
        if !view.is_leaf() || view.owner() != RootId::CHUNK_TREE {
            return Ok(false);
        }
        let is_device = |slot: &usize| view.key(*slot).is_some_and(|key| key.item_type == KeyType::DEV_ITEM);
        let found: Vec<_> = (0..view.nritems()).filter(is_device).filter_map(|slot| view.item_range(slot)).collect();
        for range in &found {
            let Some(data) = node.get_mut(range.clone()) else { continue };
            let item = DevItem { fsid: self.fsid, ..DevItem::decode(data)? };
            data.copy_from_slice(&item.encode());
        }
        Ok(!found.is_empty())
    }

    fn device(&self, devid: DevId) -> Result<&dyn Device> {
        let found = self.superblocks.iter().position(|superblock| superblock.dev_item.devid == devid);
        let device = found.and_then(|index| self.devices.get(index));
        device.map(AsRef::as_ref).ok_or_else(|| Error::Refused {
            what: format!("device {devid} is missing"),
            hint: "give all devices of the filesystem",
        })
    }
}

/// Sets the id in the header of a tree block.
fn set_fsid(node: &mut [u8], fsid: Uuid) {
    const FSID: std::ops::Range<usize> = 32..48;
    if let Some(header) = node.get_mut(FSID) {
        header.copy_from_slice(fsid.as_bytes());
    }
}

fn flush(device: &dyn Device) -> Result<()> {
    device.flush().map_err(|source| Error::io("flush", device.describe(), 0, 0, source))
}

fn builds_on_seed() -> Error {
    Error::Refused {
        what: "the filesystem builds on a seed".to_owned(),
        hint: "remove the seed first: ubtrfs device remove",
    }
}
