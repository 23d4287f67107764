//! Confinement of the server: once the devices and /dev/fuse are open, the server only needs to read and write them.
//!
//! - X1. After [`confine`] no thread can open a file, make a network socket, run a program, look at another process,
//!   mount, or change its rights: the seccomp filter makes every system call that is not on its list fail with EPERM.
//!   The filter covers all existing threads and all threads that they start.
//! - X2. As a second barrier, Landlock denies every path to the calling thread and to the threads that it starts.
//! - X3. A system call that is not on the list fails and does not kill the server, because a killed server would lose
//!   data.
//! - X4. Unmounting, and looking up a caller's groups, umask and capabilities, need rights that the server has given
//!   up. So a process that is started before confinement, [`PrivilegedHelper`], unmounts, looks up callers, and claims
//!   the mounted block device for the server.
//! - X5. A server started by root gives up root, its groups and all capabilities: each thread runs as the given
//!   [`Identity`]. Open files remain open.

mod filter;
mod helper;

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use landlock::{ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetStatus};
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};

pub use helper::{PrivilegedHelper, serve_unmounts};

/// The measures of confinement that took effect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// seccomp filters system calls.
    pub seccomp: bool,
    /// Landlock denies paths.
    pub landlock: bool,
    /// No thread runs as root.
    pub unprivileged: bool,
    /// The reasons for missing measures.
    pub missing: Vec<String>,
}

/// A user without privileges, and its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

impl Identity {
    /// `nobody`, the user that owns no files.
    pub const NOBODY: Self = Self { uid: 65534, gid: 65534 };

    /// The identity for the server of this image: the file's owner, or `nobody` for root's files and for devices.
    pub fn for_image(path: &Path) -> Self {
        let is_user = |id: &u32| *id != 0;
        let meta = std::fs::metadata(path).ok().filter(|meta| !meta.file_type().is_block_device());
        match meta.filter(|meta| is_user(&meta.uid())) {
            Some(meta) => Self { uid: meta.uid(), gid: Some(meta.gid()).filter(is_user).unwrap_or(Self::NOBODY.gid) },
            None => Self::NOBODY,
        }
    }
}

/// Gives up every right that serving a mount does not need (X1, X2). If the process runs as root, it runs as `identity`
/// afterwards (X5). The confinement cannot be undone.
pub fn confine(identity: Identity) -> Confinement {
    let mut done = Confinement::default();
    match become_unprivileged(identity) {
        Ok(()) => done.unprivileged = true,
        Err(error) => done.missing.push(error),
    }
    match restrict_paths() {
        Ok(true) => done.landlock = true,
        Ok(false) => done.missing.push("this kernel has no Landlock".to_owned()),
        Err(error) => done.missing.push(format!("Landlock: {error}")),
    }
    match filter::filter_calls() {
        Ok(()) => done.seccomp = true,
        Err(error) => done.missing.push(format!("seccomp: {error}")),
    }
    done
}

/// Gives up root in all threads, through functions of the C library: the bare system calls would change only the
/// calling thread.
fn become_unprivileged(to: Identity) -> Result<(), String> {
    if rustix::process::getuid().is_root() || rustix::process::geteuid().is_root() {
        let failed = |error: nix::Error| format!("it remains root: {error}");
        let (uid, gid) = (Uid::from_raw(to.uid), Gid::from_raw(to.gid));
        setgroups(&[]).map_err(failed)?;
        setresgid(gid, gid, gid).map_err(failed)?;
        setresuid(uid, uid, uid).map_err(failed)?;
    }
    // Changing the user also drops the capabilities, unless the process was set to keep them.
    match rustix::thread::capabilities(None) {
        Ok(sets) if (sets.effective | sets.permitted).is_empty() => Ok(()),
        Ok(_) => Err("it has capabilities".to_owned()),
        Err(errno) => Err(format!("its capabilities cannot be read: {errno}")),
    }
}

fn restrict_paths() -> Result<bool, landlock::RulesetError> {
    let status = Ruleset::default().handle_access(AccessFs::from_all(ABI::V5))?.create()?.restrict_self()?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}
