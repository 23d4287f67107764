//! Changes become durable without a request: after a burst of changes ends, at `commit=`, and on drop. Nothing is
//! written after the filesystem is closed, and every call that closes it returns the outcome of the first.
//!
//! Method: the image file is copied while the filesystem is open; the copy shows what a power cut would leave.

use std::time::{Duration, Instant};

use ubtrfs_fs::{Caller, Error, NewInode};
use ubtrfs_testkit::{FsTarget, Image, btrfs_check};

const ROOT: Caller = Caller::ROOT;

/// Waits until a copy of the image shows this file with this content. Returns false if that takes longer than `limit`.
fn wait_for(image: &Image, path: &[u8], content: &[u8], limit: Duration) -> bool {
    let start = Instant::now();
    while start.elapsed() < limit {
        let copy = Image::copy_of(image.path()).unwrap();
        let target = FsTarget::open(copy.path(), "ro").unwrap();
        let fs = target.fs();
        let found = fs.lookup_path(path, true).and_then(|attr| fs.read(attr.id, 0, 1 << 20));
        if found.is_ok_and(|found| found == content) {
            drop(target);
            btrfs_check(copy.path()).unwrap();
            return true;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    false
}

#[test]
fn a_burst_that_went_quiet_is_committed() {
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let target = FsTarget::open(image.path(), "commit=300").unwrap();
    let fs = target.fs();
    for round in 0..2 {
        let name = format!("f{round}");
        let id = fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id;
        assert_eq!(fs.write(id, 0, &[7; 100_000]).unwrap(), 100_000);
        assert!(wait_for(&image, name.as_bytes(), &[7; 100_000], Duration::from_secs(20)), "round {round}");
    }
}

#[test]
fn a_steady_stream_is_committed_at_the_interval() {
    committed_at_the_interval("commit=1", None);
}

#[test]
fn the_interval_of_commits_can_change() {
    committed_at_the_interval("commit=300", Some(1));
}

/// Changes that never pause are committed at the interval of the options, or at the one that is set later.
fn committed_at_the_interval(options: &str, set_later: Option<u32>) {
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let target = FsTarget::open(image.path(), options).unwrap();
    let fs = target.fs();
    set_later.into_iter().for_each(|secs| fs.change_options(&[format!("commit={secs}")]).unwrap());
    fs.create(fs.root(), b"first", NewInode::file(0o644), &ROOT).unwrap();
    let found = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| wait_for(&image, b"first", b"", Duration::from_secs(20)));
        let mut i = 0;
        while !waiter.is_finished() {
            fs.create(fs.root(), format!("{i}").as_bytes(), NewInode::dir(0o755), &ROOT).unwrap();
            i += 1;
            std::thread::sleep(Duration::from_millis(20));
        }
        waiter.join().unwrap()
    });
    assert!(found);
}

#[test]
fn dropping_the_last_handle_closes() {
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let target = FsTarget::open(image.path(), "").unwrap();
    let fs = target.fs();
    let id = fs.create(fs.root(), b"f", NewInode::file(0o644), &ROOT).unwrap().id;
    fs.write(id, 0, b"content").unwrap();
    drop(target);
    assert!(wait_for(&image, b"f", b"content", Duration::from_secs(5)));
}

/// An unnamed file that is closed at once leaves no change in the trees.
#[test]
fn a_transaction_whose_changes_come_to_nothing_is_committed() {
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let target = FsTarget::open(image.path(), "commit=300").unwrap();
    let fs = target.fs();
    for round in 0..3u8 {
        fs.create(fs.root(), &[b'a' + round], NewInode::file(0o644), &ROOT).unwrap();
        fs.sync().unwrap();
        let generation = fs.superblock().generation;
        let id = fs.tmpfile(fs.root(), 0o600, &ROOT).unwrap().id;
        fs.forget(id, 1);
        fs.release_inode(id);
        fs.sync().unwrap();
        assert!(fs.superblock().generation > generation && fs.read_only().is_none());
    }
    fs.close().unwrap();
    drop(target);
    btrfs_check(image.path()).unwrap();
    let target = FsTarget::open(image.path(), "ro").unwrap();
    assert!(target.fs().lookup_path(b"c", true).is_ok());
}

#[test]
fn every_close_waits_for_the_last_commit() {
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let target = FsTarget::open(image.path(), "commit=300").unwrap();
    let fs = target.fs();
    let id = fs.create(fs.root(), b"file", NewInode::file(0o644), &ROOT).unwrap().id;
    let content = vec![7; 60 << 20];
    fs.write(id, 0, &content).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                fs.close().unwrap();
                let copy = Image::copy_of(image.path()).unwrap();
                let theirs = FsTarget::open(copy.path(), "ro").unwrap();
                let found = theirs.fs().lookup_path(b"file", true).expect("close returned, so the file is durable");
                assert_eq!(found.size, content.len() as u64);
            });
        }
    });
    drop(target);
    btrfs_check(image.path()).unwrap();
}

#[test]
fn every_close_has_the_outcome_of_the_first() {
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let target = FsTarget::open(image.path(), "commit=300").unwrap();
    let fs = target.fs();
    fs.create(fs.root(), b"file", NewInode::file(0o644), &ROOT).unwrap();
    fs.abort("a handler panicked".to_owned());
    let first = fs.close().unwrap_err();
    assert_eq!(first.errno(), rustix::io::Errno::ROFS.raw_os_error(), "{first}");
    assert!(first.to_string().contains("a handler panicked"), "{first}");
    let later = fs.close().unwrap_err();
    assert_eq!((later.errno(), later.to_string()), (first.errno(), first.to_string()));
    drop(target);
    btrfs_check(image.path()).unwrap();
}

#[test]
fn nothing_is_committed_after_close() {
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let target = FsTarget::open(image.path(), "commit=300").unwrap();
    let fs = target.fs();
    fs.create(fs.root(), b"file", NewInode::file(0o644), &ROOT).unwrap();
    fs.close().unwrap();
    assert!(matches!(fs.sync(), Err(Error::Closed)));
    fs.close().unwrap();
    drop(target);
    btrfs_check(image.path()).unwrap();
}
