//! libubtrfs: the library [`ubtrfs`] for programs in C.
//!
//! ```text
//! C program --> exports/ --> crate ubtrfs
//!                 |
//!                 +-- border    what C passes: texts, memory, structs, places for results
//!                 +-- handles   what C holds: numbers that a table knows
//!                 +-- failure   status and error of a call; panics end here
//! ```
//!
//! | module     | contents                                                                     |
//! |------------|------------------------------------------------------------------------------|
//! | `exports/` | the C functions and their structs, one file for each section of the header   |
//! | `border`   | pointers of C as types that check them                                       |
//! | `handles`  | the tables of open handles                                                   |
//! | `memory`   | memory that C programs give back with `ubtrfs_free`                          |
//! | `failure`  | errors, and the end of panics                                                |
//! | `callback` | calls of functions in C: devices, streams, archives, problems of a check     |
//! | `watched`  | devices that are read for a job, so that a check can be watched and cancelled |
//!
//! `tests/capi/header.rs` makes the header `ubtrfs.h` of the files in `exports/`, with their comments.
//!
//! Invariants:
//! - I1. `unsafe` is in `border` and `callback`. The files in `exports/` have it in the attribute `no_mangle`, and in the
//!   promise that a struct consists of numbers and pointers ([`GrowingStruct`]).
//! - I2. A handle is a number that is never used twice. It is no address, and nothing reads memory through it.
//! - I3. Every C function catches panics. No lock of this crate is held while the engine or a callback runs, apart from
//!   the lock of the file or directory that the call is about.
#![deny(unsafe_code)]
#![warn(missing_docs)]

#[allow(unsafe_code, reason = "reads and writes what C programs point to")]
mod border;
#[allow(unsafe_code, reason = "calls functions of C programs")]
mod callback;
#[allow(unsafe_code, reason = "the names of C functions are exported")]
pub mod exports;
mod failure;
mod handles;
mod memory;
mod watched;

pub use border::{
    Address, ErrorPlace, Given, GrowingStruct, HandleList, Memory, MemoryRoom, NumberList, OwnedAddress, ResultPlace,
    Text, TextList, UserPointer,
};
pub use failure::CallFailure;
pub use handles::{Handle, HandleKind, HandleTable};
