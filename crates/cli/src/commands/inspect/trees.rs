//! The names and numbers of trees, as `btrfs inspect-internal dump-tree` takes and prints them.

use ubtrfs_format::RootId;

/// Names for `-t`, without the suffix `_tree`.
const NAMES: [(&str, RootId); 18] = [
    ("root", RootId::ROOT_TREE),
    ("extent", RootId::EXTENT_TREE),
    ("chunk", RootId::CHUNK_TREE),
    ("dev", RootId::DEV_TREE),
    ("device", RootId::DEV_TREE),
    ("fs", RootId::FS_TREE),
    ("csum", RootId::CSUM_TREE),
    ("checksum", RootId::CSUM_TREE),
    ("quota", RootId::QUOTA_TREE),
    ("uuid", RootId::UUID_TREE),
    ("free_space", RootId::FREE_SPACE_TREE),
    ("block_group", RootId::BLOCK_GROUP_TREE),
    ("raid_stripe", RootId::RAID_STRIPE_TREE),
    ("tree_log", RootId::TREE_LOG),
    ("log", RootId::TREE_LOG),
    ("tree_reloc", RootId::TREE_RELOC),
    ("reloc", RootId::TREE_RELOC),
    ("data_reloc", RootId::DATA_RELOC_TREE),
];

/// Parses a tree's name or number.
pub(super) fn parse(text: &str) -> Result<RootId, String> {
    if let Ok(id) = text.parse() {
        return Ok(RootId(id));
    }
    let name = text.to_ascii_lowercase().replace('-', "_");
    let short = name.strip_suffix("_tree").unwrap_or(&name);
    let known = NAMES.iter().find(|(known, _)| *known == short || *known == name);
    known.map(|(_, id)| *id).ok_or_else(|| {
        let names: Vec<&str> = NAMES.iter().map(|(name, _)| *name).collect();
        format!("'{text}' is not a tree; write its number or one of {}", names.join(", "))
    })
}

/// The heading of a tree.
pub(super) fn title(tree: RootId) -> &'static str {
    match tree {
        RootId::ROOT_TREE => "root tree",
        RootId::CHUNK_TREE => "chunk tree",
        RootId::EXTENT_TREE => "extent tree",
        RootId::DEV_TREE => "device tree",
        RootId::FS_TREE => "fs tree",
        RootId::CSUM_TREE => "checksum tree",
        RootId::QUOTA_TREE => "quota tree",
        RootId::UUID_TREE => "uuid tree",
        RootId::FREE_SPACE_TREE => "free space tree",
        RootId::BLOCK_GROUP_TREE => "block group tree",
        RootId::RAID_STRIPE_TREE => "raid stripe tree",
        RootId::TREE_LOG => "log tree",
        RootId::TREE_RELOC => "reloc tree",
        RootId::DATA_RELOC_TREE => "data reloc tree",
        _ if tree.is_subvolume() => "file tree",
        _ => "unknown tree",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_are_named_as_in_btrfs_progs() {
        for name in ["FS_TREE", "fs_tree", "Fs", "fs", "5"] {
            assert_eq!(parse(name), Ok(RootId::FS_TREE), "{name}");
        }
        assert_eq!(parse("device"), Ok(RootId::DEV_TREE));
        assert_eq!(parse("257"), Ok(RootId(257)));
        assert_eq!(parse("block-group"), Ok(RootId::BLOCK_GROUP_TREE));
        assert!(parse("-9").is_err() && parse("").is_err() && parse("tree").is_err());
    }
}
