//! Tests the tree log in both directions: ubtrfs replays logs written by Linux, and Linux and ubtrfs replay logs
//! written by ubtrfs.
//!
//! Method: scripted cases (`cases`) and random operations with fsyncs end in a crash without a commit, simulated by
//! copying the image. Each replay must have the result of Linux's replay, `btrfs check` must then find the filesystem
//! clean, and fsynced changes must exist. Times of directories are not compared, because Linux sets the times of
//! directories to the time of the replay.

mod cases;

use std::path::Path;
use std::sync::Arc;

use cases::{CASES, Case};
use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use ubtrfs_fs::MountOptions;
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    Compare, Driver, FsTarget, Image, LoopMount, Medium, Model, NodeKind, PathTarget, RecordingDevice, Rng, Target,
    TreeEntry, btrfs_check, capability, check_medium, compare_entries, walk_path,
};

const IMAGE_BYTES: u64 = 320 << 20;

/// Returns the entries to compare between two replays, without times of directories.
fn settled(mut entries: Vec<TreeEntry>) -> Vec<TreeEntry> {
    for entry in entries.iter_mut().filter(|entry| entry.kind == NodeKind::Directory) {
        entry.mtime = (0, 0);
    }
    entries
}

fn superblock(image: &Image, mirror: usize) -> Superblock {
    Superblock::decode(&image.read_at(SUPERBLOCK_OFFSETS[mirror], SUPERBLOCK_SIZE).unwrap()).unwrap()
}

fn has_log(image: &Image) -> bool {
    superblock(image, 0).log_root.0 != 0
}

/// Copies the image as a power cut would leave it. Linux writes the first superblock before the mirrors and uses only
/// the first. If the copy was made between these writes, the image is copied again, because ubtrfs also looks at the
/// mirrors.
fn crashed_copy(mounted: &Image) -> Image {
    for _ in 0..20 {
        let copy = Image::copy_of(mounted.path()).unwrap();
        if superblock(&copy, 0).generation == superblock(&copy, 1).generation {
            return copy;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    panic!("Linux commits all the time")
}

fn kernel_walk(image: &Path, what: &str) -> Vec<TreeEntry> {
    let mount = LoopMount::new(image, "").unwrap_or_else(|error| panic!("{what}: {error:#}"));
    let found = walk_path(mount.path()).unwrap_or_else(|error| panic!("{what}: {error:#}\n{}", mount.kernel_log()));
    // Ignore one complaint: because of a harmless bug, Linux 6.18 reads past the end of a leaf when it replays an
    // inline extent at the leaf's end.
    let mut complaints = mount.kernel_complaints();
    complaints.retain(|line| !(line.contains("access to eb bytenr") && line.contains("out of range")));
    assert!(complaints.is_empty(), "{what}: Linux complains:\n{}", complaints.join("\n"));
    mount.close().unwrap();
    settled(found)
}

/// Checks the log and the data that it refers to, replays the crashed image with Linux and with ubtrfs, and compares
/// everything that a user can see. Returns the tree after the replay.
fn replay_both(crashed: &Image, what: &str) -> Vec<TreeEntry> {
    let medium = Medium::from_image(crashed.path()).unwrap();
    check_medium(&medium).unwrap_or_else(|error| panic!("{what}: before the replay: {error:#}"));
    let (by_kernel, ours) = (Image::copy_of(crashed.path()).unwrap(), Image::copy_of(crashed.path()).unwrap());
    let expected = kernel_walk(by_kernel.path(), what);
    btrfs_check(by_kernel.path()).unwrap_or_else(|error| panic!("{what}: after Linux's replay: {error:#}"));

    let digest = ours.digest().unwrap();
    let shown = FsTarget::open(ours.path(), "ro").unwrap_or_else(|error| panic!("{what}: read-only: {error:#}"));
    let in_memory = settled(shown.walk().unwrap_or_else(|error| panic!("{what}: read-only: {error:#}")));
    drop(shown);
    assert_eq!(digest, ours.digest().unwrap(), "{what}: a read-only replay writes nothing");
    let target = FsTarget::open(ours.path(), "").unwrap_or_else(|error| panic!("{what}: {error:#}"));
    let found = settled(target.walk().unwrap_or_else(|error| panic!("{what}: {error:#}")));
    target.close().unwrap();
    assert!(!has_log(&ours), "{what}: the log is gone");
    btrfs_check(ours.path()).unwrap_or_else(|error| panic!("{what}: after our replay: {error:#}"));
    for (found, by) in
        [(found, "our replay"), (in_memory, "our read-only replay"), (kernel_walk(ours.path(), what), "Linux")]
    {
        compare_entries(&expected, &found, Compare::ALL)
            .unwrap_or_else(|error| panic!("{what}: Linux's replay (first) and {by} (second) differ: {error:#}"));
    }
    expected
}

fn check_promises(case: &Case, live: &[TreeEntry], replayed: &[TreeEntry], what: &str) {
    let find = |entries: &[TreeEntry], path: &str| {
        entries.iter().find(|entry| entry.path == path.as_bytes()).cloned().map(|entry| TreeEntry {
            link_group: None,
            // Do not compare the sizes of directories: a directory that was not fsynced is only promised to exist.
            size: if entry.kind == NodeKind::Directory { 0 } else { entry.size },
            ..entry
        })
    };
    for path in case.kept {
        let expected = find(live, path).unwrap_or_else(|| panic!("{what}: {path} was there"));
        let found = find(replayed, path).unwrap_or_else(|| panic!("{what}: {path} is not there"));
        assert_eq!(expected, found, "{what}: {path}");
    }
    for path in case.gone {
        assert!(find(replayed, path).is_none(), "{what}: {path} is still there");
    }
}

fn selected(name: &str) -> bool {
    std::env::var("CASE").map_or(true, |only| name.contains(&only))
}

#[test]
fn logs_of_linux_are_replayed() {
    if !capability::kernel_oracle() {
        return;
    }
    let mut nr_logs = 0;
    for case in CASES.iter().filter(|case| selected(case.name)) {
        let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
        let options = format!("commit=3000{}{}", if case.options.is_empty() { "" } else { "," }, case.options);
        let mount = LoopMount::new(image.path(), &options).unwrap();
        let mut target = PathTarget::new(mount.path());
        (case.before)(&mut target);
        target.sync().unwrap();
        (case.act)(&mut target);
        let crashed = crashed_copy(&image);
        mount.close().unwrap();
        nr_logs += usize::from(has_log(&crashed));
        let what = format!("'{}'", case.name);
        // Do not check the expectations of `cases`, because Linux's logs promise less than ours.
        replay_both(&crashed, &what);
    }
    println!("{nr_logs} of {} images had a log", CASES.len());
}

/// Fsyncs some files and directories of the model on the target.
fn fsync_some(model: &Model, target: &mut dyn Target, rng: &mut Rng, nr: usize) -> Vec<Vec<u8>> {
    let paths: Vec<Vec<u8>> = model
        .entries()
        .into_iter()
        .filter(|entry| matches!(entry.kind, NodeKind::File | NodeKind::Directory))
        .map(|entry| entry.path)
        .collect();
    let picked: Vec<Vec<u8>> = (0..nr.min(paths.len())).map(|_| paths[rng.index(paths.len())].clone()).collect();
    for path in &picked {
        target.fsync(path).unwrap();
    }
    picked
}

#[test]
fn random_logs_of_linux_are_replayed() {
    if !capability::kernel_oracle() {
        return;
    }
    let first = Rng::seed_or(31);
    for seed in first..first + number_from_env("ROUNDS", 3) {
        let what = format!("seed {seed}");
        println!("{what}");
        let mut rng = Rng::new(seed);
        let args: &[&str] = match seed % 4 {
            0 => &["-n", "4096"],
            1 => &["-O", "^no-holes"],
            _ => &[],
        };
        let image = Image::kernel_made(IMAGE_BYTES, args).unwrap();
        let options = if seed % 2 == 0 { "commit=3000" } else { "commit=3000,compress=zstd" };
        let mount = LoopMount::new(image.path(), options).unwrap();
        let mut target = PathTarget::new(mount.path());
        let mut model = Model::new();
        let mut driver = Driver::new(seed, 1 << 18);
        driver.run(&mut model, &mut target, 150).unwrap();
        for _ in 0..6 {
            driver.run(&mut model, &mut target, 25).unwrap();
            fsync_some(&model, &mut target, &mut rng, 4);
        }
        let crashed = crashed_copy(&image);
        mount.close().unwrap();
        replay_both(&crashed, &what);
    }
}

/// Makes an empty filesystem on a recording device.
fn recorded(image: &Image, mkfs: &MkfsOptions) -> Arc<RecordingDevice> {
    let file = FileDevice::open(image.path(), Access::ReadWrite).unwrap();
    ubtrfs_mkfs::make(&file, mkfs).unwrap();
    drop(file);
    Arc::new(RecordingDevice::from_image(image.path()).unwrap())
}

fn open_recorded(device: &Arc<RecordingDevice>, options: &str) -> FsTarget {
    let options = format!("commit=3000{}{options}", if options.is_empty() { "" } else { "," });
    let options = MountOptions::parse(&options).unwrap();
    FsTarget::on_device(Arc::clone(device) as Arc<dyn Device>, options).unwrap()
}

/// Copies the current content of the medium.
fn crash(device: &RecordingDevice) -> Image {
    let image = Image::empty(0).unwrap();
    let outcome = device.cut(device.events(), &mut Rng::new(0), image.path()).unwrap();
    assert_eq!((outcome.dropped, outcome.torn), (0, 0), "what fsync wrote was flushed");
    image
}

#[test]
fn logs_of_ours_are_replayed_by_both() {
    if !capability::kernel_oracle() {
        return;
    }
    let mut nr_logs = 0;
    for case in CASES.iter().filter(|case| selected(case.name)) {
        let what = format!("'{}'", case.name);
        let image = Image::empty(IMAGE_BYTES).unwrap();
        let device = recorded(&image, &MkfsOptions::default());
        let mut target = open_recorded(&device, case.options);
        (case.before)(&mut target);
        target.sync().unwrap();
        let before = target.fs().log_stats();
        (case.act)(&mut target);
        let crashed = crash(&device);
        let live = settled(target.walk().unwrap());
        let stats = target.fs().log_stats();
        target.fs().abort("the power went".to_owned());
        nr_logs += usize::from(has_log(&crashed));
        println!("{what}: {} logs, {} commits", stats.written - before.written, stats.commits - before.commits);
        let replayed = replay_both(&crashed, &what);
        check_promises(case, &live, &replayed, &what);
    }
    println!("{nr_logs} of {} images had a log", CASES.len());
}

/// Checks paths that were fsynced and not changed afterwards: in `replayed`, files are as in `live`, and directories
/// have the entries that they have in `live`.
fn check_fsynced(paths: &[Vec<u8>], live: &[TreeEntry], replayed: &[TreeEntry], what: &str) {
    let find = |entries: &[TreeEntry], path: &[u8]| entries.iter().find(|entry| entry.path == path).cloned();
    let children = |entries: &[TreeEntry], dir: &[u8]| -> Vec<(Vec<u8>, NodeKind)> {
        let parent_of = |path: &[u8]| path.iter().rposition(|&byte| byte == b'/').map_or(0, |at| at);
        let is_child = |entry: &&TreeEntry| !entry.path.is_empty() && &entry.path[..parent_of(&entry.path)] == dir;
        entries.iter().filter(is_child).map(|entry| (entry.path.clone(), entry.kind)).collect()
    };
    for path in paths {
        let shown = path.escape_ascii();
        let Some(expected) = find(live, path) else { panic!("{what}: {shown} was there") };
        let Some(found) = find(replayed, path) else { panic!("{what}: {shown} is not there") };
        if expected.kind == NodeKind::Directory {
            assert_eq!(children(live, path), children(replayed, path), "{what}: entries of {shown}");
        } else {
            let plain = |entry: TreeEntry| TreeEntry { link_group: None, ..entry };
            assert_eq!(plain(expected), plain(found), "{what}: {shown}");
        }
    }
}

fn number_from_env(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn random_logs_of_ours_are_replayed_by_both() {
    if !capability::kernel_oracle() {
        return;
    }
    let first = Rng::seed_or(57);
    for seed in first..first + number_from_env("ROUNDS", 3) {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let mkfs = match seed % 3 {
            0 => MkfsOptions { nodesize: 4096, ..MkfsOptions::default() },
            _ => MkfsOptions::default(),
        };
        let image = Image::empty(IMAGE_BYTES).unwrap();
        let device = recorded(&image, &mkfs);
        let mut target = open_recorded(&device, if seed % 2 == 0 { "" } else { "compress=zstd" });
        let mut model = Model::new();
        let mut driver = Driver::new(seed, 1 << 18);
        if seed % 5 == 4 {
            driver = driver.names_only();
        }
        driver.run(&mut model, &mut target, 150).unwrap();
        target.sync().unwrap();
        for round in 0..number_from_env("CRASHES", 3) {
            driver.run(&mut model, &mut target, 15).unwrap();
            fsync_some(&model, &mut target, &mut rng, 3);
            driver.run(&mut model, &mut target, 5).unwrap();
            let fsynced = fsync_some(&model, &mut target, &mut rng, 3);
            let crashed = crash(&device);
            let live = target.walk().unwrap();
            let what = format!("seed {seed}, crash {round}, log {}", has_log(&crashed));
            let replayed = replay_both(&crashed, &what);
            check_fsynced(&fsynced, &live, &replayed, &what);
        }
        println!("{:?}", target.fs().log_stats());
        target.fs().abort("the power went".to_owned());
    }
}

/// Threads concurrently append and fsync, replace files by rename, and commit. All appended data that was fsynced
/// before the power cut exists after the replay.
#[test]
fn threads_share_logs() {
    if !capability::kernel_oracle() {
        return;
    }
    const THREADS: usize = 8;
    const STEPS: u64 = 40;
    let image = Image::empty(IMAGE_BYTES).unwrap();
    let device = recorded(&image, &MkfsOptions::default());
    let target = open_recorded(&device, "");
    let promises: Vec<Vec<(usize, u64)>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (mut target, device) = (target.clone(), Arc::clone(&device));
                scope.spawn(move || {
                    let path = format!("file-{thread}");
                    let mut promised = Vec::new();
                    target.create(path.as_bytes(), NodeKind::File, 0o644, (0, 0)).unwrap();
                    for step in 0..STEPS {
                        target.write(path.as_bytes(), step * 4096, &[step as u8 + 1; 4096]).unwrap();
                        target.fsync(path.as_bytes()).unwrap();
                        // Count the events after fsync has returned, because the writes of the fsync were flushed by
                        // then.
                        promised.push((device.events(), step + 1));
                        if thread % 4 == 1 {
                            let (new, old) = (format!("new-{thread}"), format!("old-{thread}"));
                            target.create(new.as_bytes(), NodeKind::File, 0o600, (0, 0)).unwrap();
                            target.write(new.as_bytes(), 0, &[step as u8; 100]).unwrap();
                            target.fsync(new.as_bytes()).unwrap();
                            target.rename(new.as_bytes(), old.as_bytes(), ubtrfs_testkit::RenameOp::Replace).unwrap();
                            target.fsync(b"").unwrap();
                        }
                        if thread == 2 && step % 16 == 15 {
                            target.sync().unwrap();
                        }
                    }
                    promised
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    println!("{:?}", target.fs().log_stats());
    target.fs().abort("the power went".to_owned());
    drop(target);
    let mut rng = Rng::new(Rng::seed_or(77));
    for number in 0..24 {
        let at = rng.index(device.events() + 1);
        let cut = Image::empty(0).unwrap();
        let outcome = device.cut(at, &mut rng, cut.path()).unwrap();
        let what = format!("cut {number} at event {at}: {outcome:?}");
        let found = if number % 4 == 0 {
            replay_both(&cut, &what)
        } else {
            let target = FsTarget::open(cut.path(), "").unwrap_or_else(|error| panic!("{what}: {error:#}"));
            let found = target.walk().unwrap_or_else(|error| panic!("{what}: {error:#}"));
            target.close().unwrap();
            btrfs_check(cut.path()).unwrap_or_else(|error| panic!("{what}: {error:#}"));
            found
        };
        let mut target = FsTarget::open(cut.path(), "ro").unwrap();
        for (thread, promises) in promises.iter().enumerate() {
            let Some((_, blocks)) = promises.iter().rev().find(|(events, _)| *events <= at) else { continue };
            let path = format!("file-{thread}");
            let size = found.iter().find(|entry| entry.path == path.as_bytes()).map_or(0, |entry| entry.size);
            assert!(size >= blocks * 4096, "{what}: {path} has {size} bytes, {blocks} blocks were promised");
            for block in 0..*blocks {
                let data = target.read(path.as_bytes(), block * 4096, 4096).unwrap();
                assert!(data.iter().all(|&byte| u64::from(byte) == block + 1), "{what}: {path}, block {block}");
            }
        }
    }
}
