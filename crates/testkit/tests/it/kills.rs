//! Tests killed servers: the device has everything that the server wrote, in order, and nothing more. Everything
//! fsynced exists, no inode that should exist is lost, and the checker finds the filesystem clean.
//!
//! Method: the content of the device is copied while the filesystem is open, and opened as another device. Cases that
//! once failed come first, then random cases: sessions of a few operations, each killed at its end and continued by
//! the next session.

use std::collections::BTreeMap;
use std::sync::Arc;

use ubtrfs_fs::{Caller, Fs, InodeId, MountOptions, NewInode, RenameFlags};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{FsTarget, Medium, MediumDevice, Rng, check_medium};

const ROOT: Caller = Caller::ROOT;

/// An open filesystem that commits only on request.
struct Server {
    device: Arc<MediumDevice>,
    target: FsTarget,
}

impl Server {
    fn new() -> Self {
        Self::start(Medium::formatted(64 << 20, &MkfsOptions::default()).unwrap())
    }

    fn start(medium: Medium) -> Self {
        let device = Arc::new(MediumDevice::new(medium));
        // Keep few inodes in memory.
        let options = MountOptions { commit_secs: 3000, memory_bytes: 1 << 20, ..MountOptions::default() };
        let target = FsTarget::on_device(Arc::clone(&device) as _, options).unwrap();
        Self { device, target }
    }

    fn fs(&self) -> &Fs {
        self.target.fs()
    }

    fn id(&self, path: &str) -> InodeId {
        self.target.lookup(path.as_bytes()).unwrap().id
    }

    fn file(&self, dir: InodeId, name: &[u8]) -> InodeId {
        self.fs().create(dir, name, NewInode::file(0o644), &ROOT).unwrap().id
    }

    fn dir(&self, dir: InodeId, name: &[u8]) -> InodeId {
        self.fs().create(dir, name, NewInode::dir(0o755), &ROOT).unwrap().id
    }

    /// Kills this server and starts the next one. The log replay of the next server must leave the filesystem clean.
    #[must_use]
    fn kill(self) -> Self {
        let medium = self.device.content();
        self.fs().abort("killed".to_owned());
        let replay = Self::start(medium.clone());
        replay.target.close().unwrap();
        check_medium(&replay.device.content()).unwrap();
        Self::start(medium)
    }
}

#[test]
fn the_number_of_a_directory_that_was_removed_is_not_used_again_before_a_commit() {
    let server = Server::new();
    let top = server.fs().root();
    let dir = server.dir(top, b"dir");
    let last = server.dir(dir, b"last");
    server.fs().sync().unwrap();
    let server = server.kill();
    server.fs().rmdir(dir, b"last").unwrap();
    let new = server.dir(top, b"new");
    assert_ne!(new, last);
    server.fs().fsync(server.file(new, b"file"), false).unwrap();
    let server = server.kill();
    server.id("new/file");
}

#[test]
fn the_number_of_an_orphan_is_not_used_again_before_a_commit() {
    let server = Server::new();
    let top = server.fs().root();
    let orphan = server.dir(top, b"orphan");
    server.fs().open_inode(orphan).unwrap();
    server.fs().rmdir(top, b"orphan").unwrap();
    server.fs().sync().unwrap();
    let server = server.kill();
    let new = server.dir(top, b"new");
    assert_ne!(new, orphan);
    server.fs().fsync(server.file(new, b"file"), false).unwrap();
    let server = server.kill();
    server.id("new/file");
}

#[test]
fn a_file_whose_index_was_used_again_is_not_lost() {
    let server = Server::new();
    let top = server.fs().root();
    let dir = server.dir(top, b"dir");
    server.file(dir, b"moved");
    server.fs().sync().unwrap();
    let server = server.kill();
    // The new server loads the directory again. After this rename, the index of `moved` is free, and the next file
    // gets that index.
    server.fs().rename(dir, b"moved", top, b"there", RenameFlags::empty()).unwrap();
    server.fs().fsync(server.file(dir, b"file"), false).unwrap();
    let server = server.kill();
    server.id("dir/file");
    let lives = ["dir/moved", "there"].iter().any(|path| server.target.lookup(path.as_bytes()).is_ok());
    assert!(lives, "it has its old name or its new one");
}

/// Inodes by number and transaction of creation, each with a directory and the inode's name in that directory.
type Names = BTreeMap<(u64, u64), (InodeId, Vec<u8>)>;

fn entries(fs: &Fs, dir: InodeId) -> Result<Vec<(Vec<u8>, InodeId)>, ubtrfs_fs::Error> {
    let mut found = Vec::new();
    fs.readdir(dir, 0, &mut |entry| {
        if !matches!(entry.name, b"." | b"..") {
            found.push((entry.name.to_vec(), entry.id));
        }
        true
    })?;
    Ok(found)
}

/// Returns all inodes that have a name.
fn living(fs: &Fs) -> Names {
    let mut names = Names::new();
    let mut dirs = vec![fs.root()];
    while let Some(dir) = dirs.pop() {
        for (name, id) in entries(fs, dir).unwrap() {
            let attr = fs.getattr(id).unwrap();
            names.insert((id.ino.0, attr.generation.0), (dir, name));
            if attr.is_dir() {
                dirs.push(id);
            }
        }
    }
    names
}

/// A thread that changes names at random, with fsyncs.
struct Worker {
    rng: Rng,
    dirs: Vec<InodeId>,
    /// The inodes that the thread fsynced.
    fsynced: Vec<(u64, u64)>,
}

impl Worker {
    /// Makes a worker that knows some of the existing directories.
    fn new(fs: &Fs, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut dirs = vec![fs.root()];
        for (dir, name) in living(fs).into_values() {
            let attr = fs.lookup(dir, &name).unwrap();
            if attr.is_dir() && rng.one_in(3) {
                dirs.push(attr.id);
            }
        }
        Self { rng, dirs, fsynced: Vec::new() }
    }

    /// Picks a name in a random directory, often in the newest directory.
    fn pick(&mut self) -> (InodeId, Vec<u8>) {
        let newest = self.dirs[self.dirs.len() - 1];
        let dir = if self.rng.one_in(3) { newest } else { *self.rng.pick(&self.dirs) };
        (dir, format!("n{}", self.rng.below(6)).into_bytes())
    }

    fn fsync(&mut self, fs: &Fs, id: InodeId) -> Result<(), ubtrfs_fs::Error> {
        let generation = fs.getattr(id)?.generation.0;
        fs.fsync(id, false)?;
        self.fsynced.push((id.ino.0, generation));
        Ok(())
    }

    fn remove_all(fs: &Fs, dir: InodeId, name: &[u8]) -> Result<(), ubtrfs_fs::Error> {
        let attr = fs.lookup(dir, name)?;
        if !attr.is_dir() {
            return fs.unlink(dir, name);
        }
        entries(fs, attr.id)?.iter().try_for_each(|(below, _)| Self::remove_all(fs, attr.id, below))?;
        fs.rmdir(dir, name)
    }

    fn step(&mut self, fs: &Fs, moves_dirs: bool) -> Result<(), ubtrfs_fs::Error> {
        let ((dir, name), (dir2, name2)) = (self.pick(), self.pick());
        match self.rng.below(28) {
            0..6 => {
                let id = fs.create(dir, &name, NewInode::file(0o644), &ROOT)?.id;
                if self.rng.one_in(2) {
                    fs.write(id, 0, &[7; 300])?;
                }
                if self.rng.one_in(2) {
                    self.fsync(fs, id)?;
                }
            }
            6..11 => self.dirs.push(fs.create(dir, &name, NewInode::dir(0o755), &ROOT)?.id),
            11 => {
                fs.create(dir, &name, NewInode::symlink(b"target"), &ROOT)?;
            }
            12 | 13 => {
                fs.link(fs.lookup(dir, &name)?.id, dir2, &name2)?;
            }
            14 => Self::remove_all(fs, dir, &name)?,
            15 => {
                // Open the inode first, so that it stays in use after its name is removed.
                let attr = fs.lookup(dir, &name)?;
                fs.open_inode(attr.id)?;
                if attr.is_dir() { fs.rmdir(dir, &name)? } else { fs.unlink(dir, &name)? }
            }
            16..19 => {
                let flags = [RenameFlags::empty(), RenameFlags::empty(), RenameFlags::EXCHANGE, RenameFlags::WHITEOUT];
                // Move directories only in some sessions: after such a move, an fsync in the same transaction commits
                // instead of writing the log.
                if moves_dirs || !fs.lookup(dir, &name)?.is_dir() {
                    fs.rename(dir, &name, dir2, &name2, *self.rng.pick(&flags))?;
                }
            }
            19..24 => {
                let id = fs.lookup(dir, &name)?.id;
                self.fsync(fs, id)?;
            }
            24 | 25 => fs.fsync(dir, false)?,
            26 => fs.rmdir(dir, &name)?,
            _ => {
                if self.rng.one_in(3) {
                    fs.sync()?;
                }
            }
        }
        Ok(())
    }
}

/// The errors that an operation may report because of a race with another thread, or because its name is random.
const EXPECTED: [i32; 9] = [1, 2, 16, 17, 20, 21, 22, 39, 116];

/// Runs consecutive sessions on one filesystem.
fn sessions(seed: u64, nr_sessions: u64, nr_threads: u64) {
    let mut rng = Rng::new(seed);
    let mut server = Server::new();
    for session in 0..nr_sessions {
        let what = format!("seed {seed}, {nr_threads} threads, session {session}");
        // Use few steps in most sessions, so that many sessions end before the first commit.
        let most_steps = if rng.one_in(3) { 120 } else { 20 };
        let (nr_steps, moves_dirs) = (5 + rng.below(most_steps), rng.one_in(4));
        let fs = server.fs();
        // Remove some of the inodes with the highest numbers, so that new inodes can get their numbers and indexes.
        for _ in 0..rng.below(4) {
            if let Some((_, (dir, name))) = living(fs).pop_last() {
                Worker::remove_all(fs, dir, &name).unwrap();
            }
        }
        let workers: Vec<_> = (0..nr_threads).map(|_| Worker::new(fs, rng.next_u64())).collect();
        let fsynced: Vec<(u64, u64)> = std::thread::scope(|scope| {
            let run = |mut worker: Worker| {
                for _ in 0..nr_steps {
                    if let Err(error) = worker.step(fs, moves_dirs) {
                        assert!(EXPECTED.contains(&error.errno()), "{error}");
                    }
                }
                worker.fsynced
            };
            let threads: Vec<_> = workers.into_iter().map(|worker| scope.spawn(move || run(worker))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let live = living(fs);
        let options = MountOptions { read_only: true, nologreplay: true, ..MountOptions::default() };
        let device = Arc::new(MediumDevice::new(server.device.content()));
        let committed = living(FsTarget::on_device(device, options).unwrap().fs());
        println!("{what}: {:?}", server.fs().log_stats());
        server = server.kill();
        let found = living(server.fs());
        for inode in committed.keys().chain(&fsynced).filter(|inode| live.contains_key(inode)) {
            assert!(found.contains_key(inode), "{what}: {inode:?} is lost");
        }
    }
}

fn rounds(default: u64) -> u64 {
    std::env::var("ROUNDS").map_or(default, |rounds| rounds.parse().unwrap())
}

#[test]
fn synced_files_survive_many_kills_of_the_server() {
    let first = Rng::seed_or(100);
    (first..first + rounds(6)).for_each(|seed| sessions(seed, 40, 1));
}

#[test]
fn synced_files_of_several_threads_survive_kills() {
    let first = Rng::seed_or(200);
    (first..first + rounds(4)).for_each(|seed| sessions(seed, 20, 3));
}
