//! [`NodeWriter`]: writes nodes to the devices, in large contiguous pieces.

use std::io::IoSlice;
use std::sync::Arc;

use ubtrfs_device::AlignedBuf;
use ubtrfs_error::{Result, side_by_side};
use ubtrfs_format::node::finish_block;
use ubtrfs_format::{CsumType, Logical};
use ubtrfs_tree::Node;
use ubtrfs_volumes::Volumes;

use crate::health::abort::AbortState;
use crate::health::stats::{EngineStats, Span};
use crate::nodes::store::NodeStore;
use crate::nodes::threads::nr_threads;

/// The parts of a filesystem that a write of nodes needs.
#[derive(Clone, Copy)]
pub(crate) struct NodeWriter<'e> {
    pub(crate) volumes: &'e Volumes,
    pub(crate) store: &'e NodeStore,
    pub(crate) stats: &'e EngineStats,
    pub(crate) abort_state: &'e AbortState,
    pub(crate) csum_type: CsumType,
    /// Bytes of a node.
    pub(crate) nodesize: u32,
}

impl NodeWriter<'_> {
    /// Checks nodes (sorted by address) and writes them in large contiguous pieces, on several threads.
    pub(crate) fn write_nodes(&self, nodes: &[Arc<Node>]) -> Result<()> {
        let _write = self.stats.span(Span::WriteNodes);
        let share = nodes.len().div_ceil(nr_threads()).max(MIN_NODES_PER_WRITER);
        side_by_side(nodes.chunks(share).map(|part| move || self.write_runs(part, false))).into_iter().collect()
    }

    /// Writes nodes (sorted by address). If `all_copies` is set, a failed write of any copy is an error: at an address
    /// that was already written in this generation, a stale copy would look valid.
    pub(crate) fn write_runs(&self, nodes: &[Arc<Node>], all_copies: bool) -> Result<()> {
        self.abort_state.check_still_ours(self.volumes)?;
        let write = |start, run: &[u8]| match all_copies {
            true => self.volumes.write(start, run),
            false => self.volumes.write_verifiable(start, &[IoSlice::new(run)]),
        };
        self.abort_state.enter();
        let most = nodes.len().saturating_mul(self.nodesize as usize);
        let mut run = AlignedBuf::with_capacity(RUN_BYTES.min(most));
        let mut start = Logical(0);
        for node in nodes {
            let end = start.advance(run.len() as u64);
            let same_chunk =
                self.volumes.chunk_at(start).is_some_and(|(at, chunk)| node.bytenr() < at.advance(chunk.length));
            let has_room = run.len().saturating_add(node.raw().len()) <= run.capacity();
            if !run.is_empty() && (node.bytenr() != end || !has_room || !same_chunk) {
                write(start, &run)?;
                run.clear();
            }
            if run.is_empty() {
                start = node.bytenr();
            }
            self.store.check_before_write(node.raw())?;
            self.stats.node_written(node);
            let at = run.len();
            run.extend_from_slice(node.raw());
            finish_block(&mut run[at..], self.csum_type);
        }
        if !run.is_empty() {
            write(start, &run)?;
        }
        Ok(())
    }
}

const MIN_NODES_PER_WRITER: usize = 64;
/// Maximum number of bytes in one write to the device.
const RUN_BYTES: usize = 4 << 20;
