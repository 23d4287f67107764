//! [`Target`]: the operations that workloads are made of, once in this process and once by system calls.
//!
//! - T1. Both implementations do the same work for a call: what a program must ask a filesystem for, nothing cached in
//!   between.
//! - T2. After [`Target::sync`] everything that was done is durable on the device below.

pub(crate) mod dir;
pub(crate) mod engine;

use std::collections::BTreeMap;

use anyhow::Result;

/// What an archive says of a file besides its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Meta {
    /// Permission bits.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Modification time in seconds; the access time is set to the same.
    pub(crate) mtime: i64,
}

/// What a name in a directory stands for, as far as workloads care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Dir,
    Other,
}

/// A filesystem to be measured.
pub(crate) trait Target: Sync {
    /// A directory, cheap to copy.
    type Dir: Clone + Send + Sync;
    /// An open file; closed when dropped.
    type File: Send + Sync;

    /// The directory that the workload has for itself.
    fn root(&self) -> Result<Self::Dir>;
    /// Makes a directory and hands it out.
    fn mkdir(&self, dir: &Self::Dir, name: &[u8], mode: u32) -> Result<Self::Dir>;
    /// A directory that exists.
    fn child(&self, dir: &Self::Dir, name: &[u8]) -> Result<Self::Dir>;
    /// Makes a file and opens it for writing.
    fn create(&self, dir: &Self::Dir, name: &[u8], mode: u32) -> Result<Self::File>;
    /// Makes an empty file, with whatever calls are the shortest way to it.
    fn create_empty(&self, dir: &Self::Dir, name: &[u8], mode: u32) -> Result<()>;
    /// Opens a file.
    fn open(&self, dir: &Self::Dir, name: &[u8], write: bool) -> Result<Self::File>;
    /// Writes all of `data`.
    fn write(&self, file: &Self::File, offset: u64, data: &[u8]) -> Result<()>;
    /// Fills `buf` as far as the file goes; returns the bytes read.
    fn read(&self, file: &Self::File, offset: u64, buf: &mut [u8]) -> Result<usize>;
    /// Makes the file durable.
    fn fsync(&self, file: &Self::File) -> Result<()>;
    /// Sets owner, mode and times of an open file.
    fn set_meta(&self, file: &Self::File, meta: &Meta) -> Result<()>;
    /// The same by name; `follow` is not wanted for symbolic links, which have no mode of their own.
    fn set_meta_at(&self, dir: &Self::Dir, name: &[u8], meta: &Meta, kind: Kind) -> Result<()>;
    /// Makes a symbolic link.
    fn symlink(&self, dir: &Self::Dir, name: &[u8], target: &[u8]) -> Result<()>;
    /// Makes a further name for a file.
    fn link(&self, from: (&Self::Dir, &[u8]), to: (&Self::Dir, &[u8])) -> Result<()>;
    /// Hands out the names in a directory but `.` and `..`.
    fn list(&self, dir: &Self::Dir) -> Result<Vec<(Vec<u8>, Kind)>>;
    /// The size of what a name stands for.
    fn stat(&self, dir: &Self::Dir, name: &[u8]) -> Result<u64>;
    /// Takes a name away.
    fn unlink(&self, dir: &Self::Dir, name: &[u8]) -> Result<()>;
    /// Takes an empty directory away.
    fn rmdir(&self, dir: &Self::Dir, name: &[u8]) -> Result<()>;
    /// Gives a file another name in the same directory.
    fn rename(&self, dir: &Self::Dir, name: &[u8], new_name: &[u8]) -> Result<()>;
    /// Makes a subvolume and hands out its root directory.
    fn make_subvolume(&self, dir: &Self::Dir, name: &[u8]) -> Result<Self::Dir>;
    /// Makes a read-only snapshot of a subvolume in the same directory.
    fn snapshot(&self, dir: &Self::Dir, source: &[u8], name: &[u8]) -> Result<()>;
    /// Deletes a subvolume; its space is given back later.
    fn delete_subvolume(&self, dir: &Self::Dir, name: &[u8]) -> Result<()>;
    /// Makes everything durable (T2).
    fn sync(&self) -> Result<()>;
    /// What the engine counted since it was opened; nothing where it is elsewhere.
    fn engine_metrics(&self) -> BTreeMap<String, f64> {
        BTreeMap::new()
    }
}
