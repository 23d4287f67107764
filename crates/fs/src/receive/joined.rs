//! [`JoinedCommands`]: consecutive commands that one change of the filesystem applies. Streams make each inode with a
//! temporary name and rename it at once, and set owner, permissions and times of an inode by one command each.
//!
//! - I1. The result equals the result of the single commands, except for the directory of the temporary name, which
//!   does not change.
//! - I2. Either all joined commands are applied, or none: if the joined change fails, nothing has changed. The commands
//!   are then applied one by one, so that the error belongs to the command that fails.

use ubtrfs_stream::{CommandKind, FrameHeader, StreamCommand, parse};

use super::apply::new_inode;
use super::error::ReceiveProblem;
use crate::types::{NewInode, SetAttr, SetTime, mode};

/// Consecutive commands, as one change.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum JoinedCommands<'c> {
    /// An inode is created with a temporary name, and renamed.
    Create { temporary: &'c [u8], to: &'c [u8], new: NewInode<'c> },
    /// Attributes of an inode.
    SetAttr { path: &'c [u8], set: SetAttr },
}

impl<'c> JoinedCommands<'c> {
    /// Joins a command with the frames after it. Also returns the number of joined frames, which is at least 1.
    pub(crate) fn new(
        header: &FrameHeader,
        command: &StreamCommand<'c>,
        rest: impl Iterator<Item = (&'c FrameHeader, &'c [u8])>,
    ) -> Option<(Self, usize)> {
        match header.position.kind? {
            CommandKind::Mkfile
            | CommandKind::Mkdir
            | CommandKind::Mknod
            | CommandKind::Mkfifo
            | CommandKind::Mksock
            | CommandKind::Symlink => Self::create(command, rest),
            CommandKind::Chown | CommandKind::Chmod | CommandKind::Utimes => Self::attributes(command, rest),
            _ => None,
        }
    }

    fn create(
        command: &StreamCommand<'c>,
        mut rest: impl Iterator<Item = (&'c FrameHeader, &'c [u8])>,
    ) -> Option<(Self, usize)> {
        let temporary = command.path()?;
        let (header, bytes) = rest.next()?;
        if header.position.kind != Some(CommandKind::Rename) {
            return None;
        }
        let Ok(StreamCommand::Rename { path, to }) = parse(header, bytes) else { return None };
        let new = new_inode(command)?.ok()?;
        (path == temporary).then_some((Self::Create { temporary, to, new }, 1))
    }

    fn attributes(
        command: &StreamCommand<'c>,
        rest: impl Iterator<Item = (&'c FrameHeader, &'c [u8])>,
    ) -> Option<(Self, usize)> {
        let path = command.path()?;
        let mut set = SetAttr::default();
        if !add(&mut set, command) {
            return None;
        }
        let mut nr_joined = 0;
        for (header, bytes) in rest {
            let kind = header.position.kind;
            if !matches!(kind, Some(CommandKind::Chown | CommandKind::Chmod | CommandKind::Utimes)) {
                break;
            }
            let Ok(next) = parse(header, bytes) else { break };
            if next.path() != Some(path) || !add(&mut set, &next) {
                break;
            }
            nr_joined = usize::saturating_add(nr_joined, 1);
        }
        (nr_joined > 0).then_some((Self::SetAttr { path, set }, nr_joined))
    }
}

/// Merges the attributes that a command sets into `set`. Returns false and leaves `set` unchanged if the command is
/// invalid, or if one change could not have the same result as the single commands.
fn add(set: &mut SetAttr, command: &StreamCommand<'_>) -> bool {
    let Ok(added) = attributes_of(command) else { return false };
    // A change of owner removes permission bits that were set before.
    if added.uid.is_some() && set.mode.is_some() {
        return false;
    }
    *set = SetAttr {
        mode: added.mode.or(set.mode),
        uid: added.uid.or(set.uid),
        gid: added.gid.or(set.gid),
        atime: added.atime.or(set.atime),
        mtime: added.mtime.or(set.mtime),
        otime: added.otime.or(set.otime),
        ..*set
    };
    true
}

/// The attributes that a `chown`, `chmod` or `utimes` command sets; empty for any other command. `utimes` sets the
/// times that Linux can set, and the creation time. The change time becomes the current time, as on Linux.
pub(crate) fn attributes_of(command: &StreamCommand<'_>) -> Result<SetAttr, ReceiveProblem> {
    let number =
        |id: u64| u32::try_from(id).map_err(|_| crate::Error::InvalidArgument("the user or group id is too large"));
    Ok(match *command {
        StreamCommand::Chown { uid, gid, .. } => {
            SetAttr { uid: Some(number(uid)?), gid: Some(number(gid)?), ..SetAttr::default() }
        }
        StreamCommand::Chmod { mode: bits, .. } => {
            SetAttr { mode: Some(bits as u32 & mode::PERMISSIONS), ..SetAttr::default() }
        }
        StreamCommand::Utimes { atime, mtime, otime, .. } => {
            let (atime, mtime) = (Some(SetTime::At(atime)), Some(SetTime::At(mtime)));
            SetAttr { atime, mtime, otime, ..SetAttr::default() }
        }
        _ => SetAttr::default(),
    })
}
