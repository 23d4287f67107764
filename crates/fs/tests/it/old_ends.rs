//! Files that Linux shortened keep old bytes past their end on disk. No matter how such a file grows later, the added
//! range reads as zeros. So a write up to the end of a file does not read the rest of its last sector.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice, MemoryDevice};
use ubtrfs_format::{Ino, RootId};
use ubtrfs_fs::{Caller, FallocateMode, Fs, InodeId, MountOptions, NewInode, SetAttr};
use ubtrfs_testkit::{FaultDevice, FaultPlan, Image, LoopMount, btrfs_check, capability};

const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };
const END: usize = 1023;

/// The ways to grow a file: name, and the file's size afterwards.
const WAYS: [(&str, u64); 5] =
    [("truncate", 1566), ("write", 1566), ("far-write", 20_001), ("clone", 16_384), ("fallocate", 1566)];

fn grow(fs: &Fs, id: InodeId, way: &str, size: u64) {
    match way {
        "truncate" => drop(fs.setattr(id, &SetAttr { size: Some(size), ..SetAttr::default() }, &Caller::ROOT).unwrap()),
        "write" | "far-write" => assert_eq!(fs.write(id, size - 1, b"y").unwrap(), 1),
        "clone" => {
            let zeros = fs.create(TOP, b"zeros", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
            fs.write(zeros, 0, &[0; 4096]).unwrap();
            fs.clone_range(zeros, 0, id, size - 4096, 4096).unwrap();
        }
        _ => fs.fallocate(id, 0, size, FallocateMode::empty()).unwrap(),
    }
}

#[test]
fn a_file_that_linux_shortened_grows_with_zeros() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(256 << 20, &[]).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    for (way, _) in WAYS {
        let file = std::fs::File::create(mount.path().join(way)).unwrap();
        file.write_all_at(&[b'x'; 5130], 0).unwrap();
    }
    mount.close().unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    for (way, _) in WAYS {
        std::fs::File::options().write(true).open(mount.path().join(way)).unwrap().set_len(END as u64).unwrap();
    }
    mount.close().unwrap();

    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image.path(), Access::ReadWrite).unwrap());
    let fs = Fs::open(vec![device], MountOptions::parse("").unwrap()).unwrap();
    let expected = |size: u64, last: u8| {
        let mut content = vec![b'x'; END];
        content.resize(size as usize, 0);
        content[size as usize - 1] = last;
        content
    };
    let last_of = |way: &str| if way.ends_with("write") { b'y' } else { 0 };
    for (way, size) in WAYS {
        let id = fs.lookup(TOP, way.as_bytes()).unwrap().id;
        grow(&fs, id, way, size);
        assert!(fs.read(id, 0, 1 << 20).unwrap() == expected(size, last_of(way)), "{way}, in memory");
    }
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    for (way, size) in WAYS {
        assert!(std::fs::read(mount.path().join(way)).unwrap() == expected(size, last_of(way)), "{way}, by Linux");
    }
    mount.scrub().unwrap();
    mount.close().unwrap();
}

#[test]
fn a_write_up_to_the_end_of_a_file_reads_nothing() {
    const SIZES: [usize; 4] = [3000, 5000, 8192, 20_001];
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(256 << 20));
    ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
    let counting = Arc::new(FaultDevice::new(device, FaultPlan::default()));
    let open = || Fs::open(vec![counting.clone()], MountOptions::parse("max_inline=0").unwrap()).unwrap();
    let id = |fs: &Fs, size: usize| fs.lookup(TOP, size.to_string().as_bytes()).unwrap().id;
    let fs = open();
    for size in SIZES {
        let id = fs.create(TOP, size.to_string().as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
        fs.write(id, 0, &vec![b'x'; size]).unwrap();
    }
    fs.close().unwrap();
    let fs = open();
    // Load the tree.
    for size in SIZES {
        assert_eq!(fs.read(id(&fs, size), 0, 1).unwrap(), b"x");
    }
    let (before, ..) = counting.counts();
    for size in SIZES {
        let start = (size - 1) / 4096 * 4096;
        fs.write(id(&fs, size), start as u64, &vec![b'y'; size - start]).unwrap();
    }
    let (after, ..) = counting.counts();
    assert_eq!(after - before, 0, "reads");
    for size in SIZES {
        let id = id(&fs, size);
        let mut expected = vec![b'x'; size];
        expected[(size - 1) / 4096 * 4096..].fill(b'y');
        fs.fallocate(id, 0, size as u64 + 9000, FallocateMode::empty()).unwrap();
        expected.resize(size + 9000, 0);
        assert!(fs.read(id, 0, 1 << 20).unwrap() == expected, "{size}");
    }
    fs.close().unwrap();
}
