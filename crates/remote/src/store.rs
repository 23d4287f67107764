//! [`RemoteStore`]: one place in an object store, and the snapshots that it has.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use object_store::ObjectStore;
use object_store::path::Path;
use tokio::runtime::Runtime;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::timeout;

use crate::error::RemoteError;
use crate::keys::RemoteKeys;
use crate::manifest::{
    MOST_MANIFEST_BYTES, PARTS, SNAPSHOTS, SnapshotKey, SnapshotManifest, manifest_object, most_stored,
    parse_manifest_name,
};
use crate::objects::{ListedObject, RemoteObjects};
use crate::{Result, location};

/// What a command does with a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreUsage {
    /// It only reads.
    Read,
    /// It writes snapshots.
    Write,
    /// It reads one object, which the URL names.
    Object,
}

/// A place in an object store.
#[derive(Debug)]
pub struct RemoteStore {
    pub(crate) runtime: StoreThreads,
    pub(crate) objects: RemoteObjects,
}

/// A snapshot whose manifest a store has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundSnapshot {
    /// The snapshot.
    pub key: SnapshotKey,
    /// Whether it is encrypted.
    pub is_encrypted: bool,
    /// When the manifest was written, by the clock of the store, in seconds since 1970.
    pub pushed: i64,
}

impl RemoteStore {
    /// Opens the store of a URL, with the credentials of the environment. Makes no request.
    ///
    /// # Errors
    ///
    /// The URL names no store, the environment lacks what the store needs, or a directory does not exist.
    pub fn open(url: &str, usage: StoreUsage) -> Result<Self> {
        let (store, prefix) = location::open(url, usage)?;
        let mut opened = Self::with_store(store, prefix, PATIENCE)?;
        opened.objects.directory = Self::directory(url);
        Ok(opened)
    }

    /// Returns the directory of this machine that a URL names; `None` if it names another store.
    pub fn directory(url: &str) -> Option<PathBuf> {
        location::directory_of(url)
    }

    /// Uses this store; requests that fail are repeated after `patience`. For tests with stores that fail.
    ///
    /// # Errors
    ///
    /// The runtime cannot be started.
    #[doc(hidden)]
    pub fn with_store(store: Arc<dyn ObjectStore>, prefix: Path, patience: Duration) -> Result<Self> {
        Ok(Self {
            runtime: StoreThreads::start()?,
            objects: RemoteObjects { store, prefix, directory: None, patience },
        })
    }

    /// Lists the snapshots that have a manifest, in order of their keys. Other objects are left out.
    ///
    /// # Errors
    ///
    /// The store cannot be listed, or has too many objects.
    pub fn snapshots(&self) -> Result<Vec<FoundSnapshot>> {
        let listed = self.runtime.block_on(self.objects.list(SNAPSHOTS, MOST_SNAPSHOTS))?;
        let found = |object: &ListedObject| {
            let (key, is_encrypted) = parse_manifest_name(&object.name)?;
            Some(FoundSnapshot { key, is_encrypted, pushed: object.modified })
        };
        let mut snapshots: Vec<FoundSnapshot> = listed.iter().filter_map(found).collect();
        snapshots.sort_by_key(|found| found.key);
        Ok(snapshots)
    }

    /// Refuses a store whose snapshots are encrypted if there are no keys, and the other way round. So nothing is pushed
    /// in the clear by mistake, and nobody can pass a snapshot of their own for an encrypted one.
    ///
    /// # Errors
    ///
    /// A snapshot is not what the keys say.
    pub fn check_encryption(&self, found: &[FoundSnapshot], keys: &RemoteKeys) -> Result<()> {
        let Some(wrong) = found.iter().find(|found| found.is_encrypted != keys.encrypts()) else { return Ok(()) };
        let object = manifest_object(&wrong.key, wrong.is_encrypted);
        let what = match wrong.is_encrypted {
            true => "is encrypted; give the file with your secret key: --identity",
            false => "is not encrypted; leave out the keys, or use another prefix for encrypted snapshots",
        };
        Err(RemoteError::Keys { object, what })
    }

    /// Reads a manifest.
    ///
    /// # Errors
    ///
    /// It cannot be read, is damaged, or the keys do not fit.
    pub fn manifest(&self, found: &FoundSnapshot, keys: &RemoteKeys) -> Result<SnapshotManifest> {
        self.runtime.block_on(self.read_manifest(found, keys))
    }

    /// Reads manifests, several at once, in the order of `found`. Each one can fail by itself.
    pub fn manifests(&self, found: &[FoundSnapshot], keys: &RemoteKeys) -> Vec<Result<SnapshotManifest>> {
        let reads = stream::iter(found.iter().map(|found| self.read_manifest(found, keys)));
        self.runtime.block_on(reads.buffered(MANIFESTS_AT_ONCE).collect())
    }

    async fn read_manifest(&self, found: &FoundSnapshot, keys: &RemoteKeys) -> Result<SnapshotManifest> {
        let object = manifest_object(&found.key, found.is_encrypted);
        if found.is_encrypted != keys.encrypts() {
            self.check_encryption(std::slice::from_ref(found), keys)?;
        }
        let mut attempt = 1;
        loop {
            let bytes = self.objects.get(&object, most_stored(MOST_MANIFEST_BYTES)).await?;
            match SnapshotManifest::decode(&object, &found.key, &bytes, keys) {
                // The bytes may have been damaged on their way.
                Err(RemoteError::Damaged { .. }) if attempt < READS => attempt += 1,
                decoded => return decoded,
            }
        }
    }

    /// Writes a manifest, which makes the snapshot complete (P1).
    ///
    /// # Errors
    ///
    /// The manifest cannot be written, or has impossible fields.
    pub fn put_manifest(&self, manifest: &SnapshotManifest, keys: &RemoteKeys) -> Result<()> {
        let bytes = manifest.encode(keys)?;
        let object = manifest_object(&manifest.key, keys.encrypts());
        self.runtime.block_on(self.objects.put(&object, bytes))
    }

    /// Lists the objects of the parts of one snapshot, or of all, with their names below `parts/` or `parts/KEY/`.
    pub(crate) fn part_objects(&self, key: Option<&SnapshotKey>) -> Result<Vec<ListedObject>> {
        let folder = key.map_or(PARTS.to_owned(), |key| format!("{PARTS}/{key}"));
        self.runtime.block_on(self.objects.list(&folder, MOST_OBJECTS))
    }

    /// Waits for a task, and gives up if `stop` says so.
    pub(crate) fn wait<T>(&self, mut task: JoinHandle<Result<T>>, stop: &dyn Fn() -> bool) -> Result<T> {
        loop {
            match self.runtime.block_on(async { timeout(STOP_PAUSE, &mut task).await }) {
                Ok(done) => return done.map_err(broken)?,
                Err(_) if stop() => {
                    task.abort();
                    return Err(RemoteError::Cancelled);
                }
                Err(_) => {}
            }
        }
    }

    pub(crate) fn remove(&self, object: &str) -> Result<()> {
        self.runtime.block_on(self.objects.remove(object))
    }
}

/// The threads that drive requests. When this is dropped, it does not wait for a thread that is inside of a file
/// operation: a directory on a server that does not answer would stop the program.
#[derive(Debug)]
pub(crate) struct StoreThreads(Option<Runtime>);

impl StoreThreads {
    pub(crate) fn start() -> Result<Self> {
        let started = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .thread_name("remote")
            .enable_all()
            .build();
        let failed = |source| RemoteError::Host { what: "start the threads for the store".to_owned(), source };
        Ok(Self(Some(started.map_err(failed)?)))
    }
}

impl Deref for StoreThreads {
    type Target = Runtime;

    #[allow(clippy::expect_used, reason = "only `drop` takes the runtime")]
    fn deref(&self) -> &Runtime {
        self.0.as_ref().expect("the threads run")
    }
}

impl Drop for StoreThreads {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// A task that panicked or was aborted.
pub(crate) fn broken(error: JoinError) -> RemoteError {
    match error.is_cancelled() {
        true => RemoteError::Cancelled,
        false => RemoteError::Host {
            what: "transfer a part".to_owned(),
            source: std::io::Error::other("this is a bug of ubtrfs"),
        },
    }
}

/// Interval of the checks for cancellation.
const STOP_PAUSE: Duration = Duration::from_millis(100);
/// Threads that drive requests; parts are packed by other threads.
const WORKERS: usize = 2;
/// How long the first repetition of a request waits.
const PATIENCE: Duration = Duration::from_millis(200);
const MANIFESTS_AT_ONCE: usize = 8;
/// How often an object that is damaged is read.
pub(crate) const READS: u32 = 3;
const MOST_SNAPSHOTS: usize = 100_000;
const MOST_OBJECTS: usize = 4_000_000;
