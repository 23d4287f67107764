//! `ubtrfs inspect min-dev-size`

use std::process::ExitCode;

use anyhow::{anyhow, bail};
use ubtrfs_control::Response as AnyResponse;
use ubtrfs_control::device::{Request, Response};

use crate::commands::offline::ImageUse;
use crate::commands::place::{FilesystemArgs, with_channel};
use crate::common::{format_size, print_out};

/// Print a size in bytes to which a device can be shrunk
///
/// At this size, every block group behind the new end can be moved below it as a whole. A smaller size may work too,
/// because `filesystem resize` also moves files into the free space of other block groups.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The id of the device
    #[arg(long = "id", value_name = "DEVID", default_value_t = 1)]
    devid: u64,
    #[command(flatten)]
    of: FilesystemArgs,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let target = args.of.path.clone().or_image();
    with_channel(&target, &args.of.image, ImageUse::Read, |channel| {
        let request = ubtrfs_control::Request::Device(Request::MinSize { devid: args.devid });
        let done = channel.call(request, &[]).map_err(|failure| anyhow!("cannot examine {target}: {failure}"))?;
        let AnyResponse::Device(Response::MinSize(bytes)) = done else {
            bail!("the server of {target} gave an unexpected answer; unmount and mount with this ubtrfs");
        };
        print_out(&format!("{bytes} bytes ({})\n", format_size(bytes)))
    })?;
    Ok(ExitCode::SUCCESS)
}
