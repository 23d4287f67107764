//! Changes of the number of bytes that the filesystem uses on a device.
//!
//! Growing needs a device that is large enough, and changes the device item and the superblock in one commit. Shrinking
//! first moves every chunk that reaches past the new end ([`crate::moving::migrate`]). A block group whose
//! chunk finds no room below the new end is emptied into other block groups ([`crate::moving::relocate`]). While
//! chunks move, new chunks are made only below the new end.
//!
//! I1. While a device's limit is set, no chunk is made past the limit or moved past it (`volumes::chunk_map`). So once
//! no chunk is left past the new end, no chunk is added past the new end before the new size is durable.

use std::time::Duration;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::{DevId, Logical};
use ubtrfs_volumes::ChunkPlacement;

use crate::engine::Engine;
use crate::extents::device_items::DeviceChange;
use crate::job::Job;

/// Maximum number of attempts to move all chunks: other threads may move the same ones.
const MAX_PASSES: u32 = 6000;
/// Time for which chunks that other threads move are awaited.
const PATIENCE: Duration = Duration::from_secs(600);
/// Maximum number of block groups that a resize moves aside. A chunk made for their extents may cross the end again.
const DETOURS_MAX: u32 = 4;

/// Minimum size of a device in bytes: room for the primary superblock and the smallest chunks.
pub const DEVICE_LEN_MIN: u64 = 32 << 20;

impl Engine {
    /// The number of bytes that the filesystem uses on a device, and the device's size in bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is no such device; [`Error::Io`] if the device's size cannot be read.
    pub fn device_size(&self, devid: DevId) -> Result<(u64, u64)> {
        let has = self.volumes.device_len(devid)?;
        Ok((self.volumes.dev_item(devid).map_or(0, |item| item.total_bytes), has))
    }

    /// The smallest size to which a device can be shrunk by moving whole chunks. Smaller sizes may work too, because
    /// [`Engine::resize_device`] also moves extents into the free space of other block groups.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is no such device.
    pub fn min_device_size(&self, devid: DevId) -> Result<u64> {
        self.volumes.min_device_len(devid, DEVICE_LEN_MIN).ok_or_else(|| Error::Refused {
            what: format!("device {devid} does not exist"),
            hint: "see: ubtrfs filesystem show",
        })
    }

    /// Sets the number of bytes that the filesystem uses on a device, rounded down to whole sectors. The new size is
    /// durable on return. Units of `job` are bytes that have to move.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if there is no such device, if it is a seed device, if `len_bytes` is more than the device's
    /// size or less than [`DEVICE_LEN_MIN`], or if other operations keep working on block groups that lie past the new
    /// end; [`Error::NoSpace`] if the extents past the new end find no room below it; [`Error::Cancelled`]; an error of
    /// a read, a write or a commit. After an error, the size is unchanged, but chunks and extents that were moved stay
    /// in their new places.
    pub fn resize_device(&self, devid: DevId, len_bytes: u64, job: &Job) -> Result<()> {
        self.abort_state.check_not_aborted()?;
        self.check_not_held()?;
        let _alone = self.device_changes.begin(job)?;
        self.refuse_seed(devid, "resized")?;
        let (now, has) = self.device_size(devid)?;
        let sectorsize = u64::from(self.geometry.sectorsize).max(1);
        let wanted = len_bytes.saturating_sub(len_bytes.checked_rem(sectorsize).unwrap_or(0));
        if wanted > has {
            return Err(Error::Refused {
                what: format!("device {devid} has {has} bytes, not {wanted}"),
                hint: "make the device larger first; for an image file: truncate -s SIZE IMAGE",
            });
        }
        if wanted < DEVICE_LEN_MIN {
            return Err(Error::Refused {
                what: format!("a device of {len_bytes} bytes is too small"),
                hint: "give at least 32M",
            });
        }
        if wanted == now {
            return Ok(());
        }
        self.volumes.limit_device(devid, Some(wanted));
        let resized = self.drain_past(devid, wanted, job).and_then(|()| {
            self.device_changes.request(DeviceChange::Resize(devid, wanted));
            self.commit()
        });
        self.volumes.limit_device(devid, None);
        self.update_unallocated();
        resized
    }

    /// Moves every chunk that reaches past `end` of a device (I1).
    pub(super) fn drain_past(&self, devid: DevId, end: u64, job: &Job) -> Result<()> {
        self.update_unallocated();
        let mut detours_left = DETOURS_MAX;
        for _ in 0..MAX_PASSES {
            // Record pending chunks, and remove empty block groups.
            self.commit()?;
            let behind = self.volumes.chunks_past(devid, end);
            if behind.is_empty() {
                return Ok(());
            }
            let mut busy = Vec::new();
            // Move chunks from the highest address down, because the allocator fills block groups from below.
            for start in behind.into_iter().rev() {
                job.check()?;
                match self.move_below_end(start, job) {
                    Ok(()) => {}
                    Err(Error::BlockGroupBusy { start: claimed, .. }) => busy.push(claimed),
                    Err(Error::NoSpace) if detours_left > 0 && self.volumes.chunk_crosses(start, devid, end) => {
                        detours_left = detours_left.saturating_sub(1);
                        self.move_aside(start, (devid, end), job)?;
                    }
                    // A commit removes the block group.
                    Err(_) if self.space.block_group_at(start).is_none() => busy.push(start),
                    Err(error) => return Err(error),
                }
            }
            if !busy.is_empty() && !self.wait_for_block_groups(&busy, PATIENCE, job)? {
                break;
            }
        }
        Err(Error::Refused {
            what: format!("block groups of device {devid} are being moved by another operation"),
            hint: "wait until that operation ends, then try again",
        })
    }

    /// Moves the chunk of a block group below the limit. If there is no room for a whole chunk, the extents of the
    /// block group move into the free space of other block groups, and the block group is removed.
    fn move_below_end(&self, start: Logical, job: &Job) -> Result<()> {
        // No profile is requested: the block group keeps the profile that it has when the move begins.
        if self.space.is_on_seed(start) {
            return self.empty_for_resize(start, job);
        }
        let placement = ChunkPlacement { profile: None, keeps_stripes: true };
        match self.migrate_chunk(start, &placement, job) {
            Err(Error::NoSpace) => {}
            moved => return moved.map(drop),
        }
        self.empty_for_resize(start, job)
    }

    /// Moves the extents of a block group whose chunk crosses the end to any place on the device. The part of the chunk
    /// below the end then has room for a smaller chunk, in which the extents find room at the next attempt.
    fn move_aside(&self, start: Logical, (devid, end): (DevId, u64), job: &Job) -> Result<()> {
        self.volumes.limit_device(devid, None);
        self.update_unallocated();
        let moved = self.empty_for_resize(start, job);
        self.volumes.limit_device(devid, Some(end));
        self.update_unallocated();
        moved
    }

    /// Moves the extents of a block group to others, and removes it.
    fn empty_for_resize(&self, start: Logical, job: &Job) -> Result<()> {
        let mut empty = || {
            let emptied = self.relocate_block_group(start, job)?;
            emptied.failures.into_iter().next().map_or(Ok(()), |failure| Err(failure.error))
        };
        match self.flusher() {
            Some(flusher) => flusher.while_nothing_is_sent(job, &mut empty),
            None => empty(),
        }
    }
}
