//! Dirty and in-flight data of a regular file.

/// Dirty and in-flight data of a regular file.
#[derive(Debug, Default)]
pub(crate) struct FileData {}

impl FileData {
    /// Bytes written that have no extent yet (they count for `st_blocks`).
    pub(crate) fn delalloc_bytes(&self) -> u64 {
        0
    }
}
