//! A mount's life: mounted, serving, unmounted, committed.
//!
//! ```text
//! mount() --> [serving] --umount, SIGTERM, SIGINT--> [unmounted] --final commit--> [image closed] --> umount answered
//!                 |
//!                 +-- panic in any thread, another program has the device --> read-only: nothing is committed any more
//! ```
//!
//! A session serves all mounts of a filesystem. `mount()` makes the first mount. If this mount shows one subvolume of
//! several, it appears on its directory only when the session serves, because the kernel asks for the subvolume's path
//! (`subtree.rs`).
//!
//! R1. `umount` gets "ok" only after the final commit has succeeded and the devices are closed. If the filesystem stays
//!     in use elsewhere, `umount` commits, and its error names the other use.
//! R2. A signal that ends the session unmounts all mounts of the filesystem in this mount namespace, and commits, even
//!     if the session has to continue because the filesystem is in use.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use ubtrfs_control::{Canceller, Channel, ConnectError, ControlServer as Control, Host, Peers, Request, join};
use ubtrfs_device::{Device, LoopEvent, TellLoopEvent};
use ubtrfs_format::RootId;
use ubtrfs_fs::{Fs, InodeId};

use crate::activity::Activity;
use crate::caller::CallerGroups;
use crate::host::{MountHost, watch_loops};
use crate::interrupt::Interrupts;
use crate::lent_device::LentDevice;
use crate::lost_pages::LostPages;
use crate::mount::{self, MountConfig, MountError};
use crate::mount_table::{self, MountInfo};
use crate::node::NodeIds;
use crate::other_user::{self, HelperCommand, control_name};
use crate::protocol::InitLimits;
use crate::remaining_mounts::{self, DetachedCopy, Remaining, Unmounted};
use crate::sandbox::{self, Confinement, Identity, PrivilegedHelper};
use crate::served_fs::ServedFs;
use crate::server::{self, Server};
use crate::submounts::{self, Submounts};
use crate::subtree::{self, DetachedMount};
use crate::transport::{Config, Connection, SessionEnd};
use crate::view::{FuseView, FuseViews};

/// A filesystem that is mounted and ready to be served.
#[derive(Debug)]
pub struct Session {
    dir: PathBuf,
    served: Arc<ServedFs>,
    activity: Arc<Activity>,
    control: Control,
    connection: Connection,
    server: Server,
    groups: CallerGroups,
    lost_pages: Arc<LostPages>,
    unmounter: Option<Arc<PrivilegedHelper>>,
    lent: Arc<OnceLock<LentDevice>>,
    is_fuseblk: Result<bool, String>,
    host: Arc<MountHost>,
    submounts: Option<Arc<Submounts>>,
    device: u64,
    /// The first mount, if it is on no directory yet.
    placing: Placing,
}

/// What remains to do for the first mount once the session serves.
#[derive(Debug)]
enum Placing {
    /// Nothing: the mount is on its directory.
    Done,
    /// This process places the mount.
    Here(DetachedMount),
    /// The helper process places the mount.
    ByHelper,
}

impl Session {
    /// Mounts `fs` on `dir`. On return the kernel knows the filesystem; [`run`](Self::run) serves it.
    pub fn mount(fs: Arc<Fs>, dir: &Path, config: &MountConfig) -> Result<Self, MountError> {
        Self::mount_device(fs, dir, config, None)
    }

    /// Mounts like [`mount`](Self::mount). A mount of a block device gets the type `fuseblk` if possible: the kernel
    /// then claims the device, sync(2) reaches the server, and umount(2) waits for the last commit. `block_device` must
    /// be the first device of `fs`, open for writing, and `config.fsname` its path.
    ///
    /// After `umount -f`, the session claims the device again before it commits. If another program has claimed the
    /// device by then, nothing is written, and [`run`](Self::run) fails.
    pub fn mount_device(
        fs: Arc<Fs>,
        dir: &Path,
        config: &MountConfig,
        block_device: Option<Arc<dyn Device>>,
    ) -> Result<Self, MountError> {
        let failed = |source| MountError::Session { dir: dir.display().to_string(), source };
        if let Some(reason) = submounts::impossible(config, fs.is_seed()) {
            return Err(MountError::Submounts(reason));
        }
        let control = Control::listen().map_err(failed)?;
        let activity = Arc::new(Activity::default());
        let name = control.name().to_vec();
        let groups = CallerGroups::default();
        let path = if config.submounts { None } else { subtree::path_of_selected(&fs) };
        let root = path.as_ref().map_or_else(|| fs.root(), |_| InodeId::root_of(RootId::FS_TREE));
        if path.is_some() {
            fs.show_top_level();
        }
        let served = ServedFs::new(&fs, config.read_only);
        let nodes = match config.submounts {
            true => NodeIds::of_one_subvolume(root.root),
            false => NodeIds::new(root, fs.root().root),
        };
        let views = FuseViews::new(FuseView::new(fs.root().root, nodes, 0), config.submounts);
        let host = Arc::new(MountHost::new(&served, views, groups.clone(), activity.clone(), config));
        let submounts = config.submounts.then(|| Submounts::new(config, &host, &served));
        let to_lend = block_device.map(LentDevice::new).transpose().map_err(failed)?;
        let lent = Arc::new(OnceLock::new());
        let server =
            Server::new(fs.clone(), activity.clone(), host.clone(), submounts.clone(), name, config, lent.clone());
        abort_on_panic(Arc::downgrade(&served));
        let block_device = to_lend.as_ref().map(LentDevice::device);
        let mount::NewMount { requests, detached, is_fuseblk } =
            mount::mount_device(dir, config, block_device, path.is_some())?;
        let placing = match (detached, path) {
            (Some(top), Some(path)) => Placing::Here(DetachedMount { top, path, dir: dir.to_owned() }),
            _ => Placing::Done,
        };
        let device = match &placing {
            Placing::Here(placement) => mount_table::device_of_file(&placement.top).map_err(failed)?,
            _ => {
                let found = mount_table::find_mount(dir);
                if let Some(found) = &found {
                    host.note_mount(mount_table::unique_id(dir).unwrap_or(found.id));
                }
                found.and_then(|found| found.device_number()).unwrap_or_default()
            }
        };
        if let Some(device) = to_lend.filter(|_| is_fuseblk == Ok(true)) {
            let _ = lent.set(device);
        }
        let how = Config {
            features: server::features(&fs, config),
            limits: InitLimits { max_write: mount::max_write(), max_background: server::MAX_BACKGROUND },
            transport: config.transport,
            nr_threads: config.nr_threads,
            idle_poll: config.idle_poll,
        };
        match Connection::open(requests, &how) {
            Ok(connection) => {
                let _ = host.views.first().notifier.set(connection.notifier());
                let _ = host.has_rings.set(connection.has_rings());
                let _ = host.counts.set(connection.counts());
                let _ = host.views.first().device.set(device);
                if let Some(submounts) = &submounts {
                    host.serve_submounts(submounts);
                }
                let lost_pages = host.lost_pages.clone();
                control.serve(host.clone(), Arc::new(groups.clone()));
                mount::set_read_ahead(device, is_fuseblk == Ok(true));
                let (dir, unmounter) = (dir.to_owned(), None);
                Ok(Self {
                    dir,
                    served,
                    activity,
                    control,
                    connection,
                    server,
                    groups,
                    lost_pages,
                    unmounter,
                    lent,
                    is_fuseblk,
                    host,
                    submounts,
                    device,
                    placing,
                })
            }
            Err(source) => {
                if matches!(placing, Placing::Done) {
                    let _ = mount::unmount(dir, true);
                }
                Err(failed(source))
            }
        }
    }

    /// Whether a mount of `fs` appears on its directory only when it is served ([`Self::take_placement`]).
    pub fn places_later(fs: &Fs) -> bool {
        subtree::path_of_selected(fs).is_some()
    }

    /// Whether the mount has the type `fuseblk`. If not, although [`mount_device`](Self::mount_device) got a block
    /// device, returns the reason.
    pub fn is_fuseblk(&self) -> Result<bool, &str> {
        self.is_fuseblk.as_ref().copied().map_err(String::as_str)
    }

    /// Watches for loop devices over the image files that the filesystem writes to, also over those that join it: claims
    /// them, so that the kernel does not mount them, and stops writing if the kernel has mounted one.
    pub fn watch_images(&self) {
        let (served, dir) = (Arc::downgrade(&self.served), self.dir.clone());
        let tell = TellLoopEvent::new(move |event| on_loop_device(&served, &dir, &event));
        for device in self.served.get().iter().flat_map(|fs| fs.given_devices()) {
            watch_loops(device.as_ref(), &tell);
        }
        let _ = self.host.tell_loops.set(tell);
    }

    /// The first mount, if it is on no directory yet. If a helper process is started for [`Self::confine`] afterwards,
    /// pass this mount to it, because a confined process cannot mount.
    pub fn take_placement(&mut self) -> Option<DetachedMount> {
        match std::mem::replace(&mut self.placing, Placing::ByHelper) {
            Placing::Here(placement) => Some(placement),
            other => {
                self.placing = other;
                None
            }
        }
    }

    /// Gives up every right that serving does not need. If this process runs as root, it runs as `identity` afterwards.
    /// From then on, `unmounter` unmounts for this process, even if it does not run as root.
    pub fn confine(&mut self, unmounter: PrivilegedHelper, identity: Identity) -> Confinement {
        // A helper that places the mount answers only when the session serves.
        let knows = if matches!(self.placing, Placing::ByHelper) { Ok(()) } else { unmounter.mounted() };
        let unmounter = Arc::new(unmounter);
        self.groups.ask(Arc::clone(&unmounter));
        self.host.confined(&unmounter);
        self.unmounter = Some(unmounter);
        let mut done = sandbox::confine(identity);
        done.missing.extend(knows.err());
        done
    }

    /// Serves until the mount is gone, commits, closes the image, and sends the result to `umount`.
    pub fn run(self) -> Result<(), MountError> {
        self.run_and_tell(|_| ())
    }

    /// Works like [`Self::run`], and calls `ready` when the mount is on its directory, with a list of what a helper process
    /// could not give up.
    pub fn run_and_tell(self, ready: impl FnOnce(&[String]) + Send + 'static) -> Result<(), MountError> {
        let Self {
            dir,
            served,
            activity,
            control,
            connection,
            server,
            lost_pages,
            unmounter,
            lent,
            host,
            submounts,
            device,
            placing,
            ..
        } = self;
        let shown = dir.display().to_string();
        let signalled = Signalled {
            dir: dir.clone(),
            device,
            host: host.clone(),
            submounts: submounts.clone(),
            unmounter: unmounter.clone(),
            canceller: control.canceller(),
            interrupts: server.interrupts(),
            session: connection.session_end(),
            activity: activity.clone(),
            served: served.clone(),
        };
        signalled.listen().map_err(|source| MountError::Session { dir: shown.clone(), source })?;
        let idle = {
            let (activity, served) = (activity.clone(), served.clone());
            thread::Builder::new().name("idle-commit".into()).spawn(move || activity.run(&served))
        };
        let placed = match submounts.clone() {
            Some(submounts) => {
                submounts.start(&server).and_then(|()| ready_with_stubs(submounts, ready)).map(|()| None)
            }
            None => place_when_served(placing, unmounter.clone(), host.clone(), ready),
        };
        let placed = placed.map_err(|source| MountError::Session { dir: shown.clone(), source })?;
        let ended = connection.serve(served.serving(server));
        if let Err(error) = &ended {
            // Unmount, because requests to a mount without a server would wait forever or fail.
            tracing::error!("the FUSE session ended: {error}");
            let _ = unmount_by(unmounter.as_deref(), &dir, device, &host, true);
        }
        if let Some(submounts) = &submounts {
            submounts.end();
        }
        // P1 of `subtree.rs`: if placing fails, the session has ended by that.
        let not_placed = placed.and_then(|thread| thread.join().unwrap_or_else(|_| Err(panicked())).err());
        activity.stop();
        if let Ok(idle) = idle {
            let _ = idle.join();
        }
        control.stop();
        if let Some((lent, fs)) = lent.get().zip(served.get()) {
            lent.reclaim(&fs, unmounter.as_deref());
        }
        // R1: this waits for a commit after a signal, which holds the filesystem.
        let (fs, is_read_only) = served.end().expect("only this function ends it");
        let lost = lost_pages.describe(&fs);
        let mut failure = fs.close().err().map(|error| error.to_string());
        if failure.is_none() {
            failure = fs.read_only().filter(|_| !is_read_only).or(lost);
        }
        drop((fs, served, host, submounts, lent));
        control.finish(failure.as_deref());
        if let Some(source) = not_placed {
            return Err(MountError::Mount { dir: shown, source });
        }
        match (failure, ended) {
            (Some(reason), _) => Err(MountError::NotDurable { dir: shown, reason }),
            (None, Err(source)) => Err(MountError::Session { dir: shown, source }),
            (None, Ok(())) => Ok(()),
        }
    }
}

/// Puts the first mount on its directory in a thread, because the session has to answer requests at the same time, and
/// then calls `ready`. Calls `ready` at once if the mount is there already.
fn place_when_served(
    placing: Placing,
    helper: Option<Arc<PrivilegedHelper>>,
    host: Arc<MountHost>,
    ready: impl FnOnce(&[String]) + Send + 'static,
) -> io::Result<Option<JoinHandle<io::Result<()>>>> {
    if matches!(placing, Placing::Done) {
        ready(&[]);
        return Ok(None);
    }
    let (started, has_started) = mpsc::channel();
    let place = move || match (placing, helper) {
        (Placing::Here(placement), _) => {
            drop(started);
            placement.place().map(|placed| (placed.key(), Vec::new()))
        }
        (_, Some(helper)) => helper.placed(|| drop(started)),
        (_, None) => Err(io::ErrorKind::NotConnected.into()),
    };
    let thread = thread::Builder::new().name("place".into()).spawn(move || {
        let (key, missing) = place()?;
        host.note_mount(key);
        ready(&missing);
        Ok(())
    })?;
    // No request is taken before the thread has asked the helper. A thread that answers requests must not wait for the
    // helper while the helper waits for the answer to a request.
    let _ = has_started.recv() as Result<(), _>;
    Ok(Some(thread))
}

/// Calls `ready` in a thread when the session serves and its stubs are known.
fn ready_with_stubs(submounts: Arc<Submounts>, ready: impl FnOnce(&[String]) + Send + 'static) -> io::Result<()> {
    let thread = thread::Builder::new().name("stubs".into()).spawn(move || {
        submounts.await_stubs();
        ready(&[]);
    });
    thread.map(drop)
}

fn panicked() -> io::Error {
    io::Error::other("the thread panicked")
}

/// Turns the filesystem read-only until it is unmounted; the disk keeps the last commit.
pub(crate) fn abort(fs: &Fs, reason: &str) {
    fs.abort(reason.to_owned());
    tracing::error!("the filesystem has turned read-only: {reason}");
}

/// Logs a loop device over the mounted image. If the kernel has mounted the loop device and can write to it, nothing is
/// written any more, because the kernel and this process would overwrite each other's blocks.
fn on_loop_device(served: &Weak<ServedFs>, dir: &Path, event: &LoopEvent) {
    let dir = dir.display();
    match event {
        LoopEvent::Claimed(node) => tracing::warn!(
            "the loop device {0} was attached to the image, which is mounted on {dir}; it is claimed, so that nothing mounts \
             it, too; detach it with: losetup -d {0}",
            node.display()
        ),
        LoopEvent::Unclaimed(node) => tracing::warn!(
            "the loop device {0} was attached to the image, which is mounted on {dir}; do not mount it, but detach it with: \
             losetup -d {0}",
            node.display()
        ),
        LoopEvent::Mounted { node, at, is_writable } => {
            let at = at.as_ref().map_or_else(String::new, |at| format!(" on {}", at.display()));
            let node = node.display();
            let fs = served.upgrade().and_then(|served| served.get());
            match fs.filter(|fs| *is_writable && fs.read_only().is_none()) {
                Some(fs) => abort(
                    &fs,
                    &format!(
                        "the kernel has mounted the image{at}, too, through {node}; unmount both, and run `ubtrfs check` on \
                         the image"
                    ),
                ),
                None => tracing::warn!(
                    "the kernel has mounted the image{at}, too, through {node}; unmount it there, because it does not see \
                     later changes"
                ),
            }
        }
    }
}

/// Makes every panic, in any thread and even if it is caught, turn the filesystem read-only ([`abort`]): after a panic,
/// memory may be wrong, and must not reach the disk.
fn abort_on_panic(served: Weak<ServedFs>) {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print(info);
        // The thread may hold a lock of `served`.
        if let Some(fs) = served.upgrade().and_then(|served| served.try_get()) {
            abort(&fs, &format!("internal error: {info}").replace('\n', " "));
        }
    }));
}

/// The parts of a session that a signal acts on.
struct Signalled {
    dir: PathBuf,
    device: u64,
    host: Arc<MountHost>,
    submounts: Option<Arc<Submounts>>,
    unmounter: Option<Arc<PrivilegedHelper>>,
    canceller: Canceller,
    interrupts: Interrupts,
    session: SessionEnd,
    activity: Arc<Activity>,
    served: Arc<ServedFs>,
}

impl Signalled {
    /// On SIGTERM, SIGINT or SIGHUP, unmounts and commits (R2). Busy mounts are detached, so that this process ends with
    /// everything committed once nothing uses them. If there is nothing to unmount any more, because the filesystem is
    /// only in use in other mount namespaces or in detached mounts, ends the session.
    fn listen(self) -> std::io::Result<()> {
        let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
        thread::Builder::new().name("signals".into()).spawn(move || {
            for _ in &mut signals {
                // A replacement of a device goes on at the next mount.
                self.served.commit(Fs::suspend_replace);
                // Cancel running commands and ioctls, because they have files open, which keep the mount busy.
                self.canceller.cancel_all();
                self.interrupts.cancel_all();
                match self.unmount(false) {
                    Ok(()) => {}
                    Err(MountError::NotMounted(_)) => {
                        self.session.end();
                        if let Some(submounts) = &self.submounts {
                            submounts.abandon();
                        }
                        return;
                    }
                    Err(error) => {
                        tracing::warn!("{error}; detaching it");
                        if let Err(error) = self.unmount(true) {
                            tracing::error!("{error}");
                        }
                    }
                }
                self.commit();
            }
        })?;
        Ok(())
    }

    fn unmount(&self, lazy: bool) -> Result<(), MountError> {
        if let Some(submounts) = &self.submounts {
            submounts.leave_all(lazy);
        }
        unmount_by(self.unmounter.as_deref(), &self.dir, self.device, &self.host, lazy)
    }

    fn commit(&self) {
        self.served.commit(|fs| {
            if fs.read_only().is_none()
                && let Err(error) = self.activity.sync(fs)
            {
                tracing::error!("commit failed: {error}");
            }
        });
    }
}

/// Unmounts all mounts of the filesystem with this number, through the helper process if the server is confined. `dir`
/// appears in errors.
fn unmount_by(
    unmounter: Option<&PrivilegedHelper>,
    dir: &Path,
    device: u64,
    host: &MountHost,
    lazy: bool,
) -> Result<(), MountError> {
    match unmounter {
        Some(unmounter) => unmounter.unmount(dir, lazy),
        None => remaining_mounts::unmount_all(dir, device, &host.mounts(), lazy),
    }
}

/// Unmounts `dir` and returns when the server's last commit is durable. If other mounts of the filesystem remain that
/// `ubtrfs mount` made, makes the server commit instead. If only bind mounts of the filesystem remain, makes the server
/// commit, and fails with [`MountError::InUseElsewhere`]. If the filesystem is still in use in another mount namespace
/// or in a detached mount, waits for the end of that use if `lazy` is true, and otherwise fails in the same way. Waits
/// for the server without a limit, also if another user runs it.
pub fn unmount(dir: &Path, lazy: bool) -> Result<(), MountError> {
    unmount_by_asking(dir, lazy, None)
}

/// Works like [`unmount`], but waits for the server of another user only for a limited time. `helper` runs the process
/// that asks that server.
pub fn unmount_with_helper(dir: &Path, lazy: bool, helper: HelperCommand<'_>) -> Result<(), MountError> {
    unmount_by_asking(dir, lazy, Some(helper))
}

fn unmount_by_asking(dir: &Path, lazy: bool, helper: Option<HelperCommand<'_>>) -> Result<(), MountError> {
    let shown = dir.display().to_string();
    // If the mount's server is dead, the path cannot be resolved.
    let full = other_user::full_path(dir).ok().or_else(|| other_user::without_entering(dir));
    let full = full.unwrap_or_else(|| dir.to_owned());
    let Some(found) = mount_table::find_mount(&full).filter(MountInfo::is_of_ubtrfs) else {
        return Err(MountError::NotMounted(shown));
    };
    let is_of_other_user = other_user::other_user_of(&found).is_some();
    let changed = |source| match mount_table::find_mount(&full) {
        // Another program has unmounted it. Another user can do that at the right moment, to hide an exchange.
        None if !is_of_other_user => MountError::NotMounted(shown.clone()),
        _ => MountError::Unmount { dir: shown.clone(), source },
    };
    // Q3 of `other_user.rs`
    let point = match mount::is_root() {
        true => Some(other_user::MountPoint::open(&found).map_err(changed)?),
        false => None,
    };
    let before = remaining_mounts::keys_of_others(&found);
    let lazy = leave_submounts(&found, lazy, is_of_other_user);
    let unmounted = Unmounted::new(found);
    let found = &unmounted.found;
    // Connecting fails if the server is dead, and then no commit is awaited.
    let peers_of = |mount: &MountInfo| Peers::of_owner(mount.user().map(|(uid, _)| uid.as_raw()));
    let peers = peers_of(found);
    let is_foreign = helper.is_some() && is_of_other_user;
    let copied = point.as_ref().filter(|_| !is_foreign && !before.is_empty());
    let copy = copied.and_then(|point| DetachedCopy::of(&point.path()));
    let until = Instant::now() + QUESTIONS_PATIENCE;
    let left = || until.saturating_duration_since(Instant::now());
    let server = control_name(&full, helper, until).and_then(|name| {
        let server = match is_foreign {
            true => ubtrfs_control::connect_to_unmount_within(&name, &peers, left())?,
            false => ubtrfs_control::connect_to_unmount(&name, &peers)?,
        };
        Ok((server, name))
    });
    match &point {
        Some(point) => {
            point.check().map_err(changed)?;
            mount::unmount(&point.path(), lazy).map_err(|error| match error {
                MountError::Busy(_) => match remaining_mounts::last_inside(found) {
                    Some(inside) => MountError::BusyInside { dir: shown.clone(), inside },
                    None => MountError::Busy(shown.clone()),
                },
                MountError::NotMounted(_) => MountError::NotMounted(shown.clone()),
                MountError::Unmount { source, .. } => changed(source),
                other => other,
            })?;
        }
        None => mount::unmount(&full, lazy)?,
    }
    let not_durable = |reason: String| {
        let reason = if is_of_other_user { other_user::harmless(&reason) } else { reason };
        MountError::NotDurable { dir: shown.clone(), reason }
    };
    match server {
        Ok((server, name)) => {
            let here = || Remaining::here(&unmounted, &before, |other| is_of(other, &name, helper, until));
            while let Some(remaining) = here() {
                let through = copy.as_ref().map(|copy| (copy, peers_of(found)));
                let outcome = remaining.commit(&shown, &name, is_foreign, through);
                // If all of them were unmounted meanwhile, the server ends, and that is awaited.
                if outcome.is_ok() || remaining.is_mounted() {
                    return outcome;
                }
            }
            drop(copy);
            if !lazy
                && !ends_soon(&server, if is_foreign { left().min(USE_PATIENCE) } else { USE_PATIENCE })
                && let Some(remaining) = Remaining::elsewhere(found, &server)
            {
                return remaining.commit(&shown, &name, is_foreign, None);
            }
            let process = process_of(&server);
            let patience = is_foreign.then(|| left().max(COMMIT_PATIENCE_MIN));
            match ubtrfs_control::await_unmount(server, patience) {
                Ok(None) => Ok(()),
                Ok(Some(reason)) => Err(not_durable(reason)),
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    Err(not_durable(format!("{error}; they are on disk when process {process} has ended")))
                }
                Err(error) => Err(not_durable(error.to_string())),
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {
            Err(not_durable(format!("its last commit was not awaited: {error}")))
        }
        Err(error) => Err(not_durable(format!("its server does not answer ({error}); the last commit is intact"))),
    }
}

/// Makes the server of a mount unmount the submounts that are not in use. Returns whether to detach the mount: as asked
/// for, or because its server is dead, and so no submount can be reached.
fn leave_submounts(mount: &MountInfo, lazy: bool, is_of_other_user: bool) -> bool {
    if lazy || is_of_other_user || !remaining_mounts::has_mounts_inside(mount) {
        return lazy;
    }
    match Channel::mount(&mount.dir) {
        // An error shows soon: the mount stays busy.
        Ok(channel) => channel.call(Request::Join(join::Request::LeaveSubmounts), &[]).is_err() && lazy,
        Err(error) => matches!(error, ConnectError::Open(error) if mount::has_server_ended(&error)),
    }
}

/// Whether the server ends, or reports its end, within this time.
fn ends_soon(server: &UnixStream, patience: Duration) -> bool {
    let mut ends = [PollFd::new(server, PollFlags::IN)];
    let timeout = Timespec::try_from(patience).ok();
    poll(&mut ends, timeout.as_ref()).is_ok_and(|nr_ready| nr_ready > 0)
}

/// If a server has not ended after this time, other uses of the filesystem are searched for.
const USE_PATIENCE: Duration = Duration::from_secs(2);

/// The process that listens on the other end, for messages.
fn process_of(server: &UnixStream) -> String {
    let peer = rustix::net::sockopt::socket_peercred(server);
    peer.map_or_else(|_| "of its server".to_owned(), |peer| peer.pid.to_string())
}

/// Time limit for another user's server. One deadline covers the answers to all questions and the first sign of life
/// during its commit. A server that gives signs of life may take longer (`ubtrfs_control::await_unmount`).
const QUESTIONS_PATIENCE: Duration = Duration::from_secs(5);

/// Lower bound of the time that another user's server has for a sign of life during its commit. Applies if the answers
/// took most of [`QUESTIONS_PATIENCE`].
const COMMIT_PATIENCE_MIN: Duration = Duration::from_secs(2);

/// Whether the server with this control socket serves a mount.
fn is_of(mount: &MountInfo, name: &[u8], helper: Option<HelperCommand<'_>>, until: Instant) -> bool {
    control_name(&mount.dir, helper, until).is_ok_and(|other| other == name)
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;
    use ubtrfs_device::MemoryDevice;
    use ubtrfs_testkit::capability;

    use super::*;

    struct Served {
        dir: TempDir,
        server: thread::JoinHandle<Result<(), MountError>>,
    }

    fn served() -> Served {
        let device = Arc::new(MemoryDevice::new(256 << 20));
        ubtrfs_mkfs::make(device.as_ref(), &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let fs = Fs::open(vec![device], ubtrfs_fs::MountOptions::default()).unwrap();
        let dir = TempDir::with_prefix("ubtrfs-session-").unwrap();
        let session = Session::mount(fs, dir.path(), &MountConfig::default()).unwrap();
        Served { dir, server: thread::spawn(move || session.run()) }
    }

    /// P1 of `subtree.rs`.
    #[test]
    fn a_first_mount_that_cannot_be_placed_ends_the_session() {
        if !capability::fuse() || !mount::is_root() {
            return;
        }
        let device = Arc::new(MemoryDevice::new(256 << 20));
        ubtrfs_mkfs::make(device.as_ref(), &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
        let open =
            |options: &str| Fs::open(vec![device.clone()], ubtrfs_fs::MountOptions::parse(options).unwrap()).unwrap();
        let fs = open("");
        fs.create_subvolume(fs.root(), b"v", &ubtrfs_fs::Caller::ROOT).unwrap();
        fs.close().unwrap();
        drop(fs);
        let dir = TempDir::with_prefix("ubtrfs-session-").unwrap();
        let session = Session::mount(open("subvol=v"), &dir.path().join("none"), &MountConfig::default()).unwrap();
        let error = session.run_and_tell(|_| panic!("it is not mounted")).unwrap_err();
        assert!(error.to_string().contains("cannot mount on"), "{error}");
        let session = Session::mount(open("subvol=v"), dir.path(), &MountConfig::default()).unwrap();
        let (ready, is_ready) = mpsc::channel();
        let server = thread::spawn(move || session.run_and_tell(move |_| ready.send(()).unwrap()));
        is_ready.recv().unwrap();
        let found = mount_table::find_mount(dir.path()).unwrap();
        assert_eq!(found.root, Path::new("/v"));
        unmount(dir.path(), false).unwrap();
        server.join().unwrap().unwrap();
    }

    #[test]
    fn a_mount_that_got_the_number_of_the_device_is_not_another_place() {
        if !capability::fuse() {
            return;
        }
        let [ours, next] = [served(), served()];
        let name = |of: &Served| control_name(of.dir.path(), None, Instant::now()).unwrap();
        // `umount` unmounts our filesystem and then searches for other mounts with its device number. If another
        // filesystem is mounted in between and gets the same device number, the search finds that filesystem.
        let found = mount_table::find_mount(next.dir.path()).unwrap();
        let device = found.device_number().unwrap();
        let refused = remaining_mounts::unmount_all(ours.dir.path(), device, &[u64::MAX], true).unwrap_err();
        assert!(matches!(refused, MountError::NotMounted(_)), "a signal unmounts no other filesystem");
        assert_eq!(mount_table::find_mount(next.dir.path()), Some(found.clone()));
        let unmounted = Unmounted::new(MountInfo { id: u64::MAX, ..found.clone() });
        let remaining =
            |name: &[u8]| Remaining::here(&unmounted, &[], |other| is_of(other, name, None, Instant::now()));
        assert!(remaining(&name(&ours)).is_none());
        assert!(remaining(&name(&next)).is_some(), "a place that is ours is found");
        for Served { dir, server } in [ours, next] {
            unmount(dir.path(), false).unwrap();
            server.join().unwrap().unwrap();
        }
    }
}
