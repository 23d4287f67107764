//! [`ItemLog`]: stores items one after another, in the order in which they were added. Each item is found by its
//! position.
//!
//! Invariants:
//! - I1. An item, with its length stored before it, lies in one chunk and begins at an offset below [`CHUNK`]. So the
//!   chunk's number and the offset together fit into a position of 32 bits.

/// Items whose positions never change.
#[derive(Debug, Default)]
pub(crate) struct ItemLog {
    chunks: Vec<Vec<u8>>,
    /// Bytes of items.
    len: usize,
    /// Bytes of chunks.
    capacity: usize,
}

#[allow(
    clippy::arithmetic_side_effects,
    reason = "I1: offsets within a chunk, and sizes of memory; an item is smaller than a tree block"
)]
impl ItemLog {
    /// Appends an item. Returns the position of the item, which is never `u32::MAX`.
    pub(crate) fn add(&mut self, item: &[u8]) -> u32 {
        let needed = LEN_BYTES + item.len();
        if self.chunks.last().is_none_or(|chunk| chunk.len() + needed > CHUNK) {
            let room = if self.chunks.is_empty() { FIRST_CHUNK } else { CHUNK };
            self.chunks.push(Vec::with_capacity(room.max(needed)));
            self.capacity += room.max(needed);
        }
        let number = self.chunks.len() - 1;
        let chunk = &mut self.chunks[number];
        if chunk.capacity() - chunk.len() < needed {
            self.capacity -= chunk.capacity();
            chunk.reserve_exact(needed.max(chunk.capacity().min(CHUNK - chunk.len())));
            self.capacity += chunk.capacity();
        }
        let place = number << CHUNK_BITS | chunk.len();
        let len = u16::try_from(item.len()).expect("an item is smaller than a tree block");
        chunk.extend_from_slice(&len.to_le_bytes());
        chunk.extend_from_slice(item);
        self.len += item.len();
        u32::try_from(place).ok().filter(|place| *place != u32::MAX).expect("so many items would not fit into memory")
    }

    /// The item at a position.
    pub(crate) fn get(&self, place: u32) -> &[u8] {
        let (number, from, len) = self.find(place);
        &self.chunks[number][from..from + len]
    }

    /// Overwrites the item at a position with an item of equal length.
    pub(crate) fn replace(&mut self, place: u32, item: &[u8]) {
        let (number, from, len) = self.find(place);
        self.chunks[number][from..from + len].copy_from_slice(item);
    }

    /// Loads the cache lines that [`Self::get`] reads for a short item, by reading a byte of each. The reads do not
    /// depend on the item's length, so the processor need not load the length first.
    pub(crate) fn touch(&self, place: u32) -> u8 {
        let (chunk, at) = (&self.chunks[place as usize >> CHUNK_BITS], place as usize % CHUNK);
        chunk[at] ^ chunk[(at + SHORT_ITEM).min(chunk.len() - 1)]
    }

    /// Bytes of all items that were added.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of memory that the log takes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.capacity
    }

    /// The item's chunk, its start in the chunk, and its length.
    fn find(&self, place: u32) -> (usize, usize, usize) {
        let (number, at) = (place as usize >> CHUNK_BITS, place as usize % CHUNK);
        let from = at + LEN_BYTES;
        let len = &self.chunks[number][at..from];
        (number, from, u16::from_le_bytes([len[0], len[1]]).into())
    }
}

const CHUNK_BITS: u32 = 14;
const CHUNK: usize = 1 << CHUNK_BITS;
/// Initial capacity of the first chunk in bytes. The capacity is small, because most directories are small.
const FIRST_CHUNK: usize = 256;
const LEN_BYTES: usize = 2;
/// Approximate length of a `DIR_ITEM` in bytes.
const SHORT_ITEM: usize = 48;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_found_where_they_were_put() {
        let mut log = ItemLog::default();
        let len = |number: usize| if number.is_multiple_of(50) { 60_000 } else { number * 7 % 300 };
        let places: Vec<u32> = (0..2000).map(|number| log.add(&vec![number as u8; len(number)])).collect();
        for (number, place) in places.iter().enumerate() {
            assert_eq!(log.get(*place), vec![number as u8; len(number)]);
        }
        log.replace(places[3], &[9; 21]);
        assert_eq!((log.get(places[2]).len(), log.get(places[3])), (14, &[9; 21][..]));
        assert_eq!(log.len(), (0..2000).map(len).sum::<usize>());
        assert_eq!(log.memory_bytes(), log.chunks.iter().map(Vec::capacity).sum::<usize>());
    }

    #[test]
    fn a_few_items_take_little_memory() {
        let mut log = ItemLog::default();
        for _ in 0..10 {
            log.add(&[0; 45]);
        }
        assert!(log.memory_bytes() <= 1024, "{}", log.memory_bytes());
    }
}
