//! Snapshots in object stores: send streams cut into parts, with a manifest for each snapshot.
//!
//! The crate knows send streams only as bytes that are read and written; it has no engine. The command line connects it
//! with send and receive. One runtime inside of [`RemoteStore`] drives the asynchronous stores; callers see blocking
//! functions.
//!
//! ```text
//! push   stream --> [cut] --> part --hash, compress, encrypt--> parts/KEY/...      then snapshots/KEY
//! pull   snapshots/KEY --check--> parts/KEY/... --hash, decrypt, decompress, hash--> stream, in order
//! ```
//!
//! | module      | contents                                                                                       |
//! |-------------|------------------------------------------------------------------------------------------------|
//! | `location`  | URLs of stores, credentials from the environment                                               |
//! | `objects`   | reads, writes and lists objects, and repeats what failed                                       |
//! | `store`     | [`RemoteStore`]: one place in a store, and the snapshots that it has                           |
//! | `manifest`  | the description of a snapshot in a store; its bytes and its checks                             |
//! | `keys`      | encryption, seals, and the tags by which an interrupted push finds its parts                   |
//! | `marks`     | which pushes and prunes work in a store, so that they do not harm each other                   |
//! | `packing`   | one part between a stream and a store                                                          |
//! | `push`      | uploads a stream, in parallel                                                                  |
//! | `pull`      | downloads a stream, in parallel and in order                                                   |
//! | `chain`     | the parents that a snapshot needs                                                              |
//! | `retention` | which snapshots the rules of a prune keep                                                      |
//! | `prune`     | removes snapshots and parts that nothing needs                                                 |
//! | `verify`    | reads everything again                                                                         |
//! | `image`     | [`RemoteImage`]: an object as an image, read by ranges                                         |
//!
//! Invariants:
//! - P1. A manifest is written after all parts of its snapshot. A push that ended early leaves parts and no manifest.
//! - P2. Bytes of a store are untrusted. Sizes and counts are checked before memory is taken, and a part is verified by
//!   the SHA-256 of its stored bytes before it is decrypted or decompressed.
//! - P3. The writer of a pull gets only verified parts, in order. After a failure it gets nothing more.
//! - P4. Secrets appear neither in errors nor in messages.
#![forbid(unsafe_code)]

mod chain;
mod error;
mod image;
mod keys;
mod location;
mod manifest;
mod marks;
mod objects;
mod packing;
mod prune;
mod pull;
mod push;
mod retention;
mod store;
mod verify;

pub use chain::chain_of;
pub use error::RemoteError;
pub use image::RemoteImage;
pub use keys::RemoteKeys;
pub use manifest::{PartRecord, SnapshotKey, SnapshotManifest, SnapshotTime};
pub use marks::{StoreMark, StoreWork};
pub use prune::{PruneDecision, PrunePlan};
pub use push::{PushOptions, PushedStream};
pub use retention::{KeepRules, KeepWithin};
pub use store::{FoundSnapshot, RemoteStore, StoreUsage};
pub use verify::VerifyReport;

/// Result of the functions of this crate.
pub type Result<T, E = RemoteError> = std::result::Result<T, E>;
