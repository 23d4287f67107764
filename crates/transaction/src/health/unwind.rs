//! Turns filesystems read-only when a thread that worked on them panics, before anything is unwound.
//!
//! A panic does not poison the engine's locks, so state that a panic left half changed would look complete to the next
//! commit. A guard that noticed the panic while unwinding would be too late: another thread could commit first. The
//! panic hook runs before unwinding begins.
//! - I1. A panic of a thread makes all filesystems read-only for which the thread has called [`AbortState::enter`].
//!   Among others, [`Engine::tree`](crate::Engine::tree), [`AbortState::check_writable`], reads of data, writes of nodes,
//!   and `fs` when it looks up an inode make this call.
//! - I2. The hook takes only the locks of its registry and of [`AbortState::abort`]; no other filesystem code runs under
//!   these locks.
//! - I3. If a program replaced the hook, [`MetadataReservation`](crate::MetadataReservation) and the commit still
//!   notice a panic during unwinding.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError, Weak};

use crate::health::abort::AbortState;

/// A number that tells open engines apart and is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EngineId(u64);

static NEXT: AtomicU64 = AtomicU64::new(1);
static OPEN: Mutex<Vec<(u64, Weak<AbortState>)>> = Mutex::new(Vec::new());
static HOOK: Once = Once::new();

thread_local! {
    /// The engine that this thread used last.
    static LAST: Cell<u64> = const { Cell::new(0) };
    /// The engines that this thread used, at most `MAX_USED`.
    static USED: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

impl EngineId {
    pub(crate) fn new() -> Self {
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Registers this engine with the panic hook: a panic of a thread that called [`EngineId::enter`] aborts the
    /// engine.
    pub(crate) fn register(self, state: Weak<AbortState>) {
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                before(info);
                note_panic(&info.to_string());
            }));
        });
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|(_, state)| state.strong_count() > 0);
        open.push((self.0, state));
    }

    /// Notes that this thread uses the engine.
    pub(crate) fn enter(self) {
        LAST.with(|last| {
            if last.replace(self.0) != self.0 {
                USED.with_borrow_mut(|used| {
                    if !used.contains(&self.0) {
                        // A thread remembers at most `MAX_USED` filesystems: forget the one that the list has had for
                        // the longest time.
                        if used.len() == MAX_USED {
                            used.remove(0);
                        }
                        used.push(self.0);
                    }
                });
            }
        });
    }
}

/// Aborts the filesystems that this thread worked on, as the panic hook does: they become read-only. This function is
/// for programs that replace the panic hook after a filesystem was opened and do not call the previous hook.
pub fn note_panic(what: &str) {
    // The thread-local variable is missing only while the thread ends, and then the thread no longer works on a
    // filesystem.
    let used = USED.try_with(|used| used.try_borrow().map(|used| used.clone()).unwrap_or_default()).unwrap_or_default();
    if used.is_empty() {
        return;
    }
    let open: Vec<_> = {
        let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.iter().filter(|(id, _)| used.contains(id)).filter_map(|(_, state)| state.upgrade()).collect()
    };
    for state in open {
        state.abort(format!("internal error: {what}").replace('\n', " "));
    }
}

const MAX_USED: usize = 64;
