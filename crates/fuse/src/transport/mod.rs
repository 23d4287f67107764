//! Transport: how requests arrive from the kernel and answers go back; how many threads read /dev/fuse.
//!
//! | module        | contents                                                                |
//! |---------------|-------------------------------------------------------------------------|
//! | `worker_pool` | the threads that take requests, also in place of threads that wait      |
//! | `dev_fuse`    | requests read from /dev/fuse: works everywhere                          |
//! | `ring`        | requests through io_uring: number of threads and their processors       |
//! | `placement`   | the processors of the threads that read /dev/fuse                       |
//! | `idle_poll`   | keeping a processor awake while requests arrive                         |
//! | `counts`      | requests by operation, and their time in the server                     |
//!
//! Invariants:
//! - T1. Every request that needs an answer gets one, from the thread that received it. A handler that waits steps
//!   [aside](WorkerPlace::aside), so that another thread receives requests.
//! - T2. The server announces rings to the kernel only after it has made them: after the announcement, the kernel holds
//!   back all requests until each queue has a ring.

mod counts;
mod dev_fuse;
mod idle_poll;
mod placement;
mod ring;
mod worker_pool;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::thread::CpuSet;
use zerocopy::IntoBytes;

use crate::protocol::{
    Features, FuseRequest, InHeader, InitLimits, InvalEntry, InvalInode, MAJOR, Offer, OutHeader, Reply, answer_init,
    forgotten, opcode,
};
pub use counts::RequestCounts;
use counts::ThreadCounts;
use idle_poll::IdlePoll;
pub use idle_poll::IdlePolling;
pub use placement::ThreadMover;
use placement::ThreadPlacement;
pub(crate) use placement::set_affinity;
pub use worker_pool::WorkerPlace;
use worker_pool::WorkerPool;

/// Answers requests. Many threads call the handler at once. A handler must not panic.
pub trait Handler: Send + Sync + 'static {
    /// Writes the answer, or returns the error to answer with.
    fn handle(&self, request: &FuseRequest<'_>, reply: &mut Reply<'_>, place: &WorkerPlace<'_>) -> Result<(), Errno>;

    /// Handles FORGET: the kernel gives back `count` references to a node.
    fn forget(&self, node: u64, count: u64);

    /// The processor on which a thread ran last, if it can be found at once.
    fn processor_of(&self, thread: u32) -> Option<usize> {
        processor_of(thread)
    }

    /// Moves other threads of this process to other processors.
    fn mover(&self) -> ThreadMover {
        ThreadMover::default()
    }

    /// Handles DESTROY, the kernel's last request. In umount(2) of a `fuseblk` mount, the kernel waits for the answer.
    fn destroy(&self) {}

    /// Called when the connection to the kernel has ended, with or without [`Handler::destroy`]. Several threads may
    /// call this method, and other threads may still handle requests.
    fn disconnected(&self) {}
}

/// How requests arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Use io_uring if the kernel supports it, else /dev/fuse.
    #[default]
    Auto,
    /// Through /dev/fuse.
    DevFuse,
}

/// The settings of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Features that the handler uses; the transport adds its own.
    pub features: Features,
    /// Limits on request sizes and on requests in flight.
    pub limits: InitLimits,
    /// How requests arrive.
    pub transport: Transport,
    /// Threads that take requests from /dev/fuse; 0 for the default.
    pub nr_threads: usize,
    /// Keep a processor awake while requests follow each other closely.
    pub idle_poll: IdlePolling,
}

/// A connection to the kernel after the INIT exchange.
#[derive(Debug)]
pub struct Connection {
    device: Arc<OwnedFd>,
    rings: Option<ring::Rings>,
    max_write: usize,
    nr_threads: usize,
    idle_poll: IdlePolling,
    counts: RequestCounts,
    ended: (Sender<ServingResult>, Receiver<ServingResult>),
}

/// The result of a thread that served requests; `None` if the session is to end.
type ServingResult = Option<io::Result<()>>;

/// Ends a session whose mount this process cannot unmount.
#[derive(Clone, Debug)]
pub(crate) struct SessionEnd(Sender<ServingResult>);

impl SessionEnd {
    /// Makes [`Connection::serve`] return. The kernel's connection ends with this process.
    pub(crate) fn end(&self) {
        let _ = self.0.send(None);
    }
}

impl Connection {
    /// Does the INIT exchange on an open /dev/fuse that belongs to a mount.
    pub fn open(device: OwnedFd, config: &Config) -> io::Result<Self> {
        let mut wanted = config.features | TRANSPORT_FEATURES;
        loop {
            let mut request = vec![0; dev_fuse::buffer_len(0)];
            let len = dev_fuse::read(device.as_fd(), &mut request)?;
            let offer = Offer::decode(&request[..len])?;
            let mut limits = config.limits;
            let mut rings = None;
            if config.transport == Transport::Auto && offer.features.contains(Features::OVER_IO_URING) {
                rings = ring::Rings::new(&mut limits);
            }
            wanted.set(Features::OVER_IO_URING, rings.is_some());
            rustix::io::write(&device, &answer_init(&offer, wanted, limits))?;
            if offer.major == MAJOR {
                tracing::debug!("requests come {}", if rings.is_some() { "in rings" } else { "through /dev/fuse" });
                let nr_threads = if config.nr_threads == 0 { NR_THREADS } else { config.nr_threads };
                let max_write = limits.max_write as usize;
                return Ok(Self {
                    device: Arc::new(device),
                    rings,
                    max_write,
                    nr_threads,
                    idle_poll: config.idle_poll,
                    counts: RequestCounts::default(),
                    ended: channel(),
                });
            }
        }
    }

    /// Whether requests arrive through io_uring.
    pub fn has_rings(&self) -> bool {
        self.rings.is_some()
    }

    /// The counts of requests. They keep growing while the connection is served.
    pub fn counts(&self) -> RequestCounts {
        self.counts.clone()
    }

    /// A handle that ends the session.
    pub(crate) fn session_end(&self) -> SessionEnd {
        SessionEnd(self.ended.0.clone())
    }

    /// A handle for notifications on this connection.
    pub fn notifier(&self) -> Notifier {
        Notifier(Arc::clone(&self.device))
    }

    /// Serves until the mount is gone, until a thread fails, or until [`SessionEnd::end`].
    pub fn serve<H: Handler>(self, handler: H) -> io::Result<()> {
        let (ended, results) = self.ended;
        let (places, nr_dev_threads) = match self.rings {
            Some(rings) => (rings, 1),
            None => (ring::Rings::default(), self.nr_threads),
        };
        let (polling, nr_queues) = (self.idle_poll, places.nr_queues);
        let mover = handler.mover();
        let shared = Arc::new(TransportState {
            device: self.device,
            handler,
            max_write: self.max_write,
            dev: WorkerPool::new(nr_dev_threads),
            queues: (0..places.nr_queues).map(|_| WorkerPool::new(places.nr_in_queue)).collect(),
            processors: places.processors,
            placement: ThreadPlacement::new(mover),
            polls_for_lone_client: polling == IdlePolling::Auto && nr_queues == 0,
            idle_poll: IdlePoll::default(),
            counts: self.counts,
            nr_live: AtomicUsize::new(0),
            ended: Mutex::new(ended),
        });
        ring::start(&shared, places.rings)?;
        dev_fuse::start(&shared, nr_dev_threads)?;
        let shared = &*shared;
        std::thread::scope(|scope| {
            if shared.queues.is_empty() {
                let thread = std::thread::Builder::new().name("fuse-placement".to_owned());
                match thread.spawn_scoped(scope, || shared.placement.watch()) {
                    Ok(running) => shared.placement.started(running.thread()),
                    Err(error) => tracing::warn!("threads stay on all processors: {error}"),
                }
            }
            if polling != IdlePolling::Off {
                let thread = std::thread::Builder::new().name("fuse-idle-poll".to_owned());
                match thread.spawn_scoped(scope, || shared.idle_poll.run(polling, nr_queues)) {
                    Ok(running) => shared.idle_poll.started(running.thread()),
                    Err(error) => tracing::warn!("idle_poll is off: {error}"),
                }
            }
            let served = wait_for_all(shared, &results);
            shared.idle_poll.stop();
            shared.placement.stop();
            served
        })
    }
}

/// State that the threads of a connection share.
struct TransportState<H> {
    device: Arc<OwnedFd>,
    handler: H,
    max_write: usize,
    /// Threads that read /dev/fuse.
    dev: WorkerPool,
    /// For each processor, the threads of its queue.
    queues: Vec<WorkerPool>,
    /// Processors that this process may run on.
    processors: Option<CpuSet>,
    placement: ThreadPlacement,
    /// Whether only requests of a lone client keep a processor awake.
    polls_for_lone_client: bool,
    idle_poll: IdlePoll,
    counts: RequestCounts,
    nr_live: AtomicUsize,
    ended: Mutex<Sender<ServingResult>>,
}

/// Starts a thread, whose result goes to [`wait_for_all`].
fn spawn<H: Handler>(
    shared: &Arc<TransportState<H>>,
    name: &str,
    work: impl FnOnce(&Arc<TransportState<H>>) -> io::Result<()> + Send + 'static,
) -> io::Result<()> {
    /// Sends the thread's result when dropped, so also after a panic.
    struct ResultSender(Sender<ServingResult>, io::Result<()>);
    impl Drop for ResultSender {
        fn drop(&mut self) {
            let _ = self.0.send(Some(std::mem::replace(&mut self.1, Ok(()))));
        }
    }
    let (own, ended) = (Arc::clone(shared), shared.ended.lock().clone());
    shared.nr_live.fetch_add(1, Ordering::AcqRel);
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        let mut report = ResultSender(ended, Err(io::Error::other("a thread that serves requests panicked")));
        let result = work(&own);
        // Drop this thread's reference to the shared state before the result is sent, because afterwards only the
        // session may hold the handler.
        drop(own);
        report.1 = result;
    });
    if let Err(error) = started {
        shared.nr_live.fetch_sub(1, Ordering::AcqRel);
        return Err(error);
    }
    Ok(())
}

fn wait_for_all<H>(shared: &TransportState<H>, results: &Receiver<ServingResult>) -> io::Result<()> {
    while let Ok(result) = results.recv() {
        let Some(result) = result else { return Ok(()) };
        result?;
        if shared.nr_live.fetch_sub(1, Ordering::AcqRel) == 1 {
            return Ok(());
        }
    }
    Ok(())
}

/// The processor on which a thread ran last, as /proc shows it. A thread in another PID namespace has number 0.
pub(crate) fn processor_of(thread: u32) -> Option<usize> {
    if thread == 0 {
        return None;
    }
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).ok()?;
    // The second field, the name in parentheses, may contain any characters. The processor is the 39th field.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(36)?.parse().ok()
}

/// Handles a request. Returns 0 or a negative errno.
fn answer<H: Handler>(
    shared: &TransportState<H>,
    header: &InHeader,
    parts: (&[u8], &[u8]),
    reply: &mut Reply<'_>,
    (place, counts): (&WorkerPlace<'_>, &ThreadCounts),
) -> i32 {
    if !shared.polls_for_lone_client || shared.placement.is_gathered() {
        shared.idle_poll.note_request();
    }
    let started = Instant::now();
    let error = answer_uncounted(shared, header, parts, reply, place);
    counts.note(header.opcode, error != 0, started.elapsed());
    error
}

fn answer_uncounted<H: Handler>(
    shared: &TransportState<H>,
    header: &InHeader,
    (fixed, rest): (&[u8], &[u8]),
    reply: &mut Reply<'_>,
    place: &WorkerPlace<'_>,
) -> i32 {
    if header.opcode == opcode::DESTROY {
        shared.handler.destroy();
        return 0;
    }
    let done = match FuseRequest::decode(header, fixed, rest) {
        Some(request) => shared.handler.handle(&request, reply, place),
        None => Err(Errno::IO),
    };
    match done {
        Ok(()) if reply.is_whole() => 0,
        Ok(()) => -Errno::RANGE.raw_os_error(),
        Err(errno) => -errno.raw_os_error(),
    }
}

fn forget<H: Handler>(handler: &H, header: &InHeader, body: &[u8], counts: &ThreadCounts) {
    let started = Instant::now();
    for (node, count) in forgotten(header, body) {
        handler.forget(node, count);
    }
    counts.note(header.opcode, false, started.elapsed());
}

/// Sends the kernel notifications, which answer no request.
#[derive(Clone, Debug)]
pub struct Notifier(Arc<OwnedFd>);

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Notifier {
    /// Makes the kernel forget a node's attributes, and its cached pages from `offset` on; dirty pages are written back
    /// first. A negative `offset` keeps all pages; a `len` of 0 means up to the end. Succeeds also if the kernel does
    /// not know the node.
    pub fn inval_inode(&self, node: u64, offset: i64, len: i64) -> io::Result<()> {
        let size = u32::try_from(size_of::<InvalInode>()).unwrap_or_default();
        let header = OutHeader { len: size, error: NOTIFY_INVAL_INODE, unique: 0 };
        match rustix::io::write(&self.0, InvalInode { header, node, offset, len }.as_bytes()) {
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Makes the kernel forget a node's attributes, but not its pages. The call does not wait for the kernel's locks.
    pub(crate) fn forget_attributes(&self, node: u64) {
        if let Err(error) = self.inval_inode(node, -1, 0) {
            tracing::debug!("node {node}: the kernel keeps its attributes: {error}");
        }
    }

    /// Makes the kernel forget a name in a directory, and everything below it. The kernel locks the directory for this.
    /// Succeeds also if the kernel does not know the name.
    pub fn inval_entry(&self, dir: u64, name: &[u8]) -> io::Result<()> {
        let too_long = |_| io::Error::from(Errno::NAMETOOLONG);
        let namelen = u32::try_from(name.len()).map_err(too_long)?;
        let size = u32::try_from(size_of::<InvalEntry>() + name.len() + 1).map_err(too_long)?;
        let header = OutHeader { len: size, error: NOTIFY_INVAL_ENTRY, unique: 0 };
        let mut message = InvalEntry { header, parent: dir, namelen, flags: 0 }.as_bytes().to_vec();
        message.extend(name);
        message.push(0);
        match rustix::io::write(&self.0, &message) {
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

const NOTIFY_INVAL_INODE: i32 = 2;
const NOTIFY_INVAL_ENTRY: i32 = 3;

/// Default number of threads that read /dev/fuse: enough that some may wait for a device.
const NR_THREADS: usize = 4;

/// Features that the transport uses: concurrent reads, large requests, and io_uring.
const TRANSPORT_FEATURES: Features = Features::ASYNC_READ
    .union(Features::BIG_WRITES)
    .union(Features::MAX_PAGES)
    .union(Features::INIT_EXT)
    .union(Features::OVER_IO_URING);
