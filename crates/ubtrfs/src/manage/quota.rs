//! Quotas: numbers and limits of subvolumes and of groups of them.

use ubtrfs_fs::{Job, QgroupId, QgroupSummary, QuotaKind, QuotaStatus};

use crate::Filesystem;
use crate::error::{Result, ResultExt};

impl Filesystem {
    /// Switches quotas on. Full quotas count all extents in the background, for which
    /// [`wait_for_quotas`](Self::wait_for_quotas) waits.
    ///
    /// ```
    /// use ubtrfs::manage::{QgroupId, QuotaKind};
    /// use ubtrfs::{Filesystem, Job};
    ///
    /// # fn main() -> ubtrfs::Result<()> {
    /// let fs = Filesystem::make_in_memory(256 << 20)?;
    /// fs.create_subvolume("/home")?;
    /// fs.enable_quotas(QuotaKind::Full)?;
    /// fs.wait_for_quotas(&Job::new())?;
    /// let home = QgroupId::new(0, fs.subvolume("/home")?.id()).unwrap();
    /// fs.limit_qgroup(home, Some(1 << 20), None)?;
    /// assert!(fs.write("/home/f", vec![1; 4 << 20]).is_err());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` if quotas of the other kind are on; `ReadOnlyFilesystem`.
    pub fn enable_quotas(&self, kind: QuotaKind) -> Result<()> {
        self.engine().enable_quotas(kind).while_doing("enable quotas of", self.device_name())
    }

    /// Switches quotas off. All groups and limits are lost.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// fs.enable_quotas(ubtrfs::manage::QuotaKind::Full)?;
    /// fs.disable_quotas()?;
    /// assert_eq!(fs.quota_status(), None);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `ReadOnlyFilesystem`; an error of the commit.
    pub fn disable_quotas(&self) -> Result<()> {
        self.engine().disable_quotas().while_doing("disable quotas of", self.device_name())
    }

    /// The state of quotas; `None` if they are off.
    ///
    /// ```
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20).unwrap();
    /// assert_eq!(fs.quota_status(), None);
    /// ```
    pub fn quota_status(&self) -> Option<QuotaStatus> {
        self.engine().quota_status()
    }

    /// Waits until all extents are counted. Cancelling `job` ends the wait only.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// fs.enable_quotas(ubtrfs::manage::QuotaKind::Full)?;
    /// fs.wait_for_quotas(&ubtrfs::Job::new())?;
    /// assert!(fs.quota_status().unwrap().consistent);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// ECANCELED; an error of a commit.
    pub fn wait_for_quotas(&self, job: &Job) -> Result<()> {
        self.engine().wait_for_quota_rescan(job).while_doing("count the quotas of", self.device_name())
    }

    /// All quota groups by id, with the numbers of the last commit.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// fs.enable_quotas(ubtrfs::manage::QuotaKind::Full)?;
    /// // That of the top level.
    /// assert_eq!(fs.qgroups()?[0].id.to_string(), "0/5");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// ENOTCONN if quotas are off.
    pub fn qgroups(&self) -> Result<Vec<QgroupSummary>> {
        self.engine().qgroups().while_doing("list quota groups of", self.device_name())
    }

    /// Makes a quota group of level 1 or higher. Groups of level 0 belong to subvolumes, and are made with them.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// use ubtrfs::manage::{QgroupId, QuotaKind};
    ///
    /// fs.enable_quotas(QuotaKind::Full)?;
    /// let (all, one) = (QgroupId::new(1, 0).unwrap(), QgroupId::new(0, 5).unwrap());
    /// fs.create_qgroup(all)?;
    /// // Adding a member with content needs a count of all extents.
    /// let _needs_rescan = fs.assign_qgroup(one, all)?;
    /// fs.remove_qgroup(one, all)?;
    /// fs.destroy_qgroup(all)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// ENOTCONN if quotas are off; `AlreadyExists`.
    pub fn create_qgroup(&self, id: QgroupId) -> Result<()> {
        self.engine().create_qgroup(id).while_doing("make a quota group of", self.device_name())
    }

    /// Removes a quota group without members, as [`create_qgroup`](Self::create_qgroup) shows.
    ///
    /// # Errors
    /// `NotFound`; EBUSY if it has members or belongs to a subvolume.
    pub fn destroy_qgroup(&self, id: QgroupId) -> Result<()> {
        self.engine().destroy_qgroup(id).while_doing("remove a quota group of", self.device_name())
    }

    /// Makes a group a member of another one of a higher level. Returns whether the numbers are wrong until all extents
    /// are counted again.
    ///
    /// # Errors
    /// `NotFound`; `InvalidInput` for the levels; `AlreadyExists`.
    pub fn assign_qgroup(&self, member: QgroupId, parent: QgroupId) -> Result<bool> {
        self.engine().assign_qgroup(member, parent).while_doing("assign a quota group of", self.device_name())
    }

    /// Ends what [`assign_qgroup`](Self::assign_qgroup) began. Returns whether the numbers are wrong until all extents are
    /// counted again.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn remove_qgroup(&self, member: QgroupId, parent: QgroupId) -> Result<bool> {
        self.engine().remove_qgroup(member, parent).while_doing("take out a quota group of", self.device_name())
    }

    /// Sets the limits of a group: bytes of all extents that it refers to, and bytes that only it refers to. `None` means
    /// no limit. Writes beyond a limit fail with EDQUOT.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// use ubtrfs::manage::{QgroupId, QuotaKind};
    ///
    /// fs.enable_quotas(QuotaKind::Full)?;
    /// let top = QgroupId::new(0, 5).unwrap();
    /// fs.limit_qgroup(top, Some(1 << 30), None)?;
    /// assert_eq!(fs.qgroups()?[0].max_referenced, Some(1 << 30));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; ENOTCONN if quotas are off.
    pub fn limit_qgroup(&self, id: QgroupId, max_referenced: Option<u64>, max_exclusive: Option<u64>) -> Result<()> {
        let limited = self.engine().limit_qgroup(id, Some(max_referenced), Some(max_exclusive));
        limited.while_doing("limit a quota group of", self.device_name())
    }
}
