//! Tests that the checker finds no problems in images that Linux made in every format, before and after random
//! operations of the engine.

use crate::common::{assert_clean, check};
use ubtrfs_testkit::{
    Driver, FsTarget, KernelImage, KernelImageSpec, LoopMount, RichTree, Rng, btrfs_check, capability, run,
};

#[test]
fn images_of_every_format() {
    if !capability::kernel_oracle() {
        return;
    }
    let seed = Rng::seed_or(1);
    println!("seed {seed}");
    for spec in KernelImageSpec::matrix() {
        let name = spec.name;
        let rich = KernelImage::rich(spec, seed).unwrap();
        let image = rich.image.path();
        assert_clean(image, name);
        let mount = LoopMount::new(image, rich.spec.mount).unwrap();
        let mut model = RichTree::model(mount.path()).unwrap();
        mount.close().unwrap();
        let mut target = FsTarget::open(image, "").unwrap();
        Driver::new(seed, 1 << 20).run(&mut model, &mut target, 500).unwrap();
        target.close().unwrap();
        btrfs_check(image).unwrap();
        assert_clean(image, &format!("{name}, changed by the engine"));
    }
}

/// Leaves that snapshots share are checked once, but their inodes count in each snapshot.
#[test]
fn snapshots_are_counted_whole() {
    if !capability::kernel_oracle() {
        return;
    }
    let made = KernelImage::empty(KernelImageSpec::named("nodes of 4 KiB")).unwrap();
    let mount = LoopMount::new(made.image.path(), "").unwrap();
    let path = |name: &str| mount.join(name).to_string_lossy().into_owned();
    run("btrfs", ["subvolume", "create", &path("source")]).unwrap();
    for file in 0..3000 {
        std::fs::write(mount.join(format!("source/file-{file}")), file.to_string()).unwrap();
    }
    for (round, snapshot) in ["first", "second", "third"].into_iter().enumerate() {
        run("btrfs", ["subvolume", "snapshot", &path("source"), &path(snapshot)]).unwrap();
        std::fs::remove_file(mount.join(format!("source/file-{round}"))).unwrap();
        std::fs::write(mount.join(format!("{snapshot}/file-2000")), snapshot).unwrap();
    }
    mount.close().unwrap();
    assert_clean(made.image.path(), "snapshots");
    let (report, _) = check(made.image.path());
    // The first two inodes are the root directories of the top level and the data relocation tree. Four subvolumes
    // had 3,001 inodes each, until the source lost three files, the second snapshot one, and the third snapshot two.
    assert_eq!(report.stats.inodes, 1 + 1 + 4 * 3001 - 3 - 1 - 2);
}
