//! Faults of a whole device of an array: it dies, hangs, vanishes or loses writes while threads change the filesystem, and
//! returns later with stale content. Or its content is overwritten by random bytes meanwhile.
//!
//! - M1. With redundant profiles, no thread gets an error, and nothing hangs.
//! - M2. Everything promised is there without the device, with it, and after it was brought up to date.
//! - M3. The other devices are clean.
//! - M4. No read returns the random bytes. A block of the device that still has them is reported by the checker. A device
//!   that lost writes has everything in the end.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ubtrfs_device::Device;
use ubtrfs_format::Profile;
use ubtrfs_fs::MountOptions;

use super::arrays::{can_write, check, check_except, scenario};
use super::verify::Made;
use super::{REWRITTEN_LANE, Record, SNAPSHOT_LANE, run_threads};
use crate::array::{FaultyMember, MemberState};
use crate::faults::read_all;
use crate::history::History;
use crate::{FsTarget, LANES, Medium, MediumDevice, Rng};

/// The result of one run.
#[derive(Debug)]
pub struct MemberFaults {
    /// Describes the run and its fault.
    pub name: String,
    /// Whether the fault happened.
    pub hit: bool,
    /// The content of the devices at the end.
    pub media: Vec<Medium>,
}

/// Profiles of data and metadata, and numbers of devices.
const ARRAYS: [(&str, &str, usize); 5] = [
    ("raid1", "raid1", 2),
    ("raid1", "raid1c3", 3),
    ("raid10", "raid10", 4),
    ("raid1c3", "raid1c4", 4),
    ("raid1", "raid1", 3),
];

impl MemberFaults {
    /// Runs the threads of a seed, with a fault that the seed determines. Returns `None` if arrays can only be read. An
    /// error means a broken rule (M1 to M3).
    pub fn run(seed: u64) -> Result<Option<Self>> {
        let (sender, receiver) = channel();
        let thread = std::thread::Builder::new().name("run".to_owned()).spawn(move || {
            let _ = sender.send(run_here(seed));
        })?;
        let result = match receiver.recv_timeout(TIME_LIMIT) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => bail!("member faults, seed {seed}: M1: it hangs"),
            Err(RecvTimeoutError::Disconnected) => bail!("member faults, seed {seed}: a thread panicked"),
        };
        let _ = thread.join();
        result
    }
}

fn run_here(seed: u64) -> Result<Option<MemberFaults>> {
    let (data, metadata, nr_devices) = ARRAYS[(seed % ARRAYS.len() as u64) as usize];
    let flag = |name: &str| Profile::named(name).map(|profile| profile.flag).with_context(|| name.to_owned());
    let mut scenario = scenario(seed);
    scenario.nr_devices = nr_devices;
    (scenario.mkfs.data_profile, scenario.mkfs.metadata_profile) = (flag(data)?, flag(metadata)?);
    if !can_write(&scenario)? {
        return Ok(None);
    }
    let mut rng = Rng::new(seed ^ 0xdead);
    let victim = rng.index(nr_devices);
    let fault = match rng.one_in(5) {
        true => MemberState::FilledWithNoise,
        false => *rng.pick(&MemberState::FAULTS),
    };
    let at = rng.below(600).max(rng.below(600));
    let name = format!(
        "member faults, seed {seed} ({}, {data} and {metadata} on {nr_devices}): device {} {fault:?} at request {at}",
        scenario.name,
        victim + 1
    );
    let verdict = || -> Result<MemberFaults> {
        let media: Vec<Arc<MediumDevice>> =
            scenario.bases()?.into_iter().map(|base| Arc::new(MediumDevice::new(base))).collect();
        let member = |(index, medium): (usize, &Arc<MediumDevice>)| {
            Arc::new(FaultyMember::new(Arc::clone(medium), (index == victim).then_some((at, fault))))
        };
        let members: Vec<Arc<FaultyMember>> = media.iter().enumerate().map(member).collect();
        let given = members.iter().map(|member| Arc::clone(member) as Arc<dyn Device>).collect();
        let options = MountOptions::parse(&scenario.mount)?;
        let target = FsTarget::on_devices(given, options.clone())?;
        let mut record = run_threads(scenario.clone(), &target, None, None, seed).context("M1")?;
        target.close().context("M1: closing")?;
        for history in &mut record.lanes {
            history.sync();
        }
        let hit = members[victim].state() != MemberState::Works;
        let content = || -> Vec<Medium> { media.iter().map(|medium| medium.content()).collect() };
        let others = |media: &[Medium]| {
            let mut others = media.to_vec();
            others.remove(victim);
            others
        };
        check(&others(&content()), false).context("M3")?;
        verify(&record, others(&content()), MountOptions { degraded: true, ..options.clone() })
            .context("M2, without the device")?;
        let joined = verify(&record, content(), options.clone()).context("M2, with the stale device")?;
        check(&others(&joined), false).context("M3, after the return")?;
        let last = verify(&record, joined, options).context("M2, after the device was brought up to date")?;
        let bad = (hit && fault == MemberState::FilledWithNoise).then_some(victim as u64 + 1);
        check_except(&last, false, bad).context("M4")?;
        Ok(MemberFaults { name: name.clone(), hit, media: content() })
    };
    verdict().map(Some).with_context(|| name.clone())
}

/// Opens the media, verifies all promises, and waits until stale devices are up to date. Returns the media after closing.
fn verify(record: &Record, media: Vec<Medium>, options: MountOptions) -> Result<Vec<Medium>> {
    let devices: Vec<Arc<MediumDevice>> = media.into_iter().map(|medium| Arc::new(MediumDevice::new(medium))).collect();
    let given = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
    let target = FsTarget::on_devices(given, options).context("it does not open")?;
    ensure!(target.fs().read_only().is_none(), "it opens read-only: {:?}", target.fs().read_only());
    let found = target.walk().context("it cannot be read")?;
    let mut made: Made = [None; LANES];
    let all = record.lanes.iter().map(History::promises);
    made.iter_mut().zip(all).for_each(|(made, promises)| *made = Some(promises as u64));
    made[REWRITTEN_LANE] = Some(record.versions.len() as u64);
    made[SNAPSHOT_LANE] = Some(record.snapshot_promises);
    record.verify(&found, &|path| read_all(&target, path), &made)?;
    target.fs().wait_for_resync();
    target.close().context("it cannot be closed")?;
    Ok(devices.iter().map(|device| device.content()).collect())
}

/// The time limit of a run.
const TIME_LIMIT: Duration = Duration::from_secs(120);
