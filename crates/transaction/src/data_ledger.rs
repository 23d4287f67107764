//! Data extents between allocation and commit: which have no extent item yet, which were put into file extent items,
//! and the checksums that are not in the csum tree yet.
//!
//! ```text
//! allocate -> Allocated -- put(EXTENT_DATA) --> Put in epoch N -- commit N finds a reference --> in the extent tree
//!                 |                                 |
//!                 +-- release_data -> free          +-- commit N finds none (overwritten, truncated) --> free
//! ```
//!
//! Invariants:
//! - I1. `allocated` holds exactly the bytes that space gave out as data and that no extent item covers.
//! - I2. Checksums are looked up in the order active, frozen, csum tree; they move in that direction only.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use ubtrfs_format::{Ino, Logical, RootId};
use ubtrfs_space::Extent;

use crate::csum_tree::SectorCsums;

/// Who put a file extent item: subvolume, inode, and file offset minus offset into the extent.
pub(crate) type Referrer = (RootId, Ino, u64);

type Puts = HashMap<Logical, PutExtent>;
type Csums = BTreeMap<u64, Vec<u8>>;

#[derive(Clone, Debug)]
struct PutExtent {
    len_bytes: u64,
    referrers: HashSet<Referrer>,
}

#[derive(Debug, Default)]
pub(crate) struct DataLedger {
    extents: Mutex<Extents>,
    active_csums: RwLock<Csums>,
    frozen_csums: RwLock<Arc<Csums>>,
}

#[derive(Debug, Default)]
struct Extents {
    /// Start to end of the ranges of I1.
    allocated: BTreeMap<u64, u64>,
    active: Puts,
    frozen: Puts,
}

impl DataLedger {
    /// Space gave out these bytes.
    pub(crate) fn allocated(&self, extent: Extent) {
        insert_range(&mut self.extents.lock().allocated, extent.bytenr.0..extent.bytenr.0 + extent.len_bytes);
    }

    /// These bytes are free again, or an extent item covers them; `false` where they were not in `allocated`.
    pub(crate) fn settled(&self, extent: Extent) -> bool {
        remove_range(&mut self.extents.lock().allocated, extent.bytenr.0..extent.bytenr.0 + extent.len_bytes)
    }

    /// A file extent item that refers to this extent was put.
    pub(crate) fn put(&self, extent: Extent, referrer: Referrer) {
        let mut extents = self.extents.lock();
        let entry = extents.active.entry(extent.bytenr);
        entry
            .or_insert_with(|| PutExtent { len_bytes: extent.len_bytes, referrers: HashSet::new() })
            .referrers
            .insert(referrer);
    }

    /// Whether an item of another file than `referrer` was put since the last commit, and whether the extent has no
    /// extent item yet.
    pub(crate) fn other_referrers(&self, bytenr: Logical, referrer: &Referrer) -> (bool, bool) {
        let extents = self.extents.lock();
        let others = [&extents.active, &extents.frozen]
            .into_iter()
            .filter_map(|puts| puts.get(&bytenr))
            .any(|put| put.referrers.iter().any(|other| other != referrer));
        (others, covering(&extents.allocated, bytenr.0).is_some())
    }

    /// Adds the checksums of an extent written before.
    pub(crate) fn add_csums(&self, at: Logical, csums: Vec<u8>) {
        self.active_csums.write().insert(at.0, csums);
    }

    /// Starts the commit of an epoch; the caller holds the gate exclusively.
    pub(crate) fn freeze(&self) {
        let mut extents = self.extents.lock();
        extents.frozen = std::mem::take(&mut extents.active);
        let mut frozen = self.frozen_csums.write();
        *frozen = Arc::new(std::mem::take(&mut *self.active_csums.write()));
    }

    /// The extents put in the frozen epoch that still have no extent item: nothing refers to them. They leave
    /// `allocated`, and their checksums are dropped.
    pub(crate) fn take_unreferenced(&self) -> Vec<Extent> {
        let mut extents = self.extents.lock();
        let Extents { allocated, frozen, .. } = &mut *extents;
        let mut unreferenced = Vec::new();
        for (bytenr, put) in frozen.iter() {
            if remove_range(allocated, bytenr.0..bytenr.0 + put.len_bytes) {
                unreferenced.push(Extent { bytenr: *bytenr, len_bytes: put.len_bytes });
            }
        }
        drop(extents);
        if !unreferenced.is_empty() {
            let mut frozen = self.frozen_csums.write();
            let csums = Arc::make_mut(&mut frozen);
            for extent in &unreferenced {
                let end = extent.bytenr.0 + extent.len_bytes;
                let keys: Vec<u64> = csums.range(extent.bytenr.0..end).map(|(at, _)| *at).collect();
                keys.iter().for_each(|at| drop(csums.remove(at)));
            }
        }
        unreferenced
    }

    /// The checksums of the frozen epoch.
    pub(crate) fn frozen_csums(&self) -> Arc<Csums> {
        Arc::clone(&self.frozen_csums.read())
    }

    /// The frozen epoch's checksums are in the csum tree now.
    pub(crate) fn csums_applied(&self) {
        *self.frozen_csums.write() = Arc::default();
    }

    /// The commit is over.
    pub(crate) fn thaw(&self) {
        self.extents.lock().frozen = Puts::new();
    }

    /// The checksums of these sectors that are not in the csum tree yet.
    pub(crate) fn lookup_csums(&self, at: Logical, len_bytes: u64, sectorsize: u64, csum_size: usize) -> SectorCsums {
        let mut found = SectorCsums::absent(usize::try_from(len_bytes / sectorsize).unwrap_or(usize::MAX), csum_size);
        let end = at.0 + len_bytes;
        let mut fill = |csums: &Csums| {
            // An entry may start before the range and reach into it.
            let first = csums.range(..=at.0).next_back().map_or(at.0, |(start, _)| *start);
            for (start, sums) in csums.range(first..end) {
                for (index, sum) in sums.chunks_exact(csum_size).enumerate() {
                    let sector = start + index as u64 * sectorsize;
                    if (at.0..end).contains(&sector) {
                        found.fill(usize::try_from((sector - at.0) / sectorsize).unwrap_or(usize::MAX), sum);
                    }
                }
            }
        };
        fill(&self.active_csums.read());
        let frozen = self.frozen_csums();
        fill(&frozen);
        found
    }
}

fn covering(ranges: &BTreeMap<u64, u64>, at: u64) -> Option<Range<u64>> {
    let (start, end) = ranges.range(..=at).next_back()?;
    (at < *end).then_some(*start..*end)
}

fn insert_range(ranges: &mut BTreeMap<u64, u64>, mut range: Range<u64>) {
    if let Some((start, end)) = ranges.range(..=range.start).next_back().map(|(start, end)| (*start, *end))
        && end == range.start
    {
        ranges.remove(&start);
        range.start = start;
    }
    if let Some(end) = ranges.remove(&range.end) {
        range.end = end;
    }
    ranges.insert(range.start, range.end);
}

/// Removes `range` where it is covered as a whole.
fn remove_range(ranges: &mut BTreeMap<u64, u64>, range: Range<u64>) -> bool {
    let Some(outer) = covering(ranges, range.start).filter(|outer| range.end <= outer.end) else { return false };
    ranges.remove(&outer.start);
    if outer.start < range.start {
        ranges.insert(outer.start, range.start);
    }
    if range.end < outer.end {
        ranges.insert(range.end, outer.end);
    }
    true
}
