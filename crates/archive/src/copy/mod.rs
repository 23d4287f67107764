//! Copies between the host and filesystems, and inside of a filesystem, where data is shared instead of copied.
//!
//! A copy has two ends, each the host or an open filesystem: [`CopySource`] reads and [`CopyTarget`] writes.
//! [`CopyOperation`] walks the source.
//!
//! Both ends are untrusted. The heads of `host`, `beneath` and `image` number what holds for them.

mod beneath;
mod dir_chain;
mod host;
mod image;
mod new_flags;
mod new_subvolume;
mod operation;
mod owners;
mod read_ahead;

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::Context;
use rustix::io::Errno;
use ubtrfs_format::item::Timespec;
use ubtrfs_fs::{InodeId, mode};

pub use self::host::{HostFiles, HostTarget, InvalidOwner};
pub use self::image::ImageFiles;
pub use self::new_flags::NewFlags;
pub use self::new_subvolume::CopiedSubvolume;
pub use self::operation::CopyOperation;
pub use self::owners::{IdRange, OwnerMap, UnmappedOwner};

use crate::walk::{shown, type_of};

/// What a copy keeps of the source. The default keeps everything, as `cp -a` does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyOptions {
    /// Keep user, group and mode. Without it, copies belong to the user who makes them, and have the mode of a new file.
    pub keep_owner: bool,
    /// Keep the times of the last access and of the last modification.
    pub keep_times: bool,
    /// Keep extended attributes, and thereby ACLs and capabilities.
    pub keep_xattrs: bool,
    /// Copy a file with several names once, and link the other names to this copy.
    pub keep_hard_links: bool,
    /// User and group of every copy; `None` for those that `keep_owner` and `owners` give.
    pub owner: Option<(u32, u32)>,
    /// How users and groups are renumbered if they are kept.
    pub owners: OwnerMap,
}

impl Default for CopyOptions {
    fn default() -> Self {
        Self {
            keep_owner: true,
            keep_times: true,
            keep_xattrs: true,
            keep_hard_links: true,
            owner: None,
            owners: OwnerMap::default(),
        }
    }
}

/// The numbers of files that a copy made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct CopyReport {
    /// Regular files.
    pub files: u64,
    /// Directories, also those that existed.
    pub directories: u64,
    /// Symbolic links.
    pub symlinks: u64,
    /// Further names of files that were copied.
    pub hard_links: u64,
    /// Device files, named pipes and sockets.
    pub special_files: u64,
    /// Bytes of file data, without holes, and without data that source and copy share.
    pub bytes: u64,
    /// Files that were not copied, or not with all attributes; each was reported as [`CopyMessage::Failed`].
    pub failed: u64,
}

/// A message to the caller of a copy.
#[derive(Debug)]
pub enum CopyMessage<'m> {
    /// The number of bytes of file data so far.
    Bytes(u64),
    /// The file with this path in the source is copied next.
    File(&'m [u8]),
    /// A file was not copied, or not with all attributes. The copy continues with the other files.
    Failed(&'m anyhow::Error),
    /// The copy with this path of the host lacks an extended attribute, because the host's filesystem or the user's rights
    /// do not allow it.
    LostAttribute {
        /// The path of the copy.
        path: &'m Path,
        /// The name of the attribute.
        name: &'m [u8],
    },
    /// Two names of one file became two files, because hard links do not cross subvolumes.
    SplitFile {
        /// The path of the first copy in the target.
        first: &'m [u8],
        /// The path of the other copy.
        other: &'m [u8],
    },
}

/// Receives the messages.
pub type CopyWatch<'w> = &'w (dyn Fn(CopyMessage<'_>) + Sync);

/// Attributes of a file that a copy needs.
#[derive(Clone, Debug)]
pub struct SourceInfo {
    /// Type and permissions.
    pub mode: u32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Major number of a device file.
    pub major: u32,
    /// Minor number of a device file.
    pub minor: u32,
    /// Bytes of a regular file.
    pub size: u64,
    /// Number of names.
    pub nlink: u64,
    /// Time of the last access.
    pub atime: Timespec,
    /// Time of the last modification.
    pub mtime: Timespec,
    /// Device or subvolume, and inode: equal for all names of a file.
    pub identity: (u64, u64),
    /// The inode, if the file is in an image.
    pub id: Option<InodeId>,
}

impl SourceInfo {
    /// Whether the file is a directory.
    pub fn is_dir(&self) -> bool {
        type_of(self.mode) == mode::DIRECTORY
    }
}

/// Names and values of extended attributes.
pub type XattrList = Vec<(Vec<u8>, Vec<u8>)>;

/// Times of the last access and of the last modification.
pub type Times = (Timespec, Timespec);

/// Attributes to set on the copy. An attribute that is `None` or empty keeps the value that a new file has.
#[derive(Clone, Debug)]
pub struct CopiedAttributes {
    /// Owner and group, which are set together with the mode.
    pub owner: Option<(u32, u32)>,
    /// Type and permissions.
    pub mode: u32,
    /// Extended attributes.
    pub xattrs: XattrList,
    /// Times.
    pub times: Option<Times>,
}

impl CopiedAttributes {
    fn is_nothing(&self) -> bool {
        self.owner.is_none() && self.xattrs.is_empty() && self.times.is_none()
    }
}

/// Receives a piece of a file: its offset and bytes.
pub type PieceCallback<'p> = &'p mut dyn FnMut(u64, &[u8]) -> anyhow::Result<()>;

/// The source of a copy.
pub trait CopySource {
    /// Returns the attributes of the file at a path; `None` if there is no file.
    fn info(&self, path: &[u8], follow: bool) -> anyhow::Result<Option<SourceInfo>>;
    /// Whether the copy reads the content of this special file, as cp does without -r.
    fn is_stream(&self, _info: &SourceInfo) -> bool {
        false
    }
    /// Returns the names in a directory.
    fn names(&self, path: &[u8]) -> anyhow::Result<Vec<Vec<u8>>>;
    /// Returns the target of a symbolic link.
    fn read_link(&self, path: &[u8]) -> anyhow::Result<Vec<u8>>;
    /// Returns the extended attributes of a file.
    fn xattrs(&self, path: &[u8]) -> anyhow::Result<XattrList>;
    /// Passes the file's data to `piece`, without holes.
    fn data(&self, path: &[u8], info: &SourceInfo, piece: PieceCallback<'_>) -> anyhow::Result<()>;
    /// Formats a path for messages.
    fn shown_source(&self, path: &[u8]) -> String;
}

/// The target of a copy. `named` means that the user named the file itself; other files were found by walking a
/// directory.
pub trait CopyTarget {
    /// The target's path; all other paths are below it.
    fn top(&self) -> Vec<u8>;
    /// Returns the file at a path, if there is one. With `follow`, a symbolic link at the path is resolved, as far as
    /// the invariant I1 of the module `host` or `image` permits.
    fn there(&self, path: &[u8], named: bool, follow: bool) -> anyhow::Result<Option<SourceInfo>>;
    /// Makes a directory; returns its inode if it is in an image.
    fn make_dir(&self, path: &[u8], mode: u32) -> anyhow::Result<Option<InodeId>>;
    /// Makes a symbolic link.
    fn make_link(&self, path: &[u8], target: &[u8]) -> anyhow::Result<()>;
    /// Makes a device file, named pipe or socket.
    fn make_special(&self, path: &[u8], info: &SourceInfo) -> anyhow::Result<()>;
    /// Makes a file with the data that `fill` produces, and replaces an existing file. On error, an existing regular
    /// file stays unchanged.
    fn make_file(
        &self,
        path: &[u8],
        info: &SourceInfo,
        named: bool,
        attributes: &CopiedAttributes,
        fill: &mut dyn FnMut(PieceCallback<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()>;
    /// Makes another name of a file.
    fn hard_link(&self, old: &[u8], new: &[u8]) -> anyhow::Result<()>;
    /// Removes the name of a file that is not a directory.
    fn unlink(&self, path: &[u8]) -> anyhow::Result<()>;
    /// Sets user, group and mode.
    fn set_owner(&self, path: &[u8], owner: (u32, u32), mode: u32) -> anyhow::Result<()>;
    /// Sets extended attributes.
    fn set_xattrs(&self, path: &[u8], xattrs: &XattrList) -> anyhow::Result<()>;
    /// Sets the times.
    fn set_times(&self, path: &[u8], times: Times) -> anyhow::Result<()>;
    /// Sets the attributes of a directory, symbolic link or special file. ([`CopyTarget::make_file`] sets those of the file
    /// that it makes.)
    fn set_attributes(&self, path: &[u8], attributes: &CopiedAttributes) -> anyhow::Result<()> {
        self.set_each_attribute(path, attributes)
    }
    /// Sets the attributes one after another.
    fn set_each_attribute(&self, path: &[u8], attributes: &CopiedAttributes) -> anyhow::Result<()> {
        if let Some(owner) = attributes.owner {
            self.set_owner(path, owner, attributes.mode)?;
        }
        self.set_xattrs(path, &attributes.xattrs)?;
        attributes.times.map_or(Ok(()), |times| self.set_times(path, times))
    }
    /// Whether every further file would fail with this error, because the target is full, broken or read-only.
    fn takes_no_more(&self, error: &anyhow::Error) -> bool;
    /// Formats a path for messages.
    fn shown_path(&self, path: &[u8]) -> String;
}

/// Copies a file, or the content and attributes of a directory, from the host to a path of a filesystem. The last name
/// of the path need not exist. Symbolic links at `source` and at `path` are followed. The files with the identities
/// `own_files`, which hold the filesystem, are not copied. The last changes are not committed on return.
///
/// # Errors
/// The source does not exist, the target cannot be made, or the filesystem accepts no more data. A file that cannot be
/// copied is reported as [`CopyMessage::Failed`], counted, and skipped.
pub fn copy_from_host(
    source: &Path,
    image: &ImageFiles<'_>,
    path: &[u8],
    own_files: &[(u64, u64)],
    options: &CopyOptions,
    watch: CopyWatch<'_>,
) -> anyhow::Result<CopyReport> {
    let from = source.as_os_str().as_bytes();
    let host = HostFiles::default();
    let info =
        host.info(from, true)?.ok_or(Errno::NOENT).with_context(|| format!("{} does not exist", shown(source)))?;
    let path = match image.there(path, true, true)? {
        Some(there) if there.is_dir() => image.followed(path)?,
        _ => path.to_vec(),
    };
    let mut copy = CopyOperation::new(options, &host, image, watch);
    copy.own_files = own_files;
    copy.ends_with_target = true;
    copy.tree(from.to_vec(), path, info)?;
    let report = copy.report();
    image.finish_subvolumes()?;
    Ok(report)
}

/// Copies a file, or the content and attributes of a directory, from a filesystem to a path of the host. The last name of
/// `target` need not exist. Symbolic links at `path` and at `target` are followed. Below `target`, devices, FIFOs and
/// sockets are replaced, because another copy may have made them.
///
/// # Errors
/// The source does not exist, the target cannot be made, or the host's filesystem accepts no more data. A file that
/// cannot be copied is reported as [`CopyMessage::Failed`], counted, and skipped.
pub fn copy_to_host(
    image: &ImageFiles<'_>,
    path: &[u8],
    target: &Path,
    options: &CopyOptions,
    watch: CopyWatch<'_>,
) -> anyhow::Result<CopyReport> {
    let path = image.followed(path)?;
    let info = image.info(&path, false)?.ok_or(Errno::NOENT)?;
    if !target.is_dir() {
        // Tells why.
        let dir = target.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::metadata(dir).with_context(|| shown(dir))?;
    }
    let to = HostTarget::open(target, watch)?.replacing_special();
    let mut copy = CopyOperation::new(options, image, &to, watch);
    copy.ends_with_target = true;
    copy.tree(path, to.top(), info)?;
    Ok(copy.report())
}
