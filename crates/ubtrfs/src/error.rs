//! Errors: the operation, the path, and the reason with its errno.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use ubtrfs_device::OpenError;

/// The result of this crate's operations.
///
/// ```
/// fn size(fs: &ubtrfs::Filesystem, path: &str) -> ubtrfs::Result<u64> {
///     Ok(fs.metadata(path)?.len())
/// }
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20).unwrap();
/// # assert!(size(&fs, "/f").is_err());
/// ```
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed operation. The text of an error is one line with the operation, the path and the reason.
///
/// ```
/// # fn main() -> ubtrfs::Result<()> {
/// # let fs = ubtrfs::Filesystem::make_in_memory(128 << 20)?;
/// let error = fs.read("/nothing").unwrap_err();
/// assert_eq!(error.to_string(), "cannot read '/nothing': no such file or directory");
/// assert_eq!((error.operation(), error.path().to_str()), ("read", Some("/nothing")));
/// // ENOENT.
/// assert_eq!((error.errno(), error.kind()), (2, std::io::ErrorKind::NotFound));
/// assert!(!error.is_corruption());
/// # Ok(()) }
/// ```
#[derive(Debug, thiserror::Error)]
#[error("cannot {} '{}': {}", .0.operation, shown(&.0.path), .0.reason)]
pub struct Error(Box<FailedOperation>);

/// The path for a message of one line. Control characters, and bytes that are no UTF-8, are escaped, because a name of a
/// filesystem can be anything.
fn shown(path: &Path) -> String {
    let mut text = String::new();
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        for char in chunk.valid().chars() {
            match char.is_control() {
                true => text.extend(char.escape_default()),
                false => text.push(char),
            }
        }
        chunk.invalid().iter().for_each(|byte| text.extend(byte.escape_ascii().map(char::from)));
    }
    text
}

#[derive(Debug)]
struct FailedOperation {
    operation: &'static str,
    path: PathBuf,
    reason: Reason,
}

/// The reason why an operation failed.
#[derive(Debug, thiserror::Error)]
enum Reason {
    #[error(transparent)]
    Filesystem(#[from] ubtrfs_fs::Error),
    #[error(transparent)]
    Device(#[from] OpenError),
    #[error(transparent)]
    Host(#[from] io::Error),
    #[error(transparent)]
    Receive(#[from] ubtrfs_fs::ReceiveError),
    /// An error of an archive or copy with its causes, and the errno of the first cause that has one.
    #[cfg(feature = "import")]
    #[error("{text}")]
    Archive { text: String, errno: Option<i32> },
}

impl Error {
    pub(crate) fn new(operation: &'static str, path: &Path, cause: impl Into<Cause>) -> Self {
        Self(Box::new(FailedOperation { operation, path: path.to_owned(), reason: cause.into().0 }))
    }

    /// Wraps the reason as the failure of a larger operation.
    pub(crate) fn while_doing(mut self, operation: &'static str, path: &Path) -> Self {
        (self.0.operation, self.0.path) = (operation, path.to_owned());
        self
    }

    /// The failure to open a device, for crates of this workspace.
    #[doc(hidden)]
    pub fn of_device(operation: &'static str, path: &Path, cause: OpenError) -> Self {
        Self::new(operation, path, cause)
    }

    /// The failed operation, as a verb: "open", "rename".
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// The path of the operation, or the name of the device for an operation on the whole filesystem.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The Linux error number of the reason, as the kernel's btrfs would return it.
    pub fn errno(&self) -> i32 {
        match &self.0.reason {
            Reason::Filesystem(error) => error.errno(),
            Reason::Receive(error) => errno_of_receive(&error.problem),
            #[cfg(feature = "import")]
            Reason::Archive { errno, .. } => errno.unwrap_or(Errno::INVAL.raw_os_error()),
            Reason::Device(error) => errno_of_device(error),
            Reason::Host(source) => source.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
        }
    }

    /// The [`std::io::ErrorKind`] of [`errno`](Self::errno).
    pub fn kind(&self) -> io::ErrorKind {
        io::Error::from_raw_os_error(self.errno()).kind()
    }

    /// Whether the reason is damage: content of the device that contradicts the format or its checksum.
    pub fn is_corruption(&self) -> bool {
        matches!(&self.0.reason, Reason::Filesystem(ubtrfs_fs::Error::Engine(ubtrfs_error::Error::Corrupt(_))))
    }
}

/// The error number for the reason why a device was not opened.
fn errno_of_device(error: &OpenError) -> i32 {
    let errno = match error {
        OpenError::Io { source, .. } => return source.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
        OpenError::Missing { .. } => Errno::NOENT,
        OpenError::Exists { .. } => Errno::EXIST,
        OpenError::Permission { .. } | OpenError::NoEntry { .. } => Errno::ACCESS,
        OpenError::ReadOnlyHost { .. } => Errno::ROFS,
        OpenError::Locked { .. }
        | OpenError::OpenHere { .. }
        | OpenError::Mounted { .. }
        | OpenError::Served { .. }
        | OpenError::BackingInUse { .. } => Errno::BUSY,
        _ => Errno::INVAL,
    };
    errno.raw_os_error()
}

/// The error number for the reason why a stream was not received. Some reasons have the number of the
/// [`std::io::ErrorKind`] that describes them.
fn errno_of_receive(problem: &ubtrfs_fs::ReceiveProblem) -> i32 {
    use ubtrfs_fs::ReceiveProblem as Problem;
    match problem {
        Problem::Stream(_) if problem.errno() == Errno::BADMSG.raw_os_error() => Errno::INVAL.raw_os_error(),
        Problem::NotFollowed { .. } => Errno::INVAL.raw_os_error(),
        Problem::Writable { .. } => Errno::PERM.raw_os_error(),
        problem => problem.errno(),
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        Self::new(error.kind(), error)
    }
}

/// The cause of an [`Error`].
pub(crate) struct Cause(Reason);

impl From<ubtrfs_fs::Error> for Cause {
    fn from(error: ubtrfs_fs::Error) -> Self {
        Self(error.into())
    }
}

impl From<ubtrfs_error::Error> for Cause {
    fn from(error: ubtrfs_error::Error) -> Self {
        Self(ubtrfs_fs::Error::from(error).into())
    }
}

impl From<ubtrfs_fs::ReceiveError> for Cause {
    fn from(error: ubtrfs_fs::ReceiveError) -> Self {
        Self(error.into())
    }
}

impl From<OpenError> for Cause {
    fn from(error: OpenError) -> Self {
        Self(error.into())
    }
}

#[cfg(feature = "import")]
impl From<anyhow::Error> for Cause {
    fn from(error: anyhow::Error) -> Self {
        let errno = error.chain().find_map(|cause| {
            let of_fs = || cause.downcast_ref().map(ubtrfs_fs::Error::errno);
            let of_host = || cause.downcast_ref::<io::Error>()?.raw_os_error();
            let of_call = || cause.downcast_ref::<Errno>().map(|errno| errno.raw_os_error());
            of_fs().or_else(of_host).or_else(of_call).or_else(|| cause.downcast_ref().map(errno_of_device))
        });
        Self(Reason::Archive { text: format!("{error:#}"), errno })
    }
}

impl From<io::Error> for Cause {
    fn from(error: io::Error) -> Self {
        Self(error.into())
    }
}

/// Adds the operation and the path to an error.
pub(crate) trait ResultExt<T> {
    fn while_doing(self, operation: &'static str, path: &Path) -> Result<T>;
}

impl<T, E: Into<Cause>> ResultExt<T> for std::result::Result<T, E> {
    fn while_doing(self, operation: &'static str, path: &Path) -> Result<T> {
        self.map_err(|cause| Error::new(operation, path, cause))
    }
}
