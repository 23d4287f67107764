//! Files that Linux shortened keep old bytes past their end on disk. No matter how such a file grows later, the added
//! range reads as zeros. So a write up to the end of a file does not read the rest of its last sector.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ubtrfs_device::{Access, Device, FileDevice, MemoryDevice};
use ubtrfs_format::{Ino, RootId};
use ubtrfs_fs::{Caller, FallocateMode, Fs, InodeId, MountOptions, NewInode, SetAttr};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{FaultDevice, FaultPlan, Image, LoopMount, Medium, MediumDevice, btrfs_check, capability};

const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };
/// Ends in the first sector, in another one, and at the end of a sector.
const ENDS: [usize; 4] = [1023, 5000, 12_289, 8192];

type SizeAfter = fn(u64) -> u64;

/// The ways to grow a file: name, and the file's size afterwards for an end.
const WAYS: [(&str, SizeAfter); 6] = [
    ("truncate", |end| end + 543),
    ("far-truncate", |end| end + 9001),
    ("write", |end| end + 543),
    ("far-write", |end| end + 20_001),
    ("clone", |end| end.next_multiple_of(4096) + 12_288),
    ("fallocate", |end| end + 543),
];

/// All files: name, way, end, size after growing.
fn files() -> impl Iterator<Item = (String, &'static str, usize, u64)> {
    let of = |end: usize| WAYS.map(|(way, size)| (format!("{way}-{end}"), way, end, size(end as u64)));
    ENDS.into_iter().flat_map(of)
}

fn grow(fs: &Fs, id: InodeId, way: &str, size: u64) {
    match way {
        "truncate" | "far-truncate" => {
            fs.setattr(id, &SetAttr { size: Some(size), ..SetAttr::default() }, &Caller::ROOT).unwrap();
        }
        "write" | "far-write" => assert_eq!(fs.write(id, size - 1, b"y").unwrap(), 1),
        "clone" => {
            let name = format!("zeros-{}", id.ino);
            let zeros = fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
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
    for (name, ..) in files() {
        let file = std::fs::File::create(mount.path().join(name)).unwrap();
        file.write_all_at(&[b'x'; 40_130], 0).unwrap();
    }
    mount.close().unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    for (name, _, end, _) in files() {
        std::fs::File::options().write(true).open(mount.path().join(name)).unwrap().set_len(end as u64).unwrap();
    }
    mount.close().unwrap();

    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image.path(), Access::ReadWrite).unwrap());
    let fs = Fs::open(vec![device], MountOptions::parse("").unwrap()).unwrap();
    let expected = |end: usize, size: u64, last: u8| {
        let mut content = vec![b'x'; end];
        content.resize(size as usize, 0);
        content[size as usize - 1] = last;
        content
    };
    let last_of = |way: &str| if way.ends_with("write") { b'y' } else { 0 };
    for (name, way, end, size) in files() {
        let id = fs.lookup(TOP, name.as_bytes()).unwrap().id;
        grow(&fs, id, way, size);
        assert!(fs.read(id, 0, 1 << 20).unwrap() == expected(end, size, last_of(way)), "{name}, in memory");
    }
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    for (name, way, end, size) in files() {
        assert!(
            std::fs::read(mount.path().join(&name)).unwrap() == expected(end, size, last_of(way)),
            "{name}, by Linux"
        );
    }
    mount.scrub().unwrap();
    mount.close().unwrap();
}

/// A commit between the writeback of a file's end and that of its beginning leaves data past the size on disk. If the
/// power fails then, the file must not show this data when it grows.
#[test]
fn i5_data_past_the_end_that_a_crash_left_does_not_appear_when_the_file_grows() {
    const MIB: u64 = 1 << 20;
    let device = Arc::new(MediumDevice::new(Medium::formatted(256 * MIB, &MkfsOptions::default()).unwrap()));
    let fs = Fs::open(vec![device.clone() as Arc<dyn Device>], MountOptions::parse("").unwrap()).unwrap();
    let file = |name: &str| fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    let ways: [(&str, u64); 4] =
        [("truncate", 3 * MIB), ("far-write", 3 * MIB), ("clone", 3 * MIB), ("fallocate", 3 * MIB)];
    let ids = ways.map(|(way, _)| file(way));
    fs.sync().unwrap();
    for (id, (way, _)) in ids.iter().zip(ways) {
        for mib in 0..2 {
            fs.write_all(*id, mib * MIB, &vec![b'A'; MIB as usize]).unwrap();
        }
        // Writes back the second MiB only.
        fs.clone_range(*id, MIB, file(&format!("copy-{way}")), 0, MIB).unwrap();
    }
    // A commit without writeback.
    fs.create_subvolume(TOP, b"subvolume", &Caller::ROOT).unwrap();
    let fs = Fs::open(
        vec![Arc::new(MediumDevice::new(device.content())) as Arc<dyn Device>],
        MountOptions::parse("").unwrap(),
    )
    .unwrap();
    for (way, size) in ways {
        let id = fs.lookup(TOP, way.as_bytes()).unwrap().id;
        assert_eq!(fs.getattr(id).unwrap().size, 0, "{way}: the test needs a file whose beginning was not written");
        grow(&fs, id, way, size);
        let content = fs.read(id, 0, size as usize).unwrap();
        assert_eq!(content.len() as u64, size, "{way}");
        assert_eq!(content.iter().position(|&byte| byte == b'A'), None, "{way}");
    }
    fs.close().unwrap();
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
