//! Devices in use by the kernel are refused. Method: an image made by mkfs.btrfs is attached to a loop device and
//! mounted. Needs root, loop devices and mkfs.btrfs; prints SKIPPED without them.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::fs::FlockOperation;
use ubtrfs_device::{Access, Device, FileDevice, OpenError, claim_block_device};

/// Runs a command and returns its output, or `None` if the command failed.
fn run(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Unmounts the filesystem and detaches the loop device, also when the test fails.
struct Cleanup<'a> {
    mount: &'a str,
    node: String,
}

impl Drop for Cleanup<'_> {
    fn drop(&mut self) {
        run("umount", &[self.mount]);
        run("losetup", &["-d", &self.node]);
    }
}

#[test]
fn a_mounted_image_and_its_loop_device_are_refused_until_unmounted() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image").display().to_string();
    let mount = dir.path().join("mount").display().to_string();
    std::fs::create_dir(&mount).unwrap();
    drop(FileDevice::create(Path::new(&image), 256 << 20, true).unwrap());
    let node = run("mkfs.btrfs", &["-q", &image]).and_then(|_| run("losetup", &["-f", "--show", &image]));
    let Some(node) = node else {
        eprintln!("SKIPPED: needs root, mkfs.btrfs and a free loop device");
        assert!(std::env::var_os("CI").is_none(), "CI must be able to run this");
        return;
    };
    let cleanup = Cleanup { mount: &mount, node: node.clone() };

    // The image is attached but not mounted. The writer holds the loop device, so the kernel cannot mount it.
    let writer = FileDevice::open(Path::new(&image), Access::ReadWrite).unwrap();
    assert_eq!(run("mount", &[&node, &mount]), None);
    drop(writer);

    run("mount", &[&node, &mount]).expect("mount");
    for path in [&image, &node] {
        for access in [Access::ReadOnly, Access::ReadWrite] {
            let refused = FileDevice::open(Path::new(path), access).unwrap_err();
            assert!(
                matches!(&refused, OpenError::Mounted { at: Some(at), .. } if at == Path::new(&mount)),
                "{refused}"
            );
        }
    }
    run("umount", &[&mount]).expect("umount");
    let device = FileDevice::open(Path::new(&node), Access::ReadWrite).unwrap();
    assert_eq!(device.len_bytes(), 256 << 20);
    device.discard(128 << 20, 1 << 20).unwrap();
    drop(device);

    // A process that ends lets the lock go before the claim.
    let rdev = std::fs::metadata(&node).unwrap().rdev();
    for path in [&image, &node] {
        let claim = claim_block_device(Path::new(&node), rdev).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(200));
                drop(claim);
            });
            FileDevice::open(Path::new(path), Access::ReadWrite).expect("the claim is awaited");
        });
        let _claim = claim_block_device(Path::new(&node), rdev).unwrap();
        let refused = FileDevice::open(Path::new(path), Access::ReadWrite).unwrap_err();
        assert!(matches!(refused, OpenError::Mounted { at: None, .. }), "{refused}");
    }
    drop(cleanup);
}

/// The next process waits for the lock of the image, and then claims the loop devices at once.
#[test]
fn the_claims_of_loop_devices_go_before_the_lock_of_the_image() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    drop(FileDevice::create(&image, 16 << 20, true).unwrap());
    let Some(node) = run("losetup", &["-f", "--show", &image.display().to_string()]) else {
        eprintln!("SKIPPED: needs root and a free loop device");
        assert!(std::env::var_os("CI").is_none(), "CI must be able to run this");
        return;
    };
    let cleanup = Cleanup { mount: "", node: node.clone() };
    let rdev = std::fs::metadata(&node).unwrap().rdev();
    for _ in 0..100 {
        let writer = FileDevice::open(&image, Access::ReadWrite).unwrap();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| {
                let file = std::fs::File::open(&image).unwrap();
                while rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {}
                claim_block_device(Path::new(&node), rdev)
            });
            std::thread::sleep(Duration::from_millis(2));
            drop(writer);
            next.join().unwrap().expect("no claim outlives the lock");
        });
    }
    drop(cleanup);
}
