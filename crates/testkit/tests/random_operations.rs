//! Filesystems made by ubtrfs under random operations, against the model, reopened in between, judged by Linux.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use ubtrfs_device::{Access, FileDevice};
use ubtrfs_format::CsumType;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{Compare, Driver, FsTarget, Image, Model, Rng, capability, compare_entries, judge};

/// A `max_file_bytes` of 0 leaves the content of files alone.
fn rounds(options: &MkfsOptions, mount: &str, seed: u64, rounds: usize, operations: usize, max_file_bytes: u64) {
    let seed = Rng::seed_or(seed);
    println!("seed {seed}");
    let image = Image::empty(1 << 30).unwrap();
    let device = FileDevice::open(image.path(), Access::ReadWrite).unwrap();
    ubtrfs_mkfs::make(&device, options).unwrap();
    drop(device);
    let mut model = Model::new();
    let mut driver = Driver::new(seed, max_file_bytes);
    if max_file_bytes == 0 {
        driver = driver.names_only();
    }
    for round in 0..rounds {
        let mut target = FsTarget::open(image.path(), mount).unwrap();
        compare_entries(&model.entries(), &target.walk().unwrap(), Compare::MODEL).unwrap();
        let report = driver.run(&mut model, &mut target, operations).unwrap();
        let ours = target.walk().unwrap();
        compare_entries(&model.entries(), &ours, Compare::MODEL).unwrap();
        target.close().unwrap();
        println!("round {round}: {report}");
        if capability::kernel_oracle() {
            judge(image.path(), "", &[(&ours, Compare::ALL)]).unwrap();
        }
    }
}

#[test]
fn defaults() {
    rounds(&MkfsOptions::default(), "", 11, 3, 1500, 1 << 20);
}

#[test]
fn names_alone() {
    rounds(&MkfsOptions::default(), "", 10, 3, 4000, 0);
}

#[test]
fn names_alone_in_small_nodes() {
    rounds(&MkfsOptions { nodesize: 4096, ..MkfsOptions::default() }, "", 9, 3, 4000, 0);
}

#[test]
fn large_files() {
    rounds(&MkfsOptions::default(), "", 12, 2, 400, 48 << 20);
}

#[test]
fn small_nodes_make_tall_trees() {
    let options = MkfsOptions { nodesize: 4096, csum_type: CsumType::Sha256, ..MkfsOptions::default() };
    rounds(&options, "", 13, 2, 2500, 1 << 20);
}

#[test]
fn large_nodes() {
    rounds(&MkfsOptions { nodesize: 65536, ..MkfsOptions::default() }, "", 14, 2, 1000, 1 << 20);
}

#[test]
fn zstd() {
    rounds(&MkfsOptions::default(), "compress=zstd:3", 15, 2, 1000, 2 << 20);
}

#[test]
fn zlib_forced() {
    rounds(&MkfsOptions::default(), "compress-force=zlib:6", 16, 2, 1000, 2 << 20);
}

#[test]
fn lzo_and_dup_data() {
    let options = MkfsOptions { data_profile: BlockGroupFlags::DUP, ..MkfsOptions::default() };
    rounds(&options, "compress=lzo", 17, 2, 1000, 2 << 20);
}

#[test]
fn mixed_block_groups_without_cow() {
    let options = MkfsOptions {
        mixed: true,
        nodesize: 4096,
        metadata_profile: BlockGroupFlags::empty(),
        ..MkfsOptions::default()
    };
    rounds(&options, "nodatacow", 18, 2, 1000, 1 << 20);
}
