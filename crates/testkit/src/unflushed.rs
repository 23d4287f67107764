//! [`Unflushed`]: the sectors that were written to a device since its last completed flush, with their old content.
//!
//! I1. Losing the unflushed writes leaves each sector with its old or its new content.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use ubtrfs_device::Device;

use crate::Rng;

const SECTOR: usize = 4096;

/// The old content of sectors that are written and not flushed.
#[derive(Debug, Default)]
pub(crate) struct Unflushed {
    old: BTreeMap<u64, Vec<u8>>,
}

impl Unflushed {
    /// Remembers what a write will overwrite. Sectors that cannot be read are not remembered.
    pub(crate) fn before_write(&mut self, device: &dyn Device, offset: u64, len: usize) {
        let end = offset.saturating_add(len as u64);
        let mut at = offset / SECTOR as u64 * SECTOR as u64;
        while at < end {
            if let Entry::Vacant(place) = self.old.entry(at) {
                let len = device.len_bytes().saturating_sub(at).min(SECTOR as u64) as usize;
                let mut old = vec![0; len];
                if device.read_at(at, &mut old).is_ok() {
                    place.insert(old);
                }
            }
            at += SECTOR as u64;
        }
    }

    /// A flush completed.
    pub(crate) fn flushed(&mut self) {
        self.old.clear();
    }

    /// Loses each sector or keeps it (I1).
    pub(crate) fn lose(&mut self, device: &dyn Device, rng: &mut Rng) {
        for (offset, old) in std::mem::take(&mut self.old) {
            if rng.one_in(2) {
                // A sector that cannot be written keeps its new content.
                let _ = device.write_at(offset, &old);
            }
        }
    }
}
