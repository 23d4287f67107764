//! Tests of the crate with stores that fail and lie.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod faulty_store;
mod image;
mod prune;
mod transfer;

use std::sync::Arc;
use std::time::Duration;

use faulty_store::{Faults, FaultyStore};
use object_store::path::Path;
use ubtrfs_remote::{
    PushOptions, PushedStream, RemoteError, RemoteKeys, RemoteStore, SnapshotKey, SnapshotManifest, SnapshotTime,
};
use uuid::Uuid;

fn key(nr: u128) -> SnapshotKey {
    SnapshotKey { uuid: Uuid::from_u128(nr), ctransid: 7 }
}

/// A store in memory, and what opens it.
struct Bed {
    inner: Arc<FaultyStore>,
    store: RemoteStore,
    keys: Arc<RemoteKeys>,
}

impl Bed {
    fn new(keys: RemoteKeys) -> Self {
        let inner = Arc::new(FaultyStore::default());
        let store =
            RemoteStore::with_store(inner.clone(), Path::from("some/prefix"), Duration::from_millis(1)).unwrap();
        Self { inner, store, keys: Arc::new(keys) }
    }

    fn plain() -> Self {
        Self::new(RemoteKeys::none())
    }

    fn encrypted() -> Self {
        Self::new(new_keys())
    }

    fn push_parts(&self, key: SnapshotKey, stream: &[u8]) -> Result<PushedStream, RemoteError> {
        self.store.push_stream(&key, &mut &*stream, &self.keys, &options(), &|| false)
    }

    /// Pushes a stream as a snapshot.
    fn push(&self, nr: u128, parent: Option<u128>, stream: &[u8]) -> Result<SnapshotManifest, RemoteError> {
        let pushed = self.push_parts(key(nr), stream)?;
        let manifest = SnapshotManifest {
            key: key(nr),
            name: format!("s{nr}").into_bytes(),
            parent: parent.map(key),
            source: Some(Uuid::from_u128(99)),
            generation: 1,
            created: SnapshotTime { sec: i64::try_from(nr).unwrap() * 86_400, nsec: 0 },
            pushed: 0,
            stream_bytes: pushed.stream_bytes,
            stored_bytes: pushed.stored_bytes,
            part_bytes: options().part_bytes,
            parts: pushed.parts,
        };
        self.store.put_manifest(&manifest, &self.keys)?;
        Ok(manifest)
    }

    fn manifest(&self, nr: u128) -> Result<SnapshotManifest, RemoteError> {
        let found = self.store.snapshots()?;
        self.store.check_encryption(&found, &self.keys)?;
        self.store.manifest(found.iter().find(|found| found.key == key(nr)).unwrap(), &self.keys)
    }

    fn pull(&self, nr: u128) -> Result<Vec<u8>, RemoteError> {
        let (manifest, mut out) = (Arc::new(self.manifest(nr)?), Vec::new());
        self.store.pull_stream(&manifest, &self.keys, 4, &mut out, &|| false).map(|()| out)
    }
}

/// Keys of a new identity.
fn new_keys() -> RemoteKeys {
    use age::secrecy::ExposeSecret;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), age::x25519::Identity::generate().to_string().expose_secret()).unwrap();
    RemoteKeys::from_files(&[file.path()], &[], &[]).unwrap()
}

fn options() -> PushOptions {
    PushOptions { part_bytes: 10_000, level: 3, uploads: 4, again: false }
}

/// Bytes that are partly compressible, and differ for each seed.
fn stream(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        match bytes.len() / 10_000 % 2 {
            0 => bytes.extend_from_slice(&state.to_le_bytes()),
            _ => bytes.extend_from_slice(&[state.to_le_bytes()[0]; 40]),
        }
    }
    bytes.truncate(len);
    bytes
}

fn no_faults() -> Faults {
    Faults::default()
}
