//! Many threads change names in the same few directories, with commits in between. There is no deadlock, operations
//! fail only with errors that a race can cause, and `btrfs check` finds every link count and directory size right.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ubtrfs_fs::{Caller, Fs, InodeId, MountOptions, NewInode, RenameFlags, SetAttr, XattrFlags};
use ubtrfs_testkit::{FsTarget, Image, Rng, btrfs_check};

const ROOT: Caller = Caller::ROOT;
const NR_THREADS: u64 = 8;
const NR_OPS: usize = 3000;

/// Errors that a race with another thread may cause: not permitted (a link to a directory), not found, exists, not a
/// directory, is a directory, not empty, invalid (a loop), stale, busy.
const EXPECTED: [i32; 9] = [1, 2, 17, 20, 21, 39, 22, 116, 16];

fn pick(dirs: &[InodeId], rng: &mut Rng) -> (InodeId, Vec<u8>) {
    (*rng.pick(dirs), format!("n{}", rng.below(12)).into_bytes())
}

fn one(fs: &Fs, dirs: &[InodeId], rng: &mut Rng) -> Result<(), ubtrfs_fs::Error> {
    let (dir, name) = pick(dirs, rng);
    let (dir2, name2) = pick(dirs, rng);
    match rng.below(14) {
        0 | 1 => fs.create(dir, &name, NewInode::file(0o644), &ROOT).map(drop),
        2 => fs.create(dir, &name, NewInode::dir(0o755), &ROOT).map(drop),
        3 => fs.create(dir, &name, NewInode::symlink(b"target"), &ROOT).map(drop),
        4 => fs.link(fs.lookup(dir, &name)?.id, dir2, &name2).map(drop),
        5 => fs.unlink(dir, &name),
        6 => fs.rmdir(dir, &name),
        7 | 8 => fs.rename(dir, &name, dir2, &name2, RenameFlags::empty()),
        9 => fs.rename(dir, &name, dir2, &name2, RenameFlags::EXCHANGE),
        10 => fs.rename(dir, &name, dir2, &name2, RenameFlags::WHITEOUT),
        11 => {
            let id = fs.lookup(dir, &name)?.id;
            fs.open_inode(id)?;
            let result = fs.unlink(dir, &name);
            fs.release_inode(id);
            result
        }
        12 => {
            let id = fs.lookup(dir, &name)?.id;
            fs.setxattr(id, b"trusted.x", &rng.next_u64().to_le_bytes(), XattrFlags::empty(), &ROOT)?;
            fs.setattr(id, &SetAttr { mode: Some(0o600), ..SetAttr::default() }, &ROOT).map(drop)
        }
        _ => fs.readdir(dir, 0, &mut |entry| {
            let _ = fs.getattr(entry.id);
            true
        }),
    }
}

/// Runs `work` in several threads, passing the thread's number, while another thread commits. Ends the program if the
/// threads hang.
fn side_by_side(fs: &Fs, seed: u64, work: &(dyn Fn(u64) + Sync)) {
    let done = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..NR_THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
        scope.spawn(move || {
            while !done.load(Ordering::Acquire) {
                fs.sync().unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let watch = scope.spawn(move || {
            for _ in 0..1200 {
                if done.load(Ordering::Acquire) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            eprintln!("seed {seed}: the threads hang");
            std::process::abort();
        });
        let results: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        done.store(true, Ordering::Release);
        watch.join().unwrap();
        results.into_iter().for_each(|result| result.unwrap());
    });
}

#[test]
fn threads_in_the_same_directories() {
    let seed = Rng::seed_or(1);
    eprintln!("seed {seed}");
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let device: Arc<dyn ubtrfs_device::Device> =
        Arc::new(ubtrfs_device::FileDevice::open(image.path(), ubtrfs_device::Access::ReadWrite).unwrap());
    let options = MountOptions { commit_secs: 1, ..MountOptions::default() };
    let target = FsTarget::on_device(device, options).unwrap();
    let fs = target.fs();
    let top = fs.root();
    let mut dirs = vec![top];
    for i in 0..3 {
        let parent = *dirs.last().unwrap();
        dirs.push(fs.create(parent, format!("keep{i}").as_bytes(), NewInode::dir(0o755), &ROOT).unwrap().id);
    }
    let threads = |thread: u64| {
        let mut rng = Rng::new(seed * 1000 + thread);
        for _ in 0..NR_OPS {
            if let Err(error) = one(fs, &dirs, &mut rng) {
                assert!(EXPECTED.contains(&error.errno()), "seed {seed}: {error}");
            }
        }
    };
    side_by_side(fs, seed, &threads);
    let before = target.walk().unwrap();
    target.close().unwrap();
    btrfs_check(image.path()).unwrap();
    let target = FsTarget::open(image.path(), "ro").unwrap();
    assert_eq!(before, target.walk().unwrap());
    target.close().unwrap();
}

/// Some threads remove files with one or two names that are not in memory, while other threads look up, open and read
/// these files.
#[test]
fn files_are_removed_before_anyone_has_loaded_them() {
    const NR_FILES: u64 = 4000;
    let seed = Rng::seed_or(1);
    eprintln!("seed {seed}");
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let name = |number: u64| format!("f{number}").into_bytes();
    let target = FsTarget::open(image.path(), "").unwrap();
    let (fs, root) = (target.fs(), target.fs().root());
    for number in 0..NR_FILES {
        let id = fs.create(root, &name(number), NewInode::file(0o644), &ROOT).unwrap().id;
        fs.write(id, 0, &name(number)).unwrap();
        if number % 5 == 0 {
            fs.link(id, root, format!("l{number}").as_bytes()).unwrap();
        }
    }
    target.close().unwrap();

    let target = FsTarget::open(image.path(), "").unwrap();
    let fs = target.fs();
    let threads = |thread: u64| {
        let mut rng = Rng::new(seed * 1000 + thread);
        let removes = thread < NR_THREADS / 2;
        for step in 0..NR_FILES {
            // Keep the file numbers that the threads choose close to each other, so that several threads use the same
            // file at once.
            let number = (step + rng.below(8)) % NR_FILES;
            let result = match removes {
                true => fs.unlink(root, &name(number)),
                false => fs.lookup(root, &name(number)).and_then(|attr| {
                    fs.open_inode(attr.id)?;
                    let found = fs.read(attr.id, 0, 16);
                    fs.release_inode(attr.id);
                    assert_eq!(found?, name(number), "seed {seed}");
                    Ok(())
                }),
            };
            if let Err(error) = result {
                assert!(EXPECTED.contains(&error.errno()), "seed {seed}: {error}");
            }
        }
    };
    side_by_side(fs, seed, &threads);
    for number in 0..NR_FILES {
        let _ = fs.unlink(root, &name(number));
    }
    let left = target.walk().unwrap().into_iter().filter(|entry| !entry.path.is_empty()).count() as u64;
    assert_eq!(left, NR_FILES / 5, "seed {seed}: second names stay");
    target.close().unwrap();
    btrfs_check(image.path()).unwrap();
}
