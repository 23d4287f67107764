//! Tests the checker on filesystems of several devices. Method: arrays that Linux wrote in every profile are clean. The
//! damage on one device is found on that device, as much of it as Linux's scrub finds. Missing, stale, foreign and
//! swapped devices are named, and so are chunks that break their profile's promise.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ubtrfs_check::{CheckLimits, Code, Options, Problem, Report};
use ubtrfs_device::{Access, Device, MemoryDevice};
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use ubtrfs_format::{CsumType, Profile, RootId};
use ubtrfs_mkfs::{MkfsOptions, make_array};
use ubtrfs_testkit::array::ArrayImages;
use ubtrfs_testkit::{LoopMount, Rng, btrfs_check_array, capability, run};

const MIB: u64 = 1 << 20;

fn check(devices: Vec<Arc<dyn Device>>) -> (Report, Vec<Problem>) {
    let mut problems = Vec::new();
    let options = Options { data_csums: true, limits: CheckLimits { per_code: u64::MAX } };
    let report = ubtrfs_check::check(devices, options, &(), &mut |problem| problems.push(problem)).unwrap();
    problems.retain(|problem: &Problem| problem.code != Code::FreeSpaceStale);
    (report, problems)
}

fn codes(problems: &[Problem]) -> BTreeSet<Code> {
    problems.iter().map(|problem| problem.code).collect()
}

fn shown(problems: &[Problem]) -> String {
    problems.iter().map(|problem| format!("{problem}\n")).collect()
}

/// All profiles, each with a number of devices.
fn profiles() -> impl Iterator<Item = (&'static Profile, usize)> {
    Profile::ALL.iter().map(|profile| {
        let more = if profile.is_striped() { 2 } else { 1 };
        (profile, usize::from(profile.devs_min).max(2) + more)
    })
}

/// An array that Linux made and wrote, with data and metadata of this profile.
fn written_by_linux(profile: &Profile, nr_devices: usize) -> ArrayImages {
    let name = profile.name.to_lowercase();
    let images = ArrayImages::kernel_made(&vec![400 * MIB; nr_devices], &["-d", &name, "-m", &name]).unwrap();
    let mount = LoopMount::array(images.paths(), "").unwrap();
    let mut rng = Rng::new(profile.flag.bits());
    for dir in 0..4 {
        std::fs::create_dir(mount.join(format!("dir{dir}"))).unwrap();
        for file in 0..40 {
            let len = 50_000 + rng.index(200_000);
            let mut file = std::fs::File::create(mount.join(format!("dir{dir}/file{file}"))).unwrap();
            file.write_all(&rng.bytes(len)).unwrap();
        }
    }
    mount.close().unwrap();
    images
}

/// Number of bad sectors of data that Linux's scrub counts.
fn csum_errors_of_scrub(images: &ArrayImages) -> u64 {
    let mount = LoopMount::array(images.paths(), "ro").unwrap();
    // A scrub that finds errors fails, and its error contains its output.
    let args = ["scrub", "start", "-BRr", mount.path().to_str().unwrap()];
    let text = run("btrfs", args).unwrap_or_else(|error| format!("{error:#}"));
    let of = |line: &str| line.trim().strip_prefix("csum_errors: ")?.parse::<u64>().ok();
    text.lines().find_map(of).expect(&text)
}

#[test]
fn arrays_of_linux_are_clean_and_their_damage_is_found_as_scrub_finds_it() {
    if !capability::kernel_oracle() {
        return;
    }
    for (profile, nr_devices) in profiles() {
        let name = profile.name;
        let images = written_by_linux(profile, nr_devices);
        let (report, problems) = check(images.devices(Access::ReadOnly).unwrap());
        assert!(report.is_clean() && problems.is_empty(), "{name}: {}", shown(&problems));
        assert!(report.stats.data_bytes_verified > 10 * MIB, "{name}: {:?}", report.stats);
        btrfs_check_array(images.paths()).unwrap();
        // The parity of a bad element is not checked here, and Linux counts its sectors differently.
        if profile.has_parity() {
            continue;
        }
        // Not every device has used space of data.
        let damaged = (0..nr_devices).rev().find_map(|victim| {
            add_noise_to_data(&images, victim);
            let (_, problems) = check(images.devices(Access::ReadOnly).unwrap());
            (!problems.is_empty()).then_some((victim, problems))
        });
        let (victim, problems) = damaged.expect(name);
        let on_victim = format!("on device {}:", victim + 1);
        assert_eq!(codes(&problems), BTreeSet::from([Code::DataCsum]), "{name}: {}", shown(&problems));
        assert!(problems.iter().all(|problem| problem.text.contains(&on_victim)), "{}", shown(&problems));
        let bad_bytes = |problem: &Problem| -> u64 {
            problem.text.strip_prefix("data of ").unwrap().split(' ').next().unwrap().parse().unwrap()
        };
        let found: u64 = problems.iter().map(|problem| bad_bytes(problem) / 4096).sum();
        assert_eq!(found, csum_errors_of_scrub(&images), "{name}");
    }
}

/// Overwrites places on a device that have data or are free. Linux does not mount without its trees.
fn add_noise_to_data(images: &ArrayImages, victim: usize) {
    let mut rng = Rng::new(7);
    let file = std::fs::File::options().write(true).open(&images.paths()[victim]).unwrap();
    let is_super = |at: &u64| SUPERBLOCK_OFFSETS.iter().any(|offset| offset / MIB == at / MIB);
    for at in data_areas(images, victim).into_iter().filter(|at| !is_super(at)) {
        file.write_all_at(&rng.bytes(1 << 16), at).unwrap();
    }
}

/// Some places on a device with stripes of data, spread over them.
fn data_areas(images: &ArrayImages, index: usize) -> Vec<u64> {
    let paths: Vec<&str> = images.paths().iter().filter_map(|path| path.to_str()).collect();
    let text = run("btrfs", [&["inspect-internal", "dump-tree", "-t", "chunk"], &paths[..]].concat()).unwrap();
    let mut is_data = false;
    let mut areas = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some((_, kind)) = line.split_once(" type ").filter(|_| line.starts_with("length ")) {
            is_data = kind.starts_with("DATA");
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        if let ["stripe", _, "devid", devid, "offset", offset] = words[..]
            && is_data
            && devid == (index + 1).to_string()
        {
            let offset: u64 = offset.parse().unwrap();
            areas.extend((0..60).map(|n| offset + n * MIB));
        }
    }
    areas
}

fn in_memory(data: &str, metadata: &str, nr_devices: usize) -> Vec<Arc<MemoryDevice>> {
    let devices: Vec<Arc<MemoryDevice>> = (0..nr_devices).map(|_| Arc::new(MemoryDevice::new(300 * MIB))).collect();
    let refs: Vec<&dyn Device> = devices.iter().map(|device| &**device as &dyn Device).collect();
    let flag = |name| Profile::named(name).unwrap().flag;
    let options = MkfsOptions { data_profile: flag(data), metadata_profile: flag(metadata), ..MkfsOptions::default() };
    make_array(&refs, &options).unwrap();
    devices
}

fn given(devices: &[Arc<MemoryDevice>], indexes: &[usize]) -> Vec<Arc<dyn Device>> {
    indexes.iter().map(|&index| devices[index].clone() as Arc<dyn Device>).collect()
}

fn superblock(device: &MemoryDevice) -> Superblock {
    let mut raw = vec![0; SUPERBLOCK_SIZE];
    device.read_at(SUPERBLOCK_OFFSETS[0], &mut raw).unwrap();
    Superblock::decode(&raw).unwrap()
}

fn put_superblock(device: &MemoryDevice, change: impl Fn(&mut Superblock)) {
    let superblock = superblock(device);
    for bytenr in [SUPERBLOCK_OFFSETS[0], SUPERBLOCK_OFFSETS[1]] {
        let mut changed = Superblock { bytenr, ..superblock.clone() };
        change(&mut changed);
        device.write_at(bytenr, &changed.encode_with_csum()).unwrap();
    }
}

#[test]
fn missing_devices_are_named_and_all_other_copies_are_checked() {
    for profile in ["raid1", "raid10", "raid1c3", "raid1c4"] {
        let devices = in_memory(profile, profile, 4);
        let (report, problems) = check(given(&devices, &[3, 0, 1, 2]));
        assert!(report.is_clean() && problems.is_empty(), "{}", shown(&problems));
        let (report, problems) = check(given(&devices, &[0, 1, 2]));
        assert!(report.is_clean(), "{profile}: every chunk has copies on the others");
        let [problem] = &problems[..] else { panic!("{profile}: {}", shown(&problems)) };
        assert_eq!(problem.code, Code::DeviceMissing);
        let uuid = superblock(&devices[3]).dev_item.uuid;
        assert!(problem.text.starts_with(&format!("device 4 (uuid {uuid}) was not given")), "{}", problem.text);
    }
    // Two lost mirrors of RAID1C3 are tolerated, two of RAID1 are not.
    let devices = in_memory("raid1c3", "raid1c3", 3);
    assert_eq!(codes(&check(given(&devices, &[1])).1), BTreeSet::from([Code::DeviceMissing]));
    let devices = in_memory("raid0", "raid0", 2);
    let (report, problems) = check(given(&devices, &[0]));
    assert!(codes(&problems).is_superset(&BTreeSet::from([Code::BlockRead, Code::ChunkLost])), "{}", shown(&problems));
    assert!(!report.is_clean());
    // Data is not read without an option, and is lost all the same.
    let devices = in_memory("raid0", "raid1", 2);
    let (_, problems) = check(given(&devices, &[1]));
    assert!(codes(&problems).contains(&Code::ChunkLost), "{}", shown(&problems));
}

#[test]
fn a_device_that_missed_commits_is_stale() {
    let devices = in_memory("raid1", "raid1", 2);
    put_superblock(&devices[0], |superblock| superblock.generation.0 += 1);
    // One generation of difference is a power cut between two superblocks.
    assert!(!codes(&check(given(&devices, &[0, 1])).1).contains(&Code::DeviceStale));
    put_superblock(&devices[0], |superblock| superblock.generation.0 += 1);
    let (_, problems) = check(given(&devices, &[0, 1]));
    let stale = problems.iter().find(|problem| problem.code == Code::DeviceStale).unwrap();
    assert!(stale.text.contains("is device 2 of generation 1, the newest device has 3"), "{}", stale.text);
}

#[test]
fn superblocks_of_one_generation_that_disagree_are_reported() {
    let devices = in_memory("raid1", "raid1", 2);
    put_superblock(&devices[1], |superblock| superblock.root.0 += 1 << 16);
    let (_, problems) = check(given(&devices, &[0, 1]));
    assert!(problems.iter().any(|problem| problem.code == Code::SuperFields && problem.text.contains("in root")));
    let devices = in_memory("raid1", "raid1", 2);
    put_superblock(&devices[1], |superblock| superblock.dev_item.bytes_used += 1 << 16);
    let (_, problems) = check(given(&devices, &[0, 1]));
    assert!(problems.iter().any(|problem| problem.code == Code::Device && problem.text.contains("device 2")));
}

#[test]
fn foreign_and_repeated_devices_are_refused() {
    let refused = |devices: Vec<Arc<dyn Device>>| {
        ubtrfs_check::check(devices, Options::default(), &(), &mut |_| {}).unwrap_err().to_string()
    };
    let (ours, others) = (in_memory("raid1", "raid1", 2), in_memory("raid1", "raid1", 2));
    let error = refused(vec![ours[0].clone(), others[1].clone()]);
    assert!(error.contains("belongs to filesystem"), "{error}");
    let error = refused(given(&ours, &[0, 0]));
    assert!(error.contains("are both device 1"), "{error}");
    // A device without a superblock counts as missing if another one has it.
    let empty: Arc<dyn Device> = Arc::new(MemoryDevice::new(300 * MIB));
    let (_, problems) = check(vec![ours[0].clone(), empty.clone()]);
    assert_eq!(codes(&problems), BTreeSet::from([Code::Device, Code::DeviceMissing]), "{}", shown(&problems));
    assert!(refused(vec![empty]).contains("is not a btrfs filesystem"));
}

#[test]
fn a_replaced_device_counts_as_missing() {
    let devices = in_memory("raid1", "raid1", 2);
    put_superblock(&devices[1], |superblock| superblock.dev_item.uuid = uuid::Uuid::from_u128(7));
    let (_, problems) = check(given(&devices, &[0, 1]));
    assert!(problems.iter().any(|problem| problem.text.contains("the given device 2 is not the filesystem's")));
    assert!(codes(&problems).contains(&Code::DeviceMissing));
}

/// Changes the chunk tree's leaf in both copies, with a new checksum.
fn change_chunk_leaf(devices: &[Arc<MemoryDevice>], change: impl Fn(&mut [u8])) {
    let mut nr_changed = 0;
    for device in devices {
        for at in (MIB..40 * MIB).step_by(16384) {
            let mut raw = vec![0; 16384];
            device.read_at(at, &mut raw).unwrap();
            let owner = u64::from_le_bytes(raw[88..96].try_into().unwrap());
            let is_block = raw[32..48] == *superblock(device).fsid.as_bytes() && raw[64..72] != *b"_BHRfS_M";
            if is_block && owner == RootId::CHUNK_TREE.0 {
                change(&mut raw);
                let csum = CsumType::Crc32c.compute(&raw[32..]);
                raw[..32].copy_from_slice(&csum);
                device.write_at(at, &raw).unwrap();
                nr_changed += 1;
            }
        }
    }
    assert_eq!(nr_changed, 2);
}

#[test]
fn two_stripes_of_a_mirror_on_one_device_are_reported() {
    let devices = in_memory("raid1", "raid1", 2);
    change_chunk_leaf(&devices, |raw| {
        // The chunk item of data: its flags stand behind length, owner and stripe length, its stripes at byte 48.
        let flags = (BlockGroupFlags::DATA | BlockGroupFlags::RAID1).bits().to_le_bytes();
        let at = (24..raw.len() - 112).find(|&at| raw[at + 24..at + 32] == flags).unwrap();
        let (first, second) = (at + 48, at + 80);
        let uuid: [u8; 16] = raw[first + 16..first + 32].try_into().unwrap();
        raw[second..second + 8].copy_from_slice(&1u64.to_le_bytes());
        raw[second + 16..second + 32].copy_from_slice(&uuid);
    });
    let (_, problems) = check(given(&devices, &[0, 1]));
    let wanted = "2 stripes are on device 1, RAID1 allows 1";
    assert!(
        problems.iter().any(|problem| problem.code == Code::Chunk && problem.text.contains(wanted)),
        "{}",
        shown(&problems)
    );
    assert!(codes(&problems).contains(&Code::DevExtent));
}

#[test]
fn a_bad_copy_of_a_block_is_found_on_every_device() {
    for profile in ["raid1", "raid10", "raid1c3", "raid1c4"] {
        for victim in 0..4 {
            let devices = in_memory(profile, profile, 4);
            let fsid = superblock(&devices[victim]).fsid;
            let mut nr_damaged = 0;
            for at in (MIB..250 * MIB).step_by(16384) {
                let mut head = [0; 72];
                devices[victim].read_at(at, &mut head).unwrap();
                if head[32..48] == *fsid.as_bytes() && head[64..72] != *b"_BHRfS_M" {
                    devices[victim].write_at(at + 5000, b"noise").unwrap();
                    nr_damaged += 1;
                }
            }
            let (report, problems) = check(given(&devices, &[0, 1, 2, 3]));
            assert_eq!(report.is_clean(), nr_damaged == 0, "{profile}");
            let on_victim = format!("on device {}:", victim + 1);
            let copies = problems.iter().filter(|problem| problem.code == Code::BlockCopy);
            assert!(copies.clone().all(|problem| problem.text.contains(&on_victim)), "{}", shown(&problems));
            assert_eq!(copies.count(), nr_damaged, "{profile}: {}", shown(&problems));
        }
    }
}
