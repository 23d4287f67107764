//! `ubtrfs subvolume snapshot`.

use anyhow::{anyhow, bail};
use rustix::io::Errno;
use ubtrfs_control::subvolume::Request;
use ubtrfs_control::{Channel, CommandFailure};
use ubtrfs_fs::QgroupId;

use super::open_subvolume;
use super::problem::explain;
use crate::commands::offline::{ImageOptions, ImageUse};
use crate::commands::place::{CommandTarget, open_here, with_channel};
use crate::commands::qgroup::parse_qgroup;
use crate::common::print_out;

/// Make a snapshot of a subvolume
#[derive(clap::Args)]
pub(super) struct Args {
    /// The subvolume to take a snapshot of
    #[arg(value_name = "SOURCE")]
    source: CommandTarget,
    /// Path of the snapshot, in the same mount or image. In an existing directory, the snapshot gets the subvolume's name
    #[arg(value_name = "DEST")]
    dest: CommandTarget,
    /// Make the snapshot read-only; it is writable by default
    #[arg(short)]
    read_only: bool,
    /// A quota group (LEVEL/NUMBER) that the snapshot joins; can be given several times
    #[arg(short = 'i', value_name = "QGROUP", value_parser = parse_qgroup)]
    qgroups: Vec<QgroupId>,
    #[command(flatten)]
    image: ImageOptions,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    if !args.source.shares_filesystem_with(&args.dest) {
        return Err(elsewhere(args));
    }
    let made = with_channel(&args.source, &args.image, ImageUse::Write, |channel| make(channel, args))?;
    let kind = if args.read_only { "readonly snapshot" } else { "snapshot" };
    print_out(&format!("Create a {kind} of '{}' in '{}'\n", args.source, made.as_made()))
}

fn elsewhere(args: &Args) -> anyhow::Error {
    anyhow!(
        "{} and {} are not in the same filesystem; name two paths in one mount or one image",
        args.source,
        args.dest
    )
}

/// Makes a snapshot and returns its path.
fn make(channel: &Channel<'_>, args: &Args) -> anyhow::Result<CommandTarget> {
    let (source, dest) = (&args.source, &args.dest);
    let (subvolume, _) = open_subvolume(channel, source)?;
    let (dir, name, made) = match channel.is_dir(dest.path()) {
        Ok(Some(true)) => {
            let Ok((_, name)) = source.canonical()?.split() else {
                bail!("{source} has no name to give to its snapshot in {dest}; name the snapshot");
            };
            (dest.clone(), name.clone(), dest.child(&name))
        }
        Ok(Some(false)) => return Err(explain("make", dest, CommandFailure::from(ubtrfs_fs::Error::Exists))),
        Ok(None) => {
            let (dir, name) = dest.split()?;
            (dir, name, dest.clone())
        }
        Err(failure) => return Err(explain("open", dest, failure)),
    };
    let Some(dir) = open_here(channel, &dir)? else { return Err(elsewhere(args)) };
    // Write dirty pages first, because the snapshot must contain everything written so far.
    let flushed = channel.flush(&subvolume);
    let qgroups = args.qgroups.iter().map(|id| id.0).collect();
    let request = Request::Snapshot { source: 0, dir: 1, name, read_only: args.read_only, qgroups };
    match flushed.and_then(|()| channel.subvolume(request, &[&subvolume, &dir])) {
        Err(failure) if failure.errno() == Errno::XDEV => Err(elsewhere(args)),
        Err(failure) if failure.errno() == Errno::PERM && !failure.has_advice => {
            bail!("cannot make {made}: {source} belongs to another user; run the command as its owner or as root")
        }
        Err(failure) => Err(explain("make", &made, failure)),
        Ok(_) => Ok(made),
    }
}
