//! `ubtrfs remote verify`.

use std::collections::HashSet;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::json;
use ubtrfs_remote::{SnapshotKey, SnapshotManifest};

use super::{NO_SNAPSHOTS, StoreArgs, json_of, named, parts, readable};
use crate::commands::offline::text::printable;
use crate::common::{print_json, print_out, warn};
use crate::job::with_progress_by;

/// Read snapshots in a store again, and compare them with their checksums
#[derive(clap::Args)]
#[command(after_help = "The exit status is 1 if anything is missing or damaged.")]
pub(super) struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// Name or UUID of a snapshot, also the beginning of a UUID, or latest [default: all]
    #[arg(value_name = "SNAPSHOT")]
    snapshots: Vec<String>,
    /// Only look whether all parts are there with their sizes
    #[arg(long)]
    quick: bool,
    /// Download N parts at once
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u8).range(1..=64))]
    jobs: u8,
    /// Print only problems
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (store, keys, found) = args.store.read()?;
    let (manifests, nr_bad) = readable(&store, &keys, &found);
    let chosen: Vec<&SnapshotManifest> = match args.snapshots.is_empty() {
        true => manifests.iter().collect(),
        false => args.snapshots.iter().map(|name| named(&manifests, name)).collect::<Result<_, _>>()?,
    };
    if found.is_empty() && !args.quiet && !args.json {
        print_out(&format!("{NO_SNAPSHOTS}\n"))?;
    }
    let present: HashSet<SnapshotKey> = found.iter().map(|found| found.key).collect();
    let total = chosen.iter().map(|manifest| manifest.stream_bytes).sum();
    let bar = match args.quiet {
        true => indicatif::ProgressBar::hidden(),
        false => crate::common::progress_bytes(Some(total), "verifying"),
    };
    let (mut results, mut nr_wrong) = (Vec::new(), nr_bad);
    with_progress_by(bar, "verifying", |job| -> anyhow::Result<()> {
        for manifest in chosen {
            let manifest = Arc::new(manifest.clone());
            let stop = || job.progress().is_cancelled;
            let verified = |bytes| job.advance(bytes);
            let report =
                store.verify_snapshot(&manifest, &keys, usize::from(args.jobs), args.quick, &verified, &stop)?;
            let mut problems: Vec<String> = report.problems.iter().map(ToString::to_string).collect();
            if let Some(parent) = manifest.parent.filter(|parent| !present.contains(parent)) {
                problems.push(format!("it needs {parent}, which the store does not have"));
            }
            nr_wrong += usize::from(!problems.is_empty());
            if args.json {
                let mut value = json_of(&manifest);
                value["good_parts"] = report.nr_good.into();
                value["problems"] = problems.into();
                results.push(value);
                continue;
            }
            let name = printable(&manifest.name);
            match problems.is_empty() {
                true if args.quiet => {}
                true => {
                    let verb = if report.nr_good == 1 { "is" } else { "are" };
                    print_out(&format!("{name}: {} {verb} good\n", parts(report.nr_good)))?;
                }
                false => problems.iter().try_for_each(|problem| print_out(&format!("{name}: {problem}\n")))?,
            }
        }
        Ok(())
    })?;
    if args.json {
        print_json(&json!({ "snapshots": results, "unreadable_manifests": nr_bad }))?;
    }
    if nr_wrong > 0 && !args.json {
        warn("a snapshot that is still in a filesystem is mended by pushing it once more: ubtrfs push --again");
    }
    Ok(if nr_wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
