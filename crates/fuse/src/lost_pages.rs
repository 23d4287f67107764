//! [`LostPages`]: files with written pages that the server refused to store, for example on a full filesystem.
//!
//! A program that writes through a mapping is told of success before the kernel sends the pages to the server; with
//! `writeback_cache`, so is every program that writes. If the server then refuses a page, the kernel drops its content.
//! Only fsync, msync and close report that, if the program calls them. So the session names these files when it ends.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use ubtrfs_error::Errno;
use ubtrfs_fs::{Fs, InodeId};

/// Files that lost pages, with the first reason of each file.
#[derive(Debug, Default)]
pub(crate) struct LostPages(Mutex<BTreeMap<InodeId, Errno>>);

impl LostPages {
    /// Notes that pages of a file were refused.
    pub(crate) fn note(&self, id: InodeId, errno: Errno) {
        let mut files = self.0.lock();
        if files.len() < MAX_FILES {
            files.entry(id).or_insert(errno);
        }
    }

    /// Forgets a file whose fsync succeeded: the kernel reported the loss to an earlier call.
    pub(crate) fn forget(&self, id: InodeId) {
        self.0.lock().remove(&id);
    }

    /// Tells which files lost pages; `None` if there is no such file, or all of them are deleted.
    pub(crate) fn describe(&self, fs: &Fs) -> Option<String> {
        let files = self.0.lock();
        let mut paths = files.iter().filter_map(|(id, errno)| {
            let path = fs.paths_of(*id, 1).ok()?.pop()?;
            Some((path, errno))
        });
        let (path, errno) = paths.next()?;
        let others = paths.count();
        let others = if others == 0 { String::new() } else { format!(" and of {others} more files") };
        Some(format!(
            "pages of '/{}'{others}, written through a mapping or the kernel's write cache, could not be stored: {}",
            path.escape_ascii(),
            std::io::Error::from(*errno),
        ))
    }
}

/// Maximum number of files that are remembered.
const MAX_FILES: usize = 1000;
