//! Subvolumes and snapshots.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use ubtrfs_format::item::RootFlags;
use ubtrfs_fs::{Caller, InodeId, SubvolumeInfo};
use uuid::Uuid;

use crate::Filesystem;
use crate::error::{Error, Result, ResultExt};
use crate::metadata::system_time;
use crate::path::Follow;

/// The access mode of a new snapshot.
///
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// use ubtrfs::SnapshotAccess;
///
/// fs.create_subvolume("/home")?;
/// fs.snapshot("/home", "/backup", SnapshotAccess::ReadOnly)?;
/// fs.snapshot("/home", "/experiment", SnapshotAccess::ReadWrite)?;
/// fs.write("/experiment/f", "text")?;
/// assert_eq!(fs.write("/backup/f", "text").unwrap_err().kind(), std::io::ErrorKind::ReadOnlyFilesystem);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotAccess {
    /// The snapshot cannot be changed.
    ReadOnly,
    /// The snapshot can be changed like any subvolume.
    ReadWrite,
}

/// A description of a subvolume, from [`Filesystem::subvolumes`] or [`Filesystem::subvolume`].
///
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// fs.create_subvolume("/home")?;
/// fs.snapshot("/home", "/monday", ubtrfs::SnapshotAccess::ReadOnly)?;
/// let (home, monday) = (fs.subvolume("/home")?, fs.subvolume("/monday")?);
/// assert_eq!((home.id(), monday.id()), (256, 257));
/// assert_eq!(monday.path().to_str(), Some("monday"));
/// // The id of the top level.
/// assert_eq!(monday.parent_id(), Some(5));
/// assert!(monday.is_read_only() && !home.is_read_only());
/// assert_eq!(monday.parent_uuid(), Some(home.uuid()));
/// assert_eq!(monday.received_uuid(), None);
/// assert!(monday.generation() > 0 && monday.created() >= home.created());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Subvolume {
    info: SubvolumeInfo,
}

impl Subvolume {
    /// The id of the subvolume's tree.
    pub fn id(&self) -> u64 {
        self.info.id.0
    }

    /// The path from the top level, without a leading slash; empty for the top level itself.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(OsString::from_vec(self.info.path.clone()))
    }

    /// The id of the parent: the subvolume that contains this subvolume's name; `None` for the top level.
    pub fn parent_id(&self) -> Option<u64> {
        self.info.parent.map(|parent| parent.0)
    }

    /// Whether the subvolume is read-only.
    pub fn is_read_only(&self) -> bool {
        self.info.flags.contains(RootFlags::RDONLY)
    }

    /// The UUID; nil if the subvolume has none.
    pub fn uuid(&self) -> Uuid {
        self.info.uuid
    }

    /// The UUID of the snapshot's source; `None` if the subvolume is not a snapshot.
    pub fn parent_uuid(&self) -> Option<Uuid> {
        Some(self.info.parent_uuid).filter(|uuid| !uuid.is_nil())
    }

    /// The UUID that the received stream has for the sent subvolume; `None` if this subvolume was not received. A
    /// subvolume that was received before it was sent has its own received UUID in the stream.
    pub fn received_uuid(&self) -> Option<Uuid> {
        Some(self.info.received_uuid).filter(|uuid| !uuid.is_nil())
    }

    /// The generation of the last transaction that changed the subvolume.
    pub fn generation(&self) -> u64 {
        self.info.generation.0
    }

    /// The time of creation; `None` if [`SystemTime`] cannot represent the time on disk.
    pub fn created(&self) -> Option<SystemTime> {
        system_time(self.info.otime)
    }
}

/// Subvolumes and snapshots.
impl Filesystem {
    /// Makes an empty subvolume, with the permissions of [`create_dir`](Self::create_dir). The new subvolume is durable
    /// on return.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.create_subvolume("/home")?;
    /// fs.write("/home/f", "text")?;
    /// assert_eq!(fs.subvolume("/home")?.parent_id(), Some(5));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `AlreadyExists`; `NotFound` if the directory does not exist; `ReadOnlyFilesystem`; `StorageFull`.
    pub fn create_subvolume(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let (dir, name) = self.parent_and_name("make subvolume", path)?;
        let caller = self.caller();
        let umask = caller.umask | 0o777 & !self.default_permissions(0o777);
        let made = self.engine().create_subvolume(dir, name, &Caller { umask, ..caller });
        made.map(drop).while_doing("make subvolume", path)
    }

    /// Makes a snapshot at `path` of the subvolume at `source`. The snapshot is durable on return. The snapshot
    /// contains everything that was written before the call, and shares all blocks with its source. Subvolumes inside
    /// the source become empty directories in the snapshot.
    ///
    /// ```
    /// use ubtrfs::SnapshotAccess;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// fs.create_subvolume("/data")?;
    /// fs.write("/data/report", "draft")?;
    /// fs.snapshot("/data", "/data-backup", SnapshotAccess::ReadOnly)?;
    /// fs.write("/data/report", "final")?;
    /// assert_eq!(fs.read("/data-backup/report")?, b"draft");
    ///
    /// // A read-write snapshot of the backup brings the old state back.
    /// fs.delete_subvolume("/data")?;
    /// fs.snapshot("/data-backup", "/data", SnapshotAccess::ReadWrite)?;
    /// assert_eq!(fs.read("/data/report")?, b"draft");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` if `source` is not a subvolume; `AlreadyExists`; `ReadOnlyFilesystem`; `StorageFull`.
    pub fn snapshot(&self, source: impl AsRef<Path>, path: impl AsRef<Path>, access: SnapshotAccess) -> Result<()> {
        let path = path.as_ref();
        let source = self.subvolume_root("snapshot", source.as_ref())?;
        let (dir, name) = self.parent_and_name("make snapshot", path)?;
        let read_only = access == SnapshotAccess::ReadOnly;
        self.engine().snapshot(source.root, dir, name, read_only).map(drop).while_doing("make snapshot", path)
    }

    /// Deletes a subvolume with its content. The name is gone on return; the space is freed in the background.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.create_subvolume("/home")?;
    /// fs.write("/home/f", "text")?;
    /// fs.delete_subvolume("/home")?;
    /// assert!(!fs.exists("/home"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` if the path is not a subvolume; `DirectoryNotEmpty` if the subvolume contains other subvolumes;
    /// `ResourceBusy` for the subvolume that was opened; `PermissionDenied` for the default subvolume.
    pub fn delete_subvolume(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let (dir, name) = self.parent_and_name("delete subvolume", path)?;
        self.engine().delete_subvolume(dir, name, None).while_doing("delete subvolume", path)
    }

    /// Makes a subvolume read-only, or writable again. The change is durable on return.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.create_subvolume("/home")?;
    /// fs.set_subvolume_read_only("/home", true)?;
    /// assert!(fs.write("/home/f", "text").is_err());
    /// fs.set_subvolume_read_only("/home", false)?;
    /// fs.write("/home/f", "text")?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` if the path is not a subvolume.
    pub fn set_subvolume_read_only(&self, path: impl AsRef<Path>, read_only: bool) -> Result<()> {
        let path = path.as_ref();
        let root = self.subvolume_root("change subvolume", path)?;
        self.engine().set_subvolume_read_only(root.root, read_only).while_doing("change subvolume", path)
    }

    /// Lists all subvolumes of the filesystem, including the top level, in the order of their ids. Subvolumes outside
    /// of the opened subvolume are listed too.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// fs.create_subvolume("/home")?;
    /// fs.snapshot("/home", "/monday", ubtrfs::SnapshotAccess::ReadOnly)?;
    /// let paths: Vec<_> = fs.subvolumes()?.iter().map(|subvolume| subvolume.path()).collect();
    /// assert_eq!(paths, ["", "home", "monday"].map(std::path::PathBuf::from));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Damage of the root tree.
    pub fn subvolumes(&self) -> Result<Vec<Subvolume>> {
        let mut infos = self.engine().subvolumes().while_doing("list subvolumes of", Path::new("/"))?;
        infos.sort_by_key(|info| info.id);
        Ok(infos.into_iter().map(|info| Subvolume { info }).collect())
    }

    /// Returns the description of the subvolume at `path`.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.create_subvolume("/home")?;
    /// assert_eq!(fs.subvolume("/home")?.id(), 256);
    /// fs.create_dir("/dir")?;
    /// assert!(fs.subvolume("/dir").is_err());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` if the path is not a subvolume.
    pub fn subvolume(&self, path: impl AsRef<Path>) -> Result<Subvolume> {
        let path = path.as_ref();
        let root = self.subvolume_root("look at subvolume", path)?;
        let info = self.engine().subvolume_info(root.root).while_doing("look at subvolume", path)?;
        Ok(Subvolume { info })
    }

    /// The id of the subvolume that is opened if none is named.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// assert_eq!(fs.default_subvolume()?, 5);
    /// fs.create_subvolume("/system")?;
    /// fs.set_default_subvolume("/system")?;
    /// assert_eq!(fs.default_subvolume()?, fs.subvolume("/system")?.id());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Damage of the root tree.
    pub fn default_subvolume(&self) -> Result<u64> {
        let id = self.engine().default_subvolume().while_doing("find the default subvolume of", self.device_name())?;
        Ok(id.0)
    }

    /// Sets the subvolume that is opened if none is named, as [`default_subvolume`](Self::default_subvolume) shows.
    ///
    /// # Errors
    /// `InvalidInput` if the path is not a subvolume; `ReadOnlyFilesystem`.
    pub fn set_default_subvolume(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let root = self.subvolume_root("set default subvolume", path)?;
        self.engine().set_default_subvolume(root.root).while_doing("set default subvolume", path)
    }

    pub(crate) fn subvolume_root(&self, operation: &'static str, path: &Path) -> Result<InodeId> {
        let id = self.resolve(operation, path, Follow::Yes)?.id;
        if id == InodeId::root_of(id.root) {
            return Ok(id);
        }
        Err(Error::new(operation, path, ubtrfs_fs::Error::InvalidArgument("not the root of a subvolume")))
    }
}
