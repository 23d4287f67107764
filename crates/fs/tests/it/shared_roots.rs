//! A subvolume that becomes so small that a block which a snapshot shares could become its root.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_format::{Ino, RootId};
use ubtrfs_fs::{Caller, Fs, InodeId, MountOptions, NewInode, SetAttr};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{Medium, MediumDevice, check_medium};

const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };
const SECTOR: usize = 4096;

#[test]
fn a_block_that_a_snapshot_shares_does_not_become_a_root() {
    let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
    let device = Arc::new(MediumDevice::new(Medium::formatted(1 << 30, &mkfs).unwrap()));
    let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default()).unwrap();
    // The length of a name decides where the first leaf ends. With some lengths, it ends before the last file's items.
    for len in 1..120 {
        let work = fs.create_subvolume(TOP, format!("work-{len}").as_bytes(), &Caller::ROOT).unwrap();
        let new = |name: &[u8]| fs.create(work, name, NewInode::file(0o600), &Caller::ROOT).unwrap().id;
        let kept: Vec<InodeId> =
            (0..9).map(|nr| new(&[b'0' + nr, b'x'].repeat(1 + len * usize::from(nr == 0)))).collect();
        for &id in &kept {
            fs.write(id, 0, &[len as u8; SECTOR]).unwrap();
        }
        let last = new(b"last");
        for nr in 0..60 {
            fs.write(last, nr * 2 * SECTOR as u64, &[1; SECTOR]).unwrap();
        }
        fs.open_inode(last).unwrap();
        fs.unlink(work, b"last").unwrap();
        fs.sync().unwrap();
        let snapshot = fs.snapshot(work.root, TOP, format!("snapshot-{len}").as_bytes(), true).unwrap();
        fs.release_inode(last);
        fs.sync().unwrap();
        for &id in &kept {
            fs.setattr(id, &SetAttr { size: Some(0), ..SetAttr::default() }, &Caller::ROOT).unwrap();
        }
        fs.sync().unwrap();
        fs.write(new(b"other"), 0, &[0xee; 8 * SECTOR]).unwrap();
        fs.sync().unwrap();
        for &id in &kept {
            let found = fs.read(InodeId { root: snapshot.root, ..id }, 0, SECTOR).unwrap();
            assert!(found == [len as u8; SECTOR], "{len}: {id:?}");
        }
    }
    fs.close().unwrap();
    check_medium(&device.content()).unwrap();
}
