//! Searching the items of a tree, and the paths of inodes, as the ioctls TREE_SEARCH and INO_LOOKUP do.

use std::ops::RangeInclusive;

use ubtrfs_format::{Generation, Key, RootId};
use ubtrfs_transaction::ItemRef;

use crate::error::{Error, Result};
use crate::items::dir_item::first_link;
use crate::{Fs, InodeId};

impl Fs {
    /// Passes the items of a tree in `keys` to `visit`, in ascending order, until `visit` returns false. Each item is
    /// passed with the generation of its leaf; a delayed item has the generation of the running transaction. Items
    /// with a generation outside `generations` are skipped.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] if there is no such tree.
    pub fn search_tree(
        &self,
        tree: RootId,
        keys: RangeInclusive<Key>,
        generations: RangeInclusive<Generation>,
        visit: &mut dyn FnMut(Key, Generation, &[u8]) -> bool,
    ) -> Result<()> {
        if !tree.is_subvolume() && self.context.read_only().is_none() && self.engine.has_changes() {
            // The trees that account for subvolumes and space are up to date only after a commit.
            self.engine.commit()?;
        }
        let tree = self.engine.tree(tree)?.ok_or(Error::NotFound)?;
        let (mut start, end) = keys.into_inner();
        while start <= end {
            let items = tree.range(&start, &end, BATCH)?;
            for (key, item) in &items {
                let generation = match item {
                    ItemRef::Delayed(_) => self.engine.generation(),
                    ItemRef::Node(item) => item.leaf().generation(),
                };
                if generations.contains(&generation) && !visit(*key, generation, item) {
                    return Ok(());
                }
            }
            let last = items.last().filter(|_| items.len() == BATCH).and_then(|(key, _)| key.successor());
            let Some(next) = last else { break };
            start = next;
        }
        Ok(())
    }

    /// The first name of an inode, and the directory that holds it. Both are in one subvolume.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] if there is no such inode, or it has no name.
    pub fn first_name(&self, id: InodeId) -> Result<(InodeId, Vec<u8>)> {
        let subvolume = self.subvolume(id.root)?;
        let (dir, name) = first_link(&subvolume.tree, id.ino)?.ok_or(Error::NotFound)?;
        Ok((InodeId { root: id.root, ino: dir }, name))
    }

    /// The path of an inode from the root of its subvolume, by its first name; empty for the root itself.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] if there is no such inode, or it has no name.
    pub fn path_in_subvolume(&self, id: InodeId) -> Result<Vec<u8>> {
        self.subvolume(id.root)?;
        let names = self.names_up(id)?;
        if names.is_empty() && id != InodeId::root_of(id.root) {
            return Err(Error::NotFound);
        }
        Ok(names.join(&b'/'))
    }
}

/// Number of items read at once.
const BATCH: usize = 128;
