//! [`ExclusiveOperations`]: a balance and a replacement of a device exclude each other, as in Linux. If a power cut
//! interrupted both, Linux would continue the balance alone, and suspend the replacement.
//!
//! - E1. A new balance begins only while no replacement runs. A replacement begins only while there is no balance, neither
//!   a running nor a paused one.
//! - E2. Everything that an earlier session has begun continues. If it was both, both continue.
//!
//! Lock order: the state of the balance -> the jobs of replacements.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::devices::jobs::DeviceJobs;
use crate::devices::replace::RunningReplace;
use crate::{Error, Result};

/// The balance and the replacements of a filesystem, as far as they exclude each other.
#[derive(Debug)]
pub(crate) struct ExclusiveOperations {
    balance: Mutex<Option<BalancePhase>>,
    replaces: Arc<DeviceJobs<RunningReplace>>,
}

/// The state of a balance that is not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BalancePhase {
    /// It moves block groups.
    Running,
    /// It waits until it is resumed or cancelled.
    Paused,
}

impl ExclusiveOperations {
    pub(crate) fn new(replaces: Arc<DeviceJobs<RunningReplace>>) -> Self {
        Self { balance: Mutex::default(), replaces }
    }

    /// Notes that a new balance runs (E1).
    ///
    /// # Errors
    ///
    /// [`Error::InProgress`] if a replacement runs.
    pub(crate) fn begin_balance(&self) -> Result<()> {
        let mut balance = self.balance.lock();
        if !self.replaces.running().is_empty() {
            return Err(Error::InProgress(
                "a device is being replaced; wait for the end (ubtrfs replace status), or end it: ubtrfs replace cancel",
            ));
        }
        *balance = Some(BalancePhase::Running);
        Ok(())
    }

    /// Notes what the balance does now; `None` if there is no balance any more.
    pub(crate) fn set_balance(&self, phase: Option<BalancePhase>) {
        *self.balance.lock() = phase;
    }

    /// Calls `begin`, which begins a replacement, while no balance can begin (E1).
    ///
    /// # Errors
    ///
    /// [`Error::InProgress`] if there is a balance; an error of `begin`.
    pub(crate) fn begin_replacement<T>(&self, begin: impl FnOnce() -> Result<T>) -> Result<T> {
        let balance = self.balance.lock();
        match *balance {
            None => begin(),
            Some(BalancePhase::Running) => Err(Error::InProgress(
                "a balance is running; wait for its end (ubtrfs balance status), or end it: ubtrfs balance cancel",
            )),
            Some(BalancePhase::Paused) => Err(Error::InProgress(
                "a balance is paused; let it go on and wait for its end (ubtrfs balance resume), or end it: \
                 ubtrfs balance cancel",
            )),
        }
    }
}
