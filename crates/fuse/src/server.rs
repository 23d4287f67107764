//! Requests: each is turned into one call of `fs` and its answer.
//!
//! Invariants:
//! S1. A handler answers exactly once. A failure of `fs` becomes its errno; a panic becomes EIO and turns the
//!     filesystem read-only, so that nothing half-done is ever committed.
//! S2. Every `Attr` that goes to the kernel in an entry carries one reference (see `node`, N2); an entry that did not
//!     fit into an answer gives its reference back.
//! S3. Nothing but requests changes the filesystem, so names and attributes may be cached long; only `st_blocks` moves by
//!     itself while new data waits for its place, see [`Server::attr_ttl`].
//! S4. A write is acknowledged when `fs` has taken it and reserved its space. Where the mount asks for the kernel's
//!     writeback cache, the kernel acknowledges instead, and owns the size and times of regular files.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileAttr, FileHandle, Filesystem, Generation, INodeNo, InitFlags,
    IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
    Request, TimeOrNow, WriteFlags,
};
use ubtrfs_fs::{
    Attr, Caller, Error, FallocateMode, Fs, InodeId, NewInode, RenameFlags, Result, SeekWhence, SetAttr, XattrFlags,
    mode,
};

use crate::activity::Activity;
use crate::attr::{entry_kind, file_attr, set_time, timespec};
use crate::caller::{Groups, caller};
use crate::control::{CONTROL_XATTR, STATS_XATTR, SYNC_XATTR};
use crate::dir_end::DirEnds;
use crate::fsync_pool::FsyncPool;
use crate::ioctl;
use crate::node::Nodes;
use crate::reply::{Caught, NO_ATTR, OPEN_FLAGS, Refuse, answer, sized_answer};
use crate::seek::Seeker;

/// How long names, and attributes that only requests change, stay valid in the kernel.
const TTL: Duration = Duration::from_secs(3600);
/// The same for attributes of files that were changed a short time ago.
const RECENT_TTL: Duration = Duration::from_secs(1);
/// How long after its last change a file counts as recently changed: the kernel's and our own delays of writing back,
/// added up, with a reserve.
const RECENT: u64 = 120;
/// Longest answer to a copy_file_range request; the caller asks again for the rest.
const COPY_MAX: u64 = 1 << 30;
/// Entries fetched at once for readdirplus.
const PLUS_BATCH: usize = 32;
/// Background requests (readahead, writeback) that the kernel keeps in flight.
const MAX_BACKGROUND: u16 = 64;
/// Largest write request.
pub(crate) const MAX_WRITE: u32 = 1 << 20;

/// The attribute whose value decides on a file's mode.
const ACCESS_ACL: &[u8] = b"system.posix_acl_access";

const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;
const O_TRUNC: i32 = 0o1000;
const O_APPEND: i32 = 0o2000;

thread_local! {
    /// Answers to read requests; kept, because fresh memory costs a page fault for every 4 KiB.
    static READ_BUF: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// One mount's requests.
#[derive(Debug)]
pub(crate) struct Server {
    fs: Arc<Fs>,
    nodes: Nodes,
    activity: Arc<Activity>,
    /// Name of the control socket, handed out by [`CONTROL_XATTR`].
    control: Vec<u8>,
    writeback_cache: bool,
    seeker: Seeker,
    fsyncs: FsyncPool,
    dir_ends: DirEnds,
    groups: Groups,
}

impl Server {
    pub(crate) fn new(
        fs: Arc<Fs>,
        activity: Arc<Activity>,
        control: Vec<u8>,
        seeker: Seeker,
        groups: Groups,
        writeback_cache: bool,
    ) -> Self {
        let nodes = Nodes::new(fs.root());
        Self {
            fs,
            nodes,
            activity,
            control,
            writeback_cache,
            seeker,
            fsyncs: FsyncPool::default(),
            dir_ends: DirEnds::default(),
            groups,
        }
    }

    /// The inode of a request. A number that no entry ever carried is stale.
    fn id(&self, node: INodeNo) -> Result<InodeId> {
        self.nodes.id(node.0).ok_or(Error::Stale)
    }

    /// S1: runs `work`, then answers with `done` or the errno.
    fn answer<R: Refuse, T>(&self, reply: R, work: impl FnOnce() -> Result<T>, done: impl FnOnce(R, T)) {
        answer(&self.fs, reply, work, done);
    }

    /// fsync waits for devices; see [`FsyncPool`].
    fn fsync_in_pool(&self, node: INodeNo, datasync: bool, reply: ReplyEmpty) {
        let (fs, id) = (Arc::clone(&self.fs), self.id(node));
        self.fsyncs.run(move || answer(&fs, reply, || fs.fsync(id?, datasync), |reply, ()| reply.ok()));
    }

    /// The same for requests that change the filesystem.
    fn change<R: Refuse, T>(&self, reply: R, work: impl FnOnce() -> Result<T>, done: impl FnOnce(R, T)) {
        self.activity.note_change();
        self.answer(reply, work, done);
    }

    /// How long the kernel may keep attributes (S3).
    fn attr_ttl(&self, attr: &Attr) -> Duration {
        if attr.mode & mode::TYPE != mode::REGULAR {
            return TTL;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let changed = u64::try_from(attr.ctime.sec).unwrap_or(0);
        if changed.saturating_add(RECENT) < now { TTL } else { RECENT_TTL }
    }

    /// Answers with an entry, whose reference goes to the kernel.
    fn entry(&self, reply: ReplyEntry, attr: &Attr) {
        let (wire, ttl) = self.entry_attr(attr);
        reply.entry_with_ttls(&ttl, &TTL, &wire, Generation(attr.generation.0));
    }

    /// Attributes for an entry. fuser takes the node id from them, so where `st_ino` is another number the attributes
    /// expire at once and the kernel asks again.
    fn entry_attr(&self, attr: &Attr) -> (FileAttr, Duration) {
        let ttl = if self.nodes.has_other_number(attr.id) { Duration::ZERO } else { self.attr_ttl(attr) };
        (file_attr(attr, self.nodes.node(attr.id)), ttl)
    }

    fn attr(&self, reply: ReplyAttr, attr: &Attr) {
        reply.attr(&self.attr_ttl(attr), &file_attr(attr, self.nodes.st_ino(attr.id)));
    }

    /// Takes set-user-id and set-group-id off a file that was changed by someone without the right to keep them.
    fn kill_suid_sgid(&self, req: &Request, id: InodeId) -> Result<()> {
        let attr = self.fs.getattr(id)?;
        self.keep_of_mode(id, &attr, self.groups.mode_after_change(req, attr.mode, attr.gid))
    }

    fn keep_of_mode(&self, id: InodeId, attr: &Attr, kept: u32) -> Result<()> {
        if kept != attr.mode {
            let set = SetAttr { mode: Some(kept & mode::PERMISSIONS), ..SetAttr::default() };
            self.fs.setattr(id, &set, &Caller::ROOT)?;
            self.seeker.attributes_changed(self.nodes.node(id));
        }
        Ok(())
    }

    /// What opening must refuse because later requests come from the page cache, too late to fail the writer.
    fn check_open(&self, id: InodeId, flags: OpenFlags) -> Result<()> {
        let writes = flags.acc_mode() != OpenAccMode::O_RDONLY || flags.0 & O_TRUNC != 0;
        if !writes {
            return Ok(());
        }
        self.fs.check_writable(id)?;
        let attr = self.fs.getattr(id)?;
        if ioctl::is_immutable(attr.flags) {
            return Err(Error::NotPermitted("the file is immutable"));
        }
        if ioctl::is_append_only(attr.flags) && (flags.0 & O_APPEND == 0 || flags.0 & O_TRUNC != 0) {
            return Err(Error::NotPermitted("the file is append-only"));
        }
        Ok(())
    }

    fn new_inode(&self, parent: INodeNo, name: &OsStr, new: NewInode<'_>, caller: &Caller) -> Result<Attr> {
        self.fs.create(self.id(parent)?, name.as_bytes(), new, caller)
    }

    /// The attributes that are not on disk but doors to this server.
    fn virtual_xattr(&self, name: &OsStr) -> Option<Result<Vec<u8>>> {
        match name.as_bytes() {
            name if name == CONTROL_XATTR.as_bytes() => Some(Ok(self.control.clone())),
            name if name == SYNC_XATTR.as_bytes() => Some(self.fs.sync().map(|()| {
                self.activity.note_sync();
                b"ok".to_vec()
            })),
            name if name == STATS_XATTR.as_bytes() => Some(Ok(self.fs.metrics_text().into_bytes())),
            _ => None,
        }
    }

    /// The end of the reader who goes on at `cookie`.
    fn dir_end(&self, dir: InodeId, node: INodeNo, cookie: u64) -> Result<u64> {
        self.dir_ends.take(node.0, cookie).map_or_else(|| self.fs.readdir_end(dir), Ok)
    }

    /// Fetches up to [`PLUS_BATCH`] entries after `cookie`, those before `end`.
    fn some_entries(&self, dir: InodeId, cookie: u64, end: u64) -> Result<Vec<Entry>> {
        let mut entries = Vec::with_capacity(PLUS_BATCH);
        self.fs.readdir(dir, cookie, &mut |entry| {
            if entries.len() == PLUS_BATCH || entry.next_cookie > end {
                return false;
            }
            entries.push(Entry { id: entry.id, name: entry.name.to_vec(), cookie: entry.next_cookie });
            true
        })?;
        Ok(entries)
    }

    /// Fills a readdirplus answer; fails only if there is not a single entry to show for it.
    fn fill_plus(&self, node: INodeNo, mut cookie: u64, reply: &mut ReplyDirectoryPlus) -> Result<()> {
        let dir = self.id(node)?;
        let end = self.dir_end(dir, node, cookie)?;
        let mut filled = false;
        loop {
            let entries = match self.some_entries(dir, cookie, end) {
                Ok(entries) => entries,
                Err(_) if filled => return Ok(()),
                Err(error) => return Err(error),
            };
            let last_batch = entries.len() < PLUS_BATCH;
            for entry in &entries {
                // The kernel takes no reference for these two.
                let is_dot = entry.name == b"." || entry.name == b"..";
                let found = if is_dot { self.fs.getattr(entry.id) } else { self.fs.getattr_counted(entry.id) };
                let attr = match found {
                    Ok(attr) => attr,
                    // Removed since the batch was fetched.
                    Err(Error::NotFound) => {
                        cookie = entry.cookie;
                        continue;
                    }
                    Err(_) if filled => return Ok(()),
                    Err(error) => return Err(error),
                };
                let (wire, ttl) = self.entry_attr(&attr);
                let name = OsStr::from_bytes(&entry.name);
                let generation = Generation(attr.generation.0);
                if reply.add(wire.ino, entry.cookie, name, &ttl, &wire, generation) {
                    if !is_dot {
                        self.fs.forget(attr.id, 1);
                    }
                    self.dir_ends.remember(node.0, cookie, end);
                    return Ok(());
                }
                filled = true;
                cookie = entry.cookie;
            }
            if last_batch {
                // The kernel asks until an answer is empty.
                if filled {
                    self.dir_ends.remember(node.0, cookie, end);
                }
                return Ok(());
            }
        }
    }
}

/// A directory entry waiting for its attributes.
struct Entry {
    id: InodeId,
    name: Vec<u8>,
    cookie: u64,
}

impl Filesystem for Server {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Not FUSE_ASYNC_DIO: the kernel does not drop cached pages after asynchronous direct writes, so buffered readers
        // would go on seeing the old content.
        let mut wanted = vec![
            InitFlags::FUSE_PARALLEL_DIROPS,
            // File handles (open_by_handle_at, NFS): the kernel looks up "." in an inode that it has forgotten.
            InitFlags::FUSE_EXPORT_SUPPORT,
            InitFlags::FUSE_DO_READDIRPLUS | InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_CACHE_SYMLINKS,
            InitFlags::FUSE_HAS_IOCTL_DIR,
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            // Spares a getxattr of security.capability for every write.
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        ];
        if self.fs.options().acl {
            wanted.push(InitFlags::FUSE_POSIX_ACL | InitFlags::FUSE_DONT_MASK);
        }
        if self.writeback_cache {
            wanted.push(InitFlags::FUSE_WRITEBACK_CACHE);
        }
        for flags in wanted {
            if config.add_capabilities(flags).is_err() {
                tracing::debug!("the kernel lacks {flags:?}");
            }
        }
        // Larger values than the kernel's are cut down by it; errors here only name the nearest value allowed.
        let _ = config.set_max_write(MAX_WRITE);
        let _ = config.set_max_background(MAX_BACKGROUND);
        let _ = config.set_time_granularity(Duration::from_nanos(1));
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let work = || match self.fs.lookup(self.id(parent)?, name.as_bytes()) {
            Ok(attr) => Ok(Some(attr)),
            Err(Error::NotFound) => Ok(None),
            Err(error) => Err(error),
        };
        self.answer(reply, work, |reply, found| match found {
            Some(attr) => self.entry(reply, &attr),
            // Node id 0: the kernel remembers that the name does not exist.
            None => reply.entry(&TTL, &NO_ATTR, Generation(0)),
        });
    }

    fn forget(&self, _req: &Request, node: INodeNo, nlookup: u64) {
        if node.0 == crate::node::ROOT_NODE {
            return;
        }
        if let Ok(id) = self.id(node)
            && catch_unwind(AssertUnwindSafe(|| self.fs.forget(id, nlookup))).is_err()
        {
            crate::session::abort(&self.fs, "forgetting an inode panicked");
        }
    }

    fn getattr(&self, _req: &Request, node: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        self.answer(reply, || self.fs.getattr(self.id(node)?), |reply, attr| self.attr(reply, &attr));
    }

    fn setattr(
        &self,
        req: &Request,
        node: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = SetAttr {
            mode: mode.map(|mode| mode & mode::PERMISSIONS),
            uid,
            gid,
            size,
            atime: atime.map(set_time),
            mtime: mtime.map(set_time),
            ctime: ctime.map(timespec),
            otime: None,
        };
        let work = || {
            let id = self.id(node)?;
            let attr = self.fs.setattr(id, &set, &caller(req, 0))?;
            if set.size.is_some() && req.uid() != 0 && attr.mode & (mode::SETUID | mode::SETGID) != 0 {
                self.kill_suid_sgid(req, id)?;
                return self.fs.getattr(id);
            }
            Ok(attr)
        };
        self.change(reply, work, |reply, attr| self.attr(reply, &attr));
    }

    fn readlink(&self, _req: &Request, node: INodeNo, reply: ReplyData) {
        self.answer(reply, || self.fs.readlink(self.id(node)?), |reply, target| reply.data(&target));
    }

    fn mknod(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, rdev: u32, reply: ReplyEntry) {
        let new = NewInode { mode, rdev, symlink_target: None };
        let work = || self.new_inode(parent, name, new, &caller(req, umask));
        self.change(reply, work, |reply, attr| self.entry(reply, &attr));
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let work = || self.new_inode(parent, name, NewInode::dir(mode), &caller(req, umask));
        self.change(reply, work, |reply, attr| self.entry(reply, &attr));
    }

    fn unlink(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.change(reply, || self.fs.unlink(self.id(parent)?, name.as_bytes()), |reply, ()| reply.ok());
    }

    fn rmdir(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.change(reply, || self.fs.rmdir(self.id(parent)?, name.as_bytes()), |reply, ()| reply.ok());
    }

    fn symlink(&self, req: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let new = NewInode::symlink(target.as_os_str().as_bytes());
        let work = || self.new_inode(parent, name, new, &caller(req, 0));
        self.change(reply, work, |reply, attr| self.entry(reply, &attr));
    }

    fn rename(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: fuser::RenameFlags,
        reply: ReplyEmpty,
    ) {
        let work = || {
            let flags = RenameFlags::from_bits(flags.bits()).ok_or(Error::InvalidArgument("rename flags"))?;
            self.fs.rename(self.id(parent)?, name.as_bytes(), self.id(newparent)?, newname.as_bytes(), flags)
        };
        self.change(reply, work, |reply, ()| reply.ok());
    }

    fn link(&self, _req: &Request, node: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        let work = || self.fs.link(self.id(node)?, self.id(newparent)?, newname.as_bytes());
        self.change(reply, work, |reply, attr| self.entry(reply, &attr));
    }

    fn open(&self, req: &Request, node: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let work = || {
            let id = self.id(node)?;
            self.check_open(id, flags)?;
            if flags.0 & O_TRUNC != 0 {
                self.activity.note_change();
                let set = SetAttr { size: Some(0), ..SetAttr::default() };
                self.fs.setattr(id, &set, &caller(req, 0))?;
                if req.uid() != 0 {
                    self.kill_suid_sgid(req, id)?;
                }
            }
            Ok(())
        };
        self.answer(reply, work, |reply, ()| {
            if flags.acc_mode() != OpenAccMode::O_RDONLY {
                self.seeker.opened(node.0);
            }
            reply.opened(FileHandle(0), OPEN_FLAGS);
        });
    }

    fn read(
        &self,
        _req: &Request,
        node: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        READ_BUF.with_borrow_mut(|buf| {
            let size = size as usize;
            if buf.len() < size {
                buf.resize(size, 0);
            }
            let work = || self.fs.read_into(self.id(node)?, offset, &mut buf[..size]);
            let mut read = Ok(0);
            self.answer(Caught(&mut read), work, |caught, len| *caught.0 = Ok(len));
            match read {
                Ok(len) => reply.data(&buf[..len]),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn write(
        &self,
        req: &Request,
        node: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let work = || {
            let id = self.id(node)?;
            let written = self.fs.write(id, offset, data)?;
            if write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) {
                self.kill_suid_sgid(req, id)?;
            }
            Ok(written)
        };
        self.change(reply, work, |reply, written| reply.written(u32::try_from(written).unwrap_or(u32::MAX)));
    }

    /// Nothing is held back for `close`; the kernel stops asking.
    fn flush(&self, _req: &Request, _node: INodeNo, _fh: FileHandle, _lock_owner: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn release(
        &self,
        _req: &Request,
        node: INodeNo,
        _fh: FileHandle,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        if flags.acc_mode() != OpenAccMode::O_RDONLY {
            self.seeker.released(node.0);
        }
        reply.ok();
    }

    fn fsync(&self, _req: &Request, node: INodeNo, _fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        self.fsync_in_pool(node, datasync, reply);
    }

    /// Directory streams are read by cookies alone; the kernel stops asking and caches what it has read.
    fn opendir(&self, _req: &Request, _node: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.error(Errno::ENOSYS);
    }

    fn readdir(&self, _req: &Request, node: INodeNo, _fh: FileHandle, offset: u64, reply: ReplyDirectory) {
        let mut reply = reply;
        let mut read = Ok(());
        let work = || {
            let dir = self.id(node)?;
            let end = self.dir_end(dir, node, offset)?;
            let mut cookie = offset;
            self.fs.readdir(dir, offset, &mut |entry| {
                if entry.next_cookie > end {
                    return false;
                }
                let name = OsStr::from_bytes(entry.name);
                let ino = INodeNo(self.nodes.st_ino(entry.id));
                if reply.add(ino, entry.next_cookie, entry_kind(entry.file_type), name) {
                    return false;
                }
                cookie = entry.next_cookie;
                true
            })?;
            // The kernel asks until an answer is empty.
            if cookie != offset {
                self.dir_ends.remember(node.0, cookie, end);
            }
            Ok(())
        };
        self.answer(Caught(&mut read), work, |_, ()| ());
        match read {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdirplus(&self, _req: &Request, node: INodeNo, _fh: FileHandle, offset: u64, reply: ReplyDirectoryPlus) {
        let mut reply = reply;
        let mut read = Ok(());
        self.answer(Caught(&mut read), || self.fill_plus(node, offset, &mut reply), |_, ()| ());
        match read {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn fsyncdir(&self, _req: &Request, node: INodeNo, _fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        self.fsync_in_pool(node, datasync, reply);
    }

    fn statfs(&self, _req: &Request, _node: INodeNo, reply: ReplyStatfs) {
        self.answer(
            reply,
            || self.fs.statfs(),
            |reply, stat| {
                let (bsize, namelen) = (stat.bsize, stat.namelen);
                reply.statfs(stat.blocks, stat.bfree, stat.bavail, stat.files, stat.ffree, bsize, namelen, bsize);
            },
        );
    }

    fn setxattr(
        &self,
        req: &Request,
        node: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let work = || {
            let flags = u32::try_from(flags).ok().and_then(XattrFlags::from_bits);
            let flags = flags.ok_or(Error::InvalidArgument("setxattr flags"))?;
            let id = self.id(node)?;
            self.fs.setxattr(id, name.as_bytes(), value, flags, &caller(req, 0))?;
            if name.as_bytes() == ACCESS_ACL {
                let attr = self.fs.getattr(id)?;
                if attr.mode & mode::SETGID != 0 && !self.groups.may_keep_sgid(req, attr.gid) {
                    self.keep_of_mode(id, &attr, attr.mode & !mode::SETGID)?;
                }
            }
            Ok(())
        };
        self.change(reply, work, |reply, ()| reply.ok());
    }

    fn getxattr(&self, _req: &Request, node: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let work = || match self.virtual_xattr(name) {
            Some(value) => value,
            None => self.fs.getxattr(self.id(node)?, name.as_bytes()),
        };
        self.answer(reply, work, |reply, value| sized_answer(reply, &value, size));
    }

    fn listxattr(&self, _req: &Request, node: INodeNo, size: u32, reply: ReplyXattr) {
        let work = || {
            let names = self.fs.listxattr(self.id(node)?)?;
            Ok(names.iter().flat_map(|name| name.iter().copied().chain([0])).collect::<Vec<u8>>())
        };
        self.answer(reply, work, |reply, list| sized_answer(reply, &list, size));
    }

    fn removexattr(&self, req: &Request, node: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let work = || self.fs.removexattr(self.id(node)?, name.as_bytes(), &caller(req, 0));
        self.change(reply, work, |reply, ()| reply.ok());
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let work = || self.new_inode(parent, name, NewInode::file(mode), &caller(req, umask));
        self.change(reply, work, |reply, attr| {
            // fuser gives name and attributes one lifetime here. The long one serves: writing and closing the file makes
            // the kernel ask for its blocks again.
            let (wire, _) = self.entry_attr(&attr);
            if OpenFlags(flags).acc_mode() != OpenAccMode::O_RDONLY {
                self.seeker.opened(wire.ino.0);
            }
            reply.created(&TTL, &wire, Generation(attr.generation.0), FileHandle(0), OPEN_FLAGS);
        });
    }

    fn ioctl(
        &self,
        req: &Request,
        node: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        cmd: u32,
        in_data: &[u8],
        out_size: u32,
        reply: ReplyIoctl,
    ) {
        let work = || {
            let answer = ioctl::ioctl(&self.fs, self.id(node)?, cmd, in_data, &caller(req, 0)).transpose()?;
            if answer.is_some() && ioctl::changes_attributes(cmd) {
                self.seeker.attributes_changed(node.0);
            }
            Ok(answer)
        };
        self.change(reply, work, |reply, answer| match answer {
            Some(mut data) => {
                data.truncate(out_size as usize);
                reply.ioctl(0, &data);
            }
            None => reply.error(Errno::ENOTTY),
        });
    }

    fn fallocate(
        &self,
        req: &Request,
        node: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let work = || {
            let mode = u32::try_from(mode).ok().and_then(FallocateMode::from_bits);
            let mode = mode.ok_or(Error::NotSupported("this fallocate mode"))?;
            let id = self.id(node)?;
            self.fs.fallocate(id, offset, length, mode)?;
            if req.uid() != 0 {
                self.kill_suid_sgid(req, id)?;
            }
            Ok(())
        };
        self.change(reply, work, |reply, ()| reply.ok());
    }

    fn lseek(&self, _req: &Request, node: INodeNo, _fh: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let place = || {
            let whence = match whence {
                SEEK_DATA => SeekWhence::Data,
                SEEK_HOLE => SeekWhence::Hole,
                _ => return Err(Error::InvalidArgument("lseek whence")),
            };
            let offset = u64::try_from(offset).map_err(|_| Error::NoSuchOffset)?;
            Ok((self.id(node)?, offset, whence))
        };
        let (id, offset, whence) = match place() {
            Ok(place) => place,
            Err(error) => return reply.error(Errno::from_i32(error.errno())),
        };
        let fs = self.fs.clone();
        self.seeker.answer_with_all_data(node.0, move || {
            answer(
                &fs,
                reply,
                || fs.seek(id, offset, whence),
                |reply, at| {
                    reply.offset(i64::try_from(at).unwrap_or(i64::MAX));
                },
            );
        });
    }

    fn copy_file_range(
        &self,
        req: &Request,
        ino_in: INodeNo,
        _fh_in: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        _fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let work = || {
            let (src, dst) = (self.id(ino_in)?, self.id(ino_out)?);
            let copied = self.fs.copy_range(src, offset_in, dst, offset_out, len.min(COPY_MAX))?;
            if req.uid() != 0 {
                self.kill_suid_sgid(req, dst)?;
            }
            Ok(copied)
        };
        self.change(reply, work, |reply, copied| reply.written(u32::try_from(copied).unwrap_or(u32::MAX)));
    }
}
