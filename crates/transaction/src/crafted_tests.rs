//! Tests that crafted values for which the tree checker has no bounds, and missing trees, cause errors. A corruption
//! error must name the tree and the field.

use std::sync::Arc;

use ubtrfs_device::MemoryDevice;
use ubtrfs_error::Error;
use ubtrfs_format::item::{Compression, FileExtent, FileExtentBody, InodeItem, RegularExtent};
use ubtrfs_format::node::finish_block;
use ubtrfs_format::{FormatError, Generation, Ino, Key, KeyType, Logical, RootId};
use ubtrfs_tree::{NodePtr, NodeSource, RootPtr};

use crate::qgroup::groups::Qgroups;
use crate::qgroup::state::QuotaState;
use crate::{Engine, EngineOptions, QgroupId, QuotaKind, Tree};

fn engine() -> (Arc<Engine>, Arc<Tree>) {
    let device = Arc::new(MemoryDevice::new(256 << 20));
    ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).expect("made");
    let engine = Engine::open(vec![device], EngineOptions::default()).expect("opened");
    let tree = engine.own_tree(RootId::FS_TREE).expect("there");
    (engine, tree)
}

/// Returns the tree and the field that a corruption error names.
fn named<T: std::fmt::Debug>(result: Result<T, Error>) -> (Option<RootId>, &'static str) {
    match result {
        Err(Error::Corrupt(corrupt)) => match corrupt.cause {
            FormatError::Value { field, .. } => (corrupt.tree, field),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_missing_tree_is_corruption() {
    let (engine, _) = engine();
    assert_eq!(named(engine.own_tree(RootId(42))), (Some(RootId::ROOT_TREE), "objectid"));
}

#[test]
fn a_snapshot_of_a_subvolume_that_does_not_exist_is_refused() {
    let (engine, _) = engine();
    assert!(matches!(engine.reserve_for_snapshot(RootId(300), 1), Err(Error::Refused { .. })));
}

#[test]
fn new_ids_fail_with_the_error_that_kept_the_last_id_from_being_read() {
    let (engine, _) = engine();
    assert_eq!(engine.new_root_id().expect("there are ids"), RootId(256));
    engine.roots.note_highest_id(Err(crate::delayed::loaded_trees::missing_tree(RootId::ROOT_TREE)));
    assert_eq!(named(engine.new_root_id()), (Some(RootId::ROOT_TREE), "objectid"));
}

/// Puts a file of one sector whose only extent is `regular`, and logs the file.
fn log_file_with(engine: &Engine, tree: &Arc<Tree>, regular: RegularExtent) -> Result<(), Error> {
    engine.commit().expect("committed");
    let (inode_key, ino) = (Key::new(256, KeyType::INODE_ITEM, 0), 300);
    let mut inode = InodeItem::decode(&tree.get(&inode_key).expect("readable").expect("there")).expect("valid");
    (inode.mode, inode.size, inode.nbytes) = (0o100_644, 4096, 4096);
    let op = engine.begin(engine.reserve(4).expect("room"));
    let extent = FileExtent {
        generation: op.generation(),
        ram_bytes: regular.num_bytes,
        compression: Compression::None,
        encryption: 0,
        other_encoding: 0,
        body: FileExtentBody::Regular(regular),
    };
    op.put(tree, Key::new(ino, KeyType::INODE_ITEM, 0), inode.encode());
    op.put(tree, Key::new(ino, KeyType::EXTENT_DATA, 0), extent.encode());
    drop(op);
    engine.sync_inode(RootId::FS_TREE, Ino(ino))
}

#[test]
fn an_offset_beyond_the_address_space_is_an_error_of_the_log() {
    let (engine, tree) = engine();
    let regular =
        RegularExtent { disk_bytenr: Logical(1 << 40), disk_num_bytes: 4096, offset: u64::MAX - 4095, num_bytes: 4096 };
    assert_eq!(named(log_file_with(&engine, &tree, regular)), (Some(RootId::FS_TREE), "offset"));
}

#[test]
fn logging_a_huge_extent_takes_no_memory_for_checksums_that_do_not_exist() {
    let (engine, tree) = engine();
    let len = 1 << 62;
    let regular = RegularExtent { disk_bytenr: Logical(1 << 40), disk_num_bytes: len, offset: 0, num_bytes: len };
    log_file_with(&engine, &tree, regular).expect("logged");
    assert_eq!(engine.log_stats().written, 1);
}

#[test]
fn a_pointer_to_the_end_of_the_address_space_ends_a_run() {
    let (engine, _) = engine();
    let ptr = |bytenr| NodePtr {
        tree: RootId::FS_TREE,
        bytenr: Logical(bytenr),
        generation: engine.generation(),
        level: 0,
        first_key: None,
    };
    let last = u64::MAX - 4095;
    let runs = engine.store.runs_of([last - 16384, last, 12288].map(ptr), 8);
    assert_eq!(runs.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1]);
}

#[test]
fn a_filesystem_of_the_last_generation_opens_read_only() {
    let device = Arc::new(MemoryDevice::new(256 << 20));
    ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).expect("made");
    let open = || Engine::open(vec![device.clone()], EngineOptions::default()).expect("opened");
    let engine = open();
    let mut superblock = engine.superblock();
    let root = engine.own_tree(RootId::ROOT_TREE).expect("there").root_ptr();
    let mut raw = engine.store.read_node(&root.node_ptr()).expect("readable").raw().to_vec();
    // The generation in the header.
    raw[80..88].copy_from_slice(&u64::MAX.to_le_bytes());
    finish_block(&mut raw, engine.geometry().csum_type);
    engine.volumes.write(root.bytenr, &raw).expect("written");
    superblock.generation = Generation(u64::MAX);
    engine.volumes.write_superblock(&superblock).expect("written");
    drop(engine);
    let reason = open().read_only().expect("nothing can be written");
    assert!(reason.contains("generation"), "{reason}");
}

#[test]
fn a_snapshot_of_a_subvolume_with_impossible_numbers_starts_a_rescan() {
    let (engine, _) = engine();
    let (transid, snapshot) = (engine.generation(), RootId(256));
    let [from, to] = [RootId::FS_TREE, snapshot].map(QgroupId::of_subvolume);
    let mut groups = Qgroups::default();
    groups.create(from);
    let mut state = QuotaState::fresh(groups, transid);
    state.groups.set_numbers(from, u64::MAX, u64::MAX, transid);
    // The rescan has passed the root of the snapshot, but not the root of the source.
    state.status.rescan = 1 << 20;
    engine.quotas.set(Some(state));
    let root = |tree, bytenr| RootPtr { tree, bytenr: Logical(bytenr), generation: transid, level: 0 };
    engine.share_numbers(&root(RootId::FS_TREE, 1 << 30), &root(snapshot, 1 << 16), &[], transid);
    let guard = engine.quotas.lock();
    let state = guard.as_ref().expect("quotas are enabled");
    assert!(state.is_rescanning() && state.status.rescan == 0 && state.groups.get(to).is_some());
}

/// When Linux deletes a subvolume whose group belongs to several groups, some versions leave relations of the deleted
/// group on disk.
#[test]
fn relations_of_groups_that_do_not_exist_are_removed_and_leave_the_numbers_consistent() {
    let device = Arc::new(MemoryDevice::new(256 << 20));
    ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).expect("made");
    let open = || Engine::open(vec![device.clone()], EngineOptions::default()).expect("opened");
    let is_consistent = |engine: &Engine| engine.quota_status().expect("quotas are enabled").consistent;
    let (missing, parent) = (QgroupId(300), QgroupId(1 << 48 | 1));
    let relations = |engine: &Engine| {
        let quotas = engine.own_tree(RootId::QUOTA_TREE).expect("there");
        let item = |from: QgroupId, to: QgroupId| {
            quotas.get(&Key::new(from.0, KeyType::QGROUP_RELATION, to.0)).expect("readable").is_some()
        };
        [item(missing, parent), item(parent, missing)]
    };
    let engine = open();
    engine.enable_quotas(QuotaKind::Full).expect("enabled");
    engine.create_qgroup(parent).expect("created");
    for _ in 0..100 {
        if is_consistent(&engine) {
            break;
        }
        engine.commit().expect("committed");
    }
    engine.quotas.lock().as_mut().expect("quotas are enabled").groups.relate(missing, parent);
    engine.create_qgroup(QgroupId(1 << 48 | 2)).expect("created");
    assert_eq!(relations(&engine), [true; 2]);
    drop(engine);
    let engine = open();
    assert!(is_consistent(&engine), "the relations count for nothing");
    engine.create_qgroup(QgroupId(1 << 48 | 3)).expect("created");
    assert_eq!(relations(&engine), [false; 2]);
    drop(engine);
    assert!(is_consistent(&open()));
}

#[test]
fn a_tree_that_claims_to_use_the_whole_address_space_is_corrupt() {
    let (engine, tree) = engine();
    if let Some(item) = &mut tree.root.lock().item {
        item.bytes_used = u64::MAX - 4096;
    }
    let key = Key::new(256, KeyType::INODE_ITEM, 0);
    let mut inode = InodeItem::decode(&tree.get(&key).expect("readable").expect("there")).expect("valid");
    let op = engine.begin(engine.reserve(1).expect("room"));
    inode.transid = op.generation();
    op.put(&tree, key, inode.encode());
    drop(op);
    assert_eq!(named(engine.commit()), (Some(RootId::FS_TREE), "bytes_used"));
}
