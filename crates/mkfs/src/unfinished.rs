//! [`UnfinishedDevice`]: a device that holds back superblocks while its filesystem is being filled.
//!
//! Invariants:
//! - I1. No superblock reaches a device before [`UnfinishedDevice::finish`], so after an interruption the device has no
//!   filesystem rather than an incomplete one. Reads through this value return the last written superblocks.
//! - I2. `finish` writes the primary superblocks last, after a flush, and that of the first device after all others.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ubtrfs_device::Device;
use ubtrfs_error::Result;
use ubtrfs_format::superblock::{MAGIC, MAGIC_OFFSET, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};

/// A device that holds back superblocks until it is finished.
#[derive(Debug)]
pub struct UnfinishedDevice {
    device: Arc<dyn Device>,
    /// Superblocks not written yet, by offset.
    held: Mutex<BTreeMap<u64, Vec<u8>>>,
}

impl UnfinishedDevice {
    /// Wraps a device. The device's current content remains readable.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self { device, held: Mutex::default() }
    }

    /// Writes the superblocks that the devices of a filesystem hold (I2). The caller has written the rest of the
    /// filesystem.
    pub fn finish(devices: &[Arc<Self>]) -> Result<()> {
        let mut primaries = Vec::new();
        devices.iter().try_for_each(|unfinished| crate::flush(&*unfinished.device))?;
        for Self { device, held } in devices.iter().map(|unfinished| &**unfinished) {
            let held = std::mem::take(&mut *lock(held));
            for (offset, raw) in held {
                match offset == SUPERBLOCK_OFFSETS[0] {
                    true => primaries.push((device, raw)),
                    false => crate::write(&**device, offset, &raw)?,
                }
            }
        }
        devices.iter().try_for_each(|unfinished| crate::flush(&*unfinished.device))?;
        for (device, raw) in primaries.into_iter().rev() {
            crate::write(&**device, SUPERBLOCK_OFFSETS[0], &raw)?;
            crate::flush(&**device)?;
        }
        Ok(())
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<u64, Vec<u8>>> {
        lock(&self.held)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the superblock at `start` overlaps a range.
fn is_in(start: u64, offset: u64, len: usize) -> bool {
    start < offset.saturating_add(len as u64) && offset < start + SUPERBLOCK_SIZE as u64
}

fn holds_superblock(offset: u64, len: usize) -> bool {
    SUPERBLOCK_OFFSETS.iter().any(|start| is_in(*start, offset, len))
}

impl Device for UnfinishedDevice {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if !holds_superblock(offset, buf.len()) {
            return self.device.read_at(offset, buf);
        }
        let held = self.held();
        self.device.read_at(offset, buf)?;
        let end = offset + buf.len() as u64;
        for (start, raw) in held.iter() {
            let (from, to) = (offset.max(*start), end.min(start + raw.len() as u64));
            if from < to {
                let source = &raw[(from - start) as usize..(to - start) as usize];
                buf[(from - offset) as usize..(to - offset) as usize].copy_from_slice(source);
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write_vectored_at(offset, &[IoSlice::new(buf)])
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        let len: usize = bufs.iter().map(|buf| buf.len()).sum();
        if !holds_superblock(offset, len) {
            return self.device.write_vectored_at(offset, bufs);
        }
        let mut held = self.held();
        if SUPERBLOCK_OFFSETS.contains(&offset) && len == SUPERBLOCK_SIZE {
            let raw: Vec<u8> = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
            if raw[MAGIC_OFFSET..].starts_with(&MAGIC) {
                held.insert(offset, raw);
                return Ok(());
            }
        }
        // A write of other content, for example when mkfs clears the device, drops the held superblocks in its range.
        held.retain(|start, _| !is_in(*start, offset, len));
        self.device.write_vectored_at(offset, bufs)
    }

    fn flush(&self) -> io::Result<()> {
        self.device.flush()
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.device.discard(offset, len_bytes)
    }

    fn describe(&self) -> String {
        self.device.describe()
    }

    fn is_read_only(&self) -> bool {
        self.device.is_read_only()
    }

    fn has_io_uring(&self) -> bool {
        self.device.has_io_uring()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MkfsOptions, detect, make};
    use ubtrfs_device::MemoryDevice;

    #[test]
    fn a_filesystem_appears_only_when_it_is_finished() {
        let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(128 << 20));
        make(&*device, &MkfsOptions::default()).unwrap();
        let unfinished = Arc::new(UnfinishedDevice::new(Arc::clone(&device)));
        make(&*unfinished, &MkfsOptions { force: true, ..MkfsOptions::default() }).unwrap();
        assert_eq!(detect(&*device).unwrap(), None);
        let mut mirror = [0; SUPERBLOCK_SIZE];
        device.read_at(SUPERBLOCK_OFFSETS[1], &mut mirror).unwrap();
        assert_eq!(mirror, [0; SUPERBLOCK_SIZE]);
        // A read that covers a held superblock, or a part of it, returns the held content.
        let mut seen = vec![0; 3 << 16];
        unfinished.read_at(0, &mut seen).unwrap();
        assert_eq!(seen[(1 << 16) + 64..][..8], MAGIC);
        let mut part = [0; 4];
        unfinished.read_at(SUPERBLOCK_OFFSETS[1] + 66, &mut part).unwrap();
        assert_eq!(part, MAGIC[2..6]);
        UnfinishedDevice::finish(&[unfinished]).unwrap();
        let mut found = vec![0; 3 << 16];
        device.read_at(0, &mut found).unwrap();
        assert!(found == seen);
        device.read_at(SUPERBLOCK_OFFSETS[1], &mut mirror).unwrap();
        assert_eq!(mirror[64..72], MAGIC);
    }
}
