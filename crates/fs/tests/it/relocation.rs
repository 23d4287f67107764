//! Tests emptying block groups.
//!
//! Method: Linux makes filesystems of every format with snapshots, reflinks and preallocated extents. All block groups
//! of a filesystem are emptied, one after the other. Then each file is as before, both in the engine and under Linux;
//! `btrfs check` and `ubtrfs check` find nothing; and the groups are gone.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_fs::{Caller, Fs, InodeId, Job, MountOptions, NewInode};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    Compare, Image, KernelImage, KernelImageSpec, LoopMount, Medium, MediumDevice, TreeEntry, capability, check_medium,
    judge, second_opinion, walk_path,
};

use crate::common::open;

fn entries_of_linux(image: &Image) -> Vec<TreeEntry> {
    let mount = LoopMount::new(image.path(), "ro").unwrap();
    let entries = walk_path(mount.path()).unwrap();
    mount.close().unwrap();
    entries
}

/// Empties all block groups that exist at the time of the call.
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

/// A block that the source of a snapshot allocated, and that only the snapshot still uses, has full backrefs. The
/// relocated copy of such a block is newer than the snapshot.
#[test]
fn a_copy_with_full_backrefs_keeps_them_until_it_changes() {
    let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
    let device = Arc::new(MediumDevice::new(Medium::formatted(256 << 20, &mkfs).unwrap()));
    let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default()).unwrap();
    let source = fs.create_subvolume(fs.root(), b"source", &Caller::ROOT).unwrap();
    let files: Vec<InodeId> = (0..200)
        .map(|number| {
            let id = fs.create(source, format!("file-{number}").as_bytes(), NewInode::file(0o600), &Caller::ROOT);
            let id = id.unwrap().id;
            fs.write(id, 0, &[number as u8; 8192]).unwrap();
            id
        })
        .collect();
    let snapshot = fs.snapshot(source.root, fs.root(), b"snapshot", false).unwrap();
    for id in &files {
        fs.write(*id, 0, b"changed").unwrap();
    }
    fs.sync().unwrap();
    // Move data only, so that a shared block is copied only if it refers to moved data.
    for group in fs.block_groups().into_iter().filter(|group| group.flags.contains(BlockGroupFlags::DATA)) {
        fs.relocate_block_group(group.start, &Job::new()).unwrap();
    }
    for id in files.iter().step_by(3) {
        fs.write(InodeId { root: snapshot.root, ino: id.ino }, 4096, b"changed too").unwrap();
    }
    fs.sync().unwrap();
    check_medium(&device.content()).unwrap();
    fs.delete_subvolume(fs.root(), b"source", None).unwrap();
    empty_all_groups(&fs);
    fs.finish_deletions(&mut |_| Ok(())).unwrap();
    fs.close().unwrap();
    check_medium(&device.content()).unwrap();
}

#[test]
fn old_places_of_moved_data_are_discarded_with_synchronous_discards() {
    for (options, nr_copies) in [("", 2), ("discard=sync", 1)] {
        let device = Arc::new(MediumDevice::new(Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap()));
        let options = MountOptions::parse(options).unwrap();
        let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], options).unwrap();
        let id = fs.create(fs.root(), b"file", NewInode::file(0o600), &Caller::ROOT).unwrap().id;
        let sector = [0x5a; 4096];
        fs.write(id, 0, &sector.repeat(50)).unwrap();
        fs.sync().unwrap();
        for group in fs.block_groups().into_iter().filter(|group| group.flags.contains(BlockGroupFlags::DATA)) {
            fs.relocate_block_group(group.start, &Job::new()).unwrap();
        }
        fs.close().unwrap();
        let mut content = vec![0; 256 << 20];
        device.read_at(0, &mut content).unwrap();
        assert_eq!(content.chunks(4096).filter(|chunk| **chunk == sector).count(), 50 * nr_copies);
    }
}
