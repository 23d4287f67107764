//! Tests the engine without `fs`: the tests put items directly, and `btrfs check` judges the filesystem after commits.
//!
//! Needs mkfs.btrfs and btrfs. If mkfs.btrfs is missing, the tests print that and pass, unless `CI` is set.

use std::path::PathBuf;
use std::process::Command;

use ubtrfs_format::item::FileExtent;
use ubtrfs_format::{Key, KeyType, RootId};

use crate::common::{check, load_dir, open, put_file, remove_file, write_file};

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

#[test]
fn the_root_backups_are_those_of_the_last_four_commits() {
    if !have_tools() {
        return;
    }
    let image = make_image(256, &[]);
    let engine = open(&image.path);
    let tree = engine.tree(RootId::FS_TREE).unwrap().unwrap();
    for ino in 257..263 {
        load_dir(&tree);
        let op = engine.begin(engine.reserve(8).unwrap());
        put_file(&op, &tree, ino, &format!("file{ino}"), 0, 0);
        drop(op);
        engine.commit().unwrap();
    }
    let superblock = engine.superblock();
    let mut found = superblock.super_roots.each_ref().map(|backup| backup.tree_root_gen.0);
    found.sort_unstable();
    let last = superblock.generation.0;
    assert_eq!(found, [last - 3, last - 2, last - 1, last]);
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
            load_dir(&tree);
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
            load_dir(&tree);
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
    load_dir(&tree);
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
