//! Tests reading every profile as the kernel writes it. Method: mkfs.btrfs makes filesystems of one to four devices,
//! the kernel writes a file through loop devices, and the test reads the file's extents by address, from every copy.
//! Needs root, loop devices and btrfs-progs; without them, the test prints SKIPPED, and fails in CI.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_error::Error;
use ubtrfs_format::item::{ChunkItem, DevItem};
use ubtrfs_format::node::{NodeView, verify_csum};
use ubtrfs_format::{CsumType, KeyType, Logical};
use ubtrfs_volumes::{DeviceSetOptions, Volumes};

fn run(program: &str, args: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(args).output().map_err(|error| format!("{program}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(format!("{program} {args:?}: {}\n{}", text(&output.stdout), text(&output.stderr))),
    }
}

fn can_run() -> bool {
    let needed = run("mkfs.btrfs", &["--version"]).and_then(|_| run("losetup", &["-f"]));
    if let Err(error) = &needed {
        eprintln!("SKIPPED: btrfs-progs or loop devices are missing: {error}");
        assert!(std::env::var_os("CI").is_none(), "CI must be able to run this");
    }
    needed.is_ok()
}

/// Loop devices and a mount, undone on drop.
struct Mounted {
    nodes: Vec<String>,
    point: String,
}

impl Mounted {
    fn new(images: &[PathBuf], point: &Path) -> Self {
        std::fs::create_dir_all(point).unwrap();
        let mut mounted = Self { nodes: Vec::new(), point: point.to_str().unwrap().to_owned() };
        for image in images {
            mounted.nodes.push(run("losetup", &["-f", "--show", image.to_str().unwrap()]).expect("losetup"));
        }
        let devices: Vec<String> = mounted.nodes.iter().map(|node| format!("device={node}")).collect();
        run("mount", &["-t", "btrfs", "-o", &devices.join(","), &mounted.nodes[0], &mounted.point]).expect("mount");
        mounted
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A process that another test has just forked holds this test's open files until it executes its program.
        let mut unmounted = run("umount", &[&self.point]);
        for _ in 0..50 {
            if unmounted.is_ok() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(40));
            unmounted = run("umount", &[&self.point]);
        }
        for node in &self.nodes {
            let detached = run("losetup", &["-d", node]);
            assert!(detached.is_ok() || std::thread::panicking(), "{detached:?}");
        }
        assert!(unmounted.is_ok() || std::thread::panicking(), "{unmounted:?}");
    }
}

const FILE_LEN: usize = 5 << 20;

/// Content that differs at each offset of the file.
fn content() -> Vec<u8> {
    (0..FILE_LEN as u32 / 4).flat_map(|n| (n.wrapping_mul(0x9e37_79b9)).to_le_bytes()).collect()
}

/// Makes images of a filesystem to which the kernel wrote [`content`].
fn images(dir: &Path, profile: &str, nr_devices: usize) -> Vec<PathBuf> {
    let images: Vec<PathBuf> = (0..nr_devices).map(|n| dir.join(format!("{profile}{n}.img"))).collect();
    for image in &images {
        drop(FileDevice::create(image, 400 << 20, true).unwrap());
    }
    let paths = images.iter().map(|image| image.to_str().unwrap());
    let args: Vec<&str> = ["-q", "-d", profile, "-m", profile].into_iter().chain(paths).collect();
    run("mkfs.btrfs", &args).expect("mkfs.btrfs");
    let mounted = Mounted::new(&images, &dir.join("mnt"));
    std::fs::write(format!("{}/file", mounted.point), content()).unwrap();
    drop(mounted);
    images
}

fn open(images: &[PathBuf], access: Access) -> Result<Volumes, Error> {
    let device = |image: &PathBuf| -> Arc<dyn Device> { Arc::new(FileDevice::open(image, access).unwrap()) };
    let options = DeviceSetOptions { read_only: access == Access::ReadOnly, ..DeviceSetOptions::default() };
    Volumes::open(images.iter().map(device).collect(), options)
}

/// Adds the items of the chunk tree, which is a single leaf.
fn load_chunk_tree(volumes: &Volumes) {
    let sb = volumes.superblock().clone();
    let mut raw = vec![0; sb.nodesize as usize];
    volumes.read(sb.chunk_root, &mut raw, sb.nodesize as usize, &|_, raw| verify_csum(raw, CsumType::Crc32c)).unwrap();
    let view = NodeView::new(&raw).unwrap();
    assert!(view.is_leaf());
    for slot in 0..view.nritems() {
        let (key, item) = (view.key(slot).unwrap(), view.item(slot).unwrap());
        match key.item_type {
            KeyType::CHUNK_ITEM => volumes.add_chunk(Logical(key.offset), ChunkItem::decode(item).unwrap()).unwrap(),
            KeyType::DEV_ITEM => volumes.set_dev_item(&DevItem::decode(item).unwrap()).unwrap(),
            _ => {}
        }
    }
}

/// The file's extents from the output of btrfs-progs: file offset, address, length.
fn extents(images: &[PathBuf]) -> Vec<(usize, Logical, usize)> {
    let paths = images.iter().map(|image| image.to_str().unwrap());
    let args: Vec<&str> = ["inspect-internal", "dump-tree", "-t", "5"].into_iter().chain(paths).collect();
    let text = run("btrfs", &args).expect("dump-tree");
    let mut extents = Vec::new();
    let mut file_offset = None;
    for line in text.lines().map(str::trim) {
        let number = |text: &str| text.trim_end_matches(')').parse::<u64>().unwrap();
        if let Some((_, rest)) = line.split_once("EXTENT_DATA ") {
            file_offset = Some(number(rest.split(' ').next().unwrap()) as usize);
        } else if let (Some(offset), Some(rest)) = (file_offset, line.strip_prefix("extent data disk byte ")) {
            let (start, len) = rest.split_once(" nr ").unwrap();
            extents.push((offset, Logical(number(start)), number(len) as usize));
            file_offset = None;
        }
    }
    assert_eq!(extents.iter().map(|extent| extent.2).sum::<usize>(), FILE_LEN);
    extents
}

#[test]
fn the_kernels_data_is_read_from_every_copy() {
    if !can_run() {
        return;
    }
    let data = content();
    let cases = [
        ("single", 1, 1),
        ("dup", 1, 2),
        ("single", 2, 1),
        ("raid0", 2, 1),
        ("raid0", 3, 1),
        ("raid1", 3, 2),
        ("raid1c3", 3, 3),
        ("raid1c4", 4, 4),
        ("raid10", 4, 2),
        ("raid5", 3, 1),
        ("raid6", 4, 1),
    ];
    for (profile, nr_devices, nr_copies) in cases {
        eprintln!("{profile} on {nr_devices}");
        let dir = tempfile::tempdir().unwrap();
        let images = images(dir.path(), profile, nr_devices);
        let volumes = open(&images, Access::ReadOnly).unwrap();
        load_chunk_tree(&volumes);
        for (offset, at, len) in extents(&images) {
            assert_eq!(volumes.num_copies(at), nr_copies);
            for copy in 0..nr_copies {
                let mut found = vec![0; len];
                volumes.read_copy(at, &mut found, copy).unwrap();
                assert!(found == data[offset..offset + len], "copy {copy} of {at}");
            }
        }
        let has_parity = matches!(profile, "raid5" | "raid6");
        assert_eq!(volumes.write_refusal().is_some(), has_parity, "{:?}", volumes.write_refusal());
        let used: u64 = volumes.devices().iter().map(|device| device.bytes_used).sum();
        let text = run("btrfs", &["inspect-internal", "dump-super", images[0].to_str().unwrap()]).unwrap();
        let on_disk = text.lines().find_map(|line| line.strip_prefix("dev_item.bytes_used")).unwrap();
        let on_disk: u64 = on_disk.trim().parse().unwrap();
        assert_eq!(volumes.dev_item(ubtrfs_format::DevId(1)).unwrap().bytes_used, on_disk);
        assert!(used >= on_disk);
    }
}

#[test]
fn mirrored_data_is_read_without_one_device() {
    if !can_run() {
        return;
    }
    let data = content();
    let dir = tempfile::tempdir().unwrap();
    let images = images(dir.path(), "raid1", 2);
    let extents = extents(&images);
    for present in &images {
        let volumes = open(std::slice::from_ref(present), Access::ReadOnly).unwrap();
        load_chunk_tree(&volumes);
        assert!(volumes.write_refusal().unwrap().contains("1 of its 2 devices"));
        assert_eq!(volumes.devices().iter().filter(|device| device.path.is_none()).count(), 1);
        for &(offset, at, len) in &extents {
            let mut found = vec![0; len];
            let wanted = |index: usize, piece: &[u8]| {
                let start = offset + index * 4096;
                assert!(piece == &data[start..start + piece.len()], "a missing device's copy was handed out");
                Ok(())
            };
            volumes.read(at, &mut found, 4096, &wanted).unwrap();
            assert!(found == data[offset..offset + len]);
        }
    }
}

#[test]
fn errors_name_missing_devices_and_missing_parity_support() {
    if !can_run() {
        return;
    }
    for (profile, nr_devices) in [("raid5", 3), ("raid6", 4), ("raid1c3", 3), ("raid0", 2)] {
        let dir = tempfile::tempdir().unwrap();
        let images = images(dir.path(), profile, nr_devices);
        let all = open(&images, Access::ReadOnly).unwrap();
        load_chunk_tree(&all);
        let missing = all.dev_item(ubtrfs_format::DevId(nr_devices as u64)).unwrap();
        let volumes = open(&images[..nr_devices - 1], Access::ReadOnly).unwrap();
        let were = if nr_devices == 2 { "was" } else { "were" };
        let counted = format!("{} of its {nr_devices} devices {were} given", nr_devices - 1);
        let refusal = volumes.write_refusal().unwrap();
        assert!(refusal.contains(&counted), "before the items are known: {refusal}");
        volumes.set_dev_item(&missing).unwrap();
        let refusal = volumes.write_refusal().unwrap();
        let named = format!("{counted}; missing: device {nr_devices} (uuid {})", missing.uuid);
        assert!(refusal.ends_with(&named), "{refusal}");
        let has_parity = profile.starts_with("raid5") || profile.starts_with("raid6");
        let mut buf = vec![0; 16384];
        let (start, chunk) = volumes.chunk_at(volumes.superblock().chunk_root).unwrap();
        let errors: Vec<String> = (0..chunk.length / 16384)
            .filter_map(|node| volumes.read_copy(Logical(start.0 + node * 16384), &mut buf, 0).err())
            .map(|error| error.to_string())
            .collect();
        assert!(profile == "raid1c3" || !errors.is_empty(), "{profile}: nothing lies on the missing device");
        for error in errors {
            assert!(error.contains("give all devices"), "{error}");
            assert_eq!(error.contains("cannot rebuild"), has_parity, "{error}");
        }
    }
}

#[test]
fn damaged_dup_metadata_is_healed_by_reading_it() {
    if !can_run() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let images = images(dir.path(), "dup", 1);
    let volumes = open(&images, Access::ReadWrite).unwrap();
    load_chunk_tree(&volumes);
    let (root, nodesize) = (volumes.superblock().root, volumes.superblock().nodesize as usize);
    let (start, chunk) = volumes.chunk_at(root).unwrap();
    let physical = chunk.stripes[0].offset.0 + (root.0 - start.0);
    drop(volumes);
    let device = FileDevice::open(&images[0], Access::ReadWrite).unwrap();
    device.write_at(physical + 1000, &[0xaa; 3000]).unwrap();
    drop(device);

    let volumes = open(&images, Access::ReadWrite).unwrap();
    load_chunk_tree(&volumes);
    let check = |_, raw: &[u8]| verify_csum(raw, CsumType::Crc32c);
    let mut raw = vec![0; nodesize];
    volumes.read_copy(root, &mut raw, 0).unwrap();
    assert!(check(0, &raw).is_err());
    volumes.read(root, &mut raw, nodesize, &check).unwrap();
    for copy in 0..2 {
        volumes.read_copy(root, &mut raw, copy).unwrap();
        check(0, &raw).unwrap();
    }
    volumes.flush().unwrap();
    drop(volumes);
    let mounted = Mounted::new(&images, &dir.path().join("mnt"));
    let scrub = run("btrfs", &["scrub", "start", "-B", &mounted.point]).expect("scrub");
    assert!(scrub.contains("no errors found"), "{scrub}");
}
