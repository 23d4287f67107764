//! Other threads act between two steps of a commit or of an fsync.
//!
//! Method: a commit or an fsync stops at a chosen flush of the device ([`HookDevice`]), where other threads make their
//! calls. Then the commit or fsync continues, or the flush fails.

use std::io;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use ubtrfs_device::Device;
use ubtrfs_format::superblock::Incompat;
use ubtrfs_format::{Ino, RootId};
use ubtrfs_fs::{Caller, FallocateMode, Fs, InodeId, MountOptions, NewInode, Result};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{HookDevice, Medium, MediumDevice, check_medium};

const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };
const EIO: i32 = rustix::io::Errno::IO.raw_os_error();
const ENOSPC: i32 = rustix::io::Errno::NOSPC.raw_os_error();
const EROFS: i32 = rustix::io::Errno::ROFS.raw_os_error();

struct Bed {
    fs: Arc<Fs>,
    device: Arc<HookDevice>,
    medium: Arc<MediumDevice>,
}

impl Bed {
    fn new(options: &str) -> Self {
        let medium = Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap();
        let medium = Arc::new(MediumDevice::new(medium));
        let device = Arc::new(HookDevice::new(Arc::clone(&medium) as Arc<dyn Device>));
        let options = MountOptions::parse(options).unwrap();
        let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], options).unwrap();
        Self { fs, device, medium }
    }

    fn new_file(&self, name: &str) -> InodeId {
        let id = self.fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        self.fs.write(id, 0, &[1; 10_000]).unwrap();
        id
    }

    /// The filesystem after a power cut that keeps everything written so far.
    fn cut(&self) -> (Arc<Fs>, Arc<MediumDevice>) {
        let medium = Arc::new(MediumDevice::new(self.medium.content()));
        let options = MountOptions::parse("").unwrap();
        (Fs::open(vec![Arc::clone(&medium) as Arc<dyn Device>], options).unwrap(), medium)
    }
}

type Calls = Arc<Mutex<Vec<JoinHandle<Result<()>>>>>;

/// Starts these calls, each in a thread, and gives them time to reach the point where they wait.
fn start(calls: &Calls, what: impl IntoIterator<Item = Box<dyn FnOnce() -> Result<()> + Send>>) {
    calls.lock().unwrap().extend(what.into_iter().map(std::thread::spawn));
    std::thread::sleep(Duration::from_millis(300));
}

fn errors(calls: &Calls) -> Vec<i32> {
    let calls = std::mem::take(&mut *calls.lock().unwrap());
    calls.into_iter().map(|call| call.join().unwrap().map_or_else(|error| error.errno(), |()| 0)).collect()
}

fn failed_flush() -> io::Result<()> {
    Err(io::Error::from_raw_os_error(EIO))
}

/// All fsyncs that share a log fail with the error of the fsync that writes the log.
#[test]
fn fsyncs_that_share_a_log_share_its_error() {
    let bed = Bed::new("commit=300");
    let files: Vec<InodeId> = (0..5).map(|number| bed.new_file(&format!("file-{number}"))).collect();
    bed.fs.sync().unwrap();
    for file in &files {
        bed.fs.write(*file, 0, &[2; 10_000]).unwrap();
    }
    let calls = Calls::default();
    let (fs, device, waiting) = (Arc::clone(&bed.fs), Arc::clone(&bed.device), Arc::clone(&calls));
    let others: Vec<InodeId> = files[1..].to_vec();
    bed.device.at_flush(0, move || {
        // These calls wait for the next log, whose flush fails.
        start(
            &waiting,
            others.into_iter().map(|file| {
                let fs = Arc::clone(&fs);
                Box::new(move || fs.fsync(file, false)) as Box<dyn FnOnce() -> Result<()> + Send>
            }),
        );
        // After the flushes of this log and of its superblock, the flush of the next log fails.
        device.at_flush(1, failed_flush);
        Ok(())
    });
    let first = bed.fs.fsync(files[0], false);
    assert_eq!(errors(&calls), [EIO; 4]);
    assert!(first.is_ok(), "{first:?}");
    // Later calls are refused.
    assert_eq!(bed.fs.fsync(files[1], false).unwrap_err().errno(), EROFS);
    let (fs, _) = bed.cut();
    let id = fs.lookup(TOP, b"file-0").unwrap().id;
    let mut read = [0; 10];
    fs.read_into(id, 0, &mut read).unwrap();
    assert_eq!(read, [2; 10]);
    fs.close().unwrap();
}

/// All callers that wait for a commit get its error, and later calls are refused.
#[test]
fn callers_that_wait_for_a_commit_share_its_error() {
    let bed = Bed::new("commit=300");
    let file = bed.new_file("file");
    let calls = Calls::default();
    let (fs, waiting) = (Arc::clone(&bed.fs), Arc::clone(&calls));
    bed.device.at_flush(0, move || {
        let (one, two, three) = (Arc::clone(&fs), Arc::clone(&fs), Arc::clone(&fs));
        start(
            &waiting,
            [
                Box::new(move || one.sync()) as Box<dyn FnOnce() -> Result<()> + Send>,
                Box::new(move || two.fsync(file, false)),
                Box::new(move || three.sync()),
            ],
        );
        failed_flush()
    });
    assert_eq!(bed.fs.sync().unwrap_err().errno(), EIO);
    assert_eq!(errors(&calls), [EIO; 3]);
    assert_eq!(bed.fs.sync().unwrap_err().errno(), EROFS);
    let later = bed.fs.create(TOP, b"later", NewInode::file(0o644), &Caller::ROOT).map(drop);
    assert_eq!(later.unwrap_err().errno(), EROFS);
}

/// A thread sets a default subvolume, which needs a feature bit, while another commit runs. The next superblock has the
/// bit.
#[test]
fn a_feature_noted_during_a_commit_is_in_the_next_superblock() {
    let bed = Bed::new("commit=300");
    let sub = bed.fs.create_subvolume(TOP, b"sub", &Caller::ROOT).unwrap().root;
    bed.new_file("file");
    let calls = Calls::default();
    let (fs, waiting) = (Arc::clone(&bed.fs), Arc::clone(&calls));
    bed.device.at_flush(0, move || {
        start(&waiting, [Box::new(move || fs.set_default_subvolume(sub)) as Box<dyn FnOnce() -> Result<()> + Send>]);
        Ok(())
    });
    bed.fs.sync().unwrap();
    assert_eq!(errors(&calls), [0]);
    assert!(!bed.device.is_set());
    let (fs, medium) = bed.cut();
    assert!(fs.superblock().incompat().contains(Incompat::DEFAULT_SUBVOL));
    assert_eq!(fs.default_subvolume().unwrap(), sub);
    fs.close().unwrap();
    check_medium(&medium.content()).unwrap();
    bed.fs.close().unwrap();
    check_medium(&bed.medium.content()).unwrap();
}

/// Data written in place changes no item, so a log has nothing to write for it. fsync still flushes the device.
#[test]
fn fsync_of_data_written_in_place_flushes() {
    let bed = Bed::new("commit=300,nodatacow");
    let file = bed.new_file("file");
    bed.fs.sync().unwrap();
    bed.fs.write(file, 4096, &[3; 4096]).unwrap();
    // Commit the inode's items while the inode's data is not written yet.
    bed.fs.create_subvolume(TOP, b"sub", &Caller::ROOT).unwrap();
    let flushed = Arc::new(Mutex::new(None));
    let (content, medium) = (Arc::clone(&flushed), Arc::clone(&bed.medium));
    bed.device.at_flush(0, move || {
        *content.lock().unwrap() = Some(medium.content());
        Ok(())
    });
    bed.fs.fsync(file, false).unwrap();
    let content = flushed.lock().unwrap().take().expect("fsync returned without a flush of the device");
    let fs = Fs::open(vec![Arc::new(MediumDevice::new(content))], MountOptions::parse("").unwrap()).unwrap();
    let mut read = [0; 4096];
    let id = fs.lookup(TOP, b"file").unwrap().id;
    fs.read_into(id, 4096, &mut read).unwrap();
    assert_eq!(read, [3; 4096]);
    fs.close().unwrap();
    bed.fs.close().unwrap();
    check_medium(&bed.medium.content()).unwrap();
}

/// Fills all data space, and commits.
fn fill(fs: &Fs) {
    let filler = fs.create(TOP, b"filler", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    let mut at = 0;
    for len in [1 << 20, 64 << 10] {
        while fs.fallocate(filler, at, len, FallocateMode::empty()).is_ok() {
            at += len;
        }
    }
    while fs.write(filler, at, &[2; 4096]).is_ok() {
        at += 4096;
    }
    fs.sync().unwrap();
}

/// While a preallocation waits for its reservation, another thread punches a hole into the range. The preallocation
/// then needs more space, and reserves it.
#[test]
fn a_preallocation_reserves_what_is_punched_while_it_waits() {
    const LEN: u64 = 32 << 20;
    // The part of the range that is not allocated yet.
    const REST: u64 = 16 << 10;
    let bed = Bed::new("commit=300");
    let make = |name: &str| bed.fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    let file = make("file");
    bed.fs.fallocate(file, 0, LEN, FallocateMode::empty()).unwrap();
    // Fill the filesystem, and free a little that only a commit makes usable.
    bed.new_file("freed");
    fill(&bed.fs);
    bed.fs.unlink(TOP, b"freed").unwrap();
    let fs = Arc::clone(&bed.fs);
    bed.device.at_flush(0, move || {
        let punch = FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE;
        std::thread::spawn(move || fs.fallocate(file, 0, LEN, punch)).join().unwrap().unwrap();
        Ok(())
    });
    bed.fs.fallocate(file, 0, LEN + REST, FallocateMode::empty()).unwrap();
    assert!(!bed.device.is_set(), "the reservation waited for a commit");
    bed.fs.close().unwrap();
    check_medium(&bed.medium.content()).unwrap();
}

/// A write into preallocated space reserves nothing. It waits until a snapshot is made, and then needs new space.
#[test]
fn a_write_without_reservation_waits_for_a_snapshot() {
    let bed = Bed::new("commit=300");
    let file = bed.fs.create(TOP, b"file", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    bed.fs.fallocate(file, 0, 64 << 10, FallocateMode::empty()).unwrap();
    fill(&bed.fs);
    bed.fs.write(file, 0, &[3; 4096]).unwrap();
    let calls = Calls::default();
    let (fs, waiting) = (Arc::clone(&bed.fs), Arc::clone(&calls));
    bed.device.at_flush(0, move || {
        let write = Box::new(move || fs.write(file, 8192, &[4; 4096]).map(drop));
        start(&waiting, [write as Box<dyn FnOnce() -> Result<()> + Send>]);
        Ok(())
    });
    bed.fs.snapshot(RootId::FS_TREE, TOP, b"snapshot", true).unwrap();
    assert_eq!(errors(&calls), [ENOSPC]);
    bed.fs.sync().unwrap();
    bed.fs.close().unwrap();
    check_medium(&bed.medium.content()).unwrap();
}
