//! [`Error`]: the failure of a filesystem operation, and its errno.

use rustix::io::Errno;

/// The reason why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An error of the engine: corrupt content, a failing device, no space, a read-only filesystem.
    #[error(transparent)]
    Engine(#[from] ubtrfs_error::Error),
    /// ENOENT.
    #[error("no such file or directory")]
    NotFound,
    /// EEXIST.
    #[error("file exists")]
    Exists,
    /// ENOTDIR.
    #[error("not a directory")]
    NotDirectory,
    /// EISDIR.
    #[error("is a directory")]
    IsDirectory,
    /// ENOTEMPTY.
    #[error("directory not empty")]
    NotEmpty,
    /// EINVAL.
    #[error("invalid argument: {0}")]
    InvalidArgument(&'static str),
    /// ENAMETOOLONG.
    #[error("name too long")]
    NameTooLong,
    /// EMLINK.
    #[error("too many links")]
    TooManyLinks,
    /// EPERM.
    #[error("operation not permitted: {0}")]
    NotPermitted(&'static str),
    /// EACCES.
    #[error("permission denied")]
    AccessDenied,
    /// ENODATA: no such attribute.
    #[error("no such attribute")]
    NoData,
    /// ERANGE: the name of an attribute is empty or too long.
    #[error("result out of range")]
    Range,
    /// E2BIG.
    #[error("value too big")]
    TooBig,
    /// ENXIO: no data or hole after this offset.
    #[error("no data past this offset")]
    NoSuchOffset,
    /// EXDEV: source and target are in different subvolumes.
    #[error("source and target are in different subvolumes")]
    CrossDevice,
    /// EFBIG.
    #[error("file too large")]
    FileTooBig,
    /// EOPNOTSUPP.
    #[error("not supported: {0}")]
    NotSupported(&'static str),
    /// EROFS: the subvolume is read-only.
    #[error("read-only subvolume")]
    ReadOnlySubvolume,
    /// EROFS: mounted read-only.
    #[error("mounted read-only")]
    ReadOnlyMount,
    /// ESHUTDOWN: a change after [`Fs::close`](crate::Fs::close).
    #[error("the filesystem is closed")]
    Closed,
    /// An earlier [`Fs::close`](crate::Fs::close) failed. The error number is the one that the earlier call returned.
    #[error("{reason}")]
    CloseFailed {
        /// The error number of that call.
        errno: i32,
        /// The message of that call.
        reason: String,
    },
    /// ELOOP.
    #[error("too many levels of symbolic links")]
    SymlinkLoop,
    /// ENOSPC: an extended attribute does not fit into its item, which it shares with attributes whose names have the
    /// same hash.
    #[error("no room in the item for another entry")]
    ItemFull,
    /// EOVERFLOW: the entries of one name hash do not fit into an item.
    #[error("too many names with the same hash")]
    Overflow,
    /// ESTALE: the inode was deleted.
    #[error("stale inode")]
    Stale,
    /// EBUSY.
    #[error("busy: {0}")]
    Busy(&'static str),
    /// EINPROGRESS: a running operation, such as a balance or a send, excludes this operation.
    #[error("{0}")]
    InProgress(&'static str),
    /// ENOTCONN: no operation of this kind is running.
    #[error("{0}")]
    NotRunning(&'static str),
    /// Earlier writeback of the file's data failed.
    #[error("writeback of earlier writes failed (errno {errno})")]
    Writeback {
        /// Error number of the failed write.
        errno: i32,
    },
    /// EAGAIN: a thread that the work needs cannot be started.
    #[error("the system starts no more threads; raise the limit of processes, or end some")]
    NoThread,
    /// The stream of a send cannot be written to its output.
    #[error("cannot write the stream: {0}")]
    Output(std::io::Error),
    /// EOVERFLOW: a name, path or value does not fit into a command of a send stream.
    #[error("the send stream cannot carry it: {0}")]
    Unsendable(String),
    /// ENOENT: no clone source can be the parent of an incremental send.
    #[error("{0}")]
    NoParent(String),
    /// EINVAL: a mount option cannot be understood.
    #[error("mount option '{option}': {problem}")]
    MountOption {
        /// The option as written.
        option: String,
        /// The problem, and the accepted values.
        problem: String,
    },
    /// EINVAL: the subvolume of `subvol=` or `subvolid=` does not exist.
    #[error("subvolume '{0}' does not exist; list them with: ubtrfs subvolume list")]
    NoSuchSubvolume(String),
}

/// Result of filesystem operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<ubtrfs_format::FormatError> for Error {
    fn from(cause: ubtrfs_format::FormatError) -> Self {
        Self::Engine(cause.into())
    }
}

impl From<ubtrfs_format::Corrupt> for Error {
    fn from(cause: ubtrfs_format::Corrupt) -> Self {
        Self::Engine(cause.into())
    }
}

impl Error {
    /// The error number that Linux's btrfs returns for this failure.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            Self::Engine(error) => return error.errno(),
            Self::NotFound => Errno::NOENT,
            Self::Exists => Errno::EXIST,
            Self::NotDirectory => Errno::NOTDIR,
            Self::IsDirectory => Errno::ISDIR,
            Self::NotEmpty => Errno::NOTEMPTY,
            Self::InvalidArgument(_) | Self::MountOption { .. } | Self::NoSuchSubvolume(_) => Errno::INVAL,
            Self::NameTooLong => Errno::NAMETOOLONG,
            Self::TooManyLinks => Errno::MLINK,
            Self::NotPermitted(_) => Errno::PERM,
            Self::AccessDenied => Errno::ACCESS,
            Self::NoData => Errno::NODATA,
            Self::Range => Errno::RANGE,
            Self::InProgress(_) => Errno::INPROGRESS,
            Self::NotRunning(_) => Errno::NOTCONN,
            Self::TooBig => Errno::TOOBIG,
            Self::NoSuchOffset => Errno::NXIO,
            Self::CrossDevice => Errno::XDEV,
            Self::FileTooBig => Errno::FBIG,
            Self::NotSupported(_) => Errno::OPNOTSUPP,
            Self::ReadOnlySubvolume | Self::ReadOnlyMount => Errno::ROFS,
            Self::Closed => Errno::SHUTDOWN,
            Self::CloseFailed { errno, .. } => return *errno,
            Self::SymlinkLoop => Errno::LOOP,
            Self::ItemFull => Errno::NOSPC,
            Self::Overflow => Errno::OVERFLOW,
            Self::Stale => Errno::STALE,
            Self::Busy(_) => Errno::BUSY,
            Self::NoThread => Errno::AGAIN,
            Self::Writeback { errno } => return *errno,
            Self::Output(error) => return error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
            Self::Unsendable(_) => Errno::OVERFLOW,
            Self::NoParent(_) => Errno::NOENT,
        };
        errno.raw_os_error()
    }
}
