//! The mounter: the thread that makes and removes submounts (I8).

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use ubtrfs_format::RootId;
use ubtrfs_fs::{Fs, InodeId};

use super::place::{self, Leaving, PlacedOn};
use super::{LiveView, PATIENCE, SubmountTask, Submounts};
use crate::mount::{self, MountConfig};
use crate::mount_table::{self, MountInfo};
use crate::node::NodeIds;
use crate::protocol::InitLimits;
use crate::server::{self, Server};
use crate::subtree;
use crate::transport::{Config, Connection, IdlePolling, Transport};
use crate::view::FuseView;

impl Submounts {
    /// Starts the mounter. `server` is that of the first view.
    pub(crate) fn start(self: &Arc<Self>, server: &Server) -> io::Result<()> {
        *self.template.lock() = Some(server.clone());
        let own = Arc::clone(self);
        thread::Builder::new().name("submounts".into()).spawn(move || {
            let _ = own.mounter.set(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned());
            own.work();
        })?;
        Ok(())
    }

    fn work(self: &Arc<Self>) {
        let mut next_look = Instant::now() + IDLE;
        loop {
            let mut state = self.state.lock();
            let task = loop {
                if state.is_ending {
                    return;
                }
                if let Some(task) = state.tasks.pop_front() {
                    break Some(task);
                }
                if state.placed.is_empty() {
                    self.changed.wait(&mut state);
                } else if self.changed.wait_until(&mut state, next_look).timed_out() {
                    break None;
                }
            };
            drop(state);
            match task {
                Some((task, number)) => {
                    if let Err(error) = self.run(task) {
                        tracing::debug!("{task:?}: {error}");
                    }
                    self.state.lock().done = number;
                    self.changed.notify_all();
                }
                None => self.leave_expired(),
            }
            if task.is_none() || next_look < Instant::now() {
                next_look = Instant::now() + IDLE;
            }
        }
    }

    fn run(self: &Arc<Self>, task: SubmountTask) -> io::Result<()> {
        match task {
            SubmountTask::Enter(subvolume) => self.mount(subvolume),
            SubmountTask::Leave(subvolume) => {
                let mounts = self.placed_mounts();
                let is_of = |(_, placed): &&(MountInfo, PlacedOn)| placed.subvolume == subvolume;
                let dirs: Vec<_> = mounts.iter().filter(is_of).map(|(mount, _)| mount.dir.clone()).collect();
                let is_below = |mount: &MountInfo| dirs.iter().any(|dir| mount.dir.starts_with(dir));
                self.unmount(mounts.iter().filter(|(mount, _)| is_below(mount)), Leaving::Idle)
            }
            SubmountTask::LeaveAll { lazy } => {
                let how = if lazy { Leaving::Always } else { Leaving::Idle };
                self.unmount(self.placed_mounts().iter(), how)
            }
        }
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
                        self.state.lock().placed.insert(id, placed);
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
        let known = || self.state.lock().views.get(&subvolume).map(|view| (Arc::clone(&view.requests), view.serial));
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
        let connection = Connection::open(requests.try_clone()?, &how)?;
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
        let live = LiveView { requests: Arc::new(requests), serial };
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
        Ok(tree)
    }

    fn view_ended(&self, fs: &Fs, subvolume: RootId) {
        // I6. Another view of the subvolume is made only when this one is removed.
        fs.forget_all_of(subvolume);
        self.host.views.remove(subvolume);
        self.state.lock().views.remove(&subvolume);
        self.changed.notify_all();
    }

    /// The mounts that the mounter made and that are still there, each after those that it lies in.
    fn placed_mounts(&self) -> Vec<(MountInfo, PlacedOn)> {
        let mounts = mount_table::mounts();
        let mut state = self.state.lock();
        let is_view = |mount: &MountInfo, placed: &PlacedOn| {
            let view = self.host.views.of(placed.subvolume);
            view.is_some_and(|view| view.device.get().copied() == mount.device_number())
        };
        let found: Vec<(MountInfo, PlacedOn)> = mounts
            .into_iter()
            .filter_map(|mount| state.placed.get(&mount.id).copied().map(|placed| (mount, placed)))
            .filter(|(mount, placed)| is_view(mount, placed))
            .collect();
        state.placed.retain(|id, _| found.iter().any(|(mount, _)| mount.id == *id));
        found
    }

    /// Unmounts these mounts, each before those that it lies in. Returns the last error.
    fn unmount<'m>(
        &self,
        mounts: impl DoubleEndedIterator<Item = &'m (MountInfo, PlacedOn)>,
        how: Leaving,
    ) -> io::Result<()> {
        let mut outcome = Ok(());
        for (mount, placed) in mounts.rev() {
            match place::leave(mount, placed, how) {
                Ok(()) => {
                    self.state.lock().placed.remove(&mount.id);
                }
                Err(error) => outcome = Err(error),
            }
        }
        outcome
    }

    /// Unmounts what nothing has used since the last call, and gives the others the flags of the first mount.
    fn leave_expired(&self) {
        let mounts = self.placed_mounts();
        // Most of them are in use, or are marked as unused by this call.
        let _ = self.unmount(mounts.iter(), Leaving::Expired);
        let device = self.host.views.first().device.get().copied();
        let first = mount_table::mounts().into_iter().find(|mount| mount.device_number() == device);
        let Some(first) = first else { return };
        let wanted = place::flags_of(&first);
        for (mount, _) in self.placed_mounts().iter().filter(|(mount, _)| place::flags_of(mount) != wanted) {
            if let Err(error) = place::inherit_flags(mount, &first) {
                tracing::debug!("{}: {error}", mount.dir.display());
            }
        }
    }
}

/// A submount that nothing has used for this time, or twice as long at most, is unmounted.
const IDLE: Duration = Duration::from_secs(5);
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
