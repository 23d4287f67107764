//! Measures operations in a directory with very many entries, and prints their times. Each operation should be about as
//! fast as in a small directory.
//!
//! `UBTRFS_SCALE` sets the number of entries (default 100,000).

use std::time::{Duration, Instant};

use ubtrfs_fs::{Caller, NewInode, RenameFlags};
use ubtrfs_testkit::{FsTarget, Image, Rng, btrfs_check};

const ROOT: Caller = Caller::ROOT;

fn nr_entries() -> u64 {
    std::env::var("UBTRFS_SCALE").ok().and_then(|value| value.parse().ok()).unwrap_or(100_000)
}

/// Calls `op` with each number, and prints the time that a call takes on average. Returns the total time.
fn timed(what: &str, numbers: impl Iterator<Item = u64>, mut op: impl FnMut(u64)) -> Duration {
    let mut count = 0u32;
    let start = Instant::now();
    for number in numbers {
        op(number);
        count += 1;
    }
    let elapsed = start.elapsed();
    eprintln!("{what}: {count} in {elapsed:?}, {:.1} us each", elapsed.as_secs_f64() * 1e6 / f64::from(count));
    elapsed
}

fn name(i: u64) -> Vec<u8> {
    format!("entry-{:016x}", i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).into_bytes()
}

#[test]
fn a_directory_with_many_entries() {
    let count = nr_entries();
    let image = Image::kernel_made(2 << 30, &[]).unwrap();
    let target = FsTarget::open(image.path(), "").unwrap();
    let fs = target.fs();
    let dir = fs.create(fs.root(), b"many", NewInode::dir(0o755), &ROOT).unwrap().id;
    timed("create", 0..count, |i| {
        fs.create(dir, &name(i), NewInode::file(0o644), &ROOT).unwrap();
    });
    timed("sync", [0].into_iter(), |_| fs.sync().unwrap());
    target.close().unwrap();
    btrfs_check(image.path()).unwrap();

    let target = FsTarget::open(image.path(), "noatime").unwrap();
    let fs = target.fs();
    let mut rng = Rng::new(1);
    let some: Vec<u64> = (0..count / 10).map(|_| rng.below(count)).collect();
    timed("lookup, cold", some.iter().copied(), |i| assert!(fs.lookup(dir, &name(i)).is_ok()));
    timed("lookup, warm", some.iter().copied(), |i| assert!(fs.lookup(dir, &name(i)).is_ok()));
    let mut seen = 0;
    timed("readdir", [0].into_iter(), |_| {
        fs.readdir(dir, 0, &mut |_| {
            seen += 1;
            true
        })
        .unwrap();
    });
    assert_eq!(seen, count + 2);
    timed("rename", 0..count / 10, |i| {
        fs.rename(dir, &name(i), dir, format!("renamed {i}").as_bytes(), RenameFlags::empty()).unwrap();
    });
    timed("unlink", count / 10..count, |i| fs.unlink(dir, &name(i)).unwrap());
    timed("unlink", 0..count / 10, |i| fs.unlink(dir, format!("renamed {i}").as_bytes()).unwrap());
    fs.rmdir(fs.root(), b"many").unwrap();
    timed("close", [0].into_iter(), |_| fs.close().unwrap());
    drop(target);
    btrfs_check(image.path()).unwrap();
}
