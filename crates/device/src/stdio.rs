//! Which standard streams were closed when the program started.
//!
//! Rust opens /dev/null in place of a closed standard stream before `main`, so that no file gets its number by accident. From
//! then on, `prog >&-` looks like `prog >/dev/null`: the result is lost without an error. So this looks before.
//!
//! `.init_array` lists functions that the C runtime calls before `main`, with nothing else running.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU8, Ordering};

/// Bit N: descriptor N was closed.
static CLOSED: AtomicU8 = AtomicU8::new(0);

#[used]
#[allow(unsafe_code, reason = "the only place for a function that runs before main")]
// SAFETY: an entry of this section is a pointer to a function, which `note` is: it returns, does not unwind, needs nothing of
// Rust's runtime, and takes none of the arguments that the C runtime passes.
#[unsafe(link_section = ".init_array")]
static NOTE: extern "C" fn() = note;

extern "C" fn note() {
    for number in 0..3 {
        #[allow(unsafe_code, reason = "the number may be of no open file: that is the question")]
        // SAFETY: the descriptor is only asked about, and nothing here or elsewhere runs that could close it meanwhile.
        let stream = unsafe { BorrowedFd::borrow_raw(number) };
        if rustix::io::fcntl_getfd(stream) == Err(rustix::io::Errno::BADF) {
            CLOSED.fetch_or(1 << number, Ordering::Relaxed);
        }
    }
}

/// Whether standard input was closed at the start.
pub fn stdin_was_closed() -> bool {
    CLOSED.load(Ordering::Relaxed) & 1 != 0
}

/// Whether standard output was closed at the start.
pub fn stdout_was_closed() -> bool {
    CLOSED.load(Ordering::Relaxed) & 1 << 1 != 0
}
