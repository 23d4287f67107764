//! Puts wrong content into leaves of subvolume trees: names that lead out of a directory, entries that point elsewhere,
//! duplicate names. Random changes of bytes rarely produce such content. Items stay in order and hashes of names stay
//! right, so that commands reach the wrong content.
//!
//! I1. A leaf that has no room for a change keeps its old content.

use ubtrfs_format::hash::name_hash;
use ubtrfs_format::item::DirItem;
use ubtrfs_format::node::{HEADER_SIZE, ITEM_HEAD_SIZE};
use ubtrfs_format::{Key, KeyType};

use super::seed_image::Mutation;
use crate::corruptor::{build_leaf, take_apart};

type Items = Vec<(Key, Vec<u8>)>;

/// Names that have a special meaning in paths.
const NAMES: [&[u8]; 14] = [
    b"..",
    b".",
    b"/",
    b"../x",
    b"../../../x",
    b"a/b",
    b"/tmp/ubtrfs-leak",
    b"a\0b",
    b"x",
    b"file",
    b"a",
    b".wh.a",
    b"-rf",
    b"\xff\n\x1b[2J",
];

/// Makes one change in a leaf, if the leaf contains suitable items.
pub(super) fn tell(raw: &mut Vec<u8>, mutation: Mutation) {
    if raw[100] != 0 {
        return;
    }
    let Ok(mut items) = take_apart(raw) else { return };
    match mutation.kind % 8 {
        0 | 1 => rename(&mut items, mutation),
        2 => redirect(&mut items, mutation),
        3 => change_type(&mut items, mutation),
        4 => change_content(&mut items, mutation),
        5 => repeat_entry(&mut items, mutation),
        6 => move_item(&mut items, mutation),
        _ => drop((!items.is_empty()).then(|| items.remove(usize::from(mutation.place) % items.len()))),
    }
    items.sort_by_key(|(key, _)| *key);
    items.dedup_by_key(|(key, _)| *key);
    let used: usize = items.iter().map(|(_, data)| data.len() + ITEM_HEAD_SIZE).sum();
    if used + HEADER_SIZE <= raw.len() {
        *raw = build_leaf(raw, &items);
    }
}

/// Returns the names of directory entries in a leaf.
fn names(items: &Items) -> Vec<Vec<u8>> {
    let of_entries = items.iter().filter(|(key, _)| matches!(key.item_type, KeyType::DIR_ITEM | KeyType::DIR_INDEX));
    of_entries.filter_map(|(_, data)| DirItem::decode_all(data).ok()).flatten().map(|entry| entry.name).collect()
}

/// Changes every directory entry whose name is `name`, in its `DIR_ITEM` and its `DIR_INDEX`. Updates the hash in the
/// key of a `DIR_ITEM` that has only this entry.
fn edit_entries(items: &mut Items, name: &[u8], edit: impl Fn(&mut DirItem)) {
    for (key, data) in items.iter_mut() {
        let Ok(mut entries) = DirItem::decode_all(data) else { continue };
        if !matches!(key.item_type, KeyType::DIR_ITEM | KeyType::DIR_INDEX)
            || !entries.iter().any(|entry| entry.name == name)
        {
            continue;
        }
        entries.iter_mut().filter(|entry| entry.name == name).for_each(&edit);
        data.clear();
        entries.iter().for_each(|entry| entry.encode_into(data));
        if let (KeyType::DIR_ITEM, [entry]) = (key.item_type, &entries[..]) {
            key.offset = name_hash(&entry.name);
        }
    }
}

fn rename(items: &mut Items, mutation: Mutation) {
    let names = names(items);
    let Some(name) = pick(&names, mutation.place) else { return };
    let new = match mutation.value % 32 {
        // Take the name of another entry (30), or a name whose length is near the limit or above it (31).
        30 => names[usize::from(mutation.more) % names.len()].clone(),
        31 => vec![b'n'; 250 + usize::from(mutation.more % 8)],
        other => NAMES[usize::from(other) % NAMES.len()].to_vec(),
    };
    edit_entries(items, name, |entry| entry.name.clone_from(&new));
}

/// Points an entry to inode 256 (a root directory), to the inode of another item, or to a random inode number. In one
/// of four cases, the number stands for a subvolume instead of an inode.
fn redirect(items: &mut Items, mutation: Mutation) {
    let names = names(items);
    let Some(name) = pick(&names, mutation.place) else { return };
    let objectids: Vec<u64> = items.iter().map(|(key, _)| key.objectid).collect();
    let objectid = match mutation.value % 8 {
        0 => 256,
        1 => 256 + u64::from(mutation.more),
        _ => objectids[usize::from(mutation.more) % objectids.len()],
    };
    let location = match mutation.value / 8 % 4 {
        0 => Key::new(objectid, KeyType::ROOT_ITEM, u64::MAX),
        _ => Key::new(objectid, KeyType::INODE_ITEM, 0),
    };
    edit_entries(items, name, |entry| entry.location = location);
}

/// Changes the type in an entry, or in the mode of an inode.
fn change_type(items: &mut Items, mutation: Mutation) {
    if mutation.value.is_multiple_of(2) {
        let names = names(items);
        let Some(name) = pick(&names, mutation.place) else { return };
        let file_type = (mutation.more % 9) as u8;
        edit_entries(items, name, |entry| entry.file_type = file_type);
        return;
    }
    let mut inodes: Vec<_> =
        items.iter_mut().filter(|(key, data)| key.item_type == KeyType::INODE_ITEM && data.len() == 160).collect();
    let at = usize::from(mutation.place) % inodes.len().max(1);
    if let Some((_, data)) = inodes.get_mut(at) {
        // Regular file, directory, symlink, fifo, socket, character and block device.
        let kinds = [0o100, 0o040, 0o120, 0o010, 0o140, 0o020, 0o060];
        let kind: u32 = kinds[usize::from(mutation.more) % kinds.len()] << 9;
        data[52..56].copy_from_slice(&(kind | 0o644).to_le_bytes());
    }
}

/// Replaces the inline content of a file or symlink, and adjusts the item's length field.
fn change_content(items: &mut Items, mutation: Mutation) {
    let is_inline = |data: &[u8]| data.len() > 21 && data[20] == 0;
    let mut contents: Vec<_> =
        items.iter_mut().filter(|(key, data)| key.item_type == KeyType::EXTENT_DATA && is_inline(data)).collect();
    let at = usize::from(mutation.place) % contents.len().max(1);
    let Some((_, data)) = contents.get_mut(at) else { return };
    let new = match mutation.value % 4 {
        0 => vec![b'l'; usize::from(mutation.more) % 4096],
        1 => b"a/".repeat(usize::from(mutation.more) % 2048),
        _ => NAMES[usize::from(mutation.more) % NAMES.len()].to_vec(),
    };
    data.truncate(21);
    data.extend_from_slice(&new);
    data[8..16].copy_from_slice(&(new.len() as u64).to_le_bytes());
}

/// Repeats a `DIR_INDEX` at another index, so that two entries have one name.
fn repeat_entry(items: &mut Items, mutation: Mutation) {
    let indices: Vec<_> = items.iter().filter(|(key, _)| key.item_type == KeyType::DIR_INDEX).cloned().collect();
    if let Some((key, data)) = pick(&indices, mutation.place).cloned() {
        let offset = key.offset.wrapping_add(u64::from(mutation.more)).wrapping_add(1);
        items.push((Key { offset, ..key }, data));
    }
}

/// Moves an item to another inode or to another offset.
fn move_item(items: &mut Items, mutation: Mutation) {
    let nr_items = items.len();
    if nr_items == 0 {
        return;
    }
    let other = items[usize::from(mutation.more) % nr_items].0;
    let (key, _) = &mut items[usize::from(mutation.place) % nr_items];
    match mutation.value % 3 {
        0 => key.objectid = other.objectid,
        1 => key.offset = other.offset,
        _ => key.offset = u64::from(mutation.more) << 12,
    }
}

fn pick<T>(from: &[T], at: u16) -> Option<&T> {
    from.get(usize::from(at) % from.len().max(1))
}
