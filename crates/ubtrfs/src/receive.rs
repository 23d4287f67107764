//! Receive: making subvolumes from a send stream, which is not trusted.

use std::io::Read;
use std::path::Path;

use ubtrfs_fs::{Job, ReceiveOptions, ReceiveReport};

use crate::Filesystem;
use crate::error::{Error, Result, ResultExt};
use crate::path::Follow;

impl Filesystem {
    /// Makes the subvolumes of a send stream in the directory `to`. The stream comes from [`send`](Self::send) or from
    /// `btrfs send`. `job` counts bytes of the input, and cancels the receive.
    ///
    /// The stream changes nothing outside of its subvolumes. Complete subvolumes are read-only, and durable on return.
    /// They stay even if the receive fails later. An incomplete subvolume is deleted, unless
    /// [`ReceiveOptions::keep`] is set.
    ///
    /// ```
    /// use ubtrfs::{Filesystem, Job, ReceiveOptions, SendOptions};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let fs = Filesystem::make_in_memory(256 << 20)?;
    /// # fs.create_subvolume("/data")?;
    /// # fs.write("/data/f", "text")?;
    /// # fs.set_subvolume_read_only("/data", true)?;
    /// # let mut stream = Vec::new();
    /// # fs.send("/data", &SendOptions::default(), &mut stream, &Job::new())?;
    /// let backup = Filesystem::make_in_memory(256 << 20)?;
    /// backup.create_dir("/snapshots")?;
    /// let options = ReceiveOptions { verify: true, ..ReceiveOptions::default() };
    /// let report = backup.receive("/snapshots", &stream[..], &options, &Job::new())?;
    /// assert_eq!(report.subvolumes[0].path, b"data");
    /// assert!(backup.subvolume("/snapshots/data")?.is_read_only());
    ///
    /// // A cancelled job ends the receive, here before its begin.
    /// let job = Job::new();
    /// job.cancel();
    /// assert!(backup.receive("/", &stream[..], &options, &job).is_err());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `InvalidInput` if the stream is damaged or makes no sense; `NotFound` if the parent of its subvolume is not on
    /// this filesystem; `AlreadyExists`; `ReadOnlyFilesystem`; `StorageFull`; ECANCELED.
    pub fn receive(
        &self,
        to: impl AsRef<Path>,
        input: impl Read + Send,
        options: &ReceiveOptions,
        job: &Job,
    ) -> Result<ReceiveReport> {
        let to = to.as_ref();
        let dir = self.resolve("receive into", to, Follow::Yes)?;
        if !dir.is_dir() {
            return Err(Error::new("receive into", to, ubtrfs_fs::Error::NotDirectory));
        }
        self.engine().receive(dir.id, input, options, job, &mut |_subvolume| {}).while_doing("receive into", to)
    }
}
