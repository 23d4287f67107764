//! Changes of mode, owner, times and size.

use ubtrfs_format::item::{InodeFlags, Timespec};
use ubtrfs_transaction::QuotaReservation;

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::setattr::{SETATTR_ITEMS, without_privileges};
use crate::inode::state::InodeState;
use crate::inode::xattr::check_may_change;
use crate::items::{dir_item, quota_blocks};
use crate::session::context::MetadataPurpose;
use crate::types::{Attr, Caller, InodeId, SetAttr, SetTime, mode};

impl Fs {
    /// Changes attributes. A change of owner removes the capabilities of a regular file. Unless the call also sets the
    /// mode, a change of owner removes set-uid and, if the group may execute the file, set-gid from an inode that is
    /// not a directory. A change of mode also changes the access ACL.
    pub fn setattr(&self, id: InodeId, set: &SetAttr, _caller: &Caller) -> Result<Attr> {
        self.change_attributes(id, set, false)
    }

    /// Changes attributes through a file that is open for writing. A file that is open for writing can still be
    /// truncated if it became immutable after it was opened.
    pub fn setattr_opened(&self, id: InodeId, set: &SetAttr, _caller: &Caller) -> Result<Attr> {
        self.change_attributes(id, set, true)
    }

    fn change_attributes(&self, id: InodeId, set: &SetAttr, is_open: bool) -> Result<Attr> {
        if id.is_stub() && set.size.is_none() {
            return self.set_stub_attr(id, set);
        }
        // A kernel with a writeback cache sends the times of a file after the file's writes. The writes were permitted
        // when they were made, so the times are accepted even if the subvolume is read-only by now.
        let written_back = set.mtime.is_some()
            && set.ctime.is_some()
            && (set.mode.or(set.uid).or(set.gid).is_none() && set.size.is_none() && set.atime.is_none())
            && set.otime.is_none();
        let inode = match written_back {
            true => self.inode_of_open_file(id)?,
            false => self.inode_to_change(id)?,
        };
        // Shortening a file succeeds on a full filesystem, even if the request also sets times, as the kernel's
        // requests do.
        let is_removal = match set.size {
            Some(size) => {
                check_may_resize(&*inode.read()?, is_open)?;
                self.set_size(&inode, size)?
            }
            None => false,
        };
        if *set == (SetAttr { size: set.size, ..SetAttr::default() }) {
            return Ok(self.attr_of(&inode, &*inode.read()?));
        }
        // The change adds no tree block, but fails at a limit of a quota group, as on Linux. What must not fail are
        // changes of size, which have their own rules, and changes that were accepted already.
        let _quota = match written_back || set.size.is_some() {
            true => QuotaReservation::default(),
            false => self.engine.reserve_metadata_quota(id.root, quota_blocks::SETATTR)?,
        };
        let purpose =
            if is_removal { MetadataPurpose::Removal(SETATTR_ITEMS) } else { MetadataPurpose::Change(SETATTR_ITEMS) };
        let reservation = self.context.reserve(purpose)?;
        let mut state = inode.write()?;
        let only_now = set.mode.or(set.uid).or(set.gid).is_none()
            && [set.atime, set.mtime].iter().all(|time| !matches!(time, Some(SetTime::At(_))))
            && set.otime.is_none();
        // As on a write, setting the current time is allowed for append-only files.
        let like_a_write = only_now && (!state.has_flags(InodeFlags::IMMUTABLE) || (is_open && set.size.is_some()));
        if !written_back && !like_a_write {
            check_may_change(&state)?;
        }
        let mut changes = Vec::new();
        let mut new_mode = set.mode;
        if set.uid.or(set.gid).is_some() && !state.is_dir() {
            new_mode = Some(new_mode.unwrap_or_else(|| without_privileges(state.item.mode)));
            if state.is_regular() {
                self.plan_drop_capability(&mut changes, &inode, &state)?;
            }
        }
        if set.mode.is_some() && state.file_type_bits() != mode::SYMLINK {
            self.plan_acl_mode(&mut changes, (&inode, &state), new_mode.unwrap_or_default())?;
        }
        let time = Timespec::now();
        apply(&mut state, set, new_mode, time);
        let op = self.engine.begin(reservation);
        dir_item::put_changes(&op, &inode.home.tree, changes);
        inode.put_item(&op, &mut state);
        drop(op);
        Ok(self.attr_of(&inode, &state))
    }

    /// Changes the attributes of a stub directory in memory only; the change is lost when the directory leaves memory.
    /// Linux does so too, so that `chown -R` and `chmod -R` do not fail at the names of nested subvolumes in a
    /// snapshot.
    fn set_stub_attr(&self, id: InodeId, set: &SetAttr) -> Result<Attr> {
        let _changing = self.context.begin_change()?;
        let inode = self.inode(id)?;
        inode.home.check_writable()?;
        let mut state = inode.write()?;
        apply(&mut state, set, set.mode, Timespec::now());
        Ok(self.attr_of(&inode, &state))
    }
}

/// Fails if the inode is not a regular file, or must not be resized.
fn check_may_resize(state: &InodeState, is_open: bool) -> Result<()> {
    match state.file_type_bits() {
        mode::REGULAR if is_open && !state.has_flags(InodeFlags::APPEND) => Ok(()),
        mode::REGULAR => check_may_change(state),
        mode::DIRECTORY => Err(Error::IsDirectory),
        _ => Err(Error::InvalidArgument("only the size of a regular file can be set")),
    }
}

fn apply(state: &mut InodeState, set: &SetAttr, new_mode: Option<u32>, time: Timespec) {
    let item = &mut state.item;
    if let Some(new_mode) = new_mode {
        item.mode = item.mode & mode::TYPE | new_mode & mode::PERMISSIONS;
    }
    item.uid = set.uid.unwrap_or(item.uid);
    item.gid = set.gid.unwrap_or(item.gid);
    let resolve = |set: Option<SetTime>, old: Timespec| match set {
        None => old,
        Some(SetTime::Now) => time,
        Some(SetTime::At(at)) => Timespec { sec: at.sec, nsec: at.nsec.min(999_999_999) },
    };
    item.atime = resolve(set.atime, item.atime);
    item.mtime = resolve(set.mtime, item.mtime);
    item.otime = set.otime.unwrap_or(item.otime);
    item.ctime = set.ctime.unwrap_or(time);
    item.sequence = item.sequence.wrapping_add(1);
}
