//! Finds the paths of inodes, and the files that use an address.

use ubtrfs_format::item::{InodeExtref, InodeRef};
use ubtrfs_format::{Ino, Key, KeyType, Logical};
use ubtrfs_transaction::ExtentUse;

use crate::Fs;
use crate::error::{Error, Result};
use crate::items::dir_item::in_tree;
use crate::types::InodeId;

impl Fs {
    /// Paths of an inode from the top level, one for each of its names: at most `limit`, and no more than have
    /// `len_bytes` together. Also returns whether there are more. Fails if there is no such inode.
    pub fn paths_of(&self, id: InodeId, limit: usize, len_bytes: usize) -> Result<(Vec<Vec<u8>>, bool)> {
        let Some(tree) = self.engine.tree(id.root)? else { return Err(Error::NotFound) };
        if tree.get(&Key::new(id.ino.0, KeyType::INODE_ITEM, 0))?.is_none() {
            return Err(Error::NotFound);
        }
        if id.ino == Ino::ROOT_DIR {
            return Ok((vec![self.path_of(id)?], false));
        }
        let mut start = Key::new(id.ino.0, KeyType::INODE_REF, 0);
        let end = Key::new(id.ino.0, KeyType::INODE_EXTREF, u64::MAX);
        let (mut paths, mut room) = (Vec::new(), len_bytes);
        // Item by item, because an inode can have many names.
        while let Some((key, item)) = tree.first_ge(&start, &end)? {
            let links: Vec<(Ino, Vec<u8>)> = if key.item_type == KeyType::INODE_REF {
                let refs = InodeRef::decode_all(&item).map_err(in_tree(&tree))?;
                refs.into_iter().map(|link| (Ino(key.offset), link.name)).collect()
            } else {
                let refs = InodeExtref::decode_all(&item).map_err(in_tree(&tree))?;
                refs.into_iter().map(|link| (Ino(link.parent), link.name)).collect()
            };
            for (dir, name) in links {
                let mut path = self.path_of(InodeId { root: id.root, ino: dir })?;
                if !path.is_empty() {
                    path.push(b'/');
                }
                path.extend(name);
                if paths.len() >= limit || (path.len() > room && !paths.is_empty()) {
                    paths.sort();
                    return Ok((paths, true));
                }
                room = room.saturating_sub(path.len());
                paths.push(path);
            }
            let Some(next) = key.successor() else { break };
            start = next;
        }
        paths.sort();
        Ok((paths, false))
    }

    /// The files that use the data at an address, as of the last commit, at most `limit`. With `whole_extent`, also the
    /// files that use other parts of the same extent. Also returns the address's offset in the extent. `None` if no data
    /// extent covers the address.
    pub fn uses_of_address(
        &self,
        at: Logical,
        whole_extent: bool,
        limit: usize,
    ) -> Result<Option<(u64, Vec<ExtentUse>)>> {
        Ok(self.engine.extent_uses(at, whole_extent, limit)?)
    }

    /// The files that use the data at an address now, as by [`Self::uses_of_address`]: commits first. Dirty data is not
    /// written back; it has no address.
    pub fn current_uses_of_address(
        &self,
        at: Logical,
        whole_extent: bool,
        limit: usize,
    ) -> Result<Option<(u64, Vec<ExtentUse>)>> {
        if let Ok(_changing) = self.context.begin_change()
            && self.context.read_only().is_none()
            && !self.engine.holds_commits()
        {
            self.engine.commit()?;
        }
        self.uses_of_address(at, whole_extent, limit)
    }

    /// Whether each of these data extents, given by address and length, has several users, as of the last commit.
    pub fn extents_are_shared(&self, extents: &[(Logical, u64)]) -> Result<Vec<bool>> {
        Ok(self.engine.extents_are_shared(extents)?)
    }
}
