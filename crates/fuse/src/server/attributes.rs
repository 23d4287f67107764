//! Changes of attributes, and the privileges that a file loses when its owner or content changes.

use ubtrfs_fs::{Attr, InodeId, Result, SetAttr, SetTime, mode};

use super::Server;
use crate::attr::{present_time, set_time, timespec};
use crate::caller::caller;
use crate::protocol::{FuseRequest, Reply, Setattr};

impl Server {
    pub(super) fn setattr(&self, req: &FuseRequest<'_>, wire: &Setattr, reply: &mut Reply<'_>) -> Result<()> {
        self.activity.note_change();
        // ftruncate to the same size changes the times; truncate does not.
        let touched = (wire.size().is_some() && wire.is_by_handle()).then_some(SetTime::Now);
        let id = self.id(req.node)?;
        if wire.is_empty() {
            let attr = self.chown_to_nobody(req, id)?;
            self.reply_attr(&attr, reply);
            return Ok(());
        }
        let set = SetAttr {
            mode: wire.mode().map(|mode| mode & mode::PERMISSIONS),
            uid: wire.uid(),
            gid: wire.gid(),
            size: wire.size(),
            atime: wire.atime().map(set_time),
            mtime: wire.mtime().map(set_time).or(touched),
            ctime: wire.ctime().map(timespec),
            otime: None,
        };
        let before = match set.uid.or(set.gid) {
            Some(_) => Some(self.fs.getattr(id)?),
            None => None,
        };
        // With `no_open`, the server checked nothing when the file was opened, so a truncation must fail here if the
        // file is immutable.
        let mut attr = match set.size.is_some() && wire.is_by_handle() && !self.no_open {
            true => self.fs.setattr_opened(id, &set, &caller(req, 0))?,
            false => self.fs.setattr(id, &set, &caller(req, 0))?,
        };
        if set.size.is_some() {
            self.drop_capability(id, false)?;
        }
        if let Some(before) = before.filter(|before| !before.is_dir()) {
            let kept = self.groups.mode_after_chown(req, attr.mode, before.gid);
            self.keep_of_mode(id, &attr, kept)?;
            attr.mode = kept;
        } else if wire.kills_suid_sgid() && attr.mode & (mode::SETUID | mode::SETGID) != 0 {
            self.clear_suid_sgid(req, id)?;
            attr = self.fs.getattr(id)?;
        }
        self.reply_attr(&attr, reply);
        Ok(())
    }

    /// Handles a chown that sets neither user nor group. Such a chown changes ctime, even of immutable files, and
    /// clears the set-id bits like any chown. The kernel also sends such a chown before a fallocate by a user who is
    /// not the owner. So nothing changes if the file has set-id bits and the caller is neither the owner nor
    /// privileged. Before a write to a file with capabilities, the kernel sends such a chown too
    /// ([`crate::caller::RemovedCapability`]), which keeps the set-id bits if the caller may keep them.
    fn chown_to_nobody(&self, req: &FuseRequest<'_>, id: InodeId) -> Result<Attr> {
        let attr = self.fs.getattr(id)?;
        let has_bits = !attr.is_dir() && attr.mode & (mode::SETUID | mode::SETGID) != 0;
        let is_write = self.removed_capability.precedes(req) && self.groups.may_keep_set_id(req);
        let set = if !has_bits || is_write {
            let mtime = Some(SetTime::At(attr.mtime));
            SetAttr { mtime, ctime: Some(present_time()), ..SetAttr::default() }
        } else if req.uid == attr.uid || self.groups.acts_as_owner(req) {
            SetAttr { uid: Some(attr.uid), ..SetAttr::default() }
        } else {
            return Ok(attr);
        };
        self.fs.setattr(id, &set, &caller(req, 0))
    }

    /// Clears set-user-id of a file whose content changed, and set-group-id unless `without_set_id` keeps it. The
    /// kernel has found that the caller may not keep these bits.
    pub(super) fn clear_suid_sgid(&self, req: &FuseRequest<'_>, id: InodeId) -> Result<()> {
        let attr = self.fs.getattr(id)?;
        self.keep_of_mode(id, &attr, self.groups.mode_after_change(req, attr.mode, attr.gid))
    }

    /// Removes the capability ([`Self::drop_capability`]), and clears set-user-id and set-group-id like
    /// [`Self::clear_suid_sgid`], after a content change for which the kernel does not tell whether the caller may keep
    /// these bits.
    pub(super) fn content_changed(&self, req: &FuseRequest<'_>, id: InodeId) -> Result<()> {
        self.drop_capability(id, false)?;
        let attr = self.fs.getattr(id)?;
        if attr.mode & (mode::SETUID | mode::SETGID) == 0 || self.groups.may_keep_set_id(req) {
            return Ok(());
        }
        self.keep_of_mode(id, &attr, self.groups.mode_after_change(req, attr.mode, attr.gid))
    }

    pub(super) fn keep_of_mode(&self, id: InodeId, attr: &Attr, kept: u32) -> Result<()> {
        if kept != attr.mode {
            self.fs.drop_privileges(id, kept)?;
            self.seeker.attributes_changed(self.nodes.node(id));
        }
        Ok(())
    }

    /// Removes the capability of a file whose content changes. In a mount with extended attributes, the kernel removes
    /// the capability itself, except for files that are open for appending only, whose writes bypass the kernel's page
    /// cache.
    pub(super) fn drop_capability(&self, id: InodeId, appends_only: bool) -> Result<()> {
        if self.no_xattrs || appends_only {
            self.fs.drop_capability(id)?;
        }
        Ok(())
    }
}
