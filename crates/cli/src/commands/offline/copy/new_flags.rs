//! Inode flags of files of a new filesystem: `--inode-flags LIST:PATH`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::bail;
use ubtrfs_format::item::InodeFlags;

use super::new_subvolume::path_below_source;
use crate::common::Shown;

/// Flags of a file, or of a directory and everything below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NewFlags {
    /// The path in the source and in the filesystem, as `/a/b`.
    path: Vec<u8>,
    flags: InodeFlags,
}

/// Parses the value of `--inode-flags`.
pub(crate) fn parse(text: &str) -> Result<NewFlags, String> {
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
pub(crate) fn check(all: &[NewFlags], source: &Path) -> anyhow::Result<()> {
    for new in all {
        let place = source.join(OsStr::from_bytes(&new.path[1..]));
        if std::fs::symlink_metadata(&place).is_err() {
            bail!("--inode-flags: {} does not exist; nothing was made", place.shown());
        }
    }
    Ok(())
}

/// The flags of a new file or directory at a path of the target: those of all given paths that lead to it.
pub(super) fn flags_at(all: &[NewFlags], path: &[u8], is_dir: bool) -> InodeFlags {
    let is_at = |new: &&NewFlags| {
        path.strip_prefix(&new.path[..]).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
    };
    let flags = all.iter().filter(is_at).fold(InodeFlags::empty(), |flags, new| flags | new.flags);
    // As on Linux, a directory has only the flag that new files take from it.
    if is_dir { flags & InodeFlags::NODATACOW } else { flags }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_those_of_the_path_and_of_directories_above() {
        let all = ["nodatacow:var/db", "nodatasum:/var/log/", "nodatasum,nodatacow:a"].map(|text| parse(text).unwrap());
        let both = InodeFlags::NODATACOW | InodeFlags::NODATASUM;
        for (path, is_dir, flags) in [
            ("/var", true, InodeFlags::empty()),
            ("/var/db", true, InodeFlags::NODATACOW),
            ("/var/db/x/y", false, both),
            ("/var/db2", false, InodeFlags::empty()),
            ("/var/log", true, InodeFlags::empty()),
            ("/var/log/x", false, InodeFlags::NODATASUM),
            ("/a", false, both),
        ] {
            assert_eq!(flags_at(&all, path.as_bytes(), is_dir), flags, "{path}");
        }
        assert!(parse("nodatacow").is_err() && parse("append:a").is_err() && parse("nodatacow:/").is_err());
    }
}
