//! [`RemoteObjects`]: reads, writes, lists and removes objects of a store, and repeats what failed.
//!
//! - B1. A read takes memory for at most the expected number of bytes, whatever the store sends.
//! - B2. A list ends at a limit.
//! - B3. In a directory, only regular files are opened.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{GetResultPayload, ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload};
use tokio::time::timeout;

use crate::Result;
use crate::error::RemoteError;
use crate::store::broken;

/// The objects below a path in a store.
#[derive(Clone, Debug)]
pub(crate) struct RemoteObjects {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) prefix: Path,
    /// The directory, if the store is one of this machine.
    pub(crate) directory: Option<PathBuf>,
    /// How long the first repetition waits. Each later one waits longer.
    pub(crate) patience: Duration,
}

/// An object in a list.
#[derive(Clone, Debug)]
pub(crate) struct ListedObject {
    /// Its name below the folder that was listed.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// When it was written, in seconds since 1970.
    pub(crate) modified: i64,
}

impl RemoteObjects {
    fn path(&self, object: &str) -> Path {
        object.split('/').fold(self.prefix.clone(), |path, name| path.join(name))
    }

    pub(crate) async fn put(&self, object: &str, bytes: Vec<u8>) -> Result<()> {
        let payload = PutPayload::from(bytes);
        let path = self.path(object);
        self.repeated("write", object, || async { self.store.put(&path, payload.clone()).await.map(drop) }).await
    }

    /// Writes a small object. A store that does not answer is not waited for as long as for a part.
    pub(crate) async fn put_small(&self, object: &str, bytes: Vec<u8>) -> Result<()> {
        timeout(SILENCE, self.put(object, bytes)).await.unwrap_or_else(|_| Err(silent()))
    }

    /// Reads an object that has at most `most` bytes (B1).
    pub(crate) async fn get(&self, object: &str, most: u64) -> Result<Vec<u8>> {
        let path = self.path(object);
        self.refuse_special_file(object, &path).await?;
        let read = self.repeated("read", object, || async {
            let found = self.store.get(&path).await?;
            if found.meta.size > most || found.range.end.saturating_sub(found.range.start) > most {
                return Ok(None);
            }
            let mut bytes: Vec<u8> = Vec::with_capacity(usize::try_from(found.meta.size).unwrap_or(0));
            match found.payload {
                GetResultPayload::Stream(mut pieces) => {
                    while let Some(piece) = pieces.try_next().await? {
                        if (bytes.len() as u64).saturating_add(piece.len() as u64) > most {
                            return Ok(None);
                        }
                        bytes.extend_from_slice(&piece);
                    }
                }
                // A local file, which is read at once by a thread.
                GetResultPayload::File(file, path) => {
                    let read = tokio::task::spawn_blocking(move || {
                        use std::io::Read;
                        file.take(most.saturating_add(1)).read_to_end(&mut bytes).map(|_| bytes)
                    });
                    bytes = read.await?.map_err(|source| object_store::Error::Generic {
                        store: "file",
                        source: format!("{}: {source}", path.display()).into(),
                    })?;
                    if bytes.len() as u64 > most {
                        return Ok(None);
                    }
                }
            }
            Ok(Some(bytes))
        });
        let larger = || RemoteError::damaged(object, format!("it has more than {most} bytes"));
        read.await?.ok_or_else(larger)
    }

    /// Refuses an object of a directory that is no regular file. Opening a pipe waits for a writer, without an end.
    async fn refuse_special_file(&self, object: &str, path: &Path) -> Result<()> {
        let Some(file) = self.directory.as_ref().map(|directory| directory.join(path.as_ref())) else { return Ok(()) };
        // A file that does not exist is reported by the read.
        let is_special = move || std::fs::metadata(file).is_ok_and(|meta| !meta.is_file() && !meta.is_dir());
        match tokio::task::spawn_blocking(is_special).await.map_err(broken)? {
            true => Err(RemoteError::damaged(object, "it is no regular file")),
            false => Ok(()),
        }
    }

    /// Removes an object. An object that does not exist counts as removed.
    pub(crate) async fn remove(&self, object: &str) -> Result<()> {
        let path = self.path(object);
        let removed = self.repeated("remove", object, || async { self.store.delete(&path).await });
        match removed.await {
            Err(error) if error.is_missing() => Ok(()),
            done => done,
        }
    }

    /// Lists the objects below a folder, in order of name (B2).
    pub(crate) async fn list(&self, folder: &str, limit: usize) -> Result<Vec<ListedObject>> {
        let path = self.path(folder);
        let listed = self.repeated("list", folder, || async {
            let mut found: Vec<ObjectMeta> = Vec::new();
            let mut objects = self.store.list(Some(&path)).take(limit.saturating_add(1));
            loop {
                match timeout(SILENCE, objects.next()).await {
                    Ok(Some(object)) => found.push(object?),
                    Ok(None) => return Ok(Some(found)),
                    Err(_) => return Ok(None),
                }
            }
        });
        let listed = match listed.await {
            // A directory that does not exist has no files.
            Err(error) if error.is_missing() => return Ok(Vec::new()),
            listed => listed?.ok_or_else(silent)?,
        };
        if listed.len() > limit {
            let advice = "use several prefixes";
            return Err(RemoteError::TooMany { what: folder.to_owned(), limit, of: "objects", advice });
        }
        let name_of = |meta: &ObjectMeta| {
            let rest: Vec<String> = meta.location.prefix_match(&path)?.map(|part| part.as_ref().to_owned()).collect();
            Some(rest.join("/"))
        };
        let mut objects: Vec<ListedObject> = listed
            .iter()
            .filter_map(|meta| {
                let modified = meta.last_modified.timestamp();
                Some(ListedObject { name: name_of(meta)?, bytes: meta.size, modified })
            })
            .collect();
        objects.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(objects)
    }

    /// Makes a request until it succeeds, or until it failed for good or too often.
    async fn repeated<T, F: Future<Output = object_store::Result<T>>>(
        &self,
        verb: &'static str,
        object: &str,
        request: impl Fn() -> F,
    ) -> Result<T> {
        let mut wait = self.patience;
        for attempt in 1.. {
            match request().await {
                Ok(done) => return Ok(done),
                Err(error) if attempt >= ATTEMPTS || is_final(&error) => {
                    return Err(RemoteError::request(verb, object, &error));
                }
                Err(_) => tokio::time::sleep(wait).await,
            }
            wait = wait.saturating_mul(2);
        }
        Err(RemoteError::Cancelled)
    }
}

/// The error of a store that does not answer.
fn silent() -> RemoteError {
    RemoteError::late("the store", SILENCE)
}

/// Whether a repetition would fail too.
fn is_final(error: &object_store::Error) -> bool {
    use object_store::Error;
    matches!(
        error,
        Error::NotFound { .. }
            | Error::PermissionDenied { .. }
            | Error::Unauthenticated { .. }
            | Error::InvalidPath { .. }
            | Error::NotSupported { .. }
            | Error::NotImplemented { .. }
            | Error::UnknownConfigurationKey { .. }
    )
}

/// How long a store may be silent in a list, or when a small object is written.
const SILENCE: Duration = Duration::from_secs(60);
/// How often a request is made.
const ATTEMPTS: u32 = 6;
