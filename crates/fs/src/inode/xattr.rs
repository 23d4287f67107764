//! Extended attributes of all namespaces, including ACLs and properties.
//!
//! An item has the key (inode, XATTR_ITEM, hash(name)) and holds every attribute whose name has that hash.

use std::sync::atomic::{AtomicU8, Ordering};

use ubtrfs_format::hash::name_hash;
use ubtrfs_format::item::{DirItem, FileType, InodeFlags, NAME_LEN_MAX, Timespec};
use ubtrfs_format::{Ino, Key, KeyType};
use ubtrfs_transaction::lock_rank::WriteGuard;
use ubtrfs_transaction::{FilesystemGeometry, QuotaReservation, Tree};

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::acl::{self, Acl};
use crate::inode::property;
use crate::inode::state::{Inode, InodeState};
use crate::items::dir_item::{self, PENDING, PlannedChange, in_tree};
use crate::items::quota_blocks;
use crate::session::context::MetadataPurpose;
use crate::types::{Caller, InodeId, XattrFlags, mode};

/// The attribute with the capabilities of an executable. A change of owner removes the capabilities.
pub(crate) const CAPABILITY: &[u8] = b"security.capability";

fn key_of(ino: Ino, name: &[u8]) -> Key {
    Key::new(ino.0, KeyType::XATTR_ITEM, name_hash(name))
}

/// Whether an inode has extended attributes; unknown until the first lookup. Most inodes have no extended attributes,
/// but programs query certain attributes on almost every access.
///
/// The value is set from the tree under the inode's state lock. Before an attribute is added, the value is set to
/// [`Self::SOME`] under the inode's state lock, held for writing. Removing the last attribute does not change the
/// value.
#[derive(Debug)]
pub(crate) struct KnownXattrs(AtomicU8);

impl KnownXattrs {
    const UNKNOWN: u8 = 0;
    const NONE: u8 = 1;
    const SOME: u8 = 2;

    /// The value for an inode that was just loaded from the tree.
    pub(crate) fn unknown() -> Self {
        Self(AtomicU8::new(Self::UNKNOWN))
    }

    /// The value for a new inode.
    pub(crate) fn of_new(has_some: bool) -> Self {
        Self(AtomicU8::new(if has_some { Self::SOME } else { Self::NONE }))
    }

    /// Whether it is certain that the inode has no attributes. If this returns false, the inode has attributes, or lost
    /// its last attribute after it was loaded.
    fn is_none(&self, inode: &Inode) -> Result<bool> {
        let known = self.0.load(Ordering::Relaxed);
        if known != Self::UNKNOWN {
            return Ok(known == Self::NONE);
        }
        if inode.home.bare.contains(inode.id) {
            self.0.store(Self::NONE, Ordering::Relaxed);
            return Ok(true);
        }
        let ino = inode.id.ino.0;
        let (start, end) = (Key::new(ino, KeyType::XATTR_ITEM, 0), Key::new(ino, KeyType::XATTR_ITEM, u64::MAX));
        let is_none = inode.home.tree.first_ge(&start, &end)?.is_none();
        self.0.store(if is_none { Self::NONE } else { Self::SOME }, Ordering::Relaxed);
        if is_none {
            inode.home.bare.add(inode.id);
        }
        Ok(is_none)
    }
}

/// Reads the value of an attribute of an inode whose state is locked.
pub(crate) fn get(inode: &Inode, state: &InodeState, name: &[u8]) -> Result<Option<Vec<u8>>> {
    if state.xattrs.is_none(inode)? { Ok(None) } else { read(&inode.home.tree, inode.id.ino, name) }
}

/// The value of an attribute.
pub(crate) fn read(tree: &Tree, ino: Ino, name: &[u8]) -> Result<Option<Vec<u8>>> {
    let entries = dir_item::read_entries(tree, &key_of(ino, name))?;
    Ok(entries.into_iter().find(|entry| entry.name == name).map(|entry| entry.data))
}

fn entry(name: &[u8], value: Vec<u8>) -> DirItem {
    let file_type = FileType::Xattr as u8;
    DirItem { location: Key::MIN, transid: PENDING, file_type, name: name.to_vec(), data: value }
}

/// Plans an attribute of a new inode that has no attribute with this name hash yet.
pub(crate) fn plan_new(ino: Ino, name: &[u8], value: Vec<u8>) -> PlannedChange {
    PlannedChange::PutEntries(key_of(ino, name), vec![entry(name, value)])
}

/// Plans a new value of an attribute, or its removal. The caller holds the inode's state lock for writing.
pub(crate) fn plan_set(
    changes: &mut Vec<PlannedChange>,
    (inode, state): (&Inode, &InodeState),
    geometry: &FilesystemGeometry,
    (name, value): (&[u8], Option<Vec<u8>>),
    flags: XattrFlags,
) -> Result<()> {
    let key = key_of(inode.id.ino, name);
    let mut entries = match state.xattrs.is_none(inode)? {
        true => Vec::new(),
        false => dir_item::read_entries(&inode.home.tree, &key)?,
    };
    if value.is_some() {
        state.xattrs.0.store(KnownXattrs::SOME, Ordering::Relaxed);
        inode.home.bare.remove(inode.id);
    }
    let at = entries.iter().position(|entry| entry.name == name);
    // A value that is too large for any item is refused before the flags are checked.
    let value_bytes = value.as_ref().map_or(0, Vec::len);
    if DirItem::HEADER_SIZE.saturating_add(name.len()).saturating_add(value_bytes) > dir_item::max_item_bytes(geometry)
    {
        return Err(Error::ItemFull);
    }
    match (at, value) {
        (Some(_), Some(_)) if flags.contains(XattrFlags::CREATE) => return Err(Error::Exists),
        (None, _) if flags.contains(XattrFlags::REPLACE) => return Err(Error::NoData),
        (None, None) => return Ok(()),
        (Some(at), None) => drop(entries.remove(at)),
        (Some(at), Some(value)) => {
            if let Some(old) = entries.get_mut(at) {
                *old = entry(name, value);
            }
        }
        (None, Some(value)) => entries.push(entry(name, value)),
    }
    let bytes: usize = entries.iter().map(dir_item::entry_bytes).sum();
    if bytes > dir_item::max_item_bytes(geometry) {
        return Err(Error::ItemFull);
    }
    changes.push(if entries.is_empty() { PlannedChange::Delete(key) } else { PlannedChange::PutEntries(key, entries) });
    Ok(())
}

/// The namespace of an attribute, by the prefix of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Namespace {
    User,
    Trusted,
    Security,
    AccessAcl,
    DefaultAcl,
    Compression,
}

impl Namespace {
    fn of(name: &[u8]) -> Result<Self> {
        if name.is_empty() || name.len() > NAME_LEN_MAX {
            return Err(Error::Range);
        }
        if name.contains(&0) {
            return Err(Error::InvalidArgument("an attribute name must not contain a zero byte"));
        }
        let plain: [(&[u8], Self); 3] =
            [(b"user.", Self::User), (b"trusted.", Self::Trusted), (b"security.", Self::Security)];
        for (prefix, namespace) in plain {
            match name.strip_prefix(prefix) {
                Some(b"") => return Err(Error::InvalidArgument("an attribute needs a name after its namespace")),
                Some(_) => return Ok(namespace),
                None => {}
            }
        }
        match name {
            acl::ACCESS => Ok(Self::AccessAcl),
            acl::DEFAULT => Ok(Self::DefaultAcl),
            property::COMPRESSION => Ok(Self::Compression),
            _ if name.starts_with(b"btrfs.") => Err(Error::InvalidArgument("no such property")),
            _ => Err(Error::NotSupported("a name that begins with none of user., trusted. and security.")),
        }
    }

    fn is_acl(self) -> bool {
        matches!(self, Self::AccessAcl | Self::DefaultAcl)
    }
}

impl Fs {
    /// The value of an attribute.
    pub fn getxattr(&self, id: InodeId, name: &[u8]) -> Result<Vec<u8>> {
        let namespace = match Namespace::of(name) {
            Err(Error::InvalidArgument(_)) if name.starts_with(b"btrfs.") => return Err(Error::NoData),
            other => other?,
        };
        if namespace.is_acl() && !self.options.acl {
            return Err(Error::NotSupported("ACLs, by the mount option noacl"));
        }
        // B1 of `bare_inodes`: the inode need not be in memory.
        if self.entered.bare.contains(id) && self.entered.get(id.root).is_some_and(|subvolume| !subvolume.is_gone()) {
            return Err(Error::NoData);
        }
        let inode = self.inode(id)?;
        let state = inode.read()?;
        get(&inode, &state, name)?.ok_or(Error::NoData)
    }

    /// Returns the names of all attributes.
    pub fn listxattr(&self, id: InodeId) -> Result<Vec<Vec<u8>>> {
        self.first_xattrs(id, usize::MAX)
    }

    /// The names of attributes, as [`Self::listxattr`] returns them, but not many more than have `len_bytes` together,
    /// each with a zero byte at its end.
    pub fn first_xattrs(&self, id: InodeId, len_bytes: usize) -> Result<Vec<Vec<u8>>> {
        let mut room = len_bytes;
        let inode = self.inode(id)?;
        let state = inode.read()?;
        if state.xattrs.is_none(&inode)? {
            return Ok(Vec::new());
        }
        let mut start = Key::new(id.ino.0, KeyType::XATTR_ITEM, 0);
        let end = Key::new(id.ino.0, KeyType::XATTR_ITEM, u64::MAX);
        let mut names = Vec::new();
        loop {
            let items = inode.home.tree.range(&start, &end, 64)?;
            for (_, item) in &items {
                let entries = DirItem::decode_all(item).map_err(in_tree(&inode.home.tree))?;
                for entry in entries {
                    room = room.saturating_sub(entry.name.len().saturating_add(1));
                    names.push(entry.name);
                }
            }
            if room == 0 {
                return Ok(names);
            }
            match items.last().and_then(|(last, _)| last.successor()) {
                Some(next) if items.len() == 64 => start = next,
                _ => return Ok(names),
            }
        }
    }

    /// Sets an attribute. An ACL is validated first. An access ACL also changes the mode, and the compression property
    /// changes the inode's flags.
    pub fn setxattr(&self, id: InodeId, name: &[u8], value: &[u8], flags: XattrFlags, caller: &Caller) -> Result<()> {
        let namespace = Namespace::of(name)?;
        if value.len() > VALUE_MAX {
            return Err(Error::TooBig);
        }
        self.change_xattr(id, (namespace, name), Some(value), flags, caller)
    }

    /// Removes an attribute.
    pub fn removexattr(&self, id: InodeId, name: &[u8], caller: &Caller) -> Result<()> {
        let namespace = Namespace::of(name)?;
        let flags = if namespace.is_acl() { XattrFlags::empty() } else { XattrFlags::REPLACE };
        self.change_xattr(id, (namespace, name), None, flags, caller)
    }

    fn change_xattr(
        &self,
        id: InodeId,
        (namespace, name): (Namespace, &[u8]),
        value: Option<&[u8]>,
        flags: XattrFlags,
        caller: &Caller,
    ) -> Result<()> {
        if namespace == Namespace::Trusted && !caller.is_privileged() {
            return Err(Error::NotPermitted("only the superuser can use trusted attributes"));
        }
        if id.is_stub() {
            return Err(Error::NotSupported("attributes of the directory of a nested subvolume in a snapshot"));
        }
        let inode = self.inode_to_change(id)?;
        // Removing an attribute frees space, so it needs no quota reservation.
        let quota = match value {
            Some(_) => self.engine.reserve_metadata_quota(id.root, quota_blocks::SETXATTR)?,
            None => QuotaReservation::default(),
        };
        let reservation = self.context.reserve(MetadataPurpose::Change(XATTR_ITEMS))?;
        let mut state = inode.write()?;
        check_may_change(&state)?;
        let mut changes = Vec::new();
        let mut new_mode = None;
        let value = match namespace {
            Namespace::AccessAcl | Namespace::DefaultAcl => {
                if !self.options.acl {
                    return Err(Error::NotSupported("ACLs, by the mount option noacl"));
                }
                let (value, changed_mode) = acl_value(&state, namespace, value)?;
                new_mode = changed_mode;
                value
            }
            Namespace::Compression => return self.set_property(&inode, state, (reservation, quota), value, flags),
            Namespace::User if !(state.is_regular() || state.is_dir()) => {
                return Err(Error::NotPermitted("only files and directories can have user attributes"));
            }
            Namespace::User | Namespace::Trusted | Namespace::Security => value.map(<[u8]>::to_vec),
        };
        let flags = if namespace.is_acl() { XattrFlags::empty() } else { flags };
        plan_set(&mut changes, (&inode, &state), &self.geometry, (name, value), flags)?;
        state.item.mode = new_mode.unwrap_or(state.item.mode);
        attribute_changed(&mut state);
        let op = self.engine.begin(reservation);
        dir_item::put_changes(&op, &inode.home.tree, changes);
        inode.put_item(&op, &mut state);
        quota.spend();
        Ok(())
    }

    fn set_property(
        &self,
        inode: &crate::inode::state::Inode,
        mut state: WriteGuard<'_, InodeState>,
        (reservation, quota): (ubtrfs_transaction::MetadataReservation<'_>, QuotaReservation),
        value: Option<&[u8]>,
        flags: XattrFlags,
    ) -> Result<()> {
        let property = property::PropertyValue::parse(value.unwrap_or_default())?;
        if property != property::PropertyValue::Reset && state.has_flags(InodeFlags::NODATACOW) {
            return Err(Error::InvalidArgument("files without copy-on-write cannot be compressed"));
        }
        // Only regular files and directories have this property. As on Linux, a valid value for an inode of another
        // type is accepted but not stored.
        if !(state.is_regular() || state.is_dir()) {
            return Ok(());
        }
        let stored = value.filter(|value| !value.is_empty()).map(<[u8]>::to_vec);
        let mut changes = Vec::new();
        let attribute = (property::COMPRESSION, stored);
        plan_set(&mut changes, (inode, &state), &self.geometry, attribute, flags)?;
        property.apply(&mut state);
        attribute_changed(&mut state);
        let op = self.engine.begin(reservation);
        dir_item::put_changes(&op, &inode.home.tree, changes);
        inode.put_item(&op, &mut state);
        quota.spend();
        Ok(())
    }
}

/// Returns the value to store for an ACL attribute and, for an access ACL, the new mode. An access ACL that the mode
/// can express is stored as the mode alone.
fn acl_value(state: &InodeState, namespace: Namespace, value: Option<&[u8]>) -> Result<(Option<Vec<u8>>, Option<u32>)> {
    if state.file_type_bits() == mode::SYMLINK {
        return Err(Error::NotSupported("ACLs of symbolic links"));
    }
    let acl = match value {
        Some(value) => Acl::parse(value)?,
        None => None,
    };
    match (namespace, acl) {
        (_, None) => Ok((None, None)),
        (Namespace::DefaultAcl, Some(acl)) if state.is_dir() => Ok((Some(acl.encode()), None)),
        (Namespace::DefaultAcl, Some(_)) => Err(Error::AccessDenied),
        (_, Some(acl)) => {
            let new_mode = acl.apply_to_mode(state.item.mode);
            Ok(((!acl.is_minimal()).then(|| acl.encode()), Some(new_mode)))
        }
    }
}

/// Fails if the inode's flags forbid changes of attributes.
pub(crate) fn check_may_change(state: &InodeState) -> Result<()> {
    if state.has_flags(InodeFlags::IMMUTABLE | InodeFlags::APPEND) {
        return Err(Error::NotPermitted("the file is immutable or append-only"));
    }
    Ok(())
}

fn attribute_changed(state: &mut InodeState) {
    state.item.ctime = Timespec::now();
    state.item.sequence = state.item.sequence.wrapping_add(1);
    state.inherit = None;
}

/// The longest value that Linux accepts.
const VALUE_MAX: usize = 64 << 10;
const XATTR_ITEMS: usize = 4;
