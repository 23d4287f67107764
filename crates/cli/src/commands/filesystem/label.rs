//! `ubtrfs filesystem label`: shows or sets the label.

use std::ffi::OsString;

use anyhow::bail;
use ubtrfs_control::filesystem::Request;

use super::{call, info};
use crate::commands::offline::text::printable;
use crate::commands::offline::{ImageOptions, ImageUse};
use crate::commands::place::{CommandTarget, with_channel};
use crate::common::print_out;

/// Show or set the label
#[derive(clap::Args)]
pub(super) struct Args {
    /// Any path in a mount, or an image
    #[arg(value_name = "PATH|IMAGE")]
    target: CommandTarget,
    /// The new label, at most 255 bytes; an empty one removes it
    label: Option<OsString>,
    #[command(flatten)]
    image: ImageOptions,
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let target = args.target.clone().or_image().or_its_mount();
    let Some(label) = &args.label else {
        let info = with_channel(&target, &args.image, ImageUse::Read, |channel| info(channel, &target))?;
        return print_out(&format!("{}\n", printable(&info.label)));
    };
    let label = label.as_encoded_bytes().to_vec();
    if label.contains(&b'\n') {
        bail!("the label has a line break; choose a label of one line, at most 255 bytes");
    }
    with_channel(&target, &args.image, ImageUse::Write, |channel| {
        call(channel, &target, "set the label of", Request::SetLabel { label }).map(|_| ())
    })
}
