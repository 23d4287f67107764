//! Explains a command's failure by its error number, and names a remedy.

use std::fmt::Display;

use anyhow::anyhow;
use rustix::io::Errno;
use ubtrfs_control::CommandFailure;

use crate::commands::place::CommandTarget;

pub(super) fn not_a_subvolume(what: &CommandTarget) -> anyhow::Error {
    anyhow!("{what} is not a subvolume; list them with: ubtrfs subvolume list {}", what.filesystem())
}

/// Makes an error with the message `cannot VERB WHAT: why; what to do`.
pub(super) fn explain(verb: &str, what: impl Display, failure: CommandFailure) -> anyhow::Error {
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
        Errno::NOTEMPTY => "it contains other subvolumes; delete those too, with -R (see: ubtrfs subvolume list)",
        Errno::BUSY if deletes => {
            "it is the mounted or opened subvolume; open the top level with -o subvolid=5 (which itself cannot be deleted)"
        }
        Errno::NOTCONN | Errno::CONNABORTED => "this mount's server has ended; unmount it with: ubtrfs umount",
        Errno::PERM => "it belongs to another user; run the command as its owner or as root",
        Errno::ACCESS => "permission denied; run the command as a user who may write to the directory, or as root",
        Errno::INVAL | Errno::NOTDIR if deletes => {
            "it is not a subvolume that can be deleted: remove a directory with rm; the top level (id 5) stays"
        }
        Errno::INVAL | Errno::NOENT if verb == SET_DEFAULT => {
            "there is no such subvolume; list them with: ubtrfs subvolume list"
        }
        Errno::ROFS => {
            "its directory is read-only; choose another directory or name, or mount it read-write; the command ubtrfs subvolume \
             set-read-only PATH false makes a subvolume writable"
        }
        Errno::NAMETOOLONG => "the name is too long; choose one of at most 255 bytes",
        _ => return None,
    })
}

pub(super) const DELETE: &str = "delete";
pub(super) const SET_DEFAULT: &str = "set the default subvolume to";
