//! Paths, names and data of files in a filesystem.
//!
//! - I1. Paths never lead out of the filesystem: `..` stops at its root.

use std::collections::HashSet;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use anyhow::bail;
use ubtrfs_format::Ino;
use ubtrfs_format::item::is_entry_name;
pub use ubtrfs_format::print::escaped as printable;
use ubtrfs_fs::{Fs, InodeId, mode};

/// Returns the names of a path, without empty names and `.`; `..` removes the name before it (I1).
pub fn normal_names(path: &[u8]) -> Vec<&[u8]> {
    let mut names = Vec::new();
    for name in path.split(|byte| *byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." => drop(names.pop()),
            name => names.push(name),
        }
    }
    names
}

/// Joins names: `/a/b` from `a` and `b`.
pub fn join(names: &[&[u8]]) -> Vec<u8> {
    let mut path = vec![b'/'];
    path.extend(names.join(&b'/'));
    path
}

/// Returns the path of a name in a directory.
pub fn child_path(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = dir.to_vec();
    push_name(&mut path, name);
    path
}

/// Adds a name to a path.
pub fn push_name(path: &mut Vec<u8>, name: &[u8]) {
    if !path.ends_with(b"/") {
        path.push(b'/');
    }
    path.extend(name);
}

/// A name for a file that is not complete yet.
pub fn temporary_name() -> Vec<u8> {
    format!(".ubtrfs-{}", uuid::Uuid::new_v4().simple()).into_bytes()
}

/// The type bits of a mode.
pub fn type_of(mode: u32) -> u32 {
    mode & mode::TYPE
}

/// Converts bytes to a path of the host.
pub fn os_string(bytes: &[u8]) -> OsString {
    OsString::from_vec(bytes.to_vec())
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DirName {
    /// The name.
    pub name: Vec<u8>,
    /// The inode that the entry refers to.
    pub id: InodeId,
}

/// Reads the names in a directory, sorted by their bytes, without `.` and `..`.
pub fn read_names(fs: &Fs, dir: InodeId) -> ubtrfs_fs::Result<Vec<DirName>> {
    let mut names = Vec::new();
    fs.readdir(dir, 0, &mut |entry| {
        if entry.name != b"." && entry.name != b".." {
            names.push(DirName { name: entry.name.to_vec(), id: entry.id });
        }
        true
    })?;
    names.sort_unstable();
    Ok(names)
}

/// Directories that a walk has visited. In a crafted image, a directory may have two names. A walk through a loop
/// would never end, and a walk through directories shared at each of n levels would take 2^n steps.
#[derive(Debug, Default)]
pub struct VisitedDirs(HashSet<InodeId>);

impl VisitedDirs {
    /// Records a directory. Fails if the walk has visited the directory before.
    pub fn pass(&mut self, dir: InodeId) -> anyhow::Result<()> {
        // Linux shows empty directories in place of the nested subvolumes of a snapshot, all with the inode number 2.
        // `fs` gives each of them its own, larger number (`InodeId::stub`).
        let is_real = dir.ino >= Ino::ROOT_DIR;
        if is_real && !self.0.insert(dir) {
            bail!("the directory has two names, which is damage; check the image with: ubtrfs check");
        }
        Ok(())
    }
}

/// Returns the ranges of a file that have data; the rest are holes.
pub fn data_ranges(fs: &Fs, id: InodeId, size: u64) -> ubtrfs_fs::Result<Vec<(u64, u64)>> {
    use ubtrfs_fs::{Error, SeekWhence};
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match fs.seek(id, at, SeekWhence::Data) {
            Ok(start) => start,
            Err(Error::NoSuchOffset) => break,
            Err(error) => return Err(error),
        };
        let end = fs.seek(id, start, SeekWhence::Hole)?.min(size);
        if start >= end {
            break;
        }
        ranges.push((start, end - start));
        at = end;
    }
    Ok(ranges)
}

/// Reads a range of a file piece by piece. Bytes past the file's end are zeros.
pub fn read_pieces(
    fs: &Fs,
    id: InodeId,
    range: (u64, u64),
    buf: &mut Vec<u8>,
    mut piece: impl FnMut(u64, &[u8]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let (mut at, end) = (range.0, range.0 + range.1);
    buf.resize(COPY_LEN, 0);
    while at < end {
        let len = COPY_LEN.min(usize::try_from(end - at).unwrap_or(COPY_LEN));
        let count = fs.read_into(id, at, &mut buf[..len])?;
        buf[count..len].fill(0);
        piece(at, &buf[..len])?;
        at += len as u64;
    }
    Ok(())
}

/// The text of a path of the host.
pub fn shown(path: &Path) -> String {
    printable(path.as_os_str().as_encoded_bytes())
}

/// Fails for names that could lead out of a directory.
///
/// # Errors
/// The name is `.` or `..`, is empty, or contains a slash or a zero byte.
pub fn check_name(name: &[u8]) -> anyhow::Result<()> {
    if !is_entry_name(name) {
        bail!("'{}' is not a valid file name", printable(name));
    }
    Ok(())
}

/// Number of bytes that are copied at once.
pub const COPY_LEN: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_do_not_lead_out() {
        assert_eq!(join(&normal_names(b"/a/../../b/./c//d/")), b"/b/c/d");
        assert_eq!(join(&normal_names(b"/..")), b"/");
        assert_eq!(child_path(b"/", b"a"), b"/a");
        assert_eq!(child_path(b"/a", b"b"), b"/a/b");
    }
}
