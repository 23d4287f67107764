//! Requests: each handler turns one request into calls of `fs`, usually one, and the result into the answer.
//!
//! Invariants: S1. A handler answers exactly once. If `fs` fails, the answer is the errno of its error. After a panic,
//! the answer is EIO and the filesystem is read-only, so that no half-done change is ever committed. S2. Every `Attr`
//! that goes to the kernel in an entry carries one reference (see `node`, N2). An entry that does not fit into the
//! answer gives its reference back. S3. Only requests of the kernel and commands of crate `control` change the
//! filesystem, so the kernel may cache names, missing names and attributes for long ([`TTL`]). There are two
//! exceptions. `st_blocks` may change without a request when writeback allocates new data: see [`Server::attr_ttl`]. In
//! a subvolume that is being received, the kernel may cache only data. If a command, or an ioctl that runs one, changes
//! something that the kernel may have cached, the server tells the kernel to forget it (`name_cache`). S4. The server
//! acknowledges a write when `fs` has accepted the data and reserved its space. If the mount uses the kernel's
//! writeback cache, the kernel acknowledges writes, and owns the size and times of regular files.

mod attributes;
mod read_dir;
mod stub;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::io::Errno;
use ubtrfs_control::CONTROL_XATTR;
use ubtrfs_device::{ASK_MOUNT, ASK_MOUNT_LEN};
use ubtrfs_format::item::Timespec;
use ubtrfs_fs::{
    Attr, Caller, Error, FallocateMode, Fs, InodeId, NewInode, RenameFlags, Result, SeekWhence, SetAttr, SetTime,
    XattrFlags, mode,
};

use crate::activity::Activity;
use crate::admin_ioctl;
use crate::attr::{present_time, wire_attr, wire_statx};
use crate::btrfs_ioctl::{self, IoctlAnswer};
use crate::caller::{CallerGroups, RemovedCapability, caller};
use crate::dir_end::DirectoryReaders;
use crate::host::MountHost;
use crate::interrupt::Interrupts;
use crate::ioctl::{self, IoctlCaller};
use crate::lent_device::LentDevice;
use crate::listing::Listings;
use crate::mount::MountConfig;
use crate::node::NodeIds;
use crate::protocol::{EntryReply, Features, FuseRequest, Operation, Reply, Statfs};
use crate::running_programs::RunningPrograms;
use crate::seek::PageFlusher;
use crate::submounts::Submounts;
use crate::subvolume_ioctl::{self, SubvolumeIoctl};
use crate::transport::{Handler, ThreadMover, WorkerPlace};
use crate::view::FuseView;
use stub::KnownStubs;

/// How long names, missing names, and attributes stay valid in the kernel, apart from the exceptions in S3.
const TTL: Duration = Duration::from_secs(3600);
/// How long the kernel may keep the attributes of a file whose `st_blocks` may still change by writeback.
const UNSETTLED_TTL: Duration = Duration::from_secs(1);
/// How many seconds after its last change a file may have data in the kernel's writeback cache: the kernel's writeback
/// delay and a margin.
const RECENT: i64 = 120;
/// Longest range that one copy_file_range request copies; the caller repeats the call for the rest.
const COPY_MAX: u64 = 1 << 30;
/// The greatest length of a list of extended attributes, as in linux/limits.h.
const XATTR_LIST_MAX: usize = 64 << 10;
/// Background requests (readahead, writeback) that the kernel keeps in flight.
pub(crate) const MAX_BACKGROUND: u16 = 64;
/// Largest write request, unless the kernel allows more.
pub(crate) const MAX_WRITE: u32 = 1 << 20;

/// Cached pages stay valid across opens (`FOPEN_KEEP_CACHE`), and direct writes may run side by side
/// (`FOPEN_PARALLEL_DIRECT_WRITES`).
const OPEN_FLAGS: u32 = 1 << 1 | 1 << 6;

/// The flags for append-only files. Without cached pages (`FOPEN_DIRECT_IO`), a file cannot be mapped shared, so it
/// cannot be changed through a mapping. A shared mmap of such a file fails with ENODEV; on Linux's btrfs, it fails with
/// EACCES.
const APPEND_OPEN_FLAGS: u32 = OPEN_FLAGS | 1;
/// Marks the handle of a file that was append-only when it was opened.
const APPENDS_ONLY: u64 = 1 << 63;
/// Marks the handle of a file that was opened for execution.
const EXECUTED: u64 = 1 << 62;
/// The bits of a handle that are the descriptor's number.
const DESCRIPTOR: u64 = !(APPENDS_ONLY | EXECUTED);

/// The handle of files that were opened without a request.
const UNOPENED: u64 = 0;

/// The extended attribute of the access ACL. Setting it also changes the file's permission bits.
const ACCESS_ACL: &[u8] = b"system.posix_acl_access";
/// The extended attribute of the capabilities that a program gets from its file.
const CAPABILITY: &[u8] = b"security.capability";

const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;
const O_ACCMODE: i32 = 3;
const O_TRUNC: i32 = 0o1000;
const O_APPEND: i32 = 0o2000;
/// The kernel's `FMODE_EXEC`, in the flags of an open for execution.
const FOR_EXECUTION: i32 = 0x20;

/// Handles the requests of one view. A clone knows what this one learns.
#[derive(Clone, Debug)]
pub(crate) struct Server {
    fs: Arc<Fs>,
    view: Arc<FuseView>,
    nodes: Arc<NodeIds>,
    /// The submounts, if each view shows one subvolume.
    submounts: Option<Arc<Submounts>>,
    stubs: Arc<KnownStubs>,
    activity: Arc<Activity>,
    seeker: Arc<PageFlusher>,
    dir_ends: Arc<DirectoryReaders>,
    listings: Arc<Listings>,
    running_programs: Arc<RunningPrograms>,
    groups: CallerGroups,
    removed_capability: Arc<RemovedCapability>,
    host: Arc<MountHost>,
    /// Name of the control socket: the value of [`CONTROL_XATTR`], and the answer to [`ASK_MOUNT`].
    control: Vec<u8>,
    /// See [`MountConfig::no_xattrs`].
    no_xattrs: bool,
    /// See [`MountConfig::no_open`].
    no_open: bool,
    /// The block device of a `fuseblk` mount; set once it is mounted.
    lent: Arc<OnceLock<LentDevice>>,
}

impl Server {
    pub(crate) fn new(
        fs: Arc<Fs>,
        activity: Arc<Activity>,
        host: Arc<MountHost>,
        submounts: Option<Arc<Submounts>>,
        control: Vec<u8>,
        config: &MountConfig,
        lent: Arc<OnceLock<LentDevice>>,
    ) -> Self {
        let (view, groups) = (Arc::clone(host.views.first()), host.groups.clone());
        let (no_xattrs, no_open) = (config.no_xattrs, config.no_open);
        let (stubs, dir_ends, listings, running_programs, removed_capability) = Default::default();
        Self {
            fs,
            nodes: Arc::clone(&view.nodes),
            seeker: PageFlusher::of(&view, config),
            view,
            submounts,
            stubs,
            activity,
            dir_ends,
            listings,
            running_programs,
            groups,
            removed_capability,
            host,
            control,
            no_xattrs,
            no_open,
            lent,
        }
    }

    /// Copies the server for another filesystem, which has the same inodes.
    pub(crate) fn with_fs(&self, fs: Arc<Fs>) -> Self {
        Self { fs, ..self.clone() }
    }

    /// Makes the server of another view of the filesystem.
    pub(crate) fn with_view(&self, view: Arc<FuseView>, config: &MountConfig) -> Self {
        let (stubs, dir_ends, listings, running_programs, removed_capability) = Default::default();
        let (nodes, seeker) = (Arc::clone(&view.nodes), PageFlusher::of(&view, config));
        Self {
            view,
            nodes,
            seeker,
            stubs,
            dir_ends,
            listings,
            running_programs,
            removed_capability,
            lent: Arc::default(),
            ..self.clone()
        }
    }

    fn is_of_first_view(&self) -> bool {
        Arc::ptr_eq(&self.view, self.host.views.first())
    }

    /// The running ioctls, which the caller can cancel.
    pub(crate) fn interrupts(&self) -> Interrupts {
        self.host.interrupts.clone()
    }

    /// The inode of a request. A node id that the kernel never got from this server is stale.
    fn id(&self, node: u64) -> Result<InodeId> {
        self.nodes.id(node).ok_or(Error::Stale)
    }

    /// How long the kernel may keep a name, or the absence of a name. `dir` is the name's directory, or the inode that
    /// has the name.
    fn name_ttl(&self, dir: InodeId) -> Duration {
        if self.fs.is_being_received(dir.root) { Duration::ZERO } else { TTL }
    }

    /// How long the kernel may keep attributes (S3).
    fn attr_ttl(&self, attr: &Attr) -> Duration {
        // A stub has the owner of the directory above, which can change.
        if self.fs.is_being_received(attr.id.root) || attr.id.stub_of().is_some() || self.is_stub(attr.id) {
            return Duration::ZERO;
        }
        if attr.mode & mode::TYPE != mode::REGULAR {
            return TTL;
        }
        if attr.blocks == 0 && (attr.size > 0 || self.seeker.may_lack_blocks(self.nodes.node(attr.id), attr)) {
            return Duration::ZERO;
        }
        if !attr.blocks_are_final || self.seeker.kernel_keeps_writes() && is_recent(attr.ctime) {
            return UNSETTLED_TTL;
        }
        TTL
    }

    /// Makes an entry, and hands the reference of `attr` to the kernel.
    fn entry(&self, attr: &Attr) -> EntryReply {
        EntryReply {
            node: self.nodes.node(attr.id),
            generation: NodeIds::generation(attr.id, attr.generation.0),
            attr: wire_attr(attr, self.nodes.st_ino(attr.id)),
            ttl: if attr.id.stub_of().is_some() { Duration::ZERO } else { self.name_ttl(attr.id) },
            attr_ttl: self.attr_ttl(attr),
        }
    }

    fn reply_attr(&self, attr: &Attr, reply: &mut Reply<'_>) {
        reply.attr(self.attr_ttl(attr), &wire_attr(attr, self.nodes.st_ino(attr.id)));
    }

    /// Fails if the flags ask for a kind of write or truncation that the file does not allow. The check must happen at open,
    /// because the kernel sends writes later, from the page cache, when the writing program no longer gets an error.
    /// Returns whether the file is open for appending only.
    fn check_open(&self, id: InodeId, flags: i32) -> Result<bool> {
        let writes = is_for_writing(flags) || flags & O_TRUNC != 0;
        if !writes {
            return Ok(false);
        }
        self.fs.check_writable(id)?;
        let attr = self.fs.getattr(id)?;
        if ioctl::is_immutable(attr.flags) {
            return Err(Error::NotPermitted("the file is immutable"));
        }
        let is_append_only = ioctl::is_append_only(attr.flags);
        if is_append_only && (flags & O_APPEND == 0 || flags & O_TRUNC != 0) {
            return Err(Error::NotPermitted("the file is append-only"));
        }
        Ok(is_append_only)
    }

    /// Writes to a file that was opened without a request. [`Self::check_open`] did not run, so the check happens at
    /// each write.
    fn write_unopened(&self, id: InodeId, flags: i32, offset: u64, data: &[u8]) -> Result<usize> {
        if flags & O_APPEND == 0 && ioctl::is_append_only(self.fs.getattr(id)?.flags) {
            return Err(Error::NotPermitted("the file is append-only"));
        }
        self.fs.write(id, offset, data)
    }

    fn new_inode(&self, parent: u64, name: &[u8], new: NewInode<'_>, caller: &Caller) -> Result<Attr> {
        self.activity.note_change();
        self.fs.create(self.id(parent)?, name, new, caller)
    }

    /// Answers a request that created and opened a file.
    fn created(&self, attr: &Attr, flags: i32, reply: &mut Reply<'_>) {
        if is_for_writing(flags) {
            self.seeker.opened(self.nodes.node(attr.id));
        }
        let mut entry = self.entry(attr);
        if !entry.attr_ttl.is_zero() {
            // The long lifetime is safe, because the kernel requests the attributes again after the file is written and
            // closed.
            entry.attr_ttl = TTL;
        }
        reply.created(&entry, self.fs.open_descriptor(), OPEN_FLAGS);
    }
}

/// Whether a file with this ctime may have data in the kernel's writeback cache.
fn is_recent(ctime: Timespec) -> bool {
    ctime.sec.saturating_add(RECENT) >= present_time().sec
}

fn is_for_writing(flags: i32) -> bool {
    flags & O_ACCMODE != 0
}

/// Protocol features that the server uses.
pub(crate) fn features(fs: &Fs, config: &MountConfig) -> Features {
    // Asynchronous direct I/O is left out: the kernel does not drop cached pages after asynchronous direct writes, so
    // buffered readers would still see the old content.
    let mut features = Features::PARALLEL_DIROPS
        // Needed for file handles (open_by_handle_at, NFS): the kernel looks up "." in an inode that it no longer has
        // in memory.
        | Features::EXPORT_SUPPORT
        | Features::DO_READDIRPLUS
        | Features::CACHE_SYMLINKS
        | Features::HAS_IOCTL_DIR
        // The feature spares a getxattr of security.capability for every write.
        | Features::HANDLE_KILLPRIV_V2;
    // The server applies default ACLs to the modes of new inodes. Access by ACL is checked only by the kernel, and only
    // if the kernel checks permissions.
    features.set(Features::DONT_MASK, fs.options().acl);
    features.set(Features::POSIX_ACL, fs.options().acl && config.checks_permissions() && !config.no_xattrs);
    // With `no_open`, no request to open could truncate the file, so the kernel truncates by SETATTR.
    features.set(Features::ATOMIC_O_TRUNC, !config.no_open);
    features.set(Features::WRITEBACK_CACHE, config.writeback_cache);
    features.set(Features::ALLOW_IDMAP, config.allows_idmap());
    features
}

/// The failure of a request: an error of `fs`, or an error number that only the protocol uses.
enum RequestFailure {
    Fs(Error),
    Errno(Errno),
}

impl From<Error> for RequestFailure {
    fn from(error: Error) -> Self {
        Self::Fs(error)
    }
}

type Done = std::result::Result<(), RequestFailure>;

impl Handler for Server {
    /// Answers a request (S1).
    fn handle(
        &self,
        request: &FuseRequest<'_>,
        reply: &mut Reply<'_>,
        place: &WorkerPlace<'_>,
    ) -> std::result::Result<(), Errno> {
        let answer = match catch_unwind(AssertUnwindSafe(|| self.dispatch(request, reply, place))) {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(RequestFailure::Errno(errno))) => Err(errno),
            Ok(Err(RequestFailure::Fs(error))) => {
                if let Error::Engine(cause) = &error
                    && matches!(cause, ubtrfs_error::Error::Corrupt(_) | ubtrfs_error::Error::Io { .. })
                {
                    tracing::error!("{cause}");
                }
                Err(Errno::from_raw_os_error(error.errno()))
            }
            Err(_) => {
                crate::session::abort(&self.fs, "a request handler panicked");
                Err(Errno::IO)
            }
        };
        if let (Err(errno), Operation::Write { from_cache: true, offset, data, .. }) = (answer, &request.operation)
            && let Ok(id) = self.id(request.node)
        {
            self.host.lost_pages.note(&self.fs, id, *offset, data.len(), errno);
        }
        answer
    }

    /// Closes the filesystem. In umount(2) of a `fuseblk` mount, the kernel waits until this function returns. After
    /// the return, the kernel no longer claims the device, so nothing may be written to it any more.
    fn destroy(&self) {
        if !self.is_of_first_view() {
            return;
        }
        self.activity.stop();
        // `fs` keeps the outcome, and the session reports it.
        let _ = catch_unwind(AssertUnwindSafe(|| self.fs.close()));
        if let Some(lent) = self.lent.get() {
            lent.closed();
        }
    }

    fn processor_of(&self, thread: u32) -> Option<usize> {
        self.groups.processor_of(thread)
    }

    fn mover(&self) -> ThreadMover {
        self.groups.mover()
    }

    fn disconnected(&self) {
        // The ioctls of other views go on.
        if self.is_of_first_view() && !self.submounts.as_ref().is_some_and(|submounts| submounts.has_views()) {
            self.host.interrupts.end();
        }
        if let Some(lent) = self.lent.get() {
            lent.reclaim(&self.fs, self.groups.helper());
        }
    }

    fn forget(&self, node: u64, count: u64) {
        if node == crate::node::ROOT_NODE {
            return;
        }
        let Ok(id) = self.id(node) else { return };
        if self.is_stub(id) {
            self.forget_stub(id, count);
        } else if catch_unwind(AssertUnwindSafe(|| self.fs.forget(id, count))).is_err() {
            crate::session::abort(&self.fs, "forgetting an inode panicked");
        }
    }
}

impl Server {
    fn dispatch(&self, req: &FuseRequest<'_>, reply: &mut Reply<'_>, place: &WorkerPlace<'_>) -> Done {
        let known;
        let req = match self.groups.known_caller(req) {
            Some(request) => {
                known = request;
                &known
            }
            None => req,
        };
        let node = req.node;
        if self.submounts.is_some()
            && let Ok(id) = self.id(node)
            && let Some(submounts) = self.submounts_at(id)
        {
            self.answer_stub(submounts, req, id, reply, place)?;
            return Ok(());
        }
        match req.operation {
            Operation::Lookup { name } => self.lookup(req, name, reply, place)?,
            Operation::Getattr => self.reply_attr(&self.getattr(node, place)?, reply),
            Operation::Statx => {
                let attr = self.getattr(node, place)?;
                reply.statx(self.attr_ttl(&attr), &wire_attr(&attr, self.nodes.st_ino(attr.id)), wire_statx(&attr));
            }
            Operation::Setattr(set) => self.setattr(req, &set, reply)?,
            Operation::Readlink => reply.data(&self.fs.readlink(self.id(node)?)?),
            Operation::Mknod { name, mode, rdev, umask } => {
                let new = NewInode { mode, rdev, symlink_target: None, ..NewInode::default() };
                reply.entry(&self.entry(&self.new_inode(node, name, new, &caller(req, umask))?));
            }
            Operation::Mkdir { name, mode, umask } => {
                reply.entry(&self.entry(&self.new_inode(node, name, NewInode::dir(mode), &caller(req, umask))?));
            }
            Operation::Symlink { name, target } => {
                reply.entry(&self.entry(&self.new_inode(node, name, NewInode::symlink(target), &caller(req, 0))?));
            }
            // After ENOSYS, the kernel makes files by MKNOD, and sends no requests to open or release files.
            Operation::Create { .. } | Operation::Open { .. } if self.no_open => {
                return Err(RequestFailure::Errno(Errno::NOSYS));
            }
            Operation::Setxattr { .. }
            | Operation::Getxattr { .. }
            | Operation::Listxattr { .. }
            | Operation::Removexattr { .. }
                if self.no_xattrs =>
            {
                return Err(RequestFailure::Errno(Errno::NOSYS));
            }
            Operation::Create { name, flags, mode, umask } => {
                let attr = self.new_inode(node, name, NewInode::file(mode), &caller(req, umask))?;
                self.created(&attr, flags, reply);
            }
            Operation::Tmpfile { flags, mode, umask } => {
                self.activity.note_change();
                let attr = self.fs.tmpfile(self.id(node)?, mode, &caller(req, umask))?;
                // Close the file that `tmpfile` opened. The reference of the kernel keeps the inode until FORGET.
                self.fs.release_inode(attr.id);
                self.created(&attr, flags, reply);
            }
            Operation::Link { node: old, name } => {
                self.activity.note_change();
                reply.entry(&self.entry(&self.fs.link(self.id(old)?, self.id(node)?, name)?));
            }
            Operation::Unlink { name } => {
                self.activity.note_change();
                self.fs.unlink(self.id(node)?, name)?;
            }
            Operation::Rmdir { name } => {
                self.activity.note_change();
                self.fs.rmdir(self.id(node)?, name)?;
            }
            Operation::Rename { name, new_parent, new_name, flags } => {
                self.activity.note_change();
                let flags = RenameFlags::from_bits(flags).ok_or(Error::InvalidArgument("rename flags"))?;
                let (from, to) = ((self.id(node)?, name), (self.id(new_parent)?, new_name));
                self.fs.rename_by(from, to, flags, &caller(req, 0))?;
            }
            Operation::Open { flags } => self.open(req, flags, reply, place)?,
            Operation::Release { handle, flags } => {
                self.fs.close_descriptor(handle & DESCRIPTOR);
                if handle & EXECUTED != 0 {
                    self.running_programs.release(self.id(node)?);
                }
                if is_for_writing(flags) {
                    self.seeker.released(node);
                }
            }
            Operation::Read { offset, size } => {
                let id = self.id(node)?;
                reply.fill(size as usize, |room| self.fs.read_into(id, offset, room))?;
            }
            Operation::Write { handle, flags, offset, data, from_cache, clear_suid_sgid } => {
                if handle & APPENDS_ONLY != 0 && flags & O_APPEND == 0 {
                    // On its own filesystems, Linux refuses to clear O_APPEND of an append-only file. On a FUSE mount,
                    // Linux does not know that the file is append-only and clears the flag, so the write fails here.
                    return Err(Error::NotPermitted("the file is append-only").into());
                }
                self.activity.note_change();
                let id = self.id(node)?;
                let mut written = match handle == UNOPENED && self.no_open {
                    true => {
                        // Remove the capability after the write, because a refused write must not remove it, and the
                        // write itself checks whether it is permitted.
                        let written = self.write_unopened(id, flags, offset, data)?;
                        self.drop_capability(id, false)?;
                        written
                    }
                    false => {
                        self.drop_capability(id, handle & APPENDS_ONLY != 0)?;
                        let keeps_times = from_cache && self.seeker.kernel_keeps_writes();
                        self.fs.write_opened(id, offset, data, keeps_times)?
                    }
                };
                while from_cache && written < data.len() {
                    // If the kernel writes back dirty pages, it ignores an answer that reports fewer bytes than
                    // requested. So try to write the rest: the attempt fails with the reason why the first write was
                    // short.
                    written += self.fs.write_opened(id, offset + written as u64, &data[written..], true)?;
                }
                if clear_suid_sgid {
                    self.clear_suid_sgid(req, id)?;
                }
                reply.written(u32::try_from(written).unwrap_or(u32::MAX));
            }
            Operation::Fsync { handle, datasync } => {
                let id = self.id(node)?;
                place.aside(|| self.fs.fsync_descriptor(id, datasync, handle & DESCRIPTOR))?;
                self.host.lost_pages.forget(id);
            }
            Operation::Fsyncdir { datasync } => {
                let id = self.id(node)?;
                place.aside(|| self.fs.fsync(id, datasync))?;
            }
            Operation::Syncfs => {
                place.aside(|| self.activity.sync(&self.fs))?;
            }
            Operation::Readdir { offset, size } => {
                reply.limit(size);
                self.readdir(node, offset, reply)?;
            }
            Operation::Readdirplus { offset, size } => {
                reply.limit(size);
                self.fill_plus(req, offset, reply)?;
            }
            Operation::Statfs => {
                let stat = self.fs.statfs()?;
                reply.statfs(&Statfs {
                    blocks: stat.blocks,
                    bfree: stat.bfree,
                    bavail: stat.bavail,
                    files: stat.files,
                    ffree: stat.ffree,
                    bsize: stat.bsize,
                    namelen: stat.namelen,
                    frsize: stat.bsize,
                    ..Statfs::default()
                });
            }
            Operation::Setxattr { name, value, flags } => self.setxattr(req, name, value, flags)?,
            Operation::Getxattr { name, size } => {
                let value = match name == CONTROL_XATTR.as_bytes() {
                    true => self.control.clone(),
                    false => self.fs.getxattr(self.id(node)?, name)?,
                };
                reply_sized(&value, size, reply)?;
            }
            Operation::Listxattr { size } => {
                // Linux returns no longer lists.
                let names = self.fs.first_xattrs(self.id(node)?, XATTR_LIST_MAX)?;
                let list: Vec<u8> = names.iter().flat_map(|name| name.iter().copied().chain([0])).collect();
                reply_sized(&list, size, reply)?;
            }
            Operation::Removexattr { name } => {
                self.activity.note_change();
                self.fs.removexattr(self.id(node)?, name, &CallerGroups::xattr_caller(req, name))?;
                if name == CAPABILITY {
                    self.removed_capability.note(req);
                }
            }
            Operation::Ioctl { cmd, data, out_size } => self.ioctl(req, cmd, data, out_size, reply, place)?,
            Operation::Fallocate { offset, length, mode } => self.fallocate(req, offset, length, mode)?,
            Operation::Interrupt { unique } => self.host.interrupts.interrupt(self.view.unique(unique)),
            Operation::Lseek { offset, whence } => reply.offset(self.lseek(node, offset, whence, place)?),
            Operation::CopyFileRange { offset, to_node, to_offset, len, is_long } => {
                self.activity.note_change();
                let (src, dst) = (self.id(node)?, self.id(to_node)?);
                let len = len.min(COPY_MAX);
                let copied = match self.no_open {
                    true => self.fs.copy_range(src, offset, dst, to_offset, len)?,
                    false => self.fs.copy_range_opened(src, offset, dst, to_offset, len)?,
                };
                if copied > 0 {
                    self.content_changed(req, dst)?;
                }
                match is_long {
                    true => reply.copied(copied),
                    false => reply.written(u32::try_from(copied).unwrap_or(u32::MAX)),
                }
            }
            // After ENOSYS the kernel no longer sends the operation. FLUSH is not needed, because the server holds
            // nothing back until close. OPENDIR is not needed, because directories are read by cookies alone, and the
            // kernel caches them.
            Operation::Other(_) => return Err(RequestFailure::Errno(Errno::NOSYS)),
        }
        Ok(())
    }

    fn lookup(&self, req: &FuseRequest<'_>, name: &[u8], reply: &mut Reply<'_>, place: &WorkerPlace<'_>) -> Result<()> {
        let parent = req.node;
        let dir = self.id(parent)?;
        match self.fs.lookup(dir, name) {
            Ok(attr) => {
                if let Some(submounts) = self.submounts_at(attr.id) {
                    return self.lookup_stub(submounts, (req, name), &attr, reply, place);
                }
                if !attr.is_dir() {
                    self.listings.looked_up(parent).into_iter().for_each(|dir| self.view.names.forget_data(dir));
                }
                reply.entry(&self.entry(&attr));
            }
            // Let the kernel cache that the name does not exist.
            Err(Error::NotFound) => reply.entry(&EntryReply::none(self.name_ttl(dir))),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn getattr(&self, node: u64, place: &WorkerPlace<'_>) -> Result<Attr> {
        let id = self.id(node)?;
        let mut attr = self.fs.getattr(id)?;
        // Fetch the data of a file that seems to have no blocks, because programs treat a file without blocks as a file
        // without data.
        if self.seeker.may_lack_blocks(node, &attr) && self.seeker.fetch_all_data(node, place) {
            attr = self.fs.getattr(id)?;
        }
        Ok(attr)
    }

    fn open(&self, req: &FuseRequest<'_>, flags: i32, reply: &mut Reply<'_>, place: &WorkerPlace<'_>) -> Done {
        let id = self.id(req.node)?;
        let is_append_only = self.check_open(id, flags)?;
        if flags & O_TRUNC != 0 {
            if !is_for_writing(flags)
                && self.running_programs.contains(id)
                && place.aside(|| self.running_programs.contains_after_releases(id))
            {
                return Err(RequestFailure::Errno(Errno::TXTBSY));
            }
            self.activity.note_change();
            // The times change even if the file is empty already.
            let set = SetAttr { size: Some(0), mtime: Some(SetTime::Now), ..SetAttr::default() };
            self.fs.setattr(id, &set, &caller(req, 0))?;
            self.content_changed(req, id)?;
        }
        if is_for_writing(flags) {
            self.seeker.opened(req.node);
        }
        let handle = self.fs.open_descriptor();
        if is_append_only {
            reply.opened(handle | APPENDS_ONLY, APPEND_OPEN_FLAGS);
        } else if flags & FOR_EXECUTION != 0 {
            self.running_programs.add(id);
            reply.opened(handle | EXECUTED, OPEN_FLAGS);
        } else {
            reply.opened(handle, OPEN_FLAGS);
        }
        Ok(())
    }

    fn setxattr(&self, req: &FuseRequest<'_>, name: &[u8], value: &[u8], flags: u32) -> Result<()> {
        self.activity.note_change();
        let flags = XattrFlags::from_bits(flags).ok_or(Error::InvalidArgument("setxattr flags"))?;
        let id = self.id(req.node)?;
        self.fs.setxattr(id, name, value, flags, &CallerGroups::xattr_caller(req, name))?;
        if name == ACCESS_ACL {
            let attr = self.fs.getattr(id)?;
            if attr.mode & mode::SETGID != 0 && !self.groups.may_keep_sgid(req, attr.gid) {
                self.keep_of_mode(id, &attr, attr.mode & !mode::SETGID)?;
            }
        }
        Ok(())
    }

    fn ioctl(
        &self,
        req: &FuseRequest<'_>,
        cmd: u32,
        data: &[u8],
        out_size: u32,
        reply: &mut Reply<'_>,
        place: &WorkerPlace<'_>,
    ) -> Done {
        if cmd == ASK_MOUNT {
            let mut name = [0; ASK_MOUNT_LEN];
            name.iter_mut().zip(&self.control).for_each(|(to, from)| *to = *from);
            reply.ioctl(&name);
            return Ok(());
        }
        self.activity.note_change();
        let id = self.id(req.node)?;
        if self.no_open && ioctl::changes_attributes(cmd) {
            // Pages that are dirty when the file becomes immutable must be written first, because later writes fail.
            self.seeker.fetch_all_data(req.node, place);
        }
        let asker = IoctlCaller { caller: caller(req, 0), flag_rights: &|| self.groups.flag_rights(req) };
        let command = SubvolumeIoctl { fs: &self.fs, host: &self.host, req, id };
        let done = subvolume_ioctl::ioctl(&command, cmd, data, place)
            .map(|done| done.map(IoctlAnswer::from))
            .or_else(|| place.aside(|| btrfs_ioctl::ioctl(&command, cmd, data)))
            .or_else(|| place.aside(|| admin_ioctl::ioctl(&command, cmd, data)));
        let mut answer = match done {
            Some(done) => done.map_err(|failure| RequestFailure::Errno(failure.errno()))?,
            None => {
                let done = place.aside(|| ioctl::ioctl(&self.fs, id, cmd, data, &asker));
                done.ok_or(RequestFailure::Errno(Errno::NOTTY))??.into()
            }
        };
        if ioctl::changes_attributes(cmd) {
            self.seeker.attributes_changed(req.node);
        }
        answer.data.truncate(out_size as usize);
        reply.ioctl_result(answer.result, &answer.data);
        Ok(())
    }

    fn fallocate(&self, req: &FuseRequest<'_>, offset: u64, length: u64, mode: u32) -> Result<()> {
        self.activity.note_change();
        let mode = FallocateMode::from_bits(mode).ok_or(Error::NotSupported("this fallocate mode"))?;
        let id = self.id(req.node)?;
        match self.fs.fallocate_if_needed(id, offset, length, mode)? {
            true => self.content_changed(req, id),
            false => Ok(()),
        }
    }

    fn lseek(&self, node: u64, offset: u64, whence: u32, place: &WorkerPlace<'_>) -> Result<u64> {
        let whence = match whence {
            SEEK_DATA => SeekWhence::Data,
            SEEK_HOLE => SeekWhence::Hole,
            _ => return Err(Error::InvalidArgument("lseek whence")),
        };
        if i64::try_from(offset).is_err() {
            return Err(Error::NoSuchOffset);
        }
        let id = self.id(node)?;
        if self.seeker.fetch_all_data(node, place) {
            return self.fs.seek(id, offset, whence);
        }
        // The kernel may still have data of this file, so report the whole file as data. Reporting a hole as data loses
        // nothing.
        match (self.fs.getattr(id)?.size, whence) {
            (size, _) if offset >= size => Err(Error::NoSuchOffset),
            (_, SeekWhence::Data) => Ok(offset),
            (size, SeekWhence::Hole) => Ok(size),
        }
    }
}

/// Answers with the length of a value if `size` is 0, else with the value, which must fit into `size` bytes.
fn reply_sized(value: &[u8], size: u32, reply: &mut Reply<'_>) -> Done {
    if size == 0 {
        reply.xattr_size(u32::try_from(value.len()).unwrap_or(u32::MAX));
    } else if value.len() > size as usize {
        return Err(RequestFailure::Errno(Errno::RANGE));
    } else {
        reply.data(value);
    }
    Ok(())
}
