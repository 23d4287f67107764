//! Tells the kernel to forget names and data that changed without a request from the kernel.
//!
//! F1. To forget a name, the kernel locks the name's directory. The kernel holds the same lock while it waits for the
//!     answer to a setxattr request, so a separate thread sends the notification. A handler may wait for this thread
//!     only if the kernel holds no directory's lock during the request: the handlers of ioctl and getxattr may wait,
//!     the handler of setxattr must not.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::transport::Notifier;

/// Tells the kernel to forget names, and tracks pending notifications.
#[derive(Debug)]
pub(crate) struct NameCache {
    notifier: Arc<OnceLock<Notifier>>,
    untold: Arc<Untold>,
}

#[derive(Debug, Default)]
struct Untold {
    state: Mutex<NameCacheState>,
    told: Condvar,
}

#[derive(Debug, Default)]
struct NameCacheState {
    next: u64,
    open: BTreeSet<u64>,
}

impl NameCache {
    /// `notifier` is set once the connection exists.
    pub(crate) fn new(notifier: Arc<OnceLock<Notifier>>) -> Self {
        Self { notifier, untold: Arc::default() }
    }

    /// Makes the kernel soon forget a name, and the directory's content and attributes (F1).
    pub(crate) fn forget(&self, dir: u64, name: &[u8]) {
        self.forget_with(dir, name, Vec::new);
    }

    /// Makes the kernel soon forget the name of a directory and everything below it. If a name is in use when the
    /// kernel is told to forget it, the kernel keeps the name and its inode until memory is short. So the kernel is
    /// told again, at growing intervals, to forget the names that `used` returns, until `used` returns no name. A name
    /// that is in use keeps working.
    pub(crate) fn forget_with(&self, dir: u64, name: &[u8], used: impl Fn() -> Vec<(u64, Vec<u8>)> + Send + 'static) {
        let Some(notifier) = self.notifier.get().cloned() else { return };
        let ticket = Ticket::new(&self.untold);
        let name = name.to_vec();
        let thread = std::thread::Builder::new().name("fuse-forget-name".to_owned());
        let started = thread.spawn(move || {
            // Invalidate the directory too: the kernel may not know the name, but still have a cached list of the
            // directory's names.
            if let Err(error) = notifier.inval_entry(dir, &name).and_then(|()| notifier.inval_inode(dir, 0, 0)) {
                tracing::debug!("node {dir}: the kernel keeps a name: {error}");
            }
            drop(ticket);
            let mut pause = PAUSE_MIN;
            while !used().is_empty() {
                std::thread::sleep(pause);
                for (dir, name) in used() {
                    // An error means that the name is already forgotten, or that the filesystem is unmounted.
                    let _ = notifier.inval_entry(dir, &name);
                }
                pause = (pause * 2).min(PAUSE_MAX);
            }
        });
        if let Err(error) = started {
            tracing::warn!("the kernel could not be told to forget a name: {error}");
        }
    }

    /// Makes the kernel forget the pages and attributes of an inode. The call waits for the kernel's locks of the
    /// pages. So the handler of a request during which the kernel holds such locks must not call this function.
    pub(crate) fn forget_data(&self, node: u64) {
        if let Some(notifier) = self.notifier.get()
            && let Err(error) = notifier.inval_inode(node, 0, 0)
        {
            tracing::debug!("node {node}: the kernel keeps its pages: {error}");
        }
    }

    /// Makes the kernel forget the attributes of an inode, but not its pages. The call does not wait.
    pub(crate) fn forget_attributes(&self, node: u64) {
        if let Some(notifier) = self.notifier.get() {
            notifier.forget_attributes(node);
        }
    }
}

/// Waits until the notifications that this thread asked for since the last call are sent, in whatever views, but not longer
/// than [`PATIENCE`] altogether. Those of other threads may wait for directories that other users keep locked.
pub(crate) fn settle() {
    settle_within(PATIENCE);
}

fn settle_within(patience: Duration) {
    let end = Instant::now() + patience;
    for (untold, number) in ASKED_FOR.take() {
        let mut state = untold.state.lock();
        while state.open.contains(&number) {
            if untold.told.wait_until(&mut state, end).timed_out() {
                break;
            }
        }
    }
}

/// Makes [`settle`] not wait for earlier notifications: those of another request on the same thread.
pub(crate) fn begin() {
    ASKED_FOR.take();
}

thread_local! {
    /// The pending notifications that this thread asked for.
    static ASKED_FOR: RefCell<Vec<(Arc<Untold>, u64)>> = const { RefCell::new(Vec::new()) };
}

/// A pending notification, which is marked as sent on drop.
struct Ticket {
    untold: Arc<Untold>,
    number: u64,
}

impl Ticket {
    fn new(untold: &Arc<Untold>) -> Self {
        let mut state = untold.state.lock();
        let number = state.next;
        state.next += 1;
        state.open.insert(number);
        drop(state);
        ASKED_FOR.with_borrow_mut(|asked_for| {
            asked_for.retain(|(untold, number)| untold.state.lock().open.contains(number));
            asked_for.push((Arc::clone(untold), number));
        });
        Self { untold: Arc::clone(untold), number }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.untold.state.lock().open.remove(&self.number);
        self.untold.told.notify_all();
    }
}

/// Shortest pause between two checks for names that are still in use.
const PAUSE_MIN: Duration = Duration::from_millis(200);
/// Longest pause between two checks for names that are still in use.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How long [`settle`] waits at most. The kernel normally keeps a directory locked for a shorter time.
const PATIENCE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_covers_only_notifications_of_this_request() {
        let (cache, other) = (NameCache::new(Arc::default()), NameCache::new(Arc::default()));
        settle();
        let begun = Instant::now();
        let _earlier = Ticket::new(&cache.untold);
        begin();
        let own = [Ticket::new(&cache.untold), Ticket::new(&other.untold)];
        std::thread::scope(|scope| {
            let _of_other_user = scope.spawn(|| Ticket::new(&cache.untold)).join().unwrap();
            scope.spawn(settle).join().unwrap();
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(50));
                drop(own);
            });
            settle();
        });
        assert!(begun.elapsed() >= Duration::from_millis(50) && begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
        assert_eq!(other.untold.state.lock().open.len(), 0);
    }

    #[test]
    fn one_time_limit_covers_all_views() {
        let views: Vec<NameCache> = (0..3).map(|_| NameCache::new(Arc::default())).collect();
        let _never_told: Vec<Ticket> = views.iter().map(|view| Ticket::new(&view.untold)).collect();
        let (begun, patience) = (Instant::now(), Duration::from_millis(500));
        settle_within(patience);
        assert!(begun.elapsed() >= patience && begun.elapsed() < patience * 2, "{:?}", begun.elapsed());
        settle_within(PATIENCE);
        assert!(begun.elapsed() < PATIENCE, "it does not wait twice for one notification");
    }
}
