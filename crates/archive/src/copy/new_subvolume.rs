//! Directories of a source that become subvolumes of a filesystem.

use anyhow::Context;
use ubtrfs_fs::Fs;

use crate::walk::printable;

/// A directory that becomes a subvolume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopiedSubvolume {
    /// Its path in the source and in the filesystem, as `/a/b`.
    pub path: Vec<u8>,
    /// Whether it is read-only when everything is copied.
    pub is_read_only: bool,
    /// Whether it becomes the default subvolume.
    pub is_default: bool,
}

impl CopiedSubvolume {
    /// Whether a path of the target is this subvolume.
    pub(super) fn is_at(&self, path: &[u8]) -> bool {
        self.path == path
    }

    /// Sets what waits for the end of the copy: a default subvolume, and read-only flags.
    fn finish(&self, fs: &Fs) -> anyhow::Result<()> {
        let names: Vec<&[u8]> = self.path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).collect();
        let id = names.iter().try_fold(fs.root(), |dir, name| fs.lookup(dir, name).map(|found| found.id))?;
        if self.is_read_only {
            fs.set_subvolume_read_only(id.root, true)?;
        }
        if self.is_default {
            fs.set_default_subvolume(id.root)?;
        }
        Ok(())
    }
}

/// Finishes the subvolumes when everything is copied.
pub(super) fn finish(subvolumes: &[CopiedSubvolume], fs: &Fs) -> anyhow::Result<()> {
    subvolumes.iter().try_for_each(|new| {
        new.finish(fs).with_context(|| format!("cannot finish the subvolume {}", printable(&new.path)))
    })
}
