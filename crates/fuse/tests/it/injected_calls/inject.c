/* Makes system calls in the main thread of another process, so that the calls are subject to its confinement.
 *
 * Usage: inject PID. Each line of the input consists of the number of a call and its six arguments. For each, a line with
 * the result is printed: a negative number is an error. The process stays stopped until this program ends. */

#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__x86_64__)
static const unsigned char SYSCALL[] = {0x0f, 0x05};
#elif defined(__aarch64__)
static const unsigned char SYSCALL[] = {0x01, 0x00, 0x00, 0xd4};
#else
#error "unknown architecture"
#endif

typedef struct user_regs_struct Registers;

static void fail(const char *what) {
    fprintf(stderr, "inject: %s: %s\n", what, strerror(errno));
    exit(1);
}

/* The address of an instruction that makes a system call, in memory that the process may execute. */
static uint64_t find_instruction(pid_t pid) {
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *maps = fopen(path, "r");
    snprintf(path, sizeof path, "/proc/%d/mem", (int)pid);
    int memory = open(path, O_RDONLY);
    if (!maps || memory < 0) fail("cannot read the memory");
    while (fgets(line, sizeof line, maps)) {
        uint64_t from, to;
        char mode[8];
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &from, &to, mode) != 3 || mode[2] != 'x') continue;
        static unsigned char bytes[1 << 16];
        for (uint64_t at = from; at < to; at += sizeof bytes) {
            size_t want = to - at < sizeof bytes ? to - at : sizeof bytes;
            ssize_t len = pread(memory, bytes, want, (off_t)at);
            if (len <= 0) break;
            unsigned char *found = memmem(bytes, (size_t)len, SYSCALL, sizeof SYSCALL);
            if (found) return at + (uint64_t)(found - bytes);
        }
    }
    errno = ENOENT;
    fail("no instruction that makes a system call");
    return 0;
}

static void set(Registers *regs, uint64_t at, const uint64_t *call) {
#if defined(__x86_64__)
    regs->rip = at;
    regs->orig_rax = (unsigned long long)-1;
    regs->rax = call[0];
    regs->rdi = call[1];
    regs->rsi = call[2];
    regs->rdx = call[3];
    regs->r10 = call[4];
    regs->r8 = call[5];
    regs->r9 = call[6];
#else
    regs->pc = at;
    regs->regs[8] = call[0];
    memcpy(regs->regs, call + 1, 6 * sizeof *call);
#endif
}

static int64_t result(const Registers *regs) {
#if defined(__x86_64__)
    return (int64_t)regs->rax;
#else
    return (int64_t)regs->regs[0];
#endif
}

int main(int argc, char **argv) {
    pid_t pid = argc == 2 ? atoi(argv[1]) : 0;
    int status;
    if (ptrace(PTRACE_SEIZE, pid, 0, PTRACE_O_EXITKILL) || ptrace(PTRACE_INTERRUPT, pid, 0, 0)) fail("cannot trace");
    if (waitpid(pid, &status, __WALL) != pid || !WIFSTOPPED(status)) fail("the process does not stop");
    Registers saved;
    struct iovec area = {&saved, sizeof saved};
    if (ptrace(PTRACE_GETREGSET, pid, NT_PRSTATUS, &area)) fail("cannot read the registers");
    uint64_t at = find_instruction(pid), call[7];
    while (scanf("%" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64, call, call + 1, call + 2,
                 call + 3, call + 4, call + 5, call + 6) == 7) {
        Registers regs = saved;
        set(&regs, at, call);
        area = (struct iovec){&regs, sizeof regs};
        if (ptrace(PTRACE_SETREGSET, pid, NT_PRSTATUS, &area) || ptrace(PTRACE_SINGLESTEP, pid, 0, 0)) fail("cannot step");
        if (waitpid(pid, &status, __WALL) != pid || !WIFSTOPPED(status)) fail("the process ended");
        if (WSTOPSIG(status) != SIGTRAP) {
            fprintf(stderr, "inject: call %" PRIu64 " caused signal %d\n", call[0], WSTOPSIG(status));
            return 1;
        }
        area = (struct iovec){&regs, sizeof regs};
        if (ptrace(PTRACE_GETREGSET, pid, NT_PRSTATUS, &area)) fail("cannot read the registers");
        printf("%" PRId64 "\n", result(&regs));
        fflush(stdout);
    }
    return 0;
}
