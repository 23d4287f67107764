//! The FUSE protocol, as linux/fuse.h has it: requests decoded, answers encoded. No system calls.
//!
//! | module    | what                                      |
//! |-----------|-------------------------------------------|
//! | `wire`    | structs that travel, byte for byte        |
//! | `request` | what the kernel asks                      |
//! | `reply`   | what it is answered                       |
//! | `init`    | the first exchange: who can do what       |

mod init;
mod reply;
mod request;
mod wire;

pub use init::{Features, Limits};
pub(crate) use init::{MAJOR, Offer, answer_init};
pub use reply::{Entry, Reply};
pub use request::{Operation, Request};
pub(crate) use request::{fixed_len, forgotten};
pub use wire::{Attr, Setattr, Statfs, Time};
pub(crate) use wire::{InHeader, InvalEntry, InvalInode, OutHeader, opcode};
