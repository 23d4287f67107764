//! Directories of a source that become subvolumes of a new filesystem: `--subvol [rw|ro|default|default-ro:]PATH`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, bail};
use ubtrfs_fs::Fs;

use crate::commands::offline::join;
use crate::common::Shown;

/// A directory that becomes a subvolume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CopiedSubvolume {
    /// Its path in the source and in the filesystem, as `/a/b`.
    path: Vec<u8>,
    is_read_only: bool,
    is_default: bool,
}

/// Parses the value of `--subvol`.
pub(crate) fn parse(text: &str) -> Result<CopiedSubvolume, String> {
    let kinds = [("rw:", false, false), ("ro:", true, false), ("default:", false, true), ("default-ro:", true, true)];
    let found = kinds.iter().find_map(|(name, ro, default)| Some((text.strip_prefix(name)?, *ro, *default)));
    let (path, is_read_only, is_default) = found.unwrap_or((text, false, false));
    Ok(CopiedSubvolume { path: path_below_source(path)?, is_read_only, is_default })
}

/// The path in the source and in the filesystem, as `/a/b`, that an option names.
pub(super) fn path_below_source(text: &str) -> Result<Vec<u8>, String> {
    let names: Vec<&[u8]> =
        text.as_bytes().split(|byte| *byte == b'/').filter(|name| !matches!(*name, b"" | b".")).collect();
    if names.is_empty() || names.contains(&&b".."[..]) {
        return Err(format!("'{text}' names nothing below --rootdir"));
    }
    Ok(join(&names))
}

/// Fails unless each path is a directory of the source, is given once, and at most one is the default.
pub(crate) fn check(subvolumes: &[CopiedSubvolume], source: &Path) -> anyhow::Result<()> {
    for (at, new) in subvolumes.iter().enumerate() {
        let shown = OsStr::from_bytes(&new.path).shown();
        let place = source.join(OsStr::from_bytes(&new.path[1..]));
        if !std::fs::symlink_metadata(&place).is_ok_and(|found| found.is_dir()) {
            bail!("--subvol {shown}: {} is not a directory; nothing was made", place.shown());
        }
        if subvolumes[..at].iter().any(|other| other.path == new.path) {
            bail!("--subvol {shown} is given twice");
        }
    }
    if subvolumes.iter().filter(|new| new.is_default).count() > 1 {
        bail!("several --subvol are the default; choose one");
    }
    Ok(())
}

impl CopiedSubvolume {
    /// Whether a path of the target is this subvolume.
    pub(super) fn is_at(&self, path: &[u8]) -> bool {
        self.path == path
    }

    /// Sets what waits for the end of the copy: a default subvolume, and read-only flags.
    fn finish(&self, fs: &Fs) -> anyhow::Result<()> {
        let names: Vec<&[u8]> = self.path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).collect();
        let id = names.iter().try_fold(fs.root(), |dir, name| fs.lookup(dir, name).map(|found| found.id))?;
        if self.is_read_only {
            fs.set_subvolume_read_only(id.root, true)?;
        }
        if self.is_default {
            fs.set_default_subvolume(id.root)?;
        }
        Ok(())
    }
}

/// Finishes the subvolumes when everything is copied.
pub(super) fn finish(subvolumes: &[CopiedSubvolume], fs: &Fs) -> anyhow::Result<()> {
    subvolumes.iter().try_for_each(|new| {
        let shown = OsStr::from_bytes(&new.path).shown();
        new.finish(fs).with_context(|| format!("cannot finish the subvolume {shown}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_paths_are_those_of_mkfs_btrfs() {
        let new =
            |path: &str, is_read_only, is_default| CopiedSubvolume { path: path.into(), is_read_only, is_default };
        assert_eq!(parse("home"), Ok(new("/home", false, false)));
        assert_eq!(parse("rw:/a//b/"), Ok(new("/a/b", false, false)));
        assert_eq!(parse("ro:usr"), Ok(new("/usr", true, false)));
        assert_eq!(parse("default:@"), Ok(new("/@", false, true)));
        assert_eq!(parse("default-ro:./x"), Ok(new("/x", true, true)));
        assert!(parse("a/../b").is_err() && parse("").is_err() && parse("ro:/").is_err());
    }
}
