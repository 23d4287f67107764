//! [`Walk`]: looks up the inodes at paths of a stream.
//!
//! - I1. Every name is looked up as an entry of a directory of the subvolume. A path leads only through directories;
//!   symbolic links are never read, and names of other subvolumes are errors (R1).
//! - I2. When a command removes or renames a path, the same call removes or renames it in the cache too (`gone`,
//!   `renamed`).

use std::collections::BTreeMap;

use ubtrfs_format::item::FileType;
use ubtrfs_format::{Ino, RootId};
use ubtrfs_stream::StreamPath;

use super::error::ReceiveProblem;
use crate::items::dir_item;
use crate::{Error, Fs, InodeId};

/// Looks up paths in one subvolume.
#[derive(Debug)]
pub(crate) struct Walk {
    root: RootId,
    /// Directories by path.
    dirs: BTreeMap<Vec<u8>, Ino>,
    /// The path and inode of the last command. Most commands are about the same inode as the previous one.
    last: Option<(Vec<u8>, Ino)>,
}

type Result<T, E = ReceiveProblem> = std::result::Result<T, E>;

impl Walk {
    /// Starts at a subvolume's root.
    pub(crate) fn new(root: RootId) -> Self {
        Self { root, dirs: BTreeMap::new(), last: None }
    }

    /// The subvolume.
    pub(crate) fn root(&self) -> RootId {
        self.root
    }

    fn id(&self, ino: Ino) -> InodeId {
        InodeId { root: self.root, ino }
    }

    /// The inode of a path.
    pub(crate) fn inode(&mut self, fs: &Fs, path: &[u8]) -> Result<InodeId> {
        if let Some((last, ino)) = &self.last
            && last == path
        {
            return Ok(self.id(*ino));
        }
        let Some((dir, name)) = StreamPath::new(path)?.split() else { return Ok(InodeId::root_of(self.root)) };
        let dir = self.dir(fs, dir)?;
        let (id, _) = entry(fs, dir, name)?;
        self.last = Some((path.to_vec(), id.ino));
        Ok(id)
    }

    /// The directory and the last name of a path.
    pub(crate) fn place<'p>(&mut self, fs: &Fs, path: &'p [u8]) -> Result<(InodeId, &'p [u8])> {
        let root = ReceiveProblem::Order("the path names the subvolume itself");
        let (dir, name) = StreamPath::new(path)?.split().ok_or(root)?;
        Ok((self.dir(fs, dir)?, name))
    }

    fn dir(&mut self, fs: &Fs, path: StreamPath<'_>) -> Result<InodeId> {
        if path.as_bytes().is_empty() {
            return Ok(InodeId::root_of(self.root));
        }
        if let Some(ino) = self.dirs.get(path.as_bytes()) {
            return Ok(self.id(*ino));
        }
        // The directory that holds the last name is often in the cache.
        let mut dir = InodeId::root_of(self.root);
        let mut rest = path.as_bytes();
        if let Some((above, name)) = path.split()
            && let Some(ino) = self.dirs.get(above.as_bytes())
        {
            (dir, rest) = (self.id(*ino), name);
        }
        for name in rest.split(|byte| *byte == b'/') {
            let (id, file_type) = entry(fs, dir, name)?;
            match file_type {
                FileType::Directory => dir = id,
                FileType::Symlink => {
                    return Err(ReceiveProblem::NotFollowed { name: name.to_vec(), what: "a symbolic link" });
                }
                _ => return Err(Error::NotDirectory.into()),
            }
        }
        self.keep(path.as_bytes(), dir.ino);
        Ok(dir)
    }

    fn keep(&mut self, path: &[u8], dir: Ino) {
        if self.dirs.len() >= MOST_DIRS {
            self.dirs.clear();
        }
        self.dirs.insert(path.to_vec(), dir);
    }

    /// Notes a new inode.
    pub(crate) fn made(&mut self, path: &[u8], id: InodeId, is_dir: bool) {
        if is_dir {
            self.keep(path, id.ino);
        }
        self.last = Some((path.to_vec(), id.ino));
    }

    /// Notes that a name is gone, with everything below it (I2).
    pub(crate) fn gone(&mut self, path: &[u8]) {
        self.take(path);
    }

    /// Notes a rename (I2).
    pub(crate) fn renamed(&mut self, from: &[u8], to: &[u8]) {
        let last = self.last.take();
        self.take(to);
        for (below, ino) in self.take(from) {
            self.dirs.insert([to, &below].concat(), ino);
        }
        self.last = last.filter(|(path, _)| path == from).map(|(_, ino)| (to.to_vec(), ino));
    }

    /// Removes a path and all paths below it from the caches. Returns the directories, each with the part of its path
    /// below `path`.
    fn take(&mut self, path: &[u8]) -> Vec<(Vec<u8>, Ino)> {
        self.last = None;
        let mut taken = Vec::new();
        if let Some(ino) = self.dirs.remove(path) {
            taken.push((Vec::new(), ino));
        }
        // A directory below `path` may be in the cache although directories above it are not.
        let below = [path, b"/"].concat();
        let paths: Vec<Vec<u8>> = self
            .dirs
            .range(below.clone()..)
            .map(|(path, _)| path)
            .take_while(|path| path.starts_with(&below))
            .cloned()
            .collect();
        for found in paths {
            if let Some(ino) = self.dirs.remove(&found) {
                taken.push((found[path.len()..].to_vec(), ino));
            }
        }
        taken
    }
}

/// Finds the entry of a name in a directory. Fails if the name leads to another subvolume (I1).
pub(crate) fn entry(fs: &Fs, dir: InodeId, name: &[u8]) -> Result<(InodeId, FileType)> {
    dir_item::check_name(name)?;
    let inode = fs.inode(dir)?;
    let state = inode.read()?;
    if !state.is_dir() {
        return Err(Error::NotDirectory.into());
    }
    let found = dir_item::find_entry(&inode.home.tree, dir.ino, name)?.ok_or(Error::NotFound)?;
    let id = fs.target_id(dir, &found.location, name)?;
    if id.root != dir.root || id.is_stub() {
        return Err(ReceiveProblem::NotFollowed { name: name.to_vec(), what: "another subvolume" });
    }
    Ok((id, dir_item::file_type_of(found.file_type)?))
}

/// Maximum number of directories in the cache.
const MOST_DIRS: usize = 20_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renames_and_removals_reach_all_paths_below() {
        let mut walk = Walk::new(RootId(256));
        for (path, ino) in [("a", 1), ("a/b", 2), ("a/b/c", 3), ("a-", 4), ("a0", 5), ("x", 6), ("x/y", 7)] {
            walk.made(path.as_bytes(), InodeId { root: RootId(256), ino: Ino(ino) }, true);
        }
        walk.last = Some((b"a/b/file".to_vec(), Ino(9)));
        walk.renamed(b"a", b"x");
        let paths = |walk: &Walk| {
            walk.dirs.iter().map(|(path, ino)| (String::from_utf8(path.clone()).unwrap(), ino.0)).collect::<Vec<_>>()
        };
        let expected = [("a-", 4), ("a0", 5), ("x", 1), ("x/b", 2), ("x/b/c", 3)];
        assert_eq!(paths(&walk), expected.map(|(path, ino)| (path.to_owned(), ino)));
        assert_eq!(walk.last, None, "a path below the renamed one is not the last any more");
        walk.last = Some((b"f".to_vec(), Ino(10)));
        walk.renamed(b"f", b"g");
        assert_eq!(walk.last, Some((b"g".to_vec(), Ino(10))));
        walk.gone(b"x");
        assert_eq!(paths(&walk).len(), 2);
    }
}
