//! Work on a whole filesystem: balance, scrub, devices, quotas, space. Its functions are methods of
//! [`Filesystem`](crate::Filesystem).
//!
//! Long work takes a [`Job`](crate::Job), which another thread may watch and cancel. Devices have numbers, their device
//! ids. Everything is durable when a function returns without an error, unless its documentation says otherwise.

mod balance;
mod defragment;
mod devices;
mod quota;
mod scrub;
mod space;

pub use balance::{BalanceFilter, BalanceOptions};
pub use scrub::ScrubOptions;

/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(1 << 30)?;
/// use ubtrfs::manage::{BalanceCounts, BalanceOptions};
///
/// let report = fs.balance(&BalanceOptions::everything(), &ubtrfs::Job::new())?;
/// let BalanceCounts { completed, expected, .. } = report.counts;
/// println!("moved {completed} of {expected} block groups");
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::BalanceCounts;
/// ```
/// use ubtrfs::manage::BalanceFailure;
///
/// fn tell(failures: &[BalanceFailure]) {
///     for BalanceFailure { bytenr, reason, .. } in failures {
///         println!("the extent at {bytenr} was not moved: {reason}");
///     }
/// }
/// # tell(&[]);
/// ```
#[doc(inline)]
pub use ubtrfs_fs::BalanceFailure;
/// ```
/// use ubtrfs::manage::BalanceReport;
///
/// fn is_complete(report: &BalanceReport) -> bool {
///     report.failures.is_empty() && report.counts.without_space == 0
/// }
/// # assert!(is_complete(&BalanceReport::default()));
/// ```
#[doc(inline)]
pub use ubtrfs_fs::BalanceReport;
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
/// use ubtrfs::manage::BalanceStatus;
///
/// if let Some(BalanceStatus { is_running: false, .. }) = fs.balance_status() {
///     fs.resume_balance(&ubtrfs::Job::new())?;
/// }
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::BalanceStatus;
/// ```
/// use ubtrfs::manage::Damage;
///
/// fn is_lost(damage: &Damage) -> bool {
///     damage.lost_bytes > 0
/// }
/// # assert!(!is_lost(&Damage::default()));
/// ```
#[doc(inline)]
pub use ubtrfs_fs::Damage;
/// ```
/// use ubtrfs::manage::Defragment;
///
/// // Join extents of less than 1 MiB.
/// let how = Defragment { small_bytes: 1 << 20, ..Defragment::default() };
/// # assert!(!how.unshare);
/// ```
#[doc(inline)]
pub use ubtrfs_fs::Defragment;
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
/// use ubtrfs::manage::DeviceUsage;
///
/// for DeviceUsage { devid, total, allocated, .. } in fs.space_usage().devices {
///     println!("device {devid}: {allocated} of {total} bytes");
/// }
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::DeviceUsage;
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
/// use ubtrfs::format::BlockGroupFlags;
/// use ubtrfs::manage::GroupUsage;
///
/// let usage = fs.space_usage();
/// let is_data = |group: &&GroupUsage| group.flags.contains(BlockGroupFlags::DATA);
/// let used: u64 = usage.groups.iter().filter(is_data).map(|group| group.used).sum();
/// assert_eq!(used, 0);
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::GroupUsage;
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
/// use ubtrfs::manage::MemberState;
///
/// assert!(fs.space_usage().devices.iter().all(|device| device.state == MemberState::InSync));
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::MemberState;
/// ```
/// use ubtrfs::manage::QgroupId;
///
/// // The quota group 1/100, above groups of subvolumes.
/// let group = QgroupId::new(1, 100).unwrap();
/// assert_eq!(group.to_string(), "1/100");
/// ```
#[doc(inline)]
pub use ubtrfs_fs::QgroupId;
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
/// use ubtrfs::manage::{QgroupSummary, QuotaKind};
///
/// fs.enable_quotas(QuotaKind::Simple)?;
/// for QgroupSummary { id, referenced, .. } in fs.qgroups()? {
///     println!("{id}: {referenced} bytes");
/// }
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::QgroupSummary;
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
/// fs.enable_quotas(ubtrfs::manage::QuotaKind::Full)?;
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::QuotaKind;
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
/// use ubtrfs::manage::QuotaStatus;
///
/// let is_exact = matches!(fs.quota_status(), Some(QuotaStatus { consistent: true, .. }));
/// # assert!(!is_exact);
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::QuotaStatus;
/// ```
/// use ubtrfs::manage::ReplaceReport;
///
/// fn lost_files(report: &ReplaceReport) -> usize {
///     report.files.len()
/// }
/// # assert_eq!(lost_files(&ReplaceReport::default()), 0);
/// ```
#[doc(inline)]
pub use ubtrfs_fs::ReplaceReport;
/// ```
/// use ubtrfs::manage::ScrubCounts;
///
/// fn is_clean(counts: &ScrubCounts) -> bool {
///     counts.corrected_errors == 0 && counts.uncorrectable_errors == 0
/// }
/// # assert!(is_clean(&ScrubCounts::default()));
/// ```
#[doc(inline)]
pub use ubtrfs_fs::ScrubCounts;
/// ```
/// use ubtrfs::manage::ScrubReport;
///
/// fn is_repaired(report: &ScrubReport) -> bool {
///     report.devices.iter().all(|device| device.result.is_ok() && device.counts.uncorrectable_errors == 0)
/// }
/// # assert!(is_repaired(&ScrubReport::default()));
/// ```
#[doc(inline)]
pub use ubtrfs_fs::ScrubReport;
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
/// use ubtrfs::manage::SpaceUsage;
///
/// let SpaceUsage { groups, devices, .. } = fs.space_usage();
/// assert!(!groups.is_empty() && devices.len() == 1);
/// # Ok(()) }
/// ```
#[doc(inline)]
pub use ubtrfs_fs::SpaceUsage;
