//! `ubtrfs check`: checks whether an unmounted filesystem is undamaged. A check reads everything and changes nothing.
//!
//! Invariants:
//! - I1. Each problem is one line on stdout that begins with its code; `docs/check.md` lists the codes.
//! - I2. Exit status: 0 clean, 1 problems found, 2 the filesystem could not be checked; for `btrfs check`, 1 instead of 2.

use std::cell::RefCell;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use serde_json::{Value, json};
use ubtrfs_check::{CheckLimits, CheckProgress, Code, Options, Problem, Report};
use ubtrfs_device::{Access, Device, MissedChanges};
use ubtrfs_format::print::json_line;

use super::committed::Committed;
use super::offline::{members_telling, open_device};
use super::place::is_same_file;
use crate::common::{Shown, format_size, is_broken_pipe, print_error, print_out, progress_bytes};
use crate::progs::is_progs;

/// Check an unmounted filesystem for damage, without changing it
///
/// Prints a line for each problem, which begins with a code (--explain CODE says what it means). There is no --repair.
/// Exit status: 0 if the filesystem is undamaged, 1 if problems were found, 2 if it could not be checked or an argument
/// was wrong.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image file, or all devices of the filesystem
    #[arg(value_name = "IMAGE", required_unless_present = "explain")]
    devices: Vec<PathBuf>,
    /// device=PATH names a further device, as a further operand does. degraded changes nothing: a check names missing devices,
    /// and checks the rest
    #[arg(short, long, value_name = "OPTIONS", value_delimiter = ',')]
    options: Vec<String>,
    /// Check an image that is mounted or in use: its last commit, without the log of later fsyncs
    #[arg(long)]
    force: bool,
    /// Print the meaning of a code, or of all codes, and check nothing
    #[arg(long, value_name = "CODE", num_args = 0..=1, default_missing_value = "all", conflicts_with = "devices")]
    explain: Option<String>,
    /// Read all data too, and compare every copy with its checksums
    #[arg(long)]
    check_data_csum: bool,
    /// Print JSON: one object for each problem, and a summary at the end
    #[arg(long)]
    json: bool,
    /// Print at most this many problems of each kind; all are counted
    #[arg(long, value_name = "N", default_value_t = CheckLimits::default().per_code)]
    max_problems: u64,
    /// Accepted for compatibility: a check never writes
    #[arg(long)]
    readonly: bool,
    /// Accepted for compatibility: a terminal always shows progress
    #[arg(short, long)]
    progress: bool,
    /// Accepted for compatibility: original or lowmem; a check always uses little memory
    #[arg(long, value_name = "MODE", value_parser = ["original", "lowmem"])]
    mode: Option<String>,
    /// Not supported; the error message names the alternatives
    #[arg(long, hide = true)]
    repair: bool,
}

/// Exit status if the filesystem could not be checked.
pub(crate) const CANNOT_CHECK: u8 = 2;

pub(crate) fn run(args: Args) -> ExitCode {
    match checked(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) if is_broken_pipe(&error) => print_error(&error),
        Err(error) => {
            print_error(&error);
            if is_progs() { ExitCode::FAILURE } else { ExitCode::from(CANNOT_CHECK) }
        }
    }
}

/// Checks the filesystem, and returns whether it is clean.
fn checked(args: &Args) -> anyhow::Result<bool> {
    let started = Instant::now();
    if let Some(code) = &args.explain {
        print_out(&explanation(code)?)?;
        return Ok(true);
    }
    if args.repair {
        anyhow::bail!(
            "--repair does not exist, and nothing was checked; `ubtrfs rescue super-recover` repairs superblocks, and before you try btrfs \
             check --repair on the rest, copy the image"
        );
    }
    let paths = members_telling(&devices(args)?, missed)?;
    if args.force {
        let mut committed = Committed::open(&paths)?;
        if committed.has_writer() {
            return checked_beside_writer(args, &mut committed, started);
        }
    }
    let mut devices: Vec<Arc<dyn Device>> = Vec::new();
    for path in &paths {
        devices.push(Arc::new(open_device(path, Access::ReadOnly).map_err(with_force)?));
    }
    let options = Options { data_csums: args.check_data_csum, limits: CheckLimits { per_code: args.max_problems } };
    let bar = Bar::default();
    let mut printed = Ok(());
    let mut tell = |problem: Problem| {
        let line = line_of(&problem, args.json);
        let mut print = || print_out(&line);
        if printed.is_ok() {
            printed = bar.suspend(&mut print);
        }
    };
    let report = ubtrfs_check::check(devices, options, &bar, &mut tell)?;
    bar.finish();
    printed?;
    print_out(&summary(&report, started.elapsed(), args.json))?;
    Ok(report.is_clean())
}

/// The devices that the user named.
fn devices(args: &Args) -> anyhow::Result<Vec<PathBuf>> {
    let mut devices = args.devices.clone();
    for option in &args.options {
        match option.strip_prefix("device=") {
            Some(path) if !devices.iter().any(|other| is_same_file(other, path.as_ref())) => devices.push(path.into()),
            Some(_) => {}
            None if matches!(option.as_str(), "degraded" | "ro") => {}
            None => anyhow::bail!("a check has only the options device=PATH and degraded, and not {}", option.shown()),
        }
    }
    Ok(devices)
}

/// The message about a device that was found, and is not checked.
fn missed(device: &MissedChanges) -> String {
    let MissedChanges { path, generation, newest } = device;
    format!(
        "{0} is not used: it has generation {generation}, and the newest is {newest}, so it missed changes; to check it too, name \
         it after the image; if it is a device of this filesystem and no backup, a mount brings it up to date: -o device={0}",
        path.shown()
    )
}

/// Checks the last commit of a filesystem that another process may write to. Problems are printed only when no newer commit
/// explains them.
fn checked_beside_writer(args: &Args, committed: &mut Committed, started: Instant) -> anyhow::Result<bool> {
    let (lines, report) = committed.read_consistently(|devices| {
        let options = Options { data_csums: args.check_data_csum, limits: CheckLimits { per_code: args.max_problems } };
        let (bar, mut lines) = (Bar::default(), String::new());
        let mut tell = |problem: Problem| lines.push_str(&line_of(&problem, args.json));
        let checked = ubtrfs_check::check(devices, options, &bar, &mut tell);
        bar.finish();
        let report = checked?;
        let is_damaged = !report.is_clean();
        Ok(((lines, report), is_damaged))
    })?;
    print_out(&lines)?;
    print_out(&summary(&report, started.elapsed(), args.json))?;
    Ok(report.is_clean())
}

/// Adds the advice to check the last commit, if an image is in use.
fn with_force(error: anyhow::Error) -> anyhow::Error {
    match error.to_string() {
        text if text.contains("is in use by") || text.contains("is mounted by") => {
            anyhow::anyhow!("{text}, or check its last commit with: --force")
        }
        _ => error,
    }
}

fn line_of(problem: &Problem, as_json: bool) -> String {
    if as_json { format!("{}\n", json_line(&to_json(problem))) } else { format!("{problem}\n") }
}

/// The meaning of a code, or of all codes.
fn explanation(wanted: &str) -> anyhow::Result<String> {
    let is_wanted = |code: &&Code| wanted == "all" || code.as_str().eq_ignore_ascii_case(wanted);
    let lines: Vec<String> =
        Code::ALL.iter().filter(is_wanted).map(|code| format!("{code}: {}\n", code.meaning())).collect();
    if lines.is_empty() {
        anyhow::bail!("'{}' is not a code of a problem; list the codes with: ubtrfs check --explain", wanted.shown());
    }
    Ok(lines.concat())
}

fn to_json(problem: &Problem) -> Value {
    json!({
        "code": problem.code.as_str(),
        "tree": problem.place.tree.map(|tree| tree.0),
        "bytenr": problem.place.bytenr,
        "slot": problem.place.slot,
        "text": problem.text,
    })
}

fn summary(report: &Report, elapsed: Duration, as_json: bool) -> String {
    let stats = &report.stats;
    let seconds = elapsed.as_secs_f64();
    if as_json {
        let counts: serde_json::Map<String, Value> =
            report.counts.iter().map(|(code, count)| (code.as_str().to_owned(), json!(count))).collect();
        let value = json!({
            "clean": report.is_clean(), "complete": report.complete, "problems": counts, "seconds": seconds,
            "trees": stats.trees, "tree_blocks": stats.tree_blocks, "data_extents": stats.data_extents,
            "inodes": stats.inodes, "bytes_used": stats.bytes_used, "data_bytes_verified": stats.data_bytes_verified,
        });
        return format!("{value}\n");
    }
    let mut text = format!(
        "checked {} trees, {} tree blocks, {} data extents, {} inodes, {} used",
        stats.trees,
        stats.tree_blocks,
        stats.data_extents,
        stats.inodes,
        format_size(stats.bytes_used)
    );
    if stats.data_bytes_verified > 0 {
        text.push_str(&format!(", {} of data", format_size(stats.data_bytes_verified)));
    }
    text.push_str(&format!(" in {seconds:.2} s: "));
    let counts: Vec<String> = report.counts.iter().map(|(code, count)| format!("{count} {code}")).collect();
    let list = counts.join(", ");
    match (report.is_clean(), counts.is_empty()) {
        (true, true) => text.push_str("clean"),
        (true, false) => text.push_str(&format!("clean, with warnings ({list})")),
        (false, _) if !report.complete => text.push_str(&format!(
            "damaged: the chunk tree or the root tree cannot be read ({list}); copy the image before anything else"
        )),
        (false, _) => text.push_str(&format!(
            "damaged ({list}); for the meaning of a code: ubtrfs check --explain CODE; copy the image before any repair"
        )),
    }
    if report.counts.keys().any(|code| *code == Code::SuperMirror) {
        text.push_str("; `ubtrfs rescue super-recover` writes bad superblocks anew");
    }
    text.push('\n');
    text
}

/// A progress bar that restarts for each part of the check.
#[derive(Default)]
struct Bar {
    bar: RefCell<Option<ProgressBar>>,
}

impl Bar {
    /// Calls `print` with the bar hidden.
    fn suspend<T>(&self, print: &mut dyn FnMut() -> T) -> T {
        match &*self.bar.borrow() {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    fn finish(&self) {
        if let Some(bar) = self.bar.borrow_mut().take() {
            bar.finish_and_clear();
        }
    }
}

impl CheckProgress for Bar {
    fn stage(&self, name: &'static str, total_bytes: Option<u64>) {
        self.finish();
        *self.bar.borrow_mut() = Some(progress_bytes(total_bytes, name));
    }

    fn advance(&self, bytes: u64) {
        if let Some(bar) = &*self.bar.borrow() {
            bar.inc(bytes);
        }
    }
}
