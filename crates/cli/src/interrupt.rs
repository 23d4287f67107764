//! Removes temporary files when a command is interrupted, gives the terminal back, and tells what else the command leaves.
//!
//! Invariants:
//! - I1. The signal handler keeps what [`remove_all`] returns until the program ends, so no temporary file is made after
//!   the removal.
//! - I2. After the removal, the signal ends the program with its default action. A signal that was ignored at the
//!   program's start stays ignored. Ctrl-C while another program has the terminal is for that program alone.

use std::sync::{Mutex, MutexGuard, PoisonError};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use ubtrfs_archive::unfinished::remove_all;

use crate::common::warn;

/// What an interrupt has to do besides removing files.
#[derive(Debug, Default)]
struct InterruptPlan {
    /// The line to print when the program is interrupted.
    left: Option<String>,
    /// Gives the terminal back.
    restore: Option<fn()>,
    /// Whether another program, which this one has started, has the terminal.
    is_lent: bool,
}

static PLAN: Mutex<InterruptPlan> = Mutex::new(InterruptPlan { left: None, restore: None, is_lent: false });

/// Starts a thread that removes the temporary files when SIGINT, SIGTERM or SIGHUP arrives. Commands that handle these
/// signals themselves must not call this function.
pub(crate) fn watch() {
    let ignored = ignored_signals();
    let signals = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0);
    // If the handler cannot be installed, signals end the program by their default action.
    let Ok(mut signals) = Signals::new(signals) else { return };
    let end = move || {
        for signal in &mut signals {
            let plan = lock();
            if signal == SIGINT && plan.is_lent {
                continue;
            }
            let _removed = remove_all();
            if let Some(restore) = plan.restore {
                restore();
            }
            if let Some(left) = &plan.left {
                warn(left);
            }
            // The call does not return, because the signal ends the program (I1, I2).
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    let _ = std::thread::Builder::new().name("interrupt".to_owned()).spawn(end);
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

fn lock() -> MutexGuard<'static, InterruptPlan> {
    PLAN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Mask of the signals that this process ignores.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
