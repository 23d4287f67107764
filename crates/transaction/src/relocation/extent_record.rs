//! [`ExtentRecord`]: an extent with all of its references, inline and keyed, as the extent tree holds them.

use std::ops::Range;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::ExtentFlags;
use ubtrfs_format::{Corrupt, FormatError, Generation, Key, KeyType, Logical, RootId};
use ubtrfs_space::{Extent, ExtentKind, RefKey};
use ubtrfs_tree::{Cursor, NodeSource, RootPtr};

use crate::backref::refs::{ExtentRefs, is_keyed_ref, read_refs};

/// An extent of the extent tree.
#[derive(Clone, Debug)]
pub(crate) struct ExtentRecord {
    pub(crate) extent: Extent,
    /// The level of a tree block; `None` for data.
    pub(crate) level: Option<u8>,
    /// The transaction that allocated the extent, which is also the generation of a tree block.
    pub(crate) generation: Generation,
    pub(crate) flags: ExtentFlags,
    /// The tree that allocated a data extent, if simple quotas recorded it.
    pub(crate) owner: Option<RootId>,
    /// References with their counts, without the owner reference of simple quotas.
    pub(crate) refs: Vec<(RefKey, u64)>,
}

impl ExtentRecord {
    /// Whether the references to the block's children name the block's address.
    pub(crate) fn has_full_backrefs(&self) -> bool {
        self.flags.contains(ExtentFlags::FULL_BACKREF)
    }

    /// The kind of extent that the extent tree records for a copy of this extent.
    pub(crate) fn kind(&self, first_key: Key) -> ExtentKind {
        self.level.map_or(ExtentKind::Data, |level| ExtentKind::Tree { level, first_key })
    }

    fn new(key: &Key, found: ExtentRefs, nodesize: u32) -> Result<Self> {
        let bytenr = found.bytenr;
        let is_tree = found.flags.contains(ExtentFlags::TREE_BLOCK);
        if is_tree == found.flags.contains(ExtentFlags::DATA) {
            return Err(corrupt(bytenr, "flags", found.flags.bits(), "expected data or tree block"));
        }
        let level = found.level.filter(|_| is_tree);
        let skinny = key.item_type == KeyType::METADATA_ITEM;
        if level.is_some_and(|level| level > LEVEL_MAX) || (skinny && !is_tree) {
            return Err(corrupt(bytenr, "level", key.offset, "expected a tree block of level 0 to 7"));
        }
        let len_bytes = if is_tree { nodesize.into() } else { key.offset };
        Ok(Self {
            extent: Extent::new(bytenr, len_bytes),
            level,
            generation: found.generation,
            flags: found.flags,
            owner: found.owner,
            refs: found.refs,
        })
    }
}

/// The extents that start in a range of addresses, in order.
pub(crate) struct ExtentRecords<'s> {
    cursor: Cursor<'s>,
    nodesize: u32,
    next: Option<Key>,
    end: u64,
}

impl<'s> ExtentRecords<'s> {
    /// Begins at the first extent that starts in `range`.
    pub(crate) fn new(source: &'s dyn NodeSource, root: &RootPtr, range: Range<u64>, nodesize: u32) -> Result<Self> {
        let mut cursor = Cursor::new(source, *root);
        let next = cursor.seek_ge(&Key::new(range.start, KeyType::EXTENT_ITEM, 0))?;
        Ok(Self { cursor, nodesize, next, end: range.end })
    }

    /// The next extent; `None` at the end of the range.
    pub(crate) fn next(&mut self) -> Result<Option<ExtentRecord>> {
        while let Some(key) = self.next.filter(|key| key.objectid < self.end) {
            match key.item_type {
                KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => {
                    let found = read_refs(&mut self.cursor, &key, key.offset)?;
                    self.next = self.cursor.key();
                    return ExtentRecord::new(&key, found, self.nodesize).map(Some);
                }
                other if is_keyed_ref(other) => {
                    let expected = "expected an extent item before a reference";
                    return Err(corrupt(Logical(key.objectid), "refs", 0, expected));
                }
                _ => self.next = self.cursor.next()?,
            }
        }
        Ok(None)
    }
}

/// The extent that starts at this address, if there is one.
pub(crate) fn record_at(
    source: &dyn NodeSource,
    root: &RootPtr,
    bytenr: Logical,
    nodesize: u32,
) -> Result<Option<ExtentRecord>> {
    ExtentRecords::new(source, root, bytenr.0..bytenr.0.saturating_add(1), nodesize)?.next()
}

/// Makes an error about the extent tree's record of an extent.
pub(crate) fn corrupt(bytenr: Logical, field: &'static str, value: u64, expected: &'static str) -> Error {
    let cause = FormatError::Value { what: "extent item", field, value, expected };
    Corrupt::new(cause).in_tree(RootId::EXTENT_TREE).at(bytenr).into()
}

/// The highest level of a tree block.
const LEVEL_MAX: u8 = 7;
