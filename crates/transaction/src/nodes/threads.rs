//! The number of threads that work on nodes at once.

/// Maximum number of threads that all applies use together.
pub(crate) fn nr_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX)
}

/// More threads would only wait for the devices.
const THREADS_MAX: usize = 8;
