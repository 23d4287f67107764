//! New inodes: files, directories, symbolic links, device nodes, unnamed temporary files.

use std::sync::Arc;

use ubtrfs_format::item::{
    Compression, DirItem, FileExtent, FileExtentBody, FileType, InodeFlags, InodeItem, Timespec,
};
use ubtrfs_format::{Ino, Key, KeyType, objectid};
use ubtrfs_transaction::TreeChanges;
use ubtrfs_transaction::lock_rank::WriteGuard;

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::acl::{self, Acl};
use crate::inode::property;
use crate::inode::state::{InheritedAttributes, Inode, InodeState, NextInos};
use crate::inode::subvolume::NewInos;
use crate::inode::xattr::{self, KnownXattrs};
use crate::items::dir_item::{self, HashedName, NameSlot, PlannedChange};
use crate::items::quota_blocks;
use crate::session::context::MetadataPurpose;
use crate::types::{Attr, Caller, InodeId, NewInode, mode, rdev_to_item};

/// A planned inode: its items are not put yet, and its state is not visible yet.
pub(crate) struct Draft {
    pub(crate) inode: Arc<Inode>,
    pub(crate) file_type: FileType,
    /// The changes that put the inode's extended attributes.
    changes: Vec<PlannedChange>,
    symlink_target: Option<Vec<u8>>,
}

/// The properties of a new inode, before it has a number.
struct InodePlan {
    item: InodeItem,
    attributes: Vec<(&'static [u8], Vec<u8>)>,
    /// The compression method, if the attributes include the `btrfs.compression` property.
    compression: Option<Compression>,
}

impl Fs {
    /// Creates an inode with a name.
    pub fn create(&self, dir: InodeId, name: &[u8], new: NewInode<'_>, caller: &Caller) -> Result<Attr> {
        dir_item::check_new_name(name)?;
        let dir_inode = self.inode_to_change(dir)?;
        let is_symlink = new.mode & mode::TYPE == mode::SYMLINK;
        let nr_blocks = if is_symlink { quota_blocks::SYMLINK } else { quota_blocks::CREATE };
        let quota = self.engine.reserve_metadata_quota(dir.root, nr_blocks)?;
        let reservation = self.context.reserve(MetadataPurpose::Change(CREATE_ITEMS))?;
        let mut dir_state = dir_inode.write()?;
        check_dir_takes_names(&dir_state)?;
        let name = HashedName::from(name);
        let slot = match dir_state.lacks_name(name) {
            true => NameSlot::absent(dir.ino, name),
            false => NameSlot::read(&dir_inode.home.tree, dir.ino, name)?,
        };
        slot.check_free()?;
        slot.check_room(&self.geometry)?;
        let index = next_index(&dir_inode, &mut dir_state)?;
        let time = Timespec::now();
        let draft = self.draft(&dir_inode, &mut dir_state, new, caller, time)?;
        let ino = draft.inode.id.ino;
        let mut buf = Vec::with_capacity(DirItem::HEADER_SIZE.saturating_add(name.bytes.len()));

        let mut state = draft.lock();
        // Insert the inode with its count of users before its items are visible: a thread that removes the inode's last
        // link deletes the inode if it has no users.
        self.inodes.insert(&draft.inode, u64::from(self.options.track_lookups), 0);
        let op = self.engine.begin(reservation);
        let mut changes = op.changes(&dir_inode.home.tree);
        let attr = draft.put(&mut changes, &mut state, 1, self);
        dir_item::put_new_ref(&mut changes, (ino, dir.ino), name.bytes, index, &mut buf);
        slot.put_add(&mut changes, (dir_item::inode_location(ino), draft.file_type as u8), index, &mut buf);
        dir_state.next_index = index.checked_add(1);
        entry_changed(&mut dir_state, time, Some(name), None);
        dir_inode.put_item_among(&mut changes, &mut dir_state);
        quota.spend();
        Ok(attr)
    }

    /// Creates an open, unnamed regular file. [`Fs::release_inode`] closes the file, and [`Fs::link`] may give it a
    /// name. Without a name, the file is deleted with its last use.
    pub fn tmpfile(&self, dir: InodeId, mode: u32, caller: &Caller) -> Result<Attr> {
        let dir_inode = self.inode_to_change(dir)?;
        let quota = self.engine.reserve_metadata_quota(dir.root, quota_blocks::TMPFILE)?;
        let reservation = self.context.reserve(MetadataPurpose::Change(CREATE_ITEMS))?;
        let mut dir_state = dir_inode.write()?;
        check_dir_takes_names(&dir_state)?;
        let new = NewInode::file(mode);
        let draft = self.draft(&dir_inode, &mut dir_state, new, caller, Timespec::now())?;
        let mut state = draft.lock();
        self.inodes.insert(&draft.inode, u64::from(self.options.track_lookups), 1);
        self.inodes.mark_without_name(draft.inode.id);
        let op = self.engine.begin(reservation);
        let mut changes = op.changes(&dir_inode.home.tree);
        let attr = draft.put(&mut changes, &mut state, 0, self);
        changes.put(orphan_key(draft.inode.id.ino), []);
        quota.spend();
        Ok(attr)
    }

    /// Plans an inode in `dir`, with the properties that it inherits from `dir`.
    pub(crate) fn draft(
        &self,
        dir: &Arc<Inode>,
        dir_state: &mut InodeState,
        new: NewInode<'_>,
        caller: &Caller,
        time: Timespec,
    ) -> Result<Draft> {
        let type_bits = if new.mode & mode::TYPE == 0 { mode::REGULAR } else { new.mode & mode::TYPE };
        let file_type = FileType::from_mode(type_bits).ok_or(Error::InvalidArgument("unknown file type"))?;
        let symlink_target = self.check_symlink(type_bits, &new)?;
        let inode_mode = type_bits | new.mode & mode::PERMISSIONS;
        let InodePlan { mut item, attributes, compression } =
            self.plan_inode(dir, dir_state, (inode_mode, new.inherits_nothing), caller, time)?;
        if matches!(type_bits, mode::CHAR | mode::BLOCK) {
            item.rdev = rdev_to_item(new.rdev);
        }
        if let Some(target) = &symlink_target {
            (item.size, item.nbytes) = (target.len() as u64, target.len() as u64);
        }
        let ino = self.next_ino(dir, dir_state, type_bits == mode::DIRECTORY)?;
        let mut state = InodeState::new(item);
        if state.is_dir() {
            state.next_index = Some(dir_item::FIRST_INDEX);
            state.known_names = Some(self.inodes.names_of_empty_dir());
        }
        if let Some(method) = compression {
            property::PropertyValue::Method(method).apply(&mut state);
        }
        state.xattrs = KnownXattrs::of_new(!attributes.is_empty());
        let id = InodeId { root: dir.id.root, ino };
        debug_assert!(!dir.home.bare.contains(id), "B1: {id:?} is new, and known");
        if !attributes.is_empty() {
            dir.home.bare.remove(id);
        }
        let mut changes = Vec::new();
        for (name, value) in attributes {
            // A new inode has no other attributes, and the name hashes of these attributes differ, so each attribute
            // gets an item of its own.
            changes.push(xattr::plan_new(ino, name, value));
        }
        let home = Arc::clone(dir_state.home_of_new.get_or_insert_with(|| dir.home.another()));
        let inode = Arc::new(Inode::new(id, home, state));
        Ok(Draft { inode, file_type, changes, symlink_target })
    }

    /// The item and attributes of a new inode, including those that it inherits from its directory.
    fn plan_inode(
        &self,
        dir: &Inode,
        dir_state: &mut InodeState,
        (inode_mode, inherits_nothing): (u32, bool),
        caller: &Caller,
        time: Timespec,
    ) -> Result<InodePlan> {
        let type_bits = inode_mode & mode::TYPE;
        if inherits_nothing {
            let mut item = new_item(None, inode_mode & !(caller.umask & 0o777), caller, time);
            item.flags = self.flags_by_options(type_bits).bits();
            return Ok(InodePlan { item, attributes: Vec::new(), compression: None });
        }
        let inherited = inherited(dir, dir_state)?;
        let group = (dir_state.item.mode & mode::SETGID != 0).then_some(dir_state.item.gid);
        let mut item = new_item(group, inode_mode, caller, time);
        let flags = self.inherited_flags(dir_state, type_bits);
        item.flags = flags.bits();
        let mut attributes = Vec::new();
        if type_bits == mode::SYMLINK {
            item.mode = mode::SYMLINK | 0o777;
        } else {
            item.mode = self.inherit_acl(&inherited, item.mode, caller, &mut attributes);
        }
        let takes_method =
            matches!(type_bits, mode::DIRECTORY | mode::REGULAR) && !flags.contains(InodeFlags::NODATACOW);
        let compression = inherited.compression.filter(|_| takes_method);
        if let Some(method) = compression {
            attributes.push((property::COMPRESSION, method.name().into()));
        }
        Ok(InodePlan { item, attributes, compression })
    }

    /// Allocates the number of a new inode in a directory.
    fn next_ino(&self, dir: &Inode, state: &mut InodeState, for_dir: bool) -> Result<Ino> {
        let generation = self.engine.generation();
        let next = &mut state.next_inos;
        if next.generation != generation {
            *next = NextInos { generation, ..NextInos::default() };
        }
        let number = if for_dir && next.nr_dirs >= SINGLE_DIRS {
            dir.home.allocate_inos(NewInos::BeginRow)?.next()
        } else {
            if next.numbers.is_empty() {
                let which = if next.nr_given >= SINGLE_INOS { NewInos::RestOfRow } else { NewInos::Next };
                next.numbers = dir.home.allocate_inos(which)?;
            }
            next.numbers.next()
        };
        next.nr_given = next.nr_given.saturating_add(1);
        next.nr_dirs = next.nr_dirs.saturating_add(u64::from(for_dir));
        number.map(Ino).ok_or(ubtrfs_error::Error::NoSpace.into())
    }

    fn check_symlink(&self, type_bits: u32, new: &NewInode<'_>) -> Result<Option<Vec<u8>>> {
        if type_bits != mode::SYMLINK {
            return Ok(None);
        }
        let target = new.symlink_target.filter(|target| !target.is_empty());
        let target = target.ok_or(Error::InvalidArgument("a symbolic link needs a target"))?;
        let max = dir_item::max_item_bytes(&self.geometry).saturating_sub(FileExtent::HEADER_SIZE);
        if target.len() > max.min(SYMLINK_MAX) {
            return Err(Error::NameTooLong);
        }
        Ok(Some(target.to_vec()))
    }

    /// Flags of a new inode, from its directory and the mount options.
    fn inherited_flags(&self, dir: &InodeState, type_bits: u32) -> InodeFlags {
        let is_regular = type_bits == mode::REGULAR;
        let mut flags = self.flags_by_options(type_bits);
        if dir.has_flags(InodeFlags::NOCOMPRESS) {
            flags.insert(InodeFlags::NOCOMPRESS);
        } else if dir.has_flags(InodeFlags::COMPRESS) {
            flags.insert(InodeFlags::COMPRESS);
        }
        if dir.has_flags(InodeFlags::NODATACOW) {
            flags.insert(InodeFlags::NODATACOW);
            if is_regular {
                flags.insert(InodeFlags::NODATASUM);
            }
        }
        flags
    }

    /// Flags of a new inode, from the mount options alone.
    fn flags_by_options(&self, type_bits: u32) -> InodeFlags {
        let mut flags = InodeFlags::empty();
        let options = *self.data_options.read();
        if type_bits == mode::REGULAR && options.nodatasum {
            flags.insert(InodeFlags::NODATASUM);
        }
        if type_bits == mode::REGULAR && options.nodatacow {
            flags.insert(InodeFlags::NODATACOW | InodeFlags::NODATASUM);
        }
        flags
    }

    /// The mode of a new inode: by the directory's default ACL, otherwise by the umask. Adds the inode's ACLs to
    /// `attributes`.
    fn inherit_acl(
        &self,
        inherited: &InheritedAttributes,
        inode_mode: u32,
        caller: &Caller,
        attributes: &mut Vec<(&'static [u8], Vec<u8>)>,
    ) -> u32 {
        let default: Option<&Acl> = inherited.default_acl.as_ref().filter(|_| self.options.acl);
        let Some(default) = default else { return inode_mode & !(caller.umask & 0o777) };
        if inode_mode & mode::TYPE == mode::DIRECTORY {
            attributes.push((acl::DEFAULT, default.encode()));
        }
        let mut access = default.clone();
        let masked = access.mask_new(inode_mode);
        if !access.is_minimal() {
            attributes.push((acl::ACCESS, access.encode()));
        }
        masked
    }
}

impl Draft {
    /// Locks the state, before other threads can find the inode by its number in the cache: an operation waits for no
    /// state lock, because its holder may be waiting for the gate.
    pub(crate) fn lock(&self) -> WriteGuard<'_, InodeState> {
        self.inode.state.try_write().expect("I1 of cache: no other thread has an inode before it is in the cache")
    }

    /// Puts the inode's items with the link count `nlink`. The caller locks the inode before the operation begins, and puts
    /// the items of the names.
    pub(crate) fn put(&self, put: &mut TreeChanges<'_>, state: &mut InodeState, nlink: u32, fs: &Fs) -> Attr {
        state.item.generation = put.generation();
        state.item.nlink = nlink;
        self.inode.put_item_among(put, state);
        for change in &self.changes {
            if let PlannedChange::PutEntries(key, entries) = change {
                let mut value = Vec::new();
                for entry in entries {
                    DirItem { transid: put.generation(), ..entry.clone() }.encode_into(&mut value);
                }
                put.put(*key, value);
            }
        }
        if let Some(target) = &self.symlink_target {
            let extent = FileExtent {
                generation: put.generation(),
                ram_bytes: target.len() as u64,
                compression: ubtrfs_format::item::Compression::None,
                encryption: 0,
                other_encoding: 0,
                body: FileExtentBody::Inline(target.clone()),
            };
            put.put(Key::new(self.inode.id.ino.0, KeyType::EXTENT_DATA, 0), extent.encode());
        }
        fs.attr_of(&self.inode, state)
    }
}

/// Fails if a directory takes no new names.
pub(crate) fn check_dir_takes_names(dir: &InodeState) -> Result<()> {
    if !dir.is_dir() {
        return Err(Error::NotDirectory);
    }
    if dir.item.nlink == 0 || dir.removed {
        return Err(Error::NotFound);
    }
    if dir.has_flags(InodeFlags::IMMUTABLE) {
        return Err(Error::NotPermitted("the directory is immutable"));
    }
    Ok(())
}

/// The index of a directory's next entry.
pub(crate) fn next_index(dir: &Inode, state: &mut InodeState) -> Result<u64> {
    let index = match state.next_index {
        Some(index) => index,
        None => dir_item::load_next_index(&dir.home.tree, dir.id.ino)?,
    };
    state.next_index = Some(index);
    if index == u64::MAX {
        return Err(ubtrfs_error::Error::NoSpace.into());
    }
    Ok(index)
}

/// Updates a directory's inode and its set of known names after a change of entries. The length of each name is in the
/// directory's size twice: once for the `DIR_ITEM`, once for the `DIR_INDEX`.
pub(crate) fn entry_changed(
    dir: &mut InodeState,
    time: Timespec,
    added: Option<HashedName<'_>>,
    removed: Option<&[u8]>,
) {
    let bytes = |name: Option<&[u8]>| (name.map_or(0, <[u8]>::len) as u64).saturating_mul(2);
    dir.item.size = dir.item.size.saturating_add(bytes(added.map(|name| name.bytes))).saturating_sub(bytes(removed));
    if let (Some(names), Some(name)) = (&mut dir.known_names, added)
        && !names.add(name.hash)
    {
        dir.known_names = None;
    }
    dir.item.mtime = time;
    dir.item.ctime = time;
    dir.item.sequence = dir.item.sequence.wrapping_add(1);
}

/// Key of the `ORPHAN_ITEM` of an inode without links.
pub(crate) fn orphan_key(ino: Ino) -> Key {
    Key::new(objectid::ORPHAN, KeyType::ORPHAN_ITEM, ino.0)
}

pub(crate) fn inherited(dir: &Inode, state: &mut InodeState) -> Result<Arc<InheritedAttributes>> {
    if let Some(inherited) = &state.inherit {
        return Ok(Arc::clone(inherited));
    }
    let default_acl = match xattr::get(dir, state, acl::DEFAULT)? {
        Some(value) => Acl::parse(&value)?,
        None => None,
    };
    // The method "none" is inherited through the directory's flag, not as an attribute.
    let compression =
        match xattr::get(dir, state, property::COMPRESSION)?.map(|value| property::PropertyValue::parse(&value)) {
            Some(Ok(property::PropertyValue::Method(method))) => Some(method),
            _ => None,
        };
    let inherited = Arc::new(InheritedAttributes { default_acl, compression });
    state.inherit = Some(Arc::clone(&inherited));
    Ok(inherited)
}

/// The item of a new inode. `group` is the directory's group if the directory is set-group-id.
pub(crate) fn new_item(group: Option<u32>, inode_mode: u32, caller: &Caller, time: Timespec) -> InodeItem {
    let is_dir = inode_mode & mode::TYPE == mode::DIRECTORY;
    let zero = ubtrfs_format::Generation(0);
    InodeItem {
        generation: zero,
        transid: zero,
        size: 0,
        nbytes: 0,
        block_group: 0,
        nlink: 1,
        uid: caller.uid,
        gid: group.unwrap_or(caller.gid),
        mode: if group.is_some() && is_dir { inode_mode | mode::SETGID } else { inode_mode },
        rdev: 0,
        flags: 0,
        sequence: 0,
        reserved: [0; 4],
        atime: time,
        ctime: time,
        mtime: time,
        otime: time,
    }
}

/// Number of items to reserve for a new inode, which takes at most ten: the inode, reference, entry, index, symbolic
/// link target, up to three attributes, orphan item, and the directory's inode.
const CREATE_ITEMS: usize = 12;
/// How many new inodes per directory and transaction get the next free inode number, as on Linux. Further inodes get
/// numbers from a row (see [`NewInos`]) that the directory reserves for itself.
const SINGLE_INOS: u64 = 64;
/// How many new directories per parent and transaction get the next free inode number. Each further directory begins a
/// new row of numbers, so that threads that fill different directories rarely share locks.
const SINGLE_DIRS: u64 = 8;
/// Longest target of a symbolic link, which is Linux's `PATH_MAX` without the final zero byte.
const SYMLINK_MAX: usize = 4095;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use ubtrfs_device::MemoryDevice;

    use super::*;
    use crate::MountOptions;
    use crate::types::SetAttr;

    /// One thread creates files, one changes the newest inodes by their numbers, one commits.
    #[test]
    fn no_operation_waits_for_the_lock_of_a_new_inode() {
        let device = Arc::new(MemoryDevice::new(1 << 30));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let fs = Fs::open(vec![device], MountOptions::default()).unwrap();
        let root = fs.root();
        let (next, is_over) = (AtomicU64::new(u64::MAX), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
                while !is_over.load(Ordering::Relaxed) {
                    let id = InodeId { root: root.root, ino: Ino(next.load(Ordering::Relaxed)) };
                    // Most often there is no such inode yet.
                    let _ = fs.setattr(id, &set, &Caller::ROOT);
                }
            });
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    fs.engine.commit().unwrap();
                }
            });
            for number in 0..500 {
                let created = fs.create(root, number.to_string().as_bytes(), NewInode::file(0o644), &Caller::ROOT);
                next.store(created.unwrap().id.ino.0 + 1, Ordering::Relaxed);
            }
            is_over.store(true, Ordering::Relaxed);
        });
        fs.close().unwrap();
    }
}
