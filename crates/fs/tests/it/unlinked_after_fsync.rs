//! A power cut after a file was fsynced and then unlinked: the unlink may be lost, the fsynced content must not.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_fs::{Caller, Fs, InodeId, MountOptions, NewInode, RenameFlags};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{Medium, MediumDevice, check_medium};

const LEN: usize = 4 << 12;

/// Commits a file, changes and fsyncs it, removes it with `remove`, and fsyncs another file. Returns the content of the
/// file after a power cut.
fn after_cut(remove: impl FnOnce(&Fs, InodeId)) -> Option<Vec<u8>> {
    let device = Arc::new(MediumDevice::new(Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap()));
    let open = |device| Fs::open(vec![device as Arc<dyn Device>], MountOptions::default()).unwrap();
    let fs = open(Arc::clone(&device));
    let new = |name: &[u8]| fs.create(fs.root(), name, NewInode::file(0o600), &Caller::ROOT).unwrap().id;
    let file = new(b"file");
    fs.write(file, 0, &[1; LEN]).unwrap();
    fs.sync().unwrap();
    fs.write(file, 0, &[2; LEN]).unwrap();
    fs.fsync(file, false).unwrap();
    remove(&fs, file);
    let other = new(b"other");
    fs.write(other, 0, &[3; LEN]).unwrap();
    fs.fsync(other, false).unwrap();
    let cut = Arc::new(MediumDevice::new(device.content()));
    fs.close().unwrap();
    check_medium(&cut.content()).unwrap();
    let fs = open(Arc::clone(&cut));
    let found = fs.lookup(fs.root(), b"file").ok().map(|attr| fs.read(attr.id, 0, LEN).unwrap());
    assert_eq!(fs.read(fs.lookup(fs.root(), b"other").unwrap().id, 0, LEN).unwrap(), [3; LEN]);
    fs.close().unwrap();
    check_medium(&cut.content()).unwrap();
    found
}

#[test]
fn an_unlinked_file_is_gone_or_has_its_fsynced_content() {
    let found = after_cut(|fs, _| fs.unlink(fs.root(), b"file").unwrap());
    assert!(found.is_none_or(|found| found == [2; LEN]));
}

#[test]
fn an_unlinked_open_file_is_gone_or_has_its_fsynced_content() {
    let found = after_cut(|fs, file| {
        fs.open_inode(file).unwrap();
        fs.unlink(fs.root(), b"file").unwrap();
    });
    assert!(found.is_none_or(|found| found == [2; LEN]));
}

/// The name is then that of the old or of the new file.
#[test]
fn a_replaced_file_has_its_fsynced_content() {
    let found = after_cut(|fs, _| {
        let new = fs.create(fs.root(), b"new", NewInode::file(0o600), &Caller::ROOT).unwrap().id;
        fs.write(new, 0, &[4; LEN]).unwrap();
        fs.flush_data().unwrap();
        fs.rename(fs.root(), b"new", fs.root(), b"file", RenameFlags::empty()).unwrap();
    });
    assert!(found.is_some_and(|found| found == [2; LEN] || found == [4; LEN]));
}
