//! Tests a commit that makes several snapshots of one dirty tree, snapshots of these snapshots, and snapshots inside
//! each other. Linux makes the tree, and the test queues the changes. `btrfs check`, a walk on Linux's mount, and
//! Linux's scrub judge the result.

use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::hash::name_hash;
use ubtrfs_format::item::{DirItem, FileType, InodeItem, RootRef, Timespec};
use ubtrfs_format::{Ino, Key, KeyType, RootId};
use ubtrfs_testkit::{Image, LoopMount, btrfs_check, capability, run, second_opinion};
use ubtrfs_tree::Batch;
use uuid::Uuid;

use crate::handle::root_change::RootChange;
use crate::{Engine, EngineOptions, NewContent, NewSubvolume, Tree};

const SOURCE: RootId = RootId(256);
const NR_DIRS: u64 = 8;
const NR_FILES: u64 = 200;

/// Changes every inode of a tree, so that all of its leaves are new in this transaction.
fn touch_all(engine: &Engine, tree: &Tree) {
    for ino in 257..=tree.highest_objectid().expect("readable").expect("not empty") {
        let key = Key::new(ino, KeyType::INODE_ITEM, 0);
        let Some(item) = tree.get(&key).expect("readable") else { continue };
        let mut item = InodeItem::decode(&item).expect("valid");
        item.mtime.nsec = 5;
        let op = engine.begin(engine.reserve(1).expect("room"));
        item.transid = op.generation();
        op.put(tree, key, item.encode());
    }
}

/// The request for a snapshot in a directory, as `fs` would make it.
fn snapshot(engine: &Engine, (source, id): (u64, u64), (parent, dir): (u64, u64), name: &str) -> NewSubvolume {
    let (transid, index) = (engine.generation(), 1_000_000 + id);
    // Read the directory from the source: a snapshot has the same directories.
    let tree = engine.own_tree(SOURCE).expect("there");
    let dir_key = Key::new(dir, KeyType::INODE_ITEM, 0);
    let mut dir_item = InodeItem::decode(&tree.get(&dir_key).expect("readable").expect("there")).expect("valid");
    dir_item.size += 2 * name.len() as u64;
    dir_item.transid = transid;
    let location = Key::new(id, KeyType::ROOT_ITEM, u64::MAX);
    let entry =
        DirItem { location, transid, file_type: FileType::Directory as u8, name: name.into(), data: Vec::new() };
    let mut bytes = Vec::new();
    entry.encode_into(&mut bytes);
    let mut batch: Batch = vec![
        (dir_key, Some(dir_item.encode().into())),
        (Key::new(dir, KeyType::DIR_ITEM, name_hash(name.as_bytes())), Some(bytes.clone().into())),
        (Key::new(dir, KeyType::DIR_INDEX, index), Some(bytes.into())),
    ];
    batch.sort_by_key(|(key, _)| *key);
    NewSubvolume {
        id: RootId(id),
        uuid: Uuid::from_u128(u128::from(id)),
        otime: Timespec { sec: 1_600_000_000, nsec: 0 },
        content: NewContent::SnapshotOf { source: RootId(source), read_only: false },
        parent: RootId(parent),
        root_ref: RootRef { dirid: dir, sequence: index, name: name.into() },
        entry: batch,
        qgroups: Vec::new(),
        limit: None,
        stransid: ubtrfs_format::Generation(0),
    }
}

#[test]
fn blocks_of_the_transaction_are_shared_once_a_snapshot_was_taken() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &["-n", "4096"]).expect("made");
    let mount = LoopMount::new(image.path(), "").expect("mounted");
    let script = format!(
        "btrfs -q subvolume create a; for d in $(seq {NR_DIRS}); do mkdir a/d$d; done
        for d in $(seq {NR_DIRS}); do for f in $(seq {NR_FILES}); do echo $f > a/d$d/f$f; done; done
        for f in 1 2 3; do head -c 9000 /dev/urandom > a/d$f/data; done"
    );
    run("sh", ["-ec", &format!("cd {} && {script}", mount.path().display())]).expect("made");
    mount.close().expect("unmounted");

    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image.path(), Access::ReadWrite).expect("there"));
    let engine = Engine::open(vec![device], EngineOptions::default()).expect("opened");
    let tree = engine.own_tree(SOURCE).expect("there");
    touch_all(&engine, &tree);
    let long = "n".repeat(200);
    let dir = |number: u64| Ino(256 + number).0;
    let plans = [
        // Each plan is ((source, id), (parent, directory)).
        ((256, 257), (256, dir(1))),
        ((256, 258), (256, dir(4))),
        // Snapshot 257 is copied twice: to 259, whose name is in 257 itself, and then to 260, after the name of 259 was
        // added.
        ((257, 259), (257, dir(7))),
        ((257, 260), (257, dir(2))),
        // The parent, 259, already shares blocks with all other trees.
        ((258, 261), (259, dir(3))),
    ];
    for (number, (ids, place)) in plans.into_iter().enumerate() {
        let _gate = engine.running.enter();
        let plan = snapshot(&engine, ids, place, &format!("snapshot-{number}-{long}"));
        engine.running.request(RootChange::Make(Box::new(plan)));
    }
    engine.trees.note_shared_blocks();
    engine.commit().expect("committed");
    // Change the trees further.
    touch_all(&engine, &tree);
    touch_all(&engine, &engine.own_tree(RootId(259)).expect("there"));
    engine.close().expect("closed");
    drop((tree, engine));

    btrfs_check(image.path()).expect("clean");
    second_opinion(image.path()).expect("clean");
    let mount = LoopMount::new(image.path(), "").expect("mounted");
    let count = format!("find {} -type f | wc -l", mount.path().display());
    let nr_files: u64 = run("sh", ["-ec", &count]).expect("readable").trim().parse().expect("a number");
    assert_eq!(nr_files, 6 * (NR_DIRS * NR_FILES + 3));
    mount.scrub().expect("clean");
    assert!(mount.kernel_complaints().is_empty(), "{:?}", mount.kernel_complaints());
    mount.close().expect("unmounted");
}
