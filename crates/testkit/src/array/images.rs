//! Image files of the members of an array, and Linux's judgement about them.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use tempfile::TempDir;
use ubtrfs_device::{Access, Device, FileDevice};

use crate::command::run;
use crate::judge::judge_mount;
use crate::{Compare, LoopMount, TreeEntry, btrfs_check_array};

/// The images of an array, removed on drop.
#[derive(Debug)]
pub struct ArrayImages {
    paths: Vec<PathBuf>,
    dir: TempDir,
}

impl ArrayImages {
    /// Makes sparse images of these sizes.
    pub fn empty(sizes: &[u64]) -> Result<Self> {
        let dir = TempDir::with_prefix("ubtrfs-array-")?;
        let path = |index: usize| dir.path().join(format!("device{}", index + 1));
        let paths: Vec<PathBuf> = (0..sizes.len()).map(path).collect();
        for (path, size) in paths.iter().zip(sizes) {
            File::create(path)?.set_len(*size)?;
        }
        Ok(Self { paths, dir })
    }

    /// Makes images of these sizes, with a filesystem that `mkfs.btrfs` makes with these arguments.
    pub fn kernel_made(sizes: &[u64], args: &[&str]) -> Result<Self> {
        let images = Self::empty(sizes)?;
        let paths: Vec<&str> = images.paths.iter().filter_map(|path| path.to_str()).collect();
        run("mkfs.btrfs", [&["-q", "-f"], args, &paths[..]].concat())?;
        Ok(images)
    }

    /// The paths, in the order of the device ids.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// The folder of the images.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Opens every image.
    pub fn devices(&self, access: Access) -> Result<Vec<Arc<dyn Device>>> {
        self.paths
            .iter()
            .map(|path| {
                let device = FileDevice::open(path, access).with_context(|| path.display().to_string())?;
                Ok(Arc::new(device) as Arc<dyn Device>)
            })
            .collect()
    }
}

/// Checks an array with `btrfs check`, `ubtrfs check` and Linux's mount and scrub, and compares the content that Linux
/// reads with the expected content. Images that are not given are missing; the mount needs the option `degraded` then.
pub fn judge_array(
    images: &[impl AsRef<Path>],
    mount_options: &str,
    expected: &[(&[TreeEntry], Compare)],
) -> Result<()> {
    btrfs_check_array(images)?;
    judge_mount(LoopMount::array(images, mount_options)?, expected)
}
