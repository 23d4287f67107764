//! Compares backrefs of images that Linux made with a walk down from every subvolume. Also tests crafted references.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::item::{ExtentFlags, ExtentItem, InlineRef};
use ubtrfs_format::{Generation, Ino, Key, KeyType, Logical, RootId};
use ubtrfs_space::Extent;
use ubtrfs_testkit::{Image, LoopMount, Rng, capability, run};
use ubtrfs_tree::{Cursor, Node, NodePtr, NodeSource};

use super::inodes::{ExtentUse, inodes_of};
use super::refs::read_refs;
use super::roots::RootsOf;
use super::shared::SharedExtents;
use super::view::{SubvolumeRoot, TreesView};
use crate::handle::trans_handle::regular_extent;
use crate::test_tree::TestTree;
use crate::{Engine, EngineOptions};

#[derive(Default)]
struct Walked {
    roots: BTreeMap<u64, BTreeSet<RootId>>,
    uses: BTreeMap<u64, BTreeSet<ExtentUse>>,
}

impl Walked {
    fn below(&mut self, view: &TreesView<'_>, id: RootId, ptr: &NodePtr) {
        self.roots.entry(ptr.bytenr.0).or_default().insert(id);
        let node = view.source().read_node(ptr).expect("readable");
        for slot in 0..node.nritems() {
            if !node.is_leaf() {
                self.below(view, id, &node.child_ptr(slot, id));
                continue;
            }
            let key = node.key(slot);
            if key.item_type != KeyType::EXTENT_DATA {
                continue;
            }
            let Some(item) = regular_extent(node.item(slot)) else { continue };
            self.roots.entry(item.disk_bytenr.0).or_default().insert(id);
            self.uses.entry(item.disk_bytenr.0).or_default().insert(ExtentUse {
                root: id,
                ino: Ino(key.objectid),
                file_offset: key.offset,
                extent_offset: item.offset,
                len_bytes: item.num_bytes,
                compressed: false,
            });
        }
    }
}

/// Ids of all subvolumes.
fn subvolumes(engine: &Engine) -> Vec<RootId> {
    let roots = engine.own_tree(RootId::ROOT_TREE).expect("there");
    let items = roots.range(&Key::MIN, &Key::MAX, usize::MAX).expect("readable");
    let ids = items.iter().filter(|(key, _)| key.item_type == KeyType::ROOT_ITEM).map(|(key, _)| RootId(key.objectid));
    ids.filter(|id| id.is_subvolume()).collect()
}

/// Compares the roots and inodes of every extent with a walk through all subvolumes. Returns the number of extents that
/// any subvolume reaches, and the number of extents that several subvolumes reach.
pub(crate) fn compare_with_walk(engine: &Engine) -> (usize, usize) {
    let view = TreesView::committed(engine).expect("readable");
    let mut walked = Walked::default();
    for id in subvolumes(engine) {
        let root = view.subvolume(id).expect("readable").expect("there");
        walked.below(&view, id, &root.ptr.node_ptr());
    }
    let (nodesize, extent_root) = (view.nodesize(), *view.extent_root());
    let mut roots = RootsOf::new(view);
    let mut cursor = Cursor::new(roots.view().source(), extent_root);
    let mut key = cursor.seek_ge(&Key::MIN).expect("readable");
    let (mut nr_extents, mut nr_shared) = (0, 0);
    while let Some(at) = key {
        if !matches!(at.item_type, KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM) {
            key = cursor.next().expect("readable");
            continue;
        }
        let len = if at.item_type == KeyType::METADATA_ITEM { nodesize } else { at.offset };
        let extent = read_refs(&mut cursor, &at, len).expect("valid");
        key = cursor.key();
        let found: Vec<RootId> = roots.of_refs(&extent).expect("valid").to_vec();
        let expected = walked.roots.get(&extent.bytenr.0).cloned().unwrap_or_default();
        assert_eq!(found, expected.iter().copied().collect::<Vec<_>>(), "extent {}", extent.bytenr);
        nr_extents += usize::from(!found.is_empty());
        nr_shared += usize::from(found.len() > 1);
        if extent.level.is_none() {
            let among = |roots: &mut RootsOf<'_>, limit: &[RootId]| {
                let extent = Extent::new(extent.bytenr, extent.len_bytes);
                roots.of_data_among(extent, limit).expect("valid").to_vec()
            };
            let more: Vec<RootId> = found.iter().copied().chain([RootId(1 << 20)]).collect();
            assert_eq!((among(&mut roots, &found), among(&mut roots, &more)), (found.clone(), found.clone()));
            let mut uses = BTreeSet::new();
            inodes_of(&mut roots, &extent, &mut |used| {
                uses.insert(used);
                true
            })
            .expect("valid");
            let expected = walked.uses.remove(&extent.bytenr.0).unwrap_or_default();
            let other = uses.symmetric_difference(&expected).next();
            assert_eq!(other, None, "extent {}, {} of {} uses", extent.bytenr, uses.len(), expected.len());
        }
    }
    (nr_extents, nr_shared)
}

pub(crate) fn open(image: &Image) -> Arc<Engine> {
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image.path(), Access::ReadWrite).expect("there"));
    Engine::open(vec![device], EngineOptions::default()).expect("opened")
}

#[test]
fn every_extent_of_linux_leads_to_the_subvolumes_and_inodes_that_reach_it() {
    if !capability::kernel_oracle() {
        return;
    }
    let seed = Rng::seed_or(16);
    eprintln!("UBTRFS_SEED={seed}");
    let mut rng = Rng::new(seed);
    let image = Image::kernel_made(1 << 30, &["-n", "4096"]).expect("made");
    let mount = LoopMount::new(image.path(), "").expect("mounted");
    let mut script = String::from(
        "btrfs -q subvolume create s0; mkdir s0/d
        for f in $(seq 300); do head -c $((f * 40)) /dev/urandom > s0/d/f$f; done
        head -c 3000000 /dev/urandom > s0/big; sync
        for at in $(seq 0 7 700); do head -c 4096 /dev/urandom | dd of=s0/big bs=4096 seek=$at conv=notrunc status=none; done
        sync\n",
    );
    let mut alive = vec![0];
    for number in 1..14 {
        let source = alive[rng.below(alive.len() as u64) as usize];
        script += &format!("btrfs -q subvolume snapshot s{source} s{number}\n");
        alive.push(number);
        for _ in 0..3 {
            let at = alive[rng.below(alive.len() as u64) as usize];
            let file = 1 + rng.below(300);
            script += &match rng.below(4) {
                0 => format!("rm -f s{at}/d/f{file}\n"),
                1 => format!("cp --reflink=always s{source}/big s{at}/copy{number}-{file}\n"),
                2 => format!("head -c 9000 /dev/urandom > s{at}/d/f{file}\n"),
                _ => format!(
                    "head -c 20000 /dev/urandom | dd of=s{at}/big bs=1000 seek={} conv=notrunc status=none\n",
                    rng.below(3000)
                ),
            };
        }
        if rng.below(4) == 0 && alive.len() > 2 {
            let gone = alive.remove(rng.below(alive.len() as u64) as usize);
            script += &format!("btrfs -q subvolume delete s{gone}\n");
        }
        if rng.below(3) == 0 {
            script += "sync\n";
        }
    }
    script += "btrfs subvolume sync . > /dev/null\n";
    run("bash", ["-ec", &format!("cd {} && {script}", mount.path().display())]).expect("made");
    mount.close().expect("unmounted");
    let engine = open(&image);
    let (nr_extents, nr_shared) = compare_with_walk(&engine);
    assert!(nr_extents > 500 && nr_shared > 100, "{nr_extents} extents, {nr_shared} shared");
}

/// Counts the nodes that a search visits.
struct CountingSource<'s> {
    inner: &'s dyn NodeSource,
    nr_visits: AtomicU64,
}

impl NodeSource for CountingSource<'_> {
    fn read_node(&self, ptr: &NodePtr) -> ubtrfs_error::Result<Arc<Node>> {
        self.nr_visits.fetch_add(1, Ordering::Relaxed);
        self.inner.read_node(ptr)
    }

    fn nodesize(&self) -> usize {
        self.inner.nodesize()
    }
}

#[test]
fn extents_of_many_snapshots_are_searched_once() {
    if !capability::kernel_oracle() {
        return;
    }
    const NR_SECTORS: usize = 4000;
    let image = Image::kernel_made(1 << 30, &["-n", "4096"]).expect("made");
    let mount = LoopMount::new(image.path(), "noatime").expect("mounted");
    run("btrfs", ["-q", "subvolume", "create", &mount.join("s0").to_string_lossy()]).expect("made");
    let file = std::fs::File::create(mount.join("s0/f")).expect("made");
    let mut rng = Rng::new(3);
    for at in 0..NR_SECTORS {
        std::os::unix::fs::FileExt::write_all_at(&file, &rng.bytes(4096), at as u64 * 8192).expect("written");
    }
    for number in 1..17 {
        let (from, to) = (mount.join("s0"), mount.join(format!("s{number}")));
        run("btrfs", ["-q", "subvolume", "snapshot", &from.to_string_lossy(), &to.to_string_lossy()]).expect("made");
        for _ in 0..8 {
            let at = rng.below(NR_SECTORS as u64) * 8192;
            std::os::unix::fs::FileExt::write_all_at(&file, &rng.bytes(4096), at).expect("written");
        }
    }
    drop(file);
    mount.close().expect("unmounted");

    let engine = open(&image);
    let view = || TreesView::committed(&engine).expect("readable");
    let mut walked = Walked::default();
    let mut extents = BTreeMap::new();
    for id in subvolumes(&engine) {
        let tree = engine.tree(id).expect("readable").expect("there");
        let items = tree.range(&Key::MIN, &Key::MAX, usize::MAX).expect("readable");
        let of_file: BTreeSet<(Logical, u64)> = items
            .iter()
            .filter(|(key, _)| key.item_type == KeyType::EXTENT_DATA)
            .filter_map(|(_, value)| regular_extent(value))
            .map(|item| (item.disk_bytenr, item.disk_num_bytes))
            .collect();
        extents.insert(id, of_file.into_iter().collect::<Vec<_>>());
        let view = view();
        let root = view.subvolume(id).expect("readable").expect("there");
        walked.below(&view, id, &root.ptr.node_ptr());
    }
    let source = CountingSource { inner: view().source(), nr_visits: AtomicU64::new(0) };
    let (mut known, mut visits) = (SharedExtents::new(64 << 20), Vec::new());
    for of_file in extents.values().filter(|of_file| !of_file.is_empty()) {
        for batch in of_file.chunks(500) {
            let found = known.search(view().with_source(&source), Generation(1), batch).expect("readable");
            for ((bytenr, _), is_shared) in batch.iter().zip(found) {
                assert_eq!(is_shared, walked.uses[&bytenr.0].len() > 1, "extent {bytenr}");
            }
        }
        visits.push(source.nr_visits.swap(0, Ordering::Relaxed));
    }
    println!("{visits:?} nodes visited for {NR_SECTORS} extents");
    assert_eq!(visits.len(), 17);
    // Each snapshot has only a few extents that the first file does not have.
    let (first, others) = (visits[0], visits[1..].iter().sum::<u64>());
    assert!(first < 12 * NR_SECTORS as u64 && others < first / 4, "{visits:?}");
    // After another commit, everything is searched again.
    let of_file = &extents[&RootId(256)];
    known.search(view().with_source(&source), Generation(2), of_file).expect("readable");
    assert!(source.nr_visits.into_inner() > first / 2);
}

/// An extent tree with tree blocks at these addresses and levels, each with one reference by a parent's address.
fn crafted(blocks: &[(u64, u8, u64)]) -> TestTree {
    let mut tree = TestTree::new(RootId::EXTENT_TREE, 4096);
    for &(bytenr, level, parent) in blocks {
        let item = ExtentItem {
            refs: 1,
            generation: Generation(1),
            flags: ExtentFlags::TREE_BLOCK,
            tree_block: None,
            inline_refs: vec![InlineRef::SharedBlock(Logical(parent))],
        };
        tree.items.insert(Key::new(bytenr, KeyType::METADATA_ITEM, level.into()), item.encode());
    }
    tree
}

fn roots_in(tree: &TestTree, bytenr: u64) -> ubtrfs_error::Result<Vec<RootId>> {
    let nodes = tree.build();
    let none: [SubvolumeRoot; 0] = [];
    let mut roots = RootsOf::new(TreesView::fixed(&nodes, nodes.root, none));
    roots.of_extent(Extent::new(Logical(bytenr), 4096), true).map(|set| set.to_vec())
}

#[test]
fn references_that_lead_in_a_circle_are_an_error() {
    for blocks in [
        &[(4096, 0, 8192), (8192, 1, 4096)][..],
        &[(4096, 0, 8192), (8192, 0, 4096)],
        &[(4096, 7, 8192), (8192, 8, 4096)],
        &[(4096, 3, 1 << 40)],
    ] {
        assert!(roots_in(&crafted(blocks), 4096).is_err(), "{blocks:?}");
    }
    assert_eq!(roots_in(&crafted(&[]), 4096).expect("absent"), []);
}

#[test]
fn counts_that_do_not_add_up_are_an_error() {
    let mut tree = crafted(&[]);
    let item = ExtentItem {
        refs: 2,
        generation: Generation(1),
        flags: ExtentFlags::TREE_BLOCK,
        tree_block: None,
        inline_refs: vec![InlineRef::TreeBlock(RootId(300))],
    };
    tree.items.insert(Key::new(4096, KeyType::METADATA_ITEM, 0), item.encode());
    assert!(roots_in(&tree, 4096).is_err());
}

#[test]
fn references_of_trees_that_do_not_exist_lead_nowhere() {
    let mut tree = crafted(&[]);
    let mut inline_refs = vec![InlineRef::TreeBlock(RootId(300)), InlineRef::TreeBlock(RootId::EXTENT_TREE)];
    inline_refs.sort_by_key(|inline| std::cmp::Reverse(inline.key_offset()));
    let item = ExtentItem {
        refs: 2,
        generation: Generation(1),
        flags: ExtentFlags::TREE_BLOCK,
        tree_block: None,
        inline_refs,
    };
    tree.items.insert(Key::new(4096, KeyType::METADATA_ITEM, 0), item.encode());
    assert_eq!(roots_in(&tree, 4096).expect("valid"), []);
}
