//! Listing subvolumes, their paths and parents, and finding the subvolume to mount.

use std::collections::HashMap;

use ubtrfs_format::hash::name_hash;
use ubtrfs_format::item::{RootItem, RootRef};
use ubtrfs_format::print::escaped;
use ubtrfs_format::{Ino, Key, KeyType, RootId, objectid};
use ubtrfs_transaction::Engine;

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::location::{SubvolumePlace, root_tree};
use crate::items::dir_item::{self, EntryTarget, in_tree};
use crate::options::MountOptions;
use crate::types::{InodeId, SubvolumeInfo};

/// The subvolume that `subvol=` or `subvolid=` selects; without these options, the default subvolume.
pub(crate) fn find_root(engine: &Engine, options: &MountOptions) -> Result<RootId> {
    let by_path = match &options.subvol {
        Some(path) => Some(resolve(engine, path)?),
        None => None,
    };
    let Some(id) = options.subvolid else {
        return by_path.map_or_else(|| default_subvolume(engine), Ok);
    };
    if !id.is_subvolume() || engine.root_item(id)?.is_none_or(|item| item.refs == 0) {
        return Err(Error::NoSuchSubvolume(id.to_string()));
    }
    match by_path {
        Some(other) if other != id => Err(Error::MountOption {
            option: format!("subvolid={id}"),
            problem: format!("it contradicts subvol=, whose subvolume has id {other}"),
        }),
        _ => Ok(id),
    }
}

/// The default subvolume: the target of the entry "default" in the root tree's directory, otherwise the top level.
pub(crate) fn default_subvolume(engine: &Engine) -> Result<RootId> {
    let roots = root_tree(engine)?;
    let dir = engine.superblock().root_dir_objectid;
    let key = Key::new(dir, KeyType::DIR_ITEM, name_hash(b"default"));
    let entries = dir_item::read_entries(&roots, &key)?;
    let Some(entry) = entries.into_iter().find(|entry| entry.name == b"default") else { return Ok(RootId::FS_TREE) };
    match dir_item::target_of(&entry.location)? {
        EntryTarget::Subvolume(root) if engine.root_item(root)?.is_some_and(|item| item.refs > 0) => Ok(root),
        _ => Err(Error::NoSuchSubvolume("default".to_owned())),
    }
}

/// Finds the subvolume at a path from the top level. Symbolic links are not followed.
fn resolve(engine: &Engine, path: &[u8]) -> Result<RootId> {
    let missing = || Error::NoSuchSubvolume(escaped(path));
    let mut at = InodeId::root_of(RootId::FS_TREE);
    for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".") {
        let tree = engine.tree(at.root)?.ok_or_else(missing)?;
        let entry = dir_item::find_entry(&tree, at.ino, name)?.ok_or_else(missing)?;
        at = match dir_item::target_of(&entry.location)? {
            EntryTarget::Inode(ino) => InodeId { root: at.root, ino },
            EntryTarget::Subvolume(root) => InodeId::root_of(root),
        };
    }
    let exists = engine.root_item(at.root)?.is_some_and(|item| item.refs > 0);
    if at.ino == Ino::ROOT_DIR && exists { Ok(at.root) } else { Err(missing()) }
}

/// A subvolume in the root tree.
#[derive(Debug)]
struct ListedRoot {
    id: RootId,
    item: RootItem,
    place: Option<SubvolumePlace>,
}

/// Paths of directories that hold names of subvolumes, for one listing. Most subvolumes lie in a few directories.
#[derive(Debug, Default)]
struct KnownPaths {
    paths: HashMap<InodeId, Vec<u8>>,
    len_bytes: usize,
}

impl KnownPaths {
    fn keep(&mut self, dir: InodeId, path: &[u8]) {
        if self.len_bytes > KNOWN_PATHS_BYTES {
            *self = Self::default();
        }
        self.len_bytes = self.len_bytes.saturating_add(path.len()).saturating_add(ENTRY_BYTES);
        self.paths.insert(dir, path.to_vec());
    }
}

/// Which subvolumes to list.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ListedSubvolumes {
    Living,
    Deleted,
}

impl Fs {
    /// All subvolumes, in the order of their ids, the top level first.
    pub fn subvolumes(&self) -> Result<Vec<SubvolumeInfo>> {
        let (mut list, mut from) = (Vec::new(), RootId(0));
        loop {
            let page = self.subvolumes_from(from, usize::MAX)?;
            let Some(last) = page.last() else { return Ok(list) };
            from = RootId(last.id.0.saturating_add(1));
            list.extend(page);
        }
    }

    /// The subvolumes whose ids are at least `from`, in the order of their ids: at most `limit`, and no more than fit
    /// into about 128 KiB. Empty after the last subvolume.
    pub fn subvolumes_from(&self, from: RootId, limit: usize) -> Result<Vec<SubvolumeInfo>> {
        self.list(from, limit, ListedSubvolumes::Living)
    }

    /// Deleted subvolumes whose space is not free yet, as [`Self::subvolumes_from`]. They have no path and no parent.
    pub fn deleted_subvolumes_from(&self, from: RootId, limit: usize) -> Result<Vec<SubvolumeInfo>> {
        self.list(from, limit, ListedSubvolumes::Deleted)
    }

    fn list(&self, from: RootId, limit: usize, wanted: ListedSubvolumes) -> Result<Vec<SubvolumeInfo>> {
        let mut list = Vec::new();
        let mut len_bytes = 0_usize;
        let mut known = KnownPaths::default();
        let mut next = Some(from);
        while let Some(from) = next {
            let (found, rest) = self.roots_from(from)?;
            for ListedRoot { id, item, place } in found {
                let item = self.engine.loaded_root_item(id).unwrap_or(item);
                let is_living = item.refs > 0 && !self.entered.is_deleted(id);
                if is_living != (wanted == ListedSubvolumes::Living) {
                    continue;
                }
                if list.len() >= limit || len_bytes >= PAGE_BYTES {
                    return Ok(list);
                }
                let info = match wanted {
                    ListedSubvolumes::Living => self.info_of(id, &item, place, &mut known)?,
                    ListedSubvolumes::Deleted => SubvolumeInfo::without_name(id, &item),
                };
                len_bytes = len_bytes.saturating_add(info.path.len()).saturating_add(ENTRY_BYTES);
                list.push(info);
            }
            next = rest;
        }
        Ok(list)
    }

    /// Reads some root items of subvolumes with their places, in the order of the ids, the top level first. Also returns
    /// the id to continue from; `None` after the last subvolume.
    fn roots_from(&self, from: RootId) -> Result<(Vec<ListedRoot>, Option<RootId>)> {
        let roots = root_tree(&self.engine)?;
        let first = if from <= RootId::FS_TREE { RootId::FS_TREE } else { from.max(RootId(objectid::FIRST_FREE)) };
        let start = Key::new(first.0, KeyType::ROOT_ITEM, 0);
        let end = Key::new(objectid::LAST_FREE, KeyType::ROOT_BACKREF, u64::MAX);
        let (mut found, mut failure, mut last): (Vec<ListedRoot>, Option<Error>, Option<Key>) =
            (Vec::new(), None, None);
        let nr_items = roots.visit(&start, &end, ITEMS_AT_ONCE, |key, raw| {
            last = Some(*key);
            let id = RootId(key.objectid);
            if !id.is_subvolume() {
                return;
            }
            match key.item_type {
                KeyType::ROOT_ITEM => match RootItem::decode_any(raw).map_err(in_tree(&roots)) {
                    // The last root item is the current one.
                    Ok(item) if found.last().is_some_and(|root| root.id == id) => {
                        found.last_mut().into_iter().for_each(|root| root.item = item.clone());
                    }
                    Ok(item) => found.push(ListedRoot { id, item, place: None }),
                    Err(error) => failure = failure.take().or(Some(error)),
                },
                KeyType::ROOT_BACKREF => match RootRef::decode(raw).map_err(in_tree(&roots)) {
                    Ok(root_ref) => {
                        if let Some(root) = found.last_mut().filter(|root| root.id == id && root.place.is_none()) {
                            root.place = Some(SubvolumePlace { parent: RootId(key.offset), root_ref });
                        }
                    }
                    Err(error) => failure = failure.take().or(Some(error)),
                },
                _ => {}
            }
        })?;
        if let Some(error) = failure {
            return Err(error);
        }
        let Some(last) = last.filter(|_| nr_items == ITEMS_AT_ONCE) else { return Ok((found, None)) };
        // The references to children come after the subvolume's own items and may be many, so they are skipped. If the
        // last subvolume may be incomplete, the next call begins with it.
        let is_complete = last.item_type > KeyType::ROOT_BACKREF;
        let is_only = found.len() < 2;
        if !is_complete && !is_only && found.last().is_some_and(|root| root.id.0 == last.objectid) {
            found.pop();
            return Ok((found, Some(RootId(last.objectid))));
        }
        Ok((found, Some(RootId(last.objectid.saturating_add(1)))))
    }

    /// The subvolumes whose names lie in `parent`, in the order of their ids, each with the directory that holds its
    /// name. At most `limit`, beginning at `from`.
    pub fn children_of(&self, parent: RootId, from: RootId, limit: usize) -> Result<Vec<(RootId, Ino)>> {
        let roots = root_tree(&self.engine)?;
        let mut children = Vec::new();
        let mut start = Key::new(parent.0, KeyType::ROOT_REF, from.0);
        let end = Key::new(parent.0, KeyType::ROOT_REF, u64::MAX);
        while children.len() < limit {
            let wanted = limit.saturating_sub(children.len());
            let (mut last, mut failure) = (None, None);
            let nr_items = roots.visit(&start, &end, wanted, |key, raw| {
                last = Some(*key);
                match RootRef::decode(raw).map_err(in_tree(&roots)) {
                    Ok(root_ref) => children.push((RootId(key.offset), Ino(root_ref.dirid))),
                    Err(error) => failure = Some(error),
                }
            })?;
            if let Some(error) = failure {
                return Err(error);
            }
            children.retain(|(id, _)| !self.entered.is_deleted(*id));
            let Some(next) = last.and_then(|last: Key| last.successor()).filter(|_| nr_items == wanted) else { break };
            start = next;
        }
        Ok(children)
    }

    /// Information about one subvolume.
    pub fn subvolume_info(&self, id: RootId) -> Result<SubvolumeInfo> {
        let item = self.engine.root_item(id)?.filter(|item| item.refs > 0 && !self.entered.is_deleted(id));
        let item = item.ok_or(Error::NotFound)?;
        self.info_of(id, &item, self.place_of(id)?, &mut KnownPaths::default())
    }

    fn info_of(
        &self,
        id: RootId,
        item: &RootItem,
        place: Option<SubvolumePlace>,
        known: &mut KnownPaths,
    ) -> Result<SubvolumeInfo> {
        let mut info = SubvolumeInfo::without_name(id, item);
        if let Some(SubvolumePlace { parent, root_ref }) = place.filter(|_| id != RootId::FS_TREE) {
            let dir = InodeId { root: parent, ino: Ino(root_ref.dirid) };
            info.path = self.known_path(dir, known)?;
            push_name(&mut info.path, &root_ref.name);
            (info.parent, info.dirid) = (Some(parent), dir.ino);
        }
        Ok(info)
    }

    fn known_path(&self, dir: InodeId, known: &mut KnownPaths) -> Result<Vec<u8>> {
        if let Some(path) = known.paths.get(&dir) {
            return Ok(path.clone());
        }
        let path = self.path_up(dir, known)?;
        known.keep(dir, &path);
        Ok(path)
    }

    /// The path of an inode from the top level, by first names. A loop of damaged references ends the path. Of a path
    /// that is longer than [`PATH_BYTES_MAX`], only the last names are returned, because users can nest directories
    /// without limit.
    fn path_up(&self, inode: InodeId, known: &KnownPaths) -> Result<Vec<u8>> {
        let (mut names, mut len_bytes) = (Vec::new(), 0_usize);
        let mut start = Vec::new();
        let mut at = inode;
        for _ in 0..MAX_NESTING.saturating_mul(2) {
            if let Some(path) = known.paths.get(&at) {
                start.clone_from(path);
                break;
            }
            let (above, name) = if at.ino == Ino::ROOT_DIR {
                if at.root == RootId::FS_TREE {
                    break;
                }
                let Some(SubvolumePlace { parent, root_ref }) = self.place_of(at.root)? else { break };
                (InodeId { root: parent, ino: Ino(root_ref.dirid) }, root_ref.name)
            } else {
                let Some(tree) = self.engine.tree(at.root)? else { break };
                let Some((parent, name)) = dir_item::first_link(&tree, at.ino)? else { break };
                (InodeId { root: at.root, ino: parent }, name)
            };
            len_bytes = len_bytes.saturating_add(name.len()).saturating_add(1);
            if len_bytes > PATH_BYTES_MAX {
                break;
            }
            names.push(name);
            at = above;
        }
        let mut path = if start.len().saturating_add(len_bytes) > PATH_BYTES_MAX { Vec::new() } else { start };
        for name in names.iter().rev() {
            push_name(&mut path, name);
        }
        Ok(path)
    }

    /// The names on the path from a subvolume's root down to an inode, by the inode's first name.
    pub(crate) fn names_up(&self, dir: InodeId) -> Result<Vec<Vec<u8>>> {
        let Some(tree) = self.engine.tree(dir.root)? else { return Ok(Vec::new()) };
        let mut names = Vec::new();
        let mut ino = dir.ino;
        while ino != Ino::ROOT_DIR && names.len() < MAX_NESTING {
            let Some((parent, name)) = dir_item::first_link(&tree, ino)? else { break };
            names.push(name);
            ino = parent;
        }
        names.reverse();
        Ok(names)
    }

    /// The subvolume that holds the name of another subvolume, and the path from its root directory to that name. `None`
    /// for the top level, and for a subvolume without a name.
    pub fn name_of_subvolume(&self, id: RootId) -> Result<Option<(RootId, Vec<u8>)>> {
        let place = self.place_of(id)?.filter(|_| id != RootId::FS_TREE && !self.entered.is_deleted(id));
        let Some(SubvolumePlace { parent, root_ref }) = place else { return Ok(None) };
        let mut path = Vec::new();
        let above = self.names_up(InodeId { root: parent, ino: Ino(root_ref.dirid) })?;
        above.iter().chain([&root_ref.name]).for_each(|name| push_name(&mut path, name));
        Ok(Some((parent, path)))
    }

    /// Path of an inode from the top level, by the inode's first name, for messages and listings.
    pub fn path_of(&self, dir: InodeId) -> Result<Vec<u8>> {
        self.path_up(dir, &KnownPaths::default())
    }
}

fn push_name(path: &mut Vec<u8>, name: &[u8]) {
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
}

/// Limit on the number of names in a path, which ends loops of damaged references.
const MAX_NESTING: usize = 4096;
/// Length in bytes of the longest path that is returned as a whole: sixteen times the longest path that programs use.
const PATH_BYTES_MAX: usize = 64 << 10;
/// Bytes of the paths that a listing keeps.
const KNOWN_PATHS_BYTES: usize = 256 << 10;
/// A page of a listing ends when it has this many bytes.
const PAGE_BYTES: usize = 128 << 10;
/// Estimated bytes of a listed subvolume without its path.
const ENTRY_BYTES: usize = 256;
/// Number of items of the root tree that are read at a time.
const ITEMS_AT_ONCE: usize = 256;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ubtrfs_device::MemoryDevice;

    use super::*;
    use crate::types::{Caller, NewInode};

    fn new_fs() -> Arc<Fs> {
        let device = Arc::new(MemoryDevice::new(1 << 30));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        Fs::open(vec![device], MountOptions::default()).unwrap()
    }

    fn subvolume(fs: &Fs, dir: InodeId, name: &str) -> InodeId {
        fs.create_subvolume(dir, name.as_bytes(), &Caller::ROOT).unwrap()
    }

    fn directory(fs: &Fs, dir: InodeId, name: &str) -> InodeId {
        fs.create(dir, name.as_bytes(), NewInode::dir(0o755), &Caller::ROOT).unwrap().id
    }

    #[test]
    fn pages_have_each_subvolume_once() {
        let fs = new_fs();
        let dir = directory(&fs, fs.root(), "dir");
        let mut expected = vec![(RootId::FS_TREE, String::new())];
        // More children of one subvolume, and more subvolumes, than items are read at a time.
        let outer = subvolume(&fs, dir, "outer");
        expected.push((outer.root, "dir/outer".to_owned()));
        let below = directory(&fs, outer, "below");
        for number in 0..2 * ITEMS_AT_ONCE {
            let made = subvolume(&fs, below, &format!("{number}"));
            expected.push((made.root, format!("dir/outer/below/{number}")));
        }
        let (mut at, mut path) = (fs.root(), String::new());
        for _ in 0..20 {
            at = subvolume(&fs, at, "s");
            path = if path.is_empty() { "s".to_owned() } else { path + "/s" };
            expected.push((at.root, path.clone()));
        }
        for number in [0, 7, 300] {
            fs.delete_subvolume(below, format!("{number}").as_bytes(), None).unwrap();
            expected.retain(|(_, path)| *path != format!("dir/outer/below/{number}"));
        }
        for limit in [1, 7, 100, usize::MAX] {
            let (mut found, mut from) = (Vec::new(), RootId(0));
            loop {
                let page = fs.subvolumes_from(from, limit).unwrap();
                assert!(page.len() <= limit);
                let Some(last) = page.last() else { break };
                from = RootId(last.id.0 + 1);
                found.extend(page.into_iter().map(|info| (info.id, String::from_utf8(info.path).unwrap())));
            }
            assert_eq!(found, expected, "pages of {limit}");
        }
        for info in fs.subvolumes().unwrap() {
            let one = fs.subvolume_info(info.id).unwrap();
            assert_eq!((one.path, one.parent, one.dirid), (info.path, info.parent, info.dirid));
        }
        let children: Vec<_> =
            fs.subvolumes().unwrap().into_iter().filter(|info| info.parent == Some(outer.root)).collect();
        assert_eq!(children.len(), 2 * ITEMS_AT_ONCE - 3);
        let expected: Vec<_> = children.iter().map(|info| (info.id, info.dirid)).collect();
        assert_eq!(fs.children_of(outer.root, RootId(0), usize::MAX).unwrap(), expected);
        assert_eq!(fs.children_of(outer.root, expected[100].0, 5).unwrap(), expected[100..105]);
        fs.close().unwrap();
    }

    #[test]
    fn a_very_long_path_loses_its_start() {
        let fs = new_fs();
        let name = "d".repeat(250);
        let last = (0..300).fold(fs.root(), |dir, _| directory(&fs, dir, &name));
        let inner = subvolume(&fs, subvolume(&fs, last, "outer"), "inner");
        let path = fs.subvolume_info(inner.root).unwrap().path;
        assert!(path.len() <= PATH_BYTES_MAX && path.len() > PATH_BYTES_MAX - 300, "{}", path.len());
        assert!(path.ends_with(b"d/outer/inner"));
        let listed = fs.subvolumes().unwrap();
        assert!(listed.iter().all(|info| info.path.len() <= PATH_BYTES_MAX + 300));
        fs.close().unwrap();
    }
}
