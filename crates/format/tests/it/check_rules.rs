//! Tests each rule of the tree checker and the superblock check. Method: a leaf of correct items passes; each case
//! changes one thing to break one rule; the error names the field and the slot.

use ubtrfs_format::check::{CheckContext, ExpectedBlock, check_node};
use ubtrfs_format::hash::name_hash;
use ubtrfs_format::item::*;
use ubtrfs_format::node::{LeafBuilder, NodeBuilder, NodeHeader, finish_block, item_len_max};
use ubtrfs_format::superblock::{Incompat, MAGIC, SUPERBLOCK_SIZE, Superblock};
use ubtrfs_format::{
    Corrupt, DevId, Generation, Ino, Key, KeyType, Logical, Physical, RootId, check_superblock, objectid,
};

const SECTOR: u64 = 4096;

fn superblock() -> Superblock {
    let mut sb = Superblock::decode(&[0; SUPERBLOCK_SIZE]).expect("the size fits");
    sb.magic = MAGIC;
    sb.bytenr = 65536;
    sb.generation = Generation(10);
    (sb.root, sb.chunk_root) = (Logical(1 << 20), Logical(2 << 20));
    (sb.sectorsize, sb.stripesize, sb.nodesize, sb.leafsize) = (4096, 4096, 16384, 16384);
    (sb.total_bytes, sb.bytes_used, sb.num_devices) = (1 << 30, 1 << 20, 1);
    sb.incompat_flags = (Incompat::SKINNY_METADATA | Incompat::NO_HOLES | Incompat::MIXED_BACKREF).bits();
    let chunk = [&Key::new(256, KeyType::CHUNK_ITEM, 2 << 20).encode()[..], &chunk(2, 1).encode()].concat();
    sb.sys_chunk_array[..chunk.len()].copy_from_slice(&chunk);
    sb.sys_chunk_array_size = u32::try_from(chunk.len()).expect("small");
    sb
}

fn chunk(flags: u64, num_stripes: usize) -> ChunkItem {
    let stripe = Stripe { devid: DevId(1), offset: Physical(1 << 20), dev_uuid: uuid::Uuid::nil() };
    ChunkItem {
        length: 8 << 20,
        owner: 2,
        stripe_len: 65536,
        flags: BlockGroupFlags::from_bits_retain(flags),
        io_align: 65536,
        io_width: 65536,
        sector_size: 4096,
        sub_stripes: 1,
        stripes: vec![stripe; num_stripes],
    }
}

fn context() -> CheckContext {
    CheckContext::new(&superblock())
}

fn leaf(owner: RootId, items: &[(Key, Vec<u8>)]) -> Vec<u8> {
    let mut leaf = LeafBuilder::new(16384);
    for (key, data) in items {
        assert!(leaf.push(key, data));
    }
    let header = NodeHeader { bytenr: Logical(1 << 20), generation: Generation(10), owner, ..NodeHeader::default() };
    let mut raw = leaf.finish(&header);
    finish_block(&mut raw, context().csum_type);
    raw
}

fn check(owner: RootId, items: &[(Key, Vec<u8>)]) -> Result<(), Corrupt> {
    check_node(&leaf(owner, items), &context())
}

fn key(objectid: u64, item_type: KeyType, offset: u64) -> Key {
    Key::new(objectid, item_type, offset)
}

/// A test case: an item that is correct until the test changes it.
#[derive(Clone)]
struct Case {
    owner: RootId,
    before: Vec<(Key, Vec<u8>)>,
    key: Key,
    data: Vec<u8>,
}

impl Case {
    fn new(owner: RootId, key: Key, data: Vec<u8>) -> Self {
        let case = Self { owner, before: Vec::new(), key, data };
        case.passes();
        case
    }

    fn after(mut self, key: Key, data: Vec<u8>) -> Self {
        self.before.push((key, data));
        self
    }

    fn check(&self) -> Result<(), Corrupt> {
        check(self.owner, &[&self.before[..], &[(self.key, self.data.clone())]].concat())
    }

    fn passes(&self) {
        self.check().unwrap_or_else(|corrupt| panic!("{} should pass: {corrupt}", self.key));
    }

    /// Expects an error that contains `expected` and names this item's slot.
    fn fails(&self, expected: &str) {
        let Err(corrupt) = self.check() else { panic!("{} passes, expected an error about {expected}", self.key) };
        assert!(corrupt.to_string().contains(expected), "{corrupt}, expected an error about {expected}");
        assert_eq!((corrupt.slot, corrupt.bytenr), (Some(self.before.len()), Some(Logical(1 << 20))));
        assert_eq!(corrupt.tree, Some(self.owner));
    }

    fn with_key(&self, key: Key) -> Self {
        Self { key, ..self.clone() }
    }

    fn with_bytes(&self, at: usize, bytes: &[u8]) -> Self {
        let mut case = self.clone();
        case.data[at..at + bytes.len()].copy_from_slice(bytes);
        case
    }

    fn with_u64(&self, at: usize, value: u64) -> Self {
        self.with_bytes(at, &value.to_le_bytes())
    }

    fn with_u32(&self, at: usize, value: u32) -> Self {
        self.with_bytes(at, &value.to_le_bytes())
    }

    fn shorter(&self) -> Self {
        let mut case = self.clone();
        case.data.pop();
        case
    }

    fn longer(&self) -> Self {
        let mut case = self.clone();
        case.data.push(0);
        case
    }
}

const FS: RootId = RootId::FS_TREE;

fn inode_case() -> Case {
    let mut data = vec![0; InodeItem::SIZE];
    data[40] = 1;
    data[52..56].copy_from_slice(&0o100_644u32.to_le_bytes());
    Case::new(FS, key(257, KeyType::INODE_ITEM, 0), data)
}

#[test]
fn inode_items() {
    let case = inode_case();
    case.shorter().fails("InodeItem needs");
    case.longer().fails("size");
    case.with_key(key(255, KeyType::INODE_ITEM, 0)).fails("inode number");
    case.with_key(key(objectid::FREE_INO, KeyType::INODE_ITEM, 0)).passes();
    case.with_key(key(257, KeyType::INODE_ITEM, 1)).fails("key offset");
    case.with_u64(0, 12).fails("generation");
    case.with_u64(8, 12).fails("transid");
    case.with_u64(8, 11).passes();
    case.with_u32(52, 0o644).fails("file type");
    case.with_u32(52, 0o1_100_644).fails("mode");
    case.with_u32(52, 0o110_644).fails("mode");
    case.with_u32(52, 0o040_755).passes();
    case.with_u32(52, 0o040_755).with_u32(40, 2).fails("nlink");
    case.with_u64(64, 1 << 20).fails("flags");
    case.with_u64(64, 1 << 32).passes();
    // An unknown flag in the upper half still allows reading.
    let newer = case.with_u64(64, 1 << 40);
    newer.fails("flags");
    check_node(&leaf(FS, &[(newer.key, newer.data)]), &context().for_reading_only(true)).expect("may be read");
}

#[test]
fn names() {
    let name = |index: u64, name: &[u8]| {
        let mut out = Vec::new();
        InodeRef { index, name: name.to_vec() }.encode_into(&mut out);
        out
    };
    let case = Case::new(FS, key(257, KeyType::INODE_REF, 256), [name(2, b"one"), name(3, b"two")].concat());
    case.shorter().fails("InodeRef needs");
    case.longer().fails("InodeRef needs");
    case.with_bytes(8, &[0, 0]).fails("name_len");
    case.with_bytes(8, &[0, 1]).fails("name_len");
    Case { data: Vec::new(), ..case.clone() }.fails("InodeRef needs");
    case.clone().after(key(256, KeyType::INODE_ITEM, 0), inode_case().data).fails("key objectid");
    let logged = Case { owner: RootId::TREE_LOG, ..case.clone() };
    logged.after(key(256, KeyType::INODE_ITEM, 0), inode_case().data).passes();
    let mut extref = Vec::new();
    InodeExtref { parent: 256, index: 4, name: b"three".to_vec() }.encode_into(&mut extref);
    let case = Case::new(FS, key(257, KeyType::INODE_EXTREF, 77), extref);
    case.shorter().fails("InodeExtref needs");
    case.with_bytes(16, &[0, 0]).fails("name_len");
}

/// Programs join names to paths, so a name with a slash, or the name `..`, would lead out of its directory.
#[test]
fn no_name_leads_out_of_its_directory() {
    for bad in [&b"a/b"[..], b"/", b"/etc", b"..", b".", b"a\0b", b"\0"] {
        let inode_ref = |name: &[u8]| {
            let mut out = Vec::new();
            InodeRef { index: 2, name: name.to_vec() }.encode_into(&mut out);
            out
        };
        let extref = |name: &[u8]| {
            let mut out = Vec::new();
            InodeExtref { parent: 256, index: 4, name: name.to_vec() }.encode_into(&mut out);
            out
        };
        let root_ref = |name: &[u8]| RootRef { dirid: 256, sequence: 3, name: name.to_vec() }.encode();
        let entry = |name: &[u8]| dir_entry(key(257, KeyType::INODE_ITEM, 0), 1, name, b"");
        let hash = |name: &[u8]| key(256, KeyType::DIR_ITEM, name_hash(name));
        let case = |owner, key, data| Case { owner, before: Vec::new(), key, data };
        case(FS, hash(bad), entry(bad)).fails("DirItem: name");
        case(FS, key(256, KeyType::DIR_INDEX, 5), entry(bad)).fails("DirIndex: name");
        case(FS, key(257, KeyType::INODE_REF, 256), inode_ref(bad)).fails("InodeRef: name");
        case(FS, key(257, KeyType::INODE_REF, 256), [inode_ref(b"good"), inode_ref(bad)].concat())
            .fails("InodeRef: name");
        case(FS, key(257, KeyType::INODE_EXTREF, 77), extref(bad)).fails("InodeExtref: name");
        case(RootId::ROOT_TREE, key(5, KeyType::ROOT_REF, 256), root_ref(bad)).fails("RootRef: name");
        case(RootId::ROOT_TREE, key(256, KeyType::ROOT_BACKREF, 5), root_ref(bad)).fails("RootRef: name");
        // The root directory of a tree refers to itself by the name `..`. Attribute names follow other rules.
        let itself = case(FS, key(256, KeyType::INODE_REF, 256), inode_ref(bad));
        if bad == b".." {
            itself.passes()
        } else {
            itself.fails("InodeRef: name")
        }
        let xattr = key(256, KeyType::XATTR_ITEM, name_hash(bad));
        case(FS, xattr, dir_entry(Key::MIN, 8, bad, b"value")).passes();
    }
}

fn dir_entry(location: Key, file_type: u8, name: &[u8], data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let (name, data) = (name.to_vec(), data.to_vec());
    DirItem { location, transid: Generation(3), file_type, name, data }.encode_into(&mut out);
    out
}

#[test]
fn directory_entries() {
    let inode = key(257, KeyType::INODE_ITEM, 0);
    let dir_item = key(256, KeyType::DIR_ITEM, name_hash(b"name"));
    let case = Case::new(FS, dir_item, dir_entry(inode, 1, b"name", b""));
    case.with_key(key(256, KeyType::DIR_ITEM, 5)).fails("hash of the name");
    case.with_key(key(256, KeyType::DIR_INDEX, 5)).passes();
    case.shorter().fails("DirItem needs");
    case.longer().fails("DirItem needs");
    case.with_bytes(29, &[8]).fails("type");
    case.with_bytes(29, &[9]).fails("type");
    case.with_bytes(29, &[0x81]).passes();
    case.with_bytes(27, &[0, 0]).fails("name_len");
    let subvolume = |location| Case { data: dir_entry(location, 2, b"name", b""), ..case.clone() };
    subvolume(key(256, KeyType::ROOT_ITEM, u64::MAX)).passes();
    subvolume(key(2, KeyType::ROOT_ITEM, u64::MAX)).fails("subvolume");
    subvolume(key(256, KeyType::EXTENT_DATA, 0)).fails("location type");
    subvolume(key(5, KeyType::INODE_ITEM, 0)).fails("inode number");
    Case { data: dir_entry(inode, 1, b"name", b"data"), ..case.clone() }.fails("data_len");
    let xattr = key(256, KeyType::XATTR_ITEM, name_hash(b"user.x"));
    let case = Case::new(FS, xattr, dir_entry(Key::MIN, 8, b"user.x", b"value"));
    case.with_bytes(29, &[1]).fails("type");
    case.with_bytes(0, &[1]).fails("location");
    Case { data: dir_entry(Key::MIN, 8, &[b'a'; 256], b""), ..case.clone() }.fails("name_len");
    let long = vec![b'v'; item_len_max(16384) - DirItem::HEADER_SIZE - b"user.x".len()];
    Case { data: dir_entry(Key::MIN, 8, b"user.x", &long), ..case.clone() }.passes();
}

fn file_extent(disk_bytenr: u64, disk_num_bytes: u64, offset: u64, num_bytes: u64) -> Vec<u8> {
    let body = RegularExtent { disk_bytenr: Logical(disk_bytenr), disk_num_bytes, offset, num_bytes };
    let body = FileExtentBody::Regular(body);
    let compression = Compression::None;
    FileExtent { generation: Generation(3), ram_bytes: SECTOR * 4, compression, encryption: 0, other_encoding: 0, body }
        .encode()
}

#[test]
fn file_extents() {
    let at = |offset| key(257, KeyType::EXTENT_DATA, offset);
    let case = Case::new(FS, at(8192), file_extent(1 << 20, SECTOR * 4, 0, SECTOR * 4));
    case.with_key(at(8193)).fails("file offset");
    case.shorter().fails("FileExtent needs");
    case.longer().fails("size");
    case.with_bytes(16, &[4]).fails("compression");
    case.with_bytes(17, &[1]).fails("encryption");
    case.with_bytes(20, &[3]).fails("type");
    for (at, field) in
        [(8, "ram_bytes"), (21, "disk_bytenr"), (29, "disk_num_bytes"), (37, "offset"), (45, "num_bytes")]
    {
        case.with_u64(at, SECTOR + 1).fails(field);
    }
    case.with_u64(45, u64::MAX - 4095).fails("num_bytes");
    case.with_u64(21, u64::MAX - 4095).fails("disk_num_bytes");
    case.with_u64(21, 0).with_u64(29, 0).passes();
    case.clone().after(at(0), file_extent(0, 0, 0, SECTOR * 2)).passes();
    case.clone().after(at(0), file_extent(0, 0, 0, SECTOR * 3)).fails("file offset");
    let inline = |ram_bytes: u64, compression: u8| {
        let mut data = vec![0; 21 + 100];
        data[8..16].copy_from_slice(&ram_bytes.to_le_bytes());
        data[16] = compression;
        data
    };
    let case = Case::new(FS, at(0), inline(100, 0));
    case.with_key(at(4096)).fails("file offset");
    case.with_u64(8, 101).fails("ram_bytes");
    case.with_u64(8, 4000).with_bytes(16, &[3]).passes();
    let next = Case::new(FS, at(4096), file_extent(0, 0, 0, SECTOR));
    next.clone().after(at(0), inline(100, 0)).passes();
    next.after(at(0), inline(5000, 1)).fails("file offset");
}

#[test]
fn csums_and_free_space() {
    let csums = |start| key(objectid::EXTENT_CSUM, KeyType::EXTENT_CSUM, start);
    let case = Case::new(RootId::CSUM_TREE, csums(8192), vec![1; 40]);
    case.shorter().fails("size");
    case.with_key(csums(8193)).fails("start");
    case.with_key(key(5, KeyType::EXTENT_CSUM, 8192)).fails("key objectid");
    case.with_key(csums(u64::MAX - 4095)).fails("start");
    case.clone().after(csums(0), vec![1; 8]).passes();
    case.clone().after(csums(0), vec![1; 12]).fails("start");
    Case { data: Vec::new(), ..case }.fails("size");

    let fst = RootId::FREE_SPACE_TREE;
    let case = Case::new(fst, key(1 << 20, KeyType::FREE_SPACE_INFO, 1 << 20), vec![1, 0, 0, 0, 1, 0, 0, 0]);
    case.with_u32(4, 2).fails("flags");
    case.shorter().fails("FreeSpaceInfo needs");
    case.with_key(key(1 << 20, KeyType::FREE_SPACE_INFO, 0)).fails("length");
    let case = Case::new(fst, key(1 << 20, KeyType::FREE_SPACE_EXTENT, 8192), Vec::new());
    case.longer().fails("size");
    case.with_key(key((1 << 20) + 1, KeyType::FREE_SPACE_EXTENT, 8192)).fails("start");
    case.with_key(key(1 << 20, KeyType::FREE_SPACE_EXTENT, 8193)).fails("length");
    case.after(key((1 << 20) - 4096, KeyType::FREE_SPACE_EXTENT, 8192), Vec::new()).fails("start");
    let case = Case::new(fst, key(1 << 20, KeyType::FREE_SPACE_BITMAP, 17 * SECTOR), vec![0; 3]);
    case.shorter().fails("size");
}

#[test]
fn root_items() {
    let case = Case::new(RootId::ROOT_TREE, key(256, KeyType::ROOT_ITEM, 0), vec![0; RootItem::SIZE]);
    case.shorter().fails("RootItem needs");
    case.longer().fails("size");
    Case { data: vec![0; RootItem::SIZE_V1], ..case.clone() }.passes();
    case.with_key(key(0, KeyType::ROOT_ITEM, 0)).fails("key objectid");
    case.with_key(key(RootId::TREE_RELOC.0, KeyType::ROOT_ITEM, 0)).fails("key offset");
    case.with_u64(160, 12).fails("generation");
    case.with_u64(239, 12).fails("generation_v2");
    case.with_u64(200, 12).fails("last_snapshot");
    case.with_u64(176, 4095).fails("bytenr");
    case.with_u64(208, 2).fails("flags");
    case.with_u64(208, 1 | 1 << 48).passes();
    case.with_bytes(237, &[8]).fails("drop_level");
    case.with_bytes(238, &[8]).fails("level");
    let root_ref = RootRef { dirid: 256, sequence: 3, name: b"sub".to_vec() };
    let case = Case::new(RootId::ROOT_TREE, key(5, KeyType::ROOT_REF, 256), root_ref.encode());
    case.shorter().fails("RootRef needs");
    case.longer().fails("size");
    case.with_bytes(16, &[0, 0]).fails("name_len");
}

fn extent(flags: u64, refs: u64, inline_refs: Vec<InlineRef>) -> Vec<u8> {
    let flags = ExtentFlags::from_bits_retain(flags);
    ExtentItem { refs, generation: Generation(3), flags, tree_block: None, inline_refs }.encode()
}

fn data_ref(objectid: u64, count: u32) -> InlineRef {
    InlineRef::ExtentData(ExtentDataRef { root: FS, objectid: Ino(objectid), offset: 0, count })
}

#[test]
fn data_extents() {
    let at = key(1 << 20, KeyType::EXTENT_ITEM, 8192);
    let owner = RootId::EXTENT_TREE;
    let with = |refs, inline_refs| Case { owner, before: Vec::new(), key: at, data: extent(1, refs, inline_refs) };
    let mut refs = [data_ref(257, 1), data_ref(258, 2)];
    refs.sort_by_key(|data_ref| std::cmp::Reverse(data_ref.key_offset()));
    let case = with(3, refs.to_vec());
    case.passes();
    with(2, refs.to_vec()).fails("refs");
    with(3, vec![refs[1], refs[0]]).fails("inline ref");
    let shared = InlineRef::SharedData { parent: Logical(8192), count: 1 };
    with(4, vec![refs[0], refs[1], shared]).passes();
    with(4, vec![shared, refs[0], refs[1]]).fails("inline ref type");
    with(1, vec![InlineRef::TreeBlock(FS)]).fails("inline ref type");
    with(1, vec![InlineRef::Owner(FS)]).fails("inline ref type");
    with(1, vec![InlineRef::SharedData { parent: Logical(8193), count: 1 }]).fails("shared data ref");
    with(1, vec![InlineRef::SharedData { parent: Logical(8192), count: 0 }]).fails("count");
    with(1, vec![data_ref(257, 0)]).fails("count");
    with(1, vec![data_ref(255, 1)]).fails("objectid");
    let other = |root, offset| InlineRef::ExtentData(ExtentDataRef { root, objectid: Ino(257), offset, count: 1 });
    with(1, vec![other(RootId::CSUM_TREE, 0)]).fails("data ref root");
    with(1, vec![other(RootId::ROOT_TREE, 0)]).passes();
    with(1, vec![other(RootId::DATA_RELOC_TREE, 0)]).passes();
    with(1, vec![other(FS, 1)]).fails("data ref offset");
    case.shorter().fails("ExtentItem needs");
    case.longer().fails("ExtentItem needs");
    case.with_u64(8, 12).fails("generation");
    case.with_u64(16, 0).fails("flags");
    case.with_u64(16, 3).fails("flags");
    case.with_u64(16, 0x101).fails("flags");
    case.with_key(key(1 << 20, KeyType::EXTENT_ITEM, 8193)).fails("length");
    case.with_key(key(1 << 20, KeyType::EXTENT_ITEM, 0)).fails("length");
    case.with_key(key((1 << 20) + 1, KeyType::EXTENT_ITEM, 8192)).fails("bytenr");
    let before = key((1 << 20) - 4096, KeyType::EXTENT_ITEM, 8192);
    case.clone().after(before, extent(1, 1, vec![data_ref(257, 1)])).fails("bytenr");
    // The overlap of two extents is found although another item is between their items.
    let keyed = key((1 << 20) - 4096, KeyType::SHARED_DATA_REF, 8192);
    case.after(before, extent(1, 1, vec![])).after(keyed, vec![1, 0, 0, 0]).fails("bytenr");
}

#[test]
fn tree_block_extents() {
    let owner = RootId::EXTENT_TREE;
    let skinny = key(1 << 20, KeyType::METADATA_ITEM, 1);
    let case = Case::new(owner, skinny, extent(2, 1, vec![InlineRef::TreeBlock(FS)]));
    case.with_key(key(1 << 20, KeyType::METADATA_ITEM, 8)).fails("level");
    case.with_u64(16, 1).fails("flags");
    case.with_u64(0, 0).fails("refs");
    Case { data: extent(2, 1, vec![data_ref(257, 1)]), ..case.clone() }.fails("inline ref type");
    Case { data: extent(2, 1, vec![InlineRef::SharedBlock(Logical(1))]), ..case.clone() }.fails("shared block ref");
    let mut ctx = context();
    ctx.incompat.remove(Incompat::SKINNY_METADATA);
    assert!(check_node(&leaf(owner, &[(case.key, case.data.clone())]), &ctx).is_err());

    let info = TreeBlockInfo { key: Key::MIN, level: 2 };
    let item = ExtentItem {
        refs: 1,
        generation: Generation(3),
        flags: ExtentFlags::TREE_BLOCK | ExtentFlags::FULL_BACKREF,
        tree_block: Some(info),
        inline_refs: vec![InlineRef::SharedBlock(Logical(8192))],
    };
    let case = Case::new(owner, key(1 << 20, KeyType::EXTENT_ITEM, 16384), item.encode());
    case.with_bytes(24 + 17, &[8]).fails("level");
    case.with_key(key(1 << 20, KeyType::EXTENT_ITEM, 8192)).fails("length");

    let case = Case::new(owner, key(1 << 20, KeyType::TREE_BLOCK_REF, 5), Vec::new());
    case.longer().fails("size");
    case.with_key(key(1, KeyType::TREE_BLOCK_REF, 5)).fails("bytenr");
    case.with_key(key(1 << 20, KeyType::SHARED_BLOCK_REF, 5)).fails("parent");
    let case = Case::new(owner, key(1 << 20, KeyType::SHARED_DATA_REF, 8192), vec![1, 0, 0, 0]);
    case.with_u32(0, 0).fails("count");
    case.shorter().fails("needs");
    let case = Case::new(owner, key(1 << 20, KeyType::EXTENT_DATA_REF, 5), data_ref(257, 1).encode_keyed());
    case.with_u32(24, 0).fails("count");
    case.with_u64(0, 7).fails("data ref root");
    case.shorter().fails("size");
}

#[test]
fn chunks_and_block_groups() {
    let at = key(256, KeyType::CHUNK_ITEM, 1 << 20);
    let owner = RootId::CHUNK_TREE;
    let with = |item: ChunkItem| Case { owner, before: Vec::new(), key: at, data: item.encode() };
    let case = Case::new(owner, at, chunk(1, 1).encode());
    case.shorter().fails("needs");
    case.longer().fails("size");
    case.with_key(key(255, KeyType::CHUNK_ITEM, 1 << 20)).fails("key objectid");
    case.with_key(key(256, KeyType::CHUNK_ITEM, 1)).fails("logical");
    case.with_u64(0, 0).fails("length");
    case.with_u64(0, 4097).fails("length");
    case.with_u64(0, u64::MAX - 4095).fails("length");
    case.with_u64(0, 1 << 48).fails("length");
    case.with_u64(16, 4096).fails("stripe_len");
    case.with_u32(40, 512).fails("sector_size");
    case.with_bytes(44, &[0, 0]).fails("num_stripes");
    case.with_u64(24, 0).fails("type");
    case.with_u64(24, 1 | 1 << 20).fails("type");
    case.with_u64(24, 1 | 8 | 16).fails("profile");
    case.with_u64(24, 1 | 2).fails("type");
    case.with_u64(24, 1 | 4).fails("type");
    let profiles = [(0, 1), (8, 1), (16, 2), (32, 2), (128, 2), (256, 3), (512, 3), (1024, 4)];
    for (profile, right) in profiles {
        with(chunk(1 | profile, right)).passes();
        let wrong = if profile == 8 { 0 } else { right - 1 };
        with(chunk(1 | profile, wrong)).fails(if wrong == 0 && profile != 8 { "needs" } else { "" });
    }
    with(chunk(1 | 64, 4)).fails("sub_stripes");
    with(ChunkItem { sub_stripes: 2, ..chunk(1 | 64, 4) }).passes();
    with(ChunkItem { sub_stripes: 2, ..chunk(1 | 64, 3) }).fails("num_stripes");

    let item = BlockGroupItem { used: 4096, chunk_objectid: 256, flags: 4 | 32 };
    let case = Case::new(RootId::EXTENT_TREE, key(1 << 20, KeyType::BLOCK_GROUP_ITEM, 8 << 20), item.encode());
    case.with_u64(0, (8 << 20) + 1).fails("used");
    case.with_u64(8, 255).fails("chunk_objectid");
    case.with_u64(16, 0).fails(
        "flags" /* as the type bits of a block group */
            .replace("flags", "type")
            .as_str(),
    );
    case.with_u64(16, 4 | 8 | 16).fails("profile");
    case.with_key(key(1 << 20, KeyType::BLOCK_GROUP_ITEM, 0)).fails("length");
    case.shorter().fails("needs");
}

#[test]
fn devices_and_small_items() {
    let mut item = vec![0; DevItem::SIZE];
    item[0] = 1;
    item[8] = 100;
    let case = Case::new(RootId::CHUNK_TREE, key(1, KeyType::DEV_ITEM, 1), item);
    case.with_key(key(2, KeyType::DEV_ITEM, 1)).fails("key objectid");
    case.with_key(key(1, KeyType::DEV_ITEM, 2)).fails("devid");
    case.with_u64(16, 101).fails("bytes_used");
    case.shorter().fails("needs");

    let item = |length| {
        let chunk_tree_uuid = uuid::Uuid::nil();
        DevExtent { chunk_tree: 3, chunk_objectid: 256, chunk_offset: 1 << 20, length, chunk_tree_uuid }.encode()
    };
    let at = |offset| key(1, KeyType::DEV_EXTENT, offset);
    let case = Case::new(RootId::DEV_TREE, at(2 << 20), item(1 << 20));
    case.with_key(at((2 << 20) + 1)).fails("physical");
    case.with_u64(0, 4).fails("chunk_tree");
    case.with_u64(8, 257).fails("chunk_objectid");
    case.with_u64(16, 1).fails("chunk_offset");
    case.with_u64(24, 0).fails("length");
    case.clone().after(at(1 << 20), item(1 << 20)).passes();
    case.clone().after(at(1 << 20), item(2 << 20)).fails("physical");
    case.with_key(key(2, KeyType::DEV_EXTENT, 0)).after(at(1 << 20), item(2 << 20)).passes();

    let case = Case::new(RootId::DEV_TREE, key(0, KeyType::PERSISTENT_ITEM, 1), vec![0; 40]);
    case.shorter().fails("size");
    let case = Case::new(FS, key(objectid::ORPHAN, KeyType::ORPHAN_ITEM, 257), Vec::new());
    case.longer().fails("size");
    case.with_key(key(256, KeyType::ORPHAN_ITEM, 257)).fails("key objectid");
    let case = Case::new(RootId::QUOTA_TREE, key(0, KeyType::QGROUP_STATUS, 0), vec![0; 32]);
    case.shorter().fails("needs");
    case.with_key(key(0, KeyType::QGROUP_STATUS, 1)).fails("key offset");
    Case { data: vec![0; 40], ..case }.passes();
    Case::new(RootId::QUOTA_TREE, key(0, KeyType::QGROUP_INFO, 5), vec![0; 40]).shorter().fails("needs");
    Case::new(RootId::QUOTA_TREE, key(0, KeyType::QGROUP_LIMIT, 5), vec![0; 40]).longer().fails("size");
    Case::new(RootId::QUOTA_TREE, key(5, KeyType::QGROUP_RELATION, 6), Vec::new()).longer().fails("size");
    Case::new(RootId::UUID_TREE, key(5, KeyType::UUID_KEY_SUBVOL, 6), vec![0; 16]).shorter().fails("size");
    // Items of unknown types pass.
    Case::new(FS, key(5, KeyType(77), 6), vec![0; 3]);
}

#[test]
fn leaves_and_headers() {
    let raw = leaf(FS, &[(key(256, KeyType::INODE_ITEM, 0), inode_case().data), (inode_case().key, inode_case().data)]);
    let verdict = |change: &dyn Fn(&mut Vec<u8>), expected: ExpectedBlock| {
        let mut raw = raw.clone();
        change(&mut raw);
        if raw.len() > 100 {
            finish_block(&mut raw, context().csum_type);
        }
        check_node(&raw, &context().expecting(expected)).err().map(|corrupt| corrupt.to_string()).unwrap_or_default()
    };
    let any = ExpectedBlock::default();
    let fails = |change: &dyn Fn(&mut Vec<u8>), expected: &str| {
        let found = verdict(change, any);
        assert!(found.contains(expected) && !found.is_empty(), "{found:?}, expected an error about {expected}");
    };
    assert_eq!(verdict(&|_| {}, any), "");
    fails(&|raw| raw.truncate(50), "needs");
    fails(&|raw| raw.truncate(8192), "size");
    fails(&|raw| raw[32] = 1, "fsid");
    fails(&|raw| raw[48] = 1, "bytenr");
    fails(&|raw| raw[80] = 12, "generation");
    fails(&|raw| raw[100] = 8, "level");
    fails(&|raw| raw[96..100].fill(255), "nritems");
    fails(&|raw| raw[96] = 0, "nritems");
    // The first two item heads begin at bytes 101 and 126. A head is a key (17 bytes), an offset (u32) and a size
    // (u32).
    fails(&|raw| raw[126..134].copy_from_slice(&256u64.to_le_bytes()), "ascend");
    fails(&|raw| raw[118..122].copy_from_slice(&20000u32.to_le_bytes()), "data range");
    fails(&|raw| raw[118..122].copy_from_slice(&16000u32.to_le_bytes()), "data end");
    fails(&|raw| raw[147] = 1, "data end");
    fails(
        &|raw| {
            raw[143..147].copy_from_slice(&0u32.to_le_bytes());
            raw[147..151].copy_from_slice(&(16384u32 - 101 - 160).to_le_bytes());
        },
        "data start",
    );
    let expects = |expected: ExpectedBlock, field: &str| {
        let found = verdict(&|_| {}, expected);
        assert!(found.contains(field), "{found:?}, expected an error about {field}");
    };
    expects(ExpectedBlock { bytenr: Some(Logical(4096)), ..any }, "bytenr");
    expects(ExpectedBlock { level: Some(1), ..any }, "level");
    expects(ExpectedBlock { generation: Some(Generation(9)), ..any }, "generation");
    expects(ExpectedBlock { tree: Some(RootId::CSUM_TREE), ..any }, "owner");
    expects(ExpectedBlock { first_key: Some(Key::MIN), ..any }, "first key");
    // Subvolumes share blocks.
    assert_eq!(verdict(&|_| {}, ExpectedBlock { tree: Some(RootId(256)), ..any }), "");
    assert_eq!(verdict(&|_| {}, ExpectedBlock { tree: Some(RootId::TREE_RELOC), ..any }), "");
    let mut unwritten = raw.clone();
    unwritten[56] = 0;
    let csum = context().csum_type.compute(&unwritten[32..]);
    unwritten[..32].copy_from_slice(&csum);
    assert!(check_node(&unwritten, &context()).is_err());
    unwritten[200] ^= 1;
    assert!(check_node(&unwritten, &context()).expect_err("csum").to_string().contains("checksum"));
}

#[test]
fn empty_leaves() {
    for tree in [RootId::ROOT_TREE, RootId::CHUNK_TREE, RootId::DEV_TREE, FS, RootId::EXTENT_TREE, RootId(0)] {
        assert!(check(tree, &[]).is_err(), "{tree}");
    }
    for tree in [RootId::CSUM_TREE, RootId::UUID_TREE, RootId(256), RootId::TREE_LOG] {
        check(tree, &[]).unwrap_or_else(|corrupt| panic!("{corrupt}"));
        let ctx = context().expecting(ExpectedBlock { first_key: Some(Key::MIN), ..ExpectedBlock::default() });
        check_node(&leaf(tree, &[]), &ctx).expect_err("not a root");
    }
}

#[test]
fn internal_nodes() {
    let build = |pointers: &[(u64, u64, u64)]| {
        let mut node = NodeBuilder::new(16384);
        for &(objectid, bytenr, generation) in pointers {
            assert!(node.push(&key(objectid, KeyType::INODE_ITEM, 0), Logical(bytenr), Generation(generation)));
        }
        let header = NodeHeader {
            bytenr: Logical(1 << 20),
            generation: Generation(10),
            owner: FS,
            level: 1,
            ..NodeHeader::default()
        };
        let mut raw = node.finish(&header);
        finish_block(&mut raw, context().csum_type);
        check_node(&raw, &context()).err().map(|corrupt| (corrupt.slot, corrupt.to_string())).unwrap_or_default()
    };
    assert_eq!(build(&[(256, 4096, 3), (257, 8192, 10)]), Default::default());
    assert!(build(&[]).1.contains("nritems"));
    for (wrong, field) in [
        ((257, 0, 3), "blockptr"),
        ((257, 4097, 3), "blockptr"),
        ((256, 4096, 3), "ascend"),
        ((257, 4096, 12), "generation"),
    ] {
        let (slot, text) = build(&[(256, 4096, 3), wrong]);
        assert!(slot == Some(1) && text.contains(field), "{text}, expected an error about {field}");
    }
}

#[test]
fn superblocks() {
    let verdict = |change: &dyn Fn(&mut Superblock)| {
        let mut superblock = superblock();
        change(&mut superblock);
        let raw = superblock.encode_with_csum();
        let superblock = Superblock::decode(&raw).expect("the size fits");
        check_superblock(&superblock, &raw).err().map(|cause| cause.to_string()).unwrap_or_default()
    };
    let fails = |change: &dyn Fn(&mut Superblock), expected: &str| {
        let found = verdict(change);
        assert!(found.contains(expected) && !found.is_empty(), "{found:?}, expected an error about {expected}");
    };
    assert_eq!(verdict(&|_| {}), "");
    fails(&|sb| sb.magic[0] = 0, "magic");
    fails(&|sb| sb.csum_type = 4, "csum_type");
    fails(&|sb| sb.bytenr = 4096, "bytenr");
    fails(&|sb| sb.flags = 1 << 40, "flags");
    fails(&|sb| sb.sectorsize = 2048, "sectorsize");
    fails(&|sb| sb.sectorsize = 5000, "sectorsize");
    fails(&|sb| sb.nodesize = 2048, "nodesize");
    fails(&|sb| sb.nodesize = 131_072, "nodesize");
    fails(&|sb| sb.leafsize = 4096, "leafsize");
    fails(&|sb| sb.stripesize = 0, "stripesize");
    fails(&|sb| sb.bytes_used = 5 * 16384, "bytes_used");
    fails(&|sb| sb.root = Logical(0), "root");
    fails(&|sb| sb.root = Logical(1), "root");
    fails(&|sb| sb.chunk_root = Logical(1), "chunk_root");
    fails(&|sb| sb.log_root = Logical(1), "log_root");
    fails(&|sb| sb.root_level = 8, "root_level");
    fails(&|sb| sb.chunk_root_level = 8, "chunk_root_level");
    fails(&|sb| sb.log_root_level = 8, "log_root_level");
    fails(&|sb| sb.chunk_root_generation = Generation(11), "chunk_root_generation");
    fails(&|sb| sb.dev_item.fsid = uuid::Uuid::from_u128(1), "dev_item.fsid");
    fails(&|sb| sb.num_devices = 0, "num_devices");
    fails(&|sb| sb.label.fill(b'x'), "label");
    fails(&|sb| sb.incompat_flags |= Incompat::MIXED_GROUPS.bits(), "nodesize");
    fails(&|sb| sb.compat_ro_flags = 8, "compat_ro_flags");
    fails(&|sb| sb.sys_chunk_array_size = 0, "sys_chunk_array_size");
    fails(&|sb| sb.sys_chunk_array_size = 2049, "sys_chunk_array_size");
    fails(&|sb| sb.sys_chunk_array_size += 1, "sys_chunk_array_size");
    fails(&|sb| sb.sys_chunk_array[8] = 1, "key type");
    fails(&|sb| sb.sys_chunk_array[17 + 24] = 1, "system chunks");
    fails(&|sb| sb.sys_chunk_array[17 + 44] = 0, "num_stripes");
    fails(&|sb| sb.sys_chunk_array[17 + 44] = 9, "whole chunks");
    let (superblock, mut raw) = (superblock(), superblock().encode_with_csum());
    raw[500] ^= 1;
    check_superblock(&superblock, &raw).expect_err("checksum");
    check_superblock(&superblock, &raw[..100]).expect_err("short");
}
