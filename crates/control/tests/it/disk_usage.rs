//! Tests counts of the bytes that files use (`disk_usage`), on an image that is open in this process.
//!
//! Method: the test makes files, reads the stream of the count, and compares it with what it made.

use std::io::BufReader;
use std::os::fd::AsFd;

use crate::common::{ROOT, filesystem};
use rustix::io::Errno;
use ubtrfs_control::disk_usage::{DiskUsage, Request, collect};
use ubtrfs_control::{Channel, OpenedFile, Result};
use ubtrfs_fs::{Fs, InodeId, NewInode};
use ubtrfs_transaction::Job;

fn count(fs: &Fs, of: InodeId, names: bool) -> Result<DiskUsage> {
    let (from, to) = std::io::pipe().unwrap();
    let request = ubtrfs_control::Request::DiskUsage(Request { of: 0, names });
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || collect(BufReader::new(from), names).unwrap());
        let called = Channel::image(fs, 0, 0).call_with_output(
            request,
            &[&OpenedFile::Inode(of)],
            to.as_fd(),
            false,
            &Job::new(),
        );
        drop(to);
        let usage = reader.join().unwrap();
        called.map(|_| usage)
    })
}

fn directory(fs: &Fs, dir: InodeId, name: &str) -> InodeId {
    fs.create(dir, name.as_bytes(), NewInode::dir(0o755), &ROOT).unwrap().id
}

fn file(fs: &Fs, dir: InodeId, name: &str, len: usize) -> InodeId {
    let id = fs.create(dir, name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id;
    fs.write(id, 0, &vec![7; len]).unwrap();
    id
}

#[test]
fn everything_below_a_directory_is_counted() {
    let fs = filesystem("");
    let (a, b) = (directory(&fs, fs.root(), "a"), directory(&fs, fs.root(), "b"));
    let linked = file(&fs, a, "linked", 8192);
    // More files than the server keeps at once.
    for number in 0..1500 {
        file(&fs, b, &format!("{number:0200}"), 4096);
    }
    let below = directory(&fs, b, "below");
    fs.link(linked, below, b"link").unwrap();
    let copied = file(&fs, below, "copied", 16384);
    let copy = file(&fs, below, "copy", 0);
    fs.sync().unwrap();
    fs.clone_range(copied, 0, copy, 0, 0).unwrap();
    let usage = count(&fs, fs.root(), true).unwrap();
    let total = 8192 + 1500 * 4096 + 2 * 16384;
    assert_eq!((usage.total, usage.exclusive, usage.set_shared), (total, total - 2 * 16384, 16384));
    assert_eq!(usage.names.len(), 3 + 1 + 1500 + 2, "a file with two names is listed once");
    let of = |name: &[u8]| usage.names.iter().find(|entry| entry.name == name).unwrap();
    assert_eq!((of(b"a").total, of(b"b").total), (8192, total - 8192));
    assert_eq!(of(b"below").parent.map(|parent| usage.names[parent as usize].name.clone()), Some(b"b".to_vec()));
    let sums = count(&fs, fs.root(), false).unwrap();
    assert_eq!(sums, DiskUsage { names: Vec::new(), ..usage });
    fs.close().unwrap();
}

#[test]
fn directories_that_are_nested_too_deep_are_refused() {
    let fs = filesystem("");
    let nested = |count: usize, name: &str| {
        let top = directory(&fs, fs.root(), name);
        let last = (1..count).fold(top, |dir, _| directory(&fs, dir, "d"));
        file(&fs, last, "file", 4096);
        top
    };
    let (allowed, refused) = (nested(16 << 10, "allowed"), nested((16 << 10) + 1, "refused"));
    assert_eq!(count(&fs, allowed, true).unwrap().names.len(), 16 << 10);
    assert_eq!(count(&fs, refused, true).unwrap_err().errno(), Errno::TOOBIG);
    assert_eq!(count(&fs, refused, false).unwrap_err().errno(), Errno::TOOBIG);
    fs.close().unwrap();
}
