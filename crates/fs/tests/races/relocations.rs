//! Several relocations beside each other, and threads that hold addresses from before a move.

use ubtrfs_format::item::{BalanceArgs, BalanceFlags, BalanceItem};
use ubtrfs_transaction::ChunkPlacement;

use super::*;

/// A relocation that ends early must not open its block group for writes while another relocation empties it.
#[test]
fn a_cancelled_relocation_does_not_open_a_block_group_that_another_empties() {
    const SECTORS: usize = 128;
    let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
    let bed = Bed::new(Duration::from_millis(100), &mkfs, "nodatacow");
    let mut files: Vec<Checked> = (0..2).map(|nr| Checked::new(&bed, &nr.to_string(), SECTORS * SECTOR)).collect();
    for file in &mut files {
        (0..SECTORS).for_each(|at| file.write(&bed.fs, at * SECTOR, &[1; SECTOR]));
        bed.fs.flush_data().unwrap();
    }
    bed_checked(bed, |bed| {
        std::thread::scope(|scope| {
            bed.spawn_writers(scope, &mut files, "beside relocations", |file, rng| {
                for _ in 0..8 {
                    file.write(&bed.fs, rng.index(SECTORS) * SECTOR, &[rng.below(256) as u8; SECTOR]);
                }
                bed.fs.flush_data().unwrap();
            });
            for _ in 0..2 {
                scope.spawn(move || {
                    let job = Job::new();
                    job.cancel();
                    bed.until_stopped(|| {
                        for group in bed.groups_of(BlockGroupFlags::DATA) {
                            drop(bed.fs.relocate_block_group(group.start, &job));
                        }
                    });
                });
            }
            let mut nr_emptied = 0;
            bed.for_time(Duration::from_secs(3), || {
                for group in bed.groups_of(BlockGroupFlags::DATA) {
                    nr_emptied += u64::from(bed.fs.relocate_block_group(group.start, &Job::new()).is_ok());
                }
            });
            assert!(nr_emptied > 0, "no block group was emptied");
        });
        for file in &files {
            file.check(&bed.fs, "at the end");
        }
    });
}

/// Data may move twice while a thread holds the address that it had before both moves.
#[test]
fn addresses_stay_valid_while_data_moves_again_and_again() {
    const PIECE: usize = 8 * SECTOR;
    const PIECES: usize = 16;
    let bed = Bed::new(Duration::from_millis(50), &MkfsOptions::default(), "defaults");
    let mut files: Vec<Checked> = (0..3).map(|nr| Checked::new(&bed, &nr.to_string(), PIECES * PIECE)).collect();
    bed_checked(bed, |bed| {
        std::thread::scope(|scope| {
            bed.spawn_writers(scope, &mut files, "beside relocations", |file, rng| {
                let piece = rng.index(PIECES) * PIECE;
                match rng.below(3) {
                    0 => {
                        file.write(&bed.fs, piece, &rng.bytes(PIECE));
                        bed.fs.flush_data().unwrap();
                    }
                    1 => {
                        // The rest of the extent keeps its address.
                        let at = piece + rng.index(PIECE / SECTOR) * SECTOR;
                        file.write(&bed.fs, at, &rng.bytes(SECTOR));
                        bed.fs.flush_data().unwrap();
                    }
                    _ => {
                        let at = piece + rng.index(PIECE / SECTOR) * SECTOR;
                        let mode = FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE;
                        bed.fs.fallocate(file.id, at as u64, SECTOR as u64, mode).unwrap();
                        file.content[at..at + SECTOR].fill(0);
                    }
                }
            });
            for nr in 0..2 {
                let mut rng = bed.rng(100 + nr);
                scope.spawn(move || {
                    bed.until_stopped(|| {
                        let groups = bed.groups_of(BlockGroupFlags::DATA);
                        if !groups.is_empty() {
                            drop(bed.fs.relocate_block_group(rng.pick(&groups).start, &Job::new()));
                        }
                    });
                });
            }
            bed.for_time(Duration::from_secs(4), || std::thread::sleep(Duration::from_millis(20)));
        });
        for file in &files {
            file.check(&bed.fs, "at the end");
        }
    });
}

/// Threads read old addresses of data that has moved, so the old places must not be discarded with the commit.
#[test]
fn data_is_read_while_it_moves_and_its_old_place_is_discarded() {
    const LEN: usize = 16 * SECTOR;
    for options in ["discard=sync", "discard=sync,nodatasum"] {
        let bed = Bed::new(Duration::from_millis(50), &MkfsOptions::default(), options);
        let mut files: Vec<Checked> = (0..4).map(|nr| Checked::new(&bed, &nr.to_string(), LEN)).collect();
        for (nr, file) in files.iter_mut().enumerate() {
            file.write(&bed.fs, 0, &bed.rng(nr as u64).bytes(LEN));
        }
        bed.fs.sync().unwrap();
        bed_checked(bed, |bed| {
            let mut nr_emptied = 0;
            std::thread::scope(|scope| {
                for file in &files {
                    scope.spawn(move || bed.until_stopped(|| file.check(&bed.fs, "beside relocations")));
                }
                bed.for_time(Duration::from_secs(2), || {
                    for group in bed.groups_of(BlockGroupFlags::DATA) {
                        nr_emptied += u64::from(bed.fs.relocate_block_group(group.start, &Job::new()).is_ok());
                    }
                });
            });
            assert!(nr_emptied > 0, "no block group was emptied");
        });
    }
}

/// A balance takes its turn with threads that empty and move the same block groups.
#[test]
fn a_balance_waits_for_block_groups_that_others_use() {
    const SECTORS: usize = 256;
    let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
    let bed = Bed::new(Duration::from_millis(5), &mkfs, "defaults");
    let mut files: Vec<Checked> = (0..2).map(|nr| Checked::new(&bed, &nr.to_string(), SECTORS * SECTOR)).collect();
    for (nr, file) in files.iter_mut().enumerate() {
        file.write(&bed.fs, 0, &bed.rng(nr as u64).bytes(SECTORS * SECTOR));
    }
    bed.fs.sync().unwrap();
    bed_checked(bed, |bed| {
        let mut nr_balanced = 0;
        std::thread::scope(|scope| {
            (0..2).for_each(|nr| bed.spawn_relocations(scope, bed.rng(50 + nr)));
            let mut rng = bed.rng(52);
            scope.spawn(move || {
                bed.until_stopped(|| {
                    let group = *rng.pick(&bed.fs.block_groups());
                    let placement = ChunkPlacement { profile: None, keeps_stripes: rng.one_in(2) };
                    drop(bed.fs.migrate_block_group(group.start, &placement, &Job::new()));
                });
            });
            bed.for_time(Duration::from_secs(2), || {
                let args = BalanceArgs::NONE;
                let flags = BalanceFlags::DATA | BalanceFlags::METADATA | BalanceFlags::SYSTEM;
                let (data, metadata) = (args.clone(), args.clone());
                let item = BalanceItem { flags: flags.bits(), data, metadata, system: args, unused: [0; 4] };
                let report = bed.fs.balance(item, &Job::new()).unwrap();
                assert!(report.failures.is_empty(), "{:?}", report.failures);
                nr_balanced += 1;
            });
        });
        println!("{nr_balanced} balances");
        for file in &files {
            file.check(&bed.fs, "at the end");
        }
    });
}
