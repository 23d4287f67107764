//! Tests the selection, the refusal and the write order of superblocks. Method: hand-made superblocks on memory
//! devices.

use std::sync::Arc;

use crate::common::{Asked, MIB, Recorder, dev_item, put, superblock};
use ubtrfs_device::{Device, MemoryDevice};
use ubtrfs_error::Error;
use ubtrfs_format::item::DevItem;
use ubtrfs_format::superblock::Superblock;
use ubtrfs_format::{DevId, Generation, Logical};
use ubtrfs_volumes::{DeviceSetOptions, SuperCopies, Volumes};
use uuid::Uuid;

fn open(device: MemoryDevice) -> Result<Volumes, Error> {
    Volumes::open(vec![Arc::new(device)], DeviceSetOptions::default())
}

fn generation(n: u64, sb: Superblock) -> Superblock {
    Superblock { generation: Generation(n), ..sb }
}

#[test]
fn the_newest_valid_mirror_wins() {
    let device = MemoryDevice::new(100 * MIB);
    put(&device, &generation(10, superblock(100 * MIB)), 65536);
    put(&device, &generation(12, superblock(100 * MIB)), 64 * MIB);
    let volumes = open(device).unwrap();
    assert_eq!((volumes.superblock().generation.0, volumes.superblock_mirror()), (12, 1));
    assert_eq!(volumes.write_refusal(), None);
}

#[test]
fn a_broken_primary_is_replaced_by_its_mirror() {
    let device = MemoryDevice::new(100 * MIB);
    put(&device, &generation(12, superblock(100 * MIB)), 65536);
    put(&device, &generation(11, superblock(100 * MIB)), 64 * MIB);
    device.write_at(65536 + 200, b"bits that rotted").unwrap();
    let volumes = open(device).unwrap();
    assert_eq!((volumes.superblock().generation.0, volumes.superblock_mirror()), (11, 1));
    assert_eq!(volumes.write_refusal(), None);
}

#[test]
fn an_overwritten_primary_allows_reading_only() {
    let device = MemoryDevice::new(100 * MIB);
    put(&device, &superblock(100 * MIB), 64 * MIB);
    let volumes = open(device).unwrap();
    assert!(volumes.write_refusal().unwrap().contains("overwritten"));
    assert!(matches!(volumes.write_superblock(volumes.superblock()), Err(Error::ReadOnly { .. })));
}

/// Offsets of the bad copies.
fn bad(device: &MemoryDevice) -> Vec<u64> {
    SuperCopies::examine(device).unwrap().bad().map(|copy| copy.offset).collect()
}

#[test]
fn bad_copies_are_rewritten_from_the_newest_good_one() {
    let device = MemoryDevice::new(100 * MIB);
    assert!(matches!(SuperCopies::examine(&device), Err(Error::Refused { .. })), "no copy is good");
    put(&device, &generation(12, superblock(100 * MIB)), 64 * MIB);
    for damage in [&[0; 4096][..], b"bits that rotted"] {
        put(&device, &generation(12, superblock(100 * MIB)), 65536);
        assert!(bad(&device).is_empty());
        device.write_at(65536, damage).unwrap();
        assert_eq!(bad(&device), [65536]);
        SuperCopies::examine(&device).unwrap().recover(&device).unwrap();
        assert!(bad(&device).is_empty());
    }
    // An older copy, or a copy of another filesystem, is never the source of a recovery.
    put(&device, &generation(11, superblock(100 * MIB)), 65536);
    assert_eq!(bad(&device), [65536]);
    put(&device, &generation(13, superblock(100 * MIB)), 65536);
    assert_eq!(bad(&device), [64 * MIB]);
    let mut other = generation(1000, superblock(100 * MIB));
    other.fsid = Uuid::from_bytes([8; 16]);
    other.dev_item.fsid = other.fsid;
    put(&device, &other, 64 * MIB);
    assert_eq!(bad(&device), [64 * MIB]);
    SuperCopies::examine(&device).unwrap().recover(&device).unwrap();
    assert!(bad(&device).is_empty());
    let volumes = open(device).unwrap();
    assert_eq!((volumes.superblock().generation.0, volumes.write_refusal()), (13, None));
}

#[test]
fn the_mirror_of_another_filesystem_is_never_taken() {
    let device = MemoryDevice::new(100 * MIB);
    let mut other = generation(1000, superblock(100 * MIB));
    other.fsid = Uuid::from_bytes([8; 16]);
    other.dev_item.fsid = other.fsid;
    put(&device, &superblock(100 * MIB), 65536);
    put(&device, &other, 64 * MIB);
    assert_eq!(open(device).unwrap().superblock().generation.0, 10);
    // If the primary is broken but its fsid can still be read, a mirror of another filesystem is not used
    // either.
    let device = MemoryDevice::new(100 * MIB);
    put(&device, &superblock(100 * MIB), 65536);
    put(&device, &other, 64 * MIB);
    device.write_at(65536 + 200, b"bits that rotted").unwrap();
    assert!(matches!(open(device), Err(Error::Refused { .. })));
}

#[test]
fn refusals_name_their_reason() {
    let refused = |sb: &Superblock, len: u64| {
        let device = MemoryDevice::new(len);
        put(&device, sb, 65536);
        open(device).unwrap_err().to_string()
    };
    let good = superblock(32 * MIB);
    assert!(open(MemoryDevice::new(32 * MIB)).unwrap_err().to_string().contains("not a btrfs filesystem"));
    assert!(open(MemoryDevice::new(100)).unwrap_err().to_string().contains("not a btrfs filesystem"));
    assert!(refused(&good, 31 * MIB).contains("truncated"));
    let zoned = Superblock { incompat_flags: 0x341 | 1 << 12 | 1 << 50, ..good.clone() };
    assert!(refused(&zoned, 32 * MIB).contains("ZONED, bit 50"));
    assert!(refused(&Superblock { nodesize: 12288, ..good.clone() }, 32 * MIB).contains("nodesize"));
    for (bit, name) in
        [(35, "CHANGING_FSID:"), (36, "CHANGING_FSID_V2:"), (38, "BG_TREE"), (39, "DATA_CSUM"), (40, "META_CSUM")]
    {
        let text = refused(&Superblock { flags: good.flags | 1 << bit, ..good.clone() }, 32 * MIB);
        assert!(text.contains(name) && text.contains("btrfstune"), "{text}");
    }
    assert!(refused(&Superblock { flags: good.flags | 1 << 50, ..good.clone() }, 32 * MIB).contains("unknown flag"));
    assert!(refused(&Superblock { csum_type: 9, ..good.clone() }, 32 * MIB).contains("csum_type"));
    assert!(refused(&Superblock { sys_chunk_array_size: 100, ..good.clone() }, 32 * MIB).contains("sys_chunk_array"));
    assert!(refused(&Superblock { sys_chunk_array_size: 0, ..good.clone() }, 32 * MIB).contains("sys_chunk_array"));
    assert!(refused(&Superblock { chunk_root: Logical(1 << 40), ..good }, 32 * MIB).contains("1099511627776"));
    assert!(matches!(Volumes::open(Vec::new(), DeviceSetOptions::default()), Err(Error::Refused { .. })));
}

#[test]
fn filesystems_readable_but_not_writable_say_why() {
    let refusal = |change: &dyn Fn(&mut Superblock)| {
        let mut sb = superblock(32 * MIB);
        change(&mut sb);
        let device = MemoryDevice::new(32 * MIB);
        put(&device, &sb, 65536);
        open(device).unwrap().write_refusal().unwrap_or_default()
    };
    assert_eq!(refusal(&|_| ()), "");
    assert!(refusal(&|sb| sb.compat_ro_flags |= 1 << 20).contains("bit 20"));
    assert!(refusal(&|sb| sb.incompat_flags |= 1 << 7).contains("RAID56"));
    assert!(refusal(&|sb| sb.flags |= 1 << 32).contains("seed"));
    assert!(refusal(&|sb| sb.num_devices = 2).contains("1 of its 2 devices"));
}

#[test]
fn devices_that_do_not_belong_together_are_refused() {
    let device = |devid: u64, fsid: u8| -> Arc<dyn Device> {
        let device = MemoryDevice::new(32 * MIB);
        let mut sb = Superblock { num_devices: 2, fsid: Uuid::from_bytes([fsid; 16]), ..superblock(32 * MIB) };
        sb.dev_item = dev_item(devid, 32 * MIB);
        sb.dev_item.fsid = sb.fsid;
        put(&device, &sb, 65536);
        Arc::new(device)
    };
    let error = |devices| Volumes::open(devices, DeviceSetOptions::default()).unwrap_err().to_string();
    assert!(error(vec![device(1, 7), device(2, 8)]).contains("belongs to filesystem"));
    assert!(error(vec![device(1, 7), device(1, 7)]).contains("both device 1"));
    let both = Volumes::open(vec![device(1, 7), device(2, 7)], DeviceSetOptions::default()).unwrap();
    assert_eq!(both.write_refusal(), None);
    assert_eq!(both.devices().iter().map(|device| device.devid).collect::<Vec<_>>(), [DevId(1), DevId(2)]);
}

#[test]
fn i3_mirrors_follow_a_durable_primary() {
    let device = Recorder::formatted(300 << 30);
    let volumes = Volumes::open(vec![device.clone()], DeviceSetOptions::default()).unwrap();
    let sb = generation(11, volumes.superblock().clone());
    let mut item = volumes.dev_item(DevId(1)).unwrap();
    item.bytes_used = 8 * MIB;
    volumes.set_dev_item(&item).unwrap();
    volumes.write_superblock(&sb).unwrap();
    let asked = device.asked.lock().unwrap().clone();
    assert_eq!(asked, [Asked::Write(65536), Asked::Flush, Asked::Write(64 * MIB), Asked::Write(256 << 30)]);
    for offset in [65536, 64 * MIB, 256 << 30] {
        let mut raw = vec![0; 4096];
        device.read_at(offset, &mut raw).unwrap();
        let found = Superblock::decode(&raw).unwrap();
        assert_eq!((found.bytenr, found.generation.0), (offset, 11));
        assert_eq!(found.dev_item.bytes_used, 8 * MIB);
        assert_eq!(raw, found.encode_with_csum());
    }
}

#[test]
fn i3_a_torn_primary_leaves_the_previous_commit() {
    let device = Recorder::formatted(100 * MIB);
    let volumes = Volumes::open(vec![device.clone()], DeviceSetOptions::default()).unwrap();
    let of = |n| generation(n, volumes.superblock().clone());
    volumes.write_superblock(&of(11)).unwrap();
    let mut newer = of(12);
    newer.super_roots[0].tree_root = Logical(77);
    let torn = Superblock { bytenr: 65536, ..newer }.encode_with_csum();
    device.write_at(65536, &torn[..512]).unwrap();
    let volumes = Volumes::open(vec![device.clone()], DeviceSetOptions::default()).unwrap();
    assert_eq!((volumes.superblock().generation.0, volumes.superblock_mirror()), (11, 1));
    assert_eq!(volumes.write_refusal(), None);
    // The next commit repairs the primary.
    volumes.write_superblock(&generation(12, volumes.superblock().clone())).unwrap();
    let volumes = Volumes::open(vec![device], DeviceSetOptions::default()).unwrap();
    assert_eq!((volumes.superblock().generation.0, volumes.superblock_mirror()), (12, 0));
}

#[test]
fn a_read_only_open_writes_nothing() {
    let device = Recorder::formatted(32 * MIB);
    let volumes =
        Volumes::open(vec![device.clone()], DeviceSetOptions { read_only: true, ..DeviceSetOptions::default() })
            .unwrap();
    assert_eq!(volumes.write_refusal(), None);
    assert!(volumes.write_superblock(volumes.superblock()).is_err());
    assert!(volumes.write(crate::common::CHUNK, &[0; 4096]).is_err());
    assert!(volumes.discard(crate::common::CHUNK, 4096).is_err());
    assert!(device.asked.lock().unwrap().is_empty());
}

#[test]
fn i4_a_superblock_keeps_the_uuids_of_its_own_device() {
    let device = Recorder::formatted(100 * MIB);
    let volumes = Volumes::open(vec![device.clone()], DeviceSetOptions::default()).unwrap();
    let own = volumes.dev_item(DevId(1)).unwrap();
    let foreign = Uuid::from_bytes([9; 16]);
    for item in [DevItem { uuid: foreign, ..own.clone() }, DevItem { fsid: foreign, ..own.clone() }] {
        let error = volumes.set_dev_item(&item).unwrap_err().to_string();
        assert!(error.contains("tree 3") && error.contains(&foreign.to_string()), "{error}");
        assert_eq!(volumes.dev_item(DevId(1)).unwrap(), own, "a refused item changes nothing");
    }
}

#[test]
fn i4_no_superblock_is_written_that_would_be_refused() {
    let device = Recorder::formatted(100 * MIB);
    let volumes = Volumes::open(vec![device.clone()], DeviceSetOptions::default()).unwrap();
    let good = generation(11, volumes.superblock().clone());
    let mut broken = vec![Superblock { fsid: Uuid::from_bytes([9; 16]), ..good.clone() }];
    broken.push(Superblock { sys_chunk_array_size: 5, ..good.clone() });
    broken.push(Superblock { root_level: 8, ..good.clone() });
    for sb in broken {
        assert!(volumes.write_superblock(&sb).is_err());
        assert!(volumes.write_log_superblock(&sb).is_err());
    }
    // The primary superblock does not fit into a device of this size.
    let item = DevItem { total_bytes: 65536, ..volumes.dev_item(DevId(1)).unwrap() };
    volumes.set_dev_item(&item).unwrap();
    assert!(volumes.write_superblock(&good).is_err());
    assert!(device.asked.lock().unwrap().iter().all(|asked| *asked == Asked::Flush), "nothing was written");
}
