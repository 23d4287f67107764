//! Tests operations for which space is refused. In each run, one of the operation's reservations or allocations fails
//! with ENOSPC. (A full filesystem would refuse only some of them, by chance.) After the refusal:
//!
//! - R1. Each byte of each file is as before or as after the operation; the size of a file lies between its size before
//!   and its size after the operation.
//! - R2. Readers see the state that is found on disk after a remount.
//! - R3. A file that grows shows zeros past its old end.
//! - R4. No space is leaked: a remount does not find more free space.
//! - R5. Later operations work as if nothing had been refused.

#![cfg(debug_assertions)]
use std::collections::BTreeMap;
use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::item::FileType;
use ubtrfs_format::superblock::Incompat;
use ubtrfs_fs::{Caller, FallocateMode, Fs, InodeId, MountOptions, NewInode, RenameFlags, Result, SetAttr, XattrFlags};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::capability::program;
use ubtrfs_testkit::{Image, Rng, btrfs_check, second_opinion};
use ubtrfs_transaction::{end_refusal, refuse_reservation_after};

const ENOSPC: i32 = rustix::io::Errno::NOSPC.raw_os_error();
const KIB: u64 = 1024;

type Operation = fn(&Fs) -> Result<()>;

const OPERATIONS: &[(&str, Operation)] = &[
    ("cut", |fs| resize(fs, "data", 50_001)),
    ("cut many", |fs| resize(fs, "many", 100_001)),
    ("cut to nothing", |fs| resize(fs, "many", 0)),
    ("cut inline", |fs| resize(fs, "inline", 10)),
    ("grow", |fs| resize(fs, "data", 900_001)),
    ("grow inline", |fs| resize(fs, "inline", 50_000)),
    ("punch", |fs| fs.fallocate(id(fs, "data"), 10_000, 190_000, PUNCH)),
    ("punch many", |fs| fs.fallocate(id(fs, "many"), 5_000, 4 << 20, PUNCH)),
    ("zero", |fs| fs.fallocate(id(fs, "data"), 10_000, 500_000, FallocateMode::ZERO_RANGE)),
    ("allocate", |fs| fs.fallocate(id(fs, "many"), 3 << 20, 4 << 20, FallocateMode::empty())),
    ("clone", |fs| fs.clone_range(id(fs, "source"), 0, id(fs, "data"), 256 * KIB, 0)),
    ("clone many", |fs| fs.clone_range(id(fs, "many"), 0, id(fs, "data"), 4096, 0)),
    ("clone over many", |fs| fs.clone_range(id(fs, "source"), 0, id(fs, "many"), 0, 128 * KIB)),
    ("copy", |fs| fs.copy_range(id(fs, "source"), 5, id(fs, "data"), 10, 70_000).map(drop)),
    ("copy to inline", |fs| fs.copy_range(id(fs, "source"), 0, id(fs, "inline"), 8192, 40_000).map(drop)),
    ("write", |fs| fs.write_all(id(fs, "data"), 50_000, &[7; 100_000])),
    ("write inline", |fs| fs.write(id(fs, "inline"), 5_000, &[7; 100]).map(drop)),
    ("create", |fs| fs.create(fs.root(), b"new", NewInode::file(0o600), &Caller::ROOT).map(drop)),
    ("create a directory", |fs| fs.create(fs.root(), b"new", NewInode::dir(0o700), &Caller::ROOT).map(drop)),
    ("link", |fs| fs.link(id(fs, "data"), fs.root(), b"new").map(drop)),
    ("unlink", |fs| fs.unlink(fs.root(), b"data")),
    ("unlink many", |fs| fs.unlink(fs.root(), b"many")),
    ("unlink in use", |fs| {
        let many = id(fs, "many");
        fs.open_inode(many)?;
        let unlinked = fs.unlink(fs.root(), b"many");
        fs.release_inode(many);
        unlinked
    }),
    ("rename over", |fs| fs.rename(fs.root(), b"source", fs.root(), b"many", RenameFlags::empty())),
    ("exchange", |fs| fs.rename(fs.root(), b"source", fs.root(), b"dir", RenameFlags::EXCHANGE)),
    ("whiteout", |fs| fs.rename(fs.root(), b"source", fs.root(), b"new", RenameFlags::WHITEOUT)),
    ("chmod", |fs| {
        let set = SetAttr { mode: Some(0o711), ..SetAttr::default() };
        fs.setattr(id(fs, "data"), &set, &Caller::ROOT).map(drop)
    }),
    ("setxattr", |fs| fs.setxattr(id(fs, "data"), b"user.a", b"value", XattrFlags::empty(), &Caller::ROOT)),
    ("fsync", |fs| fs.fsync(id(fs, "data"), false)),
    ("snapshot", |fs| fs.snapshot(fs.root().root, fs.root(), b"new", false).map(drop)),
    ("subvolume", |fs| fs.create_subvolume(fs.root(), b"new", &Caller::ROOT).map(drop)),
    ("delete a subvolume", |fs| fs.delete_subvolume(fs.root(), b"subvolume", None)),
    ("make read-only", |fs| fs.set_subvolume_read_only(id(fs, "subvolume").root, true)),
    ("rename a subvolume", |fs| fs.rename(fs.root(), b"subvolume", id(fs, "dir"), b"s", RenameFlags::empty())),
];

const PUNCH: FallocateMode = FallocateMode::PUNCH_HOLE.union(FallocateMode::KEEP_SIZE);

fn id(fs: &Fs, name: &str) -> InodeId {
    fs.lookup(fs.root(), name.as_bytes()).unwrap().id
}

fn resize(fs: &Fs, name: &str, size: u64) -> Result<()> {
    fs.setattr(id(fs, name), &SetAttr { size: Some(size), ..SetAttr::default() }, &Caller::ROOT).map(drop)
}

fn device(image: &Image) -> Arc<dyn Device> {
    Arc::new(FileDevice::open(image.path(), Access::ReadWrite).unwrap())
}

fn open(image: &Image) -> Arc<Fs> {
    let fs = Fs::open(vec![device(image)], MountOptions { commit_secs: 3600, ..MountOptions::default() }).unwrap();
    assert_eq!(fs.read_only(), None);
    fs
}

/// Makes files with extents, pending data, holes, inline data, and more items than one step changes. Everything except
/// the pending data is on disk.
fn prepare(options: &MkfsOptions) -> (Image, Arc<Fs>) {
    let image = Image::empty(256 << 20).unwrap();
    ubtrfs_mkfs::make(&*device(&image), options).unwrap();
    let fs = open(&image);
    let mut rng = Rng::new(3);
    let root = fs.root();
    let create = |name: &str| fs.create(root, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    let data = create("data");
    fs.write(data, 0, &rng.content(300 * KIB as usize)).unwrap();
    let source = create("source");
    fs.write(source, 0, &rng.content(128 * KIB as usize + 77)).unwrap();
    let inline = create("inline");
    fs.write(inline, 0, &rng.content(1000)).unwrap();
    let many = create("many");
    for number in 0..600 {
        fs.write(many, number * 8192, &rng.content(4096)).unwrap();
    }
    let dir = fs.create(root, b"dir", NewInode::dir(0o755), &Caller::ROOT).unwrap().id;
    fs.create(dir, b"in it", NewInode::file(0o644), &Caller::ROOT).unwrap();
    let subvolume = fs.create_subvolume(root, b"subvolume", &Caller::ROOT).unwrap();
    let inside = fs.create(subvolume, b"inside", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    fs.sync().unwrap();
    fs.write(inside, 0, &rng.content(20_000)).unwrap();
    fs.write(data, 40_000, &rng.content(50_000)).unwrap();
    fs.write(data, 299_000, &rng.content(60_000)).unwrap();
    fs.write(many, 98_000, &rng.content(10_000)).unwrap();
    fs.write(many, 2 << 20, &rng.content(100_000)).unwrap();
    (image, fs)
}

/// A file as readers see it: mode, links, number of extended attributes, content.
#[derive(Clone, Debug, PartialEq)]
struct Seen {
    mode: u32,
    nlink: u32,
    xattrs: usize,
    content: Vec<u8>,
}

fn look(fs: &Fs) -> BTreeMap<String, Seen> {
    let mut all = BTreeMap::new();
    let mut dirs = vec![(fs.root(), String::new())];
    while let Some((dir, path)) = dirs.pop() {
        let mut names = Vec::new();
        fs.readdir(dir, 0, &mut |entry| {
            names.push(entry.name.to_vec());
            true
        })
        .unwrap();
        for name in names.iter().filter(|name| *name != b"." && *name != b"..") {
            let attr = fs.lookup(dir, name).unwrap();
            let path = format!("{path}/{}", String::from_utf8_lossy(name));
            let mut content = Vec::new();
            if attr.is_dir() {
                dirs.push((attr.id, path.clone()));
            } else if attr.file_type() == Some(FileType::Regular) {
                content = fs.read(attr.id, 0, attr.size as usize).unwrap();
                assert_eq!(content.len() as u64, attr.size, "{path}");
            }
            let xattrs = fs.listxattr(attr.id).unwrap().len();
            all.insert(path, Seen { mode: attr.mode, nlink: attr.nlink, xattrs, content });
        }
    }
    all
}

/// Checks R1.
fn check_between(
    what: &str,
    before: &BTreeMap<String, Seen>,
    after: &BTreeMap<String, Seen>,
    found: &BTreeMap<String, Seen>,
) {
    let names = |all: &BTreeMap<String, Seen>| all.keys().cloned().collect::<Vec<_>>();
    assert!([names(before), names(after)].contains(&names(found)), "{what}: {:?}", names(found));
    for (name, seen) in found {
        let all: Vec<_> = [before.get(name), after.get(name)].into_iter().flatten().collect();
        if all.contains(&seen) {
            continue;
        }
        assert!(all.iter().any(|one| one.mode == seen.mode), "{what}: mode of {name}");
        assert!(all.iter().any(|one| one.nlink == seen.nlink), "{what}: links of {name}");
        let sizes = || all.iter().map(|one| one.content.len());
        let (least, most) = (sizes().min().unwrap(), sizes().max().unwrap());
        assert!((least..=most).contains(&seen.content.len()), "{what}: size of {name}: {}", seen.content.len());
        for (at, byte) in seen.content.iter().enumerate() {
            // A byte past the end of the file in the shorter of the two states may be zero.
            let may_be = all.iter().any(|one| one.content.get(at).unwrap_or(&0) == byte);
            assert!(may_be, "{what}: byte {at} of {name} is {byte}");
        }
    }
}

/// Checks R2 to R4.
fn check_later(what: &str, image: &Image, fs: Arc<Fs>, found: &BTreeMap<String, Seen>) {
    fs.sync().unwrap();
    assert_eq!(look(&fs), *found, "{what}: after a sync");
    // The syncs commit, which frees pinned space and the space of deleted subvolumes.
    fs.sync().unwrap();
    fs.sync().unwrap();
    let free = fs.statfs().unwrap().bfree;
    fs.close().unwrap();
    drop(fs);
    second_opinion(image.path()).unwrap_or_else(|error| panic!("{what}: {error}"));
    let fs = open(image);
    assert!(look(&fs) == *found, "{what}: after a remount");
    assert_eq!(fs.statfs().unwrap().bfree, free, "{what}: free space after a remount");
    for (path, seen) in found.iter().filter(|(_, seen)| !seen.content.is_empty()) {
        let file = fs.lookup_path(path.trim_start_matches('/').as_bytes(), false).unwrap().id;
        let size = seen.content.len() as u64;
        if fs.setattr(file, &SetAttr { size: Some(size + 300_000), ..SetAttr::default() }, &Caller::ROOT).is_ok() {
            let grown = fs.read(file, size, 300_000).unwrap();
            assert!(grown.iter().all(|byte| *byte == 0), "{what}: {path} shows old bytes past its end");
        }
    }
    fs.close().unwrap();
    drop(fs);
    second_opinion(image.path()).unwrap_or_else(|error| panic!("{what}: {error}"));
}

fn refuse_each(options: &MkfsOptions) {
    let before = look(&prepare(options).1);
    for (name, operation) in OPERATIONS {
        let (image, fs) = prepare(options);
        operation(&fs).unwrap_or_else(|error| panic!("{name}: {error}"));
        let after = look(&fs);
        check_later(name, &image, fs, &after);
        let mut nr_refused = 0;
        // Each run refuses one reservation: in the first runs each reservation in turn, then reservations at growing
        // distances.
        for nth in std::iter::successors(Some(0), |nth| Some(nth + 1 + nth / 6)) {
            let what = format!("{name}, reservation {nth}");
            let (image, fs) = prepare(options);
            refuse_reservation_after(nth);
            let done = operation(&fs);
            if !end_refusal() {
                break;
            }
            nr_refused += 1;
            let found = look(&fs);
            match done {
                // An operation that succeeds although a reservation was refused must have been done completely. Only a
                // copy may be done in part, because it returns the number of bytes copied.
                Ok(()) if !name.starts_with("copy") => assert!(found == after, "{what}: it succeeded, but in part"),
                Ok(()) => check_between(&what, &before, &after, &found),
                Err(error) => {
                    assert_eq!(error.errno(), ENOSPC, "{what}: {error}");
                    check_between(&what, &before, &after, &found);
                }
            }
            if nth == 0 && matches!(*name, "cut many" | "clone many" | "punch many") {
                // R5: the refused operation succeeds when it is repeated.
                operation(&fs).unwrap_or_else(|error| panic!("{what}: again: {error}"));
                assert!(look(&fs) == after, "{what}: again");
                check_later(&what, &image, fs, &after);
            } else {
                check_later(&what, &image, fs, &found);
            }
            if program("btrfs") && nth % 3 == 0 {
                btrfs_check(image.path()).unwrap_or_else(|error| panic!("{what}: {error}"));
            }
        }
        println!("{name}: {nr_refused} reservations refused");
    }
}

#[test]
fn an_operation_that_is_refused_space_leaves_each_file_as_it_was_or_done_in_part() {
    refuse_each(&MkfsOptions::default());
}

#[test]
fn an_operation_that_is_refused_space_leaves_explicit_holes_right() {
    let mut options = MkfsOptions::default();
    options.incompat.remove(Incompat::NO_HOLES);
    refuse_each(&options);
}
