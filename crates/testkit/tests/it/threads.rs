//! Tests power cuts and faults with several threads: other writers, fsyncs, snapshots and deletions run between any
//! two writes of a commit. Runs a sample of the runs of `examples/power_cuts.rs --bed threads` and `examples/faults.rs
//! --config threads`.
//!
//! Method: see `testkit::threads`. `UBTRFS_SEED` selects a seed, which then runs several times, because the threads
//! interleave differently each time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ubtrfs_device::Device;
use ubtrfs_fs::MountOptions;
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    FsTarget, Image, Medium, MediumDevice, NodeKind, Rng, Target, ThreadedCuts, ThreadedFaults,
    btrfs_check_after_failures, capability, silence_planned_panics,
};

/// Records a run of each seed in `seeds`, and cuts the power at `cuts` points of each recording.
fn cut(record: impl Fn(u64) -> anyhow::Result<ThreadedCuts>, seeds: impl Iterator<Item = u64>, cuts: usize) {
    let linux = capability::kernel_oracle();
    let image = Image::empty(0).unwrap();
    let wanted = Rng::seed_or(u64::MAX);
    let seeds: Vec<u64> = if wanted == u64::MAX { seeds.collect() } else { vec![wanted; 10] };
    for seed in seeds {
        let run = record(seed).unwrap_or_else(|error| panic!("{error:#}"));
        println!("seed {seed}: {}", run.name);
        let mut builder = run.builder();
        for (number, point) in run.points(cuts).into_iter().enumerate() {
            let cut = run.cut(&mut builder, number, point);
            let found = run.verify(&cut).unwrap_or_else(|error| panic!("{error:#}"));
            if linux && number == cuts / 2 {
                run.verify_by_linux(&cut, &found, image.path()).unwrap_or_else(|error| panic!("{error:#}"));
            }
        }
    }
}

#[test]
fn threads_keep_their_promises_through_power_cuts() {
    // The seed modulo 8 is the kind of run.
    cut(ThreadedCuts::record, (0..2).flat_map(|round| KINDS.map(move |kind| 8 * round + kind)), 40);
}

#[test]
fn balances_amid_threads_keep_promises_through_power_cuts() {
    cut(ThreadedCuts::record_balances, 1..11, 30);
}

/// Kinds of runs.
const KINDS: std::ops::Range<u64> = 0..8;

/// Tests the hardest case of T6: three threads fill the filesystem, remove files, fsync and sync at the same time. The
/// power is not cut, which leaves time for more seeds.
#[test]
fn a_nearly_full_filesystem_takes_every_removal_and_stores_what_it_accepted() {
    const NEARLY_FULL: u64 = 5;
    for round in 0..12 {
        ThreadedCuts::record(8 * round + NEARLY_FULL).unwrap_or_else(|error| panic!("{error:#}"));
    }
}

#[test]
fn threads_are_told_of_faults_or_keep_their_promises() {
    silence_planned_panics();
    let oracle = capability::kernel_oracle();
    let first = Rng::seed_or(1);
    let image = Image::empty(0).unwrap();
    let mut hits = 0;
    for seed in first..first + 60 {
        let run = ThreadedFaults::run(seed).unwrap_or_else(|error| panic!("{error:#}"));
        hits += usize::from(run.hit);
        if oracle && seed % 20 == 0 {
            run.content.save(image.path()).unwrap();
            btrfs_check_after_failures(image.path()).unwrap_or_else(|error| panic!("{}: {error:#}", run.name));
        }
    }
    assert!(hits > 10, "{hits} of the runs met their fault");
}

/// A power cut during a reflink over fsynced data leaves the old or the new data, never a hole.
#[test]
fn a_reflink_never_shows_zeros_in_place_of_data() {
    let device = Arc::new(MediumDevice::new(Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap()));
    let mut target =
        FsTarget::on_device(Arc::clone(&device) as Arc<dyn Device>, MountOptions::parse("commit=300").unwrap())
            .unwrap();
    for (path, byte) in [(&b"one"[..], 1), (b"two", 2), (b"file", 3), (b"other", 4)] {
        target.create(path, NodeKind::File, 0o644, (0, 0)).unwrap();
        target.write(path, 0, &[byte; 65_536]).unwrap();
    }
    target.sync().unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut cloner = target.clone();
        let stop = &stop;
        scope.spawn(move || {
            for source in [&b"one"[..], b"two"].into_iter().cycle() {
                cloner.copy_range(source, 0, b"file", 0, 65_536).unwrap();
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        for number in 0..200_u64 {
            // An fsync of one file also logs the changes of another file that is in the log.
            target.write(b"other", 0, &number.to_le_bytes()).unwrap();
            if number % 10 == 0 {
                target.sync().unwrap();
                target.fsync(b"file").unwrap();
            } else {
                target.fsync(b"other").unwrap();
            }
            let cut = Arc::new(MediumDevice::new(device.content()));
            let mut after = FsTarget::on_device(cut, MountOptions::parse("ro").unwrap()).unwrap();
            let content = after.read(b"file", 0, 65_536).unwrap();
            let zeros = content.iter().filter(|byte| **byte == 0).count();
            if zeros > 0 {
                stop.store(true, Ordering::Relaxed);
            }
            assert_eq!(zeros, 0, "after {number} changes");
        }
        stop.store(true, Ordering::Relaxed);
    });
    target.close().unwrap();
}
