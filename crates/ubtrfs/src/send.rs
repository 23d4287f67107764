//! Send: a read-only subvolume as a stream of commands, whole or as the difference to another subvolume.

use std::io::Write;
use std::path::{Path, PathBuf};

use ubtrfs_fs::{Job, SendRequest};

use crate::Filesystem;
use crate::error::{Result, ResultExt};

/// Options of [`Filesystem::send`].
///
/// ```
/// use ubtrfs::SendOptions;
///
/// // Only what changed since Sunday, with compressed data in its compressed form.
/// let options =
///     SendOptions { parent: Some("/sunday".into()), version: 2, compressed_data: true, ..SendOptions::default() };
/// # assert!(options.clone_sources.is_empty());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendOptions {
    /// A read-only subvolume that the receiver has. The stream is the difference to this subvolume.
    pub parent: Option<PathBuf>,
    /// More read-only subvolumes that the receiver has. The stream refers to their data instead of repeating it. Without
    /// a parent, the clone source that differs least becomes the parent.
    pub clone_sources: Vec<PathBuf>,
    /// Version of the stream, 1 or 2. Every receiver understands version 1.
    pub version: u32,
    /// Send compressed extents in their compressed form; needs version 2.
    pub compressed_data: bool,
    /// Send which ranges changed, without their data. Such a stream cannot be received.
    pub no_data: bool,
}

impl Default for SendOptions {
    fn default() -> Self {
        Self { parent: None, clone_sources: Vec::new(), version: 1, compressed_data: false, no_data: false }
    }
}

impl Filesystem {
    /// Writes the read-only subvolume at `path` into `output`, as a stream for [`receive`](Self::receive) or for
    /// `btrfs receive`. `job` counts bytes of the stream, and cancels the send.
    ///
    /// ```
    /// use ubtrfs::{Filesystem, Job, ReceiveOptions, SendOptions, SnapshotAccess};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let fs = Filesystem::make_in_memory(256 << 20)?;
    /// fs.create_subvolume("/data")?;
    /// fs.write("/data/report", "draft")?;
    /// fs.snapshot("/data", "/sunday", SnapshotAccess::ReadOnly)?;
    /// fs.write("/data/report", "final")?;
    /// fs.snapshot("/data", "/monday", SnapshotAccess::ReadOnly)?;
    ///
    /// let (mut whole, mut difference) = (Vec::new(), Vec::new());
    /// fs.send("/sunday", &SendOptions::default(), &mut whole, &Job::new())?;
    /// let options = SendOptions { parent: Some("/sunday".into()), ..SendOptions::default() };
    /// let job = Job::new();
    /// fs.send("/monday", &options, &mut difference, &job)?;
    /// assert_eq!(job.progress().done, difference.len() as u64);
    ///
    /// let backup = Filesystem::make_in_memory(256 << 20)?;
    /// for stream in [whole, difference] {
    ///     backup.receive("/", &stream[..], &ReceiveOptions::default(), &Job::new())?;
    /// }
    /// assert_eq!(backup.read("/monday/report")?, b"final");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `PermissionDenied` if a subvolume is not read-only; `InvalidInput` if a path is not a subvolume, or for a wrong
    /// version; `NotFound` if no clone source can be the parent; an error of `output`; ECANCELED.
    pub fn send(
        &self,
        path: impl AsRef<Path>,
        options: &SendOptions,
        output: &mut (dyn Write + Send),
        job: &Job,
    ) -> Result<()> {
        let path = path.as_ref();
        let root = |path: &Path| self.subvolume_root("send", path).map(|id| id.root);
        let request = SendRequest {
            subvolumes: vec![root(path)?],
            parent: options.parent.as_deref().map(root).transpose()?,
            clone_sources: options.clone_sources.iter().map(|path| root(path)).collect::<Result<_>>()?,
            version: options.version,
            compressed_data: options.compressed_data,
            no_data: options.no_data,
            joined: false,
        };
        self.engine().send(&request, output, job).while_doing("send", path)
    }
}
