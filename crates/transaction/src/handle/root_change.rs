//! [`RootChange`]: a change of subvolumes that an operation requests and the commit makes.

use ubtrfs_format::item::{QgroupLimit, RootRef, Timespec};
use ubtrfs_format::{Generation, Key, RootId};
use ubtrfs_tree::Batch;
use uuid::Uuid;

/// A subvolume to be made.
#[derive(Debug)]
pub struct NewSubvolume {
    /// The subvolume's id, from [`Engine::new_root_id`](crate::Engine::new_root_id).
    pub id: RootId,
    /// Its UUID.
    pub uuid: Uuid,
    /// The time of the request.
    pub otime: Timespec,
    /// Its content.
    pub content: NewContent,
    /// The subvolume that holds the new subvolume's name.
    pub parent: RootId,
    /// The directory that holds the new subvolume's name, the index in that directory, and the name.
    pub root_ref: RootRef,
    /// Items of the directory that holds the new subvolume's name, in the order of their keys.
    pub entry: Batch,
    /// Ids of quota groups that the new subvolume's own group joins.
    pub qgroups: Vec<u64>,
    /// Limits of the new subvolume's own quota group. A snapshot gets the limits of its source instead, as in Linux.
    pub limit: Option<QgroupLimit>,
    /// For a subvolume that is about to be received, the sender's transaction; 0 otherwise. A subvolume with a
    /// `stransid` and without a `received_uuid` is incomplete.
    pub stransid: Generation,
}

/// The content of a new subvolume.
#[derive(Debug)]
pub enum NewContent {
    /// The items of the new tree, in key order. The items fit into one leaf.
    Items(Vec<(Key, Vec<u8>)>),
    /// The content of another subvolume at the end of the transaction.
    SnapshotOf {
        /// The other subvolume.
        source: RootId,
        /// Whether the snapshot is read-only.
        read_only: bool,
    },
}

/// The origin of a received subvolume.
#[derive(Clone, Debug)]
pub struct Received {
    /// UUID of the subvolume that was sent.
    pub uuid: Uuid,
    /// The last transaction of the sent subvolume, at the sender.
    pub stransid: Generation,
    /// The time of sending, at the sender. ubtrfs and Linux leave it at 0, because a stream does not contain this time.
    pub stime: Timespec,
    /// The time of receiving.
    pub rtime: Timespec,
    /// Whether the subvolume becomes read-only.
    pub read_only: bool,
}

/// A change of a subvolume that the commit makes.
#[derive(Debug)]
pub(crate) enum RootChange {
    Make(Box<NewSubvolume>),
    SetReadOnly(RootId, bool),
    SetReceived(RootId, Received),
    Delete(RootId),
}
