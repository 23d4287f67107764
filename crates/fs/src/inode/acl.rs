//! POSIX ACLs as stored in attributes, and their relation to the mode. The checks of accesses are elsewhere: the kernel
//! checks requests, and `access.rs` of crate `ubtrfs-control` checks commands.
//!
//! Layout (Linux's `posix_acl_xattr.h`; btrfs stores the same bytes): version u32 = 2, then entries of tag u16,
//! permissions u16, id u32.

use crate::error::{Error, Result};

/// The attribute of the access ACL.
pub(crate) const ACCESS: &[u8] = b"system.posix_acl_access";
/// The attribute of the default ACL.
pub(crate) const DEFAULT: &[u8] = b"system.posix_acl_default";

/// A valid ACL. The entries of an ACL are in the order owner, users, group, groups, mask, others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Acl {
    entries: Vec<AclEntry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AclEntry {
    tag: u16,
    permissions: u16,
    id: u32,
}

impl Acl {
    /// Decodes and validates an attribute. Returns `None` for an ACL without entries, which means no ACL.
    pub(crate) fn parse(value: &[u8]) -> Result<Option<Self>> {
        let invalid = Err(Error::InvalidArgument("not a valid ACL"));
        let Some((version, rest)) = value.split_first_chunk::<4>() else { return invalid };
        if u32::from_le_bytes(*version) != VERSION {
            return Err(Error::NotSupported("this version of ACL"));
        }
        let (chunks, []) = rest.as_chunks::<ENTRY_SIZE>() else { return invalid };
        let entries: Vec<_> = chunks
            .iter()
            .map(|[t0, t1, p0, p1, i0, i1, i2, i3]| AclEntry {
                tag: u16::from_le_bytes([*t0, *t1]),
                permissions: u16::from_le_bytes([*p0, *p1]),
                id: u32::from_le_bytes([*i0, *i1, *i2, *i3]),
            })
            .collect();
        if entries.is_empty() {
            return Ok(None);
        }
        let acl = Self { entries };
        if acl.is_valid() { Ok(Some(acl)) } else { invalid }
    }

    /// The attribute's bytes.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.entries.len().saturating_mul(ENTRY_SIZE).saturating_add(4));
        out.extend_from_slice(&VERSION.to_le_bytes());
        for entry in &self.entries {
            out.extend_from_slice(&entry.tag.to_le_bytes());
            out.extend_from_slice(&entry.permissions.to_le_bytes());
            out.extend_from_slice(&if named(entry.tag) { entry.id } else { u32::MAX }.to_le_bytes());
        }
        out
    }

    /// Whether the ACL has one entry each for owner, owning group and others, has a mask if users or groups are named,
    /// and is in the right order.
    fn is_valid(&self) -> bool {
        let mut last = 0;
        for entry in &self.entries {
            let repeatable = named(entry.tag);
            let known = matches!(entry.tag, USER_OBJ | USER | GROUP_OBJ | GROUP | MASK | OTHER);
            if !known || entry.permissions & !7 != 0 || (named(entry.tag) && entry.id == u32::MAX) {
                return false;
            }
            if entry.tag < last || (entry.tag == last && !repeatable) {
                return false;
            }
            last = entry.tag;
        }
        let has = |tag| self.entries.iter().any(|entry| entry.tag == tag);
        has(USER_OBJ) && has(GROUP_OBJ) && has(OTHER) && (has(MASK) || !(has(USER) || has(GROUP)))
    }

    /// Whether the nine permission bits of a mode express the whole ACL.
    pub(crate) fn is_minimal(&self) -> bool {
        self.entries.iter().all(|entry| matches!(entry.tag, USER_OBJ | GROUP_OBJ | OTHER))
    }

    fn permissions(&self, tag: u16) -> Option<u32> {
        self.entries.iter().find(|entry| entry.tag == tag).map(|entry| u32::from(entry.permissions))
    }

    /// Returns `mode` with the permission bits of this access ACL.
    pub(crate) fn apply_to_mode(&self, mode: u32) -> u32 {
        let group = self.permissions(MASK).or(self.permissions(GROUP_OBJ)).unwrap_or_default();
        let user = self.permissions(USER_OBJ).unwrap_or_default();
        let other = self.permissions(OTHER).unwrap_or_default();
        mode & !0o777 | user << 6 | group << 3 | other
    }

    /// Applies a chmod: sets the entries of the owner, of the mask (of the group, if there is no mask) and of others.
    pub(crate) fn set_mode(&mut self, mode: u32) {
        let group_tag = if self.permissions(MASK).is_some() { MASK } else { GROUP_OBJ };
        for entry in &mut self.entries {
            if let Some(shift) = shift_of(entry.tag, group_tag) {
                entry.permissions = low_bits(mode >> shift);
            }
        }
    }

    /// Restricts a default ACL to the requested mode of a new inode. Returns the mode of the inode.
    pub(crate) fn mask_new(&mut self, mode: u32) -> u32 {
        let group_tag = if self.permissions(MASK).is_some() { MASK } else { GROUP_OBJ };
        for entry in &mut self.entries {
            if let Some(shift) = shift_of(entry.tag, group_tag) {
                entry.permissions &= low_bits(mode >> shift);
            }
        }
        self.apply_to_mode(mode)
    }
}

fn shift_of(tag: u16, group_tag: u16) -> Option<u32> {
    match tag {
        USER_OBJ => Some(6),
        OTHER => Some(0),
        _ if tag == group_tag => Some(3),
        _ => None,
    }
}

fn low_bits(bits: u32) -> u16 {
    u16::try_from(bits & 7).unwrap_or_default()
}

fn named(tag: u16) -> bool {
    tag == USER || tag == GROUP
}

const VERSION: u32 = 2;
const ENTRY_SIZE: usize = 8;
const USER_OBJ: u16 = 1;
const USER: u16 = 2;
const GROUP_OBJ: u16 = 4;
const GROUP: u16 = 8;
const MASK: u16 = 16;
const OTHER: u16 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut raw = VERSION.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            raw.extend_from_slice(&tag.to_le_bytes());
            raw.extend_from_slice(&permissions.to_le_bytes());
            raw.extend_from_slice(&id.to_le_bytes());
        }
        raw
    }

    const NO_ID: u32 = u32::MAX;

    #[test]
    fn acls_round_trip_and_give_the_mode() {
        let raw = acl(&[(1, 7, NO_ID), (2, 6, 1000), (4, 5, NO_ID), (16, 4, NO_ID), (32, 0, NO_ID)]);
        let mut parsed = Acl::parse(&raw).unwrap().unwrap();
        assert_eq!(parsed.encode(), raw);
        assert!(!parsed.is_minimal());
        assert_eq!(parsed.apply_to_mode(0o100_000), 0o100_740);
        parsed.set_mode(0o751);
        assert_eq!(parsed.apply_to_mode(0), 0o751);
        assert_eq!(parsed.permissions(GROUP_OBJ), Some(5), "chmod changes the mask, not the group");
        assert_eq!(parsed.mask_new(0o640), 0o640);
    }

    #[test]
    fn invalid_acls_are_refused() {
        for raw in [
            acl(&[(1, 7, NO_ID), (2, 6, 1000), (4, 5, NO_ID), (32, 0, NO_ID)]),
            acl(&[(1, 7, NO_ID), (4, 5, NO_ID)]),
            acl(&[(4, 5, NO_ID), (1, 7, NO_ID), (32, 0, NO_ID)]),
            acl(&[(1, 9, NO_ID), (4, 5, NO_ID), (32, 0, NO_ID)]),
            acl(&[(1, 7, NO_ID), (1, 7, NO_ID), (4, 5, NO_ID), (32, 0, NO_ID)]),
            vec![2, 0, 0],
            [acl(&[]), vec![1]].concat(),
        ] {
            assert_eq!(Acl::parse(&raw).unwrap_err().errno(), 22, "{raw:?}");
        }
        assert_eq!(Acl::parse(&[1, 0, 0, 0]).unwrap_err().errno(), 95);
        assert_eq!(Acl::parse(&acl(&[])).unwrap(), None);
    }
}
