//! Open files.
//!
//! Invariants:
//! - I1. The inode stays open in the engine until its last [`File`] is dropped, even if its last name is removed.

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use ubtrfs_fs::{Attr, FileExtentInfo, InodeId, NewInode, SeekWhence, SetAttr};

use crate::Filesystem;
use crate::error::{Error, Result, ResultExt};
use crate::metadata::{FileTimes, Metadata};
use crate::path::{self, Follow};

/// The options for opening a file, like [`std::fs::OpenOptions`].
///
/// ```
/// use std::io::{Read, Write};
/// use ubtrfs::OpenOptions;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// let mut log = fs.open_with("/log", OpenOptions::new().append(true).create(true).mode(0o600))?;
/// log.write_all(b"started\n")?;
/// assert_eq!(fs.metadata("/log")?.permissions(), 0o600);
///
/// let error = fs.open_with("/log", OpenOptions::new().write(true).create_new(true)).unwrap_err();
/// assert_eq!(error.kind(), std::io::ErrorKind::AlreadyExists);
///
/// let mut log = fs.open_with("/log", OpenOptions::new().read(true).write(true).truncate(true))?;
/// assert_eq!(log.read(&mut [0; 10])?, 0);
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
    mode: Option<u32>,
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

    /// Makes the file if it does not exist. Without [`mode`](Self::mode), a new file's permissions are 0666 without the
    /// bits of the caller's umask, but 0644 for the default caller, which has no umask.
    pub fn create(&mut self, create: bool) -> &mut Self {
        self.create = create;
        self
    }

    /// Makes the file, and fails if the name exists, even as a symbolic link.
    pub fn create_new(&mut self, create_new: bool) -> &mut Self {
        self.create_new = create_new;
        self
    }

    /// Sets the permissions of a new file (12 bits), from which the bits of the caller's umask are removed.
    pub fn mode(&mut self, mode: u32) -> &mut Self {
        self.mode = Some(mode);
        self
    }
}

/// An open file, which is closed on drop.
///
/// ```
/// use std::io::{Read, Seek, SeekFrom, Write};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
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
            let mode = options.mode.unwrap_or_else(|| fs.default_permissions(0o666));
            fs.make("create", path, NewInode::file(mode))
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

    pub(crate) fn filesystem(&self) -> &Filesystem {
        &self.fs
    }

    /// The path that was given to open, for errors.
    pub(crate) fn name(&self) -> &Path {
        &self.path
    }

    /// Reads at `offset` (in bytes) without moving the file's position. Returns the number of bytes, which is less than
    /// `buf.len()` only at the end of the file.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/f", "one two")?;
    /// let mut word = [0; 3];
    /// assert_eq!(fs.open("/f")?.read_at(4, &mut word)?, 3);
    /// assert_eq!(&word, b"two");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Data whose checksum is wrong in all copies; errors of the device; EBADF if the file is not open for reading.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.check("read", self.options.read)?;
        self.fs.engine().read_into(self.id, offset, buf).while_doing("read", &self.path)
    }

    /// Writes all of `data` at `offset` (in bytes) without moving the file's position.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// let file = fs.create("/f")?;
    /// file.write_all_at(1 << 20, b"after a hole of 1 MiB")?;
    /// assert_eq!(file.metadata()?.len(), (1 << 20) + 21);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `StorageFull`; `FileTooLarge`; `ReadOnlyFilesystem`; EBADF if the file is not open for writing.
    pub fn write_all_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.check("write", self.options.write || self.options.append)?;
        self.fs.engine().write_all(self.id, offset, data).while_doing("write", &self.path)
    }

    /// Reads the whole content, from the start.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/f", "text")?;
    /// assert_eq!(fs.open("/f")?.read_all()?, b"text");
    /// # Ok(()) }
    /// ```
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
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// let file = fs.create("/f")?;
    /// fs.remove_file("/f")?;
    /// // The open file has no name any more.
    /// assert_eq!(file.metadata()?.nlink(), 0);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Damage of the inode.
    pub fn metadata(&self) -> Result<Metadata> {
        self.fs.engine().getattr(self.id).map(Metadata::new).while_doing("stat", &self.path)
    }

    /// Truncates the file to `len_bytes`, or extends it by a hole.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// let file = fs.create("/f")?;
    /// file.write_all_at(0, b"0123456789")?;
    /// file.set_len(3)?;
    /// assert_eq!(fs.read("/f")?, b"012");
    /// # Ok(()) }
    /// ```
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
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// let file = fs.create("/f")?;
    /// file.write_all_at(0, b"durable after the next line")?;
    /// file.sync_all()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// A failure to write data since the last call; errors of the device.
    pub fn sync_all(&self) -> Result<()> {
        self.fs.engine().fsync(self.id, false).while_doing("sync", &self.path)
    }

    /// Makes the file's content durable, and those attributes that reading the content needs, such as its length.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// let file = fs.create("/f")?;
    /// file.write_all_at(0, b"durable after the next line")?;
    /// file.sync_data()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`sync_all`](Self::sync_all).
    pub fn sync_data(&self) -> Result<()> {
        self.fs.engine().fsync(self.id, true).while_doing("sync", &self.path)
    }

    /// Sets the permission bits, with set-user-id, set-group-id and sticky bit (12 bits).
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// let file = fs.create("/tool")?;
    /// file.set_permissions(0o755)?;
    /// assert_eq!(fs.metadata("/tool")?.permissions(), 0o755);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `ReadOnlyFilesystem`; `StorageFull`.
    pub fn set_permissions(&self, permissions: u32) -> Result<()> {
        self.set_attributes("change mode of", &SetAttr { mode: Some(permissions), ..SetAttr::default() })
    }

    /// Sets the owner and group; `None` leaves one of them unchanged. As on Linux, a change of owner can clear the
    /// set-user-id and set-group-id bits, so set permissions afterwards.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// let file = fs.create("/f")?;
    /// file.set_owner(1000, None)?;
    /// assert_eq!((file.metadata()?.uid(), file.metadata()?.gid()), (1000, 0));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `ReadOnlyFilesystem`; `StorageFull`.
    pub fn set_owner(&self, uid: impl Into<Option<u32>>, gid: impl Into<Option<u32>>) -> Result<()> {
        self.set_attributes("change owner of", &SetAttr { uid: uid.into(), gid: gid.into(), ..SetAttr::default() })
    }

    /// Sets times of the file. Times that `times` lacks stay unchanged.
    ///
    /// ```
    /// use std::time::SystemTime;
    /// use ubtrfs::FileTimes;
    ///
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// let file = fs.create("/f")?;
    /// file.set_times(FileTimes::new().set_modified(SystemTime::UNIX_EPOCH))?;
    /// assert_eq!(file.metadata()?.modified(), Some(SystemTime::UNIX_EPOCH));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `ReadOnlyFilesystem`; `StorageFull`.
    pub fn set_times(&self, times: FileTimes) -> Result<()> {
        self.set_attributes("change times of", &times.attributes())
    }

    fn set_attributes(&self, operation: &'static str, set: &SetAttr) -> Result<()> {
        self.fs.engine().setattr(self.id, set, &self.fs.caller()).map(drop).while_doing(operation, &self.path)
    }

    /// Returns the start and end (in bytes) of the next range of data at or after `offset`, or `None` if only a hole
    /// follows.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// let file = fs.open_with("/f", ubtrfs::OpenOptions::new().read(true).write(true).create(true))?;
    /// file.write_all_at(1 << 20, &[1; 4096])?;
    /// assert_eq!(file.next_data(0)?, Some((1 << 20, (1 << 20) + 4096)));
    /// assert_eq!(file.next_data((1 << 20) + 4096)?, None);
    /// # Ok(()) }
    /// ```
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

    /// Returns the extents of the file and where they are, as `filefrag -v` shows them: first those of the last commit,
    /// in the order of the file, and then data that is not written yet. Holes are listed only if the filesystem stores
    /// them.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/f", vec![1; 1 << 20])?;
    /// fs.sync()?;
    /// fs.reflink("/f", "/copy")?;
    /// // Copies without data have the same places.
    /// let places = |path: &str| -> ubtrfs::Result<Vec<_>> {
    ///     Ok(fs.open(path)?.extents()?.iter().map(|extent| extent.disk_bytenr).collect())
    /// };
    /// assert_eq!(places("/f")?, places("/copy")?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Damage of the file's extents; `InvalidInput` for a directory.
    pub fn extents(&self) -> Result<Vec<FileExtentInfo>> {
        self.fs.engine().extents(self.id).while_doing("list the extents of", &self.path)
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
