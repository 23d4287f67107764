//! Tests power cuts: with any content that the medium can have after a cut, the filesystem is clean and keeps its
//! promises.
//!
//! Method: a workload runs on a device that records every write. The power is cut at many points. The seed determines
//! for each unflushed write whether it is kept, dropped or torn. Each result is opened, checked and compared with the
//! promises; Linux replays and checks a few results. `examples/power_cuts.rs` runs many more cuts.

use std::sync::Arc;

use ubtrfs_fs::MountOptions;
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{FsTarget, Image, Medium, MediumDevice, NodeKind, PowerCuts, RenameOp, Rng, Target, capability};

/// Records the workload of each seed in `seeds`, and cuts the power at `cuts` points of each recording. Thirteen
/// consecutive seeds cover every kind of workload, and 26 also cover the variants with little memory.
fn cut(seeds: std::ops::Range<u64>, cuts: usize) {
    let linux = capability::kernel_oracle();
    let image = Image::empty(0).unwrap();
    let first = Rng::seed_or(seeds.start);
    for seed in first..first + (seeds.end - seeds.start) {
        let run = PowerCuts::record(seed).unwrap_or_else(|error| panic!("seed {seed}: {error:#}"));
        println!("seed {seed}: {}", run.name);
        let mut builder = run.builder();
        let points = run.points(cuts);
        for (number, point) in points.into_iter().enumerate() {
            let cut = run.cut(&mut builder, number, point);
            let found = run.verify(&cut).unwrap_or_else(|error| panic!("{error:#}"));
            if linux && number == cuts / 2 {
                run.verify_by_linux(&cut, &found, image.path()).unwrap_or_else(|error| panic!("{error:#}"));
            }
        }
    }
}

#[test]
fn cuts_keep_promises() {
    cut(1001..1014, 30);
}

#[test]
fn cuts_keep_promises_with_other_seeds() {
    cut(2001..2014, 30);
}

/// After a new file replaced an old one and was fsynced, the old file must not come back when the new file is renamed
/// or removed and the power is cut.
#[test]
fn a_file_that_was_replaced_does_not_come_back_when_the_name_is_given_up() {
    for is_removed in [false, true] {
        let base = Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap();
        let device = Arc::new(MediumDevice::new(base));
        let mut target = FsTarget::on_device(device.clone(), MountOptions::default()).unwrap();
        target.create(b"name", NodeKind::File, 0o644, (0, 0)).unwrap();
        target.sync().unwrap();
        for path in [&b"new"[..], b"other"] {
            target.create(path, NodeKind::File, 0o644, (0, 0)).unwrap();
            target.fsync(path).unwrap();
        }
        target.rename(b"new", b"name", RenameOp::Replace).unwrap();
        target.fsync(b"name").unwrap();
        if is_removed {
            target.unlink(b"name").unwrap();
            target.write(b"other", 0, b"text").unwrap();
            target.fsync(b"other").unwrap();
        } else {
            target.rename(b"name", b"moved", RenameOp::NoReplace).unwrap();
            target.fsync(b"moved").unwrap();
        }
        let cut = Arc::new(MediumDevice::new(device.content()));
        let after = FsTarget::on_device(cut, MountOptions::default()).unwrap();
        assert!(after.lookup(b"name").is_err(), "the old file is back; removed: {is_removed}");
        assert_eq!(after.lookup(b"moved").is_ok(), !is_removed);
        after.lookup(b"other").unwrap();
    }
}
