//! Tests nodes that contradict the pointers to them: every walk ends with an error that names the place.

use std::collections::HashMap;
use std::sync::Arc;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::node::{HEADER_SIZE, ITEM_HEAD_SIZE, LeafBuilder, NodeBuilder, NodeHeader};
use ubtrfs_format::{Generation, Key, KeyType, Logical, RootId};
use ubtrfs_tree::{Cursor, Node, NodePtr, NodeSource, RootPtr, get};

/// A source that ignores the pointer's promises.
struct Unchecked(HashMap<u64, Arc<Node>>);

impl NodeSource for Unchecked {
    fn read_node(&self, ptr: &NodePtr) -> Result<Arc<Node>> {
        Ok(Arc::clone(&self.0[&ptr.bytenr.0]))
    }

    fn nodesize(&self) -> usize {
        4096
    }
}

fn header(bytenr: u64, level: u8) -> NodeHeader {
    NodeHeader { bytenr: Logical(bytenr), level, generation: Generation(1), ..NodeHeader::default() }
}

fn node(raw: Vec<u8>) -> Arc<Node> {
    Arc::new(Node::new(raw.into_boxed_slice()).unwrap())
}

fn internal(bytenr: u64, level: u8, children: &[(u64, u64)]) -> Arc<Node> {
    let mut builder = NodeBuilder::new(4096);
    for (first, child) in children {
        assert!(builder.push(&key(*first), Logical(*child), Generation(1)));
    }
    node(builder.finish(&header(bytenr, level)))
}

fn leaf(bytenr: u64, keys: &[u64]) -> Arc<Node> {
    let mut builder = LeafBuilder::new(4096);
    for number in keys {
        assert!(builder.push(&key(*number), b"data"));
    }
    node(builder.finish(&header(bytenr, 0)))
}

fn key(number: u64) -> Key {
    Key::new(number, KeyType(1), 0)
}

fn tree(nodes: Vec<Arc<Node>>) -> (Unchecked, RootPtr) {
    let level = nodes[0].level();
    let root = RootPtr { tree: RootId(5), bytenr: nodes[0].bytenr(), generation: Generation(1), level };
    (Unchecked(nodes.into_iter().map(|node| (node.bytenr().0, node)).collect()), root)
}

fn refused(nodes: Vec<Arc<Node>>, bytenr: u64) {
    let (source, root) = tree(nodes);
    let errors = [
        get(&source, &root, &key(5)).map(|_| ()).unwrap_err(),
        Cursor::new(&source, root).seek_ge(&key(5)).unwrap_err(),
        Cursor::new(&source, root).seek_le(&key(5)).unwrap_err(),
    ];
    for error in errors {
        let Error::Corrupt(corrupt) = error else { panic!("{error}") };
        assert_eq!((corrupt.tree, corrupt.bytenr), (Some(RootId(5)), Some(Logical(bytenr))));
    }
}

#[test]
fn a_node_that_is_its_own_child() {
    refused(vec![internal(4096, 1, &[(1, 4096)])], 4096);
    refused(vec![internal(4096, 2, &[(1, 8192)]), internal(8192, 2, &[(1, 4096)])], 8192);
}

#[test]
fn a_child_with_another_first_key() {
    refused(vec![internal(4096, 1, &[(1, 8192)]), leaf(8192, &[2, 3])], 8192);
}

#[test]
fn an_empty_child() {
    refused(vec![internal(4096, 1, &[(1, 8192)]), leaf(8192, &[])], 8192);
}

#[test]
fn a_level_that_is_skipped() {
    refused(vec![internal(4096, 2, &[(1, 8192)]), leaf(8192, &[1])], 8192);
}

#[test]
fn a_block_with_a_wild_geometry() {
    let good = leaf(4096, &[1, 2, 3]).raw().to_vec();
    // Sets each byte of the item count, the level and the item heads to each extreme value. Every result is an error,
    // or a node whose accessors work.
    for at in 96..HEADER_SIZE + 3 * ITEM_HEAD_SIZE {
        for value in [0, 1, 7, 8, 0x7f, 0x80, 0xff] {
            let mut raw = good.clone();
            raw[at] = value;
            let Ok(node) = Node::new(raw.into_boxed_slice()) else { continue };
            for slot in 0..node.nritems() {
                node.key(slot);
                if node.is_leaf() {
                    assert!(node.item(slot).len() < 4096);
                } else {
                    node.child(slot);
                }
            }
        }
    }
    for len in 0..HEADER_SIZE {
        Node::new(vec![0; len].into_boxed_slice()).unwrap_err();
    }
}

#[test]
fn an_empty_tree_has_no_places() {
    let (source, root) = tree(vec![leaf(4096, &[])]);
    let mut cursor = Cursor::new(&source, root);
    assert!(get(&source, &root, &key(5)).unwrap().is_none());
    assert_eq!(cursor.seek_ge(&Key::MIN).unwrap(), None);
    assert_eq!(cursor.seek_le(&Key::MAX).unwrap(), None);
    assert_eq!((cursor.next().unwrap(), cursor.prev().unwrap(), cursor.key()), (None, None, None));
}
