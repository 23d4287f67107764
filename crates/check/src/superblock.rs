//! Checks the copies of the superblock and their root backups.
//!
//! Linux writes all copies at a commit, but only the first copy when it syncs the log. So copies of one generation
//! may differ in the fields of the log.

use ubtrfs_format::codec::Reader;
use ubtrfs_format::item::ChunkItem;
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use ubtrfs_format::{FormatError, Key, KeyType, Logical, RootId, check_superblock, objectid};

use crate::checker::Checker;
use crate::members::MemberDevice;
use crate::problem::{Code, Place, Sink};

/// The system chunks in the superblock.
pub(crate) fn system_chunks(sb: &Superblock) -> Result<Vec<(Logical, ChunkItem)>, FormatError> {
    let array = sb.sys_chunk_array.get(..sb.sys_chunk_array_size as usize).unwrap_or_default();
    let mut reader = Reader::new("sys_chunk_array", array);
    let mut chunks = Vec::new();
    while !reader.is_empty() {
        let key = Key::decode(&reader.array()?);
        if (key.objectid, key.item_type) != (objectid::FIRST_CHUNK_TREE, KeyType::CHUNK_ITEM) {
            let (field, value) = ("key type", key.item_type.0.into());
            return Err(FormatError::Value {
                what: "sys_chunk_array",
                field,
                value,
                expected: "expected a chunk item",
            });
        }
        chunks.push((Logical(key.offset), ChunkItem::read(&mut reader)?));
    }
    Ok(chunks)
}

/// Checks every copy that fits on a device against the newest superblock.
pub(crate) fn check_mirrors(member: &MemberDevice, newest: &Superblock, sink: &mut Sink<'_>) {
    let (device, item) = (&member.device, &member.superblock.dev_item);
    let behind = newest.generation.0.saturating_sub(member.superblock.generation.0);
    // A power cut between the superblocks of two devices leaves one generation of difference, and no content is lost.
    if behind > 1 {
        let text = format!(
            "{} is device {} of generation {}, the newest device has {}: it missed commits",
            device.describe(),
            item.devid,
            member.superblock.generation,
            newest.generation
        );
        sink.report(Code::DeviceStale, Place::default(), text);
    }
    for (mirror, offset) in SUPERBLOCK_OFFSETS.into_iter().enumerate() {
        // Linux expects this copy only if it ends before the end of the device.
        let end = offset.saturating_add(SUPERBLOCK_SIZE as u64);
        if end >= item.total_bytes.min(device.len_bytes()) {
            continue;
        }
        let place = Place::at(offset);
        let name = format!("superblock copy {mirror} of {}", device.describe());
        let mut raw = vec![0; SUPERBLOCK_SIZE];
        if let Err(error) = device.read_at(offset, &mut raw) {
            sink.report(Code::SuperMirror, place, format!("{name} cannot be read: {error}"));
            continue;
        }
        if raw.iter().all(|&byte| byte == 0) {
            if mirror == 0 {
                // mkfs always writes the first copy, so zeros mean that the copy was overwritten. Linux mounts only
                // from this copy.
                let text = format!("{name} was overwritten with zeros; Linux does not mount the filesystem without it");
                sink.report(Code::SuperMirror, place, text);
                continue;
            }
            // An image that was restored from a metadata dump has only the first copy. The next commit writes the other
            // copies, so zeros in their place are no damage.
            sink.report(Code::SuperMissing, place, format!("{name} was never written"));
            continue;
        }
        let own = match Superblock::decode(&raw) {
            Ok(own) => own,
            Err(error) => {
                sink.report(Code::SuperMirror, place, format!("{name}: {error}"));
                continue;
            }
        };
        if let Err(error) = check_superblock(&own, &raw) {
            sink.report(Code::SuperMirror, place, format!("{name}: {error}"));
            continue;
        }
        if own.bytenr != offset {
            sink.report(Code::SuperMirror, place, format!("{name} has the address {}, expected {offset}", own.bytenr));
        }
        if own.fsid != newest.fsid {
            sink.report(Code::SuperMirror, place, format!("{name} belongs to filesystem {}", own.fsid));
            continue;
        }
        if own.generation != newest.generation {
            let text = format!("{name} has generation {}, the newest copy {}", own.generation, newest.generation);
            sink.report(Code::SuperOld, place, text);
            continue;
        }
        for field in differences(&own, newest) {
            sink.report(Code::SuperFields, place, format!("{name} differs from the newest in {field}"));
        }
    }
}

/// Returns the names of fields in which copies of one generation must agree but do not.
fn differences(own: &Superblock, newest: &Superblock) -> Vec<&'static str> {
    let fields: [(&str, bool); 19] = [
        ("root", own.root == newest.root),
        ("chunk_root", own.chunk_root == newest.chunk_root),
        ("chunk_root_generation", own.chunk_root_generation == newest.chunk_root_generation),
        ("total_bytes", own.total_bytes == newest.total_bytes),
        ("bytes_used", own.bytes_used == newest.bytes_used),
        ("num_devices", own.num_devices == newest.num_devices),
        ("sectorsize", own.sectorsize == newest.sectorsize),
        ("nodesize", own.nodesize == newest.nodesize),
        ("sys_chunk_array_size", own.sys_chunk_array_size == newest.sys_chunk_array_size),
        ("sys_chunk_array", own.sys_chunk_array == newest.sys_chunk_array),
        ("compat_ro_flags", own.compat_ro_flags == newest.compat_ro_flags),
        ("incompat_flags", own.incompat_flags == newest.incompat_flags),
        ("csum_type", own.csum_type == newest.csum_type),
        ("root_level", own.root_level == newest.root_level),
        ("chunk_root_level", own.chunk_root_level == newest.chunk_root_level),
        ("label", own.label == newest.label),
        ("cache_generation", own.cache_generation == newest.cache_generation),
        ("uuid_tree_generation", own.uuid_tree_generation == newest.uuid_tree_generation),
        ("metadata_uuid", own.metadata_uuid == newest.metadata_uuid),
    ];
    fields.into_iter().filter(|(_, same)| !same).map(|(name, _)| name).collect()
}

/// Checks the newest root backup: it is not newer than the superblock and, if it is of the superblock's generation,
/// names the current roots.
pub(crate) fn check_backups(checker: &mut Checker<'_>) {
    let sb = &checker.sb;
    let backups = &sb.super_roots;
    let Some(newest) = backups.iter().max_by_key(|backup| backup.tree_root_gen) else { return };
    // There are no root backups.
    if newest.tree_root_gen.0 == 0 {
        return;
    }
    if newest.tree_root_gen > sb.generation {
        let text = format!("a root backup has generation {}, the superblock {}", newest.tree_root_gen, sb.generation);
        checker.sink.report(Code::SuperBackup, Place::default(), text);
    } else if newest.tree_root_gen == sb.generation && (newest.tree_root, newest.chunk_root) != (sb.root, sb.chunk_root)
    {
        let text = format!("the root backup of generation {} names other roots than the superblock", sb.generation);
        checker.sink.report(Code::SuperBackup, Place::default(), text);
    } else if newest.tree_root_gen == sb.generation {
        let fs = checker.roots.tree(RootId::FS_TREE).map(|root| root.bytenr);
        let fs_differs =
            checker.sb.super_roots.iter().any(|backup| {
                backup.tree_root_gen == checker.sb.generation && fs.is_some_and(|fs| backup.fs_root.0 != fs)
            });
        if fs_differs {
            checker.sink.report(Code::SuperBackup, Place::default(), "the newest root backup names another top level");
        }
    }
}
