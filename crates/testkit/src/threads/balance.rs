//! The two threads of a run with balances: one starts balances with random filters, and resumes or cancels paused
//! balances; the other pauses and cancels running balances, and resizes the device.

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Result, ensure};
use ubtrfs_format::DevId;
use ubtrfs_format::item::{BalanceArgs, BalanceFilters, BalanceFlags, BalanceItem, BlockGroupFlags};
use ubtrfs_fs::{Fs, Job};

use super::Shared;
use crate::{FsTarget, Rng};

/// Errors of a balance that is paused or cancelled, or that has no room for its item: ENOSPC, ENOTCONN, EINPROGRESS,
/// ECANCELED.
const STOPPED: [i32; 4] = [28, 107, 115, 125];
/// Errors of a resize: ENOSPC if the device is too full, EBUSY if something at the end of the device is being moved at
/// the same time.
const NOT_RESIZED: [i32; 2] = [28, 16];

/// Counts of a run: `begun` is the number of times that a balance was started, resumed or cancelled; `completed` is the
/// number of balances that ended regularly, which together moved `groups` block groups.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Balances {
    begun: u64,
    completed: u64,
    groups: u64,
}

/// Starts, resumes or cancels a balance at least twice, and continues until the other threads are done. A paused
/// balance may be left at the end.
pub(super) fn balance(target: &FsTarget, is_mixed: bool, shared: &Shared, seed: u64) -> Result<Balances> {
    let mut rng = Rng::new(seed ^ 0xba1a);
    let fs = target.fs();
    let mut done = Balances::default();
    while done.begun < 2 || !shared.stop.load(Ordering::SeqCst) {
        done.begun += 1;
        if fs.balance_status().is_some() && rng.one_in(3) {
            if let Err(error) = fs.cancel_balance() {
                ensure!(STOPPED.contains(&error.errno()), "cancelling a paused balance: {error}");
            }
            continue;
        }
        let item = random_balance(fs, is_mixed, &mut rng);
        let (what, result) = match fs.balance_status() {
            Some(status) => (status.item, fs.resume_balance(&Job::new())),
            None => (item.clone(), fs.balance(item, &Job::new())),
        };
        match result {
            Ok(report) => {
                ensure!(report.failures.is_empty(), "a balance fails: {:?}: {what:?}", report.failures);
                done.completed += 1;
                done.groups += report.counts.completed;
            }
            Err(error) => ensure!(STOPPED.contains(&error.errno()), "a balance fails: {error}: {what:?}"),
        }
    }
    Ok(done)
}

/// Pauses and cancels balances, and resizes the device, until the other threads are done.
pub(super) fn disturb(target: &FsTarget, len_bytes: u64, shared: &Shared, seed: u64) -> Result<()> {
    let mut rng = Rng::new(seed ^ 0xd157);
    let fs = target.fs();
    while !shared.stop.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(rng.below(60)));
        let done = match rng.below(6) {
            0..3 => fs.pause_balance(),
            3 => fs.cancel_balance(),
            _ => {
                let len = len_bytes - rng.below(2) * (len_bytes / 8);
                match fs.resize_device(DevId(1), len, &Job::new()) {
                    Err(error) if !NOT_RESIZED.contains(&error.errno()) => {
                        anyhow::bail!("a resize to {len} fails: {error}")
                    }
                    _ => Ok(()),
                }
            }
        };
        if let Err(error) = done {
            ensure!(STOPPED.contains(&error.errno()), "stopping a balance fails: {error}");
        }
    }
    Ok(())
}

/// Returns a balance of random types of block groups with random filters.
pub fn random_balance(fs: &Fs, is_mixed: bool, rng: &mut Rng) -> BalanceItem {
    let types = match rng.below(4) {
        0 => BalanceFlags::DATA | BalanceFlags::METADATA | BalanceFlags::SYSTEM,
        1 => BalanceFlags::DATA,
        2 => BalanceFlags::METADATA,
        _ => BalanceFlags::DATA | BalanceFlags::METADATA,
    };
    let types = if is_mixed { types | BalanceFlags::DATA | BalanceFlags::METADATA } else { types };
    let (data, system) = (random_args(fs, rng), random_args(fs, rng));
    let metadata = if is_mixed { data.clone() } else { random_args(fs, rng) };
    BalanceItem { flags: (types | BalanceFlags::FORCE).bits(), data, metadata, system, unused: [0; 4] }
}

fn random_args(fs: &Fs, rng: &mut Rng) -> BalanceArgs {
    let mut filters = BalanceFilters::empty();
    let mut args = BalanceArgs::NONE;
    let profiles = [BalanceArgs::SINGLE, BlockGroupFlags::DUP.bits()];
    let groups = fs.block_groups();
    if rng.one_in(8) {
        filters |= BalanceFilters::PROFILES;
        args.profiles = if rng.one_in(3) { profiles[0] | profiles[1] } else { *rng.pick(&profiles) };
    }
    match rng.below(6) {
        0 => {
            filters |= BalanceFilters::USAGE;
            args.usage_min = rng.below(102) as u32;
        }
        1 => {
            filters |= BalanceFilters::USAGE_RANGE;
            (args.usage_min, args.usage_max) = (rng.below(30) as u32, 30 + rng.below(71) as u32);
        }
        _ => {}
    }
    if rng.one_in(6) {
        filters |= BalanceFilters::DEVID;
        args.devid = 1;
        if rng.one_in(2) {
            filters |= BalanceFilters::DRANGE;
            args.pstart = rng.below(128 << 20);
            args.pend = args.pstart + rng.below(128 << 20);
        }
    }
    if rng.one_in(6) && !groups.is_empty() {
        filters |= BalanceFilters::VRANGE;
        let group = rng.pick(&groups);
        args.vstart = group.start.0.saturating_sub(rng.below(16 << 20));
        args.vend = group.start.0 + rng.below(32 << 20);
    }
    match rng.below(6) {
        0 => {
            filters |= BalanceFilters::LIMIT;
            args.limit_min = 1 + rng.below(3) as u32;
        }
        1 => {
            filters |= BalanceFilters::LIMIT_RANGE;
            (args.limit_min, args.limit_max) = (rng.below(2) as u32, 2 + rng.below(2) as u32);
        }
        _ => {}
    }
    if rng.one_in(8) {
        filters |= BalanceFilters::STRIPES_RANGE;
        (args.stripes_min, args.stripes_max) = (1 + rng.below(2) as u32, 2);
    }
    if rng.one_in(3) {
        filters |= BalanceFilters::CONVERT;
        args.target = *rng.pick(&profiles);
        if rng.one_in(2) {
            filters |= BalanceFilters::SOFT;
        }
    }
    args.flags = filters.bits();
    args
}
