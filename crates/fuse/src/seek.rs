//! SEEK_DATA and SEEK_HOLE on files whose newest data is still in the kernel's page cache.
//!
//! The kernel asks for data and holes without handing over its dirty pages first, so a file that is being written would
//! look like a hole, and a program that copies only data would lose it. While someone has the file open for writing
//! (nobody else can have dirty pages: closing writes them back), the kernel is told to give up its pages before the
//! question is answered.
//!
//! K1. Giving up pages makes the kernel send write requests and wait for them. So it never happens on a thread that
//!     takes requests, but on one of its own.

use std::collections::HashMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread;

use fuser::{INodeNo, Notifier};
use parking_lot::Mutex;

/// Who has which file open for writing, and the thread of K1.
#[derive(Debug)]
pub(crate) struct Seeker {
    writers: Mutex<HashMap<u64, u32>>,
    jobs: Mutex<Sender<Job>>,
    notifier: Arc<OnceLock<Notifier>>,
}

struct Job {
    node: u64,
    answer: Box<dyn FnOnce() + Send>,
}

impl Seeker {
    /// `notifier` is set once the session exists. The thread ends with this value.
    pub(crate) fn start(notifier: Arc<OnceLock<Notifier>>) -> std::io::Result<Self> {
        let (sender, receiver) = channel::<Job>();
        let kept = notifier.clone();
        thread::Builder::new().name("seek".into()).spawn(move || {
            for job in receiver {
                if let Some(notifier) = notifier.get()
                    && let Err(error) = notifier.inval_inode(INodeNo(job.node), 0, 0)
                {
                    tracing::debug!("node {}: the kernel keeps its pages: {error}", job.node);
                }
                (job.answer)();
            }
        })?;
        Ok(Self { writers: Mutex::default(), jobs: Mutex::new(sender), notifier: kept })
    }

    /// Has the kernel forget attributes that changed by more than the request said. Waits for nothing, unlike K1: a
    /// negative offset leaves the pages alone.
    pub(crate) fn attributes_changed(&self, node: u64) {
        if let Some(notifier) = self.notifier.get()
            && let Err(error) = notifier.inval_inode(INodeNo(node), -1, 0)
        {
            tracing::debug!("node {node}: the kernel keeps its attributes: {error}");
        }
    }

    /// A file was opened for writing.
    pub(crate) fn opened(&self, node: u64) {
        *self.writers.lock().entry(node).or_default() += 1;
    }

    /// Such an open ended.
    pub(crate) fn released(&self, node: u64) {
        let mut writers = self.writers.lock();
        if let Some(count) = writers.get_mut(&node) {
            *count -= 1;
            if *count == 0 {
                writers.remove(&node);
            }
        }
    }

    /// Runs `answer` when the kernel's dirty pages of the file have arrived here: at once if there can be none.
    pub(crate) fn answer_with_all_data(&self, node: u64, answer: impl FnOnce() + Send + 'static) {
        if !self.writers.lock().contains_key(&node) {
            return answer();
        }
        let job = Job { node, answer: Box::new(answer) };
        let unsent = self.jobs.lock().send(job).err();
        if let Some(unsent) = unsent {
            (unsent.0.answer)();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn the_answer_waits_only_for_files_open_for_writing() {
        let seeker = Seeker::start(Arc::default()).unwrap();
        let answers = Arc::new(AtomicU32::new(0));
        let count = |answers: &Arc<AtomicU32>| {
            let answers = answers.clone();
            move || {
                answers.fetch_add(1, Ordering::SeqCst);
            }
        };
        seeker.answer_with_all_data(300, count(&answers));
        assert_eq!(answers.load(Ordering::SeqCst), 1, "answered at once");
        seeker.opened(300);
        seeker.opened(300);
        seeker.released(300);
        assert!(seeker.writers.lock().contains_key(&300));
        let (sender, receiver) = channel();
        seeker.answer_with_all_data(300, move || sender.send(()).unwrap_or_default());
        receiver.recv().unwrap();
        seeker.released(300);
        assert!(seeker.writers.lock().is_empty());
    }
}
