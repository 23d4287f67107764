//! Walks of a directory tree of an image.
//!
//! Invariants:
//! - I1. The failure of one file is reported, and the walk goes on. Then the exit status is 1.
//! - I2. A walk visits each directory once, also in a crafted image.
//! - I3. Symbolic links are not followed.

use std::process::ExitCode;

use ubtrfs_fs::{Attr, Fs, InodeId};

use super::operands::worst;
use super::text::printable;
use super::{DirName, ImagePath, VisitedDirs, push_name, read_names};
use crate::common::{Shown, print_error};

/// A file that a walk visits.
pub(super) struct Visited<'w> {
    /// The path in the image.
    pub(super) path: &'w [u8],
    pub(super) attr: &'w Attr,
    /// Number of directories between the start of the walk and the file; 0 for the start.
    pub(super) depth: usize,
}

/// Calls `visit` for a file, and for the files below it down to `max_depth`, a directory before its content. An outer
/// error of `visit` ends the walk. An inner error is that of one file, with which the command could not do `what` (I1).
/// The depth is limited by memory, not by the stack.
pub(super) fn walk(
    fs: &Fs,
    start: (&ImagePath, Attr),
    max_depth: usize,
    what: &str,
    mut visit: impl FnMut(&Visited<'_>) -> anyhow::Result<anyhow::Result<()>>,
) -> anyhow::Result<ExitCode> {
    // Each path shares the buffer `path`: paths of their own would take memory that grows with the square of the depth.
    struct PendingEntry {
        len: usize,
        depth: usize,
        name: Vec<u8>,
        id: InodeId,
    }
    let (at, attr) = start;
    let mut path = at.path.clone();
    let mut visited = VisitedDirs::default();
    let mut status = ExitCode::SUCCESS;
    let mut todo = Vec::new();
    let failed = |path: &[u8], error: anyhow::Error| {
        let here = format!("cannot {what} {}:{}", at.image.shown(), printable(path));
        print_error(&error.context(here))
    };
    let mut next: Option<(usize, ubtrfs_fs::Result<Attr>)> = Some((0, Ok(attr)));
    while let Some((depth, found)) = next {
        match found {
            Ok(attr) => {
                let done = visit(&Visited { path: &path, attr: &attr, depth })?;
                let entered = match attr.is_dir() && depth < max_depth {
                    true => visited.pass(attr.id).and_then(|()| Ok(read_names(fs, attr.id)?)),
                    false => Ok(Vec::new()),
                };
                let names = entered.unwrap_or_else(|error| {
                    status = worst(status, failed(&path, error));
                    Vec::new()
                });
                let len = path.len();
                let child = |DirName { name, id }| PendingEntry { len, depth: depth + 1, name, id };
                todo.extend(names.into_iter().rev().map(child));
                if let Err(error) = done {
                    status = worst(status, failed(&path, error));
                }
            }
            Err(error) => status = worst(status, failed(&path, error.into())),
        }
        next = todo.pop().map(|PendingEntry { len, depth, name, id }| {
            path.truncate(len);
            push_name(&mut path, &name);
            (depth, fs.getattr(id))
        });
    }
    Ok(status)
}
