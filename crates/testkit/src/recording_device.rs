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
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use ubtrfs_device::Device;

use crate::{Medium, MediumDevice, Rng};

const SECTOR: u64 = 4096;

#[derive(Clone, Debug)]
enum Event {
    Write { offset: u64, data: Arc<[u8]> },
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
    /// The last mark before the cut: what was promised by then.
    pub promised: Option<u64>,
}

/// A device in memory, sparse, that records.
#[derive(Debug)]
pub struct RecordingDevice {
    base: Medium,
    live: MediumDevice,
    events: Mutex<Vec<Event>>,
}

/// Builds what the medium could hold at points of a recording that are asked for in ascending order: what was durable at
/// the last one is not replayed again.
#[derive(Debug)]
pub struct CutBuilder {
    events: Vec<Event>,
    durable: Medium,
    /// Events that are in `durable`.
    nr_durable: usize,
    outcome: CutOutcome,
}

impl RecordingDevice {
    /// Starts from this content.
    pub fn new(base: Medium) -> Self {
        Self { live: MediumDevice::new(base.clone()), base, events: Mutex::default() }
    }

    /// Starts from the content of an image file.
    pub fn from_image(path: &Path) -> Result<Self> {
        Ok(Self::new(Medium::from_image(path)?))
    }

    /// Another device with the content that this one started from.
    pub fn fork(&self) -> Self {
        Self::new(self.base.clone())
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

    /// Cuts at many points.
    pub fn cuts(&self) -> CutBuilder {
        let events = self.lock_events().clone();
        CutBuilder { events, durable: self.base.clone(), nr_durable: 0, outcome: CutOutcome::default() }
    }

    /// Writes an image of what the medium could hold when the power went after `events` events.
    pub fn cut(&self, events: usize, rng: &mut Rng, image: &Path) -> Result<CutOutcome> {
        let (medium, outcome) = self.cuts().cut(events, rng);
        medium.save(image)?;
        Ok(outcome)
    }

    fn lock_events(&self) -> std::sync::MutexGuard<'_, Vec<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CutBuilder {
    /// What the medium could hold when the power went after `events` events, at least as many as the last time.
    pub fn cut(&mut self, events: usize, rng: &mut Rng) -> (Medium, CutOutcome) {
        let prefix = events.min(self.events.len());
        let flushed =
            self.events[..prefix].iter().rposition(|event| matches!(event, Event::Flush)).map_or(0, |at| at + 1);
        assert!(self.nr_durable <= flushed, "cuts are asked for in ascending order");
        for event in &self.events[self.nr_durable..flushed] {
            match event {
                Event::Write { offset, data } => self.durable.write(*offset, data),
                Event::Discard { offset, len_bytes } => self.durable.zero(*offset, *len_bytes),
                Event::Flush => self.outcome.flushes += 1,
                Event::Mark(value) => self.outcome.promised = Some(*value),
            }
        }
        self.nr_durable = flushed;
        let (mut medium, mut outcome) = (self.durable.clone(), self.outcome);
        // Most cuts have some of everything; some keep or lose nearly all, which random choices hardly ever do.
        let mood = rng.below(8);
        for event in &self.events[flushed..prefix] {
            match event {
                // A promise that was made is one, even if its flush was the last event before.
                Event::Mark(value) => outcome.promised = Some(*value),
                Event::Write { offset, data } => match (mood, rng.below(24)) {
                    (0, 1..) | (1, 0) | (2.., 0..8) => {
                        outcome.kept += 1;
                        medium.write(*offset, data);
                    }
                    (1, 1..) | (0, 0) | (2.., 8..16) => outcome.dropped += 1,
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
        (medium, outcome)
    }
}

impl Device for RecordingDevice {
    fn len_bytes(&self) -> u64 {
        self.base.len_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.live.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let mut live = self.live.write();
        live.check(offset, buf.len() as u64)?;
        live.write(offset, buf);
        self.lock_events().push(Event::Write { offset, data: buf.into() });
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let _live = self.live.write();
        self.lock_events().push(Event::Flush);
        Ok(())
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let mut live = self.live.write();
        live.check(offset, len_bytes)?;
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
