//! Inline extents: small files whose data lies inside their file extent item.

use ubtrfs_format::Generation;
use ubtrfs_format::item::{Compression, FileExtent, FileExtentBody};
use ubtrfs_format::node::item_len_max;

use crate::Fs;
use crate::compression;
use crate::inode::file_data::DataRun;
use crate::inode::state::InodeState;
use crate::writeback::delalloc::IN_PLACE;
use crate::writeback::ordered_data::Policy;

/// The data of a whole small file, maybe compressed.
pub(crate) struct InlineData {
    pub(crate) size: u64,
    kind: Compression,
    bytes: Vec<u8>,
}

impl InlineData {
    pub(crate) fn file_extent(&self) -> FileExtent {
        FileExtent {
            generation: Generation(0),
            ram_bytes: self.size,
            compression: self.kind,
            encryption: 0,
            other_encoding: 0,
            body: FileExtentBody::Inline(self.bytes.clone()),
        }
    }
}

impl Fs {
    /// Returns the file's data as an inline extent, if `runs` hold the whole file and the file is small enough.
    pub(crate) fn inline_data(&self, state: &InodeState, runs: &[DataRun], policy: &Policy) -> Option<InlineData> {
        let size = state.item.size;
        let sectorsize = u64::from(self.geometry.sectorsize);
        let [run] = runs else { return None };
        let whole = run.offset == 0 && run.len_bytes == sectorsize && size > 0 && size <= sectorsize;
        if !whole || state.data.has_dirty() || state.has_flags(IN_PLACE) {
            return None;
        }
        let most = self.max_inline();
        let pieces = run.pieces(0..size);
        let plain: &[u8] = pieces.first().copied().unwrap_or_default();
        if let Some(method) = policy.compress
            && let Some(bytes) =
                compression::compress(method, plain, most.min(plain.len().saturating_sub(1)), sectorsize as usize)
        {
            return Some(InlineData { size, kind: method.kind, bytes });
        }
        (plain.len() <= most).then(|| InlineData { size, kind: Compression::None, bytes: plain.to_vec() })
    }

    /// Maximum length of an inline extent: the limit of the mount option, but less than a sector, and no more than an
    /// empty leaf has room for.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "a leaf has more room than a header, and a sector more than a byte"
    )]
    pub(crate) fn max_inline(&self) -> usize {
        let leaf = item_len_max(self.geometry.nodesize as usize) - FileExtent::HEADER_SIZE;
        leaf.min(self.options.max_inline as usize).min(self.geometry.sectorsize as usize - 1)
    }
}
