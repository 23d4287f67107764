//! Checking a filesystem without changing it.

use pyo3::prelude::*;
use ubtrfs::{CheckOptions, Problem};

use crate::device::PythonDevice;
use crate::errors::{DeviceExceptions, path};

/// Whether the filesystem is clean, whether all parts of the check ran, and for each problem its code, whether it is
/// damage, and its text.
type CheckResult = (bool, bool, Vec<(String, bool, String)>);

/// Checks the filesystem on image files or block devices.
#[pyfunction]
pub(crate) fn check_paths(py: Python<'_>, paths: Vec<Vec<u8>>, data_csums: bool) -> PyResult<CheckResult> {
    check(py, data_csums, &DeviceExceptions::default(), |options, tell| {
        let paths: Vec<_> = paths.iter().map(|name| path(name)).collect();
        ubtrfs::check_images(&paths, options, tell)
    })
}

/// Checks the filesystem on devices that are objects of Python.
#[pyfunction]
pub(crate) fn check_objects(py: Python<'_>, objects: Vec<Bound<'_, PyAny>>, data_csums: bool) -> PyResult<CheckResult> {
    let exceptions = DeviceExceptions::default();
    let devices = PythonDevice::wrap(&objects, &exceptions)?;
    check(py, data_csums, &exceptions, |options, tell| ubtrfs::check(devices, options, tell))
}

fn check(
    py: Python<'_>,
    data_csums: bool,
    exceptions: &DeviceExceptions,
    work: impl FnOnce(CheckOptions, &mut dyn FnMut(Problem)) -> ubtrfs::Result<ubtrfs::Report> + Send,
) -> PyResult<CheckResult> {
    let mut problems = Vec::new();
    let report = py.detach(|| {
        let options = CheckOptions { data_csums, ..CheckOptions::default() };
        work(options, &mut |problem| {
            problems.push((problem.code.to_string(), problem.code.is_error(), problem.to_string()));
        })
    });
    let report = exceptions.settle(py, report.map_err(|error| exceptions.raise(py, &error)))?;
    Ok((report.is_clean(), report.complete, problems))
}
