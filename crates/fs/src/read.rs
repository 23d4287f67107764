//! Reading files.

use crate::{Error, Fs, InodeId, Result, SeekWhence};

impl Fs {
    /// Reads up to `len` bytes at `offset`; less only at the end of the file.
    pub fn read(&self, id: InodeId, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut buf = vec![0; len];
        let read = self.read_into(id, offset, &mut buf)?;
        buf.truncate(read);
        Ok(buf)
    }

    /// Fills `buf` from `offset` on; returns how many bytes there were.
    pub fn read_into(&self, _id: InodeId, _offset: u64, _buf: &mut [u8]) -> Result<usize> {
        Err(Error::NotSupported("read"))
    }

    /// The next data or hole at or after `offset`.
    pub fn seek(&self, _id: InodeId, _offset: u64, _whence: SeekWhence) -> Result<u64> {
        Err(Error::NotSupported("seek"))
    }
}
