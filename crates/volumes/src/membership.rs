//! Decides which of the given devices belong together, and which of them missed commits.
//!
//! Invariants:
//! - I1. All members have the fsid, and the fsid of tree blocks, of the newest superblock. Device ids and device UUIDs
//!   are unique.
//! - I2. The newest generation counts. A member with an older one is late or stale (see `member`).
//! - I3. Two members that were written apart are refused. They show it by different tree roots at one generation, by a
//!   tree root that the newest superblock's backups do not know for the older member's generation, by different copies of
//!   the nodes that the last commit of one of them wrote, of which the first ones are compared
//!   ([`Volumes::check_one_history`]), by a stale member whose record in the newest device tree proves it
//!   ([`Volumes::add_record`]), or by the records in the stale member's own device tree
//!   ([`Volumes::written_apart`]). Linux writes no such records.
//! - I4. The log root may differ between superblocks of one generation, if a power cut interrupted the writing of a log,
//!   or if a device lost it. An fsync returns after all members in sync have its log. So the latest log that is valid
//!   has everything that was promised: the one with the highest number, and of logs without a number, as Linux writes
//!   them, the one that most devices have.
//! - I5. A member that was only found ([`Device::is_found`]) is never stale, so it is never brought up to date: it may be a
//!   backup.
//! - I6. A device that was replaced or removed may still have its superblock, if power failed or it was missing then. The
//!   device that has its id now has a device item of a later generation. The older device is left out.
//! - I7. A device with the id 0 is the new device of a replacement, and no member. Only a running or suspended replacement
//!   uses it (see `twin`).
//! - I8. A seed device belongs to another filesystem, on which this one builds (see `seed`). It is never the newest member,
//!   and no history is compared with it.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::node::verify_block;
use ubtrfs_format::superblock::Superblock;
use ubtrfs_format::{CsumType, DevId, Generation, Logical};
use uuid::Uuid;

use crate::member::Member;
use crate::seed::{FoundSeed, take_seeds};
use crate::set::Volumes;
use crate::superblock::{self, FoundSuperblock};

/// The devices that were given, checked.
#[derive(Debug)]
pub(crate) struct Membership {
    /// The superblock that counts (I2).
    pub(crate) newest: FoundSuperblock,
    pub(crate) members: Vec<Arc<Member>>,
    /// The new device of a replacement (I7).
    pub(crate) target: Option<FoundTarget>,
    /// Devices of other filesystems that this one may build on (I8).
    pub(crate) seeds: Vec<FoundSeed>,
    /// Roots and levels of the logs in the superblocks of the newest generation, the latest first (I4).
    pub(crate) logs: Vec<(Logical, u8)>,
    /// A device whose primary superblock was overwritten.
    pub(crate) primary_lost: Option<String>,
    /// Whether a device cannot be written.
    pub(crate) has_read_only: bool,
}

impl Membership {
    /// Reads the superblocks of the devices. With `ignore_flags`, they may have unknown flags.
    pub(crate) fn find(devices: Vec<Arc<dyn Device>>, ignore_flags: bool) -> Result<Self> {
        let has_others = devices.len() > 1;
        let mut given: Vec<(FoundSuperblock, Arc<dyn Device>)> = Vec::with_capacity(devices.len());
        for device in devices {
            let found = superblock::find(device.as_ref(), ignore_flags).map_err(|error| match error {
                Error::Refused { what, .. } if has_others => Error::Refused { what, hint: GO_ON_WITHOUT },
                error => error,
            })?;
            given.push((found, device));
        }
        let (targets, mut given): (Vec<_>, Vec<_>) =
            given.into_iter().partition(|(own, _)| own.superblock.is_replacement_target());
        let seeds = take_seeds(&mut given)?;
        leave_out_replaced(&mut given);
        let newest = given.iter().map(|(found, _)| found).max_by_key(|found| found.superblock.generation);
        let Some(newest) = newest.cloned() else {
            return Err(match targets.first() {
                Some((_, device)) => Error::Refused {
                    what: format!("{} is the new device of a replacement that is not complete", device.describe()),
                    hint: "give the other devices of the filesystem",
                },
                None => Error::Refused { what: "no device was given".to_owned(), hint: "give at least one device" },
            });
        };
        let current = newest.superblock.generation;
        // The search leaves them out already, as far as it saw this superblock (I5).
        given.retain(|(found, device)| {
            let is_used = !device.is_found() || !missed_commits(found.superblock.generation, current);
            if !is_used {
                tracing::warn!("{} is not used, because it missed changes and was not named", device.describe());
            }
            is_used
        });
        let mut members: Vec<Arc<Member>> = Vec::with_capacity(given.len());
        for (index, (found, device)) in given.iter().enumerate() {
            let own = &found.superblock;
            check_member(own, &newest.superblock, device.as_ref())?;
            let others = given.iter().take(index);
            refuse_twins(own, device.as_ref(), others)?;
            check_history(own, &newest.superblock, device.as_ref())?;
            if own.generation < current {
                tracing::warn!(
                    "{}: its superblock has generation {}, and the newest has {current}: it may have missed changes",
                    device.describe(),
                    own.generation
                );
            }
            members.push(Arc::new(Member::given(
                own.dev_item.clone(),
                Arc::clone(device),
                (own.root, own.generation),
                current,
            )));
        }
        let target = choose_target(targets, &newest.superblock)?;
        let logs = logs_of(&given, current);
        let mut newest = newest;
        if let Some(&(root, level)) = logs.first() {
            (newest.superblock.log_root, newest.superblock.log_root_level) = (root, level);
        }
        if given.len() > 1 {
            // Numbers of logs begin anew with each generation (I4).
            newest.superblock.log_root_transid = 0;
        }
        let lost = given.iter().find(|(found, _)| found.primary_lost);
        Ok(Self {
            logs,
            primary_lost: lost.map(|(_, device)| device.describe()),
            has_read_only: given.iter().any(|(_, device)| device.is_read_only()),
            newest,
            members,
            target,
            seeds,
        })
    }
}

/// The new device of a replacement that was begun before this open.
#[derive(Clone, Debug)]
pub(crate) struct FoundTarget {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) uuid: Uuid,
}

/// Chooses the new device of a replacement: the newest one, if several were given.
fn choose_target(targets: Vec<(FoundSuperblock, Arc<dyn Device>)>, newest: &Superblock) -> Result<Option<FoundTarget>> {
    let generation = |(found, _): &(FoundSuperblock, Arc<dyn Device>)| found.superblock.generation;
    let Some(latest) = targets.iter().map(generation).max() else { return Ok(None) };
    let (latest, old): (Vec<_>, Vec<_>) = targets.into_iter().partition(|target| generation(target) == latest);
    for (_, device) in old {
        tracing::warn!("{} is not used: a later replacement has another new device", device.describe());
    }
    for (index, (found, device)) in latest.iter().enumerate() {
        check_member(&found.superblock, newest, device.as_ref())?;
        refuse_twins(&found.superblock, device.as_ref(), latest.iter().take(index))?;
    }
    let target = |(found, device): (FoundSuperblock, Arc<dyn Device>)| FoundTarget {
        device,
        uuid: found.superblock.dev_item.uuid,
    };
    Ok(latest.into_iter().next().map(target))
}

/// Checks that the devices belong together, as far as their superblocks show it. Nothing is written.
///
/// # Errors
///
/// As for [`Volumes::open`].
pub fn check_superblocks(devices: Vec<Arc<dyn Device>>) -> Result<()> {
    Membership::find(devices, false).map(drop)
}

impl Volumes {
    /// The devices with the roots of the root tree in the superblocks that were found at open, and their generations.
    pub fn found_roots(&self) -> Vec<(DevId, Logical, Generation)> {
        let found = |member: &Arc<Member>| (member.devid(), member.found_root.0, member.found_root.1);
        self.own_members().iter().map(found).filter(|(_, root, _)| root.0 != 0).collect()
    }

    /// The copy that a device has of a node of this generation, if it is valid. Called when the chunk map is complete.
    pub fn node_on(&self, devid: DevId, at: Logical, of: Generation, csum_type: CsumType) -> Option<Vec<u8>> {
        self.valid_node_on(&*self.member(devid)?, at, of, csum_type)
    }

    /// The node of this generation that a member in sync has.
    pub fn node_in_sync(&self, at: Logical, of: Generation, csum_type: CsumType) -> Option<Vec<u8>> {
        let members = self.own_members();
        let mut in_sync = members.iter().filter(|member| member.is_in_sync());
        in_sync.find_map(|member| self.valid_node_on(member, at, of, csum_type))
    }

    fn valid_node_on(&self, member: &Member, at: Logical, of: Generation, csum_type: CsumType) -> Option<Vec<u8>> {
        let mut raw = vec![0; usize::try_from(self.superblock().nodesize).unwrap_or_default()];
        self.read_copy_on(member, at, &mut raw).ok()?;
        verify_block(&raw, csum_type, at, of).is_ok().then_some(raw)
    }

    /// The error for a device whose own trees say that another device, which is newer now, missed their last commit (I3).
    pub fn written_apart(&self, older: DevId, newer: DevId) -> Error {
        let name = |devid| self.member(devid).map_or_else(|| format!("device {devid}"), |member| member.describe());
        Error::Refused {
            what: format!(
                "{} and {} were written apart: {0} was written while {1} was away, and {1} while {0} was away",
                name(older),
                name(newer)
            ),
            hint: ONE_HALF,
        }
    }

    /// Compares the copies that the members have of a node of this generation (I3). Returns the node if a copy of it is
    /// valid. Called when the chunk map is complete.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if two valid copies differ: members were written apart.
    pub fn check_one_history(&self, at: Logical, of: Generation, csum_type: CsumType) -> Result<Option<Vec<u8>>> {
        let mut first: Option<(String, Vec<u8>)> = None;
        // An older member may have a node of a commit that was not completed.
        for member in self.own_members().into_iter().filter(|member| member.found_root.1 >= of) {
            let Some(raw) = self.valid_node_on(&member, at, of, csum_type) else { continue };
            match &first {
                Some((other, node)) if *node != raw => return Err(split_brain(&member.describe(), other, of)),
                Some(_) => {}
                None => first = Some((member.describe(), raw)),
            }
        }
        Ok(first.map(|(_, node)| node))
    }
}

pub(crate) fn split_brain(one: &str, other: &str, generation: Generation) -> Error {
    Error::Refused {
        what: format!("{one} and {other} were written apart: both have a generation {generation}, but different trees"),
        hint: ONE_HALF,
    }
}

/// The advice on devices that were written apart.
const ONE_HALF: &str =
    "choose the half to keep and give only its devices, with -o degraded; wipe the others before they join again";

/// Whether a device of this generation missed a commit for certain (I2).
fn missed_commits(own: Generation, newest: Generation) -> bool {
    own.0.saturating_add(1) < newest.0
}

/// The error for a member that missed changes and was not named (I5).
pub(crate) fn unnamed(device: &str) -> Error {
    Error::Refused {
        what: format!("{device} missed changes, and was found and not named"),
        hint: "if it is a device of this filesystem and no backup, name it, and it is overwritten with what it missed: -o device=PATH; else go on without it: -o degraded",
    }
}

/// Checks that a device belongs to the filesystem with this superblock and is not truncated (I1).
fn check_member(own: &Superblock, newest: &Superblock, device: &dyn Device) -> Result<()> {
    if own.fsid == newest.fsid && own.node_fsid() != newest.node_fsid() {
        return Err(Error::Refused {
            what: format!("{} has the filesystem id {} only since a change of it", device.describe(), own.fsid),
            hint: "it belongs to another filesystem, or the change was interrupted; then repeat it: ubtrfs tune -M UUID DEVICE...",
        });
    }
    if own.fsid != newest.fsid {
        return Err(Error::Refused {
            what: format!("{} belongs to filesystem {}, not {}", device.describe(), own.fsid, newest.fsid),
            hint: "give the devices of one filesystem",
        });
    }
    let (wanted, have) = (own.dev_item.total_bytes, device.len_bytes());
    if have < wanted {
        if newest.num_devices <= 1 {
            return Err(truncated(device, wanted, "restore the whole image; ubtrfs changed nothing"));
        }
        return Err(Error::Refused {
            what: format!(
                "{}; to fill an image file again, run: truncate -s {wanted} {}",
                short(device, wanted),
                device.describe()
            ),
            hint: FILL_OR_GO_ON,
        });
    }
    Ok(())
}

/// The error for a device that is smaller than its device item says.
pub(crate) fn truncated(device: &dyn Device, wanted: u64, hint: &'static str) -> Error {
    Error::Refused { what: short(device, wanted), hint }
}

fn short(device: &dyn Device, wanted: u64) -> String {
    let (name, have) = (device.describe(), device.len_bytes());
    format!("{name} is truncated: it has {have} bytes, and the filesystem needs {wanted}")
}

/// Leaves out devices in whose place others are (I6).
fn leave_out_replaced(given: &mut Vec<(FoundSuperblock, Arc<dyn Device>)>) {
    let is_replaced: Vec<bool> = given
        .iter()
        .map(|(own, device)| {
            // A device that is being added has an item of the next generation: it does not replace itself.
            let is_in_its_place = |(other, other_device): &(FoundSuperblock, Arc<dyn Device>)| {
                let (own, other) = (&own.superblock, &other.superblock);
                !Arc::ptr_eq(device, other_device)
                    && (own.fsid, own.dev_item.devid) == (other.fsid, other.dev_item.devid)
                    && other.dev_item.generation > own.generation.0
            };
            given.iter().any(is_in_its_place)
        })
        .collect();
    let mut flags = is_replaced.into_iter();
    given.retain(|(_, device)| {
        let is_replaced = flags.next().unwrap_or(false);
        if is_replaced {
            tracing::warn!("{} is not used: another device is in its place", device.describe());
        }
        !is_replaced
    });
}

/// Refuses a device with the id or the UUID of another one (I1).
pub(crate) fn refuse_twins<'g>(
    own: &Superblock,
    device: &dyn Device,
    others: impl Iterator<Item = &'g (FoundSuperblock, Arc<dyn Device>)>,
) -> Result<()> {
    for (found, other) in others {
        let (mine, its) = (&own.dev_item, &found.superblock.dev_item);
        let what = if mine.devid == its.devid {
            format!("{} and {} are both device {}", other.describe(), device.describe(), mine.devid)
        } else if mine.uuid == its.uuid {
            format!("{} and {} both have the device UUID {}", other.describe(), device.describe(), mine.uuid)
        } else {
            continue;
        };
        return Err(Error::Refused { what, hint: "one is a copy of the other: give only one of them" });
    }
    Ok(())
}

/// Refuses a member that was written apart from the newest one (I3).
fn check_history(own: &Superblock, newest: &Superblock, device: &dyn Device) -> Result<()> {
    let is_split = if own.generation == newest.generation {
        (own.root, own.chunk_root) != (newest.root, newest.chunk_root)
    } else {
        let backups = newest.super_roots.iter().filter(|backup| backup.tree_root_gen == own.generation);
        backups.map(|backup| backup.tree_root).any(|root| root != own.root)
    };
    if !is_split {
        return Ok(());
    }
    Err(split_brain(&device.describe(), "the newest device", own.generation))
}

/// The advice on a device of several that is too short.
const FILL_OR_GO_ON: &str = "then name it (-o device=), and scrub; or go on without it: leave it out of the command, and use -o degraded; \
     ubtrfs changed nothing";

/// The advice on a device of several that cannot be used.
const GO_ON_WITHOUT: &str =
    "restore it, or go on without it: leave it out of the command, and use -o degraded; ubtrfs changed nothing";

/// The logs of the newest superblocks (I4).
fn logs_of(given: &[(FoundSuperblock, Arc<dyn Device>)], newest: Generation) -> Vec<(Logical, u8)> {
    let mut counted: Vec<((Logical, u8), (u64, usize))> = Vec::new();
    let superblocks = given.iter().map(|(found, _)| &found.superblock);
    for superblock in superblocks.filter(|superblock| superblock.generation == newest && superblock.log_root.0 != 0) {
        let log = (superblock.log_root, superblock.log_root_level);
        match counted.iter_mut().find(|(other, _)| *other == log) {
            Some((_, (_, count))) => *count = count.saturating_add(1),
            None => counted.push((log, (superblock.log_root_transid, 1))),
        }
    }
    counted.sort_by_key(|(_, rank)| std::cmp::Reverse(*rank));
    counted.into_iter().map(|(log, _)| log).collect()
}
