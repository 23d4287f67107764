//! Commands on a mount whose server, or whose control socket, belongs to a hostile user.
//!
//! Every command of the program runs, as root and as another user, on each name of a mount whose server shows links to
//! files of root, devices, FIFOs, and names that change with each lookup. The control socket answers as a real server
//! does, or with garbage, or with text that controls a terminal. After each command:
//!
//! - Every descriptor that arrived is a regular file or directory of the mount.
//! - No file outside of the mount has changed.
//! - The program printed no control characters.
//! - If the socket belongs to neither root, the caller nor the user who mounted, nothing at all arrived.

use std::fs::{File, OpenOptions};
use std::io::{IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::common::all_commands;
use rustix::fs::{FileType, Gid, Uid, fstat};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use tempfile::TempDir;
use ubtrfs_control::{CommandCaller, CommandContext, CommandFailure, CommandStream, Host, OpenFile, Request, execute};
use ubtrfs_device::MemoryDevice;
use ubtrfs_fs::{Fs, InodeId, Job, MountOptions, NewInode};
use ubtrfs_fuse::protocol::{EntryReply, Features, FuseAttr, FuseRequest, InitLimits, Operation, Reply, Statfs};
use ubtrfs_fuse::transport::{Config, Connection, Handler, IdlePolling, Transport, WorkerPlace};
use ubtrfs_testkit::capability;

/// The user who mounts, and listens on the socket.
const HOSTILE: u32 = 65534;
/// A user who is neither root nor [`HOSTILE`].
const OTHER: u32 = 1;

/// Names in the root of the hostile mount.
const NAMES: [&str; 11] =
    [".", "file", "dir", "link", "dirlink", "flip", "device", "fifo", "missing", "image", "flipimage"];

const ROOT: u64 = 1;
const FILE: u64 = 2;
const DIR: u64 = 3;
const LINK: u64 = 4;
const DIRLINK: u64 = 5;
const DEVICE: u64 = 6;
const FIFO: u64 = 7;
const MADE: u64 = 8;
const IMAGE: u64 = 9;

/// The server of the mount.
pub(crate) struct HostileServer {
    /// The name of the socket that the server tells.
    socket: Vec<u8>,
    /// The targets of the links.
    file: PathBuf,
    dir: PathBuf,
    image: PathBuf,
    lookups: Arc<AtomicU64>,
    /// The name `flaky` is found by each lookup whose number is a multiple of this.
    period: Arc<AtomicU64>,
}

fn attr(ino: u64) -> FuseAttr {
    let (mode, rdev) = match ino {
        ROOT | DIR => (0o040_777, 0),
        LINK | DIRLINK | IMAGE => (0o120_777, 0),
        // /dev/zero
        DEVICE => (0o020_666, 0x105),
        FIFO => (0o010_666, 0),
        _ => (0o100_666, 0),
    };
    FuseAttr { ino, mode, rdev, nlink: 1, size: 4096, uid: HOSTILE, gid: HOSTILE, blksize: 4096, ..FuseAttr::default() }
}

fn entry(ino: u64) -> EntryReply {
    EntryReply { node: ino, attr: attr(ino), ..EntryReply::default() }
}

impl Handler for HostileServer {
    fn handle(&self, req: &FuseRequest<'_>, reply: &mut Reply<'_>, _place: &WorkerPlace<'_>) -> Result<(), Errno> {
        match req.operation {
            Operation::Lookup { name } => {
                let nr = self.lookups.fetch_add(1, Ordering::Relaxed);
                reply.entry(&entry(match name {
                    b"file" => FILE,
                    b"dir" => DIR,
                    b"link" => LINK,
                    b"dirlink" => DIRLINK,
                    b"device" => DEVICE,
                    b"fifo" => FIFO,
                    b"image" => IMAGE,
                    b"flipimage" if !nr.is_multiple_of(3) => IMAGE,
                    b"flipimage" => FILE,
                    b"flaky" if !nr.is_multiple_of(self.period.load(Ordering::Relaxed)) => return Err(Errno::NOENT),
                    b"flaky" => IMAGE,
                    b"flip" if nr.is_multiple_of(2) => LINK,
                    b"flip" if nr.is_multiple_of(3) => DIR,
                    b"flip" => FILE,
                    _ => return Err(Errno::NOENT),
                }));
            }
            Operation::Getattr | Operation::Setattr(_) => reply.attr(Duration::ZERO, &attr(req.node)),
            Operation::Readlink => {
                let target = match req.node {
                    LINK => &self.file,
                    IMAGE => &self.image,
                    _ => &self.dir,
                };
                reply.data(target.as_os_str().as_encoded_bytes());
            }
            Operation::Create { .. } => reply.created(&entry(MADE), 0, 0),
            Operation::Mknod { .. } | Operation::Symlink { .. } => reply.entry(&entry(MADE)),
            Operation::Mkdir { .. } => reply.entry(&entry(DIR)),
            Operation::Unlink { .. } | Operation::Rmdir { .. } | Operation::Release { .. } => {}
            Operation::Fsync { .. } | Operation::Fsyncdir { .. } => {}
            Operation::Open { .. } => reply.opened(0, 0),
            Operation::Read { size, .. } => {
                reply.fill(size as usize, |room| {
                    room.fill(0x1b);
                    Ok::<_, Errno>(room.len())
                })?;
            }
            Operation::Write { data, .. } => reply.written(data.len() as u32),
            Operation::Readdir { offset: 0, size } => {
                reply.limit(size);
                for (at, name) in NAMES.iter().enumerate().skip(1) {
                    reply.dirent(at as u64 + 1, at as u64 + 1, 0, name.as_bytes());
                }
            }
            Operation::Readdir { .. } | Operation::Readdirplus { .. } => {}
            Operation::Statfs => reply.statfs(&Statfs { bsize: 4096, frsize: 4096, namelen: 255, ..Statfs::default() }),
            Operation::Getxattr { name: b"ubtrfs.control", size } => match size {
                0 => reply.xattr_size(self.socket.len() as u32),
                _ => reply.data(&self.socket),
            },
            Operation::Getxattr { .. } => return Err(Errno::NODATA),
            _ => return Err(Errno::NOSYS),
        }
        Ok(())
    }

    fn forget(&self, _node: u64, _count: u64) {}
}

/// A mount of [`HostileServer`], made by root for a user.
pub(crate) struct HostileMount {
    pub(crate) dir: TempDir,
    server: Option<JoinHandle<()>>,
}

impl HostileMount {
    pub(crate) fn make(user: u32, server: HostileServer) -> Self {
        let dir = TempDir::with_prefix("ubtrfs-hostile-mount-").unwrap();
        let device: OwnedFd = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap().into();
        let data = format!("fd={},rootmode=40000,user_id={user},group_id={user},allow_other\0", device.as_raw_fd())
            .into_bytes();
        let data = std::ffi::CStr::from_bytes_with_nul(&data).unwrap();
        // The mount allows devices, as a mount of root may.
        rustix::mount::mount("hostile", dir.path(), "fuse.ubtrfs", MountFlags::empty(), data).unwrap();
        let config = Config {
            features: Features::empty(),
            limits: InitLimits { max_write: 1 << 17, max_background: 12 },
            transport: Transport::DevFuse,
            nr_threads: 2,
            idle_poll: IdlePolling::default(),
        };
        let server = thread::spawn(move || {
            Connection::open(device, &config).unwrap().serve(server).unwrap();
        });
        Self { dir, server: Some(server) }
    }

    /// Fails if a command has unmounted it.
    fn check(&self) {
        assert_eq!(rustix::fs::statfs(self.dir.path()).unwrap().f_type, 0x6573_5546, "the mount is gone");
    }
}

impl Drop for HostileMount {
    fn drop(&mut self) {
        while rustix::mount::unmount(self.dir.path(), UnmountFlags::DETACH).is_ok() {}
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

/// A descriptor that arrived on the socket.
#[derive(Debug)]
struct Arrived {
    device: u64,
    kind: FileType,
}

/// The answers of the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// As a real server whose files are all snapshots or one file.
    Real,
    /// That the target has to grow first, and then nothing.
    Odd,
    /// Text that clears a terminal.
    Text,
    /// Progress without an end.
    Endless,
    /// Nothing.
    Silent,
    /// An answer byte by byte, that never ends.
    Dripping,
}

/// The hostile user's end of the control socket.
pub(crate) struct Listener {
    pub(crate) name: Vec<u8>,
    arrived: Arc<Mutex<Vec<Arrived>>>,
    /// Bytes of requests that arrived.
    nr_bytes: Arc<AtomicU64>,
    manner: Arc<Mutex<Manner>>,
}

/// A filesystem that answers for the hostile mount: directories stand for a read-only snapshot, files for one file.
struct Answers {
    snapshot: InodeId,
    dir: InodeId,
    file: InodeId,
}

impl Host for Answers {
    fn owner(&self) -> Option<u32> {
        None
    }

    fn file(&self, _file: std::os::fd::BorrowedFd<'_>) -> Result<OpenFile, CommandFailure> {
        Ok(OpenFile::of_image(self.dir))
    }
}

impl Listener {
    /// Listens as this user on a new name, or on `name`.
    pub(crate) fn start(user: u32, name: Option<Vec<u8>>) -> Self {
        static NR: AtomicU64 = AtomicU64::new(0);
        let nr = NR.fetch_add(1, Ordering::Relaxed);
        let name = name.unwrap_or_else(|| format!("ubtrfs-hostile-{}-{nr}", std::process::id()).into_bytes());
        let (arrived, nr_bytes) = (Arc::<Mutex<Vec<Arrived>>>::default(), Arc::<AtomicU64>::default());
        let manner = Arc::new(Mutex::new(Manner::Real));
        let (ready, is_ready) = mpsc::channel();
        let (at, list, count, how) = (name.clone(), arrived.clone(), nr_bytes.clone(), manner.clone());
        thread::spawn(move || {
            let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
            rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&at).unwrap()).unwrap();
            ready.send(()).unwrap();
            let device = Arc::new(MemoryDevice::new(256 << 20));
            ubtrfs_mkfs::make(device.as_ref(), &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
            let fs = Fs::open(vec![device], MountOptions::default()).unwrap();
            let owner = ubtrfs_fs::Caller { uid: 0, gid: 0, umask: 0 };
            let dir = fs.create(fs.root(), b"d", NewInode::dir(0o777), &owner).unwrap().id;
            let file = fs.create(fs.root(), b"f", NewInode::file(0o777), &owner).unwrap().id;
            let caller = CommandCaller::of_image(0, 0);
            let host = Answers { snapshot: fs.root(), dir, file };
            for stream in listener.incoming().flatten() {
                let how = *how.lock().unwrap();
                serve(stream, &list, &count, how, &fs, &host, &caller);
            }
        });
        is_ready.recv().unwrap();
        Self { name, arrived, nr_bytes, manner }
    }
}

/// Receives a request, notes its descriptors, and answers.
fn serve(
    mut stream: UnixStream,
    arrived: &Mutex<Vec<Arrived>>,
    nr_bytes: &AtomicU64,
    manner: Manner,
    fs: &Fs,
    host: &Answers,
    caller: &CommandCaller,
) {
    stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let mut files: Vec<OwnedFd> = Vec::new();
    let mut bytes = Vec::new();
    let whole = |bytes: &[u8]| {
        let head: Option<[u8; 4]> = bytes.get(..4).map(|head| head.try_into().unwrap());
        head.is_some_and(|head| bytes.len() >= 4 + u32::from_le_bytes(head) as usize)
    };
    while !whole(&bytes) {
        let mut piece = [0; 4096];
        let mut space = [const { MaybeUninit::<u8>::uninit() }; rustix::cmsg_space!(ScmRights(16))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(&stream, &mut [IoSliceMut::new(&mut piece)], &mut control, RecvFlags::CMSG_CLOEXEC)
            .map(|got| got.bytes);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                files.extend(received);
            }
        }
        match got {
            Ok(len) if len > 0 => bytes.extend(&piece[..len]),
            _ => break,
        }
    }
    nr_bytes.fetch_add(bytes.len() as u64, Ordering::SeqCst);
    for file in &files {
        let stat = fstat(file).unwrap();
        let kind = FileType::from_raw_mode(stat.st_mode);
        arrived.lock().unwrap().push(Arrived { device: stat.st_dev, kind });
    }
    if !whole(&bytes) {
        return;
    }
    let text = "\u{1b}[2J\u{7}\u{202e}evil\r";
    let failed = |text: &str| serde_json::json!({"failed": {"errno": 5, "text": text, "has_advice": true}});
    let answer = match manner {
        Manner::Text => {
            let progress = serde_json::json!({"progress": {"done": 1, "total": 2, "step": text}});
            send(&mut stream, &progress);
            failed(text)
        }
        Manner::Endless => {
            let progress = serde_json::to_vec(&serde_json::json!({"progress": {"done": 1, "total": 2}})).unwrap();
            let frame = [&(progress.len() as u32).to_le_bytes(), &progress[..]].concat().repeat(100);
            while stream.write_all(&frame).is_ok() {}
            return;
        }
        Manner::Silent | Manner::Dripping => {
            drop(files);
            thread::spawn(move || {
                let _ = stream.write_all(&1000_u32.to_le_bytes()[..if manner == Manner::Silent { 0 } else { 4 }]);
                for _ in 0..300 {
                    thread::sleep(Duration::from_millis(100));
                    if manner == Manner::Dripping {
                        let _ = stream.write_all(b" ");
                    }
                }
            });
            return;
        }
        Manner::Odd => serde_json::json!({"done": {"file": {"grow_first": {"size": 1_u64 << 40}}}}),
        Manner::Real => {
            let frame: serde_json::Value = serde_json::from_slice(&bytes[4..]).unwrap();
            match serde_json::from_value::<Request>(frame["request"].clone()) {
                Ok(request) if !matches!(request, Request::AwaitUnmount) => {
                    let has_stream = request.stream().is_some();
                    let mut bytes = tempfile::tempfile().unwrap();
                    let is_subvolume = matches!(request, Request::Subvolume(_));
                    let stands_for = |file: &OwnedFd| match FileType::from_raw_mode(fstat(file).unwrap().st_mode) {
                        FileType::Directory if is_subvolume => OpenFile::of_image(host.snapshot),
                        FileType::Directory => OpenFile::of_image(host.dir),
                        _ => OpenFile::of_image(host.file),
                    };
                    let opened: Vec<_> = files.iter().map(stands_for).collect();
                    let job = Job::new();
                    let file = has_stream.then_some(CommandStream::File(bytes.as_fd()));
                    let context = CommandContext { fs, host, caller, files: &opened, stream: file, job: &job };
                    let done = execute(&context, request);
                    let mut all = vec![0];
                    bytes.rewind().unwrap();
                    bytes.read_to_end(&mut all).unwrap();
                    for piece in all[1..].chunks(1000) {
                        send_frame(&mut stream, &[&[0], piece].concat());
                    }
                    match done {
                        Ok(done) => serde_json::json!({"done": done}),
                        Err(failure) => serde_json::json!({"failed": failure}),
                    }
                }
                _ => failed("no"),
            }
        }
    };
    drop(files);
    send(&mut stream, &answer);
}

fn send(stream: &mut UnixStream, answer: &serde_json::Value) {
    send_frame(stream, &serde_json::to_vec(answer).unwrap());
}

fn send_frame(stream: &mut UnixStream, bytes: &[u8]) {
    let _ = stream.write_all(&(bytes.len() as u32).to_le_bytes()).and_then(|()| stream.write_all(bytes));
}

/// Files of root that a hostile mount points to.
pub(crate) struct Victims {
    pub(crate) dir: TempDir,
}

impl Victims {
    pub(crate) fn make() -> Self {
        let dir = TempDir::with_prefix("ubtrfs-victims-").unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::create_dir(dir.path().join("dir")).unwrap();
        std::fs::write(dir.path().join("dir/other"), "other").unwrap();
        std::fs::write(dir.path().join("secret"), "a secret of root").unwrap();
        crate::common::ok(crate::common::ubtrfs([
            "mkfs",
            "-q",
            "-b",
            "128M",
            dir.path().join("image").to_str().unwrap(),
        ]));
        std::fs::set_permissions(dir.path().join("secret"), std::fs::Permissions::from_mode(0o600)).unwrap();
        Self { dir }
    }

    /// The state of all files.
    pub(crate) fn state(&self) -> String {
        let mut all = String::new();
        for path in ["", "dir", "dir/other", "secret", "image"] {
            let path = self.dir.path().join(path);
            let meta = path.symlink_metadata().unwrap();
            let times = (meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec());
            let names = std::fs::read_dir(&path).map(|list| list.count());
            // A write changes the times, too.
            let content = if path.ends_with("image") { Vec::new() } else { std::fs::read(&path).unwrap_or_default() };
            all += &format!("{path:?} {:o} {} {times:?} {names:?} {content:?}\n", meta.mode(), meta.uid());
        }
        all
    }
}

/// The arguments of each command that may work on a mount, a line each; `{}` stands for a path in it. Commands on images
/// alone, and those without arguments, are in [`NOT_ON_MOUNTS`].
const ON_MOUNTS: &str = include_str!("programs/hostile_commands.txt");

/// Commands that work on images or on the host alone.
const NOT_ON_MOUNTS: &[&str] = &["mount", "import", "export", "cat", "stat", "truncate", "getfattr"];

#[test]
fn every_command_is_tried_on_a_hostile_mount() {
    let words = |line: &str, count| line.split(' ').take(count).collect::<Vec<_>>().join(" ");
    for command in all_commands() {
        let count = command.split(' ').count();
        let is_listed = ON_MOUNTS.lines().any(|line| words(line, count) == command);
        assert!(is_listed || NOT_ON_MOUNTS.contains(&command.as_str()), "add `{command}` to one of the lists");
    }
}

/// Runs a command as a user, with a pipe as its input and a file as its output.
fn run(line: &str, name: &str, dir: &Path, user: u32) -> Output {
    let mount = dir.to_str().unwrap();
    let path = match name {
        "." => mount.to_owned(),
        name => format!("{mount}/{name}"),
    };
    let args = line.split(' ').map(|word| word.replace("{dir}", mount).replace("{}", &path));
    let program = env!("CARGO_BIN_EXE_ubtrfs");
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "30"]);
    if user != 0 {
        command.args(["setpriv", &format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups"]);
    }
    command.arg(program).args(args).env("LC_ALL", "C");
    let (input, mut writer) = std::io::pipe().unwrap();
    let mut output = tempfile::tempfile().unwrap();
    // The start of a send stream.
    writer.write_all(b"btrfs-stream\0\x01\0\0\0").unwrap();
    drop(writer);
    command.stdin(Stdio::from(OwnedFd::from(input))).stdout(Stdio::from(output.try_clone().unwrap()));
    let mut done = command.stderr(Stdio::piped()).output().unwrap();
    output.rewind().unwrap();
    output.read_to_end(&mut done.stdout).unwrap();
    done
}

/// Fails if a descriptor arrived that the server should not have.
fn judge(listener: &Listener, device: u64, shown: &str) {
    for file in listener.arrived.lock().unwrap().drain(..) {
        let in_mount = file.device == device && matches!(file.kind, FileType::RegularFile | FileType::Directory);
        assert!(in_mount, "{shown}: the server received {file:?}");
    }
}

fn no_control_characters(output: &Output, shown: &str) {
    for text in [&output.stdout, &output.stderr] {
        // A send stream may have any bytes.
        if text.starts_with(b"btrfs-stream") {
            continue;
        }
        let text = String::from_utf8_lossy(text);
        let is_bad = |c: char| (c.is_control() && c != '\n' && c != '\t') || c == '\u{202e}';
        assert!(!text.contains(is_bad), "{shown}: {text:?}");
    }
}

fn hostile_server(socket: &[u8], victims: &Victims) -> HostileServer {
    HostileServer {
        socket: socket.to_vec(),
        file: victims.dir.path().join("secret"),
        dir: victims.dir.path().join("dir"),
        image: victims.dir.path().join("image"),
        lookups: Arc::default(),
        period: Arc::new(AtomicU64::new(2)),
    }
}

fn is_possible() -> bool {
    capability::root() && capability::fuse() && capability::program("setpriv")
}

/// A mount of a hostile user, whose names lead to files of root, and which names a listener of that user as its control
/// socket. `None` if this is impossible here.
pub(crate) fn scene() -> Option<(Victims, Listener, HostileMount)> {
    if !is_possible() {
        return None;
    }
    let victims = Victims::make();
    let listener = Listener::start(HOSTILE, None);
    let mount = HostileMount::make(HOSTILE, hostile_server(&listener.name, &victims));
    Some((victims, listener, mount))
}

#[test]
fn a_hostile_mount_gets_its_own_files_only() {
    let Some((victims, listener, mount)) = scene() else { return };
    let dir = mount.dir.path();
    let device = std::fs::metadata(dir).unwrap().dev();
    let before = victims.state();
    for manner in [Manner::Real, Manner::Odd, Manner::Text] {
        *listener.manner.lock().unwrap() = manner;
        for line in ON_MOUNTS.lines() {
            let names: &[&str] = if manner == Manner::Real { &NAMES } else { &[".", "file", "flip"] };
            for name in names.iter().filter(|name| !line.starts_with("umount") || **name != ".") {
                for user in [0, OTHER] {
                    if user == OTHER && (manner != Manner::Real || !matches!(*name, "." | "link" | "flip" | "image")) {
                        continue;
                    }
                    let shown = format!("{line} on {name} by user {user} ({manner:?})");
                    let output = run(line, name, dir, user);
                    judge(&listener, device, &shown);
                    no_control_characters(&output, &shown);
                    assert_eq!(victims.state(), before, "{shown}");
                    mount.check();
                }
            }
        }
    }
    assert!(listener.nr_bytes.load(Ordering::SeqCst) > 0, "the server was asked");
}

#[test]
fn no_image_is_opened_by_names_that_fail_when_they_are_checked() {
    if !is_possible() {
        return;
    }
    let victims = Victims::make();
    let listener = Listener::start(HOSTILE, None);
    let server = hostile_server(&listener.name, &victims);
    let (lookups, period) = (server.lookups.clone(), server.period.clone());
    let mount = HostileMount::make(HOSTILE, server);
    let before = victims.state();
    for line in
        ["check", "mkfs -f", "inspect dump-super", "filesystem resize max", "rescue super-recover -y", "tune -m"]
    {
        for path in ["flaky", "./flaky", "/proc/self/cwd/flaky"] {
            for (first, every) in (1..7).map(|first| (first, 64)).chain([(0, 1), (0, 2), (0, 3)]) {
                // The first lookups of the name fail, and the ones after it, or each second or third one succeeds.
                lookups.store(64 - first, Ordering::SeqCst);
                period.store(every, Ordering::SeqCst);
                let mut command = crate::common::command(line.split(' '));
                let output = command.arg(path).current_dir(mount.dir.path()).output().unwrap();
                let shown = format!("{line} {path}, {first}/{every}: {output:?}");
                assert!(!output.status.success(), "{shown}");
                assert_eq!(victims.state(), before, "{shown}");
            }
        }
    }
}

#[test]
fn a_hostile_server_that_never_ends_its_answer_ends_no_patience() {
    let Some((_victims, listener, mount)) = scene() else { return };
    *listener.manner.lock().unwrap() = Manner::Endless;
    let output = run("filesystem sync {}", ".", mount.dir.path(), 0);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && stderr.lines().count() == 1, "{output:?}");
    assert!(stderr.contains("belongs to another user, sends messages without an end"), "{stderr}");
}

#[test]
fn root_unmounts_a_hostile_mount_within_a_few_seconds() {
    if !is_possible() {
        return;
    }
    let victims = Victims::make();
    for manner in [Manner::Silent, Manner::Dripping] {
        let listener = Listener::start(HOSTILE, None);
        *listener.manner.lock().unwrap() = manner;
        let mount = HostileMount::make(HOSTILE, hostile_server(&listener.name, &victims));
        let begun = Instant::now();
        let output = run("umount {}", ".", mount.dir.path(), 0);
        let (took, stderr) = (begun.elapsed(), String::from_utf8_lossy(&output.stderr).into_owned());
        let is_there = rustix::fs::statfs(mount.dir.path()).unwrap().f_type == 0x6573_5546;
        assert!(!is_there && output.status.code() == Some(1), "{manner:?}: {output:?}");
        assert!(stderr.contains("did not report its last commit") && stderr.contains("process "), "{stderr}");
        assert!(took < Duration::from_secs(8), "{manner:?}: {took:?}");
    }
}

#[test]
fn a_socket_of_a_stranger_gets_nothing() {
    if !is_possible() {
        return;
    }
    let victims = Victims::make();
    let listener = Listener::start(HOSTILE, None);
    let mount = HostileMount::make(0, hostile_server(&listener.name, &victims));
    let dir = mount.dir.path();
    for line in ON_MOUNTS.lines() {
        for (name, user) in [(".", 0), ("file", 0), ("file", OTHER)] {
            if line.starts_with("umount") && name == "." {
                continue;
            }
            let output = run(line, name, dir, user);
            let shown = format!("{line} on {name} by user {user}");
            assert!(listener.arrived.lock().unwrap().is_empty(), "{shown}");
            assert_eq!(listener.nr_bytes.load(Ordering::SeqCst), 0, "{shown}");
            // A store of snapshots is a directory like any other. It needs no answer.
            let needs_none = line.starts_with("remote ");
            assert!(needs_none || !output.status.success(), "{shown}: nobody has answered");
        }
    }
    let output = run("filesystem df {}", ".", dir, 0);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(stderr.contains(&format!("user {HOSTILE}")) && stderr.contains("network namespace"), "{stderr}");
}

/// Runs in a network namespace of its own, where nobody has the socket of the mount.
#[test]
#[ignore = "started by another test"]
fn imposter_in_another_namespace() {
    let Ok(dir) = std::env::var("UBTRFS_IMPOSTER_DIR") else { return };
    let dir = Path::new(&dir);
    let mut name = vec![0; 256];
    let len = rustix::fs::getxattr(dir, "ubtrfs.control", &mut name).unwrap();
    name.truncate(len);
    let output = run("filesystem defragment {}", "file", dir, 0);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && stderr.contains("network namespace"), "{stderr}");
    let listener = Listener::start(HOSTILE, Some(name));
    for line in ON_MOUNTS.lines().filter(|line| !line.starts_with("umount")) {
        let output = run(line, "file", dir, 0);
        assert!(!output.status.success(), "{line}");
        assert_eq!(listener.nr_bytes.load(Ordering::SeqCst), 0, "{line}");
    }
    println!("the imposter got nothing");
}

#[test]
fn a_user_who_takes_the_socket_name_in_another_namespace_gets_nothing() {
    if !is_possible() || !capability::program("unshare") {
        return;
    }
    let dir = TempDir::with_prefix("ubtrfs-honest-").unwrap();
    let (image, mount) = (dir.path().join("image"), dir.path().join("mount"));
    std::fs::create_dir(&mount).unwrap();
    let (image, mount) = (image.to_str().unwrap(), mount.to_str().unwrap());
    crate::common::ok(crate::common::ubtrfs(["mount", "--create", "256M", image, mount]));
    File::create(format!("{mount}/file")).unwrap().write_all(b"text").unwrap();
    let mut inside = Command::new("unshare");
    inside.arg("-n").arg(std::env::current_exe().unwrap());
    inside.args(["--exact", "hostile_server::imposter_in_another_namespace", "--ignored", "--nocapture"]);
    let output = inside.env("UBTRFS_IMPOSTER_DIR", mount).output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    crate::common::ok(crate::common::ubtrfs(["umount", mount]));
    assert!(stdout.contains("the imposter got nothing"), "{stdout}{}", String::from_utf8_lossy(&output.stderr));
}

/// Runs a function of `programs/less_rights.py`, after these words, on a path.
fn less_rights(words: &[&str], function: &str, path: &str) -> String {
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/programs/less_rights.py");
    let (first, words) = words.split_first().unwrap();
    let output = Command::new(first).args(words).args(["/usr/bin/python3", program, function, path]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn a_process_gains_no_rights_by_a_name_or_by_leaving_a_namespace() {
    // Users may not be able to run the first python3 on root's PATH.
    if !is_possible() || !capability::program("/usr/bin/python3") {
        return;
    }
    let dir = TempDir::with_prefix("ubtrfs-rights-").unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = |name: &str| crate::common::text(&dir.path().join(name));
    for name in ["mount", "bound"] {
        std::fs::create_dir(path(name)).unwrap();
    }
    crate::common::ok(crate::common::ubtrfs(["mount", "--create", "256M", &path("image"), &path("mount")]));
    std::fs::create_dir(path("mount/d")).unwrap();
    std::fs::set_permissions(path("mount/d"), std::fs::Permissions::from_mode(0o777)).unwrap();
    let run = |words: &[&str]| crate::common::ok(Command::new(words[0]).args(&words[1..]).output().unwrap());
    run(&["mount", "--bind", &path("mount/d"), &path("bound")]);
    run(&["mount", "-o", "remount,bind,ro", &path("bound")]);
    let user = ["setpriv", "--reuid=1", "--regid=1", "--clear-groups"];
    let read_only = less_rights(&user, "read_only_mount", &path("bound"));
    let bare_root = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"];
    let bare = less_rights(&bare_root, "root_without_capabilities", &path("mount"));
    let names: Vec<_> = std::fs::read_dir(path("mount/d")).unwrap().collect();
    run(&["umount", &path("bound")]);
    crate::common::ok(crate::common::ubtrfs(["umount", &path("mount")]));
    assert!(matches!(read_only.as_str(), "EROFS EROFS" | "EROFS SKIPPED"), "{read_only}");
    assert_eq!(bare, "EPERM EPERM");
    assert!(names.is_empty(), "{names:?}");
}
