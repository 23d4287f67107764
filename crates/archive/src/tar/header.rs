//! Fields of a header block.

use super::BLOCK;

/// One header block.
pub(crate) struct MemberHeader<'a>(pub(super) &'a [u8; BLOCK]);

impl<'a> MemberHeader<'a> {
    pub(crate) fn bytes(&self, at: usize, len: usize) -> &'a [u8] {
        &self.0[at..at + len]
    }

    /// Reads a text field, up to the first zero.
    pub(crate) fn text(&self, at: usize, len: usize) -> &'a [u8] {
        let field = self.bytes(at, len);
        &field[..field.iter().position(|byte| *byte == 0).unwrap_or(len)]
    }

    /// Reads a number: octal digits, or (first bit set) big-endian two's complement.
    pub(crate) fn number(&self, at: usize, len: usize) -> Option<i64> {
        let field = self.bytes(at, len);
        if field[0] & 0x80 != 0 {
            let negative = field[0] & 0x40 != 0;
            let mut value: i128 = if negative { -1 } else { 0 };
            value = value << 6 | i128::from(field[0] & 0x3f);
            for byte in &field[1..] {
                value = value << 8 | i128::from(*byte);
            }
            return i64::try_from(value).ok();
        }
        let digits = field.split(|byte| *byte == 0).next().unwrap_or_default().trim_ascii();
        digits.iter().try_fold(0i64, |value, digit| match digit {
            b'0'..=b'7' => value.checked_mul(8)?.checked_add(i64::from(digit - b'0')),
            _ => None,
        })
    }

    /// Whether the checksum is right. Some programs add the bytes as signed numbers, others as unsigned numbers, so
    /// either sum is accepted.
    pub(crate) fn checksum_matches(&self) -> bool {
        let Some(stored) = self.number(148, 8) else { return false };
        let counted = |at: usize| if (148..156).contains(&at) { b' ' } else { self.0[at] };
        let unsigned: i64 = (0..BLOCK).map(|at| i64::from(counted(at))).sum();
        let signed: i64 = (0..BLOCK).map(|at| i64::from(counted(at) as i8)).sum();
        stored == unsigned || stored == signed
    }

    pub(crate) fn is_zero(&self) -> bool {
        self.0.iter().all(|byte| *byte == 0)
    }

    pub(crate) fn is_gnu(&self) -> bool {
        self.bytes(257, 8) == b"ustar  \0"
    }

    /// The path: ustar's prefix and the name.
    pub(crate) fn path(&self) -> Vec<u8> {
        let name = self.text(0, 100);
        let prefix = self.text(345, 155);
        if self.bytes(257, 6) != b"ustar\0" || prefix.is_empty() {
            return name.to_vec();
        }
        [prefix, name].join(&b'/')
    }
}
