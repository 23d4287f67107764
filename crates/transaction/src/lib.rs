//! Transactions: what is changed together becomes durable together.
//!
//! Fourth floor. It alone loads space from the trees and persists it, derives references from item changes, copies
//! shared blocks on write, makes chunks, and writes the superblock.
//!
//! - `handle`: operations, what they reserve, and what they wait for before they may begin.
//! - `delayed`: item changes in memory, and trees as readers see them, merged with those.
//! - `commit`: the one sequence that makes a transaction durable; delayed items go into their trees.
//! - `cow`: what happens to nodes and references when a batch changes a tree.
//! - `nodes`: tree nodes between memory and the devices.
//! - `extents`: extent, csum and free space trees, data extents, chunk allocation.
//! - `roots`: subvolumes and snapshots are made, changed and dropped.
//! - `tree_log`: what fsync writes without a commit, and finding it again.
//! - `health`: panics, device error counters, statistics, the timeline.
//! - `engine`, `open`: [`Engine`] itself, and how it is opened.

#![forbid(unsafe_code)]

mod commit;
mod cow;
mod delayed;
mod engine;
mod extents;
mod handle;
mod health;
mod nodes;
mod open;
mod roots;
#[cfg(test)]
mod test_tree;
mod tree_log;

pub use delayed::delayed_item::INODES_PER_ROW;
pub use delayed::tree_view::{ItemRef, Tree};
pub use engine::{BackgroundWork, Engine, Flusher, Geometry, OpenOptions, Usage};
pub use extents::data_io::{DataExtent, DataReservation};
pub use handle::trans_handle::{MetadataReservation, TransHandle, TreeChanges};
pub use health::metric::{Metric, prometheus_text};
pub use health::stats::{Reclaim, Span, SpanGuard, Stats};
pub use health::unwind::note_panic;
pub use nodes::leaf_ahead::LeafReadAhead;
pub use roots::subvolume_roots::{NewContent, NewSubvolume};
pub use tree_log::{FoundLog, LogStats};
