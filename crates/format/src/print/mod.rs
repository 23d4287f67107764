//! Tree blocks and superblocks as text, close to what `btrfs inspect-internal` prints, and as JSON.
//!
//! Invariants:
//! - I1. Any bytes can be printed. An undecodable part prints as an error in its place, and printing continues.
//! - I2. Names and values are escaped, so no disk content reaches a terminal as control characters.

mod item;
mod json;
mod key;
mod superblock;
mod text;
mod volume;

use std::fmt::{self, Write};

pub use json::{ToJson, insert_name, insert_names, json_line, json_lines, node_json, superblock_json};
pub use key::{KeyText, ObjectidText};
pub use superblock::print_superblock;
pub use text::{escaped, escaped_line};

use crate::csum::CsumType;
use crate::error::FormatError;
use crate::item::{BlockGroupFlags, ChunkItem};
use crate::node::{HEADER_FLAG_RELOC, HEADER_FLAG_WRITTEN, HEADER_SIZE, ITEM_HEAD_SIZE, KEY_PTR_SIZE, NodeView};
use crate::profile::Profile;
use crate::superblock::Superblock;

/// Options for printing blocks.
#[derive(Clone, Copy, Debug)]
pub struct PrintOptions {
    /// Checksum algorithm.
    pub csum_type: CsumType,
    /// Size of a data block in bytes.
    pub sectorsize: u32,
    /// Print `HIDDEN` instead of names and values.
    pub hide_names: bool,
    /// Print the checksum of each block.
    pub csum_headers: bool,
    /// Print the checksums in checksum items.
    pub csum_items: bool,
}

impl PrintOptions {
    /// The options for a filesystem with this superblock. All optional output is switched off.
    pub fn new(superblock: &Superblock) -> Self {
        Self {
            csum_type: superblock.csum_type().unwrap_or_default(),
            sectorsize: superblock.sectorsize,
            hide_names: false,
            csum_headers: false,
            csum_items: false,
        }
    }
}

/// Prints a tree block: its header, then its child pointers or its items.
pub fn print_node(raw: &[u8], options: &PrintOptions, out: &mut dyn Write) -> fmt::Result {
    let view = match NodeView::new(raw) {
        Ok(view) => view,
        Err(cause) => return writeln!(out, "corrupt: {cause}"),
    };
    print_header(&view, options, out)?;
    let head_size = if view.is_leaf() { ITEM_HEAD_SIZE } else { KEY_PTR_SIZE };
    let fit = raw.len().saturating_sub(HEADER_SIZE).checked_div(head_size).unwrap_or_default();
    for slot in 0..view.nritems().min(fit) {
        if view.is_leaf() {
            item::print_item(&view, slot, options, out)?;
        } else if let (Some(key), Some((bytenr, generation))) = (view.key(slot), view.child(slot)) {
            writeln!(out, "\tkey {} block {bytenr} gen {generation}", KeyText(&key))?;
        }
    }
    if view.nritems() > fit {
        writeln!(out, "\tcorrupt: {} items, at most {fit} fit", view.nritems())?;
    }
    Ok(())
}

fn print_header(view: &NodeView<'_>, options: &PrintOptions, out: &mut dyn Write) -> fmt::Result {
    let (kind, bytenr) = (if view.is_leaf() { "leaf" } else { "node" }, view.bytenr());
    write!(out, "{kind} {bytenr} ")?;
    if !view.is_leaf() {
        write!(out, "level {} ", view.level())?;
    }
    write!(out, "items {} free space {} ", view.nritems(), free_space(view))?;
    writeln!(out, "generation {} owner {}", view.generation(), ObjectidText(view.owner().0))?;
    let flags = [(HEADER_FLAG_WRITTEN, "WRITTEN"), (HEADER_FLAG_RELOC, "RELOC")];
    write!(out, "{kind} {bytenr} flags 0x{:x}({})", view.flags(), text::flags(view.flags(), &flags, "none"))?;
    write!(out, " backref revision {}", view.backref_rev())?;
    if options.csum_headers {
        write!(out, " csum {}", text::csum(&view.csum(), options.csum_type))?;
    }
    writeln!(out, "\nfs uuid {}\nchunk uuid {}", view.fsid(), view.chunk_tree_uuid())
}

/// Free bytes in a leaf, or free pointers in a node. Negative if `nritems` exceeds the capacity.
fn free_space(view: &NodeView<'_>) -> i64 {
    let number = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
    let capacity = number(view.raw().len().saturating_sub(HEADER_SIZE));
    if !view.is_leaf() {
        return capacity.checked_div(number(KEY_PTR_SIZE)).unwrap_or_default().saturating_sub(number(view.nritems()));
    }
    let last = view.nritems().checked_sub(1).and_then(|slot| view.item_range(slot));
    let data_start = last.map_or(capacity, |range| number(range.start.saturating_sub(HEADER_SIZE)));
    data_start.saturating_sub(number(view.nritems().saturating_mul(ITEM_HEAD_SIZE)))
}

/// The reason why printing an item stopped.
enum PrintStop {
    Write(fmt::Error),
    Item(FormatError),
}

impl From<fmt::Error> for PrintStop {
    fn from(error: fmt::Error) -> Self {
        Self::Write(error)
    }
}

impl From<FormatError> for PrintStop {
    fn from(cause: FormatError) -> Self {
        Self::Item(cause)
    }
}

type Printed = Result<(), PrintStop>;

/// Formats type and profile of a chunk, as `DATA|RAID1` or `METADATA|single`.
fn block_group_flags(flags: BlockGroupFlags) -> String {
    let types = [
        (BlockGroupFlags::DATA.bits(), "DATA"),
        (BlockGroupFlags::METADATA.bits(), "METADATA"),
        (BlockGroupFlags::SYSTEM.bits(), "SYSTEM"),
    ];
    let profiles = Profile::ALL.map(|profile| (profile.flag.bits(), profile.name));
    // Without the first row, single, which has no bit.
    let profiles = &profiles[1..];
    format!("{}|{}", text::flags(flags.bits(), &types, ""), text::flags(flags.bits(), profiles, Profile::ALL[0].name))
}

fn print_chunk(chunk: &ChunkItem, out: &mut dyn Write) -> fmt::Result {
    let ChunkItem { length, owner, stripe_len, flags, io_align, io_width, sector_size, sub_stripes, stripes } = chunk;
    let flags = block_group_flags(*flags);
    writeln!(out, "\t\tlength {length} owner {owner} stripe_len {stripe_len} type {flags}")?;
    writeln!(out, "\t\tio_align {io_align} io_width {io_width} sector_size {sector_size}")?;
    writeln!(out, "\t\tnum_stripes {} sub_stripes {sub_stripes}", stripes.len())?;
    for (index, stripe) in stripes.iter().enumerate() {
        writeln!(out, "\t\t\tstripe {index} devid {} offset {}", stripe.devid, stripe.offset)?;
        writeln!(out, "\t\t\tdev_uuid {}", stripe.dev_uuid)?;
    }
    Ok(())
}
