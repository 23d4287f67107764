//! Tests of rules that filesystems made by Linux rarely exercise, and of damage that is easily missed. Images are
//! crafted item by item, with correct checksums.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use crate::common::check;
use ubtrfs_check::Code;
use ubtrfs_error::Errno;
use ubtrfs_format::csum::CsumType;
use ubtrfs_format::node::NodeView;
use ubtrfs_format::{Key, KeyType, objectid};
use ubtrfs_testkit::{
    Corruption, Corruptor, Damage, FsTarget, Image, KernelImage, KernelImageSpec, LoopMount, NodeKind, RawBlock, Rng,
    Target, btrfs_check, btrfs_check_output, capability, run,
};

type Items = Vec<(Key, Vec<u8>)>;

/// Makes a small filesystem with Linux, and copies the image while it is mounted.
fn made(mount: &str, fill: impl FnOnce(&Path)) -> Image {
    let made = KernelImage::empty(KernelImageSpec { len_bytes: 300 << 20, ..KernelImageSpec::DEFAULT }).unwrap();
    let mount = LoopMount::new(made.image.path(), mount).unwrap();
    fill(mount.path());
    Image::copy_of(made.image.path()).unwrap()
}

fn sync(path: &Path) {
    run("btrfs", ["filesystem".as_ref(), "sync".as_ref(), path.as_os_str()]).unwrap();
}

/// Changes the items of a leaf of the top-level subvolume.
fn craft(image: &Image, change: impl Fn(&mut Items) -> bool) -> Damage {
    craft_in(image, 5, change)
}

fn craft_in(image: &Image, tree: u64, change: impl Fn(&mut Items) -> bool) -> Damage {
    let corruptor = Corruptor::new(image).unwrap();
    corruptor.rewrite("crafted", |owner, items| owner == tree && change(items)).unwrap().expect("a leaf to craft")
}

fn find(items: &mut Items, objectid: u64, kind: KeyType) -> Option<&mut (Key, Vec<u8>)> {
    items.iter_mut().find(|(key, _)| (key.objectid, key.item_type) == (objectid, kind))
}

fn insert(items: &mut Items, key: Key, data: Vec<u8>) {
    let at = items.partition_point(|(other, _)| *other < key);
    items.insert(at, (key, data));
}

fn number(data: &mut [u8], at: usize, value: u64) {
    data[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

/// Returns the codes that the checker finds, including warnings, each once.
fn codes(image: &Image) -> Vec<Code> {
    let (_, problems) = check(image.path());
    problems.iter().for_each(|problem| println!("{problem}"));
    let mut codes: Vec<Code> = problems.iter().map(|problem| problem.code).collect();
    codes.sort_unstable();
    codes.dedup();
    codes
}

fn is_clean_for_btrfs(image: &Image) -> bool {
    btrfs_check_output(image.path(), &["--readonly"]).unwrap().0
}

/// Fails unless both `btrfs check` and the checker find the image clean.
fn assert_agreed_clean(image: &Image) {
    assert_eq!(codes(image), []);
    btrfs_check(image.path()).unwrap();
}

/// A balance of data moves some of the leaves that refer to the data, together with the internal nodes above these
/// leaves. A moved node also points to leaves that stay in place. The references from this node to the leaves are full
/// backrefs, although the owner of the leaves still reaches them.
#[test]
fn full_backrefs_that_a_balance_among_snapshots_leaves_are_no_damage() {
    if !capability::kernel_oracle() {
        return;
    }
    let spec = KernelImageSpec { len_bytes: 400 << 20, ..KernelImageSpec::named("nodes of 4 KiB") };
    let made = KernelImage::empty(spec).unwrap();
    let mount = LoopMount::new(made.image.path(), "").unwrap();
    let path = |name: &str| mount.join(name).to_string_lossy().into_owned();
    let mut rng = Rng::new(1);
    run("btrfs", ["subvolume", "create", &path("source")]).unwrap();
    let name = |dir: &str, file: u64| mount.join(format!("{dir}/file-with-a-long-name-{file}"));
    const FILES: u64 = 1200;
    for file in 0..FILES {
        fs::write(name("source", file), rng.bytes(if file % 3 == 0 { 9000 } else { 1500 })).unwrap();
    }
    let append = |dir: &str, file: u64, len: usize| {
        File::options().append(true).open(name(dir, file)).unwrap().write_all(&vec![b'x'; len]).unwrap();
    };
    for snapshot in 1..=4 {
        run("btrfs", ["subvolume", "snapshot", &path("source"), &path(&format!("snapshot-{snapshot}"))]).unwrap();
        (snapshot..FILES).step_by(97).for_each(|file| append("source", file, 1));
        sync(mount.path());
    }
    for round in 0..4 {
        for kind in ["-mlimit=1", "-dlimit=1"] {
            run("btrfs", ["balance", "start", kind, &path("")]).unwrap();
            sync(mount.path());
            let copy = Image::copy_of(made.image.path()).unwrap();
            assert_agreed_clean(&copy);
            if kind == "-mlimit=1" {
                for dir in ["source", "snapshot-1", "snapshot-3"] {
                    (0..12).for_each(|_| append(dir, rng.below(FILES), *rng.pick(&[1, 3000])));
                }
                sync(mount.path());
            }
        }
        run("btrfs", ["subvolume", "snapshot", &path("snapshot-1"), &path(&format!("deeper-{round}"))]).unwrap();
    }
    mount.close().unwrap();
    assert_agreed_clean(&made.image);
}

/// An interrupted balance also leaves the full backref flag on blocks that their owner still uses. References from a
/// block with the flag name the block and not the tree. A block that is newer than the last snapshot was never shared,
/// so the flag on such a block is damage.
#[test]
fn full_backrefs_are_of_blocks_that_were_shared() {
    if !capability::kernel_oracle() {
        return;
    }
    let spec = KernelImageSpec { len_bytes: 300 << 20, ..KernelImageSpec::named("nodes of 4 KiB") };
    let made = KernelImage::empty(spec).unwrap();
    let mount = LoopMount::new(made.image.path(), "").unwrap();
    for file in 0..40 {
        fs::write(mount.join(format!("file-{file}")), vec![1; if file == 20 { 65_536 } else { 1000 }]).unwrap();
    }
    mount.close().unwrap();
    let image = &made.image;
    assert_agreed_clean(image);
    let is_on_disk = |raw: &[u8]| {
        let view = NodeView::new(raw).unwrap();
        let mut items = (0..view.nritems()).map(|slot| (view.key(slot).unwrap(), view.item(slot).unwrap()));
        items.any(|(key, data)| key.item_type == KeyType::EXTENT_DATA && data[20] == 1)
    };
    let leaves = RawBlock::live(image).unwrap().into_iter().filter(|block| (block.owner, block.level) == (5, 0));
    let (with_data, without): (Vec<_>, Vec<_>) =
        leaves.partition(|leaf| is_on_disk(&image.read_at(leaf.copies[0], 4096).unwrap()));
    let set_full = |leaf: &RawBlock| {
        let bytenr = leaf.bytenr;
        craft_in(image, 2, move |items| {
            find(items, bytenr, KeyType::METADATA_ITEM).map(|(_, data)| data[17] |= 1).is_some()
        })
    };
    let damage = set_full(&without[0]);
    assert_eq!(codes(image), [Code::ExtentFlags]);
    assert!(!is_clean_for_btrfs(image));
    damage.undo(image).unwrap();
    set_full(&with_data[0]);
    let parent = with_data[0].bytenr;
    craft_in(image, 2, |items| {
        let Some((_, data)) = items.iter_mut().find(|(key, _)| key.item_type == KeyType::EXTENT_ITEM) else {
            return false;
        };
        data.truncate(24);
        data.push(KeyType::SHARED_DATA_REF.0);
        data.extend(parent.to_le_bytes());
        data.extend(1u32.to_le_bytes());
        true
    });
    assert_eq!(codes(image), [Code::ExtentFlags]);
    assert!(!is_clean_for_btrfs(image));
    let newest = u64::from_le_bytes(image.read_at(65_536 + 72, 8).unwrap().try_into().unwrap());
    craft_in(image, 1, |items| find(items, 5, KeyType::ROOT_ITEM).map(|(_, data)| number(data, 200, newest)).is_some());
    assert_eq!(codes(image), []);
    assert!(is_clean_for_btrfs(image));
    let mount = LoopMount::new(image.path(), "").unwrap();
    fs::write(mount.join("file-20"), "changed").unwrap();
    mount.scrub().unwrap();
    assert_eq!(mount.kernel_complaints(), Vec::<String>::new());
    mount.close().unwrap();
    assert_agreed_clean(image);
}

#[test]
fn a_restored_metadata_image_is_not_damaged() {
    if !capability::kernel_oracle() || !capability::program("btrfs-image") {
        return;
    }
    let image = made("", |root| {
        fs::write(root.join("file"), [1; 9000]).unwrap();
        sync(root);
    });
    let (dump, restored) = (Image::empty(0).unwrap(), Image::empty(0).unwrap());
    run("btrfs-image", [image.path(), dump.path()]).unwrap();
    run("btrfs-image", ["-r".as_ref(), dump.path().as_os_str(), restored.path().as_os_str()]).unwrap();
    let (report, problems) = check(restored.path());
    let errors: Vec<_> = problems.iter().filter(|problem| problem.code.is_error()).collect();
    // A dump has no data, so the data checksums cannot match.
    assert!(errors.iter().all(|problem| problem.code == Code::DataCsum), "{errors:?}");
    assert_eq!(report.counts.get(&Code::SuperMissing), Some(&1), "{problems:?}");
    // A mirror of zeros is only a warning, but a mirror with other invalid content is an error.
    restored.write_at((64 << 20) + 100, &[1]).unwrap();
    assert!(codes(&restored).contains(&Code::SuperMirror));
}

#[test]
fn preallocated_space_that_another_file_wrote_to_may_have_checksums() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = made("", |root| {
        let mut rng = Rng::new(2);
        fs::write(root.join("writer"), rng.bytes(65_536)).unwrap();
        sync(root);
        let (from, to) = (root.join("writer"), root.join("reader"));
        run("cp", ["--reflink=always".as_ref(), from.as_os_str(), to.as_os_str()]).unwrap();
        sync(root);
    });
    assert_agreed_clean(&image);
    let preallocate = |ino| {
        craft(&image, move |items| find(items, ino, KeyType::EXTENT_DATA).map(|(_, data)| data[20] = 2).is_some())
    };
    preallocate(258);
    assert_eq!(codes(&image), []);
    assert!(is_clean_for_btrfs(&image));
    preallocate(257);
    assert_eq!(codes(&image), [Code::CsumExtra], "nobody wrote there");
}

#[test]
fn an_inode_without_names_may_be_truncated_half_way() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = made("", |root| {
        let path = root.join("file");
        fs::write(&path, [1; 65_536]).unwrap();
        sync(root);
    });
    let with_nbytes = |nbytes: u64, dying: bool| {
        craft(&image, move |items| {
            let Some((_, data)) = find(items, 257, KeyType::INODE_ITEM) else { return false };
            number(data, 24, nbytes);
            if !dying {
                return true;
            }
            // Set the inode's link count to 0, remove its name, and add an orphan item.
            data[40..44].fill(0);
            items.retain(|(key, _)| {
                !matches!(key.item_type, KeyType::INODE_REF if key.objectid == 257)
                    && !matches!(key.item_type, KeyType::DIR_ITEM | KeyType::DIR_INDEX)
            });
            if let Some((_, root)) = find(items, 256, KeyType::INODE_ITEM) {
                number(root, 16, 0);
            }
            insert(items, Key::new(objectid::ORPHAN, KeyType::ORPHAN_ITEM, 257), Vec::new());
            true
        })
    };
    let damage = with_nbytes(65_536 + 4096, true);
    assert_eq!(codes(&image), []);
    assert!(is_clean_for_btrfs(&image));
    damage.undo(&image).unwrap();
    let damage = with_nbytes(65_536 - 4096, true);
    assert_eq!(codes(&image), [Code::InodeNbytes], "truncation leaves too many, never too few");
    damage.undo(&image).unwrap();
    with_nbytes(65_536 + 4096, false);
    assert_eq!(codes(&image), [Code::InodeNbytes], "it has a name");
}

#[test]
fn a_directory_without_a_name_may_be_emptied_half_way() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = dying_directory();
    assert_eq!(codes(&image), []);
    craft(&image, |items| {
        let mut entry = vec![0; 30];
        entry[..17].copy_from_slice(&Key::new(258, KeyType::INODE_ITEM, 0).encode());
        entry[27..29].copy_from_slice(&3u16.to_le_bytes());
        entry[29] = 1;
        entry.extend(b"bar");
        insert(items, Key::new(257, KeyType::DIR_INDEX, 2), entry);
        true
    });
    assert_eq!(codes(&image), []);
    assert!(is_clean_for_btrfs(&image));
    // Once the directory's link count is 1, the exemption for orphans ends. The directory has an entry for inode 258,
    // but inode 258 does not list that name, which is a problem then.
    craft(&image, |items| find(items, 257, KeyType::INODE_ITEM).map(|(_, data)| data[40] = 1).is_some());
    assert!(codes(&image).contains(&Code::InodeNames));
}

/// An image in which inodes 257 (a directory) and 258 (a file) have orphan items and no names.
fn dying_directory() -> Image {
    let image = made("", |root| {
        fs::create_dir(root.join("dir")).unwrap();
        fs::write(root.join("file"), [1; 65_536]).unwrap();
        sync(root);
    });
    craft(&image, |items| {
        items.retain(|(key, _)| match key.item_type {
            KeyType::INODE_REF => key.objectid == 256,
            KeyType::DIR_ITEM | KeyType::DIR_INDEX => false,
            _ => true,
        });
        for ino in [257, 258] {
            let Some((_, data)) = find(items, ino, KeyType::INODE_ITEM) else { return false };
            data[40..44].fill(0);
            insert(items, Key::new(objectid::ORPHAN, KeyType::ORPHAN_ITEM, ino), Vec::new());
        }
        find(items, 256, KeyType::INODE_ITEM).map(|(_, root)| number(root, 16, 0)).is_some()
    });
    image
}

#[test]
fn one_name_twice_in_a_directory_is_found() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = made("", |root| {
        fs::write(root.join("foo"), "").unwrap();
        fs::write(root.join("bar"), "").unwrap();
        sync(root);
    });
    // All directory entries and references with the name of the second file get the name of the first file.
    craft(&image, |items| {
        let is_entry = |key: &Key, data: &[u8], name: &[u8]| key.item_type == KeyType::DIR_ITEM && data.ends_with(name);
        let Some(bar) = items.iter().position(|(key, data)| is_entry(key, data, b"bar")) else { return false };
        let (_, mut entry) = items.remove(bar);
        entry[30..].copy_from_slice(b"foo");
        let Some((_, foo)) = items.iter_mut().find(|(key, data)| is_entry(key, data, b"foo")) else { return false };
        foo.extend(entry);
        for (key, data) in items.iter_mut() {
            if matches!(key.item_type, KeyType::DIR_INDEX | KeyType::INODE_REF) && data.ends_with(b"bar") {
                let at = data.len() - 3;
                data[at..].copy_from_slice(b"foo");
            }
        }
        true
    });
    assert_eq!(codes(&image), [Code::InodeNames]);
}

#[test]
fn an_item_of_no_known_type_is_found() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = made("", |root| {
        fs::write(root.join("file"), "").unwrap();
        sync(root);
    });
    for key in [Key::new(257, KeyType(8), 256), Key::new(257, KeyType::ROOT_ITEM, 1), Key::new(7, KeyType(99), 0)] {
        let damage = craft(&image, |items| {
            insert(items, key, Vec::new());
            true
        });
        assert!(codes(&image).iter().any(|code| code.is_error()), "{key}");
        damage.undo(&image).unwrap();
    }
}

#[test]
fn an_inode_number_cache_is_told_and_no_damage() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = made("", sync);
    craft(&image, |items| {
        let Some((_, inode)) = find(items, 256, KeyType::INODE_ITEM).cloned() else { return false };
        insert(items, Key::new(objectid::FREE_INO, KeyType::INODE_ITEM, 0), inode);
        insert(items, Key::new(objectid::FREE_SPACE, KeyType(0), objectid::FREE_INO), vec![0; 41]);
        true
    });
    assert_eq!(codes(&image), [Code::InodeCache]);
    assert!(check(image.path()).0.is_clean());
}

#[test]
fn compressed_data_without_checksums_is_found() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = made("compress-force=zlib", |root| {
        fs::write(root.join("file"), [1; 131_072]).unwrap();
        sync(root);
    });
    assert_agreed_clean(&image);
    craft_in(&image, 7, |items| {
        let before = items.len();
        items.retain(|(key, _)| key.item_type != KeyType::EXTENT_CSUM);
        items.len() < before
    });
    craft(&image, |items| find(items, 257, KeyType::INODE_ITEM).map(|(_, data)| data[64] |= 1).is_some());
    assert_eq!(codes(&image), [Code::CsumMissing]);
    assert!(!is_clean_for_btrfs(&image));
}

#[test]
fn free_space_where_the_next_block_group_will_be_is_found() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = made("", sync);
    assert_eq!(codes(&image), []);
    let damage = Corruptor::new(&image).unwrap().apply(Corruption::FreeSpaceAdded, &mut Rng::new(1)).unwrap().unwrap();
    assert_eq!(codes(&image), [Code::FreeSpace]);
    damage.undo(&image).unwrap();
    // A free space info in address space below all block groups is a harmless relic of old mkfs.btrfs.
    craft_in(&image, 10, |items| {
        items.retain(|(key, _)| key.objectid >= 13 << 20);
        insert(items, Key::new(1 << 20, KeyType::FREE_SPACE_INFO, 1 << 20), vec![1, 0, 0, 0, 0, 0, 0, 0]);
        insert(items, Key::new(1 << 20, KeyType::FREE_SPACE_EXTENT, 1 << 20), Vec::new());
        true
    });
    let (report, _) = check(image.path());
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.counts.get(&Code::FreeSpaceStale), Some(&1));
}

/// mkfs.btrfs up to 6.16 leaves free space infos of no block group. A later block group can get the same address.
#[test]
fn commits_replace_stale_free_space_in_the_place_of_a_new_block_group() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = made("", sync);
    let end = Corruptor::new(&image).unwrap().chunk_end();
    craft_in(&image, 10, |items| {
        let is_last = items.last().is_some_and(|(key, _)| key.objectid < end);
        if is_last {
            items.push((Key::new(end + (1 << 20), KeyType::FREE_SPACE_INFO, 1 << 20), vec![1, 0, 0, 0, 0, 0, 0, 0]));
            items.push((Key::new(end + (1 << 20), KeyType::FREE_SPACE_EXTENT, 1 << 20), Vec::new()));
        }
        is_last
    });
    assert_eq!(codes(&image), [Code::FreeSpace]);
    let mut fs = FsTarget::open(image.path(), "").unwrap();
    fs.create(b"f", NodeKind::File, 0o644, (0, 0)).unwrap();
    for piece in 0..100 {
        fs.write(b"f", piece << 20, &[7; 1 << 20]).unwrap();
    }
    fs.close().unwrap();
    assert!(Corruptor::new(&image).unwrap().chunk_end() > end + (2 << 20), "a block group was made");
    assert_agreed_clean(&image);
}

/// Kernels since 7.1 compress the whole sector of a short file. `ram_bytes` is then less than the length of the
/// decompressed data, whose rest is ignored.
#[test]
fn an_inline_extent_may_decompress_to_more_than_its_ram_bytes() {
    if !capability::kernel_oracle() {
        return;
    }
    let content: Vec<u8> = (0..4095_u32).map(|at| b'a' + (at / 40 % 26) as u8).collect();
    for method in ["zlib", "lzo", "zstd"] {
        let image = made(&format!("compress-force={method}"), |root| {
            fs::write(root.join("f"), &content).unwrap();
            sync(root);
        });
        const SHORT: usize = 100;
        craft(&image, |items| {
            let Some((_, inode)) = find(items, 257, KeyType::INODE_ITEM) else { return false };
            number(inode, 16, SHORT as u64);
            number(inode, 24, SHORT as u64);
            let (_, extent) = find(items, 257, KeyType::EXTENT_DATA).unwrap();
            assert!(extent[16] != 0 && extent[20] == 0, "a compressed inline extent");
            number(extent, 8, SHORT as u64);
            true
        });
        assert_agreed_clean(&image);
        let open = || FsTarget::open(image.path(), "").unwrap();
        let mut fs = open();
        assert_eq!(fs.read(b"f", 0, 8000).unwrap(), content[..SHORT], "{method}");
        // Bytes of the stream behind the end must not appear when the file grows, or when it is written again.
        let mut expected = content[..SHORT].to_vec();
        fs.truncate(b"f", 60).unwrap();
        fs.truncate(b"f", 3000).unwrap();
        expected.truncate(60);
        expected.resize(3000, 0);
        assert_eq!(fs.read(b"f", 0, 8000).unwrap(), expected, "{method}");
        fs.close().unwrap();
        assert_agreed_clean(&image);
        let mount = LoopMount::new(image.path(), "").unwrap();
        assert_eq!(fs::read(mount.join("f")).unwrap(), expected, "{method}");
    }
    for (offset, end) in [(50, 52), (100, 102), (3000, 3002), (9000, 9002)] {
        let image = made("compress-force=zstd", |root| {
            fs::write(root.join("f"), &content).unwrap();
            sync(root);
        });
        craft(&image, |items| {
            let Some((_, inode)) = find(items, 257, KeyType::INODE_ITEM) else { return false };
            number(inode, 16, 100);
            number(inode, 24, 100);
            number(&mut find(items, 257, KeyType::EXTENT_DATA).unwrap().1, 8, 100);
            true
        });
        let mut fs = FsTarget::open(image.path(), "").unwrap();
        fs.write(b"f", offset, b"zz").unwrap();
        let mut expected = content[..100].to_vec();
        expected.resize(expected.len().max(end), 0);
        expected[offset as usize..end].copy_from_slice(b"zz");
        assert_eq!(fs.read(b"f", 0, 20_000).unwrap(), expected);
        fs.close().unwrap();
        assert_agreed_clean(&image);
        let mount = LoopMount::new(image.path(), "").unwrap();
        assert_eq!(fs::read(mount.join("f")).unwrap(), expected);
    }
}

/// mkfs.btrfs stores the target of a symbolic link with a zero byte behind it.
#[test]
fn symbolic_links_of_mkfs_with_a_root_directory_are_no_damage() {
    if !capability::kernel_oracle() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let long = "x".repeat(2000);
    for (name, target) in [("short", "target"), ("long", &*long)] {
        std::os::unix::fs::symlink(target, dir.path().join(name)).unwrap();
    }
    let image = Image::empty(200 << 20).unwrap();
    run("mkfs.btrfs", ["-q".as_ref(), "--rootdir".as_ref(), dir.path().as_os_str(), image.path().as_os_str()]).unwrap();
    btrfs_check(image.path()).unwrap();
    assert!([vec![], vec![Code::SymlinkEnd]].contains(&codes(&image)));
    let fs = FsTarget::open(image.path(), "ro").unwrap();
    for (name, target) in [("short", "target"), ("long", &*long)] {
        let link = fs.lookup(name.as_bytes()).unwrap();
        assert_eq!((link.size, fs.fs().readlink(link.id).unwrap()), (target.len() as u64, target.as_bytes().to_vec()));
    }
    // Any other difference between size and target is damage.
    drop(fs);
    craft(&image, |items| {
        let Some(at) = items.iter().position(|(key, _)| key.item_type == KeyType::EXTENT_DATA) else { return false };
        *items[at].1.last_mut().unwrap() = b'y';
        true
    });
    assert!(codes(&image).contains(&Code::InodeSize));
}

#[test]
fn nothing_is_of_a_generation_above_the_superblocks() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = made("", |root| {
        fs::write(root.join("file"), [1; 65_536]).unwrap();
        sync(root);
    });
    let newest = u64::from_le_bytes(image.read_at(65_536 + 72, 8).unwrap().try_into().unwrap());
    for (tree, kind, at) in [(2, KeyType::EXTENT_ITEM, 8), (2, KeyType::METADATA_ITEM, 8), (5, KeyType::EXTENT_DATA, 0)]
    {
        let with = |generation: u64| {
            craft_in(&image, tree, move |items| {
                let found = items.iter_mut().find(|(key, _)| key.item_type == kind);
                found.map(|(_, data)| number(data, at, generation)).is_some()
            })
        };
        let damage = with(newest + 1);
        assert!(check(image.path()).0.counts.keys().any(|code| code.is_error()), "{kind:?}");
        damage.undo(&image).unwrap();
    }
    assert_eq!(codes(&image), []);
}

/// Makes an image in which Linux left a log of one file: inode 258, with 100,000 bytes of data.
fn logged() -> (Image, Vec<u8>) {
    let content = Rng::new(3).bytes(100_000);
    let image = made("", |root| {
        fs::write(root.join("committed"), [1; 65_536]).unwrap();
        sync(root);
        let mut file = File::create(root.join("file")).unwrap();
        file.write_all(&content).unwrap();
        file.sync_all().unwrap();
    });
    (image, content)
}

const TREE_LOG: u64 = (-6i64).cast_unsigned();

fn take_csums(image: &Image) -> (Key, Vec<u8>) {
    let taken = std::cell::RefCell::new(None);
    craft_in(image, TREE_LOG, |items| {
        let at = items.iter().position(|(key, _)| key.item_type == KeyType::EXTENT_CSUM);
        *taken.borrow_mut() = at.map(|at| items.remove(at));
        at.is_some()
    });
    taken.into_inner().unwrap()
}

#[test]
fn data_of_a_log_is_verified() {
    if !capability::kernel_oracle() {
        return;
    }
    let (image, content) = logged();
    let (report, problems) = check(image.path());
    assert!(report.is_clean() && problems.is_empty(), "{problems:?}");
    assert!(report.stats.data_bytes_verified >= 65_536 + 100_000, "{report:?}");
    let raw = fs::read(image.path()).unwrap();
    let at = (0..raw.len()).step_by(4096).find(|&at| raw[at..].starts_with(&content[..4096])).unwrap();
    image.write_at(at as u64 + 50_000, &[!content[50_000]]).unwrap();
    assert_eq!(codes(&image), [Code::DataCsum]);
}

#[test]
fn data_of_a_log_without_checksums_is_found_and_reading_it_fails_as_in_linux() {
    if !capability::kernel_oracle() {
        return;
    }
    let (image, content) = logged();
    take_csums(&image);
    assert_eq!(codes(&image), [Code::CsumMissing]);
    let copy = Image::copy_of(image.path()).unwrap();
    let mount = LoopMount::new(copy.path(), "").unwrap();
    assert_eq!(fs::read(mount.join("file")).unwrap_err().raw_os_error(), Some(Errno::IO.raw_os_error()));
    mount.close().unwrap();
    let mut target = FsTarget::open(image.path(), "").unwrap();
    assert_eq!(target.read(b"file", 0, content.len()), Err(5));
    target.close().unwrap();
    assert_eq!(codes(&image), codes(&copy), "after both have replayed it");
}

#[test]
fn checksums_of_data_that_only_a_log_knows_are_no_damage() {
    if !capability::kernel_oracle() {
        return;
    }
    let (image, _) = logged();
    let (key, csums) = take_csums(&image);
    craft_in(&image, 7, |items| {
        insert(items, key, csums.clone());
        true
    });
    assert_eq!(codes(&image), []);
    assert!(is_clean_for_btrfs(&image));
    // Remove the log from both superblocks. Then the checksums belong to no data.
    for offset in [64 << 10, 64 << 20] {
        let mut raw = image.read_at(offset, 4096).unwrap();
        number(&mut raw, 96, 0);
        let csum = ubtrfs_format::CsumType::Crc32c.compute(&raw[32..]);
        raw[..32].copy_from_slice(&csum);
        image.write_at(offset, &raw).unwrap();
    }
    assert_eq!(codes(&image), [Code::CsumExtra]);
}

#[test]
fn data_of_a_log_lies_on_free_space_of_a_data_block_group() {
    if !capability::kernel_oracle() {
        return;
    }
    let (image, _) = logged();
    let superblock = image.read_at(65_536, 4096).unwrap();
    let root = u64::from_le_bytes(superblock[80..88].try_into().unwrap());
    // Let the file extent point to three wrong places in turn: the root tree's block, which is in the metadata block
    // group; free space after the root tree; an address outside of all block groups.
    for (bytenr, what) in
        [(root, "another extent"), (root + (16 << 20), "no data block group"), (1 << 50, "no data block group")]
    {
        let damage = craft_in(&image, TREE_LOG, |items| {
            find(items, 258, KeyType::EXTENT_DATA).map(|(_, data)| number(data, 21, bytenr)).is_some()
        });
        let (_, problems) = check(image.path());
        let found = problems.iter().any(|problem| problem.code == Code::Log && problem.text.contains(what));
        assert!(found, "{what}: {problems:?}");
        damage.undo(&image).unwrap();
    }
    assert_eq!(codes(&image), []);
}

/// The filesystem was made by Linux, and has quotas and a group that contains another group.
#[test]
fn wrong_quota_numbers_and_incomplete_groups_are_found() {
    if !capability::kernel_oracle() {
        return;
    }
    let whole = made("", |path| {
        let script = "btrfs -q subvolume create a; head -c 300000 /dev/urandom > a/file
            btrfs quota enable .; btrfs qgroup create 1/1 .
            btrfs qgroup assign --rescan 0/256 1/1 .; btrfs quota rescan -w . > /dev/null; btrfs filesystem sync .";
        run("bash", ["-ec", &format!("cd {} && {script}", path.display())]).unwrap();
    });
    assert_agreed_clean(&whole);
    let (subvolume, parent) = (256, 1 << 48 | 1);
    let place = |items: &Items, kind: KeyType, objectid: u64, group: u64| {
        items.iter().position(|(key, _)| (key.item_type, key.objectid, key.offset) == (kind, objectid, group))
    };
    let crafted = |change: &dyn Fn(&mut Items) -> Option<()>| {
        let image = Image::copy_of(whole.path()).unwrap();
        craft_in(&image, 8, |items| change(items).is_some());
        codes(&image)
    };
    // A group's numbers: bytes referenced at offset 8, exclusive at offset 24.
    for (group, field) in [(subvolume, 8), (subvolume, 24), (parent, 8), (parent, 24)] {
        let wrong = |items: &mut Items| {
            let at = place(items, KeyType::QGROUP_INFO, 0, group)?;
            number(&mut items[at].1, field, 12 << 20);
            Some(())
        };
        assert_eq!(crafted(&wrong), [Code::Qgroup], "{group} {field}");
        // Linux marks numbers that may be wrong as inconsistent. The flags are at offset 16 of the status item.
        let marked = |items: &mut Items| {
            let at = items.iter().position(|(key, _)| key.item_type == KeyType::QGROUP_STATUS)?;
            items[at].1[16] |= 4;
            wrong(items)
        };
        assert_eq!(crafted(&marked), [], "{group} {field}");
    }
    for (kind, objectid, offset) in [
        (KeyType::QGROUP_LIMIT, 0, subvolume),
        (KeyType::QGROUP_INFO, 0, parent),
        (KeyType::QGROUP_RELATION, subvolume, parent),
        (KeyType::QGROUP_RELATION, parent, subvolume),
    ] {
        let missing = |items: &mut Items| {
            let at = place(items, kind, objectid, offset)?;
            items.remove(at);
            Some(())
        };
        assert!(crafted(&missing).contains(&Code::QgroupItem), "{kind:?} {objectid} {offset}");
    }
}

#[test]
fn the_root_directory_refers_to_itself_with_index_zero() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = made("", |_| ());
    let damage = craft(&image, |items| {
        find(items, objectid::FIRST_FREE, KeyType::INODE_REF).map(|(_, data)| number(data, 0, 7)).is_some()
    });
    assert_eq!(codes(&image), [Code::InodeNames]);
    assert!(!is_clean_for_btrfs(&image));
    damage.undo(&image).unwrap();
    assert_agreed_clean(&image);
}

#[test]
fn every_block_has_the_revision_of_mixed_backrefs() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = made("", |root| fs::write(root.join("file"), "content").unwrap());
    let block = RawBlock::live(&image).unwrap().into_iter().find(|block| block.owner == 5).unwrap();
    let mut raw = image.read_at(block.copies[0], 16_384).unwrap();
    assert_eq!(raw[63], 1);
    raw[63] = 0;
    let sum = CsumType::Crc32c.compute(&raw[32..]);
    raw[..32].copy_from_slice(&sum);
    for copy in &block.copies {
        image.write_at(*copy, &raw).unwrap();
    }
    assert_eq!(codes(&image), [Code::BlockHeader]);
    assert!(!is_clean_for_btrfs(&image));
}
