//! [`CommandCaller`]: the user that runs a command, and the user's rights.
//!
//! - C1. A process that opened an image itself may run every command, because it can change the bytes anyway.
//! - C2. A client's user comes from the connection (`SO_PEERCRED`). The client's groups and capabilities are looked up
//!   later, when the process may already run another program. So groups count only while all four user ids of the
//!   process still equal the client's user. Capabilities count only if the user is root; root may lack some of them.
//!
//! [`crate::execute`] decides which commands need an administrator, and which callers are administrators.

use std::sync::Arc;

use rustix::io::Errno;

use crate::failure::{CommandFailure, Result};
use crate::process::Processes;

/// The user who runs a command.
#[derive(Clone, Debug)]
pub struct CommandCaller {
    uid: u32,
    gid: u32,
    process: Option<Process>,
}

#[derive(Clone, Debug)]
struct Process {
    pid: u32,
    processes: Arc<dyn Processes>,
    /// Whether the process is blocked until it gets the answer, so that it cannot execute another program meanwhile.
    waits: bool,
}

impl CommandCaller {
    /// A caller that works on an image and may run every command (C1). New files get the owner `uid` and the group
    /// `gid`.
    pub fn of_image(uid: u32, gid: u32) -> Self {
        Self { uid, gid, process: None }
    }

    /// The process that made an ioctl. The process is blocked until the answer, so it cannot run another program before
    /// the answer.
    pub fn of_request(uid: u32, gid: u32, pid: u32, processes: Arc<dyn Processes>) -> Self {
        Self { uid, gid, process: Some(Process { pid, processes, waits: true }) }
    }

    /// The peer of a socket (C2).
    pub fn of_peer(uid: u32, gid: u32, pid: u32, processes: Arc<dyn Processes>) -> Self {
        Self { uid, gid, process: Some(Process { pid, processes, waits: false }) }
    }

    /// The user id.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// The primary group id.
    pub fn gid(&self) -> u32 {
        self.gid
    }

    /// Whether the caller is in a group, primary or supplementary.
    pub fn is_in_group(&self, gid: u32) -> bool {
        self.gid == gid
            || self.process.as_ref().is_some_and(|process| {
                let uid = (!process.waits).then_some(self.uid);
                process.processes.is_in_group(process.pid, gid, uid)
            })
    }

    /// Whether the caller has a capability. On an image, every caller has all (C1). On a socket, only root can have any
    /// (C2). A process that has ended has none. Root in a pid namespace that this process cannot see has all.
    pub fn is_capable(&self, capability: u32) -> bool {
        let Some(process) = &self.process else { return true };
        if self.uid != 0 && !process.waits {
            return false;
        }
        process.processes.has_capability(process.pid, capability).unwrap_or(self.uid == 0 && process.pid == 0)
    }

    /// Whether the caller is exempt from modes and ACLs.
    pub fn overrides_modes(&self) -> bool {
        self.is_capable(CAP_DAC_OVERRIDE)
    }

    /// Whether the caller may list and search every directory, regardless of mode and ACL.
    pub(crate) fn reads_all_directories(&self) -> bool {
        self.overrides_modes() || self.is_capable(CAP_DAC_READ_SEARCH)
    }

    /// Whether the caller has the rights of an owner on files of this user.
    pub fn is_owner_of(&self, uid: u32) -> bool {
        self.uid == uid || self.is_capable(CAP_FOWNER)
    }

    /// Whether the caller has `CAP_SYS_ADMIN`.
    pub fn is_admin(&self) -> bool {
        self.is_capable(CAP_SYS_ADMIN)
    }

    /// Converts the caller to the type that `fs` takes.
    pub(crate) fn with_umask(&self, umask: u32) -> ubtrfs_fs::Caller {
        ubtrfs_fs::Caller { uid: self.uid, gid: self.gid, umask: umask & 0o777 }
    }
}

/// An `EPERM` failure; `text` says which right the caller lacks.
pub(crate) fn not_permitted(text: &str) -> CommandFailure {
    CommandFailure {
        errno: Errno::PERM.raw_os_error(),
        text: format!("operation not permitted: {text}"),
        has_advice: false,
    }
}

/// Fails with [`not_permitted`] unless `allowed`.
pub(crate) fn permit(allowed: bool, else_because: &str) -> Result<()> {
    if allowed { Ok(()) } else { Err(not_permitted(else_because)) }
}

// Numbers of capabilities, as in linux/capability.h.
const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_DAC_READ_SEARCH: u32 = 2;
const CAP_FOWNER: u32 = 3;
const CAP_SYS_ADMIN: u32 = 21;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::ProcessFile;

    /// A test double: every process is in every group if the call names no user, and every process has every capability
    /// but 0 (a process that the server cannot see) and 1 (a process that has ended).
    #[derive(Debug)]
    struct Mighty;

    impl Processes for Mighty {
        fn is_in_group(&self, _pid: u32, _gid: u32, uid: Option<u32>) -> bool {
            uid.is_none()
        }

        fn has_capability(&self, pid: u32, _capability: u32) -> Option<bool> {
            (pid > 1).then_some(true)
        }

        fn umask_of(&self, _pid: u32) -> Option<u32> {
            None
        }

        fn file_of(&self, _pid: u32, _descriptor: u32, _uid: Option<u32>) -> Option<ProcessFile> {
            None
        }

        fn memory_of(&self, _pid: u32, _address: u64, _len: usize) -> Option<Vec<u8>> {
            None
        }

        fn is_read_only_for(&self, _pid: u32, _device: u64) -> Option<bool> {
            None
        }
    }

    #[test]
    fn a_peer_that_runs_a_privileged_program_by_now_gains_nothing() {
        let peer = |uid, pid| CommandCaller::of_peer(uid, uid, pid, Arc::new(Mighty));
        assert!(!peer(7, 100).is_admin() && !peer(7, 0).is_admin() && !peer(7, 100).is_in_group(8));
        assert!(!peer(7, 100).is_owner_of(8) && !peer(7, 100).overrides_modes() && peer(7, 100).is_owner_of(7));
        assert!(peer(0, 100).is_admin() && peer(0, 0).is_admin() && peer(7, 100).is_in_group(7));
        assert!(!peer(0, 1).is_admin(), "root without capabilities may end, and its child go on");
        let waiting = CommandCaller::of_request(7, 7, 100, Arc::new(Mighty));
        assert!(waiting.is_admin() && waiting.is_in_group(8) && waiting.is_owner_of(8));
        assert!(CommandCaller::of_image(7, 7).is_admin() && CommandCaller::of_image(7, 7).overrides_modes());
    }
}
