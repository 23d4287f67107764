//! `ubtrfs push`: sends a snapshot into an object store.
//!
//! - Q1. The manifest is written after the send has ended without an error and all its bytes are in the store. So a
//!   push that fails, is interrupted or killed leaves no snapshot, and the same command continues it.
//!   A prune does not run beside a push, so the parts and the parent stay until then.
//! - Q2. A parent never has the snapshot among its own parents.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow, bail};
use serde_json::json;
use ubtrfs_control::{Channel, Request as AnyRequest, Response, send};
use ubtrfs_fs::SubvolumeInfo;
use ubtrfs_remote::{
    FoundSnapshot, PushOptions, PushedStream, RemoteError, RemoteKeys, RemoteStore, SnapshotKey, SnapshotManifest,
    SnapshotTime, StoreUsage, StoreWork, chain_of,
};

use super::lineage::{find, is_same, key_of, parents};
use super::{StoreArgs, joined, parts};
use crate::commands::offline::text::printable;
use crate::commands::offline::{ImageOptions, ImageUse};
use crate::commands::place::{CommandTarget, with_channel};
use crate::commands::send::snapshot;
use crate::common::{format_size, parse_size, print_json, print_out, progress_bytes, warn};
use crate::job::with_progress_by;

/// Push a read-only snapshot into an object store
#[derive(clap::Args)]
#[command(
    after_help = "Only what differs from the newest snapshot that is here and in the store is pushed. If a push is interrupted, \
                  the same command continues it. The snapshot is in the store when the command has succeeded. With --identity or \
                  a recipient, everything is encrypted before it leaves this machine."
)]
pub(crate) struct Args {
    /// Read-only snapshot
    #[arg(value_name = "SUBVOL|IMAGE:/SUBVOL")]
    subvolume: CommandTarget,
    #[command(flatten)]
    store: StoreArgs,
    /// Push what differs from this snapshot, which the store must have
    #[arg(short, long, value_name = "PARENT", conflicts_with = "full")]
    parent: Option<CommandTarget>,
    /// Push the whole snapshot, so that it needs no other one
    #[arg(long)]
    full: bool,
    /// Push a snapshot that the store has once more, and upload also the parts that the store has
    #[arg(long)]
    again: bool,
    /// Bytes of the stream in each part (64K to 256M)
    #[arg(long, value_name = "SIZE", default_value = "16M", value_parser = parse_part_size)]
    part_size: u64,
    /// Compress with this level of zstd; 0 for no compression
    #[arg(long, value_name = "LEVEL", default_value_t = 3, value_parser = clap::value_parser!(i32).range(0..=19))]
    zstd: i32,
    /// Upload N parts at once
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u8).range(1..=64))]
    jobs: u8,
    /// Print only errors
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,
    /// Print the pushed snapshot as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    image: ImageOptions,
}

fn parse_part_size(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text)?;
    match (64 << 10..=256 << 20).contains(&bytes) {
        true => Ok(bytes),
        false => Err(format!("{text} is no size of a part; give 64K to 256M")),
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if let Some(parent) = args.parent.as_ref().filter(|parent| !args.subvolume.shares_filesystem_with(parent)) {
        let subvolume = &args.subvolume;
        bail!("{subvolume} and {parent} are not in the same filesystem; name paths in one mount or one image");
    }
    let keys = args.store.keys()?;
    let store = args.store.open(StoreUsage::Write)?;
    let mark = store.begin(StoreWork::Push)?;
    let found = store.snapshots()?;
    store.check_encryption(&found, &keys)?;
    with_channel(&args.subvolume, &args.image, ImageUse::Read, |channel| {
        let info = snapshot(channel, &args.subvolume)?;
        let name = info.name().to_vec();
        if name.is_empty() || info.uuid.is_nil() {
            bail!("{} has no name or no UUID; push a snapshot of it", args.subvolume);
        }
        let is_again = args.again || args.full || args.parent.is_some();
        if let Some(old) = find(&info, &found).filter(|_| !is_again) {
            if keys.can_read() {
                let manifest = store.manifest(old, &keys);
                manifest
                    .context("the snapshot is in the store, but cannot be read; to push it once more, add --again")?;
            }
            return already_there(args, &name, &old.key);
        }
        let key = key_of(&info);
        let parent = choose_parent(args, channel, &store, &keys, &info, &found)?;
        let pushed = upload(args, channel, &store, &keys, &info, parent.as_ref().map(|(info, _)| info))?;
        let since = parent.as_ref().map(|(info, _)| printable(info.name()));
        let parent = parent.map(|(_, key)| key);
        if let Some(parent) = parent
            && !store.snapshots()?.iter().any(|found| found.key == parent)
        {
            bail!("the parent {parent} was removed from the store meanwhile; push again");
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let manifest = SnapshotManifest {
            key,
            name,
            parent,
            source: Some(info.parent_uuid).filter(|uuid| !uuid.is_nil()),
            generation: info.generation.0,
            created: SnapshotTime { sec: info.otime.sec, nsec: info.otime.nsec },
            pushed: i64::try_from(now).unwrap_or(i64::MAX),
            stream_bytes: pushed.stream_bytes,
            stored_bytes: pushed.stored_bytes,
            part_bytes: args.part_size,
            parts: pushed.parts.clone(),
        };
        mark.check()?;
        store.put_manifest(&manifest, &keys).context("all parts are in the store, but not their manifest")?;
        report(args, &manifest, &pushed, since.as_deref(), keys.encrypts())
    })
}

/// Chooses the snapshot from which the difference is pushed: that of `-p`, or the newest one that both sides have and
/// whose own parents the store has.
fn choose_parent(
    args: &Args,
    channel: &Channel<'_>,
    store: &RemoteStore,
    keys: &RemoteKeys,
    info: &SubvolumeInfo,
    found: &[FoundSnapshot],
) -> anyhow::Result<Option<(SubvolumeInfo, SnapshotKey)>> {
    if args.full {
        return Ok(None);
    }
    if let Some(target) = &args.parent {
        let parent = snapshot(channel, target)?;
        if parent.id == info.id {
            bail!("{target} cannot be its own parent; leave out -p");
        }
        let Some(there) = find(&parent, found) else {
            bail!("the store does not have {target}; push it first, or leave out -p");
        };
        check_parent(store, keys, info, (&parent, there), found)?;
        return Ok(Some((parent, there.key)));
    }
    if found.is_empty() {
        return Ok(None);
    }
    let all = channel.subvolumes().map_err(|failure| anyhow!("cannot list the subvolumes: {failure}"))?;
    for (parent, there) in parents(info, &all, found) {
        match check_parent(store, keys, info, (parent, &there), found) {
            Ok(()) => return Ok(Some((parent.clone(), there.key))),
            Err(error) => warn(&format!("{} is not taken as the parent: {error:#}", printable(&parent.path))),
        }
    }
    Ok(None)
}

/// Fails if a snapshot cannot be the parent: its chain of parents is broken, or leads to the snapshot itself (Q2).
fn check_parent(
    store: &RemoteStore,
    keys: &RemoteKeys,
    info: &SubvolumeInfo,
    (parent, there): (&SubvolumeInfo, &FoundSnapshot),
    found: &[FoundSnapshot],
) -> anyhow::Result<()> {
    if !keys.can_read() {
        // The manifests cannot be read. A snapshot cannot be a parent of an older one.
        if parent.otransid >= info.otransid {
            bail!("it is not older than the snapshot; give --identity, so that the manifests can be read");
        }
        return Ok(());
    }
    let read = |key: &SnapshotKey| match found.iter().find(|found| found.key == *key) {
        Some(found) => store.manifest(found, keys).map(Some),
        None => Ok(None),
    };
    let chain = chain_of(store.manifest(there, keys)?, read, |_| false)?;
    if chain.iter().any(|manifest| is_same(info, &manifest.key)) {
        bail!("it needs the snapshot that is to be pushed");
    }
    Ok(())
}

/// Sends the snapshot and uploads its stream.
fn upload(
    args: &Args,
    channel: &Channel<'_>,
    store: &RemoteStore,
    keys: &std::sync::Arc<RemoteKeys>,
    info: &SubvolumeInfo,
    parent: Option<&SubvolumeInfo>,
) -> anyhow::Result<PushedStream> {
    let request = send::Request::Send(send::Send {
        subvolumes: vec![info.id.0],
        parent: parent.map(|parent| parent.id.0),
        clone_sources: Vec::new(),
        version: 2,
        compressed_data: true,
        no_data: false,
        joined: false,
    });
    let options = PushOptions {
        part_bytes: args.part_size,
        level: args.zstd,
        uploads: usize::from(args.jobs),
        again: args.again,
    };
    let key = key_of(info);
    let (from, to) = io::pipe().context("cannot make a pipe")?;
    let failed = AtomicBool::new(false);
    let (sent, pushed) = thread::scope(|scope| {
        let uploader = scope.spawn(|| {
            let mut stream = SentStream { from, failed: &failed };
            store.push_stream(&key, &mut stream, keys, &options, &|| failed.load(Ordering::SeqCst))
        });
        let bar = if args.quiet { indicatif::ProgressBar::hidden() } else { progress_bytes(None, "pushing") };
        let sent = with_progress_by(bar, "pushing", |job| {
            channel.call_with_output(AnyRequest::Send(request), &[], to.as_fd(), false, job)
        });
        failed.store(sent.is_err(), Ordering::SeqCst);
        drop(to);
        (sent, uploader.join())
    });
    let pushed = joined(pushed)?;
    match (sent, pushed) {
        (Ok(Response::Send(done)), Ok(pushed)) if done.bytes == pushed.stream_bytes => Ok(pushed),
        (Ok(_), Ok(_)) => Err(anyhow!("cannot send {}: {}", args.subvolume, ubtrfs_control::unexpected())),
        // If the send failed, the uploader gave up.
        (Err(failure), Ok(_) | Err(RemoteError::Cancelled | RemoteError::Stream { .. })) => {
            Err(anyhow!("cannot send {}: {failure}", args.subvolume))
        }
        (_, Err(error)) => {
            Err(anyhow::Error::new(error)
                .context(format!("cannot push {}; the same command continues it", args.subvolume)))
        }
    }
}

/// The stream of a send. If the send failed, its end is an error.
struct SentStream<'f> {
    from: io::PipeReader,
    failed: &'f AtomicBool,
}

impl Read for SentStream<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(out)?;
        match count == 0 && self.failed.load(Ordering::SeqCst) {
            true => Err(io::Error::other("the send failed")),
            false => Ok(count),
        }
    }
}

fn already_there(args: &Args, name: &[u8], key: &SnapshotKey) -> anyhow::Result<ExitCode> {
    if args.json {
        let mut value = json!({ "uuid": key.uuid.to_string(), "ctransid": key.ctransid, "was_there": true });
        ubtrfs_format::print::insert_name(&mut value, "name", name);
        print_json(&value)?;
    } else if !args.quiet {
        print_out(&format!("{} is in the store already\n", printable(name)))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn report(
    args: &Args,
    manifest: &SnapshotManifest,
    pushed: &PushedStream,
    since: Option<&str>,
    is_encrypted: bool,
) -> anyhow::Result<ExitCode> {
    if args.json {
        let mut value = super::json_of(manifest);
        value["was_there"] = false.into();
        value["encrypted"] = is_encrypted.into();
        value["uploaded_bytes"] = pushed.uploaded_bytes.into();
        value["resumed_parts"] = pushed.nr_resumed.into();
        print_json(&value)?;
    } else if !args.quiet {
        let of = since.map_or("whole".to_owned(), |parent| format!("since {parent}"));
        let resumed = match pushed.nr_resumed {
            0 => String::new(),
            count => format!(", {count} of them were there"),
        };
        print_out(&format!(
            "pushed {} ({of}): {} in {}{resumed}, {} uploaded{}\n",
            printable(&manifest.name),
            format_size(manifest.stream_bytes),
            parts(manifest.parts.len()),
            format_size(pushed.uploaded_bytes),
            if is_encrypted { ", encrypted" } else { "" },
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
