//! `ubtrfs filesystem ...`: commands on a whole filesystem, named as in btrfs-progs.

mod defragment;
mod resize;

use std::process::ExitCode;

/// Commands on a whole filesystem
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Sync(super::sync::Args),
    Resize(resize::Args),
    #[command(visible_alias = "defrag")]
    Defragment(defragment::Args),
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Sync(args) => super::sync::run(args),
        Command::Resize(args) => resize::run(&args),
        Command::Defragment(args) => defragment::run(&args),
    }
}
