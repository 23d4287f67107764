//! Writing to all copies at once.
//!
//! Invariants:
//! - W1. A write succeeds only if each byte has a copy that is written and trusted.
//! - W2. A copy that could not be written is never read as if it were good. If readers verify the content, the range is
//!   remembered on the member: readers avoid it, and it is written again, or the member kicked, before the next
//!   superblock (`repair::settle_failed_writes`). If no reader can verify the content, the member is kicked before the
//!   write returns.
//! - W3. Without redundancy, a write of content that no reader verifies needs all copies, because a stale copy looks
//!   like a good one. A write of other content needs one copy.

use std::borrow::Cow;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::Logical;

use super::PARALLEL_MIN_BYTES;
use crate::chunk_map::Chunk;
use crate::fan_out::fan_out;
use crate::member::Member;
use crate::profile::Segment;
use crate::set::Volumes;

/// Whether readers verify the content.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ContentVerification {
    Verified,
    Unverified,
}

/// Content that goes to the same offset of several stripes, its copies.
struct MirroredPiece<'b> {
    stripes: Range<usize>,
    offset: u64,
    len_bytes: u64,
    bufs: Cow<'b, [IoSlice<'b>]>,
}

/// One copy of a piece.
struct CopyWrite<'p> {
    piece: usize,
    stripe: usize,
    segment: Segment,
    bufs: &'p [IoSlice<'p>],
    member: Option<Arc<Member>>,
}

impl Volumes {
    /// Writes all copies.
    pub fn write(&self, logical: Logical, data: &[u8]) -> Result<()> {
        self.write_vectored(logical, &[IoSlice::new(data)])
    }

    /// Writes consecutive buffers to all copies. After an error the copies may differ.
    pub fn write_vectored(&self, logical: Logical, bufs: &[IoSlice<'_>]) -> Result<()> {
        self.write_copies(logical, bufs, ContentVerification::Unverified)
    }

    /// Writes consecutive buffers of content that readers verify (W2, W3). The device's statistics count each failed
    /// write of a copy. A reader that finds the copy bad repairs it.
    pub fn write_verifiable(&self, logical: Logical, bufs: &[IoSlice<'_>]) -> Result<()> {
        self.write_copies(logical, bufs, ContentVerification::Verified)
    }

    fn write_copies(&self, logical: Logical, bufs: &[IoSlice<'_>], content: ContentVerification) -> Result<()> {
        self.check_writable()?;
        let _layout = self.layout_lock.read();
        let total: usize = bufs.iter().map(|buf| buf.len()).sum();
        let _writing = self.range_locks.write(logical, total as u64);
        let mut done = 0;
        let mut at = logical;
        while done < total {
            let (chunk, offset) = self.chunk_for(at, 0)?;
            let left = total.saturating_sub(done);
            let len = usize::try_from(chunk.range.bytes_from(at)).unwrap_or(usize::MAX).min(left);
            let part = if len == total { Cow::Borrowed(bufs) } else { Cow::Owned(slice_bufs(bufs, done, len)) };
            let target = chunk.target.as_deref();
            let _copying = target.map(|target| target.begin_write(offset, len));
            self.write_part(&chunk, offset, &part, len, content)?;
            if let Some(target) = target {
                self.write_target(target, offset, &part, len)?;
            }
            done = done.saturating_add(len);
            at = at.advance(len as u64);
        }
        Ok(())
    }

    /// Writes `len` bytes, which must lie inside `chunk` from `offset` on.
    fn write_part(
        &self,
        chunk: &Chunk,
        offset: u64,
        bufs: &[IoSlice<'_>],
        len: usize,
        content: ContentVerification,
    ) -> Result<()> {
        assert!(!self.is_on_seed(chunk), "E1 of `seed`: a chunk on a seed is written");
        if chunk.geometry.has_parity() {
            return Err(Error::ReadOnly { reason: "RAID5 and RAID6 are supported for reading only".to_owned() });
        }
        if let [stripe] = chunk.item.stripes.as_slice() {
            let segment = Segment { stripe: 0, offset, len_bytes: len as u64 };
            return self
                .write_stripe(stripe, segment, bufs)
                .inspect_err(|_| chunk.target.iter().for_each(|target| target.note_failure()));
        }
        let pieces = pieces_of(chunk, offset, bufs, len);
        let writes: Vec<CopyWrite<'_>> = pieces
            .iter()
            .enumerate()
            .flat_map(|(number, piece)| {
                piece.stripes.clone().map(move |stripe| CopyWrite {
                    piece: number,
                    stripe,
                    segment: Segment { stripe, offset: piece.offset, len_bytes: piece.len_bytes },
                    bufs: &piece.bufs,
                    member: None,
                })
            })
            .map(|write| CopyWrite { member: self.written_member(&chunk.item.stripes[write.stripe]), ..write })
            .collect();
        let write_one = |write: &CopyWrite<'_>| match (&write.member, chunk.geometry.has_redundancy()) {
            (None, true) => None,
            _ => Some(self.write_stripe(&chunk.item.stripes[write.stripe], write.segment, write.bufs)),
        };
        let is_worth_threads = chunk.is_on_several_devices()
            && writes.iter().filter(|write| write.segment.len_bytes >= PARALLEL_MIN_BYTES).nth(1).is_some();
        let results: Vec<Option<Result<()>>> = if is_worth_threads {
            fan_out(writes.iter().collect(), write_one)
        } else {
            writes.iter().map(write_one).collect()
        };
        if results.iter().all(|result| matches!(result, Some(Ok(())))) {
            return Ok(());
        }
        let at = chunk.start().advance(offset);
        self.judge(chunk, at.0..at.advance(len as u64).0, &pieces, &writes, results, content)
    }

    /// Decides whether a write of which some copies failed has succeeded, and excludes those copies (W1, W2, W3).
    fn judge(
        &self,
        chunk: &Chunk,
        range: Range<u64>,
        pieces: &[MirroredPiece<'_>],
        writes: &[CopyWrite<'_>],
        results: Vec<Option<Result<()>>>,
        content: ContentVerification,
    ) -> Result<()> {
        let has_redundancy = chunk.geometry.has_redundancy();
        let mut is_written = vec![false; pieces.len()];
        let mut failures: Vec<(&CopyWrite<'_>, Error)> = Vec::new();
        let mut no_member = None;
        for (write, result) in writes.iter().zip(results) {
            match result {
                // A copy on a stale member does not count, because the member is not trusted (W1).
                Some(Ok(())) => {
                    let counts = write.member.as_ref().is_some_and(|member| member.is_trusted(has_redundancy));
                    is_written[write.piece] |= counts;
                }
                Some(Err(error)) => failures.push((write, error)),
                None => no_member = Some(write),
            }
        }
        if let Some((_, error)) = failures.first()
            && let Some(target) = &chunk.target
        {
            tracing::warn!("a chunk that is being moved stays where it was: {error}");
            target.note_failure();
        }
        if !is_written.iter().all(|written| *written) {
            let first = failures.into_iter().next().map(|(_, error)| error);
            let missing = || {
                let stripe = no_member.and_then(|write| chunk.item.stripes.get(write.stripe));
                let devid = stripe.map(|stripe| stripe.devid).unwrap_or_default();
                Error::io("write", super::missing(devid), 0, 0, super::not_given(false))
            };
            return Err(first.unwrap_or_else(missing));
        }
        for (write, error) in failures {
            match (&write.member, content) {
                (Some(member), ContentVerification::Verified) if has_redundancy => {
                    tracing::warn!("writing a copy of {} failed: {error}", Logical(range.start));
                    if !member.note_failed(range.clone()) {
                        self.kick(member, error)?;
                    }
                }
                (Some(member), ContentVerification::Unverified) if has_redundancy => self.kick(member, error)?,
                (_, ContentVerification::Verified) => {
                    tracing::warn!("writing a copy of {} failed: {error}", Logical(range.start));
                }
                (_, ContentVerification::Unverified) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Cuts `len` bytes from `offset` on into the pieces of the chunk's stripes. The segments of a stripe are consecutive
/// on it, so they form one piece.
fn pieces_of<'b>(chunk: &Chunk, offset: u64, bufs: &'b [IoSlice<'b>], len: usize) -> Vec<MirroredPiece<'b>> {
    let nr_copies = chunk.geometry.nr_copies();
    let len_bytes = len as u64;
    if chunk.geometry.is_mirrored() {
        return vec![MirroredPiece { stripes: 0..nr_copies, offset, len_bytes, bufs: Cow::Borrowed(bufs) }];
    }
    let mut pieces: Vec<MirroredPiece<'b>> = Vec::new();
    let mut done = 0usize;
    for segment in chunk.geometry.segments(offset, len_bytes, 0) {
        let part = slice_bufs(bufs, done, segment.len_bytes as usize);
        done = done.saturating_add(segment.len_bytes as usize);
        match pieces.iter_mut().find(|piece| piece.stripes.start == segment.stripe) {
            Some(piece) => {
                piece.len_bytes = piece.len_bytes.saturating_add(segment.len_bytes);
                piece.bufs.to_mut().extend(part);
            }
            None => pieces.push(MirroredPiece {
                stripes: segment.stripe..segment.stripe.saturating_add(nr_copies),
                offset: segment.offset,
                len_bytes: segment.len_bytes,
                bufs: Cow::Owned(part),
            }),
        }
    }
    pieces
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
