//! The tests of this crate, one module a subject, in one program: so the engine is linked once.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod array_cuts;
mod corruption;
mod documents;
mod faults;
mod fsync_amid_writers;
mod hostile;
mod kernel_images;
mod kernel_oracle;
mod kills;
mod power_cut;
mod random_operations;
mod receive_rounds;
mod scale;
mod send;
mod stream;
mod threads;
mod tree_log;
mod two_writers;
mod unwritable;
