//! [`LostPages`]: files with written pages that the server refused to store, for example on a full filesystem.
//!
//! A write through a mapping succeeds before the kernel sends the pages to the server. With `writeback_cache`, every
//! write does. If the server then refuses a page, the kernel drops the page's content. Only fsync, msync and close
//! report the loss, if the program calls them. So the log names the file and the range at once, `stats` shows them, and
//! the session names them when it ends.
//!
//! Space for such pages cannot be reserved before they arrive. For a mapping and for the first store to one of its
//! pages, the kernel sends no request (`FUSE_SETUPMAPPING` exists only for DAX), and the flags of an open tell only
//! that the file can be mapped for writing. The first request that concerns the page is the write of its content.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use ubtrfs_error::Errno;
use ubtrfs_fs::{Fs, InodeId};
use ubtrfs_transaction::Metric;

/// Files that lost pages.
#[derive(Debug, Default)]
pub(crate) struct LostPages(Mutex<BTreeMap<InodeId, Loss>>);

/// The lost bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Loss {
    /// The first reason.
    errno: Errno,
    /// The range that holds all lost bytes.
    start: u64,
    end: u64,
    bytes: u64,
    /// The value of `bytes` when the loss was logged last.
    logged_bytes: u64,
}

impl LostPages {
    /// Notes that bytes of a file were refused. Logs the first loss of a file at once, and then each time when the loss
    /// has doubled, so that there are few messages for one file.
    pub(crate) fn note(&self, fs: &Fs, id: InodeId, offset: u64, len: usize, errno: Errno) {
        let Some(loss) = self.add(id, offset, len as u64, errno) else { return };
        match fs.paths_of(id, 1, 0).ok().and_then(|(mut paths, _)| paths.pop()) {
            Some(path) => tracing::error!("pages of {}", lost_of(&path, &loss)),
            None => tracing::error!("pages of inode {id:?}, which has no name, {}", loss.text()),
        }
    }

    /// Adds to the loss of a file. Returns the whole loss if it should be logged.
    fn add(&self, id: InodeId, offset: u64, bytes: u64, errno: Errno) -> Option<Loss> {
        let mut files = self.0.lock();
        if files.len() >= MAX_FILES && !files.contains_key(&id) {
            return None;
        }
        let end = offset.saturating_add(bytes);
        let loss = files.entry(id).or_insert(Loss { errno, start: offset, end, bytes: 0, logged_bytes: 0 });
        loss.start = loss.start.min(offset);
        loss.end = loss.end.max(end);
        loss.bytes = loss.bytes.saturating_add(bytes);
        if loss.logged_bytes > 0 && loss.bytes / 2 < loss.logged_bytes {
            return None;
        }
        loss.logged_bytes = loss.bytes;
        Some(*loss)
    }

    /// Forgets a file whose fsync succeeded: the kernel reported the loss to an earlier call.
    pub(crate) fn forget(&self, id: InodeId) {
        self.0.lock().remove(&id);
    }

    /// Names the files that lost pages, and the lost ranges; `None` if there is no such file, or all such files are
    /// deleted.
    pub(crate) fn describe(&self, fs: &Fs) -> Option<String> {
        let files = self.with_paths(fs);
        let mut named: Vec<String> = files.iter().take(MAX_NAMED).map(|(path, loss)| lost_of(path, loss)).collect();
        if let Some(more) = files.len().checked_sub(MAX_NAMED).filter(|more| *more > 0) {
            named.push(format!("of {more} more files"));
        }
        (!named.is_empty()).then(|| format!("pages of {}", named.join("; of ")))
    }

    /// The counters for `stats`. With `names_files`, they name the files and the ranges.
    pub(crate) fn metrics(&self, fs: &Fs, names_files: bool) -> Vec<Metric> {
        let files = self.with_paths(fs);
        let help = "Files with pages that were written through a mapping or the write cache, and could not be stored.";
        let mut out = vec![Metric::gauge("files_with_lost_pages", help, files.len() as f64)];
        for (path, loss) in files.iter().take(MAX_NAMED).filter(|_| names_files) {
            // Quotes and commas would end a label of the text.
            let path = format!("/{}", path.escape_ascii()).replace("\\\"", "\\x22");
            let mut push = |name, help, value: u64| {
                out.push(Metric::gauge(name, help, value as f64).label("file", &path).label("error", &loss.reason()));
            };
            push("file_lost_bytes", "Bytes of the file that could not be stored", loss.bytes);
            push("file_lost_start", "Offset of the first of these bytes", loss.start);
            push("file_lost_end", "Offset after the last of these bytes", loss.end);
        }
        out
    }

    fn with_paths(&self, fs: &Fs) -> Vec<(Vec<u8>, Loss)> {
        let files = self.0.lock().clone();
        files.into_iter().filter_map(|(id, loss)| Some((fs.paths_of(id, 1, 0).ok()?.0.pop()?, loss))).collect()
    }
}

impl Loss {
    fn text(&self) -> String {
        let Self { start, end, bytes, .. } = self;
        format!(
            "{bytes} bytes from offset {start} to {end}, written through a mapping or the kernel's write cache, could not be \
             stored: {}",
            self.reason()
        )
    }

    fn reason(&self) -> String {
        std::io::Error::from(self.errno).to_string()
    }
}

fn lost_of(path: &[u8], loss: &Loss) -> String {
    format!("'/{}', {}", path.escape_ascii(), loss.text())
}

/// Maximum number of files that are remembered.
const MAX_FILES: usize = 1000;
/// Maximum number of files that a message names.
const MAX_NAMED: usize = 10;

#[cfg(test)]
mod tests {
    use ubtrfs_format::{Ino, RootId};

    use super::*;

    #[test]
    fn a_loss_is_logged_at_once_and_when_it_has_doubled() {
        let lost = LostPages::default();
        let id = InodeId { root: RootId::FS_TREE, ino: Ino(257) };
        let logged: Vec<u64> = (0..64)
            .filter_map(|page| lost.add(id, page << 12, 4096, Errno::NOSPC))
            .map(|loss| loss.bytes >> 12)
            .collect();
        assert_eq!(logged, [1, 2, 4, 8, 16, 32, 64]);
        let all = lost.0.lock()[&id];
        assert_eq!((all.start, all.end, all.bytes), (0, 64 << 12, 64 << 12));
        lost.forget(id);
        assert!(lost.add(id, 0, 1, Errno::DQUOT).is_some_and(|loss| loss.errno == Errno::DQUOT));
    }
}
