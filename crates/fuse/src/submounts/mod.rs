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
//! - I2. The kernel never caches a stub. It asks for the name each time, so the server learns of each entering.
//! - I3. The kernel checks permissions, so it asks for a stub's attributes before it looks up a name in the stub. It
//!   then holds no lock. During the LOOKUP of a name in the stub, and during changes of the stub, it holds the stub's
//!   lock, which mounting takes. So only requests without that lock wait for the mounter.
//! - I4. The mounter walks through the views itself. Its requests wait for nothing.
//! - I5. The mounter mounts on an opened directory whose device and inode number prove that it is the stub. Users may
//!   rename directories meanwhile.
//! - I6. References of the kernel to stubs are not counted in `fs`. When a view ends, the kernel sends no FORGET, so all
//!   references to inodes of its subvolume are released.
//! - I7. A stub is renamed and removed without its mount. The kernel refuses both while the mount is there, and does not
//!   ask the server first. So the LOOKUP of a caller that renames or removes the stub takes an idle mount away ([`caller_removes`]).
//! - I8. Only the mounter makes and removes submounts, one at a time.

mod mounter;
mod place;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use ubtrfs_format::RootId;

use crate::host::MountHost;
use crate::mount::MountConfig;
use crate::served_fs::ServedFs;
use crate::server::Server;
pub(crate) use mounter::impossible;
use place::PlacedOn;

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
    /// The thread that mounts (I4).
    mounter: OnceLock<u32>,
}

#[derive(Debug, Default)]
struct SubmountState {
    /// What the mounter has to do, with the number of the task.
    tasks: VecDeque<(SubmountTask, u64)>,
    /// The number of the last task.
    last: u64,
    /// Tasks up to this number are done.
    done: u64,
    views: HashMap<RootId, LiveView>,
    /// The mounts that the mounter made, by their numbers in the table of mounts.
    placed: HashMap<u64, PlacedOn>,
    is_ending: bool,
    /// Whether the end does not wait for views that are in use.
    is_abandoned: bool,
    last_serial: u64,
}

/// A view other than the first.
#[derive(Debug)]
struct LiveView {
    /// The connection, by which the view can be mounted again.
    requests: Arc<OwnedFd>,
    serial: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SubmountTask {
    /// Mount a subvolume on its stub wherever the stub is visible.
    Enter(RootId),
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
        })
    }

    /// Whether a thread, as the kernel names it in requests, is the mounter (I4).
    pub(crate) fn is_mounter(&self, thread: u32) -> bool {
        self.mounter.get() == Some(&thread)
    }

    /// Whether the mounter has mounted a subvolume, as far as is known.
    pub(crate) fn is_placed(&self, subvolume: RootId) -> bool {
        self.state.lock().placed.values().any(|placed| placed.subvolume == subvolume)
    }

    /// Mounts a subvolume, and waits for that at most `patience`.
    pub(crate) fn enter(&self, subvolume: RootId, patience: Duration) {
        let task = self.order(SubmountTask::Enter(subvolume));
        self.wait(task, patience);
    }

    /// Unmounts a subvolume and those below it, if they are idle.
    pub(crate) fn leave(&self, subvolume: RootId) {
        if self.is_placed(subvolume) {
            let task = self.order(SubmountTask::Leave(subvolume));
            self.wait(task, PATIENCE);
        }
    }

    /// Unmounts all submounts. Those in use stay mounted, or are detached if `lazy`.
    pub(crate) fn leave_all(&self, lazy: bool) {
        let task = self.order(SubmountTask::LeaveAll { lazy });
        self.wait(task, PATIENCE);
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
        if let Some((_, number)) = state.tasks.iter().find(|(queued, _)| *queued == task) {
            return *number;
        }
        state.last += 1;
        let number = state.last;
        state.tasks.push_back((task, number));
        drop(state);
        self.changed.notify_all();
        number
    }

    fn wait(&self, task: u64, patience: Duration) {
        let until = Instant::now() + patience;
        let mut state = self.state.lock();
        while state.done < task && !state.is_ending {
            if self.changed.wait_until(&mut state, until).timed_out() {
                return;
            }
        }
    }
}

/// How long a request waits for the mounter.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// How long a LOOKUP waits. The mounter may have to wait for the end of this LOOKUP, if the kernel has forgotten the name.
pub(crate) const LOOKUP_PATIENCE: Duration = Duration::from_millis(300);

/// Whether a thread, which waits for the answer to its request, renames or removes the name that the request is about (I7).
/// The kernel's stack of the thread tells a name on the way, which it only walks through, from the last one. A thread that is
/// not visible, or that uses io_uring, only walks.
pub(crate) fn caller_removes(thread: u32) -> bool {
    let call = std::fs::read_to_string(format!("/proc/{thread}/syscall")).unwrap_or_default();
    let number = call.split_ascii_whitespace().next().and_then(|number| number.parse().ok());
    if !number.is_some_and(|number: libc::c_long| REMOVING_CALLS.contains(&number)) {
        return false;
    }
    let stack = std::fs::read_to_string(format!("/proc/{thread}/stack")).unwrap_or_default();
    !stack.is_empty() && !stack.contains(WALK)
}

/// The kernel's function that walks to the directory of the last name.
const WALK: &str = "link_path_walk";

#[cfg(target_arch = "x86_64")]
const REMOVING_CALLS: &[libc::c_long] =
    &[libc::SYS_rename, libc::SYS_rmdir, libc::SYS_renameat, libc::SYS_renameat2, libc::SYS_unlinkat];
#[cfg(not(target_arch = "x86_64"))]
const REMOVING_CALLS: &[libc::c_long] = &[libc::SYS_renameat2, libc::SYS_unlinkat];
