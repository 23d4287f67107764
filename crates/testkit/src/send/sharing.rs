//! Compares how two chains of snapshots store their files: where holes are, and which files share a block.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use anyhow::{Context, Result};
use ubtrfs_format::item::Compression;
use ubtrfs_fs::{ExtentKind, Fs};

use super::open_at;
use crate::fs_target::walk_fs;
use crate::target::NodeKind;
use crate::tree_entry::show;

/// The differences between two chains.
#[derive(Clone, Debug, Default)]
pub struct Differs {
    /// Blocks that are holes in one chain only.
    pub holes: Vec<String>,
    /// Preallocated blocks of one chain only.
    pub prealloc: Vec<String>,
    /// Blocks that are shared in the first chain but not in the second chain.
    pub unshared: Vec<String>,
    /// Number of blocks in `unshared`.
    pub nr_unshared: usize,
}

impl Differs {
    /// Whether anything differs.
    pub fn is_any(&self) -> bool {
        !self.holes.is_empty() || !self.prealloc.is_empty() || self.nr_unshared > 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Data(Place),
    Inline,
    Prealloc,
}

/// The address of a block and 0, or the address of a compressed extent and the block's offset in the extent's data.
type Place = (u64, u64);
type Blocks = BTreeMap<u64, Block>;

/// A snapshot, and the snapshots from which its stream may clone.
pub type Sent<'n> = (&'n str, Vec<&'n str>);

/// Compares these snapshots in two images. Without `prealloc`, preallocated blocks count as holes. The partial block
/// at the end of a file is not compared. One other block of each file may be unshared: when Linux changes a file's
/// size or preallocates, it writes zeros into the block at the former end, so this block may be a copy.
pub fn compare_extents(source: &Path, target: &Path, sent: &[Sent<'_>], prealloc: bool) -> Result<Differs> {
    let mut differs = Differs::default();
    // For each snapshot: the source's blocks, each with its places in the target.
    let mut places: HashMap<&str, HashMap<Place, BTreeSet<Place>>> = HashMap::new();
    for (name, others) in sent {
        let options = format!("subvol={name}");
        let (from, to) = (open_at(source, &options)?, open_at(target, &options)?);
        let mut here: HashMap<Place, BTreeSet<Place>> = HashMap::new();
        for entry in walk_fs(&from)?.into_iter().filter(|entry| entry.kind == NodeKind::File) {
            let (one, other) = (blocks(&from, &entry.path)?, blocks(&to, &entry.path)?);
            let what = |at: u64| format!("{name}/{} block {at} of {}", show(&entry.path), entry.size);
            let mut unshared = Vec::new();
            let keys: BTreeSet<u64> = one.keys().chain(other.keys()).copied().collect();
            for at in keys.into_iter().filter(|at| (at + 1) * BLOCK <= entry.size) {
                match (one.get(&at), other.get(&at)) {
                    (before @ (Some(Block::Prealloc) | None), after @ (Some(Block::Prealloc) | None)) => {
                        differs.prealloc.extend((prealloc && before != after).then(|| what(at)));
                    }
                    (Some(Block::Prealloc) | None, _) | (_, Some(Block::Prealloc) | None) => {
                        differs.holes.push(what(at));
                    }
                    (Some(Block::Data(block)), Some(Block::Data(place))) => {
                        let known = others.iter().filter_map(|other| places.get(other)?.get(block));
                        let known: BTreeSet<Place> = known.flatten().copied().collect();
                        let mine = here.entry(*block).or_default();
                        let is_shared = known.contains(place) || mine.contains(place);
                        let is_first = known.is_empty() && mine.is_empty();
                        if !is_shared && !is_first {
                            unshared.push(what(at));
                        }
                        mine.insert(*place);
                    }
                    _ => {}
                }
            }
            if unshared.len() > 1 {
                differs.nr_unshared += unshared.len();
                differs.unshared.extend(unshared.into_iter().take(4));
            }
        }
        places.insert(name, here);
        from.close()?;
        to.close()?;
    }
    differs.holes.truncate(20);
    differs.prealloc.truncate(20);
    Ok(differs)
}

/// Returns the blocks of a file, by their index in the file.
fn blocks(fs: &Fs, path: &[u8]) -> Result<Blocks> {
    let id = fs.lookup_path(path, false).with_context(|| show(path))?.id;
    let mut blocks = Blocks::new();
    for extent in fs.extents(id)? {
        for index in 0..extent.len_bytes.div_ceil(BLOCK) {
            let inside = extent.extent_offset + index * BLOCK;
            let block = match extent.kind {
                ExtentKind::Data if extent.compression == Compression::None => {
                    Block::Data((extent.disk_bytenr.0 + inside, 0))
                }
                ExtentKind::Data => Block::Data((extent.disk_bytenr.0, inside)),
                ExtentKind::Inline => Block::Inline,
                ExtentKind::Prealloc => Block::Prealloc,
                ExtentKind::Hole | ExtentKind::Delalloc => continue,
            };
            blocks.insert(extent.offset / BLOCK + index, block);
        }
    }
    Ok(blocks)
}

const BLOCK: u64 = 4096;
