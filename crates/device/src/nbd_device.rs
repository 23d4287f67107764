//! [`NbdDevice`]: an export of an NBD server as a device, and its exclusive use on this machine.
//!
//! - B1. A read-write device needs a server that flushes, and an export that takes writes.
//! - B2. While an export is open for writing, its process holds a Unix socket in the abstract namespace, named by the
//!   export's identity ([`ubtrfs_nbd::Dialed::identity`]). So no other process in this network namespace opens the export,
//!   for reading or for writing. Anybody may hold a socket of any name. So sockets of ordinary users do not keep root away,
//!   and a process of root also holds a lock on a file in [`CLAIMS`], in all network namespaces that share it. Nothing
//!   protects against clients on other machines: NBD has no locks.
//! - B3. A server may serve one client, and end after it. So looking at a superblock and opening the device share one
//!   connection ([`probe`]).

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, UCred, sockopt};
use ubtrfs_format::print::escaped;
use ubtrfs_nbd::{Client, NbdError, NbdUrl, Settings, dial};

use crate::Device;
use crate::file::{Access, has_content};
use crate::mounted;
use crate::open_error::OpenError;

/// Whether the name of a device is the URL of an export, and no path. A file with such a name has a path that starts with
/// `./`.
pub fn is_url(name: &Path) -> bool {
    NbdUrl::is_meant(name)
}

/// Whether the name of a device is the URL of an object, which can only be read.
pub fn is_object_url(name: &Path) -> bool {
    NbdUrl::of_path(name).is_some_and(|url| url.is_ok_and(|url| url.is_object()))
}

/// Whether the name of a device means another place in another working directory.
pub fn has_relative_path(name: &Path) -> bool {
    match NbdUrl::of_path(name) {
        Some(url) => url.is_ok_and(|url| url.has_relative_path()),
        None => name.is_relative(),
    }
}

/// An export of an NBD server.
#[derive(Debug)]
pub struct NbdDevice {
    client: Client,
    name: PathBuf,
    access: Access,
    /// Held for what it keeps away (B2).
    _claim: Option<ExportClaim>,
}

/// Keeps other processes of this machine away from an export (B2).
#[derive(Debug)]
struct ExportClaim {
    _socket: Option<UnixListener>,
    _lock: Option<OwnedFd>,
}

/// The directory of root's locks.
const CLAIMS: &str = "/run/ubtrfs";

impl NbdDevice {
    /// Opens the export of a URL, and locks it against other processes of this machine.
    ///
    /// # Errors
    /// The URL is wrong; the server cannot open the export; another process has it open for writing, or any process has, if
    /// `access` is for writing; the export takes no writes or cannot make them durable (B1).
    pub fn open(url: &Path, access: Access) -> Result<Self, OpenError> {
        let client = client_of(url, true)?;
        let claim = match access {
            Access::ReadWrite if is_object_url(url) => return Err(OpenError::Object { path: url.to_owned() }),
            Access::ReadOnly => None,
            Access::ReadWrite => Some(claim(url, client.identity())?),
        };
        let flags = client.export().flags;
        match access {
            Access::ReadWrite if flags.is_read_only() => Err(OpenError::ReadOnlyExport { path: url.to_owned() }),
            Access::ReadWrite if !flags.can_flush() => Err(OpenError::NoFlush { path: url.to_owned() }),
            // An array has another copy, and a filesystem without one is read-only at once.
            Access::ReadWrite => {
                Ok(Self { client: client.without_waiting(), name: url.to_owned(), access, _claim: claim })
            }
            Access::ReadOnly => Ok(Self { client, name: url.to_owned(), access, _claim: claim }),
        }
    }

    /// Opens an export for reading without a lock, although another process may write to it.
    ///
    /// # Errors
    /// The URL is wrong; the server cannot open the export.
    pub fn open_beside_writer(url: &Path) -> Result<Self, OpenError> {
        let client = client_of(url, false)?;
        Ok(Self { client, name: url.to_owned(), access: Access::ReadOnly, _claim: None })
    }

    /// The URL given to open.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// Whether the export has anything but zeros. False if the server does not tell where zeros are, because looking at all
    /// of an export may take hours.
    ///
    /// # Errors
    /// The export cannot be read, or the server takes longer than [`CONTENT_PATIENCE`] to tell.
    pub fn has_content(&self) -> io::Result<bool> {
        if !self.client.tells_zeros() {
            return Ok(false);
        }
        let until = Instant::now() + CONTENT_PATIENCE;
        let next = |at| {
            self.client.next_data(at, until).map_err(|error| match error.kind() {
                io::ErrorKind::TimedOut => io::Error::new(error.kind(), SLOW_TO_TELL),
                _ => error,
            })
        };
        has_content(self.len_bytes(), next, |at, buf| self.read_at(at, buf))
    }

    fn check_writable(&self) -> io::Result<()> {
        match self.access {
            Access::ReadWrite => Ok(()),
            Access::ReadOnly => Err(Errno::ROFS.into()),
        }
    }
}

impl Device for NbdDevice {
    fn len_bytes(&self) -> u64 {
        self.client.export().size_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.client.read(offset, &mut [IoSliceMut::new(buf)])
    }

    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        self.client.read(offset, bufs)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write_vectored_at(offset, &[IoSlice::new(buf)])
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        self.check_writable()?;
        self.client.write(offset, bufs)
    }

    fn write_durable_at(&self, offset: u64, buf: &[u8]) -> Option<io::Result<()>> {
        match self.check_writable() {
            Ok(()) => self.client.write_durably(offset, &[IoSlice::new(buf)]),
            Err(error) => Some(Err(error)),
        }
    }

    fn flush(&self) -> io::Result<()> {
        match self.access {
            Access::ReadWrite => self.client.flush(),
            Access::ReadOnly => Ok(()),
        }
    }

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.check_writable()?;
        match self.client.trim(offset, len_bytes) {
            // The server's own device may have no discards.
            Err(error) if error.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error()) => Ok(()),
            done => done,
        }
    }

    fn can_discard(&self) -> bool {
        self.client.export().flags.can_trim()
    }

    fn describe(&self) -> String {
        escaped(self.name.as_os_str().as_encoded_bytes())
    }

    fn is_read_only(&self) -> bool {
        self.access == Access::ReadOnly
    }
}

/// Connections that [`probe`] made, and its failures, for the process's next use of the URL (B3).
static PROBED: Mutex<Vec<(NbdUrl, Probed)>> = Mutex::new(Vec::new());

enum Probed {
    Open(Box<Client>),
    Failed(Instant, OpenError),
}

/// How long a server may take to tell whether an export has content.
const CONTENT_PATIENCE: Duration = Duration::from_secs(10);
const SLOW_TO_TELL: &str = "the server takes too long to tell whether the export has content; to overwrite it without a look, \
                            use -f";
/// How long a failure to connect counts, so that a command fails once.
const FAILURE_AGE: Duration = Duration::from_secs(2);

/// Calls `look` with an export, to look at its superblocks. `None` if it cannot be opened, or another process writes to it.
/// The connection stays open, and the next [`NbdDevice::open`] takes it.
pub(crate) fn probe<T>(url: &Path, look: impl FnOnce(&Client) -> Option<T>) -> Option<T> {
    let parsed = NbdUrl::of_path(url)?.ok()?;
    let (found, state) = match client_of(url, true) {
        Ok(client) => (look(&client), Probed::Open(Box::new(client))),
        Err(error) => (None, Probed::Failed(Instant::now(), error)),
    };
    PROBED.lock().unwrap_or_else(PoisonError::into_inner).push((parsed, state));
    found
}

/// The connection that was probed, or a new one. With `checks_writer`, fails if another process writes to the export.
fn client_of(name: &Path, checks_writer: bool) -> Result<Client, OpenError> {
    let wrap = |source: NbdError| OpenError::Network { path: name.to_owned(), source };
    let url = match NbdUrl::of_path(name) {
        Some(url) => url.map_err(|error| wrap(error.into()))?,
        None => return Err(OpenError::Missing { path: name.to_owned() }),
    };
    {
        let mut probed = PROBED.lock().unwrap_or_else(PoisonError::into_inner);
        probed.retain(|(_, state)| !matches!(state, Probed::Failed(at, _) if at.elapsed() > FAILURE_AGE));
        if let Some(index) = probed.iter().position(|(other, _)| *other == url) {
            match probed.swap_remove(index).1 {
                Probed::Open(client) => return Ok(*client),
                // A reader beside the writer tries again.
                Probed::Failed(_, error) if checks_writer => return Err(error),
                Probed::Failed(..) => {}
            }
        }
    }
    let settings = Settings::default();
    let dialed = dial(&url, settings.connect).map_err(wrap)?;
    if checks_writer && let Some(pid) = writer_of(dialed.identity()) {
        return Err(in_use(name, pid));
    }
    Client::open(dialed, settings).map_err(wrap)
}

/// Takes what keeps other processes away (B2).
fn claim(name: &Path, identity: &str) -> Result<ExportClaim, OpenError> {
    let lock = match rustix::process::geteuid().is_root() {
        true => lock_claim(identity).map_err(|()| in_use(name, writer_of(identity).flatten()))?,
        false => None,
    };
    let address = SocketAddr::from_abstract_name(identity);
    match address.and_then(|address| UnixListener::bind_addr(&address)) {
        Ok(listener) => Ok(ExportClaim { _socket: Some(listener), _lock: lock }),
        // The lock is the own one, so only a process of root that could not take it counts.
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && lock.is_some() => match root_holder(identity) {
            None => Ok(ExportClaim { _socket: None, _lock: lock }),
            Some(peer) => Err(in_use(name, pid_of(peer))),
        },
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(in_use(name, writer_of(identity).flatten())),
        Err(source) => Err(OpenError::Io { path: name.to_owned(), source }),
    }
}

/// Locks the file of an export in [`CLAIMS`]. `None` if there can be no such file.
///
/// # Errors
/// Another process has the lock.
fn lock_claim(identity: &str) -> Result<Option<OwnedFd>, ()> {
    let made = rustix::fs::mkdir(CLAIMS, Mode::from_raw_mode(0o700));
    let opened = match made {
        Ok(()) | Err(Errno::EXIST) => {
            let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::open(Path::new(CLAIMS).join(identity), flags, Mode::from_raw_mode(0o600))
        }
        Err(error) => Err(error),
    };
    let Ok(file) = opened else { return Ok(None) };
    for _ in 0..LOCK_TRIES {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // It may be somebody who looks.
            Err(Errno::WOULDBLOCK) => std::thread::sleep(LOCK_PAUSE),
            _ => return Ok(Some(file)),
        }
    }
    Err(())
}

/// Whether a process of root has locked the file of an export.
fn is_claimed(identity: &str) -> bool {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(Path::new(CLAIMS).join(identity), flags, Mode::empty());
    file.is_ok_and(|file| {
        rustix::fs::flock(file, FlockOperation::NonBlockingLockShared).is_err_and(|error| error == Errno::WOULDBLOCK)
    })
}

const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Finds the process that has an export open for writing. `Some(None)` if it exists and is unknown. Processes of ordinary
/// users do not count for root (B2).
fn writer_of(identity: &str) -> Option<Option<u32>> {
    if !rustix::process::geteuid().is_root() {
        return holder_of(identity).map(|peer| peer.and_then(pid_of));
    }
    match root_holder(identity) {
        Some(peer) => Some(pid_of(peer)),
        None => is_claimed(identity).then_some(None),
    }
}

/// The process of root that holds the socket of an export, if it is known.
fn root_holder(identity: &str) -> Option<UCred> {
    holder_of(identity).flatten().filter(|peer| peer.uid.is_root())
}

fn pid_of(peer: UCred) -> Option<u32> {
    u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
}

/// The process that holds the socket of an export. `Some(None)` if there is one, and it is unknown.
fn holder_of(identity: &str) -> Option<Option<UCred>> {
    // Connections are never accepted, so the queue of the socket may be full. Such a socket is there, too.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
    let address = SocketAddrUnix::new_abstract_name(identity.as_bytes()).ok()?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Some(sockopt::socket_peercred(&socket).ok()),
        Err(Errno::AGAIN | Errno::INPROGRESS) => Some(None),
        Err(_) => None,
    }
}

fn in_use(name: &Path, pid: Option<u32>) -> OpenError {
    let path = name.to_owned();
    match pid {
        Some(pid) if pid == std::process::id() => OpenError::OpenHere { path },
        pid => OpenError::Locked { path, by: pid.map(mounted::process_text) },
    }
}
