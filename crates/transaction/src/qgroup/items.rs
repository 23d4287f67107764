//! The items of the quota tree: read at open, written by commits.

use ubtrfs_error::{Error, Result};
use ubtrfs_format::item::{QgroupInfo, QgroupLimit, QgroupStatus};
use ubtrfs_format::{Generation, Key, KeyType, RootId};
use ubtrfs_tree::{Batch, Cursor, NodeSource, RootPtr};

use super::groups::{Limit, Qgroup, QgroupId, Qgroups};

/// The status item, with the field that simple quotas append.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QgroupStatusItem {
    /// Flags of [`QgroupStatus`].
    pub(crate) flags: u64,
    /// The transaction of the last update.
    pub(crate) generation: Generation,
    /// The first address that a running rescan has not reached; [`NO_RESCAN`] if no rescan runs.
    pub(crate) rescan: u64,
    /// The transaction that enabled simple quotas.
    pub(crate) enabled: Option<Generation>,
}

/// Value of [`QgroupStatusItem::rescan`] while no rescan runs.
pub(crate) const NO_RESCAN: u64 = u64::MAX;

const STATUS_KEY: Key = Key::new(0, KeyType::QGROUP_STATUS, 0);
const VERSION: u64 = 1;

impl QgroupStatusItem {
    fn decode(data: &[u8]) -> Result<Self> {
        let status = QgroupStatus::decode(data).map_err(|cause| Error::from(cause).in_tree(RootId::QUOTA_TREE))?;
        let rest = data.get(QgroupStatus::SIZE..).and_then(|rest| rest.first_chunk::<8>());
        Ok(Self {
            flags: status.flags,
            generation: Generation(status.generation),
            rescan: status.rescan,
            enabled: rest.map(|bytes| Generation(u64::from_le_bytes(*bytes))),
        })
    }

    fn encode(&self) -> Vec<u8> {
        let status =
            QgroupStatus { version: VERSION, generation: self.generation.0, flags: self.flags, rescan: self.rescan };
        let mut bytes = status.encode();
        if let Some(enabled) = self.enabled {
            bytes.extend_from_slice(&enabled.0.to_le_bytes());
        }
        bytes
    }

    /// Whether this flag is set.
    pub(crate) fn has(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }
}

/// Reads the quota tree. `None` if the quota tree has no status item.
pub(crate) fn load(source: &dyn NodeSource, root: &RootPtr) -> Result<Option<(QgroupStatusItem, Qgroups)>> {
    let mut cursor = Cursor::new(source, *root);
    let mut key = cursor.seek_ge(&Key::MIN)?;
    let (mut status, mut groups, mut limits) = (None, Qgroups::default(), Vec::new());
    let mut is_whole = true;
    while let Some(at) = key {
        let data = cursor.data().unwrap_or_default();
        let corrupt = |cause| Error::from(cause).in_tree(RootId::QUOTA_TREE);
        match at.item_type {
            KeyType::QGROUP_STATUS => status = Some(QgroupStatusItem::decode(data)?),
            KeyType::QGROUP_INFO => {
                let info = QgroupInfo::decode(data).map_err(corrupt)?;
                let group = Qgroup {
                    referenced: info.rfer,
                    exclusive: info.excl,
                    generation: Generation(info.generation),
                    ..Qgroup::default()
                };
                groups.insert_as_on_disk(QgroupId(at.offset), group);
            }
            KeyType::QGROUP_LIMIT => {
                let limit = Limit::from_item(&QgroupLimit::decode(data).map_err(corrupt)?);
                limits.push((QgroupId(at.offset), limit));
            }
            // The status, info and limit items have objectid 0, so they were read before all relations. A relation has
            // an item in each direction; of these, only the item from the member to the parent is read.
            KeyType::QGROUP_RELATION if at.objectid < at.offset => {
                let (member, parent) = (QgroupId(at.objectid), QgroupId(at.offset));
                match groups.get(member).is_some() && groups.get(parent).is_some() {
                    true => is_whole &= groups.relate_as_on_disk(member, parent),
                    // When Linux deletes a subvolume whose group belongs to several groups, it leaves all relations but
                    // one. These relations count for nothing, and btrfs-progs cannot show the groups of such a
                    // filesystem, so the next commit deletes them.
                    false => groups.note_leftover(member, parent),
                }
            }
            _ => {}
        }
        key = cursor.next()?;
    }
    for (id, limit) in limits {
        groups.set_limit(id, limit);
    }
    groups.take_changed();
    let Some(mut status) = status else { return Ok(None) };
    if !is_whole {
        status.flags |= QgroupStatus::INCONSISTENT;
    }
    Ok(Some((status, groups)))
}

/// The changes that bring the quota tree up to date.
pub(crate) fn changes(groups: &mut Qgroups, status: &QgroupStatusItem) -> Batch {
    let mut batch: Batch = vec![(STATUS_KEY, Some(status.encode().into()))];
    for id in groups.take_changed() {
        let group = groups.get(id);
        let info = group.map(|group| QgroupInfo {
            generation: group.generation.0,
            rfer: group.referenced,
            rfer_cmpr: group.referenced,
            excl: group.exclusive,
            excl_cmpr: group.exclusive,
        });
        let limit = group.map(|group| group.limit.to_item());
        batch.push((Key::new(0, KeyType::QGROUP_INFO, id.0), info.map(|info| info.encode().into())));
        batch.push((Key::new(0, KeyType::QGROUP_LIMIT, id.0), limit.map(|limit| limit.encode().into())));
    }
    for ((member, parent), is_there) in groups.take_changed_relations() {
        for (from, to) in [(member, parent), (parent, member)] {
            let value = is_there.then(|| Vec::new().into());
            batch.push((Key::new(from.0, KeyType::QGROUP_RELATION, to.0), value));
        }
    }
    batch.sort_by_key(|(key, _)| *key);
    batch
}
