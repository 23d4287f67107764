//! Quotas in the commit sequence: accounting around snapshots, and the quota tree.
//!
//! ```text
//! snapshot:  run delayed refs -> account -> copy the root -> run its refs -> compute the numbers -> [rebase] -> name
//! rounds:    run delayed refs -> account -> a part of a rescan -> items of the quota tree
//! ```

use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::QgroupStatus;
use ubtrfs_format::{Generation, Key, KeyType, RootId};
use ubtrfs_space::RefKey;
use ubtrfs_tree::{NodePtr, NodeSource, RootPtr};

use crate::commit_state::CommitWork;
use crate::cow::child_refs::{ChildRefs, UserChange};
use crate::delayed::tree_view::{RootState, Tree};
use crate::engine::Engine;
use crate::handle::root_change::{NewContent, NewSubvolume, RootChange};
use crate::qgroup::groups::QgroupId;
use crate::qgroup::items;
use crate::qgroup::state::QuotaMode;
use crate::roots::root_item::blank_root_item;

impl Engine {
    /// Makes the requested changes of subvolumes. The caller holds the commit lock and has applied the frozen items.
    pub(crate) fn change_roots(
        &self,
        changes: Vec<RootChange>,
        work: &mut CommitWork,
        transid: Generation,
    ) -> Result<()> {
        for change in changes {
            match change {
                RootChange::Make(new) if self.quotas.is_on() => self.make_counted(*new, work, transid)?,
                other => self.change_root(other, &mut work.refs, transid)?,
            }
        }
        Ok(())
    }

    /// Makes a subvolume and its quota group.
    fn make_counted(&self, new: NewSubvolume, work: &mut CommitWork, transid: Generation) -> Result<()> {
        let source = match &new.content {
            NewContent::SnapshotOf { source, .. } if self.quotas.mode() == QuotaMode::Full => Some(*source),
            _ => None,
        };
        if source.is_some() {
            // Run the delayed refs before the copy, so that earlier changes are counted without the snapshot as a user.
            self.run_delayed_refs(work, transid)?;
            self.account_quotas(&mut work.quota, transid);
        }
        let made = self.make_tree(&new, &mut work.refs, transid)?;
        let parents: Vec<QgroupId> = new.qgroups.iter().map(|id| QgroupId(*id)).collect();
        if let Some(source) = source {
            self.run_delayed_refs(work, transid)?;
            let source = self.own_tree(source)?.root_ptr();
            self.share_numbers(&source, &made.root, &parents, transid);
            self.rebase_quotas(&mut work.quota)?;
        } else {
            self.add_group(new.id, new.parent, &parents, new.limit.as_ref());
        }
        self.name_tree(new, &made, &mut work.refs, transid)
    }

    /// Accounts the changes of the delayed refs, performs a part of a running rescan if `is_first` is set, and puts the
    /// changed items into the quota tree. Returns whether the quota tree changed.
    pub(crate) fn update_quotas(&self, work: &mut CommitWork, transid: Generation, is_first: bool) -> Result<bool> {
        if !self.quotas.is_on() {
            return Ok(false);
        }
        self.account_quotas(&mut work.quota, transid);
        if is_first {
            self.rescan_quotas(transid);
        }
        let batch = {
            let mut state = self.quotas.lock();
            let Some(state) = state.as_mut().filter(|state| is_first || state.groups.has_changes()) else {
                return Ok(false);
            };
            state.status.generation = transid;
            items::changes(&mut state.groups, &state.status)
        };
        self.apply_batch(&*self.own_tree(RootId::QUOTA_TREE)?, &batch, &mut work.refs, transid)?;
        Ok(true)
    }

    /// Makes the quota tree after quotas were enabled, and removes it after they were disabled. Marks the numbers of a
    /// quota tree that is not in use as inconsistent.
    pub(crate) fn change_quota_tree(&self, work: &mut CommitWork, transid: Generation) -> Result<()> {
        let tree = self.tree(RootId::QUOTA_TREE)?;
        match (self.quotas.is_on(), tree) {
            (true, None) => {
                let root = self.make_root_leaf(RootId::QUOTA_TREE, &[], &mut work.refs, transid)?;
                let mut item = blank_root_item(&root, self.geometry.nodesize);
                (item.refs, item.bytes_used) = (1, self.geometry.nodesize.into());
                let state = RootState::new(0, item);
                self.trees.keep(Arc::new(Tree::new(root, Arc::clone(&self.store), state)));
                self.trees.note_changed(RootId::QUOTA_TREE);
                Ok(())
            }
            (false, Some(tree)) if self.quotas.take_removal() => self.remove_quota_tree(&tree, work, transid),
            (false, Some(tree)) => self.flag_unknown_quotas(&tree, work, transid),
            _ => Ok(()),
        }
    }

    /// Frees the quota tree. All nodes of the quota tree must be from earlier commits.
    fn remove_quota_tree(&self, tree: &Tree, work: &mut CommitWork, transid: Generation) -> Result<()> {
        let root: RootPtr = tree.root_ptr();
        let key_offset = tree.root.lock().key_offset;
        let refs = ChildRefs { owner: root.tree, nodesize: self.geometry.nodesize, transid, quotas: QuotaMode::Off };
        let mut open: Vec<NodePtr> = vec![root.node_ptr()];
        while let Some(ptr) = open.pop() {
            let node = self.store.read_node(&ptr)?;
            if node.generation() == transid {
                return Err(Error::Bug {
                    what: "the quota tree changed in the transaction that removes it".to_owned(),
                });
            }
            if !node.is_leaf() {
                open.extend((0..node.nritems()).map(|slot| node.child_ptr(slot, root.tree)));
            }
            refs.add_node(&mut work.refs, &node, RefKey::TreeBlock(root.tree), -1, UserChange::Same);
            self.store.retire(ptr.bytenr);
        }
        self.trees.forget(root.tree);
        let gone = vec![(Key::new(root.tree.0, KeyType::ROOT_ITEM, key_offset), None)];
        self.apply_batch(&*self.own_tree(RootId::ROOT_TREE)?, &gone, &mut work.refs, transid)?;
        Ok(())
    }

    /// Marks the numbers of a quota tree that is not in use as inconsistent, because changes are not accounted in it.
    /// The numbers of simple quotas are not marked.
    fn flag_unknown_quotas(&self, tree: &Tree, work: &mut CommitWork, transid: Generation) -> Result<()> {
        let key = Key::new(0, KeyType::QGROUP_STATUS, 0);
        // Unreadable quotas do not prevent changes of the filesystem.
        let Ok(Some(item)) = tree.get(&key) else { return Ok(()) };
        let Ok(mut status) = QgroupStatus::decode(&item) else { return Ok(()) };
        if status.flags & (QgroupStatus::INCONSISTENT | QgroupStatus::SIMPLE_MODE) != 0 {
            return Ok(());
        }
        status.flags |= QgroupStatus::INCONSISTENT;
        let mut bytes = status.encode();
        bytes.extend_from_slice(item.get(QgroupStatus::SIZE..).unwrap_or_default());
        self.apply_batch(tree, &vec![(key, Some(bytes.into()))], &mut work.refs, transid)?;
        Ok(())
    }
}
