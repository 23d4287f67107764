//! What a file consists of, as FIEMAP would tell.

use ubtrfs_format::Logical;
use ubtrfs_format::item::{Compression, FileExtentBody};

use crate::file_extent_ops::extents_in;
use crate::read::check_regular;
use crate::{Fs, InodeId, Result};

/// What kind of extent a part of a file is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Written.
    Data,
    /// Inside the tree.
    Inline,
    /// Allocated, reads as zeros.
    Prealloc,
    /// An explicit hole.
    Hole,
    /// In memory, without an extent yet.
    Delalloc,
}

/// One extent of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentInfo {
    /// Offset in the file.
    pub offset: u64,
    /// Bytes of the file.
    pub len_bytes: u64,
    /// What it is.
    pub kind: ExtentKind,
    /// Where the whole extent is on disk; 0 for what has no extent.
    pub disk_bytenr: Logical,
    /// Bytes of the whole extent on disk.
    pub disk_len_bytes: u64,
    /// Where in the (decompressed) extent the file's part begins.
    pub extent_offset: u64,
    /// How it is compressed.
    pub compression: Compression,
}

impl Fs {
    /// The file's extents in order: those of its items, then what is pending. Holes have none, unless the filesystem
    /// makes them explicit.
    pub fn extents(&self, id: InodeId) -> Result<Vec<ExtentInfo>> {
        let inode = self.inode(id)?;
        let state = inode.read()?;
        check_regular(&state)?;
        let items = extents_in(&inode.home.tree, id.ino, 0..u64::MAX, usize::MAX, self.geometry.sectorsize)?;
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
        extents.extend(state.data.pending_in(0..u64::MAX).into_iter().map(|range| ExtentInfo {
            offset: range.start,
            len_bytes: range.end - range.start,
            kind: ExtentKind::Delalloc,
            disk_bytenr: Logical(0),
            disk_len_bytes: 0,
            extent_offset: 0,
            compression: Compression::None,
        }));
        Ok(extents)
    }
}
