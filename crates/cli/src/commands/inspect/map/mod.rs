//! `ubtrfs inspect map`: which parts of each device belong to which block groups, how full these are, and which files lie
//! in most pieces. As a table, as JSON, or as a picture.

mod layout;
mod svg;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use serde_json::{Value, json};
use ubtrfs_archive::host_file::HostFile;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_format::print::{escaped, insert_name};

use self::layout::{FileCounts, MappedFile, RESERVED, SpaceMap};
use super::blocks::Blocks;
use crate::commands::committed::Committed;
use crate::commands::filesystem::names;
use crate::commands::offline::with_members;
use crate::common::{OUTPUT_LOST, Shown, format_size, print_json, print_out, stdout, warn};

/// Show which parts of the devices are in use, how full block groups are, and which files lie in most pieces
#[derive(clap::Args)]
#[command(
    after_help = "A piece is a part of a file whose bytes follow each other on the disk too. A file that was written at once has one \
                  piece, or few if it is large. To join pieces: ubtrfs filesystem defragment PATH. To join free space: ubtrfs \
                  balance start PATH."
)]
pub(super) struct Args {
    /// Image or device
    #[arg(value_name = "DEVICE")]
    device: PathBuf,
    /// Write a picture to this file; - for standard output
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    svg: Option<PathBuf>,
    /// How many files to name
    #[arg(long, value_name = "N", default_value_t = 10)]
    files: usize,
    /// Print as JSON; sizes and addresses are in bytes
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut devices = Committed::open(&with_members(std::slice::from_ref(&args.device))?)?;
    let map = devices.read_consistently(|devices| {
        let map = SpaceMap::read(&Blocks::open(devices)?, args.files);
        let is_damaged = !map.damage.is_empty();
        Ok((map, is_damaged))
    })?;
    match &args.svg {
        Some(path) => {
            let picture = svg::draw(&map, &args.device.shown());
            let at = || format!("cannot write {}", path.shown());
            if path.as_os_str() == "-" {
                stdout().write_all(picture.as_bytes()).context(OUTPUT_LOST)?;
            } else {
                let mut file = HostFile::named(path, 0o666)?;
                file.write_all(picture.as_bytes()).with_context(at)?;
                file.sync().and_then(|()| file.keep()).with_context(at)?;
            }
        }
        None if args.json => print_json(&json_of(&map))?,
        None => print_out(&text_of(&map))?,
    }
    map.damage.iter().for_each(|damage| warn(damage));
    Ok(if map.damage.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The names of a block group's type and profile.
fn kind_of(flags: BlockGroupFlags) -> (&'static str, &'static str) {
    names(flags.bits())
}

/// The path of a file, for people.
fn shown_file(file: &MappedFile) -> String {
    escaped(&file.path)
}

fn text_of(map: &SpaceMap) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let mut line = |part: std::fmt::Arguments<'_>| {
        let _ = writeln!(text, "{part}");
    };
    for device in &map.devices {
        line(format_args!("{}", device.title()));
        line(format_args!("{:>16} {:>12} {:<22} {:>16} {:>7}", "start", "length", "block group", "address", "in use"));
        let mut at = 0;
        for extent in &device.extents {
            unused_lines(at, extent.start).for_each(|unused| line(format_args!("{unused}")));
            let (kind, profile) = kind_of(extent.flags);
            let fill = extent.used.map_or_else(|| "-".to_owned(), |_| format!("{:.1}%", extent.fill() * 100.0));
            line(format_args!(
                "{:>16} {:>12} {:<22} {:>16} {fill:>7}",
                extent.start,
                format_size(extent.len),
                format!("{kind}, {profile}"),
                extent.logical
            ));
            at = at.max(extent.start.saturating_add(extent.len));
        }
        unused_lines(at, device.size).for_each(|unused| line(format_args!("{unused}")));
        line(format_args!(""));
    }
    let FileCounts { pieces, extents, bytes } = map.all_files;
    let (nr_files, bytes) = (map.nr_files, format_size(bytes));
    line(format_args!("Files: {nr_files} with {bytes} in {extents} extents, in {pieces} pieces"));
    if pieces == nr_files && nr_files > 0 {
        line(format_args!("Each of these files lies in one piece"));
    }
    for file in &map.files {
        let FileCounts { pieces, extents, bytes } = file.counts;
        let bytes = format_size(bytes);
        line(format_args!("{pieces:>10} pieces {extents:>10} extents {bytes:>12} {}", shown_file(file)));
    }
    text
}

/// The lines for a range of a device without device extents.
fn unused_lines(start: u64, end: u64) -> impl Iterator<Item = String> {
    let parts = [(start, end.min(RESERVED), "reserved"), (start.max(RESERVED), end, "unallocated")];
    let parts = parts.into_iter().filter(|(start, end, _)| start < end);
    parts.map(|(start, end, what)| format!("{start:>16} {:>12} {what}", format_size(end - start)))
}

fn json_of(map: &SpaceMap) -> Value {
    let counts =
        |counts: FileCounts| json!({ "pieces": counts.pieces, "extents": counts.extents, "bytes": counts.bytes });
    let devices = map.devices.iter().map(|device| {
        let extents = device.extents.iter().map(|extent| {
            let (kind, profile) = kind_of(extent.flags);
            json!({
                "start": extent.start, "length": extent.len, "type": kind, "profile": profile,
                "block_group": extent.logical, "block_group_length": extent.group_len, "used": extent.used,
            })
        });
        json!({ "devid": device.devid, "path": device.path, "size": device.size, "extents": extents.collect::<Vec<_>>() })
    });
    let files = map.files.iter().map(|file| {
        let mut value = counts(file.counts);
        insert_name(&mut value, "path", &file.path);
        value
    });
    let mut all = counts(map.all_files);
    all["files"] = map.nr_files.into();
    json!({ "devices": devices.collect::<Vec<_>>(), "all_files": all, "worst_files": files.collect::<Vec<_>>() })
}
