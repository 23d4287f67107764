//! No false alarm: images that Linux made in every format, before and after random operations of the engine on them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::assert_clean;
use ubtrfs_testkit::{
    Driver, FsTarget, KernelImage, KernelImageSpec, LoopMount, RichTree, Rng, btrfs_check, capability,
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
