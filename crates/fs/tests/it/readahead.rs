//! Tests sequential reads of a file that changes between the reads or during a read. Although data is read ahead, each
//! read returns the content that the file has at the moment of the read.
//!
//! A failure prints its seed; `UBTRFS_SEED=n` replays it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ubtrfs_device::MemoryDevice;
use ubtrfs_fs::{Caller, CompressSpec, FallocateMode, Fs, InodeId, MountOptions, NewInode, SetAttr};
use ubtrfs_testkit::Rng;

const FILE_BYTES: usize = 12 << 20;

fn fresh(compress: Option<CompressSpec>) -> (Arc<Fs>, InodeId) {
    let device = Arc::new(MemoryDevice::new(256 << 20));
    ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
    let options = MountOptions { compress, memory_bytes: 256 << 20, ..MountOptions::default() };
    let fs = Fs::open(vec![device], options).unwrap();
    let id = fs.create(fs.root(), b"file", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    (fs, id)
}

fn change(fs: &Fs, id: InodeId, rng: &mut Rng, expected: &mut Vec<u8>) {
    let at = rng.below(expected.len() as u64) as usize;
    let len = rng.below(300_000) as usize + 1;
    match rng.below(5) {
        0 => {
            let end = (at + len).min(expected.len());
            fs.fallocate(id, at as u64, (end - at) as u64, FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE)
                .unwrap();
            expected[at..end].fill(0);
        }
        1 => {
            let size = expected.len().saturating_sub(len).max(FILE_BYTES / 2);
            fs.setattr(id, &SetAttr { size: Some(size as u64), ..SetAttr::default() }, &Caller::ROOT).unwrap();
            expected.truncate(size);
        }
        2 => fs.sync().unwrap(),
        _ => {
            let byte = rng.below(256) as u8;
            let bytes: Vec<u8> = (0..len).map(|n| byte.wrapping_add((n / 100) as u8)).collect();
            fs.write(id, at as u64, &bytes).unwrap();
            let end = (at + len).max(expected.len());
            expected.resize(end, 0);
            expected[at..at + len].copy_from_slice(&bytes);
        }
    }
}

fn read_beside_changes(compress: Option<CompressSpec>, seed: u64) {
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let (fs, id) = fresh(compress);
    let mut expected: Vec<u8> = (0..FILE_BYTES).map(|n| (n / 1000) as u8).collect();
    fs.write(id, 0, &expected).unwrap();
    fs.sync().unwrap();
    for round in 0..12 {
        let mut at = rng.below(3 << 20) as usize;
        while at < expected.len() {
            let len = [4096, 65536, 131_072, 1 << 20, 5000][rng.below(5) as usize].min(expected.len() - at);
            let found = fs.read(id, at as u64, len).unwrap();
            assert!(found == expected[at..at + len], "seed {seed}, round {round}, {len} bytes at {at}");
            at += len;
            if rng.one_in(12) {
                change(&fs, id, &mut rng, &mut expected);
            }
        }
    }
    fs.close().unwrap();
}

#[test]
fn readahead_never_hides_a_change() {
    let seed = std::env::var("UBTRFS_SEED").ok().and_then(|seed| seed.parse().ok());
    for seed in seed.map_or(1..4, |seed| seed..seed + 1) {
        read_beside_changes(None, seed);
    }
    let zstd = MountOptions::parse("compress=zstd").unwrap().compress;
    read_beside_changes(zstd, seed.unwrap_or(10));
}

#[test]
fn readers_side_by_side_see_whole_writes() {
    let (fs, id) = fresh(None);
    const BLOCK: usize = 64 << 10;
    fs.write(id, 0, &vec![0; FILE_BYTES]).unwrap();
    fs.sync().unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for generation in 1..=40u8 {
                for at in (0..FILE_BYTES).step_by(BLOCK).skip(usize::from(generation) % 3).step_by(3) {
                    fs.write(id, at as u64, &vec![generation; BLOCK]).unwrap();
                }
                fs.flush_data().unwrap();
            }
            stop.store(true, Ordering::Release);
        });
        for _ in 0..3 {
            scope.spawn(|| {
                let mut last = [0; FILE_BYTES / BLOCK];
                while !stop.load(Ordering::Acquire) {
                    for (block, last) in last.iter_mut().enumerate() {
                        let found = fs.read(id, (block * BLOCK) as u64, BLOCK).unwrap();
                        assert!(found.iter().all(|byte| *byte == found[0]), "block {block} is torn");
                        assert!(found[0] >= *last, "block {block} went back from {last} to {}", found[0]);
                        *last = found[0];
                    }
                }
            });
        }
    });
    fs.close().unwrap();
}
