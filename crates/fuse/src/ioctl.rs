//! The ioctls that reach a FUSE server: those whose argument has the length that the ioctl's number states.
//!
//! The kernel also turns accesses to inode flags (`lsattr`, `chattr`) into ioctls. FICLONE, FIDEDUPERANGE and FIEMAP
//! never arrive. `subvolume_ioctl` has the ioctls on subvolumes.

use ubtrfs_format::item::InodeFlags;
use ubtrfs_fs::{Caller, Error, FlagRights, Fs, InodeId, Result};

const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
const FS_IOC_SETFLAGS: u32 = 0x4008_6602;
const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
const FS_IOC_FSSETXATTR: u32 = 0x401c_5820;
const FS_IOC_GETFSLABEL: u32 = 0x8100_9431;
const BTRFS_IOC_SYNC: u32 = 0x9408;
const BTRFS_IOC_START_SYNC: u32 = 0x8008_9418;
const BTRFS_IOC_WAIT_SYNC: u32 = 0x4008_9416;
const BTRFS_IOC_GET_FEATURES: u32 = 0x8018_9439;
const BTRFS_IOC_FS_INFO: u32 = 0x8400_941f;
const BTRFS_IOC_INO_LOOKUP: u32 = 0xd000_9412;

// Bits of FS_IOC_GETFLAGS.
const FS_SYNC_FL: u32 = 0x8;
const FS_IMMUTABLE_FL: u32 = 0x10;
const FS_APPEND_FL: u32 = 0x20;
const FS_NODUMP_FL: u32 = 0x40;
const FS_NOATIME_FL: u32 = 0x80;

/// Each of these bits, with its bit in `fsxattr.fsx_xflags`.
const XFLAGS: [(u32, u32); 5] =
    [(FS_IMMUTABLE_FL, 0x8), (FS_APPEND_FL, 0x10), (FS_SYNC_FL, 0x20), (FS_NOATIME_FL, 0x40), (FS_NODUMP_FL, 0x80)];

/// A caller, and how to look up its rights, which only some ioctls need.
pub(crate) struct Asker<'a> {
    pub(crate) caller: Caller,
    pub(crate) flag_rights: &'a dyn Fn() -> FlagRights,
}

/// Answers an ioctl; `None` if it is unknown (ENOTTY).
pub(crate) fn ioctl(fs: &Fs, id: InodeId, cmd: u32, data: &[u8], asker: &Asker<'_>) -> Option<Result<Vec<u8>>> {
    Some(match cmd {
        FS_IOC_GETFLAGS => fs.inode_flags(id).map(|flags| flags.to_le_bytes().to_vec()),
        FS_IOC_SETFLAGS => word(data).and_then(|flags| set_flags(fs, id, flags, asker)),
        FS_IOC_FSGETXATTR => fs.inode_flags(id).map(|flags| fsxattr(flags).to_vec()),
        FS_IOC_FSSETXATTR => set_fsxattr(fs, id, data, asker),
        FS_IOC_GETFSLABEL => Ok(padded(&fs.superblock().label, 256)),
        BTRFS_IOC_SYNC => fs.sync().map(|()| Vec::new()),
        // Starting a sync also waits for it: the answer comes when the transaction is durable.
        BTRFS_IOC_START_SYNC => fs.sync().map(|()| fs.superblock().generation.0.to_le_bytes().to_vec()),
        BTRFS_IOC_WAIT_SYNC => Ok(Vec::new()),
        BTRFS_IOC_GET_FEATURES => Ok(features(fs)),
        BTRFS_IOC_FS_INFO => Ok(fs_info(fs)),
        BTRFS_IOC_INO_LOOKUP => ino_lookup(id, data),
        _ => return None,
    })
}

/// Whether the ioctl sets flags, and so changes ctime.
pub(crate) fn changes_attributes(cmd: u32) -> bool {
    matches!(cmd, FS_IOC_SETFLAGS | FS_IOC_FSSETXATTR)
}

fn word(data: &[u8]) -> Result<u32> {
    let bytes = data.first_chunk::<4>().ok_or(Error::InvalidArgument("short ioctl argument"))?;
    Ok(u32::from_le_bytes(*bytes))
}

fn padded(bytes: &[u8], len: usize) -> Vec<u8> {
    let mut out = bytes.to_vec();
    out.resize(len, 0);
    out
}

/// `struct fsxattr`: xflags, extsize, nextents, projid, cowextsize, 8 bytes of padding.
fn fsxattr(flags: u32) -> [u8; 28] {
    let mut out = [0; 28];
    let xflags = XFLAGS.iter().filter(|(flag, _)| flags & flag != 0).fold(0, |all, (_, xflag)| all | xflag);
    out[..4].copy_from_slice(&u32::to_le_bytes(xflags));
    out
}

fn set_flags(fs: &Fs, id: InodeId, flags: u32, asker: &Asker<'_>) -> Result<Vec<u8>> {
    fs.set_inode_flags_with(id, flags, &asker.caller, (asker.flag_rights)()).map(|()| Vec::new())
}

fn set_fsxattr(fs: &Fs, id: InodeId, data: &[u8], asker: &Asker<'_>) -> Result<Vec<u8>> {
    let xflags = word(data)?;
    let known = XFLAGS.iter().fold(0, |all, (_, xflag)| all | xflag);
    let rest_is_zero = data.get(4..).is_some_and(|rest| rest.iter().all(|&byte| byte == 0));
    if xflags & !known != 0 || !rest_is_zero {
        return Err(Error::NotSupported("this file attribute"));
    }
    let mut flags = fs.inode_flags(id)?;
    for (flag, xflag) in XFLAGS {
        if xflags & xflag != 0 { flags |= flag } else { flags &= !flag }
    }
    set_flags(fs, id, flags, asker)
}

/// `struct btrfs_ioctl_feature_flags`: compat, compat_ro, incompat.
fn features(fs: &Fs) -> Vec<u8> {
    let sb = fs.superblock();
    let mut out = 0u64.to_le_bytes().to_vec();
    out.extend(sb.compat_ro_flags.to_le_bytes());
    out.extend(sb.incompat_flags.to_le_bytes());
    out
}

/// `struct btrfs_ioctl_fs_info_args`: max_id, num_devices, fsid, nodesize, sectorsize, clone_alignment, ...
fn fs_info(fs: &Fs) -> Vec<u8> {
    let sb = fs.superblock();
    let mut out = Vec::with_capacity(1024);
    out.extend(sb.num_devices.to_le_bytes());
    out.extend(sb.num_devices.to_le_bytes());
    out.extend(sb.fsid.as_bytes());
    out.extend(sb.nodesize.to_le_bytes());
    out.extend(sb.sectorsize.to_le_bytes());
    out.extend(sb.sectorsize.to_le_bytes());
    out.resize(1024, 0);
    out
}

/// `struct btrfs_ioctl_ino_lookup_args` (treeid, objectid, name). Only answered for tree 0 and the subvolume's root
/// directory: then it asks which subvolume this inode is in.
fn ino_lookup(id: InodeId, data: &[u8]) -> Result<Vec<u8>> {
    let field = |at: usize| data.get(at..at + 8).and_then(|bytes| bytes.first_chunk::<8>()).copied();
    let (Some(tree), Some(objectid)) = (field(0).map(u64::from_le_bytes), field(8).map(u64::from_le_bytes)) else {
        return Err(Error::InvalidArgument("short ioctl argument"));
    };
    if tree != 0 || objectid != ubtrfs_format::Ino::ROOT_DIR.0 {
        return Err(Error::NotSupported("looking up paths by inode number"));
    }
    let mut out = id.root.0.to_le_bytes().to_vec();
    out.extend(objectid.to_le_bytes());
    out.resize(4096, 0);
    Ok(out)
}

/// Whether the flags are those of an immutable file, which must not be opened for writing.
pub(crate) fn is_immutable(flags: u64) -> bool {
    InodeFlags::from_bits_retain(flags).contains(InodeFlags::IMMUTABLE)
}

/// Whether the flags are those of an append-only file.
pub(crate) fn is_append_only(flags: u64) -> bool {
    InodeFlags::from_bits_retain(flags).contains(InodeFlags::APPEND)
}
