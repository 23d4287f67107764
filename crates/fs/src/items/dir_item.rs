//! The items that make up a name in a directory.
//!
//! | item | key | holds |
//! |---|---|---|
//! | `DIR_ITEM` | (dir, DIR_ITEM, hash(name)) | entries whose names share the hash |
//! | `DIR_INDEX` | (dir, DIR_INDEX, index) | the entry of one name; later names have higher indexes |
//! | `INODE_REF` | (inode, INODE_REF, dir) | index and name of each link in that directory |
//! | `INODE_EXTREF` | (inode, INODE_EXTREF, hash(dir, name)) | index and name of links for which the `INODE_REF` has no room |
//!
//! Changes are first planned as a list of [`PlannedChange`]s; planning may read the tree. Then the changes are put in
//! an operation; putting reads nothing. For an item that the list changes already, planning uses the change; all other
//! items are read from the tree.

use std::ops::Range;

use ubtrfs_error::Error as EngineError;
use ubtrfs_format::hash::{extref_hash, name_hash};
use ubtrfs_format::item::{DirItem, DirItemView, FileType, InodeExtref, InodeRef, is_entry_name};
use ubtrfs_format::node::item_len_max;
use ubtrfs_format::{Generation, Ino, Key, KeyType, RootId, objectid};
use ubtrfs_transaction::{FilesystemGeometry, ItemRef, TransHandle, Tree, TreeChanges};

use crate::error::{Error, Result};
use crate::types::{InodeId, LAST_INO};

/// First index of an entry; 0 and 1 stand for `.` and `..`.
pub(crate) const FIRST_INDEX: u64 = 2;

/// A planned change of one item.
#[derive(Debug)]
pub(crate) enum PlannedChange {
    Put(Key, Vec<u8>),
    Delete(Key),
    /// Puts an item that holds these entries. In entries of transaction [`PENDING`], the operation's transaction
    /// replaces [`PENDING`].
    PutEntries(Key, Vec<DirItem>),
}

/// Puts planned changes. In entries of transaction [`PENDING`], this operation's transaction replaces [`PENDING`].
pub(crate) fn put_changes(op: &TransHandle<'_>, tree: &Tree, changes: Vec<PlannedChange>) {
    let mut put = op.changes(tree);
    for change in changes {
        match change.into_item(op.generation()) {
            (key, Some(value)) => put.put(key, value),
            (key, None) => put.delete(key),
        }
    }
}

impl PlannedChange {
    /// Returns the item's key and its value in transaction `transid`; the value `None` deletes the item.
    pub(crate) fn into_item(self, transid: Generation) -> (Key, Option<Vec<u8>>) {
        match self {
            Self::Put(key, value) => (key, Some(value)),
            Self::Delete(key) => (key, None),
            Self::PutEntries(key, mut entries) => {
                let mut value = Vec::with_capacity(entries.len().saturating_mul(DirItem::HEADER_SIZE + 32));
                for entry in &mut entries {
                    if entry.transid == PENDING {
                        entry.transid = transid;
                    }
                    entry.encode_into(&mut value);
                }
                (key, Some(value))
            }
        }
    }
}

/// Placeholder for the transaction in which the change will be put.
pub(crate) const PENDING: Generation = Generation(u64::MAX);

/// Maximum size of an item, whether it is new or extended by an entry. Linux before 6.1 counted the item header twice when
/// it extended an item, and so stopped 25 bytes earlier. It reads the larger items.
pub(crate) fn max_item_bytes(geometry: &FilesystemGeometry) -> usize {
    item_len_max(geometry.nodesize as usize)
}

/// The target of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryTarget {
    /// An inode of the same subvolume.
    Inode(Ino),
    /// Another subvolume's root directory.
    Subvolume(RootId),
}

/// The target of an entry with this location. Fails with a corruption error if the location is neither an inode nor a
/// subvolume.
pub(crate) fn target_of(location: &Key) -> Result<EntryTarget> {
    match location.item_type {
        KeyType::INODE_ITEM if (objectid::FIRST_FREE..=LAST_INO).contains(&location.objectid) => {
            Ok(EntryTarget::Inode(Ino(location.objectid)))
        }
        KeyType::ROOT_ITEM if RootId(location.objectid).is_subvolume() => {
            Ok(EntryTarget::Subvolume(RootId(location.objectid)))
        }
        other => Err(corrupt("location type", other.0.into(), "expected an inode or a subvolume")),
    }
}

pub(crate) fn corrupt(field: &'static str, value: u64, expected: &'static str) -> Error {
    ubtrfs_format::FormatError::Value { what: "DirItem", field, value, expected }.into()
}

/// Fails for names that are invalid in any entry.
pub(crate) fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > ubtrfs_format::item::NAME_LEN_MAX {
        return Err(Error::NameTooLong);
    }
    if name.is_empty() || name.iter().any(|byte| matches!(byte, b'/' | 0)) {
        return Err(Error::InvalidArgument("a name must not be empty or contain a slash or a zero byte"));
    }
    Ok(())
}

/// Fails for names that no new entry can get.
pub(crate) fn check_new_name(name: &[u8]) -> Result<()> {
    if name == b"." || name == b".." {
        return Err(Error::Exists);
    }
    check_name(name)
}

/// A name and its hash, which a lookup needs several times.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HashedName<'n> {
    pub(crate) bytes: &'n [u8],
    pub(crate) hash: u64,
}

impl<'n> From<&'n [u8]> for HashedName<'n> {
    fn from(bytes: &'n [u8]) -> Self {
        Self { bytes, hash: name_hash(bytes) }
    }
}

fn dir_item_key(dir: Ino, name: HashedName<'_>) -> Key {
    Key::new(dir.0, KeyType::DIR_ITEM, name.hash)
}

pub(crate) fn dir_index_key(dir: Ino, index: u64) -> Key {
    Key::new(dir.0, KeyType::DIR_INDEX, index)
}

/// Returns a function that adds the tree's id to an error about corrupt content.
pub(crate) fn in_tree(tree: &Tree) -> impl FnOnce(ubtrfs_format::FormatError) -> Error {
    let id = tree.id();
    move |cause| Error::Engine(EngineError::from(cause).in_tree(id))
}

/// The entries of a `DIR_ITEM` or `XATTR_ITEM`; empty if the item does not exist.
pub(crate) fn read_entries(tree: &Tree, key: &Key) -> Result<Vec<DirItem>> {
    match tree.get(key)? {
        Some(item) => DirItem::decode_all(&item).map_err(in_tree(tree)),
        None => Ok(Vec::new()),
    }
}

/// Finds the entry of a name.
pub(crate) fn find_entry<'n>(tree: &Tree, dir: Ino, name: impl Into<HashedName<'n>>) -> Result<Option<DirItem>> {
    let name = name.into();
    let Some(item) = tree.get(&dir_item_key(dir, name))? else { return Ok(None) };
    let found = view_of(tree, &item, name.bytes)?;
    Ok(found.map(DirItemView::to_owned))
}

/// Finds the entry of a name in an item.
fn view_of<'i>(tree: &Tree, item: &'i [u8], name: &[u8]) -> Result<Option<DirItemView<'i>>> {
    let is_wanted = |entry: &_| !matches!(entry, Ok(DirItemView { name: found, .. }) if *found != name);
    DirItemView::all(item).find(is_wanted).transpose().map_err(in_tree(tree))
}

/// The index of the next entry of a directory.
pub(crate) fn load_next_index(tree: &Tree, dir: Ino) -> Result<u64> {
    let last = tree.last_le(&dir_index_key(dir, u64::MAX), &dir_index_key(dir, 0))?;
    Ok(last.map_or(FIRST_INDEX, |(key, _)| key.offset.saturating_add(1).max(FIRST_INDEX)))
}

/// Whether listing a directory returns any entries.
pub(crate) fn has_entries(tree: &Tree, dir: Ino) -> Result<bool> {
    Ok(tree.visit(&dir_index_key(dir, 0), &dir_index_key(dir, u64::MAX), 1, |_, _| ())? > 0)
}

/// Whether a directory has no entries, regardless of its size field.
pub(crate) fn is_empty(tree: &Tree, dir: Ino) -> Result<bool> {
    let start = Key::new(dir.0, KeyType::DIR_ITEM, 0);
    Ok(tree.visit(&start, &dir_index_key(dir, u64::MAX), 1, |_, _| ())? == 0)
}

/// The entries that share a name's hash, read once for both lookup and change.
pub(crate) struct NameSlot<'n> {
    name: &'n [u8],
    key: Key,
    /// The existing item, if any.
    item: Option<ItemRef>,
    location: Option<Key>,
}

impl<'n> NameSlot<'n> {
    pub(crate) fn read(tree: &Tree, dir: Ino, name: impl Into<HashedName<'n>>) -> Result<Self> {
        let name = name.into();
        let key = dir_item_key(dir, name);
        let item = tree.get(&key)?;
        let found = item.as_ref().map(|item| view_of(tree, item, name.bytes)).transpose()?.flatten();
        let location = found.map(|entry| entry.location);
        Ok(Self { name: name.bytes, key, item, location })
    }

    /// The slot of a name that the directory is known to lack. The directory has no other name with the hash either.
    pub(crate) fn absent(dir: Ino, name: HashedName<'n>) -> Self {
        Self { name: name.bytes, key: dir_item_key(dir, name), item: None, location: None }
    }

    /// The location that the name points to, if the name exists.
    pub(crate) fn location(&self) -> Option<Key> {
        self.location
    }

    /// Fails if the name exists.
    pub(crate) fn check_free(&self) -> Result<()> {
        if self.location.is_some() { Err(Error::Exists) } else { Ok(()) }
    }

    /// Fails if the item has no room for the name.
    pub(crate) fn check_room(&self, geometry: &FilesystemGeometry) -> Result<()> {
        check_room(self.item.as_ref().map_or(0, |item| item.len()), self.name, geometry)
    }

    /// Puts the name, with this index. The name must not exist, and the item must have room for it. `buf` is a buffer
    /// for encoding, which callers reuse.
    pub(crate) fn put_add(&self, changes: &mut TreeChanges<'_>, target: (Key, u8), index: u64, buf: &mut Vec<u8>) {
        buf.clear();
        DirItem::append(buf, target, changes.generation(), self.name, &[]);
        changes.put(Key::new(self.key.objectid, KeyType::DIR_INDEX, index), &*buf);
        if let Some(item) = &self.item {
            buf.clear();
            buf.extend_from_slice(item);
            DirItem::append(buf, target, changes.generation(), self.name, &[]);
        }
        changes.put(self.key, &*buf);
    }

    /// Plans the changes that add the name, with this index. The name must not exist.
    pub(crate) fn plan_add(
        self,
        changes: &mut Vec<PlannedChange>,
        tree: &Tree,
        geometry: &FilesystemGeometry,
        target: (Key, u8),
        index: u64,
    ) -> Result<()> {
        let entries = self.entries(tree)?;
        plan_entry(changes, geometry, (self.key, entries), self.name, target, index)
    }

    /// Plans the changes that remove the name, which has this index.
    pub(crate) fn plan_remove(self, changes: &mut Vec<PlannedChange>, tree: &Tree, index: u64) -> Result<()> {
        // Avoid decoding the entries if the name shares its hash with no other name, which is the usual case.
        let is_alone =
            self.item.as_ref().is_some_and(|item| item.len() == DirItem::HEADER_SIZE.saturating_add(self.name.len()));
        let entries = if is_alone { Vec::new() } else { self.entries(tree)? };
        plan_no_entry(changes, (self.key, entries), self.name, index);
        Ok(())
    }

    fn entries(&self, tree: &Tree) -> Result<Vec<DirItem>> {
        self.item.as_ref().map_or(Ok(Vec::new()), |item| DirItem::decode_all(item).map_err(in_tree(tree)))
    }
}

/// Fails if a `DIR_ITEM` of this size has no room for another name.
fn check_room(item_bytes: usize, name: &[u8], geometry: &FilesystemGeometry) -> Result<()> {
    if item_bytes > 0
        && item_bytes.saturating_add(DirItem::HEADER_SIZE).saturating_add(name.len()) > max_item_bytes(geometry)
    {
        return Err(Error::Overflow);
    }
    Ok(())
}

/// Plans the changes for a new name: its entry in the `DIR_ITEM`, and its `DIR_INDEX` item.
fn plan_entry(
    changes: &mut Vec<PlannedChange>,
    geometry: &FilesystemGeometry,
    (key, mut entries): (Key, Vec<DirItem>),
    name: &[u8],
    (location, file_type): (Key, u8),
    index: u64,
) -> Result<()> {
    check_room(entries.iter().map(entry_bytes).sum(), name, geometry)?;
    let entry = DirItem { location, transid: PENDING, file_type, name: name.to_vec(), data: Vec::new() };
    changes.push(PlannedChange::PutEntries(dir_index_key(Ino(key.objectid), index), vec![entry.clone()]));
    entries.push(entry);
    changes.push(PlannedChange::PutEntries(key, entries));
    Ok(())
}

/// Plans the changes for a removed name: its entry in the `DIR_ITEM` and its `DIR_INDEX` item are deleted.
fn plan_no_entry(changes: &mut Vec<PlannedChange>, (key, mut entries): (Key, Vec<DirItem>), name: &[u8], index: u64) {
    entries.retain(|entry| entry.name != name);
    changes.push(if entries.is_empty() { PlannedChange::Delete(key) } else { PlannedChange::PutEntries(key, entries) });
    changes.push(PlannedChange::Delete(dir_index_key(Ino(key.objectid), index)));
}

/// Plans the changes that add an entry, with this index, on top of the changes that are in the list already. The name
/// must not exist.
pub(crate) fn plan_add(
    changes: &mut Vec<PlannedChange>,
    tree: &Tree,
    geometry: &FilesystemGeometry,
    dir: Ino,
    name: &[u8],
    target: (Key, u8),
    index: u64,
) -> Result<()> {
    let key = dir_item_key(dir, name.into());
    let entries = planned_entries(changes, tree, &key)?;
    plan_entry(changes, geometry, (key, entries), name, target, index)
}

/// Puts the only reference of a new inode. `buf` is a buffer for encoding, which callers reuse.
pub(crate) fn put_new_ref(
    changes: &mut TreeChanges<'_>,
    (ino, dir): (Ino, Ino),
    name: &[u8],
    index: u64,
    buf: &mut Vec<u8>,
) {
    buf.clear();
    InodeRef::append(buf, index, name);
    changes.put(ref_key(ino, dir), &*buf);
}

pub(crate) fn entry_bytes(entry: &DirItem) -> usize {
    DirItem::HEADER_SIZE.saturating_add(entry.name.len()).saturating_add(entry.data.len())
}

/// Plans the changes that remove the entry with this name and index.
pub(crate) fn plan_remove(
    changes: &mut Vec<PlannedChange>,
    tree: &Tree,
    dir: Ino,
    name: &[u8],
    index: u64,
) -> Result<()> {
    let key = dir_item_key(dir, name.into());
    let entries = planned_entries(changes, tree, &key)?;
    plan_no_entry(changes, (key, entries), name, index);
    Ok(())
}

/// Finds the index of an entry by searching the directory, for entries without a back reference.
pub(crate) fn find_index(tree: &Tree, dir: Ino, name: &[u8]) -> Result<Option<u64>> {
    let mut start = dir_index_key(dir, 0);
    let end = dir_index_key(dir, u64::MAX);
    loop {
        let items = tree.range(&start, &end, 256)?;
        let Some((last, _)) = items.last() else { return Ok(None) };
        let Some(next) = last.successor() else { return Ok(None) };
        for (key, item) in &items {
            if DirItem::decode_all(item).map_err(in_tree(tree))?.iter().any(|entry| entry.name == name) {
                return Ok(Some(key.offset));
            }
        }
        start = next;
    }
}

pub(crate) fn ref_key(ino: Ino, dir: Ino) -> Key {
    Key::new(ino.0, KeyType::INODE_REF, dir.0)
}

pub(crate) fn extref_key(ino: Ino, dir: Ino, name: &[u8]) -> Key {
    Key::new(ino.0, KeyType::INODE_EXTREF, extref_hash(dir.0, name))
}

pub(crate) fn read_refs(tree: &Tree, key: &Key) -> Result<Vec<InodeRef>> {
    match tree.get(key)? {
        Some(item) => InodeRef::decode_all(&item).map_err(in_tree(tree)),
        None => Ok(Vec::new()),
    }
}

pub(crate) fn read_extrefs(tree: &Tree, key: &Key) -> Result<Vec<InodeExtref>> {
    match tree.get(key)? {
        Some(item) => InodeExtref::decode_all(&item).map_err(in_tree(tree)),
        None => Ok(Vec::new()),
    }
}

fn encode_refs(refs: &[InodeRef]) -> Vec<u8> {
    let mut value = Vec::new();
    refs.iter().for_each(|inode_ref| inode_ref.encode_into(&mut value));
    value
}

fn encode_extrefs(refs: &[InodeExtref]) -> Vec<u8> {
    let mut value = Vec::new();
    refs.iter().for_each(|extref| extref.encode_into(&mut value));
    value
}

/// Plans the change that adds an inode's reference to a new name.
pub(crate) fn plan_add_ref(
    changes: &mut Vec<PlannedChange>,
    tree: &Tree,
    geometry: &FilesystemGeometry,
    ino: Ino,
    dir: Ino,
    name: &[u8],
    index: u64,
) -> Result<()> {
    let key = ref_key(ino, dir);
    let mut refs = planned_refs(changes, tree, &key)?;
    refs.push(InodeRef { index, name: name.to_vec() });
    let value = encode_refs(&refs);
    if refs.len() == 1 || value.len() <= max_item_bytes(geometry) {
        changes.push(PlannedChange::Put(key, value));
        return Ok(());
    }
    if !geometry.extended_iref {
        return Err(Error::TooManyLinks);
    }
    let key = extref_key(ino, dir, name);
    let mut refs = planned_extrefs(changes, tree, &key)?;
    refs.push(InodeExtref { parent: dir.0, index, name: name.to_vec() });
    let value = encode_extrefs(&refs);
    if refs.len() > 1 && value.len() > max_item_bytes(geometry) {
        return Err(Error::TooManyLinks);
    }
    changes.push(PlannedChange::Put(key, value));
    Ok(())
}

/// Plans the change that removes an inode's reference to a name. Returns the name's index, or `None` if there is no
/// such reference.
pub(crate) fn plan_remove_ref(
    changes: &mut Vec<PlannedChange>,
    tree: &Tree,
    ino: Ino,
    dir: Ino,
    name: &[u8],
) -> Result<Option<u64>> {
    let key = ref_key(ino, dir);
    let mut refs = planned_refs(changes, tree, &key)?;
    if let Some(at) = refs.iter().position(|inode_ref| inode_ref.name == name) {
        let index = refs.remove(at).index;
        changes.push(if refs.is_empty() {
            PlannedChange::Delete(key)
        } else {
            PlannedChange::Put(key, encode_refs(&refs))
        });
        return Ok(Some(index));
    }
    let key = extref_key(ino, dir, name);
    let mut refs = planned_extrefs(changes, tree, &key)?;
    if let Some(at) = refs.iter().position(|extref| extref.parent == dir.0 && extref.name == name) {
        let index = refs.remove(at).index;
        changes.push(if refs.is_empty() {
            PlannedChange::Delete(key)
        } else {
            PlannedChange::Put(key, encode_extrefs(&refs))
        });
        return Ok(Some(index));
    }
    Ok(None)
}

/// The value of an item after the planned changes: the outer `None` if they do not touch the item, the inner `None` if
/// they delete it.
fn planned<'c>(changes: &'c [PlannedChange], key: &Key) -> Option<Option<&'c [u8]>> {
    changes.iter().rev().find_map(|change| match change {
        PlannedChange::Put(changed, value) if changed == key => Some(Some(value.as_slice())),
        PlannedChange::Delete(changed) if changed == key => Some(None),
        _ => None,
    })
}

fn planned_entries(changes: &[PlannedChange], tree: &Tree, key: &Key) -> Result<Vec<DirItem>> {
    let last = changes.iter().rev().find_map(|change| match change {
        PlannedChange::PutEntries(changed, entries) if changed == key => Some(entries.clone()),
        PlannedChange::Delete(changed) if changed == key => Some(Vec::new()),
        _ => None,
    });
    last.map_or_else(|| read_entries(tree, key), Ok)
}

fn planned_refs(changes: &[PlannedChange], tree: &Tree, key: &Key) -> Result<Vec<InodeRef>> {
    match planned(changes, key) {
        Some(Some(value)) => InodeRef::decode_all(value).map_err(in_tree(tree)),
        Some(None) => Ok(Vec::new()),
        None => read_refs(tree, key),
    }
}

fn planned_extrefs(changes: &[PlannedChange], tree: &Tree, key: &Key) -> Result<Vec<InodeExtref>> {
    match planned(changes, key) {
        Some(Some(value)) => InodeExtref::decode_all(value).map_err(in_tree(tree)),
        Some(None) => Ok(Vec::new()),
        None => read_extrefs(tree, key),
    }
}

/// The first link of an inode: the directory that holds it, and its name there. Directories have one link only.
pub(crate) fn first_link(tree: &Tree, ino: Ino) -> Result<Option<(Ino, Vec<u8>)>> {
    let start = Key::new(ino.0, KeyType::INODE_REF, 0);
    let end = Key::new(ino.0, KeyType::INODE_EXTREF, u64::MAX);
    let Some((key, item)) = tree.first_ge(&start, &end)? else { return Ok(None) };
    if key.item_type == KeyType::INODE_REF {
        let refs = InodeRef::decode_all(&item).map_err(in_tree(tree))?;
        return Ok(refs.into_iter().next().map(|inode_ref| (Ino(key.offset), inode_ref.name)));
    }
    let refs = InodeExtref::decode_all(&item).map_err(in_tree(tree))?;
    Ok(refs.into_iter().next().map(|extref| (Ino(extref.parent), extref.name)))
}

/// The key that an entry stores for an inode.
pub(crate) fn inode_location(ino: Ino) -> Key {
    Key::new(ino.0, KeyType::INODE_ITEM, 0)
}

/// The key that an entry stores for a subvolume.
pub(crate) fn subvolume_location(id: RootId) -> Key {
    Key::new(id.0, KeyType::ROOT_ITEM, u64::MAX)
}

/// The file type that an entry's type byte stands for. Fails with a corruption error for an unknown type byte.
pub(crate) fn file_type_of(value: u8) -> Result<FileType> {
    FileType::from_disk(value)
        .filter(|file_type| *file_type != FileType::Xattr)
        .ok_or_else(|| corrupt("type", value.into(), "expected 1 to 7"))
}

/// A batch of directory entries, in the order of their indexes.
#[derive(Debug, Default)]
pub(crate) struct IndexBatch {
    entries: Vec<IndexEntry>,
    names: Vec<u8>,
}

/// One entry of an [`IndexBatch`].
#[derive(Debug)]
pub(crate) struct IndexEntry {
    pub(crate) index: u64,
    pub(crate) location: Key,
    pub(crate) file_type: u8,
    name: Range<usize>,
}

impl IndexBatch {
    /// Reads up to `limit` entries of a directory from `index` on. Returns the number of items read.
    pub(crate) fn read(&mut self, tree: &Tree, dir: InodeId, index: u64, limit: usize) -> Result<usize> {
        self.entries.clear();
        self.names.clear();
        let mut failure = None;
        let mut bad_name = false;
        let count =
            tree.visit(&dir_index_key(dir.ino, index), &dir_index_key(dir.ino, u64::MAX), limit, |key, item| {
                match DirItemView::all(item).next() {
                    // The tree checker refuses invalid names on disk, but delayed items were not checked.
                    Some(Ok(entry)) if !is_entry_name(entry.name) => bad_name = true,
                    Some(Ok(entry)) => self.add(key.offset, &entry),
                    Some(Err(error)) => failure = Some(error),
                    None => {}
                }
            })?;
        if bad_name {
            return Err(corrupt("name in directory", dir.ino.0, "expected neither '.' nor '..', and no slash"));
        }
        failure.map_or(Ok(count), |error| Err(in_tree(tree)(error)))
    }

    fn add(&mut self, index: u64, entry: &DirItemView<'_>) {
        let start = self.names.len();
        self.names.extend_from_slice(entry.name);
        let (location, file_type, name) = (entry.location, entry.file_type, start..self.names.len());
        self.entries.push(IndexEntry { index, location, file_type, name });
    }

    /// The entries with their names.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&IndexEntry, &[u8])> {
        self.entries.iter().map(|entry| (entry, &self.names[entry.name.clone()]))
    }
}
