//! Creating subvolumes and snapshots, and changing their properties.
//!
//! - I1. A snapshot holds everything that was written to its source before the call. Only data written before the call
//!   is written back, so a snapshot does not wait for later writes.
//! - I2. Writes to the source never change a snapshot: writes in place wait while the snapshot is made. Afterwards the
//!   extents are shared, so writes no longer overwrite them in place.
//! - I3. Lock order: `DataPath::unreserved` -> change lock of [`crate::subvolume::state`] -> `DataPath::in_place` ->
//!   inode states.
//! - I4. A subvolume becomes read-only in two steps. First, new changes are refused and running changes end; the caller
//!   waits for their end before it takes any lock that a change may take. Then the subvolume's data and the flag are
//!   made durable.

use ubtrfs_format::clock::new_uuid;
use ubtrfs_format::hash::name_hash;
use ubtrfs_format::item::{Compression, DirItem, FileType, InodeFlags, InodeRef, QgroupLimit, RootRef, Timespec};
use ubtrfs_format::{Generation, Ino, Key, KeyType, RootId};
use ubtrfs_transaction::{MetadataReservation, NewContent, NewSubvolume, QgroupId, Received, race_point};
use uuid::Uuid;

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::acl::Acl;
use crate::inode::location::root_tree;
use crate::inode::{property, xattr};
use crate::items::dir_item::{self, HashedName, NameSlot, PlannedChange};
use crate::items::quota_blocks;
use crate::namei::create::{check_dir_takes_names, entry_changed, inherited, new_item, next_index};
use crate::session::context::MetadataPurpose;
use crate::subvolume::list::default_subvolume;
use crate::types::{Caller, InodeId, mode};

/// Number of items to reserve for a record of a received subvolume: the root item and two UUID items.
const RECEIVED_ITEMS: usize = 4;

/// The properties of a new subvolume, apart from its content.
#[derive(Debug)]
pub(crate) struct SubvolumeProperties<'q> {
    /// Quota groups that the subvolume's own group joins.
    pub(crate) qgroups: &'q [QgroupId],
    /// Limits of the subvolume's own group.
    pub(crate) limit: Option<QgroupLimit>,
    /// The sender's transaction if the subvolume is about to be received, or [`NOT_RECEIVED`].
    pub(crate) stransid: Generation,
}

impl Fs {
    /// Creates an empty subvolume with this name in `dir`, durable on return. The root directory of the subvolume
    /// belongs to the caller. The mode of the root directory depends on the umask, and is no wider than a default ACL
    /// of `dir` allows. As on Linux, the root directory inherits no group, flag, ACL or property from `dir`; it inherits
    /// the compression property from the root directory of the subvolume that `dir` is in. Returns the root directory.
    pub fn create_subvolume(&self, dir: InodeId, name: &[u8], caller: &Caller) -> Result<InodeId> {
        self.create_subvolume_in(dir, name, caller, &[])
    }

    /// Creates a subvolume as [`Self::create_subvolume`] does, and makes its quota group a member of `qgroups`.
    pub fn create_subvolume_in(
        &self,
        dir: InodeId,
        name: &[u8],
        caller: &Caller,
        qgroups: &[QgroupId],
    ) -> Result<InodeId> {
        self.create_limited_subvolume(dir, name, caller, qgroups, None)
    }

    /// Creates a subvolume, as [`Self::create_subvolume_in`] does, whose own quota group has limits.
    pub fn create_limited_subvolume(
        &self,
        dir: InodeId,
        name: &[u8],
        caller: &Caller,
        qgroups: &[QgroupId],
        limit: Option<QgroupLimit>,
    ) -> Result<InodeId> {
        self.create_subvolume_for(dir, name, caller, SubvolumeProperties { qgroups, limit, stransid: NOT_RECEIVED })
    }

    /// Creates, as [`Self::create_subvolume_in`] does, a subvolume into which a stream may be received. A subvolume that
    /// is received inherits no property, so that it equals the sent one.
    pub(crate) fn create_subvolume_for(
        &self,
        dir: InodeId,
        name: &[u8],
        caller: &Caller,
        kind: SubvolumeProperties<'_>,
    ) -> Result<InodeId> {
        // Reserve quota for the name in the subvolume that holds the name.
        let _quota = self.engine.reserve_metadata_quota(dir.root, quota_blocks::SUBVOLUME)?;
        let _subvolumes = self.subvolumes.lock();
        let reservation = self.context.reserve(MetadataPurpose::Change(NEW_ITEMS))?;
        let compression = match kind.stransid {
            NOT_RECEIVED => self.compression_of_root(dir.root)?,
            _ => None,
        };
        self.make_subvolume(dir, name, kind, reservation, |time, transid, default_acl| {
            let asked = mode::DIRECTORY | 0o777 & !caller.umask;
            let mode = default_acl.map_or(asked, |mut acl| acl.mask_new(asked));
            let mut item = new_item(None, mode, caller, time);
            (item.generation, item.transid) = (transid, transid);
            let ino = Ino::ROOT_DIR;
            let mut reference = Vec::new();
            InodeRef::append(&mut reference, 0, b"..");
            let attribute = compression.map(|method| {
                item.flags |= InodeFlags::COMPRESS.bits();
                let value = method.name().into();
                xattr::plan_new(ino, property::COMPRESSION, value).into_item(transid)
            });
            let root = (Key::new(ino.0, KeyType::INODE_ITEM, 0), item.encode());
            let mut items = vec![root, (dir_item::ref_key(ino, ino), reference)];
            items.extend(attribute.and_then(|(key, value)| Some((key, value?))));
            NewContent::Items(items)
        })
    }

    /// The method that new files in the root directory of a subvolume inherit through the compression property.
    fn compression_of_root(&self, subvolume: RootId) -> Result<Option<Compression>> {
        let root = self.inode(InodeId::root_of(subvolume))?;
        let mut state = root.write()?;
        Ok(inherited(&root, &mut state)?.compression)
    }

    /// Creates a snapshot of a subvolume, with this name in `dir`, durable on return. The snapshot holds everything
    /// that was written before the call (I1). Returns the root directory of the snapshot.
    pub fn snapshot(&self, source: RootId, dir: InodeId, name: &[u8], read_only: bool) -> Result<InodeId> {
        self.snapshot_in(source, dir, name, read_only, &[])
    }

    /// Creates a snapshot as [`Self::snapshot`] does, and makes its quota group a member of `qgroups`.
    pub fn snapshot_in(
        &self,
        source: RootId,
        dir: InodeId,
        name: &[u8],
        read_only: bool,
        qgroups: &[QgroupId],
    ) -> Result<InodeId> {
        self.snapshot_for(source, dir, name, read_only, qgroups, NOT_RECEIVED)
    }

    /// Creates, as [`Self::snapshot_in`] does, a snapshot into which a stream will be received.
    pub(crate) fn snapshot_for(
        &self,
        source: RootId,
        dir: InodeId,
        name: &[u8],
        read_only: bool,
        qgroups: &[QgroupId],
        stransid: Generation,
    ) -> Result<InodeId> {
        let id =
            self.take_snapshot(source, dir, name, read_only, SubvolumeProperties { qgroups, limit: None, stransid })?;
        // Unlinked files that are open in the source have no users in the snapshot. As on Linux, unlinked files are
        // deleted from the snapshot at once, even if the snapshot is read-only: a read-only snapshot would keep their
        // space forever.
        race_point();
        let deleted = self.subvolume(id.root).and_then(|subvolume| self.delete_orphans(&subvolume));
        if let Err(error) = deleted {
            tracing::warn!("snapshot {}: deleting unlinked inodes failed: {error}", id.root);
        }
        Ok(id)
    }

    fn take_snapshot(
        &self,
        source: RootId,
        dir: InodeId,
        name: &[u8],
        read_only: bool,
        kind: SubvolumeProperties<'_>,
    ) -> Result<InodeId> {
        self.subvolume(source)?;
        self.inode_to_change(dir)?;
        let _quota = self.engine.reserve_metadata_quota(dir.root, quota_blocks::SUBVOLUME)?;
        // A write without a reservation counts on extents that the snapshot will share, so it must be on disk before.
        let _unreserved = self.data.unreserved.write();
        self.flush_tagged(Some(source))?;
        let _subvolumes = self.subvolumes.lock();
        if self.entered.is_deleted(source) {
            return Err(Error::NotFound);
        }
        let reservation = self.context.reserve(MetadataPurpose::Snapshot { source, nr_items: NEW_ITEMS })?;
        race_point();
        let _in_place = self.data.in_place.write();
        self.make_subvolume(dir, name, kind, reservation, |_, _, _| NewContent::SnapshotOf { source, read_only })
    }

    /// Creates a subvolume. Calls `content` with the creation time, the transaction, and the default ACL of `dir`;
    /// `content` returns the subvolume's content.
    fn make_subvolume(
        &self,
        dir: InodeId,
        name: &[u8],
        kind: SubvolumeProperties<'_>,
        reservation: MetadataReservation<'_>,
        content: impl FnOnce(Timespec, Generation, Option<Acl>) -> NewContent,
    ) -> Result<InodeId> {
        // The directory changes in memory before the commit.
        self.engine.check_not_held()?;
        dir_item::check_new_name(name)?;
        let dir_inode = self.inode_to_change(dir)?;
        let mut state = dir_inode.write()?;
        check_dir_takes_names(&state)?;
        if dir_inode.home.is_deleted() {
            return Err(Error::NotFound);
        }
        let tree = &dir_inode.home.tree;
        let slot = NameSlot::read(tree, dir.ino, name)?;
        slot.check_free()?;
        slot.check_room(&self.geometry)?;
        let index = next_index(&dir_inode, &mut state)?;
        let default_acl = inherited(&dir_inode, &mut state)?.default_acl.clone().filter(|_| self.options.acl);
        let time = Timespec::now();
        let id = self.engine.new_root_id()?;
        let fsid = self.engine.superblock().fsid;
        let location = dir_item::subvolume_location(id);
        let mut changes = Vec::with_capacity(3);
        slot.plan_add(&mut changes, tree, &self.geometry, (location, FileType::Directory as u8), index)?;
        state.next_index = index.checked_add(1);
        entry_changed(&mut state, time, Some(HashedName::from(name)), None);
        // The directory stays locked until the commit has made the subvolume. Until the commit, no thread sees the name
        // or changes the directory.
        self.engine.make_subvolume(reservation, |transid| {
            state.item.transid = transid;
            changes.push(PlannedChange::Put(dir_inode.item_key(), state.disk_item().encode()));
            let items = changes.into_iter().map(|change| change.into_item(transid));
            let mut entry: Vec<_> = items.map(|(key, value)| (key, value.map(Into::into))).collect();
            entry.sort_by_key(|(key, _)| *key);
            NewSubvolume {
                id,
                uuid: new_uuid(&fsid, &format!("subvolume {}", id.0)),
                otime: time,
                content: content(time, transid, default_acl),
                parent: dir.root,
                root_ref: RootRef { dirid: dir.ino.0, sequence: index, name: name.to_vec() },
                entry,
                qgroups: kind.qgroups.iter().map(|id| id.0).collect(),
                limit: kind.limit,
                stransid: kind.stransid,
            }
        })?;
        Ok(InodeId::root_of(id))
    }

    /// Sets or clears the read-only flag of a subvolume, durable on return. A received subvolume that becomes writable
    /// loses its received UUID. If the subvolume becomes read-only, earlier writes to it are durable too. Waits for
    /// running changes. After the call returns, a read-only subvolume can only be changed through files that were
    /// opened for writing earlier.
    pub fn set_subvolume_read_only(&self, id: RootId, read_only: bool) -> Result<()> {
        let _changing = self.context.begin_change()?;
        self.engine.check_not_held()?;
        let _flags = self.subvolumes.lock_flags();
        let subvolume = self.subvolume(id)?;
        if subvolume.is_read_only() == read_only {
            return Ok(());
        }
        if !read_only {
            self.subvolumes.sends.check_not_kept(id)?;
        }
        // Running changes may need the change lock, so they end first (I4).
        subvolume.set_read_only(read_only)?;
        let _subvolumes = self.subvolumes.lock();
        let ready = self.context.reserve(MetadataPurpose::Change(2)).and_then(|reservation| {
            if read_only {
                self.flush_tagged(Some(id))?;
            }
            Ok(reservation)
        });
        let reservation = match ready {
            Ok(reservation) => reservation,
            Err(error) => {
                // The flag on disk is unchanged, so undo the change in memory.
                subvolume.set_read_only(!read_only)?;
                return Err(error);
            }
        };
        let op = self.engine.begin(reservation);
        op.set_subvolume_read_only(id, read_only);
        drop(op);
        self.engine.commit()?;
        if !read_only && let Err(error) = self.delete_orphans(&subvolume) {
            tracing::warn!("subvolume {id}: deleting unlinked inodes failed: {error}");
        }
        Ok(())
    }

    /// Records in a writable subvolume from which one it was received, durable on return: the UUID and the transaction of
    /// the sent subvolume, and the time of sending. Returns the transaction and the time of this record. For programs that
    /// receive a stream by themselves, and make the subvolume read-only afterwards.
    ///
    /// # Errors
    /// [`Error::ReadOnlySubvolume`], or [`Error::Overflow`] if too many subvolumes have this received UUID.
    pub fn set_subvolume_received(
        &self,
        id: RootId,
        uuid: Uuid,
        stransid: Generation,
        stime: Timespec,
    ) -> Result<(Generation, Timespec)> {
        let _changing = self.context.begin_change()?;
        self.engine.check_not_held()?;
        let _flags = self.subvolumes.lock_flags();
        self.subvolume(id)?.check_writable()?;
        let _subvolumes = self.subvolumes.lock();
        if !uuid.is_nil() && !self.engine.has_room_for_uuid(KeyType::UUID_KEY_RECEIVED_SUBVOL, uuid)? {
            return Err(Error::Overflow);
        }
        let reservation = self.context.reserve(MetadataPurpose::Change(RECEIVED_ITEMS))?;
        let rtime = Timespec::now();
        let op = self.engine.begin(reservation);
        op.set_subvolume_received(id, Received { uuid, stransid, stime, rtime, read_only: false });
        let rtransid = op.generation();
        drop(op);
        self.engine.commit()?;
        Ok((rtransid, rtime))
    }

    /// The subvolume that a mount shows if no option names one.
    pub fn default_subvolume(&self) -> Result<RootId> {
        default_subvolume(&self.engine)
    }

    /// Sets the subvolume that a mount shows if no option names one, durable on return.
    pub fn set_default_subvolume(&self, id: RootId) -> Result<()> {
        let _changing = self.context.begin_change()?;
        self.engine.check_not_held()?;
        let _subvolumes = self.subvolumes.lock();
        self.subvolume(id)?;
        let reservation = self.context.reserve(MetadataPurpose::Change(1))?;
        let roots = root_tree(&self.engine)?;
        let dir = self.engine.superblock().root_dir_objectid;
        let key = Key::new(dir, KeyType::DIR_ITEM, name_hash(DEFAULT));
        let mut entries = dir_item::read_entries(&roots, &key)?;
        let location = dir_item::subvolume_location(id);
        entries.retain(|entry| entry.name != DEFAULT);
        let file_type = FileType::Directory as u8;
        let (transid, name) = (dir_item::PENDING, DEFAULT.to_vec());
        entries.push(DirItem { location, transid, file_type, name, data: Vec::new() });
        self.engine.note_default_subvolume();
        let op = self.engine.begin(reservation);
        dir_item::put_changes(&op, &roots, vec![PlannedChange::PutEntries(key, entries)]);
        drop(op);
        Ok(self.engine.commit()?)
    }
}

/// Stands for the sender's transid if a subvolume is made without a stream.
const NOT_RECEIVED: Generation = Generation(0);
/// Name of the entry, in the root tree's directory, for the default subvolume.
const DEFAULT: &[u8] = b"default";
/// Number of items to reserve for a new subvolume, more than it takes: root item, both references, two UUID items,
/// entry, index, the directory's inode, and up to three items of the new tree.
const NEW_ITEMS: usize = 16;
