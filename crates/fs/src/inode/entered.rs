//! [`EnteredSubvolumes`]: the subvolumes that were loaded into memory ("entered").
//!
//! `EnteredSubvolumes` owns the map of entered subvolumes and the set of deleted ones. No other lock is taken under the
//! lock of the map, except without waiting.
//!
//! Invariants:
//! - I1. A subvolume leaves memory only while nothing but the map holds it, and if it can be entered again
//!   ([`EnteredSubvolume::may_leave`]). Inodes in memory hold their subvolume.
//! - I2. A subvolume with unlinked inodes that the kernel still remembers stays in memory: closing the filesystem
//!   deletes these inodes.
//! - I3. The highest inode number of a changed subvolume stays in memory when the subvolume leaves (I1 of
//!   [`crate::inode::subvolume`]). This is all that grows with the number of subvolumes.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Mutex, RwLock};
use ubtrfs_format::RootId;
use ubtrfs_transaction::race_point;

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::bare_inodes::BareInodes;
use crate::inode::subvolume::{EnteredSubvolume, Left};

/// Deletes what earlier mounts left unlinked in a subvolume that is entered.
pub(crate) type Clean = fn(&Fs, &Arc<EnteredSubvolume>) -> Result<()>;

/// The subvolumes in memory.
#[derive(Debug)]
pub(crate) struct EnteredSubvolumes {
    entered: RwLock<EnteredMap>,
    /// Number of subvolumes in memory from which on unused ones leave.
    max: usize,
    /// Unused subvolumes leave when there are at least this many.
    leave_at: AtomicUsize,
    /// Number of times that a subvolume was entered; the clock of [`EnteredSubvolume::last_used`].
    nr_entered: AtomicU64,
    /// Subvolumes that were deleted since the filesystem was opened.
    deleted: Mutex<HashSet<RootId>>,
    /// The inodes of all subvolumes that are known to have no attributes.
    pub(crate) bare: Arc<BareInodes>,
    clean: Clean,
}

/// The map of entered subvolumes.
#[derive(Debug, Default)]
struct EnteredMap {
    subvolumes: HashMap<RootId, Arc<EnteredSubvolume>>,
    /// What stays of subvolumes that left memory (I3).
    left: HashMap<RootId, Left>,
    /// Number of times that subvolumes left memory.
    nr_evictions: u64,
}

impl EnteredSubvolumes {
    /// The state for about `max_bytes` of memory, or for more if more subvolumes are in use. `clean` is called for each
    /// subvolume that is entered on a writable filesystem. `bare_bytes` are for [`BareInodes`].
    pub(crate) fn new(max_bytes: u64, bare_bytes: u64, clean: Clean) -> Self {
        let max = usize::try_from(max_bytes / SUBVOLUME_BYTES).unwrap_or(usize::MAX).max(SUBVOLUMES_MIN);
        Self {
            entered: RwLock::default(),
            max,
            leave_at: AtomicUsize::new(max),
            nr_entered: AtomicU64::new(0),
            deleted: Mutex::default(),
            bare: Arc::new(BareInodes::new(bare_bytes)),
            clean,
        }
    }

    /// A subvolume, if it is in memory.
    pub(crate) fn get(&self, id: RootId) -> Option<Arc<EnteredSubvolume>> {
        let subvolume = Arc::clone(self.entered.read().subvolumes.get(&id)?);
        self.note_use(&subvolume);
        Some(subvolume)
    }

    /// Notes that a subvolume is used.
    pub(crate) fn note_use(&self, subvolume: &EnteredSubvolume) {
        let now = self.nr_entered.load(Ordering::Relaxed);
        if subvolume.last_used.load(Ordering::Relaxed) != now {
            subvolume.last_used.store(now, Ordering::Relaxed);
        }
    }

    /// All subvolumes in memory.
    pub(crate) fn all(&self) -> Vec<Arc<EnteredSubvolume>> {
        self.entered.read().subvolumes.values().cloned().collect()
    }

    /// Whether the subvolume was deleted since the filesystem was opened.
    pub(crate) fn is_deleted(&self, id: RootId) -> bool {
        self.deleted.lock().contains(&id)
    }

    /// Notes that the subvolume was deleted: no lookup finds it any more.
    pub(crate) fn note_deleted(&self, id: RootId) {
        self.deleted.lock().insert(id);
    }

    fn nr_evictions(&self) -> u64 {
        self.entered.read().nr_evictions
    }

    /// Adds an entered subvolume to the map. If two threads enter a subvolume at once, both get the subvolume that the
    /// first thread made. Returns `None` if subvolumes left memory since `nr_evictions` was read: another thread may have
    /// entered this subvolume and changed it.
    fn keep(&self, subvolume: Arc<EnteredSubvolume>, nr_evictions: u64) -> Option<Arc<EnteredSubvolume>> {
        let mut entered = self.entered.write();
        if entered.nr_evictions != nr_evictions {
            return None;
        }
        let left = entered.left.get(&subvolume.id).copied();
        let kept = entered.subvolumes.entry(subvolume.id).or_insert_with(|| {
            if let Some(left) = left {
                subvolume.continue_from(left);
            }
            self.nr_entered.fetch_add(1, Ordering::Relaxed);
            subvolume
        });
        self.note_use(kept);
        Some(Arc::clone(kept))
    }

    /// If there are more than `limit` subvolumes in memory, the subvolumes whose last use was longest ago.
    fn oldest(&self, limit: usize) -> Option<HashSet<RootId>> {
        let entered = self.entered.read();
        let nr_wanted = self.max.saturating_sub(self.max / 4);
        if entered.subvolumes.len() <= limit {
            return None;
        }
        let last_used = |subvolume: &Arc<EnteredSubvolume>| (subvolume.last_used.load(Ordering::Relaxed), subvolume.id);
        let mut by_age: Vec<_> = entered.subvolumes.values().map(last_used).collect();
        drop(entered);
        by_age.sort_unstable();
        by_age.truncate(by_age.len().saturating_sub(nr_wanted));
        Some(by_age.into_iter().map(|(_, id)| id).collect())
    }

    /// Removes from memory the subvolumes of `unwanted` that are not in use, except `kept` (I1, I2).
    fn evict(&self, unwanted: &HashSet<RootId>, kept: &HashSet<RootId>) {
        let mut evicted = Vec::new();
        let mut entered = self.entered.write();
        let EnteredMap { subvolumes, left, nr_evictions } = &mut *entered;
        *nr_evictions = nr_evictions.wrapping_add(1);
        for id in unwanted.difference(kept) {
            let Some(subvolume) = subvolumes.get(id).filter(|subvolume| Arc::strong_count(subvolume) == 1) else {
                continue;
            };
            let Some(leaves) = subvolume.may_leave() else { continue };
            assert!(!kept.contains(id), "I2: subvolume {id} has unlinked inodes in use");
            if let Some(leaves) = leaves {
                left.insert(*id, leaves);
            }
            evicted.extend(subvolumes.remove(id));
        }
        let nr_left = subvolumes.len();
        drop(entered);
        self.leave_at.store(self.max.max(nr_left.saturating_add(self.max / 4)), Ordering::Relaxed);
        drop(evicted);
    }

    /// Removes a deleted subvolume from memory.
    pub(crate) fn forget(&self, id: RootId) -> Option<Arc<EnteredSubvolume>> {
        let mut entered = self.entered.write();
        entered.left.remove(&id);
        entered.subvolumes.remove(&id)
    }
}

impl Fs {
    /// The subvolume. The first call enters the subvolume and deletes its unlinked inodes, so the caller must hold no
    /// inode lock.
    pub(crate) fn subvolume(&self, root: RootId) -> Result<Arc<EnteredSubvolume>> {
        if let Some(subvolume) = self.entered.get(root) {
            return Ok(subvolume);
        }
        if !root.is_subvolume() || self.entered.is_deleted(root) {
            return Err(Error::NotFound);
        }
        let takes_changes = self.context.read_only().is_none();
        let subvolume = loop {
            let nr_evictions = self.entered.nr_evictions();
            let committed = self.engine.committed_generation();
            // The tree stays in memory from here on.
            let tree = self.engine.tree(root)?.ok_or(Error::NotFound)?;
            let item = self.engine.root_item(root)?.filter(|item| item.refs > 0).ok_or(Error::NotFound)?;
            let subvolume = Arc::new(EnteredSubvolume::enter(
                root,
                tree,
                &item,
                committed,
                takes_changes,
                Arc::clone(&self.entered.bare),
            ));
            race_point();
            if let Some(subvolume) = self.entered.keep(subvolume, nr_evictions) {
                break subvolume;
            }
        };
        self.evict_subvolumes(self.entered.leave_at.load(Ordering::Relaxed));
        if takes_changes {
            // A failed deletion does not prevent use of the subvolume.
            if let Err(error) = (self.entered.clean)(self, &subvolume) {
                tracing::warn!("subvolume {root}: deleting unlinked inodes failed: {error}");
            }
        }
        Ok(subvolume)
    }

    /// Removes unused subvolumes from memory, as when a subvolume is entered. Called after a commit, before which changed
    /// subvolumes could not leave.
    pub(crate) fn evict_committed_subvolumes(&self) {
        self.evict_subvolumes(self.entered.max);
    }

    /// If there are more than `limit` subvolumes in memory, removes those that were not used for the longest time and are
    /// not in use, with their unused inodes and trees.
    fn evict_subvolumes(&self, limit: usize) {
        let Some(unwanted) = self.entered.oldest(limit) else { return };
        race_point();
        self.inodes.evict_unused_of(&unwanted);
        let kept = self.inodes.roots_with_unlinked();
        race_point();
        self.entered.evict(&unwanted, &kept);
        self.engine.unload_trees();
    }
}

/// Estimated memory of an entered subvolume in bytes: its gate, and its root directory.
const SUBVOLUME_BYTES: u64 = 4096;
/// There is room for at least this number of subvolumes.
const SUBVOLUMES_MIN: usize = 256;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ubtrfs_device::MemoryDevice;

    use super::*;
    use crate::MountOptions;
    use crate::types::{Attr, Caller, InodeId, NewInode};

    const ROOT: Caller = Caller::ROOT;

    fn small(device: Arc<MemoryDevice>) -> Arc<Fs> {
        let options = MountOptions { memory_bytes: 16 << 20, track_lookups: true, ..MountOptions::default() };
        Fs::open(vec![device], options).unwrap()
    }

    fn new_fs() -> Arc<Fs> {
        let device = Arc::new(MemoryDevice::new(2 << 30));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        small(device)
    }

    fn subvolume(fs: &Fs, name: &str) -> InodeId {
        fs.create_subvolume(fs.root(), name.as_bytes(), &ROOT).unwrap()
    }

    fn file(fs: &Fs, dir: InodeId, name: &str) -> Attr {
        fs.create(dir, name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap()
    }

    fn nr_in_memory(fs: &Fs) -> usize {
        fs.entered.entered.read().subvolumes.len()
    }

    /// Removes a subvolume from memory if that is possible; returns whether it left.
    fn leaves(fs: &Fs, id: RootId) -> bool {
        let unwanted = HashSet::from([id]);
        fs.inodes.evict_unused_of(&unwanted);
        fs.entered.evict(&unwanted, &fs.inodes.roots_with_unlinked());
        !fs.entered.entered.read().subvolumes.contains_key(&id)
    }

    #[test]
    fn memory_does_not_grow_with_the_number_of_subvolumes() {
        let fs = new_fs();
        let most = 2 * SUBVOLUMES_MIN;
        let all: Vec<_> = (0..3 * SUBVOLUMES_MIN).map(|number| subvolume(&fs, &format!("s{number}"))).collect();
        for id in &all {
            file(&fs, *id, "made");
        }
        fs.sync().unwrap();
        for _ in 0..2 {
            for id in &all {
                assert_eq!(fs.lookup(*id, b"made").unwrap().id.root, id.root);
            }
            assert!(nr_in_memory(&fs) <= most, "I1: {}", nr_in_memory(&fs));
            assert!(fs.engine.nr_loaded_trees() <= 2 * most, "{}", fs.engine.nr_loaded_trees());
        }
        fs.close().unwrap();
    }

    #[test]
    fn the_subvolumes_used_last_stay() {
        let fs = new_fs();
        let often = subvolume(&fs, "often");
        file(&fs, often, "file");
        fs.sync().unwrap();
        let often_used = fs.subvolume(often.root).unwrap();
        let count = Arc::downgrade(&often_used);
        drop(often_used);
        for number in 0..3 * SUBVOLUMES_MIN {
            let other = subvolume(&fs, &format!("s{number}"));
            fs.readdir(other, 0, &mut |_| true).unwrap();
            fs.lookup(often, b"file").unwrap();
        }
        assert!(count.upgrade().is_some(), "it was loaded again and again");
        fs.close().unwrap();
    }

    #[test]
    fn inode_numbers_are_not_used_again_after_a_subvolume_left_memory() {
        let fs = new_fs();
        let dir = subvolume(&fs, "s");
        let before = file(&fs, dir, "gone").id;
        fs.unlink(dir, b"gone").unwrap();
        fs.forget(before, 1);
        assert!(!leaves(&fs, dir.root), "I1: its changes are not on disk");
        fs.sync().unwrap();
        assert!(leaves(&fs, dir.root));
        let new = file(&fs, dir, "new").id;
        assert!(new.ino > before.ino, "I3");
        // Also if it was read-only when it left and came back.
        fs.unlink(dir, b"new").unwrap();
        fs.forget(new, 1);
        fs.set_subvolume_read_only(dir.root, true).unwrap();
        fs.sync().unwrap();
        for _ in 0..2 {
            assert!(leaves(&fs, dir.root));
            assert!(fs.subvolume(dir.root).unwrap().is_read_only());
        }
        fs.set_subvolume_read_only(dir.root, false).unwrap();
        assert!(file(&fs, dir, "newer").id.ino > new.ino, "I3");
        fs.close().unwrap();
    }

    #[test]
    fn a_subvolume_in_use_stays_in_memory() {
        let fs = new_fs();
        let dir = subvolume(&fs, "s");
        let (open, unlinked) = (file(&fs, dir, "open").id, file(&fs, dir, "unlinked").id);
        fs.unlink(dir, b"unlinked").unwrap();
        fs.sync().unwrap();
        assert!(!leaves(&fs, dir.root), "I2");
        fs.forget(unlinked, 1);
        fs.sync().unwrap();
        fs.inodes.add_open(open);
        let _ = fs.getattr(open).unwrap();
        assert!(!leaves(&fs, dir.root), "I1: a file is open");
        fs.inodes.release(open);
        assert!(leaves(&fs, dir.root));
        fs.close().unwrap();
    }

    #[test]
    fn a_flag_that_is_not_on_disk_keeps_the_subvolume_in_memory() {
        let fs = new_fs();
        let dir = subvolume(&fs, "s");
        fs.subvolume(dir.root).unwrap().set_read_only(true).unwrap();
        assert!(!leaves(&fs, dir.root), "I1");
        fs.subvolume(dir.root).unwrap().set_read_only(false).unwrap();
        assert!(leaves(&fs, dir.root));
        fs.set_subvolume_read_only(dir.root, true).unwrap();
        assert!(leaves(&fs, dir.root));
        assert!(fs.subvolume(dir.root).unwrap().is_read_only());
        fs.close().unwrap();
    }

    #[test]
    fn threads_find_what_others_changed_before_a_subvolume_left_memory() {
        let fs = new_fs();
        let nr = SUBVOLUMES_MIN + 64;
        let all: Vec<_> = (0..nr).map(|number| subvolume(&fs, &format!("s{number}"))).collect();
        fs.sync().unwrap();
        ubtrfs_transaction::delay_races(Duration::from_millis(1));
        std::thread::scope(|scope| {
            for thread in 0..4usize {
                let (fs, all) = (&fs, &all);
                scope.spawn(move || {
                    // All threads work on the same subvolumes, in different orders.
                    for step in 0..2 * nr {
                        let dir = all[(step * (2 * thread + 1) + thread * 37) % nr];
                        let made = file(fs, dir, &format!("{thread}-{step}"));
                        assert_eq!(fs.lookup(dir, format!("{thread}-{step}").as_bytes()).unwrap().id, made.id);
                        fs.forget(made.id, 2);
                        if step % 97 == 0 {
                            fs.sync().unwrap();
                        }
                    }
                });
            }
        });
        ubtrfs_transaction::delay_races(Duration::ZERO);
        fs.sync().unwrap();
        let mut nr_files = 0;
        for dir in &all {
            let mut inos = HashSet::new();
            let mut count = 0;
            fs.readdir(*dir, 2, &mut |entry| {
                inos.insert(entry.id);
                count += 1;
                true
            })
            .unwrap();
            assert_eq!(inos.len(), count, "two files have one number");
            nr_files += count;
        }
        assert_eq!(nr_files, 4 * 2 * nr, "files are missing");
        fs.close().unwrap();
    }
}
