//! What filesystem operations fail with, and the one mapping of those failures to errno.

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The engine below failed: corrupt content, a device, no space, read-only.
    #[error(transparent)]
    Engine(#[from] ubtrfs_format::Error),
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
    /// ERANGE: the caller's buffer is too small, or a value too long.
    #[error("result out of range")]
    Range,
    /// E2BIG.
    #[error("value too big")]
    TooBig,
    /// ENXIO: no data or hole after this offset.
    #[error("no data past this offset")]
    NoSuchOffset,
    /// EXDEV: source and target are in different subvolumes.
    #[error("crosses a subvolume's border")]
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
    /// ELOOP.
    #[error("too many levels of symbolic links")]
    SymlinkLoop,
    /// ENOSPC: the attributes of one hash, or a name's links, do not fit into an item.
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
    /// Data of the file could not be written back at an earlier time.
    #[error("data that was written earlier could not be written back (errno {errno})")]
    Writeback {
        /// Why it could not.
        errno: i32,
    },
    /// EINVAL: a mount option cannot be understood.
    #[error("mount option '{option}': {problem}")]
    MountOption {
        /// The option as given.
        option: String,
        /// What is wrong and what is accepted.
        problem: String,
    },
    /// EINVAL: `subvol=` or `subvolid=` names nothing.
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
    /// The error number that Linux's btrfs returns for this.
    pub fn errno(&self) -> i32 {
        use ubtrfs_format::{Corrupt, Error as Engine, FormatError};

        match self {
            // What a checksum caught is a bad read; the rest contradicts the format.
            Self::Engine(Engine::Corrupt(Corrupt { cause: FormatError::Checksum { .. }, .. })) => EIO,
            Self::Engine(Engine::Corrupt(_)) => EUCLEAN,
            Self::Engine(Engine::Io { .. }) => EIO,
            Self::Engine(Engine::NoSpace) => ENOSPC,
            Self::Engine(Engine::ReadOnly { .. }) => EROFS,
            Self::Engine(Engine::Unsupported { .. }) => EOPNOTSUPP,
            Self::Engine(Engine::Refused { .. }) => EINVAL,
            Self::NotFound => ENOENT,
            Self::Exists => EEXIST,
            Self::NotDirectory => ENOTDIR,
            Self::IsDirectory => EISDIR,
            Self::NotEmpty => ENOTEMPTY,
            Self::InvalidArgument(_) | Self::MountOption { .. } | Self::NoSuchSubvolume(_) => EINVAL,
            Self::NameTooLong => ENAMETOOLONG,
            Self::TooManyLinks => EMLINK,
            Self::NotPermitted(_) => EPERM,
            Self::AccessDenied => EACCES,
            Self::NoData => ENODATA,
            Self::Range => ERANGE,
            Self::TooBig => E2BIG,
            Self::NoSuchOffset => ENXIO,
            Self::CrossDevice => EXDEV,
            Self::FileTooBig => EFBIG,
            Self::NotSupported(_) => EOPNOTSUPP,
            Self::ReadOnlySubvolume | Self::ReadOnlyMount => EROFS,
            Self::SymlinkLoop => ELOOP,
            Self::ItemFull => ENOSPC,
            Self::Overflow => EOVERFLOW,
            Self::Stale => ESTALE,
            Self::Busy(_) => EBUSY,
            Self::Writeback { errno } => *errno,
        }
    }
}

// Linux's numbers; the engine may run elsewhere, the protocol above speaks Linux.
const EPERM: i32 = 1;
const ENOENT: i32 = 2;
const EIO: i32 = 5;
const ENXIO: i32 = 6;
const E2BIG: i32 = 7;
const EACCES: i32 = 13;
const EBUSY: i32 = 16;
const EEXIST: i32 = 17;
const EXDEV: i32 = 18;
const ENOTDIR: i32 = 20;
const EISDIR: i32 = 21;
const EINVAL: i32 = 22;
const EFBIG: i32 = 27;
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;
const EMLINK: i32 = 31;
const ERANGE: i32 = 34;
const ENAMETOOLONG: i32 = 36;
const ENOTEMPTY: i32 = 39;
const ELOOP: i32 = 40;
const ENODATA: i32 = 61;
const EOVERFLOW: i32 = 75;
const EOPNOTSUPP: i32 = 95;
const ESTALE: i32 = 116;
const EUCLEAN: i32 = 117;
