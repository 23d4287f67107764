//! Checks whether a caller may list, search or change a directory, or read a file below one. The server must check this
//! permission, because the kernel does not: for an ioctl, it suffices that the directory is open for reading.
//!
//! The first matching rule of POSIX.1e applies: the owner's bits, the entry of a named user, the group entries (one
//! entry must grant all wanted bits), the bits of others. The mask limits every entry except owner and others.

use ubtrfs_fs::{Attr, Error, Fs, InodeId, Result};

use crate::caller::CommandCaller;

/// Returns the directory's attributes if the caller may add and remove names in it.
pub(crate) fn may_change_names(fs: &Fs, caller: &CommandCaller, dir: InodeId) -> Result<Attr> {
    may(fs, caller, dir, WRITE_AND_SEARCH, caller.overrides_modes())
}

/// Returns the directory's attributes if the caller may list the directory and look up names in it.
pub(crate) fn may_read_names(fs: &Fs, caller: &CommandCaller, dir: InodeId) -> Result<Attr> {
    may(fs, caller, dir, READ_AND_SEARCH, caller.reads_all_directories())
}

/// Whether the caller may read a file, or list a directory and look up names in it.
pub(crate) fn can_read(fs: &Fs, caller: &CommandCaller, id: InodeId) -> Result<bool> {
    let attr = fs.getattr(id)?;
    let wanted = if attr.is_dir() { READ_AND_SEARCH } else { READ };
    Ok(caller.reads_all_directories() || is_granted(fs, caller, &attr, wanted)?)
}

fn may(fs: &Fs, caller: &CommandCaller, dir: InodeId, wanted: u32, by_capability: bool) -> Result<Attr> {
    let attr = fs.getattr(dir)?;
    if !attr.is_dir() {
        return Err(Error::NotDirectory);
    }
    match by_capability || is_granted(fs, caller, &attr, wanted)? {
        true => Ok(attr),
        false => Err(Error::AccessDenied),
    }
}

fn is_granted(fs: &Fs, caller: &CommandCaller, attr: &Attr, wanted: u32) -> Result<bool> {
    let acl = if fs.options().acl {
        match fs.getxattr(attr.id, ACCESS_ACL) {
            Ok(acl) => Some(acl),
            Err(Error::NoData) => None,
            Err(error) => return Err(error),
        }
    } else {
        None
    };
    let granted = match acl {
        Some(acl) => by_acl(&acl, attr, wanted, caller.uid(), |gid| caller.is_in_group(gid)),
        None => by_mode(attr, caller.uid(), |gid| caller.is_in_group(gid)),
    };
    Ok(granted & wanted == wanted)
}

/// The bits r, w, x that the mode grants.
fn by_mode(attr: &Attr, uid: u32, in_group: impl Fn(u32) -> bool) -> u32 {
    if uid == attr.uid {
        attr.mode >> 6
    } else if in_group(attr.gid) {
        attr.mode >> 3
    } else {
        attr.mode
    }
}

/// The bits r, w, x that an access ACL grants. A missing entry grants nothing, and a missing mask limits nothing.
///
/// | offset | size | field                                 |
/// |--------|------|---------------------------------------|
/// | 0      | 4    | version, 2                            |
/// | 4 + 8n | 2    | tag                                   |
/// | 6 + 8n | 2    | permissions                           |
/// | 8 + 8n | 4    | user or group, if the tag has one     |
fn by_acl(acl: &[u8], attr: &Attr, wanted: u32, uid: u32, in_group: impl Fn(u32) -> bool) -> u32 {
    let mut entries = Vec::new();
    for entry in acl.get(4..).unwrap_or_default().chunks_exact(8) {
        let [tag0, tag1, perm0, perm1, id @ ..] = entry else { return 0 };
        let id = id.first_chunk().map_or(0, |id| u32::from_le_bytes(*id));
        entries.push((u16::from_le_bytes([*tag0, *tag1]), u32::from(u16::from_le_bytes([*perm0, *perm1])), id));
    }
    let of_tag = |wanted: u16| entries.iter().find(|(tag, ..)| *tag == wanted).map(|(_, perm, _)| *perm);
    let mask = of_tag(TAG_MASK).unwrap_or(!0);
    if uid == attr.uid {
        return of_tag(TAG_USER_OBJ).unwrap_or(0);
    }
    if let Some((_, perm, _)) = entries.iter().find(|(tag, _, id)| *tag == TAG_USER && *id == uid) {
        return perm & mask;
    }
    let mut of_groups = None;
    for (tag, perm, id) in &entries {
        let is_member = match *tag {
            TAG_GROUP_OBJ => in_group(attr.gid),
            TAG_GROUP => in_group(*id),
            _ => false,
        };
        if is_member {
            if perm & mask & wanted == wanted {
                return perm & mask;
            }
            of_groups = Some(0);
        }
    }
    of_groups.unwrap_or_else(|| of_tag(TAG_OTHER).unwrap_or(0))
}

const WRITE_AND_SEARCH: u32 = 3;
const READ_AND_SEARCH: u32 = 5;
const READ: u32 = 4;
const ACCESS_ACL: &[u8] = b"system.posix_acl_access";

const TAG_USER_OBJ: u16 = 0x01;
const TAG_USER: u16 = 0x02;
const TAG_GROUP_OBJ: u16 = 0x04;
const TAG_GROUP: u16 = 0x08;
const TAG_MASK: u16 = 0x10;
const TAG_OTHER: u16 = 0x20;

#[cfg(test)]
mod tests {
    use ubtrfs_format::item::Timespec;
    use ubtrfs_format::{Generation, Ino, RootId};

    use super::*;

    const WANTED: u32 = WRITE_AND_SEARCH;

    fn dir(mode: u32) -> Attr {
        let zero = Timespec::default();
        Attr {
            id: InodeId { root: RootId::FS_TREE, ino: Ino(257) },
            size: 0,
            blocks: 0,
            mode: 0o040_000 | mode,
            nlink: 1,
            uid: 1000,
            gid: 100,
            rdev: 0,
            atime: zero,
            mtime: zero,
            ctime: zero,
            otime: zero,
            flags: 0,
            generation: Generation(1),
            blocks_are_final: true,
            blksize: 4096,
        }
    }

    fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut acl = 2u32.to_le_bytes().to_vec();
        for (tag, perm, id) in entries {
            acl.extend([tag.to_le_bytes(), perm.to_le_bytes()].concat());
            acl.extend(id.to_le_bytes());
        }
        acl
    }

    #[test]
    fn the_first_class_that_fits_decides() {
        let granted =
            |mode, uid, groups: &[u32]| by_mode(&dir(mode), uid, |gid| groups.contains(&gid)) & WANTED == WANTED;
        assert!(granted(0o700, 1000, &[]));
        assert!(!granted(0o077, 1000, &[100]));
        assert!(granted(0o070, 1, &[100]) && !granted(0o070, 1, &[7]));
        assert!(granted(0o003, 1, &[7]) && !granted(0o003, 1, &[100]));
        assert!(!granted(0o222, 1, &[]) && !granted(0o555, 1000, &[]));
    }

    #[test]
    fn the_mask_limits_named_users_and_groups() {
        let list = [
            (TAG_USER_OBJ, 7, !0),
            (TAG_USER, 7, 5),
            (TAG_GROUP_OBJ, 0, !0),
            (TAG_GROUP, 3, 77),
            (TAG_MASK, 3, !0),
            (TAG_OTHER, 7, !0),
        ];
        let granted = |list: &[(u16, u16, u32)], uid, groups: &[u32]| {
            by_acl(&acl(list), &dir(0o737), WANTED, uid, |gid| groups.contains(&gid)) & WANTED == WANTED
        };
        assert!(granted(&list, 1000, &[]) && granted(&list, 5, &[]));
        assert!(granted(&list, 1, &[77, 100]), "one group is enough");
        assert!(!granted(&list, 1, &[100]), "a group that does not grant it keeps others' bits away");
        assert!(granted(&list, 1, &[]));
        let mut narrow = list;
        narrow[4].1 = 1;
        assert!(!granted(&narrow, 5, &[]) && !granted(&narrow, 1, &[77]) && granted(&narrow, 1000, &[]));
        assert_eq!(by_acl(&[2, 0, 0], &dir(0o777), WANTED, 1, |_| true), 0);
    }
}
