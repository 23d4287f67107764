//! The tests of this crate, one module a subject, in one program: so the engine is linked once.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod copy;
mod doc_examples;
mod examples;
mod library;
mod manage;
mod mount;
mod refusals;
