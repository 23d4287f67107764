//! Reads everything of a snapshot again.

use std::sync::Arc;

use crate::Result;
use crate::error::RemoteError;
use crate::keys::RemoteKeys;
use crate::manifest::SnapshotManifest;
use crate::store::RemoteStore;

/// The result of a verification.
#[derive(Debug, Default)]
pub struct VerifyReport {
    /// Parts that are whole.
    pub nr_good: usize,
    /// Bytes of the stream in these parts.
    pub stream_bytes: u64,
    /// What is wrong with the other parts.
    pub problems: Vec<RemoteError>,
}

impl RemoteStore {
    /// Reads and verifies all parts of a snapshot. With `quick`, only looks whether all parts exist with their sizes.
    /// `verified` is called with the bytes of the stream in each part. Ends with an error soon after `stop` returns true.
    ///
    /// # Errors
    ///
    /// The store cannot be listed, or the work was cancelled. Damaged parts are no errors, but problems of the report.
    pub fn verify_snapshot(
        &self,
        manifest: &Arc<SnapshotManifest>,
        keys: &Arc<RemoteKeys>,
        downloads: usize,
        quick: bool,
        verified: &dyn Fn(u64),
        stop: &dyn Fn() -> bool,
    ) -> Result<VerifyReport> {
        let mut report = VerifyReport::default();
        if quick {
            let listed = self.part_objects(Some(&manifest.key))?;
            for (index, part) in manifest.parts.iter().enumerate() {
                let name = part.object(index);
                let found = listed.binary_search_by(|object| object.name.cmp(&name)).map(|at| listed[at].bytes);
                let object = manifest.part_object(index);
                let size = match found {
                    Ok(bytes) if bytes == part.stored_bytes => Ok(()),
                    Ok(bytes) => {
                        let what = format!("it has {bytes} bytes instead of {}", part.stored_bytes);
                        Err(RemoteError::damaged(object, what))
                    }
                    Err(_) => Err(RemoteError::damaged(object, "it does not exist")),
                };
                report.count(part.bytes, size);
                verified(part.bytes);
            }
            return Ok(report);
        }
        self.each_part(manifest, keys, downloads, stop, &mut |index, part| {
            let bytes = manifest.parts.get(index).map_or(0, |part| part.bytes);
            report.count(bytes, part.map(drop));
            verified(bytes);
            Ok(())
        })?;
        Ok(report)
    }
}

impl VerifyReport {
    fn count(&mut self, bytes: u64, part: Result<()>) {
        match part {
            Ok(()) => {
                self.nr_good += 1;
                self.stream_bytes = self.stream_bytes.saturating_add(bytes);
            }
            Err(problem) => self.problems.push(problem),
        }
    }
}
