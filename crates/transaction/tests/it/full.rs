//! Tests full filesystems: changes that do not fit are refused, accepted changes are committed, and removals make room
//! again.
//!
//! Needs root, loop devices, btrfs-progs and the kernel's btrfs. Without them, the tests print that and pass, unless
//! `CI` is set.

use std::path::Path;
use std::sync::Arc;

use ubtrfs_error::Error;
use ubtrfs_format::item::{Compression, FileExtent, FileExtentBody, InodeItem, RegularExtent};
use ubtrfs_format::{Generation, Key, KeyType, RootId, objectid};
use ubtrfs_testkit::{Image, capability};
use ubtrfs_transaction::{Engine, Job, TransHandle, Tree};

use crate::common::{check, inode, open};

const MIB: u64 = 1 << 20;

/// Closes the filesystem and runs `btrfs check` on it.
fn close_and_check(engine: Arc<Engine>, path: &Path) {
    engine.close().unwrap();
    assert_eq!(engine.read_only(), None);
    drop(engine);
    check(path);
}

/// Puts an unlinked inode, which needs no directory entries, only an orphan item.
fn put_orphan(op: &TransHandle<'_>, tree: &Tree, ino: u64, size: u64, nbytes: u64) {
    let item = InodeItem { nlink: 0, ..inode(op.generation(), 0o100_644, size, nbytes) };
    op.put(tree, Key::new(ino, KeyType::INODE_ITEM, 0), item.encode());
    op.put(tree, Key::new(objectid::ORPHAN, KeyType::ORPHAN_ITEM, ino), Vec::new());
}

fn put_extent(op: &TransHandle<'_>, tree: &Tree, ino: u64, ram_bytes: u64, body: FileExtentBody) {
    let generation: Generation = op.generation();
    let item =
        FileExtent { generation, ram_bytes, compression: Compression::None, encryption: 0, other_encoding: 0, body };
    op.put(tree, Key::new(ino, KeyType::EXTENT_DATA, 0), item.encode());
}

fn write_file(engine: &Engine, tree: &Tree, ino: u64, data: &[u8]) -> Result<(), Error> {
    let len = data.len() as u64;
    let mut reservation = engine.reserve_data(len)?;
    let metadata = engine.reserve(8)?;
    // Reserved space exists, but perhaps not in one piece. This test writes only as much as fits into the allocated
    // piece.
    let extent = engine.allocate_data(&mut reservation, len, 4096, None).expect("the space was promised");
    let data = &data[..extent.len_bytes as usize];
    engine.write_data(extent.bytenr, data)?;
    let mut csums = Vec::new();
    engine.geometry().csum_type.compute_sectors(data, 4096, &mut csums);
    let op = engine.begin(metadata);
    put_orphan(&op, tree, ino, extent.len_bytes, extent.len_bytes);
    let body = FileExtentBody::Regular(RegularExtent {
        disk_bytenr: extent.bytenr,
        disk_num_bytes: extent.len_bytes,
        offset: 0,
        num_bytes: extent.len_bytes,
    });
    put_extent(&op, tree, ino, extent.len_bytes, body);
    op.add_csums(extent.bytenr, csums);
    Ok(())
}

fn remove_file(engine: &Engine, tree: &Tree, ino: u64) {
    let op = engine.begin(engine.reserve_for_removal(3).expect("removing works on a full filesystem"));
    op.delete(tree, Key::new(ino, KeyType::INODE_ITEM, 0));
    op.delete(tree, Key::new(ino, KeyType::EXTENT_DATA, 0));
    op.delete(tree, Key::new(objectid::ORPHAN, KeyType::ORPHAN_ITEM, ino));
}

/// Writes files until there is no space. Returns the number of the first file that failed.
fn fill(engine: &Engine, tree: &Tree, from: u64, write: &dyn Fn(u64) -> Result<(), Error>) -> u64 {
    for ino in from.. {
        match write(ino) {
            Ok(()) => {}
            Err(Error::NoSpace) => {
                engine.commit().unwrap();
                assert_eq!(engine.read_only(), None, "being full is no reason to give up");
                assert!(tree.get(&Key::new(ino - 1, KeyType::INODE_ITEM, 0)).unwrap().is_some());
                return ino;
            }
            Err(error) => panic!("{error}"),
        }
    }
    unreachable!("the filesystem is full some day")
}

#[test]
fn space_that_is_promised_to_dirty_data_stays() {
    if !capability::kernel_oracle() {
        return;
    }
    for (mkfs, relocates) in [(&[][..], false), (&["-M"][..], false), (&[][..], true), (&["-M"][..], true)] {
        let image = Image::kernel_made(256 * MIB, mkfs).unwrap();
        let engine = open(image.path());
        let reservations: Vec<_> = (0..).map_while(|_| engine.reserve_data(MIB).ok()).collect();
        assert!(reservations.len() > 100, "{}", reservations.len());
        // The first commit records the new block groups. Later commits would remove these groups, which are empty, if
        // their space were not promised.
        for _ in 0..3 {
            engine.commit().unwrap();
        }
        if relocates {
            for group in engine.block_groups() {
                match engine.relocate_block_group(group.start, &Job::new()) {
                    Ok(_) | Err(Error::NoSpace) => {}
                    // The block group was empty, and a commit removed it.
                    Err(error) => assert!(error.to_string().contains("there is no block group"), "{error}"),
                }
            }
        }
        let data = engine.usage().data;
        assert!(data.free >= data.may_use, "{mkfs:?}: {data:?}");
        for mut reservation in reservations {
            let mut left = MIB;
            while left > 0 {
                let extent = engine.allocate_data(&mut reservation, left, 4096, None).expect("the space was promised");
                left -= extent.len_bytes;
            }
        }
        close_and_check(engine, image.path());
    }
}

#[test]
fn data_fills_the_device_and_comes_back() {
    if !capability::kernel_oracle() {
        return;
    }
    for (mkfs, least) in [(&[][..], 120), (&["-m", "single"], 160), (&["-M"], 180), (&["-n", "65536"], 120)] {
        let image = Image::kernel_made(256 * MIB, mkfs).unwrap();
        let engine = open(image.path());
        let tree = engine.tree(RootId::FS_TREE).unwrap().unwrap();
        let data = vec![5; MIB as usize];
        let write = |ino| write_file(&engine, &tree, ino, &data);
        let full = fill(&engine, &tree, 257, &write);
        println!("{mkfs:?}: {} MiB of data", full - 257);
        assert!(full - 257 >= least, "{mkfs:?}: {} MiB", full - 257);
        for ino in (257..full).step_by(2) {
            remove_file(&engine, &tree, ino);
        }
        engine.commit().unwrap();
        let again = fill(&engine, &tree, full, &write);
        assert!(again - full >= (full - 257) / 2 - 2, "what was removed can be written again: {}", again - full);
        for ino in 257..again {
            remove_file(&engine, &tree, ino);
        }
        drop(tree);
        close_and_check(engine, image.path());
        let engine = open(image.path());
        let usage = engine.usage();
        let left = if usage.data == usage.metadata { 0 } else { usage.data.used };
        assert_eq!(left, 0);
        close_and_check(engine, image.path());
    }
}

#[test]
fn metadata_fills_the_device_and_comes_back() {
    if !capability::kernel_oracle() {
        return;
    }
    for mkfs in [&[][..], &["-m", "single", "-n", "4096"], &["-M"]] {
        let image = Image::kernel_made(160 * MIB, mkfs).unwrap();
        let engine = open(image.path());
        let tree = engine.tree(RootId::FS_TREE).unwrap().unwrap();
        let write = |ino| {
            let op = engine.begin(engine.reserve(8)?);
            put_orphan(&op, &tree, ino, 2000, 2000);
            put_extent(&op, &tree, ino, 2000, FileExtentBody::Inline(vec![7; 2000]));
            Ok(())
        };
        let full = fill(&engine, &tree, 257, &write);
        let usage = engine.usage();
        println!("{mkfs:?}: {} files, metadata {:?}", full - 257, usage.metadata);
        assert!(full > 10_000, "{mkfs:?}: {full}");
        for ino in (257..full).step_by(2) {
            remove_file(&engine, &tree, ino);
        }
        engine.commit().unwrap();
        let again = fill(&engine, &tree, full, &write);
        assert!(again > full + 1000, "{mkfs:?}: {again}");
        for ino in 257..again {
            remove_file(&engine, &tree, ino);
        }
        drop(tree);
        close_and_check(engine, image.path());
        close_and_check(open(image.path()), image.path());
    }
}
