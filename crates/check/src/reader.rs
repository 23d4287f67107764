//! Reads tree blocks in order of their addresses, adjacent blocks in one read, and verifies every copy.
//!
//! Invariants:
//! - I1. A usable block has a correct checksum, the right address in its header, and the level that its parent expects.
//!   So the level decreases along pointers, and a descent ends.
//! - I2. The first read of a block reads and verifies every copy on a given device. Missing devices are reported once
//!   (`chunk`), not for each block, unless all copies of a block are on them.

use ubtrfs_error::{Error, side_by_side};
use ubtrfs_format::check::{CheckContext, ExpectedBlock, check_node};
use ubtrfs_format::{Corrupt, FormatError, Generation, Key, Logical, RootId};

use crate::array::{Array, ChunkSpan, Unreadable};
use crate::problem::Code;

/// A pointer to a tree block, with the expected properties of the block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockPtr {
    pub(crate) bytenr: u64,
    pub(crate) generation: Option<Generation>,
    /// The expected first key, or `None` for a root.
    pub(crate) key: Option<Key>,
    pub(crate) level: u8,
    /// Whether the block is on the path to the drop progress; below such a block, items before the drop progress are
    /// already gone.
    pub(crate) on_drop_path: bool,
}

/// The way of reading a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadMode {
    /// Read and verify every copy, and report every problem.
    Verify,
    /// The block was verified before; read any good copy.
    Again,
    /// The block is unusable; do not read it.
    Skip,
}

/// The result of reading a block.
#[derive(Debug, Default)]
pub(crate) struct ReadOutcome {
    pub(crate) usable: bool,
    pub(crate) problems: Vec<(Code, Option<usize>, String)>,
}

/// The chunk that covers an address.
pub(crate) fn span_at(spans: &[ChunkSpan], bytenr: u64) -> Option<ChunkSpan> {
    let at = spans.partition_point(|span| span.start <= bytenr);
    spans.get(at.checked_sub(1)?).copied().filter(|span| bytenr < span.end)
}

/// Maximum number of bytes in one read.
const RUN_MAX: usize = 1 << 20;
/// Minimum number of blocks for which several threads are used.
const PARALLEL_MIN: usize = 32;

/// Reads blocks of one tree.
#[derive(Clone, Copy)]
pub(crate) struct BlockReader<'a> {
    pub(crate) array: &'a Array,
    pub(crate) ctx: &'a CheckContext,
    pub(crate) spans: &'a [ChunkSpan],
    pub(crate) tree: RootId,
    pub(crate) nodesize: usize,
    pub(crate) threads: usize,
}

impl BlockReader<'_> {
    /// Reads the blocks that `edges` point to. `order` holds the indexes of `edges`, sorted by the blocks' addresses.
    /// The blocks in `buf` and the outcomes are in this order.
    pub(crate) fn read(
        &self,
        edges: &[BlockPtr],
        care: &[ReadMode],
        order: &[u32],
        buf: &mut [u8],
    ) -> Vec<ReadOutcome> {
        let threads = if order.len() < PARALLEL_MIN { 1 } else { self.threads.max(1) };
        if threads == 1 {
            return self.read_part(edges, care, order, buf);
        }
        let part_len = order.len().div_ceil(threads);
        let parts = order.chunks(part_len).zip(buf.chunks_mut(part_len.saturating_mul(self.nodesize)));
        let works = parts.map(|(order, buf)| move || self.read_part(edges, care, order, buf));
        side_by_side(works).into_iter().flatten().collect()
    }

    fn read_part(&self, edges: &[BlockPtr], care: &[ReadMode], order: &[u32], buf: &mut [u8]) -> Vec<ReadOutcome> {
        let sorted: Vec<(&BlockPtr, ReadMode)> =
            order.iter().map(|&at| (&edges[at as usize], care[at as usize])).collect();
        let mut outcomes = Vec::with_capacity(order.len());
        let mut other = Vec::new();
        let (mut rest, mut buf) = (sorted.as_slice(), buf);
        while let Some(&(first, care)) = rest.first() {
            let span = self.span_of(first.bytenr).filter(|_| care != ReadMode::Skip);
            let run_len = span.map_or(1, |span| self.run_len(rest, span)).max(1);
            let (run, later) = rest.split_at(run_len);
            let (piece, behind) = std::mem::take(&mut buf).split_at_mut(run_len.saturating_mul(self.nodesize));
            (rest, buf) = (later, behind);
            let edges: Vec<&BlockPtr> = run.iter().map(|(edge, _)| *edge).collect();
            match (span, care) {
                (None, _) => outcomes.push(self.unreachable(first.bytenr, care)),
                (Some(span), ReadMode::Verify) => self.read_run(&edges, span, piece, &mut other, &mut outcomes),
                (Some(span), _) => self.read_again(&edges, span, piece, &mut outcomes),
            }
        }
        outcomes
    }

    /// Number of blocks at the start of `rest` that form a run: they are adjacent, lie in `span`, have the same read
    /// mode, and take at most [`RUN_MAX`] bytes.
    fn run_len(&self, rest: &[(&BlockPtr, ReadMode)], span: ChunkSpan) -> usize {
        let Some(&(first, care)) = rest.first() else { return 0 };
        let nr_max = RUN_MAX.checked_div(self.nodesize).unwrap_or(1).max(1);
        let mut run_end = first.bytenr;
        let is_next = |(edge, next_care): &&(&BlockPtr, ReadMode)| {
            let end = edge.bytenr.saturating_add(self.nodesize as u64);
            let joins = edge.bytenr == run_end && *next_care == care && end <= span.end;
            run_end = end;
            joins
        };
        rest.iter().take(nr_max).take_while(is_next).count()
    }

    /// The chunk that contains the whole block.
    fn span_of(&self, bytenr: u64) -> Option<ChunkSpan> {
        let end = bytenr.checked_add(self.nodesize as u64)?;
        span_at(self.spans, bytenr).filter(|span| end <= span.end)
    }

    fn unreachable(&self, bytenr: u64, care: ReadMode) -> ReadOutcome {
        let mut outcome = ReadOutcome::default();
        if care == ReadMode::Verify {
            let text = format!("address {bytenr} is in no chunk");
            outcome.problems.push((Code::BlockRead, None, text));
        }
        outcome
    }

    /// Reads blocks that were verified before. Reports a problem of a block only if no copy is usable, or if the header
    /// is not what this pointer expects.
    fn read_again(&self, edges: &[&BlockPtr], span: ChunkSpan, piece: &mut [u8], outcomes: &mut Vec<ReadOutcome>) {
        for (edge, raw) in edges.iter().zip(piece.chunks_mut(self.nodesize)) {
            let mut outcome = ReadOutcome::default();
            let mut failed = None;
            for copy in 0..span.copies {
                failed = match self.array.read_copy(Logical(edge.bytenr), raw, copy) {
                    Ok(()) => self.check(edge, raw).map(|(code, usable, bad)| (code, usable, bad.cause.to_string())),
                    Err(error) => Some((Code::BlockRead, false, error.to_string())),
                };
                outcome.usable = failed.as_ref().is_none_or(|(_, usable, _)| *usable);
                if outcome.usable {
                    break;
                }
            }
            if let Some((code, usable, text)) = failed
                && (code == Code::BlockHeader || !usable)
            {
                outcome.problems.push((code, None, text));
            }
            outcomes.push(outcome);
        }
    }

    fn read_run(
        &self,
        edges: &[&BlockPtr],
        span: ChunkSpan,
        piece: &mut [u8],
        other: &mut Vec<u8>,
        outcomes: &mut Vec<ReadOutcome>,
    ) {
        let start = Logical(edges[0].bytenr);
        // The first copy that could be read is in `piece`.
        let mut first: Option<usize> = None;
        let mut differ = vec![false; edges.len()];
        for copy in 0..span.copies {
            let into: &mut [u8] = match first {
                None => piece,
                Some(_) => {
                    other.resize(piece.len(), 0);
                    other
                }
            };
            match self.array.read_copy(start, into, copy) {
                Ok(()) if first.is_none() => first = Some(copy),
                Ok(()) if other[..] == piece[..] => {}
                Ok(()) => {
                    let blocks = piece.chunks(self.nodesize).zip(other.chunks(self.nodesize));
                    differ.iter_mut().zip(blocks).for_each(|(differ, (ours, theirs))| *differ |= ours != theirs);
                }
                // All blocks of a chunk without elements have this copy on one device.
                Err(Unreadable::Missing(_)) if !span.is_striped => {}
                Err(_) => differ.fill(true),
            }
        }
        if first.is_none() {
            differ.fill(true);
        }
        for ((edge, raw), differ) in edges.iter().zip(piece.chunks_mut(self.nodesize)).zip(differ) {
            outcomes.push(if differ { self.read_one(edge, span, raw) } else { self.judge(edge, raw) });
        }
    }

    /// The outcome of a block whose copies are all equal.
    fn judge(&self, edge: &BlockPtr, raw: &[u8]) -> ReadOutcome {
        match self.check(edge, raw) {
            None => ReadOutcome { usable: true, ..ReadOutcome::default() },
            Some((code, usable, corrupt)) => {
                ReadOutcome { usable, problems: vec![(code, corrupt.slot, corrupt.cause.to_string())] }
            }
        }
    }

    /// Reads each copy of a block whose copies differ or cannot all be read.
    fn read_one(&self, edge: &BlockPtr, span: ChunkSpan, raw: &mut [u8]) -> ReadOutcome {
        let mut outcome = ReadOutcome::default();
        let mut good: Option<Vec<u8>> = None;
        let mut best: Option<BadCopy> = None;
        let mut missing = None;
        for copy in 0..span.copies {
            let failed = match self.array.read_copy(Logical(edge.bytenr), raw, copy) {
                Ok(()) => {
                    self.check(edge, raw).map(|(code, usable, bad)| (code, usable, bad.slot, bad.cause.to_string()))
                }
                Err(error @ Unreadable::Missing(_)) => {
                    missing = Some(error);
                    continue;
                }
                Err(error) => Some((Code::BlockRead, false, None, error.to_string())),
            };
            let Some((code, usable, slot, text)) = failed else {
                if good.as_ref().is_some_and(|good| good != raw) {
                    let text = format!("{} is valid, but differs from another valid copy", self.name(edge, copy));
                    outcome.problems.push((Code::BlockCopy, None, text));
                }
                good.get_or_insert_with(|| raw.to_vec());
                continue;
            };
            outcome.problems.push((Code::BlockCopy, slot, format!("{}: {text}", self.name(edge, copy))));
            if best.as_ref().is_none_or(|best| usable && !best.usable) {
                best = Some(BadCopy { code, usable, slot, text, content: raw.to_vec() });
            }
        }
        if let Some(good) = good {
            raw.copy_from_slice(&good);
            outcome.usable = true;
        } else if let Some(BadCopy { code, usable, slot, text, content }) = best {
            raw.copy_from_slice(&content);
            outcome.usable = usable;
            outcome.problems = vec![(code, slot, format!("all copies are bad: {text}"))];
        } else if let Some(missing) = missing {
            outcome.problems = vec![(Code::BlockRead, None, format!("no copy was given: {missing}"))];
        }
        outcome
    }

    /// A name of a copy, for messages.
    fn name(&self, edge: &BlockPtr, copy: usize) -> String {
        match self.array.device_of(Logical(edge.bytenr), copy) {
            Some(devid) => format!("copy {copy} on device {devid}"),
            None => format!("copy {copy}"),
        }
    }

    /// Returns the problem of a block, if any, and whether the block is usable nevertheless (I1).
    fn check(&self, edge: &BlockPtr, raw: &[u8]) -> Option<(Code, bool, Corrupt)> {
        let expected = ExpectedBlock {
            bytenr: Some(Logical(edge.bytenr)),
            level: Some(edge.level),
            tree: Some(self.tree),
            generation: edge.generation,
            first_key: edge.key,
        };
        let corrupt = check_node(raw, &self.ctx.expecting(expected)).err()?;
        let (code, usable) = classify(&corrupt);
        Some((code, usable, corrupt))
    }
}

/// A bad copy of a block.
struct BadCopy {
    code: Code,
    usable: bool,
    slot: Option<usize>,
    text: String,
    content: Vec<u8>,
}

/// Maps a finding of the tree checker to a code, and tells whether the block is usable nevertheless.
fn classify(corrupt: &Corrupt) -> (Code, bool) {
    match &corrupt.cause {
        FormatError::Checksum { .. } => (Code::BlockCsum, false),
        FormatError::KeyOrder { .. } => (Code::KeyOrder, true),
        FormatError::Mismatch { what: "tree block header" | "tree block", field, .. } => {
            (Code::BlockHeader, matches!(*field, "generation" | "owner" | "first key"))
        }
        FormatError::Value { what: "tree block header" | "tree block", field, .. } => {
            (Code::BlockHeader, *field == "flags")
        }
        FormatError::Value { what: "leaf item" | "node pointer", .. }
        | FormatError::Mismatch { what: "node pointer", .. } => (Code::BlockLayout, true),
        _ => (Code::Item, true),
    }
}

pub(crate) fn one_line(error: &Error) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}
