//! Snapshots in object stores: `ubtrfs push`, `ubtrfs pull`, and `ubtrfs remote`, which lists, verifies and prunes them.
//!
//! Crate `remote` has the store, the parts and the manifests. Here they are connected with send and receive, which work on
//! a mount or on an image as for `ubtrfs send`.

mod lineage;
mod list;
mod prune;
pub(crate) mod pull;
pub(crate) mod push;
mod single_stream;
mod verify;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use rustix::fs::Mode;
use ubtrfs_format::item::Timespec;
use ubtrfs_remote::{FoundSnapshot, RemoteKeys, RemoteStore, SnapshotKey, SnapshotManifest, SnapshotTime, StoreUsage};

use super::offline::text::printable;
use super::place::{await_server, refuse_names_of_others};
use crate::common::{counted, warn};

/// Show, check and remove the snapshots in an object store
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    List(list::Args),
    Verify(verify::Args),
    Prune(prune::Args),
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.command {
        Command::List(args) => list::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Prune(args) => prune::run(args),
    }
}

// This struct has no doc comment, because it would become the help of every command that uses the struct.
#[derive(clap::Args)]
pub(crate) struct StoreArgs {
    /// The store: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIRECTORY; credentials come
    /// from the environment
    #[arg(value_name = "URL")]
    url: String,
    #[command(flatten)]
    keys: KeyArgs,
}

#[derive(clap::Args)]
struct KeyArgs {
    /// File with a secret key of age-keygen, for encrypted snapshots; can be given several times [default: the file that
    /// the variable UBTRFS_IDENTITY_FILE names]
    #[arg(short, long, value_name = "FILE")]
    identity: Vec<PathBuf>,
    /// File with public keys that can decrypt too [default: the file that the variable UBTRFS_RECIPIENTS_FILE names]
    #[arg(long, value_name = "FILE")]
    recipients_file: Vec<PathBuf>,
    /// A public key that can decrypt too; can be given several times
    #[arg(long, value_name = "AGE1...")]
    recipient: Vec<String>,
    /// Accept snapshots that were pushed with public keys alone; anybody who knows these keys can make such snapshots
    #[arg(long)]
    unsealed: bool,
}

impl StoreArgs {
    fn keys(&self) -> anyhow::Result<Arc<RemoteKeys>> {
        let KeyArgs { identity, recipients_file, recipient, unsealed } = &self.keys;
        let or_default = |files: &[PathBuf], variable: &str| match std::env::var_os(variable) {
            // Otherwise a mistake in a script would push everything in the clear.
            Some(file) if file.is_empty() => bail!("the variable {variable} is empty; unset it, or let it name a file"),
            Some(file) if files.is_empty() => Ok(vec![PathBuf::from(file)]),
            _ => Ok(files.to_vec()),
        };
        let identities = or_default(identity, "UBTRFS_IDENTITY_FILE")?;
        let recipients = or_default(recipients_file, "UBTRFS_RECIPIENTS_FILE")?;
        let keys = RemoteKeys::from_files(&identities, &recipients, recipient)?;
        Ok(Arc::new(keys.with_unsealed(*unsealed)))
    }

    fn open(&self, usage: StoreUsage) -> anyhow::Result<RemoteStore> {
        if let Some(dir) = RemoteStore::directory(&self.url) {
            await_server(&dir)?;
            refuse_names_of_others(&dir)?;
            if usage == StoreUsage::Write {
                // Snapshots have files that only their owners may read, so others may not read the store.
                rustix::process::umask(Mode::RWXG | Mode::RWXO);
            }
        }
        Ok(RemoteStore::open(&self.url, usage)?)
    }

    /// Reads the keys. Fails if they cannot decrypt.
    fn reading_keys(&self) -> anyhow::Result<Arc<RemoteKeys>> {
        let keys = self.keys()?;
        if !keys.can_read() {
            bail!("public keys do not decrypt; give the file with your secret key: --identity");
        }
        Ok(keys)
    }

    /// Opens the store to read its snapshots. Fails unless the keys fit.
    fn read(&self) -> anyhow::Result<(RemoteStore, Arc<RemoteKeys>, Vec<FoundSnapshot>)> {
        let keys = self.reading_keys()?;
        let store = self.open(StoreUsage::Read)?;
        let found = store.snapshots()?;
        store.check_encryption(&found, &keys)?;
        Ok((store, keys, found))
    }
}

/// Reads all manifests. Warns about those that cannot be read, and leaves them out. Sorts by time, the newest first.
fn readable(store: &RemoteStore, keys: &RemoteKeys, found: &[FoundSnapshot]) -> (Vec<SnapshotManifest>, usize) {
    let (mut manifests, mut nr_bad) = (Vec::new(), 0);
    for manifest in store.manifests(found, keys) {
        match manifest {
            Ok(manifest) => manifests.push(manifest),
            Err(error) => {
                warn(&error.to_string());
                nr_bad += 1;
            }
        }
    }
    manifests.sort_by_key(|manifest| std::cmp::Reverse((manifest.created, manifest.generation, manifest.key)));
    (manifests, nr_bad)
}

/// Finds the snapshot that a user means, which must be readable: by `latest`, its name, the form `UUID-TRANSACTION`, or the
/// beginning of that form if it has [`PREFIX_MIN`] digits. A name counts before a beginning.
fn named<'m>(manifests: &'m [SnapshotManifest], text: &str) -> anyhow::Result<&'m SnapshotManifest> {
    let key = text.to_ascii_lowercase();
    let has_name = manifests.iter().any(|manifest| manifest.name == text.as_bytes());
    let is_meant = |manifest: &&SnapshotManifest| match has_name {
        true => manifest.name == text.as_bytes(),
        false => key.len() >= PREFIX_MIN && manifest.key.to_string().starts_with(&key),
    };
    if text == "latest" && !manifests.iter().any(|manifest| manifest.name == b"latest") {
        return manifests.first().ok_or_else(|| anyhow!("no snapshot in the store can be read"));
    }
    let meant: Vec<&SnapshotManifest> = manifests.iter().filter(is_meant).collect();
    match &meant[..] {
        [one] => Ok(one),
        [] => bail!(
            "the store has no readable snapshot {}; list them with: ubtrfs remote list",
            printable(text.as_bytes())
        ),
        [first, ..] => {
            let (nr, text, of) =
                (meant.len(), printable(text.as_bytes()), if has_name { "" } else { " that begin with" });
            bail!("the store has {nr} snapshots{of} {text}; name one of them by its UUID, such as {}", first.key)
        }
    }
}

/// The shortest beginning of a UUID that names a snapshot.
const PREFIX_MIN: usize = 4;

/// The message about a store without snapshots, such as that of a wrong URL.
const NO_SNAPSHOTS: &str = "the store has no snapshots; check the URL, or push one: ubtrfs push";

/// The number of parts in words.
fn parts(nr: usize) -> String {
    counted(nr as u64, "part", "parts")
}

fn time_of(time: SnapshotTime) -> Timespec {
    Timespec { sec: time.sec, nsec: time.nsec }
}

/// Describes a snapshot as JSON.
fn json_of(manifest: &SnapshotManifest) -> serde_json::Value {
    let key = |key: &SnapshotKey| serde_json::json!({ "uuid": key.uuid.to_string(), "ctransid": key.ctransid });
    let mut value = serde_json::json!({
        "uuid": manifest.key.uuid.to_string(),
        "ctransid": manifest.key.ctransid,
        "parent": manifest.parent.as_ref().map(key),
        "source": manifest.source.map(|source| source.to_string()),
        "generation": manifest.generation,
        "created": { "sec": manifest.created.sec, "nsec": manifest.created.nsec },
        "pushed": manifest.pushed,
        "stream_bytes": manifest.stream_bytes,
        "stored_bytes": manifest.stored_bytes,
        "parts": manifest.parts.len(),
    });
    ubtrfs_format::print::insert_name(&mut value, "name", &manifest.name);
    value
}

/// The result of a thread that moved a stream. A panic is a bug.
fn joined<T>(thread: std::thread::Result<T>) -> anyhow::Result<T> {
    thread.map_err(|_| anyhow!("the transfer stopped: this is a bug of ubtrfs")).context("cannot use the store")
}
