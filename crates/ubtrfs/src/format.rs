//! Types of the disk format that appear in options, reports and errors.

/// ```
/// use ubtrfs::EngineError;
/// use ubtrfs::format::{Corrupt, RootId};
///
/// /// Returns the damaged tree, if an error names it.
/// fn damaged_tree(error: &EngineError) -> Option<RootId> {
///     match error {
///         EngineError::Corrupt(Corrupt { tree, .. }) => *tree,
///         _ => None,
///     }
/// }
/// # assert_eq!(damaged_tree(&EngineError::NoSpace), None);
/// ```
#[doc(inline)]
pub use ubtrfs_format::Corrupt;
/// ```
/// use ubtrfs::EngineError;
/// use ubtrfs::format::FormatError;
///
/// let error = EngineError::from(FormatError::Short { what: "inode item", need: 160, have: 8 });
/// assert!(error.to_string().contains("inode item needs 160 bytes and has 8"));
/// ```
#[doc(inline)]
pub use ubtrfs_format::FormatError;
/// ```
/// use ubtrfs::format::{Key, KeyType};
///
/// let key = Key::new(257, KeyType::INODE_ITEM, 0);
/// assert!(key < Key::new(257, KeyType::EXTENT_DATA, 0));
/// ```
#[doc(inline)]
pub use ubtrfs_format::Key;
/// ```
/// use ubtrfs::format::KeyType;
///
/// assert_eq!(KeyType::INODE_ITEM, KeyType(1));
/// ```
#[doc(inline)]
pub use ubtrfs_format::KeyType;
/// ```
/// use ubtrfs::format::Logical;
///
/// // Addresses are in bytes.
/// assert_eq!(Logical(4096).checked_add(4096), Some(Logical(8192)));
/// ```
#[doc(inline)]
pub use ubtrfs_format::Logical;
/// ```
/// use ubtrfs::MountOptions;
/// use ubtrfs::format::RootId;
///
/// // Open the top level instead of the default subvolume.
/// let options = MountOptions { subvolid: Some(RootId::FS_TREE), ..MountOptions::default() };
/// # assert_eq!(options.subvolid, Some(RootId(5)));
/// ```
#[doc(inline)]
pub use ubtrfs_format::RootId;
/// ```
/// use ubtrfs::MkfsOptions;
/// use ubtrfs::format::BlockGroupFlags;
///
/// // One copy of metadata instead of two.
/// let options = MkfsOptions { metadata_profile: BlockGroupFlags::empty(), ..MkfsOptions::default() };
/// # assert_ne!(options.metadata_profile, MkfsOptions::default().metadata_profile);
/// ```
#[doc(inline)]
pub use ubtrfs_format::item::BlockGroupFlags;
/// ```
/// use ubtrfs::format::Compression;
/// use ubtrfs::{CompressSpec, MountOptions};
///
/// let compress = Some(CompressSpec::new(Compression::Lzo));
/// let options = MountOptions { compress, ..MountOptions::default() };
/// # assert!(options.compress.is_some());
/// ```
#[doc(inline)]
pub use ubtrfs_format::item::Compression;
/// ```
/// use ubtrfs::MkfsOptions;
/// use ubtrfs::format::Timespec;
///
/// // A fixed time of creation, in seconds and nanoseconds since 1970.
/// let options = MkfsOptions { now: Timespec { sec: 1_000_000_000, nsec: 0 }, ..MkfsOptions::default() };
/// # assert_eq!(options.now.sec, 1_000_000_000);
/// ```
#[doc(inline)]
pub use ubtrfs_format::item::Timespec;
/// ```
/// use ubtrfs::MkfsOptions;
/// use ubtrfs::format::CompatRo;
///
/// let mut options = MkfsOptions::default();
/// options.compat_ro |= CompatRo::BLOCK_GROUP_TREE;
/// ```
#[doc(inline)]
pub use ubtrfs_format::superblock::CompatRo;
/// ```
/// use ubtrfs::MkfsOptions;
/// use ubtrfs::format::Incompat;
///
/// // Holes of files get items, as in filesystems of old kernels.
/// let mut options = MkfsOptions::default();
/// options.incompat.remove(Incompat::NO_HOLES);
/// ```
#[doc(inline)]
pub use ubtrfs_format::superblock::Incompat;
