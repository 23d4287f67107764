//! A filesystem that something else writes to while it is open: the kernel attaches a loop device to an image file without
//! asking for its lock. Our side finds out at its next commit or fsync, turns read-only and writes nothing more.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_fs::MountOptions;
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    FsTarget, Image, LoopMount, Medium, MediumDevice, NodeKind, Target, btrfs_check, capability, check_medium,
};

fn open(device: &Arc<MediumDevice>) -> FsTarget {
    let options = MountOptions::parse("commit=300").unwrap();
    FsTarget::on_device(Arc::clone(device) as Arc<dyn Device>, options).unwrap()
}

/// Two engines on one device: the second one commits, and the first one must not.
#[test]
fn a_superblock_that_another_writer_put_is_never_overwritten() {
    for by_fsync in [false, true] {
        let device = Arc::new(MediumDevice::new(Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap()));
        let mut ours = open(&device);
        ours.create(b"ours", NodeKind::File, 0o644, (0, 0)).unwrap();
        ours.sync().unwrap();
        ours.write(b"ours", 0, &[7; 9000]).unwrap();
        let mut theirs = open(&device);
        theirs.create(b"theirs", NodeKind::File, 0o644, (0, 0)).unwrap();
        theirs.close().unwrap();
        let before = device.content();
        if by_fsync {
            ours.fsync(b"ours").unwrap_err();
        } else {
            ours.sync().unwrap_err();
        }
        let why = ours.fs().read_only().expect("it turns read-only");
        assert!(why.contains("changed by something else"), "{why}");
        ours.create(b"more", NodeKind::File, 0o644, (0, 0)).unwrap_err();
        ours.close().unwrap_err();
        // Of the superblocks, none is another one.
        for offset in [64 << 10, 64 << 20] {
            let read = |medium: &Medium| {
                let mut raw = vec![0; 4096];
                medium.read(offset, &mut raw);
                raw
            };
            assert!(read(&before) == read(&device.content()), "the superblock at {offset}");
        }
        check_medium(&device.content()).unwrap();
        let after = open(&device);
        assert!(after.lookup(b"theirs").is_ok());
        after.close().unwrap();
    }
}

/// The same with Linux as the other one.
#[test]
fn an_image_that_linux_mounted_meanwhile_is_left_to_linux() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::empty(0).unwrap();
    Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap().save(image.path()).unwrap();
    let mut ours = FsTarget::open(image.path(), "commit=300").unwrap();
    ours.create(b"ours", NodeKind::File, 0o644, (0, 0)).unwrap();
    ours.sync().unwrap();
    // No lock of ours keeps Linux out.
    let mount = LoopMount::new(image.path(), "").unwrap();
    std::fs::write(mount.path().join("theirs"), b"text").unwrap();
    mount.close().unwrap();
    ours.create(b"more", NodeKind::File, 0o644, (0, 0)).unwrap();
    ours.sync().unwrap_err();
    let why = ours.fs().read_only().expect("it turns read-only");
    assert!(why.contains("changed by something else"), "{why}");
    drop(ours.close());
    btrfs_check(image.path()).unwrap();
    let after = FsTarget::open(image.path(), "ro").unwrap();
    assert!(after.lookup(b"theirs").is_ok() && after.lookup(b"more").is_err());
}

/// The device damages, or loses, what was written: that is no other writer, and the next superblock mends it.
#[test]
fn a_superblock_that_the_device_damaged_or_lost_is_written_anew() {
    for lost in [false, true] {
        let device = Arc::new(MediumDevice::new(Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap()));
        let mut ours = open(&device);
        ours.create(b"ours", NodeKind::File, 0o644, (0, 0)).unwrap();
        ours.sync().unwrap();
        let mut raw = vec![0; 4096];
        device.read_at(64 << 10, &mut raw).unwrap();
        ours.write(b"ours", 0, &[7; 9000]).unwrap();
        if lost {
            // What was there before comes back after the write.
            ours.sync().unwrap();
        } else {
            raw[2000] ^= 1;
        }
        device.write_at(64 << 10, &raw).unwrap();
        ours.write(b"ours", 9000, &[8; 9000]).unwrap();
        ours.fsync(b"ours").unwrap();
        ours.write(b"ours", 18000, &[9; 9000]).unwrap();
        ours.sync().unwrap();
        assert_eq!(ours.fs().read_only(), None);
        ours.close().unwrap();
        check_medium(&device.content()).unwrap();
        let mut after = open(&device);
        assert_eq!(after.read(b"ours", 18000, 9000).unwrap(), [9; 9000]);
        after.close().unwrap();
    }
}
