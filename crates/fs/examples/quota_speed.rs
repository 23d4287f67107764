//! Creating files and overwriting shared data, with quotas off and on, in turns: prints seconds.

#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::Arc;
use std::time::Instant;

use ubtrfs_device::{Device, MemoryDevice};
use ubtrfs_format::RootId;
use ubtrfs_fs::{Caller, Fs, InodeId, Job, MountOptions, NewInode};

const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: ubtrfs_format::Ino::ROOT_DIR };

fn run(quotas: bool, files: u64) -> (f64, f64) {
    let device = Arc::new(MemoryDevice::new(6 << 30));
    ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
    let fs = Fs::open(vec![device as Arc<dyn Device>], MountOptions::parse("commit=300").unwrap()).unwrap();
    let sub = fs.create_subvolume(TOP, b"a", &Caller::ROOT).unwrap();
    if quotas {
        fs.enable_quotas().unwrap();
        fs.wait_for_quota_rescan(&Job::new()).unwrap();
    }
    let began = Instant::now();
    let dirs: Vec<InodeId> = (0..16)
        .map(|dir| fs.create(sub, format!("d{dir}").as_bytes(), NewInode::dir(0o755), &Caller::ROOT).unwrap().id)
        .collect();
    for number in 0..files {
        let dir = dirs[(number % 16) as usize];
        fs.create(dir, format!("file{number}").as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap();
    }
    fs.sync().unwrap();
    let created = began.elapsed().as_secs_f64();
    let file = fs.create(sub, b"big", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    let piece = vec![3; 1 << 20];
    (0..512).for_each(|at| drop(fs.write(file, at << 20, &piece).unwrap()));
    fs.sync().unwrap();
    fs.snapshot(sub.root, TOP, b"s", true).unwrap();
    let began = Instant::now();
    let mut state = 1u64;
    for _ in 0..files / 2 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        fs.write(file, (state >> 33) % (512 << 8) * 4096, &piece[..4096]).unwrap();
    }
    fs.sync().unwrap();
    (created, began.elapsed().as_secs_f64())
}

fn main() {
    for _ in 0..3 {
        for quotas in [false, true] {
            let (created, overwritten) = run(quotas, 60_000);
            println!("quotas {quotas}: create {created:.2} s, overwrite shared {overwritten:.2} s");
        }
    }
}
