//! Decoded structures encode to the original bytes, unknown bits included, and no bytes make a decoder, the checker or
//! the printer panic. Method: random bytes and random structures (proptest).

use proptest::collection::vec;
use proptest::prelude::*;
use ubtrfs_format::check::{CheckContext, check_node};
use ubtrfs_format::item::*;
use ubtrfs_format::node::{LeafBuilder, NodeBuilder, NodeHeader, NodeView, finish_block, verify_csum};
use ubtrfs_format::print::{PrintOptions, node_json, print_node, print_superblock, superblock_json};
use ubtrfs_format::superblock::{SUPERBLOCK_SIZE, Superblock};
use ubtrfs_format::{CsumType, DevId, Generation, Ino, Key, KeyType, Logical, Physical, RootId, check_superblock};

/// Checks that random bytes of fixed layouts survive decoding and encoding.
macro_rules! fixed_layouts {
    ($($name:ident: $structure:ty),* $(,)?) => {
        proptest! {
            $(#[test]
            fn $name(raw in vec(any::<u8>(), <$structure>::SIZE)) {
                prop_assert_eq!(<$structure>::decode(&raw).unwrap().encode(), raw.clone());
                prop_assert!(<$structure>::decode(&raw[..raw.len() - 1]).is_err());
            })*
        }
    };
}

fixed_layouts! {
    inode_items_survive: InodeItem,
    root_items_survive: RootItem,
    dev_items_survive: DevItem,
    dev_extents_survive: DevExtent,
    dev_stats_survive: DevStatsItem,
    block_group_items_survive: BlockGroupItem,
    free_space_infos_survive: FreeSpaceInfo,
    free_space_headers_survive: FreeSpaceHeader,
    qgroup_statuses_survive: QgroupStatus,
    qgroup_infos_survive: QgroupInfo,
    qgroup_limits_survive: QgroupLimit,
    extent_data_refs_survive: ExtentDataRef,
    tree_block_infos_survive: TreeBlockInfo,
    superblocks_survive: Superblock,
}

fn key() -> impl Strategy<Value = Key> {
    (any::<u64>(), any::<u8>(), any::<u64>())
        .prop_map(|(objectid, kind, offset)| Key::new(objectid, KeyType(kind), offset))
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..300)
}

fn inline_ref() -> impl Strategy<Value = InlineRef> {
    let data_ref =
        (any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>()).prop_map(|(root, objectid, offset, count)| {
            InlineRef::ExtentData(ExtentDataRef { root: RootId(root), objectid: Ino(objectid), offset, count })
        });
    prop_oneof![
        any::<u64>().prop_map(|root| InlineRef::TreeBlock(RootId(root))),
        any::<u64>().prop_map(|parent| InlineRef::SharedBlock(Logical(parent))),
        data_ref,
        (any::<u64>(), any::<u32>())
            .prop_map(|(parent, count)| InlineRef::SharedData { parent: Logical(parent), count }),
        any::<u64>().prop_map(|root| InlineRef::Owner(RootId(root))),
    ]
}

fn regular() -> impl Strategy<Value = RegularExtent> {
    any::<[u64; 4]>().prop_map(|[bytenr, disk_num_bytes, offset, num_bytes]| RegularExtent {
        disk_bytenr: Logical(bytenr),
        disk_num_bytes,
        offset,
        num_bytes,
    })
}

proptest! {
    #[test]
    fn keys_survive_and_order_as_their_parts(a in key(), b in key()) {
        prop_assert_eq!(Key::decode(&a.encode()), a);
        let parts = |key: Key| (key.objectid, key.item_type.0, key.offset);
        prop_assert_eq!(a.cmp(&b), parts(a).cmp(&parts(b)));
        if let Some(next) = a.successor() {
            prop_assert!(next > a);
            prop_assert_eq!(next.predecessor(), Some(a));
        }
    }

    #[test]
    fn inode_refs_survive(names in vec((any::<u64>(), any::<u64>(), name()), 0..5)) {
        let (mut refs, mut extrefs) = (Vec::new(), Vec::new());
        for (index, parent, name) in names {
            refs.push(InodeRef { index, name: name.clone() });
            extrefs.push(InodeExtref { parent, index, name });
        }
        let (mut raw_refs, mut raw_extrefs) = (Vec::new(), Vec::new());
        refs.iter().for_each(|name| name.encode_into(&mut raw_refs));
        extrefs.iter().for_each(|name| name.encode_into(&mut raw_extrefs));
        prop_assert_eq!(InodeRef::decode_all(&raw_refs).unwrap(), refs);
        prop_assert_eq!(InodeExtref::decode_all(&raw_extrefs).unwrap(), extrefs);
    }

    #[test]
    fn dir_entries_survive(entries in vec((key(), any::<u64>(), any::<u8>(), name(), name()), 0..5)) {
        let entry = |(location, transid, file_type, name, data)| {
            DirItem { location, transid: Generation(transid), file_type, name, data }
        };
        let entries: Vec<DirItem> = entries.into_iter().map(entry).collect();
        let mut raw = Vec::new();
        entries.iter().for_each(|entry| entry.encode_into(&mut raw));
        prop_assert_eq!(DirItem::decode_all(&raw).unwrap(), entries);
    }

    #[test]
    fn root_refs_survive(dirid: u64, sequence: u64, name in name()) {
        let root_ref = RootRef { dirid, sequence, name };
        prop_assert_eq!(RootRef::decode(&root_ref.encode()).unwrap(), root_ref);
    }

    #[test]
    fn file_extents_survive(
        generation: u64, ram_bytes: u64, encryption: u8, other_encoding: u16,
        compression in 0..4u8, kind in 0..3u8, inline in name(), regular in regular(),
    ) {
        let extent = FileExtent {
            generation: Generation(generation),
            ram_bytes,
            compression: Compression::from_disk(compression).unwrap(),
            encryption,
            other_encoding,
            body: match kind {
                0 => FileExtentBody::Inline(inline),
                1 => FileExtentBody::Regular(regular),
                _ => FileExtentBody::Prealloc(regular),
            },
        };
        prop_assert_eq!(FileExtent::decode(&extent.encode()).unwrap(), extent);
    }

    #[test]
    fn extent_items_survive(
        refs: u64, generation: u64, flags: u64, level: u8, first in key(),
        is_skinny: bool, inline_refs in vec(inline_ref(), 0..8),
    ) {
        let flags = ExtentFlags::from_bits_retain(flags);
        let has_info = !is_skinny && flags.contains(ExtentFlags::TREE_BLOCK);
        let item = ExtentItem {
            refs,
            generation: Generation(generation),
            flags,
            tree_block: has_info.then_some(TreeBlockInfo { key: first, level }),
            inline_refs,
        };
        let item_type = if is_skinny { KeyType::METADATA_ITEM } else { KeyType::EXTENT_ITEM };
        prop_assert_eq!(&ExtentItem::decode(item_type, &item.encode()).unwrap(), &item);
        for inline in &item.inline_refs {
            let key = Key::new(1, inline.key_type(), inline.key_offset());
            prop_assert_eq!(InlineRef::decode_keyed(&key, &inline.encode_keyed()).unwrap(), *inline);
        }
    }

    #[test]
    fn chunk_items_survive(
        length: u64, owner: u64, stripe_len: u64, flags: u64, sizes: [u32; 3], sub_stripes: u16,
        stripes in vec((any::<u64>(), any::<u64>(), any::<u128>()), 0..6),
    ) {
        let stripe = |(devid, offset, uuid)| Stripe {
            devid: DevId(devid),
            offset: Physical(offset),
            dev_uuid: uuid::Uuid::from_u128(uuid),
        };
        let item = ChunkItem {
            length,
            owner,
            stripe_len,
            flags: BlockGroupFlags::from_bits_retain(flags),
            io_align: sizes[0],
            io_width: sizes[1],
            sector_size: sizes[2],
            sub_stripes,
            stripes: stripes.into_iter().map(stripe).collect(),
        };
        prop_assert_eq!(ChunkItem::decode(&item.encode()).unwrap(), item);
    }

    #[test]
    fn old_root_items_read_as_without_the_new_fields(raw in vec(any::<u8>(), RootItem::SIZE_V1)) {
        let item = RootItem::decode_any(&raw).unwrap();
        prop_assert_eq!(&item.encode()[..RootItem::SIZE_V1], &raw[..]);
        prop_assert!(item.uuid.is_nil());
    }

    #[test]
    fn leaves_return_the_items_put_into_them(
        items in proptest::collection::btree_map(key(), name(), 0..40), level in 1..8u8,
    ) {
        let header = NodeHeader { bytenr: Logical(1 << 20), generation: Generation(7), owner: RootId(300), ..NodeHeader::default() };
        let mut leaf = LeafBuilder::new(16384);
        let mut node = NodeBuilder::new(16384);
        for (key, data) in &items {
            prop_assert!(leaf.push(key, data));
            prop_assert!(node.push(key, Logical(key.offset), Generation(key.objectid)));
        }
        let (mut leaf, mut node) = (leaf.finish(&header), node.finish(&NodeHeader { level, ..header }));
        for csum_type in [CsumType::Crc32c, CsumType::Xxhash, CsumType::Sha256, CsumType::Blake2] {
            finish_block(&mut leaf, csum_type);
            prop_assert!(verify_csum(&leaf, csum_type).is_ok());
        }
        finish_block(&mut node, CsumType::Crc32c);
        let (leaf, node) = (NodeView::new(&leaf).unwrap(), NodeView::new(&node).unwrap());
        prop_assert_eq!((leaf.nritems(), node.nritems(), node.level()), (items.len(), items.len(), level));
        for (slot, (key, data)) in items.iter().enumerate() {
            prop_assert_eq!((leaf.key(slot), leaf.item(slot)), (Some(*key), Some(&data[..])));
            prop_assert_eq!(node.child(slot), Some((Logical(key.offset), Generation(key.objectid))));
            prop_assert_eq!(leaf.search(key), Ok(slot));
        }
        prop_assert_eq!((leaf.key(items.len()), leaf.item(items.len())), (None, None));
    }

    #[test]
    fn no_bytes_make_a_decoder_panic(kind: u8, raw in vec(any::<u8>(), 0..300)) {
        let key = Key::new(1, KeyType(kind), 3);
        let _ = (InodeRef::decode_all(&raw), InodeExtref::decode_all(&raw), DirItem::decode_all(&raw));
        let _ = (FileExtent::decode(&raw), RootRef::decode(&raw), RootItem::decode_any(&raw));
        let _ = (ExtentItem::decode(KeyType::EXTENT_ITEM, &raw), ExtentItem::decode(KeyType::METADATA_ITEM, &raw));
        let _ = (InlineRef::decode_keyed(&key, &raw), ChunkItem::decode(&raw));
        let _ = NodeView::new(&raw);
    }

    /// Puts random items, most of them of known types, into a correct leaf, so that the rules of each item type are
    /// tested with random content.
    #[test]
    fn no_items_make_the_checker_or_the_printer_panic(
        items in proptest::collection::btree_map(
            (any::<u64>(), prop_oneof![Just(1u8), Just(12), Just(13), Just(24), Just(84), Just(96), Just(108), Just(128),
                Just(132), Just(144), Just(168), Just(169), Just(178), Just(184), Just(192), Just(198), Just(200),
                Just(204), Just(216), Just(228), Just(230), Just(240), Just(248), Just(249), Just(251), any::<u8>()],
                any::<u64>()),
            vec(prop_oneof![Just(0u8), Just(1), Just(176), any::<u8>()], 0..500), 1..20),
        csum_headers: bool,
    ) {
        let mut leaf = LeafBuilder::new(16384);
        for ((objectid, kind, offset), data) in &items {
            let _ = leaf.push(&Key::new(*objectid, KeyType(*kind), *offset), data);
        }
        check_and_print(leaf.finish(&NodeHeader::default()), csum_headers);
    }

    #[test]
    fn no_block_makes_the_checker_or_the_printer_panic(
        mut raw in vec(any::<u8>(), 4096), nritems in 0..200u32, level in 0..9u8, csum_headers: bool,
    ) {
        raw[96..100].copy_from_slice(&nritems.to_le_bytes());
        raw[100] = level;
        check_and_print(raw, csum_headers);
    }

    #[test]
    fn no_bytes_make_the_superblock_check_or_printer_panic(mut raw in vec(any::<u8>(), SUPERBLOCK_SIZE), size in 0..2100u32) {
        raw[160..164].copy_from_slice(&size.to_le_bytes());
        let superblock = Superblock::decode(&raw).unwrap();
        let _ = check_superblock(&superblock, &superblock.encode_with_csum());
        let mut text = String::new();
        print_superblock(&raw, true, &mut text).unwrap();
        prop_assert!(superblock_json(&raw).is_object());
    }
}

fn check_and_print(mut raw: Vec<u8>, csum_headers: bool) {
    finish_block(&mut raw, CsumType::Crc32c);
    let mut superblock = Superblock::decode(&[0; SUPERBLOCK_SIZE]).unwrap();
    superblock.sectorsize = 4096;
    superblock.nodesize = u32::try_from(raw.len()).unwrap();
    superblock.incompat_flags = u64::MAX;
    let mut ctx = CheckContext::new(&superblock);
    ctx.node_fsid = NodeView::new(&raw).unwrap().fsid();
    ctx.generation_limit = None;
    let _ = check_node(&raw, &ctx);
    let options = PrintOptions { csum_headers, csum_items: true, ..PrintOptions::new(&superblock) };
    let mut text = String::new();
    print_node(&raw, &options, &mut text).unwrap();
    assert!(text.chars().all(|c| !c.is_control() || c == '\n' || c == '\t'), "control characters in {text:?}");
    let _ = node_json(&raw, &options);
}
