//! btrfs's ioctls, and their arguments as bytes.
//!
//! `struct btrfs_ioctl_vol_args_v2`, 4096 bytes:
//!
//! | offset | size | field                                                                           |
//! |--------|------|---------------------------------------------------------------------------------|
//! | 0      | 8    | fd: the source of a snapshot                                                    |
//! | 8      | 8    | transid                                                                         |
//! | 16     | 8    | flags                                                                           |
//! | 24     | 16   | size and address of a `struct btrfs_qgroup_inherit`                             |
//! | 40     | 16   | 0                                                                               |
//! | 56     | 4040 | name, which ends in a zero byte; or the id of a subvolume                       |

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

pub(crate) const SYNC: u32 = 0x9408;
pub(crate) const SNAP_DESTROY: u32 = 0x5000_940f;
pub(crate) const TREE_SEARCH: u32 = 0xd000_9411;
pub(crate) const INO_LOOKUP: u32 = 0xd000_9412;
pub(crate) const DEFAULT_SUBVOL: u32 = 0x4008_9413;
pub(crate) const WAIT_SYNC: u32 = 0x4008_9416;
pub(crate) const SNAP_CREATE_V2: u32 = 0x5000_9417;
pub(crate) const SUBVOL_CREATE_V2: u32 = 0x5000_9418;
pub(crate) const START_SYNC: u32 = 0x8008_9418;
pub(crate) const SUBVOL_GETFLAGS: u32 = 0x8008_9419;
pub(crate) const SUBVOL_SETFLAGS: u32 = 0x4008_941a;
pub(crate) const FS_INFO: u32 = 0x8400_941f;
pub(crate) const GET_SUBVOL_INFO: u32 = 0x81f8_943c;
pub(crate) const GET_SUBVOL_ROOTREF: u32 = 0xd000_943d;
pub(crate) const INO_LOOKUP_USER: u32 = 0xd000_943e;
pub(crate) const SNAP_DESTROY_V2: u32 = 0x5000_943f;

/// Length of the argument of most ioctls.
pub(crate) const ARGS_LEN: usize = 4096;
pub(crate) const SUBVOL_INFO_LEN: usize = 504;
pub(crate) const FS_INFO_LEN: usize = 1024;

/// `BTRFS_SUBVOL_RDONLY`.
pub(crate) const SUBVOL_RDONLY: u64 = 2;
/// `BTRFS_SUBVOL_QGROUP_INHERIT`.
pub(crate) const SUBVOL_QGROUP_INHERIT: u64 = 4;
/// `BTRFS_SUBVOL_SPEC_BY_ID`.
pub(crate) const SUBVOL_SPEC_BY_ID: u64 = 16;

/// Room for a name and its zero byte in `struct btrfs_ioctl_vol_args`, and where the room begins.
pub(crate) const NAME: (usize, usize) = (8, 4088);
/// Like [`NAME`], for `struct btrfs_ioctl_vol_args_v2`.
pub(crate) const NAME_V2: (usize, usize) = (56, 4040);

/// Calls an ioctl of btrfs. Returns what the ioctl returns.
///
/// # Panics
/// If the argument is shorter than the ioctl's number states.
#[allow(unsafe_code, reason = "the system call has no safe wrapper")]
pub(crate) fn call(fd: BorrowedFd<'_>, number: u32, argument: &mut [u8]) -> Result<i32, Errno> {
    let len = usize::try_from(number >> 16 & 0x3fff).unwrap_or(usize::MAX);
    assert!(argument.len() >= len, "an ioctl needs {len} bytes");
    // SAFETY: the kernel reads and writes at most as many bytes of the argument as the number states, and the argument
    // has them. Of memory at an address in the argument, the kernel only reads, and a wrong address fails with EFAULT.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), number.into(), argument.as_mut_ptr()) };
    if result < 0 { Err(last_errno()) } else { Ok(result) }
}

fn last_errno() -> Errno {
    std::io::Error::last_os_error().raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}

/// Reads a number at an offset.
pub(crate) fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    bytes.get(offset..).and_then(<[u8]>::first_chunk).map_or(0, |raw| u64::from_le_bytes(*raw))
}

/// Like [`u64_at`], for a number of four bytes.
pub(crate) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    bytes.get(offset..).and_then(<[u8]>::first_chunk).map_or(0, |raw| u32::from_le_bytes(*raw))
}

/// Writes a number at an offset, which lies in the bytes.
pub(crate) fn put(bytes: &mut [u8], offset: usize, value: u64) {
    bytes[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
}

/// The bytes at an offset up to a zero byte.
pub(crate) fn text_at(bytes: &[u8], offset: usize, len: usize) -> &[u8] {
    let room = bytes.get(offset..offset + len).unwrap_or_default();
    room.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// Writes a name where it belongs ([`NAME`], [`NAME_V2`]). Fails if it is too long.
pub(crate) fn put_name(args: &mut [u8; ARGS_LEN], (offset, room): (usize, usize), name: &[u8]) -> Result<(), Errno> {
    if name.len() >= room {
        return Err(Errno::NAMETOOLONG);
    }
    args[offset..offset + name.len()].copy_from_slice(name);
    Ok(())
}
