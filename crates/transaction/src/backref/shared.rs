//! [`SharedExtents`]: whether data extents have several users.
//!
//! A snapshot shares all extents of a file, so a walk through many snapshots meets the same extents and the same tree
//! blocks again and again. The answers are therefore kept from one call to the next.
//!
//! Invariants:
//! - I1. All kept answers are those of one commit. A call after another commit drops them first.

use std::collections::HashSet;

use ubtrfs_error::Result;
use ubtrfs_format::{Generation, Logical};
use ubtrfs_space::RefKey;

use super::inodes::inodes_of;
use super::refs::{ExtentRefs, extent_refs};
use super::roots::{RootsCache, RootsOf};
use super::view::TreesView;
use crate::engine::Engine;

/// Remembers which extents are shared, and which subvolumes reach each block. The memory that it takes is limited.
#[derive(Debug, Default)]
pub struct SharedExtents {
    /// The commit whose trees were searched (I1).
    commit: Generation,
    blocks: RootsCache,
    /// The address and length of extents that have several users. Extents with one user are not kept: a walk through
    /// files meets them only once.
    shared: HashSet<(Logical, u64)>,
}

impl SharedExtents {
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
            *self = Self { commit, ..Self::default() };
        }
        let (source, root) = (view.source(), *view.extent_root());
        let mut roots = RootsOf::with_cache(view, std::mem::take(&mut self.blocks));
        let mut answers = Vec::with_capacity(extents.len());
        for &(bytenr, len_bytes) in extents {
            let is_shared = self.shared.contains(&(bytenr, len_bytes))
                || match extent_refs(source, &root, bytenr, len_bytes, false)? {
                    Some(extent) => is_shared(&mut roots, &extent)?,
                    None => false,
                };
            if is_shared && self.shared.len() < SHARED_MAX {
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
    /// extent that does not exist has no users. `known` keeps what was found for the next call.
    ///
    /// # Errors
    ///
    /// Fails if a tree is corrupt or cannot be read.
    pub fn extents_are_shared(&self, known: &mut SharedExtents, extents: &[(Logical, u64)]) -> Result<Vec<bool>> {
        // Blocks of the last commit are reused only after the next commit, and this lock prevents that commit.
        let _work = self.commit_state.lock();
        known.search(TreesView::committed(self)?, self.commit_state.superblock().generation, extents)
    }
}

/// Maximum number of shared extents that are kept; they take about 32 MiB.
const SHARED_MAX: usize = 1 << 20;
