//! Holding commits back, so that several changes become durable together or not at all.
//!
//! Invariants:
//! - H1. While commits are held back, no superblock is written, neither by a commit nor for a log. So a crash or
//!   [`Engine::abort`] leaves the state that was committed before.
//! - H2. Whatever needs a commit fails meanwhile. A reservation that waits for freed space gets no more space and fails
//!   with `NoSpace`: the space of what is removed becomes free with the next commit.

use std::sync::atomic::Ordering;

use ubtrfs_error::Result;

use crate::engine::Engine;

impl Engine {
    /// Commits, and then holds all further commits back until [`Engine::release_commits`]. A change of another thread that
    /// this commit does not have belongs to what is held back.
    ///
    /// # Errors
    ///
    /// As for [`Engine::commit`]. Also fails if commits are held back already.
    pub fn hold_commits(&self) -> Result<()> {
        self.commit()?;
        let _work = self.commit_state.lock();
        self.check_not_held()?;
        self.commit_state.is_held.store(true, Ordering::Release);
        Ok(())
    }

    /// Lets commits happen again. Commits nothing itself.
    pub fn release_commits(&self) {
        let _work = self.commit_state.lock();
        self.commit_state.is_held.store(false, Ordering::Release);
    }

    /// Whether operations changed anything since the last commit. Work that commits do in steps on their own, such as the
    /// removal of deleted subvolumes, does not count.
    pub fn has_changes_of_operations(&self) -> bool {
        self.running.has_changes()
            || !self.pending_chunks.is_empty()
            || self.quotas.has_changes()
            || !self.device_changes.is_empty()
            || self.commit_state.has_noted_label()
    }

    /// Whether commits are held back.
    pub fn holds_commits(&self) -> bool {
        self.commit_state.is_held.load(Ordering::Acquire)
    }

    /// Fails if commits are held back (H2). Work that changes something before its commit calls this first.
    pub fn check_not_held(&self) -> Result<()> {
        self.commit_state.check_not_held()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use ubtrfs_device::MemoryDevice;

    use super::*;
    use crate::EngineOptions;

    #[test]
    fn h2_reclaim_that_waited_for_the_lock_does_not_fail_when_commits_are_held_back_meanwhile() {
        let device = Arc::new(MemoryDevice::new(256 << 20));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).expect("made");
        let engine = Engine::open(vec![device], EngineOptions::default()).expect("opened");
        std::thread::scope(|scope| {
            let work = engine.commit_state.lock();
            let reclaims = scope.spawn(|| engine.commit_to_reclaim());
            // Let the thread reach the lock.
            std::thread::sleep(Duration::from_millis(200));
            engine.commit_state.is_held.store(true, Ordering::Release);
            drop(work);
            reclaims.join().expect("no panic").expect("reclaim does nothing");
        });
        engine.commit().expect_err("commits are held back");
        engine.release_commits();
        engine.commit_to_reclaim().expect("it commits");
    }
}
