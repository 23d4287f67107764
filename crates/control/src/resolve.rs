//! Commands that find the paths of addresses, inodes and subvolumes.
//!
//! | command    | needs                                                              |
//! |------------|--------------------------------------------------------------------|
//! | root id    | nothing but the file                                               |
//! | all others | the rights of an administrator ([`CommandContext::require_admin`]) |

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_format::{Ino, Logical, RootId};
use ubtrfs_fs::{ExtentUse, InodeId};

use crate::execute::{CommandContext, FileNr};
use crate::failure::{CommandFailure, Result};

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
        /// The largest number of results; [`RESULTS_MAX`] if it is not given.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max: Option<u32>,
    },
    /// Returns all inodes that use the data at an address: [`Response::Inodes`].
    LogicalInodes {
        /// The address.
        bytenr: u64,
        /// As in [`Request::Logical`].
        whole_extent: bool,
        /// As in [`Request::Logical`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max: Option<u32>,
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
        /// Whether there may be more paths than the answer holds.
        #[serde(default)]
        is_cut: bool,
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

pub(crate) fn execute(context: &CommandContext<'_>, request: Request) -> Result<Response> {
    let fs = context.fs;
    if let Request::RootId { of } = request {
        return Ok(Response::Id(context.inode(of)?.root.0));
    }
    context.require_admin()?;
    let mut is_cut = false;
    let paths = match request {
        Request::Logical { bytenr, whole_extent, max } => {
            let max = limit(max);
            // One more than wanted shows whether there are more.
            let (_, uses) = uses(context, bytenr, whole_extent, max.saturating_add(1))?;
            let mut inodes: Vec<InodeId> =
                uses.iter().map(|found| InodeId { root: found.root, ino: found.ino }).collect();
            inodes.dedup();
            let (mut paths, mut len_bytes) = (Vec::new(), 0);
            is_cut = uses.len() > max;
            for id in inodes {
                let rest = PATHS_BYTES_MAX.saturating_sub(len_bytes);
                if rest == 0 || paths.len() == max {
                    is_cut = true;
                    break;
                }
                let (of_inode, has_more) = fs.paths_of(id, max.saturating_sub(paths.len()), rest)?;
                is_cut |= has_more;
                len_bytes += of_inode.iter().map(|path| path.len() + PATH_OVERHEAD).sum::<usize>();
                paths.extend(of_inode);
            }
            paths
        }
        Request::LogicalInodes { bytenr, whole_extent, max } => {
            let (inside, uses) = uses(context, bytenr, whole_extent, limit(max))?;
            let offset = |one: &ExtentUse| if whole_extent { one.file_offset } else { one.offset_of(inside) };
            let of = |one: &ExtentUse| InodeUse { ino: one.ino.0, offset: offset(one), root: one.root.0 };
            return Ok(Response::Inodes(uses.iter().map(of).collect()));
        }
        Request::Inode { of, ino } => {
            let id = InodeId { root: context.inode(of)?.root, ino: Ino(ino) };
            let (paths, has_more) = fs.paths_of(id, RESULTS_MAX, PATHS_BYTES_MAX)?;
            is_cut = has_more;
            paths
        }
        Request::Subvolume { id } => vec![fs.subvolume_info(RootId(id))?.path],
        Request::RootId { .. } => Vec::new(),
    };
    let shown = PathBytes(fs.path_of(context.host.root(fs))?);
    Ok(Response::Paths { paths: paths.into_iter().map(PathBytes).collect(), shown, is_cut })
}

/// The uses of the extent that contains an address, and the address's offset in the extent.
fn uses(context: &CommandContext<'_>, bytenr: u64, whole_extent: bool, max: usize) -> Result<(u64, Vec<ExtentUse>)> {
    let none = || CommandFailure::new(Errno::NOENT, "no data extent contains this address");
    context.fs.current_uses_of_address(Logical(bytenr), whole_extent, max)?.ok_or_else(none)
}

fn limit(max: Option<u32>) -> usize {
    max.map_or(RESULTS_MAX, |max| (max as usize).clamp(1, HIGHEST_MAX))
}

/// The number of uses of an extent in an answer, unless the request gives a number.
pub const RESULTS_MAX: usize = 4096;
/// A request can ask for at most this number of results. The largest buffer of btrfs-progs has room for so many.
const HIGHEST_MAX: usize = (16 << 20) / 24;
/// The bytes of paths after which an answer ends. The answer takes a few times this memory while it is sent.
const PATHS_BYTES_MAX: usize = 256 << 10;
/// Estimated bytes of a path in memory, besides its names.
const PATH_OVERHEAD: usize = 32;
