//! Receiving a send stream.
//!
//! | command | needs                                                                                                      |
//! |---------|------------------------------------------------------------------------------------------------------------|
//! | receive | the rights of an administrator ([`CommandContext::require_admin`]), and write and search of the directory  |
//!
//! A stream makes files of any owner, device nodes, and set-user-id programs. So root may receive into every mount. An
//! ordinary user may receive into their own mounts, which fusermount3 makes with nosuid and nodev, and into their own
//! images, whose bytes they can change anyway.
//!
//! - V1. A stream that stalls, or a client that goes away, does not block the mount: the input is read only when bytes
//!   are available, and reading stops when the command ends.
//! - V2. The kernel caches names and data of a subvolume that programs read while it is being received. When the
//!   receive ends, the server makes the kernel forget the names and data of the received subvolumes.

use std::io::BufReader;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_format::print::escaped;
use ubtrfs_fs::{Fs, INCOMPLETE_XATTR, InodeId, ReceiveError, ReceiveOptions, ReceiveProblem, ReceivedSubvolume};

use crate::access::may_change_names;
use crate::execute::{CommandContext, FileNr};
use crate::failure::{CommandFailure, Result};
use crate::stream::StreamInput;

/// Receives the subvolumes of the stream that comes with the request. Progress counts bytes of the stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The directory in which the subvolumes are created.
    pub dir: FileNr,
    /// Whether to end at the first end command.
    pub only_first: bool,
    /// The number of failed commands after which the receive fails; 0 for no limit.
    pub max_errors: u64,
    /// Whether to keep an incomplete subvolume, and to resume one that was kept earlier.
    pub keep: bool,
    /// Whether compressed data is always decompressed.
    pub force_decompress: bool,
    /// Whether to verify each subvolume before it is marked as complete: its content is read again and compared with
    /// the stream.
    pub verify: bool,
    /// Whether to share data with the sent subvolume, if that subvolume is on this filesystem. The field is sent only
    /// if it is true, so that a server that does not know the field accepts all other requests.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shares: bool,
    /// Whether to delete what a killed receive of the same stream left, and to begin again. It is sent only if it is
    /// true, like `shares`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replaces: bool,
    /// Length of the stream in bytes, if known, for showing the progress.
    pub total_bytes: Option<u64>,
}

/// The result of a receive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Response {
    /// The subvolumes, in the order of the stream.
    pub subvolumes: Vec<ReceivedDescription>,
    /// Commands applied.
    pub commands: u64,
    /// Bytes of the stream.
    pub bytes: u64,
    /// Compressed extents that were stored as they arrived, without decompression.
    pub stored_encoded: u64,
    /// Bytes that are shared with the sent subvolumes.
    #[serde(default)]
    pub bytes_shared: u64,
    /// Files that fs-verity protects at the sender, but not here.
    #[serde(default)]
    pub without_verity: u64,
    /// Files and directories that were verified.
    pub verified_inodes: u64,
    /// Bytes of the received files that the verification read.
    pub verified_bytes: u64,
    /// The bytes in `verified_bytes` that were compared with bytes of the stream.
    pub compared_bytes: u64,
    /// Commands that failed.
    pub nr_errors: u64,
    /// The errors of the first commands that failed.
    pub errors: Vec<String>,
}

/// A received subvolume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceivedDescription {
    /// The subvolume's id.
    pub id: u64,
    /// The subvolume's path below the directory that receives it.
    #[serde(with = "crate::bytes")]
    pub path: Vec<u8>,
    /// UUID of the subvolume that was sent.
    pub uuid: String,
    /// Whether the subvolume began as a snapshot of its parent.
    pub is_snapshot: bool,
    /// The number of commands that an earlier, interrupted receive had applied.
    pub nr_resumed: u64,
}

pub(crate) fn execute(context: &CommandContext<'_>, request: &Request) -> Result<Response> {
    context.require_admin()?;
    if context.host.keeps_sizes() {
        let text = "not supported in a mount with writeback_cache, where programs would not see files grow; mount without it, or \
                    receive into the unmounted image";
        return Err(CommandFailure { has_advice: true, ..CommandFailure::new(Errno::OPNOTSUPP, text) });
    }
    let (fs, dir) = (context.fs, context.inode(request.dir)?);
    may_change_names(fs, context.caller, dir)?;
    context.job.add_total(request.total_bytes.unwrap_or(0));
    let ended = Arc::new(AtomicBool::new(false));
    let options = ReceiveOptions {
        only_first: request.only_first,
        max_errors: request.max_errors,
        keep: request.keep,
        force_decompress: request.force_decompress,
        verify: request.verify,
        shares: request.shares,
        replaces: request.replaces,
        ended: Arc::clone(&ended),
    };
    // Without a buffer, nothing after the first end command is read.
    let buffer_bytes = if request.only_first { 0 } else { INPUT_BYTES };
    let input = BufReader::with_capacity(buffer_bytes, StreamInput::of(context, move || ended.load(Ordering::SeqCst))?);
    let mut begun: Vec<ReceivedSubvolume> = Vec::new();
    let done = fs.receive(dir, input, &options, context.job, &mut |made| {
        context.job.set_step(escaped(&made.path).chars().take(STEP_CHARS).collect::<String>());
        // The kernel may have cached that the name does not exist.
        context.host.forget_name(made.dir, name_of(made), None);
        begun.push(made.clone());
    });
    for made in &begun {
        forget(context, made);
    }
    let report = done.map_err(|error| {
        let mut failure = failure_of(&error);
        if let Some(made) = begun.last().filter(|made| is_kept(fs, made)) {
            let name = escaped(&made.path);
            failure.text +=
                &format!("; '{name}' is kept incomplete: repeat the command with the whole stream to continue");
            failure.has_advice = true;
        }
        failure
    })?;
    let subvolume = |made: ReceivedSubvolume| ReceivedDescription {
        id: made.id.0,
        path: made.path,
        uuid: made.uuid.to_string(),
        is_snapshot: made.is_snapshot,
        nr_resumed: made.nr_resumed,
    };
    Ok(Response {
        subvolumes: report.subvolumes.into_iter().map(subvolume).collect(),
        commands: report.nr_commands,
        bytes: report.nr_bytes,
        stored_encoded: report.nr_stored_encoded,
        bytes_shared: report.bytes_shared,
        without_verity: report.nr_without_verity,
        verified_inodes: report.verified.nr_inodes,
        verified_bytes: report.verified.bytes_read,
        compared_bytes: report.verified.bytes_compared,
        nr_errors: report.nr_errors,
        errors: report.errors.iter().map(ToString::to_string).collect(),
    })
}

/// Makes the kernel forget the names and data of a received subvolume (V2).
fn forget(context: &CommandContext<'_>, made: &ReceivedSubvolume) {
    for (dir, name) in context.fs.used_names_of(made.id) {
        context.host.forget_name(dir, &name, None);
    }
    for id in context.fs.used_inodes_of(made.id) {
        context.host.forget_data(id);
    }
    context.host.forget_name(made.dir, name_of(made), Some(made.id));
}

/// Whether a failed receive left a subvolume that a later one can continue.
fn is_kept(fs: &Fs, made: &ReceivedSubvolume) -> bool {
    fs.getxattr(InodeId::root_of(made.id), INCOMPLETE_XATTR.as_bytes()).is_ok_and(|mark| mark.starts_with(b"stopped "))
}

fn name_of(made: &ReceivedSubvolume) -> &[u8] {
    made.path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

fn failure_of(error: &ReceiveError) -> CommandFailure {
    let has_advice = !matches!(*error.problem, ReceiveProblem::Fs(_));
    CommandFailure { errno: error.problem.errno(), text: error.to_string(), has_advice }
}

const INPUT_BYTES: usize = 256 << 10;
/// The number of characters of a path that the progress shows.
const STEP_CHARS: usize = 60;
