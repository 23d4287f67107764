//! Compares space with a naive model that has one state per sector. Method: random operations; all public state is
//! compared after each operation. Proptest prints a failing sequence and keeps its seed.

#![allow(clippy::single_range_in_vec_init, reason = "lists of one free range")]

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use proptest::prelude::*;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::{Generation, Logical};
use ubtrfs_space::{BlockGroup, DirtyGroup, Extent, Reservation, Space, SpaceConfig, SpaceKind};

const SECTOR: u64 = 4096;
const NODE: u64 = 16384;
const GROUP_SECTORS: u64 = 96;
const NR_GROUPS: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sector {
    Free,
    Mirror,
    Allocated,
    Used,
    Pinned(u64),
}

#[derive(Clone, Debug)]
enum Op {
    Allocate {
        metadata: bool,
        want: u64,
        min: u64,
        hint: Option<u64>,
    },
    Release(usize),
    Add(usize),
    Remove(usize),
    Commit,
    /// Makes a data reservation of this number of sectors, and then drops the previous reservation.
    Reserve(u64),
    ReadOnly(u64, bool),
}

#[derive(Default)]
struct Model {
    sectors: BTreeMap<u64, Sector>,
    read_only: BTreeMap<u64, bool>,
    allocated: Vec<Extent>,
    used: Vec<Extent>,
    generation: u64,
}

fn kind_of(group: u64) -> SpaceKind {
    if group.is_multiple_of(2) { SpaceKind::Data } else { SpaceKind::Metadata }
}

fn group_start(group: u64) -> u64 {
    (16 + group * GROUP_SECTORS) * SECTOR
}

fn group_at(at: u64) -> u64 {
    (at / SECTOR - 16) / GROUP_SECTORS
}

impl Model {
    fn set(&mut self, extent: Extent, from: impl Fn(Sector) -> bool, to: Sector) {
        for at in (extent.bytenr.0..extent.end()).step_by(SECTOR as usize) {
            let sector = self.sectors.get_mut(&at).expect("inside a group");
            assert!(from(*sector), "{at} is {sector:?} before {to:?}");
            *sector = to;
        }
    }

    fn runs(&self, group: u64, wanted: impl Fn(Sector) -> bool) -> Vec<Range<u64>> {
        let start = group_start(group);
        let mut runs: Vec<Range<u64>> = Vec::new();
        for (&at, _) in self.sectors.range(start..start + GROUP_SECTORS * SECTOR).filter(|(_, sector)| wanted(**sector))
        {
            match runs.last_mut() {
                Some(last) if last.end == at => last.end += SECTOR,
                _ => runs.push(at..at + SECTOR),
            }
        }
        runs
    }

    /// The sectors that the free space tree does not contain.
    fn used_sectors(&self) -> BTreeSet<u64> {
        self.sectors.iter().filter(|(_, sector)| **sector == Sector::Used).map(|(at, _)| *at).collect()
    }

    fn bytes(&self, kind: SpaceKind, wanted: impl Fn(Sector) -> bool) -> u64 {
        let count =
            self.sectors.iter().filter(|(at, sector)| kind_of(group_at(**at)) == kind && wanted(**sector)).count();
        count as u64 * SECTOR
    }

    fn longest(&self, kind: SpaceKind, align: u64, groups: u64) -> u64 {
        let writable = (0..groups).filter(|group| kind_of(*group) == kind && !self.read_only[group]);
        let runs = writable.flat_map(|group| self.runs(group, |sector| sector == Sector::Free));
        runs.map(|run| run.end.saturating_sub(run.start.next_multiple_of(align)) / align * align).max().unwrap_or(0)
    }
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (any::<bool>(), 1..40u64, 1..8u64, prop::option::of(0..500u64))
            .prop_map(|(metadata, want, min, hint)| Op::Allocate { metadata, want, min, hint }),
        2 => any::<usize>().prop_map(Op::Release),
        4 => any::<usize>().prop_map(Op::Add),
        4 => any::<usize>().prop_map(Op::Remove),
        1 => Just(Op::Commit),
        1 => (0..400u64).prop_map(Op::Reserve),
        1 => (0..4u64, any::<bool>()).prop_map(|(group, read_only)| Op::ReadOnly(group, read_only)),
    ]
}

/// Makes the space and its model from a list of extents. For each extent, the list has its group, and its position and
/// length in quarters of a node. Extents that are not aligned to nodes, overlap others or lie outside of their group
/// are left out.
fn space_and_model(used: &[(u64, u64, u64)]) -> (Space, Model) {
    let space = Space::new(SpaceConfig { sectorsize: SECTOR as u32, nodesize: NODE as u32, mixed: false });
    let mut model = Model { generation: 7, ..Model::default() };
    for group in 0..NR_GROUPS {
        let start = group_start(group);
        for index in 0..GROUP_SECTORS {
            let mirror = group == 1 && (40..56).contains(&index);
            model.sectors.insert(start + index * SECTOR, if mirror { Sector::Mirror } else { Sector::Free });
        }
        model.read_only.insert(group, false);
        for (_, at, len) in used.iter().filter(|(wanted, _, _)| *wanted == group) {
            let extent = Extent::new(Logical(start + at * NODE / 4), len * NODE / 4);
            let inside = extent.end() <= start + GROUP_SECTORS * SECTOR;
            let mut sectors = (extent.bytenr.0..extent.end()).step_by(SECTOR as usize);
            if inside && extent.bytenr.0.is_multiple_of(NODE) && sectors.all(|at| model.sectors[&at] == Sector::Free) {
                model.set(extent, |_| true, Sector::Used);
                model.used.push(extent);
            }
        }
        let item = BlockGroup {
            start: Logical(start),
            len_bytes: GROUP_SECTORS * SECTOR,
            flags: kind_of(group).flags(),
            used: model.runs(group, |sector| sector == Sector::Used).iter().map(|run| run.end - run.start).sum(),
        };
        let free = model.runs(group, |sector| sector != Sector::Used);
        let mirrors = model.runs(group, |sector| sector == Sector::Mirror);
        space.insert_block_group(item, free, mirrors).expect("valid");
    }
    (space, model)
}

/// Does an operation in the space and in the model, and compares the results.
fn apply(op: Op, space: &Space, model: &mut Model, reservation: &mut Option<Reservation>) -> Result<(), TestCaseError> {
    match op {
        Op::Allocate { metadata, want, min, hint } => {
            let kind = if metadata { SpaceKind::Metadata } else { SpaceKind::Data };
            let align = if metadata { NODE } else { SECTOR };
            let (want, min) = (want.max(min) * SECTOR, min * SECTOR);
            let longest = model.longest(kind, align, NR_GROUPS);
            let (whole, least) = (want.next_multiple_of(align), min.next_multiple_of(align));
            let got = space.allocate(kind, want, min, hint.map(|hint| Logical(hint * SECTOR)));
            prop_assert_eq!(got.is_some(), longest >= least);
            if let Some(extent) = got {
                prop_assert_eq!(extent.len_bytes, whole.min(longest));
                prop_assert_eq!(extent.bytenr.0 % align, 0);
                prop_assert_eq!(kind_of(group_at(extent.bytenr.0)), kind);
                prop_assert!(!model.read_only[&group_at(extent.bytenr.0)]);
                model.set(extent, |sector| sector == Sector::Free, Sector::Allocated);
                model.allocated.push(extent);
            }
        }
        Op::Release(index) if !model.allocated.is_empty() => {
            let extent = model.allocated.swap_remove(index % model.allocated.len());
            model.set(extent, |sector| sector == Sector::Allocated, Sector::Free);
            space.release(extent);
        }
        Op::Add(index) if !model.allocated.is_empty() => {
            let extent = model.allocated.swap_remove(index % model.allocated.len());
            model.set(extent, |sector| sector == Sector::Allocated, Sector::Used);
            model.used.push(extent);
            space.extents_added(&[extent]).expect("allocated");
            prop_assert!(space.extents_added(&[extent]).is_err());
        }
        Op::Remove(index) if !model.used.is_empty() => {
            let extent = model.used.swap_remove(index % model.used.len());
            model.set(extent, |sector| sector == Sector::Used, Sector::Pinned(model.generation));
            space.extent_removed(extent, Generation(model.generation)).expect("used");
            prop_assert!(space.extent_removed(extent, Generation(model.generation)).is_err());
        }
        Op::Commit => {
            let upto = model.generation - 1;
            let freed: u64 = space.unpin(Generation(upto)).iter().map(|extent| extent.len_bytes).sum();
            let pinned = |sector| matches!(sector, Sector::Pinned(generation) if generation <= upto);
            let expected = model.bytes(SpaceKind::Data, pinned) + model.bytes(SpaceKind::Metadata, pinned);
            prop_assert_eq!(freed, expected);
            for sector in model.sectors.values_mut().filter(|sector| pinned(**sector)) {
                *sector = Sector::Free;
            }
            model.generation += 1;
        }
        Op::Reserve(sectors) => *reservation = space.reserve(SpaceKind::Data, sectors * SECTOR).ok(),
        Op::ReadOnly(group, true) => {
            let in_group = model.runs(group, |sector| sector == Sector::Free);
            let free_in_group: u64 = in_group.iter().map(|run| run.end - run.start).sum();
            let info = space.info(SpaceKind::Data);
            let expected = kind_of(group) != SpaceKind::Data
                || model.read_only[&group]
                || info.free - free_in_group >= info.may_use;
            prop_assert_eq!(space.try_set_read_only(Logical(group_start(group))), expected);
            if expected {
                model.read_only.insert(group, true);
            }
        }
        Op::ReadOnly(group, false) => {
            model.read_only.insert(group, false);
            space.set_writable(Logical(group_start(group)));
        }
        _ => {}
    }
    Ok(())
}

/// Compares all public state of the space with the model.
fn compare(space: &Space, model: &Model, reservation: Option<&Reservation>) -> Result<(), TestCaseError> {
    for group in 0..NR_GROUPS {
        let start = Logical(group_start(group));
        let expected = model.runs(group, |sector| sector != Sector::Used);
        prop_assert_eq!(space.nr_disk_free(start), expected.len() as u64);
        prop_assert_eq!(space.disk_free(start, &(0..u64::MAX)), expected);
        let used: u64 = model.runs(group, |sector| sector == Sector::Used).iter().map(|run| run.end - run.start).sum();
        prop_assert_eq!(space.block_group_at(start).expect("there").used, used);
    }
    for kind in [SpaceKind::Data, SpaceKind::Metadata] {
        let info = space.info(kind);
        prop_assert_eq!(info.used, model.bytes(kind, |sector| sector == Sector::Used));
        prop_assert_eq!(info.reserved, model.bytes(kind, |sector| sector == Sector::Allocated));
        prop_assert_eq!(info.pinned, model.bytes(kind, |sector| matches!(sector, Sector::Pinned(_))));
        let writable = (0..NR_GROUPS).filter(|group| kind_of(*group) == kind && !model.read_only[group]);
        let free: Vec<_> = writable.flat_map(|group| model.runs(group, |sector| sector == Sector::Free)).collect();
        prop_assert_eq!(info.free, free.iter().map(|run| run.end - run.start).sum::<u64>());
        prop_assert_eq!(info.nr_free_ranges, free.len() as u64);
        if kind == SpaceKind::Data {
            prop_assert_eq!(info.may_use, reservation.map_or(0, Reservation::bytes));
        }
        prop_assert_eq!(info.total, info.used + info.reserved + info.pinned + info.readonly + info.free);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn space_agrees_with_a_sector_array(
        used in prop::collection::vec((0..4u64, 0..20u64, 1..5u64), 0..12),
        ops in prop::collection::vec(op(), 1..150),
    ) {
        let (space, mut model) = space_and_model(&used);
        prop_assert_eq!(space.take_dirty_groups().len(), 4);
        let mut reservation = None;
        let mut on_disk = model.used_sectors();
        for (number, op) in ops.into_iter().enumerate() {
            apply(op, &space, &mut model, &mut reservation)?;
            compare(&space, &model, reservation.as_ref())?;
            if number % 5 == 0 {
                let used = model.used_sectors();
                for DirtyGroup { start, changed } in space.take_dirty_groups() {
                    prop_assert!(changed.windows(2).all(|pair| pair[0].end < pair[1].start), "{start}: {changed:?}");
                    on_disk.retain(|at| !changed.iter().any(|range| range.contains(at)));
                    on_disk.extend(used.iter().filter(|at| changed.iter().any(|range| range.contains(at))));
                }
                prop_assert_eq!(&on_disk, &used);
            }
        }
    }
}

fn one_group(kind: SpaceKind, len_bytes: u64) -> Space {
    let space = Space::new(SpaceConfig { sectorsize: SECTOR as u32, nodesize: NODE as u32, mixed: false });
    add_group(&space, kind, 1 << 20, len_bytes);
    space
}

fn add_group(space: &Space, kind: SpaceKind, start: u64, len_bytes: u64) {
    let item = BlockGroup { start: Logical(start), len_bytes, flags: kind.flags(), used: 0 };
    space.insert_block_group(item, vec![start..start + len_bytes], Vec::new()).expect("valid");
}

#[test]
fn consecutive_allocations_are_adjacent() {
    let space = one_group(SpaceKind::Metadata, 64 << 20);
    let mut end = 1 << 20;
    for _ in 0..1000 {
        let extent = space.allocate(SpaceKind::Metadata, NODE, NODE, None).expect("room");
        assert_eq!(extent.bytenr.0, end);
        end = extent.end();
    }
}

#[test]
fn a_hint_continues_an_extent_and_leaves_the_cursor() {
    let space = one_group(SpaceKind::Data, 64 << 20);
    let first = space.allocate(SpaceKind::Data, SECTOR, SECTOR, Some(Logical(32 << 20))).expect("room");
    assert_eq!(first.bytenr.0, 32 << 20);
    let second = space.allocate(SpaceKind::Data, 1 << 20, SECTOR, Some(Logical(first.end()))).expect("room");
    assert_eq!(second.bytenr.0, first.end());
    assert_eq!(space.allocate(SpaceKind::Data, SECTOR, SECTOR, None).expect("room").bytenr.0, 1 << 20);
}

#[test]
fn fill_and_free_cycles_end_with_the_same_free_space() {
    let space = one_group(SpaceKind::Data, 8 << 20);
    let before = (space.info(SpaceKind::Data), space.disk_free(Logical(1 << 20), &(0..u64::MAX)));
    for generation in 1..20 {
        let mut extents = Vec::new();
        while let Some(extent) = space.allocate(SpaceKind::Data, (generation * 3 + 1) * SECTOR, SECTOR, None) {
            extents.push(extent);
        }
        assert_eq!(space.info(SpaceKind::Data).free, 0);
        for (index, extent) in extents.into_iter().enumerate() {
            if index % 3 == 0 {
                space.release(extent);
            } else {
                space.extents_added(&[extent]).expect("allocated");
                space.extent_removed(extent, Generation(generation)).expect("added");
            }
        }
        let discard = space.start_unpin(Generation(generation));
        assert!(space.info(SpaceKind::Data).pinned > 0);
        space.finish_unpin(&discard);
        assert_eq!((space.info(SpaceKind::Data), space.disk_free(Logical(1 << 20), &(0..u64::MAX))), before);
    }
    assert_eq!(space.empty_groups().len(), 1);
}

#[test]
fn freed_space_is_not_reused_before_it_is_unpinned() {
    let space = one_group(SpaceKind::Metadata, NODE * 2);
    let extent = space.allocate(SpaceKind::Metadata, NODE * 2, NODE, None).expect("room");
    space.extents_added(&[extent]).expect("allocated");
    space.extent_removed(extent, Generation(5)).expect("added");
    assert_eq!(space.allocate(SpaceKind::Metadata, NODE, NODE, None), None);
    assert!(space.unpin(Generation(4)).is_empty());
    assert_eq!(space.allocate(SpaceKind::Metadata, NODE, NODE, None), None);
    assert_eq!(space.unpin(Generation(5)), [extent]);
    assert!(space.allocate(SpaceKind::Metadata, NODE, NODE, None).is_some());
}

#[test]
fn tight_runs_are_used_before_empty_groups() {
    let space = one_group(SpaceKind::Data, 64 << 20);
    let filler = space.allocate(SpaceKind::Data, 40 << 20, SECTOR, None).expect("room");
    add_group(&space, SpaceKind::Data, 1 << 30, 1 << 30);
    let whole = space.allocate(SpaceKind::Data, 24 << 20, SECTOR, None).expect("room");
    assert_eq!(whole.bytenr.0, filler.end());
    assert_eq!(space.allocate(SpaceKind::Data, SECTOR, SECTOR, None).expect("room").bytenr.0, 1 << 30);
}

#[test]
fn reservations_return_when_dropped_and_never_exceed_the_space() {
    let space = one_group(SpaceKind::Data, 1 << 20);
    let mut first = space.reserve(SpaceKind::Data, 1 << 19).expect("room");
    let second = space.reserve(SpaceKind::Data, 1 << 19).expect("room");
    let shortage = space.reserve(SpaceKind::Data, SECTOR).expect_err("full");
    assert_eq!((shortage.missing_bytes, shortage.may_use_bytes), (SECTOR, 1 << 20));
    let extent = space.allocate(SpaceKind::Data, 1 << 18, SECTOR, None).expect("room");
    assert_eq!(first.consume(extent.len_bytes), extent.len_bytes);
    let part = first.split(1 << 17);
    assert_eq!((first.bytes(), part.bytes(), space.live_reservations()), (1 << 17, 1 << 17, (3, 3 << 18)));
    first.merge(part);
    assert_eq!((first.bytes(), space.live_reservations().0), (1 << 18, 2));
    drop(second);
    drop(first);
    assert_eq!((space.info(SpaceKind::Data).may_use, space.live_reservations()), (0, (0, 0)));
    let _rest = space.reserve(SpaceKind::Data, (1 << 20) - (1 << 18)).expect("all that is left");
    assert!(space.reserve(SpaceKind::Data, 1).is_err());
}

#[test]
fn metadata_is_overcommitted_and_data_is_not() {
    let space = one_group(SpaceKind::Data, 1 << 20);
    add_group(&space, SpaceKind::Metadata, 1 << 30, 1 << 20);
    space.set_unallocated(1 << 30, 1 << 20);
    assert_eq!(space.reserve(SpaceKind::Data, 2 << 20).expect_err("no overcommit").unallocated_bytes, 1 << 30);
    let _held = space.reserve(SpaceKind::Metadata, 3 << 19).expect("overcommit");
    assert!(space.reserve(SpaceKind::Metadata, 1).is_err());
}

#[test]
fn the_global_reserve_is_used_last_and_filled_first() {
    let space = one_group(SpaceKind::Metadata, 1 << 20);
    space.set_global_reserve(1 << 18);
    let all = space.reserve(SpaceKind::Metadata, 3 << 18).expect("room");
    assert!(space.reserve(SpaceKind::Metadata, NODE).is_err());
    let unlink = space.reserve_from_global(NODE).expect("the global reserve");
    assert!(space.reserve_from_global(1 << 18).is_err());
    assert_eq!(space.info(SpaceKind::Metadata).global_reserved, (1 << 18) - NODE);
    drop(unlink);
    assert_eq!(space.info(SpaceKind::Metadata).global_reserved, 1 << 18);
    drop(all);
    assert_eq!((space.info(SpaceKind::Metadata).may_use, space.live_reservations().0), (0, 0));
}

#[test]
fn contradicting_content_is_an_error() {
    let space = one_group(SpaceKind::Data, 1 << 20);
    let start = Logical(1 << 20);
    let overlap = BlockGroup { start: Logical(3 << 19), len_bytes: 1 << 20, flags: BlockGroupFlags::METADATA, used: 0 };
    assert!(space.insert_block_group(overlap, Vec::new(), Vec::new()).is_err());
    let flags = BlockGroup { start: Logical(1 << 30), flags: BlockGroupFlags::all(), ..overlap };
    assert!(space.insert_block_group(flags, Vec::new(), Vec::new()).is_err());
    let outside = BlockGroup { start: Logical(1 << 30), ..overlap };
    assert!(space.insert_block_group(outside, vec![0..SECTOR], Vec::new()).is_err());
    assert!(space.extents_added(&[Extent::new(start, SECTOR)]).is_err(), "nobody allocated it");
    assert!(space.extent_removed(Extent::new(start, SECTOR), Generation(1)).is_err(), "it is free");
    assert!(space.extent_removed(Extent::new(Logical(1 << 40), SECTOR), Generation(1)).is_err());
    let overfull = BlockGroup { start: Logical(1 << 40), used: (1 << 20) + 1, ..overlap };
    assert!(space.insert_block_group(overfull, Vec::new(), Vec::new()).is_err());
    let endless = BlockGroup { start: Logical(1 << 40), len_bytes: u64::MAX, ..overlap };
    assert!(space.insert_block_group(endless, Vec::new(), Vec::new()).is_err());
}

#[test]
fn mixed_groups_serve_both_kinds() {
    let space = Space::new(SpaceConfig { sectorsize: SECTOR as u32, nodesize: SECTOR as u32, mixed: true });
    let flags = BlockGroupFlags::DATA | BlockGroupFlags::METADATA;
    let item = BlockGroup { start: Logical(1 << 20), len_bytes: 1 << 20, flags, used: 0 };
    space.insert_block_group(item, vec![1 << 20..2 << 20], Vec::new()).expect("valid");
    assert!(space.allocate(SpaceKind::Data, SECTOR, SECTOR, None).is_some());
    assert!(space.allocate(SpaceKind::Metadata, SECTOR, SECTOR, None).is_some());
    assert_eq!(space.info(SpaceKind::Data), space.info(SpaceKind::Metadata));
}
