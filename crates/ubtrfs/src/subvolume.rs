//! Subvolumes and snapshots.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use ubtrfs_format::item::RootFlags;
use ubtrfs_fs::{InodeId, SubvolumeInfo};
use uuid::Uuid;

use crate::Filesystem;
use crate::error::{Error, Result, ResultExt};
use crate::metadata::system_time;
use crate::path::Follow;

/// Whether a new snapshot takes changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotAccess {
    /// It stays as it is, and can be sent.
    ReadOnly,
    /// It is a subvolume like any other.
    ReadWrite,
}

/// A subvolume, as [`Filesystem::subvolumes`] lists it.
#[derive(Clone, Debug)]
pub struct Subvolume {
    info: SubvolumeInfo,
}

impl Subvolume {
    /// The id of its tree.
    pub fn id(&self) -> u64 {
        self.info.id.0
    }

    /// Its path from the top level, without a leading slash; empty for the top level itself.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(OsString::from_vec(self.info.path.clone()))
    }

    /// Id of the subvolume that holds its name; none for the top level.
    pub fn parent_id(&self) -> Option<u64> {
        self.info.parent.map(|parent| parent.0)
    }

    /// Whether it takes no changes.
    pub fn is_read_only(&self) -> bool {
        self.info.flags.contains(RootFlags::RDONLY)
    }

    /// Its UUID; nil where none was given.
    pub fn uuid(&self) -> Uuid {
        self.info.uuid
    }

    /// UUID of the subvolume that it is a snapshot of; none where it is no snapshot.
    pub fn parent_uuid(&self) -> Option<Uuid> {
        Some(self.info.parent_uuid).filter(|uuid| !uuid.is_nil())
    }

    /// UUID of the subvolume that it was received from; none where it was not received.
    pub fn received_uuid(&self) -> Option<Uuid> {
        Some(self.info.received_uuid).filter(|uuid| !uuid.is_nil())
    }

    /// The last transaction that changed it.
    pub fn generation(&self) -> u64 {
        self.info.generation.0
    }

    /// Time of its creation; none where the time on disk cannot be told.
    pub fn created(&self) -> Option<SystemTime> {
        system_time(self.info.otime)
    }
}

/// Subvolumes and snapshots.
impl Filesystem {
    /// Makes an empty subvolume; durable on return.
    ///
    /// # Errors
    /// `AlreadyExists`; `NotFound` where the directory does not exist; `ReadOnlyFilesystem`; `StorageFull`.
    pub fn create_subvolume(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let (dir, name) = self.parent_and_name("make subvolume", path)?;
        self.engine().create_subvolume(dir, name, &self.caller()).map(drop).while_doing("make subvolume", path)
    }

    /// Makes a snapshot of the subvolume whose root directory is at `source`; durable on return. It holds everything that
    /// was written before the call, and shares all blocks with its source. Subvolumes inside of the source are empty
    /// directories in it.
    ///
    /// # Errors
    /// `InvalidInput` where `source` is no subvolume; `AlreadyExists`; `ReadOnlyFilesystem`; `StorageFull`.
    pub fn snapshot(&self, source: impl AsRef<Path>, path: impl AsRef<Path>, access: SnapshotAccess) -> Result<()> {
        let path = path.as_ref();
        let source = self.subvolume_root("snapshot", source.as_ref())?;
        let (dir, name) = self.parent_and_name("make snapshot", path)?;
        let read_only = access == SnapshotAccess::ReadOnly;
        self.engine().snapshot(source.root, dir, name, read_only).map(drop).while_doing("make snapshot", path)
    }

    /// Deletes a subvolume with all that is in it. Its name is gone on return; its space comes back in the background.
    ///
    /// # Errors
    /// `InvalidInput` where it is no subvolume; `DirectoryNotEmpty` where it holds other subvolumes; `ResourceBusy` for the
    /// one that was opened; `PermissionDenied` for the default one.
    pub fn delete_subvolume(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let (dir, name) = self.parent_and_name("delete subvolume", path)?;
        self.engine().delete_subvolume(dir, name, None).while_doing("delete subvolume", path)
    }

    /// Makes a subvolume read-only, or lets it take changes again; durable on return.
    ///
    /// # Errors
    /// `InvalidInput` where it is no subvolume.
    pub fn set_subvolume_read_only(&self, path: impl AsRef<Path>, read_only: bool) -> Result<()> {
        let path = path.as_ref();
        let root = self.subvolume_root("change subvolume", path)?;
        self.engine().set_subvolume_read_only(root.root, read_only).while_doing("change subvolume", path)
    }

    /// All subvolumes of the filesystem, the top level included, by id; also those outside of the one that was opened.
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

    /// The subvolume whose root directory is at `path`.
    ///
    /// # Errors
    /// `InvalidInput` where it is no subvolume.
    pub fn subvolume(&self, path: impl AsRef<Path>) -> Result<Subvolume> {
        let path = path.as_ref();
        let root = self.subvolume_root("look at subvolume", path)?;
        let info = self.engine().subvolume_info(root.root).while_doing("look at subvolume", path)?;
        Ok(Subvolume { info })
    }

    fn subvolume_root(&self, operation: &'static str, path: &Path) -> Result<InodeId> {
        let id = self.resolve(operation, path, Follow::Yes)?.id;
        if id == InodeId::root_of(id.root) {
            return Ok(id);
        }
        Err(Error::new(operation, path, ubtrfs_fs::Error::InvalidArgument("not the root of a subvolume")))
    }
}
