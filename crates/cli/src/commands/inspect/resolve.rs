//! `ubtrfs inspect logical-resolve`, `inode-resolve`, `subvolid-resolve`, `rootid`.

use std::process::ExitCode;

use anyhow::{Context, bail};
use ubtrfs_control::Response as AnyResponse;
use ubtrfs_control::resolve::{Request, Response};

use crate::commands::offline::text::printable;
use crate::commands::offline::{ImageOptions, Use};
use crate::commands::place::{Target, open, with_channel};
use crate::common::print_out;

/// Print the paths of all files that use the data at an address
#[derive(clap::Args)]
pub(super) struct LogicalArgs {
    /// All uses of the extent that holds the address
    #[arg(long = "ignore-offset")]
    whole_extent: bool,
    /// The address, as file extents and error messages name it
    #[arg(value_name = "LOGICAL")]
    bytenr: u64,
    #[command(flatten)]
    of: PathArgs,
}

/// Print all paths of an inode
#[derive(clap::Args)]
pub(super) struct InodeArgs {
    /// The inode number
    #[arg(value_name = "INODE")]
    ino: u64,
    #[command(flatten)]
    of: PathArgs,
}

/// Print the path of a subvolume
#[derive(clap::Args)]
pub(super) struct SubvolidArgs {
    /// The id of the subvolume
    #[arg(value_name = "ID")]
    id: u64,
    #[command(flatten)]
    of: PathArgs,
}

/// Print the id of the subvolume that holds a file
#[derive(clap::Args)]
pub(super) struct PathArgs {
    /// A path in a mount or in an image
    #[arg(value_name = "PATH|IMAGE:/PATH")]
    path: Target,
    #[command(flatten)]
    image: ImageOptions,
}

pub(super) fn logical(args: LogicalArgs) -> anyhow::Result<ExitCode> {
    let LogicalArgs { whole_extent, bytenr, of } = args;
    ask(&of, &format!("find the files of address {bytenr} in"), Request::Logical { bytenr, whole_extent })
}

pub(super) fn inode(args: InodeArgs) -> anyhow::Result<ExitCode> {
    ask(&args.of, &format!("find inode {} in", args.ino), Request::Inode { of: 0, ino: args.ino })
}

pub(super) fn subvolid(args: SubvolidArgs) -> anyhow::Result<ExitCode> {
    ask(&args.of, &format!("find subvolume {} in", args.id), Request::Subvolume { id: args.id })
}

pub(super) fn rootid(args: PathArgs) -> anyhow::Result<ExitCode> {
    ask(&args, "read", Request::RootId { of: 0 })
}

fn ask(of: &PathArgs, what: &str, request: Request) -> anyhow::Result<ExitCode> {
    let target = of.path.clone().or_image();
    let answer = with_channel(&target, &of.image, Use::Read, |channel| {
        let file = open(channel, &target)?;
        let answer = channel.call(ubtrfs_control::Request::Resolve(request), &[&file]);
        answer.with_context(|| format!("cannot {what} {target}"))
    })?;
    match answer {
        AnyResponse::Resolve(Response::Id(id)) => print_out(&format!("{id}\n"))?,
        AnyResponse::Resolve(Response::Paths(paths)) => {
            let lines: String = paths.iter().map(|path| format!("/{}\n", printable(&path.0))).collect();
            print_out(&lines)?;
        }
        _ => bail!("{target}: the server answered something else"),
    }
    Ok(ExitCode::SUCCESS)
}
