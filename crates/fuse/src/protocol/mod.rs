//! The FUSE protocol of linux/fuse.h: decodes requests and encodes answers. This module makes no system calls.
//!
//! | module    | contents                                  |
//! |-----------|-------------------------------------------|
//! | `wire`    | the protocol's structs, byte for byte     |
//! | `request` | requests from the kernel                  |
//! | `reply`   | answers to the kernel                     |
//! | `init`    | the first exchange: versions and features |

mod init;
mod reply;
mod request;
mod wire;

pub use init::{Features, InitLimits};
pub(crate) use init::{MAJOR, Offer, UNKNOWN_ID, answer_init};
pub use reply::{EntryReply, Reply, Statx};
pub use request::{FuseRequest, Operation};
pub(crate) use request::{fixed_len, forgotten};
pub(crate) use wire::opcode::name as opcode_name;
pub use wire::{FuseAttr, Setattr, Statfs, Time};
pub(crate) use wire::{InHeader, InvalEntry, InvalInode, OutHeader, opcode};
