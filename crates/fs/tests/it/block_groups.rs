//! Moving block groups without changing their addresses, and resizing devices, during reads, writes, snapshots and
//! fsyncs.
//!
//! Method: random operations with a model, and a thread that writes, while every block group is moved, converted to DUP
//! and back, and the device shrinks and grows. The content does not change, `btrfs check` and `ubtrfs check` are clean,
//! and Linux reads and scrubs everything. The writes of some runs are recorded, and the state after a power cut at many
//! points of the recording is verified. `UBTRFS_SEED` repeats a failure.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::{DevId, Ino, RootId};
use ubtrfs_fs::{Caller, ChunkPlacement, Error, FallocateMode, Fs, InodeId, Job, MountOptions, NewInode};
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

/// Moves all block groups; converts them if a profile is given. Returns the number of bytes copied.
fn move_all(fs: &Fs, profile: Option<BlockGroupFlags>, keeps_stripes: bool) -> Result<u64> {
    let mut copied = 0;
    for group in fs.block_groups() {
        let profile = profile.unwrap_or(group.flags & BlockGroupFlags::PROFILES);
        match fs.migrate_block_group(
            group.start,
            &ChunkPlacement { profile: Some(profile), keeps_stripes },
            &Job::new(),
        ) {
            Ok(moved) => copied += moved.copied_bytes,
            // Another thread's commit removed the group because it was empty.
            Err(error) if error.to_string().contains("there is no block group") => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(copied)
}

/// Writes, fsyncs and snapshots until told to stop. Returns the expected content of the file that it writes.
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
        // The writers may have made a chunk of the old profile during the earlier moves, so convert again.
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
    let ballast = fs.create(TOP, b"ballast", NewInode::file(0o600), &Caller::ROOT).unwrap().id;
    fs.fallocate(ballast, 0, 100 * MIB, FallocateMode::empty()).unwrap();
    let refused = fs.resize_device(DevId(1), 90 * MIB, &Job::new()).unwrap_err();
    assert_eq!(refused.errno(), nospc(), "{refused}");
    assert_eq!(fs.device_size(DevId(1)).unwrap().0, 500 * MIB);
    fs.unlink(TOP, b"ballast").unwrap();
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

/// Shrinking moves the extents that lie past the new end into block groups below the new end. Below the new end, the
/// device has no room for another chunk, but the block groups have free space.
#[test]
fn a_device_shrinks_into_the_free_space_of_its_block_groups() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let target = open(of_file(&image)).unwrap();
    let fs = Arc::clone(target.fs());
    let names: Vec<String> = (0..48).map(|number| format!("file-{number}")).collect();
    for (number, name) in (1..).zip(&names) {
        let id = fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        fs.write(id, 0, &vec![number; 16 << 20]).unwrap();
    }
    fs.sync().unwrap();
    for name in names.iter().skip(1).step_by(4).chain(names.iter().skip(2).step_by(2)) {
        fs.unlink(TOP, name.as_bytes()).unwrap();
    }
    fs.sync().unwrap();
    let data = fs.block_groups().into_iter().filter(|group| group.flags.contains(BlockGroupFlags::DATA));
    let allocated: u64 = data.map(|group| group.len_bytes).sum();
    assert!(allocated > 600 * MIB, "{allocated} bytes in block groups of data");
    let tree = target.walk().unwrap();
    fs.resize_device(DevId(1), 500 * MIB, &Job::new()).unwrap();
    compare_entries(&tree, &target.walk().unwrap(), Compare::MODEL).unwrap();
    drop(fs);
    target.close().unwrap();
    std::fs::File::options().write(true).open(image.path()).unwrap().set_len(500 * MIB).unwrap();
    judge(image.path(), "", &[(&tree, Compare::MODEL)]).unwrap();
}

/// The last block group crosses the new end, and its extents are larger than the free ranges of the others. So they only
/// fit into a smaller chunk in the place that this block group has.
#[test]
fn a_block_group_that_crosses_the_end_makes_room_for_itself() {
    let device = Arc::new(MediumDevice::new(Medium::formatted(1 << 30, &MkfsOptions::default()).unwrap()));
    let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default()).unwrap();
    let data_groups = || -> Vec<u64> {
        let groups = fs.block_groups().into_iter().filter(|group| group.flags.contains(BlockGroupFlags::DATA));
        groups.map(|group| group.len_bytes).collect()
    };
    let mut nr_files = 0_u8;
    let mut write = |mib: usize| {
        let name = format!("f{nr_files}");
        nr_files += 1;
        let id = fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        fs.write(id, 0, &vec![nr_files; mib << 20]).unwrap();
        fs.sync().unwrap();
        id
    };
    let mut small = Vec::new();
    while data_groups().len() < 5 {
        small.push(write(8));
    }
    let large = [write(16), write(16), write(16)];
    // Holes of 8 MiB in all block groups.
    for number in (0..small.len()).step_by(3) {
        fs.unlink(TOP, format!("f{number}").as_bytes()).unwrap();
    }
    fs.sync().unwrap();
    fs.sync().unwrap();
    assert_eq!(data_groups().len(), 5);
    let end = fs.min_device_size(DevId(1)).unwrap() - data_groups().last().unwrap() + 64 * MIB;
    fs.resize_device(DevId(1), end, &Job::new()).unwrap();
    for (number, id) in (small.len()..).zip(large) {
        assert!(fs.read(id, 0, 16 << 20).unwrap().iter().all(|byte| usize::from(*byte) == number + 1));
    }
    fs.close().unwrap();
    check_medium(&device.content()).unwrap();
}

/// After files in the middle of the device were removed, the device can be shrunk to the size that `min_device_size`
/// returns.
#[test]
fn a_device_shrinks_to_the_size_that_is_named() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(2 << 30, &[]).unwrap();
    let target = open(of_file(&image)).unwrap();
    let fs = Arc::clone(target.fs());
    for number in 0..60_u8 {
        let id = fs.create(TOP, format!("file-{number}").as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        fs.write(id, 0, &vec![number; 16 << 20]).unwrap();
    }
    fs.sync().unwrap();
    for number in 13..47_u8 {
        fs.unlink(TOP, format!("file-{number}").as_bytes()).unwrap();
    }
    fs.sync().unwrap();
    let tree = target.walk().unwrap();
    let least = fs.min_device_size(DevId(1)).unwrap();
    let allocated = |fs: &Fs| fs.space_usage().devices[0].allocated;
    assert!(least >= allocated(&fs) && least < 1800 * MIB, "{least}");
    fs.resize_device(DevId(1), least, &Job::new()).unwrap();
    assert_eq!(fs.device_size(DevId(1)).unwrap().0, least);
    compare_entries(&tree, &target.walk().unwrap(), Compare::MODEL).unwrap();
    assert!(fs.min_device_size(DevId(7)).is_err());
    drop(fs);
    target.close().unwrap();
    judge(image.path(), "", &[(&tree, Compare::MODEL)]).unwrap();
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
        // Metadata has two copies at first. The moves keep the profiles, convert all block groups to one copy, or
        // convert all to two.
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
/// device, each chunk has its block group, and moves and resizes fail only for lack of space or because another
/// operation moves or removes the block group.
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
                        &ChunkPlacement { profile: Some(profile), keeps_stripes: false },
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

/// A device that lets another thread begin a commit when a large part of the first copy of a chunk is read. The read
/// waits until the commit has written some of its blocks to the first copy. The commit's writes to the second copy, and
/// its further writes to the first copy, are delayed for a moment.
#[derive(Debug)]
struct HoldingDevice {
    inner: Arc<dyn Device>,
    stage: Mutex<Stage>,
    changed: Condvar,
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    Off,
    /// The next large read of the first copy begins the commit. The two ranges are the two copies of the chunk.
    Armed([Range<u64>; 2]),
    /// The commit begins, and has written this number of runs of blocks to the first copy.
    Commit([Range<u64>; 2], u64),
    Held,
}

impl HoldingDevice {
    fn new(inner: Arc<dyn Device>) -> Self {
        Self { inner, stage: Mutex::new(Stage::Off), changed: Condvar::new() }
    }

    fn set(&self, stage: Stage) {
        *self.stage.lock().unwrap() = stage;
        self.changed.notify_all();
    }

    fn wait_until(&self, is_reached: impl Fn(&Stage) -> bool) {
        let stage = self.stage.lock().unwrap();
        let limit = Duration::from_secs(20);
        let (_stage, timeout) = self.changed.wait_timeout_while(stage, limit, |stage| !is_reached(stage)).unwrap();
        assert!(!timeout.timed_out(), "the other thread did not come");
    }
}

impl Device for HoldingDevice {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        let is_large = buf.len() > 64 << 10;
        let mut stage = self.stage.lock().unwrap();
        if let Stage::Armed(copies) = &*stage
            && copies[0].contains(&offset)
            && is_large
        {
            *stage = Stage::Commit(copies.clone(), 0);
            self.changed.notify_all();
        }
        let waits = matches!(&*stage, Stage::Commit(..)) && is_large;
        drop(stage);
        if waits {
            self.wait_until(|stage| *stage == Stage::Held);
        }
        self.inner.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> std::io::Result<()> {
        let mut is_held = false;
        let mut stage = self.stage.lock().unwrap();
        if let Stage::Commit(copies, nr_written) = &mut *stage {
            if copies[0].contains(&offset) {
                *nr_written += 1;
                is_held = *nr_written > 1;
            } else if copies[1].contains(&offset) {
                is_held = true;
                *stage = Stage::Held;
                self.changed.notify_all();
            }
        }
        drop(stage);
        if is_held {
            std::thread::sleep(Duration::from_millis(500));
        }
        self.inner.write_at(offset, buf)
    }

    fn flush(&self) -> std::io::Result<()> {
        self.inner.flush()
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> std::io::Result<()> {
        self.inner.discard(offset, len_bytes)
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }
}

/// While a commit writes tree blocks, the copies of their chunk differ, and some blocks that the extent tree lists are
/// not on the device yet. A conversion that reads the chunk at that time must not report damage.
#[test]
fn a_commit_beside_a_conversion_to_single_is_no_damage() {
    let medium =
        Medium::formatted(1 << 30, &MkfsOptions { nodesize: 4096, metadata_profile: DUP, ..MkfsOptions::default() })
            .unwrap();
    let medium = Arc::new(MediumDevice::new(medium));
    let device = Arc::new(HoldingDevice::new(Arc::clone(&medium) as Arc<dyn Device>));
    let target = open(Arc::clone(&device) as Arc<dyn Device>).unwrap();
    let fs = Arc::clone(target.fs());
    let create = |round: usize, number: usize| {
        let name = format!("{}-{round}-{number}", "x".repeat(200));
        fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap();
    };
    let unlink = |round: usize, number: usize| {
        fs.unlink(TOP, format!("{}-{round}-{number}", "x".repeat(200)).as_bytes()).unwrap();
    };
    // Make tree blocks that take more space than one step of a migration copies, with free gaps between them.
    (0..24_000).for_each(|number| create(0, number));
    fs.sync().unwrap();
    for round in 0..7 {
        (0..24_000).filter(|number| number % 50 == round).for_each(|number| unlink(0, number));
        fs.sync().unwrap();
    }
    // Make so few changes that the commit writes all its blocks at its end, when the extent tree lists them already.
    (0..24_000).filter(|number| number % 1000 == 7).for_each(|number| unlink(0, number));
    let group = fs
        .block_groups()
        .into_iter()
        .filter(|group| group.flags.contains(BlockGroupFlags::METADATA))
        .max_by_key(|group| group.used)
        .unwrap();
    assert!(group.used > 8 * MIB, "{group:?}");
    let chunk = fs.chunk_at(group.start).unwrap();
    let copies = [0, 1].map(|copy| {
        let start = chunk.stripes[copy].offset.0;
        start..start + chunk.length
    });
    std::thread::scope(|scope| {
        let committer = scope.spawn(|| {
            device.wait_until(|stage| matches!(stage, Stage::Commit(..)));
            fs.sync()
        });
        device.set(Stage::Armed(copies));
        let placement = ChunkPlacement { profile: Some(SINGLE), keeps_stripes: true };
        let moved = fs.migrate_block_group(group.start, &placement, &Job::new());
        assert!(moved.unwrap().has_changed);
        committer.join().unwrap().unwrap();
    });
    assert_eq!(*device.stage.lock().unwrap(), Stage::Held);
    let errors: Vec<u64> = fs.device_stats().into_iter().flat_map(|(_, stats)| stats.values).collect();
    assert!(errors.iter().all(|count| *count == 0), "{errors:?}");
    drop(fs);
    target.close().unwrap();
    check_medium(&medium.content()).unwrap();
}
