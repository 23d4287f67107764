//! Finds the superblock of a device among its mirrors.
//!
//! Invariants:
//! - I1. A superblock is used only if its magic, own offset, checksum and fields are valid.
//! - I2. A mirror whose fsid differs from the primary's is left over from an older filesystem, and is never used.
//!   Among the other copies, the newest generation wins; among copies of one generation, the primary wins.
//! - I3. If the primary is not a btrfs superblock at all, a filesystem that is found by a mirror can only be read,
//!   because the device may now belong to something else.

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::superblock::{MAGIC, MAGIC_OFFSET, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use ubtrfs_format::{FormatError, check_superblock, check_superblock_but_flags};

/// A device's superblock.
#[derive(Clone, Debug)]
pub(crate) struct FoundSuperblock {
    pub(crate) superblock: Superblock,
    /// Number of the mirror; 0 is the primary.
    pub(crate) mirror: usize,
    /// Whether the primary is not a btrfs superblock (I3).
    pub(crate) primary_lost: bool,
}

/// Finds the newest valid superblock of a device. With `ignore_flags`, it may have unknown flags.
pub(crate) fn find(device: &dyn Device, ignore_flags: bool) -> Result<FoundSuperblock> {
    let read_mirror = |mirror: usize| read_mirror_with(device, mirror, ignore_flags);
    let primary = read_mirror(0);
    let primary_lost = matches!(&primary, Err(Unusable::NotBtrfs));
    let primary_fsid = match &primary {
        Ok(superblock) => Some(superblock.fsid),
        Err(Unusable::Invalid { fsid, .. }) => *fsid,
        Err(_) => None,
    };
    let mut candidates: Vec<(usize, Superblock)> = Vec::new();
    candidates.extend(primary.as_ref().ok().map(|superblock| (0, superblock.clone())));
    for mirror in 1..SUPERBLOCK_OFFSETS.len() {
        if let Ok(superblock) = read_mirror(mirror)
            && primary_fsid.is_none_or(|fsid| fsid == superblock.fsid)
        {
            candidates.push((mirror, superblock));
        }
    }
    let newest = candidates.iter().map(|(_, superblock)| superblock.generation).max();
    if let Some((mirror, superblock)) =
        candidates.iter().find(|(_, superblock)| Some(superblock.generation) == newest).cloned()
    {
        if candidates.iter().any(|(_, other)| other.fsid != superblock.fsid) {
            return Err(Error::Refused {
                what: format!(
                    "{}: the primary superblock is invalid and its mirrors have different fsids",
                    device.describe()
                ),
                hint: "show them with `ubtrfs inspect dump-super --all`, and restore the image from a backup",
            });
        }
        return Ok(FoundSuperblock { superblock, mirror, primary_lost });
    }
    Err(match primary {
        Err(Unusable::Io(source)) => {
            Error::io("read", device.describe(), SUPERBLOCK_OFFSETS[0], SUPERBLOCK_SIZE as u64, source)
        }
        Err(Unusable::Invalid { cause, .. }) => Error::Refused {
            what: format!("{} has no valid superblock: {cause}", device.describe()),
            hint: "the mirrors are invalid too; restore the image from a backup",
        },
        Err(Unusable::NotBtrfs) | Ok(_) => Error::Refused {
            what: format!("{} is not a btrfs filesystem", device.describe()),
            hint: "check the path; if this was a btrfs filesystem, all copies of its superblock are lost: restore it from a backup",
        },
    })
}

/// The reason why a copy cannot be used.
pub(crate) enum Unusable {
    Io(std::io::Error),
    NotBtrfs,
    /// An invalid btrfs superblock, and its fsid if it can be decoded.
    Invalid {
        fsid: Option<uuid::Uuid>,
        cause: FormatError,
    },
}

pub(crate) fn read_mirror(device: &dyn Device, mirror: usize) -> Result<Superblock, Unusable> {
    read_mirror_with(device, mirror, false)
}

fn read_mirror_with(device: &dyn Device, mirror: usize, ignore_flags: bool) -> Result<Superblock, Unusable> {
    let offset = SUPERBLOCK_OFFSETS[mirror];
    if !fits(offset, device.len_bytes()) {
        return Err(Unusable::NotBtrfs);
    }
    let mut raw = vec![0; SUPERBLOCK_SIZE];
    device.read_at(offset, &mut raw).map_err(Unusable::Io)?;
    if !raw[MAGIC_OFFSET..].starts_with(&MAGIC) {
        return Err(Unusable::NotBtrfs);
    }
    let superblock = Superblock::decode(&raw).map_err(|cause| Unusable::Invalid { fsid: None, cause })?;
    let fsid = Some(superblock.fsid);
    let check = if ignore_flags { check_superblock_but_flags } else { check_superblock };
    check(&superblock, &raw).map_err(|cause| Unusable::Invalid { fsid, cause })?;
    if superblock.bytenr != offset {
        let (field, value) = ("bytenr", superblock.bytenr);
        let cause = FormatError::Value { what: "superblock", field, value, expected: "expected its own offset" };
        return Err(Unusable::Invalid { fsid, cause });
    }
    Ok(superblock)
}

/// Writes a superblock to this offset of the device, with the address and the checksum that it has there.
pub(crate) fn write_copy(device: &dyn Device, superblock: &Superblock, offset: u64) -> Result<()> {
    let raw = Superblock { bytenr: offset, ..superblock.clone() }.encode_with_csum();
    let written = device.write_at(offset, &raw);
    written.map_err(|source| Error::io("write", device.describe(), offset, raw.len() as u64, source))
}

/// Whether a superblock at `offset` fits on a device, by the kernel's rule.
pub(crate) fn fits(offset: u64, device_len: u64) -> bool {
    offset.saturating_add(SUPERBLOCK_SIZE as u64) < device_len
}
