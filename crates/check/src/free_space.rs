//! Compares the free space tree with the space that extents leave free, one block group at a time. Superblock copies
//! count as free in the free space tree.

use ubtrfs_format::item::FreeSpaceInfo;
use ubtrfs_format::superblock::CompatRo;
use ubtrfs_format::{Key, KeyType, RootId};

use crate::block_group::CheckedGroup;
use crate::checker::Checker;
use crate::problem::{Code, Place};
use crate::walk::{Leaf, WalkEvent};

/// The state of reading the free space tree. Holds the listed free ranges of one block group at a time, 16 bytes for
/// each range.
#[derive(Default)]
struct ListedFreeSpace {
    /// Start, end, info and place of the current block group.
    group: Option<(u64, u64, FreeSpaceInfo, Place)>,
    /// The free ranges of the current block group. Ranges that touch are joined.
    ranges: Vec<(u64, u64)>,
    /// End of the last item that was read in the current block group.
    last_end: u64,
    /// Start and end of each block group that has a free space info.
    done: Vec<(u64, u64)>,
    /// End of the range of the last free space info if the info is stale, otherwise 0. A stale info is of a block group
    /// that does not exist.
    stale: u64,
    /// Number of stale free space infos.
    nr_stale: u64,
    /// Place of the first stale free space info.
    first_stale: Option<Place>,
    gaps: bool,
}

impl<'a> Checker<'a> {
    /// Reads the free space tree. Once all items of a block group are read, compares the listed free ranges with the
    /// ranges that extents leave free.
    pub(crate) fn free_space_tree(&mut self) {
        if !self.has_ro(CompatRo::FREE_SPACE_TREE) || !self.has_ro(CompatRo::FREE_SPACE_TREE_VALID) {
            return;
        }
        let Some(root) = self.needed_root(RootId::FREE_SPACE_TREE) else { return };
        let expected = self.expected_free();
        let mut listed = ListedFreeSpace::default();
        let complete = self.walk_tree(root, &mut |checker, event| match event {
            WalkEvent::Leaf(leaf) => checker.free_space_leaf(leaf, &mut listed, &expected),
            WalkEvent::Known(_) => {}
            WalkEvent::Gap => {
                listed.gaps = true;
                listed.group = None;
            }
        });
        self.finish_group(&mut listed, &expected);
        if let Some(place) = listed.first_stale {
            let text = format!("{} free space infos are for no block group", listed.nr_stale);
            self.sink.report(Code::FreeSpaceStale, place, text);
        }
        if !complete || !self.groups.complete {
            return;
        }
        listed.done.sort_unstable();
        for group in &self.groups.list {
            if listed.done.binary_search(&(group.start, group.end)).is_err() {
                let text = format!("block group {} has no free space info", group.start);
                self.sink.report(Code::FreeSpace, Place::tree(RootId::FREE_SPACE_TREE), text);
            }
        }
    }

    fn free_space_leaf(&mut self, leaf: &Leaf<'_>, listed: &mut ListedFreeSpace, expected: &ExpectedFreeSpace) {
        for (slot, key, data) in leaf.items() {
            let place = leaf.place(slot);
            match key.item_type {
                KeyType::FREE_SPACE_INFO => {
                    self.finish_group(listed, expected);
                    self.begin_group(key, data, place, listed);
                }
                KeyType::FREE_SPACE_EXTENT if self.in_group(key, place, listed, 0) => {
                    push(&mut listed.ranges, key.objectid, key.objectid.saturating_add(key.offset));
                }
                KeyType::FREE_SPACE_BITMAP if self.in_group(key, place, listed, FreeSpaceInfo::USING_BITMAPS) => {
                    self.add_bitmap(key, data, listed);
                }
                _ => {}
            }
        }
    }

    fn begin_group(&mut self, key: Key, data: &[u8], place: Place, listed: &mut ListedFreeSpace) {
        let (Ok(info), Some(end)) = (FreeSpaceInfo::decode(data), key.objectid.checked_add(key.offset)) else { return };
        let known = self.groups.list.binary_search_by_key(&key.objectid, |group| group.start);
        let fits = known.ok().and_then(|at| self.groups.list.get(at)).is_some_and(|group| group.end == end);
        // mkfs.btrfs up to 6.16 leaves entries of its temporary block groups behind, in unused address space. Such
        // entries are stale, but harmless.
        let before_end = self.groups.list.partition_point(|group| group.start < end);
        let last = before_end.checked_sub(1).and_then(|at| self.groups.list.get(at));
        let touches = last.is_some_and(|group| key.objectid < group.end);
        listed.stale = if fits || touches { 0 } else { end };
        if !fits && touches && self.groups.complete {
            let text = format!("free space info {key} does not match the block group there");
            self.sink.report(Code::FreeSpace, place, text);
        } else if !fits && self.groups.complete {
            let last_end = self.groups.list.last().map_or(0, |group| group.end);
            listed.nr_stale = listed.nr_stale.saturating_add(1);
            listed.first_stale.get_or_insert(place);
            if end > last_end {
                let text = format!("free space info {key} is in no block group, but in the place of the next one");
                self.sink.report(Code::FreeSpace, place, text);
            }
        }
        listed.group = fits.then_some((key.objectid, end, info, place));
        listed.ranges.clear();
        listed.last_end = key.objectid;
    }

    /// Checks that an item lies in the current block group, after the previous item, and has the form (extents or
    /// bitmaps) that the info item states.
    fn in_group(&mut self, key: Key, place: Place, listed: &mut ListedFreeSpace, form: u32) -> bool {
        let end = key.objectid.saturating_add(key.offset);
        let Some((_, group_end, info, _)) = listed.group else {
            if !listed.gaps && self.groups.complete && end > listed.stale {
                self.sink.report(Code::FreeSpace, place, format!("free space {key} is in no block group"));
            }
            return false;
        };
        if key.objectid < listed.last_end || end > group_end || info.flags & FreeSpaceInfo::USING_BITMAPS != form {
            let text =
                format!("free space {key} overlaps the item before, leaves its block group, or has another form");
            self.sink.report(Code::FreeSpace, place, text);
            return false;
        }
        listed.last_end = end;
        true
    }

    fn add_bitmap(&mut self, key: Key, data: &[u8], listed: &mut ListedFreeSpace) {
        let nr_bits = key.offset.checked_div(self.sectorsize).unwrap_or(0);
        let nr_bits = usize::try_from(nr_bits).unwrap_or(usize::MAX);
        let bits = data.iter().flat_map(|byte| (0..8_u32).map(move |bit| byte.unbounded_shr(bit) & 1 == 1));
        let mut start = None;
        let mut at = key.objectid;
        for is_free in bits.take(nr_bits) {
            match (is_free, start) {
                (true, None) => start = Some(at),
                (false, Some(from)) => {
                    push(&mut listed.ranges, from, at);
                    start = None;
                }
                _ => {}
            }
            at = at.saturating_add(self.sectorsize);
        }
        if let Some(from) = start {
            push(&mut listed.ranges, from, key.objectid.saturating_add(key.offset));
        }
    }

    fn finish_group(&mut self, listed: &mut ListedFreeSpace, expected: &ExpectedFreeSpace) {
        let Some((start, end, info, place)) = listed.group.take() else { return };
        listed.done.push((start, end));
        if listed.ranges.len() as u64 != u64::from(info.extent_count) {
            let text = format!(
                "block group {start}: the free space info has {} ranges, {} are listed",
                info.extent_count,
                listed.ranges.len()
            );
            self.sink.report(Code::FreeSpace, place, text);
        }
        let Some(free) = expected.of(start) else { return };
        if free == listed.ranges.as_slice() {
            return;
        }
        let differs = (0..free.len().max(listed.ranges.len())).find(|&at| free.get(at) != listed.ranges.get(at));
        let show = |range: Option<&(u64, u64)>| match range {
            Some((from, to)) => format!("{from}+{}", to.saturating_sub(*from)),
            None => "nothing".to_owned(),
        };
        let at = differs.unwrap_or_default();
        let text = format!(
            "block group {start}: the free space tree lists {}, extents leave {}",
            show(listed.ranges.get(at)),
            show(free.get(at))
        );
        self.sink.report(Code::FreeSpace, place, text);
    }

    /// Computes the ranges that extents leave free in each block group.
    fn expected_free(&mut self) -> ExpectedFreeSpace {
        if !self.groups.complete || self.extents_have_gaps() {
            return ExpectedFreeSpace::default();
        }
        let groups: Vec<CheckedGroup> = self.groups.list.clone();
        let mut free = ExpectedFreeSpace { starts: Vec::new(), ranges: Vec::new() };
        let mut at: usize = 0;
        let mut next = groups.first().map_or(0, |group| group.start);
        let begin =
            |free: &mut ExpectedFreeSpace, group: &CheckedGroup| free.starts.push((group.start, free.ranges.len()));
        groups.first().into_iter().for_each(|group| begin(&mut free, group));
        self.for_each_extent(&mut |_, extent| {
            while let Some(group) = groups.get(at).filter(|group| group.end <= extent.bytenr) {
                free.close(next, group.end);
                at = at.saturating_add(1);
                if let Some(group) = groups.get(at) {
                    begin(&mut free, group);
                    next = group.start;
                }
            }
            if groups.get(at).is_some_and(|group| group.start <= extent.bytenr) {
                free.close(next, extent.bytenr);
                next = next.max(extent.bytenr.saturating_add(extent.len_bytes));
            }
        });
        while let Some(group) = groups.get(at) {
            free.close(next, group.end);
            at = at.saturating_add(1);
            if let Some(group) = groups.get(at) {
                begin(&mut free, group);
                next = group.start;
            }
        }
        free
    }
}

/// The expected free ranges of all block groups, in order.
#[derive(Default)]
struct ExpectedFreeSpace {
    /// Start of each group, and the index of its first range.
    starts: Vec<(u64, usize)>,
    ranges: Vec<(u64, u64)>,
}

impl ExpectedFreeSpace {
    fn close(&mut self, from: u64, to: u64) {
        if from < to {
            self.ranges.push((from, to));
        }
    }

    fn of(&self, start: u64) -> Option<&[(u64, u64)]> {
        let at = self.starts.binary_search_by_key(&start, |(start, _)| *start).ok()?;
        let from = self.starts.get(at)?.1;
        let to = self.starts.get(at.saturating_add(1)).map_or(self.ranges.len(), |(_, to)| *to);
        self.ranges.get(from..to)
    }
}

/// Adds a range; joins it to the last range if the two ranges touch.
fn push(ranges: &mut Vec<(u64, u64)>, from: u64, to: u64) {
    match ranges.last_mut() {
        Some((_, end)) if *end == from => *end = to,
        _ => ranges.push((from, to)),
    }
}
