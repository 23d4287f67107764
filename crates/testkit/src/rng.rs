//! Reproducible random numbers: a seed gives the same test on every machine.
//!
//! The generator is splitmix64 (Steele, Lea, Flood 2014). For tests only.

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// Makes a stream with this seed.
    pub fn new(seed: u64) -> Self {
        Self { state: seed ^ 0x9e37_79b9_7f4a_7c15 }
    }

    /// Returns the seed in `UBTRFS_SEED`, or `default`. A test prints its seed when it fails.
    pub fn seed_or(default: u64) -> u64 {
        std::env::var("UBTRFS_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
    }

    /// Returns the next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `bound`; 0 for a bound of 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.next_u64() % bound }
    }

    /// Returns an index below `len`.
    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap_or(0)
    }

    /// Returns true with probability 1/`n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns a random element.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.index(from.len())]
    }

    /// Returns random bytes, which do not compress.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len + 8);
        while out.len() < len {
            out.extend_from_slice(&self.next_u64().to_le_bytes());
        }
        out.truncate(len);
        out
    }

    /// Returns bytes that compress to about a quarter, as text does.
    pub fn text(&mut self, len: usize) -> Vec<u8> {
        const WORDS: [&str; 12] = [
            "extent",
            "block",
            "group",
            "tree",
            "leaf",
            "node",
            "key",
            "item",
            "chunk",
            "stripe",
            "inode",
            "generation",
        ];
        let mut out = Vec::with_capacity(len + 24);
        while out.len() < len {
            out.extend_from_slice(self.pick(&WORDS).as_bytes());
            if self.one_in(4) {
                out.extend_from_slice(self.below(100_000).to_string().as_bytes());
            }
            out.push(if self.one_in(9) { b'\n' } else { b' ' });
        }
        out.truncate(len);
        out
    }

    /// Returns content from [`Rng::bytes`] or [`Rng::text`], or one byte repeated.
    pub fn content(&mut self, len: usize) -> Vec<u8> {
        match self.below(8) {
            0..4 => self.bytes(len),
            4..7 => self.text(len),
            _ => {
                let byte = self.next_u64().to_le_bytes()[0];
                vec![byte; len]
            }
        }
    }

    /// Returns a length up to `max`. Small lengths are more frequent than large ones, and many lengths are next to a
    /// power of two.
    pub fn len(&mut self, max: u64) -> u64 {
        let bits = self.below(64 - u64::from(max.max(1).leading_zeros()) + 1);
        let top = 1u64 << bits.min(62);
        let len = match self.below(6) {
            0 => top,
            1 => top.saturating_sub(1),
            2 => top + 1,
            _ => self.below(top) + 1,
        };
        len.min(max)
    }
}
