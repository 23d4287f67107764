//! [`Helper`]: a separate program that makes calls for the simulated users: it maps files into memory, and makes ioctls
//! on subvolumes.
//!
//! H1. A helper for ioctls is started by the thread of the user for whom it acts, and has the credentials of that
//!     thread, except for capabilities that the user id does not imply. So [`super::generate`] makes calls on
//!     subvolumes only as users whose capabilities follow from their user id. One helper makes the calls on mappings
//!     for all users.
//! H2. If a signal kills a helper, such as SIGBUS at an access to a mapping, the answer names the signal, and the
//!     helper's mappings are gone.

use std::collections::hash_map::Entry;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, recvmsg, sendmsg, socketpair,
};
use serde_json::{Value, json};

use super::call::{Call, name_text};
use super::perform::{Answer, Side};

/// A running helper.
#[derive(Debug)]
pub(crate) struct Helper {
    child: Child,
    socket: OwnedFd,
}

impl Helper {
    fn start() -> Result<Self, Errno> {
        let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        // A fixed path, because the first python3 in PATH may be in a directory that only root may enter.
        let child = Command::new("/usr/bin/python3")
            .args(["-c", include_str!("helper.py")])
            .current_dir("/")
            .stdin(Stdio::from(theirs))
            .spawn()
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        Ok(Self { child, socket })
    }

    /// Sends a request and returns the answer, or `Ok(None)` if the helper is dead.
    fn ask(&self, request: &Value, file: Option<&OwnedFd>) -> Result<Option<Value>, Errno> {
        let text = request.to_string();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let files: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
        if !files.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&files));
        }
        match sendmsg(&self.socket, &[IoSlice::new(text.as_bytes())], &mut ancillary, SendFlags::NOSIGNAL) {
            Err(Errno::PIPE | Errno::CONNRESET) => return Ok(None),
            sent => drop(sent?),
        }
        let mut buf = vec![0; 64 << 10];
        let mut none = RecvAncillaryBuffer::new(&mut []);
        let len = match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut buf)], &mut none, RecvFlags::empty()) {
            Ok(message) => message.bytes,
            Err(Errno::CONNRESET) => 0,
            Err(errno) => return Err(errno),
        };
        Ok(serde_json::from_slice(&buf[..len]).ok())
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Side {
    /// Performs a call with a helper. One helper makes the calls on all mappings; the helper of the calling thread
    /// makes ioctls.
    pub(crate) fn by_helper(&mut self, call: &Call) -> Answer {
        let full = |path: &str| name_text(self.full(path).as_os_str().as_encoded_bytes());
        let split = |path: &str| {
            let path = full(path.trim_end_matches('/'));
            let (dir, name) = path.rsplit_once('/').unwrap_or_default();
            (dir.to_owned(), name.to_owned())
        };
        let (request, slot) = match call {
            Call::Map { slot, len, write } => {
                self.slot(*slot)?;
                (json!({"do": "map", "slot": slot, "len": len, "write": write}), Some(*slot))
            }
            Call::MapStore { slot, at, data } => {
                let hex: String = data.bytes().iter().map(|byte| format!("{byte:02x}")).collect();
                (json!({"do": "store", "slot": slot, "at": at, "data": hex}), None)
            }
            Call::MapLoad { slot, at, len } => (json!({"do": "load", "slot": slot, "at": at, "len": len}), None),
            Call::MapSync { slot } => (json!({"do": "sync", "slot": slot}), None),
            Call::Unmap { slot } => (json!({"do": "unmap", "slot": slot}), None),
            Call::SubvolCreate { path } => {
                let (dir, name) = split(path);
                (json!({"do": "create", "dir": dir, "name": name}), None)
            }
            Call::SubvolDelete { path } => {
                let (dir, name) = split(path);
                (json!({"do": "delete", "dir": dir, "name": name}), None)
            }
            Call::SubvolGetFlags { path } => (json!({"do": "get flags", "path": full(path)}), None),
            Call::SubvolSetFlags { path, read_only } => {
                (json!({"do": "set flags", "path": full(path), "read_only": read_only}), None)
            }
            Call::SubvolSnapshot { from, to, read_only } => match self.snapshots_by.clone() {
                // On our mount, the program `ubtrfs` makes the snapshot, because a snapshot made by the ioctl lacks
                // data written through mappings.
                Some(program) => {
                    // Fail if `to` exists, as the ioctl does. If `to` is a directory, the program would make the
                    // snapshot in that directory.
                    if rustix::fs::lstat(self.full(to)).is_ok() {
                        return Err(Errno::IO);
                    }
                    let mut command = Command::new(program);
                    command.args(["subvolume", "snapshot"]).args(read_only.then_some("-r"));
                    command.arg(self.full(from)).arg(self.full(to)).stdin(Stdio::null());
                    let output = command.output().map_err(|_| Errno::IO)?;
                    // The program reports the reason as text, so all errors of snapshots are compared as EIO.
                    return if output.status.success() { Ok(Vec::new()) } else { Err(Errno::IO) };
                }
                None => {
                    let (dir, name) = split(to);
                    let request = json!({"do": "snapshot", "dir": dir, "name": name, "from": full(from),
                        "read_only": read_only});
                    (request, None)
                }
            },
            _ => return Err(Errno::NOSYS),
        };
        let key = call.is_of_subvolumes().then(|| std::thread::current().id());
        if let Entry::Vacant(place) = self.helpers.entry(key) {
            // Panic if no helper can be started. If this failure were the answer of the call, it would be equal on both
            // sides, and nothing would be tested.
            place.insert(Helper::start().expect("the helper is a program of /usr/bin/python3"));
        }
        let helper = &self.helpers[&key];
        let file = slot.map(|slot| self.slot(slot)).transpose()?;
        let Some(answer) = helper.ask(&request, file)? else {
            let signal = self.helpers.remove(&key).and_then(|mut helper| helper.child.wait().ok()?.signal());
            let signal = signal.expect("a helper ends by a signal or when its side is unmounted");
            return Ok(vec![("killed by".to_owned(), signal.to_string())]);
        };
        match answer.get("errno").and_then(Value::as_i64) {
            Some(_) if matches!(call, Call::SubvolSnapshot { .. }) => Err(Errno::IO),
            Some(errno) => Err(Errno::from_raw_os_error(i32::try_from(errno).unwrap_or(0))),
            None => {
                Ok(answer["text"].as_str().map(|text| ("answer".to_owned(), text.to_owned())).into_iter().collect())
            }
        }
    }
}
