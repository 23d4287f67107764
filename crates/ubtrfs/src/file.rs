//! Open files.
//!
//! Invariants:
//! - I1. The inode stays open in the engine until its last [`File`] is dropped, even if its last name is removed.

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use ubtrfs_fs::{Attr, InodeId, NewInode, SeekWhence, SetAttr};

use crate::Filesystem;
use crate::error::{Error, Result, ResultExt};
use crate::metadata::Metadata;
use crate::path::{self, Follow};

/// The options for opening a file, like [`std::fs::OpenOptions`].
///
/// ```
/// use std::io::Write;
/// use ubtrfs::OpenOptions;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// let mut log = fs.open_with("/log", OpenOptions::new().append(true).create(true))?;
/// log.write_all(b"started\n")?;
/// let error = fs.open_with("/log", OpenOptions::new().write(true).create_new(true)).unwrap_err();
/// assert_eq!(error.kind(), std::io::ErrorKind::AlreadyExists);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    read: bool,
    write: bool,
    append: bool,
    truncate: bool,
    create: bool,
    create_new: bool,
}

impl OpenOptions {
    /// Makes options that allow nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Allows reading.
    pub fn read(&mut self, read: bool) -> &mut Self {
        self.read = read;
        self
    }

    /// Allows writing.
    pub fn write(&mut self, write: bool) -> &mut Self {
        self.write = write;
        self
    }

    /// Allows writing at the file's end. Concurrent appends through this filesystem do not overwrite each other.
    pub fn append(&mut self, append: bool) -> &mut Self {
        self.append = append;
        self
    }

    /// Truncates the file to length 0.
    pub fn truncate(&mut self, truncate: bool) -> &mut Self {
        self.truncate = truncate;
        self
    }

    /// Makes the file if it does not exist. A new file's permissions are 0666 without the bits of the caller's umask,
    /// but 0644 for the default caller, which has no umask.
    pub fn create(&mut self, create: bool) -> &mut Self {
        self.create = create;
        self
    }

    /// Makes the file, and fails if the name exists, even as a symbolic link.
    pub fn create_new(&mut self, create_new: bool) -> &mut Self {
        self.create_new = create_new;
        self
    }
}

/// An open file, which is closed on drop.
///
/// ```
/// use std::io::{Read, Seek, SeekFrom, Write};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
/// let mut file = fs.open_with("/log", ubtrfs::OpenOptions::new().read(true).write(true).create(true))?;
/// file.write_all(b"one two")?;
/// file.seek(SeekFrom::Start(4))?;
/// let mut word = String::new();
/// file.read_to_string(&mut word)?;
/// assert_eq!(word, "two");
/// // Durable on return, without a commit of the whole filesystem.
/// file.sync_all()?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct File {
    fs: Filesystem,
    path: PathBuf,
    id: InodeId,
    at: u64,
    options: OpenOptions,
}

impl File {
    pub(crate) fn open(fs: &Filesystem, path: &Path, options: &OpenOptions) -> Result<Self> {
        let changes = options.write || options.append;
        if !options.read && !changes {
            let cause = ubtrfs_fs::Error::InvalidArgument("the options allow neither reading nor writing");
            return Err(Error::new("open", path, cause));
        }
        if (options.create || options.create_new || options.truncate) && !changes {
            let cause = ubtrfs_fs::Error::InvalidArgument("create and truncate need write or append");
            return Err(Error::new("open", path, cause));
        }
        let attr = Self::find_or_make(fs, path, options)?;
        if attr.is_dir() {
            return Err(Error::new("open", path, ubtrfs_fs::Error::IsDirectory));
        }
        if !Metadata::new(attr.clone()).is_file() {
            return Err(Error::new("open", path, ubtrfs_fs::Error::InvalidArgument("not a regular file")));
        }
        fs.engine().open_inode(attr.id).while_doing("open", path)?;
        let file = Self { fs: fs.clone(), path: path.to_owned(), id: attr.id, at: 0, options: *options };
        if changes {
            fs.engine().check_writable(attr.id).while_doing("open", path)?;
        }
        if options.truncate && attr.size > 0 {
            file.set_len(0)?;
        }
        Ok(file)
    }

    fn find_or_make(fs: &Filesystem, path: &Path, options: &OpenOptions) -> Result<Attr> {
        let make = || {
            let permissions = if fs.caller().umask == 0 && fs.caller().is_privileged() { 0o644 } else { 0o666 };
            fs.make("create", path, NewInode::file(permissions))
        };
        if options.create_new {
            return make();
        }
        match path::resolve(fs.engine(), path, Follow::Yes) {
            Err(ubtrfs_fs::Error::NotFound) if options.create => match make() {
                // Another thread made the file first.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => fs.resolve("open", path, Follow::Yes),
                made => made,
            },
            found => found.while_doing("open", path),
        }
    }

    pub(crate) fn id(&self) -> InodeId {
        self.id
    }

    /// Reads at `offset` (in bytes) without moving the file's position. Returns the number of bytes, which is less than
    /// `buf.len()` only at the end of the file.
    ///
    /// # Errors
    /// Data whose checksum is wrong in all copies; errors of the device; EBADF if the file is not open for reading.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.check("read", self.options.read)?;
        self.fs.engine().read_into(self.id, offset, buf).while_doing("read", &self.path)
    }

    /// Writes all of `data` at `offset` (in bytes) without moving the file's position.
    ///
    /// # Errors
    /// `StorageFull`; `FileTooLarge`; `ReadOnlyFilesystem`; EBADF if the file is not open for writing.
    pub fn write_all_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.check("write", self.options.write || self.options.append)?;
        self.fs.engine().write_all(self.id, offset, data).while_doing("write", &self.path)
    }

    /// Reads the whole content, from the start.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at); `OutOfMemory` if memory cannot hold the content.
    pub fn read_all(&self) -> Result<Vec<u8>> {
        const STEP: usize = 1 << 20;
        let mut content = Vec::new();
        loop {
            let done = content.len();
            // The size on disk is not trusted, so the buffer grows with the content.
            content.try_reserve(STEP).map_err(|_full| {
                Error::new("read", &self.path, io::Error::from_raw_os_error(rustix::io::Errno::NOMEM.raw_os_error()))
            })?;
            content.resize(done + STEP, 0);
            let count = self.read_at(done as u64, &mut content[done..])?;
            content.truncate(done + count);
            if count < STEP {
                return Ok(content);
            }
        }
    }

    /// Returns the file's attributes.
    ///
    /// # Errors
    /// Damage of the inode.
    pub fn metadata(&self) -> Result<Metadata> {
        self.fs.engine().getattr(self.id).map(Metadata::new).while_doing("stat", &self.path)
    }

    /// Truncates the file to `len_bytes`, or extends it by a hole.
    ///
    /// # Errors
    /// `FileTooLarge`; `ReadOnlyFilesystem`; EBADF if the file is not open for writing.
    pub fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.check("set length of", self.options.write || self.options.append)?;
        let set = SetAttr { size: Some(len_bytes), ..SetAttr::default() };
        self.fs.engine().setattr(self.id, &set, &self.fs.caller()).map(drop).while_doing("set length of", &self.path)
    }

    /// Makes the file's content and attributes durable, and for a new file also its names.
    ///
    /// # Errors
    /// A failure to write data since the last call; errors of the device.
    pub fn sync_all(&self) -> Result<()> {
        self.fs.engine().fsync(self.id, false).while_doing("sync", &self.path)
    }

    /// Returns the start and end (in bytes) of the next range of data at or after `offset`, or `None` if only a hole
    /// follows.
    ///
    /// # Errors
    /// Damage of the file's extents.
    pub fn next_data(&self, offset: u64) -> Result<Option<(u64, u64)>> {
        let seek = |offset, whence| match self.fs.engine().seek(self.id, offset, whence) {
            Err(ubtrfs_fs::Error::NoSuchOffset) => Ok(None),
            found => found.map(Some).while_doing("seek in", &self.path),
        };
        let Some(start) = seek(offset, SeekWhence::Data)? else { return Ok(None) };
        Ok(seek(start, SeekWhence::Hole)?.map(|end| (start, end)))
    }

    fn check(&self, operation: &'static str, allowed: bool) -> Result<()> {
        if allowed {
            return Ok(());
        }
        let badf = io::Error::from_raw_os_error(rustix::io::Errno::BADF.raw_os_error());
        Err(Error::new(operation, &self.path, badf))
    }

    /// The file's size, for positions relative to its end.
    fn size(&self) -> Result<u64> {
        self.metadata().map(|metadata| metadata.len())
    }
}

impl Drop for File {
    fn drop(&mut self) {
        self.fs.engine().release_inode(self.id);
    }
}

impl Read for File {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.read_at(self.at, buf)?;
        self.at = self.at.saturating_add(count as u64);
        Ok(count)
    }
}

impl Write for File {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if self.options.append {
            let fs = self.fs.clone();
            let _end = fs.append_lock().lock();
            self.at = self.size()?;
            self.write_all_at(self.at, buf)?;
        } else {
            self.write_all_at(self.at, buf)?;
        }
        self.at = self.at.saturating_add(buf.len() as u64);
        Ok(buf.len())
    }

    /// Does nothing, because written data is already in the filesystem. [`File::sync_all`] makes written data durable.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for File {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let moved = match to {
            SeekFrom::Start(offset) => Some(offset),
            SeekFrom::End(by) => self.size()?.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = moved.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}
