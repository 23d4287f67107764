//! [`PythonDevice`]: a device whose bytes an object of Python stores.
//!
//! The object has the attribute `size`, and the methods `read_at(offset, length)`, `write_at(offset, data)` and
//! `flush()`. It may have `discard(offset, length)`, and the attributes `name` and `read_only`. Threads of the engine call
//! the methods.
//!
//! Invariants:
//! - I1. A call of the object never begins while the interpreter ends. The request fails then.
//! - I2. An interrupt, such as Ctrl-C, fails no request: a failed write ends the filesystem. The method is called again, and the
//!   interrupt is raised after the call of the library.

use std::fmt;
use std::io;
use std::sync::Arc;

use pyo3::exceptions::{PyException, PyOSError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};
use ubtrfs::Device;

use crate::errors::DeviceExceptions;

/// A device in Python.
pub(crate) struct PythonDevice {
    object: Py<PyAny>,
    name: String,
    len_bytes: u64,
    read_only: bool,
    has_discard: bool,
    exceptions: DeviceExceptions,
}

impl fmt::Debug for PythonDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PythonDevice").field("name", &self.name).field("len_bytes", &self.len_bytes).finish()
    }
}

impl PythonDevice {
    fn new(object: &Bound<'_, PyAny>, exceptions: &DeviceExceptions) -> PyResult<Self> {
        for method in ["read_at", "write_at", "flush"] {
            if !object.hasattr(method)? {
                let class = object.get_type().qualname()?;
                return Err(PyTypeError::new_err(format!(
                    "a device needs the attribute size, and the methods read_at, write_at and flush; \
                     '{class}' has no {method}"
                )));
            }
        }
        let size = object.getattr("size")?;
        let size = if size.is_callable() { size.call0()? } else { size };
        let name = object.getattr_opt("name")?.filter(|name| !name.is_none() && !name.is_callable());
        Ok(Self {
            name: match name {
                Some(name) => name.str()?.to_string(),
                None => format!("a device of Python, {}", object.get_type().qualname()?),
            },
            len_bytes: size.extract()?,
            read_only: object.getattr_opt("read_only")?.map_or(Ok(false), |value| value.is_truthy())?,
            has_discard: object.hasattr("discard")?,
            object: object.clone().unbind(),
            exceptions: exceptions.clone(),
        })
    }

    /// Wraps objects as devices. Exceptions that they raise later go to `exceptions`.
    pub(crate) fn wrap(objects: &[Bound<'_, PyAny>], exceptions: &DeviceExceptions) -> PyResult<Vec<Arc<dyn Device>>> {
        objects.iter().map(|object| Self::wrap_one(object, exceptions)).collect()
    }

    /// Wraps one object, as [`wrap`](Self::wrap) does.
    pub(crate) fn wrap_one(object: &Bound<'_, PyAny>, exceptions: &DeviceExceptions) -> PyResult<Arc<dyn Device>> {
        Ok(Arc::new(Self::new(object, exceptions)?))
    }

    /// Calls the object (I1, I2).
    fn call<T>(&self, mut work: impl FnMut(&Bound<'_, PyAny>) -> PyResult<T>) -> io::Result<T> {
        let done = Python::try_attach(|py| {
            let mut interrupts = 0..INTERRUPTS_MAX;
            loop {
                let exception = match work(self.object.bind(py)) {
                    Ok(value) => return Ok(value),
                    Err(exception) => exception,
                };
                if !exception.is_instance_of::<PyException>(py) && interrupts.next().is_some() {
                    self.exceptions.note_interrupt(exception);
                    continue;
                }
                let error = io_error(py, &exception);
                self.exceptions.note(exception);
                return Err(error);
            }
        });
        done.unwrap_or_else(|| Err(io::Error::other("the interpreter of Python has ended; close filesystems before")))
    }

    fn check_range(&self, offset: u64, len: usize, kind: io::ErrorKind) -> io::Result<()> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.len_bytes => Ok(()),
            _ => Err(io::Error::new(kind, format!("{len} bytes at {offset} end past {} bytes", self.len_bytes))),
        }
    }
}

/// How often a method that is interrupted is called again.
const INTERRUPTS_MAX: u32 = 8;

/// The error for an exception. The errno of an `OSError` is kept; other exceptions keep their text.
fn io_error(py: Python<'_>, exception: &PyErr) -> io::Error {
    let errno = exception
        .is_instance_of::<PyOSError>(py)
        .then(|| exception.value(py).getattr("errno").ok()?.extract::<i32>().ok())
        .flatten();
    match errno {
        Some(errno) => io::Error::from_raw_os_error(errno),
        None => io::Error::other(format!("the device raised {exception}")),
    }
}

impl Device for PythonDevice {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.check_range(offset, buf.len(), io::ErrorKind::UnexpectedEof)?;
        let len = self.call(|object| {
            let read = object.call_method1("read_at", (offset, buf.len()))?;
            let read = match read.cast_into::<PyBytes>() {
                Ok(bytes) => bytes,
                // Anything else that has bytes, for example a bytearray. Bytes of a number would be that many zeros.
                Err(other) => {
                    let view = PyMemoryView::from(&other.into_inner())?;
                    view.call_method0("tobytes")?.cast_into::<PyBytes>()?
                }
            };
            let bytes = read.as_bytes();
            if bytes.len() == buf.len() {
                buf.copy_from_slice(bytes);
            }
            Ok(bytes.len())
        })?;
        if len == buf.len() {
            return Ok(());
        }
        let problem = format!("the device returned {len} bytes at {offset}, and {} were asked for", buf.len());
        Err(io::Error::new(io::ErrorKind::UnexpectedEof, problem))
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.check_range(offset, buf.len(), io::ErrorKind::WriteZero)?;
        self.call(|object| object.call_method1("write_at", (offset, PyBytes::new(object.py(), buf))).map(drop))
    }

    fn flush(&self) -> io::Result<()> {
        self.call(|object| object.call_method0("flush").map(drop))
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        if !self.has_discard {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.call(|object| object.call_method1("discard", (offset, len_bytes)).map(drop))
    }

    fn can_discard(&self) -> bool {
        self.has_discard
    }

    fn describe(&self) -> String {
        self.name.clone()
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }
}
