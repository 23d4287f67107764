//! The mounter and the remover: the threads that make submounts and take them away (I8).

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use ubtrfs_format::RootId;
use ubtrfs_fs::{Fs, InodeId};

use super::place::{self, Leaving, PlacedOn};
use super::{LEARNED_TTL, LiveView, PATIENCE, SubmountTask, Submounts};
use crate::mount::{self, MountConfig};
use crate::mount_table::{self, MountInfo};
use crate::node::NodeIds;
use crate::protocol::InitLimits;
use crate::server::{self, Server};
use crate::subtree;
use crate::transport::{Config, Connection, IdlePolling, Transport};
use crate::view::FuseView;

/// A mount that the mounter made, with its line in the table of mounts.
struct Submount {
    mount: MountInfo,
    placed: PlacedOn,
    /// Whether a mount that the mounter did not make lies on it, in it, or in a submount in it (I11).
    has_others: bool,
}

/// The outcome of several unmounts.
struct Unmounting {
    nr_unmounted: usize,
    /// The last error.
    outcome: io::Result<()>,
}

impl Submounts {
    /// Starts the mounter. `server` is that of the first view.
    pub(crate) fn start(self: &Arc<Self>, server: &Server) -> io::Result<()> {
        *self.template.lock() = Some(server.clone());
        raise_descriptor_limit();
        let (mounter, remover) = (Arc::clone(self), Arc::clone(self));
        thread::Builder::new().name("mounter".into()).spawn(move || {
            let _ = mounter.mounter.set(thread_number());
            mounter.mount_as_ordered();
        })?;
        thread::Builder::new().name("remover".into()).spawn(move || {
            let _ = remover.remover.set(thread_number());
            remover.remove_as_ordered();
        })?;
        Ok(())
    }

    fn mount_as_ordered(self: &Arc<Self>) {
        loop {
            let mut state = self.state.lock();
            let (task, number) = loop {
                if state.is_ending {
                    return;
                }
                match state.to_mount.tasks.pop_front().or_else(|| state.to_learn.tasks.pop_front()) {
                    Some(task) => break task,
                    None => self.changed.wait(&mut state),
                }
            };
            drop(state);
            let done = match task {
                SubmountTask::Enter(subvolume) => self.mount(subvolume),
                SubmountTask::Learn(subvolume) => self.learning(|| self.learn_one(subvolume)),
                _ => self.learning(|| self.learn_all()),
            };
            if let Err(error) = &done {
                tracing::debug!("{task:?}: {error}");
            }
            let mut state = self.state.lock();
            if let SubmountTask::Enter(subvolume) = task {
                let limit =
                    done.err().and_then(|error| Errno::from_io_error(&error)).filter(|errno| LIMITS.contains(errno));
                match limit {
                    Some(errno) => drop(state.refused.insert(subvolume, errno)),
                    None => drop(state.refused.remove(&subvolume)),
                }
            }
            state.queue_of(task).done = number;
            drop(state);
            self.changed.notify_all();
        }
    }

    fn remove_as_ordered(&self) {
        let mut next_look = Instant::now() + IDLE;
        loop {
            let mut state = self.state.lock();
            let task = loop {
                if state.is_ending {
                    return;
                }
                if let Some(task) = state.to_remove.tasks.pop_front() {
                    break Some(task);
                }
                if state.placed.is_empty() {
                    self.changed.wait(&mut state);
                } else if self.changed.wait_until(&mut state, next_look).timed_out() {
                    break None;
                }
            };
            drop(state);
            if let Some((task, number)) = task {
                if let Err(error) = self.remove(task) {
                    tracing::debug!("{task:?}: {error}");
                }
                self.state.lock().to_remove.done = number;
                self.changed.notify_all();
            }
            if next_look <= Instant::now() {
                self.leave_expired();
                next_look = Instant::now() + IDLE;
            }
        }
    }

    fn remove(&self, task: SubmountTask) -> io::Result<()> {
        match task {
            SubmountTask::Leave(subvolume) => self.unmount_idle(true, |submount, all| {
                let mut of_it = all.iter().filter(|other| other.placed.subvolume == subvolume);
                of_it.any(|other| submount.mount.dir.starts_with(&other.mount.dir))
            }),
            SubmountTask::LeaveAll { lazy: true } => {
                self.unmount(self.placed_mounts().iter(), Leaving::Always, false).outcome
            }
            _ => self.unmount_idle(false, |_, _| true),
        }
    }

    /// Lets the kernel keep the stubs that `work` looks up (I9).
    fn learning<T>(&self, work: impl FnOnce() -> T) -> T {
        self.is_learning.store(true, Ordering::Relaxed);
        let done = work();
        self.is_learning.store(false, Ordering::Relaxed);
        done
    }

    /// Looks up all stubs of the first view.
    fn learn_all(&self) -> io::Result<()> {
        let view = self.host.views.first();
        let device = view.device.get().copied();
        let mount = mount_table::mounts().into_iter().find(|mount| mount.device_number() == device);
        let root = place::open_root(&mount.ok_or(Errno::NOENT)?)?;
        let fs = self.served.get().ok_or(Errno::NOTCONN)?;
        learn_stubs(&fs, view.subvolume, &root);
        Ok(())
    }

    /// Mounts a subvolume on its stub in all mounts that show the stub.
    fn mount(self: &Arc<Self>, subvolume: RootId) -> io::Result<()> {
        let fs = self.served.get().ok_or(Errno::NOTCONN)?;
        let mut outcome = Err(Errno::NOENT.into());
        for _ in 0..RENAME_TRIES {
            let place = fs.name_of_subvolume(subvolume).map_err(io::Error::other)?;
            let Some((above, path)) = place else { return Err(Errno::NOENT.into()) };
            let view = self.host.views.of(above).ok_or(Errno::NOENT)?;
            let device = *view.device.get().ok_or(Errno::NOTCONN)?;
            let shown = (device, view.nodes.st_ino(InodeId::root_of(subvolume)));
            for mount in mount_table::mounts().iter().filter(|mount| mount.device_number() == Some(device)) {
                // Another mount may have been propagated to this one meanwhile.
                match place::open_stub(mount, &path, shown) {
                    Ok(stub) => {
                        let tree = self.new_mount(&fs, subvolume)?;
                        let (id, placed) = place::place(&tree, &stub, mount, subvolume)?;
                        self.state.lock().note_placed(id, placed);
                        outcome = Ok(());
                    }
                    Err(error) if Errno::from_io_error(&error) == Some(Errno::XDEV) => outcome = Ok(()),
                    Err(error) if outcome.is_err() => outcome = Err(error),
                    Err(_) => {}
                }
            }
            if outcome.is_ok() {
                break;
            }
        }
        outcome
    }

    /// A new mount of a subvolume that is on no directory. Makes the view if there is none.
    fn new_mount(self: &Arc<Self>, fs: &Arc<Fs>, subvolume: RootId) -> io::Result<OwnedFd> {
        let known = || self.state.lock().views.get(&subvolume).map(|view| (view.requests.clone(), view.serial));
        let until = Instant::now() + PATIENCE;
        while let Some((requests, serial)) = known() {
            let data = mount::kernel_options(&requests, &self.config);
            match subtree::mount_detached("fuse", &data, &self.config) {
                Ok(tree) => return Ok(tree),
                // The kernel has ended the view, and its threads are about to.
                Err(error) => {
                    let mut state = self.state.lock();
                    while state.views.get(&subvolume).is_some_and(|view| view.serial == serial) {
                        if self.changed.wait_until(&mut state, until).timed_out() {
                            return Err(error);
                        }
                    }
                }
            }
        }
        self.make_view(fs, subvolume)
    }

    fn make_view(self: &Arc<Self>, fs: &Arc<Fs>, subvolume: RootId) -> io::Result<OwnedFd> {
        let Some(template) = self.template.lock().clone() else { return Err(Errno::NOTCONN.into()) };
        let owner = fs.getattr(InodeId::root_of(subvolume)).map_err(io::Error::other)?.uid;
        self.make_room(owner)?;
        let requests: OwnedFd = File::options().read(true).write(true).open("/dev/fuse")?.into();
        let data = mount::kernel_options(&requests, &self.config);
        let tree = subtree::mount_detached("fuse", &data, &self.config)?;
        let device = mount_table::device_of_file(&tree)?;
        let how = Config {
            features: server::features(fs, &self.config),
            limits: InitLimits { max_write: mount::max_write(), max_background: server::MAX_BACKGROUND },
            transport: Transport::DevFuse,
            nr_threads: NR_THREADS,
            idle_poll: IdlePolling::Off,
        };
        let connection = Connection::open(requests, &how)?;
        let serial = {
            let mut state = self.state.lock();
            state.last_serial += 1;
            state.last_serial
        };
        let view = Arc::new(FuseView::new(subvolume, NodeIds::of_one_subvolume(subvolume), serial));
        let _ = view.notifier.set(connection.notifier());
        let _ = view.device.set(device);
        // I6: this reference keeps the subvolume while the view exists.
        fs.getattr_counted(InodeId::root_of(subvolume)).map_err(io::Error::other)?;
        self.host.views.add(&view);
        let live = LiveView { requests: connection.notifier(), serial, owner };
        self.state.lock().views.insert(subvolume, live);
        let (own, served_fs, server) = (Arc::clone(self), Arc::clone(fs), template.with_view(view, &self.config));
        drop(template);
        let started = thread::Builder::new().name("fuse-view".into()).spawn(move || {
            if let Err(error) = connection.serve(server) {
                tracing::error!("the mount of subvolume {subvolume} ended: {error}");
            }
            own.view_ended(&served_fs, subvolume);
        });
        if let Err(error) = started {
            self.view_ended(fs, subvolume);
            return Err(error);
        }
        mount::set_read_ahead(device, false);
        self.learning(|| learn_stubs(fs, subvolume, &tree));
        Ok(tree)
    }

    /// Makes room for another view of a subvolume with this owner.
    ///
    /// # Errors
    /// `EMFILE` if the user has too many views in use, `ENFILE` if all users together have.
    fn make_room(&self, owner: u32) -> io::Result<()> {
        let views = || {
            let state = self.state.lock();
            let of_owner = state.views.values().filter(|view| view.owner == owner && owner != 0).count();
            (of_owner, state.views.len())
        };
        let full = || match views() {
            (_, all) if all >= USED_VIEWS_MAX => Some(Errno::NFILE),
            (of_owner, _) if of_owner >= USER_VIEWS_MAX => Some(Errno::MFILE),
            _ => None,
        };
        let last = self.state.lock().full_users.get(&owner).copied();
        if let Some(errno) = full().filter(|_| last.is_some_and(|last| last.elapsed() < FULL_PAUSE)) {
            return Err(errno.into());
        }
        if views().1 >= VIEWS_MAX {
            // I11: the first call marks a mount, and the second one unmounts it.
            for _ in 0..2 {
                self.unmount(self.placed_mounts().iter(), Leaving::Expired, true);
            }
        }
        let Some(errno) = full() else { return Ok(()) };
        self.state.lock().full_users.insert(owner, Instant::now());
        tracing::warn!(
            "user {owner} uses too many subvolumes at once ({} of {}); another is not mounted",
            views().0,
            views().1
        );
        Err(errno.into())
    }

    /// Looks up a stub (I9).
    fn learn_one(&self, subvolume: RootId) -> io::Result<()> {
        let fs = self.served.get().ok_or(Errno::NOTCONN)?;
        let Some((above, path)) = fs.name_of_subvolume(subvolume).map_err(io::Error::other)? else { return Ok(()) };
        let device = self.host.views.of(above).and_then(|view| view.device.get().copied());
        let mounts = mount_table::mounts();
        let mut shown = mounts.iter().filter(|mount| mount.device_number() == device);
        shown.try_for_each(|mount| place::look_up(&place::open_root(mount)?, mount, &path))
    }

    fn view_ended(&self, fs: &Fs, subvolume: RootId) {
        // I6. Another view of the subvolume is made only when this one is removed.
        fs.forget_all_of(subvolume);
        self.host.views.remove(subvolume);
        let mut state = self.state.lock();
        state.views.remove(&subvolume);
        state.refused.clear();
        drop(state);
        self.changed.notify_all();
    }

    /// The mounts that the mounter made and that are still there, each after those that it lies in.
    fn placed_mounts(&self) -> Vec<Submount> {
        // A mount that is made after the table is read is not missing.
        let known = self.state.lock().placed.clone();
        let table = mount_table::mounts();
        let mut state = self.state.lock();
        let is_view = |mount: &MountInfo, placed: &PlacedOn| {
            let view = self.host.views.of(placed.subvolume);
            view.is_some_and(|view| view.device.get().copied() == mount.device_number())
        };
        let placed_on =
            |mount: &MountInfo| state.placed.get(&mount.id).filter(|placed| is_view(mount, placed)).copied();
        let found: Vec<(MountInfo, PlacedOn)> =
            table.iter().filter_map(|mount| placed_on(mount).map(|placed| (mount.clone(), placed))).collect();
        let parents: HashMap<u64, u64> = found.iter().map(|(mount, _)| (mount.id, mount.parent)).collect();
        for (id, gone) in known.iter().filter(|(id, _)| !parents.contains_key(id)) {
            state.forget_placed(*id, gone);
        }
        drop(state);
        let mut with_others = HashSet::new();
        for other in table.iter().filter(|mount| !parents.contains_key(&mount.id)) {
            let mut below = other.parent;
            while let Some(parent) = parents.get(&below).filter(|_| with_others.insert(below)) {
                below = *parent;
            }
        }
        let has_others = |mount: &MountInfo| with_others.contains(&mount.id);
        found.into_iter().map(|(mount, placed)| Submount { has_others: has_others(&mount), mount, placed }).collect()
    }

    /// Unmounts these mounts, each before those that it lies in. With `may_return`, they are likely to be entered again.
    fn unmount<'m>(
        &self,
        mounts: impl DoubleEndedIterator<Item = &'m Submount>,
        how: Leaving,
        may_return: bool,
    ) -> Unmounting {
        let mut done = Unmounting { nr_unmounted: 0, outcome: Ok(()) };
        for submount in mounts.rev() {
            let Submount { mount, placed, has_others } = submount;
            let left = if *has_others { Err(Errno::BUSY.into()) } else { place::leave(mount, placed, how) };
            match left {
                Ok(()) => {
                    done.nr_unmounted += 1;
                    self.state.lock().forget_placed(mount.id, placed);
                    // The kernel has dropped the name with the mount.
                    if may_return {
                        self.learn(placed.subvolume);
                    }
                }
                Err(error) => done.outcome = Err(error),
            }
        }
        done
    }

    /// Unmounts the wanted mounts, if they are not in use. A mount is busy for a short time while a process that has been
    /// forked and has not called exec yet keeps its parent's files open. `is_wanted` gets a mount and all mounts.
    fn unmount_idle(&self, may_return: bool, is_wanted: impl Fn(&Submount, &[Submount]) -> bool) -> io::Result<()> {
        let mut tries = IDLE_TRIES;
        loop {
            let mounts = self.placed_mounts();
            let wanted = mounts.iter().filter(|submount| is_wanted(submount, &mounts));
            // I11: the first call marks a mount, and the second one unmounts it.
            let Unmounting { nr_unmounted, outcome } = self.unmount(wanted, Leaving::Expired, may_return);
            let Err(error) = outcome else { return Ok(()) };
            if nr_unmounted > 0 {
                continue;
            }
            tries -= 1;
            if tries == 0 {
                return Err(error);
            }
            if Errno::from_io_error(&error) == Some(Errno::BUSY) {
                thread::sleep(BUSY_PAUSE);
            }
        }
    }

    /// Unmounts what nothing has used since the last call, and gives the others the flags of the first mount.
    fn leave_expired(&self) {
        let mounts = self.placed_mounts();
        // Most of them are in use, or are marked as unused by this call.
        let _ = self.unmount(mounts.iter(), Leaving::Expired, true);
        self.add_restrictions();
    }

    /// Gives submounts the flags of the mounts that they lie in, which may have been remounted (I10).
    fn add_restrictions(&self) {
        let (table, placed) = (mount_table::mounts(), self.placed_mounts());
        let of_number = |id: u64| table.iter().find(|mount| mount.id == id);
        let is_placed = |mount: &MountInfo| placed.iter().any(|other| other.mount.id == mount.id);
        for Submount { mount, .. } in &placed {
            let mut around = of_number(mount.parent);
            while let Some(submount) = around.filter(|around| is_placed(around)) {
                around = of_number(submount.parent);
            }
            let Some(wanted) = around.map(place::flags_of) else { continue };
            if place::flags_of(mount).contains(wanted) {
                continue;
            }
            if let Err(error) = place::add_flags(mount, wanted) {
                tracing::debug!("{}: {error}", mount.dir.display());
            }
        }
    }
}

/// Looks up the stubs of a view by its root directory (I9). Stubs that are not found, because they are renamed meanwhile,
/// are found when they are entered.
fn learn_stubs(fs: &Fs, subvolume: RootId, root: &OwnedFd) {
    let (mut from, mut has_stubs) = (RootId(0), false);
    loop {
        let children = fs.children_of(subvolume, from, STUBS_AT_ONCE).unwrap_or_default();
        for (child, _) in &children {
            if let Ok(Some((above, path))) = fs.name_of_subvolume(*child)
                && above == subvolume
            {
                has_stubs |= place::look_up_at(root, &path).is_ok();
            }
        }
        match children.last() {
            Some((last, _)) if children.len() == STUBS_AT_ONCE => from = RootId(last.0.saturating_add(1)),
            _ => break,
        }
    }
    if has_stubs {
        // From then on, the kernel asks for them.
        thread::sleep(LEARNED_TTL * 2);
    }
}

fn thread_number() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()
}

/// Makes room for the descriptors of the views: one each.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(DESCRIPTORS, |maximum| maximum.min(DESCRIPTORS));
    if limit.current.is_some_and(|current| current < wanted) {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum });
    }
}

/// With this number of views, idle submounts are unmounted before another one is made. Each view has threads of its own.
const VIEWS_MAX: usize = 256;
/// The number of views that can be in use at once.
const USED_VIEWS_MAX: usize = 2048;
/// The number of views of one user's subvolumes, except root's, that can be in use at once.
const USER_VIEWS_MAX: usize = 256;
/// How long a user is refused without another search for idle submounts.
const FULL_PAUSE: Duration = Duration::from_secs(1);
/// Errors that a program gets instead of `ESTALE`, because entering the subvolume again does not help. The kernel has a limit
/// of mounts (`ENOSPC`).
const LIMITS: [Errno; 3] = [Errno::MFILE, Errno::NFILE, Errno::NOSPC];
/// Open files that the server is allowed, if the system permits that.
const DESCRIPTORS: u64 = 8192;
/// How many stubs are searched for at a time.
const STUBS_AT_ONCE: usize = 256;
/// A submount that nothing has used for this time, or twice as long at most, is unmounted.
const IDLE: Duration = Duration::from_secs(5);
/// How often an unmount of submounts that are not idle is tried.
const IDLE_TRIES: u32 = 8;
const BUSY_PAUSE: Duration = Duration::from_millis(10);
/// How often a stub is searched for that is renamed at the same time.
const RENAME_TRIES: usize = 4;
/// Threads that take the requests of a view.
const NR_THREADS: usize = 2;

/// The reason why submounts are impossible with these options.
pub(crate) fn impossible(config: &MountConfig, is_seed: bool) -> Option<&'static str> {
    match () {
        () if !config.submounts => None,
        () if !mount::is_root() => Some("only root can mount with submounts; mount as root, or omit submounts"),
        () if config.sandbox => Some("a confined server cannot mount; omit submounts or --sandbox"),
        () if config.idmap => Some("submounts of an idmapped mount would not be mapped; omit submounts or idmap"),
        () if is_seed => Some("the filesystem is a seed; omit submounts"),
        () => None,
    }
}
