//! [`ExtentRecord`]: an extent with all of its references, inline and keyed, as the extent tree holds them.

use std::ops::Range;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{ExtentFlags, ExtentItem, InlineRef};
use ubtrfs_format::{Corrupt, FormatError, Generation, Key, KeyType, Logical, RootId};
use ubtrfs_space::{Extent, ExtentKind, RefKey};
use ubtrfs_tree::{Cursor, NodeSource, RootPtr};

/// An extent of the extent tree.
#[derive(Clone, Debug)]
pub(crate) struct ExtentRecord {
    pub(crate) extent: Extent,
    /// The level of a tree block; `None` for data.
    pub(crate) level: Option<u8>,
    /// The transaction that allocated it. A tree block has the same generation.
    pub(crate) generation: Generation,
    pub(crate) flags: ExtentFlags,
    /// References with their counts, without the owner of simple quotas.
    pub(crate) refs: Vec<(RefKey, u32)>,
    /// The references as the item counts them.
    nr_refs: u64,
}

impl ExtentRecord {
    /// Whether the children's references name this block's address.
    pub(crate) fn has_full_backrefs(&self) -> bool {
        self.flags.contains(ExtentFlags::FULL_BACKREF)
    }

    /// The facts that the extent tree records about a copy of this extent.
    pub(crate) fn kind(&self, first_key: Key) -> ExtentKind {
        self.level.map_or(ExtentKind::Data, |level| ExtentKind::Tree { level, first_key })
    }

    fn new(key: &Key, data: &[u8], nodesize: u32) -> Result<Self> {
        let bytenr = Logical(key.objectid);
        let corrupt = |field, value, expected| corrupt(bytenr, field, value, expected);
        let item = ExtentItem::decode(key.item_type, data)
            .map_err(|cause| Error::from(cause).in_tree(RootId::EXTENT_TREE).at(bytenr))?;
        let is_tree = item.flags.contains(ExtentFlags::TREE_BLOCK);
        if is_tree == item.flags.contains(ExtentFlags::DATA) {
            return Err(corrupt("flags", item.flags.bits(), "expected data or tree block"));
        }
        let skinny = key.item_type == KeyType::METADATA_ITEM;
        let level = match (is_tree, skinny) {
            (true, true) => Some(u8::try_from(key.offset).unwrap_or(u8::MAX)),
            (true, false) => item.tree_block.map(|info| info.level),
            (false, _) => None,
        };
        if level.is_some_and(|level| level > LEVEL_MAX) || (skinny && !is_tree) {
            return Err(corrupt("level", key.offset, "expected a tree block of level 0 to 7"));
        }
        let len_bytes = if is_tree { nodesize.into() } else { key.offset };
        let mut record = Self {
            extent: Extent::new(bytenr, len_bytes),
            level,
            generation: item.generation,
            flags: item.flags,
            refs: Vec::new(),
            nr_refs: item.refs,
        };
        item.inline_refs.iter().for_each(|reference| record.add(reference));
        Ok(record)
    }

    fn add(&mut self, reference: &InlineRef) {
        if let Some(key) = RefKey::of(reference) {
            self.refs.push((key, reference.count()));
        }
    }

    /// Fails if the references are not those that the item counts.
    fn checked(self) -> Result<Self> {
        let found: u64 = self.refs.iter().map(|(_, count)| u64::from(*count)).sum();
        if found != self.nr_refs {
            return Err(corrupt(self.extent.bytenr, "refs", self.nr_refs, "expected the number of its references"));
        }
        Ok(self)
    }
}

/// The extents that start in a range of addresses, in order.
pub(crate) struct Records<'s> {
    cursor: Cursor<'s>,
    nodesize: u32,
    next: Option<Key>,
    end: u64,
}

impl<'s> Records<'s> {
    /// Begins at the first extent that starts in `range`.
    pub(crate) fn new(source: &'s dyn NodeSource, root: &RootPtr, range: Range<u64>, nodesize: u32) -> Result<Self> {
        let mut cursor = Cursor::new(source, *root);
        let next = cursor.seek_ge(&Key::new(range.start, KeyType::EXTENT_ITEM, 0))?;
        Ok(Self { cursor, nodesize, next, end: range.end })
    }

    /// The next extent; `None` at the end of the range.
    pub(crate) fn next(&mut self) -> Result<Option<ExtentRecord>> {
        let mut record: Option<ExtentRecord> = None;
        while let Some(key) = self.next.filter(|key| key.objectid < self.end) {
            let data = self.cursor.data().unwrap_or_default();
            match key.item_type {
                KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => {
                    if record.is_some() {
                        break;
                    }
                    record = Some(ExtentRecord::new(&key, data, self.nodesize)?);
                }
                other if is_keyed_ref(other) => {
                    let bytenr = Logical(key.objectid);
                    let reference = InlineRef::decode_keyed(&key, data)
                        .map_err(|cause| Error::from(cause).in_tree(RootId::EXTENT_TREE).at(bytenr))?;
                    match &mut record {
                        Some(record) if record.extent.bytenr == bytenr => record.add(&reference),
                        _ => return Err(corrupt(bytenr, "refs", 0, "expected an extent item before a reference")),
                    }
                }
                _ => {}
            }
            self.next = self.cursor.next()?;
        }
        record.map(ExtentRecord::checked).transpose()
    }
}

/// The extent that starts at this address, if there is one.
pub(crate) fn record_at(
    source: &dyn NodeSource,
    root: &RootPtr,
    bytenr: Logical,
    nodesize: u32,
) -> Result<Option<ExtentRecord>> {
    Records::new(source, root, bytenr.0..bytenr.0.saturating_add(1), nodesize)?.next()
}

fn is_keyed_ref(item_type: KeyType) -> bool {
    (KeyType::EXTENT_OWNER_REF..=KeyType::SHARED_DATA_REF).contains(&item_type)
}

/// An error in what the extent tree records about an extent.
pub(crate) fn corrupt(bytenr: Logical, field: &'static str, value: u64, expected: &'static str) -> Error {
    let cause = FormatError::Value { what: "extent item", field, value, expected };
    Corrupt::new(cause).in_tree(RootId::EXTENT_TREE).at(bytenr).into()
}

/// The highest level of a tree block.
const LEVEL_MAX: u8 = 7;
