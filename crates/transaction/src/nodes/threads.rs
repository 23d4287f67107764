//! The number of threads that work on nodes at the same time, and [`work_off`] for work that waits for devices.

use std::sync::OnceLock;

use parking_lot::Mutex;
use ubtrfs_error::{Result, side_by_side};
use ubtrfs_format::clock::fixed_clock;

/// Maximum number of threads that apply frozen items to trees at the same time, for all trees together. Running the
/// delayed refs may use as many threads.
pub(crate) fn nr_threads() -> usize {
    // The answer of the system comes from several files of the control group: reading them for every batch took an
    // eighth of the processor time of small commits.
    static NR_THREADS: OnceLock<usize> = OnceLock::new();
    *NR_THREADS.get_or_init(|| match fixed_clock() {
        None => std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX),
        // Threads would allocate blocks in another order each time.
        Some(_) => 1,
    })
}

/// Takes items in order, and works on them with a few threads, each with a state of its own: while one thread waits for
/// a device, others compute. After an error, no further item is taken, and an error is returned.
pub(crate) fn work_off<T: Send, S>(
    items: impl ExactSizeIterator<Item = T> + Send,
    new_state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) -> Result<()> + Sync,
) -> Result<()> {
    let nr_threads = items.len().min(if fixed_clock().is_some() { 1 } else { NR_WORKERS });
    let items = Mutex::new(Some(items));
    let take = || items.lock().as_mut().and_then(Iterator::next);
    let run = || {
        let mut state = new_state();
        while let Some(item) = take() {
            if let Err(error) = work(&mut state, item) {
                *items.lock() = None;
                return Err(error);
            }
        }
        Ok(())
    };
    if nr_threads < 2 {
        return run();
    }
    side_by_side((0..nr_threads).map(|_| run)).into_iter().fold(Ok(()), Result::and)
}

/// Upper bound of [`nr_threads`] on any machine: more threads would only wait for the devices.
const THREADS_MAX: usize = 8;
/// Number of threads of [`work_off`]: enough for reading, computing and writing at the same time.
const NR_WORKERS: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use ubtrfs_error::Error;

    #[test]
    fn every_item_is_worked_on_once_until_one_fails() {
        for nr_items in [0, 1, 2, 1000] {
            let done = Mutex::new(Vec::new());
            work_off(
                0..nr_items,
                || (),
                |(), item| {
                    done.lock().push(item);
                    Ok(())
                },
            )
            .expect("nothing fails");
            let mut done = done.into_inner();
            done.sort_unstable();
            assert_eq!(done, (0..nr_items).collect::<Vec<_>>());
        }
        let fail = |(): &mut (), item: i32| if item == 5 { Err(Error::NoSpace) } else { Ok(()) };
        assert!(matches!(work_off(0..1_000_000, || (), fail), Err(Error::NoSpace)));
    }
}
