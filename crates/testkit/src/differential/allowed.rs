//! Differences between our mount and Linux's that pass (D1), each with its reason.
//!
//! [`ALLOWED`] are the kernel's or FUSE's: no server can answer otherwise. [`KNOWN`] are ours and not mended yet; that list
//! gets shorter. `docs/conformance.md` names all of them, and a test compares.

use super::bed::Difference;
use super::call::Call;

/// A difference that passes.
pub struct Allowed {
    /// A short name, also in the documentation.
    pub name: &'static str,
    /// Why it is there.
    pub reason: &'static str,
    /// Whether the two filesystems differ from there on, so that the round ends.
    pub ends_round: bool,
    matches: fn(&Difference) -> bool,
}

/// Differences that are the kernel's or FUSE's.
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
        name: "read-of-a-directory",
        reason: "read(2) of a directory fails with EISDIR, and with EINVAL where its position is past the largest offset; the \
                 two have other positions at the end",
        ends_round: false,
        matches: |it| matches!(it.step.call, Call::Read { .. }) && it.ours == "EISDIR" && it.linux == "EINVAL",
    },
    Allowed {
        name: "chown-of-nothing",
        reason: "chown to neither a user nor a group, of a file with set-id bits and by another than its owner: FUSE sends the \
                 same request before fallocate, so the server leaves the file alone; Linux fails, or drops the bits for \
                 CAP_FOWNER",
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
        name: "end-of-an-open-directory",
        reason: "the kernel does not ask the server to open directories, so a reader's end is known from its first read; Linux's \
                 btrfs notes it when the directory is opened or rewound. POSIX leaves it open whether new names are listed",
        ends_round: false,
        matches: |it| matches!(it.step.call, Call::Getdents { .. }) && it.field == "entries",
    },
];

/// Differences that are ours, and to be mended.
pub const KNOWN: &[Allowed] = &[
    Allowed {
        name: "chown-keeps-set-group-id",
        reason: "chown by root or by one of the group keeps set-group-id of a file that its group cannot execute",
        ends_round: true,
        matches: |it| matches!(it.step.call, Call::Chown { .. } | Call::Fchown { .. }) && it.field == "mode",
    },
    Allowed {
        name: "open-before-append-only",
        reason: "copy_file_range and fallocate go on in Linux on a file that was open for writing before it became +a",
        ends_round: true,
        matches: |it| {
            matches!(it.step.call, Call::CopyFileRange { .. } | Call::Fallocate { .. })
                && it.guarded
                && it.field == "result"
                && it.ours == "EPERM"
        },
    },
    Allowed {
        name: "nocow-and-compression",
        reason: "Linux refuses +C on what has a compression property and the reverse, and couples +c and the property",
        ends_round: true,
        matches: |it| matches!(it.step.call, Call::SetFlags { .. } | Call::SetProperty { .. }),
    },
    Allowed {
        name: "nocow-of-data",
        reason: "taking +C from a file with data is ignored by Linux, as giving it is",
        ends_round: true,
        matches: |it| it.field == "flags",
    },
    Allowed {
        name: "times-of-fallocate",
        reason: "a hole made where no data is leaves the times alone in Linux",
        ends_round: false,
        matches: |it| {
            matches!(it.step.call, Call::Fallocate { .. } | Call::Ftruncate { .. } | Call::Truncate { .. })
                && matches!(it.field.as_str(), "mtime" | "ctime")
        },
    },
    Allowed {
        name: "owner-of-whiteout",
        reason: "the whiteout that a rename leaves belongs to the caller in Linux",
        ends_round: true,
        matches: |it| matches!(it.step.call, Call::Rename { flags, .. } if flags & 4 != 0) && it.field == "owner",
    },
];

/// The entry that allows a difference.
pub(crate) fn allowed(difference: &Difference) -> Option<&'static Allowed> {
    ALLOWED.iter().chain(KNOWN).find(|entry| (entry.matches)(difference))
}
