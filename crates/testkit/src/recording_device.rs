//! A device that records every write since its creation, to build the states that a power cut could leave.
//!
//! The fault model of a disk with a volatile write cache:
//! - I1. Everything written before a completed flush is on the medium.
//! - I2. Each write after the last completed flush is kept, dropped, or torn, independently of the others and in any
//!   order. A torn write has some new and some old sectors of 4096 bytes. A sector is never torn. btrfs depends on
//!   whole sectors, because it overwrites the superblock (one sector) in place, and Linux reads only the primary
//!   superblock.
//! - I3. A discard leaves zeros if a flush completed after it; otherwise it leaves zeros or the old content.
//! - I4. A [`Gate`] delays some writes and flushes before they take effect, while requests of other threads pass. So
//!   concurrent operations can happen between any two writes of a commit.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use ubtrfs_device::Device;

use crate::{Medium, MediumDevice, Rng};

const SECTOR: u64 = 4096;
/// Offset of the primary superblock.
const SUPERBLOCK: u64 = 64 << 10;

#[derive(Clone, Debug)]
enum Event {
    Write { offset: u64, data: Arc<[u8]> },
    Discard { offset: u64, len_bytes: u64 },
    Flush,
    Mark { lane: usize, value: u64 },
}

/// The number of lanes. A lane is a separate numbering of promises: of the returns of calls that guarantee durability,
/// such as fsync.
pub const LANES: usize = 8;

/// The part of a recording that survived a cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CutOutcome {
    /// The number of completed flushes.
    pub flushes: usize,
    /// Writes after the last completed flush that were kept in full.
    pub kept: usize,
    /// Writes after the last completed flush that were dropped.
    pub dropped: usize,
    /// Writes after the last completed flush that were torn.
    pub torn: usize,
    /// The number of promises that were recorded in lane 0 before the cut; `None` if there was no promise.
    pub promised: Option<u64>,
    /// For each lane, the number of promises that were recorded before the cut.
    pub promised_by: [Option<u64>; LANES],
}

impl CutOutcome {
    fn note(&mut self, lane: usize, value: u64) {
        self.promised_by[lane] = Some(value);
        if lane == 0 {
            self.promised = Some(value);
        }
    }
}

/// The rules by which a device chooses the requests to delay, and the length of the delays (I4).
#[derive(Clone, Copy, Debug)]
pub struct Gate {
    /// Seed of the choice of requests.
    pub seed: u64,
    /// On average, one of this many flushes and writes of the primary superblock is delayed.
    pub superblocks: u64,
    /// On average, one of this many other writes is delayed.
    pub writes: u64,
    /// A delayed request is released after this many further requests and promises of other threads.
    pub events: usize,
    /// A delayed request is released after this time at the latest, because other threads may be waiting for it.
    pub limit: Duration,
}

/// A sparse device in memory that records writes, discards, flushes and promises.
#[derive(Debug)]
pub struct RecordingDevice {
    base: Medium,
    live: MediumDevice,
    events: Mutex<Vec<Event>>,
    /// Signals that an event was added.
    added: Condvar,
    gate: Option<(Gate, Mutex<Rng>)>,
    /// Numbers of the events at which a delayed request was released.
    passed: Mutex<Vec<usize>>,
    /// The number of requests that are delayed now.
    stopped: AtomicUsize,
}

/// Builds the states that the medium could have after power cuts at several points of a recording. The points must
/// ascend, because the builder keeps only the durable state at the last point.
#[derive(Debug)]
pub struct CutBuilder {
    events: Vec<Event>,
    durable: Medium,
    /// Number of events that are in `durable`.
    nr_durable: usize,
    outcome: CutOutcome,
}

impl RecordingDevice {
    /// Creates a device with this content.
    pub fn new(base: Medium) -> Self {
        let live = MediumDevice::new(base.clone());
        Self {
            live,
            base,
            events: Mutex::default(),
            added: Condvar::new(),
            gate: None,
            passed: Mutex::default(),
            stopped: 0.into(),
        }
    }

    /// Makes the device delay some requests (I4).
    #[must_use]
    pub fn with_gate(mut self, gate: Gate) -> Self {
        self.gate = Some((gate, Mutex::new(Rng::new(gate.seed))));
        self
    }

    /// Creates a device with the content of an image file.
    pub fn from_image(path: &Path) -> Result<Self> {
        Ok(Self::new(Medium::from_image(path)?))
    }

    /// Makes another device with the content with which this device started.
    pub fn fork(&self) -> Self {
        Self::new(self.base.clone())
    }

    /// Records promise number `value` of lane 0. Call this function when a sync or fsync has returned.
    pub fn mark(&self, value: u64) {
        self.mark_lane(0, value);
    }

    /// Records promise number `value` of a lane, as [`RecordingDevice::mark`] does for lane 0.
    pub fn mark_lane(&self, lane: usize, value: u64) {
        assert!(lane < LANES, "there are {LANES} lanes");
        self.push(Event::Mark { lane, value });
    }

    /// Returns the number of events so far. A cut can be before any event and after the last event.
    pub fn events(&self) -> usize {
        self.lock_events().len()
    }

    /// Returns the numbers of the events directly after each flush.
    pub fn flush_points(&self) -> Vec<usize> {
        let events = self.lock_events();
        let is_flush = |(at, event): (usize, &Event)| matches!(event, Event::Flush).then_some(at + 1);
        events.iter().enumerate().filter_map(is_flush).collect()
    }

    /// Returns the numbers of the events at which a delayed request was released (I4).
    pub fn gate_points(&self) -> Vec<usize> {
        self.passed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the numbers of the events directly after each promise to a lane in `lanes`.
    pub fn mark_points(&self, lanes: std::ops::Range<usize>) -> Vec<usize> {
        let events = self.lock_events();
        let is_mark = |(at, event): (usize, &Event)| {
            matches!(event, Event::Mark { lane, .. } if lanes.contains(lane)).then_some(at + 1)
        };
        events.iter().enumerate().filter_map(is_mark).collect()
    }

    /// Makes a builder for cuts at many points.
    pub fn cuts(&self) -> CutBuilder {
        let events = self.lock_events().clone();
        CutBuilder { events, durable: self.base.clone(), nr_durable: 0, outcome: CutOutcome::default() }
    }

    /// Writes an image of a state that the medium could have if the power is cut after the first `events` events.
    pub fn cut(&self, events: usize, rng: &mut Rng, image: &Path) -> Result<CutOutcome> {
        let (medium, outcome) = self.cuts().cut(events, rng);
        medium.save(image)?;
        Ok(outcome)
    }

    fn push(&self, event: Event) {
        self.lock_events().push(event);
        self.added.notify_all();
    }

    /// Delays the request if the gate chooses it (I4).
    fn maybe_delay(&self, is_superblock: bool) {
        let Some((gate, rng)) = &self.gate else { return };
        let one_in = if is_superblock { gate.superblocks } else { gate.writes };
        if !rng.lock().unwrap_or_else(PoisonError::into_inner).one_in(one_in) {
            return;
        }
        let deadline = Instant::now() + gate.limit;
        self.stopped.fetch_add(1, Ordering::SeqCst);
        let mut events = self.lock_events();
        let enough = events.len() + gate.events;
        while events.len() < enough {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            events = self.added.wait_timeout(events, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        self.passed.lock().unwrap_or_else(PoisonError::into_inner).push(events.len());
        drop(events);
        self.stopped.fetch_sub(1, Ordering::SeqCst);
    }

    /// Waits until a request is delayed (I4), at most for `limit`.
    pub fn wait_for_stop(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        while self.stopped.load(Ordering::SeqCst) == 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn lock_events(&self) -> std::sync::MutexGuard<'_, Vec<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CutBuilder {
    /// Returns a state that the medium could have if the power is cut after the first `events` events. `events` must
    /// not be smaller than in the last call.
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
                Event::Mark { lane, value } => self.outcome.note(*lane, *value),
            }
        }
        self.nr_durable = flushed;
        let (mut medium, mut outcome) = (self.durable.clone(), self.outcome);
        // Most cuts mix kept, dropped and torn writes. Some cuts keep or drop nearly all writes, which independent
        // choices would hardly ever do.
        let pattern = rng.below(8);
        for event in &self.events[flushed..prefix] {
            match event {
                // A promise that was made after the last completed flush must be kept too, because the flush that made
                // its data durable completed before the promise was made.
                Event::Mark { lane, value } => outcome.note(*lane, *value),
                Event::Write { offset, data } => match (pattern, rng.below(24)) {
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
        self.maybe_delay(offset == SUPERBLOCK);
        let mut live = self.live.write();
        live.check(offset, buf.len() as u64)?;
        live.write(offset, buf);
        self.push(Event::Write { offset, data: buf.into() });
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.maybe_delay(true);
        let _live = self.live.write();
        self.push(Event::Flush);
        Ok(())
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let mut live = self.live.write();
        live.check(offset, len_bytes)?;
        live.zero(offset, len_bytes);
        self.push(Event::Discard { offset, len_bytes });
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
    fn flushed_writes_survive_a_cut_and_later_ones_may_be_lost() {
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
