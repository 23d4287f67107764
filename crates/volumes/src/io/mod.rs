//! Reading with verification and retry, writing to all copies, and repair.
//!
//! ```text
//! read   chooses a copy of each byte, verifies pieces, falls back to the other copies   --> repair
//! write  all copies at once; failures within the profile's tolerance are remembered     --> repair::settle
//! scrub  checks what a device has, in physical order                                   --> repair
//! ```
//!
//! Lock order: the layout lock (shared by reads of the layout for a write, exclusive when a migration begins or ends) ->
//! the locks of ranges (`range_locks`) -> the locks of a migration target's pieces.

mod range_locks;
mod read;
mod repair;
mod scrub;
mod write;

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::Stripe;
use ubtrfs_format::{DevId, Logical};

pub(crate) use range_locks::RangeLocks;
pub use read::Verify;
pub(crate) use repair::Mend;
pub use repair::Refreshed;
pub use scrub::{BadUnit, DeviceStripe, StripePart};

use crate::chunk_map::Chunk;
use crate::member::{Member, Stat};
use crate::profile::Segment;
use crate::set::{Volumes, unmapped};

/// Shortest read or write of a device that is worth a thread of its own. Shorter ones go through the page cache.
const PARALLEL_MIN_BYTES: u64 = 128 << 10;

impl Volumes {
    /// The chunk that covers an address, and the address's offset in the chunk. Fails if the chunk does not have this
    /// copy.
    fn chunk_for(&self, at: Logical, copy: usize) -> Result<(Arc<Chunk>, u64)> {
        let chunk = self.chunks.get(at).filter(|chunk| copy < chunk.geometry.nr_copies());
        let found = chunk.and_then(|chunk| chunk.range.offset_of(at).map(|offset| (chunk, offset)));
        found.ok_or_else(|| unmapped(at))
    }

    /// Where a copy of a range lies: for each part, the device, the offset on it, and which bytes of the range it has. The range
    /// lies in one chunk without parity.
    pub(crate) fn places(&self, at: Logical, len: usize, copy: usize) -> Result<Vec<(DevId, u64, Range<usize>)>> {
        let (chunk, offset) = self.chunk_for(at, copy)?;
        let mut done = 0_usize;
        let place = |segment: Segment| {
            let stripe = &chunk.item.stripes[segment.stripe];
            let start = done;
            done = done.saturating_add(usize::try_from(segment.len_bytes).unwrap_or(usize::MAX));
            (stripe.devid, stripe.offset.advance(segment.offset).0, start..done)
        };
        Ok(chunk.geometry.segments(offset, len as u64, copy).map(place).collect())
    }

    /// The member that has a stripe, if a write to the member reaches a device.
    fn written_member(&self, stripe: &Stripe) -> Option<Arc<Member>> {
        self.member(stripe.devid).filter(|member| member.takes_writes())
    }

    /// The member that has a stripe, if the member can be used.
    fn usable_member(&self, stripe: &Stripe) -> Option<Arc<Member>> {
        self.member(stripe.devid).filter(|member| member.backend().is_some())
    }

    /// Writes a segment of a stripe, also to the member's twin (T1 of `twin`).
    pub(crate) fn write_stripe(&self, stripe: &Stripe, segment: Segment, bufs: &[IoSlice<'_>]) -> Result<()> {
        let offset = stripe.offset.advance(segment.offset).0;
        let io_error = |device, source| Error::io("write", device, offset, segment.len_bytes, source);
        let member = self.member(stripe.devid).ok_or_else(|| io_error(missing(stripe.devid), not_given(false)))?;
        let twin = member.twin();
        let _copying = twin.as_deref().map(|twin| twin.begin_write(offset, segment.len_bytes));
        let to_twin = twin.as_deref().map(|twin| twin.write(offset, bufs));
        let Some(backend) = member.backend() else {
            return to_twin.unwrap_or_else(|| Err(io_error(member.describe(), not_given(false))));
        };
        let written = match bufs {
            [buf] => backend.write_at(offset, buf),
            bufs => backend.write_vectored_at(offset, bufs),
        };
        written.map_err(|source| {
            member.count(Stat::Write);
            io_error(backend.describe(), source)
        })
    }

    /// Tells the devices that a range is no longer needed. Does nothing on missing devices and on devices without
    /// support for discards. The removal of the range's content must be committed first.
    pub fn discard(&self, logical: Logical, len_bytes: u64) -> Result<()> {
        self.check_writable()?;
        let _layout = self.layout_lock.read();
        let end = Logical(logical.0.saturating_add(len_bytes));
        let mut at = logical;
        while let Some(left) = end.offset_from(at).filter(|&left| left > 0) {
            let (chunk, offset) = self.chunk_for(at, 0)?;
            let len = left.min(chunk.range.bytes_from(at));
            // A discard of data would make its parity wrong. Nothing is discarded on a seed.
            let is_kept = chunk.geometry.has_parity() || self.is_on_seed(&chunk);
            let nr_copies = if is_kept { 0 } else { chunk.geometry.nr_copies() };
            for copy in 0..nr_copies {
                for segment in chunk.geometry.runs(offset, len, copy) {
                    match self.discard_segment(&chunk, segment) {
                        Ok(()) => {}
                        // If the device is broken, the next flush finds out; the rest of the range is not discarded.
                        Err(_) if chunk.geometry.has_redundancy() => return Ok(()),
                        Err(error) => return Err(error),
                    }
                }
            }
            at = at.advance(len);
        }
        Ok(())
    }

    fn discard_segment(&self, chunk: &Chunk, segment: Segment) -> Result<()> {
        let stripe = &chunk.item.stripes[segment.stripe];
        let Some(member) = self.usable_member(stripe) else { return Ok(()) };
        let Some(backend) = member.backend() else { return Ok(()) };
        let offset = stripe.offset.advance(segment.offset).0;
        let len_bytes = segment.len_bytes;
        backend
            .discard(offset, len_bytes)
            .map_err(|source| Error::io("discard", backend.describe(), offset, len_bytes, source))
    }
}

fn missing(devid: DevId) -> String {
    format!("missing device {devid}")
}

fn not_given(has_parity: bool) -> std::io::Error {
    let text = match has_parity {
        true => "the device was not given, and ubtrfs cannot rebuild RAID5 and RAID6 from parity: give all devices",
        false => "the device was not given: give all devices of the filesystem",
    };
    std::io::Error::new(std::io::ErrorKind::NotFound, text)
}
