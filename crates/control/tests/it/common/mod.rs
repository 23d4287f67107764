//! A filesystem in memory, and a host whose descriptors are temporary files that stand for inodes.

#![allow(dead_code, clippy::unwrap_used, reason = "each test uses a part, and fails by panicking")]

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::io::Errno;
use ubtrfs_control::{
    CommandFailure, Host, MountFile, OpenFile, ProcessFile, Processes, Request, Result, receive as receiving,
    unchecked_mount_file,
};
use ubtrfs_device::MemoryDevice;
use ubtrfs_fs::{Caller, Fs, InodeId, MountOptions, NewInode};

pub(crate) const ROOT: Caller = Caller { uid: 0, gid: 0, umask: 0o022 };
/// The user who mounted.
pub(crate) const OWNER: u32 = 1000;
pub(crate) const OTHER: u32 = 2000;

/// A new filesystem of 256 MiB.
pub(crate) fn filesystem(options: &str) -> Arc<Fs> {
    let device = Arc::new(MemoryDevice::new(256 << 20));
    ubtrfs_mkfs::make(device.as_ref(), &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
    Fs::open(vec![device], MountOptions::parse(options).unwrap()).unwrap()
}

/// A request to receive a stream into the first file of the request.
pub(crate) fn receive() -> Request {
    Request::Receive(receiving::Request {
        dir: 0,
        only_first: false,
        max_errors: 1,
        keep: false,
        force_decompress: false,
        verify: false,
        shares: false,
        replaces: false,
        total_bytes: None,
    })
}

/// Makes a directory of this user at the root.
pub(crate) fn dir(fs: &Fs, name: &str, uid: u32, mode: u32) -> InodeId {
    let attr = fs.create(fs.root(), name.as_bytes(), NewInode::dir(mode), &Caller { uid, gid: uid, umask: 0 }).unwrap();
    attr.id
}

/// A host that stands for a mount without mounting anything.
#[derive(Default)]
pub(crate) struct TestHost {
    owner: Option<u32>,
    fs: Weak<Fs>,
    files: Mutex<HashMap<u64, OpenFile>>,
    /// Inode numbers of descriptors that never answer.
    pub(crate) silent: Mutex<Vec<u64>>,
    /// Called before a command that changes something.
    pub(crate) before_change: Mutex<Option<Box<dyn FnMut() + Send>>>,
}

impl TestHost {
    pub(crate) fn of(owner: u32) -> Self {
        Self { owner: Some(owner), ..Self::default() }
    }

    /// The host of a filesystem that a control socket serves.
    pub(crate) fn serving(fs: &Arc<Fs>, owner: u32) -> Self {
        Self { fs: Arc::downgrade(fs), ..Self::of(owner) }
    }

    /// A descriptor that stands for an inode.
    pub(crate) fn open(&self, id: InodeId) -> MountFile {
        let file: File = tempfile::tempfile().unwrap();
        let ino = rustix::fs::fstat(&file).unwrap().st_ino;
        self.files.lock().insert(ino, OpenFile { is_writable: false, ..OpenFile::of_image(id) });
        unchecked_mount_file(file.into())
    }
}

impl Host for TestHost {
    fn filesystem(&self) -> Option<Arc<Fs>> {
        self.fs.upgrade()
    }

    fn owner(&self) -> Option<u32> {
        self.owner
    }

    fn file(&self, file: BorrowedFd<'_>) -> Result<OpenFile> {
        let ino = rustix::fs::fstat(file).map_err(|errno| CommandFailure::new(errno, "fstat"))?.st_ino;
        while self.silent.lock().contains(&ino) {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let other = || CommandFailure::new(Errno::XDEV, "the file is not in this mount");
        self.files.lock().get(&ino).copied().ok_or_else(other)
    }

    fn st_ino(&self, id: InodeId) -> Option<u64> {
        Some(if id.root.0 == 5 { id.ino.0 } else { id.root.0 << 40 | id.ino.0 })
    }

    fn note_change(&self) {
        if let Some(before) = &mut *self.before_change.lock() {
            before();
        }
    }
}

/// A test double: all processes are in this group, and their capabilities follow from their users.
#[derive(Debug)]
pub(crate) struct InGroup(pub(crate) u32);

impl Processes for InGroup {
    fn is_in_group(&self, _pid: u32, gid: u32, _uid: Option<u32>) -> bool {
        gid == self.0
    }

    fn has_capability(&self, _pid: u32, _capability: u32) -> Option<bool> {
        None
    }

    fn umask_of(&self, _pid: u32) -> Option<u32> {
        None
    }

    fn file_of(&self, _pid: u32, _descriptor: u32, _uid: Option<u32>) -> Option<ProcessFile> {
        None
    }

    fn memory_of(&self, _pid: u32, _address: u64, _len: usize) -> Option<Vec<u8>> {
        None
    }

    fn is_read_only_for(&self, _pid: u32, _device: u64) -> Option<bool> {
        None
    }
}
