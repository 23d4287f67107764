//! `bench null-server`: a FUSE server that keeps names and attributes in memory and drops all data. What it reaches is
//! the most that the protocol, the kernel's side of it and the scheduler allow.
//!
//! - N1. It asks the kernel for what the server of ubtrfs asks for and gives names and attributes the same lifetimes, so
//!   that the same requests arrive; only ACLs and extended attributes are refused, which costs it nothing.
//! - N2. One lock over all: no request holds it longer than a map lookup takes.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, SessionACL, TimeOrNow,
    WriteFlags,
};
use parking_lot::Mutex;
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Mount a filesystem that does nothing: names in memory, data dropped
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Where to mount it
    dir: PathBuf,
    /// Threads that take requests
    #[arg(long, value_name = "N", default_value_t = 4)]
    threads: usize,
    /// Let the kernel collect small writes
    #[arg(long)]
    writeback_cache: bool,
}

/// Serves until it is unmounted or told to end.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut config = fuser::Config::default();
    config.mount_options = vec![
        MountOption::FSName("null".into()),
        MountOption::Subtype("bench-null".into()),
        MountOption::DefaultPermissions,
    ];
    config.acl = SessionACL::All;
    config.n_threads = Some(args.threads.max(1));
    config.clone_fd = true;
    let server = NullServer { state: Mutex::new(State::new()), writeback_cache: args.writeback_cache };
    let session = fuser::Session::new(server, &args.dir, &config)
        .with_context(|| format!("cannot mount on {}; see that /dev/fuse is there", args.dir.display()))?;
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let dir = args.dir.clone();
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            let _ = rustix::mount::unmount(&dir, rustix::mount::UnmountFlags::DETACH);
        }
    });
    println!("mounted on {}", args.dir.display());
    let _ = io::stdout().flush();
    session.run().context("the FUSE session failed")
}

/// What the server of ubtrfs says too (N1).
const TTL: Duration = Duration::from_secs(3600);
const OPEN_FLAGS: FopenFlags = FopenFlags::FOPEN_KEEP_CACHE.union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
const MAX_WRITE: u32 = 1 << 20;
const MAX_BACKGROUND: u16 = 64;
static ZEROS: [u8; MAX_WRITE as usize] = [0; MAX_WRITE as usize];

struct NullServer {
    state: Mutex<State>,
    writeback_cache: bool,
}

struct State {
    nodes: HashMap<u64, Node>,
    next: u64,
}

struct Node {
    attr: FileAttr,
    target: Vec<u8>,
    dir: Names,
}

/// A directory: names in the order in which they came, so that a position stays valid.
#[derive(Default)]
struct Names {
    by_name: HashMap<OsString, (u64, u64)>,
    by_cookie: BTreeMap<u64, OsString>,
    next: u64,
}

impl Names {
    fn insert(&mut self, name: &OsStr, ino: u64) {
        // 1 and 2 are `.` and `..`.
        let cookie = self.next + 3;
        self.next += 1;
        if let Some((old, _)) = self.by_name.insert(name.to_owned(), (cookie, ino)) {
            self.by_cookie.remove(&old);
        }
        self.by_cookie.insert(cookie, name.to_owned());
    }

    fn remove(&mut self, name: &OsStr) -> Option<u64> {
        let (cookie, ino) = self.by_name.remove(name)?;
        self.by_cookie.remove(&cookie);
        Some(ino)
    }

    fn get(&self, name: &OsStr) -> Option<u64> {
        self.by_name.get(name).map(|(_, ino)| *ino)
    }
}

impl State {
    fn new() -> Self {
        let mut state = Self { nodes: HashMap::new(), next: INodeNo::ROOT.0 };
        state.add(FileType::Directory, 0o755, (0, 0), 0, Vec::new());
        state
    }

    fn add(&mut self, kind: FileType, mode: u32, owner: (u32, u32), rdev: u32, target: Vec<u8>) -> FileAttr {
        let now = SystemTime::now();
        let attr = FileAttr {
            ino: INodeNo(self.next),
            size: target.len() as u64,
            blocks: 0,
            atime: now,
            mtime: now,
            ctime: now,
            crtime: now,
            kind,
            perm: u16::try_from(mode & 0o7777).unwrap_or_default(),
            nlink: 1,
            uid: owner.0,
            gid: owner.1,
            rdev,
            blksize: 4096,
            flags: 0,
        };
        self.nodes.insert(self.next, Node { attr, target, dir: Names::default() });
        self.next += 1;
        attr
    }

    fn node(&mut self, ino: INodeNo) -> Result<&mut Node, Errno> {
        self.nodes.get_mut(&ino.0).ok_or(Errno::ENOENT)
    }

    fn child(&mut self, dir: INodeNo, name: &OsStr) -> Result<u64, Errno> {
        self.node(dir)?.dir.get(name).ok_or(Errno::ENOENT)
    }

    fn make(&mut self, dir: INodeNo, name: &OsStr, new: New<'_>, req: &Request) -> Result<FileAttr, Errno> {
        if self.node(dir)?.dir.get(name).is_some() {
            return Err(Errno::EEXIST);
        }
        let owner = (req.uid(), req.gid());
        let attr = self.add(new.kind, new.mode & !new.umask, owner, new.rdev, new.target.to_vec());
        self.node(dir)?.dir.insert(name, attr.ino.0);
        Ok(attr)
    }

    fn remove(&mut self, dir: INodeNo, name: &OsStr) -> Result<(), Errno> {
        let ino = self.node(dir)?.dir.remove(name).ok_or(Errno::ENOENT)?;
        let node = self.node(INodeNo(ino))?;
        node.attr.nlink = node.attr.nlink.saturating_sub(1);
        if node.attr.nlink == 0 {
            self.nodes.remove(&ino);
        }
        Ok(())
    }

    /// Entries after `cookie`: position, name, attributes.
    fn entries(&mut self, dir: INodeNo, cookie: u64, limit: usize) -> Result<Vec<(u64, OsString, FileAttr)>, Errno> {
        let own = self.node(dir)?.attr;
        let mut found: Vec<_> = [".", ".."].into_iter().zip(1..).map(|(name, at)| (at, name.into(), own)).collect();
        found.retain(|(at, ..)| *at > cookie);
        let names: Vec<(u64, OsString)> = {
            let by_cookie = &self.node(dir)?.dir.by_cookie;
            by_cookie.range(cookie + 1..).take(limit).map(|(at, name)| (*at, name.clone())).collect()
        };
        for (at, name) in names {
            if let Ok(ino) = self.child(dir, &name)
                && let Ok(node) = self.node(INodeNo(ino))
            {
                found.push((at, name, node.attr));
            }
        }
        Ok(found)
    }
}

/// A new inode.
struct New<'a> {
    kind: FileType,
    mode: u32,
    umask: u32,
    rdev: u32,
    target: &'a [u8],
}

impl New<'_> {
    fn of(kind: FileType, mode: u32, umask: u32) -> Self {
        Self { kind, mode, umask, rdev: 0, target: &[] }
    }
}

fn entry(reply: ReplyEntry, attr: Result<FileAttr, Errno>) {
    match attr {
        Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
        Err(errno) => reply.error(errno),
    }
}

fn empty(reply: ReplyEmpty, done: Result<(), Errno>) {
    match done {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

fn clock(time: TimeOrNow) -> SystemTime {
    match time {
        TimeOrNow::SpecificTime(time) => time,
        TimeOrNow::Now => SystemTime::now(),
    }
}

const ENTRIES_AT_ONCE: usize = 64;

impl Filesystem for NullServer {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let mut wanted = vec![
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DO_READDIRPLUS | InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_CACHE_SYMLINKS,
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        ];
        if self.writeback_cache {
            wanted.push(InitFlags::FUSE_WRITEBACK_CACHE);
        }
        for flags in wanted {
            let _ = config.add_capabilities(flags);
        }
        let _ = config.set_max_write(MAX_WRITE);
        let _ = config.set_max_background(MAX_BACKGROUND);
        let _ = config.set_time_granularity(Duration::from_nanos(1));
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let mut state = self.state.lock();
        let found = state.child(parent, name).and_then(|ino| state.node(INodeNo(ino)).map(|node| node.attr));
        drop(state);
        match found {
            // Node id 0: the kernel remembers that the name does not exist.
            Err(errno) if errno == Errno::ENOENT => {
                let nobody = FileAttr { ino: INodeNo(0), ..State::new().nodes[&INodeNo::ROOT.0].attr };
                reply.entry(&TTL, &nobody, Generation(0));
            }
            found => entry(reply, found),
        }
    }

    fn forget(&self, _req: &Request, _node: INodeNo, _nlookup: u64) {}

    fn getattr(&self, _req: &Request, node: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        let found = self.state.lock().node(node).map(|node| node.attr);
        match found {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(errno) => reply.error(errno),
        }
    }

    fn setattr(
        &self,
        _req: &Request,
        node: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mut state = self.state.lock();
        let attr = match state.node(node) {
            Ok(node) => &mut node.attr,
            Err(errno) => return reply.error(errno),
        };
        attr.perm = mode.map_or(attr.perm, |mode| u16::try_from(mode & 0o7777).unwrap_or_default());
        attr.uid = uid.unwrap_or(attr.uid);
        attr.gid = gid.unwrap_or(attr.gid);
        attr.size = size.unwrap_or(attr.size);
        attr.atime = atime.map_or(attr.atime, clock);
        attr.mtime = mtime.map_or(attr.mtime, clock);
        let attr = *attr;
        drop(state);
        reply.attr(&TTL, &attr);
    }

    fn readlink(&self, _req: &Request, node: INodeNo, reply: ReplyData) {
        let found = self.state.lock().node(node).map(|node| node.target.clone());
        match found {
            Ok(target) => reply.data(&target),
            Err(errno) => reply.error(errno),
        }
    }

    fn mknod(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, rdev: u32, reply: ReplyEntry) {
        let new = New { rdev, ..New::of(FileType::RegularFile, mode, umask) };
        let made = self.state.lock().make(parent, name, new, req);
        entry(reply, made);
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let made = self.state.lock().make(parent, name, New::of(FileType::Directory, mode, umask), req);
        entry(reply, made);
    }

    fn unlink(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let done = self.state.lock().remove(parent, name);
        empty(reply, done);
    }

    fn rmdir(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let mut state = self.state.lock();
        let is_empty = state.child(parent, name).and_then(|ino| Ok(state.node(INodeNo(ino))?.dir.by_name.is_empty()));
        let done = match is_empty {
            Ok(true) => state.remove(parent, name),
            Ok(false) => Err(Errno::ENOTEMPTY),
            Err(errno) => Err(errno),
        };
        drop(state);
        empty(reply, done);
    }

    fn symlink(&self, req: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let new = New { target: target.as_os_str().as_bytes(), ..New::of(FileType::Symlink, 0o777, 0) };
        let made = self.state.lock().make(parent, name, new, req);
        entry(reply, made);
    }

    fn rename(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        _flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let mut state = self.state.lock();
        let mut rename = || {
            let ino = state.child(parent, name)?;
            if state.child(newparent, newname).is_ok() {
                state.remove(newparent, newname)?;
            }
            state.node(parent)?.dir.remove(name);
            state.node(newparent)?.dir.insert(newname, ino);
            Ok(())
        };
        let done = rename();
        drop(state);
        empty(reply, done);
    }

    fn link(&self, _req: &Request, node: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        let mut state = self.state.lock();
        let mut link = || {
            let attr = &mut state.node(node)?.attr;
            attr.nlink += 1;
            let attr = *attr;
            state.node(newparent)?.dir.insert(newname, node.0);
            Ok(attr)
        };
        let linked = link();
        drop(state);
        entry(reply, linked);
    }

    fn open(&self, _req: &Request, node: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        const O_TRUNC: i32 = 0o1000;
        if flags.0 & O_TRUNC != 0
            && let Ok(node) = self.state.lock().node(node)
        {
            node.attr.size = 0;
        }
        reply.opened(FileHandle(0), OPEN_FLAGS);
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
        let end = self.state.lock().node(node).map_or(0, |node| node.attr.size);
        let len = end.saturating_sub(offset).min(u64::from(size)) as usize;
        reply.data(&ZEROS[..len.min(ZEROS.len())]);
    }

    fn write(
        &self,
        _req: &Request,
        node: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if let Ok(node) = self.state.lock().node(node) {
            node.attr.size = node.attr.size.max(offset + data.len() as u64);
        }
        reply.written(u32::try_from(data.len()).unwrap_or(u32::MAX));
    }

    fn flush(&self, _req: &Request, _node: INodeNo, _fh: FileHandle, _lock_owner: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn release(
        &self,
        _req: &Request,
        _node: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn fsync(&self, _req: &Request, _node: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn opendir(&self, _req: &Request, _node: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.error(Errno::ENOSYS);
    }

    fn readdir(&self, _req: &Request, node: INodeNo, _fh: FileHandle, offset: u64, reply: ReplyDirectory) {
        let mut reply = reply;
        let found = self.state.lock().entries(node, offset, ENTRIES_AT_ONCE);
        match found {
            Ok(entries) => {
                let _full = entries.iter().any(|(at, name, attr)| reply.add(attr.ino, *at, attr.kind, name));
                reply.ok();
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn readdirplus(&self, _req: &Request, node: INodeNo, _fh: FileHandle, offset: u64, reply: ReplyDirectoryPlus) {
        let mut reply = reply;
        let found = self.state.lock().entries(node, offset, ENTRIES_AT_ONCE);
        match found {
            Ok(entries) => {
                let mut add = |(at, name, attr): &(u64, OsString, FileAttr)| {
                    reply.add(attr.ino, *at, name, &TTL, attr, Generation(0))
                };
                let _full = entries.iter().any(&mut add);
                reply.ok();
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let made = self.state.lock().make(parent, name, New::of(FileType::RegularFile, mode, umask), req);
        match made {
            Ok(attr) => reply.created(&TTL, &attr, Generation(0), FileHandle(0), OPEN_FLAGS),
            Err(errno) => reply.error(errno),
        }
    }

    fn statfs(&self, _req: &Request, _node: INodeNo, reply: ReplyStatfs) {
        const BLOCKS: u64 = 1 << 40;
        reply.statfs(BLOCKS, BLOCKS, BLOCKS, 0, 0, 4096, 255, 4096);
    }
}
