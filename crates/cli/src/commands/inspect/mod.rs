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
mod min_dev_size;
mod resolve;
mod tree_stats;
mod trees;

use std::process::ExitCode;

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
    }
}
