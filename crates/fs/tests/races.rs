//! Operations beside each other, with threads delayed at race points.
//!
//! The delays are those of the whole process, so tests without delays are elsewhere. `UBTRFS_SEED` repeats the choices
//! of a failed test, but not its order of threads.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "races/cuts.rs"]
mod cuts;
#[path = "races/edits.rs"]
mod edits;
#[path = "races/limits.rs"]
mod limits;
#[path = "races/moves.rs"]
mod moves;
#[path = "races/names.rs"]
mod names;
#[path = "races/quotas.rs"]
mod quotas;
#[path = "races/relocations.rs"]
mod relocations;
#[path = "races/sends.rs"]
mod sends;
#[path = "races/shared_cuts.rs"]
mod shared_cuts;
#[path = "races/shares.rs"]
mod shares;
#[path = "races/sizes.rs"]
mod sizes;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::Scope;
use std::time::{Duration, Instant};

use ubtrfs_device::Device;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::{Ino, RootId};
use ubtrfs_fs::{BlockGroup, Caller, FallocateMode, Fs, InodeId, Job, MountOptions, NewInode};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{Medium, MediumDevice, Rng, check_medium};

const SECTOR: usize = 4096;
const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };

/// A filesystem in memory, with the subvolume `work` that the writers of a test change.
struct Bed {
    device: Arc<MediumDevice>,
    fs: Arc<Fs>,
    work: InodeId,
    stop: AtomicBool,
    seed: u64,
}

impl Bed {
    /// Makes the filesystem, prints the seed, and delays threads from now on by up to `longest`.
    fn new(longest: Duration, mkfs: &MkfsOptions, options: &str) -> Self {
        let seed = Rng::seed_or(1);
        println!("UBTRFS_SEED={seed}");
        #[cfg(debug_assertions)]
        ubtrfs_transaction::delay_races(longest);
        #[cfg(not(debug_assertions))]
        let _ = longest;
        let device = Arc::new(MediumDevice::new(Medium::formatted(1 << 30, mkfs).unwrap()));
        let options = MountOptions::parse(options).unwrap();
        let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], options).unwrap();
        let work = fs.create_subvolume(TOP, b"work", &Caller::ROOT).unwrap();
        Self { device, fs, work, stop: AtomicBool::new(false), seed }
    }

    fn create(&self, name: &str) -> InodeId {
        self.fs.create(self.work, name.as_bytes(), NewInode::file(0o600), &Caller::ROOT).unwrap().id
    }

    fn rng(&self, thread: u64) -> Rng {
        Rng::new(self.seed.wrapping_mul(1000).wrapping_add(thread))
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn groups_of(&self, flags: BlockGroupFlags) -> Vec<BlockGroup> {
        let groups = self.fs.block_groups();
        groups.into_iter().filter(|group| group.flags.contains(flags)).collect()
    }

    /// Calls `round` until the time is over, then tells the other threads to stop. They are told after a panic too.
    fn for_time(&self, time: Duration, mut round: impl FnMut()) {
        let _stop = Stopping(&self.stop);
        let began = Instant::now();
        while began.elapsed() < time && !self.is_stopped() {
            round();
        }
    }

    /// Calls `round` until another thread of the test has ended.
    fn until_stopped(&self, mut round: impl FnMut()) {
        let mut ending = EndingInPanic(&self.stop, true);
        while !self.is_stopped() {
            round();
        }
        ending.1 = false;
    }

    /// Starts a thread for each file, which takes turns and checks the file after each, until another thread has ended.
    fn spawn_writers<'scope, 'env>(
        &'env self,
        scope: &'scope Scope<'scope, 'env>,
        files: &'env mut [Checked],
        what: &'static str,
        turn: impl Fn(&mut Checked, &mut Rng) + Copy + Send + 'scope,
    ) {
        for (nr, file) in files.iter_mut().enumerate() {
            let mut rng = self.rng(nr as u64);
            scope.spawn(move || {
                self.until_stopped(|| {
                    turn(file, &mut rng);
                    file.check(&self.fs, what);
                });
            });
        }
    }

    /// Starts a thread that empties block groups at random until another thread has ended.
    fn spawn_relocations<'scope, 'env>(&'env self, scope: &'scope Scope<'scope, 'env>, mut rng: Rng) {
        scope.spawn(move || self.until_stopped(|| self.relocate_one(&mut rng)));
    }

    /// Empties a random block group, unless the filesystem refuses that.
    fn relocate_one(&self, rng: &mut Rng) {
        let group = *rng.pick(&self.groups_of(BlockGroupFlags::empty()));
        drop(self.fs.relocate_block_group(group.start, &Job::new()));
    }

    /// Makes a read-only snapshot of `work`. Returns its files with their content, which no thread may change meanwhile.
    fn snapshot_of(&self, files: &[Mutex<Checked>], name: &str) -> Vec<Checked> {
        let id = self.fs.snapshot(self.work.root, TOP, name.as_bytes(), true).unwrap();
        let in_snapshot = |file: &Mutex<Checked>| {
            let file = file.lock().unwrap();
            Checked { id: InodeId { root: id.root, ..file.id }, content: file.content.clone() }
        };
        files.iter().map(in_snapshot).collect()
    }

    fn close_and_check(self) {
        self.fs.close().unwrap();
        check_medium(&self.device.content()).unwrap();
    }
}

/// Calls `work`, closes the filesystem and checks it.
fn bed_checked(bed: Bed, work: impl FnOnce(&Bed)) {
    work(&bed);
    bed.close_and_check();
}

struct Stopping<'b>(&'b AtomicBool);

impl Drop for Stopping<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

struct EndingInPanic<'b>(&'b AtomicBool, bool);

impl Drop for EndingInPanic<'_> {
    fn drop(&mut self) {
        if self.1 {
            self.0.store(true, Ordering::Release);
        }
    }
}

/// A file and the content that it must have.
struct Checked {
    id: InodeId,
    content: Vec<u8>,
}

impl Checked {
    fn new(bed: &Bed, name: &str, bytes: usize) -> Self {
        Self { id: bed.create(name), content: vec![0; bytes] }
    }

    fn write(&mut self, fs: &Fs, at: usize, bytes: &[u8]) {
        self.content[at..at + bytes.len()].copy_from_slice(bytes);
        fs.write(self.id, at as u64, bytes).unwrap();
    }

    fn check(&self, fs: &Fs, what: &str) {
        let found = fs.read(self.id, 0, self.content.len()).unwrap();
        let wrong = (0..self.content.len()).find(|at| found.get(*at).copied().unwrap_or(0) != self.content[*at]);
        assert_eq!(wrong, None, "{what}: inode {} of tree {}", self.id.ino, self.id.root);
    }
}

#[test]
fn writes_in_place_beside_relocations_leave_snapshots_alone() {
    const NR_FILES: u64 = 2;
    const SECTORS: usize = 256;
    let seed = Rng::seed_or(1);
    println!("UBTRFS_SEED={seed}");
    #[cfg(debug_assertions)]
    ubtrfs_transaction::delay_races(Duration::from_millis(20));
    let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
    let device = Arc::new(MediumDevice::new(Medium::formatted(1 << 30, &mkfs).unwrap()));
    let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::parse("nodatacow").unwrap()).unwrap();
    let work = fs.create_subvolume(TOP, b"work", &Caller::ROOT).unwrap();
    // Half of the sectors are preallocated. Each sector is an extent of its own, so a relocation copies many leaves.
    let files: Vec<InodeId> = (0..NR_FILES)
        .map(|number| fs.create(work, format!("{number}").as_bytes(), NewInode::file(0o600), &Caller::ROOT).unwrap().id)
        .collect();
    for sector in 0..SECTORS {
        for &id in &files {
            let offset = (sector * SECTOR) as u64;
            match sector % 2 {
                0 => fs.fallocate(id, offset, SECTOR as u64, FallocateMode::empty()).unwrap(),
                _ => drop(fs.write(id, offset, &[1; SECTOR]).unwrap()),
            }
        }
    }
    for round in 0..20 {
        let expected: Vec<Vec<u8>> = files.iter().map(|&id| fs.read(id, 0, SECTORS * SECTOR).unwrap()).collect();
        let name = format!("snapshot-{round}");
        let snapshot = fs.snapshot(work.root, TOP, name.as_bytes(), true).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for &id in &files {
                let (fs, stop, mut rng) = (&fs, &stop, Rng::new(seed + round * NR_FILES + id.ino.0));
                scope.spawn(move || {
                    while !stop.load(Ordering::Acquire) {
                        for _ in 0..16 {
                            let offset = (rng.index(SECTORS) * SECTOR) as u64;
                            fs.write(id, offset, &[rng.below(256) as u8; SECTOR]).unwrap();
                        }
                        fs.flush_data().unwrap();
                    }
                });
            }
            for group in fs.block_groups().iter().filter(|group| group.flags.contains(BlockGroupFlags::DATA)) {
                fs.relocate_block_group(group.start, &Job::new()).unwrap();
            }
            stop.store(true, Ordering::Release);
        });
        for (id, expected) in files.iter().zip(expected) {
            let found = fs.read(InodeId { root: snapshot.root, ..*id }, 0, SECTORS * SECTOR).unwrap();
            let changed = (0..SECTORS).find(|at| found[at * SECTOR..][..SECTOR] != expected[at * SECTOR..][..SECTOR]);
            assert_eq!(changed, None, "round {round}: sector of inode {}", id.ino);
        }
    }
    fs.close().unwrap();
    check_medium(&device.content()).unwrap();
}
