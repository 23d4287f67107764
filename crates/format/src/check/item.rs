//! A leaf item under check: its key and bytes, the preceding item, and small functions that read a field and name the
//! item in errors.

use super::{CheckContext, bad};
use crate::error::FormatError;
use crate::ids::{Generation, RootId};
use crate::key::{Key, KeyType};

/// A leaf item under check.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedItem<'a> {
    pub(super) ctx: &'a CheckContext,
    /// Owner of the leaf, from its header.
    pub(super) owner: RootId,
    pub(super) key: Key,
    pub(super) data: &'a [u8],
    /// The item in the preceding slot.
    pub(super) prev: Option<(Key, &'a [u8])>,
}

pub(super) type Check = Result<(), FormatError>;

impl<'a> CheckedItem<'a> {
    /// The `N` bytes at offset `at`.
    fn array<const N: usize>(&self, what: &'static str, at: usize) -> Result<[u8; N], FormatError> {
        array_at(what, self.data, at)
    }

    pub(super) fn u8(&self, what: &'static str, at: usize) -> Result<u8, FormatError> {
        self.array(what, at).map(u8::from_le_bytes)
    }

    pub(super) fn u16(&self, what: &'static str, at: usize) -> Result<u16, FormatError> {
        self.array(what, at).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&self, what: &'static str, at: usize) -> Result<u32, FormatError> {
        self.array(what, at).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&self, what: &'static str, at: usize) -> Result<u64, FormatError> {
        self.array(what, at).map(u64::from_le_bytes)
    }

    pub(super) fn key_at(&self, what: &'static str, at: usize) -> Result<Key, FormatError> {
        self.array(what, at).map(|raw| Key::decode(&raw))
    }

    /// The `len_bytes` bytes at offset `at`.
    pub(super) fn bytes(&self, what: &'static str, at: usize, len_bytes: usize) -> Result<&'a [u8], FormatError> {
        let end = at.saturating_add(len_bytes);
        self.data.get(at..end).ok_or(FormatError::Short { what, need: end, have: self.data.len() })
    }

    /// Checks that the item has exactly this size.
    pub(super) fn exact_size(&self, what: &'static str, size: usize) -> Check {
        if self.data.len() == size {
            return Ok(());
        }
        self.min_size(what, size)?;
        Err(self.bad_size(what, "expected the size of the structure"))
    }

    /// Checks that the item has at least this size.
    pub(super) fn min_size(&self, what: &'static str, size: usize) -> Check {
        if self.data.len() >= size {
            return Ok(());
        }
        Err(FormatError::Short { what, need: size, have: self.data.len() })
    }

    /// Checks that the item consists of one or more entries of this size.
    pub(super) fn multiple_size(&self, what: &'static str, piece: usize) -> Check {
        if !self.data.is_empty() && self.data.len().is_multiple_of(piece) {
            return Ok(());
        }
        Err(self.bad_size(what, "expected a multiple of the size of its entries"))
    }

    pub(super) fn bad_size(&self, what: &'static str, expected: &'static str) -> FormatError {
        bad(what, "size", u64::try_from(self.data.len()).unwrap_or(u64::MAX), expected)
    }

    /// Checks that a value is a multiple of the sector size.
    pub(super) fn aligned(&self, what: &'static str, field: &'static str, value: u64) -> Check {
        aligned(self.ctx, what, field, value)
    }

    /// Checks that a generation is not later than the running transaction.
    pub(super) fn generation(&self, what: &'static str, field: &'static str, value: u64) -> Check {
        match self.ctx.generation_limit {
            Some(Generation(limit)) if value > limit => {
                Err(bad(what, field, value, "expected at most the generation of the running transaction"))
            }
            _ => Ok(()),
        }
    }

    /// The item in the preceding slot, if it has this type.
    pub(super) fn prev_of(&self, item_type: KeyType) -> Option<(Key, &'a [u8])> {
        self.prev.filter(|(key, _)| key.item_type == item_type)
    }
}

/// Checks that a value is a multiple of the sector size.
pub(super) fn aligned(ctx: &CheckContext, what: &'static str, field: &'static str, value: u64) -> Check {
    if value.is_multiple_of(u64::from(ctx.sectorsize)) {
        return Ok(());
    }
    Err(bad(what, field, value, "expected a multiple of the sector size"))
}

/// The `N` bytes at offset `at`.
pub(super) fn array_at<const N: usize>(what: &'static str, data: &[u8], at: usize) -> Result<[u8; N], FormatError> {
    let end = at.saturating_add(N);
    let bytes = data.get(at..end).and_then(|bytes| bytes.try_into().ok());
    bytes.ok_or(FormatError::Short { what, need: end, have: data.len() })
}
