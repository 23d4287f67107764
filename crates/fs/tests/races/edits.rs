//! All ways to change the data of a file, and to share it, in filesystems of several shapes, beside relocations.

use std::sync::{Mutex, RwLock};

use ubtrfs_fs::{CompressSpec, Defragment, SetAttr};

use super::*;

const SECTORS: usize = 48;
const LEN: usize = SECTORS * SECTOR;
const NR_FILES: usize = 5;

/// Files of equal size, cut and extended by the changes.
fn edit(bed: &Bed, files: &[Mutex<Checked>], changing: &RwLock<()>, rng: &mut Rng) {
    let fs = &bed.fs;
    let _changing = changing.read().unwrap();
    let first = rng.index(NR_FILES - 1);
    let mut source = files[first].lock().unwrap();
    let at = rng.index(SECTORS - 12) * SECTOR;
    let len = (1 + rng.index(12)) * SECTOR;
    let mut target = files[first + 1 + rng.index(NR_FILES - 1 - first)].lock().unwrap();
    match rng.below(16) {
        0 | 1 => source.write(fs, at, &vec![rng.below(4) as u8; len]),
        2 => source.write(fs, at, &rng.bytes(len)),
        3 => source.write(fs, at + 100, &rng.bytes(700)),
        4 => {
            fs.fallocate(source.id, at as u64, len as u64, FallocateMode::ZERO_RANGE).unwrap();
            source.content[at..at + len].fill(0);
        }
        5 => {
            let mode = FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE;
            fs.fallocate(source.id, at as u64, len as u64, mode).unwrap();
            source.content[at..at + len].fill(0);
        }
        6 => fs.fallocate(source.id, at as u64, len as u64, FallocateMode::KEEP_SIZE).unwrap(),
        7 => {
            let compress = rng.one_in(3).then(|| CompressSpec::new(ubtrfs_format::item::Compression::Zstd));
            let how = Defragment { unshare: rng.one_in(2), compress, ..Defragment::default() };
            drop(fs.defragment(source.id, &how, &Job::new()));
        }
        8 => {
            for size in [at as u64, LEN as u64] {
                fs.setattr(source.id, &SetAttr { size: Some(size), ..SetAttr::default() }, &Caller::ROOT).unwrap();
            }
            source.content[at..].fill(0);
        }
        9 => fs.fsync(source.id, false).unwrap(),
        10 => {
            target.write(fs, at, &source.content[at..at + len]);
            let same = fs.dedupe_range(source.id, at as u64, target.id, at as u64, len as u64, &Job::new()).unwrap();
            assert!(same, "equal content");
            target.check(fs, "after a deduplication");
        }
        11 => {
            let is_same = source.content[at..at + len] == target.content[at..at + len];
            let same = fs.dedupe_range(source.id, at as u64, target.id, at as u64, len as u64, &Job::new()).unwrap();
            assert_eq!(same, is_same);
        }
        12 => {
            let copied = fs.copy_range(source.id, at as u64 + 5, target.id, at as u64 + 9, len as u64 - 20).unwrap();
            let part = source.content[at + 5..][..copied as usize].to_vec();
            target.content[at + 9..][..copied as usize].copy_from_slice(&part);
        }
        _ => {
            let to = rng.index(SECTORS - 12) * SECTOR;
            fs.clone_range(source.id, at as u64, target.id, to as u64, len as u64).unwrap();
            let cloned = source.content[at..at + len].to_vec();
            target.content[to..to + len].copy_from_slice(&cloned);
            target.check(fs, "after a clone");
        }
    }
    source.check(fs, "after a change");
}

fn edits(mkfs: &MkfsOptions, options: &str, has_quotas: bool) {
    let bed = Bed::new(Duration::from_millis(3), mkfs, options);
    if has_quotas {
        bed.fs.enable_quotas(ubtrfs_fs::QuotaKind::Full).unwrap();
        bed.fs.wait_for_quota_rescan(&Job::new()).unwrap();
    }
    let files: Vec<Mutex<Checked>> = (0..NR_FILES)
        .map(|nr| {
            let mut file = Checked::new(&bed, &nr.to_string(), LEN);
            file.write(&bed.fs, 0, &[1; LEN]);
            Mutex::new(file)
        })
        .collect();
    let changing = RwLock::new(());
    bed_checked(bed, |bed| {
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (mut rng, files, changing) = (bed.rng(thread), &files, &changing);
                scope.spawn(move || bed.until_stopped(|| edit(bed, files, changing, &mut rng)));
            }
            scope.spawn(|| bed.until_stopped(|| bed.fs.flush_data().unwrap()));
            for thread in 0..2 {
                let mut rng = bed.rng(20 + thread);
                scope.spawn(move || {
                    bed.until_stopped(|| {
                        bed.relocate_one(&mut rng);
                        if rng.one_in(8) {
                            drop(bed.fs.trim(&(0..u64::MAX), 0, &Job::new()));
                        }
                    });
                });
            }
            let mut snapshots = std::collections::VecDeque::new();
            let mut number = 0;
            bed.for_time(Duration::from_millis(1200), || {
                number += 1;
                let name = format!("snapshot-{number}");
                let content = {
                    let _still = changing.write().unwrap();
                    bed.snapshot_of(&files, &name)
                };
                std::thread::sleep(Duration::from_millis(20));
                content.iter().for_each(|file| file.check(&bed.fs, "a snapshot, soon"));
                snapshots.push_back((name, content));
                if snapshots.len() > 5 {
                    let (name, content) = snapshots.pop_front().unwrap();
                    content.iter().for_each(|file| file.check(&bed.fs, "a snapshot, at last"));
                    bed.fs.delete_subvolume(TOP, name.as_bytes(), None).unwrap();
                }
            });
            for (_, content) in &snapshots {
                content.iter().for_each(|file| file.check(&bed.fs, "a snapshot, at the end"));
            }
        });
        files.iter().for_each(|file| file.lock().unwrap().check(&bed.fs, "at the end"));
        if has_quotas {
            bed.fs.finish_deletions(&mut |_| Ok(())).unwrap();
        }
    });
}

fn small_nodes() -> MkfsOptions {
    MkfsOptions { nodesize: 4096, ..MkfsOptions::default() }
}

#[test]
fn edits_with_quotas() {
    edits(&small_nodes(), "defaults", true);
}

#[test]
fn edits_compressed() {
    edits(&small_nodes(), "compress-force=zstd,discard=sync", false);
}

#[test]
fn edits_in_place() {
    edits(&small_nodes(), "nodatacow,discard=async,bg_reclaim_threshold=90", false);
}

#[test]
fn edits_in_mixed_block_groups() {
    let mkfs = MkfsOptions {
        mixed: true,
        nodesize: 4096,
        metadata_profile: BlockGroupFlags::empty(),
        ..MkfsOptions::default()
    };
    edits(&mkfs, "discard=sync", true);
}

#[test]
fn edits_in_copies() {
    let mkfs = MkfsOptions { data_profile: BlockGroupFlags::DUP, ..small_nodes() };
    edits(&mkfs, "nodatasum,compress=lzo", false);
}
