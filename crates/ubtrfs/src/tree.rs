//! Removing a directory with its content.

use std::path::{Path, PathBuf};

use ubtrfs_fs::InodeId;

use crate::error::{Error, Result, ResultExt};
use crate::metadata::FileKind;
use crate::path::Follow;
use crate::{Filesystem, ReadDir};

/// A directory on the path from the removed directory down to the directory that is being emptied.
struct Level {
    id: InodeId,
    path: PathBuf,
    entries: ReadDir,
}

impl Filesystem {
    /// Removes a directory with its content. The root of the opened subvolume cannot be removed. Symbolic links are
    /// removed, not followed. A non-empty subvolume inside the
    /// directory stops the removal; delete it first with [`delete_subvolume`](Self::delete_subvolume).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// fs.create_dir_all("/a/b/c")?;
    /// fs.write("/a/b/file", "gone soon")?;
    /// fs.remove_dir_all("/a")?;
    /// assert!(!fs.exists("/a"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `NotADirectory`; `InvalidInput` for the root, an empty path, and a path that ends in `.` or `..`; `DirectoryNotEmpty` if the directory contains a subvolume with files; damage, such
    /// as a directory that contains itself. Files that were removed before the error stay removed.
    pub fn remove_dir_all(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        // What has no name cannot be removed, so its content stays too.
        self.parent_and_name("remove directory", path)?;
        let top = self.resolve("remove directory", path, Follow::No)?;
        if !top.is_dir() {
            return Err(Error::new("remove directory", path, ubtrfs_fs::Error::NotDirectory));
        }
        let mut levels = vec![Level { id: top.id, path: path.to_owned(), entries: self.entries(path, top.id)? }];
        while let Some(level) = levels.last_mut() {
            let Some(entry) = level.entries.next().transpose()? else {
                let done = levels.pop().map(|level| level.path).unwrap_or_default();
                match levels.last() {
                    Some(parent) => {
                        let name = done.file_name().unwrap_or_default();
                        let removed = self.engine().rmdir(parent.id, std::os::unix::ffi::OsStrExt::as_bytes(name));
                        removed.while_doing("remove directory", &done)?;
                    }
                    None => self.remove_dir(path)?,
                }
                continue;
            };
            let child = entry.path();
            let name = std::os::unix::ffi::OsStrExt::as_bytes(entry.file_name());
            if entry.kind() != Some(FileKind::Dir) {
                self.engine().unlink(level.id, name).while_doing("remove", &child)?;
            } else if entry.is_subvolume() {
                self.engine().rmdir(level.id, name).while_doing("remove directory", &child)?;
            } else {
                let id = entry.id();
                if levels.iter().any(|level| level.id == id) {
                    let cause = ubtrfs_fs::Error::SymlinkLoop;
                    return Err(Error::new("remove directory", &child, cause));
                }
                let entries = self.entries(&child, id)?;
                levels.push(Level { id, path: child, entries });
            }
        }
        Ok(())
    }

    fn entries(&self, path: &Path, id: InodeId) -> Result<ReadDir> {
        ReadDir::new(self, path, id)
    }
}
