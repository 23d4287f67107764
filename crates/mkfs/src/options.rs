//! Options of a new filesystem, and checks of their combinations.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{BlockGroupFlags, Timespec};
use ubtrfs_format::superblock::{BLOCK_SIZE_MAX, BLOCK_SIZE_MIN, CompatRo, Incompat, LABEL_LEN_MAX};
use ubtrfs_format::{CsumType, Profile};
use uuid::Uuid;

/// Options of a new filesystem. The default options are those of mkfs.btrfs 6.2.
#[derive(Clone, Debug)]
pub struct MkfsOptions {
    /// Label, at most 255 bytes.
    pub label: Vec<u8>,
    /// Filesystem id.
    pub fsid: Uuid,
    /// Ids of the devices, in their order. A device without one gets a random id.
    pub device_uuids: Vec<Uuid>,
    /// Id of the chunk tree.
    pub chunk_tree_uuid: Uuid,
    /// Id of the top-level subvolume.
    pub subvol_uuid: Uuid,
    /// Bytes of each device to use; `None` for the whole devices.
    pub size_bytes: Option<u64>,
    /// Bytes of a tree block: a power of two from `sectorsize` to 65536.
    pub nodesize: u32,
    /// Bytes of a sector: a power of two from 4096 to 65536.
    pub sectorsize: u32,
    /// Checksum algorithm.
    pub csum_type: CsumType,
    /// Profile of data; empty for single. Profiles with parity are not supported.
    pub data_profile: BlockGroupFlags,
    /// Profile of metadata and system chunks; empty for single.
    pub metadata_profile: BlockGroupFlags,
    /// Whether data and metadata share block groups. Sharing requires equal profiles for data and metadata, and equal
    /// `nodesize` and `sectorsize`.
    pub mixed: bool,
    /// Incompat features. `MIXED_GROUPS` is ignored here, because `mixed` decides on mixed block groups.
    pub incompat: Incompat,
    /// compat_ro features.
    pub compat_ro: CompatRo,
    /// User and group that own the root directory.
    pub root_owner: (u32, u32),
    /// Overwrite existing content.
    pub force: bool,
    /// Discard the devices first.
    pub discard: bool,
    /// Time of creation.
    pub now: Timespec,
}

impl Default for MkfsOptions {
    fn default() -> Self {
        Self {
            label: Vec::new(),
            fsid: Uuid::new_v4(),
            device_uuids: Vec::new(),
            chunk_tree_uuid: Uuid::new_v4(),
            subvol_uuid: Uuid::new_v4(),
            size_bytes: None,
            nodesize: 16384,
            sectorsize: 4096,
            csum_type: CsumType::Crc32c,
            data_profile: BlockGroupFlags::empty(),
            metadata_profile: BlockGroupFlags::DUP,
            mixed: false,
            incompat: Incompat::MIXED_BACKREF
                | Incompat::EXTENDED_IREF
                | Incompat::SKINNY_METADATA
                | Incompat::NO_HOLES,
            compat_ro: CompatRo::FREE_SPACE_TREE | CompatRo::FREE_SPACE_TREE_VALID,
            root_owner: (0, 0),
            force: false,
            discard: true,
            now: Timespec::now(),
        }
    }
}

/// Incompat features that a new filesystem may have.
const INCOMPAT: Incompat = Incompat::MIXED_BACKREF
    .union(Incompat::MIXED_GROUPS)
    .union(Incompat::BIG_METADATA)
    .union(Incompat::EXTENDED_IREF)
    .union(Incompat::SKINNY_METADATA)
    .union(Incompat::NO_HOLES);

const COMPAT_RO: CompatRo =
    CompatRo::FREE_SPACE_TREE.union(CompatRo::FREE_SPACE_TREE_VALID).union(CompatRo::BLOCK_GROUP_TREE);

fn refuse<T>(what: String, hint: &'static str) -> Result<T> {
    Err(Error::Refused { what, hint })
}

/// Refuses a profile that this program does not write, or that needs more devices.
fn check_profile(kind: &str, flags: BlockGroupFlags, nr_devices: usize) -> Result<()> {
    let name = Profile::name_of(flags);
    let Some(profile) = Profile::of(flags).filter(|profile| !profile.has_parity()) else {
        return refuse(
            format!("the profile {name} of {kind} is not supported yet"),
            "give single, dup, raid0, raid1, raid1c3, raid1c4 or raid10",
        );
    };
    let needed = usize::from(profile.devs_min);
    if nr_devices >= needed {
        return Ok(());
    }
    refuse(
        format!("the profile {name} of {kind} needs {needed} devices, more than the given {nr_devices}"),
        "give more devices, or another profile",
    )
}

impl MkfsOptions {
    /// Sets the default profiles of a filesystem on several devices: RAID1 for metadata, single for data. Mixed block
    /// groups are single.
    #[must_use]
    pub fn with_array_profiles(self) -> Self {
        let metadata_profile = if self.mixed { BlockGroupFlags::empty() } else { BlockGroupFlags::RAID1 };
        Self { metadata_profile, data_profile: BlockGroupFlags::empty(), ..self }
    }

    /// Refuses options that the format or this program does not support on this number of devices.
    pub(crate) fn check(&self, nr_devices: usize) -> Result<()> {
        let is_size = |bytes: u32| bytes.is_power_of_two() && (BLOCK_SIZE_MIN..=BLOCK_SIZE_MAX).contains(&bytes);
        if !is_size(self.sectorsize) {
            return refuse(
                format!("the sector size {} is not supported", self.sectorsize),
                "give a power of two from 4096 to 65536",
            );
        }
        if !is_size(self.nodesize) || self.nodesize < self.sectorsize {
            return refuse(
                format!("the node size {} is not supported", self.nodesize),
                "give a power of two from the sector size to 65536",
            );
        }
        if self.label.len() > LABEL_LEN_MAX || self.label.iter().any(|byte| matches!(byte, 0 | b'\n')) {
            return refuse(
                "the label is too long or has a newline or zero byte".to_owned(),
                "give at most 255 bytes without them",
            );
        }
        for (kind, flags) in [("data", self.data_profile), ("metadata", self.metadata_profile)] {
            check_profile(kind, flags, nr_devices)?;
        }
        if self.mixed && self.data_profile != self.metadata_profile {
            return refuse(
                "mixed block groups need equal profiles for data and metadata".to_owned(),
                "give the same profile for both",
            );
        }
        if self.mixed && self.nodesize != self.sectorsize {
            return refuse(
                format!("mixed block groups need a node size equal to the sector size, {}", self.sectorsize),
                "give both the same size",
            );
        }
        self.check_features()
    }

    fn check_features(&self) -> Result<()> {
        let unknown = (self.incompat - INCOMPAT).bits() | (self.compat_ro - COMPAT_RO).bits();
        if unknown != 0 {
            return refuse(format!("the feature bits {unknown:#x} are not supported"), "leave them out");
        }
        if !self.incompat.contains(Incompat::MIXED_BACKREF) {
            return refuse("a filesystem needs the mixed-backref feature".to_owned(), "keep that feature");
        }
        let both = CompatRo::FREE_SPACE_TREE | CompatRo::FREE_SPACE_TREE_VALID;
        if !matches!(self.compat_ro & both, found if found.is_empty() || found == both) {
            return refuse("a new free space tree must be valid".to_owned(), "set both of its feature bits, or none");
        }
        let needs = self.compat_ro.contains(both) && self.incompat.contains(Incompat::NO_HOLES);
        if self.compat_ro.contains(CompatRo::BLOCK_GROUP_TREE) && !needs {
            return refuse(
                "block-group-tree needs the features free-space-tree and no-holes".to_owned(),
                "keep both, or leave out block-group-tree",
            );
        }
        Ok(())
    }

    /// The incompat features, with MIXED_GROUPS according to `mixed` and RAID1C34 according to the profiles.
    pub(crate) fn incompat_bits(&self) -> Incompat {
        let mut incompat = self.incompat - Incompat::MIXED_GROUPS;
        let profiles = self.data_profile | self.metadata_profile;
        incompat.set(Incompat::RAID1C34, profiles.intersects(BlockGroupFlags::RAID1C3 | BlockGroupFlags::RAID1C4));
        incompat.set(Incompat::MIXED_GROUPS, self.mixed);
        incompat
    }

    pub(crate) fn is_skinny(&self) -> bool {
        self.incompat.contains(Incompat::SKINNY_METADATA)
    }

    pub(crate) fn has_free_space_tree(&self) -> bool {
        self.compat_ro.contains(CompatRo::FREE_SPACE_TREE)
    }

    pub(crate) fn has_block_group_tree(&self) -> bool {
        self.compat_ro.contains(CompatRo::BLOCK_GROUP_TREE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_combinations_are_refused() {
        MkfsOptions::default().check(1).unwrap();
        let wrong = [
            MkfsOptions { sectorsize: 2048, ..Default::default() },
            MkfsOptions { sectorsize: 32768, ..Default::default() },
            MkfsOptions { nodesize: 131072, ..Default::default() },
            MkfsOptions { nodesize: 12288, ..Default::default() },
            MkfsOptions { label: vec![b'x'; 256], ..Default::default() },
            MkfsOptions { label: b"a\nb".to_vec(), ..Default::default() },
            MkfsOptions { data_profile: BlockGroupFlags::RAID1, ..Default::default() },
            MkfsOptions { mixed: true, ..Default::default() },
            MkfsOptions { mixed: true, metadata_profile: BlockGroupFlags::empty(), ..Default::default() },
            MkfsOptions { incompat: Incompat::MIXED_BACKREF | Incompat::ZONED, ..Default::default() },
            MkfsOptions { incompat: Incompat::NO_HOLES, ..Default::default() },
            MkfsOptions { compat_ro: CompatRo::BLOCK_GROUP_TREE, ..Default::default() },
            MkfsOptions { compat_ro: CompatRo::FREE_SPACE_TREE, ..Default::default() },
        ];
        for options in wrong {
            assert!(options.check(1).is_err(), "{options:?}");
        }
        let of = |data, metadata, nr_devices| {
            MkfsOptions { data_profile: data, metadata_profile: metadata, ..Default::default() }.check(nr_devices)
        };
        let (raid1, raid1c4) = (BlockGroupFlags::RAID1, BlockGroupFlags::RAID1C4);
        of(raid1, raid1c4, 4).unwrap();
        let too_few = of(raid1, raid1c4, 3).unwrap_err().to_string();
        assert!(too_few.contains("RAID1C4 of metadata needs 4 devices, more than the given 3"), "{too_few}");
        let parity = of(BlockGroupFlags::RAID5, raid1, 3).unwrap_err().to_string();
        assert!(parity.contains("RAID5 of data is not supported yet"), "{parity}");
    }
}
