//! Small checked readers of numbers in an item's bytes.

/// The little-endian 64-bit number at `at`, if the item is long enough.
pub(crate) fn u64_at(data: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(data.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

/// The little-endian 16-bit number at `at`, if the item is long enough.
pub(crate) fn u16_at(data: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(data.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

/// The byte at `at`, if the item is long enough.
pub(crate) fn u8_at(data: &[u8], at: usize) -> Option<u8> {
    data.get(at).copied()
}
