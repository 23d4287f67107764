//! [`Filesystem`]: making, opening, names, attributes, space, closing.
//!
//! Invariants:
//! - I1. The engine is closed by [`Filesystem::close`], or when the last handle, file or directory reader is dropped.
//!   The engine of a mounted filesystem is closed by the mount's session.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use ubtrfs_device::{Access, Device, FileDevice, MemoryDevice};
use ubtrfs_fs::{Attr, Caller, Fs, InodeId, MountOptions, NewInode, RenameFlags, SetAttr, SetTime, XattrFlags};
use ubtrfs_mkfs::{MkfsOptions, MkfsReport};

use crate::dir::ReadDir;
use crate::error::{Error, Result, ResultExt};
use crate::file::{File, OpenOptions};
use crate::metadata::Metadata;
use crate::path::{self, Follow};

/// A btrfs filesystem that is open in this process.
///
/// A clone is another handle of the filesystem. All methods can be called from any thread.
///
/// ```
/// use ubtrfs::{Filesystem, MountOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let scratch = tempfile::tempdir()?;
/// # let image = scratch.path().join("disk.img");
/// let fs = Filesystem::make_image(&image, 256 << 20)?;
/// fs.create_dir_all("/etc/app")?;
/// fs.write("/etc/app/config", "color = blue\n")?;
/// fs.close()?;
///
/// let options = MountOptions { read_only: true, ..MountOptions::default() };
/// let fs = Filesystem::open_image_with(&image, options)?;
/// assert_eq!(fs.read("/etc/app/config")?, b"color = blue\n");
/// # fs.close()?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Filesystem {
    shared: Arc<Shared>,
    caller: Caller,
}

struct Shared {
    fs: Arc<Fs>,
    /// The name of the first device, for errors.
    device: PathBuf,
    /// This lock is held while an append finds the file's end and writes there, so that concurrent appends do not
    /// overwrite each other.
    append: Mutex<()>,
    /// Whether a mount's session closes the engine (I1).
    #[cfg(feature = "fuse")]
    mounted: std::sync::atomic::AtomicBool,
}

impl Shared {
    #[cfg(feature = "fuse")]
    fn is_mounted(&self) -> bool {
        self.mounted.load(std::sync::atomic::Ordering::Acquire)
    }

    #[cfg(not(feature = "fuse"))]
    fn is_mounted(&self) -> bool {
        false
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.is_mounted() {
            // A drop cannot report an error. Callers that need the error call `Filesystem::close`.
            let _ = self.fs.close();
        }
    }
}

impl fmt::Debug for Filesystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Filesystem").field("device", &self.shared.device).field("caller", &self.caller).finish()
    }
}

/// The space of a filesystem, as `df` shows it.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// let usage = fs.usage()?;
/// assert!(usage.free_bytes < usage.total_bytes);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Size of the devices in bytes, divided by the number of copies of data.
    pub total_bytes: u64,
    /// Bytes that are free.
    pub free_bytes: u64,
    /// Bytes that are available for data.
    pub available_bytes: u64,
}

/// Making and opening.
impl Filesystem {
    /// Makes a new, sparse image file of `size_bytes` with an empty filesystem, and opens it.
    ///
    /// # Errors
    /// `AlreadyExists` if the file exists; `InvalidInput` if the size is too small for btrfs (about 109 MiB).
    pub fn make_image(path: impl AsRef<Path>, size_bytes: u64) -> Result<Self> {
        let path = path.as_ref();
        let device: Arc<dyn Device> = Arc::new(FileDevice::create(path, size_bytes, true).while_doing("make", path)?);
        let made = Self::make_on(device.as_ref(), &MkfsOptions::default())
            .and_then(|_report| Self::open_devices(vec![device], MountOptions::default()));
        if made.is_err() {
            // Remove the useless file. This call made the file: an existing file would have been an error. Errors of
            // the removal are ignored.
            let _ = std::fs::remove_file(path);
        }
        made
    }

    /// Makes a filesystem in memory, which disappears when the last handle is dropped. A filesystem in memory is meant
    /// for tests. Memory is allocated as the filesystem is written to.
    ///
    /// # Errors
    /// `InvalidInput` if the size is too small for btrfs (about 109 MiB).
    pub fn make_in_memory(size_bytes: u64) -> Result<Self> {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(size_bytes));
        Self::make_on(device.as_ref(), &MkfsOptions::default())?;
        Self::open_devices(vec![device], MountOptions::default())
    }

    /// Makes an empty filesystem on a device, without opening it.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use ubtrfs::{CsumType, Device, Filesystem, MemoryDevice, MkfsOptions, MountOptions};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(256 << 20));
    /// let options = MkfsOptions { label: b"backup".to_vec(), csum_type: CsumType::Xxhash, ..MkfsOptions::default() };
    /// Filesystem::make_on(device.as_ref(), &options)?;
    /// let fs = Filesystem::open_devices(vec![device], MountOptions::default())?;
    /// assert_eq!(fs.label(), b"backup");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` if the options contradict each other, the device is too small, or it contains a filesystem and
    /// [`MkfsOptions::force`] is not set; errors of the device.
    pub fn make_on(device: &dyn Device, options: &MkfsOptions) -> Result<MkfsReport> {
        ubtrfs_mkfs::make(device, options).while_doing("make a filesystem on", &PathBuf::from(device.describe()))
    }

    /// Opens an image file or a block device for reading and writing.
    ///
    /// # Errors
    /// `NotFound`; `ResourceBusy` if another process has the device open or the kernel has mounted it; damage.
    pub fn open_image(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_image_with(path, MountOptions::default())
    }

    /// Opens an image file or a block device with mount options. [`MountOptions::read_only`] opens the filesystem for
    /// reading only.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let scratch = tempfile::tempdir()?;
    /// # let image = scratch.path().join("disk.img");
    /// # ubtrfs::Filesystem::make_image(&image, 256 << 20)?.close()?;
    /// let options = ubtrfs::MountOptions::parse("compress=zstd:3,noatime")?;
    /// let fs = ubtrfs::Filesystem::open_image_with(&image, options)?;
    /// # fs.close()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`open_image`](Self::open_image); `InvalidInput` if the options name a subvolume that does not exist.
    pub fn open_image_with(path: impl AsRef<Path>, options: MountOptions) -> Result<Self> {
        let path = path.as_ref();
        let access = if options.read_only { Access::ReadOnly } else { Access::ReadWrite };
        let device = FileDevice::open(path, access).while_doing("open", path)?;
        Self::open_devices(vec![Arc::new(device)], options)
    }

    /// Opens a filesystem on the given devices: image files, block devices, memory, or the caller's [`Device`].
    ///
    /// The example `own_device` implements a device. As on Linux, several devices can form one filesystem, but such a
    /// filesystem can only be read.
    ///
    /// # Errors
    /// Damage; unknown features; errors of the devices.
    pub fn open_devices(devices: Vec<Arc<dyn Device>>, options: MountOptions) -> Result<Self> {
        let device = PathBuf::from(devices.first().map(|device| device.describe()).unwrap_or_default());
        let fs = Fs::open(devices, options).while_doing("open", &device)?;
        let shared = Shared {
            fs,
            device,
            append: Mutex::default(),
            #[cfg(feature = "fuse")]
            mounted: Default::default(),
        };
        Ok(Self { shared: Arc::new(shared), caller: Caller::ROOT })
    }

    /// Returns a handle whose new files belong to `caller`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// let alice = fs.with_caller(ubtrfs::Caller { uid: 1000, gid: 1000, umask: 0o077 });
    /// alice.write("/notes", "private")?;
    /// let metadata = fs.metadata("/notes")?;
    /// assert_eq!((metadata.uid(), metadata.permissions()), (1000, 0o600));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn with_caller(&self, caller: Caller) -> Self {
        Self { shared: Arc::clone(&self.shared), caller }
    }

    /// The owner, group and umask of new files made through this handle.
    pub fn caller(&self) -> Caller {
        self.caller
    }

    /// Makes all changes so far durable.
    ///
    /// # Errors
    /// A failure to write data; errors of the device. A failed commit makes the filesystem read-only.
    pub fn sync(&self) -> Result<()> {
        self.engine().sync().while_doing("sync", &self.shared.device)
    }

    /// Makes all changes durable and closes the filesystem. Later changes through other handles fail.
    ///
    /// # Errors
    /// As [`sync`](Self::sync).
    pub fn close(self) -> Result<()> {
        self.engine().close().while_doing("close", &self.shared.device)
    }

    /// The reason why the filesystem is read-only, or `None` if it is not.
    pub fn read_only_reason(&self) -> Option<String> {
        self.engine().read_only()
    }

    /// The label, which can be any bytes; empty if there is none.
    pub fn label(&self) -> Vec<u8> {
        self.engine().superblock().label().to_vec()
    }

    /// Returns the total, free and available space.
    ///
    /// # Errors
    /// Damage of the trees that record the space.
    pub fn usage(&self) -> Result<Usage> {
        let stat = self.engine().statfs().while_doing("stat", &self.shared.device)?;
        let bytes = |blocks: u64| blocks.saturating_mul(u64::from(stat.bsize));
        Ok(Usage {
            total_bytes: bytes(stat.blocks),
            free_bytes: bytes(stat.bfree),
            available_bytes: bytes(stat.bavail),
        })
    }

    #[cfg(feature = "fuse")]
    pub(crate) fn leave_closing_to_session(&self) {
        self.shared.mounted.store(true, std::sync::atomic::Ordering::Release);
    }

    pub(crate) fn engine(&self) -> &Arc<Fs> {
        &self.shared.fs
    }

    pub(crate) fn append_lock(&self) -> &Mutex<()> {
        &self.shared.append
    }

    pub(crate) fn resolve(&self, operation: &'static str, path: &Path, follow: Follow) -> Result<Attr> {
        path::resolve(self.engine(), path, follow).while_doing(operation, path)
    }

    pub(crate) fn parent_and_name<'p>(&self, operation: &'static str, path: &'p Path) -> Result<(InodeId, &'p [u8])> {
        path::parent_and_name(self.engine(), path).while_doing(operation, path)
    }

    /// Makes an inode at a path.
    pub(crate) fn make(&self, operation: &'static str, path: &Path, new: NewInode<'_>) -> Result<Attr> {
        let (dir, name) = self.parent_and_name(operation, path)?;
        self.engine().create(dir, name, new, &self.caller).while_doing(operation, path)
    }
}

/// Files and directories by path.
impl Filesystem {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// `NotFound`; `IsADirectory`; `InvalidInput` if the path is not a regular file or a symbolic link to one.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<File> {
        self.open_with(path, OpenOptions::new().read(true))
    }

    /// Makes a file, or truncates an existing one, and opens it for writing.
    ///
    /// # Errors
    /// `NotFound` if the directory does not exist; `IsADirectory`; `ReadOnlyFilesystem`; `StorageFull`.
    pub fn create(&self, path: impl AsRef<Path>) -> Result<File> {
        self.open_with(path, OpenOptions::new().write(true).create(true).truncate(true))
    }

    /// Opens a file with `options`.
    ///
    /// # Errors
    /// As [`open`](Self::open) and [`create`](Self::create).
    pub fn open_with(&self, path: impl AsRef<Path>, options: &OpenOptions) -> Result<File> {
        File::open(self, path.as_ref(), options)
    }

    /// Reads the whole content of a file.
    ///
    /// # Errors
    /// As [`open`](Self::open); data whose checksum is wrong in all copies; `OutOfMemory` if memory cannot hold the
    /// content.
    pub fn read(&self, path: impl AsRef<Path>) -> Result<Vec<u8>> {
        self.open(path)?.read_all()
    }

    /// Replaces the content of a file. Makes the file if it does not exist.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn write(&self, path: impl AsRef<Path>, content: impl AsRef<[u8]>) -> Result<()> {
        self.create(path)?.write_all_at(0, content.as_ref())
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// `AlreadyExists`; `NotFound` if the parent directory does not exist.
    pub fn create_dir(&self, path: impl AsRef<Path>) -> Result<()> {
        self.make("make directory", path.as_ref(), NewInode::dir(0o777)).map(drop)
    }

    /// Makes a directory and its missing parents. Succeeds if the directory exists.
    ///
    /// # Errors
    /// `NotADirectory` if a component of the path is not a directory.
    pub fn create_dir_all(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let mut ancestors: Vec<&Path> = path.ancestors().collect();
        ancestors.reverse();
        for dir in ancestors {
            match path::resolve(self.engine(), dir, Follow::Yes) {
                Ok(attr) if attr.is_dir() => {}
                Ok(_) => return Err(Error::new("make directory", dir, ubtrfs_fs::Error::NotDirectory)),
                Err(ubtrfs_fs::Error::NotFound) => match self.create_dir(dir) {
                    // Another thread made the directory first.
                    Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                    made => made?,
                },
                Err(error) => return Err(Error::new("make directory", dir, error)),
            }
        }
        Ok(())
    }

    /// Lists a directory.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.create_dir_all("/srv/data")?;
    /// fs.write("/srv/readme", "text")?;
    /// for entry in fs.read_dir("/srv")? {
    ///     let entry = entry?;
    ///     println!("{} {} bytes", entry.path().display(), entry.metadata()?.len());
    /// }
    /// # assert_eq!(fs.read_dir("/srv")?.count(), 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `NotADirectory`. The iterator returns errors of reading the entries.
    pub fn read_dir(&self, path: impl AsRef<Path>) -> Result<ReadDir> {
        let path = path.as_ref();
        let attr = self.resolve("list", path, Follow::Yes)?;
        if !attr.is_dir() {
            return Err(Error::new("list", path, ubtrfs_fs::Error::NotDirectory));
        }
        ReadDir::new(self, path, attr.id)
    }

    /// Removes a name that is not a directory: a file, a symbolic link, a device file. The content of an open file
    /// remains until the file is closed.
    ///
    /// # Errors
    /// `NotFound`; `IsADirectory`.
    pub fn remove_file(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let (dir, name) = self.parent_and_name("remove", path)?;
        self.engine().unlink(dir, name).while_doing("remove", path)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// `NotFound`; `NotADirectory`; `DirectoryNotEmpty`.
    pub fn remove_dir(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let (dir, name) = self.parent_and_name("remove directory", path)?;
        self.engine().rmdir(dir, name).while_doing("remove directory", path)
    }

    /// Renames a file or directory, and replaces an existing `to`, like rename(2).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/config", "old")?;
    /// fs.write("/config.new", "new")?;
    /// fs.rename("/config.new", "/config")?;
    /// assert_eq!(fs.read("/config")?, b"new");
    /// assert!(!fs.exists("/config.new"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `DirectoryNotEmpty`; `CrossesDevices` if the new name is in another subvolume.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        let (from, to) = (from.as_ref(), to.as_ref());
        let (dir, name) = self.parent_and_name("rename", from)?;
        let (new_dir, new_name) = self.parent_and_name("rename to", to)?;
        self.engine().rename(dir, name, new_dir, new_name, RenameFlags::empty()).while_doing("rename", from)
    }

    /// Makes another name for a file.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/first", "content")?;
    /// fs.hard_link("/first", "/second")?;
    /// assert_eq!(fs.metadata("/second")?.nlink(), 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `AlreadyExists`; `CrossesDevices` if the new name is in another subvolume; `PermissionDenied` for directories.
    pub fn hard_link(&self, original: impl AsRef<Path>, link: impl AsRef<Path>) -> Result<()> {
        let link = link.as_ref();
        let attr = self.resolve("link to", original.as_ref(), Follow::No)?;
        let (dir, name) = self.parent_and_name("link", link)?;
        self.engine().link(attr.id, dir, name).map(drop).while_doing("link", link)
    }

    /// Makes a symbolic link to `target`, which can be any path, even a path that does not exist.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/data", "text")?;
    /// fs.symlink("data", "/link")?;
    /// assert_eq!(fs.read("/link")?, b"text");
    /// assert_eq!(fs.read_link("/link")?, std::path::Path::new("data"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `AlreadyExists`; `InvalidFilename` if the target is too long.
    pub fn symlink(&self, target: impl AsRef<Path>, link: impl AsRef<Path>) -> Result<()> {
        let target = path::bytes(target.as_ref());
        self.make("make symbolic link", link.as_ref(), NewInode::symlink(target)).map(drop)
    }

    /// Returns the target of a symbolic link.
    ///
    /// # Errors
    /// `InvalidInput` if the path is not a symbolic link.
    pub fn read_link(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        use std::os::unix::ffi::OsStringExt;
        let path = path.as_ref();
        let attr = self.resolve("read link", path, Follow::No)?;
        let target = self.engine().readlink(attr.id).while_doing("read link", path)?;
        Ok(PathBuf::from(std::ffi::OsString::from_vec(target)))
    }

    /// Whether a path exists. On errors other than `NotFound` and `NotADirectory`, returns true.
    pub fn exists(&self, path: impl AsRef<Path>) -> bool {
        !matches!(
            path::resolve(self.engine(), path.as_ref(), Follow::Yes),
            Err(ubtrfs_fs::Error::NotFound | ubtrfs_fs::Error::NotDirectory)
        )
    }

    /// Makes `to` a copy of `from` that shares the extents instead of copying data. Later changes of one file do not
    /// affect the other file.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// fs.write("/base", vec![1; 8 << 20])?;
    /// fs.reflink("/base", "/copy")?;
    /// assert_eq!(fs.read("/copy")?, fs.read("/base")?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`open`](Self::open) and [`create`](Self::create).
    pub fn reflink(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        let to = to.as_ref();
        let source = self.open(from)?;
        let target = self.create(to)?;
        self.engine().clone_range(source.id(), 0, target.id(), 0, 0).while_doing("reflink to", to)
    }
}

/// Attributes.
impl Filesystem {
    /// Returns the attributes of a file; symbolic links are followed.
    ///
    /// # Errors
    /// `NotFound`; damage of the inode.
    pub fn metadata(&self, path: impl AsRef<Path>) -> Result<Metadata> {
        self.resolve("stat", path.as_ref(), Follow::Yes).map(Metadata::new)
    }

    /// Returns the attributes of a file; a symbolic link at the end of the path is not followed.
    ///
    /// # Errors
    /// As [`metadata`](Self::metadata).
    pub fn symlink_metadata(&self, path: impl AsRef<Path>) -> Result<Metadata> {
        self.resolve("stat", path.as_ref(), Follow::No).map(Metadata::new)
    }

    /// Sets the permission bits, with set-user-id, set-group-id and sticky bit (12 bits); symbolic links are followed.
    ///
    /// # Errors
    /// `NotFound`; `ReadOnlyFilesystem`.
    pub fn set_permissions(&self, path: impl AsRef<Path>, permissions: u32) -> Result<()> {
        let set = SetAttr { mode: Some(permissions), ..SetAttr::default() };
        self.set_attributes("change mode of", path.as_ref(), Follow::Yes, &set)
    }

    /// Sets the owner and group of a file; a symbolic link at the end of the path is not followed. As on Linux, a
    /// change of owner can clear the set-user-id and set-group-id bits, so set permissions afterwards.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/tool", "program")?;
    /// fs.set_owner("/tool", 0, 100)?;
    /// fs.set_permissions("/tool", 0o2755)?;
    /// let metadata = fs.metadata("/tool")?;
    /// assert_eq!((metadata.gid(), metadata.permissions()), (100, 0o2755));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `ReadOnlyFilesystem`.
    pub fn set_owner(&self, path: impl AsRef<Path>, uid: u32, gid: u32) -> Result<()> {
        let set = SetAttr { uid: Some(uid), gid: Some(gid), ..SetAttr::default() };
        self.set_attributes("change owner of", path.as_ref(), Follow::No, &set)
    }

    /// Sets the access and modification times of a file; a symbolic link at the end of the path is not followed.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// use std::time::{Duration, SystemTime};
    ///
    /// fs.write("/f", "")?;
    /// let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    /// fs.set_times("/f", time, time)?;
    /// assert_eq!(fs.metadata("/f")?.modified(), Some(time));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `ReadOnlyFilesystem`.
    pub fn set_times(&self, path: impl AsRef<Path>, accessed: SystemTime, modified: SystemTime) -> Result<()> {
        let at = |time: SystemTime| Some(SetTime::At(time.into()));
        let set = SetAttr { atime: at(accessed), mtime: at(modified), ..SetAttr::default() };
        self.set_attributes("change times of", path.as_ref(), Follow::No, &set)
    }

    fn set_attributes(&self, operation: &'static str, path: &Path, follow: Follow, set: &SetAttr) -> Result<()> {
        let id = self.resolve(operation, path, follow)?.id;
        self.engine().setattr(id, set, &self.caller).map(drop).while_doing(operation, path)
    }

    /// Returns the value of an extended attribute, or `None` if it does not exist. An attribute's name begins with its
    /// namespace: `user.comment`. A symbolic link at the end of the path is not followed.
    ///
    /// # Errors
    /// `NotFound` if the path does not exist.
    pub fn xattr(&self, path: impl AsRef<Path>, name: impl AsRef<[u8]>) -> Result<Option<Vec<u8>>> {
        let path = path.as_ref();
        let id = self.resolve("read attribute of", path, Follow::No)?.id;
        match self.engine().getxattr(id, name.as_ref()) {
            Err(ubtrfs_fs::Error::NoData) => Ok(None),
            found => found.map(Some).while_doing("read attribute of", path),
        }
    }

    /// Returns the names of all extended attributes.
    ///
    /// # Errors
    /// `NotFound` if the path does not exist.
    pub fn xattr_names(&self, path: impl AsRef<Path>) -> Result<Vec<Vec<u8>>> {
        let path = path.as_ref();
        let id = self.resolve("list attributes of", path, Follow::No)?.id;
        self.engine().listxattr(id).while_doing("list attributes of", path)
    }

    /// Sets an extended attribute, or replaces its value.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// fs.write("/file", "")?;
    /// fs.set_xattr("/file", "user.comment", "kept for the audit")?;
    /// assert_eq!(fs.xattr("/file", "user.comment")?.as_deref(), Some(b"kept for the audit".as_slice()));
    /// assert_eq!(fs.xattr("/file", "user.other")?, None);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Unsupported` if the namespace is unknown; ENOSPC or E2BIG if the value does not fit into a tree block.
    pub fn set_xattr(&self, path: impl AsRef<Path>, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        let path = path.as_ref();
        let id = self.resolve("set attribute of", path, Follow::No)?.id;
        self.engine()
            .setxattr(id, name.as_ref(), value.as_ref(), XattrFlags::empty(), &self.caller)
            .while_doing("set attribute of", path)
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// ENODATA if the attribute does not exist.
    pub fn remove_xattr(&self, path: impl AsRef<Path>, name: impl AsRef<[u8]>) -> Result<()> {
        let path = path.as_ref();
        let id = self.resolve("remove attribute of", path, Follow::No)?.id;
        self.engine().removexattr(id, name.as_ref(), &self.caller).while_doing("remove attribute of", path)
    }
}
