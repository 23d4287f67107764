//! Making filesystems: the options of a new filesystem, from the keywords of Python.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ubtrfs::format::{CompatRo, Timespec};
use ubtrfs::{Filesystem, MkfsOptions, Uuid, bindings};

use crate::device::PythonDevice;
use crate::errors::{DeviceExceptions, path};
use crate::filesystem::{OpenWords, PythonFilesystem};

/// The options of a new filesystem. The names are those of the function `make` in Python.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct MakeWords {
    label: Vec<u8>,
    uuid: Option<String>,
    nodesize: u32,
    sectorsize: u32,
    csum: String,
    data: Option<String>,
    metadata: Option<String>,
    mixed: bool,
    block_group_tree: bool,
    root_owner: (u32, u32),
    force: bool,
    time: Option<(i64, u32)>,
}

impl MakeWords {
    fn options(self, nr_devices: usize) -> PyResult<MkfsOptions> {
        let mut options = MkfsOptions {
            label: self.label,
            nodesize: self.nodesize,
            sectorsize: self.sectorsize,
            csum_type: bindings::csum_type(&self.csum).map_err(PyValueError::new_err)?,
            mixed: self.mixed,
            root_owner: self.root_owner,
            force: self.force,
            ..MkfsOptions::default()
        };
        let names = (self.data.as_deref(), self.metadata.as_deref());
        options = bindings::set_profiles(options, nr_devices, names.0, names.1).map_err(PyValueError::new_err)?;
        if let Some(text) = &self.uuid {
            options.fsid = Uuid::parse_str(text).map_err(|error| PyValueError::new_err(format!("uuid: {error}")))?;
        }
        if self.block_group_tree {
            options.compat_ro |= CompatRo::BLOCK_GROUP_TREE;
        }
        if let Some((sec, nsec)) = self.time {
            options.now = Timespec { sec, nsec };
        }
        Ok(options)
    }
}

/// Makes a filesystem on image files or block devices, and opens it. With a size, the files are new.
#[pyfunction]
pub(crate) fn make_paths(
    py: Python<'_>,
    paths: Vec<Vec<u8>>,
    size: Option<u64>,
    words: MakeWords,
    open: OpenWords,
) -> PyResult<PythonFilesystem> {
    let exceptions = DeviceExceptions::default();
    let (options, mount) = (words.options(paths.len())?, open.options(py, &exceptions)?);
    let made = py.detach(|| {
        let paths: Vec<_> = paths.iter().map(|name| path(name)).collect();
        Filesystem::make_images(&paths, size, &options, mount)
    });
    PythonFilesystem::opened(py, made, exceptions)
}

/// Makes a filesystem on devices that are objects of Python, and opens it.
#[pyfunction]
pub(crate) fn make_objects(
    py: Python<'_>,
    objects: Vec<Bound<'_, PyAny>>,
    words: MakeWords,
    open: OpenWords,
) -> PyResult<PythonFilesystem> {
    let exceptions = DeviceExceptions::default();
    let devices = PythonDevice::wrap(&objects, &exceptions)?;
    let (options, mount) = (words.options(devices.len())?, open.options(py, &exceptions)?);
    let made = py.detach(|| {
        let refs: Vec<_> = devices.iter().map(AsRef::as_ref).collect();
        Filesystem::make_on_devices(&refs, &options)?;
        Filesystem::open_devices(devices, mount)
    });
    PythonFilesystem::opened(py, made, exceptions)
}
