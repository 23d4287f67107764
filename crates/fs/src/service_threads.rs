//! Threads that work for a filesystem while it is open. They hold it weakly, so that dropping the last handle ends them;
//! what tells them to stop is their owner's.

use std::thread::JoinHandle;

use parking_lot::Mutex;

/// Threads that do the same work, under one name.
#[derive(Debug, Default)]
pub(crate) struct ServiceThreads {
    handles: Mutex<Vec<JoinHandle<()>>>,
}

impl ServiceThreads {
    /// Starts `count` more threads that run `work`; fewer where the system has no more, which is only logged, because
    /// nothing depends on them.
    pub(crate) fn start(&self, name: &str, count: usize, work: impl FnOnce() + Clone + Send + 'static) {
        for _ in 0..count {
            match std::thread::Builder::new().name(name.to_owned()).spawn(work.clone()) {
                Ok(handle) => self.handles.lock().push(handle),
                Err(error) => tracing::warn!("a thread \"{name}\" less: {error}"),
            }
        }
    }

    pub(crate) fn is_running(&self) -> bool {
        !self.handles.lock().is_empty()
    }

    /// Waits for the threads, which were told to stop. The caller may be one of them.
    pub(crate) fn join(&self) {
        let handles = std::mem::take(&mut *self.handles.lock());
        for handle in handles {
            let name = handle.thread().name().unwrap_or_default().to_owned();
            if handle.thread().id() != std::thread::current().id() && handle.join().is_err() {
                tracing::error!("a thread \"{name}\" panicked");
            }
        }
    }
}
