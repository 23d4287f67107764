//! [`BenchTarget`]: the operations of workloads, implemented in this process and by system calls.
//!
//! - T1. An implementation of a call makes only the requests to the filesystem that the call needs, and caches nothing.
//!   So all implementations do equal work.
//! - T2. After [`BenchTarget::sync`], all previous work is durable on the device below.

pub(crate) mod dir;
pub(crate) mod engine;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;

use anyhow::Result;

/// The metadata of a file in an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Meta {
    /// Permission bits.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Modification time in seconds, which is also used as the access time.
    pub(crate) mtime: i64,
}

/// The kind of a directory entry. Workloads distinguish only directories from all other files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryKind {
    Dir,
    Other,
}

/// An administrative task on a whole filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Admin {
    /// Balance all metadata
    #[value(name = "metadata")]
    BalanceMetadata,
    /// Balance all data
    #[value(name = "data")]
    BalanceData,
    /// Convert data to DUP
    #[value(name = "dup")]
    ConvertDup,
    /// Enable quotas, and wait until the rescan has ended
    #[value(skip)]
    EnableQuotas,
}

/// A filesystem to be measured.
pub(crate) trait BenchTarget: Sync {
    /// A directory handle, which is cheap to copy.
    type Dir: Clone + Send + Sync;
    /// An open file, which is closed on drop.
    type File: Send + Sync;

    /// Returns the root directory of the target.
    fn root(&self) -> Result<Self::Dir>;
    /// Makes a directory and returns it.
    fn mkdir(&self, dir: &Self::Dir, name: &[u8], mode: u32) -> Result<Self::Dir>;
    /// Returns an existing directory in `dir`.
    fn child(&self, dir: &Self::Dir, name: &[u8]) -> Result<Self::Dir>;
    /// Makes a file and opens it for writing.
    fn create(&self, dir: &Self::Dir, name: &[u8], mode: u32) -> Result<Self::File>;
    /// Makes an empty file with as few calls as possible.
    fn create_empty(&self, dir: &Self::Dir, name: &[u8], mode: u32) -> Result<()>;
    /// Opens a file.
    fn open(&self, dir: &Self::Dir, name: &[u8], write: bool) -> Result<Self::File>;
    /// Writes all of `data`.
    fn write(&self, file: &Self::File, offset: u64, data: &[u8]) -> Result<()>;
    /// Reads into `buf` up to the end of the file. Returns the number of bytes.
    fn read(&self, file: &Self::File, offset: u64, buf: &mut [u8]) -> Result<usize>;
    /// Makes the file durable.
    fn fsync(&self, file: &Self::File) -> Result<()>;
    /// Sets owner, mode and times of an open file.
    fn set_meta(&self, file: &Self::File, meta: &Meta) -> Result<()>;
    /// Sets owner, times and, for directories only, the mode by name. Does not follow symbolic links.
    fn set_meta_at(&self, dir: &Self::Dir, name: &[u8], meta: &Meta, kind: EntryKind) -> Result<()>;
    /// Makes a symbolic link.
    fn symlink(&self, dir: &Self::Dir, name: &[u8], target: &[u8]) -> Result<()>;
    /// Makes a hard link.
    fn link(&self, from: (&Self::Dir, &[u8]), to: (&Self::Dir, &[u8])) -> Result<()>;
    /// Lists the names in a directory, except `.` and `..`.
    fn list(&self, dir: &Self::Dir) -> Result<Vec<(Vec<u8>, EntryKind)>>;
    /// Returns the size of a file by its name.
    fn stat(&self, dir: &Self::Dir, name: &[u8]) -> Result<u64>;
    /// Removes a name.
    fn unlink(&self, dir: &Self::Dir, name: &[u8]) -> Result<()>;
    /// Removes an empty directory.
    fn rmdir(&self, dir: &Self::Dir, name: &[u8]) -> Result<()>;
    /// Renames a file within its directory.
    fn rename(&self, dir: &Self::Dir, name: &[u8], new_name: &[u8]) -> Result<()>;
    /// Makes a subvolume and returns its root directory.
    fn make_subvolume(&self, dir: &Self::Dir, name: &[u8]) -> Result<Self::Dir>;
    /// Makes a read-only snapshot of a subvolume in the same directory.
    fn snapshot(&self, dir: &Self::Dir, source: &[u8], name: &[u8]) -> Result<()>;
    /// Deletes a subvolume. The space of the subvolume is freed later.
    fn delete_subvolume(&self, dir: &Self::Dir, name: &[u8]) -> Result<()>;
    /// Appends the stream of a read-only snapshot to a file: the whole snapshot, or only what differs from the snapshot
    /// `parent` in the same directory.
    fn send(&self, dir: &Self::Dir, name: &[u8], parent: Option<&[u8]>, output: &Path) -> Result<()>;
    /// Receives the streams in a file.
    fn receive(&self, dir: &Self::Dir, stream: &Path) -> Result<()>;
    /// Does work on the whole filesystem. The work is durable on return.
    fn run_task(&self, what: Admin) -> Result<()>;
    /// Makes everything durable (T2).
    fn sync(&self) -> Result<()>;
    /// Returns the engine's counters since the engine was opened. Empty if the engine is in another process.
    fn engine_metrics(&self) -> BTreeMap<String, f64> {
        BTreeMap::new()
    }
}

/// Opens a file and seeks to its end. Does not set `O_APPEND`, because `btrfs send` cannot write to a file that has
/// this flag.
fn open_to_append(path: &Path) -> Result<File> {
    let mut file = File::options().write(true).open(path)?;
    file.seek(SeekFrom::End(0))?;
    Ok(file)
}
