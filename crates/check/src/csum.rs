//! The checksum tree: which data has checksums, and whether the data matches them.
//!
//! Invariants:
//! - I1. Ranges are kept joined: 16 bytes for each contiguous run of checksums, however many items it has.

use std::thread;

use ubtrfs_format::{CsumType, KeyType, Logical, RootId};
use ubtrfs_volumes::Volumes;

use crate::checker::Checker;
use crate::problem::{Code, Place};
use crate::reader::{Span, one_line, span_at};
use crate::walk::{Event, Leaf};

/// What has checksums, in order.
#[derive(Debug, Default)]
pub(crate) struct CsumRanges {
    list: Vec<(u64, u64)>,
    /// Whether nothing is missing because it could not be read.
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

    /// The parts of a range that are in the list.
    pub(crate) fn within(&self, from: u64, to: u64) -> Vec<(u64, u64)> {
        let first = self.list.partition_point(|range| range.1 <= from);
        let inside = self.list.iter().skip(first).take_while(|range| range.0 < to);
        inside.map(|range| (range.0.max(from), range.1.min(to))).collect()
    }

    /// Where the run of checksums that covers an address ends.
    pub(crate) fn end_at(&self, at: u64) -> Option<u64> {
        let next = self.list.partition_point(|range| range.1 <= at);
        self.list.get(next).filter(|range| range.0 <= at).map(|range| range.1)
    }

    /// Bytes of this range that have checksums.
    pub(crate) fn covered(&self, from: u64, to: u64) -> u64 {
        let first = self.list.partition_point(|range| range.1 <= from);
        let inside = self.list.iter().skip(first).take_while(|range| range.0 < to);
        inside.map(|range| range.1.min(to).saturating_sub(range.0.max(from))).sum()
    }
}

impl<'a> Checker<'a> {
    /// Reads the checksum tree.
    pub(crate) fn csum_tree(&mut self) {
        let Some(root) = self.needed_root(RootId::CSUM_TREE) else { return };
        self.csums.complete = self.walk_tree(root, &mut |checker, event| {
            if let Event::Leaf(leaf) = event {
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
                    let text = format!("checksums of {start} begin before the end of those before");
                    self.sink.report(Code::CsumOrder, leaf.place(slot), text);
                    *last_end = (*last_end).max(end);
                }
                Some((_, last_end)) if *last_end == start => *last_end = end,
                _ => self.csums.list.push((start, end)),
            }
        }
    }

    pub(crate) fn csummed_bytes(&self, csums: &[u8]) -> u64 {
        (csums.len() / self.ctx.csum_type.size()) as u64 * self.sectorsize
    }

    /// Every checksum is of a data extent, or of one that a log will make.
    pub(crate) fn compare_csums_with_extents(&mut self) {
        if self.extents_have_gaps() || !self.log.complete {
            return;
        }
        let mut extra = Vec::new();
        let mut at = 0;
        for &(start, end) in &self.csums.list {
            let mut from = start;
            while from < end {
                while let Some(extent) = self.data.list.get(at) {
                    if extent.bytenr.saturating_add(u64::from(extent.sectors) * self.sectorsize) > from {
                        break;
                    }
                    at += 1;
                }
                let next = self.data.list.get(at).map(|extent| {
                    (extent.bytenr, extent.bytenr.saturating_add(u64::from(extent.sectors) * self.sectorsize))
                });
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
            let text = format!("checksums of {} bytes that are in no data extent", to - from);
            self.sink.report(Code::CsumExtra, place, text);
        }
    }

    /// Reads all data that has checksums, every copy, and compares.
    pub(crate) fn verify_data(&mut self) {
        let Some(root) = self.tree_root(RootId::CSUM_TREE) else { return };
        let total: u64 = self.csums.list.iter().map(|(start, end)| end - start).sum();
        self.progress.stage("data", Some(total));
        self.sink.mute(true);
        let mut batch = Batch::default();
        self.walk(&root, &mut |checker, event| {
            let Event::Leaf(leaf) = event else { return };
            for (_, start, csums) in csum_items(leaf) {
                checker.add_to_batch(start, csums, &mut batch);
            }
        });
        for root in self.log.roots.clone() {
            self.log_blocks.clear();
            self.walk(&root, &mut |checker, event| {
                let Event::Leaf(leaf) = event else { return };
                for (_, start, csums) in csum_items(leaf) {
                    checker.add_logged_to_batch(start, csums, &mut batch);
                }
            });
        }
        self.verify_batch(&mut batch);
        self.sink.mute(false);
    }

    /// Of a log, only what its file extents use: it may hold checksums of data that is gone.
    fn add_logged_to_batch(&mut self, start: u64, csums: &[u8], batch: &mut Batch) {
        let size = self.ctx.csum_type.size();
        let end = start.saturating_add(self.csummed_bytes(csums));
        for (from, to) in self.log.written.within(start, end) {
            let index = |at: u64| usize::try_from((at - start) / self.sectorsize).unwrap_or(usize::MAX);
            let range = index(from).saturating_mul(size)..index(to).saturating_mul(size);
            let Some(part) = csums.get(range) else { continue };
            let part = part.to_vec();
            self.add_to_batch(from, &part, batch);
        }
    }

    fn add_to_batch(&mut self, start: u64, csums: &[u8], batch: &mut Batch) {
        let size = self.ctx.csum_type.size();
        let sectors_max = (PIECE_BYTES / self.sectorsize).max(1) as usize;
        let mut at = start;
        for part in csums.chunks(size * sectors_max) {
            let len = self.csummed_bytes(part);
            match batch.pieces.last_mut() {
                Some(piece) if piece.end() == at && piece.len_bytes + len <= PIECE_BYTES => {
                    piece.len_bytes += len;
                    piece.csums.extend_from_slice(part);
                }
                _ => batch.pieces.push(Piece { start: at, len_bytes: len, csums: part.to_vec() }),
            }
            batch.len_bytes += len;
            at = at.saturating_add(len);
            if batch.len_bytes >= BATCH_BYTES {
                self.verify_batch(batch);
            }
        }
    }

    fn verify_batch(&mut self, batch: &mut Batch) {
        let pieces = std::mem::take(&mut batch.pieces);
        let len_bytes = std::mem::take(&mut batch.len_bytes);
        let part_len = pieces.len().div_ceil(self.threads).max(1);
        let verifier = Verifier {
            volumes: self.volumes,
            csum_type: self.ctx.csum_type,
            sectorsize: self.sectorsize as usize,
            spans: &self.spans,
        };
        let verify = |part: &[Piece]| part.iter().flat_map(|piece| verifier.verify(piece)).collect::<Vec<_>>();
        let verify = &verify;
        let found: Vec<Bad> = thread::scope(|scope| {
            let handles: Vec<_> = pieces.chunks(part_len).map(|part| scope.spawn(move || verify(part))).collect();
            let join = |handle: thread::ScopedJoinHandle<'_, Vec<Bad>>| {
                handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            handles.into_iter().flat_map(join).collect()
        });
        self.sink.mute(false);
        for bad in found {
            self.sink.report(bad.code, Place::at(bad.bytenr), bad.text);
        }
        self.sink.mute(true);
        self.stats.data_bytes_verified += len_bytes;
        self.progress.advance(len_bytes);
    }
}

/// Data that is read at once.
const PIECE_BYTES: u64 = 1 << 20;
/// Data between two looks at the results.
const BATCH_BYTES: u64 = 32 << 20;

#[derive(Default)]
struct Batch {
    pieces: Vec<Piece>,
    len_bytes: u64,
}

struct Piece {
    start: u64,
    len_bytes: u64,
    csums: Vec<u8>,
}

impl Piece {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.len_bytes)
    }
}

struct Bad {
    code: Code,
    bytenr: u64,
    text: String,
}

/// What a thread needs to compare data with checksums.
struct Verifier<'a> {
    volumes: &'a Volumes,
    csum_type: CsumType,
    sectorsize: usize,
    spans: &'a [Span],
}

impl Verifier<'_> {
    fn verify(&self, piece: &Piece) -> Vec<Bad> {
        let mut bad = Vec::new();
        let mut at = piece.start;
        // A run of checksums may go on in the next chunk.
        while at < piece.end() {
            let Some(span) = span_at(self.spans, at) else {
                let text = "checksums of an address that is in no chunk".to_owned();
                bad.push(Bad { code: Code::DataRead, bytenr: at, text });
                break;
            };
            let len = (piece.end().min(span.end) - at) as usize;
            let skip = (at - piece.start) as usize / self.sectorsize * self.csum_type.size();
            for copy in 0..span.copies {
                self.verify_copy(at, len, piece.csums.get(skip..).unwrap_or_default(), copy, &mut bad);
            }
            at += len as u64;
        }
        bad
    }

    fn verify_copy(&self, start: u64, len: usize, csums: &[u8], copy: usize, bad: &mut Vec<Bad>) {
        let mut data = vec![0; len];
        let mut unreadable = false;
        if self.volumes.read_copy(Logical(start), &mut data, copy).is_err() {
            unreadable = true;
        }
        let size = self.csum_type.size();
        // Consecutive bad sectors are told together.
        let mut run: Option<(u64, u64, Option<String>)> = None;
        let mut tell = |run: &mut Option<(u64, u64, Option<String>)>| {
            let Some((from, to, error)) = run.take() else { return };
            let (code, what) = match error {
                Some(error) => (Code::DataRead, error),
                None => (Code::DataCsum, "does not match its checksums".to_owned()),
            };
            bad.push(Bad { code, bytenr: from, text: format!("data of {} bytes, copy {copy}: {what}", to - from) });
        };
        for (index, (sector, csum)) in data.chunks_mut(self.sectorsize).zip(csums.chunks(size)).enumerate() {
            let at = start + (index * self.sectorsize) as u64;
            let error = match unreadable {
                true => self.volumes.read_copy(Logical(at), sector, copy).err().map(|error| one_line(&error)),
                false => None,
            };
            if error.is_none() && self.csum_type.compute(sector)[..size] == *csum {
                tell(&mut run);
                continue;
            }
            match &mut run {
                Some((_, to, known)) if known.is_some() == error.is_some() => *to = at + sector.len() as u64,
                _ => {
                    tell(&mut run);
                    run = Some((at, at + sector.len() as u64, error));
                }
            }
        }
        tell(&mut run);
    }
}

/// Checksum items of a leaf: slot, first address, checksums.
pub(crate) fn csum_items<'l>(leaf: &Leaf<'l>) -> impl Iterator<Item = (usize, u64, &'l [u8])> + use<'l> {
    let items = leaf.items().filter(|(_, key, _)| key.item_type == KeyType::EXTENT_CSUM);
    items.map(|(slot, key, data)| (slot, key.offset, data))
}
