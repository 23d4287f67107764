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
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    reserved: Arc<Reserved>,
    groups: Arc<[QgroupId]>,
    bytes: u64,
}

impl Reserved {
    /// Reserves bytes for all of these groups, or for none. `fits` decides for each group whether the limits allow this
    /// number of reserved bytes, earlier reservations included.
    pub(crate) fn try_hold(
        self: &Arc<Self>,
        groups: Arc<[QgroupId]>,
        bytes: u64,
        fits: impl Fn(QgroupId, u64) -> bool,
    ) -> Option<QuotaReservation> {
        let mut reserved = self.groups.lock();
        let all_fit = groups.iter().all(|id| {
            let GroupReserved { held, running, frozen } = reserved.get(id).copied().unwrap_or_default();
            let sum = [held, running, frozen].iter().fold(bytes, |sum, part| sum.saturating_add(*part));
            fits(*id, sum)
        });
        if !all_fit {
            return None;
        }
        for id in groups.iter() {
            let held = &mut reserved.entry(*id).or_default().held;
            *held = held.saturating_add(bytes);
        }
        drop(reserved);
        let part = Part { reserved: Arc::clone(self), groups, bytes };
        Some(QuotaReservation { parts: vec![part] })
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

impl Part {
    fn give_back(&self, bytes: u64, spend: bool) {
        let mut reserved = self.reserved.groups.lock();
        for id in self.groups.iter() {
            let group = reserved.entry(*id).or_default();
            group.held = group.held.saturating_sub(bytes);
            if spend {
                group.running = group.running.saturating_add(bytes);
            }
        }
    }
}

impl QuotaReservation {
    /// Moves up to `bytes` from another reservation to this one.
    #[allow(clippy::arithmetic_side_effects, reason = "`moved` is at most either number")]
    pub(crate) fn take_from(&mut self, other: &mut Self, mut bytes: u64) {
        while bytes > 0
            && let Some(part) = other.parts.last_mut()
        {
            let moved = bytes.min(part.bytes);
            part.bytes -= moved;
            bytes -= moved;
            match self.parts.iter_mut().find(|known| Arc::ptr_eq(&known.groups, &part.groups)) {
                Some(known) => known.bytes = known.bytes.saturating_add(moved),
                None => {
                    let (reserved, groups) = (Arc::clone(&part.reserved), Arc::clone(&part.groups));
                    self.parts.push(Part { reserved, groups, bytes: moved });
                }
            }
            if part.bytes == 0 {
                other.parts.pop();
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
        self.parts.drain(..).for_each(|part| part.give_back(part.bytes, true));
    }
}

impl Drop for QuotaReservation {
    fn drop(&mut self) {
        self.parts.drain(..).for_each(|part| part.give_back(part.bytes, false));
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
