//! Full filesystems: accepted data is kept, refused operations fail with ENOSPC, and removing files makes room again.
//!
//! A failure prints its seed; `UBTRFS_SEED=n` replays it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_fs::{Caller, Error, FallocateMode, Fs, InodeId, Job, MountOptions, NewInode, SetAttr, SetTime, XattrFlags};
use ubtrfs_testkit::capability::kernel_oracle;
use ubtrfs_testkit::{Image, LoopMount, Rng, btrfs_check, second_opinion};

const ENOSPC: i32 = rustix::io::Errno::NOSPC.raw_os_error();
const MIB: u64 = 1 << 20;

/// Accepted content by file name.
type Files = BTreeMap<String, Vec<u8>>;

fn open(image: &Image, options: &MountOptions) -> Arc<Fs> {
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image.path(), Access::ReadWrite).unwrap());
    let fs = Fs::open(vec![device], options.clone()).unwrap();
    assert_eq!(fs.read_only(), None);
    fs
}

fn is_full(error: &Error) -> bool {
    assert_eq!(error.errno(), ENOSPC, "{error}");
    true
}

/// Creates and writes files named after `tag` until three attempts have found no space.
fn fill(fs: &Fs, rng: &mut Rng, tag: &str, max_bytes: u64, files: &Mutex<Files>) {
    let mut refused = 0;
    for number in 0.. {
        if refused == 3 {
            return;
        }
        let name = format!("{tag}{number}");
        let id = match fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &Caller::ROOT) {
            Ok(attr) => attr.id,
            Err(error) => {
                refused += usize::from(is_full(&error));
                continue;
            }
        };
        let len = 1 + rng.below(max_bytes) as usize;
        let content = rng.content(len);
        let mut accepted = 0;
        while accepted < len {
            let piece = &content[accepted..len.min(accepted + (128 << 10))];
            match fs.write(id, accepted as u64, piece) {
                // When space runs out, only the first part of the piece is written.
                Ok(written) => accepted += written,
                Err(error) => {
                    refused += usize::from(is_full(&error));
                    break;
                }
            }
        }
        files.lock().unwrap().insert(name, content[..accepted].to_vec());
    }
}

fn verify(fs: &Fs, files: &Files) {
    for (name, content) in files {
        let attr = fs.lookup(fs.root(), name.as_bytes()).unwrap();
        assert_eq!(attr.size, content.len() as u64, "size of {name}");
        let read = fs.read(attr.id, 0, content.len() + 1).unwrap();
        assert!(read == *content, "content of {name}");
    }
}

fn fill_and_recover(name: &str, len_bytes: u64, mkfs: &[&str], options: &str, max_bytes: u64, threads: usize) {
    let image = Image::kernel_made(len_bytes, mkfs).unwrap();
    let options = MountOptions::parse(options).unwrap();
    let seed = Rng::seed_or(5);
    println!("{name}: seed {seed}");
    let files = Mutex::new(Files::new());
    let fs = open(&image, &options);
    for round in 0..3 {
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (fs, files) = (&fs, &files);
                let mut rng = Rng::new(seed + 100 * round + thread as u64);
                scope.spawn(move || fill(fs, &mut rng, &format!("r{round}t{thread}n"), max_bytes, files));
            }
        });
        fs.sync().unwrap();
        assert_eq!(fs.read_only(), None);
        let mut files = files.lock().unwrap();
        let bytes: usize = files.values().map(Vec::len).sum();
        println!("{name}: round {round}: {} files, {} MiB", files.len(), bytes >> 20);
        verify(&fs, &files);
        // Remove two of every three files.
        let gone: Vec<String> =
            files.keys().enumerate().filter(|(at, _)| at % 3 != 0).map(|(_, n)| n.clone()).collect();
        for file in gone {
            fs.unlink(fs.root(), file.as_bytes()).unwrap();
            files.remove(&file);
        }
    }
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
    let fs = open(&image, &options);
    let files = files.into_inner().unwrap();
    verify(&fs, &files);
    fs.close().unwrap();
    drop(fs);
    let mount = LoopMount::new(image.path(), "").unwrap();
    for (name, content) in &files {
        assert!(std::fs::read(mount.join(name)).unwrap() == *content, "{name}, read by Linux");
    }
    mount.scrub().unwrap();
    // Linux can write to the filesystem too.
    std::fs::write(mount.join("by Linux"), vec![1; MIB as usize]).unwrap();
    mount.close().unwrap();
    btrfs_check(image.path()).unwrap();
}

#[test]
fn large_files_fill_it() {
    if kernel_oracle() {
        fill_and_recover("large", 256 * MIB, &[], "", 8 * MIB, 1);
    }
}

#[test]
fn small_files_fill_it() {
    if kernel_oracle() {
        fill_and_recover("small", 160 * MIB, &["-m", "single"], "", 20_000, 1);
    }
}

#[test]
fn inline_files_fill_it() {
    if kernel_oracle() {
        fill_and_recover("inline", 128 * MIB, &["-n", "4096"], "", 2000, 1);
    }
}

#[test]
fn compressed_files_of_many_threads_fill_it() {
    if kernel_oracle() {
        fill_and_recover("compressed", 200 * MIB, &[], "compress=zstd:1", MIB, 4);
    }
}

#[test]
fn mixed_block_groups_fill() {
    if kernel_oracle() {
        fill_and_recover("mixed", 128 * MIB, &["-M"], "", MIB / 2, 2);
    }
}

/// Takes a snapshot of the top level in itself, and deletes the snapshot again. Returns false if there was no room for
/// the snapshot.
fn try_snapshot(fs: &Fs, name: &str) -> bool {
    let source = fs.root();
    match fs.snapshot(source.root, source, name.as_bytes(), false) {
        Ok(_) => {
            fs.delete_subvolume(source, name.as_bytes(), None).unwrap();
            true
        }
        Err(error) => !is_full(&error),
    }
}

/// Fills a filesystem, requests snapshots, for which there may be no room, and removes files.
fn refused_snapshots_and_removals(len_bytes: u64, mkfs: &[&str], max_bytes: u64) {
    let image = Image::kernel_made(len_bytes, mkfs).unwrap();
    let mut rng = Rng::new(Rng::seed_or(5));
    let files = Mutex::new(Files::new());
    let fs = open(&image, &MountOptions::default());
    fill(&fs, &mut rng, "big", max_bytes, &files);
    fill(&fs, &mut rng, "small", 3000, &files);
    let refused = (0..4).filter(|number| !try_snapshot(&fs, &format!("snapshot {number}"))).count();
    println!("{mkfs:?}: {refused} of 4 snapshots refused, {} files", files.lock().unwrap().len());
    let mut files = files.into_inner().unwrap();
    let names: Vec<_> = files.keys().filter(|_| rng.below(2) == 0).cloned().collect();
    for name in names {
        fs.unlink(fs.root(), name.as_bytes()).unwrap_or_else(|error| panic!("{name} stays: {error}"));
        files.remove(&name);
    }
    fs.sync().unwrap();
    verify(&fs, &files);
    fs.close().unwrap();
    drop(fs);
    second_opinion(image.path()).unwrap();
    btrfs_check(image.path()).unwrap();
}

#[test]
fn a_refused_snapshot_leaves_room_for_removals() {
    if kernel_oracle() {
        refused_snapshots_and_removals(96 * MIB, &["-M"], 6000);
        refused_snapshots_and_removals(160 * MIB, &["-m", "single"], 20_000);
    }
}

/// Writes and truncates the files of one thread at random, until many operations were refused. Returns the expected
/// content.
fn scatter(fs: &Fs, dir: InodeId, mut rng: Rng, thread: usize) -> Vec<(InodeId, Vec<u8>)> {
    const LEN: u64 = 12 * MIB;
    let mut files: Vec<(InodeId, Vec<u8>)> = (0..6)
        .map(|number| {
            let name = format!("f{thread}_{number}");
            (fs.create(dir, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id, Vec::new())
        })
        .collect();
    let mut refused = 0;
    while refused < 40 {
        let (id, content) = &mut files[rng.below(6) as usize];
        if rng.below(100) < 6 {
            let size = rng.below(content.len() as u64 + 1) / 4096 * 4096;
            let cut = fs.setattr(*id, &SetAttr { size: Some(size), ..SetAttr::default() }, &Caller::ROOT);
            if let Err(error) = &cut {
                refused += usize::from(is_full(error));
            }
            // A truncation that was refused may have removed a part of the file.
            content.truncate(fs.getattr(*id).unwrap().size as usize);
            continue;
        }
        let len = [100, 4096, 9000, 70_000, 300_000][rng.below(5) as usize];
        let (offset, bytes) = (rng.below(LEN) as usize, rng.bytes(len));
        match fs.write(*id, offset as u64, &bytes) {
            Ok(written) => {
                content.resize(content.len().max(offset + written), 0);
                content[offset..offset + written].copy_from_slice(&bytes[..written]);
            }
            Err(error) => refused += usize::from(is_full(&error)),
        }
    }
    files
}

#[test]
fn data_accepted_amid_truncations_and_snapshots_is_written() {
    if !kernel_oracle() {
        return;
    }
    let first = Rng::seed_or(1);
    for seed in first..first + 2 {
        println!("seed {seed}");
        let image = Image::empty(250 * MIB).unwrap();
        let device = FileDevice::open(image.path(), Access::ReadWrite).unwrap();
        let format = ubtrfs_mkfs::MkfsOptions {
            metadata_profile: BlockGroupFlags::empty(),
            ..ubtrfs_mkfs::MkfsOptions::default()
        };
        ubtrfs_mkfs::make(&device, &format).unwrap();
        drop(device);
        let fs = open(&image, &MountOptions::default());
        let source = fs.create_subvolume(fs.root(), b"s", &Caller::ROOT).unwrap();
        let done = AtomicUsize::new(0);
        let files: Vec<(InodeId, Vec<u8>)> = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..4)
                .map(|thread| {
                    let (fs, done, rng) = (&fs, &done, Rng::new(9 * seed + thread as u64));
                    scope.spawn(move || {
                        let files = scatter(fs, source, rng, thread);
                        done.fetch_add(1, Ordering::Relaxed);
                        files
                    })
                })
                .collect();
            for number in 0..6 {
                if done.load(Ordering::Relaxed) < 4 {
                    std::thread::sleep(Duration::from_millis(1200));
                    if let Err(error) = fs.snapshot(source.root, fs.root(), format!("sn{number}").as_bytes(), true) {
                        is_full(&error);
                    }
                }
            }
            writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect()
        });
        for (id, _) in &files {
            fs.fsync(*id, false).unwrap();
        }
        // Background writeback may fail while the reservations of other threads take all free space. The data stays
        // dirty, and the next attempt writes it.
        let failures = fs.metrics().into_iter().find(|metric| metric.name == "writeback_failures_total").unwrap();
        println!("{} failures in the background", failures.value);
        for (id, content) in &files {
            assert!(fs.read(*id, 0, 16 << 20).unwrap() == *content, "content of {id:?}");
        }
        fs.close().unwrap();
        drop(fs);
        btrfs_check(image.path()).unwrap();
        second_opinion(image.path()).unwrap();
    }
}

#[test]
fn files_are_shortened_and_punched_on_a_full_filesystem() {
    if !kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(160 << 20, &["-n", "4096"]).unwrap();
    let fs = open(&image, &MountOptions::default());
    let make = |name: &str| fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &Caller::ROOT);
    let files: Vec<InodeId> = (0..20).map(|number| make(&format!("file{number}")).unwrap().id).collect();
    const CAPABILITY: &[u8] = b"security.capability";
    for &id in &files {
        fs.write(id, 0, &[b'f'; 65_536]).unwrap();
        fs.setxattr(id, CAPABILITY, b"value", XattrFlags::empty(), &Caller::ROOT).unwrap();
        fs.setattr(id, &SetAttr { mode: Some(0o6755), ..SetAttr::default() }, &Caller::ROOT).unwrap();
    }
    // Make clones of one block, and a snapshot that shares their items, so that each change needs much metadata.
    for at in 1..4000 {
        fs.clone_range(files[0], 0, files[0], (16 + at) * 4096, 4096).unwrap();
    }
    fs.sync().unwrap();
    fs.snapshot(fs.root().root, fs.root(), b"snapshot", true).unwrap();
    for round in 0..3 {
        let nr_names = (0..).take_while(|number| make(&format!("{round}.{number:0200}")).is_ok()).count();
        println!("round {round}: {nr_names} names");
        fs.sync().unwrap();
    }
    assert!(is_full(&make("more").unwrap_err()));
    // When a program truncates a file, the kernel's request has the new size and the new times.
    let now = Some(SetTime::Now);
    let empty = SetAttr { size: Some(0), mtime: now, ..SetAttr::default() };
    for &id in &files[..10] {
        fs.setattr(id, &empty, &Caller::ROOT).unwrap();
        assert_eq!(fs.getattr(id).unwrap().size, 0);
        fs.setattr(id, &empty, &Caller::ROOT).unwrap();
        // The FUSE server makes these two calls after a truncation.
        assert!(fs.drop_capability(id).unwrap());
        fs.drop_privileges(id, 0).unwrap();
        assert_eq!(fs.getattr(id).unwrap().mode & 0o7777, 0o755);
    }
    for &id in &files[10..] {
        fs.fallocate(id, 4096, 8192, FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE).unwrap();
        assert_eq!(fs.read(id, 4096, 8192).unwrap(), [0; 8192]);
    }
    fs.close().unwrap();
    btrfs_check(image.path()).unwrap();
    second_opinion(image.path()).unwrap();
}

#[test]
fn all_space_that_is_available_can_be_preallocated() {
    if !kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(2048 * MIB, &[]).unwrap();
    let fs = open(&image, &MountOptions::default());
    let id = fs.create(fs.root(), b"all", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    let available = |fs: &Fs| fs.statfs().map(|stat| stat.bavail * u64::from(stat.bsize)).unwrap();
    let bytes = available(&fs);
    fs.fallocate(id, 0, bytes, FallocateMode::KEEP_SIZE).unwrap();
    fs.sync().unwrap();
    assert_eq!(available(&fs), 0);
    // The range is allocated already, so it needs no space.
    fs.fallocate(id, 0, bytes, FallocateMode::empty()).unwrap();
    assert!(is_full(&fs.fallocate(id, 0, bytes + 4096, FallocateMode::KEEP_SIZE).unwrap_err()));
    fs.write_all(id, 0, &[1; 131_072]).unwrap();
    fs.close().unwrap();
    btrfs_check(image.path()).unwrap();
}

#[test]
fn parts_of_sectors_of_files_without_copy_on_write_are_punched_on_a_full_filesystem() {
    if !kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let fs = open(&image, &MountOptions::parse("nodatacow,max_inline=0").unwrap());
    let make = |name: &str| fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    let (id, filler) = (make("file"), make("filler"));
    let mut expected = vec![0xab; 40_960];
    fs.write_all(id, 0, &expected).unwrap();
    let holes = make("holes");
    let mut in_holes = [vec![0; 4096], vec![7; 8192]].concat();
    fs.write_all(holes, 4096, &[7; 8192]).unwrap();
    fs.sync().unwrap();
    let mut at = 0;
    while let Ok(len) = fs.write(filler, at, &[7; 65_536]) {
        at += len as u64;
    }
    let mode = FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE;
    // Each range begins or ends, or does both, within a sector.
    for (offset, len) in [(0, 512), (4096 + 512, 4096 - 512), (2 * 4096 + 512, 5 * 4096), (9 * 4096, 100)] {
        fs.fallocate(id, offset, len, mode).unwrap();
        expected[offset as usize..(offset + len) as usize].fill(0);
        assert!(fs.read(id, 0, 40_960).unwrap() == expected, "{offset}");
    }
    // One edge in a hole; the other one is overwritten in place.
    for (offset, len) in [(100, 4000), (4096 + 100, 20_000)] {
        fs.fallocate(holes, offset, len, mode).unwrap_or_else(|error| panic!("{offset}, {len}: {error}"));
        let end = in_holes.len().min((offset + len) as usize);
        in_holes[offset as usize..end].fill(0);
        assert!(fs.read(holes, 0, in_holes.len()).unwrap() == in_holes, "{offset}");
    }
    // The extents of a file that a snapshot shares cannot be overwritten in place.
    fs.snapshot(fs.root().root, fs.root(), b"snapshot", true).unwrap();
    assert!(is_full(&fs.fallocate(id, 1024, 512, mode).unwrap_err()));
    fs.close().unwrap();
    btrfs_check(image.path()).unwrap();
    let mount = LoopMount::new(image.path(), "ro").unwrap();
    assert!(std::fs::read(mount.join("file")).unwrap() == expected, "read by Linux");
    mount.close().unwrap();
}

/// While a snapshot shares the nodes of a subvolume, removing files copies these nodes and frees no space.
#[test]
fn a_snapshot_is_deleted_when_removals_find_no_space() {
    if !kernel_oracle() {
        return;
    }
    for (node_size, seed) in [("4096", 3), ("16384", 4)] {
        let image = Image::kernel_made(200 * MIB, &["-n", node_size]).unwrap();
        let mut rng = Rng::new(Rng::seed_or(seed));
        let fs = open(&image, &MountOptions::default());
        let files = Mutex::new(Files::new());
        // Data takes all space outside of the metadata block group.
        fill(&fs, &mut rng, "data", 4 * MIB, &files);
        let make = |name: &str| fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &Caller::ROOT);
        let mut names: Vec<String> = (0..).map(|n| format!("{n:0150}")).take_while(|name| make(name).is_ok()).collect();
        fs.sync().unwrap();
        // Removing some files makes room for a snapshot.
        while let Err(error) = fs.snapshot(fs.root().root, fs.root(), b"snapshot", true) {
            assert!(is_full(&error) && names.len() > 100);
            for name in names.drain(..100) {
                fs.unlink(fs.root(), name.as_bytes()).unwrap();
            }
            fs.sync().unwrap();
        }
        for at in (1..names.len()).rev() {
            names.swap(at, rng.index(at + 1));
        }
        let nr_names = names.len();
        let mut refused = 0;
        names.retain(|name| match fs.unlink(fs.root(), name.as_bytes()) {
            _ if refused == 20 => true,
            Ok(()) => false,
            Err(error) => {
                refused += usize::from(is_full(&error));
                true
            }
        });
        println!("nodes of {node_size}: {} of {nr_names} files removed beside the snapshot", nr_names - names.len());
        assert_eq!(refused, 20, "the snapshot does not hold enough metadata for this test");
        fs.sync().unwrap();
        fs.delete_subvolume(fs.root(), b"snapshot", None).unwrap();
        fs.finish_deletions(&mut |_| Ok(())).unwrap();
        for name in names {
            fs.unlink(fs.root(), name.as_bytes()).unwrap();
        }
        fs.sync().unwrap();
        verify(&fs, &files.into_inner().unwrap());
        fs.close().unwrap();
        drop(fs);
        btrfs_check(image.path()).unwrap();
        second_opinion(image.path()).unwrap();
    }
}

/// Writes that need much metadata for their data: single blocks at random places, and files that become inline.
#[test]
fn writes_that_were_accepted_while_metadata_is_full_are_written() {
    if !kernel_oracle() {
        return;
    }
    const BLOCKS: u64 = 16_384;
    let seed = Rng::seed_or(1);
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let image = Image::kernel_made(160 << 20, &["-n", "4096"]).unwrap();
    let fs = open(&image, &MountOptions::default());
    let make = |name: &str| fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &Caller::ROOT);
    let file = make("file").unwrap().id;
    // Names without data fill the metadata.
    let nr_names = (0..).take_while(|number| make(&format!("{number:0200}")).is_ok()).count();
    fs.sync().unwrap();
    let mut content = std::collections::BTreeMap::new();
    let mut nr_small = 0;
    for number in 0..nr_names.min(2000) {
        if number % 20 == 0 {
            for _ in 0..2000 {
                let at = rng.below(BLOCKS);
                let byte = 1 + rng.below(250) as u8;
                match fs.write(file, at * 8192, &[byte; 4096]) {
                    Ok(_) => drop(content.insert(at, byte)),
                    Err(error) => {
                        assert!(is_full(&error), "{error}");
                        break;
                    }
                }
            }
            while let Ok(id) = make(&format!("small{nr_small}")).map(|attr| attr.id) {
                nr_small += 1;
                if fs.write(id, 0, &[b'i'; 2000]).is_err() {
                    break;
                }
            }
            fs.sync().unwrap_or_else(|error| panic!("seed {seed}, {number}: accepted data is written: {error}"));
        }
        fs.unlink(fs.root(), format!("{number:0200}").as_bytes()).unwrap();
    }
    println!("{} blocks, {nr_small} small files", content.len());
    assert!(content.len() > 1000 && nr_small > 10);
    for (at, byte) in content {
        assert_eq!(fs.read(file, at * 8192, 4096).unwrap(), [byte; 4096]);
    }
    fs.close().unwrap();
    btrfs_check(image.path()).unwrap();
    second_opinion(image.path()).unwrap();
}

#[test]
fn a_copy_that_fails_half_way_tells_how_far_it_came() {
    if !kernel_oracle() {
        return;
    }
    const LEN: u64 = 24 << 20;
    let image = Image::kernel_made(160 << 20, &["-n", "4096"]).unwrap();
    let fs = open(&image, &MountOptions::default());
    let make =
        |name: &str| fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).map(|attr| attr.id);
    // Make many small extents, so that sharing them needs much metadata.
    let (source, target) = (make("source").unwrap(), make("target").unwrap());
    let mut rng = Rng::new(1);
    let mut order: Vec<u64> = (0..LEN / 4096).collect();
    order.sort_by_cached_key(|_| rng.next_u64());
    for (number, at) in order.iter().enumerate() {
        fs.write(source, at * 4096, &[b's'; 4096]).unwrap();
        if number % 500 == 0 {
            fs.fsync(source, false).unwrap();
        }
    }
    for at in 0..LEN >> 20 {
        fs.write(target, at << 20, &vec![b't'; 1 << 20]).unwrap();
    }
    fs.sync().unwrap();
    let mut fillers = Vec::new();
    for _ in 0..3 {
        while let Ok(id) = make(&format!("z{}", fillers.len())) {
            fillers.push(id);
            if fs.write(id, 0, &[b'z'; 2000]).is_err() {
                break;
            }
        }
        let _ = fs.sync();
    }
    let (mut done, mut nr_failed) = (0, 0);
    while done < LEN {
        match fs.copy_range_opened(source, done, target, done, LEN - done) {
            Ok(copied) => done += copied,
            Err(error) => {
                assert!(is_full(&error));
                nr_failed += 1;
                for _ in 0..30 {
                    fillers.pop();
                    fs.unlink(fs.root(), format!("z{}", fillers.len()).as_bytes()).unwrap();
                }
                fs.sync().unwrap();
            }
        }
        for at in (done >> 20..LEN >> 20).map(|mib| mib << 20) {
            let expected: Vec<u8> = (at..at + (1 << 20)).map(|at| if at < done { b's' } else { b't' }).collect();
            assert!(fs.read(target, at, 1 << 20).unwrap() == expected, "at {at}, {done} are done");
        }
    }
    println!("{nr_failed} attempts failed");
    fs.close().unwrap();
    btrfs_check(image.path()).unwrap();
    second_opinion(image.path()).unwrap();
}

/// Snapshots are taken and deleted, and block groups are emptied, while threads write. Some snapshots and moves find no
/// space on such a small filesystem, but there is ample room for the writers.
#[test]
fn snapshots_and_moves_let_no_other_change_fail_for_lack_of_space() {
    if !kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(192 * MIB, &["-n", "16384"]).unwrap();
    let fs = open(&image, &MountOptions::parse("commit=300").unwrap());
    let dirs: Vec<InodeId> = (0..3)
        .map(|thread| {
            let name = format!("dir-{thread}");
            fs.create(fs.root(), name.as_bytes(), NewInode::dir(0o755), &Caller::ROOT).unwrap().id
        })
        .collect();
    let done = AtomicUsize::new(0);
    let refused = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for &dir in &dirs {
            let (fs, done, refused) = (&fs, &done, &refused);
            scope.spawn(move || {
                let note = |what: &str, failed: Result<(), Error>| {
                    if let Err(error) = failed {
                        refused.lock().unwrap().push(format!("{what}: {error}"));
                    }
                };
                for round in 0..1500_usize {
                    let name = format!("file-{round}");
                    match fs.create(dir, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT) {
                        Ok(attr) => note("write", fs.write(attr.id, 0, &[7; 20_000]).map(drop)),
                        Err(error) => note("create", Err(error)),
                    }
                    let name = format!("dir-{round}");
                    note("mkdir", fs.create(dir, name.as_bytes(), NewInode::dir(0o755), &Caller::ROOT).map(drop));
                    if let Some(old) = round.checked_sub(50) {
                        note("unlink", fs.unlink(dir, format!("file-{old}").as_bytes()));
                        note("rmdir", fs.rmdir(dir, format!("dir-{old}").as_bytes()));
                    }
                }
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        scope.spawn(|| {
            while done.load(Ordering::Relaxed) < dirs.len() {
                for group in fs.block_groups() {
                    // A move may find no space, or the block group may have been removed.
                    if let Err(error) = fs.relocate_block_group(group.start, &Job::new()) {
                        println!("block group {}: {error}", group.start);
                    }
                }
            }
        });
        while done.load(Ordering::Relaxed) < dirs.len() {
            try_snapshot(&fs, "snapshot");
        }
    });
    assert_eq!(refused.into_inner().unwrap(), Vec::<String>::new());
    fs.close().unwrap();
    btrfs_check(image.path()).unwrap();
    second_opinion(image.path()).unwrap();
}
