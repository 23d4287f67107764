//! Extents of files: joining small ones, and sharing them between files.

use std::path::Path;
use std::sync::Arc;

use ubtrfs_fs::{Defragment, Job};

use crate::Filesystem;
use crate::error::{Result, ResultExt};
use crate::file::File;

impl Filesystem {
    /// Joins the small extents of a file, and compresses it if `how` says so. Returns the bytes that were rewritten. `job`
    /// counts bytes of the file.
    ///
    /// ```
    /// use ubtrfs::format::Compression;
    /// use ubtrfs::manage::Defragment;
    /// use ubtrfs::{CompressSpec, Filesystem, Job};
    ///
    /// # fn main() -> ubtrfs::Result<()> {
    /// let fs = Filesystem::make_in_memory(256 << 20)?;
    /// fs.write("/f", vec![1; 1 << 20])?;
    /// let compress = Some(CompressSpec::new(Compression::Zstd));
    /// let rewritten = fs.defragment("/f", &Defragment { compress, ..Defragment::default() }, &Job::new())?;
    /// assert_eq!(rewritten, 1 << 20);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` if the path is no regular file; `StorageFull`; ECANCELED. The content is intact after every error.
    pub fn defragment(&self, path: impl AsRef<Path>, how: &Defragment, job: &Job) -> Result<u64> {
        let path = path.as_ref();
        let file = self.open(path)?;
        self.engine().defragment(file.id(), how, job).while_doing("defragment", path)
    }
}

impl File {
    /// Makes a range of this file share the extents of a range of another file, instead of copying its data. Both ranges
    /// begin at multiples of the sector size. `len_bytes` is such a multiple too, or ends at the end of `source`; 0 means up
    /// to its end.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// fs.write("/a", vec![1; 1 << 20])?;
    /// let (a, b) = (fs.open("/a")?, fs.create("/b")?);
    /// b.clone_range(4096, &a, 0, 8192)?;
    /// assert_eq!(b.metadata()?.len(), 12_288);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` for ranges that are not aligned, or overlap in one file; `StorageFull`.
    pub fn clone_range(&self, offset: u64, source: &File, source_offset: u64, len_bytes: u64) -> Result<()> {
        self.refuse_other_filesystem("clone into", source)?;
        let cloned = self.filesystem().engine().clone_range(source.id(), source_offset, self.id(), offset, len_bytes);
        cloned.while_doing("clone into", self.name())
    }

    /// Compares a range of this file with one of another file, and makes them share extents if they are equal. Returns
    /// whether they are. `job` counts bytes of the range. Ranges are as in [`clone_range`](Self::clone_range).
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// fs.write("/a", vec![1; 1 << 20])?;
    /// fs.write("/b", vec![1; 1 << 20])?;
    /// let (a, b) = (fs.open("/a")?, fs.open("/b")?);
    /// assert!(b.dedupe_range(0, &a, 0, 1 << 20, &ubtrfs::Job::new())?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`clone_range`](Self::clone_range); ECANCELED.
    pub fn dedupe_range(
        &self,
        offset: u64,
        source: &File,
        source_offset: u64,
        len_bytes: u64,
        job: &Job,
    ) -> Result<bool> {
        self.refuse_other_filesystem("deduplicate", source)?;
        let engine = self.filesystem().engine();
        let done = engine.dedupe_range(source.id(), source_offset, self.id(), offset, len_bytes, job);
        done.while_doing("deduplicate", self.name())
    }

    /// Data is shared inside of a filesystem only: an inode number means another file in another one.
    fn refuse_other_filesystem(&self, operation: &'static str, source: &Self) -> Result<()> {
        match Arc::ptr_eq(self.filesystem().engine(), source.filesystem().engine()) {
            true => Ok(()),
            false => Err(ubtrfs_fs::Error::CrossDevice).while_doing(operation, self.name()),
        }
    }
}
