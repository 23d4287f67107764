//! Writing files. Data goes into memory, with space reserved for it; writeback puts it on disk.

use std::ops::Range;
use std::sync::Arc;

use ubtrfs_error::Error as EngineError;
use ubtrfs_format::item::{InodeFlags, Timespec};
use ubtrfs_transaction::DataReservation;
use ubtrfs_transaction::lock_rank::{ReadGuard, WriteGuard};

use crate::file::read::check_regular;
use crate::file::truncate::{ChangeLocks, lock};
use crate::inode::buf_pool::{BUF_MAX, Buf};
use crate::inode::state::{Inode, InodeState};
use crate::items::file_extent::extents_in;
use crate::session::context::MetadataPurpose;
use crate::types::MAX_SIZE;
use crate::{Error, Fs, InodeId, Result};

impl Fs {
    /// Writes `data` at `offset`. Returns the number of bytes written, which is 0 only if `data` is empty. Writes less
    /// than `data` if there is no space or quota for all of it, if the file reaches its maximum size, or if an error
    /// occurs after a part was written.
    pub fn write(&self, id: InodeId, offset: u64, data: &[u8]) -> Result<usize> {
        let inode = self.inode_to_change(id)?;
        check_may_write(&*inode.read()?, offset)?;
        self.write_to(&inode, offset, data, false)
    }

    /// Writes all of `data` at `offset`. After an error, a part of the data may be written.
    pub fn write_all(&self, id: InodeId, mut offset: u64, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            let len = self.write(id, offset, data)?;
            (offset, data) = (offset.saturating_add(len as u64), data.get(len..).unwrap_or_default());
        }
        Ok(())
    }

    /// Writes as [`Fs::write`] does, through a file that is open for writing ([`Fs::check_writable`]). The write
    /// succeeds even if a flag was set or the subvolume became read-only after the open, because a program or the
    /// kernel's page cache holds the data already. With `keeps_times` the file's times do not change.
    pub fn write_opened(&self, id: InodeId, offset: u64, data: &[u8], keeps_times: bool) -> Result<usize> {
        let inode = self.inode_of_open_file(id)?;
        self.write_to(&inode, offset, data, keeps_times)
    }

    #[allow(clippy::arithmetic_side_effects, reason = "the write ends at most at `MAX_SIZE`, rounded up to a sector")]
    fn write_to(&self, inode: &Arc<Inode>, offset: u64, data: &[u8], keeps_times: bool) -> Result<usize> {
        if data.is_empty() {
            return Ok(0);
        }
        let rest = MAX_SIZE.saturating_sub(offset);
        if rest == 0 {
            return Err(Error::FileTooBig);
        }
        self.drop_stale_tail(inode)?;
        let data = &data[..data.len().min(usize::try_from(rest).unwrap_or(usize::MAX))];
        let mut done = 0;
        // Write in pieces, so that a large write stays within the memory limit.
        for piece in data.chunks(PIECE) {
            let at = offset + done as u64;
            match self.throttle(inode).and_then(|()| self.write_piece(inode, at, WritePiece::Bytes(piece), keeps_times))
            {
                Ok(len) => {
                    done += len;
                    if len < piece.len() {
                        break;
                    }
                }
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Writes `len` bytes at `offset`. `fill` puts the bytes directly into the memory for dirty data. `fill` is called
    /// for each piece of at most 1 MiB, in order and without locks, with the piece's offset in the file. After an error
    /// the earlier pieces remain written.
    #[allow(clippy::arithmetic_side_effects, reason = "the write ends at most at `MAX_SIZE`, rounded up to a sector")]
    pub fn write_with<E: From<Error>>(
        &self,
        id: InodeId,
        offset: u64,
        len: u64,
        mut fill: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let inode = self.inode_to_change(id)?;
        check_may_write(&*inode.read()?, offset)?;
        let end = offset.checked_add(len).filter(|end| *end <= MAX_SIZE).ok_or(Error::FileTooBig)?;
        self.drop_stale_tail(&inode)?;
        let mut at = offset;
        while at < end {
            let len = (end - at).min(PIECE as u64 - at % PIECE as u64);
            self.throttle(&inode)?;
            let buf = self.data.pool.filled(len as usize, self.geometry.sectorsize, |bytes| fill(at, bytes))?;
            self.write_piece(&inode, at, WritePiece::Filled(buf), false)?;
            at += len;
        }
        Ok(())
    }

    /// Writes a piece, and returns the number of bytes written. If there is no space or quota for the whole piece,
    /// writes only the first part of a [`WritePiece::Bytes`], and fails for a [`WritePiece::Filled`].
    #[allow(clippy::arithmetic_side_effects, reason = "the write ends at most at `MAX_SIZE`, rounded up to a sector")]
    fn write_piece(
        &self,
        inode: &Arc<Inode>,
        offset: u64,
        mut piece: WritePiece<'_>,
        keeps_times: bool,
    ) -> Result<usize> {
        let mut end = offset + piece.len_bytes();
        let sectorsize = u64::from(self.geometry.sectorsize);
        let wide = offset - offset % sectorsize..end.next_multiple_of(sectorsize);
        // Check that there is space for the items that writeback will put. The reservation is dropped at once, because
        // writeback makes its own.
        drop(self.context.reserve(MetadataPurpose::Change(4))?);
        // Reserve one sector more than the data needs: an inline extent may have to become a regular one.
        let (root, wanted) = (inode.id.root, wide.end - wide.start + sectorsize);
        let mut reservation = self.engine.try_reserve_data_for(root, wanted)?;
        let mut allocated = match reservation {
            Some(_) => None,
            None => self.lock_allocated(inode, std::slice::from_ref(&wide))?,
        };
        if reservation.is_none() && allocated.is_none() {
            match self.engine.reserve_data_for(root, wanted) {
                Ok(space) => reservation = Some(space),
                Err(error) if !is_shortage(&error) => return Err(error.into()),
                Err(error) => {
                    allocated = self.lock_allocated(inode, std::slice::from_ref(&wide))?;
                    match (&allocated, &mut piece) {
                        (Some(_), _) => {}
                        (None, WritePiece::Bytes(data)) => {
                            let left = self.engine.reserve_data_left_for(root, wanted)?;
                            let Some((space, bytes)) = left else { return Err(error.into()) };
                            end = wide.start + (bytes - sectorsize);
                            *data = &data[..(end - offset) as usize];
                            reservation = Some(space);
                        }
                        (None, WritePiece::Filled(_)) => return Err(error.into()),
                    }
                }
            }
        }
        let written = piece.len_bytes() as usize;
        let (_guards, mut state) = match allocated {
            Some(Allocated { guards, state, space }) => {
                reservation = space;
                (Some(guards), state)
            }
            None => (None, inode.write()?),
        };
        let state = &mut *state;
        check_regular(state)?;
        self.prepare_end(inode, state, offset, &mut reservation)?;
        match piece {
            WritePiece::Bytes(data) => self.write_dirty(inode, state, offset, data, &mut reservation)?,
            WritePiece::Filled(buf) => self.adopt_dirty(inode, state, offset, buf, &mut reservation)?,
        }
        state.item.size = state.item.size.max(end);
        if !keeps_times {
            let time = Timespec::now();
            state.item.mtime = time;
            state.item.ctime = time;
        }
        state.count_change();
        Ok(written)
    }

    /// Makes `data` at `offset` dirty, and fills up the partial sectors at its ends with the file's content. Moves the
    /// reservation for the dirty bytes from `space` to the inode.
    #[allow(clippy::arithmetic_side_effects, reason = "the write ends at most at `MAX_SIZE`, rounded up to a sector")]
    pub(crate) fn write_dirty(
        &self,
        inode: &Arc<Inode>,
        state: &mut InodeState,
        offset: u64,
        data: &[u8],
        space: &mut Option<DataReservation>,
    ) -> Result<()> {
        let sectorsize = self.geometry.sectorsize as usize;
        let end = offset + data.len() as u64;
        let size = state.item.size;
        state.data.set_sectorsize(self.geometry.sectorsize);
        let (first, last) = state.data.partial_sectors(offset..end);
        // The bytes past the end of the file are zeros, so they need no read.
        let reads_last = end < size;
        let mut before = Vec::new();
        let mut after = Vec::new();
        let read = |sector: u64, state: &InodeState| -> Result<Vec<u8>> {
            let mut bytes = vec![0; sectorsize];
            // Bytes past the end of the file are zeros, regardless of the content on disk.
            let len = size.saturating_sub(sector).min(sectorsize as u64) as usize;
            self.read_merged(inode, state, sector, &mut bytes[..len])?;
            Ok(bytes)
        };
        if let Some(sector) = first {
            before = read(sector, state)?;
        }
        if let Some(sector) = last {
            after = match first {
                Some(same) if same == sector => before.clone(),
                _ if reads_last => read(sector, state)?,
                _ => vec![0; sectorsize],
            };
            after.drain(..(end - sector) as usize);
        }
        before.truncate((offset % sectorsize as u64) as usize);
        let dirtied = state.data.write(&self.data.pool, offset, data, &before, &after);
        self.became_dirty(inode, state, dirtied, space);
        Ok(())
    }

    /// Makes the data of a buffer dirty without a copy, if the buffer begins at a sector, ends at a sector or not
    /// before the end of the file, and overlaps no dirty data. Otherwise copies the data with [`Self::write_dirty`].
    #[allow(clippy::arithmetic_side_effects, reason = "the write ends at most at `MAX_SIZE`, rounded up to a sector")]
    fn adopt_dirty(
        &self,
        inode: &Arc<Inode>,
        state: &mut InodeState,
        offset: u64,
        buf: Buf,
        space: &mut Option<DataReservation>,
    ) -> Result<()> {
        let end = offset + buf.len() as u64;
        if !end.is_multiple_of(self.geometry.sectorsize.into()) && end < state.item.size {
            return self.write_dirty(inode, state, offset, &buf, space);
        }
        state.data.set_sectorsize(self.geometry.sectorsize);
        match state.data.adopt(offset, buf) {
            Ok(dirtied) => {
                self.became_dirty(inode, state, dirtied, space);
                Ok(())
            }
            Err(buf) => self.write_dirty(inode, state, offset, &buf, space),
        }
    }

    /// Moves the reservation for new dirty bytes from `space` to the inode, and queues the inode for writeback.
    fn became_dirty(
        &self,
        inode: &Arc<Inode>,
        state: &mut InodeState,
        dirtied: u64,
        space: &mut Option<DataReservation>,
    ) {
        if let Some(space) = space {
            state.data.add_reservation(space, dirtied);
        }
        self.data.enqueue(inode, &mut state.data);
    }

    /// Zeroes the bytes between the end of the file and the end of its last sector if a write at (or an extension to)
    /// `offset` makes them visible. On disk the bytes past the end of the file may have any content, because Linux
    /// leaves old bytes there when it shortens a file.
    #[allow(clippy::arithmetic_side_effects, reason = "the write ends at most at `MAX_SIZE`, rounded up to a sector")]
    fn zero_old_end(
        &self,
        inode: &Arc<Inode>,
        state: &mut InodeState,
        offset: u64,
        space: &mut Option<DataReservation>,
    ) -> Result<()> {
        let sectorsize = u64::from(self.geometry.sectorsize);
        let size = state.item.size;
        let (sector, end) = (size - size % sectorsize, size.next_multiple_of(sectorsize));
        // Pending data is already zero past the end of the file.
        if size == end || offset < end || !state.data.pending_in(sector..end).is_empty() {
            return Ok(());
        }
        let extents = extents_in(&inode.home.tree, inode.id.ino, sector..end, 1, self.geometry.sectorsize)?;
        if !extents.first().is_some_and(|extent| extent.is_data() && !extent.is_inline()) {
            return Ok(());
        }
        let mut bytes = vec![0; self.geometry.sectorsize as usize];
        self.read_extents(inode, state, sector, &mut bytes)?;
        if bytes[(size - sector) as usize..].iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        self.write_dirty(inode, state, size, &[0], space)
    }

    /// Prepares the end of the file for a write at `offset`, or for an extension of the file to `offset`. Calls
    /// [`Self::zero_old_end`]. Also makes the content of the file's inline extent dirty if other data would follow it,
    /// because an inline extent must hold the whole file.
    pub(crate) fn prepare_end(
        &self,
        inode: &Arc<Inode>,
        state: &mut InodeState,
        offset: u64,
        space: &mut Option<DataReservation>,
    ) -> Result<()> {
        self.zero_old_end(inode, state, offset, space)?;
        let sectorsize = u64::from(self.geometry.sectorsize);
        let size = state.item.size;
        if offset < sectorsize || size == 0 || size > sectorsize || state.item.nbytes == 0 {
            return Ok(());
        }
        state.data.set_sectorsize(self.geometry.sectorsize);
        if state.data.is_dirty(0) {
            return Ok(());
        }
        let first = extents_in(&inode.home.tree, inode.id.ino, 0..sectorsize, 1, self.geometry.sectorsize)?;
        if !first.first().is_some_and(|extent| extent.is_inline()) {
            return Ok(());
        }
        let mut bytes = vec![0; size as usize];
        self.read_merged(inode, state, 0, &mut bytes)?;
        self.write_dirty(inode, state, 0, &bytes, space)
    }

    /// Locks the file for a write of `ranges` (sector-aligned) if the write needs no new data space, because all of the
    /// ranges are preallocated or can be overwritten in place. Returns `None` also if the limits of quota groups leave no
    /// room for the items into which preallocated extents are split.
    pub(crate) fn lock_allocated<'i>(
        &'i self,
        inode: &'i Inode,
        ranges: &[Range<u64>],
    ) -> Result<Option<Allocated<'i>>> {
        if !inode.read()?.has_flags(InodeFlags::PREALLOC | InodeFlags::NODATACOW) {
            return Ok(None);
        }
        let unreserved = self.data.unreserved.read();
        let (locks, state) = lock(inode)?;
        let overwrite = state.has_flags(InodeFlags::NODATACOW) && state.has_flags(InodeFlags::NODATASUM);
        let mut has_prealloc = false;
        for range in ranges {
            let mut at = range.start;
            let extents =
                extents_in(&inode.home.tree, inode.id.ino, range.clone(), usize::MAX, self.geometry.sectorsize)?;
            for extent in extents {
                let usable = extent.is_prealloc() || (overwrite && extent.is_data() && !extent.is_inline());
                let (true, true, Some(regular)) = (usable, extent.start <= at, extent.extent.disk_extent()) else {
                    break;
                };
                if self.engine.extent_is_shared(inode.id.root, inode.id.ino, extent.start, &regular)? {
                    break;
                }
                has_prealloc |= extent.is_prealloc();
                at = extent.end;
            }
            if at < range.end {
                return Ok(None);
            }
        }
        let mut space = None;
        if has_prealloc {
            let bytes = ranges.iter().map(|range| range.end.saturating_sub(range.start)).sum();
            let reserved = self.engine.try_reserve_preallocated_for(inode.id.root, bytes);
            let Some(reserved) = reserved else { return Ok(None) };
            space = Some(reserved);
        }
        Ok(Some(Allocated { guards: (locks, unreserved), state, space }))
    }
}

/// A file that is locked for a write into its own extents.
pub(crate) struct Allocated<'i> {
    /// Locks that keep the extents as they are. The second lock (`DataPath::unreserved`) is held until the data is
    /// dirty, so that no snapshot shares the extents before the data is written.
    pub(crate) guards: (ChangeLocks<'i>, ReadGuard<'i, ()>),
    pub(crate) state: WriteGuard<'i, InodeState>,
    /// Quota for the items, if an item will be split.
    pub(crate) space: Option<DataReservation>,
}

/// Whether there is no space or quota for a write.
pub(crate) fn is_shortage(error: &EngineError) -> bool {
    matches!(error, EngineError::NoSpace | EngineError::QuotaExceeded)
}

/// Fails if nobody may write the file: btrfs-convert marks the image of the old filesystem so.
pub(crate) fn check_not_read_only(state: &InodeState) -> Result<()> {
    match state.has_flags(InodeFlags::READONLY) {
        true => Err(Error::AccessDenied),
        false => Ok(()),
    }
}

/// Fails if the file's flags forbid a write at `offset`.
pub(crate) fn check_may_write(state: &InodeState, offset: u64) -> Result<()> {
    if state.has_flags(InodeFlags::IMMUTABLE) {
        return Err(Error::NotPermitted("the file is immutable"));
    }
    check_not_read_only(state)?;
    if state.has_flags(InodeFlags::APPEND) && offset < state.item.size {
        return Err(Error::NotPermitted("the file can only be appended to"));
    }
    Ok(())
}

/// Data written in one step, at most `PIECE` bytes.
enum WritePiece<'d> {
    Bytes(&'d [u8]),
    Filled(Buf),
}

impl WritePiece<'_> {
    fn len_bytes(&self) -> u64 {
        let bytes: &[u8] = match self {
            Self::Bytes(bytes) => bytes,
            Self::Filled(buf) => buf,
        };
        bytes.len() as u64
    }
}

/// Maximum number of bytes written in one step, and the size of a full buffer.
const PIECE: usize = BUF_MAX;
