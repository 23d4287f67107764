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
//!   merged, because their data belongs to one inode, then each but the first holds only [`ITEM_BYTES`].
//!
//! Locks: the state of quotas ([`crate::qgroup`]) -> the reserved bytes.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use ubtrfs_format::RootId;

/// Id of a quota group: the level in the upper 16 bits, a number in the lower 48 bits. A group of level 0 belongs to
/// the subvolume whose id equals the group's number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QgroupId(pub u64);

/// Space that is reserved for groups but not counted yet.
#[derive(Debug, Default)]
pub(crate) struct Reserved {
    groups: Mutex<HashMap<QgroupId, GroupReserved>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct GroupReserved {
    /// Space held by [`QuotaReservation`]s.
    held: Amount,
    /// Space spent in the running transaction.
    running: Amount,
    /// Space spent in the transaction that is being committed.
    frozen: Amount,
}

/// An amount of reserved space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    pub(crate) bytes: u64,
    /// Bytes of tree blocks, in addition to `bytes` (I2).
    pub(crate) tree_bytes: u64,
}

impl Amount {
    fn add(&mut self, other: Self) {
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.tree_bytes = self.tree_bytes.saturating_add(other.tree_bytes);
    }

    fn subtract(&mut self, other: Self) {
        self.bytes = self.bytes.saturating_sub(other.bytes);
        self.tree_bytes = self.tree_bytes.saturating_sub(other.tree_bytes);
    }
}

/// Space promised to a writer within the limits of its quota groups. The reservation is empty if no group has limits.
/// Dropping the reservation returns the space.
#[derive(Debug, Default)]
#[must_use = "a reservation that is dropped at once holds nothing"]
pub struct QuotaReservation {
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    reserved: Arc<Reserved>,
    groups: Arc<[QgroupId]>,
    node_bytes: u64,
    amount: Amount,
}

impl Reserved {
    /// Reserves space for all of these groups, or for none. `fits` decides for each group whether the limits allow this
    /// amount of reserved space, earlier reservations included.
    pub(crate) fn try_hold(
        self: &Arc<Self>,
        groups: Arc<[QgroupId]>,
        node_bytes: u64,
        amount: Amount,
        fits: impl Fn(QgroupId, Amount) -> bool,
    ) -> Option<QuotaReservation> {
        let mut reserved = self.groups.lock();
        let all_fit = groups.iter().all(|id| {
            let GroupReserved { held, running, frozen } = reserved.get(id).copied().unwrap_or_default();
            let mut sum = amount;
            [held, running, frozen].into_iter().for_each(|part| sum.add(part));
            fits(*id, sum)
        });
        if !all_fit {
            return None;
        }
        for id in groups.iter() {
            reserved.entry(*id).or_default().held.add(amount);
        }
        drop(reserved);
        let part = Part { reserved: Arc::clone(self), groups, node_bytes, amount };
        Some(QuotaReservation { parts: vec![part] })
    }

    /// Moves the spent space of the running transaction to the frozen transaction. The caller has closed the gate.
    pub(crate) fn freeze(&self) {
        for group in self.groups.lock().values_mut() {
            group.frozen.add(std::mem::take(&mut group.running));
        }
    }

    /// Drops the spent space of the frozen transaction, which quotas have counted.
    pub(crate) fn committed(&self) {
        self.groups.lock().retain(|_, group| {
            group.frozen = Amount::default();
            group.held != Amount::default() || group.running != Amount::default()
        });
    }
}

impl Part {
    /// Releases the part. With `spend`, its space stays reserved until the running transaction is counted.
    fn give_back(self, spend: bool) {
        let mut reserved = self.reserved.groups.lock();
        for id in self.groups.iter() {
            let group = reserved.entry(*id).or_default();
            group.held.subtract(self.amount);
            if spend {
                group.running.add(self.amount);
            }
        }
    }

    /// Splits off up to `bytes`, with their share of the tree bytes. Each part then holds a tree block at least, if this
    /// part did.
    fn split(&mut self, bytes: u64) -> Self {
        let all = self.amount;
        let bytes = bytes.min(all.bytes);
        let mut moved = Amount { bytes, ..all };
        if bytes < all.bytes {
            let product = u128::from(all.tree_bytes).saturating_mul(bytes.into());
            let share = product.checked_div(all.bytes.into()).and_then(|share| u64::try_from(share).ok());
            let share = share.unwrap_or(all.tree_bytes);
            let least = all.tree_bytes.min(self.node_bytes);
            moved.tree_bytes = share.max(least);
            let left = Amount {
                bytes: all.bytes.saturating_sub(bytes),
                tree_bytes: all.tree_bytes.saturating_sub(share).max(least),
            };
            let more = moved.tree_bytes.saturating_add(left.tree_bytes).saturating_sub(all.tree_bytes);
            let mut reserved = self.reserved.groups.lock();
            for id in self.groups.iter() {
                reserved.entry(*id).or_default().held.add(Amount { bytes: 0, tree_bytes: more });
            }
            drop(reserved);
            self.amount = left;
        } else {
            self.amount = Amount::default();
        }
        let (reserved, groups) = (Arc::clone(&self.reserved), Arc::clone(&self.groups));
        Self { reserved, groups, node_bytes: self.node_bytes, amount: moved }
    }

    /// Adds a part of the same groups (I2).
    fn merge(&mut self, mut other: Self) {
        let (most, least) = if self.amount.tree_bytes < other.amount.tree_bytes {
            (other.amount.tree_bytes, self.amount.tree_bytes)
        } else {
            (self.amount.tree_bytes, other.amount.tree_bytes)
        };
        // A part that was merged itself holds the item bytes of all its reservations beside one tree block.
        let kept = least.saturating_sub(self.node_bytes).saturating_add(ITEM_BYTES).min(least);
        self.amount = Amount {
            bytes: self.amount.bytes.saturating_add(other.amount.bytes),
            tree_bytes: most.saturating_add(kept),
        };
        other.amount = Amount { bytes: 0, tree_bytes: least.saturating_sub(kept) };
        if other.amount.tree_bytes > 0 {
            other.give_back(false);
        }
    }
}

/// Bytes in tree blocks for the items of data that is not adjacent to other dirty data: a file extent item and its
/// header, in a leaf that is half full after a split, and the share of the leaf's parents.
const ITEM_BYTES: u64 = 192;

impl QuotaReservation {
    /// Moves up to `bytes` from another reservation to this one.
    pub(crate) fn take_from(&mut self, other: &mut Self, mut bytes: u64) {
        while bytes > 0
            && let Some(part) = other.parts.last_mut()
        {
            let moved = part.split(bytes);
            bytes = bytes.saturating_sub(moved.amount.bytes);
            if part.amount.bytes == 0 {
                other.parts.pop();
            }
            match self.parts.iter_mut().find(|known| Arc::ptr_eq(&known.groups, &moved.groups)) {
                Some(known) => known.merge(moved),
                None => self.parts.push(moved),
            }
        }
    }

    /// Splits off up to `bytes` into another reservation.
    pub(crate) fn split(&mut self, bytes: u64) -> Self {
        let mut other = Self::default();
        other.take_from(self, bytes);
        other
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
