//! What a tree needs from the floor above: a place to read nodes from, and one to put new nodes into.

use std::sync::Arc;

use ubtrfs_error::Result;
use ubtrfs_format::node::NodeHeader;
use ubtrfs_format::{Key, Logical};

use crate::node::{Node, NodePtr};

/// Where nodes are read from: a cache over checked blocks of a device, or a map in a test.
pub trait NodeSource: Send + Sync {
    /// Reads a node. The answer was checked as untrusted content and is what the pointer promises: address,
    /// generation, level and first key ([`Node::verify`]).
    fn read_node(&self, ptr: &NodePtr) -> Result<Arc<Node>>;

    /// These nodes, in the order of their keys, are going to be read soon: a hint.
    fn will_read(&self, ptrs: &[NodePtr]) {
        let _ = ptrs;
    }

    /// Bytes of every node.
    fn nodesize(&self) -> usize;
}

/// Where [`crate::apply`] puts what it makes, and whom it tells what it no longer uses.
///
/// After an error of `apply` the calls up to there stand: the caller gives the transaction up.
pub trait NodeSink {
    /// Whether a node was made in the running transaction for this tree and is not written yet: it keeps its address
    /// when it changes.
    fn is_fresh(&self, node: &Node) -> bool;

    /// The header of a new node at this address.
    fn header(&self, bytenr: Logical, level: u8) -> NodeHeader;

    /// A new address for a node of this level, close to another one if it can be.
    fn allocate(&mut self, level: u8, near: Option<Logical>) -> Result<Logical>;

    /// A fresh node is no longer used: its address may be given out again.
    fn free_fresh(&mut self, node: &Arc<Node>) -> Result<()>;

    /// This tree stops using a node that is not fresh. Called once for a node, for a parent before its children, with
    /// the original content.
    fn leave(&mut self, node: &Arc<Node>) -> Result<()>;

    /// An item that the batch inserts (`old` is none), replaces or deletes (`new` is none); after `leave` of its leaf,
    /// in key order.
    fn item_changed(&mut self, key: &Key, old: Option<&[u8]>, new: Option<&[u8]>) -> Result<()>;

    /// The new content of a fresh address, which may have had other content before.
    fn emit(&mut self, node: Arc<Node>);
}

/// Reads a node and checks that it is what the pointer promises, whatever the source checked: levels descend strictly,
/// so a walk ends.
pub(crate) fn read(source: &dyn NodeSource, ptr: &NodePtr) -> Result<Arc<Node>> {
    let node = source.read_node(ptr)?;
    node.verify(ptr)?;
    Ok(node)
}
