//! Sharing extents between files.

use crate::{Error, Fs, InodeId, Result};

impl Fs {
    /// Copies `len` bytes, by reference where both offsets are aligned; returns how many were copied.
    pub fn copy_range(&self, _src: InodeId, _src_off: u64, _dst: InodeId, _dst_off: u64, _len: u64) -> Result<u64> {
        Err(Error::NotSupported("copy_range"))
    }

    /// Shares `len` bytes (0: up to the end) of one file with another, as FICLONERANGE does.
    pub fn clone_range(&self, _src: InodeId, _src_off: u64, _dst: InodeId, _dst_off: u64, _len: u64) -> Result<()> {
        Err(Error::NotSupported("clone_range"))
    }
}
