//! Tests files whose data can never be written back: other files become durable, every commit succeeds, and fsync of
//! the bad file reports the error as long as the data is unwritable.
//!
//! Method: the device refuses sectors that begin with certain bytes. A read-only mount of the device's current content
//! shows what is durable.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ubtrfs_device::Device;
use ubtrfs_fs::{Caller, Fs, InodeId, MountOptions, NewInode, SetAttr};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{FaultDevice, FaultPlan, Image, Medium, MediumDevice, Rng, btrfs_check, capability, check_medium};

const ROOT: Caller = Caller::ROOT;
const REFUSED: [u8; 16] = *b"never on a disk!";
const EIO: i32 = rustix::io::Errno::IO.raw_os_error();
const SECTOR: usize = 4096;

struct Bed {
    below: Arc<MediumDevice>,
    fs: Arc<Fs>,
}

impl Bed {
    fn new(options: &str, memory_bytes: Option<u64>) -> Self {
        let base = Medium::formatted(512 << 20, &MkfsOptions::default()).unwrap();
        let below = Arc::new(MediumDevice::new(base));
        let plan = FaultPlan { refused: Some(REFUSED), ..FaultPlan::default() };
        let device: Arc<dyn Device> = Arc::new(FaultDevice::new(below.clone(), plan));
        let mut options = MountOptions::parse(options).unwrap();
        options.memory_bytes = memory_bytes.unwrap_or(options.memory_bytes);
        Self { below, fs: Fs::open(vec![device], options).unwrap() }
    }

    fn create(&self, name: &str) -> InodeId {
        self.fs.create(self.fs.root(), name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id
    }

    /// Opens the filesystem that a power cut at this time would leave if the device kept all writes.
    fn durable(&self) -> Arc<Fs> {
        let device: Arc<dyn Device> = Arc::new(MediumDevice::new(self.below.content()));
        Fs::open(vec![device], MountOptions::parse("ro").unwrap()).unwrap()
    }

    fn metric(&self, name: &str) -> f64 {
        self.fs.metrics().iter().find(|metric| metric.name == name).unwrap().value
    }

    /// Closes the filesystem and runs the checkers.
    fn judge(self) {
        drop(self.fs);
        let content = self.below.content();
        check_medium(&content).unwrap();
        if capability::kernel_oracle() {
            let image = Image::empty(0).unwrap();
            content.save(image.path()).unwrap();
            btrfs_check(image.path()).unwrap();
        }
    }
}

/// Returns a file's content, or `None` if there is no such file.
fn content(fs: &Fs, name: &str) -> Option<Vec<u8>> {
    let attr = fs.lookup(fs.root(), name.as_bytes()).ok()?;
    Some(fs.read(attr.id, 0, usize::try_from(attr.size).unwrap()).unwrap())
}

fn refused(sectors: usize) -> Vec<u8> {
    let mut sector = REFUSED.to_vec();
    sector.resize(SECTOR, 1);
    sector.repeat(sectors)
}

fn errno(result: ubtrfs_fs::Result<()>) -> i32 {
    result.map_or_else(|error| error.errno(), |()| 0)
}

#[test]
fn a_file_that_cannot_be_written_stops_no_commit() {
    let bed = Bed::new("commit=1", None);
    let bad = bed.create("bad");
    bed.fs.write(bad, 0, &refused(4)).unwrap();
    let names: Vec<String> = (0..206).map(|number| format!("good-{number}")).collect();
    for (number, name) in names.iter().enumerate() {
        let id = bed.create(name);
        bed.fs.write(id, 0, &vec![7; 100 * (number + 1)]).unwrap();
    }
    // The test itself does not start writeback, so the commit thread must.
    let start = Instant::now();
    let missing = loop {
        let durable = bed.durable();
        let is_there = |(number, name): (usize, &String)| content(&durable, name) == Some(vec![7; 100 * (number + 1)]);
        let missing = names.iter().enumerate().filter(|named| !is_there(*named)).count();
        if missing == 0 || start.elapsed() > Duration::from_secs(15) {
            break missing;
        }
        std::thread::sleep(Duration::from_millis(200));
    };
    assert_eq!(missing, 0, "of {} files are not durable", names.len());
    assert_eq!(bed.fs.read_only(), None);
    assert!(bed.metric("writeback_failures_total") >= 1.0);
    assert_eq!(bed.metric("unwritable_files"), 1.0);
    assert_eq!(bed.fs.read(bad, 0, 4 * SECTOR).unwrap(), refused(4), "it is kept in memory");
    // Overwriting the refused data with good data clears the error.
    bed.fs.write(bad, 0, &vec![3; 4 * SECTOR]).unwrap();
    bed.fs.sync().unwrap();
    assert_eq!(bed.metric("unwritable_files"), 0.0);
    assert_eq!(content(&bed.durable(), "bad").unwrap(), vec![3; 4 * SECTOR]);
    bed.judge();
}

#[test]
fn sync_and_close_commit_writable_files_and_fail() {
    let bed = Bed::new("commit=300", None);
    let bad = bed.create("bad");
    bed.fs.write(bad, 0, &refused(1)).unwrap();
    let good = bed.create("good");
    bed.fs.write(good, 0, b"one").unwrap();
    assert_eq!(errno(bed.fs.sync()), EIO);
    assert_eq!(content(&bed.durable(), "good").unwrap(), b"one");
    bed.fs.write(good, 0, b"two").unwrap();
    assert_eq!(errno(bed.fs.close()), EIO);
    let device: Arc<dyn Device> = Arc::new(MediumDevice::new(bed.below.content()));
    let again = Fs::open(vec![device], MountOptions::default()).unwrap();
    assert_eq!(content(&again, "good").unwrap(), b"two");
    again.close().unwrap();
    bed.judge();
}

#[test]
fn fsync_fails_as_long_as_the_data_is_not_there_and_for_each_descriptor_once_more() {
    let bed = Bed::new("commit=300", None);
    let bad = bed.create("bad");
    let good = bed.create("good");
    let (first, second) = (bed.fs.open_descriptor(), bed.fs.open_descriptor());
    bed.fs.write(bad, 0, &refused(2)).unwrap();
    bed.fs.write(good, 0, &[5; 10_000]).unwrap();
    assert_eq!(errno(bed.fs.sync()), EIO);
    for _ in 0..3 {
        assert_eq!(errno(bed.fs.fsync_descriptor(bad, false, first)), EIO);
        assert_eq!(errno(bed.fs.fsync_descriptor(good, false, second)), 0);
    }
    bed.fs.write(bad, 0, &[1; 2 * SECTOR]).unwrap();
    assert_eq!(errno(bed.fs.fsync_descriptor(bad, false, first)), 0, "it was told, and now the data is there");
    assert_eq!(errno(bed.fs.fsync_descriptor(bad, false, second)), EIO, "it was not told");
    assert_eq!(errno(bed.fs.fsync_descriptor(bad, false, second)), 0);
    let late = bed.fs.open_descriptor();
    assert_eq!(errno(bed.fs.fsync_descriptor(bad, false, late)), 0);
    assert_eq!(content(&bed.durable(), "bad").unwrap(), [1; 2 * SECTOR]);
    bed.judge();
}

/// If a file that cannot be written fills the memory for dirty data, writers of other files neither fail nor wait
/// forever.
#[test]
fn a_full_memory_of_unwritable_data_fails_its_own_writer_only() {
    let bed = Bed::new("commit=300", Some(16 << 20));
    let bad = bed.create("bad");
    let mut told = 0;
    for at in 0..64u64 {
        match bed.fs.write(bad, at << 20, &refused(256)) {
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error.errno(), EIO);
                told += 1;
            }
        }
    }
    assert!(told > 0, "64 MiB that cannot be written in 16 MiB of memory");
    let start = Instant::now();
    let good = bed.create("good");
    for at in 0..32u64 {
        bed.fs.write(good, at << 20, &vec![at as u8; 1 << 20]).unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    bed.fs.fsync(good, false).unwrap();
    let durable = bed.durable();
    let found = content(&durable, "good").unwrap();
    assert!((0..32).all(|at| found[at << 20..(at + 1) << 20].iter().all(|byte| *byte == at as u8)));
    bed.fs.setattr(bad, &SetAttr { size: Some(0), ..SetAttr::default() }, &ROOT).unwrap();
    bed.fs.sync().unwrap();
    bed.judge();
}

/// Runs random writes, truncations, removals and syncs of files while the device refuses some sectors.
#[test]
fn writable_files_are_durable_beside_unwritable_ones() {
    let first = Rng::seed_or(1);
    for seed in first..first + 12 {
        run(seed);
    }
}

fn run(seed: u64) {
    let mut rng = Rng::new(seed);
    let memory = if rng.one_in(2) { Some(8 << 20) } else { None };
    let options = *rng.pick(&["commit=300", "commit=300,max_inline=0", "commit=1", "commit=300,notreelog"]);
    let bed = Bed::new(options, memory);
    let mut files: BTreeMap<String, (InodeId, Vec<u8>)> = BTreeMap::new();
    let is_bad = |content: &[u8]| content.chunks(SECTOR).any(|sector| sector.starts_with(&REFUSED));
    for step in 0..250 {
        let what = format!("seed {seed} ({options}), step {step}");
        let name = format!("file-{}", rng.below(24));
        if !files.contains_key(&name) {
            files.insert(name.clone(), (bed.create(&name), Vec::new()));
        }
        let (id, model) = files.get_mut(&name).unwrap();
        match rng.below(12) {
            0..6 => {
                let at = rng.index(20) * SECTOR;
                let mut data = match rng.one_in(6) {
                    true => refused(1 + rng.index(3)),
                    false => vec![rng.below(255) as u8; 1 + rng.index(60_000)],
                };
                if rng.one_in(3) {
                    data.truncate(1 + rng.index(2 * SECTOR));
                }
                match bed.fs.write(*id, at as u64, &data) {
                    Ok(len) => assert_eq!(len, data.len(), "{what}"),
                    Err(error) => {
                        assert!(is_bad(model), "{what}: {error}");
                        continue;
                    }
                }
                model.resize(model.len().max(at + data.len()), 0);
                model[at..at + data.len()].copy_from_slice(&data);
            }
            6 => {
                let size = rng.index(40_000);
                let set = SetAttr { size: Some(size as u64), ..SetAttr::default() };
                match bed.fs.setattr(*id, &set, &ROOT) {
                    Ok(_) => model.resize(size, 0),
                    // A truncation may fail too, because it rewrites the last sector, including other dirty data in
                    // that sector.
                    Err(error) => assert!(is_bad(model), "{what}: {error}"),
                }
            }
            7 => {
                bed.fs.unlink(bed.fs.root(), name.as_bytes()).unwrap();
                files.remove(&name);
            }
            8 | 9 => {
                let synced = bed.fs.fsync(*id, false);
                assert_eq!(synced.is_err(), is_bad(model), "{what}: fsync of {name}: {synced:?}");
                if synced.is_ok() {
                    assert_eq!(content(&bed.durable(), &name).as_ref(), Some(&*model), "{what}: fsync of {name}");
                }
            }
            10 => {
                let synced = bed.fs.sync();
                let any_bad = files.values().any(|(_, model)| is_bad(model));
                assert_eq!(synced.is_err(), any_bad, "{what}: sync: {synced:?}");
                let durable = bed.durable();
                for (name, (_, model)) in files.iter().filter(|(_, (_, model))| !is_bad(model)) {
                    assert!(content(&durable, name).as_ref() == Some(model), "{what}: {name} is not durable");
                }
            }
            _ => {
                let found = bed.fs.read(*id, 0, model.len() + 1).unwrap();
                assert!(found == *model, "{what}: {name} reads wrong");
            }
        }
        assert_eq!(bed.fs.read_only(), None, "{what}");
    }
    let any_bad = files.values().any(|(_, model)| is_bad(model));
    assert_eq!(bed.fs.close().is_err(), any_bad, "seed {seed}: close");
    let durable = bed.durable();
    for (name, (_, model)) in files.iter().filter(|(_, (_, model))| !is_bad(model)) {
        assert!(content(&durable, name).as_ref() == Some(model), "seed {seed}: {name} after closing");
    }
    drop(durable);
    bed.judge();
}
