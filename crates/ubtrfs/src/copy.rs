//! Copies of files and directory trees from and to the host.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ubtrfs_archive::copy::{self, CopyMessage, CopyOptions, CopyReport, ImageFiles};

use crate::Filesystem;
use crate::error::{Result, ResultExt};
use crate::path;

/// The progress of [`Filesystem::copy_from_host`] or [`Filesystem::copy_to_host`].
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// # let scratch = tempfile::tempdir()?;
/// # let target = scratch.path().join("target");
/// use ubtrfs::{CopyEvent, CopyOptions};
///
/// let show = |event| match event {
///     CopyEvent::Bytes(bytes) => print!("\r{bytes} bytes"),
///     CopyEvent::File(path) => println!("{}", String::from_utf8_lossy(&path)),
///     CopyEvent::Failed(reason) => eprintln!("{reason}"),
///     CopyEvent::LostAttribute { path, name } => {
///         eprintln!("{} has no attribute {}", path.display(), String::from_utf8_lossy(&name));
///     }
///     _ => {}
/// };
/// fs.write("/f", "text")?;
/// fs.copy_to_host("/", &target, &CopyOptions::default(), &show)?;
/// # assert_eq!(std::fs::read(target.join("f"))?, b"text");
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CopyEvent {
    /// The number of bytes of file data so far, without holes.
    Bytes(u64),
    /// The file with this path in the source is copied next.
    File(Vec<u8>),
    /// A file was not copied, or not with all attributes; the text names source and copy, and the reason.
    Failed(String),
    /// The copy with this path of the host lacks an extended attribute, because the host's filesystem or the rights of
    /// the process do not allow it.
    LostAttribute {
        /// The path of the copy.
        path: PathBuf,
        /// The name of the attribute.
        name: Vec<u8>,
    },
    /// Two names of one file became two files, because hard links do not cross subvolumes.
    SplitFile {
        /// The path of the first copy in the filesystem.
        first: Vec<u8>,
        /// The path of the other copy.
        other: Vec<u8>,
    },
}

impl From<CopyMessage<'_>> for CopyEvent {
    fn from(message: CopyMessage<'_>) -> Self {
        match message {
            CopyMessage::Bytes(bytes) => Self::Bytes(bytes),
            CopyMessage::File(path) => Self::File(path.to_vec()),
            CopyMessage::Failed(error) => Self::Failed(format!("{error:#}")),
            CopyMessage::LostAttribute { path, name } => {
                Self::LostAttribute { path: path.to_owned(), name: name.to_vec() }
            }
            CopyMessage::SplitFile { first, other } => Self::SplitFile { first: first.to_vec(), other: other.to_vec() },
        }
    }
}

impl Filesystem {
    /// Copies a file or directory of the host, with everything below it, to `path`. By default, the copy keeps owners,
    /// modes, times, extended attributes, ACLs, hard links and holes, as `cp -a` does.
    ///
    /// `path` names the copy itself, and the directory that contains it must exist. A directory that exists at `path` is
    /// completed: other files in it stay, and files with the same names are replaced. Nothing outside of `path` is
    /// changed, and nothing outside of `host_path` is read, also if its owner changes it meanwhile. Symbolic links at
    /// `host_path` and at `path` are followed; all others are copied as links. The image that holds this filesystem is not
    /// copied. Another thread reads ahead. `progress` is called from any thread.
    ///
    /// ```
    /// use ubtrfs::{CopyOptions, Filesystem};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let scratch = tempfile::tempdir()?;
    /// # let project = scratch.path().join("project");
    /// # std::fs::create_dir_all(project.join("src"))?;
    /// # std::fs::write(project.join("src/main.rs"), "fn main() {}")?;
    /// let fs = Filesystem::make_in_memory(256 << 20)?;
    /// let report = fs.copy_from_host(&project, "/project", &CopyOptions::default(), &|_| {})?;
    /// assert_eq!((report.files, report.directories, report.failed), (1, 2, 0));
    /// assert_eq!(fs.read("/project/src/main.rs")?, b"fn main() {}");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; the filesystem accepts no more data (`StorageFull`, `ReadOnlyFilesystem`). Files that were made before
    /// the error stay. A file that cannot be copied is no error: it is reported to `progress` and counted in
    /// [`CopyReport::failed`].
    pub fn copy_from_host(
        &self,
        host_path: impl AsRef<Path>,
        path: impl AsRef<Path>,
        options: &CopyOptions,
        progress: &(dyn Fn(CopyEvent) + Sync),
    ) -> Result<CopyReport> {
        let (host_path, path) = (host_path.as_ref(), path.as_ref());
        let watch = |message: CopyMessage<'_>| progress(message.into());
        copy::copy_from_host(host_path, &self.files(), &absolute(path), &self.own_files(), options, &watch)
            .while_doing("copy into", path)
    }

    /// Copies a file or directory, with everything below it, to `host_path` on the host. By default, the copy keeps
    /// owners, modes, times, extended attributes, ACLs, hard links and holes, as far as the process has the right to set
    /// them.
    ///
    /// `host_path` names the copy itself, and the directory that contains it must exist. A directory that exists at
    /// `host_path` is completed: other files in it stay, and files with the same names are replaced when their copies are
    /// complete. Nothing outside of `host_path` is changed, for all names in the filesystem, and for all links and device
    /// files that are below `host_path`.
    /// Symbolic links at `path` and at `host_path` are followed; all others are copied as links. `progress` is called from
    /// any thread.
    ///
    /// With root's rights, the copy has set-user-id files and device files of the filesystem, which is not trusted. Copy
    /// it where other users cannot reach them, or with [`CopyOptions::owner`].
    ///
    /// ```
    /// use ubtrfs::{CopyOptions, Filesystem};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let scratch = tempfile::tempdir()?;
    /// # let target = scratch.path().join("target");
    /// # let fs = Filesystem::make_in_memory(256 << 20)?;
    /// fs.create_dir_all("/etc/app")?;
    /// fs.write("/etc/app/config", "color = blue\n")?;
    /// let report = fs.copy_to_host("/etc", &target, &CopyOptions::default(), &|_| {})?;
    /// assert_eq!((report.files, report.bytes, report.failed), (1, 13, 0));
    /// assert_eq!(std::fs::read(target.join("app/config"))?, b"color = blue\n");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; `ResourceBusy` if `host_path` is an image in use; the host's filesystem accepts no more data
    /// (`StorageFull`). Files that were made before the error stay. A file that cannot be copied is no error: it is
    /// reported to `progress` and counted in [`CopyReport::failed`].
    pub fn copy_to_host(
        &self,
        path: impl AsRef<Path>,
        host_path: impl AsRef<Path>,
        options: &CopyOptions,
        progress: &(dyn Fn(CopyEvent) + Sync),
    ) -> Result<CopyReport> {
        let (path, host_path) = (path.as_ref(), host_path.as_ref());
        let watch = |message: CopyMessage<'_>| progress(message.into());
        copy::copy_to_host(&self.files(), &absolute(path), host_path, options, &watch).while_doing("copy", path)
    }

    fn files(&self) -> ImageFiles<'_> {
        let caller = self.caller();
        ImageFiles::new(self.engine(), String::new(), (caller.uid, caller.gid))
    }

    /// Device and inode of the files that hold the filesystem.
    fn own_files(&self) -> Vec<(u64, u64)> {
        let devices = &self.engine().devices_at_open().1;
        let paths = devices.iter().filter_map(|device| device.path.as_deref());
        paths.filter_map(|path| std::fs::metadata(path).ok()).map(|meta| (meta.dev(), meta.ino())).collect()
    }
}

/// A path with a slash at its begin, and none at its end.
fn absolute(path: &Path) -> Vec<u8> {
    let bytes = path::bytes(path);
    let end = bytes.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
    let start = bytes[..end].iter().position(|byte| *byte != b'/').unwrap_or(end);
    [b"/", &bytes[start..end]].concat()
}
