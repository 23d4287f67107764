//! Transactions of several changes, of which a crash or a failure leaves all or none (H1 of `transaction::commit::held`).

use crate::{Error, Fs, Result};

impl Fs {
    /// Begins a transaction: later changes, of all threads, become durable together in [`Fs::commit_atomic`]. To undo them,
    /// call [`Fs::abort`] or close the filesystem; it cannot be written afterwards.
    ///
    /// Until then, these fail: fsync and sync, making subvolumes and snapshots, changes of devices, balances, and
    /// whatever else needs a commit. Space that is freed is not available before the end. The changed tree blocks and
    /// the new names stay in memory. Reading changes no time of access, so that it is no change.
    ///
    /// # Errors
    ///
    /// The changes made before cannot be committed, or a transaction runs already.
    pub fn begin_atomic(&self) -> Result<()> {
        self.context.check_mounted_writable()?;
        self.sync()?;
        // No subvolume is half made when commits are held back.
        let _subvolumes = self.subvolumes.lock();
        Ok(self.engine.hold_commits()?)
    }

    /// Makes the changes of the transaction durable.
    ///
    /// # Errors
    ///
    /// No transaction runs. Or some data cannot be written; then nothing is durable, and the transaction still runs. Or the
    /// commit fails, after which the filesystem is read-only.
    pub fn commit_atomic(&self) -> Result<()> {
        self.check_in_transaction()?;
        self.delete_undeleted();
        self.flush_all_data()?;
        self.engine.release_commits();
        Ok(self.engine.commit()?)
    }

    /// Gives up the changes of the transaction: the devices keep the state before it, and the filesystem is read-only
    /// until it is closed. If there are no changes, the transaction ends, and the filesystem goes on.
    ///
    /// # Errors
    ///
    /// No transaction runs; then nothing happens.
    pub fn abort_atomic(&self, reason: String) -> Result<()> {
        self.check_in_transaction()?;
        if self.read_only().is_none() && !self.data.has_dirty() && !self.engine.has_changes_of_operations() {
            self.engine.release_commits();
        } else {
            self.abort(reason);
        }
        Ok(())
    }

    fn check_in_transaction(&self) -> Result<()> {
        match self.engine.holds_commits() {
            true => Ok(()),
            false => Err(Error::InvalidArgument("no transaction runs")),
        }
    }
}
