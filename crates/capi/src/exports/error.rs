//! Errors, memory, version

use std::ffi::{c_char, c_int, c_void};

use crate::border::{Address, OwnedAddress};
use crate::failure::{CallFailure, CallResult, status, value};
use crate::handles::{Handle, HandleKind, HandleTable};
use crate::memory;

/// Why a function failed. Free it with `ubtrfs_error_free`.
#[derive(Debug)]
pub enum UbtrfsError {}

impl HandleKind for UbtrfsError {
    type Object = CallFailure;
    const WHAT: &'static str = "the error";
    fn table() -> &'static HandleTable<CallFailure> {
        static TABLE: HandleTable<CallFailure> = HandleTable::new();
        &TABLE
    }
}

/// The operation failed for the reason that the number and the message tell.
pub const UBTRFS_ERROR_FAILED: u32 = 1;
/// The content of a device contradicts the format of btrfs. The message names the place.
pub const UBTRFS_ERROR_CORRUPTION: u32 = 2;
/// The program broke a rule of this interface: a null pointer, a closed handle, an invalid value.
pub const UBTRFS_ERROR_USAGE: u32 = 3;
/// The library has a bug. The filesystem is read-only from then on.
pub const UBTRFS_ERROR_PANIC: u32 = 4;

/// The number of the error, such as ENOENT. It is positive, and 0 for a null pointer or an unknown error.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_error_errno(error: Handle<UbtrfsError>) -> c_int {
    value(0, || Ok(error.get()?.errno))
}

/// The kind of the error, one of `UBTRFS_ERROR_...`. It is 0 for a null pointer or an unknown error.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_error_kind(error: Handle<UbtrfsError>) -> u32 {
    value(0, || Ok(error.get()?.kind))
}

/// The message: one line with the operation, the path and the reason. It is never null, and valid until the error is freed.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_error_message(error: Handle<UbtrfsError>) -> Address<c_char> {
    text(error, |failure| failure.message.as_ptr())
}

/// The failed operation as a verb, such as "open"; empty if the failure has none. It is never null, and valid until the
/// error is freed.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_error_operation(error: Handle<UbtrfsError>) -> Address<c_char> {
    text(error, |failure| failure.operation.as_ptr())
}

/// The path of the failed operation; empty if the failure has none. It is never null, and valid until the error is freed.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_error_path(error: Handle<UbtrfsError>) -> Address<c_char> {
    text(error, |failure| failure.path.as_ptr())
}

/// Frees an error. A null pointer is ignored. Returns -EBADF for an error that was freed before.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_error_free(error: Handle<UbtrfsError>) -> c_int {
    status(|| if error.is_null() { Ok(()) } else { error.take().map(drop) })
}

/// Frees memory that a function of this library made: texts, contents, lists. A null pointer is ignored. Returns -EINVAL
/// for other memory, and for memory that was freed before.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_free(memory: OwnedAddress<c_void>) -> c_int {
    status(|| if memory.number() == 0 { Ok(()) } else { memory::free(memory) })
}

/// The version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_version() -> Address<c_char> {
    Address::of(VERSION.as_ptr().cast())
}

const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");

/// A text of an error. The table keeps the error, so the text stays when the borrow ends.
fn text(error: Handle<UbtrfsError>, choose: impl FnOnce(&CallFailure) -> *const c_char) -> Address<c_char> {
    let found = || -> CallResult<_> { Ok(Address::of(choose(&*error.get()?))) };
    value(Address::of(c"not an error, or freed already".as_ptr()), found)
}
