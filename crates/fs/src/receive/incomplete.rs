//! The subvolume that is being received: creating, marking, resuming and completing it. Completing the subvolume sets
//! its received UUID.
//!
//! ```text
//! [made, stransid, no received_uuid] --mark--> [receiving] --end of the stream--> [received, read-only]
//!                                                  |  ^
//!                                      break, keep v  | resume with the same stream
//!                                                [stopped after N commands]
//! ```
//!
//! - I1. The mark is "receiving" before the first command is applied. The mark becomes "stopped" only after all applied
//!   commands. Transactions are durable in order, so after a crash a subvolume marked "stopped" holds exactly the
//!   commands that the mark counts. A subvolume marked "receiving" after a crash cannot be resumed: it may hold some
//!   commands of the last transaction.
//! - I2. A receive is resumed only with a stream that is equal up to the last complete command: the mark has a checksum
//!   over the checksums of these commands.
//! - I3. A stopped subvolume is resumed only if no inode in it has changed since: no change time is later than the
//!   mark. Only nodes of the mark's transaction and later ones are searched. Reading files changes only access times,
//!   so it does not prevent resuming.
//! - I4. A receive may delete what a killed receive of the same stream left, but not what somebody changed since. A receive
//!   writes its mark again every [`MARK_INTERVAL`]. So all its changes come at most [`SLACK_SECS`] after the mark. A program
//!   that was killed between the commit of the subvolume and the commit of its mark leaves no mark. Then nothing in the
//!   subvolume changed since it was made.

use std::sync::Arc;
use std::time::Duration;

use ubtrfs_format::hash::crc32c_raw;
use ubtrfs_format::item::{InodeItem, RootItem, Timespec};
use ubtrfs_format::{Generation, KeyType, RootId};
use ubtrfs_stream::FrameHeader;
use ubtrfs_transaction::{CommittedTree, Received};
use ubtrfs_tree::Item;
use uuid::Uuid;

use super::error::ReceiveProblem;
use super::session::ReceiveOptions;
use crate::inode::xattr;
use crate::items::dir_item;
use crate::session::context::MetadataPurpose;
use crate::subvolume::create::SubvolumeProperties;
use crate::subvolume::receives::ReceivesGuard;
use crate::types::{Caller, InodeId, XattrFlags};
use crate::{Error, Fs, Result};

/// Attribute of the root directory of a subvolume whose receive has not ended: `receiving ...` or `stopped ...`, with
/// the UUID and transaction of the subvolume that is sent, and the number of complete commands.
pub const INCOMPLETE_XATTR: &str = "trusted.ubtrfs.incomplete";

/// How often a receive writes its mark again (I4).
pub(super) const MARK_INTERVAL: Duration = Duration::from_secs(10);
/// The largest time between a mark and a change by its receive (I4).
const SLACK_SECS: i64 = 60;

/// A subvolume as its stream describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SentSubvolume {
    pub(crate) uuid: Uuid,
    pub(crate) ctransid: u64,
    /// The parent's UUID and transaction.
    pub(crate) parent: Option<(Uuid, u64)>,
}

/// How many commands of a stream were applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReceiveProgress {
    /// Number of commands after the command that creates the subvolume.
    pub(crate) nr_commands: u64,
    /// Checksum over the checksums of the applied commands (I2).
    pub(crate) digest: u32,
}

impl ReceiveProgress {
    /// Adds a command to the number of commands and to the digest.
    pub(crate) fn add(&mut self, header: &FrameHeader) {
        self.nr_commands = self.nr_commands.saturating_add(1);
        self.digest = crc32c_raw(self.digest, &header.crc.to_le_bytes());
    }
}

/// The decoded value of [`INCOMPLETE_XATTR`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    sent: SentSubvolume,
    /// The time of the mark, and the transaction that ran then.
    at: Timespec,
    transid: u64,
    /// The progress when the receive stopped; `None` while the receive runs.
    stopped: Option<ReceiveProgress>,
}

impl Mark {
    fn encode(&self) -> Vec<u8> {
        let SentSubvolume { uuid, ctransid, parent } = self.sent;
        let (parent, parent_ctransid) = parent.unwrap_or((Uuid::nil(), 0));
        let state = match self.stopped {
            None => "receiving".to_owned(),
            Some(ReceiveProgress { nr_commands, digest }) => format!("stopped commands={nr_commands} digest={digest}"),
        };
        let (Timespec { sec, nsec }, transid) = (self.at, self.transid);
        format!(
            "{state} uuid={uuid} ctransid={ctransid} parent={parent} parent_ctransid={parent_ctransid} sec={sec} nsec={nsec} \
             transid={transid}"
        )
        .into_bytes()
    }

    fn decode(value: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(value).ok()?;
        let field = |name: &str| text.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        let number = |name| field(name)?.parse::<u64>().ok();
        let parent = (field("parent")?.parse().ok()?, number("parent_ctransid")?);
        let sent = SentSubvolume {
            uuid: field("uuid")?.parse().ok()?,
            ctransid: number("ctransid")?,
            parent: Some(parent).filter(|(uuid, _): &(Uuid, u64)| !uuid.is_nil()),
        };
        let stopped = match text.split(' ').next()? {
            "receiving" => None,
            "stopped" => Some(ReceiveProgress {
                nr_commands: number("commands")?,
                digest: u32::try_from(number("digest")?).ok()?,
            }),
            _ => return None,
        };
        let at = Timespec { sec: field("sec")?.parse().ok()?, nsec: field("nsec")?.parse().ok()? };
        Some(Self { sent, at, transid: number("transid")?, stopped })
    }
}

/// The `stransid` of a subvolume that is incomplete. With 0, the root item would not show that.
fn first_stransid(sent: &SentSubvolume) -> Generation {
    Generation(sent.ctransid.max(1))
}

impl Fs {
    /// Creates the subvolume that a stream will be received into, marked as incomplete (R2).
    pub(crate) fn make_incomplete(
        &self,
        dir: InodeId,
        name: &[u8],
        sent: &SentSubvolume,
        parent: Option<RootId>,
    ) -> Result<RootId> {
        let stransid = first_stransid(sent);
        let id = match parent {
            None => {
                let kind = SubvolumeProperties { qgroups: &[], limit: None, stransid };
                self.create_subvolume_for(dir, name, &Caller { umask: 0o022, ..Caller::ROOT }, kind)?
            }
            Some(parent) => self.snapshot_for(parent, dir, name, false, &[], stransid)?,
        };
        self.set_mark(id.root, sent, None)?;
        Ok(id.root)
    }

    /// Marks the subvolume as being received or, with `stopped`, as stopped after the commands that `stopped` counts.
    pub(crate) fn set_mark(&self, root: RootId, sent: &SentSubvolume, stopped: Option<ReceiveProgress>) -> Result<()> {
        let reservation = self.context.reserve(MetadataPurpose::Change(COMPLETE_ITEMS))?;
        let inode = self.inode(InodeId::root_of(root))?;
        let mut state = inode.write()?;
        let (at, transid) = (Timespec::now(), self.engine.generation().0);
        let value = Mark { sent: *sent, at, transid, stopped }.encode();
        let mut changes = Vec::new();
        let mark = (INCOMPLETE_XATTR.as_bytes(), Some(value));
        xattr::plan_set(&mut changes, (&inode, &state), &self.geometry, mark, XattrFlags::empty())?;
        state.item.ctime = at;
        state.item.sequence = state.item.sequence.wrapping_add(1);
        let op = self.engine.begin(reservation);
        dir_item::put_changes(&op, &inode.home.tree, changes);
        inode.put_item(&op, &mut state);
        Ok(())
    }

    /// Whether an inode of a subvolume changed after the subvolume was marked (I3).
    fn has_changed_since(&self, root: RootId, mark: &Mark) -> Result<bool> {
        // Write back dirty data and commit first, so that the search also finds changes that are not committed yet.
        self.flush_tagged(Some(root))?;
        self.engine.commit()?;
        let found = self.engine.with_committed_tree(root, |tree| is_any_newer(&tree, mark))?;
        found.ok_or(Error::NotFound)?
    }

    /// Keeps an incomplete subvolume, durable on return (I1).
    pub(crate) fn keep_incomplete(&self, root: RootId, sent: &SentSubvolume, progress: ReceiveProgress) -> Result<()> {
        self.flush_tagged(Some(root))?;
        self.set_mark(root, sent, Some(progress))?;
        Ok(self.engine.commit()?)
    }

    /// Finds the incomplete subvolume to resume under a name. Returns `None` if the name is free, also after what a killed
    /// receive left was deleted as `options` say. Fails if the name is taken by anything that cannot be resumed. `receives`
    /// are the running receives.
    pub(crate) fn resumable(
        &self,
        dir: InodeId,
        name: &[u8],
        sent: &SentSubvolume,
        options: &ReceiveOptions,
        receives: &ReceivesGuard<'_>,
    ) -> Result<Option<(RootId, ReceiveProgress)>, ReceiveProblem> {
        let keep = options.keep;
        let exists = || ReceiveProblem::Exists(name.to_vec());
        let id = match self.find_subvolume(dir, name) {
            Ok((id, _)) => id,
            Err(Error::NotFound) => return Ok(None),
            Err(Error::InvalidArgument(_)) => return Err(exists()),
            Err(error) => return Err(error.into()),
        };
        let item = self.engine.root_item(id).map_err(Error::from)?.ok_or(Error::NotFound)?;
        // A subvolume that was completed since the last commit has no received UUID in its root item yet, but it is
        // read-only already.
        let is_read_only = self.subvolume(id)?.is_read_only();
        if !item.received_uuid.is_nil() || is_read_only || item.stransid.0 == 0 {
            return Err(exists());
        }
        if receives.has(id) {
            return Err(ReceiveProblem::InProgress(name.to_vec()));
        }
        let incomplete = |hint| Err(ReceiveProblem::Incomplete { name: name.to_vec(), hint });
        let mark = match self.getxattr(InodeId::root_of(id), INCOMPLETE_XATTR.as_bytes()) {
            Ok(value) => Mark::decode(&value),
            Err(Error::NoData) => None,
            Err(error) => return Err(error.into()),
        };
        if options.replaces && self.is_left(id, &item, mark.as_ref(), sent)? {
            return match self.delete_subvolume(dir, name, Some(id)) {
                Ok(()) => Ok(None),
                Err(_) => incomplete(
                    "it cannot be deleted, such as for a subvolume in it; delete that first: ubtrfs subvolume delete",
                ),
            };
        }
        match mark {
            Some(Mark { sent: other, .. }) if other != *sent => {
                incomplete("it is of another stream; delete it first: ubtrfs subvolume delete")
            }
            Some(found @ Mark { stopped: Some(_), .. }) if keep && self.has_changed_since(id, &found)? => {
                incomplete("it was changed since; delete it first: ubtrfs subvolume delete")
            }
            Some(Mark { stopped: Some(progress), .. }) if keep => {
                self.set_mark(id, sent, None)?;
                Ok(Some((id, progress)))
            }
            Some(Mark { stopped: Some(_), .. }) => {
                incomplete("continue it with receive --keep, or delete it first: ubtrfs subvolume delete")
            }
            _ => incomplete("it was interrupted and cannot be continued; delete it first: ubtrfs subvolume delete"),
        }
    }

    /// Whether a killed receive of the same stream left this subvolume, and nobody changed it since (I4).
    fn is_left(&self, id: RootId, item: &RootItem, mark: Option<&Mark>, sent: &SentSubvolume) -> Result<bool> {
        if item.rtransid.0 != 0 || item.stransid != first_stransid(sent) {
            return Ok(false);
        }
        match mark {
            Some(mark) if mark.stopped.is_none() && mark.sent == *sent => {
                let sec = mark.at.sec.saturating_add(SLACK_SECS);
                Ok(!self.has_changed_since(id, &Mark { at: Timespec { sec, ..mark.at }, ..*mark })?)
            }
            Some(_) => Ok(false),
            None => {
                self.flush_tagged(Some(id))?;
                self.engine.commit()?;
                let item = self.engine.root_item(id)?.ok_or(Error::NotFound)?;
                Ok(item.generation == item.otransid)
            }
        }
    }

    /// Whether the UUID tree has room for another subvolume with this received UUID.
    pub(crate) fn has_room_for_received(&self, uuid: Uuid) -> Result<bool> {
        Ok(self.engine.has_room_for_uuid(KeyType::UUID_KEY_RECEIVED_SUBVOL, uuid)?)
    }

    /// Turns an incomplete subvolume into a received one: read-only, with the UUID and transid of the sent subvolume (R2).
    /// Returns the transaction that makes this durable.
    pub(crate) fn complete_received(&self, root: RootId, sent: &SentSubvolume) -> Result<Generation> {
        let _changing = self.context.begin_change()?;
        let _flags = self.subvolumes.lock_flags();
        if self.entered.is_deleted(root) {
            return Err(Error::NotFound);
        }
        // Other receives and snapshots may have used the room in the UUID tree since the stream began.
        if !self.has_room_for_received(sent.uuid)? {
            return Err(Error::Overflow);
        }
        let subvolume = self.subvolume(root)?;
        // Making the subvolume read-only waits until running changes have ended.
        subvolume.set_read_only(true)?;
        let done = self.put_received(root, sent);
        if done.is_err() {
            subvolume.set_read_only(false)?;
        }
        done
    }

    fn put_received(&self, root: RootId, sent: &SentSubvolume) -> Result<Generation> {
        let _subvolumes = self.subvolumes.lock();
        let reservation = self.context.reserve(MetadataPurpose::Change(COMPLETE_ITEMS))?;
        self.flush_tagged(Some(root))?;
        let inode = self.inode(InodeId::root_of(root))?;
        let state = inode.write()?;
        let mut changes = Vec::new();
        let gone = (INCOMPLETE_XATTR.as_bytes(), None);
        xattr::plan_set(&mut changes, (&inode, &state), &self.geometry, gone, XattrFlags::empty())?;
        let op = self.engine.begin(reservation);
        dir_item::put_changes(&op, &inode.home.tree, changes);
        let stransid = Generation(sent.ctransid);
        let (stime, rtime) = (Timespec::default(), Timespec::now());
        op.set_subvolume_received(root, Received { uuid: sent.uuid, stransid, stime, rtime, read_only: true });
        Ok(op.generation())
    }
}

/// Whether an inode in a tree has a change time after a mark.
fn is_any_newer(tree: &CommittedTree, mark: &Mark) -> Result<bool> {
    let root = tree.root();
    let mut nodes = vec![root.node_ptr()];
    while let Some(ptr) = nodes.pop() {
        let node = tree.source().read_node(&ptr)?;
        node.verify(&ptr)?;
        for slot in 0..node.nritems() {
            if !node.is_leaf() {
                let child = node.child_ptr(slot, root.tree);
                nodes.extend((child.generation.0 >= mark.transid).then_some(child));
            } else if node.key(slot).item_type == KeyType::INODE_ITEM {
                let item = InodeItem::decode(&Item::new(Arc::clone(&node), slot))
                    .map_err(|cause| ubtrfs_format::Corrupt::new(cause).in_tree(root.tree))?;
                if (item.ctime.sec, item.ctime.nsec) > (mark.at.sec, mark.at.nsec) {
                    return Ok(true);
                }
            }
        }
    }
    Ok(false)
}

/// Number of items to reserve for completing a received subvolume: the attribute, the root item and two UUID items,
/// with a margin.
const COMPLETE_ITEMS: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_come_back() {
        let sent = SentSubvolume { uuid: Uuid::from_u128(1), ctransid: 7, parent: None };
        let from = SentSubvolume { parent: Some((Uuid::from_u128(2), 3)), ..sent };
        let progress = ReceiveProgress { nr_commands: 5, digest: u32::MAX };
        let at = Timespec { sec: -5, nsec: 999_999_999 };
        for mark in [
            Mark { sent, at, transid: 8, stopped: None },
            Mark { sent: from, at, transid: 8, stopped: None },
            Mark { sent: from, at, transid: u64::MAX, stopped: Some(progress) },
        ] {
            assert_eq!(Mark::decode(&mark.encode()), Some(mark));
        }
        for bad in [&b""[..], b"stopped", b"stopped commands=x", b"\xff"] {
            assert_eq!(Mark::decode(bad), None);
        }
    }
}
