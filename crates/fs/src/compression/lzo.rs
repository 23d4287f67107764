//! LZO1X in btrfs's framing.
//!
//! | field | bytes |
//! |---|---|
//! | total length, including these 4 bytes | u32 LE |
//! | for each sector of input, the length of its segment | u32 LE |
//! | and the segment, an LZO1X stream | |
//!
//! Invariants:
//! - I1: a segment's length field never crosses a sector boundary of the compressed bytes. If fewer than 4 bytes are
//!   left in a sector, they are zeros and the field starts the next sector.
//! - I2: a segment decodes to at most one sector.
//!
//! The instructions that the compressor writes, told apart by their first byte (`S` is the number of literals, 0 to 3,
//! that follow):
//!
//! | instruction | meaning |
//! |---|---|
//! | `18..=255` as the very first byte | `byte - 17` literals |
//! | `0000LLLL` after no literals | 3 + L literals; L = 0: 18 + 255 per zero byte + the next byte |
//! | `01LDDDSS` H | match of 3 + L bytes, distance `(H << 3) + D + 1` |
//! | `1LLDDDSS` H | match of 5 + L bytes, distance `(H << 3) + D + 1` |
//! | `001LLLLL` LE16 `D..DSS` | match of 2 + L bytes (0: 33 + ...), distance D + 1, up to 16 KiB |
//! | `0001HLLL` LE16 `D..DSS` | match of 2 + L bytes (0: 9 + ...), distance 16384 + (H << 14) + D |
//! | `00010001 0 0` | end |

use ubtrfs_format::error::FormatError;

use super::bad_stream;

const HEADER: usize = 4;
const HASH_BITS: u32 = 12;
const MIN_MATCH: usize = 4;
const NEAR_DISTANCE: usize = 2048;
const NEAR_LEN: usize = 8;
const MIDDLE_DISTANCE: usize = 16384;
const MAX_DISTANCE: usize = 49151;

/// For each hash of 4 bytes: the position in the sector at which it was last seen.
pub(super) struct LzoWorkspace {
    table: Box<[u16; 1 << HASH_BITS]>,
}

impl Default for LzoWorkspace {
    fn default() -> Self {
        Self { table: Box::new([0; 1 << HASH_BITS]) }
    }
}

#[allow(clippy::arithmetic_side_effects, reason = "lengths inside of one sector of at most 64 KiB, and of the output")]
impl LzoWorkspace {
    pub(super) fn compress(&mut self, input: &[u8], max_len: usize, sectorsize: usize) -> Option<Vec<u8>> {
        let mut out = Vec::with_capacity(max_len.min(input.len()) + sectorsize);
        out.extend_from_slice(&[0; HEADER]);
        for sector in input.chunks(sectorsize) {
            let left = sectorsize - out.len() % sectorsize;
            if left < HEADER {
                out.resize(out.len() + left, 0);
            }
            let at = out.len();
            out.extend_from_slice(&[0; HEADER]);
            self.segment(sector, &mut out);
            let len = u32::try_from(out.len() - at - HEADER).ok()?;
            out[at..at + HEADER].copy_from_slice(&len.to_le_bytes());
            if out.len() > max_len {
                return None;
            }
        }
        let total = u32::try_from(out.len()).ok()?;
        out[..HEADER].copy_from_slice(&total.to_le_bytes());
        Some(out)
    }

    /// Appends one LZO1X stream.
    fn segment(&mut self, input: &[u8], out: &mut Vec<u8>) {
        let start = out.len();
        // An entry is 0 until its hash is seen. An entry of 0 makes byte 0 the candidate, and the comparison shows
        // whether it matches. The search starts at byte 1, so the candidate always lies before the current position.
        self.table.fill(0);
        let mut literals_from = 0;
        let mut at = 1;
        // The step between searches grows while nothing matches, so that incompressible data costs little.
        let mut misses = 0;
        while at + MIN_MATCH <= input.len() {
            let word = word_at(input, at);
            let slot = &mut self.table[(word.wrapping_mul(2_654_435_761) >> (32 - HASH_BITS)) as usize];
            let candidate = usize::from(*slot);
            // Sectors are at most 64 KiB, so a position in a sector fits into 16 bits.
            *slot = at as u16;
            let distance = at - candidate;
            if distance > MAX_DISTANCE || word_at(input, candidate) != word {
                misses += 1;
                at += 1 + (misses >> 5);
                continue;
            }
            misses = 0;
            let len = MIN_MATCH + common_prefix(&input[candidate + MIN_MATCH..], &input[at + MIN_MATCH..]);
            emit_literals(&input[literals_from..at], start, out);
            emit_match(len, distance, out);
            // Also record a position near the end of this match, so that later matches can refer to it.
            let inside = at + len - 2;
            if inside + MIN_MATCH <= input.len() {
                let word = word_at(input, inside);
                self.table[(word.wrapping_mul(2_654_435_761) >> (32 - HASH_BITS)) as usize] = inside as u16;
            }
            at += len;
            literals_from = at;
        }
        emit_literals(&input[literals_from..], start, out);
        out.extend_from_slice(&[0b0001_0001, 0, 0]);
    }
}

#[inline]
fn word_at(input: &[u8], at: usize) -> u32 {
    match input[at..].first_chunk() {
        Some(bytes) => u32::from_le_bytes(*bytes),
        None => 0,
    }
}

/// Length in bytes of the start that both slices have in common.
#[inline]
#[allow(clippy::arithmetic_side_effects, reason = "lengths inside of one sector of at most 64 KiB")]
fn common_prefix(a: &[u8], b: &[u8]) -> usize {
    let mut len = 0;
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        let (Some(a), Some(b)) = (a.first_chunk(), b.first_chunk()) else { break };
        let different = u64::from_le_bytes(*a) ^ u64::from_le_bytes(*b);
        if different != 0 {
            return len + (different.trailing_zeros() / 8) as usize;
        }
        len += 8;
    }
    len + a[len.min(a.len())..].iter().zip(&b[len.min(b.len())..]).take_while(|(a, b)| a == b).count()
}

#[allow(clippy::arithmetic_side_effects, reason = "lengths inside of one sector of at most 64 KiB")]
fn emit_literals(literals: &[u8], start: usize, out: &mut Vec<u8>) {
    let len = literals.len();
    if len == 0 {
        return;
    }
    if out.len() == start && len <= 238 {
        out.push((17 + len) as u8);
    } else if out.len() > start && len <= 3 {
        // The number of literals goes into the second to last byte of the preceding match instruction.
        let at = out.len() - 2;
        out[at] |= len as u8;
    } else if len <= 18 {
        out.push((len - 3) as u8);
    } else {
        out.push(0);
        emit_long(len - 18, out);
    }
    out.extend_from_slice(literals);
}

#[allow(clippy::arithmetic_side_effects, reason = "lengths inside of one sector of at most 64 KiB")]
fn emit_match(len: usize, distance: usize, out: &mut Vec<u8>) {
    if len <= NEAR_LEN && distance <= NEAR_DISTANCE {
        let distance = distance - 1;
        // For lengths 3 to 8, both short match instructions have (len - 1) << 5 in their first byte.
        out.push((((len - 1) << 5) | ((distance & 7) << 2)) as u8);
        out.push((distance >> 3) as u8);
        return;
    }
    let distance = if distance <= MIDDLE_DISTANCE {
        match len {
            ..=33 => out.push((0b0010_0000 | (len - 2)) as u8),
            _ => {
                out.push(0b0010_0000);
                emit_long(len - 33, out);
            }
        }
        distance - 1
    } else {
        let distance = distance - MIDDLE_DISTANCE;
        let marker = 0b0001_0000 | ((distance >> 14) & 1) << 3;
        match len {
            ..=9 => out.push((marker | (len - 2)) as u8),
            _ => {
                out.push(marker as u8);
                emit_long(len - 9, out);
            }
        }
        distance & 0x3fff
    };
    out.extend_from_slice(&((distance << 2) as u16).to_le_bytes());
}

/// Encodes the rest of a length that did not fit: a zero byte per 255, then the remainder (1 to 255).
#[allow(clippy::arithmetic_side_effects, reason = "lengths inside of one sector of at most 64 KiB")]
fn emit_long(mut len: usize, out: &mut Vec<u8>) {
    while len > 255 {
        out.push(0);
        len -= 255;
    }
    out.push(len as u8);
}

/// Decompresses all segments that fit into `out`. Returns the number of bytes written.
pub(super) fn decompress(input: &[u8], out: &mut [u8], sectorsize: usize) -> Result<usize, FormatError> {
    let field = |at: usize| -> Result<usize, FormatError> {
        let bytes: &[u8; HEADER] =
            input.get(at..).and_then(<[u8]>::first_chunk).ok_or(bad_stream("LZO segment", at))?;
        Ok(u32::from_le_bytes(*bytes) as usize)
    };
    let total = field(0)?;
    if total < HEADER || total > input.len() {
        return Err(bad_stream("LZO", 0));
    }
    let mut at = HEADER;
    let mut filled = 0;
    let mut scratch = Vec::new();
    while at < total && filled < out.len() {
        let left = at.next_multiple_of(sectorsize).saturating_sub(at);
        if (1..HEADER).contains(&left) {
            at = at.saturating_add(left);
            if at >= total {
                break;
            }
        }
        let len = field(at)?;
        at = at.saturating_add(HEADER);
        let segment =
            at.checked_add(len).filter(|end| *end <= total).map(|end| &input[at..end]).ok_or(bad_stream("LZO", at))?;
        let target = &mut out[filled..];
        let unpacked = if target.len() >= sectorsize {
            lzokay::decompress::decompress(segment, &mut target[..sectorsize])
        } else {
            scratch.resize(sectorsize, 0);
            lzokay::decompress::decompress(segment, &mut scratch).map(|len| {
                let len = len.min(target.len());
                target[..len].copy_from_slice(&scratch[..len]);
                len
            })
        }
        .map_err(|_| bad_stream("LZO", at))?;
        filled = filled.saturating_add(unpacked);
        at = at.saturating_add(len);
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_start_inside_a_sector() {
        let mut workspace = LzoWorkspace::default();
        let mut state = 3u32;
        for fill in 0..64u32 {
            let data: Vec<u8> = (0..131_072u32)
                .map(|i| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    if i % 64 < fill { (state >> 24) as u8 } else { 1 }
                })
                .collect();
            let Some(packed) = workspace.compress(&data, 131_072, 4096) else { continue };
            let total = u32::from_le_bytes(*packed.first_chunk().unwrap()) as usize;
            assert_eq!(total, packed.len());
            let mut at = HEADER;
            for _ in data.chunks(4096) {
                let left = 4096 - at % 4096;
                if left < HEADER {
                    assert!(packed[at..at + left].iter().all(|b| *b == 0), "I1");
                    at += left;
                }
                at += HEADER + u32::from_le_bytes(*packed[at..].first_chunk().unwrap()) as usize;
            }
            assert_eq!(at, total);
            let mut out = vec![0; data.len()];
            assert_eq!(decompress(&packed, &mut out, 4096).unwrap(), data.len());
            assert!(out == data);
        }
    }

    #[test]
    fn far_matches_round_trip() {
        // A segment of 64 KiB with matches in every class of distances.
        let mut workspace = LzoWorkspace::default();
        let mut data: Vec<u8> = Vec::new();
        let mut state = 5u32;
        for block in 0..64 {
            if block % 3 == 2 {
                let from = data.len() - (block * 757).min(data.len() - 700);
                data.extend_from_within(from..from + 650);
            }
            for _ in 0..700 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                data.push((state >> 24) as u8);
            }
        }
        data.truncate(65536);
        let packed = workspace.compress(&data, 131_072, 65536).unwrap();
        assert!(packed.len() < data.len() * 9 / 10, "{}", packed.len());
        let mut out = vec![0; data.len()];
        assert_eq!(decompress(&packed, &mut out, 65536).unwrap(), data.len());
        assert!(out == data);
    }
}
