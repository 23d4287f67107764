//! Image files and block devices.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::{Device, check_range};

/// What a device is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading; several may.
    ReadOnly,
    /// Reading and writing, alone.
    ReadWrite,
}

/// Why a device cannot be opened. Prints one line that says what to do.
#[derive(Debug)]
pub enum OpenError {
    /// The system refused.
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl std::fmt::Display for OpenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io { path, source } => write!(f, "cannot open {}: {source}", path.display()),
        }
    }
}

impl std::error::Error for OpenError {}

/// An image file or block device.
#[derive(Debug)]
pub struct FileDevice {
    file: File,
    path: PathBuf,
    len_bytes: u64,
    access: Access,
}

impl FileDevice {
    /// Opens an existing image file or block device and locks it.
    pub fn open(path: &Path, access: Access) -> Result<Self, OpenError> {
        let wrap = |source| OpenError::Io { path: path.to_owned(), source };
        let file = File::options().read(true).write(access == Access::ReadWrite).open(path).map_err(wrap)?;
        let len_bytes = file.metadata().map_err(wrap)?.len();
        Ok(Self { file, path: path.to_owned(), len_bytes, access })
    }

    /// Makes an image file of `size_bytes` (sparse) and opens it read-write. With `exclusive_new` an existing file is
    /// refused, else it is resized.
    pub fn create(path: &Path, size_bytes: u64, exclusive_new: bool) -> Result<Self, OpenError> {
        let wrap = |source| OpenError::Io { path: path.to_owned(), source };
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .create_new(exclusive_new)
            .open(path)
            .map_err(wrap)?;
        file.set_len(size_bytes).map_err(wrap)?;
        drop(file);
        Self::open(path, Access::ReadWrite)
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Device for FileDevice {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        check_range(offset, buf.len(), self.len_bytes, io::ErrorKind::UnexpectedEof)?;
        self.file.read_exact_at(buf, offset)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        check_range(offset, buf.len(), self.len_bytes, io::ErrorKind::WriteZero)?;
        self.file.write_all_at(buf, offset)
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn discard(&self, _offset: u64, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn describe(&self) -> String {
        self.path.display().to_string()
    }

    fn is_read_only(&self) -> bool {
        self.access == Access::ReadOnly
    }
}
