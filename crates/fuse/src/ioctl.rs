//! The ioctls on flags of files. For a FUSE server, the kernel copies as many bytes of an ioctl's argument as the
//! ioctl's number states, so an ioctl does not work if its argument is longer or contains pointers. FICLONE,
//! FIDEDUPERANGE and FIEMAP never arrive, because the kernel handles them itself. The kernel also turns accesses to
//! inode flags (`lsattr`, `chattr`) into ioctls. `btrfs_ioctl` and `subvolume_ioctl` have the ioctls of btrfs.

use ubtrfs_format::item::InodeFlags;
use ubtrfs_fs::{Caller, Error, FlagRights, Fs, InodeId, Result};

const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
const FS_IOC_SETFLAGS: u32 = 0x4008_6602;
const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
const FS_IOC_FSSETXATTR: u32 = 0x401c_5820;

// Bits of FS_IOC_GETFLAGS.
const FS_SYNC_FL: u32 = 0x8;
const FS_IMMUTABLE_FL: u32 = 0x10;
const FS_APPEND_FL: u32 = 0x20;
const FS_NODUMP_FL: u32 = 0x40;
const FS_NOATIME_FL: u32 = 0x80;

/// The bits of FS_IOC_GETFLAGS, each with the equivalent bit in `fsxattr.fsx_xflags`.
const XFLAGS: [(u32, u32); 5] =
    [(FS_IMMUTABLE_FL, 0x8), (FS_APPEND_FL, 0x10), (FS_SYNC_FL, 0x20), (FS_NOATIME_FL, 0x40), (FS_NODUMP_FL, 0x80)];

/// A caller, whose rights are looked up only for the ioctls that need them.
pub(crate) struct IoctlCaller<'a> {
    pub(crate) caller: Caller,
    pub(crate) flag_rights: &'a dyn Fn() -> FlagRights,
}

/// Answers an ioctl; `None` if the ioctl is unknown (ENOTTY).
pub(crate) fn ioctl(fs: &Fs, id: InodeId, cmd: u32, data: &[u8], asker: &IoctlCaller<'_>) -> Option<Result<Vec<u8>>> {
    Some(match cmd {
        FS_IOC_GETFLAGS => fs.inode_flags(id).map(|flags| flags.to_le_bytes().to_vec()),
        FS_IOC_SETFLAGS => word(data).and_then(|flags| set_flags(fs, id, flags, asker)),
        FS_IOC_FSGETXATTR => fs.inode_flags(id).map(|flags| fsxattr(flags).to_vec()),
        FS_IOC_FSSETXATTR => set_fsxattr(fs, id, data, asker),
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

/// `struct fsxattr`: xflags, extsize, nextents, projid, cowextsize, 8 bytes of padding.
fn fsxattr(flags: u32) -> [u8; 28] {
    let mut out = [0; 28];
    let xflags = XFLAGS.iter().filter(|(flag, _)| flags & flag != 0).fold(0, |all, (_, xflag)| all | xflag);
    out[..4].copy_from_slice(&u32::to_le_bytes(xflags));
    out
}

fn set_flags(fs: &Fs, id: InodeId, flags: u32, asker: &IoctlCaller<'_>) -> Result<Vec<u8>> {
    fs.set_inode_flags_with(id, flags, &asker.caller, (asker.flag_rights)()).map(|()| Vec::new())
}

fn set_fsxattr(fs: &Fs, id: InodeId, data: &[u8], asker: &IoctlCaller<'_>) -> Result<Vec<u8>> {
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
    fs.set_inode_xflags(id, flags, &asker.caller, (asker.flag_rights)()).map(|()| Vec::new())
}

/// Whether the flags are those of an immutable file, which must not be opened for writing.
pub(crate) fn is_immutable(flags: u64) -> bool {
    InodeFlags::from_bits_retain(flags).contains(InodeFlags::IMMUTABLE)
}

/// Whether the flags are those of an append-only file.
pub(crate) fn is_append_only(flags: u64) -> bool {
    InodeFlags::from_bits_retain(flags).contains(InodeFlags::APPEND)
}
