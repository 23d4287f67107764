//! Threads that help with work. The system may refuse a thread, at a limit of processes or memory: then the caller does
//! that part of the work itself.

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Builder, Scope, ScopedJoinHandle};

/// Work that another thread does, or [`Helper::join`] if there is no thread for it.
#[derive(Debug)]
pub struct Helper<'scope, T>(HelperPlace<'scope, T>);

enum HelperPlace<'scope, T> {
    Thread(ScopedJoinHandle<'scope, Option<T>>),
    Caller(Box<dyn FnOnce() -> Option<T> + Send + 'scope>),
}

impl<T> std::fmt::Debug for HelperPlace<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Thread(_) => "a thread",
            Self::Caller(_) => "the caller",
        })
    }
}

impl<T> Helper<'_, T> {
    /// Whether a thread does the work. Otherwise nothing is done before [`Self::join`].
    pub fn is_thread(&self) -> bool {
        matches!(self.0, HelperPlace::Thread(_))
    }

    /// Waits for the work, or does it. Resumes its panic.
    pub fn join(self) -> T {
        let done = match self.0 {
            HelperPlace::Thread(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            HelperPlace::Caller(work) => work(),
        };
        match done {
            Some(result) => result,
            None => unreachable!("the work is taken once"),
        }
    }
}

/// Starts a thread for `work`, if the system starts one.
pub fn start_helper<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Helper<'scope, T> {
    start_with(Builder::new(), scope, work)
}

fn start_with<'scope, T: Send + 'scope>(
    builder: Builder,
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Helper<'scope, T> {
    // A thread that does not start takes its closure with it.
    let work = Arc::new(Mutex::new(Some(work)));
    let of_thread = Arc::clone(&work);
    Helper(match builder.spawn_scoped(scope, move || take_and_run(&of_thread)) {
        Ok(thread) => HelperPlace::Thread(thread),
        Err(_) => HelperPlace::Caller(Box::new(move || take_and_run(&work))),
    })
}

fn take_and_run<T>(work: &Mutex<Option<impl FnOnce() -> T>>) -> Option<T> {
    let taken = work.lock().unwrap_or_else(PoisonError::into_inner).take();
    taken.map(|work| work())
}

/// Does each part of some work in a thread of its own, and returns the results in order.
pub fn side_by_side<T: Send, W: FnOnce() -> T + Send>(works: impl IntoIterator<Item = W>) -> Vec<T> {
    thread::scope(|scope| {
        let helpers: Vec<_> = works.into_iter().map(|work| start_helper(scope, work)).collect();
        helpers.into_iter().map(Helper::join).collect()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    /// No system has so much memory for a stack.
    fn refused() -> Builder {
        Builder::new().stack_size(1 << 60)
    }

    #[test]
    fn parts_are_worked_on_at_once_and_results_keep_their_order() {
        let (meeting, text) = (Barrier::new(3), "text".to_owned());
        let works = (0..3).map(|number| {
            let (meeting, text) = (&meeting, &text);
            move || {
                meeting.wait();
                (number, text.len())
            }
        });
        assert_eq!(side_by_side(works), [(0, 4), (1, 4), (2, 4)]);
    }

    #[test]
    fn the_caller_does_the_work_if_there_is_no_thread() {
        let caller = thread::current().id();
        thread::scope(|scope| {
            let helper = start_with(refused(), scope, || thread::current().id());
            assert!(!helper.is_thread());
            assert_eq!(helper.join(), caller);
            let helper = start_helper(scope, || thread::current().id());
            assert!(helper.is_thread());
            assert_ne!(helper.join(), caller);
        });
    }

    #[test]
    fn a_panic_reaches_the_caller() {
        for builder in [Builder::new(), refused()] {
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                thread::scope(|scope| start_with(builder, scope, || assert_ne!(1, 1, "wanted")).join());
            }));
            assert!(panicked.is_err());
        }
    }
}
