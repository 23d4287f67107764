//! Changes of the flags that chattr sets; clearing set-id bits and capabilities of a file whose content changes.

use ubtrfs_format::item::{InodeFlags, Timespec};

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::acl::{self, Acl};
use crate::inode::property;
use crate::inode::state::{CompressionProperty, Inode, InodeState};
use crate::inode::xattr;
use crate::items::{dir_item, quota_blocks};
use crate::session::context::MetadataPurpose;
use crate::types::{Caller, FlagRights, InodeId, XattrFlags, mode};

impl Fs {
    /// Removes set-user-id and set-group-id from a file whose content was changed, except the bits in `kept`. Other
    /// permissions do not change. Neither the flags append-only and immutable nor a read-only subvolume prevent the
    /// removal, because the change of the content was permitted. The removal succeeds on a full filesystem, because a
    /// file can be truncated there.
    pub fn drop_privileges(&self, id: InodeId, kept: u32) -> Result<()> {
        let inode = self.inode_of_open_file(id)?;
        let reservation = self.context.reserve(MetadataPurpose::Removal(SETATTR_ITEMS))?;
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
        let reservation = self.context.reserve(MetadataPurpose::Removal(SETATTR_ITEMS))?;
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

    /// Plans the removal of the capabilities of an inode.
    pub(crate) fn plan_drop_capability(
        &self,
        changes: &mut Vec<dir_item::PlannedChange>,
        inode: &Inode,
        state: &InodeState,
    ) -> Result<()> {
        let gone = (xattr::CAPABILITY, None);
        xattr::plan_set(changes, (inode, state), &self.geometry, gone, XattrFlags::empty())
    }

    /// Plans the change of the access ACL to match a new mode, if the inode has an access ACL.
    pub(crate) fn plan_acl_mode(
        &self,
        changes: &mut Vec<dir_item::PlannedChange>,
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

    /// Sets flags as FS_IOC_FSSETXATTR does: `flags` are flags of FS_IOC_SETFLAGS. The flags for compression are
    /// ignored, so the property `btrfs.compression` stays as it is.
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
        let reservation = self.context.reserve(MetadataPurpose::Change(SETATTR_ITEMS))?;
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
    /// FS_IOC_SETFLAGS would reset it. Flags about data affect only data that is written afterwards, so set them on
    /// empty files.
    pub fn set_flags_of(&self, id: InodeId, mask: InodeFlags, flags: InodeFlags) -> Result<()> {
        let inode = self.inode_to_change(id)?;
        let reservation = self.context.reserve(MetadataPurpose::Change(SETATTR_ITEMS))?;
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
        changes: &mut Vec<dir_item::PlannedChange>,
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
            let method =
                self.data_options.read().compress.map_or(ubtrfs_format::item::Compression::Zlib, |spec| spec.kind);
            flags.insert(InodeFlags::COMPRESS);
            state.compression = CompressionProperty::Method(method);
            value = Some(method.name().into());
        }
        state.item.flags = flags.bits();
        let attribute = (property::COMPRESSION, value);
        xattr::plan_set(changes, (inode, state), &self.geometry, attribute, XattrFlags::empty())
    }
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

/// Sets the flags, except the flags for compression, which [`Fs::plan_compression_flags`] sets, and verity, which
/// cannot be changed.
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
pub(crate) const SETATTR_ITEMS: usize = 6;
