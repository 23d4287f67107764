//! The extent tree: extents, and the references that extent items list.
//!
//! Invariants:
//! - I1. Data extents are kept in order, 16 bytes each; tree blocks are in the block table.
//! - I2. When an extent item is read, the references that it lists are added to the ledger. This module compares only
//!   the number of these references with the extent item's reference count; `extent_detail` compares the references
//!   themselves.

use ubtrfs_format::codec::Reader as FieldReader;
use ubtrfs_format::hash::extent_data_ref_hash;
use ubtrfs_format::item::{ExtentDataRef, ExtentFlags, ExtentItem, InlineRef, TreeBlockInfo};
use ubtrfs_format::{Key, KeyType, RootId};

use crate::block_table::{BY_OWNER, FULL, LOST, REACHED_IN_ROUND, RECORDED, RELOC, TreeBlock};
use crate::checker::{AGAIN_PER_BLOCK, Checker, REREADS_MIN};
use crate::fingerprint::Fact;
use crate::problem::{Code, Place};
use crate::raw::{u8_at, u64_at};
use crate::walk::{Leaf, TreeRoot, WalkEvent, block_fact, is_full, length_fact};

/// A data extent, 16 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedExtent {
    pub(crate) bytenr: u64,
    pub(crate) sectors: u32,
}

impl PackedExtent {
    pub(crate) fn end(&self, sectorsize: u64) -> u64 {
        self.bytenr.saturating_add(u64::from(self.sectors).saturating_mul(sectorsize))
    }
}

/// All data extents.
#[derive(Debug, Default)]
pub(crate) struct DataExtents {
    pub(crate) list: Vec<PackedExtent>,
    complete: bool,
    /// Whether no more extents may be added to `list`: set during the second walk, which reads the extent tree again.
    frozen: bool,
}

/// A data extent or a tree block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExtentSummary {
    pub(crate) bytenr: u64,
    pub(crate) len_bytes: u64,
    pub(crate) is_data: bool,
    /// The owner of a tree block, if a walk reached the block.
    pub(crate) owner: Option<u64>,
}

/// The state of reading the extent tree.
#[derive(Default)]
struct Loader {
    blocks: Vec<TreeBlock>,
    current: Option<CurrentExtent>,
    end_before: u64,
}

struct CurrentExtent {
    bytenr: u64,
    len_bytes: u64,
    is_data: bool,
    refs: u64,
    sum: u64,
    place: Place,
}

impl<'a> Checker<'a> {
    /// Reads the extent tree, and the block group items from the extent tree or the block group tree.
    pub(crate) fn extent_tree(&mut self) {
        let mut loader = Loader::default();
        let root = self.needed_root(RootId::EXTENT_TREE);
        let complete = root.is_some_and(|root| {
            self.walk_tree(root, &mut |checker, event| match event {
                WalkEvent::Leaf(leaf) => {
                    checker.extent_leaf(leaf, &mut loader);
                    checker.groups.add(leaf);
                }
                WalkEvent::Known(_) => {}
                WalkEvent::Gap => loader.current = None,
            })
        });
        self.finish_extent(&mut loader);
        self.data.complete = complete;
        self.groups.complete = complete;
        self.block_group_tree();
        self.groups.list.sort_by_key(|group| group.start);
        self.data.list.sort_by_key(|extent| extent.bytenr);
        self.again_max = REREADS_MIN.max((loader.blocks.len() as u64).saturating_mul(AGAIN_PER_BLOCK));
        self.stats.tree_blocks = loader.blocks.len() as u64;
        self.stats.data_extents = self.data.list.len() as u64;
        self.stats.bytes_used = self.sb.bytes_used;
        let early = self.blocks.load(loader.blocks);
        for (recorded, seen) in early {
            self.compare_early(&recorded, &seen);
        }
    }

    /// Compares the extent item of a block with the record of a walk that reached the block before the extent tree was
    /// read.
    fn compare_early(&mut self, recorded: &TreeBlock, seen: &TreeBlock) {
        let place = Place::block(RootId(seen.owner), seen.bytenr);
        if seen.flags & LOST == 0 && (recorded.level, recorded.generation) != (seen.level, seen.generation) {
            let text = format!(
                "the extent item has level {} and generation {}, the block level {} and generation {}",
                recorded.level, recorded.generation, seen.level, seen.generation
            );
            self.sink.report(Code::ExtentInfo, place, text);
        }
    }

    /// Whether parts of the extent tree are unknown, so that nothing can be concluded from missing items.
    pub(crate) fn extents_have_gaps(&self) -> bool {
        !self.data.complete
    }

    /// Removes duplicate data extents, which only a crafted extent tree has. If there were any, the extent tree counts
    /// as incomplete.
    pub(crate) fn load_extents(&mut self) {
        let before = self.data.list.len();
        self.data.list.dedup_by_key(|extent| extent.bytenr);
        if before != self.data.list.len() {
            self.data.complete = false;
        }
    }

    /// Reads the extent tree again, and adds the references that it lists to the ledger.
    pub(crate) fn reread_extents(&mut self, root: &TreeRoot) {
        let mut loader = Loader::default();
        self.data.frozen = true;
        self.walk(root, &mut |checker, event| {
            if let WalkEvent::Leaf(leaf) = event {
                checker.extent_leaf(leaf, &mut loader);
            }
        });
        self.data.frozen = false;
    }

    fn extent_leaf(&mut self, leaf: &Leaf<'_>, loader: &mut Loader) {
        for (slot, key, data) in leaf.items() {
            match key.item_type {
                KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => {
                    self.finish_extent(loader);
                    self.begin_extent(leaf, slot, key, data, loader);
                }
                KeyType::TREE_BLOCK_REF
                | KeyType::SHARED_BLOCK_REF
                | KeyType::EXTENT_DATA_REF
                | KeyType::SHARED_DATA_REF => self.keyed_ref(leaf, slot, key, data, loader),
                _ => {}
            }
        }
    }

    fn begin_extent(&mut self, leaf: &Leaf<'_>, slot: usize, key: Key, data: &[u8], loader: &mut Loader) {
        let place = leaf.place(slot);
        let (Some(refs), Some(generation), Some(flags)) = (u64_at(data, 0), u64_at(data, 8), u64_at(data, 16)) else {
            return;
        };
        let is_data = ExtentFlags::from_bits_retain(flags).contains(ExtentFlags::DATA);
        let is_skinny = key.item_type == KeyType::METADATA_ITEM;
        let len_bytes = if is_data { key.offset } else { self.nodesize as u64 };
        if key.objectid < loader.end_before {
            let text = format!("extent {} of {len_bytes} bytes overlaps the extent before", key.objectid);
            self.sink.report(Code::ExtentOverlap, place, text);
        }
        loader.end_before = loader.end_before.max(key.objectid.saturating_add(len_bytes));
        let mut current = CurrentExtent { bytenr: key.objectid, len_bytes, is_data, refs, sum: 0, place };
        let mut at = ExtentItem::HEADER_SIZE;
        if is_data {
            let sectors = len_bytes.checked_div(self.sectorsize).unwrap_or(u64::MAX);
            let sectors = u32::try_from(sectors).unwrap_or(u32::MAX);
            if !self.data.frozen {
                self.data.list.push(PackedExtent { bytenr: key.objectid, sectors });
            }
        } else {
            let level = match is_skinny {
                true => u8::try_from(key.offset).unwrap_or(u8::MAX),
                false => u8_at(data, ExtentItem::HEADER_SIZE + Key::SIZE).unwrap_or(u8::MAX),
            };
            if !is_skinny {
                at = ExtentItem::HEADER_SIZE + TreeBlockInfo::SIZE;
            }
            let flags = if is_full(flags) { FULL } else { 0 };
            let bytenr = key.objectid;
            loader.blocks.push(TreeBlock { bytenr, generation, level, flags, ..TreeBlock::default() });
        }
        let mut reader = FieldReader::new("ExtentItem", data.get(at..).unwrap_or_default());
        while !reader.is_empty() {
            let Ok(inline) = InlineRef::read_inline(&mut reader) else { break };
            self.book_ref(leaf, slot, &mut current, &inline);
            if is_data && !self.data.frozen {
                self.quota.note_owner(&inline, generation, len_bytes);
            }
        }
        loader.current = Some(current);
    }

    fn keyed_ref(&mut self, leaf: &Leaf<'_>, slot: usize, key: Key, data: &[u8], loader: &mut Loader) {
        let Some(current) = loader.current.as_mut().filter(|current| current.bytenr == key.objectid) else {
            let text = format!("reference to extent {}, which has no extent item", key.objectid);
            return self.sink.report(Code::ExtentRef, leaf.place(slot), text);
        };
        // Linux never puts several data references into one item, but the format allows it.
        let size = if key.item_type == KeyType::EXTENT_DATA_REF { ExtentDataRef::SIZE } else { data.len().max(1) };
        let mut pieces = data.chunks(size);
        while let Some(piece) = pieces.next().or(data.is_empty().then_some(&[][..])) {
            let Ok(reference) = InlineRef::decode_keyed(&key, piece) else { break };
            if let InlineRef::ExtentData(of) = &reference {
                // The key's offset should be this hash. If another item already has this offset, Linux uses the next
                // free offset.
                let hash = extent_data_ref_hash(of.root, of.objectid, of.offset);
                if key.offset.wrapping_sub(hash) > COLLISIONS_MAX {
                    let text =
                        format!("the key of a data reference has offset {}, expected the hash {hash}", key.offset);
                    self.sink.report(Code::ExtentRef, leaf.place(slot), text);
                }
            }
            self.book_ref(leaf, slot, current, &reference);
            if data.is_empty() {
                break;
            }
        }
    }

    fn book_ref(&mut self, leaf: &Leaf<'_>, slot: usize, current: &mut CurrentExtent, reference: &InlineRef) {
        let count = i64::from(reference.count());
        let at = (leaf.tree.0, leaf.bytenr, slot);
        current.sum = current.sum.saturating_add(u64::from(reference.count()));
        let fact = match reference {
            InlineRef::ExtentData(ExtentDataRef { root, objectid, offset, .. }) => Fact {
                subject: current.bytenr,
                kind: KeyType::EXTENT_DATA_REF.0.into(),
                parts: [root.0, objectid.0, *offset],
            },
            InlineRef::Owner(_) => return,
            other => block_fact(current.bytenr, other.key_type(), other.key_offset()),
        };
        self.refs.add(fact, count, at);
        if current.is_data {
            self.refs.add(length_fact(current.bytenr, current.len_bytes), count, at);
        }
    }

    fn finish_extent(&mut self, loader: &mut Loader) {
        let Some(current) = loader.current.take() else { return };
        if current.refs != current.sum {
            let text =
                format!("extent {} counts {} references, but lists {}", current.bytenr, current.refs, current.sum);
            self.sink.report(Code::ExtentCount, current.place, text);
        }
    }

    /// Calls `each` with every extent in order, tree blocks and data together.
    pub(crate) fn for_each_extent(&mut self, each: &mut dyn FnMut(&mut Self, &ExtentSummary)) {
        let data = std::mem::take(&mut self.data.list);
        let blocks = self.blocks.take_recorded();
        let (mut data_at, mut block_at) = (0_usize, 0_usize);
        loop {
            let (next_data, next_block) = (data.get(data_at), blocks.get(block_at));
            let extent = match (next_data, next_block) {
                (None, None) => break,
                (Some(next), block) if block.is_none_or(|block| next.bytenr <= block.bytenr) => {
                    data_at = data_at.saturating_add(1);
                    let len_bytes = u64::from(next.sectors).saturating_mul(self.sectorsize);
                    ExtentSummary { bytenr: next.bytenr, len_bytes, is_data: true, owner: None }
                }
                (_, Some(block)) => {
                    block_at = block_at.saturating_add(1);
                    let owner = (block.flags & REACHED_IN_ROUND != 0).then_some(block.owner);
                    ExtentSummary { bytenr: block.bytenr, len_bytes: self.nodesize as u64, is_data: false, owner }
                }
                (Some(_), None) => break,
            };
            each(self, &extent);
        }
        self.data.list = data;
        self.blocks.put_recorded(blocks);
    }

    /// Checks that every tree block with an extent item was reached and has the right full backref flag, and that every
    /// reached block has an extent item.
    pub(crate) fn compare_blocks(&mut self) {
        let mut told = Vec::new();
        for block in self.blocks.recorded() {
            let reached = block.flags & (REACHED_IN_ROUND | LOST) != 0;
            if !reached && !self.has_gaps {
                told.push((Code::ExtentUnused, block.bytenr, "nothing refers to this tree block".to_owned()));
            }
            let is_full = block.flags & FULL != 0;
            // In two cases, a block may have the full backref flag although its owner still reaches the block. A
            // balance shares blocks with a relocation tree for a while, and leaves the flag on blocks that their owner
            // keeps. The deletion of a subvolume sets the flag on shared blocks before it drops its references to these
            // blocks.
            let owner = self.roots.trees.get(&block.owner);
            let may_be_full = owner.is_some_and(|root| root.refs == 0 || block.generation <= root.last_snapshot.0);
            let is_wrong = match block.flags & BY_OWNER != 0 {
                true => is_full && !may_be_full,
                false => !is_full,
            };
            if block.flags & REACHED_IN_ROUND != 0 && block.flags & RELOC == 0 && is_wrong && !self.has_gaps {
                let text = match is_full {
                    true => "has the full backref flag, but was never shared",
                    false => "lacks the full backref flag, but its owner does not reach it",
                };
                told.push((Code::ExtentFlags, block.bytenr, format!("tree block of tree {} {text}", block.owner)));
            }
        }
        for block in self.blocks.unrecorded().filter(|block| block.flags & RECORDED == 0) {
            if self.data.complete && block.flags & REACHED_IN_ROUND != 0 {
                let text = format!("a block of tree {} on level {} has no extent item", block.owner, block.level);
                told.push((Code::ExtentMissing, block.bytenr, text));
            }
        }
        told.sort_by_key(|(_, bytenr, _)| *bytenr);
        for (code, bytenr, text) in told {
            self.sink.report(code, Place { bytenr: Some(bytenr), ..Place::tree(RootId::EXTENT_TREE) }, text);
        }
    }
}

/// Maximum distance between the hash of a data reference and the offset in the reference's key.
const COLLISIONS_MAX: u64 = 1 << 12;

impl DataExtents {
    /// Whether there is a data extent with exactly this range.
    pub(crate) fn contains(&self, bytenr: u64, len_bytes: u64, sectorsize: u64) -> bool {
        let found = self.list.binary_search_by_key(&bytenr, |extent| extent.bytenr);
        let found = found.ok().and_then(|at| self.list.get(at));
        found.is_some_and(|extent| u64::from(extent.sectors).saturating_mul(sectorsize) == len_bytes)
    }

    /// Whether a range overlaps a data extent.
    pub(crate) fn overlaps(&self, bytenr: u64, len_bytes: u64, sectorsize: u64) -> bool {
        let at = self.list.partition_point(|extent| extent.bytenr < bytenr.saturating_add(len_bytes));
        let before = at.checked_sub(1).and_then(|at| self.list.get(at));
        before.is_some_and(|extent| extent.end(sectorsize) > bytenr)
    }
}
