//! Tests the oracle itself: images that Linux made and filled are clean and equal to the model loaded from them, and
//! changes by Linux have the results that the model predicts.

use ubtrfs_testkit::{
    Compare, Driver, KernelImage, KernelImageSpec, LoopMount, PathTarget, RichTree, btrfs_check, capability,
    compare_entries, compare_trees, walk_path,
};

#[test]
fn a_rich_image_is_clean_and_the_model_knows_it() {
    if !capability::kernel_oracle() {
        return;
    }
    let rich = KernelImage::rich(KernelImageSpec::DEFAULT, 1).unwrap();
    btrfs_check(rich.image.path()).unwrap();
    let mount = LoopMount::new(rich.image.path(), "").unwrap();
    mount.scrub().unwrap();
    let mut model = RichTree::model(mount.path()).unwrap();
    compare_entries(&model.entries(), &walk_path(mount.path()).unwrap(), Compare::MODEL).unwrap();
    let report = Driver::new(7, 1 << 20).run(&mut model, &mut PathTarget::new(mount.path()), 1000).unwrap();
    println!("{report}");
    compare_entries(&model.entries(), &walk_path(mount.path()).unwrap(), Compare::MODEL).unwrap();
    assert_eq!(mount.kernel_complaints(), Vec::<String>::new());
    mount.close().unwrap();
    btrfs_check(rich.image.path()).unwrap();
}

#[test]
fn trees_that_differ_are_told_apart() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for dir in [&a, &b] {
        std::fs::write(dir.path().join("same"), b"same").unwrap();
        std::fs::write(dir.path().join("content"), dir.path().as_os_str().as_encoded_bytes()).unwrap();
    }
    std::fs::write(a.path().join("extra"), b"").unwrap();
    let what = Compare { mtime: false, ..Compare::COPY };
    let error = format!("{:#}", compare_trees(a.path(), b.path(), what).unwrap_err());
    assert!(error.contains("2 differences"), "{error}");
    assert!(error.contains("content:") && error.contains("extra: only in the first"), "{error}");
}
