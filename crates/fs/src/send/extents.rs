//! [`FileDiff`]: sends the data that turns a file of the old tree into the file of the new tree.
//!
//! The walk over the difference of the trees ([`super::sender`]) pushes the items that differ, in order of offset.
//! Items of one file do not overlap in one tree. So if an item of one tree differs, all items of the other tree that
//! overlap it differ too. Ranges that both trees map to the same part of the same extent are equal: an extent's data
//! does not change while a read-only snapshot uses it.
//!
//! - E1. Items are processed in windows; an item that reaches past the end of its window is cut.
//! - E2. If the receiver has the file, the new size is sent before the data, because a clone of a partial last sector
//!   must not end before the end of the target file. If the old end is inside a sector, growing the file writes zeros
//!   into the rest of that sector. So the sector at the old end is made a hole again if it is a hole in the new tree,
//!   and is sent if it is data, even if both trees map it to the same extent. Shrinking the file rewrites the sector of
//!   the new end, so that sector is cloned again if it was shared.
//! - E3. Version 1 has no command that turns old data into a hole, but a hole can be cloned over it: the file is
//!   extended by a hole, the hole is cloned into place, and the file is truncated again. Because of E2, holes are cloned
//!   after all other changes, or after each [`HOLES_MAX`] holes.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "`decode_of` checks the numbers of extents, and `SentTree::inode` the sizes of files"
)]

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use ubtrfs_format::item::{Compression, FileExtent, FileExtentBody};
use ubtrfs_format::{Key, KeyType, RootId};
use ubtrfs_stream::{StreamCommand, StreamVersion};

use super::clones::{CloneFrom, Clones, FoundClone, WantedClone};
use super::pipeline::{Data, DataSource, Pipeline, stream_compression};
use super::tree::SentTree;
use crate::Fs;
use crate::compression::decompress;
use crate::error::Result;
use crate::items::file_extent::{ExtentAt, decode_of, part_of};

/// Options for sending data.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataOptions {
    /// Send compressed extents in their compressed form.
    pub(super) compressed: bool,
    /// Send only the changed ranges, without their data.
    pub(super) no_data: bool,
}

/// The difference of one file's data.
#[derive(Debug)]
pub(super) struct FileDiff {
    ino: u64,
    root: RootId,
    path: Arc<[u8]>,
    size: u64,
    /// Size of the file at the receiver.
    present: u64,
    /// Whether the file becomes shorter.
    is_cut: bool,
    is_sized: bool,
    verify: bool,
    sectorsize: u32,
    options: DataOptions,
    old: VecDeque<ExtentAt>,
    new: VecDeque<ExtentAt>,
    holes: Vec<Range<u64>>,
    /// Whether anything was sent.
    pub(super) is_changed: bool,
}

/// A change of a range of the file.
#[derive(Clone, Debug)]
enum Op {
    Hole(Range<u64>),
    Allocate(Range<u64>),
    Data(Range<u64>, Arc<ExtentAt>),
}

impl FileDiff {
    /// Begins with a file that has `present` bytes at the receiver, and will have `size`.
    pub(super) fn begin(
        fs: &Fs,
        (root, ino): (RootId, u64),
        path: Arc<[u8]>,
        (present, size): (u64, u64),
        verify: bool,
        options: DataOptions,
    ) -> Self {
        Self {
            ino,
            root,
            path,
            size,
            present,
            is_cut: size < present,
            is_sized: false,
            verify,
            sectorsize: fs.geometry.sectorsize,
            options,
            old: VecDeque::new(),
            new: VecDeque::new(),
            holes: Vec::new(),
            is_changed: false,
        }
    }

    /// Sends the new size, if it differs (E2).
    fn set_size(&mut self, clones: &mut Clones<'_>, pipeline: &mut Pipeline<'_, '_>) -> Result<()> {
        if self.is_sized {
            return Ok(());
        }
        self.is_sized = true;
        if self.size == self.present || self.present == 0 {
            return Ok(());
        }
        pipeline.command(&StreamCommand::Truncate { path: &self.path, size: self.size })?;
        let end = std::mem::replace(&mut self.present, self.size);
        self.is_changed = true;
        if self.size < end {
            return self.share_end(clones, pipeline);
        }
        let Some(sector) = sector_of_end(end, self.sectorsize) else { return Ok(()) };
        match extent_at(clones.own(), self.ino, end, self.sectorsize)? {
            Some(item) if item.is_data() => self.operate(&[Op::Data(sector, Arc::new(item))], clones, pipeline),
            item => {
                self.hole(sector.clone(), pipeline)?;
                if item.is_some_and(|item| item.is_prealloc()) && pipeline.version() >= StreamVersion::V2 {
                    self.fallocate(sector, KEEP_SIZE, pipeline)?;
                }
                Ok(())
            }
        }
    }

    /// Clones the sector that holds the end of a file that became shorter. When the receiver truncated the file, it
    /// rewrote this sector, so the sector is no longer shared at the receiver. Does nothing if the receiver has the
    /// sector's data in no other place.
    fn share_end(&mut self, clones: &mut Clones<'_>, pipeline: &mut Pipeline<'_, '_>) -> Result<()> {
        let Some(sector) = sector_of_end(self.size, self.sectorsize).filter(|_| !self.options.no_data) else {
            return Ok(());
        };
        let item = extent_at(clones.own(), self.ino, sector.start, self.sectorsize)?;
        let Some((item, regular)) = item.as_ref().and_then(|item| Some((item, item.extent.disk_extent()?))) else {
            return Ok(());
        };
        if !item.is_data() {
            return Ok(());
        }
        clones.look_up([(regular.disk_bytenr, regular.disk_num_bytes, item.extent.generation)].into_iter())?;
        let at = sector.start;
        let offset = regular.offset + (at - item.start);
        let wanted = WantedClone {
            ino: self.ino,
            bytenr: regular.disk_bytenr,
            offset,
            at,
            len: self.size - at,
            size: self.size,
        };
        match clones.find(&wanted)? {
            FoundClone::Clone(from, len) if len == wanted.len => self.clone_range(&from, at, len, pipeline),
            _ => Ok(()),
        }
    }

    /// Adds the next pair of items that differ: the items of the old and the new tree at one offset.
    pub(super) fn push(
        &mut self,
        (old, new): (Option<ExtentAt>, Option<ExtentAt>),
        clones: &mut Clones<'_>,
        pipeline: &mut Pipeline<'_, '_>,
    ) -> Result<()> {
        self.set_size(clones, pipeline)?;
        let Some(start) = old.as_ref().or(new.as_ref()).map(|item| item.start) else { return Ok(()) };
        if self.old.len() + self.new.len() >= WINDOW {
            self.work_until(start, clones, pipeline)?;
        }
        self.old.extend(old);
        self.new.extend(new);
        Ok(())
    }

    /// Sends the remaining changes.
    pub(super) fn finish(&mut self, clones: &mut Clones<'_>, pipeline: &mut Pipeline<'_, '_>) -> Result<()> {
        self.set_size(clones, pipeline)?;
        self.work_until(u64::MAX, clones, pipeline)?;
        self.settle(clones, pipeline)
    }

    /// Clones the holes so far, and gives the file its size.
    fn settle(&mut self, clones: &mut Clones<'_>, pipeline: &mut Pipeline<'_, '_>) -> Result<()> {
        self.clone_holes(clones, pipeline)?;
        if self.present != self.size {
            pipeline.command(&StreamCommand::Truncate { path: &self.path, size: self.size })?;
            self.present = self.size;
            self.is_changed = true;
            self.share_end(clones, pipeline)?;
        }
        Ok(())
    }

    fn work_until(&mut self, limit: u64, clones: &mut Clones<'_>, pipeline: &mut Pipeline<'_, '_>) -> Result<()> {
        let (old, new) = (cut(&mut self.old, limit), cut(&mut self.new, limit));
        let has_fallocate = pipeline.version() >= StreamVersion::V2;
        let ops =
            MappingComparison { size: self.size, is_cut: self.is_cut, sectorsize: self.sectorsize, has_fallocate }
                .plan(&old, &new);
        self.operate(&ops, clones, pipeline)
    }

    fn operate(&mut self, ops: &[Op], clones: &mut Clones<'_>, pipeline: &mut Pipeline<'_, '_>) -> Result<()> {
        let extents = ops.iter().filter_map(|op| match op {
            Op::Data(_, item) => {
                item.extent.disk_extent().map(|at| (at.disk_bytenr, at.disk_num_bytes, item.extent.generation))
            }
            Op::Hole(_) | Op::Allocate(_) => None,
        });
        if !self.options.no_data {
            clones.look_up(extents)?;
        }
        for op in ops {
            self.is_changed = true;
            match op {
                Op::Hole(range) => self.hole(range.clone(), pipeline)?,
                Op::Allocate(range) => self.fallocate(range.clone(), KEEP_SIZE, pipeline)?,
                Op::Data(range, _) if self.options.no_data => self.update(range.clone(), pipeline)?,
                Op::Data(range, item) => self.data(range.clone(), item, clones, pipeline)?,
            }
        }
        match self.holes.len() < HOLES_MAX {
            true => Ok(()),
            false => self.settle(clones, pipeline),
        }
    }

    fn hole(&mut self, range: Range<u64>, pipeline: &mut Pipeline<'_, '_>) -> Result<()> {
        if self.options.no_data {
            return self.update(range, pipeline);
        }
        if pipeline.version() >= StreamVersion::V2 {
            return self.fallocate(range, PUNCH_HOLE | KEEP_SIZE, pipeline);
        }
        match self.holes.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.holes.push(range),
        }
        Ok(())
    }

    fn fallocate(&self, range: Range<u64>, mode: u32, pipeline: &mut Pipeline<'_, '_>) -> Result<()> {
        let (offset, size) = (range.start, range.end - range.start);
        pipeline.command(&StreamCommand::Fallocate { path: &self.path, mode, offset, size })
    }

    fn update(&mut self, range: Range<u64>, pipeline: &mut Pipeline<'_, '_>) -> Result<()> {
        let end = range.end.min(self.size);
        if range.start < end {
            let (offset, size) = (range.start, end - range.start);
            pipeline.command(&StreamCommand::UpdateExtent { path: &self.path, offset, size })?;
        }
        Ok(())
    }

    /// Clones holes over old data (E3).
    fn clone_holes(&mut self, clones: &Clones<'_>, pipeline: &mut Pipeline<'_, '_>) -> Result<()> {
        let Some(longest) = self.holes.iter().map(|hole| hole.end - hole.start).max() else { return Ok(()) };
        let start = self.size.max(self.present).next_multiple_of(u64::from(self.sectorsize));
        // In a crafted file, holes may be so long that the sum overflows.
        let end = start.checked_add(longest).ok_or(crate::Error::FileTooBig)?;
        pipeline.command(&StreamCommand::Truncate { path: &self.path, size: end })?;
        for hole in std::mem::take(&mut self.holes) {
            let from = clones.own_file(Arc::clone(&self.path), start);
            self.clone_range(&from, hole.start, hole.end - hole.start, pipeline)?;
        }
        self.present = end;
        Ok(())
    }

    fn clone_range(&self, from: &CloneFrom, offset: u64, len: u64, pipeline: &mut Pipeline<'_, '_>) -> Result<()> {
        pipeline.command(&StreamCommand::Clone {
            offset,
            len,
            path: &self.path,
            clone_uuid: from.uuid,
            clone_ctransid: from.ctransid,
            clone_path: &from.path,
            clone_offset: from.offset,
        })
    }

    /// Sends a range of an item's data.
    fn data(
        &mut self,
        range: Range<u64>,
        item: &ExtentAt,
        clones: &mut Clones<'_>,
        pipeline: &mut Pipeline<'_, '_>,
    ) -> Result<()> {
        let end = range.end.min(self.size);
        self.present = self.present.max(end);
        let regular = match &item.extent.body {
            FileExtentBody::Inline(_) => {
                let data = self.inline_data(&item.extent, end)?;
                let most = ubtrfs_stream::WRITE_BYTES_V1;
                for (offset, data) in (0..).step_by(most).zip(data.chunks(most)) {
                    pipeline.command(&StreamCommand::Write { path: &self.path, offset, data })?;
                }
                return Ok(());
            }
            FileExtentBody::Regular(regular) | FileExtentBody::Prealloc(regular) => *regular,
        };
        let mut at = range.start;
        while at < end {
            let offset = regular.offset + (at - item.start);
            let bytenr = regular.disk_bytenr;
            let wanted = WantedClone { ino: self.ino, bytenr, offset, at, len: end - at, size: self.size };
            let (len, is_sent) = match clones.find(&wanted)? {
                FoundClone::InPlace(len) => (len, true),
                FoundClone::Clone(from, len) => {
                    self.clone_range(&from, at, len, pipeline)?;
                    (len, from.is_sent)
                }
                FoundClone::Nothing(len) => {
                    self.write(at, offset, len, item, pipeline)?;
                    (len, false)
                }
            };
            if !is_sent {
                clones.sent(&WantedClone { len, ..wanted });
            }
            at += len;
        }
        Ok(())
    }

    /// Returns inline data up to the offset `end`, padded with zeros.
    fn inline_data(&self, extent: &FileExtent, end: u64) -> Result<Vec<u8>> {
        let FileExtentBody::Inline(data) = &extent.body else { return Ok(Vec::new()) };
        let mut bytes = match extent.compression {
            Compression::None => data.clone(),
            kind => {
                let mut bytes = vec![0; extent.ram_bytes as usize];
                decompress(kind, data, &mut bytes, self.sectorsize as usize)
                    .map_err(|cause| ubtrfs_format::Corrupt::new(cause).in_tree(self.root))?;
                bytes
            }
        };
        bytes.truncate(extent.ram_bytes as usize);
        bytes.resize(end as usize, 0);
        Ok(bytes)
    }

    fn write(&self, start: u64, offset: u64, len: u64, item: &ExtentAt, pipeline: &mut Pipeline<'_, '_>) -> Result<()> {
        let Some(regular) = item.extent.disk_extent() else { return Ok(()) };
        let compression = item.extent.compression;
        let has_name = stream_compression(compression, self.sectorsize).is_some();
        let encoded = self.options.compressed
            && compression != Compression::None
            && has_name
            && pipeline.version() >= StreamVersion::V2
            && regular.disk_num_bytes <= len;
        let mut done = 0;
        while done < len {
            let step = (len - done).min(PIECE);
            pipeline.data(Data {
                path: Arc::clone(&self.path),
                at: start + done,
                len: step,
                source: DataSource {
                    bytenr: regular.disk_bytenr,
                    disk_len: regular.disk_num_bytes,
                    ram_len: item.extent.ram_bytes,
                    compression,
                    offset: offset + done,
                    verify: self.verify,
                },
                encoded,
            })?;
            done += step;
        }
        Ok(())
    }
}

/// The sector that contains the end of a file; `None` if the file ends between two sectors.
pub(super) fn sector_of_end(end: u64, sectorsize: u32) -> Option<Range<u64>> {
    let sector = u64::from(sectorsize);
    (!end.is_multiple_of(sector)).then(|| end - end % sector..end.next_multiple_of(sector))
}

/// The item that maps an offset of a file; `None` for a hole without an item.
pub(super) fn extent_at(tree: &SentTree, ino: u64, offset: u64, sectorsize: u32) -> Result<Option<ExtentAt>> {
    let key = |offset| Key::new(ino, KeyType::EXTENT_DATA, offset);
    let item = tree.last_le(&key(offset), &key(0))?;
    let item = item.map(|item| decode_of(tree.id(), &item.key(), &item, sectorsize)).transpose()?;
    Ok(item.filter(|item| item.end > offset))
}

/// Compares the mappings of a file in both trees.
#[derive(Clone, Copy, Debug)]
pub(super) struct MappingComparison {
    /// Size of the file in the new tree.
    pub(super) size: u64,
    /// Whether the receiver truncates the file first, which also drops the preallocated extents past the file's new
    /// end.
    pub(super) is_cut: bool,
    pub(super) sectorsize: u32,
    /// Whether the receiver can preallocate.
    pub(super) has_fallocate: bool,
}

impl MappingComparison {
    /// The ranges of bytes that differ.
    pub(super) fn changed_ranges(&self, old: &[ExtentAt], new: &[ExtentAt]) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for op in self.plan(old, new) {
            let (Op::Hole(range) | Op::Allocate(range) | Op::Data(range, _)) = op;
            let end = range.end.min(self.size);
            match ranges.last_mut() {
                Some(last) if last.end >= range.start => last.end = last.end.max(end),
                _ if range.start < end => ranges.push(range.start..end),
                _ => {}
            }
        }
        ranges
    }

    /// Compares the mappings of a window, from one boundary of an item to the next.
    fn plan(&self, old: &[ExtentAt], new: &[ExtentAt]) -> Vec<Op> {
        let new: Vec<Arc<ExtentAt>> = new.iter().map(|item| Arc::new(item.clone())).collect();
        let ends = |item: &ExtentAt| [item.start, item.end];
        let mut points: Vec<u64> = old.iter().flat_map(ends).chain(new.iter().flat_map(|item| ends(item))).collect();
        // Ranges past the end of the file follow other rules, so the end of the file is a boundary too.
        let file_end = self.size.next_multiple_of(u64::from(self.sectorsize));
        if points.iter().any(|point| *point > file_end) && points.iter().any(|point| *point < file_end) {
            points.push(file_end);
        }
        points.sort_unstable();
        points.dedup();
        let mut ops = Vec::new();
        let (mut before, mut after) = (old.iter().peekable(), new.iter().peekable());
        for pair in points.windows(2) {
            let (start, end) = (pair[0], pair[1]);
            while before.next_if(|item| item.end <= start).is_some() {}
            while after.next_if(|item| item.end <= start).is_some() {}
            let before = before.peek().filter(|item| item.start <= start).copied();
            let after = after.peek().filter(|item| item.start <= start).copied();
            self.plan_range(before, after, start..end, &mut ops);
        }
        ops
    }

    /// Adds to `ops` the changes of a range in which each tree has at most one item.
    fn plan_range(&self, old: Option<&ExtentAt>, new: Option<&Arc<ExtentAt>>, range: Range<u64>, ops: &mut Vec<Op>) {
        let file_end = self.size.next_multiple_of(u64::from(self.sectorsize));
        let is_dropped = self.is_cut && range.start >= file_end;
        let old = old.filter(|old| !old.is_hole() && !is_dropped);
        let was_data = old.is_some_and(ExtentAt::is_data);
        match new.filter(|new| !new.is_hole()) {
            None if old.is_none() => {}
            None if range.start >= file_end && (was_data || !self.has_fallocate) => {}
            None if was_data || self.has_fallocate => join(ops, Op::Hole(range)),
            None => {}
            Some(new) if new.is_prealloc() => {
                if was_data && range.start < file_end {
                    join(ops, Op::Hole(range.clone()));
                }
                if self.has_fallocate && (was_data || old.is_none()) {
                    join(ops, Op::Allocate(range));
                }
            }
            Some(_) if range.start >= self.size => {}
            Some(new) if old.is_some_and(|old| is_equal(old, new)) => {}
            Some(new) => join(ops, Op::Data(range, Arc::clone(new))),
        }
    }
}

/// Takes the items that begin before `limit`, and leaves the parts past `limit` (E1).
fn cut(items: &mut VecDeque<ExtentAt>, limit: u64) -> Vec<ExtentAt> {
    let mut taken = Vec::with_capacity(items.len());
    while let Some(mut item) = items.pop_front() {
        if item.start >= limit {
            items.push_front(item);
            break;
        }
        if item.end > limit && !item.is_inline() {
            let rest = part_of(&item, limit..item.end);
            items.push_front(ExtentAt { start: limit, end: item.end, extent: rest });
            item.extent = part_of(&item, item.start..limit);
            item.end = limit;
            taken.push(item);
            break;
        }
        taken.push(item);
    }
    taken
}

/// Whether two items map the range of the file that both cover to the same data.
fn is_equal(old: &ExtentAt, new: &ExtentAt) -> bool {
    match (&old.extent.body, &new.extent.body) {
        (FileExtentBody::Regular(one), FileExtentBody::Regular(other)) => {
            let base = |item: &ExtentAt, offset: u64| item.start.wrapping_sub(offset);
            one.disk_bytenr == other.disk_bytenr
                && base(old, one.offset) == base(new, other.offset)
                && old.extent.compression == new.extent.compression
        }
        (FileExtentBody::Inline(one), FileExtentBody::Inline(other)) => {
            one == other
                && (old.extent.compression, old.extent.ram_bytes) == (new.extent.compression, new.extent.ram_bytes)
        }
        _ => false,
    }
}

/// Adds a change to `ops`. If the change continues the last change, extends the last change instead.
fn join(ops: &mut Vec<Op>, op: Op) {
    match (ops.last_mut(), &op) {
        (Some(Op::Hole(last)), Op::Hole(next)) | (Some(Op::Allocate(last)), Op::Allocate(next))
            if last.end == next.start =>
        {
            last.end = next.end;
        }
        (Some(Op::Data(last, item)), Op::Data(next, other)) if last.end == next.start && Arc::ptr_eq(item, other) => {
            last.end = next.end;
        }
        _ => ops.push(op),
    }
}

/// Maximum number of items of both trees in a window.
const WINDOW: usize = 1024;
/// A file in the stream's version 1 has so many holes or fewer waiting to be cloned (E3).
const HOLES_MAX: usize = 4096;
/// Maximum number of bytes of an extent that are read at once.
const PIECE: u64 = 512 << 10;
/// Mode bits of fallocate(2).
const KEEP_SIZE: u32 = 1;
const PUNCH_HOLE: u32 = 2;
