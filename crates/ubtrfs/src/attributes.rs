//! Attributes of files by path: owner, permissions, times, extended attributes.

use std::path::Path;

use ubtrfs_fs::{SetAttr, XattrFlags};

use crate::Filesystem;
use crate::error::{Result, ResultExt};
use crate::metadata::{FileTimes, Metadata};
use crate::path::Follow;

/// Attributes.
impl Filesystem {
    /// Returns the attributes of a file; symbolic links are followed.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/data", "12345")?;
    /// fs.symlink("data", "/link")?;
    /// assert_eq!(fs.metadata("/link")?.len(), 5);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; damage of the inode.
    pub fn metadata(&self, path: impl AsRef<Path>) -> Result<Metadata> {
        self.resolve("stat", path.as_ref(), Follow::Yes).map(Metadata::new)
    }

    /// Returns the attributes of a file; a symbolic link at the end of the path is not followed.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.symlink("missing", "/link")?;
    /// assert!(fs.symlink_metadata("/link")?.is_symlink());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`metadata`](Self::metadata).
    pub fn symlink_metadata(&self, path: impl AsRef<Path>) -> Result<Metadata> {
        self.resolve("stat", path.as_ref(), Follow::No).map(Metadata::new)
    }

    /// Sets the permission bits, with set-user-id, set-group-id and sticky bit (12 bits); symbolic links are followed.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/tool", "program")?;
    /// fs.set_permissions("/tool", 0o755)?;
    /// assert_eq!(fs.metadata("/tool")?.permissions(), 0o755);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `ReadOnlyFilesystem`.
    pub fn set_permissions(&self, path: impl AsRef<Path>, permissions: u32) -> Result<()> {
        let set = SetAttr { mode: Some(permissions), ..SetAttr::default() };
        self.set_attributes("change mode of", path.as_ref(), Follow::Yes, &set)
    }

    /// Sets the owner and group of a file, like chown(2); `None` leaves one of them unchanged. Symbolic links are
    /// followed. As on Linux, a change of owner can clear the set-user-id and set-group-id bits, so set permissions
    /// afterwards.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/tool", "program")?;
    /// fs.set_owner("/tool", 1000, 100)?;
    /// fs.set_owner("/tool", 0, None)?;
    /// fs.set_permissions("/tool", 0o2755)?;
    /// let metadata = fs.metadata("/tool")?;
    /// assert_eq!((metadata.uid(), metadata.gid(), metadata.permissions()), (0, 100, 0o2755));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `ReadOnlyFilesystem`.
    pub fn set_owner(
        &self,
        path: impl AsRef<Path>,
        uid: impl Into<Option<u32>>,
        gid: impl Into<Option<u32>>,
    ) -> Result<()> {
        let set = SetAttr { uid: uid.into(), gid: gid.into(), ..SetAttr::default() };
        self.set_attributes("change owner of", path.as_ref(), Follow::Yes, &set)
    }

    /// Sets the owner and group like [`set_owner`](Self::set_owner), but does not follow a symbolic link at the end of
    /// the path, like lchown(2).
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/data", "")?;
    /// fs.symlink("data", "/link")?;
    /// fs.set_owner_nofollow("/link", 1000, 1000)?;
    /// assert_eq!(fs.symlink_metadata("/link")?.uid(), 1000);
    /// assert_eq!(fs.metadata("/data")?.uid(), 0);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `ReadOnlyFilesystem`.
    pub fn set_owner_nofollow(
        &self,
        path: impl AsRef<Path>,
        uid: impl Into<Option<u32>>,
        gid: impl Into<Option<u32>>,
    ) -> Result<()> {
        let set = SetAttr { uid: uid.into(), gid: gid.into(), ..SetAttr::default() };
        self.set_attributes("change owner of", path.as_ref(), Follow::No, &set)
    }

    /// Sets times of a file; symbolic links are followed. Times that `times` lacks stay unchanged.
    ///
    /// ```
    /// use std::time::{Duration, SystemTime};
    /// use ubtrfs::FileTimes;
    ///
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/f", "")?;
    /// let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    /// fs.set_times("/f", FileTimes::new().set_modified(time))?;
    /// assert_eq!(fs.metadata("/f")?.modified(), Some(time));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `ReadOnlyFilesystem`.
    pub fn set_times(&self, path: impl AsRef<Path>, times: FileTimes) -> Result<()> {
        self.set_attributes("change times of", path.as_ref(), Follow::Yes, &times.attributes())
    }

    /// Sets times like [`set_times`](Self::set_times), but does not follow a symbolic link at the end of the path.
    ///
    /// ```
    /// use std::time::SystemTime;
    /// use ubtrfs::FileTimes;
    ///
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.symlink("missing", "/link")?;
    /// fs.set_times_nofollow("/link", FileTimes::new().set_accessed(SystemTime::UNIX_EPOCH))?;
    /// assert_eq!(fs.symlink_metadata("/link")?.accessed(), Some(SystemTime::UNIX_EPOCH));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `ReadOnlyFilesystem`.
    pub fn set_times_nofollow(&self, path: impl AsRef<Path>, times: FileTimes) -> Result<()> {
        self.set_attributes("change times of", path.as_ref(), Follow::No, &times.attributes())
    }

    fn set_attributes(&self, operation: &'static str, path: &Path, follow: Follow, set: &SetAttr) -> Result<()> {
        let id = self.resolve(operation, path, follow)?.id;
        self.engine().setattr(id, set, &self.caller()).map(drop).while_doing(operation, path)
    }

    /// Returns the value of an extended attribute, or `None` if it does not exist. An attribute's name begins with its
    /// namespace: `user.comment`. A symbolic link at the end of the path is not followed.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/file", "")?;
    /// fs.set_xattr("/file", "user.color", "blue")?;
    /// assert_eq!(fs.xattr("/file", "user.color")?, Some(b"blue".to_vec()));
    /// assert_eq!(fs.xattr("/file", "user.size")?, None);
    /// # Ok(()) }
    /// ```
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

    /// Returns the names of all extended attributes, with their namespaces. A symbolic link at the end of the path is
    /// not followed.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/file", "")?;
    /// fs.set_xattr("/file", "user.color", "blue")?;
    /// assert_eq!(fs.xattr_names("/file")?, [b"user.color"]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound` if the path does not exist.
    pub fn xattr_names(&self, path: impl AsRef<Path>) -> Result<Vec<Vec<u8>>> {
        let path = path.as_ref();
        let id = self.resolve("list attributes of", path, Follow::No)?.id;
        self.engine().listxattr(id).while_doing("list attributes of", path)
    }

    /// Sets an extended attribute, or replaces its value. A symbolic link at the end of the path is not followed.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/file", "")?;
    /// fs.set_xattr("/file", "user.comment", "draft")?;
    /// fs.set_xattr("/file", "user.comment", "final")?;
    /// assert_eq!(fs.xattr("/file", "user.comment")?, Some(b"final".to_vec()));
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

    /// Removes an extended attribute. A symbolic link at the end of the path is not followed.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/file", "")?;
    /// fs.set_xattr("/file", "user.color", "blue")?;
    /// fs.remove_xattr("/file", "user.color")?;
    /// assert_eq!(fs.xattr("/file", "user.color")?, None);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// ENODATA if the attribute does not exist.
    pub fn remove_xattr(&self, path: impl AsRef<Path>, name: impl AsRef<[u8]>) -> Result<()> {
        let path = path.as_ref();
        let id = self.resolve("remove attribute of", path, Follow::No)?.id;
        self.engine().removexattr(id, name.as_ref(), &self.caller()).while_doing("remove attribute of", path)
    }
}
