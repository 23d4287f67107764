//! Changes subvolumes that share blocks and extents with snapshots. The kernel makes the subvolumes, the tests change
//! them, and `btrfs check` judges the references.
//!
//! Needs root, loop devices and btrfs-progs. If root, loop devices or btrfs-progs are missing, the tests print that and
//! pass, unless `CI` is set.

use std::path::Path;
use std::process::Command;

use ubtrfs_format::item::{FileExtent, InodeItem};
use ubtrfs_format::{Key, KeyType, RootId};
use ubtrfs_transaction::{Engine, Tree};

use crate::common::{check, open};

fn run(script: &str, image: &Path) -> bool {
    let output = Command::new("sh").args(["-ec", script, "sh"]).arg(image).output().unwrap();
    if !output.status.success() {
        eprintln!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    }
    output.status.success()
}

/// Touches every `step`-th inode of a subvolume.
fn touch_inodes(engine: &Engine, tree: &Tree, step: u64) {
    let highest = tree.highest_objectid().unwrap().unwrap();
    for ino in (257..=highest).step_by(usize::try_from(step).unwrap()) {
        let key = Key::new(ino, KeyType::INODE_ITEM, 0);
        let Some(item) = tree.get(&key).unwrap() else { continue };
        let mut item = InodeItem::decode(&item).unwrap();
        item.mtime.nsec = 5;
        let op = engine.begin(engine.reserve(1).unwrap());
        item.transid = op.generation();
        op.put(tree, key, item.encode());
    }
}

/// Takes every `step`-th inode number, and empties those files among them whose only extent is at offset 0. Returns the
/// number of emptied files.
fn empty_files(engine: &Engine, tree: &Tree, step: u64) -> u64 {
    let mut nr_emptied = 0;
    for ino in (257..=tree.highest_objectid().unwrap().unwrap()).step_by(usize::try_from(step).unwrap()) {
        let key = Key::new(ino, KeyType::EXTENT_DATA, 0);
        let Some(extent) = tree.get(&key).unwrap() else { continue };
        let extent = FileExtent::decode(&extent).unwrap();
        let inode_key = Key::new(ino, KeyType::INODE_ITEM, 0);
        let mut item = InodeItem::decode(&tree.get(&inode_key).unwrap().unwrap()).unwrap();
        if item.nbytes != extent.num_bytes() {
            continue;
        }
        (item.size, item.nbytes) = (0, 0);
        let op = engine.begin(engine.reserve(2).unwrap());
        op.delete(tree, key);
        op.put(tree, inode_key, item.encode());
        nr_emptied += 1;
    }
    nr_emptied
}

#[test]
fn shared_blocks_keep_exact_references() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    for mkfs in ["-n 4096", "-n 16384 -O ^skinny-metadata"] {
        let script = format!(
            "truncate -s 512M \"$1\"; mkfs.btrfs -q -f {mkfs} \"$1\"; mnt=$(mktemp -d)
            trap 'umount $mnt 2>/dev/null || true; rmdir $mnt' EXIT
            mount -o loop \"$1\" $mnt
            for d in 1 2 3 4 5 6 7 8; do mkdir $mnt/d$d; for f in $(seq 300); do echo $f > $mnt/d$d/f$f; done; done
            for f in $(seq 200); do head -c 20000 /dev/urandom > $mnt/big$f; done
            btrfs -q subvolume snapshot $mnt $mnt/snap1 
            for f in $(seq 50); do cp --reflink=always $mnt/big$f $mnt/clone$f; done
            btrfs -q subvolume snapshot $mnt/snap1 $mnt/snap2 
            for f in $(seq 1 3 200); do touch $mnt/snap1/big$f; done
            umount $mnt"
        );
        if !run(&script, &image) {
            assert!(std::env::var_os("CI").is_none(), "root, loop devices and btrfs-progs are needed");
            eprintln!("SKIPPED: needs root, loop devices and btrfs-progs");
            return;
        }
        let engine = open(&image);
        let subvolumes = [5, 256, 257].map(|id| engine.tree(RootId(id)).unwrap().unwrap());
        touch_inodes(&engine, &subvolumes[1], 7);
        engine.commit().unwrap();
        touch_inodes(&engine, &subvolumes[0], 1);
        engine.close().unwrap();
        check(&image);
        assert!(empty_files(&engine, &subvolumes[2], 3) > 50);
        engine.commit().unwrap();
        assert!(empty_files(&engine, &subvolumes[0], 2) > 50);
        touch_inodes(&engine, &subvolumes[2], 1);
        engine.commit().unwrap();
        assert!(empty_files(&engine, &subvolumes[1], 1) > 50);
        assert!(empty_files(&engine, &subvolumes[0], 1) > 50);
        assert!(empty_files(&engine, &subvolumes[2], 1) > 50);
        engine.close().unwrap();
        drop((engine, subvolumes));
        check(&image);
    }
}
