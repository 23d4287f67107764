//! Reading from the least busy copy, with verification and retry.
//!
//! Invariants:
//! - R1. A read fails only after a piece was bad in every copy. The error of a failed read is the error of the copy that
//!   was read first.
//! - R2. Content that nobody verifies is read from trusted copies only: not from a stale member, and not where a write
//!   failed. Verified content may come from any copy. Copies on members in sync are read first, then those on late
//!   members, then the others.

use std::io::IoSliceMut;
use std::sync::atomic::Ordering;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::{Corrupt, FormatError, Logical};

use super::{PARALLEL_MIN_BYTES, missing, not_given};
use crate::chunk_map::Chunk;
use crate::fan_out::fan_out;
use crate::member::{Member, Stat};
use crate::profile::Segment;
use crate::set::{Volumes, unmapped};

/// Checks a piece, given its index in the read and its content.
pub type Verify<'v> = dyn Fn(usize, &[u8]) -> Result<(), FormatError> + 'v;

/// The copies from which a part of a chunk was read.
enum Choice {
    /// One copy of all bytes.
    One(usize),
    /// The copy of each column of a striped chunk with copies.
    Columns(Vec<usize>),
}

impl Choice {
    fn at(&self, chunk: &Chunk, offset: u64) -> usize {
        match self {
            Self::One(copy) => *copy,
            Self::Columns(copies) => copies.get(chunk.geometry.column_of(offset)).copied().unwrap_or(0),
        }
    }
}

/// A read of one stripe into scattered buffers.
struct ColumnRead<'b> {
    segment: Segment,
    bufs: Vec<IoSliceMut<'b>>,
}

impl Volumes {
    /// Reads `buf.len()` bytes and calls `verify(index, piece)` for each piece of `unit_bytes`. A piece that fails the
    /// check, or cannot be read, is read from the other copies, and the good copy is written over the bad copies that
    /// were read, unless the filesystem is read-only. A piece without a good copy fails the read.
    pub fn read(&self, logical: Logical, buf: &mut [u8], unit_bytes: usize, verify: &Verify<'_>) -> Result<()> {
        self.read_pieces(logical, buf, unit_bytes, Some(verify))
    }

    /// Reads content that nobody verifies, in pieces of `unit_bytes` (R2).
    pub fn read_unverified(&self, logical: Logical, buf: &mut [u8], unit_bytes: usize) -> Result<()> {
        self.read_pieces(logical, buf, unit_bytes, None)
    }

    fn read_pieces(
        &self,
        logical: Logical,
        buf: &mut [u8],
        unit_bytes: usize,
        verify: Option<&Verify<'_>>,
    ) -> Result<()> {
        let unit_bytes = unit_bytes.max(1);
        let (mut rest, mut at, mut nr_done) = (buf, logical, 0usize);
        while !rest.is_empty() {
            let (chunk, offset) = self.chunk_for(at, 0)?;
            let here = usize::try_from(chunk.range.bytes_from(at)).unwrap_or(usize::MAX).min(rest.len());
            // A piece that crosses the end of the chunk is read by itself.
            let whole_units = here.saturating_sub(here.checked_rem(unit_bytes).unwrap_or(0));
            let len = match here == rest.len() {
                true => here,
                false if whole_units == 0 => unit_bytes.min(rest.len()),
                false => whole_units,
            };
            let (part, behind) = rest.split_at_mut(len);
            let is_inside = len <= here;
            let choice = if is_inside { self.choose(&chunk, offset, len as u64) } else { Choice::One(0) };
            let whole = match is_inside && (verify.is_some() || self.is_trusted(&chunk, offset, len as u64, &choice)) {
                true => Some(self.read_chosen(&chunk, offset, part, &choice)),
                false => None,
            };
            for (number, piece) in part.chunks_mut(unit_bytes).enumerate() {
                let from_part = number.saturating_mul(unit_bytes) as u64;
                let at = at.checked_add(from_part).ok_or_else(|| unmapped(at))?;
                let index = nr_done.saturating_add(number);
                let first_copy = choice.at(&chunk, offset.saturating_add(from_part));
                let first = match &whole {
                    Some(Ok(())) => check(verify, index, piece, at),
                    _ => self.read_verified(at, piece, first_copy, index, verify),
                };
                if let Err(error) = first {
                    self.read_other_copies(at, piece, first_copy, index, verify, error)?;
                }
            }
            nr_done = nr_done.saturating_add(len.div_ceil(unit_bytes));
            at = at.advance(len as u64);
            rest = behind;
        }
        Ok(())
    }

    fn read_verified(
        &self,
        at: Logical,
        piece: &mut [u8],
        copy: usize,
        index: usize,
        verify: Option<&Verify<'_>>,
    ) -> Result<()> {
        if verify.is_none() {
            self.check_trusted(at, piece.len() as u64, copy)?;
        }
        self.read_copy(at, piece, copy)?;
        check(verify, index, piece, at)
    }

    /// Reads a piece from its other copies after the copy `first_copy` was bad. Repairs the bad copies.
    fn read_other_copies(
        &self,
        at: Logical,
        piece: &mut [u8],
        first_copy: usize,
        index: usize,
        verify: Option<&Verify<'_>>,
        first_error: Error,
    ) -> Result<()> {
        self.count_bad(at, first_copy, &first_error);
        let mut bad = vec![first_copy];
        let nr_copies = self.num_copies(at);
        let mut others: Vec<usize> = (0..nr_copies).filter(|&copy| copy != first_copy).collect();
        others.sort_by_key(|&copy| self.distrust(at, piece.len() as u64, copy));
        for copy in others {
            match self.read_verified(at, piece, copy, index, verify) {
                Ok(()) => {
                    self.repair(at, piece, &bad, copy, &|content| check(verify, index, content, at).is_ok());
                    return Ok(());
                }
                Err(error) => {
                    self.count_bad(at, copy, &error);
                    bad.push(copy);
                }
            }
        }
        debug_assert!(bad.len() >= nr_copies, "R1: a copy of {at} was not tried");
        Err(first_error)
    }

    /// If `error` is wrong content, counts it for the device. [`Volumes::read_segment`] counts read errors.
    fn count_bad(&self, at: Logical, copy: usize, error: &Error) {
        if let Error::Corrupt(corrupt) = error
            && let Ok((chunk, offset)) = self.chunk_for(at, copy)
            && let Some(segment) = chunk.geometry.segments(offset, 1, copy).next()
            && let Some(member) = self.member(chunk.item.stripes[segment.stripe].devid)
        {
            member.count(if corrupt.cause.is_generation() { Stat::Generation } else { Stat::Corruption });
        }
    }

    /// Chooses a copy for each byte of a part of a chunk: of the trusted ones, the copy whose device is least busy.
    fn choose(&self, chunk: &Chunk, offset: u64, len_bytes: u64) -> Choice {
        if !chunk.geometry.has_redundancy() || chunk.geometry.has_parity() {
            return Choice::One(0);
        }
        let nr_copies = chunk.geometry.nr_copies();
        let start = chunk.start().advance(offset).0;
        let range = start..start.saturating_add(len_bytes);
        let best = |first_stripe: usize| {
            let rank = |copy: &usize| {
                let stripe = chunk.item.stripes.get(first_stripe.saturating_add(*copy));
                let member = stripe.and_then(|stripe| self.usable_member(stripe));
                member.map_or((u8::MAX, u64::MAX), |member| {
                    (member.distrust(true, &range), member.busy_bytes.load(Ordering::Relaxed))
                })
            };
            (0..nr_copies).min_by_key(rank).unwrap_or(0)
        };
        if chunk.geometry.is_mirrored() {
            return Choice::One(best(0));
        }
        let nr_columns = chunk.geometry.nr_columns();
        Choice::Columns((0..nr_columns).map(|column| best(column.saturating_mul(nr_copies))).collect())
    }

    /// Whether all copies of a choice are trusted (R2).
    fn is_trusted(&self, chunk: &Chunk, offset: u64, len_bytes: u64, choice: &Choice) -> bool {
        let mut at = offset;
        let end = offset.saturating_add(len_bytes);
        chunk.geometry.segments(offset, len_bytes, 0).all(|segment| {
            let copy = choice.at(chunk, at.min(end));
            at = at.saturating_add(segment.len_bytes);
            let start = at.saturating_sub(segment.len_bytes);
            self.check_trusted(chunk.start().advance(start), segment.len_bytes, copy).is_ok()
        })
    }

    /// How little a copy of these bytes is trusted: see [`Member::distrust`].
    pub(super) fn distrust(&self, at: Logical, len_bytes: u64, copy: usize) -> u8 {
        let Ok((chunk, offset)) = self.chunk_for(at, copy) else { return u8::MAX };
        let len_bytes = len_bytes.min(chunk.range.bytes_from(at));
        let range = at.0..at.advance(len_bytes).0;
        let of = |segment: Segment| {
            let member = self.member(chunk.item.stripes[segment.stripe].devid);
            member.map_or(u8::MAX, |member| member.distrust(chunk.geometry.has_redundancy(), &range))
        };
        chunk.geometry.segments(offset, len_bytes, copy).map(of).max().unwrap_or(u8::MAX)
    }

    /// Fails if a copy of these bytes is not trusted.
    pub(super) fn check_trusted(&self, at: Logical, len_bytes: u64, copy: usize) -> Result<()> {
        let (chunk, offset) = self.chunk_for(at, copy)?;
        let len_bytes = len_bytes.min(chunk.range.bytes_from(at));
        let range = at.0..at.advance(len_bytes).0;
        for segment in chunk.geometry.segments(offset, len_bytes, copy) {
            let stripe = &chunk.item.stripes[segment.stripe];
            let member = self.member(stripe.devid);
            let is_trusted =
                |member: &Member| member.is_trusted(chunk.geometry.has_redundancy()) && !member.lacks(&range);
            if !member.as_deref().is_some_and(is_trusted) {
                let device = member.map_or_else(|| missing(stripe.devid), |member| member.describe());
                let offset = stripe.offset.advance(segment.offset).0;
                let source = match self.usable_member(stripe) {
                    Some(_) => std::io::Error::other("this copy is out of date, and nothing can verify its content"),
                    None => not_given(chunk.geometry.has_parity()),
                };
                return Err(Error::io("read", device, offset, segment.len_bytes, source));
            }
        }
        Ok(())
    }

    /// Reads a part of a chunk from the chosen copies.
    fn read_chosen(&self, chunk: &Chunk, offset: u64, part: &mut [u8], choice: &Choice) -> Result<()> {
        let len_bytes = part.len() as u64;
        if chunk.geometry.is_mirrored() {
            let copy = choice.at(chunk, offset);
            return self.read_segment(chunk, Segment { stripe: copy, offset, len_bytes }, part);
        }
        let mut columns: Vec<ColumnRead<'_>> = Vec::new();
        let (mut rest, mut at) = (part, offset);
        for first in chunk.geometry.segments(offset, len_bytes, 0) {
            let (piece, behind) = rest.split_at_mut(first.len_bytes as usize);
            let segment = Segment { stripe: first.stripe.saturating_add(choice.at(chunk, at)), ..first };
            match columns.iter_mut().find(|column| column.segment.is_before(&segment)) {
                Some(column) => {
                    column.segment.len_bytes = column.segment.len_bytes.saturating_add(segment.len_bytes);
                    column.bufs.push(IoSliceMut::new(piece));
                }
                None => columns.push(ColumnRead { segment, bufs: vec![IoSliceMut::new(piece)] }),
            }
            rest = behind;
            at = at.saturating_add(first.len_bytes);
        }
        let read_one = |mut column: ColumnRead<'_>| self.read_column(chunk, column.segment, &mut column.bufs);
        let is_worth_threads = chunk.is_on_several_devices()
            && columns.iter().filter(|column| column.segment.len_bytes >= PARALLEL_MIN_BYTES).nth(1).is_some();
        match is_worth_threads {
            true => fan_out(columns, read_one).into_iter().collect(),
            false => columns.into_iter().try_for_each(read_one),
        }
    }

    /// Reads the copy that a member has of these bytes, without a check. Fails if it has none.
    pub(crate) fn read_copy_on(&self, member: &Member, at: Logical, buf: &mut [u8]) -> Result<()> {
        let (chunk, offset) = self.chunk_for(at, 0)?;
        let len_bytes = (buf.len() as u64).min(chunk.range.bytes_from(at));
        let is_there = |segment: Segment| chunk.item.stripes[segment.stripe].devid == member.devid();
        let mut copies = 0..chunk.geometry.nr_copies();
        let copy = copies.find(|&copy| chunk.geometry.segments(offset, len_bytes, copy).all(is_there));
        self.read_copy(at, buf, copy.ok_or_else(|| unmapped(at))?)
    }

    /// Reads one copy without a check of its content, if the copy is trusted.
    pub(crate) fn read_trusted_copy(&self, at: Logical, buf: &mut [u8], copy: usize) -> Result<()> {
        self.check_trusted(at, buf.len() as u64, copy)?;
        self.read_copy(at, buf, copy)
    }

    /// Reads one copy without a check. The number `copy` is below [`Volumes::num_copies`].
    pub fn read_copy(&self, logical: Logical, buf: &mut [u8], copy: usize) -> Result<()> {
        let mut rest = buf;
        let mut at = logical;
        while !rest.is_empty() {
            let (chunk, offset) = self.chunk_for(at, copy)?;
            let len = usize::try_from(chunk.range.bytes_from(at)).unwrap_or(usize::MAX).min(rest.len());
            let (mut here, behind) = rest.split_at_mut(len);
            for segment in chunk.geometry.segments(offset, len as u64, copy) {
                let (piece, next) = here.split_at_mut(segment.len_bytes as usize);
                self.read_segment(&chunk, segment, piece)?;
                here = next;
            }
            rest = behind;
            at = at.advance(len as u64);
        }
        Ok(())
    }

    fn read_segment(&self, chunk: &Chunk, segment: Segment, piece: &mut [u8]) -> Result<()> {
        self.read_column(chunk, segment, &mut [IoSliceMut::new(piece)])
    }

    /// Reads consecutive bytes of a stripe.
    pub(super) fn read_column(&self, chunk: &Chunk, segment: Segment, bufs: &mut [IoSliceMut<'_>]) -> Result<()> {
        let stripe = &chunk.item.stripes[segment.stripe];
        let offset = stripe.offset.advance(segment.offset).0;
        let io_error = |device, source| Error::io("read", device, offset, segment.len_bytes, source);
        let not_given = || not_given(chunk.geometry.has_parity());
        let Some(member) = self.member(stripe.devid) else { return Err(io_error(missing(stripe.devid), not_given())) };
        let Some(backend) = member.backend() else { return Err(io_error(member.describe(), not_given())) };
        member.busy_bytes.fetch_add(segment.len_bytes, Ordering::Relaxed);
        let done = match bufs {
            [buf] => backend.read_at(offset, buf),
            bufs => backend.read_vectored_at(offset, bufs),
        };
        member.busy_bytes.fetch_sub(segment.len_bytes, Ordering::Relaxed);
        done.map_err(|source| {
            member.count(Stat::Read);
            io_error(backend.describe(), source)
        })
    }
}

fn check(verify: Option<&Verify<'_>>, index: usize, piece: &[u8], at: Logical) -> Result<()> {
    let Some(verify) = verify else { return Ok(()) };
    verify(index, piece).map_err(|cause| Corrupt::new(cause).at(at).into())
}
