//! Writeback of dirty data.

use ubtrfs_transaction::{Flusher, Geometry};

use crate::{Fs, MountOptions};

/// What the data path keeps for the whole filesystem ([`Fs`] holds it as `data`).
#[derive(Debug, Default)]
pub(crate) struct DataPath {}

impl DataPath {
    pub(crate) fn new(_options: &MountOptions, _geometry: &Geometry) -> Self {
        Self {}
    }
}

impl Flusher for Fs {
    fn flush_delalloc(&self, _target_bytes: Option<u64>) -> ubtrfs_format::Result<()> {
        Ok(())
    }
}
