//! A device that runs a test's hook (a closure) at a chosen flush or write, in the middle of the engine's work.
//!
//! The hook can stop a commit while other threads continue, look at the medium as a power cut would leave it, or fail
//! the request.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use ubtrfs_device::Device;

type Hook = Box<dyn FnOnce() -> io::Result<()> + Send>;
/// The number of requests that pass before a hook runs, and the hook.
type Slot = Mutex<Option<(u64, Hook)>>;

/// A device with hooks. Each hook runs once, before a chosen flush or write.
pub struct HookDevice {
    inner: Arc<dyn Device>,
    flush: Slot,
    write: Slot,
}

impl std::fmt::Debug for HookDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HookDevice").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl HookDevice {
    /// Wraps a device, without hooks yet.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        Self { inner, flush: Slot::default(), write: Slot::default() }
    }

    /// Runs `hook` in the flushing thread, before the flush that follows `passed` other flushes. If the hook fails, the
    /// flush fails.
    pub fn at_flush(&self, passed: u64, hook: impl FnOnce() -> io::Result<()> + Send + 'static) {
        set(&self.flush, passed, hook);
    }

    /// Runs `hook` in the writing thread, before the write that follows `passed` other writes. If the hook fails, the
    /// write fails.
    pub fn at_write(&self, passed: u64, hook: impl FnOnce() -> io::Result<()> + Send + 'static) {
        set(&self.write, passed, hook);
    }

    /// Whether a hook is set that has not run yet.
    pub fn is_set(&self) -> bool {
        [&self.flush, &self.write].iter().any(|slot| slot.lock().unwrap_or_else(PoisonError::into_inner).is_some())
    }
}

fn set(slot: &Slot, passed: u64, hook: impl FnOnce() -> io::Result<()> + Send + 'static) {
    *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some((passed, Box::new(hook)));
}

/// Runs the hook of a slot if its request has come.
fn run_due(slot: &Slot) -> io::Result<()> {
    let due = {
        let mut waiting = slot.lock().unwrap_or_else(PoisonError::into_inner);
        match waiting.as_mut() {
            Some((passed, _)) if *passed > 0 => {
                *passed -= 1;
                None
            }
            _ => waiting.take(),
        }
    };
    due.map_or(Ok(()), |(_, hook)| hook())
}

impl Device for HookDevice {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.inner.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        run_due(&self.write)?;
        self.inner.write_at(offset, buf)
    }

    fn flush(&self) -> io::Result<()> {
        run_due(&self.flush)?;
        self.inner.flush()
    }

    fn can_discard(&self) -> bool {
        self.inner.can_discard()
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.inner.discard(offset, len_bytes)
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }
}
