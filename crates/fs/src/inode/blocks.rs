//! The number of blocks that `stat` shows for a file, while some of its data has no extent yet.

use std::ops::Range;

use ubtrfs_format::item::InodeFlags;

use crate::inode::state::{Inode, InodeState};
use crate::items::file_extent::{ExtentAt, extents_in};
use crate::{Fs, Result};

impl Fs {
    /// Returns the number of pending bytes that have no extent yet. `st_blocks` counts these bytes too: otherwise a
    /// file with pending data could look like a hole, and programs that skip holes would lose the data.
    pub(crate) fn new_bytes(&self, inode: &Inode, state: &InodeState) -> u64 {
        if state.data.is_clean() {
            return 0;
        }
        let len = |range: &Range<u64>| range.end.saturating_sub(range.start);
        if let Some(disk_end) = self.end_of_covered(state) {
            return state.data.pending_in(disk_end..u64::MAX).iter().map(len).sum();
        }
        let pending = state.data.pending_in(0..u64::MAX);
        if pending.len() > MAX_SEARCHED {
            // Count all pending bytes as new. An estimate that is too high only makes programs read holes as data.
            return pending.iter().map(len).sum();
        }
        pending.iter().map(|range| len(range).saturating_sub(self.bytes_with_extents(inode, range).unwrap_or(0))).sum()
    }

    /// Whether writeback of pending data leaves `st_blocks` unchanged. This holds if nothing is pending, or if extent
    /// items cover exactly the sectors up to the size on disk. In the second case, `st_blocks` counts the pending bytes
    /// past these sectors already, and all other pending bytes replace data that has extents.
    pub(crate) fn blocks_are_final(&self, state: &InodeState) -> bool {
        state.data.is_clean() || self.end_of_covered(state).is_some()
    }

    /// The end of the file's last sector on disk, if extent items cover everything before this end and nothing past it.
    fn end_of_covered(&self, state: &InodeState) -> Option<u64> {
        let sectorsize = u64::from(self.geometry.sectorsize);
        let disk_end = state.disk_size.next_multiple_of(sectorsize);
        // In a crafted image, `nbytes` can be any number, so the rounding may overflow.
        let is_covered = state.item.nbytes.checked_next_multiple_of(sectorsize) == Some(disk_end);
        (is_covered && !state.has_flags(InodeFlags::PREALLOC)).then_some(disk_end)
    }

    /// Returns how many bytes of a range have extents.
    fn bytes_with_extents(&self, inode: &Inode, range: &Range<u64>) -> Result<u64> {
        let (mut from, mut bytes) = (range.start, 0);
        loop {
            let sectorsize = self.geometry.sectorsize;
            let extents = extents_in(&inode.home.tree, inode.id.ino, from..range.end, STEP, sectorsize)?;
            let found = extents.iter().filter(|extent| !extent.is_hole());
            let inside = |extent: &ExtentAt| extent.end.min(range.end).saturating_sub(extent.start.max(range.start));
            // Extents do not overlap, so the sum is at most the length of the range.
            bytes = u64::saturating_add(bytes, found.map(inside).sum());
            match extents.last() {
                Some(last) if extents.len() >= STEP && last.end < range.end => from = last.end,
                _ => return Ok(bytes),
            }
        }
    }
}

/// Maximum number of pending ranges whose extents are searched to compute `st_blocks`.
const MAX_SEARCHED: usize = 256;
/// Number of extent items in one lookup.
const STEP: usize = 256;
