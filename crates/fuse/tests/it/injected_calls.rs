//! The system calls that a confined process can make: those of the lists in this file, and no others.
//!
//! Method: the test runs itself again as a child, which confines itself. The program `inject.c` stops a thread of the
//! child and makes calls in its place: every number, and every command of the calls that have commands. A call passes
//! unless it fails with EPERM or ENOSYS. Some calls are made with arguments that would affect another process, and the
//! test looks at that process.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use tempfile::TempDir;
use ubtrfs_fuse::Identity;
use ubtrfs_testkit::capability::in_ci;

/// The user and the group of the child if root runs the test.
const USER: u32 = 4321;
const GROUP: u32 = 4322;

const CHILD: &str = "UBTRFS_CONFINED_CHILD";
const TEST: &str = "injected_calls::only_the_listed_calls_pass";
const EPERM: i64 = -1;
const ENOSYS: i64 = -38;
/// An argument that is no descriptor, no address and no length.
const BAD: u64 = u64::MAX;

/// The calls that pass with some arguments. [`usual`] makes those which pass with certain arguments only.
const PASSING: &[i64] = &[
    // Open descriptors.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_lseek,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_close,
    libc::SYS_dup3,
    libc::SYS_ioctl,
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    libc::SYS_socketpair,
    libc::SYS_ppoll,
    libc::SYS_epoll_pwait,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // Memory.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_mlock,
    libc::SYS_membarrier,
    // Threads and signals.
    libc::SYS_clone,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_getpriority,
    libc::SYS_setpriority,
    libc::SYS_ioprio_set,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_restart_syscall,
    libc::SYS_tgkill,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_prctl,
    libc::SYS_getcpu,
    // Clocks, random numbers, and ids.
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getrusage,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_dup2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_time,
];

/// Calls that pass, and that would end the child.
const ENDING: [i64; 3] = [libc::SYS_exit, libc::SYS_exit_group, libc::SYS_rt_sigreturn];

const NR_CALLS: u64 = 600;

/// Calls that the kernel lets pass every filter: uretprobe and uprobe of x86-64. They kill a caller that no debugger has
/// prepared for them.
const OF_DEBUGGERS: std::ops::Range<u64> = if cfg!(target_arch = "x86_64") { 335..337 } else { 0..0 };

/// Arguments with which a call passes, and does nothing.
fn usual(call: i64, child: &Confined) -> [u64; 6] {
    match call {
        libc::SYS_fcntl => [BAD, of(libc::F_GETFL), 0, 0, 0, 0],
        libc::SYS_ioctl => [BAD, libc::FIONBIO, 0, 0, 0, 0],
        libc::SYS_getsockopt => [BAD, of(libc::SOL_SOCKET), of(libc::SO_PEERCRED), 0, 0, 0],
        libc::SYS_sendto => [BAD, 0, 0, 0, 0, 0],
        libc::SYS_socketpair => [of(libc::AF_UNIX), of(libc::SOCK_STREAM), 0, BAD, 0, 0],
        libc::SYS_io_uring_register => [BAD, 12, 0, 0, 0, 0],
        libc::SYS_mmap => [0, 4096, 0, of(libc::MAP_PRIVATE), BAD, 0],
        libc::SYS_madvise => [0, 0, of(libc::MADV_DONTNEED), 0, 0, 0],
        // Without CLONE_VM, the kernel refuses to make a thread.
        libc::SYS_clone => [of(libc::CLONE_THREAD), 0, 0, 0, 0, 0],
        libc::SYS_mprotect | libc::SYS_futex | libc::SYS_getpriority => [0; 6],
        libc::SYS_setpriority => [0, 0, 19, 0, 0, 0],
        libc::SYS_ioprio_set => [1, 0, BAD, 0, 0, 0],
        libc::SYS_sched_setaffinity => [0, 8, BAD, 0, 0, 0],
        libc::SYS_tgkill => [child.process, child.thread, 0, 0, 0, 0],
        libc::SYS_prctl => [of(libc::PR_SET_NAME), BAD, 0, 0, 0, 0],
        libc::SYS_membarrier => [0; 6],
        _ => [BAD; 6],
    }
}

#[test]
fn only_the_listed_calls_pass() {
    if std::env::var_os(CHILD).is_some() {
        return child();
    }
    let Some(mut child) = Confined::start() else { return };
    let ending = ENDING.map(|call| call.cast_unsigned());
    let mut passing = BTreeSet::new();
    for call in (0..NR_CALLS).filter(|call| !ending.contains(call) && !OF_DEBUGGERS.contains(call)) {
        let arguments = usual(call.cast_signed(), &child);
        if child.passes(call.cast_signed(), arguments) {
            passing.insert(call.cast_signed());
        }
    }
    assert_eq!(passing, PASSING.iter().copied().collect());
    #[cfg(target_arch = "x86_64")]
    for call in 0..NR_CALLS {
        let of_other_abi = call.cast_signed() | 0x4000_0000;
        assert!(!child.passes(of_other_abi, [BAD; 6]), "call {call} of the ABI x32");
    }
}

#[test]
fn only_the_listed_commands_pass() {
    let Some(mut child) = Confined::start() else { return };
    let socket = child.socket;
    let commands = |child: &mut Confined, call: i64, range: &mut dyn Iterator<Item = u64>, arguments: Arguments<'_>| {
        range.filter(|command| child.passes(call, arguments(*command))).collect::<Vec<_>>()
    };
    let found = commands(&mut child, libc::SYS_fcntl, &mut (0..1200), &|command| [socket, command, 0, 0, 0, 0]);
    let allowed = [libc::F_DUPFD, libc::F_GETFD, libc::F_GETFL, libc::F_DUPFD_CLOEXEC].map(of);
    assert_eq!(found, allowed[1..], "fcntl");

    let found = commands(&mut child, libc::SYS_ioctl, &mut (0..1 << 16), &|command| [socket, command, 0, 0, 0, 0]);
    assert_eq!(found, [0x1277, libc::FIONBIO], "ioctl");
    let sized = [0x4004_667f, 0x8004_667e, 0xc0c0_5001, 0x8008_7601, 0x4008_7602, 0xc004_5877, 0x5412 | 1 << 32];
    let found = commands(&mut child, libc::SYS_ioctl, &mut sized.into_iter(), &|command| {
        [socket, command & 0xffff_ffff, 0, 0, 0, 0]
    });
    assert!(found.is_empty(), "ioctl with a size: {found:?}");

    // PR_SET_VMA, PR_GET_AUXV, PR_SET_PTRACER
    let more = [0x5356_4d41, 0x4155_5856, 0x5961_6d61];
    let found = commands(&mut child, libc::SYS_prctl, &mut (0..200).chain(more), &|command| [command, BAD, 0, 0, 0, 0]);
    assert_eq!(found, [of(libc::PR_SET_NAME), more[0], more[1]], "prctl");

    let found = commands(&mut child, libc::SYS_madvise, &mut (0..200), &|advice| [0, 0, advice, 0, 0, 0]);
    assert_eq!(found, [4, 8, 14, 15, 102, 103], "madvise");

    let found = commands(&mut child, libc::SYS_io_uring_register, &mut (0..100), &|command| [BAD, command, 0, 0, 0, 0]);
    assert_eq!(found, [12], "io_uring_register");

    let bits = || (0..32).map(|bit| 1u64 << bit);
    let thread = of(libc::CLONE_THREAD);
    let found = commands(&mut child, libc::SYS_clone, &mut bits(), &|flag| [flag | thread, 0, 0, 0, 0, 0]);
    let allowed = [
        libc::CLONE_VM,
        libc::CLONE_FS,
        libc::CLONE_FILES,
        libc::CLONE_SIGHAND,
        libc::CLONE_THREAD,
        libc::CLONE_SYSVSEM,
        libc::CLONE_SETTLS,
        libc::CLONE_PARENT_SETTID,
        libc::CLONE_CHILD_CLEARTID,
        libc::CLONE_DETACHED,
        libc::CLONE_CHILD_SETTID,
    ];
    // The kernel takes CLONE_SIGHAND only with CLONE_VM, so no thread is made here.
    assert_eq!(found, allowed.map(of), "clone");
    assert!(!child.passes(libc::SYS_clone, [of(libc::SIGCHLD), 0, 0, 0, 0, 0]), "a process");

    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        let found =
            commands(&mut child, call, &mut (0..16), &|rights| [0, 4096, rights, of(libc::MAP_PRIVATE), BAD, 0]);
        let without_exec: Vec<u64> = (0..16).filter(|rights| rights & 4 == 0).collect();
        assert_eq!(found, without_exec, "call {call}");
    }

    let kinds = (0..50).flat_map(|family| (0..12).map(move |kind| family << 8 | kind));
    let found =
        commands(&mut child, libc::SYS_socketpair, &mut { kinds }, &|kind| [kind >> 8, kind & 0xff, 0, BAD, 0, 0]);
    assert_eq!(found, [of(libc::AF_UNIX) << 8 | of(libc::SOCK_STREAM)], "socketpair");

    let options = (0..300).flat_map(|level| (0..100).map(move |option| level << 8 | option));
    let found = commands(&mut child, libc::SYS_getsockopt, &mut { options }, &|option| {
        [socket, option >> 8, option & 0xff, BAD, BAD, 0]
    });
    assert_eq!(found, [libc::SO_ERROR, libc::SO_PEERCRED].map(|option| of(libc::SOL_SOCKET) << 8 | of(option)));
}

type Arguments<'a> = &'a dyn Fn(u64) -> [u64; 6];

#[test]
fn a_confined_process_cannot_act_on_another_process() {
    let Some(mut child) = Confined::start() else { return };
    let mut other = Sleeper::start();
    let (pid, socket, memory) = (other.pid(), child.socket, child.memory);
    let signal = of(libc::SIGUSR1);
    for (what, call, arguments) in [
        ("F_SETSIG", libc::SYS_fcntl, [socket, 10, signal, 0, 0, 0]),
        ("F_SETOWN", libc::SYS_fcntl, [socket, 8, pid, 0, 0, 0]),
        ("F_SETOWN_EX", libc::SYS_fcntl, [socket, 15, memory + OWNER, 0, 0, 0]),
        ("O_ASYNC", libc::SYS_fcntl, [socket, 4, of(libc::O_ASYNC), 0, 0, 0]),
        ("FIOSETOWN", libc::SYS_ioctl, [socket, 0x8901, memory + OWNER + 4, 0, 0, 0]),
        ("FIOASYNC", libc::SYS_ioctl, [socket, 0x5452, memory + OWNER, 0, 0, 0]),
        ("kill", libc::SYS_kill, [pid, signal, 0, 0, 0, 0]),
        ("tkill", libc::SYS_tkill, [pid, signal, 0, 0, 0, 0]),
        ("tgkill", libc::SYS_tgkill, [pid, pid, signal, 0, 0, 0]),
        ("rt_sigqueueinfo", libc::SYS_rt_sigqueueinfo, [pid, signal, memory, 0, 0, 0]),
        ("setpriority", libc::SYS_setpriority, [0, pid, 19, 0, 0, 0]),
        ("ioprio_set", libc::SYS_ioprio_set, [1, pid, 3 << 13, 0, 0, 0]),
        ("ioprio_set of a user", libc::SYS_ioprio_set, [3, 0, 3 << 13, 0, 0, 0]),
        ("sched_setaffinity", libc::SYS_sched_setaffinity, [pid, 8, memory + MASK, 0, 0, 0]),
        ("process_vm_readv", libc::SYS_process_vm_readv, [pid, memory, 1, memory, 1, 0]),
        ("prlimit64", libc::SYS_prlimit64, [pid, 7, memory + MASK, 0, 0, 0]),
        ("PR_SCHED_CORE", libc::SYS_prctl, [62, 0, pid, 0, 0, 0]),
    ] {
        let result = child.call(call, arguments);
        println!("{what}: {result}");
        assert_eq!(result, EPERM, "{what}");
    }
    // A byte for the socket would signal its owner.
    assert_eq!(child.call(libc::SYS_write, [child.far, memory, 1, 0, 0, 0]), 1);
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert_eq!(other.died_of(), None, "the other process lives");
}

#[test]
fn a_confined_process_reaches_no_socket_by_name() {
    let Some(mut child) = Confined::start() else { return };
    let memory = child.memory;
    child.listener.set_nonblocking(true).unwrap();
    // A datagram socket that was connected before confinement, as that of the system log is.
    let log = child.log;
    let with_name = [log, memory, 1, 0, memory + NAME, child.name_len];
    assert_eq!(child.call(libc::SYS_sendto, with_name), EPERM, "sendto");
    assert_eq!(child.call(libc::SYS_sendmsg, [log, memory + MESSAGE, 0, 0, 0, 0]), EPERM, "sendmsg");
    assert_eq!(child.call(libc::SYS_connect, [log, memory + NAME, child.name_len, 0, 0, 0]), EPERM, "connect");
    assert!(child.listener.recv(&mut [0; 8]).is_err(), "nothing arrives");
    assert_eq!(child.call(libc::SYS_sendto, [log, memory, 1, 0, 0, 0]), 1, "the connected socket remains usable");
    let path = memory + PATH;
    assert_eq!(child.call(libc::SYS_openat, [of(libc::AT_FDCWD), path, 0, 0, 0, 0]), EPERM, "openat");
    assert_eq!(child.call(libc::SYS_execve, [path, 0, 0, 0, 0, 0]), EPERM, "execve");
}

/// A number of the C library as an argument.
fn of(number: i32) -> u64 {
    i64::from(number).cast_unsigned()
}

// Offsets in the memory of the child.
/// `struct f_owner_ex`: type and process.
const OWNER: u64 = 64;
/// A set of processors.
const MASK: u64 = 128;
/// A path.
const PATH: u64 = 256;
/// `struct sockaddr_un`.
const NAME: u64 = 512;
/// `struct msghdr`, and its `struct iovec`.
const MESSAGE: u64 = 1024;
const PIECE: u64 = 1152;

/// A confined process, in which the test makes calls.
struct Confined {
    child: Child,
    injector: Child,
    calls: ChildStdin,
    results: BufReader<ChildStdout>,
    process: u64,
    thread: u64,
    /// The descriptors of two connected stream sockets.
    socket: u64,
    far: u64,
    /// The descriptor of a datagram socket that is connected to another process.
    log: u64,
    /// The address of memory with arguments.
    memory: u64,
    /// A datagram socket of this process, to which everyone may send. Its name is at [`NAME`] in the memory.
    listener: UnixDatagram,
    name_len: u64,
    _log: UnixDatagram,
    _dir: TempDir,
}

impl Confined {
    /// Starts the child. Returns `None` if this system cannot confine or trace it; fails then in CI.
    fn start() -> Option<Self> {
        let injector = injector()?;
        let dir = TempDir::new().unwrap();
        let name = dir.path().join("socket");
        let listener = UnixDatagram::bind(&name).unwrap();
        for (path, mode) in [(dir.path(), 0o755), (&name, 0o777)] {
            std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        }
        let name = name.to_str().unwrap().to_owned();
        let log = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", TEST, "--nocapture", "--test-threads=1"])
            .env(CHILD, &name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.by_ref().map(Result::unwrap).find_map(|line| {
            let at = line.find("confined: ")?;
            Some(line[at..].to_owned())
        });
        let numbers: Vec<u64> = line.unwrap().split(' ').skip(1).filter_map(|word| word.parse().ok()).collect();
        let &[process, thread, socket, far, connected, memory, name_len] = numbers.as_slice() else {
            let _ = child.kill();
            let _ = child.wait();
            return unable("seccomp and Landlock");
        };
        // The rest of the child's output is not read.
        let mut tracer = Command::new(injector)
            .arg(thread.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (calls, results) = (tracer.stdin.take().unwrap(), BufReader::new(tracer.stdout.take().unwrap()));
        let mut confined = Self {
            child,
            injector: tracer,
            calls,
            results,
            process,
            thread,
            socket,
            far,
            log: connected,
            memory,
            listener,
            name_len,
            _log: log,
            _dir: dir,
        };
        match confined.try_call(libc::SYS_getpid, [0; 6]) {
            Some(pid) if pid.cast_unsigned() == process => Some(confined),
            _ => unable("ptrace"),
        }
    }

    fn call(&mut self, call: i64, arguments: [u64; 6]) -> i64 {
        self.try_call(call, arguments).expect("the child or the injector ended")
    }

    fn try_call(&mut self, call: i64, arguments: [u64; 6]) -> Option<i64> {
        let [a, b, c, d, e, f] = arguments;
        writeln!(self.calls, "{} {a} {b} {c} {d} {e} {f}", call.cast_unsigned()).ok()?;
        let mut line = String::new();
        self.results.read_line(&mut line).ok()?;
        line.trim().parse().ok()
    }

    fn passes(&mut self, call: i64, arguments: [u64; 6]) -> bool {
        !matches!(self.call(call, arguments), EPERM | ENOSYS)
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        for process in [&mut self.injector, &mut self.child] {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn unable<T>(what: &str) -> Option<T> {
    assert!(!in_ci(), "CI needs {what}");
    eprintln!("SKIPPED: this test needs {what}");
    None
}

/// The program that makes calls in another process, compiled once.
fn injector() -> Option<&'static std::path::Path> {
    static BUILT: OnceLock<Option<(TempDir, std::path::PathBuf)>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let dir = TempDir::new().unwrap();
        let (source, program) = (dir.path().join("inject.c"), dir.path().join("inject"));
        std::fs::write(&source, include_str!("injected_calls/inject.c")).unwrap();
        let status = Command::new("cc").args(["-O1", "-o"]).arg(&program).arg(&source).status();
        status.is_ok_and(|status| status.success()).then_some((dir, program))
    });
    match built {
        Some((_, program)) => Some(program),
        None => unable("a C compiler (cc)"),
    }
}

/// A process of the child's user.
struct Sleeper(Child);

impl Sleeper {
    fn start() -> Self {
        let mut command = Command::new("sleep");
        if rustix::process::getuid().is_root() {
            command.uid(USER).gid(GROUP);
        }
        Self(command.arg("100").spawn().unwrap())
    }

    fn pid(&self) -> u64 {
        u64::from(self.0.id())
    }

    fn died_of(&mut self) -> Option<i32> {
        self.0.try_wait().unwrap().and_then(|status| status.signal())
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Confines this process, tells the test where everything is, and waits.
fn child() {
    let name = std::env::var(CHILD).unwrap();
    let (near, far) = UnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    let log = UnixDatagram::unbound().unwrap();
    log.connect_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let mut memory = vec![0u8; 4096];
    let address = memory.as_ptr().addr() as u64;
    let name_len = 3 + name.len() as u64;
    let mut put = |at: u64, bytes: &[u8]| memory[at as usize..][..bytes.len()].copy_from_slice(bytes);
    put(OWNER, &1i32.to_ne_bytes());
    put(MASK, &[1]);
    put(PATH, b"/bin/true\0");
    put(NAME, &1u16.to_ne_bytes());
    put(NAME + 2, name.as_bytes());
    let message = [address + NAME, name_len, address + PIECE, 1, 0, 0, 0];
    put(MESSAGE, message.map(u64::to_ne_bytes).as_flattened());
    put(PIECE, [address, 1].map(u64::to_ne_bytes).as_flattened());
    let memory = std::hint::black_box(memory);
    let done = ubtrfs_fuse::confine(Identity { uid: USER, gid: GROUP });
    if !done.seccomp || !done.landlock {
        println!("confined: no, {done:?}");
        return;
    }
    println!(
        "confined: {} {} {} {} {} {address} {name_len}",
        std::process::id(),
        rustix::thread::gettid().as_raw_nonzero(),
        near.as_raw_fd(),
        far.as_raw_fd(),
        log.as_raw_fd(),
    );
    let _ = std::io::stdin().read(&mut [0]);
    drop((memory, near, far, log));
}
