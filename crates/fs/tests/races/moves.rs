//! Chunks that move on the device, change their profile or are given up, beside writers, trims and snapshots.

use ubtrfs_format::DevId;
use ubtrfs_transaction::ChunkPlacement;

use super::*;

const SECTORS: usize = 64;

/// Files with and without copy-on-write keep their content while block groups move and snapshots are taken.
#[test]
fn writers_beside_moving_chunks_and_trims_lose_nothing() {
    for options in ["nodatacow", "compress=zstd"] {
        let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
        let bed = Bed::new(Duration::from_millis(5), &mkfs, options);
        let mut files: Vec<Checked> = (0..2).map(|nr| Checked::new(&bed, &nr.to_string(), SECTORS * SECTOR)).collect();
        bed_checked(bed, |bed| {
            std::thread::scope(|scope| {
                bed.spawn_writers(scope, &mut files, "beside moving chunks", |file, rng| {
                    let at = rng.index(SECTORS);
                    let nr = 1 + rng.index((SECTORS - at).min(8));
                    file.write(&bed.fs, at * SECTOR, &vec![rng.below(256) as u8; nr * SECTOR]);
                    match rng.below(4) {
                        0 => bed.fs.fsync(file.id, false).unwrap(),
                        1 => {
                            let mode = FallocateMode::empty();
                            bed.fs.fallocate(file.id, (at * SECTOR) as u64, SECTOR as u64, mode).unwrap();
                        }
                        _ => bed.fs.flush_data().unwrap(),
                    }
                });
                scope.spawn(move || {
                    bed.until_stopped(|| drop(bed.fs.trim(&(0..u64::MAX), 0, &Job::new())));
                });
                let mut rng = bed.rng(50);
                scope.spawn(move || {
                    bed.until_stopped(|| {
                        let len = if rng.one_in(2) { 400 << 20 } else { 1 << 30 };
                        drop(bed.fs.resize_device(DevId(1), len, &Job::new()));
                    });
                });
                let mut rng = bed.rng(51);
                let (mut number, mut nr_moved) = (0, 0);
                bed.for_time(Duration::from_secs(2), || {
                    let group = *rng.pick(&bed.fs.block_groups());
                    let profile = if rng.one_in(2) { BlockGroupFlags::DUP } else { BlockGroupFlags::empty() };
                    let placement = ChunkPlacement { profile: Some(profile), keeps_stripes: rng.one_in(2) };
                    nr_moved += u64::from(bed.fs.migrate_block_group(group.start, &placement, &Job::new()).is_ok());
                    number += 1;
                    if number % 4 == 0 {
                        let name = format!("snapshot-{number}");
                        bed.fs.snapshot(bed.work.root, TOP, name.as_bytes(), true).unwrap();
                    }
                });
                assert!(nr_moved > 0, "no chunk moved");
            });
            for file in &files {
                file.check(&bed.fs, "at the end");
            }
        });
    }
}
