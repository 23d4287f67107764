//! [`MemoryLimit`]: a cgroup with a memory limit, in the hierarchy (version 2 or 1) that has the machine's memory
//! controller.
//!
//! The memory that counts toward a cgroup's limit is the memory of its processes, and the page cache that they fill by
//! reading and writing files.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// A cgroup that is removed on drop. All processes in the cgroup must have ended before the drop.
#[derive(Debug)]
pub(crate) struct MemoryLimit {
    dir: PathBuf,
    version: CgroupVersion,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CgroupVersion {
    One,
    Two,
}

impl MemoryLimit {
    pub(crate) fn new(bytes: u64) -> Result<Self> {
        let (root, version) = find()?;
        let dir = root.join(format!("ubtrfs-bench-{}", std::process::id()));
        if version == CgroupVersion::Two {
            // Errors are ignored, because the controller may already be enabled or managed by another
            // program.
            let _ = fs::write(root.join("cgroup.subtree_control"), "+memory");
        }
        fs::create_dir(&dir).with_context(|| format!("cannot make the cgroup {}; run as root", dir.display()))?;
        let limit = Self { dir, version };
        let (file, swap) = match version {
            CgroupVersion::One => ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
            CgroupVersion::Two => ("memory.max", "memory.swap.max"),
        };
        fs::write(limit.dir.join(file), bytes.to_string())
            .with_context(|| format!("cannot limit memory in {}", limit.dir.display()))?;
        // Limit swap too, because memory that is swapped out does not count toward the memory limit. Kernels without
        // swap accounting lack the file of the swap limit.
        let _ = fs::write(limit.dir.join(swap), if version == CgroupVersion::One { bytes } else { 0 }.to_string());
        Ok(limit)
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The largest memory use of the cgroup so far, in bytes.
    pub(crate) fn peak_bytes(&self) -> Option<u64> {
        let file = match self.version {
            CgroupVersion::One => "memory.max_usage_in_bytes",
            CgroupVersion::Two => "memory.peak",
        };
        fs::read_to_string(self.dir.join(file)).ok()?.trim().parse().ok()
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        // Retry, because the kernel refuses to remove a cgroup while it still counts a process that has just ended.
        for _ in 0..50 {
            if fs::remove_dir(&self.dir).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        eprintln!("bench: the cgroup {} could not be removed", self.dir.display());
    }
}

/// Finds the mount of the memory controller.
fn find() -> Result<(PathBuf, CgroupVersion)> {
    let mounts = fs::read_to_string("/proc/mounts").context("cannot read /proc/mounts")?;
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let [_, dir, kind, options, ..] = fields[..] else { continue };
        let dir = PathBuf::from(dir);
        if kind == "cgroup" && options.split(',').any(|option| option == "memory") {
            return Ok((dir, CgroupVersion::One));
        }
        let has = |file: &str| {
            fs::read_to_string(dir.join(file)).is_ok_and(|text| text.split_whitespace().any(|word| word == "memory"))
        };
        if kind == "cgroup2" && has("cgroup.controllers") {
            return Ok((dir, CgroupVersion::Two));
        }
    }
    bail!("no cgroup with the memory controller is mounted; use --memory-limit 0 for no limit")
}
