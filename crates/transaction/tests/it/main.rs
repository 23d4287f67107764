//! The tests of this crate, one module a subject, in one program: so the engine is linked once.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod apply_rows;
mod common;
mod engine;
mod full;
mod logged_data;
mod shared_blocks;
mod tree_view;
