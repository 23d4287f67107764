//! A sparse device in memory, for tests.
//!
//! Invariants:
//! - I1. Pages are stored in [`NR_SHARDS`] maps, each with its own lock. A page that is in none of the maps reads as
//!   zeros.

use std::collections::HashMap;
use std::io;
use std::sync::{PoisonError, RwLock};

use crate::{Device, check_range};

const PAGE_SIZE: usize = 64 * 1024;
const NR_SHARDS: usize = 16;

type MemoryShard = RwLock<HashMap<u64, Box<[u8]>>>;

/// A device in memory. Ranges that were never written read as zeros.
pub struct MemoryDevice {
    len_bytes: u64,
    shards: [MemoryShard; NR_SHARDS],
}

impl MemoryDevice {
    /// Makes a device of `len_bytes` zeros. Writes allocate memory.
    pub fn new(len_bytes: u64) -> Self {
        Self { len_bytes, shards: Default::default() }
    }

    /// Bytes of memory that the pages of the device occupy.
    pub fn resident_bytes(&self) -> u64 {
        let nr_pages: usize =
            self.shards.iter().map(|shard| shard.read().unwrap_or_else(PoisonError::into_inner).len()).sum();
        (nr_pages * PAGE_SIZE) as u64
    }

    fn shard(&self, page: u64) -> &MemoryShard {
        &self.shards[(page % NR_SHARDS as u64) as usize]
    }
}

impl std::fmt::Debug for MemoryDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryDevice").field("len_bytes", &self.len_bytes).finish_non_exhaustive()
    }
}

/// Splits `len` bytes at `offset` by page. Yields page number, offset in the page, and range of the buffer.
fn pieces(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let at = offset + done as u64;
        let in_page = (at % PAGE_SIZE as u64) as usize;
        let piece = (PAGE_SIZE - in_page).min(len - done);
        let range = done..done + piece;
        done += piece;
        Some((at / PAGE_SIZE as u64, in_page, range))
    })
}

impl Device for MemoryDevice {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        check_range(offset, buf.len(), self.len_bytes, io::ErrorKind::UnexpectedEof)?;
        for (page, at, range) in pieces(offset, buf.len()) {
            let shard = self.shard(page).read().unwrap_or_else(PoisonError::into_inner);
            let len = range.len();
            match shard.get(&page) {
                Some(content) => buf[range].copy_from_slice(&content[at..at + len]),
                None => buf[range].fill(0),
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        check_range(offset, buf.len(), self.len_bytes, io::ErrorKind::WriteZero)?;
        for (page, at, range) in pieces(offset, buf.len()) {
            let mut shard = self.shard(page).write().unwrap_or_else(PoisonError::into_inner);
            let content = shard.entry(page).or_insert_with(|| vec![0; PAGE_SIZE].into_boxed_slice());
            content[at..at + range.len()].copy_from_slice(&buf[range]);
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let end = offset.saturating_add(len_bytes).min(self.len_bytes);
        let first = offset.div_ceil(PAGE_SIZE as u64);
        let pages = first..end / PAGE_SIZE as u64;
        let nr_pages = pages.end.saturating_sub(pages.start);
        for shard in &self.shards {
            let mut shard = shard.write().unwrap_or_else(PoisonError::into_inner);
            // Look at the smaller set: the pages of the range, or the pages with content.
            if nr_pages < shard.len() as u64 {
                pages.clone().for_each(|page| drop(shard.remove(&page)));
            } else {
                shard.retain(|page, _| !pages.contains(page));
            }
        }
        Ok(())
    }

    fn describe(&self) -> String {
        "memory".to_owned()
    }

    fn is_read_only(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_bytes_read_back_across_pages() {
        let device = MemoryDevice::new(1 << 20);
        let data: Vec<u8> = (0..200_000u32).map(|n| n as u8 ^ (n >> 8) as u8).collect();
        device.write_at(65_000, &data).unwrap();
        let mut found = vec![1; data.len() + 20];
        device.read_at(64_990, &mut found).unwrap();
        assert_eq!(found[..10], [0; 10]);
        assert_eq!(found[10..10 + data.len()], data);
        assert_eq!(found[10 + data.len()..], [0; 10]);
    }

    #[test]
    fn ranges_that_end_past_the_device_are_refused() {
        let device = MemoryDevice::new(1000);
        assert_eq!(device.read_at(990, &mut [0; 11]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(device.write_at(u64::MAX, &[0; 11]).unwrap_err().kind(), io::ErrorKind::WriteZero);
        device.write_at(990, &[1; 10]).unwrap();
    }

    #[test]
    fn discarded_pages_read_as_zeros_and_their_memory_is_returned() {
        let device = MemoryDevice::new(1 << 20);
        device.write_at(0, &vec![7; 1 << 20]).unwrap();
        device.discard(1, (1 << 20) - 1).unwrap();
        let mut buf = [0; 2];
        device.read_at(PAGE_SIZE as u64 - 1, &mut buf).unwrap();
        assert_eq!(buf, [7, 0]);
        assert_eq!(device.resident_bytes(), PAGE_SIZE as u64);
    }
}
