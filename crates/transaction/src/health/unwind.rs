//! A panic turns the filesystems that its thread worked on read-only, before anything is unwound.
//!
//! Locks here do not poison, so what a panic left half changed under one would look whole to the next commit. Waiting for
//! an unwinding guard to notice would leave a moment in which another thread commits it; the panic hook leaves none.
//!
//! - I1. Every thread that changes or reads a filesystem passes [`Engine::enter`] first: it is called where an engine
//!   hands out or takes anything.
//! - I2. The hook takes no lock that the code of a filesystem runs under, but those of its registry and of
//!   [`Engine::abort`], under which nothing else runs.
//! - I3. Where a program replaced the hook, [`MetadataReservation`](crate::MetadataReservation) and the commit still
//!   notice when they are unwound.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError, Weak};

use crate::engine::Engine;

/// Tells open engines apart; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EngineId(u64);

static NEXT: AtomicU64 = AtomicU64::new(1);
static OPEN: Mutex<Vec<(u64, Weak<Engine>)>> = Mutex::new(Vec::new());
static HOOK: Once = Once::new();

thread_local! {
    /// The engine that this thread used last.
    static LAST: Cell<u64> = const { Cell::new(0) };
    /// All that it used.
    static USED: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

impl EngineId {
    pub(crate) fn new() -> Self {
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Has panics of threads that pass [`EngineId::enter`] abort this engine.
    pub(crate) fn register(self, engine: Weak<Engine>) {
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                before(info);
                note_panic(&info.to_string());
            }));
        });
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|(_, engine)| engine.strong_count() > 0);
        open.push((self.0, engine));
    }

    /// This thread uses the engine.
    pub(crate) fn enter(self) {
        LAST.with(|last| {
            if last.replace(self.0) != self.0 {
                USED.with_borrow_mut(|used| {
                    if !used.contains(&self.0) {
                        // A thread that goes through many filesystems remembers the last ones.
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

/// What the panic hook does: turns the filesystems that this thread worked on read-only. For programs that set a hook of
/// their own after a filesystem was opened, and do not call the one that was there.
pub fn note_panic(what: &str) {
    // At the end of a thread there may be no such variable any more, and then no work either.
    let used = USED.try_with(|used| used.try_borrow().map(|used| used.clone()).unwrap_or_default()).unwrap_or_default();
    if used.is_empty() {
        return;
    }
    let open: Vec<_> = {
        let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.iter().filter(|(id, _)| used.contains(id)).filter_map(|(_, engine)| engine.upgrade()).collect()
    };
    for engine in open {
        engine.abort(format!("internal error: {what}").replace('\n', " "));
    }
}

const MAX_USED: usize = 64;
