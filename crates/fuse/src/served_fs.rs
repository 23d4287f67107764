//! [`ServedFs`]: the filesystem that a session serves, and [`Serving`]: the way of the session's requests to this
//! filesystem.
//!
//! A seed that gets a device becomes the base of another filesystem, a sprout. As on Linux, the mounts of the seed show the
//! sprout from then on.
//!
//! ```text
//! seed --exchange()--> sprout --end()--> none: the session closes it
//! ```
//!
//! - F1. Only a seed is exchanged. A seed is never written, and the sprout begins with the same content, so everything
//!   that a program or the kernel learned from the seed stays true. A file that has no name is
//!   deleted, though. A request or command that still uses the seed may continue to use it; a scrub is cancelled.
//! - F2. The references of the kernel pass to the sprout while no request runs that adds or gives back references. So
//!   an open file of the mount stays usable when it is removed later.
//! - F3. On a mount that is no seed, requests take no lock for the exchange.

use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use rustix::io::Errno;
use ubtrfs_fs::Fs;

use crate::protocol::{FuseRequest, Operation, Reply};
use crate::server::Server;
use crate::transport::{Handler, ThreadMover, WorkerPlace};

/// The filesystem of a session. While a lock of this struct is held, no other lock is taken, except the locks of a
/// commit in [`Self::commit`].
#[derive(Debug)]
pub(crate) struct ServedFs {
    current: RwLock<Option<Current>>,
    /// Held during a commit that the end of the session must wait for.
    committing: Mutex<()>,
    serving: OnceLock<Weak<Serving>>,
}

#[derive(Clone, Debug)]
struct Current {
    fs: Arc<Fs>,
    /// Whether the filesystem was read-only from the start.
    is_read_only: bool,
}

impl ServedFs {
    /// Makes the value for a filesystem that is served from the start.
    pub(crate) fn new(fs: &Arc<Fs>, is_read_only: bool) -> Arc<Self> {
        let current = RwLock::new(Some(Current { fs: Arc::clone(fs), is_read_only }));
        Arc::new(Self { current, committing: Mutex::default(), serving: OnceLock::new() })
    }

    /// The filesystem; `None` if the session closes it.
    pub(crate) fn get(&self) -> Option<Arc<Fs>> {
        self.current.read().as_ref().map(|current| Arc::clone(&current.fs))
    }

    /// As [`Self::get`], for a thread that may hold the lock: does not wait, and returns `None` while the lock is held
    /// exclusively.
    pub(crate) fn try_get(&self) -> Option<Arc<Fs>> {
        self.current.try_read()?.as_ref().map(|current| Arc::clone(&current.fs))
    }

    /// Calls `commit`, unless the session closes the filesystem. [`Self::end`] waits for this call.
    pub(crate) fn commit(&self, commit: impl FnOnce(&Fs)) {
        let _committing = self.committing.lock();
        if let Some(fs) = self.get() {
            commit(&fs);
        }
    }

    /// Takes the filesystem for its close, and tells whether it was read-only from the start. Waits for a commit
    /// ([`Self::commit`]), which holds the filesystem.
    pub(crate) fn end(&self) -> Option<(Arc<Fs>, bool)> {
        let _committing = self.committing.lock();
        self.current.write().take().map(|Current { fs, is_read_only }| (fs, is_read_only))
    }

    /// Makes the handler of the session's requests.
    pub(crate) fn serving(&self, server: Server) -> Arc<Serving> {
        let can_change = self.get().is_some_and(|fs| fs.is_seed());
        let serving = Arc::new(match can_change {
            true => Serving::Seed(RwLock::new(Arc::new(server))),
            false => Serving::Only(server),
        });
        let _ = self.serving.set(Arc::downgrade(&serving));
        serving
    }

    /// Serves `sprout` instead of the seed (F1, F2). Returns false if the session ends, or if running requests take too
    /// long. Then the session still serves the seed.
    pub(crate) fn exchange(&self, sprout: &Arc<Fs>) -> bool {
        let Some(serving) = self.serving.get().and_then(Weak::upgrade) else { return false };
        let Serving::Seed(server) = &*serving else { return false };
        let _committing = self.committing.lock();
        let until = Instant::now() + EXCHANGE_PATIENCE;
        // A waiting writer keeps new requests waiting, and a running request may need one of them. So it waits briefly.
        let mut server = loop {
            match server.try_write_for(EXCHANGE_WAIT) {
                Some(server) => break server,
                None if Instant::now() >= until => return false,
                None => thread::sleep(EXCHANGE_WAIT),
            }
        };
        let Some(seed) = self.get().filter(|seed| seed.is_seed() && seed.root() == sprout.root()) else { return false };
        if seed.shows_top_level() {
            sprout.show_top_level();
        }
        sprout.take_references(&seed);
        sprout.continue_timeline(&seed);
        *server = Arc::new(server.with_fs(Arc::clone(sprout)));
        drop(server);
        *self.current.write() = Some(Current { fs: Arc::clone(sprout), is_read_only: false });
        // Nobody could see or cancel it any more.
        let _ = seed.cancel_scrub();
        true
    }
}

/// Answers the requests of a session with the filesystem that it serves.
#[derive(Debug)]
pub(crate) enum Serving {
    /// The filesystem stays the same (F3).
    Only(Server),
    /// A seed, or the sprout that took its place.
    Seed(RwLock<Arc<Server>>),
}

impl Serving {
    /// Calls `handle` while the filesystem is not exchanged (F2).
    fn with<T>(&self, handle: impl FnOnce(&Server) -> T) -> T {
        match self {
            Self::Only(server) => handle(server),
            Self::Seed(server) => handle(&server.read()),
        }
    }
}

impl Handler for Arc<Serving> {
    fn handle(&self, request: &FuseRequest<'_>, reply: &mut Reply<'_>, place: &WorkerPlace<'_>) -> Result<(), Errno> {
        match (&**self, &request.operation) {
            // An ioctl may exchange the filesystem, or run for long. It hands out no references.
            (Serving::Seed(server), Operation::Ioctl { .. }) => {
                let server = Arc::clone(&server.read());
                server.handle(request, reply, place)
            }
            _ => self.with(|server| server.handle(request, reply, place)),
        }
    }

    fn forget(&self, node: u64, count: u64) {
        self.with(|server| server.forget(node, count));
    }

    fn processor_of(&self, thread: u32) -> Option<usize> {
        self.with(|server| server.processor_of(thread))
    }

    fn mover(&self) -> ThreadMover {
        self.with(Server::mover)
    }

    fn destroy(&self) {
        self.with(Server::destroy);
    }

    fn disconnected(&self) {
        self.with(Server::disconnected);
    }
}

/// How long an exchange waits for running requests.
const EXCHANGE_PATIENCE: Duration = Duration::from_secs(5);
/// How long new requests wait for an exchange that waits for running requests.
const EXCHANGE_WAIT: Duration = Duration::from_millis(10);
