//! Moving block groups without changing their addresses, and resizing devices, during reads, writes, snapshots and
//! fsyncs.
//!
//! Method: random operations with a model, and a thread that writes, while every block group is moved, converted to DUP
//! and back, and the device shrinks and grows. The content does not change, `btrfs check` and `ubtrfs check` are clean,
//! and Linux reads and scrubs everything. Recorded runs are cut at many points. `UBTRFS_SEED` repeats a failure.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::{DevId, Ino, RootId};
use ubtrfs_fs::{Caller, Error, Fs, InodeId, Job, MountOptions, NewInode, Placement};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    Compare, Driver, FaultDevice, FaultKind, FaultPlan, FsTarget, Image, Medium, MediumDevice, Model, RecordingDevice,
    Rng, capability, check_medium, compare_entries, judge,
};

const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };
const MIB: u64 = 1 << 20;
const SINGLE: BlockGroupFlags = BlockGroupFlags::empty();
const DUP: BlockGroupFlags = BlockGroupFlags::DUP;

fn open(device: Arc<dyn Device>) -> Result<FsTarget> {
    FsTarget::on_device(device, MountOptions::parse("commit=300")?)
}

fn of_file(image: &Image) -> Arc<dyn Device> {
    Arc::new(FileDevice::open(image.path(), Access::ReadWrite).unwrap())
}

/// Moves all block groups; converts them if a profile is given.
fn move_all(fs: &Fs, profile: Option<BlockGroupFlags>, keeps_stripes: bool) -> Result<u64> {
    let mut copied = 0;
    for group in fs.block_groups() {
        let profile = profile.unwrap_or(group.flags & BlockGroupFlags::PROFILES);
        match fs.migrate_block_group(group.start, &Placement { profile: Some(profile), keeps_stripes }, &Job::new()) {
            Ok(moved) => copied += moved.copied_bytes,
            // Another thread's commit removed the group because it was empty.
            Err(error) if error.to_string().contains("there is no block group") => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(copied)
}

/// Writes, fsyncs and snapshots until told to stop. Returns the content of its file.
fn disturb(fs: &Fs, stop: &AtomicBool, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let id = fs.create(TOP, b"disturbed", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    let mut content = vec![0; 4 << 20];
    fs.write(id, 0, &content).unwrap();
    let mut number = 0;
    while !stop.load(Ordering::SeqCst) {
        let at = rng.index(content.len() - 70_000);
        let len = 1 + rng.index(65_536);
        let piece = rng.content(len);
        fs.write(id, at as u64, &piece).unwrap();
        content[at..at + piece.len()].copy_from_slice(&piece);
        match rng.below(12) {
            0 => fs.fsync(id, false).unwrap(),
            1 => {
                number += 1;
                fs.snapshot(RootId::FS_TREE, TOP, format!("of-disturbed-{number}").as_bytes(), true).unwrap();
            }
            2 => fs.sync().unwrap(),
            _ => {}
        }
    }
    content
}

#[test]
fn block_groups_move_while_others_write() {
    if !capability::kernel_oracle() {
        return;
    }
    let first = Rng::seed_or(1);
    for (seed, mkfs) in [(first, &["-m", "dup"][..]), (first + 1, &["-m", "single", "-n", "4096"])] {
        println!("seed {seed}");
        let image = Image::kernel_made(2 << 30, mkfs).unwrap();
        let mut target = open(of_file(&image)).unwrap();
        let fs = Arc::clone(target.fs());
        let work = fs.create_subvolume(TOP, b"work", &Caller::ROOT).unwrap();
        fs.set_default_subvolume(work.root).unwrap();
        drop(fs);
        target.close().unwrap();
        target = open(of_file(&image)).unwrap();
        let fs = Arc::clone(target.fs());
        let (mut model, mut driver) = (Model::new(), Driver::new(seed, 1 << 17));
        let stop = AtomicBool::new(false);
        let disturbed = std::thread::scope(|scope| {
            let disturber = scope.spawn(|| disturb(&fs, &stop, seed));
            driver.run(&mut model, &mut target, 300).unwrap();
            assert!(move_all(&fs, None, false).unwrap() > 0);
            driver.run(&mut model, &mut target, 200).unwrap();
            move_all(&fs, Some(DUP), true).unwrap();
            driver.run(&mut model, &mut target, 200).unwrap();
            move_all(&fs, Some(SINGLE), true).unwrap();
            move_all(&fs, None, false).unwrap();
            driver.run(&mut model, &mut target, 200).unwrap();
            stop.store(true, Ordering::SeqCst);
            disturber.join().unwrap()
        });
        // The writers may have made a chunk of the old profile meanwhile.
        move_all(&fs, Some(SINGLE), true).unwrap();
        assert!(fs.block_groups().iter().all(|group| !group.flags.contains(DUP)));
        let id = fs.lookup(TOP, b"disturbed").unwrap().id;
        assert!(fs.read(id, 0, disturbed.len()).unwrap() == disturbed, "seed {seed}: the written file differs");
        compare_entries(&model.entries(), &target.walk().unwrap(), Compare::MODEL).unwrap();
        drop(fs);
        target.close().unwrap();
        judge(image.path(), "subvol=work", &[(&model.entries(), Compare::MODEL)]).unwrap();
    }
}

#[test]
fn a_device_shrinks_and_grows_with_its_content() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let mut target = open(of_file(&image)).unwrap();
    let fs = Arc::clone(target.fs());
    let (mut model, mut driver) = (Model::new(), Driver::new(Rng::seed_or(3), 1 << 17));
    driver.run(&mut model, &mut target, 400).unwrap();
    // Move the block groups towards the end, so that shrinking has to move them back.
    for _ in 0..4 {
        move_all(&fs, None, false).unwrap();
    }
    let job = Job::new();
    fs.resize_device(DevId(1), 500 * MIB + 5, &job).unwrap();
    assert_eq!(fs.device_size(DevId(1)).unwrap(), (500 * MIB, 1 << 30));
    let refused = fs.resize_device(DevId(1), 33 * MIB, &Job::new()).unwrap_err();
    assert_eq!(refused.errno(), nospc(), "{refused}");
    assert_eq!(fs.device_size(DevId(1)).unwrap().0, 500 * MIB);
    let missing = fs.resize_device(DevId(1), 4 << 30, &Job::new()).unwrap_err().to_string();
    assert!(missing.contains("device 1 has 1073741824 bytes") && missing.contains("truncate"), "{missing}");
    driver.run(&mut model, &mut target, 100).unwrap();
    drop(fs);
    target.close().unwrap();
    std::fs::File::options().write(true).open(image.path()).unwrap().set_len(500 * MIB).unwrap();
    judge(image.path(), "", &[(&model.entries(), Compare::MODEL)]).unwrap();

    let mut target = open(of_file(&image)).unwrap();
    std::fs::File::options().write(true).open(image.path()).unwrap().set_len(2 << 30).unwrap();
    target.fs().resize_device(DevId(1), 2 << 30, &Job::new()).unwrap();
    assert_eq!(target.fs().device_size(DevId(1)).unwrap(), (2 << 30, 2 << 30));
    driver.run(&mut model, &mut target, 200).unwrap();
    target.close().unwrap();
    judge(image.path(), "", &[(&model.entries(), Compare::MODEL)]).unwrap();
}

fn nospc() -> i32 {
    Error::ItemFull.errno()
}

#[test]
fn a_failed_write_to_the_new_place_keeps_the_old_one() {
    let base: Arc<dyn Device> =
        Arc::new(MediumDevice::new(Medium::formatted(512 * MIB, &MkfsOptions::default()).unwrap()));
    let mut target = open(Arc::clone(&base)).unwrap();
    let (mut model, mut driver) = (Model::new(), Driver::new(Rng::seed_or(4), 1 << 15));
    driver.run(&mut model, &mut target, 150).unwrap();
    target.close().unwrap();
    for number in 0..24 {
        let plan = FaultPlan { write: Some(number * 3), kind: FaultKind::Error, ..FaultPlan::default() };
        let faulty: Arc<FaultDevice> = Arc::new(FaultDevice::new(Arc::clone(&base), plan));
        let target = open(Arc::clone(&faulty) as Arc<dyn Device>).unwrap();
        // Metadata has two copies at first. The moves change it to one copy, then back to two.
        let profile = [None, Some(SINGLE), Some(DUP)][number as usize % 3];
        let moved = move_all(target.fs(), profile, profile.is_some());
        if faulty.faults() > 0 {
            // Either the move failed with an error, or a write to one copy of a DUP chunk failed and was counted.
            println!("fault {number}: {moved:?}");
        }
        let _may_be_read_only = target.close();
        let target = open(Arc::clone(&base)).unwrap();
        assert_eq!(target.fs().read_only(), None);
        compare_entries(&model.entries(), &target.walk().unwrap(), Compare::MODEL).unwrap();
        target.close().unwrap();
    }
}

#[test]
fn moves_survive_power_cuts() {
    let cuts: usize = std::env::var("UBTRFS_CUTS").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let seed = Rng::seed_or(5);
    let device = Arc::new(RecordingDevice::new(Medium::formatted(384 * MIB, &MkfsOptions::default()).unwrap()));
    let mut target = open(Arc::clone(&device) as Arc<dyn Device>).unwrap();
    let (mut model, mut driver) = (Model::new(), Driver::new(seed, 1 << 15));
    driver.run(&mut model, &mut target, 200).unwrap();
    target.fs().sync().unwrap();
    device.mark(1);
    move_all(target.fs(), None, false).unwrap();
    move_all(target.fs(), Some(DUP), true).unwrap();
    target.fs().resize_device(DevId(1), 300 * MIB, &Job::new()).unwrap();
    move_all(target.fs(), Some(SINGLE), true).unwrap();
    target.close().unwrap();
    let (mut rng, flushes) = (Rng::new(seed), device.flush_points());
    let first = device.mark_points(0..1).first().copied().unwrap_or(0);
    let mut points: Vec<usize> = (0..cuts)
        .map(|number| match number % 2 {
            0 => (*rng.pick(&flushes) + rng.index(4)).saturating_sub(1),
            _ => rng.index(device.events() + 1),
        })
        .filter(|point| *point > first)
        .collect();
    points.sort_unstable();
    let mut cuts = device.cuts();
    for point in points {
        let (medium, _) = cuts.cut(point, &mut rng);
        verify(&medium, &model).with_context(|| format!("seed {seed}, cut at {point}")).unwrap();
    }
}

fn verify(medium: &Medium, model: &Model) -> Result<()> {
    check_medium(medium)?;
    let target = open(Arc::new(MediumDevice::new(medium.clone())))?;
    ensure!(target.fs().read_only().is_none());
    compare_entries(&model.entries(), &target.walk()?, Compare::MODEL)?;
    target.close()?;
    Ok(())
}

/// Moves, two resizes, and allocations that fill and empty block groups run at once: nothing lies past the end of the
/// device, each chunk has its block group, and no operation makes another one fail.
#[test]
fn moves_resizes_and_removals_go_together() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(2 << 30, &[]).unwrap();
    let target = open(of_file(&image)).unwrap();
    let fs = Arc::clone(target.fs());
    let seed = Rng::seed_or(7);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mover = scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                for group in fs.block_groups() {
                    let profile = group.flags & BlockGroupFlags::PROFILES;
                    let moved = fs.migrate_block_group(
                        group.start,
                        &Placement { profile: Some(profile), keeps_stripes: false },
                        &Job::new(),
                    );
                    if let Err(error) = moved {
                        let text = error.to_string();
                        let is_expected = ["no space", "there is no block group", "being moved", "being emptied"];
                        assert!(is_expected.iter().any(|part| text.contains(part)), "{text}");
                    }
                }
            }
        });
        let resizer = |sizes: [u64; 2]| {
            let (fs, stop) = (&fs, &stop);
            move || {
                let mut nr_done = 0;
                while !stop.load(Ordering::SeqCst) {
                    for size in sizes {
                        match fs.resize_device(DevId(1), size * MIB, &Job::new()) {
                            Ok(()) => nr_done += 1,
                            Err(error) => assert_eq!(error.errno(), nospc(), "{error}"),
                        }
                    }
                }
                nr_done
            }
        };
        let resizers = [scope.spawn(resizer([1200, 2048])), scope.spawn(resizer([1500, 1800]))];
        let mut rng = Rng::new(seed);
        for round in 0..6 {
            let names: Vec<String> = (0..8).map(|number| format!("{round}-{number}")).collect();
            for name in &names {
                let id = fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
                fs.write(id, 0, &rng.bytes(30 << 20)).unwrap();
            }
            fs.sync().unwrap();
            for name in &names {
                fs.unlink(TOP, name.as_bytes()).unwrap();
            }
            fs.sync().unwrap();
        }
        stop.store(true, Ordering::SeqCst);
        mover.join().unwrap();
        assert!(resizers.into_iter().map(|resizer| resizer.join().unwrap()).sum::<u32>() > 0);
    });
    // Empty block groups past the new end do not prevent the resize.
    fs.resize_device(DevId(1), 700 * MIB, &Job::new()).unwrap();
    drop(fs);
    target.close().unwrap();
    open(of_file(&image)).unwrap().close().unwrap();
    judge(image.path(), "", &[]).unwrap();
}

/// Translations of moved addresses must be dropped when a relocation ends early: the old addresses are reused.
#[test]
fn addresses_are_free_for_other_data_after_a_cancelled_relocation() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(3 << 30, &[]).unwrap();
    let target = open(of_file(&image)).unwrap();
    let fs = Arc::clone(target.fs());
    let mut rng = Rng::new(Rng::seed_or(6));
    let mut write = |name: &str, len: usize| {
        let content = rng.bytes(len);
        let id = fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        fs.write(id, 0, &content).unwrap();
        (id, content)
    };
    let mut files: Vec<_> = (0..7).map(|number| write(&format!("old-{number}"), 40 << 20)).collect();
    fs.sync().unwrap();
    let is_data = |flags: BlockGroupFlags| flags.contains(BlockGroupFlags::DATA);
    let group =
        fs.block_groups().into_iter().filter(|group| is_data(group.flags)).max_by_key(|group| group.used).unwrap();
    let job = Job::new();
    let moved = std::thread::scope(|scope| {
        let relocation = scope.spawn(|| fs.relocate_block_group(group.start, &job));
        while job.progress().done == 0 && !relocation.is_finished() {
            job.wait_for_change(std::time::Duration::from_millis(5));
        }
        job.cancel();
        relocation.join().unwrap()
    });
    println!("{moved:?}, {:?}", job.progress());
    fs.sync().unwrap();
    fs.sync().unwrap();
    files.extend((0..70).map(|number| write(&format!("new-{number}"), 8 << 20)));
    fs.sync().unwrap();
    for (number, (id, content)) in files.iter().enumerate() {
        assert!(fs.read(*id, 0, content.len()).unwrap() == *content, "file {number}");
    }
    drop(fs);
    target.close().unwrap();
    judge(image.path(), "", &[]).unwrap();
}
