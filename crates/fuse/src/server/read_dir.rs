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

    /// Fills a readdirplus answer. Returns an error only if the answer is still empty.
    pub(super) fn fill_plus(&self, node: u64, offset: u64, reply: &mut Reply<'_>) -> Result<()> {
        let dir = self.id(node)?;
        let end = self.dir_end(dir, node, offset)?;
        let (mut cookie, mut filled, mut failure) = (offset, false, None);
        let done = self.fs.readdir(dir, offset, &mut |entry| {
            if entry.next_cookie > end {
                return false;
            }
            // The kernel takes no reference for "." and "..".
            let is_dot = entry.name == b"." || entry.name == b"..";
            let found = if is_dot { self.fs.getattr(entry.id) } else { self.fs.getattr_counted(entry.id) };
            match found {
                Ok(attr) if reply.dirent_plus(&self.entry(&attr), entry.next_cookie, entry.name) => filled = true,
                Ok(attr) => {
                    if !is_dot {
                        self.fs.forget(attr.id, 1);
                    }
                    return false;
                }
                // The name was removed after it was read.
                Err(Error::NotFound) => {}
                Err(error) => {
                    failure = Some(error);
                    return false;
                }
            }
            cookie = entry.next_cookie;
            true
        });
        match done.err().or(failure) {
            Some(error) if !filled => return Err(error),
            // After an answer with entries, the reader continues at `cookie`, so remember where the reader must stop.
            _ if filled => self.dir_ends.remember(node, cookie, end),
            _ => {}
        }
        Ok(())
    }
}
