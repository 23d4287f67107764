//! Mounts a filesystem through FUSE, so that all programs can use the filesystem.
//!
//! [`Filesystem::mount`] mounts, [`Mount::run`] serves the mount, [`unmount`] ends it.

use std::io;
use std::path::Path;

/// ```
/// use ubtrfs::fuse::MountConfig;
///
/// // The first column of `mount` shows the image.
/// let config = MountConfig { fsname: "disk.img".to_owned(), nosuid: true, ..MountConfig::default() };
/// assert!(config.checks_permissions() || !config.allow_other);
/// ```
#[doc(inline)]
pub use ubtrfs_fuse::MountConfig;
/// ```
/// use std::path::Path;
/// use ubtrfs::fuse::{self, MountError};
///
/// let error = fuse::unmount(Path::new("/proc"), false).unwrap_err();
/// assert!(matches!(error, MountError::NotMounted(_)));
/// ```
#[doc(inline)]
pub use ubtrfs_fuse::MountError;
use ubtrfs_fuse::Session;
/// ```
/// use ubtrfs::fuse::{IdlePolling, MountConfig};
///
/// // No processor is kept awake while many requests arrive. Answers are slower in a virtual machine.
/// let config = MountConfig { idle_poll: IdlePolling::Off, ..MountConfig::default() };
/// # assert_ne!(config.idle_poll, IdlePolling::default());
/// ```
#[doc(inline)]
pub use ubtrfs_fuse::transport::IdlePolling;
/// ```
/// use ubtrfs::fuse::{MountConfig, Transport};
///
/// // Do not use io_uring.
/// let config = MountConfig { transport: Transport::DevFuse, ..MountConfig::default() };
/// # assert_ne!(config.transport, Transport::default());
/// ```
#[doc(inline)]
pub use ubtrfs_fuse::transport::Transport;
/// ```no_run
/// use std::path::Path;
///
/// # fn main() -> Result<(), ubtrfs::fuse::MountError> {
/// // The second argument is true for a lazy unmount, which detaches a mount that is in use.
/// ubtrfs::fuse::unmount(Path::new("/mnt"), false)?;
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fuse::unmount;

use crate::Filesystem;

/// A filesystem that is mounted on a directory. Returned by [`Filesystem::mount`].
///
/// Requests to the mount wait until [`run`](Self::run) serves them. A mount that is dropped instead fails all requests,
/// and must still be unmounted.
///
/// ```no_run
/// use std::path::Path;
/// use ubtrfs::fuse::{self, MountConfig};
/// use ubtrfs::{Filesystem, MountOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let options = MountOptions { track_lookups: true, ..MountOptions::default() };
/// let fs = Filesystem::open_image_with("disk.img", options)?;
/// let config = MountConfig { fsname: "disk.img".to_owned(), ..MountConfig::default() };
/// let mount = fs.mount("/mnt", &config)?;
/// let server = std::thread::spawn(move || mount.run());
///
/// std::fs::write("/mnt/hello.txt", "written through the kernel")?;
/// // Waits for the last commit.
/// fuse::unmount(Path::new("/mnt"), false)?;
/// server.join().expect("the server does not panic")?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "`run` serves the mount"]
pub struct Mount {
    session: Session,
}

impl Mount {
    /// Serves the mount until it is unmounted, then commits and closes the filesystem. SIGTERM, SIGINT and SIGHUP of
    /// the process unmount it.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let options = ubtrfs::MountOptions { track_lookups: true, ..Default::default() };
    /// # let fs = ubtrfs::Filesystem::open_image_with("disk.img", options)?;
    /// // Returns when the filesystem is unmounted.
    /// fs.mount("/mnt", &ubtrfs::fuse::MountConfig::default())?.run()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`MountError::NotDurable`] if the last commit failed, so that changes are lost; [`MountError::Session`] if the
    /// connection to the kernel failed.
    pub fn run(self) -> Result<(), MountError> {
        self.session.run()
    }
}

impl Filesystem {
    /// Mounts the filesystem on a directory. [`Mount::run`] serves the mount. Other handles of the filesystem remain
    /// usable while it is mounted.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use ubtrfs::fuse::MountConfig;
    /// use ubtrfs::{Filesystem, MountOptions};
    ///
    /// let options = MountOptions { track_lookups: true, ..MountOptions::default() };
    /// let fs = Filesystem::open_image_with("disk.img", options)?;
    /// fs.mount("/mnt", &MountConfig::default())?.run()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// FUSE is not available; the directory does not exist, is not empty (see [`MountConfig::nonempty`]) or cannot be
    /// mounted on; the filesystem was opened without
    /// [`MountOptions::track_lookups`](crate::MountOptions::track_lookups), which keeps the inodes that the kernel
    /// knows.
    pub fn mount(self, dir: impl AsRef<Path>, config: &MountConfig) -> Result<Mount, MountError> {
        let dir = dir.as_ref();
        if !self.engine().options().track_lookups {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "open it with MountOptions::track_lookups");
            return Err(MountError::Session { dir: dir.display().to_string(), source });
        }
        let dir = ubtrfs_fuse::check(dir, config)?;
        let session = Session::mount(self.engine().clone(), &dir, config)?;
        self.leave_closing_to_session();
        Ok(Mount { session })
    }
}
