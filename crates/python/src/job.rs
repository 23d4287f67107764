//! [`PythonJob`] and [`JobWatch`]: long work, which runs in a thread of its own while the calling thread watches it.
//!
//! Invariants:
//! - I1. The thread has ended when the call returns.
//! - I2. An exception of the caller's progress function, and an interrupt such as Ctrl-C, cancel the work. The exception is
//!   raised in place of the result.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ubtrfs::Job;

use crate::errors::DeviceExceptions;

/// The time between two looks at the progress and at signals.
const TICK: Duration = Duration::from_millis(50);

/// A long operation that other threads watch and cancel.
#[pyclass(name = "Job", module = "ubtrfs._ubtrfs", frozen)]
pub(crate) struct PythonJob {
    job: Arc<Job>,
}

#[pymethods]
impl PythonJob {
    #[new]
    fn new() -> Self {
        Self { job: Arc::new(Job::new()) }
    }

    /// Asks the work to end.
    fn cancel(&self) {
        self.job.cancel();
    }

    #[getter]
    fn done(&self) -> u64 {
        self.job.progress().done
    }

    #[getter]
    fn total(&self) -> u64 {
        self.job.progress().total
    }

    #[getter]
    fn step(&self) -> String {
        self.job.progress().step
    }

    #[getter]
    fn is_cancelled(&self) -> bool {
        self.job.progress().is_cancelled
    }
}

/// How a caller watches long work: a function that is called with the units that are done, and a job.
#[derive(FromPyObject)]
pub(crate) struct JobWatch(Option<Py<PyAny>>, Option<Py<PythonJob>>);

impl JobWatch {
    /// Runs `work` in a thread, and returns its result.
    pub(crate) fn run<T: Send>(
        self,
        py: Python<'_>,
        exceptions: &DeviceExceptions,
        work: impl FnOnce(&Job) -> ubtrfs::Result<T> + Send,
    ) -> PyResult<T> {
        let job = self.1.as_ref().map_or_else(|| Arc::new(Job::new()), |job| Arc::clone(&job.get().job));
        let (done, stopped) = py.detach(|| self.watched(&job, work))?;
        let Ok(done) = done else {
            return Err(PyRuntimeError::new_err("the thread of the work ended with a panic; please report it"));
        };
        match stopped {
            Some(exception) => {
                // A result may have a handle that must not be dropped here (I2 of the crate).
                py.detach(move || drop(done));
                Err(exception)
            }
            None => exceptions.settle(py, done.map_err(|error| exceptions.raise(py, &error))),
        }
    }

    /// The result of the thread, and the exception that cancelled it.
    fn watched<T: Send>(
        &self,
        job: &Job,
        work: impl FnOnce(&Job) -> ubtrfs::Result<T> + Send,
    ) -> std::io::Result<(thread::Result<ubtrfs::Result<T>>, Option<PyErr>)> {
        // The thread sends nothing. The channel closes at its end, also at that by a panic.
        let (open, ended) = sync_channel::<()>(0);
        thread::scope(|scope| {
            let worker = thread::Builder::new().name("job".to_owned()).spawn_scoped(scope, move || {
                let _open = open;
                work(job)
            })?;
            let (mut told, mut stopped) = (0, None);
            loop {
                let has_ended = ended.recv_timeout(TICK) != Err(RecvTimeoutError::Timeout);
                if stopped.is_none() {
                    match Python::try_attach(|py| self.tell(py, job, &mut told)) {
                        Some(Ok(())) => {}
                        Some(Err(exception)) => {
                            job.cancel();
                            stopped = Some(exception);
                        }
                        // The interpreter ends.
                        None => job.cancel(),
                    }
                }
                if has_ended {
                    return Ok((worker.join(), stopped));
                }
            }
        })
    }

    fn tell(&self, py: Python<'_>, job: &Job, told: &mut u64) -> PyResult<()> {
        py.check_signals()?;
        let done = job.progress().done;
        if let Some(progress) = &self.0
            && done != *told
        {
            *told = done;
            progress.call1(py, (done,))?;
        }
        Ok(())
    }
}
