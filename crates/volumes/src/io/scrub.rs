//! Checking what a device has, in the order in which it lies there: the reads and repairs of a scrub.
//!
//! ```text
//! stripes_on --> stripe_parts --> read_stripe --suspect units--> scrub_range: read again, repaired, told
//! ```
//!
//! Invariants:
//! - S1. [`Volumes::read_stripe`] takes no lock, so content that it finds bad is only suspect: a write may have been
//!   half done. [`Volumes::scrub_range`] reads it again while no write to it runs.
//! - S2. A scrub repairs a copy only on the device that it scrubs, so each bad copy is counted once.

use std::io::IoSliceMut;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::superblock::SUPERBLOCK_OFFSETS;
use ubtrfs_format::{DevId, FormatError, Generation, Logical, Physical};

use super::missing;
use crate::chunk_map::Chunk;
use crate::io::read::Verify;
use crate::io::repair::{BadCopyReason, Mend, Mended, Mending};
use crate::member::Stat;
use crate::profile::{STRIPE_LEN, Segment};
use crate::set::{Volumes, unmapped};
use crate::superblock::{fits, read_mirror};

/// A stripe of a chunk on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceStripe {
    /// The device.
    pub devid: DevId,
    /// Where the stripe begins on the device.
    pub physical: Physical,
    /// Bytes of the stripe.
    pub len_bytes: u64,
    /// The start of the chunk.
    pub chunk: Logical,
    /// The type and profile of the chunk.
    pub flags: BlockGroupFlags,
    /// Index of the stripe in the chunk.
    index: usize,
}

/// A part of a stripe whose bytes have consecutive addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StripePart {
    /// Offset from the start of the stripe.
    pub offset: u64,
    /// The addresses.
    pub logical: Range<u64>,
}

/// A bad unit of a device, and whether another copy was good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadUnit {
    /// Index of the unit in the range.
    pub index: usize,
    /// The contradiction in the content; `None` if the device could not read it.
    pub cause: Option<FormatError>,
    /// Whether another copy is good. Then this one was written again, if that was allowed.
    pub has_good_copy: bool,
}

impl Volumes {
    /// The stripes that begin in a range of a device, in ascending order.
    pub fn stripes_on(&self, devid: DevId, range: Range<u64>) -> Vec<DeviceStripe> {
        let mut found = Vec::new();
        for chunk in self.chunks.all() {
            for (index, stripe) in chunk.item.stripes.iter().enumerate() {
                if stripe.devid == devid && range.contains(&stripe.offset.0) {
                    found.push(DeviceStripe {
                        devid,
                        physical: stripe.offset,
                        len_bytes: chunk.geometry.stripe_len_bytes(),
                        chunk: chunk.start(),
                        flags: chunk.item.flags,
                        index,
                    });
                }
            }
        }
        found.sort_by_key(|stripe| stripe.physical);
        found
    }

    /// Fails if the device is missing, or if it failed while the filesystem was open.
    pub fn check_usable(&self, devid: DevId) -> Result<()> {
        let member = self.member(devid);
        if member.as_ref().is_some_and(|member| member.backend().is_some()) {
            return Ok(());
        }
        let device = member.map_or_else(|| missing(devid), |member| member.describe());
        Err(Error::Refused {
            what: format!("device {devid} ({device}) cannot be used"),
            hint: "see `ubtrfs device stats`",
        })
    }

    /// The parts of a stripe in a window of offsets. Returns `None` if the stripe is not there any more. A stripe of a
    /// chunk with parity has no parts.
    pub fn stripe_parts(&self, stripe: &DeviceStripe, window: Range<u64>) -> Option<Vec<StripePart>> {
        let chunk = self.chunk_of(stripe)?;
        let end = window.end.min(stripe.len_bytes);
        let mut parts: Vec<StripePart> = Vec::new();
        if chunk.geometry.has_parity() || window.start >= end {
            return Some(parts);
        }
        if chunk.geometry.is_mirrored() {
            let logical = chunk.start().advance(window.start).0..chunk.start().advance(end).0;
            return Some(vec![StripePart { offset: window.start, logical }]);
        }
        let mut offset = window.start;
        while offset < end {
            let to_element = STRIPE_LEN.saturating_sub(offset % STRIPE_LEN);
            let len_bytes = to_element.min(end.saturating_sub(offset));
            if let Some(range) = chunk.geometry.logical_range_of(stripe.index, offset) {
                let logical_end = range.end.min(range.start.saturating_add(len_bytes));
                let logical = chunk.start().advance(range.start).0..chunk.start().advance(logical_end).0;
                parts.push(StripePart { offset, logical });
            }
            offset = offset.saturating_add(len_bytes);
        }
        Some(parts)
    }

    /// Reads bytes of a stripe (S1).
    ///
    /// # Errors
    /// The device is missing or cannot read the bytes, or the stripe is not there any more.
    pub fn read_stripe(&self, stripe: &DeviceStripe, offset: u64, buf: &mut [u8]) -> Result<()> {
        let chunk = self.chunk_of(stripe).ok_or_else(|| unmapped(stripe.chunk))?;
        let segment = Segment { stripe: stripe.index, offset, len_bytes: buf.len() as u64 };
        self.read_column(&chunk, segment, &mut [IoSliceMut::new(buf)])
    }

    /// Reads a logical range again, which the stripe has a copy of, and tells each bad unit of `unit_bytes`. `verify` gets
    /// the index and the content of each unit; without it, only units that cannot be read are bad. With `repair`, a bad
    /// unit with a good copy on any device is written again (S2). Bad units count for the device.
    ///
    /// # Errors
    /// The error of a device without which a chunk does not survive.
    pub fn scrub_range(
        &self,
        stripe: &DeviceStripe,
        range: Range<u64>,
        unit_bytes: usize,
        verify: Option<&Verify<'_>>,
        repair: bool,
        tell: &mut dyn FnMut(BadUnit),
    ) -> Result<()> {
        let may_write = repair && self.check_writable().is_ok();
        let mend = if may_write { Mend::BadCopies } else { Mend::Nothing };
        self.mend_stripe(stripe, range, unit_bytes, verify, mend, tell)
    }

    pub(crate) fn mend_stripe(
        &self,
        stripe: &DeviceStripe,
        range: Range<u64>,
        unit_bytes: usize,
        verify: Option<&Verify<'_>>,
        mend: Mend,
        tell: &mut dyn FnMut(BadUnit),
    ) -> Result<()> {
        let Some(member) = self.member(stripe.devid).filter(|member| member.takes_writes()) else { return Ok(()) };
        // The stripe moves if its chunk is migrated; then it is checked in its new place.
        let is_own = |chunk: &Chunk, segment: Segment| segment.stripe == stripe.index && is_same(chunk, stripe);
        let mending = Mending { unit_bytes: unit_bytes.max(1), verify, mend, is_own: &is_own };
        let done = self.mend_range(range, &mending, &mut |index, mended| {
            let (bad, has_good_copy) = match mended {
                Mended::Good => return,
                Mended::Repaired(bad) => (bad, true),
                Mended::Lost(bad) => (bad, false),
            };
            let cause = match bad {
                BadCopyReason::Unreadable => None,
                BadCopyReason::Content(cause) => Some(cause),
            };
            tell(BadUnit { index, cause, has_good_copy });
        });
        match done {
            Err(error @ Error::Io { op: "write", .. }) => self.kick(&member, error),
            done => done,
        }
    }

    /// Counts wrong content that a scrub found on a device.
    pub fn count_scrubbed(&self, devid: DevId, cause: &FormatError) {
        if let Some(member) = self.member(devid) {
            member.count(if cause.is_generation() { Stat::Generation } else { Stat::Corruption });
        }
    }

    /// The number of bad superblocks of a device: unreadable ones, invalid ones, and ones older than `committed`, which is
    /// the generation of a commit that is done. They count for the device, so the next commit writes superblocks. A stale
    /// device has old ones rightly, so they do not count.
    pub fn nr_bad_superblocks(&self, devid: DevId, committed: Generation) -> u64 {
        let Some(member) = self.member(devid).filter(|member| member.is_seed() || member.is_complete()) else {
            return 0;
        };
        let Some(device) = member.backend() else { return 0 };
        let len_bytes = member.item.read().total_bytes.min(device.len_bytes());
        let (fsid, committed) = match member.is_seed() {
            true => (member.item.read().fsid, Generation(0)),
            false => (self.superblock().fsid, committed),
        };
        let is_good = |mirror: usize| {
            let found = read_mirror(device.as_ref(), mirror);
            found.is_ok_and(|found| found.fsid == fsid && found.generation >= committed)
        };
        let is_bad = |mirror: &usize| {
            // A commit writes the mirrors last, so a mirror may be about to be written.
            (0..SUPERBLOCK_TRIES).all(|nr_tries| {
                if nr_tries > 0 {
                    std::thread::sleep(SUPERBLOCK_WAIT);
                }
                !is_good(*mirror)
            })
        };
        let mirrors = (0..SUPERBLOCK_OFFSETS.len()).filter(|&mirror| fits(SUPERBLOCK_OFFSETS[mirror], len_bytes));
        mirrors.filter(is_bad).inspect(|_| member.count(Stat::Corruption)).count() as u64
    }

    /// The chunk of a stripe, if the stripe is where it was.
    fn chunk_of(&self, stripe: &DeviceStripe) -> Option<Arc<Chunk>> {
        self.chunks.get(stripe.chunk).filter(|chunk| is_same(chunk, stripe))
    }
}

/// Whether a chunk has this stripe.
fn is_same(chunk: &Chunk, stripe: &DeviceStripe) -> bool {
    let found = chunk.item.stripes.get(stripe.index);
    chunk.start() == stripe.chunk
        && found.is_some_and(|found| (found.devid, found.offset) == (stripe.devid, stripe.physical))
}

/// Number of times that a superblock is read before it counts as bad.
const SUPERBLOCK_TRIES: u32 = 10;
const SUPERBLOCK_WAIT: Duration = Duration::from_millis(200);
