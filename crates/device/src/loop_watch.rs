//! [`LoopWatch`]: watches for loop devices that are attached to an image file while this process writes to it, and tries
//! to keep the kernel from mounting them.
//!
//! No lock keeps losetup from attaching a loop device to a file: locks of files are advisory, and a lease needs a file
//! that is open only once. But a loop device itself can be claimed, and the kernel does not mount a device that is
//! claimed. So the watch claims the loop devices over the image as soon as they appear.
//!
//! ```text
//! file opened by any program (inotify) --> loop device over it? --no, for a while--> waiting
//!                                             |
//!                                             +--claimed--> held until losetup -d, or the end of the watch
//!                                             +--mounted already, read-only--> told
//!                                             +--mounted already, writable--> told: nothing may be written any more
//! ```
//!
//! `mount -o loop` mounts the device a few milliseconds after it attaches it, so the claim can come too late.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{File, Metadata};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, Reader, WatchFlags};

use crate::mounted::{self, KernelUse};

/// What happened to a loop device over the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoopEvent {
    /// The loop device was attached. It is claimed now, so that it cannot be mounted.
    Claimed(PathBuf),
    /// The loop device was attached, but cannot be claimed.
    Unclaimed(PathBuf),
    /// The kernel has mounted the loop device, at this path if it is known.
    Mounted {
        /// The loop device.
        node: PathBuf,
        /// The mount point.
        at: Option<PathBuf>,
        /// Whether the kernel can write to the image.
        is_writable: bool,
    },
}

/// A function that a watch calls for each event.
#[derive(Clone)]
pub struct TellLoopEvent(Arc<dyn Fn(LoopEvent) + Send + Sync>);

impl TellLoopEvent {
    /// Calls `tell`.
    pub fn new(tell: impl Fn(LoopEvent) + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }
}

impl fmt::Debug for TellLoopEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TellLoopEvent").finish_non_exhaustive()
    }
}

/// A watch of an image file, which ends when this value is dropped.
#[derive(Debug)]
pub struct LoopWatch(Arc<ClaimedLoops>);

#[derive(Debug)]
struct ClaimedLoops {
    has_ended: AtomicBool,
    /// Opens of the image (inotify), and the number of the watch on it.
    opens: OwnedFd,
    watch: i32,
    /// The claimed loop devices.
    held: Mutex<Vec<ClaimedLoop>>,
}

/// A claimed loop device.
#[derive(Debug)]
struct ClaimedLoop {
    name: String,
    node: PathBuf,
    since: Instant,
    /// The device, opened exclusively.
    _file: File,
}

impl LoopWatch {
    /// Watches the image file at `path`. Calls `tell` in a thread of the watch.
    pub fn start(path: &Path, tell: TellLoopEvent) -> io::Result<Self> {
        let image = std::fs::metadata(path)?;
        let opens = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let watch = inotify::add_watch(&opens, path, WatchFlags::OPEN)?;
        let has_ended = AtomicBool::new(false);
        let shared = Arc::new(ClaimedLoops { has_ended, opens, watch, held: Mutex::default() });
        let before = mounted::loop_devices_of(image.dev(), image.ino());
        let watched =
            Watched { image, shared: Arc::clone(&shared), before, told: BTreeSet::new(), has_open_question: false };
        thread::Builder::new().name("loop-watch".into()).spawn(move || watched.run(&*tell.0))?;
        Ok(Self(shared))
    }
}

impl Drop for LoopWatch {
    fn drop(&mut self) {
        self.0.has_ended.store(true, Ordering::SeqCst);
        // The end of the watch on the image is an event, which wakes the thread.
        let _ = inotify::remove_watch(&self.0.opens, self.0.watch);
        self.0.held.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// The state of the watch's thread.
struct Watched {
    image: Metadata,
    shared: Arc<ClaimedLoops>,
    /// Loop devices that were attached before the watch. The process has claimed them when it opened the image.
    before: Vec<String>,
    /// Loop devices that were told of, until they are gone.
    told: BTreeSet<PathBuf>,
    /// Whether a loop device could neither be claimed nor told of yet.
    has_open_question: bool,
}

impl Watched {
    fn run(mut self, tell: &dyn Fn(LoopEvent)) {
        let shared = Arc::clone(&self.shared);
        let opens = &shared.opens;
        loop {
            let is_idle = self.told.is_empty() && !self.has_open_question;
            // If waiting fails, the next look is only early.
            let _ = poll(&mut [PollFd::new(opens, PollFlags::IN)], (!is_idle).then_some(&LOOK_INTERVAL));
            if self.has_ended() {
                return;
            }
            let mut last_open = drain(opens).then(Instant::now);
            loop {
                self.look(tell);
                if drain(opens) {
                    last_open = Some(Instant::now());
                }
                // A program that attaches a loop device opens the file a moment before.
                let Some(since) = last_open.map(|at| at.elapsed()).filter(|since| *since < LOOK_TIME) else { break };
                if self.has_ended() {
                    return;
                }
                thread::sleep(if since < CLOSE_LOOK_TIME { CLOSE_LOOK_PAUSE } else { LOOK_PAUSE });
            }
        }
    }

    /// Claims new loop devices over the image, and releases those that losetup detaches.
    fn look(&mut self, tell: &dyn Fn(LoopEvent)) {
        let found = mounted::loop_devices_of(self.image.dev(), self.image.ino());
        self.before.retain(|name| found.contains(name));
        let is_new = |name: &&String| !self.before.contains(name);
        let of_name = |name: &String| (name.clone(), Path::new("/dev").join(name));
        let found: Vec<(String, PathBuf)> = found.iter().filter(is_new).map(of_name).collect();
        self.told.retain(|node| found.iter().any(|(_, other)| other == node));
        self.has_open_question = false;
        self.release_detached();
        for (name, node) in found {
            if self.held(|held| held.iter().any(|claim| claim.node == node)) {
                continue;
            }
            // The end of the watch waits for this lock, so that no claim comes after it.
            let claimed = self.held(|held| {
                (!self.has_ended()).then(|| {
                    let file = mounted::open_exclusive(&node)?;
                    held.push(ClaimedLoop { name, node: node.clone(), since: Instant::now(), _file: file });
                    io::Result::Ok(())
                })
            });
            let event = match claimed {
                None => return,
                Some(Ok(())) => Some(LoopEvent::Claimed(node.clone())),
                Some(Err(error)) => event_of(&node, &error),
            };
            let Some(event) = event else {
                self.has_open_question = true;
                continue;
            };
            if self.told.insert(node) {
                tell(event);
            }
        }
    }

    /// Releases claims on devices that the kernel detaches when their last user closes them. If another program uses such
    /// a device, it is claimed again at once.
    fn release_detached(&self) {
        let is_detached = |claim: &ClaimedLoop| {
            let path = format!("/sys/block/{}/loop/autoclear", claim.name);
            claim.since.elapsed() >= CLAIM_TIME && std::fs::read_to_string(path).is_ok_and(|flag| flag.trim() == "1")
        };
        self.held(|held| held.retain(|claim| !is_detached(claim)));
    }

    fn held<T>(&self, work: impl FnOnce(&mut Vec<ClaimedLoop>) -> T) -> T {
        work(&mut self.shared.held.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn has_ended(&self) -> bool {
        self.shared.has_ended.load(Ordering::SeqCst)
    }
}

/// Takes all waiting events. Returns whether there was one.
fn drain(opens: &impl AsFd) -> bool {
    let mut space = [MaybeUninit::uninit(); 1024];
    let mut events = Reader::new(opens, &mut space);
    let mut has_event = false;
    while events.next().is_ok() {
        has_event = true;
    }
    has_event
}

/// The event of a device whose claim failed; `None` if the reason is not known yet. The kernel claims a loop device for a
/// moment when a program attaches or mounts it.
fn event_of(node: &Path, error: &io::Error) -> Option<LoopEvent> {
    let node = node.to_owned();
    let Ok(metadata) = std::fs::metadata(&node) else { return Some(LoopEvent::Unclaimed(node)) };
    let is_writable = !mounted::is_write_protected(metadata.rdev());
    match mounted::use_of_block_device(metadata.rdev()) {
        Some(KernelUse::Mounted(at)) => Some(LoopEvent::Mounted { node, at: Some(at), is_writable }),
        Some(KernelUse::Exclusive) => Some(LoopEvent::Mounted { node, at: None, is_writable }),
        None if mounted::is_busy(error) => None,
        Some(KernelUse::Served { .. }) | None => Some(LoopEvent::Unclaimed(node)),
    }
}

/// How long to look for a new loop device after a program has opened the image.
const LOOK_TIME: Duration = Duration::from_millis(500);
const LOOK_PAUSE: Duration = Duration::from_millis(5);
/// How long to look as often as `mount -o loop` needs from opening the image to mounting it.
const CLOSE_LOOK_TIME: Duration = Duration::from_millis(20);
const CLOSE_LOOK_PAUSE: Duration = Duration::from_micros(200);
/// The interval of looking while there are loop devices over the image.
const LOOK_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// How long a claim on a loop device lasts that its program has told the kernel to detach after the last use, as `mount
/// -o loop` does from the start.
const CLAIM_TIME: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_of_a_watch_ends_with_it() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let watch = LoopWatch::start(image.path(), TellLoopEvent::new(|_| ())).unwrap();
        let used_by_thread = Arc::downgrade(&watch.0);
        assert!(used_by_thread.upgrade().is_some());
        drop(watch);
        let begun = Instant::now();
        while used_by_thread.strong_count() > 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "nobody wakes the thread");
            thread::sleep(Duration::from_millis(10));
        }
    }
}
