//! Errors of the library as exceptions: an `OSError` with the errno, the operation and its reason, and the path.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

pyo3::create_exception!(
    ubtrfs,
    CorruptionError,
    PyOSError,
    "Content of a device that contradicts the format or its checksum. The text names the tree, the block and the slot."
);

/// What devices of Python raised since it was last taken.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceExceptions {
    /// The first exception that failed a request.
    first: Arc<Mutex<Option<PyErr>>>,
    /// The first interrupt, such as `KeyboardInterrupt`, which fails no request.
    interrupt: Arc<Mutex<Option<PyErr>>>,
}

impl DeviceExceptions {
    pub(crate) fn note(&self, exception: PyErr) {
        self.first.lock().get_or_insert(exception);
    }

    pub(crate) fn note_interrupt(&self, exception: PyErr) {
        self.interrupt.lock().get_or_insert(exception);
    }

    fn take(&self) -> Option<PyErr> {
        self.first.lock().take()
    }

    /// The result of a call of the library. An interrupt that came meanwhile is raised in its place.
    pub(crate) fn settle<T: Send>(&self, py: Python<'_>, done: PyResult<T>) -> PyResult<T> {
        let Some(interrupt) = self.interrupt.lock().take() else { return done };
        if let Ok(value) = done {
            // I2 of the crate.
            py.detach(move || drop(value));
        }
        Err(interrupt)
    }

    /// Makes the exception for an error. An exception of a device becomes its cause.
    pub(crate) fn raise(&self, py: Python<'_>, error: &ubtrfs::Error) -> PyErr {
        let text = error.to_string();
        // The exception shows the path itself, after its text.
        let begin = format!("cannot {} '{}': ", error.operation(), error.path().display());
        let text = match text.strip_prefix(&begin) {
            Some(reason) => format!("cannot {}: {reason}", error.operation()),
            None => text,
        };
        self.exception(py, error.errno(), text, error.path(), error.is_corruption())
    }

    /// Makes the exception for an error of the engine.
    pub(crate) fn raise_engine(&self, py: Python<'_>, operation: &str, error: &ubtrfs::FsError) -> PyErr {
        self.exception(py, error.errno(), format!("cannot {operation}: {error}"), Path::new(""), false)
    }

    fn exception(&self, py: Python<'_>, errno: i32, text: String, path: &Path, is_corruption: bool) -> PyErr {
        let class = match is_corruption {
            true => py.get_type::<CorruptionError>(),
            false => py.get_type::<PyOSError>(),
        };
        let made = match path.as_os_str().is_empty() {
            true => class.call1((errno, text)),
            false => class.call1((errno, text, path.as_os_str())),
        };
        let exception = made.map_or_else(|failure| failure, PyErr::from_value);
        if let Some(cause) = self.take() {
            exception.set_cause(py, Some(cause));
        }
        exception
    }
}

/// The path that the bytes of Python name.
pub(crate) fn path(bytes: &[u8]) -> &Path {
    Path::new(<OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(bytes))
}

/// The bytes of a path.
pub(crate) fn path_bytes(path: &Path) -> &[u8] {
    std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str())
}
