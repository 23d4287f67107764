//! Changes of an unmounted filesystem that only its superblocks record: the filesystem id, the seeding flag and features.
//!
//! ```text
//! several devices: flag "changing the id" on all -> flush all -> new superblocks, without the flag, on all -> flush all
//! one device:                                                     new superblock -> flush
//! ```
//!
//! The blocks of trees carry the first id that the filesystem had, which stays as the metadata UUID.
//!
//! Invariants:
//! - I1. All devices are given, and have the superblock of the last commit, or one of an interrupted change, in the first
//!   place: a device of which only a mirror is left may belong to something else now. Otherwise nothing is written.
//! - I2. After an interruption, the same change, or another one of the id, brings all devices to one id again: either each
//!   device has the flag or its final superblock, and both are accepted here.
//! - I3. A filesystem on a seed may be tuned. The devices of the seed are given too, are counted, and are not written.
//! - I4. A log belongs to the last commit, so it stays valid. A seed must not have one, because a mount would replay it.

use std::collections::BTreeSet;
use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::superblock::{Incompat, SUPERBLOCK_OFFSETS, Superblock, flags};
use uuid::Uuid;

use crate::seed::are_of_seeds;
use crate::superblock::{find, fits, write_copy};
use crate::twin::unfinished_replacement;

/// A change of an unmounted filesystem.
#[derive(Clone, Debug)]
pub struct Tuning {
    /// The new filesystem id. The id of tree blocks stays.
    pub fsid: Option<Uuid>,
    /// Whether the filesystem becomes a seed, or stops being one.
    pub seeding: Option<bool>,
    /// Features to set, of [`TUNABLE`].
    pub features: Incompat,
}

/// Features that may be set when the filesystem exists, because old and new forms of items stand side by side.
pub const TUNABLE: Incompat = Incompat::EXTENDED_IREF.union(Incompat::SKINNY_METADATA).union(Incompat::NO_HOLES);

/// Changes all devices of a filesystem durably. The devices must be opened for writing, but for those of a seed on which the
/// filesystem builds.
///
/// # Errors
///
/// [`Error::Refused`], and nothing was written, if a device is missing, foreign, damaged or behind the others, if a
/// conversion of another kind was interrupted, or if the change is not possible; [`Error::Io`].
pub fn tune(devices: &[Arc<dyn Device>], tuning: &Tuning) -> Result<()> {
    let found = superblocks_of(devices)?;
    let of_seeds = are_of_seeds(found.iter());
    let (of_seeds, own): (Vec<_>, Vec<_>) = devices.iter().zip(found).zip(of_seeds).partition(|(_, of_seed)| *of_seed);
    let (devices, found): (Vec<_>, Vec<_>) =
        own.into_iter().map(|((device, superblock), _)| (Arc::clone(device), superblock)).unzip();
    check_together(&found, &devices, of_seeds.len(), flags::CHANGING_FSID_V2)?;
    check_possible(&found, tuning)?;
    if tuning.fsid.is_some() && devices.len() > 1 {
        for (device, superblock) in devices.iter().zip(&found) {
            let flagged = superblock.flags | flags::CHANGING_FSID_V2;
            write(device.as_ref(), &Superblock { flags: flagged, ..superblock.clone() })?;
        }
    }
    for (device, superblock) in devices.iter().zip(&found) {
        write(device.as_ref(), &changed(superblock, tuning))?;
    }
    Ok(())
}

/// The primary superblocks of the devices (I1).
pub(crate) fn superblocks_of(devices: &[Arc<dyn Device>]) -> Result<Vec<Superblock>> {
    let own_superblock = |device: &Arc<dyn Device>| {
        let found = find(device.as_ref(), true)?;
        match found.primary_lost {
            true => Err(Error::Refused {
                what: format!("the primary superblock of {} was overwritten", device.describe()),
                hint: "if the device is this filesystem, write it anew with: ubtrfs rescue super-recover DEVICE",
            }),
            false => Ok(found.superblock),
        }
    };
    devices.iter().map(own_superblock).collect()
}

/// Checks that the state of the filesystem allows the change.
fn check_possible(found: &[Superblock], tuning: &Tuning) -> Result<()> {
    let refuse = |what: &str, hint: &'static str| Err(Error::Refused { what: what.to_owned(), hint });
    let has = |flag: u64| found.iter().any(|superblock| superblock.flags & flag != 0);
    match (tuning.seeding, has(flags::SEEDING)) {
        (Some(true), true) => return refuse("the seeding flag is already set", NOTHING_CHANGED),
        (Some(false), false) => return refuse("the filesystem has no seeding flag", NOTHING_CHANGED),
        (None, true) if tuning.fsid.is_some() => {
            // Its sprouts find it by its UUID.
            return refuse("cannot set the UUID on a seed device", "end the seeding first: ubtrfs tune -S 0");
        }
        _ => {}
    }
    if tuning.seeding.is_some() && found.iter().any(|superblock| superblock.fsid != superblock.node_fsid()) {
        let hint = "give it its first UUID again: ubtrfs tune -M UUID";
        return refuse("the seeding flag of a filesystem with a changed UUID cannot change", hint);
    }
    if has(flags::CHANGING_FSID_V2) && tuning.fsid.is_none() {
        let hint = "complete it first: ubtrfs tune -m DEVICE...";
        return refuse("a change of the filesystem id was interrupted", hint);
    }
    if tuning.seeding == Some(true) && found.iter().any(|superblock| superblock.log_root.0 != 0) {
        let hint = "mount it once for writing and unmount it, then try again";
        return refuse("the filesystem has a log that is not replayed", hint);
    }
    Ok(())
}

fn changed(superblock: &Superblock, tuning: &Tuning) -> Superblock {
    let mut new = superblock.clone();
    let mut incompat = superblock.incompat() | tuning.features & TUNABLE;
    if let Some(fsid) = tuning.fsid {
        let of_nodes = superblock.node_fsid();
        incompat.set(Incompat::METADATA_UUID, fsid != of_nodes);
        new.fsid = fsid;
        new.metadata_uuid = if fsid == of_nodes { Uuid::nil() } else { of_nodes };
        new.flags &= !flags::CHANGING_FSID_V2;
    }
    match tuning.seeding {
        Some(true) => new.flags |= flags::SEEDING,
        Some(false) => new.flags &= !flags::SEEDING,
        None => {}
    }
    new.incompat_flags = incompat.bits();
    assert_eq!(new.node_fsid(), superblock.node_fsid(), "the blocks of trees keep their id");
    new
}

/// Checks I1. `nr_of_seeds` more devices are of seeds. `change` is the flag of an interrupted change that may go on.
pub(crate) fn check_together(
    found: &[Superblock],
    devices: &[Arc<dyn Device>],
    nr_of_seeds: usize,
    change: u64,
) -> Result<()> {
    let refuse = |what: String, hint: &'static str| Err(Error::Refused { what, hint });
    let Some(first) = found.first() else {
        return refuse("no device was given".to_owned(), "give at least one device");
    };
    let newest = found.iter().map(|superblock| superblock.generation).max();
    // The new device of a replacement has the filesystem's id, too.
    if found.iter().any(Superblock::is_replacement_target) {
        return Err(unfinished_replacement(None));
    }
    for (superblock, device) in found.iter().zip(devices) {
        let name = device.describe();
        let is_interrupted = superblock.flags & change != 0;
        let is_of_one_change = (is_interrupted || first.flags & change != 0) && superblock.fsid == first.fsid;
        if superblock.node_fsid() != first.node_fsid() && !is_of_one_change {
            return refuse(format!("{name} belongs to another filesystem"), "give the devices of one filesystem");
        }
        // I2. A device that an interrupted change left behind may miss what was written without it since.
        if Some(superblock.generation) != newest && !is_interrupted {
            return refuse(
                format!("{name} missed changes"),
                "mount the filesystem with all its devices once, then try again",
            );
        }
        if superblock.flags & flags::INTERRUPTED & !change != 0 {
            return refuse(
                format!("{name} has a conversion that was interrupted (flags {:#x})", superblock.flags),
                "complete it with the program that began it",
            );
        }
        if device.is_read_only() {
            return refuse(format!("{name} cannot be written"), "make it writable, or work on a copy");
        }
    }
    let ids: BTreeSet<Uuid> = found.iter().map(|superblock| superblock.dev_item.uuid).collect();
    if ids.len() < found.len() {
        return refuse(
            "a device was given twice, or together with a copy of itself".to_owned(),
            "give each device once",
        );
    }
    let nr_given = found.len().saturating_add(nr_of_seeds);
    if first.num_devices != nr_given as u64 {
        let were = if nr_given == 1 { "was" } else { "were" };
        let what = format!("{nr_given} of the {} devices of the filesystem {were} given", first.num_devices);
        return refuse(what, "give all devices of the filesystem");
    }
    Ok(())
}

/// Writes all copies of a superblock durably, the first one last: until then, the old one counts.
pub(crate) fn write(device: &dyn Device, superblock: &Superblock) -> Result<()> {
    let end = superblock.dev_item.total_bytes.min(device.len_bytes());
    for offset in SUPERBLOCK_OFFSETS.into_iter().rev().filter(|offset| fits(*offset, end)) {
        write_copy(device, superblock, offset)?;
        device.flush().map_err(|source| Error::io("flush", device.describe(), 0, 0, source))?;
    }
    Ok(())
}

const NOTHING_CHANGED: &str = "nothing was changed";
