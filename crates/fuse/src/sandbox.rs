//! Confining the server: once devices and /dev/fuse are open, it needs nothing of the system but to read and write them.
//!
//! - X1. After [`confine`] no thread opens a file, makes a network socket, runs a program, looks at another process, mounts,
//!   or changes its rights: seccomp answers EPERM to every system call that is not on the list. All threads that exist get
//!   the filter, and those that they start.
//! - X2. Landlock denies the calling thread, and those that it starts, every path, as a second wall.
//! - X3. What is not on the list fails; it does not kill the server, whose data would be lost with it.
//! - X4. Unmounting needs rights that are gone then: [`Unmounter`] is a process that was started before and can do that
//!   alone.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use landlock::{ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetStatus};
use parking_lot::Mutex;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

use crate::mount::{self, MountError};

/// What became of confining.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// System calls are filtered.
    pub seccomp: bool,
    /// Paths are denied by Landlock too.
    pub landlock: bool,
    /// Why something is missing.
    pub missing: Vec<String>,
}

/// Takes every right from this process that serving a mount does not need (X1, X2). Cannot be undone.
pub fn confine() -> Confinement {
    let mut done = Confinement::default();
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
    // clone3 hides its flags from a filter; where it is absent, the C library uses clone, which is looked at. A second
    // answer needs a second filter, and of two answers the kernel takes the stricter one.
    let absent = SeccompAction::Errno(rustix::io::Errno::NOSYS.raw_os_error().unsigned_abs());
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let filter = SeccompFilter::new(clone3, SeccompAction::Allow, absent, arch).map_err(|error| text(&error))?;
    let no_clone3: BpfProgram = filter.try_into().map_err(|error| format!("{error}"))?;
    seccompiler::apply_filter_all_threads(&no_clone3).map_err(|error| text(&error))?;
    seccompiler::apply_filter_all_threads(&program).map_err(|error| text(&error))
}

/// What is allowed: reading and writing what is open, memory, threads, locks, clocks, and to end.
fn rules() -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    let flag = |flag: i32| SeccompCmpOp::MaskedEq(u64::from(flag.unsigned_abs()));
    let argument = |index, op, value: i32| {
        SeccompCondition::new(index, SeccompCmpArgLen::Dword, op, u64::from(value.unsigned_abs()))
    };
    // Threads, no processes.
    let thread = libc::CLONE_THREAD;
    rules.insert(libc::SYS_clone, vec![SeccompRule::new(vec![argument(0, flag(thread), thread)?])?]);
    rules.insert(libc::SYS_clone3, Vec::new());
    // Nothing is typed into a terminal.
    let not = |value: u64| SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, value);
    rules.insert(libc::SYS_ioctl, vec![SeccompRule::new(vec![not(libc::TIOCSTI)?])?]);
    // No code that is not there already.
    let no_exec =
        || Ok::<_, seccompiler::BackendError>(vec![SeccompRule::new(vec![argument(2, flag(libc::PROT_EXEC), 0)?])?]);
    rules.insert(libc::SYS_mmap, no_exec()?);
    rules.insert(libc::SYS_mprotect, no_exec()?);
    Ok(rules)
}

const ALLOWED: &[i64] = &[
    // Devices, /dev/fuse, pipes, the control socket and the system's log, all of them open.
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
    libc::SYS_close,
    libc::SYS_dup3,
    libc::SYS_accept4,
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
    // Memory.
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
    libc::SYS_tgkill,
    libc::SYS_prctl,
    libc::SYS_getcpu,
    // Clocks and the rest.
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

/// A process that unmounts one directory when the confined server asks for it (X4).
#[derive(Debug)]
pub struct Unmounter {
    child: Mutex<Child>,
}

const LAZY: u8 = b'l';
const PLAIN: u8 = b'p';
const OK: u8 = b'k';

impl Unmounter {
    /// Starts it: `command` runs a program that calls [`serve_unmounts`].
    pub fn start(mut command: Command) -> io::Result<Self> {
        // A terminal's signals are for the server.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        Ok(Self { child: Mutex::new(command.spawn()?) })
    }

    /// Unmounts, as the server would.
    pub(crate) fn unmount(&self, dir: &Path, lazy: bool) -> Result<(), MountError> {
        let mut child = self.child.lock();
        let child = &mut *child;
        let mut ask = || {
            let (Some(to), Some(from)) = (&mut child.stdin, &mut child.stdout) else {
                return Err(io::Error::from(io::ErrorKind::BrokenPipe));
            };
            to.write_all(&[if lazy { LAZY } else { PLAIN }])?;
            let mut answer = [0];
            from.read_exact(&mut answer)?;
            if answer[0] == OK { Ok(()) } else { Err(io::Error::other("it is in use, or may not be unmounted")) }
        };
        ask().map_err(|source| MountError::Session { dir: dir.display().to_string(), source })
    }
}

/// The other end: unmounts `dir` when asked for on standard input, until the server is gone.
pub fn serve_unmounts(dir: &Path) {
    let (mut ask, mut answer) = (io::stdin().lock(), io::stdout().lock());
    let mut byte = [0];
    while ask.read_exact(&mut byte).is_ok() {
        let done = mount::unmount(dir, byte[0] == LAZY);
        let text = if done.is_ok() { OK } else { b'e' };
        if answer.write_all(&[text]).and_then(|()| answer.flush()).is_err() {
            return;
        }
    }
}
