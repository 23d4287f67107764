//! Reading files: pending data (dirty or under writeback) where there is some, otherwise the data of the file's extent
//! items.
//!
//! Invariants:
//! - I1: the inode's state is locked for reading while its extents are read, so no extent is freed and reused during
//!   the read.
//! - I2: every byte of the returned range is written to the caller's buffer (I1 of [`crate::inode::read_extents`]).

#![allow(
    clippy::arithmetic_side_effects,
    reason = "`decode` checks the numbers of extents (I3 of `items::file_extent`); all parts lie inside the buffer"
)]

use std::sync::Arc;

use crate::inode::state::{Inode, InodeState};
use crate::items::file_extent::extents_in;
use crate::{Error, Fs, InodeId, Result, SeekWhence};

impl Fs {
    /// Reads `len` bytes at `offset`; fewer only at the end of the file.
    pub fn read(&self, id: InodeId, offset: u64, len: usize) -> Result<Vec<u8>> {
        let size = self.inode(id)?.read()?.item.size;
        let len = len.min(usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX));
        let mut buf = vec![0; len];
        let read = self.read_into(id, offset, &mut buf)?;
        buf.truncate(read);
        Ok(buf)
    }

    /// Fills `buf` with the file's bytes from `offset` on. Returns the number of bytes read, which is less than the
    /// length of `buf` only at the end of the file.
    pub fn read_into(&self, id: InodeId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let inode = self.inode(id)?;
        let read = self.read_keeping_atime(&inode, offset, buf)?;
        if read > 0 {
            self.touch_atime(&inode);
        }
        Ok(read)
    }

    /// Reads as [`Fs::read_into`] does, but does not update the access time. Deduplication and cloning do not change
    /// the access time, and [`Fs::copy_range`] updates it itself.
    pub(crate) fn read_keeping_atime(&self, inode: &Arc<Inode>, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let state = inode.read()?;
        check_regular(&state)?;
        let rest = state.item.size.saturating_sub(offset);
        let len = buf.len().min(usize::try_from(rest).unwrap_or(usize::MAX));
        let buf = &mut buf[..len];
        let slots = self.readahead.advance(inode, &state, offset, len as u64);
        for gap in state.data.read(offset, buf) {
            let part = &mut buf[(gap.start - offset) as usize..(gap.end - offset) as usize];
            self.read_through_slots(inode, &state, gap.start, part, &slots)?;
        }
        Ok(len)
    }

    /// Finds the next data or hole at or after `offset`. Preallocated extents count as holes; the end of the file
    /// counts as a hole.
    pub fn seek(&self, id: InodeId, offset: u64, whence: SeekWhence) -> Result<u64> {
        let inode = self.inode(id)?;
        let state = inode.read()?;
        check_regular(&state)?;
        let size = state.item.size;
        if offset >= size {
            return Err(Error::NoSuchOffset);
        }
        let mut at = offset;
        while at < size {
            let (end, is_data) = self.kind_at(&inode, &state, at)?;
            if is_data == (whence == SeekWhence::Data) {
                return Ok(at);
            }
            at = end;
        }
        match whence {
            SeekWhence::Data => Err(Error::NoSuchOffset),
            SeekWhence::Hole => Ok(size),
        }
    }

    /// Returns an offset after `at`, and whether the bytes up to that offset are data (true) or a hole (false).
    fn kind_at(&self, inode: &Inode, state: &InodeState, at: u64) -> Result<(u64, bool)> {
        let size = state.item.size;
        let pending = state.data.pending_in(at..size).into_iter().next();
        let pending_start = match pending {
            Some(pending) if pending.start <= at => return Ok((pending.end, true)),
            Some(pending) => pending.start,
            None => size,
        };
        let sectorsize = self.geometry.sectorsize;
        let next = extents_in(&inode.home.tree, inode.id.ino, at..pending_start, 1, sectorsize)?.into_iter().next();
        Ok(match next {
            None => (pending_start, false),
            Some(extent) if extent.start > at => (extent.start.min(pending_start), false),
            Some(extent) => (extent.end.min(pending_start), extent.is_data()),
        })
    }

    /// Fills `buf` with the file's bytes from `offset` on, pending data included. Ignores the file's size.
    pub(crate) fn read_merged(&self, inode: &Inode, state: &InodeState, offset: u64, buf: &mut [u8]) -> Result<()> {
        if buf.is_empty() {
            return Ok(());
        }
        for gap in state.data.read(offset, buf) {
            let part = &mut buf[(gap.start - offset) as usize..(gap.end - offset) as usize];
            self.read_extents(inode, state, gap.start, part)?;
        }
        Ok(())
    }
}

/// Fails if the inode is not a regular file.
pub(crate) fn check_regular(state: &InodeState) -> Result<()> {
    if state.is_regular() {
        Ok(())
    } else if state.is_dir() {
        Err(Error::IsDirectory)
    } else {
        Err(Error::InvalidArgument("not a regular file"))
    }
}
