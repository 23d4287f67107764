//! Owners of a copy: ranges of ids of the source get other ids.

use std::fmt;

/// Consecutive ids of the source, and the ids that they get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRange {
    /// The first id of the source.
    pub from: u32,
    /// The id that the first id gets.
    pub to: u32,
    /// Number of ids.
    pub count: u32,
}

/// How the owners of a source become those of the copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnerMap {
    /// Ranges of users; empty for the users of the source. Users in no range are refused otherwise.
    pub users: Vec<IdRange>,
    /// Ranges of groups, as of users.
    pub groups: Vec<IdRange>,
}

/// A file was not copied, because its user or group is in no range of the [`OwnerMap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmappedOwner {
    /// The user.
    User(u32),
    /// The group.
    Group(u32),
}

impl fmt::Display for UnmappedOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(id) => write!(f, "its user {id} is in no range of users"),
            Self::Group(id) => write!(f, "its group {id} is in no range of groups"),
        }
    }
}

impl std::error::Error for UnmappedOwner {}

impl OwnerMap {
    /// The owner that a file of the copy gets. Fails for an id that is in no range.
    pub(super) fn owner_of(&self, (uid, gid): (u32, u32)) -> Result<(u32, u32), UnmappedOwner> {
        Ok((
            mapped(&self.users, uid).ok_or(UnmappedOwner::User(uid))?,
            mapped(&self.groups, gid).ok_or(UnmappedOwner::Group(gid))?,
        ))
    }
}

/// The id that the first range with an id gives it. The highest number is not an id, because it means "do not change" to
/// chown(2).
fn mapped(ranges: &[IdRange], id: u32) -> Option<u32> {
    if ranges.is_empty() {
        return Some(id);
    }
    let mapped = ranges.iter().find_map(|range| {
        let nr = id.checked_sub(range.from).filter(|nr| *nr < range.count)?;
        range.to.checked_add(nr)
    });
    mapped.filter(|id| *id != u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_mapped_by_ranges() {
        let users = vec![IdRange { from: 1000, to: 0, count: 1 }, IdRange { from: 100_000, to: 1, count: 65_535 }];
        let map = OwnerMap { users, ..OwnerMap::default() };
        assert_eq!(map.owner_of((1000, 7)), Ok((0, 7)));
        assert_eq!(map.owner_of((165_534, 7)), Ok((65_535, 7)));
        for uid in [0, 999, 1001, 165_535] {
            assert_eq!(map.owner_of((uid, 7)), Err(UnmappedOwner::User(uid)));
        }
        let groups = vec![IdRange { from: 5, to: u32::MAX - 1, count: 3 }];
        let map = OwnerMap { groups, ..OwnerMap::default() };
        assert_eq!(map.owner_of((1, 5)), Ok((1, u32::MAX - 1)));
        assert_eq!([6, 7, 8].map(|gid| map.owner_of((1, gid)).is_ok()), [false; 3]);
    }
}
