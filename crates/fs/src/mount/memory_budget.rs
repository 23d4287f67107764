//! The memory of a filesystem, and how it is divided.
//!
//! | share | of the total | what for |
//! |---|---|---|
//! | fixed | [`PROGRAM_BYTES`], at most five sixths | code, stacks, buffers of device I/O, memory that the allocator keeps |
//! | dirty | a quarter of the rest, from [`DIRTY_MIN`] to [`DIRTY_MAX`] | dirty file data and buffers kept for it |
//! | reads | a sixteenth of the rest | read-ahead |
//! | engine | half of the rest, and the part of the quarter above that exceeds [`DIRTY_MAX`] | node cache, and delayed items of two transactions (if both are full, they exceed this share by a sixteenth) |
//! | inodes | a sixteenth of the rest | inodes that are not in use |
//! | marks | a 128th of the rest | which inodes have no extended attributes |
//! | subvolumes | a thirty-second of the rest | subvolumes that are not in use; their trees take a thirty-second of the engine's share, and both are at least about a MiB |
//! | names | a thirty-second of the rest | hashes of the names of directories |
//! | stream | a thirty-second of the total, at least [`STREAM_MIN`] and at most [`STREAM_MAX`] | each of two shares, which the running sends and receives divide. The first holds data that sends have read, and commands that wait in receives. The second holds directories that receives know, the state that `--verify` expects, and the parts of extents that sends remember as clone sources |
//!
//! The remainder is for memory that a commit holds until it has written everything: copied nodes, delayed
//! refs, batches.

use ubtrfs_format::clock::fixed_clock;

/// Memory shares of one filesystem, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryBudget {
    /// Dirty file data, and buffers kept for it.
    pub dirty_bytes: u64,
    /// Read-ahead.
    pub read_bytes: u64,
    /// Node cache and delayed items.
    pub engine_bytes: u64,
    /// Cached inodes.
    pub inode_bytes: u64,
    /// Hashes of the names of directories.
    pub name_bytes: u64,
    /// Marks of inodes that have no attributes.
    pub bare_bytes: u64,
    /// Subvolumes in memory.
    pub subvolume_bytes: u64,
    /// Each of two shares of sends and receives.
    pub stream_bytes: u64,
}

impl MemoryBudget {
    /// Divides `total_bytes`. With a very small total, the shares with a minimum may exceed the total.
    pub(crate) fn of(total_bytes: u64) -> Self {
        let rest = total_bytes.saturating_sub(PROGRAM_BYTES).max(total_bytes / 6);
        let dirty_bytes = (rest / 4).clamp(DIRTY_MIN, DIRTY_MAX);
        Self {
            dirty_bytes,
            read_bytes: rest / 16,
            engine_bytes: (rest / 2).saturating_add((rest / 4).saturating_sub(dirty_bytes)),
            inode_bytes: rest / 16,
            name_bytes: rest / 32,
            bare_bytes: rest / 128,
            subvolume_bytes: rest / 32,
            stream_bytes: (total_bytes / 32).clamp(STREAM_MIN, STREAM_MAX),
        }
    }
}

/// A quarter of the machine's memory, or of its control group's limit if that is less; at least 64 MiB, at most 1 GiB. With
/// a fixed clock always the same, because the memory decides when data is written.
pub(crate) fn default_memory_bytes() -> u64 {
    if fixed_clock().is_some() {
        return DEFAULT_REPRODUCIBLE;
    }
    let info = rustix::system::sysinfo();
    let machine = (info.totalram as u64).saturating_mul(info.mem_unit.into());
    let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let group = limits.iter().filter_map(|path| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok()).min();
    (machine.min(group.unwrap_or(u64::MAX)) / 4).clamp(DEFAULT_MIN, DEFAULT_MAX)
}

const PROGRAM_BYTES: u64 = 120 << 20;
const DEFAULT_REPRODUCIBLE: u64 = 512 << 20;
/// Maximum memory for dirty data, which is enough for a few batches of large writes. More memory would only let data
/// wait longer.
const DIRTY_MAX: u64 = 96 << 20;
const DIRTY_MIN: u64 = 4 << 20;
/// Two of the largest commands of a stream: one is applied while the next one arrives.
const STREAM_MAX: u64 = 32 << 20;
const STREAM_MIN: u64 = 2 << 20;
const DEFAULT_MAX: u64 = 1 << 30;
const DEFAULT_MIN: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_stay_within_the_total() {
        for mib in [16u64, 64, 128, 512, 1024, 65536] {
            let budget = MemoryBudget::of(mib << 20);
            assert!(
                budget.dirty_bytes
                    + budget.read_bytes
                    + budget.engine_bytes
                    + budget.inode_bytes
                    + budget.name_bytes
                    + budget.bare_bytes
                    + budget.subvolume_bytes
                    + 2 * budget.stream_bytes
                    < mib << 20,
                "{mib}: {budget:?}"
            );
        }
        assert!((DEFAULT_MIN..=DEFAULT_MAX).contains(&default_memory_bytes()));
    }
}
