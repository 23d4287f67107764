//! A device that runs a test's hook (a closure) at a chosen flush, in the middle of the engine's work.
//!
//! The hook can stop a commit while other threads continue, look at the medium as a power cut would leave it, or fail
//! the flush.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use ubtrfs_device::Device;

type Hook = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// A device with a hook that runs once, before a chosen flush.
pub struct HookDevice {
    inner: Arc<dyn Device>,
    /// The number of flushes that pass before the hook runs, and the hook.
    hook: Mutex<Option<(u64, Hook)>>,
}

impl std::fmt::Debug for HookDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HookDevice").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl HookDevice {
    /// Wraps a device, without a hook yet.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        Self { inner, hook: Mutex::default() }
    }

    /// Runs `hook` in the flushing thread, before the flush that follows `passed` other flushes. If the hook fails, the
    /// flush fails.
    pub fn at_flush(&self, passed: u64, hook: impl FnOnce() -> io::Result<()> + Send + 'static) {
        *self.hook.lock().unwrap_or_else(PoisonError::into_inner) = Some((passed, Box::new(hook)));
    }

    /// Whether a hook is set that has not run yet.
    pub fn is_set(&self) -> bool {
        self.hook.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn due(&self) -> Option<Hook> {
        let mut hook = self.hook.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((passed, _)) = hook.as_mut()
            && *passed > 0
        {
            *passed -= 1;
            return None;
        }
        hook.take().map(|(_, hook)| hook)
    }
}

impl Device for HookDevice {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.inner.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.inner.write_at(offset, buf)
    }

    fn flush(&self) -> io::Result<()> {
        if let Some(hook) = self.due() {
            hook()?;
        }
        self.inner.flush()
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
