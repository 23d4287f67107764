//! TLS for `nbds://`: the certificates of a URL, and a socket whose bytes are encrypted.
//!
//! - T1. A server's certificate is always verified, against the system's authorities or those of the URL. There is no way
//!   to switch this off.
//! - T2. The lock of the session is never held while a thread waits for the socket. So a thread that sends never keeps a
//!   thread from receiving (C2 of [`crate::connection`]).
//! - T3. Encrypted bytes reach the socket in the order in which they were encrypted: `sending` is held from one to the other.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use crate::dial::PlainSocket;

/// The parameters of a URL that concern TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TlsSettings {
    /// A directory with `ca-cert.pem`, and with `client-cert.pem` and `client-key.pem` if the server wants to know its
    /// clients. Without it, the system's authorities are trusted.
    pub(crate) certificates: Option<PathBuf>,
    /// The name in the server's certificate, if it is not the host of the URL.
    pub(crate) hostname: Option<String>,
}

impl TlsSettings {
    pub(crate) fn has_relative_path(&self) -> bool {
        self.certificates.as_ref().is_some_and(|dir| dir.is_relative())
    }
}

/// A failure before the first encrypted byte: certificates that cannot be used, as the end of a sentence about a server.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct TlsSetupError(String);

/// The certificates, which are read once. A new connection needs no files.
#[derive(Clone)]
pub(crate) struct TlsClient {
    config: Arc<ClientConfig>,
    server: ServerName<'static>,
}

impl fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsClient").field("server", &self.server).finish_non_exhaustive()
    }
}

impl TlsClient {
    /// Reads the certificates. `host` is the name in the server's certificate.
    pub(crate) fn new(settings: &TlsSettings, host: &str) -> Result<Self, TlsSetupError> {
        let name = settings.hostname.as_deref().unwrap_or(host);
        let server = ServerName::try_from(name.to_owned()).map_err(|_| {
            TlsSetupError(format!("'{name}' cannot be a name in a certificate; add tls-hostname=NAME to the URL"))
        })?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| TlsSetupError(error.to_string()))?
            .with_root_certificates(authorities(settings.certificates.as_deref())?);
        let own = settings.certificates.as_deref().map(own_certificate).transpose()?.flatten();
        let config = match own {
            Some((chain, key)) => builder
                .with_client_auth_cert(chain, key)
                .map_err(|error| TlsSetupError(format!("client-cert.pem and client-key.pem do not work: {error}")))?,
            None => builder.with_no_client_auth(),
        };
        Ok(Self { config: Arc::new(config), server })
    }
}

/// The authorities that may vouch for a server (T1).
fn authorities(directory: Option<&Path>) -> Result<RootCertStore, TlsSetupError> {
    let mut roots = RootCertStore::empty();
    match directory {
        Some(directory) => {
            let path = directory.join("ca-cert.pem");
            for certificate in certificates(&path)? {
                roots.add(certificate).map_err(|error| unusable(&path, &error))?;
            }
        }
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    match (roots.is_empty(), directory) {
        (false, _) => Ok(roots),
        (true, Some(directory)) => Err(unusable(&directory.join("ca-cert.pem"), &"it has no certificate")),
        (true, None) => Err(TlsSetupError(
            "this system has no certificates of authorities; install ca-certificates, or add tls-certificates=DIR to the \
             URL"
                .to_owned(),
        )),
    }
}

/// The client's own certificate and key, if the directory has them.
fn own_certificate(
    directory: &Path,
) -> Result<Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>, TlsSetupError> {
    let [path, key_path] = ["client-cert.pem", "client-key.pem"].map(|name| directory.join(name));
    if !path.exists() && !key_path.exists() {
        return Ok(None);
    }
    let chain = certificates(&path)?;
    let key = PrivateKeyDer::from_pem_file(&key_path).map_err(|error| unusable(&key_path, &error))?;
    Ok(Some((chain, key)))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsSetupError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    read.map_err(|error| unusable(path, &error))
}

/// The error for a file of certificates. It never has a part of the file.
fn unusable(path: &Path, why: &dyn fmt::Display) -> TlsSetupError {
    TlsSetupError(format!("{} cannot be used: {why}", path.display()))
}

/// Bytes that are read from the socket at once. A record has at most 16 KiB.
const INCOMING: usize = 64 << 10;

/// Bytes that are encrypted at once.
const OUTGOING: usize = 512 << 10;

/// A socket with TLS.
pub(crate) struct TlsSocket {
    pub(crate) plain: PlainSocket,
    session: Mutex<ClientConnection>,
    /// Encrypted bytes on their way to the socket (T3).
    sending: Mutex<Vec<u8>>,
    /// Encrypted bytes that arrived.
    incoming: Mutex<ArrivedBytes>,
}

struct ArrivedBytes {
    buf: Box<[u8]>,
    /// The bytes of `buf` that the session has not taken.
    start: usize,
    end: usize,
}

impl fmt::Debug for TlsSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsSocket").field("plain", &self.plain).finish_non_exhaustive()
    }
}

impl TlsSocket {
    /// Makes the handshake of TLS. `before_wait` is called before each wait for the socket, and limits it.
    ///
    /// # Errors
    /// `before_wait` failed; the socket failed; the server's certificate is not accepted (`InvalidData`).
    pub(crate) fn negotiate(
        plain: PlainSocket,
        client: &TlsClient,
        mut before_wait: impl FnMut(&PlainSocket) -> io::Result<()>,
    ) -> io::Result<Self> {
        let mut session = ClientConnection::new(Arc::clone(&client.config), client.server.clone()).map_err(invalid)?;
        session.set_buffer_limit(Some(OUTGOING));
        let incoming = ArrivedBytes { buf: vec![0; INCOMING].into_boxed_slice(), start: 0, end: 0 };
        let socket =
            Self { plain, session: Mutex::new(session), sending: Mutex::default(), incoming: Mutex::new(incoming) };
        while socket.session.lock().is_handshaking() {
            before_wait(&socket.plain)?;
            socket.send_encrypted(|_| Ok(0))?;
            if socket.session.lock().wants_read() && !socket.take_arrived()? {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
        }
        before_wait(&socket.plain)?;
        socket.send_encrypted(|_| Ok(0))?;
        Ok(socket)
    }

    /// As [`PlainSocket::receive`]. Also returns 0 if the stream ends without the end of the session: the protocol of NBD
    /// knows where its replies end.
    pub(crate) fn receive(&self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        loop {
            match self.session.lock().reader().read_vectored(bufs) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                done => return done,
            }
            if !self.take_arrived()? {
                return Ok(0);
            }
        }
    }

    /// As [`PlainSocket::send`].
    pub(crate) fn send(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        self.send_encrypted(|session| session.writer().write_vectored(bufs))
    }

    /// Tells the server that nothing follows.
    pub(crate) fn close(&self) {
        let _ = self.send_encrypted(|session| {
            session.send_close_notify();
            Ok(0)
        });
    }

    /// Encrypts something, and sends all that is encrypted.
    fn send_encrypted(&self, encrypt: impl FnOnce(&mut ClientConnection) -> io::Result<usize>) -> io::Result<usize> {
        let mut encrypted = self.sending.lock();
        encrypted.clear();
        let taken = {
            let mut session = self.session.lock();
            let taken = encrypt(&mut session)?;
            while session.wants_write() {
                session.write_tls(&mut *encrypted)?;
            }
            taken
        };
        self.plain.send_all(&encrypted)?;
        Ok(taken)
    }

    /// Gives arrived bytes to the session. Waits for the socket if none are left. Returns whether the stream goes on.
    fn take_arrived(&self) -> io::Result<bool> {
        let mut incoming = self.incoming.lock();
        let ArrivedBytes { buf, start, end } = &mut *incoming;
        if start == end {
            *start = 0;
            *end = self.plain.receive(&mut [IoSliceMut::new(buf)])?;
        }
        let mut arrived = buf.get(*start..*end).unwrap_or_default();
        let mut session = self.session.lock();
        let taken = session.read_tls(&mut arrived)?;
        *start = start.saturating_add(taken);
        let state = session.process_new_packets().map_err(invalid)?;
        Ok(taken > 0 && !(state.peer_has_closed() && state.plaintext_bytes_to_read() == 0))
    }
}

fn invalid(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
