//! `struct btrfs_util_subvolume_info`.

use ubtrfs_format::item::Timespec;
use ubtrfs_fs::SubvolumeInfo;

use crate::ioctl::{u32_at, u64_at};

/// The struct of C programs.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct UtilSubvolumeInfo {
    pub(crate) id: u64,
    pub(crate) parent_id: u64,
    pub(crate) dir_id: u64,
    pub(crate) flags: u64,
    pub(crate) uuid: [u8; 16],
    pub(crate) parent_uuid: [u8; 16],
    pub(crate) received_uuid: [u8; 16],
    pub(crate) generation: u64,
    pub(crate) ctransid: u64,
    pub(crate) otransid: u64,
    pub(crate) stransid: u64,
    pub(crate) rtransid: u64,
    pub(crate) ctime: UtilTimespec,
    pub(crate) otime: UtilTimespec,
    pub(crate) stime: UtilTimespec,
    pub(crate) rtime: UtilTimespec,
}

/// C's `struct timespec`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct UtilTimespec {
    sec: libc::time_t,
    nsec: libc::c_long,
}

impl UtilTimespec {
    fn new(sec: u64, nsec: u32) -> Self {
        // Times before 1970 are negative numbers.
        Self { sec: sec.cast_signed(), nsec: nsec.into() }
    }
}

impl From<Timespec> for UtilTimespec {
    fn from(time: Timespec) -> Self {
        Self { sec: time.sec, nsec: time.nsec.into() }
    }
}

impl From<&SubvolumeInfo> for UtilSubvolumeInfo {
    fn from(info: &SubvolumeInfo) -> Self {
        Self {
            id: info.id.0,
            parent_id: info.parent.map_or(0, |parent| parent.0),
            dir_id: info.parent.map_or(0, |_| info.dirid.0),
            flags: info.flags.bits(),
            uuid: info.uuid.into_bytes(),
            parent_uuid: info.parent_uuid.into_bytes(),
            received_uuid: info.received_uuid.into_bytes(),
            generation: info.generation.0,
            ctransid: info.ctransid.0,
            otransid: info.otransid.0,
            stransid: info.stransid.0,
            rtransid: info.rtransid.0,
            ctime: info.ctime.into(),
            otime: info.otime.into(),
            stime: info.stime.into(),
            rtime: info.rtime.into(),
        }
    }
}

impl UtilSubvolumeInfo {
    /// Makes the struct from `struct btrfs_ioctl_get_subvol_info_args`: treeid 0, name 8, parent_id 264, dirid 272,
    /// generation 280, flags 288, three UUIDs from 296 on, four transids from 344 on, four times of 16 bytes from 376 on.
    pub(crate) fn of_ioctl(args: &[u8]) -> Self {
        let uuid = |at: usize| args.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or_default();
        let time = |at: usize| UtilTimespec::new(u64_at(args, at), u32_at(args, at + 8));
        Self {
            id: u64_at(args, 0),
            parent_id: u64_at(args, 264),
            dir_id: u64_at(args, 272),
            flags: u64_at(args, 288),
            uuid: uuid(296),
            parent_uuid: uuid(312),
            received_uuid: uuid(328),
            generation: u64_at(args, 280),
            ctransid: u64_at(args, 344),
            otransid: u64_at(args, 352),
            stransid: u64_at(args, 360),
            rtransid: u64_at(args, 368),
            ctime: time(376),
            otime: time(392),
            stime: time(408),
            rtime: time(424),
        }
    }
}
