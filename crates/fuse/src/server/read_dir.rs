//! READDIR and READDIRPLUS: fills answers with the entries of a directory.

use ubtrfs_fs::{Error, InodeId, Result};

use super::Server;
use crate::attr::entry_kind;
use crate::protocol::Reply;

impl Server {
    pub(super) fn readdir(&self, node: u64, offset: u64, reply: &mut Reply<'_>) -> Result<()> {
        let dir = self.id(node)?;
        let end = self.dir_end(dir, node, offset)?;
        let mut cookie = offset;
        self.fs.readdir(dir, offset, &mut |entry| {
            let (ino, kind) = (self.nodes.st_ino(entry.id), entry_kind(entry.file_type));
            if entry.next_cookie > end || !reply.dirent(ino, entry.next_cookie, kind, entry.name) {
                return false;
            }
            cookie = entry.next_cookie;
            true
        })?;
        // After an answer with entries, the reader continues at `cookie`, so remember where the reader must stop.
        if cookie != offset {
            self.dir_ends.remember(node, cookie, end);
        }
        Ok(())
    }

    /// The offset where the reader that continues at `cookie` must stop.
    fn dir_end(&self, dir: InodeId, node: u64, cookie: u64) -> Result<u64> {
        self.dir_ends.take(node, cookie).map_or_else(|| self.fs.readdir_end(dir), Ok)
    }

    /// Fetches up to [`PLUS_BATCH`] entries after `cookie` and before `end`.
    fn some_entries(&self, dir: InodeId, cookie: u64, end: u64) -> Result<Vec<Name>> {
        let mut entries = Vec::with_capacity(PLUS_BATCH);
        self.fs.readdir(dir, cookie, &mut |entry| {
            if entries.len() == PLUS_BATCH || entry.next_cookie > end {
                return false;
            }
            entries.push(Name { id: entry.id, name: entry.name.to_vec(), cookie: entry.next_cookie });
            true
        })?;
        Ok(entries)
    }

    /// Fills a readdirplus answer. Returns an error only if the answer is still empty.
    pub(super) fn fill_plus(&self, node: u64, mut cookie: u64, reply: &mut Reply<'_>) -> Result<()> {
        let dir = self.id(node)?;
        let end = self.dir_end(dir, node, cookie)?;
        let mut filled = false;
        loop {
            let entries = match self.some_entries(dir, cookie, end) {
                Ok(entries) => entries,
                Err(_) if filled => return Ok(()),
                Err(error) => return Err(error),
            };
            let last_batch = entries.len() < PLUS_BATCH;
            for entry in &entries {
                // The kernel takes no reference for "." and "..".
                let is_dot = entry.name == b"." || entry.name == b"..";
                let found = if is_dot { self.fs.getattr(entry.id) } else { self.fs.getattr_counted(entry.id) };
                let attr = match found {
                    Ok(attr) => attr,
                    // The name was removed after the batch was fetched.
                    Err(Error::NotFound) => {
                        cookie = entry.cookie;
                        continue;
                    }
                    Err(_) if filled => return Ok(()),
                    Err(error) => return Err(error),
                };
                if !reply.dirent_plus(&self.entry(&attr), entry.cookie, &entry.name) {
                    if !is_dot {
                        self.fs.forget(attr.id, 1);
                    }
                    self.dir_ends.remember(node, cookie, end);
                    return Ok(());
                }
                filled = true;
                cookie = entry.cookie;
            }
            if last_batch {
                // After an answer with entries, the reader continues at `cookie`, so remember where the reader must
                // stop.
                if filled {
                    self.dir_ends.remember(node, cookie, end);
                }
                return Ok(());
            }
        }
    }
}

/// A directory entry whose attributes are not read yet.
struct Name {
    id: InodeId,
    name: Vec<u8>,
    cookie: u64,
}

/// Entries fetched at once for readdirplus.
const PLUS_BATCH: usize = 32;
