//! [`usable_devices`]: with `-o degraded`, leaves out the found devices that cannot be used.
//!
//! A device that was found but not named ([`Device::is_found`]) may be truncated, lack a valid superblock, or have been
//! written apart from the named devices. Such a device counts as missing.
//!
//! Invariants:
//! - U1. Nothing is written.
//! - U2. Named devices are never left out. If a named device cannot be used, opening the filesystem fails.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};

use crate::engine::EngineOptions;
use crate::open::{JUDGING_CACHE_BYTES, Loaded};

/// The devices that can be used together, and for each other device why it is left out.
pub fn usable_devices(devices: Vec<Arc<dyn Device>>) -> (Vec<Arc<dyn Device>>, Vec<String>) {
    let (found, named): (Devices, Devices) = devices.iter().cloned().partition(|device| device.is_found());
    if found.is_empty() || check_superblocks(&named).is_err() {
        return (devices, Vec::new());
    }
    let mut left_out = Vec::new();
    // Most devices that cannot be used are known by their superblocks, without the trees.
    let mut used = named.clone();
    let mut candidates = Vec::new();
    for device in found {
        match check_superblocks(&with(&used, [&device])) {
            Ok(()) => {
                used.push(Arc::clone(&device));
                candidates.push(device);
            }
            Err(error) => left_out.push(why(&device, error)),
        }
    }
    let Err(error) = loads(&used) else { return (used, left_out) };
    // Mostly one device cannot be used. Otherwise the devices that can be used with the named devices are kept.
    for (index, device) in candidates.iter().enumerate() {
        let others = candidates.iter().enumerate().filter(|(other, _)| *other != index);
        let without = with(&named, others.map(|(_, device)| device));
        if loads(&without).is_ok() {
            left_out.push(why(device, error));
            return (without, left_out);
        }
    }
    let (mut together, mut reasons) = (named, Vec::new());
    for device in candidates {
        match loads(&with(&together, [&device])) {
            Ok(()) => together.push(device),
            Err(error) => reasons.push(why(&device, error)),
        }
    }
    if loads(&together).is_err() {
        // The named devices fail too, so it is not known which device is the cause.
        return (used, left_out);
    }
    left_out.append(&mut reasons);
    (together, left_out)
}

type Devices = Vec<Arc<dyn Device>>;

fn with<'d>(devices: &'d [Arc<dyn Device>], more: impl IntoIterator<Item = &'d Arc<dyn Device>>) -> Devices {
    devices.iter().chain(more).cloned().collect()
}

fn check_superblocks(devices: &[Arc<dyn Device>]) -> Result<()> {
    ubtrfs_volumes::check_superblocks(devices.to_vec())
}

/// Whether the devices can be opened, up to the trees that belong to the filesystem itself (U1).
fn loads(devices: &[Arc<dyn Device>]) -> Result<()> {
    let options = EngineOptions { read_only: true, degraded: true, ..EngineOptions::default() };
    Loaded::of(devices.to_vec(), &options, JUDGING_CACHE_BYTES).map(drop)
}

fn why(device: &Arc<dyn Device>, error: Error) -> String {
    let reason = match error {
        Error::Refused { what, .. } => what,
        error => error.to_string(),
    };
    format!("{} is not used, and counts as missing: {reason}", device.describe())
}
