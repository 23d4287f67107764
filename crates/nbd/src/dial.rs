//! [`dial`]: a socket to a server, and the identity of an export on this machine.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::error::NbdError;
use crate::tls::{TlsClient, TlsSocket};
use crate::url::{NbdUrl, ServerAddress};

/// A connected socket, without TLS or with it.
#[derive(Debug)]
pub(crate) enum Socket {
    Plain(PlainSocket),
    Tls(Box<TlsSocket>),
}

impl Socket {
    fn plain(&self) -> &PlainSocket {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(socket) => &socket.plain,
        }
    }

    /// As [`PlainSocket::set_patience`].
    pub(crate) fn set_patience(&self, patience: Duration) -> io::Result<()> {
        self.plain().set_patience(patience)
    }

    /// As [`PlainSocket::receive`].
    pub(crate) fn receive(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.receive(bufs),
            Self::Tls(socket) => socket.receive(bufs),
        }
    }

    /// As [`PlainSocket::send`].
    pub(crate) fn send(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.send(bufs),
            Self::Tls(socket) => socket.send(bufs),
        }
    }

    /// Writes all bytes.
    pub(crate) fn send_all(&self, bytes: &[u8]) -> io::Result<()> {
        all(bytes, |rest| self.send(&[IoSlice::new(rest)]))
    }

    /// Says that nothing follows, where the connection has a way to say it.
    pub(crate) fn close(&self) {
        if let Self::Tls(socket) = self {
            socket.close();
        }
    }

    /// Ends the connection for all threads.
    pub(crate) fn shut_down(&self) {
        let _ = match self.plain() {
            PlainSocket::Tcp(socket) => socket.shutdown(Shutdown::Both),
            PlainSocket::Unix(socket) => socket.shutdown(Shutdown::Both),
        };
    }
}

/// A connected socket without TLS.
#[derive(Debug)]
pub(crate) enum PlainSocket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl PlainSocket {
    /// Sets how long a read and a write may wait.
    pub(crate) fn set_patience(&self, patience: Duration) -> io::Result<()> {
        let patience = Some(patience.max(Duration::from_millis(1)));
        sockopt::set_socket_timeout(self, Timeout::Recv, patience)?;
        Ok(sockopt::set_socket_timeout(self, Timeout::Send, patience)?)
    }

    /// Reads what has arrived into the buffers, at most [`NR_BUFS_MAX`] of them. Returns 0 at the end of the stream.
    /// Fails with `WouldBlock` if nothing arrives in time.
    pub(crate) fn receive(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let nr_bufs = bufs.len().min(NR_BUFS_MAX);
        retried(|| rustix::io::readv(self, bufs.get_mut(..nr_bufs).unwrap_or_default()))
    }

    /// Writes a part of the buffers, at most [`NR_BUFS_MAX`] of them. Fails with `WouldBlock` if the server takes nothing
    /// in time.
    pub(crate) fn send(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let nr_bufs = bufs.len().min(NR_BUFS_MAX);
        retried(|| rustix::io::writev(self, bufs.get(..nr_bufs).unwrap_or_default()))
    }

    /// Writes all bytes.
    pub(crate) fn send_all(&self, bytes: &[u8]) -> io::Result<()> {
        all(bytes, |rest| self.send(&[IoSlice::new(rest)]))
    }
}

/// Sends until no bytes are left.
fn all(mut rest: &[u8], mut send: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<()> {
    while !rest.is_empty() {
        let sent = send(rest)?;
        rest = rest.get(sent..).unwrap_or_default();
    }
    Ok(())
}

impl AsFd for PlainSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(socket) => socket.as_fd(),
            Self::Unix(socket) => socket.as_fd(),
        }
    }
}

/// Maximum number of buffers of a system call (`IOV_MAX`).
pub(crate) const NR_BUFS_MAX: usize = 1024;

fn retried(mut call: impl FnMut() -> rustix::io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            done => return Ok(done?),
        }
    }
}

/// A socket to a server, before the handshake.
#[derive(Debug)]
pub struct Dialed {
    pub(crate) socket: PlainSocket,
    pub(crate) url: NbdUrl,
    /// The certificates for the handshake, if the URL asks for TLS.
    pub(crate) tls: Option<TlsClient>,
    identity: String,
}

impl Dialed {
    /// What tells exports apart on this machine, at most 100 bytes: URLs with equal identities name one export. URLs of one
    /// export can have different identities, for example by two addresses of a host.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// The other end of a pair of sockets, for tests and fuzzing.
    pub fn of_socket(socket: UnixStream) -> Self {
        let url = NbdUrl { address: ServerAddress::Unix("pair".into()), export: b"export".to_vec(), tls: None };
        Self { socket: PlainSocket::Unix(socket), url, tls: None, identity: String::new() }
    }
}

/// Connects a socket to the server of a URL. Each address of the host gets at most `patience`.
///
/// # Errors
/// [`NbdError::Connect`]; [`NbdError::Certificates`].
pub fn dial(url: &NbdUrl, patience: Duration) -> Result<Dialed, NbdError> {
    let tls = url.tls.as_ref().map(|settings| TlsClient::new(settings, url.host())).transpose();
    let tls = tls.map_err(|error| NbdError::Certificates { server: url.to_string(), why: error.to_string() })?;
    dial_with(url, tls, patience)
}

/// As [`dial`], with certificates that were read before.
pub(crate) fn dial_with(url: &NbdUrl, tls: Option<TlsClient>, patience: Duration) -> Result<Dialed, NbdError> {
    let (socket, place) = match &url.address {
        ServerAddress::Tcp(host, port) => dial_tcp(host, *port, patience),
        ServerAddress::Unix(path) => dial_unix(path, patience),
        ServerAddress::Object(object) => return dial_object(url, object, patience),
    }
    .map_err(|source| NbdError::Connect { server: url.to_string(), source })?;
    let identity = format!("ubtrfs-nbd-{place}-{:016x}", fingerprint(&url.export));
    Ok(Dialed { socket, url: url.clone(), tls, identity })
}

/// Starts a process that serves an object, and returns a socket to it, with [`crate::serve`] at the other end. It may take
/// some time, and names the reason if it fails, with what to do.
pub type ObjectOpener = fn(url: &str, patience: Duration) -> Result<UnixStream, String>;

static OBJECT_OPENER: OnceLock<ObjectOpener> = OnceLock::new();

/// Tells how objects are opened. Only the first call in a process counts.
pub fn set_object_opener(opener: ObjectOpener) {
    let _ = OBJECT_OPENER.set(opener);
}

fn dial_object(url: &NbdUrl, object: &str, patience: Duration) -> Result<Dialed, NbdError> {
    let opener = OBJECT_OPENER.get().ok_or_else(|| NbdError::NoObjects { url: url.to_string() })?;
    let socket = opener(object, patience).map_err(|why| NbdError::Object { url: url.to_string(), why })?;
    let identity = format!("ubtrfs-object-{:016x}", fingerprint(object.as_bytes()));
    Ok(Dialed { socket: PlainSocket::Unix(socket), url: url.clone(), tls: None, identity })
}

fn dial_tcp(host: &str, port: u16, patience: Duration) -> io::Result<(PlainSocket, String)> {
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, patience) {
            Ok(socket) => {
                socket.set_nodelay(true)?;
                // The kernel then finds out that a host is gone. Errors are ignored, because requests have time limits.
                let _ = sockopt::set_socket_keepalive(&socket, true);
                return Ok((PlainSocket::Tcp(socket), place_of(address)));
            }
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// An address in the identity of an export. This machine counts once.
fn place_of(address: SocketAddr) -> String {
    match address.ip().to_canonical() {
        ip if ip.is_loopback() => format!("localhost:{}", address.port()),
        ip => format!("{ip}:{}", address.port()),
    }
}

fn dial_unix(path: &Path, patience: Duration) -> io::Result<(PlainSocket, String)> {
    let metadata = std::fs::metadata(path)?;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // This limit also holds for the wait for a place in the server's queue of connections.
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
    // Fewer switches between this process and the server. The system may permit less.
    let _ = sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER);
    let _ = sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BUFFER);
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok((PlainSocket::Unix(socket.into()), format!("{:x}-{:x}", metadata.dev(), metadata.ino())))
}

/// Bytes of the kernel's buffer of a socket.
const SOCKET_BUFFER: usize = 1 << 20;

/// FNV-1a of the name of an export, which may be longer than an identity.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_one_export_have_one_identity() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _server = std::os::unix::net::UnixListener::bind(&path).unwrap();
        std::os::unix::fs::symlink(&path, dir.path().join("link")).unwrap();
        let identity = |name: &str, export: &str| {
            let url = format!("nbd+unix:///{export}?socket={}/{name}", dir.path().to_str().unwrap());
            let url = NbdUrl::of_path(Path::new(&url)).unwrap().unwrap();
            dial(&url, Duration::from_secs(1)).unwrap().identity().to_owned()
        };
        assert_eq!(identity("socket", "a"), identity("link", "%61"));
        assert_ne!(identity("socket", "a"), identity("socket", "b"));
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = |host: &str| NbdUrl {
            address: ServerAddress::Tcp(host.to_owned(), server.local_addr().unwrap().port()),
            export: Vec::new(),
            tls: None,
        };
        let [one, other] = ["127.0.0.1", "localhost"].map(|host| dial(&url(host), Duration::from_secs(1)).unwrap());
        assert_eq!(one.identity(), other.identity());
        assert!(one.identity().len() <= 100);
    }

    #[test]
    fn a_server_that_is_absent_is_named() {
        let url = NbdUrl::of_path(Path::new("nbd+unix:///?socket=/nowhere/s")).unwrap().unwrap();
        let error = dial(&url, Duration::from_secs(1)).unwrap_err().to_string();
        assert!(error.contains("cannot connect to /nowhere/s: No such file"), "{error}");
    }
}
