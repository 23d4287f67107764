//! Files and directories by path: opening, listing, linking, renaming, removing.

use std::path::{Path, PathBuf};

use ubtrfs_fs::{NewInode, RenameFlags};

use crate::Filesystem;
use crate::dir::ReadDir;
use crate::error::{Error, Result, ResultExt};
use crate::file::{File, OpenOptions};
use crate::path::{self, Follow};

/// Files and directories by path.
impl Filesystem {
    /// Opens a file for reading.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// use std::io::Read;
    /// # fs.write("/notes", "remember")?;
    ///
    /// let mut text = String::new();
    /// fs.open("/notes")?.read_to_string(&mut text)?;
    /// assert_eq!(text, "remember");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `IsADirectory`; `InvalidInput` if the path is not a regular file or a symbolic link to one.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<File> {
        self.open_with(path, OpenOptions::new().read(true))
    }

    /// Makes a file, or truncates an existing one, and opens it for writing.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// use std::io::Write;
    ///
    /// let mut file = fs.create("/numbers")?;
    /// for number in 0..3 {
    ///     writeln!(file, "{number}")?;
    /// }
    /// assert_eq!(fs.read("/numbers")?, b"0\n1\n2\n");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound` if the directory does not exist; `IsADirectory`; `ReadOnlyFilesystem`; `StorageFull`.
    pub fn create(&self, path: impl AsRef<Path>) -> Result<File> {
        self.open_with(path, OpenOptions::new().write(true).create(true).truncate(true))
    }

    /// Opens a file with `options`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// use std::io::Write;
    /// use ubtrfs::OpenOptions;
    ///
    /// let mut log = fs.open_with("/log", OpenOptions::new().append(true).create(true))?;
    /// writeln!(log, "one more line")?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`open`](Self::open) and [`create`](Self::create).
    pub fn open_with(&self, path: impl AsRef<Path>, options: &OpenOptions) -> Result<File> {
        File::open(self, path.as_ref(), options)
    }

    /// Reads the whole content of a file.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/f", "text")?;
    /// assert_eq!(fs.read("/f")?, b"text");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`open`](Self::open); data whose checksum is wrong in all copies; `OutOfMemory` if memory cannot hold the
    /// content.
    pub fn read(&self, path: impl AsRef<Path>) -> Result<Vec<u8>> {
        let path = path.as_ref();
        self.open(path).and_then(|file| file.read_all()).map_err(|error| error.while_doing("read", path))
    }

    /// Replaces the content of a file. Makes the file if it does not exist.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/f", "a long text")?;
    /// fs.write("/f", "short")?;
    /// assert_eq!(fs.read("/f")?, b"short");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn write(&self, path: impl AsRef<Path>, content: impl AsRef<[u8]>) -> Result<()> {
        let path = path.as_ref();
        let written = self.create(path).and_then(|file| file.write_all_at(0, content.as_ref()));
        written.map_err(|error| error.while_doing("write", path))
    }

    /// Makes a directory. Its permissions are 0777 without the bits of the caller's umask, but 0755 for the default
    /// caller, which has no umask.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.create_dir("/dir")?;
    /// let dir = fs.metadata("/dir")?;
    /// assert!(dir.is_dir());
    /// assert_eq!(dir.permissions(), 0o755);
    /// assert!(fs.create_dir("/dir").is_err());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `AlreadyExists`; `NotFound` if the parent directory does not exist.
    pub fn create_dir(&self, path: impl AsRef<Path>) -> Result<()> {
        let mode = self.default_permissions(0o777);
        self.make("make directory", path.as_ref(), NewInode::dir(mode)).map(drop)
    }

    /// Makes a directory and its missing parents, with the permissions of [`create_dir`](Self::create_dir). Also
    /// succeeds if the directory exists.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.create_dir_all("/a/b/c")?;
    /// fs.create_dir_all("/a/b/c")?;
    /// assert!(fs.metadata("/a/b/c")?.is_dir());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotADirectory` if a component of the path is not a directory.
    pub fn create_dir_all(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let mut ancestors: Vec<&Path> = path.ancestors().collect();
        ancestors.reverse();
        for dir in ancestors {
            match path::resolve(self.engine(), dir, Follow::Yes) {
                Ok(attr) if attr.is_dir() => {}
                Ok(_) => return Err(Error::new("make directory", dir, ubtrfs_fs::Error::NotDirectory)),
                Err(ubtrfs_fs::Error::NotFound) => match self.create_dir(dir) {
                    // Another thread made the directory first.
                    Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                    made => made?,
                },
                Err(error) => return Err(Error::new("make directory", dir, error)),
            }
        }
        Ok(())
    }

    /// Lists a directory.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.create_dir_all("/srv/data")?;
    /// fs.write("/srv/readme", "text")?;
    /// for entry in fs.read_dir("/srv")? {
    ///     let entry = entry?;
    ///     println!("{} {} bytes", entry.path().display(), entry.metadata()?.len());
    /// }
    /// # assert_eq!(fs.read_dir("/srv")?.count(), 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `NotADirectory`. The iterator returns errors of reading the entries.
    pub fn read_dir(&self, path: impl AsRef<Path>) -> Result<ReadDir> {
        let path = path.as_ref();
        let attr = self.resolve("list", path, Follow::Yes)?;
        if !attr.is_dir() {
            return Err(Error::new("list", path, ubtrfs_fs::Error::NotDirectory));
        }
        ReadDir::new(self, path, attr.id)
    }

    /// Removes a name that is not a directory: a file, a symbolic link, a device file. The content of an open file
    /// remains until the file is closed.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/f", "")?;
    /// fs.remove_file("/f")?;
    /// assert!(!fs.exists("/f"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `IsADirectory`.
    pub fn remove_file(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let (dir, name) = self.parent_and_name("remove", path)?;
        self.engine().unlink(dir, name).while_doing("remove", path)
    }

    /// Removes an empty directory.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.create_dir_all("/a/b")?;
    /// assert_eq!(fs.remove_dir("/a").unwrap_err().kind(), std::io::ErrorKind::DirectoryNotEmpty);
    /// fs.remove_dir("/a/b")?;
    /// fs.remove_dir("/a")?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `NotADirectory`; `DirectoryNotEmpty`.
    pub fn remove_dir(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let (dir, name) = self.parent_and_name("remove directory", path)?;
        self.engine().rmdir(dir, name).while_doing("remove directory", path)
    }

    /// Renames a file or directory, and replaces an existing `to`, like rename(2).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/config", "old")?;
    /// fs.write("/config.new", "new")?;
    /// fs.rename("/config.new", "/config")?;
    /// assert_eq!(fs.read("/config")?, b"new");
    /// assert!(!fs.exists("/config.new"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `DirectoryNotEmpty`; `CrossesDevices` if the new name is in another subvolume.
    pub fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        let (from, to) = (from.as_ref(), to.as_ref());
        let (dir, name) = self.parent_and_name("rename", from)?;
        let (new_dir, new_name) = self.parent_and_name("rename to", to)?;
        self.engine().rename(dir, name, new_dir, new_name, RenameFlags::empty()).while_doing("rename", from)
    }

    /// Makes another name for a file.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/first", "content")?;
    /// fs.hard_link("/first", "/second")?;
    /// assert_eq!(fs.metadata("/second")?.nlink(), 2);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `AlreadyExists`; `CrossesDevices` if the new name is in another subvolume; `PermissionDenied` for directories.
    pub fn hard_link(&self, original: impl AsRef<Path>, link: impl AsRef<Path>) -> Result<()> {
        let link = link.as_ref();
        let attr = self.resolve("link to", original.as_ref(), Follow::No)?;
        let (dir, name) = self.parent_and_name("link", link)?;
        self.engine().link(attr.id, dir, name).map(drop).while_doing("link", link)
    }

    /// Makes a symbolic link to `target`, which can be any path, even a path that does not exist.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/data", "text")?;
    /// fs.symlink("data", "/link")?;
    /// assert_eq!(fs.read("/link")?, b"text");
    /// assert_eq!(fs.read_link("/link")?, std::path::Path::new("data"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `AlreadyExists`; `InvalidFilename` if the target is too long.
    pub fn symlink(&self, target: impl AsRef<Path>, link: impl AsRef<Path>) -> Result<()> {
        let target = path::bytes(target.as_ref());
        self.make("make symbolic link", link.as_ref(), NewInode::symlink(target)).map(drop)
    }

    /// Makes a FIFO, a socket or a device file. `mode` has the type and the permissions, as in mknod(2); `device` has the
    /// major and minor number of a device file.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// // S_IFCHR: the device /dev/null.
    /// fs.make_node("/null", 0o020_666, (1, 3))?;
    /// assert_eq!(fs.metadata("/null")?.device_number(), (1, 3));
    /// // S_IFIFO.
    /// fs.make_node("/pipe", 0o010_600, (0, 0))?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `AlreadyExists`; `InvalidInput` for another type.
    pub fn make_node(&self, path: impl AsRef<Path>, mode: u32, device: (u32, u32)) -> Result<()> {
        use ubtrfs_fs::mode as bits;
        let path = path.as_ref();
        let kind = mode & bits::TYPE;
        let rdev = match kind {
            bits::CHAR | bits::BLOCK => ubtrfs_fs::rdev_from_parts(device.0, device.1),
            bits::FIFO | bits::SOCKET => 0,
            _ => {
                let cause = ubtrfs_fs::Error::InvalidArgument("the mode is not that of a FIFO, socket or device file");
                return Err(Error::new("make node", path, cause));
            }
        };
        let new = NewInode { mode: kind | mode & bits::PERMISSIONS, rdev, ..NewInode::default() };
        self.make("make node", path, new).map(drop)
    }

    /// Returns the target of a symbolic link.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.symlink("some/where", "/link")?;
    /// assert_eq!(fs.read_link("/link")?, std::path::Path::new("some/where"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` if the path is not a symbolic link.
    pub fn read_link(&self, path: impl AsRef<Path>) -> Result<PathBuf> {
        use std::os::unix::ffi::OsStringExt;
        let path = path.as_ref();
        let attr = self.resolve("read link", path, Follow::No)?;
        let target = self.engine().readlink(attr.id).while_doing("read link", path)?;
        Ok(PathBuf::from(std::ffi::OsString::from_vec(target)))
    }

    /// Whether a path exists. Symbolic links are followed. Returns false if that cannot be found out; see
    /// [`try_exists`](Self::try_exists).
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// fs.write("/f", "")?;
    /// assert!(fs.exists("/f") && !fs.exists("/g") && !fs.exists("/f/g"));
    /// # Ok(()) }
    /// ```
    pub fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.try_exists(path).unwrap_or(false)
    }

    /// Whether a path exists. Symbolic links are followed.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// assert!(!fs.try_exists("/f")?);
    /// fs.symlink("loop", "/loop")?;
    /// assert!(fs.try_exists("/loop").is_err());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Too many levels of links; a name that is too long; damage.
    pub fn try_exists(&self, path: impl AsRef<Path>) -> Result<bool> {
        let path = path.as_ref();
        match path::resolve(self.engine(), path, Follow::Yes) {
            Ok(_) => Ok(true),
            Err(ubtrfs_fs::Error::NotFound | ubtrfs_fs::Error::NotDirectory) => Ok(false),
            Err(error) => Err(error).while_doing("look for", path),
        }
    }

    /// Makes `to` a copy of `from` that shares the extents instead of copying data. Later changes of one file do not
    /// affect the other file.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(256 << 20)?;
    /// fs.write("/base", vec![1; 8 << 20])?;
    /// fs.reflink("/base", "/copy")?;
    /// assert_eq!(fs.read("/copy")?, fs.read("/base")?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`open`](Self::open) and [`create`](Self::create); `InvalidInput` if both paths lead to one file.
    pub fn reflink(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        let to = to.as_ref();
        let source = self.open(from)?;
        let target = self.open_with(to, OpenOptions::new().write(true).create(true))?;
        if source.id() == target.id() {
            return Err(Error::new("reflink to", to, ubtrfs_fs::Error::InvalidArgument("it is the source itself")));
        }
        target.set_len(0)?;
        self.engine().clone_range(source.id(), 0, target.id(), 0, 0).while_doing("reflink to", to)
    }
}
