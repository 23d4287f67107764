//! The callers of requests, and the privileges that a file loses when they change it.
//!
//! A request carries the user and the primary group; the other groups and the capabilities are in /proc. A process that
//! is not visible there (it is in another pid namespace, or gone) has no other groups, and the capabilities that its
//! user id implies. A confined server has no /proc and asks its helper process.
//!
//! Capabilities only count in the server's user namespace: in its own namespace any process may have all of them.

use std::sync::{Arc, OnceLock};

use ubtrfs_fs::{Caller, Error, FlagRights, Result, mode};

use crate::protocol::Request;
use crate::sandbox::Unmounter;

/// Looks up groups, umasks and capabilities of callers: in /proc, or through the helper process if there is one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Groups(Arc<OnceLock<Arc<Unmounter>>>);

impl Groups {
    /// Makes later lookups go through the helper process.
    pub(crate) fn ask(&self, helper: Arc<Unmounter>) {
        let _ = self.0.set(helper);
    }

    /// Whether the caller is in a group.
    pub(crate) fn has(&self, req: &Request<'_>, gid: u32) -> bool {
        let look_up = || match self.0.get() {
            Some(helper) => helper.is_in_group(req.pid, gid),
            None => has_group(req.pid, gid),
        };
        req.gid == gid || look_up()
    }

    /// The umask of the calling process, which an ioctl does not carry; 022 if it is unknown.
    pub(crate) fn umask(&self, req: &Request<'_>) -> u32 {
        let umask = match self.0.get() {
            Some(helper) => helper.umask_of(req.pid),
            None => umask_of(req.pid),
        };
        umask.unwrap_or(0o022)
    }

    /// Whether the caller has a capability.
    pub(crate) fn is_capable(&self, req: &Request<'_>, capability: u32) -> bool {
        let found = match self.0.get() {
            Some(helper) => helper.has_capability(req.pid, capability),
            None => has_capability(req.pid, capability),
        };
        found.unwrap_or(req.uid == 0)
    }

    /// Whether the caller may change any inode as if it were the owner.
    pub(crate) fn acts_as_owner(&self, req: &Request<'_>) -> bool {
        self.is_capable(req, CAP_FOWNER)
    }

    /// The caller that `fs` should see for a change of this attribute. `fs` knows no capabilities and lets only root
    /// change `trusted` attributes. Linux requires CAP_SYS_ADMIN, which root may lack and another user may have.
    pub(crate) fn xattr_caller(&self, req: &Request<'_>, name: &[u8]) -> Result<Caller> {
        let caller = caller(req, 0);
        if !name.starts_with(b"trusted.") {
            return Ok(caller);
        }
        match self.is_capable(req, CAP_SYS_ADMIN) {
            true => Ok(Caller { uid: 0, ..caller }),
            false => Err(Error::NotPermitted("trusted attributes need CAP_SYS_ADMIN to change")),
        }
    }

    /// The caller's rights to change inode flags.
    pub(crate) fn flag_rights(&self, req: &Request<'_>) -> FlagRights {
        FlagRights { as_owner: self.acts_as_owner(req), immutable: self.is_capable(req, CAP_LINUX_IMMUTABLE) }
    }

    /// Whether files that the caller changes may stay set-user-id and set-group-id.
    pub(crate) fn may_keep_set_id(&self, req: &Request<'_>) -> bool {
        self.is_capable(req, CAP_FSETID)
    }

    /// A file's mode after this caller changed its owner or group; `gid` is the old group.
    pub(crate) fn mode_after_chown(&self, req: &Request<'_>, file_mode: u32, gid: u32) -> u32 {
        without_suid_sgid(file_mode, || self.has(req, gid) || self.may_keep_set_id(req))
    }

    /// A file's mode after this caller changed its content.
    pub(crate) fn mode_after_change(&self, req: &Request<'_>, file_mode: u32, gid: u32) -> u32 {
        without_suid_sgid(file_mode, || self.has(req, gid))
    }

    /// Whether a file stays set-group-id when the caller sets its ACL.
    pub(crate) fn may_keep_sgid(&self, req: &Request<'_>, gid: u32) -> bool {
        self.may_keep_set_id(req) || self.has(req, gid)
    }
}

/// The caller as `fs` wants it.
pub(crate) fn caller(req: &Request<'_>, umask: u32) -> Caller {
    Caller { uid: req.uid, gid: req.gid, umask }
}

/// Clears set-user-id, and usually set-group-id. Set-group-id stays if the group cannot execute the file and the caller
/// is in the group (the bit once meant mandatory locking).
fn without_suid_sgid(file_mode: u32, in_group: impl FnOnce() -> bool) -> u32 {
    const GROUP_EXECUTE: u32 = 0o010;
    let kept = file_mode & !mode::SETUID;
    if kept & mode::SETGID != 0 && (kept & GROUP_EXECUTE != 0 || !in_group()) { kept & !mode::SETGID } else { kept }
}

/// Whether /proc lists the group for a process.
pub(crate) fn has_group(pid: u32, gid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(|status| groups(&status).any(|group| group == gid))
}

/// Whether /proc shows a capability of a process as effective; `None` if the process is not visible. In another user
/// namespace no capability is effective.
pub(crate) fn has_capability(pid: u32, capability: u32) -> Option<bool> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let has_it = 1u64.checked_shl(capability)? & effective_capabilities(&status)? != 0;
    let namespace = std::fs::read_link(format!("/proc/{pid}/ns/user")).ok()?;
    Some(has_it && namespace == std::fs::read_link("/proc/self/ns/user").ok()?)
}

/// The effective capabilities that a process's status shows.
fn effective_capabilities(status: &str) -> Option<u64> {
    let hex = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(hex.trim(), 16).ok()
}

// Numbers of linux/capability.h.
const CAP_FOWNER: u32 = 3;
const CAP_FSETID: u32 = 4;
const CAP_LINUX_IMMUTABLE: u32 = 9;
const CAP_SYS_ADMIN: u32 = 21;

/// The umask of a process according to /proc.
pub(crate) fn umask_of(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let octal = status.lines().find_map(|line| line.strip_prefix("Umask:"))?;
    u32::from_str_radix(octal.trim(), 8).ok()
}

/// The supplementary groups that a process's status lists.
fn groups(status: &str) -> impl Iterator<Item = u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
    line.split_ascii_whitespace().filter_map(|group| group.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changing_a_file_drops_its_privileges() {
        let after = |file_mode, in_group| without_suid_sgid(file_mode, || in_group);
        assert_eq!(after(0o106_755, true), 0o100_755);
        assert_eq!(after(0o102_745, true), 0o102_745);
        assert_eq!(after(0o102_745, false), 0o100_745);
        assert_eq!(after(0o100_644, false), 0o100_644);
    }

    #[test]
    fn capabilities_are_read_from_a_status() {
        assert_eq!(effective_capabilities("CapPrm:\tff\nCapEff:\t0000000000000208\n"), Some(0x208));
        assert_eq!(effective_capabilities("CapPrm:\tff\n"), None);
        assert_eq!(has_capability(u32::MAX, CAP_FOWNER), None);
    }

    #[test]
    fn groups_are_read_from_a_status() {
        assert_eq!(groups("Name:\tx\nGroups:\t4 24 1000 \nNgid:\t0\n").collect::<Vec<_>>(), [4, 24, 1000]);
        assert_eq!(groups("Groups:\t \n").count() + groups("").count(), 0);
    }
}
