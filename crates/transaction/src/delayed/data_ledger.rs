//! [`DataLedger`]: data extents between allocation and commit. The ledger lists the extents without an extent item and
//! the extents in new file extent items, and holds the checksums that are not in the csum tree yet.
//!
//! ```text
//! allocate -> Allocated -- put(EXTENT_DATA) --> Put in transaction N -- commit N finds a reference --> in the extent tree
//!                 |                                 |
//!                 +-- release_data -> free          +-- commit N finds none (overwritten, truncated) --> free
//! ```
//!
//! Owns the extents and the checksums, each under a lock. Lock order: extents -> frozen checksums -> active checksums;
//! no other lock is taken under these locks.
//!
//! Invariants:
//! - I1. `allocated` holds exactly the bytes that were allocated for data and that no extent item covers.
//! - I2. Checksums move only from active to frozen to the csum tree, and are looked up in this order.
//! - I3. A reference that the last commit has and the extent tree lacks is in `dropped`. After a power cut, the file with
//!   this reference has the extent again. So no other file may overwrite the extent before the running commit is durable.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use ubtrfs_format::{Ino, Logical, RootId};
use ubtrfs_space::{Extent, RefKey};

use crate::delayed::sector_csums::SectorCsums;

/// The user of an extent: subvolume, inode, and file offset minus offset into the extent.
pub(crate) type Referrer = (RootId, Ino, u64);

/// The extents that new file extent items refer to, by address.
type PutExtents = BTreeMap<Logical, PutExtent>;
/// Runs of checksums, by the address of the first sector of each run. A run covers consecutive sectors, even of several
/// extents.
type Csums = BTreeMap<u64, Vec<u8>>;

#[derive(Clone, Debug)]
struct PutExtent {
    len_bytes: u64,
    first: Referrer,
    /// Referrers besides the first; most extents have none.
    others: BTreeSet<Referrer>,
}

impl PutExtent {
    fn add(&mut self, referrer: Referrer) {
        if referrer != self.first {
            self.others.insert(referrer);
        }
    }

    fn has_other_than(&self, referrer: &Referrer) -> bool {
        self.first != *referrer || !self.others.is_empty()
    }
}

/// Tells whether other referrers than a given one use an extent, as far as the ledger knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OtherUsers {
    /// An item with another referrer was put since the last commit.
    Others,
    /// The extent has no extent item yet, and only this referrer put items.
    OnlyThis,
    /// No item was put since the last commit, but the extent has no extent item yet: it is the copy of an extent that a
    /// relocation is moving. Any files may use it.
    Unknown,
    /// No item with another referrer was put since the last commit. The extent item records the other users.
    Recorded,
}

/// Data extents and checksums that the trees do not record yet.
#[derive(Debug)]
pub(crate) struct DataLedger {
    sectorsize: u64,
    csum_size: usize,
    extents: Mutex<Extents>,
    active_csums: RwLock<Csums>,
    frozen_csums: RwLock<Arc<Csums>>,
}

#[derive(Debug, Default)]
struct Extents {
    /// The allocated ranges of I1: the end of each range by its start.
    allocated: BTreeMap<u64, u64>,
    active: PutExtents,
    frozen: PutExtents,
    /// References that the running commit dropped, of extents that still have others (I3).
    dropped: HashMap<Logical, Vec<RefKey>>,
}

impl DataLedger {
    /// A ledger with `csum_size` bytes of checksum per sector.
    pub(crate) fn new(sectorsize: u32, csum_size: usize) -> Self {
        Self {
            sectorsize: sectorsize.into(),
            csum_size,
            extents: Mutex::default(),
            active_csums: RwLock::default(),
            frozen_csums: RwLock::default(),
        }
    }

    /// Notes that these bytes were allocated.
    pub(crate) fn allocated(&self, extent: Extent) {
        insert_range(&mut self.extents.lock().allocated, extent.bytenr.0..extent.end());
    }

    /// Notes that these bytes are free again or covered by an extent item. Returns `false` if the bytes were not in
    /// `allocated`.
    pub(crate) fn forget_allocated(&self, extent: Extent) -> bool {
        remove_range(&mut self.extents.lock().allocated, extent.bytenr.0..extent.end())
    }

    /// Notes that extent items cover these extents, which are in address order. Tree blocks among the extents are
    /// ignored.
    pub(crate) fn forget_allocated_all(&self, extents: &[Extent]) {
        let allocated = &mut self.extents.lock().allocated;
        for run in extents.chunk_by(|extent, next| extent.end() == next.bytenr.0) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
            if !remove_range(allocated, first.bytenr.0..last.end()) {
                for extent in run {
                    remove_range(allocated, extent.bytenr.0..extent.end());
                }
            }
        }
    }

    /// Notes that a file extent item that refers to this extent was put.
    pub(crate) fn put(&self, extent: Extent, referrer: Referrer) {
        let mut extents = self.extents.lock();
        let new = || PutExtent { len_bytes: extent.len_bytes, first: referrer, others: BTreeSet::new() };
        extents.active.entry(extent.bytenr).or_insert_with(new).add(referrer);
    }

    /// Number of extents whose items were put in the running transaction.
    pub(crate) fn nr_put(&self) -> usize {
        self.extents.lock().active.len()
    }

    /// Tells whether other referrers than this one use an extent, as far as the ledger knows.
    pub(crate) fn users(&self, bytenr: Logical, referrer: &Referrer) -> OtherUsers {
        let extents = self.extents.lock();
        let mut puts = [&extents.active, &extents.frozen].into_iter().filter_map(|puts| puts.get(&bytenr)).peekable();
        let has_puts = puts.peek().is_some();
        if puts.any(|put| put.has_other_than(referrer)) {
            return OtherUsers::Others;
        }
        match covering(&extents.allocated, bytenr.0) {
            None => OtherUsers::Recorded,
            Some(_) if has_puts => OtherUsers::OnlyThis,
            Some(_) => OtherUsers::Unknown,
        }
    }

    /// The subvolume whose item was the first to refer to an extent of the frozen transaction.
    pub(crate) fn allocator(&self, bytenr: Logical) -> Option<RootId> {
        self.extents.lock().frozen.get(&bytenr).map(|put| put.first.0)
    }

    /// Adds the checksums of written sectors, which belong to one extent or to neighbouring extents.
    pub(crate) fn add_csums(&self, at: Logical, csums: Vec<u8>) {
        self.active_csums.write().insert(at.0, csums);
    }

    /// Moves the active extents and checksums to the frozen extents and checksums. The caller holds the gate
    /// exclusively.
    pub(crate) fn freeze(&self) {
        let mut extents = self.extents.lock();
        extents.frozen = std::mem::take(&mut extents.active);
        let mut frozen = self.frozen_csums.write();
        assert!(frozen.is_empty(), "I2: frozen checksums are not in the csum tree yet");
        *frozen = Arc::new(std::mem::take(&mut *self.active_csums.write()));
    }

    /// Takes the extents that were put in the frozen transaction and still have no extent item, because nothing refers
    /// to them. The taken extents leave `allocated`, and their checksums are dropped.
    pub(crate) fn take_unreferenced(&self) -> Vec<Extent> {
        let mut extents = self.extents.lock();
        let Extents { allocated, frozen, .. } = &mut *extents;
        let mut unreferenced = Vec::new();
        for (bytenr, put) in frozen.iter() {
            if remove_range(allocated, bytenr.0..bytenr.advance(put.len_bytes).0) {
                unreferenced.push(Extent { bytenr: *bytenr, len_bytes: put.len_bytes });
            }
        }
        drop(extents);
        if !unreferenced.is_empty() {
            let mut frozen = self.frozen_csums.write();
            let csums = Arc::make_mut(&mut frozen);
            for extent in &unreferenced {
                self.remove_csums(csums, extent.bytenr.0..extent.end());
            }
        }
        unreferenced
    }

    /// Removes the checksums of a range of sectors.
    #[allow(clippy::arithmetic_side_effects, reason = "entries are checksums of allocated extents")]
    fn remove_csums(&self, csums: &mut Csums, range: Range<u64>) {
        let bytes = |len_bytes: u64| (len_bytes / self.sectorsize) as usize * self.csum_size;
        while let Some((&start, sums)) = csums.range_mut(..range.end).next_back() {
            let end = start + self.covered_bytes(sums);
            if end <= range.start {
                return;
            }
            let behind = (end > range.end).then(|| sums.split_off(bytes(range.end - start)));
            if start < range.start {
                sums.truncate(bytes(range.start - start));
            } else {
                csums.remove(&start);
            }
            if let Some(behind) = behind {
                csums.insert(range.end, behind);
            }
        }
    }

    /// The checksums of the frozen transaction.
    pub(crate) fn frozen_csums(&self) -> Arc<Csums> {
        Arc::clone(&self.frozen_csums.read())
    }

    /// Drops the frozen checksums, which are in the csum tree now.
    pub(crate) fn csums_applied(&self) {
        *self.frozen_csums.write() = Arc::default();
    }

    /// Notes references that are about to leave the extent tree (I3).
    pub(crate) fn note_dropped(&self, references: Vec<(Logical, RefKey)>) {
        let dropped = &mut self.extents.lock().dropped;
        references.into_iter().for_each(|(bytenr, reference)| dropped.entry(bytenr).or_default().push(reference));
    }

    /// Whether references of other referrers are still in the last commit, although the extent tree may lack them (I3).
    pub(crate) fn others_had(&self, bytenr: Logical, (root, ino, offset): Referrer) -> bool {
        let own = RefKey::Data { root, ino, offset };
        let extents = self.extents.lock();
        extents.dropped.get(&bytenr).is_some_and(|dropped| dropped.iter().any(|reference| *reference != own))
    }

    /// Drops the frozen extents, and forgets the dropped references, when the commit is durable.
    pub(crate) fn drop_frozen(&self) {
        let mut extents = self.extents.lock();
        (extents.frozen, extents.dropped) = Default::default();
    }

    /// The parts of a range whose checksums are in the ledger and not in the csum tree yet. Parts may overlap. The
    /// range may be of any length: the work depends on the number of parts only.
    pub(crate) fn csum_parts(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut parts = Vec::new();
        let mut add = |csums: &Csums| {
            // An entry may start before the range and reach into it.
            let first = csums.range(..=range.start).next_back().map_or(range.start, |(start, _)| *start);
            let part = |(start, sums): (&u64, &Vec<u8>)| {
                let end = Logical(*start).advance(self.covered_bytes(sums));
                *start.max(&range.start)..end.0.min(range.end)
            };
            parts.extend(csums.range(first..range.end).map(part).filter(|part| !part.is_empty()));
        };
        add(&self.active_csums.read());
        let frozen = self.frozen_csums();
        add(&frozen);
        parts
    }

    /// Bytes of the sectors with these checksums.
    #[allow(clippy::arithmetic_side_effects, reason = "the sectors are a part of the address space")]
    fn covered_bytes(&self, sums: &[u8]) -> u64 {
        (sums.len() / self.csum_size) as u64 * self.sectorsize
    }

    /// The checksums of these sectors that are not in the csum tree yet.
    #[allow(
        clippy::arithmetic_side_effects,
        reason = "sectorsize is at least 4096, and a later start is above the first one"
    )]
    pub(crate) fn lookup_csums(&self, at: Logical, len_bytes: u64) -> SectorCsums {
        let (sectorsize, csum_size) = (self.sectorsize, self.csum_size);
        let mut found = SectorCsums::absent(usize::try_from(len_bytes / sectorsize).unwrap_or(usize::MAX), csum_size);
        let end = at.0.saturating_add(len_bytes);
        let mut fill = |csums: &Csums| {
            // An entry may start before the range and reach into it.
            let first = csums.range(..=at.0).next_back().map_or(at.0, |(start, _)| *start);
            for (start, sums) in csums.range(first..end) {
                let skipped = at.0.saturating_sub(*start) / sectorsize;
                let sums = sums.chunks_exact(csum_size).skip(usize::try_from(skipped).unwrap_or(usize::MAX));
                let sector = (start.max(&at.0) - at.0) / sectorsize;
                // Checksums past the range are ignored.
                let places = usize::try_from(sector).unwrap_or(usize::MAX)..found.len();
                places.zip(sums).for_each(|(place, sum)| found.fill(place, sum));
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
    let overlaps = ranges.range(..range.end).next_back().is_some_and(|(_, end)| *end > range.start);
    assert!(!overlaps, "I1: {range:?} is allocated twice");
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

/// Removes `range` if `ranges` cover all of it. Returns whether `range` was removed.
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

#[cfg(test)]
mod tests {
    use super::*;

    const SECTOR: u64 = 4096;

    fn ledger_with(csums: &[(u64, u64)]) -> DataLedger {
        let ledger = DataLedger::new(SECTOR as u32, 4);
        for (first, nr_sectors) in csums {
            let sums = (*first..first + nr_sectors).flat_map(|sector| (sector as u32).to_le_bytes()).collect();
            ledger.add_csums(Logical(first * SECTOR), sums);
        }
        ledger
    }

    /// The sectors of `range` that have checksums. Checks that each sector has its own checksum.
    fn found(ledger: &DataLedger, range: Range<u64>) -> Vec<u64> {
        let csums = ledger.lookup_csums(Logical(range.start * SECTOR), (range.end - range.start) * SECTOR);
        let sectors = range.clone().filter(|sector| {
            let sum = csums.get((sector - range.start) as usize);
            assert!(sum.is_none_or(|sum| sum == (*sector as u32).to_le_bytes()), "sector {sector}");
            sum.is_some()
        });
        sectors.collect()
    }

    #[test]
    fn checksums_of_neighbours_are_found_one_by_one() {
        let ledger = ledger_with(&[(10, 6), (20, 2)]);
        assert_eq!(found(&ledger, 0..30), [10, 11, 12, 13, 14, 15, 20, 21]);
        assert_eq!(found(&ledger, 12..14), [12, 13]);
        assert_eq!(found(&ledger, 15..21), [15, 20]);
        ledger.freeze();
        ledger.add_csums(Logical(9 * SECTOR), 9u32.to_le_bytes().to_vec());
        assert_eq!(found(&ledger, 9..11), [9, 10]);
        ledger.csums_applied();
        assert_eq!(found(&ledger, 0..30), [9]);
    }

    #[test]
    fn unreferenced_extents_are_freed_alone() {
        let ledger = ledger_with(&[(10, 6), (20, 2)]);
        let of = |first: u64, nr_sectors: u64| Extent::new(Logical(first * SECTOR), nr_sectors * SECTOR);
        for (number, extent) in [of(10, 2), of(12, 1), of(13, 3), of(20, 2)].into_iter().enumerate() {
            ledger.allocated(extent);
            ledger.put(extent, (RootId::FS_TREE, Ino(257), number as u64));
        }
        ledger.freeze();
        // These two extents have extent items now.
        assert!(ledger.forget_allocated(of(10, 2)) && ledger.forget_allocated(of(13, 3)));
        let mut gone = ledger.take_unreferenced();
        gone.sort_by_key(|extent| extent.bytenr);
        assert_eq!(gone, [of(12, 1), of(20, 2)]);
        assert_eq!(found(&ledger, 0..30), [10, 11, 13, 14, 15]);
        assert_eq!(ledger.frozen_csums().keys().map(|at| at / SECTOR).collect::<Vec<_>>(), [10, 13]);
    }

    #[test]
    fn a_second_referrer_is_told_from_the_first() {
        let ledger = ledger_with(&[]);
        let extent = Extent::new(Logical(SECTOR), SECTOR);
        let (one, two) = ((RootId::FS_TREE, Ino(257), 0), (RootId::FS_TREE, Ino(258), 0));
        ledger.allocated(extent);
        ledger.put(extent, one);
        ledger.put(extent, one);
        assert_eq!(ledger.users(extent.bytenr, &one), OtherUsers::OnlyThis);
        assert_eq!(ledger.users(extent.bytenr, &two), OtherUsers::Others);
        ledger.put(extent, two);
        assert_eq!(ledger.users(extent.bytenr, &one), OtherUsers::Others);
    }

    #[test]
    fn the_users_of_a_copy_are_unknown_until_it_has_an_extent_item() {
        let ledger = ledger_with(&[]);
        let extent = Extent::new(Logical(SECTOR), SECTOR);
        let referrer = (RootId::FS_TREE, Ino(257), 0);
        ledger.allocated(extent);
        assert_eq!(ledger.users(extent.bytenr, &referrer), OtherUsers::Unknown);
        ledger.forget_allocated_all(&[extent]);
        assert_eq!(ledger.users(extent.bytenr, &referrer), OtherUsers::Recorded);
    }
}
