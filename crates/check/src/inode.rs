//! Checks the inodes of a subvolume. All items of an inode are neighbours, so each inode is checked after its last
//! item.
//!
//! Invariants:
//! - I1. One inode is in memory at a time. A name is listed by its directory and by the inode that has it; both sides
//!   go into the ledger, which compares them.
//! - I2. An inode that could not be read completely is not checked.

use ubtrfs_format::item::{FileType, InodeFlags, InodeItem};
use ubtrfs_format::superblock::Incompat;
use ubtrfs_format::{Key, KeyType, RootId, objectid};

use crate::checker::Checker;
use crate::problem::{Code, Place};
use crate::raw::{u8_at, u64_at};
use crate::segment::{Open, is_cut};
use crate::walk::{Leaf, TreeRoot, WalkEvent};

/// Types of the items of an inode.
const KNOWN_TYPES: [KeyType; 9] = [
    KeyType::INODE_ITEM,
    KeyType::INODE_REF,
    KeyType::INODE_EXTREF,
    KeyType::XATTR_ITEM,
    KeyType::VERITY_DESC_ITEM,
    KeyType::VERITY_MERKLE_ITEM,
    KeyType::DIR_ITEM,
    KeyType::DIR_INDEX,
    KeyType::EXTENT_DATA,
];

/// The current inode.
#[derive(Debug, Default)]
pub(crate) struct CheckedInode {
    pub(crate) ino: u64,
    pub(crate) place: Place,
    item: Option<InodeFacts>,
    pub(crate) nr_names: u64,
    /// Sum of the lengths of all names in DIR_ITEMs.
    pub(crate) item_names_len: u64,
    /// Sum of the lengths of all names in DIR_INDEX items.
    pub(crate) index_names_len: u64,
    /// Sum of the hashes of names: names in DIR_ITEMs are added, and names in DIR_INDEX items are subtracted.
    pub(crate) names_sum: u64,
    nr_entries: u64,
    nr_extents: u64,
    /// End of the last file extent.
    extent_end: u64,
    hole: Option<u64>,
    bytes: u64,
    inline_len: Option<u64>,
    /// Whether the inline data is not compressed and its last byte is zero.
    ends_with_zero: bool,
    /// Whether the inode is a directory with entries of subvolumes.
    pub(crate) has_subvolumes: bool,
    /// Whether a block that may have held items of this inode could not be read (I2).
    partial: bool,
}

impl CheckedInode {
    /// Whether the inode item says that the inode has no names (link count 0). An interrupted deletion can leave such
    /// an inode.
    pub(crate) fn has_no_names(&self) -> bool {
        self.item.is_some_and(|facts| facts.nlink == 0)
    }
}

#[derive(Clone, Copy, Debug)]
struct InodeFacts {
    size: u64,
    nbytes: u64,
    nlink: u32,
    mode: u32,
    flags: InodeFlags,
}

/// The location of a file extent's data.
#[derive(Clone, Copy, Debug)]
struct Stored {
    kind: u8,
    /// Whether the extent is compressed, so that only the whole extent can be read.
    whole: bool,
    disk_bytenr: u64,
    from: u64,
    bytes: u64,
}

/// The current subvolume.
#[derive(Debug)]
pub(crate) struct CheckedSubvolume {
    pub(crate) tree: RootId,
    inode: Option<CheckedInode>,
    gap: bool,
    /// Inodes without names, in ascending order.
    nameless: Vec<(u64, Place)>,
    orphans: Vec<u64>,
    segment: Option<Open>,
}

impl CheckedSubvolume {
    /// Notes that the current segment must be checked in every subvolume.
    fn mark_special(&mut self) {
        if let Some(open) = &mut self.segment {
            open.special = true;
        }
    }
}

impl<'a> Checker<'a> {
    /// Checks all inodes of a subvolume.
    pub(crate) fn inodes(&mut self, root: TreeRoot) {
        self.names.clear();
        let mut subvolume = self.new_subvolume_walk(root.id);
        let complete = self.walk_tree(root, &mut |checker, event| match event {
            WalkEvent::Leaf(leaf) => checker.inode_leaf(leaf, &mut subvolume),
            WalkEvent::Known(known) => {
                checker.finish_inode(&mut subvolume);
                checker.close_segment(subvolume.segment.take());
                checker.names.add_total(known.names);
                checker.stats.inodes = checker.stats.inodes.saturating_add(known.inodes);
            }
            WalkEvent::Gap => {
                subvolume.gap = true;
                subvolume.inode = None;
                subvolume.segment = None;
            }
        });
        self.finish_inode(&mut subvolume);
        if !complete {
            return;
        }
        self.compare_orphans(&subvolume);
        self.subvolume_was_read(root.id);
        if !self.names.agrees() {
            self.find_wrong_names(root);
        }
    }

    pub(crate) fn inode_leaf(&mut self, leaf: &Leaf<'_>, subvolume: &mut CheckedSubvolume) {
        let first = leaf.view.key(0);
        let goes_on = subvolume.inode.as_ref().is_some_and(|inode| first.is_some_and(|key| key.objectid == inode.ino));
        if is_cut(first) && !goes_on {
            self.finish_inode(subvolume);
            self.close_segment(subvolume.segment.take());
            subvolume.segment = self.open_segment(leaf);
        } else {
            subvolume.segment = subvolume.segment.map(|open| self.extend_segment(open, leaf));
        }
        self.inode_items(leaf, subvolume);
    }

    fn inode_items(&mut self, leaf: &Leaf<'_>, subvolume: &mut CheckedSubvolume) {
        for (slot, key, data) in leaf.items() {
            if key.objectid == objectid::ORPHAN {
                self.finish_inode(subvolume);
                if key.item_type == KeyType::ORPHAN_ITEM {
                    subvolume.orphans.push(key.offset);
                    subvolume.mark_special();
                }
                continue;
            }
            let is_inode = (objectid::FIRST_FREE..=objectid::LAST_FREE).contains(&key.objectid);
            self.unknown_item(leaf, slot, key, is_inode);
            if !is_inode {
                continue;
            }
            if subvolume.inode.as_ref().is_none_or(|inode| inode.ino != key.objectid) {
                self.finish_inode(subvolume);
                let partial = std::mem::take(&mut subvolume.gap);
                let place = leaf.place(slot);
                subvolume.inode = Some(CheckedInode { ino: key.objectid, place, partial, ..CheckedInode::default() });
            }
            let Some(mut inode) = subvolume.inode.take() else { continue };
            self.inode_item(leaf, slot, key, data, &mut inode);
            if inode.has_subvolumes {
                subvolume.mark_special();
            }
            subvolume.inode = Some(inode);
        }
    }

    /// Reports an item that belongs to no inode or has a type that subvolume trees do not contain. Items of the inode
    /// number cache, a relic of old Linux, are reported as a warning.
    fn unknown_item(&mut self, leaf: &Leaf<'_>, slot: usize, key: Key, is_inode: bool) {
        let is_cache = match key.item_type {
            KeyType::INODE_ITEM | KeyType::EXTENT_DATA => key.objectid == objectid::FREE_INO,
            KeyType(0) => key.objectid == objectid::FREE_SPACE,
            _ => false,
        };
        if is_cache {
            if key.item_type == KeyType::INODE_ITEM {
                self.sink.report(
                    Code::InodeCache,
                    leaf.place(slot),
                    "an inode number cache, which Linux does not use any more",
                );
            }
        } else if !is_inode {
            self.sink.report(Code::InodeItems, leaf.place(slot), format!("item {key} belongs to no inode"));
        } else if !KNOWN_TYPES.contains(&key.item_type) {
            self.sink.report(Code::InodeItems, leaf.place(slot), format!("item {key} has an unknown type"));
        }
    }

    fn inode_item(&mut self, leaf: &Leaf<'_>, slot: usize, key: Key, data: &[u8], inode: &mut CheckedInode) {
        match key.item_type {
            KeyType::INODE_ITEM => {
                let Ok(item) = InodeItem::decode(data) else { return };
                inode.place = leaf.place(slot);
                let InodeItem { size, nbytes, nlink, mode, .. } = item;
                inode.item = Some(InodeFacts { size, nbytes, nlink, mode, flags: item.flags() });
                if item.generation > self.newest() {
                    let text = format!("inode {}: generation {} is in the future", inode.ino, item.generation);
                    self.sink.report(Code::InodeItems, inode.place, text);
                }
            }
            KeyType::INODE_REF | KeyType::INODE_EXTREF => self.inode_names(leaf, slot, key, data, inode),
            KeyType::DIR_ITEM | KeyType::DIR_INDEX => {
                inode.nr_entries = inode.nr_entries.saturating_add(1);
                self.directory_entries(leaf, slot, key, data, inode);
            }
            KeyType::EXTENT_DATA => self.file_extent(leaf, slot, key, data, inode),
            _ => {}
        }
    }

    fn file_extent(&mut self, leaf: &Leaf<'_>, slot: usize, key: Key, data: &[u8], inode: &mut CheckedInode) {
        let place = leaf.place(slot);
        inode.nr_extents = inode.nr_extents.saturating_add(1);
        let (Some(ram_bytes), Some(compression), Some(kind)) = (u64_at(data, 8), u8_at(data, 16), u8_at(data, 20))
        else {
            return;
        };
        let start = key.offset;
        if u64_at(data, 0).is_some_and(|generation| generation > self.newest().0) {
            let text = format!("inode {} extent at {start}: its generation is in the future", inode.ino);
            self.sink.report(Code::FileExtent, place, text);
        }
        if start < inode.extent_end {
            let text =
                format!("inode {}: the extent at {start} overlaps one that ends at {}", inode.ino, inode.extent_end);
            self.sink.report(Code::FileOverlap, place, text);
        } else if start > inode.extent_end {
            inode.hole.get_or_insert(inode.extent_end);
        }
        if kind == 0 {
            inode.inline_len = Some(ram_bytes);
            inode.ends_with_zero = compression == 0 && data.len() > 21 && data.last() == Some(&0);
            inode.bytes = inode.bytes.saturating_add(ram_bytes);
            let end = start.saturating_add(ram_bytes).checked_next_multiple_of(self.sectorsize);
            inode.extent_end = end.unwrap_or(u64::MAX);
            let stored = (data.len() as u64).saturating_sub(21);
            if ram_bytes == 0 || ram_bytes > self.sectorsize || stored > self.sectorsize {
                let text =
                    format!("inode {}: {ram_bytes} bytes of inline data, expected 1 to {}", inode.ino, self.sectorsize);
                self.sink.report(Code::FileExtent, place, text);
            }
            return;
        }
        let (Some(disk_bytenr), Some(disk_len), Some(offset), Some(len)) =
            (u64_at(data, 21), u64_at(data, 29), u64_at(data, 37), u64_at(data, 45))
        else {
            return;
        };
        inode.extent_end = inode.extent_end.max(start.saturating_add(len));
        let mut wrong = |what: &str| {
            self.sink.report(Code::FileExtent, place, format!("inode {} extent at {start}: {what}", inode.ino));
        };
        if len == 0 {
            wrong("covers no bytes");
        }
        if disk_bytenr == 0 {
            if kind == 2 {
                wrong("is preallocated, but a hole");
            }
            return;
        }
        inode.bytes = inode.bytes.saturating_add(len);
        if disk_len == 0 {
            wrong("is empty on disk");
        }
        if offset.checked_add(len).is_none_or(|end| end > ram_bytes) {
            wrong("ends behind the extent that it refers to");
        } else if compression == 0 && offset.saturating_add(len) > disk_len {
            wrong("ends behind the extent on disk");
        }
        if kind == 2 && compression != 0 {
            wrong("is preallocated and compressed");
        }
        self.quota_data(disk_bytenr, disk_len);
        let whole = compression != 0;
        let (from, bytes) = if whole { (disk_bytenr, disk_len) } else { (disk_bytenr.wrapping_add(offset), len) };
        self.file_csums(place, inode, Stored { kind, whole, disk_bytenr, from, bytes });
    }

    /// Checks that written data has checksums, that preallocated space has none, and that an inode with the flag
    /// NODATASUM has none. Compressed data must have checksums even if the inode has the flag, because Linux does not
    /// compress files without checksums.
    fn file_csums(&mut self, place: Place, inode: &CheckedInode, stored: Stored) {
        let Stored { kind, whole, disk_bytenr, from, bytes } = stored;
        // Data under relocation has checksums although its inode has the flag NODATASUM.
        if !self.csums.complete || place.tree == Some(RootId::DATA_RELOC_TREE) {
            return;
        }
        let Some(facts) = inode.item else { return };
        let covered = self.csums.covered(from, from.saturating_add(bytes));
        let what = format!("inode {}: {covered} of {bytes} bytes at {from} have checksums", inode.ino);
        if facts.flags.contains(InodeFlags::NODATASUM) && !whole {
            if covered > 0 {
                self.sink.report(Code::CsumExtra, place, format!("{what}, but the file must have none"));
            }
        } else if kind == 1 && covered < bytes {
            self.sink.report(Code::CsumMissing, place, what);
        } else if kind == 2 && covered > 0 {
            let text = format!("{what}, but nothing was written there");
            self.prealloc.suspect(disk_bytenr, place, text);
        }
    }

    /// Checks the current inode after its last item.
    pub(crate) fn finish_inode(&mut self, subvolume: &mut CheckedSubvolume) {
        let Some(inode) = subvolume.inode.take() else { return };
        self.stats.inodes = self.stats.inodes.saturating_add(1);
        if inode.partial {
            return;
        }
        let (ino, place) = (inode.ino, inode.place);
        let Some(facts) = inode.item else {
            return self.sink.report(
                Code::InodeMissing,
                place,
                format!("items of inode {ino}, which has no inode item"),
            );
        };
        let mut tell = |code: Code, text: String| self.sink.report(code, place, format!("inode {ino}: {text}"));
        let file_type = FileType::from_mode(facts.mode);
        let is_dir = file_type == Some(FileType::Directory);
        let is_file = matches!(file_type, Some(FileType::Regular | FileType::Symlink));
        if u64::from(facts.nlink) != inode.nr_names {
            tell(Code::InodeNlink, format!("has link count {}, but {} names", facts.nlink, inode.nr_names));
        }
        if is_dir && facts.nlink > 1 {
            tell(Code::InodeNlink, format!("is a directory with {} links", facts.nlink));
        }
        if file_type.is_none() {
            tell(Code::InodeItems, format!("mode {:o} has no valid file type", facts.mode));
        }
        if !is_dir && inode.nr_entries > 0 {
            tell(Code::InodeItems, "has directory entries, but is not a directory".to_owned());
        }
        if !is_file && inode.nr_extents > 0 {
            tell(Code::InodeItems, "has file extents, but is not a file or symbolic link".to_owned());
        }
        if file_type == Some(FileType::Symlink) && facts.flags.intersects(InodeFlags::IMMUTABLE | InodeFlags::APPEND) {
            tell(Code::InodeItems, "is a symbolic link with the immutable or append-only flag".to_owned());
        }
        if is_dir {
            let len = inode.item_names_len.saturating_add(inode.index_names_len);
            if facts.size != len && !inode.has_no_names() {
                tell(Code::InodeSize, format!("the directory's size is {}, its names have {len} bytes", facts.size));
            }
            if inode.names_sum != 0 && !inode.has_no_names() {
                tell(Code::InodeNames, "DIR_ITEM and DIR_INDEX items of the directory differ".to_owned());
            }
        }
        let is_truncated = inode.has_no_names() && facts.nbytes > inode.bytes;
        if is_file && facts.nbytes != inode.bytes && !is_truncated {
            tell(Code::InodeNbytes, format!("has byte count {}, its extents have {} bytes", facts.nbytes, inode.bytes));
        }
        let is_symlink = file_type == Some(FileType::Symlink);
        let ends_with_zero = inode.ends_with_zero && inode.inline_len == facts.size.checked_add(1);
        if is_symlink && inode.nr_extents == 1 && ends_with_zero {
            tell(Code::SymlinkEnd, "a zero byte follows the symbolic link's target".to_owned());
        } else if is_symlink && (inode.inline_len != Some(facts.size) || inode.nr_extents != 1) {
            tell(Code::InodeSize, format!("the symbolic link's size {} is not the length of its target", facts.size));
        }
        // Holes past the end of the file need no items, even if allocated space follows them.
        let hole = inode.hole.unwrap_or(inode.extent_end);
        let needs_holes = file_type == Some(FileType::Regular) && !self.ctx.incompat.contains(Incompat::NO_HOLES);
        if needs_holes && subvolume.tree != RootId::DATA_RELOC_TREE && facts.nlink > 0 && hole < facts.size {
            self.sink.report(Code::FileHole, place, format!("inode {ino}: no extent item covers {hole}"));
        }
        if facts.nlink == 0 {
            subvolume.nameless.push((ino, place));
            subvolume.mark_special();
        }
        self.record_type(ino, inode.nr_names, file_type, place);
    }

    /// Makes the initial state of a walk through a subvolume.
    pub(crate) fn new_subvolume_walk(&self, tree: RootId) -> CheckedSubvolume {
        CheckedSubvolume { tree, inode: None, gap: false, nameless: Vec::new(), orphans: Vec::new(), segment: None }
    }

    fn compare_orphans(&mut self, subvolume: &CheckedSubvolume) {
        let mut orphans = subvolume.orphans.clone();
        orphans.sort_unstable();
        for (ino, place) in &subvolume.nameless {
            if orphans.binary_search(ino).is_err() {
                let text = format!("inode {ino} has no links and no orphan item");
                self.sink.report(Code::InodeOrphan, *place, text);
            }
        }
    }
}
