//! Tests failing devices: for every kind of fault in the n-th request, nothing acknowledged is lost, errors are
//! reported, and nothing panics or hangs. Runs a sample of the runs of `examples/faults.rs`, and tests the use of
//! second copies.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ubtrfs_device::Device;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::node::HEADER_SIZE;
use ubtrfs_fs::MountOptions;
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    Compare, FaultDevice, FaultKind, FaultPlan, FaultSweep, FsTarget, Image, LoopMount, Medium, MediumDevice, NodeKind,
    Rng, Target, btrfs_check, btrfs_check_after_failures, capability, compare_entries, run, silence_planned_panics,
    walk_path,
};

/// Tests every `step`-th of the first 2,000 requests of the wanted workloads, with every kind of fault.
fn sweep(wanted: impl Fn(&str) -> bool, step: usize) {
    silence_planned_panics();
    let oracle = capability::kernel_oracle();
    let image = Image::empty(0).unwrap();
    let mut runs = 0;
    for (number, sweep) in FaultSweep::all().into_iter().filter(|sweep| wanted(sweep.config)).enumerate() {
        for nth in (0..sweep.requests().min(2000)).skip(number % step).step_by(step) {
            let outcome = sweep.run(nth).unwrap_or_else(|error| panic!("{error:#}"));
            if oracle && runs % 20 == 0 && sweep.btrfs_check_applies() {
                outcome.content.save(image.path()).unwrap();
                btrfs_check_after_failures(image.path())
                    .unwrap_or_else(|error| panic!("{} {} {nth}: {error:#}", sweep.config, sweep.kind()));
            }
            runs += 1;
        }
    }
    println!("{runs} runs");
    assert!(runs > 40);
}

#[test]
fn faults_on_the_default_filesystem() {
    sweep(|config| config == "default", 13);
}

#[test]
fn faults_where_data_has_copies() {
    sweep(|config| config == "dup-data", 23);
}

#[test]
fn faults_where_nothing_has_copies() {
    sweep(|config| config == "single", 13);
}

#[test]
fn faults_of_what_programs_rely_on() {
    sweep(|config| !["default", "dup-data", "single", "long"].contains(&config), 67);
}

#[test]
fn faults_late_in_a_long_workload() {
    sweep(|config| config == "long", 487);
}

/// Testing "every n up to 2,000" needs a workload with that many requests.
#[test]
fn the_long_workload_makes_two_thousand_requests_of_each_kind() {
    for sweep in FaultSweep::all().iter().filter(|sweep| sweep.config == "long") {
        assert!(sweep.requests() >= 2000, "{}: {}", sweep.kind(), sweep.requests());
    }
}

/// If all writes to second copies fail, the filesystem works with the first copies, the counts of errors survive the
/// unmount, and Linux repairs the second copies.
#[test]
fn losing_a_copy_while_writing_loses_nothing() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::empty(0).unwrap();
    let options = MkfsOptions { data_profile: BlockGroupFlags::DUP, ..MkfsOptions::default() };
    Medium::formatted(512 << 20, &options).unwrap().save(image.path()).unwrap();
    let below = Arc::new(MediumDevice::new(Medium::from_image(image.path()).unwrap()));
    // `btrfs inspect-internal` shows where the second copies are.
    let text = run("btrfs", ["inspect-internal", "dump-tree", "-t", "chunk", image.path().to_str().unwrap()]).unwrap();
    let number = |line: &str, name: &str| -> Option<u64> {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.iter().position(|word| *word == name).and_then(|at| words.get(at + 1)?.parse().ok())
    };
    let mut bad = Vec::new();
    let mut len = 0;
    for line in text.lines() {
        len = number(line, "length").unwrap_or(len);
        if line.contains("stripe 1 ") {
            let start = number(line, "offset").unwrap();
            bad.push((start, start + len));
        }
    }
    assert_eq!(bad.len(), 3, "{text}");
    let mut device: Arc<dyn Device> = below.clone();
    for range in bad {
        let plan = FaultPlan { write: Some(0), persistent: true, within: Some(range), ..FaultPlan::default() };
        device = Arc::new(FaultDevice::new(device, plan));
    }
    let mut target = FsTarget::on_device(device, MountOptions::default()).unwrap();
    let mut rng = Rng::new(7);
    for index in 0..50 {
        let path = format!("file-{index}").into_bytes();
        target.create(&path, NodeKind::File, 0o644, (0, 0)).unwrap();
        target.write(&path, 0, &rng.bytes(100 + 3000 * index)).unwrap();
        if index % 10 == 0 {
            target.sync().unwrap();
        }
    }
    target.sync().unwrap();
    assert_eq!(target.fs().read_only(), None);
    let written = target.walk().unwrap();
    target.close().unwrap();
    below.content().save(image.path()).unwrap();

    let mount = LoopMount::new(image.path(), "").unwrap();
    compare_entries(&written, &walk_path(mount.path()).unwrap(), Compare::MODEL).unwrap();
    let stats = run("btrfs", ["device", "stats", mount.path().to_str().unwrap()]).unwrap();
    let counted = stats.lines().find(|line| line.contains("write_io_errs")).unwrap();
    assert!(!counted.trim_end().ends_with(" 0"), "{stats}");
    let _mends = mount.scrub();
    mount.scrub().unwrap();
    mount.close().unwrap();
    btrfs_check(image.path()).unwrap();
}

/// A read that finds a bad copy of a block counts the error, and the count survives the unmount.
#[test]
fn repairs_by_reading_are_counted_permanently() {
    let base = Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap();
    let below = Arc::new(MediumDevice::new(base));
    let mut target = FsTarget::on_device(below.clone(), MountOptions::default()).unwrap();
    for index in 0..200 {
        target.create(format!("file-{index}").as_bytes(), NodeKind::File, 0o644, (0, 0)).unwrap();
    }
    target.close().unwrap();
    // The first read of a leaf's first copy returns wrong data. The readahead thread may make this read.
    let leaf = first_leaf_of_files(&below.content());
    let plan = FaultPlan {
        read: Some(0),
        kind: FaultKind::Wrong,
        within: Some((leaf, leaf + (16 << 10))),
        ..FaultPlan::default()
    };
    let device = Arc::new(FaultDevice::new(below.clone(), plan));
    let target = FsTarget::on_device(device.clone(), MountOptions::default()).unwrap();
    target.walk().unwrap();
    assert_eq!(device.faults(), 1);
    let count = |target: &FsTarget| target.fs().device_stats().iter().map(|(_, stats)| stats.values[3]).sum::<u64>();
    // The readahead thread may count the error only after the walk, so wait.
    let start = Instant::now();
    while count(&target) == 0 && start.elapsed() < Duration::from_secs(10) {
        std::thread::yield_now();
    }
    assert_eq!(count(&target), 1);
    target.close().unwrap();
    let target = FsTarget::on_device(below, MountOptions::parse("ro").unwrap()).unwrap();
    assert_eq!(count(&target), 1);
}

/// Finds the offset of the first copy of a leaf of the top-level subvolume: of one of the leaves with the highest
/// generation.
fn first_leaf_of_files(medium: &Medium) -> u64 {
    let read = |offset: u64, len: usize| {
        let mut bytes = vec![0; len];
        medium.read(offset, &mut bytes);
        bytes
    };
    // Header of a block: filesystem at 32, generation at 80, owner at 88, level at 100.
    let fsid = read(SUPERBLOCK + 32, 16);
    let leaves = (1 << 20..medium.len_bytes()).step_by(16 << 10).filter_map(|offset| {
        let header = read(offset, HEADER_SIZE);
        let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap());
        (header[32..48] == fsid && number(88) == 5 && header[100] == 0).then(|| (number(80), offset))
    });
    // Of the leaves with the highest generation, take the one with the lowest offset, which is a first copy.
    leaves.max_by_key(|&(generation, offset)| (generation, std::cmp::Reverse(offset))).unwrap().1
}

const SUPERBLOCK: u64 = 64 << 10;
