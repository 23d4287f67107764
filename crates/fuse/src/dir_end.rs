//! The point where a reader of a directory stops: the end that the directory had when reading began. Without this
//! limit, a program that renames files in a directory while it reads the directory would never finish, because each new
//! name gets a higher offset.
//!
//! The server does not open directories (the kernel stops sending OPENDIR after the first ENOSYS), so a reader is
//! identified by the offset at which it continues.
//!
//! - I1. At most `READERS_MAX` readers are remembered. A reader whose end was dropped from the map stops at the end
//!   that the directory has when the reader continues.

use std::collections::{BTreeMap, HashMap};

use parking_lot::Mutex;

/// For each current reader of a directory, the offset at which it must stop.
#[derive(Debug, Default)]
pub(crate) struct DirectoryReaders {
    inner: Mutex<ReaderEnds>,
}

#[derive(Debug, Default)]
struct ReaderEnds {
    /// The end and the age of each reader. The key is the reader's node and the offset at which the reader continues.
    readers: HashMap<(u64, u64), (u64, u64)>,
    by_age: BTreeMap<u64, (u64, u64)>,
    next_age: u64,
}

impl DirectoryReaders {
    /// Removes and returns the end of the reader that continues at `cookie`.
    pub(crate) fn take(&self, node: u64, cookie: u64) -> Option<u64> {
        if cookie == 0 {
            return None;
        }
        let mut inner = self.inner.lock();
        let (end, age) = inner.readers.remove(&(node, cookie))?;
        inner.by_age.remove(&age);
        Some(end)
    }

    /// Remembers that a reader that must stop at `end` will continue at `cookie`.
    pub(crate) fn remember(&self, node: u64, cookie: u64, end: u64) {
        let inner = &mut *self.inner.lock();
        let age = inner.next_age;
        inner.next_age += 1;
        if let Some((_, old_age)) = inner.readers.insert((node, cookie), (end, age)) {
            inner.by_age.remove(&old_age);
        }
        inner.by_age.insert(age, (node, cookie));
        if inner.by_age.len() > READERS_MAX
            && let Some((_, oldest)) = inner.by_age.pop_first()
        {
            inner.readers.remove(&oldest);
        }
    }
}

const READERS_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_keeps_its_end_and_old_ones_are_forgotten() {
        let ends = DirectoryReaders::default();
        ends.remember(1, 10, 100);
        ends.remember(1, 10, 200);
        assert_eq!(
            (ends.take(1, 0), ends.take(2, 10), ends.take(1, 10), ends.take(1, 10)),
            (None, None, Some(200), None)
        );
        for cookie in 1..=READERS_MAX as u64 + 1 {
            ends.remember(1, cookie, 7);
        }
        assert_eq!((ends.take(1, 1), ends.take(1, 2)), (None, Some(7)));
        let inner = ends.inner.lock();
        assert_eq!(inner.readers.len(), inner.by_age.len());
    }
}
