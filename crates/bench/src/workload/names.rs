//! fsmark, rm and find: work on names and inodes, without data. readtree and reread: read all files of a tree.

use std::time::Instant;

use anyhow::Result;

use super::{Params, in_threads};
use crate::record::MeasuredWork;
use crate::target::{BenchTarget, EntryKind};

/// Makes empty files. If there is one directory per thread, each thread uses only its own, as in `fs_mark -S
/// 0 -s 0`.
pub(super) fn fsmark<T: BenchTarget>(target: &T, params: &Params, base: &T::Dir) -> Result<MeasuredWork> {
    let dirs = (0..params.dirs)
        .map(|index| target.mkdir(base, format!("{index:03}").as_bytes(), 0o755))
        .collect::<Result<Vec<_>>>()?;
    in_threads(params.threads, |thread| {
        let mut work = MeasuredWork::new();
        for index in (thread..params.files).step_by(params.threads as usize) {
            let dir = &dirs[(index % params.dirs) as usize];
            let name = format!("file-{index:010}");
            work.latencies.time(|| target.create_empty(dir, name.as_bytes(), 0o644))?;
            work.ops += 1;
        }
        Ok(work)
    })
}

/// Removes everything in `dir`, depth first, as `rm -r` does.
pub(super) fn rm<T: BenchTarget>(target: &T, dir: &T::Dir) -> Result<MeasuredWork> {
    let mut work = MeasuredWork::new();
    // Each directory has two steps: `Enter` removes its files and pushes its subdirectories, and `Remove` later removes
    // the empty directory.
    enum RemovalStep<D> {
        Enter(D),
        Remove(D, Vec<u8>),
    }
    let mut steps = vec![RemovalStep::Enter(dir.clone())];
    while let Some(step) = steps.pop() {
        match step {
            RemovalStep::Enter(dir) => {
                for (name, kind) in target.list(&dir)? {
                    if kind == EntryKind::Dir {
                        let child = target.child(&dir, &name)?;
                        steps.push(RemovalStep::Remove(dir.clone(), name));
                        steps.push(RemovalStep::Enter(child));
                    } else {
                        work.latencies.time(|| target.unlink(&dir, &name))?;
                        work.ops += 1;
                    }
                }
            }
            RemovalStep::Remove(dir, name) => {
                work.latencies.time(|| target.rmdir(&dir, &name))?;
                work.ops += 1;
            }
        }
    }
    Ok(work)
}

/// Walks everything below `dir` and stats every name, as `find -size` and `ls -lR` do.
pub(super) fn find<T: BenchTarget>(target: &T, dir: &T::Dir) -> Result<MeasuredWork> {
    let mut work = MeasuredWork::new();
    let mut dirs = vec![dir.clone()];
    while let Some(dir) = dirs.pop() {
        for (name, kind) in target.list(&dir)? {
            work.latencies.time(|| target.stat(&dir, &name))?;
            work.ops += 1;
            if kind == EntryKind::Dir {
                dirs.push(target.child(&dir, &name)?);
            }
        }
    }
    Ok(work)
}

/// Reads every file below `dir`, in the order of the names, as `tar c` does.
pub(super) fn read_tree<T: BenchTarget>(target: &T, dir: &T::Dir) -> Result<MeasuredWork> {
    let mut work = MeasuredWork::new();
    let mut dirs = vec![dir.clone()];
    let mut buf = vec![0; READ_BYTES];
    while let Some(dir) = dirs.pop() {
        let mut names = target.list(&dir)?;
        names.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        for (name, kind) in names {
            if kind == EntryKind::Dir {
                dirs.push(target.child(&dir, &name)?);
                continue;
            }
            // Opening a symbolic link fails; the archives have few of them.
            let read = work.latencies.time(|| -> Result<u64> {
                let Ok(file) = target.open(&dir, &name, false) else { return Ok(0) };
                let mut at = 0;
                loop {
                    match target.read(&file, at, &mut buf)? as u64 {
                        0 => return Ok(at),
                        len => at += len,
                    }
                }
            })?;
            work.ops += 1;
            work.bytes += read;
        }
    }
    Ok(work)
}

/// Reads every file below `dir` once, and then again [`REREADS`] times. The first time is not measured.
pub(super) fn reread<T: BenchTarget>(target: &T, dir: &T::Dir) -> Result<MeasuredWork> {
    read_tree(target, dir)?;
    let mut all = MeasuredWork::new();
    let started = Instant::now();
    for _ in 0..REREADS {
        all.merge(&read_tree(target, dir)?);
    }
    all.timed = Some(started.elapsed());
    Ok(all)
}

const READ_BYTES: usize = 64 << 10;
const REREADS: usize = 4;
