//! [`Sharing`]: `receive --clone`. Data that the sent subvolume holds on this filesystem is shared instead of written.
//!
//! - C1. Data is shared only if it is equal in the sent subvolume, at the same path and offset. The sent subvolume is read-only,
//!   and cannot become writable or be deleted during the receive, so paths, sizes and flags stay as they are. Files that were
//!   opened for writing before can still change. Each change of a file's content changes its sequence, so data that changes
//!   between the comparison and the sharing is an error.
//! - C2. Adjacent ranges are joined and shared at once: extents of the sent subvolume are not split into the pieces of the stream.
//!   A joined range is shared before any command is applied that does not continue the range, so the commands that wait are
//!   writes to one file.
//! - C3. Data that cannot be shared is written: data that differs, parts of sectors (except at the end of both files),
//!   data of which only one of the files has checksums, and data that can be compared but not shared for any other reason.
//! - C4. If data that waits can be neither shared nor written, its commands do not count as applied: [`Unshared`] has the
//!   progress before them.

use std::ops::Range;
use std::sync::Arc;

use ubtrfs_format::RootId;
use ubtrfs_format::item::InodeFlags;
use ubtrfs_stream::Position;

use super::error::{ReceiveError, ReceiveProblem};
use super::incomplete::ReceiveProgress;
use super::origin::OriginRole;
use super::walk::PathWalk;
use crate::file::extent_map::FileExtentKind;
use crate::inode::state::Inode;
use crate::subvolume::sends::KeptSubvolumes;
use crate::types::InodeId;
use crate::{Error, Fs};

/// The sent subvolume on this filesystem.
pub(crate) struct Sharing<'s> {
    walk: PathWalk,
    _kept: KeptSubvolumes<'s>,
    waiting: Option<Equal>,
    /// The path of the last file, and the file; `None` if its data cannot be shared.
    last: Option<(Vec<u8>, Option<Arc<SharingSource>>)>,
    /// The current command.
    pub(crate) at: At,
    buf: Vec<u8>,
    /// Bytes that were shared.
    pub(crate) len_bytes: u64,
}

/// A file of the sent subvolume.
struct SharingSource {
    inode: Arc<Inode>,
    /// The sequence before the first comparison (C1).
    sequence: u64,
    size: u64,
    nodatasum: InodeFlags,
}

/// Equal data that is not shared yet (C2).
struct Equal {
    path: Vec<u8>,
    source: Arc<SharingSource>,
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
    pub(crate) before: ReceiveProgress,
}

/// Data that could be neither shared nor written (C4).
pub(crate) struct Unshared {
    /// The progress before the writes of this data.
    pub(crate) before: ReceiveProgress,
    /// The error, with the file's path and the position of the first write.
    pub(crate) error: ReceiveError,
}

type Result<T, E = ReceiveProblem> = std::result::Result<T, E>;

impl<'s> Sharing<'s> {
    /// Finds the subvolume that a stream was sent from, or a received copy of it. Returns `None` if this filesystem has
    /// no such subvolume that is read-only.
    pub(crate) fn find(fs: &'s Fs, uuid: uuid::Uuid, ctransid: u64) -> Result<Option<Self>> {
        let root = match fs.find_origin(uuid, ctransid, OriginRole::CloneSource) {
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
        Ok(Some(Self::new(root, super::store_bytes(fs), kept)))
    }

    fn new(root: RootId, max_bytes: u64, kept: KeptSubvolumes<'s>) -> Self {
        Self {
            walk: PathWalk::new(root, max_bytes),
            _kept: kept,
            waiting: None,
            last: None,
            at: At::default(),
            buf: Vec::new(),
            len_bytes: 0,
        }
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
        let Some(source) = self.source(fs, path) else { return Ok(0) };
        let end = source.shared_end(fs, target, offset, data.len() as u64)?;
        let len = usize::try_from(end.saturating_sub(offset)).unwrap_or(0);
        let data = data.get(..len).unwrap_or_default();
        if data.is_empty() || !self.is_equal(fs, &source, offset, data) {
            return Ok(0);
        }
        let since = self.at;
        match &mut self.waiting {
            Some(equal) => equal.range.end = end,
            None => self.waiting = Some(Equal { path: path.to_vec(), source, target, range: offset..end, since }),
        }
        Ok(len)
    }

    /// The file at a path. Returns `None` if it has no data that can be shared. The stream has the data, so a damaged file is
    /// no reason to fail.
    fn source(&mut self, fs: &Fs, path: &[u8]) -> Option<Arc<SharingSource>> {
        if let Some(equal) = &self.waiting {
            return Some(Arc::clone(&equal.source));
        }
        if let Some((last, source)) = &self.last
            && last == path
            && source.as_ref().is_none_or(|source| source.is_unchanged())
        {
            return source.clone();
        }
        let found =
            self.walk.inode(fs, path).ok().and_then(|id| SharingSource::of(fs, id).ok().flatten()).map(Arc::new);
        self.last = Some((path.to_vec(), found.clone()));
        found
    }

    /// Whether the source has this data.
    fn is_equal(&mut self, fs: &Fs, source: &SharingSource, offset: u64, data: &[u8]) -> bool {
        self.buf.resize(data.len(), 0);
        let read = fs.read_keeping_atime(&source.inode, offset, &mut self.buf);
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
        match fs.clone_range(source.inode.id, *start, *target, *start, len) {
            Ok(()) => self.len_bytes = self.len_bytes.saturating_add(len),
            Err(cause) => {
                tracing::debug!("'{}' is copied, because sharing failed: {cause}", equal.path.escape_ascii());
                self.copy(fs, equal)?;
            }
        }
        match source.is_unchanged() {
            true => Ok(()),
            false => {
                Err(Error::Busy("the file in the sent subvolume is being written; receive without --clone").into())
            }
        }
    }

    fn copy(&mut self, fs: &Fs, equal: &Equal) -> Result<()> {
        let Range { start: mut at, end } = equal.range;
        while at < end {
            self.buf.resize(usize::try_from(end.saturating_sub(at)).unwrap_or(COPY_BYTES).min(COPY_BYTES), 0);
            let len = fs.read_keeping_atime(&equal.source.inode, at, &mut self.buf)?;
            if len == 0 {
                return Err(Error::InvalidArgument("the source became shorter").into());
            }
            fs.write_all(equal.target, at, self.buf.get(..len).unwrap_or_default())?;
            at = at.saturating_add(len as u64);
        }
        Ok(())
    }
}

impl SharingSource {
    /// The facts about a file. Returns `None` if its data cannot be shared.
    fn of(fs: &Fs, id: InodeId) -> Result<Option<Self>, Error> {
        let inode = fs.inode(id)?;
        let (is_file, sequence, size, nodatasum) = {
            let state = inode.read()?;
            (state.is_regular(), state.item.sequence, state.item.size, state.item.flags() & InodeFlags::NODATASUM)
        };
        let is_small = size < u64::from(fs.geometry.sectorsize);
        if !is_file || is_small && fs.extents(id)?.iter().any(|extent| extent.kind == FileExtentKind::Inline) {
            return Ok(None);
        }
        Ok(Some(Self { inode, sequence, size, nodatasum }))
    }

    fn is_unchanged(&self) -> bool {
        self.inode.read().is_ok_and(|state| state.item.sequence == self.sequence)
    }

    /// Two files can share a range from `start` on: whole sectors, or up to the end of both files (C3). Returns the end of
    /// this range, at most `len` bytes after `start`; returns `start` if the files can share nothing.
    fn shared_end(&self, fs: &Fs, target: InodeId, start: u64, len: u64) -> Result<u64> {
        let target = fs.inode(target)?;
        let state = target.read()?;
        let sectorsize = u64::from(fs.geometry.sectorsize);
        let end = start.saturating_add(len);
        if self.nodatasum != state.item.flags() & InodeFlags::NODATASUM
            || !start.is_multiple_of(sectorsize)
            || end > self.size
        {
            return Ok(start);
        }
        let sectors_end = end.saturating_sub(end.checked_rem(sectorsize).unwrap_or(0));
        Ok(if end == self.size && end >= state.item.size { end } else { sectors_end.max(start) })
    }
}

/// Bytes that are copied in one step.
const COPY_BYTES: usize = 1 << 20;
