//! The ioctls on subvolumes. Each ioctl runs a command of crate `control`.
//!
//! SNAP_CREATE names its source by a descriptor of the caller, which is looked up in /proc. The kernel first writes back
//! the source's dirty pages (`seek`). With `no_open`, the server does not know which files have any, so the snapshot
//! lacks data that programs wrote through mmap shortly before; the command `ubtrfs subvolume snapshot` makes the kernel
//! write back all data first.
//!
//! `struct btrfs_ioctl_vol_args`, 4096 bytes: a file descriptor (8 bytes; it refers to the source if a snapshot is
//! made), and a name that ends in a zero byte.
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

use rustix::io::Errno;
use ubtrfs_control::subvolume::{QgroupLimits, Request as Wanted, Response as Found, SubvolumeDescription};
use ubtrfs_control::{CommandFailure, Host, Processes, Request as ControlRequest, Response, Result};
use ubtrfs_format::RootId;
use ubtrfs_format::item::RootFlags;
use ubtrfs_fs::{Error, Fs, InodeId};
use uuid::Uuid;

use crate::host::MountHost;
use crate::name_cache;
use crate::protocol::FuseRequest;
use crate::transport::WorkerPlace;

const BTRFS_IOC_SNAP_CREATE: u32 = 0x5000_9401;
const BTRFS_IOC_SNAP_CREATE_V2: u32 = 0x5000_9417;
const BTRFS_IOC_SUBVOL_CREATE: u32 = 0x5000_940e;
const BTRFS_IOC_SNAP_DESTROY: u32 = 0x5000_940f;
const BTRFS_IOC_DEFAULT_SUBVOL: u32 = 0x4008_9413;
const BTRFS_IOC_SUBVOL_GETFLAGS: u32 = 0x8008_9419;
const BTRFS_IOC_SUBVOL_SETFLAGS: u32 = 0x4008_941a;
const BTRFS_IOC_SET_RECEIVED_SUBVOL: u32 = 0xc0c8_9425;
const BTRFS_IOC_SUBVOL_CREATE_V2: u32 = 0x5000_9418;
const BTRFS_IOC_SNAP_DESTROY_V2: u32 = 0x5000_943f;
const BTRFS_IOC_GET_SUBVOL_INFO: u32 = 0x81f8_943c;

/// `BTRFS_SUBVOL_RDONLY`.
const SUBVOL_RDONLY: u64 = 2;
/// `BTRFS_SUBVOL_QGROUP_INHERIT`.
const SUBVOL_QGROUP_INHERIT: u64 = 4;
/// `BTRFS_SUBVOL_SPEC_BY_ID`: an id is in place of the name.
const SUBVOL_SPEC_BY_ID: u64 = 16;
const NAME_LEN: usize = 256;
const INFO_LEN: usize = 504;

/// The ioctls that this file answers.
const HANDLED: [u32; 11] = [
    BTRFS_IOC_SNAP_CREATE,
    BTRFS_IOC_SNAP_CREATE_V2,
    BTRFS_IOC_SUBVOL_CREATE,
    BTRFS_IOC_SUBVOL_CREATE_V2,
    BTRFS_IOC_SNAP_DESTROY,
    BTRFS_IOC_SNAP_DESTROY_V2,
    BTRFS_IOC_DEFAULT_SUBVOL,
    BTRFS_IOC_SUBVOL_GETFLAGS,
    BTRFS_IOC_SUBVOL_SETFLAGS,
    BTRFS_IOC_SET_RECEIVED_SUBVOL,
    BTRFS_IOC_GET_SUBVOL_INFO,
];

/// The file of an ioctl, and the caller of the ioctl.
pub(crate) struct SubvolumeIoctl<'c> {
    pub(crate) fs: &'c Fs,
    pub(crate) host: &'c MountHost,
    pub(crate) req: &'c FuseRequest<'c>,
    pub(crate) id: InodeId,
}

impl SubvolumeIoctl<'_> {
    pub(crate) fn run(&self, request: ControlRequest) -> Result<Response> {
        self.host.run(self.fs, self.req, &[self.id], request)
    }

    fn subvolume(&self, wanted: Wanted) -> Result<Found> {
        match self.run(ControlRequest::Subvolume(wanted))? {
            Response::Subvolume(found) => Ok(found),
            _ => Err(CommandFailure::new(Errno::IO, "an answer of another kind")),
        }
    }

    fn create(&self, name: &[u8], QgroupInherit { qgroups, limits }: QgroupInherit) -> Result<Found> {
        check_new_name(name)?;
        let umask = self.host.groups.umask(self.req);
        self.subvolume(Wanted::Create { dir: 0, name: name.to_vec(), umask, qgroups, limits })
    }

    /// Makes a snapshot of the subvolume whose root directory the caller has open under this descriptor number.
    fn snapshot(&self, descriptor: u64, read_only: bool, name: &[u8], inherited: QgroupInherit) -> Result<Found> {
        // As on Linux, an empty name fails after a wrong source.
        if !name.is_empty() {
            check_new_name(name)?;
        }
        let source = self.source(descriptor)?;
        check_new_name(name)?;
        // As on Linux, a snapshot gets the limits of its source in place of those in the request.
        let qgroups = inherited.qgroups;
        let request = Wanted::Snapshot { source: 0, dir: 1, name: name.to_vec(), read_only, qgroups };
        self.host.run(self.fs, self.req, &[source, self.id], ControlRequest::Subvolume(request))?;
        Ok(Found::Done)
    }

    /// The inode that the caller has open under this descriptor number.
    fn source(&self, descriptor: u64) -> Result<InodeId> {
        // A number that does not fit into 32 bits is replaced by a number that no descriptor has.
        self.host.inode_of(self.req, u32::try_from(descriptor).unwrap_or(u32::MAX))
    }

    /// Makes the kernel write back the dirty pages of the subvolume whose root directory the caller has open under this
    /// descriptor number. If no thread is left to receive them, or the descriptor is wrong, does nothing.
    fn fetch_data_of_source(&self, descriptor: u64, place: &WorkerPlace<'_>) {
        let Ok(source) = place.aside(|| self.source(descriptor)) else { return };
        let Some(view) = self.host.views.of(source.root) else { return };
        let Some(pages) = view.pages.get() else { return };
        let is_of_source = |node| view.nodes.id(node).is_some_and(|id| id.root == source.root);
        let _ = place.aside_for_kernel(|| pages.fetch_data_of(is_of_source));
    }

    /// The quota groups and limits of a new subvolume, if the flags of a `struct btrfs_ioctl_vol_args_v2` ask for it. The
    /// struct has the size and the address of a `struct btrfs_qgroup_inherit` in the caller's memory.
    fn inherited(&self, data: &[u8], flags: u64) -> Result<QgroupInherit> {
        if flags & SUBVOL_QGROUP_INHERIT == 0 {
            return Ok(QgroupInherit::default());
        }
        // Reading the memory of a caller can take as long as the caller likes, for example if a mapping of the caller's
        // own FUSE mount is at the address. So only root can make a thread of the server wait for it.
        if self.req.uid != 0 {
            let text = "only root can name quota groups to join in an ioctl; use ubtrfs subvolume";
            return Err(CommandFailure::new(Errno::OPNOTSUPP, text));
        }
        let at = |offset: usize| word(data.get(offset..).unwrap_or_default());
        let (size, address) = (at(INHERIT_SIZE)?, at(INHERIT_SIZE + 8)?);
        let wrong = || Error::InvalidArgument("the quota groups to join have a wrong size");
        let size = usize::try_from(size).ok().filter(|size| (INHERIT_HEAD..=INHERIT_MAX).contains(size));
        let memory = self.host.groups.memory_of(self.req.pid, address, size.ok_or_else(wrong)?);
        let unread = "the server cannot read the quota groups to join from the caller's memory; use ubtrfs subvolume";
        inherited(&memory.ok_or_else(|| CommandFailure::new(Errno::OPNOTSUPP, unread))?)
    }

    fn delete(&self, name: &[u8]) -> Result<Found> {
        if matches!(name, b"" | b".") {
            // On Linux, both name the directory itself, which this ioctl never deletes.
            return Err(Error::AccessDenied.into());
        }
        self.subvolume(Wanted::Delete { dir: 0, name: name.to_vec() })
    }
}

/// Fails as Linux does for names that no new subvolume can have, because a lookup finds the directory itself.
fn check_new_name(name: &[u8]) -> Result<()> {
    match name {
        b"." | b".." => Err(Error::Exists.into()),
        b"" => Err(Error::AccessDenied.into()),
        _ => Ok(()),
    }
}

/// Answers an ioctl; `None` if the ioctl is not about subvolumes.
pub(crate) fn ioctl(
    command: &SubvolumeIoctl<'_>,
    cmd: u32,
    data: &[u8],
    place: &WorkerPlace<'_>,
) -> Option<Result<Vec<u8>>> {
    if !HANDLED.contains(&cmd) {
        return None;
    }
    if let (BTRFS_IOC_SNAP_CREATE | BTRFS_IOC_SNAP_CREATE_V2, Ok(descriptor)) = (cmd, word(data)) {
        command.fetch_data_of_source(descriptor, place);
    }
    name_cache::begin();
    let done = place.aside(|| answer(command, cmd, data));
    const CHANGE_NAMES: [u32; 6] = [
        BTRFS_IOC_SNAP_CREATE,
        BTRFS_IOC_SNAP_CREATE_V2,
        BTRFS_IOC_SUBVOL_CREATE,
        BTRFS_IOC_SUBVOL_CREATE_V2,
        BTRFS_IOC_SNAP_DESTROY,
        BTRFS_IOC_SNAP_DESTROY_V2,
    ];
    if CHANGE_NAMES.contains(&cmd) {
        // Waiting is safe, because the kernel does not hold the directory's lock during an ioctl. If no thread is left
        // to receive requests, the notification may be sent only after the answer.
        let _ = place.aside_for_kernel(|| command.host.settle());
    }
    Some(done)
}

fn answer(command: &SubvolumeIoctl<'_>, cmd: u32, data: &[u8]) -> Result<Vec<u8>> {
    let done = match cmd {
        BTRFS_IOC_SUBVOL_CREATE => command.create(name_of(data, NAME)?, QgroupInherit::default()),
        BTRFS_IOC_SUBVOL_CREATE_V2 => {
            // As on Linux, the read-only flag is accepted and ignored, because a read-only new subvolume would stay
            // empty.
            let flags = flags_v2(data, SUBVOL_RDONLY | SUBVOL_QGROUP_INHERIT)?;
            command.create(name_of(data, NAME_V2)?, command.inherited(data, flags)?)
        }
        BTRFS_IOC_SNAP_CREATE => command.snapshot(word(data)?, false, name_of(data, NAME)?, QgroupInherit::default()),
        BTRFS_IOC_SNAP_CREATE_V2 => {
            let flags = flags_v2(data, SUBVOL_RDONLY | SUBVOL_QGROUP_INHERIT)?;
            let (name, inherited) = (name_of(data, NAME_V2)?, command.inherited(data, flags)?);
            command.snapshot(word(data)?, flags & SUBVOL_RDONLY != 0, name, inherited)
        }
        BTRFS_IOC_SNAP_DESTROY => command.delete(name_of(data, NAME)?),
        BTRFS_IOC_SNAP_DESTROY_V2 => match flags_v2(data, SUBVOL_SPEC_BY_ID)? {
            0 => command.delete(name_of(data, NAME_V2)?),
            _ => {
                let id = word(data.get(NAME_V2..).unwrap_or_default())?;
                command.subvolume(Wanted::DeleteById { id })
            }
        },
        BTRFS_IOC_SUBVOL_SETFLAGS => {
            let flags = word(data)?;
            if flags & !SUBVOL_RDONLY != 0 {
                return Err(Error::NotSupported("this flag of a subvolume").into());
            }
            command.subvolume(Wanted::SetReadOnly { of: 0, read_only: flags != 0, force: true })
        }
        BTRFS_IOC_DEFAULT_SUBVOL => {
            let id = word(data)?;
            command.subvolume(Wanted::SetDefault { id: Some(if id == 0 { RootId::FS_TREE.0 } else { id }) })
        }
        BTRFS_IOC_SET_RECEIVED_SUBVOL => return set_received(command, data),
        BTRFS_IOC_SUBVOL_GETFLAGS | BTRFS_IOC_GET_SUBVOL_INFO => {
            let Found::Info { is_root, subvolume } = command.subvolume(Wanted::Info { of: 0 })? else {
                return Err(CommandFailure::new(Errno::IO, "an answer of another kind"));
            };
            if cmd == BTRFS_IOC_GET_SUBVOL_INFO {
                return Ok(encode_info(&subvolume));
            }
            if !is_root {
                return Err(Error::InvalidArgument("not a subvolume").into());
            }
            let is_read_only = RootFlags::from_bits_retain(subvolume.flags).contains(RootFlags::RDONLY);
            return Ok((if is_read_only { SUBVOL_RDONLY } else { 0 }).to_le_bytes().to_vec());
        }
        _ => return Err(CommandFailure::new(Errno::NOTTY, "an unknown ioctl")),
    };
    done.map(|_| Vec::new())
}

/// Answers SET_RECEIVED_SUBVOL, whose argument is also its answer:
///
/// | offset | size | field                                                           |
/// |--------|------|-----------------------------------------------------------------|
/// | 0      | 16   | UUID of the sent subvolume                                      |
/// | 16     | 8    | transaction of the sent subvolume                               |
/// | 24     | 8    | filled in: the transaction of the record                        |
/// | 32     | 12   | time of sending: seconds, nanoseconds                           |
/// | 48     | 12   | filled in: the time of the record                               |
/// | 64     | 136  | flags and reserved words, which Linux ignores, as ubtrfs does   |
fn set_received(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<Vec<u8>> {
    let at = |offset: usize| word(data.get(offset..).unwrap_or_default());
    let uuid = Uuid::from_bytes(*data.first_chunk().ok_or_else(short)?);
    let stime = (at(32)?.cast_signed(), at(40)? as u32);
    let mut out = data.to_vec();
    let Found::Received { rtransid, rtime: (sec, nsec) } =
        command.subvolume(Wanted::SetReceived { of: 0, uuid, stransid: at(16)?, stime })?
    else {
        return Err(CommandFailure::new(Errno::IO, "an answer of another kind"));
    };
    out.get_mut(24..32).ok_or_else(short)?.copy_from_slice(&rtransid.to_le_bytes());
    out.get_mut(48..56).ok_or_else(short)?.copy_from_slice(&sec.to_le_bytes());
    out.get_mut(56..60).ok_or_else(short)?.copy_from_slice(&nsec.to_le_bytes());
    Ok(out)
}

/// Returns the flags in a `struct btrfs_ioctl_vol_args_v2`. The struct has the fields fd, transid and flags, each of 8
/// bytes; 32 bytes for quota groups; and the name. Fails if a flag is not in `known`.
fn flags_v2(data: &[u8], known: u64) -> Result<u64> {
    match word(data.get(16..).unwrap_or_default())? {
        flags if flags & !known == 0 => Ok(flags),
        _ => Err(Error::NotSupported("this flag of the ioctl").into()),
    }
}

/// The content of a `struct btrfs_qgroup_inherit`.
#[derive(Debug, Default, PartialEq, Eq)]
struct QgroupInherit {
    /// Quota groups to join.
    qgroups: Vec<u64>,
    /// Limits of the subvolume's own group.
    limits: Option<QgroupLimits>,
}

/// Decodes a `struct btrfs_qgroup_inherit`:
///
/// | offset | size | field                                                                              |
/// |--------|------|------------------------------------------------------------------------------------|
/// | 0      | 8    | flags: 1 sets the limits                                                           |
/// | 8      | 8    | number of groups to join                                                           |
/// | 16     | 16   | numbers of pairs of groups whose sizes are copied; Linux refuses them, as ubtrfs does |
/// | 32     | 40   | limits: flags, max_referenced, max_exclusive, rsv_referenced, rsv_exclusive        |
/// | 72     | 8 each | the groups                                                                       |
fn inherited(bytes: &[u8]) -> Result<QgroupInherit> {
    let at = |offset: usize| word(bytes.get(offset..).unwrap_or_default());
    let limits = match at(0)? {
        0 => None,
        1 => Some(QgroupLimits {
            flags: at(32)?,
            max_referenced: at(40)?,
            max_exclusive: at(48)?,
            rsv_referenced: at(56)?,
            rsv_exclusive: at(64)?,
        }),
        _ => return Err(Error::NotSupported("this flag of inherited quota groups").into()),
    };
    let groups = bytes.get(INHERIT_HEAD..).ok_or_else(short)?;
    if at(16)? != 0 || at(24)? != 0 || at(8)? != (groups.len() / 8) as u64 || groups.len() % 8 != 0 {
        return Err(Error::InvalidArgument("the quota groups to join contradict their number").into());
    }
    Ok(QgroupInherit { qgroups: groups.chunks_exact(8).map(word).collect::<Result<_>>()?, limits })
}

/// Offset of the size of the quota groups in `struct btrfs_ioctl_vol_args_v2`; their address follows.
const INHERIT_SIZE: usize = 24;
/// Length of `struct btrfs_qgroup_inherit` without groups, and the largest length that Linux accepts.
const INHERIT_HEAD: usize = 72;
const INHERIT_MAX: usize = 4096;
/// Offset of the name in `struct btrfs_ioctl_vol_args`.
pub(crate) const NAME: usize = 8;
/// Offset of the name in `struct btrfs_ioctl_vol_args_v2`.
const NAME_V2: usize = 56;

/// The name at offset `at` of an ioctl's argument.
pub(crate) fn name_of(data: &[u8], at: usize) -> Result<&[u8]> {
    let name = data.get(at..).ok_or_else(short)?;
    let end = name.iter().position(|byte| *byte == 0).ok_or(Error::NameTooLong)?;
    Ok(&name[..end])
}

pub(crate) fn word(data: &[u8]) -> Result<u64> {
    Ok(u64::from_le_bytes(*data.first_chunk::<8>().ok_or_else(short)?))
}

pub(crate) fn short() -> CommandFailure {
    Error::InvalidArgument("short ioctl argument").into()
}

fn encode_info(info: &SubvolumeDescription) -> Vec<u8> {
    let mut out = Vec::with_capacity(INFO_LEN);
    let word = |out: &mut Vec<u8>, word: u64| out.extend(word.to_le_bytes());
    word(&mut out, info.id);
    let mut name = info.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default().to_vec();
    name.resize(NAME_LEN, 0);
    out.extend(name);
    word(&mut out, info.parent.unwrap_or(0));
    word(&mut out, info.dirid);
    word(&mut out, info.generation);
    word(&mut out, info.flags);
    for uuid in [info.uuid, info.parent_uuid, info.received_uuid] {
        out.extend(uuid.as_bytes());
    }
    for transid in [info.ctransid, info.otransid, info.stransid, info.rtransid] {
        word(&mut out, transid);
    }
    for (sec, nsec) in [info.ctime, info.otime, info.stime, info.rtime] {
        out.extend(sec.to_le_bytes());
        out.extend(nsec.to_le_bytes());
        out.extend([0; 4]);
    }
    out.resize(INFO_LEN, 0);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_table_says() {
        // Give each field a different value, so that exchanged fields are noticed.
        let info = SubvolumeDescription {
            id: 300,
            path: b"dir/name".to_vec(),
            parent: Some(5),
            dirid: 257,
            flags: 1,
            uuid: "01010101-0101-0101-0101-010101010101".parse().unwrap(),
            parent_uuid: Default::default(),
            received_uuid: Default::default(),
            generation: 9,
            otransid: 7,
            ctransid: 8,
            stransid: 6,
            rtransid: 5,
            otime: (11, 12),
            ctime: (13, 14),
            stime: (-15, 16),
            rtime: (17, 18),
        };
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
