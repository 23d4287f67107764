//! Checks the root tree: the root of each tree, and the names of subvolumes.
//!
//! Invariants:
//! - I1. About 150 bytes are kept for each subvolume.

use std::collections::{BTreeMap, BTreeSet};

use ubtrfs_format::item::{DirItem, RootItem, RootRef};
use ubtrfs_format::{Generation, Key, KeyType, RootId, objectid};
use uuid::Uuid;

use crate::checker::Checker;
use crate::problem::{Code, Place};
use crate::walk::{Leaf, TreeKind, TreeRoot, WalkEvent};

/// A tree that the root tree lists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListedTree {
    pub(crate) root: TreeRoot,
    pub(crate) refs: u32,
    /// The generation of the last snapshot. Blocks with a higher generation were never shared.
    pub(crate) last_snapshot: Generation,
    pub(crate) uuid: Uuid,
    pub(crate) received_uuid: Uuid,
    pub(crate) place: Place,
}

/// The records of a subvolume's name in its parent subvolume.
#[derive(Clone, Debug, Default)]
struct SubvolumeLink {
    /// Directory, index and name in the ROOT_REF.
    forward: Option<(u64, u64, Vec<u8>)>,
    /// Directory, index and name in the ROOT_BACKREF.
    backward: Option<(u64, u64, Vec<u8>)>,
    /// Whether a directory entry for the subvolume was found.
    found: bool,
    place: Place,
}

/// The content of the root tree.
#[derive(Debug, Default)]
pub(crate) struct RootTree {
    pub(crate) trees: BTreeMap<u64, ListedTree>,
    /// Roots of the relocation trees.
    reloc: Vec<TreeRoot>,
    /// Links by parent and child.
    links: BTreeMap<(u64, u64), SubvolumeLink>,
    orphans: BTreeSet<u64>,
    /// Subvolumes that entries of the root tree's directory name as the default. Only a crafted image has several.
    defaults: Vec<(u64, Place)>,
    /// Subvolumes whose directories were read completely.
    read: BTreeSet<u64>,
}

impl RootTree {
    /// The root of a tree.
    pub(crate) fn tree(&self, id: RootId) -> Option<TreeRoot> {
        self.trees.get(&id.0).map(|root| root.root)
    }
}

impl<'a> Checker<'a> {
    /// Reads the root tree. Returns `false` if no part of the root tree can be read.
    pub(crate) fn root_tree(&mut self) -> bool {
        let root = self.super_root(RootId::ROOT_TREE);
        let mut seen = false;
        let complete = self.walk_tree(root, &mut |checker, event| {
            let WalkEvent::Leaf(leaf) = event else { return };
            seen = true;
            checker.root_leaf(leaf);
        });
        if complete && !self.roots.trees.contains_key(&RootId::FS_TREE.0) {
            let text = "the root tree has no root item of the top level";
            self.sink.report(Code::TreeMissing, Place::tree(RootId::FS_TREE), text);
        }
        seen
    }

    fn root_leaf(&mut self, leaf: &Leaf<'_>) {
        for (slot, key, data) in leaf.items() {
            let place = leaf.place(slot);
            match key.item_type {
                KeyType::ROOT_ITEM => self.root_item(key, data, place),
                KeyType::ROOT_REF | KeyType::ROOT_BACKREF => self.root_ref(key, data, place),
                KeyType::DIR_ITEM if key.objectid == RootId::ROOT_TREE_DIR.0 => self.default_subvolume(data, place),
                KeyType::ORPHAN_ITEM if key.objectid == objectid::ORPHAN => {
                    self.roots.orphans.insert(key.offset);
                }
                _ => {}
            }
        }
    }

    /// Records the subvolume that an entry of the root tree's directory names as the default.
    fn default_subvolume(&mut self, data: &[u8], place: Place) {
        for entry in DirItem::decode_all(data).unwrap_or_default() {
            self.roots.defaults.push((entry.location.objectid, place));
        }
    }

    fn root_item(&mut self, key: Key, data: &[u8], place: Place) {
        let Ok(item) = RootItem::decode_any(data) else { return };
        let id = RootId(key.objectid);
        let kind = match id {
            RootId::TREE_RELOC => TreeKind::Reloc,
            _ if id.is_fs_tree() => TreeKind::Files,
            _ => TreeKind::Plain,
        };
        let dropping = item.refs == 0 && item.drop_progress != Key::MIN;
        let root = TreeRoot {
            id,
            kind,
            bytenr: item.bytenr.0,
            level: item.level,
            generation: Some(item.generation),
            drop: dropping.then_some((item.drop_progress, item.drop_level)),
        };
        if item.generation > self.sb.generation {
            let text = format!("tree {id} has generation {}, the superblock {}", item.generation, self.sb.generation);
            self.sink.report(Code::RootItem, place, text);
        }
        if id == RootId::TREE_RELOC {
            // All relocation trees have this id, so they are kept in a list. After a relocation tree is merged, its
            // root item with 0 references stays until the tree is dropped.
            return self.roots.reloc.push(root);
        }
        let is_known = id.is_fs_tree() || (1..=12).contains(&id.0);
        if !is_known {
            self.sink.report(Code::RootItem, place, format!("root item of tree {id}, which is unknown"));
        }
        if item.drop_level > 0 && !dropping && item.refs != 0 {
            self.sink.report(Code::RootItem, place, format!("tree {id} has a drop level, but is not being deleted"));
        }
        if id.is_fs_tree() && item.root_dirid != objectid::FIRST_FREE {
            let text = format!("the root directory of tree {id} is {}, expected 256", item.root_dirid);
            self.sink.report(Code::RootItem, place, text);
        }
        let last_snapshot = item.last_snapshot;
        let entry = ListedTree {
            root,
            refs: item.refs,
            last_snapshot,
            uuid: item.uuid,
            received_uuid: item.received_uuid,
            place,
        };
        if self.roots.trees.insert(id.0, entry).is_some() {
            self.sink.report(Code::RootItem, place, format!("tree {id} has two root items"));
        }
    }

    fn root_ref(&mut self, key: Key, data: &[u8], place: Place) {
        let Ok(item) = RootRef::decode(data) else { return };
        let is_forward = key.item_type == KeyType::ROOT_REF;
        let (parent, child) = if is_forward { (key.objectid, key.offset) } else { (key.offset, key.objectid) };
        let link = self.roots.links.entry((parent, child)).or_default();
        link.place = place;
        let value = Some((item.dirid, item.sequence, item.name));
        if is_forward {
            link.forward = value;
        } else {
            link.backward = value;
        }
    }

    /// Checks a directory entry that names a subvolume. A snapshot keeps the entries of subvolumes that are nested in
    /// its source, but these entries have no ROOT_REF and are not checked.
    pub(crate) fn subvolume_entry(
        &mut self,
        tree: RootId,
        child: u64,
        dir: u64,
        index: u64,
        name: &[u8],
        place: Place,
    ) {
        let Some(link) = self.roots.links.get_mut(&(tree.0, child)) else { return };
        let matches = |side: &Option<(u64, u64, Vec<u8>)>| {
            side.as_ref().is_none_or(|(d, i, n)| (*d, *i, n.as_slice()) == (dir, index, name))
        };
        let fits = matches(&link.forward) && matches(&link.backward);
        let twice = std::mem::replace(&mut link.found, true);
        if !fits || twice {
            let name = name.escape_ascii();
            let text =
                format!("the entry '{name}' {index} in directory {dir} contradicts the ROOT_REF of subvolume {child}");
            self.sink.report(Code::RootRef, place, text);
        }
    }

    /// Records that the directories of a subvolume were read completely.
    pub(crate) fn subvolume_was_read(&mut self, tree: RootId) {
        self.roots.read.insert(tree.0);
    }

    /// Checks that every subvolume has a ROOT_REF, a ROOT_BACKREF and a directory entry, or is being deleted. Also
    /// checks that the default subvolume and the subvolumes of orphan items exist.
    pub(crate) fn compare_roots(&mut self) {
        let links = std::mem::take(&mut self.roots.links);
        let mut named = BTreeSet::new();
        for ((parent, child), link) in &links {
            let what = format!("subvolume {child} in subvolume {parent}");
            let mut tell = |text: String| self.sink.report(Code::RootRef, link.place, text);
            match (&link.forward, &link.backward) {
                (Some(forward), Some(backward)) if forward != backward => {
                    tell(format!("{what}: ROOT_REF and ROOT_BACKREF differ"));
                }
                (None, _) => tell(format!("{what}: no ROOT_REF")),
                (_, None) => tell(format!("{what}: no ROOT_BACKREF")),
                _ => {}
            }
            if !self.roots.trees.contains_key(parent) || !self.roots.trees.contains_key(child) {
                tell(format!("{what}: one of them does not exist"));
            } else if !link.found && self.roots.read.contains(parent) {
                tell(format!("{what}: no directory entry"));
            }
            if !named.insert(*child) {
                tell(format!("{what}: it has a second name"));
            }
        }
        let trees: Vec<(u64, ListedTree)> = self.roots.trees.iter().map(|(id, root)| (*id, *root)).collect();
        for (id, root) in trees {
            let is_subvolume = RootId(id).is_subvolume() && id != RootId::FS_TREE.0;
            let is_orphan = self.roots.orphans.contains(&id);
            if root.refs == 0 && RootId(id).is_subvolume() && !is_orphan {
                let text = format!("subvolume {id} has no references and no orphan item");
                self.sink.report(Code::RootItem, root.place, text);
            } else if root.refs > 0 && is_subvolume && !named.contains(&id) {
                self.sink.report(Code::RootRef, root.place, format!("subvolume {id} has no name"));
            }
        }
        for (id, place) in std::mem::take(&mut self.roots.defaults) {
            if !self.roots.trees.contains_key(&id) {
                let text = format!("the default subvolume is {id}, which does not exist");
                self.sink.report(Code::RootRef, place, text);
            }
        }
        for orphan in std::mem::take(&mut self.roots.orphans) {
            if !self.roots.trees.contains_key(&orphan) {
                let text = format!("orphan item of subvolume {orphan}, which does not exist");
                self.sink.report(Code::OrphanStale, Place::tree(RootId::ROOT_TREE), text);
            }
        }
    }

    /// Walks the trees that no other part of the check walks: stripe tree, relocation trees, unknown trees.
    pub(crate) fn other_trees(&mut self) {
        let walked: BTreeSet<u64> = self.walked.iter().map(|root| root.id.0).collect();
        let others: Vec<TreeRoot> = self.roots.trees.values().map(|root| root.root).collect();
        for root in others {
            if root.kind == TreeKind::Plain && !walked.contains(&root.id.0) {
                self.walk_tree(root, &mut |_, _| {});
            }
        }
        for root in std::mem::take(&mut self.roots.reloc) {
            self.walk_tree(root, &mut |_, _| {});
        }
    }

    /// Checks the subvolumes: first those in use, then those that are being deleted.
    pub(crate) fn subvolumes(&mut self) {
        let mut roots: Vec<ListedTree> = self.roots.trees.values().copied().collect();
        roots.retain(|root| root.root.kind == TreeKind::Files);
        roots.sort_by_key(|root| root.refs == 0);
        self.segments.enabled = roots.len() > 2 && !self.quota.is_active();
        for root in roots {
            if root.refs == 0 {
                self.quota.begin(None);
                self.walk_tree(root.root, &mut |_, _| {});
            } else {
                self.quota.begin(Some(root.root.id));
                self.inodes(root.root);
            }
        }
        self.quota.begin(None);
        self.segments.enabled = false;
    }

    /// The superblock's generation, which is the highest that a block outside of the log can have.
    pub(crate) fn newest(&self) -> Generation {
        self.sb.generation
    }
}
