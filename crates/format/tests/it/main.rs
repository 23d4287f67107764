//! The tests of this crate, one module a subject, in one program: so the engine is linked once.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod check_rules;
mod common;
mod kernel_images;
mod print_against_progs;
mod round_trip;
