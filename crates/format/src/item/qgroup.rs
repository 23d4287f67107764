//! Quota groups.

use crate::disk_struct;

disk_struct! {
    /// `QGROUP_STATUS`, key `(0 QGROUP_STATUS 0)`. With simple quotas, the generation in which they were enabled (u64)
    /// follows these fields.
    QgroupStatus {
        /// Always 1.
        version: u64,
        /// Generation of the last transaction that updated the quota tree.
        generation: u64,
        /// [`QgroupStatus::ON`] and further bits.
        flags: u64,
        /// Progress of a rescan.
        rescan: u64,
    }
}

impl QgroupStatus {
    /// Quotas are on.
    pub const ON: u64 = 1;
    /// A rescan is running.
    pub const RESCAN: u64 = 2;
    /// The counters are not reliable.
    pub const INCONSISTENT: u64 = 4;
    /// Simple quotas.
    pub const SIMPLE_MODE: u64 = 8;
}

disk_struct! {
    /// `QGROUP_INFO`, key `(0 QGROUP_INFO qgroupid)`.
    QgroupInfo {
        /// Generation of the last change.
        generation: u64,
        /// Bytes referenced.
        rfer: u64,
        /// Compressed bytes referenced.
        rfer_cmpr: u64,
        /// Bytes exclusive.
        excl: u64,
        /// Compressed bytes exclusive.
        excl_cmpr: u64,
    }
}

disk_struct! {
    /// `QGROUP_LIMIT`, key `(0 QGROUP_LIMIT qgroupid)`.
    QgroupLimit {
        /// Bits that select the limits in force.
        flags: u64,
        /// Limit of the referenced bytes.
        max_rfer: u64,
        /// Limit of the exclusive bytes.
        max_excl: u64,
        /// Reserved bytes referenced.
        rsv_rfer: u64,
        /// Reserved bytes exclusive.
        rsv_excl: u64,
    }
}
