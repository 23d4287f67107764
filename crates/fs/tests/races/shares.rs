//! Clones, deduplication, defragmentation and snapshots of files that are written in place, beside relocations.

use std::sync::{Mutex, RwLock};

use ubtrfs_fs::Defragment;

use super::*;

const SECTORS: usize = 32;
const NR_FILES: usize = 4;

#[test]
fn clones_and_snapshots_beside_relocations_keep_their_content() {
    for options in ["nodatacow", "compress=lzo"] {
        let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
        let bed = Bed::new(Duration::from_millis(8), &mkfs, options);
        let files: Vec<Mutex<Checked>> = (0..NR_FILES)
            .map(|nr| {
                let mut file = Checked::new(&bed, &nr.to_string(), SECTORS * SECTOR);
                file.write(&bed.fs, 0, &[1; SECTORS * SECTOR]);
                Mutex::new(file)
            })
            .collect();
        // Changes hold this lock shared, and a snapshot holds it exclusively, so the content of a snapshot is known.
        // Writeback and relocations run beside the snapshot.
        let changing = RwLock::new(());
        bed_checked(bed, |bed| {
            std::thread::scope(|scope| {
                for thread in 0..2 {
                    let (mut rng, files, changing) = (bed.rng(thread), &files, &changing);
                    scope.spawn(move || bed.until_stopped(|| change(&bed.fs, files, changing, &mut rng)));
                }
                scope.spawn(|| bed.until_stopped(|| bed.fs.flush_data().unwrap()));
                for thread in 0..2 {
                    bed.spawn_relocations(scope, bed.rng(20 + thread));
                }
                let mut snapshots = Vec::new();
                bed.for_time(Duration::from_millis(1800), || {
                    let name = format!("snapshot-{}", snapshots.len());
                    let content = {
                        let _still = changing.write().unwrap();
                        bed.snapshot_of(&files, &name)
                    };
                    std::thread::sleep(Duration::from_millis(30));
                    content.iter().for_each(|file| file.check(&bed.fs, "a snapshot, soon"));
                    snapshots.push(content);
                });
                for content in &snapshots {
                    content.iter().for_each(|file| file.check(&bed.fs, "a snapshot, at the end"));
                }
            });
            files.iter().for_each(|file| file.lock().unwrap().check(&bed.fs, "at the end"));
        });
    }
}

/// Makes a random change.
fn change(fs: &Fs, files: &[Mutex<Checked>], changing: &RwLock<()>, rng: &mut Rng) {
    let _changing = changing.read().unwrap();
    let first = rng.index(NR_FILES - 1);
    let mut source = files[first].lock().unwrap();
    let at = rng.index(SECTORS - 4) * SECTOR;
    let len = (1 + rng.index(4)) * SECTOR;
    match rng.below(8) {
        0..4 => source.write(fs, at, &vec![rng.below(256) as u8; len]),
        4 => {
            let mode = FallocateMode::ZERO_RANGE;
            fs.fallocate(source.id, at as u64, len as u64, mode).unwrap();
            source.content[at..at + len].fill(0);
        }
        5 => {
            drop(fs.defragment(source.id, &Defragment { unshare: rng.one_in(2), ..Defragment::default() }, &Job::new()))
        }
        _ => {
            let mut target = files[first + 1 + rng.index(NR_FILES - 1 - first)].lock().unwrap();
            fs.clone_range(source.id, at as u64, target.id, at as u64, len as u64).unwrap();
            let cloned = source.content[at..at + len].to_vec();
            target.content[at..at + len].copy_from_slice(&cloned);
            target.check(fs, "after a clone");
        }
    }
    source.check(fs, "after a change");
}
