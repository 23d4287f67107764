//! Power cuts: whatever the medium was left with, the filesystem is clean and holds all that was promised.
//!
//! Method: the driver works on an engine whose device records every write; the model is kept as it was at each sync and
//! fsync. Then the power is cut at many points, each unflushed write being kept, dropped or torn by seed: btrfs check must
//! be clean, and the content must be that of the last promise or of one after it that was under way.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_fs::MountOptions;
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    Compare, Driver, Errno, FallocateOp, FsTarget, Image, LoopMount, Model, NodeKind, RecordingDevice, RenameOp, Rng,
    Target, btrfs_check, capability, compare_entries, walk_path,
};

/// Passes everything on, and marks promises on the device.
struct Promising {
    inner: FsTarget,
    device: Arc<RecordingDevice>,
    promises: u64,
}

impl Promising {
    fn promise(&mut self, result: Result<(), Errno>) -> Result<(), Errno> {
        if result.is_ok() {
            self.promises += 1;
            self.device.mark(self.promises);
        }
        result
    }
}

fn cut_everywhere(options: &MkfsOptions, mount: &str, seed: u64, operations: usize, cuts: usize, names_only: bool) {
    if !capability::kernel_oracle() {
        return;
    }
    let seed = Rng::seed_or(seed);
    println!("seed {seed}");
    let image = Image::empty(256 << 20).unwrap();
    let file = FileDevice::open(image.path(), Access::ReadWrite).unwrap();
    ubtrfs_mkfs::make(&file, options).unwrap();
    drop(file);
    let device = Arc::new(RecordingDevice::from_image(image.path()).unwrap());
    let mount = format!("commit=300{}{mount}", if mount.is_empty() { "" } else { "," });
    let inner =
        FsTarget::on_device(Arc::clone(&device) as Arc<dyn Device>, MountOptions::parse(&mount).unwrap()).unwrap();
    let mut target = Promising { inner, device: Arc::clone(&device), promises: 0 };
    let mut model = Model::new();
    let mut driver = Driver::new(seed, 1 << 18);
    if names_only {
        driver = driver.names_only();
    }
    let mut promised = vec![model.entries()];
    for _ in 0..operations {
        driver.run(&mut model, &mut target, 1).unwrap();
        if promised.len() <= usize::try_from(target.promises).unwrap() {
            promised.push(model.entries());
        }
    }
    target.inner.close().unwrap();
    promised.push(model.entries());

    let mut rng = Rng::new(seed);
    let flushes = device.flush_points();
    let events = device.events();
    println!("{events} events, {} flushes, {} promises", flushes.len(), promised.len() - 2);
    for number in 0..cuts {
        // Half of the cuts are around a flush, where the superblock is written.
        let at = match number % 2 {
            0 => (*rng.pick(&flushes) + rng.index(4)).saturating_sub(1),
            _ => rng.index(events + 1),
        };
        let outcome = device.cut(at, &mut rng, image.path()).unwrap();
        let what = format!("seed {seed}, cut {number} at event {at}: {outcome:?}");
        btrfs_check(image.path()).unwrap_or_else(|error| panic!("{what}: {error:#}"));
        let first = usize::try_from(outcome.promised.unwrap_or(0)).unwrap();
        let found = if number % 8 == 0 {
            let mount = LoopMount::new(image.path(), "").unwrap_or_else(|error| panic!("{what}: {error:#}"));
            walk_path(mount.path())
        } else {
            FsTarget::open(image.path(), "ro").unwrap_or_else(|error| panic!("{what}: {error:#}")).walk()
        };
        let found = found.unwrap_or_else(|error| panic!("{what}: {error:#}"));
        let fits = |entries: &Vec<_>| compare_entries(entries, &found, Compare::MODEL).is_ok();
        if !promised[first..].iter().take(2).any(fits) {
            let error = compare_entries(&promised[first], &found, Compare::MODEL).unwrap_err();
            panic!("{what}: promise {first} (first) and what is there (second) differ: {error:#}");
        }
    }
}

#[test]
fn names() {
    cut_everywhere(&MkfsOptions::default(), "", 21, 1200, 60, true);
}

#[test]
fn data() {
    cut_everywhere(&MkfsOptions::default(), "", 22, 800, 60, false);
}

#[test]
fn small_nodes_and_compression() {
    let options = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
    cut_everywhere(&options, "compress=zstd:1,discard=sync", 23, 800, 40, false);
}

#[test]
fn fsync_promises_its_file() {
    if !capability::kernel_oracle() {
        return;
    }
    let mut rng = Rng::new(Rng::seed_or(24));
    let image = Image::empty(256 << 20).unwrap();
    let file = FileDevice::open(image.path(), Access::ReadWrite).unwrap();
    ubtrfs_mkfs::make(&file, &MkfsOptions::default()).unwrap();
    drop(file);
    let device = Arc::new(RecordingDevice::from_image(image.path()).unwrap());
    let options = MountOptions::parse("commit=300").unwrap();
    let mut target = FsTarget::on_device(Arc::clone(&device) as Arc<dyn Device>, options).unwrap();
    // Each file is written in two steps, and other files are dirty at each fsync.
    let mut contents: Vec<Vec<u8>> = Vec::new();
    for index in 0..40u64 {
        let path = format!("file-{}", index / 2).into_bytes();
        if index % 2 == 0 {
            target.create(&path, NodeKind::File, 0o644, (0, 0)).unwrap();
        }
        let mut content = if index % 2 == 0 { Vec::new() } else { contents[index as usize - 1].clone() };
        let more = rng.content(1 + rng.clone().len(100_000) as usize);
        target.write(&path, content.len() as u64, &more).unwrap();
        content.extend_from_slice(&more);
        let other = format!("other-{index}").into_bytes();
        target.create(&other, NodeKind::File, 0o600, (0, 0)).unwrap();
        target.write(&other, 0, &rng.bytes(50_000)).unwrap();
        target.fsync(&path).unwrap();
        device.mark(index + 1);
        contents.push(content);
    }
    for number in 0..40 {
        let at = rng.index(device.events() + 1);
        let outcome = device.cut(at, &mut rng, image.path()).unwrap();
        let what = format!("cut {number} at event {at}: {outcome:?}");
        btrfs_check(image.path()).unwrap_or_else(|error| panic!("{what}: {error:#}"));
        let mut found = FsTarget::open(image.path(), "ro").unwrap_or_else(|error| panic!("{what}: {error:#}"));
        let promised = usize::try_from(outcome.promised.unwrap_or(0)).unwrap();
        for (index, content) in contents.iter().enumerate().take(promised) {
            let path = format!("file-{}", index / 2).into_bytes();
            let read = found.read(&path, 0, content.len()).unwrap_or_else(|error| panic!("{what}: errno {error}"));
            assert!(read == *content, "{what}: content that was fsynced into {} is not there", index / 2);
        }
    }
}

impl Target for Promising {
    fn create(&mut self, path: &[u8], kind: NodeKind, mode: u32, rdev: (u32, u32)) -> Result<(), Errno> {
        self.inner.create(path, kind, mode, rdev)
    }
    fn symlink(&mut self, path: &[u8], content: &[u8]) -> Result<(), Errno> {
        self.inner.symlink(path, content)
    }
    fn link(&mut self, old: &[u8], new: &[u8]) -> Result<(), Errno> {
        self.inner.link(old, new)
    }
    fn unlink(&mut self, path: &[u8]) -> Result<(), Errno> {
        self.inner.unlink(path)
    }
    fn rmdir(&mut self, path: &[u8]) -> Result<(), Errno> {
        self.inner.rmdir(path)
    }
    fn rename(&mut self, old: &[u8], new: &[u8], op: RenameOp) -> Result<(), Errno> {
        self.inner.rename(old, new, op)
    }
    fn write(&mut self, path: &[u8], offset: u64, data: &[u8]) -> Result<(), Errno> {
        self.inner.write(path, offset, data)
    }
    fn read(&mut self, path: &[u8], offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        self.inner.read(path, offset, len)
    }
    fn truncate(&mut self, path: &[u8], len_bytes: u64) -> Result<(), Errno> {
        self.inner.truncate(path, len_bytes)
    }
    fn fallocate(&mut self, path: &[u8], offset: u64, len_bytes: u64, op: FallocateOp) -> Result<(), Errno> {
        self.inner.fallocate(path, offset, len_bytes, op)
    }
    fn copy_range(&mut self, from: &[u8], from_at: u64, to: &[u8], to_at: u64, len_bytes: u64) -> Result<(), Errno> {
        self.inner.copy_range(from, from_at, to, to_at, len_bytes)
    }
    fn chmod(&mut self, path: &[u8], mode: u32) -> Result<(), Errno> {
        self.inner.chmod(path, mode)
    }
    fn chown(&mut self, path: &[u8], uid: u32, gid: u32) -> Result<(), Errno> {
        self.inner.chown(path, uid, gid)
    }
    fn set_mtime(&mut self, path: &[u8], mtime: (i64, u32)) -> Result<(), Errno> {
        self.inner.set_mtime(path, mtime)
    }
    fn set_xattr(&mut self, path: &[u8], name: &[u8], value: &[u8]) -> Result<(), Errno> {
        self.inner.set_xattr(path, name, value)
    }
    fn remove_xattr(&mut self, path: &[u8], name: &[u8]) -> Result<(), Errno> {
        self.inner.remove_xattr(path, name)
    }
    fn fsync(&mut self, path: &[u8]) -> Result<(), Errno> {
        // An fsync promises one file only, and may make others durable in part; `fsync_promises_its_file` tests it.
        self.inner.lookup(path)?;
        self.sync()
    }
    fn sync(&mut self) -> Result<(), Errno> {
        let result = self.inner.sync();
        self.promise(result)
    }
}
