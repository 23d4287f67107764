//! The extents of a file, as FIEMAP reports them.

use std::ops::Range;

use ubtrfs_format::Logical;
use ubtrfs_format::item::{Compression, FileExtentBody, InodeFlags};

use crate::file::read::check_regular;
use crate::inode::state::{Inode, InodeState};
use crate::items::file_extent::{ExtentAt, extents_in};
use crate::{Fs, InodeId, Result};

/// The kind of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// An extent with data.
    Data,
    /// Data inside the file extent item.
    Inline,
    /// An allocated extent that reads as zeros.
    Prealloc,
    /// An explicit hole.
    Hole,
    /// Data in memory that is not on disk yet.
    Delalloc,
}

/// One extent of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentInfo {
    /// Offset in the file.
    pub offset: u64,
    /// Length in the file, in bytes.
    pub len_bytes: u64,
    /// Its kind.
    pub kind: ExtentKind,
    /// The address of the whole extent on disk; 0 without an extent.
    pub disk_bytenr: Logical,
    /// Bytes of the whole extent on disk.
    pub disk_len_bytes: u64,
    /// The offset in the (decompressed) extent at which the file's part begins.
    pub extent_offset: u64,
    /// The compression method of the extent.
    pub compression: Compression,
}

impl Fs {
    /// Returns the extents of a file's items, followed by the file's pending ranges (dirty or under writeback). Each of
    /// the two lists is in file order. Holes are listed only if the filesystem stores explicit holes.
    pub fn extents(&self, id: InodeId) -> Result<Vec<ExtentInfo>> {
        Ok(self.extents_from(id, 0, usize::MAX)?.0)
    }

    /// Returns a part of the result of [`Fs::extents`]: up to `limit` extents of the file's items that end after
    /// `from`, then the pending ranges in the same part of the file. Also returns the offset at which to continue if
    /// there may be more.
    pub fn extents_from(&self, id: InodeId, from: u64, limit: usize) -> Result<(Vec<ExtentInfo>, Option<u64>)> {
        let inode = self.inode(id)?;
        let state = inode.read()?;
        check_regular(&state)?;
        let items = extents_in(&inode.home.tree, id.ino, from..u64::MAX, limit, self.geometry.sectorsize)?;
        let next = items.last().filter(|_| items.len() >= limit).map(|last| last.end);
        let mut extents = Vec::with_capacity(items.len());
        for item in &items {
            let (kind, regular) = match &item.extent.body {
                FileExtentBody::Inline(_) => (ExtentKind::Inline, None),
                FileExtentBody::Regular(regular) if regular.disk_bytenr.0 == 0 => (ExtentKind::Hole, None),
                FileExtentBody::Regular(regular) => (ExtentKind::Data, Some(regular)),
                FileExtentBody::Prealloc(regular) => (ExtentKind::Prealloc, Some(regular)),
            };
            extents.push(ExtentInfo {
                offset: item.start,
                len_bytes: item.extent.num_bytes(),
                kind,
                disk_bytenr: regular.map_or(Logical(0), |regular| regular.disk_bytenr),
                disk_len_bytes: regular.map_or(0, |regular| regular.disk_num_bytes),
                extent_offset: regular.map_or(0, |regular| regular.offset),
                compression: item.extent.compression,
            });
        }
        let pending = state.data.pending_in(from..next.unwrap_or(u64::MAX));
        extents.extend(pending.into_iter().map(|range| ExtentInfo {
            offset: range.start,
            len_bytes: range.end.saturating_sub(range.start),
            kind: ExtentKind::Delalloc,
            disk_bytenr: Logical(0),
            disk_len_bytes: 0,
            extent_offset: 0,
            compression: Compression::None,
        }));
        Ok((extents, next))
    }

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
