//! Renames that move a subvolume: plain, over an empty directory, as an exchange, or leaving a whiteout. A subvolume
//! can be exchanged with another subvolume at any place, and with an inode if both names are in one subvolume.
//!
//! - I1. The change lock of [`crate::subvolume::state`] is held, so the nesting of subvolumes does not change. The
//!   rename lock is held, so the parents of directories do not change.
//! - I2. Lock order: change lock -> reservation -> rename lock -> inode states.

use std::sync::Arc;

use ubtrfs_format::item::{FileType, RootRef, Timespec};
use ubtrfs_format::{Key, RootId};
use ubtrfs_transaction::{TransHandle, Tree};

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::location::{root_ref, root_ref_keys, root_tree};
use crate::inode::state::Inode;
use crate::inode::xattr::check_may_change;
use crate::items::dir_item::{self, HashedName, PlannedChange};
use crate::namei::create::{Draft, check_dir_takes_names, entry_changed, next_index};
use crate::namei::link::{Locked, check_empty, check_may_remove, drop_link, inode_changed, plan_unlink};
use crate::namei::rename::{End, check_arguments, check_no_loop};
use crate::session::context::MetadataPurpose;
use crate::types::{Caller, InodeId, RenameFlags};

/// The inode or subvolume that a name leads to.
struct Endpoint {
    /// The inode; for a subvolume, its root directory.
    inode: Arc<Inode>,
    /// Location and type, as in a directory entry.
    target: (Key, u8),
    /// The subvolume's id, and the index of its name; `None` for an inode of the directory's own subvolume.
    subvolume: Option<(RootId, u64)>,
}

impl Fs {
    /// Renames `name` in `dir` to `new_name` in `new_dir`, like renameat2 for the superuser.
    pub fn rename(
        &self,
        dir: InodeId,
        name: &[u8],
        new_dir: InodeId,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> Result<()> {
        self.rename_by((dir, name), (new_dir, new_name), flags, &Caller::ROOT)
    }

    /// Renames like `Fs::rename`; a whiteout belongs to `caller`.
    pub fn rename_by(
        &self,
        (dir, name): (InodeId, &[u8]),
        (new_dir, new_name): (InodeId, &[u8]),
        flags: RenameFlags,
        caller: &Caller,
    ) -> Result<()> {
        check_arguments(name, new_name, flags)?;
        if dir.root != new_dir.root {
            // Only subvolumes can move to another subvolume.
            self.find_subvolume(dir, name).map_err(|error| match error {
                Error::InvalidArgument(_) => Error::CrossDevice,
                other => other,
            })?;
            let (dir, new_dir) = (self.inode_to_change(dir)?, self.inode_to_change(new_dir)?);
            return self.rename_subvolumes((&dir, name), (&new_dir, new_name), flags, caller);
        }
        let (dir, new_dir) = (self.inode_to_change(dir)?, self.inode_to_change(new_dir)?);
        let Some(_quota) = self.rename_inodes((&dir, name), (&new_dir, new_name), flags, caller)? else {
            return Ok(());
        };
        self.rename_subvolumes((&dir, name), (&new_dir, new_name), flags, caller)
    }

    /// Renames or exchanges two names, at least one of which leads to a subvolume.
    pub(crate) fn rename_subvolumes(
        &self,
        (dir, name): (&Arc<Inode>, &[u8]),
        (new_dir, new_name): (&Arc<Inode>, &[u8]),
        flags: RenameFlags,
        caller: &Caller,
    ) -> Result<()> {
        let _subvolumes = self.subvolumes.lock();
        let roots = root_tree(&self.engine)?;
        loop {
            for (dir, name) in [(dir, name), (new_dir, new_name)] {
                // Load the subvolumes before reserving: the first use of a subvolume deletes its orphans, and the
                // deletion reserves space.
                if let Ok((id, _)) = self.find_subvolume(dir.id, name) {
                    self.inode(InodeId::root_of(id))?;
                }
            }
            let reservation = self.context.reserve(MetadataPurpose::Change(RENAME_ITEMS))?;
            let _rename = self.names.lock_renames();
            let (from, to) = (self.end(dir, name)?, self.end(new_dir, new_name)?);
            let source = self.thing(&roots, &from)?.ok_or(Error::NotFound)?;
            let target = self.thing(&roots, &to)?;
            let is_exchange = flags.contains(RenameFlags::EXCHANGE);
            match &target {
                Some(_) if flags.contains(RenameFlags::NOREPLACE) => return Err(Error::Exists),
                Some(target) if target.inode.id == source.inode.id => return Ok(()),
                None if is_exchange => return Err(Error::NotFound),
                _ => {}
            }
            self.check_ends((&from, &source), (&to, target.as_ref()), flags)?;

            let mut inodes = vec![dir, new_dir, &source.inode];
            inodes.extend(target.iter().map(|target| &target.inode));
            let mut locked = Locked::new(&mut inodes)?;
            if !self.is_as_found(&from, &mut locked)? || !self.is_as_found(&to, &mut locked)? {
                continue;
            }
            check_may_remove(locked.of(dir))?;
            check_dir_takes_names(locked.of(new_dir))?;
            check_may_change(locked.of(&source.inode))?;
            if let Some(target) = &target {
                check_may_remove(locked.of(new_dir))?;
                check_may_change(locked.of(&target.inode))?;
                if is_exchange {
                    check_dir_takes_names(locked.of(dir))?;
                } else {
                    check_empty(&target.inode, locked.of(&target.inode))?;
                }
            }

            // If both names are in one tree, their changes go into one list, because the two names may have the same
            // hash.
            let is_one_tree = dir.id.root == new_dir.id.root;
            let (mut changes, mut others) = (Vec::with_capacity(12), Vec::new());
            plan_leave(&mut changes, &from, &source)?;
            if let Some(target) = &target {
                plan_leave(if is_one_tree { &mut changes } else { &mut others }, &to, target)?;
            }
            let list = if is_one_tree { &mut changes } else { &mut others };
            let mut references = vec![self.plan_arrive(list, &mut locked, (&from, &to), &source)?];
            if let Some(target) = target.as_ref().filter(|_| is_exchange) {
                references.push(self.plan_arrive(&mut changes, &mut locked, (&to, &from), target)?);
            }
            let time = Timespec::now();
            let mut whiteout = None;
            if flags.contains(RenameFlags::WHITEOUT) {
                let draft = self.draft_whiteout(dir, &mut locked, caller, time)?;
                let ino = draft.inode.id.ino;
                let entry = (dir_item::inode_location(ino), draft.file_type as u8);
                self.plan_place(&mut changes, &mut locked, &from, ino, entry)?;
                whiteout = Some(draft);
            }

            let mut new_state = whiteout.as_ref().map(Draft::lock);
            whiteout.iter().for_each(|draft| self.inodes.insert(&draft.inode, 0, 0));
            let op = self.engine.begin(reservation);
            dir_item::put_changes(&op, &dir.home.tree, changes);
            dir_item::put_changes(&op, &new_dir.home.tree, others);
            if is_exchange {
                entry_changed(locked.of(dir), time, None, None);
                entry_changed(locked.of(new_dir), time, None, None);
            } else {
                let left = whiteout.is_some().then_some(HashedName::from(name));
                entry_changed(locked.of(dir), time, left, Some(name));
                let replaced = target.is_some().then_some(new_name);
                entry_changed(locked.of(new_dir), time, Some(new_name.into()), replaced);
            }
            dir.put_item(&op, locked.of(dir));
            new_dir.put_item(&op, locked.of(new_dir));
            references.into_iter().flatten().for_each(|reference| reference.put(&op, &roots));
            let moved = [Some(&source), target.as_ref().filter(|_| is_exchange)];
            for inode in moved.into_iter().flatten().map(|thing| &thing.inode) {
                // A read-only subvolume keeps its times.
                if !inode.home.is_read_only() {
                    inode_changed(&mut locked.of(inode).item, time);
                    inode.put_item(&op, locked.of(inode));
                }
            }
            if let Some((draft, state)) = whiteout.as_ref().zip(new_state.as_mut()) {
                draft.put(&mut op.changes(&dir.home.tree), state, 1, self);
            }
            // Everything below the moved directory or subvolume now has another path, so later fsyncs in this
            // transaction commit.
            op.note_directory_moved();
            let replaced = target.as_ref().filter(|_| !is_exchange).map(|target| &target.inode);
            let unlinked = replaced.filter(|inode| drop_link(&op, inode, locked.of(inode), time)).map(|inode| inode.id);
            drop(op);
            drop(locked);
            drop(_rename);
            if let Some(id) = unlinked
                && !self.inodes.mark_unlinked(id)
            {
                self.delete_if_unlinked(id);
            }
            return Ok(());
        }
    }

    fn thing(&self, roots: &Tree, end: &End<'_>) -> Result<Option<Endpoint>> {
        if let Some(id) = end.subvolume {
            let index = root_ref(roots, end.dir.id.root, id)?.ok_or(Error::NotFound)?.sequence;
            let inode = self.inode(InodeId::root_of(id))?;
            let target = (dir_item::subvolume_location(id), FileType::Directory as u8);
            return Ok(Some(Endpoint { inode, target, subvolume: Some((id, index)) }));
        }
        Ok(end.inode.as_ref().zip(end.entry.as_ref()).map(|(inode, entry)| Endpoint {
            inode: Arc::clone(inode),
            target: (entry.location, entry.file_type),
            subvolume: None,
        }))
    }

    /// Fails if `source` cannot move to the name of `to` or, for an exchange, `target` cannot move to the name of
    /// `from`. Inode flags, and whether a replaced directory is empty, are checked later, with the states locked.
    fn check_ends(
        &self,
        (from, source): (&End<'_>, &Endpoint),
        (to, target): (&End<'_>, Option<&Endpoint>),
        flags: RenameFlags,
    ) -> Result<()> {
        let is_subvolume = |thing: &Endpoint| thing.subvolume.is_some();
        if !is_subvolume(source) && !target.is_some_and(is_subvolume) {
            return Err(Error::Busy("the directory changed"));
        }
        let exchanged = target.filter(|_| flags.contains(RenameFlags::EXCHANGE));
        let moves = [Some((source, to)), exchanged.map(|target| (target, from))];
        for (thing, end) in moves.into_iter().flatten() {
            if end.dir.home.is_deleted() {
                return Err(Error::NotFound);
            }
            let Some((id, _)) = thing.subvolume else {
                if from.dir.id.root != to.dir.id.root {
                    return Err(Error::CrossDevice);
                }
                continue;
            };
            if self.is_inside_subvolume(end.dir.id.root, id)? {
                return Err(Error::InvalidArgument("a subvolume cannot be moved into itself"));
            }
            // A read-only subvolume cannot move to another directory, because the move would change its parent.
            if from.dir.id != to.dir.id && thing.inode.home.is_read_only() {
                return Err(Error::ReadOnlySubvolume);
            }
        }
        check_no_loop(from, to, flags)?;
        let Some(target) = target.filter(|_| exchanged.is_none()) else { return Ok(()) };
        let is_dir = source.inode.read()?.is_dir();
        let was_dir = target.inode.read()?.is_dir();
        match (is_dir, was_dir) {
            (true, false) => Err(Error::NotDirectory),
            (false, true) => Err(Error::IsDirectory),
            // A subvolume is never replaced, even if it is empty.
            _ if is_subvolume(target) => Err(Error::NotEmpty),
            _ => Ok(()),
        }
    }

    /// Plans the name that an inode or subvolume from one end of the rename gets at the other end.
    fn plan_arrive(
        &self,
        changes: &mut Vec<PlannedChange>,
        locked: &mut Locked<'_>,
        (from, to): (&End<'_>, &End<'_>),
        thing: &Endpoint,
    ) -> Result<Option<Reference>> {
        let Some((id, _)) = thing.subvolume else {
            self.plan_place(changes, locked, to, thing.inode.id.ino, thing.target)?;
            return Ok(None);
        };
        let (tree, dir) = (&to.dir.home.tree, to.dir.id);
        let state = locked.of(&to.dir);
        let index = next_index(&to.dir, state)?;
        dir_item::plan_add(changes, tree, &self.geometry, dir.ino, to.name, thing.target, index)?;
        // If the rename fails, the index stays unused, which is harmless.
        state.next_index = index.checked_add(1);
        let value = RootRef { dirid: dir.ino.0, sequence: index, name: to.name.to_vec() }.encode();
        Ok(Some(Reference { id, old_parent: from.dir.id.root, parent: dir.root, value }))
    }

    /// Whether a subvolume is `ancestor` or lies below it.
    fn is_inside_subvolume(&self, mut id: RootId, ancestor: RootId) -> Result<bool> {
        for _ in 0..MAX_NESTING {
            if id == ancestor {
                return Ok(true);
            }
            match self.place_of(id)? {
                Some(place) => id = place.parent,
                None => return Ok(false),
            }
        }
        Err(dir_item::corrupt("parent", id.0, "expected subvolumes that lead up to the top level"))
    }
}

/// Plans the changes that remove a name, and the inode's reference to it.
fn plan_leave(changes: &mut Vec<PlannedChange>, end: &End<'_>, thing: &Endpoint) -> Result<()> {
    match thing.subvolume {
        Some((_, index)) => dir_item::plan_remove(changes, &end.dir.home.tree, end.dir.id.ino, end.name, index),
        None => plan_unlink(changes, &thing.inode, end.dir.id.ino, end.name),
    }
}

/// The old and the new parent of a subvolume, and its new reference.
struct Reference {
    id: RootId,
    old_parent: RootId,
    parent: RootId,
    value: Vec<u8>,
}

impl Reference {
    fn put(&self, op: &TransHandle<'_>, roots: &Arc<Tree>) {
        let (old_down, old_up) = root_ref_keys(self.old_parent, self.id);
        let (down, up) = root_ref_keys(self.parent, self.id);
        op.delete(roots, old_down);
        op.delete(roots, old_up);
        op.put(roots, down, &self.value);
        op.put(roots, up, &self.value);
    }
}

/// Number of items to reserve for a rename, more than it changes: two names removed and two added, a whiteout with
/// attributes, four inodes with references, references of two subvolumes, an orphan item.
const RENAME_ITEMS: usize = 40;
/// Limit that ends a loop of damaged references.
const MAX_NESTING: usize = 4096;
