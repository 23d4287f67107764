//! Access to inodes by id: loading, attributes, access times.

use std::ops::Deref;
use std::sync::Arc;

use ubtrfs_format::item::{InodeItem, Timespec};
use ubtrfs_format::{FormatError, Ino, Key, KeyType};
use ubtrfs_transaction::Tree;

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::state::{Inode, InodeState};
use crate::inode::subvolume::{EnteredSubvolume, Home};
use crate::items::dir_item::{self, in_tree};
use crate::options::AtimeMode;
use crate::session::context::{ChangeGuard, MetadataPurpose};
use crate::types::{Attr, InodeId, mode};

/// An inode that is being changed.
#[derive(Debug)]
pub(crate) struct InodeToChange<'f> {
    inode: Arc<Inode>,
    /// Whether the change has entered the gate of the inode's subvolume. If so, the subvolume cannot become read-only
    /// before this value is dropped.
    in_subvolume: bool,
    _changing: ChangeGuard<'f>,
}

impl<'f> InodeToChange<'f> {
    fn in_subvolume(inode: Arc<Inode>, changing: ChangeGuard<'f>) -> Result<Self> {
        match inode.home.changes.enter() {
            true => Ok(Self { inode, in_subvolume: true, _changing: changing }),
            false => Err(Error::ReadOnlySubvolume),
        }
    }
}

impl Deref for InodeToChange<'_> {
    type Target = Arc<Inode>;

    fn deref(&self) -> &Arc<Inode> {
        &self.inode
    }
}

impl Drop for InodeToChange<'_> {
    fn drop(&mut self) {
        if self.in_subvolume {
            self.inode.home.changes.leave();
        }
    }
}

impl Fs {
    /// Returns the inode, and loads it if it is not in memory. The caller must hold no inode lock, unless the subvolume
    /// of `id` is in memory already.
    pub(crate) fn inode(&self, id: InodeId) -> Result<Arc<Inode>> {
        self.engine.enter();
        if let Some(inode) = self.inodes.peek(id) {
            self.entered.note_use(&inode.home);
            return if inode.home.is_gone() { Err(Error::Stale) } else { Ok(inode) };
        }
        // Get the subvolume before loading the inode: the first use of a subvolume loads and deletes its orphans.
        // Inside the load of an orphan, getting the subvolume would wait for that same load.
        let subvolume = self.subvolume(id.root)?;
        let inode = self.inodes.get(id, || self.load_inode(id, subvolume))?;
        // Check after loading: the deletion of a subvolume removes its inodes from memory, but misses inodes that are
        // being loaded.
        if inode.home.is_gone() { Err(Error::Stale) } else { Ok(inode) }
    }

    fn load_inode(&self, id: InodeId, subvolume: Arc<EnteredSubvolume>) -> Result<Arc<Inode>> {
        let home = Home::new(subvolume);
        let tree = &home.tree;
        if id.is_stub() {
            let parent = load_item(tree, self.parent(id)?.ino)?;
            let mut state = InodeState::new(load_item(tree, Ino::ROOT_DIR)?);
            make_stub(&mut state.item, &parent);
            return Ok(Arc::new(Inode::new(id, home, state)));
        }
        let item = load_item(tree, id.ino)?;
        let mut state = InodeState::new(item);
        if state.is_dir() && state.item.size == 0 && dir_item::is_empty(tree, id.ino)? {
            state.known_names = Some(self.inodes.names_of_empty_dir());
        }
        if state.is_regular() || state.is_dir() {
            state.compression = crate::inode::property::load_compression(tree, id.ino, state.item.flags())?;
        }
        state.removed = id.ino == Ino::ROOT_DIR && home.is_deleted();
        Ok(Arc::new(Inode::new(id, home, state)))
    }

    /// Returns an inode for a change. Fails if the inode's subvolume is read-only, or if the inode is a stub directory.
    /// Until the returned value is dropped, the subvolume does not become read-only, and the filesystem is not closed.
    pub(crate) fn inode_to_change(&self, id: InodeId) -> Result<InodeToChange<'_>> {
        let changing = self.context.begin_change()?;
        let inode = self.inode(id)?;
        if id.is_stub() {
            inode.home.check_writable()?;
            return Err(Error::AccessDenied);
        }
        InodeToChange::in_subvolume(inode, changing)
    }

    /// Returns an inode for a write through a file that is open for writing. Permission was checked at open. As on
    /// Linux, the permission stays valid if a flag is set or the subvolume becomes read-only after the open.
    pub(crate) fn inode_of_open_file(&self, id: InodeId) -> Result<InodeToChange<'_>> {
        let changing = self.context.begin_change()?;
        Ok(InodeToChange { inode: self.inode(id)?, in_subvolume: false, _changing: changing })
    }

    /// Returns the attributes that `stat` shows.
    pub fn getattr(&self, id: InodeId) -> Result<Attr> {
        let inode = self.inode(id)?;
        Ok(self.attr_of(&inode, &*inode.read()?))
    }

    /// Returns the attributes that `stat` shows. May read extent items, so it must not be called inside an operation.
    pub(crate) fn attr_of(&self, inode: &Inode, state: &InodeState) -> Attr {
        let blocks = (self.new_bytes(inode, state), self.blocks_are_final(state));
        state.attr(inode.id, self.geometry.sectorsize, blocks)
    }

    /// Counts a lookup as a reference to the inode, if the mount tracks lookups. The caller holds a lock that keeps the
    /// inode linked.
    pub(crate) fn count_lookup(&self, id: InodeId) {
        if self.options.track_lookups {
            self.inodes.add_lookup(id);
        }
    }

    /// Updates an access time by the mount's rules. Errors are ignored: the access itself succeeded.
    pub(crate) fn touch_atime(&self, inode: &Arc<Inode>) {
        let now = Timespec::now();
        // A program that only reads in a transaction has changed nothing.
        let wanted = !self.engine.holds_commits() && inode.read().is_ok_and(|state| self.wants_atime(&state, now));
        if !wanted || inode.home.is_read_only() || inode.id.is_stub() || self.context.read_only().is_some() {
            return;
        }
        let Ok(inode) = self.context.begin_change().and_then(|it| InodeToChange::in_subvolume(Arc::clone(inode), it))
        else {
            return;
        };
        let Ok(reservation) = self.context.reserve(MetadataPurpose::Change(1)) else { return };
        let Ok(mut state) = inode.write() else { return };
        state.item.atime = now;
        let op = self.engine.begin(reservation);
        inode.put_item(&op, &mut state);
    }

    fn wants_atime(&self, state: &InodeState, now: Timespec) -> bool {
        let item = &state.item;
        if state.has_flags(ubtrfs_format::item::InodeFlags::NOATIME) || (state.is_dir() && self.options.nodiratime) {
            return false;
        }
        match self.options.atime {
            AtimeMode::Noatime => false,
            AtimeMode::Strictatime => item.atime != now,
            AtimeMode::Relatime => {
                item.atime <= item.mtime || item.atime <= item.ctime || now.sec.saturating_sub(item.atime.sec) >= DAY
            }
        }
    }
}

/// Reads the `INODE_ITEM` of an inode. Fails with `Stale` if the inode does not exist.
pub(crate) fn load_item(tree: &Tree, ino: Ino) -> Result<InodeItem> {
    let key = Key::new(ino.0, KeyType::INODE_ITEM, 0);
    let Some(raw) = tree.get(&key)? else { return Err(Error::Stale) };
    let item = InodeItem::decode(&raw).map_err(in_tree(tree))?;
    if item.size > crate::types::MAX_SIZE {
        // A larger size could overflow when it is rounded up to whole sectors.
        let expected = "expected at most 2^63 - 1";
        let cause = FormatError::Value { what: "InodeItem", field: "size", value: item.size, expected };
        return Err(in_tree(tree)(cause));
    }
    Ok(item)
}

/// Gives the item of a stub directory ([`InodeId::stub`]) its attributes. As on Linux, the stub has the owner of the
/// directory that holds its name.
pub(crate) fn make_stub(item: &mut InodeItem, parent: &InodeItem) {
    item.mode = mode::DIRECTORY | 0o755;
    (item.size, item.nbytes, item.nlink, item.flags) = (0, 0, 1, 0);
    (item.uid, item.gid) = (parent.uid, parent.gid);
}

const DAY: i64 = 24 * 60 * 60;
