//! How `umount` learns that the last commit is durable.
//!
//! Unmounting a FUSE filesystem returns when the kernel is done with it, before the server is. So the server listens
//! on an abstract socket with a name nobody can guess, and tells that name to whoever may read the mount's root
//! directory, as the value of an extended attribute that is not on disk. `umount` connects before it unmounts; the
//! server answers on that connection after its final commit, when the image is closed and unlocked. A server that dies
//! closes the connection without an answer.

use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

/// Reading it on any file of a mount gives the name of the control socket.
pub(crate) const CONTROL_XATTR: &str = "ubtrfs.control";
/// Reading it makes everything written so far durable.
pub(crate) const SYNC_XATTR: &str = "ubtrfs.sync";

/// Reading it gives what the engine counted, as text for Prometheus.
pub(crate) const STATS_XATTR: &str = "ubtrfs.stats";

const DONE: &str = "ok";

/// The server's end.
#[derive(Debug)]
pub(crate) struct Control {
    listener: UnixListener,
    name: Vec<u8>,
}

impl Control {
    pub(crate) fn listen() -> io::Result<Self> {
        let random = std::fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        let name = format!("ubtrfs-{}", random.trim()).into_bytes();
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
        Ok(Self { listener, name })
    }

    pub(crate) fn name(&self) -> &[u8] {
        &self.name
    }

    /// Tells everyone who connected how it ended. Connections wait in the listener's queue until now.
    pub(crate) fn finish(self, failure: Option<&str>) {
        let text = failure.unwrap_or(DONE);
        if self.listener.set_nonblocking(true).is_err() {
            return;
        }
        while let Ok((mut stream, _)) = self.listener.accept() {
            // A waiter that went away needs no answer.
            let _ = stream.write_all(text.as_bytes());
        }
    }
}

/// Connects to the server of a mount.
pub(crate) fn connect(name: &[u8]) -> io::Result<UnixStream> {
    UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)
}

/// Waits for the server's end: `Ok(None)` when its last commit is durable, `Ok(Some(reason))` when it failed.
pub(crate) fn wait(mut stream: UnixStream) -> io::Result<Option<String>> {
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    match text.as_str() {
        DONE => Ok(None),
        "" => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server ended without an answer")),
        failure => Ok(Some(failure.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end_of(failure: Option<&str>) -> Option<String> {
        let control = Control::listen().unwrap();
        let stream = connect(control.name()).unwrap();
        control.finish(failure);
        wait(stream).unwrap()
    }

    #[test]
    fn whoever_connected_hears_how_it_ended() {
        assert_eq!(end_of(None), None);
        assert_eq!(end_of(Some("disk on fire")), Some("disk on fire".to_owned()));
    }

    #[test]
    fn a_dead_server_is_an_error() {
        let control = Control::listen().unwrap();
        let stream = connect(control.name()).unwrap();
        drop(control);
        assert!(wait(stream).is_err());
    }
}
