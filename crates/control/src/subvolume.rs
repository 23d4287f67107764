//! Commands on subvolumes and snapshots.
//!
//! | command            | needs                                                                                    |
//! |--------------------|------------------------------------------------------------------------------------------|
//! | info, default      | only an open file                                                                        |
//! | create             | write and search of the directory                                                        |
//! | snapshot           | write and search of the directory, and ownership of the source's root directory          |
//! | delete             | `user_subvol_rm_allowed`, write and search of the directory and of the subvolume's root directory, the rule of unlink for sticky directories, and that the subvolume is not read-only |
//! | delete by id | the same as delete; the directory need not be reachable                          |
//! | delete, as the user who mounted | write and search of the directory, ownership of the subvolume's root directory, the rule of unlink for sticky directories |
//! | set read-only, set received | ownership of the subvolume's root directory                                              |
//! | set default, list, list deleted, sync | the rights of an administrator ([`CommandContext::require_admin`])                  |
//!
//! rmdir also removes an empty subvolume. It needs the rights that are needed to remove a directory.
//!
//! - U1. Root may run every command. Only root and the user who mounted see the paths of all subvolumes. Other users
//!   see only the path of the subvolume that holds their file.

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_format::item::{QgroupLimit, RootFlags, Timespec};
use ubtrfs_format::{Generation, Ino, RootId};
use ubtrfs_fs::{Error, Fs, InodeId, QgroupId, SubvolumeInfo};
use uuid::Uuid;

use crate::access::may_change_names;
use crate::caller::permit;
use crate::execute::{CommandContext, FileNr};
use crate::failure::{CommandFailure, Result};

/// A command on subvolumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Describes the subvolume that holds a file: [`Response::Info`].
    Info {
        /// The file.
        of: FileNr,
    },
    /// Lists all subvolumes in order of id, a page at a time: [`Response::Page`].
    List {
        /// The first id.
        from: u64,
    },
    /// Lists deleted subvolumes whose space is not free yet, like [`Request::List`]. They have no path and no parent.
    ListDeleted {
        /// The first id.
        from: u64,
    },
    /// Creates an empty subvolume.
    Create {
        /// The directory in which the subvolume is created.
        dir: FileNr,
        /// The new subvolume's name.
        #[serde(with = "crate::bytes")]
        name: Vec<u8>,
        /// The caller's umask.
        umask: u32,
        /// Ids of quota groups that the new subvolume joins. Only administrators may name quota groups.
        #[serde(default)]
        qgroups: Vec<u64>,
        /// Limits of the new subvolume's own quota group. Only administrators may set limits.
        #[serde(default)]
        limits: Option<QgroupLimits>,
    },
    /// Creates a snapshot. Its quota group gets the limits of the source's group.
    Snapshot {
        /// The root directory of the source subvolume.
        source: FileNr,
        /// The directory in which the snapshot is created.
        dir: FileNr,
        /// The snapshot's name.
        #[serde(with = "crate::bytes")]
        name: Vec<u8>,
        /// Whether the snapshot is read-only.
        read_only: bool,
        /// Ids of quota groups that the snapshot joins. Only administrators may name quota groups.
        #[serde(default)]
        qgroups: Vec<u64>,
    },
    /// Deletes a subvolume with everything in it.
    Delete {
        /// The directory that holds the subvolume's name.
        dir: FileNr,
        /// The subvolume's name.
        #[serde(with = "crate::bytes")]
        name: Vec<u8>,
    },
    /// Deletes the subvolume with this id, like [`Request::Delete`], wherever its name is. File 0 is any file of the
    /// filesystem.
    DeleteById {
        /// The subvolume's id.
        id: u64,
    },
    /// Makes a subvolume read-only or writable.
    SetReadOnly {
        /// The subvolume's root directory.
        of: FileNr,
        /// Whether the subvolume becomes read-only.
        read_only: bool,
        /// Whether a received subvolume may become writable, which removes its received UUID.
        #[serde(default)]
        force: bool,
    },
    /// Records from which subvolume a writable one was received: [`Response::Received`].
    SetReceived {
        /// The subvolume's root directory.
        of: FileNr,
        /// The UUID of the sent subvolume.
        uuid: Uuid,
        /// The transaction of the sent subvolume.
        stransid: u64,
        /// The time of sending.
        stime: (i64, u32),
    },
    /// Returns the subvolume that is mounted by default: [`Response::Default`].
    Default,
    /// Sets the subvolume that is mounted by default.
    SetDefault {
        /// The subvolume's id; `None` means the subvolume whose root directory is file 0.
        id: Option<u64>,
    },
    /// Frees the space of deleted subvolumes now.
    Sync,
}

/// The limits of a quota group, with the fields as on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QgroupLimits {
    /// Bits that select the limits in force: 1 for `max_referenced`, 2 for `max_exclusive`.
    pub flags: u64,
    /// Limit of the referenced bytes.
    pub max_referenced: u64,
    /// Limit of the exclusive bytes.
    pub max_exclusive: u64,
    /// Reserved referenced bytes, which have no effect.
    pub rsv_referenced: u64,
    /// Reserved exclusive bytes, which have no effect.
    pub rsv_exclusive: u64,
}

impl From<QgroupLimits> for QgroupLimit {
    fn from(limits: QgroupLimits) -> Self {
        Self {
            flags: limits.flags,
            max_rfer: limits.max_referenced,
            max_excl: limits.max_exclusive,
            rsv_rfer: limits.rsv_referenced,
            rsv_excl: limits.rsv_exclusive,
        }
    }
}

/// The result of a command on subvolumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// The command succeeded.
    Done,
    /// The subvolume that holds a file.
    Info {
        /// Whether the file is the subvolume's root directory.
        is_root: bool,
        /// The subvolume.
        subvolume: SubvolumeDescription,
    },
    /// Subvolumes in order of id; empty after the last subvolume.
    Page(Vec<SubvolumeDescription>),
    /// The default subvolume.
    Default {
        /// The subvolume's id.
        id: u64,
    },
    /// The subvolume is marked as received.
    Received {
        /// The transaction of the mark.
        rtransid: u64,
        /// The time of the mark.
        rtime: (i64, u32),
    },
}

impl Request {
    /// See [`crate::Request::is_long`].
    pub(crate) fn is_long(&self) -> bool {
        matches!(self, Self::Sync)
    }

    /// See [`crate::Request::changes`].
    pub(crate) fn changes(&self) -> bool {
        !matches!(self, Self::Info { .. } | Self::List { .. } | Self::ListDeleted { .. } | Self::Default)
    }

    /// See [`crate::Request::changes_through`].
    pub(crate) fn changes_through(&self, nr: usize) -> bool {
        match self {
            Self::Snapshot { dir, .. } => nr == usize::from(*dir),
            Self::Sync => false,
            _ => self.changes(),
        }
    }
}

pub(crate) fn execute(context: &CommandContext<'_>, request: Request) -> Result<Response> {
    let done = |()| Response::Done;
    match request {
        Request::Info { of } => info(context, of),
        Request::List { from } => page(context, RootId(from), Fs::subvolumes_from).map(Response::Page),
        Request::ListDeleted { from } => page(context, RootId(from), Fs::deleted_subvolumes_from).map(Response::Page),
        Request::Create { dir, name, umask, qgroups, limits } => {
            create(context, dir, &name, umask, (&qgroups, limits)).map(done)
        }
        Request::Snapshot { source, dir, name, read_only, qgroups } => {
            snapshot(context, (source, dir), &name, read_only, &qgroups).map(done)
        }
        Request::Delete { dir, name } => delete(context, context.inode(dir)?, &name, None).map(done),
        Request::DeleteById { id } => delete_by_id(context, RootId(id)).map(done),
        Request::SetReadOnly { of, read_only, force } => set_read_only(context, of, read_only, force).map(done),
        Request::SetReceived { of, uuid, stransid, stime } => set_received(context, of, (uuid, stransid), stime),
        Request::Default => Ok(Response::Default { id: context.fs.default_subvolume()?.0 }),
        Request::SetDefault { id } => set_default(context, id).map(done),
        Request::Sync => sync(context).map(done),
    }
}

fn info(context: &CommandContext<'_>, of: FileNr) -> Result<Response> {
    let id = context.inode(of)?;
    Ok(Response::Info { is_root: root_of(id).is_ok(), subvolume: context.fs.subvolume_info(id.root)?.into() })
}

fn page(
    context: &CommandContext<'_>,
    from: RootId,
    list: impl Fn(&Fs, RootId, usize) -> ubtrfs_fs::Result<Vec<SubvolumeInfo>>,
) -> Result<Vec<SubvolumeDescription>> {
    context.require_admin()?;
    Ok(list(context.fs, from, PAGE)?.into_iter().map(SubvolumeDescription::from).collect())
}

fn create(
    context: &CommandContext<'_>,
    dir: FileNr,
    name: &[u8],
    umask: u32,
    (qgroups, limits): (&[u64], Option<QgroupLimits>),
) -> Result<()> {
    check_name(name)?;
    let qgroups = joined(context, qgroups)?;
    if limits.is_some() {
        context.require_admin()?;
    }
    let (fs, dir) = (context.fs, context.inode(dir)?);
    may_change_names(fs, context.caller, dir)?;
    let caller = context.caller.with_umask(umask);
    fs.create_limited_subvolume(dir, name, &caller, &qgroups, limits.map(QgroupLimit::from))?;
    context.host.forget_name(dir, name, None);
    Ok(())
}

fn snapshot(
    context: &CommandContext<'_>,
    (source, dir): (FileNr, FileNr),
    name: &[u8],
    read_only: bool,
    qgroups: &[u64],
) -> Result<()> {
    check_name(name)?;
    let qgroups = joined(context, qgroups)?;
    let (fs, dir) = (context.fs, context.inode(dir)?);
    let source = root_of(context.inode(source)?)?;
    may_change_names(fs, context.caller, dir)?;
    check_owner(context, source)?;
    fs.snapshot_in(source, dir, name, read_only, &qgroups)?;
    context.host.forget_name(dir, name, None);
    Ok(())
}

/// Returns the quota groups that a new subvolume joins. Only administrators may name quota groups, as for all changes
/// of quotas. As on Linux, the named groups are ignored while quotas are off.
fn joined(context: &CommandContext<'_>, qgroups: &[u64]) -> Result<Vec<QgroupId>> {
    if qgroups.is_empty() {
        return Ok(Vec::new());
    }
    context.require_admin().map_err(|failure| {
        let text = "only root and the user who mounted it may let it join quota groups (-i)";
        CommandFailure { text: text.to_owned(), has_advice: true, ..failure }
    })?;
    if context.fs.quota_status().is_none() {
        return Ok(Vec::new());
    }
    let known = context.fs.qgroups()?;
    for id in qgroups.iter().copied().map(QgroupId) {
        let (errno, text) = match () {
            () if id.0 >> 48 == 0 => {
                let text = format!("{id} is the group of one subvolume; name a group of a higher level, such as 1/0");
                (Errno::INVAL, text)
            }
            () if known.iter().any(|group| group.id == id) => continue,
            () => {
                (Errno::NOENT, format!("there is no quota group {id} to join; list them with: ubtrfs qgroup show PATH"))
            }
        };
        return Err(CommandFailure { has_advice: true, ..CommandFailure::new(errno, text) });
    }
    Ok(qgroups.iter().map(|id| QgroupId(*id)).collect())
}

/// Deletes the subvolume with this id. As on Linux, the caller needs the same rights as for a deletion by name, but need
/// not be able to reach the subvolume's directory.
fn delete_by_id(context: &CommandContext<'_>, id: RootId) -> Result<()> {
    if id < RootId::FIRST_FREE {
        return Err(Error::InvalidArgument("no subvolume with this id can be deleted").into());
    }
    let info = context.fs.subvolume_info(id)?;
    let parent = info.parent.ok_or(Error::NotFound)?;
    delete(context, InodeId { root: parent, ino: info.dirid }, info.name(), Some(id))
}

/// Deletes the subvolume with a name in `dir`. If `expected` is given, the subvolume must have this id.
fn delete(context: &CommandContext<'_>, dir: InodeId, name: &[u8], expected: Option<RootId>) -> Result<()> {
    check_name(name)?;
    let (fs, caller) = (context.fs, context.caller);
    let found = fs.lookup(dir, name)?;
    fs.forget(found.id, 1);
    if expected.is_some_and(|expected| found.id != InodeId::root_of(expected)) {
        return Err(Error::NotFound.into());
    }
    let is_admin = caller.is_admin();
    permit(is_admin || fs.options().user_subvol_rm_allowed || context.is_mount_owner(), "").map_err(|failure| {
        let text = "users may not delete subvolumes here; do it as root, mount with -o user_subvol_rm_allowed, or remove an \
                    empty one with rmdir";
        CommandFailure { text: text.to_owned(), has_advice: true, ..failure }
    })?;
    if expected.is_some() && !is_admin && context.inode(0)?.root == found.id.root {
        return Err(Error::InvalidArgument("users cannot delete a subvolume through a file in it").into());
    }
    if !found.is_dir() && is_admin {
        return Err(Error::NotDirectory.into());
    }
    let victim = root_of(found.id)?;
    if context.is_mount_owner() {
        check_owner(context, victim)?;
    } else if !is_admin {
        may_change_names(fs, caller, found.id)?;
        fs.check_writable(found.id)?;
    }
    let parent = may_change_names(fs, caller, dir)?;
    let is_sticky = parent.mode & STICKY != 0;
    let may_unlink = caller.is_owner_of(parent.uid) || caller.is_owner_of(found.uid);
    permit(!is_sticky || may_unlink, "the directory is sticky")?;
    fs.delete_subvolume(dir, name, Some(victim)).map_err(|error| why_not_deleted(context, dir, victim, error))?;
    context.host.forget_name(dir, name, Some(victim));
    Ok(())
}

/// Explains why a subvolume cannot be deleted, because several reasons share one error number.
fn why_not_deleted(context: &CommandContext<'_>, dir: InodeId, victim: RootId, error: Error) -> CommandFailure {
    let failure = CommandFailure::from(error);
    if failure.errno() != Errno::PERM {
        return failure;
    }
    let fs = context.fs;
    let is_held = |inode| fs.inode_flags(inode).is_ok_and(|flags| flags & (FS_IMMUTABLE_FL | FS_APPEND_FL) != 0);
    let text = if fs.default_subvolume().is_ok_and(|default| default == victim) {
        "it is the default subvolume; choose another one first, with: ubtrfs subvolume set-default"
    } else if is_held(InodeId::root_of(victim)) || is_held(dir) {
        "it or the directory that it is in is immutable or append-only; mount it, and: chattr -i -a"
    } else {
        return failure;
    };
    CommandFailure { text: text.to_owned(), has_advice: true, ..failure }
}

fn set_read_only(context: &CommandContext<'_>, of: FileNr, read_only: bool, force: bool) -> Result<()> {
    let id = context.inode(of)?;
    permit(context.caller.is_owner_of(context.fs.getattr(id)?.uid), "it belongs to another user")?;
    if !read_only && !force && !context.fs.subvolume_info(root_of(id)?)?.received_uuid.is_nil() {
        let text = "it was received, and incremental streams may need it; make a snapshot of it instead, or let it lose its \
                    received UUID with -f";
        return Err(CommandFailure { has_advice: true, ..CommandFailure::new(Errno::PERM, text) });
    }
    Ok(context.fs.set_subvolume_read_only(root_of(id)?, read_only)?)
}

fn set_received(
    context: &CommandContext<'_>,
    of: FileNr,
    (uuid, stransid): (Uuid, u64),
    (sec, nsec): (i64, u32),
) -> Result<Response> {
    let id = context.inode(of)?;
    permit(context.caller.is_owner_of(context.fs.getattr(id)?.uid), "it belongs to another user")?;
    let stime = Timespec { sec, nsec };
    let (rtransid, rtime) = context.fs.set_subvolume_received(root_of(id)?, uuid, Generation(stransid), stime)?;
    Ok(Response::Received { rtransid: rtransid.0, rtime: (rtime.sec, rtime.nsec) })
}

fn set_default(context: &CommandContext<'_>, id: Option<u64>) -> Result<()> {
    context.require_admin()?;
    let id = match id {
        None => root_of(context.inode(0)?)?,
        // As on Linux
        Some(0) => RootId::FS_TREE,
        Some(id) => RootId(id),
    };
    Ok(context.fs.set_default_subvolume(id)?)
}

fn sync(context: &CommandContext<'_>) -> Result<()> {
    context.require_admin()?;
    let job = context.job;
    let mut most = 0;
    Ok(context.fs.finish_deletions(&mut |left| {
        if left > most {
            job.add_total((left - most) as u64);
            most = left;
        }
        let done = (most - left) as u64;
        job.advance(done.saturating_sub(job.progress().done));
        Ok(job.check()?)
    })?)
}

fn check_owner(context: &CommandContext<'_>, subvolume: RootId) -> Result<()> {
    let owner = context.fs.getattr(InodeId::root_of(subvolume))?.uid;
    permit(context.caller.is_owner_of(owner), "the subvolume's root directory belongs to another user")
}

/// The subvolume whose root directory is `id`. Fails for any other inode.
fn root_of(id: InodeId) -> Result<RootId> {
    if id == InodeId::root_of(id.root) { Ok(id.root) } else { Err(Error::InvalidArgument("not a subvolume").into()) }
}

fn check_name(name: &[u8]) -> Result<()> {
    let wrong = Error::InvalidArgument("a subvolume's name");
    Err(match name {
        b"" | b"." | b".." => wrong.into(),
        name if name.len() > NAME_MAX => Error::NameTooLong.into(),
        name if name.iter().any(|byte| matches!(byte, b'/' | 0)) => wrong.into(),
        _ => return Ok(()),
    })
}

/// The largest number of subvolumes in a page.
const PAGE: usize = 1000;
const NAME_MAX: usize = 255;
const STICKY: u32 = 0o1000;
// Inode flags that `chattr` sets, as in linux/fs.h.
const FS_IMMUTABLE_FL: u32 = 0x10;
const FS_APPEND_FL: u32 = 0x20;

/// A subvolume as sent to the client. The fields are those of [`SubvolumeInfo`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "SubvolumeInfo documents the fields")]
pub struct SubvolumeDescription {
    pub id: u64,
    #[serde(with = "crate::bytes")]
    pub path: Vec<u8>,
    pub parent: Option<u64>,
    pub dirid: u64,
    pub flags: u64,
    pub uuid: Uuid,
    pub parent_uuid: Uuid,
    pub received_uuid: Uuid,
    pub generation: u64,
    pub otransid: u64,
    pub ctransid: u64,
    pub stransid: u64,
    pub rtransid: u64,
    pub otime: (i64, u32),
    pub ctime: (i64, u32),
    pub stime: (i64, u32),
    pub rtime: (i64, u32),
}

impl From<SubvolumeInfo> for SubvolumeDescription {
    fn from(info: SubvolumeInfo) -> Self {
        let time = |time: Timespec| (time.sec, time.nsec);
        Self {
            id: info.id.0,
            path: info.path,
            parent: info.parent.map(|parent| parent.0),
            dirid: info.dirid.0,
            flags: info.flags.bits(),
            uuid: info.uuid,
            parent_uuid: info.parent_uuid,
            received_uuid: info.received_uuid,
            generation: info.generation.0,
            otransid: info.otransid.0,
            ctransid: info.ctransid.0,
            stransid: info.stransid.0,
            rtransid: info.rtransid.0,
            otime: time(info.otime),
            ctime: time(info.ctime),
            stime: time(info.stime),
            rtime: time(info.rtime),
        }
    }
}

impl From<SubvolumeDescription> for SubvolumeInfo {
    fn from(subvolume: SubvolumeDescription) -> Self {
        let time = |(sec, nsec)| Timespec { sec, nsec };
        Self {
            id: RootId(subvolume.id),
            path: subvolume.path,
            parent: subvolume.parent.map(RootId),
            dirid: Ino(subvolume.dirid),
            flags: RootFlags::from_bits_retain(subvolume.flags),
            uuid: subvolume.uuid,
            parent_uuid: subvolume.parent_uuid,
            received_uuid: subvolume.received_uuid,
            generation: Generation(subvolume.generation),
            otransid: Generation(subvolume.otransid),
            ctransid: Generation(subvolume.ctransid),
            stransid: Generation(subvolume.stransid),
            rtransid: Generation(subvolume.rtransid),
            otime: time(subvolume.otime),
            ctime: time(subvolume.ctime),
            stime: time(subvolume.stime),
            rtime: time(subvolume.rtime),
        }
    }
}
