//! Checks the content of a chunk that is copied to another place, and the first copy of a chunk before the other copies
//! are given up ([`crate::moving::migrate`]).
//!
//! The filesystem is in use during the check: extents are allocated, written, freed and allocated again. So even in
//! undamaged chunks, copies may differ, and content may contradict its checksum.
//!
//! Invariants:
//! - V1. A tree block is read only if a durable commit has written it: a block of a commit that is not durable yet may
//!   be in memory only, although the extent tree already has its item.
//! - V2. Content counts as damaged only if the extent tree or the csum tree describes it before the read and still
//!   after the read. If they describe the content only before the read, the extent was freed during the read, and the
//!   content may have been overwritten.

use std::collections::BTreeSet;
use std::ops::Range;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::csum::CsumType;
use ubtrfs_format::item::{ExtentFlags, ExtentItem};
use ubtrfs_format::node::verify_csum;
use ubtrfs_format::{Generation, Key, KeyType, Logical, RootId};
use ubtrfs_tree::Cursor;

use crate::delayed::sector_csums::SectorCsums;
use crate::engine::Engine;
use crate::extents::csum_tree::verify_sector;
use crate::extents::extent_tree::lookup_extent;

/// A check of a range of data: the checksums of its sectors, and the sectors that contradicted their checksums when
/// they were first read.
pub(crate) struct SectorCheck {
    start: u64,
    sectorsize: u64,
    csum_type: CsumType,
    /// The checksums before the reads.
    csums: SectorCsums,
    suspects: BTreeSet<usize>,
}

impl SectorCheck {
    /// Compares `content`, which was read from the address `at` inside the range, with the checksums.
    pub(crate) fn look(&mut self, at: Logical, content: &[u8]) {
        let len = usize::try_from(self.sectorsize).unwrap_or(usize::MAX);
        let first = at.0.saturating_sub(self.start).checked_div(self.sectorsize).unwrap_or(0);
        for (index, sector) in (usize::try_from(first).unwrap_or(usize::MAX)..).zip(content.chunks_exact(len)) {
            if let Some(stored) = self.csums.get(index)
                && verify_sector(self.csum_type, Some(stored), sector).is_err()
            {
                self.suspects.insert(index);
            }
        }
    }
}

impl Engine {
    /// Begins a check of the data in a range, before the range is read.
    pub(crate) fn begin_check(&self, range: &Range<u64>) -> Result<SectorCheck> {
        Ok(SectorCheck {
            start: range.start,
            sectorsize: u64::from(self.geometry.sectorsize),
            csum_type: self.geometry.csum_type,
            csums: self.csums_of(Logical(range.start), range.end.saturating_sub(range.start))?,
            suspects: BTreeSet::new(),
        })
    }

    /// Ends a check. Reads each suspect sector once more, with verification, which repairs the first copy if another
    /// copy is good (V2).
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] if the first copy of a sector is still wrong.
    pub(crate) fn finish_check(&self, check: SectorCheck) -> Result<()> {
        for index in check.suspects {
            if let Some(stored) = check.csums.get(index) {
                let offset = (index as u64).saturating_mul(check.sectorsize);
                self.verify_sector(Logical(check.start.saturating_add(offset)), stored)?;
            }
        }
        Ok(())
    }

    /// Makes sure that the first copy of some ranges of a chunk is good, before the other copies are given up. If the
    /// copies of a range differ, reads the range with verification, which repairs the first copy.
    /// Data is compared with its checksums even if the copies are equal.
    pub(crate) fn repair_first_copy(&self, ranges: &[Range<u64>]) -> Result<()> {
        for range in ranges {
            let len = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
            let (mut first, mut other) = (vec![0; len], vec![0; len]);
            let at = Logical(range.start);
            let mut check = self.begin_check(range)?;
            let is_read = self.volumes.read_copy(at, &mut first, 0).is_ok();
            for copy in 1..self.volumes.num_copies(at) {
                let is_same = is_read && self.volumes.read_copy(at, &mut other, copy).is_ok() && first == other;
                if !is_same {
                    self.verify_blocks(range)?;
                    self.verify_sectors(range)?;
                    break;
                }
            }
            if is_read {
                check.look(at, &first);
                self.finish_check(check)?;
            }
        }
        Ok(())
    }

    fn verify_blocks(&self, range: &Range<u64>) -> Result<()> {
        self.tree_blocks(range)?.into_iter().try_for_each(|bytenr| self.verify_block(bytenr))
    }

    /// The tree blocks in a range of addresses, in ascending order.
    pub(crate) fn tree_blocks(&self, range: &Range<u64>) -> Result<Vec<Logical>> {
        let extents = self.own_tree(RootId::EXTENT_TREE)?;
        let (first, end) = (Key::new(range.start, KeyType(0), 0), Key::new(range.end, KeyType(0), 0));
        extents.with_root(|source, root| {
            let mut blocks = Vec::new();
            let mut cursor = Cursor::new(source, *root);
            let mut key = cursor.seek_ge(&first)?;
            while let Some(found) = key.filter(|key| *key < end) {
                let is_block = found.item_type == KeyType::METADATA_ITEM
                    || (found.item_type == KeyType::EXTENT_ITEM
                        && ExtentItem::decode(found.item_type, cursor.data().unwrap_or_default())?
                            .flags
                            .contains(ExtentFlags::TREE_BLOCK));
                if is_block {
                    blocks.push(Logical(found.objectid));
                }
                key = cursor.next()?;
            }
            Ok::<_, Error>(blocks)
        })
    }

    /// Reads a tree block with verification, unless the block is freed during the check. Fails if the first copy is
    /// still bad after the read.
    fn verify_block(&self, bytenr: Logical) -> Result<()> {
        let len = usize::try_from(self.geometry.nodesize).unwrap_or(usize::MAX);
        let csum_type = self.geometry.csum_type;
        let verify = |_: usize, raw: &[u8]| verify_csum(raw, csum_type);
        let mut node = vec![0; len];
        for _ in 0..MAX_TRIES {
            let Some(generation) = self.block_generation(bytenr)? else { return Ok(()) };
            if generation > self.committed_generation() {
                // V1
                self.commit()?;
                continue;
            }
            let read = self.volumes.read(Logical(bytenr.0), &mut node, len, &verify).and_then(|()| {
                self.volumes.read_copy(bytenr, &mut node, 0)?;
                Ok(verify(0, &node)?)
            });
            // V2
            match read {
                Err(error) if self.block_generation(bytenr)? == Some(generation) => {
                    return Err(error.at(bytenr));
                }
                Err(_) => {}
                Ok(()) => return Ok(()),
            }
        }
        Err(Error::BlockGroupBusy { start: bytenr, work: "written" })
    }

    /// The generation of the tree block at this address, if there is one.
    fn block_generation(&self, bytenr: Logical) -> Result<Option<Generation>> {
        self.extent_generation(bytenr, self.geometry.nodesize.into(), true)
    }

    /// The generation of this tree block or data extent, if it exists.
    pub(crate) fn extent_generation(&self, at: Logical, len_bytes: u64, is_tree: bool) -> Result<Option<Generation>> {
        let extents = self.own_tree(RootId::EXTENT_TREE)?;
        let found = extents.with_root(|source, root| lookup_extent(source, root, at, len_bytes, is_tree))?;
        Ok(found.map(|found| found.generation))
    }

    fn verify_sectors(&self, range: &Range<u64>) -> Result<()> {
        let len = usize::try_from(self.geometry.sectorsize).unwrap_or(usize::MAX);
        let csums = self.csums_of(Logical(range.start), range.end.saturating_sub(range.start))?;
        for (index, at) in (range.start..range.end).step_by(len).enumerate() {
            if let Some(stored) = csums.get(index) {
                self.verify_sector(Logical(at), stored)?;
            }
        }
        Ok(())
    }

    /// Reads a sector with verification against its checksum, unless the sector is freed during the check. Fails if the
    /// first copy is still bad after the read.
    fn verify_sector(&self, at: Logical, stored: &[u8]) -> Result<()> {
        let len = usize::try_from(self.geometry.sectorsize).unwrap_or(usize::MAX);
        let csum_type = self.geometry.csum_type;
        let mut stored = stored.to_vec();
        let mut sector = vec![0; len];
        for _ in 0..MAX_TRIES {
            let verify = |_: usize, raw: &[u8]| verify_sector(csum_type, Some(&stored), raw);
            let read = self.volumes.read(at, &mut sector, len, &verify).and_then(|()| {
                self.volumes.read_copy(at, &mut sector, 0)?;
                Ok(verify(0, &sector)?)
            });
            let Err(error) = read else { return Ok(()) };
            // V2
            let now = self.csums_of(at, len as u64)?;
            match now.get(0) {
                None => return Ok(()),
                Some(now) if now == stored => return Err(error.at(at)),
                Some(now) => stored = now.to_vec(),
            }
        }
        Err(Error::BlockGroupBusy { start: at, work: "written" })
    }
}

/// Maximum number of attempts to read a block or sector. An attempt is repeated if the content was freed and written
/// again during the attempt.
const MAX_TRIES: u32 = 100;

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use ubtrfs_device::Device;
    use ubtrfs_format::item::BlockGroupFlags;
    use ubtrfs_mkfs::MkfsOptions;
    use ubtrfs_testkit::{HookDevice, Medium, MediumDevice};

    use crate::{Engine, EngineOptions, QuotaKind};

    /// V1: the first write of a commit is held, so that blocks which the extent tree has are not on the device yet.
    #[test]
    fn a_block_that_a_commit_has_not_written_yet_is_no_damage() {
        let options = MkfsOptions { nodesize: 4096, metadata_profile: BlockGroupFlags::DUP, ..MkfsOptions::default() };
        let medium = Arc::new(MediumDevice::new(Medium::formatted(256 << 20, &options).expect("formatted")));
        let device = Arc::new(HookDevice::new(Arc::clone(&medium) as Arc<dyn Device>));
        let engine =
            Engine::open(vec![Arc::clone(&device) as Arc<dyn Device>], EngineOptions::default()).expect("opens");
        let metadata = |group: &ubtrfs_space::BlockGroup| group.flags.contains(BlockGroupFlags::METADATA);
        let group = engine.space.block_groups().into_iter().find(metadata).expect("a metadata block group");
        let (start, chunk) = engine.volumes.chunk_at(group.start).expect("mapped");
        // The copies differ in free space, so the content of the chunk is verified.
        let at = chunk.stripes[1].offset.0 + chunk.length - 4096;
        medium.write_at(at, &[7; 4096]).expect("written");
        let range = start.0..start.0 + chunk.length;
        let (is_held, held) = mpsc::channel();
        let (release, released) = mpsc::channel::<()>();
        device.at_write(0, move || {
            is_held.send(()).expect("the test waits");
            released.recv().expect("the test releases the write");
            Ok(())
        });
        std::thread::scope(|scope| {
            let commit = scope.spawn(|| engine.enable_quotas(QuotaKind::Full));
            held.recv_timeout(Duration::from_secs(60)).expect("the commit writes");
            let verify = scope.spawn(|| engine.repair_first_copy(std::slice::from_ref(&range)));
            // A check that violated V1 would read the unwritten blocks, and end at once. A correct check waits for the
            // commit.
            std::thread::sleep(Duration::from_millis(300));
            let ended_early = verify.is_finished();
            release.send(()).expect("the write waits");
            commit.join().expect("no panic").expect("committed");
            verify.join().expect("no panic").expect("the blocks are not damaged");
            assert!(!ended_early, "the check waits for the commit");
        });
        let errors: Vec<u64> = engine.device_stats().into_iter().flat_map(|(_, stats)| stats.values).collect();
        assert!(errors.iter().all(|count| *count == 0), "{errors:?}");
    }
}
