//! The extents of a file, as FIEMAP reports them.

use ubtrfs_format::Logical;
use ubtrfs_format::item::{Compression, FileExtentBody};

use crate::file::read::check_regular;
use crate::items::file_extent::extents_in;
use crate::{Fs, InodeId, Result};

/// The kind of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileExtentKind {
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
pub struct FileExtentInfo {
    /// Offset in the file.
    pub offset: u64,
    /// Length in the file, in bytes.
    pub len_bytes: u64,
    /// Its kind.
    pub kind: FileExtentKind,
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
    pub fn extents(&self, id: InodeId) -> Result<Vec<FileExtentInfo>> {
        Ok(self.extents_from(id, 0, usize::MAX)?.0)
    }

    /// Returns a part of the result of [`Fs::extents`]: up to `limit` extents of the file's items that end after
    /// `from`, then the pending ranges in the same part of the file. Also returns the offset at which to continue if
    /// there may be more.
    pub fn extents_from(&self, id: InodeId, from: u64, limit: usize) -> Result<(Vec<FileExtentInfo>, Option<u64>)> {
        let inode = self.inode(id)?;
        let state = inode.read()?;
        check_regular(&state)?;
        let items = extents_in(&inode.home.tree, id.ino, from..u64::MAX, limit, self.geometry.sectorsize)?;
        let next = items.last().filter(|_| items.len() >= limit).map(|last| last.end);
        let mut extents = Vec::with_capacity(items.len());
        for item in &items {
            let (kind, regular) = match &item.extent.body {
                FileExtentBody::Inline(_) => (FileExtentKind::Inline, None),
                FileExtentBody::Regular(regular) if regular.disk_bytenr.0 == 0 => (FileExtentKind::Hole, None),
                FileExtentBody::Regular(regular) => (FileExtentKind::Data, Some(regular)),
                FileExtentBody::Prealloc(regular) => (FileExtentKind::Prealloc, Some(regular)),
            };
            extents.push(FileExtentInfo {
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
        extents.extend(pending.into_iter().map(|range| FileExtentInfo {
            offset: range.start,
            len_bytes: range.end.saturating_sub(range.start),
            kind: FileExtentKind::Delalloc,
            disk_bytenr: Logical(0),
            disk_len_bytes: 0,
            extent_offset: 0,
            compression: Compression::None,
        }));
        Ok((extents, next))
    }
}
