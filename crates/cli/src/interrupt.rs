//! Removes temporary files when a command is interrupted, gives the terminal back, and tells what else the command leaves.
//!
//! Invariants:
//! - I1. A temporary file is made and recorded in one step under the lock. The signal handler keeps the lock until
//!   the program ends, so no file is made after the recorded files are removed.
//! - I2. After the removal, the signal ends the program with its default action. A signal that was ignored at the
//!   program's start stays ignored. Ctrl-C while another program has the terminal is for that program alone.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::AtFlags;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::common::warn;

/// A recorded temporary file. The file is removed if the program is interrupted before this value is dropped.
#[derive(Debug)]
pub(crate) struct RegisteredFile(u64);

#[derive(Debug, Default)]
struct UnfinishedFiles {
    next: u64,
    noted: Vec<(u64, OwnedFd, String)>,
    /// The line to print when the program is interrupted.
    left: Option<String>,
    /// Gives the terminal back.
    restore: Option<fn()>,
    /// Whether another program, which this one has started, has the terminal.
    is_lent: bool,
}

static FILES: Mutex<UnfinishedFiles> =
    Mutex::new(UnfinishedFiles { next: 0, noted: Vec::new(), left: None, restore: None, is_lent: false });

/// Starts a thread that removes the recorded files when SIGINT, SIGTERM or SIGHUP arrives. Commands that handle these
/// signals themselves must not call this function.
pub(crate) fn watch() {
    let ignored = ignored_signals();
    let signals = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0);
    // If the handler cannot be installed, signals end the program by their default action.
    let Ok(mut signals) = Signals::new(signals) else { return };
    let remove_all = move || {
        for signal in &mut signals {
            let files = lock();
            if signal == SIGINT && files.is_lent {
                continue;
            }
            for (_, dir, name) in &files.noted {
                let _ = rustix::fs::unlinkat(dir, name.as_str(), AtFlags::empty());
            }
            if let Some(restore) = files.restore {
                restore();
            }
            if let Some(left) = &files.left {
                warn(left);
            }
            // The call does not return, because the signal ends the program (I1, I2).
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    let _ = std::thread::Builder::new().name("interrupt".to_owned()).spawn(remove_all);
}

/// Sets the line that tells what an interrupted command leaves; `None` once the command is complete.
pub(crate) fn set_left(left: Option<String>) {
    lock().left = left;
}

/// Sets the function that gives the terminal back when the program is interrupted.
pub(crate) fn set_restore(restore: Option<fn()>) {
    lock().restore = restore;
}

/// Calls `run`, which starts another program on the terminal and waits for its end.
pub(crate) fn while_lent<T>(run: impl FnOnce() -> T) -> T {
    lock().is_lent = true;
    let done = run();
    lock().is_lent = false;
    done
}

/// Makes a temporary file and records it (I1).
pub(crate) fn make<T, E>(
    dir: &OwnedFd,
    name: &str,
    make: impl FnOnce() -> Result<T, E>,
) -> Result<(T, Option<RegisteredFile>), E> {
    let mut files = lock();
    let made = make()?;
    // If the directory handle cannot be duplicated, the file is not recorded. The only harm is that an interrupt does
    // not remove the file.
    let noted = dir.try_clone().ok().map(|dir| {
        let id = files.next;
        files.next += 1;
        files.noted.push((id, dir, name.to_owned()));
        RegisteredFile(id)
    });
    Ok((made, noted))
}

impl Drop for RegisteredFile {
    fn drop(&mut self) {
        lock().noted.retain(|(id, ..)| *id != self.0);
    }
}

fn lock() -> MutexGuard<'static, UnfinishedFiles> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Mask of the signals that this process ignores.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
