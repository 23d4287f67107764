//! `ubtrfs filesystem trim [-o OFFSET] [-l LENGTH] [-m MINIMUM] PATH|IMAGE`, with the options of fstrim.

use anyhow::{anyhow, bail};
use serde_json::json;
use ubtrfs_control::filesystem::{Request, Response};

use crate::commands::offline::{ImageOptions, ImageUse, LongImageOptions};
use crate::commands::place::{CommandTarget, with_channel};
use crate::common::{parse_size, print_out};
use crate::job::with_progress_in_bytes;

/// Tell the device which space is free; an image file then takes less space on the filesystem that holds it
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Logical address at which the range to trim starts [default: 0]. As in other commands, -o also takes mount options
    /// with which an image is opened
    #[arg(short, long, value_name = "SIZE|OPTIONS", value_parser = offset_or_options)]
    offset: Vec<OffsetOrOptions>,
    /// Length of the range to trim [default: up to the end]
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size)]
    length: Option<u64>,
    /// Do not trim free ranges below this size
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    minimum: u64,
    /// A path in a mount, or an image that is not mounted
    #[arg(value_name = "PATH|IMAGE")]
    path: CommandTarget,
    /// Print the number of trimmed bytes as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: LongImageOptions,
}

/// The value of `-o`: an offset as for fstrim, or options as for other commands.
#[derive(Clone, Debug)]
enum OffsetOrOptions {
    Offset(u64),
    Options(String),
}

/// Sizes begin with a digit, and mount options with a letter.
fn offset_or_options(text: &str) -> Result<OffsetOrOptions, String> {
    match text.starts_with(|first: char| first.is_ascii_alphabetic()) {
        true => Ok(OffsetOrOptions::Options(text.to_owned())),
        false => parse_size(text).map(OffsetOrOptions::Offset),
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let target = args.path.clone().or_image();
    let len_bytes = args.length.unwrap_or(u64::MAX);
    let mut start = 0;
    let mut image = ImageOptions::from(args.image.clone());
    for value in &args.offset {
        match value {
            OffsetOrOptions::Offset(offset) => start = *offset,
            OffsetOrOptions::Options(options) => image.options.push(options.clone()),
        }
    }
    let request = Request::Trim { start, len_bytes, min_bytes: args.minimum };
    let bytes = with_channel(&target, &image, ImageUse::Write, |channel| {
        let request = ubtrfs_control::Request::Filesystem(request);
        match with_progress_in_bytes("discarding free space", |job| channel.call_with(request, &[], job)) {
            Ok(ubtrfs_control::Response::Filesystem(Response::Trimmed(bytes))) => Ok(bytes),
            Ok(_) => bail!("the server of {target} answered something else"),
            Err(failure) => Err(anyhow!("cannot discard the free space of {target}: {failure}")),
        }
    })?;
    print_out(&match args.json {
        true => format!("{}\n", json!({ "trimmed_bytes": bytes })),
        false => format!("{target}: {bytes} bytes trimmed\n"),
    })
}
