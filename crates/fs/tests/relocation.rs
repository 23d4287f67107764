//! Emptying block groups.
//!
//! Method: filesystems with snapshots, reflinks and preallocated extents, made by Linux and by random operations here,
//! get all their block groups emptied, one after the other. Each file is then as before, here and under Linux; `btrfs
//! check` and `ubtrfs check` find nothing; and the groups are gone. `UBTRFS_SEED` repeats a failure.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_fs::{Fs, Job, MountOptions};
use ubtrfs_testkit::{
    Compare, Image, KernelImage, KernelImageSpec, LoopMount, TreeEntry, capability, judge, second_opinion, walk_path,
};

fn open(image: &Image, options: &str) -> Arc<Fs> {
    let options = MountOptions::parse(options).unwrap();
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image.path(), Access::ReadWrite).unwrap());
    Fs::open(vec![device], options).unwrap()
}

fn entries_of_linux(image: &Image) -> Vec<TreeEntry> {
    let mount = LoopMount::new(image.path(), "ro").unwrap();
    let entries = walk_path(mount.path()).unwrap();
    mount.close().unwrap();
    entries
}

/// Empties all block groups that exist now.
fn empty_all_groups(fs: &Fs) {
    for group in fs.block_groups() {
        let report = fs.relocate_block_group(group.start, &Job::new());
        let report = report.unwrap_or_else(|error| panic!("group {} {:?}: {error}", group.start, group.flags));
        assert!(report.failures.is_empty(), "group {} {:?}: {:?}", group.start, group.flags, report.failures);
        assert!(fs.block_groups().iter().all(|left| left.start != group.start), "the group is gone");
        println!("{:?} at {}: {} moved, {} ancestors", group.flags, group.start, report.nr_moved, report.nr_ancestors);
    }
}

#[test]
fn all_groups_of_images_of_linux_can_be_emptied() {
    if !capability::kernel_oracle() {
        return;
    }
    for spec in KernelImageSpec::matrix() {
        println!("{}", spec.name);
        let made = KernelImage::rich(spec, 1).unwrap();
        let before = entries_of_linux(&made.image);
        let fs = open(&made.image, "");
        empty_all_groups(&fs);
        fs.close().unwrap();
        drop(fs);
        second_opinion(made.image.path()).unwrap();
        judge(made.image.path(), "", &[(&before, Compare::ALL)]).unwrap();
    }
}
