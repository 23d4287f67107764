//! Parts of lists of buffers.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;

/// The buffers of the bytes `start..end` of a list of buffers. Bytes past the list's end are left out.
pub(crate) fn part_mut<'p>(bufs: &'p mut [IoSliceMut<'_>], start: usize, end: usize) -> Vec<IoSliceMut<'p>> {
    let mut cut = cut(start..end);
    let pieces = bufs.iter_mut().map_while(|buf| cut(buf.len()).map(|piece| buf.get_mut(piece)));
    pieces.flatten().filter(|piece| !piece.is_empty()).map(IoSliceMut::new).collect()
}

/// Works like [`part_mut`] for buffers that are read. Appends to `part`.
pub(crate) fn push_part<'p>(part: &mut Vec<IoSlice<'p>>, bufs: &'p [IoSlice<'p>], start: usize, end: usize) {
    let mut cut = cut(start..end);
    let pieces = bufs.iter().map_while(|buf| cut(buf.len()).map(|piece| buf.get(piece)));
    part.extend(pieces.flatten().filter(|piece| !piece.is_empty()).map(IoSlice::new));
}

/// A function that takes the lengths of consecutive buffers. It returns the range of each buffer that lies in `wanted`, and
/// `None` after the end of `wanted`.
fn cut(wanted: Range<usize>) -> impl FnMut(usize) -> Option<Range<usize>> {
    let mut at = 0usize;
    move |len| {
        let start = at;
        at = at.saturating_add(len);
        let within = |offset: usize| offset.saturating_sub(start).min(len);
        (start < wanted.end).then(|| within(wanted.start)..within(wanted.end))
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
