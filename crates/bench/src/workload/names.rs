//! fsmark, rm and find: work on names and inodes, without data.

use anyhow::Result;

use super::{Params, in_threads};
use crate::record::Work;
use crate::target::{Kind, Target};

/// Makes empty files. If there is one directory per thread, each thread uses only its own, as in `fs_mark -S
/// 0 -s 0`.
pub(super) fn fsmark<T: Target>(target: &T, params: &Params, base: &T::Dir) -> Result<Work> {
    let dirs = (0..params.dirs)
        .map(|index| target.mkdir(base, format!("{index:03}").as_bytes(), 0o755))
        .collect::<Result<Vec<_>>>()?;
    in_threads(params.threads, |thread| {
        let mut work = Work::new();
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
pub(super) fn rm<T: Target>(target: &T, dir: &T::Dir) -> Result<Work> {
    let mut work = Work::new();
    // Each directory has two steps: `Enter` removes its files and pushes its subdirectories, and `Remove` later removes
    // the empty directory.
    enum Step<D> {
        Enter(D),
        Remove(D, Vec<u8>),
    }
    let mut steps = vec![Step::Enter(dir.clone())];
    while let Some(step) = steps.pop() {
        match step {
            Step::Enter(dir) => {
                for (name, kind) in target.list(&dir)? {
                    if kind == Kind::Dir {
                        let child = target.child(&dir, &name)?;
                        steps.push(Step::Remove(dir.clone(), name));
                        steps.push(Step::Enter(child));
                    } else {
                        work.latencies.time(|| target.unlink(&dir, &name))?;
                        work.ops += 1;
                    }
                }
            }
            Step::Remove(dir, name) => {
                work.latencies.time(|| target.rmdir(&dir, &name))?;
                work.ops += 1;
            }
        }
    }
    Ok(work)
}

/// Walks everything below `dir` and stats every name, as `find -size` and `ls -lR` do.
pub(super) fn find<T: Target>(target: &T, dir: &T::Dir) -> Result<Work> {
    let mut work = Work::new();
    let mut dirs = vec![dir.clone()];
    while let Some(dir) = dirs.pop() {
        for (name, kind) in target.list(&dir)? {
            work.latencies.time(|| target.stat(&dir, &name))?;
            work.ops += 1;
            if kind == Kind::Dir {
                dirs.push(target.child(&dir, &name)?);
            }
        }
    }
    Ok(work)
}
