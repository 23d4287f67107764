//! Tests that writes reach all copies, that bad copies are repaired from good ones, and that a repair never undoes a
//! write. Method: a hand-made DUP chunk on a memory device, which the tests damage.

use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{CHUNK, CHUNK_LEN, MIB, Recorder, chunk, dev_item};
use ubtrfs_device::Device;
use ubtrfs_error::Error;
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, DevStatsItem, DeviceRecord};
use ubtrfs_format::superblock::Superblock;
use ubtrfs_format::{DevId, FormatError, Generation, Logical, Physical};
use ubtrfs_volumes::{DeviceSetOptions, Volumes};

fn volumes(device: &std::sync::Arc<Recorder>) -> Volumes {
    Volumes::open(vec![device.clone()], DeviceSetOptions::default()).unwrap()
}

/// Accepts a piece that repeats the byte `index + 1`.
fn is_index(index: usize, piece: &[u8]) -> Result<(), FormatError> {
    match piece.iter().all(|&byte| usize::from(byte) == index + 1) {
        true => Ok(()),
        false => Err(FormatError::Value { what: "piece", field: "content", value: 0, expected: "expected its index" }),
    }
}

fn content(nr_pieces: u8) -> Vec<u8> {
    (1..=nr_pieces).flat_map(|n| vec![n; 4096]).collect()
}

const AT: Logical = Logical(CHUNK.0 + MIB);
/// Device offsets of the copies of `AT`.
const COPIES: [u64; 2] = [2 * MIB, 6 * MIB];

#[test]
fn both_copies_are_written() {
    let device = Recorder::formatted(32 * MIB);
    let volumes = volumes(&device);
    let data = content(8);
    let (a, b) = data.split_at(1000);
    volumes.write_vectored(AT, &[IoSlice::new(a), IoSlice::new(&[]), IoSlice::new(b)]).unwrap();
    for (copy, offset) in COPIES.into_iter().enumerate() {
        let mut found = vec![0; data.len()];
        device.read_at(offset, &mut found).unwrap();
        assert_eq!(found, data);
        found.fill(0);
        volumes.read_copy(AT, &mut found, copy).unwrap();
        assert_eq!(found, data);
    }
    assert_eq!(volumes.num_copies(AT), 2);
    assert!(volumes.read_copy(AT, &mut [0; 4096], 2).is_err());
}

#[test]
fn a_bad_piece_is_read_from_the_other_copy_and_healed() {
    let device = Recorder::formatted(32 * MIB);
    let volumes = volumes(&device);
    let data = content(8);
    volumes.write(AT, &data).unwrap();
    // Different pieces are bad in the two copies.
    device.write_at(COPIES[0] + 4096 + 7, b"rot").unwrap();
    device.write_at(COPIES[1] + 3 * 4096, b"rot").unwrap();
    let mut found = vec![0; data.len()];
    volumes.read(AT, &mut found, 4096, &is_index).unwrap();
    assert_eq!(found, data);
    volumes.read_copy(AT, &mut found, 0).unwrap();
    assert_eq!(found, data, "copy 0 was healed");
    assert_eq!(volumes.stats(), [(DevId(1), DevStatsItem { values: [0, 0, 0, 1, 0] })]);
    assert_eq!(volumes.take_changed_records(Generation(9)).len(), 1);
    assert!(volumes.take_changed_records(Generation(9)).is_empty());
}

#[test]
fn an_unreadable_copy_is_replaced_by_the_other() {
    let device = Recorder::formatted(32 * MIB);
    let volumes = volumes(&device);
    let data = content(4);
    volumes.write(AT, &data).unwrap();
    device.bad_reads.lock().unwrap().push(COPIES[0] + 4096..COPIES[0] + 8192);
    let mut found = vec![0; data.len()];
    volumes.read(AT, &mut found, 4096, &is_index).unwrap();
    assert_eq!(found, data);
    assert!(volumes.stats()[0].1.values[1] >= 1);
}

#[test]
fn a_piece_without_a_good_copy_is_an_error_with_its_address() {
    let device = Recorder::formatted(32 * MIB);
    let volumes = volumes(&device);
    volumes.write(AT, &content(4)).unwrap();
    for copy in COPIES {
        device.write_at(copy + 2 * 4096, b"rot").unwrap();
    }
    let error = volumes.read(AT, &mut vec![0; 4 * 4096], 4096, &is_index).unwrap_err();
    let Error::Corrupt(corrupt) = error else { panic!("{error}") };
    assert_eq!(corrupt.bytenr, Some(Logical(AT.0 + 2 * 4096)));
    let mut damaged = [0; 3];
    device.read_at(COPIES[0] + 2 * 4096, &mut damaged).unwrap();
    assert_eq!(&damaged, b"rot", "nothing was written over it");
}

#[test]
fn a_read_only_filesystem_is_not_healed() {
    let device = Recorder::formatted(32 * MIB);
    volumes(&device).write(AT, &content(1)).unwrap();
    device.write_at(COPIES[0], b"rot").unwrap();
    device.asked.lock().unwrap().clear();
    let volumes =
        Volumes::open(vec![device.clone()], DeviceSetOptions { read_only: true, ..DeviceSetOptions::default() })
            .unwrap();
    let mut found = vec![0; 4096];
    volumes.read(AT, &mut found, 4096, &is_index).unwrap();
    assert_eq!(found, content(1));
    assert!(device.asked.lock().unwrap().is_empty());
}

#[test]
fn a_write_during_a_bad_read_is_not_undone_by_the_repair() {
    let device = Recorder::formatted(32 * MIB);
    let volumes = volumes(&device);
    volumes.write(AT, &content(1)).unwrap();
    device.write_at(COPIES[0], b"rot").unwrap();
    // The write happens after the good copy was read and checked, before the repair takes its lock.
    let written = AtomicBool::new(false);
    let newer = vec![9; 4096];
    let verify = |index: usize, piece: &[u8]| {
        let result = is_index(index, piece);
        if result.is_ok() && !written.swap(true, Ordering::Relaxed) {
            volumes.write(AT, &newer).unwrap();
        }
        result
    };
    let mut found = vec![0; 4096];
    volumes.read(AT, &mut found, 4096, &verify).unwrap();
    for copy in 0..2 {
        volumes.read_copy(AT, &mut found, copy).unwrap();
        assert_eq!(found, newer, "copy {copy}");
    }
}

#[test]
fn addresses_outside_of_chunks_are_errors() {
    let device = Recorder::formatted(32 * MIB);
    let volumes = volumes(&device);
    let last = Logical(CHUNK.0 + CHUNK_LEN - 4096);
    volumes.write(last, &[0; 4096]).unwrap();
    for at in [Logical(0), Logical(last.0 + 1), Logical(u64::MAX - 100)] {
        assert!(volumes.read_copy(at, &mut [0; 4096], 0).is_err());
        assert!(volumes.write(at, &[0; 4096]).is_err());
        assert!(volumes.discard(at, 4096).is_err());
    }
}

#[test]
fn no_address_computation_overflows_at_the_end_of_the_address_space() {
    let device = Recorder::formatted(32 * MIB);
    let volumes = volumes(&device);
    let mut last_chunk = chunk();
    last_chunk.length = MIB - 4096;
    last_chunk.stripes.iter_mut().zip([20, 22]).for_each(|(stripe, mib)| stripe.offset = Physical(mib * MIB));
    // A chunk that is one sector longer would end past the last address.
    assert!(volumes.add_chunk(Logical(u64::MAX - MIB + 1), ChunkItem { length: MIB, ..last_chunk.clone() }).is_err());
    let start = Logical(u64::MAX - MIB + 1);
    volumes.add_chunk(start, last_chunk).unwrap();
    let last = start.advance(MIB - 2 * 4096);
    volumes.write(last, &content(1)).unwrap();
    let mut found = vec![0; 4096];
    volumes.read(last, &mut found, 4096, &is_index).unwrap();
    assert_eq!(found, content(1));
    for len in [2 * 4096, 3 * 4096, MIB as usize] {
        assert!(volumes.read(last, &mut vec![0; len], 4096, &is_index).is_err());
        assert!(volumes.write(last, &vec![0; len]).is_err());
        assert!(volumes.discard(last, len as u64).is_err());
        assert!(volumes.discard(last, u64::MAX).is_err());
    }
    assert_eq!(volumes.plan_chunk(BlockGroupFlags::DATA, u64::MAX), None, "no logical address is left");
}

#[test]
fn reads_and_writes_cross_chunks() {
    let device = Recorder::formatted(32 * MIB);
    let volumes = volumes(&device);
    let mut single = chunk();
    single.flags = BlockGroupFlags::METADATA;
    single.stripes.truncate(1);
    single.stripes[0].offset = Physical(20 * MIB);
    volumes.add_chunk(Logical(CHUNK.0 + CHUNK_LEN), single).unwrap();
    let data = content(4);
    let at = Logical(CHUNK.0 + CHUNK_LEN - 2 * 4096);
    volumes.write(at, &data).unwrap();
    let mut found = vec![0; data.len()];
    device.write_at(COPIES[0] + 3 * MIB - 4096, b"rot").unwrap();
    volumes.read(at, &mut found, 4096, &is_index).unwrap();
    assert_eq!(found, data);
}

#[test]
fn planned_chunks_and_removed_ones_change_what_is_used() {
    let device = Recorder::formatted(320 * MIB);
    let volumes = volumes(&device);
    assert_eq!(volumes.unallocated_bytes(), (320 - 9) * MIB);
    let flags = BlockGroupFlags::METADATA | BlockGroupFlags::DUP;
    let (at, item) = volumes.plan_chunk(flags, u64::MAX).unwrap();
    assert_eq!((at.0, item.length), (CHUNK.0 + CHUNK_LEN, 32 * MIB));
    assert_eq!(item.stripes[0].offset, Physical(9 * MIB));
    volumes.add_chunk(at, item.clone()).unwrap();
    volumes.add_chunk(at, item).unwrap();
    assert_eq!(volumes.devices()[0].bytes_used, (8 + 64) * MIB);
    // The superblock mirror at 64 MiB lies in the second stripe.
    let mirror = at.0 + 23 * MIB;
    assert_eq!(volumes.reserved_ranges(at), vec![mirror..mirror + 65536; 1]);
    volumes.remove_chunk(at);
    let (next, _) = volumes.plan_chunk(flags, u64::MAX).unwrap();
    assert_eq!(next.0, at.0 + 32 * MIB, "logical addresses are not used again");
}

#[test]
fn chunks_past_the_device_are_corrupt() {
    let device = Recorder::formatted(32 * MIB);
    let volumes = volumes(&device);
    let mut far = chunk();
    far.stripes[0].offset = Physical(16 * MIB);
    far.stripes[1].offset = Physical(29 * MIB);
    assert!(matches!(volumes.add_chunk(Logical(1 << 40), far.clone()), Err(Error::Corrupt(_))));
    far.stripes[1].offset = Physical(28 * MIB);
    volumes.add_chunk(Logical(1 << 40), far).unwrap();
    assert!(volumes.set_dev_item(&dev_item(1, 33 * MIB)).is_err());
    volumes.set_dev_item(&dev_item(1, 32 * MIB)).unwrap();
    assert!(volumes.set_dev_item(&dev_item(2, 1 << 40)).is_err(), "the superblock counts one device");
    volumes.settle_members().unwrap();
    let mut elsewhere = chunk();
    elsewhere.stripes[0].devid = DevId(2);
    elsewhere.stripes[1].offset = Physical(20 * MIB);
    volumes.add_chunk(Logical(2 << 40), elsewhere.clone()).unwrap();
    assert!(volumes.settle_members().is_err(), "a chunk names an unknown device");

    // Only one of two devices is given.
    let device = Recorder::new(32 * MIB);
    crate::common::put(&device.memory, &Superblock { num_devices: 2, ..crate::common::superblock(32 * MIB) }, 65536);
    let volumes = Volumes::open(vec![device], DeviceSetOptions::default()).unwrap();
    volumes.add_chunk(Logical(2 << 40), elsewhere).unwrap();
    volumes.set_dev_item(&dev_item(2, 1 << 40)).unwrap();
    let missing = &volumes.devices()[1];
    assert_eq!((missing.devid, missing.path.as_deref()), (DevId(2), None));
}

#[test]
fn stored_counters_are_added_to() {
    let device = Recorder::formatted(32 * MIB);
    let volumes = volumes(&device);
    let record = |values| DeviceRecord {
        stats: DevStatsItem { values },
        complete_to: None,
        written_to: None,
        confirmed_at: None,
    };
    volumes.add_record(DevId(1), &record([1, 2, 3, 4, 5])).unwrap();
    assert!(volumes.take_changed_records(Generation(9)).is_empty());
    device.bad_reads.lock().unwrap().push(0..1 << 40);
    assert!(volumes.read_copy(CHUNK, &mut [0; 4096], 0).is_err());
    assert_eq!(volumes.take_changed_records(Generation(9)), [(DevId(1), record([1, 3, 3, 4, 5]))]);
}

#[test]
fn chunks_that_contradict_themselves_are_corrupt() {
    let device = Recorder::formatted(32 * MIB);
    let volumes = volumes(&device);
    let wrong = ChunkItem { stripe_len: 1, ..chunk() };
    assert!(matches!(volumes.add_chunk(Logical(1 << 40), wrong), Err(Error::Corrupt(_))));
}
