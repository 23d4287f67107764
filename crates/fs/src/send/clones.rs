//! [`Clones`]: finds files from which the receiver can clone a part of an extent: files of the parent and of clone
//! sources, and files that were sent earlier in this stream.
//!
//! [`SentParts`] holds the parts that were sent, by address of the extent, within this send's part of the memory for
//! streams. References from other subvolumes come from the
//! extent tree, for a window of extents at a time and in the order of their addresses. Each reference is then verified
//! in the subvolume's own tree, because snapshots share leaves and thereby references.
//!
//! - C1. A source's content is in place at the receiver when the command arrives: the source lies in a subvolume that
//!   the receiver has, or was written or cloned earlier in this stream and does not change any more.
//! - C2. Linux clones whole sectors, except at the end of both files.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "`decode_of` checks the numbers of extents, and `SentTree::inode` the sizes of files"
)]

use std::collections::HashMap;
use std::sync::Arc;

use ubtrfs_format::item::FileExtentBody;
use ubtrfs_format::{Generation, Key, KeyType, Logical};
use ubtrfs_transaction::UseHint;
use uuid::Uuid;

use super::sent_parts::{SentPart, SentParts};
use super::tree::{SentTree, is_regular};
use crate::Fs;
use crate::error::Result;
use crate::items::file_extent::{ExtentAt, decode_of};

/// A part of an extent that will be put at `at` in a file, and for which a clone source is wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct WantedClone {
    /// The file.
    pub(super) ino: u64,
    pub(super) bytenr: Logical,
    /// Offset in the (decompressed) extent.
    pub(super) offset: u64,
    /// Offset in the file.
    pub(super) at: u64,
    /// Length in bytes, at most up to the end of the file.
    pub(super) len: u64,
    /// Size of the file.
    pub(super) size: u64,
}

/// A source of a clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CloneFrom {
    pub(super) uuid: Uuid,
    pub(super) ctransid: u64,
    pub(super) path: Arc<[u8]>,
    pub(super) offset: u64,
    /// Whether the source is a file of this stream.
    pub(super) is_sent: bool,
}

/// The result of looking for a source of a wanted part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FoundClone {
    /// This number of bytes at the start of the part was already sent to its place.
    InPlace(u64),
    /// This number of bytes at the start of the part can be cloned from the source.
    Clone(CloneFrom, u64),
    /// This number of bytes at the start of the part has no source.
    Nothing(u64),
}

/// A subvolume that the receiver has.
#[derive(Debug)]
struct CloneRoot<'t> {
    tree: &'t SentTree,
    generation: Generation,
    uuid: Uuid,
    ctransid: u64,
}

/// Sources of clones.
#[derive(Debug)]
pub(super) struct Clones<'t> {
    fs: &'t Fs,
    sent: SentParts,
    roots: Vec<CloneRoot<'t>>,
    /// References to the extents of the current window.
    hints: HashMap<u64, Vec<UseHint>>,
    own: &'t SentTree,
    sector: u64,
}

impl<'t> Clones<'t> {
    /// Creates the search for clone sources while `own` is sent to a receiver that has `roots`.
    pub(super) fn new(fs: &'t Fs, own: &'t SentTree, roots: impl Iterator<Item = &'t SentTree>) -> Self {
        let root = |tree: &'t SentTree| CloneRoot {
            tree,
            generation: tree.item().generation,
            uuid: tree.stream_uuid(),
            ctransid: tree.item().ctransid.0,
        };
        let sector = u64::from(fs.geometry.sectorsize);
        Self { fs, sent: SentParts::default(), roots: roots.map(root).collect(), hints: HashMap::new(), own, sector }
    }

    /// The tree that is sent.
    pub(super) fn own(&self) -> &'t SentTree {
        self.own
    }

    /// Looks up the references to the extents of a window. Each item of `extents` is an extent's address, length on
    /// disk and generation.
    pub(super) fn look_up(&mut self, extents: impl Iterator<Item = (Logical, u64, Generation)>) -> Result<()> {
        self.hints.clear();
        let Some(newest) = self.roots.iter().map(|root| root.generation).max() else { return Ok(()) };
        let may_be_there = |extent: &(Logical, u64, Generation)| extent.2 <= newest;
        let mut wanted: Vec<_> = extents.filter(may_be_there).map(|(bytenr, len, _)| (bytenr, len)).collect();
        wanted.sort_unstable();
        wanted.dedup();
        if wanted.is_empty() {
            return Ok(());
        }
        let found = self.fs.engine.use_hints(&wanted, HINTS_MAX)?;
        self.hints.extend(wanted.iter().map(|(bytenr, _)| bytenr.0).zip(found));
        Ok(())
    }

    /// Finds a source for the first bytes of a part.
    pub(super) fn find(&self, wanted: &WantedClone) -> Result<FoundClone> {
        let mut nothing = wanted.len;
        for part in self.sent.of(wanted.bytenr.0) {
            match wanted.offset.checked_sub(part.offset) {
                None => nothing = nothing.min(part.offset - wanted.offset),
                Some(inside) if inside < part.len && (part.ino, part.at + inside) == (wanted.ino, wanted.at) => {
                    return Ok(FoundClone::InPlace(wanted.len.min(part.len - inside)));
                }
                Some(inside) if inside < part.len => {
                    if let Some(len) = self.usable(part.len - inside, part.is_end, wanted) {
                        let path = self.own.any_path(part.ino)?.into();
                        return Ok(FoundClone::Clone(self.own_file(path, part.at + inside), len));
                    }
                }
                Some(_) => {}
            }
        }
        let Some(hints) = self.hints.get(&wanted.bytenr.0) else { return Ok(FoundClone::Nothing(nothing)) };
        for root in &self.roots {
            for hint in hints {
                match self.find_in(root, hint, wanted)? {
                    FoundClone::Nothing(len) => nothing = nothing.min(len),
                    found => return Ok(found),
                }
            }
        }
        Ok(FoundClone::Nothing(nothing.max(self.sector).min(wanted.len)))
    }

    fn find_in(&self, root: &CloneRoot<'_>, hint: &UseHint, wanted: &WantedClone) -> Result<FoundClone> {
        let nothing = Ok(FoundClone::Nothing(wanted.len));
        let at = hint.base.wrapping_add(wanted.offset);
        let tree = root.tree;
        let Some(inode) = tree.inode(hint.ino.0)?.filter(is_regular) else { return nothing };
        if at >= inode.size {
            return nothing;
        }
        let key = |offset| Key::new(hint.ino.0, KeyType::EXTENT_DATA, offset);
        let Some(item) = tree.last_le(&key(at), &key(0))? else { return nothing };
        let ExtentAt { start, end, extent } = decode_of(tree.id(), &item.key(), &item, self.fs.geometry.sectorsize)?;
        if at >= end {
            return nothing;
        }
        let is_it = matches!(&extent.body, FileExtentBody::Regular(regular)
            if regular.disk_bytenr == wanted.bytenr && start.wrapping_sub(regular.offset) == hint.base);
        if !is_it {
            return Ok(FoundClone::Nothing((end - at).min(wanted.len)));
        }
        let (len, is_end) = (end.min(inode.size) - at, end >= inode.size);
        Ok(match self.usable(len, is_end, wanted) {
            Some(len) => {
                let path = tree.any_path(hint.ino.0)?.into();
                let (uuid, ctransid) = (root.uuid, root.ctransid);
                FoundClone::Clone(CloneFrom { uuid, ctransid, path, offset: at, is_sent: false }, len)
            }
            None => FoundClone::Nothing(wanted.len),
        })
    }

    /// The number of bytes that can be cloned from a source of `len` bytes (C2). `is_end`: whether the source ends at
    /// the end of its file.
    fn usable(&self, len: u64, is_end: bool, wanted: &WantedClone) -> Option<u64> {
        let is_end = is_end && len <= wanted.len;
        let len = len.min(wanted.len);
        let is_aligned = len.is_multiple_of(self.sector);
        let ends_both = is_end && wanted.at + len == wanted.size;
        let usable = if is_aligned || ends_both { len } else { len - len % self.sector };
        (usable > 0).then_some(usable)
    }

    /// Returns a file of this stream as a clone source.
    pub(super) fn own_file(&self, path: Arc<[u8]>, offset: u64) -> CloneFrom {
        let (uuid, ctransid) = (self.own.stream_uuid(), self.own.item().ctransid.0);
        CloneFrom { uuid, ctransid, path, offset, is_sent: true }
    }

    /// Notes a part of a file that has been sent to the receiver (C1).
    pub(super) fn sent(&mut self, part: &WantedClone) {
        let is_end = part.at + part.len == part.size;
        let sent = SentPart { ino: part.ino, at: part.at, offset: part.offset, len: part.len, is_end };
        self.sent.note(part.bytenr.0, sent, self.fs.streams.part_bytes());
    }
}

/// Maximum number of references that are examined for an extent.
const HINTS_MAX: usize = 64;
