//! [`WriteGate`]: lets writes run, wait or fail.
//!
//! The kernel's claim on the block device of a `fuseblk` mount can end before the server's last commit. The server then
//! makes writes wait until it knows whether another program got the device.
//!
//! - I1. No write passes the gate after [`WriteGate::pause`] returned, until [`WriteGate::resume`] permits writes. A
//!   write that passed before may still run.
//! - I2. After `resume` has refused writes, every call of [`WriteGate::pass`] fails.

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use rustix::io::Errno;

#[derive(Debug, Default)]
pub(crate) struct WriteGate {
    /// Changed only while `lock` is held.
    state: AtomicU8,
    lock: Mutex<()>,
    changed: Condvar,
}

const RUN: u8 = 0;
const WAIT: u8 = 1;
const FAIL: u8 = 2;

impl WriteGate {
    /// Returns when a write may begin; fails if writes are refused.
    pub(crate) fn pass(&self) -> io::Result<()> {
        if self.state.load(Ordering::Acquire) == RUN {
            return Ok(());
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match self.state.load(Ordering::Acquire) {
                RUN => return Ok(()),
                WAIT => guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner),
                _ => return Err(Errno::BUSY.into()),
            }
        }
    }

    /// Makes writes wait, unless they are refused.
    pub(crate) fn pause(&self) {
        self.set(WAIT);
    }

    /// Lets waiting and later writes run if `permitted` is true; otherwise refuses all of them from now on (I2).
    pub(crate) fn resume(&self, permitted: bool) {
        self.set(if permitted { RUN } else { FAIL });
    }

    fn set(&self, state: u8) {
        let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if self.state.load(Ordering::Acquire) != FAIL {
            self.state.store(state, Ordering::Release);
        }
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_wait_until_they_are_permitted_or_refused() {
        for permitted in [true, false] {
            let gate = WriteGate::default();
            gate.pass().unwrap();
            gate.pause();
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| gate.pass());
                std::thread::sleep(std::time::Duration::from_millis(20));
                assert!(!writer.is_finished(), "I1");
                gate.resume(permitted);
                assert_eq!(writer.join().unwrap().is_ok(), permitted);
            });
            gate.resume(true);
            assert_eq!(gate.pass().is_ok(), permitted, "I2");
        }
    }
}
