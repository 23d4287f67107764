//! Names: each stands in its directory twice (`DIR_ITEM`, `DIR_INDEX`) and in its inode once.
//!
//! Both forms in the directory are compared as a sum when the directory ends; directory and inode in the ledger when the
//! subvolume ends. A second walk names those that differ.

use std::collections::HashSet;

use ubtrfs_format::hash::{extref_hash, name_hash};
use ubtrfs_format::item::{DirEntry, FileType};
use ubtrfs_format::{Key, KeyType, objectid};

use crate::checker::Checker;
use crate::fingerprint::Fact;
use crate::inode::Inode;
use crate::problem::{Code, Place};
use crate::raw::{u8_at, u16_at, u64_at};
use crate::walk::{Event, Leaf, TreeRoot};

/// A name: in a directory's index above zero, in the inode below.
const NAME: u64 = 1;
/// A name's type: by the inode's mode above zero, by the directory's index below.
const TYPE: u64 = 2;

impl<'a> Checker<'a> {
    /// The names that an inode lists.
    pub(crate) fn inode_names(&mut self, leaf: &Leaf<'_>, slot: usize, key: Key, data: &[u8], inode: &mut Inode) {
        let is_extref = key.item_type == KeyType::INODE_EXTREF;
        let mut at = 0;
        while at < data.len() {
            let head = if is_extref { 18 } else { 10 };
            let (parent, index_at) = if is_extref { (u64_at(data, at), at + 8) } else { (Some(key.offset), at) };
            let (Some(parent), Some(index), Some(len)) = (parent, u64_at(data, index_at), u16_at(data, at + head - 2))
            else {
                return;
            };
            let Some(name) = data.get(at + head..at + head + usize::from(len)) else { return };
            at += head + usize::from(len);
            inode.nr_names += 1;
            if is_extref && extref_hash(parent, name) != key.offset {
                let text = format!("inode {}: the extended reference {key} holds a name of another hash", inode.ino);
                self.sink.report(Code::InodeNames, leaf.place(slot), text);
            }
            // The root directory names itself.
            if inode.ino == objectid::FIRST_FREE && parent == inode.ino && name == b".." {
                continue;
            }
            let name = self.hash.name(name);
            let fact = Fact { subject: inode.ino, kind: NAME, parts: [parent, index, name] };
            self.names.add(fact, -1, (leaf.tree.0, leaf.bytenr, slot));
        }
    }

    /// The entries of a directory.
    pub(crate) fn directory_entries(&mut self, leaf: &Leaf<'_>, slot: usize, key: Key, data: &[u8], inode: &mut Inode) {
        let is_index = key.item_type == KeyType::DIR_INDEX;
        let place = leaf.place(slot);
        let mut at = 0;
        let mut nr_entries = 0;
        // A name that stands twice has one hash, so both are in one item.
        let mut seen = HashSet::new();
        while at < data.len() {
            let Some(location) = data.get(at..at + Key::SIZE).and_then(|raw| raw.try_into().ok()).map(Key::decode)
            else {
                return;
            };
            let (Some(data_len), Some(name_len), Some(file_type)) =
                (u16_at(data, at + 25), u16_at(data, at + 27), u8_at(data, at + 29))
            else {
                return;
            };
            let name_at = at + DirEntry::HEADER_SIZE;
            let Some(name) = data.get(name_at..name_at + usize::from(name_len)) else { return };
            at = name_at + usize::from(name_len) + usize::from(data_len);
            nr_entries += 1;
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
                    let text = format!("directory {}: the name '{}' stands twice", inode.ino, name.escape_ascii());
                    self.sink.report(Code::InodeNames, place, text);
                }
                if name_hash(name) != key.offset {
                    let text = format!("directory {}: the name '{}' has another hash", inode.ino, name.escape_ascii());
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
            // A removal that stopped half way: the inodes have lost these names already.
            if inode.is_dying() {
                continue;
            }
            let here = (leaf.tree.0, leaf.bytenr, slot);
            let child = location.objectid;
            self.names.add(Fact { subject: child, kind: NAME, parts: [inode.ino, key.offset, hashed] }, 1, here);
            self.names.add(Fact { subject: child, kind: TYPE, parts: [file_type.into(), 0, 0] }, -1, here);
        }
        if is_index && nr_entries > 1 {
            let text = format!("directory {}: the index {} holds several names", inode.ino, key.offset);
            self.sink.report(Code::InodeNames, place, text);
        }
    }

    /// Books the type that all names of an inode must have.
    pub(crate) fn book_type(&mut self, ino: u64, nr_names: u64, file_type: Option<FileType>, place: Place) {
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
        let mut subvolume = self.subvolume_again(root.id);
        self.walk(root, &mut |checker, event| {
            if let Event::Leaf(leaf) = event {
                checker.inode_leaf(leaf, &mut subvolume);
            }
        });
        self.finish_inode(&mut subvolume);
    }

    /// Directories and inodes of this subvolume disagree: walks it again to tell about which names.
    pub(crate) fn find_wrong_names(&mut self, root: TreeRoot) {
        let stats = self.stats;
        self.sink.mute(true);
        // The buckets know nothing of what other subvolumes have too.
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
                    let text = format!("the entry {b} in directory {a} of inode {ino} is not among the inode's names");
                    self.sink.report(Code::InodeNames, place, text);
                }
                NAME => {
                    told.insert(ino);
                    let text = format!("inode {ino} has a name with index {b} that directory {a} does not list so");
                    self.sink.report(Code::InodeNames, place, text);
                }
                _ if told.insert(ino) => {
                    let text = format!(
                        "directory entries of inode {ino} give type {a} {} times, its mode {}",
                        sides.minus, sides.plus
                    );
                    self.sink.report(Code::InodeNames, place, text);
                }
                _ => {}
            }
        }
        if overflowed {
            self.sink.report(Code::InodeNames, Place::tree(root.id), "more names are wrong than can be listed");
        }
    }
}
