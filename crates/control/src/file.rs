//! Commands on the content of files. The commands replace ioctls that do not reach a FUSE server: FIEMAP, FICLONERANGE,
//! FIDEDUPERANGE.
//!
//! | command  | needs                                                                                                 |
//! |----------|-------------------------------------------------------------------------------------------------------|
//! | extents  | nothing but the file                                                                                  |
//! | clone    | the source open for reading, the target open for writing                                              |
//! | compression | nothing but the file                                                                               |
//! | set compression | ownership of the file, or root                                                                 |
//! | dedupe   | the source open for reading; the target open for writing, or ownership of it, or root                 |
//!
//! - D1. Before a command on file content, the client makes the kernel write its dirty pages of the files. After a
//!   clone, the server makes the kernel drop its pages of the target.

use std::collections::HashSet;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_format::Logical;
use ubtrfs_format::print::escaped;
use ubtrfs_fs::{Error, FileExtentInfo, FileExtentKind, InodeId, XattrFlags, mode};

use crate::caller::permit;
use crate::execute::{CommandContext, FileNr, OpenFile};
use crate::failure::{CommandFailure, Result};

/// A command on the content of files. Offsets and lengths are in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Lists the extents of a file, a page at a time: [`Response::Extents`].
    Extents {
        /// The file.
        of: FileNr,
        /// The first offset.
        from: u64,
    },
    /// Makes a range of file 1 share the extents of a range of file 0: [`Response::Done`] or [`Response::GrowFirst`].
    Clone(Ranges),
    /// Reads the `btrfs.compression` property: [`Response::Compression`].
    Compression {
        /// The file or directory.
        of: FileNr,
    },
    /// Sets the `btrfs.compression` property of a file, or of the new files of a directory.
    SetCompression {
        /// The file or directory.
        of: FileNr,
        /// `zlib`, `lzo`, `zstd`, `none`; empty to remove the property.
        #[serde(with = "crate::bytes")]
        method: Vec<u8>,
    },
    /// Makes two ranges share extents like [`Request::Clone`], but only if both ranges have the same content:
    /// [`Response::Deduped`].
    Dedupe(Ranges),
}

/// A range of file 0 and a range of file 1 with equal lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ranges {
    /// Offset in the source, file 0.
    pub source: u64,
    /// Offset in the target, file 1.
    pub target: u64,
    /// Length in bytes; 0 means up to the end of the source.
    pub len: u64,
}

/// The result of a command on the content of files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// The command succeeded.
    Done,
    /// Nothing is done yet, because on this mount only the kernel makes files longer. The client must extend the target
    /// through the mount, and then repeat the request.
    GrowFirst {
        /// The size that the target needs, in bytes.
        size: u64,
    },
    /// Extents in the order of their offsets.
    Extents {
        /// The extents of this page.
        extents: Vec<MappedExtent>,
        /// The offset where the next page starts; `None` after the last page.
        next: Option<u64>,
    },
    /// The `btrfs.compression` property; `None` if the property is not set.
    Compression(Option<String>),
    /// The result of [`Request::Dedupe`].
    Deduped {
        /// Whether the ranges have the same content. Ranges with the same content now share their extents.
        same: bool,
    },
}

/// An extent of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedExtent {
    /// Offset in the file.
    pub offset: u64,
    /// Length in the file, in bytes.
    pub len: u64,
    /// The kind of the extent.
    pub kind: MappedExtentKind,
    /// Logical address of the part of the extent that the file uses, or of the whole extent if it is compressed. 0 if
    /// the extent has no address.
    pub address: u64,
    /// Whether the extent is compressed.
    pub is_compressed: bool,
    /// Whether another file, another subvolume, or another place in the file uses the extent too, as of the
    /// last commit.
    #[serde(default)]
    pub is_shared: bool,
}

/// The kind of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MappedExtentKind {
    /// Data.
    Data,
    /// Data inside metadata.
    Inline,
    /// Allocated, and reads as zeros.
    Prealloc,
    /// Data that is not on disk yet.
    Delalloc,
}

impl Request {
    /// See [`crate::Request::is_long`].
    pub(crate) fn is_long(&self) -> bool {
        matches!(self, Self::Clone(_) | Self::Dedupe(_))
    }

    /// See [`crate::Request::changes`].
    pub(crate) fn changes(&self) -> bool {
        !matches!(self, Self::Extents { .. } | Self::Compression { .. })
    }

    /// See [`crate::Request::changes_through`].
    pub(crate) fn changes_through(&self, nr: usize) -> bool {
        match self {
            Self::Clone(_) | Self::Dedupe(_) => nr == 1,
            _ => self.changes(),
        }
    }
}

pub(crate) fn execute(context: &CommandContext<'_>, request: Request) -> Result<Response> {
    match request {
        Request::Extents { of, from } => extents(context, of, from),
        Request::Compression { of } => compression(context, of).map(Response::Compression),
        Request::SetCompression { of, method } => set_compression(context, of, &method).map(|()| Response::Done),
        Request::Clone(ranges) => clone(context, ranges),
        Request::Dedupe(ranges) => dedupe(context, ranges).map(|same| Response::Deduped { same }),
    }
}

fn extents(context: &CommandContext<'_>, of: FileNr, from: u64) -> Result<Response> {
    let (found, next) = context.fs.extents_from(context.inode(of)?, from, PAGE)?;
    let shared = shared_among(context, &found)?;
    let extent = |info: FileExtentInfo| {
        let is_compressed = info.compression != Default::default();
        let within = if is_compressed { 0 } else { info.extent_offset };
        Some(MappedExtent {
            offset: info.offset,
            len: info.len_bytes,
            kind: match info.kind {
                FileExtentKind::Data => MappedExtentKind::Data,
                FileExtentKind::Inline => MappedExtentKind::Inline,
                FileExtentKind::Prealloc => MappedExtentKind::Prealloc,
                FileExtentKind::Delalloc => MappedExtentKind::Delalloc,
                FileExtentKind::Hole => return None,
            },
            address: if info.disk_bytenr.0 == 0 { 0 } else { info.disk_bytenr.0.saturating_add(within) },
            is_compressed,
            is_shared: shared.contains(&info.disk_bytenr),
        })
    };
    let mut extents: Vec<MappedExtent> = found.into_iter().filter_map(extent).collect();
    extents.sort_by_key(|extent| (extent.offset, extent.kind == MappedExtentKind::Delalloc));
    Ok(Response::Extents { extents, next })
}

/// The addresses of the extents that are shared.
fn shared_among(context: &CommandContext<'_>, found: &[FileExtentInfo]) -> Result<HashSet<Logical>> {
    let on_disk = found.iter().filter(|info| info.disk_bytenr.0 != 0);
    let mut extents: Vec<_> = on_disk.map(|info| (info.disk_bytenr, info.disk_len_bytes)).collect();
    extents.sort_unstable();
    extents.dedup();
    let shared = context.fs.extents_are_shared(&extents)?;
    Ok(extents.into_iter().zip(shared).filter(|(_, is_shared)| *is_shared).map(|((at, _), _)| at).collect())
}

fn clone(context: &CommandContext<'_>, ranges: Ranges) -> Result<Response> {
    let (source, target) = pair(context)?;
    if !target.is_writable {
        return Err(CommandFailure::new(Errno::BADF, "the target is not open for writing"));
    }
    let Ranges { source: from, target: to, len } = ranges;
    let before = context.fs.getattr(target.id)?;
    if context.host.appends_by_own_size() {
        let len = if len == 0 { context.fs.getattr(source.id)?.size.saturating_sub(from) } else { len };
        let size = to.saturating_add(len);
        if len > 0 && size > before.size {
            return Ok(Response::GrowFirst { size });
        }
    }
    let cloned = context.fs.clone_range(source.id, from, target.id, to, len);
    // A clone that fails midway may have changed a part of the range. Then the caches must be dropped too.
    if cloned.is_ok() || context.fs.getattr(target.id)? != before {
        context.host.forget_data(target.id);
        drop_privileges(context, target.id)?;
    }
    cloned?;
    Ok(Response::Done)
}

fn dedupe(context: &CommandContext<'_>, ranges: Ranges) -> Result<bool> {
    let (source, target) = pair(context)?;
    let is_owner = || context.fs.getattr(target.id).is_ok_and(|attr| context.caller.is_owner_of(attr.uid));
    let may = target.is_writable || context.caller.is_admin() || is_owner();
    permit(may, "the target is not open for writing and belongs to another user")?;
    let Ranges { source: from, target: to, len } = ranges;
    let deduped = context.fs.dedupe_range(source.id, from, target.id, to, len, context.job);
    // The file's number of blocks may have changed, even if the command failed midway.
    context.host.forget_attributes(target.id);
    Ok(deduped?)
}

fn compression(context: &CommandContext<'_>, of: FileNr) -> Result<Option<String>> {
    match context.fs.getxattr(context.inode(of)?, COMPRESSION) {
        Ok(method) => Ok(Some(escaped(&method))),
        Err(Error::NoData) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn set_compression(context: &CommandContext<'_>, of: FileNr, method: &[u8]) -> Result<()> {
    let (id, caller) = (context.inode(of)?, context.caller);
    permit(caller.is_owner_of(context.fs.getattr(id)?.uid), "it belongs to another user")?;
    let done = match method {
        b"" => context.fs.removexattr(id, COMPRESSION, &caller.with_umask(0)),
        method => context.fs.setxattr(id, COMPRESSION, method, XattrFlags::empty(), &caller.with_umask(0)),
    };
    match done {
        Err(Error::NoData) if method.is_empty() => return Ok(()),
        done => done?,
    }
    // The change of the property also updated the file's ctime.
    context.host.forget_attributes(id);
    Ok(())
}

fn pair(context: &CommandContext<'_>) -> Result<(OpenFile, OpenFile)> {
    let (source, target) = (context.file(0)?, context.file(1)?);
    if !source.is_readable {
        return Err(CommandFailure::new(Errno::BADF, "the source is not open for reading"));
    }
    Ok((source, target))
}

/// Removes the capabilities of a file that the caller changed, and clears its set-user-id and set-group-id bits, as a
/// write does.
fn drop_privileges(context: &CommandContext<'_>, id: InodeId) -> Result<()> {
    const CAP_FSETID: u32 = 4;
    if context.fs.drop_capability(id)? {
        context.host.forget_attributes(id);
    }
    let attr = context.fs.getattr(id)?;
    if attr.mode & (mode::SETUID | mode::SETGID) == 0 || context.caller.is_capable(CAP_FSETID) {
        return Ok(());
    }
    let kept = without_set_id(attr.mode, || context.caller.is_in_group(attr.gid));
    if kept != attr.mode {
        context.fs.drop_privileges(id, kept)?;
        context.host.forget_attributes(id);
    }
    Ok(())
}

/// The mode of a file after its content was changed by a caller who may not keep the set-id bits: without set-user-id,
/// and usually without set-group-id. Set-group-id stays if the group cannot execute the file and the caller is in the
/// group. (On such a file, the bit once meant mandatory locking.)
pub fn without_set_id(file_mode: u32, in_group: impl FnOnce() -> bool) -> u32 {
    const GROUP_EXECUTE: u32 = 0o010;
    let kept = file_mode & !mode::SETUID;
    if kept & mode::SETGID != 0 && (kept & GROUP_EXECUTE != 0 || !in_group()) { kept & !mode::SETGID } else { kept }
}

const COMPRESSION: &[u8] = b"btrfs.compression";
/// The largest number of extents in one answer, which take about 150 KiB.
const PAGE: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changing_a_file_drops_its_privileges() {
        let after = |file_mode, in_group| without_set_id(file_mode, || in_group);
        assert_eq!(after(0o106_755, true), 0o100_755);
        assert_eq!(after(0o102_745, true), 0o102_745);
        assert_eq!(after(0o102_745, false), 0o100_745);
        assert_eq!(after(0o100_644, false), 0o100_644);
    }
}
