//! Patterns in the paths of images: `*`, `?` and `[...]`, as in a shell ([`ubtrfs_archive::glob`]).
//!
//! Invariants:
//! - I1. A name that exists literally is not a pattern: `a*` means the file `a*` if there is one. On the way to a file,
//!   it must be a directory.
//! - I2. A pattern matches names of one directory. `*` matches no slash, and no dot at the start of a name.
//! - I3. A path with patterns that leads to no file is an error.

use anyhow::{Context, bail};
use ubtrfs_archive::glob::matches;
use ubtrfs_fs::{Error, Fs};

use super::{ImagePath, child_path, read_names};

/// Whether a path or name has characters of a pattern.
pub(super) fn is_pattern(path: &[u8]) -> bool {
    path.iter().any(|byte| b"*?[".contains(byte))
}

/// Returns the paths that a path with patterns leads to, in the order of their names. A path without patterns is
/// returned as it is, even if it leads to no file.
pub(super) fn expand(fs: &Fs, at: &ImagePath) -> anyhow::Result<Vec<ImagePath>> {
    if !is_pattern(&at.path) || !is_absent(&fs.lookup_path(&at.path, false)) {
        return Ok(vec![at.clone()]);
    }
    let mut found = vec![b"/".to_vec()];
    let mut is_certain = true;
    let mut names = at.path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).peekable();
    while let Some(name) = names.next() {
        let may_be_file = names.peek().is_none() && !at.path.ends_with(b"/");
        let mut next = Vec::new();
        for dir in found {
            match is_pattern(name) {
                true => add_matches(fs, &dir, (name, may_be_file), &mut next).with_context(|| at.to_string())?,
                false => next.push(child_path(&dir, name)),
            }
            if next.len() > MAX_MATCHES {
                bail!("more than {MAX_MATCHES} names match {at}; choose a pattern that matches less");
            }
        }
        is_certain &= !is_pattern(name);
        if !is_certain {
            next.retain(|path| !is_absent(&fs.lookup_path(path, false)));
        }
        found = next;
    }
    if at.path.ends_with(b"/") {
        found.iter_mut().for_each(|path| path.push(b'/'));
        found.retain(|path| !is_absent(&fs.lookup_path(path, true)));
    }
    if found.is_empty() {
        return Err(Error::NotFound).with_context(|| format!("no name matches {at}"));
    }
    Ok(found.into_iter().map(|path| ImagePath { image: at.image.clone(), path }).collect())
}

/// Whether a lookup found out that there is no such file. The work on the file reports any other failure.
fn is_absent<T>(found: &ubtrfs_fs::Result<T>) -> bool {
    matches!(found, Err(Error::NotFound | Error::NotDirectory))
}

/// Adds the paths of the names in a directory that match (I1, I2). A path that leads to no directory adds nothing.
fn add_matches(
    fs: &Fs,
    dir: &[u8],
    (pattern, may_be_file): (&[u8], bool),
    found: &mut Vec<Vec<u8>>,
) -> ubtrfs_fs::Result<()> {
    let attr = match fs.lookup_path(dir, true) {
        Ok(attr) if attr.is_dir() => attr,
        Ok(_) | Err(Error::NotFound | Error::NotDirectory) => return Ok(()),
        Err(error) => return Err(error),
    };
    let literal = child_path(dir, pattern);
    if fs.lookup_path(&literal, !may_be_file).is_ok_and(|attr| may_be_file || attr.is_dir()) {
        found.push(literal);
        return Ok(());
    }
    let is_hidden = |name: &[u8]| name.starts_with(b".") && !pattern.starts_with(b".");
    let names = read_names(fs, attr.id)?.into_iter().map(|entry| entry.name);
    found.extend(names.filter(|name| !is_hidden(name) && matches(pattern, name)).map(|name| child_path(dir, &name)));
    Ok(())
}

/// The most paths that one path with patterns may lead to. In a crafted image, a directory may be inside of itself, so
/// several patterns in a path could match without an end.
const MAX_MATCHES: usize = 1 << 20;
