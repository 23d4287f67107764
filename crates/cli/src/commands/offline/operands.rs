//! Work on the files that the operands of a command name.
//!
//! Invariants:
//! - I1. The failure of one file is reported, and the work goes on with the next file. Then the exit status is 1.

use std::cell::Cell;
use std::process::ExitCode;

use ubtrfs_fs::{Error, Fs};

use super::pattern::expand;
use super::{ImageOptions, ImagePath, ImageUse, with_image};
use crate::common::each;

/// The meaning of patterns in the operands of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patterns {
    /// Takes them as names.
    AsNames,
    /// Works on the files that match, and fails if there are none.
    Match,
    /// Works on the files that match, if there are any.
    MatchAny,
}

/// Calls `work` for each file that the paths lead to (I1). Opens an image only once for consecutive paths in it.
pub(super) fn for_each_file(
    paths: &[ImagePath],
    options: &ImageOptions,
    usage: ImageUse,
    patterns: Patterns,
    mut work: impl FnMut(&Fs, &ImagePath) -> anyhow::Result<()>,
) -> ExitCode {
    let status = Cell::new(ExitCode::SUCCESS);
    let note = |done: ExitCode| status.set(worst(status.get(), done));
    let opened = each(paths.chunk_by(|one, other| one.image == other.image), |paths| {
        with_image(&paths[0].image, options, usage, |fs| {
            note(each(paths, |path| {
                let files = match patterns {
                    Patterns::AsNames => vec![path.clone()],
                    Patterns::Match => expand(fs, path)?,
                    Patterns::MatchAny => expand(fs, path).or_else(|error| match error.downcast_ref() {
                        Some(Error::NotFound) => Ok(Vec::new()),
                        _ => Err(error),
                    })?,
                };
                note(each(&files, |file| work(fs, file)));
                Ok(())
            }));
            Ok(())
        })
    });
    worst(status.get(), opened)
}

/// The exit status of two works: that of the first failure.
pub(super) fn worst(one: ExitCode, other: ExitCode) -> ExitCode {
    if one == ExitCode::SUCCESS { other } else { one }
}
