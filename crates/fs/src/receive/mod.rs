//! Receiving send streams: [`Fs::receive`](crate::Fs::receive) applies a stream below a directory.
//!
//! ```text
//! input --[thread: read, verify checksums]--> batches --> Session --> Current (a subvolume) --> Fs
//! ```
//!
//! | module       | contents                                                                                     |
//! |--------------|----------------------------------------------------------------------------------------------|
//! | `input`      | the thread that reads the input                                                              |
//! | `session`    | the whole input: where each subvolume begins and ends; which errors end the receive          |
//! | `apply`      | one command on the subvolume that is being received                                          |
//! | `joined`     | consecutive commands that one change applies                                                 |
//! | `walk`       | from paths to inodes, which confines the stream to its subvolume                             |
//! | `origin`     | finding parents and clone sources                                                            |
//! | `incomplete` | the mark of an incomplete subvolume, resuming it, and the `received_uuid` of a complete one  |
//! | `sharing`    | sharing data with the sent subvolume, if it is on this filesystem                            |
//! | `verify`     | reading the received data again, and comparing it with the stream                            |
//! | `error`      | a failed receive, with its command                                                           |
//!
//! Invariants:
//! - R1. A stream changes nothing outside of the subvolumes that it makes. A path is walked name by name from the root
//!   of its subvolume; a symbolic link or another subvolume on the way is an error (`walk`).
//! - R2. A subvolume that is not complete has no `received_uuid` and is marked: its root item has a `stransid` as soon
//!   as the subvolume is committed for the first time, and its root directory has the attribute [`INCOMPLETE_XATTR`].
//!   When all data of the subvolume is on disk, one operation removes the attribute, sets `received_uuid` and makes the
//!   subvolume read-only.
//! - R3. Memory is bounded. The batches of input that wait or are applied (`input`) have a share of the
//!   filesystem's memory, which sends and receives that run at once divide. A second share is divided between four stores ([`store_bytes`]): the state that `verify`
//!   expects, and the directories that up to three walks know (`walk`), through the received subvolume, through the
//!   clone source that was used last, and through the sent subvolume (`sharing`). In addition, one batch is being
//!   read, and one command at a time has its decompressed data and the data that `sharing` compares. Writes of a
//!   receive are throttled as other writes are.
//! - R4. After a failure the incomplete subvolume is deleted, or kept with the number of its complete commands.

mod apply;
mod error;
mod incomplete;
mod input;
mod joined;
mod origin;
mod session;
mod sharing;
mod verify;
mod walk;

pub use error::{ReceiveError, ReceiveProblem};
pub use incomplete::INCOMPLETE_XATTR;
pub use session::{ReceiveOptions, ReceiveReport, ReceivedSubvolume};
pub use verify::Verified;

use crate::Fs;

/// The memory of one store (R3).
fn store_bytes(fs: &Fs) -> u64 {
    fs.streams.part_bytes() / NR_STORES
}

const NR_STORES: u64 = 4;
