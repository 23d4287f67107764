//! Checks the extent, csum and free space trees of images that Linux made: they agree with each other. The extent and
//! free space items that this crate would write equal Linux's items, and csum items are as full as Linux's.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::item::{ExtentFlags, ExtentItem, InlineRef};
use ubtrfs_format::{Key, KeyType, Logical, RootId, objectid};
use ubtrfs_space::{BlockGroup, DelayedRefHead, Extent, ExtentKind, OwnerMark, RefKey};
use ubtrfs_testkit::{KernelImage, KernelImageSpec, capability};
use ubtrfs_tree::{Cursor, RootPtr};

use crate::extents::csum_tree::{csum_changes, lookup_csums};
use crate::extents::extent_tree::{LedgerConfig, lookup_extent, run_delayed_refs};
use crate::extents::free_space_tree::{GroupFreeSpace, free_space_changes, free_space_from_extents, load_free_space};
use crate::test_tree::TestTree;
use crate::{Engine, EngineOptions};

/// An extent with everything that the extent tree records about it.
struct Known {
    extent: Extent,
    kind: ExtentKind,
    item: ExtentItem,
    refs: BTreeMap<RefKey, i64>,
    has_keyed: bool,
}

fn items(engine: &Engine, root: &RootPtr) -> BTreeMap<Key, Vec<u8>> {
    let mut cursor = Cursor::new(&*engine.store, *root);
    let mut key = cursor.seek_ge(&Key::MIN).expect("readable");
    let mut items = BTreeMap::new();
    while let Some(found) = key {
        items.insert(found, cursor.data().expect("there").to_vec());
        key = cursor.next().expect("readable");
    }
    items
}

fn extents(items: &BTreeMap<Key, Vec<u8>>, nodesize: u32) -> Vec<Known> {
    let mut extents: Vec<Known> = Vec::new();
    for (key, raw) in items {
        let reference = match key.item_type {
            KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => {
                let item = ExtentItem::decode(key.item_type, raw).expect("valid");
                let skinny = key.item_type == KeyType::METADATA_ITEM;
                let len_bytes = if skinny { nodesize.into() } else { key.offset };
                let kind = match item.tree_block {
                    _ if skinny => ExtentKind::Tree { level: key.offset as u8, first_key: Key::MIN },
                    Some(info) => ExtentKind::Tree { level: info.level, first_key: info.key },
                    None => ExtentKind::Data,
                };
                let count = |inline: &InlineRef| RefKey::of(inline).map(|key| (key, i64::from(inline.count())));
                let refs = item.inline_refs.iter().filter_map(count).collect();
                let extent = Extent::new(Logical(key.objectid), len_bytes);
                extents.push(Known { extent, kind, item, refs, has_keyed: false });
                continue;
            }
            KeyType::BLOCK_GROUP_ITEM => continue,
            _ => InlineRef::decode_keyed(key, raw).expect("valid"),
        };
        let known = extents.last_mut().filter(|known| known.extent.bytenr.0 == key.objectid).expect("its item");
        known.refs.insert(RefKey::of(&reference).expect("counted"), reference.count().into());
        known.has_keyed = true;
    }
    extents
}

impl Known {
    fn head(&self, sign: i64) -> DelayedRefHead {
        DelayedRefHead {
            extent: self.extent,
            kind: self.kind,
            deltas: self.refs.iter().map(|(reference, count)| (*reference, sign * count)).collect(),
            set_flags: if sign > 0 { self.item.flags } else { ExtentFlags::empty() },
            generation: self.item.generation,
            owners: OwnerMark::Same,
            allocated_by: None,
        }
    }
}

/// Checks that the free space tree and the extent tree agree about each block group, and that rewriting the group's
/// free space changes no item. Returns the number of bitmaps.
fn check_free_space(engine: &Engine, groups: &[BlockGroup], extents: &[Known], extent_root: &RootPtr) -> usize {
    let geometry = engine.geometry();
    let tree = engine.tree(RootId::FREE_SPACE_TREE).expect("readable").map(|tree| tree.root_ptr());
    let mut nr_bitmaps = 0;
    for group in groups {
        let (start, len_bytes) = (group.start, group.len_bytes);
        let mut expected: Vec<Range<u64>> = Vec::new();
        let mut at = start.0;
        let mut used = 0;
        let inside = |known: &&Known| (start.0..start.0 + len_bytes).contains(&known.extent.bytenr.0);
        for known in extents.iter().filter(inside) {
            if at < known.extent.bytenr.0 {
                expected.push(at..known.extent.bytenr.0);
            }
            at = known.extent.end();
            used += known.extent.len_bytes;
        }
        if at < start.0 + len_bytes {
            expected.push(at..start.0 + len_bytes);
        }
        assert_eq!(group.used, used);
        let found = free_space_from_extents(&*engine.store, extent_root, start, len_bytes, geometry.nodesize);
        assert_eq!(found.expect("valid"), expected);
        if let Some(root) = &tree {
            let loaded = load_free_space(&*engine.store, root, start, len_bytes, geometry.sectorsize).expect("valid");
            assert_eq!(loaded, expected);
            let free =
                GroupFreeSpace { start, len_bytes, nr_ranges: loaded.len() as u64, touching: &|_| loaded.clone() };
            let whole = start.0..start.0 + len_bytes;
            let changed = std::slice::from_ref(&whole);
            let again = free_space_changes(&*engine.store, root, &free, changed, geometry.sectorsize);
            assert_eq!(again.expect("valid"), []);
        }
    }
    if let Some(root) = &tree {
        nr_bitmaps = items(engine, root).keys().filter(|key| key.item_type == KeyType::FREE_SPACE_BITMAP).count();
    }
    nr_bitmaps
}

/// Checks that every checksum matches the data. Returns the number of sectors with a checksum.
fn check_csums(engine: &Engine, extents: &[Known]) -> usize {
    let geometry = engine.geometry();
    let Some(tree) = engine.tree(RootId::CSUM_TREE).expect("readable") else { return 0 };
    let (sector, csum_size) = (geometry.sectorsize as usize, geometry.csum_type.size());
    let mut checked = 0;
    for known in extents.iter().filter(|known| known.kind == ExtentKind::Data) {
        let len = known.extent.len_bytes;
        let csums = lookup_csums(&*engine.store, &tree.root_ptr(), known.extent.bytenr, len, csum_size, sector as u32);
        let csums = csums.expect("valid");
        let mut data = vec![0; len as usize];
        engine.volumes.read_copy(known.extent.bytenr, &mut data, 0).expect("readable");
        for (index, sector) in data.chunks(sector).enumerate() {
            if let Some(csum) = csums.get(index) {
                assert_eq!(csum, &geometry.csum_type.compute(sector)[..csum_size]);
                checked += 1;
            }
        }
    }
    let in_tree: usize = items(engine, &tree.root_ptr())
        .iter()
        .filter(|(key, _)| key.objectid == objectid::EXTENT_CSUM)
        .map(|(_, raw)| raw.len() / csum_size)
        .sum();
    assert_eq!(checked, in_tree, "no checksum is of anything else");
    checked
}

/// Checks that removing all checksums and inserting them again keeps their number, in no more items than Linux made.
fn check_csum_changes(engine: &Engine) {
    let geometry = engine.geometry();
    let Some(tree) = engine.tree(RootId::CSUM_TREE).expect("readable") else { return };
    let before = items(engine, &tree.root_ptr());
    let csum_size = geometry.csum_type.size();
    let mut copy = TestTree::new(RootId::CSUM_TREE, geometry.nodesize as usize);
    let insert: BTreeMap<u64, Vec<u8>> = before.iter().map(|(key, raw)| (key.offset, raw.clone())).collect();
    let all = || std::iter::once(0..u64::MAX).collect();
    for (insert, remove) in [(&insert, Vec::new()), (&BTreeMap::new(), all()), (&insert, all())] {
        let nodes = copy.build();
        let (sector, nodesize) = (geometry.sectorsize, geometry.nodesize);
        let batch = csum_changes(&nodes, &nodes.root, insert, &remove, csum_size, sector, nodesize).expect("valid");
        copy.apply(&batch);
        let nr_csums: usize = copy.items.values().map(|raw| raw.len() / csum_size).sum();
        assert_eq!(nr_csums, insert.values().map(|raw| raw.len() / csum_size).sum::<usize>());
        assert!(copy.items.len() <= before.len(), "items are as full as Linux's");
        assert_eq!(copy.items.is_empty(), insert.is_empty());
    }
}

/// Checks that dropping every reference empties the extent tree, and that adding all references again restores it
/// ([`compare`]).
fn check_refs(engine: &Engine, before: &BTreeMap<Key, Vec<u8>>, extents: &[Known]) {
    let geometry = engine.geometry();
    let config = LedgerConfig { geometry, simple: None };
    let mut tree = TestTree::new(RootId::EXTENT_TREE, geometry.nodesize as usize);
    tree.items.clone_from(before);
    let nodes = tree.build();
    let mut single = tree.clone();

    let changes = run_delayed_refs(&nodes, &nodes.root, extents.iter().map(|known| known.head(-1)), &config);
    let changes = changes.expect("valid");
    tree.apply(&changes.batch);
    assert!(tree.items.keys().all(|key| key.item_type == KeyType::BLOCK_GROUP_ITEM));
    let removed: Vec<(Extent, bool)> =
        extents.iter().map(|known| (known.extent, known.kind == ExtentKind::Data)).collect();
    assert_eq!((changes.removed, changes.added.len()), (removed, 0));

    let nodes = tree.build();
    let changes = run_delayed_refs(&nodes, &nodes.root, extents.iter().map(|known| known.head(1)), &config);
    let changes = changes.expect("valid");
    tree.apply(&changes.batch);
    assert_eq!(changes.added, extents.iter().map(|known| known.extent).collect::<Vec<_>>());
    compare(&tree.items, before, extents, geometry.nodesize);

    // Drop the first reference of each extent that has several, then add it again.
    for sign in [-1, 1] {
        let heads = extents.iter().filter(|known| known.refs.len() > 1).map(|known| {
            let head = known.head(sign);
            let deltas = head.deltas.iter().take(1).map(|(reference, delta)| (*reference, delta)).collect();
            DelayedRefHead { deltas, set_flags: ExtentFlags::empty(), ..head }
        });
        let nodes = single.build();
        let changes =
            run_delayed_refs(&nodes, &nodes.root, heads.collect::<Vec<_>>().into_iter(), &config).expect("valid");
        assert!(changes.added.is_empty() && changes.removed.is_empty());
        single.apply(&changes.batch);
    }
    compare(&single.items, before, extents, geometry.nodesize);

    let nodes = single.build();
    for known in extents {
        let is_tree = known.kind != ExtentKind::Data;
        let info = lookup_extent(&nodes, &nodes.root, known.extent.bytenr, known.extent.len_bytes, is_tree);
        assert_eq!(info.expect("valid").expect("there").refs, known.item.refs);
    }
}

/// Compares items byte by byte. Of extents with keyed references, only the references are compared, because the order
/// of earlier changes decides which of them are inline.
fn compare(ours: &BTreeMap<Key, Vec<u8>>, before: &BTreeMap<Key, Vec<u8>>, known: &[Known], nodesize: u32) {
    let free_order: Vec<u64> =
        known.iter().filter(|known| known.has_keyed).map(|known| known.extent.bytenr.0).collect();
    let fixed = |items: &BTreeMap<Key, Vec<u8>>| -> Vec<(Key, Vec<u8>)> {
        let mut items: Vec<_> = items.iter().map(|(key, raw)| (*key, raw.clone())).collect();
        items.retain(|(key, _)| free_order.binary_search(&key.objectid).is_err());
        items
    };
    assert_eq!(fixed(ours), fixed(before));
    for (ours, known) in extents(ours, nodesize).iter().zip(known) {
        assert_eq!((ours.extent, &ours.refs, ours.item.refs), (known.extent, &known.refs, known.item.refs));
        assert_eq!((ours.has_keyed, ours.item.flags), (known.has_keyed, known.item.flags));
    }
}

#[test]
fn images_of_the_kernel_add_up() {
    if !capability::kernel_oracle() {
        return;
    }
    for spec in KernelImageSpec::matrix() {
        let name = spec.name;
        let made = KernelImage::rich(spec, 11).expect("made");
        let device = FileDevice::open(made.image.path(), Access::ReadOnly).expect("free");
        let device: Arc<dyn Device> = Arc::new(device);
        let engine =
            Engine::open(vec![device], EngineOptions { read_only: true, ..EngineOptions::default() }).expect(name);
        let extent_root = engine.tree(RootId::EXTENT_TREE).expect("readable").expect("there").root_ptr();
        let extent_items = items(&engine, &extent_root);
        let known = extents(&extent_items, engine.geometry().nodesize);
        let groups = engine.space.block_groups();
        let nr_bitmaps = check_free_space(&engine, &groups, &known, &extent_root);
        let nr_csums = check_csums(&engine, &known);
        check_csum_changes(&engine);
        check_refs(&engine, &extent_items, &known);
        let nr_keyed = known.iter().filter(|known| known.has_keyed).count();
        let nr_shared = known.iter().filter(|known| known.refs.len() > 1).count();
        println!(
            "{name}: {} groups, {nr_bitmaps} bitmaps, {} extents, {nr_shared} shared, {nr_keyed} with keyed refs, {nr_csums} csums",
            groups.len(),
            known.len()
        );
        assert!(nr_csums > 0 && !known.is_empty());
    }
}
