//! [`NodeStore`]: the nodes of all trees: dirty nodes in memory, other nodes in the cache or on the devices.
//!
//! Owns the shards of dirty nodes, each under a lock. The cache, the hints and the readahead own their locks. Lock
//! order: a tree's view -> the readahead's state -> a shard or the cache; no lock is taken under a shard's lock.
//!
//! Invariants:
//! - I1. A node of the running transaction stays in the dirty map until the commit has written it, or is written before
//!   readers can reach it ([`crate::nodes::stream`]). The cache may drop only written nodes.
//! - I2. Every node from a device passed the tree checker, and its address, level, generation and first key match its
//!   parent's pointer.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::RwLock;
use ubtrfs_device::AlignedBuf;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::check::{CheckContext, ExpectedBlock, check_node};
use ubtrfs_format::superblock::Incompat;
use ubtrfs_format::{Corrupt, FormatError, Generation, Logical};
use ubtrfs_tree::{CacheStats, Node, NodeCache, NodePtr, NodeSource};
use ubtrfs_volumes::Volumes;

use crate::lock_rank;
use crate::nodes::leaf_ahead::LeafAhead;
use crate::nodes::leaf_hint::LeafHints;

type NodeMap = HashMap<Logical, Arc<Node>>;

/// Source of nodes for all trees of a filesystem.
#[derive(Debug)]
pub(crate) struct NodeStore {
    volumes: Arc<Volumes>,
    cache: NodeCache,
    pub(crate) hints: LeafHints,
    pub(crate) ahead: LeafAhead,
    dirty: Box<[RwLock<NodeMap>]>,
    check: CheckContext,
    /// Generation of the running transaction: no block is newer.
    generation_limit: AtomicU64,
    /// Whether items may have the form that simple quotas need.
    has_simple_quotas: AtomicBool,
    nodesize: usize,
    /// Number of nodes in memory that are not written yet. The next field holds the highest value of this field so far.
    nr_unwritten: AtomicU64,
    most_unwritten: AtomicU64,
}

/// Source of nodes for a walk that replaces most nodes that it reads. Replaced nodes are useless, so the nodes that
/// this source reads do not enter the cache.
pub(crate) struct ScanSource<'s>(pub(crate) &'s NodeStore);

impl NodeStore {
    #[allow(clippy::arithmetic_side_effects, reason = "the node size is at least 4096")]
    pub(crate) fn new(volumes: Arc<Volumes>, check: CheckContext, nodesize: usize, cache_bytes: u64) -> Self {
        let dirty = (0..NR_SHARDS).map(|_| RwLock::default()).collect();
        let limit = check.generation_limit.map_or(u64::MAX, |limit| limit.0);
        let cache = NodeCache::new(cache_bytes);
        Self {
            volumes,
            cache,
            hints: LeafHints::default(),
            ahead: LeafAhead::new(cache_bytes / nodesize as u64),
            dirty,
            check,
            generation_limit: AtomicU64::new(limit),
            has_simple_quotas: AtomicBool::new(check.incompat.contains(Incompat::SIMPLE_QUOTA)),
            nodesize,
            nr_unwritten: AtomicU64::new(0),
            most_unwritten: AtomicU64::new(0),
        }
    }

    #[allow(clippy::arithmetic_side_effects, reason = "the node size is at least 4096")]
    fn shard(&self, bytenr: Logical) -> &RwLock<NodeMap> {
        let index = bytenr.0 / self.nodesize as u64 % NR_SHARDS as u64;
        &self.dirty[usize::try_from(index).expect("a remainder of NR_SHARDS fits")]
    }

    /// Stores a new node, which stays in memory until [`Self::written`].
    pub(crate) fn put_dirty(&self, node: Arc<Node>) {
        let limit = self.generation_limit.load(Ordering::Acquire);
        assert!(node.generation().0 <= limit, "I1: a node of generation {} before its transaction", node.generation());
        if self.shard(node.bytenr()).write().insert(node.bytenr(), node).is_none() {
            self.count_unwritten(1);
        }
    }

    /// Whether the node at this address is only in memory.
    pub(crate) fn is_dirty(&self, bytenr: Logical) -> bool {
        self.shard(bytenr).read().contains_key(&bytenr)
    }

    /// Drops a dirty node that is not used any more.
    pub(crate) fn drop_dirty(&self, bytenr: Logical) {
        if self.shard(bytenr).write().remove(&bytenr).is_some() {
            self.nr_unwritten.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Raises the number of unwritten nodes by `nr_nodes`, which are handed to a stream.
    pub(crate) fn streams(&self, nr_nodes: usize) {
        self.count_unwritten(nr_nodes as u64);
    }

    /// Caches nodes that a stream has written, if the cache has room. Readers could not reach the nodes of a stream
    /// before they were written.
    pub(crate) fn streamed(&self, nodes: Vec<Arc<Node>>) {
        self.nr_unwritten.fetch_sub(nodes.len() as u64, Ordering::Relaxed);
        nodes.into_iter().for_each(|node| self.cache.insert_if_room(node));
    }

    fn count_unwritten(&self, more: u64) {
        let now = self.nr_unwritten.fetch_add(more, Ordering::Relaxed).saturating_add(more);
        self.most_unwritten.fetch_max(now, Ordering::Relaxed);
    }

    /// The peak memory of unwritten nodes since the filesystem was opened, in bytes.
    pub(crate) fn most_unwritten_bytes(&self) -> u64 {
        self.most_unwritten.load(Ordering::Relaxed).saturating_mul(self.nodesize as u64)
    }

    /// Notes that a node is being replaced: a full cache evicts it to make room for the new node.
    pub(crate) fn retire(&self, bytenr: Logical) {
        self.cache.retire(bytenr);
    }

    /// Drops a node that no tree refers to any more.
    pub(crate) fn forget(&self, bytenr: Logical) {
        self.cache.remove(bytenr);
    }

    /// All dirty nodes, by address.
    pub(crate) fn dirty_nodes(&self) -> Vec<Arc<Node>> {
        let mut nodes: Vec<_> =
            self.dirty.iter().flat_map(|shard| shard.read().values().cloned().collect::<Vec<_>>()).collect();
        nodes.sort_unstable_by_key(|node| node.bytenr());
        nodes
    }

    /// Notes that dirty nodes were written: moves them to the cache.
    pub(crate) fn written(&self, nodes: Vec<Arc<Node>>) {
        for node in nodes {
            let bytenr = node.bytenr();
            debug_assert!(self.is_dirty(bytenr), "I1: the node at {bytenr} left the dirty map before it was written");
            self.cache.insert(node);
            self.drop_dirty(bytenr);
        }
    }

    /// Sets the generation of the running transaction.
    pub(crate) fn set_generation_limit(&self, running: Generation) {
        self.generation_limit.store(running.0, Ordering::Release);
    }

    /// Allows items in the form that simple quotas need. Must be called before such an item is put.
    pub(crate) fn allow_simple_quotas(&self) {
        self.has_simple_quotas.store(true, Ordering::Release);
    }

    fn check_context(&self, expected: ExpectedBlock) -> CheckContext {
        let limit = Generation(self.generation_limit.load(Ordering::Acquire));
        let mut incompat = self.check.incompat;
        incompat.set(Incompat::SIMPLE_QUOTA, self.has_simple_quotas.load(Ordering::Acquire));
        CheckContext { generation_limit: Some(limit), expected, incompat, ..self.check }
    }

    /// The check that every block passes before it is written.
    pub(crate) fn check_before_write(&self, raw: &[u8]) -> Result<(), Corrupt> {
        check_node(raw, &self.check_context(ExpectedBlock::default()).with_csum(false))
    }

    pub(crate) fn cache_stats(&self) -> CacheStats {
        self.cache.stats()
    }

    /// Caches a node that was read ahead. The caller keeps the node's tree from changing.
    pub(crate) fn keep(&self, node: Arc<Node>) {
        debug_assert!(!self.is_dirty(node.bytenr()), "I1: an old node at {} hides the new one", node.bytenr());
        self.cache.insert(node);
    }

    /// Whether this node can be read without a device.
    pub(crate) fn is_in_memory(&self, ptr: &NodePtr) -> bool {
        self.is_dirty(ptr.bytenr) || self.cache.contains(ptr.bytenr, ptr.generation)
    }

    fn read_from_devices(&self, ptr: &NodePtr) -> Result<Arc<Node>> {
        let mut raw = vec![0; self.nodesize];
        self.read_checked(std::slice::from_ref(ptr), &mut raw)?;
        checked_node(raw.into_boxed_slice(), ptr)
    }

    /// Reads a tree block into `buf`, which has the size of a node. Only the block's address is known.
    pub(crate) fn read_unknown(&self, bytenr: Logical, buf: &mut [u8]) -> Result<()> {
        let context = self.check_context(ExpectedBlock { bytenr: Some(bytenr), ..ExpectedBlock::default() });
        let verify = |_: usize, raw: &[u8]| check_node(raw, &context).map_err(|corrupt| corrupt.cause);
        self.volumes.read(bytenr, buf, self.nodesize, &verify)
    }

    /// Groups pointers to neighbouring nodes into runs of at most `most`, for [`Self::read_run`].
    pub(crate) fn runs_of(&self, ptrs: impl IntoIterator<Item = NodePtr>, most: usize) -> Vec<Vec<NodePtr>> {
        let nodesize = self.nodesize as u64;
        let mut runs: Vec<Vec<NodePtr>> = Vec::new();
        for ptr in ptrs {
            match runs.last_mut() {
                Some(run)
                    if run.len() < most
                        && run.last().is_some_and(|last| last.bytenr.checked_add(nodesize) == Some(ptr.bytenr)) =>
                {
                    run.push(ptr);
                }
                _ => runs.push(vec![ptr]),
            }
        }
        runs
    }

    /// Reads neighbouring nodes, in one request if possible. `buf` is scratch memory.
    pub(crate) fn read_run(&self, ptrs: &[NodePtr], buf: &mut AlignedBuf) -> Result<Vec<Arc<Node>>> {
        let len = self.nodesize.saturating_mul(ptrs.len());
        if buf.capacity() < len {
            *buf = AlignedBuf::with_capacity(len);
        }
        buf.resize(len);
        self.read_checked(ptrs, buf)?;
        buf.chunks_exact(self.nodesize).zip(ptrs).map(|(raw, ptr)| checked_node(raw.into(), ptr)).collect()
    }

    fn read_checked(&self, ptrs: &[NodePtr], buf: &mut [u8]) -> Result<()> {
        match self.read_with(ptrs, buf, true) {
            // R2 of rescue: a copy with the right checksum is preferred, of each block.
            Err(Error::Corrupt(_)) if !self.check.verify_csum && ptrs.len() > 1 => {
                let mut blocks = ptrs.chunks(1).zip(buf.chunks_exact_mut(self.nodesize));
                blocks.try_for_each(|(ptr, raw)| self.read_checked(ptr, raw))
            }
            Err(error @ Error::Corrupt(_)) if !self.check.verify_csum => {
                self.read_with(ptrs, buf, false)?;
                for ptr in ptrs {
                    tracing::warn!("tree block {} is used though it is damaged: {error}", ptr.bytenr);
                }
                Ok(())
            }
            read => read,
        }
    }

    fn read_with(&self, ptrs: &[NodePtr], buf: &mut [u8], verify_csum: bool) -> Result<()> {
        lock_rank::check_no_operation("I2 of lock_rank: an operation waits for no device");
        let Some(first) = ptrs.first() else { return Ok(()) };
        let context = |ptr: &NodePtr| {
            self.check_context(ExpectedBlock {
                bytenr: Some(ptr.bytenr),
                level: Some(ptr.level),
                tree: Some(ptr.tree),
                generation: Some(ptr.generation),
                first_key: ptr.first_key,
            })
            .with_csum(verify_csum)
        };
        let failure = std::cell::RefCell::new(None);
        let verify = |index: usize, raw: &[u8]| -> Result<(), FormatError> {
            check_node(raw, &context(&ptrs[index])).map_err(|corrupt| {
                let cause = corrupt.cause.clone();
                failure.replace(Some(corrupt));
                cause
            })
        };
        self.volumes.read(first.bytenr, buf, self.nodesize, &verify).map_err(|error| {
            let error = match failure.take() {
                Some(corrupt) if matches!(error, Error::Corrupt(_)) => corrupt.into(),
                _ => error,
            };
            error.at(first.bytenr).in_tree(first.tree)
        })
    }
}

impl NodeStore {
    fn find(&self, ptr: &NodePtr) -> Result<Option<Arc<Node>>> {
        let dirty = self.shard(ptr.bytenr).read().get(&ptr.bytenr).cloned();
        let found = dirty.or_else(|| self.cache.get(ptr.bytenr, ptr.generation));
        found.map(|node| node.verify(ptr).map(|()| node)).transpose()
    }
}

impl NodeSource for NodeStore {
    fn read_node(&self, ptr: &NodePtr) -> Result<Arc<Node>> {
        if let Some(node) = self.find(ptr)? {
            return Ok(node);
        }
        if ptr.level == 0
            && self.ahead.wait_for(self, ptr.bytenr)
            && let Some(node) = self.find(ptr)?
        {
            return Ok(node);
        }
        let node = self.read_from_devices(ptr)?;
        self.cache.insert(Arc::clone(&node));
        Ok(node)
    }

    fn nodesize(&self) -> usize {
        self.nodesize
    }
}

impl NodeSource for ScanSource<'_> {
    fn read_node(&self, ptr: &NodePtr) -> Result<Arc<Node>> {
        match self.0.find(ptr)? {
            Some(node) => Ok(node),
            None => self.0.read_from_devices(ptr),
        }
    }

    fn nodesize(&self) -> usize {
        self.0.nodesize
    }
}

/// Makes a node of these bytes. Fails if the node does not match the pointer.
fn checked_node(raw: Box<[u8]>, ptr: &NodePtr) -> Result<Arc<Node>> {
    let node = Node::new(raw)?;
    node.verify(ptr)?;
    Ok(Arc::new(node))
}

const NR_SHARDS: usize = 32;
