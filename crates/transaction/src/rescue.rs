//! Opening a damaged filesystem, for reading what is left: the options `rescue=` of a mount. Their names and meanings
//! are the same as in the manual page btrfs(5).
//!
//! Invariants:
//! - R1. Nothing is written to a filesystem of which a damaged part was passed over: the options that ignore something
//!   need a read-only caller, and roots of an earlier commit turn the filesystem read-only. Blocks of an earlier commit
//!   may be free, and new blocks may be written over them.
//! - R2. An option changes nothing where nothing is damaged: each check that may be ignored is made first, and content
//!   that passes it is preferred.

use ubtrfs_format::Generation;
use ubtrfs_format::superblock::{RootBackup, Superblock};

/// What opening a damaged filesystem passes over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rescue {
    /// `usebackuproot`: if the trees of the last commit cannot be read, use the trees of an earlier commit.
    pub use_backup_root: bool,
    /// `ignorebadroots`: open without the trees that only writing needs, and without data checksums, if these trees
    /// cannot be read.
    pub ignore_bad_roots: bool,
    /// `ignoredatacsums`: return data that does not match its checksum.
    pub ignore_data_csums: bool,
    /// `ignoremetacsums`: use tree blocks that do not match their checksum, if they are valid otherwise.
    pub ignore_meta_csums: bool,
    /// `ignoresuperflags`: open a filesystem with unknown flags, or with flags of an interrupted conversion.
    pub ignore_super_flags: bool,
}

impl Rescue {
    /// Everything that `rescue=all` sets here. As in Linux, roots of earlier commits are not part of it.
    pub const ALL: Self = Self {
        use_backup_root: false,
        ignore_bad_roots: true,
        ignore_data_csums: true,
        ignore_meta_csums: true,
        ignore_super_flags: true,
    };

    /// Whether the filesystem may only be read with these options (R1).
    pub fn needs_read_only(&self) -> bool {
        self.ignore_bad_roots || self.ignore_data_csums || self.ignore_meta_csums || self.ignore_super_flags
    }
}

/// The roots of earlier commits that the superblock knows, the newest first.
pub(crate) fn earlier_roots(superblock: &Superblock) -> Vec<RootBackup> {
    let is_earlier = |backup: &&RootBackup| {
        backup.tree_root.0 != 0 && backup.chunk_root.0 != 0 && backup.tree_root_gen < superblock.generation
    };
    let mut backups: Vec<RootBackup> = superblock.super_roots.iter().filter(is_earlier).cloned().collect();
    backups.sort_by_key(|backup| std::cmp::Reverse(backup.tree_root_gen));
    backups
}

/// Makes `superblock` the superblock of the commit of `backup`, as far as opening reads it. The log of the last commit
/// does not belong to that commit. Returns the reason why the filesystem is not written (R1).
pub(crate) fn go_back(superblock: &mut Superblock, backup: &RootBackup) -> String {
    let damaged: Generation = superblock.generation;
    superblock.generation = backup.tree_root_gen;
    (superblock.root, superblock.root_level) = (backup.tree_root, backup.tree_root_level);
    (superblock.chunk_root, superblock.chunk_root_level) = (backup.chunk_root, backup.chunk_root_level);
    superblock.chunk_root_generation = backup.chunk_root_gen;
    (superblock.log_root, superblock.log_root_level) = (ubtrfs_format::Logical(0), 0);
    format!(
        "it shows generation {}, because the roots of generation {damaged} are damaged; copy its content to another filesystem",
        backup.tree_root_gen
    )
}
