//! [`SubvolumeWalk`]: the subvolumes below a subvolume, in pre-order or post-order.
//!
//! Root reads the tree of trees. For another user who walks from a subvolume that is named by its directory, each
//! subvolume on the way is opened, so that the kernel checks what the user may see. Subvolumes that cannot be reached are
//! skipped then.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::failure::{Result, UtilError};
use crate::info::UtilSubvolumeInfo;
use crate::ioctl::{self, ARGS_LEN, FS_INFO_LEN, put, text_at, u64_at};
use crate::place::OpenPlace;
use crate::search::{self, ChildSubvolume, next_after};
use crate::subvolume::{self, MAX_DEPTH};

/// When a subvolume is found: before or after the ones below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WalkOrder {
    Pre,
    Post,
}

/// A subvolume that a walk finds.
#[derive(Debug)]
pub(crate) struct FoundSubvolume {
    /// The path from the subvolume where the walk begins.
    pub(crate) path: Vec<u8>,
    pub(crate) id: u64,
    pub(crate) info: Option<UtilSubvolumeInfo>,
}

/// The walk. It uses an open file of the filesystem that the caller keeps.
#[derive(Debug)]
pub(crate) struct SubvolumeWalk {
    order: WalkOrder,
    /// Whether root walks.
    is_root_user: bool,
    /// The path of the last frame.
    path: Vec<u8>,
    /// From the subvolume where the walk begins down to where it is; empty at the end.
    frames: Vec<WalkFrame>,
}

/// A subvolume whose children the walk visits.
#[derive(Debug)]
struct WalkFrame {
    id: u64,
    /// The root directory, if it is not root who walks. The first frame has the caller's file in place of it.
    dir: Option<OwnedFd>,
    /// Length of the path of the subvolume's parent.
    above_len: usize,
    children: VecDeque<ChildSubvolume>,
    /// The smallest id that may follow the children; `None` if there are no more.
    from: Option<u64>,
}

impl WalkFrame {
    fn new(id: u64, dir: Option<OwnedFd>, above_len: usize) -> Self {
        Self { id, dir, above_len, children: VecDeque::new(), from: Some(0) }
    }
}

/// A child that the walk enters.
struct VisitedChild {
    id: u64,
    /// The path from its parent.
    path: Vec<u8>,
    opened: Option<OwnedFd>,
}

impl VisitedChild {
    /// Finds the path of a child, for root.
    fn unopened(place: OpenPlace<'_>, parent: u64, child: ChildSubvolume) -> Result<Self> {
        let mut path = subvolume::lookup(place, parent, child.dirid)?.1;
        path.extend(child.name);
        Ok(Self { id: child.id, path, opened: None })
    }
}

impl SubvolumeWalk {
    /// Begins a walk from the subvolume `top_or_0`, or from the one whose root directory is `place`.
    pub(crate) fn new(place: OpenPlace<'_>, top_or_0: u64, order: WalkOrder) -> Result<Self> {
        let is_root_user = top_or_0 != 0 || subvolume::is_root_user();
        let top = subvolume::id_or_own(place, top_or_0)?;
        Ok(Self { order, is_root_user, path: Vec::new(), frames: vec![WalkFrame::new(top, None, 0)] })
    }

    /// Finds the next subvolume; `None` after the last one.
    pub(crate) fn next(&mut self, place: OpenPlace<'_>, with_info: bool) -> Result<Option<FoundSubvolume>> {
        loop {
            let Some(frame) = self.frames.last_mut() else { return Ok(None) };
            let dir = frame.dir.as_ref().map_or(place, OpenPlace::of);
            if let Some(child) = frame.children.pop_front() {
                let entered = match self.is_root_user {
                    true => Some(VisitedChild::unopened(place, frame.id, child)?),
                    false => enter(dir, child)?,
                };
                let Some(VisitedChild { id, path, opened }) = entered else { continue };
                if self.frames.len() >= MAX_DEPTH {
                    return Err(subvolume::too_deep());
                }
                self.frames.push(WalkFrame::new(id, opened, self.path.len()));
                if !self.path.is_empty() {
                    self.path.push(b'/');
                }
                self.path.extend(path);
                if self.order == WalkOrder::Pre {
                    let path = self.path.clone();
                    return self.frames.last().map(|frame| found(place, frame, path, with_info)).transpose();
                }
            } else if let Some(from) = frame.from {
                let children = match self.is_root_user {
                    true => search::children(place, frame.id, from)?,
                    false => children_for_user(dir, from)?,
                };
                frame.from = children.last().map(|child| next_after(child.id)).transpose()?;
                frame.children = children.into();
            } else {
                let done = self.frames.pop();
                let Some(frame) = done.filter(|_| !self.frames.is_empty()) else { return Ok(None) };
                let path = self.path.clone();
                self.path.truncate(frame.above_len);
                if self.order == WalkOrder::Post {
                    return found(place, &frame, path, with_info).map(Some);
                }
            }
        }
    }
}

fn found(place: OpenPlace<'_>, frame: &WalkFrame, path: Vec<u8>, with_info: bool) -> Result<FoundSubvolume> {
    let info = match &frame.dir {
        _ if !with_info => None,
        Some(dir) => Some(subvolume::own_info(OpenPlace::of(dir))?),
        None => Some(subvolume::info(place, frame.id)?),
    };
    Ok(FoundSubvolume { path, id: frame.id, info })
}

/// Finds children of the subvolume whose root directory is `dir`, in order of id and from an id on.
fn children_for_user(dir: OpenPlace<'_>, from: u64) -> Result<Vec<ChildSubvolume>> {
    let mut args = [0; ARGS_LEN];
    put(&mut args, 0, from);
    match dir.call(ioctl::GET_SUBVOL_ROOTREF, &mut args) {
        // EOVERFLOW tells that there are more than the answer has room for.
        Ok(_) | Err(Errno::OVERFLOW) => {}
        Err(errno) => return Err(UtilError::GetSubvolRootrefFailed.with(errno)),
    }
    let count = usize::from(args[ROOT_REFS_COUNT]).min(ROOT_REFS);
    let child = |nr: usize| ChildSubvolume {
        id: u64_at(&args, 8 + 16 * nr),
        dirid: u64_at(&args, 16 + 16 * nr),
        name: Vec::new(),
    };
    let children: Vec<ChildSubvolume> = (0..count).map(child).collect();
    // The numbers rise, so that a walk ends.
    let rises = children.first().is_none_or(|first| first.id >= from) && children.is_sorted_by(|a, b| a.id < b.id);
    if rises { Ok(children) } else { Err(UtilError::GetSubvolRootrefFailed.with(Errno::IO)) }
}

/// Finds the path of a child, and opens it, for a user other than root; `None` if the user cannot reach it, or if something else is
/// mounted there.
fn enter(dir: OpenPlace<'_>, child: ChildSubvolume) -> Result<Option<VisitedChild>> {
    let mut args = [0; ARGS_LEN];
    put(&mut args, 0, child.dirid);
    put(&mut args, 8, child.id);
    match dir.call(ioctl::INO_LOOKUP_USER, &mut args) {
        Ok(_) => {}
        Err(Errno::ACCESS | Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(UtilError::InoLookupUserFailed.with(errno)),
    }
    let mut path = text_at(&args, USER_PATH, ARGS_LEN - USER_PATH).to_vec();
    path.extend(text_at(&args, 16, USER_PATH - 16));
    let opened = match dir.open(&path) {
        Ok(opened) => opened,
        Err(failure) if matches!(failure.errno, Errno::ACCESS | Errno::NOENT) => return Ok(None),
        Err(failure) => return Err(failure),
    };
    let there = OpenPlace::of(&opened);
    match there.check_subvolume() {
        Ok(()) => {}
        Err(failure) if matches!(failure.error, UtilError::NotBtrfs | UtilError::NotSubvolume) => return Ok(None),
        Err(failure) => return Err(failure),
    }
    let is_it = fsid(dir)? == fsid(there)? && subvolume::id(there)? == child.id;
    Ok(is_it.then_some(VisitedChild { id: child.id, path, opened: Some(opened) }))
}

fn fsid(place: OpenPlace<'_>) -> Result<[u8; 16]> {
    let mut args = [0; FS_INFO_LEN];
    place.call(ioctl::FS_INFO, &mut args).map_err(|errno| UtilError::FsInfoFailed.with(errno))?;
    Ok(args[16..].first_chunk().copied().unwrap_or_default())
}

/// Where the path begins in the argument of INO_LOOKUP_USER; the name begins at 16.
const USER_PATH: usize = 272;
/// Where the number of children is in the argument of GET_SUBVOL_ROOTREF, and its greatest value.
const ROOT_REFS_COUNT: usize = 4088;
const ROOT_REFS: usize = 255;
