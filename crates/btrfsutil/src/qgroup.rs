//! The quota groups that a new subvolume joins.
//!
//! `struct btrfs_qgroup_inherit`: flags, num_qgroups, num_ref_copies, num_excl_copies, five numbers of limits, and the
//! ids of the quota groups; each of 8 bytes.

/// The opaque `struct btrfs_util_qgroup_inherit` of C programs.
#[derive(Debug, Default)]
pub(crate) struct QgroupsToJoin {
    pub(crate) groups: Vec<u64>,
}

impl QgroupsToJoin {
    /// Encodes the struct of the ioctls.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let count = u64::try_from(self.groups.len()).unwrap_or(u64::MAX);
        let head = [0, count, 0, 0, 0, 0, 0, 0, 0];
        head.iter().chain(&self.groups).flat_map(|word| word.to_le_bytes()).collect()
    }
}
