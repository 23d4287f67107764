//! Tests mounting through the library (feature `fuse`): programs and the library's other handles see one filesystem,
//! and unmounting commits and closes the filesystem.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use ubtrfs::fuse::{self, MountConfig, MountError};
use ubtrfs::{Filesystem, MountOptions, SnapshotAccess};
use ubtrfs_testkit::{capability, second_opinion};

fn mountable() -> MountOptions {
    MountOptions { track_lookups: true, ..MountOptions::default() }
}

#[test]
fn a_mount_and_other_handles_share_one_filesystem() {
    if !capability::fuse() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let (image, dir) = (scratch.path().join("disk.img"), scratch.path().join("mnt"));
    fs::create_dir(&dir).unwrap();
    Filesystem::make_image(&image, 256 << 20).unwrap().close().unwrap();
    let handle = Filesystem::open_image_with(&image, mountable()).unwrap();
    handle.create_subvolume("/data").unwrap();
    handle.write("/data/before", "before the mount").unwrap();

    let config = MountConfig { fsname: image.display().to_string(), ..MountConfig::default() };
    let mount = handle.clone().mount(&dir, &config).unwrap();
    let server = std::thread::spawn(move || mount.run());
    assert_eq!(fs::read(dir.join("data/before")).unwrap(), b"before the mount");
    fs::write(dir.join("data/through"), vec![7; 1 << 20]).unwrap();
    fs::set_permissions(dir.join("data/through"), fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(handle.read("/data/through").unwrap(), vec![7; 1 << 20]);
    assert_eq!(handle.metadata("/data/through").unwrap().permissions(), 0o640);
    handle.snapshot("/data", "/backup", SnapshotAccess::ReadOnly).unwrap();
    assert_eq!(fs::metadata(dir.join("backup/through")).unwrap().size(), 1 << 20);

    fuse::unmount(&dir, false).unwrap();
    server.join().unwrap().unwrap();
    assert!(handle.write("/late", "").is_err(), "the session closed the filesystem");
    drop(handle);
    second_opinion(&image).unwrap();
    let fs = Filesystem::open_image(&image).unwrap();
    assert_eq!(fs.read("/backup/through").unwrap(), vec![7; 1 << 20]);
    fs.close().unwrap();
}

#[test]
fn a_mount_without_tracked_lookups_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let fs = Filesystem::make_in_memory(128 << 20).unwrap();
    let error = fs.mount(scratch.path(), &MountConfig::default()).unwrap_err();
    assert!(matches!(&error, MountError::Session { .. }) && error.to_string().contains("track_lookups"), "{error}");
}

#[test]
fn a_mount_on_a_missing_directory_is_refused_and_leaves_the_filesystem_usable() {
    if !capability::fuse() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let image = scratch.path().join("disk.img");
    Filesystem::make_image(&image, 256 << 20).unwrap().close().unwrap();
    let fs = Filesystem::open_image_with(&image, mountable()).unwrap();
    let error = fs.clone().mount(scratch.path().join("missing"), &MountConfig::default()).unwrap_err();
    assert!(matches!(error, MountError::NoDirectory(_)), "{error}");
    fs.write("/still", "usable").unwrap();
    fs.close().unwrap();
    second_opinion(&image).unwrap();
}
