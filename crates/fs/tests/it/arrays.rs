//! Tests filesystems of several devices: ours judged by Linux, and Linux's changed by us.
//!
//! Method: mkfs.btrfs makes an array in image files. The engine writes files, and Linux checks, mounts, reads and scrubs
//! the array through loop devices, writes more, and the engine reads that. Devices are left out, and come back stale.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice, is_seed};
use ubtrfs_format::item::{BalanceArgs, BalanceFilters, BalanceFlags, BalanceItem, BlockGroupFlags};
use ubtrfs_format::{CsumType, Profile, RootId};
use ubtrfs_fs::{Caller, FallocateMode, Fs, InodeId, Job, MountOptions, NewInode};
use ubtrfs_testkit::{LoopDevice, LoopMount, Rng, capability, run, ubtrfs_check_errors};

const ROOT: Caller = Caller::ROOT;
const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: ubtrfs_format::Ino::ROOT_DIR };
const MIB: u64 = 1 << 20;

/// Image files of the devices of one filesystem.
pub(crate) struct Array {
    dir: tempfile::TempDir,
    pub(crate) images: Vec<PathBuf>,
}

impl Array {
    pub(crate) fn new(args: &[&str], sizes_mib: &[u64]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let images: Vec<PathBuf> = (1..=sizes_mib.len()).map(|n| dir.path().join(format!("{n}.img"))).collect();
        for (image, mib) in images.iter().zip(sizes_mib) {
            drop(FileDevice::create(image, mib * MIB, true).unwrap());
        }
        let paths = images.iter().map(|image| image.to_str().unwrap());
        run("mkfs.btrfs", ["-q"].into_iter().chain(args.iter().copied()).chain(paths)).unwrap();
        Self { dir, images }
    }

    /// Makes another image file.
    pub(crate) fn add_image(&mut self, mib: u64) -> PathBuf {
        let image = self.dir.path().join(format!("{}.img", self.images.len() + 1));
        drop(FileDevice::create(&image, mib * MIB, true).unwrap());
        self.images.push(image.clone());
        image
    }

    /// Lets Linux begin to replace the first device by the last image, and unmount before that is complete.
    pub(crate) fn suspend_replacement(&self) {
        let loops: Vec<LoopDevice> = self.images.iter().map(|image| LoopDevice::over(image).unwrap()).collect();
        let paths: Vec<&str> = loops.iter().map(LoopDevice::path).collect();
        let (new, old) = paths.split_last().unwrap();
        run("btrfs", ["device", "scan"].into_iter().chain(old.iter().copied())).unwrap();
        let point = self.dir.path().join("mnt");
        std::fs::create_dir_all(&point).unwrap();
        run("mount", ["-t", "btrfs", old[0], point.to_str().unwrap()]).unwrap();
        run("btrfs", ["replace", "start", "-f", "1", new, point.to_str().unwrap()]).unwrap();
        // This suspends the replacement. Its command ends a moment later.
        run("mount", ["-o", "remount,ro", point.to_str().unwrap()]).unwrap();
        while run("umount", [&point]).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        run("btrfs", ["device", "scan", "--forget"].into_iter().chain(paths)).unwrap();
        drop(loops);
        // Other programs may still look at the loop devices.
        let is_free = |image: &PathBuf| FileDevice::open(image, Access::ReadWrite).is_ok();
        while !self.images.iter().all(is_free) {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    /// Opens the devices with these indexes.
    pub(crate) fn open_some(&self, indexes: &[usize], options: &str) -> Arc<Fs> {
        let device = |index: &usize| open_device(&self.images[*index]);
        Fs::open(indexes.iter().map(device).collect(), MountOptions::parse(options).unwrap()).unwrap()
    }

    pub(crate) fn open(&self) -> Arc<Fs> {
        self.open_some(&(0..self.images.len()).collect::<Vec<_>>(), "")
    }

    /// Checks the array with Linux, mounts it, calls `work`, and scrubs it. Returns the numbers of `df` before the work.
    pub(crate) fn judge(&self, work: impl FnOnce(&Path)) -> (u64, u64) {
        self.judge_some(&self.images.iter().collect::<Vec<_>>(), "rw", work)
    }

    pub(crate) fn judge_some(&self, images: &[&PathBuf], options: &str, work: impl FnOnce(&Path)) -> (u64, u64) {
        let loops: Vec<LoopDevice> = images.iter().map(|image| LoopDevice::over(image).unwrap()).collect();
        let first = loops[0].path();
        run("btrfs", ["device", "scan"].into_iter().chain(loops.iter().map(LoopDevice::path))).unwrap();
        run("btrfs", ["check", first]).unwrap();
        let point = self.dir.path().join("mnt");
        std::fs::create_dir_all(&point).unwrap();
        run("mount", ["-t", "btrfs", "-o", options, first, point.to_str().unwrap()]).unwrap();
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let df = run("df", ["-B1", "--output=size,avail", point.to_str().unwrap()]).unwrap();
            let numbers: Vec<u64> = df.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            work(&point);
            // Linux takes the fsid of tree blocks on a seed for an error.
            let scrubbed = if images.iter().any(|image| is_seed(image)) { first } else { point.to_str().unwrap() };
            let scrub = run("btrfs", ["scrub", "start", "-B", "-r", scrubbed]).unwrap();
            assert!(scrub.contains("no errors found"), "{scrub}");
            (numbers[0], numbers[1])
        }));
        run("umount", [&point]).unwrap();
        run("btrfs", ["check", first]).unwrap();
        run("btrfs", ["device", "scan", "--forget"].into_iter().chain(loops.iter().map(LoopDevice::path))).unwrap();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

pub(crate) fn open_device(image: &Path) -> Arc<dyn Device> {
    Arc::new(FileDevice::open(image, Access::ReadWrite).unwrap())
}

/// Content that differs at each offset and for each seed.
pub(crate) fn content(len: u64, seed: u64) -> Vec<u8> {
    (0..len / 8).flat_map(|n| (n ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect()
}

pub(crate) fn put(fs: &Fs, name: &str, data: &[u8]) {
    let id = fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id;
    fs.write(id, 0, data).unwrap();
}

pub(crate) fn get(fs: &Fs, name: &str, len: u64) -> Vec<u8> {
    let id = fs.lookup(TOP, name.as_bytes()).unwrap().id;
    fs.read(id, 0, usize::try_from(len).unwrap()).unwrap()
}

const BIG: u64 = 40 * MIB;

/// Writes with the engine, lets Linux judge and write, and reads that with the engine.
fn round(data: &str, metadata: &str, sizes_mib: &[u64]) {
    let name = format!("-d {data} -m {metadata} {sizes_mib:?}");
    eprintln!("{name}");
    let array = Array::new(&["-d", data, "-m", metadata], sizes_mib);
    let fs = array.open();
    assert_eq!(fs.read_only(), None, "{name}");
    put(&fs, "big", &content(BIG, 1));
    for n in 0..200 {
        put(&fs, &format!("small{n}"), &content(4096 * (1 + n % 9), n));
    }
    fs.sync().unwrap();
    put(&fs, "later", &content(9 * MIB, 2));
    let statfs = fs.statfs().unwrap();
    fs.close().unwrap();
    drop(fs);
    let df = array.judge(|point| {
        assert!(std::fs::read(point.join("big")).unwrap() == content(BIG, 1), "{name}");
        assert!(std::fs::read(point.join("later")).unwrap() == content(9 * MIB, 2), "{name}");
        for n in 0..200 {
            assert!(std::fs::read(point.join(format!("small{n}"))).unwrap() == content(4096 * (1 + n % 9), n));
        }
        std::fs::write(point.join("linux"), content(20 * MIB, 3)).unwrap();
        std::fs::remove_file(point.join("later")).unwrap();
    });
    assert_eq!(df.0, statfs.blocks * u64::from(statfs.bsize), "size of {name}");
    let ours = statfs.bavail * u64::from(statfs.bsize);
    eprintln!("  df: Linux {} MiB, ours {} MiB", df.1 / MIB, ours / MIB);
    let fs = array.open();
    assert!(get(&fs, "linux", 20 * MIB) == content(20 * MIB, 3), "{name}");
    assert!(get(&fs, "big", BIG) == content(BIG, 1), "{name}");
    fs.unlink(TOP, b"big").unwrap();
    put(&fs, "again", &content(30 * MIB, 4));
    fs.close().unwrap();
    drop(fs);
    array.judge(|point| {
        assert!(std::fs::read(point.join("again")).unwrap() == content(30 * MIB, 4), "{name}");
        assert!(!point.join("big").exists());
    });
}

#[test]
fn profiles_of_two_and_three_devices_are_judged_by_linux() {
    if !capability::kernel_oracle() {
        return;
    }
    round("raid0", "raid1", &[300, 300]);
    round("raid1", "raid1", &[300, 300]);
    round("single", "raid1", &[300, 200, 400]);
    round("raid1", "raid1c3", &[300, 250, 400]);
    round("raid10", "raid10", &[300, 300]);
    round("raid0", "raid0", &[300, 250, 400]);
}

#[test]
fn profiles_of_four_and_five_devices_are_judged_by_linux() {
    if !capability::kernel_oracle() {
        return;
    }
    round("raid10", "raid1c4", &[300, 250, 400, 300]);
    round("raid0", "raid10", &[300; 5]);
    round("raid1c3", "raid1c3", &[300, 250, 400, 300, 200]);
    round("raid1c4", "raid1", &[300; 4]);
    round("raid10", "raid10", &[300; 5]);
}

/// The files of an array: length and seed of the content of each.
struct Model {
    files: BTreeMap<String, (u64, u64)>,
    rng: Rng,
}

/// A change of the files.
enum Change {
    Put(String, u64, u64),
    Remove(String),
}

impl Model {
    /// Chooses the next change, and notes it. About 30 MiB of files remain.
    fn change(&mut self) -> Change {
        let held: u64 = self.files.values().map(|(len, _)| len).sum();
        if held > 30 * MIB || (!self.files.is_empty() && self.rng.one_in(4)) {
            let name = self.files.keys().nth(self.rng.index(self.files.len())).cloned().unwrap();
            self.files.remove(&name);
            return Change::Remove(name);
        }
        let (number, seed) = (self.rng.below(1 << 40), self.rng.below(1 << 20));
        let len = 8 * (1 + if self.rng.one_in(4) { self.rng.below(MIB) } else { self.rng.below(4096) });
        self.files.insert(number.to_string(), (len, seed));
        Change::Put(number.to_string(), len, seed)
    }
}

/// We and Linux change an array by turns. After each turn, the other one finds the same files, and Linux scrubs.
fn turns(data: &str, metadata: &str, sizes_mib: &[u64], nr_turns: usize) {
    let name = format!("-d {data} -m {metadata} {sizes_mib:?}");
    let array = Array::new(&["-d", data, "-m", metadata], sizes_mib);
    let mut model = Model { rng: Rng::new(sizes_mib.iter().sum::<u64>() ^ data.len() as u64), files: BTreeMap::new() };
    for turn in 0..nr_turns {
        let fs = array.open();
        assert_eq!(fs.read_only(), None, "{name}");
        for (file, (len, seed)) in &model.files {
            assert!(get(&fs, file, *len) == content(*len, *seed), "{name}, turn {turn}: {file} of Linux");
        }
        for _ in 0..20 {
            match model.change() {
                Change::Put(file, len, seed) => put(&fs, &file, &content(len, seed)),
                Change::Remove(file) => fs.unlink(TOP, file.as_bytes()).unwrap(),
            }
        }
        fs.close().unwrap();
        drop(fs);
        array.judge(|point| {
            for (file, (len, seed)) in &model.files {
                assert!(
                    std::fs::read(point.join(file)).unwrap() == content(*len, *seed),
                    "{name}, turn {turn}: {file}"
                );
            }
            assert_eq!(std::fs::read_dir(point).unwrap().count(), model.files.len(), "{name}, turn {turn}");
            for _ in 0..20 {
                match model.change() {
                    Change::Put(file, len, seed) => std::fs::write(point.join(file), content(len, seed)).unwrap(),
                    Change::Remove(file) => std::fs::remove_file(point.join(file)).unwrap(),
                }
            }
        });
    }
}

/// With `UBTRFS_ARRAY_TURNS=N`, N turns on each profile with 2 to 5 devices of equal and of unequal sizes; else two turns
/// on some of them.
#[test]
fn we_and_linux_change_arrays_by_turns() {
    if !capability::kernel_oracle() {
        return;
    }
    let nr_turns = std::env::var("UBTRFS_ARRAY_TURNS").ok().and_then(|text| text.parse().ok());
    let unequal = [300, 250, 420, 350, 280];
    let mut number = 0;
    for nr_devices in 2..=5usize {
        for data in ["single", "raid0", "raid1", "raid1c3", "raid1c4", "raid10"] {
            let fits = |name: &str| usize::from(Profile::named(name).unwrap().devs_min) <= nr_devices;
            if !fits(data) {
                continue;
            }
            // Metadata with the profile of data, or with the next one.
            let others = ["raid1", "raid1c3", "raid10", "raid1c4"];
            let other = others.into_iter().cycle().skip(number).find(|name| fits(name)).unwrap();
            let metadata = if data == "single" { other } else { data };
            for (metadata, sizes) in [(metadata, &[300; 5][..nr_devices]), (other, &unequal[..nr_devices])] {
                number += 1;
                if let Some(nr_turns) = nr_turns.or((number % 9 == 0).then_some(2)) {
                    eprintln!("{data} and {metadata} on {sizes:?}");
                    turns(data, metadata, sizes, nr_turns);
                }
            }
        }
    }
}

#[test]
fn a_degraded_array_is_written_and_its_stale_device_is_brought_up_to_date() {
    if !capability::kernel_oracle() {
        return;
    }
    for (profile, nr_devices) in [("raid1", 2), ("raid10", 4), ("raid1c3", 3), ("raid1c4", 4)] {
        eprintln!("{profile}");
        let array = Array::new(&["-d", profile, "-m", profile], &vec![300; nr_devices]);
        let fs = array.open();
        put(&fs, "before", &content(BIG, 1));
        fs.close().unwrap();
        drop(fs);
        // The last device is missing.
        let present: Vec<usize> = (0..nr_devices - 1).collect();
        let fs = array.open_some(&present, "");
        assert!(fs.read_only().unwrap().contains("missing: device"), "{:?}", fs.read_only());
        fs.close().unwrap();
        drop(fs);
        let fs = array.open_some(&present, "degraded");
        assert_eq!(fs.read_only(), None, "{profile}");
        put(&fs, "meanwhile", &content(BIG, 2));
        let id = fs.lookup(TOP, b"meanwhile").unwrap().id;
        fs.fsync(id, false).unwrap();
        fs.close().unwrap();
        drop(fs);
        let images: Vec<&PathBuf> = array.images[..nr_devices - 1].iter().collect();
        array.judge_some(&images, "degraded,ro", |point| {
            assert!(std::fs::read(point.join("meanwhile")).unwrap() == content(BIG, 2), "{profile}");
        });
        // It returns.
        let fs = array.open();
        assert_eq!(fs.read_only(), None, "{profile}");
        assert!(get(&fs, "meanwhile", BIG) == content(BIG, 2), "{profile}");
        put(&fs, "after", &content(BIG, 3));
        fs.wait_for_resync();
        let value = |name: &str| {
            let metrics = fs.metrics();
            metrics.iter().find(|metric| metric.name.contains(name)).map(|metric| metric.value).unwrap()
        };
        assert_eq!((value("devices_behind"), value("devices_missing")), (0.0, 0.0), "{profile}");
        assert!(value("resync_walked") >= 2.0 * BIG as f64 && value("resync_copied") >= BIG as f64 / 2.0, "{profile}");
        fs.close().unwrap();
        drop(fs);
        array.judge(|point| {
            for (name, seed) in [("before", 1), ("meanwhile", 2), ("after", 3)] {
                assert!(std::fs::read(point.join(name)).unwrap() == content(BIG, seed), "{profile} {name}");
            }
        });
        // The device that was stale alone has everything.
        let others: Vec<usize> = (1..nr_devices).collect();
        let fs = array.open_some(&others, "degraded");
        assert_eq!(fs.read_only(), None, "{profile}");
        assert!(get(&fs, "meanwhile", BIG) == content(BIG, 2), "{profile}");
        fs.close().unwrap();
    }
}

/// Data that was written into an older, preallocated extent while a device was missing has the extent's old generation.
#[test]
fn a_stale_device_gets_what_was_written_into_preallocated_extents() {
    if !capability::kernel_oracle() {
        return;
    }
    let array = Array::new(&["-d", "raid1", "-m", "raid1"], &[300, 300]);
    let fs = array.open();
    let id = fs.create(TOP, b"file", NewInode::file(0o644), &ROOT).unwrap().id;
    fs.fallocate(id, 0, 20 * MIB, FallocateMode::default()).unwrap();
    fs.close().unwrap();
    drop(fs);
    let fs = array.open_some(&[0], "degraded");
    let id = fs.lookup(TOP, b"file").unwrap().id;
    fs.write(id, 0, &content(20 * MIB, 1)).unwrap();
    fs.fsync(id, false).unwrap();
    fs.close().unwrap();
    drop(fs);
    let fs = array.open();
    fs.wait_for_resync();
    fs.close().unwrap();
    drop(fs);
    let fs = array.open_some(&[1], "degraded");
    assert!(get(&fs, "file", 20 * MIB) == content(20 * MIB, 1));
    fs.close().unwrap();
}

#[test]
fn an_image_that_is_truncated_is_dropped_and_counted() {
    if !capability::kernel_oracle() {
        return;
    }
    let array = Array::new(&["-d", "raid1", "-m", "raid1"], &[300, 300]);
    let fs = array.open();
    put(&fs, "before", &content(MIB, 1));
    fs.sync().unwrap();
    std::fs::OpenOptions::new().write(true).open(&array.images[1]).unwrap().set_len(0).unwrap();
    put(&fs, "after", &content(MIB, 2));
    fs.sync().unwrap();
    let counted = |fs: &Fs| fs.device_stats()[1].1.values;
    let errors = counted(&fs);
    assert!(errors[0] > 0, "{errors:?}");
    fs.close().unwrap();
    drop(fs);
    let fs = array.open_some(&[0], "degraded");
    assert_eq!(counted(&fs), errors, "the counts are stored");
    assert!(get(&fs, "after", MIB) == content(MIB, 2));
    fs.close().unwrap();
}

#[test]
fn two_halves_that_were_written_apart_are_refused() {
    if !capability::kernel_oracle() {
        return;
    }
    // One commit each; then so many that the root backups of one half do not reach the other half's last commit.
    for nr_commits in [1, 12] {
        let array = Array::new(&["-d", "raid1", "-m", "raid1"], &[300, 300]);
        for half in [0usize, 1] {
            let fs = array.open_some(&[half], "degraded");
            for n in 0..nr_commits * (1 + 2 * half) {
                put(&fs, &format!("half{half}-{n}"), &content(4096, 1));
                fs.sync().unwrap();
            }
            fs.close().unwrap();
        }
        let before: Vec<Vec<u8>> = array.images.iter().map(|image| std::fs::read(image).unwrap()).collect();
        let devices = array
            .images
            .iter()
            .map(|image| -> Arc<dyn Device> { Arc::new(FileDevice::open(image, Access::ReadWrite).unwrap()) });
        let refused = Fs::open(devices.collect(), MountOptions::default()).map(drop).unwrap_err().to_string();
        assert!(refused.contains("were written apart"), "{refused}");
        assert!(array.images.iter().map(|image| std::fs::read(image).unwrap()).eq(before), "nothing was written");
        // Linux takes a half with its record.
        array.judge_some(&[&array.images[1]], "degraded", |point| {
            std::fs::write(point.join("linux"), "text").unwrap();
        });
        let fs = array.open_some(&[1], "degraded");
        assert_eq!(get(&fs, "linux", 4), b"text");
        fs.close().unwrap();
    }
}

/// Linux writes no records, and many commits of Linux hide the generations at which the halves differ. Our half says that it
/// was written alone.
#[test]
fn a_half_that_we_wrote_alone_is_refused_beside_a_newer_half_of_linux() {
    if !capability::kernel_oracle() {
        return;
    }
    let array = Array::new(&["-d", "raid1", "-m", "raid1"], &[300, 300]);
    let linux = LoopMount::array(&[&array.images[0]], "degraded").unwrap();
    for n in 0..12 {
        std::fs::write(linux.join(format!("linux-{n}")), content(8192, n)).unwrap();
        run("btrfs", ["filesystem", "sync", linux.path().to_str().unwrap()]).unwrap();
    }
    linux.close().unwrap();
    let fs = array.open_some(&[1], "degraded");
    put(&fs, "ours", &content(8192, 1));
    fs.close().unwrap();
    drop(fs);
    for order in [[0, 1], [1, 0]] {
        let devices = order.iter().map(|index: &usize| open_device(&array.images[*index]));
        let refused = Fs::open(devices.collect(), MountOptions::default()).map(drop).unwrap_err().to_string();
        assert!(refused.contains("were written apart"), "{refused}");
    }
    for (half, name) in [(0, "linux-11"), (1, "ours")] {
        let fs = array.open_some(&[half], "degraded,ro");
        assert!(fs.lookup(TOP, name.as_bytes()).is_ok(), "{name}");
        fs.close().unwrap();
    }
}

/// A tree block on an image.
struct BlockOnImage {
    at: usize,
    bytenr: u64,
    generation: u64,
    owner: u64,
}

/// The tree blocks on an image of Linux's mkfs that have a valid checksum.
fn blocks_of(image: &[u8]) -> Vec<BlockOnImage> {
    let fsid = &image[65536 + 32..65536 + 48];
    let number = |raw: &[u8], at: usize| u64::from_le_bytes(raw[at..at + 8].try_into().unwrap());
    let found = image.chunks_exact(NODESIZE).enumerate().filter(|(_, raw)| raw[32..48] == *fsid);
    let valid = found.filter(|(_, raw)| raw[..4] == CsumType::Crc32c.compute(&raw[32..])[..4]);
    let block = |(index, raw): (usize, &[u8])| BlockOnImage {
        at: index * NODESIZE,
        bytenr: number(raw, 48),
        generation: number(raw, 80),
        owner: number(raw, 88),
    };
    valid.map(block).filter(|block| block.at != 65536 && block.at != 64 << 20).collect()
}

const NODESIZE: usize = 16384;

/// A server that was killed has written blocks that no commit has. The next commit, without this device, gives the same
/// places and the same generation to other blocks.
#[test]
fn s4_valid_blocks_of_no_commit_do_not_stay_on_a_device_that_comes_back() {
    if !capability::kernel_oracle() {
        return;
    }
    let array = Array::new(&["-d", "raid1", "-m", "raid1"], &[300, 300]);
    let fs = array.open();
    put(&fs, "before", &content(8192, 1));
    fs.close().unwrap();
    drop(fs);
    let fs = array.open_some(&[0], "degraded");
    put(&fs, "while one was away", &content(8192, 2));
    fs.close().unwrap();
    drop(fs);
    let [one, mut other] = [0, 1].map(|index| std::fs::read(&array.images[index]).unwrap());
    let (of_one, of_other) = (blocks_of(&one), blocks_of(&other));
    let newest = of_one.iter().filter(|block| block.owner == 5).map(|block| block.generation).max().unwrap();
    let [generation_of_one, generation_of_other] =
        [&one, &other].map(|image| u64::from_le_bytes(image[65536 + 72..65536 + 80].try_into().unwrap()));
    assert!(generation_of_one >= generation_of_other + 2, "C4: {generation_of_one}, {generation_of_other}");
    // Both copies of a chunk have the same distance for all of its blocks.
    let is_pair = |one: &BlockOnImage, other: &BlockOnImage| one.bytenr == other.bytenr && one.owner == 5;
    let pair = of_one.iter().find_map(|one| Some((one.at, of_other.iter().find(|other| is_pair(one, other))?.at)));
    let (in_one, in_other) = pair.unwrap();
    let foreign = of_one.iter().find(|block| block.owner == 1).unwrap();
    let mut nr_forged = 0;
    for block in of_one.iter().filter(|block| block.generation == newest && block.owner == 5) {
        let mut raw = one[foreign.at..foreign.at + NODESIZE].to_vec();
        raw[48..56].copy_from_slice(&block.bytenr.to_le_bytes());
        raw[80..88].copy_from_slice(&newest.to_le_bytes());
        let csum = CsumType::Crc32c.compute(&raw[32..]);
        raw[..4].copy_from_slice(&csum[..4]);
        let at = block.at + in_other - in_one;
        other[at..at + NODESIZE].copy_from_slice(&raw);
        nr_forged += 1;
    }
    assert!(nr_forged > 0);
    std::fs::write(&array.images[1], &other).unwrap();
    let fs = array.open();
    fs.wait_for_resync();
    fs.close().unwrap();
    drop(fs);
    let devices = array.images.iter().map(|image| open_device(image)).collect();
    assert_eq!(ubtrfs_check_errors(devices).unwrap(), Vec::<String>::new());
    let fs = array.open_some(&[1], "degraded");
    assert!(get(&fs, "while one was away", 8192) == content(8192, 2));
    fs.close().unwrap();
}

#[test]
fn the_record_of_a_device_ends_when_it_is_back() {
    if !capability::kernel_oracle() {
        return;
    }
    let array = Array::new(&["-d", "raid1", "-m", "raid1"], &[300, 300]);
    for round in 0..3 {
        // By turns, one device is away for some commits, and comes back.
        let fs = array.open_some(&[round % 2], "degraded");
        for n in 0..6 {
            put(&fs, &format!("{round}-{n}"), &content(8192, n));
            fs.sync().unwrap();
        }
        fs.close().unwrap();
        drop(fs);
        let fs = array.open();
        fs.wait_for_resync();
        fs.close().unwrap();
    }
    array.judge(|point| assert_eq!(std::fs::read_dir(point).unwrap().count(), 18));
}

/// Our record says that a device is behind. Linux brings it up to date, and later writes without it.
#[test]
fn m4_a_device_that_linux_repaired_and_later_left_out_is_no_other_half() {
    if !capability::kernel_oracle() {
        return;
    }
    let array = Array::new(&["-d", "raid1", "-m", "raid1"], &[300, 300]);
    let fs = array.open_some(&[0], "degraded");
    for n in 0..3 {
        put(&fs, &format!("ours-{n}"), &content(8192, n));
        fs.sync().unwrap();
    }
    fs.close().unwrap();
    drop(fs);
    let write = |images: &[&PathBuf], options: &str, name: &str| {
        let linux = LoopMount::array(images, options).unwrap();
        if images.len() > 1 {
            run("btrfs", ["scrub", "start", "-B", linux.path().to_str().unwrap()]).unwrap();
        }
        for n in 0..6 {
            std::fs::write(linux.join(format!("{name}-{n}")), content(8192, n)).unwrap();
            run("btrfs", ["filesystem", "sync", linux.path().to_str().unwrap()]).unwrap();
        }
        linux.close().unwrap();
    };
    write(&[&array.images[0], &array.images[1]], "rw", "both");
    write(&[&array.images[0]], "degraded", "degraded");
    let fs = array.open();
    assert_eq!(fs.read_only(), None);
    fs.wait_for_resync();
    fs.close().unwrap();
    drop(fs);
    array.judge(|_| ());
    let fs = array.open_some(&[1], "degraded");
    for name in ["ours-2", "both-5", "degraded-5"] {
        let seed = name.rsplit('-').next().unwrap().parse().unwrap();
        assert!(get(&fs, name, 8192) == content(8192, seed), "{name}");
    }
    fs.close().unwrap();
}

#[test]
fn chunks_convert_between_the_profiles_of_several_devices() {
    if !capability::kernel_oracle() {
        return;
    }
    let array = Array::new(&["-d", "single", "-m", "raid1"], &[400, 400, 400, 400]);
    let fs = array.open();
    put(&fs, "big", &content(BIG, 1));
    fs.close().unwrap();
    drop(fs);
    for (data, metadata) in [("raid1", "raid1c3"), ("raid10", "raid10"), ("raid1c4", "raid1"), ("raid0", "dup")] {
        eprintln!("{data} {metadata}");
        let convert = |name| {
            let mut args = BalanceArgs::NONE;
            args.flags = BalanceFilters::CONVERT.bits();
            args.target = BalanceArgs::profile_bit(Profile::named(name).unwrap());
            args
        };
        let flags = BalanceFlags::DATA | BalanceFlags::METADATA | BalanceFlags::SYSTEM | BalanceFlags::FORCE;
        let (data_args, meta_args) = (convert(data), convert(metadata));
        let item = BalanceItem {
            flags: flags.bits(),
            data: data_args,
            metadata: meta_args.clone(),
            system: meta_args,
            unused: [0; 4],
        };
        let fs = array.open();
        let report = fs.balance(item, &Job::new()).unwrap();
        assert!(report.failures.is_empty(), "{:?}", report.failures);
        for group in fs.block_groups() {
            let wanted = if group.flags.contains(BlockGroupFlags::DATA) { data } else { metadata };
            assert!(Profile::name_of(group.flags).eq_ignore_ascii_case(wanted), "{:?}", group.flags);
        }
        fs.close().unwrap();
        drop(fs);
        array.judge(|point| assert!(std::fs::read(point.join("big")).unwrap() == content(BIG, 1)));
    }
}
