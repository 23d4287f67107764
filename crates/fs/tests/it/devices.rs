//! Tests devices that join a filesystem, leave it, or take the place of others, judged by Linux.
//!
//! Method: the engine adds, removes and replaces devices while the filesystem holds files, and each array that results is checked,
//! mounted, compared and scrubbed by Linux.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ubtrfs_device::{Device, FileDevice, MemoryDevice};
use ubtrfs_format::item::{BalanceArgs, BalanceFilters, BalanceFlags, BalanceItem, BlockGroupFlags};
use ubtrfs_format::superblock::Superblock;
use ubtrfs_format::{DevId, Ino, RootId};
use ubtrfs_fs::{Caller, FallocateMode, Fs, InodeId, Job, MountOptions, NewInode, ReplaceReport, ReplaceRequest};
use ubtrfs_mkfs::{MkfsOptions, make_array};
use ubtrfs_testkit::array::{FaultyMember, MemberState};
use ubtrfs_testkit::{Medium, MediumDevice, capability};

use super::arrays::{Array, content, get, open_device, put};

const MIB: u64 = 1 << 20;
const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };

pub(crate) fn devids(fs: &Fs) -> Vec<u64> {
    fs.space_usage().devices.iter().map(|device| device.devid.0).collect()
}

fn allocated(fs: &Fs, devid: u64) -> u64 {
    let usage = fs.space_usage();
    usage.devices.iter().find(|device| device.devid.0 == devid).map_or(0, |device| device.allocated)
}

pub(crate) fn add(fs: &Fs, image: &Path) -> u64 {
    fs.add_device(open_device(image), &Job::new()).unwrap().0
}

fn remove(fs: &Fs, devids: &[u64]) -> ubtrfs_fs::Result<()> {
    fs.remove_devices(&devids.iter().map(|devid| DevId(*devid)).collect::<Vec<_>>(), &Job::new())
}

/// Fills a filesystem with small files and a large one.
pub(crate) fn fill(fs: &Fs, seed: u64) {
    put(fs, &format!("big{seed}"), &content(30 * MIB, seed));
    for n in 0..50 {
        put(fs, &format!("small{seed}-{n}"), &content(4096 * (1 + n % 7), n + seed));
    }
}

pub(crate) fn verify(fs: &Fs, seed: u64) {
    assert!(get(fs, &format!("big{seed}"), 30 * MIB) == content(30 * MIB, seed), "big{seed}");
    for n in 0..50 {
        let len = 4096 * (1 + n % 7);
        assert!(get(fs, &format!("small{seed}-{n}"), len) == content(len, n + seed), "small{seed}-{n}");
    }
}

pub(crate) fn judge(array: &Array, seeds: &[u64]) {
    array.judge(|point| {
        for seed in seeds {
            let name = format!("big{seed}");
            assert!(std::fs::read(point.join(&name)).unwrap() == content(30 * MIB, *seed), "{name}");
            for n in 0..50 {
                let name = format!("small{seed}-{n}");
                assert!(std::fs::read(point.join(&name)).unwrap() == content(4096 * (1 + n % 7), n + seed), "{name}");
            }
        }
    });
}

#[test]
fn a_device_joins_and_another_one_leaves_in_every_profile() {
    if !capability::kernel_oracle() {
        return;
    }
    for (data, metadata, nr_devices) in [
        ("single", "dup", 1),
        ("single", "raid1", 2),
        ("raid0", "raid1", 2),
        ("raid1", "raid1", 2),
        ("raid1c3", "raid1c3", 3),
        ("raid10", "raid10", 4),
        ("raid0", "raid1c4", 4),
    ] {
        eprintln!("{data} {metadata} {nr_devices}");
        let mut array = Array::new(&["-d", data, "-m", metadata], &vec![300; nr_devices]);
        let fs = array.open();
        fill(&fs, 1);
        let image = array.add_image(300);
        let devid = add(&fs, &image);
        assert_eq!(devid, nr_devices as u64 + 1);
        assert_eq!(allocated(&fs, devid), 0);
        fill(&fs, 2);
        fs.close().unwrap();
        drop(fs);
        judge(&array, &[1, 2]);
        let fs = array.open();
        assert_eq!(devids(&fs).len(), nr_devices + 1);
        remove(&fs, &[1]).unwrap();
        assert_eq!(devids(&fs), (2..=devid).collect::<Vec<_>>());
        fill(&fs, 3);
        (1..=3).for_each(|seed| verify(&fs, seed));
        fs.close().unwrap();
        drop(fs);
        let removed = array.images.remove(0);
        judge(&array, &[1, 2, 3]);
        assert!(!is_btrfs(&removed), "its superblocks are wiped");
        // The device returns under the next id, and nothing of its past matters.
        let fs = array.open();
        let again = add(&fs, &removed);
        assert_eq!(again, devid + 1);
        fs.close().unwrap();
        drop(fs);
        array.images.push(removed);
        judge(&array, &[1, 2, 3]);
    }
}

pub(crate) fn is_btrfs(image: &Path) -> bool {
    let device = FileDevice::open(image, ubtrfs_device::Access::ReadOnly).unwrap();
    ubtrfs_format::superblock::SUPERBLOCK_OFFSETS.iter().any(|offset| {
        let mut magic = [0; 8];
        device.read_at(offset + 64, &mut magic).is_ok() && magic == ubtrfs_format::superblock::MAGIC
    })
}

#[test]
fn the_redundancy_of_a_missing_device_is_restored_by_adding_one_and_removing_missing() {
    if !capability::kernel_oracle() {
        return;
    }
    for (profile, nr_devices) in [("raid1", 2), ("raid1c3", 3), ("raid10", 4)] {
        eprintln!("{profile}");
        let mut array = Array::new(&["-d", profile, "-m", profile], &vec![300; nr_devices]);
        let fs = array.open();
        fill(&fs, 1);
        fs.close().unwrap();
        drop(fs);
        let fs = array.open_some(&(1..nr_devices).collect::<Vec<_>>(), "degraded");
        fill(&fs, 2);
        if profile != "raid10" {
            let error = remove(&fs, &[1]).unwrap_err().to_string();
            assert!(error.contains(&format!("needs {nr_devices} devices")), "{error}");
        }
        let image = array.add_image(300);
        add(&fs, &image);
        remove(&fs, &[1]).unwrap();
        (1..=2).for_each(|seed| verify(&fs, seed));
        fs.close().unwrap();
        drop(fs);
        array.images.remove(0);
        judge(&array, &[1, 2]);
        // The filesystem has all its devices, so it needs no option.
        let fs = array.open();
        assert_eq!(fs.read_only(), None);
        fs.close().unwrap();
    }
}

#[test]
fn several_devices_leave_together_and_get_nothing_of_each_other() {
    if !capability::kernel_oracle() {
        return;
    }
    let mut array = Array::new(&["-d", "single", "-m", "raid1"], &[300, 300, 300, 300, 300]);
    let fs = array.open();
    (1..=8).for_each(|seed| fill(&fs, seed));
    fs.sync().unwrap();
    let job = Job::new();
    fs.remove_devices(&[DevId(1), DevId(3), DevId(5)], &job).unwrap();
    assert_eq!(devids(&fs), [2, 4]);
    (1..=8).for_each(|seed| verify(&fs, seed));
    fs.close().unwrap();
    drop(fs);
    for index in [4, 2, 0] {
        array.images.remove(index);
    }
    judge(&array, &[1, 2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn a_removal_that_cannot_succeed_is_refused_before_anything_moves() {
    if !capability::kernel_oracle() {
        return;
    }
    let array = Array::new(&["-d", "single", "-m", "raid1"], &[300, 600]);
    let fs = array.open();
    let error = |devids: &[u64]| remove(&fs, devids).unwrap_err().to_string();
    assert!(error(&[7]).contains("there is no device 7"), "{}", error(&[7]));
    assert!(error(&[1, 2]).contains("last device"), "{}", error(&[1, 2]));
    assert!(error(&[1]).contains("RAID1 needs 2 devices, and only 1 would be left"), "{}", error(&[1]));
    fs.close().unwrap();
    drop(fs);
    let array = Array::new(&["-d", "single", "-m", "single"], &[200, 900]);
    let fs = array.open();
    put(&fs, "big", &content(700 * MIB, 1));
    fs.sync().unwrap();
    let before = (allocated(&fs, 1), allocated(&fs, 2));
    let text = remove(&fs, &[2]).unwrap_err().to_string();
    assert!(text.contains("bytes are missing"), "{text}");
    assert_eq!((allocated(&fs, 1), allocated(&fs, 2)), before, "nothing moved");
    assert!(fs.cancel_removal().is_err(), "none is running");
    let small: Arc<dyn Device> = Arc::new(MemoryDevice::new(16 << 20));
    let text = fs.add_device(small, &Job::new()).unwrap_err().to_string();
    assert!(text.contains("too small"), "{text}");
    assert_eq!(devids(&fs), [1, 2]);
    fs.close().unwrap();
    drop(fs);
    array.judge(|_| ());
}

#[test]
fn a_removal_is_refused_if_the_sizes_of_the_other_devices_do_not_fit_the_profile() {
    if !capability::kernel_oracle() {
        return;
    }
    // Without device 3, raid1 pairs the 300 MiB of device 1 with as much of device 2; the rest of it has no partner.
    let array = Array::new(&["-d", "raid1", "-m", "raid1"], &[300, 1200, 1200]);
    let fs = array.open();
    put(&fs, "big", &content(400 * MIB, 1));
    fs.sync().unwrap();
    let before: Vec<u64> = (1..=3).map(|devid| allocated(&fs, devid)).collect();
    let text = remove(&fs, &[3]).unwrap_err().to_string();
    assert!(text.contains("bytes as RAID1") && text.contains("bytes are missing"), "{text}");
    assert_eq!((1..=3).map(|devid| allocated(&fs, devid)).collect::<Vec<_>>(), before, "nothing moved");
    remove(&fs, &[1]).unwrap();
    fs.close().unwrap();
    drop(fs);
    let mut array = array;
    array.images.remove(0);
    array.judge(|_| ());
}

#[test]
fn a_removal_beside_writers_loses_nothing_and_can_be_cancelled() {
    if !capability::kernel_oracle() {
        return;
    }
    let mut array = Array::new(&["-d", "raid1", "-m", "raid1"], &[500, 500, 500]);
    let fs = array.open();
    (1..=3).for_each(|seed| fill(&fs, seed));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for lane in 0..2 {
            let (fs, stop) = (&fs, &stop);
            scope.spawn(move || {
                for round in 0.. {
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                    let name = format!("lane{lane}-{}", round % 20);
                    let _ = fs.unlink(TOP, name.as_bytes());
                    put(fs, &name, &content(256 << 10, round));
                }
            });
        }
        let removal = scope.spawn(|| remove(&fs, &[2]));
        while fs.cancel_removal().is_err() && !removal.is_finished() {
            std::thread::yield_now();
        }
        match removal.join().unwrap() {
            Ok(()) => assert_eq!(devids(&fs), [1, 3]),
            Err(error) => {
                assert!(error.to_string().contains("cancelled"), "{error}");
                assert_eq!(devids(&fs), [1, 2, 3]);
                remove(&fs, &[2]).unwrap();
            }
        }
        stop.store(true, Ordering::SeqCst);
    });
    (1..=3).for_each(|seed| verify(&fs, seed));
    fs.close().unwrap();
    drop(fs);
    array.images.remove(1);
    judge(&array, &[1, 2, 3]);
}

fn replace(fs: &Fs, devid: u64, image: &Path, avoids_source: bool) -> ubtrfs_fs::Result<ReplaceReport> {
    let request = ReplaceRequest { devid: DevId(devid), device: open_device(image), avoids_source };
    fs.replace_device(&request, &Job::new())
}

#[test]
fn a_device_takes_the_place_of_another_one_in_every_profile() {
    if !capability::kernel_oracle() {
        return;
    }
    for (data, metadata, nr_devices) in [
        ("single", "dup", 1),
        ("single", "raid1", 2),
        ("raid0", "raid1", 2),
        ("raid1", "raid1", 2),
        ("raid1c3", "raid1c3", 3),
        ("raid10", "raid10", 4),
    ] {
        for avoids_source in [false, true] {
            eprintln!("{data} {metadata} {nr_devices} {avoids_source}");
            let mut array = Array::new(&["-d", data, "-m", metadata], &vec![500; nr_devices]);
            let fs = array.open();
            fill(&fs, 1);
            let image = array.add_image(510);
            let report = replace(&fs, 1, &image, avoids_source).unwrap();
            assert!(report.files.is_empty() && report.lost_block_bytes == 0, "{report:?}");
            assert_eq!(devids(&fs), (1..=nr_devices as u64).collect::<Vec<_>>());
            assert!(fs.last_replacement().unwrap().unwrap().replace_state == 2 && fs.replace_status().is_none());
            verify(&fs, 1);
            fill(&fs, 2);
            fs.close().unwrap();
            drop(fs);
            let old = array.images.remove(0);
            assert!(!is_btrfs(&old), "its superblocks are wiped");
            judge(&array, &[1, 2]);
            let fs = array.open();
            fill(&fs, 3);
            (1..=3).for_each(|seed| verify(&fs, seed));
            fs.close().unwrap();
            drop(fs);
            judge(&array, &[1, 2, 3]);
        }
    }
}

#[test]
fn a_missing_device_is_replaced_from_the_others() {
    if !capability::kernel_oracle() {
        return;
    }
    for (profile, nr_devices) in [("raid1", 2), ("raid1c3", 3), ("raid10", 4)] {
        eprintln!("{profile}");
        let mut array = Array::new(&["-d", profile, "-m", profile], &vec![300; nr_devices]);
        let fs = array.open();
        fill(&fs, 1);
        let unverified = preallocated(&fs);
        fs.close().unwrap();
        drop(fs);
        let fs = array.open_some(&(1..nr_devices).collect::<Vec<_>>(), "degraded");
        fill(&fs, 2);
        let image = array.add_image(300);
        let report = replace(&fs, 1, &image, false).unwrap();
        assert!(report.files.is_empty() && report.lost_block_bytes == 0, "{report:?}");
        (1..=2).for_each(|seed| verify(&fs, seed));
        fs.close().unwrap();
        drop(fs);
        array.images.remove(0);
        judge(&array, &[1, 2]);
        // The new device alone has a copy of everything.
        let others: Vec<usize> = (0..nr_devices).filter(|index| *index != 0).collect();
        let fs = array.open_some(&others, "degraded");
        assert_eq!(fs.read_only(), None);
        (1..=2).for_each(|seed| verify(&fs, seed));
        assert!(fs.read(unverified, 0, 4 << 20).unwrap() == content(4 * MIB, 77));
        fs.close().unwrap();
    }
}

/// Writes a file without checksums.
fn preallocated(fs: &Fs) -> InodeId {
    let id = fs.create(TOP, b"plain", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    // FS_NOCOW_FL
    fs.set_inode_flags(id, 0x0080_0000, &Caller::ROOT).unwrap();
    fs.fallocate(id, 0, 4 * MIB, FallocateMode::default()).unwrap();
    fs.write(id, 0, &content(4 * MIB, 77)).unwrap();
    fs.sync().unwrap();
    id
}

#[test]
fn bad_blocks_of_a_replaced_device_come_from_others_or_are_told_by_file() {
    if !capability::kernel_oracle() {
        return;
    }
    for data in ["raid1", "single"] {
        let mut array = Array::new(&["-d", data, "-m", "raid1"], &[300, 300]);
        let fs = array.open();
        fill(&fs, 1);
        fs.sync().unwrap();
        let id = fs.lookup(TOP, b"big1").unwrap().id;
        fs.close().unwrap();
        drop(fs);
        let wanted = &content(30 * MIB, 1)[8 << 20..][..8192];
        let place = |image: &PathBuf| {
            let raw = std::fs::read(image).unwrap();
            (0..raw.len() - 8192).step_by(4096).find(|at| raw[*at..].starts_with(wanted))
        };
        let found: Vec<Option<usize>> = array.images.iter().map(place).collect();
        let index = found.iter().position(Option::is_some).unwrap();
        let device = open_device(&array.images[index]);
        device.write_at(found[index].unwrap() as u64, &[0xa5; 8192]).unwrap();
        drop(device);
        let fs = array.open();
        let image = array.add_image(300);
        let report = replace(&fs, index as u64 + 1, &image, false).unwrap();
        let names: Vec<_> = report.files.iter().map(|(_, path, damage)| (path.clone(), damage.lost_bytes)).collect();
        match data {
            "raid1" => {
                assert!(names.is_empty() && report.counts.corrected_errors == 2, "{report:?}");
                verify(&fs, 1);
            }
            _ => {
                assert_eq!(names, [(Some(b"big1".to_vec()), 8192)]);
                assert_eq!(fs.last_replacement().unwrap().unwrap().num_uncorrectable_read_errors, 2);
                assert!(fs.read(id, 0, 1 << 20).is_ok(), "the rest is there");
            }
        }
        fs.close().unwrap();
        drop(fs);
        array.images.swap_remove(index);
        let fs = array.open();
        fs.close().unwrap();
    }
}

#[test]
fn a_replacement_beside_writers_misses_no_write_and_can_be_cancelled() {
    if !capability::kernel_oracle() {
        return;
    }
    let mut array = Array::new(&["-d", "raid1", "-m", "raid1"], &[400, 400]);
    let fs = array.open();
    (1..=3).for_each(|seed| fill(&fs, seed));
    let plain = preallocated(&fs);
    let image = array.add_image(400);
    let stop = AtomicBool::new(false);
    let last = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut last = 77;
            for round in 100.. {
                if stop.load(Ordering::SeqCst) {
                    return last;
                }
                // In place, without checksums, and anew, with them.
                fs.write(plain, 0, &content(4 * MIB, round)).unwrap();
                last = round;
                let name = format!("lane-{}", round % 20);
                let _ = fs.unlink(TOP, name.as_bytes());
                put(&fs, &name, &content(256 << 10, round));
                if round % 5 == 0 {
                    fs.sync().unwrap();
                }
            }
            last
        });
        let cancelled = scope.spawn(|| replace(&fs, 1, &image, false));
        while fs.cancel_replace().is_err() && !cancelled.is_finished() {
            std::thread::yield_now();
        }
        if let Err(error) = cancelled.join().unwrap() {
            assert!(error.to_string().contains("cancelled"), "{error}");
            // It is noted, unless it had not begun.
            assert!(fs.last_replacement().unwrap().is_none_or(|last| last.replace_state == 3));
            replace(&fs, 1, &image, false).unwrap();
        }
        stop.store(true, Ordering::SeqCst);
        writer.join().unwrap()
    });
    fs.close().unwrap();
    drop(fs);
    array.images.remove(0);
    judge(&array, &[1, 2, 3]);
    // Each device alone has the last write.
    for index in [0, 1] {
        let fs = array.open_some(&[index], "ro,degraded");
        assert!(fs.read(plain, 0, 4 << 20).unwrap() == content(4 * MIB, last), "device {index}");
        (1..=3).for_each(|seed| verify(&fs, seed));
        fs.close().unwrap();
    }
}

/// Data is written before its items are put, which may happen behind the walk.
#[test]
fn data_that_is_being_written_when_a_replacement_begins_is_copied() {
    if !capability::kernel_oracle() {
        return;
    }
    for round in 0..8 {
        let mut array = Array::new(&["-d", "single", "-m", "single"], &[600]);
        let fs = array.open();
        put(&fs, "first", &content(20 * MIB, 1));
        let image = array.add_image(600);
        std::thread::scope(|scope| {
            for lane in 0..6 {
                let fs = &fs;
                scope.spawn(move || {
                    let id = fs.create(TOP, format!("lane{lane}").as_bytes(), NewInode::file(0o644), &Caller::ROOT);
                    let (id, data) = (id.unwrap().id, content(30 * MIB, lane));
                    for (number, piece) in (0..).zip(data.chunks(256 << 10)) {
                        fs.write(id, number * (256 << 10), piece).unwrap();
                    }
                });
            }
            std::thread::sleep(std::time::Duration::from_millis(5 * round));
            replace(&fs, 1, &image, false).unwrap();
        });
        fs.close().unwrap();
        drop(fs);
        array.images.remove(0);
        let fs = array.open();
        assert!(get(&fs, "first", 20 * MIB) == content(20 * MIB, 1));
        for lane in 0..6 {
            assert!(get(&fs, &format!("lane{lane}"), 30 * MIB) == content(30 * MIB, lane), "{round}: lane{lane}");
        }
        fs.close().unwrap();
        drop(fs);
        array.judge(|_| ());
    }
}

#[test]
fn a_replaced_device_that_keeps_its_superblock_is_left_out() {
    if !capability::kernel_oracle() {
        return;
    }
    let mut array = Array::new(&["-d", "single", "-m", "single"], &[300, 300]);
    let fs = array.open();
    fill(&fs, 1);
    fs.sync().unwrap();
    let mut superblock = vec![0; 4096];
    let image = array.add_image(299);
    let error = replace(&fs, 1, &image, false).unwrap_err().to_string();
    assert!(error.contains("give a larger device"), "{error}");
    assert!(replace(&fs, 7, &image, false).unwrap_err().to_string().contains("there is no device 7"));
    let image = array.add_image(300);
    // As after a power cut between the commit and the wipe.
    std::fs::File::open(&array.images[0]).unwrap().read_exact_at(&mut superblock, 65536).unwrap();
    replace(&fs, 1, &image, false).unwrap();
    fs.close().unwrap();
    drop(fs);
    open_device(&array.images[0]).write_at(65536, &superblock).unwrap();
    let fs = array.open_some(&[0, 1, 3], "");
    assert_eq!(fs.read_only(), None);
    verify(&fs, 1);
    let paths: Vec<_> = fs.space_usage().devices.iter().map(|device| device.path.clone().unwrap()).collect();
    assert!(paths.iter().all(|path| !path.ends_with("/1.img")), "{paths:?}");
    fs.close().unwrap();
}

#[test]
fn a_superblock_that_counts_too_few_devices_is_corrected() {
    if !capability::kernel_oracle() {
        return;
    }
    let array = Array::new(&["-d", "raid1", "-m", "raid1"], &[300, 300]);
    for image in &array.images {
        let device = open_device(image);
        let mut raw = vec![0; 4096];
        device.read_at(65536, &mut raw).unwrap();
        let mut superblock = Superblock::decode(&raw).unwrap();
        superblock.num_devices = 1;
        device.write_at(65536, &superblock.encode_with_csum()).unwrap();
    }
    let fs = array.open();
    assert_eq!(fs.read_only(), None);
    fill(&fs, 1);
    fs.close().unwrap();
    drop(fs);
    array.judge(|_| ());
    let fs = array.open();
    verify(&fs, 1);
    fs.close().unwrap();
}

#[test]
fn a_device_whose_id_another_one_has_by_now_is_left_out() {
    if !capability::kernel_oracle() {
        return;
    }
    let mut array = Array::new(&["-d", "raid1", "-m", "raid1"], &[300, 300]);
    let fs = array.open();
    fill(&fs, 1);
    fs.close().unwrap();
    drop(fs);
    let fs = array.open_some(&[0], "degraded");
    let image = array.add_image(300);
    assert_eq!(add(&fs, &image), 3);
    remove(&fs, &[2]).unwrap();
    remove(&fs, &[3]).unwrap_err();
    let image = array.add_image(300);
    assert_eq!(add(&fs, &image), 4);
    remove(&fs, &[3, 4]).unwrap_err();
    remove(&fs, &[3]).unwrap();
    fill(&fs, 2);
    fs.close().unwrap();
    drop(fs);
    // Device 2 returns, which was removed while it was missing.
    let fs = array.open_some(&[0, 1, 3], "");
    assert_eq!((fs.read_only(), devids(&fs)), (None, vec![1, 4]));
    (1..=2).for_each(|seed| verify(&fs, seed));
    remove(&fs, &[4]).unwrap_err();
    fs.close().unwrap();
    drop(fs);
    array.images = vec![array.images[0].clone(), array.images[3].clone()];
    judge(&array, &[1, 2]);
}

#[test]
fn a_conversion_that_cannot_fit_is_refused_before_anything_moves() {
    if !capability::kernel_oracle() {
        return;
    }
    let array = Array::new(&["-d", "single", "-m", "raid1"], &[300, 300]);
    let fs = array.open();
    put(&fs, "big", &content(350 * MIB, 1));
    fs.sync().unwrap();
    let before = (allocated(&fs, 1), allocated(&fs, 2));
    let args = BalanceArgs {
        flags: BalanceFilters::CONVERT.bits(),
        target: BlockGroupFlags::RAID1.bits(),
        ..BalanceArgs::NONE
    };
    let flags = BalanceFlags::DATA.bits();
    let item = BalanceItem { flags, data: args.clone(), metadata: args.clone(), system: args, unused: [0; 4] };
    let text = fs.balance(item, &Job::new()).unwrap_err().to_string();
    assert!(text.contains("as RAID1") && text.contains("bytes are missing"), "{text}");
    assert_eq!((allocated(&fs, 1), allocated(&fs, 2)), before);
    fs.close().unwrap();
    drop(fs);
    array.judge(|_| ());
}

/// Devices in memory with a RAID1 that holds a file, of which the first is replaced by a device with this fault. Returns the
/// old devices, the new one, its number of requests, and the result.
fn replaced_by_faulty(plan: Option<(u64, MemberState)>) -> ([Arc<MediumDevice>; 2], Arc<MediumDevice>, u64, bool) {
    let blank = || Arc::new(MediumDevice::new(Medium::zeros(256 * MIB)));
    let old = [blank(), blank()];
    let flag = BlockGroupFlags::RAID1;
    let options = MkfsOptions { data_profile: flag, metadata_profile: flag, ..MkfsOptions::default() };
    make_array(&[old[0].as_ref(), old[1].as_ref()], &options).unwrap();
    let fs = Fs::open(shared(&old), MountOptions::default()).unwrap();
    put(&fs, "big", &content(10 * MIB, 1));
    fs.sync().unwrap();
    let new = blank();
    let faulty = Arc::new(FaultyMember::new(Arc::clone(&new), plan));
    let request = ReplaceRequest { devid: DevId(1), device: faulty.clone(), avoids_source: false };
    let is_done = fs.replace_device(&request, &Job::new()).is_ok();
    let nr_requests = faulty.requests();
    put(&fs, "later", &content(MIB, 2));
    fs.close().unwrap();
    (old, new, nr_requests, is_done)
}

fn shared(devices: &[Arc<MediumDevice>]) -> Vec<Arc<dyn Device>> {
    devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect()
}

/// Whichever request the new device fails: the old one is wiped only if the new one is in its place.
#[test]
fn a_new_device_that_fails_leaves_the_old_one() {
    let (_, _, nr_requests, is_done) = replaced_by_faulty(None);
    assert!(is_done);
    for number in nr_requests.saturating_sub(25)..=nr_requests {
        for fault in [MemberState::Dies, MemberState::Vanishes, MemberState::LosesWrites] {
            let (old, new, _, is_done) = replaced_by_faulty(Some((number, fault)));
            let mut magic = [0; 8];
            old[0].read_at(65536 + 64, &mut magic).unwrap();
            let is_wiped = magic == [0; 8];
            assert!(is_done || !is_wiped, "{number} {fault:?}: the replacement failed, and the old device is wiped");
            // One device of each pair has everything.
            let first = if is_done && fault != MemberState::LosesWrites { &new } else { &old[1] };
            let options = MountOptions::parse("degraded").unwrap();
            let fs = Fs::open(shared(&[Arc::clone(first)]), options).unwrap();
            assert!(get(&fs, "big", 10 * MIB) == content(10 * MIB, 1), "{number} {fault:?}");
            fs.close().unwrap();
        }
    }
}
