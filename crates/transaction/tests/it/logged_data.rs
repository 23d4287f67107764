//! Tests that data to which a log refers keeps its place until a superblock without that log is durable.
//!
//! Method: a log makes a file durable, and the file's data is replaced in the same transaction. The commit is stopped
//! before it writes its superblock, another writer allocates and fills all free space, and the power is cut. The replay
//! by this crate and the replay by Linux must both find the data that was synced.

use std::sync::{Arc, Mutex};

use ubtrfs_device::Device;
use ubtrfs_format::{Ino, RootId};
use ubtrfs_testkit::{
    FsTarget, HookDevice, Image, LoopMount, Medium, MediumDevice, btrfs_check, capability, second_opinion,
};
use ubtrfs_transaction::{Engine, EngineOptions};

use crate::common::{put_extent, write_file};

const INO: u64 = 300;
const LEN: u64 = 1 << 20;

fn cut_between_rounds_and_superblock(mkfs: &[&str]) {
    let image = Image::kernel_made(256 << 20, mkfs).unwrap();
    let medium = Arc::new(MediumDevice::new(Medium::from_image(image.path()).unwrap()));
    let device = Arc::new(HookDevice::new(Arc::clone(&medium) as Arc<dyn Device>));
    let engine = Engine::open(vec![Arc::clone(&device) as Arc<dyn Device>], EngineOptions::default()).unwrap();
    let tree = engine.tree(RootId::FS_TREE).unwrap().unwrap();
    let synced = write_file(&engine, &tree, INO, &[7; LEN as usize]);
    engine.sync_inode(RootId::FS_TREE, Ino(INO)).unwrap();
    assert_eq!(engine.log_stats().written, 1);

    // Replace the data in the same transaction.
    let mut reservation = engine.reserve_data(LEN).unwrap();
    let extent = engine.allocate_data(&mut reservation, LEN, LEN, None).unwrap();
    let data = vec![8; LEN as usize];
    engine.write_data(extent.bytenr, &data).unwrap();
    let mut csums = Vec::new();
    engine.geometry().csum_type.compute_sectors(&data, 4096, &mut csums);
    let op = engine.begin(engine.reserve(8).unwrap());
    put_extent(&op, &tree, INO, extent, csums);
    drop(op);

    // Allocations ask for the place of the synced data, so they get it as soon as it is free.
    let (mut during, mut after) = (engine.reserve_data(4096).unwrap(), engine.reserve_data(4096).unwrap());
    let found = Arc::new(Mutex::new(None));
    let (writer, cut, content) = (Arc::clone(&engine), Arc::clone(&found), Arc::clone(&medium));
    device.at_flush(0, move || {
        let extent = writer.allocate_data(&mut during, 4096, 4096, Some(synced)).unwrap();
        writer.write_data(extent.bytenr, &[9; 4096]).unwrap();
        let mut nr_filled = 0;
        while let Some((mut reservation, _)) = writer.reserve_data_left_for(RootId::FS_TREE, LEN).unwrap() {
            while let want @ 1.. = reservation.bytes() {
                let extent = writer.allocate_data(&mut reservation, want, 4096, None).unwrap();
                writer.write_data(extent.bytenr, &vec![9; extent.len_bytes as usize]).unwrap();
                nr_filled += extent.len_bytes;
            }
        }
        *cut.lock().unwrap() = Some((content.content(), nr_filled));
        Ok(())
    });
    engine.commit().unwrap();
    let (content, nr_filled) = found.lock().unwrap().take().unwrap();
    assert!(nr_filled > 16 << 20, "{nr_filled}");
    // The old data is free when the superblock is durable.
    let reused = engine.allocate_data(&mut after, 4096, 4096, Some(synced)).unwrap();
    drop(after);
    drop((tree, engine));

    let cut = Image::empty(256 << 20).unwrap();
    content.save(cut.path()).unwrap();
    let replayed = Image::copy_of(cut.path()).unwrap();
    let ours = FsTarget::open(replayed.path(), "").unwrap();
    let id = ours.lookup(b"file300").unwrap().id;
    let mut read = vec![0; LEN as usize];
    assert_eq!(ours.fs().read_into(id, 0, &mut read).unwrap(), LEN as usize);
    assert!(read.iter().all(|byte| *byte == 7), "{mkfs:?}: what was synced was overwritten");
    ours.close().unwrap();
    btrfs_check(replayed.path()).unwrap();
    second_opinion(replayed.path()).unwrap();
    let mount = LoopMount::new(cut.path(), "").unwrap();
    assert!(std::fs::read(mount.join("file300")).unwrap().iter().all(|byte| *byte == 7));
    mount.close().unwrap();
    btrfs_check(cut.path()).unwrap();
    assert_eq!(reused.bytenr, synced, "{mkfs:?}: the space is not given back");
}

#[test]
fn synced_data_keeps_its_place_until_a_superblock_without_the_log() {
    if capability::kernel_oracle() {
        cut_between_rounds_and_superblock(&[]);
        cut_between_rounds_and_superblock(&["--mixed"]);
    }
}
