//! A file that stops sharing an extent holds it in the last commit until the next one is durable. Until then, no other
//! file may overwrite the extent in place.

use std::sync::Arc;
use std::sync::mpsc::channel;

use ubtrfs_device::Device;
use ubtrfs_fs::{Caller, Fs, InodeId, MountOptions, NewInode};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{HookDevice, Medium, MediumDevice, check_medium};

const LEN: usize = 16 << 12;

/// Makes two files that share an extent, drops the second file's reference with `drop_ref`, and writes to the first
/// file while the commit is at its flush. Returns what the second file has after a power cut in this moment.
fn after_cut(drop_ref: impl FnOnce(&Fs, InodeId)) -> Option<Vec<u8>> {
    let medium = Arc::new(MediumDevice::new(Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap()));
    let device = Arc::new(HookDevice::new(Arc::clone(&medium) as Arc<dyn Device>));
    let options = MountOptions::parse("nodatacow").unwrap();
    let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], options.clone()).unwrap();
    let new = |name: &[u8]| fs.create(fs.root(), name, NewInode::file(0o600), &Caller::ROOT).unwrap().id;
    let (first, second) = (new(b"first"), new(b"second"));
    fs.write(first, 0, &[1; LEN]).unwrap();
    fs.clone_range(first, 0, second, 0, LEN as u64).unwrap();
    fs.sync().unwrap();
    drop_ref(&fs, second);
    fs.flush_data().unwrap();
    let ((reached, at_flush), (go_on, waiting)) = (channel(), channel());
    device.at_flush(0, move || {
        reached.send(()).unwrap();
        waiting.recv().unwrap();
        Ok(())
    });
    let cut = std::thread::scope(|scope| {
        let commit = scope.spawn(|| fs.sync());
        at_flush.recv().unwrap();
        fs.write(first, 0, &[3; LEN]).unwrap();
        fs.flush_data().unwrap();
        let cut = medium.content();
        go_on.send(()).unwrap();
        commit.join().unwrap().unwrap();
        cut
    });
    fs.close().unwrap();
    check_medium(&medium.content()).unwrap();
    check_medium(&cut).unwrap();
    let fs = Fs::open(vec![Arc::new(MediumDevice::new(cut))], options).unwrap();
    let found = fs.lookup(fs.root(), b"second").ok().map(|attr| fs.read(attr.id, 0, LEN).unwrap());
    fs.close().unwrap();
    found
}

#[test]
fn an_overwritten_clone_is_intact_after_a_power_cut() {
    let found = after_cut(|fs, second| assert_eq!(fs.write(second, 0, &[2; LEN]).unwrap(), LEN)).unwrap();
    assert!(found == [1; LEN] || found == [2; LEN], "it has {}", found[0]);
}

#[test]
fn a_deleted_clone_is_intact_after_a_power_cut() {
    let found = after_cut(|fs, _| fs.unlink(fs.root(), b"second").unwrap());
    assert!(found.is_none_or(|found| found == [1; LEN]));
}
