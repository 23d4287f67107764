//! Commands that read trees: items, and the paths of inodes and subvolumes.
//!
//! | command                  | needs                                                                      |
//! |--------------------------|----------------------------------------------------------------------------|
//! | items                    | the rights of an administrator ([`CommandContext::require_admin`])         |
//! | path                     | the rights of an administrator; none for the root directory of a subvolume |
//! | children                 | only an open file of the subvolume                                         |
//! | name and path of a child | permission to read and search the directories on the path below file 0     |

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_format::{Generation, Ino, Key, KeyType, RootId};
use ubtrfs_fs::{Error, InodeId};

use crate::access::may_read_names;
use crate::execute::{CommandContext, FileNr};
use crate::failure::{CommandFailure, Result};

/// A command that reads trees.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Returns items of a tree in ascending order of their keys: [`Response::Items`].
    Items(SearchRange),
    /// Returns the path of an inode from its subvolume's root: [`Response::Path`].
    Path {
        /// The subvolume; `None` means the subvolume that holds file 0.
        tree: Option<u64>,
        /// The inode.
        inode: u64,
    },
    /// Returns the subvolumes whose names lie in the subvolume of a file, in order of id:
    /// [`Response::Children`].
    Children {
        /// Any file of the parent subvolume.
        of: FileNr,
        /// The first id.
        from: u64,
    },
    /// Returns the name and path of a subvolume below a directory: [`Response::Child`].
    Child {
        /// The directory.
        below: FileNr,
        /// The subvolume's id.
        subvolume: u64,
        /// The inode number of the directory that holds the subvolume's name.
        dirid: u64,
    },
}

/// The range of items to return, and its limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SearchRange {
    /// The tree; `None` means the subvolume that holds file 0.
    pub tree: Option<u64>,
    /// The first key: objectid, type, offset.
    pub min: (u64, u8, u64),
    /// The last key.
    pub max: (u64, u8, u64),
    /// The lowest and the highest generation of leaves to look at.
    pub generations: (u64, u64),
    /// The largest number of items to return.
    pub nr_items: u32,
    /// The largest number of bytes to return; each item counts with a header of 32 bytes.
    pub len_bytes: u32,
}

/// The result of a command that reads trees.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// The first items of the range, as many as fit the limits.
    Items(Vec<SearchItem>),
    /// The result of [`Request::Path`].
    Path {
        /// The subvolume's id.
        tree: u64,
        /// The path, without a slash at its start and end.
        #[serde(with = "crate::bytes")]
        path: Vec<u8>,
    },
    /// Ids of subvolumes, each with the inode number of the directory that holds its name.
    Children(Vec<(u64, u64)>),
    /// The result of [`Request::Child`].
    Child {
        /// The subvolume's name.
        #[serde(with = "crate::bytes")]
        name: Vec<u8>,
        /// The path of the directory that holds the name, without a slash at its start and end.
        #[serde(with = "crate::bytes")]
        path: Vec<u8>,
    },
}

/// An item.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SearchItem {
    /// The generation of the item's leaf.
    pub generation: u64,
    /// The key: objectid, type, offset.
    pub key: (u64, u8, u64),
    /// The item's bytes.
    #[serde(with = "crate::bytes::hex")]
    pub bytes: Vec<u8>,
}

pub(crate) fn execute(context: &CommandContext<'_>, request: Request) -> Result<Response> {
    match request {
        Request::Items(range) => items(context, &range).map(Response::Items),
        Request::Path { tree, inode } => path(context, tree, inode),
        Request::Children { of, from } => children(context, of, from).map(Response::Children),
        Request::Child { below, subvolume, dirid } => child(context, below, RootId(subvolume), Ino(dirid)),
    }
}

fn items(context: &CommandContext<'_>, range: &SearchRange) -> Result<Vec<SearchItem>> {
    context.require_admin()?;
    let tree = range.tree.map_or_else(|| context.inode(0).map(|id| id.root), |tree| Ok(RootId(tree)))?;
    let key = |(objectid, item_type, offset)| Key::new(objectid, KeyType(item_type), offset);
    let keys = key(range.min)..=key(range.max);
    let generations = Generation(range.generations.0)..=Generation(range.generations.1);
    let most = usize::try_from(range.nr_items).unwrap_or(usize::MAX).min(ITEMS_MAX);
    let mut room = usize::try_from(range.len_bytes).unwrap_or(usize::MAX).min(LEN_MAX);
    let (mut found, mut is_too_big) = (Vec::new(), false);
    context.fs.search_tree(tree, keys, generations, &mut |key, generation, bytes| {
        let len = bytes.len() + HEADER_LEN;
        if found.len() == most || len > room {
            is_too_big = found.is_empty() && most > 0;
            return false;
        }
        room -= len;
        let key = (key.objectid, key.item_type.0, key.offset);
        found.push(SearchItem { generation: generation.0, key, bytes: bytes.to_vec() });
        true
    })?;
    if is_too_big {
        return Err(CommandFailure::new(
            Errno::OVERFLOW,
            "the first item does not fit into the answer; request more bytes",
        ));
    }
    Ok(found)
}

fn path(context: &CommandContext<'_>, tree: Option<u64>, inode: u64) -> Result<Response> {
    let own = context.inode(0)?.root;
    let id = InodeId { root: tree.map_or(own, RootId), ino: Ino(inode) };
    if id == InodeId::root_of(id.root) {
        // As on Linux, the path of a subvolume's root directory is empty, and it is returned even if the subvolume does
        // not exist.
        return Ok(Response::Path { tree: id.root.0, path: Vec::new() });
    }
    context.require_admin()?;
    Ok(Response::Path { tree: id.root.0, path: context.fs.path_in_subvolume(id)? })
}

fn children(context: &CommandContext<'_>, of: FileNr, from: u64) -> Result<Vec<(u64, u64)>> {
    let parent = context.inode(of)?.root;
    let children = context.fs.children_of(parent, RootId(from), CHILDREN_MAX)?;
    Ok(children.into_iter().map(|(id, dirid)| (id.0, dirid.0)).collect())
}

fn child(context: &CommandContext<'_>, below: FileNr, subvolume: RootId, dirid: Ino) -> Result<Response> {
    let (fs, top) = (context.fs, context.inode(below)?);
    let info = fs.subvolume_info(subvolume)?;
    if info.parent != Some(top.root) || info.dirid != dirid {
        return Err(Error::NotFound.into());
    }
    // Climb from the directory that holds the name up to file 0. If the climb does not reach file 0, access is denied.
    let mut dir = InodeId { root: top.root, ino: dirid };
    let (mut names, mut len_bytes) = (Vec::new(), 0);
    while len_bytes <= PATH_BYTES_MAX {
        if dir == top {
            names.reverse();
            return Ok(Response::Child { name: info.name().to_vec(), path: names.join(&b'/') });
        }
        if dir == InodeId::root_of(dir.root) {
            break;
        }
        may_read_names(fs, context.caller, dir)?;
        let (above, name) = fs.first_name(dir)?;
        len_bytes = len_bytes.saturating_add(name.len()).saturating_add(1);
        names.push(name);
        dir = above;
    }
    Err(Error::AccessDenied.into())
}

/// Length of an item's header in the ioctl's answer.
const HEADER_LEN: usize = 32;
/// The largest number of items in an answer.
const ITEMS_MAX: usize = 100_000;
/// The largest number of bytes in an answer, which is more than the longest item. The answer takes a few times this
/// memory while it is sent. A client that wants more continues after the last item, as after a full answer of Linux.
const LEN_MAX: usize = 128 << 10;
/// The largest number of children in one answer: one more than the ioctl has room for.
const CHILDREN_MAX: usize = 256;
/// The greatest length of a path below file 0. Access to names with longer paths is denied. (Linux's longest path has
/// 4096 bytes.)
const PATH_BYTES_MAX: usize = 64 << 10;
