//! Data extents: allocating, writing, and reading with verified checksums.

use std::io::IoSlice;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{ExtentItem, InlineRef, RegularExtent};
use ubtrfs_format::{Corrupt, Generation, Ino, Key, KeyType, Logical, RootId};
use ubtrfs_space::{Extent, Reservation, SpaceKind};

use crate::delayed::data_ledger::{OtherUsers, Referrer};
use crate::delayed::sector_csums::SectorCsums;
use crate::engine::Engine;
use crate::extents::csum_tree;
use crate::handle::quota_reservation::QuotaReservation;
use crate::race::race_point;

/// Data space promised to a writer.
#[must_use = "a reservation that is dropped at once holds nothing"]
#[derive(Debug)]
pub struct DataReservation {
    pub(crate) inner: Reservation,
    /// The part of the space that is reserved within the limits of quota groups.
    pub(crate) quota: QuotaReservation,
}

impl DataReservation {
    /// The bytes that the reservation still holds.
    pub fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    /// The bytes of data that the reservation covers: the bytes that it holds, and, if there are limits, the bytes that
    /// go to preallocated extents.
    pub fn covered(&self) -> u64 {
        self.inner.bytes().max(self.quota.covered())
    }

    /// Adds another reservation to this one.
    pub fn merge(&mut self, mut other: Self) {
        self.quota.take_from(&mut other.quota, u64::MAX);
        self.inner.merge(other.inner);
    }

    /// Moves up to `bytes` from another reservation to this one.
    pub fn take_from(&mut self, other: &mut Self, bytes: u64) {
        self.inner.take_from(&mut other.inner, bytes);
        self.quota.take_from(&mut other.quota, bytes);
    }

    /// Splits off up to `bytes` into another reservation.
    pub fn split(&mut self, bytes: u64) -> Self {
        let quota = self.quota.split(bytes);
        Self { inner: self.inner.split(bytes.min(self.inner.bytes())), quota }
    }

    /// Splits off up to `bytes` into another reservation, but keeps `kept` bytes of space. The part that is reserved
    /// within the limits of quota groups is split by `bytes` alone.
    pub fn split_keeping(&mut self, bytes: u64, kept: u64) -> Self {
        let quota = self.quota.split(bytes);
        Self { inner: self.inner.split(bytes.min(self.inner.bytes().saturating_sub(kept))), quota }
    }

    /// Takes up to `bytes` of the part that is reserved within the limits of quota groups.
    pub fn take_quota(&mut self, bytes: u64) -> QuotaReservation {
        self.quota.split(bytes)
    }

    /// Adds `quota` to the part that is reserved within the limits of quota groups.
    pub fn add_quota(&mut self, mut quota: QuotaReservation) {
        self.quota.take_from(&mut quota, u64::MAX);
    }
}

/// A data extent that was allocated and that no extent item records yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataExtent {
    /// The start address of the extent.
    pub bytenr: Logical,
    /// The length of the extent in bytes, a multiple of the sector size.
    pub len_bytes: u64,
}

impl Engine {
    /// Makes a reservation of no bytes, for [`Engine::release_data_promised`] and [`DataReservation::merge`].
    pub fn empty_data_reservation(&self) -> DataReservation {
        let inner = self.space.reserve(SpaceKind::Data, 0).expect("no bytes always fit");
        DataReservation { inner, quota: QuotaReservation::default() }
    }

    /// Allocates `want` bytes in one piece or, if there is no such piece, a shorter piece of at least `min` bytes. Both
    /// numbers are multiples of the sector size. The reservation has at least `want` bytes, and shrinks by the
    /// allocated bytes.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`] if no piece is large enough, or [`Error::ReadOnly`].
    pub fn allocate_data(
        &self,
        reservation: &mut DataReservation,
        want: u64,
        min: u64,
        hint: Option<Logical>,
    ) -> Result<DataExtent> {
        self.check_writable()?;
        #[cfg(debug_assertions)]
        crate::handle::refusal::check()?;
        debug_assert!(want <= reservation.inner.bytes(), "the caller reserved less than it allocates");
        let extent = self.allocate_or_make_chunk(SpaceKind::Data, want, min, hint)?.ok_or(Error::NoSpace)?;
        reservation.inner.consume(extent.len_bytes.min(reservation.inner.bytes()));
        self.ledger.allocated(extent);
        Ok(DataExtent { bytenr: extent.bytenr, len_bytes: extent.len_bytes })
    }

    /// Releases an extent, or a part of an extent, for which no file extent item was put.
    pub fn release_data(&self, extent: DataExtent) {
        let extent = Extent::new(extent.bytenr, extent.len_bytes);
        if self.ledger.forget_allocated(extent) {
            self.space.release(extent);
        }
    }

    /// Releases an extent as [`Engine::release_data`] does, and adds its bytes to `reservation`, because its data is
    /// still dirty.
    pub fn release_data_promised(&self, extent: DataExtent, reservation: &mut DataReservation) {
        let extent = Extent::new(extent.bytenr, extent.len_bytes);
        if self.ledger.forget_allocated(extent) {
            self.space.release_to_reservation(extent, &mut reservation.inner);
        }
    }

    /// Writes an allocated extent, or a part of it, to all copies.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if a copy could not be written, or [`Error::ReadOnly`].
    pub fn write_data(&self, at: Logical, data: &[u8]) -> Result<()> {
        self.check_writable()?;
        self.abort_state.check_still_ours(&self.volumes)?;
        self.volumes.write(at, data)
    }

    /// Writes several buffers consecutively into an allocated extent. With `verifiable`, the data gets checksums, and
    /// one written copy is enough.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if fewer copies could be written than needed, or [`Error::ReadOnly`].
    pub fn write_data_vectored(&self, at: Logical, bufs: &[IoSlice<'_>], verifiable: bool) -> Result<()> {
        self.check_writable()?;
        self.abort_state.check_still_ours(&self.volumes)?;
        if verifiable { self.volumes.write_verifiable(at, bufs) } else { self.volumes.write_vectored(at, bufs) }
    }

    /// Reads whole sectors. With `verify`, each sector must match its checksum in one of the copies, and bad copies are
    /// repaired.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] with the address of a sector that is bad in all copies, or [`Error::Io`] if no copy can be
    /// read.
    pub fn read_data(&self, at: Logical, buf: &mut [u8], verify: bool) -> Result<()> {
        self.enter();
        let sectorsize = usize::try_from(self.geometry.sectorsize).unwrap_or(usize::MAX);
        if !verify {
            return self.volumes.read_unverified(self.moved.current(at), buf, sectorsize);
        }
        let rescue = self.options.rescue;
        let (at, csums) = match self.current_csums_of(at, buf.len() as u64) {
            Err(error) if rescue.ignore_bad_roots => {
                tracing::warn!("data at {at} is not verified: {error}");
                return self.volumes.read_unverified(at, buf, sectorsize);
            }
            found => found?,
        };
        match self.read_sectors(at, buf, &csums, true) {
            // R2 of rescue: only the sectors without a good copy are returned damaged.
            Err(Error::Corrupt(_)) if rescue.ignore_data_csums && buf.len() > sectorsize => {
                let offsets = (0u64..).step_by(sectorsize);
                offsets
                    .zip(buf.chunks_mut(sectorsize))
                    .try_for_each(|(offset, sector)| self.read_data(Logical(at.0.saturating_add(offset)), sector, true))
            }
            Err(error @ Error::Corrupt(_)) if rescue.ignore_data_csums => {
                tracing::warn!("data at {at} is returned though it is damaged: {error}");
                self.volumes.read_unverified(at, buf, sectorsize)
            }
            read => read,
        }
    }

    /// Reads whole sectors and compares them with their checksums. With `all`, a sector without a checksum is an error.
    pub(crate) fn read_sectors(&self, at: Logical, buf: &mut [u8], csums: &SectorCsums, all: bool) -> Result<()> {
        let csum_type = self.geometry.csum_type;
        let sectorsize = usize::try_from(self.geometry.sectorsize).unwrap_or(usize::MAX);
        let bad_sector = std::cell::Cell::new(0);
        let check = |index: usize, sector: &[u8]| match csums.get(index) {
            None if !all => Ok(()),
            stored => csum_tree::verify_sector(csum_type, stored, sector).inspect_err(|_| bad_sector.set(index)),
        };
        self.volumes.read(at, buf, sectorsize, &check).map_err(|error| match error {
            Error::Corrupt(corrupt) => {
                let bytenr = Logical(at.0.saturating_add(bad_sector.get().saturating_mul(sectorsize) as u64));
                Corrupt { bytenr: Some(bytenr), tree: None, ..corrupt }.into()
            }
            other => other,
        })
    }

    /// Whether devices split large reads and writes into concurrent requests, through io_uring.
    pub fn devices_have_io_uring(&self) -> bool {
        self.volumes.has_io_uring()
    }

    /// The current address of data, and its checksums.
    fn current_csums_of(&self, at: Logical, len_bytes: u64) -> Result<(Logical, SectorCsums)> {
        settled_csums(|| self.moved.current(at), |current| self.csums_of(current, len_bytes))
    }

    pub(crate) fn csums_of(&self, at: Logical, len_bytes: u64) -> Result<SectorCsums> {
        let sectorsize = self.geometry.sectorsize;
        let csum_size = self.geometry.csum_type.size();
        // Search the ledger before the tree (I2 of data_ledger).
        let mut csums = self.ledger.lookup_csums(at, len_bytes);
        if !csums.is_complete() {
            let tree = self.own_tree(RootId::CSUM_TREE)?;
            let stored = tree.with_root(|source, root| {
                csum_tree::lookup_csums(source, root, at, len_bytes, csum_size, sectorsize)
            })?;
            csums.fill_from(&stored);
        }
        Ok(csums)
    }

    /// Whether a user other than `ino` of `root` at `file_offset` may refer to the extent of this file extent item:
    /// another file, this file through a clone of the extent at another offset, or a snapshot; now or in the last commit.
    /// An extent that is not shared may be written in place.
    ///
    /// # Errors
    ///
    /// Fails if the extent tree is corrupt or cannot be read.
    pub fn extent_is_shared(&self, root: RootId, ino: Ino, file_offset: u64, extent: &RegularExtent) -> Result<bool> {
        // A read-only block group may be about to be emptied. It takes no writes, so its extents count as shared.
        if self.space.is_read_only(extent.disk_bytenr) {
            return Ok(true);
        }
        let referrer = (root, ino, file_offset.wrapping_sub(extent.offset));
        match self.ledger.users(extent.disk_bytenr, &referrer) {
            OtherUsers::Others | OtherUsers::Unknown => return Ok(true),
            OtherUsers::OnlyThis => return Ok(false),
            OtherUsers::Recorded => {}
        }
        race_point();
        let last_snapshot = self.tree(root)?.map_or(Generation(u64::MAX), |tree| tree.root.lock().last_snapshot);
        let extents = self.own_tree(RootId::EXTENT_TREE)?;
        let is_shared = extents.with_root(|source, root_ptr| {
            let key = Key::new(extent.disk_bytenr.0, KeyType::EXTENT_ITEM, extent.disk_num_bytes);
            let Some(item) = ubtrfs_tree::get(source, root_ptr, &key)? else { return Ok(true) };
            let item = ExtentItem::decode(KeyType::EXTENT_ITEM, &item)
                .map_err(|cause| Error::from(cause).in_tree(RootId::EXTENT_TREE).at(extent.disk_bytenr))?;
            Ok::<_, Error>(item.generation <= last_snapshot || !is_only_user(&item, &referrer))
        })?;
        race_point();
        // Search the ledger last (I3 of data_ledger): a reference is noted there before it leaves the extent tree.
        Ok(is_shared || self.ledger.others_had(extent.disk_bytenr, referrer))
    }
}

/// Looks up the checksums of data at its current address. Returns the address and the checksums.
fn settled_csums(
    current: impl Fn() -> Logical,
    lookup: impl Fn(Logical) -> Result<SectorCsums>,
) -> Result<(Logical, SectorCsums)> {
    loop {
        let at = current();
        let csums = lookup(at)?;
        race_point();
        // If the data moved during the lookup, the old address may have no checksums any more: look up the new address.
        if csums.is_complete() || current() == at {
            return Ok((at, csums));
        }
    }
}

/// Whether all references to the extent are those of one referrer: a subvolume, an inode, and a file offset minus the
/// offset into the extent. If they are, a single inline reference has the whole count. The pieces of a split extent are
/// one referrer.
fn is_only_user(item: &ExtentItem, referrer: &Referrer) -> bool {
    item.inline_refs.iter().any(|reference| match reference {
        InlineRef::ExtentData(data) => {
            (data.root, data.objectid, data.offset) == *referrer && u64::from(data.count) == item.refs
        }
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use ubtrfs_format::item::{ExtentDataRef, ExtentFlags};

    use super::*;

    #[test]
    fn checksums_are_looked_up_again_only_if_the_data_moved_and_some_are_missing() {
        let (old, new) = (Logical(4096), Logical(1 << 20));
        let csums = |has_all: bool| {
            let mut csums = SectorCsums::absent(2, 4);
            (0..if has_all { 2 } else { 1 }).for_each(|index| csums.fill(index, &[1; 4]));
            csums
        };
        for (moves, has_all, found) in
            [(true, false, (new, true)), (true, true, (old, true)), (false, false, (old, false))]
        {
            let (at, nr_lookups) = (Cell::new(old), Cell::new(0));
            let lookup = |current: Logical| {
                nr_lookups.set(nr_lookups.get() + 1);
                assert!(nr_lookups.get() <= 2, "the lookup ends");
                if moves {
                    at.set(new);
                }
                Ok(csums(has_all || current == new))
            };
            let (current, csums) = settled_csums(|| at.get(), lookup).expect("every lookup succeeds");
            assert_eq!((current, csums.is_complete()), found);
        }
    }

    #[test]
    fn an_extent_has_one_user_only_if_a_reference_of_this_user_counts_all_references() {
        let referrer = (RootId::FS_TREE, Ino(257), 8192);
        let own = |count| {
            InlineRef::ExtentData(ExtentDataRef { root: referrer.0, objectid: referrer.1, offset: referrer.2, count })
        };
        let other =
            InlineRef::ExtentData(ExtentDataRef { root: referrer.0, objectid: Ino(258), offset: referrer.2, count: 2 });
        let shared = InlineRef::SharedData { parent: Logical(1 << 20), count: 2 };
        let is_only = |refs, inline_refs| {
            let flags = ExtentFlags::DATA;
            let item = ExtentItem { refs, generation: Generation(7), flags, tree_block: None, inline_refs };
            is_only_user(&item, &referrer)
        };
        assert!(is_only(2, vec![own(2)]));
        assert!(!is_only(2, vec![own(1)]), "the other reference has an item of its own");
        assert!(!is_only(4, vec![own(2), other]));
        assert!(!is_only(2, vec![other]));
        assert!(!is_only(2, vec![shared]));
    }
}
