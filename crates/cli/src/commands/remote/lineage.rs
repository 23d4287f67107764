//! Which snapshots of a filesystem are those of a store, and which of them a push takes as its parent.

use std::collections::{HashMap, HashSet};

use ubtrfs_format::item::RootFlags;
use ubtrfs_fs::SubvolumeInfo;
use ubtrfs_remote::{FoundSnapshot, SnapshotKey};
use uuid::Uuid;

/// The key of a snapshot: a received one has the key of the snapshot that was sent.
pub(super) fn key_of(info: &SubvolumeInfo) -> SnapshotKey {
    match info.received_uuid.is_nil() {
        true => SnapshotKey { uuid: info.uuid, ctransid: info.ctransid.0 },
        false => SnapshotKey { uuid: info.received_uuid, ctransid: info.stransid.0 },
    }
}

/// Whether a subvolume has the content of a snapshot. A received one that is sent again has another transaction in each
/// filesystem; it loses its received UUID as soon as it can change, so the UUID suffices.
pub(super) fn is_same(info: &SubvolumeInfo, key: &SnapshotKey) -> bool {
    info.flags.contains(RootFlags::RDONLY)
        && match info.received_uuid.is_nil() {
            true => key_of(info) == *key,
            false => info.received_uuid == key.uuid,
        }
}

/// The snapshot of the store that has the content of a subvolume.
pub(super) fn find<'f>(info: &SubvolumeInfo, found: &'f [FoundSnapshot]) -> Option<&'f FoundSnapshot> {
    found.iter().find(|found| is_same(info, &found.key))
}

/// The read-only subvolumes that may be the parent of `info`, the newest first: they are older, in the store, and snapshots
/// of the same subvolume, or connected with `info` by snapshots.
pub(super) fn parents<'s>(
    info: &SubvolumeInfo,
    all: &'s [SubvolumeInfo],
    found: &[FoundSnapshot],
) -> Vec<(&'s SubvolumeInfo, FoundSnapshot)> {
    let related = related(info, all);
    let mut parents: Vec<(&SubvolumeInfo, FoundSnapshot)> = all
        .iter()
        .filter(|other| other.id != info.id && other.otransid < info.otransid && related.contains(&other.uuid))
        .filter_map(|other| Some((other, *find(other, found)?)))
        .collect();
    parents.sort_by_key(|(other, _)| std::cmp::Reverse((other.otransid, other.id)));
    parents
}

/// The UUIDs that are connected with a subvolume by `parent_uuid`, in both directions.
fn related(info: &SubvolumeInfo, all: &[SubvolumeInfo]) -> HashSet<Uuid> {
    let mut next_to: HashMap<Uuid, Vec<Uuid>> = HashMap::new();
    for other in all.iter().filter(|other| !other.uuid.is_nil() && !other.parent_uuid.is_nil()) {
        next_to.entry(other.uuid).or_default().push(other.parent_uuid);
        next_to.entry(other.parent_uuid).or_default().push(other.uuid);
    }
    let mut related = HashSet::from([info.uuid]);
    let mut waiting = vec![info.uuid];
    while let Some(uuid) = waiting.pop() {
        let near = next_to.get(&uuid).into_iter().flatten();
        let new: Vec<Uuid> = near.filter(|near| related.insert(**near)).copied().collect();
        waiting.extend(new);
    }
    related
}

#[cfg(test)]
mod tests {
    use ubtrfs_format::item::RootItem;
    use ubtrfs_format::{Generation, RootId};

    use super::*;

    fn subvolume(nr: u128, parent: u128, otransid: u64) -> SubvolumeInfo {
        let id = RootId(256 + u64::try_from(nr).unwrap());
        let mut info = SubvolumeInfo::without_name(id, &RootItem::decode(&[0; 439]).unwrap());
        info.uuid = Uuid::from_u128(nr);
        info.parent_uuid = Uuid::from_u128(parent);
        info.otransid = Generation(otransid);
        info.ctransid = Generation(otransid);
        info.flags = RootFlags::RDONLY;
        info
    }

    fn stored(uuid: u128, ctransid: u64) -> FoundSnapshot {
        let key = SnapshotKey { uuid: Uuid::from_u128(uuid), ctransid };
        FoundSnapshot { key, is_encrypted: false, pushed: 0 }
    }

    #[test]
    fn the_newest_older_relative_in_the_store_is_the_parent() {
        // 1 is the source, 2 to 4 are its snapshots, 5 is a snapshot of something else.
        let all =
            [subvolume(1, 0, 1), subvolume(2, 1, 10), subvolume(3, 1, 20), subvolume(4, 1, 30), subvolume(5, 9, 25)];
        let chosen = |of: usize, found: &[FoundSnapshot]| -> Vec<u64> {
            parents(&all[of], &all, found).iter().map(|(info, _)| info.id.0 - 256).collect()
        };
        let both = [stored(2, 10), stored(3, 20), stored(4, 30), stored(5, 25)];
        assert_eq!(chosen(3, &both), [3, 2]);
        assert_eq!(chosen(2, &both), [2], "a newer one is no parent");
        assert_eq!(chosen(3, &[stored(3, 21)]), [0_u64; 0], "a changed one is another snapshot");
        assert!(chosen(4, &both).is_empty());
    }

    #[test]
    fn a_received_snapshot_is_the_sent_one_until_it_may_change() {
        let mut info = subvolume(2, 1, 50);
        info.received_uuid = Uuid::from_u128(7);
        info.stransid = Generation(3);
        let key = SnapshotKey { uuid: Uuid::from_u128(7), ctransid: 3 };
        assert_eq!(key_of(&info), key);
        assert!(is_same(&info, &key) && is_same(&info, &SnapshotKey { ctransid: 4, ..key }));
        info.flags = RootFlags::empty();
        assert!(!is_same(&info, &key));
    }
}
