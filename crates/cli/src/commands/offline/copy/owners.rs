//! Owners in a new filesystem: ranges of ids of the source get other ids.

use anyhow::Context;

/// Consecutive ids of the source, and the ids that they get: `FROM:TO:COUNT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IdRange {
    from: u32,
    to: u32,
    count: u32,
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

/// How the owners of a source become those of the copy.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OwnerMap<'a> {
    /// Ranges of users; empty for the users of the source.
    pub(crate) users: &'a [IdRange],
    /// Ranges of groups, as of users.
    pub(crate) groups: &'a [IdRange],
}

impl OwnerMap<'_> {
    /// The owner that a file of the copy gets. Fails for an id that is in no range.
    pub(super) fn owner_of(&self, (uid, gid): (u32, u32)) -> anyhow::Result<(u32, u32)> {
        Ok((
            mapped(self.users, uid).with_context(|| format!("its user {uid} is in no range of --map-users"))?,
            mapped(self.groups, gid).with_context(|| format!("its group {gid} is in no range of --map-groups"))?,
        ))
    }
}

/// The id that the first range with an id gives it.
fn mapped(ranges: &[IdRange], id: u32) -> Option<u32> {
    if ranges.is_empty() {
        return Some(id);
    }
    ranges.iter().find_map(|range| {
        let nr = id.checked_sub(range.from).filter(|nr| *nr < range.count)?;
        range.to.checked_add(nr)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_parsed_and_ids_mapped() {
        let ranges = ["1000:0:1", "100000:1:65535"].map(|text| parse_range(text).unwrap());
        let map = OwnerMap { users: &ranges, ..OwnerMap::default() };
        assert_eq!(map.owner_of((1000, 7)).unwrap(), (0, 7));
        assert_eq!(map.owner_of((165_534, 7)).unwrap(), (65_535, 7));
        for uid in [0, 999, 1001, 165_535] {
            assert!(map.owner_of((uid, 7)).is_err(), "{uid}");
        }
        for text in ["", "1:2", "1:2:3:4", "1:2:0", "a:0:1", "4294967295:0:1", "0:4294967295:1", "-1:0:1"] {
            assert!(parse_range(text).is_err(), "{text}");
        }
    }
}
