//! Runs long commands: shows progress on a terminal, and cancels on signals.
//!
//! - I1. The first SIGINT, SIGTERM or SIGHUP cancels the work, which then stops at a safe point. The second signal ends
//!   the program with its default action.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use ubtrfs_format::print::escaped_line;
use ubtrfs_transaction::Job;

use crate::common::{ProgressUnit, progress_style, progress_without_total};

/// Does long work, shows its progress in items, and cancels it on a signal (I1).
pub(crate) fn with_progress<T>(what: &'static str, work: impl FnOnce(&Job) -> T) -> T {
    run(progress_without_total(ProgressUnit::Items, what), ProgressUnit::Items, what, work)
}

/// Works like [`with_progress`], but the progress is in bytes.
pub(crate) fn with_progress_in_bytes<T>(what: &'static str, work: impl FnOnce(&Job) -> T) -> T {
    with_progress_by(progress_without_total(ProgressUnit::Bytes, what), what, work)
}

/// Works like [`with_progress`], but shows the progress in `bar`, in bytes.
pub(crate) fn with_progress_by<T>(bar: indicatif::ProgressBar, what: &'static str, work: impl FnOnce(&Job) -> T) -> T {
    run(bar, ProgressUnit::Bytes, what, work)
}

fn run<T>(bar: indicatif::ProgressBar, unit: ProgressUnit, what: &'static str, work: impl FnOnce(&Job) -> T) -> T {
    let job = Arc::new(Job::new());
    // If the handler cannot be installed, signals end the program by their default action.
    let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).ok().map(|mut signals| {
        let (handle, job) = (signals.handle(), Arc::clone(&job));
        let watch = thread::Builder::new().name("interrupt".to_owned()).spawn(move || {
            for signal in &mut signals {
                if job.progress().is_cancelled {
                    let _ = signal_hook::low_level::emulate_default_handler(signal);
                }
                job.cancel();
            }
        });
        (handle, watch)
    });
    let ended = AtomicBool::new(false);
    let done = thread::scope(|scope| {
        if std::io::stderr().is_terminal() {
            scope.spawn(|| show(&bar, unit, what, &job, &ended));
        }
        let done = work(&job);
        ended.store(true, Ordering::Release);
        // Wake the thread that shows progress, so that it notices the end.
        job.advance(0);
        done
    });
    if let Some((handle, watch)) = signals {
        handle.close();
        if let Ok(watch) = watch {
            let _ = watch.join();
        }
    }
    done
}

/// Shows progress until the work has ended: as a bar from the moment when the total is known.
fn show(bar: &indicatif::ProgressBar, unit: ProgressUnit, what: &'static str, job: &Job, ended: &AtomicBool) {
    let mut has_total = bar.length().is_some();
    while !ended.load(Ordering::Acquire) {
        let progress = job.wait_for_change(Duration::from_millis(200));
        if progress.total > 0 {
            if !has_total {
                has_total = true;
                bar.set_style(progress_style(unit, true));
            }
            bar.set_length(progress.total.max(progress.done));
        }
        bar.set_position(progress.done);
        if !progress.step.is_empty() {
            // The server may be a stranger, and the text goes to a terminal.
            bar.set_message(format!("{what}: {}", escaped_line(progress.step.as_bytes())));
        }
    }
    bar.finish_and_clear();
}
