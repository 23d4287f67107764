//! [`FaultyStore`]: a store in memory that fails, corrupts, swaps and replays as a test says.

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// What goes wrong.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    /// Of 100 requests, so many fail: half of them before, half of them after they were carried out.
    pub(crate) failing_percent: u64,
    /// Of 100 reads, so many have a changed byte, on the way only.
    pub(crate) corrupting_percent: u64,
    /// Uploads after this number fail for good.
    pub(crate) puts_left: Option<usize>,
    /// Reads of content are never answered.
    pub(crate) is_silent: bool,
}

/// A store in memory.
#[derive(Debug, Default)]
pub(crate) struct FaultyStore {
    pub(crate) memory: InMemory,
    faults: Mutex<Faults>,
    turn: AtomicU64,
    puts: AtomicUsize,
    /// Objects that are read in place of others.
    swapped: Mutex<HashMap<Path, Path>>,
}

impl FaultyStore {
    pub(crate) fn set(&self, faults: Faults) {
        self.puts.store(0, Ordering::SeqCst);
        *self.faults.lock().unwrap() = faults;
    }

    /// Number of uploads since the faults were set.
    pub(crate) fn nr_puts(&self) -> usize {
        self.puts.load(Ordering::SeqCst)
    }

    /// Makes reads of `path` return `other`.
    pub(crate) fn swap(&self, path: &Path, other: &Path) {
        self.swapped.lock().unwrap().insert(path.clone(), other.clone());
    }

    /// A number below 100 that looks random, the same in each run.
    fn dice(&self) -> u64 {
        let turn = self.turn.fetch_add(1, Ordering::SeqCst);
        (turn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % 100
    }

    fn fail(&self, percent: impl Fn(&Faults) -> u64) -> Result<()> {
        let percent = percent(&self.faults.lock().unwrap());
        match self.dice() < percent {
            true => Err(Error::Generic { store: "faulty", source: "503 slow down".into() }),
            false => Ok(()),
        }
    }

    fn maybe_fail(&self) -> Result<()> {
        self.fail(|faults| faults.failing_percent / 2)
    }
}

impl Display for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("faulty")
    }
}

#[async_trait]
impl ObjectStore for FaultyStore {
    async fn put_opts(&self, path: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let left = self.faults.lock().unwrap().puts_left;
        if left.is_some_and(|left| self.puts.load(Ordering::SeqCst) >= left) {
            return Err(Error::PermissionDenied { path: path.to_string(), source: "no more".into() });
        }
        self.maybe_fail()?;
        self.puts.fetch_add(1, Ordering::SeqCst);
        let done = self.memory.put_opts(path, payload, options).await;
        self.maybe_fail()?;
        done
    }

    async fn put_multipart_opts(&self, path: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.memory.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        if !options.head && self.faults.lock().unwrap().is_silent {
            return std::future::pending().await;
        }
        self.maybe_fail()?;
        let path = self.swapped.lock().unwrap().get(path).unwrap_or(path).clone();
        let found = self.memory.get_opts(&path, options).await?;
        self.maybe_fail()?;
        if self.fail(|faults| faults.corrupting_percent).is_ok() {
            return Ok(found);
        }
        let (meta, range, attributes, extensions) =
            (found.meta.clone(), found.range.clone(), found.attributes.clone(), found.extensions.clone());
        let mut bytes = found.bytes().await?.to_vec();
        let at = bytes.len() / 2;
        bytes[at] ^= 0x10;
        let payload = GetResultPayload::Stream(futures_util::stream::once(async { Ok(Bytes::from(bytes)) }).boxed());
        Ok(GetResult { payload, meta, range, attributes, extensions })
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.memory.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.maybe_fail() {
            Ok(()) => self.memory.list(prefix),
            Err(error) => futures_util::stream::once(async { Err(error) }).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.memory.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.memory.copy_opts(from, to, options).await
    }
}

/// Reads, changes and removes objects behind the back of the crate.
impl FaultyStore {
    pub(crate) fn paths(&self, part: &str) -> Vec<Path> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut paths: Vec<Path> = runtime.block_on(async {
            let all = self.memory.list(None).map(|meta| meta.unwrap().location);
            all.filter(|path| std::future::ready(path.as_ref().contains(part))).collect().await
        });
        paths.sort();
        paths
    }

    pub(crate) fn read(&self, path: &Path) -> Vec<u8> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async { self.memory.get(path).await.unwrap().bytes().await.unwrap().to_vec() })
    }

    pub(crate) fn write(&self, path: &Path, bytes: Vec<u8>) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(self.memory.put(path, bytes.into())).unwrap();
    }

    pub(crate) fn remove(&self, path: &Path) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(self.memory.delete(path)).unwrap();
    }
}
