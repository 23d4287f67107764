//! [`StoreMark`]: an object that says that a push or a prune works in a store.
//!
//! Stores have no locks, but a list shows every object whose write has ended. So each command first writes its mark, and
//! then looks for others: of a push and a prune that begin at once, at least one sees the other.
//!
//! - W1. Nothing is removed while a push works: it may take parts and a parent that no manifest of its own names yet.
//!   Pushes work beside each other; a prune works alone.
//! - W2. A mark is written again every [`REFRESH`]. If it is older than [`STALE`], its program was killed, and it counts no
//!   more. Ages are differences between times of the store. A mark that is newer than the own one by as much was written
//!   with a wrong clock, and does not count either: a living program writes it again with the time of now.
//! - W3. A program whose own mark may have been stale removes nothing more, and adds no snapshot: it may have been away for a
//!   time, such as in a machine that slept. That it has written its mark again does not help.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::Result;
use crate::error::RemoteError;
use crate::store::RemoteStore;

/// The work of a command that changes a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreWork {
    /// It adds a snapshot.
    Push,
    /// It removes snapshots and parts.
    Prune,
}

impl StoreWork {
    fn name(self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Prune => "prune",
        }
    }
}

/// Lasts as long as the work; its mark is removed when this is dropped.
#[derive(Debug)]
pub struct StoreMark<'s> {
    store: &'s RemoteStore,
    object: String,
    /// When the mark was last written, by the clock of this machine; `None` if it may have been stale since (W3).
    written: Arc<Mutex<Option<SystemTime>>>,
    refresh: JoinHandle<()>,
}

impl RemoteStore {
    /// Begins to change the store (W1).
    ///
    /// # Errors
    ///
    /// [`RemoteError::Busy`] if other work excludes this; a request that failed.
    pub fn begin(&self, work: StoreWork) -> Result<StoreMark<'_>> {
        let name = format!("{}-{}", work.name(), Uuid::new_v4());
        let object = format!("{MARKS}/{name}");
        let begun = SystemTime::now();
        self.runtime.block_on(self.objects.put_small(&object, Vec::new()))?;
        let written = Arc::new(Mutex::new(Some(begun)));
        let (objects, again, noted) = (self.objects.clone(), object.clone(), Arc::clone(&written));
        let refresh = self.runtime.spawn(async move {
            loop {
                tokio::time::sleep(REFRESH).await;
                let begun = SystemTime::now();
                if objects.put_small(&again, Vec::new()).await.is_ok() {
                    let mut noted = noted.lock();
                    *noted = noted.filter(|before| has_counted(*before)).map(|_| begun);
                }
            }
        });
        let mark = StoreMark { store: self, object, written, refresh };
        let listed = self.runtime.block_on(self.objects.list(MARKS, MOST_MARKS))?;
        let Some(own) = listed.iter().find(|object| object.name == name) else {
            return Err(RemoteError::damaged(&mark.object, "it was written, but is not in the store's list"));
        };
        let excludes = |other: &str| match work {
            StoreWork::Push => other.starts_with(StoreWork::Prune.name()),
            StoreWork::Prune => true,
        };
        let age = |modified: i64| own.modified.saturating_sub(modified);
        let counts = |modified: i64| age(modified).unsigned_abs() < STALE.as_secs();
        let other = listed.iter().find(|other| other.name != name && excludes(&other.name) && counts(other.modified));
        match other {
            Some(other) => {
                let seconds = age(other.modified).max(0);
                Err(RemoteError::Busy { object: format!("{MARKS}/{}", other.name), seconds })
            }
            None => Ok(mark),
        }
    }
}

impl StoreMark<'_> {
    /// Makes sure that the mark has counted all the time (W3).
    ///
    /// # Errors
    ///
    /// [`RemoteError::Away`] if others may have changed the store meanwhile.
    pub fn check(&self) -> Result<()> {
        let mut written = self.written.lock();
        *written = written.filter(|written| has_counted(*written));
        written.map(drop).ok_or(RemoteError::Away)
    }

    /// Makes the mark one that may have been stale, for tests.
    #[doc(hidden)]
    pub fn lapse(&self) {
        *self.written.lock() = None;
    }
}

/// Whether a mark that was written at this time has counted since for sure. The clock of the machine also runs while it
/// sleeps. If it was set back, the age is unknown.
fn has_counted(written: SystemTime) -> bool {
    written.elapsed().is_ok_and(|age| age < STALE / 2)
}

impl Drop for StoreMark<'_> {
    fn drop(&mut self) {
        self.refresh.abort();
        // A mark that stays is stale soon.
        let removal = async { tokio::time::timeout(PATIENCE, self.store.objects.remove(&self.object)).await };
        let _ = self.store.runtime.block_on(removal);
    }
}

const MARKS: &str = "marks";
/// How often a mark is written.
const REFRESH: Duration = Duration::from_secs(60);
/// The age from which a mark does not count.
const STALE: Duration = Duration::from_secs(600);
/// How long the end of the work waits for the removal of its mark.
const PATIENCE: Duration = Duration::from_secs(10);
const MOST_MARKS: usize = 100_000;
