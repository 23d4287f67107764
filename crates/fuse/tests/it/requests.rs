//! Tests of the requests that the kernel sends. Also tests rules that must hold even if the kernel omits some requests,
//! such as requests to open files.
//!
//! Method: this process serves a mount in memory, and programs in other processes use it. The server's own counts tell
//! which requests arrived.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tempfile::TempDir;
use ubtrfs_control::{Channel, Request, Response, file, filesystem};
use ubtrfs_fs::{Caller, Fs, InodeId, MountOptions, NewInode, XattrFlags};
use ubtrfs_fuse::transport::Transport;
use ubtrfs_fuse::{MountConfig, MountError, Session};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{CAPABILITY, Image, Medium, MediumDevice, btrfs_check, capability, check_medium};

pub(crate) struct Mount {
    below: Arc<MediumDevice>,
    dir: TempDir,
    server: JoinHandle<Result<(), MountError>>,
}

impl Mount {
    pub(crate) fn new(config: MountConfig) -> Self {
        Self::prepared(config, |_| ())
    }

    /// Makes a filesystem, lets `prepare` change it, and mounts it.
    pub(crate) fn prepared(config: MountConfig, prepare: impl FnOnce(&Fs)) -> Self {
        let below = Arc::new(MediumDevice::new(Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap()));
        let options = MountOptions { track_lookups: true, ..MountOptions::parse("commit=300").unwrap() };
        let fs = Fs::open(vec![below.clone()], options).unwrap();
        prepare(&fs);
        let dir = TempDir::with_prefix("ubtrfs-requests-").unwrap();
        let session = Session::mount(fs, dir.path(), &config).unwrap();
        Self { below, dir, server: std::thread::spawn(move || session.run()) }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The number of requests so far, by operation.
    pub(crate) fn requests(&self) -> BTreeMap<String, u64> {
        let stats = Request::Filesystem(filesystem::Request::Stats);
        let Response::Filesystem(filesystem::Response::Stats(text)) =
            Channel::mount(self.path()).unwrap().call(stats, &[]).unwrap()
        else {
            panic!("another answer")
        };
        let parse = |line: &str| {
            let rest = line.strip_prefix("ubtrfs_fuse_requests_total{opcode=\"")?;
            let (opcode, count) = rest.split_once("\"} ")?;
            Some((opcode.to_owned(), count.parse().unwrap()))
        };
        text.lines().filter_map(parse).collect()
    }

    /// The number of requests, by operation, while a program runs.
    pub(crate) fn requests_of(&self, program: &str) -> BTreeMap<String, u64> {
        let before = self.requests();
        python(self.path(), program);
        let mut requests = self.requests();
        requests.iter_mut().for_each(|(opcode, count)| *count -= before.get(opcode).copied().unwrap_or(0));
        requests
    }

    /// Unmounts, and checks the image.
    pub(crate) fn end(self) {
        self.end_after(None);
    }

    /// Unmounts, and checks the image. If pages of a file were refused, unmounting must report that file.
    fn end_after(self, refused: Option<&str>) {
        let unmounted = ubtrfs_fuse::unmount(self.dir.path(), false);
        for ended in [unmounted, self.server.join().unwrap()] {
            let said = ended.err().map(|error| error.to_string());
            let expected = refused.map(|file| format!("pages of '/{file}'"));
            assert!(
                said.is_some() == expected.is_some()
                    && said.iter().zip(&expected).all(|(said, expected)| said.contains(expected)),
                "{said:?}"
            );
        }
        let medium = self.below.content();
        check_medium(&medium).unwrap();
        if capability::kernel_oracle() {
            let image = Image::empty(0).unwrap();
            medium.save(image.path()).unwrap();
            btrfs_check(image.path()).unwrap();
        }
    }
}

pub(crate) fn python(dir: &Path, program: &str) -> String {
    let output = Command::new("python3").args(["-c", program]).current_dir(dir).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

pub(crate) fn can_run() -> bool {
    capability::fuse() && capability::program("python3")
}

pub(crate) fn of(requests: &BTreeMap<String, u64>, opcode: &str) -> u64 {
    requests.get(opcode).copied().unwrap_or(0)
}

pub(crate) fn shared() -> MountConfig {
    MountConfig { allow_other: true, ..MountConfig::default() }
}

/// The calls of `tar x` for a hundred files.
const UNTAR: &str = r"
import os
for nr in range(100):
    fd = os.open('f%d' % nr, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(fd, bytes(5000))
    os.write(fd, bytes(5000))
    os.fchown(fd, 1000, 1000)
    os.fchmod(fd, 0o644)
    os.utime(fd, (1, 1))
    os.close(fd)
";

#[test]
fn requests_are_counted_by_operation() {
    if !can_run() {
        return;
    }
    for transport in [Transport::DevFuse, Transport::Auto] {
        let mount = Mount::new(MountConfig { transport, ..shared() });
        let requests = mount.requests_of(UNTAR);
        for (opcode, expected) in [("create", 100), ("setattr", 300), ("getxattr", 200)] {
            let found = of(&requests, opcode);
            assert!((expected..expected + 10).contains(&found), "{opcode} {found}: {requests:?}");
        }
        mount.end();
    }
}

#[test]
fn a_mount_without_extended_attributes_is_not_asked_for_them() {
    if !can_run() {
        return;
    }
    let config = MountConfig { no_xattrs: true, ..shared() };
    let mut program = None;
    let mount = Mount::prepared(config, |fs| program = Some(make_program(fs, fs.root(), b"program")));
    let requests = mount.requests_of(UNTAR);
    assert!(of(&requests, "getxattr") <= 1, "{requests:?}");
    python(
        mount.path(),
        r"
import errno, os
for call in (lambda: os.getxattr('f1', 'user.x'), lambda: os.setxattr('f1', 'user.x', b'1'), lambda: os.listxattr('f1')):
    try:
        call()
        raise SystemExit('extended attributes work')
    except OSError as error:
        assert error.errno == errno.EOPNOTSUPP, error
os.chmod('program', 0o777)
os.setuid(1000)
with open('program', 'r+b') as file:
    file.write(b'changed')
",
    );
    let below = mount.below.clone();
    mount.end();
    // A file loses its capability when its content changes, even if the kernel does not request the attribute first.
    let fs = Fs::open(vec![below], MountOptions::parse("ro").unwrap()).unwrap();
    assert!(fs.listxattr(program.unwrap()).unwrap().is_empty());
    fs.close().unwrap();
}

#[test]
fn a_running_program_is_not_truncated() {
    if !can_run() {
        return;
    }
    let dev_fuse = MountConfig { transport: Transport::DevFuse, ..shared() };
    for config in [shared(), dev_fuse, MountConfig { no_open: true, ..shared() }] {
        let mount = Mount::new(config);
        python(
            mount.path(),
            r"
import errno, os, shutil, subprocess
shutil.copy('/bin/sleep', 'program')
size = os.stat('program').st_size
for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
    running = [subprocess.Popen(['./program', '100']) for _ in range(2)]
    for program in running:
        try:
            os.open('program', flags | os.O_TRUNC)
            raise SystemExit('a running program was opened with O_TRUNC')
        except OSError as error:
            assert error.errno == errno.ETXTBSY, error
        assert os.stat('program').st_size == size
        program.kill()
        program.wait()
with open('program', 'rb') as file, open('/bin/sleep', 'rb') as original:
    assert file.read() == original.read()
subprocess.run(['./program', '0'], check=True)
os.close(os.open('program', os.O_RDONLY | os.O_TRUNC))
assert os.stat('program').st_size == 0
",
        );
        mount.end();
    }
}

/// Makes a file with a capability.
fn make_program(fs: &Fs, dir: InodeId, name: &[u8]) -> InodeId {
    let made = fs.create(dir, name, NewInode::file(0o777), &Caller::ROOT).unwrap().id;
    fs.write(made, 0, b"program").unwrap();
    fs.setxattr(made, b"security.capability", &CAPABILITY, XattrFlags::empty(), &Caller::ROOT).unwrap();
    fs.forget(made, 1);
    made
}

#[test]
fn a_refused_write_keeps_the_capability() {
    if !can_run() {
        return;
    }
    let config = MountConfig { no_xattrs: true, no_open: true, ..shared() };
    let (mut programs, mut before) = (Vec::new(), Vec::new());
    let mount = Mount::prepared(config, |fs| {
        let made = fs.create_subvolume(fs.root(), b"frozen", &Caller::ROOT).unwrap();
        let names =
            [(made, &b"program"[..]), (fs.root(), b"immutable"), (fs.root(), b"appended"), (fs.root(), b"free")];
        programs = names.map(|(dir, name)| make_program(fs, dir, name)).to_vec();
        fs.set_subvolume_read_only(made.root, true).unwrap();
        before = programs.iter().map(|id| fs.getattr(*id).unwrap().ctime).collect();
    });
    python(
        mount.path(),
        r"
import errno, fcntl, os, struct
def flags(name, value):
    fd = os.open(name, os.O_RDONLY)
    fcntl.ioctl(fd, 0x40086602, struct.pack('<Q', value))
    os.close(fd)
flags('immutable', 0x10)
flags('appended', 0x20)
for name, number in (('frozen/program', errno.EROFS), ('immutable', errno.EPERM), ('appended', errno.EPERM)):
    fd = os.open(name, os.O_RDWR)
    try:
        os.pwrite(fd, b'changed', 0)
        raise SystemExit('written: ' + name)
    except OSError as error:
        assert error.errno == number, (name, error)
    os.close(fd)
with open('free', 'r+b') as file:
    file.write(b'changed')
flags('immutable', 0)
flags('appended', 0)
",
    );
    let below = mount.below.clone();
    mount.end();
    let fs = Fs::open(vec![below], MountOptions::parse("ro").unwrap()).unwrap();
    let has_capability = |id: &InodeId| !fs.listxattr(*id).unwrap().is_empty();
    assert_eq!(programs.iter().map(has_capability).collect::<Vec<_>>(), [true, true, true, false]);
    assert_eq!(fs.getattr(programs[0]).unwrap().ctime, before[0], "nothing changes in a read-only subvolume");
    fs.close().unwrap();
}

#[test]
fn a_mount_without_opens_keeps_what_opens_would_check() {
    if !can_run() {
        return;
    }
    let mount = Mount::new(MountConfig { no_open: true, ..shared() });
    let requests = mount.requests_of(UNTAR);
    assert!(of(&requests, "create") <= 1 && of(&requests, "mknod") == 100, "{requests:?}");
    assert!(of(&requests, "release") == 0, "{requests:?}");
    let read = "import os\nfor nr in range(100):\n  assert open('f%d' % nr, 'rb').read() == bytes(10000)\n";
    let requests = mount.requests_of(read);
    assert!(of(&requests, "open") <= 1 && of(&requests, "release") == 0, "{requests:?}");
    const PROGRAM: &str = r"
import errno, fcntl, mmap, os, struct

def flags(name, value):
    fd = os.open(name, os.O_RDONLY)
    fcntl.ioctl(fd, 0x40086602, struct.pack('<Q', value))
    os.close(fd)

def fails(number, call):
    try:
        call()
    except OSError as error:
        assert error.errno == number, error
        return
    raise SystemExit('no error')

# Truncation at open is not lost, and appending appends.
with open('t', 'wb') as file: file.write(b'long content')
with open('t', 'wb') as file: file.write(b'short')
with open('t', 'ab') as file: file.write(b' tail')
assert open('t', 'rb').read() == b'short tail'
fails(errno.EEXIST, lambda: os.open('t', os.O_CREAT | os.O_EXCL))

# A file without write permission for its creator can be written through the descriptor that made it.
pid = os.fork()
if pid == 0:
    os.mkdir('own')
    os.chown('own', 1000, 1000)
    os.setuid(1000)
    fd = os.open('own/readonly', os.O_WRONLY | os.O_CREAT, 0o400)
    os.write(fd, b'x')
    fails(errno.EACCES, lambda: os.open('own/readonly', os.O_WRONLY))
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0

# Nothing changes an immutable file.
with open('i', 'wb') as file: file.write(bytes(8192))
early = os.open('i', os.O_RDWR)
mapped = mmap.mmap(early, 8192)
mapped[0] = 7
flags('i', 0x10)
fd = os.open('i', os.O_RDWR)
fails(errno.EPERM, lambda: os.pwrite(fd, b'x', 0))
fails(errno.EPERM, lambda: os.ftruncate(fd, 0))
fails(errno.EPERM, lambda: os.posix_fallocate(fd, 0, 100000))
source = os.open('t', os.O_RDONLY)
fails(errno.EPERM, lambda: os.copy_file_range(source, fd, 5))
late = mmap.mmap(fd, 8192)
late[4096] = 9
try:
    late.flush()
    raise SystemExit('an immutable file was changed')
except OSError:
    pass
os.close(fd)
flags('i', 0)

# An append-only file is only appended to.
with open('a', 'wb') as file: file.write(b'line\n')
flags('a', 0x20)
with open('a', 'ab') as file: file.write(b'more\n')
fd = os.open('a', os.O_RDWR)
fails(errno.EPERM, lambda: os.pwrite(fd, b'x', 0))
fails(errno.EPERM, lambda: os.pwrite(fd, b'x', 10))
fails(errno.EPERM, lambda: os.ftruncate(fd, 0))
fails(errno.EPERM, lambda: os.copy_file_range(source, fd, 5, 0, 0))
os.close(fd)
assert open('a', 'rb').read() == b'line\nmore\n'
flags('a', 0)

# Read-only subvolumes stay as they are.
args = bytearray(4096)
args[8:11] = b'sub'
root = os.open('.', os.O_RDONLY)
fcntl.ioctl(root, 0x5000940e, args)
with open('sub/file', 'wb') as file: file.write(b'kept')
directory = os.open('sub', os.O_RDONLY)
fcntl.ioctl(directory, 0x4008941a, struct.pack('<Q', 2))
fd = os.open('sub/file', os.O_RDWR)
fails(errno.EROFS, lambda: os.write(fd, b'changed'))
fails(errno.EROFS, lambda: os.ftruncate(fd, 0))
os.close(fd)
fails(errno.EROFS, lambda: os.open('sub/new', os.O_WRONLY | os.O_CREAT))
assert open('sub/file', 'rb').read() == b'kept'

# Seeking finds data that only the kernel has, and sparse files have blocks.
fd = os.open('sparse', os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 1 << 20)
sparse = mmap.mmap(fd, 1 << 20)
sparse[300000] = 1
assert os.fstat(fd).st_blocks > 0
assert os.lseek(fd, 0, os.SEEK_DATA) == 299008

# An unlinked file lives as long as it is open.
fd = os.open('gone', os.O_RDWR | os.O_CREAT)
os.write(fd, b'still here')
os.unlink('gone')
os.fsync(fd)
assert os.pread(fd, 100, 0) == b'still here'
anonymous = os.open('.', os.O_RDWR | os.O_TMPFILE)
os.write(anonymous, b'without a name')
assert os.pread(anonymous, 100, 0) == b'without a name'
";
    python(mount.path(), PROGRAM);
    let below = mount.below.clone();
    mount.end_after(Some("i"));
    let fs = Fs::open(vec![below], MountOptions::parse("ro").unwrap()).unwrap();
    let immutable = fs.lookup_path(b"i", true).unwrap();
    let content = fs.read(immutable.id, 0, 8192).unwrap();
    assert_eq!((content[0], content[4096]), (7, 0), "what was dirty before the flag, and nothing later");
    fs.close().unwrap();
}

#[test]
fn attributes_are_requested_again_only_if_they_may_have_changed() {
    if !can_run() {
        return;
    }
    let mount = Mount::new(shared());
    python(mount.path(), "for nr in range(50): open('f%d' % nr, 'wb').write(bytes(100000 if nr % 2 else 100))");
    const STAT: &str = "import os\nfor nr in range(50): print(os.stat('f%d' % nr).st_blocks)";
    let blocks = python(mount.path(), STAT);
    std::thread::sleep(Duration::from_millis(1100));
    let requests = mount.requests_of(STAT);
    assert!(of(&requests, "getattr") <= 2, "the data of new files waits, but their blocks are known: {requests:?}");
    Channel::mount(mount.path()).unwrap().sync().unwrap();
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(python(mount.path(), STAT), blocks, "writeback changed the number of blocks");
    std::thread::sleep(Duration::from_millis(1100));
    let requests = mount.requests_of(STAT);
    assert!(of(&requests, "getattr") <= 2 && of(&requests, "lookup") <= 2, "{requests:?}");
    // Stores through a mapping change the number of blocks when the kernel writes the pages back, which can be more
    // than a second later.
    const MAPPED: &str = r"
import mmap, os, time
fd = os.open('mapped', os.O_RDWR | os.O_CREAT)
os.write(fd, bytes(4096))
os.fsync(fd)
os.ftruncate(fd, 1 << 20)
before = os.stat('mapped').st_blocks
mapped = mmap.mmap(fd, 1 << 20)
mapped[500000] = 1
time.sleep(1.2)
os.stat('mapped')
os.sync()
time.sleep(1.2)
assert os.stat('mapped').st_blocks == before + 8, (before, os.stat('mapped').st_blocks)
";
    python(mount.path(), MAPPED);
    mount.end();
}

/// Writes, overwrites and truncates files at random places, with and without compression. If the server told the kernel
/// that `st_blocks` is final, writeback must not change it.
#[test]
fn blocks_that_are_final_stay_through_writeback() {
    for options in ["commit=300", "commit=300,compress-force=zstd", "commit=300,max_inline=0"] {
        let device = Arc::new(MediumDevice::new(Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap()));
        let fs = Fs::open(vec![device], MountOptions::parse(options).unwrap()).unwrap();
        let mut rng = ubtrfs_testkit::Rng::new(7);
        let mut nr_final = 0;
        let files: Vec<_> = (0..40)
            .map(|nr| {
                fs.create(fs.root(), format!("{nr}").as_bytes(), NewInode::file(0o644), &Caller::ROOT).unwrap().id
            })
            .collect();
        for _ in 0..20 {
            for id in &files {
                let data = vec![7; 1 + rng.below(20_000) as usize];
                match rng.below(4) {
                    0 => fs
                        .setattr(
                            *id,
                            &ubtrfs_fs::SetAttr { size: Some(rng.below(60_000)), ..Default::default() },
                            &Caller::ROOT,
                        )
                        .map(drop),
                    1 => fs.write(*id, rng.below(50_000), &data).map(drop),
                    _ => fs.write(*id, fs.getattr(*id).unwrap().size, &data).map(drop),
                }
                .unwrap();
            }
            let before: Vec<_> = files.iter().map(|id| fs.getattr(*id).unwrap()).collect();
            fs.sync().unwrap();
            for before in before.iter().filter(|attr| attr.blocks_are_final) {
                nr_final += 1;
                assert_eq!(fs.getattr(before.id).unwrap().blocks, before.blocks, "{options}: {before:?}");
            }
        }
        assert!(nr_final > 100, "{options}: {nr_final}");
        fs.close().unwrap();
    }
}

#[test]
fn commands_that_change_attributes_are_visible_at_once() {
    if !can_run() {
        return;
    }
    let mount = Mount::new(shared());
    std::fs::write(mount.path().join("file"), "content").unwrap();
    Channel::mount(mount.path()).unwrap().sync().unwrap();
    const STAT: &str = "import os; print(os.stat('file').st_ctime_ns)";
    let before = python(mount.path(), STAT);
    let channel = Channel::mount(mount.path()).unwrap();
    let opened = channel.open(&mount.path().join("file")).unwrap();
    let request = file::Request::SetCompression { of: 0, method: b"zstd".to_vec() };
    channel.call(Request::File(request), &[&opened]).unwrap();
    assert_ne!(python(mount.path(), STAT), before, "the kernel kept the old ctime");
    drop((channel, opened));
    mount.end();
}

#[test]
fn the_time_of_creation_is_shown() {
    if !can_run() {
        return;
    }
    let mount = Mount::new(shared());
    let start = std::time::SystemTime::now() - Duration::from_secs(1);
    let path = mount.path().join("file");
    std::fs::write(&path, "content").unwrap();
    let made = std::fs::metadata(&path).unwrap().created().unwrap();
    assert!(made > start, "{made:?}");
    std::thread::sleep(Duration::from_millis(20));
    std::fs::write(&path, "other content").unwrap();
    let after = std::fs::metadata(&path).unwrap();
    assert!(after.created().unwrap() == made && after.modified().unwrap() > made);
    // The kernel caches the creation time, so it sends at most one more statx request.
    let before = mount.requests();
    for _ in 0..10 {
        std::fs::metadata(&path).unwrap();
    }
    let requests = mount.requests();
    assert!(of(&requests, "statx") - of(&before, "statx") <= 1, "{before:?} {requests:?}");
    mount.end();
}

#[test]
fn every_kind_of_request_that_remains_has_its_reason() {
    if !can_run() {
        return;
    }
    let mount = Mount::new(shared());
    let requests = mount.requests_of(
        r"
import os
for nr in range(100):
    name = 'f%d' % nr
    try:
        os.lstat(name)
    except FileNotFoundError:
        pass
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(fd, b'content')
    os.fstat(fd)
    os.close(fd)
    os.lstat(name)
",
    );
    // `docs/conformance.md` explains these numbers of requests.
    let expected = [
        ("lookup", 200, "of lstat, and again of open with O_EXCL"),
        ("getattr", 200, "of the directory after each new name, and of fstat"),
        ("getxattr", 100, "security.capability before the first write"),
        ("create", 100, ""),
        ("write", 100, ""),
        ("release", 100, ""),
        ("setattr", 0, ""),
        ("flush", 0, "the server holds nothing back until close"),
        ("opendir", 0, "directories are read by cookies alone"),
    ];
    for (opcode, expected, reason) in expected {
        let found = of(&requests, opcode);
        assert!((expected..expected + 10).contains(&found), "{opcode} ({reason}) {found}: {requests:?}");
    }
    let is_listed = |opcode: &str| expected.iter().any(|(listed, ..)| *listed == opcode);
    let others: Vec<_> = requests.iter().filter(|(opcode, count)| **count >= 10 && !is_listed(opcode)).collect();
    assert!(others.is_empty(), "{others:?}");
    mount.end();
}

/// Mounts the current directory again, with the owner 1000 shown as 2000, and uses this idmapped mount.
const USE_MAPPED: &str = r#"
import ctypes, errno, os, struct, sys, tempfile
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    result = libc.syscall(number, *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), 'system call %d' % number)
    return result

# A user namespace whose maps say how owners are shown.
CLONE_NEWUSER, AT_FDCWD = 0x10000000, -100
ready, go = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    os.close(go[1])
    os._exit(1 if libc.unshare(CLONE_NEWUSER) else (os.write(ready[1], b'r'), os.read(go[0], 1), 0)[2])
os.read(ready[0], 1)
for kind in ('uid_map', 'gid_map'):
    with open('/proc/%d/%s' % (child, kind), 'w') as file:
        file.write('0 0 1\n1000 2000 1\n')
namespace = os.open('/proc/%d/ns/user' % child, os.O_RDONLY)

tree = call(428, AT_FDCWD, b'.', 1)
attr = struct.pack('QQQQ', 0x100000, 0, 0, namespace)
call(442, tree, b'', 0x1000, attr, len(attr))
view = tempfile.mkdtemp()
call(429, tree, b'', AT_FDCWD, view.encode(), 4)

def as_user(uid, work):
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([]); os.setgid(uid); os.setuid(uid)
            work()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def use():
    os.chdir(view + '/dir')
    with open('made', 'w') as file:
        file.write('content')
    os.chmod('made', 0o2750)
    os.utime('made', (1, 2))
    os.setxattr('made', 'user.x', b'1')
    os.chown('made', -1, -1)
    os.mkdir('below')
    os.symlink('made', 'link')
    os.rename('made', 'below/moved')
    os.truncate('below/moved', 3)
    os.link('below/moved', 'hard')
    os.unlink('hard')

try:
    os.mkdir('dir', 0o755)
    os.chown('dir', 1000, 1000)
    owner = lambda path: (os.stat(path, follow_symlinks=False).st_uid, os.stat(path, follow_symlinks=False).st_gid)
    assert owner(view + '/dir') == (2000, 2000), owner(view + '/dir')
    assert as_user(2000, use) == 0
    for path in ('dir/below', 'dir/below/moved', 'dir/link'):
        assert owner(path) == (1000, 1000), (path, owner(path))
        assert owner(view + '/' + path) == (2000, 2000)
    assert open('dir/below/moved').read() == 'con'
    assert as_user(1000, lambda: open(view + '/dir/other', 'w')) == errno.EOVERFLOW, 'the user has no owner to stand for'
    assert as_user(1000, lambda: os.unlink(view + '/dir/link')) == errno.EACCES, 'the user is not the shown owner'
    assert as_user(2000, lambda: open('dir/other', 'w')) == errno.EACCES, 'without the view, the user is not the owner'
    assert as_user(1000, lambda: open('dir/other', 'w').close()) == 0
    open('roots', 'w').close()
    os.chown(view + '/roots', 2000, 2000)
    assert owner('roots') == (1000, 1000)
finally:
    libc.umount2(view.encode(), 2)
    os.rmdir(view)
    os.close(go[1])
"#;

#[test]
fn owners_are_mapped_through_an_idmapped_mount() {
    if !can_run() || !rustix::process::geteuid().is_root() {
        return;
    }
    for transport in [Transport::DevFuse, Transport::Auto] {
        let mount = Mount::new(MountConfig { idmap: true, transport, ..shared() });
        python(mount.path(), USE_MAPPED);
        mount.end();
    }
}
