//! A client of network block devices (NBD), and a small server.
//!
//! ```text
//! url         nbd://host[:port]/export, nbd+unix:///export?socket=PATH, nbds for TLS
//! tls         certificates, and encrypted sockets
//! dial        a socket to the server, and what tells exports of this machine apart
//! handshake   fixed newstyle: structured replies, then OPT_GO with the block sizes of the export
//! connection  requests of many threads in flight on one socket
//! server      serves content of this process to a client that may make no connections
//! client      several connections where the server permits it, what is lost with a connection, new connections for reads
//! ```
//!
//! The crate does no other I/O and decides nothing about filesystems. A server is untrusted. The facts come from the
//! protocol's documentation, `doc/proto.md` and `doc/uri.md` of the NetworkBlockDevice project.
//!
//! - I1. No bytes of a server cause a panic, an endless wait, or an allocation of more than 64 KiB for each reply. Replies
//!   that arrive while the thread that asked for them is still sending take at most the memory that this thread asked for.
//! - I2. A write succeeds only after the server's reply. A flush succeeds only if all writes that succeeded before are
//!   durable, as far as the server tells the truth. After a connection was lost, no write and no flush succeeds any more. If
//!   writes were not flushed then, no read succeeds either on a new connection.
//! - I3. A read succeeds only if the server sent each of its bytes once.
//! - I4. The data of reads and writes is never copied in this process, except for replies that arrive while the thread that
//!   asked for them is still sending, and what arrives together with a header. With TLS it is copied.
//! - I5. A request has a time limit. A server that sends nothing for that time counts as lost.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::as_conversions,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation
    )
)]

mod buffers;
mod client;
mod connection;
mod dial;
mod error;
mod handshake;
mod received;
mod server;
mod tls;
mod url;
mod wire;

pub use client::{Client, Settings};
pub use dial::{Dialed, ObjectOpener, dial, set_object_opener};
pub use error::NbdError;
pub use handshake::{ExportFlags, ExportInfo};
pub use server::{Content, serve};
pub use url::{NbdUrl, UrlError};
