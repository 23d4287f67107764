//! Confinement of the server: once the devices and /dev/fuse are open, the server only needs to read and write them.
//!
//! - X1. After [`confine`] no thread can open a file, make a network socket, run a program, look at another process,
//!   mount, or change its rights: the seccomp filter makes every system call that is not on its list fail with EPERM.
//!   The filter covers all existing threads and all threads that they start.
//! - X2. As a second barrier, Landlock denies every path, network ports, signals to other processes, and abstract sockets
//!   of other processes. It covers the calling thread and the threads that it starts, and all threads since Linux 7.0.
//! - X3. A system call that is not on the list fails and does not kill the server, because a killed server would lose
//!   data.
//! - X4. Unmounting, and looking up a caller's groups, umask and capabilities, need rights that the server has given
//!   up. So a process that is started before confinement, [`PrivilegedHelper`], unmounts, looks up callers, and claims
//!   the mounted block device for the server.
//! - X5. A server started by root gives up root, its groups and all capabilities: each thread runs as the given
//!   [`Identity`]. Open files remain open.
//! - X6. No argument of an allowed call names another process, a file or a socket.

mod filter;
mod helper;

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use landlock::{ABI, Access, AccessFs, AccessNet, RestrictSelfAttr, Ruleset, RulesetAttr, RulesetStatus, Scope};
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
    match filter::filter_server() {
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

/// Applies Landlock as far as this kernel has it. The server's socket has an abstract name, too, but the server only
/// accepts connections. Signals from other processes and between its own threads still arrive.
fn restrict_paths() -> Result<bool, landlock::RulesetError> {
    let rules = Ruleset::default()
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .handle_access(AccessNet::from_all(LANDLOCK))?
        .scope(Scope::from_all(LANDLOCK))?
        .create()?;
    let status = rules.all_threads(true)?.restrict_self()?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

/// The newest version of Landlock whose restrictions are requested. Older kernels apply those that they have.
const LANDLOCK: ABI = ABI::V9;

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
    use std::process::Command;

    use super::*;

    const CHILD: &str = "UBTRFS_LANDLOCK_CHILD";

    /// Landlock cannot be undone, so a child process applies it, without seccomp.
    #[test]
    fn landlock_alone_stops_signals_and_abstract_sockets() {
        if let Ok(name) = std::env::var(CHILD) {
            let address = SocketAddr::from_abstract_name(name).unwrap();
            let parent = rustix::process::getppid().unwrap();
            UnixStream::connect_addr(&address).unwrap();
            rustix::process::test_kill_process(parent).unwrap();
            let is_enforced = restrict_paths().unwrap();
            let connects = UnixStream::connect_addr(&address).is_ok();
            let signals = rustix::process::test_kill_process(parent).is_ok();
            let signals_itself = rustix::process::test_kill_process(rustix::process::getpid()).is_ok();
            println!("enforced {is_enforced}, connects {connects}, signals {signals}, itself {signals_itself}");
            return;
        }
        let name = format!("ubtrfs-landlock-{}", std::process::id());
        let _listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["landlock_alone_stops_signals_and_abstract_sockets", "--nocapture", "--test-threads=1"])
            .env(CHILD, &name)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        if version < (6, 12) || text.contains("enforced false") {
            assert!(std::env::var_os("CI").is_none(), "CI needs Landlock of Linux 6.12");
            eprintln!("SKIPPED: this test needs Landlock of Linux 6.12; this is {release}");
            return;
        }
        assert!(text.contains("connects false, signals false, itself true"), "{text}");
    }
}
