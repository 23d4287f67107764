//! The extension module `ubtrfs._ubtrfs`: the library `ubtrfs` for the Python package in `crates/python/python`.
//!
//! The module is a thin layer. It converts arguments, lets other threads of Python run during the work, and raises errors
//! as `OSError`. Modes of files, kinds of paths, and everything else that Python's own modules do in a certain way, is in
//! the Python package, which is the only user of this module.
//!
//! ```text
//! filesystem   opening, making; names, attributes, subvolumes by path
//! file         open files: positioned I/O
//! stream       sends and receives, which run in a thread of their own
//! manage       balance, scrub, devices, quotas, space
//! job          long work, which the caller watches and cancels
//! memory       whether the content of a file fits into memory
//! device       devices that are objects of Python
//! options      options of new filesystems
//! errors       errors of the library as exceptions
//! ```
//!
//! Invariants:
//! - I1. Paths and names are `bytes`, as on disk.
//! - I2. The interpreter is detached while the library works, and while a handle of it is dropped: a device may be an
//!   object of Python, and the engine's threads need the interpreter to call it.

#![forbid(unsafe_code)]

mod check;
mod device;
mod errors;
mod file;
mod filesystem;
mod job;
mod manage;
mod memory;
mod options;
mod stream;

use pyo3::prelude::*;

/// Adds the classes and functions to the module.
#[pymodule(gil_used = true)]
fn _ubtrfs(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("CorruptionError", module.py().get_type::<errors::CorruptionError>())?;
    module.add_class::<filesystem::PythonFilesystem>()?;
    module.add_class::<filesystem::PythonStat>()?;
    module.add_class::<file::PythonFile>()?;
    module.add_class::<job::PythonJob>()?;
    module.add_class::<manage::PythonManage>()?;
    module.add_class::<stream::PythonSend>()?;
    module.add_class::<stream::PythonReceive>()?;
    module.add_function(wrap_pyfunction!(filesystem::open_paths, module)?)?;
    module.add_function(wrap_pyfunction!(filesystem::open_objects, module)?)?;
    module.add_function(wrap_pyfunction!(options::make_paths, module)?)?;
    module.add_function(wrap_pyfunction!(options::make_objects, module)?)?;
    module.add_function(wrap_pyfunction!(filesystem::make_in_memory, module)?)?;
    module.add_function(wrap_pyfunction!(check::check_paths, module)?)?;
    module.add_function(wrap_pyfunction!(check::check_objects, module)?)
}
