//! Reading directories.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use ubtrfs_fs::InodeId;

use crate::error::{Result, ResultExt};
use crate::metadata::{FileKind, Metadata};
use crate::{Error, Filesystem};

/// Maximum number of entries in one batch.
const BATCH: usize = 256;

/// An iterator over the entries of a directory, in the order of their creation, without `.` and `..`. Returned by
/// [`Filesystem::read_dir`].
///
/// The iterator returns every entry once; only entries that are made or removed during the iteration may be missing.
/// The iterator ends after the first error.
///
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// for name in ["one", "two", "three"] {
///     fs.write(name, "")?;
/// }
/// let names: Result<Vec<_>, _> = fs.read_dir("/")?.map(|entry| Ok::<_, ubtrfs::Error>(entry?.path())).collect();
/// assert_eq!(names?, ["/one", "/two", "/three"].map(std::path::PathBuf::from));
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct ReadDir {
    fs: Filesystem,
    path: PathBuf,
    dir: InodeId,
    /// Entries of the last batch that the iterator has not returned yet, in reverse order.
    batch: Vec<DirEntry>,
    cookie: u64,
    /// The position after the entry that was last when the iteration began. The iteration stops there, so it ends even
    /// if the directory grows.
    end: u64,
    done: bool,
}

/// An entry of a directory: a name and the kind of file behind it.
///
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// fs.create_dir("/etc")?;
/// fs.write("/etc/hostname", "box")?;
/// for entry in fs.read_dir("/etc")? {
///     let entry = entry?;
///     assert_eq!(entry.file_name(), "hostname");
///     assert_eq!(entry.path().to_str(), Some("/etc/hostname"));
///     assert_eq!(entry.kind(), Some(ubtrfs::FileKind::File));
///     assert!(!entry.is_subvolume());
///     assert_eq!(entry.metadata()?.len(), 3);
/// }
/// # assert_eq!(fs.read_dir("/etc")?.count(), 1);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct DirEntry {
    fs: Filesystem,
    dir: PathBuf,
    name: OsString,
    id: InodeId,
    kind: Option<FileKind>,
    is_subvolume: bool,
}

impl ReadDir {
    pub(crate) fn new(fs: &Filesystem, path: &Path, dir: InodeId) -> Result<Self> {
        let end = fs.engine().readdir_end(dir).while_doing("list", path)?;
        Ok(Self { fs: fs.clone(), path: path.to_owned(), dir, batch: Vec::new(), cookie: 0, end, done: false })
    }

    fn read_batch(&mut self) -> std::result::Result<(), ubtrfs_fs::Error> {
        let (fs, path, dir, end) = (&self.fs, &self.path, self.dir, self.end);
        let (batch, cookie, done) = (&mut self.batch, &mut self.cookie, &mut self.done);
        let mut full = false;
        fs.engine().readdir(dir, *cookie, &mut |entry| {
            if batch.len() == BATCH || entry.next_cookie > end.saturating_add(1) {
                full = batch.len() == BATCH;
                return false;
            }
            *cookie = entry.next_cookie;
            if entry.name != b"." && entry.name != b".." {
                batch.push(DirEntry {
                    fs: fs.clone(),
                    dir: path.clone(),
                    name: OsString::from_vec(entry.name.to_vec()),
                    id: entry.id,
                    kind: FileKind::of(entry.file_type),
                    is_subvolume: entry.id.root != dir.root,
                });
            }
            true
        })?;
        *done = !full;
        batch.reverse();
        Ok(())
    }
}

impl Iterator for ReadDir {
    type Item = Result<DirEntry>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.batch.is_empty()
            && !self.done
            && let Err(error) = self.read_batch()
        {
            self.done = true;
            self.batch.clear();
            return Some(Err(Error::new("list", &self.path, error)));
        }
        self.batch.pop().map(Ok)
    }
}

impl DirEntry {
    /// The name, without its directory. A name can contain any byte except `/` and NUL.
    pub fn file_name(&self) -> &OsStr {
        &self.name
    }

    /// The path of the entry: the path given to [`Filesystem::read_dir`], joined with the name.
    pub fn path(&self) -> PathBuf {
        self.dir.join(&self.name)
    }

    /// The kind of file, as recorded in the directory; the file itself is not read. `None` for an invalid kind.
    pub fn kind(&self) -> Option<FileKind> {
        self.kind
    }

    /// Whether the entry is a subvolume.
    pub fn is_subvolume(&self) -> bool {
        self.is_subvolume
    }

    /// Returns the attributes of the entry; a symbolic link is not followed.
    ///
    /// # Errors
    /// `NotFound` or ESTALE if the entry was removed during the iteration; damage of its inode.
    pub fn metadata(&self) -> Result<Metadata> {
        self.fs.engine().getattr(self.id).map(Metadata::new).while_doing("stat", &self.path())
    }

    pub(crate) fn id(&self) -> InodeId {
        self.id
    }
}
