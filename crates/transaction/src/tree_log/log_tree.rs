//! [`LogTree`]: a tree of the log. The nodes of a log tree stay in memory; their addresses on the devices come from a
//! small set that is reused in turn ([`LogBlocks`]).
//!
//! ```text
//!  allocate --> in a batch --> written --> superblock durable --> in use --> replaced --> superblock durable --> idle --+
//!     ^                                                                                                            |
//!     +------------------------------------------------------------------------------------------------------------+
//! ```
//!
//! I1. An address is idle only while no superblock that may be on the devices leads to it.
//!
//! I2. On several devices no address is used twice before the next commit. Otherwise, a device that missed writes would
//! have an older log block at the address, with a valid checksum and the same generation, so nothing would show that
//! the block is old.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::node::{LeafBuilder, NodeHeader};
use ubtrfs_format::{Generation, Key, Logical, RootId};
use ubtrfs_space::{Extent, Space, SpaceKind};
use ubtrfs_tree::{Batch, Node, NodePtr, NodeSink, NodeSource, RootPtr};
use uuid::Uuid;

/// One tree of a log.
#[derive(Debug, Default)]
pub(crate) struct LogTree {
    root: Option<RootPtr>,
    nodes: HashMap<Logical, Arc<Node>>,
}

/// The addresses that the blocks of a log use.
#[derive(Debug, Default)]
pub(crate) struct LogBlocks {
    /// All space allocated for the log, released when the log ends.
    taken: Vec<Extent>,
    idle: BTreeSet<Logical>,
    /// Addresses that the log being written replaces. Replaced addresses become idle when the superblock of the new log
    /// is durable (I1).
    replaced: Vec<Logical>,
    /// The preferred address of the next block: a contiguous log is written fast.
    next: Option<Logical>,
    /// Number of blocks in the last write of the log.
    nr_last: usize,
}

/// The fields that all blocks of a log have in their headers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockIdentity {
    pub(crate) fsid: Uuid,
    pub(crate) chunk_tree_uuid: Uuid,
    pub(crate) generation: Generation,
    pub(crate) nodesize: u32,
}

impl LogBlocks {
    /// The space that was allocated for the log.
    pub(crate) fn taken_bytes(&self) -> u64 {
        self.taken.iter().fold(0, |sum, extent| sum.saturating_add(extent.len_bytes))
    }

    /// Keeps the space of a log on the devices from being reused.
    pub(crate) fn keep(&mut self, extent: Extent) {
        self.taken.push(extent);
    }

    /// Makes sure that `nr_blocks` addresses are idle. Returns false if there is no room.
    pub(crate) fn prepare(&mut self, space: &Space, nodesize: u32, nr_blocks: usize) -> bool {
        let nodesize = u64::from(nodesize);
        while self.idle.len() < nr_blocks {
            let Some(extent) = space.allocate(SpaceKind::Metadata, nodesize * RUN_BLOCKS, nodesize, None) else {
                return false;
            };
            self.taken.push(extent);
            self.idle.extend((extent.bytenr.0..extent.end()).step_by(nodesize as usize).map(Logical));
        }
        true
    }

    /// Chooses the place of the next log: consecutive idle addresses for one block more than the last log had. Allocates
    /// them if there is room.
    #[allow(clippy::arithmetic_side_effects, reason = "addresses and lengths of allocated blocks")]
    pub(crate) fn begin(&mut self, space: &Space, nodesize: u32, has_room: impl Fn(u64) -> bool) {
        let (nodesize, wanted) = (u64::from(nodesize), self.nr_last + 1);
        let mut run: Vec<Logical> = Vec::new();
        for &bytenr in &self.idle {
            if run.last().is_none_or(|last| last.0 + nodesize != bytenr.0) {
                run.clear();
            }
            run.push(bytenr);
            if run.len() >= wanted {
                self.next = run.first().copied();
                return;
            }
        }
        // No run of idle addresses is long enough, because blocks that stay in use lie between them. Allocate new
        // space, unless more than about half of the log's space is idle.
        let len_bytes = nodesize * (wanted as u64).next_multiple_of(RUN_BLOCKS);
        let taken = self.taken_bytes();
        let is_worth_it = self.idle.len() as u64 * nodesize <= taken / 2 + len_bytes;
        self.next = None;
        if is_worth_it
            && has_room(len_bytes)
            && let Some(extent) = space.allocate(SpaceKind::Metadata, len_bytes, len_bytes, None)
        {
            self.taken.push(extent);
            self.idle.extend((extent.bytenr.0..extent.end()).step_by(nodesize as usize).map(Logical));
            self.next = Some(extent.bytenr);
        }
    }

    fn take(&mut self, nodesize: u32) -> Option<Logical> {
        let bytenr = self.next.filter(|next| self.idle.contains(next)).or_else(|| self.idle.first().copied())?;
        self.idle.remove(&bytenr);
        debug_assert!(!self.replaced.contains(&bytenr), "I1: the log on the devices may lead to {bytenr}");
        self.next = bytenr.checked_add(nodesize.into());
        Some(bytenr)
    }

    /// Bytes that [`LogBlocks::prepare`] would allocate.
    pub(crate) fn missing_bytes(&self, nodesize: u32, nr_blocks: usize) -> u64 {
        let missing = nr_blocks.saturating_sub(self.idle.len()) as u64;
        missing.checked_next_multiple_of(RUN_BLOCKS).unwrap_or(u64::MAX).saturating_mul(nodesize.into())
    }

    /// Notes that the superblock of a log with `nr_written` new blocks is durable. On several devices, the replaced
    /// addresses stay in use (I2).
    pub(crate) fn superblock_is_durable(&mut self, nr_written: usize, has_several_devices: bool) {
        self.nr_last = nr_written;
        let replaced = std::mem::take(&mut self.replaced);
        for bytenr in replaced.into_iter().filter(|_| !has_several_devices) {
            let is_new = self.idle.insert(bytenr);
            assert!(is_new, "I1: {bytenr} was idle although a log used it");
        }
    }

    /// Releases all space, because no log is on the devices any more.
    pub(crate) fn release(self, space: &Space) {
        self.taken.into_iter().for_each(|extent| space.release(extent));
    }
}

impl LogTree {
    /// The root of the tree; `None` while the tree is empty.
    pub(crate) fn root(&self) -> Option<RootPtr> {
        self.root
    }

    pub(crate) fn nr_nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Applies a batch. Returns the nodes to write.
    pub(crate) fn apply(
        &mut self,
        batch: &Batch,
        blocks: &mut LogBlocks,
        identity: BlockIdentity,
    ) -> Result<Vec<Arc<Node>>> {
        let mut sink =
            LogSink { blocks, identity, allocated: HashSet::new(), emitted: HashMap::new(), left: Vec::new() };
        let root = match self.root {
            Some(root) => root,
            None => {
                // The tree begins as an empty leaf, which is never written.
                let bytenr = sink.allocate(0, None)?;
                sink.allocated.remove(&bytenr);
                let raw = LeafBuilder::new(identity.nodesize as usize).finish(&sink.header(bytenr, 0));
                self.nodes.insert(bytenr, Arc::new(Node::new(raw.into_boxed_slice())?));
                RootPtr { tree: RootId::TREE_LOG, bytenr, generation: identity.generation, level: 0 }
            }
        };
        let source = LogNodes { nodes: &self.nodes, nodesize: identity.nodesize as usize };
        let (root, _) = ubtrfs_tree::apply(&source, &mut sink, &root, batch)?;
        let LogSink { blocks, allocated, emitted, left, .. } = sink;
        debug_assert!(
            emitted.keys().all(|bytenr| !self.nodes.contains_key(bytenr)),
            "I1: a block of the log is written over another one"
        );
        blocks.idle.extend(allocated);
        if self.root.is_none() && emitted.is_empty() {
            // The batch only deleted items that do not exist.
            blocks.idle.extend(self.nodes.drain().map(|(bytenr, _)| bytenr));
            return Ok(Vec::new());
        }
        for bytenr in left {
            self.nodes.remove(&bytenr);
            blocks.replaced.push(bytenr);
        }
        let mut written: Vec<_> = emitted.values().cloned().collect();
        written.sort_unstable_by_key(|node| node.bytenr());
        self.nodes.extend(emitted);
        self.root = Some(root);
        Ok(written)
    }
}

struct LogNodes<'a> {
    nodes: &'a HashMap<Logical, Arc<Node>>,
    nodesize: usize,
}

impl NodeSource for LogNodes<'_> {
    fn read_node(&self, ptr: &NodePtr) -> Result<Arc<Node>> {
        let missing = || Error::Bug { what: format!("block {} of the tree log is not in memory", ptr.bytenr) };
        self.nodes.get(&ptr.bytenr).cloned().ok_or_else(missing)
    }

    fn nodesize(&self) -> usize {
        self.nodesize
    }
}

struct LogSink<'a> {
    blocks: &'a mut LogBlocks,
    identity: BlockIdentity,
    allocated: HashSet<Logical>,
    emitted: HashMap<Logical, Arc<Node>>,
    left: Vec<Logical>,
}

impl NodeSink for LogSink<'_> {
    /// Always false: every node of the tree may be on the devices, so no node keeps its address.
    fn is_fresh(&self, _node: &Node) -> bool {
        false
    }

    fn header(&self, bytenr: Logical, level: u8) -> NodeHeader {
        let BlockIdentity { fsid, chunk_tree_uuid, generation, .. } = self.identity;
        NodeHeader { fsid, chunk_tree_uuid, bytenr, generation, owner: RootId::TREE_LOG, level, flags: 0 }
    }

    fn allocate(&mut self, _level: u8, _near: Option<Logical>) -> Result<Logical> {
        let bytenr = self.blocks.take(self.identity.nodesize).ok_or(Error::NoSpace)?;
        self.allocated.insert(bytenr);
        Ok(bytenr)
    }

    fn free_fresh(&mut self, node: &Arc<Node>) -> Result<()> {
        self.emitted.remove(&node.bytenr());
        self.left.push(node.bytenr());
        Ok(())
    }

    fn leave(&mut self, node: &Arc<Node>) -> Result<()> {
        self.left.push(node.bytenr());
        Ok(())
    }

    fn item_changed(&mut self, _key: &Key, _old: Option<&[u8]>, _new: Option<&[u8]>) -> Result<()> {
        Ok(())
    }

    fn emit(&mut self, node: Arc<Node>) {
        self.allocated.remove(&node.bytenr());
        self.emitted.insert(node.bytenr(), node);
    }
}

/// Space is allocated in multiples of this number of blocks, so that the blocks of one write are often neighbours.
const RUN_BLOCKS: u64 = 8;
