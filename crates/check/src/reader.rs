//! Reads tree blocks: sorted, in large pieces, every copy of each, verified.
//!
//! Invariants:
//! - I1. What is handed out has a right checksum, its own address, and the level that its parent expects, so following
//!   its pointers ends.
//! - I2. A block that is read for the first time is read and verified from every copy.

use std::thread;

use ubtrfs_error::Error;
use ubtrfs_format::check::{CheckContext, Expected, check_node};
use ubtrfs_format::{Corrupt, FormatError, Generation, Key, Logical, RootId};
use ubtrfs_volumes::Volumes;

use crate::problem::Code;

/// A pointer to a tree block, and what it promises.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edge {
    pub(crate) bytenr: u64,
    pub(crate) generation: Option<Generation>,
    /// `None` for a root.
    pub(crate) key: Option<Key>,
    pub(crate) level: u8,
    /// Only items from the drop progress on are left below.
    pub(crate) on_drop_path: bool,
}

/// How an edge is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Care {
    /// Every copy, everything verified and told.
    Verify,
    /// Was verified; any copy that is good.
    Again,
    /// Was found unusable.
    Skip,
}

/// What came of a block.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) usable: bool,
    pub(crate) copy_bad: bool,
    pub(crate) problems: Vec<(Code, Option<usize>, String)>,
}

/// A chunk's place and copies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) copies: usize,
}

/// Chunks in order.
pub(crate) fn spans(volumes: &Volumes) -> Vec<Span> {
    let span = |(start, item): &(Logical, std::sync::Arc<ubtrfs_format::item::ChunkItem>)| Span {
        start: start.0,
        end: start.0 + item.length,
        copies: volumes.num_copies(*start),
    };
    volumes.chunks().iter().map(span).collect()
}

/// The chunk that covers an address.
pub(crate) fn span_at(spans: &[Span], bytenr: u64) -> Option<Span> {
    let at = spans.partition_point(|span| span.start <= bytenr);
    spans.get(at.checked_sub(1)?).copied().filter(|span| bytenr < span.end)
}

/// Most bytes of one read.
const RUN_MAX: usize = 1 << 20;
/// Blocks that are worth a second thread.
const PARALLEL_MIN: usize = 32;

/// Reads blocks of one tree.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    pub(crate) volumes: &'a Volumes,
    pub(crate) ctx: &'a CheckContext,
    pub(crate) spans: &'a [Span],
    pub(crate) tree: RootId,
    pub(crate) nodesize: usize,
    pub(crate) threads: usize,
}

impl Reader<'_> {
    /// Fills `buf` with the blocks in the order of `order`, indexes of `edges` sorted by address.
    pub(crate) fn read(&self, edges: &[Edge], care: &[Care], order: &[u32], buf: &mut [u8]) -> Vec<Outcome> {
        let threads = if order.len() < PARALLEL_MIN { 1 } else { self.threads.max(1) };
        if threads == 1 {
            return self.read_part(edges, care, order, buf);
        }
        let part_len = order.len().div_ceil(threads);
        thread::scope(|scope| {
            let parts = order.chunks(part_len).zip(buf.chunks_mut(part_len * self.nodesize));
            let handles: Vec<_> =
                parts.map(|(order, buf)| scope.spawn(move || self.read_part(edges, care, order, buf))).collect();
            let results = handles
                .into_iter()
                .map(|handle| handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            results.flatten().collect()
        })
    }

    fn read_part(&self, edges: &[Edge], care: &[Care], order: &[u32], buf: &mut [u8]) -> Vec<Outcome> {
        let edge = |at: usize| &edges[order[at] as usize];
        let care = |at: usize| care[order[at] as usize];
        let mut outcomes = Vec::with_capacity(order.len());
        let mut other = Vec::new();
        let mut at = 0;
        while at < order.len() {
            let start = edge(at).bytenr;
            let mut run = 1;
            let Some(span) = self.span_of(start).filter(|_| care(at) != Care::Skip) else {
                outcomes.push(self.unreachable(start, care(at)));
                at += 1;
                continue;
            };
            while at + run < order.len()
                && (run + 1) * self.nodesize <= RUN_MAX
                && care(at + run) == care(at)
                && edge(at + run).bytenr == start + (run * self.nodesize) as u64
                && start + ((run + 1) * self.nodesize) as u64 <= span.end
            {
                run += 1;
            }
            let piece = &mut buf[at * self.nodesize..(at + run) * self.nodesize];
            let edges: Vec<&Edge> = (at..at + run).map(edge).collect();
            match care(at) {
                Care::Verify => self.read_run(&edges, span, piece, &mut other, &mut outcomes),
                _ => self.read_again(&edges, span, piece, &mut outcomes),
            }
            at += run;
        }
        outcomes
    }

    /// The chunk that holds all of the block.
    fn span_of(&self, bytenr: u64) -> Option<Span> {
        let end = bytenr.checked_add(self.nodesize as u64)?;
        span_at(self.spans, bytenr).filter(|span| end <= span.end)
    }

    fn unreachable(&self, bytenr: u64, care: Care) -> Outcome {
        let mut outcome = Outcome::default();
        if care == Care::Verify {
            let text = format!("address {bytenr} is in no chunk");
            outcome.problems.push((Code::BlockRead, None, text));
        }
        outcome
    }

    /// What was verified before is told again only where this pointer promises something else.
    fn read_again(&self, edges: &[&Edge], span: Span, piece: &mut [u8], outcomes: &mut Vec<Outcome>) {
        for (edge, raw) in edges.iter().zip(piece.chunks_mut(self.nodesize)) {
            let mut outcome = Outcome::default();
            let mut failed = None;
            for copy in 0..span.copies {
                failed = match self.volumes.read_copy(Logical(edge.bytenr), raw, copy) {
                    Ok(()) => self.check(edge, raw).map(|(code, usable, bad)| (code, usable, bad.cause.to_string())),
                    Err(error) => Some((Code::BlockRead, false, one_line(&error))),
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
        edges: &[&Edge],
        span: Span,
        piece: &mut [u8],
        other: &mut Vec<u8>,
        outcomes: &mut Vec<Outcome>,
    ) {
        let start = Logical(edges[0].bytenr);
        let whole = self.volumes.read_copy(start, piece, 0).is_ok();
        let mut differ = vec![!whole; edges.len()];
        for copy in 1..span.copies {
            other.resize(piece.len(), 0);
            let other_whole = self.volumes.read_copy(start, other, copy).is_ok();
            if other_whole && whole && other[..] == piece[..] {
                continue;
            }
            for (index, differ) in differ.iter_mut().enumerate() {
                let range = index * self.nodesize..(index + 1) * self.nodesize;
                *differ |= !other_whole || other[range.clone()] != piece[range];
            }
        }
        for ((edge, raw), differ) in edges.iter().zip(piece.chunks_mut(self.nodesize)).zip(differ) {
            outcomes.push(if differ { self.read_one(edge, span, raw) } else { self.judge(edge, raw) });
        }
    }

    /// All copies are equal to this one.
    fn judge(&self, edge: &Edge, raw: &[u8]) -> Outcome {
        match self.check(edge, raw) {
            None => Outcome { usable: true, ..Outcome::default() },
            Some((code, usable, corrupt)) => {
                Outcome { usable, copy_bad: false, problems: vec![(code, corrupt.slot, corrupt.cause.to_string())] }
            }
        }
    }

    /// Copies differ, or one cannot be read: looks at each.
    fn read_one(&self, edge: &Edge, span: Span, raw: &mut [u8]) -> Outcome {
        let mut outcome = Outcome { copy_bad: span.copies > 1, ..Outcome::default() };
        let mut good: Option<Vec<u8>> = None;
        let mut best: Option<BadCopy> = None;
        for copy in 0..span.copies {
            let failed = match self.volumes.read_copy(Logical(edge.bytenr), raw, copy) {
                Ok(()) => {
                    self.check(edge, raw).map(|(code, usable, bad)| (code, usable, bad.slot, bad.cause.to_string()))
                }
                Err(error) => Some((Code::BlockRead, false, None, one_line(&error))),
            };
            let Some((code, usable, slot, text)) = failed else {
                if good.as_ref().is_some_and(|good| good != raw) {
                    let text = format!("copy {copy} differs from another valid one");
                    outcome.problems.push((Code::BlockCopy, None, text));
                }
                good.get_or_insert_with(|| raw.to_vec());
                continue;
            };
            outcome.problems.push((Code::BlockCopy, slot, format!("copy {copy}: {text}")));
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
        }
        outcome
    }

    /// What is wrong with a block, and whether its content can be looked at nevertheless (I1).
    fn check(&self, edge: &Edge, raw: &[u8]) -> Option<(Code, bool, Corrupt)> {
        let expected = Expected {
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

/// A copy of a block that is not what it should be.
struct BadCopy {
    code: Code,
    usable: bool,
    slot: Option<usize>,
    text: String,
    content: Vec<u8>,
}

/// The code of what the tree checker found, and whether the block's content can be looked at nevertheless.
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
