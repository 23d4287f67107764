//! [`SharedExtents`]: whether data extents have several users.
//!
//! A snapshot shares all extents of a file, so a walk through many snapshots meets the same extents and the same tree
//! blocks again and again. The answers are therefore kept from one call to the next, for all callers together.
//!
//! Invariants:
//! - I1. All kept answers are those of one commit. A call after another commit drops them first.
//! - I2. The answers take a share of the engine's memory ([`SHARED_PART`]). If an extent has very many references, only
//!   the first references are read.

use std::collections::HashSet;

use ubtrfs_error::Result;
use ubtrfs_format::{Generation, Logical};
use ubtrfs_space::RefKey;

use super::inodes::inodes_of;
use super::refs::{ExtentRefs, first_refs};
use super::roots::{RootsCache, RootsOf};
use super::view::TreesView;
use crate::engine::{Engine, EngineOptions, MemoryPart};

/// Remembers which extents are shared, and which subvolumes reach each block.
#[derive(Debug)]
pub(crate) struct SharedExtents {
    /// The commit whose trees were searched (I1).
    commit: Generation,
    blocks: RootsCache,
    /// The address and length of extents that have several users. Extents with one user are not kept: a walk through
    /// files meets them only once.
    shared: HashSet<(Logical, u64)>,
    shared_max: usize,
    max_bytes: u64,
}

impl SharedExtents {
    /// Makes the memory, which takes about `max_bytes` (I2).
    pub(crate) fn new(max_bytes: u64) -> Self {
        let max_bytes = max_bytes.max(MAX_BYTES_MIN);
        Self {
            commit: Generation(0),
            blocks: RootsCache::with_max_bytes(max_bytes / 2),
            shared: HashSet::new(),
            shared_max: usize::try_from(max_bytes / 2 / SHARED_BYTES).unwrap_or(usize::MAX),
            max_bytes,
        }
    }

    /// Makes the memory for an engine with these options.
    pub(crate) fn of(options: &EngineOptions) -> Self {
        Self::new(options.memory_part(SHARED_PART))
    }

    /// Whether each of these data extents has several users in `view`, the trees of the last commit, which `commit`
    /// made.
    pub(crate) fn search(
        &mut self,
        view: TreesView<'_>,
        commit: Generation,
        extents: &[(Logical, u64)],
    ) -> Result<Vec<bool>> {
        if self.commit != commit {
            // I1
            *self = Self { commit, ..Self::new(self.max_bytes) };
        }
        let (source, root) = (view.source(), *view.extent_root());
        let mut roots = RootsOf::with_cache(view, std::mem::take(&mut self.blocks));
        let mut answers = Vec::with_capacity(extents.len());
        for &(bytenr, len_bytes) in extents {
            let is_shared = self.shared.contains(&(bytenr, len_bytes))
                || match first_refs(source, &root, (bytenr, len_bytes), false, REFS_MAX)? {
                    // An extent with more references counts as shared.
                    Some((_, has_more)) if has_more => true,
                    Some((extent, _)) => is_shared(&mut roots, &extent)?,
                    None => false,
                };
            if is_shared && self.shared.len() < self.shared_max {
                self.shared.insert((bytenr, len_bytes));
            }
            answers.push(is_shared);
        }
        self.blocks = roots.into_cache();
        Ok(answers)
    }
}

/// Whether a data extent has several users: subvolumes, files, or clones in one file.
fn is_shared(roots: &mut RootsOf<'_>, extent: &ExtentRefs) -> Result<bool> {
    let nr_by_file = extent.refs.iter().filter(|(reference, _)| matches!(reference, RefKey::Data { .. })).count();
    if nr_by_file > 1 || roots.have_several(extent)? {
        return Ok(true);
    }
    if nr_by_file == extent.refs.len() {
        return Ok(false);
    }
    let (mut first, mut has_several) = (None, false);
    inodes_of(roots, extent, &mut |found| {
        let place = (found.root, found.ino, found.file_offset.wrapping_sub(found.extent_offset));
        has_several |= *first.get_or_insert(place) != place;
        !has_several
    })?;
    Ok(has_several)
}

impl Engine {
    /// Whether each of these data extents, given by address and length, has several users, as of the last commit. An
    /// extent that does not exist has no users.
    ///
    /// # Errors
    ///
    /// Fails if a tree is corrupt or cannot be read.
    pub fn extents_are_shared(&self, extents: &[(Logical, u64)]) -> Result<Vec<bool>> {
        // Blocks of the last commit are reused only after the next commit, and this lock prevents that commit.
        let _work = self.commit_state.lock();
        self.shared_extents.lock().search(
            TreesView::committed(self)?,
            self.commit_state.superblock().generation,
            extents,
        )
    }
}

/// The share of the engine's memory that the answers take.
const SHARED_PART: MemoryPart = (1, 16);
/// The answers take at least this number of bytes.
const MAX_BYTES_MIN: u64 = 256 << 10;
/// Estimated bytes of a shared extent that is kept.
const SHARED_BYTES: u64 = 32;
/// Maximum number of references of an extent that are read.
const REFS_MAX: usize = 4096;
