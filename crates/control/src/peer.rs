//! [`Peers`]: the users whose processes may answer a client.
//!
//! The name of a mount's control socket is no secret, and abstract sockets belong to a network namespace. So in another
//! namespace, any user can listen on the name. `SO_PEERCRED` gives the user who called listen(2), as the kernel recorded
//! it. A server that gave up root has listened before.
//!
//! - A1. Root and the client's own user may answer, because they can do everything that the client can. The user who made
//!   a mount may answer for it, because that user controls its content. The owner of an image may not: a file may give
//!   more rights to the user who opened it than to its owner.
//! - A2. A client sends nothing to any other process.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::io::Errno;

use crate::failure::{CommandFailure, Result};
use crate::process::{LocalProcesses, mount_maker};

/// The users whose processes may answer (A1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peers {
    users: Vec<u32>,
}

impl Peers {
    /// The users who may answer for something that `owner` controls; `None` if the owner is not known.
    pub fn of_owner(owner: Option<u32>) -> Self {
        let mut users = vec![0, rustix::process::geteuid().as_raw()];
        if LocalProcesses.sees_all_users() {
            users.extend(owner);
        } else {
            // In a user namespace, the table of mounts shows users by the numbers of the namespace that mounted, which may
            // be other users here. And all users without a number here are shown by one number.
            users.retain(|user| *user != OVERFLOW_USER);
        }
        Self { users }
    }

    /// The users who may answer for the mount of an open file. The owner is not known if the mount is not visible, as in
    /// another mount namespace.
    pub(crate) fn of_mount(file: impl AsFd) -> Self {
        Self::of_owner(mount_maker(file.as_fd().as_raw_fd()))
    }

    /// Fails if another user made the socket at the other end.
    pub(crate) fn check(&self, stream: &UnixStream) -> Result<()> {
        let failed = |error: io::Error| CommandFailure::new(Errno::PERM, format!("its server is not known: {error}"));
        let peer = getsockopt(stream, PeerCredentials).map_err(|errno| failed(errno.into()))?.uid();
        if self.users.contains(&peer) {
            return Ok(());
        }
        Err(CommandFailure::new(
            Errno::PERM,
            format!(
                "the process that answers for it belongs to user {peer}, who did not mount it, and was sent nothing; in the \
                 server's own network namespace the server answers: nsenter -t PID_OF_SERVER -n ubtrfs ..."
            ),
        ))
    }

    /// Whether the socket at the other end belongs neither to root nor to the client's own user, who can do everything
    /// that the client can.
    pub(crate) fn is_foreign(stream: &UnixStream) -> bool {
        let peer = getsockopt(stream, PeerCredentials).map(|peer| peer.uid());
        !matches!(peer, Ok(peer) if peer == 0 || peer == rustix::process::geteuid().as_raw())
    }

    /// Whether one of these users made the socket at the other end.
    pub(crate) fn include(&self, stream: &UnixStream) -> bool {
        self.check(stream).is_ok()
    }
}

/// Linux's number for users that have none, by default.
const OVERFLOW_USER: u32 = 65534;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_the_client_and_the_owner_may_answer() {
        let own = rustix::process::geteuid().as_raw();
        if LocalProcesses.sees_all_users() {
            assert_eq!(Peers::of_owner(Some(7)).users, [0, own, 7]);
        }
        assert_eq!(Peers::of_owner(None).users, [0, own]);
        let (near, _far) = UnixStream::pair().unwrap();
        assert!(Peers::of_owner(None).include(&near));
        let refused = Peers { users: vec![own + 1] }.check(&near).unwrap_err();
        assert!(refused.text.contains(&format!("user {own}")), "{refused}");
    }

    #[test]
    fn the_maker_of_a_mount_that_is_not_fuse_is_not_known() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(Peers::of_mount(&file), Peers::of_owner(None));
    }
}
