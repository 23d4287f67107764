//! Transactions: what is changed together becomes durable together.
//!
//! Fourth floor. It alone loads space from the trees and persists it, derives references from item changes, copies
//! shared blocks on write, makes chunks, and writes the superblock.
//!
//! - [`engine`]: [`Engine`], opening, failure, reservations of metadata.
//! - [`operation`]: [`Operation`], a group of item changes inside one epoch.
//! - [`tree_view`], [`delayed_item`]: trees as readers see them.
//! - [`item_map`], [`name_map`], [`item_page`], [`item_log`]: item changes in memory, by key.
//! - [`block_rsv`]: whether what an epoch takes on finds room at its commit.
//! - [`commit`]: the one sequence that makes an epoch durable.
//! - [`apply_trees`], [`apply_rows`], [`throttle`]: delayed items go into their trees, and stay within their memory.
//! - [`subvolume_roots`], [`dead_roots`]: subvolumes and snapshots are made, changed and dropped.
//! - [`cow`], [`child_refs`]: what happens to nodes and references when a batch is applied.
//! - [`leaf_ahead`], [`leaf_hint`], [`leaf_reader`], [`node_store`], [`node_stream`]: nodes between memory and the devices.
//! - [`lanes`]: what every operation touches, for each thread by itself.
//! - [`chunk_alloc`]: chunks and block groups.
//! - [`data_io`], [`data_ledger`]: data extents and their checksums.
//! - [`dev_stats`]: error counters of the devices.
//! - [`tree_log`]: what fsync writes without a commit, and finding it again.
//! - [`stats`], [`metric`], [`timeline`]: what is counted and timed.
//! - [`unwind`]: panics turn the filesystem read-only.
//! - [`extent_tree`], [`free_space_tree`], [`csum_tree`]: batches for the trees that account for space.

#![forbid(unsafe_code)]

mod apply_rows;
mod apply_trees;
mod block_rsv;
mod child_refs;
mod chunk_alloc;
mod commit;
mod cow;
mod csum_tree;
mod data_io;
mod data_ledger;
mod dead_roots;
mod delayed_item;
mod dev_stats;
mod engine;
mod extent_tree;
mod free_space_tree;
mod item_log;
mod item_map;
mod item_page;
mod lanes;
mod leaf_ahead;
mod leaf_hint;
mod leaf_reader;
#[cfg(test)]
mod ledger_kernel_tests;
mod metric;
mod name_map;
mod node_store;
mod node_stream;
mod open;
mod operation;
mod root_item;
#[cfg(test)]
mod snapshot_epoch_tests;
mod stats;
mod subvolume_roots;
#[cfg(test)]
mod test_tree;
mod throttle;
mod ticket;
mod timeline;
mod tree_log;
mod tree_view;
mod unwind;

pub use data_io::{DataExtent, DataReservation};
pub use delayed_item::INODES_A_ROW;
pub use engine::{BackgroundWork, Engine, Flusher, Geometry, OpenOptions, Usage};
pub use leaf_ahead::LeafReadAhead;
pub use metric::{Metric, prometheus_text};
pub use operation::{MetadataReservation, Operation, TreeChanges};
pub use stats::{Reclaim, Span, SpanGuard, Stats};
pub use subvolume_roots::{NewContent, NewSubvolume};
pub use tree_log::{FoundLog, LogStats};
pub use tree_view::{ItemRef, Tree};
pub use unwind::note_panic;
