//! Inodes without links. An inode without links is deleted after its last use or, after a crash, when its subvolume is
//! next loaded. An unused inode with few items is deleted with its last name, in one operation.
//!
//! - I1. An inode without links has an `ORPHAN_ITEM`, which is deleted in the same operation as the last item of the
//!   inode.
//! - I2. The `INODE_ITEM` of an inode without links is deleted last, so an interrupted deletion can continue.
//! - I3. If the deletion of an inode fails, each sync and the close of the filesystem try it again.

use std::sync::Arc;

use ubtrfs_format::item::{InodeFlags, InodeItem, InodeRef, Timespec};
use ubtrfs_format::{Ino, Key, KeyType, objectid};
use ubtrfs_transaction::{TransHandle, Tree, race_point};

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::cache::FoundInode;
use crate::inode::state::{Inode, InodeState};
use crate::inode::subvolume::EnteredSubvolume;
use crate::inode::writeback_lock::ExclusiveGuard;
use crate::items::dir_item::{in_tree, ref_key};
use crate::namei::create::orphan_key;
use crate::namei::link::inode_changed;
use crate::session::context::MetadataPurpose;
use crate::types::{InodeId, mode};

/// An unused inode whose items are deleted with its last name, and the keys of these items except the `INODE_ITEM`.
pub(crate) struct LastItems<'i> {
    inode: &'i Inode,
    keys: Vec<Key>,
    /// Index of the inode's name, if the `INODE_REF` has the index.
    index: Option<u64>,
    /// Prevents writeback of the inode's data.
    _writeback: ExclusiveGuard<'i>,
}

/// The items of an inode that is not in memory. The caller blocks loading of the inode.
pub(crate) struct UnloadedItems {
    inode_item: InodeItem,
    /// Keys of all items of the inode.
    keys: Vec<Key>,
}

impl UnloadedItems {
    /// Reads the items of a file whose only name is `name` in `dir`, and the index of that name. Returns `None` if `ino`
    /// is not such a file, is immutable or append-only, has more than `limit` items, or has a damaged item. The caller
    /// locks the directory.
    pub(crate) fn of_only_name(
        tree: &Tree,
        ino: Ino,
        (dir, name): (Ino, &[u8]),
        limit: usize,
    ) -> Result<Option<(Self, u64)>> {
        let ref_key = ref_key(ino, dir);
        let mut index = Ok(None);
        let items = Self::read(tree, ino, limit, |key, bytes| {
            if *key == ref_key {
                index = InodeRef::find_index(bytes, name);
            }
        })?;
        let is_plain = |item: &InodeItem| {
            let is_dir = item.mode & mode::TYPE == mode::DIRECTORY;
            item.nlink == 1 && !is_dir && !item.flags().intersects(InodeFlags::IMMUTABLE | InodeFlags::APPEND)
        };
        let (Some(items), Ok(Some(index))) = (items, index) else { return Ok(None) };
        Ok(is_plain(&items.inode_item).then_some((items, index)))
    }

    /// Reads all items of an inode, and calls `each` for them. Returns `None` if the inode has more than `limit` items,
    /// or if the `INODE_ITEM` is missing or damaged.
    fn read(tree: &Tree, ino: Ino, limit: usize, mut each: impl FnMut(&Key, &[u8])) -> Result<Option<Self>> {
        let (mut keys, mut inode_item) = (Vec::with_capacity(8), None);
        let start = Key::new(ino.0, KeyType::INODE_ITEM, 0);
        let end = Key::new(ino.0, KeyType(u8::MAX), u64::MAX);
        tree.visit(&start, &end, limit.saturating_add(1), |key, bytes| {
            if *key == start {
                inode_item = InodeItem::decode(bytes).ok();
            }
            each(key, bytes);
            keys.push(*key);
        })?;
        Ok(inode_item.filter(|_| keys.len() <= limit).map(|inode_item| Self { inode_item, keys }))
    }

    /// Deletes the items.
    pub(crate) fn delete(&self, op: &TransHandle<'_>, tree: &Tree) {
        let mut changes = op.changes(tree);
        self.keys.iter().for_each(|key| changes.delete(*key));
    }

    /// Makes the file an inode without links (I1). `dir` is the directory of its name.
    pub(crate) fn make_orphan(self, op: &TransHandle<'_>, tree: &Tree, (ino, dir): (Ino, Ino), time: Timespec) {
        let mut changes = op.changes(tree);
        let mut item = self.inode_item;
        assert_eq!(item.nlink, 1, "I1: the inode has other names, or has none");
        item.nlink = 0;
        item.transid = changes.generation();
        inode_changed(&mut item, time);
        changes.put(Key::new(ino.0, KeyType::INODE_ITEM, 0), item.encode_array());
        changes.delete(ref_key(ino, dir));
        changes.put(orphan_key(ino), Vec::new());
    }
}

impl LastItems<'_> {
    /// The index of the name in its directory; `None` if the `INODE_REF` lacks the index.
    pub(crate) fn index(&self) -> Option<u64> {
        self.index
    }

    /// Fails if a directory has entries.
    pub(crate) fn check_no_entries(&self, state: &InodeState) -> Result<()> {
        if state.item.size != 0 || self.keys.iter().any(|key| key.item_type == KeyType::DIR_INDEX) {
            return Err(Error::NotEmpty);
        }
        Ok(())
    }

    /// Deletes the inode. The caller holds the inode's lock, and removes the inode from memory afterwards.
    pub(crate) fn delete(self, fs: &Fs, op: &TransHandle<'_>, state: &mut InodeState) {
        assert_eq!(state.item.nlink, 1, "I1: the inode has other names, or has none");
        state.dead = true;
        state.item.nlink = 0;
        if state.is_regular() {
            crate::file::truncate::forget_dirty_past(fs, state, 0);
        }
        let mut changes = op.changes(&self.inode.home.tree);
        for key in &self.keys {
            changes.delete(*key);
        }
        changes.delete(self.inode.item_key());
    }
}

impl Fs {
    /// Returns the items of an inode that is about to lose its last name. Returns `None` if the inode has other names,
    /// is in use or being written back, or has more than `limit` items besides its `INODE_ITEM`. The caller locks the
    /// inode and the directory of the name, so that no use begins.
    pub(crate) fn last_items<'i>(
        &self,
        inode: &'i Inode,
        state: &InodeState,
        (dir, name): (Ino, &[u8]),
        limit: usize,
    ) -> Result<Option<LastItems<'i>>> {
        if state.item.nlink != 1 || self.inodes.is_used(inode.id) {
            return Ok(None);
        }
        // Do not wait: the holder of the writeback lock may be waiting for the inode's state lock.
        let Some(writeback) = inode.writeback.try_lock() else { return Ok(None) };
        let ref_key = ref_key(inode.id.ino, dir);
        let (mut keys, mut index) = (Vec::with_capacity(4), Ok(None));
        let start = inode.item_key().successor().unwrap_or(Key::MAX);
        let mut visit = |start: &Key, end: &Key| {
            inode.home.tree.visit(start, end, limit.saturating_add(1), |key, item| {
                if *key == ref_key {
                    index = InodeRef::find_index(item, name);
                }
                keys.push(*key);
            })
        };
        if state.is_dir() {
            // An empty directory has no `DIR_ITEM`s, but a search would pass many deleted ones that are not removed
            // from the tree yet. So skip their range.
            visit(&start, &Key::new(inode.id.ino.0, KeyType::DIR_ITEM, 0))?;
            visit(&Key::new(inode.id.ino.0, KeyType::DIR_INDEX, 0), &inode.last_key())?;
        } else {
            visit(&start, &inode.last_key())?;
        }
        let index = index.map_err(in_tree(&inode.home.tree))?;
        Ok((keys.len() <= limit).then_some(LastItems { inode, keys, index, _writeback: writeback }))
    }

    /// Deletes an inode if it has no links and no users.
    pub(crate) fn delete_if_unlinked(&self, id: InodeId) {
        // If the filesystem is being closed, the closing thread deletes all unlinked inodes.
        let Ok(_changing) = self.context.begin_change() else { return };
        if self.delete_unloaded(id).is_ok_and(|is_done| is_done) {
            return;
        }
        let Ok(inode) = self.inode(id) else { return };
        if inode.state.read().item.nlink > 0 || self.context.read_only().is_some() {
            return;
        }
        if let Err(error) = self.delete_inode(&inode) {
            tracing::warn!("inode {} of subvolume {}: deleting its items: {error}", id.ino, id.root);
        }
    }

    /// Deletes an inode that is not in memory, if it has no links and no users, in one operation and without loading it.
    /// Returns false and changes nothing if the inode must be loaded.
    fn delete_unloaded(&self, id: InodeId) -> Result<bool> {
        if self.context.read_only().is_some() || self.inodes.peek(id).is_some() {
            return Ok(false);
        }
        let subvolume = self.subvolume(id.root)?;
        let reservation = self.engine.reserve_for_removal_steps(DELETE_STEP + 2, DELETE_STEP_MIN + 2)?;
        let limit = reservation.nr_items().saturating_sub(2);
        let FoundInode::Absent(kept_out) = self.inodes.find_or_block(id) else { return Ok(false) };
        if kept_out.is_used() || subvolume.is_gone() {
            return Ok(false);
        }
        let tree = &subvolume.tree;
        let items = UnloadedItems::read(tree, id.ino, limit, |_, _| ())?;
        let Some(items) = items.filter(|items| items.inode_item.nlink == 0) else { return Ok(false) };
        let op = self.engine.begin(reservation);
        items.delete(&op, tree);
        op.delete(tree, orphan_key(id.ino));
        Ok(true)
    }

    /// Retries the deletion of unlinked inodes that could not be deleted. Called by each sync, because the space of
    /// these inodes may be needed (I3).
    pub(crate) fn delete_undeleted(&self) {
        for inode in self.names.take_undeleted() {
            let id = inode.id;
            if !inode.home.is_gone()
                && let Err(error) = self.delete_items(&inode)
            {
                tracing::debug!("inode {} of subvolume {}: deleting its items: {error}", id.ino, id.root);
            }
        }
    }

    /// Deletes all items of an inode without links, unless it is used.
    fn delete_inode(&self, inode: &Arc<Inode>) -> Result<()> {
        {
            let mut state = inode.state.write();
            if state.dead || state.item.nlink > 0 || self.inodes.is_used(inode.id) {
                return Ok(());
            }
            state.dead = true;
        }
        self.delete_items(inode)
    }

    /// Deletes all items of a dead inode. Keeps the inode for another try if the deletion fails.
    fn delete_items(&self, inode: &Arc<Inode>) -> Result<()> {
        let deleted = self.try_delete_items(inode);
        match &deleted {
            Ok(()) => self.inodes.remove(inode.id),
            Err(_) if self.context.read_only().is_none() => self.names.push_undeleted(Arc::clone(inode)),
            Err(_) => {}
        }
        deleted
    }

    fn try_delete_items(&self, inode: &Arc<Inode>) -> Result<()> {
        let id = inode.id;
        let mut has_extents = {
            let state = inode.state.read();
            assert!(state.dead && state.item.nlink == 0, "I1: inode {id:?} has a name or users");
            state.is_regular()
        };
        if has_extents {
            crate::file::truncate::forget_all_dirty(self, inode);
        }
        // All items of the inode before `start` are deleted, except the `INODE_ITEM` (I2).
        let mut start = inode.item_key().successor().unwrap_or(Key::MAX);
        let end = inode.last_key();
        loop {
            let reservation = self.engine.reserve_for_removal_steps(DELETE_STEP + 2, DELETE_STEP_MIN + 2)?;
            let step = reservation.nr_items().saturating_sub(2);
            let mut keys = Vec::with_capacity(4);
            let is_last = inode.home.tree.visit(&start, &end, step, |key, _| keys.push(*key))? < step;
            if has_extents && !is_last {
                // There are too many extents for one operation: drop them in steps, and reduce the size on disk with
                // them.
                drop(reservation);
                crate::file::truncate::drop_all_extents(self, inode)?;
                has_extents = false;
                continue;
            }
            race_point();
            let op = self.engine.begin(reservation);
            let mut changes = op.changes(&inode.home.tree);
            for key in &keys {
                changes.delete(*key);
                start = *key;
            }
            assert!(!keys.contains(&inode.item_key()), "I2: the `INODE_ITEM` is deleted last");
            if is_last {
                changes.delete(inode.item_key());
                changes.delete(orphan_key(id.ino));
                return Ok(());
            }
        }
    }

    /// Deletes the inodes that earlier mounts left without links in a subvolume. The orphans of a subvolume are deleted
    /// once per mount. Deleting an orphan looks up the subvolume, which calls this function again. While one call for a
    /// subvolume runs, all other calls for this subvolume return at once. A failure to delete one inode does not stop
    /// the deletion of other inodes; the failed deletion is tried again (I3).
    pub(crate) fn delete_orphans(&self, subvolume: &Arc<EnteredSubvolume>) -> Result<()> {
        let Some(mut done) = subvolume.orphans_deleted.try_lock() else { return Ok(()) };
        if *done {
            return Ok(());
        }
        let mut failed = None;
        for ino in orphans(subvolume)? {
            failed = self.delete_orphan(subvolume, ino).err().or(failed);
        }
        *done = true;
        failed.map_or(Ok(()), Err)
    }

    fn delete_orphan(&self, subvolume: &Arc<EnteredSubvolume>, ino: Ino) -> Result<()> {
        let id = InodeId { root: subvolume.id, ino };
        let inode = match self.inode(id) {
            // Another thread may link or unlink the inode now.
            Ok(inode) if inode.state.read().item.nlink == 0 => return self.delete_inode(&inode),
            Ok(inode) => Some(inode),
            // The inode was deleted already.
            Err(Error::Stale) => None,
            Err(error) => return Err(error),
        };
        race_point();
        let reservation = self.context.reserve(MetadataPurpose::Removal(1))?;
        // Another thread may remove the inode's last name, and the inode needs its orphan item then (I1).
        let state = inode.as_ref().map(|inode| inode.state.write());
        if state.as_ref().is_none_or(|state| state.item.nlink > 0) {
            // The orphan item may belong to an interrupted truncation: the extents past the file's size are dropped
            // already, or readers do not see them.
            self.engine.begin(reservation).delete(&subvolume.tree, orphan_key(ino));
        }
        Ok(())
    }

    /// Deletes unlinked inodes when the filesystem is closed, even if they are still in use.
    pub(crate) fn delete_unused_orphans(&self) -> Result<()> {
        let subvolumes = self.entered.all();
        for subvolume in subvolumes.iter().filter(|subvolume| !subvolume.is_read_only() && !subvolume.is_deleted()) {
            for ino in orphans(subvolume)? {
                self.inodes.drop_users(InodeId { root: subvolume.id, ino });
                self.delete_orphan(subvolume, ino)?;
            }
        }
        Ok(())
    }
}

fn orphans(subvolume: &EnteredSubvolume) -> Result<Vec<Ino>> {
    let start = Key::new(objectid::ORPHAN, KeyType::ORPHAN_ITEM, 0);
    let end = Key::new(objectid::ORPHAN, KeyType::ORPHAN_ITEM, u64::MAX);
    Ok(subvolume.tree.range(&start, &end, usize::MAX)?.into_iter().map(|(key, _)| Ino(key.offset)).collect())
}

/// Number of items deleted in one operation.
const DELETE_STEP: usize = 64;
/// Number of items deleted in one operation if space is short.
const DELETE_STEP_MIN: usize = 4;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::time::Duration;

    use ubtrfs_device::MemoryDevice;

    use crate::types::{Caller, NewInode, XattrFlags};
    use crate::{Fs, InodeId, MountOptions};

    use super::*;

    fn goes_at_once(fs: &Fs, id: InodeId) -> bool {
        let inode = fs.inode(id).unwrap();
        let state = inode.write().unwrap();
        fs.last_items(&inode, &state, (fs.root().ino, b""), 16).unwrap().is_some()
    }

    #[test]
    fn an_unused_inode_is_deleted_with_its_last_name() {
        let device = Arc::new(MemoryDevice::new(1 << 30));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let fs = Fs::open(vec![device], MountOptions::default()).unwrap();
        let make = |name: &[u8]| fs.create(fs.root(), name, NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        let [unused, used, linked, busy, large] = [&b"unused"[..], b"used", b"linked", b"busy", b"large"].map(make);
        fs.open_inode(used).unwrap();
        fs.link(linked, fs.root(), b"other").unwrap();
        for number in 0..17 {
            let name = format!("user.{number}");
            fs.setxattr(large, name.as_bytes(), b"x", XattrFlags::empty(), &Caller::ROOT).unwrap();
        }
        fs.write(unused, 0, b"dirty data").unwrap();
        let busy = fs.inode(busy).unwrap();
        let writes_back = busy.writeback.lock();
        assert!([unused].iter().all(|id| goes_at_once(&fs, *id)));
        assert!([used, linked, busy.id, large].iter().all(|id| !goes_at_once(&fs, *id)));
        drop(writes_back);

        for name in [&b"unused"[..], b"used", b"linked", b"other", b"busy", b"large"] {
            fs.unlink(fs.root(), name).unwrap();
        }
        let tree = Arc::clone(&busy.home.tree);
        let is_there = |id: InodeId| {
            let start = Key::new(id.ino.0, KeyType(0), 0);
            let end = Key::new(id.ino.0, KeyType(u8::MAX), u64::MAX);
            tree.first_ge(&start, &end).unwrap().is_some() || tree.get(&orphan_key(id.ino)).unwrap().is_some()
        };
        assert!([unused, linked, busy.id, large].iter().all(|id| !is_there(*id)));
        assert!(is_there(used), "it is open");
        fs.release_inode(used);
        assert!(!is_there(used));
        fs.close().unwrap();
    }

    #[test]
    fn a_file_that_is_not_in_memory_goes_without_being_loaded() {
        let device: Arc<dyn ubtrfs_device::Device> = Arc::new(MemoryDevice::new(1 << 30));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let open = || Fs::open(vec![Arc::clone(&device)], MountOptions::default()).unwrap();
        let fs = open();
        let root = fs.root();
        let make = |name: &[u8], new: NewInode<'_>| fs.create(root, name, new, &Caller::ROOT).unwrap().id;
        let ids = [&b"plain"[..], b"linked", b"large", b"kept"].map(|name| make(name, NewInode::file(0o644)));
        let [plain, linked, large, kept] = ids;
        let (symlink, dir) = (make(b"symlink", NewInode::symlink(b"plain")), make(b"dir", NewInode::dir(0o755)));
        fs.write(plain, 0, &[7; 100_000]).unwrap();
        fs.link(linked, root, b"other").unwrap();
        for number in 0..17 {
            fs.setxattr(large, format!("user.{number}").as_bytes(), b"x", XattrFlags::empty(), &Caller::ROOT).unwrap();
        }
        const FS_IMMUTABLE: u32 = 0x10;
        fs.set_inode_flags(kept, FS_IMMUTABLE, &Caller::ROOT).unwrap();
        fs.close().unwrap();

        let fs = open();
        let tree = fs.subvolume(root.root).unwrap().tree.clone();
        let goes = |name: &[u8], id: InodeId| {
            let found = UnloadedItems::of_only_name(&tree, id.ino, (root.ino, name), 16).unwrap();
            found.map(|(items, _)| items.keys.len())
        };
        assert_eq!(goes(b"plain", plain), Some(3));
        assert_eq!(goes(b"symlink", symlink), Some(3));
        assert_eq!(goes(b"no such name", plain), None);
        let others = [(&b"linked"[..], linked), (b"large", large), (b"kept", kept), (b"dir", dir)];
        assert!(others.iter().all(|(name, id)| goes(name, *id).is_none()));

        let is_loaded = |id| fs.inodes.peek(id).is_some();
        for name in [&b"plain"[..], b"symlink", b"linked", b"other", b"large"] {
            fs.unlink(root, name).unwrap();
        }
        assert!(!is_loaded(plain) && !is_loaded(symlink) && !is_loaded(kept));
        assert!(matches!(fs.unlink(root, b"kept"), Err(Error::NotPermitted(_))));
        assert!(matches!(fs.unlink(root, b"dir"), Err(Error::IsDirectory)));
        for id in [plain, symlink, linked, large] {
            let start = Key::new(id.ino.0, KeyType(0), 0);
            let end = Key::new(id.ino.0, KeyType(u8::MAX), u64::MAX);
            assert!(tree.first_ge(&start, &end).unwrap().is_none(), "{id:?}");
        }
        let kept_out = fs.inodes.block_load(large).unwrap();
        assert!(fs.inodes.block_load(large).is_none());
        drop(kept_out);
        assert!(fs.inodes.block_load(kept).is_none(), "it is in memory");
        fs.close().unwrap();
    }

    #[test]
    fn a_file_that_was_only_looked_up_goes_in_two_steps_without_being_loaded() {
        let image = ubtrfs_testkit::Image::empty(1 << 30).unwrap();
        let device = ubtrfs_device::FileDevice::open(image.path(), ubtrfs_device::Access::ReadWrite).unwrap();
        let device: Arc<dyn ubtrfs_device::Device> = Arc::new(device);
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let open = || {
            let options = MountOptions { track_lookups: true, ..MountOptions::default() };
            Fs::open(vec![Arc::clone(&device)], options).unwrap()
        };
        let fs = open();
        let root = fs.root();
        let make = |name: &[u8]| fs.create(root, name, NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        let ids = [&b"plain"[..], b"loaded", b"large", b"crashed"].map(make);
        let [plain, loaded, large, crashed] = ids;
        fs.write(plain, 0, &[7; 100_000]).unwrap();
        for number in 0..200 {
            let name = format!("user.{number}");
            fs.setxattr(large, name.as_bytes(), b"x", XattrFlags::empty(), &Caller::ROOT).unwrap();
        }
        fs.close().unwrap();

        let fs = open();
        let tree = fs.subvolume(root.root).unwrap().tree.clone();
        let items_of = |id: InodeId| {
            let (start, end) = (Key::new(id.ino.0, KeyType(0), 0), Key::new(id.ino.0, KeyType(u8::MAX), u64::MAX));
            tree.range(&start, &end, usize::MAX).unwrap().len()
        };
        let is_orphan = |id: InodeId| tree.get(&orphan_key(id.ino)).unwrap().is_some();
        for id in ids {
            assert_eq!(fs.getattr_counted(id).unwrap().nlink, 1);
            assert!(fs.inodes.peek(id).is_none(), "counting a lookup loads nothing");
        }
        for name in [&b"plain"[..], b"loaded", b"large", b"crashed"] {
            fs.unlink(root, name).unwrap();
        }
        assert!(ids.iter().all(|id| is_orphan(*id) && fs.inodes.awaits_deletions()));
        assert_eq!(ids.map(|id| fs.inodes.peek(id).is_some()), [false, false, true, false], "many items");
        assert!(matches!(fs.lookup(root, b"plain"), Err(Error::NotFound)));
        assert!(matches!(fs.getattr_counted(loaded), Err(Error::NotFound)));
        assert_eq!(fs.getattr(loaded).unwrap().nlink, 0, "it is in use, and now in memory");
        for id in [plain, loaded, large] {
            fs.forget(id, 1);
            assert_eq!((items_of(id), is_orphan(id)), (0, false));
            assert!(matches!(fs.getattr(id), Err(Error::Stale)));
        }
        // One thread counts lookups while another removes the name: in the end nothing is left.
        for round in 0..200 {
            let name = format!("raced-{round}");
            let id = make_unloaded(&fs, &name);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    if fs.getattr_counted(id).is_ok() {
                        fs.forget(id, 1);
                    }
                });
                fs.unlink(root, name.as_bytes()).unwrap();
            });
            assert_eq!((items_of(id), is_orphan(id)), (0, false), "{round}");
        }
        fs.close().unwrap();
        let fs = open();
        let tree = fs.subvolume(root.root).unwrap().tree.clone();
        assert!(tree.get(&orphan_key(crashed.ino)).unwrap().is_none(), "closing deletes it");
        fs.close().unwrap();
        ubtrfs_testkit::btrfs_check(image.path()).unwrap();
    }

    /// The orphan item of an interrupted truncation is deleted while another thread removes the file's last name.
    #[test]
    fn a_file_that_is_unlinked_keeps_its_orphan_item() {
        let device = Arc::new(MemoryDevice::new(1 << 30));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let fs = Fs::open(vec![device], MountOptions::default()).unwrap();
        let root = fs.root();
        let subvolume = fs.subvolume(root.root).unwrap();
        let is_orphan = |id: InodeId| subvolume.tree.get(&orphan_key(id.ino)).unwrap().is_some();
        let (current, is_over) = (AtomicU64::new(root.ino.0), AtomicBool::new(false));
        #[cfg(debug_assertions)]
        ubtrfs_transaction::delay_races(Duration::from_millis(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    fs.delete_orphan(&subvolume, Ino(current.load(Ordering::Relaxed))).unwrap();
                }
            });
            let mut lost = None;
            for round in 0..300 {
                let name = round.to_string();
                let id = fs.create(root, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
                fs.open_inode(id).unwrap();
                current.store(id.ino.0, Ordering::Relaxed);
                fs.unlink(root, name.as_bytes()).unwrap();
                // Let the other thread end what it began before the file was unlinked.
                std::thread::sleep(Duration::from_millis(1));
                lost = lost.or((!is_orphan(id)).then_some(round));
                fs.release_inode(id);
            }
            is_over.store(true, Ordering::Relaxed);
            #[cfg(debug_assertions)]
            ubtrfs_transaction::delay_races(Duration::ZERO);
            assert_eq!(lost, None, "the file lost its orphan item");
        });
        fs.close().unwrap();
    }

    /// Makes a file that is not in memory.
    fn make_unloaded(fs: &Fs, name: &str) -> InodeId {
        let id = fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        fs.forget(id, 1);
        fs.inodes.remove(id);
        id
    }
}
