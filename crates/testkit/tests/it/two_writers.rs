//! Tests filesystems that another writer changes while ubtrfs has them open. This can happen although ubtrfs locks
//! image files, because the kernel attaches loop devices to locked files. Before its next write, ubtrfs notices the
//! other writer, turns read-only and writes nothing more. Also tests images that are removed or truncated: nothing is
//! reported as durable afterwards.

use std::sync::Arc;
use std::time::Duration;

use ubtrfs_device::Device;
use ubtrfs_fs::MountOptions;
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    FsTarget, Image, LoopMount, Medium, MediumDevice, NodeKind, Target, btrfs_check, capability, check_medium,
};

const EIO: i32 = rustix::io::Errno::IO.raw_os_error();
const EROFS: i32 = rustix::io::Errno::ROFS.raw_os_error();

fn open(device: &Arc<MediumDevice>) -> FsTarget {
    let options = MountOptions::parse("commit=300").unwrap();
    FsTarget::on_device(Arc::clone(device) as Arc<dyn Device>, options).unwrap()
}

/// If two engines have one device open, the first one must not commit after the second one has committed.
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
        // The superblocks are unchanged.
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

/// Writeback is refused too, because it would overwrite the other writer's data before any commit.
#[test]
fn data_is_not_written_back_over_another_writers_after_a_quiet_time() {
    let device = Arc::new(MediumDevice::new(Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap()));
    let mut ours = open(&device);
    ours.create(b"ours", NodeKind::File, 0o644, (0, 0)).unwrap();
    ours.write(b"ours", 0, &[6; 100_000]).unwrap();
    ours.sync().unwrap();
    let mut theirs = open(&device);
    theirs.create(b"theirs", NodeKind::File, 0o644, (0, 0)).unwrap();
    theirs.write(b"theirs", 0, &[8; 1 << 20]).unwrap();
    theirs.close().unwrap();
    std::thread::sleep(Duration::from_millis(100));
    ours.write(b"ours", 0, &[7; 1 << 20]).unwrap();
    let error = ours.fs().flush_data().unwrap_err();
    assert!(matches!(error.errno(), EIO | EROFS), "{error}");
    let why = ours.fs().read_only().expect("it turns read-only");
    assert!(why.contains("changed by something else"), "{why}");
    ours.close().unwrap_err();
    check_medium(&device.content()).unwrap();
    let mut after = open(&device);
    assert!(after.read(b"theirs", 0, 1 << 20).unwrap() == vec![8; 1 << 20]);
    after.close().unwrap();
}

/// If the image was removed or truncated, sync and close fail: writes to a removed image are lost when it is closed,
/// and a truncated image has lost blocks.
#[test]
fn an_image_that_was_removed_or_cut_under_a_mount_fails_sync_and_close() {
    for (cut, has_changes) in [(false, false), (false, true), (true, false), (true, true)] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap().save(&path).unwrap();
        let mut fs = FsTarget::open(&path, "commit=300").unwrap();
        fs.create(b"file", NodeKind::File, 0o644, (0, 0)).unwrap();
        fs.sync().unwrap();
        if has_changes {
            fs.write(b"file", 0, &[7; 1 << 20]).unwrap();
        }
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        if cut {
            file.set_len(8 << 20).unwrap();
        } else {
            std::fs::remove_file(&path).unwrap();
        }
        let error = fs.fs().sync().unwrap_err();
        assert!(matches!(error.errno(), EIO | EROFS), "{error}");
        let why = fs.fs().read_only().expect("it turns read-only");
        assert!(why.contains(if cut { "was cut to 8388608 bytes" } else { "was removed or replaced" }), "{why}");
        fs.create(b"more", NodeKind::File, 0o644, (0, 0)).unwrap_err();
        fs.close().unwrap_err();
        let len = file.metadata().unwrap().len();
        assert_eq!(len, if cut { 8 << 20 } else { 256 << 20 }, "it is never made longer again");
    }
    // Closing fails too, even if no sync came before and there is nothing to commit.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap().save(&path).unwrap();
    let fs = FsTarget::open(&path, "").unwrap();
    std::fs::remove_file(&path).unwrap();
    fs.close().unwrap_err();
}

/// In this test, Linux is the other writer.
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
    // Linux ignores our lock.
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

/// A superblock that the device damaged or lost is not mistaken for the superblock of another writer, and the next
/// commit repairs it.
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
            // Restore the old content after the write, as a device that lost the write would.
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
