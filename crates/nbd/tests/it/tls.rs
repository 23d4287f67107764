//! TLS: nothing is opened unless the server's certificate is right, and requests of many threads work through it.

use std::fs;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};
use ubtrfs_nbd::{Client, NbdError, NbdUrl, Settings, dial};

use crate::fake_server::{Greeting, QUICK, hello, option_reply, read_array, read_option, serve, take_options};

/// An authority that signs certificates, and the directory that a URL names.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: tempfile::TempDir,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("ca-cert.pem"), issuer.pem()).unwrap();
        Self { issuer, dir }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A certificate for a name, and its key.
    fn certificate(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> (rcgen::Certificate, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        change(&mut params);
        (params.signed_by(&key, &self.issuer).unwrap(), key)
    }

    /// Gives clients that use the directory a certificate of their own.
    fn add_client(&self) {
        let (certificate, key) = self.certificate("client", |_| ());
        fs::write(self.path().join("client-cert.pem"), certificate.pem()).unwrap();
        fs::write(self.path().join("client-key.pem"), key.serialize_pem()).unwrap();
    }

    /// The settings of a server with a certificate for `name`.
    fn server(&self, name: &str, asks_client: bool, change: impl FnOnce(&mut CertificateParams)) -> Arc<ServerConfig> {
        let (certificate, key) = self.certificate(name, change);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let builder = if asks_client {
            let mut roots = RootCertStore::empty();
            roots.add(self.issuer.der().clone()).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        Arc::new(builder.with_single_cert(vec![certificate.der().clone()], key).unwrap())
    }
}

/// A server of 64 MiB with TLS.
struct TlsServer {
    dir: tempfile::TempDir,
    content: Arc<Mutex<Vec<u8>>>,
}

impl TlsServer {
    /// Starts a server. `answer` is its reply to the wish for TLS.
    fn start(config: Arc<ServerConfig>, answer: fn() -> Vec<u8>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let content = Arc::new(Mutex::new(vec![0; 64 << 20]));
        let served = Arc::clone(&content);
        std::thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let (config, content) = (Arc::clone(&config), Arc::clone(&served));
                std::thread::spawn(move || serve_tls(socket, config, answer, &content));
            }
        });
        Self { dir, content }
    }

    fn url(&self, parameters: &str) -> String {
        format!("nbds+unix:///export?socket={}/socket{parameters}", self.dir.path().display())
    }
}

fn serve_tls(
    mut socket: UnixStream,
    config: Arc<ServerConfig>,
    answer: fn() -> Vec<u8>,
    content: &Mutex<Vec<u8>>,
) -> io::Result<()> {
    socket.write_all(&hello())?;
    read_array::<4>(&mut socket)?;
    assert_eq!(read_option(&mut socket)?.0, 5, "no option before TLS");
    socket.write_all(&answer())?;
    let mut tls = StreamOwned::new(ServerConnection::new(config).map_err(io::Error::other)?, socket);
    take_options(&mut tls, Greeting::default())?;
    serve(&mut tls, content, &Mutex::default(), 0)
}

fn agreed() -> Vec<u8> {
    option_reply(5, 1, &[])
}

fn open(url: &str) -> Result<Client, NbdError> {
    let url = NbdUrl::of_path(Path::new(url)).unwrap()?;
    Client::open(dial(&url, QUICK.connect)?, QUICK)
}

fn certificates(dir: &Path) -> String {
    format!("&tls-certificates={}", dir.display())
}

#[test]
fn requests_of_many_threads_work_through_tls() {
    let authority = Authority::new();
    authority.add_client();
    let server = TlsServer::start(authority.server("localhost", true, |_| ()), agreed);
    let client = open(&server.url(&certificates(authority.path()))).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8u8 {
            let client = &client;
            scope.spawn(move || {
                for round in 0..6u64 {
                    let (offset, len) = ((u64::from(thread) << 23) + round * 4096, 3 << 20);
                    let data = vec![thread.wrapping_mul(31).wrapping_add(round as u8); len];
                    client.write(offset, &[IoSlice::new(&data[..1000]), IoSlice::new(&data[1000..])]).unwrap();
                    client.flush().unwrap();
                    let mut read = vec![0; len];
                    client.read(offset, &mut [IoSliceMut::new(&mut read)]).unwrap();
                    assert!(read == data, "thread {thread}, round {round}");
                }
            });
        }
    });
    assert_eq!(server.content.lock().unwrap()[5 << 23], 155);
}

#[test]
fn a_server_that_cannot_prove_its_name_is_refused() {
    let (authority, other) = (Authority::new(), Authority::new());
    let trusted = certificates(authority.path());
    let text = |server: &TlsServer, parameters: &str| open(&server.url(parameters)).unwrap_err().to_string();
    let right = TlsServer::start(authority.server("localhost", false, |_| ()), agreed);
    open(&right.url(&trusted)).unwrap();
    // Another authority, and the system's.
    for parameters in [certificates(other.path()), String::new()] {
        let text = text(&right, &parameters);
        assert!(text.starts_with("no TLS with ") && text.contains("tls-certificates=DIR"), "{text}");
    }
    // Another name; the URL may name it.
    let named = TlsServer::start(authority.server("storage.example", false, |_| ()), agreed);
    let wrong = text(&named, &trusted);
    assert!(wrong.contains("tls-hostname=NAME"), "{wrong}");
    open(&named.url(&format!("{trusted}&tls-hostname=storage.example"))).unwrap();
    // An expired certificate.
    let expired = authority.server("localhost", false, |params| params.not_after = rcgen::date_time_ymd(2020, 1, 1));
    let expired = text(&TlsServer::start(expired, agreed), &trusted);
    assert!(expired.contains("expired"), "{expired}");
    // A server that wants to know its clients.
    let strict = TlsServer::start(authority.server("localhost", true, |_| ()), agreed);
    let unknown = text(&strict, &trusted);
    assert!(unknown.contains("TLS") || unknown.contains("closed the connection"), "{unknown}");
    authority.add_client();
    open(&strict.url(&trusted)).unwrap();
}

#[test]
fn nothing_that_a_server_says_instead_of_tls_is_believed() {
    let authority = Authority::new();
    let config = || authority.server("localhost", false, |_| ());
    let trusted = certificates(authority.path());
    let none = TlsServer::start(config(), || option_reply(5, 1 << 31 | 1, &[]));
    let text = open(&none.url(&trusted)).unwrap_err().to_string();
    assert!(text.contains("offers no TLS"), "{text}");
    // Replies that somebody put before the session.
    let injected = TlsServer::start(config(), || [agreed(), option_reply(8, 1, &[])].concat());
    let text = open(&injected.url(&trusted)).unwrap_err().to_string();
    assert!(text.starts_with("no TLS with "), "{text}");
    // Silence.
    let silent = TlsServer::start(config(), Vec::new);
    let url = NbdUrl::of_path(Path::new(&silent.url(&trusted))).unwrap().unwrap();
    let patience = Settings { connect: Duration::from_millis(300), ..QUICK };
    let start = Instant::now();
    let error = Client::open(dial(&url, QUICK.connect).unwrap(), patience).unwrap_err();
    assert!(matches!(error, NbdError::Silent { .. } | NbdError::Closed { .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(3));
}

#[test]
fn certificates_that_cannot_be_used_are_named() {
    let authority = Authority::new();
    let server = TlsServer::start(authority.server("localhost", false, |_| ()), agreed);
    let path = |name: &str| -> PathBuf { authority.path().join(name) };
    let text = || open(&server.url(&certificates(authority.path()))).unwrap_err().to_string();
    authority.add_client();
    fs::write(path("client-key.pem"), "secret, and no key").unwrap();
    let wrong = text();
    assert!(wrong.contains("client-key.pem cannot be used") && !wrong.contains("secret"), "{wrong}");
    fs::remove_file(path("client-key.pem")).unwrap();
    assert!(text().contains("client-key.pem cannot be used: "));
    fs::remove_file(path("client-cert.pem")).unwrap();
    open(&server.url(&certificates(authority.path()))).unwrap();
    fs::write(path("ca-cert.pem"), "").unwrap();
    assert!(text().contains("ca-cert.pem cannot be used: it has no certificate"));
    fs::remove_file(path("ca-cert.pem")).unwrap();
    assert!(text().contains("ca-cert.pem cannot be used: "));
}
