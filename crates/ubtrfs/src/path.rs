//! Resolves a path to an inode, or to the directory and name of its last component.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ubtrfs_fs::{Attr, Error, Fs, InodeId};

/// Whether a symbolic link at the end of a path is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Follow {
    Yes,
    No,
}

pub(crate) fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

/// Returns the attributes of the inode at a path.
pub(crate) fn resolve(fs: &Fs, path: &Path, follow: Follow) -> Result<Attr, Error> {
    fs.lookup_path(bytes(path), follow == Follow::Yes)
}

/// Returns the last name of a path, and the directory that the name lies in. Trailing slashes are ignored.
///
/// Fails with `InvalidArgument` if the path has no last name: it is empty, the root, or ends in `.` or `..`.
pub(crate) fn parent_and_name<'p>(fs: &Fs, path: &'p Path) -> Result<(InodeId, &'p [u8]), Error> {
    let bytes = bytes(path);
    let end = bytes.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
    let start = bytes[..end].iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let (dir, name) = (&bytes[..start], &bytes[start..end]);
    if matches!(name, b"" | b"." | b"..") {
        return Err(Error::InvalidArgument("the path does not end in a name"));
    }
    let attr = fs.lookup_path(dir, true)?;
    if attr.is_dir() { Ok((attr.id, name)) } else { Err(Error::NotDirectory) }
}
