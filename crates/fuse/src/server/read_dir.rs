//! READDIR and READDIRPLUS: fills answers with the entries of a directory.

use ubtrfs_format::item::FileType;
use ubtrfs_fs::{DirEntryOut, InodeId, Result};

use super::Server;
use crate::attr::entry_kind;
use crate::protocol::{EntryReply, FuseRequest, Reply};

impl Server {
    pub(super) fn readdir(&self, node: u64, offset: u64, reply: &mut Reply<'_>) -> Result<()> {
        let dir = self.id(node)?;
        let end = self.dir_end(dir, node, offset)?;
        let mut cookie = offset;
        self.fs.readdir(dir, offset, &mut |entry| {
            let (ino, kind) = (self.listed_ino(&entry), entry_kind(entry.file_type));
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

    /// The inode number of a listed entry. The root directory of a view lies in itself.
    fn listed_ino(&self, entry: &DirEntryOut<'_>) -> u64 {
        match entry.name == b".." && self.is_stub(entry.id) {
            true => self.nodes.st_ino(self.nodes.root()),
            false => self.nodes.listed_ino(entry.id),
        }
    }

    /// Fills a readdirplus answer. An entry has only its name if the caller does not use attributes
    /// ([`crate::listing`]), or if they cannot be read, because the inode is damaged or was just removed.
    pub(super) fn fill_plus(&self, req: &FuseRequest<'_>, offset: u64, reply: &mut Reply<'_>) -> Result<()> {
        let node = req.node;
        let dir = self.id(node)?;
        let end = self.dir_end(dir, node, offset)?;
        let mut listing = self.listings.begin(req.pid, node, offset);
        let mut cookie = offset;
        let done = self.fs.readdir(dir, offset, &mut |entry| {
            if entry.next_cookie > end {
                return false;
            }
            // The kernel takes no reference for "." and "..".
            let is_dot = entry.name == b"." || entry.name == b"..";
            let found = match () {
                () if is_dot && !self.is_stub(entry.id) => Some(self.fs.getattr(entry.id)),
                () if self.is_stub(entry.id) => None,
                () if listing.leaves_out(entry.file_type == FileType::Directory) => None,
                () => Some(self.fs.getattr_counted(entry.id)),
            };
            let plus = match &found {
                Some(Ok(attr)) => self.entry(attr),
                Some(Err(_)) | None => {
                    EntryReply::without_attributes(self.listed_ino(&entry), entry_kind(entry.file_type))
                }
            };
            if let Some(Err(error)) = &found {
                tracing::debug!("a listing has no attributes of inode {}: {error}", entry.id.ino);
            }
            if !reply.dirent_plus(&plus, entry.next_cookie, entry.name) {
                if matches!(found, Some(Ok(_))) && !is_dot {
                    self.fs.forget(entry.id, 1);
                }
                return false;
            }
            cookie = entry.next_cookie;
            true
        });
        self.listings.end(&listing);
        // After an answer with entries, the reader continues at `cookie`, so remember where the reader must stop.
        if cookie != offset {
            self.dir_ends.remember(node, cookie, end);
            return Ok(());
        }
        done
    }
}
