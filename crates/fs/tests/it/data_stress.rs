//! The data path under stress: many threads on few files, full filesystems, failing devices. A test passes if the data
//! of every successful sync is there, `btrfs check --check-data-csum` is clean, and the test ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::item::Compression;
use ubtrfs_fs::{Caller, CompressSpec, FallocateMode, Fs, InodeId, MountOptions, NewInode, SetAttr};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::capability::program;
use ubtrfs_testkit::{FaultDevice, FaultPlan, Image, Rng, btrfs_check, btrfs_check_after_failures};

fn make(len_bytes: u64) -> Image {
    let image = Image::empty(len_bytes).unwrap();
    ubtrfs_mkfs::make(&*device(&image), &MkfsOptions::default()).unwrap();
    image
}

fn device(image: &Image) -> Arc<dyn Device> {
    Arc::new(FileDevice::open(image.path(), Access::ReadWrite).unwrap())
}

fn open(image: &Image, options: &MountOptions) -> Arc<Fs> {
    Fs::open(vec![device(image)], options.clone()).unwrap()
}

fn check(image: &Image) {
    if program("btrfs") {
        btrfs_check(image.path()).unwrap();
    }
}

fn create(fs: &Fs, name: &str) -> InodeId {
    fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id
}

/// The content of a file: each 8-byte word is its own offset mixed with a tag of the file, so the content is right no
/// matter which thread wrote last. Words in holes are zero.
fn pattern(tag: u64, offset: u64, len: usize) -> Vec<u8> {
    (0..len as u64 / 8).flat_map(|index| (offset + index * 8 + 1).wrapping_mul(tag | 1).to_le_bytes()).collect()
}

fn check_pattern(tag: u64, offset: u64, bytes: &[u8]) {
    for (index, word) in bytes.chunks_exact(8).enumerate() {
        let at = offset + index as u64 * 8;
        let word = u64::from_le_bytes(word.try_into().unwrap());
        assert!(word == 0 || word == (at + 1).wrapping_mul(tag | 1), "at {at}: {word:#x}");
    }
}

#[test]
fn threads_on_the_same_files_neither_hang_nor_mix_up_data() {
    let image = make(1 << 30);
    let seed = Rng::seed_or(0xca5e);
    eprintln!("UBTRFS_SEED={seed}");
    let options = MountOptions {
        memory_bytes: 16 << 20,
        compress: Some(CompressSpec::new(Compression::Lzo)),
        ..MountOptions::default()
    };
    let fs = open(&image, &options);
    let files: Vec<InodeId> = (0..4).map(|index| create(&fs, &format!("file{index}"))).collect();
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..6u64 {
            let (fs, files, done) = (&fs, &files, &done);
            scope.spawn(move || {
                let mut rng = Rng::new(seed ^ thread << 32);
                for _ in 0..400 {
                    let index = rng.index(files.len());
                    let (id, tag) = (files[index], index as u64 + 77);
                    let offset = rng.below(1 << 18) * 8;
                    let len = (rng.len(300_000) / 8 * 8).max(8) as usize;
                    match rng.below(20) {
                        0..8 => {
                            fs.write(id, offset, &pattern(tag, offset, len)).unwrap();
                        }
                        8..12 => check_pattern(tag, offset, &fs.read(id, offset, len).unwrap()),
                        12 => {
                            let size = Some(rng.below(1 << 18) * 8);
                            fs.setattr(id, &SetAttr { size, ..SetAttr::default() }, &Caller::ROOT).unwrap();
                        }
                        13 => {
                            let mode = FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE;
                            fs.fallocate(id, offset, len as u64, mode).unwrap();
                        }
                        14 => fs.fallocate(id, offset, len as u64, FallocateMode::ZERO_RANGE).unwrap(),
                        15 => fs.fallocate(id, offset, len as u64, FallocateMode::KEEP_SIZE).unwrap(),
                        16 => {
                            // Sharing within a file would move the 8-byte values to other offsets, and sharing between
                            // files would mix their tags. So each range is shared with a scratch file, at the same
                            // offset, and the scratch file is checked.
                            let name = format!("scratch{thread}");
                            let scratch = match fs.lookup(fs.root(), name.as_bytes()) {
                                Ok(attr) => attr.id,
                                Err(_) => create(fs, &name),
                            };
                            let from = offset / 4096 * 4096;
                            let copied = fs.copy_range(id, from, scratch, from, len as u64).unwrap();
                            check_pattern(tag, from, &fs.read(scratch, from, copied as usize).unwrap());
                            fs.unlink(fs.root(), name.as_bytes()).unwrap();
                        }
                        17 => fs.fsync(id, false).unwrap(),
                        18 => fs.sync().unwrap(),
                        _ => {
                            fs.getattr(id).unwrap();
                        }
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    for (index, id) in files.iter().enumerate() {
        check_pattern(index as u64 + 77, 0, &fs.read(*id, 0, usize::MAX).unwrap());
    }
    fs.close().unwrap();
    drop(fs);
    check(&image);
    let fs = open(&image, &MountOptions::default());
    for index in 0..files.len() {
        let id = fs.lookup(fs.root(), format!("file{index}").as_bytes()).unwrap().id;
        check_pattern(index as u64 + 77, 0, &fs.read(id, 0, usize::MAX).unwrap());
    }
    fs.close().unwrap();
}

#[test]
fn writers_over_the_memory_limit_end_while_others_commit() {
    let image = make(2 << 30);
    let options = MountOptions { memory_bytes: 16 << 20, ..MountOptions::default() };
    let fs = open(&image, &options);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (fs, stop) = (&fs, &stop);
        let writers: Vec<_> = (0..4u64)
            .map(|thread| {
                scope.spawn(move || {
                    let id = create(fs, &format!("large{thread}"));
                    for index in 0..64u64 {
                        fs.write(id, index << 20, &pattern(thread, index << 20, 1 << 20)).unwrap();
                    }
                })
            })
            .collect();
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                fs.sync().unwrap();
            }
        });
        for writer in writers {
            writer.join().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    fs.close().unwrap();
    drop(fs);
    check(&image);
    let fs = open(&image, &MountOptions::default());
    for thread in 0..4u64 {
        let id = fs.lookup(fs.root(), format!("large{thread}").as_bytes()).unwrap().id;
        let bytes = fs.read(id, 0, usize::MAX).unwrap();
        assert!(bytes == pattern(thread, 0, 64 << 20));
    }
    fs.close().unwrap();
}

/// Fills the filesystem with files of `len` bytes until there is no space. Returns the number of files written.
fn fill(fs: &Fs, len: usize) -> u64 {
    let mut nr_files = 0;
    loop {
        let name = format!("fill{nr_files}");
        let Ok(attr) = fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &Caller::ROOT) else { break };
        match fs.write(attr.id, 0, &pattern(nr_files, 0, len)) {
            Ok(written) if written == len => nr_files += 1,
            Ok(_) => break,
            Err(error) => {
                assert_eq!(error.errno(), rustix::io::Errno::NOSPC.raw_os_error(), "{error}");
                break;
            }
        }
    }
    nr_files
}

fn full_filesystem(len: usize) {
    let image = make(160 << 20);
    let fs = open(&image, &MountOptions::default());
    let nr_files = fill(&fs, len);
    eprintln!("{nr_files} files of {len} bytes");
    assert!(nr_files as usize * len > 30 << 20, "{nr_files} files of {len} bytes on 160 MiB");
    fs.sync().unwrap();
    assert_eq!(fs.read_only(), None);
    fs.close().unwrap();
    drop(fs);
    check(&image);

    let fs = open(&image, &MountOptions::default());
    for index in 0..nr_files {
        let id = fs.lookup(fs.root(), format!("fill{index}").as_bytes()).unwrap().id;
        assert!(fs.read(id, 0, usize::MAX).unwrap() == pattern(index, 0, len), "file {index}");
    }
    // A full filesystem can be emptied and used again.
    for index in 0..nr_files {
        fs.unlink(fs.root(), format!("fill{index}").as_bytes()).unwrap();
    }
    fs.sync().unwrap();
    let again = create(&fs, "again");
    for index in 0..20u64 {
        fs.write(again, index << 20, &pattern(3, index << 20, 1 << 20)).unwrap();
    }
    fs.close().unwrap();
    drop(fs);
    check(&image);
}

#[test]
fn a_filesystem_full_of_large_files_keeps_its_promises() {
    full_filesystem(3 << 20);
}

#[test]
fn a_filesystem_full_of_small_files_keeps_its_promises() {
    full_filesystem(40_000);
}

#[test]
fn a_preallocated_file_can_be_written_on_a_full_filesystem() {
    let image = make(160 << 20);
    let fs = open(&image, &MountOptions::default());
    let id = create(&fs, "prealloc");
    fs.fallocate(id, 0, 8 << 20, FallocateMode::empty()).unwrap();
    fs.sync().unwrap();
    fill(&fs, 1 << 20);
    fill(&fs, 4096);
    for index in 0..8u64 {
        fs.write(id, index << 20, &pattern(9, index << 20, 1 << 20)).unwrap();
    }
    fs.fsync(id, false).unwrap();
    fs.close().unwrap();
    drop(fs);
    check(&image);
    let fs = open(&image, &MountOptions::default());
    let id = fs.lookup(fs.root(), b"prealloc").unwrap().id;
    assert!(fs.read(id, 0, usize::MAX).unwrap() == pattern(9, 0, 8 << 20));
    fs.close().unwrap();
}

const FAULT_FILES: u64 = 3;
const FAULT_BYTES: usize = 300_000 / 8 * 8;

/// Writes this version's pattern to every file.
fn write_version(fs: &Fs, version: u64) -> ubtrfs_fs::Result<()> {
    for file in 0..FAULT_FILES {
        let name = format!("file{file}");
        let id = match fs.lookup(fs.root(), name.as_bytes()) {
            Ok(attr) => attr.id,
            Err(_) => fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &Caller::ROOT)?.id,
        };
        fs.write(id, 0, &pattern(version * 8 + file, 0, FAULT_BYTES))?;
    }
    Ok(())
}

/// Writes some files in two versions, and syncs after each version. Returns the last version with a successful sync.
/// After a failed sync, the version is written and synced again, as a program may do.
fn write_and_sync(fs: &Fs) -> u64 {
    let mut synced = 0;
    for version in 1..=2 {
        let _ = write_version(fs, version);
        if fs.sync().is_ok() {
            synced = version;
        } else if fs.read_only().is_none() && write_version(fs, version).is_ok() {
            fs.sync().expect("one write failed, and it was data: the next try must succeed");
            synced = version;
        }
    }
    synced
}

#[test]
fn a_failed_write_loses_nothing_that_was_synced() {
    let counted = {
        let image = make(160 << 20);
        let fault = Arc::new(FaultDevice::new(device(&image), FaultPlan::default()));
        let fs = Fs::open(vec![fault.clone() as Arc<dyn Device>], MountOptions::default()).unwrap();
        assert_eq!(write_and_sync(&fs), 2);
        fs.close().unwrap();
        fault.counts().1
    };
    eprintln!("{counted} writes");
    for failing in (0..counted).step_by((counted as usize / 24).max(1)) {
        let image = make(160 << 20);
        let plan = FaultPlan { write: Some(failing), ..FaultPlan::default() };
        let fault: Arc<dyn Device> = Arc::new(FaultDevice::new(device(&image), plan));
        let synced = {
            let fs = Fs::open(vec![fault], MountOptions::default()).unwrap();
            let synced = write_and_sync(&fs);
            let _ = fs.close();
            synced
        };
        let fs = open(&image, &MountOptions::default());
        for file in (0..FAULT_FILES).filter(|_| synced > 0) {
            let id = fs.lookup(fs.root(), format!("file{file}").as_bytes()).unwrap().id;
            let bytes = fs.read(id, 0, usize::MAX).unwrap();
            assert_eq!(bytes.len(), FAULT_BYTES, "write {failing} failed, file {file}");
            for (index, word) in bytes.chunks_exact(8).enumerate() {
                let word = u64::from_le_bytes(word.try_into().unwrap());
                let is_version = |version: u64| word == (index as u64 * 8 + 1).wrapping_mul((version * 8 + file) | 1);
                assert!((synced..=2).any(is_version), "write {failing} failed, file {file}, word {index}");
            }
        }
        // The failed write may have written half of the first superblock. The next commit writes all copies again.
        create(&fs, "after");
        fs.close().unwrap();
        drop(fs);
        if program("btrfs") {
            btrfs_check_after_failures(image.path()).unwrap();
        }
    }
}
