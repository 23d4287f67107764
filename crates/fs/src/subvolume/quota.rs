//! Quotas and quota groups.

use ubtrfs_transaction::{BackgroundWork, Job, QgroupId, QgroupSummary, QuotaKind, QuotaStatus};

use crate::Fs;
use crate::error::Result;

impl Fs {
    /// Enables quotas, durable on return. For full accounting a rescan starts; [`Self::wait_for_quota_rescan`] waits
    /// for the end of the rescan.
    pub fn enable_quotas(&self, kind: QuotaKind) -> Result<()> {
        self.context.check_mounted_writable()?;
        self.engine.enable_quotas(kind)?;
        self.context.commits.request_work(BackgroundWork::Commit);
        Ok(())
    }

    /// Disables quotas and removes all groups and limits, durable on return.
    pub fn disable_quotas(&self) -> Result<()> {
        self.context.check_mounted_writable()?;
        Ok(self.engine.disable_quotas()?)
    }

    /// The state of quotas; `None` if quotas are disabled.
    pub fn quota_status(&self) -> Option<QuotaStatus> {
        self.engine.quota_status()
    }

    /// Starts a rescan, which counts all extents again.
    pub fn start_quota_rescan(&self) -> Result<()> {
        self.context.check_mounted_writable()?;
        self.engine.start_quota_rescan()?;
        self.context.commits.request_work(BackgroundWork::Commit);
        Ok(())
    }

    /// Commits until no rescan runs. Cancelling `job` only ends the wait: the rescan continues in the background.
    pub fn wait_for_quota_rescan(&self, job: &Job) -> Result<()> {
        while let Some(at) = self.engine.quota_status().and_then(|status| status.rescan) {
            job.check()?;
            job.set_step(format!("at address {at}"));
            self.engine.commit()?;
        }
        Ok(())
    }

    /// All quota groups by id, with the numbers of the last commit. Fails if quotas are disabled.
    pub fn qgroups(&self) -> Result<Vec<QgroupSummary>> {
        Ok(self.engine.qgroups()?)
    }

    /// The quota groups whose ids are at least `from`, as [`Self::qgroups`], at most `limit`.
    pub fn qgroups_from(&self, from: QgroupId, limit: usize) -> Result<Vec<QgroupSummary>> {
        Ok(self.engine.qgroups_from(from, limit)?)
    }

    /// Makes a quota group, durable on return.
    pub fn create_qgroup(&self, id: QgroupId) -> Result<()> {
        self.context.check_mounted_writable()?;
        Ok(self.engine.create_qgroup(id)?)
    }

    /// Removes a quota group that has no members and does not belong to a subvolume, durable on return.
    pub fn destroy_qgroup(&self, id: QgroupId) -> Result<()> {
        self.context.check_mounted_writable()?;
        Ok(self.engine.destroy_qgroup(id)?)
    }

    /// Removes the groups of subvolumes that no longer exist, durable on return. Returns their number.
    pub fn clear_stale_qgroups(&self) -> Result<usize> {
        self.context.check_mounted_writable()?;
        Ok(self.engine.clear_stale_qgroups()?)
    }

    /// Makes `member` a member of `parent`, a quota group of a higher level, durable on return. Returns whether the
    /// numbers of the groups above `member` need a rescan.
    pub fn assign_qgroup(&self, member: QgroupId, parent: QgroupId) -> Result<bool> {
        self.context.check_mounted_writable()?;
        Ok(self.engine.assign_qgroup(member, parent)?)
    }

    /// Removes `member` from the quota group `parent`, durable on return. Returns whether the numbers of the groups
    /// above `member` need a rescan.
    pub fn remove_qgroup(&self, member: QgroupId, parent: QgroupId) -> Result<bool> {
        self.context.check_mounted_writable()?;
        Ok(self.engine.remove_qgroup(member, parent)?)
    }

    /// Sets (`Some(Some)`), removes (`Some(None)`) or leaves (`None`) the limits of a quota group, in bytes, durable on
    /// return.
    pub fn limit_qgroup(
        &self,
        id: QgroupId,
        max_referenced: Option<Option<u64>>,
        max_exclusive: Option<Option<u64>>,
    ) -> Result<()> {
        self.context.check_mounted_writable()?;
        Ok(self.engine.limit_qgroup(id, max_referenced, max_exclusive)?)
    }
}
