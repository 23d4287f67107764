//! [`OpenError`]: why an image file, block device or export cannot be opened, and what the user can do about it.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use ubtrfs_nbd::NbdError;

use crate::file::Access;
use crate::mounted;

/// The reason why a device cannot be opened. The text of the error is one line that tells users what to do.
#[derive(Debug)]
pub enum OpenError {
    /// The file does not exist.
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The parent directory of a new file does not exist.
    NoDirectory {
        /// The directory.
        path: PathBuf,
    },
    /// A file to create exists already.
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// Another process has the file open.
    Locked {
        /// The file.
        path: PathBuf,
        /// The process, if known.
        by: Option<String>,
    },
    /// This process has the file open.
    OpenHere {
        /// The file.
        path: PathBuf,
    },
    /// The kernel has mounted the file.
    Mounted {
        /// The file.
        path: PathBuf,
        /// The loop device over the file, if there is one.
        through: Option<PathBuf>,
        /// The mount point, if it is in this namespace.
        at: Option<PathBuf>,
    },
    /// A FUSE server has mounted the file.
    Served {
        /// The file.
        path: PathBuf,
        /// The loop device over the file, if there is one.
        through: Option<PathBuf>,
        /// The mount point.
        at: PathBuf,
        /// The filesystem type, such as `fuse.ubtrfs`.
        kind: String,
    },
    /// A part of the block device, such as the file behind a loop device, is in use.
    BackingInUse {
        /// The block device.
        path: PathBuf,
        /// The reason why that part cannot be opened.
        backing: Box<OpenError>,
    },
    /// The filesystem that holds the file, or the block device, is read-only.
    ReadOnlyHost {
        /// The file.
        path: PathBuf,
    },
    /// The file is immutable or append-only.
    Immutable {
        /// The file.
        path: PathBuf,
    },
    /// The block device refuses writes.
    WriteProtected {
        /// The device.
        path: PathBuf,
    },
    /// The process has a limit on the size of files, which this file would exceed.
    SizeLimit {
        /// The file.
        path: PathBuf,
        /// The limit in bytes.
        limit: u64,
    },
    /// The path names neither a regular file nor a block device.
    NotRegular {
        /// The file.
        path: PathBuf,
        /// The kind of file.
        what: &'static str,
    },
    /// The system denies access.
    Permission {
        /// The file.
        path: PathBuf,
        /// The wanted access.
        access: Access,
    },
    /// The system denies access to a directory of the path.
    NoEntry {
        /// The directory.
        dir: PathBuf,
    },
    /// A block device is smaller than requested.
    TooSmall {
        /// The device.
        path: PathBuf,
        /// Size of the device.
        len_bytes: u64,
        /// Requested size.
        wanted: u64,
    },
    /// The URL is wrong, or the server cannot open the export.
    Network {
        /// The URL.
        path: PathBuf,
        /// The reason.
        source: NbdError,
    },
    /// The export takes no writes.
    ReadOnlyExport {
        /// The URL.
        path: PathBuf,
    },
    /// The object cannot be changed in place.
    Object {
        /// The URL.
        path: PathBuf,
    },
    /// The server of the export cannot make writes durable.
    NoFlush {
        /// The URL.
        path: PathBuf,
    },
    /// Any other error of the system.
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl OpenError {
    /// Whether the device itself cannot be used, and nobody else uses it.
    pub fn is_of_device(&self) -> bool {
        match self {
            Self::Missing { .. }
            | Self::ReadOnlyHost { .. }
            | Self::Immutable { .. }
            | Self::WriteProtected { .. }
            | Self::SizeLimit { .. }
            | Self::Permission { .. }
            | Self::NoEntry { .. }
            | Self::Network { .. }
            | Self::ReadOnlyExport { .. }
            | Self::Object { .. }
            | Self::NoFlush { .. }
            | Self::Io { .. } => true,
            Self::NoDirectory { .. }
            | Self::Exists { .. }
            | Self::Locked { .. }
            | Self::OpenHere { .. }
            | Self::Mounted { .. }
            | Self::Served { .. }
            | Self::BackingInUse { .. }
            | Self::NotRegular { .. }
            | Self::TooSmall { .. } => false,
        }
    }
}

impl std::fmt::Display for OpenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing { path } => match tag(path) {
                Some(tag) => write!(
                    f,
                    "{0} is no path of a device; name the device, which this command prints: blkid -o device -t {tag}",
                    shown(path)
                ),
                None => write!(f, "{} does not exist; check the path", shown(path)),
            },
            Self::NoDirectory { path } => {
                write!(f, "the directory {} does not exist; check the path, or create the directory", shown(path))
            }
            Self::Exists { path } => write!(f, "{} exists already; choose another name or remove it", shown(path)),
            Self::Locked { path, by } => {
                let by = by.as_deref().unwrap_or("another process");
                let how = match by.contains(" --serve ") {
                    true => {
                        "it serves a mount, so unmount that: ubtrfs umount DIR; if findmnt does not show it, another mount namespace \
                         has it: unmount it there, or end the process"
                    }
                    false => "wait until that process ends, or end it",
                };
                write!(f, "{} is in use by {by}; {how}", shown(path))
            }
            Self::OpenHere { path } => write!(
                f,
                "{} is in use: this program has it open already; choose another file, or close it first",
                shown(path)
            ),
            Self::Mounted { path, through, at } => {
                write!(f, "{} is mounted by the kernel", shown(path))?;
                if let Some(through) = through {
                    write!(f, " through {}", shown(through))?;
                }
                match at {
                    Some(at) => write!(f, " at {}; unmount it first", shown(at)),
                    None => write!(f, " or part of another device; unmount or release it first"),
                }
            }
            Self::Served { path, through, at, kind } => {
                let by = kind.strip_prefix("fuse.").or_else(|| kind.strip_prefix("fuseblk.")).unwrap_or(kind);
                write!(f, "{} is mounted by {by}", shown(path))?;
                if let Some(through) = through {
                    write!(f, " through {}", shown(through))?;
                }
                let command = if by == "ubtrfs" { "ubtrfs umount" } else { "umount" };
                write!(f, " at {0}; unmount it first, with: {command} {0}", shown(at))
            }
            Self::BackingInUse { path, backing } => {
                write!(f, "the file or device behind {} is in use: {backing}", shown(path))
            }
            Self::ReadOnlyHost { path } => write!(
                f,
                "{} cannot be written, because its filesystem or device is read-only; remount that read-write, or open the image read-only (-o ro)",
                shown(path)
            ),
            Self::Immutable { path } => write!(
                f,
                "{0} is immutable or append-only (see: lsattr {0}); clear the flag with `chattr -i -a {0}`, or open the image read-only (-o ro)",
                shown(path)
            ),
            Self::WriteProtected { path } => write!(
                f,
                "{0} is write-protected; allow writes with `blockdev --setrw {0}`, or open it read-only (-o ro)",
                shown(path)
            ),
            Self::SizeLimit { path, limit } => write!(
                f,
                "{} is larger than the {limit} bytes that this process may write to a file; raise that limit (ulimit -f)",
                shown(path)
            ),
            Self::NotRegular { path, what } => {
                write!(f, "{} is {what}; give an image file or a block device", shown(path))
            }
            Self::Permission { path, access } => {
                let what = if *access == Access::ReadOnly { "read" } else { "read and write" };
                write!(f, "no permission to {what} {}; change its mode or owner, or run as another user", shown(path))
            }
            Self::NoEntry { dir } => {
                write!(
                    f,
                    "no permission to enter the directory {}; change its mode or owner, or run as another user",
                    shown(dir)
                )
            }
            Self::TooSmall { path, len_bytes, wanted } => {
                write!(f, "{} has {len_bytes} bytes, not {wanted}; give a smaller size", shown(path))
            }
            // The text of a wrong URL names it already, as far as it has no secret.
            Self::Network { source: NbdError::Url(source), .. } => source.fmt(f),
            Self::Network { path, source } => write!(f, "cannot open {}: {source}", shown(path)),
            Self::ReadOnlyExport { path } => write!(
                f,
                "the server of {} serves it read-only; open it read-only (-o ro), or let the server permit writes",
                shown(path)
            ),
            Self::Object { path } => {
                write!(f, "{} is an object, which can only be read; copy it to an image file to change it", shown(path))
            }
            Self::NoFlush { path } => write!(
                f,
                "the server of {} cannot make writes durable (it has no flush); open it read-only (-o ro), or use a server that \
                 flushes, such as qemu-nbd, or nbd-server with flush = true",
                shown(path)
            ),
            Self::Io { path, source } => write!(f, "cannot open {}: {source}", shown(path)),
        }
    }
}

/// The text of a path that is a tag of a device, such as `UUID=...` in /etc/fstab; `None` for all other paths.
fn tag(path: &Path) -> Option<String> {
    const TAGS: [&str; 4] = ["UUID=", "LABEL=", "PARTUUID=", "PARTLABEL="];
    let text = shown(path);
    TAGS.iter().any(|tag| text.starts_with(tag)).then_some(text)
}

/// The text of a path, escaped for a terminal.
fn shown(path: &Path) -> String {
    ubtrfs_format::print::escaped(path.as_os_str().as_encoded_bytes())
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            Self::Network { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// Names the reason for a failed system call on `path`.
pub(crate) fn classify(path: &Path, access: Access, source: io::Error) -> OpenError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::NotFound => OpenError::Missing { path },
        io::ErrorKind::AlreadyExists => OpenError::Exists { path },
        // EPERM means that the file is immutable or append-only: a missing permission gives EACCES.
        _ if access == Access::ReadWrite && Errno::from_io_error(&source) == Some(Errno::PERM) => {
            OpenError::Immutable { path }
        }
        io::ErrorKind::PermissionDenied => match closed_directory(&path) {
            Some(dir) => OpenError::NoEntry { dir },
            None => OpenError::Permission { path, access },
        },
        io::ErrorKind::ReadOnlyFilesystem => OpenError::ReadOnlyHost { path },
        io::ErrorKind::FileTooLarge => match file_size_limit() {
            Some(limit) => OpenError::SizeLimit { path, limit },
            None => OpenError::Io { path, source },
        },
        _ if mounted::is_busy(&source) => OpenError::Mounted { path, through: None, at: None },
        _ => OpenError::Io { path, source },
    }
}

/// The first directory of a path that this process may not enter.
fn closed_directory(path: &Path) -> Option<PathBuf> {
    let above: Vec<&Path> = path.ancestors().skip(1).filter(|dir| !dir.as_os_str().is_empty()).collect();
    let is_closed = |dir: &&Path| rustix::fs::access(*dir, rustix::fs::Access::EXEC_OK) == Err(Errno::ACCESS);
    above.into_iter().rev().find(is_closed).map(Path::to_owned)
}

/// Maximum size in bytes of a file that this process may write; `None` if there is no limit.
pub(crate) fn file_size_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Fsize).current
}
