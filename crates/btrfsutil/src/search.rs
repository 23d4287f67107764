//! TREE_SEARCH on the tree of trees, and the items that this library reads.
//!
//! `struct btrfs_ioctl_search_args`, 4096 bytes: tree_id 0, min and max objectid 8, min and max offset 24, min and max
//! transid 40, min and max type 56 (4 bytes each), nr_items 64 (4 bytes), items from 104 on. Before each item there are
//! transid, objectid, offset (8 bytes each), type and length (4 bytes each).

use rustix::io::Errno;
use ubtrfs_format::item::{DirItem, RootItem, RootRef};
use ubtrfs_format::key::KeyType;
use ubtrfs_format::{Ino, RootId, objectid};
use ubtrfs_fs::SubvolumeInfo;

use crate::failure::{Result, UtilError};
use crate::ioctl::{self, ARGS_LEN, put, u32_at, u64_at};
use crate::place::OpenPlace;

/// An item of the tree of trees.
#[derive(Debug)]
struct RootTreeItem {
    item_type: KeyType,
    offset: u64,
    data: Vec<u8>,
}

/// The name of a subvolume in a directory of its parent.
#[derive(Debug)]
pub(crate) struct NameInParent {
    pub(crate) parent: u64,
    pub(crate) dirid: u64,
    pub(crate) name: Vec<u8>,
}

/// A subvolume whose name is in another one.
#[derive(Debug)]
pub(crate) struct ChildSubvolume {
    pub(crate) id: u64,
    pub(crate) dirid: u64,
    /// The name in the directory. Empty if only INO_LOOKUP_USER tells it.
    pub(crate) name: Vec<u8>,
}

/// Reads the items of a subvolume, which do not tell its path. Fails with "not found" if there is no such subvolume.
pub(crate) fn info(place: OpenPlace<'_>, id: u64) -> Result<SubvolumeInfo> {
    if !is_subvolume_id(id) {
        return Err(not_found());
    }
    let found = search(place, id, (KeyType::ROOT_ITEM, KeyType::ROOT_BACKREF), 0)?;
    let of_type = |item_type| found.iter().find(move |item| item.item_type == item_type);
    let root = of_type(KeyType::ROOT_ITEM).ok_or_else(not_found)?;
    let root = RootItem::decode_any(&root.data).map_err(|_| corrupt())?;
    let mut info = SubvolumeInfo::without_name(RootId(id), &root);
    if let Some(backref) = of_type(KeyType::ROOT_BACKREF) {
        info.parent = Some(RootId(backref.offset));
        info.dirid = Ino(decode_ref(backref)?.dirid);
    }
    Ok(info)
}

/// Finds the name of a subvolume. Fails with "not found" if there is no such subvolume, or if it has no name.
pub(crate) fn name_in_parent(place: OpenPlace<'_>, id: u64) -> Result<NameInParent> {
    let found = search(place, id, (KeyType::ROOT_BACKREF, KeyType::ROOT_BACKREF), 0)?;
    let item = found.first().ok_or_else(not_found)?;
    let RootRef { dirid, name, .. } = decode_ref(item)?;
    Ok(NameInParent { parent: item.offset, dirid, name })
}

/// Finds subvolumes whose names are in a subvolume, in order of id and from an id on; none after the last one.
pub(crate) fn children(place: OpenPlace<'_>, parent: u64, from: u64) -> Result<Vec<ChildSubvolume>> {
    let found = search(place, parent, (KeyType::ROOT_REF, KeyType::ROOT_REF), from)?;
    let child = |item: &RootTreeItem| {
        let RootRef { dirid, name, .. } = decode_ref(item)?;
        Ok(ChildSubvolume { id: item.offset, dirid, name })
    };
    found.iter().map(child).collect()
}

/// Returns the id of the subvolume that is mounted by default.
pub(crate) fn default_subvolume(place: OpenPlace<'_>) -> Result<u64> {
    let found = search(place, RootId::ROOT_TREE_DIR.0, (KeyType::DIR_ITEM, KeyType::DIR_ITEM), 0)?;
    for item in found {
        let entries = DirItem::decode_all(&item.data).map_err(|_| corrupt())?;
        if let Some(entry) = entries.iter().find(|entry| entry.name == b"default") {
            return Ok(entry.location.objectid);
        }
    }
    Err(not_found())
}

/// Lists deleted subvolumes whose space is not free yet, in order of id.
pub(crate) fn deleted(place: OpenPlace<'_>) -> Result<Vec<u64>> {
    let (mut ids, mut from) = (Vec::new(), 0);
    loop {
        let orphans = search(place, objectid::ORPHAN, (KeyType::ORPHAN_ITEM, KeyType::ORPHAN_ITEM), from)?;
        let Some(last) = orphans.last() else { return Ok(ids) };
        let next = next_after(last.offset)?;
        for orphan in orphans {
            // A subvolume may be gone meanwhile.
            match info(place, orphan.offset) {
                Ok(_) => ids.push(orphan.offset),
                Err(failure) if failure == not_found() => {}
                Err(failure) => return Err(failure),
            }
        }
        from = next;
    }
}

/// Returns the number after an item's. The numbers that a server gives must rise, so that a search ends.
pub(crate) fn next_after(offset: u64) -> Result<u64> {
    offset.checked_add(1).ok_or_else(corrupt)
}

/// Whether a subvolume can have this id: the top level, or one that was made later.
pub(crate) fn is_subvolume_id(id: u64) -> bool {
    let id = RootId(id);
    id == RootId::FS_TREE || (RootId::FIRST_FREE..=RootId::LAST_FREE).contains(&id)
}

pub(crate) fn not_found() -> crate::failure::UtilFailure {
    UtilError::SubvolumeNotFound.with(Errno::NOENT)
}

/// The answer of a search does not fit the request, or an item cannot be read.
pub(crate) fn corrupt() -> crate::failure::UtilFailure {
    UtilError::SearchFailed.with(Errno::IO)
}

fn decode_ref(item: &RootTreeItem) -> Result<RootRef> {
    RootRef::decode(&item.data).map_err(|_| corrupt())
}

/// Finds items of one object, in order of type and then offset; `from` is the smallest offset.
fn search(
    place: OpenPlace<'_>,
    objectid: u64,
    (min_type, max_type): (KeyType, KeyType),
    from: u64,
) -> Result<Vec<RootTreeItem>> {
    let mut args = [0; ARGS_LEN];
    let words = [RootId::ROOT_TREE.0, objectid, objectid, from, u64::MAX, 0, u64::MAX];
    for (nr, word) in words.into_iter().enumerate() {
        put(&mut args, nr * 8, word);
    }
    put(&mut args, 56, u64::from(min_type.0) | u64::from(max_type.0) << 32);
    put(&mut args, 64, NR_ITEMS);
    place.call(ioctl::TREE_SEARCH, &mut args).map_err(|errno| UtilError::SearchFailed.with(errno))?;
    let mut found = Vec::new();
    let mut at = SEARCH_HEAD;
    for _ in 0..u32_at(&args, 64) {
        let head = args.get(at..at + ITEM_HEAD).ok_or_else(corrupt)?;
        let item_type = u8::try_from(u32_at(head, 24)).map(KeyType).map_err(|_| corrupt())?;
        let len = usize::try_from(u32_at(head, 28)).map_err(|_| corrupt())?;
        let start = at + ITEM_HEAD;
        let data = args.get(start..).and_then(|rest| rest.get(..len)).ok_or_else(corrupt)?.to_vec();
        let offset = u64_at(head, 16);
        let is_in_range = u64_at(head, 8) == objectid && (min_type..=max_type).contains(&item_type) && offset >= from;
        if !is_in_range {
            return Err(corrupt());
        }
        found.push(RootTreeItem { item_type, offset, data });
        at = start + len;
    }
    Ok(found)
}

const SEARCH_HEAD: usize = 104;
const ITEM_HEAD: usize = 32;
const NR_ITEMS: u64 = 4096;
