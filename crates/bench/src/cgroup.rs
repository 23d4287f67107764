//! A cgroup with a limit on memory, version 2 or 1, whichever of them has the machine's memory controller.
//!
//! What counts is what the kernel charges: the processes' own memory and the page cache of what they read and write.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// Removed when dropped; no process may be in it then.
#[derive(Debug)]
pub(crate) struct MemoryLimit {
    dir: PathBuf,
    version: Version,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl MemoryLimit {
    pub(crate) fn new(bytes: u64) -> Result<Self> {
        let (root, version) = find()?;
        let dir = root.join(format!("ubtrfs-bench-{}", std::process::id()));
        if version == Version::Two {
            // Where it is on already, or a manager keeps it on, there is nothing to do.
            let _ = fs::write(root.join("cgroup.subtree_control"), "+memory");
        }
        fs::create_dir(&dir).with_context(|| format!("cannot make the cgroup {}; run as root", dir.display()))?;
        let limit = Self { dir, version };
        let (file, swap) = match version {
            Version::One => ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
            Version::Two => ("memory.max", "memory.swap.max"),
        };
        fs::write(limit.dir.join(file), bytes.to_string())
            .with_context(|| format!("cannot limit memory in {}", limit.dir.display()))?;
        // No swap to hide in. Kernels without accounting of swap have no such file.
        let _ = fs::write(limit.dir.join(swap), if version == Version::One { bytes } else { 0 }.to_string());
        Ok(limit)
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Most memory that was charged at any time, in bytes.
    pub(crate) fn peak_bytes(&self) -> Option<u64> {
        let file = match self.version {
            Version::One => "memory.max_usage_in_bytes",
            Version::Two => "memory.peak",
        };
        fs::read_to_string(self.dir.join(file)).ok()?.trim().parse().ok()
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        // A process that has just ended may still be counted.
        for _ in 0..50 {
            if fs::remove_dir(&self.dir).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        eprintln!("bench: the cgroup {} could not be removed", self.dir.display());
    }
}

/// The mount that has the memory controller.
fn find() -> Result<(PathBuf, Version)> {
    let mounts = fs::read_to_string("/proc/mounts").context("cannot read /proc/mounts")?;
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let [_, dir, kind, options, ..] = fields[..] else { continue };
        let dir = PathBuf::from(dir);
        if kind == "cgroup" && options.split(',').any(|option| option == "memory") {
            return Ok((dir, Version::One));
        }
        let has = |file: &str| {
            fs::read_to_string(dir.join(file)).is_ok_and(|text| text.split_whitespace().any(|word| word == "memory"))
        };
        if kind == "cgroup2" && has("cgroup.controllers") {
            return Ok((dir, Version::Two));
        }
    }
    bail!("no cgroup with the memory controller is mounted; leave the limit out with --memory-limit 0")
}
