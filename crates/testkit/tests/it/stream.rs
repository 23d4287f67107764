//! Tests that nodes can be written while their tree is still being changed. During a commit of many files with little
//! memory, the n-th write fails or panics, or the power is cut. Afterwards the filesystem has exactly the files of
//! the previous commit or of the new commit, and is clean.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_fs::{Caller, Fs, MountOptions, NewInode};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    FaultDevice, FaultKind, FaultPlan, Medium, MediumDevice, RecordingDevice, Rng, check_medium, silence_planned_panics,
};

const OLD: usize = 2_000;
const NEW: usize = 2_500;

/// Opens a filesystem without periodic commits and with a small memory limit, so that a commit writes nodes in many
/// pieces.
fn open(device: Arc<dyn Device>) -> ubtrfs_fs::Result<Arc<Fs>> {
    Fs::open(vec![device], MountOptions { memory_bytes: 48 << 20, commit_secs: 3600, ..MountOptions::default() })
}

fn make_files(fs: &Fs, numbers: std::ops::Range<usize>) -> ubtrfs_fs::Result<()> {
    for number in numbers {
        // The names' hashes are spread over the whole tree.
        fs.create(fs.root(), format!("{number}").as_bytes(), NewInode::file(0o644), &Caller::ROOT)?;
    }
    Ok(())
}

/// Makes a filesystem with the files of the previous commit. Metadata has one copy, so that no second copy hides a
/// failed write.
fn base() -> Medium {
    let options = MkfsOptions { metadata_profile: BlockGroupFlags::empty(), ..MkfsOptions::default() };
    let device = Arc::new(MediumDevice::new(Medium::formatted(256 << 20, &options).unwrap()));
    let fs = open(device.clone()).unwrap();
    make_files(&fs, 0..OLD).unwrap();
    fs.close().unwrap();
    drop(fs);
    device.content()
}

fn nr_files(medium: &Medium) -> usize {
    let fs = open(Arc::new(MediumDevice::new(medium.clone()))).unwrap();
    let mut names = Vec::new();
    fs.readdir(fs.root(), 0, &mut |entry| {
        names.push(String::from_utf8(entry.name.to_vec()).unwrap());
        true
    })
    .unwrap();
    let mut numbers: Vec<usize> = names.iter().filter_map(|name| name.parse().ok()).collect();
    numbers.sort_unstable();
    assert!(numbers.iter().enumerate().all(|(index, number)| index == *number), "some of the files: {numbers:?}");
    numbers.len()
}

fn metric(fs: &Fs, name: &str) -> f64 {
    fs.metrics().iter().find(|metric| metric.full_name() == name).map_or(0.0, |metric| metric.value)
}

#[test]
fn a_failed_write_fails_the_commit_and_leaves_the_one_before() {
    silence_planned_panics();
    let base = base();
    for kind in [FaultKind::Error, FaultKind::Panic] {
        let mut nr_failed = 0;
        for write in 0.. {
            let below = Arc::new(MediumDevice::new(base.clone()));
            let plan =
                FaultPlan { write: Some(write), persistent: kind == FaultKind::Error, kind, ..FaultPlan::default() };
            let device = Arc::new(FaultDevice::new(below.clone(), plan));
            let fs = open(device.clone()).unwrap();
            let synced = catch_unwind(AssertUnwindSafe(|| {
                make_files(&fs, OLD..OLD + NEW)?;
                fs.sync()
            }));
            // A write of a superblock mirror may fail without failing the sync: the error is counted, and all files
            // exist.
            let failed = !matches!(synced, Ok(Ok(())));
            if failed {
                assert!(device.faults() > 0, "{kind:?} {write}: it fails without a fault");
                assert!(fs.read_only().is_some(), "{kind:?} {write}: writable after a commit failed");
                let _ = catch_unwind(AssertUnwindSafe(|| fs.close()));
            } else {
                let _ = fs.close();
            }
            let is_last = device.faults() == 0;
            drop(fs);
            let content = below.content();
            check_medium(&content).unwrap();
            let expected: &[usize] = if failed { &[OLD, OLD + NEW] } else { &[OLD + NEW] };
            assert!(expected.contains(&nr_files(&content)), "{kind:?} {write}");
            if is_last {
                break;
            }
            nr_failed += usize::from(failed);
        }
        assert!(nr_failed > 10, "{kind:?}: the commit made {nr_failed} writes only");
    }
}

#[test]
fn power_cuts_leave_the_one_commit_or_the_other() {
    let device = Arc::new(RecordingDevice::new(base()));
    let fs = open(device.clone()).unwrap();
    make_files(&fs, OLD..OLD + NEW).unwrap();
    fs.sync().unwrap();
    let waited = metric(&fs, "ubtrfs_unwritten_nodes_max_bytes");
    let promised_at = device.events();
    fs.close().unwrap();
    drop(fs);
    assert!(waited < f64::from(1 << 20), "{waited} bytes of nodes waited");
    let seed = Rng::seed_or(9);
    println!("seed {seed}");
    let (mut rng, mut cuts) = (Rng::new(seed), device.cuts());
    for events in 0..=device.events() {
        let (medium, _) = cuts.cut(events, &mut rng);
        check_medium(&medium).unwrap_or_else(|error| panic!("after {events} events: {error:#}"));
        let found = nr_files(&medium);
        let is_one = found == OLD + NEW || (found == OLD && events < promised_at);
        assert!(is_one, "{found} files after {events} of {promised_at} events");
    }
}
