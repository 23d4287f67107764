//! Reading with verification, retry and repair; writing to all copies.
//!
//! Invariants:
//! - I1. A read fails only after a piece was bad in every copy. The error of a failed read is the error of the first
//!   copy.
//! - I2. A repair reads good and bad copies again under the exclusive lock, so a repair never undoes a newer write.
//! - I3. A write of content that readers verify needs one successful copy. A write of other content needs all copies,
//!   because a stale copy without checksums looks like a good copy.

use std::io::IoSlice;
use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::Stripe;
use ubtrfs_format::{Corrupt, DevId, FormatError, Logical};

use crate::chunk_map::Chunk;
use crate::profile::Segment;
use crate::set::{Member, Stat, Volumes, unmapped};

/// The number of copies that must be written for a write to succeed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needed {
    All,
    One,
}

/// Checks a piece, given its index in the read and its content.
type Verify<'v> = dyn Fn(usize, &[u8]) -> Result<(), FormatError> + 'v;

impl Volumes {
    /// Reads `buf.len()` bytes and calls `verify(index, piece)` for each piece of `unit_bytes`. A piece that fails the
    /// check, or cannot be read, is read from the other copies, and the good copy is written over the bad copies that
    /// were read, unless the filesystem is read-only. A piece without a good copy fails the read.
    pub fn read(&self, logical: Logical, buf: &mut [u8], unit_bytes: usize, verify: &Verify<'_>) -> Result<()> {
        let unit_bytes = unit_bytes.max(1);
        let whole = self.read_copy(logical, buf, 0);
        for (index, piece) in buf.chunks_mut(unit_bytes).enumerate() {
            let offset = index.saturating_mul(unit_bytes) as u64;
            let at = logical.checked_add(offset).ok_or_else(|| unmapped(logical))?;
            let first = match &whole {
                Ok(()) => verify(index, piece).map_err(|cause| Corrupt::new(cause).at(at).into()),
                Err(_) => self.read_verified(at, piece, 0, index, verify),
            };
            if let Err(error) = first {
                self.read_other_copies(at, piece, index, verify, error)?;
            }
        }
        Ok(())
    }

    fn read_verified(
        &self,
        at: Logical,
        piece: &mut [u8],
        copy: usize,
        index: usize,
        verify: &Verify<'_>,
    ) -> Result<()> {
        self.read_copy(at, piece, copy)?;
        verify(index, piece).map_err(|cause| Corrupt::new(cause).at(at).into())
    }

    /// Reads a piece from its other copies after its first copy was bad. Repairs the bad copies.
    fn read_other_copies(
        &self,
        at: Logical,
        piece: &mut [u8],
        index: usize,
        verify: &Verify<'_>,
        first_error: Error,
    ) -> Result<()> {
        self.count_bad(at, 0, &first_error);
        let mut bad = vec![0];
        for copy in 1..self.num_copies(at) {
            match self.read_verified(at, piece, copy, index, verify) {
                Ok(()) => {
                    self.repair(at, piece, &bad, copy, &|content| verify(index, content).is_ok());
                    return Ok(());
                }
                Err(error) => {
                    self.count_bad(at, copy, &error);
                    bad.push(copy);
                }
            }
        }
        Err(first_error)
    }

    /// If `error` is wrong content, adds one to the device's count of corrupt pieces. [`Volumes::read_segment`] counts
    /// read errors.
    fn count_bad(&self, at: Logical, copy: usize, error: &Error) {
        if let Error::Corrupt(_) = error
            && let Ok((chunk, offset)) = self.chunk_for(at, copy)
            && let Some(segment) = chunk.geometry.segments(offset, 1, copy).next()
            && let Some(member) = self.member(chunk.item.stripes[segment.stripe].devid)
        {
            member.count(Stat::Corruption);
        }
    }

    /// Writes a good piece over its bad copies and, during a migration, over the target's fresh stripes. Does nothing
    /// if the good copy has changed since it was read (I2). Errors are ignored, because the reader has its data.
    fn repair(&self, at: Logical, good: &[u8], bad: &[usize], good_copy: usize, is_good: &dyn Fn(&[u8]) -> bool) {
        if self.check_writable().is_err() {
            return;
        }
        let _exclusive = self.repair_lock.write();
        let Ok((chunk, offset)) = self.chunk_for(at, good_copy) else { return };
        if chunk.range.bytes_from(at) < good.len() as u64 {
            return;
        }
        let mut now = vec![0; good.len()];
        if self.read_copy(at, &mut now, good_copy).is_err() || now != good {
            return;
        }
        let target = chunk.target.as_deref();
        let _copying = target.map(|target| target.begin_write(offset, good.len()));
        for &copy in bad {
            let is_bad = self.read_copy(at, &mut now, copy).is_err() || !is_good(&now);
            if is_bad {
                let _counted = self.write_copy(&chunk, offset, &[IoSlice::new(good)], good.len(), copy);
            }
        }
        if let Some(target) = target {
            let _counted = self.write_target(target, offset, &[IoSlice::new(good)], good.len());
        }
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

    /// The chunk that covers an address, and the address's offset in the chunk. Fails if the chunk does not have this
    /// copy.
    fn chunk_for(&self, at: Logical, copy: usize) -> Result<(Arc<Chunk>, u64)> {
        let chunk = self.chunks.get(at).filter(|chunk| copy < chunk.geometry.nr_copies());
        let found = chunk.and_then(|chunk| chunk.range.offset_of(at).map(|offset| (chunk, offset)));
        found.ok_or_else(|| unmapped(at))
    }

    fn read_segment(&self, chunk: &Chunk, segment: Segment, piece: &mut [u8]) -> Result<()> {
        let stripe = &chunk.item.stripes[segment.stripe];
        let offset = stripe.offset.advance(segment.offset).0;
        let io_error = |device, source| Error::io("read", device, offset, segment.len_bytes, source);
        let not_given = || not_given(chunk.geometry.has_parity());
        let Some(member) = self.member(stripe.devid) else { return Err(io_error(missing(stripe.devid), not_given())) };
        let Some(backend) = &member.backend else { return Err(io_error(member.describe(), not_given())) };
        backend.read_at(offset, piece).map_err(|source| {
            member.count(Stat::Read);
            io_error(backend.describe(), source)
        })
    }

    /// Writes all copies.
    pub fn write(&self, logical: Logical, data: &[u8]) -> Result<()> {
        self.write_vectored(logical, &[IoSlice::new(data)])
    }

    /// Writes consecutive buffers to all copies. After an error the copies may differ.
    pub fn write_vectored(&self, logical: Logical, bufs: &[IoSlice<'_>]) -> Result<()> {
        self.write_copies(logical, bufs, Needed::All)
    }

    /// Writes consecutive buffers of content that readers verify; fails only if no copy could be written (I3). The
    /// device's statistics count each failed write of a copy. A reader that finds the copy bad repairs it.
    pub fn write_verifiable(&self, logical: Logical, bufs: &[IoSlice<'_>]) -> Result<()> {
        self.write_copies(logical, bufs, Needed::One)
    }

    fn write_copies(&self, logical: Logical, bufs: &[IoSlice<'_>], needed: Needed) -> Result<()> {
        self.check_writable()?;
        let _shared = self.repair_lock.read();
        let total: usize = bufs.iter().map(|buf| buf.len()).sum();
        let mut done = 0;
        let mut at = logical;
        while done < total {
            let (chunk, offset) = self.chunk_for(at, 0)?;
            let left = total.saturating_sub(done);
            let len = usize::try_from(chunk.range.bytes_from(at)).unwrap_or(usize::MAX).min(left);
            let part = if len == total { bufs.to_vec() } else { slice_bufs(bufs, done, len) };
            let target = chunk.target.as_deref();
            let _copying = target.map(|target| target.begin_write(offset, len));
            let mut first_error = None;
            let mut is_written = false;
            for copy in 0..chunk.geometry.nr_copies() {
                match self.write_copy(&chunk, offset, &part, len, copy) {
                    Ok(()) => is_written = true,
                    Err(error) if needed == Needed::All => {
                        target.inspect(|target| target.note_failure());
                        return Err(error);
                    }
                    Err(error) => {
                        target.inspect(|target| target.note_failure());
                        tracing::warn!("writing a copy of {at} failed: {error}");
                        first_error.get_or_insert(error);
                    }
                }
            }
            if let Some(error) = first_error
                && !is_written
            {
                return Err(error);
            }
            if let Some(target) = target {
                self.write_target(target, offset, &part, len)?;
            }
            done = done.saturating_add(len);
            at = at.advance(len as u64);
        }
        Ok(())
    }

    /// Writes `len` bytes, which must lie inside `chunk` from `offset` on, to one copy.
    fn write_copy(&self, chunk: &Chunk, offset: u64, bufs: &[IoSlice<'_>], len: usize, copy: usize) -> Result<()> {
        if chunk.geometry.has_parity() {
            return Err(Error::ReadOnly { reason: "RAID5 and RAID6 are supported for reading only".to_owned() });
        }
        let mut done = 0usize;
        for segment in chunk.geometry.segments(offset, len as u64, copy) {
            let segment_len = segment.len_bytes as usize;
            match segment_len == len {
                true => self.write_stripe(&chunk.item.stripes[segment.stripe], segment, bufs)?,
                false => {
                    let part = slice_bufs(bufs, done, segment_len);
                    self.write_stripe(&chunk.item.stripes[segment.stripe], segment, &part)?;
                }
            }
            done = done.saturating_add(segment_len);
        }
        Ok(())
    }

    /// Writes a segment of a stripe.
    pub(crate) fn write_stripe(&self, stripe: &Stripe, segment: Segment, bufs: &[IoSlice<'_>]) -> Result<()> {
        let offset = stripe.offset.advance(segment.offset).0;
        let io_error = |device, source| Error::io("write", device, offset, segment.len_bytes, source);
        let member: Arc<Member> =
            self.member(stripe.devid).ok_or_else(|| io_error(missing(stripe.devid), not_given(false)))?;
        let Some(backend) = &member.backend else { return Err(io_error(member.describe(), not_given(false))) };
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
        let _shared = self.repair_lock.read();
        let end = Logical(logical.0.saturating_add(len_bytes));
        let mut at = logical;
        while let Some(left) = end.offset_from(at).filter(|&left| left > 0) {
            let (chunk, offset) = self.chunk_for(at, 0)?;
            let len = left.min(chunk.range.bytes_from(at));
            for copy in 0..chunk.geometry.nr_copies() {
                for segment in chunk.geometry.segments(offset, len, copy) {
                    self.discard_segment(&chunk, segment)?;
                }
            }
            at = at.advance(len);
        }
        Ok(())
    }

    fn discard_segment(&self, chunk: &Chunk, segment: Segment) -> Result<()> {
        let stripe = &chunk.item.stripes[segment.stripe];
        let Some(backend) = self.member(stripe.devid).and_then(|member| member.backend.clone()) else { return Ok(()) };
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

/// The `len` bytes of `bufs` from byte `start` on.
fn slice_bufs<'a>(bufs: &'a [IoSlice<'_>], start: usize, len: usize) -> Vec<IoSlice<'a>> {
    let (mut skip, mut left) = (start, len);
    let mut out = Vec::new();
    for buf in bufs {
        if let Some(rest) = skip.checked_sub(buf.len()) {
            skip = rest;
            continue;
        }
        let part = &buf[skip..];
        let part = &part[..left.min(part.len())];
        out.push(IoSlice::new(part));
        left = left.saturating_sub(part.len());
        skip = 0;
        if left == 0 {
            break;
        }
    }
    out
}
