//! `ubtrfs filesystem du [-s] [--raw] [--json] PATH|IMAGE:PATH ...`

use std::convert::Infallible;
use std::io::{self, BufReader, BufWriter, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::thread;

use anyhow::{Context, anyhow, bail};
use serde_json::json;
use ubtrfs_control::Channel;
use ubtrfs_control::disk_usage::{DiskUsage, NamedEntry, Request, collect, visit_paths};
use ubtrfs_format::print::insert_name;
use ubtrfs_fs::Job;

use crate::commands::offline::{ImageOptions, ImageUse};
use crate::commands::place::{CommandTarget, open, with_channel};
use crate::common::{OUTPUT_LOST, print_error, print_json, stdout};
use crate::job::with_progress;
use crate::units::Units;

/// Show how many bytes files use, and how many they share with other files
#[derive(clap::Args)]
#[command(
    after_help = "Total: bytes of the extents. Exclusive: bytes that no other file or snapshot uses. Set shared: bytes \
                        on disk that all files below the argument share, with each other or with others. Of files that other \
                        programs are writing, only what is on disk counts."
)]
pub(crate) struct Args {
    /// Files and directories, in a mount or an image
    #[arg(value_name = "PATH|IMAGE:PATH", required = true)]
    paths: Vec<CommandTarget>,
    /// Show only one line with the sums for each path
    #[arg(short, long)]
    summarize: bool,
    #[command(flatten)]
    units: Units,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut status = ExitCode::SUCCESS;
    let mut found = Vec::new();
    for target in &args.paths {
        match with_channel(target, &args.image, ImageUse::Read, |channel| one(args, channel, target)) {
            Ok(du) => found.push((target, du)),
            Err(error) => status = print_error(&error),
        }
    }
    if !found.is_empty() {
        show(args, &found)?;
    }
    for (target, DiskUsageCount { unreadable, .. }) in found.iter().filter(|(_, du)| du.unreadable > 0) {
        status = print_error(&anyhow!(
            "{target}: you may not read {unreadable} of the files and directories below it, so they were not counted"
        ));
    }
    Ok(status)
}

/// The count of one argument.
struct DiskUsageCount {
    usage: DiskUsage,
    unreadable: u64,
}

fn show(args: &Args, found: &[(&CommandTarget, DiskUsageCount)]) -> anyhow::Result<()> {
    if args.json {
        let all: Vec<_> = found
            .iter()
            .map(|(target, DiskUsageCount { usage: du, unreadable })| {
                let mut of = json!({
                    "total": du.total, "exclusive": du.exclusive, "set_shared": du.set_shared, "unreadable": unreadable
                });
                insert_name(&mut of, "path", &target.bytes());
                if !args.summarize {
                    let mut entries = Vec::with_capacity(du.names.len());
                    let add = |path: &[u8], entry: &NamedEntry| {
                        let mut value = json!({ "total": entry.total, "exclusive": entry.exclusive });
                        insert_name(&mut value, "path", path);
                        entries.push(value);
                        Ok::<(), Infallible>(())
                    };
                    let Ok(()) = visit_paths(&du.names, add);
                    of["entries"] = entries.into();
                }
                of
            })
            .collect();
        return print_json(&json!(all));
    }
    let size = |bytes: u64| args.units.format(bytes);
    let line = |total: u64, exclusive: u64, shared: &str, name: &str| {
        format!("{:>10}  {:>10}  {shared:>10}  {name}\n", size(total), size(exclusive))
    };
    let mut out = BufWriter::new(stdout());
    let mut print = |line: String| out.write_all(line.as_bytes()).context(OUTPUT_LOST);
    print(format!("{:>10}  {:>10}  {:>10}  {}\n", "Total", "Exclusive", "Set shared", "Filename"))?;
    for (target, DiskUsageCount { usage: du, .. }) in found {
        visit_paths(&du.names, |path, entry| {
            print(line(entry.total, entry.exclusive, "-", &target.child(path).to_string()))
        })?;
        print(line(du.total, du.exclusive, &size(du.set_shared), &target.to_string()))?;
    }
    out.flush().context(OUTPUT_LOST)
}

fn one(args: &Args, channel: &Channel<'_>, target: &CommandTarget) -> anyhow::Result<DiskUsageCount> {
    let cannot = || format!("cannot count the bytes of {target}");
    let file = open(channel, target)?;
    let names = !args.summarize;
    let request = ubtrfs_control::Request::DiskUsage(Request { of: 0, names });
    let (from, to) = io::pipe().with_context(cannot)?;
    let (called, usage) = thread::scope(|scope| {
        let reader = scope.spawn(move || collect(BufReader::new(from), names));
        let count = |job: &Job| channel.call_with_output(request, &[&file], to.as_fd(), false, job);
        let called = with_progress("counting", count);
        // The stream ends with its last writer.
        drop(to);
        (called, reader.join())
    });
    let ubtrfs_control::Response::DiskUsage(done) = called.with_context(cannot)? else {
        bail!("the server of {target} answered something else")
    };
    let usage = usage.map_err(|_| anyhow!("the reader of the count failed: this is a bug of ubtrfs"))?;
    Ok(DiskUsageCount { usage: usage.with_context(cannot)?, unreadable: done.unreadable })
}
