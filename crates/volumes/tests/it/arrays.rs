//! Tests several devices of which some fail: the places of writes, the devices that are kicked, the promises of commits
//! and logs.
//!
//! Method: a hand-made chunk over devices in memory whose writes, reads or flushes fail on request.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ubtrfs_device::{Device, MemoryDevice};
use ubtrfs_error::Error;
use ubtrfs_format::codec::Field;
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, DevStatsItem, DeviceRecord, Stripe};
use ubtrfs_format::node::finish_block;
use ubtrfs_format::superblock::{Incompat, SYS_CHUNK_ARRAY_SIZE, Superblock};
use ubtrfs_format::{CsumType, DevId, FormatError, Generation, Key, KeyType, Logical, Physical};
use ubtrfs_volumes::{DeviceSetOptions, LogPromise, MemberState, Refreshed, Tuning, Volumes, tune};
use uuid::Uuid;

use crate::common::{CHUNK, MIB, chunk, dev_item, put, superblock};

/// A device in memory that fails on request.
#[derive(Debug)]
struct Faulty {
    memory: MemoryDevice,
    fails_writes: AtomicBool,
    fails_reads: AtomicBool,
    fails_flushes: AtomicBool,
}

impl Faulty {
    fn check(flag: &AtomicBool) -> io::Result<()> {
        if flag.load(Ordering::Relaxed) { Err(io::Error::other("broken")) } else { Ok(()) }
    }

    fn set(flag: &AtomicBool) {
        flag.store(true, Ordering::Relaxed);
    }

    fn mend(&self) {
        for flag in [&self.fails_writes, &self.fails_reads, &self.fails_flushes] {
            flag.store(false, Ordering::Relaxed);
        }
    }

    /// The generation of the primary superblock.
    fn generation(&self) -> u64 {
        let mut raw = vec![0; 4096];
        self.memory.read_at(65536, &mut raw).unwrap();
        Superblock::decode(&raw).unwrap().generation.0
    }
}

impl Device for Faulty {
    fn len_bytes(&self) -> u64 {
        self.memory.len_bytes()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        Self::check(&self.fails_reads)?;
        self.memory.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        Self::check(&self.fails_writes)?;
        self.memory.write_at(offset, buf)
    }
    fn flush(&self) -> io::Result<()> {
        Self::check(&self.fails_flushes)
    }
    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.memory.discard(offset, len_bytes)
    }
    fn describe(&self) -> String {
        "a faulty device".to_owned()
    }
    fn is_read_only(&self) -> bool {
        false
    }
}

/// The superblock of device `devid`: the system chunk has a stripe of 4 MiB on each device.
fn superblock_of(devid: u64, nr_devices: u64, profile: BlockGroupFlags) -> Superblock {
    let stripe = |n| Stripe { devid: DevId(n), offset: Physical(MIB), dev_uuid: Uuid::from_u128(n.into()) };
    let (nr_data, sub_stripes) = match profile {
        BlockGroupFlags::RAID0 => (nr_devices, 1),
        BlockGroupFlags::RAID10 => (nr_devices / 2, 2),
        _ => (1, 1),
    };
    let item = ChunkItem {
        length: 4 * MIB * nr_data,
        flags: BlockGroupFlags::SYSTEM | profile,
        sub_stripes,
        stripes: (1..=nr_devices).map(stripe).collect(),
        ..chunk()
    };
    let mut array = Vec::new();
    Key::new(256, KeyType::CHUNK_ITEM, CHUNK.0).write(&mut array);
    array.extend_from_slice(&item.encode());
    let mut sys_chunk_array = [0; SYS_CHUNK_ARRAY_SIZE];
    sys_chunk_array[..array.len()].copy_from_slice(&array);
    Superblock {
        num_devices: nr_devices,
        dev_item: dev_item(devid, 32 * MIB),
        sys_chunk_array,
        sys_chunk_array_size: array.len() as u32,
        total_bytes: 32 * MIB * nr_devices,
        ..superblock(32 * MIB)
    }
}

fn devices(nr_devices: u64, profile: BlockGroupFlags) -> Vec<Arc<Faulty>> {
    let make = |devid| {
        let memory = MemoryDevice::new(32 * MIB);
        put(&memory, &superblock_of(devid, nr_devices, profile), 65536);
        let flag = AtomicBool::default;
        Arc::new(Faulty { memory, fails_writes: flag(), fails_reads: flag(), fails_flushes: flag() })
    };
    (1..=nr_devices).map(make).collect()
}

/// Gives the primary superblock of a device of [`devices`] this generation.
fn set_generation(devices: &[Arc<Faulty>], devid: u64, profile: BlockGroupFlags, generation: u64) {
    let sb = superblock_of(devid, devices.len() as u64, profile);
    put(&devices[devid as usize - 1].memory, &Superblock { generation: Generation(generation), ..sb }, 65536);
}

fn open(devices: &[Arc<Faulty>]) -> Volumes {
    open_with(devices, DeviceSetOptions::default()).unwrap()
}

fn open_with(devices: &[Arc<Faulty>], options: DeviceSetOptions) -> Result<Volumes, Error> {
    Volumes::open(devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect(), options)
}

fn states(volumes: &Volumes) -> Vec<MemberState> {
    volumes.devices().into_iter().map(|device| device.state).collect()
}

fn next(volumes: &Volumes, generation: u64) -> Superblock {
    Superblock { generation: Generation(generation), ..volumes.superblock().clone() }
}

const AT: Logical = Logical(CHUNK.0 + MIB);
/// Offset on each device of `AT`, in a chunk of copies.
const ON_DEVICE: u64 = 2 * MIB;

#[allow(clippy::unnecessary_wraps, reason = "the type of a check")]
fn accept(_: usize, _: &[u8]) -> Result<(), FormatError> {
    Ok(())
}

fn read(volumes: &Volumes, len: usize) -> Vec<u8> {
    let mut found = vec![0; len];
    volumes.read(AT, &mut found, 4096, &accept).unwrap();
    found
}

#[test]
fn striped_content_comes_back_at_all_offsets_and_lengths() {
    for (profile, nr_devices) in
        [(BlockGroupFlags::RAID0, 3), (BlockGroupFlags::RAID10, 4), (BlockGroupFlags::RAID1C3, 3)]
    {
        let devices = devices(nr_devices, profile);
        let volumes = open(&devices);
        for (offset, len) in [(0, 3 << 20), (4096, 65536), (61440, 8192), (131_072 - 4096, 1 << 20)] {
            let data: Vec<u8> = (0..len).map(|n: usize| (n * 7 + n / 4096 + offset as usize) as u8).collect();
            let at = AT.advance(offset);
            volumes.write(at, &data).unwrap();
            let mut found = vec![0; len];
            volumes.read(at, &mut found, 4096, &accept).unwrap();
            assert!(found == data, "{profile:?} {offset} {len}");
            for copy in 0..volumes.num_copies(at) {
                found.fill(0);
                volumes.read_copy(at, &mut found, copy).unwrap();
                assert!(found == data, "{profile:?} {offset} {len} {copy}");
            }
        }
    }
}

#[test]
fn w2_a_failed_copy_of_verified_content_is_not_read_and_is_written_again() {
    let devices = devices(2, BlockGroupFlags::RAID1);
    let volumes = open(&devices);
    volumes.write(AT, &[1; 65536]).unwrap();
    Faulty::set(&devices[0].fails_writes);
    volumes.write_verifiable(AT, &[io::IoSlice::new(&[2; 65536])]).unwrap();
    assert_eq!(states(&volumes), [MemberState::InSync; 2]);
    for _ in 0..10 {
        assert_eq!(read(&volumes, 65536), [2; 65536], "the copy that was not written is avoided");
    }
    devices[0].mend();
    volumes.settle_failed_writes().unwrap();
    for device in &devices {
        let mut found = vec![0; 65536];
        device.read_at(ON_DEVICE, &mut found).unwrap();
        assert_eq!(found, [2; 65536]);
    }
    assert!(!volumes.needs_full_commit());
    assert_eq!(volumes.stats()[0].1.values[0], 1);
}

#[test]
fn w2_a_device_that_cannot_repeat_a_failed_write_is_kicked() {
    let devices = devices(2, BlockGroupFlags::RAID1);
    let volumes = open(&devices);
    Faulty::set(&devices[0].fails_writes);
    volumes.write_verifiable(AT, &[io::IoSlice::new(&[2; 65536])]).unwrap();
    volumes.settle_failed_writes().unwrap();
    assert_eq!(states(&volumes), [MemberState::Kicked, MemberState::InSync]);
    assert_eq!(read(&volumes, 65536), [2; 65536]);
    assert!(volumes.needs_full_commit());
}

#[test]
fn w2_a_failed_copy_of_unverified_content_kicks_its_device() {
    let devices = devices(4, BlockGroupFlags::RAID10);
    let volumes = open(&devices);
    Faulty::set(&devices[2].fails_writes);
    volumes.write(AT, &[2; 1 << 20]).unwrap();
    assert_eq!(states(&volumes)[2], MemberState::Kicked);
    let mut found = vec![0; 1 << 20];
    volumes.read_unverified(AT, &mut found, 4096).unwrap();
    assert_eq!(found, [2; 1 << 20]);
    // Its partner has the only copy now.
    Faulty::set(&devices[3].fails_writes);
    assert!(matches!(volumes.write(AT, &[3; 1 << 20]), Err(Error::Io { .. })), "W1");
}

#[test]
fn c1_a_device_whose_flush_failed_misses_the_commit_and_is_stale_at_the_next_open() {
    let devices = devices(2, BlockGroupFlags::RAID1);
    let volumes = open(&devices);
    volumes.write(AT, &[1; 4096]).unwrap();
    Faulty::set(&devices[1].fails_flushes);
    volumes.flush().unwrap();
    devices[1].mend();
    volumes.write(AT, &[2; 4096]).unwrap();
    volumes.flush().unwrap();
    assert_eq!(states(&volumes), [MemberState::InSync, MemberState::Kicked], "it does not come back");
    assert_eq!(volumes.write_log_superblock(volumes.superblock()).unwrap(), LogPromise::NeedsCommit, "C4");
    volumes.write_superblock(&next(&volumes, 11)).unwrap();
    assert!(volumes.needs_full_commit(), "C4: one generation behind is not enough");
    volumes.write_superblock(&next(&volumes, 12)).unwrap();
    assert_eq!((devices[0].generation(), devices[1].generation()), (12, 10));
    assert!(!volumes.needs_full_commit());
    assert_eq!(volumes.write_log_superblock(&next(&volumes, 12)).unwrap(), LogPromise::Durable);
    drop(volumes);

    let volumes = open(&devices);
    assert_eq!(states(&volumes), [MemberState::InSync, MemberState::Stale(Generation(10))]);
    assert!(volumes.needs_full_commit(), "C4");
    let mut found = vec![0; 4096];
    for _ in 0..10 {
        volumes.read_unverified(AT, &mut found, 4096).unwrap();
        assert_eq!(found, [2; 4096], "M2");
    }
    volumes.write_superblock(&next(&volumes, 13)).unwrap();
    assert_eq!(devices[1].generation(), 10, "C5");
    let refreshed = volumes.refresh_on_device(DevId(2), AT.0..AT.0 + 4096, 4096, None).unwrap();
    assert_eq!(refreshed, Refreshed { written_bytes: 4096, lost_bytes: 0 });
    volumes.set_in_sync(DevId(2));
    volumes.write_superblock(&next(&volumes, 14)).unwrap();
    assert_eq!(devices[1].generation(), 14);
    let mut found = vec![0; 4096];
    devices[1].read_at(ON_DEVICE, &mut found).unwrap();
    assert_eq!(found, [2; 4096]);
}

#[test]
fn c2_a_device_without_which_data_is_lost_is_not_kicked() {
    let devices = devices(2, BlockGroupFlags::RAID0);
    let volumes = open(&devices);
    Faulty::set(&devices[1].fails_flushes);
    assert!(matches!(volumes.flush(), Err(Error::Io { op: "flush", .. })));
    assert_eq!(states(&volumes), [MemberState::InSync; 2]);
    devices[1].mend();
    Faulty::set(&devices[1].fails_writes);
    assert!(volumes.write_superblock(&next(&volumes, 11)).is_err());
}

#[test]
fn c3_a_commit_needs_one_superblock_and_the_next_promise_is_a_commit_again() {
    let devices = devices(3, BlockGroupFlags::RAID1C3);
    let volumes = open(&devices);
    Faulty::set(&devices[0].fails_writes);
    Faulty::set(&devices[2].fails_flushes);
    volumes.write_superblock(&next(&volumes, 11)).unwrap();
    assert_eq!(states(&volumes), [MemberState::Kicked, MemberState::InSync, MemberState::Kicked]);
    assert!(volumes.needs_full_commit());
    Faulty::set(&devices[1].fails_flushes);
    assert!(volumes.write_superblock(&next(&volumes, 12)).is_err(), "no device is left");
}

/// Power failed between the superblocks of a commit, and a device is lost.
#[test]
fn m2_a_device_one_generation_behind_counts_and_is_read_last() {
    let devices = devices(4, BlockGroupFlags::RAID10);
    let volumes = open(&devices);
    volumes.write(AT, &[5; 1 << 20]).unwrap();
    drop(volumes);
    let set = |devid, generation| set_generation(&devices, devid, BlockGroupFlags::RAID10, generation);
    set(3, 11);
    // Device 2 has the only copy of the first column.
    let open = || open_with(&devices[1..], DeviceSetOptions { degraded: true, ..DeviceSetOptions::default() }).unwrap();
    let volumes = open();
    assert_eq!(states(&volumes)[..2], [MemberState::Late(Generation(10)), MemberState::InSync]);
    assert_eq!(volumes.write_refusal(), None);
    let mut found = vec![0; 1 << 20];
    volumes.read_unverified(AT, &mut found, 4096).unwrap();
    assert_eq!(found, [5; 1 << 20]);
    // Device 4 has copies of the column of device 3, which is in sync.
    devices[3].memory.write_at(ON_DEVICE - MIB / 2, &[6; 1 << 20]).unwrap();
    volumes.read_unverified(AT, &mut found, 4096).unwrap();
    assert_eq!(found, [5; 1 << 20]);
    volumes.write(AT, &[7; 1 << 20]).unwrap();
    volumes.write_superblock(&next(&volumes, 12)).unwrap();
    assert_eq!(devices[1].generation(), 12, "C5");
    drop(volumes);
    set(3, 14);
    assert_eq!(states(&open())[0], MemberState::Stale(Generation(12)));
    assert!(open().write_refusal().is_some(), "C4: a device that is two behind may lack content");
}

#[test]
fn m3_a_device_stays_late_until_its_content_is_up_to_date() {
    let volumes = open(&devices(2, BlockGroupFlags::RAID1));
    let record = |complete_to| DeviceRecord {
        stats: DevStatsItem { values: [0; 5] },
        complete_to,
        written_to: None,
        confirmed_at: None,
    };
    volumes.add_record(DevId(2), &record(Some(Generation(7)))).unwrap();
    assert_eq!(states(&volumes), [MemberState::InSync, MemberState::Late(Generation(7))]);
    assert!(!volumes.needs_full_commit(), "it gets superblocks");
    assert!(volumes.take_changed_records(Generation(10)).is_empty());
    volumes.set_in_sync(DevId(2));
    assert_eq!(states(&volumes), [MemberState::InSync; 2]);
    assert_eq!(volumes.take_changed_records(Generation(10)), [(DevId(2), record(None))]);
}

#[test]
fn m3_records_tell_what_a_device_has() {
    let devices = devices(3, BlockGroupFlags::RAID1C3);
    let set = |devid, generation| set_generation(&devices, devid, BlockGroupFlags::RAID1C3, generation);
    let record = |complete_to, written_to: Option<u64>| DeviceRecord {
        stats: DevStatsItem { values: [0; 5] },
        complete_to: Some(Generation(complete_to)),
        written_to: written_to.map(Generation),
        confirmed_at: None,
    };
    // Device 2 was left out, and is one generation behind; device 3 was interrupted, was then left out, and is stale.
    set(1, 20);
    set(2, 19);
    set(3, 15);
    let volumes = open(&devices);
    assert_eq!(states(&volumes)[1..], [MemberState::Late(Generation(19)), MemberState::Stale(Generation(15))]);
    volumes.add_record(DevId(2), &record(19, Some(19))).unwrap();
    volumes.add_record(DevId(3), &record(9, Some(15))).unwrap();
    assert_eq!(states(&volumes)[1..], [MemberState::Stale(Generation(19)), MemberState::Stale(Generation(9))]);
    volumes.write_superblock(&next(&volumes, 21)).unwrap();
    assert!(volumes.needs_full_commit(), "C4");
    volumes.write_superblock(&next(&volumes, 22)).unwrap();
    assert_eq!([0, 1, 2].map(|n| devices[n].generation()), [22, 19, 15], "C5");
    set(1, 20);
    let refused = volumes.add_record(DevId(3), &record(9, Some(14))).unwrap_err().to_string();
    assert!(refused.contains("were written apart"), "I3: {refused}");
    drop(volumes);
    // Nothing was recorded yet: the first commit records both.
    let volumes = open(&devices);
    let taken = volumes.take_changed_records(Generation(20));
    let confirmed = DeviceRecord { confirmed_at: Some(Generation(21)), ..record(15, Some(15)) };
    assert_eq!(taken, [(DevId(2), record(19, None)), (DevId(3), confirmed)]);
    // A member that is kicked by a flush lacks the commit that it was flushed for.
    Faulty::set(&devices[0].fails_flushes);
    assert!(volumes.flush().is_err(), "C2: a late device may lack content");
    devices[0].mend();
    drop(volumes);
    set(2, 20);
    set(3, 20);
    let volumes = open(&devices);
    Faulty::set(&devices[1].fails_flushes);
    volumes.flush().unwrap();
    assert_eq!(
        volumes.take_changed_records(Generation(21)),
        [(
            DevId(2),
            DeviceRecord {
                stats: DevStatsItem { values: [0, 0, 1, 0, 0] },
                complete_to: Some(Generation(20)),
                written_to: Some(Generation(21)),
                confirmed_at: Some(Generation(22)),
            }
        )]
    );
}

#[test]
fn m4_a_record_is_certain_up_to_the_commit_that_confirmed_it() {
    let devices = devices(2, BlockGroupFlags::RAID1);
    set_generation(&devices, 1, BlockGroupFlags::RAID1, 30);
    let stats = DevStatsItem { values: [0; 5] };
    let generation = |number: u64| Some(Generation(number));
    let record = |confirmed_at| {
        let (complete_to, written_to) = (generation(9), generation(10));
        DeviceRecord { stats: stats.clone(), complete_to, written_to, confirmed_at }
    };
    let found_at = |number, confirmed_at| {
        set_generation(&devices, 2, BlockGroupFlags::RAID1, number);
        let volumes = open(&devices);
        volumes.add_record(DevId(2), &record(confirmed_at)).map(|()| volumes)
    };
    for (number, confirmed_at) in [(12, generation(13)), (13, generation(13)), (25, generation(30)), (11, None)] {
        let refused = found_at(number, confirmed_at).map(drop).unwrap_err().to_string();
        assert!(refused.contains("were written apart"), "{number} {confirmed_at:?}: {refused}");
    }
    found_at(10, generation(30)).unwrap();
    // Linux has written to both since then, and then to the first one only.
    for confirmed_at in [generation(13), None] {
        let volumes = found_at(25, confirmed_at).unwrap();
        assert_eq!(states(&volumes), [MemberState::InSync, MemberState::Stale(Generation(9))]);
        let (complete_to, written_to, confirmed_at) = (generation(9), generation(25), generation(31));
        let renewed = DeviceRecord { stats: stats.clone(), complete_to, written_to, confirmed_at };
        assert_eq!(volumes.take_changed_records(Generation(30)), [(DevId(2), renewed)]);
    }
}

#[test]
fn c2_a_device_is_not_kicked_while_a_recorded_move_needs_it() {
    let devices = devices(3, BlockGroupFlags::RAID1C3);
    let volumes = open(&devices);
    let (start, item) = volumes.chunk_at(AT).unwrap();
    let alone = ChunkItem { flags: BlockGroupFlags::SYSTEM, stripes: vec![item.stripes[1]], ..ChunkItem::clone(&item) };
    volumes.begin_migration(start, alone.clone()).unwrap();
    Faulty::set(&devices[2].fails_flushes);
    volumes.flush().unwrap();
    assert_eq!(states(&volumes)[2], MemberState::Kicked, "the new place does not need device 3");
    volumes.record_migration(start).unwrap();
    Faulty::set(&devices[1].fails_flushes);
    assert!(volumes.flush().is_err(), "the only recorded copy is on device 2");
    devices[1].mend();
    volumes.cancel_migration(start);
    volumes.begin_migration(start, alone).unwrap();
    Faulty::set(&devices[1].fails_flushes);
    volumes.flush().unwrap();
    assert!(volumes.record_migration(start).is_err(), "G4");
}

/// I3 of `repair`: the stale device has the only good copy.
#[test]
fn i3_a_device_is_refreshed_from_good_copies_only() {
    let devices = devices(2, BlockGroupFlags::RAID1);
    let volumes = open(&devices);
    volumes.write(AT, &[3; 65536]).unwrap();
    devices[0].memory.write_at(ON_DEVICE, &[9; 8192]).unwrap();
    devices[1].memory.write_at(ON_DEVICE + 4096, &[8; 8192]).unwrap();
    let verify = |index: usize, unit: &[u8]| match (index < 16, unit == [3; 4096]) {
        (true, true) => Ok(()),
        _ => Err(FormatError::Value { what: "test", field: "byte", value: 0, expected: "expected 3" }),
    };
    let refreshed = volumes.refresh_on_device(DevId(2), AT.0..AT.0 + 65536, 4096, Some(&verify)).unwrap();
    assert_eq!(refreshed, Refreshed { written_bytes: 4096, lost_bytes: 4096 });
    let mut found = vec![0; 65536];
    devices[1].memory.read_at(ON_DEVICE, &mut found).unwrap();
    let is_good = |unit: usize| found[unit * 4096..][..4096] == [3; 4096];
    assert_eq!((0..16).filter(|unit| !is_good(*unit)).collect::<Vec<_>>(), [1], "it is bad on both devices");
}

#[test]
fn m2_a_stale_device_of_a_chunk_without_redundancy_missed_nothing() {
    let devices = devices(2, BlockGroupFlags::RAID0);
    let volumes = open(&devices);
    volumes.write(AT, &[5; 1 << 20]).unwrap();
    drop(volumes);
    set_generation(&devices, 1, BlockGroupFlags::RAID0, 13);
    let volumes = open(&devices);
    assert_eq!(states(&volumes), [MemberState::InSync, MemberState::Stale(Generation(10))]);
    let mut found = vec![0; 1 << 20];
    volumes.read_unverified(AT, &mut found, 4096).unwrap();
    assert_eq!(found, [5; 1 << 20]);
    assert!(!volumes.may_lack_copies(DevId(2)));
}

#[test]
fn i4_superblocks_of_one_generation_may_name_different_logs() {
    let devices = devices(3, BlockGroupFlags::RAID1C3);
    let logs = [Logical(0), Logical(CHUNK.0 + 65536), Logical(CHUNK.0 + 65536)];
    for ((devid, device), log_root) in (1..).zip(&devices).zip(logs) {
        let sb = Superblock { log_root, ..superblock_of(devid, 3, BlockGroupFlags::RAID1C3) };
        put(&device.memory, &sb, 65536);
    }
    let volumes = open(&devices);
    assert_eq!(volumes.logs(), [(logs[1], 0)]);
    assert_eq!(volumes.superblock().log_root, logs[1]);
    assert_eq!(states(&volumes), [MemberState::InSync; 3]);
}

#[test]
fn i1_i3_copies_and_forks_of_a_device_are_refused_in_one_line() {
    let refusal = |change: &dyn Fn(&mut Superblock)| {
        let devices = devices(2, BlockGroupFlags::RAID1);
        let mut sb = superblock_of(2, 2, BlockGroupFlags::RAID1);
        change(&mut sb);
        put(&devices[1].memory, &sb, 65536);
        let text = open_with(&devices, DeviceSetOptions::default()).unwrap_err().to_string();
        assert!(!text.contains('\n'), "{text}");
        text
    };
    assert!(refusal(&|sb| sb.dev_item.devid = DevId(1)).contains("both device 1"));
    assert!(refusal(&|sb| sb.dev_item.uuid = Uuid::from_u128(1)).contains("device UUID"));
    // I6: a copy that this generation added is in nobody's place.
    let added_now = |sb: &mut Superblock| {
        (sb.dev_item.devid, sb.dev_item.generation) = (DevId(1), sb.generation.0);
    };
    assert!(refusal(&added_now).contains("both device 1"));
    assert!(refusal(&|sb| sb.root = Logical(CHUNK.0 + 32768)).contains("written apart"));
    assert!(
        refusal(&|sb| {
            sb.generation = Generation(12);
            sb.super_roots[1].tree_root_gen = Generation(10);
            sb.super_roots[1].tree_root = Logical(CHUNK.0 + 65536);
        })
        .contains("written apart")
    );
}

#[test]
fn i3_members_whose_nodes_of_one_generation_differ_were_written_apart() {
    let devices = devices(2, BlockGroupFlags::RAID1);
    let at = Logical(CHUNK.0 + 16384);
    // The node of the last commit, with this number in its last byte.
    let put_node = |device: &Faulty, last: u8| {
        let mut node = vec![0; 16384];
        node[48..56].copy_from_slice(&at.0.to_le_bytes());
        node[80..88].copy_from_slice(&10u64.to_le_bytes());
        node[16383] = last;
        finish_block(&mut node, CsumType::Crc32c);
        device.memory.write_at(MIB + 16384, &node).unwrap();
    };
    let volumes = open(&devices);
    let check = || volumes.check_one_history(at, Generation(10), CsumType::Crc32c);
    devices.iter().for_each(|device| put_node(device, 1));
    assert_eq!(check().unwrap().unwrap().last(), Some(&1));
    put_node(&devices[1], 2);
    assert!(check().unwrap_err().to_string().contains("written apart"));
}

#[test]
fn a_device_that_is_given_twice_is_not_tuned() {
    let devices = devices(2, BlockGroupFlags::RAID1);
    let twice = [0, 0].map(|at| Arc::clone(&devices[at]) as Arc<dyn Device>);
    let tuning = Tuning { fsid: None, seeding: Some(true), features: Incompat::empty() };
    assert!(tune(&twice, &tuning).unwrap_err().to_string().contains("given twice"));
}

#[test]
fn without_all_devices_writing_needs_the_option_and_surviving_chunks() {
    let some = |profile, nr_given: usize, degraded| {
        let volumes =
            open_with(&devices(3, profile)[..nr_given], DeviceSetOptions { degraded, ..DeviceSetOptions::default() })
                .unwrap();
        let refusal = volumes.write_refusal();
        if refusal.is_none() {
            volumes.write(AT, &[1; 4096]).unwrap();
        }
        refusal.unwrap_or_default()
    };
    assert!(some(BlockGroupFlags::RAID1C3, 1, false).contains("-o degraded"));
    assert_eq!(some(BlockGroupFlags::RAID1C3, 1, true), "");
    assert!(some(BlockGroupFlags::RAID0, 2, true).contains("does not survive"));
}

#[test]
fn a_read_goes_on_while_one_device_fails_all_reads() {
    let devices = devices(2, BlockGroupFlags::RAID1);
    let volumes = open(&devices);
    volumes.write(AT, &[7; 1 << 20]).unwrap();
    Faulty::set(&devices[0].fails_reads);
    assert_eq!(read(&volumes, 1 << 20), [7; 1 << 20]);
    assert!(volumes.stats()[0].1.values[1] > 0);
}

/// A device that is being added has the superblock of the commit before, and an item of the next generation.
#[test]
fn i6_a_device_that_is_being_added_does_not_replace_itself() {
    let devices = devices(2, BlockGroupFlags::RAID1);
    let mut superblock = superblock_of(2, 2, BlockGroupFlags::RAID1);
    superblock.dev_item.generation = superblock.generation.0 + 1;
    crate::common::put(&devices[1].memory, &superblock, 65536);
    assert_eq!(open(&devices).devices().len(), 2);
}
