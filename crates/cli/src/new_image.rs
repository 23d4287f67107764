//! [`NewImage`]: an image file that is being made. The file has a temporary name until the image is complete, so an
//! interrupted command leaves no image, and a killed command leaves no image under the final name.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use rustix::fs::{Mode, OFlags};
use ubtrfs_archive::host_file::TemporaryName;
use ubtrfs_device::{FileDevice, OpenError};

use crate::commands::place::{find_own, has_proc};
use crate::common::Shown;

/// A new image file, which is removed if it is dropped without `keep`.
pub(crate) struct NewImage {
    device: Arc<FileDevice>,
    path: PathBuf,
    /// The directory, open with `O_PATH`.
    dir: Arc<OwnedFd>,
    /// The current, temporary path.
    temporary: PathBuf,
    name: TemporaryName,
}

impl NewImage {
    /// Makes an image file of this size.
    pub(crate) fn create(path: &Path, size: u64) -> anyhow::Result<Self> {
        let dir = dir_of(path);
        if !dir.is_dir() {
            return Err(OpenError::NoDirectory { path: dir.to_owned() }.into());
        }
        // The names of another user's mount may lead anywhere, also when the image is opened later.
        let found = find_own(dir)?.ok_or_else(|| OpenError::NoDirectory { path: dir.to_owned() })?;
        let opened = Arc::new(found);
        let name = path
            .file_name()
            .map(OsStr::as_bytes)
            .with_context(|| format!("{} does not name a file; give a path that ends in a name", path.shown()))?;
        let mut temporary = PathBuf::new();
        let (device, name) = TemporaryName::make(&opened, name, false, |name| {
            temporary = dir.join(name);
            // The directory that was found, whatever its path leads to by now.
            let by_descriptor = Path::new("/proc/self/fd").join(opened.as_raw_fd().to_string());
            let under = if has_proc() { by_descriptor.join(name) } else { PathBuf::from(name) };
            FileDevice::create_under(path, under.as_os_str(), size)
        })
        .map_err(|error| match error {
            // The file does not exist yet, so the directory denies the access.
            OpenError::Permission { .. } => anyhow::anyhow!(
                "no permission to make {} in the directory {}; choose another directory, or change its mode or owner",
                path.shown(),
                dir.shown()
            ),
            error => error.into(),
        })?;
        Ok(Self { device: Arc::new(device), path: path.to_owned(), dir: opened, temporary, name })
    }

    pub(crate) fn device(&self) -> &Arc<FileDevice> {
        &self.device
    }

    /// The path that the image gets when it is complete.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The current, temporary path of the file.
    pub(crate) fn temporary(&self) -> &Path {
        &self.temporary
    }

    /// Renames the complete image to its final name, durably.
    pub(crate) fn keep(self) -> anyhow::Result<()> {
        let shown = self.path.shown();
        match self.name.keep() {
            // Another process made it meanwhile.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(OpenError::Exists { path: self.path }.into());
            }
            kept => kept.with_context(|| format!("cannot make {shown}"))?,
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(&*self.dir, ".", flags, Mode::empty()).map_err(io::Error::from);
        let synced = opened.and_then(|dir| File::from(dir).sync_all());
        synced.with_context(|| format!("cannot make {shown} durable"))
    }
}

fn dir_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
