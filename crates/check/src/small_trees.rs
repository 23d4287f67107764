//! Checks the UUID tree.

use std::collections::BTreeSet;

use ubtrfs_format::{KeyType, RootId};
use uuid::Uuid;

use crate::checker::Checker;
use crate::problem::{Code, Place};
use crate::raw::u64_at;
use crate::walk::WalkEvent;

impl<'a> Checker<'a> {
    /// Compares the UUID tree with the subvolumes. Linux rebuilds an outdated UUID tree, so differences are warnings,
    /// not damage.
    pub(crate) fn uuid_tree(&mut self) {
        let Some(root) = self.tree_root(RootId::UUID_TREE) else { return };
        let mut listed: BTreeSet<(KeyType, Uuid, u64)> = BTreeSet::new();
        let mut places = Vec::new();
        let complete = self.walk_tree(root, &mut |_, event| {
            let WalkEvent::Leaf(leaf) = event else { return };
            for (slot, key, data) in leaf.items() {
                if !matches!(key.item_type, KeyType::UUID_KEY_SUBVOL | KeyType::UUID_KEY_RECEIVED_SUBVOL) {
                    continue;
                }
                let mut bytes = [0; 16];
                let (low, high) = bytes.split_at_mut(8);
                low.copy_from_slice(&key.objectid.to_le_bytes());
                high.copy_from_slice(&key.offset.to_le_bytes());
                for at in (0..data.len()).step_by(8) {
                    let Some(id) = u64_at(data, at) else { break };
                    let entry = (key.item_type, Uuid::from_bytes(bytes), id);
                    listed.insert(entry);
                    places.push((entry, leaf.place(slot)));
                }
            }
        });
        let is_current = self.sb.uuid_tree_generation == self.newest().0;
        if !complete || !is_current {
            return;
        }
        for ((kind, uuid, id), place) in places {
            let root = self.roots.trees.get(&id);
            let matches = root.is_some_and(|root| match kind {
                KeyType::UUID_KEY_SUBVOL => root.uuid == uuid,
                _ => root.received_uuid == uuid,
            });
            if !matches {
                self.sink.report(Code::Uuid, place, format!("{uuid} is not the UUID of subvolume {id}"));
            }
        }
        let subvolumes: Vec<(u64, Uuid, Place)> = self
            .roots
            .trees
            .iter()
            .filter(|(id, root)| RootId(**id).is_subvolume() && root.refs > 0 && !root.uuid.is_nil())
            .map(|(id, root)| (*id, root.uuid, root.place))
            .collect();
        for (id, uuid, place) in subvolumes {
            if !listed.contains(&(KeyType::UUID_KEY_SUBVOL, uuid, id)) {
                self.sink.report(Code::Uuid, place, format!("subvolume {id} is not listed under {uuid}"));
            }
        }
    }
}
