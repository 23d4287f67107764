//! Checks the csum tree: that checksums belong to data, and that data matches its checksums.
//!
//! Invariants:
//! - I1. Adjacent ranges are joined, so a contiguous run of checksums takes 16 bytes, regardless of its number of csum
//!   items.

use ubtrfs_error::side_by_side;
use ubtrfs_format::{CsumType, KeyType, Logical, RootId};

use crate::array::{Array, ChunkSpan, Unreadable};
use crate::checker::Checker;
use crate::problem::{Code, Place};
use crate::reader::span_at;
use crate::walk::{Leaf, WalkEvent};

/// Address ranges with checksums, in order.
#[derive(Debug, Default)]
pub(crate) struct CsumRanges {
    list: Vec<(u64, u64)>,
    /// Whether the whole tree could be read.
    pub(crate) complete: bool,
}

impl CsumRanges {
    /// Sorts and joins ranges.
    pub(crate) fn of(mut ranges: Vec<(u64, u64)>) -> Self {
        ranges.sort_unstable();
        let mut list: Vec<(u64, u64)> = Vec::new();
        for (from, to) in ranges.into_iter().filter(|(from, to)| from < to) {
            match list.last_mut() {
                Some((_, end)) if *end >= from => *end = to.max(*end),
                _ => list.push((from, to)),
            }
        }
        Self { list, complete: true }
    }

    /// Returns the parts of a range that have checksums.
    pub(crate) fn within(&self, from: u64, to: u64) -> Vec<(u64, u64)> {
        let first = self.list.partition_point(|range| range.1 <= from);
        let inside = self.list.iter().skip(first).take_while(|range| range.0 < to);
        inside.map(|range| (range.0.max(from), range.1.min(to))).collect()
    }

    /// The end of the run of checksums that covers an address.
    pub(crate) fn end_at(&self, at: u64) -> Option<u64> {
        let next = self.list.partition_point(|range| range.1 <= at);
        self.list.get(next).filter(|range| range.0 <= at).map(|range| range.1)
    }

    /// Number of bytes of this range that have checksums.
    pub(crate) fn covered(&self, from: u64, to: u64) -> u64 {
        let first = self.list.partition_point(|range| range.1 <= from);
        let inside = self.list.iter().skip(first).take_while(|range| range.0 < to);
        let lens = inside.map(|range| range.1.min(to).saturating_sub(range.0.max(from)));
        lens.fold(0, u64::saturating_add)
    }
}

impl<'a> Checker<'a> {
    /// Reads the csum tree.
    pub(crate) fn csum_tree(&mut self) {
        let Some(root) = self.needed_root(RootId::CSUM_TREE) else { return };
        self.csums.complete = self.walk_tree(root, &mut |checker, event| {
            if let WalkEvent::Leaf(leaf) = event {
                checker.csum_leaf(leaf);
            }
        });
        self.csums.list.sort_unstable();
    }

    fn csum_leaf(&mut self, leaf: &Leaf<'_>) {
        for (slot, start, csums) in csum_items(leaf) {
            let end = start.saturating_add(self.csummed_bytes(csums));
            match self.csums.list.last_mut() {
                Some((_, last_end)) if *last_end > start => {
                    let text = format!("the checksums from {start} on overlap those before");
                    self.sink.report(Code::CsumOrder, leaf.place(slot), text);
                    *last_end = (*last_end).max(end);
                }
                Some((_, last_end)) if *last_end == start => *last_end = end,
                _ => self.csums.list.push((start, end)),
            }
        }
    }

    /// Number of bytes that these checksums cover.
    pub(crate) fn csummed_bytes(&self, csums: &[u8]) -> u64 {
        let nr_sectors = csums.chunks_exact(self.ctx.csum_type.size()).len();
        (nr_sectors as u64).saturating_mul(self.sectorsize)
    }

    /// Checks that every checksum belongs to a data extent, or to an extent that a log replay makes.
    pub(crate) fn compare_csums_with_extents(&mut self) {
        if self.extents_have_gaps() || !self.log.complete {
            return;
        }
        let mut extra = Vec::new();
        let mut at = 0;
        for &(start, end) in &self.csums.list {
            let mut from = start;
            while from < end {
                while self.data.list.get(at).is_some_and(|extent| extent.end(self.sectorsize) <= from) {
                    at = at.saturating_add(1);
                }
                let next = self.data.list.get(at).map(|extent| (extent.bytenr, extent.end(self.sectorsize)));
                match next {
                    Some((bytenr, extent_end)) if bytenr <= from => from = extent_end,
                    Some((bytenr, _)) if bytenr < end => {
                        extra.push((from, bytenr));
                        from = bytenr;
                    }
                    _ => {
                        extra.push((from, end));
                        from = end;
                    }
                }
                if extra.len() > 10_000 {
                    break;
                }
            }
        }
        for (from, to) in extra {
            if self.log.is_data(from, to) {
                continue;
            }
            let place = Place { bytenr: Some(from), ..Place::tree(RootId::CSUM_TREE) };
            let text = format!("checksums of {} bytes outside of any data extent", to.saturating_sub(from));
            self.sink.report(Code::CsumExtra, place, text);
        }
    }

    /// Reads every copy of all data that has checksums, and compares each copy with the checksums.
    pub(crate) fn verify_data(&mut self) {
        let Some(root) = self.tree_root(RootId::CSUM_TREE) else { return };
        let total = self.csums.list.iter().map(|(start, end)| end.saturating_sub(*start)).fold(0, u64::saturating_add);
        self.progress.stage("data", Some(total));
        self.sink.mute(true);
        let mut batch = VerifyBatch::default();
        self.walk(&root, &mut |checker, event| {
            let WalkEvent::Leaf(leaf) = event else { return };
            for (_, start, csums) in csum_items(leaf) {
                checker.add_to_batch(start, csums, &mut batch);
            }
        });
        for root in self.log.roots.clone() {
            self.log_blocks.clear();
            self.walk(&root, &mut |checker, event| {
                let WalkEvent::Leaf(leaf) = event else { return };
                for (_, start, csums) in csum_items(leaf) {
                    checker.add_logged_to_batch(start, csums, &mut batch);
                }
            });
        }
        self.verify_batch(&mut batch);
        self.sink.mute(false);
    }

    /// Adds checksums from a log to the batch, as far as they belong to file extents in the log. A log may also have
    /// checksums of deleted data.
    fn add_logged_to_batch(&mut self, start: u64, csums: &[u8], batch: &mut VerifyBatch) {
        let size = self.ctx.csum_type.size();
        let end = start.saturating_add(self.csummed_bytes(csums));
        for (from, to) in self.log.written.within(start, end) {
            let sector = |at: u64| at.saturating_sub(start).checked_div(self.sectorsize);
            let index = |at: u64| sector(at).and_then(|sector| sector.try_into().ok()).unwrap_or(usize::MAX);
            let range = index(from).saturating_mul(size)..index(to).saturating_mul(size);
            let Some(part) = csums.get(range) else { continue };
            let part = part.to_vec();
            self.add_to_batch(from, &part, batch);
        }
    }

    fn add_to_batch(&mut self, start: u64, csums: &[u8], batch: &mut VerifyBatch) {
        let size = self.ctx.csum_type.size();
        let sectors_max = PIECE_BYTES.checked_div(self.sectorsize).unwrap_or(1).max(1) as usize;
        let mut at = start;
        for part in csums.chunks(size.saturating_mul(sectors_max)) {
            let len = self.csummed_bytes(part);
            match batch.pieces.last_mut() {
                Some(piece) if piece.end() == at && piece.len_bytes.saturating_add(len) <= PIECE_BYTES => {
                    piece.len_bytes = piece.len_bytes.saturating_add(len);
                    piece.csums.extend_from_slice(part);
                }
                _ => batch.pieces.push(CsumPiece { start: at, len_bytes: len, csums: part.to_vec() }),
            }
            batch.len_bytes = batch.len_bytes.saturating_add(len);
            at = at.saturating_add(len);
            if batch.len_bytes >= BATCH_BYTES {
                self.verify_batch(batch);
            }
        }
    }

    fn verify_batch(&mut self, batch: &mut VerifyBatch) {
        let pieces = std::mem::take(&mut batch.pieces);
        let len_bytes = std::mem::take(&mut batch.len_bytes);
        let part_len = pieces.len().div_ceil(self.threads).max(1);
        let verifier = CsumVerifier {
            array: self.array,
            csum_type: self.ctx.csum_type,
            sectorsize: self.sectorsize as usize,
            spans: &self.spans,
        };
        let verify = |part: &[CsumPiece]| part.iter().flat_map(|piece| verifier.verify(piece)).collect::<Vec<_>>();
        let verify = &verify;
        let found = side_by_side(pieces.chunks(part_len).map(|part| move || verify(part)));
        self.sink.mute(false);
        for bad in found.into_iter().flatten() {
            self.sink.report(bad.code, Place::at(bad.bytenr), bad.text);
        }
        self.sink.mute(true);
        self.stats.data_bytes_verified = self.stats.data_bytes_verified.saturating_add(len_bytes);
        self.progress.advance(len_bytes);
    }
}

/// Maximum number of bytes of data in one read.
const PIECE_BYTES: u64 = 1 << 20;
/// Bytes of data that the threads verify before the results are reported.
const BATCH_BYTES: u64 = 32 << 20;

#[derive(Default)]
struct VerifyBatch {
    pieces: Vec<CsumPiece>,
    len_bytes: u64,
}

struct CsumPiece {
    start: u64,
    len_bytes: u64,
    csums: Vec<u8>,
}

impl CsumPiece {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.len_bytes)
    }
}

struct CsumProblem {
    code: Code,
    bytenr: u64,
    text: String,
}

/// Compares data with checksums. Several threads share a verifier.
struct CsumVerifier<'a> {
    array: &'a Array,
    csum_type: CsumType,
    sectorsize: usize,
    spans: &'a [ChunkSpan],
}

impl CsumVerifier<'_> {
    fn verify(&self, piece: &CsumPiece) -> Vec<CsumProblem> {
        let mut bad = Vec::new();
        let mut at = piece.start;
        // A piece may extend over several chunks, so its data is verified chunk by chunk.
        while at < piece.end() {
            let Some(span) = span_at(self.spans, at) else {
                let text = "the address has checksums, but is in no chunk".to_owned();
                bad.push(CsumProblem { code: Code::DataRead, bytenr: at, text });
                break;
            };
            let end = piece.end().min(span.end);
            let len = end.saturating_sub(at) as usize;
            let sectors_before = (at.saturating_sub(piece.start) as usize).checked_div(self.sectorsize).unwrap_or(0);
            let skip = sectors_before.saturating_mul(self.csum_type.size());
            for copy in 0..span.copies {
                self.verify_copy(span, at, len, piece.csums.get(skip..).unwrap_or_default(), copy, &mut bad);
            }
            at = end;
        }
        bad
    }

    fn verify_copy(
        &self,
        span: ChunkSpan,
        start: u64,
        len: usize,
        csums: &[u8],
        copy: usize,
        bad: &mut Vec<CsumProblem>,
    ) {
        let mut data = vec![0; len];
        let unreadable = match self.array.read_copy(Logical(start), &mut data, copy) {
            Ok(()) => false,
            Err(Unreadable::Missing(_)) if !span.is_striped && self.array.has_copy(Logical(start), span.copies) => {
                return;
            }
            Err(_) => true,
        };
        let size = self.csum_type.size();
        // Consecutive sectors are reported together if all are unreadable or all have wrong checksums.
        let mut run: Option<(u64, u64, Option<String>)> = None;
        let mut tell = |run: &mut Option<(u64, u64, Option<String>)>| {
            let Some((from, to, error)) = run.take() else { return };
            let (code, what) = match error {
                Some(error) => (Code::DataRead, error),
                None => (Code::DataCsum, "does not match its checksums".to_owned()),
            };
            let on = self.array.device_of(Logical(from), copy).map(|devid| format!(" on device {devid}"));
            let on = on.unwrap_or_default();
            let text = format!("data of {} bytes, copy {copy}{on}: {what}", to.saturating_sub(from));
            bad.push(CsumProblem { code, bytenr: from, text });
        };
        let mut next = start;
        for (sector, csum) in data.chunks_mut(self.sectorsize).zip(csums.chunks(size)) {
            let at = next;
            next = at.saturating_add(sector.len() as u64);
            let error = match unreadable {
                true => self.array.read_copy(Logical(at), sector, copy).err(),
                false => None,
            };
            // A sector without any copy is reported once.
            let is_reported = |error: &Unreadable| {
                let is_missing = matches!(error, Unreadable::Missing(_));
                is_missing && (copy > 0 || self.array.has_copy(Logical(at), span.copies))
            };
            if error.as_ref().is_some_and(is_reported) {
                tell(&mut run);
                continue;
            }
            let error = error.map(|error| error.to_string());
            if error.is_none() && self.csum_type.compute(sector)[..size] == *csum {
                tell(&mut run);
                continue;
            }
            match &mut run {
                Some((_, to, known)) if known.is_some() == error.is_some() => *to = next,
                _ => {
                    tell(&mut run);
                    run = Some((at, next, error));
                }
            }
        }
        tell(&mut run);
    }
}

/// The csum items of a leaf: slot, first address, checksums.
pub(crate) fn csum_items<'l>(leaf: &Leaf<'l>) -> impl Iterator<Item = (usize, u64, &'l [u8])> + use<'l> {
    let items = leaf.items().filter(|(_, key, _)| key.item_type == KeyType::EXTENT_CSUM);
    items.map(|(slot, key, data)| (slot, key.offset, data))
}
