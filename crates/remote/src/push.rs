//! Uploads a stream: cuts it into parts, and uploads several at once.
//!
//! - U1. At most [`PushOptions::uploads`] parts are in memory.
//! - U2. A part that an earlier push uploaded is not uploaded again. It is found by its index and its tag, so its bytes
//!   are the same, whatever the stream was that held it.
//! - U3. When a push has returned, none of its uploads begins another request.

use std::collections::{HashMap, VecDeque};
use std::io::Read;
use std::sync::Arc;

use tokio::task::{JoinHandle, spawn_blocking};

use crate::Result;
use crate::error::RemoteError;
use crate::keys::RemoteKeys;
use crate::manifest::{MOST_PART_BYTES, MOST_PARTS, PARTS, PartName, PartRecord, PartTag, SnapshotKey, most_stored};
use crate::objects::RemoteObjects;
use crate::packing::PlainPart;
use crate::store::{RemoteStore, broken};

/// How a stream is uploaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PushOptions {
    /// Bytes of the stream in each part.
    pub part_bytes: u64,
    /// Level of zstd; 0 for no compression.
    pub level: i32,
    /// Number of parts that are uploaded at once.
    pub uploads: usize,
    /// Whether to upload also the parts that the store has.
    pub again: bool,
}

impl Default for PushOptions {
    fn default() -> Self {
        Self { part_bytes: 16 << 20, level: 3, uploads: 6, again: false }
    }
}

/// The parts of a stream that is in a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PushedStream {
    /// The parts.
    pub parts: Vec<PartRecord>,
    /// Bytes of the stream.
    pub stream_bytes: u64,
    /// Bytes of the parts in the store.
    pub stored_bytes: u64,
    /// Number of parts that an earlier push had uploaded.
    pub nr_resumed: usize,
    /// Bytes that were uploaded.
    pub uploaded_bytes: u64,
}

/// The parts of a snapshot that a store has whole.
type Existing = HashMap<(usize, PartTag), PartName>;

/// An upload that runs. Returns the record of its part, and whether it was uploaded before.
type Upload = JoinHandle<Result<(PartRecord, bool)>>;

impl RemoteStore {
    /// Uploads everything that `input` has as the parts of a snapshot. The snapshot is complete only after
    /// [`RemoteStore::put_manifest`]. Ends with an error soon after `stop` returns true.
    ///
    /// # Errors
    ///
    /// The input cannot be read, is empty or too long, or a part cannot be written.
    pub fn push_stream(
        &self,
        key: &SnapshotKey,
        input: &mut dyn Read,
        keys: &Arc<RemoteKeys>,
        options: &PushOptions,
        stop: &dyn Fn() -> bool,
    ) -> Result<PushedStream> {
        let part_bytes = options.part_bytes.clamp(1, MOST_PART_BYTES);
        let existing = Arc::new(if options.again { Existing::new() } else { self.existing(key)? });
        let mut running: VecDeque<Upload> = VecDeque::new();
        let mut done = PushedStream::default();
        let result = self.push_parts(input, part_bytes, options, &mut running, &mut done, stop, |index, bytes| {
            let upload =
                upload(self.objects.clone(), *key, index, bytes, keys.clone(), existing.clone(), options.level);
            self.runtime.spawn(upload)
        });
        running.iter().for_each(JoinHandle::abort);
        for upload in running {
            // An aborted upload ends where it waits, so this does not wait for the store (U3).
            drop(self.runtime.block_on(upload));
        }
        result?;
        if done.parts.is_empty() {
            let source = std::io::ErrorKind::UnexpectedEof.into();
            return Err(RemoteError::Stream { verb: "read", source });
        }
        Ok(done)
    }

    #[allow(clippy::too_many_arguments, reason = "the loop of one function, apart for its clean-up")]
    fn push_parts(
        &self,
        input: &mut dyn Read,
        part_bytes: u64,
        options: &PushOptions,
        running: &mut VecDeque<Upload>,
        done: &mut PushedStream,
        stop: &dyn Fn() -> bool,
        spawn: impl Fn(usize, Vec<u8>) -> Upload,
    ) -> Result<()> {
        let mut finish = |upload: Upload| -> Result<()> {
            let (part, is_old) = self.wait(upload, stop)?;
            done.stream_bytes += part.bytes;
            done.stored_bytes += part.stored_bytes;
            match is_old {
                true => done.nr_resumed += 1,
                false => done.uploaded_bytes += part.stored_bytes,
            }
            done.parts.push(part);
            Ok(())
        };
        for index in 0.. {
            let mut bytes = Vec::with_capacity(usize::try_from(part_bytes).unwrap_or(0));
            let read = Read::take(&mut *input, part_bytes).read_to_end(&mut bytes);
            read.map_err(|source| RemoteError::Stream { verb: "read", source })?;
            let (is_empty, is_last) = (bytes.is_empty(), (bytes.len() as u64) < part_bytes);
            if index >= MOST_PARTS && !is_empty {
                let advice = "use larger parts: --part-size";
                let what = "the stream".to_owned();
                return Err(RemoteError::TooMany { what, limit: MOST_PARTS, of: "parts", advice });
            }
            if !is_empty {
                running.push_back(spawn(index, bytes));
            }
            while running.len() >= options.uploads.max(1) || is_last && !running.is_empty() {
                if let Some(upload) = running.pop_front() {
                    finish(upload)?;
                }
            }
            if is_last {
                break;
            }
        }
        Ok(())
    }

    /// The parts that earlier pushes of the snapshot left.
    fn existing(&self, key: &SnapshotKey) -> Result<Existing> {
        let listed = self.part_objects(Some(key))?;
        let named = listed.into_iter().filter_map(|object| {
            let name = object.name.parse::<PartName>().ok()?;
            // A part that was cut is uploaded again.
            (name.stored_bytes == object.bytes).then_some(((name.index, name.tag), name))
        });
        Ok(named.collect())
    }
}

async fn upload(
    objects: RemoteObjects,
    key: SnapshotKey,
    index: usize,
    bytes: Vec<u8>,
    keys: Arc<RemoteKeys>,
    existing: Arc<Existing>,
    level: i32,
) -> Result<(PartRecord, bool)> {
    let packed = spawn_blocking(move || {
        let part = PlainPart::new(bytes, &keys);
        if let Some(found) = existing.get(&(index, part.tag)).and_then(|found| old_part(&part, found, &keys)) {
            return Ok((found, None));
        }
        part.pack(&keys, level).map(|(record, stored)| (record, Some(stored)))
    });
    let (record, stored) = packed.await.map_err(broken)??;
    let Some(stored) = stored else { return Ok((record, true)) };
    objects.put(&format!("{PARTS}/{key}/{}", record.object(index)), stored).await?;
    Ok((record, false))
}

/// The record of a part that the store has (U2). `None` if its size or checksum cannot be right.
fn old_part(part: &PlainPart, name: &PartName, keys: &RemoteKeys) -> Option<PartRecord> {
    let bytes = part.bytes.len() as u64;
    let is_plain = !name.zstd && !keys.encrypts();
    let may_be = match is_plain {
        true => name.stored_bytes == bytes && name.stored_sha256 == part.sha256,
        false => (1..=most_stored(bytes)).contains(&name.stored_bytes),
    };
    may_be.then_some(PartRecord {
        bytes,
        sha256: part.sha256,
        zstd: name.zstd,
        stored_bytes: name.stored_bytes,
        stored_sha256: name.stored_sha256,
        tag: part.tag,
    })
}
