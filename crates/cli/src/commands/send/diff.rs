//! `ubtrfs send --diff OLD NEW`: prints the changes between two snapshots.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::thread;

use anyhow::{Context, anyhow, bail};
use serde_json::Value;
use ubtrfs_control::{Request as AnyRequest, send};

use super::{Args, answer, snapshot};
use crate::commands::offline::ImageUse;
use crate::commands::offline::text::printable;
use crate::commands::place::with_channel;
use crate::common::{OUTPUT_LOST, stdout};
use crate::job::with_progress;

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let [old, new] = &args.subvolumes[..] else {
        bail!("--diff takes two snapshots: the older one and the newer one");
    };
    with_channel(old, &args.image, ImageUse::Read, |channel| {
        let (before, after) = (snapshot(channel, old)?, snapshot(channel, new)?);
        let request = AnyRequest::Send(send::Request::Diff { old: before.id.0, new: after.id.0 });
        let (from, to) = io::pipe()?;
        let json = args.json;
        let (done, printed) = thread::scope(|scope| {
            let printer = scope.spawn(move || print(BufReader::new(from), json));
            let done = with_progress("comparing", |job| channel.call_with_output(request, &[], to.as_fd(), false, job));
            drop(to);
            (done, printer.join())
        });
        // If printing failed, the server could not write to the pipe either, so `done` is also an error. The error of
        // printing is the cause, so it is returned first.
        printed.map_err(|_| anyhow!("printing failed: this is a bug of ubtrfs"))??;
        answer(done, std::slice::from_ref(new)).map(drop)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Prints each change as soon as it arrives.
fn print(lines: impl BufRead, json: bool) -> anyhow::Result<()> {
    let mut out = io::BufWriter::new(stdout());
    for line in lines.lines() {
        let line = line?;
        let shown = if json { line } else { sentence(&serde_json::from_str(&line)?) };
        writeln!(out, "{shown}").context(OUTPUT_LOST)?;
    }
    out.flush().context(OUTPUT_LOST)
}

/// A change in words: `renamed  file      a -> b`.
fn sentence(change: &Value) -> String {
    let text = |name: &str| change[name].as_str().unwrap_or_default().to_owned();
    let path = |name: &str| match text(name).as_str() {
        "" => "/".to_owned(),
        path => printable(path.as_bytes()),
    };
    let mut line = format!("{:<8} {:<9} ", text("change"), text("type"));
    if change["from"].is_string() {
        line.push_str(&format!("{} -> ", path("from")));
    }
    line.push_str(&path("path"));
    let mut details: Vec<String> = Vec::new();
    for range in change["ranges"].as_array().into_iter().flatten() {
        let (offset, len) = (range["offset"].as_u64().unwrap_or(0), range["len"].as_u64().unwrap_or(0));
        details.push(format!("{offset}+{len}"));
    }
    details.extend(
        change["attributes"].as_array().into_iter().flatten().filter_map(|name| name.as_str().map(str::to_owned)),
    );
    if !details.is_empty() {
        line.push_str(&format!(" ({})", details.join(", ")));
    }
    line
}
