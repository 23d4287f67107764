//! [`Medium`]: the content of a disk in memory. Copies share unchanged blocks, so the states before faults and after
//! power cuts take memory only for their differences.
//!
//! I1. A block that was never written is zeros.
//! I2. A [`MediumDevice`] never changes a [`Medium`] that was taken from it.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use anyhow::Result;
use ubtrfs_device::Device;
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};

use crate::Rng;

const BLOCK: usize = 16 << 10;

/// The content of a disk, in blocks that are allocated on write and shared by copies.
#[derive(Clone, Debug, Default)]
pub struct Medium {
    len_bytes: u64,
    blocks: HashMap<u64, Arc<[u8]>>,
}

impl Medium {
    /// Makes a medium of zeros.
    pub fn zeros(len_bytes: u64) -> Self {
        Self { len_bytes, blocks: HashMap::new() }
    }

    /// Makes a medium with an empty filesystem.
    pub fn formatted(len_bytes: u64, options: &ubtrfs_mkfs::MkfsOptions) -> Result<Self> {
        let device = MediumDevice::new(Self::zeros(len_bytes));
        ubtrfs_mkfs::make(&device, options)?;
        Ok(device.content())
    }

    /// Loads the content of an image file.
    pub fn from_image(path: &Path) -> Result<Self> {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::open(path)?;
        let mut medium = Self::zeros(file.metadata()?.len());
        let mut block = vec![0; BLOCK];
        let mut at = 0;
        while at < medium.len_bytes {
            match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
                Ok(data) => at = data / BLOCK as u64 * BLOCK as u64,
                Err(rustix::io::Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            }
            block.fill(0);
            let len = (medium.len_bytes - at).min(BLOCK as u64) as usize;
            file.read_exact_at(&mut block[..len], at)?;
            if block.iter().any(|&byte| byte != 0) {
                medium.blocks.insert(at / BLOCK as u64, block.as_slice().into());
            }
            at += BLOCK as u64;
        }
        Ok(medium)
    }

    /// Saves the content to a sparse image file.
    pub fn save(&self, path: &Path) -> Result<()> {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::create(path)?;
        file.set_len(self.len_bytes)?;
        for (index, block) in &self.blocks {
            let offset = index * BLOCK as u64;
            let len = (self.len_bytes - offset).min(BLOCK as u64) as usize;
            if block.iter().any(|&byte| byte != 0) {
                file.write_all_at(&block[..len], offset)?;
            }
        }
        Ok(())
    }

    /// The size of the medium in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// The memory of all blocks in bytes, including shared blocks.
    pub fn resident_bytes(&self) -> u64 {
        (self.blocks.len() * BLOCK) as u64
    }

    pub(crate) fn check(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        match offset.checked_add(len_bytes) {
            Some(end) if end <= self.len_bytes => Ok(()),
            _ => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "past the end of the device")),
        }
    }

    /// Reads bytes. Bytes past the end are zeros.
    pub fn read(&self, offset: u64, buf: &mut [u8]) {
        pieces(offset, buf.len(), |index, within, piece| match self.blocks.get(&index) {
            Some(block) => {
                let len = piece.len();
                buf[piece].copy_from_slice(&block[within..within + len]);
            }
            None => buf[piece].fill(0),
        });
    }

    /// Writes bytes.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        pieces(offset, data.len(), |index, within, piece| {
            if (within, piece.len()) == (0, BLOCK) {
                self.blocks.insert(index, data[piece].into());
                return;
            }
            let block = self.blocks.entry(index).or_insert_with(|| vec![0; BLOCK].into());
            Arc::make_mut(block)[within..within + piece.len()].copy_from_slice(&data[piece]);
        });
    }

    /// Changes every block that was written, in the order of the blocks.
    pub(crate) fn fill_written(&mut self, mut change: impl FnMut(&mut [u8])) {
        let mut blocks: Vec<_> = self.blocks.iter_mut().collect();
        blocks.sort_unstable_by_key(|(index, _)| **index);
        blocks.into_iter().for_each(|(_, block)| change(Arc::make_mut(block)));
    }

    /// Writes zeros.
    pub fn zero(&mut self, offset: u64, len_bytes: u64) {
        pieces(offset, len_bytes as usize, |index, within, piece| {
            if (within, piece.len()) == (0, BLOCK) {
                self.blocks.remove(&index);
            } else if let Some(block) = self.blocks.get_mut(&index) {
                Arc::make_mut(block)[within..within + piece.len()].fill(0);
            }
        });
    }
}

/// A device with the content of a [`Medium`].
#[derive(Debug)]
pub struct MediumDevice {
    len_bytes: u64,
    live: RwLock<Medium>,
}

impl Medium {
    /// Replaces the content, except the superblocks, by random bytes: each block that was ever written.
    pub(crate) fn add_noise(&mut self, rng: &mut Rng) {
        let copies = SUPERBLOCK_OFFSETS.map(|offset| {
            let mut raw = vec![0; SUPERBLOCK_SIZE];
            self.read(offset, &mut raw);
            (offset, raw)
        });
        self.fill_written(|block| {
            for word in block.chunks_mut(8) {
                word.copy_from_slice(&rng.next_u64().to_le_bytes()[..word.len()]);
            }
        });
        for (offset, raw) in copies {
            if offset + (SUPERBLOCK_SIZE as u64) < self.len_bytes() {
                self.write(offset, &raw);
            }
        }
    }
}

impl MediumDevice {
    /// Creates a device with this content.
    pub fn new(medium: Medium) -> Self {
        Self { len_bytes: medium.len_bytes, live: RwLock::new(medium) }
    }

    /// Returns the current content.
    pub fn content(&self) -> Medium {
        self.read().clone()
    }

    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Medium> {
        self.live.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Medium> {
        self.live.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device for MediumDevice {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let live = self.read();
        live.check(offset, buf.len() as u64)?;
        live.read(offset, buf);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let mut live = self.write();
        live.check(offset, buf.len() as u64)?;
        live.write(offset, buf);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let mut live = self.write();
        live.check(offset, len_bytes)?;
        live.zero(offset, len_bytes);
        Ok(())
    }

    fn describe(&self) -> String {
        "medium".to_owned()
    }

    fn is_read_only(&self) -> bool {
        false
    }
}

/// Splits a range at block boundaries. Calls `each` with the block, the offset inside the block, and the range of the
/// buffer.
fn pieces(offset: u64, len: usize, mut each: impl FnMut(u64, usize, Range<usize>)) {
    let mut done = 0;
    while done < len {
        let at = offset + done as u64;
        let within = (at % BLOCK as u64) as usize;
        let piece = (len - done).min(BLOCK - within);
        each(at / BLOCK as u64, within, done..done + piece);
        done += piece;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_independent() {
        let device = MediumDevice::new(Medium::zeros(1 << 20));
        device.write_at(1000, &[7; 40_000]).unwrap();
        let before = device.content();
        device.write_at(20_000, &[8; 40_000]).unwrap();
        device.discard(0, 16_384).unwrap();
        let mut buf = [1; 3];
        before.read(999, &mut buf);
        assert_eq!(buf, [0, 7, 7]);
        before.read(40_999, &mut buf);
        assert_eq!(buf, [7, 0, 0]);
        device.read_at(59_999, &mut buf).unwrap();
        assert_eq!(buf, [8, 0, 0]);
        device.read_at(999, &mut buf).unwrap();
        assert_eq!(buf, [0; 3]);
        assert!(device.read_at((1 << 20) - 2, &mut buf).is_err());
    }
}
