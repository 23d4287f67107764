//! Deduplication: two files with equal content share their extents, also in read-only subvolumes.

use ubtrfs_transaction::Job;

use crate::file::read::check_regular;
use crate::file::reflink::{DEDUPE_PIECE, check_ranges, up_to_end};
use crate::{Error, Fs, InodeId, Result};

impl Fs {
    /// Compares two ranges and shares them as [`Fs::clone_range`] does, piece by piece, up to the first piece that
    /// differs. Returns whether the ranges have equal content. Both ranges must end inside their files. Times do not
    /// change. As on Linux, the target may be in a read-only subvolume, because its content stays. `job` counts the bytes
    /// of the range.
    #[allow(clippy::arithmetic_side_effects, reason = "both ranges end at most at `MAX_SIZE`")]
    pub fn dedupe_range(
        &self,
        src: InodeId,
        src_off: u64,
        dst: InodeId,
        dst_off: u64,
        len: u64,
        job: &Job,
    ) -> Result<bool> {
        let source = self.inode(src)?;
        let (target, in_read_only) = match self.inode_to_change(dst) {
            Err(Error::ReadOnlySubvolume) => (self.inode_of_open_file(dst)?, true),
            target => (target?, false),
        };
        check_regular(&*source.read()?)?;
        check_regular(&*target.read()?)?;
        let sectorsize = u64::from(self.geometry.sectorsize);
        // In two statements, because a guard lives to the end of its statement.
        let size = source.read()?.item.size;
        let dst_size = target.read()?.item.size;
        let len = if len == 0 { up_to_end(size, src_off)? } else { len };
        let (src_end, dst_end) = check_ranges((src, src_off), (dst, dst_off), len, sectorsize)?;
        if len == 0 {
            return Ok(true);
        }
        if src_end > size || dst_end > dst_size {
            return Err(Error::InvalidArgument("a file ends before the range does"));
        }
        if !len.is_multiple_of(sectorsize) && (src_end != size || dst_end != dst_size) {
            return Err(Error::InvalidArgument("the range's end is not a multiple of the sector size"));
        }
        job.add_total(len);
        let mut done = 0;
        while done < len {
            job.check()?;
            // A send reads a read-only subvolume's extents by address.
            let _moving = in_read_only.then(|| self.subvolumes.sends.begin_move(job)).transpose()?;
            let piece = (len - done).min(DEDUPE_PIECE);
            let (from, to) = (src_off + done, dst_off + done);
            if !self.dedupe_piece(&source, from, &target, to, piece)? {
                return Ok(false);
            }
            job.advance(piece);
            done += piece;
        }
        Ok(true)
    }
}
