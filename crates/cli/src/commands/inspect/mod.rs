//! `ubtrfs inspect ...`: shows the content of the disk, damaged or not. Options are named
//! as in `btrfs inspect-internal`.
//!
//! Invariants:
//! - I1. Nothing is written to the device, not even a repair.
//! - I2. Damage is reported on stderr, one line for each block, and makes the exit status 1. Undamaged content is shown
//!   nevertheless.

mod blocks;
mod dump_super;
mod dump_tree;
mod json_stream;
mod map;
mod min_dev_size;
mod resolve;
mod tree_stats;
mod tree_stats_text;
mod trees;

use std::path::Path;
use std::process::ExitCode;

use ubtrfs_format::KeyType;
use ubtrfs_format::item::{BlockGroupFlags, ChunkItem};

use crate::commands::committed::Committed;

pub(crate) use tree_stats::{TreeStats, tree_stats};

/// Show the on-disk structures of a filesystem, and which files and subvolumes use them
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    DumpSuper(dump_super::Args),
    DumpTree(dump_tree::Args),
    LogicalResolve(resolve::LogicalArgs),
    InodeResolve(resolve::InodeArgs),
    SubvolidResolve(resolve::SubvolidArgs),
    Rootid(resolve::PathArgs),
    MinDevSize(min_dev_size::Args),
    TreeStats(tree_stats_text::Args),
    Map(map::Args),
}

/// A chunk: flags, logical start and length.
type ChunkSummary = (BlockGroupFlags, u64, u64);

/// The size of the filesystem on a device, and its chunks in order of their addresses.
pub(crate) fn chunks(device: &Path) -> anyhow::Result<(u64, Vec<ChunkSummary>)> {
    let committed = Committed::open(&[device.to_owned()])?;
    let blocks = blocks::Blocks::open(committed.as_devices())?;
    let mut chunks = Vec::new();
    for (key, data) in blocks.chunk_items().iter().filter(|(key, _)| key.item_type == KeyType::CHUNK_ITEM) {
        let chunk = ChunkItem::decode(data)?;
        chunks.push((chunk.flags, key.offset, chunk.length));
    }
    Ok((blocks.superblock().total_bytes, chunks))
}

/// Runs the command of the group.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::DumpSuper(args) => dump_super::run(args),
        Command::DumpTree(args) => dump_tree::run(args),
        Command::LogicalResolve(args) => resolve::logical(args),
        Command::InodeResolve(args) => resolve::inode(args),
        Command::SubvolidResolve(args) => resolve::subvolid(args),
        Command::Rootid(args) => resolve::rootid(args),
        Command::MinDevSize(args) => min_dev_size::run(&args),
        Command::TreeStats(args) => tree_stats_text::run(&args),
        Command::Map(args) => map::run(&args),
    }
}
