//! An uncompressed archive in a file. This module reads the headers; other code reads most data directly from the file.
//!
//! - I1. Readahead of [`AHEAD`] bytes is requested explicitly, because two threads read alternately, which the kernel
//!   does not recognize as a sequential read.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{Advice, fadvise};

/// A file and a position in it.
pub(crate) struct InPlace {
    file: Arc<File>,
    len: u64,
    at: u64,
    window: Box<[u8]>,
    /// Offset of the window's bytes in the file.
    window_at: u64,
    window_len: usize,
    /// End of the requested readahead (I1).
    ahead: u64,
}

impl InPlace {
    /// Starts at the beginning of a file of length `len`.
    pub(crate) fn new(file: File, len: u64) -> Self {
        let window = vec![0; WINDOW].into();
        Self { file: Arc::new(file), len, at: 0, window, window_at: 0, window_len: 0, ahead: 0 }
    }

    /// Returns the file, and the offset of the next bytes in it.
    pub(crate) fn place(&self) -> (Arc<File>, u64) {
        (Arc::clone(&self.file), self.at)
    }

    /// See [`super::input::ArchiveInput::taken`].
    pub(crate) fn taken(&self) -> u64 {
        self.at
    }

    /// See [`super::input::ArchiveInput::next_piece`].
    pub(crate) fn next_piece(&mut self, max: u64) -> io::Result<&[u8]> {
        // This cannot underflow, because the position is never before the window.
        if self.at - self.window_at >= self.window_len as u64 {
            self.fill_window()?;
        }
        let start = (self.at - self.window_at) as usize;
        let len = (self.window_len - start).min(usize::try_from(max).unwrap_or(usize::MAX));
        self.at += len as u64;
        Ok(&self.window[start..start + len])
    }

    fn fill_window(&mut self) -> io::Result<()> {
        if self.at + AHEAD / 2 >= self.ahead {
            self.ahead = self.ahead.max(self.at) + AHEAD;
            // Errors are ignored, because the call is only a hint to the kernel.
            let _ = fadvise(&*self.file, self.at, NonZeroU64::new(self.ahead - self.at), Advice::WillNeed);
        }
        (self.window_at, self.window_len) = (self.at, 0);
        self.window_len = loop {
            match self.file.read_at(&mut self.window, self.at) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                count => break count?,
            }
        };
        Ok(())
    }

    /// See [`super::input::ArchiveInput::skip`].
    pub(crate) fn skip(&mut self, len: u64) -> io::Result<()> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.len);
        self.at = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(())
    }
}

/// Bytes read at once: enough for a member's header and the pax records that usually precede it. A longer window would
/// contain data, which other code reads.
const WINDOW: usize = 2048;
const AHEAD: u64 = 16 << 20;
