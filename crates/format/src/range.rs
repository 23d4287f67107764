//! [`LogicalRange`]: a range of logical addresses whose end was checked.
//!
//! Invariants:
//! - I1. `start + len_bytes` does not exceed `u64::MAX`, so the end is an address.

use std::fmt;

use crate::error::FormatError;
use crate::ids::Logical;

/// A range of logical addresses: a chunk, a block group, an extent. Making a range checks its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogicalRange {
    start: Logical,
    len_bytes: u64,
}

impl LogicalRange {
    /// Makes a range from disk values.
    ///
    /// # Errors
    ///
    /// [`FormatError::Value`] for `field` of `what`, with the value `len_bytes`, if the range ends past `u64::MAX`.
    pub fn new(what: &'static str, field: &'static str, start: Logical, len_bytes: u64) -> Result<Self, FormatError> {
        start.end(what, field, len_bytes)?;
        Ok(Self { start, len_bytes })
    }

    /// The first address.
    pub fn start(self) -> Logical {
        self.start
    }

    /// The length in bytes.
    pub fn len_bytes(self) -> u64 {
        self.len_bytes
    }

    /// The first address after the range.
    pub fn end(self) -> Logical {
        // I1
        Logical(self.start.0.saturating_add(self.len_bytes))
    }

    /// Whether an address is in the range.
    pub fn contains(self, at: Logical) -> bool {
        self.offset_of(at).is_some()
    }

    /// Bytes from the start to an address; `None` for an address outside the range.
    pub fn offset_of(self, at: Logical) -> Option<u64> {
        at.offset_from(self.start).filter(|&offset| offset < self.len_bytes)
    }

    /// Bytes from an address to the end; 0 for an address after the range.
    pub fn bytes_from(self, at: Logical) -> u64 {
        self.end().offset_from(at).unwrap_or(0)
    }
}

impl fmt::Display for LogicalRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_past_the_address_space_is_refused_by_the_name_of_its_field() {
        let range = |start, len| LogicalRange::new("chunk", "length", Logical(start), len);
        let error = range(u64::MAX - 9, 11).unwrap_err().to_string();
        assert!(error.contains("chunk: length is 0xb"), "{error}");
        assert_eq!(range(u64::MAX - 9, 9).unwrap().end(), Logical(u64::MAX));
        assert_eq!(range(u64::MAX, 0).unwrap().len_bytes(), 0);
    }

    #[test]
    fn addresses_are_located_in_their_range() {
        let range = LogicalRange::new("chunk", "length", Logical(100), 50).unwrap();
        assert_eq!(range.offset_of(Logical(99)), None);
        assert_eq!(range.offset_of(Logical(100)), Some(0));
        assert_eq!(range.offset_of(Logical(149)), Some(49));
        assert!(!range.contains(Logical(150)));
        assert_eq!((range.bytes_from(Logical(120)), range.bytes_from(Logical(151))), (30, 0));
        assert_eq!(range.to_string(), "100..150");
    }

    #[test]
    fn address_operations_fail_past_the_end() {
        assert_eq!(Logical(5).checked_add(u64::MAX), None);
        assert_eq!(Logical(5).offset_from(Logical(6)), None);
        assert_eq!(Logical(5).advance(7), Logical(12));
        assert!(Logical(5).end("extent", "length", u64::MAX - 5).is_ok());
        assert!(Logical(5).end("extent", "length", u64::MAX - 4).is_err());
    }
}
