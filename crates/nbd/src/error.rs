//! [`NbdError`]: why an export cannot be opened, or a connection is lost.

use std::io;

use crate::url::UrlError;

/// A failure to open an export, or the loss of a connection. The text is one line without the URL, and says what to do.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    /// The URL is wrong.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// The program has no way to open objects.
    #[error("{url} cannot be opened: this program was built without object stores; copy the image to this machine")]
    NoObjects {
        /// The URL.
        url: String,
    },
    /// The object cannot be opened.
    #[error("{why}")]
    Object {
        /// The URL.
        url: String,
        /// The reason, and what to do.
        why: String,
    },
    /// The socket cannot be connected.
    #[error("cannot connect to {server}: {source}; check that the server runs and listens there")]
    Connect {
        /// The host and port, or the socket.
        server: String,
        /// The system's error.
        source: io::Error,
    },
    /// The server sends nothing.
    #[error("{server} does not answer; it may serve one client at a time and have one, or be no NBD server")]
    Silent {
        /// The host and port, or the socket.
        server: String,
    },
    /// The server closed the connection during the handshake.
    #[error(
        "{server} closed the connection during the handshake; it may refuse this machine: see the server's messages"
    )]
    Closed {
        /// The host and port, or the socket.
        server: String,
    },
    /// The server has the oldstyle handshake, or no structured way to open an export.
    #[error("{server} speaks only an old form of NBD, without OPT_GO; use a server such as qemu-nbd or nbdkit")]
    Old {
        /// The host and port, or the socket.
        server: String,
    },
    /// The first bytes are not those of an NBD server.
    #[error("{server} is no NBD server; check the host and the port, or the socket")]
    NotNbd {
        /// The host and port, or the socket.
        server: String,
    },
    /// The server breaks the protocol.
    #[error("{server} breaks the NBD protocol: {what}")]
    Protocol {
        /// The host and port, or the socket.
        server: String,
        /// The rule.
        what: &'static str,
    },
    /// The server has no such export.
    #[error("{server} has no export '{export}'{exports}; name one of the server's exports in the URL")]
    UnknownExport {
        /// The host and port, or the socket.
        server: String,
        /// The name.
        export: String,
        /// The names of the exports that the server lists, as a part of the message, or nothing.
        exports: String,
    },
    /// The server serves only clients with TLS.
    #[error("{server} requires TLS; write nbds in place of nbd in the URL")]
    TlsRequired {
        /// The host and port, or the socket.
        server: String,
    },
    /// The server has no TLS, and the URL asks for it.
    #[error(
        "{server} offers no TLS; check its settings, or write nbd in place of nbds if the network may see the data"
    )]
    NoTls {
        /// The host and port, or the socket.
        server: String,
    },
    /// The certificates for TLS cannot be used.
    #[error("no TLS with {server}: {why}")]
    Certificates {
        /// The host and port, or the socket.
        server: String,
        /// The file and the reason, and what to do.
        why: String,
    },
    /// The handshake of TLS failed, or the server's certificate is not accepted.
    #[error(
        "no TLS with {server}: {why}; for a server with its own authority, add tls-certificates=DIR to the URL, and for \
         another name in its certificate, tls-hostname=NAME"
    )]
    Tls {
        /// The host and port, or the socket.
        server: String,
        /// The reason.
        why: String,
    },
    /// The server refuses the export.
    #[error("{server} refuses the export '{export}'{reason}; see the server's settings")]
    Refused {
        /// The host and port, or the socket.
        server: String,
        /// The name.
        export: String,
        /// The server's reason, as a part of the message, or nothing.
        reason: String,
    },
    /// The server needs larger requests than a filesystem makes.
    #[error("{server} takes only requests of whole blocks of {min_block} bytes, and btrfs needs 4096 or less")]
    BlockSize {
        /// The host and port, or the socket.
        server: String,
        /// The smallest request in bytes.
        min_block: u32,
    },
    /// The system fails a call on the socket.
    #[error("the connection to {server} failed: {source}")]
    Io {
        /// The host and port, or the socket.
        server: String,
        /// The system's error.
        source: io::Error,
    },
}
