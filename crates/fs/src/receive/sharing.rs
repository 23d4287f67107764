//! [`Sharing`]: `receive --clone`. Data that the sent subvolume holds on this filesystem is shared instead of written.
//!
//! - C1. Data is shared only if it is equal in the sent subvolume, at the same path and offset. The sent subvolume is read-only,
//!   and cannot become writable or be deleted during the receive, so it is still equal when it is shared.
//! - C2. Adjacent ranges are joined and shared at once: extents of the sent subvolume are not split into the pieces of the stream.
//!   A joined range is shared before any command is applied that does not continue the range, so the commands that wait are
//!   writes to one file.
//! - C3. Data that cannot be shared is written: data that differs, parts of sectors (except at the end of both files),
//!   data of which only one of the files has checksums, and data that can be compared but not shared for any other reason.
//! - C4. If data that waits can be neither shared nor written, its commands do not count as applied: [`Unshared`] has the
//!   progress before them.

use std::ops::Range;

use ubtrfs_format::RootId;
use ubtrfs_format::item::InodeFlags;
use ubtrfs_stream::Position;

use super::error::{ReceiveError, ReceiveProblem};
use super::incomplete::Progress;
use super::origin::Part;
use super::walk::Walk;
use crate::file::extent_map::{ExtentInfo, ExtentKind};
use crate::subvolume::sends::Kept;
use crate::types::InodeId;
use crate::{Error, Fs};

/// The sent subvolume on this filesystem.
pub(crate) struct Sharing<'s> {
    walk: Walk,
    _kept: Kept<'s>,
    waiting: Option<Equal>,
    /// The current command.
    pub(crate) at: At,
    buf: Vec<u8>,
    /// Bytes that were shared.
    pub(crate) len_bytes: u64,
}

/// Equal data that is not shared yet (C2).
struct Equal {
    path: Vec<u8>,
    source: InodeId,
    target: InodeId,
    range: Range<u64>,
    /// The first write of the range.
    since: At,
}

/// A command of the stream.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct At {
    pub(crate) position: Position,
    /// The commands that were applied before this one.
    pub(crate) before: Progress,
}

/// Data that could be neither shared nor written (C4).
pub(crate) struct Unshared {
    /// The progress before the writes of this data.
    pub(crate) before: Progress,
    /// The error, with the file's path and the position of the first write.
    pub(crate) error: ReceiveError,
}

type Result<T, E = ReceiveProblem> = std::result::Result<T, E>;

impl<'s> Sharing<'s> {
    /// Finds the subvolume that a stream was sent from. Returns `None` if this filesystem does not have the subvolume,
    /// or if the subvolume is writable.
    pub(crate) fn find(fs: &'s Fs, uuid: uuid::Uuid, ctransid: u64) -> Result<Option<Self>> {
        let root = match fs.find_origin(uuid, ctransid, Part::CloneSource) {
            Ok(root) => root,
            Err(ReceiveProblem::NoCloneSource { .. } | ReceiveProblem::Writable { .. }) => return Ok(None),
            Err(problem) => return Err(problem),
        };
        let kept = match fs.keep_subvolumes([root].into_iter()) {
            Ok(kept) => kept,
            // The subvolume was deleted or became writable since it was found.
            Err(Error::NotFound | Error::NotPermitted(_)) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        Ok(Some(Self::new(root, kept)))
    }

    fn new(root: RootId, kept: Kept<'s>) -> Self {
        Self { walk: Walk::new(root), _kept: kept, waiting: None, at: At::default(), buf: Vec::new(), len_bytes: 0 }
    }

    /// Whether a write at `offset` continues the range that waits (C2).
    pub(crate) fn continues(&self, fs: &Fs, path: &[u8], offset: u64) -> bool {
        let sectorsize = u64::from(fs.geometry.sectorsize);
        let is_next = |equal: &Equal| equal.range.end == offset && equal.path == path;
        self.waiting.as_ref().is_some_and(is_next) && offset.is_multiple_of(sectorsize)
    }

    /// Accepts data for `offset` in the file `target` if the data can be shared, and shares it later (C2). Returns the
    /// number of bytes accepted; the caller writes the rest. If a range waits, the data continues it ([`Self::continues`]).
    pub(crate) fn take(&mut self, fs: &Fs, path: &[u8], target: InodeId, offset: u64, data: &[u8]) -> Result<usize> {
        let source = match &self.waiting {
            Some(equal) => equal.source,
            None => match self.walk.inode(fs, path) {
                Ok(source) => source,
                Err(_) => return Ok(0),
            },
        };
        let end = shared_end(fs, source, target, offset, data.len() as u64)?;
        let len = usize::try_from(end.saturating_sub(offset)).unwrap_or(0);
        let data = data.get(..len).unwrap_or_default();
        if data.is_empty() || !self.is_equal(fs, source, offset, data) {
            return Ok(0);
        }
        let since = self.at;
        match &mut self.waiting {
            Some(equal) => equal.range.end = end,
            None => self.waiting = Some(Equal { path: path.to_vec(), source, target, range: offset..end, since }),
        }
        Ok(len)
    }

    /// Whether the source has this data. The stream has the data, so a damaged source is no reason to fail.
    fn is_equal(&mut self, fs: &Fs, source: InodeId, offset: u64, data: &[u8]) -> bool {
        self.buf.resize(data.len(), 0);
        let read = fs.inode(source).and_then(|source| fs.read_keeping_atime(&source, offset, &mut self.buf));
        read.is_ok_and(|len| self.buf.get(..len) == Some(data))
    }

    /// Shares what waits (C2), or writes it (C3).
    pub(crate) fn flush(&mut self, fs: &Fs) -> Result<(), Unshared> {
        let Some(equal) = self.waiting.take() else { return Ok(()) };
        self.share(fs, &equal).map_err(|problem| Unshared {
            before: equal.since.before,
            error: ReceiveError { position: Some(equal.since.position), path: equal.path, problem: Box::new(problem) },
        })
    }

    fn share(&mut self, fs: &Fs, equal: &Equal) -> Result<()> {
        let Equal { source, target, range: Range { start, end }, .. } = equal;
        let len = end.saturating_sub(*start);
        match fs.clone_range(*source, *start, *target, *start, len) {
            Ok(()) => {
                self.len_bytes = self.len_bytes.saturating_add(len);
                Ok(())
            }
            Err(cause) => {
                tracing::debug!("'{}' is copied, because sharing failed: {cause}", equal.path.escape_ascii());
                self.copy(fs, equal)
            }
        }
    }

    fn copy(&mut self, fs: &Fs, equal: &Equal) -> Result<()> {
        let source = fs.inode(equal.source)?;
        let Range { start: mut at, end } = equal.range;
        while at < end {
            self.buf.resize(usize::try_from(end.saturating_sub(at)).unwrap_or(COPY_BYTES).min(COPY_BYTES), 0);
            let len = fs.read_keeping_atime(&source, at, &mut self.buf)?;
            if len == 0 {
                return Err(Error::InvalidArgument("the source became shorter").into());
            }
            fs.write_all(equal.target, at, self.buf.get(..len).unwrap_or_default())?;
            at = at.saturating_add(len as u64);
        }
        Ok(())
    }
}

/// Two files can share a range from `start` on: whole sectors, or up to the end of both files (C3). Returns the end of
/// this range, at most `len` bytes after `start`; returns `start` if the files can share nothing. A damaged source can
/// share nothing.
fn shared_end(fs: &Fs, source: InodeId, target: InodeId, start: u64, len: u64) -> Result<u64> {
    let sectorsize = u64::from(fs.geometry.sectorsize);
    let facts = |id| {
        let inode = fs.inode(id)?;
        let state = inode.read()?;
        Ok::<_, Error>((state.is_regular(), state.item.size, state.item.flags() & InodeFlags::NODATASUM))
    };
    let (_, target_size, target_nodatasum) = facts(target)?;
    let Ok((is_file, size, nodatasum)) = facts(source) else { return Ok(start) };
    let end = start.saturating_add(len);
    if !is_file || nodatasum != target_nodatasum || !start.is_multiple_of(sectorsize) || end > size {
        return Ok(start);
    }
    let is_inline = |extents: Vec<ExtentInfo>| extents.iter().any(|extent| extent.kind == ExtentKind::Inline);
    if size < sectorsize && fs.extents(source).is_ok_and(is_inline) {
        return Ok(start);
    }
    let sectors_end = end.saturating_sub(end.checked_rem(sectorsize).unwrap_or(0));
    Ok(if end == size && end >= target_size { end } else { sectors_end.max(start) })
}

/// Bytes that are copied in one step.
const COPY_BYTES: usize = 1 << 20;
