//! Commands that find the paths of addresses, inodes and subvolumes.
//!
//! | command           | needs                                                          |
//! |-------------------|----------------------------------------------------------------|
//! | root id           | nothing but the file                                           |
//! | all others        | the rights of an administrator ([`Context::require_admin`])    |

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_format::{Ino, Logical, RootId};
use ubtrfs_fs::{ExtentUse, InodeId};

use crate::execute::{Context, FileNr};
use crate::failure::{Failure, Result};

/// A command that finds paths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Returns the paths of all files that use the data at an address: [`Response::Paths`].
    Logical {
        /// The address.
        bytenr: u64,
        /// Whether to include all users of the extent that holds the address, not only users of that byte.
        whole_extent: bool,
    },
    /// Returns all inodes that use the data at an address: [`Response::Inodes`].
    LogicalInodes {
        /// The address.
        bytenr: u64,
        /// As in [`Request::Logical`].
        whole_extent: bool,
    },
    /// Returns all paths of an inode: [`Response::Paths`].
    Inode {
        /// Any file of the subvolume.
        of: FileNr,
        /// The inode number.
        ino: u64,
    },
    /// Returns the path of a subvolume: [`Response::Paths`].
    Subvolume {
        /// The subvolume's id.
        id: u64,
    },
    /// Returns the id of the subvolume that holds a file: [`Response::Id`].
    RootId {
        /// The file.
        of: FileNr,
    },
}

/// The result of a command that finds paths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// Paths from the top level, without a slash in front.
    Paths {
        /// The paths.
        paths: Vec<PathBytes>,
        /// The path of the directory that the mount shows.
        shown: PathBytes,
    },
    /// Uses of an extent.
    Inodes(Vec<InodeUse>),
    /// An id.
    Id(u64),
}

/// A use of an extent by an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InodeUse {
    /// The inode number.
    pub ino: u64,
    /// The offset in the file.
    pub offset: u64,
    /// The subvolume's id.
    pub root: u64,
}

/// A path as sent to the client.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PathBytes(#[serde(with = "crate::bytes")] pub Vec<u8>);

pub(crate) fn execute(context: &Context<'_>, request: Request) -> Result<Response> {
    let fs = context.fs;
    if let Request::RootId { of } = request {
        return Ok(Response::Id(context.inode(of)?.root.0));
    }
    context.require_admin()?;
    let paths = match request {
        Request::Logical { bytenr, whole_extent } => {
            let (_, uses) = uses(context, bytenr, whole_extent)?;
            let mut inodes: Vec<InodeId> =
                uses.iter().map(|found| InodeId { root: found.root, ino: found.ino }).collect();
            inodes.dedup();
            let mut paths = Vec::new();
            for id in inodes {
                paths.extend(fs.paths_of(id, PATHS_MAX)?);
                if paths.len() >= PATHS_MAX {
                    break;
                }
            }
            paths
        }
        Request::LogicalInodes { bytenr, whole_extent } => {
            let (inside, uses) = uses(context, bytenr, whole_extent)?;
            let offset = |one: &ExtentUse| if whole_extent { one.file_offset } else { one.offset_of(inside) };
            let of = |one: &ExtentUse| InodeUse { ino: one.ino.0, offset: offset(one), root: one.root.0 };
            return Ok(Response::Inodes(uses.iter().map(of).collect()));
        }
        Request::Inode { of, ino } => {
            fs.paths_of(InodeId { root: context.inode(of)?.root, ino: Ino(ino) }, PATHS_MAX)?
        }
        Request::Subvolume { id } => vec![fs.subvolume_info(RootId(id))?.path],
        Request::RootId { .. } => Vec::new(),
    };
    let shown = PathBytes(fs.path_of(fs.root())?);
    Ok(Response::Paths { paths: paths.into_iter().take(PATHS_MAX).map(PathBytes).collect(), shown })
}

/// The uses of the extent that contains an address, and the address's offset in the extent.
fn uses(context: &Context<'_>, bytenr: u64, whole_extent: bool) -> Result<(u64, Vec<ExtentUse>)> {
    let none = || Failure::new(Errno::NOENT, "no data extent contains this address");
    context.fs.uses_of_address(Logical(bytenr), whole_extent, PATHS_MAX)?.ok_or_else(none)
}

/// The largest number of paths or uses in an answer.
const PATHS_MAX: usize = 4096;
