//! The functions on subvolumes, for the btrfs of Linux and for mounts of ubtrfs.

use rustix::io::Errno;

use crate::failure::{Result, UtilError, UtilFailure};
use crate::info::UtilSubvolumeInfo;
use crate::ioctl::{self, ARGS_LEN, SUBVOL_RDONLY, put, text_at, u64_at};
use crate::place::OpenPlace;
use crate::search::{self, NameInParent};

/// Returns the id of the subvolume that holds a file.
pub(crate) fn id(place: OpenPlace<'_>) -> Result<u64> {
    lookup(place, 0, ROOT_DIR).map(|(tree, _)| tree)
}

/// Returns `id`, or the id of the subvolume whose root directory is `place` if `id` is 0.
pub(crate) fn id_or_own(place: OpenPlace<'_>, id_or_0: u64) -> Result<u64> {
    if id_or_0 != 0 {
        return Ok(id_or_0);
    }
    place.check_subvolume()?;
    id(place)
}

/// Returns the path of a subvolume from the top level.
pub(crate) fn path(place: OpenPlace<'_>, id_or_0: u64) -> Result<Vec<u8>> {
    let mut id = id_or_own(place, id_or_0)?;
    let mut path = Vec::new();
    for _ in 0..MAX_DEPTH {
        if id == TOP_LEVEL {
            return Ok(path);
        }
        let NameInParent { parent, dirid, name } = search::name_in_parent(place, id)?;
        let mut above = lookup(place, parent, dirid)?.1;
        above.extend(name);
        if !path.is_empty() {
            above.push(b'/');
            above.append(&mut path);
        }
        (path, id) = (above, parent);
    }
    Err(too_deep())
}

/// Describes a subvolume.
pub(crate) fn info(place: OpenPlace<'_>, id_or_0: u64) -> Result<UtilSubvolumeInfo> {
    let id = match id_or_0 {
        0 => {
            place.check_subvolume()?;
            if !is_root_user() {
                return own_info(place);
            }
            id(place)?
        }
        id => id,
    };
    search::info(place, id).map(|info| UtilSubvolumeInfo::from(&info))
}

/// Describes the subvolume that holds a file, which every user may read.
pub(crate) fn own_info(place: OpenPlace<'_>) -> Result<UtilSubvolumeInfo> {
    let mut args = [0; ioctl::SUBVOL_INFO_LEN];
    let failed = |errno| UtilError::GetSubvolInfoFailed.with(errno);
    place.call(ioctl::GET_SUBVOL_INFO, &mut args).map_err(failed)?;
    Ok(UtilSubvolumeInfo::of_ioctl(&args))
}

pub(crate) fn is_read_only(place: OpenPlace<'_>) -> Result<bool> {
    flags(place).map(|flags| flags & SUBVOL_RDONLY != 0)
}

pub(crate) fn set_read_only(place: OpenPlace<'_>, read_only: bool) -> Result<()> {
    let others = flags(place)? & !SUBVOL_RDONLY;
    let flags = others | if read_only { SUBVOL_RDONLY } else { 0 };
    let done = place.call(ioctl::SUBVOL_SETFLAGS, &mut flags.to_le_bytes());
    done.map(drop).map_err(|errno| UtilError::SubvolSetflagsFailed.with(errno))
}

fn flags(place: OpenPlace<'_>) -> Result<u64> {
    let mut flags = [0; 8];
    let done = place.call(ioctl::SUBVOL_GETFLAGS, &mut flags);
    done.map(|_| u64::from_le_bytes(flags)).map_err(|errno| UtilError::SubvolGetflagsFailed.with(errno))
}

pub(crate) fn set_default(place: OpenPlace<'_>, id_or_0: u64) -> Result<()> {
    let id = id_or_own(place, id_or_0)?;
    let done = place.call(ioctl::DEFAULT_SUBVOL, &mut id.to_le_bytes());
    done.map(drop).map_err(|errno| UtilError::DefaultSubvolFailed.with(errno))
}

/// Deletes the subvolume with this id. `place` is any file of the filesystem.
pub(crate) fn delete_by_id(place: OpenPlace<'_>, id: u64) -> Result<()> {
    let mut args = [0; ARGS_LEN];
    put(&mut args, 16, ioctl::SUBVOL_SPEC_BY_ID);
    put(&mut args, ioctl::NAME_V2.0, id);
    let done = place.call(ioctl::SNAP_DESTROY_V2, &mut args);
    done.map(drop).map_err(|errno| UtilError::SnapDestroyFailed.with(errno))
}

/// Finds the path of a directory from the root of its subvolume. The path ends in a slash unless it is empty. Tree 0 is
/// the subvolume of `place`. Returns the subvolume too.
pub(crate) fn lookup(place: OpenPlace<'_>, tree: u64, dirid: u64) -> Result<(u64, Vec<u8>)> {
    let mut args = [0; ARGS_LEN];
    put(&mut args, 0, tree);
    put(&mut args, 8, dirid);
    place.call(ioctl::INO_LOOKUP, &mut args).map_err(|errno| UtilError::InoLookupFailed.with(errno))?;
    Ok((u64_at(&args, 0), text_at(&args, 16, ARGS_LEN - 16).to_vec()))
}

/// Makes everything written so far durable.
pub(crate) fn sync(place: OpenPlace<'_>) -> Result<()> {
    flush(place);
    place.call(ioctl::SYNC, &mut []).map(drop).map_err(|errno| UtilError::SyncFailed.with(errno))
}

/// Starts a commit and returns its transaction.
pub(crate) fn start_sync(place: OpenPlace<'_>) -> Result<u64> {
    flush(place);
    let mut transid = [0; 8];
    let done = place.call(ioctl::START_SYNC, &mut transid);
    done.map(|_| u64::from_le_bytes(transid)).map_err(|errno| UtilError::StartSyncFailed.with(errno))
}

/// Waits until a transaction is durable; 0 is the running one.
pub(crate) fn wait_sync(place: OpenPlace<'_>, transid: u64) -> Result<()> {
    let done = place.call(ioctl::WAIT_SYNC, &mut transid.to_le_bytes());
    done.map(drop).map_err(|errno| UtilError::WaitSyncFailed.with(errno))
}

/// In a mount of ubtrfs, makes the kernel hand over what it has cached; Linux's btrfs sees that itself.
pub(crate) fn flush(place: OpenPlace<'_>) {
    if let Ok(fd) = place.fd()
        && place.is_ubtrfs()
    {
        // Writes that fail are reported to the programs that made them.
        let _ = rustix::fs::syncfs(fd);
    }
}

/// Whether the caller may read the tree of trees. Other users get the answers that concern their own files.
pub(crate) fn is_root_user() -> bool {
    rustix::process::geteuid().is_root()
}

/// More subvolumes are nested than any filesystem has, so the names form a circle.
pub(crate) fn too_deep() -> UtilFailure {
    UtilError::SearchFailed.with(Errno::LOOP)
}

/// `BTRFS_FS_TREE_OBJECTID`.
pub(crate) const TOP_LEVEL: u64 = 5;
const ROOT_DIR: u64 = 256;
/// The greatest depth of nested subvolumes.
pub(crate) const MAX_DEPTH: usize = 4096;
