//! Writing data that is compressed already: receive stores the compressed extents of a send stream without compressing
//! them again.
//!
//! - I1. The compressed bytes are untrusted, so they are stored only after they were decompressed without an error.
//! - I2. Data that cannot be stored as one compressed extent of whole sectors is decompressed and written like other
//!   data.

use std::sync::Arc;

use ubtrfs_format::Logical;
use ubtrfs_format::item::{Compression, FileExtent, FileExtentBody, InodeFlags, Timespec};
use ubtrfs_transaction::{DataExtent, DataReservation};

use crate::compression::{self, MAX_UNCOMPRESSED};
use crate::file::read::check_regular;
use crate::file::truncate::lock;
use crate::file::write::check_may_write;
use crate::inode::state::Inode;
use crate::items::file_extent::{ExtentPlan, whole_extent};
use crate::session::context::MetadataPurpose;
use crate::types::MAX_SIZE;
use crate::{Error, Fs, InodeId, Result};

/// Compressed data of a range of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Encoded<'d> {
    /// The compression algorithm.
    pub(crate) kind: Compression,
    /// For LZO, the sector size of the filesystem that the data comes from.
    pub(crate) sectorsize: u32,
    /// The compressed bytes.
    pub(crate) bytes: &'d [u8],
    /// Length of the decompressed bytes, at most 128 KiB.
    pub(crate) ram_bytes: u64,
    /// Offset in the decompressed bytes at which the file's range begins.
    pub(crate) skip: u64,
    /// Length of the file's range in bytes.
    pub(crate) len: u64,
}

impl Encoded<'_> {
    /// The part of the decompressed bytes that belongs to the file's range.
    pub(crate) fn range<'a>(&self, plain: &'a [u8]) -> &'a [u8] {
        let (start, len) = (self.skip as usize, self.len as usize);
        plain.get(start..start.saturating_add(len)).unwrap_or_default()
    }

    /// Decompresses the whole extent, not only the file's range (I1).
    pub(crate) fn decompress(&self) -> Result<Vec<u8>> {
        let len = usize::try_from(self.ram_bytes).unwrap_or(usize::MAX);
        let is_inside = self.skip.checked_add(self.len).is_some_and(|end| end <= self.ram_bytes);
        if len > MAX_UNCOMPRESSED || self.bytes.len() > MAX_UNCOMPRESSED || !is_inside {
            return Err(Error::InvalidArgument("the lengths of the encoded data contradict each other or the format"));
        }
        let mut out = vec![0; len];
        compression::decompress(self.kind, self.bytes, &mut out, self.sectorsize as usize)
            .map_err(|_| Error::InvalidArgument("the encoded data cannot be decompressed"))?;
        Ok(out)
    }
}

impl Fs {
    /// Writes compressed data at `offset`. `plain` is the decompressed data. Stores the data compressed, unless
    /// `always_decompress` is set, the compression saves no space, or the file's flags, the algorithm, the alignment or
    /// the free space do not allow compressed storage (I2). Returns whether the data was stored compressed.
    #[allow(clippy::arithmetic_side_effects, reason = "`decompress` has checked the lengths")]
    pub(crate) fn write_encoded(
        &self,
        id: InodeId,
        offset: u64,
        encoded: &Encoded<'_>,
        plain: &[u8],
        always_decompress: bool,
    ) -> Result<bool> {
        if encoded.len == 0 {
            return Ok(false);
        }
        let end = offset.checked_add(encoded.len).filter(|end| *end <= MAX_SIZE).ok_or(Error::FileTooBig)?;
        if !always_decompress && self.can_store(id, offset..end, encoded)? {
            match self.store_encoded(id, offset, end, encoded) {
                // No free range is large enough for the whole extent. So the data is written uncompressed, because
                // uncompressed data can be split over several ranges.
                Err(Error::Engine(ubtrfs_error::Error::NoSpace)) => {}
                done => return done.map(|()| true),
            }
        }
        self.write_all(id, offset, encoded.range(plain))?;
        Ok(false)
    }

    fn can_store(&self, id: InodeId, range: std::ops::Range<u64>, encoded: &Encoded<'_>) -> Result<bool> {
        let sectorsize = u64::from(self.geometry.sectorsize);
        let inode = self.inode(id)?;
        let state = inode.read()?;
        check_regular(&state)?;
        let has_method = match encoded.kind {
            Compression::None => false,
            Compression::Lzo => encoded.sectorsize == self.geometry.sectorsize,
            Compression::Zlib | Compression::Zstd => true,
        };
        let is_aligned = [range.start, encoded.skip, encoded.ram_bytes].iter().all(|at| at.is_multiple_of(sectorsize))
            && (range.end.is_multiple_of(sectorsize) || range.end >= state.item.size);
        let disk_len = (encoded.bytes.len() as u64).next_multiple_of(sectorsize);
        let saves_space = disk_len < encoded.ram_bytes && encoded.ram_bytes > sectorsize;
        let plain_only = InodeFlags::NODATACOW | InodeFlags::NODATASUM;
        let is_allowed = !state.item.flags().intersects(plain_only);
        Ok(has_method && is_aligned && saves_space && is_allowed)
    }

    #[allow(clippy::arithmetic_side_effects, reason = "the space allocator checked the end of the extent")]
    fn store_encoded(&self, id: InodeId, offset: u64, end: u64, encoded: &Encoded<'_>) -> Result<()> {
        let sectorsize = u64::from(self.geometry.sectorsize);
        let inode = self.inode_to_change(id)?;
        check_may_write(&*inode.read()?, offset)?;
        self.drop_stale_tail(&inode)?;
        self.throttle(&inode)?;
        drop(self.context.reserve(MetadataPurpose::Change(8))?);
        let mut bytes = encoded.bytes.to_vec();
        bytes.resize(bytes.len().next_multiple_of(sectorsize as usize), 0);
        let disk_len = bytes.len() as u64;
        let mut space = self.engine.reserve_data_for(id.root, disk_len)?;
        let mut edge = Some(self.engine.reserve_data(2 * sectorsize)?);
        let extent = self.engine.allocate_data(&mut space, disk_len, disk_len, *self.data.hint.lock())?;
        *self.data.hint.lock() = Some(Logical(extent.bytenr.0 + extent.len_bytes));
        let put =
            self.engine.write_data(extent.bytenr, &bytes).map_err(Error::from).and_then(|()| {
                self.put_encoded(&inode, (offset, end), encoded, (extent, &bytes), (&mut space, &mut edge))
            });
        put.inspect_err(|_| self.engine.release_data(extent))
    }

    /// Puts the items of an extent whose data is on disk.
    #[allow(clippy::arithmetic_side_effects, reason = "a count of items, and a range that is in order")]
    fn put_encoded(
        &self,
        inode: &Arc<Inode>,
        (offset, end): (u64, u64),
        encoded: &Encoded<'_>,
        (extent, bytes): (DataExtent, &[u8]),
        (space, edge): (&mut DataReservation, &mut Option<DataReservation>),
    ) -> Result<()> {
        let (tree, ino) = (&inode.home.tree, inode.id.ino);
        let sectorsize = self.geometry.sectorsize;
        let range = offset..end.next_multiple_of(sectorsize.into());
        let mut csums = Vec::new();
        self.geometry.csum_type.compute_sectors(bytes, sectorsize as usize, &mut csums);
        let (_locks, mut state) = lock(inode)?;
        let state = &mut *state;
        check_regular(state)?;
        if !end.is_multiple_of(sectorsize.into()) && end < state.item.size {
            return Err(Error::Busy("the file is being written"));
        }
        self.prepare_end(inode, state, offset, edge)?;
        let mut plan = ExtentPlan::default();
        plan.drop_range(tree, ino, range.clone(), sectorsize)?;
        plan.insert(offset, item(extent, encoded, range.end - range.start));
        let reservation = self.engine.reserve(plan.len() + 8)?;
        // Of the following steps, only the planning of explicit holes can fail. The planning comes before any change of
        // the file's items.
        self.plan_size(inode, state, end, &mut plan)?;
        self.drop_pending(state, range);
        let time = Timespec::now();
        (state.item.mtime, state.item.ctime) = (time, time);
        state.count_change();
        state.item.nbytes = plan.nbytes(state.item.nbytes);
        let op = self.engine.begin(reservation);
        plan.apply(&op, tree, ino);
        op.add_csums(extent.bytenr, csums);
        inode.put_item(&op, state);
        space.take_quota(extent.len_bytes).spend();
        Ok(())
    }
}

fn item(extent: DataExtent, encoded: &Encoded<'_>, len: u64) -> FileExtent {
    let mut item = whole_extent(extent.bytenr, extent.len_bytes);
    (item.compression, item.ram_bytes) = (encoded.kind, encoded.ram_bytes);
    if let FileExtentBody::Regular(regular) = &mut item.body {
        (regular.offset, regular.num_bytes) = (encoded.skip, len);
    }
    item
}
