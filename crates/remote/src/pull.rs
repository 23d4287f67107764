//! Downloads a stream: several parts at once, each verified, in the order of the stream.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;

use tokio::task::{JoinHandle, spawn_blocking};

use crate::Result;
use crate::error::RemoteError;
use crate::keys::RemoteKeys;
use crate::manifest::SnapshotManifest;
use crate::objects::RemoteObjects;
use crate::packing::unpack;
use crate::store::{READS, RemoteStore, broken};

impl RemoteStore {
    /// Writes the stream of a snapshot to `out`. After an error, `out` has got only the beginning of the stream (P3).
    /// Ends with an error soon after `stop` returns true.
    ///
    /// # Errors
    ///
    /// A part cannot be read or is damaged, or the stream cannot be written.
    pub fn pull_stream(
        &self,
        manifest: &Arc<SnapshotManifest>,
        keys: &Arc<RemoteKeys>,
        downloads: usize,
        out: &mut dyn Write,
        stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        self.each_part(manifest, keys, downloads, stop, &mut |_, part| {
            let failed = |source| RemoteError::Stream { verb: "write", source };
            out.write_all(&part?).map_err(failed)
        })?;
        out.flush().map_err(|source| RemoteError::Stream { verb: "write", source })
    }

    /// Calls `take` with each part, in order. Ends at the first error of `take`.
    pub(crate) fn each_part(
        &self,
        manifest: &Arc<SnapshotManifest>,
        keys: &Arc<RemoteKeys>,
        downloads: usize,
        stop: &dyn Fn() -> bool,
        take: &mut dyn FnMut(usize, Result<Vec<u8>>) -> Result<()>,
    ) -> Result<()> {
        let mut running: VecDeque<JoinHandle<Result<Vec<u8>>>> = VecDeque::new();
        let mut next = 0;
        let mut result = Ok(());
        for index in 0..manifest.parts.len() {
            while next < manifest.parts.len() && running.len() < downloads.max(1) {
                let download = download(self.objects.clone(), manifest.clone(), next, keys.clone());
                running.push_back(self.runtime.spawn(download));
                next += 1;
            }
            let Some(first) = running.pop_front() else { break };
            let part = self.wait(first, stop);
            if matches!(part, Err(RemoteError::Cancelled)) {
                result = part.map(drop);
                break;
            }
            result = take(index, part);
            if result.is_err() {
                break;
            }
        }
        running.iter().for_each(JoinHandle::abort);
        result
    }
}

async fn download(
    objects: RemoteObjects,
    manifest: Arc<SnapshotManifest>,
    index: usize,
    keys: Arc<RemoteKeys>,
) -> Result<Vec<u8>> {
    let object = manifest.part_object(index);
    let most = manifest.parts.get(index).map_or(0, |part| part.stored_bytes);
    let mut attempt = 1;
    loop {
        let read = match objects.get(&object, most).await {
            Ok(stored) => {
                let (manifest, keys) = (manifest.clone(), keys.clone());
                spawn_blocking(move || unpack(&manifest, index, stored, &keys)).await.map_err(broken)?
            }
            Err(error) => Err(error),
        };
        match read {
            // The bytes may have been damaged on their way.
            Err(RemoteError::Damaged { .. }) if attempt < READS => attempt += 1,
            read => return read,
        }
    }
}
