//! [`Fs`]: one open filesystem, and how it is opened, written out and closed.
//!
//! - I1. Every change goes through [`Fs::reserve`], which refuses on a read-only filesystem and tells the commit
//!   thread.
//! - I2. What was acknowledged by [`Fs::sync`] or [`Fs::close`] is on disk.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};
use ubtrfs_device::Device;
use ubtrfs_format::item::{DevStatsItem, InodeItem, Timespec};
use ubtrfs_format::superblock::Superblock;
use ubtrfs_format::{DevId, FormatError, Ino, Key, KeyType, RootId};
use ubtrfs_transaction::{BackgroundWork, Engine, Flusher, Geometry, MetadataReservation, OpenOptions};

use crate::error::{Error, Result};
use crate::file::readahead::Readahead;
use crate::inode::cache::InodeCache;
use crate::inode::state::{Inode, InodeState};
use crate::mount::commit_thread::Committer;
use crate::mount::memory_budget::MemoryBudget;
use crate::mount::options::{AtimeMode, MountOptions};
use crate::mount::service_threads::ServiceThreads;
use crate::namei::dir_item::{self, in_tree};
use crate::namei::known_names::{KnownNames, NameBudget};
use crate::subvolume::delete::Deletions;
use crate::subvolume::handle::{Home, Subvolume};
use crate::types::{Attr, InodeId, mode};
use crate::writeback::data_path::DataPath;

/// An open filesystem.
#[derive(Debug)]
pub struct Fs {
    pub(crate) engine: Arc<Engine>,
    pub(crate) options: MountOptions,
    pub(crate) geometry: Geometry,
    pub(crate) inodes: InodeCache,
    pub(crate) names: Arc<NameBudget>,
    /// Subvolumes that were entered.
    pub(crate) subvolumes: RwLock<HashMap<RootId, Arc<Subvolume>>>,
    /// Held by who makes, changes or deletes subvolumes.
    pub(crate) subvolume_lock: Mutex<()>,
    pub(crate) deletions: Deletions,
    /// Held by renames, so that the directories' order does not change while one decides on a loop.
    pub(crate) rename_lock: Mutex<()>,
    pub(crate) data: DataPath,
    pub(crate) readahead: Readahead,
    leaf_threads: ServiceThreads,
    pub(crate) committer: Committer,
    root: InodeId,
    closed: AtomicBool,
}

impl Fs {
    /// Opens the filesystem on these devices: finds the root to show, deletes what earlier sessions left unlinked, and
    /// starts to commit in the background.
    pub fn open(devices: Vec<Arc<dyn Device>>, options: MountOptions) -> Result<Arc<Self>> {
        let budget = MemoryBudget::of(options.memory_bytes);
        let engine = Engine::open(
            devices,
            OpenOptions {
                read_only: options.read_only,
                memory_bytes: budget.engine_bytes,
                discard: options.discard,
                replay_log: !options.nologreplay,
            },
        )?;
        crate::mount::log_replay::replay(&engine)?;
        let root = crate::subvolume::list::find_root(&engine, &options)?;
        let geometry = engine.geometry();
        let inodes = InodeCache::new(usize::try_from(budget.inode_bytes / INODE_BYTES).unwrap_or(usize::MAX));
        let fs = Arc::new(Self {
            data: DataPath::new(budget.dirty_bytes),
            readahead: Readahead::new(budget.read_bytes),
            leaf_threads: ServiceThreads::default(),
            inodes,
            names: NameBudget::new(budget.inode_bytes / 2),
            subvolumes: RwLock::default(),
            subvolume_lock: Mutex::default(),
            deletions: Deletions::default(),
            rename_lock: Mutex::default(),
            committer: Committer::new(options.commit_secs),
            root: InodeId::root_of(root),
            closed: AtomicBool::new(false),
            geometry,
            options,
            engine,
        });
        let flusher: std::sync::Weak<dyn Flusher> = Arc::downgrade(&(Arc::clone(&fs) as Arc<dyn Flusher>));
        fs.engine.set_flusher(flusher);
        if !fs.inode(fs.root)?.read()?.is_dir() {
            return Err(Error::NotDirectory);
        }
        fs.readahead.start(&fs);
        let leaves = fs.engine.leaf_read_ahead();
        fs.leaf_threads.start("ubtrfs-leaves", 1, move || leaves.run());
        if fs.read_only().is_none() {
            // What is left of deleted subvolumes is not worth refusing the filesystem for.
            if let Err(error) = fs.engine.find_dead_roots() {
                tracing::warn!("looking for deleted subvolumes: {error}");
            }
            fs.committer.start(&fs);
            fs.data.threads.start(&fs);
        }
        Ok(fs)
    }

    /// Why the filesystem takes no changes, or `None` where it does.
    pub fn read_only(&self) -> Option<String> {
        self.engine.read_only()
    }

    /// The options that it was opened with.
    pub fn options(&self) -> &MountOptions {
        &self.options
    }

    /// The superblock of the last commit.
    pub fn superblock(&self) -> Superblock {
        self.engine.superblock()
    }

    /// The directory that is shown as the root: `subvol=`, `subvolid=` or the default subvolume.
    pub fn root(&self) -> InodeId {
        self.root
    }

    /// Error counters of the devices, those of earlier mounts included; in this order: write, read, flush, corruption,
    /// generation.
    pub fn device_stats(&self) -> Vec<(DevId, DevStatsItem)> {
        self.engine.device_stats()
    }

    /// Writes out all data and commits (I2). Fails where some data cannot be written; the rest is on disk nevertheless.
    pub fn sync(&self) -> Result<()> {
        if self.read_only().is_some() && self.options.read_only {
            return Ok(());
        }
        let flushed = self.flush_all_data();
        // What can be committed is, even if some data could not be written.
        self.engine.commit()?;
        flushed
    }

    /// Has what was changed so far committed in the background, dirty data left alone. For who makes very many changes
    /// and wants little left to do at the end.
    pub fn start_commit(&self) {
        self.committer.do_soon(BackgroundWork::Commit);
    }

    /// Writes out all data, commits and stops (I2). Later changes fail.
    pub fn close(&self) -> Result<()> {
        if self.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.committer.stop();
        self.data.threads.stop();
        self.readahead.stop();
        self.engine.leaf_read_ahead().stop();
        self.leaf_threads.join();
        let flushed = match self.read_only() {
            Some(_) => Ok(()),
            None => {
                let deleted = self.delete_unused_orphans();
                self.flush_all_data().and(deleted)
            }
        };
        self.end_all_deletions();
        // What can be committed is, even if some data could not be written.
        let closed = self.engine.close();
        flushed?;
        Ok(closed?)
    }

    /// Reserves metadata for about `nr_items` item changes (I1). May flush and commit: no inode lock may be held.
    pub(crate) fn reserve(&self, nr_items: usize) -> Result<MetadataReservation<'_>> {
        self.check_open()?;
        self.committer.note_change();
        Ok(self.engine.reserve(nr_items)?)
    }

    /// The same for what frees space; may use the space kept for that.
    pub(crate) fn reserve_for_removal(&self, nr_items: usize) -> Result<MetadataReservation<'_>> {
        self.check_open()?;
        self.committer.note_change();
        Ok(self.engine.reserve_for_removal(nr_items)?)
    }

    /// The same for `most` item changes or, where space is short, for fewer, but `least`.
    pub(crate) fn reserve_for_removal_steps(&self, most: usize, least: usize) -> Result<MetadataReservation<'_>> {
        self.check_open()?;
        self.committer.note_change();
        Ok(self.engine.reserve_for_removal_steps(most, least)?)
    }

    /// Whether anything is not on disk yet.
    pub(crate) fn has_changes(&self) -> bool {
        self.data.has_dirty() || self.engine.has_changes()
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        if self.options.read_only { Err(Error::ReadOnlyMount) } else { Ok(()) }
    }

    /// The subvolume, entered if it was not. Its unlinked inodes are deleted then: no inode lock may be held.
    pub(crate) fn subvolume(&self, root: RootId) -> Result<Arc<Subvolume>> {
        if let Some(subvolume) = self.subvolumes.read().get(&root) {
            return Ok(Arc::clone(subvolume));
        }
        if !root.is_subvolume() {
            return Err(Error::NotFound);
        }
        if self.deletions.has(root) {
            return Err(Error::NotFound);
        }
        let item = self.engine.root_item(root)?.filter(|item| item.refs > 0).ok_or(Error::NotFound)?;
        let tree = self.engine.tree(root)?.ok_or(Error::NotFound)?;
        let takes_changes = self.read_only().is_none();
        let subvolume = Arc::new(Subvolume::enter(root, tree, &item, takes_changes));
        let subvolume = Arc::clone(self.subvolumes.write().entry(root).or_insert(subvolume));
        if takes_changes && !subvolume.is_read_only() {
            // What is left over is not worth refusing the subvolume for.
            if let Err(error) = self.delete_orphans(&subvolume) {
                tracing::warn!("subvolume {root}: unlinked inodes were not all deleted: {error}");
            }
        }
        Ok(subvolume)
    }

    /// The inode, loaded if it was not. No inode lock may be held where `id` may be in a subvolume not entered yet.
    pub(crate) fn inode(&self, id: InodeId) -> Result<Arc<Inode>> {
        self.engine.enter();
        if let Some(inode) = self.inodes.peek(id) {
            return if inode.home.is_gone() { Err(Error::Stale) } else { Ok(inode) };
        }
        // Before the inode counts as being loaded: entering a subvolume may load its orphans.
        let subvolume = self.subvolume(id.root)?;
        let inode = self.inodes.get(id, || self.load_inode(id, subvolume))?;
        // One that was loaded while its subvolume was deleted may have come too late to be taken out of memory with it.
        if inode.home.is_gone() { Err(Error::Stale) } else { Ok(inode) }
    }

    fn load_inode(&self, id: InodeId, subvolume: Arc<Subvolume>) -> Result<Arc<Inode>> {
        let home = Home::new(subvolume);
        let tree = &home.tree;
        if id.is_stub() {
            let state = RwLock::new(empty_dir(&home)?);
            return Ok(Arc::new(Inode { id, home, state, writeback: Default::default() }));
        }
        let key = Key::new(id.ino.0, KeyType::INODE_ITEM, 0);
        let Some(raw) = tree.get(&key)? else { return Err(Error::Stale) };
        let item = InodeItem::decode(&raw).map_err(in_tree(tree))?;
        if item.size > crate::file::write::MAX_SIZE {
            // Nothing here expects that the end of a file's last sector may not be a number.
            let expected = "expected at most 2^63 - 1";
            let cause = FormatError::Value { what: "InodeItem", field: "size", value: item.size, expected };
            return Err(in_tree(tree)(cause));
        }
        let mut state = InodeState::new(item);
        if state.is_dir() && state.item.size == 0 && dir_item::is_empty(tree, id.ino)? {
            state.known_names = Some(KnownNames::of_empty(&self.names));
        }
        if state.is_regular() || state.is_dir() {
            state.compression = crate::inode::property::load_compression(tree, id.ino, state.item.flags())?;
        }
        state.removed = id.ino == Ino::ROOT_DIR && home.is_deleted();
        Ok(Arc::new(Inode { id, home, state: RwLock::new(state), writeback: Default::default() }))
    }

    /// An inode that is to be changed: fails where its subvolume is read-only.
    pub(crate) fn inode_to_change(&self, id: InodeId) -> Result<Arc<Inode>> {
        self.check_open()?;
        let inode = self.inode(id)?;
        inode.home.check_writable()?;
        if id.is_stub() {
            return Err(Error::AccessDenied);
        }
        Ok(inode)
    }

    /// An inode that a file open for writing is written through: whether that may be was asked when it was opened, and as on
    /// Linux neither flags nor a read-only subvolume that come later take it back.
    pub(crate) fn inode_of_open_file(&self, id: InodeId) -> Result<Arc<Inode>> {
        self.check_open()?;
        self.inode(id)
    }

    /// What `stat` shows of an inode.
    pub fn getattr(&self, id: InodeId) -> Result<Attr> {
        let inode = self.inode(id)?;
        Ok(self.attr_of(&inode, &*inode.read()?))
    }

    /// What `stat` shows. May read extent items, so not to be called inside of an operation.
    pub(crate) fn attr_of(&self, inode: &Inode, state: &InodeState) -> Attr {
        state.attr(inode.id, self.geometry.sectorsize, self.new_bytes(inode, state))
    }

    /// Keeps the inode, even unlinked, until [`Fs::release_inode`].
    pub fn open_inode(&self, id: InodeId) -> Result<()> {
        let inode = self.inode(id)?;
        let state = inode.read()?;
        self.inodes.add_open(id);
        drop(state);
        if inode.home.is_gone() {
            self.release_inode(id);
            return Err(Error::Stale);
        }
        Ok(())
    }

    /// Ends an [`Fs::open_inode`]. An unlinked inode that nobody else uses is deleted.
    pub fn release_inode(&self, id: InodeId) {
        if self.inodes.release(id) {
            self.delete_if_unlinked(id);
        }
        self.end_deletion(id);
    }

    /// Gives back `n` references that lookups counted ([`MountOptions::track_lookups`]).
    pub fn forget(&self, id: InodeId, n: u64) {
        if self.inodes.forget(id, n) {
            self.delete_if_unlinked(id);
        }
        self.end_deletion(id);
    }

    /// Counts the reference of a lookup; the caller holds what keeps the inode linked.
    pub(crate) fn count_lookup(&self, id: InodeId) {
        if self.options.track_lookups {
            self.inodes.add_lookup(id);
        }
    }

    /// Updates an access time by the mount's rules; failing to is no failure of the access.
    pub(crate) fn touch_atime(&self, inode: &Arc<Inode>) {
        let now = now();
        let wanted = inode.read().is_ok_and(|state| self.wants_atime(&state, now));
        if !wanted || inode.home.is_read_only() || inode.id.is_stub() || self.read_only().is_some() {
            return;
        }
        let Ok(reservation) = self.reserve(1) else { return };
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

impl Drop for Fs {
    fn drop(&mut self) {
        self.engine.leaf_read_ahead().stop();
        // A panic may have left anything half done: then what the last commit holds is what stays.
        if std::thread::panicking() {
            return;
        }
        if let Err(error) = self.close() {
            tracing::error!("closing the filesystem: {error}");
        }
    }
}

/// The clock.
pub(crate) fn now() -> Timespec {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    Timespec { sec: i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX), nsec: since_epoch.subsec_nanos() }
}

/// The state of [`InodeId::stub`].
fn empty_dir(subvolume: &Subvolume) -> Result<InodeState> {
    let root_key = Key::new(Ino::ROOT_DIR.0, KeyType::INODE_ITEM, 0);
    let Some(raw) = subvolume.tree.get(&root_key)? else { return Err(Error::Stale) };
    let mut item = InodeItem::decode(&raw).map_err(in_tree(&subvolume.tree))?;
    item.mode = mode::DIRECTORY | 0o755;
    (item.size, item.nbytes, item.nlink, item.uid, item.gid, item.flags) = (0, 0, 1, 0, 0, 0);
    Ok(InodeState::new(item))
}

/// Memory of an inode without dirty data, for the cache's bound.
const INODE_BYTES: u64 = 1024;
const DAY: i64 = 24 * 60 * 60;
