//! The inodes in memory, and who uses them.
//!
//! - I1. An inode is in memory at most once: it is loaded by one thread while others wait, and dropped only while nobody
//!   else holds it (its `Arc` is the cache's own).
//! - I2. References (lookups that FUSE remembers, opens) are counted apart from the inodes, so that a kernel that
//!   remembers a million names does not keep a million inodes in memory.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};

use crate::error::Result;
use crate::inode::Inode;
use crate::types::InodeId;

/// All inodes in memory.
#[derive(Debug)]
pub(crate) struct InodeCache {
    shards: Box<[Shard]>,
    /// Inodes that a shard may hold before it drops unused ones.
    shard_limit: AtomicUsize,
}

#[derive(Debug, Default)]
struct Shard {
    map: Mutex<ShardMap>,
    loaded: Condvar,
}

#[derive(Debug, Default)]
struct ShardMap {
    inodes: HashMap<InodeId, Arc<Inode>>,
    loading: HashSet<InodeId>,
    users: HashMap<InodeId, Users>,
    /// Size at which the next sweep is worth it.
    sweep_at: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Users {
    lookups: u64,
    opens: u32,
    /// The inode lost its last link: who gives the last reference back deletes it.
    unlinked: bool,
}

impl InodeCache {
    /// A cache of about `limit` inodes that nobody uses.
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            shards: (0..NR_SHARDS).map(|_| Shard::default()).collect(),
            shard_limit: AtomicUsize::new((limit / NR_SHARDS).max(8)),
        }
    }

    fn shard(&self, id: InodeId) -> &Shard {
        let mixed = (id.ino.0 ^ id.root.0.rotate_left(17)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58;
        &self.shards[usize::try_from(mixed).unwrap_or_default() % NR_SHARDS]
    }

    /// The inode, from memory or by `load`.
    pub(crate) fn get(&self, id: InodeId, load: impl FnOnce() -> Result<Arc<Inode>>) -> Result<Arc<Inode>> {
        let shard = self.shard(id);
        let mut map = shard.map.lock();
        loop {
            if let Some(inode) = map.inodes.get(&id) {
                return Ok(Arc::clone(inode));
            }
            if map.loading.insert(id) {
                break;
            }
            shard.loaded.wait(&mut map);
        }
        drop(map);
        // Declared before the load: also when that panics, those who wait go on.
        let loading = Loading { shard, id };
        let result = load();
        if let Ok(inode) = &result {
            shard.map.lock().insert(inode, self.shard_limit.load(Ordering::Relaxed));
        }
        drop(loading);
        result
    }

    /// Adds a new inode, with this many lookups and opens.
    pub(crate) fn insert(&self, inode: &Arc<Inode>, lookups: u64, opens: u32) {
        let mut map = self.shard(inode.id).map.lock();
        map.insert(inode, self.shard_limit.load(Ordering::Relaxed));
        if lookups > 0 || opens > 0 {
            map.users.insert(inode.id, Users { lookups, opens, unlinked: false });
        }
    }

    /// Takes a deleted inode out.
    pub(crate) fn remove(&self, id: InodeId) {
        let mut map = self.shard(id).map.lock();
        map.inodes.remove(&id);
    }

    pub(crate) fn add_lookup(&self, id: InodeId) {
        self.shard(id).map.lock().users.entry(id).or_default().lookups += 1;
    }

    pub(crate) fn add_open(&self, id: InodeId) {
        self.shard(id).map.lock().users.entry(id).or_default().opens += 1;
    }

    /// Gives lookups back; true if that was the last use of an inode without links.
    pub(crate) fn forget(&self, id: InodeId, lookups: u64) -> bool {
        self.shard(id).map.lock().give_back(id, |users| users.lookups = users.lookups.saturating_sub(lookups))
    }

    /// Gives an open back; true if that was the last use of an inode without links.
    pub(crate) fn release(&self, id: InodeId) -> bool {
        self.shard(id).map.lock().give_back(id, |users| users.opens = users.opens.saturating_sub(1))
    }

    /// Notes that an inode lost its last link; true if it is used, and its last user will delete it.
    pub(crate) fn mark_unlinked(&self, id: InodeId) -> bool {
        match self.shard(id).map.lock().users.get_mut(&id) {
            Some(users) => {
                users.unlinked = true;
                true
            }
            None => false,
        }
    }

    /// Forgets all references to an inode.
    pub(crate) fn drop_users(&self, id: InodeId) {
        self.shard(id).map.lock().users.remove(&id);
    }

    /// The inode, if it is in memory.
    pub(crate) fn peek(&self, id: InodeId) -> Option<Arc<Inode>> {
        self.shard(id).map.lock().inodes.get(&id).cloned()
    }

    /// Whether lookups or opens refer to the inode.
    pub(crate) fn is_used(&self, id: InodeId) -> bool {
        self.shard(id).map.lock().users.contains_key(&id)
    }
}

/// An inode that is being loaded, until this is dropped.
struct Loading<'s> {
    shard: &'s Shard,
    id: InodeId,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.shard.map.lock().loading.remove(&self.id);
        self.shard.loaded.notify_all();
    }
}

impl ShardMap {
    fn insert(&mut self, inode: &Arc<Inode>, limit: usize) {
        if self.inodes.len() >= limit.max(self.sweep_at) {
            let users = &self.users;
            self.inodes.retain(|id, inode| {
                Arc::strong_count(inode) > 1
                    || users.get(id).is_some_and(|users| users.opens > 0)
                    || inode.state.try_read().is_some_and(|state| state.knows_many_names())
            });
            self.sweep_at = self.inodes.len() * 2;
        }
        self.inodes.insert(inode.id, Arc::clone(inode));
    }

    fn give_back(&mut self, id: InodeId, change: impl FnOnce(&mut Users)) -> bool {
        let Some(users) = self.users.get_mut(&id) else { return false };
        change(users);
        if users.lookups > 0 || users.opens > 0 {
            return false;
        }
        self.users.remove(&id).is_some_and(|users| users.unlinked)
    }
}

const NR_SHARDS: usize = 64;
