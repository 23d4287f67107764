//! [`PythonManage`]: balance, scrub, devices, quotas, space. Reports are dictionaries, of which the Python package makes
//! its dataclasses; their keys are the fields of these.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ubtrfs::format::BlockGroupFlags;
use ubtrfs::manage::{
    BalanceCounts, BalanceFilter, BalanceOptions, BalanceReport, Defragment, DeviceUsage, MemberState, QgroupId,
    QgroupSummary, QuotaKind, ScrubCounts, ScrubOptions,
};
use ubtrfs::{Access, Device, FileDevice, MountOptions, bindings};

use crate::device::PythonDevice;
use crate::errors::{DeviceExceptions, path};
use crate::filesystem::PythonFilesystem;
use crate::job::JobWatch;

/// The filters of a balance. The names are the fields of `BalanceFilter` in Python.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct FilterWords {
    profiles: Vec<String>,
    usage: Option<(u32, u32)>,
    device: Option<u64>,
    range: Option<(u64, u64)>,
    limit: Option<u32>,
    convert: Option<String>,
    soft: bool,
}

impl FilterWords {
    fn filter(self) -> PyResult<BalanceFilter> {
        let profile = |name: &String| bindings::profile(name).map_err(PyValueError::new_err);
        Ok(BalanceFilter {
            profiles: self.profiles.iter().map(profile).collect::<PyResult<_>>()?,
            usage_percent: self.usage.map(|(start, end)| start..end),
            device: self.device,
            range: self.range.map(|(start, end)| start..end),
            limit: self.limit,
            convert: self.convert.as_ref().map(profile).transpose()?,
            soft: self.soft,
        })
    }
}

/// A device that joins a filesystem.
struct JoiningDevice {
    source: DeviceSource,
    /// The size of a new image file.
    new_bytes: Option<u64>,
}

enum DeviceSource {
    Path(Vec<u8>),
    Object(Arc<dyn Device>),
}

impl JoiningDevice {
    /// `object` is a device of Python, or the bytes of a path.
    fn new(object: &Bound<'_, PyAny>, new_bytes: Option<u64>, exceptions: &DeviceExceptions) -> PyResult<Self> {
        let source = match object.extract::<Vec<u8>>() {
            Ok(path) => DeviceSource::Path(path),
            Err(_) => DeviceSource::Object(PythonDevice::wrap_one(object, exceptions)?),
        };
        Ok(Self { source, new_bytes })
    }

    fn open(self, operation: &'static str) -> ubtrfs::Result<Arc<dyn Device>> {
        let name = match self.source {
            DeviceSource::Object(device) => return Ok(device),
            DeviceSource::Path(name) => name,
        };
        let opened = match self.new_bytes {
            Some(size) => FileDevice::create(path(&name), size, true),
            None => FileDevice::open(path(&name), Access::ReadWrite),
        };
        let device = opened.map_err(|error| ubtrfs::Error::of_device(operation, path(&name), error))?;
        Ok(Arc::new(device))
    }
}

/// The numbers of a balance, as the fields of `BalanceCounts`.
#[derive(IntoPyObject)]
pub(crate) struct BalanceCountWords {
    expected: u64,
    considered: u64,
    completed: u64,
    failed: u64,
    without_space: u64,
}

impl BalanceCountWords {
    fn new(counts: &BalanceCounts) -> Self {
        let BalanceCounts { expected, considered, completed, failed, without_space, .. } = *counts;
        Self { expected, considered, completed, failed, without_space }
    }
}

/// A file: the id of its subvolume, its inode number, and a path from the top level if it has one.
type FileWords = (u64, u64, Option<Vec<u8>>);
/// The numbers of a balance, and for each extent that was not moved its address, the reason and its files.
type BalanceWords = (BalanceCountWords, Vec<(u64, String, Vec<FileWords>)>);
/// A file with bad content, and the bytes that were repaired and that are lost.
type DamageWords = (FileWords, u64, u64);

/// The counts of a scrub, as the fields of `ScrubCounts`.
#[derive(IntoPyObject)]
pub(crate) struct ScrubCountWords {
    data_bytes: u64,
    tree_bytes: u64,
    read_errors: u64,
    csum_errors: u64,
    verify_errors: u64,
    super_errors: u64,
    no_csum: u64,
    corrected_errors: u64,
    uncorrectable_errors: u64,
}

impl ScrubCountWords {
    fn new(counts: &ScrubCounts) -> Self {
        Self {
            data_bytes: counts.data_bytes_scrubbed,
            tree_bytes: counts.tree_bytes_scrubbed,
            read_errors: counts.read_errors,
            csum_errors: counts.csum_errors,
            verify_errors: counts.verify_errors,
            super_errors: counts.super_errors,
            no_csum: counts.no_csum,
            corrected_errors: counts.corrected_errors,
            uncorrectable_errors: counts.uncorrectable_errors,
        }
    }
}

/// The devices with their counts and the errors that ended their scrubs; the files; repaired and lost bytes of tree blocks.
type ScrubWords = (Vec<(u64, ScrubCountWords, Option<String>)>, Vec<DamageWords>, (u64, u64));
/// The counts, the files without a good copy, and the lost bytes of tree blocks.
type ReplaceWords = (ScrubCountWords, Vec<DamageWords>, u64);

/// A quota group, as the fields of `Qgroup`.
#[derive(IntoPyObject)]
pub(crate) struct QgroupWords {
    id: String,
    referenced: u64,
    exclusive: u64,
    max_referenced: Option<u64>,
    max_exclusive: Option<u64>,
    parents: Vec<String>,
    members: Vec<String>,
}

impl QgroupWords {
    fn new(group: QgroupSummary) -> Self {
        let names = |ids: &[QgroupId]| ids.iter().map(ToString::to_string).collect();
        Self {
            id: group.id.to_string(),
            referenced: group.referenced,
            exclusive: group.exclusive,
            max_referenced: group.max_referenced,
            max_exclusive: group.max_exclusive,
            parents: names(&group.parents),
            members: names(&group.members),
        }
    }
}

/// Type, profile and bytes of block groups: of the groups themselves and of their content, or of the part on a device.
type GroupWords = (&'static str, String, u64, u64);

/// A device, as the fields of `DeviceUsage`.
#[derive(IntoPyObject)]
pub(crate) struct DeviceUsageWords {
    id: u64,
    uuid: String,
    path: Option<String>,
    state: &'static str,
    is_seed: bool,
    total: u64,
    slack: u64,
    allocated: u64,
    groups: Vec<(&'static str, String, u64)>,
}

impl DeviceUsageWords {
    fn new(device: DeviceUsage) -> Self {
        let share = |flags: BlockGroupFlags, bytes: u64| {
            let (kind, profile) = bindings::group_names(flags);
            (kind, profile, bytes)
        };
        Self {
            id: device.devid.0,
            uuid: device.uuid.to_string(),
            path: device.path,
            state: match device.state {
                MemberState::InSync => "in sync",
                MemberState::Late(_) => "being updated",
                MemberState::Stale(_) => "missed changes",
                MemberState::Missing => "missing",
                MemberState::Kicked => "failed",
            },
            is_seed: device.is_seed,
            total: device.total,
            slack: device.slack,
            allocated: device.allocated,
            groups: device.groups.iter().map(|group| share(group.flags, group.bytes)).collect(),
        }
    }
}

/// Block groups, the size and the use of the global reserve, and devices.
type SpaceWords = (Vec<GroupWords>, (u64, u64), Vec<DeviceUsageWords>);

/// The quota group that a text means: `1/100`, or the id of a subvolume.
fn qgroup(text: &str) -> PyResult<QgroupId> {
    let (level, number) = text.split_once('/').unwrap_or(("0", text));
    let id = level.parse().ok().zip(number.parse().ok()).and_then(|(level, number)| QgroupId::new(level, number));
    id.ok_or_else(|| PyValueError::new_err(format!("'{text}' is no quota group; give LEVEL/NUMBER, such as 1/100")))
}

/// The management of a filesystem.
#[pyclass(name = "Manage", module = "ubtrfs._ubtrfs", frozen)]
pub(crate) struct PythonManage {
    fs: Py<PythonFilesystem>,
}

impl PythonManage {
    fn fs(&self) -> &PythonFilesystem {
        self.fs.get()
    }
}

fn balance_words(report: BalanceReport) -> BalanceWords {
    let failures = report.failures.into_iter().map(|failure| {
        let files = failure.files.into_iter().map(|(id, path)| (id.root.0, id.ino.0, path)).collect();
        (failure.bytenr, failure.reason, files)
    });
    (BalanceCountWords::new(&report.counts), failures.collect())
}

#[pymethods]
impl PythonManage {
    #[new]
    fn new(fs: Py<PythonFilesystem>) -> Self {
        Self { fs }
    }

    #[pyo3(signature = (data, metadata, system, *, force, watch))]
    fn balance(
        &self,
        py: Python<'_>,
        data: Option<FilterWords>,
        metadata: Option<FilterWords>,
        system: Option<FilterWords>,
        force: bool,
        watch: JobWatch,
    ) -> PyResult<BalanceWords> {
        let filter = |words: Option<FilterWords>| words.map(FilterWords::filter).transpose();
        let options =
            BalanceOptions { data: filter(data)?, metadata: filter(metadata)?, system: filter(system)?, force };
        self.fs().run_job(py, watch, |fs, job| fs.balance(&options, job)).map(balance_words)
    }

    fn resume_balance(&self, py: Python<'_>, watch: JobWatch) -> PyResult<BalanceWords> {
        self.fs().run_job(py, watch, |fs, job| fs.resume_balance(job)).map(balance_words)
    }

    fn pause_balance(&self, py: Python<'_>) -> PyResult<()> {
        self.fs().run(py, |fs| fs.pause_balance())
    }

    fn cancel_balance(&self, py: Python<'_>) -> PyResult<()> {
        self.fs().run(py, |fs| fs.cancel_balance())
    }

    /// The state in a word, and the numbers.
    fn balance_status(&self, py: Python<'_>) -> PyResult<Option<(&'static str, BalanceCountWords)>> {
        let status = self.fs().run(py, |fs| Ok(fs.balance_status()))?;
        Ok(status.map(|status| {
            let state = match (status.is_running, status.is_cancelling, status.is_pausing) {
                (false, ..) => "paused",
                (true, true, _) => "cancelling",
                (true, false, true) => "pausing",
                (true, false, false) => "running",
            };
            (state, BalanceCountWords::new(&status.counts))
        }))
    }

    #[pyo3(signature = (devices, *, repair, bytes_per_second, watch))]
    fn scrub(
        &self,
        py: Python<'_>,
        devices: Vec<u64>,
        repair: bool,
        bytes_per_second: u64,
        watch: JobWatch,
    ) -> PyResult<ScrubWords> {
        let options = ScrubOptions { devices, repair, bytes_per_sec: bytes_per_second };
        let report = self.fs().run_job(py, watch, |fs, job| fs.scrub(&options, job))?;
        let devices = report.devices.into_iter().map(|device| {
            let error = device.result.err().map(|error| error.to_string());
            (device.devid.0, ScrubCountWords::new(&device.counts), error)
        });
        let files = report
            .files
            .into_iter()
            .map(|(id, path, damage)| ((id.root.0, id.ino.0, path), damage.repaired_bytes, damage.lost_bytes));
        Ok((devices.collect(), files.collect(), (report.blocks.repaired_bytes, report.blocks.lost_bytes)))
    }

    fn cancel_scrub(&self, py: Python<'_>) -> PyResult<()> {
        self.fs().run(py, |fs| fs.cancel_scrub())
    }

    /// Adds a device: an object, or the bytes of a path.
    #[pyo3(signature = (device, *, size, watch))]
    fn add_device(
        &self,
        py: Python<'_>,
        device: &Bound<'_, PyAny>,
        size: Option<u64>,
        watch: JobWatch,
    ) -> PyResult<u64> {
        let device = JoiningDevice::new(device, size, self.fs().exceptions())?;
        self.fs().run_job(py, watch, move |fs, job| fs.add_device(device.open("add device")?, job))
    }

    fn remove_devices(&self, py: Python<'_>, devices: Vec<u64>, watch: JobWatch) -> PyResult<()> {
        self.fs().run_job(py, watch, |fs, job| fs.remove_devices(&devices, job))
    }

    /// Replaces a device by an object, or by the device with the bytes of a path.
    #[pyo3(signature = (device, new, *, size, watch))]
    fn replace_device(
        &self,
        py: Python<'_>,
        device: u64,
        new: &Bound<'_, PyAny>,
        size: Option<u64>,
        watch: JobWatch,
    ) -> PyResult<ReplaceWords> {
        let new = JoiningDevice::new(new, size, self.fs().exceptions())?;
        let work = move |fs: &ubtrfs::Filesystem, job: &ubtrfs::Job| {
            fs.replace_device(device, new.open("replace device")?, job)
        };
        let report = self.fs().run_job(py, watch, work)?;
        let files = report
            .files
            .into_iter()
            .map(|(id, path, damage)| ((id.root.0, id.ino.0, path), damage.repaired_bytes, damage.lost_bytes));
        Ok((ScrubCountWords::new(&report.counts), files.collect(), report.lost_block_bytes))
    }

    fn resize_device(&self, py: Python<'_>, device: u64, size: u64, watch: JobWatch) -> PyResult<()> {
        self.fs().run_job(py, watch, |fs, job| fs.resize_device(device, size, job))
    }

    fn min_device_size(&self, py: Python<'_>, device: u64) -> PyResult<u64> {
        self.fs().run(py, |fs| fs.min_device_size(device))
    }

    fn enable_quotas(&self, py: Python<'_>, kind: &str) -> PyResult<()> {
        let kind = match kind {
            "full" => QuotaKind::Full,
            "simple" => QuotaKind::Simple,
            _ => return Err(PyValueError::new_err(format!("the kind of quotas is '{kind}'; give full or simple"))),
        };
        self.fs().run(py, |fs| fs.enable_quotas(kind))
    }

    fn disable_quotas(&self, py: Python<'_>) -> PyResult<()> {
        self.fs().run(py, |fs| fs.disable_quotas())
    }

    /// The kind, whether the numbers are right, and whether all extents are being counted.
    fn quota_status(&self, py: Python<'_>) -> PyResult<Option<(&'static str, bool, bool)>> {
        let status = self.fs().run(py, |fs| Ok(fs.quota_status()))?;
        Ok(status
            .map(|status| (if status.simple { "simple" } else { "full" }, status.consistent, status.rescan.is_some())))
    }

    fn wait_for_quotas(&self, py: Python<'_>, watch: JobWatch) -> PyResult<()> {
        self.fs().run_job(py, watch, |fs, job| fs.wait_for_quotas(job))
    }

    fn qgroups(&self, py: Python<'_>) -> PyResult<Vec<QgroupWords>> {
        let groups = self.fs().run(py, |fs| fs.qgroups())?;
        Ok(groups.into_iter().map(QgroupWords::new).collect())
    }

    fn create_qgroup(&self, py: Python<'_>, id: &str) -> PyResult<()> {
        let id = qgroup(id)?;
        self.fs().run(py, |fs| fs.create_qgroup(id))
    }

    fn destroy_qgroup(&self, py: Python<'_>, id: &str) -> PyResult<()> {
        let id = qgroup(id)?;
        self.fs().run(py, |fs| fs.destroy_qgroup(id))
    }

    fn assign_qgroup(&self, py: Python<'_>, member: &str, parent: &str) -> PyResult<bool> {
        let (member, parent) = (qgroup(member)?, qgroup(parent)?);
        self.fs().run(py, |fs| fs.assign_qgroup(member, parent))
    }

    fn remove_qgroup(&self, py: Python<'_>, member: &str, parent: &str) -> PyResult<bool> {
        let (member, parent) = (qgroup(member)?, qgroup(parent)?);
        self.fs().run(py, |fs| fs.remove_qgroup(member, parent))
    }

    #[pyo3(signature = (id, max_referenced, max_exclusive))]
    fn limit_qgroup(
        &self,
        py: Python<'_>,
        id: &str,
        max_referenced: Option<u64>,
        max_exclusive: Option<u64>,
    ) -> PyResult<()> {
        let id = qgroup(id)?;
        self.fs().run(py, |fs| fs.limit_qgroup(id, max_referenced, max_exclusive))
    }

    /// Joins the extents of a file, and returns the bytes that were rewritten.
    #[pyo3(signature = (name, *, start, end, small, compress, unshare, watch))]
    #[allow(clippy::too_many_arguments, reason = "the package passes the options by name")]
    fn defragment(
        &self,
        py: Python<'_>,
        name: &[u8],
        start: u64,
        end: Option<u64>,
        small: u64,
        compress: Option<&str>,
        unshare: bool,
        watch: JobWatch,
    ) -> PyResult<u64> {
        let compress = match compress {
            None => None,
            Some(method) if method.contains(',') => {
                return Err(PyValueError::new_err(format!("'{method}' is no method of compression")));
            }
            // The same words as for an opened filesystem.
            Some(method) => {
                let parsed = MountOptions::parse(&format!("compress={method}"));
                parsed.map_err(|error| PyValueError::new_err(error.to_string()))?.compress
            }
        };
        let how = Defragment { range: start..end.unwrap_or(u64::MAX), small_bytes: small, compress, unshare };
        self.fs().run_job(py, watch, |fs, job| fs.defragment(path(name), &how, job))
    }

    fn space_usage(&self, py: Python<'_>) -> PyResult<SpaceWords> {
        let usage = self.fs().run(py, |fs| Ok(fs.space_usage()))?;
        let groups = usage.groups.iter().map(|group| {
            let (kind, profile) = bindings::group_names(group.flags);
            (kind, profile, group.total, group.used)
        });
        let devices = usage.devices.into_iter().map(DeviceUsageWords::new);
        Ok((groups.collect(), usage.global_reserve, devices.collect()))
    }

    fn trim(&self, py: Python<'_>, min_bytes: u64, watch: JobWatch) -> PyResult<u64> {
        self.fs().run_job(py, watch, |fs, job| fs.trim(min_bytes, job))
    }
}
