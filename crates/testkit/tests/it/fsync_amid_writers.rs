//! Tests fsync while another thread writes to the file: everything written before the call is durable when it
//! returns.
//!
//! Method: a writer publishes each completed write. The syncing thread records the published writes, calls fsync
//! (or sync), and then reads the file from the device with a read-only mount that replays the log in memory. Each
//! round uses a new file, because a file that was never on disk can lose the most data.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ubtrfs_device::Device;
use ubtrfs_fs::{Caller, Fs, InodeId, MountOptions, NewInode, SetAttr};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{Medium, MediumDevice, Rng, check_medium};

const ROOT: Caller = Caller::ROOT;
const ROUNDS: u64 = 40;

/// The writer's pattern. Each write has a number, counted from 1.
#[derive(Clone, Copy, Debug)]
enum Work {
    /// Rewrites a whole file of this size.
    Rewrite(usize),
    /// Rewrites a whole small file of this size; truncates it to half after every second write.
    Resize(usize),
    /// Appends records of 16 bytes.
    Append,
    /// Writes the last of 64 sectors once, so that the sectors before it are holes. Then writes the sectors of the
    /// holes in ascending order, each twice in a row, again and again.
    FillHoles,
}

fn bytes_of(number: u64, len: usize) -> Vec<u8> {
    number.to_le_bytes().iter().copied().cycle().take(len).collect()
}

impl Work {
    fn write(self, fs: &Fs, id: InodeId, number: u64) {
        match self {
            Self::Rewrite(len) => drop(fs.write(id, 0, &bytes_of(number, len)).unwrap()),
            Self::Resize(len) => {
                fs.write(id, 0, &bytes_of(number, len)).unwrap();
                if number.is_multiple_of(2) {
                    let size = Some(len as u64 / 2);
                    fs.setattr(id, &SetAttr { size, ..SetAttr::default() }, &ROOT).unwrap();
                }
            }
            Self::Append => drop(fs.write(id, (number - 1) * 16, &bytes_of(number, 16)).unwrap()),
            Self::FillHoles if number == 1 => drop(fs.write(id, 63 * 4096, &bytes_of(1, 4096)).unwrap()),
            Self::FillHoles => drop(fs.write(id, (number - 2) / 2 % 63 * 4096, &bytes_of(number, 4096)).unwrap()),
        }
    }

    /// Checks that the file had this content after `published` or more writes.
    fn check(self, content: &[u8], published: u64) -> Result<(), String> {
        let number_at =
            |at: usize| content.get(at..at + 8).map_or(0, |raw| u64::from_le_bytes(raw.try_into().unwrap()));
        match self {
            Self::Rewrite(len) => {
                let is_whole = content.len() == len
                    && content.chunks(4096).all(|block| {
                        let number = u64::from_le_bytes(block[..8].try_into().unwrap());
                        number >= published && *block == *bytes_of(number, block.len())
                    });
                is_whole.then_some(()).ok_or(format!("{} bytes of write {}", content.len(), number_at(0)))
            }
            Self::Resize(len) => {
                let number = number_at(0);
                let is_whole = [len / 2, len].contains(&content.len()) && content == bytes_of(number, content.len());
                (is_whole && number >= published).then_some(()).ok_or(format!("{} bytes of {number}", content.len()))
            }
            Self::Append => {
                let records = content.chunks(16).zip(1..).take_while(|(raw, number)| **raw == *bytes_of(*number, 16));
                let found = records.count() as u64;
                let is_all = found * 16 == content.len() as u64 && found >= published;
                is_all.then_some(()).ok_or(format!("{} bytes, {found} records", content.len()))
            }
            Self::FillHoles => {
                if content.len() != 64 * 4096 || number_at(63 * 4096) != 1 {
                    return Err(format!("{} bytes", content.len()));
                }
                let lost = (2..=published).find(|number| number_at(((number - 2) / 2 % 63 * 4096) as usize) < *number);
                lost.map_or(Ok(()), |number| Err(format!("write {number} is lost")))
            }
        }
    }
}

fn run(work: Work, options: &str) {
    let seed = Rng::seed_or(1);
    let mut rng = Rng::new(seed);
    let base = Medium::formatted(512 << 20, &MkfsOptions::default()).unwrap();
    let below = Arc::new(MediumDevice::new(base));
    let device = || Arc::clone(&below) as Arc<dyn Device>;
    let fs = Fs::open(vec![device()], MountOptions::parse(options).unwrap()).unwrap();
    let mut lost = Vec::new();
    for round in 0..ROUNDS {
        let name = format!("file-{round}");
        let id = fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id;
        let (published, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1.. {
                    if stop.load(Ordering::Acquire) {
                        return;
                    }
                    work.write(&fs, id, number);
                    published.store(number, Ordering::Release);
                }
            });
            let wanted = 1 + rng.below(20);
            while published.load(Ordering::Acquire) < wanted {
                std::thread::yield_now();
            }
            let before = published.load(Ordering::Acquire);
            match round % 4 {
                3 => fs.sync().unwrap(),
                _ => fs.fsync(id, false).unwrap(),
            }
            let medium = Arc::new(MediumDevice::new(below.content()));
            stop.store(true, Ordering::Release);
            let durable = Fs::open(vec![medium], MountOptions::parse("ro").unwrap()).unwrap();
            let found = durable.lookup(durable.root(), name.as_bytes()).unwrap();
            let content = durable.read(found.id, 0, 64 << 20).unwrap();
            if let Err(what) = work.check(&content, before) {
                lost.push(format!("round {round}: {before} writes before, on disk {what}"));
            }
        });
    }
    assert!(lost.is_empty(), "seed {seed}, {work:?}: {} of {ROUNDS} lost\n{}", lost.len(), lost.join("\n"));
    fs.close().unwrap();
    drop(fs);
    check_medium(&below.content()).unwrap();
}

#[test]
fn fsync_of_a_small_file_that_is_rewritten_all_the_time() {
    run(Work::Rewrite(200), "commit=300");
}

#[test]
fn fsync_of_a_small_file_that_changes_its_size() {
    run(Work::Resize(1000), "commit=300");
}

#[test]
fn fsync_of_a_large_file_that_is_rewritten_all_the_time() {
    run(Work::Rewrite(300_000), "commit=300");
}

#[test]
fn fsync_of_a_compressed_file_that_is_rewritten_all_the_time() {
    run(Work::Rewrite(300_000), "commit=300,compress=zstd:1");
}

#[test]
fn fsync_of_a_file_that_grows() {
    run(Work::Append, "commit=300");
}

#[test]
fn fsync_of_a_file_whose_holes_are_filled() {
    run(Work::FillHoles, "commit=300");
}

/// Several threads each write different bytes of one small file, so that nearly always some thread is writing.
#[test]
fn fsync_of_a_small_file_that_many_threads_rewrite() {
    const THREADS: usize = 6;
    let base = Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap();
    let below = Arc::new(MediumDevice::new(base));
    let device = Arc::clone(&below) as Arc<dyn Device>;
    let fs = Fs::open(vec![device], MountOptions::parse("commit=300").unwrap()).unwrap();
    let mut lost = Vec::new();
    for round in 0..ROUNDS {
        let name = format!("file-{round}");
        let id = fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id;
        let published = [const { AtomicU64::new(0) }; THREADS];
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for (thread, published) in published.iter().enumerate() {
                let (fs, stop) = (&fs, &stop);
                scope.spawn(move || {
                    for number in 1u64.. {
                        if stop.load(Ordering::Acquire) {
                            return;
                        }
                        fs.write(id, 8 * thread as u64, &number.to_le_bytes()).unwrap();
                        published.store(number, Ordering::Release);
                    }
                });
            }
            while published.iter().any(|published| published.load(Ordering::Acquire) == 0) {
                std::thread::yield_now();
            }
            let before = published.each_ref().map(|published| published.load(Ordering::Acquire));
            fs.fsync(id, false).unwrap();
            let medium = Arc::new(MediumDevice::new(below.content()));
            stop.store(true, Ordering::Release);
            let durable = Fs::open(vec![medium], MountOptions::parse("ro").unwrap()).unwrap();
            let found = durable.lookup(durable.root(), name.as_bytes()).unwrap();
            let content = durable.read(found.id, 0, 4096).unwrap();
            let numbers: Vec<u64> = content.chunks(8).map(|raw| u64::from_le_bytes(raw.try_into().unwrap())).collect();
            if numbers.len() != THREADS || numbers.iter().zip(before).any(|(found, before)| *found < before) {
                lost.push(format!("round {round}: {before:?} before, on disk {numbers:?}"));
            }
        });
    }
    assert!(lost.is_empty(), "{} of {ROUNDS} lost\n{}", lost.len(), lost.join("\n"));
    fs.close().unwrap();
    drop(fs);
    check_medium(&below.content()).unwrap();
}
