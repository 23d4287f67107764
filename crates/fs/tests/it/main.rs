//! The tests of this crate, one module a subject, in one program: so the engine is linked once.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod arrays;
mod balance;
mod block_groups;
mod commit_races;
mod commits;
mod common;
mod concurrent;
mod data;
mod data_stress;
mod defragment;
mod full;
mod items;
mod leaf_fill;
mod model;
mod namespace;
mod nested_snapshots;
mod old_ends;
mod quota;
mod quota_limits;
mod quota_rounds;
mod readahead;
mod receive;
mod receive_clone;
mod receive_cuts;
mod receive_joined;
mod receive_verify;
mod refused_reservations;
mod relocation;
mod scale;
mod scrub;
mod send;
mod send_many;
mod shared_roots;
mod shared_until_commit;
mod simple_quota;
mod snapshot_cuts;
mod snapshots;
mod subvolume_races;
mod subvolumes;
mod trim;
mod unlinked_after_fsync;
mod unreserved;
mod walks;
mod writeback;
