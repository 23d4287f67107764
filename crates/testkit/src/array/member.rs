//! [`FaultyMember`]: a device of an array that fails as a whole, and may return with the content that it had then.
//!
//! ```text
//! Works --a planned request, or set()--> Dies | Hangs | Vanishes | LosesWrites --set()--> Works
//! Works --a planned request, or set()--> FilledWithNoise
//! ```
//!
//! I1. While the member fails, nothing reaches the device below. So a member that returns is stale.
//! I2. A write that was done before the last completed flush is kept. Of the writes after it, some are lost when the
//!     member dies or vanishes, as those in the cache of a disk.
//! I3. A hung request waits until the state changes, at most for [`HANG`], and then fails, as after a timeout of a driver.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ubtrfs_device::Device;

use crate::unflushed::Unflushed;
use crate::{MediumDevice, Rng};

/// The time after which a hung request fails.
pub const HANG: Duration = Duration::from_millis(300);

/// The state of a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemberState {
    /// The member works.
    #[default]
    Works,
    /// Every request fails with EIO.
    Dies,
    /// Every request waits (I3), then fails with EIO.
    Hangs,
    /// Every request fails with ENODEV.
    Vanishes,
    /// Writes, flushes and discards report success, and do nothing. Reads return the old content.
    LosesWrites,
    /// The member works, but all its content except the superblocks was overwritten by random bytes once.
    FilledWithNoise,
}

impl MemberState {
    /// All states in which the member fails.
    pub const FAULTS: [Self; 4] = [Self::Dies, Self::Hangs, Self::Vanishes, Self::LosesWrites];
}

/// A device that fails as a whole.
#[derive(Debug)]
pub struct FaultyMember {
    below: Arc<MediumDevice>,
    state: Mutex<MemberState>,
    changed: Condvar,
    /// The fault, and the number of the write or flush that causes it.
    plan: Option<(u64, MemberState)>,
    requests: AtomicU64,
    /// The writes since the last completed flush (I2).
    unflushed: Mutex<Unflushed>,
}

impl FaultyMember {
    /// Makes a member that fails at its write or flush with the number `plan.0`.
    pub fn new(below: Arc<MediumDevice>, plan: Option<(u64, MemberState)>) -> Self {
        let (changed, requests) = (Condvar::new(), AtomicU64::new(0));
        Self { below, state: Mutex::default(), changed, plan, requests, unflushed: Mutex::default() }
    }

    /// The number of writes and flushes so far.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::SeqCst)
    }

    /// The current state.
    pub fn state(&self) -> MemberState {
        *lock(&self.state)
    }

    /// Changes the state.
    pub fn set(&self, state: MemberState) {
        let mut current = lock(&self.state);
        match state {
            MemberState::Works => {}
            MemberState::FilledWithNoise => self.below.write().add_noise(&mut Rng::new(self.requests())),
            _ if *current == MemberState::Works => self.lose_unflushed(),
            _ => {}
        }
        *current = state;
        self.changed.notify_all();
    }

    fn lose_unflushed(&self) {
        lock(&self.unflushed).lose(&*self.below, &mut Rng::new(self.requests()));
    }

    /// Counts a write or flush, and causes the planned fault.
    fn count(&self) {
        let number = self.requests.fetch_add(1, Ordering::SeqCst);
        if let Some((planned, fault)) = self.plan
            && planned == number
        {
            self.set(fault);
        }
    }

    /// The error of a request in this state. Waits first if the member hangs.
    fn failure(&self, state: MemberState) -> io::Error {
        let code = match state {
            MemberState::Vanishes => rustix::io::Errno::NODEV,
            _ => rustix::io::Errno::IO,
        };
        let deadline = Instant::now() + HANG;
        let mut current = lock(&self.state);
        while *current == MemberState::Hangs {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            current = self.changed.wait_timeout(current, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        code.into()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device for FaultyMember {
    fn len_bytes(&self) -> u64 {
        self.below.len_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        match self.state() {
            MemberState::Works | MemberState::LosesWrites | MemberState::FilledWithNoise => {
                self.below.read_at(offset, buf)
            }
            state => Err(self.failure(state)),
        }
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.count();
        // The lock is held until the write is done, so that no write is done after a fault (I1).
        let current = lock(&self.state);
        match *current {
            MemberState::Works | MemberState::FilledWithNoise => {
                lock(&self.unflushed).before_write(&*self.below, offset, buf.len());
                self.below.write_at(offset, buf)
            }
            MemberState::LosesWrites => Ok(()),
            state => {
                drop(current);
                Err(self.failure(state))
            }
        }
    }

    fn flush(&self) -> io::Result<()> {
        self.count();
        let current = lock(&self.state);
        match *current {
            MemberState::Works | MemberState::FilledWithNoise => {
                lock(&self.unflushed).flushed();
                Ok(())
            }
            MemberState::LosesWrites => Ok(()),
            state => {
                drop(current);
                Err(self.failure(state))
            }
        }
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let current = lock(&self.state);
        match *current {
            MemberState::Works | MemberState::FilledWithNoise => self.below.discard(offset, len_bytes),
            MemberState::LosesWrites => Ok(()),
            state => {
                drop(current);
                Err(self.failure(state))
            }
        }
    }

    fn describe(&self) -> String {
        "faulty member".to_owned()
    }

    fn is_read_only(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Medium;

    fn first_bytes(device: &MediumDevice) -> [u8; 2] {
        let mut bytes = [0; 2];
        device.read_at(4095, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn a_member_returns_with_what_it_had_flushed() {
        for fault in MemberState::FAULTS {
            let below = Arc::new(MediumDevice::new(Medium::zeros(1 << 20)));
            let member = FaultyMember::new(below.clone(), Some((3, fault)));
            member.write_at(0, &[1; 8192]).unwrap();
            member.flush().unwrap();
            member.write_at(0, &[2; 8192]).unwrap();
            let failed = member.write_at(0, &[3; 8192]);
            assert_eq!(failed.is_ok(), fault == MemberState::LosesWrites, "{fault:?}");
            assert_eq!(member.read_at(0, &mut [0; 10]).is_ok(), fault == MemberState::LosesWrites, "{fault:?}");
            assert_eq!(member.flush().is_ok(), fault == MemberState::LosesWrites, "{fault:?}");
            assert_eq!(member.state(), fault);
            member.set(MemberState::Works);
            assert!(first_bytes(&below).iter().all(|byte| [1, 2].contains(byte)));
            member.write_at(0, &[4; 8192]).unwrap();
            assert_eq!(first_bytes(&below), [4, 4]);
        }
    }
}
