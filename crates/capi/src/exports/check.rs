//! Check

use std::ffi::{c_char, c_int};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use ubtrfs::{Access, CheckOptions, Device, FileDevice, Problem};

use crate::border::{Address, ErrorPlace, HandleList, ResultPlace, TextList, UserPointer};
use crate::callback::tell_problem;
use crate::exports::device::{UbtrfsDevice, devices_of, file_device};
use crate::exports::filesystem::check_flags;
use crate::exports::job::UbtrfsJob;
use crate::failure::{CallFailure, CallResult, answer};
use crate::handles::Handle;
use crate::watched::WatchedDevice;

/// A problem that a check found.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsProblem {
    /// The code, such as "E-BLOCK-CSUM". Codes that begin with "W-" are warnings.
    pub code: Address<c_char>,
    /// The problem with its code and place, in a line.
    pub text: Address<c_char>,
    /// The tree of the problem; 0 if it has none.
    pub tree: u64,
    /// The address of the tree block or extent; 0 if the problem has none.
    pub bytenr: u64,
    /// 1 for damage, 0 for a warning.
    pub is_error: u32,
    /// Not used: 0.
    pub reserved: u32,
}

/// Learns of a problem. The problem is valid until the function returns.
pub type UbtrfsProblemFn = Option<unsafe extern "C" fn(user: UserPointer, problem: *const UbtrfsProblem)>;

/// Reads all data, and compares every copy with its checksums.
pub const UBTRFS_CHECK_DATA: u32 = 1;

/// The result of a check.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsCheckReport {
    /// 1 if all parts of the check ran and found no damage, otherwise 0.
    pub is_clean: u32,
    /// 1 if all parts of the check ran, otherwise 0.
    pub is_complete: u32,
    /// Problems that are damage, also those that were not told.
    pub nr_errors: u64,
    /// Problems that are warnings, also those that were not told.
    pub nr_warnings: u64,
    /// The number of trees.
    pub nr_trees: u64,
    /// The number of tree blocks.
    pub nr_tree_blocks: u64,
    /// The number of data extents.
    pub nr_data_extents: u64,
    /// The number of inodes.
    pub nr_inodes: u64,
    /// Bytes of data that were compared with their checksums.
    pub data_bytes_verified: u64,
}

/// Checks the filesystem on image files or block devices, without changing it. Problems are no failure of this function;
/// see the report. The function fails if nothing can be checked. The job counts the bytes that were read; how many there
/// are is not known. `tell`, `job` and `report` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_check(
    paths: TextList,
    nr_paths: usize,
    flags: u32,
    tell: UbtrfsProblemFn,
    user: UserPointer,
    job: Handle<UbtrfsJob>,
    report: ResultPlace<UbtrfsCheckReport>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        let paths = paths.paths(nr_paths, "paths")?;
        if paths.is_empty() {
            return Err(CallFailure::argument("paths is empty".to_owned()));
        }
        let open = |path| file_device("check", path, |path| FileDevice::open(path, Access::ReadOnly));
        let devices = paths.into_iter().map(open).collect::<CallResult<_>>()?;
        checked(devices, flags, tell, user, job, report)
    })
}

/// Checks the filesystem on devices of the program, as `ubtrfs_check`.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_check_devices(
    devices: HandleList<UbtrfsDevice>,
    nr_devices: usize,
    flags: u32,
    tell: UbtrfsProblemFn,
    user: UserPointer,
    job: Handle<UbtrfsJob>,
    report: ResultPlace<UbtrfsCheckReport>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        let devices = devices_of(devices, nr_devices)?;
        checked(devices, flags, tell, user, job, report)
    })
}

fn checked(
    devices: Vec<Arc<dyn Device>>,
    flags: u32,
    tell: UbtrfsProblemFn,
    user: UserPointer,
    job: Handle<UbtrfsJob>,
    place: ResultPlace<UbtrfsCheckReport>,
) -> CallResult<()> {
    check_flags(flags, UBTRFS_CHECK_DATA, "flags")?;
    let options = CheckOptions { data_csums: flags & UBTRFS_CHECK_DATA != 0, ..CheckOptions::default() };
    let was_refused = Arc::new(AtomicBool::new(false));
    let is_cancelled = || was_refused.load(Ordering::Acquire);
    let devices = if job.is_null() {
        devices
    } else {
        let job = job.get()?;
        let watch = |device| -> Arc<dyn Device> { Arc::new(WatchedDevice::new(device, &job, &was_refused)) };
        devices.into_iter().map(watch).collect()
    };
    let found = ubtrfs::check(devices, options, &mut |problem: Problem| {
        if !is_cancelled() {
            tell_problem(tell, user, &problem);
        }
    });
    if is_cancelled() {
        return Err(CallFailure::plain(Errno::CANCELED, "the check was cancelled".to_owned()));
    }
    let report = found?;
    let count =
        |errors: bool| report.counts.iter().filter(|(code, _)| code.is_error() == errors).map(|(_, nr)| nr).sum();
    place.set(UbtrfsCheckReport {
        is_clean: report.is_clean().into(),
        is_complete: report.complete.into(),
        nr_errors: count(true),
        nr_warnings: count(false),
        nr_trees: report.stats.trees,
        nr_tree_blocks: report.stats.tree_blocks,
        nr_data_extents: report.stats.data_extents,
        nr_inodes: report.stats.inodes,
        data_bytes_verified: report.stats.data_bytes_verified,
    });
    Ok(())
}
