//! Measures how fast items are put and committed. `bulk_create IMAGE NR_FILES` puts the items of empty files into the
//! top-level subvolume of an image (made by mkfs.btrfs, without these inodes yet) and prints the time of each phase.

use std::sync::Arc;
use std::time::Instant;

use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::hash::name_hash;
use ubtrfs_format::item::{DirItem, InodeItem, InodeRef};
use ubtrfs_format::{Key, KeyType, RootId};
use ubtrfs_transaction::{Engine, EngineOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args_os().skip(1);
    let (Some(image), Some(number)) = (args.next(), args.next()) else { return Err("usage: IMAGE NR_FILES".into()) };
    let nr_files: u64 = number.to_string_lossy().parse()?;
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image.as_ref(), Access::ReadWrite)?);
    let options = EngineOptions { memory_bytes: 8 << 30, ..EngineOptions::default() };
    let engine = Engine::open(vec![device], options)?;
    let tree = engine.tree(RootId::FS_TREE)?.ok_or("no top-level subvolume")?;
    let dir_key = Key::new(256, KeyType::INODE_ITEM, 0);
    let mut dir = InodeItem::decode(&tree.get(&dir_key)?.ok_or("no root directory")?)?;

    let start = Instant::now();
    for ino in 257..257 + nr_files {
        let name = format!("{ino:08x}~~~~~~");
        let op = engine.begin(engine.reserve(8)?);
        let item = InodeItem { mode: 0o100_644, size: 0, ..dir.clone() };
        op.put(&tree, Key::new(ino, KeyType::INODE_ITEM, 0), item.encode());
        let mut bytes = Vec::new();
        InodeRef { index: ino, name: name.as_bytes().to_vec() }.encode_into(&mut bytes);
        op.put(&tree, Key::new(ino, KeyType::INODE_REF, 256), bytes);
        let location = Key::new(ino, KeyType::INODE_ITEM, 0);
        let transid = op.generation();
        let entry = DirItem { location, transid, file_type: 1, name: name.as_bytes().to_vec(), data: Vec::new() };
        let mut bytes = Vec::new();
        entry.encode_into(&mut bytes);
        op.put(&tree, Key::new(256, KeyType::DIR_ITEM, name_hash(name.as_bytes())), bytes.clone());
        op.put(&tree, Key::new(256, KeyType::DIR_INDEX, ino), bytes);
        dir.size += 2 * name.len() as u64;
        op.put(&tree, dir_key, dir.encode());
    }
    println!("put:    {:?}", start.elapsed());
    let start = Instant::now();
    engine.commit()?;
    println!("commit: {:?}", start.elapsed());
    Ok(())
}
