//! Submounts (`-o submounts`): each subvolume is a FUSE filesystem, and so has a device number, of its own.
//!
//! ```text
//! program --stat, open, walk--> stub: the directory of a subvolume, in the view of the subvolume above
//!     ^                           | GETATTR
//!     |                           v
//!     |                         mounter: makes a view of the subvolume, and mounts it on the stub
//!     +-- ESTALE: walk again -----+
//! ```
//!
//! The kernel's own flag for submounts of FUSE works with virtiofs alone. So the server mounts when a subvolume is
//! entered, and unmounts when nothing has used the mount for a while. A further walk of the VFS after ESTALE asks the
//! server again for each name (`LOOKUP_REVAL`), and then finds the mount.
//!
//! - I1. A stub shows nothing. A request on it makes the mounter mount, and is answered with ESTALE. A LOOKUP of a stub
//!   that the kernel knows already waits for the mount, and the walk goes on into it.
//! - I2. The kernel does not trust a cached stub. It asks for the name each time, so the server learns of each entering.
//! - I3. The kernel checks permissions, so it asks for a stub's attributes before it looks up a name in the stub. It
//!   then holds no lock. During the LOOKUP of a name in the stub, and during changes of the stub, it holds the stub's
//!   lock, which mounting takes. So only requests without that lock wait for the mounter.
//! - I4. The mounter walks through the views itself, and the remover too. Their requests, of whatever kind, wait for nothing.
//! - I5. The mounter mounts on an opened directory whose device and inode number prove that it is the stub. Users may
//!   rename directories meanwhile.
//! - I6. References of the kernel to stubs are not counted in `fs`. When a view ends, the kernel sends no FORGET, so all
//!   references to inodes of its subvolume are released.
//! - I7. A stub is renamed and removed without its mount. The kernel refuses both while the mount is there, and does not
//!   ask the server first. So the LOOKUP of a caller that renames or removes the stub takes an idle mount away ([`name_use`]).
//! - I8. Only the mounter makes submounts, one at a time, and only the remover takes them away. A program may hold the lock of
//!   a directory while it waits for the remover. So the remover takes no such lock: the names of mounted stubs are in the
//!   kernel's memory.
//! - I9. A walk is repeated once only, and opening a name as a path (`O_PATH`) asks for no attributes. So the mounter looks up
//!   the stubs of a view before a program does. The kernel drops a name at once whose time is over when its use ends. So
//!   these answers are valid for a short time ([`LEARNED_TTL`]); afterwards the kernel keeps the name, and asks for it again.
//! - I10. A submount has all restrictions (`ro`, `nosuid` and others) of the mount in which it lies, which may be a bind mount.
//!   Restrictions are added to a submount that is mounted already, and never taken from it.
//! - I11. Only mounts that the mounter made are unmounted. The kernel unmounts the topmost mount of a directory. So a submount
//!   with another mount on it or in it stays. The table of mounts shows such a mount, unless it is made later. Then it is
//!   fresh, and the kernel unmounts (`MNT_EXPIRE`) only what an earlier call has marked as unused.
//! - I12. No submount appears elsewhere by propagation: it would have the restrictions of the mount in which it was made, not
//!   those of the mount in which it appears (I10). So a mount becomes private before the first submount is made in it.

mod mounter;
mod place;
mod remount;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use ubtrfs_format::RootId;

use crate::host::MountHost;
use crate::mount::MountConfig;
use crate::served_fs::ServedFs;
use crate::server::Server;
use crate::transport::Notifier;
pub(crate) use mounter::impossible;
use place::PlacedOn;
pub(crate) use remount::{open_for_writing, remount};
use rustix::io::Errno;

/// The submounts of a filesystem.
#[derive(Debug)]
pub(crate) struct Submounts {
    config: MountConfig,
    host: Arc<MountHost>,
    served: Arc<ServedFs>,
    /// The server of the first view, from which those of other views are made. `None` after the end.
    template: Mutex<Option<Server>>,
    state: Mutex<SubmountState>,
    changed: Condvar,
    /// The threads of this module (I4).
    mounter: OnceLock<u32>,
    remover: OnceLock<u32>,
    /// Whether the mounter looks up stubs only to make the kernel know them (I9).
    is_learning: AtomicBool,
}

#[derive(Debug, Default)]
struct SubmountState {
    /// The tasks of the mounter: those that requests wait for, and the others.
    to_mount: TaskQueue,
    to_learn: TaskQueue,
    /// The tasks of the remover.
    to_remove: TaskQueue,
    views: HashMap<RootId, LiveView>,
    /// The mounts that the mounter made, by their numbers in the table of mounts.
    placed: HashMap<u64, PlacedOn>,
    /// The subvolumes that could not be mounted because of a limit, with the error that programs get.
    refused: HashMap<RootId, Errno>,
    /// The users for whom no idle submount was left to unmount, with the time of that.
    full_users: HashMap<u32, Instant>,
    is_ending: bool,
    /// Whether the end does not wait for views that are in use.
    is_abandoned: bool,
    last_serial: u64,
    /// The last number of a submount.
    last_placed: u64,
}

/// Tasks of one thread, which are done in order.
#[derive(Debug, Default)]
struct TaskQueue {
    /// The tasks with their numbers.
    tasks: VecDeque<(SubmountTask, u64)>,
    /// The number of the last task.
    last: u64,
    /// Tasks up to this number are done.
    done: u64,
}

impl SubmountState {
    fn note_placed(&mut self, id: u64, mut placed: PlacedOn) {
        self.last_placed += 1;
        placed.serial = self.last_placed;
        self.placed.insert(id, placed);
    }

    /// Forgets a submount, but not one that got its number in the table meanwhile.
    fn forget_placed(&mut self, id: u64, placed: &PlacedOn) {
        if self.placed.get(&id) == Some(placed) {
            self.placed.remove(&id);
        }
    }

    fn queue_of(&mut self, task: SubmountTask) -> &mut TaskQueue {
        match task {
            SubmountTask::Enter(_) => &mut self.to_mount,
            SubmountTask::Learn(_) | SubmountTask::LearnAll => &mut self.to_learn,
            SubmountTask::Leave(_) | SubmountTask::LeaveAll { .. } => &mut self.to_remove,
        }
    }
}

/// A view other than the first.
#[derive(Debug)]
struct LiveView {
    /// The connection, by which the view can be mounted again.
    requests: Notifier,
    serial: u64,
    /// The owner of the subvolume.
    owner: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SubmountTask {
    /// Mount a subvolume on its stub wherever the stub is visible.
    Enter(RootId),
    /// Make the kernel know the stub of a subvolume (I9).
    Learn(RootId),
    /// Make the kernel know all stubs of the first view.
    LearnAll,
    /// Unmount a subvolume and those below it, if they are idle.
    Leave(RootId),
    /// Unmount all submounts; those in use only if `lazy`.
    LeaveAll { lazy: bool },
}

impl Submounts {
    pub(crate) fn new(config: &MountConfig, host: &Arc<MountHost>, served: &Arc<ServedFs>) -> Arc<Self> {
        Arc::new(Self {
            config: config.clone(),
            host: Arc::clone(host),
            served: Arc::clone(served),
            template: Mutex::default(),
            state: Mutex::default(),
            changed: Condvar::new(),
            mounter: OnceLock::new(),
            remover: OnceLock::new(),
            is_learning: AtomicBool::new(false),
        })
    }

    /// Whether a thread, as the kernel names it in requests, is the mounter or the remover (I4).
    pub(crate) fn is_own(&self, thread: u32) -> bool {
        self.mounter.get() == Some(&thread) || self.remover.get() == Some(&thread)
    }

    /// How long the kernel may keep the name of a stub that it looked up for a thread (I2, I9).
    pub(crate) fn stub_ttl(&self, thread: u32) -> Duration {
        match self.mounter.get() == Some(&thread) && self.is_learning.load(Ordering::Relaxed) {
            true => LEARNED_TTL,
            false => Duration::ZERO,
        }
    }

    /// Whether a subvolume is mounted, as far as is known.
    pub(crate) fn is_placed(&self, subvolume: RootId) -> bool {
        let state = self.state.lock();
        state.views.contains_key(&subvolume) && state.placed.values().any(|placed| placed.subvolume == subvolume)
    }

    /// The error of a program that enters a subvolume which is not mounted: `ESTALE` makes the kernel walk again.
    pub(crate) fn refusal(&self, subvolume: RootId) -> Errno {
        self.state.lock().refused.get(&subvolume).copied().unwrap_or(Errno::STALE)
    }

    /// Mounts a subvolume soon.
    pub(crate) fn enter_later(&self, subvolume: RootId) {
        self.order(SubmountTask::Enter(subvolume));
    }

    /// Makes the kernel know the stub of a new subvolume soon.
    pub(crate) fn learn(&self, subvolume: RootId) {
        self.order(SubmountTask::Learn(subvolume));
    }

    /// Mounts a subvolume, and waits for that at most `patience`.
    pub(crate) fn enter(&self, subvolume: RootId, patience: Duration) {
        self.order_and_wait(SubmountTask::Enter(subvolume), patience);
    }

    /// Unmounts a subvolume and those below it, if they are idle.
    pub(crate) fn leave(&self, subvolume: RootId) {
        if self.is_placed(subvolume) {
            self.order_and_wait(SubmountTask::Leave(subvolume), PATIENCE);
        }
    }

    /// Unmounts all submounts. Those in use stay mounted, or are detached if `lazy`.
    pub(crate) fn leave_all(&self, lazy: bool) {
        self.order_and_wait(SubmountTask::LeaveAll { lazy }, PATIENCE);
    }

    /// Whether any view but the first exists.
    pub(crate) fn has_views(&self) -> bool {
        !self.state.lock().views.is_empty()
    }

    /// Makes [`Self::end`] return although views are in use.
    pub(crate) fn abandon(&self) {
        self.state.lock().is_abandoned = true;
        self.changed.notify_all();
    }

    /// Waits until the stubs of the first view are known, so that the first walk finds them (I9).
    pub(crate) fn await_stubs(&self) {
        self.order_and_wait(SubmountTask::LearnAll, PATIENCE);
    }

    /// Unmounts all submounts after the first view has ended, and waits for the end of views that are still in use: through
    /// bind mounts, in other mount namespaces, or by open files.
    pub(crate) fn end(&self) {
        self.leave_all(true);
        let mut state = self.state.lock();
        while !state.views.is_empty() && !state.is_abandoned {
            self.changed.wait(&mut state);
        }
        state.is_ending = true;
        drop(state);
        self.changed.notify_all();
        // It holds the filesystem.
        self.template.lock().take();
    }

    /// Adds a task, and returns its number.
    fn order(&self, task: SubmountTask) -> u64 {
        let mut state = self.state.lock();
        let queue = state.queue_of(task);
        if let Some((_, number)) = queue.tasks.iter().find(|(queued, _)| *queued == task) {
            return *number;
        }
        queue.last += 1;
        let number = queue.last;
        queue.tasks.push_back((task, number));
        drop(state);
        self.changed.notify_all();
        number
    }

    /// Adds a task, and waits until it is done, for at most `patience`.
    fn order_and_wait(&self, task: SubmountTask, patience: Duration) {
        let number = self.order(task);
        let until = Instant::now() + patience;
        let mut state = self.state.lock();
        while state.queue_of(task).done < number && !state.is_ending {
            if self.changed.wait_until(&mut state, until).timed_out() {
                return;
            }
        }
    }
}

/// How long the kernel keeps the name of a stub that the mounter looked up for it (I9).
const LEARNED_TTL: Duration = Duration::from_millis(20);
/// How long a request waits for the mounter.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// How long a LOOKUP waits. The mounter may have to wait for the end of this LOOKUP, if the kernel has forgotten the name.
pub(crate) const LOOKUP_PATIENCE: Duration = Duration::from_secs(3);

/// The use of a name by the thread whose request looks the name up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameUse {
    /// It walks through the name, or asks for the file.
    Walk,
    /// It makes a new file, and holds the lock of the directory.
    Make,
    /// It renames or removes the name, and holds the lock of the directory (I7).
    Remove,
}

/// The use of a name by a thread. The system call of the thread shows the use of the last name of a path. The stack in the
/// kernel shows whether the name is the last one. A thread that is not visible, or that uses io_uring, counts as walking.
pub(crate) fn name_use(thread: u32) -> NameUse {
    let call = std::fs::read_to_string(format!("/proc/{thread}/syscall")).unwrap_or_default();
    let number: Option<libc::c_long> = call.split_ascii_whitespace().next().and_then(|number| number.parse().ok());
    let is_one_of = |calls: &[libc::c_long]| number.is_some_and(|number| calls.contains(&number));
    let found = match () {
        () if is_one_of(REMOVING_CALLS) => NameUse::Remove,
        () if is_one_of(MAKING_CALLS) => NameUse::Make,
        () => return NameUse::Walk,
    };
    let stack = std::fs::read_to_string(format!("/proc/{thread}/stack")).unwrap_or_default();
    if stack.is_empty() || stack.contains(WALK) { NameUse::Walk } else { found }
}

/// The kernel's function that walks to the directory of the last name.
const WALK: &str = "link_path_walk";

#[cfg(target_arch = "x86_64")]
const REMOVING_CALLS: &[libc::c_long] =
    &[libc::SYS_rename, libc::SYS_rmdir, libc::SYS_renameat, libc::SYS_renameat2, libc::SYS_unlinkat];
#[cfg(not(target_arch = "x86_64"))]
const REMOVING_CALLS: &[libc::c_long] = &[libc::SYS_renameat2, libc::SYS_unlinkat];
#[cfg(target_arch = "x86_64")]
const MAKING_CALLS: &[libc::c_long] = &[
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    libc::SYS_link,
    libc::SYS_linkat,
    libc::SYS_symlink,
    libc::SYS_symlinkat,
];
#[cfg(not(target_arch = "x86_64"))]
const MAKING_CALLS: &[libc::c_long] = &[libc::SYS_mkdirat, libc::SYS_mknodat, libc::SYS_linkat, libc::SYS_symlinkat];
