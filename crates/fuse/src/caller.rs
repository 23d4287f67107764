//! The callers of requests, and the privileges that a file loses when a caller changes it.
//!
//! A request carries the user and the primary group; the other groups and the capabilities are in /proc
//! ([`LocalProcesses`]). A confined server has no /proc and asks its helper process.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use ubtrfs_control::file::without_set_id;
use ubtrfs_control::{LocalProcesses, ProcessFile, Processes};
use ubtrfs_fs::{Caller, FlagRights};

use crate::protocol::{FuseRequest, Operation, UNKNOWN_ID};
use crate::sandbox::PrivilegedHelper;
use crate::transport::{ThreadMover, processor_of, set_affinity};

/// Looks up groups, umasks and capabilities of callers: in /proc, or through the helper process if there is one.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallerGroups(Arc<OnceLock<Arc<PrivilegedHelper>>>);

impl CallerGroups {
    /// Makes later lookups go through the helper process.
    pub(crate) fn ask(&self, helper: Arc<PrivilegedHelper>) {
        let _ = self.0.set(helper);
    }

    /// The helper process, if there is one.
    pub(crate) fn helper(&self) -> Option<&PrivilegedHelper> {
        self.0.get().map(AsRef::as_ref)
    }

    /// Returns the request with a caller filled in, if the request needs a caller but does not name one
    /// ([`UNKNOWN_ID`]); otherwise `None`. The caller is root if the calling process has CAP_SYS_ADMIN in the server's
    /// user namespace; otherwise it is a user without rights. The user id of the process is not used: through an
    /// idmapped mount, it does not tell which files the process owns.
    pub(crate) fn known_caller<'r>(&self, req: &FuseRequest<'r>) -> Option<FuseRequest<'r>> {
        let needs_caller = || match req.operation {
            Operation::Setattr(set) => set.is_empty(),
            Operation::Rename { .. } | Operation::Ioctl { .. } => true,
            _ => false,
        };
        if req.uid != UNKNOWN_ID || !needs_caller() {
            return None;
        }
        let is_admin = self.has_capability(req.pid, CAP_SYS_ADMIN) == Some(true);
        let id = if is_admin { 0 } else { UNKNOWN_ID };
        Some(FuseRequest { uid: id, gid: id, ..*req })
    }

    /// Whether the caller is in a group.
    pub(crate) fn has(&self, req: &FuseRequest<'_>, gid: u32) -> bool {
        req.gid == gid || self.is_in_group(req.pid, gid, None)
    }

    /// Whether a thread is being killed; `None` if it is not visible.
    pub(crate) fn is_dying(&self, pid: u32) -> Option<bool> {
        match self.0.get() {
            Some(helper) => helper.is_dying(pid),
            None => LocalProcesses.is_dying(pid),
        }
    }

    /// The processor on which a thread ran last; `None` if it is not visible, or if the helper process is busy.
    pub(crate) fn processor_of(&self, thread: u32) -> Option<usize> {
        match self.0.get() {
            Some(helper) => helper.processor_of(thread),
            None => processor_of(thread),
        }
    }

    /// Moves other threads of this process to other processors. A confined server asks its helper process.
    pub(crate) fn mover(&self) -> ThreadMover {
        let groups = self.clone();
        ThreadMover::new(move |thread, processors| match groups.helper() {
            Some(helper) => helper.move_thread(thread, processors),
            None => set_affinity(Some(thread), processors),
        })
    }

    /// The umask of the calling process; 022 if it is unknown. Requests of ioctls do not contain the umask.
    pub(crate) fn umask(&self, req: &FuseRequest<'_>) -> u32 {
        self.umask_of(req.pid).unwrap_or(0o022)
    }

    /// Whether the caller has a capability. If the process is not visible, root counts as having all capabilities,
    /// other users as having no capability.
    pub(crate) fn is_capable(&self, req: &FuseRequest<'_>, capability: u32) -> bool {
        self.has_capability(req.pid, capability).unwrap_or(req.uid == 0)
    }

    /// The process that made an ioctl, as the caller of a command. The process is blocked until the ioctl is answered.
    pub(crate) fn waiting_caller(&self, req: &FuseRequest<'_>) -> ubtrfs_control::CommandCaller {
        ubtrfs_control::CommandCaller::of_request(req.uid, req.gid, req.pid, Arc::new(self.clone()))
    }

    /// Whether the caller may change any inode as if it were the owner.
    pub(crate) fn acts_as_owner(&self, req: &FuseRequest<'_>) -> bool {
        self.is_capable(req, CAP_FOWNER)
    }

    /// The caller to pass to `fs` for a change of the attribute `name`. `fs` knows no capabilities and lets only root
    /// change `trusted` attributes. Linux requires CAP_SYS_ADMIN, and checks it before it sends the request. A check
    /// of the process here would be wrong: overlayfs sets such attributes with its own rights for processes without the
    /// capability.
    pub(crate) fn xattr_caller(req: &FuseRequest<'_>, name: &[u8]) -> Caller {
        let caller = caller(req, 0);
        if name.starts_with(b"trusted.") { Caller { uid: 0, ..caller } } else { caller }
    }

    /// The rights to change inode flags that the caller's capabilities give: to act as the owner of any inode, and to
    /// change the flags that an owner may not change (immutable, append-only).
    pub(crate) fn flag_rights(&self, req: &FuseRequest<'_>) -> FlagRights {
        FlagRights { as_owner: self.acts_as_owner(req), immutable: self.is_capable(req, CAP_LINUX_IMMUTABLE) }
    }

    /// Whether files that the caller changes may stay set-user-id and set-group-id.
    pub(crate) fn may_keep_set_id(&self, req: &FuseRequest<'_>) -> bool {
        self.is_capable(req, CAP_FSETID)
    }

    /// The mode of a file after the caller changed the file's owner or group; `gid` is the file's old group.
    pub(crate) fn mode_after_chown(&self, req: &FuseRequest<'_>, file_mode: u32, gid: u32) -> u32 {
        without_set_id(file_mode, || self.has(req, gid) || self.may_keep_set_id(req))
    }

    /// The mode of a file after its content was changed by a caller who may not keep set-user-id and set-group-id
    /// ([`Self::may_keep_set_id`]).
    pub(crate) fn mode_after_change(&self, req: &FuseRequest<'_>, file_mode: u32, gid: u32) -> u32 {
        without_set_id(file_mode, || self.has(req, gid))
    }

    /// Whether a file of group `gid` stays set-group-id when the caller sets the file's ACL.
    pub(crate) fn may_keep_sgid(&self, req: &FuseRequest<'_>, gid: u32) -> bool {
        self.may_keep_set_id(req) || self.has(req, gid)
    }
}

impl Processes for CallerGroups {
    fn is_in_group(&self, pid: u32, gid: u32, uid: Option<u32>) -> bool {
        match self.0.get() {
            Some(helper) => helper.is_in_group(pid, gid, uid),
            None => LocalProcesses.is_in_group(pid, gid, uid),
        }
    }

    fn has_capability(&self, pid: u32, capability: u32) -> Option<bool> {
        match self.0.get() {
            Some(helper) => helper.has_capability(pid, capability),
            None => LocalProcesses.has_capability(pid, capability),
        }
    }

    fn umask_of(&self, pid: u32) -> Option<u32> {
        match self.0.get() {
            Some(helper) => helper.umask_of(pid),
            None => LocalProcesses.umask_of(pid),
        }
    }

    fn file_of(&self, pid: u32, descriptor: u32, uid: Option<u32>) -> Option<ProcessFile> {
        match self.0.get() {
            Some(helper) => helper.file_of(pid, descriptor, uid),
            None => LocalProcesses.file_of(pid, descriptor, uid),
        }
    }

    /// A confined server cannot read memory, and its helper does not read memory for it: otherwise a server that an
    /// image has taken over could read all processes.
    fn memory_of(&self, pid: u32, address: u64, len: usize) -> Option<Vec<u8>> {
        match self.0.get() {
            Some(_) => None,
            None => LocalProcesses.memory_of(pid, address, len),
        }
    }

    fn is_read_only_for(&self, pid: u32, device: u64) -> Option<bool> {
        match self.0.get() {
            Some(helper) => helper.is_read_only_for(pid, device),
            None => LocalProcesses.is_read_only_for(pid, device),
        }
    }
}

/// The last removal of a file's capabilities: the thread and the node.
///
/// Before a write to a file with capabilities, the kernel removes them, and then sends a SETATTR that sets nothing. It
/// sends an equal SETATTR for a chown that sets neither user nor group, which clears set-id bits even if root calls it.
/// The removal by the same thread tells the two apart. If other threads remove capabilities in between, the bits are
/// cleared.
#[derive(Debug, Default)]
pub(crate) struct RemovedCapability(Mutex<Option<(u32, u64)>>);

impl RemovedCapability {
    pub(crate) fn note(&self, req: &FuseRequest<'_>) {
        *self.0.lock() = Some((req.pid, req.node));
    }

    /// Whether the request follows a removal by the same thread from the same file. A removal counts once.
    pub(crate) fn precedes(&self, req: &FuseRequest<'_>) -> bool {
        let mut last = self.0.lock();
        let precedes = *last == Some((req.pid, req.node));
        if precedes {
            *last = None;
        }
        precedes
    }
}

/// Converts the caller to the type that `fs` takes.
pub(crate) fn caller(req: &FuseRequest<'_>, umask: u32) -> Caller {
    Caller { uid: req.uid, gid: req.gid, umask }
}

// Numbers of linux/capability.h.
const CAP_FOWNER: u32 = 3;
const CAP_FSETID: u32 = 4;
const CAP_LINUX_IMMUTABLE: u32 = 9;
const CAP_SYS_ADMIN: u32 = 21;
