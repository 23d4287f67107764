//! Pseudo-random numbers, which are equal in every run.

/// A splitmix64 generator.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number below `end`, which must not be 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// Fills `buf` with bytes that do not compress.
    pub(crate) fn fill(&mut self, buf: &mut [u8]) {
        for chunk in buf.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]);
        }
    }
}

/// A pseudo-random permutation of the numbers below `len`, which is computed without storing the order. It is a Feistel
/// network on numbers of an even number of bits, and is applied repeatedly until the result is below `len`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Permutation {
    len: u64,
    half_bits: u32,
    seed: u64,
}

impl Permutation {
    pub(crate) fn new(len: u64, seed: u64) -> Self {
        let bits = u64::BITS - len.max(2).saturating_sub(1).leading_zeros();
        Self { len, half_bits: bits.div_ceil(2), seed }
    }

    pub(crate) fn at(&self, index: u64) -> u64 {
        let mut at = self.round_trip(index);
        while at >= self.len {
            at = self.round_trip(at);
        }
        at
    }

    fn round_trip(&self, index: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (index >> self.half_bits, index & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (mix(right ^ self.seed.rotate_left(round * 16)) & mask));
        }
        left << self.half_bits | right
    }
}

const ROUNDS: u32 = 4;

fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_comes_once() {
        for len in [1, 2, 3, 17, 256, 1000] {
            let order = Permutation::new(len, 7);
            let mut seen: Vec<u64> = (0..len).map(|index| order.at(index)).collect();
            assert!(len < 100 || seen.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count() < 20);
            seen.sort_unstable();
            assert_eq!(seen, (0..len).collect::<Vec<_>>());
        }
    }
}
