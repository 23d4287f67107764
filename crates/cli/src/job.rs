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
use ubtrfs_transaction::Job;

/// Does long work, shows its progress, and cancels it on a signal (I1).
pub(crate) fn with_progress<T>(what: &'static str, work: impl FnOnce(&Job) -> T) -> T {
    with_progress_by(crate::common::progress_units(what), what, work)
}

/// Works like [`with_progress`], but shows the progress in `bar`.
pub(crate) fn with_progress_by<T>(bar: indicatif::ProgressBar, what: &'static str, work: impl FnOnce(&Job) -> T) -> T {
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
            scope.spawn(|| show(&bar, what, &job, &ended));
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

fn show(bar: &indicatif::ProgressBar, what: &'static str, job: &Job, ended: &AtomicBool) {
    while !ended.load(Ordering::Acquire) {
        let progress = job.wait_for_change(Duration::from_millis(200));
        bar.set_length(progress.total.max(progress.done));
        bar.set_position(progress.done);
        if !progress.step.is_empty() {
            bar.set_message(format!("{what}: {}", progress.step));
        }
    }
    bar.finish_and_clear();
}
