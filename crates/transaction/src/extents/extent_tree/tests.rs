//! Compares the extent tree with a map of references. The tests cover items with and without skinny metadata, and
//! inline and keyed references.

use std::collections::HashMap;

use proptest::prelude::*;
use ubtrfs_format::{CsumType, Ino};
use ubtrfs_space::{DelayedRefs, OwnerMark};

use super::*;
use crate::test_tree::TestTree;

const NODESIZE: u32 = 4096;
const GEOMETRY: FilesystemGeometry = FilesystemGeometry {
    sectorsize: 4096,
    nodesize: NODESIZE,
    csum_type: CsumType::Crc32c,
    no_holes: true,
    extended_iref: true,
    skinny: true,
    mixed: false,
};
const CONFIG: LedgerConfig<'_> = LedgerConfig { geometry: GEOMETRY, simple: None };
const FIRST_KEY: Key = Key::new(256, KeyType::INODE_ITEM, 0);

type Refs = BTreeMap<RefKey, u64>;

fn tree() -> TestTree {
    TestTree::new(RootId::EXTENT_TREE, NODESIZE as usize)
}

fn run(tree: &mut TestTree, heads: Vec<DelayedRefHead>, config: &LedgerConfig<'_>) -> Result<ExtentChanges> {
    let nodes = tree.build();
    let changes = run_delayed_refs(&nodes, &nodes.root, heads.into_iter(), config)?;
    tree.apply(&changes.batch);
    Ok(changes)
}

fn head(bytenr: u64, kind: ExtentKind, deltas: &[(RefKey, i64)]) -> DelayedRefHead {
    let len_bytes = if kind == ExtentKind::Data { 8192 } else { NODESIZE.into() };
    DelayedRefHead {
        extent: Extent::new(Logical(bytenr), len_bytes),
        kind,
        deltas: deltas.iter().copied().collect(),
        set_flags: ExtentFlags::empty(),
        generation: Generation(7),
        owners: OwnerMark::Same,
        allocated_by: None,
    }
}

fn file(ino: u64) -> RefKey {
    RefKey::Data { root: RootId::FS_TREE, ino: Ino(ino), offset: 0 }
}

fn leaf() -> ExtentKind {
    ExtentKind::Tree { level: 0, first_key: FIRST_KEY }
}

/// The references of an extent. Checks the form of the extent's items.
fn refs_of(tree: &TestTree, bytenr: u64) -> Option<(Key, ExtentItem, Refs)> {
    let mut items =
        tree.items.range(first_key(Logical(bytenr))..).take_while(|(key, _)| is_extent_key(key, Logical(bytenr)));
    let (key, raw) = items.next()?;
    assert!(key.item_type <= KeyType::METADATA_ITEM, "the item comes first");
    let item = ExtentItem::decode(key.item_type, raw).expect("valid");
    assert!(raw.len() < 224, "a sixteenth of a leaf");
    let order: Vec<_> =
        item.inline_refs.iter().map(|inline| (inline.key_type(), std::cmp::Reverse(inline.key_offset()))).collect();
    assert!(order.is_sorted());
    let keyed: Vec<InlineRef> = items.map(|(key, raw)| InlineRef::decode_keyed(key, raw).expect("valid")).collect();
    let mut refs = Refs::new();
    for reference in item.inline_refs.iter().chain(&keyed) {
        let before = refs.insert(RefKey::of(reference).expect("counted"), reference.count().into());
        assert_eq!(before, None, "inline or keyed, never both");
    }
    assert_eq!(refs.values().sum::<u64>(), item.refs);
    Some((*key, item, refs))
}

#[test]
fn a_tree_block_comes_and_goes() {
    for skinny in [true, false] {
        let config = LedgerConfig { geometry: FilesystemGeometry { skinny, ..GEOMETRY }, ..CONFIG };
        let mut tree = tree();
        let add = head(1 << 20, leaf(), &[(RefKey::TreeBlock(RootId(5)), 1)]);
        let changes = run(&mut tree, vec![add.clone()], &config).expect("valid");
        assert_eq!((changes.added, changes.removed.len()), (vec![add.extent], 0));
        let (key, item, _) = refs_of(&tree, 1 << 20).expect("there");
        assert_eq!((item.refs, item.flags, item.generation), (1, ExtentFlags::TREE_BLOCK, Generation(7)));
        if skinny {
            assert_eq!((key, item.tree_block), (Key::new(1 << 20, KeyType::METADATA_ITEM, 0), None));
        } else {
            assert_eq!(key, Key::new(1 << 20, KeyType::EXTENT_ITEM, 4096));
            assert_eq!(item.tree_block, Some(TreeBlockInfo { key: FIRST_KEY, level: 0 }));
        }
        let nodes = tree.build();
        let info = lookup_extent(&nodes, &nodes.root, Logical(1 << 20), 4096, true).expect("valid").expect("there");
        assert_eq!((info.refs, info.generation), (1, Generation(7)));
        assert_eq!(lookup_extent(&nodes, &nodes.root, Logical(1), 4096, true).expect("valid"), None);
        assert_eq!(lookup_extent(&nodes, &nodes.root, Logical(1 << 20), 8192, false).expect("valid"), None);

        // The form of the item on disk applies, not the default form of new items.
        let drop = head(1 << 20, leaf(), &[(RefKey::TreeBlock(RootId(5)), -1)]);
        let changes = run(&mut tree, vec![drop], &CONFIG).expect("valid");
        assert_eq!((changes.added.len(), changes.removed), (0, vec![(add.extent, false)]));
        assert!(tree.items.is_empty());
    }
}

#[test]
fn flags_are_set_and_references_move() {
    let mut tree = tree();
    run(&mut tree, vec![head(1 << 20, leaf(), &[(RefKey::TreeBlock(RootId(5)), 1)])], &CONFIG).expect("valid");
    let mut shared =
        head(1 << 20, leaf(), &[(RefKey::TreeBlock(RootId(5)), -1), (RefKey::SharedBlock(Logical(77)), 1)]);
    shared.set_flags = ExtentFlags::FULL_BACKREF;
    let changes = run(&mut tree, vec![shared], &CONFIG).expect("valid");
    assert!(changes.added.is_empty() && changes.removed.is_empty());
    let (_, item, refs) = refs_of(&tree, 1 << 20).expect("there");
    assert_eq!(item.flags, ExtentFlags::TREE_BLOCK | ExtentFlags::FULL_BACKREF);
    assert_eq!(refs, Refs::from([(RefKey::SharedBlock(Logical(77)), 1)]));
}

#[test]
fn references_overflow_into_items_and_new_ones_stay_there() {
    let mut tree = tree();
    let deltas: Vec<_> = (256..300).map(|ino| (file(ino), 1)).collect();
    run(&mut tree, vec![head(1 << 20, ExtentKind::Data, &deltas)], &CONFIG).expect("valid");
    let (_, item, refs) = refs_of(&tree, 1 << 20).expect("there");
    // An item stays below 224 bytes. With 6 inline references it takes 24 + 6 * 29 = 198 bytes; with 7 it would take
    // 227.
    assert_eq!((item.inline_refs.len(), refs.len(), tree.items.len()), (6, 44, 39));

    let inline = RefKey::of(&item.inline_refs[0]).expect("counted");
    run(&mut tree, vec![head(1 << 20, ExtentKind::Data, &[(inline, -1), (file(900), 1)])], &CONFIG).expect("valid");
    let (_, item, _) = refs_of(&tree, 1 << 20).expect("there");
    assert_eq!((item.inline_refs.len(), tree.items.len()), (5, 40), "a keyed one keeps new ones keyed");

    let (_, _, refs) = refs_of(&tree, 1 << 20).expect("there");
    let drops: Vec<_> = refs.iter().map(|(reference, count)| (*reference, -(*count as i64))).collect();
    let changes = run(&mut tree, vec![head(1 << 20, ExtentKind::Data, &drops)], &CONFIG).expect("valid");
    assert_eq!(changes.removed, [(Extent::new(Logical(1 << 20), 8192), true)]);
    assert!(tree.items.is_empty());
}

#[test]
fn equal_hashes_take_the_next_offset() {
    let mut seen = HashMap::new();
    let mixed = |number: u64| number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let pairs = (1..1u64 << 20).map(|number| (mixed(number) >> 32, mixed(mixed(number)) >> 16));
    let (first, second) = pairs
        .filter_map(|(ino, offset)| {
            let reference = RefKey::Data { root: RootId(5), ino: Ino(ino), offset };
            seen.insert(key_offset(&reference), reference).map(|before| (before, reference))
        })
        .next()
        .expect("2^20 hashes of 32 bits collide");
    let mut tree = tree();
    let filler: Vec<_> = (5000..5040).map(|ino| (file(ino), 1)).collect();
    run(&mut tree, vec![head(1 << 20, ExtentKind::Data, &filler)], &CONFIG).expect("valid");
    let at = |reference: &RefKey, step| Key::new(1 << 20, KeyType::EXTENT_DATA_REF, key_offset(reference) + step);
    for (deltas, expected) in [
        (vec![(first, 1)], [Some(first), None]),
        (vec![(second, 2)], [Some(first), Some(second)]),
        (vec![(second, -1)], [Some(first), Some(second)]),
        (vec![(first, -1)], [None, Some(second)]),
        (vec![(second, 1)], [None, Some(second)]),
        (vec![(first, 1)], [Some(first), Some(second)]),
        (vec![(first, -1), (second, -2)], [None, None]),
    ] {
        run(&mut tree, vec![head(1 << 20, ExtentKind::Data, &deltas)], &CONFIG).expect("valid");
        let found = [0, 1].map(|step| {
            let key = at(&first, step);
            tree.items.get(&key).and_then(|raw| RefKey::of(&InlineRef::decode_keyed(&key, raw).expect("valid")))
        });
        assert_eq!(found, expected);
        refs_of(&tree, 1 << 20);
    }
}

#[test]
fn contradictions_are_errors() {
    let mut tree = tree();
    run(&mut tree, vec![head(1 << 20, ExtentKind::Data, &[(file(257), 2)])], &CONFIG).expect("valid");
    run(&mut tree, vec![head(2 << 20, leaf(), &[(RefKey::TreeBlock(RootId(5)), 1)])], &CONFIG).expect("valid");
    let before = tree.clone();
    let block = RefKey::TreeBlock(RootId(5));
    let level = ExtentKind::Tree { level: 3, first_key: FIRST_KEY };
    let mut long = head(1 << 20, ExtentKind::Data, &[(file(257), 1)]);
    long.extent.len_bytes = 4096;
    let mut flags = head(9 << 20, leaf(), &[]);
    flags.set_flags = ExtentFlags::FULL_BACKREF;
    for (what, head) in [
        ("underflow", head(1 << 20, ExtentKind::Data, &[(file(257), -3)])),
        ("other reference", head(1 << 20, ExtentKind::Data, &[(file(258), -1)])),
        ("refs 0 with references left", head(1 << 20, ExtentKind::Data, &[(file(258), -2)])),
        ("no item", head(3 << 20, ExtentKind::Data, &[(file(258), -1)])),
        ("no item for a tree block", head(3 << 20, leaf(), &[(block, -1), (RefKey::TreeBlock(RootId(7)), 1)])),
        ("data as tree block", head(1 << 20, leaf(), &[(block, 1)])),
        ("other length", long),
        ("other level", head(2 << 20, level, &[(block, -1)])),
        ("twice by one tree", head(2 << 20, leaf(), &[(block, 1)])),
        ("twice at once", head(4 << 20, leaf(), &[(block, 2)])),
        ("overflow", head(1 << 20, ExtentKind::Data, &[(file(257), u32::MAX.into())])),
        ("flags of nothing", flags),
    ] {
        let bytenr = head.extent.bytenr;
        match run(&mut tree, vec![head], &CONFIG) {
            Err(Error::Corrupt(corrupt)) => assert_eq!((corrupt.bytenr, corrupt.tree), (Some(bytenr), Some(RootId(2)))),
            other => panic!("{what}: {other:?}"),
        }
        assert_eq!(tree, before);
    }
    // The count on disk is too low: `refs` reaches 0 while a reference is left.
    let key = Key::new(1 << 20, KeyType::EXTENT_ITEM, 8192);
    let mut item = ExtentItem::decode(key.item_type, &tree.items[&key]).expect("valid");
    item.refs = 1;
    tree.items.insert(key, item.encode());
    assert!(run(&mut tree, vec![head(1 << 20, ExtentKind::Data, &[(file(257), -1)])], &CONFIG).is_err());
    // These bytes are not an extent item.
    tree.items.insert(key, vec![1; 30]);
    assert!(run(&mut tree, vec![head(1 << 20, ExtentKind::Data, &[(file(257), -1)])], &CONFIG).is_err());
}

#[derive(Clone, Debug)]
struct Change {
    extent: u64,
    reference: u64,
    delta: i64,
}

fn change() -> impl Strategy<Value = Change> {
    (0..24u64, 0..40u64, prop_oneof![3 => 1..4i64, 2 => -4..0i64, 1 => Just(i64::MIN)])
        .prop_map(|(extent, reference, delta)| Change { extent, reference, delta })
}

/// Extents with numbers below 8 are tree blocks. There are only 24 extents, so many of them get several references.
fn identify(change: &Change) -> (Extent, ExtentKind, RefKey) {
    let bytenr = Logical((1 << 20) + change.extent * 65536);
    let number = change.reference;
    if change.extent < 8 {
        let level = (change.extent % 3) as u8;
        let reference = if number.is_multiple_of(2) {
            RefKey::TreeBlock(RootId(256 + number))
        } else {
            RefKey::SharedBlock(Logical(number << 14))
        };
        return (Extent::new(bytenr, NODESIZE.into()), ExtentKind::Tree { level, first_key: FIRST_KEY }, reference);
    }
    let reference = match number % 4 {
        0 => RefKey::SharedData(Logical(number << 14)),
        root => RefKey::Data { root: RootId(255 + root), ino: Ino(256 + number), offset: number.wrapping_sub(9) << 12 },
    };
    (Extent::new(bytenr, 4096 * (1 + change.extent)), ExtentKind::Data, reference)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn references_agree_with_a_map(rounds in prop::collection::vec(prop::collection::vec(change(), 0..120), 1..8)) {
        let mut tree = tree();
        let mut model: BTreeMap<Extent, Refs> = BTreeMap::new();
        for (round, changes) in rounds.iter().enumerate() {
            let mut delayed = DelayedRefs::new();
            let before = model.clone();
            for change in changes {
                let (extent, kind, reference) = identify(change);
                let refs = model.entry(extent).or_default();
                let now = refs.get(&reference).copied().unwrap_or(0);
                let most = if kind == ExtentKind::Data { u64::MAX } else { 1 };
                let next = now.saturating_add_signed(change.delta).min(most);
                delayed.add(extent, kind, reference, next as i64 - now as i64, Generation(round as u64));
                if next == 0 { refs.remove(&reference) } else { refs.insert(reference, next) };
            }
            model.retain(|_, refs| !refs.is_empty());
            // Skinny and non-skinny items of tree blocks occur side by side.
            let config = LedgerConfig { geometry: FilesystemGeometry { skinny: round % 2 == 0, ..GEOMETRY }, ..CONFIG };
            let changes = run(&mut tree, delayed.take().collect(), &config).expect("valid");

            let added: Vec<Extent> = model.keys().filter(|extent| !before.contains_key(extent)).copied().collect();
            let removed: Vec<Extent> = before.keys().filter(|extent| !model.contains_key(extent)).copied().collect();
            prop_assert_eq!(changes.added, added);
            prop_assert_eq!(changes.removed.iter().map(|(extent, _)| *extent).collect::<Vec<_>>(), removed);
            for (extent, refs) in &model {
                let (_, _, found) = refs_of(&tree, extent.bytenr.0).expect("there");
                prop_assert_eq!(&found, refs);
            }
            let known: Vec<u64> = model.keys().map(|extent| extent.bytenr.0).collect();
            prop_assert!(tree.items.keys().all(|key| known.contains(&key.objectid)));
        }
    }
}
