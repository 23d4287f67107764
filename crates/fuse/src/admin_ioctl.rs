//! The ioctls on balance, quotas, defragmentation, error counters and free space, with Linux's numbers. Each ioctl runs a command of
//! crate `control`.
//!
//! FUSE cannot transport QGROUP_LIMIT and BALANCE_CTL, which are therefore only commands of the control socket. The
//! ioctl number of QGROUP_LIMIT says that the ioctl only returns data, so the kernel does not send the argument. The
//! ioctl number of BALANCE_CTL says that the argument is a pointer to data, but the argument is a plain number.
//!
//! | ioctl               | argument, with the offsets of its fields                                                |
//! |---------------------|-----------------------------------------------------------------------------------------|
//! | DEFRAG_RANGE        | start 0, len 8, flags 16, extent_thresh 24, compress_type 28                            |
//! | BALANCE_V2, BALANCE_PROGRESS | flags 0, state 8, filters of data 16, metadata 152, system 288 (as in the balance item), expected 424, considered 432, completed 440 |
//! | QUOTA_CTL           | cmd 0, status 8                                                                         |
//! | QGROUP_ASSIGN       | assign 0, src 8, dst 16                                                                 |
//! | QGROUP_CREATE       | create 0, qgroupid 8                                                                    |
//! | QUOTA_RESCAN, QUOTA_RESCAN_STATUS | flags 0, progress 8                                                       |
//! | GET_DEV_STATS       | devid 0, nr_items 8, flags 16, counters 24                                              |
//! | FITRIM              | start 0, len 8, minlen 16                                                               |

use rustix::io::Errno;
use ubtrfs_control::balance::{self, BalanceReportMessage, BalanceStatusMessage, StartBalance};
use ubtrfs_control::defragment::{self, DefragmentCompression};
use ubtrfs_control::{CommandFailure, Request, Response, Result, device, filesystem, quota};
use ubtrfs_format::item::{BalanceArgs, BalanceFlags, BalanceItem};
use ubtrfs_fs::Error;

use crate::btrfs_ioctl::{IoctlAnswer, other_answer, padded};
use crate::subvolume_ioctl::{SubvolumeIoctl, short, word};

const DEFRAG: u32 = 0x5000_9402;
const DEFRAG_RANGE: u32 = 0x4030_9410;
const BALANCE_V2: u32 = 0xc400_9420;
const BALANCE_PROGRESS: u32 = 0x8400_9422;
const QUOTA_CTL: u32 = 0xc010_9428;
const QGROUP_ASSIGN: u32 = 0x4018_9429;
const QGROUP_CREATE: u32 = 0x4010_942a;
const QUOTA_RESCAN: u32 = 0x4040_942c;
const QUOTA_RESCAN_STATUS: u32 = 0x8040_942d;
const QUOTA_RESCAN_WAIT: u32 = 0x942e;
const GET_DEV_STATS: u32 = 0xc408_9434;
const FITRIM: u32 = 0xc018_5879;

/// Answers an ioctl; `None` if this module does not handle the ioctl.
pub(crate) fn ioctl(command: &SubvolumeIoctl<'_>, cmd: u32, data: &[u8]) -> Option<Result<IoctlAnswer>> {
    let done = |()| IoctlAnswer::default();
    if [BALANCE_V2, QUOTA_CTL, QGROUP_CREATE, QUOTA_RESCAN].contains(&cmd)
        && let Err(failure) = admins_only(command)
    {
        return Some(Err(failure));
    }
    Some(match cmd {
        DEFRAG => defragment(command, &DEFRAG_ALL).map(done),
        DEFRAG_RANGE => defragment(command, data).map(done),
        BALANCE_V2 => start_balance(command, data),
        BALANCE_PROGRESS => balance_progress(command).map(IoctlAnswer::from),
        QUOTA_CTL => quota_ctl(command, data).map(IoctlAnswer::from),
        QGROUP_ASSIGN => assign(command, data),
        QGROUP_CREATE => create_group(command, data).map(done),
        QUOTA_RESCAN => rescan(command, data).map(done),
        QUOTA_RESCAN_STATUS => rescan_status(command).map(IoctlAnswer::from),
        QUOTA_RESCAN_WAIT => {
            let waited = quota(command, quota::Request::RescanWait).map(|_| IoctlAnswer::default());
            waited.map_err(|failure| if_cancelled(failure, Errno::INTR))
        }
        GET_DEV_STATS => device_stats(command, data).map(IoctlAnswer::from),
        FITRIM => trim(command, data).map(IoctlAnswer::from),
        _ => return None,
    })
}

fn quota(command: &SubvolumeIoctl<'_>, request: quota::Request) -> Result<quota::Response> {
    match command.run(Request::Quota(request))? {
        Response::Quota(response) => Ok(response),
        _ => Err(other_answer()),
    }
}

fn balance(command: &SubvolumeIoctl<'_>, request: balance::Request) -> Result<balance::Response> {
    match command.run(Request::Balance(request))? {
        Response::Balance(response) => Ok(response),
        _ => Err(other_answer()),
    }
}

/// The failure of an ioctl that a signal interrupts, with the errno of Linux.
fn if_cancelled(failure: CommandFailure, errno: Errno) -> CommandFailure {
    match failure.errno() == Errno::CANCELED {
        true => CommandFailure::new(errno, "a signal arrived"),
        false => failure,
    }
}

/// Fails unless the caller may administer the filesystem. Called before the ioctl's argument is examined.
fn admins_only(command: &SubvolumeIoctl<'_>) -> Result<()> {
    quota(command, quota::Request::Status).map(|_| ())
}

fn word_at(data: &[u8], offset: usize) -> Result<u64> {
    word(data.get(offset..).unwrap_or_default())
}

fn small_at(data: &[u8], offset: usize) -> Result<u32> {
    let bytes = data.get(offset..).and_then(<[u8]>::first_chunk::<4>).ok_or_else(short)?;
    Ok(u32::from_le_bytes(*bytes))
}

fn invalid(what: &'static str) -> CommandFailure {
    Error::InvalidArgument(what).into()
}

fn defragment(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<()> {
    const COMPRESS: u64 = 1;
    const START_IO: u64 = 2;
    let flags = word_at(data, 16)?;
    if flags & !(COMPRESS | START_IO) != 0 {
        return Err(CommandFailure::new(Errno::OPNOTSUPP, "unknown flags"));
    }
    let compress = match small_at(data, 28)? {
        _ if flags & COMPRESS == 0 => None,
        // Linux takes zlib if no method is given.
        0 | 1 => Some((DefragmentCompression::Zlib, 0)),
        2 => Some((DefragmentCompression::Lzo, 0)),
        3 => Some((DefragmentCompression::Zstd, 0)),
        _ => return Err(invalid("a compression method")),
    };
    let small_bytes = match small_at(data, 24)? {
        0 => DEFRAG_SMALL_BYTES,
        bytes => bytes.into(),
    };
    let (start, len_bytes) = (word_at(data, 0)?, word_at(data, 8)?);
    // As in Linux, the ioctl on a directory is about the subvolume's tree, not about files. Trees are not defragmented,
    // so nothing is done.
    if command.fs.getattr(command.id)?.is_dir() {
        return Ok(());
    }
    let flush = flags & START_IO != 0;
    let request =
        defragment::Request { file: 0, start, len_bytes, small_bytes, compress, unshare: false, flush, lists: false };
    // As on Linux, a signal ends a defragmentation with this error.
    command.run(Request::Defragment(request)).map(|_| ()).map_err(|failure| if_cancelled(failure, Errno::AGAIN))
}

fn start_balance(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<IoctlAnswer> {
    const RESUME: u64 = 1 << 4;
    let flags = word_at(data, 0)?;
    let request = if flags & RESUME != 0 {
        balance::Request::Resume
    } else {
        let known = BalanceFlags::all().bits();
        if flags == 0 {
            // The flags select no type of block group, so there is nothing to do, as in Linux.
            return balanced(data, &BalanceReportMessage::default());
        }
        if flags & !known != 0 {
            return Err(invalid("unknown flags of a balance"));
        }
        let args = |offset: usize| {
            let bytes = data.get(offset..offset + BalanceArgs::SIZE).ok_or_else(short)?;
            BalanceArgs::decode(bytes).map_err(|_| short())
        };
        let (data, metadata, system) = (args(DATA_ARGS)?, args(METADATA_ARGS)?, args(SYSTEM_ARGS)?);
        balance::Request::Start(Box::new(StartBalance::of(&BalanceItem {
            flags,
            data,
            metadata,
            system,
            unused: [0; 4],
        })))
    };
    match balance(command, request)? {
        balance::Response::Done(report) => balanced(data, &report),
        _ => Err(other_answer()),
    }
}

/// Returns the answer to a balance ioctl: the ioctl's argument, in which the counts of `report` are filled in.
fn balanced(data: &[u8], report: &BalanceReportMessage) -> Result<IoctlAnswer> {
    let mut out = data.get(..COUNTS).ok_or_else(short)?.to_vec();
    out[STATE..STATE + 8].fill(0);
    out.extend([report.expected, report.considered, report.completed].map(u64::to_le_bytes).as_flattened());
    // As in Linux, a block group that cannot be moved does not stop the balance, but the ioctl fails at the end.
    let result = match report {
        BalanceReportMessage { failures, .. } if !failures.is_empty() => -Errno::IO.raw_os_error(),
        BalanceReportMessage { without_space: 1.., .. } => -Errno::NOSPC.raw_os_error(),
        _ => 0,
    };
    Ok(IoctlAnswer { data: padded(out, BALANCE_LEN), result })
}

fn balance_progress(command: &SubvolumeIoctl<'_>) -> Result<Vec<u8>> {
    let balance::Response::Status(status) = balance(command, balance::Request::Status)? else {
        return Err(other_answer());
    };
    let status = status.ok_or_else(|| CommandFailure::new(Errno::NOTCONN, "there is no balance"))?;
    const RUNNING: u64 = 1;
    const PAUSING: u64 = 2;
    const CANCELLING: u64 = 4;
    let state = match status.state.as_str() {
        "running" => RUNNING,
        "pausing" => RUNNING | PAUSING,
        "cancelling" => RUNNING | CANCELLING,
        _ => 0,
    };
    let item = status.item()?;
    let BalanceStatusMessage { expected, considered, completed, .. } = status;
    let mut out = [item.flags, state].map(u64::to_le_bytes).as_flattened().to_vec();
    for args in [item.data, item.metadata, item.system] {
        out.extend(args.encode());
    }
    out.extend([expected, considered, completed].map(u64::to_le_bytes).as_flattened());
    Ok(padded(out, BALANCE_LEN))
}

fn quota_ctl(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<Vec<u8>> {
    let request = match word_at(data, 0)? {
        1 => quota::Request::Enable { simple: false },
        2 => quota::Request::Disable,
        4 => quota::Request::Enable { simple: true },
        _ => return Err(invalid("a command for quotas")),
    };
    quota(command, request)?;
    Ok(data.to_vec())
}

fn assign(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<IoctlAnswer> {
    let (member, parent) = (word_at(data, 8)?, word_at(data, 16)?);
    let request = match word_at(data, 0)? {
        0 => quota::Request::Remove { member, parent },
        _ => quota::Request::Assign { member, parent },
    };
    match quota(command, request)? {
        // As in Linux, the result 1 asks the caller to start a rescan.
        quota::Response::NeedsRescan(is_needed) => Ok(IoctlAnswer { data: Vec::new(), result: is_needed.into() }),
        _ => Err(other_answer()),
    }
}

fn create_group(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<()> {
    let id = word_at(data, 8)?;
    if id == 0 {
        return Err(invalid("a quota group"));
    }
    let request = match word_at(data, 0)? {
        0 => quota::Request::Destroy { id },
        _ => quota::Request::Create { id },
    };
    quota(command, request).map(|_| ())
}

fn rescan(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<()> {
    if word_at(data, 0)? != 0 {
        return Err(invalid("unknown flags of a rescan"));
    }
    quota(command, quota::Request::Rescan).map(|_| ())
}

fn rescan_status(command: &SubvolumeIoctl<'_>) -> Result<Vec<u8>> {
    let quota::Response::Status(status) = quota(command, quota::Request::Status)? else { return Err(other_answer()) };
    let rescan = status.and_then(|status| status.rescan);
    let out = [u64::from(rescan.is_some()), rescan.unwrap_or(0)].map(u64::to_le_bytes);
    Ok(padded(out.as_flattened().to_vec(), RESCAN_LEN))
}

/// Returns the argument, with as many error counters of a device as the caller has room for.
fn device_stats(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<Vec<u8>> {
    const RESET: u64 = 1;
    let (devid, nr_items, flags) = (word_at(data, 0)?, word_at(data, 8)?, word_at(data, 16)?);
    let stats = |request| match command.run(Request::Device(request))? {
        Response::Device(device::Response::Stats(stats)) => {
            let found = stats.into_iter().find(|stats| stats.devid == devid);
            found.ok_or_else(|| CommandFailure::new(Errno::NODEV, "no such device"))
        }
        _ => Err(other_answer()),
    };
    if flags & RESET != 0 {
        admins_only(command)?;
    }
    let mut found = stats(device::Request::Stats)?;
    if flags & RESET != 0 {
        found = stats(device::Request::ResetStats { devid: Some(devid) })?;
    }
    let counters =
        [found.write_io_errs, found.read_io_errs, found.flush_io_errs, found.corruption_errs, found.generation_errs];
    let nr_items = usize::try_from(nr_items).map_or(counters.len(), |nr| nr.min(counters.len()));
    let mut out = data.to_vec();
    out.get_mut(8..16).ok_or_else(short)?.copy_from_slice(&(nr_items as u64).to_le_bytes());
    let counters = &counters.as_slice()[..nr_items];
    let bytes: Vec<u8> = counters.iter().flat_map(|counter| counter.to_le_bytes()).collect();
    out.get_mut(24..24 + bytes.len()).ok_or_else(short)?.copy_from_slice(&bytes);
    Ok(out)
}

fn trim(command: &SubvolumeIoctl<'_>, data: &[u8]) -> Result<Vec<u8>> {
    let (start, len_bytes, min_bytes) = (word_at(data, 0)?, word_at(data, 8)?, word_at(data, 16)?);
    let request = filesystem::Request::Trim { start, len_bytes, min_bytes };
    match command.run(Request::Filesystem(request))? {
        Response::Filesystem(filesystem::Response::Trimmed(bytes)) => {
            Ok([start, bytes, min_bytes].map(u64::to_le_bytes).as_flattened().to_vec())
        }
        _ => Err(other_answer()),
    }
}

/// The argument of DEFRAG_RANGE for a whole file: `start` is 0, and `len` is the largest number.
const DEFRAG_ALL: [u8; 48] = {
    let mut args = [0; 48];
    let mut at = 8;
    while at < 16 {
        args[at] = 0xff;
        at += 1;
    }
    args
};
/// The default of extent_thresh, as in Linux: extents of at least this size stay as they are unless the ioctl
/// compresses them.
const DEFRAG_SMALL_BYTES: u64 = 256 << 10;
const STATE: usize = 8;
const DATA_ARGS: usize = 16;
const METADATA_ARGS: usize = DATA_ARGS + BalanceArgs::SIZE;
const SYSTEM_ARGS: usize = METADATA_ARGS + BalanceArgs::SIZE;
const COUNTS: usize = SYSTEM_ARGS + BalanceArgs::SIZE;
const BALANCE_LEN: usize = 1024;
const RESCAN_LEN: usize = 64;
