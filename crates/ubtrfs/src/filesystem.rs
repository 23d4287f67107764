//! [`Filesystem`]: making, opening, space, closing.
//!
//! Invariants:
//! - I1. The engine is closed by [`Filesystem::close`], or when the last handle, file or directory reader is dropped.
//!   The engine of a mounted filesystem is closed by the mount's session.
//! - I2. Only the process that opened a filesystem closes it. A process that was forked from it has the memory, but not the
//!   threads, so it forgets the filesystem.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use ubtrfs_device::{Access, Device, FileDevice, MemoryDevice, NamedDevice, is_seed, lock_order};
use ubtrfs_fs::{Attr, Caller, Error as FsError, Fs, InodeId, MountOptions, NewInode, find_devices};
use ubtrfs_mkfs::{MkfsOptions, MkfsReport};

use crate::error::{Error, Result, ResultExt};
use crate::in_use::DeviceClaim;
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
    shared: Arc<OpenFilesystem>,
    caller: Caller,
}

struct OpenFilesystem {
    fs: Arc<Fs>,
    /// The process that opened it (I2).
    pid: u32,
    /// The name of the first device, for errors.
    device: PathBuf,
    /// This lock is held while an append finds the file's end and writes there, so that concurrent appends do not
    /// overwrite each other.
    append: Mutex<()>,
    /// Whether a mount's session closes the engine (I1).
    #[cfg(feature = "fuse")]
    mounted: std::sync::atomic::AtomicBool,
}

impl OpenFilesystem {
    #[cfg(feature = "fuse")]
    fn is_mounted(&self) -> bool {
        self.mounted.load(std::sync::atomic::Ordering::Acquire)
    }

    #[cfg(not(feature = "fuse"))]
    fn is_mounted(&self) -> bool {
        false
    }
}

impl Drop for OpenFilesystem {
    #[allow(clippy::mem_forget, reason = "the memory of a forked process ends with it")]
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // The engine is never dropped (I2).
            std::mem::forget(Arc::clone(&self.fs));
        } else if !self.is_mounted() {
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
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let scratch = tempfile::tempdir()?;
    /// # let image = scratch.path().join("disk.img");
    /// let fs = ubtrfs::Filesystem::make_image(&image, 256 << 20)?;
    /// fs.close()?;
    /// // The file is sparse: it occupies less space than its size.
    /// assert_eq!(std::fs::metadata(&image)?.len(), 256 << 20);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `AlreadyExists` if the file exists; `InvalidInput` if the size is too small for btrfs (about 109 MiB).
    pub fn make_image(path: impl AsRef<Path>, size_bytes: u64) -> Result<Self> {
        Self::make_images(&[path], Some(size_bytes), &MkfsOptions::default(), MountOptions::default())
    }

    /// Makes an empty filesystem on one or several image files or block devices, and opens it with mount options. With
    /// `size_bytes`, the files are new, sparse and of this size. Without, they exist already.
    ///
    /// ```
    /// use ubtrfs::{CsumType, Filesystem, MkfsOptions, MountOptions};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let scratch = tempfile::tempdir()?;
    /// # let image = scratch.path().join("disk.img");
    /// let options = MkfsOptions { label: b"data".to_vec(), csum_type: CsumType::Xxhash, ..MkfsOptions::default() };
    /// let mount = MountOptions::parse("compress=zstd")?;
    /// let fs = Filesystem::make_images(&[&image], Some(256 << 20), &options, mount)?;
    /// assert_eq!(fs.label(), b"data");
    /// fs.close()?;
    ///
    /// // Existing content is overwritten only if that is asked for.
    /// assert!(Filesystem::make_images(&[&image], None, &options, MountOptions::default()).is_err());
    /// let options = MkfsOptions { force: true, ..options };
    /// Filesystem::make_images(&[&image], None, &options, MountOptions::default())?.close()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `AlreadyExists` if a file exists and `size_bytes` is given, `NotFound` if it does not exist and no size is given; as
    /// for [`Filesystem::make_on_devices`].
    pub fn make_images(
        paths: &[impl AsRef<Path>],
        size_bytes: Option<u64>,
        options: &MkfsOptions,
        mount: MountOptions,
    ) -> Result<Self> {
        let mut devices: Vec<Arc<dyn Device>> = Vec::new();
        let mut open_all = || -> Result<()> {
            for path in paths.iter().map(AsRef::as_ref) {
                let device = match size_bytes {
                    Some(size_bytes) => FileDevice::create(path, size_bytes, true),
                    None => FileDevice::open(path, Access::ReadWrite),
                };
                devices.push(Arc::new(device.while_doing("make", path)?));
            }
            Ok(())
        };
        let made = open_all().and_then(|()| {
            let refs: Vec<&dyn Device> = devices.iter().map(AsRef::as_ref).collect();
            Self::make_on_devices(&refs, options)?;
            Self::open_devices(devices.clone(), mount)
        });
        if made.is_err() && size_bytes.is_some() {
            // Remove the useless files. This call made them: an existing file would have been an error. Errors of the
            // removal are ignored.
            for path in paths.iter().take(devices.len()) {
                let _ = std::fs::remove_file(path);
            }
        }
        made
    }

    /// Makes a filesystem in memory, which disappears when the last handle is dropped. A filesystem in memory is meant
    /// for tests. Memory is allocated as the filesystem is written to.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/f", "lost at the end of this program")?;
    /// # Ok(()) }
    /// ```
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
        Self::make_on_devices(&[device], options)
    }

    /// Makes an empty filesystem on several devices, without opening it. They get the device ids 1, 2 and so on.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use ubtrfs::format::BlockGroupFlags;
    /// use ubtrfs::{Device, Filesystem, MemoryDevice, MkfsOptions, MountOptions};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let devices: Vec<Arc<dyn Device>> =
    ///     (0..2).map(|_| Arc::new(MemoryDevice::new(256 << 20)) as Arc<dyn Device>).collect();
    /// let (data_profile, metadata_profile) = (BlockGroupFlags::RAID1, BlockGroupFlags::RAID1);
    /// let options = MkfsOptions { data_profile, metadata_profile, ..MkfsOptions::default() };
    /// Filesystem::make_on_devices(&[devices[0].as_ref(), devices[1].as_ref()], &options)?;
    /// let fs = Filesystem::open_devices(devices, MountOptions::default())?;
    /// fs.write("/f", "on both")?;
    /// fs.close()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As for [`Filesystem::make_on`]; `InvalidInput` if the profiles need more devices.
    pub fn make_on_devices(devices: &[&dyn Device], options: &MkfsOptions) -> Result<MkfsReport> {
        let names: Vec<String> = devices.iter().map(|device| device.describe()).collect();
        let names = PathBuf::from(names.join(", "));
        let _claim = DeviceClaim::new(devices.iter().copied(), true).while_doing("make a filesystem on", &names)?;
        ubtrfs_mkfs::make_array(devices, options).while_doing("make a filesystem on", &names)
    }

    /// Opens an image file, a block device, or an export of an NBD server for reading and writing. The name of an export is a
    /// URL: `nbd://HOST[:PORT]/EXPORT`, or `nbd+unix:///EXPORT?socket=PATH`. Nothing keeps clients on other machines from
    /// writing to it.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let scratch = tempfile::tempdir()?;
    /// # let image = scratch.path().join("disk.img");
    /// # ubtrfs::Filesystem::make_image(&image, 256 << 20)?.close()?;
    /// let fs = ubtrfs::Filesystem::open_image(&image)?;
    /// fs.write("/f", "text")?;
    /// fs.close()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `ResourceBusy` if the device is already open, also in this process, or mounted by the kernel;
    /// damage.
    pub fn open_image(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_image_with(path, MountOptions::default())
    }

    /// Opens an image file or a block device with mount options. [`MountOptions::read_only`] opens the filesystem for
    /// reading only. The other devices of a filesystem with several are those of [`MountOptions::devices`], and those
    /// found beside it and in `/dev`. A device that missed changes is brought up to date only if it is named. If it is only
    /// found, it counts as missing, because it may be a backup.
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
        let given: Vec<&Path> = std::iter::once(path).chain(options.devices.iter().map(PathBuf::as_path)).collect();
        let members = find_devices(&given).while_doing("open", path)?;
        for device in &members.left_out {
            tracing::warn!("{device}");
        }
        let nr_given = given.len();
        let paths: Vec<PathBuf> = given.into_iter().map(Path::to_owned).chain(members.found).collect();
        let mut opened: Vec<Option<Arc<dyn Device>>> = vec![None; paths.len()];
        for index in lock_order(&paths) {
            let (path, is_found) = (&paths[index], index >= nr_given);
            // Nothing is ever written to a seed.
            let access = if is_seed(path) { Access::ReadOnly } else { access };
            match NamedDevice::open(path, access) {
                Err(error) if is_found && options.degraded && error.is_of_device() => {
                    tracing::warn!("a device is not used, and counts as missing: {error}");
                }
                device => {
                    let device = device.while_doing("open", path)?;
                    opened[index] = Some(Arc::new(if is_found { device.found() } else { device }));
                }
            }
        }
        let devices = opened.into_iter().flatten().collect();
        Self::open_devices(devices, options)
    }

    /// Opens a filesystem on the given devices: image files, block devices, memory, or the caller's [`Device`].
    ///
    /// The example `own_device` implements a device. As on Linux, several devices can form one filesystem: give
    /// all of them.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use ubtrfs::{Device, Filesystem, MemoryDevice, MkfsOptions, MountOptions};
    ///
    /// # fn main() -> ubtrfs::Result<()> {
    /// let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(128 << 20));
    /// Filesystem::make_on(device.as_ref(), &MkfsOptions::default())?;
    /// let fs = Filesystem::open_devices(vec![device.clone()], MountOptions::default())?;
    /// fs.write("/f", "text")?;
    /// fs.close()?;
    /// // The device has the content after the filesystem is closed.
    /// let fs = Filesystem::open_devices(vec![device], MountOptions::default())?;
    /// assert_eq!(fs.read("/f")?, b"text");
    /// # Ok(()) }
    /// ```
    ///
    /// Devices that are all read-only open a filesystem that is read-only.
    ///
    /// A device belongs to one filesystem at a time. Two objects over one storage are not noticed.
    ///
    /// # Errors
    /// Damage; unknown features; errors of the devices; `ResourceBusy` if a filesystem of this process uses a device.
    pub fn open_devices(devices: Vec<Arc<dyn Device>>, mut options: MountOptions) -> Result<Self> {
        options.read_only |= devices.iter().all(|device| device.is_read_only());
        let device = PathBuf::from(devices.first().map(|device| device.describe()).unwrap_or_default());
        let given = devices.iter().map(AsRef::as_ref);
        let claim = DeviceClaim::new(given, !options.read_only).while_doing("open", &device)?;
        let fs = Fs::open(devices, options).while_doing("open", &device)?;
        claim.opened(&fs);
        let shared = OpenFilesystem {
            fs,
            pid: std::process::id(),
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
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// assert_eq!(fs.caller(), ubtrfs::Caller::ROOT);
    /// # Ok(()) }
    /// ```
    pub fn caller(&self) -> Caller {
        self.caller
    }

    /// The permissions of a new inode that was asked for without any: `all`, from which the engine removes the caller's
    /// umask. The default caller, root without a umask, gets what root gets with the usual umask of 022, so that not
    /// everybody can write.
    pub(crate) fn default_permissions(&self, all: u32) -> u32 {
        if self.caller.umask == 0 && self.caller.is_privileged() { all & !0o022 } else { all }
    }

    /// Makes all changes so far durable.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/f", "durable after the next line")?;
    /// fs.sync()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// A failure to write data; errors of the device. A failed commit makes the filesystem read-only.
    pub fn sync(&self) -> Result<()> {
        self.engine().sync().while_doing("sync", &self.shared.device)
    }

    /// Does several changes, which become durable together when `work` returns `Ok`. If `work` returns an error or panics,
    /// or the program ends meanwhile, the devices keep the state before the call.
    ///
    /// Changes that other threads make meanwhile belong to the transaction. In it, these fail: `sync` and `sync_all`,
    /// making subvolumes and snapshots, and a second transaction. Space that is freed is not available before the end.
    /// After a transaction that failed, the filesystem cannot be changed: close it, and open it again. If the transaction
    /// changed nothing, the filesystem goes on.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let scratch = tempfile::tempdir()?;
    /// # let image = scratch.path().join("disk.img");
    /// # ubtrfs::Filesystem::make_image(&image, 256 << 20)?.close()?;
    /// let fs = ubtrfs::Filesystem::open_image(&image)?;
    /// fs.transaction(|| {
    ///     fs.write("/config.new", "color = green\n")?;
    ///     fs.rename("/config.new", "/config")
    /// })?;
    /// let failed = fs.transaction(|| {
    ///     fs.remove_file("/config")?;
    ///     fs.rename("/missing", "/config")
    /// });
    /// assert!(failed.is_err() && fs.close().is_err());
    /// let fs = ubtrfs::Filesystem::open_image(&image)?;
    /// assert_eq!(fs.read("/config")?, b"color = green\n");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The error of `work`. `InvalidInput` if a transaction runs already. An error of writing the changes.
    pub fn transaction<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        /// Undoes the changes when it is dropped before they are durable.
        struct Undo<'f> {
            fs: &'f Fs,
            is_durable: bool,
        }
        impl Drop for Undo<'_> {
            fn drop(&mut self) {
                if !self.is_durable {
                    // None runs after a commit that failed.
                    let _ended = self.fs.abort_atomic("a transaction failed".to_owned());
                }
            }
        }
        let name = &self.shared.device;
        self.engine().begin_atomic().while_doing("begin a transaction in", name)?;
        let mut undo = Undo { fs: self.engine(), is_durable: false };
        let done = work()?;
        self.engine().commit_atomic().while_doing("commit a transaction in", name)?;
        undo.is_durable = true;
        Ok(done)
    }

    /// Makes all changes durable and closes the filesystem. Later changes through other handles fail.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// let other = fs.clone();
    /// fs.write("/f", "durable after the next line")?;
    /// fs.close()?;
    /// assert!(other.write("/g", "too late").is_err());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`sync`](Self::sync); `InvalidInput` in a process that was forked.
    pub fn close(self) -> Result<()> {
        if self.shared.pid != std::process::id() {
            let cause =
                FsError::InvalidArgument("the process from which this one was forked has it open, and closes it");
            return Err(Error::new("close", &self.shared.device, cause));
        }
        self.engine().close().while_doing("close", &self.shared.device)
    }

    /// The reason why the filesystem is read-only, or `None` if it is not.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let scratch = tempfile::tempdir()?;
    /// # let image = scratch.path().join("disk.img");
    /// # ubtrfs::Filesystem::make_image(&image, 256 << 20)?.close()?;
    /// let options = ubtrfs::MountOptions { read_only: true, ..Default::default() };
    /// let fs = ubtrfs::Filesystem::open_image_with(&image, options)?;
    /// assert!(fs.read_only_reason().is_some());
    /// # Ok(()) }
    /// ```
    pub fn read_only_reason(&self) -> Option<String> {
        self.engine().read_only()
    }

    /// The label, which can be any bytes; empty if there is none.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// assert_eq!(fs.label(), b"");
    /// # Ok(()) }
    /// ```
    pub fn label(&self) -> Vec<u8> {
        self.engine().superblock().label().to_vec()
    }

    /// Returns the total, free and available space.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// let usage = fs.usage()?;
    /// println!("{} of {} bytes are free", usage.free_bytes, usage.total_bytes);
    /// assert!(usage.available_bytes < usage.total_bytes);
    /// # Ok(()) }
    /// ```
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

    /// The engine, for crates of this workspace.
    #[doc(hidden)]
    pub fn engine(&self) -> &Arc<Fs> {
        &self.shared.fs
    }

    /// The name of the first device, for errors.
    pub(crate) fn device_name(&self) -> &Path {
        &self.shared.device
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
