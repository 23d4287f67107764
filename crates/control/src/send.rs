//! Sending subvolumes, and the differences between snapshots.
//!
//! | command              | needs                                                                                         |
//! |----------------------|-----------------------------------------------------------------------------------------------|
//! | send, diff, find new | the rights of an administrator ([`CommandContext::require_admin`]): a stream contains files that only |
//! |                      | their owners may read                                                                         |
//!
//! So root may send from every mount. An ordinary user may send from their own mounts and images. A mount's server sends
//! the stream through the connection ([`StreamOutput`]).

use std::io::{self, BufWriter, Write};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_format::print::{insert_name, insert_names, json_line};
use ubtrfs_format::{Generation, RootId};
use ubtrfs_fs::{ChangeKind, Error, InodeChange, SendRequest};

use crate::execute::CommandContext;
use crate::failure::{CommandFailure, Result};
use crate::stream::StreamOutput;

/// A command that writes a stream. Subvolumes are named by their ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Sends subvolumes.
    Send(Send),
    /// Writes the changes between two snapshots, one JSON object a line.
    Diff {
        /// The older snapshot.
        old: u64,
        /// The newer snapshot.
        new: u64,
    },
    /// Writes the extents that are not older than a generation, as `btrfs subvolume find-new` prints them.
    FindNew {
        /// The subvolume.
        subvolume: u64,
        /// The generation.
        generation: u64,
    },
}

/// The arguments of a send; see [`SendRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "SendRequest documents the fields")]
pub struct Send {
    pub subvolumes: Vec<u64>,
    pub parent: Option<u64>,
    pub clone_sources: Vec<u64>,
    pub version: u32,
    pub compressed_data: bool,
    pub no_data: bool,
    pub joined: bool,
}

/// The result of a command that writes a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Response {
    /// Bytes of the stream.
    pub bytes: u64,
}

pub(crate) fn execute(context: &CommandContext<'_>, request: Request) -> Result<Response> {
    context.require_admin()?;
    let (fs, job) = (context.fs, context.job);
    let mut output = StreamOutput::of(context)?;
    match request {
        Request::Send(what) => {
            let ids = |ids: Vec<u64>| ids.into_iter().map(RootId).collect();
            let request = SendRequest {
                subvolumes: ids(what.subvolumes),
                parent: what.parent.map(RootId),
                clone_sources: ids(what.clone_sources),
                version: what.version,
                compressed_data: what.compressed_data,
                no_data: what.no_data,
                joined: what.joined,
            };
            fs.send(&request, &mut output, job).map_err(failure_of)?;
        }
        Request::Diff { old, new } => write_lines(&mut output, |line| {
            fs.changes_between(RootId(old), RootId(new), job, &mut |change| {
                let text = json_line(&json_of(&change));
                line(text.as_bytes())?;
                line(b"\n")
            })
        })?,
        Request::FindNew { subvolume, generation } => {
            write_lines(&mut output, |line| fs.find_new(RootId(subvolume), Generation(generation), job, line))?
        }
    }
    Ok(Response { bytes: output.bytes() })
}

/// Buffers the bytes that `write` passes on, and writes them to `output`.
fn write_lines(
    output: &mut StreamOutput<'_>,
    write: impl FnOnce(&mut dyn FnMut(&[u8]) -> ubtrfs_fs::Result<()>) -> ubtrfs_fs::Result<()>,
) -> Result<()> {
    let mut lines = BufWriter::with_capacity(BUFFER, output);
    let written = write(&mut |bytes| lines.write_all(bytes).map_err(Error::Output));
    written.and_then(|()| lines.flush().map_err(Error::Output)).map_err(failure_of)
}

fn json_of(change: &InodeChange) -> serde_json::Value {
    let ranges =
        change.ranges.iter().map(|range| serde_json::json!({"offset": range.start, "len": range.end - range.start}));
    let mut value = serde_json::json!({
        "change": change.kind.name(),
        "type": change.file_type,
    });
    insert_name(&mut value, "path", &change.path);
    if let Some(from) = &change.from {
        insert_name(&mut value, "from", from);
    }
    if change.kind == ChangeKind::Changed {
        value["ranges"] = ranges.collect();
        insert_names(&mut value, "attributes", change.attributes.iter().map(Vec::as_slice));
    }
    value
}

fn failure_of(error: Error) -> CommandFailure {
    let errno = Errno::from_raw_os_error(error.errno());
    match &error {
        Error::Output(cause) if cause.kind() == io::ErrorKind::BrokenPipe => {
            CommandFailure::new(Errno::PIPE, "the reader of the stream closed it before its end")
        }
        Error::NoParent(_) | Error::InProgress(_) | Error::Unsendable(_) => {
            CommandFailure::new(errno, error.to_string())
        }
        _ => CommandFailure::from(error),
    }
}

const BUFFER: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_changed_file_has_ranges_and_attributes() {
        let json = |kind| {
            let (path, attributes) = (b"f".to_vec(), vec![b"mode".to_vec()]);
            let change =
                InodeChange { kind, file_type: "file", path, from: None, ranges: vec![0..1, 4096..8192], attributes };
            json_of(&change)
        };
        assert_eq!(json(ChangeKind::Added), serde_json::json!({"change": "added", "type": "file", "path": "f"}));
        let changed = json(ChangeKind::Changed);
        assert_eq!(changed["ranges"], serde_json::json!([{"offset": 0, "len": 1}, {"offset": 4096, "len": 4096}]));
        assert_eq!(changed["attributes"], serde_json::json!(["mode"]));
    }
}
