//! Tests damaged filesystems: a block with another good copy is read and repaired, a bad block without a good copy
//! causes an error that names the block, and no content of a disk makes the engine panic.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno as Sys;
use ubtrfs_check::{Code, Options, check};
use ubtrfs_device::Device;
use ubtrfs_format::node::{HEADER_SIZE, ITEM_HEAD_SIZE};
use ubtrfs_format::superblock::{SUPERBLOCK_SIZE, Superblock};
use ubtrfs_format::{CsumType, check_superblock};
use ubtrfs_fs::MountOptions;
use ubtrfs_testkit::{
    Compare, Corruption, Corruptor, FsTarget, Image, KernelImage, KernelImageSpec, LoopMount, NodeKind, RawBlock,
    RecordingDevice, Rng, Target, btrfs_check, btrfs_check_output, capability, compare_entries, second_opinion,
    walk_path,
};

/// Flips a bit at a random place in `len` bytes at `offset`.
fn damage(image: &Image, rng: &mut Rng, offset: u64, len: u64) {
    let at = offset + rng.below(len);
    let byte = image.read_at(at, 1).unwrap()[0];
    image.write_at(at, &[byte ^ (1 << rng.below(8))]).unwrap();
}

/// Makes a small filesystem with these arguments of `mkfs.btrfs`, and fills it with `fill` through Linux's mount.
fn small(mkfs: &[&str], fill: impl Fn(&Path)) -> Image {
    let image = Image::kernel_made(256 << 20, mkfs).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    fill(mount.path());
    mount.close().unwrap();
    image
}

fn some_files(root: &Path) {
    let mut rng = Rng::new(5);
    for index in 0..150 {
        let dir = root.join(format!("dir-{}", index % 7));
        let _ = std::fs::create_dir(&dir);
        let len = rng.len(40_000) as usize;
        std::fs::write(dir.join(format!("file-{index}")), rng.content(len)).unwrap();
        std::os::unix::fs::symlink("somewhere", dir.join(format!("link-{index}"))).unwrap();
    }
}

#[test]
fn a_bad_copy_of_a_block_is_mended_from_the_good_one() {
    if !capability::kernel_oracle() {
        return;
    }
    let rich = KernelImage::rich(KernelImageSpec::DEFAULT, 3).unwrap();
    let image = &rich.image;
    let mount = LoopMount::new(image.path(), "ro").unwrap();
    let linux = walk_path(mount.path()).unwrap();
    mount.close().unwrap();
    let mut rng = Rng::new(31);
    // The blocks of the trees that are read when every file is read: root, chunk, checksum and subvolume trees.
    let blocks = RawBlock::live(image).unwrap();
    let read: Vec<_> = blocks.iter().filter(|block| [1, 3, 7].contains(&block.owner) || block.is_subvolume()).collect();
    assert!(read.len() > 100, "only {} blocks", read.len());
    for block in &read {
        assert_eq!(block.copies.len(), 2, "{block:?}");
        // Damage the first copy, because a read uses that copy first.
        damage(image, &mut rng, block.copies[0], 16_384);
    }
    let target = FsTarget::open(image.path(), "").unwrap();
    compare_entries(&linux, &target.walk().unwrap(), Compare::ALL).unwrap();
    target.close().unwrap();
    let same = |block: &&&RawBlock| {
        let copy = |at| image.read_at(at, 16_384).unwrap();
        copy(block.copies[0]) == copy(block.copies[1])
    };
    let mended = read.iter().filter(same).count();
    // A walk does not read leaves that contain only inode references of files with many links, so up to 5% of the
    // damaged blocks may remain damaged.
    assert!(mended * 20 >= read.len() * 19, "{mended} of {} were mended", read.len());
    println!("{mended} of {} were mended", read.len());
    let mount = LoopMount::new(image.path(), "").unwrap();
    let _ = mount.scrub();
    mount.scrub().unwrap();
    compare_entries(&linux, &walk_path(mount.path()).unwrap(), Compare::ALL).unwrap();
    mount.close().unwrap();
    btrfs_check(image.path()).unwrap();
}

#[test]
fn reading_a_bad_copy_without_write_access_changes_nothing() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = small(&[], some_files);
    let mut rng = Rng::new(32);
    for block in RawBlock::live(&image).unwrap() {
        damage(&image, &mut rng, block.copies[1], 16_384);
    }
    let before = image.digest().unwrap();
    let target = FsTarget::open(image.path(), "ro").unwrap();
    target.walk().unwrap();
    target.close().unwrap();
    assert_eq!(before, image.digest().unwrap());
}

#[test]
fn a_block_without_a_good_copy_is_an_error_that_says_where() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = small(&["-m", "single", "-n", "4096"], some_files);
    let mut rng = Rng::new(33);
    let blocks = RawBlock::live(&image).unwrap();
    let leaves: Vec<_> = blocks.iter().filter(|block| block.owner == 5 && block.level == 0).collect();
    let victim = leaves[leaves.len() / 2];
    damage(&image, &mut rng, victim.copies[0], 4096);
    let target = FsTarget::open(image.path(), "").unwrap();
    let error = format!("{:#}", target.walk().unwrap_err());
    assert!(error.contains(&format!("bytenr {}", victim.bytenr)) && error.contains("tree 5"), "{error}");
    let mut seen = 0;
    for index in 0..150 {
        match target.lookup(format!("dir-{}/file-{index}", index % 7).as_bytes()) {
            Ok(_) => seen += 1,
            Err(errno) => {
                assert!([Sys::IO.raw_os_error(), Sys::UCLEAN.raw_os_error()].contains(&errno), "errno {errno}");
            }
        }
    }
    assert!((1..150).contains(&seen), "{seen} of 150 files were found");
}

/// Finds the offsets of the sectors of the image that begin with these bytes.
fn places(image: &Image, needle: &[u8]) -> Vec<u64> {
    let raw = std::fs::read(image.path()).unwrap();
    (0..raw.len()).step_by(4096).filter(|&at| raw[at..].starts_with(needle)).map(|at| at as u64).collect()
}

#[test]
fn damaged_data_is_an_error_and_only_there() {
    if !capability::kernel_oracle() {
        return;
    }
    for csum in ["crc32c", "xxhash", "sha256", "blake2"] {
        let content = Rng::new(34).bytes(200_000);
        let image = small(&["--csum", csum], |root| {
            std::fs::write(root.join("file"), &content).unwrap();
        });
        let at = places(&image, &content[..4096]);
        assert_eq!(at.len(), 1);
        damage(&image, &mut Rng::new(35), at[0] + 40_960, 4096);
        let before = image.digest().unwrap();
        let mut target = FsTarget::open(image.path(), "ro").unwrap();
        assert_eq!(target.read(b"file", 0, 40_960).unwrap(), content[..40_960]);
        assert_eq!(target.read(b"file", 45_056, 200_000).unwrap(), content[45_056..]);
        assert_eq!(target.read(b"file", 45_000, 10), Err(Sys::IO.raw_os_error()), "{csum}");
        target.close().unwrap();
        assert_eq!(before, image.digest().unwrap());
    }
}

#[test]
fn damaged_data_with_a_second_copy_is_mended() {
    if !capability::kernel_oracle() {
        return;
    }
    let content = Rng::new(36).bytes(200_000);
    let image = small(&["-d", "dup"], |root| std::fs::write(root.join("file"), &content).unwrap());
    let at = places(&image, &content[..4096]);
    assert_eq!(at.len(), 2);
    let mut rng = Rng::new(37);
    damage(&image, &mut rng, at[0], 4096);
    damage(&image, &mut rng, at[0] + 8192, 4096);
    damage(&image, &mut rng, at[1] + 81_920, 4096);
    let mut target = FsTarget::open(image.path(), "").unwrap();
    assert!(target.read(b"file", 0, 300_000).unwrap() == content);
    target.close().unwrap();
    assert_eq!(places(&image, &content[..4096]).len(), 2);
    let mount = LoopMount::new(image.path(), "").unwrap();
    // The first scrub may still find a bad copy, because a read does not notice a bad second copy if the first copy is
    // good.
    let _ = mount.scrub();
    mount.scrub().unwrap();
    assert!(std::fs::read(mount.join("file")).unwrap() == content);
}

#[test]
fn a_superblock_that_is_lost_is_taken_from_its_mirror_for_reading() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = small(&[], some_files);
    let mount = LoopMount::new(image.path(), "").unwrap();
    let linux = walk_path(mount.path()).unwrap();
    mount.close().unwrap();
    image.write_at(64 << 10, &[0; 4096]).unwrap();
    let before = image.digest().unwrap();
    // The image opens read-only, because a device without its first superblock may now belong to something else.
    let mut target = FsTarget::open(image.path(), "").unwrap();
    println!("{}", target.fs().read_only().unwrap());
    compare_entries(&linux, &target.walk().unwrap(), Compare::ALL).unwrap();
    assert_eq!(target.create(b"new", NodeKind::File, 0o644, (0, 0)), Err(Sys::ROFS.raw_os_error()));
    target.close().unwrap();
    assert_eq!(before, image.digest().unwrap());
}

/// The engine may refuse a damaged filesystem, or open and change it. In both cases, a superblock that was valid before
/// stays valid, and still states the same filesystem, device and address.
#[test]
fn superblocks_outlive_writes_to_a_crafted_image() {
    if !capability::kernel_oracle() {
        return;
    }
    let seed = Rng::seed_or(39);
    let image = small(&[], some_files);
    let corruptor = Corruptor::new(&image).unwrap();
    let pristine = RecordingDevice::from_image(image.path()).unwrap();
    let identity = |device: &dyn Device, offset| {
        let mut raw = vec![0; SUPERBLOCK_SIZE];
        device.read_at(offset, &mut raw).ok()?;
        let found = Superblock::decode(&raw).ok().filter(|found| check_superblock(found, &raw).is_ok())?;
        Some((found.bytenr, found.fsid, found.dev_item.uuid, found.dev_item.fsid, found.dev_item.devid))
    };
    let mut written = 0;
    let ways = Corruption::ALL.iter().chain([&Corruption::DevItemForeign, &Corruption::DevItemField].repeat(8));
    for (round, way) in ways.enumerate() {
        let mut rng = Rng::new(seed + round as u64);
        let Some(damage) = corruptor.apply(*way, &mut rng).unwrap() else { continue };
        let device = Arc::new(pristine.fork());
        for (offset, len) in damage.places() {
            device.write_at(offset, &image.read_at(offset, len).unwrap()).unwrap();
        }
        let text = format!("seed {seed} round {round} {way}: {}", damage.text);
        damage.undo(&image).unwrap();
        let before = [64 << 10, 64 << 20].map(|offset| identity(device.as_ref(), offset));
        let events = device.events();
        let _refused_or_not = use_it_all(device.clone());
        written += usize::from(device.events() > events);
        for (offset, before) in [64 << 10, 64 << 20].into_iter().zip(before) {
            let after = identity(device.as_ref(), offset);
            assert!(before.is_none() || before == after, "{text}: superblock at {offset} was {before:?}, is {after:?}");
        }
    }
    assert!(written > 20, "only {written} images were written to");
}

/// Both checkers find a wrong byte of file data. Our checker finds a broken copy of the superblock, also the primary.
#[test]
fn the_judges_read_data_and_every_superblock() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = small(&[], some_files);
    btrfs_check(image.path()).unwrap();
    let corruptor = Corruptor::new(&image).unwrap();
    for seed in 0..4 {
        let damage = corruptor.apply(Corruption::DataFlip, &mut Rng::new(seed)).unwrap().unwrap();
        assert!(btrfs_check(image.path()).is_err(), "{}", damage.text);
        assert!(second_opinion(image.path()).is_err(), "{}", damage.text);
        damage.undo(&image).unwrap();
    }
    let mut damaged = BTreeSet::new();
    for seed in 0..16 {
        let damage = corruptor.apply(Corruption::SuperMirror, &mut Rng::new(seed)).unwrap().unwrap();
        damaged.extend(damage.places().map(|(offset, _)| offset));
        let device = Arc::new(RecordingDevice::from_image(image.path()).unwrap());
        let mut codes = Vec::new();
        let checked = check(vec![device], Options::default(), &(), &mut |problem| codes.push(problem.code));
        assert!(checked.is_err() || codes.contains(&Code::SuperMirror), "{}: {codes:?}", damage.text);
        damage.undo(&image).unwrap();
    }
    assert_eq!(damaged, BTreeSet::from([64 << 10, 64 << 20]));
}

/// The error about a device item of another filesystem says where the item is.
#[test]
fn a_foreign_device_item_is_refused_with_its_place() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = small(&[], some_files);
    let corruptor = Corruptor::new(&image).unwrap();
    let before = image.digest().unwrap();
    let chunk_root = RawBlock::live(&image).unwrap().into_iter().find(|block| block.owner == 3).unwrap();
    for seed in 0..6 {
        let damage = corruptor.apply(Corruption::DevItemForeign, &mut Rng::new(seed)).unwrap().unwrap();
        let crafted = image.digest().unwrap();
        let error = format!("{:#}", FsTarget::open(image.path(), "").err().unwrap());
        let place = format!("tree 3 bytenr {} slot 0", chunk_root.bytenr);
        assert!(error.contains(&place) && error.contains("DevItem"), "{error}");
        let (success, said) = btrfs_check_output(image.path(), &["--readonly"]).unwrap();
        assert!(second_opinion(image.path()).is_err(), "btrfs check ({success}): {said}");
        assert_eq!(crafted, image.digest().unwrap(), "{}", damage.text);
        damage.undo(&image).unwrap();
    }
    assert_eq!(before, image.digest().unwrap());
}

/// Blocks with wrong content and a valid checksum cause no panic and no hang; errors and different answers are fine.
#[test]
fn crafted_blocks_never_panic() {
    if !capability::kernel_oracle() {
        return;
    }
    let seed = Rng::seed_or(38);
    let image = small(&["-m", "single", "-n", "4096"], some_files);
    let blocks = RawBlock::live(&image).unwrap();
    let pristine = RecordingDevice::from_image(image.path()).unwrap();
    let mut errors = 0;
    const ROUNDS: u64 = 600;
    for round in 0..ROUNDS {
        let mut rng = Rng::new(seed + round);
        let block = rng.pick(&blocks).clone();
        let mut crafted = image.read_at(block.copies[0], 4096).unwrap();
        for _ in 0..=rng.below(3) {
            // Usually damage item heads, sometimes item data.
            let used = HEADER_SIZE as u64 + ITEM_HEAD_SIZE as u64 * u64::from(block.nritems).min(150);
            let place = if rng.one_in(3) { 32 + rng.below(4064) } else { 48 + rng.below(used.min(4096) - 48) };
            crafted[place as usize] = match rng.below(4) {
                0 => 0,
                1 => 0xff,
                2 => crafted[place as usize] ^ (1 << rng.below(8)),
                _ => rng.next_u64() as u8,
            };
        }
        let csum = CsumType::Crc32c.compute(&crafted[32..]);
        crafted[..32].copy_from_slice(&csum);
        let device = pristine.fork();
        device.write_at(block.copies[0], &crafted).unwrap();
        println!("seed {} (round {round}), block {} of tree {}", seed + round, block.bytenr, block.owner);
        errors += u64::from(use_it_all(Arc::new(device)).is_err());
    }
    println!("{errors} of {ROUNDS} were noticed");
    assert!(errors > ROUNDS / 2, "only {errors} of {ROUNDS} were noticed");
}

fn use_it_all(device: Arc<dyn Device>) -> anyhow::Result<()> {
    let mut target = FsTarget::on_device(device, MountOptions::default())?;
    let walked = target.walk();
    let mut rng = Rng::new(1);
    let errno = |errno| anyhow::anyhow!("errno {errno}");
    let mut changed = target.create(b"new", NodeKind::File, 0o644, (0, 0)).map_err(errno);
    changed = changed.and(target.write(b"new", 0, &rng.bytes(100_000)).map_err(errno));
    for index in 0..20 {
        let path = format!("dir-{}/file-{index}", index % 7).into_bytes();
        changed = changed.and(target.write(&path, 1000, &rng.bytes(5000)).map_err(errno));
        changed = changed.and(target.unlink(&path).map_err(errno));
    }
    changed = changed.and(target.sync().map_err(errno));
    let closed = target.close();
    walked?;
    changed?;
    closed
}
