//! Pointers of C as types. A function of C takes these types, so its own code needs no `unsafe`.
//!
//! Invariants:
//! - B1. A null pointer is an error where a value is needed, and a size over [`MAX_BYTES`] always.
//! - B2. No pointer needs an alignment: structs are copied.
//! - B3. Values that C writes into structs are numbers and pointers, so every bit pattern is valid.
//!
//! The program keeps the rest: a pointer that is not null points to as many bytes as the header says, for the time of the
//! call, and no other thread changes them meanwhile.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use rustix::io::Errno;

use crate::exports::error::UbtrfsError;
use crate::failure::{CallFailure, CallResult, E2BIG};
use crate::handles::{Handle, HandleKind};

/// The size of the largest object that a pointer can point to.
const MAX_BYTES: usize = isize::MAX.unsigned_abs();

/// A text that ends with a zero byte: `const char *`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct Text(*const c_char);

impl Text {
    /// The bytes; `None` for a null pointer.
    pub(crate) fn optional(&self) -> Option<&[u8]> {
        // SAFETY: the pointer is not null, and the program says that a text with its zero byte is there during the call.
        // The borrow ends with `self`, an argument of the call or a copy of a struct.
        (!self.0.is_null()).then(|| unsafe { CStr::from_ptr(self.0) }.to_bytes())
    }

    /// The bytes of a text that may not be missing.
    pub(crate) fn bytes(&self, what: &'static str) -> CallResult<&[u8]> {
        self.optional().ok_or_else(|| CallFailure::null(what))
    }

    /// The path that the text names.
    pub(crate) fn path(&self, what: &'static str) -> CallResult<&Path> {
        self.bytes(what).map(as_path)
    }

    /// The text as UTF-8.
    pub(crate) fn str(&self, what: &'static str) -> CallResult<Option<&str>> {
        let text = self.optional().map(std::str::from_utf8).transpose();
        text.map_err(|_invalid| CallFailure::argument(format!("{what} is not UTF-8")))
    }
}

/// The path of some bytes.
pub(crate) fn as_path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// An array of texts: `const char *const *`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct TextList(*const Text);

impl TextList {
    /// The paths; none of them may be null.
    pub(crate) fn paths(&self, nr: usize, what: &'static str) -> CallResult<Vec<&Path>> {
        // SAFETY: the program says that `nr` pointers are there, and `elements` checked the rest. Each is a text or null.
        let texts = unsafe { elements(self.0, nr, what)? };
        let path = |text: &Text| -> CallResult<&Path> {
            // SAFETY: as in `Text::optional`; the borrow ends with `self`.
            if text.0.is_null() {
                Err(CallFailure::null(what))
            } else {
                Ok(as_path(unsafe { CStr::from_ptr(text.0) }.to_bytes()))
            }
        };
        texts.iter().map(path).collect()
    }

    /// The texts as UTF-8; none of them may be null.
    pub(crate) fn strs(&self, nr: usize, what: &'static str) -> CallResult<Vec<&str>> {
        let not_utf8 = || CallFailure::argument(format!("{what}: a text is not UTF-8"));
        self.paths(nr, what)?.into_iter().map(|path| path.to_str().ok_or_else(not_utf8)).collect()
    }
}

/// An array of numbers: `const uint64_t *`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct NumberList(*const u64);

impl NumberList {
    /// The numbers.
    pub(crate) fn numbers(&self, nr: usize, what: &'static str) -> CallResult<Vec<u64>> {
        // SAFETY: the program says that `nr` numbers are there. Every bit pattern is one.
        unsafe { elements(self.0, nr, what) }
    }
}

/// Copies the elements of an array of C.
///
/// # Safety
/// `at` is null, or `nr` elements are there, for which every bit pattern is valid.
unsafe fn elements<T: Copy>(at: *const T, nr: usize, what: &'static str) -> CallResult<Vec<T>> {
    if nr == 0 {
        return Ok(Vec::new());
    }
    if at.is_null() {
        return Err(CallFailure::null(what));
    }
    if nr > MAX_ELEMENTS {
        return Err(CallFailure::argument(format!("{what}: {nr} elements are too many")));
    }
    // SAFETY: see above; an unaligned read needs no alignment (B2), and `MAX_ELEMENTS` keeps the sum in range.
    Ok((0..nr).map(|index| unsafe { at.add(index).read_unaligned() }).collect())
}

/// The number of elements that a list may have. Lists name devices or subvolumes.
const MAX_ELEMENTS: usize = 4096;

/// An array of handles: `ubtrfs_device *const *`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct HandleList<K>(*const Handle<K>);

impl<K: HandleKind> HandleList<K> {
    /// The objects, of which there is at least one.
    pub(crate) fn objects(self, nr: usize, what: &'static str) -> CallResult<Vec<Arc<K::Object>>> {
        if nr == 0 {
            return Err(CallFailure::argument(format!("{what} is empty")));
        }
        // SAFETY: the program says that `nr` handles are there. A handle is a number of any value.
        let handles = unsafe { elements(self.0, nr, what)? };
        handles.into_iter().map(Handle::get).collect()
    }
}

/// A copy of a file descriptor of the program, which keeps its own.
pub(crate) fn own_descriptor(fd: c_int) -> CallResult<OwnedFd> {
    if fd < 0 {
        return Err(CallFailure::new(Errno::BADF, format!("the file descriptor is {fd}")));
    }
    // SAFETY: the number is not negative, and the program says that it may be used during the call. It is only duplicated:
    // the system answers with EBADF if it is not open.
    let given = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(given.try_clone_to_owned()?)
}

/// Bytes that a function reads: `const void *`, with a length beside it.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct Memory(*const c_void);

impl Memory {
    /// The bytes. With a length of 0, the pointer may be null.
    pub(crate) fn bytes(&self, len: usize, what: &'static str) -> CallResult<&[u8]> {
        check_range(self.0.addr(), len, what)?;
        if len == 0 {
            return Ok(&[]);
        }
        // SAFETY: the pointer is not null, the program says that `len` bytes are there during the call, and their end is
        // in the range of addresses. Bytes need no alignment.
        Ok(unsafe { std::slice::from_raw_parts(self.0.cast(), len) })
    }
}

/// Room for bytes that a function writes: `void *`, with a length beside it.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct MemoryRoom(*mut c_void);

impl MemoryRoom {
    /// Whether the room can be used; its bytes are not touched.
    pub(crate) fn check(&self, len: usize, what: &'static str) -> CallResult<()> {
        check_range(self.0.addr(), len, what)
    }

    /// The first `len` bytes of the room.
    pub(crate) fn bytes(&mut self, len: usize, what: &'static str) -> CallResult<&mut [u8]> {
        check_range(self.0.addr(), len, what)?;
        if len == 0 {
            return Ok(&mut []);
        }
        // SAFETY: the pointer is not null, the program says that it may write `len` bytes there and that no other thread
        // uses them during the call. To this library, memory of the program is initialized: any byte is a valid `u8`.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0.cast(), len) })
    }
}

fn check_range(address: usize, len: usize, what: &'static str) -> CallResult<()> {
    if len > MAX_BYTES || address.checked_add(len).is_none() {
        return Err(CallFailure::argument(format!("{what}: {len} bytes are more than memory can have")));
    }
    if address == 0 && len > 0 { Err(CallFailure::null(what)) } else { Ok(()) }
}

/// A place for a result: `T *`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct ResultPlace<T>(*mut T);

impl<T> ResultPlace<T> {
    #[cfg(test)]
    pub(crate) fn of(place: *mut T) -> Self {
        Self(place)
    }

    /// Fails if the place is missing.
    pub(crate) fn needed(&self, what: &'static str) -> CallResult<()> {
        if self.0.is_null() { Err(CallFailure::null(what)) } else { Ok(()) }
    }

    /// Whether there is a place.
    pub(crate) fn is_given(&self) -> bool {
        !self.0.is_null()
    }

    /// Writes the result, if there is a place for it.
    pub(crate) fn set(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: the program says that it may write a `T` there. The old value is no value of Rust and needs no drop.
            unsafe { self.0.write_unaligned(value) }
        }
    }
}

/// The place for the error of a call: `ubtrfs_error **`.
pub type ErrorPlace = ResultPlace<Handle<UbtrfsError>>;

/// A struct that begins with its size, so that it can grow: a library takes structs of older and of newer programs.
///
/// # Safety
/// The struct is `repr(C)` and begins with its size as `usize`. Every bit pattern of its fields is valid.
pub unsafe trait GrowingStruct: Copy {
    /// The name in C, for messages.
    const NAME: &'static str;
}

/// Options: `const T *`. Null stands for options that are all zero.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct Given<T>(*const T);

impl<T: GrowingStruct> Given<T> {
    /// A copy of the struct, as [`read`](Self::read); `None` for a null pointer.
    pub(crate) fn optional(&self) -> CallResult<Option<T>> {
        if self.0.is_null() { Ok(None) } else { self.read().map(Some) }
    }

    /// A copy of the struct. Fields that the program does not know are zero.
    pub(crate) fn read(&self) -> CallResult<T> {
        let mut value = MaybeUninit::<T>::zeroed();
        if !self.0.is_null() {
            // SAFETY: every such struct begins with its size (`GrowingStruct`).
            let size = unsafe { self.0.cast::<usize>().read_unaligned() };
            if !(size_of::<usize>()..=MAX_STRUCT_BYTES).contains(&size) {
                let problem =
                    format!("the first field of {} is not its size; use the macro that initializes it", T::NAME);
                return Err(CallFailure::argument(problem));
            }
            let known = size.min(size_of::<T>());
            // SAFETY: the program says that the struct has `size` bytes. `value` has at least `known` bytes.
            unsafe { ptr::copy_nonoverlapping(self.0.cast::<u8>(), value.as_mut_ptr().cast(), known) };
            // SAFETY: as above.
            let rest = unsafe { std::slice::from_raw_parts(self.0.cast::<u8>().add(known), size - known) };
            if rest.iter().any(|byte| *byte != 0) {
                let problem = format!("{} has fields that this version of the library does not know", T::NAME);
                return Err(CallFailure::new(E2BIG, problem));
            }
        }
        // SAFETY: all bytes are zero or copied, and every bit pattern is valid (`GrowingStruct`).
        Ok(unsafe { value.assume_init() })
    }
}

/// The largest size that a struct of options may have.
const MAX_STRUCT_BYTES: usize = 4096;

/// The address of something that this library keeps: `const T *`. It is handed out, and never followed.
#[repr(transparent)]
#[derive(Debug)]
pub struct Address<T>(*const T);

impl<T> Address<T> {
    pub(crate) const NULL: Self = Self(ptr::null());

    pub(crate) fn of(value: *const T) -> Self {
        Self(value)
    }

    /// The address of an array, which is null for an empty one.
    pub(crate) fn of_list(list: &[T]) -> Self {
        if list.is_empty() { Self::NULL } else { Self(list.as_ptr()) }
    }
}

impl<T> Clone for Address<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Address<T> {}

// SAFETY: it is only a number here.
unsafe impl<T> Send for Address<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Address<T> {}

/// The address of memory that the program gives back: `T *`.
#[repr(transparent)]
#[derive(Debug)]
pub struct OwnedAddress<T>(*mut T);

impl<T> OwnedAddress<T> {
    pub(crate) const NULL: Self = Self(ptr::null_mut());

    pub(crate) fn of(value: *mut T) -> Self {
        Self(value)
    }

    pub(crate) fn number(&self) -> usize {
        self.0.addr()
    }
}

impl<T> Clone for OwnedAddress<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for OwnedAddress<T> {}

/// A pointer of the program that its callbacks get back: `void *`. It is never followed.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct UserPointer(*mut c_void);

// SAFETY: it is only a number here. The header says which threads call a callback.
unsafe impl Send for UserPointer {}
// SAFETY: as above.
unsafe impl Sync for UserPointer {}
