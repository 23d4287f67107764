//! Tests with blocks and superblocks that mkfs.btrfs and the kernel wrote: all pass the checks, items of the main types
//! survive decoding and encoding, and the hashes in keys equal the computed hashes.

use crate::common::{Image, cannot_run, fill_richly, items, kernel_image};
use ubtrfs_format::check::{CheckContext, ExpectedBlock, check_node};
use ubtrfs_format::hash::{extent_data_ref_hash, extref_hash, name_hash};
use ubtrfs_format::item::{DirItem, ExtentDataRef, ExtentItem, FileExtent, InlineRef, InodeExtref, InodeItem};
use ubtrfs_format::item::{InodeRef, RootItem, RootRef};
use ubtrfs_format::node::{HEADER_SIZE, ITEM_HEAD_SIZE};
use ubtrfs_format::{KeyType, Logical, RootId, check_superblock};

const MKFS_VARIANTS: [&[&str]; 6] = [
    &["--csum", "crc32c"],
    &["--csum", "xxhash", "-n", "4096"],
    &["--csum", "sha256", "-n", "65536"],
    &["--csum", "blake2", "-n", "32768"],
    &["-O", "^no-holes,^skinny-metadata,^extref", "-R", "^free-space-tree"],
    &["--mixed", "-m", "single", "-d", "single"],
];

fn each_variant(visit: &mut dyn FnMut(&Image)) {
    for (index, mkfs) in MKFS_VARIANTS.iter().enumerate() {
        let mount_options = if index % 2 == 0 { "compress=zstd" } else { "compress=lzo,noatime" };
        visit(&kernel_image(mkfs, mount_options, fill_richly));
    }
}

#[test]
fn blocks_of_the_kernel_pass_the_checks_and_survive_decoding_and_encoding() {
    if cannot_run().is_some() {
        return;
    }
    let mut types = std::collections::BTreeMap::<KeyType, usize>::new();
    each_variant(&mut |image| {
        check_superblock(&image.superblock, &image.superblock_raw).expect("superblock");
        assert_eq!(image.superblock.encode_with_csum(), image.superblock_raw);
        let ctx = CheckContext::new(&image.superblock);
        image.walk_all(&mut |tree, raw| {
            check_node(raw, &ctx.expecting(ExpectedBlock { tree: Some(tree), ..ExpectedBlock::default() }))
                .unwrap_or_else(|corrupt| panic!("{corrupt}"));
            for (key, data) in items(raw) {
                *types.entry(key.item_type).or_default() += 1;
                let mut again = Vec::new();
                match key.item_type {
                    KeyType::INODE_ITEM => again = InodeItem::decode(data).expect("inode").encode(),
                    KeyType::INODE_REF => {
                        InodeRef::decode_all(data).expect("refs").iter().for_each(|name| name.encode_into(&mut again));
                    }
                    KeyType::INODE_EXTREF => {
                        for name in InodeExtref::decode_all(data).expect("extrefs") {
                            assert_eq!(extref_hash(name.parent, &name.name), key.offset, "{key} in {tree}");
                            name.encode_into(&mut again);
                        }
                    }
                    KeyType::DIR_ITEM | KeyType::DIR_INDEX | KeyType::XATTR_ITEM => {
                        for entry in DirItem::decode_all(data).expect("entries") {
                            if key.item_type != KeyType::DIR_INDEX {
                                assert_eq!(name_hash(&entry.name), key.offset);
                            }
                            entry.encode_into(&mut again);
                        }
                    }
                    KeyType::EXTENT_DATA => again = FileExtent::decode(data).expect("extent").encode(),
                    KeyType::ROOT_ITEM => again = RootItem::decode(data).expect("root").encode(),
                    KeyType::ROOT_REF | KeyType::ROOT_BACKREF => again = RootRef::decode(data).expect("ref").encode(),
                    KeyType::EXTENT_ITEM | KeyType::METADATA_ITEM => {
                        again = ExtentItem::decode(key.item_type, data).expect("extent item").encode();
                    }
                    KeyType::EXTENT_DATA_REF => {
                        let data_ref = ExtentDataRef::decode(data).expect("data ref");
                        let hash = extent_data_ref_hash(data_ref.root, data_ref.objectid, data_ref.offset);
                        assert_eq!(hash, key.offset, "{key}");
                        again = InlineRef::decode_keyed(&key, data).expect("keyed ref").encode_keyed();
                    }
                    _ => continue,
                }
                assert_eq!(again, data, "{key} in {tree}");
            }
        });
    });
    for expected in [
        KeyType::INODE_EXTREF,
        KeyType::EXTENT_DATA_REF,
        KeyType::XATTR_ITEM,
        KeyType::ROOT_BACKREF,
        KeyType::METADATA_ITEM,
        KeyType::EXTENT_ITEM,
        KeyType::FREE_SPACE_EXTENT,
        KeyType::QGROUP_LIMIT,
        KeyType::UUID_KEY_SUBVOL,
    ] {
        assert!(types.contains_key(&expected), "no {expected:?} among {types:?}");
    }
}

#[test]
fn a_flipped_byte_is_an_error_and_never_a_panic() {
    if cannot_run().is_some() {
        return;
    }
    let image = kernel_image(&[], "compress=zstd", fill_richly);
    let mut seen = std::collections::BTreeSet::new();
    let (mut nr_flips, mut nr_unseen) = (0u32, 0u32);
    image.walk_all(&mut |tree, raw| {
        // Only one block of each tree and level is tested: together these blocks contain every structure. Subvolumes
        // other than the top level are skipped, because they hold the same structures as the top level.
        let is_copy = tree.is_subvolume() && tree != RootId::FS_TREE;
        if is_copy || !seen.insert((tree, raw[100])) {
            return;
        }
        let bytenr = ubtrfs_format::node::NodeView::new(raw).expect("a block").bytenr();
        let ctx = CheckContext::new(&image.superblock);
        let expected = ExpectedBlock { tree: Some(tree), bytenr: Some(bytenr), ..ExpectedBlock::default() };
        let (with_csum, without) = (ctx.expecting(expected), ctx.expecting(expected).with_csum(false));
        let mut raw = raw.to_vec();
        let gap = unused_bytes(&raw);
        for at in (0..raw.len()).filter(|at| !gap.contains(at)) {
            for flip in [0x01, 0x80] {
                raw[at] ^= flip;
                // Bytes 4 to 31 of the checksum field are unused, because the checksum has 4 bytes.
                assert!((4..32).contains(&at) || check_node(&raw, &with_csum).is_err());
                nr_flips += 1;
                nr_unseen += u32::from(check_node(&raw, &without).is_ok());
                if flip == 0x80 && at % 4 == 0 {
                    decode_everything(&raw);
                }
                raw[at] ^= flip;
            }
        }
    });
    assert!(nr_flips > 20_000 && nr_unseen < nr_flips);
}

/// The bytes between the heads and the data of a block.
fn unused_bytes(raw: &[u8]) -> std::ops::Range<usize> {
    let view = ubtrfs_format::node::NodeView::new(raw).expect("a block");
    let last = view.nritems() - 1;
    if view.is_leaf() {
        HEADER_SIZE + ITEM_HEAD_SIZE * (last + 1)..view.item_range(last).expect("data").start
    } else {
        101 + 33 * (last + 1)..raw.len()
    }
}

/// Decodes each item, valid or not.
fn decode_everything(raw: &[u8]) {
    let Ok(view) = ubtrfs_format::node::NodeView::new(raw) else { return };
    for slot in 0..view.nritems().min(4096) {
        let (Some(key), Some(data)) = (view.key(slot), view.item(slot)) else { continue };
        let _ = InodeItem::decode(data);
        let _ = InodeRef::decode_all(data);
        let _ = InodeExtref::decode_all(data);
        let _ = DirItem::decode_all(data);
        let _ = FileExtent::decode(data);
        let _ = RootItem::decode_any(data);
        let _ = RootRef::decode(data);
        let _ = ExtentItem::decode(key.item_type, data);
        let _ = InlineRef::decode_keyed(&key, data);
        let _ = ubtrfs_format::item::ChunkItem::decode(data);
    }
}

#[test]
fn a_tree_of_another_owner_or_address_is_refused() {
    if cannot_run().is_some() {
        return;
    }
    let image = kernel_image(&[], "noatime", |_| {});
    let raw = image.read(image.superblock.root.0, 16384);
    let ctx = CheckContext::new(&image.superblock);
    let check = |expected| check_node(&raw, &ctx.expecting(expected));
    let here = Logical(image.superblock.root.0);
    check(ExpectedBlock {
        bytenr: Some(here),
        tree: Some(RootId::ROOT_TREE),
        level: Some(0),
        ..ExpectedBlock::default()
    })
    .expect("the root tree");
    check(ExpectedBlock { tree: Some(RootId::EXTENT_TREE), ..ExpectedBlock::default() }).expect_err("wrong owner");
    check(ExpectedBlock { tree: Some(RootId::FS_TREE), ..ExpectedBlock::default() }).expect_err("not a subvolume");
    check(ExpectedBlock { bytenr: Some(Logical(here.0 + 16384)), ..ExpectedBlock::default() })
        .expect_err("wrong address");
    check(ExpectedBlock { level: Some(1), ..ExpectedBlock::default() }).expect_err("wrong level");
    check(ExpectedBlock { generation: Some(ubtrfs_format::Generation(1)), ..ExpectedBlock::default() })
        .expect_err("wrong generation");
    check(ExpectedBlock { first_key: Some(ubtrfs_format::Key::MIN), ..ExpectedBlock::default() })
        .expect_err("wrong first key");
}
