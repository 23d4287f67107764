//! Quotas and quota groups.

use ubtrfs_transaction::{BackgroundWork, Job, QgroupId, QgroupInfo, QuotaStatus};

use crate::Fs;
use crate::error::Result;

impl Fs {
    /// Turns quotas on, durable on return. Counting what exists begins; [`Self::wait_for_quota_rescan`] waits for its end.
    pub fn enable_quotas(&self) -> Result<()> {
        self.check_open()?;
        self.engine.enable_quotas()?;
        self.commit_thread.do_soon(BackgroundWork::Commit);
        Ok(())
    }

    /// Turns quotas off, durable on return. Groups and limits are forgotten.
    pub fn disable_quotas(&self) -> Result<()> {
        self.check_open()?;
        Ok(self.engine.disable_quotas()?)
    }

    /// Quotas as a whole; `None` if they are off.
    pub fn quota_status(&self) -> Option<QuotaStatus> {
        self.engine.quota_status()
    }

    /// Begins to count everything anew.
    pub fn start_quota_rescan(&self) -> Result<()> {
        self.check_open()?;
        self.engine.start_quota_rescan()?;
        self.commit_thread.do_soon(BackgroundWork::Commit);
        Ok(())
    }

    /// Counts until no rescan runs. A cancelled job only stops waiting: the rescan goes on in the background.
    pub fn wait_for_quota_rescan(&self, job: &Job) -> Result<()> {
        while let Some(at) = self.engine.quota_status().and_then(|status| status.rescan) {
            job.check()?;
            job.set_step(format!("at address {at}"));
            self.engine.commit()?;
        }
        Ok(())
    }

    /// All quota groups by id, with the numbers of the last commit. Fails if quotas are off.
    pub fn qgroups(&self) -> Result<Vec<QgroupInfo>> {
        Ok(self.engine.qgroups()?)
    }

    /// Makes a quota group, durable on return.
    pub fn create_qgroup(&self, id: QgroupId) -> Result<()> {
        self.check_open()?;
        Ok(self.engine.create_qgroup(id)?)
    }

    /// Removes a quota group without members that is not that of a subvolume, durable on return.
    pub fn destroy_qgroup(&self, id: QgroupId) -> Result<()> {
        self.check_open()?;
        Ok(self.engine.destroy_qgroup(id)?)
    }

    /// Removes the groups of subvolumes that no longer exist, durable on return. Returns how many.
    pub fn clear_stale_qgroups(&self) -> Result<usize> {
        self.check_open()?;
        Ok(self.engine.clear_stale_qgroups()?)
    }

    /// Puts a quota group into one of a higher level, durable on return. Returns whether the numbers of the higher groups
    /// need a rescan.
    pub fn assign_qgroup(&self, member: QgroupId, parent: QgroupId) -> Result<bool> {
        self.check_open()?;
        Ok(self.engine.assign_qgroup(member, parent)?)
    }

    /// Takes a quota group out of another one, durable on return. Returns whether the numbers of the higher groups need a
    /// rescan.
    pub fn remove_qgroup(&self, member: QgroupId, parent: QgroupId) -> Result<bool> {
        self.check_open()?;
        Ok(self.engine.remove_qgroup(member, parent)?)
    }

    /// Sets (`Some(Some)`) or removes (`Some(None)`) limits of a quota group, durable on return.
    pub fn limit_qgroup(
        &self,
        id: QgroupId,
        max_referenced: Option<Option<u64>>,
        max_exclusive: Option<Option<u64>>,
    ) -> Result<()> {
        self.check_open()?;
        Ok(self.engine.limit_qgroup(id, max_referenced, max_exclusive)?)
    }
}
