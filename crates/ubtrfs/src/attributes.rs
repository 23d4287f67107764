//! Attributes of files by path: owner, permissions, times, extended attributes.

use std::path::Path;
use std::time::SystemTime;

use ubtrfs_fs::{SetAttr, SetTime, XattrFlags};

use crate::Filesystem;
use crate::error::{Result, ResultExt};
use crate::metadata::Metadata;
use crate::path::Follow;

/// Attributes.
impl Filesystem {
    /// Returns the attributes of a file; symbolic links are followed.
    ///
    /// # Errors
    /// `NotFound`; damage of the inode.
    pub fn metadata(&self, path: impl AsRef<Path>) -> Result<Metadata> {
        self.resolve("stat", path.as_ref(), Follow::Yes).map(Metadata::new)
    }

    /// Returns the attributes of a file; a symbolic link at the end of the path is not followed.
    ///
    /// # Errors
    /// As [`metadata`](Self::metadata).
    pub fn symlink_metadata(&self, path: impl AsRef<Path>) -> Result<Metadata> {
        self.resolve("stat", path.as_ref(), Follow::No).map(Metadata::new)
    }

    /// Sets the permission bits, with set-user-id, set-group-id and sticky bit (12 bits); symbolic links are followed.
    ///
    /// # Errors
    /// `NotFound`; `ReadOnlyFilesystem`.
    pub fn set_permissions(&self, path: impl AsRef<Path>, permissions: u32) -> Result<()> {
        let set = SetAttr { mode: Some(permissions), ..SetAttr::default() };
        self.set_attributes("change mode of", path.as_ref(), Follow::Yes, &set)
    }

    /// Sets the owner and group of a file; a symbolic link at the end of the path is not followed. As on Linux, a
    /// change of owner can clear the set-user-id and set-group-id bits, so set permissions afterwards.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/tool", "program")?;
    /// fs.set_owner("/tool", 0, 100)?;
    /// fs.set_permissions("/tool", 0o2755)?;
    /// let metadata = fs.metadata("/tool")?;
    /// assert_eq!((metadata.gid(), metadata.permissions()), (100, 0o2755));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `ReadOnlyFilesystem`.
    pub fn set_owner(&self, path: impl AsRef<Path>, uid: u32, gid: u32) -> Result<()> {
        let set = SetAttr { uid: Some(uid), gid: Some(gid), ..SetAttr::default() };
        self.set_attributes("change owner of", path.as_ref(), Follow::No, &set)
    }

    /// Sets the access and modification times of a file; a symbolic link at the end of the path is not followed.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// use std::time::{Duration, SystemTime};
    ///
    /// fs.write("/f", "")?;
    /// let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    /// fs.set_times("/f", time, time)?;
    /// assert_eq!(fs.metadata("/f")?.modified(), Some(time));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `ReadOnlyFilesystem`.
    pub fn set_times(&self, path: impl AsRef<Path>, accessed: SystemTime, modified: SystemTime) -> Result<()> {
        let at = |time: SystemTime| Some(SetTime::At(time.into()));
        let set = SetAttr { atime: at(accessed), mtime: at(modified), ..SetAttr::default() };
        self.set_attributes("change times of", path.as_ref(), Follow::No, &set)
    }

    fn set_attributes(&self, operation: &'static str, path: &Path, follow: Follow, set: &SetAttr) -> Result<()> {
        let id = self.resolve(operation, path, follow)?.id;
        self.engine().setattr(id, set, &self.caller()).map(drop).while_doing(operation, path)
    }

    /// Returns the value of an extended attribute, or `None` if it does not exist. An attribute's name begins with its
    /// namespace: `user.comment`. A symbolic link at the end of the path is not followed.
    ///
    /// # Errors
    /// `NotFound` if the path does not exist.
    pub fn xattr(&self, path: impl AsRef<Path>, name: impl AsRef<[u8]>) -> Result<Option<Vec<u8>>> {
        let path = path.as_ref();
        let id = self.resolve("read attribute of", path, Follow::No)?.id;
        match self.engine().getxattr(id, name.as_ref()) {
            Err(ubtrfs_fs::Error::NoData) => Ok(None),
            found => found.map(Some).while_doing("read attribute of", path),
        }
    }

    /// Returns the names of all extended attributes.
    ///
    /// # Errors
    /// `NotFound` if the path does not exist.
    pub fn xattr_names(&self, path: impl AsRef<Path>) -> Result<Vec<Vec<u8>>> {
        let path = path.as_ref();
        let id = self.resolve("list attributes of", path, Follow::No)?.id;
        self.engine().listxattr(id).while_doing("list attributes of", path)
    }

    /// Sets an extended attribute, or replaces its value.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// fs.write("/file", "")?;
    /// fs.set_xattr("/file", "user.comment", "kept for the audit")?;
    /// assert_eq!(fs.xattr("/file", "user.comment")?.as_deref(), Some(b"kept for the audit".as_slice()));
    /// assert_eq!(fs.xattr("/file", "user.other")?, None);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Unsupported` if the namespace is unknown; ENOSPC or E2BIG if the value does not fit into a tree block.
    pub fn set_xattr(&self, path: impl AsRef<Path>, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        let path = path.as_ref();
        let id = self.resolve("set attribute of", path, Follow::No)?.id;
        self.engine()
            .setxattr(id, name.as_ref(), value.as_ref(), XattrFlags::empty(), &self.caller())
            .while_doing("set attribute of", path)
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// ENODATA if the attribute does not exist.
    pub fn remove_xattr(&self, path: impl AsRef<Path>, name: impl AsRef<[u8]>) -> Result<()> {
        let path = path.as_ref();
        let id = self.resolve("remove attribute of", path, Follow::No)?.id;
        self.engine().removexattr(id, name.as_ref(), &self.caller()).while_doing("remove attribute of", path)
    }
}
