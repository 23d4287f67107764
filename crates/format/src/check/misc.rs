//! Small items: orphans, quota groups, device statistics.

use super::bad;
use super::item::{Check, CheckedItem};
use crate::ids::objectid;
use crate::item::QgroupStatus;

pub(super) fn check_orphan(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "OrphanItem";
    if item.key.objectid != objectid::ORPHAN {
        return Err(bad(WHAT, "key objectid", item.key.objectid, "expected the orphan objectid"));
    }
    item.exact_size(WHAT, 0)
}

pub(super) fn check_qgroup_status(item: &CheckedItem<'_>) -> Check {
    const WHAT: &str = "QgroupStatus";
    if item.key.objectid != 0 || item.key.offset != 0 {
        return Err(bad(WHAT, "key offset", item.key.objectid | item.key.offset, "expected the key (0 240 0)"));
    }
    // With simple quotas, the item has 8 more bytes: the generation in which simple quotas were enabled.
    if item.data.len() == QgroupStatus::SIZE + 8 {
        return Ok(());
    }
    item.exact_size(WHAT, QgroupStatus::SIZE)
}

/// Checks device statistics, the only known kind of persistent item.
pub(super) fn check_persistent(item: &CheckedItem<'_>) -> Check {
    if item.key.objectid != objectid::DEV_STATS {
        return Ok(());
    }
    item.multiple_size("DevStatsItem", 8)
}
