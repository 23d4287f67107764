//! Inode flags of files of a new filesystem.

use ubtrfs_format::item::InodeFlags;

/// Flags of a file, or of a directory and everything below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewFlags {
    /// The path in the source and in the filesystem, as `/a/b`.
    pub path: Vec<u8>,
    /// The flags.
    pub flags: InodeFlags,
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
        let both = InodeFlags::NODATACOW | InodeFlags::NODATASUM;
        let all = [("/var/db", both), ("/var/log", InodeFlags::NODATASUM), ("/a", both)]
            .map(|(path, flags)| NewFlags { path: path.into(), flags });
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
    }
}
