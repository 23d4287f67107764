//! Explains errors by error number, and says what to do. The number comes from the engine for an image, from the server
//! for a mount.

use std::fmt::Display;
use std::io;

use anyhow::anyhow;
use rustix::io::Errno;

/// An error that has an error number.
pub(super) trait Coded: std::error::Error + Send + Sync + 'static {
    fn errno(&self) -> Option<Errno>;
}

impl Coded for io::Error {
    fn errno(&self) -> Option<Errno> {
        self.raw_os_error().map(Errno::from_raw_os_error)
    }
}

impl Coded for ubtrfs_fs::Error {
    fn errno(&self) -> Option<Errno> {
        Some(Errno::from_raw_os_error(ubtrfs_fs::Error::errno(self)))
    }
}

pub(super) fn not_a_subvolume(what: impl Display) -> anyhow::Error {
    anyhow!("{what} is not a subvolume; list them with: ubtrfs subvolume list")
}

/// Makes a message: `cannot VERB WHAT: why; what to do`.
pub(super) fn explain(verb: &str, what: impl Display, error: impl Coded) -> anyhow::Error {
    let context = format!("cannot {verb} {what}");
    match advice(verb, error.errno()) {
        Some(advice) => anyhow!("{context}: {advice}"),
        None => anyhow::Error::new(error).context(context),
    }
}

/// Reasons for which a subvolume may not be deleted; all have one error number.
pub(super) enum Refusal {
    /// It is the default subvolume.
    Default,
    /// It or its directory is immutable or append-only.
    Flags,
    /// Users may not delete subvolumes in this mount.
    NotAllowed,
}

/// Makes a message like [`explain`] for a failed deletion; calls `why` if the deletion is not permitted.
pub(super) fn explain_delete(what: impl Display, error: impl Coded, why: impl FnOnce() -> Refusal) -> anyhow::Error {
    if error.errno() != Some(Errno::PERM) {
        return explain(DELETE, what, error);
    }
    let why = match why() {
        Refusal::Default => "it is the default subvolume; choose another one first, with: ubtrfs subvolume set-default",
        Refusal::Flags => "it or the directory that it is in is immutable or append-only; mount it, and: chattr -i -a",
        Refusal::NotAllowed => {
            "users may not delete subvolumes here; do it as root, mount with -o user_subvol_rm_allowed, or remove an empty one \
             with rmdir"
        }
    };
    anyhow!("cannot {DELETE} {what}: {why}")
}

fn advice(verb: &str, errno: Option<Errno>) -> Option<&'static str> {
    let deletes = verb == DELETE;
    Some(match errno? {
        Errno::EXIST => "it exists; choose another name",
        Errno::NOTEMPTY => "it holds other subvolumes; delete those first (see: ubtrfs subvolume list)",
        Errno::BUSY if deletes => "it is what is mounted or opened; do it with another one as the root (-o subvolid=5)",
        Errno::NOTCONN | Errno::CONNABORTED => "this mount's server has ended; take the mount away with: ubtrfs umount",
        Errno::PERM => "it is somebody else's; do it as its owner or as root",
        Errno::ACCESS => "permission denied; do it as a user who may change the directory, or as root",
        Errno::INVAL | Errno::NOTDIR if deletes => "it is not a subvolume; remove it with rm",
        Errno::INVAL | Errno::NOENT if verb == SET_DEFAULT => {
            "there is no such subvolume; list them with: ubtrfs subvolume list"
        }
        Errno::ROFS => {
            "it is read-only; mount it read-write, or let the subvolume take changes with: ubtrfs subvolume set-read-only"
        }
        Errno::NAMETOOLONG => "the name is too long; choose one of at most 255 bytes",
        _ => return None,
    })
}

pub(super) const DELETE: &str = "delete";
pub(super) const SET_DEFAULT: &str = "make the default subvolume of";
