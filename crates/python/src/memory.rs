//! [`check_room`]: whether the machine has the memory for content of a file.
//!
//! The size of a file is content of an image, and a sparse file can be larger than any memory. Linux promises memory that it
//! does not have, and ends the process that uses it.

use std::fs;
use std::path::Path;

use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

/// Shorter content is not compared with the memory.
const SMALL_BYTES: u64 = 64 << 20;

/// Raises a `MemoryError` for content that does not fit into the free memory of this process.
pub(crate) fn check_room(len: u64) -> PyResult<()> {
    if len <= SMALL_BYTES {
        return Ok(());
    }
    let room = available_bytes().unwrap_or(u64::MAX).min(isize::MAX.unsigned_abs() as u64);
    if len <= room {
        return Ok(());
    }
    Err(PyMemoryError::new_err(format!(
        "{len} bytes do not fit into {room} bytes of free memory; read the file in pieces, and see SEEK_DATA for sparse files"
    )))
}

/// Free memory and swap space, within the limit of this process's group; `None` if Linux does not tell.
fn available_bytes() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let machine = field(&info, "MemAvailable:")?.saturating_add(field(&info, "SwapFree:").unwrap_or(0));
    let machine = machine.saturating_mul(1024);
    Some(group_bytes().map_or(machine, |group| group.min(machine)))
}

/// The number behind a name.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
}

/// What the memory limit of this process's cgroup leaves; `None` without a limit.
fn group_bytes() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let name = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let group = Path::new("/sys/fs/cgroup").join(name);
    let number = |file: &str| fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    // Pages of files count as used, and are given up when memory is needed.
    let files = fs::read_to_string(group.join("memory.stat")).ok().and_then(|text| field(&text, "inactive_file "));
    let used = number("memory.current")?.saturating_sub(files.unwrap_or(0));
    Some(number("memory.max")?.saturating_sub(used))
}
