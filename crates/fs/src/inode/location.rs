//! Where names lead from one subvolume to another: the place of a subvolume, the parent of a directory, the target of a
//! directory entry.

use std::sync::Arc;

use ubtrfs_format::item::RootRef;
use ubtrfs_format::{Ino, Key, KeyType, RootId};
use ubtrfs_transaction::{Engine, Tree};

use crate::Fs;
use crate::error::{Error, Result};
use crate::items::dir_item::{self, EntryTarget, in_tree};
use crate::types::InodeId;

/// The root tree.
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
pub(crate) struct SubvolumePlace {
    pub(crate) parent: RootId,
    pub(crate) root_ref: RootRef,
}

impl Fs {
    /// Where a subvolume lies; `None` if no directory holds its name.
    pub(crate) fn place_of(&self, id: RootId) -> Result<Option<SubvolumePlace>> {
        let roots = root_tree(&self.engine)?;
        let start = Key::new(id.0, KeyType::ROOT_BACKREF, 0);
        let end = Key::new(id.0, KeyType::ROOT_BACKREF, u64::MAX);
        let Some((key, raw)) = roots.first_ge(&start, &end)? else { return Ok(None) };
        let root_ref = RootRef::decode(&raw).map_err(in_tree(&roots))?;
        Ok(Some(SubvolumePlace { parent: RootId(key.offset), root_ref }))
    }

    /// The parent of a directory. The parent of a subvolume's root is the directory that holds the subvolume's name;
    /// the top level is its own parent. The parent of a stub directory is the directory that holds its name, if the
    /// subvolume that the stub stands for has this name in that directory; otherwise, the result is the root directory
    /// of the stub's subvolume, because the stub's number does not tell which directory holds its name.
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
        let Some(SubvolumePlace { root_ref: RootRef { dirid, name, .. }, .. }) = self.place_of(id)? else {
            return Ok(InodeId::root_of(root));
        };
        let tree = Arc::clone(&self.subvolume(root)?.tree);
        let entry = dir_item::find_entry(&tree, Ino(dirid), name.as_slice())?;
        let leads_there =
            |location: &Key| matches!(dir_item::target_of(location), Ok(EntryTarget::Subvolume(of)) if of == id);
        let is_there = entry.is_some_and(|entry| leads_there(&entry.location));
        Ok(if is_there { InodeId { root, ino: Ino(dirid) } } else { InodeId::root_of(root) })
    }

    /// The inode that an entry of `dir` points to. If the entry names a subvolume that lies elsewhere (a snapshot
    /// copies the names of nested subvolumes), the result is an empty stub directory.
    pub(crate) fn target_id(&self, dir: InodeId, location: &Key, name: &[u8]) -> Result<InodeId> {
        let root = match dir_item::target_of(location)? {
            EntryTarget::Inode(ino) => return Ok(InodeId { root: dir.root, ino }),
            EntryTarget::Subvolume(root) => root,
        };
        let roots = root_tree(&self.engine)?;
        let is_here = |at: RootRef| at.dirid == dir.ino.0 && at.name == name;
        let is_at_home = root_ref(&roots, dir.root, root)?.is_some_and(is_here);
        Ok(if is_at_home { InodeId::root_of(root) } else { InodeId::stub(dir.root, root) })
    }
}
