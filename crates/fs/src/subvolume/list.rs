//! Listing subvolumes, their paths and parents, and finding the subvolume to mount.

use std::collections::HashMap;
use std::sync::Arc;

use ubtrfs_format::hash::name_hash;
use ubtrfs_format::item::{RootFlags, RootItem, RootRef};
use ubtrfs_format::print::escaped;
use ubtrfs_format::{Ino, Key, KeyType, RootId, objectid};
use ubtrfs_transaction::{Engine, Tree};

use crate::Fs;
use crate::error::{Error, Result};
use crate::items::dir_item::{self, Target, in_tree};
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
        Target::Subvolume(root) if engine.root_item(root)?.is_some_and(|item| item.refs > 0) => Ok(root),
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
            Target::Inode(ino) => InodeId { root: at.root, ino },
            Target::Subvolume(root) => InodeId::root_of(root),
        };
    }
    let exists = engine.root_item(at.root)?.is_some_and(|item| item.refs > 0);
    if at.ino == Ino::ROOT_DIR && exists { Ok(at.root) } else { Err(missing()) }
}

pub(crate) fn root_tree(engine: &Engine) -> Result<Arc<Tree>> {
    engine.tree(RootId::ROOT_TREE)?.ok_or(Error::NotFound)
}

/// The keys of the `ROOT_REF` and the `ROOT_BACKREF` of a subvolume that lies in `parent`.
pub(crate) fn root_ref_keys(parent: RootId, id: RootId) -> (Key, Key) {
    (Key::new(parent.0, KeyType::ROOT_REF, id.0), Key::new(id.0, KeyType::ROOT_BACKREF, parent.0))
}

/// The reference from `parent` to a subvolume; `None` if `parent` does not hold its name.
pub(crate) fn root_ref(roots: &Tree, parent: RootId, id: RootId) -> Result<Option<RootRef>> {
    let raw = roots.get(&root_ref_keys(parent, id).0)?;
    raw.map(|raw| RootRef::decode(&raw).map_err(in_tree(roots))).transpose()
}

/// The parent of a subvolume (the subvolume that holds its name), and the parent's reference to the subvolume.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) parent: RootId,
    pub(crate) root_ref: RootRef,
}

fn info_without_path(id: RootId, item: &RootItem) -> SubvolumeInfo {
    SubvolumeInfo {
        id,
        path: Vec::new(),
        parent: None,
        dirid: Ino(0),
        flags: RootFlags::from_bits_retain(item.flags),
        uuid: item.uuid,
        parent_uuid: item.parent_uuid,
        received_uuid: item.received_uuid,
        generation: item.generation,
        otransid: item.otransid,
        ctransid: item.ctransid,
        stransid: item.stransid,
        rtransid: item.rtransid,
        otime: item.otime,
        ctime: item.ctime,
        stime: item.stime,
        rtime: item.rtime,
    }
}

impl Fs {
    /// All subvolumes, in the order of their ids, the top level first.
    pub fn subvolumes(&self) -> Result<Vec<SubvolumeInfo>> {
        let mut paths = HashMap::from([(RootId::FS_TREE, Vec::new())]);
        let mut list = Vec::new();
        for id in self.subvolume_ids()? {
            let Some(item) = self.engine.root_item(id)?.filter(|item| item.refs > 0) else { continue };
            if self.subvolumes.is_deleted(id) {
                continue;
            }
            list.push(self.info_of(id, &item, &mut paths)?);
        }
        Ok(list)
    }

    /// Deleted subvolumes whose space is not free yet, in the order of their ids. They have no path and no parent.
    pub fn deleted_subvolumes(&self) -> Result<Vec<SubvolumeInfo>> {
        let mut list = Vec::new();
        for id in self.subvolume_ids()? {
            let Some(item) = self.engine.root_item(id)? else { continue };
            if item.refs == 0 || self.subvolumes.is_deleted(id) {
                list.push(info_without_path(id, &item));
            }
        }
        Ok(list)
    }

    /// The ids of all subvolumes that have a root item, deleted ones too, the top level first.
    fn subvolume_ids(&self) -> Result<Vec<RootId>> {
        let roots = root_tree(&self.engine)?;
        let mut ids = vec![RootId::FS_TREE];
        let mut start = Key::new(objectid::FIRST_FREE, KeyType::ROOT_ITEM, 0);
        let end = Key::new(objectid::LAST_FREE, KeyType::ROOT_ITEM, u64::MAX);
        while let Some((key, _)) = roots.first_ge(&start, &end)? {
            // Skip inodes of the free space cache (v1), which are in the root tree too.
            start = if key.item_type < KeyType::ROOT_ITEM {
                Key::new(key.objectid, KeyType::ROOT_ITEM, 0)
            } else {
                Key::new(key.objectid.saturating_add(1), KeyType::ROOT_ITEM, 0)
            };
            if key.item_type == KeyType::ROOT_ITEM {
                ids.push(RootId(key.objectid));
            }
        }
        Ok(ids)
    }

    /// Information about one subvolume.
    pub fn subvolume_info(&self, id: RootId) -> Result<SubvolumeInfo> {
        let item = self.engine.root_item(id)?.filter(|item| item.refs > 0 && !self.subvolumes.is_deleted(id));
        let mut paths = HashMap::from([(RootId::FS_TREE, Vec::new())]);
        self.info_of(id, &item.ok_or(Error::NotFound)?, &mut paths)
    }

    fn info_of(&self, id: RootId, item: &RootItem, paths: &mut HashMap<RootId, Vec<u8>>) -> Result<SubvolumeInfo> {
        let place = self.place_of(id)?;
        Ok(SubvolumeInfo {
            path: self.subvolume_path(id, paths, 0)?,
            parent: place.as_ref().map(|place| place.parent),
            dirid: place.as_ref().map_or(Ino(0), |place| Ino(place.root_ref.dirid)),
            ..info_without_path(id, item)
        })
    }

    /// Path of a subvolume from the top level. A loop of damaged references ends the path.
    fn subvolume_path(&self, id: RootId, paths: &mut HashMap<RootId, Vec<u8>>, depth: usize) -> Result<Vec<u8>> {
        if let Some(path) = paths.get(&id) {
            return Ok(path.clone());
        }
        let mut path = Vec::new();
        if let Some(place) = self.place_of(id)?
            && depth < MAX_NESTING
        {
            path = self.subvolume_path(place.parent, paths, depth.saturating_add(1))?;
            for name in self.names_up(InodeId { root: place.parent, ino: Ino(place.root_ref.dirid) })? {
                push_name(&mut path, &name);
            }
            push_name(&mut path, &place.root_ref.name);
        }
        paths.insert(id, path.clone());
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

    pub(crate) fn place_of(&self, id: RootId) -> Result<Option<Place>> {
        let roots = root_tree(&self.engine)?;
        let start = Key::new(id.0, KeyType::ROOT_BACKREF, 0);
        let end = Key::new(id.0, KeyType::ROOT_BACKREF, u64::MAX);
        let Some((key, raw)) = roots.first_ge(&start, &end)? else { return Ok(None) };
        let root_ref = RootRef::decode(&raw).map_err(in_tree(&roots))?;
        Ok(Some(Place { parent: RootId(key.offset), root_ref }))
    }

    /// The parent of a directory. The parent of a subvolume's root is the directory that holds the subvolume's name;
    /// the top level is its own parent. The parent of a stub directory is the directory that holds its name, if that
    /// directory and the name are those of the subvolume that the stub stands for; otherwise, the result is the root
    /// directory of the stub's subvolume, because the stub's number does not tell which directory holds its name.
    pub fn parent(&self, dir: InodeId) -> Result<InodeId> {
        if let Some(id) = dir.stub_of() {
            return self.parent_of_stub(dir.root, id);
        }
        if dir.ino == Ino::ROOT_DIR {
            let place = self.place_of(dir.root)?;
            return Ok(place.map_or(dir, |place| InodeId { root: place.parent, ino: Ino(place.root_ref.dirid) }));
        }
        let tree = Arc::clone(&self.subvolume(dir.root)?.tree);
        let (parent, _) = dir_item::first_link(&tree, dir.ino)?.ok_or(Error::NotFound)?;
        Ok(InodeId { root: dir.root, ino: parent })
    }

    /// The parent of the stub in the subvolume `root` that stands for the subvolume `id`. A snapshot has the inode
    /// numbers and names of its source, so the stub usually has the place that the subvolume has in the source.
    fn parent_of_stub(&self, root: RootId, id: RootId) -> Result<InodeId> {
        let Some(Place { root_ref: RootRef { dirid, name, .. }, .. }) = self.place_of(id)? else {
            return Ok(InodeId::root_of(root));
        };
        let tree = Arc::clone(&self.subvolume(root)?.tree);
        let entry = dir_item::find_entry(&tree, Ino(dirid), name.as_slice())?;
        let leads_there =
            |location: &Key| matches!(dir_item::target_of(location), Ok(Target::Subvolume(of)) if of == id);
        let is_there = entry.is_some_and(|entry| leads_there(&entry.location));
        Ok(if is_there { InodeId { root, ino: Ino(dirid) } } else { InodeId::root_of(root) })
    }

    /// Path of an inode from the top level, by the inode's first name, for messages and listings.
    pub fn path_of(&self, dir: InodeId) -> Result<Vec<u8>> {
        let mut path = self.subvolume_path(dir.root, &mut HashMap::from([(RootId::FS_TREE, Vec::new())]), 0)?;
        for name in self.names_up(dir)? {
            push_name(&mut path, &name);
        }
        Ok(path)
    }

    /// The inode that an entry of `dir` points to. If the entry names a subvolume that lies elsewhere (a snapshot
    /// copies the names of nested subvolumes), the result is an empty stub directory.
    pub(crate) fn target_id(&self, dir: InodeId, location: &Key, name: &[u8]) -> Result<InodeId> {
        let root = match dir_item::target_of(location)? {
            Target::Inode(ino) => return Ok(InodeId { root: dir.root, ino }),
            Target::Subvolume(root) => root,
        };
        let roots = root_tree(&self.engine)?;
        let is_here = |at: RootRef| at.dirid == dir.ino.0 && at.name == name;
        let is_at_home = root_ref(&roots, dir.root, root)?.is_some_and(is_here);
        Ok(if is_at_home { InodeId::root_of(root) } else { InodeId::stub(dir.root, root) })
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
