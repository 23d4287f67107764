//! Defragmenting a file: small extents are read and made dirty again, so that writeback joins them into larger ones
//! and, on request, compresses them.
//!
//! Content, size and times stay as they are. Shared extents stay shared unless the caller asks to unshare them.
//!
//! I1. The file is rewritten in pieces. The inode's state lock is held from the search for a piece's extents until the
//! bytes of these extents are dirty, so that no newer data is replaced.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "offsets in files are at most `MAX_SIZE`, rounded up to a sector; `decode` checks the numbers of extents"
)]

use std::ops::Range;
use std::sync::Arc;

use ubtrfs_format::item::Compression;
use ubtrfs_transaction::{Job, race_point};

use crate::compression::{CompressionMethod, MAX_UNCOMPRESSED};
use crate::file::read::check_regular;
use crate::inode::buf_pool::BUF_MAX;
use crate::inode::state::{Inode, InodeState, Rewriting};
use crate::items::file_extent::{ExtentAt, extents_in};
use crate::session::context::MetadataPurpose;
use crate::{CompressSpec, Error, Fs, InodeId, Result};

/// Options of a defragmentation.
#[derive(Clone, Debug)]
pub struct Defragment {
    /// The bytes of the file to defragment.
    pub range: Range<u64>,
    /// Extents that cover at least this many bytes of the file stay as they are, unless they are to be compressed.
    pub small_bytes: u64,
    /// Compress the rewritten extents with this method. Extents that are not compressed yet are rewritten even if they
    /// are large.
    pub compress: Option<CompressSpec>,
    /// Also rewrite extents that snapshots or other files share. The file's own copy of the extents then takes
    /// additional space.
    pub unshare: bool,
}

impl Default for Defragment {
    /// The whole file, with the extent threshold of btrfs-progs (32 MiB). Shared extents stay shared, and nothing is
    /// compressed.
    fn default() -> Self {
        Self { range: 0..u64::MAX, small_bytes: 32 << 20, compress: None, unshare: false }
    }
}

impl Fs {
    /// Joins the small extents of a file. Returns the number of bytes that were rewritten. `job` counts bytes of the
    /// file.
    ///
    /// # Errors
    ///
    /// Fails if the file is not a regular file, is in a read-only subvolume, or is already being defragmented; if there
    /// is no space or quota for the rewritten data; if `job` is cancelled; and if a read or write fails. The file's
    /// content is intact after every failure.
    pub fn defragment(&self, id: InodeId, how: &Defragment, job: &Job) -> Result<u64> {
        let inode = self.inode_to_change(id)?;
        self.flush_inode(&inode, how.range.clone())?;
        {
            let mut state = inode.write()?;
            check_regular(&state)?;
            if state.rewriting.is_some() {
                return Err(Error::Busy("the file is already being defragmented"));
            }
            let compress = how.compress.map(|spec| CompressionMethod { kind: spec.kind, level: spec.level });
            state.rewriting = Some(Rewriting { compress });
        }
        let done = self.rewrite_small(&inode, how, job);
        // Write the dirty bytes back before `rewriting` is cleared, because `rewriting` makes writeback use new
        // extents.
        let flushed = self.flush_inode(&inode, how.range.clone());
        inode.state.write().rewriting = None;
        let done = done?;
        flushed?;
        Ok(done)
    }

    fn rewrite_small(&self, inode: &Arc<Inode>, how: &Defragment, job: &Job) -> Result<u64> {
        let size = inode.read()?.item.size;
        let end = how.range.end.min(size.next_multiple_of(u64::from(self.geometry.sectorsize)));
        job.add_total(end.saturating_sub(how.range.start));
        let (mut at, mut done) = (how.range.start, 0);
        while at < end {
            job.check()?;
            self.throttle(inode)?;
            let next = end.min(at - at % PIECE + PIECE);
            done += self.rewrite_piece(inode, at..next, how)?;
            job.advance(next - at);
            at = next;
        }
        Ok(done)
    }

    /// Makes the bytes of a piece's small extents dirty.
    fn rewrite_piece(&self, inode: &Arc<Inode>, piece: Range<u64>, how: &Defragment) -> Result<u64> {
        // A file that needs no work must not fail at a quota limit, so reserve only if there is work.
        if self.ranges_to_rewrite(inode, &*inode.read()?, &piece, how)?.is_empty() {
            return Ok(0);
        }
        drop(self.context.reserve(MetadataPurpose::Change(4))?);
        let mut space = Some(self.engine.reserve_data_for(inode.id.root, piece.end - piece.start)?);
        // I1
        let mut state = inode.write()?;
        let state = &mut *state;
        check_regular(state)?;
        let mut done = 0;
        for range in self.ranges_to_rewrite(inode, state, &piece, how)? {
            let len = range.end.min(state.item.size).saturating_sub(range.start);
            let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
            self.read_merged(inode, state, range.start, &mut bytes)?;
            race_point();
            self.write_dirty(inode, state, range.start, &bytes, &mut space)?;
            done += len;
        }
        Ok(done)
    }

    /// The parts of a piece whose extents are worth rewriting: small extents next to an extent that they can be joined
    /// with, and extents to be compressed.
    fn ranges_to_rewrite(
        &self,
        inode: &Inode,
        state: &InodeState,
        piece: &Range<u64>,
        how: &Defragment,
    ) -> Result<Vec<Range<u64>>> {
        let sectorsize = u64::from(self.geometry.sectorsize);
        // Include the neighbours of the piece, which decide whether its extents can be joined.
        let wide = piece.start.saturating_sub(sectorsize)..piece.end.saturating_add(sectorsize);
        let extents = extents_in(&inode.home.tree, inode.id.ino, wide, usize::MAX, self.geometry.sectorsize)?;
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (index, extent) in extents.iter().enumerate() {
            let inside = extent.start.max(piece.start)..extent.end.min(piece.end);
            if inside.start >= inside.end || !self.is_small(inode, extent, how)? {
                continue;
            }
            let joins = |other: Option<&ExtentAt>, is_behind: bool| {
                other.is_some_and(|other| {
                    let (first, second) = if is_behind { (extent, other) } else { (other, extent) };
                    first.end == second.start
                        && other.is_data()
                        && !other.is_inline()
                        && on_disk(other) < how.small_bytes
                        && !is_joined(first, second)
                })
            };
            let compresses = how.compress.is_some_and(|spec| spec.kind != extent.extent.compression);
            let before = index.checked_sub(1).and_then(|before| extents.get(before));
            if compresses || joins(before, false) || joins(extents.get(index + 1), true) {
                ranges.push(inside);
            }
        }
        ranges.retain(|range| state.data.pending_in(range.clone()).is_empty());
        Ok(ranges)
    }

    fn is_small(&self, inode: &Inode, extent: &ExtentAt, how: &Defragment) -> Result<bool> {
        let Some(regular) = extent.extent.disk_extent().filter(|_| extent.is_data() && !extent.is_inline()) else {
            return Ok(false);
        };
        let (method, wanted) = (extent.extent.compression, how.compress.map(|spec| spec.kind));
        let compresses = wanted.is_some() && method == Compression::None;
        let is_full = method != Compression::None && on_disk(extent) >= MAX_UNCOMPRESSED as u64;
        if is_full && wanted.is_none_or(|wanted| wanted == method) {
            return Ok(false);
        }
        if on_disk(extent) >= how.small_bytes && !compresses {
            return Ok(false);
        }
        let is_shared = || self.engine.extent_is_shared(inode.id.root, inode.id.ino, extent.start, &regular);
        Ok(how.unshare || !is_shared()?)
    }
}

/// The length in bytes of the file range that an extent item covers.
fn on_disk(extent: &ExtentAt) -> u64 {
    extent.end - extent.start
}

/// Whether joining two neighbouring items of the file would gain nothing. It gains nothing if both are uncompressed and
/// contiguous on disk, and either belong to one extent or are not both tiny.
fn is_joined(first: &ExtentAt, second: &ExtentAt) -> bool {
    let (Some(one), Some(other)) = (first.extent.disk_extent(), second.extent.disk_extent()) else { return false };
    let is_plain = |extent: &ExtentAt| extent.extent.compression == Compression::None;
    let is_contiguous =
        one.disk_bytenr.0 + one.offset + (first.end - first.start) == other.disk_bytenr.0 + other.offset;
    let are_tiny = on_disk(first) < TINY_BYTES && on_disk(second) < TINY_BYTES;
    is_plain(first) && is_plain(second) && is_contiguous && (one.disk_bytenr == other.disk_bytenr || !are_tiny)
}

/// Number of bytes made dirty in one step.
const PIECE: u64 = BUF_MAX as u64;
/// Two extents below this size are joined even if they are contiguous on disk, because each extent takes an item.
const TINY_BYTES: u64 = 1 << 20;
