//! [`extent_refs`]: all references of an extent, inline and keyed, as one version of the extent tree records them.
//!
//! Invariants:
//! - I1. The counts of all references add up to the `refs` field of the extent item; otherwise the extent is corrupt.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{ExtentFlags, ExtentItem, InlineRef};
use ubtrfs_format::{Corrupt, FormatError, Generation, Key, KeyType, Logical, RootId};
use ubtrfs_space::RefKey;
use ubtrfs_tree::{Cursor, NodeSource, RootPtr};

/// An extent, and all references to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExtentRefs {
    /// The address of the extent.
    pub(crate) bytenr: Logical,
    /// The length of the extent in bytes.
    pub(crate) len_bytes: u64,
    /// The sum of all counts.
    pub(crate) nr_refs: u64,
    /// Flags.
    pub(crate) flags: ExtentFlags,
    /// The transaction that allocated the extent. For a tree block, also the generation in its header.
    pub(crate) generation: Generation,
    /// Level of a tree block; `None` for data.
    pub(crate) level: Option<u8>,
    /// The tree that allocated the extent, if simple quotas recorded the tree.
    pub(crate) owner: Option<RootId>,
    /// References with their counts, in the order of the extent tree.
    pub(crate) refs: Vec<(RefKey, u64)>,
}

/// Reads all references of the extent with this address, length and kind. `None` if this version of the extent tree
/// does not have the extent.
///
/// # Errors
///
/// Fails if the extent tree is corrupt or cannot be read.
pub(crate) fn extent_refs(
    source: &dyn NodeSource,
    extent_root: &RootPtr,
    bytenr: Logical,
    len_bytes: u64,
    is_tree: bool,
) -> Result<Option<ExtentRefs>> {
    Ok(first_refs(source, extent_root, (bytenr, len_bytes), is_tree, usize::MAX)?.map(|(extent, _)| extent))
}

/// Reads the references of an extent as [`extent_refs`] does, but ends after about `most` of them. Also returns whether
/// there are more.
///
/// # Errors
///
/// As for [`extent_refs`].
pub(crate) fn first_refs(
    source: &dyn NodeSource,
    extent_root: &RootPtr,
    (bytenr, len_bytes): (Logical, u64),
    is_tree: bool,
    most: usize,
) -> Result<Option<(ExtentRefs, bool)>> {
    let mut cursor = Cursor::new(source, *extent_root);
    let mut key = cursor.seek_ge(&Key::new(bytenr.0, KeyType::EXTENT_ITEM, 0))?;
    while let Some(found) = key.filter(|key| key.objectid == bytenr.0 && key.item_type <= KeyType::METADATA_ITEM) {
        let skinny = is_tree && found.item_type == KeyType::METADATA_ITEM;
        if skinny || (found.item_type == KeyType::EXTENT_ITEM && found.offset == len_bytes) {
            let read = read_first_refs(&mut cursor, &found, len_bytes, most)?;
            return Ok(Some(read).filter(|(extent, _)| extent.level.is_some() == is_tree));
        }
        key = cursor.next()?;
    }
    Ok(None)
}

/// Reads all references of the extent whose item the cursor is at. Leaves the cursor after the extent's items.
/// `len_bytes` is the extent's length, which the key of a skinny item does not contain.
pub(crate) fn read_refs(cursor: &mut Cursor<'_>, key: &Key, len_bytes: u64) -> Result<ExtentRefs> {
    Ok(read_first_refs(cursor, key, len_bytes, usize::MAX)?.0)
}

/// As [`read_refs`], but ends after about `most` references, and returns whether there are more.
fn read_first_refs(cursor: &mut Cursor<'_>, key: &Key, len_bytes: u64, most: usize) -> Result<(ExtentRefs, bool)> {
    let bytenr = Logical(key.objectid);
    let corrupt = |cause: FormatError| Error::from(Corrupt::new(cause).in_tree(RootId::EXTENT_TREE).at(bytenr));
    let item = ExtentItem::decode(key.item_type, cursor.data().unwrap_or_default()).map_err(corrupt)?;
    let level = match (key.item_type, &item.tree_block) {
        (KeyType::METADATA_ITEM, _) => Some(u8::try_from(key.offset).unwrap_or(u8::MAX)),
        (_, Some(info)) => Some(info.level),
        (_, None) => None,
    };
    let mut extent = ExtentRefs {
        bytenr,
        len_bytes,
        nr_refs: item.refs,
        flags: item.flags,
        generation: item.generation,
        level,
        owner: None,
        refs: Vec::with_capacity(item.inline_refs.len()),
    };
    let mut sum = 0u64;
    item.inline_refs.iter().for_each(|inline| extent.note(inline, &mut sum));
    let mut next = cursor.next()?;
    while let Some(found) = next.filter(|found| found.objectid == bytenr.0 && is_keyed_ref(found.item_type)) {
        let keyed = InlineRef::decode_keyed(&found, cursor.data().unwrap_or_default()).map_err(corrupt)?;
        if extent.refs.len() >= most {
            return Ok((extent, true));
        }
        extent.note(&keyed, &mut sum);
        next = cursor.next()?;
    }
    if sum != extent.nr_refs {
        let expected = "expected the sum of all references";
        return Err(corrupt(FormatError::Value { what: "ExtentItem", field: "refs", value: extent.nr_refs, expected }));
    }
    Ok((extent, false))
}

impl ExtentRefs {
    fn note(&mut self, reference: &InlineRef, sum: &mut u64) {
        if let InlineRef::Owner(root) = reference {
            self.owner = Some(*root);
        }
        let Some(key) = RefKey::of(reference) else { return };
        let count = u64::from(reference.count());
        *sum = sum.saturating_add(count);
        self.refs.push((key, count));
    }
}

/// Whether items of this type are references to an extent.
pub(crate) fn is_keyed_ref(item_type: KeyType) -> bool {
    (KeyType::EXTENT_OWNER_REF..=KeyType::SHARED_DATA_REF).contains(&item_type)
}
