//! [`PythonFilesystem`]: an open filesystem. Names, attributes and subvolumes by path.

use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ubtrfs::{
    Caller, CopyEvent, CopyOptions, CopyReport, File, FileKind, FileTimes, Filesystem, Job, Metadata, MountOptions,
    OpenOptions, OwnerMap, ReceiveOptions, SendOptions, SnapshotAccess, Subvolume, bindings,
};

use crate::device::PythonDevice;
use crate::errors::{DeviceExceptions, path, path_bytes};
use crate::file::{FileHome, PythonFile};
use crate::job::JobWatch;
use crate::stream::{PythonReceive, PythonSend};

/// How a filesystem is opened. The names are those of the function `open` in Python.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct OpenWords {
    options: String,
    read_only: bool,
    subvol: Option<Vec<u8>>,
    devices: Vec<Vec<u8>>,
    memory: Option<u64>,
}

impl OpenWords {
    /// The mount options.
    pub(crate) fn options(self, py: Python<'_>, exceptions: &DeviceExceptions) -> PyResult<MountOptions> {
        let parsed = MountOptions::parse(&self.options);
        let mut options = parsed.map_err(|error| exceptions.raise_engine(py, "open", &error))?;
        options.read_only |= self.read_only;
        options.subvol = self.subvol.or(options.subvol);
        options.devices.extend(self.devices.iter().map(|name| path(name).to_owned()));
        options.memory_bytes = self.memory.unwrap_or(options.memory_bytes);
        Ok(options)
    }
}

/// Opens an image file, a block device or an NBD export.
#[pyfunction]
pub(crate) fn open_paths(py: Python<'_>, name: Vec<u8>, open: OpenWords) -> PyResult<PythonFilesystem> {
    let exceptions = DeviceExceptions::default();
    let options = open.options(py, &exceptions)?;
    PythonFilesystem::opened(py, py.detach(|| Filesystem::open_image_with(path(&name), options)), exceptions)
}

/// Opens a filesystem on devices that are objects of Python.
#[pyfunction]
pub(crate) fn open_objects(
    py: Python<'_>,
    objects: Vec<Bound<'_, PyAny>>,
    open: OpenWords,
) -> PyResult<PythonFilesystem> {
    let exceptions = DeviceExceptions::default();
    let devices = PythonDevice::wrap(&objects, &exceptions)?;
    let options = open.options(py, &exceptions)?;
    PythonFilesystem::opened(py, py.detach(|| Filesystem::open_devices(devices, options)), exceptions)
}

/// Makes a filesystem in memory.
#[pyfunction]
pub(crate) fn make_in_memory(py: Python<'_>, size: u64) -> PyResult<PythonFilesystem> {
    PythonFilesystem::opened(py, py.detach(|| Filesystem::make_in_memory(size)), DeviceExceptions::default())
}

/// The attributes of a file, with the names of `os.stat_result`.
#[pyclass(name = "Stat", module = "ubtrfs._ubtrfs", frozen)]
pub(crate) struct PythonStat {
    metadata: Metadata,
}

impl PythonStat {
    pub(crate) fn new(metadata: Metadata) -> Self {
        Self { metadata }
    }
}

/// Nanoseconds since 1970; 0 for a time that cannot be computed.
fn nanoseconds(time: Option<SystemTime>) -> i128 {
    let nanos = |duration: Duration| i128::try_from(duration.as_nanos()).unwrap_or_default();
    match time.map(|time| time.duration_since(SystemTime::UNIX_EPOCH)) {
        Some(Ok(after)) => nanos(after),
        Some(Err(before)) => -nanos(before.duration()),
        None => 0,
    }
}

/// Seconds since 1970, as far as a float can tell.
#[allow(clippy::cast_precision_loss, reason = "the float is for people; programs have the nanoseconds")]
fn seconds(time: Option<SystemTime>) -> f64 {
    nanoseconds(time) as f64 / 1e9
}

/// The time that Python gives as seconds, rounded down, and nanoseconds.
fn system_time((sec, nsec): (i64, u32)) -> PyResult<SystemTime> {
    bindings::system_time(sec, nsec).ok_or_else(|| PyValueError::new_err("the time is out of range"))
}

#[pymethods]
impl PythonStat {
    #[getter]
    fn st_mode(&self) -> u32 {
        self.metadata.mode()
    }

    #[getter]
    fn st_ino(&self) -> u64 {
        self.metadata.ino()
    }

    /// The id of the subvolume: inode numbers are unique in a subvolume.
    #[getter]
    fn st_dev(&self) -> u64 {
        self.metadata.subvolume_id()
    }

    #[getter]
    fn st_nlink(&self) -> u32 {
        self.metadata.nlink()
    }

    #[getter]
    fn st_uid(&self) -> u32 {
        self.metadata.uid()
    }

    #[getter]
    fn st_gid(&self) -> u32 {
        self.metadata.gid()
    }

    #[getter]
    fn st_size(&self) -> u64 {
        self.metadata.len()
    }

    #[getter]
    fn st_blocks(&self) -> u64 {
        self.metadata.blocks()
    }

    /// The size of a block of data, in bytes.
    #[getter]
    fn st_blksize(&self) -> u32 {
        4096
    }

    #[getter]
    fn st_atime(&self) -> f64 {
        seconds(self.metadata.accessed())
    }

    #[getter]
    fn st_mtime(&self) -> f64 {
        seconds(self.metadata.modified())
    }

    #[getter]
    fn st_ctime(&self) -> f64 {
        seconds(self.metadata.changed())
    }

    #[getter]
    fn st_birthtime(&self) -> f64 {
        seconds(self.metadata.created())
    }

    fn __repr__(&self) -> String {
        let metadata = &self.metadata;
        format!(
            "Stat(st_mode={:#o}, st_ino={}, st_dev={}, st_nlink={}, st_uid={}, st_gid={}, st_size={})",
            metadata.mode(),
            metadata.ino(),
            metadata.subvolume_id(),
            metadata.nlink(),
            metadata.uid(),
            metadata.gid(),
            metadata.len()
        )
    }

    /// The major and minor number of a device file.
    #[getter]
    fn device_number(&self) -> (u32, u32) {
        self.metadata.device_number()
    }

    #[getter]
    fn st_atime_ns(&self) -> i128 {
        nanoseconds(self.metadata.accessed())
    }

    #[getter]
    fn st_mtime_ns(&self) -> i128 {
        nanoseconds(self.metadata.modified())
    }

    #[getter]
    fn st_ctime_ns(&self) -> i128 {
        nanoseconds(self.metadata.changed())
    }

    #[getter]
    fn st_birthtime_ns(&self) -> i128 {
        nanoseconds(self.metadata.created())
    }
}

/// The description of a subvolume: id, path, parent's id, whether it is read-only, UUID, parent's UUID, received UUID,
/// generation, time of creation in nanoseconds.
type SubvolumeWords = (u64, Vec<u8>, Option<u64>, bool, String, Option<String>, Option<String>, u64, i128);

fn subvolume_words(subvolume: &Subvolume) -> SubvolumeWords {
    (
        subvolume.id(),
        path_bytes(&subvolume.path()).to_vec(),
        subvolume.parent_id(),
        subvolume.is_read_only(),
        subvolume.uuid().to_string(),
        subvolume.parent_uuid().map(|uuid| uuid.to_string()),
        subvolume.received_uuid().map(|uuid| uuid.to_string()),
        subvolume.generation(),
        nanoseconds(subvolume.created()),
    )
}

/// The reason why a filesystem is read-only after a failed transaction.
const GIVEN_UP: &str = "a transaction was given up";

/// The type bits of a mode; 0 for an invalid kind.
fn type_bits(kind: Option<FileKind>) -> u32 {
    match kind {
        Some(FileKind::File) => 0o100_000,
        Some(FileKind::Dir) => 0o040_000,
        Some(FileKind::Symlink) => 0o120_000,
        Some(FileKind::BlockDevice) => 0o060_000,
        Some(FileKind::CharDevice) => 0o020_000,
        Some(FileKind::Fifo) => 0o010_000,
        Some(FileKind::Socket) => 0o140_000,
        None => 0,
    }
}

/// The report of a copy: files, directories, symbolic links, hard links, special files, bytes, and what failed.
type CopyWords = (u64, u64, u64, u64, u64, u64, Vec<String>);

fn copy_options(keep: bool, owner: Option<(u32, u32)>) -> CopyOptions {
    let (owners, keep_owner) = (OwnerMap::default(), keep);
    CopyOptions { keep_owner, keep_times: keep, keep_xattrs: keep, keep_hard_links: keep, owner, owners }
}

/// What a copy left out.
#[derive(Default)]
struct CopyFailures(Mutex<Vec<String>>);

impl CopyFailures {
    fn note(&self, event: CopyEvent) {
        let text = match event {
            CopyEvent::Failed(reason) => reason,
            CopyEvent::LostAttribute { path, name } => {
                format!("{}: the attribute {} cannot be set there", path.display(), name.escape_ascii())
            }
            _ => return,
        };
        self.0.lock().push(text);
    }

    fn words(self, report: &CopyReport) -> CopyWords {
        let CopyReport { files, directories, symlinks, hard_links, special_files, bytes, .. } = *report;
        (files, directories, symlinks, hard_links, special_files, bytes, self.0.into_inner())
    }
}

/// An open filesystem.
#[pyclass(name = "Filesystem", module = "ubtrfs._ubtrfs", frozen)]
pub(crate) struct PythonFilesystem {
    /// `None` after the filesystem is closed. The lock is held only to copy or take the handle.
    fs: Mutex<Option<Filesystem>>,
    exceptions: DeviceExceptions,
}

impl PythonFilesystem {
    pub(crate) fn opened(
        py: Python<'_>,
        opened: ubtrfs::Result<Filesystem>,
        exceptions: DeviceExceptions,
    ) -> PyResult<Self> {
        let opened = opened.map_err(|error| exceptions.raise(py, &error));
        let fs = exceptions.settle(py, opened)?;
        Ok(Self { fs: Mutex::new(Some(fs)), exceptions })
    }

    pub(crate) fn exceptions(&self) -> &DeviceExceptions {
        &self.exceptions
    }

    fn handle(&self) -> PyResult<Filesystem> {
        self.fs.lock().clone().ok_or_else(|| PyValueError::new_err("I/O operation on closed filesystem."))
    }

    /// Runs work on the filesystem. The handle is moved, so that it is dropped while the interpreter is detached (I2).
    pub(crate) fn run<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Filesystem) -> ubtrfs::Result<T> + Send,
    ) -> PyResult<T> {
        let fs = self.handle()?;
        let done = py.detach(move || work(&fs)).map_err(|error| self.exceptions.raise(py, &error));
        self.exceptions.settle(py, done)
    }

    /// Runs long work in a thread, and watches it.
    pub(crate) fn run_job<T: Send>(
        &self,
        py: Python<'_>,
        watch: JobWatch,
        work: impl FnOnce(&Filesystem, &Job) -> ubtrfs::Result<T> + Send,
    ) -> PyResult<T> {
        let fs = self.handle()?;
        watch.run(py, &self.exceptions, move |job| work(&fs, job))
    }

    /// Runs work that the library offers to crates of its workspace only.
    fn run_engine<T: Send>(
        &self,
        py: Python<'_>,
        operation: &str,
        work: impl FnOnce(&Filesystem) -> Result<T, ubtrfs::FsError> + Send,
    ) -> PyResult<T> {
        let fs = self.handle()?;
        let done = py.detach(move || work(&fs)).map_err(|error| self.exceptions.raise_engine(py, operation, &error));
        self.exceptions.settle(py, done)
    }
}

/// Names and content.
#[pymethods]
impl PythonFilesystem {
    /// Opens a file.
    #[pyo3(signature = (name, *, read, write, append, truncate, create, exclusive, mode))]
    #[allow(clippy::too_many_arguments, reason = "the package passes the words of a mode by name")]
    fn open_file(
        &self,
        py: Python<'_>,
        name: &[u8],
        read: bool,
        write: bool,
        append: bool,
        truncate: bool,
        create: bool,
        exclusive: bool,
        mode: Option<u32>,
    ) -> PyResult<PythonFile> {
        let mut options = OpenOptions::new();
        options.read(read).write(write).append(append).truncate(truncate).create(create).create_new(exclusive);
        if let Some(mode) = mode {
            options.mode(mode);
        }
        let (file, home) = self.run(py, |fs| Ok((fs.open_with(path(name), &options)?, FileHome::of(fs))))?;
        Ok(PythonFile::new(file, home, self.exceptions.clone()))
    }

    /// The whole content of a file.
    fn read_bytes<'py>(&self, py: Python<'py>, name: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let found = self.run(py, |fs| {
            let file = fs.open(path(name))?;
            let len = file.metadata()?.len();
            let mut content = match usize::try_from(len) {
                Ok(len) if len <= AT_ONCE_BYTES => vec![0; len],
                _ => return Ok(WholeFile::Large(file, FileHome::of(fs), len)),
            };
            let nr_read = file.read_at(0, &mut content)?;
            content.truncate(nr_read);
            Ok(WholeFile::Small(content))
        })?;
        let (file, home, len) = match found {
            WholeFile::Small(content) => return Ok(PyBytes::new(py, &content)),
            WholeFile::Large(file, home, len) => (file, home, len),
        };
        // Dropped while the interpreter is detached (I2), also after an error.
        let file = PythonFile::new(file, home, self.exceptions.clone());
        let read = file.read_range(py, 0, len);
        file.close(py);
        read
    }

    /// Replaces the content of a file, or makes it.
    fn write_bytes(&self, py: Python<'_>, name: &[u8], data: &[u8]) -> PyResult<()> {
        self.run(py, |fs| fs.write(path(name), data))
    }

    /// The entries of a directory: name, type bits of the mode, and whether it is a subvolume.
    fn list_dir<'py>(&self, py: Python<'py>, name: &[u8]) -> PyResult<Vec<(Bound<'py, PyBytes>, u32, bool)>> {
        let entries = self.run(py, |fs| {
            let mut entries = Vec::new();
            for entry in fs.read_dir(path(name))? {
                let entry = entry?;
                let bytes = std::os::unix::ffi::OsStrExt::as_bytes(entry.file_name()).to_vec();
                entries.push((bytes, type_bits(entry.kind()), entry.is_subvolume()));
            }
            Ok(entries)
        })?;
        Ok(entries
            .into_iter()
            .map(|(name, bits, is_subvolume)| (PyBytes::new(py, &name), bits, is_subvolume))
            .collect())
    }

    fn mkdir(&self, py: Python<'_>, name: &[u8]) -> PyResult<()> {
        self.run(py, |fs| fs.create_dir(path(name)))
    }

    fn remove(&self, py: Python<'_>, name: &[u8]) -> PyResult<()> {
        self.run(py, |fs| fs.remove_file(path(name)))
    }

    fn rmdir(&self, py: Python<'_>, name: &[u8]) -> PyResult<()> {
        self.run(py, |fs| fs.remove_dir(path(name)))
    }

    fn rmtree(&self, py: Python<'_>, name: &[u8]) -> PyResult<()> {
        self.run(py, |fs| fs.remove_dir_all(path(name)))
    }

    fn rename(&self, py: Python<'_>, from: &[u8], to: &[u8]) -> PyResult<()> {
        self.run(py, |fs| fs.rename(path(from), path(to)))
    }

    fn link(&self, py: Python<'_>, original: &[u8], name: &[u8]) -> PyResult<()> {
        self.run(py, |fs| fs.hard_link(path(original), path(name)))
    }

    fn symlink(&self, py: Python<'_>, target: &[u8], name: &[u8]) -> PyResult<()> {
        self.run(py, |fs| fs.symlink(path(target), path(name)))
    }

    fn mknod(&self, py: Python<'_>, name: &[u8], mode: u32, device: (u32, u32)) -> PyResult<()> {
        self.run(py, |fs| fs.make_node(path(name), mode, device))
    }

    fn readlink<'py>(&self, py: Python<'py>, name: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let target = self.run(py, |fs| fs.read_link(path(name)))?;
        Ok(PyBytes::new(py, path_bytes(&target)))
    }

    fn reflink(&self, py: Python<'_>, from: &[u8], to: &[u8]) -> PyResult<()> {
        self.run(py, |fs| fs.reflink(path(from), path(to)))
    }

    /// Copies a file or directory of the host, with everything below it.
    fn copy_from_host(
        &self,
        py: Python<'_>,
        host: Vec<u8>,
        name: &[u8],
        keep: bool,
        owner: Option<(u32, u32)>,
    ) -> PyResult<CopyWords> {
        let failures = CopyFailures::default();
        let options = copy_options(keep, owner);
        let tell = |event| failures.note(event);
        let report = self.run(py, |fs| fs.copy_from_host(path(&host), path(name), &options, &tell))?;
        Ok(failures.words(&report))
    }

    /// Copies a file or directory to the host, with everything below it.
    fn copy_to_host(
        &self,
        py: Python<'_>,
        name: &[u8],
        host: Vec<u8>,
        keep: bool,
        owner: Option<(u32, u32)>,
    ) -> PyResult<CopyWords> {
        let failures = CopyFailures::default();
        let options = copy_options(keep, owner);
        let tell = |event| failures.note(event);
        let report = self.run(py, |fs| fs.copy_to_host(path(name), path(&host), &options, &tell))?;
        Ok(failures.words(&report))
    }

    fn stat(&self, py: Python<'_>, name: &[u8], follow: bool) -> PyResult<PythonStat> {
        let metadata = self.run(py, |fs| match follow {
            true => fs.metadata(path(name)),
            false => fs.symlink_metadata(path(name)),
        })?;
        Ok(PythonStat::new(metadata))
    }

    fn chmod(&self, py: Python<'_>, name: &[u8], mode: u32) -> PyResult<()> {
        self.run(py, |fs| fs.set_permissions(path(name), mode))
    }

    fn chown(&self, py: Python<'_>, name: &[u8], uid: Option<u32>, gid: Option<u32>, follow: bool) -> PyResult<()> {
        self.run(py, |fs| match follow {
            true => fs.set_owner(path(name), uid, gid),
            false => fs.set_owner_nofollow(path(name), uid, gid),
        })
    }

    /// Sets times, each as seconds and nanoseconds.
    #[pyo3(signature = (name, *, accessed=None, modified=None, created=None, follow=true))]
    fn utime(
        &self,
        py: Python<'_>,
        name: &[u8],
        accessed: Option<(i64, u32)>,
        modified: Option<(i64, u32)>,
        created: Option<(i64, u32)>,
        follow: bool,
    ) -> PyResult<()> {
        let mut times = FileTimes::new();
        if let Some(time) = accessed {
            times = times.set_accessed(system_time(time)?);
        }
        if let Some(time) = modified {
            times = times.set_modified(system_time(time)?);
        }
        if let Some(time) = created {
            times = times.set_created(system_time(time)?);
        }
        self.run(py, |fs| match follow {
            true => fs.set_times(path(name), times),
            false => fs.set_times_nofollow(path(name), times),
        })
    }

    fn getxattr<'py>(&self, py: Python<'py>, name: &[u8], key: &[u8]) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let value = self.run(py, |fs| fs.xattr(path(name), key))?;
        Ok(value.map(|value| PyBytes::new(py, &value)))
    }

    fn listxattr<'py>(&self, py: Python<'py>, name: &[u8]) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let names = self.run(py, |fs| fs.xattr_names(path(name)))?;
        Ok(names.iter().map(|name| PyBytes::new(py, name)).collect())
    }

    fn setxattr(&self, py: Python<'_>, name: &[u8], key: &[u8], value: &[u8]) -> PyResult<()> {
        self.run(py, |fs| fs.set_xattr(path(name), key, value))
    }

    fn removexattr(&self, py: Python<'_>, name: &[u8], key: &[u8]) -> PyResult<()> {
        self.run(py, |fs| fs.remove_xattr(path(name), key))
    }

    fn create_subvolume(&self, py: Python<'_>, name: &[u8]) -> PyResult<()> {
        self.run(py, |fs| fs.create_subvolume(path(name)))
    }

    fn snapshot(&self, py: Python<'_>, source: &[u8], name: &[u8], read_only: bool) -> PyResult<()> {
        let access = if read_only { SnapshotAccess::ReadOnly } else { SnapshotAccess::ReadWrite };
        self.run(py, |fs| fs.snapshot(path(source), path(name), access))
    }

    fn delete_subvolume(&self, py: Python<'_>, name: &[u8]) -> PyResult<()> {
        self.run(py, |fs| fs.delete_subvolume(path(name)))
    }

    fn set_read_only(&self, py: Python<'_>, name: &[u8], read_only: bool) -> PyResult<()> {
        self.run(py, |fs| fs.set_subvolume_read_only(path(name), read_only))
    }

    fn subvolumes(&self, py: Python<'_>) -> PyResult<Vec<SubvolumeWords>> {
        self.run(py, |fs| Ok(fs.subvolumes()?.iter().map(subvolume_words).collect()))
    }

    fn subvolume(&self, py: Python<'_>, name: &[u8]) -> PyResult<SubvolumeWords> {
        self.run(py, |fs| Ok(subvolume_words(&fs.subvolume(path(name))?)))
    }

    fn default_subvolume(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, |fs| fs.default_subvolume())
    }

    fn set_default_subvolume(&self, py: Python<'_>, name: &[u8]) -> PyResult<()> {
        self.run(py, |fs| fs.set_default_subvolume(path(name)))
    }

    /// Starts a send.
    #[pyo3(signature = (name, *, parent, clone_sources, version, compressed, no_data))]
    fn send(
        &self,
        name: Vec<u8>,
        parent: Option<Vec<u8>>,
        clone_sources: Vec<Vec<u8>>,
        version: u32,
        compressed: bool,
        no_data: bool,
    ) -> PyResult<PythonSend> {
        let options = SendOptions {
            parent: parent.map(|parent| path(&parent).to_owned()),
            clone_sources: clone_sources.iter().map(|source| path(source).to_owned()).collect(),
            version,
            compressed_data: compressed,
            no_data,
        };
        PythonSend::start(self.handle()?, name, options, self.exceptions.clone())
    }

    /// Starts a receive.
    #[pyo3(signature = (to, *, max_errors, keep, verify, force_decompress))]
    fn receive(
        &self,
        to: Vec<u8>,
        max_errors: u64,
        keep: bool,
        verify: bool,
        force_decompress: bool,
    ) -> PyResult<PythonReceive> {
        let options = ReceiveOptions { max_errors, keep, verify, force_decompress, ..ReceiveOptions::default() };
        PythonReceive::start(self.handle()?, to, options, self.exceptions.clone())
    }

    /// Makes all changes durable.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, Filesystem::sync)
    }

    /// Begins a transaction.
    fn begin(&self, py: Python<'_>) -> PyResult<()> {
        self.run_engine(py, "begin a transaction", |fs| fs.engine().begin_atomic())
    }

    /// Ends a transaction: its changes become durable together.
    fn commit(&self, py: Python<'_>) -> PyResult<()> {
        self.run_engine(py, "commit a transaction", |fs| fs.engine().commit_atomic())
    }

    /// Gives up the changes of a transaction, after which the filesystem takes no more changes. Does nothing if the
    /// filesystem is closed. Raises nothing, because the program has an exception already: an interrupt of a device waits
    /// for the next call.
    fn abort(&self, py: Python<'_>) {
        if let Ok(fs) = self.handle() {
            // Fails if no transaction runs: there is nothing to give up.
            let _ended = py.detach(move || fs.engine().abort_atomic(GIVEN_UP.to_owned()));
        }
    }

    /// Total, free and available bytes.
    fn usage(&self, py: Python<'_>) -> PyResult<(u64, u64, u64)> {
        let usage = self.run(py, Filesystem::usage)?;
        Ok((usage.total_bytes, usage.free_bytes, usage.available_bytes))
    }

    /// As `f_bsize`, `f_blocks`, `f_bfree`, `f_bavail`, `f_namemax` and `f_fsid` of `os.statvfs`.
    fn statvfs(&self, py: Python<'_>) -> PyResult<(u32, u64, u64, u64, u32, u64)> {
        let found = self.run_engine(py, "stat the filesystem", |fs| fs.engine().statfs())?;
        let id = u64::from(found.fsid[0]) | u64::from(found.fsid[1]) << 32;
        Ok((found.bsize, found.blocks, found.bfree, found.bavail, found.namelen, id))
    }

    fn set_label(&self, py: Python<'_>, label: &[u8]) -> PyResult<()> {
        self.run(py, |fs| fs.set_label(label))
    }

    fn label<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let label = self.run(py, |fs| Ok(fs.label()))?;
        Ok(PyBytes::new(py, &label))
    }

    /// Why the filesystem is read-only, if it is.
    fn read_only_reason(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.run(py, |fs| Ok(fs.read_only_reason()))
    }

    /// A handle whose new files belong to a user.
    fn with_caller(&self, py: Python<'_>, uid: u32, gid: u32, umask: u32) -> PyResult<Self> {
        let fs = self.run(py, |fs| Ok(fs.with_caller(Caller { uid, gid, umask })))?;
        Ok(Self { fs: Mutex::new(Some(fs)), exceptions: self.exceptions.clone() })
    }

    /// Commits and closes. Does nothing if the filesystem is closed. After a transaction that was given up, nothing is left
    /// to commit, and the program has the exception that ended it.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(fs) = self.fs.lock().take() else { return Ok(()) };
        let closed = py.detach(move || {
            let is_given_up = fs.read_only_reason().is_some_and(|reason| reason == GIVEN_UP);
            fs.close().or_else(|error| if is_given_up { Ok(()) } else { Err(error) })
        });
        self.exceptions.settle(py, closed.map_err(|error| self.exceptions.raise(py, &error)))
    }

    /// Forgets the handle. The filesystem stays open if there are other handles.
    fn forget(&self, py: Python<'_>) {
        let fs = self.fs.lock().take();
        py.detach(move || drop(fs));
    }
}

/// Files up to this size are read in one step.
const AT_ONCE_BYTES: usize = 1 << 20;

/// A file whose whole content is wanted.
enum WholeFile {
    Small(Vec<u8>),
    /// The open file, and its size.
    Large(File, FileHome, u64),
}

impl Drop for PythonFilesystem {
    fn drop(&mut self) {
        if let Some(fs) = self.fs.get_mut().take() {
            Python::attach(|py| py.detach(move || drop(fs)));
        }
    }
}
