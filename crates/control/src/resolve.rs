//! Commands that lead from numbers back to paths.
//!
//! | command           | needs                                                          |
//! |-------------------|----------------------------------------------------------------|
//! | root id           | nothing but the file                                           |
//! | all others        | the rights of an administrator ([`Context::require_admin`])    |

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_format::{Ino, Logical, RootId};
use ubtrfs_fs::InodeId;

use crate::execute::{Context, FileNr};
use crate::failure::{Failure, Result};

/// A question about numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Paths of all files that use the data at an address: [`Response::Paths`].
    Logical {
        /// The address.
        bytenr: u64,
        /// All uses of the extent that holds it, not only of this byte.
        whole_extent: bool,
    },
    /// All paths of an inode: [`Response::Paths`].
    Inode {
        /// A file of the subvolume.
        of: FileNr,
        /// The inode number.
        ino: u64,
    },
    /// The path of a subvolume: [`Response::Paths`].
    Subvolume {
        /// Its id.
        id: u64,
    },
    /// The id of the subvolume that holds a file: [`Response::Id`].
    RootId {
        /// The file.
        of: FileNr,
    },
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// Paths from the top level, without a slash in front.
    Paths(Vec<PathBytes>),
    /// An id.
    Id(u64),
}

/// A path as it travels.
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
            let none = || Failure::new(Errno::NOENT, "no data extent holds this address");
            let uses = fs.uses_of_address(Logical(bytenr), whole_extent, MOST)?.ok_or_else(none)?;
            let mut inodes: Vec<InodeId> =
                uses.iter().map(|found| InodeId { root: found.root, ino: found.ino }).collect();
            inodes.dedup();
            let mut paths = Vec::new();
            for id in inodes {
                paths.extend(fs.paths_of(id, MOST)?);
                if paths.len() >= MOST {
                    break;
                }
            }
            paths
        }
        Request::Inode { of, ino } => fs.paths_of(InodeId { root: context.inode(of)?.root, ino: Ino(ino) }, MOST)?,
        Request::Subvolume { id } => vec![fs.subvolume_info(RootId(id))?.path],
        Request::RootId { .. } => Vec::new(),
    };
    Ok(Response::Paths(paths.into_iter().take(MOST).map(PathBytes).collect()))
}

/// Most paths of an answer.
const MOST: usize = 4096;
