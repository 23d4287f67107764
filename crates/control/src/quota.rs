//! Commands on quotas and quota groups.
//!
//! | command | needs                                                              |
//! |---------|--------------------------------------------------------------------|
//! | all     | the rights of an administrator ([`CommandContext::require_admin`]) |
//!
//! Groups are named by their 64-bit ids: the level in the upper 16 bits, and the number within the level (on level 0,
//! the subvolume's id) in the lower 48 bits.

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_fs::{InodeId, QgroupId, QgroupSummary, QuotaKind};

use crate::execute::{CommandContext, FileNr};
use crate::failure::{CommandFailure, Result};

/// A command on quotas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Turns quotas on.
    Enable {
        /// Whether an extent is charged only to the subvolume that allocated it.
        simple: bool,
    },
    /// Turns quotas off.
    Disable,
    /// Returns the state of quotas: [`Response::Status`].
    Status,
    /// Starts a rescan, which counts everything again.
    Rescan,
    /// Waits until no rescan is running.
    RescanWait,
    /// Lists groups in order of id, a page at a time: [`Response::Groups`].
    Groups {
        /// The first id.
        from: u64,
    },
    /// Makes a group.
    Create {
        /// The group.
        id: u64,
    },
    /// Removes a group.
    Destroy {
        /// The group.
        id: u64,
    },
    /// Removes the groups of subvolumes that no longer exist: [`Response::Removed`].
    ClearStale,
    /// Puts a group into a group of a higher level: [`Response::NeedsRescan`].
    Assign {
        /// The member.
        member: u64,
        /// The group of a higher level that `member` joins.
        parent: u64,
    },
    /// Takes a group out of a group of a higher level: [`Response::NeedsRescan`].
    Remove {
        /// The member.
        member: u64,
        /// The group of a higher level that `member` leaves.
        parent: u64,
    },
    /// Changes the limits of a group.
    Limit {
        /// The group; `None` means the group of the subvolume that holds the file `of`.
        id: Option<u64>,
        /// The file that selects the group if `id` is `None`.
        of: FileNr,
        /// The limit of referenced bytes.
        referenced: LimitChange,
        /// The limit of exclusive bytes.
        exclusive: LimitChange,
    },
}

/// A change of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitChange {
    /// Leaves the limit as it is.
    Keep,
    /// Removes the limit.
    None,
    /// Sets the limit to this many bytes.
    Bytes(u64),
}

/// The result of a command on quotas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// The command succeeded.
    Done,
    /// The state of quotas; `None` if quotas are off.
    Status(Option<QuotaStatusMessage>),
    /// Groups in order of id; empty after the last group.
    Groups(Vec<QuotaGroup>),
    /// Whether the numbers of the higher groups are wrong until a rescan.
    NeedsRescan(bool),
    /// The number of groups that were removed.
    Removed(u64),
}

/// The state of quotas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaStatusMessage {
    /// Whether the byte counts of the groups are reliable. After some changes they are wrong until a rescan.
    pub consistent: bool,
    /// The first address that a running rescan has not counted yet; `None` if no rescan is running.
    pub rescan: Option<u64>,
    /// Whether the quotas are simple quotas.
    pub simple: bool,
}

/// A group as sent to the client. The fields are those of [`QgroupSummary`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "QgroupInfo documents the fields")]
pub struct QuotaGroup {
    pub id: u64,
    pub referenced: u64,
    pub exclusive: u64,
    pub max_referenced: Option<u64>,
    pub max_exclusive: Option<u64>,
    pub parents: Vec<u64>,
    pub members: Vec<u64>,
}

impl From<QgroupSummary> for QuotaGroup {
    fn from(info: QgroupSummary) -> Self {
        let ids = |ids: Vec<QgroupId>| ids.into_iter().map(|id| id.0).collect();
        Self {
            id: info.id.0,
            referenced: info.referenced,
            exclusive: info.exclusive,
            max_referenced: info.max_referenced,
            max_exclusive: info.max_exclusive,
            parents: ids(info.parents),
            members: ids(info.members),
        }
    }
}

impl From<LimitChange> for Option<Option<u64>> {
    fn from(change: LimitChange) -> Self {
        match change {
            LimitChange::Keep => None,
            LimitChange::None => Some(None),
            LimitChange::Bytes(bytes) => Some(Some(bytes)),
        }
    }
}

impl Request {
    /// See [`crate::Request::is_long`].
    pub(crate) fn is_long(&self) -> bool {
        matches!(self, Self::RescanWait)
    }

    /// See [`crate::Request::changes`].
    pub(crate) fn changes(&self) -> bool {
        !matches!(self, Self::Status | Self::Groups { .. } | Self::RescanWait)
    }
}

pub(crate) fn execute(context: &CommandContext<'_>, request: Request) -> Result<Response> {
    context.require_admin()?;
    let fs = context.fs;
    let done = |()| Response::Done;
    Ok(match request {
        Request::Enable { simple: false } => fs.enable_quotas(QuotaKind::Full).map(done)?,
        Request::Enable { simple: true } => fs.enable_quotas(QuotaKind::Simple).map(done)?,
        Request::Disable => fs.disable_quotas().map(done)?,
        Request::Status => {
            let status = fs.quota_status();
            Response::Status(status.map(|status| QuotaStatusMessage {
                consistent: status.consistent,
                rescan: status.rescan,
                simple: status.simple,
            }))
        }
        Request::Rescan => fs.start_quota_rescan().map(done)?,
        Request::RescanWait => fs.wait_for_quota_rescan(context.job).map(done)?,
        Request::Groups { from } => {
            let groups = fs.qgroups_from(QgroupId(from), PAGE)?;
            Response::Groups(groups.into_iter().map(QuotaGroup::from).collect())
        }
        Request::Create { id } => fs.create_qgroup(QgroupId(id)).map(done)?,
        Request::Destroy { id } => fs.destroy_qgroup(QgroupId(id)).map(done)?,
        Request::ClearStale => Response::Removed(fs.clear_stale_qgroups()? as u64),
        Request::Assign { member, parent } => {
            Response::NeedsRescan(fs.assign_qgroup(QgroupId(member), QgroupId(parent))?)
        }
        Request::Remove { member, parent } => {
            Response::NeedsRescan(fs.remove_qgroup(QgroupId(member), QgroupId(parent))?)
        }
        Request::Limit { id, of, referenced, exclusive } => {
            let id = match id {
                Some(id) => QgroupId(id),
                None => {
                    let id = context.inode(of)?;
                    // As btrfs-progs, this refuses the path of a file or directory in a subvolume.
                    if id != InodeId::root_of(id.root) {
                        let text = format!("it is not a subvolume, but a file or directory of subvolume {}", id.root);
                        return Err(CommandFailure::new(Errno::INVAL, text));
                    }
                    QgroupId::of_subvolume(id.root)
                }
            };
            fs.limit_qgroup(id, referenced.into(), exclusive.into()).map(done)?
        }
    })
}

/// The largest number of groups in a page.
const PAGE: usize = 500;
