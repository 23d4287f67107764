//! [`Resync`]: brings a device that missed commits up to date.
//!
//! A stale device ([`ubtrfs_volumes::MemberState::Stale`]) gets all writes from the moment it is opened, but is not
//! read where another copy exists. The walk of the extent tree checks on the device what it may have missed: tree
//! blocks that are newer than its generation, and all data. Bad blocks are copied from other devices. The
//! generation of a data extent does not tell whether the data is older: it may have been overwritten in place, or
//! written into an extent that was preallocated before. Older tree blocks did not change. Then the device is in sync,
//! and a commit writes its superblock.
//!
//! Invariants:
//! - S1. An extent that is allocated after the walk began needs no copy, because its writes reach the stale device too.
//! - S2. The superblock of a stale device is written, and the record of a stale or late device ends, only after
//!   everything that was copied is durable. Until then, a crash leaves the device as it was.
//! - S3. Content that has a checksum is copied only if it is good, and only over a bad copy: the stale device may have the
//!   only good copy.
//! - S4. A tree block of the stale device is good only if it equals that of a device in sync, if one has it. A program that
//!   was killed before its commit may have written a block to the stale device, and the next commit, without this device,
//!   gives the same place and generation to another block.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{ExtentFlags, ExtentItem};
use ubtrfs_format::node::verify_block;
use ubtrfs_format::{DevId, FormatError, Generation, Key, KeyType, Logical, RootId};
use ubtrfs_volumes::Verify;

use crate::engine::Engine;
use crate::extents::csum_tree::verify_sector;

/// The progress of bringing stale devices up to date.
#[derive(Debug)]
pub struct Resync {
    stale: Vec<(DevId, Generation)>,
    /// Where the walk of the extent tree continues.
    next: Key,
    copied_bytes: u64,
    walked_bytes: u64,
}

impl Resync {
    /// Bytes that were copied so far.
    pub fn copied_bytes(&self) -> u64 {
        self.copied_bytes
    }

    /// Bytes of the extents that were examined so far. At the end of the walk, about the used space of the filesystem.
    pub fn walked_bytes(&self) -> u64 {
        self.walked_bytes
    }
}

impl Engine {
    /// Begins to bring the stale devices up to date. Returns `None` if no device is stale. If no chunk with redundancy
    /// has a stripe on a device, the device missed nothing, and is in sync at once.
    ///
    /// # Errors
    ///
    /// The failure of a flush.
    pub fn begin_resync(&self) -> Result<Option<Resync>> {
        if self.read_only().is_some() {
            return Ok(None);
        }
        let stale = self.volumes.stale_devices();
        if stale.is_empty() {
            return Ok(None);
        }
        let stale: Vec<(DevId, Generation)> =
            stale.into_iter().filter(|(devid, _)| self.volumes.may_lack_copies(*devid)).collect();
        let resync = Resync { stale, next: Key::MIN, copied_bytes: 0, walked_bytes: 0 };
        if resync.stale.is_empty() {
            self.end_resync()?;
            return Ok(None);
        }
        // A commit makes the extent tree complete: later extents need no copy (S1).
        self.commit()?;
        Ok(Some(resync))
    }

    /// Copies what the next extents need. Returns whether the devices are up to date.
    ///
    /// # Errors
    ///
    /// Fails if the extent tree or the csum tree cannot be read, or a commit fails. A device that cannot be written is not
    /// used any more. Content that cannot be read is named in the log.
    pub fn resync_step(&self, resync: &mut Resync) -> Result<bool> {
        self.abort_state.check_not_aborted()?;
        let extents = self.own_tree(RootId::EXTENT_TREE)?;
        let found = extents.range(&resync.next, &Key::MAX, ITEMS_PER_STEP)?;
        let Some((last, _)) = found.last() else {
            self.end_resync()?;
            return Ok(true);
        };
        resync.next = last.successor().unwrap_or(Key::MAX);
        let mut is_last = found.len() < ITEMS_PER_STEP || *last == Key::MAX;
        let walked_before = resync.walked_bytes;
        for (key, item) in &found {
            if resync.walked_bytes.saturating_sub(walked_before) >= BYTES_PER_STEP {
                (resync.next, is_last) = (*key, false);
                break;
            }
            let len_bytes = match key.item_type {
                KeyType::EXTENT_ITEM => key.offset,
                KeyType::METADATA_ITEM => self.geometry.nodesize.into(),
                _ => continue,
            };
            let extent = ExtentItem::decode(key.item_type, item)
                .map_err(|cause| Error::from(cause).in_tree(RootId::EXTENT_TREE).at(Logical(key.objectid)))?;
            let at = Logical(key.objectid);
            resync.walked_bytes = resync.walked_bytes.saturating_add(len_bytes);
            if extent.flags.contains(ExtentFlags::DATA) {
                self.refresh_data(resync, at, len_bytes, extent.generation)?;
            } else {
                self.refresh_block(resync, at, extent.generation)?;
            }
        }
        if is_last {
            self.end_resync()?;
        }
        Ok(is_last)
    }

    /// Refreshes a tree block on the devices that may lack it.
    fn refresh_block(&self, resync: &mut Resync, at: Logical, generation: Generation) -> Result<()> {
        if generation > self.committed_generation() {
            // S1
            return Ok(());
        }
        let (csum_type, nodesize) = (self.geometry.csum_type, self.geometry.nodesize);
        if resync.stale.iter().all(|(_, since)| generation <= *since) {
            return Ok(());
        }
        let committed = self.volumes.node_in_sync(at, generation, csum_type);
        let verify = |_: usize, raw: &[u8]| match &committed {
            Some(committed) if committed != raw => Err(FormatError::Mismatch {
                what: "tree block",
                field: "content",
                found: "another block of this generation".into(),
                expected: "the content that was committed".into(),
            }),
            // S4
            Some(_) => Ok(()),
            None => verify_block(raw, csum_type, at, generation),
        };
        let unit = usize::try_from(nodesize).unwrap_or(usize::MAX);
        for &(devid, _) in resync.stale.iter().filter(|(_, since)| generation > *since) {
            let range = at.0..at.0.saturating_add(nodesize.into());
            let done = self.volumes.refresh_on_device(devid, range, unit, Some(&verify))?;
            resync.copied_bytes = resync.copied_bytes.saturating_add(done.written_bytes);
            self.note_lost(at, (nodesize.into(), generation, true), done.lost_bytes)?;
        }
        Ok(())
    }

    /// Refreshes data on the devices that may lack it. Works in pieces, because a damaged tree may name an extent of any
    /// length.
    fn refresh_data(&self, resync: &mut Resync, at: Logical, len_bytes: u64, generation: Generation) -> Result<()> {
        let mut done = 0;
        while done < len_bytes {
            let here = at.checked_add(done).filter(|here| self.volumes.chunk_at(*here).is_some());
            let Some(here) = here else { return Ok(()) };
            let piece = len_bytes.saturating_sub(done).min(PIECE_BYTES);
            let lost = self.refresh_piece(resync, here, piece)?;
            self.note_lost(at, (len_bytes, generation, false), lost)?;
            done = done.saturating_add(piece);
        }
        Ok(())
    }

    /// Refreshes a piece of a data extent. Returns the bytes without a good copy.
    fn refresh_piece(&self, resync: &mut Resync, at: Logical, len_bytes: u64) -> Result<u64> {
        let (csum_type, sectorsize) = (self.geometry.csum_type, u64::from(self.geometry.sectorsize));
        let csums = self.csums_of(at, len_bytes)?;
        let nr_sectors = usize::try_from(len_bytes.checked_div(sectorsize).unwrap_or(0)).unwrap_or(usize::MAX);
        let unit = usize::try_from(sectorsize).unwrap_or(usize::MAX);
        let (mut first, mut lost_bytes) = (0, 0u64);
        while first < nr_sectors {
            let is_verified = csums.get(first).is_some();
            let is_same = |index: &usize| csums.get(*index).is_some() == is_verified;
            let end = (first..nr_sectors).take_while(is_same).last().unwrap_or(first).saturating_add(1);
            let address = |index: usize| at.0.saturating_add((index as u64).saturating_mul(sectorsize));
            let verify =
                |index: usize, sector: &[u8]| verify_sector(csum_type, csums.get(first.saturating_add(index)), sector);
            for &(devid, _) in &resync.stale {
                let verify = is_verified.then_some(&verify as &Verify<'_>);
                let done = self.volumes.refresh_on_device(devid, address(first)..address(end), unit, verify)?;
                resync.copied_bytes = resync.copied_bytes.saturating_add(done.written_bytes);
                lost_bytes = lost_bytes.saturating_add(done.lost_bytes);
            }
            first = end;
        }
        Ok(lost_bytes)
    }

    /// Warns of content of an extent that has no good copy, unless the extent was freed meanwhile.
    fn note_lost(
        &self,
        at: Logical,
        (len_bytes, generation, is_tree): (u64, Generation, bool),
        lost: u64,
    ) -> Result<()> {
        if lost > 0 && self.extent_generation(at, len_bytes, is_tree)? == Some(generation) {
            tracing::warn!("{lost} bytes of the extent at {at} have no good copy on any device");
        }
        Ok(())
    }

    /// Makes the stale devices members in sync (S2).
    fn end_resync(&self) -> Result<()> {
        self.volumes.flush()?;
        for (devid, generation) in self.volumes.stale_devices() {
            tracing::info!("device {devid}, which had generation {generation}, is up to date");
            self.volumes.set_in_sync(devid);
        }
        self.commit()
    }
}

/// Bytes of an extent that are refreshed at once.
const PIECE_BYTES: u64 = 1 << 20;

/// Bytes of extents after which a step ends, so that the progress can be seen.
const BYTES_PER_STEP: u64 = 64 << 20;

/// Number of items of the extent tree that a step visits at most.
const ITEMS_PER_STEP: usize = 256;
