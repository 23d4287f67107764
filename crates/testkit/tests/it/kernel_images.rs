//! Tests filesystems made by Linux, in every format of `KernelImageSpec::matrix`: ubtrfs reads them correctly and
//! changes them by 1,000 random operations. Linux then finds the filesystems clean and equal to the model.
//!
//! Method: Linux fills an image, and a walk through Linux is compared with a walk through the engine. The model is
//! loaded through Linux, and the driver changes the model and the engine. At the end, both walks and the model must
//! agree, and `btrfs check` and scrub must find nothing.

use std::path::Path;

use ubtrfs_testkit::{
    Compare, Driver, FsTarget, KernelImage, KernelImageSpec, LoopMount, RichTree, Rng, btrfs_check, capability,
    compare_entries, judge, walk_path,
};

fn read_change_and_judge(name: &str) {
    if !capability::kernel_oracle() {
        return;
    }
    let seed = Rng::seed_or(1);
    println!("seed {seed}");
    let rich = KernelImage::rich(KernelImageSpec::named(name), seed).unwrap();
    let image = rich.image.path();
    let mount = LoopMount::new(image, rich.spec.mount).unwrap();
    let linux = walk_path(mount.path()).unwrap();
    let mut model = RichTree::model(mount.path()).unwrap();
    mount.close().unwrap();
    let before = rich.image.digest().unwrap();

    let reader = FsTarget::open(image, "ro").unwrap();
    compare_entries(&linux, &reader.walk().unwrap(), Compare::ALL).unwrap();
    reader.close().unwrap();
    assert_eq!(before, rich.image.digest().unwrap(), "reading changed the image");

    let mut target = FsTarget::open(image, "").unwrap();
    let report = Driver::new(seed, 1 << 20).run(&mut model, &mut target, 1000).unwrap();
    println!("{report}");
    let ours = target.walk().unwrap();
    compare_entries(&model.entries(), &ours, Compare::MODEL).unwrap();
    target.close().unwrap();
    let again = FsTarget::open(image, "ro").unwrap();
    compare_entries(&ours, &again.walk().unwrap(), Compare::ALL).unwrap();
    again.close().unwrap();
    judge(image, rich.spec.mount, &[(&ours, Compare::ALL)]).unwrap();
    linux_changes_it(image, rich.spec.mount);
}

/// Lets Linux change a filesystem that ubtrfs wrote, and checks that the filesystem stays clean.
fn linux_changes_it(image: &Path, options: &str) {
    let mount = LoopMount::new(image, options).unwrap();
    for index in 0..50 {
        std::fs::write(mount.join(format!("linux-{index}")), vec![index; 100_000]).unwrap();
    }
    std::fs::remove_dir_all(mount.join("files/small")).unwrap();
    mount.close().unwrap();
    btrfs_check(image).unwrap();
}

macro_rules! formats {
    ($($test:ident: $name:literal,)*) => {
        $(#[test]
        fn $test() {
            read_change_and_judge($name);
        })*

        #[test]
        fn every_format_is_tested() {
            let tested = [$($name),*];
            for spec in KernelImageSpec::matrix() {
                assert!(tested.contains(&spec.name), "no test of '{}'", spec.name);
            }
        }
    };
}

formats! {
    default: "default",
    nodes_of_4_kib: "nodes of 4 KiB",
    nodes_of_64_kib: "nodes of 64 KiB",
    xxhash: "xxhash",
    sha256: "sha256, nodes of 4 KiB",
    blake2: "blake2",
    hole_extents: "hole extents",
    space_cache_v1: "space cache v1, hole extents",
    no_free_space_tree: "no free space tree",
    single: "single",
    dup_data: "dup data",
    mixed: "mixed",
    old_items: "no skinny metadata, no extrefs",
    block_group_tree: "block group tree",
}
