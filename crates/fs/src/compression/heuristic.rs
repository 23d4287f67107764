//! A cheap estimate whether data is compressible, by the entropy of a sample of its bytes and by repetition.

/// Bytes in each sample. Samples begin [`SAMPLE_STRIDE`] bytes apart.
const SAMPLE_LEN: usize = 16;
const SAMPLE_STRIDE: usize = 256;
/// Data with at most this many different byte values always counts as compressible.
const SMALL_BYTE_SET: usize = 64;
/// Bits per byte. Above this entropy, compression rarely saves a sector out of 32.
const MAX_ENTROPY: f32 = 7.5;

/// Whether compressing `data` probably saves space.
#[allow(clippy::arithmetic_side_effects, reason = "counts of the bytes of a sample")]
pub(crate) fn looks_compressible(data: &[u8]) -> bool {
    let mut counts = [0u32; 256];
    let mut total = 0u32;
    for sample in data.chunks(SAMPLE_STRIDE) {
        for byte in &sample[..sample.len().min(SAMPLE_LEN)] {
            counts[usize::from(*byte)] += 1;
            total += 1;
        }
    }
    if counts.iter().filter(|count| **count > 0).count() <= SMALL_BYTE_SET || data.len() < 4 * SAMPLE_STRIDE {
        return true;
    }
    // If both halves begin with equal bytes, the data probably repeats.
    let (first, second) = data.split_at(data.len() / 2);
    if first.get(..second.len().min(4096)) == second.get(..second.len().min(4096)) {
        return true;
    }
    let total = total as f32;
    let entropy: f32 = counts
        .iter()
        .filter(|count| **count > 0)
        .map(|count| {
            let share = *count as f32 / total;
            -share * share.log2()
        })
        .sum();
    // The entropy of a sample cannot exceed log2 of its length, so the limit is lower for a small sample.
    entropy < MAX_ENTROPY.min(total.log2() - 0.25)
}
