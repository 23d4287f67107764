//! The ioctls on subvolumes whose argument contains no file descriptor: a FUSE server could not follow one. So there is
//! no ioctl for snapshots.
//!
//! `struct btrfs_ioctl_vol_args`, 4096 bytes: a file descriptor (8, ignored), and a name that ends in a zero byte.
//!
//! `struct btrfs_ioctl_get_subvol_info_args`, 504 bytes:
//!
//! | offset | size | field                                                                |
//! |--------|------|----------------------------------------------------------------------|
//! | 0      | 8    | treeid                                                               |
//! | 8      | 256  | name: the last component of the path                                 |
//! | 264    | 8    | parent_id                                                            |
//! | 272    | 8    | dirid                                                                |
//! | 280    | 8    | generation                                                           |
//! | 288    | 8    | flags, as in the root item                                           |
//! | 296    | 48   | uuid, parent_uuid, received_uuid                                     |
//! | 344    | 32   | ctransid, otransid, stransid, rtransid                               |
//! | 376    | 64   | ctime, otime, stime, rtime, each seconds (8), nanoseconds (4), 0 (4) |
//! | 440    | 64   | 0                                                                    |

use ubtrfs_format::RootId;
use ubtrfs_fs::{Error, InodeId, Result, SubvolumeInfo};

use crate::protocol::Request;
use crate::subvolumes::{Subvolumes, is_read_only, root_of};
use crate::transport::Place;

const BTRFS_IOC_SUBVOL_CREATE: u32 = 0x5000_940e;
const BTRFS_IOC_SNAP_DESTROY: u32 = 0x5000_940f;
const BTRFS_IOC_DEFAULT_SUBVOL: u32 = 0x4008_9413;
const BTRFS_IOC_SUBVOL_GETFLAGS: u32 = 0x8008_9419;
const BTRFS_IOC_SUBVOL_SETFLAGS: u32 = 0x4008_941a;
const BTRFS_IOC_SUBVOL_CREATE_V2: u32 = 0x5000_9418;
const BTRFS_IOC_SNAP_DESTROY_V2: u32 = 0x5000_943f;
const BTRFS_IOC_GET_SUBVOL_INFO: u32 = 0x81f8_943c;

/// `BTRFS_SUBVOL_RDONLY`.
const SUBVOL_RDONLY: u64 = 2;
const NAME_LEN: usize = 256;
const INFO_LEN: usize = 504;

/// The ioctls that this file answers.
const OURS: [u32; 8] = [
    BTRFS_IOC_SUBVOL_CREATE,
    BTRFS_IOC_SUBVOL_CREATE_V2,
    BTRFS_IOC_SNAP_DESTROY,
    BTRFS_IOC_SNAP_DESTROY_V2,
    BTRFS_IOC_DEFAULT_SUBVOL,
    BTRFS_IOC_SUBVOL_GETFLAGS,
    BTRFS_IOC_SUBVOL_SETFLAGS,
    BTRFS_IOC_GET_SUBVOL_INFO,
];

/// Answers an ioctl; `None` if it is not about subvolumes.
pub(crate) fn ioctl(
    subvolumes: &Subvolumes,
    req: &Request<'_>,
    id: InodeId,
    cmd: u32,
    data: &[u8],
    place: &Place<'_>,
) -> Option<Result<Vec<u8>>> {
    if !OURS.contains(&cmd) {
        return None;
    }
    let done = place.aside(|| {
        Some(match cmd {
            BTRFS_IOC_SUBVOL_CREATE => name_of(data, NAME).and_then(|name| subvolumes.create(req, id, name, None)),
            BTRFS_IOC_SUBVOL_CREATE_V2 => create_v2(subvolumes, req, id, data),
            BTRFS_IOC_SNAP_DESTROY => name_of(data, NAME).and_then(|name| subvolumes.delete(req, id, name)),
            BTRFS_IOC_SNAP_DESTROY_V2 => {
                flags_v2(data, 0).and_then(|_| name_of(data, NAME_V2)).and_then(|name| subvolumes.delete(req, id, name))
            }
            BTRFS_IOC_SUBVOL_SETFLAGS => word(data).and_then(|flags| match flags & !SUBVOL_RDONLY {
                0 => subvolumes.set_read_only(req, id, flags != 0),
                _ => Err(Error::NotSupported("this flag of a subvolume")),
            }),
            BTRFS_IOC_DEFAULT_SUBVOL => word(data).and_then(|id| {
                let id = if id == 0 { RootId::FS_TREE } else { RootId(id) };
                subvolumes.set_default(req, id)
            }),
            BTRFS_IOC_SUBVOL_GETFLAGS => return Some(flags(subvolumes, id)),
            BTRFS_IOC_GET_SUBVOL_INFO => return Some(subvolumes.info(id).map(|info| encode_info(&info))),
            _ => return None,
        })
        .map(|done| done.map(|()| Vec::new()))
    });
    const CHANGE_NAMES: [u32; 4] =
        [BTRFS_IOC_SUBVOL_CREATE, BTRFS_IOC_SUBVOL_CREATE_V2, BTRFS_IOC_SNAP_DESTROY, BTRFS_IOC_SNAP_DESTROY_V2];
    if CHANGE_NAMES.contains(&cmd) {
        // The kernel does not hold the directory's lock during an ioctl. If no thread is free, the kernel learns of the
        // names later.
        let _ = place.aside_for_kernel(|| subvolumes.settle());
    }
    done
}

/// `struct btrfs_ioctl_vol_args_v2`: fd, transid, flags, each 8 bytes; 32 bytes for quota groups; the name.
fn create_v2(subvolumes: &Subvolumes, req: &Request<'_>, dir: InodeId, data: &[u8]) -> Result<()> {
    // As on Linux, the flag for read-only is accepted and ignored: nothing could be put into the subvolume.
    flags_v2(data, SUBVOL_RDONLY)?;
    subvolumes.create(req, dir, name_of(data, NAME_V2)?, None)
}

/// The flags of a `struct btrfs_ioctl_vol_args_v2`; an error if one is not in `known`.
fn flags_v2(data: &[u8], known: u64) -> Result<u64> {
    match word(data.get(16..).unwrap_or_default())? {
        flags if flags & !known == 0 => Ok(flags),
        _ => Err(Error::NotSupported("this flag of the ioctl")),
    }
}

/// Offset of the name in `struct btrfs_ioctl_vol_args`, and in its second version.
const NAME: usize = 8;
const NAME_V2: usize = 56;

/// The name at an offset.
fn name_of(data: &[u8], at: usize) -> Result<&[u8]> {
    let name = data.get(at..).ok_or(Error::InvalidArgument("short ioctl argument"))?;
    let end = name.iter().position(|byte| *byte == 0).ok_or(Error::NameTooLong)?;
    Ok(&name[..end])
}

fn word(data: &[u8]) -> Result<u64> {
    let bytes = data.first_chunk::<8>().ok_or(Error::InvalidArgument("short ioctl argument"))?;
    Ok(u64::from_le_bytes(*bytes))
}

fn flags(subvolumes: &Subvolumes, id: InodeId) -> Result<Vec<u8>> {
    root_of(id)?;
    let flags = if is_read_only(&subvolumes.info(id)?) { SUBVOL_RDONLY } else { 0 };
    Ok(flags.to_le_bytes().to_vec())
}

fn encode_info(info: &SubvolumeInfo) -> Vec<u8> {
    let mut out = Vec::with_capacity(INFO_LEN);
    let word = |out: &mut Vec<u8>, word: u64| out.extend(word.to_le_bytes());
    word(&mut out, info.id.0);
    let mut name = info.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default().to_vec();
    name.resize(NAME_LEN, 0);
    out.extend(name);
    word(&mut out, info.parent.map_or(0, |parent| parent.0));
    word(&mut out, info.dirid.0);
    word(&mut out, info.generation.0);
    word(&mut out, info.flags.bits());
    for uuid in [info.uuid, info.parent_uuid, info.received_uuid] {
        out.extend(uuid.as_bytes());
    }
    for transid in [info.ctransid, info.otransid, info.stransid, info.rtransid] {
        word(&mut out, transid.0);
    }
    for time in [info.ctime, info.otime, info.stime, info.rtime] {
        out.extend(time.sec.to_le_bytes());
        out.extend(time.nsec.to_le_bytes());
        out.extend([0; 4]);
    }
    out.resize(INFO_LEN, 0);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subvolumes::example;

    #[test]
    fn fields_are_where_the_table_says() {
        let info = example();
        let out = encode_info(&info);
        let at = |offset: usize| u64::from_le_bytes(*out[offset..].first_chunk().unwrap());
        assert_eq!(out.len(), INFO_LEN);
        assert_eq!((at(0), at(264), at(272), at(280), at(288)), (300, 5, 257, 9, 1));
        assert_eq!((&out[8..13], out[13], &out[296..312]), (&b"name\0"[..], 0, &[1; 16][..]));
        assert_eq!([344, 352, 360, 368].map(at), [8, 7, 6, 5]);
        assert_eq!([376, 384, 392, 400, 408, 424].map(at), [13, 14, 11, 12, 15u64.wrapping_neg(), 17]);
    }

    #[test]
    fn names_end_in_a_zero() {
        let mut args = vec![0; 4096];
        args[8..11].copy_from_slice(b"abc");
        assert_eq!(name_of(&args, NAME).unwrap(), b"abc");
        assert!(name_of(&[1; 4096], NAME).is_err() && name_of(&[0; 7], NAME).is_err());
        assert!(name_of(&args, NAME_V2).unwrap().is_empty() && flags_v2(&[0; 20], 0).is_err());
    }
}
