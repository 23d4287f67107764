//! The seccomp filter of a confined server (X1, X3).

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

pub(super) fn filter_calls() -> Result<(), String> {
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
