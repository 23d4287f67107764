//! `ubtrfs pull`: receives a snapshot of an object store, and the parents that the destination lacks.
//!
//! - L1. Receive gets verified parts in order, and after a failure the input ends early. So the snapshot stays incomplete,
//!   and receive removes it.
//! - L2. A killed pull leaves an incomplete subvolume, which the next pull of the same snapshot replaces. Complete parents
//!   stay, and are not pulled again.

use std::io;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, anyhow, bail};
use rustix::io::Errno;
use serde_json::json;
use ubtrfs_control::receive::{Request, Response};
use ubtrfs_control::{Channel, OpenedFile, Request as AnyRequest, Response as AnyResponse};
use ubtrfs_fs::Job;
use ubtrfs_remote::{FoundSnapshot, RemoteError, RemoteKeys, RemoteStore, SnapshotKey, SnapshotManifest, chain_of};

use super::lineage::is_same;
use super::single_stream::SingleStream;
use super::{NO_SNAPSHOTS, StoreArgs, joined, named, parts, readable};
use crate::commands::offline::text::printable;
use crate::commands::offline::{ImageOptions, ImageUse};
use crate::commands::place::{CommandTarget, with_channel};
use crate::common::{format_size, print_json, print_out, progress_bytes};
use crate::job::with_progress_by;

/// Receive a snapshot from an object store
#[derive(clap::Args)]
#[command(
    after_help = "Parents that the filesystem lacks are received first. A snapshot is read-only when it is complete; if the pull \
                  fails, the incomplete one is deleted. If a pull is killed, the next one of the same snapshot replaces what it left."
)]
pub(crate) struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// Name or UUID of the snapshot, also the beginning of a UUID, or latest
    #[arg(value_name = "SNAPSHOT")]
    snapshot: String,
    /// Directory in a mount or an image that receives the snapshots
    #[arg(value_name = "DIR|IMAGE[:/DIR]")]
    dir: CommandTarget,
    /// Before a snapshot is marked as complete, read its content again and compare it with the stream
    #[arg(long)]
    verify: bool,
    /// Download N parts at once
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u8).range(1..=64))]
    jobs: u8,
    /// Print only errors
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
    /// Print the received snapshots as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (store, keys, found) = args.store.read()?;
    let target = target(args, &store, &keys, &found)?;
    let dir = args.dir.clone().or_image();
    with_channel(&dir, &args.image, ImageUse::Write, |channel| {
        let cannot = |failure: &dyn std::fmt::Display| anyhow!("cannot receive into {dir}: {failure}");
        let into = channel.open(dir.path()).map_err(|failure| cannot(&failure))?;
        let here = channel.subvolumes().map_err(|failure| cannot(&failure))?;
        let read = |key: &SnapshotKey| match found.iter().find(|found| found.key == *key) {
            Some(found) => store.manifest(found, &keys).map(Some),
            None => Ok(None),
        };
        let chain = chain_of(target, read, |key| here.iter().any(|info| is_same(info, key)))?;
        let mut done = Vec::new();
        for manifest in chain {
            let manifest = Arc::new(manifest);
            let received = receive(args, channel, &into, (&store, &keys), &manifest)
                .with_context(|| format!("cannot pull {} into {dir}", printable(&manifest.name)))?;
            done.push((manifest, received));
        }
        report(args, &done)
    })
}

/// The manifest of the snapshot that the user names. Only that one is read if its UUID is given.
fn target(
    args: &Args,
    store: &RemoteStore,
    keys: &RemoteKeys,
    found: &[FoundSnapshot],
) -> anyhow::Result<SnapshotManifest> {
    let is_key = |found: &&FoundSnapshot| found.key.to_string() == args.snapshot;
    if let Some(found) = found.iter().find(is_key) {
        return Ok(store.manifest(found, keys)?);
    }
    if found.is_empty() {
        bail!("{NO_SNAPSHOTS}");
    }
    let (manifests, _) = readable(store, keys, found);
    named(&manifests, &args.snapshot).cloned()
}

/// Downloads the stream of a snapshot and receives it (L1).
fn receive(
    args: &Args,
    channel: &Channel<'_>,
    into: &OpenedFile,
    (store, keys): (&RemoteStore, &Arc<RemoteKeys>),
    manifest: &Arc<SnapshotManifest>,
) -> anyhow::Result<Response> {
    let request = AnyRequest::Receive(Request {
        dir: 0,
        only_first: false,
        max_errors: 1,
        keep: false,
        force_decompress: false,
        verify: args.verify,
        shares: false,
        replaces: true,
        total_bytes: Some(manifest.stream_bytes),
    });
    let (from, to) = io::pipe().context("cannot make a pipe")?;
    let ended = AtomicBool::new(false);
    let (received, pulled) = thread::scope(|scope| {
        let downloads = usize::from(args.jobs);
        let ended = &ended;
        let loader = scope.spawn(move || {
            let mut out = SingleStream::new(manifest, to);
            store.pull_stream(manifest, keys, downloads, &mut out, &|| ended.load(Ordering::SeqCst))
        });
        let bar = match args.quiet {
            true => indicatif::ProgressBar::hidden(),
            false => progress_bytes(Some(manifest.stream_bytes), "pulling"),
        };
        let work = |job: &Job| channel.call_with_input(request, &[into], from.as_fd(), false, job);
        let received = with_progress_by(bar, "pulling", work);
        ended.store(true, Ordering::SeqCst);
        drop(from);
        (received, loader.join())
    });
    let pulled = joined(pulled)?;
    match (received, pulled) {
        (Ok(AnyResponse::Receive(done)), Ok(())) => check(manifest, done),
        (Ok(_), Ok(())) => Err(anyhow!("{}", ubtrfs_control::unexpected())),
        // The input ended early because of this error.
        (_, Err(error)) if !is_of_receiver(&error) => Err(error.into()),
        (Err(failure), _) if failure.errno() == Errno::EXIST => {
            Err(anyhow!("{failure}; to keep both, pull into another directory"))
        }
        (Err(failure), _) => Err(anyhow!("{failure}")),
        (Ok(_), Err(error)) => Err(error.into()),
    }
}

/// Whether a download failed because receive ended.
fn is_of_receiver(error: &RemoteError) -> bool {
    match error {
        RemoteError::Cancelled => true,
        RemoteError::Stream { source, .. } => source.kind() == io::ErrorKind::BrokenPipe,
        _ => false,
    }
}

/// Makes sure that the received subvolume is that of the manifest.
fn check(manifest: &SnapshotManifest, done: Response) -> anyhow::Result<Response> {
    let is_it = |uuid: &str| uuid.parse() == Ok(manifest.key.uuid);
    match &done.subvolumes[..] {
        [one] if is_it(&one.uuid) && one.path == manifest.name => Ok(done),
        _ => bail!("other subvolumes than that of the manifest were received: this is a bug of ubtrfs"),
    }
}

fn report(args: &Args, done: &[(Arc<SnapshotManifest>, Response)]) -> anyhow::Result<ExitCode> {
    if args.json {
        let received = |(manifest, response): &(Arc<SnapshotManifest>, Response)| {
            let mut value = super::json_of(manifest);
            value["id"] = response.subvolumes.first().map(|subvolume| subvolume.id).into();
            value["verified_bytes"] = response.verified_bytes.into();
            value
        };
        print_json(&json!({ "received": done.iter().map(received).collect::<Vec<_>>() }))?;
    } else if !args.quiet {
        if done.is_empty() {
            print_out("the snapshot is here already\n")?;
        }
        for (manifest, response) in done {
            let verified = match response.verified_bytes {
                0 => String::new(),
                bytes => format!(", {} verified", format_size(bytes)),
            };
            let (name, bytes) = (printable(&manifest.name), format_size(manifest.stream_bytes));
            print_out(&format!("pulled {name}: {bytes} in {}{verified}\n", parts(manifest.parts.len())))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
