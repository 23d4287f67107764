//! [`SentTree`]: inodes, names and extents of a read-only subvolume, read from its committed tree.
//!
//! - T1. Names from disk are checked before they become paths: a name with a slash would lead the receiver elsewhere.
//! - T2. A chain of parents that does not end at the root is an error.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use ubtrfs_error::Error as EngineError;
use ubtrfs_format::item::{DirItem, FileType, InodeExtref, InodeItem, InodeRef, RootFlags, RootItem, is_entry_name};
use ubtrfs_format::{Corrupt, FormatError, Generation, Ino, Key, KeyType, RootId};
use ubtrfs_transaction::CommittedTree;
use ubtrfs_tree::{Cursor, Item, NodeSource, RootPtr, get};
use uuid::Uuid;

use crate::Fs;
use crate::error::{Error, Result};
use crate::items::dir_item::{EntryTarget, target_of};
use crate::types::{MAX_SIZE, mode};

/// A name of an inode.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct InodeLink {
    /// The directory.
    pub(super) parent: u64,
    pub(super) name: Vec<u8>,
}

/// A subvolume that is sent, or that the receiver has.
#[derive(Debug)]
pub(super) struct SentTree {
    tree: CommittedTree,
    /// Known paths of directories.
    paths: RefCell<HashMap<u64, Arc<[u8]>>>,
    /// The inode that was looked up last.
    last: RefCell<Option<(u64, Option<InodeItem>)>>,
}

impl SentTree {
    pub(super) fn open(fs: &Fs, id: RootId) -> Result<Self> {
        let found = Self::of(fs.engine.committed_tree(id)?.ok_or(Error::NotFound)?);
        if !RootFlags::from_bits_retain(found.item().flags).contains(RootFlags::RDONLY) {
            return Err(Error::NotPermitted("the subvolume is not read-only"));
        }
        Ok(found)
    }

    pub(super) fn of(tree: CommittedTree) -> Self {
        Self { tree, paths: RefCell::default(), last: RefCell::default() }
    }

    pub(super) fn root(&self) -> RootPtr {
        self.tree.root()
    }

    pub(super) fn id(&self) -> RootId {
        self.tree.root().tree
    }

    pub(super) fn item(&self) -> &RootItem {
        self.tree.item()
    }

    pub(super) fn source(&self) -> &dyn NodeSource {
        self.tree.source()
    }

    /// The UUID by which a receiver knows this subvolume: the received UUID if the subvolume was received, otherwise
    /// its own UUID.
    pub(super) fn stream_uuid(&self) -> Uuid {
        let item = self.item();
        if item.received_uuid.is_nil() { item.uuid } else { item.received_uuid }
    }

    /// Adds the id of this tree to an error about corrupt content.
    pub(super) fn corrupt(&self, cause: FormatError) -> Error {
        Error::Engine(EngineError::Corrupt(Corrupt::new(cause).in_tree(self.id())))
    }

    pub(super) fn wrong(&self, field: &'static str, value: u64, expected: &'static str) -> Error {
        self.corrupt(FormatError::Value { what: "subvolume", field, value, expected })
    }

    pub(super) fn get(&self, key: &Key) -> Result<Option<Item>> {
        Ok(get(self.source(), &self.root(), key)?)
    }

    /// Passes the items in `start..=end` to `visit` until it returns false.
    pub(super) fn visit(
        &self,
        start: &Key,
        end: &Key,
        mut visit: impl FnMut(&Key, &[u8]) -> Result<bool>,
    ) -> Result<()> {
        let mut cursor = Cursor::new(self.source(), self.root());
        let mut key = cursor.seek_ge(start)?;
        while let Some(found) = key.filter(|key| key <= end) {
            if !visit(&found, cursor.data().unwrap_or_default())? {
                return Ok(());
            }
            key = cursor.next()?;
        }
        Ok(())
    }

    /// The last item in `start..=end`.
    pub(super) fn last_le(&self, end: &Key, start: &Key) -> Result<Option<Item>> {
        let mut cursor = Cursor::new(self.source(), self.root());
        Ok(cursor.seek_le(end)?.filter(|key| key >= start).and_then(|_| cursor.item()))
    }

    pub(super) fn decode_inode(&self, item: &[u8]) -> Result<InodeItem> {
        let item = InodeItem::decode(item).map_err(|cause| self.corrupt(cause))?;
        if item.size > MAX_SIZE {
            return Err(self.wrong("size of inode", item.size, "expected at most 2^63 - 1"));
        }
        Ok(item)
    }

    /// The inode, if it exists and has a name.
    pub(super) fn inode(&self, ino: u64) -> Result<Option<InodeItem>> {
        if let Some((last, item)) = &*self.last.borrow()
            && *last == ino
        {
            return Ok(item.clone());
        }
        let item = self.get(&Key::new(ino, KeyType::INODE_ITEM, 0))?;
        let item = item.map(|item| self.decode_inode(&item)).transpose()?.filter(|item| item.nlink > 0);
        *self.last.borrow_mut() = Some((ino, item.clone()));
        Ok(item)
    }

    /// Appends the names of an item of type `INODE_REF` or `INODE_EXTREF` (T1).
    pub(super) fn add_links(&self, key: &Key, item: &[u8], links: &mut Vec<InodeLink>) -> Result<()> {
        if key.objectid == Ino::ROOT_DIR.0 {
            // The root directory refers to itself by the name "..".
            return Ok(());
        }
        let first = links.len();
        let corrupt = |cause| self.corrupt(cause);
        if key.item_type == KeyType::INODE_REF {
            let refs = InodeRef::decode_all(item).map_err(corrupt)?;
            links.extend(refs.into_iter().map(|link| InodeLink { parent: key.offset, name: link.name }));
        } else {
            let refs = InodeExtref::decode_all(item).map_err(corrupt)?;
            links.extend(refs.into_iter().map(|link| InodeLink { parent: link.parent, name: link.name }));
        }
        if links.iter().skip(first).any(|link| !is_entry_name(&link.name)) {
            return Err(self.wrong("name of inode", key.objectid, "expected no slash, zero byte, '.' or '..'"));
        }
        Ok(())
    }

    /// All names of an inode, sorted.
    pub(super) fn links(&self, ino: u64) -> Result<Vec<InodeLink>> {
        let mut links = Vec::new();
        let start = Key::new(ino, KeyType::INODE_REF, 0);
        let end = Key::new(ino, KeyType::INODE_EXTREF, u64::MAX);
        self.visit(&start, &end, |key, item| self.add_links(key, item, &mut links).map(|()| true))?;
        links.sort_unstable();
        Ok(links)
    }

    /// The first name of an inode other than the root directory.
    pub(super) fn first_link(&self, ino: u64) -> Result<InodeLink> {
        let mut links = Vec::new();
        let start = Key::new(ino, KeyType::INODE_REF, 0);
        let end = Key::new(ino, KeyType::INODE_EXTREF, u64::MAX);
        self.visit(&start, &end, |key, item| self.add_links(key, item, &mut links).map(|()| false))?;
        links.into_iter().min().ok_or_else(|| self.wrong("inode without a name", ino, "expected an INODE_REF"))
    }

    /// Path of a directory from the subvolume's root (T2).
    pub(super) fn dir_path(&self, ino: u64) -> Result<Arc<[u8]>> {
        let mut names: Vec<(u64, Vec<u8>)> = Vec::new();
        let mut at = ino;
        let mut path = loop {
            if at == Ino::ROOT_DIR.0 {
                break Vec::new();
            }
            if let Some(known) = self.paths.borrow().get(&at) {
                break known.to_vec();
            }
            if names.len() > DEPTH_MAX {
                return Err(self.wrong("directory", ino, "expected a path of at most 4096 names to the root"));
            }
            let link = self.first_link(at)?;
            names.push((at, link.name));
            at = link.parent;
        };
        let mut paths = self.paths.borrow_mut();
        if paths.len() > PATHS_MAX {
            paths.clear();
        }
        for (dir, name) in names.into_iter().rev() {
            push_name(&mut path, &name);
            paths.insert(dir, path.as_slice().into());
        }
        Ok(path.into())
    }

    /// The path of a name.
    pub(super) fn path_of(&self, link: &InodeLink) -> Result<Vec<u8>> {
        let mut path = self.dir_path(link.parent)?.to_vec();
        push_name(&mut path, &link.name);
        Ok(path)
    }

    /// One of the paths of an inode.
    pub(super) fn any_path(&self, ino: u64) -> Result<Vec<u8>> {
        if ino == Ino::ROOT_DIR.0 {
            return Ok(Vec::new());
        }
        self.path_of(&self.first_link(ino)?)
    }

    /// The inodes that the entries of a directory lead to.
    pub(super) fn children(&self, dir: u64) -> Result<Vec<u64>> {
        let mut children = Vec::new();
        let (start, end) = (Key::new(dir, KeyType::DIR_INDEX, 0), Key::new(dir, KeyType::DIR_INDEX, u64::MAX));
        self.visit(&start, &end, |_, item| {
            for entry in DirItem::decode_all(item).map_err(|cause| self.corrupt(cause))? {
                if let EntryTarget::Inode(ino) = target_of(&entry.location)? {
                    children.push(ino.0);
                }
            }
            Ok(true)
        })?;
        Ok(children)
    }

    /// Whether the root directory has this name.
    pub(super) fn has_root_name(&self, name: &[u8]) -> Result<bool> {
        let key = Key::new(Ino::ROOT_DIR.0, KeyType::DIR_ITEM, ubtrfs_format::hash::name_hash(name));
        let Some(item) = self.get(&key)? else { return Ok(false) };
        Ok(DirItem::decode_all(&item).map_err(|cause| self.corrupt(cause))?.iter().any(|entry| entry.name == name))
    }

    /// The value of an extended attribute.
    pub(super) fn xattr(&self, ino: u64, name: &[u8]) -> Result<Option<Vec<u8>>> {
        let key = Key::new(ino, KeyType::XATTR_ITEM, ubtrfs_format::hash::name_hash(name));
        let Some(item) = self.get(&key)? else { return Ok(None) };
        let entries = DirItem::decode_all(&item).map_err(|cause| self.corrupt(cause))?;
        Ok(entries.into_iter().find(|entry| entry.name == name).map(|entry| entry.data))
    }
}

/// Whether two inodes with the same number in two trees are the same inode: the number may have been reused. Root
/// directories are always the same inode.
pub(super) fn is_same(ino: u64, old: &InodeItem, new: &InodeItem) -> bool {
    ino == Ino::ROOT_DIR.0 || identity(old) == identity(new)
}

fn identity(item: &InodeItem) -> (Generation, Option<FileType>) {
    (item.generation, FileType::from_mode(item.mode))
}

pub(super) fn is_dir(item: &InodeItem) -> bool {
    item.mode & mode::TYPE == mode::DIRECTORY
}

pub(super) fn is_regular(item: &InodeItem) -> bool {
    item.mode & mode::TYPE == mode::REGULAR
}

pub(super) fn push_name(path: &mut Vec<u8>, name: &[u8]) {
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
}

/// Maximum number of names in a path.
const DEPTH_MAX: usize = 4096;
/// Maximum number of remembered paths of directories.
const PATHS_MAX: usize = 50_000;
