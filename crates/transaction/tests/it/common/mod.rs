//! Helpers of the engine's tests: opening an image, running `btrfs check` on it, making inodes and files.

// No test file uses all of these helpers.
#![allow(dead_code, reason = "compiled once for each test file")]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::hash::name_hash;
use ubtrfs_format::item::{
    Compression, DirItem, FileExtent, FileExtentBody, InodeItem, InodeRef, RegularExtent, Timespec,
};
use ubtrfs_format::{Generation, Key, KeyType, Logical};
use ubtrfs_transaction::{DataExtent, Engine, EngineOptions, TransHandle, Tree};

/// Opens an image for writing.
pub(crate) fn open(path: &Path) -> Arc<Engine> {
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(path, Access::ReadWrite).unwrap());
    let engine = Engine::open(vec![device], EngineOptions::default()).unwrap();
    assert_eq!(engine.read_only(), None);
    engine
}

/// Runs `btrfs check`, which must find no errors in metadata and data.
pub(crate) fn check(path: &Path) {
    let output = Command::new("btrfs").args(["check", "--check-data-csum"]).arg(path).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && !text.contains("ERROR"), "{text}");
}

/// An inode with one link, owned by root.
pub(crate) fn inode(generation: Generation, mode: u32, size: u64, nbytes: u64) -> InodeItem {
    let time = Timespec { sec: 1_600_000_000, nsec: 7 };
    InodeItem {
        generation,
        transid: generation,
        size,
        nbytes,
        block_group: 0,
        nlink: 1,
        uid: 0,
        gid: 0,
        mode,
        rdev: 0,
        flags: 0,
        sequence: 0,
        reserved: [0; 4],
        atime: time,
        ctime: time,
        mtime: time,
        otime: time,
    }
}

/// Puts the items of a file in the root directory, and the new size of the directory.
pub(crate) fn put_file(op: &TransHandle<'_>, tree: &Tree, ino: u64, name: &str, size: u64, nbytes: u64) {
    let generation = op.generation();
    let item = inode(generation, 0o100_644, size, nbytes);
    op.put(tree, Key::new(ino, KeyType::INODE_ITEM, 0), item.encode());
    let index = ino;
    let mut bytes = Vec::new();
    InodeRef { index, name: name.into() }.encode_into(&mut bytes);
    op.put(tree, Key::new(ino, KeyType::INODE_REF, 256), bytes);
    let entry = DirItem {
        location: Key::new(ino, KeyType::INODE_ITEM, 0),
        transid: generation,
        file_type: 1,
        name: name.into(),
        data: Vec::new(),
    };
    let mut bytes = Vec::new();
    entry.encode_into(&mut bytes);
    op.put(tree, Key::new(256, KeyType::DIR_ITEM, name_hash(name.as_bytes())), bytes.clone());
    op.put(tree, Key::new(256, KeyType::DIR_INDEX, index), bytes);
    add_to_dir(op, tree, 2 * name.len() as i64);
}

/// Reads the directory's item into memory, because an operation waits for no device.
pub(crate) fn load_dir(tree: &Tree) {
    tree.get(&Key::new(256, KeyType::INODE_ITEM, 0)).unwrap().unwrap();
}

pub(crate) fn add_to_dir(op: &TransHandle<'_>, tree: &Tree, delta: i64) {
    let key = Key::new(256, KeyType::INODE_ITEM, 0);
    let mut dir = InodeItem::decode(&tree.get(&key).unwrap().unwrap()).unwrap();
    dir.size = dir.size.checked_add_signed(delta).unwrap();
    op.put(tree, key, dir.encode());
}

pub(crate) fn remove_file(op: &TransHandle<'_>, tree: &Tree, ino: u64, name: &str, size: u64) {
    op.delete(tree, Key::new(ino, KeyType::INODE_ITEM, 0));
    op.delete(tree, Key::new(ino, KeyType::INODE_REF, 256));
    op.delete(tree, Key::new(256, KeyType::DIR_ITEM, name_hash(name.as_bytes())));
    op.delete(tree, Key::new(256, KeyType::DIR_INDEX, ino));
    if size > 0 {
        op.delete(tree, Key::new(ino, KeyType::EXTENT_DATA, 0));
    }
    add_to_dir(op, tree, -2 * name.len() as i64);
}

pub(crate) fn put_extent(op: &TransHandle<'_>, tree: &Tree, ino: u64, extent: DataExtent, csums: Vec<u8>) {
    let item = FileExtent {
        generation: op.generation(),
        ram_bytes: extent.len_bytes,
        compression: Compression::None,
        encryption: 0,
        other_encoding: 0,
        body: FileExtentBody::Regular(RegularExtent {
            disk_bytenr: extent.bytenr,
            disk_num_bytes: extent.len_bytes,
            offset: 0,
            num_bytes: extent.len_bytes,
        }),
    };
    op.put(tree, Key::new(ino, KeyType::EXTENT_DATA, 0), item.encode());
    op.add_csums(extent.bytenr, csums);
}

/// Puts a file with this data in one extent. Returns the address of the extent.
pub(crate) fn write_file(engine: &Engine, tree: &Tree, ino: u64, data: &[u8]) -> Logical {
    let mut reservation = engine.reserve_data(data.len() as u64).unwrap();
    let len = data.len() as u64;
    let extent = engine.allocate_data(&mut reservation, len, len, None).unwrap();
    engine.write_data(extent.bytenr, data).unwrap();
    let mut csums = Vec::new();
    engine.geometry().csum_type.compute_sectors(data, 4096, &mut csums);
    load_dir(tree);
    let op = engine.begin(engine.reserve(8).unwrap());
    put_file(&op, tree, ino, &format!("file{ino}"), len, len);
    put_extent(&op, tree, ino, extent, csums);
    extent.bytenr
}
