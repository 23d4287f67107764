//! Answers to the kernel: structs and data, written directly into the buffer that is sent.

use std::time::Duration;

use zerocopy::{FromZeros, Immutable, IntoBytes};

use super::wire::{AttrOut, Dirent, EntryOut, FuseAttr, IoctlOut, OpenOut, Statfs, StatxOut, StatxTime, Time};

/// The body of an answer.
///
/// - A1. Data that does not fit is not written. Once any data did not fit, [`is_whole`](Self::is_whole) returns false,
///   and the kernel gets an error.
#[derive(Debug)]
pub struct Reply<'a> {
    buf: &'a mut [u8],
    len: usize,
    overflowed: bool,
}

/// The answer to a lookup or creation: the inode that a name leads to, or [none](Self::none).
#[derive(Clone, Copy, Debug, Default)]
pub struct EntryReply {
    /// Node id; 0 for a name that does not exist.
    pub node: u64,
    /// Distinguishes inodes that have the same node id at different times.
    pub generation: u64,
    /// Attributes.
    pub attr: FuseAttr,
    /// How long the kernel may cache the name.
    pub ttl: Duration,
    /// How long the kernel may cache the attributes.
    pub attr_ttl: Duration,
}

/// The attributes that only statx(2) shows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Statx {
    /// When the file was created.
    pub btime: Time,
    /// Flags that are set (`STATX_ATTR_*`).
    pub attributes: u64,
    /// Flags that this filesystem supports (`STATX_ATTR_*`).
    pub attributes_mask: u64,
}

impl EntryReply {
    /// The answer to a lookup of a name that does not exist. The kernel may cache the answer for `ttl`.
    pub fn none(ttl: Duration) -> Self {
        Self { ttl, ..Self::default() }
    }

    /// An entry of a listing that has only a name, an inode number and a type (`DT_REG` ...). The kernel takes no
    /// reference to its inode.
    pub fn without_attributes(ino: u64, kind: u32) -> Self {
        Self { attr: FuseAttr { ino, mode: kind << 12, ..FuseAttr::default() }, ..Self::default() }
    }

    fn wire(&self) -> EntryOut {
        EntryOut {
            node: self.node,
            generation: self.generation,
            entry_valid: self.ttl.as_secs(),
            attr_valid: self.attr_ttl.as_secs(),
            entry_valid_nsec: self.ttl.subsec_nanos(),
            attr_valid_nsec: self.attr_ttl.subsec_nanos(),
            attr: self.attr,
        }
    }
}

impl<'a> Reply<'a> {
    pub(crate) fn new(buf: &'a mut [u8]) -> Self {
        Self { buf, len: 0, overflowed: false }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether all data fit into the answer (A1).
    pub(crate) fn is_whole(&self) -> bool {
        !self.overflowed
    }

    /// Appends bytes.
    pub fn data(&mut self, bytes: &[u8]) {
        match self.buf.get_mut(self.len..self.len + bytes.len()) {
            Some(room) => {
                room.copy_from_slice(bytes);
                self.len += bytes.len();
            }
            None => self.overflowed = true,
        }
    }

    /// Lets `fill` write up to `size` bytes into the buffer; `fill` returns the number of bytes written.
    pub fn fill<E>(&mut self, size: usize, fill: impl FnOnce(&mut [u8]) -> Result<usize, E>) -> Result<(), E> {
        let end = self.buf.len().min(self.len.saturating_add(size));
        let room = self.buf.get_mut(self.len..end).unwrap_or_default();
        let room_len = room.len();
        self.len += fill(room)?.min(room_len);
        Ok(())
    }

    fn put<T: IntoBytes + Immutable>(&mut self, value: &T) {
        self.data(value.as_bytes());
    }

    /// Writes an entry.
    pub fn entry(&mut self, entry: &EntryReply) {
        self.put(&entry.wire());
    }

    /// Writes the entry of a file that was created and opened in one request.
    pub fn created(&mut self, entry: &EntryReply, handle: u64, open_flags: u32) {
        self.entry(entry);
        self.opened(handle, open_flags);
    }

    /// Writes the handle of an opened file, which later requests carry.
    pub fn opened(&mut self, handle: u64, open_flags: u32) {
        self.put(&OpenOut { fh: handle, flags: open_flags, backing_id: 0 });
    }

    /// Writes attributes, and how long the kernel may cache them.
    pub fn attr(&mut self, ttl: Duration, attr: &FuseAttr) {
        self.put(&AttrOut { valid: ttl.as_secs(), valid_nsec: ttl.subsec_nanos(), padding: 0, attr: *attr });
    }

    /// Writes attributes, including the attributes that only statx(2) shows, and how long the kernel may cache them.
    pub fn statx(&mut self, ttl: Duration, attr: &FuseAttr, more: Statx) {
        let time = |sec, nsec| StatxTime { sec, nsec, reserved: 0 };
        self.put(&StatxOut {
            valid: ttl.as_secs(),
            valid_nsec: ttl.subsec_nanos(),
            mask: STATX_BASIC_STATS | STATX_BTIME,
            blksize: attr.blksize,
            attributes: more.attributes,
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            mode: attr.mode as u16,
            ino: attr.ino,
            size: attr.size,
            blocks: attr.blocks,
            attributes_mask: more.attributes_mask,
            atime: time(attr.atime, attr.atimensec),
            btime: more.btime.into(),
            ctime: time(attr.ctime, attr.ctimensec),
            mtime: time(attr.mtime, attr.mtimensec),
            // The major and the minor number, taken from the bits of `FuseAttr::rdev`.
            rdev: [attr.rdev >> 8 & 0xfff, attr.rdev & 0xff | attr.rdev >> 12 & 0xf_ff00],
            ..StatxOut::default()
        });
    }

    /// Writes the number of bytes copied, in 64 bits.
    pub fn copied(&mut self, len: u64) {
        self.put(&len);
    }

    /// Writes the number of bytes written or copied, in 32 bits.
    pub fn written(&mut self, len: u32) {
        self.put(&[len, 0]);
    }

    /// Writes an offset.
    pub fn offset(&mut self, offset: u64) {
        self.put(&offset);
    }

    /// Writes the length of an extended attribute, or of the list of attributes.
    pub fn xattr_size(&mut self, len: u32) {
        self.put(&[len, 0]);
    }

    /// Writes the space and inodes of the filesystem.
    pub fn statfs(&mut self, statfs: &Statfs) {
        self.put(statfs);
    }

    /// Writes the result of an ioctl.
    pub fn ioctl(&mut self, data: &[u8]) {
        self.ioctl_result(0, data);
    }

    /// Writes the result of an ioctl, which may be a negative error number, with data.
    pub fn ioctl_result(&mut self, result: i32, data: &[u8]) {
        self.put(&IoctlOut { result, flags: 0, in_iovs: 0, out_iovs: 0 });
        self.data(data);
    }

    /// Limits the answer to `size` bytes, as the request demands.
    pub fn limit(&mut self, size: u32) {
        let buf = std::mem::take(&mut self.buf);
        let end = buf.len().min(size as usize);
        self.buf = &mut buf[..end];
    }

    /// Appends a directory entry; `kind` is the file type part of a mode (`DT_REG` and the like). Returns whether the
    /// entry fit.
    pub fn dirent(&mut self, ino: u64, cookie: u64, kind: u32, name: &[u8]) -> bool {
        self.dirent_behind(&[], ino, cookie, kind, name)
    }

    /// Appends a directory entry together with the answer to a lookup of the entry. Returns whether both fit.
    pub fn dirent_plus(&mut self, entry: &EntryReply, cookie: u64, name: &[u8]) -> bool {
        self.dirent_behind(entry.wire().as_bytes(), entry.attr.ino, cookie, entry.attr.mode >> 12 & 15, name)
    }

    fn dirent_behind(&mut self, before: &[u8], ino: u64, cookie: u64, kind: u32, name: &[u8]) -> bool {
        let Ok(name_len) = u32::try_from(name.len()) else { return false };
        let end = self.len + (before.len() + size_of::<Dirent>() + name.len()).next_multiple_of(8);
        if end > self.buf.len() {
            return false;
        }
        self.data(before);
        self.put(&Dirent { ino, cookie, name_len, kind });
        self.data(name);
        self.buf[self.len..end].zero();
        self.len = end;
        true
    }
}

const STATX_BASIC_STATS: u32 = 0x7ff;
const STATX_BTIME: u32 = 0x800;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fill_a_buffer_and_no_more() {
        let mut buf = [0xff; 100];
        let mut reply = Reply::new(&mut buf);
        reply.limit(96);
        assert!(reply.dirent(256, 1, 4, b".") && reply.dirent(257, 2, 8, b"12345678"));
        assert_eq!(reply.len(), 64);
        assert!(!reply.dirent(258, 3, 8, b"123456789"), "32 bytes are left, 33 needed");
        assert!(reply.dirent(258, 3, 8, b"x"));
        assert!(reply.is_whole() && reply.len() == 96);
        assert_eq!(buf[24..32], [b'.', 0, 0, 0, 0, 0, 0, 0], "padded with zeros");
    }

    #[test]
    fn a_reply_that_does_not_fit_is_not_whole() {
        let mut buf = [0; 20];
        let mut reply = Reply::new(&mut buf);
        reply.written(7);
        reply.statfs(&Statfs::default());
        assert!(!reply.is_whole() && reply.len() == 8);
        let mut reply = Reply::new(&mut buf);
        reply.fill(100, |room| Ok::<_, ()>(room.len() + 1)).unwrap();
        assert_eq!(reply.len(), 20);
    }
}
