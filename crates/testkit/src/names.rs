//! Makes names that are hard cases for a directory: names of every length, and names with equal hashes.
//!
//! The hash is crc32c, which is linear. So for any prefix and any hash value, there are four bytes that, appended to
//! the prefix, make a name with this hash. If one of the four bytes is `/` or zero, the next prefix is tried.

use ubtrfs_format::hash::name_hash;

use crate::Rng;

/// Makes names of 12 bytes with equal hashes.
pub fn colliding_names(rng: &mut Rng, count: usize) -> Vec<Vec<u8>> {
    let mut names: Vec<Vec<u8>> = vec![b"collision-00".to_vec()];
    let target = name_hash(&names[0]);
    while names.len() < count {
        let mut prefix: Vec<u8> = Vec::with_capacity(12);
        for _ in 0..8 {
            prefix.push(*rng.pick(b"abcdefghijklmnopqrstuvwxyz0123456789"));
        }
        if let Some(name) = forced(&prefix, target).filter(|name| !names.contains(name)) {
            names.push(name);
        }
    }
    names
}

/// Makes a name of this many bytes.
pub fn name_of_len(rng: &mut Rng, len: usize) -> Vec<u8> {
    (0..len).map(|_| *rng.pick(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ._-+")).collect()
}

/// Appends four bytes to `prefix` so that the hash is `target`. Returns `None` if the needed bytes cannot be part of
/// a name.
fn forced(prefix: &[u8], target: u64) -> Option<Vec<u8>> {
    // hash(prefix + suffix) = hash(prefix + 0000) xor L(suffix), with L linear in the 32 bits of the suffix.
    let mut name = prefix.to_vec();
    name.extend_from_slice(&[0; 4]);
    let zero = name_hash(&name);
    let mut rows: Vec<(u64, u32)> = Vec::with_capacity(32);
    for bit in 0..32 {
        let suffix = 1u32 << bit;
        name[prefix.len()..].copy_from_slice(&suffix.to_le_bytes());
        let (mut image, mut source) = (name_hash(&name) ^ zero, suffix);
        for &(row, row_source) in &rows {
            if image & leading(row) != 0 {
                image ^= row;
                source ^= row_source;
            }
        }
        rows.push((image, source));
    }
    let (mut left, mut suffix) = (target ^ zero, 0u32);
    for &(row, source) in &rows {
        if left & leading(row) != 0 {
            left ^= row;
            suffix ^= source;
        }
    }
    name[prefix.len()..].copy_from_slice(&suffix.to_le_bytes());
    let usable = left == 0 && !name.iter().any(|&byte| byte == 0 || byte == b'/') && name_hash(&name) == target;
    usable.then_some(name)
}

fn leading(value: u64) -> u64 {
    1u64.checked_shl(63 - value.leading_zeros().min(63)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colliding_names_have_one_hash_and_differ() {
        let names = colliding_names(&mut Rng::new(1), 30);
        let hashes: std::collections::BTreeSet<u64> = names.iter().map(|name| name_hash(name)).collect();
        assert_eq!(hashes.len(), 1);
        let unique: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(unique.len(), 30);
    }
}
