//! `ubtrfs subvolume ...`: commands and output as in btrfs-progs, for a path in an image or in a mount of ubtrfs.
//!
//! Invariants:
//! - I1. Every command uses a [`Channel`](ubtrfs_control::Channel), so a mount and an image give equal output.
//! - I2. Errors have equal texts on a mount and on an image (`problem`).

mod edit;
mod find_new;
mod list;
mod problem;
mod show;
mod snapshot;

use std::process::ExitCode;

use anyhow::Context;
use ubtrfs_control::{Channel, OpenedFile};
use ubtrfs_format::RootId;
use ubtrfs_fs::SubvolumeInfo;

use super::place::{CommandTarget, open};
pub(crate) use list::seconds_text;
use problem::{explain, not_a_subvolume};

/// Make, list and delete subvolumes and snapshots
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Create(edit::CreateArgs),
    Snapshot(snapshot::Args),
    Delete(edit::DeleteArgs),
    List(list::Args),
    Show(show::Args),
    GetDefault(show::DefaultArgs),
    SetDefault(edit::SetDefaultArgs),
    SetReadOnly(edit::SetReadOnlyArgs),
    Sync(edit::SyncArgs),
    FindNew(find_new::Args),
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Create(args) => return Ok(edit::create(&args)),
        Command::Snapshot(args) => snapshot::run(&args),
        Command::Delete(args) => return edit::delete(&args),
        Command::List(args) => list::run(args),
        Command::Show(args) => show::run(args),
        Command::GetDefault(args) => show::get_default(args),
        Command::SetDefault(args) => edit::set_default(&args),
        Command::SetReadOnly(args) => edit::set_read_only(&args),
        Command::Sync(args) => edit::sync(&args),
        Command::FindNew(args) => find_new::run(&args),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Opens the root directory of a subvolume.
fn open_subvolume(channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<(OpenedFile, SubvolumeInfo)> {
    let file = open(channel, target)?;
    let found = channel.subvolume_of(&file).map_err(|failure| explain("read", target, failure))?;
    match found {
        (info, true) => Ok((file, info)),
        (_, false) => Err(not_a_subvolume(target)),
    }
}

/// Lists all subvolumes in order of id, the top level first.
fn list(channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<Vec<SubvolumeInfo>> {
    channel.subvolumes().map_err(|failure| explain("list the subvolumes of", target.filesystem(), failure))
}

/// Lists deleted subvolumes whose space is not free yet, in order of id.
fn list_deleted(channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<Vec<SubvolumeInfo>> {
    channel
        .deleted_subvolumes()
        .map_err(|failure| explain("list the deleted subvolumes of", target.filesystem(), failure))
}

fn find(list: &[SubvolumeInfo], id: RootId) -> anyhow::Result<&SubvolumeInfo> {
    let found = list.iter().find(|info| info.id == id);
    found.with_context(|| format!("the subvolume {id} does not exist"))
}
