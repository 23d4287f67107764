//! [`AlignedBuf`]: a buffer aligned to pages, as direct I/O requires.
//!
//! Invariants:
//! - I1. The memory starts at a multiple of [`AlignedBuf::ALIGN`].
//! - I2. The capacity is a whole number of pages and never grows.

use std::ops::{Deref, DerefMut};

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// A buffer of fixed capacity, filled from its start.
pub struct AlignedBuf {
    pages: Vec<AlignedPage>,
    len: usize,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct AlignedPage([u8; AlignedBuf::ALIGN]);

impl AlignedBuf {
    /// Alignment of the memory, and the alignment of addresses and lengths that direct I/O requires.
    pub const ALIGN: usize = 4096;

    /// Makes an empty buffer with room for at least `capacity` bytes. Pages that are never written take no physical
    /// memory.
    pub fn with_capacity(capacity: usize) -> Self {
        let nr_pages = capacity.div_ceil(Self::ALIGN);
        let pages = AlignedPage::new_vec_zeroed(nr_pages).unwrap_or_else(|_| {
            std::alloc::handle_alloc_error(std::alloc::Layout::new::<AlignedPage>());
        });
        Self { pages, len: 0 }
    }

    /// The capacity in bytes.
    pub fn capacity(&self) -> usize {
        self.pages.len() * Self::ALIGN
    }

    /// Appends bytes, which must fit (I2).
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        let end = self.len + bytes.len();
        self.pages.as_mut_bytes()[self.len..end].copy_from_slice(bytes);
        self.len = end;
    }

    /// Appends `len` bytes, which must fit (I2), written by `fill`. `fill` gets memory with arbitrary old content. An
    /// error of `fill` leaves the buffer unchanged.
    pub fn extend_with<E>(&mut self, len: usize, fill: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<(), E> {
        let end = self.len + len;
        fill(&mut self.pages.as_mut_bytes()[self.len..end])?;
        self.len = end;
        Ok(())
    }

    /// Shortens the buffer to at most `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Sets the length to `len` bytes, which must fit (I2). New bytes are zero.
    pub fn resize(&mut self, len: usize) {
        if len > self.len {
            self.pages.as_mut_bytes()[self.len..len].fill(0);
        }
        self.len = len;
    }

    /// Removes all bytes and keeps the memory.
    pub fn clear(&mut self) {
        self.len = 0;
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.pages.as_bytes()[..self.len]
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.pages.as_mut_bytes()[..self.len]
    }
}

impl Default for AlignedBuf {
    fn default() -> Self {
        Self::with_capacity(0)
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBuf({} of {} bytes)", self.len, self.capacity())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_aligned_and_keeps_its_content() {
        for capacity in [0, 1, 4096, 5000, 1 << 20] {
            let mut buf = AlignedBuf::with_capacity(capacity);
            assert!(buf.capacity() >= capacity && buf.is_empty());
            if capacity > 0 {
                assert_eq!(buf.as_ptr().addr() % AlignedBuf::ALIGN, 0, "I1");
                buf.extend_from_slice(b"x");
                buf.resize(buf.capacity());
                assert_eq!((buf[0], buf[1..].iter().map(|b| u32::from(*b)).sum::<u32>()), (b'x', 0));
                buf[1] = 7;
                buf.truncate(1);
                buf.resize(2);
                assert_eq!(&*buf, b"x\0");
                assert_eq!(buf.extend_with(3, |_| Err("no")), Err("no"));
                assert_eq!(&*buf, b"x\0");
                let put = |bytes: &mut [u8]| {
                    bytes.copy_from_slice(b"yz");
                    Ok::<(), ()>(())
                };
                buf.extend_with(2, put).unwrap();
                assert_eq!(&*buf, b"x\0yz");
            }
        }
    }

    #[test]
    #[should_panic(expected = "range end")]
    fn a_buffer_never_grows() {
        AlignedBuf::with_capacity(10).extend_from_slice(&[0; 4097]);
    }
}
