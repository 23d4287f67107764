//! `ubtrfs filesystem ...`: commands on a mounted filesystem, named as in btrfs-progs.

use std::process::ExitCode;

/// Commands on a mounted filesystem
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Sync(super::sync::Args),
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Sync(args) => super::sync::run(args),
    }
}
