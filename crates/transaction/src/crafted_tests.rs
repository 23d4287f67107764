//! Missing trees and subvolumes: each is an error of its true kind.

use std::sync::Arc;

use ubtrfs_device::MemoryDevice;
use ubtrfs_error::Error;
use ubtrfs_format::{FormatError, RootId};

use crate::{Engine, OpenOptions, Tree};

fn engine() -> (Arc<Engine>, Arc<Tree>) {
    let device = Arc::new(MemoryDevice::new(256 << 20));
    ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).expect("made");
    let engine = Engine::open(vec![device], OpenOptions::default()).expect("opened");
    let tree = engine.own_tree(RootId::FS_TREE).expect("there");
    (engine, tree)
}

/// The tree and the field of a corruption.
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
    assert!(matches!(engine.prepare_snapshot(RootId(300)), Err(Error::Refused { .. })));
}

#[test]
fn new_ids_fail_with_the_error_that_kept_the_last_id_from_being_read() {
    let (engine, _) = engine();
    assert_eq!(engine.new_root_id().expect("there are ids"), RootId(256));
    engine.roots.note_highest_id(Err(crate::engine::missing_tree(RootId::ROOT_TREE)));
    assert_eq!(named(engine.new_root_id()), (Some(RootId::ROOT_TREE), "objectid"));
}
