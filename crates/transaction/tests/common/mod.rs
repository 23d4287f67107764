//! What the tests of the engine share: opening an image, having `btrfs check` look at it, an inode's item.

// Each test file takes what it needs.
#![allow(dead_code, reason = "compiled once for each test file")]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::Generation;
use ubtrfs_format::item::{InodeItem, Timespec};
use ubtrfs_transaction::{Engine, OpenOptions};

/// Opens an image for writing.
pub(crate) fn open(path: &Path) -> Arc<Engine> {
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(path, Access::ReadWrite).unwrap());
    let engine = Engine::open(vec![device], OpenOptions::default()).unwrap();
    assert_eq!(engine.read_only(), None);
    engine
}

/// `btrfs check` must find nothing, in metadata and data.
pub(crate) fn check(path: &Path) {
    let output = Command::new("btrfs").args(["check", "--check-data-csum"]).arg(path).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && !text.contains("ERROR"), "{text}");
}

/// An inode with one link, of root.
pub(crate) fn inode(generation: Generation, mode: u32, size: u64, nbytes: u64) -> InodeItem {
    let time = Timespec { sec: 1_600_000_000, nsec: 7 };
    InodeItem {
        generation,
        transid: generation,
        size,
        nbytes,
        block_group: 0,
        nlink: 1,
        uid: 0,
        gid: 0,
        mode,
        rdev: 0,
        flags: 0,
        sequence: 0,
        reserved: [0; 4],
        atime: time,
        ctime: time,
        mtime: time,
        otime: time,
    }
}
