//! Confinement of the server: once the devices and /dev/fuse are open, the server only needs to read and write them.
//!
//! - X1. After [`confine`] no thread can open a file, make a network socket, run a program, look at another process,
//!   mount, or change its rights: the seccomp filter makes every system call that is not on its list fail with EPERM.
//!   The filter covers all existing threads and all threads that they start.
//! - X2. As a second barrier, Landlock denies every path to the calling thread and to the threads that it starts.
//! - X3. A system call that is not on the list fails and does not kill the server, because a killed server would lose
//!   data.
//! - X4. Unmounting, and looking up a caller's groups, umask and capabilities, need rights that the server has given
//!   up. So a process that is started before confinement, [`PrivilegedHelper`], unmounts, looks up callers, and claims
//!   the mounted block device for the server.
//! - X5. A server started by root gives up root, its groups and all capabilities: each thread runs as the given
//!   [`Identity`]. Open files remain open.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use landlock::{ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetStatus};
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};
use parking_lot::Mutex;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

use ubtrfs_control::{FileId, LocalProcesses, Processes};

use crate::lent_device::Place;
use crate::mount::{self, MountError};

/// The measures of confinement that took effect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// seccomp filters system calls.
    pub seccomp: bool,
    /// Landlock denies paths.
    pub landlock: bool,
    /// No thread runs as root.
    pub unprivileged: bool,
    /// The reasons for missing measures.
    pub missing: Vec<String>,
}

/// A user without privileges, and its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

impl Identity {
    /// `nobody`, the user that owns no files.
    pub const NOBODY: Self = Self { uid: 65534, gid: 65534 };

    /// The identity for the server of this image: the file's owner, or `nobody` for root's files and for devices.
    pub fn for_image(path: &Path) -> Self {
        let is_user = |id: &u32| *id != 0;
        let meta = std::fs::metadata(path).ok().filter(|meta| !meta.file_type().is_block_device());
        match meta.filter(|meta| is_user(&meta.uid())) {
            Some(meta) => Self { uid: meta.uid(), gid: Some(meta.gid()).filter(is_user).unwrap_or(Self::NOBODY.gid) },
            None => Self::NOBODY,
        }
    }
}

/// Gives up every right that serving a mount does not need (X1, X2). If the process runs as root, it runs as `identity`
/// afterwards (X5). The confinement cannot be undone.
pub fn confine(identity: Identity) -> Confinement {
    let mut done = Confinement::default();
    match become_unprivileged(identity) {
        Ok(()) => done.unprivileged = true,
        Err(error) => done.missing.push(error),
    }
    match restrict_paths() {
        Ok(true) => done.landlock = true,
        Ok(false) => done.missing.push("this kernel has no Landlock".to_owned()),
        Err(error) => done.missing.push(format!("Landlock: {error}")),
    }
    match filter_calls() {
        Ok(()) => done.seccomp = true,
        Err(error) => done.missing.push(format!("seccomp: {error}")),
    }
    done
}

/// Gives up root in all threads, through functions of the C library: the bare system calls would change only the
/// calling thread.
fn become_unprivileged(to: Identity) -> Result<(), String> {
    if rustix::process::getuid().is_root() || rustix::process::geteuid().is_root() {
        let failed = |error: nix::Error| format!("it remains root: {error}");
        let (uid, gid) = (Uid::from_raw(to.uid), Gid::from_raw(to.gid));
        setgroups(&[]).map_err(failed)?;
        setresgid(gid, gid, gid).map_err(failed)?;
        setresuid(uid, uid, uid).map_err(failed)?;
    }
    // Changing the user also drops the capabilities, unless the process was set to keep them.
    match rustix::thread::capabilities(None) {
        Ok(sets) if (sets.effective | sets.permitted).is_empty() => Ok(()),
        Ok(_) => Err("it has capabilities".to_owned()),
        Err(errno) => Err(format!("its capabilities cannot be read: {errno}")),
    }
}

fn restrict_paths() -> Result<bool, landlock::RulesetError> {
    let status = Ruleset::default().handle_access(AccessFs::from_all(ABI::V5))?.create()?.restrict_self()?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

fn filter_calls() -> Result<(), String> {
    let arch: TargetArch = std::env::consts::ARCH.try_into().map_err(|error| format!("{error}"))?;
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let denied = SeccompAction::Errno(rustix::io::Errno::PERM.raw_os_error().unsigned_abs());
    let filter = SeccompFilter::new(rules().map_err(|error| text(&error))?, denied, SeccompAction::Allow, arch);
    let program: BpfProgram = filter.map_err(|error| text(&error))?.try_into().map_err(|error| format!("{error}"))?;
    // A filter cannot see the flags of clone3, so clone3 fails with ENOSYS. The C library then uses clone, whose flags
    // the filter checks. A filter has only one error number for its denials, so ENOSYS needs a second filter. If the
    // two filters disagree, the kernel takes the stricter result.
    let absent = SeccompAction::Errno(rustix::io::Errno::NOSYS.raw_os_error().unsigned_abs());
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let filter = SeccompFilter::new(clone3, SeccompAction::Allow, absent, arch).map_err(|error| text(&error))?;
    let no_clone3: BpfProgram = filter.try_into().map_err(|error| format!("{error}"))?;
    seccompiler::apply_filter_all_threads(&no_clone3).map_err(|error| text(&error))?;
    seccompiler::apply_filter_all_threads(&program).map_err(|error| text(&error))
}

/// The allowed system calls: reading and writing open files, memory, threads, locks, clocks, and exiting.
fn rules() -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    let flag = |flag: i32| SeccompCmpOp::MaskedEq(u64::from(flag.unsigned_abs()));
    let argument = |index, op, value: i32| {
        SeccompCondition::new(index, SeccompCmpArgLen::Dword, op, u64::from(value.unsigned_abs()))
    };
    // clone may create threads but not processes.
    let thread = libc::CLONE_THREAD;
    rules.insert(libc::SYS_clone, vec![SeccompRule::new(vec![argument(0, flag(thread), thread)?])?]);
    rules.insert(libc::SYS_clone3, Vec::new());
    // Signals may go only to this process, because other processes of the same user may exist.
    let own = u64::from(std::process::id());
    let to_itself = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, own)?;
    rules.insert(libc::SYS_tgkill, vec![SeccompRule::new(vec![to_itself])?]);
    // Only the listed ioctls are allowed. None of them types into a terminal or queries one.
    let ioctl = |number: u64| {
        let is_it = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, number)?;
        SeccompRule::new(vec![is_it])
    };
    rules.insert(libc::SYS_ioctl, IOCTLS.iter().map(|number| ioctl(*number)).collect::<Result<_, _>>()?);
    // A thread may enable its io_uring, which was made before confinement and is restricted to certain operations. All
    // other calls of io_uring_register are denied.
    let enable = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, IORING_REGISTER_ENABLE_RINGS)?;
    rules.insert(libc::SYS_io_uring_register, vec![SeccompRule::new(vec![enable])?]);
    // A thread may lower its own priority.
    let of_itself = || {
        Ok::<_, seccompiler::BackendError>(vec![SeccompRule::new(vec![
            argument(0, SeccompCmpOp::Eq, 0)?,
            argument(1, SeccompCmpOp::Eq, 0)?,
        ])?])
    };
    rules.insert(libc::SYS_getpriority, of_itself()?);
    rules.insert(libc::SYS_setpriority, of_itself()?);
    // No memory may be mapped as executable, or made executable later.
    let no_exec =
        || Ok::<_, seccompiler::BackendError>(vec![SeccompRule::new(vec![argument(2, flag(libc::PROT_EXEC), 0)?])?]);
    rules.insert(libc::SYS_mmap, no_exec()?);
    rules.insert(libc::SYS_mprotect, no_exec()?);
    Ok(rules)
}

const IORING_REGISTER_ENABLE_RINGS: u64 = 12;

/// The allowed ioctls: discarding blocks of a device, and making sockets blocking or non-blocking.
const IOCTLS: [u64; 2] = [BLKDISCARD, libc::FIONBIO];
/// `_IO(0x12, 119)` of linux/fs.h.
const BLKDISCARD: u64 = 0x1277;

const ALLOWED: &[i64] = &[
    // Calls on open descriptors: devices, /dev/fuse, pipes, the control socket and the system log.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_splice,
    libc::SYS_lseek,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    libc::SYS_ftruncate,
    libc::SYS_flock,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_close,
    libc::SYS_dup3,
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    libc::SYS_socketpair,
    libc::SYS_pipe2,
    libc::SYS_ppoll,
    libc::SYS_epoll_pwait,
    libc::SYS_io_uring_enter,
    // Calls on memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mlock,
    libc::SYS_membarrier,
    // Threads and signals.
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_prctl,
    libc::SYS_getcpu,
    // Clocks, random numbers, ids of the process, and exiting.
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
    libc::SYS_exit,
    libc::SYS_exit_group,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_dup2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_time,
];

/// A process that acts for the confined server (X4): it unmounts one directory, claims one block device, and looks up
/// groups, umasks, capabilities and open files of processes.
///
/// A question consists of one byte for its kind and three numbers of four bytes each. An answer has two bytes; the
/// answer to [`FILE`] has more.
#[derive(Debug)]
pub struct PrivilegedHelper {
    child: Mutex<Child>,
}

const LAZY: u8 = b'l';
const PLAIN: u8 = b'p';
/// Question: is the process in the group, and are all its user ids equal to the given id? With [`ANYBODY`], the user
/// ids do not matter.
const GROUP: u8 = b'g';
/// Question: the umask of the process.
const UMASK: u8 = b'u';
/// Question: does the process have the capability?
const CAPABILITY: u8 = b'c';
/// Question: the file that the process has open as the descriptor. The answer "ok" is followed by the device and the
/// inode, 8 bytes each.
const FILE: u8 = b'f';
/// Question: is every file that the process has open on the device (two numbers, the low half first) open through a
/// read-only mount?
const READ_ONLY: u8 = b'r';
/// Question: is the thread being killed?
const DYING: u8 = b'k';
/// Question: the processor on which the thread ran last.
const PROCESSOR: u8 = b'n';
/// Question: can the block device with this number (the low half first) be claimed? If so, the helper keeps the claim.
const TAKE_DEVICE: u8 = b'd';
/// No user has this id.
const ANYBODY: u32 = u32::MAX;
/// The answer "yes"; every umask and every number of a processor is smaller.
const YES: u16 = u16::from_le_bytes(*b"ok");
const NO: u16 = u16::from_le_bytes(*b"no");
/// The answer to an unmount of what is not mounted.
const GONE: u16 = u16::from_le_bytes(*b"go");
const UNKNOWN: u16 = u16::from_le_bytes(*b"??");

impl PrivilegedHelper {
    /// Starts the process; `command` must run a program that calls [`serve_unmounts`].
    pub fn start(mut command: Command) -> io::Result<Self> {
        // The helper gets a process group of its own, because signals from the terminal are meant for the server.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        Ok(Self { child: Mutex::new(command.spawn()?) })
    }

    /// Unmounts on behalf of the server.
    pub(crate) fn unmount(&self, dir: &Path, lazy: bool) -> Result<(), MountError> {
        let failed = |source| MountError::Session { dir: dir.display().to_string(), source };
        match self.ask(if lazy { LAZY } else { PLAIN }, [0; 3]) {
            Ok(YES) => Ok(()),
            Ok(GONE) => Err(MountError::NotMounted(dir.display().to_string())),
            Ok(_) => Err(failed(io::Error::other("it is in use, or may not be unmounted"))),
            Err(source) => Err(failed(source)),
        }
    }

    /// Whether a process is in the supplementary group `gid` and, if `uid` is given, whether all its user ids are
    /// `uid`.
    pub(crate) fn is_in_group(&self, pid: u32, gid: u32, uid: Option<u32>) -> bool {
        self.ask(GROUP, [pid, gid, uid.unwrap_or(ANYBODY)]).is_ok_and(|answer| answer == YES)
    }

    /// Whether a process has a capability; `None` if the answer is unknown.
    pub(crate) fn has_capability(&self, pid: u32, capability: u32) -> Option<bool> {
        self.ask_whether(CAPABILITY, [pid, capability, 0])
    }

    /// Whether every file that a process has open on a device is open through a read-only mount; `None` if the process
    /// has no such file, or if the answer is unknown.
    pub(crate) fn is_read_only_for(&self, pid: u32, device: u64) -> Option<bool> {
        let [low, high] = halves(device);
        self.ask_whether(READ_ONLY, [pid, low, high])
    }

    /// Whether a thread is being killed; `None` if the answer is unknown.
    pub(crate) fn is_dying(&self, pid: u32) -> Option<bool> {
        self.ask_whether(DYING, [pid, 0, 0])
    }

    /// The processor on which a thread ran last; `None` if it is unknown, or if the helper is busy. A helper that
    /// unmounts may be waiting for the thread that asks.
    pub(crate) fn processor_of(&self, thread: u32) -> Option<usize> {
        if thread == 0 {
            return None;
        }
        let answer = ask(&mut *self.child.try_lock()?, PROCESSOR, [thread, 0, 0]).ok()?;
        (answer != UNKNOWN).then_some(usize::from(answer))
    }

    /// Claims the block device, or keeps the mount that has the claim, until this value is dropped.
    pub(crate) fn take_device(&self, rdev: u64) -> io::Result<()> {
        let [low, high] = halves(rdev);
        match self.ask(TAKE_DEVICE, [0, low, high])? {
            YES => Ok(()),
            _ => Err(io::Error::from(io::ErrorKind::ResourceBusy)),
        }
    }

    /// The umask of a process.
    pub(crate) fn umask_of(&self, pid: u32) -> Option<u32> {
        self.ask(UMASK, [pid, 0, 0]).ok().map(u32::from).filter(|umask| *umask <= 0o777)
    }

    /// The file that a process has open under a descriptor number.
    pub(crate) fn file_of(&self, pid: u32, descriptor: u32) -> Option<FileId> {
        let mut child = self.child.lock();
        let answer = ask(&mut child, FILE, [pid, descriptor, 0]).ok().filter(|answer| *answer == YES);
        let mut numbers = [[0; 8]; 2];
        child.stdout.as_mut().filter(|_| answer.is_some())?.read_exact(numbers.as_flattened_mut()).ok()?;
        let [device, ino] = numbers.map(u64::from_le_bytes);
        Some(FileId { device, ino })
    }

    fn ask_whether(&self, kind: u8, numbers: [u32; 3]) -> Option<bool> {
        match self.ask(kind, numbers).ok()? {
            YES => Some(true),
            NO => Some(false),
            _ => None,
        }
    }

    /// Asks one question at a time, so other questions wait while the helper unmounts. This cannot deadlock: while
    /// programs use the mount, unmounting fails within a second, and otherwise no program makes requests.
    fn ask(&self, kind: u8, numbers: [u32; 3]) -> io::Result<u16> {
        ask(&mut self.child.lock(), kind, numbers)
    }
}

fn ask(child: &mut Child, kind: u8, numbers: [u32; 3]) -> io::Result<u16> {
    let (Some(to), Some(from)) = (&mut child.stdin, &mut child.stdout) else {
        return Err(io::Error::from(io::ErrorKind::BrokenPipe));
    };
    let mut question = [kind; 13];
    question[1..].copy_from_slice(numbers.map(u32::to_le_bytes).as_flattened());
    to.write_all(&question)?;
    let mut answer = [0; 2];
    from.read_exact(&mut answer)?;
    Ok(u16::from_le_bytes(answer))
}

fn halves(number: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = number.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}

/// Runs the helper process for the mount of `device` on `dir`: answers questions from standard input on standard output
/// until the server is gone.
pub fn serve_unmounts(device: &Path, dir: &Path) {
    let mut taken = Vec::new();
    let (mut ask, mut answer) = (io::stdin().lock(), io::stdout().lock());
    let mut kind = [0];
    let mut numbers = [[0; 4]; 3];
    while ask.read_exact(&mut kind).and_then(|()| ask.read_exact(numbers.as_flattened_mut())).is_ok() {
        let [pid, number, user] = numbers.map(u32::from_le_bytes);
        let yes = |is_so: bool| if is_so { YES } else { NO };
        let processes = LocalProcesses;
        let [kind] = kind;
        let file = if kind == FILE { processes.file_of(pid, number) } else { None };
        let answered = match kind {
            GROUP => yes(processes.is_in_group(pid, number, Some(user).filter(|user| *user != ANYBODY))),
            CAPABILITY => processes.has_capability(pid, number).map_or(UNKNOWN, yes),
            READ_ONLY => {
                let device = u64::from(user) << 32 | u64::from(number);
                processes.is_read_only_for(pid, device).map_or(UNKNOWN, yes)
            }
            DYING => processes.is_dying(pid).map_or(UNKNOWN, yes),
            PROCESSOR => {
                let number = crate::transport::processor_of(pid).and_then(|number| u16::try_from(number).ok());
                number.filter(|number| *number < NO).unwrap_or(UNKNOWN)
            }
            UMASK => processes.umask_of(pid).and_then(|umask| u16::try_from(umask).ok()).unwrap_or(NO),
            FILE => yes(file.is_some()),
            TAKE_DEVICE => {
                let rdev = u64::from(user) << 32 | u64::from(number);
                taken.extend(Place { device: device.to_owned(), rdev, dir: dir.to_owned() }.take());
                yes(!taken.is_empty())
            }
            kind => match mount::unmount(dir, kind == LAZY) {
                Err(MountError::NotMounted(_)) => GONE,
                unmounted => yes(unmounted.is_ok()),
            },
        };
        let mut bytes = answered.to_le_bytes().to_vec();
        if let Some(file) = file {
            bytes.extend([file.device, file.ino].map(u64::to_le_bytes).as_flattened());
        }
        if answer.write_all(&bytes).and_then(|()| answer.flush()).is_err() {
            return;
        }
    }
}
