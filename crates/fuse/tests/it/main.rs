//! The tests of this crate, one module a subject, in one program: so the engine is linked once.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod injected_calls;
mod interrupts;
mod listings;
mod mapped_power_cut;
mod page_cache;
mod panicking_server;
mod placement;
mod requests;
mod sandbox;
mod transports;
