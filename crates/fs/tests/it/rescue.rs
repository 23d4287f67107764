//! Tests the options `rescue=`: a filesystem of which a part is damaged opens for reading, with everything that is left, as
//! in Linux, and its image does not change.

use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::RootId;
use ubtrfs_fs::{Caller, Fs, InodeId, MountOptions, NewInode};
use ubtrfs_mkfs::{MkfsOptions, make};
use ubtrfs_testkit::{
    Compare, Image, LoopMount, RawBlock, Rng, TreeEntry, capability, compare_entries, walk_fs, walk_path,
};

const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: ubtrfs_format::Ino::ROOT_DIR };

fn open(image: &Image, options: &str) -> ubtrfs_fs::Result<Arc<Fs>> {
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image.path(), Access::ReadWrite).unwrap());
    Fs::open(vec![device], MountOptions::parse(options).unwrap())
}

fn close(fs: Arc<Fs>) {
    fs.close().unwrap();
}

fn put(fs: &Fs, name: &str, data: &[u8]) {
    let id = fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    fs.write(id, 0, data).unwrap();
}

/// An image with small, large and compressed files of several commits, and what it contains.
fn image() -> (Image, Vec<TreeEntry>) {
    let image = Image::empty(512 << 20).unwrap();
    let device = FileDevice::open(image.path(), Access::ReadWrite).unwrap();
    make(&device, &MkfsOptions::default()).unwrap();
    drop(device);
    let mut rng = Rng::new(1);
    let fs = open(&image, "compress=zstd").unwrap();
    for round in 0..6 {
        put(&fs, &format!("small{round}"), b"a few bytes");
        put(&fs, &format!("large{round}"), &rng.bytes(300_000));
        put(&fs, &format!("packed{round}"), &vec![b'a'; 300_000]);
        fs.sync().unwrap();
    }
    let entries = walk_fs(&fs).unwrap();
    close(fs);
    (image, entries)
}

/// Overwrites all copies of the blocks of which `is_bad` is true, from `at` on. At least one must be found.
fn damage(image: &Image, at: u64, is_bad: impl Fn(&RawBlock) -> bool) {
    let blocks: Vec<RawBlock> = RawBlock::live(image).unwrap().into_iter().filter(is_bad).collect();
    assert!(!blocks.is_empty());
    for copy in blocks.iter().flat_map(|block| &block.copies) {
        image.write_at(copy + at, &[0x5a; 16]).unwrap();
    }
}

fn is_root_of(image: &Image, owner: RootId) -> impl Fn(&RawBlock) -> bool {
    let blocks = RawBlock::live(image).unwrap();
    let top = blocks.iter().filter(|block| block.owner == owner.0).map(|block| block.level).max().unwrap();
    move |block| block.owner == owner.0 && block.level == top
}

/// Fails to open the image with `without`, and reads everything with the option `rescue`, as Linux does.
fn rescues(image: &Image, without: &str, rescue: &str, expected: &[TreeEntry]) {
    let before = image.digest().unwrap();
    assert!(open(image, without).is_err() || without == rescue);
    let fs = open(image, rescue).unwrap();
    compare_entries(expected, &walk_fs(&fs).unwrap(), Compare::ALL).unwrap();
    assert!(fs.read_only().is_some());
    assert!(fs.statfs().is_ok());
    close(fs);
    let linux = LoopMount::new(image.path(), rescue).unwrap();
    compare_entries(expected, &walk_path(linux.path()).unwrap(), Compare::ALL).unwrap();
    linux.close().unwrap();
    assert_eq!(image.digest().unwrap(), before, "{rescue}: the image changed");
}

#[test]
fn ignorebadroots_reads_without_the_trees_that_only_writing_needs() {
    if !capability::kernel_oracle() {
        return;
    }
    for tree in [RootId::EXTENT_TREE, RootId::CSUM_TREE, RootId::DEV_TREE] {
        let (image, expected) = image();
        damage(&image, 200, is_root_of(&image, tree));
        // A missing checksum tree shows at the first read.
        if tree == RootId::CSUM_TREE {
            let fs = open(&image, "ro").unwrap();
            assert!(walk_fs(&fs).is_err());
            close(fs);
            rescues(&image, "ro,rescue=ignorebadroots", "ro,rescue=ignorebadroots", &expected);
        } else {
            rescues(&image, "ro", "ro,rescue=ignorebadroots", &expected);
        }
    }
}

#[test]
fn usebackuproot_shows_an_earlier_commit_and_never_writes() {
    if !capability::kernel_oracle() {
        return;
    }
    let (image, _) = image();
    let fs = open(&image, "ro").unwrap();
    let generation = fs.superblock().generation;
    close(fs);
    damage(&image, 200, is_root_of(&image, RootId::ROOT_TREE));
    let before = image.digest().unwrap();
    assert!(open(&image, "rw").is_err());
    let fs = open(&image, "usebackuproot").unwrap();
    let reason = fs.read_only().unwrap();
    assert!(reason.contains(&format!("the roots of generation {generation} are damaged")), "{reason}");
    assert!(fs.superblock().generation < generation);
    let found = walk_fs(&fs).unwrap();
    assert!(fs.create(TOP, b"new", NewInode::file(0o644), &Caller::ROOT).unwrap_err().errno() == 30);
    close(fs);
    assert_eq!(image.digest().unwrap(), before);
    let linux = LoopMount::new(image.path(), "ro,rescue=usebackuproot").unwrap();
    compare_entries(&found, &walk_path(linux.path()).unwrap(), Compare::ALL).unwrap();
    linux.close().unwrap();
    // Where nothing is damaged, the option changes nothing.
    let (image, expected) = self::image();
    let fs = open(&image, "usebackuproot").unwrap();
    assert_eq!(fs.read_only(), None);
    compare_entries(&expected, &walk_fs(&fs).unwrap(), Compare::ALL).unwrap();
    close(fs);
}

#[test]
fn ignored_checksums_give_what_is_there() {
    if !capability::kernel_oracle() {
        return;
    }
    // The checksum of the only leaf of the subvolume, in both copies: the block itself is whole.
    let (image, expected) = image();
    damage(&image, 0, is_root_of(&image, RootId::FS_TREE));
    rescues(&image, "ro", "ro,rescue=ignoremetacsums", &expected);

    let (image, _) = self::image();
    let fs = open(&image, "ro").unwrap();
    let id = fs.lookup(TOP, b"large0").unwrap().id;
    let whole = fs.read(id, 0, 300_000).unwrap();
    close(fs);
    let raw = std::fs::read(image.path()).unwrap();
    let place = raw.windows(64).position(|bytes| bytes == &whole[..64]).unwrap() as u64;
    image.write_at(place + 5000, b"damage").unwrap();
    let fs = open(&image, "ro").unwrap();
    assert!(fs.read(id, 0, 300_000).unwrap_err().errno() == 5);
    close(fs);
    let mut damaged = whole;
    damaged[5000..5006].copy_from_slice(b"damage");
    let fs = open(&image, "ro,rescue=ignoredatacsums").unwrap();
    assert!(fs.read(id, 0, 300_000).unwrap() == damaged);
    close(fs);
    let linux = LoopMount::new(image.path(), "ro,rescue=ignoredatacsums").unwrap();
    assert!(std::fs::read(linux.join("large0")).unwrap() == damaged);
    linux.close().unwrap();
}

/// Linux returns all three sectors damaged here.
#[test]
fn only_sectors_without_a_good_copy_are_returned_damaged() {
    let image = Image::empty(512 << 20).unwrap();
    let device = FileDevice::open(image.path(), Access::ReadWrite).unwrap();
    let dup = MkfsOptions { data_profile: ubtrfs_format::item::BlockGroupFlags::DUP, ..MkfsOptions::default() };
    make(&device, &dup).unwrap();
    drop(device);
    let content: Vec<u8> = (0..32_u8).flat_map(|number| vec![number + 1; 4096]).collect();
    let fs = open(&image, "").unwrap();
    put(&fs, "file", &content);
    close(fs);
    let raw = std::fs::read(image.path()).unwrap();
    let of_sector = |number: usize| {
        let sector = &content[number * 4096..][..4096];
        let places = (0..raw.len()).step_by(4096).filter(|at| raw[*at..][..4096] == *sector);
        places.map(|at| at as u64).collect::<Vec<u64>>()
    };
    for (number, nr_copies) in [(0, 2), (1, 1), (20, 1)] {
        let places = of_sector(number);
        assert_eq!(places.len(), 2);
        places.iter().take(nr_copies).for_each(|place| image.write_at(*place, b"damage").unwrap());
    }
    let mut expected = content;
    expected[..6].copy_from_slice(b"damage");
    let fs = open(&image, "ro,rescue=ignoredatacsums").unwrap();
    let id = fs.lookup(TOP, b"file").unwrap().id;
    assert!(fs.read(id, 0, expected.len()).unwrap() == expected, "R2");
    close(fs);
}

#[test]
fn ignoresuperflags_opens_an_interrupted_conversion() {
    if !capability::kernel_oracle() {
        return;
    }
    let (image, expected) = image();
    image
        .patch_superblocks(|raw| {
            let flags = u64::from_le_bytes(raw[56..64].try_into().unwrap()) | 1 << 40;
            raw[56..64].copy_from_slice(&flags.to_le_bytes());
        })
        .unwrap();
    rescues(&image, "ro", "ro,rescue=ignoresuperflags", &expected);
    rescues(&image, "ro", "ro,rescue=all", &expected);
}

#[test]
fn ignored_damage_needs_a_read_only_mount() {
    let (image, _) = image();
    for part in ["all", "ignorebadroots", "idatacsums", "ignoremetacsums", "usebackuproot:isuperflags"] {
        let error = open(&image, &format!("rescue={part}")).unwrap_err().to_string();
        assert!(error.contains("needs ro"), "{error}");
    }
    assert!(MountOptions::parse("rescue=everything").is_err());
}

#[test]
fn a_log_is_ignored_only_in_a_read_only_mount() {
    let (image, _) = image();
    for option in ["nologreplay", "rescue=nologreplay"] {
        let error = open(&image, option).unwrap_err().to_string();
        assert!(error.contains("needs ro"), "{error}");
        close(open(&image, &format!("ro,{option}")).unwrap());
    }
}

#[test]
fn a_free_space_tree_cannot_be_left_out() {
    let (image, _) = image();
    for option in ["nospace_cache", "space_cache", "ro,space_cache=v1", "clear_cache,space_cache=v1"] {
        let error = open(&image, option).unwrap_err().to_string();
        assert!(error.contains("has a free space tree"), "{error}");
    }
    close(open(&image, "clear_cache,space_cache=v2").unwrap());
    if capability::kernel_oracle() {
        let image = Image::kernel_made(256 << 20, &["-R", "^free-space-tree"]).unwrap();
        close(open(&image, "space_cache=v1").unwrap());
    }
}
