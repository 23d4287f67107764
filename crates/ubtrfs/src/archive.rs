//! Tar archives: unpacking into a filesystem, and packing directories.

use std::io::{Read, Write};
use std::path::Path;

use ubtrfs_archive::{ArchiveMessage, ExportOptions, ExportReport, ImportOptions, ImportReport};

use crate::Filesystem;
use crate::error::{Result, ResultExt};
use crate::path::{self, Follow};

/// The progress of [`Filesystem::import`] or [`Filesystem::export`].
///
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// use ubtrfs::{ArchiveEvent, ExportOptions};
///
/// fs.write("/f", vec![1; 1000])?;
/// let show = |event| match event {
///     ArchiveEvent::Bytes(bytes) => println!("{bytes} bytes"),
///     ArchiveEvent::Failed(reason) => eprintln!("{reason}"),
///     ArchiveEvent::Socket(path) => eprintln!("left out: {}", String::from_utf8_lossy(&path)),
///     _ => {}
/// };
/// let (archive, _) = fs.export("/", Vec::new(), &ExportOptions::default(), &show)?;
/// assert!(archive.len() > 1000);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ArchiveEvent {
    /// The number of bytes so far. For an import: bytes of the archive that were read, before decompression. For an
    /// export: bytes of file data that were written to the archive.
    Bytes(u64),
    /// The member of an imported archive with this path is unpacked next.
    Member(Vec<u8>),
    /// A member or file was skipped, or its data is incomplete; the text names the member or file, and the reason.
    Failed(String),
    /// The socket at this path was left out, because tar cannot store sockets.
    Socket(Vec<u8>),
}

impl From<ArchiveMessage<'_>> for ArchiveEvent {
    fn from(event: ArchiveMessage<'_>) -> Self {
        match event {
            ArchiveMessage::Bytes(bytes) => Self::Bytes(bytes),
            ArchiveMessage::Member(path) => Self::Member(path.to_vec()),
            ArchiveMessage::Failed(error) => Self::Failed(format!("{error:#}")),
            ArchiveMessage::Socket(path) => Self::Socket(path.to_vec()),
        }
    }
}

impl Filesystem {
    /// Unpacks a tar archive, plain or compressed with gzip, xz, zstd, bzip2 or lz4, into the directory `to`, which is made if it
    /// does not exist. Nothing outside of `to` is changed. Another thread reads the archive ahead and decompresses it.
    /// `progress` is called from any thread.
    ///
    /// ```
    /// use ubtrfs::{ArchiveEvent, ExportOptions, Filesystem, ImportOptions};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let fs = Filesystem::make_in_memory(256 << 20)?;
    /// fs.create_dir_all("/etc/app")?;
    /// fs.write("/etc/app/config", "color = blue\n")?;
    /// let (archive, _) = fs.export("/etc", Vec::new(), &ExportOptions::default(), &|_| {})?;
    ///
    /// let copy = Filesystem::make_in_memory(256 << 20)?;
    /// let show = |event| match event {
    ///     ArchiveEvent::Bytes(bytes) => print!("\r{bytes} bytes"),
    ///     ArchiveEvent::Failed(reason) => eprintln!("{reason}"),
    ///     _ => {}
    /// };
    /// let report = copy.import(std::io::Cursor::new(archive), "/restored", &ImportOptions::default(), &show)?;
    /// assert_eq!((report.files, report.failed), (1, 0));
    /// assert_eq!(copy.read("/restored/app/config")?, b"color = blue\n");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The archive is damaged or cannot be read; ENOSPC; `ReadOnlyFilesystem`. Files that were made before the error
    /// stay. A member that cannot be unpacked is no error: it is reported to `progress` and counted in
    /// [`ImportReport::failed`].
    pub fn import(
        &self,
        archive: impl Read + Send + 'static,
        to: impl AsRef<Path>,
        options: &ImportOptions,
        progress: &(dyn Fn(ArchiveEvent) + Sync),
    ) -> Result<ImportReport> {
        let to = to.as_ref();
        ubtrfs_archive::Archive::from_reader(archive, Path::new("the archive"))
            .and_then(|mut archive| {
                ubtrfs_archive::import(self.engine(), &mut archive, path::bytes(to), options, &|event| {
                    progress(event.into());
                })
            })
            .while_doing("import into", to)
    }

    /// Writes a directory with everything below it, or a file, as a tar archive. Names in the archive are sorted and
    /// relative to the directory. Returns `out`, to which the whole archive was written.
    ///
    /// ```
    /// # fn main() -> ubtrfs::Result<()> {
    /// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
    /// use ubtrfs::ExportOptions;
    ///
    /// fs.create_dir("/dir")?;
    /// fs.write("/dir/f", vec![1; 1000])?;
    /// let (archive, report) = fs.export("/dir", Vec::new(), &ExportOptions::default(), &|_| {})?;
    /// assert_eq!((report.bytes, report.failed), (1000, 0));
    /// assert!(archive.len() > 1000);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `NotFound`; an error of `out`. A file that cannot be read is no error: it is reported to `progress` and counted
    /// in [`ExportReport::failed`].
    pub fn export<W: Write>(
        &self,
        from: impl AsRef<Path>,
        out: W,
        options: &ExportOptions,
        progress: &(dyn Fn(ArchiveEvent) + Sync),
    ) -> Result<(W, ExportReport)> {
        let from = from.as_ref();
        let start = self.resolve("export", from, Follow::Yes)?;
        let name = from.file_name().map_or(&b"file"[..], std::os::unix::ffi::OsStrExt::as_bytes);
        ubtrfs_archive::export(self.engine(), &start, name, out, options, &|event| progress(event.into()))
            .while_doing("export", from)
    }
}
