//! Failures of calls: the status, and the error that a program may ask for.
//!
//! - F1. No panic leaves a function of C.
//! - F2. The status of a failure is a negative errno, never 0.

use std::any::Any;
use std::ffi::{CString, c_int};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::io::Errno;

use crate::border::ErrorPlace;
use crate::exports::error::{UBTRFS_ERROR_CORRUPTION, UBTRFS_ERROR_FAILED, UBTRFS_ERROR_PANIC, UBTRFS_ERROR_USAGE};
use crate::handles::Handle;

/// The result of work for a call.
pub(crate) type CallResult<T> = Result<T, CallFailure>;

/// Why a call failed.
#[derive(Debug)]
pub struct CallFailure {
    /// A positive number.
    pub(crate) errno: c_int,
    pub(crate) kind: u32,
    pub(crate) operation: CString,
    pub(crate) path: CString,
    pub(crate) message: CString,
}

/// The number for a struct that has fields of a newer version.
pub(crate) const E2BIG: Errno = Errno::TOOBIG;

impl CallFailure {
    /// A mistake of the program.
    pub(crate) fn new(errno: Errno, message: impl Into<Vec<u8>>) -> Self {
        Self::of(errno.raw_os_error(), UBTRFS_ERROR_USAGE, "", b"", message)
    }

    /// An argument with a value that it may not have.
    pub(crate) fn argument(message: String) -> Self {
        Self::new(Errno::INVAL, message)
    }

    /// A null pointer where a value is needed.
    pub(crate) fn null(what: &str) -> Self {
        Self::argument(format!("{what} is a null pointer"))
    }

    /// A failure that the library tells without an error of its own.
    pub(crate) fn plain(errno: Errno, message: String) -> Self {
        Self::of(errno.raw_os_error(), UBTRFS_ERROR_FAILED, "", b"", message)
    }

    fn panic(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("unknown");
        let message = format!("the library ended the call with a panic; please report it: {text}");
        Self::of(Errno::IO.raw_os_error(), UBTRFS_ERROR_PANIC, "", b"", message)
    }

    fn of(errno: c_int, kind: u32, operation: &str, path: &[u8], message: impl Into<Vec<u8>>) -> Self {
        Self {
            // F2: an error without a number is an I/O error.
            errno: if errno > 0 { errno } else { Errno::IO.raw_os_error() },
            kind,
            operation: c_text(operation),
            path: c_text(path),
            message: c_text(message),
        }
    }

    /// Writes the error to its place, and returns the status.
    fn give(self, error: ErrorPlace) -> c_int {
        let status = -self.errno;
        if error.is_given() {
            // Without a free number, the program gets the status alone.
            error.set(Handle::add(self).unwrap_or(Handle::NULL));
        }
        status
    }
}

/// A text of C. A zero byte would end it, so it is shown as a question mark.
pub(crate) fn c_text(text: impl Into<Vec<u8>>) -> CString {
    let mut bytes = text.into();
    bytes.iter_mut().filter(|byte| **byte == 0).for_each(|byte| *byte = b'?');
    CString::new(bytes).unwrap_or_default()
}

impl From<ubtrfs::Error> for CallFailure {
    fn from(error: ubtrfs::Error) -> Self {
        let kind = if error.is_corruption() { UBTRFS_ERROR_CORRUPTION } else { UBTRFS_ERROR_FAILED };
        let path = error.path().as_os_str().as_bytes();
        Self::of(error.errno(), kind, error.operation(), path, error.to_string())
    }
}

impl From<io::Error> for CallFailure {
    /// The library wraps its error where a trait of std demands an error of I/O.
    fn from(error: io::Error) -> Self {
        match error.downcast::<ubtrfs::Error>() {
            Ok(error) => error.into(),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(match error.kind() {
                    io::ErrorKind::InvalidInput => Errno::INVAL.raw_os_error(),
                    _ => Errno::IO.raw_os_error(),
                });
                Self::of(errno, UBTRFS_ERROR_FAILED, "", b"", error.to_string())
            }
        }
    }
}

/// A failure of the engine in an operation that the library has no function for.
pub(crate) fn engine_failure(operation: &str, error: &ubtrfs::FsError) -> CallFailure {
    CallFailure::of(error.errno(), UBTRFS_ERROR_FAILED, operation, b"", format!("cannot {operation}: {error}"))
}

/// Does the work of a call: 0, or a negative errno. Then `error` gets the error.
pub(crate) fn answer(error: ErrorPlace, work: impl FnOnce() -> CallResult<()>) -> c_int {
    error.set(Handle::NULL);
    // A panic in the engine makes the filesystem read-only.
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => 0,
        Ok(Err(failure)) => failure.give(error),
        Err(payload) => CallFailure::panic(&*payload).give(error),
    }
}

/// Does the work of a call that has no place for an error.
pub(crate) fn status(work: impl FnOnce() -> CallResult<()>) -> c_int {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => 0,
        Ok(Err(failure)) => -failure.errno,
        Err(payload) => -CallFailure::panic(&*payload).errno,
    }
}

/// Does the work of a call that returns a value, which a panic replaces with `otherwise`.
pub(crate) fn value<T>(otherwise: T, work: impl FnOnce() -> CallResult<T>) -> T {
    catch_unwind(AssertUnwindSafe(work)).ok().and_then(Result::ok).unwrap_or(otherwise)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exports::error::{UbtrfsError, ubtrfs_error_free, ubtrfs_error_kind};

    #[test]
    fn no_panic_leaves_a_function_of_c() {
        let mut given = Handle::<UbtrfsError>::NULL;
        let place = ErrorPlace::of(&mut given);
        let ended = answer(place, || panic!("planned, in a test"));
        assert_eq!((ended, ubtrfs_error_kind(given)), (-Errno::IO.raw_os_error(), UBTRFS_ERROR_PANIC));
        assert_eq!(ubtrfs_error_free(given), 0);
        assert_eq!(status(|| panic!("planned, in a test")), -Errno::IO.raw_os_error());
        assert_eq!(value(7, || panic!("planned, in a test")), 7);
        assert_eq!(answer(place, || Ok(())), 0);
        assert!(given.is_null());
    }
}
