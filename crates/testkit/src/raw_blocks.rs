//! Finds the tree blocks in the bytes of an image, so that tests can damage them in place.
//!
//! `btrfs inspect-internal dump-tree` lists the live blocks. The copies of the live blocks are found by scanning the
//! image for headers with the filesystem's id. The only code of ubtrfs used here is the layout of the header.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use ubtrfs_format::CsumType;

use crate::{Image, run};

/// A live tree block.
#[derive(Clone, Debug)]
pub struct RawBlock {
    /// Logical address.
    pub bytenr: u64,
    /// The tree that the block belongs to.
    pub owner: u64,
    /// The level; 0 for a leaf.
    pub level: u8,
    /// Number of items.
    pub nritems: u32,
    /// Offsets of the copies in the image.
    pub copies: Vec<u64>,
}

impl RawBlock {
    /// Finds all live tree blocks of an unmounted image.
    pub fn live(image: &Image) -> Result<Vec<Self>> {
        let raw = std::fs::read(image.path())?;
        let sb = &raw[65_536..65_536 + 4096];
        let fsid = &sb[32..48];
        let nodesize = u32::from_le_bytes(sb[148..152].try_into()?) as usize;
        let csum_type = u16::from_le_bytes(sb[196..198].try_into()?);
        let csum_type = CsumType::from_disk(csum_type).context("an unknown checksum")?;
        let mut places: BTreeMap<(u64, u64), Vec<u64>> = BTreeMap::new();
        for (index, sector) in raw.chunks_exact(4096).enumerate() {
            if &sector[32..48] == fsid && &sector[64..72] != b"_BHRfS_M" {
                let offset = index * 4096;
                let field = |at: usize| u64::from_le_bytes(sector[at..at + 8].try_into().expect("eight bytes"));
                let whole = &raw[offset..(offset + nodesize).min(raw.len())];
                let csum = csum_type.compute(&whole[32..]);
                if csum[..csum_type.size()] == whole[..csum_type.size()] {
                    places.entry((field(48), field(80))).or_default().push(offset as u64);
                }
            }
        }
        let text = run("btrfs", ["inspect-internal".as_ref(), "dump-tree".as_ref(), image.path().as_os_str()])?;
        let mut blocks = Vec::new();
        for line in text.lines().filter(|line| line.starts_with("leaf ") || line.starts_with("node ")) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let after = |name: &str| words.iter().position(|word| *word == name).and_then(|at| words.get(at + 1));
            let (Some(items), Some(generation)) = (after("items"), after("generation")) else { continue };
            let bytenr = words[1].parse()?;
            let copies = places.get(&(bytenr, generation.parse()?)).context("a live block was not found")?.clone();
            let at = usize::try_from(copies[0])?;
            blocks.push(Self {
                bytenr,
                owner: u64::from_le_bytes(raw[at + 88..at + 96].try_into()?),
                level: raw[at + 100],
                nritems: items.parse()?,
                copies,
            });
        }
        blocks.sort_by_key(|block| block.bytenr);
        blocks.dedup_by_key(|block| block.bytenr);
        Ok(blocks)
    }

    /// Whether the block belongs to a subvolume.
    pub fn is_subvolume(&self) -> bool {
        self.owner == 5 || (256..u64::MAX - 256).contains(&self.owner)
    }
}
