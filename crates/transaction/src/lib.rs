//! Transactions: item changes that become durable together.
//!
//! Only this crate loads block groups and free space from the trees and writes them back, derives references from item
//! changes, copies shared blocks on write, makes chunks, and writes the superblock.
//!
//! The modules, from the top down; each imports only from modules below it:
//!
//! - `devices`: work on whole devices, such as bringing one up to date.
//! - `moving`: moving block groups, with commits between the steps.
//! - `durable`: changes that are durable when the call returns: fsync, quotas, subvolumes, the label.
//! - `reservation`: reserving space, with the flushes and commits that make room.
//! - `commit`: the sequence that makes a transaction durable, and applying delayed items to their trees.
//! - `relocation`: moving extents out of a block group, inside of a commit.
//! - `tree_log`: the log that makes an fsync durable without a commit, and reading the log at open.
//! - `roots`: making, changing and dropping subvolumes and snapshots.
//! - `cow`: how nodes and references change when a batch changes a tree.
//! - `qgroup`: quota groups, and the accounting of extents by their users.
//! - `backref`: the references to an extent, and the subvolumes and inodes that use it.
//! - `extents`: extent, csum and free space trees, data extents, chunk allocation.
//! - `handle`: transaction handles, and the room that their changes need.
//! - `delayed`: changes of items and data extents in memory, and trees as readers see them with these changes.
//! - `nodes`: tree nodes between memory and the devices.
//! - `health`: turning the filesystem read-only after errors and panics, statistics, the timeline.
//!
//! Modules outside of this order:
//!
//! - `engine`, `open`: the type [`Engine`], and opening a filesystem.
//! - `find_devices`, `usable_devices`: which devices are opened.
//! - `rescue`: what opening a damaged filesystem passes over.
//! - `commit_state`: the commit lock and the last superblock, which all modules use.
//! - `lock_rank`: locks that check their order in debug builds.
//! - `job`: progress of long operations, and requests to pause or cancel them.
//! - `event_count`: threads that wait for the next event of a kind.
//! - `per_thread`: copies of a value, one for each thread.
//! - `race`: places where tests delay threads.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

mod backref;
mod commit;
mod commit_state;
mod cow;
#[cfg(test)]
mod crafted_tests;
mod delayed;
mod devices;
mod durable;
mod engine;
mod event_count;
mod extents;
mod find_devices;
mod handle;
mod health;
mod job;
pub mod lock_rank;
mod moving;
mod nodes;
mod open;
mod per_thread;
mod qgroup;
mod race;
mod relocation;
mod rescue;
mod reservation;
mod roots;
#[cfg(test)]
mod test_tree;
mod tree_log;
mod usable_devices;

pub use backref::inodes::ExtentUse;
pub use delayed::delayed_item::INODES_PER_ROW;
#[cfg(debug_assertions)]
pub use delayed::tree_view::take_nr_steps;
pub use delayed::tree_view::{ItemRef, Tree};
pub use devices::replace::ReplaceRequest;
pub use devices::resync::Resync;
pub use devices::rewrite_id::rewrite_id;
pub use devices::scrub::{DeviceScrub, ScrubCounts, ScrubFinding, ScrubRequest};
pub use devices::size::DEVICE_LEN_MIN;
pub use durable::fsync::LogStats;
pub use durable::quota::{QgroupSummary, QuotaKind, QuotaStatus};
pub use engine::{BackgroundWork, BlockGroupUsage, DirtyData, Engine, EngineOptions, FilesystemGeometry, Flusher};
pub use event_count::EventCount;
pub use extents::conversion::ConversionTargets;
pub use extents::data_io::{DataExtent, DataReservation};
pub use extents::replacing::SuspendedReplacement;
pub use find_devices::find_devices;
pub use handle::quota_reservation::{QgroupId, QuotaReservation};
#[cfg(debug_assertions)]
pub use handle::refusal::{end_refusal, refuse_reservation_after};
pub use handle::root_change::{NewContent, NewSubvolume, Received};
pub use handle::trans_handle::{MetadataReservation, TransHandle, TreeChanges};
pub use health::metric::{Metric, prometheus_text};
pub use health::stats::{EngineStats, ReclaimReason, Span, SpanGuard};
pub use health::unwind::note_panic;
pub use job::{Job, JobProgress};
pub use moving::migrate::MigratedChunk;
pub use moving::relocate::{RelocatedGroup, RelocationFailure};
pub use nodes::leaf_ahead::LeafReadAhead;
pub use per_thread::PerThread;
#[cfg(debug_assertions)]
pub use race::delay_races;
pub use race::race_point;
pub use rescue::Rescue;
pub use roots::committed::{CommittedTree, UseHint};
pub use tree_log::FoundLog;
pub use ubtrfs_space::BlockGroup;
pub use ubtrfs_volumes::{ChunkPlacement, DeviceSummary, MemberState, detect};
pub use usable_devices::usable_devices;
