//! Tests that crafted superblocks and chunks cause errors or work, but never panic. Method: overwrites fields of a
//! valid superblock and of valid chunks at random, corrects the checksum, and calls every function that uses them.
//! Prints its seed; `SEED=n` replays it.

use std::sync::Arc;

use crate::common::{CHUNK, MIB, chunk, dev_item, superblock};
use ubtrfs_device::{Device, MemoryDevice};
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, DevItem};
use ubtrfs_format::superblock::Superblock;
use ubtrfs_format::{DevId, Logical};
use ubtrfs_volumes::{DeviceSetOptions, Volumes};

/// The splitmix64 generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// A number likely to break something: small, near a power of two, near the maximum, or random.
    fn number(&mut self) -> u64 {
        match self.below(4) {
            0 => self.next(),
            1 => u64::MAX - self.next() % 70_000,
            2 => (1u64 << self.below(64)).wrapping_sub(self.next() % 3),
            _ => self.next() % 300,
        }
    }

    /// Overwrites 1, 2, 4 or 8 bytes at a random place.
    fn damage(&mut self, raw: &mut [u8]) {
        let len = (1 << self.below(4)).min(raw.len());
        let at = self.below(raw.len() - len + 1);
        let bytes = self.number().to_le_bytes();
        raw[at..at + len].copy_from_slice(&bytes[..len]);
    }
}

fn seed() -> u64 {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(|| {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64
    });
    println!("SEED={seed}");
    seed
}

/// Calls every function that computes with disk values.
fn use_all(volumes: &Volumes, logical: Logical) {
    let _ = volumes.write_refusal();
    let _ = volumes.devices();
    let _ = volumes.unallocated_bytes();
    for flags in [BlockGroupFlags::DATA, BlockGroupFlags::METADATA | BlockGroupFlags::DUP] {
        if let Some((at, item)) = volumes.plan_chunk(flags, u64::MAX) {
            volumes.add_chunk(at, item).expect("a planned chunk can be added");
        }
        let _ = volumes.allocatable_bytes(flags);
    }
    for (start, item) in volumes.chunks() {
        let _ = volumes.reserved_ranges(start);
        let _ = item.device_extent_len();
        for copy in 0..volumes.num_copies(start) {
            let _ = volumes.read_copy(start, &mut [0; 200_000], copy);
            let last = Logical(start.0 + item.length - 1);
            let _ = volumes.read_copy(last, &mut [0; 1], copy);
        }
        let _ = volumes.write(start, &[0; 4096]);
        let _ = volumes.discard(start, item.length);
    }
    let _ = volumes.read(logical, &mut [0; 8192], 4096, &|_, _| Ok(()));
    let _ = volumes.dev_item(DevId(1));
    let _ = volumes.write_superblock(volumes.superblock());
}

#[test]
fn crafted_superblocks() {
    let mut random = Random(seed());
    let good = superblock(32 * MIB).encode();
    let mut nr_opened = 0;
    for _ in 0..3_000 {
        let mut raw = good.clone();
        for _ in 0..1 + random.below(3) {
            // Damage fields, system chunk and label, but not the padding.
            let end = if random.below(2) == 0 { 600 } else { 1000 };
            random.damage(&mut raw[32..end]);
        }
        let sb = Superblock::decode(&raw).unwrap();
        let device = MemoryDevice::new(32 * MIB);
        device.write_at(65536, &sb.encode_with_csum()).unwrap();
        if let Ok(volumes) = Volumes::open(vec![Arc::new(device)], DeviceSetOptions::default()) {
            use_all(&volumes, sb.chunk_root);
            nr_opened += 1;
        }
    }
    assert!(nr_opened > 20, "some damage must pass the superblock check: {nr_opened}");
}

#[test]
fn crafted_chunks_and_devices() {
    let mut random = Random(seed());
    for _ in 0..500 {
        let device = MemoryDevice::new(32 * MIB);
        let num_devices = 1 + random.next() % 2;
        crate::common::put(&device, &Superblock { num_devices, ..superblock(32 * MIB) }, 65536);
        let volumes = Volumes::open(vec![Arc::new(device)], DeviceSetOptions::default()).unwrap();
        for _ in 0..4 {
            let mut item = chunk();
            for stripe in &mut item.stripes {
                stripe.offset.0 = 10 * MIB + random.next() % (20 * MIB);
                stripe.devid.0 = 1 + random.next() % 2;
            }
            if random.below(2) == 0 {
                item.flags = BlockGroupFlags::from_bits_retain(1 << random.below(3) | 1 << (3 + random.below(8)));
            }
            let nr_stripes = random.below(6);
            let one = item.stripes[0];
            item.stripes.resize(nr_stripes, one);
            let mut raw = item.encode();
            if random.below(2) == 0 {
                random.damage(&mut raw);
            }
            let Ok(item) = ChunkItem::decode(&raw) else { continue };
            let at = if random.below(2) == 0 { CHUNK.0 + MIB * (random.next() % 1000) } else { random.number() };
            let _ = volumes.add_chunk(Logical(at), item);
            let mut raw = dev_item(1 + random.next() % 2, 32 * MIB).encode();
            random.damage(&mut raw);
            let _ = volumes.set_dev_item(&DevItem::decode(&raw).unwrap());
        }
        use_all(&volumes, CHUNK);
    }
}
