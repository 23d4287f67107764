//! Background threads of an open filesystem. A thread holds the filesystem by a weak reference, so that dropping the
//! last handle closes the filesystem. The owner of the threads tells them to stop.

use std::thread::JoinHandle;

use parking_lot::Mutex;

/// A group of threads that do the same work, under one name.
#[derive(Debug, Default)]
pub(crate) struct ServiceThreads {
    handles: Mutex<Vec<JoinHandle<()>>>,
}

impl ServiceThreads {
    /// Starts `count` threads that run `work`. If the system cannot start a thread, the failure is only logged: nothing
    /// depends on the number of threads.
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

    /// Waits for the threads to end. The caller has told the threads to end, and may be one of the threads.
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
