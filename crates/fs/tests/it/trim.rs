//! Tests that discarding free space punches holes into the image file, but only where space is free.
//!
//! Method: threads write, replace and remove files, and remember their content, while another thread discards free
//! space without a pause. `UBTRFS_SEED` repeats a run.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ubtrfs_device::{Device, MemoryDevice};
use ubtrfs_format::RootId;
use ubtrfs_fs::{Caller, Fs, InodeId, Job, MountOptions, NewInode, SendRequest};
use ubtrfs_testkit::{Image, Rng, btrfs_check, capability};

use crate::common::open;

const ROOT: Caller = Caller::ROOT;
const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: ubtrfs_format::Ino::ROOT_DIR };

/// Waits for a background thread: returns when `is_done` returns true, and fails after 60 seconds.
fn wait_until(what: &str, is_done: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !is_done() {
        assert!(begun.elapsed().as_secs() < 60, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
}

#[test]
fn asynchronous_discards_follow_removals() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let fs = open(&image, "discard=async");
    let bytes = || image.path().metadata().unwrap().blocks() * 512;
    let write = |name: &str, len: usize, byte: u8| {
        let id = fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id;
        fs.write(id, 0, &vec![byte; len]).unwrap();
        id
    };
    let kept = write("kept", 5 << 20, 1);
    write("gone", 100 << 20, 2);
    fs.sync().unwrap();
    let full = bytes();
    fs.unlink(TOP, b"gone").unwrap();
    fs.sync().unwrap();
    // New data may be allocated in a part of the freed space before that space is discarded.
    let new = write("new", 20 << 20, 3);
    fs.sync().unwrap();
    wait_until("the freed space is discarded", || bytes() + (75 << 20) < full);
    for (id, len, byte) in [(kept, 5 << 20, 1), (new, 20 << 20, 3)] {
        assert!(fs.read(id, 0, len).unwrap() == vec![byte; len]);
    }
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
}

/// The number of block groups that the background thread emptied.
fn reclaimed(fs: &Fs) -> f64 {
    let text = fs.metrics_text();
    let line = text.lines().find(|line| line.starts_with("ubtrfs_block_groups_reclaimed_total")).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_block_group_that_falls_below_the_threshold_is_emptied() {
    if !capability::kernel_oracle() {
        return;
    }
    for threshold in [0, 30] {
        let image = Image::kernel_made(2 << 30, &[]).unwrap();
        let fs = open(&image, &format!("bg_reclaim_threshold={threshold}"));
        let data = || {
            let groups = fs.block_groups();
            groups.into_iter().filter(|group| group.flags == ubtrfs_format::item::BlockGroupFlags::DATA).count()
        };
        for number in 0..50_u8 {
            let id = fs.create(TOP, format!("f{number}").as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id;
            fs.write(id, 0, &vec![number; 16 << 20]).unwrap();
        }
        fs.sync().unwrap();
        let before = data();
        assert!(before >= 4, "{before}");
        // Give the background thread time to see that the block groups are full.
        std::thread::sleep(std::time::Duration::from_secs(5));
        for number in (0..50_u8).filter(|number| number % 10 != 0) {
            fs.unlink(TOP, format!("f{number}").as_bytes()).unwrap();
        }
        fs.sync().unwrap();
        if threshold > 0 {
            wait_until("block groups are emptied", || reclaimed(&fs) >= 1.0 && data() < before);
        } else {
            std::thread::sleep(std::time::Duration::from_secs(5));
            assert!(reclaimed(&fs) == 0.0, "off by default");
        }
        for number in (0..50_u8).step_by(10) {
            let id = fs.lookup(TOP, format!("f{number}").as_bytes()).unwrap().id;
            assert!(fs.read(id, 0, 16 << 20).unwrap() == vec![number; 16 << 20]);
        }
        fs.close().unwrap();
        drop(fs);
        btrfs_check(image.path()).unwrap();
    }
}

#[test]
fn discards_go_on_while_a_block_group_cannot_be_emptied_because_of_a_send() {
    /// An output that calls a function at its first write.
    struct AtWrite<F>(Option<F>);
    impl<F: FnOnce()> Write for AtWrite<F> {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            if let Some(call) = self.0.take() {
                call();
            }
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(400 << 20, &[]).unwrap();
    let fs = open(&image, "discard=async,bg_reclaim_threshold=50");
    let bytes = || image.path().metadata().unwrap().blocks() * 512;
    let write = |name: &str, len: usize| {
        let id = fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id;
        fs.write(id, 0, &vec![1; len]).unwrap();
    };
    (0..40).for_each(|number| write(&format!("f{number}"), 4 << 20));
    let sent = fs.create_subvolume(TOP, b"sent", &ROOT).unwrap();
    fs.set_subvolume_read_only(sent.root, true).unwrap();
    // Give the background thread time to see that the block groups are full.
    std::thread::sleep(std::time::Duration::from_secs(5));
    let mut output = AtWrite(Some(|| {
        (0..40)
            .filter(|number| number % 5 != 0)
            .for_each(|number| fs.unlink(TOP, format!("f{number}").as_bytes()).unwrap());
        fs.sync().unwrap();
        // Give the background thread time to try to empty block groups during the send.
        std::thread::sleep(std::time::Duration::from_secs(5));
        write("gone", 60 << 20);
        fs.sync().unwrap();
        let full = bytes();
        fs.unlink(TOP, b"gone").unwrap();
        fs.sync().unwrap();
        wait_until("the freed space is discarded", || bytes() + (40 << 20) < full);
        assert_eq!(reclaimed(&fs), 0.0);
    }));
    let request = SendRequest {
        subvolumes: vec![sent.root],
        parent: None,
        clone_sources: Vec::new(),
        version: 1,
        compressed_data: false,
        no_data: false,
        joined: false,
    };
    fs.send(&request, &mut output, &Job::new()).unwrap();
    assert!(output.0.is_none());
    wait_until("block groups are emptied after the send", || reclaimed(&fs) >= 1.0);
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
}

fn trim(fs: &Fs) -> u64 {
    fs.trim(&(0..u64::MAX), 0, &Job::new()).unwrap()
}

#[test]
fn a_trim_returns_the_space_of_removed_files() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let fs = open(&image, "");
    let bytes = || image.path().metadata().unwrap().blocks() * 512;
    let kept = fs.create(TOP, b"kept", NewInode::file(0o644), &ROOT).unwrap().id;
    fs.write(kept, 0, &vec![1; 5 << 20]).unwrap();
    let gone = fs.create(TOP, b"gone", NewInode::file(0o644), &ROOT).unwrap().id;
    fs.write(gone, 0, &vec![2; 100 << 20]).unwrap();
    fs.sync().unwrap();
    let full = bytes();
    fs.unlink(TOP, b"gone").unwrap();
    // The space of a removed file is free after a commit, and a trim commits first.
    let trimmed = trim(&fs);
    assert!(trimmed > 900 << 20 && trimmed < 1 << 30, "{trimmed}");
    assert!(bytes() + (95 << 20) < full, "{full} -> {}", bytes());
    let part = fs.trim(&(0..1 << 20), 0, &Job::new()).unwrap();
    assert!(part < trimmed, "nothing of the block groups, but all of the device that belongs to none: {part}");
    let job = Job::new();
    job.cancel();
    assert!(fs.trim(&(0..u64::MAX), 0, &job).is_err());
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
    let fs = open(&image, "");
    let content = fs.read(fs.lookup(TOP, b"kept").unwrap().id, 0, 5 << 20).unwrap();
    assert!(content.len() == 5 << 20 && content.iter().all(|byte| *byte == 1));
    fs.close().unwrap();
}

/// Without a limit of pieces, this takes a quarter of an hour.
#[test]
fn a_trim_of_a_device_of_an_exbibyte_ends() {
    let device = Arc::new(MemoryDevice::new(1 << 60));
    ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
    let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default()).unwrap();
    assert!(trim(&fs) > (1 << 60) - (4 << 30));
    fs.close().unwrap();
}

#[test]
fn nothing_that_is_written_meanwhile_is_discarded() {
    if !capability::kernel_oracle() {
        return;
    }
    let seed = Rng::seed_or(20_261_124);
    println!("UBTRFS_SEED={seed}");
    // The image is smaller than all written data together, so freed space is allocated again.
    let image = Image::kernel_made(300 << 20, &[]).unwrap();
    let fs = open(&image, "");
    let is_done = AtomicBool::new(false);
    let all: Vec<BTreeMap<String, (u64, u8)>> = std::thread::scope(|scope| {
        let trimmer = scope.spawn(|| {
            let mut nr_trims = 0;
            while !is_done.load(Ordering::Acquire) {
                trim(&fs);
                nr_trims += 1;
            }
            nr_trims
        });
        let writers: Vec<_> = (0..4u64)
            .map(|thread| {
                let fs = &fs;
                scope.spawn(move || write_at_random(fs, thread, Rng::new(seed ^ thread)))
            })
            .collect();
        let all = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        is_done.store(true, Ordering::Release);
        assert!(trimmer.join().unwrap() > 2);
        all
    });
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
    let fs = open(&image, "");
    for (name, (len, byte)) in all.into_iter().flatten() {
        let id = fs.lookup(TOP, name.as_bytes()).unwrap().id;
        let content = fs.read(id, 0, usize::MAX).unwrap();
        assert_eq!(content.len() as u64, len);
        assert!(content.iter().all(|found| *found == byte), "{name}");
    }
    fs.close().unwrap();
}

/// Writes and removes files that no other thread uses. Returns, for each file that is left, its length and the byte
/// that fills it.
fn write_at_random(fs: &Fs, thread: u64, mut rng: Rng) -> BTreeMap<String, (u64, u8)> {
    let mut files = BTreeMap::new();
    for round in 0..120u64 {
        let name = format!("f{thread}-{}", rng.below(12));
        if files.contains_key(&name) && rng.below(2) == 0 {
            fs.unlink(TOP, name.as_bytes()).unwrap();
            files.remove(&name);
            continue;
        }
        if files.remove(&name).is_some() {
            fs.unlink(TOP, name.as_bytes()).unwrap();
        }
        let (len, byte) = (1 + rng.below(3 << 20), (1 + round % 250) as u8);
        let id = fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id;
        fs.write(id, 0, &vec![byte; len as usize]).unwrap();
        if rng.below(4) == 0 {
            fs.fsync(id, false).unwrap();
        }
        files.insert(name, (len, byte));
    }
    files
}
