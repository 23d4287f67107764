//! How many threads work on nodes at once.

/// Most threads that all applies use together.
pub(crate) fn nr_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX)
}

/// More threads would wait for the devices.
const THREADS_MAX: usize = 8;
