//! `bench null-server`: a FUSE server that keeps names and attributes in memory and drops all data. Its speed is the
//! limit that the FUSE protocol, the kernel's FUSE client and the scheduler set for every FUSE server.
//!
//! - N1. The null server enables those FUSE features of ubtrfs's server that affect the requests of the workloads, and
//!   gives names and attributes the same lifetimes as ubtrfs's server. So both servers receive equal requests. The null
//!   server answers that a file has no extended attributes, or refuses these requests with `no_xattrs`.
//! - N2. One lock protects all state. No request holds the lock longer than it takes to look up or list names.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use parking_lot::Mutex;
use rustix::io::Errno;
use signal_hook::consts::signal::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use ubtrfs_fuse::MountConfig;
use ubtrfs_fuse::protocol::{
    EntryReply, Features, FuseAttr, FuseRequest, InitLimits, Operation, Reply, Setattr, Statfs, Time,
};
use ubtrfs_fuse::transport::{Config, Connection, Handler, IdlePolling, Transport, WorkerPlace};

/// Mount a filesystem that does nothing: names in memory, data dropped
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    /// Directory to mount on
    dir: PathBuf,
    /// Number of threads that read requests from /dev/fuse; 0 for as many as `ubtrfs mount` uses
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Do not use io_uring
    #[arg(long)]
    no_io_uring: bool,
    /// Let the kernel collect small writes in its page cache
    #[arg(long)]
    writeback_cache: bool,
    /// Keep a processor awake while requests come one after the other
    #[arg(long)]
    idle_poll: bool,
    /// Let the kernel open and close files without sending requests
    #[arg(long)]
    no_open: bool,
    /// Refuse extended attributes, so that the kernel does not ask for them
    #[arg(long)]
    no_xattrs: bool,
    /// Mount for root alone, whose permissions the kernel does not check
    #[arg(long)]
    no_allow_other: bool,
    /// Socket on which the server returns its numbers of requests, as Prometheus text
    #[arg(long, value_name = "PATH")]
    counts: Option<PathBuf>,
}

/// Serves requests until the mount is unmounted or a signal ends this process.
pub(crate) fn run(args: &Args) -> Result<()> {
    let allow_other = !args.no_allow_other;
    let mount = MountConfig { fsname: "null".into(), subtype: "bench-null", allow_other, ..MountConfig::default() };
    let mut features = FEATURES;
    features.set(Features::WRITEBACK_CACHE, args.writeback_cache);
    features.set(Features::ATOMIC_O_TRUNC, !args.no_open);
    features.set(Features::POSIX_ACL, allow_other && !args.no_xattrs);
    let config = Config {
        features,
        limits: InitLimits { max_write: MAX_WRITE, max_background: MAX_BACKGROUND },
        transport: if args.no_io_uring { Transport::DevFuse } else { Transport::Auto },
        nr_threads: args.threads,
        idle_poll: if args.idle_poll { IdlePolling::On } else { IdlePolling::default() },
    };
    let device = ubtrfs_fuse::mount(&args.dir, &mount)?;
    let connection = Connection::open(device, &config).context("the FUSE session failed")?;
    if let Some(path) = &args.counts {
        let listener = UnixListener::bind(path).with_context(|| format!("cannot listen on {}", path.display()))?;
        let counts = connection.counts();
        std::thread::spawn(move || {
            for mut client in listener.incoming().flatten() {
                let _ = client.write_all(counts.text().as_bytes());
            }
        });
    }
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let dir = args.dir.clone();
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            let _ = rustix::mount::unmount(&dir, rustix::mount::UnmountFlags::DETACH);
        }
    });
    println!("mounted on {}", args.dir.display());
    let _ = io::stdout().flush();
    let (no_open, no_xattrs) = (args.no_open, args.no_xattrs);
    let server = NullServer { state: Mutex::new(NodeTable::new()), no_open, no_xattrs };
    connection.serve(server).context("the FUSE session failed")
}

/// The lifetime of names and attributes. This constant and the ones below equal those of the server of ubtrfs, except
/// that [`FEATURES`] lacks some features (N1).
const TTL: Duration = Duration::from_secs(3600);
/// `FOPEN_KEEP_CACHE`, `FOPEN_PARALLEL_DIRECT_WRITES`.
const OPEN_FLAGS: u32 = 1 << 1 | 1 << 6;
const MAX_WRITE: u32 = 1 << 20;
const MAX_BACKGROUND: u16 = 64;
const FEATURES: Features = Features::PARALLEL_DIROPS
    .union(Features::DO_READDIRPLUS)
    .union(Features::CACHE_SYMLINKS)
    .union(Features::ATOMIC_O_TRUNC)
    .union(Features::DONT_MASK)
    .union(Features::HANDLE_KILLPRIV_V2);

struct NullServer {
    state: Mutex<NodeTable>,
    no_open: bool,
    no_xattrs: bool,
}

struct NodeTable {
    nodes: HashMap<u64, NullNode>,
    next: u64,
}

struct NullNode {
    attr: FuseAttr,
    target: Vec<u8>,
    dir: DirectoryNames,
}

/// The names of a directory in the order of their creation. So a position in the directory stays valid when other names
/// are added or removed.
#[derive(Default)]
struct DirectoryNames {
    by_name: HashMap<Vec<u8>, (u64, u64)>,
    by_cookie: BTreeMap<u64, Vec<u8>>,
    next: u64,
}

impl DirectoryNames {
    fn insert(&mut self, name: &[u8], ino: u64) {
        // Positions 1 and 2 are `.` and `..`.
        let cookie = self.next + 3;
        self.next += 1;
        if let Some((old, _)) = self.by_name.insert(name.to_owned(), (cookie, ino)) {
            self.by_cookie.remove(&old);
        }
        self.by_cookie.insert(cookie, name.to_owned());
    }

    fn remove(&mut self, name: &[u8]) -> Option<u64> {
        let (cookie, ino) = self.by_name.remove(name)?;
        self.by_cookie.remove(&cookie);
        Some(ino)
    }

    fn get(&self, name: &[u8]) -> Option<u64> {
        self.by_name.get(name).map(|(_, ino)| *ino)
    }
}

impl NodeTable {
    fn new() -> Self {
        let mut state = Self { nodes: HashMap::new(), next: ROOT };
        state.add(New::of(DIRECTORY, 0o755, 0), (0, 0));
        state
    }

    fn add(&mut self, new: New<'_>, (uid, gid): (u32, u32)) -> FuseAttr {
        let mut attr = FuseAttr {
            ino: self.next,
            size: new.target.len() as u64,
            mode: new.kind | new.mode & 0o7777 & !new.umask,
            nlink: 1,
            uid,
            gid,
            rdev: new.rdev,
            blksize: 4096,
            ..FuseAttr::default()
        };
        let now = now();
        attr.set_atime(now);
        attr.set_mtime(now);
        attr.set_ctime(now);
        self.nodes.insert(self.next, NullNode { attr, target: new.target.to_vec(), dir: DirectoryNames::default() });
        self.next += 1;
        attr
    }

    fn node(&mut self, ino: u64) -> Result<&mut NullNode, Errno> {
        self.nodes.get_mut(&ino).ok_or(Errno::NOENT)
    }

    fn child(&mut self, dir: u64, name: &[u8]) -> Result<u64, Errno> {
        self.node(dir)?.dir.get(name).ok_or(Errno::NOENT)
    }

    fn make(&mut self, req: &FuseRequest<'_>, name: &[u8], new: New<'_>) -> Result<EntryReply, Errno> {
        if self.node(req.node)?.dir.get(name).is_some() {
            return Err(Errno::EXIST);
        }
        let attr = self.add(new, (req.uid, req.gid));
        self.node(req.node)?.dir.insert(name, attr.ino);
        Ok(entry(attr))
    }

    fn lookup(&mut self, dir: u64, name: &[u8]) -> Result<EntryReply, Errno> {
        match self.child(dir, name) {
            Ok(ino) => self.node(ino).map(|node| entry(node.attr)),
            // Let the kernel cache that the name does not exist.
            Err(Errno::NOENT) => Ok(EntryReply::none(TTL)),
            Err(errno) => Err(errno),
        }
    }

    fn setattr(&mut self, node: u64, set: &Setattr) -> Result<FuseAttr, Errno> {
        let attr = &mut self.node(node)?.attr;
        attr.mode = set.mode().map_or(attr.mode, |mode| attr.mode & !0o7777 | mode & 0o7777);
        attr.uid = set.uid().unwrap_or(attr.uid);
        attr.gid = set.gid().unwrap_or(attr.gid);
        attr.size = set.size().unwrap_or(attr.size);
        if let Some(time) = set.atime() {
            attr.set_atime(time.unwrap_or_else(now));
        }
        if let Some(time) = set.mtime() {
            attr.set_mtime(time.unwrap_or_else(now));
        }
        Ok(*attr)
    }

    fn remove(&mut self, dir: u64, name: &[u8]) -> Result<(), Errno> {
        let ino = self.node(dir)?.dir.remove(name).ok_or(Errno::NOENT)?;
        let node = self.node(ino)?;
        node.attr.nlink = node.attr.nlink.saturating_sub(1);
        if node.attr.nlink == 0 {
            self.nodes.remove(&ino);
        }
        Ok(())
    }

    fn rmdir(&mut self, dir: u64, name: &[u8]) -> Result<(), Errno> {
        let ino = self.child(dir, name)?;
        if !self.node(ino)?.dir.by_name.is_empty() {
            return Err(Errno::NOTEMPTY);
        }
        self.remove(dir, name)
    }

    fn rename(&mut self, dir: u64, name: &[u8], new_dir: u64, new_name: &[u8]) -> Result<(), Errno> {
        let ino = self.child(dir, name)?;
        if self.child(new_dir, new_name).is_ok() {
            self.remove(new_dir, new_name)?;
        }
        self.node(dir)?.dir.remove(name);
        self.node(new_dir)?.dir.insert(new_name, ino);
        Ok(())
    }

    fn link(&mut self, node: u64, dir: u64, name: &[u8]) -> Result<EntryReply, Errno> {
        let attr = &mut self.node(node)?.attr;
        attr.nlink += 1;
        let attr = *attr;
        self.node(dir)?.dir.insert(name, node);
        Ok(entry(attr))
    }

    fn truncate(&mut self, node: u64) -> Result<(), Errno> {
        self.node(node)?.attr.size = 0;
        Ok(())
    }

    /// Calls `add` with the position, name and attributes of each entry after `cookie`, until `add` reports that the
    /// buffer is full.
    fn entries(
        &mut self,
        dir: u64,
        cookie: u64,
        mut add: impl FnMut(u64, &[u8], FuseAttr) -> bool,
    ) -> Result<(), Errno> {
        let dir = self.nodes.get(&dir).ok_or(Errno::NOENT)?;
        for (at, name) in [(1, b"." as &[u8]), (2, b"..")] {
            if at > cookie && !add(at, name, dir.attr) {
                return Ok(());
            }
        }
        for (at, name) in dir.dir.by_cookie.range(cookie + 1..) {
            let node = dir.dir.get(name).and_then(|ino| self.nodes.get(&ino));
            if node.is_some_and(|node| !add(*at, name, node.attr)) {
                break;
            }
        }
        Ok(())
    }
}

/// The attributes of a new inode.
struct New<'a> {
    kind: u32,
    mode: u32,
    umask: u32,
    rdev: u32,
    target: &'a [u8],
}

impl New<'_> {
    fn of(kind: u32, mode: u32, umask: u32) -> Self {
        Self { kind, mode, umask, rdev: 0, target: &[] }
    }
}

fn entry(attr: FuseAttr) -> EntryReply {
    EntryReply { node: attr.ino, generation: 0, attr, ttl: TTL, attr_ttl: TTL }
}

fn now() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Time { sec: i64::try_from(since.as_secs()).unwrap_or_default(), nsec: since.subsec_nanos() }
}

const ROOT: u64 = 1;
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const O_TRUNC: i32 = 0o1000;

impl Handler for NullServer {
    fn handle(&self, req: &FuseRequest<'_>, reply: &mut Reply<'_>, _place: &WorkerPlace<'_>) -> Result<(), Errno> {
        let node = req.node;
        match req.operation {
            Operation::Lookup { name } => reply.entry(&self.state.lock().lookup(node, name)?),
            Operation::Getattr => reply.attr(TTL, &self.state.lock().node(node)?.attr),
            Operation::Setattr(set) => reply.attr(TTL, &self.state.lock().setattr(node, &set)?),
            Operation::Readlink => reply.data(&self.state.lock().node(node)?.target),
            Operation::Mknod { name, mode, rdev, umask } => {
                let new = New { rdev, ..New::of(REGULAR, mode, umask) };
                reply.entry(&self.state.lock().make(req, name, new)?);
            }
            Operation::Mkdir { name, mode, umask } => {
                reply.entry(&self.state.lock().make(req, name, New::of(DIRECTORY, mode, umask))?);
            }
            Operation::Symlink { name, target } => {
                let new = New { target, ..New::of(SYMLINK, 0o777, 0) };
                reply.entry(&self.state.lock().make(req, name, new)?);
            }
            Operation::Create { .. } | Operation::Open { .. } if self.no_open => return Err(Errno::NOSYS),
            Operation::Create { name, mode, umask, .. } => {
                reply.created(&self.state.lock().make(req, name, New::of(REGULAR, mode, umask))?, 0, OPEN_FLAGS);
            }
            Operation::Link { node: old, name } => reply.entry(&self.state.lock().link(old, node, name)?),
            Operation::Unlink { name } => self.state.lock().remove(node, name)?,
            Operation::Rmdir { name } => self.state.lock().rmdir(node, name)?,
            Operation::Rename { name, new_parent, new_name, .. } => {
                self.state.lock().rename(node, name, new_parent, new_name)?;
            }
            Operation::Open { flags } => {
                if flags & O_TRUNC != 0 {
                    self.state.lock().truncate(node)?;
                }
                reply.opened(0, OPEN_FLAGS);
            }
            Operation::Read { offset, size } => {
                let end = self.state.lock().node(node)?.attr.size;
                let len = end.saturating_sub(offset).min(u64::from(size));
                reply.fill(usize::try_from(len).unwrap_or(0), |room| {
                    room.fill(0);
                    Ok::<_, Errno>(room.len())
                })?;
            }
            Operation::Write { offset, data, .. } => {
                let mut state = self.state.lock();
                let size = &mut state.node(node)?.attr.size;
                *size = (*size).max(offset + data.len() as u64);
                reply.written(u32::try_from(data.len()).unwrap_or(u32::MAX));
            }
            Operation::Release { .. } | Operation::Fsync { .. } | Operation::Fsyncdir { .. } => {}
            Operation::Readdir { offset, size } => {
                reply.limit(size);
                let add = |at, name: &[u8], attr: FuseAttr| reply.dirent(attr.ino, at, attr.mode >> 12, name);
                self.state.lock().entries(node, offset, add)?;
            }
            Operation::Readdirplus { offset, size } => {
                reply.limit(size);
                let add = |at, name: &[u8], attr| reply.dirent_plus(&entry(attr), at, name);
                self.state.lock().entries(node, offset, add)?;
            }
            Operation::Statfs => {
                const BLOCKS: u64 = 1 << 40;
                let (blocks, bfree, bavail) = (BLOCKS, BLOCKS, BLOCKS);
                let (bsize, frsize, namelen) = (4096, 4096, 255);
                reply.statfs(&Statfs { blocks, bfree, bavail, bsize, frsize, namelen, ..Statfs::default() });
            }
            Operation::Getxattr { .. } if !self.no_xattrs => {
                self.state.lock().node(node)?;
                return Err(Errno::NODATA);
            }
            Operation::Listxattr { size } if !self.no_xattrs => match size {
                0 => reply.xattr_size(0),
                _ => reply.data(&[]),
            },
            _ => return Err(Errno::NOSYS),
        }
        Ok(())
    }

    fn forget(&self, _node: u64, _count: u64) {}
}
