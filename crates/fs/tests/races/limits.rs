//! Quota limits and full filesystems: writers that are refused space, beside snapshots, deletions and relocations.

use std::sync::atomic::AtomicU64;

use ubtrfs_fs::{Error, QgroupId, QuotaKind};

use super::*;

/// Writes, or leaves the content as it was if there is no room. Returns whether there was room.
fn write_or_refuse(file: &mut Checked, fs: &Fs, at: usize, bytes: &[u8]) -> bool {
    match fs.write(file.id, at as u64, bytes) {
        Ok(len) => {
            file.content[at..at + len].copy_from_slice(&bytes[..len]);
            len == bytes.len()
        }
        Err(error) => {
            assert!(is_shortage(&error), "{error}");
            false
        }
    }
}

fn is_shortage(error: &Error) -> bool {
    matches!(error, Error::Engine(ubtrfs_error::Error::NoSpace | ubtrfs_error::Error::QuotaExceeded))
}

fn is_busy(error: &Error) -> bool {
    matches!(error, Error::Engine(ubtrfs_error::Error::BlockGroupBusy { .. } | ubtrfs_error::Error::Refused { .. }))
}

fn allowed(result: ubtrfs_fs::Result<()>) -> bool {
    match result {
        Ok(()) => true,
        Err(error) => {
            assert!(is_shortage(&error), "{error}");
            false
        }
    }
}

/// Many writers near a limit: the counted bytes never exceed it, nothing that was accepted is lost, and removals make
/// room again.
#[test]
fn writers_near_a_limit_beside_relocations_stay_below_it() {
    const SECTORS: usize = 16;
    const LIMIT: u64 = 3 << 20;
    for kind in [QuotaKind::Full, QuotaKind::Simple] {
        let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
        let bed = Bed::new(Duration::from_millis(2), &mkfs, "defaults");
        bed.fs.enable_quotas(kind).unwrap();
        bed.fs.wait_for_quota_rescan(&Job::new()).unwrap();
        let mut files: Vec<Checked> =
            (0..24).map(|nr| Checked::new(&bed, &nr.to_string(), 4 * SECTORS * SECTOR)).collect();
        let group = QgroupId::of_subvolume(bed.work.root);
        bed.fs.limit_qgroup(group, Some(Some(LIMIT)), None).unwrap();
        let (granted, refused) = (&AtomicU64::new(0), &AtomicU64::new(0));
        bed_checked(bed, |bed| {
            std::thread::scope(|scope| {
                bed.spawn_writers(scope, &mut files, "near a limit", |file, rng| {
                    let at = rng.index(3 * SECTORS) * SECTOR;
                    let len = (1 + rng.index(SECTORS)) * SECTOR;
                    let is_granted = match rng.below(8) {
                        0 => {
                            let mode = FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE;
                            bed.fs.fallocate(file.id, at as u64, len as u64, mode).unwrap();
                            file.content[at..at + len].fill(0);
                            true
                        }
                        1 => allowed(bed.fs.fallocate(file.id, at as u64, len as u64, FallocateMode::KEEP_SIZE)),
                        2 => {
                            bed.fs.fsync(file.id, false).unwrap();
                            true
                        }
                        _ => write_or_refuse(file, &bed.fs, at, &rng.bytes(len)),
                    };
                    let counter = if is_granted { granted } else { refused };
                    counter.fetch_add(1, Ordering::Relaxed);
                });
                bed.spawn_relocations(scope, bed.rng(50));
                let mut number = 0;
                bed.for_time(Duration::from_millis(1500), || {
                    number += 1;
                    let name = format!("snapshot-{number}");
                    bed.fs.snapshot(bed.work.root, TOP, name.as_bytes(), true).unwrap();
                    if number > 2 {
                        bed.fs.delete_subvolume(TOP, format!("snapshot-{}", number - 2).as_bytes(), None).unwrap();
                    }
                    let found = bed.fs.qgroups().unwrap();
                    let found = found.iter().find(|found| found.id == group).unwrap();
                    assert!(found.referenced <= LIMIT + (64 << 10), "{} bytes", found.referenced);
                });
            });
            let nr = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            assert!(nr(granted) > 0 && nr(refused) > 0, "{granted:?} granted, {refused:?} refused");
            for file in &files {
                file.check(&bed.fs, "at the end");
            }
            bed.fs.finish_deletions(&mut |_| Ok(())).unwrap();
            bed.fs.wait_for_quota_rescan(&Job::new()).unwrap();
        });
    }
}

/// Block groups are emptied while the filesystem is nearly full.
#[test]
fn a_nearly_full_filesystem_is_balanced_beside_writers() {
    const SECTORS: usize = 512;
    let dup = MkfsOptions {
        data_profile: BlockGroupFlags::DUP,
        nodesize: 4096,
        size_bytes: Some(180 << 20),
        ..MkfsOptions::default()
    };
    let mixed = MkfsOptions {
        mixed: true,
        nodesize: 4096,
        metadata_profile: BlockGroupFlags::empty(),
        size_bytes: Some(64 << 20),
        ..MkfsOptions::default()
    };
    for (mkfs, options, nr_files) in [(dup, "defaults", 16), (mixed, "discard=sync", 16)] {
        let bed = Bed::new(Duration::from_millis(2), &mkfs, options);
        let mut files: Vec<Checked> =
            (0..nr_files).map(|nr| Checked::new(&bed, &nr.to_string(), SECTORS * SECTOR)).collect();
        // Fill until there is no room, so that the writers compete for the last free space.
        let filler = bed.fs.create(TOP, b"filler", NewInode::file(0o600), &Caller::ROOT).unwrap().id;
        let mut at = 0;
        let room = |bed: &Bed| bed.fs.statfs().unwrap().bavail * SECTOR as u64;
        while room(&bed) > 24 << 20 && bed.fs.write(filler, at, &[7; 1 << 20]).is_ok() {
            at += 1 << 20;
            bed.fs.sync().unwrap();
        }
        bed_checked(bed, |bed| {
            let mut nr_emptied = 0;
            std::thread::scope(|scope| {
                bed.spawn_writers(scope, &mut files, "on a full filesystem", |file, rng| {
                    let at = rng.index(SECTORS - 32) * SECTOR;
                    let len = (1 + rng.index(32)) * SECTOR;
                    match rng.below(8) {
                        0 | 1 => {
                            let mode = FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE;
                            if allowed(bed.fs.fallocate(file.id, at as u64, len as u64, mode)) {
                                file.content[at..at + len].fill(0);
                            }
                        }
                        2 => drop(allowed(bed.fs.fallocate(file.id, at as u64, len as u64, FallocateMode::KEEP_SIZE))),
                        3 => drop(allowed(bed.fs.fsync(file.id, false))),
                        _ => drop(write_or_refuse(file, &bed.fs, at, &rng.bytes(len))),
                    }
                });
                let mut rng = bed.rng(50);
                let mut number = 0;
                scope.spawn(move || {
                    bed.until_stopped(|| {
                        number += 1;
                        let name = format!("snapshot-{number}");
                        if bed.fs.snapshot(bed.work.root, TOP, name.as_bytes(), true).is_ok() {
                            std::thread::sleep(Duration::from_millis(20));
                            bed.fs.delete_subvolume(TOP, name.as_bytes(), None).unwrap();
                        }
                        std::thread::sleep(Duration::from_millis(10));
                    });
                });
                bed.for_time(Duration::from_secs(2), || {
                    let group = *rng.pick(&bed.groups_of(BlockGroupFlags::empty()));
                    match bed.fs.relocate_block_group(group.start, &Job::new()) {
                        Ok(report) => {
                            assert!(report.failures.is_empty(), "{:?}", report.failures);
                            nr_emptied += 1;
                        }
                        Err(error) => assert!(is_shortage(&error) || is_busy(&error), "{error}"),
                    }
                });
            });
            assert!(nr_emptied > 0, "no block group was emptied");
            for file in &files {
                file.check(&bed.fs, "at the end");
            }
        });
    }
}
