//! Power cuts beside clones, deduplication, holes, snapshots, deletions of subvolumes and relocations of files that are
//! written in place: each file has what it had at its last fsync or later, and each copy has what was copied.

use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, RwLock};

use ubtrfs_format::DevId;
use ubtrfs_testkit::RecordingDevice;

use super::*;

const SECTORS: usize = 24;
const NR_FILES: usize = 4;
/// The number under which the device records promises about copies.
const COPIES: usize = NR_FILES;
/// Stands for the content of a file that does not exist.
const ABSENT: u64 = u64::MAX;
/// Number of power cuts of each kind of filesystem.
const NR_CUTS: usize = 16;

/// A file, and all words that each of its sectors ever had, each with the number of the change that brought it.
struct File {
    id: InodeId,
    dir: InodeId,
    name: String,
    words: Vec<Vec<(u64, u64)>>,
    nr_changes: u64,
}

impl File {
    fn now(&self, sector: usize) -> u64 {
        self.words[sector].last().unwrap().1
    }

    fn change(&mut self, sectors: std::ops::Range<usize>, word: impl Fn(usize) -> u64) {
        self.nr_changes += 1;
        for sector in sectors {
            let word = word(sector);
            self.words[sector].push((self.nr_changes, word));
        }
    }

    fn content(&self) -> Vec<u64> {
        (0..SECTORS).map(|sector| self.now(sector)).collect()
    }
}

/// A snapshot, or a subvolume with a clone, which is not changed after it is made.
struct Copy {
    name: String,
    /// Names of its files, and the word of each sector.
    files: Vec<(String, Vec<u64>)>,
    /// Number of events before it was deleted.
    deleted: Option<usize>,
}

struct Run<'r> {
    fs: &'r Fs,
    device: &'r RecordingDevice,
    files: Vec<Mutex<File>>,
    copies: Mutex<Vec<Copy>>,
    /// Held exclusively while a snapshot is made.
    changing: RwLock<()>,
    next_word: AtomicU64,
    stop: AtomicBool,
}

impl Run<'_> {
    fn until_stopped(&self, mut round: impl FnMut()) {
        let mut ending = EndingInPanic(&self.stop, true);
        while !self.stop.load(Ordering::Acquire) {
            round();
        }
        ending.1 = false;
    }

    fn promise(&self, nr: usize, file: &File) {
        self.device.mark_lane(nr, file.nr_changes);
    }

    fn change(&self, rng: &mut Rng) {
        let _changing = self.changing.read().unwrap();
        let nr = rng.index(NR_FILES);
        let mut file = self.files[nr].lock().unwrap();
        let file = &mut *file;
        let (first, len) = (rng.index(SECTORS - 4), 1 + rng.index(4));
        let sectors = first..first + len;
        let (at, bytes) = ((first * SECTOR) as u64, (len * SECTOR) as u64);
        match rng.below(24) {
            0..7 => {
                let word = self.next_word.fetch_add(1, Ordering::Relaxed);
                self.fs.write(file.id, at, &word.to_le_bytes().repeat(len * SECTOR / 8)).unwrap();
                file.change(sectors, |_| word);
            }
            7 => {
                let mode = FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE;
                self.fs.fallocate(file.id, at, bytes, mode).unwrap();
                file.change(sectors, |_| 0);
            }
            8 => {
                self.fs.fallocate(file.id, at, bytes, FallocateMode::ZERO_RANGE).unwrap();
                file.change(sectors, |_| 0);
            }
            9 | 10 => self.fs.fallocate(file.id, at, bytes, FallocateMode::empty()).unwrap(),
            11 => {
                for size in [at, (SECTORS * SECTOR) as u64] {
                    let size = ubtrfs_fs::SetAttr { size: Some(size), ..Default::default() };
                    self.fs.setattr(file.id, &size, &Caller::ROOT).unwrap();
                }
                file.change(first..SECTORS, |_| 0);
            }
            12 if rng.one_in(2) => self.replace(file, rng.one_in(2)),
            13..16 => {
                self.fs.fsync(file.id, false).unwrap();
                self.promise(nr, file);
            }
            16 => self.fs.flush_data().unwrap(),
            17 => {
                let to = (first + SECTORS / 2) % (SECTORS - 4);
                if to.abs_diff(first) >= len {
                    self.fs.clone_range(file.id, at, file.id, (to * SECTOR) as u64, bytes).unwrap();
                    let words: Vec<u64> = sectors.map(|sector| file.now(sector)).collect();
                    file.change(to..to + len, |sector| words[sector - to]);
                }
            }
            _ => {
                let other = (nr + 1 + rng.index(NR_FILES - 1)) % NR_FILES;
                // The lock may be held by a thread that waits for this file.
                let Ok(mut target) = self.files[other].try_lock() else { return };
                if rng.one_in(4) {
                    let word = self.next_word.fetch_add(1, Ordering::Relaxed);
                    for file in [&mut *file, &mut *target] {
                        self.fs.write(file.id, at, &word.to_le_bytes().repeat(len * SECTOR / 8)).unwrap();
                        file.change(sectors.clone(), |_| word);
                    }
                    assert!(self.fs.dedupe_range(file.id, at, target.id, at, bytes, &Job::new()).unwrap());
                    return;
                }
                let to = if rng.one_in(2) { first } else { rng.index(SECTORS - 4) };
                self.fs.clone_range(file.id, at, target.id, (to * SECTOR) as u64, bytes).unwrap();
                let words: Vec<u64> = sectors.map(|sector| file.now(sector)).collect();
                target.change(to..to + len, |sector| words[sector - to]);
            }
        }
    }

    /// Replaces a file by another one: removes it first, or renames the new file over it.
    fn replace(&self, file: &mut File, by_rename: bool) {
        let name = if by_rename { format!("new-{}", file.name) } else { file.name.clone() };
        if !by_rename {
            self.fs.unlink(file.dir, file.name.as_bytes()).unwrap();
            file.change(0..SECTORS, |_| ABSENT);
        }
        file.id = self.fs.create(file.dir, name.as_bytes(), NewInode::file(0o600), &Caller::ROOT).unwrap().id;
        let size = ubtrfs_fs::SetAttr { size: Some((SECTORS * SECTOR) as u64), ..Default::default() };
        self.fs.setattr(file.id, &size, &Caller::ROOT).unwrap();
        if by_rename {
            let flags = ubtrfs_fs::RenameFlags::empty();
            self.fs.rename(file.dir, name.as_bytes(), file.dir, file.name.as_bytes(), flags).unwrap();
        }
        file.change(0..SECTORS, |_| 0);
    }

    /// Makes or deletes a snapshot, or a subvolume with clones.
    fn copy(&self, work: InodeId, rng: &mut Rng) {
        let alive = |copies: &[Copy]| copies.iter().position(|copy| copy.deleted.is_none());
        let old = {
            let mut copies = self.copies.lock().unwrap();
            let nr_alive = copies.iter().filter(|copy| copy.deleted.is_none()).count();
            (nr_alive > 2).then(|| alive(&copies).unwrap()).map(|at| {
                copies[at].deleted = Some(self.device.events());
                copies[at].name.clone()
            })
        };
        if let Some(name) = old {
            self.fs.delete_subvolume(TOP, name.as_bytes(), None).unwrap();
            match rng.below(3) {
                0 => self.fs.finish_deletions(&mut |_| Ok(())).unwrap(),
                1 => self.fs.sync().unwrap(),
                _ => {}
            }
            return;
        }
        let name = format!("copy-{}", self.copies.lock().unwrap().len());
        let files = if rng.one_in(2) {
            let _still = self.changing.write().unwrap();
            self.fs.snapshot(work.root, TOP, name.as_bytes(), rng.one_in(2)).unwrap();
            self.files.iter().map(|file| file.lock().unwrap()).map(|file| (file.name.clone(), file.content())).collect()
        } else {
            let dir = self.fs.create_subvolume(TOP, name.as_bytes(), &Caller::ROOT).unwrap();
            let file = self.files[rng.index(NR_FILES)].lock().unwrap();
            let target = self.fs.create(dir, b"clone", NewInode::file(0o600), &Caller::ROOT).unwrap().id;
            self.fs.clone_range(file.id, 0, target, 0, (SECTORS * SECTOR) as u64).unwrap();
            self.fs.fsync(target, false).unwrap();
            vec![("clone".to_owned(), file.content())]
        };
        let mut copies = self.copies.lock().unwrap();
        copies.push(Copy { name, files, deleted: None });
        self.device.mark_lane(COPIES, copies.len() as u64);
    }

    fn verify(&self, fs: &Fs, promised: &[Option<u64>], point: usize) {
        let words_of = |dir: InodeId, name: &str| -> Vec<Vec<u64>> {
            let Ok(found) = fs.lookup(dir, name.as_bytes()) else { return vec![vec![ABSENT]; SECTORS] };
            let mut bytes = fs.read(found.id, 0, SECTORS * SECTOR).unwrap();
            bytes.resize(SECTORS * SECTOR, 0);
            let words = |sector: &[u8]| {
                let mut words: Vec<u64> = sector.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
                words.dedup();
                words
            };
            bytes.chunks(SECTOR).map(words).collect()
        };
        for (nr, file) in self.files.iter().enumerate() {
            let file = file.lock().unwrap();
            let least = promised[nr].unwrap_or(0);
            for (sector, words) in words_of(file.dir, &file.name).iter().enumerate() {
                let history = &file.words[sector];
                let from = history.iter().rposition(|(change, _)| *change <= least).unwrap_or(0);
                for word in words {
                    let is_allowed = history[from..].iter().any(|(_, known)| known == word);
                    assert!(is_allowed, "file {nr}, sector {sector}: {word} at {point}; promised {least}: {history:?}");
                }
            }
        }
        for copy in self.copies.lock().unwrap().iter().take(promised[COPIES].unwrap_or(0) as usize) {
            let Ok(dir) = fs.lookup(TOP, copy.name.as_bytes()) else {
                assert!(copy.deleted.is_some_and(|event| event <= point), "{} is lost at {point}", copy.name);
                continue;
            };
            for (name, content) in &copy.files {
                for (sector, words) in words_of(dir.id, name).iter().enumerate() {
                    let wanted = content[sector];
                    assert!(*words == [wanted], "{}/{name}, sector {sector}: {words:?}, not {wanted}", copy.name);
                }
            }
        }
    }
}

#[test]
fn clones_and_snapshots_of_files_written_in_place_survive_power_cuts() {
    let seed = Rng::seed_or(1);
    println!("UBTRFS_SEED={seed}");
    #[cfg(debug_assertions)]
    ubtrfs_transaction::delay_races(Duration::from_millis(8));
    let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
    for options in ["nodatacow,commit=300", "defaults,commit=300", "nodatacow,discard=sync", "nodatasum,commit=1"] {
        let device = Arc::new(RecordingDevice::new(Medium::formatted(1 << 30, &mkfs).unwrap()));
        let open = |device: Arc<dyn Device>| Fs::open(vec![device], MountOptions::parse(options).unwrap()).unwrap();
        let fs = open(Arc::clone(&device) as Arc<dyn Device>);
        let work = fs.create_subvolume(TOP, b"work", &Caller::ROOT).unwrap();
        let file = |nr: usize| {
            let name = nr.to_string();
            let id = fs.create(work, name.as_bytes(), NewInode::file(0o600), &Caller::ROOT).unwrap().id;
            fs.write(id, 0, &[0; SECTORS * SECTOR]).unwrap();
            Mutex::new(File { id, dir: work, name, words: vec![vec![(0, 0)]; SECTORS], nr_changes: 0 })
        };
        let run = Run {
            fs: &fs,
            device: &device,
            files: (0..NR_FILES).map(file).collect(),
            copies: Mutex::default(),
            changing: RwLock::default(),
            next_word: AtomicU64::new(1),
            stop: AtomicBool::new(false),
        };
        fs.sync().unwrap();
        let began_at = device.events();
        std::thread::scope(|scope| {
            let run = &run;
            for thread in 0..3 {
                let mut rng = Rng::new(seed * 100 + thread);
                scope.spawn(move || run.until_stopped(|| run.change(&mut rng)));
            }
            let mut rng = Rng::new(seed * 100 + 10);
            scope.spawn(move || run.until_stopped(|| run.copy(work, &mut rng)));
            let mut rng = Rng::new(seed * 100 + 11);
            scope.spawn(move || {
                run.until_stopped(|| {
                    std::thread::sleep(Duration::from_millis(rng.below(30)));
                    match rng.below(4) {
                        0 => run.fs.sync().unwrap(),
                        1 => drop(run.fs.resize_device(DevId(1), (512 + rng.below(513)) << 20, &Job::new())),
                        _ => {
                            let group = *rng.pick(&run.fs.block_groups());
                            drop(run.fs.relocate_block_group(group.start, &Job::new()));
                        }
                    }
                });
            });
            let began = Instant::now();
            let _stopping = Stopping(&run.stop);
            while began.elapsed() < Duration::from_millis(900) && !run.stop.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let mut rng = Rng::new(seed);
        let nr_events = device.events() - began_at;
        let mut points: Vec<usize> = (0..NR_CUTS).map(|_| began_at + rng.index(nr_events + 1)).collect();
        points.sort_unstable();
        let mut cuts = device.cuts();
        for point in points {
            let (medium, outcome) = cuts.cut(point, &mut rng);
            check_medium(&medium).unwrap();
            let after = Arc::new(MediumDevice::new(medium));
            let cut = open(Arc::clone(&after) as Arc<dyn Device>);
            run.verify(&cut, &outcome.promised_by, point);
            cut.close().unwrap();
            check_medium(&after.content()).unwrap();
        }
        let nr_changes: u64 = run.files.iter().map(|file| file.lock().unwrap().nr_changes).sum();
        println!("{options}: {nr_changes} changes, {} copies, {nr_events} events", run.copies.lock().unwrap().len());
        fs.close().unwrap();
    }
}
