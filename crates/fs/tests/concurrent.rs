//! Many threads changing names in the same few directories, with commits in between: no deadlock, no error that single
//! operations could not have had, and `btrfs check` finds every link count and directory size right.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ubtrfs_fs::{Caller, Fs, InodeId, MountOptions, NewInode, RenameFlags, SetAttr, XattrFlags};
use ubtrfs_testkit::{FsTarget, Image, Rng, btrfs_check};

const ROOT: Caller = Caller::ROOT;
const NR_THREADS: u64 = 8;
const NR_OPS: usize = 3000;

/// What a race with another thread may answer: not permitted (a link to a directory), not found, exists, not a directory, is a directory, not empty, invalid
/// (a loop), stale, busy.
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
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..NR_THREADS)
            .map(|thread| {
                let dirs = &dirs;
                scope.spawn(move || {
                    let mut rng = Rng::new(seed * 1000 + thread);
                    for _ in 0..NR_OPS {
                        if let Err(error) = one(fs, dirs, &mut rng) {
                            assert!(EXPECTED.contains(&error.errno()), "seed {seed}: {error}");
                        }
                    }
                })
            })
            .collect();
        let done = &done;
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
    let before = target.walk().unwrap();
    target.close().unwrap();
    btrfs_check(image.path()).unwrap();
    let target = FsTarget::open(image.path(), "ro").unwrap();
    assert_eq!(before, target.walk().unwrap());
    target.close().unwrap();
}
