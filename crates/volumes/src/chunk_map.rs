//! The chunk map: logical addresses to chunks.
//!
//! Invariants:
//! - I1. Chunks in the map do not overlap, and each passed [`Geometry::of`].
//! - I2. `next_logical` never goes down: an address of a removed chunk is not used again while the filesystem is open,
//!   so nothing cached by address can be mistaken for newer content.
//!
//! Lock order: the map's lock is a leaf; nothing is called under it.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;
use ubtrfs_format::item::ChunkItem;
use ubtrfs_format::{Corrupt, FormatError, Logical, Result};

use crate::profile::Geometry;

/// A chunk in the map.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) start: u64,
    pub(crate) geometry: Geometry,
    pub(crate) item: Arc<ChunkItem>,
}

impl Chunk {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.item.length
    }
}

#[derive(Debug, Default)]
struct Inner {
    chunks: BTreeMap<u64, Arc<Chunk>>,
    next_logical: u64,
}

/// All chunks by their start.
#[derive(Debug, Default)]
pub(crate) struct ChunkMap {
    inner: RwLock<Inner>,
}

fn conflict(logical: u64, expected: &'static str) -> Corrupt {
    let cause = FormatError::Value { what: "chunk", field: "logical", value: logical, expected };
    Corrupt::new(cause).at(Logical(logical))
}

impl ChunkMap {
    /// Adds a chunk (I1). The same chunk again is fine; one that overlaps another is not.
    pub(crate) fn add(&self, logical: Logical, item: ChunkItem, sectorsize: u32) -> Result<()> {
        let geometry = Geometry::of(logical.0, &item, sectorsize).map_err(|cause| Corrupt::new(cause).at(logical))?;
        let chunk = Chunk { start: logical.0, geometry, item: Arc::new(item) };
        let end = chunk.end();
        let mut inner = self.inner.write();
        if let Some(before) = inner.chunks.range(..end).next_back().map(|(_, before)| before) {
            if before.start == chunk.start && before.item == chunk.item {
                return Ok(());
            }
            if before.end() > chunk.start {
                return Err(conflict(chunk.start, "expected no overlap with another chunk").into());
            }
        }
        inner.next_logical = inner.next_logical.max(end);
        inner.chunks.insert(chunk.start, Arc::new(chunk));
        Ok(())
    }

    pub(crate) fn remove(&self, logical: Logical) -> Option<Arc<Chunk>> {
        self.inner.write().chunks.remove(&logical.0)
    }

    /// The chunk that covers this address.
    pub(crate) fn get(&self, logical: Logical) -> Option<Arc<Chunk>> {
        let inner = self.inner.read();
        let (_, chunk) = inner.chunks.range(..=logical.0).next_back()?;
        (logical.0 < chunk.end()).then(|| chunk.clone())
    }

    pub(crate) fn all(&self) -> Vec<Arc<Chunk>> {
        self.inner.read().chunks.values().cloned().collect()
    }

    /// Where a new chunk goes: behind every chunk that was ever in the map (I2).
    pub(crate) fn next_logical(&self) -> u64 {
        self.inner.read().next_logical
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ubtrfs_format::item::{BlockGroupFlags, Stripe};
    use ubtrfs_format::{DevId, Physical};
    use uuid::Uuid;

    fn item(length: u64) -> ChunkItem {
        ChunkItem {
            length,
            owner: 2,
            stripe_len: 65536,
            flags: BlockGroupFlags::DATA,
            io_align: 65536,
            io_width: 65536,
            sector_size: 4096,
            sub_stripes: 1,
            stripes: vec![Stripe { devid: DevId(1), offset: Physical(1 << 20), dev_uuid: Uuid::nil() }],
        }
    }

    #[test]
    fn finds_the_covering_chunk_and_refuses_overlap() {
        let map = ChunkMap::default();
        map.add(Logical(1 << 20), item(1 << 20), 4096).unwrap();
        map.add(Logical(1 << 20), item(1 << 20), 4096).unwrap();
        map.add(Logical(4 << 20), item(1 << 20), 4096).unwrap();
        for overlap in [(1 << 20, 2 << 20), (0, 2 << 20), (1 << 20, 4096), (3 << 20, 2 << 20), (0, 1 << 30)] {
            assert!(map.add(Logical(overlap.0), item(overlap.1), 4096).is_err(), "{overlap:?}");
        }
        map.add(Logical(2 << 20), item(2 << 20), 4096).unwrap();
        let start = |logical| map.get(Logical(logical)).map(|chunk| chunk.start);
        assert_eq!(start(0), None);
        assert_eq!(start(1 << 20), Some(1 << 20));
        assert_eq!(start((4 << 20) - 1), Some(2 << 20));
        assert_eq!(start(5 << 20), None);
    }

    #[test]
    fn addresses_of_removed_chunks_are_not_used_again() {
        let map = ChunkMap::default();
        map.add(Logical(1 << 20), item(1 << 20), 4096).unwrap();
        map.remove(Logical(1 << 20)).unwrap();
        assert_eq!(map.next_logical(), 2 << 20);
        assert!(map.all().is_empty());
    }
}
