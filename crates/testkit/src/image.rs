//! Image files for tests: sparse, each in a temporary directory, removed on drop.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::TempDir;
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};

use crate::command::run;

/// A temporary image file.
#[derive(Debug)]
pub struct Image {
    path: PathBuf,
    _dir: TempDir,
}

impl Image {
    /// Makes a sparse file of zeros.
    pub fn empty(len_bytes: u64) -> Result<Self> {
        let dir = TempDir::with_prefix("ubtrfs-test-").context("cannot make a temporary directory")?;
        let path = dir.path().join("image");
        File::create_new(&path)?.set_len(len_bytes)?;
        Ok(Self { path, _dir: dir })
    }

    /// Makes an image formatted by `mkfs.btrfs` with these arguments and a random UUID.
    pub fn kernel_made(len_bytes: u64, mkfs_args: &[&str]) -> Result<Self> {
        let image = Self::empty(len_bytes)?;
        let mut args: Vec<&str> = vec!["-q", "-f"];
        args.extend_from_slice(mkfs_args);
        let path = image.path.to_string_lossy().into_owned();
        args.push(&path);
        run("mkfs.btrfs", args)?;
        Ok(image)
    }

    /// Makes a sparse copy of another image. The copy has the UUID of the original, so Linux mounts only one of the
    /// two images at a time.
    pub fn copy_of(path: &Path) -> Result<Self> {
        let image = Self::empty(0)?;
        run("cp", ["--sparse=always".as_ref(), path.as_os_str(), image.path.as_os_str()])?;
        Ok(image)
    }

    /// Path of the image file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Computes a hash of the content, to verify that nothing changed.
    pub fn digest(&self) -> Result<u64> {
        crate::tree_entry::digest_file(&self.path)
    }

    /// Reads bytes of the image.
    pub fn read_at(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        use std::os::unix::fs::FileExt;
        let mut buf = vec![0; len];
        File::open(&self.path)?.read_exact_at(&mut buf, offset)?;
        Ok(buf)
    }

    /// Overwrites bytes of the image.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        use std::os::unix::fs::FileExt;
        File::options().write(true).open(&self.path)?.write_all_at(data, offset)?;
        Ok(())
    }

    /// Changes every superblock that fits into the image, and recomputes its checksum (crc32c).
    pub fn patch_superblocks(&self, patch: impl Fn(&mut [u8])) -> Result<()> {
        let len_bytes = std::fs::metadata(&self.path)?.len();
        for offset in SUPERBLOCK_OFFSETS {
            if offset + SUPERBLOCK_SIZE as u64 > len_bytes {
                continue;
            }
            let mut raw = self.read_at(offset, SUPERBLOCK_SIZE)?;
            patch(&mut raw);
            let csum = ubtrfs_format::CsumType::Crc32c.compute(&raw[32..]);
            raw[..32].copy_from_slice(&csum);
            self.write_at(offset, &raw)?;
        }
        Ok(())
    }
}
