//! Changing the filesystem id in all tree blocks of an unmounted filesystem.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_error::{Error, Result};
use ubtrfs_format::Logical;
use ubtrfs_volumes::IdRewrite;
use uuid::Uuid;

use crate::engine::{Engine, EngineOptions};
use crate::job::Job;
use crate::rescue::Rescue;

/// Gives a filesystem this id, or a random id, in its superblocks and tree blocks. Returns the id. The devices must be
/// opened for writing, and nothing else may use them. Continues an interrupted change. All copies of tree blocks are
/// read before anything is written. `job` counts the bytes of tree blocks that are read or written.
///
/// # Errors
///
/// The errors of [`IdRewrite`]; [`Error::Corrupt`] if a tree block has no good copy, and [`Error::Refused`] if its
/// copies differ. After these two errors nothing was changed, unless the call continued an interrupted change.
pub fn rewrite_id(devices: &[Arc<dyn Device>], fsid: Option<Uuid>, job: &Job) -> Result<Uuid> {
    let mut rewrite = IdRewrite::look(devices, fsid)?;
    let new = rewrite.fsid();
    if rewrite.is_rewritten() {
        rewrite.finish()?;
        return Ok(new);
    }
    let is_resumed = rewrite.is_resumed();
    if is_resumed {
        // A part of the devices may not be marked yet.
        rewrite.begin()?;
    }
    let rescue = Rescue { ignore_super_flags: is_resumed, ..Rescue::default() };
    let engine = Engine::open(devices.to_vec(), EngineOptions { read_only: true, rescue, ..EngineOptions::default() })?;
    rewrite.check_chunks(&engine.volumes)?;
    let blocks = engine.tree_blocks(&(0..u64::MAX))?;
    let nodesize = u64::from(engine.geometry.nodesize);
    job.add_total(nodesize.saturating_mul(2).saturating_mul(blocks.len() as u64));
    let mut node = vec![0; usize::try_from(nodesize).unwrap_or(usize::MAX)];
    for at in &blocks {
        job.check()?;
        engine.store.read_unknown(*at, &mut node)?;
        if !is_resumed {
            check_copies(&engine, *at, &node)?;
        }
        job.advance(nodesize);
    }
    rewrite.begin()?;
    for at in &blocks {
        engine.store.read_unknown(*at, &mut node)?;
        rewrite.rewrite(&engine.volumes, *at, &mut node)?;
        // After a cancellation, the filesystem could not be mounted.
        job.advance(nodesize);
    }
    engine.close()?;
    rewrite.finish()?;
    Ok(new)
}

/// Fails if the copies of a tree block differ. An old copy with a right checksum cannot be told from the good copy
/// here, and would get the first sector of the good copy.
fn check_copies(engine: &Engine, at: Logical, node: &[u8]) -> Result<()> {
    let mut other = vec![0; node.len()];
    for copy in 0..engine.volumes.num_copies(at) {
        engine.volumes.read_copy(at, &mut other, copy)?;
        if other != node {
            return Err(Error::Refused {
                what: format!("the copies of the tree block at {at} differ"),
                hint: "repair them first: ubtrfs scrub start -B",
            });
        }
    }
    Ok(())
}
