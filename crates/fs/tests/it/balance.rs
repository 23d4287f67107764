//! Balances that run while threads write, read, snapshot and delete, and balances that ubtrfs and Linux stop and
//! resume.
//!
//! Method: the reference model predicts the content of one subvolume, and other threads check their own files, while
//! block groups are emptied at random. Linux and ubtrfs resume each other's paused balances. `UBTRFS_SEED` repeats a
//! failure.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_error::Error as EngineError;
use ubtrfs_format::item::{BalanceArgs, BalanceFilters, BalanceFlags, BalanceItem, BlockGroupFlags};
use ubtrfs_format::{DevId, Ino, Logical, RootId};
use ubtrfs_fs::{Caller, Error, Fs, InodeId, Job, MountOptions, NewInode};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    Compare, Driver, FsTarget, Image, KernelImage, KernelImageSpec, LoopMount, Medium, MediumDevice, Model, Rng,
    TreeEntry, btrfs_check, capability, check_medium, check_quotas, compare_entries, judge, run, second_opinion,
    walk_fs, walk_path,
};

use crate::common::open;

const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };
const ALL: u64 = BalanceFlags::DATA.union(BalanceFlags::METADATA).union(BalanceFlags::SYSTEM).bits();

fn item(flags: u64, args: BalanceArgs) -> BalanceItem {
    BalanceItem { flags, data: args.clone(), metadata: args.clone(), system: args, unused: [0; 4] }
}

/// A new filesystem has block groups that are shorter than those that are made later.
#[test]
fn a_full_balance_gives_no_kind_of_space_more_than_it_had() {
    const LEN: u64 = 4 << 30;
    let device = Arc::new(MediumDevice::new(Medium::formatted(LEN, &MkfsOptions::default()).unwrap()));
    let fs =
        Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::parse("commit=300").unwrap()).unwrap();
    for number in 0..4 {
        let name = format!("file-{number}");
        let id = fs.create(TOP, name.as_bytes(), NewInode::file(0o600), &Caller::ROOT).unwrap().id;
        for piece in 0..20 {
            fs.write(id, piece << 20, &vec![number; 1 << 20]).unwrap();
        }
    }
    fs.sync().unwrap();
    let totals = || {
        let mut totals = std::collections::BTreeMap::new();
        for group in fs.block_groups() {
            *totals.entry(group.flags.bits()).or_insert(0) += group.len_bytes;
        }
        totals
    };
    let before = totals();
    for _ in 0..2 {
        fs.balance(item(ALL, BalanceArgs::NONE), &Job::new()).unwrap();
        let after = totals();
        assert!(after.iter().all(|(kind, bytes)| *bytes <= before[kind]), "{before:?} {after:?}");
    }
    fs.close().unwrap();
    check_medium(&device.content()).unwrap();
}

/// Empties random block groups until told to stop.
fn empty_at_random(fs: &Fs, seed: u64, stop: &AtomicBool, nr_emptied: &AtomicU64) {
    let mut rng = Rng::new(seed);
    while !stop.load(Ordering::Acquire) {
        let group = *rng.pick(&fs.block_groups());
        match fs.relocate_block_group(group.start, &Job::new()) {
            Ok(report) => {
                assert!(report.failures.is_empty(), "group {}: {:?}", group.start, report.failures);
                nr_emptied.fetch_add(1, Ordering::Relaxed);
            }
            // The group was removed because it was empty.
            Err(error) if error.to_string().contains("there is no block group") => {}
            Err(error) => panic!("group {} {:?}: {error}", group.start, group.flags),
        }
    }
}

/// Rewrites parts of a file, sometimes with an fsync, and compares the whole content after each write.
fn rewrite(fs: &Fs, dir: InodeId, name: &str, seed: u64, stop: &AtomicBool) {
    let mut rng = Rng::new(seed);
    let id = fs.create(dir, name.as_bytes(), NewInode::file(0o600), &Caller::ROOT).unwrap().id;
    let mut content = vec![0; 1 << 20];
    fs.write(id, 0, &content).unwrap();
    while !stop.load(Ordering::Acquire) {
        let start = rng.index(content.len() - 1);
        let len = 1 + rng.index((content.len() - start).min(100_000));
        let byte = rng.below(256) as u8;
        content[start..start + len].fill(byte);
        fs.write(id, start as u64, &content[start..start + len]).unwrap();
        if rng.one_in(4) {
            fs.fsync(id, false).unwrap();
        }
        let mut found = vec![0; content.len()];
        fs.read_into(id, 0, &mut found).unwrap();
        assert!(found == content, "{name} changed under its writer");
    }
}

fn round(seed: u64) -> Result<()> {
    let mut rng = Rng::new(seed);
    let mkfs = MkfsOptions { nodesize: if rng.one_in(2) { 16_384 } else { 4096 }, ..MkfsOptions::default() };
    let device = Arc::new(MediumDevice::new(Medium::formatted(768 << 20, &mkfs)?));
    let as_device = Arc::clone(&device) as Arc<dyn Device>;
    let options = if rng.one_in(3) { "commit=1,compress=zstd" } else { "commit=1" };
    let fs = FsTarget::on_device(Arc::clone(&as_device), MountOptions::parse(options)?)?;
    let work = fs.fs().create_subvolume(TOP, b"work", &Caller::ROOT)?;
    fs.fs().set_default_subvolume(work.root)?;
    fs.close()?;
    let mut target = FsTarget::on_device(as_device, MountOptions::parse(options)?)?;
    let fs: Arc<Fs> = Arc::clone(target.fs());
    let (mut model, mut driver) = (Model::new(), Driver::new(seed, 1 << 17));
    let (stop, nr_emptied) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut snapshots: Vec<(String, Vec<TreeEntry>)> = Vec::new();
    let others = fs.create_subvolume(TOP, b"others", &Caller::ROOT)?;
    let done: Result<()> = std::thread::scope(|scope| {
        let (fs, stop, nr_emptied) = (&fs, &stop, &nr_emptied);
        scope.spawn(move || empty_at_random(fs, seed, stop, nr_emptied));
        for number in 0..2 {
            scope.spawn(move || rewrite(fs, others, &format!("file-{number}"), seed + number, stop));
        }
        let done = (|| {
            for number in 0..30 {
                driver.run(&mut model, &mut target, 60)?;
                if rng.one_in(3) {
                    let name = format!("snapshot-{number}");
                    fs.snapshot(work.root, TOP, name.as_bytes(), rng.one_in(2))?;
                    snapshots.push((name, model.entries()));
                } else if rng.one_in(3) && !snapshots.is_empty() {
                    let (name, _) = snapshots.swap_remove(rng.index(snapshots.len()));
                    fs.delete_subvolume(TOP, name.as_bytes(), None)?;
                } else if rng.one_in(3) {
                    fs.snapshot(others.root, TOP, format!("others-{number}").as_bytes(), false)?;
                }
            }
            Ok(())
        })();
        stop.store(true, Ordering::Release);
        done
    });
    done?;
    compare_entries(&model.entries(), &target.walk()?, Compare::MODEL)?;
    drop(fs);
    target.close()?;
    println!("seed {seed}: {} block groups emptied", nr_emptied.load(Ordering::Relaxed));
    check_medium(&device.content())?;
    for (name, entries) in &snapshots {
        let target = FsTarget::on_device(
            Arc::new(MediumDevice::new(device.content())),
            MountOptions::parse(&format!("ro,subvol={name}"))?,
        )?;
        compare_entries(entries, &target.walk()?, Compare::MODEL).with_context(|| name.clone())?;
        target.close()?;
    }
    if capability::kernel_oracle() {
        let image = tempfile::NamedTempFile::new()?;
        device.content().save(image.path())?;
        btrfs_check(image.path())?;
        judge(image.path(), "", &[])?;
    }
    ensure!(nr_emptied.load(Ordering::Relaxed) > 0, "no block group was emptied");
    Ok(())
}

#[test]
fn block_groups_are_emptied_amid_writers_and_snapshots() {
    let rounds: u64 = std::env::var("UBTRFS_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3);
    let first = Rng::seed_or(1);
    for seed in first..first + rounds {
        round(seed).with_context(|| format!("UBTRFS_SEED={seed}")).unwrap();
    }
}

/// An image with data in several block groups.
fn filled() -> KernelImage {
    let made = KernelImage::rich(KernelImageSpec { len_bytes: 2 << 30, ..KernelImageSpec::DEFAULT }, 1).unwrap();
    let fs = open(&made.image, "");
    let mut rng = Rng::new(1);
    for number in 0..24 {
        let id =
            fs.create(TOP, format!("filler-{number}").as_bytes(), NewInode::file(0o600), &Caller::ROOT).unwrap().id;
        let content: Vec<u8> = (0..16 << 20).map(|_| rng.below(256) as u8).collect();
        fs.write(id, 0, &content).unwrap();
    }
    fs.close().unwrap();
    made
}

fn entries_of_linux(image: &Image, options: &str) -> Vec<TreeEntry> {
    let mount = LoopMount::new(image.path(), options).unwrap();
    let entries = walk_path(mount.path()).unwrap();
    mount.close().unwrap();
    entries
}

#[test]
fn a_balance_is_paused_and_resumed_here_and_by_linux() {
    if !capability::kernel_oracle() {
        return;
    }
    let made = filled();
    let before = entries_of_linux(&made.image, "ro");
    let fs = open(&made.image, "");
    assert_eq!(fs.balance_status(), None);
    assert!(matches!(fs.pause_balance(), Err(Error::NotRunning(_))));
    assert!(matches!(fs.resume_balance(&Job::new()), Err(Error::NotRunning(_))));
    std::thread::scope(|scope| {
        let running = scope.spawn(|| fs.balance(item(ALL, BalanceArgs::NONE), &Job::new()));
        while fs.balance_status().is_none_or(|status| status.counts.completed == 0) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(matches!(fs.balance(item(ALL, BalanceArgs::NONE), &Job::new()), Err(Error::InProgress(_))));
        fs.pause_balance().unwrap();
        assert!(running.join().unwrap().is_err());
    });
    assert!(fs.balance_status().is_some_and(|status| !status.is_running && status.counts.completed > 0));
    fs.close().unwrap();
    drop(fs);
    second_opinion(made.image.path()).unwrap();
    btrfs_check(made.image.path()).unwrap();
    let fs = open(&made.image, "ro");
    assert!(fs.balance_status().is_some_and(|status| !status.is_running), "a paused balance is shown without writing");
    drop(fs);
    // Linux mounts the image without resuming the balance that ubtrfs paused, then resumes the balance and pauses it
    // again. Afterwards ubtrfs resumes it.
    let mount = LoopMount::new(made.image.path(), "skip_balance").unwrap();
    let path = mount.path().to_string_lossy().into_owned();
    let status = run("btrfs", ["balance", "status", "-v", &path]);
    println!("{status:?}");
    std::thread::scope(|scope| {
        let resumed = scope.spawn(|| run("btrfs", ["balance", "resume", &path]));
        for _ in 0..1000 {
            if run("btrfs", ["balance", "pause", &path]).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = resumed.join().unwrap();
    });
    mount.close().unwrap();
    let fs = open(&made.image, "");
    if fs.balance_status().is_some() {
        let report = fs.resume_balance(&Job::new()).unwrap();
        println!("resumed from Linux: {:?}", report.counts);
    }
    assert_eq!(fs.balance_status(), None);
    // Convert to DUP, to one copy, and to DUP again.
    for profile in [BlockGroupFlags::DUP.bits(), BalanceArgs::SINGLE, BlockGroupFlags::DUP.bits()] {
        let filters = BalanceFilters::CONVERT | BalanceFilters::SOFT;
        let args = BalanceArgs { flags: filters.bits(), target: profile, ..BalanceArgs::NONE };
        let forced = ALL | BalanceFlags::FORCE.bits();
        let report = fs.balance(item(forced, args), &Job::new()).unwrap();
        assert!(report.failures.is_empty() && report.counts.migrated == report.counts.completed, "{:?}", report.counts);
        let dup = profile == BlockGroupFlags::DUP.bits();
        let profiles: Vec<_> = fs.block_groups().iter().map(|group| group.flags).collect();
        assert!(profiles.iter().all(|flags| flags.contains(BlockGroupFlags::DUP) == dup), "{profiles:?}");
    }
    fs.close().unwrap();
    drop(fs);
    second_opinion(made.image.path()).unwrap();
    judge(made.image.path(), "", &[(&before, Compare::ALL)]).unwrap();
}

/// A balance that converts the block groups of the types in `flags`.
fn conversion(flags: u64, profile: u64) -> BalanceItem {
    let args = BalanceArgs { flags: BalanceFilters::CONVERT.bits(), target: profile, ..BalanceArgs::NONE };
    item(flags | BalanceFlags::FORCE.bits(), args)
}

/// Start addresses of the block groups of these types that have another profile.
fn of_other_profiles(fs: &Fs, flags: u64, profile: u64) -> Vec<Logical> {
    let is_other = |group: BlockGroupFlags| {
        let found = (group & BlockGroupFlags::PROFILES).bits();
        group.bits() & flags != 0 && found != if profile == BalanceArgs::SINGLE { 0 } else { profile }
    };
    fs.block_groups().iter().filter(|group| is_other(group.flags)).map(|group| group.start).collect()
}

/// Writes a file of `len_mib` MiB to disk, in the top level.
fn write_file(fs: &Fs, name: &str, len_mib: usize) -> InodeId {
    write_file_in(fs, TOP, name, len_mib)
}

fn write_file_in(fs: &Fs, dir: InodeId, name: &str, len_mib: usize) -> InodeId {
    let id = fs.create(dir, name.as_bytes(), NewInode::file(0o600), &Caller::ROOT).unwrap().id;
    for at in 0..len_mib {
        fs.write(id, (at as u64) << 20, &vec![at as u8; 1 << 20]).unwrap();
    }
    fs.fsync(id, false).unwrap();
    id
}

/// Writes files until a chunk of data is made, and returns the profile of the chunk.
fn profile_of_new_chunk(fs: &Fs, name: &str) -> BlockGroupFlags {
    let data = || fs.block_groups().into_iter().filter(|group| group.flags.contains(BlockGroupFlags::DATA));
    let before: Vec<Logical> = data().map(|group| group.start).collect();
    for number in 0.. {
        write_file(fs, &format!("{name}-{number}"), 16);
        if let Some(made) = data().find(|group| !before.contains(&group.start)) {
            return made.flags & BlockGroupFlags::PROFILES;
        }
    }
    unreachable!("the devices are full first");
}

#[test]
fn a_conversion_of_a_nearly_full_array_converts_metadata_and_all_data_that_fits() {
    let devices: Vec<_> = (0..2).map(|_| Arc::new(MediumDevice::new(Medium::zeros(100 << 20)))).collect();
    let refs: Vec<&dyn Device> = devices.iter().map(|device| &**device as &dyn Device).collect();
    let single = BlockGroupFlags::empty();
    let options = MkfsOptions { data_profile: single, metadata_profile: single, ..MkfsOptions::default() };
    ubtrfs_mkfs::make_array(&refs, &options).unwrap();
    let given = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
    let fs = Fs::open(given, MountOptions::default()).unwrap();
    // As raid1, about 99 MiB fit.
    write_file(&fs, "file", 88);
    let report = fs.balance(conversion(ALL, BlockGroupFlags::RAID1.bits()), &Job::new()).unwrap();
    let left = |flags: BalanceFlags| of_other_profiles(&fs, flags.bits(), BlockGroupFlags::RAID1.bits());
    assert_eq!(left(BalanceFlags::METADATA | BalanceFlags::SYSTEM), [], "{report:?}");
    assert_eq!(left(BalanceFlags::DATA).len() as u64, report.counts.without_space, "{report:?}");
    assert_eq!(report.counts.failed, report.counts.without_space, "{report:?}");
    let id = fs.lookup(TOP, b"file").unwrap().id;
    for at in [0_u8, 44, 87] {
        assert_eq!(fs.read(id, u64::from(at) << 20, 1 << 20).unwrap(), vec![at; 1 << 20]);
    }
    fs.close().unwrap();
}

#[test]
fn chunks_made_while_a_conversion_is_paused_have_its_target_profile() {
    const DATA: u64 = BalanceFlags::DATA.bits();
    const DUP: u64 = BlockGroupFlags::DUP.bits();
    let device = Arc::new(MediumDevice::new(Medium::formatted(2 << 30, &MkfsOptions::default()).unwrap()));
    let open = |options: &str| {
        let device: Arc<dyn Device> = Arc::clone(&device) as _;
        Fs::open(vec![device], MountOptions::parse(options).unwrap()).unwrap()
    };
    let fs = open("");
    for number in 0..4 {
        write_file(&fs, &format!("first-{number}"), 100);
    }
    assert_eq!(profile_of_new_chunk(&fs, "single"), BlockGroupFlags::empty());
    let is_paused = (0..1000).any(|_| {
        std::thread::scope(|scope| {
            let running = scope.spawn(|| fs.balance(conversion(DATA, DUP), &Job::new()));
            while fs.pause_balance().is_err() && !running.is_finished() {}
            let _ = running.join().unwrap();
        });
        if fs.balance_status().is_none() {
            fs.balance(conversion(DATA, BalanceArgs::SINGLE), &Job::new()).unwrap();
        }
        fs.balance_status().is_some()
    });
    assert!(is_paused, "no conversion could be paused");
    assert_eq!(profile_of_new_chunk(&fs, "paused"), BlockGroupFlags::DUP);
    fs.close().unwrap();
    drop(fs);
    // Another mount finds the paused conversion.
    let fs = open("skip_balance");
    // Linux would make new metadata chunks with the target profile of these filters, and may have no room for them.
    let item = fs.balance_status().unwrap().item;
    assert_eq!((item.metadata, item.system), (BalanceArgs::NONE, BalanceArgs::NONE), "types that are left out");
    assert_eq!(profile_of_new_chunk(&fs, "mounted"), BlockGroupFlags::DUP);
    fs.resume_balance(&Job::new()).unwrap();
    assert_eq!(of_other_profiles(&fs, DATA, DUP), []);
    // After the end of the conversion, new chunks have the profile of existing block groups.
    fs.balance(conversion(DATA, BalanceArgs::SINGLE), &Job::new()).unwrap();
    assert_eq!(of_other_profiles(&fs, DATA, BalanceArgs::SINGLE), []);
    assert_eq!(profile_of_new_chunk(&fs, "ended"), BlockGroupFlags::empty());
    fs.close().unwrap();
    check_medium(&device.content()).unwrap();
}

/// Used bytes of data block groups.
fn data_bytes(fs: &Fs) -> u64 {
    fs.block_groups().iter().filter(|group| group.flags.contains(BlockGroupFlags::DATA)).map(|group| group.used).sum()
}

/// Writes and removes files, so that chunks of data and metadata are made, until told to stop.
fn fill_and_empty(fs: &Fs, seed: u64, stop: &AtomicBool) {
    let mut rng = Rng::new(seed);
    let mut names: Vec<String> = Vec::new();
    for number in 0.. {
        if stop.load(Ordering::Acquire) {
            return;
        }
        let name = format!("fill-{seed}-{number}");
        if rng.one_in(3) {
            for part in 0..500 {
                let name = format!("{name}-{part}-{}", "x".repeat(100));
                let id = fs.create(TOP, name.as_bytes(), NewInode::file(0o600), &Caller::ROOT).unwrap().id;
                fs.write(id, 0, &[1; 1500]).unwrap();
                names.push(name);
            }
        } else {
            write_file(fs, &name, 1 + rng.index(24));
            names.push(name);
        }
        if names.len() > 12_000 || data_bytes(fs) > 500 << 20 {
            for name in names.drain(..) {
                fs.unlink(TOP, name.as_bytes()).unwrap();
            }
            fs.sync().unwrap();
        }
    }
}

fn conversion_round(seed: u64) -> Result<()> {
    let mut rng = Rng::new(seed);
    let mixed = rng.one_in(4);
    let nodesize = if mixed || rng.one_in(2) { 4096 } else { 16_384 };
    let mut mkfs = MkfsOptions { nodesize, mixed, ..MkfsOptions::default() };
    if mixed {
        mkfs.metadata_profile = mkfs.data_profile;
    }
    let device = Arc::new(MediumDevice::new(Medium::formatted(2 << 30, &mkfs)?));
    let as_device = Arc::clone(&device) as Arc<dyn Device>;
    let fs = Fs::open(vec![as_device], MountOptions::parse("commit=1")?)?;
    let stop = AtomicBool::new(false);
    let done: Result<()> = std::thread::scope(|scope| {
        let (fs, stop) = (&fs, &stop);
        for number in 0..2 {
            scope.spawn(move || fill_and_empty(fs, seed + number, stop));
        }
        scope.spawn(move || rewrite(fs, TOP, "rewritten", seed, stop));
        scope.spawn(move || {
            // The resizes and the balance compete for block groups.
            for step in 0.. {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                let len = (2 << 30) - (u64::from(step % 2 == 0) * (200 << 20));
                match fs.resize_device(DevId(1), len, &Job::new()) {
                    Ok(()) | Err(Error::Engine(EngineError::NoSpace)) => {}
                    Err(error) => panic!("resize to {len}: {error}"),
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let done = (|| {
            for number in 0..8 {
                std::thread::sleep(Duration::from_millis(rng.below(200)));
                let profile = if number % 2 == 0 { BlockGroupFlags::DUP.bits() } else { BalanceArgs::SINGLE };
                let kinds = *rng.pick(&[ALL, BalanceFlags::DATA.bits(), ALL & !BalanceFlags::DATA.bits()]);
                let kinds = if mixed { ALL } else { kinds };
                let report = fs.balance(conversion(kinds, profile), &Job::new())?;
                ensure!(report.failures.is_empty(), "{:?}", report.failures);
                if report.counts.without_space == 0 {
                    let left = of_other_profiles(fs, kinds, profile);
                    // A chunk that is made after the end of the conversion has the profile of the existing block
                    // groups, so no block group of another profile is left.
                    ensure!(left.is_empty(), "conversion {number} to {profile:#x} left {left:?}: {:?}", report.counts);
                }
            }
            Ok(())
        })();
        stop.store(true, Ordering::Release);
        done
    });
    done?;
    fs.close()?;
    drop(fs);
    check_medium(&device.content())?;
    if capability::kernel_oracle() {
        let image = tempfile::NamedTempFile::new()?;
        device.content().save(image.path())?;
        btrfs_check(image.path())?;
        judge(image.path(), "", &[])?;
    }
    Ok(())
}

#[test]
fn a_conversion_beside_writers_leaves_one_profile() {
    let rounds: u64 = std::env::var("UBTRFS_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2);
    let first = Rng::seed_or(1);
    for seed in first..first + rounds {
        conversion_round(seed).with_context(|| format!("UBTRFS_SEED={seed}")).unwrap();
    }
}

/// The number of items of the root tree whose keys begin with this text.
fn nr_root_items(image: &Path, key: &str) -> usize {
    let text = run("btrfs", ["inspect-internal", "dump-tree", "-t", "root", &image.to_string_lossy()]).unwrap();
    text.lines().filter(|line| line.contains(&format!("key ({key} "))).count()
}

/// The number of trees of an unfinished relocation by Linux.
fn nr_reloc_trees(image: &Path) -> usize {
    nr_root_items(image, "TREE_RELOC ROOT_ITEM")
}

/// Makes a filesystem with snapshots and quotas, and copies its image while Linux balances all block groups. Returns
/// the entries of the filesystem, and the copies. Each copy is the state that a crash of Linux would leave. The image
/// is a file in an outer filesystem, which is frozen for each copy: this stops every write to the image at once.
/// Freezing the filesystem in the image would wait for the balance. `UBTRFS_ROUNDS` is the number of copies with
/// relocation trees.
fn crashes_of_a_balance_in_linux() -> (Vec<TreeEntry>, Vec<tempfile::NamedTempFile>) {
    let outer = Image::kernel_made(4 << 30, &[]).unwrap();
    let outer = LoopMount::new(outer.path(), "").unwrap();
    let outer_at = outer.path().to_string_lossy().into_owned();
    let image = outer.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(2 << 30).unwrap();
    run("mkfs.btrfs", ["-q", "-n", "4096", &*image.to_string_lossy()]).unwrap();
    let mount = LoopMount::new(&image, "").unwrap();
    let at = mount.path().to_string_lossy().into_owned();
    let script = "btrfs -q subvolume create a; head -c 60M /dev/urandom > a/big
        for d in $(seq 30); do mkdir a/d$d; for f in $(seq 300); do echo $d$f > a/d$d/f$f; done; done
        for f in $(seq 100); do head -c 20000 /dev/urandom > a/e$f; done
        for s in $(seq 10); do btrfs -q subvolume snapshot a s$s; echo x > s$s/new; rm s$s/d$s/f1; done";
    run("bash", ["-ec", &format!("cd {at} && {script}")]).unwrap();
    mount.enable_quota().unwrap();
    let before = walk_path(mount.path()).unwrap();
    let (mut copies, mut nr_with, mut nr_without) = (Vec::new(), 0, 0);
    let nr_wanted = std::env::var("UBTRFS_ROUNDS").map_or(2, |rounds| rounds.parse().unwrap());
    for _ in 0..12 {
        if nr_with >= nr_wanted && nr_without > 0 {
            break;
        }
        std::thread::scope(|scope| {
            let balance = scope.spawn(|| run("btrfs", ["balance", "start", "--full-balance", &at]));
            while !balance.is_finished() && (nr_with < nr_wanted || nr_without == 0) {
                std::thread::sleep(Duration::from_millis(10));
                let copy = tempfile::NamedTempFile::new().unwrap();
                run("fsfreeze", ["-f", &outer_at]).unwrap();
                let copied = run("cp", [&*image.to_string_lossy(), "--sparse=always", &*copy.path().to_string_lossy()]);
                run("fsfreeze", ["-u", &outer_at]).unwrap();
                copied.unwrap();
                // Keep copies with and without reloc trees.
                if nr_reloc_trees(copy.path()) > 0 {
                    if nr_with < nr_wanted {
                        nr_with += 1;
                        copies.push(copy);
                    }
                } else if nr_without < 2 && nr_root_items(copy.path(), "BALANCE") > 0 {
                    nr_without += 1;
                    copies.push(copy);
                }
            }
            balance.join().unwrap().unwrap();
        });
    }
    mount.close().unwrap();
    println!("{nr_with} copies with reloc trees, {nr_without} without");
    (before, copies)
}

/// Tries to resume the balance of a copy. Returns true if it was resumed, false if ubtrfs refused because Linux left
/// relocation trees, and `None` if there is no balance.
fn resumed_or_refused(fs: &Fs, number: usize, has_trees: bool) -> Option<bool> {
    if has_trees && fs.balance_status().is_some() {
        let said = fs.cancel_balance().unwrap_err().to_string();
        assert!(said.contains("mount the filesystem with Linux once"), "copy {number}: {said}");
        assert!(fs.balance_status().is_some(), "copy {number}");
    }
    if fs.balance_status().is_some() {
        match fs.resume_balance(&Job::new()) {
            Ok(report) => {
                assert!(!has_trees && report.failures.is_empty(), "copy {number}: {:?}", report.counts);
                return Some(true);
            }
            Err(error) => {
                let said = error.to_string();
                assert!(has_trees && said.contains("mount the filesystem with Linux once"), "copy {number}: {said}");
                assert!(fs.balance_status().is_some(), "copy {number}");
                return Some(false);
            }
        }
    }
    None
}

/// Judges a copy whose balance was continued: by the checkers, and by Linux, which ends the balance and must find the
/// entries, quotas and data as they were.
fn judge_continued(copy: &Path, number: usize, compare: impl Fn(Vec<TreeEntry>) -> Result<()>) {
    second_opinion(copy).unwrap_or_else(|error| panic!("copy {number}: {error:#}"));
    btrfs_check(copy).unwrap_or_else(|error| panic!("copy {number}: {error:#}"));
    let mount = LoopMount::new(copy, "").unwrap();
    mount.finish_balance().unwrap();
    compare(walk_path(mount.path()).unwrap()).unwrap();
    assert!(mount.judge_quotas().unwrap());
    assert!(mount.kernel_complaints().is_empty(), "copy {number}: {:?}", mount.kernel_complaints());
    mount.scrub().unwrap();
    mount.close().unwrap();
    btrfs_check(copy).unwrap_or_else(|error| panic!("copy {number}: {error:#}"));
    check_quotas(copy).unwrap();
    assert_eq!(nr_reloc_trees(copy), 0, "copy {number}");
}

#[test]
fn a_balance_that_crashed_in_linux_is_resumed_or_left_to_linux() {
    if !capability::kernel_oracle() {
        return;
    }
    let (before, copies) = crashes_of_a_balance_in_linux();
    let (mut nr_resumed, mut nr_refused) = (0, 0);
    for (number, copy) in copies.iter().enumerate() {
        let has_trees = nr_reloc_trees(copy.path()) > 0;
        let device: Arc<dyn Device> = Arc::new(FileDevice::open(copy.path(), Access::ReadWrite).unwrap());
        let fs = Fs::open(vec![device], MountOptions::default()).unwrap();
        assert!(fs.read_only().is_none(), "copy {number}: {:?}", fs.read_only());
        // In half of the copies, the trees change before the balance continues.
        let is_changed = number % 2 == 0;
        if is_changed {
            let dir = fs.lookup(TOP, b"a").unwrap().id;
            write_file_in(&fs, dir, "later", 4);
            fs.unlink(dir, b"later").unwrap();
            fs.snapshot(dir.root, TOP, b"later", false).unwrap();
            fs.delete_subvolume(TOP, b"later", None).unwrap();
            fs.delete_subvolume(TOP, b"s3", None).unwrap();
            fs.finish_deletions(&mut |_| Ok(())).unwrap();
        }
        // The change removes the subvolume `s3`, which also changes the size of the root directory, so neither is
        // compared.
        let is_gone =
            |entry: &TreeEntry| entry.path.is_empty() || entry.path == b"s3" || entry.path.starts_with(b"s3/");
        let is_left = |entry: &&TreeEntry| !is_changed || !is_gone(entry);
        let wanted: Vec<TreeEntry> = before.iter().filter(is_left).cloned().collect();
        let compare = |mut found: Vec<TreeEntry>| {
            assert_eq!(found.iter().any(|entry| entry.path == b"s3"), !is_changed, "copy {number}");
            found.retain(|entry| is_left(&entry));
            compare_entries(&wanted, &found, Compare { root: false, mtime: false, ..Compare::ALL })
        };
        match resumed_or_refused(&fs, number, has_trees) {
            Some(true) => nr_resumed += 1,
            Some(false) => nr_refused += 1,
            None => {}
        }
        compare(walk_fs(&fs).unwrap()).unwrap();
        fs.close().unwrap();
        drop(fs);
        judge_continued(copy.path(), number, compare);
        println!("copy {number} is good; relocation trees: {has_trees}, changed: {is_changed}");
    }
    println!("{nr_resumed} resumed, {nr_refused} refused");
    assert!(nr_resumed > 0 && nr_refused > 0, "{nr_resumed} resumed, {nr_refused} refused");
}

/// As on Linux, a block group is passed over if the extents of others have filled it beyond the filter `usage` since it
/// was chosen.
#[test]
fn a_filter_by_usage_counts_what_has_moved_meanwhile() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    let name = |number: u8| mount.join(format!("file-{number}"));
    (0..24).for_each(|number| std::fs::write(name(number), vec![number; 16 << 20]).unwrap());
    run("sync", ["-f", &mount.path().to_string_lossy()]).unwrap();
    (0..24).step_by(2).for_each(|number| std::fs::remove_file(name(number)).unwrap());
    mount.close().unwrap();
    let fs = open(&image, "");
    let args =
        BalanceArgs { flags: BalanceFilters::USAGE_RANGE.bits(), usage_min: 1, usage_max: 70, ..BalanceArgs::NONE };
    let report = fs.balance(item(BalanceFlags::DATA.bits(), args), &Job::new()).unwrap();
    let (moved, chosen) = (report.counts.completed, report.counts.expected);
    assert!(chosen >= 3 && (1..chosen).contains(&moved), "{moved} of {chosen}: half-full groups fill each other");
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
}
