//! Filters that choose the block groups of a balance.
//!
//! Source: the documentation of `btrfs balance`, and the behaviour of Linux for each filter.

use ubtrfs_format::Profile;
use ubtrfs_format::item::{BalanceArgs, BalanceFilters, BalanceItem, BlockGroupFlags, ChunkItem};
use ubtrfs_transaction::BlockGroup;

/// Returns the filters for a block group's type, or `None` if the balance excludes the type. Mixed groups count as
/// data.
pub(crate) fn args_for(item: &BalanceItem, flags: BlockGroupFlags) -> Option<&BalanceArgs> {
    let kinds = [
        (BlockGroupFlags::DATA, &item.data),
        (BlockGroupFlags::SYSTEM, &item.system),
        (BlockGroupFlags::METADATA, &item.metadata),
    ];
    let (kind, args) = kinds.into_iter().find(|(kind, _)| flags.contains(*kind))?;
    // `BalanceFlags` and `BlockGroupFlags` have equal bits for the types.
    (item.flags & kind.bits() != 0).then_some(args)
}

/// The bit that stands for a block group's profile in filters.
pub(crate) fn profile_of(flags: BlockGroupFlags) -> u64 {
    Profile::of(flags).map_or(0, BalanceArgs::profile_bit)
}

/// Whether the filters, apart from the limit on the number of block groups, select a block group.
pub(crate) fn takes(args: &BalanceArgs, group: &BlockGroup, chunk: &ChunkItem) -> bool {
    let stripe_len = chunk.device_extent_len();
    let filters = args.filters();
    let profile = profile_of(group.flags);
    let on_device = |stripe: &&ubtrfs_format::item::Stripe| {
        !filters.contains(BalanceFilters::DEVID) || stripe.devid.0 == args.devid
    };
    let mut stripes = chunk.stripes.iter().filter(on_device);
    let has_place = match filters.contains(BalanceFilters::DRANGE) {
        true => stripes
            .any(|stripe| stripe.offset.0 < args.pend && stripe.offset.0.saturating_add(stripe_len) > args.pstart),
        false => stripes.next().is_some(),
    };
    let nr_stripes = chunk.stripes.len() as u64;
    let is_converted = filters.contains(BalanceFilters::CONVERT | BalanceFilters::SOFT) && profile == args.target;
    let in_range = |filter, ok: bool| !filters.contains(filter) || ok;
    has_place
        && !is_converted
        && in_range(BalanceFilters::PROFILES, args.profiles & profile != 0)
        && has_usage(args, group)
        && in_range(
            BalanceFilters::VRANGE,
            group.start.0 < args.vend && group.start.0.saturating_add(group.len_bytes) > args.vstart,
        )
        && in_range(
            BalanceFilters::STRIPES_RANGE,
            (u64::from(args.stripes_min)..=u64::from(args.stripes_max)).contains(&nr_stripes),
        )
}

/// Whether the filter `usage`, if there is one, selects a block group.
pub(crate) fn has_usage(args: &BalanceArgs, group: &BlockGroup) -> bool {
    let filters = args.filters();
    let percent = |part: u32| match part {
        0 => 0,
        1..100 => u64::try_from(u128::from(group.len_bytes).saturating_mul(part.into()) / 100).unwrap_or(u64::MAX),
        // An upper limit of 100 percent or more selects every block group, however full.
        _ => u64::MAX,
    };
    // An upper limit of 0 percent selects only empty block groups.
    let below = |part: u32| group.used < percent(part).max(1);
    if filters.contains(BalanceFilters::USAGE_RANGE) {
        return group.used >= percent(args.usage_min.min(100)) && below(args.usage_max)
            || (args.usage_min >= 100 && group.used == group.len_bytes);
    }
    !filters.contains(BalanceFilters::USAGE) || below(args.usage_min)
}

/// The limits on the number of block groups: if fewer block groups than the first number match, none is taken; at most
/// the second number of block groups is taken.
pub(crate) fn limits(args: &BalanceArgs) -> (u64, u64) {
    let filters = args.filters();
    if filters.contains(BalanceFilters::LIMIT_RANGE) {
        (args.limit_min.into(), args.limit_max.into())
    } else if filters.contains(BalanceFilters::LIMIT) {
        (0, u64::from(args.limit_min) | u64::from(args.limit_max) << 32)
    } else {
        (0, u64::MAX)
    }
}

/// Clears the filters of the types that the balance leaves out. If such filters had a target profile, Linux would make new
/// chunks of the type with this profile while it resumes the balance. If there is no room for such chunks, Linux becomes
/// read-only.
pub(crate) fn clear_unused(item: &mut BalanceItem) {
    for (kind, args) in [
        (BlockGroupFlags::DATA, &mut item.data),
        (BlockGroupFlags::METADATA, &mut item.metadata),
        (BlockGroupFlags::SYSTEM, &mut item.system),
    ] {
        if item.flags & kind.bits() == 0 {
            *args = BalanceArgs::NONE;
        }
    }
}

/// Changes the filters for a balance that continues after an interruption: block groups that already have the wanted
/// profile, or are nearly full, are left out. So block groups that the balance made before the interruption are left
/// out too.
pub(crate) fn for_resumption(item: &mut BalanceItem) {
    for args in [&mut item.data, &mut item.metadata, &mut item.system] {
        let mut filters = args.filters();
        if filters.contains(BalanceFilters::CONVERT) {
            filters |= BalanceFilters::SOFT;
        } else if !filters.intersects(BalanceFilters::USAGE | BalanceFilters::USAGE_RANGE) {
            filters |= BalanceFilters::USAGE;
            (args.usage_min, args.usage_max) = (RESUMED_USAGE, 0);
        }
        args.flags |= filters.bits();
    }
}

/// A resumed balance takes only block groups of which less than this percentage is used, as in Linux.
const RESUMED_USAGE: u32 = 90;

#[cfg(test)]
mod tests {
    use ubtrfs_format::Logical;
    use ubtrfs_format::item::Stripe;
    use ubtrfs_format::{DevId, Physical};
    use uuid::Uuid;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn group(used: u64) -> BlockGroup {
        BlockGroup { start: Logical(100 * MIB), len_bytes: 100 * MIB, flags: BlockGroupFlags::DATA, used }
    }

    fn chunk() -> ChunkItem {
        let stripe = |devid, offset| Stripe { devid: DevId(devid), offset: Physical(offset), dev_uuid: Uuid::nil() };
        ChunkItem {
            length: 100 * MIB,
            owner: 2,
            stripe_len: 65536,
            flags: BlockGroupFlags::DATA,
            io_align: 65536,
            io_width: 65536,
            sector_size: 4096,
            sub_stripes: 1,
            stripes: vec![stripe(1, 500 * MIB)],
        }
    }

    fn takes_with(used: u64, filters: BalanceFilters, change: impl FnOnce(&mut BalanceArgs)) -> bool {
        let mut args = BalanceArgs { flags: filters.bits(), ..BalanceArgs::NONE };
        change(&mut args);
        takes(&args, &group(used), &chunk())
    }

    #[test]
    fn usage_is_below_a_limit_and_0_means_empty() {
        let usage = |used, limit| takes_with(used, BalanceFilters::USAGE, |args| args.usage_min = limit);
        assert!(usage(0, 0) && !usage(4096, 0) && usage(49 * MIB, 50) && !usage(50 * MIB, 50));
        assert!(usage(100 * MIB, 100) && usage(100 * MIB, 1000) && !usage(100 * MIB, 99));
        let range = |used, min, max| {
            takes_with(used, BalanceFilters::USAGE_RANGE, |args| (args.usage_min, args.usage_max) = (min, max))
        };
        assert!(range(50 * MIB, 50, 60) && !range(60 * MIB, 50, 60) && !range(49 * MIB, 50, 60));
        assert!(range(100 * MIB, 50, 100) && range(100 * MIB, 100, 100) && range(0, 0, 0));
    }

    #[test]
    fn places_and_profiles_are_told_apart() {
        let device = |devid| takes_with(0, BalanceFilters::DEVID, |args| args.devid = devid);
        assert!(device(1) && !device(2));
        let drange = |start, end| {
            takes_with(0, BalanceFilters::DEVID | BalanceFilters::DRANGE, |args| {
                (args.devid, args.pstart, args.pend) = (1, start * MIB, end * MIB);
            })
        };
        assert!(drange(0, 501) && drange(599, 700) && !drange(0, 500) && !drange(600, 700));
        let vrange = |start, end| {
            takes_with(0, BalanceFilters::VRANGE, |args| (args.vstart, args.vend) = (start * MIB, end * MIB))
        };
        assert!(vrange(0, 101) && vrange(199, 300) && !vrange(0, 100) && !vrange(200, 300));
        let profiles = |profiles| takes_with(0, BalanceFilters::PROFILES, |args| args.profiles = profiles);
        assert!(profiles(BalanceArgs::SINGLE) && !profiles(BlockGroupFlags::DUP.bits()));
        let convert = |filters, target| takes_with(0, filters, |args| args.target = target);
        assert!(convert(BalanceFilters::CONVERT, BalanceArgs::SINGLE));
        assert!(!convert(BalanceFilters::CONVERT | BalanceFilters::SOFT, BalanceArgs::SINGLE));
        let stripes = |min, max| {
            takes_with(0, BalanceFilters::STRIPES_RANGE, |args| (args.stripes_min, args.stripes_max) = (min, max))
        };
        assert!(stripes(1, 2) && !stripes(2, 3));
    }

    #[test]
    fn limits_are_a_number_or_a_range() {
        let of = |flags: BalanceFilters, limit_min, limit_max| {
            limits(&BalanceArgs { flags: flags.bits(), limit_min, limit_max, ..BalanceArgs::NONE })
        };
        assert_eq!(of(BalanceFilters::empty(), 3, 4), (0, u64::MAX));
        assert_eq!(of(BalanceFilters::LIMIT, 3, 0), (0, 3));
        assert_eq!(of(BalanceFilters::LIMIT_RANGE, 3, 4), (3, 4));
    }
}
