//! Messages of the control socket. Each connection carries one request: a frame of JSON, with descriptors of the files
//! that the command works on. The answer is any number of progress messages and then the result.
//!
//! ```text
//! client:  {"version": 1, "request": {"subvolume": {"create": {"dir": 0, "name": "home", "umask": 18}}}}  + descriptors
//! server:  {"progress": {"done": 3, "total": 10, "step": ""}}
//! server:  {"done": {"subvolume": "done"}}   or   {"failed": {"errno": 17, "text": "file exists"}}
//! ```
//!
//! A request also has the numbers of the descriptors (`"files": [5]`), for a server that does not receive them
//! (`sent_files`).
//!
//! The stream of a command goes through the same connection, in frames. Those of the server begin with a byte 0, so they
//! are no answers. The client sends its stream after the answer `"ready"`, and an empty frame at its end. It cancels a
//! command by closing its side of the connection.
//!
//! - M1. A request starts with its version. The server refuses unknown versions and commands with a one-line error.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::failure::{CommandFailure, Result};
use crate::{
    balance, defragment, device, disk_usage, file, filesystem, join, quota, receive, replace, resolve, scrub, search,
    send, subvolume,
};

/// The version of the messages. The version changes when an existing command gets another meaning, not for new commands
/// or fields.
pub(crate) const VERSION: u32 = 1;

/// A command, grouped by the module that executes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Subvolumes and snapshots.
    Subvolume(subvolume::Request),
    /// The filesystem as a whole.
    Filesystem(filesystem::Request),
    /// Devices.
    Device(device::Request),
    /// Defragmenting files.
    Defragment(defragment::Request),
    /// Counting the bytes that files use.
    DiskUsage(disk_usage::Request),
    /// Moving block groups.
    Balance(balance::Request),
    /// Checking devices.
    Scrub(scrub::Request),
    /// Reading items and paths.
    Search(search::Request),
    /// The content of files.
    File(file::Request),
    /// Quotas and quota groups.
    Quota(quota::Request),
    /// Finding the paths of addresses, inodes and subvolumes.
    Resolve(resolve::Request),
    /// Replacing a device.
    Replace(replace::Request),
    /// Receiving a send stream.
    Receive(receive::Request),
    /// Sending subvolumes.
    Send(send::Request),
    /// Further mounts of the filesystem.
    Join(join::Request),
    /// Waits until the filesystem is unmounted and its last commit is durable.
    AwaitUnmount,
}

impl Request {
    /// Whether the command may take long. A long command runs in a separate thread and shows progress.
    pub fn is_long(&self) -> bool {
        match self {
            Self::Subvolume(request) => request.is_long(),
            Self::Filesystem(request) => request.is_long(),
            Self::Device(request) => request.is_long(),
            Self::Defragment(_) | Self::DiskUsage(_) | Self::Receive(_) | Self::Send(_) => true,
            Self::Balance(request) => request.is_long(),
            Self::Scrub(request) => request.is_long(),
            Self::Replace(request) => request.is_long(),
            Self::File(request) => request.is_long(),
            Self::Resolve(_) | Self::Search(_) | Self::Join(_) | Self::AwaitUnmount => false,
            Self::Quota(request) => request.is_long(),
        }
    }

    /// Whether the command ends other work that is running.
    pub(crate) fn ends_other(&self) -> bool {
        match self {
            Self::Balance(request) => matches!(request, balance::Request::Pause | balance::Request::Cancel),
            Self::Device(request) => matches!(request, device::Request::CancelResize | device::Request::CancelRemoval),
            Self::Scrub(request) => matches!(request, scrub::Request::Cancel),
            Self::Replace(request) => matches!(request, replace::Request::Cancel),
            _ => false,
        }
    }

    /// Whether the command is cancelled when its client goes away or is interrupted. Other commands run to their end.
    pub fn ends_with_client(&self) -> bool {
        self.is_long()
    }

    /// Whether the command makes changes through file `nr` of the request. A file that the command changes must have
    /// been opened through a writable mount.
    pub(crate) fn changes_through(&self, nr: usize) -> bool {
        match self {
            Self::File(request) => request.changes_through(nr),
            Self::Subvolume(request) => request.changes_through(nr),
            _ => self.changes(),
        }
    }

    /// The direction of the command's stream, if it has one.
    pub fn stream(&self) -> Option<Direction> {
        match self {
            Self::Receive(_) => Some(Direction::ToServer),
            Self::Send(_) | Self::DiskUsage(_) => Some(Direction::ToClient),
            _ => None,
        }
    }

    /// Whether the command may change the filesystem.
    pub fn changes(&self) -> bool {
        match self {
            Self::Subvolume(request) => request.changes(),
            Self::Filesystem(request) => request.changes(),
            Self::Device(request) => request.changes(),
            Self::Defragment(_) | Self::Receive(_) => true,
            Self::Balance(request) => request.changes(),
            Self::Scrub(request) => request.changes(),
            Self::Replace(request) => request.changes(),
            Self::File(request) => request.changes(),
            Self::DiskUsage(_) | Self::Resolve(_) | Self::Search(_) | Self::Send(_) | Self::AwaitUnmount => false,
            Self::Join(request) => request.changes(),
            Self::Quota(request) => request.changes(),
        }
    }
}

/// The direction of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The command reads it.
    ToServer,
    /// The command writes it.
    ToClient,
}

/// The result of a command, grouped by the module that executed it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// Subvolumes and snapshots.
    Subvolume(subvolume::Response),
    /// The filesystem as a whole.
    Filesystem(filesystem::Response),
    /// Devices.
    Device(device::Response),
    /// Defragmenting files.
    Defragment(defragment::Response),
    /// Moving block groups.
    Balance(balance::Response),
    /// Checking devices.
    Scrub(scrub::Response),
    /// Counting the bytes that files use.
    DiskUsage(disk_usage::Response),
    /// Reading items and paths.
    Search(search::Response),
    /// The content of files.
    File(file::Response),
    /// Quotas and quota groups.
    Quota(quota::Response),
    /// Finding the paths of addresses, inodes and subvolumes.
    Resolve(resolve::Response),
    /// Receiving a send stream.
    Receive(receive::Response),
    /// Replacing a device.
    Replace(replace::Response),
    /// Sending subvolumes.
    Send(send::Response),
    /// Further mounts of the filesystem.
    Join(join::Response),
    /// The last commit is durable, and the image is closed.
    Unmounted,
}

/// The progress of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProgressMessage {
    pub(crate) done: u64,
    pub(crate) total: u64,
    #[serde(default)]
    pub(crate) step: String,
}

/// A message of the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ServerMessage {
    Progress(ProgressMessage),
    /// The client may send the stream of its command.
    Ready,
    Done(Box<Response>),
    Failed(CommandFailure),
}

#[derive(Serialize)]
struct OutgoingRequest<'r> {
    version: u32,
    /// The program and its version, for error messages about versions.
    program: &'static str,
    /// Whether the client sends or receives the stream of the command through the connection.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    streams: bool,
    /// The numbers of the descriptors in the client's process.
    files: Vec<i32>,
    request: &'r Request,
}

#[derive(Deserialize)]
struct Incoming {
    version: u32,
    #[serde(default)]
    program: String,
    #[serde(default)]
    streams: bool,
    #[serde(default)]
    files: Vec<u32>,
    request: serde_json::Value,
}

const PROGRAM: &str = concat!("ubtrfs ", env!("CARGO_PKG_VERSION"));

/// Encodes a request that comes with these files.
pub(crate) fn encode_request(request: &Request, files: &[BorrowedFd<'_>]) -> Result<Vec<u8>> {
    let files = files.iter().map(AsRawFd::as_raw_fd).collect();
    to_json(&OutgoingRequest {
        version: VERSION,
        program: PROGRAM,
        streams: request.stream().is_some(),
        files,
        request,
    })
}

/// Decodes a request (M1), and the numbers of the client's files.
pub(crate) fn decode_request(frame: &[u8]) -> Result<(Request, Vec<u32>)> {
    let incoming: Incoming = serde_json::from_slice(frame).map_err(|_| {
        CommandFailure::new(Errno::PROTO, "the server does not understand the message; use ubtrfs to send commands")
    })?;
    if incoming.version != VERSION {
        let Incoming { version, program, .. } = incoming;
        let program: String = program.chars().filter(|c| !c.is_control()).take(40).collect();
        return Err(CommandFailure::new(
            Errno::PROTONOSUPPORT,
            format!(
                "the mount's server ({PROGRAM}) takes commands of version {VERSION}, not {version} ({program}); \
                 use the ubtrfs that mounted it, or mount it again"
            ),
        ));
    }
    let request: Request = serde_json::from_value(incoming.request).map_err(|error| {
        let error = error.to_string().lines().next().unwrap_or_default().chars().take(200).collect::<String>();
        CommandFailure::new(
            Errno::OPNOTSUPP,
            format!("the mount's server ({PROGRAM}) does not know this command ({error}); unmount and mount it with the newer ubtrfs"),
        )
    })?;
    // Earlier versions sent a pipe.
    if request.stream().is_some() && !incoming.streams {
        let text = format!(
            "the mount's server ({PROGRAM}) sends and receives streams in another way; use the ubtrfs that mounted it"
        );
        return Err(CommandFailure::new(Errno::PROTONOSUPPORT, text));
    }
    Ok((request, incoming.files))
}

pub(crate) fn encode_answer(answer: &ServerMessage) -> Result<Vec<u8>> {
    to_json(answer)
}

pub(crate) fn decode_answer(frame: &[u8]) -> Result<ServerMessage> {
    serde_json::from_slice(frame).map_err(|_| {
        let text = format!(
            "{PROGRAM} does not understand the answer of the mount's server; use the ubtrfs that mounted it, or mount it again"
        );
        CommandFailure::new(Errno::PROTO, text)
    })
}

fn to_json(message: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(message)
        .map_err(|error| CommandFailure::new(Errno::INVAL, format!("it cannot be sent: {error}")))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn requests_come_back() {
        for request in [
            Request::AwaitUnmount,
            Request::Filesystem(filesystem::Request::Sync),
            Request::Subvolume(subvolume::Request::Create {
                dir: 0,
                name: b"\xffa".to_vec(),
                umask: 0o22,
                qgroups: Vec::new(),
                limits: None,
            }),
        ] {
            let file = tempfile::tempfile().unwrap();
            let frame = encode_request(&request, &[file.as_fd()]).unwrap();
            let numbers = vec![u32::try_from(file.as_raw_fd()).unwrap()];
            assert_eq!(decode_request(&frame), Ok((request, numbers)), "{}", String::from_utf8_lossy(&frame));
        }
    }

    #[test]
    fn receives_of_versions_that_do_not_share_are_understood() {
        let text = concat!(
            r#"{"version":1,"streams":true,"request":{"receive":{"dir":0,"only_first":false,"max_errors":1,"keep":false,"#,
            r#""force_decompress":false,"verify":false,"total_bytes":null}}}"#
        );
        let (request, _) = decode_request(text.as_bytes()).unwrap();
        assert!(matches!(&request, Request::Receive(receive) if !receive.shares && !receive.replaces), "{request:?}");
        let frame = String::from_utf8(encode_request(&request, &[]).unwrap()).unwrap();
        assert!(!frame.contains("shares") && !frame.contains("replaces"), "{frame}");
        let done = serde_json::to_value(receive::Response::default()).unwrap();
        let fields = done.as_object().unwrap().iter().filter(|(name, _)| *name != "bytes_shared");
        let older = serde_json::Value::Object(fields.map(|(name, value)| (name.clone(), value.clone())).collect());
        assert_eq!(serde_json::from_value::<receive::Response>(older).unwrap(), receive::Response::default());
    }

    #[test]
    fn other_versions_and_unknown_commands_get_a_line_that_says_so() {
        let told = |text: &str| decode_request(text.as_bytes()).unwrap_err();
        let newer = told(r#"{"version": 2, "program": "ubtrfs 9", "request": {"whatever": [1]}}"#);
        assert!(newer.text.contains("version 1, not 2 (ubtrfs 9)") && !newer.text.contains('\n'), "{newer}");
        let unknown = told(r#"{"version": 1, "request": {"fly": {}}}"#);
        assert!(unknown.text.contains("does not know this command") && unknown.text.contains("fly"), "{unknown}");
        let field =
            r#"{"version":1,"request":{"subvolume":{"create":{"dir":0,"name":"a","umask":0,"shape":"round"}}}}"#;
        assert!(told(field).text.contains("shape"), "a field that is ignored would change the command");
        for garbage in ["", "{", "[]", "\"\"", "{\"version\":1}", "\u{0}", "nul"] {
            assert!(told(garbage).text.contains("does not understand"), "{garbage}");
        }
    }
}
