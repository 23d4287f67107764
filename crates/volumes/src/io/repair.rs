//! Writing good content over bad copies.
//!
//! Invariants:
//! - I1. A repair reads good and bad copies again while it excludes writes to the range, so a repair never undoes a newer
//!   write.
//! - I2. Before a superblock is written, each failed write of a copy is repeated from a trusted copy, or the member is
//!   kicked.
//! - I3. Bringing a device up to date overwrites no good copy: content that can be verified is verified before it is
//!   copied, and stays where it is good already.

use std::io::IoSlice;
use std::ops::Range;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::{DevId, FormatError, Logical};

use crate::chunk_map::Chunk;
use crate::io::read::Verify;
use crate::member::Member;
use crate::profile::{STRIPE_LEN, Segment};
use crate::set::Volumes;

/// The result of [`Volumes::refresh_on_device`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refreshed {
    /// Bytes that were written to the device.
    pub written_bytes: u64,
    /// Bytes without a good copy.
    pub lost_bytes: u64,
}

/// The reason why a unit of a copy is bad.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BadCopyReason {
    Unreadable,
    Content(FormatError),
}

/// The result for a unit of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mended {
    Good,
    /// It was bad, and another copy is good. It was written again if that was allowed.
    Repaired(BadCopyReason),
    /// No copy is good.
    Lost(BadCopyReason),
}

/// What [`Volumes::mend_range`] makes good.
pub(super) struct Mending<'m> {
    /// Divides the range, and is at most 64 KiB.
    pub(super) unit_bytes: usize,
    /// Without a check, what can be read is good, and comes from trusted copies.
    pub(super) verify: Option<&'m Verify<'m>>,
    pub(super) mend: Mend,
    /// Whether a copy with this segment is made good.
    pub(super) is_own: &'m dyn Fn(&Chunk, Segment) -> bool,
}

/// Where [`Volumes::mend_range`] writes good content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mend {
    /// Nowhere.
    Nothing,
    /// Over bad copies.
    BadCopies,
    /// To the twin of the copy's device, whether the copy is good or not (see `twin`). With `avoids_source`, the copy is
    /// read only if no other one is good.
    Twin { avoids_source: bool },
}

impl Volumes {
    /// Makes the copies good that a device has of a logical range, up to the end of a chunk. Returns zeros if the device has
    /// no copies.
    ///
    /// With `verify`, which gets the index and the content of each piece of `unit_bytes`, a good copy stays, and a bad one
    /// is written again from a good one on any device (I3). `unit_bytes` divides the range, and is at most 64 KiB. Without
    /// `verify`, the range is copied from trusted copies. A device that cannot be written is kicked.
    ///
    /// # Errors
    ///
    /// The error of a device without which a chunk does not survive.
    pub fn refresh_on_device(
        &self,
        devid: DevId,
        range: Range<u64>,
        unit_bytes: usize,
        verify: Option<&Verify<'_>>,
    ) -> Result<Refreshed> {
        let chunk = self.chunks.get(Logical(range.start)).filter(|chunk| chunk.geometry.has_redundancy());
        let has_stripe = chunk.is_some_and(|chunk| chunk.item.stripes.iter().any(|stripe| stripe.devid == devid));
        let Some(member) = self.member(devid).filter(|member| has_stripe && member.backend().is_some()) else {
            return Ok(Refreshed::default());
        };
        let done = match verify {
            Some(verify) => self.refresh_verified(&member, range, unit_bytes.max(1), verify),
            None => self.refresh_unverified(&member, range),
        };
        match done {
            Err(error @ Error::Io { op: "write", .. }) => self.kick(&member, error).map(|()| Refreshed::default()),
            done => done,
        }
    }

    fn refresh_unverified(&self, member: &Member, range: Range<u64>) -> Result<Refreshed> {
        let (mut all, mut buf) = (Refreshed::default(), Vec::new());
        for element in elements(range, 1, STRIPE_LEN) {
            let len_bytes = element.end.saturating_sub(element.start);
            let count = match self.copy_element_to(member, element, &mut buf) {
                Ok(()) => &mut all.written_bytes,
                Err(error @ Error::Io { op: "write", .. }) => return Err(error),
                Err(_) => &mut all.lost_bytes,
            };
            *count = count.saturating_add(len_bytes);
        }
        Ok(all)
    }

    fn refresh_verified(
        &self,
        member: &Member,
        range: Range<u64>,
        unit_bytes: usize,
        verify: &Verify<'_>,
    ) -> Result<Refreshed> {
        let mut all = Refreshed::default();
        let is_on_member = |chunk: &Chunk, segment: Segment| chunk.item.stripes[segment.stripe].devid == member.devid();
        let mending = Mending { unit_bytes, verify: Some(verify), mend: Mend::BadCopies, is_own: &is_on_member };
        self.mend_range(range, &mending, &mut |_, mended| {
            let nr_bytes = unit_bytes as u64;
            match mended {
                Mended::Good => {}
                Mended::Repaired(_) => all.written_bytes = all.written_bytes.saturating_add(nr_bytes),
                Mended::Lost(_) => all.lost_bytes = all.lost_bytes.saturating_add(nr_bytes),
            }
        })?;
        Ok(all)
    }

    /// Makes some copies of a logical range good, unit by unit, and tells the result for each unit of each copy with the
    /// unit's index. Ends early where no chunk has all of the range: it is gone by now, or an item of a damaged tree names
    /// more than a chunk has.
    pub(super) fn mend_range(
        &self,
        range: Range<u64>,
        mending: &Mending<'_>,
        tell: &mut dyn FnMut(usize, Mended),
    ) -> Result<()> {
        let (start, unit) = (range.start, mending.unit_bytes as u64);
        let mut buf = Vec::new();
        // Copies of a mirrored chunk are not cut into elements of stripes.
        let is_whole = matches!(mending.mend, Mend::Twin { .. })
            && self.chunks.get(Logical(start)).is_some_and(|chunk| chunk.geometry.is_mirrored());
        let longest = if is_whole { TWIN_ELEMENT_BYTES } else { STRIPE_LEN };
        for element in elements(range, unit, longest) {
            buf.resize(usize::try_from(element.end.saturating_sub(element.start)).unwrap_or_default(), 0);
            let first = element.start.saturating_sub(start).checked_div(unit).unwrap_or(0);
            let first = usize::try_from(first).unwrap_or(usize::MAX);
            let at = Logical(element.start);
            let mut tell = |index: usize, mended| tell(first.saturating_add(index), mended);
            if !self.mend_element(at, first, &mut buf, mending, &mut tell)? {
                break;
            }
        }
        Ok(())
    }

    /// Makes copies of some units of a chunk good, and, during a migration, the target's fresh stripes (G1 of
    /// `migration`). Returns false if no chunk has all of them.
    fn mend_element(
        &self,
        at: Logical,
        first_unit: usize,
        buf: &mut [u8],
        mending: &Mending<'_>,
        tell: &mut dyn FnMut(usize, Mended),
    ) -> Result<bool> {
        let _layout = self.layout_lock.read();
        let _alone = self.range_locks.repair(at, buf.len() as u64);
        let Ok((chunk, offset)) = self.chunk_for(at, 0) else { return Ok(false) };
        if chunk.range.bytes_from(at) < buf.len() as u64 {
            return Ok(false);
        }
        let target = chunk.target.as_deref();
        let _copying = target.map(|target| target.begin_write(offset, buf.len()));
        let is_own = |segment: Segment| (mending.is_own)(&chunk, segment);
        let (own, others): (Vec<usize>, Vec<usize>) = (0..chunk.geometry.nr_copies())
            .partition(|&copy| chunk.geometry.segments(offset, buf.len() as u64, copy).any(is_own));
        let check = |index: usize, unit: &[u8]| match mending.verify {
            Some(verify) => verify(first_unit.saturating_add(index), unit).map_err(BadCopyReason::Content),
            None => Ok(()),
        };
        let to_twin = matches!(mending.mend, Mend::Twin { .. });
        let is_avoided = mending.mend == Mend::Twin { avoids_source: true };
        for &copy in &own {
            // Content that nothing can verify is copied from a trusted device only.
            let is_usable =
                mending.verify.is_some() || !to_twin || self.check_trusted(at, buf.len() as u64, copy).is_ok();
            let is_read = is_usable && !is_avoided && self.read_copy(at, buf, copy).is_ok();
            let nr_units = buf.len().div_ceil(mending.unit_bytes);
            if to_twin && !is_read && others.iter().any(|&other| self.read_good(at, buf, other, first_unit, mending)) {
                self.write_twin_copy(&chunk, offset, buf, copy);
                (0..nr_units).for_each(|index| tell(index, Mended::Repaired(BadCopyReason::Unreadable)));
                continue;
            }
            for (index, unit) in buf.chunks_mut(mending.unit_bytes).enumerate() {
                let from_start = index.saturating_mul(mending.unit_bytes) as u64;
                let (here, offset) = (at.advance(from_start), offset.saturating_add(from_start));
                // A device may be able to read a part of what it cannot read as a whole.
                let is_read = is_read || (is_usable && !is_avoided && self.read_copy(here, unit, copy).is_ok());
                let Err(bad) = (if is_read { check(index, unit) } else { Err(BadCopyReason::Unreadable) }) else {
                    if to_twin {
                        self.write_twin_copy(&chunk, offset, unit, copy);
                    }
                    tell(index, Mended::Good);
                    continue;
                };
                let nr_bytes = unit.len() as u64;
                let is_source = |source: usize| match mending.verify {
                    // A copy that missed a write may hold older content, for which these checksums were right once.
                    Some(_) => !self.lacks(&chunk, here, nr_bytes, source),
                    None => self.check_trusted(here, nr_bytes, source).is_ok(),
                };
                let mut sources = own.iter().chain(&others).filter(|&&source| source != copy && is_source(source));
                if !sources.any(|&source| self.read_copy(here, unit, source).is_ok() && check(index, unit).is_ok()) {
                    if to_twin && self.read_copy(here, unit, copy).is_ok() {
                        self.write_twin_copy(&chunk, offset, unit, copy);
                        if is_usable && check(index, unit).is_ok() {
                            tell(index, Mended::Good);
                            continue;
                        }
                    }
                    tell(index, Mended::Lost(bad));
                    continue;
                }
                if to_twin {
                    self.write_twin_copy(&chunk, offset, unit, copy);
                }
                if mending.mend == Mend::BadCopies && !self.is_on_seed(&chunk) {
                    self.rewrite_copy(&chunk, offset, unit, copy)?;
                    if let Some(target) = target {
                        self.write_target(target, offset, &[IoSlice::new(unit)], unit.len())?;
                    }
                }
                tell(index, Mended::Repaired(bad));
            }
        }
        Ok(true)
    }

    /// Reads all of these units from one copy, and returns whether they are good.
    fn read_good(&self, at: Logical, buf: &mut [u8], copy: usize, first_unit: usize, mending: &Mending<'_>) -> bool {
        let is_complete = |chunk: &Chunk| !self.lacks(chunk, at, buf.len() as u64, copy);
        let is_read = match mending.verify {
            // A copy that missed a write may hold older content, for which these checksums were right once.
            Some(_) if self.chunks.get(at).as_deref().is_some_and(is_complete) => self.read_copy(at, buf, copy),
            Some(_) => return false,
            None => self.read_trusted_copy(at, buf, copy),
        };
        let mut units = (first_unit..).zip(buf.chunks(mending.unit_bytes));
        is_read.is_ok() && units.all(|(index, unit)| mending.verify.is_none_or(|verify| verify(index, unit).is_ok()))
    }

    /// Whether a write of a part of these bytes failed on the members of a copy.
    fn lacks(&self, chunk: &Chunk, at: Logical, len_bytes: u64, copy: usize) -> bool {
        let range = at.0..at.advance(len_bytes).0;
        let offset = chunk.range.offset_of(at).unwrap_or(0);
        chunk.geometry.segments(offset, len_bytes, copy).any(|segment| {
            let member = self.member(chunk.item.stripes[segment.stripe].devid);
            member.is_none_or(|member| member.lacks(&range))
        })
    }

    /// Writes a good piece over its bad copies and, during a migration, over the target's fresh stripes. Does nothing
    /// if the good copy has changed since it was read (I1). Errors are ignored, because the reader has its data.
    pub(super) fn repair(
        &self,
        at: Logical,
        good: &[u8],
        bad: &[usize],
        good_copy: usize,
        is_good: &dyn Fn(&[u8]) -> bool,
    ) {
        if self.check_writable().is_err() {
            return;
        }
        let _layout = self.layout_lock.read();
        let _alone = self.range_locks.repair(at, good.len() as u64);
        let Ok((chunk, offset)) = self.chunk_for(at, good_copy) else { return };
        if chunk.range.bytes_from(at) < good.len() as u64 || self.is_on_seed(&chunk) {
            return;
        }
        let mut now = vec![0; good.len()];
        if self.read_copy(at, &mut now, good_copy).is_err() || now != good {
            return;
        }
        debug_assert!(is_good(&now), "I1: a repair spreads content that is not good");
        assert!(!bad.contains(&good_copy), "I3: a repair writes over the good copy");
        let target = chunk.target.as_deref();
        let _copying = target.map(|target| target.begin_write(offset, good.len()));
        for &copy in bad {
            let is_bad = self.read_copy(at, &mut now, copy).is_err() || !is_good(&now);
            if is_bad {
                let _counted = self.rewrite_copy(&chunk, offset, good, copy);
            }
        }
        if let Some(target) = target {
            let _counted = self.write_target(target, offset, &[IoSlice::new(good)], good.len());
        }
    }

    /// Writes `content`, which must lie inside `chunk` from `offset` on, to one copy.
    fn rewrite_copy(&self, chunk: &Chunk, offset: u64, content: &[u8], copy: usize) -> Result<()> {
        let mut rest = content;
        for segment in chunk.geometry.segments(offset, content.len() as u64, copy) {
            let (piece, behind) = rest.split_at(segment.len_bytes as usize);
            self.write_stripe(&chunk.item.stripes[segment.stripe], segment, &[IoSlice::new(piece)])?;
            rest = behind;
        }
        Ok(())
    }

    /// Writes `content`, which must lie inside `chunk` from `offset` on, to the twins of the devices of one copy. The caller
    /// excludes writes to the range. Failures are noted in the twins.
    fn write_twin_copy(&self, chunk: &Chunk, offset: u64, content: &[u8], copy: usize) {
        let mut rest = content;
        for segment in chunk.geometry.segments(offset, content.len() as u64, copy) {
            let (piece, behind) = rest.split_at(segment.len_bytes as usize);
            rest = behind;
            let stripe = &chunk.item.stripes[segment.stripe];
            if let Some(twin) = self.member(stripe.devid).and_then(|member| member.twin()) {
                let physical = stripe.offset.advance(segment.offset).0;
                let _alone = twin.begin_write(physical, segment.len_bytes);
                let _noted = twin.write(physical, &[IoSlice::new(piece)]);
            }
        }
    }

    /// Repeats the writes of copies that failed, and kicks the members for which they fail again (I2). Called before
    /// the flush that comes before a superblock.
    ///
    /// # Errors
    ///
    /// The error of a device without which a chunk does not survive.
    pub fn settle_failed_writes(&self) -> Result<()> {
        for member in self.members() {
            let failed = member.failed();
            if failed.is_empty() || member.backend().is_none() {
                continue;
            }
            match failed.iter().try_for_each(|range| self.copy_to(&member, range.clone())) {
                Ok(()) => member.forget_failed(&failed),
                Err(error) => self.kick(&member, error)?,
            }
        }
        Ok(())
    }

    /// Copies a logical range from trusted copies to the stripes that a member has of it. Ranges without a chunk are
    /// skipped.
    pub(crate) fn copy_to(&self, member: &Member, range: Range<u64>) -> Result<()> {
        let mut buf = Vec::new();
        elements(range, 1, STRIPE_LEN).try_for_each(|element| self.copy_element_to(member, element, &mut buf))
    }

    /// Copies an element, as [`Volumes::copy_to`] does, and, during a migration, to the target's fresh stripes (G1 of
    /// `migration`).
    fn copy_element_to(&self, member: &Member, element: Range<u64>, buf: &mut Vec<u8>) -> Result<()> {
        let at = Logical(element.start);
        buf.resize(usize::try_from(element.end.saturating_sub(element.start)).unwrap_or_default(), 0);
        let _layout = self.layout_lock.read();
        let _alone = self.range_locks.repair(at, buf.len() as u64);
        let Ok((chunk, offset)) = self.chunk_for(at, 0) else { return Ok(()) };
        let len_bytes = (buf.len() as u64).min(chunk.range.bytes_from(at));
        let devid = member.devid();
        let target = chunk.target.as_deref();
        let _copying = target.map(|target| target.begin_write(offset, buf.len()));
        for copy in 0..chunk.geometry.nr_copies() {
            let mut done = 0u64;
            for segment in chunk.geometry.segments(offset, len_bytes, copy) {
                let (here, here_offset) = (at.advance(done), offset.saturating_add(done));
                done = done.saturating_add(segment.len_bytes);
                if chunk.item.stripes[segment.stripe].devid == devid {
                    let piece = &mut buf[..segment.len_bytes as usize];
                    self.copy_segment(&chunk, segment, here, copy, piece)?;
                    if let Some(target) = target {
                        self.write_target(target, here_offset, &[IoSlice::new(piece)], piece.len())?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Copies a segment of the copy `copy` from another, trusted copy.
    fn copy_segment(&self, chunk: &Chunk, segment: Segment, at: Logical, copy: usize, piece: &mut [u8]) -> Result<()> {
        let mut last_error = None;
        let mut others: Vec<usize> = (0..chunk.geometry.nr_copies()).filter(|&other| other != copy).collect();
        others.sort_by_key(|&other| self.distrust(at, piece.len() as u64, other));
        for other in others {
            match self.read_trusted_copy(at, piece, other) {
                Ok(()) => {
                    let stripe = &chunk.item.stripes[segment.stripe];
                    return self.write_stripe(stripe, segment, &[IoSlice::new(piece)]);
                }
                Err(error) => last_error = Some(error),
            }
        }
        Err(last_error.unwrap_or_else(|| Error::Bug { what: format!("{at} has no other copy") }))
    }
}

/// Longest part that is copied to a twin at once.
const TWIN_ELEMENT_BYTES: u64 = 1 << 20;

/// Cuts a logical range at the ends of elements, such as those of stripes, into whole units. A unit that crosses such an end
/// is a part by itself.
fn elements(range: Range<u64>, unit_bytes: u64, element_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let to_element = element_bytes.saturating_sub(at.checked_rem(element_bytes).unwrap_or(0));
        let whole = to_element.saturating_sub(to_element.checked_rem(unit_bytes).unwrap_or(0)).max(unit_bytes);
        let part = at..at.saturating_add(whole).min(range.end);
        at = part.end;
        (part.start < part.end).then_some(part)
    })
}
