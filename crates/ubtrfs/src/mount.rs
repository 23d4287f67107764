//! Mounting through FUSE.

use std::io;
use std::path::Path;

use ubtrfs_fuse::{MountConfig, MountError, Session};

use crate::Filesystem;

impl Filesystem {
    /// Mounts the filesystem on a directory. [`Session::run`] serves the mount until the filesystem is unmounted, then
    /// commits and closes the filesystem. `Session::run` treats SIGTERM, SIGINT and SIGHUP of the process as requests
    /// to unmount. Other handles of the filesystem remain usable while it is mounted.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use ubtrfs::fuse::MountConfig;
    /// use ubtrfs::{Filesystem, MountOptions};
    ///
    /// let options = MountOptions { track_lookups: true, ..MountOptions::default() };
    /// let fs = Filesystem::open_image_with("disk.img", options)?;
    /// let session = fs.mount("/mnt".as_ref(), &MountConfig::default())?;
    /// session.run()?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// FUSE is not available; the directory cannot be mounted on; the filesystem was opened without
    /// [`MountOptions::track_lookups`](crate::MountOptions::track_lookups), which keeps the inodes that the kernel
    /// knows.
    pub fn mount(self, dir: &Path, config: &MountConfig) -> Result<Session, MountError> {
        if !self.engine().options().track_lookups {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "open it with MountOptions::track_lookups");
            return Err(MountError::Session { dir: dir.display().to_string(), source });
        }
        let session = Session::mount(self.engine().clone(), dir, config)?;
        self.leave_closing_to_session();
        Ok(session)
    }
}
