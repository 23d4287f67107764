//! The tests of this crate, one module a subject, in one program: so the engine is linked once.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod disk_usage;
mod open_image;
mod permissions;
mod resolve;
mod server;
