//! Renaming: plain, without replacing, exchanging, leaving a whiteout. For subvolumes, see
//! [`crate::subvolume::rename`]. The inodes are locked in the order of I3 of [`crate::inode::state`], by `Locked` of
//! [`crate::namei::link`].
//!
//! - I1. The rename lock is held from the check for loops until the items are put, so the parents of directories do not
//!   change in between.

use std::sync::Arc;

use ubtrfs_format::item::{DirItem, Timespec};
use ubtrfs_format::{Ino, RootId};
use ubtrfs_transaction::{MetadataReservation, QuotaReservation};

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::state::Inode;
use crate::inode::xattr::check_may_change;
use crate::items::dir_item::{self, HashedName, PlannedChange};
use crate::items::quota_blocks;
use crate::namei::create::{Draft, check_dir_takes_names, entry_changed, next_index};
use crate::namei::link::{Locked, check_empty, check_may_remove, drop_link, inode_changed, plan_unlink};
use crate::session::context::MetadataPurpose;
use crate::types::{Caller, InodeId, NewInode, RenameFlags, mode};

/// One end of a rename: a directory, a name, and the entry found there.
pub(crate) struct End<'n> {
    pub(crate) dir: Arc<Inode>,
    pub(crate) name: &'n [u8],
    pub(crate) entry: Option<DirItem>,
    pub(crate) inode: Option<Arc<Inode>>,
    /// The subvolume that the name leads to; `None` if the name does not lead to another subvolume.
    pub(crate) subvolume: Option<RootId>,
    /// The directory's sequence number when the name was looked up.
    sequence: u64,
}

impl Fs {
    /// Renames in one subvolume; the caller has checked the arguments. If a name leads to a subvolume, changes nothing
    /// and returns the quota that it reserved.
    pub(crate) fn rename_inodes(
        &self,
        (dir, name): (&Arc<Inode>, &[u8]),
        (new_dir, new_name): (&Arc<Inode>, &[u8]),
        flags: RenameFlags,
        caller: &Caller,
    ) -> Result<Option<QuotaReservation>> {
        if !flags.intersects(RenameFlags::NOREPLACE | RenameFlags::EXCHANGE) {
            self.write_replacement(dir, name, new_dir, new_name);
        }
        let quota = self.reserve_quota_for_rename(dir, (new_dir, new_name), flags)?;
        loop {
            let reservation = self.context.reserve(MetadataPurpose::Change(RENAME_ITEMS))?;
            let _rename = self.names.lock_renames();
            let from = self.end(dir, name)?;
            let to = self.end(new_dir, new_name)?;
            if from.subvolume.or(to.subvolume).is_some() {
                return Ok(Some(quota));
            }
            let Some(source) = from.inode.clone() else { return Err(Error::NotFound) };
            if to.inode.is_some() && flags.contains(RenameFlags::NOREPLACE) {
                return Err(Error::Exists);
            }
            if to.inode.is_none() && flags.contains(RenameFlags::EXCHANGE) {
                return Err(Error::NotFound);
            }
            if to.inode.as_ref().is_some_and(|target| target.id == source.id) {
                return Ok(None);
            }
            check_no_loop(&from, &to, flags)?;
            let mut inodes: Vec<_> =
                [Some(dir), Some(new_dir), from.inode.as_ref(), to.inode.as_ref()].into_iter().flatten().collect();
            let mut locked = Locked::new(&mut inodes)?;
            if !self.is_as_found(&from, &mut locked)? || !self.is_as_found(&to, &mut locked)? {
                continue;
            }
            let unlinked = match flags.contains(RenameFlags::EXCHANGE) {
                true => self.exchange(&from, &to, &mut locked, (reservation, quota))?,
                false => self.replace(&from, &to, &mut locked, (reservation, quota), (flags, caller))?,
            };
            drop(locked);
            drop(_rename);
            if let Some(id) = unlinked
                && !self.inodes.mark_unlinked(id)
            {
                self.delete_if_unlinked(id);
            }
            return Ok(None);
        }
    }

    /// Reserves quota for a rename that changes the names of one subvolume.
    fn reserve_quota_for_rename(
        &self,
        dir: &Arc<Inode>,
        (new_dir, new_name): (&Arc<Inode>, &[u8]),
        flags: RenameFlags,
    ) -> Result<QuotaReservation> {
        if !self.engine.has_quota_limits() {
            return Ok(QuotaReservation::default());
        }
        let base = if flags.contains(RenameFlags::EXCHANGE) { quota_blocks::EXCHANGE } else { quota_blocks::RENAME };
        let replaces = !flags.intersects(RenameFlags::EXCHANGE | RenameFlags::NOREPLACE)
            && self.end(new_dir, new_name).is_ok_and(|to| to.inode.is_some());
        let more = [
            (dir.id != new_dir.id, quota_blocks::RENAME_OTHER_DIR),
            (replaces, quota_blocks::RENAME_REPLACED),
            (flags.contains(RenameFlags::WHITEOUT), quota_blocks::RENAME_WHITEOUT),
        ];
        let more: u64 = more.iter().filter(|(applies, _)| *applies).map(|(_, nr_blocks)| nr_blocks).sum();
        Ok(self.engine.reserve_metadata_quota(new_dir.id.root, base.saturating_add(more))?)
    }

    /// Writes the data of a file that will replace another file. Programs write a new file and rename it over the old
    /// one. Each commit must show the name with the old or the new content, so the new content is written before the
    /// rename. A failure is only logged here, and reported when the file is synced.
    fn write_replacement(&self, dir: &Arc<Inode>, name: &[u8], new_dir: &Arc<Inode>, new_name: &[u8]) {
        if self.end(new_dir, new_name).is_ok_and(|to| to.inode.is_some())
            && let Ok(End { inode: Some(source), .. }) = self.end(dir, name)
            && source.state.read().is_regular()
            && let Err(error) = self.flush_inode(&source, 0..u64::MAX)
        {
            tracing::warn!("inode {} of subvolume {}: writing its data: {error}", source.id.ino, source.id.root);
        }
    }

    pub(crate) fn end<'n>(&self, dir: &Arc<Inode>, name: &'n [u8]) -> Result<End<'n>> {
        let (entry, sequence) = {
            let state = dir.read()?;
            if !state.is_dir() {
                return Err(Error::NotDirectory);
            }
            let hashed = HashedName::from(name);
            let found = match state.lacks_name(hashed) {
                true => None,
                false => dir_item::find_entry(&dir.home.tree, dir.id.ino, hashed)?,
            };
            (found, state.item.sequence)
        };
        let (inode, subvolume) = match &entry {
            None => (None, None),
            Some(entry) => match self.target_id(dir.id, &entry.location, name)? {
                id if id.is_stub() => {
                    return Err(Error::NotPermitted(
                        "the empty directory in place of a nested subvolume cannot be renamed or replaced",
                    ));
                }
                id if id.root != dir.id.root => (None, Some(id.root)),
                id => (Some(self.inode(id)?), None),
            },
        };
        Ok(End { dir: Arc::clone(dir), name, entry, inode, subvolume, sequence })
    }

    /// Whether a name still leads to the same target as before the locks were taken. Every change of a directory's
    /// names changes the directory's sequence number.
    pub(crate) fn is_as_found(&self, end: &End<'_>, locked: &mut Locked<'_>) -> Result<bool> {
        if locked.of(&end.dir).item.sequence == end.sequence {
            return Ok(true);
        }
        let entry = dir_item::find_entry(&end.dir.home.tree, end.dir.id.ino, end.name)?;
        Ok(entry.map(|entry| entry.location) == end.entry.as_ref().map(|entry| entry.location))
    }

    /// Renames and replaces. Returns the replaced inode if it lost its last name.
    fn replace(
        &self,
        from: &End<'_>,
        to: &End<'_>,
        locked: &mut Locked<'_>,
        (reservation, quota): (MetadataReservation<'_>, QuotaReservation),
        (flags, caller): (RenameFlags, &Caller),
    ) -> Result<Option<InodeId>> {
        let (source, source_entry) = from.found()?;
        check_may_remove(locked.of(&from.dir))?;
        check_may_change(locked.of(source))?;
        check_dir_takes_names(locked.of(&to.dir))?;
        let source_is_dir = locked.of(source).is_dir();
        if let Some(target) = &to.inode {
            check_may_remove(locked.of(&to.dir))?;
            check_may_change(locked.of(target))?;
            match (source_is_dir, locked.of(target).is_dir()) {
                (true, false) => return Err(Error::NotDirectory),
                (false, true) => return Err(Error::IsDirectory),
                (true, true) => check_empty(target, locked.of(target))?,
                (false, false) => {}
            }
        }
        let time = Timespec::now();
        let mut changes = Vec::with_capacity(12);
        plan_unlink(&mut changes, source, from.dir.id.ino, from.name)?;
        if let Some(target) = &to.inode {
            plan_unlink(&mut changes, target, to.dir.id.ino, to.name)?;
        }
        let entry = (source_entry.location, source_entry.file_type);
        self.plan_place(&mut changes, locked, to, source.id.ino, entry)?;
        let mut whiteout = None;
        if flags.contains(RenameFlags::WHITEOUT) {
            let draft = self.draft_whiteout(&from.dir, locked, caller, time)?;
            let ino = draft.inode.id.ino;
            let entry = (dir_item::inode_location(ino), draft.file_type as u8);
            self.plan_place(&mut changes, locked, from, ino, entry)?;
            whiteout = Some(draft);
        }

        let mut new_state = whiteout.as_ref().map(Draft::lock);
        whiteout.iter().for_each(|draft| self.inodes.insert(&draft.inode, 0, 0));
        let op = self.engine.begin(reservation);
        dir_item::put_changes(&op, &source.home.tree, changes);
        if source_is_dir {
            op.note_directory_moved();
        }
        let kept = whiteout.is_some().then_some(from.name.into());
        entry_changed(locked.of(&from.dir), time, kept, Some(from.name));
        let replaced = to.inode.is_some().then_some(to.name);
        entry_changed(locked.of(&to.dir), time, Some(to.name.into()), replaced);
        from.dir.put_item(&op, locked.of(&from.dir));
        to.dir.put_item(&op, locked.of(&to.dir));
        inode_changed(&mut locked.of(source).item, time);
        source.put_item(&op, locked.of(source));
        if let Some((draft, state)) = whiteout.as_ref().zip(new_state.as_mut()) {
            draft.put(&mut op.changes(&source.home.tree), state, 1, self);
        }
        quota.spend();
        let unlinked = to.inode.as_ref().filter(|target| drop_link(&op, target, locked.of(target), time));
        Ok(unlinked.map(|target| target.id))
    }

    /// Swaps the inodes of two names.
    fn exchange(
        &self,
        from: &End<'_>,
        to: &End<'_>,
        locked: &mut Locked<'_>,
        (reservation, quota): (MetadataReservation<'_>, QuotaReservation),
    ) -> Result<Option<InodeId>> {
        let ((source, source_entry), (target, target_entry)) = (from.found()?, to.found()?);
        for end in [from, to] {
            check_may_remove(locked.of(&end.dir))?;
            check_dir_takes_names(locked.of(&end.dir))?;
            check_may_change(locked.of(end.found()?.0))?;
        }
        let mut changes = Vec::with_capacity(12);
        plan_unlink(&mut changes, source, from.dir.id.ino, from.name)?;
        plan_unlink(&mut changes, target, to.dir.id.ino, to.name)?;
        let source_target = (source_entry.location, source_entry.file_type);
        let target_target = (target_entry.location, target_entry.file_type);
        self.plan_place(&mut changes, locked, to, source.id.ino, source_target)?;
        self.plan_place(&mut changes, locked, from, target.id.ino, target_target)?;

        let time = Timespec::now();
        let op = self.engine.begin(reservation);
        dir_item::put_changes(&op, &source.home.tree, changes);
        if locked.of(source).is_dir() || locked.of(target).is_dir() {
            op.note_directory_moved();
        }
        for dir in [&from.dir, &to.dir] {
            entry_changed(locked.of(dir), time, None, None);
            dir.put_item(&op, locked.of(dir));
        }
        for inode in [source, target] {
            inode_changed(&mut locked.of(inode).item, time);
            inode.put_item(&op, locked.of(inode));
        }
        quota.spend();
        Ok(None)
    }

    /// Plans an inode's name at one end of a rename, with the directory's next index.
    pub(crate) fn plan_place(
        &self,
        changes: &mut Vec<PlannedChange>,
        locked: &mut Locked<'_>,
        end: &End<'_>,
        ino: Ino,
        target: (ubtrfs_format::Key, u8),
    ) -> Result<()> {
        let (tree, dir) = (&end.dir.home.tree, end.dir.id.ino);
        let state = locked.of(&end.dir);
        let index = next_index(&end.dir, state)?;
        dir_item::plan_add(changes, tree, &self.geometry, dir, end.name, target, index)?;
        dir_item::plan_add_ref(changes, tree, &self.geometry, ino, dir, end.name, index)?;
        // If the rename fails, the index stays unused, which is harmless.
        state.next_index = index.checked_add(1);
        Ok(())
    }

    pub(crate) fn draft_whiteout(
        &self,
        dir: &Arc<Inode>,
        locked: &mut Locked<'_>,
        caller: &Caller,
        time: Timespec,
    ) -> Result<Draft> {
        let new = NewInode { mode: mode::CHAR, ..NewInode::default() };
        self.draft(dir, locked.of(dir), new, caller, time)
    }
}

impl End<'_> {
    fn found(&self) -> Result<(&Arc<Inode>, &DirItem)> {
        self.inode.as_ref().zip(self.entry.as_ref()).ok_or(Error::NotFound)
    }
}

pub(crate) fn check_arguments(name: &[u8], new_name: &[u8], flags: RenameFlags) -> Result<()> {
    let excluded = RenameFlags::NOREPLACE | RenameFlags::WHITEOUT;
    if !RenameFlags::all().contains(flags) || (flags.contains(RenameFlags::EXCHANGE) && flags.intersects(excluded)) {
        return Err(Error::InvalidArgument("these rename flags exclude each other"));
    }
    for name in [name, new_name] {
        if matches!(name, b"." | b"..") {
            return Err(Error::Busy("'.' and '..' cannot be renamed"));
        }
        dir_item::check_name(name)?;
    }
    Ok(())
}

/// Fails if a directory would end up inside itself.
pub(crate) fn check_no_loop(from: &End<'_>, to: &End<'_>, flags: RenameFlags) -> Result<()> {
    if from.dir.id == to.dir.id {
        return Ok(());
    }
    if let Some(source) = &from.inode
        && is_inside(&to.dir, source.id.ino)?
    {
        return Err(Error::InvalidArgument("a directory cannot be moved into itself"));
    }
    if let Some(target) = &to.inode
        && is_inside(&from.dir, target.id.ino)?
    {
        return Err(match flags.contains(RenameFlags::EXCHANGE) {
            true => Error::InvalidArgument("a directory cannot be moved into itself"),
            false => Error::NotEmpty,
        });
    }
    Ok(())
}

/// Whether `dir` is `ancestor` or below it.
fn is_inside(dir: &Inode, ancestor: Ino) -> Result<bool> {
    let mut ino = dir.id.ino;
    for _ in 0..MAX_DEPTH {
        if ino == ancestor {
            return Ok(true);
        }
        if ino == Ino::ROOT_DIR {
            return Ok(false);
        }
        match dir_item::first_link(&dir.home.tree, ino)? {
            Some((parent, _)) => ino = parent,
            None => return Ok(false),
        }
    }
    Err(dir_item::corrupt("depth", MAX_DEPTH, "expected directories that lead up to the root"))
}

/// Limit that ends a loop of damaged references; real directories are not as deep.
const MAX_DEPTH: u64 = 1 << 20;
/// Number of items to reserve for a rename, which changes about 20: three items (entry, index, reference) of each of
/// two removed and two added names, a whiteout with attributes, four inodes, an orphan item.
const RENAME_ITEMS: usize = 28;
