//! Traits that the caller of a tree implements: a source of nodes, and a sink for new nodes.

use std::sync::Arc;

use ubtrfs_error::Result;
use ubtrfs_format::node::NodeHeader;
use ubtrfs_format::{Key, Logical};

use crate::node::{Node, NodePtr};

/// A source of nodes: a cache over checked blocks of a device, or a map in a test.
pub trait NodeSource: Send + Sync {
    /// Reads a node. The implementation checks the node's content, which is untrusted, and compares the node with the
    /// pointer's promise: address, generation, level and first key ([`Node::verify`]).
    fn read_node(&self, ptr: &NodePtr) -> Result<Arc<Node>>;

    /// Hints that these nodes will be read soon, in this order.
    fn will_read(&self, ptrs: &[NodePtr]) {
        let _ = ptrs;
    }

    /// Size of each node in bytes.
    fn nodesize(&self) -> usize;
}

/// Receives the new nodes of [`crate::apply`], and learns which nodes the tree no longer uses.
///
/// `apply` does not undo its calls after an error. After an error of `apply`, the caller must abort the transaction.
pub trait NodeSink {
    /// Whether a node is fresh: made by the running transaction for this tree, and not written yet. A fresh node keeps
    /// its address when it changes.
    fn is_fresh(&self, node: &Node) -> bool;

    /// Makes the header of a new node at this address.
    fn header(&self, bytenr: Logical, level: u8) -> NodeHeader;

    /// Allocates an address for a node of this level, near another address if possible.
    fn allocate(&mut self, level: u8, near: Option<Logical>) -> Result<Logical>;

    /// Frees the address of a fresh node that the tree no longer uses.
    fn free_fresh(&mut self, node: &Arc<Node>) -> Result<()>;

    /// Notes that this tree stops using a node that is not fresh. `leave` is called once per node, with the node's
    /// original content, and for a parent before its children.
    fn leave(&mut self, node: &Arc<Node>) -> Result<()>;

    /// Notes that the batch inserts (`old` is `None`), replaces or deletes (`new` is `None`) an item. Called in key
    /// order. If `leave` is called for the item's leaf, that call comes first.
    fn item_changed(&mut self, key: &Key, old: Option<&[u8]>, new: Option<&[u8]>) -> Result<()>;

    /// Takes a new node at a fresh address. The address may have held another fresh node before.
    fn emit(&mut self, node: Arc<Node>);
}

/// Reads a node and checks that it is what the pointer promises, even if the source did not check it. Levels descend
/// strictly, so every walk ends.
pub(crate) fn read(source: &dyn NodeSource, ptr: &NodePtr) -> Result<Arc<Node>> {
    let node = source.read_node(ptr)?;
    node.verify(ptr)?;
    Ok(node)
}
