//! Work on several devices at once: [`fan_out`] with new threads, [`ReadyThreads`] with threads that wait for work.
//!
//! Invariant:
//! - I1. All work has ended when the call returns.

use std::sync::mpsc::{self, Sender};
use std::thread;

use parking_lot::Mutex;
use ubtrfs_error::{Helper, start_helper};

/// Calls `work` with each item, at the same time, and returns the results in order. A single item is worked on in the
/// calling thread, and so are the last of several, and items for which the system starts no thread.
pub(crate) fn fan_out<T: Send, R: Send>(mut items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let Some(last) = items.pop() else { return Vec::new() };
    if items.is_empty() {
        return vec![work(last)];
    }
    thread::scope(|scope| {
        let work = &work;
        let helpers: Vec<_> = items.into_iter().map(|item| start_helper(scope, move || work(item))).collect();
        let result = work(last);
        helpers.into_iter().map(Helper::join).chain(std::iter::once(result)).collect()
    })
}

type Work = Box<dyn FnOnce() + Send>;

/// Threads that are kept for the next work. A new thread takes about 50 us until it works, which is long beside a flush
/// of 200 us. Two flushes of one disk are fast only if they begin at the same moment.
///
/// The threads end when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct ReadyThreads {
    idle: Mutex<Vec<Sender<Work>>>,
}

impl ReadyThreads {
    /// Calls `work` with each item, at the same time, and returns the results in order. The calling thread works on the
    /// last item.
    pub(crate) fn fan_out<T: Send + 'static, R: Send + 'static>(
        &self,
        mut items: Vec<T>,
        work: impl Fn(T) -> R + Clone + Send + 'static,
    ) -> Vec<R> {
        let Some(last) = items.pop() else { return Vec::new() };
        let (sender, receiver) = mpsc::channel();
        let nr_tasks = items.len();
        let mut threads = Vec::with_capacity(nr_tasks);
        for (index, item) in items.into_iter().enumerate() {
            let (work, sender) = (work.clone(), sender.clone());
            let task = move || {
                let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(item)));
                // The receiver waits for all results (I1).
                let _received = sender.send((index, result));
            };
            threads.extend(self.start(Box::new(task)));
        }
        drop(sender);
        let last = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(last)));
        let mut results: Vec<_> = receiver.iter().collect();
        assert_eq!(results.len(), nr_tasks, "I1: a thread ended without a result");
        self.idle.lock().extend(threads);
        results.sort_by_key(|(index, _)| *index);
        let results = results.into_iter().map(|(_, result)| result).chain([last]);
        results.map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    }

    /// Gives the task to an idle thread or a new one. Returns the thread's queue, to be kept when the task has ended. If
    /// the system starts no thread, the task is done on return.
    fn start(&self, task: Work) -> Option<Sender<Work>> {
        let idle = self.idle.lock().pop();
        let Some(queue) = idle.or_else(|| new_thread(thread::Builder::new())) else {
            task();
            return None;
        };
        let sent = queue.send(task);
        assert!(sent.is_ok(), "a thread ends only when its queue is dropped, because its tasks catch panics");
        Some(queue)
    }
}

/// Starts a thread that does the tasks of a queue.
fn new_thread(builder: thread::Builder) -> Option<Sender<Work>> {
    let (queue, tasks) = mpsc::channel::<Work>();
    builder.spawn(move || tasks.into_iter().for_each(|task| task())).ok()?;
    Some(queue)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier};

    use super::*;

    #[test]
    fn all_items_are_worked_on_at_once_and_results_keep_their_order() {
        let meeting = Barrier::new(4);
        let doubled = fan_out(vec![1, 2, 3, 4], |number| {
            // Returns only when all four threads are here.
            meeting.wait();
            number * 2
        });
        assert_eq!(doubled, [2, 4, 6, 8]);
        assert_eq!(fan_out(vec![7], |number| number), [7]);
        assert!(fan_out(Vec::<i32>::new(), |number| number).is_empty());
    }

    #[test]
    fn ready_threads_work_at_once_and_are_used_again() {
        let threads = ReadyThreads::default();
        for _ in 0..3 {
            let meeting = Arc::new(Barrier::new(4));
            let doubled = threads.fan_out(vec![1, 2, 3, 4], move |number| {
                meeting.wait();
                number * 2
            });
            assert_eq!(doubled, [2, 4, 6, 8]);
            assert_eq!(threads.idle.lock().len(), 3);
        }
        assert_eq!(threads.fan_out(vec![7], |number| number), [7]);
        assert!(threads.fan_out(Vec::<i32>::new(), |number| number).is_empty());
    }

    #[test]
    fn a_panic_of_work_reaches_the_caller_and_leaves_the_threads_usable() {
        let threads = ReadyThreads::default();
        for bad in [0, 1] {
            let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                threads.fan_out(vec![0, 1], move |number| assert_ne!(number, bad, "wanted"))
            }));
            assert!(panicked.is_err());
        }
        assert_eq!(threads.fan_out(vec![1, 2], |number| number), [1, 2]);
        assert_eq!(threads.idle.lock().len(), 1);
    }
}
