//! Options of `mkfs --rootdir`: `--subvol [rw|ro|default|default-ro:]PATH`, `--inode-flags LIST:PATH`, and
//! `--map-users FROM:TO:COUNT`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::bail;
use ubtrfs_archive::copy::{CopiedSubvolume, IdRange, NewFlags};
use ubtrfs_format::item::InodeFlags;

use super::join;
use crate::common::Shown;

/// Parses the value of `--subvol`.
pub(crate) fn parse_subvolume(text: &str) -> Result<CopiedSubvolume, String> {
    let kinds = [("rw:", false, false), ("ro:", true, false), ("default:", false, true), ("default-ro:", true, true)];
    let found = kinds.iter().find_map(|(name, ro, default)| Some((text.strip_prefix(name)?, *ro, *default)));
    let (path, is_read_only, is_default) = found.unwrap_or((text, false, false));
    Ok(CopiedSubvolume { path: path_below_source(path)?, is_read_only, is_default })
}

/// Fails unless each path is a directory of the source, is given once, and at most one is the default.
pub(crate) fn check_subvolumes(subvolumes: &[CopiedSubvolume], source: &Path) -> anyhow::Result<()> {
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

/// Parses the value of `--inode-flags`.
pub(crate) fn parse_flags(text: &str) -> Result<NewFlags, String> {
    let (list, path) = text.split_once(':').ok_or_else(|| format!("'{text}' has no path; write FLAGS:PATH"))?;
    let mut flags = InodeFlags::empty();
    for name in list.split(',') {
        flags |= match name {
            // Linux writes no checksums of data that it overwrites.
            "nodatacow" => InodeFlags::NODATACOW | InodeFlags::NODATASUM,
            "nodatasum" => InodeFlags::NODATASUM,
            _ => return Err(format!("'{name}' is not a flag that can be set; give nodatacow or nodatasum")),
        };
    }
    Ok(NewFlags { path: path_below_source(path)?, flags })
}

/// Fails unless each path exists in the source.
pub(crate) fn check_flags(all: &[NewFlags], source: &Path) -> anyhow::Result<()> {
    for new in all {
        let place = source.join(OsStr::from_bytes(&new.path[1..]));
        if std::fs::symlink_metadata(&place).is_err() {
            bail!("--inode-flags: {} does not exist; nothing was made", place.shown());
        }
    }
    Ok(())
}

/// Parses `FROM:TO:COUNT`.
pub(crate) fn parse_range(text: &str) -> Result<IdRange, String> {
    let numbers: Option<Vec<u32>> = text.split(':').map(|number| number.parse().ok()).collect();
    let range = match numbers.as_deref() {
        Some(&[from, to, count]) => Some(IdRange { from, to, count }),
        _ => None,
    };
    // The highest number is not an id, because it means "do not change" to chown(2).
    let is_valid = |range: &IdRange| {
        let ends_below = |start: u32| start.checked_add(range.count).is_some();
        range.count > 0 && ends_below(range.from) && ends_below(range.to)
    };
    range
        .filter(is_valid)
        .ok_or_else(|| format!("'{text}' is not a range of ids; write FROM:TO:COUNT, for example 1000:0:1"))
}

/// The path in the source and in the filesystem, as `/a/b`, that an option names.
fn path_below_source(text: &str) -> Result<Vec<u8>, String> {
    let names: Vec<&[u8]> =
        text.as_bytes().split(|byte| *byte == b'/').filter(|name| !matches!(*name, b"" | b".")).collect();
    if names.is_empty() || names.contains(&&b".."[..]) {
        return Err(format!("'{text}' names nothing below --rootdir"));
    }
    Ok(join(&names))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_and_paths_are_those_of_mkfs_btrfs() {
        let new =
            |path: &str, is_read_only, is_default| CopiedSubvolume { path: path.into(), is_read_only, is_default };
        assert_eq!(parse_subvolume("home"), Ok(new("/home", false, false)));
        assert_eq!(parse_subvolume("rw:/a//b/"), Ok(new("/a/b", false, false)));
        assert_eq!(parse_subvolume("ro:usr"), Ok(new("/usr", true, false)));
        assert_eq!(parse_subvolume("default:@"), Ok(new("/@", false, true)));
        assert_eq!(parse_subvolume("default-ro:./x"), Ok(new("/x", true, true)));
        assert!(parse_subvolume("a/../b").is_err() && parse_subvolume("").is_err() && parse_subvolume("ro:/").is_err());
    }

    #[test]
    fn flags_and_ranges_are_parsed() {
        let both = InodeFlags::NODATACOW | InodeFlags::NODATASUM;
        let new = |path: &str, flags| NewFlags { path: path.into(), flags };
        assert_eq!(parse_flags("nodatacow:var/db"), Ok(new("/var/db", both)));
        assert_eq!(parse_flags("nodatasum:/var/log/"), Ok(new("/var/log", InodeFlags::NODATASUM)));
        assert_eq!(parse_flags("nodatasum,nodatacow:a"), Ok(new("/a", both)));
        assert!(parse_flags("nodatacow").is_err() && parse_flags("append:a").is_err());
        assert!(parse_flags("nodatacow:/").is_err());
        assert_eq!(parse_range("100000:1:65535"), Ok(IdRange { from: 100_000, to: 1, count: 65_535 }));
        for text in ["", "1:2", "1:2:3:4", "1:2:0", "a:0:1", "4294967295:0:1", "0:4294967295:1", "-1:0:1"] {
            assert!(parse_range(text).is_err(), "{text}");
        }
    }
}
