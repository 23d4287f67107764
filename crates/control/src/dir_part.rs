//! [`part_of`]: the entries of a directory in parts, for walks through everything below a directory.
//!
//! - P1. A walk holds only its open directories, each with a cookie, and a part of one of them. So its memory does not
//!   grow with the number of files, and [`DEPTH_MAX`] bounds the number of open directories.

use rustix::io::Errno;
use ubtrfs_format::item::FileType;
use ubtrfs_fs::{Error, Fs, InodeId};

use crate::failure::{CommandFailure, Result};

/// Some entries of a directory.
#[derive(Default)]
pub(crate) struct DirPart {
    /// Regular files, in the order of the directory.
    pub(crate) files: Vec<(InodeId, Vec<u8>)>,
    /// A directory after the files.
    pub(crate) dir: Option<(InodeId, Vec<u8>)>,
    /// The cookie to continue from; `None` after the last entry.
    pub(crate) next: Option<u64>,
}

/// Regular files and directories of a directory, from a cookie up to the next directory. Entries of other subvolumes are
/// included. A directory that was removed has no entries.
pub(crate) fn part_of(fs: &Fs, dir: InodeId, cookie: u64) -> Result<DirPart> {
    let mut part = DirPart::default();
    let mut last = cookie;
    let mut len_bytes = 0_usize;
    let listed = fs.readdir(dir, cookie, &mut |entry| {
        if part.dir.is_some() || len_bytes >= PART_BYTES {
            part.next = Some(last);
            return false;
        }
        last = entry.next_cookie;
        match entry.file_type {
            FileType::Directory if !matches!(entry.name, b"." | b"..") => {
                part.dir = Some((entry.id, entry.name.to_vec()));
            }
            FileType::Regular => {
                len_bytes = len_bytes.saturating_add(entry.name.len()).saturating_add(ENTRY_BYTES);
                part.files.push((entry.id, entry.name.to_vec()));
            }
            _ => {}
        }
        true
    });
    match listed {
        Err(Error::NotFound | Error::Stale) => Ok(DirPart::default()),
        listed => listed.map(|()| part).map_err(CommandFailure::from),
    }
}

/// Fails if a walk has too many open directories (P1).
pub(crate) fn check_depth(nr_open: usize) -> Result<()> {
    if nr_open < DEPTH_MAX {
        return Ok(());
    }
    let text = "the directories are nested too deep; run the command on directories further down";
    Err(CommandFailure::new(Errno::TOOBIG, text))
}

/// The greatest number of directories inside each other.
const DEPTH_MAX: usize = 16 << 10;
/// Bytes of a part.
const PART_BYTES: usize = 32 << 10;
/// Estimated bytes of an entry without its name.
const ENTRY_BYTES: usize = 40;
