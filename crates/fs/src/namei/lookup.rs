//! Looking up names, and reading directories and symbolic links.

use std::sync::Arc;

use ubtrfs_format::item::{FileExtent, FileType};
use ubtrfs_format::{Key, KeyType, RootId};

use crate::Fs;
use crate::error::{Error, Result};
use crate::inode::handle::make_stub;
use crate::inode::state::Inode;
use crate::items::dir_item::{self, FIRST_INDEX, HashedName, IndexBatch, in_tree};
use crate::items::file_extent::link_target;
use crate::types::{Attr, DirEntryOut, InodeId, mode};

impl Fs {
    /// Looks up the inode of a name. If the name leads to a subvolume, the result is the root directory of that
    /// subvolume.
    pub fn lookup(&self, dir: InodeId, name: &[u8]) -> Result<Attr> {
        let inode = self.find_child(dir, name, true)?;
        let attr = inode.read().map(|state| self.attr_of(&inode, &state));
        if attr.is_err() && self.options.track_lookups {
            self.forget(inode.id, 1);
        }
        attr
    }

    /// Looks up the inode at a path from [`Fs::root`]. With `follow`, a symbolic link at the end is followed. `..` does
    /// not lead above the root. The call takes no reference that [`Fs::forget`] would have to release.
    pub fn lookup_path(&self, path: &[u8], follow: bool) -> Result<Attr> {
        let id = self.walk(&mut vec![self.context.root()], path, follow, &mut { MAX_SYMLINKS })?;
        self.getattr(id)
    }

    /// Walks `path` from the last directory of `trail`. `..` goes back along `trail`. An absolute path starts at the
    /// first directory of `trail`.
    fn walk(&self, trail: &mut Vec<InodeId>, path: &[u8], follow: bool, links_left: &mut u32) -> Result<InodeId> {
        if path.first() == Some(&b'/') {
            trail.truncate(1);
        }
        // A path that ends in `/` or `/.` must lead to a directory.
        let ends_in_slash = matches!(path.rsplit(|byte| *byte == b'/').next(), Some(b"" | b"."));
        let mut names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".").peekable();
        while let Some(name) = names.next() {
            if name == b".." {
                if trail.len() > 1 {
                    trail.pop();
                }
                continue;
            }
            let dir = *trail.last().unwrap_or(&self.context.root());
            let inode = self.find_child(dir, name, false)?;
            let is_last = names.peek().is_none();
            let type_bits = inode.read()?.file_type_bits();
            if type_bits == mode::SYMLINK && (!is_last || follow || ends_in_slash) {
                *links_left = links_left.checked_sub(1).ok_or(Error::SymlinkLoop)?;
                let target = self.readlink(inode.id)?;
                let id = self.walk(trail, &target, true, links_left)?;
                if is_last && !ends_in_slash {
                    return Ok(id);
                }
                if self.inode(id)?.read()?.file_type_bits() != mode::DIRECTORY {
                    return Err(Error::NotDirectory);
                }
                continue;
            }
            if type_bits != mode::DIRECTORY {
                return if is_last && !ends_in_slash { Ok(inode.id) } else { Err(Error::NotDirectory) };
            }
            trail.push(inode.id);
        }
        Ok(*trail.last().unwrap_or(&self.context.root()))
    }

    /// The inode of a name. With `count`, the call counts as a lookup, which [`Fs::forget`] releases.
    fn find_child(&self, dir: InodeId, name: &[u8], count: bool) -> Result<Arc<Inode>> {
        dir_item::check_name(name).map_err(|error| match error {
            Error::InvalidArgument(_) => Error::NotFound,
            other => other,
        })?;
        let dir_inode = self.inode(dir)?;
        if name == b"." || name == b".." {
            let id = if name == b"." { dir } else { self.shown_parent(dir)? };
            let inode = self.inode(id)?;
            if count {
                self.count_lookup(id);
            }
            return Ok(inode);
        }
        let name = HashedName::from(name);
        let state = dir_inode.read()?;
        if !state.is_dir() {
            return Err(Error::NotDirectory);
        }
        if dir.is_stub() || state.removed || state.lacks_name(name) {
            return Err(Error::NotFound);
        }
        let entry = dir_item::find_entry(&dir_inode.home.tree, dir.ino, name)?.ok_or(Error::NotFound)?;
        let id = self.target_id(dir, &entry.location, name.bytes)?;
        if id.root != dir.root {
            // Unlock first: the first use of a subvolume deletes its orphans, which requires that no inode lock is
            // held.
            drop(state);
            let inode = self.inode(id)?;
            if count {
                self.count_lookup(id);
            }
            return Ok(inode);
        }
        // The directory's lock keeps the name in place until the lookup is counted.
        let inode = self.inode(id).map_err(|error| match error {
            Error::Stale => dangling(&entry),
            other => other,
        })?;
        if id.is_stub() {
            // Linux makes a new stub at each lookup, which has the present owner of the directory.
            make_stub(&mut inode.write()?.item, &state.item);
        }
        if count {
            self.count_lookup(id);
        }
        Ok(inode)
    }

    /// The subvolume with this name, and the directory's sequence number when the name was found.
    pub(crate) fn find_subvolume(&self, dir: InodeId, name: &[u8]) -> Result<(RootId, u64)> {
        dir_item::check_name(name)?;
        let inode = self.inode(dir)?;
        let state = inode.read()?;
        if !state.is_dir() {
            return Err(Error::NotDirectory);
        }
        let entry = dir_item::find_entry(&inode.home.tree, dir.ino, name)?.ok_or(Error::NotFound)?;
        let id = self.target_id(dir, &entry.location, name)?;
        if id.root == dir.root || id.is_stub() {
            return Err(Error::InvalidArgument("not a subvolume"));
        }
        Ok((id.root, state.item.sequence))
    }

    /// The target of `..` in a directory. For [`Fs::root`], the target is the directory itself, even if it has a parent,
    /// unless the top level is shown ([`Fs::show_top_level`]).
    fn shown_parent(&self, dir: InodeId) -> Result<InodeId> {
        if dir == self.context.topmost() { Ok(dir) } else { self.parent(dir) }
    }

    /// The cookie after the directory's last entry: entries made later have this cookie or a higher one.
    pub fn readdir_end(&self, dir: InodeId) -> Result<u64> {
        if dir.is_stub() {
            return Ok(FIRST_INDEX);
        }
        let inode = self.inode(dir)?;
        let state = inode.read()?;
        state.next_index.map_or_else(|| dir_item::load_next_index(&inode.home.tree, dir.ino), Ok)
    }

    /// Calls `emit` for each entry, beginning at `cookie`, until `emit` returns false because it did not take the
    /// entry. Cookie 0 is the start, including `.` and `..`. Cookies stay valid when the directory changes.
    pub fn readdir(&self, dir: InodeId, cookie: u64, emit: &mut dyn FnMut(DirEntryOut<'_>) -> bool) -> Result<()> {
        let inode = self.inode(dir)?;
        {
            let state = inode.read()?;
            if !state.is_dir() {
                return Err(Error::NotDirectory);
            }
            if state.removed {
                return Err(Error::NotFound);
            }
        }
        if cookie == 0 {
            self.touch_atime(&inode);
        }
        let dots: [(&[u8], u64); 2] = [(b".", 0), (b"..", 1)];
        for (name, at) in dots {
            if cookie > at {
                continue;
            }
            let id = if at == 0 { dir } else { self.shown_parent(dir).unwrap_or(dir) };
            if !emit(DirEntryOut { id, name, file_type: FileType::Directory, next_cookie: at.saturating_add(1) }) {
                return Ok(());
            }
        }
        if dir.is_stub() {
            return Ok(());
        }
        let mut index = cookie.max(FIRST_INDEX);
        let mut batch = IndexBatch::default();
        let mut limit = READDIR_BATCH_MIN;
        loop {
            let count = {
                let _state = inode.read()?;
                batch.read(&inode.home.tree, dir, index, limit)?
            };
            let is_last = count < limit;
            limit = limit.saturating_mul(2).min(READDIR_BATCH);
            for (entry, name) in batch.entries() {
                let Some(next) = entry.index.checked_add(1) else { return Ok(()) };
                index = next;
                let out = DirEntryOut {
                    id: self.target_id(dir, &entry.location, name)?,
                    name,
                    file_type: dir_item::file_type_of(entry.file_type)?,
                    next_cookie: next,
                };
                if !emit(out) {
                    return Ok(());
                }
            }
            if is_last {
                return Ok(());
            }
        }
    }

    /// The target of a symbolic link.
    pub fn readlink(&self, id: InodeId) -> Result<Vec<u8>> {
        let inode = self.inode(id)?;
        let target = {
            let state = inode.read()?;
            if state.file_type_bits() != mode::SYMLINK {
                return Err(Error::InvalidArgument("not a symbolic link"));
            }
            let key = Key::new(id.ino.0, KeyType::EXTENT_DATA, 0);
            let raw = inode.home.tree.get(&key)?.ok_or_else(|| bad_target(id.ino.0))?;
            let extent = FileExtent::decode(&raw).map_err(in_tree(&inode.home.tree))?;
            link_target(extent.body).ok_or_else(|| bad_target(id.ino.0))?
        };
        self.touch_atime(&inode);
        Ok(target)
    }
}

/// The error for an entry whose inode does not exist.
fn dangling(entry: &ubtrfs_format::item::DirItem) -> Error {
    dir_item::corrupt("location", entry.location.objectid, "expected an inode that exists")
}

fn bad_target(ino: u64) -> Error {
    let field = "symbolic link of inode";
    ubtrfs_format::FormatError::Value { what: "FileExtent", field, value: ino, expected: "expected inline data" }.into()
}

const MAX_SYMLINKS: u32 = 40;
/// Maximum number of entries in a batch.
const READDIR_BATCH: usize = 256;
/// Number of entries in the first batch, which is small because the caller may have room for few entries.
const READDIR_BATCH_MIN: usize = 40;
