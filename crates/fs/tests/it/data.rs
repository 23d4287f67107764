//! File content against a model: random operations on a few files, each mirrored in a byte vector. Then the filesystem
//! is reopened, `btrfs check --check-data-csum` judges it, and Linux reads it.
//!
//! A failure prints its seed; `UBTRFS_SEED=n` replays it.

use std::collections::BTreeMap;
use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::item::{Compression, Timespec};
use ubtrfs_format::superblock::{CompatRo, Incompat};
use ubtrfs_fs::{
    Caller, CompressSpec, FallocateMode, FileExtentKind, Fs, InodeId, Job, MountOptions, NewInode, SeekWhence, SetAttr,
    SetTime, XattrFlags,
};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::capability::{kernel_oracle, program};
use ubtrfs_testkit::{Image, LoopMount, Rng, btrfs_check};

const IMAGE_BYTES: u64 = 512 << 20;

fn make(options: &MkfsOptions) -> Image {
    let image = Image::empty(IMAGE_BYTES).unwrap();
    ubtrfs_mkfs::make(&*device(&image), options).unwrap();
    image
}

fn device(image: &Image) -> Arc<dyn Device> {
    Arc::new(FileDevice::open(image.path(), Access::ReadWrite).unwrap())
}

fn open(image: &Image, options: &MountOptions) -> Arc<Fs> {
    let fs = Fs::open(vec![device(image)], options.clone()).unwrap();
    assert_eq!(fs.read_only(), None);
    fs
}

/// The expected content of a file.
#[derive(Clone, Debug, Default)]
struct Expected {
    bytes: Vec<u8>,
}

struct World {
    rng: Rng,
    files: BTreeMap<String, Expected>,
    max_bytes: u64,
    log: Vec<String>,
}

impl World {
    fn new(seed: u64, max_bytes: u64) -> Self {
        Self { rng: Rng::new(seed), files: BTreeMap::new(), max_bytes, log: Vec::new() }
    }

    fn id(fs: &Fs, name: &str) -> InodeId {
        fs.lookup(fs.root(), name.as_bytes()).unwrap().id
    }

    fn offset(&mut self, size: usize) -> u64 {
        let at = match self.rng.below(6) {
            0 => 0,
            1 => size as u64,
            2 => self.rng.below(self.max_bytes),
            3 => self.rng.below(self.max_bytes / 4096 + 1) * 4096,
            _ => self.rng.below(size as u64 + 1),
        };
        at.min(self.max_bytes - 1)
    }

    fn step(&mut self, fs: &Fs) {
        if self.files.len() < 4 || self.rng.one_in(60) {
            let name = format!("f{}", self.files.len());
            let id = fs.create(fs.root(), name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
            if self.rng.one_in(5) {
                let property: &[u8] = self.rng.pick::<&[u8]>(&[b"zstd", b"lzo", b"zlib"]);
                // Files without copy-on-write refuse the compression property.
                let _ = fs.setxattr(id, b"btrfs.compression", property, XattrFlags::empty(), &Caller::ROOT);
            } else if self.rng.one_in(6) {
                const NOCOW: u32 = 0x0080_0000;
                fs.set_inode_flags(id, NOCOW, &Caller::ROOT).unwrap();
                self.log.push(format!("{name} is nodatacow"));
            }
            self.files.insert(name, Expected::default());
        }
        let names: Vec<String> = self.files.keys().cloned().collect();
        let name = self.rng.pick(&names).clone();
        let id = Self::id(fs, &name);
        let size = self.files[&name].bytes.len();
        let offset = self.offset(size);
        let most = if self.rng.one_in(8) { 1 << 20 } else { 60_000 };
        let len = self.rng.len(most).max(1).min(self.max_bytes - offset);
        let end = (offset + len) as usize;
        let sector = |at: u64| at / 4096 * 4096;
        match self.rng.below(100) {
            0..40 => {
                let data = self.rng.content(len as usize);
                self.log.push(format!("write {name} {offset}+{len}"));
                assert_eq!(fs.write(id, offset, &data).unwrap(), data.len());
                let bytes = self.bytes(&name);
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                bytes[offset as usize..end].copy_from_slice(&data);
            }
            40..52 => {
                let to = if self.rng.one_in(4) { offset } else { self.rng.below(size as u64 + 1) };
                self.log.push(format!("truncate {name} {size} -> {to}"));
                fs.setattr(id, &SetAttr { size: Some(to), ..SetAttr::default() }, &Caller::ROOT).unwrap();
                self.bytes(&name).resize(to as usize, 0);
            }
            52..60 => {
                self.log.push(format!("punch {name} {offset}+{len}"));
                fs.fallocate(id, offset, len, FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE).unwrap();
                let end = end.min(size);
                if (offset as usize) < end {
                    self.bytes(&name)[offset as usize..end].fill(0);
                }
            }
            60..68 => {
                let keep = self.rng.one_in(2);
                self.log.push(format!("zero {name} {offset}+{len} keep {keep}"));
                let mode = if keep { FallocateMode::KEEP_SIZE } else { FallocateMode::empty() };
                fs.fallocate(id, offset, len, mode | FallocateMode::ZERO_RANGE).unwrap();
                let bytes = self.bytes(&name);
                if !keep && bytes.len() < end {
                    bytes.resize(end, 0);
                }
                let end = end.min(bytes.len());
                if (offset as usize) < end {
                    bytes[offset as usize..end].fill(0);
                }
            }
            68..76 => {
                let keep = self.rng.one_in(2);
                self.log.push(format!("allocate {name} {offset}+{len} keep {keep}"));
                let mode = if keep { FallocateMode::KEEP_SIZE } else { FallocateMode::empty() };
                fs.fallocate(id, offset, len, mode).unwrap();
                let bytes = self.bytes(&name);
                if !keep && bytes.len() < end {
                    bytes.resize(end, 0);
                }
            }
            76..84 => {
                let to = self.rng.pick(&names).clone();
                let target = Self::id(fs, &to);
                let aligned = !self.rng.one_in(4);
                let from = if aligned { sector(offset) } else { offset };
                let at = self.offset(self.files[&to].bytes.len());
                let at = if aligned { sector(at) } else { at };
                let len = len.min((size as u64).saturating_sub(from));
                if to == name && from < at + len && at < from + len {
                    return;
                }
                self.log.push(format!("copy {name} {from}+{len} -> {to} {at}"));
                let copied = fs.copy_range(id, from, target, at, len).unwrap();
                assert_eq!(copied, len);
                if len > 0 {
                    let data = self.files[&name].bytes[from as usize..(from + len) as usize].to_vec();
                    let end = at as usize + data.len();
                    let bytes = self.bytes(&to);
                    if bytes.len() < end {
                        bytes.resize(end, 0);
                    }
                    bytes[at as usize..end].copy_from_slice(&data);
                }
            }
            84..90 => {
                self.log.push(format!("read {name} {offset}+{len}"));
                let read = fs.read(id, offset, len as usize).unwrap();
                let from = (offset as usize).min(size);
                assert!(read == self.files[&name].bytes[from..end.min(size).max(from)], "read {name} {offset}+{len}");
            }
            90..94 => self.check_seek(fs, &name, id, offset),
            94..97 => {
                self.log.push(format!("fsync {name}"));
                fs.fsync(id, false).unwrap();
            }
            97..98 => {
                self.log.push(format!("unlink {name}"));
                fs.unlink(fs.root(), name.as_bytes()).unwrap();
                self.files.remove(&name);
                let fresh = format!("n{}", self.log.len());
                fs.create(fs.root(), fresh.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap();
                self.files.insert(fresh, Expected::default());
            }
            _ => {
                self.log.push("sync".to_owned());
                fs.sync().unwrap();
            }
        }
    }

    fn bytes(&mut self, name: &str) -> &mut Vec<u8> {
        &mut self.files.get_mut(name).unwrap().bytes
    }

    /// Checks that every byte outside of the ranges that `seek` reports as data is zero.
    fn check_seek(&mut self, fs: &Fs, name: &str, id: InodeId, offset: u64) {
        let bytes = &self.files[name].bytes;
        let mut at = offset;
        while let Ok(data) = fs.seek(id, at, SeekWhence::Data) {
            assert!(data >= at && bytes[at as usize..data as usize].iter().all(|byte| *byte == 0));
            at = fs.seek(id, data, SeekWhence::Hole).unwrap();
            assert!(at > data && at <= bytes.len() as u64);
        }
        assert!(bytes[(at as usize).min(bytes.len())..].iter().all(|byte| *byte == 0));
    }

    /// The last operations on a file.
    fn history(&self, name: &str) -> String {
        let on_it: Vec<&str> = self
            .log
            .iter()
            .map(String::as_str)
            .filter(|line| line.split(' ').any(|word| word == name || word == "sync"))
            .collect();
        on_it[on_it.len().saturating_sub(40)..].join("\n")
    }

    fn check(&self, fs: &Fs) {
        for (name, expected) in &self.files {
            let attr = fs.lookup(fs.root(), name.as_bytes()).unwrap();
            assert_eq!(attr.size, expected.bytes.len() as u64, "size of {name} after\n{}", self.history(name));
            let read = fs.read(attr.id, 0, usize::MAX).unwrap();
            if read != expected.bytes {
                let at = read.iter().zip(&expected.bytes).position(|(a, b)| a != b);
                panic!("{name}: differs at {at:?} of {} after\n{}", expected.bytes.len(), self.history(name));
            }
        }
    }

    fn check_mounted(&self, mount: &LoopMount) {
        for (name, expected) in &self.files {
            let read = std::fs::read(mount.join(name)).unwrap();
            assert!(read == expected.bytes, "{name} as Linux reads it");
        }
    }
}

/// Runs `rounds` sessions of `steps` operations each, and judges everything after each session.
fn run(name: &str, mkfs: &MkfsOptions, options: &MountOptions, rounds: usize, steps: usize) {
    let seed = Rng::seed_or(0x5eed);
    eprintln!("{name}: UBTRFS_SEED={seed}");
    let image = make(mkfs);
    let mut world = World::new(seed, 3 << 20);
    for round in 0..rounds {
        let fs = open(&image, options);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..steps {
                world.step(&fs);
            }
            world.check(&fs);
        }));
        if let Err(panic) = result {
            let from = world.log.len().saturating_sub(60);
            eprintln!(
                "{name}: failed in round {round} with UBTRFS_SEED={seed} after:\n{}",
                world.log[from..].join("\n")
            );
            std::panic::resume_unwind(panic);
        }
        fs.close().unwrap();
        drop(fs);
        let fs = open(&image, options);
        world.check(&fs);
        fs.close().unwrap();
        drop(fs);
        if program("btrfs") {
            let checked = btrfs_check(image.path());
            if let Err(error) = &checked {
                let from = world.log.len().saturating_sub(60);
                panic!("{name}: round {round}, UBTRFS_SEED={seed}: {error}\nafter:\n{}", world.log[from..].join("\n"));
            }
        }
    }
    // Linux mounts only filesystems with sectors of its page size or smaller.
    if mkfs.sectorsize == 4096 && kernel_oracle() {
        let mount = LoopMount::new(image.path(), "").unwrap();
        world.check_mounted(&mount);
        mount.scrub().unwrap();
        mount.close().unwrap();
    }
}

fn compress(kind: Compression) -> MountOptions {
    MountOptions { compress: Some(CompressSpec::new(kind)), ..MountOptions::default() }
}

#[test]
fn content_matches_a_model() {
    run("plain", &MkfsOptions::default(), &MountOptions::default(), 3, 400);
}

#[test]
fn content_matches_a_model_without_no_holes() {
    let mut mkfs = MkfsOptions::default();
    mkfs.incompat.remove(Incompat::NO_HOLES);
    run("explicit holes", &mkfs, &MountOptions::default(), 3, 400);
}

#[test]
fn content_matches_a_model_with_little_memory() {
    let options = MountOptions { memory_bytes: 8 << 20, ..MountOptions::default() };
    run("little memory", &MkfsOptions::default(), &options, 2, 400);
}

#[test]
fn content_matches_a_model_compressed() {
    run("zstd", &MkfsOptions::default(), &compress(Compression::Zstd), 2, 300);
    run("lzo", &MkfsOptions::default(), &compress(Compression::Lzo), 2, 300);
    let mut options = compress(Compression::Zlib);
    if let Some(spec) = &mut options.compress {
        spec.force = true;
    }
    run("zlib, forced", &MkfsOptions::default(), &options, 2, 300);
}

#[test]
fn content_matches_a_model_without_checksums() {
    let options = MountOptions { nodatasum: true, ..MountOptions::default() };
    run("nodatasum", &MkfsOptions::default(), &options, 2, 300);
    let options = MountOptions { nodatacow: true, nodatasum: true, ..MountOptions::default() };
    run("nodatacow", &MkfsOptions::default(), &options, 2, 300);
}

#[test]
fn content_matches_a_model_with_small_nodes() {
    let mkfs = MkfsOptions {
        nodesize: 4096,
        csum_type: ubtrfs_format::CsumType::Sha256,
        compat_ro: CompatRo::FREE_SPACE_TREE | CompatRo::FREE_SPACE_TREE_VALID,
        ..MkfsOptions::default()
    };
    run("4 KiB nodes, sha256", &mkfs, &MountOptions::default(), 2, 300);
}

#[test]
fn content_matches_a_model_with_large_sectors() {
    let mkfs = MkfsOptions { sectorsize: 16384, ..MkfsOptions::default() };
    run("16 KiB sectors", &mkfs, &compress(Compression::Lzo), 2, 300);
}

#[test]
fn files_made_by_linux_read_equal_compressed() {
    if !kernel_oracle() {
        return;
    }
    for option in ["compress-force=zlib", "compress-force=zlib:9", "compress-force=lzo", "compress-force=zstd:15"] {
        let image = Image::kernel_made(IMAGE_BYTES, &[]).unwrap();
        let mut rng = Rng::new(7);
        let mut files: Vec<(String, Vec<u8>)> = Vec::new();
        let mount = LoopMount::new(image.path(), option).unwrap();
        for (index, len) in
            [1, 100, 2000, 4095, 4096, 4097, 100_000, 131_072, 131_073, 1_000_000, 5_000_000].into_iter().enumerate()
        {
            for (kind, data) in [
                ("text", rng.text(len)),
                ("mixed", {
                    let mut data = rng.text(len);
                    let middle = len / 3;
                    let noise = rng.bytes(len / 4);
                    data[middle..middle + noise.len()].copy_from_slice(&noise);
                    data
                }),
            ] {
                let name = format!("{kind}{index}");
                std::fs::write(mount.join(&name), &data).unwrap();
                files.push((name, data));
            }
        }
        mount.close().unwrap();
        let fs = open(&image, &MountOptions::default());
        for (name, data) in &files {
            let id = World::id(&fs, name);
            assert!(fs.read(id, 0, usize::MAX).unwrap() == *data, "{option}: {name}");
            for _ in 0..20 {
                let at = rng.below(data.len() as u64) as usize;
                let len = rng.len(300_000) as usize;
                let end = (at + len).min(data.len());
                assert!(fs.read(id, at as u64, len).unwrap() == data[at..end], "{option}: {name} {at}+{len}");
            }
        }
        fs.close().unwrap();
    }
}

#[test]
fn cutting_off_data_that_waits_leaves_the_size_on_disk() {
    for (features, name) in [(true, "no-holes"), (false, "hole extents")] {
        let mut mkfs = MkfsOptions::default();
        if !features {
            mkfs.incompat.remove(Incompat::NO_HOLES);
        }
        let image = make(&mkfs);
        let fs = open(&image, &MountOptions::default());
        let file = fs.create(fs.root(), b"f", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        fs.write(file, 40_960, &[7; 30_000]).unwrap();
        fs.setattr(file, &SetAttr { size: Some(6646), ..SetAttr::default() }, &Caller::ROOT).unwrap();
        fs.close().unwrap();
        drop(fs);
        let fs = open(&image, &MountOptions::default());
        assert_eq!(fs.getattr(file).unwrap().size, 6646, "{name}");
        assert_eq!(fs.read(file, 0, 10_000).unwrap(), vec![0; 6646], "{name}");
        fs.close().unwrap();
        if program("btrfs") {
            btrfs_check(image.path()).unwrap();
        }
    }
}

/// Pending data at the start of a file keeps the size on disk below the ends of extents that were cloned into the file
/// and are in the tree already. Truncating inside a cloned extent must leave no old bytes past the new end.
/// As on Linux.
#[test]
fn a_file_of_one_sector_is_inline_only_if_it_is_compressed() {
    for (options, is_inline) in [(compress(Compression::Zlib), true), (MountOptions::default(), false)] {
        let image = make(&MkfsOptions::default());
        let fs = open(&image, &MountOptions { max_inline: 4096, ..options });
        let file = fs.create(fs.root(), b"file", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        fs.write(file, 0, &[7; 4096]).unwrap();
        fs.sync().unwrap();
        let kinds: Vec<_> =
            fs.extents(file).unwrap().iter().map(|extent| extent.kind == FileExtentKind::Inline).collect();
        assert_eq!(kinds, [is_inline]);
        fs.close().unwrap();
    }
}

#[test]
fn a_cut_inside_an_extent_past_the_size_on_disk_leaves_zeros() {
    let image = make(&MkfsOptions::default());
    let options = MountOptions::default();
    let fs = open(&image, &options);
    let create = |name: &[u8]| fs.create(fs.root(), name, NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    let set_size = |file, size| {
        fs.setattr(file, &SetAttr { size: Some(size), ..SetAttr::default() }, &Caller::ROOT).unwrap();
    };
    let (source, file) = (create(b"source"), create(b"file"));
    fs.write(source, 0, &[0xaa; 16_384]).unwrap();
    fs.write(file, 0, &[1; 1151]).unwrap();
    fs.sync().unwrap();
    // Growing the file turns its inline data into pending data of a whole sector.
    set_size(file, 19_343);
    fs.clone_range(source, 0, file, 8192, 16_384).unwrap();
    set_size(file, 8192 + 2370);
    set_size(file, 20_000);
    let mut expected = vec![0; 4096];
    expected[..2370].fill(0xaa);
    let check = |fs: &Fs| {
        assert!(fs.read(file, 8192, 4096).unwrap() == expected, "bytes of the source are behind the end of the cut");
    };
    check(&fs);
    fs.sync().unwrap();
    check(&fs);
    fs.close().unwrap();
    drop(fs);
    let fs = open(&image, &options);
    check(&fs);
    fs.close().unwrap();
    if program("btrfs") {
        btrfs_check(image.path()).unwrap();
    }
}

/// As on Linux, cloning and deduplication change no access time, not even if a file's data is inline and so cannot be
/// shared. If `copy_range` shares nothing, because an offset is not aligned, it copies bytes and updates the access
/// time.
#[test]
fn cloning_and_deduplication_change_no_access_time() {
    let image = make(&MkfsOptions::default());
    let fs = open(&image, &MountOptions::default());
    let old = Timespec { sec: 1000, nsec: 5 };
    let create = |name: &[u8], len: usize| {
        let id = fs.create(fs.root(), name, NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        fs.write(id, 0, &vec![7; len]).unwrap();
        let set = SetAttr { atime: Some(SetTime::At(old)), ..SetAttr::default() };
        fs.setattr(id, &set, &Caller::ROOT).unwrap();
        id
    };
    let files = [("inline", create(b"inline", 300)), ("large", create(b"large", 200_000))];
    fs.sync().unwrap();
    for (name, source) in files {
        let size = fs.getattr(source).unwrap().size;
        let atime = |id| fs.getattr(id).unwrap().atime;
        let target = |suffix: &str, len| create(format!("{name}-{suffix}").as_bytes(), len);
        fs.clone_range(source, 0, target("clone", 0), 0, 0).unwrap();
        assert_eq!(atime(source), old, "{name}: clone_range");
        let equal = target("equal", size as usize);
        assert!(fs.dedupe_range(source, 0, equal, 0, 0, &Job::new()).unwrap());
        assert_eq!((atime(source), atime(equal)), (old, old), "{name}: dedupe_range");
        // The other way round: no thread holds the lock of a later inode while it waits for that of an earlier one.
        assert!(fs.dedupe_range(equal, 0, source, 0, 0, &Job::new()).unwrap());
        assert_eq!(fs.copy_range(source, 0, target("shared", 0), 0, size).unwrap(), size);
        assert_eq!(atime(source), old, "{name}: copy_range that shares");
        assert_eq!(fs.copy_range(source, 1, target("copy", 0), 0, 100).unwrap(), 100);
        assert_ne!(atime(source), old, "{name}: copy_range of bytes");
    }
    fs.close().unwrap();
    if program("btrfs") {
        btrfs_check(image.path()).unwrap();
    }
}
