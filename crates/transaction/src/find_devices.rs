//! [`find_devices`]: finds the other devices of a filesystem, including the seed devices on which it builds.
//!
//! `ubtrfs_device::find_members` finds devices by their superblocks. The chunk tree of a filesystem names its seed
//! devices. The first nodes of the chunk tree are on the filesystem's own devices, so these devices are opened first.
//!
//! Invariants:
//! - F1. Nothing is written or locked, and a seed device that the filesystem does not name is not opened.
//! - F2. The filesystem may be in use, so what is read here chooses devices only. Opening them checks everything again.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ubtrfs_device::{Device, FoundMembers, NamedDevice, PossibleSeed, ambiguous_seeds, find_members};
use ubtrfs_error::Result;
use ubtrfs_format::DevId;
use ubtrfs_volumes::Volumes;
use uuid::Uuid;

use crate::engine::EngineOptions;
use crate::open::load_chunk_map;

/// The devices that belong to the filesystem of the given devices, but were not given, as
/// [`find_members`](ubtrfs_device::find_members) finds them. `found` also has the seed devices on which the filesystem
/// builds; `seeds` is empty.
///
/// # Errors
///
/// As for [`find_members`](ubtrfs_device::find_members); two devices are the same seed device.
pub fn find_devices(given: &[&Path]) -> io::Result<FoundMembers> {
    let mut members = find_members(given)?;
    let possible = std::mem::take(&mut members.seeds);
    if !possible.is_empty() {
        let own: Vec<&Path> = given.iter().copied().chain(members.found.iter().map(PathBuf::as_path)).collect();
        let seeds = seeds_of(&own, possible);
        for (index, seed) in seeds.iter().enumerate() {
            let is_copy = |other: &&PossibleSeed| (other.devid, other.uuid) == (seed.devid, seed.uuid);
            if let Some(other) = seeds.iter().take(index).find(is_copy) {
                return Err(ambiguous_seeds(other, seed));
            }
        }
        members.found.extend(seeds.into_iter().map(|seed| seed.path));
    }
    Ok(members)
}

/// The seed devices that the filesystem on these devices names.
fn seeds_of(own: &[&Path], mut possible: Vec<PossibleSeed>) -> Vec<PossibleSeed> {
    let mut seeds = Vec::new();
    loop {
        let paths = own.iter().copied().chain(seeds.iter().map(|seed: &PossibleSeed| seed.path.as_path()));
        let devices: Vec<Arc<dyn Device>> = paths
            .filter_map(|path| NamedDevice::open_beside_writer(path).ok())
            .map(|device| Arc::new(device) as Arc<dyn Device>)
            .collect();
        let (named, end) = match named_devices(devices) {
            Ok(found) => found,
            Err(error) => (Vec::new(), Err(error)),
        };
        let is_named = |seed: &mut PossibleSeed| named.contains(&(seed.devid, seed.uuid));
        let more: Vec<PossibleSeed> = possible.extract_if(.., is_named).collect();
        let is_last = more.is_empty() || end.is_ok();
        seeds.extend(more);
        if is_last {
            if let Err(error) = end {
                tracing::debug!("some seed devices may not be found, because the chunk tree cannot be read: {error}");
            }
            return seeds;
        }
        // Nodes of the chunk tree may be on a seed device that the system chunks name.
    }
}

/// The ids and UUIDs of the devices that the superblock's system chunks and the chunk tree name, as far as they can be
/// read, and whether all of them could be read.
#[expect(clippy::type_complexity, reason = "a private pair with one user")]
fn named_devices(devices: Vec<Arc<dyn Device>>) -> Result<(Vec<(DevId, Uuid)>, Result<()>)> {
    let options = EngineOptions { read_only: true, degraded: true, ..EngineOptions::default() };
    let volumes = Arc::new(Volumes::open(devices, options.of_volumes())?);
    let end = load_chunk_map(&volumes);
    let of_chunks = volumes
        .chunks()
        .into_iter()
        .flat_map(|(_, chunk)| chunk.stripes.iter().map(|stripe| (stripe.devid, stripe.dev_uuid)).collect::<Vec<_>>());
    let of_items = volumes.devices().into_iter().map(|device| (device.devid, device.uuid));
    Ok((of_items.chain(of_chunks).collect(), end))
}
