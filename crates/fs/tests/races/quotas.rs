//! The numbers of quota groups, beside relocations, rescans, snapshots and deletions. The checker compares them.

use ubtrfs_fs::{QgroupId, QuotaKind};

use super::*;

const SECTORS: usize = 32;

#[test]
fn quota_numbers_beside_relocations_and_rescans_are_exact() {
    for kind in [QuotaKind::Full, QuotaKind::Simple] {
        let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
        let bed = Bed::new(Duration::from_millis(5), &mkfs, "defaults");
        bed.fs.enable_quotas(kind).unwrap();
        bed.fs.wait_for_quota_rescan(&Job::new()).unwrap();
        let parent = QgroupId::new(1, 1).unwrap();
        bed.fs.create_qgroup(parent).unwrap();
        let mut files: Vec<Checked> = (0..12).map(|nr| Checked::new(&bed, &nr.to_string(), SECTORS * SECTOR)).collect();
        for file in &mut files {
            file.write(&bed.fs, 0, &[1; SECTORS * SECTOR]);
        }
        bed_checked(bed, |bed| {
            std::thread::scope(|scope| {
                for (nr, files) in files.chunks_mut(6).enumerate() {
                    let mut rng = bed.rng(nr as u64);
                    scope.spawn(move || {
                        bed.until_stopped(|| {
                            let nr = rng.index(files.len());
                            let at = rng.index(SECTORS - 4) * SECTOR;
                            let len = (1 + rng.index(4)) * SECTOR;
                            files[nr].write(&bed.fs, at, &rng.bytes(len));
                            if rng.one_in(4) {
                                let (src, dst) = (rng.index(files.len()), rng.index(files.len()));
                                if src != dst {
                                    let (src_id, dst_id) = (files[src].id, files[dst].id);
                                    bed.fs.clone_range(src_id, 0, dst_id, 0, SECTOR as u64).unwrap();
                                    let copied = files[src].content[..SECTOR].to_vec();
                                    files[dst].content[..SECTOR].copy_from_slice(&copied);
                                }
                            }
                            bed.fs.flush_data().unwrap();
                            files[nr].check(&bed.fs, "beside relocations");
                        });
                    });
                }
                let mut rng = bed.rng(50);
                let mut snapshots = std::collections::VecDeque::new();
                let mut number = 0;
                scope.spawn(move || {
                    bed.until_stopped(|| {
                        number += 1;
                        let name = format!("snapshot-{number}");
                        let groups = if rng.one_in(2) { vec![QgroupId::new(1, 1).unwrap()] } else { Vec::new() };
                        bed.fs.snapshot_in(bed.work.root, TOP, name.as_bytes(), true, &groups).unwrap();
                        snapshots.push_back(name);
                        if snapshots.len() > 3 {
                            let name = snapshots.pop_front().unwrap();
                            bed.fs.delete_subvolume(TOP, name.as_bytes(), None).unwrap();
                        }
                        if rng.one_in(3) {
                            drop(bed.fs.start_quota_rescan());
                        }
                    });
                });
                let (mut rng, mut nr_emptied) = (bed.rng(51), 0);
                bed.for_time(Duration::from_secs(2), || {
                    let group = *rng.pick(&bed.fs.block_groups());
                    nr_emptied += u64::from(bed.fs.relocate_block_group(group.start, &Job::new()).is_ok());
                });
                assert!(nr_emptied > 0, "no block group was emptied");
            });
            for file in &files {
                file.check(&bed.fs, "at the end");
            }
            bed.fs.finish_deletions(&mut |_| Ok(())).unwrap();
            bed.fs.wait_for_quota_rescan(&Job::new()).unwrap();
            bed.fs.sync().unwrap();
            assert!(bed.fs.quota_status().unwrap().consistent || kind == QuotaKind::Simple);
        });
    }
}
