//! Calls of functions in C: devices, streams, archives, problems of a check.
//!
//! Invariants:
//! - C1. No lock of this crate is held during a call, apart from the gate of a stream that only its reader uses.
//! - C2. A result other than 0 is a negative errno. Other numbers count as EIO.
//!
//! The program keeps the rest: its functions may be called from any thread, write only to the memory that they are given,
//! and return; they neither throw exceptions nor jump out.

use std::ffi::{CStr, CString, c_int};
use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::io::Errno;
use ubtrfs::{Device, Problem};

use crate::border::{Address, UserPointer};
use crate::exports::archive::UbtrfsMessageFn;
use crate::exports::check::{UbtrfsProblem, UbtrfsProblemFn};
use crate::exports::device::{UBTRFS_DEVICE_READ_ONLY, UbtrfsDeviceOptions};
use crate::exports::stream::{UbtrfsReadFn, UbtrfsWriteFn};
use crate::failure::{CallFailure, CallResult, c_text};

/// The result of a function in C (C2).
/// EINTR would make the callers of streams repeat the call, so it ends the operation as a cancellation does.
fn result_of(status: c_int) -> io::Result<()> {
    match status {
        0 => Ok(()),
        _ if status == -Errno::INTR.raw_os_error() => Err(Errno::CANCELED.into()),
        -4095..0 => Err(io::Error::from_raw_os_error(-status)),
        _ => Err(Errno::IO.into()),
    }
}

/// A device whose bytes the program stores.
pub(crate) struct DeviceOfProgram {
    given: UbtrfsDeviceOptions,
    name: String,
}

impl fmt::Debug for DeviceOfProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceOfProgram").field("name", &self.name).finish_non_exhaustive()
    }
}

// SAFETY: the functions may be called from any thread, with `user` as their first argument. Nothing here reads through the
// pointers of `given`; `name` is a copy.
unsafe impl Send for DeviceOfProgram {}
// SAFETY: as above; the functions may be called by several threads at the same time.
unsafe impl Sync for DeviceOfProgram {}

impl DeviceOfProgram {
    pub(crate) fn new(given: &UbtrfsDeviceOptions) -> CallResult<Self> {
        let writes = given.flags & UBTRFS_DEVICE_READ_ONLY == 0;
        if given.read_at.is_none() {
            return Err(CallFailure::null("read_at"));
        }
        if writes && (given.write_at.is_none() || given.flush.is_none()) {
            return Err(CallFailure::null("write_at or flush of a device that is not read-only"));
        }
        let name = given.name.optional().map_or("a device of the program".into(), String::from_utf8_lossy);
        Ok(Self { name: name.into_owned(), given: *given })
    }

    fn check_range(&self, offset: u64, len: usize, kind: io::ErrorKind) -> io::Result<()> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.given.size_bytes => Ok(()),
            _ => Err(io::Error::new(kind, format!("{len} bytes at {offset} end past {} bytes", self.given.size_bytes))),
        }
    }
}

impl Device for DeviceOfProgram {
    fn len_bytes(&self) -> u64 {
        self.given.size_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.check_range(offset, buf.len(), io::ErrorKind::UnexpectedEof)?;
        let Some(read_at) = self.given.read_at else { return Err(io::ErrorKind::Unsupported.into()) };
        // SAFETY: `buf` is valid for its length, and nothing else uses it during the call.
        result_of(unsafe { read_at(self.given.user, buf.as_mut_ptr().cast(), buf.len(), offset) })
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.check_range(offset, buf.len(), io::ErrorKind::WriteZero)?;
        let Some(write_at) = self.given.write_at else { return Err(Errno::ROFS.into()) };
        // SAFETY: `buf` is valid for its length, and nothing changes it during the call.
        result_of(unsafe { write_at(self.given.user, buf.as_ptr().cast(), buf.len(), offset) })
    }

    fn flush(&self) -> io::Result<()> {
        let Some(flush) = self.given.flush else { return Ok(()) };
        // SAFETY: it gets the program's own pointer.
        result_of(unsafe { flush(self.given.user) })
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let Some(discard) = self.given.discard else { return Err(io::ErrorKind::Unsupported.into()) };
        // SAFETY: it gets the program's own pointer.
        result_of(unsafe { discard(self.given.user, offset, len_bytes) })
    }

    fn can_discard(&self) -> bool {
        self.given.discard.is_some()
    }

    fn describe(&self) -> String {
        self.name.clone()
    }

    fn is_read_only(&self) -> bool {
        self.given.flags & UBTRFS_DEVICE_READ_ONLY != 0
    }
}

impl Drop for DeviceOfProgram {
    fn drop(&mut self) {
        if let Some(release) = self.given.release {
            // SAFETY: it gets the program's own pointer. No function of the device is called after this.
            unsafe { release(self.given.user) }
        }
    }
}

/// Writes a stream with a function of the program.
#[derive(Debug)]
pub(crate) struct CallbackWriter {
    write: UbtrfsWriteFn,
    user: UserPointer,
}

impl CallbackWriter {
    pub(crate) fn new(write: UbtrfsWriteFn, user: UserPointer) -> CallResult<Self> {
        if write.is_none() { Err(CallFailure::null("write")) } else { Ok(Self { write, user }) }
    }
}

impl Write for CallbackWriter {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if let Some(write) = self.write
            && !buf.is_empty()
        {
            // SAFETY: `buf` is valid for its length, and nothing changes it during the call.
            result_of(unsafe { write(self.user, buf.as_ptr().cast(), buf.len()) })?;
        }
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads a stream with a function of the program.
#[derive(Debug)]
pub(crate) struct CallbackReader {
    read: UbtrfsReadFn,
    user: UserPointer,
}

impl CallbackReader {
    pub(crate) fn new(read: UbtrfsReadFn, user: UserPointer) -> CallResult<Self> {
        if read.is_none() { Err(CallFailure::null("read")) } else { Ok(Self { read, user }) }
    }
}

impl Read for CallbackReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let Some(read) = self.read else { return Ok(0) };
        if buf.is_empty() {
            return Ok(0);
        }
        let mut nr_read = 0;
        // SAFETY: `buf` is valid for its length and `nr_read` for a number, and nothing else uses them during the call.
        result_of(unsafe { read(self.user, buf.as_mut_ptr().cast(), buf.len(), &raw mut nr_read) })?;
        // More bytes than there is room for are no bytes that can be trusted.
        if nr_read > buf.len() { Err(Errno::IO.into()) } else { Ok(nr_read) }
    }
}

/// Tells the program a problem that a check found.
pub(crate) fn tell_problem(tell: UbtrfsProblemFn, user: UserPointer, problem: &Problem) {
    let Some(tell) = tell else { return };
    let (code, text): (CString, CString) = (c_text(problem.code.to_string()), c_text(problem.to_string()));
    let shown = UbtrfsProblem {
        code: Address::of(code.as_ptr()),
        text: Address::of(text.as_ptr()),
        tree: problem.place.tree.map_or(0, |tree| tree.0),
        bytenr: problem.place.bytenr.unwrap_or(0),
        is_error: problem.code.is_error().into(),
        reserved: 0,
    };
    // SAFETY: the struct and its texts live until the call returns.
    unsafe { tell(user, &raw const shown) }
}

/// Tells the program what an import or an export leaves out.
#[derive(Debug)]
pub(crate) struct MessageTeller {
    tell: UbtrfsMessageFn,
    user: UserPointer,
}

impl MessageTeller {
    pub(crate) fn new(tell: UbtrfsMessageFn, user: UserPointer) -> Self {
        Self { tell, user }
    }

    pub(crate) fn tell(&self, text: &CStr) {
        if let Some(tell) = self.tell {
            // SAFETY: the text lives until the call returns.
            unsafe { tell(self.user, text.as_ptr()) }
        }
    }
}

/// Ends the reading of a stream with a call. A thread of an import that ended early may read on for a moment, and must not
/// call the program then.
#[derive(Debug)]
pub(crate) struct ReaderGate(Arc<Mutex<Option<CallbackReader>>>);

/// Reads until its gate is closed; then it is at the end.
#[derive(Debug)]
pub(crate) struct GatedReader(Arc<Mutex<Option<CallbackReader>>>);

impl ReaderGate {
    pub(crate) fn new(reader: CallbackReader) -> Self {
        Self(Arc::new(Mutex::new(Some(reader))))
    }

    pub(crate) fn reader(&self) -> GatedReader {
        GatedReader(Arc::clone(&self.0))
    }
}

impl Drop for ReaderGate {
    /// Waits for a read that runs.
    fn drop(&mut self) {
        *self.0.lock() = None;
    }
}

impl Read for GatedReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.lock().as_mut().map_or(Ok(0), |reader| reader.read(buf))
    }
}
