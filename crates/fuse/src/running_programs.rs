//! [`RunningPrograms`]: files that are open for execution.
//!
//! A program that runs cannot be truncated: open(2) fails with ETXTBSY. The kernel checks an open for writing before it
//! sends OPEN. It checks `O_RDONLY | O_TRUNC` only after OPEN, and then the server has truncated the file already
//! (`ATOMIC_O_TRUNC`). So the server refuses such an OPEN itself.
//!
//! The kernel marks an open for execution in its flags, and releases it when no process has the program in its memory
//! any more. This is also true of a dynamic loader, which Linux's own filesystems let be truncated while programs run.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use ubtrfs_fs::InodeId;

/// Counts the opens for execution of each file.
#[derive(Debug, Default)]
pub(crate) struct RunningPrograms {
    opens: Mutex<HashMap<InodeId, usize>>,
    released: Condvar,
}

impl RunningPrograms {
    /// Counts an open for execution.
    pub(crate) fn add(&self, id: InodeId) {
        *self.opens.lock().entry(id).or_default() += 1;
    }

    /// Releases an open that [`add`](Self::add) counted.
    pub(crate) fn release(&self, id: InodeId) {
        let mut opens = self.opens.lock();
        if let Some(nr) = opens.get_mut(&id) {
            *nr -= 1;
            if *nr == 0 {
                opens.remove(&id);
                self.released.notify_all();
            }
        }
    }

    /// Whether the file is open for execution.
    pub(crate) fn contains(&self, id: InodeId) -> bool {
        self.opens.lock().contains_key(&id)
    }

    /// Waits for a release that is on its way: the kernel does not wait for the answer of RELEASE when a program ends.
    /// Returns whether the file is still open for execution.
    pub(crate) fn contains_after_releases(&self, id: InodeId) -> bool {
        let mut opens = self.opens.lock();
        self.released.wait_while_for(&mut opens, |opens| opens.contains_key(&id), RELEASE_DELAY).timed_out()
    }
}

/// How long a RELEASE may take from the end of the program to the server.
const RELEASE_DELAY: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;
    use ubtrfs_format::{Ino, RootId};

    const ID: InodeId = InodeId { root: RootId(5), ino: Ino(257) };

    #[test]
    fn a_program_runs_until_its_last_release() {
        let programs = RunningPrograms::default();
        programs.add(ID);
        programs.add(ID);
        programs.release(ID);
        assert!(programs.contains(ID) && programs.contains_after_releases(ID));
        std::thread::scope(|scope| {
            scope.spawn(|| programs.release(ID));
            assert!(!programs.contains_after_releases(ID), "the release arrives in time");
        });
        assert!(!programs.contains(ID));
    }
}
