//! Devices that record every write since their creation, to build the states that a power cut could leave. The devices of
//! an array share one log, so that a cut is at one moment on all of them.
//!
//! The fault model of a disk with a volatile write cache:
//! - I1. Everything written to a device before a completed flush of this device is on its medium. A flush of another
//!   device of the array makes nothing durable.
//! - I2. Each write after the last completed flush is kept, dropped, or torn, independently of the others and in any
//!   order. A torn write has some new and some old sectors of 4096 bytes. A sector is never torn. btrfs depends on
//!   whole sectors, because it overwrites the superblock (one sector) in place, and Linux reads only the primary
//!   superblock.
//! - I3. A discard leaves zeros if a flush completed after it; otherwise it leaves zeros or the old content.
//! - I4. A [`Gate`] delays some writes and flushes before they take effect, while requests of other threads pass. So
//!   concurrent operations can happen between any two writes of a commit.
//! - I5. While a device is absent, each request fails with ENODEV, and nothing is recorded.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
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
    Write { device: usize, offset: u64, data: Arc<[u8]> },
    Discard { device: usize, offset: u64, len_bytes: u64 },
    Flush { device: usize },
    Mark { lane: usize, value: u64 },
}

impl Event {
    /// The number of the event's device, if it has one.
    fn device(&self) -> Option<usize> {
        match self {
            Self::Write { device, .. } | Self::Discard { device, .. } | Self::Flush { device } => Some(*device),
            Self::Mark { .. } => None,
        }
    }

    fn is_flush_of(&self, number: usize) -> bool {
        matches!(self, Self::Flush { device } if *device == number)
    }
}

/// The events of all devices of an array, in one order.
#[derive(Debug, Default)]
struct Log {
    /// The content with which each device started.
    bases: Vec<Medium>,
    events: Mutex<Vec<Event>>,
    /// Signals that an event was added.
    added: Condvar,
    /// Numbers of the events at which a delayed request was released.
    passed: Mutex<Vec<usize>>,
    /// The number of requests that are delayed now.
    stopped: AtomicUsize,
}

/// The number of lanes. A lane is a separate numbering of promises: of the returns of calls that guarantee durability,
/// such as fsync.
pub const LANES: usize = 8;

/// The part of a recording that survived a cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CutOutcome {
    /// The number of completed flushes of all devices.
    pub flushes: usize,
    /// Writes after the last completed flush of their device that were kept in full.
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
    /// The number of this device in its log.
    number: usize,
    len_bytes: u64,
    live: MediumDevice,
    log: Arc<Log>,
    gate: Option<(Gate, Mutex<Rng>)>,
    /// Whether each request fails (I5).
    is_absent: AtomicBool,
}

/// Builds the states that the media could have after power cuts at several points of a recording. The points must
/// ascend, because the builder keeps only the durable state at the last point.
#[derive(Debug)]
pub struct CutBuilder {
    log: Arc<Log>,
    /// The events when the builder was made.
    events: Arc<[Event]>,
    members: Vec<Durable>,
    /// Number of events whose promises are in `outcome`.
    nr_noted: usize,
    outcome: CutOutcome,
}

/// The durable state of a device.
#[derive(Clone, Debug)]
struct Durable {
    medium: Medium,
    /// Number of events that are in `medium`.
    nr_events: usize,
}

impl RecordingDevice {
    /// Creates a device with this content.
    pub fn new(base: Medium) -> Self {
        Self::in_log(0, Arc::new(Log { bases: vec![base], ..Log::default() }))
    }

    /// Creates the devices of an array with these contents. Promises, points and cuts of any of them are of the whole
    /// array.
    pub fn array(bases: Vec<Medium>) -> Vec<Self> {
        let log = Arc::new(Log { bases, ..Log::default() });
        (0..log.bases.len()).map(|number| Self::in_log(number, Arc::clone(&log))).collect()
    }

    fn in_log(number: usize, log: Arc<Log>) -> Self {
        let base = &log.bases[number];
        let (len_bytes, live) = (base.len_bytes(), MediumDevice::new(base.clone()));
        Self { number, len_bytes, live, log, gate: None, is_absent: AtomicBool::new(false) }
    }

    /// Makes the device delay some requests (I4).
    #[must_use]
    pub fn with_gate(mut self, gate: Gate) -> Self {
        self.gate = Some((gate, Mutex::new(Rng::new(gate.seed))));
        self
    }

    /// Makes each request fail, or lets the device answer again (I5).
    pub fn set_absent(&self, is_absent: bool) {
        // Under the lock that requests take, so that no request succeeds after the return.
        let _live = self.live.write();
        self.is_absent.store(is_absent, Ordering::SeqCst);
    }

    fn check_present(&self) -> io::Result<()> {
        if self.is_absent.load(Ordering::SeqCst) { Err(rustix::io::Errno::NODEV.into()) } else { Ok(()) }
    }

    /// Creates a device with the content of an image file.
    pub fn from_image(path: &Path) -> Result<Self> {
        Ok(Self::new(Medium::from_image(path)?))
    }

    /// Makes another device with the content with which this device started.
    pub fn fork(&self) -> Self {
        Self::new(self.log.bases[self.number].clone())
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
        let is_flush = |(at, event): (usize, &Event)| matches!(event, Event::Flush { .. }).then_some(at + 1);
        events.iter().enumerate().filter_map(is_flush).collect()
    }

    /// Returns the numbers of the events at which a delayed request was released (I4).
    pub fn gate_points(&self) -> Vec<usize> {
        self.log.passed.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
        let events = self.lock_events().as_slice().into();
        let member = |base: &Medium| Durable { medium: base.clone(), nr_events: 0 };
        let members = self.log.bases.iter().map(member).collect();
        CutBuilder { log: Arc::clone(&self.log), events, members, nr_noted: 0, outcome: CutOutcome::default() }
    }

    /// Writes an image of a state that the medium could have if the power is cut after the first `events` events.
    pub fn cut(&self, events: usize, rng: &mut Rng, image: &Path) -> Result<CutOutcome> {
        let (medium, outcome) = self.cuts().cut(events, rng);
        medium.save(image)?;
        Ok(outcome)
    }

    fn push(&self, event: Event) {
        self.lock_events().push(event);
        self.log.added.notify_all();
    }

    /// Delays the request if the gate chooses it (I4).
    fn maybe_delay(&self, is_superblock: bool) {
        let Some((gate, rng)) = &self.gate else { return };
        let one_in = if is_superblock { gate.superblocks } else { gate.writes };
        if !rng.lock().unwrap_or_else(PoisonError::into_inner).one_in(one_in) {
            return;
        }
        let deadline = Instant::now() + gate.limit;
        self.log.stopped.fetch_add(1, Ordering::SeqCst);
        let mut events = self.lock_events();
        let enough = events.len() + gate.events;
        while events.len() < enough {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            events = self.log.added.wait_timeout(events, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        self.log.passed.lock().unwrap_or_else(PoisonError::into_inner).push(events.len());
        drop(events);
        self.log.stopped.fetch_sub(1, Ordering::SeqCst);
    }

    /// Waits until a request is delayed (I4), at most for `limit`.
    pub fn wait_for_stop(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        while self.log.stopped.load(Ordering::SeqCst) == 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn lock_events(&self) -> std::sync::MutexGuard<'_, Vec<Event>> {
        self.log.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CutBuilder {
    /// Returns a state that the medium of the only device could have if the power is cut after the first `events`
    /// events. `events` must not be smaller than in the last call.
    pub fn cut(&mut self, events: usize, rng: &mut Rng) -> (Medium, CutOutcome) {
        let (mut media, outcome) = self.cut_all(events, rng);
        assert_eq!(media.len(), 1, "an array has several media");
        (media.remove(0), outcome)
    }

    /// Works like [`CutBuilder::cut`], for all devices of an array.
    pub fn cut_all(&mut self, events: usize, rng: &mut Rng) -> (Vec<Medium>, CutOutcome) {
        let prefix = events.min(self.events.len());
        assert!(self.nr_noted <= prefix, "cuts are asked for in ascending order");
        // A promise that was made after the last completed flush must be kept too, because the flush that made its data
        // durable completed before the promise was made.
        for event in &self.events[self.nr_noted..prefix] {
            match event {
                Event::Flush { .. } => self.outcome.flushes += 1,
                Event::Mark { lane, value } => self.outcome.note(*lane, *value),
                Event::Write { .. } | Event::Discard { .. } => {}
            }
        }
        self.nr_noted = prefix;
        let mut outcome = self.outcome;
        let all = Arc::clone(&self.events);
        let media = self.members.iter_mut().enumerate().map(|(number, member)| {
            member.advance(&all, number, prefix);
            member.cut(&all, number, prefix, rng, &mut outcome)
        });
        (media.collect(), outcome)
    }

    /// Returns a state that a device could have if it stopped after the first `events` events, before or after any other
    /// cut.
    pub fn stopped_at(&self, number: usize, events: usize, rng: &mut Rng) -> Medium {
        let prefix = events.min(self.events.len());
        let mut member = Durable { medium: self.log.bases[number].clone(), nr_events: 0 };
        member.advance(&self.events, number, prefix);
        member.cut(&self.events, number, prefix, rng, &mut CutOutcome::default())
    }
}

impl Durable {
    /// Adds what is durable after the first `prefix` events: all before the device's last flush among them (I1).
    fn advance(&mut self, events: &[Event], number: usize, prefix: usize) {
        let is_flush = |event: &Event| event.is_flush_of(number);
        let flushed = events[self.nr_events..prefix].iter().rposition(is_flush);
        let flushed = flushed.map_or(self.nr_events, |at| self.nr_events + at + 1);
        for event in &events[self.nr_events..flushed] {
            match event {
                Event::Write { device, offset, data } if *device == number => self.medium.write(*offset, data),
                Event::Discard { device, offset, len_bytes } if *device == number => {
                    self.medium.zero(*offset, *len_bytes);
                }
                _ => {}
            }
        }
        self.nr_events = flushed;
    }

    /// Adds some of the writes that are not durable (I2, I3).
    fn cut(&self, events: &[Event], number: usize, prefix: usize, rng: &mut Rng, outcome: &mut CutOutcome) -> Medium {
        let mut medium = self.medium.clone();
        // Most cuts mix kept, dropped and torn writes. Some cuts keep or drop nearly all writes, which independent
        // choices would hardly ever do.
        let pattern = rng.below(8);
        for event in events[self.nr_events..prefix].iter().filter(|event| event.device() == Some(number)) {
            match event {
                Event::Write { offset, data, .. } => match (pattern, rng.below(24)) {
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
                Event::Discard { offset, len_bytes, .. } if rng.one_in(2) => medium.zero(*offset, *len_bytes),
                Event::Discard { .. } | Event::Flush { .. } | Event::Mark { .. } => {}
            }
        }
        medium
    }
}

impl Device for RecordingDevice {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.check_present()?;
        self.live.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.maybe_delay(offset == SUPERBLOCK);
        let mut live = self.live.write();
        self.check_present()?;
        live.check(offset, buf.len() as u64)?;
        live.write(offset, buf);
        self.push(Event::Write { device: self.number, offset, data: buf.into() });
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.maybe_delay(true);
        let _live = self.live.write();
        self.check_present()?;
        self.push(Event::Flush { device: self.number });
        Ok(())
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let mut live = self.live.write();
        self.check_present()?;
        live.check(offset, len_bytes)?;
        live.zero(offset, len_bytes);
        self.push(Event::Discard { device: self.number, offset, len_bytes });
        Ok(())
    }

    fn describe(&self) -> String {
        match self.log.bases.len() {
            1 => "recording device".to_owned(),
            _ => format!("recording device {}", self.number + 1),
        }
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

    #[test]
    fn a_flush_of_one_device_makes_nothing_durable_on_another() {
        let devices = RecordingDevice::array(vec![Medium::zeros(1 << 20), Medium::zeros(1 << 20)]);
        for device in &devices {
            device.write_at(0, &[1; 4096]).unwrap();
        }
        devices[1].flush().unwrap();
        devices[0].mark(3);
        devices[1].write_at(0, &[2; 4096]).unwrap();
        let first = |medium: &Medium| {
            let mut byte = [0];
            medium.read(0, &mut byte);
            byte[0]
        };
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..64 {
            let mut builder = devices[0].cuts();
            let (media, outcome) = builder.cut_all(devices[1].events(), &mut Rng::new(seed));
            assert_eq!((outcome.flushes, outcome.promised), (1, Some(3)));
            seen.insert((first(&media[0]), first(&media[1])));
            // The first device stopped before anything was written.
            assert_eq!(first(&builder.stopped_at(0, 0, &mut Rng::new(seed))), 0);
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [(0, 1), (0, 2), (1, 1), (1, 2)]);
    }
}
