//! [`MountHost`]: gives the commands of crate `control` access to the mount. The host finds the inodes that descriptors
//! refer to, and makes the kernel forget changed names, data and attributes.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use rustix::fs::{OFlags, StatVfsMountFlags};
use rustix::io::Errno;
use ubtrfs_control::{
    CommandContext, CommandFailure, FileId, Host, ImageId, OpenFile, ProcessFile, Processes, Request, Response,
    execute, open_device, quota,
};
use ubtrfs_device::{Device, TellLoopEvent};
use ubtrfs_format::RootId;
use ubtrfs_fs::{Fs, InodeId, MountOptions};
use ubtrfs_transaction::{Metric, prometheus_text};

use crate::activity::Activity;
use crate::caller::CallerGroups;
use crate::interrupt::{EndsBy, Interrupts};
use crate::lost_pages::LostPages;
use crate::mount::MountConfig;
use crate::name_cache;
use crate::protocol;
use crate::sandbox::PrivilegedHelper;
use crate::served_fs::ServedFs;
use crate::submounts::Submounts;
use crate::transport::RequestCounts;
use crate::view::FuseViews;

/// A mount that serves as the [`Host`] of commands.
#[derive(Debug)]
pub(crate) struct MountHost {
    pub(crate) views: FuseViews,
    pub(crate) groups: CallerGroups,
    pub(crate) interrupts: Interrupts,
    pub(crate) lost_pages: Arc<LostPages>,
    activity: Arc<Activity>,
    writeback_cache: bool,
    /// Whether the kernel allows idmapped mounts of this mount.
    idmap: bool,
    /// The user who mounted.
    owner: u32,
    /// The mount options as the user gave them.
    options: Mutex<Vec<String>>,
    served: Arc<ServedFs>,
    submounts: OnceLock<Weak<Submounts>>,
    /// The mounts that were made one by one, by their numbers ([`Host::mounts`]).
    mounts: Mutex<Vec<u64>>,
    /// The function that is called if a loop device is attached to an image file of the filesystem.
    pub(crate) tell_loops: OnceLock<TellLoopEvent>,
    /// The helper process of a confined server.
    helper: OnceLock<Arc<PrivilegedHelper>>,
    /// Whether requests arrive through io_uring; known once the connection exists.
    pub(crate) has_rings: OnceLock<bool>,
    /// The counts of requests; known once the connection exists.
    pub(crate) counts: OnceLock<RequestCounts>,
}

impl MountHost {
    /// Makes the current user of this process the mount's owner. So call this function before confinement, which may
    /// change the process's user.
    pub(crate) fn new(
        served: &Arc<ServedFs>,
        views: FuseViews,
        groups: CallerGroups,
        activity: Arc<Activity>,
        config: &MountConfig,
    ) -> Self {
        Self {
            views,
            interrupts: Interrupts::new(groups.clone()),
            lost_pages: Arc::default(),
            groups,
            activity,
            writeback_cache: config.writeback_cache,
            idmap: config.allows_idmap(),
            owner: rustix::process::getuid().as_raw(),
            options: Mutex::new(config.given.clone()),
            served: Arc::clone(served),
            submounts: OnceLock::new(),
            mounts: Mutex::default(),
            tell_loops: OnceLock::new(),
            helper: OnceLock::new(),
            has_rings: OnceLock::new(),
            counts: OnceLock::new(),
        }
    }

    /// Lets commands unmount submounts.
    pub(crate) fn serve_submounts(&self, submounts: &Arc<Submounts>) {
        let _ = self.submounts.set(Arc::downgrade(submounts));
    }

    /// Notes that this process is confined from now on, and has this helper.
    pub(crate) fn confined(&self, helper: &Arc<PrivilegedHelper>) {
        let _ = self.helper.set(Arc::clone(helper));
    }

    /// Runs a command on the inodes `ids`, for a request `req` of the kernel.
    pub(crate) fn run(
        &self,
        fs: &Fs,
        req: &protocol::FuseRequest<'_>,
        ids: &[InodeId],
        request: Request,
    ) -> ubtrfs_control::Result<Response> {
        let caller = self.groups.waiting_caller(req);
        // The kernel does not tell whether the caller has the files open for writing, so the files count as open for
        // reading only.
        // The file of the request comes last.
        let view = ids.last().and_then(|id| self.views.of(id.root));
        let device = view.as_ref().filter(|_| request.changes()).and_then(|view| view.device.get().copied());
        let is_read_only_mount =
            device.and_then(|device| self.groups.is_read_only_for(req.pid, device)).unwrap_or(false);
        let opened = |id: &InodeId| OpenFile { id: *id, is_readable: true, is_writable: false, is_read_only_mount };
        let files: Vec<OpenFile> = ids.iter().map(opened).collect();
        let unique = view.map_or(req.unique, |view| view.unique(req.unique));
        let running = self.interrupts.start(unique, req.pid, ends_by(&request));
        execute(
            &CommandContext { fs, host: self, caller: &caller, files: &files, stream: None, job: &running.job },
            request,
        )
    }

    /// The inode that the caller of an ioctl has open under the number `descriptor`.
    pub(crate) fn inode_of(&self, req: &protocol::FuseRequest<'_>, descriptor: u32) -> ubtrfs_control::Result<InodeId> {
        let closed = || CommandFailure::new(Errno::INVAL, "no such descriptor, or /proc does not show it");
        let file = self.groups.file_of(req.pid, descriptor, None).ok_or_else(closed)?;
        self.inode_with(file.id)
    }

    fn inode_with(&self, file: FileId) -> ubtrfs_control::Result<InodeId> {
        let view = self.views.with_device(file.device);
        view.and_then(|view| view.nodes.id_of_st_ino(file.ino)).ok_or_else(not_here)
    }
}

/// The subvolume with this name, if the name leads to one.
fn nested(fs: &Fs, dir: InodeId, name: &[u8]) -> Option<RootId> {
    let found = fs.lookup(dir, name).ok()?.id;
    fs.forget(found, 1);
    Some(found.root).filter(|root| *root != dir.root)
}

/// The signals that end a command on Linux.
fn ends_by(request: &Request) -> EndsBy {
    match request {
        Request::Quota(quota::Request::RescanWait) | Request::Defragment(_) => EndsBy::AnySignal,
        _ => EndsBy::Death,
    }
}

/// Watches for loop devices over an image file. A failure is only told, because the watch protects against mistakes.
pub(crate) fn watch_loops(device: &dyn Device, tell: &TellLoopEvent) {
    if let Err(error) = device.watch_loops(tell.clone()) {
        tracing::warn!("{} is not protected from loop devices: {error}", device.describe());
    }
}

/// The number of mounts that are remembered. An older mount counts as a bind mount.
const MOUNTS_MAX: usize = 4096;

fn not_here() -> CommandFailure {
    CommandFailure::new(Errno::XDEV, "the file is not in this mount; name paths in one mount or one image")
}

fn not_open() -> CommandFailure {
    CommandFailure::new(Errno::BADF, "the file is not open for reading or writing")
}

impl Host for MountHost {
    fn filesystem(&self) -> Option<Arc<Fs>> {
        self.served.get()
    }

    fn show(&self, open: &mut dyn FnMut() -> ubtrfs_fs::Result<Arc<Fs>>) -> ubtrfs_fs::Result<bool> {
        open().map(|sprout| self.served.exchange(&sprout))
    }

    fn mount_options(&self) -> Vec<String> {
        self.options.lock().clone()
    }

    fn note_options(&self, options: &[String]) {
        let mut given = self.options.lock();
        let kept = given.iter().flat_map(|list| list.split(',')).filter(|option| !MountOptions::can_change(option));
        let kept: Vec<String> = kept.map(str::to_owned).collect();
        *given = kept.into_iter().chain(options.iter().cloned()).collect();
    }

    fn owner(&self) -> Option<u32> {
        Some(self.owner)
    }

    fn root(&self, _fs: &Fs) -> InodeId {
        self.views.first().nodes.root()
    }

    fn st_ino(&self, id: InodeId) -> Option<u64> {
        Some(self.views.st_ino(id))
    }

    fn has_submounts(&self) -> bool {
        self.views.are_submounts()
    }

    fn leave_submounts(&self) {
        if let Some(submounts) = self.submounts.get().and_then(Weak::upgrade) {
            submounts.leave_all(false);
        }
    }

    fn is_confined(&self) -> bool {
        self.helper.get().is_some()
    }

    fn open_device(&self, path: &Path, id: Option<ImageId>, force: bool) -> ubtrfs_control::Result<Arc<dyn Device>> {
        let is_own = |id: ImageId| {
            self.views.all().iter().any(|view| view.device.get().is_some_and(|device| id.is_file_of(*device)))
        };
        if id.is_some_and(is_own) {
            let text = "the new device is a file of the filesystem itself; give one that lies elsewhere";
            return Err(CommandFailure::new(Errno::INVAL, text));
        }
        let device = open_device(path, id, force)?;
        if let Some(tell) = self.tell_loops.get() {
            watch_loops(device.as_ref(), tell);
        }
        Ok(device)
    }

    fn note_mount(&self, mount: u64) {
        let mut mounts = self.mounts.lock();
        if mounts.len() >= MOUNTS_MAX {
            mounts.remove(0);
        }
        mounts.push(mount);
        drop(mounts);
        if let Some(helper) = self.helper.get() {
            helper.note_mounts();
        }
    }

    fn mounts(&self) -> Vec<u64> {
        self.mounts.lock().clone()
    }

    fn may_map_owners(&self) -> bool {
        self.idmap
    }

    fn file(&self, file: BorrowedFd<'_>) -> ubtrfs_control::Result<OpenFile> {
        let flags = rustix::fs::fcntl_getfl(file).map_err(|_| not_here())?;
        if flags.contains(OFlags::PATH) {
            return Err(not_open());
        }
        let stat = rustix::fs::fstat(file).map_err(|_| not_here())?;
        let id = self.inode_with(FileId { device: stat.st_dev, ino: stat.st_ino })?;
        let access = flags & OFlags::RWMODE;
        let is_read_only_mount =
            rustix::fs::fstatvfs(file).is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::RDONLY));
        Ok(OpenFile {
            id,
            is_readable: access != OFlags::WRONLY,
            is_writable: access != OFlags::RDONLY,
            is_read_only_mount,
        })
    }

    fn file_of_process(&self, file: ProcessFile) -> ubtrfs_control::Result<OpenFile> {
        let ProcessFile { id, is_readable, is_writable, is_read_only_mount } = file;
        if !is_readable && !is_writable {
            return Err(not_open());
        }
        Ok(OpenFile { id: self.inode_with(id)?, is_readable, is_writable, is_read_only_mount })
    }

    fn note_change(&self) {
        self.activity.note_change();
    }

    fn sync(&self, fs: &Fs) -> ubtrfs_fs::Result<()> {
        self.activity.sync(fs)
    }

    fn forget_name(&self, dir: InodeId, name: &[u8], deleted: Option<RootId>) {
        let Some(view) = self.views.of(dir.root) else { return };
        if let Some(submounts) = self.submounts.get() {
            // The kernel unmounts a deleted subvolume, and forgets it when nothing uses it any more.
            let new = self.served.get().filter(|_| deleted.is_none()).and_then(|fs| nested(&fs, dir, name));
            let submounts = Weak::clone(submounts);
            return view.names.forget_with(view.nodes.node(dir), name, move || {
                if let Some((new, submounts)) = new.zip(submounts.upgrade()) {
                    submounts.learn(new);
                }
                Vec::new()
            });
        }
        let dir = view.nodes.node(dir);
        let Some(deleted) = deleted else { return view.names.forget(dir, name) };
        // The filesystem may be closed when the closure runs.
        let (served, nodes) = (Arc::clone(&self.served), Arc::clone(&view.nodes));
        view.names.forget_with(dir, name, move || {
            let used = served.get().map(|fs| fs.used_names_of_deleted(deleted)).unwrap_or_default();
            used.into_iter().map(|(dir, name)| (nodes.node(dir), name)).collect()
        });
    }

    fn forget_data(&self, id: InodeId) {
        if let Some(view) = self.views.of(id.root) {
            view.names.forget_data(view.nodes.node(id));
        }
    }

    fn forget_attributes(&self, id: InodeId) {
        if let Some(view) = self.views.of(id.root) {
            view.names.forget_attributes(view.nodes.node(id));
        }
    }

    fn keeps_sizes(&self) -> bool {
        self.writeback_cache
    }

    fn appends_by_own_size(&self) -> bool {
        true
    }

    fn settle(&self) {
        name_cache::settle();
    }

    fn stats(&self, names_files: bool) -> String {
        let has_rings = f64::from(u8::from(self.has_rings.get().copied().unwrap_or(false)));
        let help = "Requests come in rings of io_uring (1) or through /dev/fuse (0).";
        let mut metrics = vec![Metric::gauge("fuse_io_uring", help, has_rings)];
        metrics.extend(self.counts.get().map(RequestCounts::metrics).unwrap_or_default());
        let fs = self.served.get();
        metrics.extend(fs.map(|fs| self.lost_pages.metrics(&fs, names_files)).unwrap_or_default());
        prometheus_text(&metrics)
    }
}
