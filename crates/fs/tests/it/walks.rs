//! Tests walks through many directories: the leaves of the directories are read ahead, and concurrent changes do not
//! falsify the results.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ubtrfs_device::{Device, MemoryDevice};
use ubtrfs_fs::{Caller, Fs, InodeId, Metric, MountOptions, NewInode};
use ubtrfs_testkit::{FaultDevice, FaultPlan};

const NR_DIRS: u64 = 60;
const NR_FILES: u64 = 200;

fn name(number: u64) -> Vec<u8> {
    format!("a-name-of-some-length-{number:06}").into_bytes()
}

fn open(device: &Arc<dyn Device>, memory_bytes: u64) -> Arc<Fs> {
    let options = MountOptions { memory_bytes, ..MountOptions::default() };
    Fs::open(vec![Arc::clone(device)], options).unwrap()
}

/// A device with directories full of files. The mode of each file encodes the number of the file.
fn full_device() -> Arc<dyn Device> {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(1 << 30));
    ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
    let fs = open(&device, 256 << 20);
    for dir in 0..NR_DIRS {
        let dir = fs.create(fs.root(), &name(dir), NewInode::dir(0o755), &Caller::ROOT).unwrap().id;
        for file in 0..NR_FILES {
            fs.create(dir, &name(file), NewInode::file(mode(file)), &Caller::ROOT).unwrap();
        }
    }
    fs.close().unwrap();
    device
}

fn mode(file: u64) -> u32 {
    (file % 0o777) as u32
}

fn names(fs: &Fs, dir: InodeId) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    fs.readdir(dir, 2, &mut |entry| {
        names.push(entry.name.to_vec());
        true
    })
    .unwrap();
    names
}

fn dir(fs: &Fs, number: u64) -> InodeId {
    fs.lookup(fs.root(), &name(number)).unwrap().id
}

#[test]
fn leaves_of_a_walk_are_read_together() {
    let device = full_device();
    let counting = Arc::new(FaultDevice::new(device, FaultPlan::default()));
    let device: Arc<dyn Device> = counting.clone();
    for backward in [false, true] {
        let fs = open(&device, 256 << 20);
        let is_wanted = |metric: &&Metric| {
            metric.name == "space_used_bytes" && metric.labels.iter().any(|(_, value)| value == "metadata")
        };
        let nr_blocks = fs.metrics().iter().find(is_wanted).unwrap().value / 16384.0;
        let (before, ..) = counting.counts();
        for number in 0..NR_DIRS {
            let dir = dir(&fs, if backward { NR_DIRS - 1 - number } else { number });
            let found = names(&fs, dir);
            assert_eq!(found, (0..NR_FILES).map(name).collect::<Vec<_>>());
            for (file, name) in found.iter().enumerate() {
                assert_eq!(fs.lookup(dir, name).unwrap().mode & 0o777, mode(file as u64));
            }
        }
        let (after, ..) = counting.counts();
        let nr_reads = (after - before) as f64;
        assert!(nr_blocks > 150.0 && nr_reads < nr_blocks / 2.0, "{nr_reads} reads of {nr_blocks} blocks");
        fs.close().unwrap();
    }
}

#[test]
fn a_walk_beside_changes_and_commits_finds_what_stays() {
    let device = full_device();
    // With this budget, few nodes stay in memory.
    let fs = open(&device, 16 << 20);
    let stop = AtomicBool::new(false);
    let expected: BTreeSet<_> = (0..NR_FILES).filter(|file| file % 2 == 0).map(name).collect();
    std::thread::scope(|scope| {
        for walker in 0..2 {
            let (fs, stop, expected) = (&fs, &stop, &expected);
            scope.spawn(move || {
                let mut number = walker * NR_DIRS / 2;
                while !stop.load(Ordering::Acquire) {
                    number = (number + 1) % NR_DIRS;
                    let dir = dir(fs, number);
                    let found: BTreeSet<_> = names(fs, dir).into_iter().collect();
                    assert!(found.is_superset(expected), "directory {number}");
                    for file in (0..NR_FILES).step_by(2) {
                        assert_eq!(fs.lookup(dir, &name(file)).unwrap().mode & 0o777, mode(file));
                    }
                }
            });
        }
        for round in 0..6 {
            for number in 0..NR_DIRS {
                let dir = dir(&fs, number);
                for file in (1..NR_FILES).step_by(2) {
                    match round % 2 == 0 {
                        true => fs.unlink(dir, &name(file)).unwrap(),
                        false => drop(fs.create(dir, &name(file), NewInode::file(0o600), &Caller::ROOT).unwrap()),
                    }
                }
                if number % 20 == 0 {
                    fs.sync().unwrap();
                }
            }
        }
        stop.store(true, Ordering::Release);
    });
    // Removing all files with cold caches is a walk too.
    fs.close().unwrap();
    drop(fs);
    let fs = open(&device, 64 << 20);
    for number in (0..NR_DIRS).rev() {
        let dir = dir(&fs, number);
        for name in names(&fs, dir) {
            fs.unlink(dir, &name).unwrap();
        }
        fs.rmdir(fs.root(), &name(number)).unwrap();
    }
    assert!(names(&fs, fs.root()).is_empty());
    fs.close().unwrap();
}
