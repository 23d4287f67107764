//! Descriptors that the process inherited: records which standard streams were closed, and sets close-on-exec on all
//! other descriptors.
//!
//! Before `main`, Rust opens /dev/null in place of each closed standard stream, so that no other file gets the stream's
//! number. After that, `prog >&-` cannot be distinguished from `prog >/dev/null`, and the output of `prog` would be
//! lost without an error. So this module looks at the streams before Rust's startup code runs.
//!
//! `.init_array` lists functions that the C runtime calls before `main`, on the only thread.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU8, Ordering};

/// Bit N is set if descriptor N was closed.
static CLOSED: AtomicU8 = AtomicU8::new(0);

#[used]
#[allow(unsafe_code, reason = "the only place for a function that runs before main")]
// SAFETY: entries of this section are pointers to functions, and `note` is one. `note` returns, does not unwind, needs
// no part of Rust's runtime, and ignores the arguments that the C runtime passes.
#[unsafe(link_section = ".init_array")]
static NOTE: extern "C" fn() = note;

extern "C" fn note() {
    for number in 0..3 {
        #[allow(unsafe_code, reason = "the number may belong to no open file")]
        // SAFETY: the descriptor is only queried, and no other code runs that could close it.
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

/// Sets close-on-exec on all open files of this process except the standard streams. Files that the process opened
/// itself have the flag already; inherited files do not.
pub fn keep_files_from_children() {
    let open: Vec<i32> = match std::fs::read_dir("/proc/self/fd") {
        Ok(entries) => entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect(),
        Err(_) => (3..MAX_FILES).collect(),
    };
    for number in open.into_iter().filter(|number| *number > 2) {
        #[allow(unsafe_code, reason = "the number may belong to no open file")]
        // SAFETY: only the descriptor's flag is set. If another thread closed the descriptor, the call fails. If the
        // number was reused for a file that this process opened, that file has the flag already.
        let file = unsafe { BorrowedFd::borrow_raw(number) };
        let _ = rustix::io::fcntl_setfd(file, rustix::io::FdFlags::CLOEXEC);
    }
}

/// If /proc is not available, all descriptor numbers below this limit are tried.
const MAX_FILES: i32 = 1024;
