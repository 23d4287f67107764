//! Writing the log: collects changes, makes the blocks of the log, and writes them and the superblock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ubtrfs_error::{Error, Result};
use ubtrfs_format::{Generation, Ino, Key, KeyType, RootId};
use ubtrfs_tree::{Batch, Node, RootPtr};
use ubtrfs_volumes::LogPromise;

use super::LogContent;
use super::collect::{Collector, LogStop};
use super::log_tree::BlockIdentity;
use crate::engine::Engine;
use crate::handle::metadata_reservation::ReservationPurpose;
use crate::lock_rank::{self, Rank};
use crate::race::race_point;
use crate::roots::root_item::blank_root_item;

/// The result of writing a log.
pub(crate) enum LogOutcome {
    /// The log is durable.
    Written,
    /// The log has all changes already.
    Unchanged,
    /// A commit is needed, because the log cannot express the changes.
    NeedsCommit(&'static str),
}

impl Engine {
    /// Writes the log for these inodes. The caller holds the commit lock.
    pub(crate) fn write_log(&self, requests: Vec<(RootId, Ino)>) -> Result<LogOutcome> {
        lock_rank::check_held(Rank::Commit, "I1 of tree_log: the log is written under the commit lock");
        self.check_writable()?;
        self.commit_state.check_not_held()?;
        let mut wanted: BTreeMap<RootId, BTreeSet<Ino>> = BTreeMap::new();
        for (root, ino) in requests {
            wanted.entry(root).or_default().insert(ino);
        }
        let mut guard = self.tree_log.state.lock();
        let state = &mut *guard;
        if self.volumes.needs_full_commit() {
            return Ok(LogOutcome::NeedsCommit("a device missed commits"));
        }
        let has_several_devices = self.volumes.has_several_devices();
        if has_several_devices && state.blocks.taken_bytes() > LOG_MAX_BYTES {
            return Ok(LogOutcome::NeedsCommit("the log has taken much space"));
        }
        if state.needs_commit {
            return Ok(LogOutcome::NeedsCommit("the log in memory is not the one on the devices, or trees changed"));
        }
        let transid = Generation(self.commit_state.committed().0.saturating_add(1));
        let batches = match self.collect(state, &wanted, transid) {
            Ok(batches) => batches,
            Err(LogStop::Commit(why)) => {
                state.needs_commit = true;
                return Ok(LogOutcome::NeedsCommit(why));
            }
            Err(LogStop::Error(error)) => {
                state.needs_commit = true;
                return Err(error);
            }
        };
        if batches.is_empty() {
            return Ok(LogOutcome::Unchanged);
        }
        self.abort_state.or_abort("fsync", || self.volumes.check_superblocks_are_ours())?;
        race_point();
        assert_eq!(
            self.commit_state.committed().0.saturating_add(1),
            transid.0,
            "I1 of tree_log: a commit came between"
        );
        // This flag is cleared when the superblock is durable.
        state.needs_commit = true;
        let (nodes, root) = match self.apply_to_log(state, batches, transid) {
            Ok(done) => done,
            Err(Error::NoSpace) => return Ok(LogOutcome::NeedsCommit("no room for the log")),
            Err(error) => return Err(error),
        };
        let Some(root) = root.filter(|_| !nodes.is_empty()) else {
            state.needs_commit = false;
            return Ok(LogOutcome::Unchanged);
        };
        // Check after the blocks are allocated. The check locks the list of pending chunks, and a chunk enters this
        // list under the same lock under which its space becomes allocatable. So if no chunk is pending now, the log
        // lies in recorded chunks.
        if !self.pending_chunks.is_empty() {
            return Ok(LogOutcome::NeedsCommit("a chunk is new"));
        }
        if let Err(error) = self.node_writer().write_runs(&nodes, true) {
            tracing::warn!("fsync commits, because the log could not be written: {error}");
            return Ok(LogOutcome::NeedsCommit("the log could not be written"));
        }
        race_point();
        let mut superblock = self.superblock();
        debug_assert_eq!(
            superblock.generation,
            self.commit_state.committed(),
            "C4 of volumes::commit_super: a log raises no generation"
        );
        superblock.log_root = root.bytenr;
        superblock.log_root_level = root.level;
        let durable = self.volumes.settle_failed_writes().and_then(|()| self.volumes.flush());
        match durable.and_then(|()| self.volumes.write_log_superblock(&superblock)) {
            Ok(LogPromise::Durable) => {}
            Ok(LogPromise::NeedsCommit) => return Ok(LogOutcome::NeedsCommit("a device missed commits")),
            Err(error) => {
                self.abort_state.fail("writing the log", &error);
                return Err(error);
            }
        }
        state.blocks.superblock_is_durable(nodes.len(), has_several_devices);
        state.needs_commit = false;
        Ok(LogOutcome::Written)
    }

    /// Returns the changes of the log trees, as of one moment.
    fn collect(
        &self,
        state: &mut LogContent,
        wanted: &BTreeMap<RootId, BTreeSet<Ino>>,
        transid: Generation,
    ) -> Result<Vec<(RootId, Batch)>, LogStop> {
        // The gate is closed: every operation is complete or has not begun.
        let _gate = self.running.close_gate();
        if self.running.transid() != transid {
            return Err(LogStop::Commit("an earlier transaction is not committed"));
        }
        if !self.pending_chunks.is_empty() {
            return Err(LogStop::Commit("a chunk is new"));
        }
        if self.tree_log.dir_moved.load(Ordering::Acquire) == transid.0 {
            return Err(LogStop::Commit("a directory moved"));
        }
        let mut batches = Vec::new();
        for (root, inos) in wanted {
            let tree = self.tree(*root)?.ok_or(LogStop::Commit("the subvolume is gone"))?;
            let log = state.subvolumes.entry(*root).or_default();
            let batch = Collector::new(self, &tree, log)?.run(inos)?;
            if !batch.is_empty() {
                batches.push((*root, batch));
            }
        }
        Ok(batches)
    }

    /// Applies the changes to the log trees. Returns the nodes to write and the root of the log root tree.
    #[allow(clippy::arithmetic_side_effects, reason = "numbers of blocks in memory; the node size is at least 4096")]
    fn apply_to_log(
        &self,
        state: &mut LogContent,
        batches: Vec<(RootId, Batch)>,
        transid: Generation,
    ) -> Result<(Vec<Arc<Node>>, Option<RootPtr>)> {
        let identity = BlockIdentity {
            fsid: self.commit_state.superblock().node_fsid(),
            chunk_tree_uuid: self.chunk_tree_uuid,
            generation: transid,
            nodesize: self.geometry.nodesize,
        };
        let mut nodes = Vec::new();
        let mut roots = Batch::new();
        let has_room = |bytes| self.has_room_for_metadata_and(bytes, ReservationPurpose::Change);
        state.blocks.begin(&self.space, self.geometry.nodesize, has_room);
        for (root, batch) in batches {
            let Some(log) = state.subvolumes.get_mut(&root) else { continue };
            // Each change copies at most two leaves and the nodes above them; all changes together copy each node of
            // the log at most once.
            let nr_new = batch_bytes(&batch) / u64::from(self.geometry.nodesize / 4) + 16;
            let nr_copied = log.tree.nr_nodes().min(batch.len().saturating_mul(4));
            let nr_blocks = usize::try_from(nr_new).unwrap_or(usize::MAX).saturating_add(nr_copied);
            self.prepare_log_blocks(&mut state.blocks, nr_blocks)?;
            nodes.extend(log.tree.apply(&batch, &mut state.blocks, identity)?);
            if let Some(ptr) = log.tree.root() {
                let key = Key::new(RootId::TREE_LOG.0, KeyType::ROOT_ITEM, root.0);
                roots.push((key, Some(blank_root_item(&ptr, self.geometry.nodesize).encode().into())));
            }
        }
        self.prepare_log_blocks(&mut state.blocks, state.roots.nr_nodes() + 8)?;
        nodes.extend(state.roots.apply(&roots, &mut state.blocks, identity)?);
        nodes.sort_unstable_by_key(|node| node.bytenr());
        Ok((nodes, state.roots.root()))
    }

    /// Allocates space for the log. The room that the trees need for the next commit is left free.
    fn prepare_log_blocks(&self, blocks: &mut super::LogBlocks, nr_blocks: usize) -> Result<()> {
        let nodesize = self.geometry.nodesize;
        let missing = blocks.missing_bytes(nodesize, nr_blocks);
        if missing == 0 {
            return Ok(());
        }
        let has_room = self.has_room_for_metadata_and(missing, ReservationPurpose::Change);
        if has_room && blocks.prepare(&self.space, nodesize, nr_blocks) { Ok(()) } else { Err(Error::NoSpace) }
    }
}

/// Space of a log on several devices from which on a commit ends it, because its addresses are not used again (I2 of
/// `log_tree`).
const LOG_MAX_BYTES: u64 = 32 << 20;

fn batch_bytes(batch: &Batch) -> u64 {
    batch.iter().map(|(_, value)| value.as_ref().map_or(0, |value| value.len() as u64).saturating_add(64)).sum()
}
