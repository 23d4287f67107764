//! Changes of mode, owner, times and size, and of the flags that chattr sets.

use ubtrfs_format::item::{InodeFlags, Timespec};
use ubtrfs_transaction::QuotaReservation;

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::acl::{self, Acl};
use crate::inode::property;
use crate::inode::state::{CompressionProperty, Inode, InodeState};
use crate::inode::xattr::{self, check_may_change};
use crate::items::{dir_item, quota_blocks};
use crate::types::{Attr, Caller, FlagRights, InodeId, SetAttr, SetTime, XattrFlags, mode};

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
        let reservation = match is_removal {
            true => self.reserve_for_removal(SETATTR_ITEMS)?,
            false => self.reserve(SETATTR_ITEMS)?,
        };
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

    /// Removes set-user-id and set-group-id from a file whose content was changed, except the bits in `kept`. Other
    /// permissions do not change. Neither the flags append-only and immutable nor a read-only subvolume prevent the
    /// removal, because the change of the content was permitted. The removal succeeds on a full filesystem, because a
    /// file can be truncated there.
    pub fn drop_privileges(&self, id: InodeId, kept: u32) -> Result<()> {
        let inode = self.inode_of_open_file(id)?;
        let reservation = self.reserve_for_removal(SETATTR_ITEMS)?;
        let mut state = inode.write()?;
        state.item.mode &= mode::TYPE | kept | !(mode::SETUID | mode::SETGID);
        state.item.ctime = Timespec::now();
        state.count_change();
        let op = self.engine.begin(reservation);
        inode.put_item(&op, &mut state);
        Ok(())
    }

    /// Removes the capabilities of a file whose content was changed. Returns whether the file had capabilities. As with
    /// [`Fs::drop_privileges`], the flags append-only and immutable do not prevent the removal.
    pub fn drop_capability(&self, id: InodeId) -> Result<bool> {
        let inode = self.inode(id)?;
        if xattr::get(&inode, &*inode.read()?, xattr::CAPABILITY)?.is_none() {
            return Ok(false);
        }
        drop(inode);
        // As in `drop_privileges`, the file was open, so its flags or a read-only subvolume do not prevent the removal.
        let inode = self.inode_of_open_file(id)?;
        let reservation = self.reserve_for_removal(SETATTR_ITEMS)?;
        let mut state = inode.write()?;
        let mut changes = Vec::new();
        self.plan_drop_capability(&mut changes, &inode, &state)?;
        if changes.is_empty() {
            return Ok(false);
        }
        state.item.ctime = Timespec::now();
        state.count_change();
        let op = self.engine.begin(reservation);
        dir_item::put_changes(&op, &inode.home.tree, changes);
        inode.put_item(&op, &mut state);
        Ok(true)
    }

    /// Changes the attributes of a stub directory in memory only; the change is lost when the directory leaves memory.
    /// Linux does so too, so that `chown -R` and `chmod -R` do not fail at the names of nested subvolumes in a
    /// snapshot.
    fn set_stub_attr(&self, id: InodeId, set: &SetAttr) -> Result<Attr> {
        let _changing = self.begin_change()?;
        let inode = self.inode(id)?;
        inode.home.check_writable()?;
        let mut state = inode.write()?;
        apply(&mut state, set, set.mode, Timespec::now());
        Ok(self.attr_of(&inode, &state))
    }

    fn plan_drop_capability(
        &self,
        changes: &mut Vec<dir_item::Change>,
        inode: &Inode,
        state: &InodeState,
    ) -> Result<()> {
        let gone = (xattr::CAPABILITY, None);
        xattr::plan_set(changes, (inode, state), &self.geometry, gone, XattrFlags::empty())
    }

    /// Plans the change of the access ACL to match a new mode, if the inode has an access ACL.
    fn plan_acl_mode(
        &self,
        changes: &mut Vec<dir_item::Change>,
        (inode, state): (&Inode, &InodeState),
        new_mode: u32,
    ) -> Result<()> {
        let Some(raw) = xattr::get(inode, state, acl::ACCESS)? else { return Ok(()) };
        let Some(mut acl) = Acl::parse(&raw)? else { return Ok(()) };
        acl.set_mode(new_mode);
        let value = (acl::ACCESS, Some(acl.encode()));
        xattr::plan_set(changes, (inode, state), &self.geometry, value, XattrFlags::empty())
    }

    /// Returns the flags as FS_IOC_GETFLAGS shows them.
    pub fn inode_flags(&self, id: InodeId) -> Result<u32> {
        Ok(to_ioctl_flags(self.inode(id)?.read()?.item.flags()))
    }

    /// Sets flags as FS_IOC_SETFLAGS does. The caller has the rights of its user id.
    pub fn set_inode_flags(&self, id: InodeId, flags: u32, caller: &Caller) -> Result<()> {
        self.set_inode_flags_with(id, flags, caller, caller.flag_rights())
    }

    /// Sets flags as FS_IOC_SETFLAGS does, with the rights in `rights` instead of those that the caller's user id
    /// gives. The user id still decides whether the caller owns the inode.
    pub fn set_inode_flags_with(&self, id: InodeId, flags: u32, caller: &Caller, rights: FlagRights) -> Result<()> {
        self.change_inode_flags(id, flags, false, caller, rights)
    }

    /// Sets flags as FS_IOC_FSSETXATTR does: `flags` are flags of FS_IOC_SETFLAGS, and those for compression are ignored,
    /// so the property `btrfs.compression` stays as it is.
    pub fn set_inode_xflags(&self, id: InodeId, flags: u32, caller: &Caller, rights: FlagRights) -> Result<()> {
        self.change_inode_flags(id, flags, true, caller, rights)
    }

    fn change_inode_flags(
        &self,
        id: InodeId,
        flags: u32,
        keeps_compression: bool,
        caller: &Caller,
        rights: FlagRights,
    ) -> Result<()> {
        if flags & !SETTABLE != 0 {
            return Err(Error::NotSupported("these inode flags"));
        }
        let excluded = [FS_COMPR | FS_NOCOMP, FS_COMPR | FS_NOCOW];
        if excluded.iter().any(|both| flags & both == *both) {
            return Err(Error::InvalidArgument("these flags exclude each other"));
        }
        let inode = self.inode_to_change(id)?;
        let quota = self.engine.reserve_metadata_quota(id.root, quota_blocks::SET_FLAGS)?;
        let reservation = self.reserve(SETATTR_ITEMS)?;
        let mut state = inode.write()?;
        let old = to_ioctl_flags(state.item.flags());
        let about_compression = FS_COMPR | FS_NOCOMP;
        let flags = match keeps_compression {
            true => flags & !about_compression | old & about_compression,
            false => flags,
        };
        let flags = mask_for_type(&state, flags);
        if (old ^ flags) & (FS_IMMUTABLE | FS_APPEND) != 0 && !rights.immutable {
            return Err(Error::NotPermitted("changing immutable or append needs CAP_LINUX_IMMUTABLE"));
        }
        if !rights.as_owner && caller.uid != state.item.uid {
            return Err(Error::NotPermitted("not the owner"));
        }
        // To switch between NOCOW and the flags for compression, Linux requires two calls: one clears the old flag, the
        // next sets the new one.
        if (old & FS_NOCOW != 0 && flags & about_compression != 0)
            || (old & about_compression != 0 && flags & FS_NOCOW != 0)
        {
            return Err(Error::InvalidArgument("files without copy-on-write cannot be compressed"));
        }
        let mut changes = Vec::new();
        let before = (state.item.flags, state.compression);
        if !keeps_compression {
            self.plan_compression_flags(&mut changes, &inode, &mut state, flags)
                .inspect_err(|_| (state.item.flags, state.compression) = before)?;
        }
        apply_ioctl_flags(&mut state, flags);
        state.item.ctime = Timespec::now();
        state.item.sequence = state.item.sequence.wrapping_add(1);
        state.inherit = None;
        let op = self.engine.begin(reservation);
        dir_item::put_changes(&op, &inode.home.tree, changes);
        inode.put_item(&op, &mut state);
        quota.spend();
        Ok(())
    }

    /// Sets each flag that `mask` contains to its state in `flags`. The compression method stays as it is, whereas
    /// FS_IOC_SETFLAGS would reset it.
    pub(crate) fn set_flags_of(&self, id: InodeId, mask: InodeFlags, flags: InodeFlags) -> Result<()> {
        let inode = self.inode_to_change(id)?;
        let reservation = self.reserve(SETATTR_ITEMS)?;
        let mut state = inode.write()?;
        let before = state.item.flags();
        let after = (before & !mask) | (flags & mask);
        if after == before {
            return Ok(());
        }
        state.item.flags = after.bits();
        state.item.ctime = Timespec::now();
        state.item.sequence = state.item.sequence.wrapping_add(1);
        state.inherit = None;
        let op = self.engine.begin(reservation);
        inode.put_item(&op, &mut state);
        Ok(())
    }

    /// Sets the inode's flags for compression in `state`, and plans the change of the property. `FS_COMPR` sets the
    /// property to the mount's method (zlib if the mount has none); flags without `FS_COMPR`, or with `FS_NOCOMP`,
    /// remove it.
    fn plan_compression_flags(
        &self,
        changes: &mut Vec<dir_item::Change>,
        inode: &Inode,
        state: &mut InodeState,
        new: u32,
    ) -> Result<()> {
        let mut value = None;
        let mut flags = state.item.flags();
        flags.remove(InodeFlags::COMPRESS | InodeFlags::NOCOMPRESS);
        state.compression = CompressionProperty::Unset;
        if new & FS_NOCOMP != 0 {
            flags.insert(InodeFlags::NOCOMPRESS);
        } else if new & FS_COMPR != 0 {
            let method = self.options.compress.map_or(ubtrfs_format::item::Compression::Zlib, |spec| spec.kind);
            flags.insert(InodeFlags::COMPRESS);
            state.compression = CompressionProperty::Method(method);
            value = Some(property::name_of(method).to_vec());
        }
        state.item.flags = flags.bits();
        let attribute = (property::COMPRESSION, value);
        xattr::plan_set(changes, (inode, state), &self.geometry, attribute, XattrFlags::empty())
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

/// Returns a file's mode after a change of its owner: without set-uid, and without set-gid if the group may execute it
/// (otherwise set-gid means mandatory locking).
pub(crate) fn without_privileges(file_mode: u32) -> u32 {
    let group_exec = file_mode & 0o010 != 0;
    file_mode & !mode::SETUID & if group_exec { !mode::SETGID } else { !0 }
}

fn to_ioctl_flags(flags: InodeFlags) -> u32 {
    FLAG_PAIRS.iter().filter(|(disk, _)| flags.contains(*disk)).map(|(_, ioctl)| ioctl).sum()
}

/// Sets the flags except those for compression, which [`Fs::plan_compression_flags`] sets, and verity, which cannot be
/// changed.
fn apply_ioctl_flags(state: &mut InodeState, new: u32) {
    let mut flags = state.item.flags();
    for (disk, ioctl) in FLAG_PAIRS {
        if ioctl & (FS_COMPR | FS_NOCOMP | FS_NOCOW | FS_VERITY) == 0 {
            flags.set(*disk, new & ioctl != 0);
        }
    }
    // As on Linux, a file with content keeps its NOCOW setting, because the setting decides whether extents have
    // checksums, and the file has extents already.
    let wants_nocow = new & FS_NOCOW != 0;
    if !state.is_regular() {
        flags.set(InodeFlags::NODATACOW, wants_nocow);
    } else if state.item.size == 0 {
        flags.set(InodeFlags::NODATACOW | InodeFlags::NODATASUM, wants_nocow);
    }
    state.item.flags = flags.bits();
}

fn mask_for_type(state: &InodeState, flags: u32) -> u32 {
    match state.file_type_bits() {
        mode::DIRECTORY => flags,
        mode::REGULAR => flags & !FS_DIRSYNC,
        _ => flags & (FS_NODUMP | FS_NOATIME),
    }
}

const FS_COMPR: u32 = 0x4;
const FS_SYNC: u32 = 0x8;
const FS_IMMUTABLE: u32 = 0x10;
const FS_APPEND: u32 = 0x20;
const FS_NODUMP: u32 = 0x40;
const FS_NOATIME: u32 = 0x80;
const FS_NOCOMP: u32 = 0x400;
const FS_DIRSYNC: u32 = 0x1_0000;
const FS_VERITY: u32 = 0x10_0000;
const FS_NOCOW: u32 = 0x80_0000;

const FLAG_PAIRS: &[(InodeFlags, u32)] = &[
    (InodeFlags::COMPRESS, FS_COMPR),
    (InodeFlags::SYNC, FS_SYNC),
    (InodeFlags::IMMUTABLE, FS_IMMUTABLE),
    (InodeFlags::APPEND, FS_APPEND),
    (InodeFlags::NODUMP, FS_NODUMP),
    (InodeFlags::NOATIME, FS_NOATIME),
    (InodeFlags::NOCOMPRESS, FS_NOCOMP),
    (InodeFlags::DIRSYNC, FS_DIRSYNC),
    (InodeFlags::NODATACOW, FS_NOCOW),
    (InodeFlags::RO_VERITY, FS_VERITY),
];

const SETTABLE: u32 =
    FS_COMPR | FS_SYNC | FS_IMMUTABLE | FS_APPEND | FS_NODUMP | FS_NOATIME | FS_NOCOMP | FS_DIRSYNC | FS_NOCOW;

/// Number of items to reserve for a change of attributes. A change puts at most three: the inode item, the access ACL,
/// and the capabilities or the compression property.
const SETATTR_ITEMS: usize = 6;
