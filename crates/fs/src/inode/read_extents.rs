//! Reading the data of a file's extent items, without pending data: from the device, verified and decompressed.
//!
//! Invariants:
//! - I1: every byte of the buffer is written: holes and preallocated extents as zeros.

#![allow(
    clippy::arithmetic_side_effects,
    reason = "`decode` checks the numbers of extents (I3 of `items::file_extent`); all parts lie inside the buffer"
)]

use std::ops::Range;
use std::sync::Arc;

use ubtrfs_error::Error as EngineError;
use ubtrfs_format::item::{Compression, FileExtentBody, InodeFlags, RegularExtent};
use ubtrfs_format::{Corrupt, Logical};
use ubtrfs_transaction::race_point;

use crate::compression;
use crate::inode::file_data::Decompressed;
use crate::inode::state::{Inode, InodeState};
use crate::items::file_extent::{ExtentAt, extents_in};
use crate::{Fs, Result};

impl Fs {
    /// Fills `buf` from the extent items, without pending data. The caller locks the state, so no extent is freed and
    /// reused during the call.
    pub(crate) fn read_extents(&self, inode: &Inode, state: &InodeState, offset: u64, buf: &mut [u8]) -> Result<()> {
        let end = offset + buf.len() as u64;
        let mut from = offset;
        while from < end {
            let extents = extents_in(&inode.home.tree, inode.id.ino, from..end, STEP, self.geometry.sectorsize)?;
            let is_last = extents.len() < STEP;
            race_point();
            for extent in &extents {
                let part = extent.start.max(from)..extent.end.min(end);
                buf[(from - offset) as usize..(part.start - offset) as usize].fill(0);
                let out = &mut buf[(part.start - offset) as usize..(part.end - offset) as usize];
                self.read_extent(inode, state, extent, part.clone(), out)?;
                from = part.end;
            }
            if is_last {
                break;
            }
        }
        buf[(from - offset) as usize..].fill(0);
        Ok(())
    }

    /// Fills `out` with the data of the file's range `part`, which lies in the range of the extent item `at`.
    fn read_extent(
        &self,
        inode: &Inode,
        state: &InodeState,
        at: &ExtentAt,
        part: Range<u64>,
        out: &mut [u8],
    ) -> Result<()> {
        let in_item = (part.start - at.start) as usize;
        match &at.extent.body {
            FileExtentBody::Prealloc(_) => out.fill(0),
            FileExtentBody::Regular(regular) if regular.disk_bytenr.0 == 0 => out.fill(0),
            FileExtentBody::Inline(_) => self.read_inline(inode, at, in_item, out)?,
            FileExtentBody::Regular(regular) => {
                let verify = !state.has_flags(InodeFlags::NODATASUM);
                match at.extent.compression {
                    Compression::None => {
                        let start = regular.disk_bytenr.advance(regular.offset).advance(in_item as u64);
                        self.read_sectors(start.0, out, verify)?;
                    }
                    kind => {
                        let from = regular.offset as usize + in_item;
                        let ram_bytes = at.extent.ram_bytes as usize;
                        self.read_compressed(inode, state, regular, kind, ram_bytes, from, out, verify)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Fills `out` with the bytes of an inline extent from `from` on.
    fn read_inline(&self, inode: &Inode, at: &ExtentAt, from: usize, out: &mut [u8]) -> Result<()> {
        let FileExtentBody::Inline(data) = &at.extent.body else { return Ok(()) };
        let ram_bytes = at.extent.ram_bytes as usize;
        let decompressed;
        let bytes = match at.extent.compression {
            Compression::None => &data[..data.len().min(ram_bytes)],
            kind => {
                let mut bytes = vec![0; ram_bytes];
                compression::decompress(kind, data, &mut bytes, self.geometry.sectorsize as usize)
                    .map_err(|cause| Corrupt::new(cause).in_tree(inode.id.root))?;
                decompressed = bytes;
                &decompressed
            }
        };
        let bytes = bytes.get(from..).unwrap_or_default();
        let len = bytes.len().min(out.len());
        out[..len].copy_from_slice(&bytes[..len]);
        out[len..].fill(0);
        Ok(())
    }

    /// Reads bytes at any address, although the engine reads only whole sectors.
    fn read_sectors(&self, start: u64, out: &mut [u8], verify: bool) -> Result<()> {
        let sectorsize = u64::from(self.geometry.sectorsize);
        let end = start + out.len() as u64;
        let wide = start - start % sectorsize..end.next_multiple_of(sectorsize);
        if wide == (start..end) {
            return Ok(self.engine.read_data(Logical(start), out, verify)?);
        }
        // Whole sectors are read directly into `out`, and partial sectors through a buffer. If the range is short, all
        // of it is read through a buffer.
        let inner = start.next_multiple_of(sectorsize)..end - end % sectorsize;
        if wide.end - wide.start <= BOUNCE_MAX || inner.is_empty() {
            let mut bounce = vec![0; (wide.end - wide.start) as usize];
            self.engine.read_data(Logical(wide.start), &mut bounce, verify)?;
            let from = (start - wide.start) as usize;
            out.copy_from_slice(&bounce[from..from + out.len()]);
            return Ok(());
        }
        let mut bounce = vec![0; sectorsize as usize];
        let (head, rest) = out.split_at_mut((inner.start - start) as usize);
        let (middle, tail) = rest.split_at_mut((inner.end - inner.start) as usize);
        if !head.is_empty() {
            self.engine.read_data(Logical(wide.start), &mut bounce, verify)?;
            head.copy_from_slice(&bounce[bounce.len() - head.len()..]);
        }
        self.engine.read_data(Logical(inner.start), middle, verify)?;
        if !tail.is_empty() {
            self.engine.read_data(Logical(inner.end), &mut bounce, verify)?;
            tail.copy_from_slice(&bounce[..tail.len()]);
        }
        Ok(())
    }

    /// Fills `out` with a compressed extent's data from byte `from` on.
    #[expect(clippy::too_many_arguments, reason = "the parts of one file extent item")]
    fn read_compressed(
        &self,
        inode: &Inode,
        state: &InodeState,
        extent: &RegularExtent,
        kind: Compression,
        ram_bytes: usize,
        from: usize,
        out: &mut [u8],
        verify: bool,
    ) -> Result<()> {
        let bytenr = extent.disk_bytenr;
        let copy = |bytes: &[u8], out: &mut [u8]| {
            let bytes = bytes.get(from..).unwrap_or_default();
            let len = bytes.len().min(out.len());
            out[..len].copy_from_slice(&bytes[..len]);
            out[len..].fill(0);
        };
        if let Some(last) = state.data.decompressed(bytenr) {
            copy(&last.bytes, out);
            return Ok(());
        }
        let mut packed = vec![0; extent.disk_num_bytes as usize];
        self.engine.read_data(bytenr, &mut packed, verify)?;
        let unpack = |bytes: &mut [u8]| {
            compression::decompress(kind, &packed, bytes, self.geometry.sectorsize as usize)
                .map_err(|cause| EngineError::from(Corrupt::new(cause).in_tree(inode.id.root).at(bytenr)))
        };
        if from == 0 && out.len() == ram_bytes {
            return Ok(unpack(out)?);
        }
        let mut bytes = vec![0; ram_bytes];
        unpack(&mut bytes)?;
        copy(&bytes, out);
        state.data.remember_decompressed(Decompressed { bytenr, bytes: Arc::new(bytes) });
        Ok(())
    }
}

/// Number of extent items in one lookup.
const STEP: usize = 64;
/// An unaligned read of at most this many bytes goes through a buffer as a whole.
const BOUNCE_MAX: u64 = 128 << 10;
