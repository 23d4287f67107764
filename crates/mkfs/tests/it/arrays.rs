//! Tests filesystems on several devices. Method: arrays of every profile without parity, on equal and unequal devices,
//! must pass both checkers, and Linux mounts, writes and scrubs them. Their trees must have the keys and the chunks of
//! arrays that mkfs.btrfs makes. Refusals leave the devices unchanged, and an interrupted run leaves no filesystem.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use ubtrfs_device::{Access, Device, MemoryDevice};
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::{Profile, superblock::SUPERBLOCK_OFFSETS};
use ubtrfs_mkfs::{MkfsOptions, MkfsReport, detect, make_array, min_size};
use ubtrfs_testkit::array::{ArrayImages, judge_array};
use ubtrfs_testkit::{LoopMount, btrfs_check_array, capability, run};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

const PROFILES: [&str; 7] = ["single", "dup", "raid0", "raid1", "raid1c3", "raid1c4", "raid10"];

fn flag(name: &str) -> BlockGroupFlags {
    Profile::named(name).expect("a profile").flag
}

fn options(data: &str, metadata: &str) -> MkfsOptions {
    MkfsOptions { data_profile: flag(data), metadata_profile: flag(metadata), ..MkfsOptions::default() }
}

fn refs(devices: &[Arc<dyn Device>]) -> Vec<&dyn Device> {
    devices.iter().map(|device| &**device).collect()
}

fn make(images: &ArrayImages, options: &MkfsOptions) -> MkfsReport {
    let devices = images.devices(Access::ReadWrite).unwrap();
    make_array(&refs(&devices), options).unwrap_or_else(|error| panic!("{options:?}: {error}"))
}

fn in_memory(sizes: &[u64]) -> Vec<Arc<dyn Device>> {
    sizes.iter().map(|&size| Arc::new(MemoryDevice::new(size)) as Arc<dyn Device>).collect()
}

/// Sizes of the devices, in MiB, and the profiles of data and metadata.
fn matrix() -> Vec<(Vec<u64>, &'static str, &'static str)> {
    let mut cases = Vec::new();
    for (index, profile) in PROFILES.into_iter().enumerate() {
        for nr_devices in 2..=5 {
            let needed = usize::from(Profile::named(profile).unwrap().devs_min);
            if nr_devices < needed {
                continue;
            }
            cases.push((vec![1024; nr_devices], profile, profile));
            if nr_devices % 2 == 0 {
                continue;
            }
            let unequal: Vec<u64> = (0..nr_devices as u64).map(|n| 300 + (n * 5 + index as u64) % 4 * 350).collect();
            let metadata = if nr_devices > 3 { "raid1c4" } else { "raid1" };
            cases.push((unequal, profile, metadata));
        }
    }
    cases.push((vec![1024, 2048, 200, 200], "raid10", "raid1c3"));
    cases.push((vec![1024, 2048, 130], "raid0", "raid1"));
    cases.push((vec![150; 4], "raid10", "raid10"));
    cases.push((vec![30 << 10, 30 << 10], "raid0", "raid1"));
    cases.push((vec![200 << 10, 300 << 10, 200 << 10], "raid0", "raid10"));
    cases.push((vec![200; 20], "raid0", "raid0"));
    cases.push((vec![1024], "raid0", "raid0"));
    cases
}

/// The lines of a dump that describe chunks and devices, and the keys of each tree, without addresses of tree blocks.
fn facts(images: &ArrayImages, is_old: bool) -> BTreeMap<String, Vec<String>> {
    let paths: Vec<&str> = images.paths().iter().filter_map(|path| path.to_str()).collect();
    let text = run("btrfs", [&["inspect-internal", "dump-tree"], &paths[..]].concat()).expect("dump-tree");
    let mut facts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut owner = String::new();
    for line in text.lines().map(str::trim) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if matches!(words.first(), Some(&"leaf" | &"node")) && words.contains(&"owner") {
            owner = words[words.len() - 1].to_owned();
        }
        let of_tree = facts.entry(owner.clone()).or_default();
        let is_chunk = ["length ", "num_stripes ", "stripe ", "devid "].iter().any(|start| line.starts_with(start));
        if is_chunk && matches!(owner.as_str(), "CHUNK_TREE") {
            // mkfs.btrfs leaves the first system chunk without sub-stripes.
            of_tree.push(line.replace("sub_stripes 0", "sub_stripes 1"));
        }
        if !line.starts_with("item ") {
            continue;
        }
        let Some((key, _)) = line.split_once(" key (").and_then(|(_, rest)| rest.split_once(')')) else { continue };
        let mut parts: Vec<&str> = key.split(' ').collect();
        match parts[1] {
            "METADATA_ITEM" | "UUID_KEY_SUBVOL" => (parts[0], parts[2]) = ("*", "*"),
            "FREE_SPACE_EXTENT" => continue,
            // mkfs.btrfs leaves the entries of temporary block groups behind.
            "FREE_SPACE_INFO" if is_old => {
                let chunk = format!("FIRST_CHUNK_TREE CHUNK_ITEM {}", parts[0]);
                if !facts["CHUNK_TREE"].contains(&chunk) {
                    continue;
                }
            }
            _ => {}
        }
        facts.get_mut(&owner).expect("a leaf precedes its items").push(parts.join(" "));
    }
    facts.values_mut().for_each(|lines| lines.sort());
    facts
}

/// Fields of the superblock that do not differ between two equal filesystems.
fn super_fields(images: &ArrayImages) -> Vec<Vec<String>> {
    let wanted = [
        "num_devices",
        "incompat_flags",
        "total_bytes",
        "bytes_used",
        "sys_array_size",
        "dev_item.devid",
        "dev_item.total_bytes",
        "dev_item.bytes_used",
    ];
    let fields = |path: &std::path::PathBuf| {
        let text = run("btrfs", ["inspect-internal", "dump-super", path.to_str().unwrap()]).expect("dump-super");
        let is_wanted = |line: &&str| line.split_whitespace().next().is_some_and(|name| wanted.contains(&name));
        text.lines().filter(is_wanted).map(str::to_owned).collect()
    };
    images.paths().iter().map(fields).collect()
}

#[test]
fn arrays_have_the_chunks_and_keys_of_mkfs_btrfs() {
    if !capability::program("mkfs.btrfs") {
        return;
    }
    let mut nr_compared = 0;
    for (sizes, data, metadata) in matrix() {
        eprintln!("{sizes:?} {data} {metadata}");
        let sizes: Vec<u64> = sizes.iter().map(|size| size * MIB).collect();
        // mkfs.btrfs needs larger devices.
        let Ok(theirs) = ArrayImages::kernel_made(&sizes, &["-d", data, "-m", metadata]) else { continue };
        nr_compared += 1;
        let ours = ArrayImages::empty(&sizes).unwrap();
        make(&ours, &options(data, metadata));
        assert_eq!(facts(&ours, false), facts(&theirs, true));
        assert_eq!(super_fields(&ours), super_fields(&theirs));
    }
    assert!(nr_compared > 30, "{nr_compared}");
}

#[test]
fn the_default_profiles_are_those_of_mkfs_btrfs() {
    if !capability::program("mkfs.btrfs") {
        return;
    }
    for (args, options) in [
        (vec![], MkfsOptions::default()),
        (vec!["--mixed"], MkfsOptions { mixed: true, nodesize: 4096, ..MkfsOptions::default() }),
    ] {
        let theirs = ArrayImages::kernel_made(&[GIB, GIB, GIB], &args).unwrap();
        let ours = ArrayImages::empty(&[GIB, GIB, GIB]).unwrap();
        make(&ours, &options.with_array_profiles());
        assert_eq!(facts(&ours, false), facts(&theirs, true), "{args:?}");
    }
}

#[test]
fn linux_checks_mounts_writes_and_scrubs_every_profile() {
    if !capability::kernel_oracle() {
        return;
    }
    let content: Vec<u8> = (0..3_000_000u32).map(|n| (n / 7) as u8).collect();
    for (sizes, data, metadata) in matrix() {
        eprintln!("{sizes:?} {data} {metadata}");
        let sizes: Vec<u64> = sizes.iter().map(|size| size * MIB).collect();
        let images = ArrayImages::empty(&sizes).unwrap();
        make(&images, &options(data, metadata));
        btrfs_check_array(images.paths()).unwrap();
        let mount = LoopMount::array(images.paths(), "").unwrap();
        for n in 0..5 {
            std::fs::write(mount.join(format!("file{n}")), &content).expect("write");
        }
        run("sync", ["-f", mount.path().to_str().unwrap()]).expect("sync");
        let usage = run("btrfs", ["filesystem", "usage", "-b", mount.path().to_str().unwrap()]).expect("usage");
        let name = Profile::named(data).unwrap().name;
        assert!(usage.contains(&format!("Data,{name}:")), "{usage}");
        mount.close().unwrap();
        judge_array(images.paths(), "", &[]).unwrap();
    }
}

#[test]
fn the_smallest_arrays_are_complete_filesystems() {
    let linux = capability::kernel_oracle();
    for (index, profile) in PROFILES.into_iter().enumerate() {
        let options = options(profile, profile);
        let nr_devices = usize::from(Profile::named(profile).unwrap().devs_min).max(2) + index % 2;
        let min = min_size(&options, nr_devices);
        let sizes = vec![min; nr_devices];
        if linux {
            let images = ArrayImages::empty(&sizes).unwrap();
            make(&images, &options);
            let mount = LoopMount::array(images.paths(), "").unwrap();
            std::fs::write(mount.join("file"), vec![3; 100_000]).expect("write");
            mount.close().unwrap();
            judge_array(images.paths(), "", &[]).unwrap();
        }
        let mut smaller = sizes;
        smaller[nr_devices - 1] = min - MIB;
        let devices = in_memory(&smaller);
        if let Err(error) = make_array(&refs(&devices), &options) {
            let text = error.to_string();
            assert!(text.contains("too small"), "{profile}: {text}");
        }
    }
}

#[test]
fn a_refusal_leaves_every_device_unchanged() {
    let refused = |sizes: &[u64], options: &MkfsOptions, reason: &str| {
        let devices = in_memory(sizes);
        for device in &devices {
            device.write_at(0, b"precious").unwrap();
        }
        let error = make_array(&refs(&devices), options).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
        for device in &devices {
            let mut found = vec![0; 1 << 17];
            device.read_at(0, &mut found).unwrap();
            assert!(found.starts_with(b"precious") && found[8..].iter().all(|&byte| byte == 0));
        }
    };
    refused(&[GIB / 4; 2], &options("raid1", "raid1c3"), "RAID1C3 of metadata needs 3 devices, more than the given 2");
    refused(&[GIB / 4; 3], &options("raid5", "raid1"), "RAID5 of data is not supported");
    refused(&[GIB / 4, GIB / 4, 4 * MIB], &options("raid1", "raid1"), "device 3 is too small");
    refused(&[20 * MIB, 17 * MIB], &options("raid1", "dup"), "the devices are too small: on 2 devices of one size");
    let too_large = MkfsOptions { size_bytes: Some(GIB), ..options("raid1", "raid1") };
    refused(&[GIB, GIB / 4], &too_large, "less than the requested");

    let devices = in_memory(&[GIB / 4, GIB / 4]);
    make_array(&refs(&devices[1..]), &MkfsOptions::default()).unwrap();
    let error = make_array(&refs(&devices), &options("raid1", "raid1")).unwrap_err().to_string();
    assert!(error.contains("contains a btrfs filesystem"), "{error}");
    assert_eq!(detect(&*devices[0]).unwrap(), None);
}

/// A device that refuses requests after a number of writes that all devices share.
#[derive(Debug)]
struct Countdown {
    device: Arc<dyn Device>,
    left: Arc<AtomicI64>,
}

impl Device for Countdown {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.device.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        match self.left.fetch_sub(1, Ordering::Relaxed) > 0 {
            true => self.device.write_at(offset, buf),
            false => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
    fn flush(&self) -> io::Result<()> {
        self.device.flush()
    }
    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }
    fn describe(&self) -> String {
        self.device.describe()
    }
    fn is_read_only(&self) -> bool {
        false
    }
}

#[test]
fn an_interrupted_run_leaves_no_filesystem_on_the_first_device() {
    let options = options("raid1", "raid1");
    let mut nr_writes = 0;
    loop {
        let devices = in_memory(&[GIB / 4, GIB / 4]);
        make_array(&refs(&devices), &options).unwrap();
        let left = Arc::new(AtomicI64::new(nr_writes));
        let failing: Vec<Arc<dyn Device>> = devices
            .iter()
            .map(|device| Arc::new(Countdown { device: device.clone(), left: left.clone() }) as Arc<dyn Device>)
            .collect();
        let again = MkfsOptions { force: true, ..options.clone() };
        if make_array(&refs(&failing), &again).is_ok() {
            break;
        }
        let has_super = |device: &Arc<dyn Device>| {
            let mut magic = [0; 8];
            device.read_at(SUPERBLOCK_OFFSETS[0] + 64, &mut magic).unwrap();
            magic == *b"_BHRfS_M"
        };
        // The old filesystem loses its members in order. The new one gets them in reverse order.
        let found = [has_super(&devices[0]), has_super(&devices[1])];
        assert!(nr_writes < 2 || found != [true, true], "after {nr_writes} writes: {found:?}");
        nr_writes += 1;
    }
    assert!(nr_writes > 20, "{nr_writes}");
}
