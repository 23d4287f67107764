//! Tests of writeback of a batch of files.

use ubtrfs_device::{Device, MemoryDevice};

use super::*;
use crate::file::extent_map::ExtentKind;
use crate::{Caller, MountOptions, NewInode};

#[test]
fn a_small_file_that_is_never_at_rest_becomes_a_regular_extent() {
    let device = Arc::new(MemoryDevice::new(128 << 20));
    ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
    let open = || Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default()).unwrap();
    let fs = open();
    let id = fs.create(fs.root(), b"file", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    let kinds = || fs.extents(id).unwrap().iter().map(|extent| extent.kind).collect::<Vec<_>>();
    for round in 1..4 {
        fs.write(id, 0, &[round; 200]).unwrap();
        let how = How { wait: Wait::ForAll, may_inline: false };
        let written = fs.write_batch(&[fs.inode(id).unwrap()], 0..u64::MAX, BATCH_BYTES, how).unwrap();
        assert!(written.failure.is_none() && !written.retry && written.bytes > 0);
        assert_eq!(kinds(), [ExtentKind::Data]);
        fs.write(id, 0, &[round + 10; 100]).unwrap();
        fs.fsync(id, false).unwrap();
        assert_eq!(kinds(), [ExtentKind::Inline], "inline again once it is at rest");
    }
    fs.write(id, 0, &[9; 50]).unwrap();
    let how = How { wait: Wait::ForAll, may_inline: false };
    fs.write_batch(&[fs.inode(id).unwrap()], 0..u64::MAX, BATCH_BYTES, how).unwrap();
    let content = [[9; 50].as_slice(), &[13; 50], &[3; 100]].concat();
    fs.close().unwrap();
    let fs = open();
    assert_eq!(fs.read(id, 0, 4096).unwrap(), content);
    fs.close().unwrap();
}
