//! [`ChildRefs`]: the references that a tree block holds to its children.
//!
//! Each pointer in a block is one reference to the child. The reference is recorded under the id of the block's owner
//! or, if the block has full backrefs, under the block's address.

use ubtrfs_format::{Generation, Ino, Key, KeyType, Logical, RootId};
use ubtrfs_space::{DelayedRefs, Extent, ExtentKind, OwnerMark, RefKey};
use ubtrfs_tree::{Node, NodePtr};

use crate::handle::trans_handle::regular_extent;
use crate::qgroup::state::QuotaMode;

/// Adds and drops references for a tree in a transaction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChildRefs {
    /// The tree whose id the references carry.
    pub(crate) owner: RootId,
    /// Size of a tree block in bytes.
    pub(crate) nodesize: u32,
    /// The transaction that changes the references.
    pub(crate) transid: Generation,
    /// Whether quotas are enabled, and how they count space.
    pub(crate) quotas: QuotaMode,
}

/// Whether a change of references changes the users of the extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UserChange {
    /// References are handed over: the set of subvolumes that reach the extent stays the same.
    Same,
    /// The tree starts or stops using the extent.
    Change,
    /// The tree stops using the extent, which no other tree could reach.
    Private,
}

impl ChildRefs {
    /// The extent of a block.
    pub(crate) fn extent_at(&self, bytenr: Logical) -> Extent {
        Extent::new(bytenr, u64::from(self.nodesize))
    }

    fn mark(&self, users: UserChange) -> OwnerMark {
        match users {
            _ if self.quotas != QuotaMode::Full || !self.owner.is_subvolume() => OwnerMark::Same,
            UserChange::Same => OwnerMark::Same,
            UserChange::Change => OwnerMark::Changed,
            UserChange::Private => OwnerMark::WasPrivate,
        }
    }

    /// Adds `delta` to the count of the reference `reference` to a block.
    pub(crate) fn add_node(
        &self,
        refs: &mut DelayedRefs,
        node: &Node,
        reference: RefKey,
        delta: i64,
        users: UserChange,
    ) {
        let extent = self.extent_at(node.bytenr());
        refs.add_marked(extent, kind_of(node), (reference, delta), self.transid, self.mark(users));
        self.note_allocated_by(refs, node);
    }

    /// Notes the tree that allocated a block, for simple quotas.
    pub(crate) fn note_allocated_by(&self, refs: &mut DelayedRefs, node: &Node) {
        if self.quotas == QuotaMode::Simple {
            refs.note_allocated_by(node.bytenr(), node.owner());
        }
    }

    /// Adds `delta` to the block's reference to each of its children: under the address `parent` if the block has full
    /// backrefs, else under the owner's id.
    pub(crate) fn add_children(
        &self,
        refs: &mut DelayedRefs,
        node: &Node,
        parent: Option<Logical>,
        delta: i64,
        users: UserChange,
    ) {
        for slot in 0..node.nritems() {
            if node.is_leaf() {
                let key = node.key(slot);
                if key.item_type == KeyType::EXTENT_DATA {
                    self.add_data(refs, &key, node.item(slot), (parent, delta), users);
                }
            } else {
                self.add_child(refs, node, slot, (parent, delta), users);
            }
        }
    }

    /// Adds `delta` to the count of a reference to one child of an internal node.
    pub(crate) fn add_child(
        &self,
        refs: &mut DelayedRefs,
        node: &Node,
        slot: usize,
        (parent, delta): (Option<Logical>, i64),
        users: UserChange,
    ) {
        let NodePtr { bytenr: child, level, first_key, .. } = node.child_ptr(slot, self.owner);
        let reference = parent.map_or(RefKey::TreeBlock(self.owner), RefKey::SharedBlock);
        let kind = ExtentKind::Tree { level, first_key: first_key.unwrap_or_default() };
        refs.add_marked(self.extent_at(child), kind, (reference, delta), self.transid, self.mark(users));
    }

    /// Adds `delta` to the count of a reference to the extent of one file extent item.
    pub(crate) fn add_data(
        &self,
        refs: &mut DelayedRefs,
        key: &Key,
        item: &[u8],
        (parent, delta): (Option<Logical>, i64),
        users: UserChange,
    ) {
        let Some(extent) = regular_extent(item) else { return };
        let keyed =
            RefKey::Data { root: self.owner, ino: Ino(key.objectid), offset: key.offset.wrapping_sub(extent.offset) };
        let reference = parent.map_or(keyed, RefKey::SharedData);
        let on_disk = Extent::new(extent.disk_bytenr, extent.disk_num_bytes);
        refs.add_marked(on_disk, ExtentKind::Data, (reference, delta), self.transid, self.mark(users));
    }
}

/// The kind of a block's extent: the properties that the extent tree records besides the block's address.
pub(crate) fn kind_of(node: &Node) -> ExtentKind {
    ExtentKind::Tree { level: node.level(), first_key: node.first_key().unwrap_or_default() }
}
