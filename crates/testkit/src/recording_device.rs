//! A device that remembers every write since it was made, to build what a power cut could have left.
//!
//! The fault model of a disk with a volatile write cache:
//! - I1. What was written before a completed flush is on the medium.
//! - I2. Each write after the last completed flush is, independently of the others and in any order, kept, dropped, or
//!   torn: some of its 4096-byte sectors are new and the rest old. A sector is never half new: btrfs depends on that,
//!   because its superblock is one, is overwritten in place, and Linux reads the first one alone.
//! - I3. A discarded range holds, after the cut, either its old content or zeros.

use std::io;
use std::path::Path;
use std::sync::Mutex;

use anyhow::Result;
use ubtrfs_device::Device;

use crate::Rng;

const SECTOR: u64 = 4096;

#[derive(Clone, Debug)]
enum Event {
    Write { offset: u64, data: Box<[u8]> },
    Discard { offset: u64, len_bytes: u64 },
    Flush,
    Mark(u64),
}

/// What was kept of a recording.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CutOutcome {
    /// Flushes that had completed.
    pub flushes: usize,
    /// Writes after the last of them that were kept in full, dropped, and torn.
    pub kept: usize,
    /// Dropped.
    pub dropped: usize,
    /// Torn.
    pub torn: usize,
    /// The last mark before the last completed flush: what was promised by then.
    pub promised: Option<u64>,
}

/// A device in memory, sparse, that records.
#[derive(Debug)]
pub struct RecordingDevice {
    base: Sparse,
    live: Mutex<Sparse>,
    events: Mutex<Vec<Event>>,
}

/// Content in blocks of 64 KiB; a block that is missing is zeros.
#[derive(Clone, Debug, Default)]
struct Sparse {
    len_bytes: u64,
    blocks: std::collections::HashMap<u64, Box<[u8]>>,
}

const BLOCK: u64 = 64 << 10;

impl RecordingDevice {
    /// Starts from the content of an image file.
    pub fn from_image(path: &Path) -> Result<Self> {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::open(path)?;
        let len_bytes = file.metadata()?.len();
        let mut base = Sparse { len_bytes, ..Sparse::default() };
        let mut at = 0;
        while at < len_bytes {
            match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
                Ok(data) => at = data / BLOCK * BLOCK,
                Err(rustix::io::Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            }
            let mut block = vec![0; BLOCK as usize].into_boxed_slice();
            let len = (len_bytes - at).min(BLOCK) as usize;
            file.read_exact_at(&mut block[..len], at)?;
            base.blocks.insert(at / BLOCK, block);
            at += BLOCK;
        }
        Ok(Self { live: Mutex::new(base.clone()), base, events: Mutex::default() })
    }

    /// Another device with the content that this one started from.
    pub fn fork(&self) -> Self {
        Self { base: self.base.clone(), live: Mutex::new(self.base.clone()), events: Mutex::default() }
    }

    /// Notes that everything up to here was promised: call it when a sync or fsync returned.
    pub fn mark(&self, value: u64) {
        self.lock_events().push(Event::Mark(value));
    }

    /// Number of events so far; a cut can be at any of them, and after the last.
    pub fn events(&self) -> usize {
        self.lock_events().len()
    }

    /// The numbers of the events at which a flush had completed.
    pub fn flush_points(&self) -> Vec<usize> {
        let events = self.lock_events();
        let is_flush = |(at, event): (usize, &Event)| matches!(event, Event::Flush).then_some(at + 1);
        events.iter().enumerate().filter_map(is_flush).collect()
    }

    /// Writes an image of what the medium could hold when the power went after `events` events.
    pub fn cut(&self, events: usize, rng: &mut Rng, image: &Path) -> Result<CutOutcome> {
        let all = self.lock_events();
        let prefix = &all[..events.min(all.len())];
        let durable = prefix.iter().rposition(|event| matches!(event, Event::Flush)).map_or(0, |at| at + 1);
        let mut medium = self.base.clone();
        let mut outcome = CutOutcome::default();
        for event in &prefix[..durable] {
            match event {
                Event::Write { offset, data } => medium.write(*offset, data),
                Event::Discard { offset, len_bytes } => medium.zero(*offset, *len_bytes),
                Event::Flush => outcome.flushes += 1,
                Event::Mark(value) => outcome.promised = Some(*value),
            }
        }
        for event in &prefix[durable..] {
            match event {
                // A promise that was made is one, even if its flush was the last event before.
                Event::Mark(value) => outcome.promised = Some(*value),
                Event::Write { offset, data } => match rng.below(3) {
                    0 => {
                        outcome.kept += 1;
                        medium.write(*offset, data);
                    }
                    1 => outcome.dropped += 1,
                    _ => {
                        outcome.torn += 1;
                        for (index, sector) in data.chunks(SECTOR as usize).enumerate() {
                            if rng.one_in(2) {
                                medium.write(offset + index as u64 * SECTOR, sector);
                            }
                        }
                    }
                },
                Event::Discard { offset, len_bytes } if rng.one_in(2) => medium.zero(*offset, *len_bytes),
                Event::Discard { .. } | Event::Flush => {}
            }
        }
        drop(all);
        medium.save(image)?;
        Ok(outcome)
    }

    fn lock_events(&self) -> std::sync::MutexGuard<'_, Vec<Event>> {
        self.events.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn lock_live(&self) -> std::sync::MutexGuard<'_, Sparse> {
        self.live.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Device for RecordingDevice {
    fn len_bytes(&self) -> u64 {
        self.base.len_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.base.check(offset, buf.len() as u64)?;
        self.lock_live().read(offset, buf);
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.base.check(offset, buf.len() as u64)?;
        let mut live = self.lock_live();
        live.write(offset, buf);
        self.lock_events().push(Event::Write { offset, data: buf.into() });
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let _live = self.lock_live();
        self.lock_events().push(Event::Flush);
        Ok(())
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.base.check(offset, len_bytes)?;
        let mut live = self.lock_live();
        live.zero(offset, len_bytes);
        self.lock_events().push(Event::Discard { offset, len_bytes });
        Ok(())
    }

    fn describe(&self) -> String {
        "recording device".to_owned()
    }

    fn is_read_only(&self) -> bool {
        false
    }
}

impl Sparse {
    fn check(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        match offset.checked_add(len_bytes) {
            Some(end) if end <= self.len_bytes => Ok(()),
            _ => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "past the end of the device")),
        }
    }

    fn read(&self, offset: u64, buf: &mut [u8]) {
        pieces(offset, buf.len(), |index, within, piece| match self.blocks.get(&index) {
            Some(block) => {
                let len = piece.len();
                buf[piece].copy_from_slice(&block[within..within + len]);
            }
            None => buf[piece].fill(0),
        });
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        pieces(offset, data.len(), |index, within, piece| {
            let block = self.blocks.entry(index).or_insert_with(|| vec![0; BLOCK as usize].into());
            block[within..within + piece.len()].copy_from_slice(&data[piece]);
        });
    }

    fn zero(&mut self, offset: u64, len_bytes: u64) {
        pieces(offset, len_bytes as usize, |index, within, piece| {
            if let Some(block) = self.blocks.get_mut(&index) {
                block[within..within + piece.len()].fill(0);
            }
        });
    }

    fn save(&self, path: &Path) -> Result<()> {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::create(path)?;
        file.set_len(self.len_bytes)?;
        for (index, block) in &self.blocks {
            let offset = index * BLOCK;
            let len = (self.len_bytes - offset).min(BLOCK) as usize;
            if block.iter().any(|&byte| byte != 0) {
                file.write_all_at(&block[..len], offset)?;
            }
        }
        Ok(())
    }
}

/// Splits a range at block borders: block, offset inside it, range of the buffer.
fn pieces(offset: u64, len: usize, mut each: impl FnMut(u64, usize, std::ops::Range<usize>)) {
    let mut done = 0;
    while done < len {
        let at = offset + done as u64;
        let within = (at % BLOCK) as usize;
        let piece = (len - done).min(BLOCK as usize - within);
        each(at / BLOCK, within, done..done + piece);
        done += piece;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Image;

    #[test]
    fn what_was_flushed_survives_and_the_rest_may_not() {
        let image = Image::empty(1 << 20).unwrap();
        let device = RecordingDevice::from_image(image.path()).unwrap();
        device.write_at(4096, &[1; 8192]).unwrap();
        device.flush().unwrap();
        device.mark(7);
        device.write_at(4096, &[2; 8192]).unwrap();
        let cut = Image::empty(0).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..64 {
            let outcome = device.cut(device.events(), &mut Rng::new(seed), cut.path()).unwrap();
            assert_eq!((outcome.flushes, outcome.promised), (1, Some(7)));
            let data = cut.read_at(4096, 8192).unwrap();
            assert!(data.chunks(4096).all(|sector| sector.iter().all(|&byte| byte == sector[0] && byte != 0)));
            seen.insert((data[0], data[8191]));
        }
        assert_eq!(seen.len(), 4, "kept, dropped, and torn in both ways");
    }
}
