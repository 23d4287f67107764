//! Explains failures of commands by error number, with what to do next.

use std::fmt::Display;

use anyhow::anyhow;
use rustix::io::Errno;
use ubtrfs_control::Failure;

pub(super) fn not_a_subvolume(what: impl Display) -> anyhow::Error {
    anyhow!("{what} is not a subvolume; list them with: ubtrfs subvolume list")
}

/// Makes an error with the message `cannot VERB WHAT: why; what to do`.
pub(super) fn explain(verb: &str, what: impl Display, failure: Failure) -> anyhow::Error {
    let context = format!("cannot {verb} {what}");
    let advice = if failure.has_advice { None } else { advice(verb, failure.errno()) };
    match advice {
        Some(advice) => anyhow!("{context}: {advice}"),
        None => anyhow::Error::new(failure).context(context),
    }
}

fn advice(verb: &str, errno: Errno) -> Option<&'static str> {
    let deletes = verb == DELETE;
    Some(match errno {
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
