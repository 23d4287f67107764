//! [`fan_out`]: works on several devices at once.
//!
//! Invariant:
//! - I1. All work has ended when the call returns, so the work may borrow from the caller.

use std::thread;

/// Calls `work` with each item, at the same time, and returns the results in order. A single item is worked on in the
/// calling thread, and so is the last of several.
pub(crate) fn fan_out<T: Send, R: Send>(mut items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let Some(last) = items.pop() else { return Vec::new() };
    if items.is_empty() {
        return vec![work(last)];
    }
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = items.into_iter().map(|item| scope.spawn(move || work(item))).collect();
        let result = work(last);
        let resume = |panic| std::panic::resume_unwind(panic);
        let joined = threads.into_iter().map(|thread| thread.join().unwrap_or_else(resume));
        joined.chain(std::iter::once(result)).collect()
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

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
}
