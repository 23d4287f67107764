//! Tests filesystems made by ubtrfs: random operations are compared with the model, with remounts in between, and
//! Linux checks the result.

use ubtrfs_device::{Access, FileDevice};
use ubtrfs_format::CsumType;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    Compare, Driver, FallocateOp, FsTarget, Image, Model, NodeKind, Rng, Target, capability, compare_entries, judge,
};

/// Runs rounds of random operations. If `max_file_bytes` is 0, the content of files is not changed.
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

/// Runs a few operations on each of many files, with sizes around the limits of inline data and sectors: writes,
/// truncations, preallocations, holes, copies and fsyncs.
#[test]
fn sizes_of_files_with_short_histories() {
    let image = Image::empty(1 << 30).unwrap();
    let device = FileDevice::open(image.path(), Access::ReadWrite).unwrap();
    ubtrfs_mkfs::make(&device, &MkfsOptions::default()).unwrap();
    drop(device);
    let mut rng = Rng::new(Rng::seed_or(19));
    let mut model = Model::new();
    let mut target = FsTarget::open(image.path(), "").unwrap();
    let mut histories = Vec::new();
    for index in 0..800 {
        let path = format!("file-{index}").into_bytes();
        let other = format!("file-{}", rng.below(index.max(1))).into_bytes();
        let mut history = Vec::new();
        let mut both = |what: String, op: &dyn Fn(&mut dyn Target) -> Result<(), i32>| {
            assert_eq!(op(&mut model), op(&mut target), "{history:?} {what}");
            history.push(what);
        };
        both("create".to_owned(), &|to| to.create(&path, NodeKind::File, 0o644, (0, 0)));
        for _ in 0..=rng.below(4) {
            let (at, len) = (rng.below(20_000), 1 + rng.below(3000));
            match rng.below(9) {
                choice @ 0..3 => {
                    let at = if choice == 0 { at } else { 0 };
                    let data = rng.bytes(len as usize);
                    both(format!("write {at}+{len}"), &|to| to.write(&path, at, &data));
                }
                3 => both(format!("truncate {at}"), &|to| to.truncate(&path, at)),
                choice @ 4..8 => {
                    let all =
                        [FallocateOp::Allocate, FallocateOp::KeepSize, FallocateOp::PunchHole, FallocateOp::ZeroRange];
                    let op = all[choice as usize - 4];
                    both(format!("{op:?} {at}+{len}"), &|to| to.fallocate(&path, at, len, op));
                }
                _ if rng.one_in(2) => both("fsync".to_owned(), &|to| to.fsync(&path)),
                _ => both("copy".to_owned(), &|to| to.copy_range(&other, 0, &path, at / 4096 * 4096, 4096)),
            }
        }
        histories.push(history);
    }
    let before = target.walk().unwrap();
    target.close().unwrap();
    let again = FsTarget::open(image.path(), "").unwrap();
    for (index, history) in histories.iter().enumerate() {
        let path = format!("file-{index}").into_bytes();
        let expected = before.iter().find(|entry| entry.path == path).map(|entry| entry.size);
        assert_eq!(again.lookup(&path).ok().map(|attr| attr.size), expected, "file-{index}: {history:?}");
    }
    let ours = again.walk().unwrap();
    compare_entries(&model.entries(), &ours, Compare::MODEL).unwrap();
    again.close().unwrap();
    if capability::kernel_oracle() {
        judge(image.path(), "", &[(&ours, Compare::ALL)]).unwrap();
    }
}
