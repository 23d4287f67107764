//! Defragmentation: fewer extents, equal content and times, shared extents stay shared.

use std::sync::atomic::{AtomicBool, Ordering};

use ubtrfs_format::item::Compression;
use ubtrfs_format::{Ino, RootId};
use ubtrfs_fs::{Caller, CompressSpec, Defragment, FileExtentKind, Fs, InodeId, Job, NewInode};
use ubtrfs_testkit::{Image, LoopMount, Rng, btrfs_check, capability};

use crate::common::open;

const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };
const BLOCK: usize = 4096;
const NR_BLOCKS: usize = 1000;

/// Makes a file of small extents: its blocks are written in random order, with writeback after every four blocks.
fn fragmented(fs: &Fs, name: &[u8], rng: &mut Rng) -> (InodeId, Vec<u8>) {
    let id = fs.create(TOP, name, NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    let content = rng.text(NR_BLOCKS * BLOCK + 100);
    let mut blocks: Vec<usize> = (0..=NR_BLOCKS).collect();
    while !blocks.is_empty() {
        let block = blocks.swap_remove(rng.index(blocks.len()));
        let end = content.len().min((block + 1) * BLOCK);
        fs.write(id, (block * BLOCK) as u64, &content[block * BLOCK..end]).unwrap();
        if blocks.len().is_multiple_of(4) {
            fs.flush_data().unwrap();
        }
    }
    fs.sync().unwrap();
    (id, content)
}

fn nr_extents(fs: &Fs, id: InodeId) -> usize {
    fs.extents(id).unwrap().iter().filter(|extent| extent.kind == FileExtentKind::Data).count()
}

fn read(fs: &Fs, id: InodeId) -> Vec<u8> {
    fs.read(id, 0, (NR_BLOCKS + 2) * BLOCK).unwrap()
}

#[test]
fn small_extents_are_joined_and_nothing_else_changes() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let fs = open(&image, "commit=300");
    let mut rng = Rng::new(Rng::seed_or(1));
    let (id, content) = fragmented(&fs, b"file", &mut rng);
    let (shared, shared_content) = fragmented(&fs, b"shared", &mut rng);
    let copy = fs.create(TOP, b"copy", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    fs.clone_range(shared, 0, copy, 0, 0).unwrap();
    let (before, attr) = (nr_extents(&fs, id), fs.getattr(id).unwrap());
    assert!(before > 200, "{before} extents");
    let job = Job::new();
    let written = fs.defragment(id, &Defragment::default(), &job).unwrap();
    assert!(written > content.len() as u64 / 2 && job.progress().done == job.progress().total);
    let after = nr_extents(&fs, id);
    assert!(after <= 3, "{after} extents are left of {before}");
    let now = fs.getattr(id).unwrap();
    assert_eq!((now.mtime, now.ctime, now.size), (attr.mtime, attr.ctime, attr.size));
    assert!(read(&fs, id) == content);
    assert_eq!(fs.defragment(id, &Defragment::default(), &Job::new()).unwrap(), 0, "nothing is left to do");

    // Shared extents stay shared unless unsharing is requested.
    let before = nr_extents(&fs, shared);
    assert_eq!(fs.defragment(shared, &Defragment::default(), &Job::new()).unwrap(), 0);
    assert_eq!(nr_extents(&fs, shared), before);
    let unshare = Defragment { unshare: true, ..Defragment::default() };
    assert!(fs.defragment(shared, &unshare, &Job::new()).unwrap() > 0);
    assert!(nr_extents(&fs, shared) <= 3 && nr_extents(&fs, copy) == before);
    assert!(read(&fs, copy) == shared_content && read(&fs, shared) == shared_content);

    let compress = CompressSpec { kind: Compression::Zstd, level: 3, force: false };
    let how = Defragment { compress: Some(compress), ..Defragment::default() };
    assert!(fs.defragment(id, &how, &Job::new()).unwrap() > 0);
    assert!(fs.extents(id).unwrap().iter().all(|extent| extent.compression == Compression::Zstd));
    assert!(read(&fs, id) == content);
    let cancelled = Job::new();
    cancelled.cancel();
    assert!(fs.defragment(copy, &unshare, &cancelled).is_err());
    fs.close().unwrap();
    btrfs_check(image.path()).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    assert!(std::fs::read(mount.path().join("file")).unwrap() == content);
    assert!(std::fs::read(mount.path().join("copy")).unwrap() == shared_content);
    mount.scrub().unwrap();
    mount.close().unwrap();
}

#[test]
fn writes_during_a_defragmentation_are_kept() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let fs = open(&image, "commit=300");
    let seed = Rng::seed_or(2);
    let mut rng = Rng::new(seed);
    let (id, mut content) = fragmented(&fs, b"file", &mut rng);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let defragment = scope.spawn(|| {
            let how = Defragment { small_bytes: 1 << 20, unshare: true, ..Defragment::default() };
            while !stop.load(Ordering::SeqCst) {
                fs.defragment(id, &how, &Job::new()).unwrap();
            }
        });
        for number in 0..2000 {
            let at = rng.index(content.len() - 10_000);
            let len = 1 + rng.index(10_000);
            let piece = rng.bytes(len);
            fs.write(id, at as u64, &piece).unwrap();
            content[at..at + len].copy_from_slice(&piece);
            match number % 50 {
                10 => fs.fsync(id, false).unwrap(),
                20 => fs.snapshot(RootId::FS_TREE, TOP, format!("s{number}").as_bytes(), true).map(drop).unwrap(),
                _ => {}
            }
        }
        stop.store(true, Ordering::SeqCst);
        defragment.join().unwrap();
    });
    assert!(read(&fs, id) == content, "seed {seed}");
    fs.close().unwrap();
    btrfs_check(image.path()).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    assert!(std::fs::read(mount.path().join("file")).unwrap() == content, "seed {seed}");
    mount.scrub().unwrap();
    mount.close().unwrap();
}

#[test]
fn tiny_extents_that_are_contiguous_on_disk_are_joined() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let fs = open(&image, "commit=300");
    let id = fs.create(TOP, b"log", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    let content = Rng::new(3).bytes(50 * BLOCK);
    for (number, block) in content.chunks(BLOCK).enumerate() {
        fs.write(id, (number * BLOCK) as u64, block).unwrap();
        fs.sync().unwrap();
    }
    assert_eq!(nr_extents(&fs, id), 50);
    assert!(fs.defragment(id, &Defragment::default(), &Job::new()).unwrap() > 0);
    assert_eq!(nr_extents(&fs, id), 1);
    assert!(read(&fs, id) == content);
    assert_eq!(fs.defragment(id, &Defragment::default(), &Job::new()).unwrap(), 0, "nothing is left to do");
    fs.close().unwrap();
    btrfs_check(image.path()).unwrap();
}

#[test]
fn compressed_extents_of_the_greatest_size_stay_as_they_are() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let fs = open(&image, "compress=zstd");
    let id = fs.create(TOP, b"file", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    fs.write_all(id, 0, &vec![7; 1 << 20]).unwrap();
    fs.sync().unwrap();
    assert_eq!(nr_extents(&fs, id), 8);
    assert_eq!(fs.defragment(id, &Defragment::default(), &Job::new()).unwrap(), 0);
    let same = Defragment { compress: Some(CompressSpec::new(Compression::Zstd)), ..Defragment::default() };
    assert_eq!(fs.defragment(id, &same, &Job::new()).unwrap(), 0);
    let other = Defragment { compress: Some(CompressSpec::new(Compression::Zlib)), ..Defragment::default() };
    assert_eq!(fs.defragment(id, &other, &Job::new()).unwrap(), 1 << 20);
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
}

/// Writes to a file that was preallocated are not compressed, but a defragmentation that is asked to compress does it.
#[test]
fn a_file_that_was_preallocated_is_compressed_on_request() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let fs = open(&image, "");
    let id = fs.create(TOP, b"file", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    fs.fallocate(id, 0, 1 << 20, ubtrfs_fs::FallocateMode::empty()).unwrap();
    fs.write_all(id, 0, &vec![7; 1 << 20]).unwrap();
    fs.sync().unwrap();
    let how = Defragment { compress: Some(CompressSpec::new(Compression::Zstd)), ..Defragment::default() };
    assert_eq!(fs.defragment(id, &how, &Job::new()).unwrap(), 1 << 20);
    fs.sync().unwrap();
    assert!(fs.extents(id).unwrap().iter().all(|extent| extent.compression == Compression::Zstd));
    assert!(fs.read(id, 0, 1 << 20).unwrap() == vec![7; 1 << 20]);
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
}
