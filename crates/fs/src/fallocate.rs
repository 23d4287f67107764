//! fallocate.

use crate::{Error, FallocateMode, Fs, InodeId, Result};

impl Fs {
    /// Allocates, punches or zeroes `len` bytes at `offset`.
    pub fn fallocate(&self, _id: InodeId, _offset: u64, _len: u64, _mode: FallocateMode) -> Result<()> {
        Err(Error::NotSupported("fallocate"))
    }
}
