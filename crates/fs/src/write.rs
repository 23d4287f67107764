//! Writing files.

use crate::{Error, Fs, InodeId, Result};

impl Fs {
    /// Writes `data` at `offset`; returns how many bytes were taken.
    pub fn write(&self, _id: InodeId, _offset: u64, _data: &[u8]) -> Result<usize> {
        Err(Error::NotSupported("write"))
    }

    /// Makes the file durable; with `datasync` its times may be left out.
    pub fn fsync(&self, _id: InodeId, _datasync: bool) -> Result<()> {
        Err(Error::NotSupported("fsync"))
    }
}
