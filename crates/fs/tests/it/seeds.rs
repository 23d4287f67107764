//! Tests filesystems on seeds, which Linux makes: they are read with their seed, and nothing is written.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice, find_members, is_seed};
use ubtrfs_fs::{Fs, MountOptions};
use ubtrfs_testkit::{LoopDevice, capability, run, ubtrfs_check_errors};

use super::arrays::{Array, content, get, put};

const MIB: u64 = 1 << 20;

/// An array that is a seed, and an image of a filesystem on it, with a file of each.
fn seeded(args: (&str, &str, usize)) -> (Array, PathBuf) {
    let (data, metadata, nr_devices) = args;
    let mut array = Array::new(&["-d", data, "-m", metadata], &vec![400; nr_devices]);
    let fs = array.open();
    put(&fs, "of the seed", &content(30 * MIB, 1));
    fs.close().unwrap();
    drop(fs);
    let sprout = array.add_image(600);
    let loops: Vec<LoopDevice> = array.images.iter().map(|image| LoopDevice::over(image).unwrap()).collect();
    let paths: Vec<&str> = loops.iter().map(LoopDevice::path).collect();
    let (new, old) = paths.split_last().unwrap();
    run("btrfs", ["device", "scan"].into_iter().chain(old.iter().copied())).unwrap();
    run("btrfstune", ["-S", "1", old[0]]).unwrap();
    let point = sprout.with_file_name("mnt");
    std::fs::create_dir_all(&point).unwrap();
    let point = point.to_str().unwrap();
    run("mount", ["-t", "btrfs", old[0], point]).unwrap();
    run("btrfs", ["device", "add", "-f", new, point]).unwrap();
    run("mount", ["-o", "remount,rw", point]).unwrap();
    std::fs::write(Path::new(point).join("of the sprout"), content(20 * MIB, 2)).unwrap();
    run("umount", [point]).unwrap();
    run("btrfs", ["device", "scan", "--forget"].into_iter().chain(paths)).unwrap();
    drop(loops);
    array.images.pop();
    // Other programs may still look at the loop devices.
    let is_free = |image: &PathBuf| FileDevice::open(image, Access::ReadWrite).is_ok();
    while !array.images.iter().chain([&sprout]).all(is_free) {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    (array, sprout)
}

fn open(images: &[PathBuf]) -> Vec<Arc<dyn Device>> {
    let access = |image: &Path| if is_seed(image) { Access::ReadOnly } else { Access::ReadWrite };
    let device = |image: &PathBuf| Arc::new(FileDevice::open(image, access(image)).unwrap()) as Arc<dyn Device>;
    images.iter().map(device).collect()
}

#[test]
fn a_filesystem_on_a_seed_is_read_with_its_seed_and_not_written() {
    if !capability::kernel_oracle() {
        return;
    }
    for kind in [("single", "dup", 1), ("raid1", "raid1", 2)] {
        eprintln!("{kind:?}");
        let (seed, sprout) = seeded(kind);
        let before: Vec<Vec<u8>> = seed.images.iter().map(|image| std::fs::read(image).unwrap()).collect();
        // The seed is found beside the sprout.
        let mut found = find_members(&[&sprout]).unwrap().found;
        found.sort();
        assert_eq!(found, seed.images);
        let all: Vec<PathBuf> = std::iter::once(sprout.clone()).chain(found).collect();
        let fs = Fs::open(open(&all), MountOptions::default()).unwrap();
        let reason = fs.read_only().expect("it is not written");
        assert!(reason.contains("on a seed"), "{reason}");
        assert!(get(&fs, "of the seed", 30 * MIB) == content(30 * MIB, 1));
        assert!(get(&fs, "of the sprout", 20 * MIB) == content(20 * MIB, 2));
        let devices = fs.space_usage().devices;
        assert!(devices.len() == kind.2 + 1 && devices.iter().all(|device| device.path.is_some()), "{devices:?}");
        fs.close().unwrap();
        drop(fs);
        let problems = ubtrfs_check_errors(open(&all)).unwrap();
        assert!(problems.is_empty(), "{problems:?}");
        // The seed alone is still a filesystem.
        let fs = Fs::open(open(&seed.images), MountOptions::default()).unwrap();
        assert_eq!(fs.read_only().as_deref(), Some("it is a seed filesystem"));
        assert!(get(&fs, "of the seed", 30 * MIB) == content(30 * MIB, 1));
        fs.close().unwrap();
        drop(fs);
        // Without the seed, the message names it.
        let fs = Fs::open(open(std::slice::from_ref(&sprout)), MountOptions::default());
        let text = match &fs {
            Ok(fs) => fs.read_only().expect("its seed is missing"),
            Err(error) => error.to_string(),
        };
        assert!(text.contains("seed device 1") || text.contains("missing device 1"), "{text}");
        drop(fs);
        for (image, before) in seed.images.iter().zip(before) {
            assert!(std::fs::read(image).unwrap() == before, "nothing is written to a seed");
        }
    }
}

#[test]
fn a_seed_of_another_filesystem_is_left_out() {
    if !capability::kernel_oracle() {
        return;
    }
    let kind = ("single", "dup", 1);
    let ((seed, sprout), (other, _)) = (seeded(kind), seeded(kind));
    let images = [other.images[0].clone(), sprout, seed.images[0].clone()];
    let fs = Fs::open(open(&images), MountOptions::default()).unwrap();
    assert!(get(&fs, "of the seed", 30 * MIB) == content(30 * MIB, 1));
    let paths: Vec<_> = fs.space_usage().devices.iter().map(|device| device.path.clone().unwrap()).collect();
    assert!(!paths.iter().any(|path| Path::new(path) == images[0]), "{paths:?}");
    fs.close().unwrap();
}
