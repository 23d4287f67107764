//! [`PythonFile`]: an open file, read and written at positions. The position itself is kept by the Python package.

use std::io::{Seek, Write};
use std::sync::Arc;

use parking_lot::RwLock;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ubtrfs::{File, Filesystem};

use crate::errors::DeviceExceptions;
use crate::filesystem::PythonStat;
use crate::job::JobWatch;
use crate::memory;

/// The filesystem of a file, while the file is open.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileHome(usize);

impl FileHome {
    pub(crate) fn of(fs: &Filesystem) -> Self {
        Self(Arc::as_ptr(fs.engine()).addr())
    }
}

/// An open file.
#[pyclass(name = "File", module = "ubtrfs._ubtrfs", frozen)]
pub(crate) struct PythonFile {
    /// `None` after the file is closed. Locked only while the interpreter is detached.
    file: RwLock<Option<File>>,
    home: FileHome,
    exceptions: DeviceExceptions,
}

/// The errno of a link between filesystems.
const EXDEV: i32 = 18;

/// Why a call on a file failed.
enum FileFailure {
    Closed,
    Failed(ubtrfs::Error),
    Append(std::io::Error),
}

impl PythonFile {
    pub(crate) fn new(file: File, home: FileHome, exceptions: DeviceExceptions) -> Self {
        Self { file: RwLock::new(Some(file)), home, exceptions }
    }

    fn run<T: Send>(&self, py: Python<'_>, work: impl FnOnce(&File) -> ubtrfs::Result<T> + Send) -> PyResult<T> {
        let done = py.detach(|| match &*self.file.read() {
            Some(file) => work(file).map_err(FileFailure::Failed),
            None => Err(FileFailure::Closed),
        });
        self.exceptions.settle(py, done.map_err(|failure| self.raise(py, failure)))
    }

    /// Returns `len` bytes at `offset`, which the caller knows to be in the file.
    pub(crate) fn read_range<'py>(&self, py: Python<'py>, offset: u64, len: u64) -> PyResult<Bound<'py, PyBytes>> {
        memory::check_room(len)?;
        let len = usize::try_from(len)?;
        let mut nr_read = 0;
        let bytes = PyBytes::new_with(py, len, |buf| {
            nr_read = self.run(py, |file| file.read_at(offset, buf))?;
            Ok(())
        })?;
        // Another thread may have truncated the file.
        Ok(if nr_read == len { bytes } else { PyBytes::new(py, &bytes.as_bytes()[..nr_read]) })
    }

    /// Fails if a file is of another filesystem: inode numbers of one mean other files in another.
    fn check_home(&self, py: Python<'_>, source: &Self) -> PyResult<()> {
        if self.home == source.home {
            return Ok(());
        }
        let text = "Invalid cross-device link: the files are of two filesystems";
        let error = py.get_type::<PyOSError>().call1((EXDEV, text))?;
        Err(PyErr::from_value(error))
    }

    fn raise(&self, py: Python<'_>, failure: FileFailure) -> PyErr {
        match failure {
            FileFailure::Closed => PyValueError::new_err("I/O operation on closed file."),
            FileFailure::Failed(error) => self.exceptions.raise(py, &error),
            // The library wraps its error.
            FileFailure::Append(error) => match error.get_ref().and_then(|error| error.downcast_ref()) {
                Some(error) => self.exceptions.raise(py, error),
                None => error.into(),
            },
        }
    }
}

/// Runs work on two files, which may be one.
fn with_both<T>(
    one: &PythonFile,
    other: &PythonFile,
    work: impl FnOnce(&File, &File) -> ubtrfs::Result<T>,
) -> Result<T, FileFailure> {
    // Recursive: a writer that waits must not come between the two locks of one file.
    let (one, other) = (one.file.read_recursive(), other.file.read_recursive());
    match (&*one, &*other) {
        (Some(one), Some(other)) => work(one, other).map_err(FileFailure::Failed),
        _ => Err(FileFailure::Closed),
    }
}

#[pymethods]
impl PythonFile {
    /// Returns up to `size` bytes at `offset`; fewer at the end of the file.
    fn read_at<'py>(&self, py: Python<'py>, offset: u64, size: u64) -> PyResult<Bound<'py, PyBytes>> {
        // The size on disk is not trusted, and a large `size` may be far past the end.
        let rest = self.run(py, |file| Ok(file.metadata()?.len()))?.saturating_sub(offset);
        self.read_range(py, offset, size.min(rest))
    }

    /// Writes all of `data` at `offset`.
    fn write_at(&self, py: Python<'_>, offset: u64, data: &[u8]) -> PyResult<()> {
        self.run(py, |file| file.write_all_at(offset, data))
    }

    /// Writes all of `data` at the end of the file, and returns the position after it.
    fn append(&self, py: Python<'_>, data: &[u8]) -> PyResult<u64> {
        let done = py.detach(|| match &mut *self.file.write() {
            Some(file) => file.write_all(data).and_then(|()| file.stream_position()).map_err(FileFailure::Append),
            None => Err(FileFailure::Closed),
        });
        self.exceptions.settle(py, done.map_err(|failure| self.raise(py, failure)))
    }

    /// Truncates the file, or extends it by a hole.
    fn truncate(&self, py: Python<'_>, size: u64) -> PyResult<()> {
        self.run(py, |file| file.set_len(size))
    }

    /// The size in bytes.
    fn size(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, |file| Ok(file.metadata()?.len()))
    }

    /// The attributes.
    fn stat(&self, py: Python<'_>) -> PyResult<PythonStat> {
        self.run(py, |file| file.metadata()).map(PythonStat::new)
    }

    /// Makes the file durable.
    fn sync(&self, py: Python<'_>, data_only: bool) -> PyResult<()> {
        self.run(py, |file| if data_only { file.sync_data() } else { file.sync_all() })
    }

    /// The start and end of the next range of data at or after `offset`.
    fn next_data(&self, py: Python<'_>, offset: u64) -> PyResult<Option<(u64, u64)>> {
        self.run(py, |file| file.next_data(offset))
    }

    /// Makes a range of this file share the data of a range of `source`; 0 bytes mean up to its end.
    fn clone_range(
        &self,
        py: Python<'_>,
        offset: u64,
        source: &PythonFile,
        source_offset: u64,
        len: u64,
    ) -> PyResult<()> {
        self.check_home(py, source)?;
        let done =
            py.detach(|| with_both(self, source, |file, source| file.clone_range(offset, source, source_offset, len)));
        self.exceptions.settle(py, done.map_err(|failure| self.raise(py, failure)))
    }

    /// Makes two ranges share their data if they are equal. Returns whether they are.
    fn dedupe_range(
        &self,
        py: Python<'_>,
        offset: u64,
        source: &PythonFile,
        source_offset: u64,
        len: u64,
        watch: JobWatch,
    ) -> PyResult<bool> {
        self.check_home(py, source)?;
        let is_equal = watch.run(py, &self.exceptions, |job| {
            let done =
                with_both(self, source, |file, source| file.dedupe_range(offset, source, source_offset, len, job));
            match done {
                Ok(is_equal) => Ok(Some(is_equal)),
                Err(FileFailure::Failed(error)) => Err(error),
                Err(FileFailure::Closed | FileFailure::Append(_)) => Ok(None),
            }
        })?;
        is_equal.ok_or_else(|| self.raise(py, FileFailure::Closed))
    }

    /// Closes the file.
    pub(crate) fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.file.write().take()));
    }
}

impl Drop for PythonFile {
    fn drop(&mut self) {
        if let Some(file) = self.file.get_mut().take() {
            Python::attach(|py| py.detach(move || drop(file)));
        }
    }
}
