//! Growth of work: the cost of typical operations at sizes `n`, `2n` and `4n` of one property of a filesystem.
//!
//! A [`Dimension`] is a property that doubles (files, block groups, snapshots ...), and the operations on it, in stages.
//! Each stage is measured by its processor time and by counts. The exponent `e` of a stage says that its cost grows like
//! `n^e`; 1 is linear.
//!
//! - I1. Counts are of logical work, so they do not depend on the speed or load of the machine. Background threads may
//!   change them by a few percent.

use std::ops::AddAssign;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ubtrfs_device::{Device, MemoryDevice};
use ubtrfs_format::RootId;
use ubtrfs_fs::{Caller, FallocateMode, Fs, InodeId, Job, MountOptions, NewInode, mode};

/// The cost of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Processor time of the whole process.
    pub cpu: Duration,
    /// Lookups of tree nodes in the cache.
    pub nodes: u64,
    /// Tree nodes written, and leaves made in memory.
    pub written: u64,
    /// Block groups, chunks, device extents and trees visited by walks of all of them.
    pub walked: u64,
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.cpu += other.cpu;
        self.nodes += other.nodes;
        self.written += other.written;
        self.walked += other.walked;
    }
}

impl Cost {
    /// The sum of all counts.
    pub fn counted(&self) -> u64 {
        self.nodes + self.written + self.walked
    }
}

/// Costs of the stages of one run, in order.
#[derive(Debug)]
pub(crate) struct Stages {
    fs: Arc<Fs>,
    /// Names and costs.
    pub costs: Vec<(&'static str, Cost)>,
}

impl Stages {
    fn on(device_bytes: u64) -> Result<Self> {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(device_bytes));
        ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default())?;
        // Memory is ample, so that costs of a too small cache do not count. No commit comes from the clock.
        let options = MountOptions::parse("commit=300")?;
        let options = MountOptions { memory_bytes: 4 << 30, ..options };
        Ok(Self { fs: Fs::open(vec![device], options)?, costs: Vec::new() })
    }

    fn run(&mut self, name: &'static str, work: impl FnOnce(&Fs) -> Result<()>) -> Result<()> {
        let before = now(&self.fs);
        work(&self.fs).context(name)?;
        let after = now(&self.fs);
        let cost = Cost {
            cpu: after.cpu.saturating_sub(before.cpu),
            nodes: after.nodes.saturating_sub(before.nodes),
            written: after.written.saturating_sub(before.written),
            walked: after.walked.saturating_sub(before.walked),
        };
        self.costs.push((name, cost));
        Ok(())
    }
}

fn now(fs: &Fs) -> Cost {
    let metrics = fs.metrics();
    let of = |name: &str| metrics.iter().filter(|metric| metric.name == name).map(|metric| metric.value as u64).sum();
    let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Cost {
        cpu: Duration::new(cpu.tv_sec.unsigned_abs(), u32::try_from(cpu.tv_nsec).unwrap_or(0)),
        nodes: u64::saturating_add(of("node_cache_hits_total"), of("node_cache_misses_total")),
        written: u64::saturating_add(of("tree_nodes_written_total"), of("tree_leaves_made_total")),
        walked: of("walked_total"),
    }
}

/// A property that doubles, and the operations on it.
#[derive(Clone, Copy, Debug)]
pub struct Dimension {
    /// Name of the property.
    pub name: &'static str,
    /// The smallest size of a full run.
    pub base: u64,
    /// The smallest size of a short run, which only counts.
    pub short: u64,
    stages: fn(u64) -> Result<Stages>,
}

impl Dimension {
    /// All dimensions.
    pub const ALL: [Self; 8] = [
        Self { name: "files in one directory", base: 50_000, short: 8000, stages: files_in_one },
        Self { name: "files in many directories", base: 50_000, short: 8000, stages: files_in_many },
        Self { name: "extents of a file", base: 20_000, short: 16_000, stages: extents },
        Self { name: "block groups", base: 1000, short: 256, stages: block_groups },
        Self { name: "snapshots", base: 1000, short: 128, stages: snapshots },
        Self { name: "subvolumes", base: 1000, short: 64, stages: subvolumes },
        Self { name: "links of a file", base: 10_000, short: 5000, stages: links },
        Self { name: "size of the device (TiB)", base: 25, short: 4, stages: device_size },
    ];

    /// Runs the operations at this size.
    ///
    /// # Errors
    ///
    /// The failure of an operation.
    pub fn run(&self, size: u64) -> Result<Vec<(&'static str, Cost)>> {
        let mut stages = (self.stages)(size).with_context(|| format!("{} {}", size, self.name))?;
        stages.run("close", |fs| Ok(fs.close()?))?;
        Ok(stages.costs)
    }
}

/// The exponent of growth from `one` at a size to `other` at `factor` times the size.
pub fn exponent(one: f64, other: f64, factor: f64) -> f64 {
    (other.max(1e-9) / one.max(1e-9)).ln() / factor.ln()
}

const TIB: u64 = 1 << 40;
const GIB: u64 = 1 << 30;
const DIR_FILES: u64 = 500;
const WINDOW_EXTENTS: u64 = 4000;

fn name_of(number: u64) -> Vec<u8> {
    format!("{number:08}").into_bytes()
}

fn make_file(fs: &Fs, dir: InodeId, name: &[u8]) -> Result<InodeId> {
    Ok(fs.create(dir, name, NewInode { mode: mode::REGULAR | 0o644, ..NewInode::default() }, &Caller::ROOT)?.id)
}

fn make_dir(fs: &Fs, dir: InodeId, name: &[u8]) -> Result<InodeId> {
    Ok(fs.create(dir, name, NewInode { mode: mode::DIRECTORY | 0o755, ..NewInode::default() }, &Caller::ROOT)?.id)
}

fn list(fs: &Fs, dir: InodeId) -> Result<u64> {
    let (mut number, mut cookie) = (0, 0);
    loop {
        let before = number;
        fs.readdir(dir, cookie, &mut |entry| {
            number += 1;
            cookie = entry.next_cookie;
            number - before < 1000
        })?;
        if number == before {
            return Ok(number);
        }
    }
}

fn files_in_one(size: u64) -> Result<Stages> {
    files(size, size)
}

fn files_in_many(size: u64) -> Result<Stages> {
    files(size, DIR_FILES)
}

fn files(size: u64, per_dir: u64) -> Result<Stages> {
    let mut stages = Stages::on(TIB)?;
    let mut dirs = Vec::new();
    stages.run("create", |fs| {
        for number in 0..size {
            if number.is_multiple_of(per_dir) {
                dirs.push(make_dir(fs, fs.root(), &name_of(number))?);
            }
            make_file(fs, dirs[dirs.len() - 1], &name_of(number))?;
        }
        Ok(())
    })?;
    stages.run("sync", |fs| Ok(fs.sync()?))?;
    stages.run("list", |fs| {
        let found: u64 = dirs.iter().map(|dir| list(fs, *dir)).sum::<Result<u64>>()?;
        ensure!(found >= size, "{found} entries of {size}");
        Ok(())
    })?;
    let dir_of = |number: u64| dirs[(number / per_dir) as usize];
    stages.run("stat", |fs| {
        (0..size).try_for_each(|number| Ok(fs.lookup(dir_of(number), &name_of(number)).map(drop)?))
    })?;
    stages.run("write", |fs| {
        for number in (0..size).step_by(10) {
            fs.write_all(fs.lookup(dir_of(number), &name_of(number))?.id, 0, &[7; 100])?;
        }
        Ok(fs.sync()?)
    })?;
    stages.run("unlink", |fs| (0..size).try_for_each(|number| Ok(fs.unlink(dir_of(number), &name_of(number))?)))?;
    stages.run("sync again", |fs| Ok(fs.sync()?))?;
    Ok(stages)
}

fn extents(size: u64) -> Result<Stages> {
    let mut stages = Stages::on(TIB)?;
    let file = make_file(&stages.fs, stages.fs.root(), b"file")?;
    stages.run("write", |fs| {
        // Every second sector, so that no two extents join.
        (0..size).try_for_each(|number| fs.write_all(file, number * 8192, &[number as u8; 4096]))?;
        Ok(fs.sync()?)
    })?;
    stages.run("map", |fs| {
        let found = fs.extents(file)?.len() as u64;
        ensure!(found >= size, "{found} extents of {size}");
        Ok(())
    })?;
    stages.run("read", |fs| {
        let mut buf = vec![0; 1 << 20];
        let end = size * 8192;
        (0..end).step_by(buf.len()).try_for_each(|at| Ok(fs.read_into(file, at, &mut buf).map(drop)?))
    })?;
    stages.run("overwrite", |fs| {
        // In an order that is not that of the file, within windows. In a random order over the whole file, what writeback
        // takes at once is spread over more leaves the longer the file is, so an overwrite costs more lookups: 0.1 at
        // 32,000 extents, 1.3 at 512,000.
        for begin in (0..size).step_by(WINDOW_EXTENTS as usize) {
            let len = WINDOW_EXTENTS.min(size - begin);
            let at = |number| (begin + number * 7919 % len) * 8192;
            (0..len).try_for_each(|number| fs.write_all(file, at(number), &[9; 4096]))?;
        }
        Ok(fs.sync()?)
    })?;
    stages.run("clone", |fs| {
        let copy = make_file(fs, fs.root(), b"copy")?;
        let len = fs.getattr(file)?.size;
        fs.clone_range(file, 0, copy, 0, len)?;
        Ok(fs.sync()?)
    })?;
    stages.run("remove", |fs| {
        fs.unlink(fs.root(), b"copy")?;
        fs.unlink(fs.root(), b"file")?;
        Ok(fs.sync()?)
    })?;
    Ok(stages)
}

fn block_groups(size: u64) -> Result<Stages> {
    // A trim visits the block groups and the holes between them on the device.
    let mut stages = Stages::on(200 * TIB)?;
    let mut files = Vec::new();
    stages.run("fallocate", |fs| {
        for number in 0..8 {
            let file = make_file(fs, fs.root(), &name_of(number))?;
            fs.fallocate(file, 0, size / 8 * GIB, FallocateMode::empty())?;
            files.push(file);
        }
        Ok(fs.sync()?)
    })?;
    // The work of this stage does not depend on the number of block groups.
    stages.run("statfs, sync", |fs| {
        for number in 0..100 {
            fs.statfs()?;
            make_file(fs, fs.root(), &name_of(1000 + number))?;
            fs.sync()?;
        }
        Ok(())
    })?;
    stages.run("trim", |fs| Ok(fs.trim(&(0..u64::MAX), 0, &Job::default()).map(drop)?))?;
    stages.run("usage", |fs| {
        drop(fs.space_usage());
        Ok(())
    })?;
    stages.run("smallest size", |fs| Ok(fs.min_device_size(ubtrfs_format::DevId(1)).map(drop)?))?;
    stages.run("remove", |fs| {
        for number in 0..8 {
            fs.unlink(fs.root(), &name_of(number))?;
        }
        fs.sync()?;
        // The next commit removes the block groups that have become empty.
        make_file(fs, fs.root(), b"more")?;
        Ok(fs.sync()?)
    })?;
    Ok(stages)
}

/// From 250 to 1000 snapshots, the number of written blocks grows with the exponent 1.26, and on Linux 6.18 with 1.27.
/// A commit touches more leaves of the extent tree and of the parent directory as these trees grow. The growth ends
/// when each changed item has a leaf of its own: from 1000 to 4000 snapshots, the exponent is 1.16, and that of the
/// processor time is 1.0.
fn snapshots(size: u64) -> Result<Stages> {
    let mut stages = Stages::on(TIB)?;
    let fs = Arc::clone(&stages.fs);
    let source = fs.create_subvolume(fs.root(), b"source", &Caller::ROOT)?;
    let files: Vec<InodeId> = (0..200).map(|number| make_file(&fs, source, &name_of(number))).collect::<Result<_>>()?;
    stages.run("make", |fs| {
        for number in 0..size {
            fs.write_all(files[number as usize % files.len()], 0, &[number as u8; 8192])?;
            fs.snapshot(source.root, fs.root(), &name_of(number), true)?;
        }
        Ok(())
    })?;
    subvolume_ends(&mut stages, size)?;
    Ok(stages)
}

/// As with snapshots, written blocks grow faster than the number of subvolumes: with the exponent 1.29 here, and with
/// 1.28 on Linux 6.18 if each subvolume is synced.
fn subvolumes(size: u64) -> Result<Stages> {
    let mut stages = Stages::on(TIB)?;
    stages.run("make", |fs| {
        for number in 0..size {
            let dir = fs.create_subvolume(fs.root(), &name_of(number), &Caller::ROOT)?;
            make_file(fs, dir, b"file")?;
        }
        Ok(())
    })?;
    subvolume_ends(&mut stages, size)?;
    Ok(stages)
}

/// Lists, changes and deletes `size` subvolumes.
fn subvolume_ends(stages: &mut Stages, size: u64) -> Result<()> {
    stages.run("list", |fs| {
        let found = fs.subvolumes()?.len() as u64;
        ensure!(found >= size, "{found} subvolumes of {size}");
        Ok(())
    })?;
    // The work of this stage does not depend on the number of subvolumes.
    stages.run("100 syncs", |fs| {
        for number in 0..100 {
            make_file(fs, fs.root(), format!("file {number}").as_bytes())?;
            fs.sync()?;
        }
        Ok(())
    })?;
    stages.run("delete", |fs| {
        for number in 0..size {
            let id = fs.lookup(fs.root(), &name_of(number))?.id;
            ensure!(id.root != RootId::FS_TREE, "not a subvolume");
            fs.delete_subvolume(fs.root(), &name_of(number), None)?;
        }
        Ok(())
    })?;
    stages.run("finish", |fs| Ok(fs.finish_deletions(&mut |_| Ok(()))?))
}

fn links(size: u64) -> Result<Stages> {
    let mut stages = Stages::on(TIB)?;
    let fs = Arc::clone(&stages.fs);
    let file = make_file(&fs, fs.root(), b"file")?;
    let dir = make_dir(&fs, fs.root(), b"dir")?;
    stages.run("link", |fs| {
        (0..size).try_for_each(|number| fs.link(file, dir, &name_of(number)).map(drop))?;
        Ok(fs.sync()?)
    })?;
    stages.run("stat", |fs| (0..size).try_for_each(|number| Ok(fs.lookup(dir, &name_of(number)).map(drop)?)))?;
    stages.run("paths", |fs| {
        let found = fs.paths_of(file, usize::MAX, usize::MAX)?.0.len() as u64;
        ensure!(found > size, "{found} paths of {size}");
        Ok(())
    })?;
    stages.run("fsync", |fs| {
        fs.write_all(file, 0, b"new")?;
        Ok(fs.fsync(file, false)?)
    })?;
    stages.run("unlink", |fs| {
        (0..size).try_for_each(|number| fs.unlink(dir, &name_of(number)))?;
        Ok(fs.sync()?)
    })?;
    Ok(stages)
}

fn device_size(size: u64) -> Result<Stages> {
    let mut stages = Stages::on(size * TIB)?;
    // All stages but the trim do the same work on a device of any size.
    stages.run("allocate 64 GiB", |fs| {
        let file = make_file(fs, fs.root(), b"file")?;
        fs.fallocate(file, 0, 64 * GIB, FallocateMode::empty())?;
        Ok(fs.sync()?)
    })?;
    stages.run("statfs", |fs| (0..100).try_for_each(|_| Ok(fs.statfs().map(drop)?)))?;
    stages.run("trim", |fs| Ok(fs.trim(&(0..u64::MAX), 0, &Job::default()).map(drop)?))?;
    Ok(stages)
}
