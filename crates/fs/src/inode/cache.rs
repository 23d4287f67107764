//! The inodes in memory, and counts of their users.
//!
//! - I1. An inode is in memory at most once: one thread loads it while others wait. An inode is evicted only while
//!   nothing but the cache holds its `Arc`.
//! - I2. Inodes that were created and not looked up since are evicted first. So creating many inodes does not evict
//!   inodes that were looked up, and the few created inodes that stay in memory fit into a processor's cache.
//! - I3. References (lookups that FUSE remembers, opens) are counted apart from the inodes. A kernel that remembers a
//!   million names does not keep a million inodes in memory.
//! - I4. `of_root` counts exactly the entries of `inodes` and `users`, and lists no subvolume without any.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};
use ubtrfs_format::RootId;
use ubtrfs_transaction::{INODES_PER_ROW, race_point};

use crate::error::Result;
use crate::inode::known_names::{KnownNames, NameBudget};
use crate::inode::state::Inode;
use crate::types::InodeId;

/// All inodes in memory.
#[derive(Debug)]
pub(crate) struct InodeCache {
    shards: Box<[InodeShard]>,
    /// If a shard has at least this many inodes, the next insertion may evict unused ones ([`ShardMap::sweep_at`]).
    shard_limit: AtomicUsize,
    /// Number of [`Deleting`] values.
    nr_deleting: AtomicUsize,
    /// The memory budget of the known names of all directories.
    name_budget: Arc<NameBudget>,
}

#[derive(Debug, Default)]
struct InodeShard {
    map: Mutex<ShardMap>,
    loaded: Condvar,
}

#[derive(Debug, Default)]
struct ShardMap {
    inodes: HashMap<InodeId, Cached, IdHash>,
    /// The most recently created inodes, in the order of their creation.
    young: VecDeque<InodeId>,
    loading: HashSet<InodeId, IdHash>,
    users: HashMap<InodeId, InodeUsers, IdHash>,
    /// For each subvolume, the number of its entries in `inodes` and in `users` together. So the deletion of a subvolume
    /// does not search the shards without any (I4).
    of_root: HashMap<RootId, usize, IdHash>,
    /// Number of users of unlinked inodes.
    nr_unlinked: usize,
    /// The next eviction of unused inodes waits until the shard has at least this many inodes.
    sweep_at: usize,
}

#[derive(Debug)]
struct Cached {
    inode: Arc<Inode>,
    /// Whether the inode was looked up since it was created.
    wanted: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct InodeUsers {
    lookups: u64,
    opens: u32,
    /// Whether the inode lost its last link. An unlinked inode is deleted when its last reference is released.
    unlinked: bool,
    /// Whether the inode was made by `tmpfile` and may get its first name. This flag is kept in the cache because the
    /// inode may leave memory before it gets the name (I3).
    linkable: bool,
}

impl InodeCache {
    /// Makes a cache of about `limit` inodes, or of more if more inodes are in use, with about `name_bytes` of memory for
    /// the known names of directories.
    pub(crate) fn new(limit: usize, name_bytes: u64) -> Self {
        Self {
            shards: (0..NR_SHARDS).map(|_| InodeShard::default()).collect(),
            shard_limit: AtomicUsize::new((limit / NR_SHARDS).max(8)),
            nr_deleting: AtomicUsize::new(0),
            name_budget: NameBudget::new(name_bytes),
        }
    }

    /// The known names of an empty directory.
    pub(crate) fn names_of_empty_dir(&self) -> KnownNames {
        KnownNames::of_empty(&self.name_budget)
    }

    fn shard(&self, id: InodeId) -> &InodeShard {
        // Neighbouring inode numbers, which are allocated together, go to one shard and so to one processor's cache.
        let row = id.ino.0 / INODES_PER_ROW;
        let mixed = (row ^ id.root.0.rotate_left(17)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58;
        &self.shards[usize::try_from(mixed).unwrap_or_default() % NR_SHARDS]
    }

    /// Returns the inode from memory, or loads it with `load`.
    pub(crate) fn get(&self, id: InodeId, load: impl FnOnce() -> Result<Arc<Inode>>) -> Result<Arc<Inode>> {
        let loading = match self.find_or_block(id) {
            FoundInode::InMemory(inode) => return Ok(inode),
            FoundInode::Absent(loading) => loading,
        };
        let result = load();
        race_point();
        if let Ok(inode) = &result {
            let mut map = loading.shard.map.lock();
            // The inode may have been created since the search: its items became visible after it was inserted (I1).
            if let Some(created) = map.find(id) {
                drop(map);
                return Ok(created);
            }
            map.insert(inode, true, self.shard_limit.load(Ordering::Relaxed));
        }
        drop(loading);
        result
    }

    /// Returns the inode from memory, or blocks loading of it. Waits while another thread loads the inode. The holder of
    /// the guard must not wait for inode locks.
    pub(crate) fn find_or_block(&self, id: InodeId) -> FoundInode<'_> {
        race_point();
        let shard = self.shard(id);
        let mut map = shard.map.lock();
        loop {
            if let Some(inode) = map.find(id) {
                return FoundInode::InMemory(inode);
            }
            if let Some(loading) = map.block(shard, id) {
                return FoundInode::Absent(loading);
            }
            shard.loaded.wait(&mut map);
        }
    }

    /// Blocks loading of an uncached inode. Returns `None` if the inode is in memory or being loaded. Until the guard is
    /// dropped, `get` for this inode waits, so the holder of the guard must not wait for inode locks.
    pub(crate) fn block_load(&self, id: InodeId) -> Option<Loading<'_>> {
        let shard = self.shard(id);
        let mut map = shard.map.lock();
        if map.inodes.contains_key(&id) { None } else { map.block(shard, id) }
    }

    /// Adds a new inode with the given counts of lookups and opens.
    pub(crate) fn insert(&self, inode: &Arc<Inode>, lookups: u64, opens: u32) {
        let mut map = self.shard(inode.id).map.lock();
        map.insert(inode, false, self.shard_limit.load(Ordering::Relaxed));
        if lookups > 0 || opens > 0 {
            map.remove_users(inode.id);
            *map.users_of(inode.id) = InodeUsers { lookups, opens, ..InodeUsers::default() };
        }
        let unwanted = map.add_young(inode.id);
        drop(map);
        drop(unwanted);
    }

    /// Removes a deleted inode.
    pub(crate) fn remove(&self, id: InodeId) {
        let mut map = self.shard(id).map.lock();
        map.remove_inode(id);
    }

    #[allow(clippy::arithmetic_side_effects, reason = "the kernel cannot send 2^64 requests")]
    pub(crate) fn add_lookup(&self, id: InodeId) {
        self.shard(id).map.lock().users_of(id).lookups += 1;
    }

    #[allow(clippy::arithmetic_side_effects, reason = "the kernel cannot send 2^64 requests")]
    pub(crate) fn add_open(&self, id: InodeId) {
        self.shard(id).map.lock().users_of(id).opens += 1;
    }

    /// Releases lookups. If that was the last use of an inode without links, returns its deletion, which the caller makes.
    pub(crate) fn forget(&self, id: InodeId, lookups: u64) -> Option<Deleting<'_>> {
        self.give_back(id, |users| users.lookups = users.lookups.saturating_sub(lookups))
    }

    /// Releases an open, as [`InodeCache::forget`] releases lookups.
    pub(crate) fn release(&self, id: InodeId) -> Option<Deleting<'_>> {
        self.give_back(id, |users| users.opens = users.opens.saturating_sub(1))
    }

    fn give_back(&self, id: InodeId, change: impl FnOnce(&mut InodeUsers)) -> Option<Deleting<'_>> {
        let mut map = self.shard(id).map.lock();
        map.give_back(id, change).then(|| {
            // Under the shard's lock, so that `awaits_deletions` finds either the user or the deletion.
            self.nr_deleting.fetch_add(1, Ordering::AcqRel);
            Deleting(&self.nr_deleting)
        })
    }

    /// Notes that an inode lost its last link. Returns true if the inode is in use, so that its last user deletes it.
    pub(crate) fn mark_unlinked(&self, id: InodeId) -> bool {
        race_point();
        self.shard(id).map.lock().mark_unlinked(id).is_some()
    }

    /// Notes that an inode in use was made without a name and may get one.
    pub(crate) fn mark_without_name(&self, id: InodeId) {
        if let Some(users) = self.shard(id).map.lock().mark_unlinked(id) {
            users.linkable = true;
        }
    }

    /// Notes that an inode got a name. From then on the inode is not linkable: after all its names are removed, it
    /// cannot get a new name.
    pub(crate) fn mark_linked(&self, id: InodeId) {
        if let Some(users) = self.shard(id).map.lock().users.get_mut(&id) {
            users.linkable = false;
        }
    }

    /// Whether an inode was made without a name and never had one.
    pub(crate) fn is_linkable(&self, id: InodeId) -> bool {
        self.shard(id).map.lock().users.get(&id).is_some_and(|users| users.linkable)
    }

    /// Removes all references to an inode.
    pub(crate) fn drop_users(&self, id: InodeId) {
        self.shard(id).map.lock().remove_users(id);
    }

    /// Adds the references that another cache counts. In the other cache, no inode may be unlinked.
    #[allow(clippy::arithmetic_side_effects, reason = "the kernel cannot send 2^64 requests")]
    pub(crate) fn take_users(&self, other: &Self) {
        for (shard, from) in self.shards.iter().zip(&other.shards) {
            let users: Vec<(InodeId, InodeUsers)> =
                from.map.lock().users.iter().map(|(id, users)| (*id, *users)).collect();
            let mut map = shard.map.lock();
            for (id, taken) in users {
                debug_assert!(!taken.unlinked, "inode {id:?} of a filesystem that is never written is unlinked");
                let users = map.users_of(id);
                users.lookups += taken.lookups;
                users.opens += taken.opens;
            }
        }
    }

    /// The inode, if it is in memory.
    pub(crate) fn peek(&self, id: InodeId) -> Option<Arc<Inode>> {
        self.shard(id).map.lock().find(id)
    }

    /// The inodes of a subvolume that lookups or opens refer to.
    pub(crate) fn used_of(&self, root: RootId) -> HashSet<InodeId> {
        let of_shard = |shard: &InodeShard| -> Vec<InodeId> {
            let map = shard.map.lock();
            if !map.of_root.contains_key(&root) {
                return Vec::new();
            }
            map.users.keys().filter(|id| id.root == root).copied().collect()
        };
        self.shards.iter().flat_map(of_shard).collect()
    }

    /// The inodes of a subvolume that are in memory.
    pub(crate) fn all_of(&self, root: RootId) -> Vec<Arc<Inode>> {
        let of_shard = |shard: &InodeShard| -> Vec<Arc<Inode>> {
            let map = shard.map.lock();
            if !map.of_root.contains_key(&root) {
                return Vec::new();
            }
            map.inodes.values().map(|cached| &cached.inode).filter(|inode| inode.id.root == root).cloned().collect()
        };
        self.shards.iter().flat_map(of_shard).collect()
    }

    /// All inodes in memory.
    pub(crate) fn all(&self) -> Vec<Arc<Inode>> {
        let of_shard = |shard: &InodeShard| -> Vec<Arc<Inode>> {
            shard.map.lock().inodes.values().map(|cached| Arc::clone(&cached.inode)).collect()
        };
        self.shards.iter().flat_map(of_shard).collect()
    }

    /// Whether inodes without links are being deleted, or will be when the kernel forgets them: they are not open.
    pub(crate) fn awaits_deletions(&self) -> bool {
        let of_shard =
            |shard: &InodeShard| shard.map.lock().users.values().any(|users| users.unlinked && users.opens == 0);
        // An inode moves from the users to the deletions, so the users are looked at first.
        self.shards.iter().any(of_shard) || self.nr_deleting.load(Ordering::Acquire) > 0
    }

    /// Removes from memory the inodes of these subvolumes that are not in use.
    pub(crate) fn evict_unused_of(&self, roots: &HashSet<RootId>) {
        for shard in &self.shards {
            shard.map.lock().evict_unused(|id| roots.contains(&id.root));
        }
    }

    /// The subvolumes of the unlinked inodes that lookups or opens refer to.
    pub(crate) fn roots_with_unlinked(&self) -> HashSet<RootId> {
        let mut roots = HashSet::new();
        for shard in &self.shards {
            let map = shard.map.lock();
            if map.nr_unlinked > 0 {
                roots.extend(map.users.iter().filter(|(_, users)| users.unlinked).map(|(id, _)| id.root));
            }
        }
        roots
    }

    /// Whether lookups or opens refer to the inode.
    pub(crate) fn is_used(&self, id: InodeId) -> bool {
        self.shard(id).map.lock().users.contains_key(&id)
    }
}

/// The deletion of an inode that lost its last use. [`InodeCache::awaits_deletions`] counts it until this is dropped.
#[derive(Debug)]
#[must_use = "the inode has to be deleted"]
pub(crate) struct Deleting<'s>(&'s AtomicUsize);

impl Drop for Deleting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// An inode that a thread looked for.
pub(crate) enum FoundInode<'s> {
    /// The inode is in memory.
    InMemory(Arc<Inode>),
    /// The inode is not in memory. Until the guard is dropped, no other thread loads it.
    Absent(Loading<'s>),
}

/// A guard: while it exists, other threads that need the inode wait instead of loading it. These threads wake up when
/// the guard is dropped, also after a panic.
#[must_use = "others may load the inode once this is dropped"]
pub(crate) struct Loading<'s> {
    shard: &'s InodeShard,
    id: InodeId,
    is_used: bool,
}

impl Loading<'_> {
    /// Whether lookups or opens referred to the inode when this guard was made. If false, no lookup or open begins
    /// while the guard exists.
    pub(crate) fn is_used(&self) -> bool {
        self.is_used
    }
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.shard.map.lock().loading.remove(&self.id);
        self.shard.loaded.notify_all();
    }
}

impl ShardMap {
    /// Blocks loading of an inode that is not in memory, unless another thread loads it.
    fn block<'s>(&mut self, shard: &'s InodeShard, id: InodeId) -> Option<Loading<'s>> {
        let is_used = self.users.contains_key(&id);
        // Use `then`, which makes no guard if the result is `None`. Dropping a guard here would lock the shard, which
        // the caller has locked already.
        self.loading.insert(id).then(|| Loading { shard, id, is_used })
    }

    fn find(&mut self, id: InodeId) -> Option<Arc<Inode>> {
        let cached = self.inodes.get_mut(&id)?;
        if !cached.wanted {
            cached.wanted = true;
        }
        Some(Arc::clone(&cached.inode))
    }

    fn insert(&mut self, inode: &Arc<Inode>, wanted: bool, limit: usize) {
        if self.inodes.len() >= limit.max(self.sweep_at) {
            self.evict_unused(|_| true);
            self.sweep_at = self.inodes.len().saturating_mul(2);
        }
        let other = self.inodes.insert(inode.id, Cached { inode: Arc::clone(inode), wanted });
        assert!(other.is_none(), "I1: inode {:?} is in memory twice", inode.id);
        count(&mut self.of_root, inode.id.root);
    }

    fn remove_inode(&mut self, id: InodeId) -> Option<Cached> {
        let removed = self.inodes.remove(&id)?;
        uncount(&mut self.of_root, id.root);
        Some(removed)
    }

    /// The references to an inode, for a change that adds one.
    fn users_of(&mut self, id: InodeId) -> &mut InodeUsers {
        self.users.entry(id).or_insert_with(|| {
            count(&mut self.of_root, id.root);
            InodeUsers::default()
        })
    }

    fn remove_users(&mut self, id: InodeId) -> Option<InodeUsers> {
        let removed = self.users.remove(&id)?;
        uncount(&mut self.of_root, id.root);
        self.nr_unlinked = self.nr_unlinked.saturating_sub(usize::from(removed.unlinked));
        Some(removed)
    }

    /// Removes from memory the inodes that `is_wanted` selects and that are not in use, except large directories whose
    /// names are known.
    fn evict_unused(&mut self, is_wanted: impl Fn(&InodeId) -> bool) {
        let Self { inodes, users, of_root, .. } = self;
        inodes.retain(|id, cached| {
            let stays = !is_wanted(id)
                || Arc::strong_count(&cached.inode) > 1
                || users.get(id).is_some_and(|users| users.opens > 0)
                || cached.inode.state.try_read().is_some_and(|state| state.knows_many_names());
            if !stays {
                check_evictable(&cached.inode);
                uncount(of_root, id.root);
            }
            stays
        });
    }

    /// Adds an inode to the young inodes. If there are too many young inodes and the oldest is unused, removes the
    /// oldest from memory and returns it (I2).
    fn add_young(&mut self, id: InodeId) -> Option<Cached> {
        self.young.push_back(id);
        if self.young.len() <= MAX_YOUNG {
            return None;
        }
        let oldest = self.young.pop_front()?;
        let cached = self.inodes.get(&oldest)?;
        let is_used = cached.wanted
            || Arc::strong_count(&cached.inode) > 1
            || self.users.get(&oldest).is_some_and(|users| users.opens > 0);
        if is_used {
            return None;
        }
        check_evictable(&cached.inode);
        self.remove_inode(oldest)
    }

    fn give_back(&mut self, id: InodeId, change: impl FnOnce(&mut InodeUsers)) -> bool {
        let Some(users) = self.users.get_mut(&id) else { return false };
        change(users);
        if users.lookups > 0 || users.opens > 0 {
            return false;
        }
        self.remove_users(id).is_some_and(|users| users.unlinked)
    }

    fn mark_unlinked(&mut self, id: InodeId) -> Option<&mut InodeUsers> {
        let users = self.users.get_mut(&id)?;
        self.nr_unlinked = self.nr_unlinked.saturating_add(usize::from(!users.unlinked));
        users.unlinked = true;
        Some(users)
    }
}

/// Checks that an inode loses nothing when it leaves memory (I1).
fn check_evictable(inode: &Arc<Inode>) {
    let is_clean = inode.state.try_read().is_none_or(|state| state.dead || state.data.is_clean());
    assert!(is_clean, "I1: inode {:?} leaves memory with data that is not on disk", inode.id);
}

fn count(of_root: &mut HashMap<RootId, usize, IdHash>, root: RootId) {
    let number = of_root.entry(root).or_default();
    *number = number.saturating_add(1);
}

fn uncount(of_root: &mut HashMap<RootId, usize, IdHash>, root: RootId) {
    let number = of_root.get_mut(&root).expect("I4: a counted entry is removed");
    *number = number.saturating_sub(1);
    if *number == 0 {
        of_root.remove(&root);
    }
}

/// Hashes inode ids with a few multiplications. The secret prevents crafted images from choosing inodes with equal
/// hashes.
#[derive(Clone, Debug)]
struct IdHash {
    secret: u64,
}

#[derive(Debug)]
struct IdHasher {
    state: u64,
}

impl Default for IdHash {
    fn default() -> Self {
        Self { secret: RandomState::new().hash_one(0) }
    }
}

impl BuildHasher for IdHash {
    type Hasher = IdHasher;

    fn build_hasher(&self) -> IdHasher {
        IdHasher { state: self.secret }
    }
}

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.state
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u64(&mut self, number: u64) {
        let product = u128::from(self.state ^ number).wrapping_mul(u128::from(MIX));
        self.state = product as u64 ^ (product >> 64) as u64;
    }
}

const NR_SHARDS: usize = 64;
/// Maximum number of young inodes in a shard. The young inodes of all shards together take about a quarter of a MiB.
const MAX_YOUNG: usize = 4;
/// An odd number whose bits look random.
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use ubtrfs_device::MemoryDevice;
    use ubtrfs_format::{Ino, RootId};

    use super::*;
    use crate::inode::state::InodeState;
    use crate::types::{Caller, NewInode};
    use crate::{Fs, MountOptions};

    #[test]
    fn an_inode_that_is_created_while_it_is_looked_up_is_in_memory_once() {
        let device = Arc::new(MemoryDevice::new(1 << 30));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let fs = Fs::open(vec![device], MountOptions::default()).unwrap();
        let id = fs.create(fs.root(), b"file", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        let created = fs.inode(id).unwrap();
        fs.inodes.remove(id);
        // A thread looks for the number that another thread is giving to a new inode.
        let load = || {
            fs.inodes.insert(&created, 0, 0);
            let state = InodeState::new(created.state.read().item.clone());
            Ok(Arc::new(Inode::new(id, Arc::clone(&created.home), state)))
        };
        let found = fs.inodes.get(id, load).unwrap();
        assert!(Arc::ptr_eq(&found, &created), "I1");
        assert!(Arc::ptr_eq(&fs.inode(id).unwrap(), &created), "I1");
        fs.close().unwrap();
    }

    #[test]
    fn each_shard_counts_the_entries_of_each_subvolume() {
        let device = Arc::new(MemoryDevice::new(1 << 30));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let fs = Fs::open(vec![device], MountOptions::default()).unwrap();
        // Small shards, so that inodes are evicted.
        fs.inodes.shard_limit.store(8, Ordering::Relaxed);
        let check = || {
            for shard in &fs.inodes.shards {
                let map = shard.map.lock();
                let mut counted: HashMap<RootId, usize, IdHash> = HashMap::default();
                map.inodes.keys().chain(map.users.keys()).for_each(|id| count(&mut counted, id.root));
                assert!(counted.iter().all(|(root, number)| map.of_root.get(root) == Some(number)), "I4");
                assert_eq!(counted.len(), map.of_root.len(), "I4");
            }
        };
        let dirs: Vec<InodeId> = (0..3)
            .map(|number| fs.create_subvolume(fs.root(), number.to_string().as_bytes(), &Caller::ROOT).unwrap())
            .collect();
        for number in 0..2000usize {
            let (dir, name) = (dirs[number % 3], (number % 700).to_string());
            let Ok(file) = fs.create(dir, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT) else {
                fs.unlink(dir, name.as_bytes()).unwrap();
                continue;
            };
            match number % 5 {
                0 => fs.inodes.add_lookup(file.id),
                1 => fs.inodes.add_open(file.id),
                2 => fs.forget(file.id, 1),
                3 => fs.release_inode(file.id),
                _ => assert!(fs.lookup(dir, name.as_bytes()).is_ok()),
            }
        }
        check();
        let used: usize = dirs.iter().map(|dir| fs.inodes.used_of(dir.root).len()).sum();
        assert!(used > 0);
        fs.delete_subvolume(fs.root(), b"0", None).unwrap();
        fs.inodes.used_of(dirs[0].root).into_iter().for_each(|id| fs.inodes.drop_users(id));
        check();
        fs.close().unwrap();
        check();
    }

    #[test]
    fn unrequested_new_inodes_are_evicted_first() {
        let device = Arc::new(MemoryDevice::new(1 << 30));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let fs = Fs::open(vec![device], MountOptions::default()).unwrap();
        let make = |name: &str| fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        let (wanted, open) = (make("wanted"), make("open"));
        fs.lookup(fs.root(), b"wanted").unwrap();
        fs.inodes.add_open(open);
        let others: Vec<_> = (0..3000).map(|number| make(&number.to_string())).collect();
        let is_cached = |id: &InodeId| fs.inodes.shard(*id).map.lock().inodes.contains_key(id);
        assert!(is_cached(&wanted) && is_cached(&open) && is_cached(others.last().unwrap()));
        let cached = others.iter().filter(|id| is_cached(id)).count();
        assert!(cached <= NR_SHARDS * MAX_YOUNG, "{cached}");
        fs.close().unwrap();
    }

    #[test]
    fn neighbours_have_other_hashes() {
        let hash = IdHash::default();
        let id = |number: u64| InodeId { root: RootId(5 + number / 5000), ino: Ino(257 + number % 5000) };
        let all: HashSet<_> = (0..50_000).map(|number| hash.hash_one(id(number))).collect();
        assert_eq!(all.len(), 50_000);
        // A hash table uses some of the low bits of a hash; this test looks at the low 16.
        let low: HashSet<_> = all.iter().map(|hash| hash & 0xffff).collect();
        assert!(low.len() > 30_000, "{}", low.len());
    }
}
