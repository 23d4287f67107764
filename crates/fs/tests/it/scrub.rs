//! Tests scrubs: everything bad is repaired or named, once, and nothing else is, also beside writers.
//!
//! Method: the devices are in memory, so the test changes their content behind the engine's back.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ubtrfs_device::Device;
use ubtrfs_error::Error as EngineError;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::superblock::SUPERBLOCK_OFFSETS;
use ubtrfs_format::{DevId, Profile, RootId};
use ubtrfs_fs::{
    Caller, Error, Fs, InodeId, Job, MountOptions, NewInode, ScrubEnd, ScrubReport, ScrubStart, ScrubStatus,
};
use ubtrfs_mkfs::{MkfsOptions, make_array};
use ubtrfs_testkit::array::{FaultyMember, MemberState};
use ubtrfs_testkit::{Medium, MediumDevice, Rng};

const ROOT: Caller = Caller::ROOT;
const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: ubtrfs_format::Ino::ROOT_DIR };
const MIB: u64 = 1 << 20;
const SECTOR: u64 = 4096;

/// Devices in memory with an empty filesystem.
fn array(data: &str, metadata: &str, nr_devices: usize, nodesize: u32) -> Vec<Arc<MediumDevice>> {
    let flag = |name: &str| Profile::named(name).unwrap().flag;
    let devices: Vec<Arc<MediumDevice>> =
        (0..nr_devices).map(|_| Arc::new(MediumDevice::new(Medium::zeros(300 * MIB)))).collect();
    let options =
        MkfsOptions { data_profile: flag(data), metadata_profile: flag(metadata), nodesize, ..MkfsOptions::default() };
    let all: Vec<&dyn Device> = devices.iter().map(|device| device.as_ref() as &dyn Device).collect();
    make_array(&all, &options).unwrap();
    devices
}

fn open(devices: &[Arc<MediumDevice>], options: &str) -> Arc<Fs> {
    let devices = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
    Fs::open(devices, MountOptions::parse(options).unwrap()).unwrap()
}

fn put(fs: &Fs, name: &str, data: &[u8]) {
    let id = fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id;
    fs.write(id, 0, data).unwrap();
}

fn read(fs: &Fs, name: &str, len: usize) -> ubtrfs_fs::Result<Vec<u8>> {
    fs.read(fs.lookup(TOP, name.as_bytes())?.id, 0, len)
}

fn starts(nr_devices: usize) -> Vec<ScrubStart> {
    (1..=nr_devices as u64)
        .map(|devid| ScrubStart { devid: DevId(devid), start: 0, limit: 0, io_priority: None })
        .collect()
}

/// Scrubs all devices, none of which may fail.
fn scrub(fs: &Fs, nr_devices: usize, repair: bool) -> ScrubReport {
    let report = fs.scrub(&starts(nr_devices), repair, &Job::new()).unwrap();
    for device in &report.devices {
        assert!(device.result.is_ok(), "{:?}", device.result);
    }
    report
}

/// Sums of all devices: errors found, repaired, lost.
fn sums(report: &ScrubReport) -> (u64, u64, u64) {
    report.devices.iter().fold((0, 0, 0), |(found, repaired, lost), device| {
        let counts = &device.counts;
        let errors = counts.read_errors + counts.csum_errors + counts.verify_errors;
        (found + errors, repaired + counts.corrected_errors, lost + counts.uncorrectable_errors)
    })
}

fn content(len: usize, seed: u64) -> Vec<u8> {
    Rng::new(seed).bytes(len)
}

#[test]
fn every_bad_block_is_repaired_or_its_file_is_named() {
    let seed = Rng::seed_or(1);
    let profiles = [
        ("single", "dup", 1),
        ("dup", "dup", 1),
        ("single", "raid1", 2),
        ("raid0", "raid1", 3),
        ("raid1", "raid1", 3),
        ("raid1c3", "raid1c3", 3),
        ("raid1c4", "raid1c4", 5),
        ("raid10", "raid10", 4),
        ("raid10", "raid1c3", 5),
    ];
    for (data, metadata, nr_devices) in profiles {
        for nodesize in [4096, 16384, 65536] {
            bad_blocks(data, metadata, nr_devices, nodesize, &mut Rng::new(seed ^ u64::from(nodesize)));
        }
    }
}

fn bad_blocks(data: &str, metadata: &str, nr_devices: usize, nodesize: u32, rng: &mut Rng) {
    let name = format!("{data}, {metadata}, {nr_devices} devices, nodes of {nodesize}");
    let devices = array(data, metadata, nr_devices, nodesize);
    let fs = open(&devices, "");
    let files: Vec<(String, Vec<u8>)> =
        (0..40).map(|number| (format!("file{number}"), content(1 + rng.below(3 * MIB) as usize, number))).collect();
    for (file, content) in &files {
        put(&fs, file, content);
    }
    fs.sync().unwrap();
    assert_eq!(sums(&scrub(&fs, nr_devices, true)), (0, 0, 0), "{name}: nothing is bad yet");
    // One device gets noise in many places. With DUP, both copies lie on it, so a place may be bad twice.
    let victim = rng.index(nr_devices);
    let medium = devices[victim].content();
    let mut nr_bad = 0;
    // A device may have little content.
    for _ in 0..50_000 {
        let at = MIB + rng.below((300 * MIB - 2 * MIB) / SECTOR) * SECTOR;
        let mut before = vec![0; SECTOR as usize];
        medium.read(at, &mut before);
        if SUPERBLOCK_OFFSETS.contains(&at) || before.iter().all(|&byte| byte == 0) {
            continue;
        }
        if nr_bad == 500 {
            break;
        }
        devices[victim].write_at(at, &rng.bytes(SECTOR as usize)).unwrap();
        nr_bad += 1;
    }
    let found = sums(&scrub(&fs, nr_devices, false));
    assert!((found.0 > 0 || nr_bad < 100) && found.1 + found.2 == found.0, "{name}: {found:?}");
    let report = scrub(&fs, nr_devices, true);
    let (errors, repaired, lost) = sums(&report);
    // Reads and commits of the engine repair or free a few tree blocks between the scrubs.
    let few = 8 * u64::from(nodesize) / SECTOR;
    assert!((found.0 - found.0.min(few)..=found.0).contains(&errors), "{name}: {errors} of {found:?}");
    assert_eq!(repaired + lost, errors, "{name}: each error once");
    let tolerates = Profile::named(data).unwrap().tolerated_failures > 0;
    if tolerates {
        assert_eq!(lost, 0, "{name}");
    }
    let counted: u64 = fs.device_stats().iter().map(|(_, stats)| stats.values[3] + stats.values[4]).sum();
    let per_block = u64::from(nodesize) / SECTOR;
    assert!(counted >= (found.0 + errors) / per_block, "{name}: {counted} errors are counted for the devices");
    let (left, repaired, still_lost) = sums(&scrub(&fs, nr_devices, true));
    assert_eq!((left, repaired), (still_lost, 0), "{name}: only lost blocks are left");
    assert!((lost - lost.min(few)..=lost).contains(&still_lost), "{name}: {still_lost} of {lost}");
    fs.close().unwrap();
    drop(fs);
    let given = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
    let fs = match Fs::open(given, MountOptions::default()) {
        Ok(fs) => fs,
        // With DUP, both copies of the root of a tree may be bad.
        Err(Error::Engine(EngineError::Corrupt(_))) if report.blocks.lost_bytes > 0 => return,
        Err(error) => panic!("{name}: {error}"),
    };
    // The files that cannot be read are those that were named.
    let named: BTreeSet<String> = report
        .files
        .iter()
        .filter(|(_, _, damage)| damage.lost_bytes > 0)
        .map(|(_, path, _)| String::from_utf8(path.clone().unwrap()).unwrap())
        .collect();
    for (file, content) in &files {
        match read(&fs, file, content.len()) {
            Ok(found) => {
                assert!(found == *content, "{name}: {file}");
                assert!(!named.contains(file), "{name}: {file} was named without a reason");
            }
            // With DUP, both copies of a tree block may be bad that has the file's name or its extents. The scrub names the
            // block then.
            Err(Error::Engine(error @ EngineError::Corrupt(_)))
                if report.blocks.lost_bytes > 0 && !error.to_string().contains("data sector") => {}
            Err(error) => assert!(named.contains(file), "{name}: {file} is damaged and was not named: {error}"),
        }
    }
    fs.close().unwrap();
}

#[test]
fn nothing_is_found_beside_writers() {
    for (data, metadata, nr_devices) in [("single", "dup", 1), ("raid1", "raid1", 2), ("raid10", "raid10", 4)] {
        let devices = array(data, metadata, nr_devices, 4096);
        let fs = open(&devices, "commit=1");
        ubtrfs_transaction::delay_races(Duration::from_millis(1));
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for writer in 0..3u64 {
                let (fs, is_done) = (&fs, &is_done);
                scope.spawn(move || {
                    let mut rng = Rng::new(writer);
                    while !is_done.load(Ordering::Acquire) {
                        let name = format!("{writer}.{}", rng.below(20));
                        match fs.lookup(TOP, name.as_bytes()) {
                            Ok(_) if rng.one_in(2) => fs.unlink(TOP, name.as_bytes()).unwrap(),
                            Ok(found) => {
                                let (len, offset) = (1 + rng.below(300_000) as usize, rng.below(MIB));
                                fs.write(found.id, offset, &rng.bytes(len)).unwrap();
                            }
                            Err(_) => {
                                let len = 1 + rng.below(200_000) as usize;
                                put(fs, &name, &rng.bytes(len));
                            }
                        }
                        if rng.one_in(10) {
                            fs.sync().unwrap();
                        }
                    }
                });
            }
            let until = std::time::Instant::now() + Duration::from_secs(6);
            let mut nr_scrubs = 0;
            while std::time::Instant::now() < until {
                let report = scrub(&fs, nr_devices, true);
                assert_eq!(sums(&report), (0, 0, 0), "{data}: {:?}", report.devices);
                assert!(report.devices.iter().all(|device| device.counts.super_errors == 0));
                nr_scrubs += 1;
            }
            is_done.store(true, Ordering::Release);
            eprintln!("{data}: {nr_scrubs} scrubs");
        });
        ubtrfs_transaction::delay_races(Duration::ZERO);
        let errors: u64 = fs.device_stats().iter().flat_map(|(_, stats)| stats.values).sum();
        assert_eq!(errors, 0, "{data}");
        fs.close().unwrap();
    }
}

/// The scrub is cancelled again and again. Each error is counted once, also if a cancelled scrub repaired it.
#[test]
fn repairs_before_a_cancellation_are_counted() {
    let devices = array("single", "dup", 1, 16384);
    let fs = open(&devices, "");
    for number in 0..300 {
        put(&fs, &format!("a name that is long enough to fill leaves with few of them, {number:0100}"), b"inline");
    }
    fs.sync().unwrap();
    // The last blocks of the device: second copies.
    let medium = devices[0].content();
    let mut nr_bad = 0;
    for at in (MIB / 16384..300 * MIB / 16384).rev().map(|block| block * 16384) {
        let mut block = vec![0; 16384];
        medium.read(at, &mut block);
        if block.iter().any(|&byte| byte != 0) && !SUPERBLOCK_OFFSETS.contains(&at) && nr_bad < 20 {
            devices[0].write_at(at + 4096, &[0xaa; 4096]).unwrap();
            nr_bad += 1;
        }
    }
    let whole = sums(&scrub(&fs, 1, false));
    let (mut from, mut counted) = (0, (0, 0));
    for round in 1.. {
        let job = Job::new();
        let start = [ScrubStart { devid: DevId(1), start: from, limit: 0, io_priority: None }];
        let report = std::thread::scope(|scope| {
            let cancel = scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(round));
                job.cancel();
            });
            let report = fs.scrub(&start, true, &job).unwrap();
            cancel.join().unwrap();
            report
        });
        let counts = report.devices[0].counts;
        counted = (counted.0 + counts.verify_errors + counts.csum_errors, counted.1 + counts.corrected_errors);
        if !report.devices[0].is_cancelled() {
            break;
        }
        from = counts.last_physical;
    }
    // The engine itself may read and repair a few blocks.
    assert!(counted.0 + 32 >= whole.0 && counted.0 == counted.1, "{counted:?} of {whole:?}");
    assert_eq!(sums(&scrub(&fs, 1, true)).0, 0);
    fs.close().unwrap();
}

#[test]
fn a_damaged_file_without_a_name_is_told_by_its_number() {
    let devices = array("single", "dup", 1, 16384);
    let options = MountOptions { track_lookups: true, ..MountOptions::default() };
    let fs = Fs::open(vec![Arc::clone(&devices[0]) as Arc<dyn Device>], options).unwrap();
    let id = fs.tmpfile(TOP, 0o600, &ROOT).unwrap().id;
    let data = content(MIB as usize, 1);
    fs.write(id, 0, &data).unwrap();
    fs.sync().unwrap();
    let mut sector = vec![0; SECTOR as usize];
    let is_first = |at: &u64| {
        devices[0].content().read(*at, &mut sector);
        data.starts_with(&sector)
    };
    let at = (MIB..300 * MIB).step_by(SECTOR as usize).find(is_first).unwrap();
    devices[0].write_at(at, &[7; SECTOR as usize]).unwrap();
    let report = scrub(&fs, 1, true);
    let damages: Vec<_> =
        report.files.iter().map(|(id, path, damage)| (*id, path.clone(), damage.lost_bytes)).collect();
    assert_eq!(damages, [(id, None, SECTOR)]);
    fs.close().unwrap();
}

#[test]
fn a_bad_superblock_is_written_again() {
    let devices = array("single", "dup", 1, 16384);
    let fs = open(&devices, "");
    devices[0].write_at(SUPERBLOCK_OFFSETS[1], &[7; 4096]).unwrap();
    assert_eq!(scrub(&fs, 1, true).devices[0].counts.super_errors, 1);
    assert_eq!(scrub(&fs, 1, true).devices[0].counts.super_errors, 0);
    fs.close().unwrap();
}

#[test]
fn a_scrub_is_cancelled_and_goes_on_where_it_was() {
    let devices = array("single", "dup", 1, 16384);
    let fs = open(&devices, "");
    put(&fs, "file", &content(60 << 20, 1));
    fs.sync().unwrap();
    let whole = scrub(&fs, 1, true).devices[0].counts;
    let slow = [ScrubStart { devid: DevId(1), start: 0, limit: 20 << 20, io_priority: None }];
    let stopped = std::thread::scope(|scope| {
        let running = scope.spawn(|| fs.scrub(&slow, true, &Job::new()).unwrap());
        let status = loop {
            let status = fs.scrub_status();
            if status.iter().any(|device| device.counts.data_bytes_scrubbed > 0) {
                break status;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        assert_eq!((status.len(), status[0].devid, status[0].limit), (1, DevId(1), 20 << 20));
        assert!(matches!(fs.scrub(&starts(1), true, &Job::new()), Err(Error::InProgress(_))));
        fs.cancel_scrub().unwrap();
        running.join().unwrap()
    });
    assert!(stopped.devices[0].is_cancelled() && fs.scrub_status().is_empty());
    assert!(matches!(fs.cancel_scrub(), Err(Error::NotRunning(_))));
    assert!(matches!(fs.limit_scrub(None, 0), Err(Error::NotRunning(_))));
    let first = stopped.devices[0].counts;
    assert!(first.last_physical < whole.last_physical, "{first:?}");
    let rest = [ScrubStart { devid: DevId(1), start: first.last_physical, limit: 0, io_priority: None }];
    let rest = fs.scrub(&rest, true, &Job::new()).unwrap().devices.remove(0).counts;
    // Nothing is counted twice.
    assert_eq!(first.data_bytes_scrubbed + rest.data_bytes_scrubbed, whole.data_bytes_scrubbed);
    assert_eq!(first.tree_bytes_scrubbed + rest.tree_bytes_scrubbed, whole.tree_bytes_scrubbed);
    assert!(rest.data_bytes_scrubbed < whole.data_bytes_scrubbed);
    assert_eq!(rest.last_physical, whole.last_physical);
    fs.close().unwrap();
}

#[test]
fn the_status_tells_the_end_of_a_device_that_vanishes_while_others_are_scrubbed() {
    let devices = array("raid1", "raid1", 2, 16384);
    let vanishing = Arc::new(FaultyMember::new(Arc::clone(&devices[1]), None));
    let given: Vec<Arc<dyn Device>> = vec![Arc::clone(&devices[0]) as _, Arc::clone(&vanishing) as _];
    let fs = Fs::open(given, MountOptions::default()).unwrap();
    put(&fs, "file", &content(40 << 20, 1));
    fs.sync().unwrap();
    // At these rates, a scrub of the first device takes 20 s, and of the second one 5 s.
    let slow = [(1, 2 << 20), (2, 8 << 20)].map(|(devid, limit)| ScrubStart {
        devid: DevId(devid),
        start: 0,
        limit,
        io_priority: None,
    });
    let wait_for = |is_so: &dyn Fn(&ScrubStatus) -> bool| loop {
        if let Some(second) = fs.scrub_status().into_iter().find(|status| status.devid == DevId(2))
            && is_so(&second)
        {
            return second;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let report = std::thread::scope(|scope| {
        let running = scope.spawn(|| fs.scrub(&slow, true, &Job::new()).unwrap());
        assert_eq!(wait_for(&|status| status.counts.data_bytes_scrubbed > 0).end, None);
        vanishing.set(MemberState::Vanishes);
        let end = wait_for(&|status| status.end.is_some()).end;
        assert!(matches!(&end, Some(ScrubEnd::Failed(reason)) if reason.contains("cannot be used")), "{end:?}");
        assert_eq!(fs.scrub_status()[0].end, None, "the other device is still scrubbed");
        fs.cancel_scrub().unwrap();
        running.join().unwrap()
    });
    assert!(report.devices[0].is_cancelled() && !report.devices[1].is_cancelled());
    fs.close().unwrap();
}

#[test]
fn data_without_checksums_is_counted_and_copied_from_a_readable_copy() {
    let devices = array("raid1", "raid1", 2, 16384);
    let fs = open(&devices, "nodatasum");
    put(&fs, "file", &content(4 << 20, 1));
    fs.sync().unwrap();
    let report = scrub(&fs, 2, true);
    assert_eq!(report.devices.iter().map(|device| device.counts.no_csum).sum::<u64>(), 2 * 1024);
    fs.close().unwrap();
}

#[test]
fn devices_that_are_missing_or_unknown_are_refused() {
    let devices = array("raid1", "raid1", 3, 16384);
    let fs = open(&devices[..2], "degraded");
    for devid in [3, 4] {
        let start = [ScrubStart { devid: DevId(devid), start: 0, limit: 0, io_priority: None }];
        assert!(matches!(fs.scrub(&start, true, &Job::new()), Err(Error::InvalidArgument(_))), "{devid}");
    }
    assert_eq!(sums(&fs.scrub(&starts(2), true, &Job::new()).unwrap()), (0, 0, 0));
    let flags: BlockGroupFlags =
        fs.block_groups().iter().fold(BlockGroupFlags::empty(), |all, group| all | group.flags);
    assert!(flags.contains(BlockGroupFlags::RAID1));
    fs.close().unwrap();
}
