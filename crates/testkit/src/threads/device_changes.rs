//! The thread of a run with device changes: it adds, removes and replaces devices while other threads write. In a run with
//! all events, it also converts block groups, resizes and scrubs devices, overwrites parts of a device with noise, and
//! makes a device stop answering.
//!
//! I1. At most one device has noise or does not answer, and only if the profiles tolerate its loss.
//! I2. A scrub repairs the noise before the next event.
//! I3. A device that did not answer is not used any more, even if it answers again, until it is replaced or removed, or the
//!     filesystem is opened again. Meanwhile other events go on.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use ubtrfs_device::Device;
use ubtrfs_format::item::{BalanceArgs, BalanceFilters, BalanceFlags, BalanceItem};
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use ubtrfs_format::{DevId, Profile};
use ubtrfs_fs::{DeviceUsage, Fs, Job, ReplaceRequest, ScrubStart};

use crate::{RecordingDevice, Rng};

/// Errors of a change that the filesystem does not allow now: EINVAL if too few devices or too little space would be left,
/// ENOSPC, ECANCELED, EBUSY, and of a balance ENOTCONN and EINPROGRESS.
pub(super) const REFUSED: [i32; 6] = [22, 28, 125, 16, 107, 115];

/// Errors of work that meets a device that does not answer: EIO, ENODEV, and ENXIO if it knows already.
const ABSENT: [i32; 3] = [5, 19, 6];

/// Number of tries after which a run without changes ends.
const TRIES_MAX: u64 = 40;

/// The work of the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArrayEvents {
    /// It adds, removes and replaces devices.
    Devices,
    /// It does everything.
    All {
        /// Number of devices that the profiles tolerate to lose, from the start to the end of the run.
        tolerated: u16,
    },
}

/// The changes of a run.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Number of devices that were added, removed or replaced.
    pub(super) nr_devices: u64,
    /// Numbers of completed conversions, resizes and scrubs.
    pub(super) others: [u64; 3],
    /// Devices with noise (I2).
    pub(super) noise: Vec<Harmed>,
    /// Devices that did not answer (I3).
    pub(super) absences: Vec<Harmed>,
}

/// A device without which the filesystem has to do for a while.
#[derive(Clone, Debug)]
pub(super) struct Harmed {
    /// The number of the device.
    pub(super) number: usize,
    /// The events of the recording between which this was so.
    pub(super) events: Range<usize>,
}

/// A device that does not answer, or that answers again and is not used.
#[derive(Clone, Copy, Debug)]
struct Absent {
    number: usize,
    devid: DevId,
    begin: usize,
}

/// Changes the devices of a filesystem until the other threads are done. Devices of `all` that are not part of it are
/// spares.
pub(super) fn change_devices(
    fs: &Fs,
    all: &[Arc<RecordingDevice>],
    events: ArrayEvents,
    stop: &AtomicBool,
    seed: u64,
) -> Result<Changes> {
    let mut rng = Rng::new(seed ^ 0xdec1);
    let (mut changes, mut nr_tries, mut absent) = (Changes::default(), 0, None);
    let (nr_kinds, tolerated) = match events {
        ArrayEvents::Devices => (3, 0),
        ArrayEvents::All { tolerated } => (9, tolerated),
    };
    while changes.nr_devices < 3 || !stop.load(Ordering::SeqCst) {
        nr_tries += 1;
        if stop.load(Ordering::SeqCst) && nr_tries > TRIES_MAX {
            break;
        }
        std::thread::sleep(Duration::from_millis(rng.below(10)));
        if let Some(gone) = absent.filter(|_| rng.one_in(3)) {
            if end_absence(fs, all, gone, &mut rng)? {
                changes.nr_devices += 1;
                changes.absences.push(gone.harmed(all));
                absent = None;
            }
            continue;
        }
        let members = fs.space_usage().devices;
        let spares: Vec<&Arc<RecordingDevice>> = all.iter().filter(|device| !is_member(device, &members)).collect();
        let member = &members[rng.index(members.len())];
        let devid = member.devid;
        let kind = rng.below(nr_kinds);
        let done = match (kind, spares.is_empty()) {
            (0, false) => {
                let device = Arc::clone(spares[rng.index(spares.len())]);
                fs.add_device(device, &Job::new()).map(drop)
            }
            // The absent device is replaced or removed by `end_absence`.
            (1 | 2, _) if absent.is_some_and(|gone| gone.devid == devid) => continue,
            (1, false) => {
                let device = Arc::clone(spares[rng.index(spares.len())]);
                let request = ReplaceRequest { devid, device, avoids_source: rng.one_in(4) };
                cancelled_at_times(fs, &mut rng, || fs.replace_device(&request, &Job::new()).map(drop))
            }
            (0..3, _) => cancelled_at_times(fs, &mut rng, || fs.remove_devices(&[DevId(devid.0)], &Job::new())),
            (3 | 4, _) => convert(fs, tolerated, members.len(), &mut rng),
            (5, _) => {
                let full = all[0].len_bytes();
                fs.resize_device(devid, full - rng.below(5) * (full / 16), &Job::new())
            }
            (6, _) => scrub(fs, false, absent.map(|gone| gone.devid)),
            _ if tolerated == 0 || absent.is_some() => continue,
            (7, _) => {
                let Some(number) = number_of(all, member) else { continue };
                let begin = all[number].events();
                add_noise(fs, &*all[number], devid, &mut rng)?;
                std::thread::sleep(Duration::from_millis(rng.below(10)));
                // A scrub checks what is committed, and the noise may be in newer extents.
                fs.sync()?;
                let repaired = scrub(fs, true, None);
                changes.noise.push(Harmed { number, events: begin..all[number].events() });
                repaired
            }
            // The repair of noise may not be durable yet.
            _ if !is_durable(all, &changes.noise) => continue,
            _ => {
                let Some(number) = number_of(all, member) else { continue };
                absent = Some(Absent { number, devid, begin: all[number].events() });
                all[number].set_absent(true);
                // Otherwise the filesystem finds out during the next event.
                if rng.one_in(2) {
                    fs.sync()?;
                }
                continue;
            }
        };
        match (kind, done) {
            (0..3, Ok(())) => changes.nr_devices += 1,
            (3..5, Ok(())) => changes.others[0] += 1,
            (5, Ok(())) => changes.others[1] += 1,
            (_, Ok(())) => changes.others[2] += 1,
            (0..6, Err(error)) if REFUSED.contains(&error.errno()) => {}
            // Work that needs the absent device fails.
            (0..7, Err(error)) if absent.is_some() && ABSENT.contains(&error.errno()) => {}
            (_, Err(error)) => bail!("a change of devices fails ({kind}): {error}"),
        }
    }
    if let Some(gone) = absent {
        changes.absences.push(Harmed { number: gone.number, events: gone.begin..usize::MAX });
    }
    Ok(changes)
}

/// The number of flushes after which the repair of noise is durable on an array of this many devices.
pub(super) fn flushes_until_durable(nr_devices: usize) -> usize {
    nr_devices * 3
}

/// Whether all repairs of noise are durable.
fn is_durable(all: &[Arc<RecordingDevice>], noise: &[Harmed]) -> bool {
    let Some(last) = noise.iter().map(|harmed| harmed.events.end).max() else { return true };
    let later = all[0].flush_points().into_iter().filter(|flush| *flush > last);
    later.count() > flushes_until_durable(all.len())
}

impl Absent {
    /// The absence, which ends now.
    fn harmed(&self, all: &[Arc<RecordingDevice>]) -> Harmed {
        Harmed { number: self.number, events: self.begin..all[self.number].events() }
    }
}

/// Lets the absent device answer again in half of the cases, and replaces or removes it. Returns whether that was possible.
/// In the end the device answers in any case, and is a spare.
fn end_absence(fs: &Fs, all: &[Arc<RecordingDevice>], gone: Absent, rng: &mut Rng) -> Result<bool> {
    if rng.one_in(2) {
        all[gone.number].set_absent(false);
    }
    let members = fs.space_usage().devices;
    let spare = all.iter().find(|device| !is_member(device, &members));
    let done = match spare.filter(|_| !rng.one_in(4)) {
        Some(device) => {
            let request =
                ReplaceRequest { devid: gone.devid, device: Arc::clone(device) as _, avoids_source: rng.one_in(4) };
            cancelled_at_times(fs, rng, || fs.replace_device(&request, &Job::new()).map(drop))
        }
        None => cancelled_at_times(fs, rng, || fs.remove_devices(&[gone.devid], &Job::new())),
    };
    match done {
        Ok(()) => all[gone.number].set_absent(false),
        Err(error) if REFUSED.contains(&error.errno()) => return Ok(false),
        Err(error) => bail!("the absent device {} cannot be replaced or removed: {error}", gone.devid),
    }
    Ok(true)
}

/// Whether a device is part of the filesystem.
fn is_member(device: &RecordingDevice, members: &[DeviceUsage]) -> bool {
    members.iter().any(|member| member.path.as_deref() == Some(device.location().as_str()))
}

/// The number of a member.
fn number_of(all: &[Arc<RecordingDevice>], member: &DeviceUsage) -> Option<usize> {
    all.iter().position(|device| Some(device.location()) == member.path)
}

/// Converts block groups to random profiles that tolerate the loss of `tolerated` devices, or resumes or cancels the
/// paused conversion. Pauses or cancels the conversion at times.
fn convert(fs: &Fs, tolerated: u16, nr_devices: usize, rng: &mut Rng) -> ubtrfs_fs::Result<()> {
    let is_allowed = |profile: &&Profile| {
        !profile.has_parity() && profile.tolerated_failures >= tolerated && usize::from(profile.devs_min) <= nr_devices
    };
    let profiles: Vec<&Profile> = Profile::ALL.iter().filter(is_allowed).collect();
    let mut args = || {
        let soft = if rng.one_in(2) { BalanceFilters::SOFT } else { BalanceFilters::empty() };
        let target = BalanceArgs::profile_bit(profiles[rng.index(profiles.len())]);
        BalanceArgs { flags: (BalanceFilters::CONVERT | soft).bits(), target, ..BalanceArgs::NONE }
    };
    let (data, metadata) = (args(), args());
    let types = *rng.pick(&[
        BalanceFlags::DATA,
        BalanceFlags::METADATA | BalanceFlags::SYSTEM,
        BalanceFlags::DATA | BalanceFlags::METADATA | BalanceFlags::SYSTEM,
    ]);
    let flags = (types | BalanceFlags::FORCE).bits();
    let item = BalanceItem { flags, data, metadata: metadata.clone(), system: metadata, unused: [0; 4] };
    if fs.balance_status().is_some() && rng.one_in(3) {
        return fs.cancel_balance();
    }
    let (stops, pauses) = (rng.one_in(2).then(|| Duration::from_millis(rng.below(40))), rng.one_in(2));
    std::thread::scope(|scope| {
        let working = scope.spawn(|| match fs.balance_status() {
            Some(_) => fs.resume_balance(&Job::new()),
            None => fs.balance(item, &Job::new()),
        });
        if let Some(after) = stops {
            std::thread::sleep(after);
            let _not_running = if pauses { fs.pause_balance() } else { fs.cancel_balance() };
        }
        working.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).map(drop)
    })
}

/// Scrubs all devices but the absent one. If none of them has noise, nothing may be bad, and in any case nothing may be
/// lost.
fn scrub(fs: &Fs, has_noise: bool, absent: Option<DevId>) -> ubtrfs_fs::Result<()> {
    let start = |devid| ScrubStart { devid, start: 0, limit: 0, io_priority: None };
    let devids = fs.space_usage().devices.into_iter().map(|device| device.devid);
    let starts: Vec<ScrubStart> = devids.filter(|devid| Some(*devid) != absent).map(start).collect();
    let report = fs.scrub(&starts, true, &Job::new())?;
    for device in report.devices {
        device.result?;
        let counts = device.counts;
        let found = counts.read_errors + counts.csum_errors + counts.verify_errors + counts.super_errors;
        assert!(has_noise || found == 0, "a scrub finds what is not bad: device {}: {counts:?}", device.devid);
        assert_eq!(counts.uncorrectable_errors, 0, "device {}: {counts:?}", device.devid);
    }
    Ok(())
}

/// Overwrites parts of the chunks on a device with noise.
fn add_noise(fs: &Fs, device: &dyn Device, devid: DevId, rng: &mut Rng) -> Result<()> {
    const PIECE: u64 = 4096;
    let groups = fs.block_groups();
    for _ in 0..=rng.below(NOISE_MAX) {
        let Some(chunk) = fs.chunk_at(rng.pick(&groups).start) else { continue };
        let Some(stripe) = chunk.stripes.iter().find(|stripe| stripe.devid == devid) else { continue };
        // Used bytes mostly lie at the start of a chunk.
        let len_bytes = chunk.device_extent_len() >> rng.below(4);
        let at = stripe.offset.0 + rng.below((len_bytes / PIECE).max(1)) * PIECE;
        let is_super = |start: &u64| at < start + SUPERBLOCK_SIZE as u64 && *start < at + PIECE;
        if !SUPERBLOCK_OFFSETS.iter().any(is_super) {
            device.write_at(at, &rng.bytes(PIECE as usize))?;
        }
    }
    Ok(())
}

/// The largest number of places that noise overwrites at once.
const NOISE_MAX: u64 = 60;

/// Does work, and cancels it in one of four cases.
fn cancelled_at_times(
    fs: &Fs,
    rng: &mut Rng,
    work: impl FnOnce() -> ubtrfs_fs::Result<()> + Send,
) -> ubtrfs_fs::Result<()> {
    let after = rng.one_in(4).then(|| Duration::from_millis(rng.below(30)));
    std::thread::scope(|scope| {
        let working = scope.spawn(work);
        if let Some(after) = after {
            std::thread::sleep(after);
            let _not_running = fs.cancel_replace().or_else(|_| fs.cancel_removal());
        }
        working.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
