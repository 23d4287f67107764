//! balance and overwrite: measure the cost of balance on a tree with snapshots, and the cost of quotas.
//!
//! `balance` copies a directory of this machine into a subvolume, takes snapshots of it and changes three files after
//! each snapshot, enables quotas if `--quotas` is given, and times one balance. `overwrite` overwrites each block of
//! the threads' files once, in random order, while a snapshot shares the old blocks.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};

use super::{Params, data};
use crate::record::MeasuredWork;
use crate::target::{Admin, BenchTarget};

const TREE: &[u8] = b"tree";
/// The number of files that change after each snapshot, in the directory `changed` of the tree.
const CHANGES: u64 = 3;
const COPY_BYTES: usize = 1 << 20;

pub(super) fn prepare<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<()> {
    let tree = target.make_subvolume(base, TREE)?;
    let mut left = params.bytes;
    copy_dir(target, &params.source, &tree, &mut left)?;
    let changed = target.mkdir(&tree, b"changed", 0o755)?;
    for number in 0..CHANGES {
        target.create_empty(&changed, &file_name(number), 0o644)?;
    }
    target.sync()?;
    for snapshot in 0..params.ops {
        target.snapshot(base, TREE, &snapshot_name(snapshot))?;
        for number in 0..CHANGES {
            let file = target.open(&changed, &file_name(number), true)?;
            target.write(&file, 0, format!("changed after snapshot {snapshot}").as_bytes())?;
        }
        target.sync()?;
    }
    if params.quotas {
        target.run_task(Admin::EnableQuotas)?;
    }
    Ok(())
}

pub(super) fn measure<T: BenchTarget>(target: &T, params: &Params) -> Result<MeasuredWork> {
    let mut work = MeasuredWork::new();
    let started = Instant::now();
    work.latencies.time(|| target.run_task(params.balance))?;
    work.timed = Some(started.elapsed());
    work.ops = 1;
    Ok(work)
}

/// Removes the subvolumes, which [`super::remove_all`] cannot remove.
pub(super) fn clean<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<()> {
    for number in 0..params.ops {
        target.delete_subvolume(base, &snapshot_name(number))?;
    }
    target.delete_subvolume(base, TREE)
}

pub(super) fn prepare_overwrite<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<()> {
    let tree = target.make_subvolume(base, TREE)?;
    data::seqwrite(target, params, &tree)?;
    target.sync()?;
    target.snapshot(base, TREE, &snapshot_name(0))?;
    if params.quotas {
        target.run_task(Admin::EnableQuotas)?;
    }
    Ok(())
}

pub(super) fn overwrite<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<MeasuredWork> {
    data::overwrite(target, params, &target.child(base, TREE)?)
}

fn file_name(number: u64) -> Vec<u8> {
    format!("file-{number}").into_bytes()
}

fn snapshot_name(number: u64) -> Vec<u8> {
    format!("snapshot-{number}").into_bytes()
}

/// Copies directories, files and symbolic links. `left` is the number of bytes of file data that may still be copied;
/// longer files are skipped.
fn copy_dir<T: BenchTarget>(target: &T, from: &Path, to: &T::Dir, left: &mut u64) -> Result<()> {
    let mut entries = fs::read_dir(from)
        .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
        .with_context(|| format!("cannot list {}", from.display()))?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let name = entry.file_name();
        let name = name.as_bytes();
        let metadata = entry.metadata()?;
        let mode = metadata.permissions().mode() & 0o777;
        if metadata.is_dir() {
            let dir = target.mkdir(to, name, mode)?;
            copy_dir(target, &entry.path(), &dir, left)?;
        } else if metadata.is_symlink() {
            target.symlink(to, name, fs::read_link(entry.path())?.as_os_str().as_bytes())?;
        } else if metadata.is_file() {
            let Some(rest) = left.checked_sub(metadata.size()) else { continue };
            *left = rest;
            copy_file(target, &entry.path(), to, name, mode)?;
        }
    }
    Ok(())
}

fn copy_file<T: BenchTarget>(target: &T, from: &Path, to: &T::Dir, name: &[u8], mode: u32) -> Result<()> {
    let mut source = File::open(from).with_context(|| format!("cannot open {}", from.display()))?;
    let file = target.create(to, name, mode)?;
    let mut buf = vec![0; COPY_BYTES];
    let mut offset = 0;
    loop {
        let count = source.read(&mut buf).with_context(|| format!("cannot read {}", from.display()))?;
        if count == 0 {
            return Ok(());
        }
        target.write(&file, offset, &buf[..count])?;
        offset += count as u64;
    }
}
