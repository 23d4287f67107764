//! Leaf items as text: chunks, devices, block groups, free space, quotas, and the remaining types.

use std::fmt::Write;

use super::item::u64_of;
use super::text::escaped_line;
use super::{KeyText, ObjectidText, Printed, block_group_flags, print_chunk};
use crate::codec::{Field, Reader};
use crate::ids::objectid;
use crate::item::{
    BlockGroupFlags, BlockGroupItem, ChunkItem, DevExtent, DevItem, DevStatsItem, FreeSpaceHeader, FreeSpaceInfo,
    QgroupInfo, QgroupLimit, QgroupStatus,
};
use crate::key::{Key, KeyType};

pub(super) fn print_content(key: &Key, data: &[u8], out: &mut dyn Write) -> Printed {
    match key.item_type {
        KeyType::CHUNK_ITEM => Ok(print_chunk(&ChunkItem::decode(data)?, out)?),
        KeyType::DEV_ITEM => print_dev_item(&DevItem::decode(data)?, out),
        KeyType::DEV_EXTENT => print_dev_extent(&DevExtent::decode(data)?, out),
        KeyType::BLOCK_GROUP_ITEM => print_block_group(&BlockGroupItem::decode(data)?, out),
        KeyType::FREE_SPACE_INFO => {
            let FreeSpaceInfo { extent_count, flags } = FreeSpaceInfo::decode(data)?;
            Ok(writeln!(out, "\t\tfree space info extent count {extent_count} flags {flags}")?)
        }
        KeyType::FREE_SPACE_EXTENT => Ok(writeln!(out, "\t\tfree space extent")?),
        KeyType::FREE_SPACE_BITMAP => Ok(writeln!(out, "\t\tfree space bitmap")?),
        KeyType(0) if key.objectid == objectid::FREE_SPACE => {
            let FreeSpaceHeader { location, generation, num_entries, num_bitmaps } = FreeSpaceHeader::decode(data)?;
            writeln!(out, "\t\tlocation key {}", KeyText(&location))?;
            Ok(writeln!(out, "\t\tcache generation {generation} entries {num_entries} bitmaps {num_bitmaps}")?)
        }
        KeyType::QGROUP_STATUS => print_qgroup_status(&QgroupStatus::decode(data)?, out),
        KeyType::QGROUP_INFO => print_qgroup_info(&QgroupInfo::decode(data)?, out),
        KeyType::QGROUP_LIMIT => print_qgroup_limit(&QgroupLimit::decode(data)?, out),
        KeyType::PERSISTENT_ITEM => print_persistent(key, data, out),
        KeyType::TEMPORARY_ITEM => print_temporary(key, data, out),
        KeyType::UUID_KEY_SUBVOL | KeyType::UUID_KEY_RECEIVED_SUBVOL => {
            for id in data.chunks(8) {
                writeln!(out, "\t\tsubvol_id {}", u64_of("UuidItem", id)?)?;
            }
            Ok(())
        }
        KeyType::STRING_ITEM => Ok(writeln!(out, "\t\titem data {}", escaped_line(data))?),
        KeyType::RAID_STRIPE => {
            for (index, stripe) in data.chunks(16).enumerate() {
                let physical = u64_of("RaidStripe", stripe.get(8..).unwrap_or_default())?;
                writeln!(out, "\t\t\tstripe {index} devid {} physical {physical}", u64_of("RaidStripe", stripe)?)?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn print_dev_item(item: &DevItem, out: &mut dyn Write) -> Printed {
    let DevItem { devid, total_bytes, bytes_used, io_align, io_width, sector_size, dev_type, generation, .. } = item;
    let DevItem { start_offset, dev_group, seek_speed, bandwidth, uuid, fsid, .. } = item;
    writeln!(out, "\t\tdevid {devid} total_bytes {total_bytes} bytes_used {bytes_used}")?;
    writeln!(out, "\t\tio_align {io_align} io_width {io_width} sector_size {sector_size} type {dev_type}")?;
    writeln!(out, "\t\tgeneration {generation} start_offset {start_offset} dev_group {dev_group}")?;
    writeln!(out, "\t\tseek_speed {seek_speed} bandwidth {bandwidth}")?;
    Ok(writeln!(out, "\t\tuuid {uuid}\n\t\tfsid {fsid}")?)
}

fn print_dev_extent(item: &DevExtent, out: &mut dyn Write) -> Printed {
    let DevExtent { chunk_tree, chunk_objectid, chunk_offset, length, chunk_tree_uuid } = item;
    writeln!(out, "\t\tdev extent chunk_tree {chunk_tree}")?;
    writeln!(out, "\t\tchunk_objectid {chunk_objectid} chunk_offset {chunk_offset} length {length}")?;
    Ok(writeln!(out, "\t\tchunk_tree_uuid {chunk_tree_uuid}")?)
}

fn print_block_group(item: &BlockGroupItem, out: &mut dyn Write) -> Printed {
    let BlockGroupItem { used, chunk_objectid, flags } = *item;
    let flags = block_group_flags(BlockGroupFlags::from_bits_retain(flags));
    Ok(writeln!(out, "\t\tblock group used {used} chunk_objectid {chunk_objectid} flags {flags}")?)
}

fn print_qgroup_status(item: &QgroupStatus, out: &mut dyn Write) -> Printed {
    let QgroupStatus { version, generation, flags: bits, rescan } = *item;
    let state = if bits & QgroupStatus::ON != 0 { "ON" } else { "OFF" };
    let further = [(QgroupStatus::RESCAN, "|SCANNING"), (QgroupStatus::INCONSISTENT, "|INCONSISTENT")];
    let further: String = further.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| *name).collect();
    Ok(writeln!(out, "\t\tversion {version} generation {generation} flags {state}{further} scan {rescan}")?)
}

fn print_qgroup_info(item: &QgroupInfo, out: &mut dyn Write) -> Printed {
    let QgroupInfo { generation, rfer, rfer_cmpr, excl, excl_cmpr } = *item;
    writeln!(out, "\t\tgeneration {generation}")?;
    writeln!(out, "\t\treferenced {rfer} referenced_compressed {rfer_cmpr}")?;
    Ok(writeln!(out, "\t\texclusive {excl} exclusive_compressed {excl_cmpr}")?)
}

fn print_qgroup_limit(item: &QgroupLimit, out: &mut dyn Write) -> Printed {
    let QgroupLimit { flags, max_rfer, max_excl, rsv_rfer, rsv_excl } = *item;
    // btrfs-progs prints limits as signed numbers: -1 stands for no limit.
    let [max_rfer, max_excl, rsv_rfer, rsv_excl] = [max_rfer, max_excl, rsv_rfer, rsv_excl].map(u64::cast_signed);
    writeln!(out, "\t\tflags {flags:x}")?;
    writeln!(out, "\t\tmax_referenced {max_rfer} max_exclusive {max_excl}")?;
    Ok(writeln!(out, "\t\trsv_referenced {rsv_rfer} rsv_exclusive {rsv_excl}")?)
}

fn print_persistent(key: &Key, data: &[u8], out: &mut dyn Write) -> Printed {
    if key.objectid != objectid::DEV_STATS {
        writeln!(out, "\t\tpersistent item objectid {} offset {}", key.objectid, key.offset)?;
        return Ok(writeln!(out, "\t\tunknown persistent item objectid {}", key.objectid)?);
    }
    writeln!(out, "\t\tpersistent item objectid DEV_STATS offset {}", key.offset)?;
    let [write, read, flush, corruption, generation] = DevStatsItem::decode(data)?.values;
    writeln!(out, "\t\tdevice stats")?;
    write!(out, "\t\twrite_errs {write} read_errs {read} flush_errs {flush} ")?;
    Ok(writeln!(out, "corruption_errs {corruption} generation {generation}")?)
}

fn print_temporary(key: &Key, data: &[u8], out: &mut dyn Write) -> Printed {
    writeln!(out, "\t\ttemporary item objectid {} offset {}", ObjectidText(key.objectid), key.offset)?;
    if key.objectid != objectid::BALANCE {
        return Ok(writeln!(out, "\t\tunknown temporary item objectid {}", key.objectid)?);
    }
    let mut reader = Reader::new("BalanceItem", data);
    writeln!(out, "\t\tbalance status flags {}", u64::read(&mut reader)?)?;
    for kind in ["DATA", "METADATA", "SYSTEM"] {
        writeln!(out, "\t\t{kind}")?;
        print_balance_args(&mut reader, out)?;
    }
    Ok(())
}

/// Prints the filters of a balance, 136 bytes: profiles u64, usage u32 x 2, devid u64, pstart, pend, vstart, vend,
/// target, flags u64, limit u32 x 2, stripes u32 x 2, unused u64 x 6.
fn print_balance_args(reader: &mut Reader<'_>, out: &mut dyn Write) -> Printed {
    let profiles = u64::read(reader)?;
    let (usage_min, usage_max) = (u32::read(reader)?, u32::read(reader)?);
    let [devid, pstart, pend, vstart, vend, target, flags] = <[u64; 7]>::read(reader)?;
    let (limit_min, limit_max) = (u32::read(reader)?, u32::read(reader)?);
    let (stripes_min, stripes_max) = (u32::read(reader)?, u32::read(reader)?);
    let _unused = <[u64; 6]>::read(reader)?;
    writeln!(out, "\t\tprofiles {profiles} devid {devid} target {target} flags {flags}")?;
    writeln!(out, "\t\tusage_min {usage_min} usage_max {usage_max} pstart {pstart} pend {pend}")?;
    writeln!(out, "\t\tvstart {vstart} vend {vend} limit_min {limit_min} limit_max {limit_max}")?;
    Ok(writeln!(out, "\t\tstripes_min {stripes_min} stripes_max {stripes_max}")?)
}
