//! [`PathWalk`]: looks up the inodes at paths of a stream.
//!
//! - I1. Every name is looked up as an entry of a directory of the subvolume. A path leads only through directories;
//!   symbolic links are never read, and names of other subvolumes are errors (R1).
//! - I2. When a command removes or renames a name, the same call removes or renames it in the cache too (`gone`,
//!   `renamed`). The cache has names in directories, not paths, so names below a renamed directory stay valid.

use std::collections::HashMap;

use ubtrfs_format::item::FileType;
use ubtrfs_format::{Ino, RootId};
use ubtrfs_stream::StreamPath;

use super::error::ReceiveProblem;
use crate::items::dir_item::{self, HashedName};
use crate::{Error, Fs, InodeId};

/// Looks up paths in one subvolume.
#[derive(Debug)]
pub(crate) struct PathWalk {
    root: RootId,
    /// Directories, by the number of the directory that holds their name and by the name ([`key`]).
    dirs: HashMap<Box<[u8]>, Ino>,
    dirs_bytes: u64,
    max_bytes: u64,
    /// The path and inode of the last directory.
    last_dir: Option<(Vec<u8>, Ino)>,
    /// The path and inode of the last command. Most commands are about the same inode as the previous one.
    last: Option<(Vec<u8>, Ino)>,
    key: Vec<u8>,
}

type Result<T, E = ReceiveProblem> = std::result::Result<T, E>;

impl PathWalk {
    /// Starts at a subvolume's root. The directories in the cache take about `max_bytes`.
    pub(crate) fn new(root: RootId, max_bytes: u64) -> Self {
        Self { root, dirs: HashMap::new(), dirs_bytes: 0, max_bytes, last_dir: None, last: None, key: Vec::new() }
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
        key(&mut self.key, dir.ino, name);
        let ino = match self.dirs.get(&self.key[..]) {
            Some(ino) => *ino,
            None => entry(fs, dir, name)?.0.ino,
        };
        set(&mut self.last, path, ino);
        Ok(self.id(ino))
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
        if let Some((last, ino)) = &self.last_dir
            && last == path.as_bytes()
        {
            return Ok(self.id(*ino));
        }
        let mut dir = InodeId::root_of(self.root);
        for name in path.names() {
            dir = self.dir_in(fs, dir, name)?;
        }
        set(&mut self.last_dir, path.as_bytes(), dir.ino);
        Ok(dir)
    }

    /// The directory with this name in a directory.
    fn dir_in(&mut self, fs: &Fs, dir: InodeId, name: &[u8]) -> Result<InodeId> {
        key(&mut self.key, dir.ino, name);
        if let Some(ino) = self.dirs.get(&self.key[..]) {
            return Ok(self.id(*ino));
        }
        let (id, file_type) = entry(fs, dir, name)?;
        match file_type {
            FileType::Directory => self.keep(dir.ino, name, id.ino),
            FileType::Symlink => {
                return Err(ReceiveProblem::NotFollowed { name: name.to_vec(), what: "a symbolic link" });
            }
            _ => return Err(Error::NotDirectory.into()),
        }
        Ok(id)
    }

    fn keep(&mut self, above: Ino, name: &[u8], dir: Ino) {
        if self.dirs_bytes >= self.max_bytes {
            self.dirs = HashMap::new();
            self.dirs_bytes = 0;
        }
        key(&mut self.key, above, name);
        if self.dirs.insert(self.key.clone().into_boxed_slice(), dir).is_none() {
            self.dirs_bytes = self.dirs_bytes.saturating_add(bytes_of(&self.key));
        }
    }

    fn take(&mut self, above: Ino, name: &[u8]) -> Option<Ino> {
        key(&mut self.key, above, name);
        let taken = self.dirs.remove(&self.key[..])?;
        self.dirs_bytes = self.dirs_bytes.saturating_sub(bytes_of(&self.key));
        Some(taken)
    }

    /// Notes a new inode, whose name is in the directory `above`.
    pub(crate) fn made(&mut self, above: InodeId, path: &[u8], id: InodeId, is_dir: bool) {
        if is_dir {
            self.keep(above.ino, name_of(path), id.ino);
        }
        set(&mut self.last, path, id.ino);
    }

    /// Notes that a name is gone from the directory `above` (I2).
    pub(crate) fn gone(&mut self, above: InodeId, path: &[u8]) {
        self.take(above.ino, name_of(path));
        self.forget_last(path);
    }

    /// Notes a rename (I2).
    pub(crate) fn renamed(&mut self, (above, from): (InodeId, &[u8]), (to_above, to): (InodeId, &[u8])) {
        self.take(to_above.ino, name_of(to));
        if let Some(dir) = self.take(above.ino, name_of(from)) {
            self.keep(to_above.ino, name_of(to), dir);
        }
        let moved = self.last.take_if(|(path, _)| path == from);
        self.forget_last(from);
        self.forget_last(to);
        if let Some((_, ino)) = moved {
            set(&mut self.last, to, ino);
        }
    }

    /// Forgets the last paths if they are equal to `path` or below it.
    fn forget_last(&mut self, path: &[u8]) {
        for last in [&mut self.last, &mut self.last_dir] {
            last.take_if(|(last, _)| last.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest[0] == b'/'));
        }
    }
}

fn set(last: &mut Option<(Vec<u8>, Ino)>, path: &[u8], ino: Ino) {
    match last {
        Some((last, last_ino)) => {
            last.clear();
            last.extend_from_slice(path);
            *last_ino = ino;
        }
        None => *last = Some((path.to_vec(), ino)),
    }
}

fn name_of(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

/// Makes the key of a name in a directory.
fn key(out: &mut Vec<u8>, above: Ino, name: &[u8]) {
    out.clear();
    out.extend_from_slice(&above.0.to_le_bytes());
    out.extend_from_slice(name);
}

/// Estimated memory of a directory in the cache.
fn bytes_of(key: &[u8]) -> u64 {
    (key.len() as u64).saturating_add(DIR_BYTES)
}

/// Finds the entry of a name in a directory. Fails if the name leads to another subvolume (I1).
pub(crate) fn entry(fs: &Fs, dir: InodeId, name: &[u8]) -> Result<(InodeId, FileType)> {
    dir_item::check_name(name)?;
    let inode = fs.inode(dir)?;
    let state = inode.read()?;
    if !state.is_dir() {
        return Err(Error::NotDirectory.into());
    }
    let hashed = HashedName::from(name);
    if state.lacks_name(hashed) {
        return Err(Error::NotFound.into());
    }
    let found = dir_item::find_entry(&inode.home.tree, dir.ino, hashed)?.ok_or(Error::NotFound)?;
    let id = fs.target_id(dir, &found.location, name)?;
    if id.root != dir.root || id.is_stub() {
        return Err(ReceiveProblem::NotFollowed { name: name.to_vec(), what: "another subvolume" });
    }
    Ok((id, dir_item::file_type_of(found.file_type)?))
}

/// Estimated memory of a directory in the cache, without its key: an entry of the table, which is about half full, and
/// the overhead of an allocation.
const DIR_BYTES: u64 = 80;

#[cfg(test)]
mod tests {
    use super::*;

    fn id(ino: u64) -> InodeId {
        InodeId { root: RootId(256), ino: Ino(ino) }
    }

    fn dirs(walk: &PathWalk) -> Vec<(u64, String, u64)> {
        let name = |key: &[u8]| String::from_utf8(key[8..].to_vec()).unwrap();
        let above = |key: &[u8]| u64::from_le_bytes(key[..8].try_into().unwrap());
        let mut found: Vec<_> = walk.dirs.iter().map(|(key, ino)| (above(key), name(key), ino.0)).collect();
        found.sort();
        found
    }

    #[test]
    fn renames_and_removals_reach_all_paths_below() {
        let mut walk = PathWalk::new(RootId(256), 1 << 20);
        for (above, path, ino) in [(256, "a", 1), (1, "a/b", 2), (2, "a/b/c", 3), (256, "a-", 4), (256, "x", 6)] {
            walk.made(id(above), path.as_bytes(), id(ino), true);
        }
        walk.last = Some((b"a/b/file".to_vec(), Ino(9)));
        walk.last_dir = Some((b"a/b".to_vec(), Ino(2)));
        walk.renamed((id(256), b"a"), (id(256), b"x"));
        let named = |found: &[(u64, &str, u64)]| -> Vec<_> {
            found.iter().map(|(above, name, ino)| (*above, (*name).to_owned(), *ino)).collect()
        };
        assert_eq!(dirs(&walk), named(&[(1, "b", 2), (2, "c", 3), (256, "a-", 4), (256, "x", 1)]));
        assert_eq!((&walk.last, &walk.last_dir), (&None, &None), "paths below the renamed one");
        walk.last = Some((b"f".to_vec(), Ino(10)));
        walk.last_dir = Some((b"x-".to_vec(), Ino(11)));
        walk.renamed((id(256), b"f"), (id(1), b"x/g"));
        assert_eq!(walk.last, Some((b"x/g".to_vec(), Ino(10))));
        walk.gone(id(256), b"x");
        assert_eq!(dirs(&walk), named(&[(1, "b", 2), (2, "c", 3), (256, "a-", 4)]));
        assert_eq!((walk.last.is_none(), walk.last_dir), (true, Some((b"x-".to_vec(), Ino(11)))));
    }

    #[test]
    fn directories_stay_within_the_limit() {
        let mut walk = PathWalk::new(RootId(256), 10_000);
        for number in 0..1000 {
            walk.made(id(256), format!("{number:0>200}").as_bytes(), id(300 + number), true);
            assert!(walk.dirs.len() <= 36 && walk.dirs_bytes < 10_300);
        }
    }
}
