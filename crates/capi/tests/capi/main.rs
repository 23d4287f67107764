//! Tests of libubtrfs from programs in C.
//!
//! Method: the shared library is linked as an installation does it. Programs of `programs/` and of `examples/` are
//! compiled against the header with all warnings as errors, as C11 and as C++17, and run with AddressSanitizer and
//! UndefinedBehaviorSanitizer. Images that they make are judged by `btrfs check` and by Linux.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod examples;
mod guide;
mod header;
mod installed;
mod library;
mod manage;
mod programs;
