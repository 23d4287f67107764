//! Compares how two chains of snapshots store their files: where holes are, and which files share a block.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use anyhow::{Context, Result};
use ubtrfs_format::item::Compression;
use ubtrfs_fs::{FileExtentKind, Fs};

use crate::fs_target::walk_fs_from;
use crate::target::NodeKind;
use crate::tree_entry::{join, show};

/// The differences between two chains.
#[derive(Clone, Debug, Default)]
pub struct Differs {
    /// Blocks that have data in one chain, and are holes or preallocated in the other; at most 20.
    pub holes: Vec<String>,
    /// Blocks that are preallocated in one chain, and holes in the other; at most 20.
    pub prealloc: Vec<String>,
    /// Blocks that are shared in the first chain and not in the second one; at most four of each file.
    pub unshared: Vec<String>,
    /// The number of all blocks that are shared in the first chain and not in the second one.
    pub nr_unshared: usize,
}

impl Differs {
    /// Whether anything differs.
    pub fn is_any(&self) -> bool {
        !self.holes.is_empty() || !self.prealloc.is_empty() || self.nr_unshared > 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Block {
    Data(Place),
    Inline,
    Prealloc,
}

/// The place of a block on disk: the block's address and 0, or for compressed data, the address of the extent and the
/// block's offset in the decompressed data.
pub(super) type Place = (u64, u64);
pub(super) type Blocks = BTreeMap<u64, Block>;

/// The place of a block of a sent file, and the number of the block's bytes that are before the end of the file. A
/// block in which a file ends can be cloned only to the end of another file.
type SourceBlock = (Place, u64);

/// A snapshot.
#[derive(Clone, Debug)]
pub struct Sent<'n> {
    /// The name of the snapshot.
    pub name: &'n str,
    /// The snapshots from which the stream of this snapshot may clone.
    pub others: Vec<&'n str>,
    /// The allowed differences.
    pub tolerance: Tolerance,
}

/// The differences that are allowed between a snapshot and the received snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tolerance {
    /// Preallocated blocks may be holes.
    pub prealloc: bool,
    /// The block in which a file ends may be unshared. A stream of version 1 makes a hole by cloning a hole from past
    /// the end of the file. For this the receiver extends the file, which rewrites the block in which the file ended.
    pub tails: bool,
    /// The block in which a file ends may also be data instead of a hole, and one more block of each file may be
    /// unshared: when Linux changes a file's size or preallocates, it writes zeros into the blocks at the new end and
    /// at the former end.
    pub ends: bool,
}

/// Compares the snapshots `sent` in the filesystem `source` with the received snapshots of equal names in `target`.
pub fn compare_extents(source: &Fs, target: &Fs, sent: &[Sent<'_>]) -> Result<Differs> {
    let mut differs = Differs::default();
    // For each snapshot: maps each block in the source to the places where the target stores it.
    let mut places: HashMap<&str, HashMap<SourceBlock, BTreeSet<Place>>> = HashMap::new();
    for Sent { name, others, tolerance } in sent {
        let mut here: HashMap<SourceBlock, BTreeSet<Place>> = HashMap::new();
        let root = source.lookup_path(name.as_bytes(), false).with_context(|| (*name).to_owned())?.id;
        for entry in walk_fs_from(source, root)?.into_iter().filter(|entry| entry.kind == NodeKind::File) {
            let path = join(name.as_bytes(), &entry.path);
            let (one, other) = (blocks(source, &path)?, blocks(target, &path)?);
            let what = |at: u64| format!("{} block {at} of {}", show(&path), entry.size);
            let mut unshared = Vec::new();
            let keys: BTreeSet<u64> = one.keys().chain(other.keys()).copied().collect();
            for at in keys.into_iter().filter(|at| *at * BLOCK < entry.size) {
                let used = (entry.size - at * BLOCK).min(BLOCK);
                if tolerance.ends && used < BLOCK {
                    continue;
                }
                match (one.get(&at), other.get(&at)) {
                    (before @ (Some(Block::Prealloc) | None), after @ (Some(Block::Prealloc) | None)) => {
                        differs.prealloc.extend((!tolerance.prealloc && before != after).then(|| what(at)));
                    }
                    (Some(Block::Prealloc) | None, _) | (_, Some(Block::Prealloc) | None) => {
                        differs.holes.push(what(at));
                    }
                    (Some(Block::Data(block)), Some(Block::Data(place))) => {
                        let block = (*block, used);
                        let known = others.iter().filter_map(|other| places.get(other)?.get(&block));
                        let known: BTreeSet<Place> = known.flatten().copied().collect();
                        // If the file ends in this block, the block may be unshared (`tails`). Even then, record
                        // the place, because later snapshots may share the block.
                        let is_tolerated = tolerance.tails && used < BLOCK;
                        let mine = here.entry(block).or_default();
                        let is_shared = known.contains(place) || mine.contains(place);
                        let is_first = known.is_empty() && mine.is_empty();
                        if !is_shared && !is_first && !is_tolerated {
                            unshared.push(what(at));
                        }
                        mine.insert(*place);
                    }
                    _ => {}
                }
            }
            if unshared.len() > usize::from(tolerance.ends) {
                differs.nr_unshared += unshared.len();
                differs.unshared.extend(unshared.into_iter().take(4));
            }
        }
        places.insert(name, here);
    }
    differs.holes.truncate(20);
    differs.prealloc.truncate(20);
    Ok(differs)
}

/// Returns the blocks of a file, by their index in the file.
pub(super) fn blocks(fs: &Fs, path: &[u8]) -> Result<Blocks> {
    let id = fs.lookup_path(path, false).with_context(|| show(path))?.id;
    let mut blocks = Blocks::new();
    for extent in fs.extents(id)? {
        for index in 0..extent.len_bytes.div_ceil(BLOCK) {
            let inside = extent.extent_offset + index * BLOCK;
            let block = match extent.kind {
                FileExtentKind::Data if extent.compression == Compression::None => {
                    Block::Data((extent.disk_bytenr.0 + inside, 0))
                }
                FileExtentKind::Data => Block::Data((extent.disk_bytenr.0, inside)),
                FileExtentKind::Inline => Block::Inline,
                FileExtentKind::Prealloc => Block::Prealloc,
                FileExtentKind::Hole | FileExtentKind::Delalloc => continue,
            };
            blocks.insert(extent.offset / BLOCK + index, block);
        }
    }
    Ok(blocks)
}

pub(super) const BLOCK: u64 = 4096;
