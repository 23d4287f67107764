//! The mount's end of the control socket.
//!
//! The server listens on an abstract socket with a random name. Everyone who may read a file of the mount can read the
//! name from an extended attribute, which is not on disk. Names of abstract sockets are public, so any user can
//! connect. A request therefore has to include an open file of the mount, which proves that its sender may enter the
//! mount.
//!
//! ```text
//! connected --request--> executing --result--> closed
//!     |                      +-- client gone, Canceller --> job cancelled
//!     +--AwaitUnmount--> waiting --finish()--> answered
//! ```
//!
//! - K1. A thread accepts connections as they arrive, so the listener's queue stays free.
//! - K2. An ordinary user has at most [`USER_MAX`] connections, root and the mount's owner have [`OWNER_MAX`] each. All
//!   ordinary users together have at most [`OTHERS_MAX`]. A connection beyond these limits gets an error and is closed.
//!   Connections that wait for the unmount are counted separately, with the same limits; beyond the limits they are
//!   closed without an answer.
//! - K3. The server does not wait for a client forever (W1 of `wire`). A connection that has not sent its request
//!   within [`REQUEST_TIMEOUT`] is closed.
//! - K4. Each connection has its own thread, so no connection blocks another one or the mount.
//! - K5. A thread holds the filesystem only while it executes a command. [`ControlServer::stop`] waits for running
//!   commands, so that the devices are closed when umount gets its answer.
//! - K6. The descriptors of a request are closed before its answer is sent, because they keep the mount busy.
//! - K7. Closing a connection can take as long as its client wants: the kernel also closes descriptors that the client
//!   sent and nobody received, for example a socket that lingers. So no connection is closed under the lock. Threads of
//!   their own close up to [`CLOSING_MAX`] connections at the same time. Beyond this number, or if no thread can be
//!   started, the thread that found the end of a connection closes it. This thread may be the acceptor.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use ubtrfs_transaction::Job;

use crate::byte_queue::ByteQueue;
use crate::caller::CommandCaller;
use crate::execute::{CommandContext, Host, execute};
use crate::failure::{CommandFailure, Result};
use crate::message::{Direction, ProgressMessage, Request, Response, ServerMessage, decode_request, encode_answer};
use crate::open_image::{ImageId, ImageWork};
use crate::process::Processes;
use crate::sent_files::{Examined, FileHold, SentFiles, files_of_stranger};
use crate::server_stream::{PROGRESS_INTERVAL, Reporter};
use crate::stream::CommandStream;
use crate::wire::{Frame, OutgoingFrame, REQUEST_MAX, Wire};

/// The mount's end of the control socket.
#[derive(Debug)]
pub struct ControlServer {
    listener: Arc<UnixListener>,
    name: Vec<u8>,
    shared: Arc<ServerShared>,
    acceptor: Option<JoinHandle<()>>,
}

/// Cancels the commands of a server.
#[derive(Clone, Debug)]
pub struct Canceller(Arc<ServerShared>);

struct ServerShared {
    owner: u32,
    ends: AtomicBool,
    /// Number of threads that close a connection (K7).
    nr_closing: AtomicUsize,
    state: Mutex<ServerConnections>,
    changed: Condvar,
}

#[derive(Default)]
struct ServerConnections {
    /// The host of the filesystem. `None` before [`ControlServer::serve`] and after [`ControlServer::stop`].
    served: Option<Served>,
    /// The user of each connection that has a thread.
    connected: Vec<u32>,
    /// Commands that hold the filesystem (K5).
    running: Vec<Arc<Job>>,
    /// Connections that wait for the unmount, each with its user.
    waiting: Vec<(u32, Wire)>,
}

#[derive(Clone)]
struct Served {
    host: Arc<dyn Host>,
    processes: Arc<dyn Processes>,
}

impl ServerShared {
    /// Closes each connection in a thread of its own, as long as there are few such threads (K7).
    fn close_apart(self: &Arc<Self>, wires: impl IntoIterator<Item = Wire>) {
        for wire in wires {
            if self.nr_closing.fetch_add(1, Ordering::SeqCst) >= CLOSING_MAX {
                drop(wire);
                self.nr_closing.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            let shared = Arc::clone(self);
            let started = thread::Builder::new().name("control-close".to_owned()).spawn(move || {
                drop(wire);
                shared.nr_closing.fetch_sub(1, Ordering::SeqCst);
            });
            // If no thread can be started, the connection is closed already.
            if started.is_err() {
                self.nr_closing.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }
}

impl std::fmt::Debug for ServerShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerShared").field("owner", &self.owner).finish_non_exhaustive()
    }
}

impl ControlServer {
    /// Creates the socket and listens on it. The user of this process at this time is the mount's owner, even if
    /// confinement changes the user later.
    pub fn listen() -> io::Result<Self> {
        Self::listen_as("ubtrfs-")
    }

    /// Creates a socket by which clients find the process that has this image open for this work. Otherwise as
    /// [`ControlServer::listen`].
    pub fn listen_for_image(image: ImageId, work: ImageWork) -> io::Result<Self> {
        Self::listen_as(&work.socket_prefix(image))
    }

    /// Creates a socket whose name has this start and a random end.
    fn listen_as(prefix: &str) -> io::Result<Self> {
        let random = std::fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        let name = format!("{prefix}{}", random.trim()).into_bytes();
        let listener = Arc::new(UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?);
        let shared = Arc::new(ServerShared {
            owner: rustix::process::getuid().as_raw(),
            ends: AtomicBool::new(false),
            nr_closing: AtomicUsize::new(0),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let (from, with) = (Arc::clone(&listener), Arc::clone(&shared));
        let acceptor = thread::Builder::new().name("control".to_owned()).spawn(move || accept_all(&from, &with))?;
        Ok(Self { listener, name, shared, acceptor: Some(acceptor) })
    }

    /// The name of the socket.
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    /// Starts executing commands on the filesystem of this host ([`Host::filesystem`]). Before this call, clients can only
    /// wait for the unmount.
    pub fn serve(&self, host: Arc<dyn Host>, processes: Arc<dyn Processes>) {
        self.shared.state.lock().served = Some(Served { host, processes });
    }

    /// Returns a handle that cancels commands from elsewhere, such as a signal handler.
    pub fn canceller(&self) -> Canceller {
        Canceller(Arc::clone(&self.shared))
    }

    /// Refuses new commands, cancels the running ones, and waits for their end (K5). From now on, connections that wait for
    /// the unmount get signs of life.
    pub fn stop(&self) {
        let was_served = self.shared.state.lock().served.take().is_some();
        if was_served {
            let shared = Arc::clone(&self.shared);
            // Without the thread, clients of other users give up earlier.
            let _ = thread::Builder::new().name("control-alive".to_owned()).spawn(move || give_signs_of_life(&shared));
        }
        self.canceller().cancel_all();
        let mut state = self.shared.state.lock();
        while !state.running.is_empty() {
            self.shared.changed.wait(&mut state);
        }
    }

    /// Sends the result of the last commit to all connections that wait for the unmount.
    pub fn finish(mut self, failure: Option<&str>) {
        self.stop();
        // The acceptor still takes connections that are already in the listener's queue. Later connections are refused.
        self.shared.ends.store(true, Ordering::SeqCst);
        if shutdown(&*self.listener, Shutdown::Both).is_err() {
            return;
        }
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        // A client that has just connected may not have sent its `AwaitUnmount` request yet, or the request's thread may
        // not have run yet. A client of another user may send nothing for ever.
        let mut state = self.shared.state.lock();
        let began = Instant::now();
        loop {
            let is_of_owner = |user: &u32| *user == 0 || *user == self.shared.owner;
            let patience = match state.connected.iter().any(is_of_owner) {
                true => FINISH_TIMEOUT,
                false if state.connected.is_empty() => break,
                false => FINISH_TIMEOUT_OF_OTHERS,
            };
            let left = patience.saturating_sub(began.elapsed());
            if left.is_zero() || self.shared.changed.wait_for(&mut state, left).timed_out() {
                break;
            }
        }
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        let answer = match failure {
            None => ServerMessage::Done(Box::new(Response::Unmounted)),
            Some(text) => ServerMessage::Failed(CommandFailure::new(Errno::IO, text)),
        };
        for (_, wire) in waiting {
            try_send_answer(&wire, &answer);
            self.shared.close_apart([wire]);
        }
    }
}

impl Canceller {
    /// Cancels the running commands. The mount stays busy until commands that ignore the cancellation have ended,
    /// because their descriptors stay open.
    pub fn cancel_all(&self) {
        for job in &self.0.state.lock().running {
            job.cancel();
        }
    }
}

/// Sends progress to the connections that wait for the unmount, until the server ends. Their clients wait only for a
/// limited time for a server of another user that says nothing.
fn give_signs_of_life(shared: &ServerShared) {
    while !shared.ends.load(Ordering::SeqCst) {
        thread::sleep(ALIVE_INTERVAL);
        let state = shared.state.lock();
        if shared.ends.load(Ordering::SeqCst) {
            return;
        }
        for (_, wire) in &state.waiting {
            try_send_answer(wire, &ServerMessage::Progress(ProgressMessage::default()));
        }
    }
}

/// Accepts connections until the server ends (K1).
fn accept_all(listener: &UnixListener, shared: &Arc<ServerShared>) {
    loop {
        match listener.accept() {
            Ok((stream, _)) => start(stream, shared),
            Err(_) if shared.ends.load(Ordering::SeqCst) => return,
            // Accepting may fail for a while, for example, if too many files are open.
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Starts a thread for a connection (K4), if there is room (K2).
fn start(stream: UnixStream, shared: &Arc<ServerShared>) {
    let Ok(peer) = getsockopt(&stream, PeerCredentials) else { return };
    let user = peer.uid();
    let is_stranger = user != 0 && user != shared.owner;
    // S1 of `sent_files`.
    let Ok(wire) = (if is_stranger { Wire::without_files(stream) } else { Wire::new(stream) }) else { return };
    {
        let mut state = shared.state.lock();
        if !has_room(state.connected.iter().copied(), user, shared.owner) {
            drop(state);
            let text = "too many commands of this user are running; try again later";
            try_send_answer(&wire, &ServerMessage::Failed(CommandFailure::new(Errno::AGAIN, text)));
            return shared.close_apart([wire]);
        }
        state.connected.push(user);
    }
    let guard = Arc::new(ConnectionSlot { shared: Arc::clone(shared), user });
    let pid = u32::try_from(peer.pid()).unwrap_or(0);
    let peer = Peer { uid: user, gid: peer.gid(), pid, is_stranger };
    let thread = thread::Builder::new().name("control-client".to_owned());
    // If no thread can be started, `guard` and `wire` are dropped, which closes the connection.
    let _ = thread.spawn(move || {
        handle_connection(wire, peer, &guard);
    });
}

/// An entry of [`ServerConnections::connected`], removed on drop.
struct ConnectionSlot {
    shared: Arc<ServerShared>,
    user: u32,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        if let Some(at) = state.connected.iter().position(|user| *user == self.user) {
            state.connected.swap_remove(at);
        }
        drop(state);
        self.shared.changed.notify_all();
    }
}

#[derive(Clone, Copy)]
struct Peer {
    uid: u32,
    gid: u32,
    pid: u32,
    /// Neither root nor the mount's owner.
    is_stranger: bool,
}

/// Whether `user` may have one more connection, if each element of `users` has a connection already (K2).
fn has_room(users: impl Iterator<Item = u32>, user: u32, owner: u32) -> bool {
    let is_other = |user: u32| user != 0 && user != owner;
    let (mut of_user, mut of_others) = (0, 0);
    for connected in users {
        of_user += usize::from(connected == user);
        of_others += usize::from(is_other(connected));
    }
    if is_other(user) { of_user < USER_MAX && of_others < OTHERS_MAX } else { of_user < OWNER_MAX }
}

/// Receives and answers the request of a connection.
fn handle_connection(wire: Wire, peer: Peer, slot: &Arc<ConnectionSlot>) {
    let shared = &slot.shared;
    let files = SentFiles::counted_by(Arc::clone(slot) as FileHold);
    let received = wire.receive_with(files, REQUEST_MAX, Some(Instant::now() + REQUEST_TIMEOUT));
    let failed = |text: &str| Err(CommandFailure::new(Errno::PROTO, text));
    let (request, frame) = match received {
        Ok(Some(frame)) => (decode_request(&frame.bytes), frame),
        Ok(None) => return,
        Err(error) if error.kind() == io::ErrorKind::InvalidData => (failed(&error.to_string()), Frame::default()),
        Err(_) => return,
    };
    let answered = match request {
        Ok((Request::AwaitUnmount, _)) => return wait_for_unmount(wire, peer, shared),
        Ok((request, numbers)) => answer(&wire, peer, shared, request, &numbers, frame),
        Err(failure) => Err(failure),
    };
    let answer = match answered {
        Ok(response) => ServerMessage::Done(Box::new(response)),
        Err(failure) => ServerMessage::Failed(failure),
    };
    // A client that went away needs no answer.
    if let Ok(bytes) = encode_answer(&answer) {
        let _ = wire.send(&bytes, &[]);
    }
}

/// Adds a connection to the connections that wait for the unmount, if there is room (K2).
fn wait_for_unmount(wire: Wire, peer: Peer, shared: &Arc<ServerShared>) {
    let mut state = shared.state.lock();
    let users = |state: &ServerConnections| state.waiting.iter().map(|(user, _)| *user).collect::<Vec<_>>();
    let mut ended = Vec::new();
    if !has_room(users(&state).into_iter(), peer.uid, shared.owner) {
        ended.extend(state.waiting.extract_if(.., |(_, wire)| wire.has_ended()).map(|(_, wire)| wire));
    }
    if has_room(users(&state).into_iter(), peer.uid, shared.owner) {
        state.waiting.push((peer.uid, wire));
    } else {
        ended.push(wire);
    }
    drop(state);
    shared.close_apart(ended);
}

fn answer(
    wire: &Wire,
    peer: Peer,
    shared: &Arc<ServerShared>,
    request: Request,
    numbers: &[u32],
    frame: Frame,
) -> Result<Response> {
    let unmounted = || CommandFailure::new(Errno::NOTCONN, "it is being unmounted; open the image instead");
    let served = shared.state.lock().served.clone().ok_or_else(unmounted)?;
    // A descriptor may belong to another filesystem that never answers, so the files are looked up before the command
    // starts to hold this filesystem (K5).
    let Examined { opened, files } = match peer.is_stranger {
        true => {
            let opened = files_of_stranger(&*served.host, &*served.processes, numbers, peer.pid, peer.uid)?;
            Examined { opened, files: Vec::new() }
        }
        false => frame.files.examine(&served.host)?,
    };
    if opened.is_empty() {
        return Err(CommandFailure::new(Errno::BADF, "a command has to come with an open file of the mount"));
    }
    let caller = CommandCaller::of_peer(peer.uid, peer.gid, peer.pid, Arc::clone(&served.processes));
    let job = Arc::new(Job::new());
    let running = RunningCommand::start(shared, &job).ok_or_else(unmounted)?;
    let fs = served.host.filesystem().ok_or_else(unmounted)?;
    let ends_with_client = request.ends_with_client();
    let is_long = request.is_long();
    let stream = request.stream().map(|direction| (direction, Arc::new(ByteQueue::default())));
    let work = {
        let (job, host) = (Arc::clone(&job), Arc::clone(&served.host));
        let changes = request.changes();
        let queue = stream.as_ref().map(|(_, queue)| CommandsEnd(Arc::clone(queue)));
        move || {
            let stream = queue.as_ref().map(|queue| CommandStream::Queue(&queue.0));
            let context = CommandContext { fs: &fs, host: &*host, caller: &caller, files: &opened, stream, job: &job };
            let done = catch_unwind(AssertUnwindSafe(|| execute(&context, request)));
            if changes {
                host.settle();
            }
            drop(fs);
            drop(files);
            drop(running);
            drop(queue);
            done.unwrap_or_else(|_| Err(CommandFailure::new(Errno::IO, "the command failed: this is a bug of ubtrfs")))
        }
    };
    if !is_long {
        return work();
    }
    let (send, results) = mpsc::channel();
    let no_thread = |error: io::Error| CommandFailure::new(Errno::AGAIN, format!("no thread can be started: {error}"));
    let thread = thread::Builder::new().name("control-command".to_owned());
    thread
        .spawn(move || {
            // Sending fails only if the receiver is gone, and then nobody needs the result.
            let _ = send.send(work());
        })
        .map_err(no_thread)?;
    let mut reporter = Reporter::new(wire, &job);
    let is_gone = match &stream {
        Some((Direction::ToClient, queue)) => reporter.send_stream(queue),
        Some((Direction::ToServer, queue)) => reporter.receive_stream(queue),
        None => false,
    };
    if is_gone {
        job.cancel();
        if let Some((_, queue)) = &stream {
            queue.close();
        }
    }
    watch(wire, &job, &results, ends_with_client, &mut reporter)
}

/// A command's end of its stream. When it is dropped, the connection's thread stops waiting for the command.
struct CommandsEnd(Arc<ByteQueue>);

impl Drop for CommandsEnd {
    fn drop(&mut self) {
        self.0.end();
        self.0.close();
    }
}

/// Sends progress until the result arrives. If the client goes away, cancels a job that ends with its client.
fn watch(
    wire: &Wire,
    job: &Job,
    results: &mpsc::Receiver<Result<Response>>,
    ends_with_client: bool,
    reporter: &mut Reporter<'_>,
) -> Result<Response> {
    let mut is_gone = false;
    loop {
        let result = results.recv_timeout(if is_gone { FOR_EVER } else { PROGRESS_INTERVAL });
        let gone = || CommandFailure::new(Errno::IO, "the command failed: this is a bug of ubtrfs");
        match result {
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(gone()),
            Ok(result) => {
                reporter.finish();
                return result;
            }
        }
        if wire.has_ended() {
            is_gone = true;
            if ends_with_client {
                job.cancel();
            }
        } else {
            reporter.report();
        }
    }
}

/// Marks a command that holds the filesystem until this value is dropped (K5).
struct RunningCommand {
    shared: Arc<ServerShared>,
    job: Arc<Job>,
}

impl RunningCommand {
    fn start(shared: &Arc<ServerShared>, job: &Arc<Job>) -> Option<Self> {
        let mut state = shared.state.lock();
        state.served.as_ref()?;
        state.running.push(Arc::clone(job));
        Some(Self { shared: Arc::clone(shared), job: Arc::clone(job) })
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        self.shared.state.lock().running.retain(|job| !Arc::ptr_eq(job, &self.job));
        self.shared.changed.notify_all();
    }
}

/// Sends as much of an answer as fits into the socket's buffer without waiting. A short answer always fits into an
/// empty buffer.
fn try_send_answer(wire: &Wire, answer: &ServerMessage) {
    if let Ok(bytes) = encode_answer(answer)
        && let Ok(mut out) = OutgoingFrame::new(&bytes)
    {
        let _ = wire.push(&mut out, &[]);
    }
}

/// The largest number of threads that close connections (K7).
const CLOSING_MAX: usize = 64;
/// The largest number of connections of one ordinary user.
const USER_MAX: usize = 8;
/// The largest number of connections of root; the mount's owner may have as many.
const OWNER_MAX: usize = 128;
/// The largest number of connections of all ordinary users together.
const OTHERS_MAX: usize = 64;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The interval of signs of life.
const ALIVE_INTERVAL: Duration = Duration::from_secs(2);
const FOR_EVER: Duration = Duration::from_secs(1 << 30);
/// How long [`ControlServer::finish`] waits for connections of root and of the mount's owner that have not sent a request
/// yet. On a machine with much work, a thread may not run for a second.
const FINISH_TIMEOUT: Duration = Duration::from_secs(5);
/// How long [`ControlServer::finish`] waits for connections of other users.
const FINISH_TIMEOUT_OF_OTHERS: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_close_connections_are_counted_until_they_end() {
        let server = ControlServer::listen().unwrap();
        for _ in 0..3 {
            let (near, _far) = UnixStream::pair().unwrap();
            server.shared.close_apart([Wire::new(near).unwrap()]);
        }
        let begun = Instant::now();
        while server.shared.nr_closing.load(Ordering::SeqCst) != 0 {
            assert!(begun.elapsed() < Duration::from_secs(20), "K7");
            thread::sleep(Duration::from_millis(10));
        }
        server.finish(None);
    }
}
