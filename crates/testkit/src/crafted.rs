//! Makes images whose subvolume trees have wrong content and valid checksums: a name with a slash, a directory with
//! two names, a directory inside itself. The images are made from a valid image, whose leaves are rewritten.
//!
//! I1. Every copy of a changed leaf is rewritten, its items stay in order, and its checksum is valid.

use anyhow::{Result, bail, ensure};
use ubtrfs_format::hash::name_hash;
use ubtrfs_format::item::{DirItem, InodeRef};
use ubtrfs_format::node::{HEADER_SIZE, ITEM_HEAD_SIZE};
use ubtrfs_format::{CsumType, Key, KeyType};

use crate::corruptor::{build_leaf, take_apart};
use crate::raw_blocks::RawBlock;
use crate::{Image, LoopMount};

/// A leaf's items.
type Items = Vec<(Key, Vec<u8>)>;

/// Calls `edit` with the items of every leaf of all subvolumes, and rewrites the changed leaves. Returns the number of
/// changed leaves.
pub fn edit_leaves(image: &Image, edit: &mut dyn FnMut(&mut Items) -> Result<()>) -> Result<usize> {
    let nodesize = image.read_at(65_536 + 148, 4)?;
    let nodesize = u32::from_le_bytes(nodesize.as_slice().try_into()?) as usize;
    let mut nr_changed = 0;
    for block in RawBlock::live(image)?.iter().filter(|block| block.level == 0 && block.is_subvolume()) {
        let old = image.read_at(block.copies[0], nodesize)?;
        let before = take_apart(&old)?;
        let mut items = before.clone();
        edit(&mut items)?;
        items.sort_by_key(|(key, _)| *key);
        if items == before {
            continue;
        }
        let used: usize = items.iter().map(|(_, data)| data.len() + ITEM_HEAD_SIZE).sum();
        ensure!(used + HEADER_SIZE <= nodesize, "the leaf has no room");
        let mut raw = build_leaf(&old, &items);
        let csum = CsumType::Crc32c.compute(&raw[32..]);
        raw[..32].copy_from_slice(&csum);
        for offset in &block.copies {
            image.write_at(*offset, &raw)?;
        }
        nr_changed += 1;
    }
    Ok(nr_changed)
}

/// Changes directory entries, each in its `DIR_ITEM` and in its `DIR_INDEX`.
pub fn edit_entries(image: &Image, edit: &mut dyn FnMut(&mut DirItem)) -> Result<()> {
    let changed = edit_leaves(image, &mut |items| {
        for (key, data) in items.iter_mut() {
            if !matches!(key.item_type, KeyType::DIR_ITEM | KeyType::DIR_INDEX) {
                continue;
            }
            let mut entries = DirItem::decode_all(data)?;
            entries.iter_mut().for_each(&mut *edit);
            data.clear();
            entries.iter().for_each(|entry| entry.encode_into(data));
            if let (KeyType::DIR_ITEM, [entry]) = (key.item_type, &entries[..]) {
                key.offset = name_hash(&entry.name);
            }
        }
        Ok(())
    })?;
    ensure!(changed > 0, "there is no such name");
    Ok(())
}

/// Replaces the name `old` by `new`, in the directory entries and in the inode references.
pub fn rename(image: &Image, old: &[u8], new: &[u8]) -> Result<()> {
    edit_entries(image, &mut |entry| {
        if entry.name == old {
            entry.name = new.to_vec();
        }
    })?;
    edit_leaves(image, &mut |items| {
        for (_, data) in items.iter_mut().filter(|(key, _)| key.item_type == KeyType::INODE_REF) {
            let mut refs = InodeRef::decode_all(data)?;
            refs.iter_mut()
                .filter(|inode_ref| inode_ref.name == old)
                .for_each(|inode_ref| inode_ref.name = new.to_vec());
            data.clear();
            refs.iter().for_each(|inode_ref| inode_ref.encode_into(data));
        }
        Ok(())
    })?;
    Ok(())
}

/// Points the name `name` to the directory that the name `to` points to.
pub fn redirect(image: &Image, name: &[u8], to: &[u8]) -> Result<()> {
    let mut location = None;
    edit_leaves(image, &mut |items| {
        for (_, data) in items.iter().filter(|(key, _)| key.item_type == KeyType::DIR_ITEM) {
            location =
                location.or(DirItem::decode_all(data)?.iter().find(|entry| entry.name == to).map(|e| e.location));
        }
        Ok(())
    })?;
    let Some(location) = location else { bail!("there is no name to lead to") };
    edit_entries(image, &mut |entry| {
        if entry.name == name {
            entry.location = location;
        }
    })
}

/// Makes hostile images, each with a title. A program that walks a hostile image naively would leave its target
/// directory or never end.
pub fn hostile_trees() -> Result<Vec<(String, Image)>> {
    let good = tree()?;
    let mut images = vec![];
    let mut add = |title: String, craft: &dyn Fn(&Image) -> Result<()>| -> Result<()> {
        let image = Image::copy_of(good.path())?;
        craft(&image)?;
        images.push((title, image));
        Ok(())
    };
    let bad_names: [&[u8]; 8] =
        [b"..", b".", b"../x", b"../../../../../tmp/x", b"/tmp/ubtrfs-leak", b"a/b", b"/", b"a\0b"];
    for bad in bad_names {
        let shown = String::from_utf8_lossy(bad).into_owned();
        add(format!("a file named {shown:?}"), &|image| rename(image, b"file", bad))?;
        if bad.len() < 5 {
            add(format!("a directory named {shown:?}"), &|image| rename(image, b"inner", bad))?;
        }
    }
    add("a directory in itself".into(), &|image| redirect(image, b"leaf", b"outer"))?;
    add("a directory with two names".into(), &|image| redirect(image, b"twin", b"inner"))?;
    add("the root inside of itself".into(), &|image| {
        edit_entries(image, &mut |entry| {
            if entry.name == b"leaf" {
                entry.location = Key::new(256, KeyType::INODE_ITEM, 0);
            }
        })
    })?;
    add("directories that take 2^n steps".into(), &|image| {
        (0..NR_LEVELS - 1)
            .try_for_each(|level| redirect(image, format!("b{level}").as_bytes(), format!("a{level}").as_bytes()))
    })?;
    add("one name twice".into(), &|image| rename(image, b"twin", b"inner"))?;
    Ok(images)
}

/// Makes `outer/inner/leaf/deep`, `outer/twin/`, `outer/file`, and nested directories `a0/a1/...` in `leaf`. Beside
/// each directory `aN` is an empty directory `bN`.
fn tree() -> Result<Image> {
    let image = Image::kernel_made(128 << 20, &[])?;
    let mount = LoopMount::new(image.path(), "")?;
    let outer = mount.path().join("outer");
    std::fs::create_dir_all(outer.join("inner/leaf"))?;
    std::fs::create_dir(outer.join("twin"))?;
    std::fs::write(outer.join("file"), "content")?;
    std::fs::write(outer.join("inner/leaf/deep"), "content")?;
    let mut ladder = outer.join("inner/leaf");
    for level in 0..NR_LEVELS {
        std::fs::create_dir(ladder.join(format!("b{level}")))?;
        ladder.push(format!("a{level}"));
        std::fs::create_dir(&ladder)?;
    }
    mount.close()?;
    Ok(image)
}

const NR_LEVELS: usize = 40;
