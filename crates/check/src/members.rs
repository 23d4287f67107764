//! Chooses the superblock of each given device, and the newest superblock of the filesystem.
//!
//! Invariants:
//! - I1. A superblock is used only if its checksum, fields and own address are valid. Copies with another fsid than the
//!   first copy are left over from an older filesystem, and are never used.
//! - I2. The filesystem has the newest generation of all members. Among members of this generation, one with a log
//!   counts, because a sync of the log writes the members one after the other.
//! - I3. If several devices are given, a device without a valid superblock is reported and counts as missing.
//! - I4. A device with the id 0 is the new device of a replacement that is not complete. It is not checked.
//! - I5. A device of a seed filesystem, on which this one builds, is read like the others. Its own superblock says nothing
//!   about this filesystem. The chunk tree tells which seed device belongs to it.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::superblock::{
    Incompat, MAGIC, MAGIC_OFFSET, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock, flags,
};
use ubtrfs_format::{FormatError, check_superblock};

use crate::problem::{Code, Place, Sink};

/// Features of filesystems that the checker can read.
const READABLE: Incompat = Incompat::MIXED_BACKREF
    .union(Incompat::DEFAULT_SUBVOL)
    .union(Incompat::MIXED_GROUPS)
    .union(Incompat::COMPRESS_LZO)
    .union(Incompat::COMPRESS_ZSTD)
    .union(Incompat::BIG_METADATA)
    .union(Incompat::EXTENDED_IREF)
    .union(Incompat::SKINNY_METADATA)
    .union(Incompat::NO_HOLES)
    .union(Incompat::METADATA_UUID)
    .union(Incompat::SIMPLE_QUOTA)
    .union(Incompat::RAID56)
    .union(Incompat::RAID1C34);

/// A given device of the filesystem, with its newest superblock.
#[derive(Clone, Debug)]
pub(crate) struct MemberDevice {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) superblock: Superblock,
    /// Whether it is a device of a seed (I5).
    pub(crate) is_seed: bool,
}

/// Finds the superblocks of the devices. Returns the newest superblock and all members.
pub(crate) fn find(devices: Vec<Arc<dyn Device>>, sink: &mut Sink<'_>) -> Result<(Superblock, Vec<MemberDevice>)> {
    let nr_given = devices.len();
    let (mut members, mut failed) = (Vec::new(), Vec::new());
    for device in devices {
        match superblock_of(&*device) {
            Ok(superblock) => members.push(MemberDevice { device, superblock, is_seed: false }),
            Err(error) => failed.push(error),
        }
    }
    // I4
    let has_others = members.iter().any(|member: &MemberDevice| !member.superblock.is_replacement_target());
    members.retain(|member| !has_others || !member.superblock.is_replacement_target());
    let seeds = take_seeds(&mut members);
    let age = |member: &&MemberDevice| (member.superblock.generation, member.superblock.log_root.0 != 0);
    // The first member of the newest age.
    let Some(newest) = members.iter().rev().max_by_key(age) else {
        let none = Error::Refused { what: "no device was given".to_owned(), hint: "give at least one device" };
        return Err(failed.into_iter().next().unwrap_or(none));
    };
    let newest = newest.superblock.clone();
    check_features(&newest)?;
    for (index, member) in members.iter().enumerate() {
        check_member(member, &newest)?;
        let devid = member.superblock.dev_item.devid;
        if let Some(other) = members[..index].iter().find(|other| other.superblock.dev_item.devid == devid) {
            return Err(Error::Refused {
                what: format!("{} and {} are both device {devid}", other.device.describe(), member.device.describe()),
                hint: "give only one of them",
            });
        }
    }
    for seed in seeds {
        // Of several seeds beside a device, the named one comes first.
        let devid = seed.superblock.dev_item.devid;
        if !members.iter().any(|member| member.superblock.dev_item.devid == devid) {
            members.push(seed);
        }
    }
    for error in failed.iter().filter(|_| nr_given > 1) {
        sink.report(Code::Device, Place::default(), format!("a given device counts as missing: {error}"));
    }
    Ok((newest, members))
}

/// Takes the devices of seeds out of the given ones (I5). If all are of seeds, those with the most devices are the
/// filesystem: a seed may build on another one.
fn take_seeds(members: &mut Vec<MemberDevice>) -> Vec<MemberDevice> {
    let is_seed = |member: &MemberDevice| member.superblock.flags & flags::SEEDING != 0;
    let top = members.iter().max_by_key(|member| (!is_seed(member), member.superblock.num_devices));
    let Some(top) = top.map(|member| member.superblock.fsid) else { return Vec::new() };
    let (seeds, own): (Vec<MemberDevice>, Vec<MemberDevice>) =
        std::mem::take(members).into_iter().partition(|member| is_seed(member) && member.superblock.fsid != top);
    *members = own;
    seeds.into_iter().map(|seed| MemberDevice { is_seed: true, ..seed }).collect()
}

fn check_member(member: &MemberDevice, newest: &Superblock) -> Result<()> {
    let (own, device) = (&member.superblock, &member.device);
    if own.fsid != newest.fsid {
        return Err(Error::Refused {
            what: format!("{} belongs to filesystem {}, not {}", device.describe(), own.fsid, newest.fsid),
            hint: "give the devices of one filesystem",
        });
    }
    let (wanted, have) = (own.dev_item.total_bytes, device.len_bytes());
    if have < wanted {
        return Err(Error::Refused {
            what: format!("{} is truncated: it has {have} bytes, and the filesystem needs {wanted}", device.describe()),
            hint: "restore the whole image; ubtrfs changed nothing",
        });
    }
    Ok(())
}

fn check_features(sb: &Superblock) -> Result<()> {
    let unknown = sb.incompat_flags & !READABLE.bits();
    if unknown == 0 {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("the filesystem uses the incompat features {}", Incompat::names_of(unknown)),
        hint: "mount it with a kernel that knows them",
    })
}

/// A copy of the superblock.
enum SuperblockCopy {
    Valid(Box<Superblock>),
    /// The copy is of btrfs, but invalid. Its fsid is unknown if it cannot be decoded.
    Invalid(Option<uuid::Uuid>, FormatError),
    Unreadable(std::io::Error),
    Absent,
}

/// The newest valid superblock of a device (I1).
fn superblock_of(device: &dyn Device) -> Result<Superblock> {
    let first = read_copy(device, SUPERBLOCK_OFFSETS[0]);
    let fsid = match &first {
        SuperblockCopy::Valid(superblock) => Some(superblock.fsid),
        SuperblockCopy::Invalid(fsid, _) => *fsid,
        SuperblockCopy::Unreadable(_) | SuperblockCopy::Absent => None,
    };
    let others = SUPERBLOCK_OFFSETS[1..].iter().filter_map(|&offset| match read_copy(device, offset) {
        SuperblockCopy::Valid(superblock) if fsid.is_none_or(|fsid| fsid == superblock.fsid) => Some(superblock),
        _ => None,
    });
    let others: Vec<Box<Superblock>> = others.collect();
    if fsid.is_none() && others.windows(2).any(|pair| pair[0].fsid != pair[1].fsid) {
        return Err(Error::Refused {
            what: format!(
                "{}: the primary superblock is invalid and its mirrors have different fsids",
                device.describe()
            ),
            hint: "show them with `ubtrfs inspect dump-super --all`, and restore the image from a backup",
        });
    }
    let newest_other = others.into_iter().rev().max_by_key(|superblock| superblock.generation);
    match (first, newest_other) {
        (SuperblockCopy::Valid(first), Some(other)) if other.generation > first.generation => Ok(*other),
        (SuperblockCopy::Valid(first), _) => Ok(*first),
        (_, Some(other)) => Ok(*other),
        (SuperblockCopy::Unreadable(source), None) => {
            Err(Error::io("read", device.describe(), SUPERBLOCK_OFFSETS[0], SUPERBLOCK_SIZE as u64, source))
        }
        (SuperblockCopy::Invalid(_, cause), None) => Err(Error::Refused {
            what: format!("{} has no valid superblock: {cause}", device.describe()),
            hint: "the mirrors are invalid too; restore the image from a backup",
        }),
        (SuperblockCopy::Absent, None) => Err(Error::Refused {
            what: format!("{} is not a btrfs filesystem", device.describe()),
            hint: "check the path; if this was a btrfs filesystem, all copies of its superblock are lost: restore it from a backup",
        }),
    }
}

fn read_copy(device: &dyn Device, offset: u64) -> SuperblockCopy {
    if offset.saturating_add(SUPERBLOCK_SIZE as u64) >= device.len_bytes() {
        return SuperblockCopy::Absent;
    }
    let mut raw = vec![0; SUPERBLOCK_SIZE];
    if let Err(source) = device.read_at(offset, &mut raw) {
        return SuperblockCopy::Unreadable(source);
    }
    if !raw[MAGIC_OFFSET..].starts_with(&MAGIC) {
        return SuperblockCopy::Absent;
    }
    let superblock = match Superblock::decode(&raw) {
        Ok(superblock) => superblock,
        Err(cause) => return SuperblockCopy::Invalid(None, cause),
    };
    let fsid = Some(superblock.fsid);
    if let Err(cause) = check_superblock(&superblock, &raw) {
        return SuperblockCopy::Invalid(fsid, cause);
    }
    if superblock.bytenr != offset {
        let (field, value) = ("bytenr", superblock.bytenr);
        let cause = FormatError::Value { what: "superblock", field, value, expected: "expected its own offset" };
        return SuperblockCopy::Invalid(fsid, cause);
    }
    SuperblockCopy::Valid(Box::new(superblock))
}
