//! Parts of lists of buffers.

use std::io::{IoSlice, IoSliceMut};

/// The buffers of the bytes `start..end` of a list of buffers. Bytes past the list's end are left out.
pub(crate) fn part_mut<'p>(bufs: &'p mut [IoSliceMut<'_>], start: usize, end: usize) -> Vec<IoSliceMut<'p>> {
    let mut part = Vec::new();
    let mut at = 0usize;
    for buf in bufs {
        if at >= end {
            break;
        }
        let next = at.saturating_add(buf.len());
        let from = start.saturating_sub(at).min(buf.len());
        let to = end.saturating_sub(at).min(buf.len());
        if let Some(piece) = buf.get_mut(from..to).filter(|piece| !piece.is_empty()) {
            part.push(IoSliceMut::new(piece));
        }
        at = next;
    }
    part
}

/// Works like [`part_mut`] for buffers that are read. Appends to `part`.
pub(crate) fn push_part<'p>(part: &mut Vec<IoSlice<'p>>, bufs: &'p [IoSlice<'p>], start: usize, end: usize) {
    let mut at = 0usize;
    for buf in bufs {
        if at >= end {
            break;
        }
        let next = at.saturating_add(buf.len());
        let from = start.saturating_sub(at).min(buf.len());
        let to = end.saturating_sub(at).min(buf.len());
        if let Some(piece) = buf.get(from..to).filter(|piece| !piece.is_empty()) {
            part.push(IoSlice::new(piece));
        }
        at = next;
    }
}

/// Copies bytes to the start of a list of buffers, and returns how many fit.
pub(crate) fn copy_to(bufs: &mut [IoSliceMut<'_>], bytes: &[u8]) -> usize {
    let mut rest = bytes;
    for buf in bufs {
        let len = rest.len().min(buf.len());
        let (head, tail) = rest.split_at(len);
        if let Some(target) = buf.get_mut(..len) {
            target.copy_from_slice(head);
        }
        rest = tail;
    }
    bytes.len().saturating_sub(rest.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_lists_have_the_bytes_of_their_range() {
        let all: Vec<u8> = (0..20).collect();
        for start in 0..=20 {
            for end in start..=22 {
                let mut copy = all.clone();
                let (a, rest) = copy.split_at_mut(3);
                let (b, c) = rest.split_at_mut(9);
                let mut empty = [];
                let mut bufs = [a, &mut empty, b, c].map(IoSliceMut::new);
                let found: Vec<u8> =
                    part_mut(&mut bufs, start, end).iter().flat_map(|part| part.iter().copied()).collect();
                assert_eq!(found, all[start..end.min(20)]);
                let bufs =
                    [IoSlice::new(&all[..3]), IoSlice::new(&[]), IoSlice::new(&all[3..12]), IoSlice::new(&all[12..])];
                let mut part = Vec::new();
                push_part(&mut part, &bufs, start, end);
                let found: Vec<u8> = part.iter().flat_map(|part| part.iter().copied()).collect();
                assert_eq!(found, all[start..end.min(20)]);
            }
        }
        let (mut a, mut b) = ([0; 2], [0; 3]);
        let mut bufs = [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b)];
        assert_eq!((copy_to(&mut bufs, b"xyz"), copy_to(&mut [], b"q")), (3, 0));
        assert_eq!((&a, &b), (b"xy", b"z\0\0"));
    }
}
