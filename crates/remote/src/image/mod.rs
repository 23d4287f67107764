//! [`RemoteImage`]: an object as an image, read by ranges.
//!
//! The object is cut into blocks. Blocks that follow each other are fetched with one request, and several requests run at
//! once. A reader of one place after another gets the next blocks before it asks for them.
//!
//! - V1. All bytes are of one version of the object, as far as the server tells versions apart. After a change of the object,
//!   reads fail.
//! - V2. The cache has at most [`CACHE_BLOCKS`] blocks, and a request at most [`RUN_MAX`]. What a server sends beyond the
//!   range that was asked for is not kept.
//! - V3. A read ends after [`READ_TIME`] at the latest. After one that ended so, the server counts as silent for
//!   [`SILENT_TIME`]: reads of what is not in the cache fail at once. So who repeats a read does not wait as often.

mod block_cache;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt};
use parking_lot::Mutex;
use tokio::time::{sleep, timeout};

use self::block_cache::{BlockCache, BlockRead, BlockRun};
use crate::error::{RemoteError, redacted};
use crate::store::{StoreThreads, StoreUsage};
use crate::{Result, location};

/// Bytes of a block. The last one of an object may have fewer.
const BLOCK: u64 = 128 << 10;
/// Blocks that the cache keeps at most, 64 MiB.
const CACHE_BLOCKS: usize = 512;
/// Blocks of a request at most, 2 MiB.
const RUN_MAX: u64 = 16;
/// How long a read may take.
const READ_TIME: Duration = Duration::from_secs(40);
/// How long a server that was silent is not asked again.
const SILENT_TIME: Duration = Duration::from_secs(10);
/// How often a range is fetched until it arrives.
const ATTEMPTS: u32 = 4;
/// The pause before the first repetition.
const PAUSE: Duration = Duration::from_millis(200);

/// An object that is read as an image. Any number of threads may read.
#[derive(Debug)]
pub struct RemoteImage {
    runtime: StoreThreads,
    object: Arc<ObjectVersion>,
    cache: Arc<BlockCache>,
    /// Until when the server counts as silent (V3).
    silent_until: Mutex<Option<Instant>>,
}

/// The version of an object that was opened (V1).
#[derive(Debug)]
struct ObjectVersion {
    store: Arc<dyn ObjectStore>,
    path: Path,
    url: String,
    size_bytes: u64,
    /// The tag, and the time of the last change, when it was opened.
    tag: Option<String>,
    modified: i64,
    options: GetOptions,
    /// How long a read may take: [`READ_TIME`], but in tests.
    read_time: Duration,
}

impl RemoteImage {
    /// Opens the object of a URL, with the credentials of the environment.
    ///
    /// # Errors
    ///
    /// The URL names no object; the server does not answer, denies the object, or does not have it; its size is unknown.
    pub fn open(url: &str) -> Result<Self> {
        let (store, path) = location::open(url, StoreUsage::Object)?;
        Self::of_store(store, path, url, READ_TIME)
    }

    /// Opens an object of this store. `url` is for messages, and `read_time` limits a read.
    ///
    /// # Errors
    ///
    /// As [`RemoteImage::open`].
    #[doc(hidden)]
    pub fn of_store(store: Arc<dyn ObjectStore>, path: Path, url: &str, read_time: Duration) -> Result<Self> {
        let runtime = StoreThreads::start()?;
        let found = runtime.block_on(async { timeout(read_time, store.head(&path)).await });
        let meta = match found {
            Ok(found) => found.map_err(|error| RemoteError::request("read", url, &error))?,
            Err(_) => return Err(RemoteError::late(url, read_time)),
        };
        // A server does not compare a weak tag (RFC 9110, 13.1.1).
        let strong = meta.e_tag.clone().filter(|tag| !tag.starts_with("W/"));
        let unmodified = Some(meta.last_modified).filter(|_| strong.is_none());
        let options = GetOptions { if_match: strong, if_unmodified_since: unmodified, ..GetOptions::default() };
        let object = ObjectVersion {
            store,
            path,
            url: url.to_owned(),
            size_bytes: meta.size,
            tag: meta.e_tag,
            modified: meta.last_modified.timestamp(),
            options,
            read_time,
        };
        let cache = Arc::new(BlockCache::new(CACHE_BLOCKS));
        Ok(Self { runtime, object: Arc::new(object), cache, silent_until: Mutex::default() })
    }

    /// Size of the object in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.object.size_bytes
    }

    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    ///
    /// The range ends past the object; the server fails; the object has changed.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let end = offset.saturating_add(buf.len() as u64);
        if end > self.object.size_bytes {
            return Err(RemoteError::damaged(&self.object.url, "it ends before the range that was asked for"));
        }
        if buf.is_empty() {
            return Ok(());
        }
        let late = || RemoteError::late(&self.object.url, self.object.read_time);
        let now = Instant::now();
        let is_silent = self.silent_until.lock().is_some_and(|until| now < until);
        let until = if is_silent { now } else { now + self.object.read_time };
        let (first, last) = (offset / BLOCK, (end - 1) / BLOCK);
        let mut read = self.cache.begin(first, last);
        read.last = read.last.min((self.object.size_bytes - 1) / BLOCK);
        if !is_silent {
            self.fetch(read, first);
        }
        let mut rest = buf;
        for block in first..=last {
            let bytes = loop {
                match self.cache.wait(read, block, until) {
                    Some(found) => break found,
                    None if is_silent => return Err(late()),
                    None if Instant::now() >= until => {
                        self.note_silence();
                        return Err(late());
                    }
                    // It was dropped before this thread had it.
                    None => self.fetch(BlockRead { last: block, ..read }, block),
                }
            };
            let bytes = bytes.map_err(|error| {
                if matches!(*error, RemoteError::Late { .. }) {
                    self.note_silence();
                }
                RemoteError::Shared(error)
            })?;
            let start = usize::try_from(offset.saturating_sub(block * BLOCK)).unwrap_or(usize::MAX);
            let part = bytes.get(start..).unwrap_or_default();
            let (now, later) = rest.split_at_mut(part.len().min(rest.len()));
            now.copy_from_slice(&part[..now.len()]);
            rest = later;
        }
        match rest.is_empty() {
            true => Ok(()),
            false => Err(RemoteError::damaged(&self.object.url, "a block has too few bytes")),
        }
    }

    fn note_silence(&self) {
        *self.silent_until.lock() = Instant::now().checked_add(SILENT_TIME);
    }

    /// Fetches what is missing of a read, from `first` on.
    fn fetch(&self, read: BlockRead, first: u64) {
        for run in self.cache.missing(read, first, RUN_MAX) {
            let (object, cache) = (Arc::clone(&self.object), Arc::clone(&self.cache));
            self.runtime.spawn(async move {
                let fetched = object.fetch(run).await;
                cache.arrived(run, BLOCK, fetched.map_err(Arc::new));
            });
        }
    }
}

impl ObjectVersion {
    /// Fetches blocks. Repeats what fails for a moment.
    async fn fetch(&self, run: BlockRun) -> Result<Vec<u8>> {
        let mut pause = PAUSE;
        let repeated = async {
            let mut attempt = 1;
            loop {
                match self.fetch_once(run).await {
                    Err(error) if attempt < ATTEMPTS && error.may_pass() => sleep(pause).await,
                    done => return done,
                }
                attempt += 1;
                pause = pause.saturating_mul(3);
            }
        };
        timeout(self.read_time, repeated).await.unwrap_or_else(|_| Err(RemoteError::late(&self.url, self.read_time)))
    }

    async fn fetch_once(&self, run: BlockRun) -> Result<Vec<u8>> {
        let start = run.first * BLOCK;
        let end = (run.last + 1).saturating_mul(BLOCK).min(self.size_bytes);
        let len = usize::try_from(end.saturating_sub(start)).unwrap_or(0);
        let failed = |error: object_store::Error| match error {
            object_store::Error::Precondition { .. } => RemoteError::Changed { url: self.url.clone() },
            object_store::Error::NotSupported { source } => {
                RemoteError::NoRanges { url: self.url.clone(), cause: redacted(&source.to_string()) }
            }
            error => RemoteError::request("read", &self.url, &error),
        };
        let options = GetOptions { range: Some(GetRange::Bounded(start..end)), ..self.options.clone() };
        let found = self.store.get_opts(&self.path, options).await.map_err(failed)?;
        // Simple servers ignore the conditions of a request.
        let is_same = match (&self.tag, &found.meta.e_tag) {
            (Some(tag), Some(now)) => tag == now,
            _ => found.meta.last_modified.timestamp() == self.modified,
        };
        if !is_same || found.range != (start..end) || found.meta.size != self.size_bytes {
            return Err(RemoteError::Changed { url: self.url.clone() });
        }
        let mut bytes = Vec::with_capacity(len);
        let mut pieces = found.into_stream();
        while let Some(piece) = pieces.try_next().await.map_err(failed)? {
            if bytes.len() + piece.len() > len {
                return Err(RemoteError::damaged(&self.url, "the server sends more than was asked for"));
            }
            bytes.extend_from_slice(&piece);
        }
        match bytes.len() == len {
            true => Ok(bytes),
            false => Err(RemoteError::damaged(&self.url, "the server sends less than was asked for")),
        }
    }
}
