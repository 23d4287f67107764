//! Small images that Linux made, which are kept in the repository, and mutations of their blocks with valid
//! checksums.
//!
//! Format of an image file, compressed with zstd:
//!
//! | field | size |
//! |---|---|
//! | bytes of the device | 8 |
//! | number of live blocks | 4 |
//! | per block: owner, number of copies, offset of each copy | 8, 1, 8 each |
//! | number of pages | 4 |
//! | per page: number, content | 4, 4096 |
//!
//! I1. A mutation changes all copies of a block, because an unchanged copy would repair the others.

use std::path::Path;
use std::sync::OnceLock;

use anyhow::{Context, Result};
use ubtrfs_format::Key;
use ubtrfs_format::node::{HEADER_SIZE, ITEM_HEAD_SIZE, KEY_PTR_SIZE, finish_block};
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};

use super::lies;
use crate::corruptor::{build_leaf, take_apart};
use crate::{Image, Medium, RawBlock};

const PAGE: usize = 4096;

/// The items of a leaf.
type Items = Vec<(Key, Vec<u8>)>;

/// A live block.
#[derive(Clone, Debug)]
struct Block {
    owner: u64,
    copies: Vec<u64>,
}

/// An image to mutate.
#[derive(Debug)]
pub struct SeedImage {
    medium: Medium,
    blocks: Vec<Block>,
    sb: Superblock,
}

/// One change, made from eight bytes of a fuzzer's input.
#[derive(Clone, Copy, Debug)]
pub struct Mutation {
    block: u16,
    pub(super) place: u16,
    pub(super) kind: u8,
    pub(super) value: u8,
    pub(super) more: u16,
}

impl SeedImage {
    /// The number of images.
    pub const COUNT: usize = 3;

    /// Returns one of the images.
    ///
    /// # Panics
    /// If the kept file is broken.
    pub fn get(index: usize) -> &'static Self {
        static IMAGES: [OnceLock<SeedImage>; SeedImage::COUNT] = [const { OnceLock::new() }; SeedImage::COUNT];
        const KEPT: [&[u8]; SeedImage::COUNT] = [
            include_bytes!("../../corpus/images/small-nodes.img.zst"),
            include_bytes!("../../corpus/images/default.img.zst"),
            include_bytes!("../../corpus/images/mixed.img.zst"),
        ];
        let index = index % Self::COUNT;
        IMAGES[index].get_or_init(|| Self::decode(KEPT[index]).expect("the kept images are whole"))
    }

    /// Returns an image with a tree log that Linux wrote.
    ///
    /// # Panics
    /// If the kept file is broken.
    pub fn with_log() -> &'static Self {
        static IMAGE: OnceLock<SeedImage> = OnceLock::new();
        const KEPT: &[u8] = include_bytes!("../../corpus/images/log.img.zst");
        IMAGE.get_or_init(|| Self::decode(KEPT).expect("the kept image is whole"))
    }

    /// Encodes an image file.
    pub fn encode(image: &Image) -> Result<Vec<u8>> {
        let medium = Medium::from_image(image.path())?;
        let blocks = RawBlock::live(image)?;
        let mut out = medium.len_bytes().to_le_bytes().to_vec();
        out.extend(u32::try_from(blocks.len())?.to_le_bytes());
        for block in &blocks {
            out.extend(block.owner.to_le_bytes());
            out.push(u8::try_from(block.copies.len())?);
            block.copies.iter().for_each(|copy| out.extend(copy.to_le_bytes()));
        }
        let mut pages = Vec::new();
        let mut page = vec![0; PAGE];
        let mut count = 0u32;
        for number in 0..u32::try_from(medium.len_bytes() / PAGE as u64)? {
            medium.read(u64::from(number) * PAGE as u64, &mut page);
            if page.iter().any(|&byte| byte != 0) {
                count += 1;
                pages.extend(number.to_le_bytes());
                pages.extend_from_slice(&page);
            }
        }
        out.extend(count.to_le_bytes());
        out.extend(pages);
        Ok(zstd::bulk::compress(&out, 19)?)
    }

    /// Writes the encoded image to `path`.
    pub fn keep(image: &Image, path: &Path) -> Result<()> {
        std::fs::write(path, Self::encode(image)?).with_context(|| path.display().to_string())
    }

    fn decode(kept: &[u8]) -> Result<Self> {
        let raw = zstd::decode_all(kept)?;
        let mut rest = raw.as_slice();
        let mut take = |len: usize| -> Result<&[u8]> {
            let (head, tail) = rest.split_at_checked(len).context("cut off")?;
            rest = tail;
            Ok(head)
        };
        let mut medium = Medium::zeros(u64::from_le_bytes(take(8)?.try_into()?));
        let mut blocks = Vec::new();
        for _ in 0..u32::from_le_bytes(take(4)?.try_into()?) {
            let owner = u64::from_le_bytes(take(8)?.try_into()?);
            let nr_copies = take(1)?[0];
            let mut copies = Vec::new();
            for _ in 0..nr_copies {
                copies.push(u64::from_le_bytes(take(8)?.try_into()?));
            }
            blocks.push(Block { owner, copies });
        }
        for _ in 0..u32::from_le_bytes(take(4)?.try_into()?) {
            let number = u32::from_le_bytes(take(4)?.try_into()?);
            medium.write(u64::from(number) * PAGE as u64, take(PAGE)?);
        }
        let mut raw = vec![0; SUPERBLOCK_SIZE];
        medium.read(SUPERBLOCK_OFFSETS[0], &mut raw);
        let sb = Superblock::decode(&raw).map_err(|error| anyhow::anyhow!("{error}"))?;
        Ok(Self { medium, blocks, sb })
    }

    /// Returns the image's content.
    pub fn medium(&self) -> Medium {
        self.medium.clone()
    }

    /// Returns the primary superblock.
    pub(super) fn superblock(&self) -> Vec<u8> {
        let mut raw = vec![0; SUPERBLOCK_SIZE];
        self.medium.read(SUPERBLOCK_OFFSETS[0], &mut raw);
        raw
    }

    pub(super) fn superblock_decoded(&self) -> Superblock {
        self.sb.clone()
    }

    /// Returns the content of a live block.
    pub(super) fn some_block(&self, index: usize) -> Vec<u8> {
        self.read_block(&self.medium, &self.blocks[index % self.blocks.len()])
    }

    fn read_block(&self, medium: &Medium, block: &Block) -> Vec<u8> {
        let mut raw = vec![0; self.sb.nodesize as usize];
        medium.read(block.copies[0], &mut raw);
        raw
    }

    /// Returns the image after `edit` changed the content of every item in the leaves of the wanted trees.
    pub fn edited(&self, wanted: &dyn Fn(u64) -> bool, edit: &dyn Fn(&Key, &mut [u8])) -> Medium {
        self.edited_leaves(wanted, &|items| items.iter_mut().for_each(|(key, data)| edit(key, data)))
    }

    /// Returns the image after `edit` changed the items in each leaf of the wanted trees. The items are sorted
    /// afterwards. A leaf whose edited items no longer fit into it keeps its old content.
    pub fn edited_leaves(&self, wanted: &dyn Fn(u64) -> bool, edit: &dyn Fn(&mut Items)) -> Medium {
        let mut medium = self.medium.clone();
        for block in self.blocks.iter().filter(|block| wanted(block.owner)) {
            let mut raw = self.read_block(&medium, block);
            let is_leaf = raw[100] == 0;
            let Some(mut items) = is_leaf.then(|| take_apart(&raw).ok()).flatten() else { continue };
            edit(&mut items);
            items.sort_by_key(|(key, _)| *key);
            let used: usize = items.iter().map(|(_, data)| data.len() + ITEM_HEAD_SIZE).sum();
            if used + HEADER_SIZE > raw.len() {
                continue;
            }
            raw = build_leaf(&raw, &items);
            finish_block(&mut raw, self.sb.csum_type().unwrap_or_default());
            for copy in &block.copies {
                medium.write(*copy, &raw);
            }
        }
        medium
    }

    /// Chooses the trees to mutate for inputs that test walks of files: usually only subvolume trees, because the fuzz
    /// target `image` covers the other trees.
    pub fn chosen_by(first: u8) -> impl Fn(u64) -> bool {
        let all = (first / 16).is_multiple_of(4);
        move |owner| all || owner == 5 || (256..1 << 48).contains(&owner)
    }

    /// Returns the image after changes to blocks of the wanted trees. Each change takes eight bytes of `program`.
    /// On average, of sixteen changes, one mutates the superblock and two apply `lies`.
    pub fn mutated(&self, program: &[u8], wanted: &dyn Fn(u64) -> bool) -> Medium {
        let mut medium = self.medium.clone();
        let blocks: Vec<&Block> = self.blocks.iter().filter(|block| wanted(block.owner)).collect();
        if blocks.is_empty() {
            return medium;
        }
        for bytes in program.chunks_exact(8).take(64) {
            let mutation = Mutation {
                block: u16::from_le_bytes([bytes[0], bytes[1]]),
                place: u16::from_le_bytes([bytes[2], bytes[3]]),
                kind: bytes[4],
                value: bytes[5],
                more: u16::from_le_bytes([bytes[6], bytes[7]]),
            };
            if mutation.kind >> 4 == 15 {
                let mut raw = vec![0; SUPERBLOCK_SIZE];
                medium.read(SUPERBLOCK_OFFSETS[0], &mut raw);
                self.patch_superblock(&mut raw, mutation);
                put_superblock(&mut medium, raw);
                continue;
            }
            let block = blocks[usize::from(mutation.block) % blocks.len()];
            let other = blocks[usize::from(mutation.more) % blocks.len()];
            let mut raw = self.read_block(&medium, block);
            let other = self.read_block(&medium, other);
            match mutation.kind >> 4 {
                12..=13 => lies::tell(&mut raw, mutation),
                _ => self.patch_block(&mut raw, &other, mutation),
            }
            finish_block(&mut raw, self.sb.csum_type().unwrap_or_default());
            for copy in &block.copies {
                medium.write(*copy, &raw);
            }
        }
        medium
    }

    /// Changes one of the fields that locate trees or describe the filesystem.
    fn patch_superblock(&self, raw: &mut [u8], mutation: Mutation) {
        const FIELDS: &[(usize, usize)] = &[
            (72, 8),   // generation
            (80, 8),   // root
            (88, 8),   // chunk_root
            (96, 8),   // log_root
            (112, 8),  // total_bytes
            (120, 8),  // bytes_used
            (136, 8),  // num_devices
            (144, 4),  // sectorsize
            (148, 4),  // nodesize
            (160, 4),  // sys_chunk_array_size
            (164, 8),  // chunk_root_generation
            (172, 8),  // compat
            (180, 8),  // compat_ro
            (188, 8),  // incompat
            (196, 2),  // csum_type
            (198, 1),  // root_level
            (199, 1),  // chunk_root_level
            (200, 1),  // log_root_level
            (811, 97), // sys_chunk_array
        ];
        let (at, len) = FIELDS[usize::from(mutation.place) % FIELDS.len()];
        let field = &mut raw[at..at + len];
        patch(field, mutation, &self.sb);
    }

    fn patch_block(&self, raw: &mut [u8], other: &[u8], mutation: Mutation) {
        let nritems = u32::from_le_bytes([raw[96], raw[97], raw[98], raw[99]]) as usize;
        let leaf = raw[100] == 0;
        let entry_len = if leaf { ITEM_HEAD_SIZE } else { KEY_PTR_SIZE };
        let slots = ((raw.len() - HEADER_SIZE) / entry_len).min(nritems.max(1));
        let slot = usize::from(mutation.place) % slots;
        let entry = HEADER_SIZE + slot * entry_len;
        let data = (leaf && entry + ITEM_HEAD_SIZE <= raw.len()).then(|| {
            let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|n| raw[entry + at + n])) as usize;
            let start = (HEADER_SIZE + word(17)).min(raw.len());
            start..(start + word(21)).min(raw.len())
        });
        match mutation.kind % 16 {
            // Change some bytes of the block.
            0 | 1 => {
                let at = 32 + usize::from(mutation.place) % (raw.len() - 32);
                let end = (at + 1 + usize::from(mutation.value % 8)).min(raw.len());
                patch(&mut raw[at..end], mutation, &self.sb);
            }
            // Change a field of the header: bytenr, flags, generation, owner, number of items, level.
            2 => {
                let (at, len) =
                    [(48, 8), (56, 8), (80, 8), (88, 8), (96, 4), (100, 1)][usize::from(mutation.value >> 4) % 6];
                patch(&mut raw[at..at + len], mutation, &self.sb);
            }
            // Change a field of a key, or a field after the key.
            3..=6 => {
                let fields: &[(usize, usize)] = if leaf {
                    &[(0, 8), (8, 1), (9, 8), (17, 4), (21, 4)]
                } else {
                    &[(0, 8), (8, 1), (9, 8), (17, 8), (25, 8)]
                };
                let (at, len) = fields[usize::from(mutation.value >> 4) % fields.len()];
                if let Some(field) = raw.get_mut(entry + at..entry + at + len) {
                    patch(field, mutation, &self.sb);
                }
            }
            // Change the content of an item.
            7..=12 => {
                if let Some(data) = data.filter(|data| !data.is_empty()) {
                    let at = data.start + usize::from(mutation.more) % data.len();
                    let end = (at + [1, 2, 4, 8][usize::from(mutation.value >> 4) % 4]).min(data.end);
                    patch(&mut raw[at..end], mutation, &self.sb);
                }
            }
            // Replace this block's content by the content of another block, but keep this block's address in the
            // header.
            13 => {
                let address: [u8; 8] = std::array::from_fn(|n| raw[48 + n]);
                raw.copy_from_slice(other);
                raw[48..56].copy_from_slice(&address);
            }
            // Replace a pointer or an item head by one from another block.
            14 => {
                if let (Some(to), Some(from)) =
                    (raw.get_mut(entry..entry + entry_len), other.get(entry..entry + entry_len))
                {
                    to.copy_from_slice(from);
                }
            }
            // Swap this slot with the next slot.
            _ => {
                let next = entry + entry_len;
                if next + entry_len <= raw.len() {
                    let (left, right) = raw.split_at_mut(next);
                    left[entry..].swap_with_slice(&mut right[..entry_len]);
                }
            }
        }
    }
}

/// Writes a primary superblock with a valid checksum, and zeros its mirrors.
pub(super) fn put_superblock(medium: &mut Medium, mut raw: Vec<u8>) {
    let csum_type = Superblock::decode(&raw).ok().and_then(|sb| sb.csum_type()).unwrap_or_default();
    let csum = csum_type.compute(&raw[32..]);
    raw[..32].copy_from_slice(&csum);
    medium.write(SUPERBLOCK_OFFSETS[0], &raw);
    for offset in &SUPERBLOCK_OFFSETS[1..] {
        if offset + SUPERBLOCK_SIZE as u64 <= medium.len_bytes() {
            medium.zero(*offset, SUPERBLOCK_SIZE as u64);
        }
    }
}

/// Changes a little-endian field to a plausible or extreme value.
fn patch(field: &mut [u8], mutation: Mutation, sb: &Superblock) {
    let mut value = [0; 8];
    let len = field.len().min(8);
    value[..len].copy_from_slice(&field[..len]);
    let old = u64::from_le_bytes(value);
    let more = u64::from(mutation.more);
    let new = match mutation.value % 16 {
        0 => 0,
        1 => u64::MAX,
        2 => old.wrapping_add(1),
        3 => old.wrapping_sub(1),
        4 => old ^ (1 << (more % 64)),
        5 => more,
        6 => more << 12,
        7 => u64::MAX - more,
        8 => 1 << 63,
        9 => old.wrapping_mul(2),
        10 => sb.root.0,
        11 => sb.chunk_root.0,
        12 => old.wrapping_add(more << 12),
        13 => old.wrapping_sub(more << 12),
        14 => old.wrapping_add(u64::from(sb.nodesize)),
        _ => 1 << (more % 64),
    };
    field[..len].copy_from_slice(&new.to_le_bytes()[..len]);
}
