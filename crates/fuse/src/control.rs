//! The control socket, through which `umount` learns that the last commit is durable.
//!
//! Unmounting a FUSE filesystem returns when the kernel is done with it, before the server is. So the server listens on
//! an abstract socket with a random name. The name is the value of an extended attribute that is not on disk, for
//! everyone who may read the mount's root directory. `umount` connects before it unmounts. The server answers on that
//! connection after its final commit, when the image is closed and unlocked. A server that dies closes the connection
//! without an answer.
//!
//! Any user can connect: names of abstract sockets are no secret.
//!
//! - K1. A thread accepts connections as they arrive, so the listener's queue stays free.
//! - K2. A user has at most [`USER_MAX`] waiting connections. All users except root and the mount's owner have at most
//!   [`OTHERS_MAX`] together. A connection beyond these limits is closed. The server reads from a connection only to
//!   learn whether it is closed.
//! - K3. Neither end waits for the other to make room: the server drops an answer that does not fit, and `umount` gives
//!   up connecting after [`CONNECT_PATIENCE`].
//!   connecting after [`CONNECT_PATIENCE`].

use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect as connect_to, shutdown, socket_with,
};

/// Attribute of any file of a mount: the name of the control socket.
pub(crate) const CONTROL_XATTR: &str = "ubtrfs.control";
/// Attribute whose reading makes everything written so far durable.
pub(crate) const SYNC_XATTR: &str = "ubtrfs.sync";
/// Attribute that says why the filesystem takes no changes any more, or why the last [`SYNC_XATTR`] failed; empty if
/// neither happened. An error number alone does not tell another writer, a bad device and a full host apart.
pub(crate) const WHY_XATTR: &str = "ubtrfs.why";
/// Start of `WHY_XATTR` if the filesystem takes no changes any more.
pub(crate) const TAKES_NO_CHANGES: &str = "the filesystem takes no changes any more: ";

/// Attribute with the engine's counters, as text for Prometheus.
pub(crate) const STATS_XATTR: &str = "ubtrfs.stats";

const DONE: &str = "ok";

/// The server's end of the control socket.
#[derive(Debug)]
pub(crate) struct Control {
    listener: Arc<UnixListener>,
    name: Vec<u8>,
    ends: Arc<AtomicBool>,
    taker: JoinHandle<Waiting>,
}

impl Control {
    /// Listens. The mount's owner is the user of this process now, even if confinement changes it later.
    pub(crate) fn listen() -> io::Result<Self> {
        let random = std::fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        let name = format!("ubtrfs-{}", random.trim()).into_bytes();
        let listener = Arc::new(UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?);
        let ends = Arc::new(AtomicBool::new(false));
        let waiting = Waiting { owner: rustix::process::getuid().as_raw(), streams: Vec::new() };
        let (from, until) = (Arc::clone(&listener), Arc::clone(&ends));
        let taker =
            thread::Builder::new().name("control".to_owned()).spawn(move || take_all(&from, &until, waiting))?;
        Ok(Self { listener, name, ends, taker })
    }

    pub(crate) fn name(&self) -> &[u8] {
        &self.name
    }

    /// Sends the result to all waiting connections.
    pub(crate) fn finish(self, failure: Option<&str>) {
        self.ends.store(true, Ordering::SeqCst);
        // Queued connections are still accepted; later ones are refused.
        if shutdown(&*self.listener, Shutdown::Both).is_err() {
            return;
        }
        let Ok(waiting) = self.taker.join() else { return };
        for (_, mut stream) in waiting.streams {
            // A waiter that went away needs no answer.
            let _ = stream.write_all(failure.unwrap_or(DONE).as_bytes());
        }
    }
}

/// K1
fn take_all(listener: &UnixListener, ends: &AtomicBool, mut waiting: Waiting) -> Waiting {
    loop {
        match listener.accept() {
            Ok((stream, _)) => waiting.add(stream),
            Err(_) if ends.load(Ordering::SeqCst) => return waiting,
            // For example, too many files are open.
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Connections that wait for the result.
#[derive(Debug)]
struct Waiting {
    owner: u32,
    /// Each connection with its user.
    streams: Vec<(u32, UnixStream)>,
}

impl Waiting {
    /// K2
    fn add(&mut self, stream: UnixStream) {
        let Ok(user) = socket_peercred(&stream).map(|peer| peer.uid.as_raw()) else { return };
        if stream.set_nonblocking(true).is_err() {
            return;
        }
        if self.has_room(user) || {
            self.streams.retain_mut(|(_, stream)| is_open(stream));
            self.has_room(user)
        } {
            self.streams.push((user, stream));
        }
    }

    fn has_room(&self, user: u32) -> bool {
        let is_other = |user: &u32| *user != 0 && *user != self.owner;
        let (mut of_user, mut of_others) = (0, 0);
        for (connected, _) in &self.streams {
            of_user += usize::from(*connected == user);
            of_others += usize::from(is_other(connected));
        }
        of_user < USER_MAX && (!is_other(&user) || of_others < OTHERS_MAX)
    }
}

/// Whether the connection is open. A client that sends anything counts as closed.
fn is_open(stream: &mut UnixStream) -> bool {
    matches!(stream.read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

/// Connects to the server of a mount (K3).
pub(crate) fn connect(name: &[u8]) -> io::Result<UnixStream> {
    connect_within(name, CONNECT_PATIENCE)
}

fn connect_within(name: &[u8], patience: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new_abstract_name(name)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let end = Instant::now() + patience;
    loop {
        match connect_to(&socket, &address) {
            Ok(()) => break,
            // The queue is full.
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < end => thread::sleep(Duration::from_millis(5)),
            Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            Err(errno) => return Err(errno.into()),
        }
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Waits for the server's result: `Ok(None)` when its last commit is durable, `Ok(Some(reason))` when it failed.
pub(crate) fn wait(mut stream: UnixStream) -> io::Result<Option<String>> {
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    match text.as_str() {
        DONE => Ok(None),
        "" => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server ended without an answer")),
        failure => Ok(Some(failure.to_owned())),
    }
}

/// Waiting connections of one user.
const USER_MAX: usize = 8;
/// Waiting connections of all users except root and the mount's owner.
const OTHERS_MAX: usize = 64;
/// Longer than a running server needs to accept a connection.
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    fn end_of(failure: Option<&str>) -> Option<String> {
        let control = Control::listen().unwrap();
        let stream = connect(control.name()).unwrap();
        control.finish(failure);
        wait(stream).unwrap()
    }

    #[test]
    fn whoever_connected_hears_how_it_ended() {
        assert_eq!(end_of(None), None);
        assert_eq!(end_of(Some("disk on fire")), Some("disk on fire".to_owned()));
    }

    #[test]
    fn a_server_that_ends_without_an_answer_is_an_error() {
        let control = Control::listen().unwrap();
        let stream = connect(control.name()).unwrap();
        control.ends.store(true, Ordering::SeqCst);
        shutdown(&*control.listener, Shutdown::Both).unwrap();
        drop(control.taker.join().unwrap());
        assert!(wait(stream).is_err());
    }

    #[test]
    fn a_user_has_few_connections_and_those_that_were_closed_do_not_count() {
        let control = Control::listen().unwrap();
        // This is the state after many attempts to unmount a busy mount.
        for _ in 0..10_000 {
            drop(connect(control.name()).unwrap());
        }
        let held: Vec<_> = (0..1000).map(|_| connect(control.name()).unwrap()).collect();
        control.finish(None);
        let answered = held.into_iter().map(wait).filter(Result::is_ok).count();
        assert_eq!(answered, USER_MAX);
    }

    #[test]
    fn a_queue_that_nobody_takes_from_ends_the_attempt() {
        let name = format!("ubtrfs-test-{}", std::process::id()).into_bytes();
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let _listener = UnixListener::bind_addr(&address).unwrap();
        let patience = Duration::from_millis(20);
        let mut held = Vec::new();
        let refused = loop {
            match connect_within(&name, patience) {
                Ok(stream) => held.push(stream),
                Err(error) => break error,
            }
            assert!(held.len() < 10_000);
        };
        assert_eq!(refused.kind(), io::ErrorKind::TimedOut);
    }
}
