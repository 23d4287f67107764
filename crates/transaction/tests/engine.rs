//! The engine without `fs`: items are put by hand, and `btrfs check` judges what commits leave on disk.
//!
//! Needs mkfs.btrfs and btrfs; says so loudly and passes where they are missing, unless `CI` is set.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::process::Command;

use ubtrfs_format::hash::name_hash;
use ubtrfs_format::item::{Compression, DirEntry, FileExtent, FileExtentBody, InodeItem, InodeRef, RegularExtent};
use ubtrfs_format::{Key, KeyType, RootId};
use ubtrfs_transaction::{DataExtent, Engine, Operation, Tree};

use common::{check, inode, open};

mod common;

struct Image {
    path: PathBuf,
    _dir: tempfile::TempDir,
}

fn have_tools() -> bool {
    let there = Command::new("mkfs.btrfs").arg("--version").output().is_ok();
    if !there {
        assert!(std::env::var_os("CI").is_none(), "mkfs.btrfs is missing: apt-get install btrfs-progs");
        eprintln!("SKIPPED: mkfs.btrfs is missing (apt-get install btrfs-progs)");
    }
    there
}

fn make_image(size_mib: u64, mkfs_args: &[&str]) -> Image {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::File::create(&path).unwrap().set_len(size_mib << 20).unwrap();
    let output = Command::new("mkfs.btrfs").arg("-q").args(mkfs_args).arg(&path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Image { path, _dir: dir }
}

/// Puts the items of a file in the root directory, and the directory's new size.
fn put_file(op: &Operation<'_>, tree: &Tree, ino: u64, name: &str, size: u64, nbytes: u64) {
    let generation = op.generation();
    let item = inode(generation, 0o100_644, size, nbytes);
    op.put(tree, Key::new(ino, KeyType::INODE_ITEM, 0), item.encode());
    let index = ino;
    let mut bytes = Vec::new();
    InodeRef { index, name: name.into() }.encode_into(&mut bytes);
    op.put(tree, Key::new(ino, KeyType::INODE_REF, 256), bytes);
    let entry = DirEntry {
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

fn add_to_dir(op: &Operation<'_>, tree: &Tree, delta: i64) {
    let key = Key::new(256, KeyType::INODE_ITEM, 0);
    let mut dir = InodeItem::decode(&tree.get(&key).unwrap().unwrap()).unwrap();
    dir.size = dir.size.checked_add_signed(delta).unwrap();
    op.put(tree, key, dir.encode());
}

fn remove_file(op: &Operation<'_>, tree: &Tree, ino: u64, name: &str, size: u64) {
    op.delete(tree, Key::new(ino, KeyType::INODE_ITEM, 0));
    op.delete(tree, Key::new(ino, KeyType::INODE_REF, 256));
    op.delete(tree, Key::new(256, KeyType::DIR_ITEM, name_hash(name.as_bytes())));
    op.delete(tree, Key::new(256, KeyType::DIR_INDEX, ino));
    if size > 0 {
        op.delete(tree, Key::new(ino, KeyType::EXTENT_DATA, 0));
    }
    add_to_dir(op, tree, -2 * name.len() as i64);
}

fn put_extent(op: &Operation<'_>, tree: &Tree, ino: u64, extent: DataExtent, csums: Vec<u8>) {
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

fn write_file(engine: &Engine, tree: &Tree, ino: u64, data: &[u8]) {
    let mut reservation = engine.reserve_data(data.len() as u64).unwrap();
    let len = data.len() as u64;
    let extent = engine.allocate_data(&mut reservation, len, len, None).unwrap();
    engine.write_data(extent.bytenr, data).unwrap();
    let mut csums = Vec::new();
    engine.geometry().csum_type.compute_sectors(data, 4096, &mut csums);
    let op = engine.begin(engine.reserve(8).unwrap());
    put_file(&op, tree, ino, &format!("file{ino}"), len, len);
    put_extent(&op, tree, ino, extent, csums);
}

#[test]
fn files_survive_a_commit_and_pass_check() {
    if !have_tools() {
        return;
    }
    for args in [
        &["-n", "16384"][..],
        &["-n", "4096", "-O", "^no-holes"],
        &["-n", "65536", "--csum", "xxhash"],
        &["-R", "^free-space-tree"],
        &["-O", "^skinny-metadata", "-m", "single"],
        &["-M", "--csum", "sha256"],
    ] {
        let image = make_image(256, args);
        let engine = open(&image.path);
        let tree = engine.tree(RootId::FS_TREE).unwrap().unwrap();
        for ino in 257..1500 {
            let op = engine.begin(engine.reserve(8).unwrap());
            put_file(&op, &tree, ino, &format!("file{ino}"), 0, 0);
        }
        engine.commit().unwrap();
        for ino in 1500..1600 {
            write_file(&engine, &tree, ino, &vec![ino as u8; 64 << 10]);
        }
        engine.close().unwrap();
        drop((engine, tree));
        eprintln!("{args:?}");
        check(&image.path);

        let engine = open(&image.path);
        let tree = engine.tree(RootId::FS_TREE).unwrap().unwrap();
        assert!(tree.get(&Key::new(1400, KeyType::INODE_ITEM, 0)).unwrap().is_some());
        let item = tree.get(&Key::new(1555, KeyType::EXTENT_DATA, 0)).unwrap().unwrap();
        let extent = FileExtent::decode(&item).unwrap().disk_extent().unwrap();
        let mut data = vec![0; 64 << 10];
        engine.read_data(extent.disk_bytenr, &mut data, true).unwrap();
        assert!(data.iter().all(|byte| *byte == 1555u64 as u8));
        for ino in (257..1600).step_by(2) {
            let op = engine.begin(engine.reserve(8).unwrap());
            let size = if ino >= 1500 { 64 << 10 } else { 0 };
            remove_file(&op, &tree, ino, &format!("file{ino}"), size);
            drop(op);
            if ino % 101 == 0 {
                engine.commit().unwrap();
            }
        }
        engine.close().unwrap();
        drop((engine, tree));
        check(&image.path);
    }
}

#[test]
fn data_that_never_got_a_reference_is_freed() {
    if !have_tools() {
        return;
    }
    let image = make_image(256, &[]);
    let engine = open(&image.path);
    let tree = engine.tree(RootId::FS_TREE).unwrap().unwrap();
    let before = engine.usage().data;
    write_file(&engine, &tree, 300, &[7; 1 << 20]);
    let op = engine.begin(engine.reserve(8).unwrap());
    remove_file(&op, &tree, 300, "file300", 1 << 20);
    drop(op);
    engine.commit().unwrap();
    let after = engine.usage().data;
    assert_eq!((before.used, before.reserved, before.pinned), (after.used, after.reserved, after.pinned));
    engine.close().unwrap();
    drop((engine, tree));
    check(&image.path);
}
