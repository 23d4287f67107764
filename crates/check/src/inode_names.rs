//! Checks names. Each name is in its directory twice (`DIR_ITEM`, `DIR_INDEX`) and in its inode once.
//!
//! The names in `DIR_ITEM` and in `DIR_INDEX` items are compared as a sum at the end of the directory. The names in
//! directories and the names in inodes are compared in the ledger at the end of the subvolume. If the ledger's two
//! sides differ, a second walk finds the names that differ.

use std::collections::HashSet;

use ubtrfs_format::hash::{extref_hash, name_hash};
use ubtrfs_format::item::{DirItem, FileType};
use ubtrfs_format::{Key, KeyType, objectid};

use crate::checker::Checker;
use crate::fingerprint::Fact;
use crate::inode::CheckedInode;
use crate::problem::{Code, Place};
use crate::raw::{u8_at, u16_at, u64_at};
use crate::walk::{Leaf, TreeRoot, WalkEvent};

/// The kind of a fact that states a name of an inode. The weight is positive for a directory's index item, and negative
/// for the inode's reference item.
const NAME: u64 = 1;
/// The kind of a fact that states the file type of a name. The weight is positive for the type in the inode's mode, and
/// negative for the type in a directory's index item.
const TYPE: u64 = 2;

impl<'a> Checker<'a> {
    /// Records the names in an inode reference item.
    pub(crate) fn inode_names(
        &mut self,
        leaf: &Leaf<'_>,
        slot: usize,
        key: Key,
        data: &[u8],
        inode: &mut CheckedInode,
    ) {
        let is_extref = key.item_type == KeyType::INODE_EXTREF;
        let mut at = 0;
        while at < data.len() {
            let rest = data.get(at..).unwrap_or_default();
            let head_len = if is_extref { 18 } else { 10 };
            let Some((head, names)) = rest.split_at_checked(head_len) else { return };
            let (parent, index_at) = if is_extref { (u64_at(head, 0), 8) } else { (Some(key.offset), 0) };
            let (Some(parent), Some(index), Some(len)) =
                (parent, u64_at(head, index_at), u16_at(head, head_len.saturating_sub(2)))
            else {
                return;
            };
            let Some(name) = names.get(..usize::from(len)) else { return };
            at = at.saturating_add(head_len).saturating_add(name.len());
            inode.nr_names = inode.nr_names.saturating_add(1);
            if is_extref && extref_hash(parent, name) != key.offset {
                let text = format!("inode {}: the extended reference {key} has a name with another hash", inode.ino);
                self.sink.report(Code::InodeNames, leaf.place(slot), text);
            }
            // The root directory has a reference to itself, to which no directory entry belongs.
            if inode.ino == objectid::FIRST_FREE && parent == inode.ino && name == b".." {
                if index != 0 {
                    let text = format!("the root directory's reference to itself has index {index}, expected 0");
                    self.sink.report(Code::InodeNames, leaf.place(slot), text);
                }
                continue;
            }
            let name = self.hash.name(name);
            let fact = Fact { subject: inode.ino, kind: NAME, parts: [parent, index, name] };
            self.names.add(fact, -1, (leaf.tree.0, leaf.bytenr, slot));
        }
    }

    /// Checks and records the entries in a directory item.
    pub(crate) fn directory_entries(
        &mut self,
        leaf: &Leaf<'_>,
        slot: usize,
        key: Key,
        data: &[u8],
        inode: &mut CheckedInode,
    ) {
        let is_index = key.item_type == KeyType::DIR_INDEX;
        let place = leaf.place(slot);
        let mut at = 0;
        let mut nr_entries: u64 = 0;
        // Duplicates of a name have equal hashes, so all duplicates are in one item.
        let mut seen = HashSet::new();
        while at < data.len() {
            let rest = data.get(at..).unwrap_or_default();
            let Some((head, names)) = rest.split_at_checked(DirItem::HEADER_SIZE) else { return };
            let Some(location) = head.first_chunk::<{ Key::SIZE }>().map(Key::decode) else { return };
            let (Some(data_len), Some(name_len), Some(file_type)) =
                (u16_at(head, 25), u16_at(head, 27), u8_at(head, 29))
            else {
                return;
            };
            let Some(name) = names.get(..usize::from(name_len)) else { return };
            at = at.saturating_add(head.len()).saturating_add(name.len()).saturating_add(data_len.into());
            nr_entries = nr_entries.saturating_add(1);
            let len = if is_index { &mut inode.index_names_len } else { &mut inode.item_names_len };
            *len = len.saturating_add(name_len.into());
            let hashed = self.hash.name(name);
            let hash = self.hash.numbers(&[
                location.objectid,
                location.item_type.0.into(),
                location.offset,
                file_type.into(),
                hashed,
            ]);
            inode.names_sum = match is_index {
                true => inode.names_sum.wrapping_sub(hash),
                false => inode.names_sum.wrapping_add(hash),
            };
            if !is_index {
                if !seen.insert(name) {
                    let text = format!("directory {}: duplicate name '{}'", inode.ino, name.escape_ascii());
                    self.sink.report(Code::InodeNames, place, text);
                }
                if name_hash(name) != key.offset {
                    let name = name.escape_ascii();
                    let text = format!("directory {}: the hash in the key is not that of the name '{name}'", inode.ino);
                    self.sink.report(Code::InodeNames, place, text);
                }
                continue;
            }
            if location.item_type == KeyType::ROOT_ITEM {
                inode.has_subvolumes = true;
                self.subvolume_entry(leaf.tree, location.objectid, inode.ino, key.offset, name, place);
                if file_type != FileType::Directory as u8 {
                    let text = format!("directory {}: the entry of a subvolume has type {file_type}", inode.ino);
                    self.sink.report(Code::InodeNames, place, text);
                }
                continue;
            }
            // A directory without names is left from an interrupted deletion. The inodes in it have already lost the
            // names that its entries list, so the entries are not recorded.
            if inode.has_no_names() {
                continue;
            }
            let here = (leaf.tree.0, leaf.bytenr, slot);
            let child = location.objectid;
            self.names.add(Fact { subject: child, kind: NAME, parts: [inode.ino, key.offset, hashed] }, 1, here);
            self.names.add(Fact { subject: child, kind: TYPE, parts: [file_type.into(), 0, 0] }, -1, here);
        }
        if is_index && nr_entries > 1 {
            let text = format!("directory {}: the index {} has several names", inode.ino, key.offset);
            self.sink.report(Code::InodeNames, place, text);
        }
    }

    /// Records the type that all names of an inode must have.
    pub(crate) fn record_type(&mut self, ino: u64, nr_names: u64, file_type: Option<FileType>, place: Place) {
        let Some(file_type) = file_type else { return };
        let names = if ino == objectid::FIRST_FREE { nr_names.saturating_sub(1) } else { nr_names };
        if names == 0 {
            return;
        }
        let at = (place.tree.unwrap_or_default().0, place.bytenr.unwrap_or_default(), place.slot.unwrap_or_default());
        let fact = Fact { subject: ino, kind: TYPE, parts: [file_type as u64, 0, 0] };
        self.names.add(fact, i64::try_from(names).unwrap_or(i64::MAX), at);
    }

    fn names_again(&mut self, root: &TreeRoot) {
        let mut subvolume = self.new_subvolume_walk(root.id);
        self.walk(root, &mut |checker, event| {
            if let WalkEvent::Leaf(leaf) = event {
                checker.inode_leaf(leaf, &mut subvolume);
            }
        });
        self.finish_inode(&mut subvolume);
    }

    /// Walks a subvolume again to report the names that its directories and inodes list differently.
    pub(crate) fn find_wrong_names(&mut self, root: TreeRoot) {
        let stats = self.stats;
        self.sink.mute(true);
        // For a remembered segment, only the sum of the names was added, not the names themselves. So walk the
        // subvolume without remembered segments.
        let segments = std::mem::replace(&mut self.segments.enabled, false);
        if segments {
            self.names.clear();
            self.names_again(&root);
        }
        self.names.keep_disagreements();
        self.names_again(&root);
        self.segments.enabled = segments;
        self.sink.mute(false);
        self.stats = stats;
        let (facts, overflowed) = self.names.disagreements();
        let mut told = std::collections::HashSet::new();
        for (fact, sides) in facts {
            let [a, b, _] = fact.parts;
            let at = sides.plus_at.or(sides.minus_at);
            let place = at.map(|(_, bytenr, slot)| Place::item(root.id, bytenr, slot)).unwrap_or_default();
            let ino = fact.subject;
            match fact.kind {
                NAME if sides.plus > sides.minus => {
                    told.insert(ino);
                    let text = format!("inode {ino} does not list its name with index {b} in directory {a}");
                    self.sink.report(Code::InodeNames, place, text);
                }
                NAME => {
                    told.insert(ino);
                    let text = format!("inode {ino} has a name with index {b} that directory {a} does not list");
                    self.sink.report(Code::InodeNames, place, text);
                }
                _ if told.insert(ino) => {
                    let text = format!(
                        "inode {ino}: {} directory entries have type {a}, the mode expects {}",
                        sides.minus, sides.plus
                    );
                    self.sink.report(Code::InodeNames, place, text);
                }
                _ => {}
            }
        }
        if overflowed {
            self.sink.report(Code::InodeNames, Place::tree(root.id), "too many wrong names to list them all");
        }
    }
}
