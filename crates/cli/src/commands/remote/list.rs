//! `ubtrfs remote list`.

use std::process::ExitCode;

use anyhow::bail;
use serde_json::json;

use super::{StoreArgs, json_of, readable, time_of};
use crate::commands::offline::text::{printable, short_time_text};
use crate::common::{format_size, print_json, print_out};

/// List the snapshots in a store, the newest first
#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (store, keys, found) = args.store.read()?;
    let (manifests, nr_bad) = readable(&store, &keys, &found);
    if args.json {
        print_json(&json!({ "snapshots": manifests.iter().map(json_of).collect::<Vec<_>>() }))?;
    } else {
        let mut text =
            format!("{:<16} {:>10} {:>10}  {:<36} {:<8} NAME\n", "CREATED", "STREAM", "STORED", "UUID", "NEEDS");
        for manifest in &manifests {
            let parent = manifest.parent.map_or("-".to_owned(), |parent| parent.uuid.to_string()[..8].to_owned());
            text.push_str(&format!(
                "{:<16} {:>10} {:>10}  {:<36} {parent:<8} {}\n",
                short_time_text(time_of(manifest.created)),
                format_size(manifest.stream_bytes),
                format_size(manifest.stored_bytes),
                manifest.key.uuid.to_string(),
                printable(&manifest.name),
            ));
        }
        print_out(&text)?;
    }
    if nr_bad > 0 {
        bail!("{nr_bad} snapshots cannot be read");
    }
    Ok(ExitCode::SUCCESS)
}
