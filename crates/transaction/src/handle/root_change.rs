//! [`RootChange`]: a change of subvolumes that an operation requests and the commit makes.

use ubtrfs_format::item::{RootRef, Timespec};
use ubtrfs_format::{Generation, Key, RootId};
use ubtrfs_tree::Batch;
use uuid::Uuid;

/// A subvolume to be made.
#[derive(Debug)]
pub struct NewSubvolume {
    /// Its id, by [`Engine::new_root_id`](crate::Engine::new_root_id).
    pub id: RootId,
    /// Its UUID.
    pub uuid: Uuid,
    /// The time of the request.
    pub otime: Timespec,
    /// Its content.
    pub content: NewContent,
    /// The subvolume that holds its name.
    pub parent: RootId,
    /// The place of its name.
    pub root_ref: RootRef,
    /// Items of the directory that holds its name, in the order of their keys.
    pub entry: Batch,
    /// Ids of quota groups that its own group joins.
    pub qgroups: Vec<u64>,
    /// For a subvolume that is about to be received, the sender's transaction; 0 otherwise. Without a `received_uuid` it
    /// marks the subvolume as incomplete.
    pub stransid: Generation,
}

/// The content of a new subvolume.
#[derive(Debug)]
pub enum NewContent {
    /// These items, in key order. They fit into a leaf.
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
    /// Its last transaction, at the sender.
    pub stransid: Generation,
    /// The time of receiving.
    pub rtime: Timespec,
}

/// A change of a subvolume that the commit makes.
#[derive(Debug)]
pub(crate) enum RootChange {
    Make(Box<NewSubvolume>),
    SetReadOnly(RootId, bool),
    SetReceived(RootId, Received),
    Delete(RootId),
}
