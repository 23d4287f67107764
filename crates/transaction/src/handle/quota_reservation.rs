//! Space that is reserved for quota groups before it is used.
//!
//! ```text
//! held --spend, in the operation that puts the items--> running --freeze--> frozen --end of the commit--> counted
//!   \--drop--> free
//! ```
//!
//! Invariants:
//! - I1. Reservations are spent in the transaction of their items or in a later one, so bytes are counted before their
//!   reservation ends.
//! - I2. Beside its bytes, each reservation of data holds one tree block for the items of the data. If reservations are
//!   merged, because their data belongs to one inode, then each but the first holds only the bytes of its items
//!   ([`Need::item_bytes`]).
//! - I3. A reservation is split by the bytes of data that it covers, even if only the items of this data need space.
//!
//! Locks: the state of quotas ([`crate::qgroup`]) -> the reserved bytes.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use ubtrfs_format::RootId;

use crate::race::race_point;

/// Id of a quota group: the level in the upper 16 bits, a number in the lower 48 bits. A group of level 0 belongs to
/// the subvolume whose id equals the group's number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QgroupId(pub u64);

/// Bytes that are reserved for groups but not counted yet.
#[derive(Debug, Default)]
pub(crate) struct Reserved {
    groups: Mutex<HashMap<QgroupId, GroupReserved>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct GroupReserved {
    /// Bytes held by [`QuotaReservation`]s.
    held: u64,
    /// Bytes spent in the running transaction.
    running: u64,
    /// Bytes spent in the transaction that is being committed.
    frozen: u64,
}

/// Space promised to a writer within the limits of its quota groups. The reservation is empty if no group has limits.
/// Dropping the reservation returns the space.
#[derive(Debug, Default)]
#[must_use = "a reservation that is dropped at once holds nothing"]
pub struct QuotaReservation {
    parts: Vec<ReservedPart>,
}

/// The space that a writer needs within the limits of its quota groups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    /// Bytes of the written data, by which the reservation is split (I3).
    covered: u64,
    /// Bytes of new extents.
    data_bytes: u64,
    /// Bytes of tree blocks (I2).
    tree_bytes: u64,
    /// Bytes in tree blocks for the items alone (I2).
    item_bytes: u64,
    /// Size of a tree block.
    node_bytes: u64,
}

impl Need {
    /// New extents for this many bytes of data, with `nr_items` file extent items.
    pub(crate) fn new_data(bytes: u64, nr_items: u64, node_bytes: u64) -> Self {
        let tree_bytes = node_bytes.saturating_add(ITEM_BYTES.saturating_mul(nr_items.saturating_sub(1)));
        Self { covered: bytes, data_bytes: bytes, tree_bytes, item_bytes: ITEM_BYTES, node_bytes }
    }

    /// Data that is written into a preallocated extent, which is counted already. The extent's item is split into up to
    /// three.
    pub(crate) fn preallocated(bytes: u64, node_bytes: u64) -> Self {
        Self { covered: bytes, data_bytes: 0, tree_bytes: node_bytes, item_bytes: 2 * ITEM_BYTES, node_bytes }
    }

    /// A change of metadata that adds up to this many tree blocks.
    pub(crate) fn metadata(nr_blocks: u64, node_bytes: u64) -> Self {
        let tree_bytes = node_bytes.saturating_mul(nr_blocks);
        Self { covered: 0, data_bytes: 0, tree_bytes, item_bytes: ITEM_BYTES, node_bytes }
    }

    fn all_bytes(&self) -> u64 {
        self.data_bytes.saturating_add(self.tree_bytes)
    }
}

#[derive(Debug)]
struct ReservedPart {
    reserved: Arc<Reserved>,
    groups: Arc<[QgroupId]>,
    need: Need,
}

impl Reserved {
    /// Reserves space for all of these groups, or for no group. `fits` decides for each group whether the limits allow
    /// this number of reserved bytes, earlier reservations included.
    pub(crate) fn try_hold(
        self: &Arc<Self>,
        groups: Arc<[QgroupId]>,
        need: Need,
        fits: impl Fn(QgroupId, u64) -> bool,
    ) -> Option<QuotaReservation> {
        race_point();
        let part = ReservedPart { reserved: Arc::clone(self), groups, need };
        let mut reserved = self.groups.lock();
        let all_fit = part.groups.iter().all(|id| {
            let GroupReserved { held, running, frozen } = reserved.get(id).copied().unwrap_or_default();
            let sum = [held, running, frozen].iter().fold(part.all_bytes(), |sum, other| sum.saturating_add(*other));
            fits(*id, sum)
        });
        if !all_fit {
            return None;
        }
        for id in part.groups.iter() {
            let held = &mut reserved.entry(*id).or_default().held;
            *held = held.saturating_add(part.all_bytes());
        }
        drop(reserved);
        Some(QuotaReservation { parts: vec![part] })
    }

    /// Whether any [`QuotaReservation`] holds bytes.
    pub(crate) fn is_held(&self) -> bool {
        self.groups.lock().values().any(|group| group.held > 0)
    }

    /// Moves the spent bytes of the running transaction to the frozen transaction. The caller has closed the gate.
    pub(crate) fn freeze(&self) {
        for group in self.groups.lock().values_mut() {
            group.frozen = group.frozen.saturating_add(std::mem::take(&mut group.running));
        }
    }

    /// Drops the spent bytes of the frozen transaction, which quotas have counted.
    pub(crate) fn committed(&self) {
        self.groups.lock().retain(|_, group| {
            group.frozen = 0;
            group.held > 0 || group.running > 0
        });
    }
}

impl ReservedPart {
    fn all_bytes(&self) -> u64 {
        self.need.all_bytes()
    }

    /// Changes what the groups of this part hold.
    fn update(&self, change: impl Fn(&mut GroupReserved)) {
        let mut reserved = self.reserved.groups.lock();
        for id in self.groups.iter() {
            change(reserved.entry(*id).or_default());
        }
    }

    /// Releases the part. With `spend`, its space stays reserved until the running transaction is counted.
    fn give_back(&self, spend: bool) {
        self.update(|group| {
            debug_assert!(group.held >= self.all_bytes(), "I1: more ends than is reserved");
            group.held = group.held.saturating_sub(self.all_bytes());
            if spend {
                group.running = group.running.saturating_add(self.all_bytes());
            }
        });
    }

    /// Splits off a part that covers up to `bytes` of data (I3). Each part then holds a tree block at least, if this
    /// part did.
    fn split(&mut self, bytes: u64) -> Self {
        let whole = self.need;
        let covered = bytes.min(whole.covered);
        let (mut moved, mut left) = (whole, Need { covered: 0, data_bytes: 0, tree_bytes: 0, ..whole });
        if covered < whole.covered {
            let share = |total: u64| {
                let product = u128::from(total).saturating_mul(covered.into());
                let share = product.checked_div(whole.covered.into()).and_then(|share| u64::try_from(share).ok());
                share.unwrap_or(total)
            };
            let (data_bytes, tree_bytes) = (share(whole.data_bytes), share(whole.tree_bytes));
            let least = whole.tree_bytes.min(whole.node_bytes);
            moved = Need { covered, data_bytes, tree_bytes: tree_bytes.max(least), ..whole };
            left = Need {
                covered: whole.covered.saturating_sub(covered),
                data_bytes: whole.data_bytes.saturating_sub(data_bytes),
                tree_bytes: whole.tree_bytes.saturating_sub(tree_bytes).max(least),
                ..whole
            };
            let more = moved.all_bytes().saturating_add(left.all_bytes()).saturating_sub(whole.all_bytes());
            self.update(|group| group.held = group.held.saturating_add(more));
        }
        assert_eq!(
            moved.covered.saturating_add(left.covered),
            whole.covered,
            "I3: the parts cover other data than the whole"
        );
        self.need = left;
        Self { reserved: Arc::clone(&self.reserved), groups: Arc::clone(&self.groups), need: moved }
    }

    /// Adds a part of the same groups (I2).
    fn merge(&mut self, other: Self) {
        let (mut most, mut least) = (self.need, other.need);
        if most.tree_bytes < least.tree_bytes {
            std::mem::swap(&mut most, &mut least);
        }
        // A part that was merged itself holds the item bytes of all its reservations beside one tree block.
        let over_one = least.tree_bytes.saturating_sub(least.node_bytes);
        let kept = over_one.saturating_add(least.item_bytes).min(least.tree_bytes);
        self.need = Need {
            covered: most.covered.saturating_add(least.covered),
            data_bytes: most.data_bytes.saturating_add(least.data_bytes),
            tree_bytes: most.tree_bytes.saturating_add(kept),
            item_bytes: most.item_bytes.max(least.item_bytes),
            node_bytes: most.node_bytes,
        };
        let spare = least.tree_bytes.saturating_sub(kept);
        if spare > 0 {
            self.update(|group| {
                debug_assert!(group.held >= spare, "I2: a merge frees more than is reserved");
                group.held = group.held.saturating_sub(spare);
            });
        }
    }
}

/// Bytes of tree blocks to reserve for one range of dirty data that has no dirty neighbour. Covers a file extent item
/// with its header, and a share of the parent nodes. Assumes leaves that are half full, as after a split.
const ITEM_BYTES: u64 = 192;

impl QuotaReservation {
    /// The bytes of data that the reservation covers.
    pub(crate) fn covered(&self) -> u64 {
        self.parts.iter().fold(0, |sum, part| sum.saturating_add(part.need.covered))
    }

    /// Moves the space for up to `bytes` of data from another reservation to this one.
    pub(crate) fn take_from(&mut self, other: &mut Self, mut bytes: u64) {
        while bytes > 0
            && let Some(part) = other.parts.last_mut()
        {
            let moved = part.split(bytes);
            bytes = bytes.saturating_sub(moved.need.covered);
            if part.need.covered == 0 {
                other.parts.pop();
            }
            match self.parts.iter_mut().find(|known| Arc::ptr_eq(&known.groups, &moved.groups)) {
                Some(known) => known.merge(moved),
                None => self.parts.push(moved),
            }
        }
    }

    /// Splits off the space for up to `bytes` of data into another reservation.
    pub(crate) fn split(&mut self, bytes: u64) -> Self {
        let mut other = Self::default();
        other.take_from(self, bytes);
        other
    }

    /// Adds another reservation to this one.
    pub fn merge(&mut self, mut other: Self) {
        self.take_from(&mut other, u64::MAX);
    }

    /// Marks the space as used by items of the running transaction. Must be called before the operation ends (I1).
    pub fn spend(mut self) {
        self.parts.drain(..).for_each(|part| part.give_back(true));
    }
}

impl Drop for QuotaReservation {
    fn drop(&mut self) {
        self.parts.drain(..).for_each(|part| part.give_back(false));
    }
}

impl QgroupId {
    const LEVEL_SHIFT: u32 = 48;

    /// The group of a subvolume.
    pub fn of_subvolume(id: RootId) -> Self {
        Self(id.0)
    }

    /// The id with this level and number; `None` if the number needs more than 48 bits.
    pub fn new(level: u16, number: u64) -> Option<Self> {
        (number >> Self::LEVEL_SHIFT == 0).then_some(Self(u64::from(level) << Self::LEVEL_SHIFT | number))
    }

    /// The level.
    pub fn level(self) -> u16 {
        u16::try_from(self.0 >> Self::LEVEL_SHIFT).unwrap_or(u16::MAX)
    }

    /// The number of the group within its level.
    pub fn number(self) -> u64 {
        self.0 & ((1 << Self::LEVEL_SHIFT) - 1)
    }
}

impl std::fmt::Display for QgroupId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.level(), self.number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: QgroupId = QgroupId(256);
    const NODE: u64 = 16 << 10;

    fn hold(reserved: &Arc<Reserved>, need: Need) -> QuotaReservation {
        reserved.try_hold(Arc::new([GROUP]), need, |_, _| true).expect("it fits")
    }

    fn bytes(reserved: &Reserved) -> (u64, u64) {
        let groups = reserved.groups.lock();
        groups.get(&GROUP).map_or((0, 0), |group| (group.held, group.running))
    }

    #[test]
    fn merged_reservations_of_preallocated_data_hold_one_tree_block_and_items() {
        let reserved = Arc::new(Reserved::default());
        let mut all = QuotaReservation::default();
        let shared: Arc<[QgroupId]> = Arc::new([GROUP]);
        for _ in 0..10 {
            let need = Need::preallocated(4096, NODE);
            let mut one = reserved.try_hold(Arc::clone(&shared), need, |_, _| true).expect("it fits");
            all.take_from(&mut one, 4096);
        }
        assert_eq!((all.covered(), bytes(&reserved)), (40960, (NODE + 9 * 2 * ITEM_BYTES, 0)));
        // Each part keeps its share, but at least a tree block.
        let half = all.split(20480);
        assert_eq!((half.covered(), all.covered()), (20480, 20480));
        assert!(bytes(&reserved).0 >= 2 * NODE);
        half.spend();
        drop(all);
        let (held, running) = bytes(&reserved);
        assert!(held == 0 && running >= NODE, "{held} {running}");
    }

    #[test]
    fn no_bytes_are_lost_by_splits_and_merges() {
        let reserved = Arc::new(Reserved::default());
        let mut data = hold(&reserved, Need::new_data(1 << 20, 5, NODE));
        assert_eq!(bytes(&reserved).0, (1 << 20) + NODE + 4 * ITEM_BYTES);
        let mut parts: Vec<_> = (0..7).map(|nr| data.split(4096 << nr)).collect();
        data.merge(hold(&reserved, Need::metadata(5, NODE)));
        for part in parts.drain(1..) {
            data.merge(part);
        }
        assert_eq!(data.covered() + parts[0].covered(), 1 << 20);
        drop((data, parts));
        assert_eq!(bytes(&reserved), (0, 0));
    }
}
