//! Compares printed blocks with the output of `btrfs inspect-internal`: for kernel images, and for a block that holds
//! many types of items with unusual values.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::{Image, cannot_run, fill_richly, kernel_image, run};
use ubtrfs_format::item::{DirItem, ExtentDataRef, ExtentFlags, ExtentItem, InlineRef, TreeBlockInfo};
use ubtrfs_format::node::{LeafBuilder, NodeHeader, NodeView, finish_block};
use ubtrfs_format::print::{PrintOptions, node_json, print_node, print_superblock, superblock_json};
use ubtrfs_format::{Generation, Ino, Key, KeyType, Logical, RootId};

type Items = Vec<(Key, Vec<u8>)>;

/// Items of many types, for one leaf although they belong to different trees.
fn unusual_items() -> Items {
    let mut items = Items::new();
    let mut put = |objectid: u64, item_type: KeyType, offset: u64, data: Vec<u8>| {
        items.push((Key::new(objectid, item_type, offset), data));
    };
    // Arbitrary bytes. Times do not use these bytes, because the years would not fit into a date.
    let numbers = |len: usize| (0..len).map(|at| u8::try_from(at * 7 % 251).expect("small")).collect::<Vec<u8>>();
    let special = |id: i64| u64::from_ne_bytes(id.to_ne_bytes());
    for flags in [0u64, 0xfff, 1 << 31, 1 << 32, 0xffff_f000, u64::MAX] {
        let mut inode = numbers(160);
        inode[112..].fill(0);
        inode[64..72].copy_from_slice(&flags.to_le_bytes());
        put(300 + flags % 97, KeyType::INODE_ITEM, 0, inode);
    }
    for (mode, rdev) in [(0o120_777u32, 0u64), (0o060_660, 0x0010_0005), (0o020_600, u64::MAX), (0o7777, 1)] {
        let mut inode = vec![0; 160];
        inode[52..56].copy_from_slice(&mode.to_le_bytes());
        inode[56..64].copy_from_slice(&rdev.to_le_bytes());
        inode[112..120].copy_from_slice(&(-86_401i64).to_le_bytes());
        inode[124..132].copy_from_slice(&4_107_542_400i64.to_le_bytes());
        put(500 + u64::from(mode), KeyType::INODE_ITEM, 7, inode);
    }
    let entry = |location: Key, file_type: u8, name: &[u8], data: &[u8]| {
        let entry = DirItem { location, transid: Generation(9), file_type, name: name.to_vec(), data: data.to_vec() };
        let mut out = Vec::new();
        entry.encode_into(&mut out);
        out
    };
    for file_type in [0, 1, 5, 6, 8, 9, 0x81, 255] {
        let location = Key::new(256, KeyType::INODE_ITEM, 0);
        put(600, KeyType::DIR_INDEX, file_type.into(), entry(location, file_type, b"a \"name\"\\", b""));
    }
    let two = [entry(Key::MIN, 8, b"user.a", b"value"), entry(Key::MIN, 8, "user.\u{fc}".as_bytes(), b"")].concat();
    put(600, KeyType::XATTR_ITEM, 5, two);
    let location = Key::new(special(-9), KeyType::ROOT_ITEM, u64::MAX);
    put(600, KeyType::DIR_ITEM, 5, entry(location, 2, b"name", b""));
    put(600, KeyType::DIR_LOG_ITEM, 5, 77u64.to_le_bytes().to_vec());
    put(600, KeyType::DIR_LOG_INDEX, 5, 78u64.to_le_bytes().to_vec());
    put(600, KeyType::VERITY_DESC_ITEM, 0, numbers(16));
    put(600, KeyType::VERITY_DESC_ITEM, 1, numbers(40));
    put(600, KeyType::VERITY_MERKLE_ITEM, 4096, numbers(64));
    for (slot, (kind, compression)) in [(0u8, 1u8), (0, 9), (1, 2), (1, 200), (2, 0), (3, 1), (9, 3)].iter().enumerate()
    {
        let mut extent = numbers(53);
        extent[16] = *compression;
        extent[20] = *kind;
        put(601, KeyType::EXTENT_DATA, u64::try_from(slot).expect("small"), extent);
    }
    put(special(-10), KeyType::EXTENT_CSUM, 1 << 20, numbers(20));
    for (id, offset) in [(special(-8), 256), (special(-8), special(-9)), (special(-6), 5), (12, 0), (11, 0)] {
        put(id, KeyType::ROOT_ITEM, offset, numbers(439));
    }
    let mut root = vec![0; 439];
    root[208..216].copy_from_slice(&((1u64 << 48) | 3).to_le_bytes());
    root[220..237].copy_from_slice(&Key::new(5, KeyType::DIR_ITEM, 9).encode());
    put(602, KeyType::ROOT_ITEM, 9, root);
    put(603, KeyType::ROOT_ITEM, 0, vec![1; 239]);
    for flags in [1u64, 2, 0x102, 0x101, 3, 0] {
        let item = ExtentItem {
            refs: 7,
            generation: Generation(3),
            flags: ExtentFlags::from_bits_retain(flags),
            tree_block: (flags & 2 != 0).then_some(TreeBlockInfo { key: Key::new(1, KeyType::DEV_ITEM, 2), level: 3 }),
            inline_refs: vec![
                InlineRef::TreeBlock(RootId(special(-9))),
                InlineRef::SharedBlock(Logical(8192)),
                InlineRef::ExtentData(ExtentDataRef {
                    root: RootId(1),
                    objectid: Ino(5),
                    offset: special(-4096),
                    count: 2,
                }),
                InlineRef::SharedData { parent: Logical(4096), count: 3 },
            ],
        };
        put(4096, KeyType::EXTENT_ITEM, flags, item.encode());
    }
    let skinny = ExtentItem {
        refs: 1,
        generation: Generation(3),
        flags: ExtentFlags::TREE_BLOCK | ExtentFlags::FULL_BACKREF,
        tree_block: None,
        inline_refs: vec![InlineRef::SharedBlock(Logical(5))],
    };
    put(4096, KeyType::METADATA_ITEM, 1, skinny.encode());
    put(4096, KeyType::TREE_BLOCK_REF, 5, Vec::new());
    put(4096, KeyType::SHARED_BLOCK_REF, 8192, Vec::new());
    put(4096, KeyType::EXTENT_DATA_REF, 8192, numbers(28));
    put(4096, KeyType::SHARED_DATA_REF, 8192, numbers(4));
    for flags in [0u64, 1, 4 | 8, 1 | 64, 1 << 8, 1 << 9, 1 << 10 | 2, 1 << 5 | 7] {
        let item = [10u64, 256, flags].map(u64::to_le_bytes).concat();
        put(1 << 20, KeyType::BLOCK_GROUP_ITEM, flags, item);
    }
    put(1 << 20, KeyType::FREE_SPACE_INFO, 4096, numbers(8));
    put(1 << 20, KeyType::FREE_SPACE_EXTENT, 4096, Vec::new());
    put(1 << 20, KeyType::FREE_SPACE_BITMAP, 4096 * 16, vec![0x0f, 0x80]);
    put(2, KeyType::DEV_EXTENT, 5, numbers(48));
    put(1, KeyType::DEV_ITEM, 5, numbers(98));
    let mut chunk = numbers(48 + 64);
    chunk[24..32].copy_from_slice(&(2u64 | 1 << 9).to_le_bytes());
    chunk[44..46].copy_from_slice(&2u16.to_le_bytes());
    put(256, KeyType::CHUNK_ITEM, 5, chunk);
    for flags in [0u64, 1, 2, 3, 4, 7, 8, 15, 16, u64::MAX] {
        let status = [1, 2, flags, 4, 5].map(u64::to_le_bytes).concat();
        put(0, KeyType::QGROUP_STATUS, flags, status);
        put(0, KeyType::QGROUP_LIMIT, flags << 44, [flags, 2, 3, 4, u64::MAX].map(u64::to_le_bytes).concat());
    }
    put(0, KeyType::QGROUP_INFO, 1 << 48 | 5, numbers(40));
    put(256, KeyType::QGROUP_RELATION, 1 << 48 | 5, Vec::new());
    put(special(-4), KeyType::TEMPORARY_ITEM, 0, numbers(448));
    put(7, KeyType::TEMPORARY_ITEM, 0, vec![0; 4]);
    put(0, KeyType::PERSISTENT_ITEM, 3, numbers(40));
    put(9, KeyType::PERSISTENT_ITEM, 3, numbers(40));
    put(0, KeyType::DEV_REPLACE, 0, vec![0; 80]);
    put(u64::MAX / 3, KeyType::UUID_KEY_SUBVOL, 3, [256u64, 257].map(u64::to_le_bytes).concat());
    put(u64::MAX / 3, KeyType::UUID_KEY_RECEIVED_SUBVOL, 3, 5u64.to_le_bytes().to_vec());
    put(3, KeyType::STRING_ITEM, 3, b"some string".to_vec());
    put(3, KeyType(77), 3, numbers(8));
    put(special(-11), KeyType(0), 4096, [&Key::new(300, KeyType::INODE_ITEM, 0).encode()[..], &numbers(24)].concat());
    put(8, KeyType(0), 4096, numbers(8));
    put(special(-5), KeyType::ORPHAN_ITEM, special(-9), Vec::new());
    for id in
        [special(-1), special(-2), special(-3), special(-7), special(-12), special(-13), special(-255), special(-256)]
    {
        put(id, KeyType::ORPHAN_ITEM, 0, Vec::new());
    }
    items.sort_by_key(|(key, _)| *key);
    items
}

/// Replaces the top-level subvolume's root by a leaf of these items. Returns the leaf and the number of items that fit.
fn plant(image: &Path, at: &Image, items: &[(Key, Vec<u8>)]) -> (Vec<u8>, usize) {
    let (_, bytenr) = at.trees().into_iter().find(|(tree, _)| *tree == RootId::FS_TREE).expect("a top level");
    let nodesize = usize::try_from(at.superblock.nodesize).expect("small");
    let old = at.read(bytenr, nodesize);
    let view = NodeView::new(&old).expect("a block");
    let mut leaf = LeafBuilder::new(nodesize);
    let nr_fit = items.iter().take_while(|(key, data)| leaf.push(key, data)).count();
    let mut raw = leaf.finish(&NodeHeader {
        fsid: view.fsid(),
        chunk_tree_uuid: view.chunk_tree_uuid(),
        bytenr: Logical(bytenr),
        generation: view.generation(),
        owner: view.owner(),
        level: 0,
        flags: 0,
    });
    finish_block(&mut raw, at.superblock.csum_type().expect("known"));
    let file = OpenOptions::new().write(true).open(image).expect("image");
    for physical in at.copies(bytenr) {
        file.write_all_at(&raw, physical).expect("write");
    }
    (raw, nr_fit)
}

/// Splits the output of btrfs-progs into blocks by address. A shared block has equal text in each tree.
fn blocks_of(dump: &str) -> BTreeMap<u64, String> {
    let mut blocks = BTreeMap::new();
    let mut current: Option<(u64, String)> = None;
    for line in dump.lines() {
        let head = line.strip_prefix("leaf ").or_else(|| line.strip_prefix("node "));
        let is_head = head.is_some_and(|head| !head.contains(" flags "));
        let inside = line.starts_with('\t') || line.starts_with("fs uuid") || line.starts_with("chunk uuid");
        if is_head || !(inside || head.is_some()) {
            blocks.extend(current.take());
        }
        if let Some(head) = head.filter(|_| is_head) {
            let bytenr = head.split(' ').next().and_then(|bytenr| bytenr.parse().ok()).expect("an address");
            current = Some((bytenr, String::new()));
        }
        if let Some((_, text)) = &mut current {
            text.push_str(line);
            text.push('\n');
        }
    }
    blocks.extend(current);
    blocks
}

fn dump_tree(image: &Image, options: &[&str]) -> String {
    let path = image.path.to_str().expect("UTF-8 path");
    run("btrfs", &[&["inspect-internal", "dump-tree"], options, &[path]].concat())
}

fn printed(raw: &[u8], options: &PrintOptions) -> String {
    let mut text = String::new();
    print_node(raw, options, &mut text).expect("writing to a string");
    text
}

/// Compares two texts line by line, to show the first line that differs.
fn assert_same_text(ours: &str, theirs: &str) {
    for (index, (ours, theirs)) in ours.lines().zip(theirs.lines()).enumerate() {
        assert_eq!(ours, theirs, "line {index}");
    }
    assert_eq!(ours.lines().count(), theirs.lines().count());
}

#[test]
fn unusual_items_print_as_btrfs_progs_prints_them() {
    if cannot_run().is_some() {
        return;
    }
    let image = kernel_image(&["-n", "65536"], "noatime", |_| {});
    let items = unusual_items();
    let (raw, nr_fit) = plant(&image.path, &image, &items);
    assert_eq!(nr_fit, items.len());
    let theirs = dump_tree(&image, &["-t", "5"]);
    let bytenr = NodeView::new(&raw).expect("a block").bytenr().0;
    let options = PrintOptions::new(&image.superblock);
    assert_same_text(&printed(&raw, &options), &blocks_of(&theirs)[&bytenr]);
    // The JSON form of the block has all items too.
    let json = node_json(&raw, &options);
    assert_eq!(json["items"].as_array().expect("items").len(), items.len());
}

#[test]
fn blocks_and_superblocks_of_the_kernel_print_as_btrfs_progs_prints_them() {
    if cannot_run().is_some() {
        return;
    }
    let variants: [&[&str]; 3] = [
        &["--csum", "crc32c", "-L", "a label"],
        &["--csum", "xxhash", "-O", "^no-holes,^skinny-metadata", "-R", "^free-space-tree"],
        &["--csum", "sha256", "--mixed", "-m", "single", "-d", "single"],
    ];
    for mkfs in variants {
        let image = kernel_image(mkfs, "compress=zstd", fill_richly);
        for dump_options in [&[][..], &["--csum-headers", "--csum-items"]] {
            let is_rich = !dump_options.is_empty();
            let options =
                PrintOptions { csum_headers: is_rich, csum_items: is_rich, ..PrintOptions::new(&image.superblock) };
            let theirs = blocks_of(&dump_tree(&image, dump_options));
            let mut nr_blocks = 0;
            image.walk_all(&mut |_, raw| {
                let bytenr = NodeView::new(raw).expect("a block").bytenr().0;
                assert_same_text(&printed(raw, &options), &theirs[&bytenr]);
                assert_eq!(node_json(raw, &options)["bytenr"], bytenr);
                nr_blocks += 1;
            });
            assert!(nr_blocks > 20);
        }
        let path = image.path.to_str().expect("UTF-8 path");
        for full in [false, true] {
            let mut ours = format!("superblock: bytenr=65536, device={path}\n{}\n", "-".repeat(57));
            print_superblock(&image.superblock_raw, full, &mut ours).expect("writing to a string");
            let flag: &[&str] = if full { &["-f"] } else { &[] };
            let theirs = run("btrfs", &[&["inspect-internal", "dump-super"], flag, &[path]].concat());
            assert_same_text(&ours, &theirs);
        }
        assert_eq!(superblock_json(&image.superblock_raw)["csum_matches"], true);
    }
}
