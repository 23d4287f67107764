//! Devices that shrink and grow, beside writers, snapshots, relocations and cancellations.

use ubtrfs_format::DevId;

use super::*;

#[test]
fn a_filesystem_that_shrinks_and_grows_beside_writers_loses_nothing() {
    const SECTORS: usize = 64;
    let small = || MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
    let mixed = MkfsOptions { mixed: true, metadata_profile: BlockGroupFlags::empty(), ..small() };
    for (mkfs, options) in [(small(), "nodatacow,discard=sync"), (small(), "compress=zstd"), (mixed, "discard=sync")] {
        let bed = Bed::new(Duration::from_millis(3), &mkfs, options);
        bed.fs.enable_quotas(ubtrfs_fs::QuotaKind::Full).unwrap();
        bed.fs.wait_for_quota_rescan(&Job::new()).unwrap();
        let mut files: Vec<Checked> = (0..4).map(|nr| Checked::new(&bed, &nr.to_string(), SECTORS * SECTOR)).collect();
        bed_checked(bed, |bed| {
            let (mut nr_resized, mut nr_refused) = (0, 0);
            std::thread::scope(|scope| {
                bed.spawn_writers(scope, &mut files, "beside resizes", |file, rng| {
                    let at = rng.index(SECTORS - 8) * SECTOR;
                    let len = (1 + rng.index(8)) * SECTOR;
                    file.write(&bed.fs, at, &rng.bytes(len));
                    match rng.below(4) {
                        0 => bed.fs.fsync(file.id, false).unwrap(),
                        1 => bed.fs.flush_data().unwrap(),
                        _ => {}
                    }
                });
                let mut rng = bed.rng(40);
                scope.spawn(move || {
                    bed.until_stopped(|| {
                        let group = *rng.pick(&bed.groups_of(BlockGroupFlags::empty()));
                        drop(bed.fs.relocate_block_group(group.start, &Job::new()));
                        std::thread::sleep(Duration::from_millis(rng.below(20)));
                        if rng.one_in(3) {
                            drop(bed.fs.cancel_resize());
                        }
                    });
                });
                let mut number = 0;
                scope.spawn(move || {
                    bed.until_stopped(|| {
                        number += 1;
                        let name = format!("snapshot-{number}");
                        bed.fs.snapshot(bed.work.root, TOP, name.as_bytes(), true).unwrap();
                        if number > 3 {
                            let name = format!("snapshot-{}", number - 3);
                            bed.fs.delete_subvolume(TOP, name.as_bytes(), None).unwrap();
                        }
                        std::thread::sleep(Duration::from_millis(15));
                    });
                });
                let mut rng = bed.rng(50);
                bed.for_time(Duration::from_millis(1500), || {
                    let least = bed.fs.min_device_size(DevId(1)).unwrap();
                    let len = least + rng.below((1 << 30) - least);
                    match bed.fs.resize_device(DevId(1), len & !0xffff, &Job::new()) {
                        Ok(()) => nr_resized += 1,
                        Err(_) => nr_refused += 1,
                    }
                });
            });
            assert!(nr_resized > 0, "all {nr_refused} resizes were refused");
            for file in &files {
                file.check(&bed.fs, "at the end");
            }
            bed.fs.finish_deletions(&mut |_| Ok(())).unwrap();
            bed.fs.wait_for_quota_rescan(&Job::new()).unwrap();
        });
    }
}
