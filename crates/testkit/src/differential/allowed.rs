//! The accepted differences between our mount and Linux's (D1), each with its reason.
//!
//! [`ALLOWED`] lists differences that stay: the kernel or FUSE causes them, or ubtrfs chose them. [`KNOWN`] lists
//! faults of ubtrfs that are not fixed yet. `docs/conformance.md` lists all accepted differences, and a test compares
//! that list with the lists here.

use super::bed::Difference;
use super::call::Call;

/// An accepted difference.
pub struct Allowed {
    /// A short name, also in the documentation.
    pub name: &'static str,
    /// The reason for the difference.
    pub reason: &'static str,
    /// Whether the two filesystems differ afterwards, so that the round must end.
    pub ends_round: bool,
    matches: fn(&Difference) -> bool,
}

/// Differences that the kernel or FUSE causes, or that ubtrfs chose.
pub const ALLOWED: &[Allowed] = &[
    Allowed {
        name: "immutable-after-rights",
        reason: "FUSE's inodes in the kernel know no +i and +a: it checks rights and kinds first, and the server refuses \
                 what passes. Linux checks +i and +a first, so its EPERM is another error here",
        ends_round: false,
        matches: |it| it.guarded && it.field == "result" && it.linux == "EPERM" && it.ours.starts_with('E'),
    },
    Allowed {
        name: "access-to-immutable",
        reason: "access(2) for writing on +i: the kernel answers by modes alone (see above), and opening then fails with EPERM",
        ends_round: false,
        matches: |it| it.guarded && matches!(it.step.call, Call::Access { .. }) && it.field == "result",
    },
    Allowed {
        name: "copy-of-nothing-to-immutable",
        reason: "the kernel itself answers a copy_file_range that finds nothing to copy, without knowing of +i (see above); Linux \
                 fails with EPERM. That nothing changes is compared",
        ends_round: false,
        matches: |it| {
            it.guarded
                && matches!(it.step.call, Call::CopyFileRange { .. })
                && it.field == "result"
                && it.linux == "EPERM"
                && it.ours == "success"
        },
    },
    Allowed {
        name: "flags-of-special-files",
        reason: "chattr of another user's device, pipe or socket: the kernel checks the owner before it finds that FUSE has no \
                 flags of such files; Linux finds that first",
        ends_round: false,
        matches: |it| {
            matches!(it.step.call, Call::SetFlags { .. })
                && it.field == "result"
                && it.ours == "EPERM"
                && it.linux == "ENOTTY"
        },
    },
    Allowed {
        name: "read-of-a-directory",
        reason: "read(2) of a directory fails with EISDIR, and with EINVAL where its position is past the largest offset; the \
                 two have other positions at the end",
        ends_round: false,
        matches: |it| matches!(it.step.call, Call::Read { .. }) && it.ours == "EISDIR" && it.linux == "EINVAL",
    },
    Allowed {
        name: "chown-of-nothing",
        reason: "chown to neither a user nor a group, of a file with set-id bits, by another than its owner and without \
                 CAP_FOWNER: FUSE sends the same request before fallocate, so the server leaves the file alone; Linux fails",
        ends_round: true,
        matches: |it| {
            matches!(it.step.call, Call::Chown { uid: None, gid: None, .. } | Call::Fchown { uid: None, gid: None, .. })
        },
    },
    Allowed {
        name: "fallocate-drops-set-id",
        reason: "the kernel's FUSE takes set-id bits away before it asks for any fallocate; btrfs does only where something \
                 changes",
        ends_round: true,
        matches: |it| matches!(it.step.call, Call::Fallocate { .. }) && it.field == "mode",
    },
    Allowed {
        name: "holes",
        reason: "which zeros are holes is a filesystem's choice: Linux stores the block of the old end of a file that is made \
                 longer. That nothing but zeros is passed over is compared",
        ends_round: false,
        matches: |it| matches!(it.step.call, Call::Lseek { .. }) && it.field == "position",
    },
    Allowed {
        name: "times-of-pipes",
        reason: "what is written to a pipe, and that it was opened, stays in the kernel, which leaves the times of inodes to a FUSE \
                 server; Linux's btrfs takes the time of the write",
        ends_round: true,
        matches: |it| {
            it.is_pipe
                && matches!(it.step.call, Call::Write { .. })
                && matches!(it.field.as_str(), "mtime" | "ctime")
                && it.ours == "kept"
        },
    },
    Allowed {
        name: "end-of-an-open-directory",
        reason: "the server answers OPENDIR with ENOSYS, so a reader's end is known from its first read; Linux's \
                 btrfs notes it when the directory is opened or rewound. POSIX leaves it open whether new names are listed",
        ends_round: false,
        matches: |it| matches!(it.step.call, Call::Getdents { .. }) && it.field == "entries",
    },
    Allowed {
        name: "read-only-after-rights",
        reason: "of a read-only subvolume, or in one, the kernel checks rights and kinds before it asks the server; Linux finds first that \
                 nothing may be changed",
        ends_round: false,
        matches: |it| it.field == "result" && it.linux == "EROFS" && it.ours.starts_with('E'),
    },
    Allowed {
        name: "access-to-a-read-only-subvolume",
        reason: "access(2) for writing in a read-only subvolume: the kernel checks modes and does not ask the server",
        ends_round: false,
        matches: |it| {
            matches!(it.step.call, Call::Access { .. })
                && it.field == "result"
                && it.ours == "success"
                && it.linux == "EROFS"
        },
    },
    Allowed {
        name: "ctime-of-a-renamed-subvolume",
        reason: "Linux changes the ctime of a subvolume that is renamed in memory and does not store it",
        ends_round: false,
        matches: |it| {
            matches!(it.step.call, Call::Remount | Call::Swap)
                && it.field == "ctime"
                && it.object.starts_with("Linux's image before")
                && it.is_subvolume
        },
    },
    Allowed {
        name: "acl-in-a-read-only-subvolume",
        reason: "Linux sets ACLs in a read-only subvolume; here that fails with EROFS, as all else does",
        ends_round: true,
        matches: |it| {
            let is_of_acl = match &it.step.call {
                Call::SetAcl { .. } => true,
                Call::Removexattr { name, .. } => name.starts_with("system.posix_acl"),
                _ => false,
            };
            is_of_acl && it.field == "result" && it.ours == "EROFS" && it.linux == "success"
        },
    },
    Allowed {
        name: "times-of-mappings",
        reason: "of a file that was stored to through a mapping: Linux's times change at once; the kernel's FUSE tells the \
                 server when it writes the pages back, and the times change then",
        ends_round: false,
        matches: |it| it.mapped && matches!(it.field.as_str(), "mtime" | "ctime"),
    },
    Allowed {
        name: "stand-in-in-a-read-only-snapshot",
        reason: "the empty directory in place of a subvolume that a snapshot left out: Linux changes it in memory, also in a \
                 read-only snapshot, and forgets that at the next mount; here it fails with EROFS",
        ends_round: true,
        matches: |it| it.left_out && it.field == "result" && it.ours == "EROFS" && it.linux == "success",
    },
];

/// Differences that are faults of ubtrfs and are to be fixed.
pub const KNOWN: &[Allowed] = &[
    Allowed {
        name: "times-of-fallocate",
        reason: "whether punching a hole where no data is changes the times depends in Linux on the holes that it remembers",
        ends_round: false,
        matches: |it| {
            matches!(it.step.call, Call::Fallocate { mode: 3, .. }) && matches!(it.field.as_str(), "mtime" | "ctime")
        },
    },
    Allowed {
        name: "left-out-subvolumes",
        reason: "a change of the empty directory in place of a subvolume that a snapshot left out fails on both sides, with other \
                 errors; how long a change of its owner stays depends on who has it open, so owner and times are not compared",
        ends_round: false,
        matches: |it| it.left_out && it.field == "result" && it.ours.starts_with('E') && it.linux.starts_with('E'),
    },
];

/// Returns the entry that allows a difference.
pub(crate) fn allowed(difference: &Difference) -> Option<&'static Allowed> {
    ALLOWED.iter().chain(KNOWN).find(|entry| (entry.matches)(difference))
}
