//! Problems: their stable codes, their places, and the sink that counts problems and limits how many are reported.
//!
//! Invariants:
//! - I1. At most [`CheckLimits::per_code`] problems of each code are reported; all are counted.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use ubtrfs_format::RootId;

macro_rules! codes {
    ($($variant:ident = $text:literal, $doc:literal;)*) => {
        /// The stable code of a problem. A code that begins with `E-` means damage or, for `E-LIMIT`, a part that was
        /// not checked. A code that begins with `W-` means an oddity that harms nothing.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Code { $(#[doc = $doc] $variant),* }

        impl Code {
            /// All codes.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The printed form of the code.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),* }
            }

            /// The meaning of the code, in a sentence.
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $doc),* }
            }
        }
    };
}

codes! {
    SuperMirror = "E-SUPER-MIRROR", "A copy of the superblock is unreadable or broken, or the first one was overwritten with zeros.";
    SuperFields = "E-SUPER-FIELDS", "Superblock copies of one generation differ, or a field contradicts the trees.";
    SuperBackup = "W-SUPER-BACKUP", "The newest root backup in the superblock does not name the current roots.";
    SuperOld = "W-SUPER-OLD", "A copy of the superblock is older than the newest: its last update was lost.";
    SuperMissing = "W-SUPER-MISSING", "A copy of the superblock other than the first was never written: its place holds zeros.";
    SuperUsed = "E-SUPER-USED", "The superblock's bytes_used is not the sum over block groups.";
    Chunk = "E-CHUNK", "A chunk contradicts itself, another chunk, its device, or the superblock's system chunks.";
    DevExtent = "E-DEV-EXTENT", "A chunk stripe has no device extent, or a device extent has no chunk stripe.";
    Device = "E-DEVICE", "A device item contradicts the device, its extents, or the superblock.";
    DeviceMissing = "W-DEVICE-MISSING", "A device of the filesystem was not given, so its copies were not checked.";
    ChunkLost = "E-CHUNK-LOST", "A chunk has parts whose only copies are on devices that were not given.";
    DeviceStale = "E-DEVICE-STALE", "A device missed commits: its superblocks are older than those of another device. Mount the filesystem with all devices named, and it is brought up to date.";
    DevStats = "W-DEV-STATS", "Error counters are not zero, or belong to a device that does not exist.";
    BlockGroup = "E-BLOCK-GROUP", "A chunk has no block group of its kind, or a block group has no chunk.";
    BlockGroupUsed = "E-BLOCK-GROUP-USED", "A block group's used bytes are not the sum of its extents.";
    BlockRead = "E-BLOCK-READ", "No copy of a tree block can be read.";
    BlockCsum = "E-BLOCK-CSUM", "No copy of a tree block has a correct checksum.";
    BlockHeader = "E-BLOCK-HEADER", "A tree block's header contradicts its parent: address, level, owner, generation, first key.";
    BlockLayout = "E-BLOCK-LAYOUT", "Items or pointers of a tree block are laid out wrongly.";
    BlockCopy = "E-BLOCK-COPY", "One copy of a tree block is bad; another is good.";
    BlockTwice = "E-BLOCK-TWICE", "A tree block is reached twice in one tree, or from trees that cannot share it.";
    KeyOrder = "E-KEY-ORDER", "Keys are not in ascending order.";
    Item = "E-ITEM", "An item's content is invalid for its type.";
    TreeMissing = "E-TREE-MISSING", "A tree that every filesystem has is missing.";
    ExtentMissing = "E-EXTENT-MISSING", "A tree block or data extent that is in use has no extent item.";
    ExtentUnused = "E-EXTENT-UNUSED", "An extent item describes an extent that nothing refers to.";
    ExtentRef = "E-EXTENT-REF", "References to an extent differ from those that its extent item lists.";
    ExtentCount = "E-EXTENT-COUNT", "An extent item's reference count is not the sum of its references.";
    ExtentInfo = "E-EXTENT-INFO", "An extent item's level or generation differs from its tree block's.";
    ExtentFlags = "E-EXTENT-FLAGS", "The full backref flag of an extent item contradicts the trees that reach the block.";
    ExtentOverlap = "E-EXTENT-OVERLAP", "Extents overlap.";
    ExtentGroup = "E-EXTENT-GROUP", "An extent lies outside of a block group, across two, or in one of another kind.";
    FreeSpace = "E-FREE-SPACE", "The free space tree differs from the space that extents leave free.";
    FreeSpaceStale = "W-FREE-SPACE-STALE", "The free space tree lists space outside of any block group.";
    CsumMissing = "E-CSUM-MISSING", "Data that must have checksums has none.";
    CsumExtra = "E-CSUM-EXTRA", "Checksums cover space that is no data extent, or data that must have none.";
    CsumOrder = "E-CSUM-ORDER", "Ranges of checksums overlap.";
    DataRead = "E-DATA-READ", "A copy of file data cannot be read.";
    DataCsum = "E-DATA-CSUM", "A copy of file data does not match its checksum.";
    InodeMissing = "E-INODE-MISSING", "An inode has items or names, but no inode item.";
    InodeNlink = "E-INODE-NLINK", "An inode's link count is not the number of its names.";
    InodeSize = "E-INODE-SIZE", "A directory's size is not twice the sum of its names' lengths, or a symbolic link's size is not its target's length.";
    SymlinkEnd = "W-SYMLINK-END", "A symbolic link's target ends with a zero byte that its size does not count, as mkfs.btrfs --rootdir writes it.";
    InodeNbytes = "E-INODE-NBYTES", "An inode's byte count is not the sum of its extents.";
    InodeItems = "E-INODE-ITEMS", "An inode has items that its type cannot have, items of unknown types, an invalid mode, or a generation in the future.";
    InodeNames = "E-INODE-NAMES", "DIR_ITEM, DIR_INDEX and INODE_REF of a name do not agree.";
    InodeOrphan = "E-INODE-ORPHAN", "An inode without names has no orphan item.";
    InodeCache = "W-INODE-CACHE", "A subvolume holds an inode number cache, which Linux has not used since 5.11.";
    OrphanStale = "W-ORPHAN", "An orphan item names a subvolume that does not exist.";
    FileExtent = "E-FILE-EXTENT", "A file extent contradicts itself or the extent that it refers to.";
    FileOverlap = "E-FILE-OVERLAP", "File extents overlap.";
    FileHole = "E-FILE-HOLE", "A file has a hole without an item, although the filesystem lacks the no-holes feature.";
    RootItem = "E-ROOT-ITEM", "A root item contradicts its tree, or has an unknown id.";
    RootRef = "E-ROOT-REF", "ROOT_REF, ROOT_BACKREF and directory entry of a subvolume do not agree.";
    Uuid = "W-UUID", "The UUID tree lacks a subvolume, or names one that does not exist.";
    Qgroup = "W-QGROUP", "A quota group's numbers differ from the usage of its subvolumes.";
    QgroupItem = "E-QGROUP-ITEM", "Items of the quota tree contradict each other.";
    Log = "E-LOG", "The tree log is broken, or its blocks or data overlap other extents or lie outside of their block groups.";
    Limit = "E-LIMIT", "A part was left out because checking it would take too long.";
}

impl Code {
    /// Whether the code begins with `E-`: damage, or a part that was not checked (`E-LIMIT`).
    pub fn is_error(self) -> bool {
        self.as_str().starts_with('E')
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The place of a problem, as far as it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The tree.
    pub tree: Option<RootId>,
    /// The address of the tree block, or of the extent that the problem is about.
    pub bytenr: Option<u64>,
    /// The slot in the tree block.
    pub slot: Option<usize>,
}

impl Place {
    /// The place of a whole tree.
    pub fn tree(tree: RootId) -> Self {
        Self { tree: Some(tree), ..Self::default() }
    }

    /// The place of a block of a tree.
    pub fn block(tree: RootId, bytenr: u64) -> Self {
        Self { tree: Some(tree), bytenr: Some(bytenr), slot: None }
    }

    /// The place of an item.
    pub fn item(tree: RootId, bytenr: u64, slot: usize) -> Self {
        Self { tree: Some(tree), bytenr: Some(bytenr), slot: Some(slot) }
    }

    /// The place of an address outside of any tree.
    pub fn at(bytenr: u64) -> Self {
        Self { bytenr: Some(bytenr), ..Self::default() }
    }
}

/// A problem of a filesystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The kind of problem.
    pub code: Code,
    /// The place of the problem.
    pub place: Place,
    /// A description of what was found and what was expected.
    pub text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.code)?;
        if let Some(tree) = self.place.tree {
            write!(f, " tree {tree}")?;
        }
        if let Some(bytenr) = self.place.bytenr {
            write!(f, " bytenr {bytenr}")?;
        }
        if let Some(slot) = self.place.slot {
            write!(f, " slot {slot}")?;
        }
        if self.place != Place::default() {
            f.write_str(":")?;
        }
        write!(f, " {}", self.text)
    }
}

/// Limits on the number of reported problems.
#[derive(Clone, Copy, Debug)]
pub struct CheckLimits {
    /// Maximum number of reported problems of each code; further problems are only counted.
    pub per_code: u64,
}

impl Default for CheckLimits {
    fn default() -> Self {
        Self { per_code: 100 }
    }
}

/// Counts problems and passes them on.
pub(crate) struct Sink<'a> {
    tell: &'a mut dyn FnMut(Problem),
    limits: CheckLimits,
    pub(crate) counts: BTreeMap<Code, u64>,
    /// Code, block and slot of reported problems: a problem is reported once, even if several trees share the block.
    told: HashSet<(Code, u64, usize)>,
    muted: bool,
    total: u64,
}

impl<'a> Sink<'a> {
    pub(crate) fn new(limits: CheckLimits, tell: &'a mut dyn FnMut(Problem)) -> Self {
        Self { tell, limits, counts: BTreeMap::new(), told: HashSet::new(), muted: false, total: 0 }
    }

    pub(crate) fn report(&mut self, code: Code, place: Place, text: impl Into<String>) {
        if self.muted {
            return;
        }
        let count = self.counts.entry(code).or_default();
        if *count < self.limits.per_code
            && let (Some(bytenr), Some(slot)) = (place.bytenr, place.slot)
            && !self.told.insert((code, bytenr, slot))
        {
            return;
        }
        *count = count.saturating_add(1);
        self.total = self.total.saturating_add(1);
        if *count <= self.limits.per_code {
            (self.tell)(Problem { code, place, text: text.into() });
        }
    }

    /// Mutes or unmutes the sink; a muted sink ignores problems. A second walk mutes the sink, because it would
    /// report the same problems again.
    pub(crate) fn mute(&mut self, muted: bool) {
        self.muted = muted;
    }

    /// Number of problems so far.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Whether a problem with a code that begins with `E-` was counted.
    pub(crate) fn has_errors(&self) -> bool {
        self.counts.keys().any(|code| code.is_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct_and_documented() {
        let page = include_str!("../../../docs/check.md");
        let mut seen = std::collections::BTreeSet::new();
        for code in Code::ALL {
            assert!(seen.insert(code.as_str()), "{code} twice");
            let row = format!("| `{code}` | {} |", code.meaning());
            assert!(page.contains(&row), "docs/check.md lacks the row {row}");
        }
    }

    #[test]
    fn problems_are_counted_beyond_the_limit() {
        let mut told = Vec::new();
        let mut tell = |problem: Problem| told.push(problem.to_string());
        let mut sink = Sink::new(CheckLimits { per_code: 2 }, &mut tell);
        for slot in 0..5 {
            sink.report(Code::Item, Place::item(RootId(5), 4096, slot), "wrong");
        }
        sink.report(Code::SuperOld, Place::default(), "old");
        assert_eq!(sink.counts[&Code::Item], 5);
        assert_eq!(
            told,
            [
                "E-ITEM: tree 5 bytenr 4096 slot 0: wrong",
                "E-ITEM: tree 5 bytenr 4096 slot 1: wrong",
                "W-SUPER-OLD: old"
            ]
        );
    }
}
