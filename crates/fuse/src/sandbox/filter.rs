//! The seccomp filter of a confined server (X1, X3, X6).
//!
//! A call without pointers to names and without process ids is allowed whole. Every other call is allowed with certain
//! arguments only. `tests/it/injected_calls.rs` makes all calls in a confined process, and has the list of those that pass.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// Applies the filter of the server to all threads.
pub(super) fn filter_server() -> Result<(), String> {
    filter_calls(server_rules().map_err(|error| error.to_string())?)
}

/// Applies the filter of the helper process of root's server.
pub(super) fn filter_helper() -> Result<(), String> {
    filter_calls(helper_rules().map_err(|error| error.to_string())?)
}

fn filter_calls(rules: Rules) -> Result<(), String> {
    let arch: TargetArch = std::env::consts::ARCH.try_into().map_err(|error| format!("{error}"))?;
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let denied = SeccompAction::Errno(rustix::io::Errno::PERM.raw_os_error().unsigned_abs());
    let filter = SeccompFilter::new(rules, denied, SeccompAction::Allow, arch);
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

/// Allowed calls. A call with rules is allowed if its arguments match one of them.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// The calls that the server may make: reading and writing open files, memory, threads, locks, clocks, and exiting.
fn server_rules() -> Result<Rules, BackendError> {
    let mut rules: Rules = ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    rules.insert(libc::SYS_clone3, Vec::new());
    rules.extend(rules_on_arguments()?);
    Ok(rules)
}

/// The calls that the helper process may make: answering, reading /proc, unmounting, and moving threads. It opens files
/// for reading only, which is enough even to claim a device.
fn helper_rules() -> Result<Rules, BackendError> {
    let mut rules: Rules = HELPER_ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    rules.insert(libc::SYS_clone3, Vec::new());
    let with_arguments =
        [libc::SYS_mmap, libc::SYS_mprotect, libc::SYS_madvise, libc::SYS_prctl, libc::SYS_fcntl, libc::SYS_tgkill];
    rules.extend(rules_on_arguments()?.into_iter().filter(|(call, _)| with_arguments.contains(call)));
    let reads_only = |index| {
        let flags = masked(index, libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC, libc::O_RDONLY)?;
        Ok::<_, BackendError>(vec![SeccompRule::new(vec![flags])?])
    };
    rules.insert(libc::SYS_openat, reads_only(2)?);
    #[cfg(target_arch = "x86_64")]
    rules.insert(libc::SYS_open, reads_only(1)?);
    Ok(rules)
}

/// The calls that are allowed with certain arguments only (X6). Each rule of a call allows it.
fn rules_on_arguments() -> Result<Vec<(i64, Vec<SeccompRule>)>, BackendError> {
    let rule = |conditions: Vec<Condition>| SeccompRule::new(conditions.into_iter().collect::<Result<_, _>>()?);
    let one_of = |index, values: &[i32]| {
        values.iter().map(|value| rule(vec![equals(index, *value)])).collect::<Result<Vec<_>, _>>()
    };
    Ok(vec![
        // Signals may go only to this process, because other processes of the same user may exist.
        (libc::SYS_tgkill, vec![rule(vec![equals(0, std::process::id().cast_signed())])?]),
        // A thread may change its own priorities as far as its rights allow, and may choose its own processors; 0 stands for the calling thread.
        (libc::SYS_getpriority, vec![rule(vec![equals(0, 0), equals(1, 0)])?]),
        (libc::SYS_setpriority, vec![rule(vec![equals(0, 0), equals(1, 0)])?]),
        (libc::SYS_ioprio_set, vec![rule(vec![equals(0, IOPRIO_WHO_PROCESS), equals(1, 0)])?]),
        (libc::SYS_sched_setaffinity, vec![rule(vec![equals(0, 0)])?]),
        // Threads may be made, but neither processes nor namespaces.
        (libc::SYS_clone, vec![rule(vec![masked(0, !THREAD_FLAGS | libc::CLONE_THREAD, libc::CLONE_THREAD)])?]),
        // No memory may be mapped as executable, or made executable later.
        (libc::SYS_mmap, vec![rule(vec![masked(2, libc::PROT_EXEC, 0)])?]),
        (libc::SYS_mprotect, vec![rule(vec![masked(2, libc::PROT_EXEC, 0)])?]),
        (libc::SYS_madvise, one_of(2, &ADVICE)?),
        (libc::SYS_prctl, one_of(0, &PRCTLS)?),
        // The denied commands of fcntl choose the process that gets the signals of a file, lock files, and lease them.
        (libc::SYS_fcntl, one_of(1, &[libc::F_GETFD, libc::F_GETFL, libc::F_DUPFD_CLOEXEC])?),
        // The denied ioctls type into terminals, query them, and choose the process that gets the signals of a file.
        (libc::SYS_ioctl, one_of(1, &IOCTLS)?),
        // A thread may enable its io_uring, which was made before confinement and is restricted to certain operations.
        (libc::SYS_io_uring_register, one_of(1, &[IORING_REGISTER_ENABLE_RINGS])?),
        // A message may go only to the other end of a connection. A datagram socket, such as that of the system log,
        // could send to every socket whose name it gives. For this reason, sendmsg is denied: the filter cannot see the
        // name that its argument points to.
        (libc::SYS_sendto, vec![rule(vec![equals_pointer(4, 0)])?]),
        (
            libc::SYS_socketpair,
            vec![rule(vec![equals(0, libc::AF_UNIX), masked(1, SOCK_TYPE_MASK, libc::SOCK_STREAM)])?],
        ),
        (
            libc::SYS_getsockopt,
            [libc::SO_PEERCRED, libc::SO_ERROR]
                .map(|option| rule(vec![equals(1, libc::SOL_SOCKET), equals(2, option)]))
                .into_iter()
                .collect::<Result<_, _>>()?,
        ),
    ])
}

type Condition = Result<SeccompCondition, BackendError>;

fn equals(index: u8, value: i32) -> Condition {
    SeccompCondition::new(index, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, u64::from(value.cast_unsigned()))
}

fn equals_pointer(index: u8, value: u64) -> Condition {
    SeccompCondition::new(index, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, value)
}

fn masked(index: u8, mask: i32, value: i32) -> Condition {
    let op = SeccompCmpOp::MaskedEq(u64::from(mask.cast_unsigned()));
    SeccompCondition::new(index, SeccompCmpArgLen::Dword, op, u64::from(value.cast_unsigned()))
}

/// The flags with which C libraries make a thread.
const THREAD_FLAGS: i32 = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_SETTID
    | libc::CLONE_CHILD_CLEARTID
    | libc::CLONE_DETACHED;

/// Advice of allocators and C libraries about memory: to free it, to use huge pages for it, and to guard stacks.
const ADVICE: [i32; 6] = [
    libc::MADV_DONTNEED,
    libc::MADV_FREE,
    libc::MADV_HUGEPAGE,
    libc::MADV_NOHUGEPAGE,
    MADV_GUARD_INSTALL,
    MADV_GUARD_REMOVE,
];
const MADV_GUARD_INSTALL: i32 = 102;
const MADV_GUARD_REMOVE: i32 = 103;

/// The allowed operations of prctl: to name threads and memory, and to read the auxiliary vector.
const PRCTLS: [i32; 3] = [libc::PR_SET_NAME, libc::PR_SET_VMA, PR_GET_AUXV];
const PR_GET_AUXV: i32 = 0x4155_5856;

/// The first argument of ioprio_set for one thread.
const IOPRIO_WHO_PROCESS: i32 = 1;
const IORING_REGISTER_ENABLE_RINGS: i32 = 12;
/// The part of the second argument of socketpair that is not flags.
const SOCK_TYPE_MASK: i32 = 0xf;

/// The allowed ioctls: discarding blocks of a device, and making sockets blocking or non-blocking.
const IOCTLS: [i32; 2] = [BLKDISCARD, FIONBIO];
/// `_IO(0x12, 119)` of linux/fs.h.
const BLKDISCARD: i32 = 0x1277;
/// The number of asm-generic/ioctls.h.
const FIONBIO: i32 = 0x5421;

/// The calls that are allowed with any arguments.
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
    libc::SYS_lseek,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_close,
    libc::SYS_dup3,
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    libc::SYS_ppoll,
    libc::SYS_epoll_pwait,
    libc::SYS_io_uring_enter,
    // Calls on memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mlock,
    libc::SYS_membarrier,
    // Threads and signals.
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_gettid,
    libc::SYS_getpid,
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

/// The calls that the helper process may make with any arguments.
const HELPER_ALLOWED: &[i64] = &[
    libc::SYS_umount2,
    libc::SYS_sched_setaffinity,
    // Questions, answers and /proc.
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_close,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    // Memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    // The only thread, and its end.
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_getrandom,
    libc::SYS_exit,
    libc::SYS_exit_group,
];
