//! Subvolumes and snapshots

use std::ffi::{c_char, c_int};
use std::os::unix::ffi::OsStrExt;

use ubtrfs::{SnapshotAccess, Subvolume};

use crate::border::{Address, ErrorPlace, OwnedAddress, ResultPlace, Text};
use crate::exports::attributes::{UbtrfsTime, time_of};
use crate::exports::filesystem::{UbtrfsFs, check_flags};
use crate::failure::answer;
use crate::handles::Handle;
use crate::memory::{KeptTexts, give_list};

/// A description of a subvolume.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsSubvolume {
    /// The path from the top level, without a leading slash; empty for the top level itself.
    pub path: Address<c_char>,
    /// The id of the subvolume; 5 for the top level.
    pub id: u64,
    /// The id of the subvolume that has this one's name; 0 for the top level.
    pub parent_id: u64,
    /// The generation of the last transaction that changed the subvolume.
    pub generation: u64,
    /// The time of creation.
    pub created: UbtrfsTime,
    /// The UUID; zeros if the subvolume has none.
    pub uuid: [u8; 16],
    /// The UUID of the source of a snapshot; zeros if the subvolume is no snapshot.
    pub parent_uuid: [u8; 16],
    /// The UUID that the stream of a received subvolume has; zeros if the subvolume was not received.
    pub received_uuid: [u8; 16],
    /// 1 if the subvolume is read-only, otherwise 0.
    pub is_read_only: u32,
    /// Not used: 0.
    pub reserved: u32,
    /// Not used: 0.
    pub more: [u64; 4],
}

/// The snapshot cannot be changed.
pub const UBTRFS_SNAPSHOT_READ_ONLY: u32 = 1;

/// Makes an empty subvolume. It is durable on return.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_subvolume_create(fs: Handle<UbtrfsFs>, path: Text, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.create_subvolume(path.path("path")?)?))
}

/// Makes a snapshot at `path` of the subvolume at `source`. It is durable on return. `flags` is
/// `UBTRFS_SNAPSHOT_READ_ONLY` or 0.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_snapshot(
    fs: Handle<UbtrfsFs>,
    source: Text,
    path: Text,
    flags: u32,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        check_flags(flags, UBTRFS_SNAPSHOT_READ_ONLY, "flags")?;
        let access = match flags & UBTRFS_SNAPSHOT_READ_ONLY != 0 {
            true => SnapshotAccess::ReadOnly,
            false => SnapshotAccess::ReadWrite,
        };
        Ok(fs.get()?.snapshot(source.path("source")?, path.path("path")?, access)?)
    })
}

/// Deletes a subvolume with its content. The name is gone on return; the space is freed in the background.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_subvolume_delete(fs: Handle<UbtrfsFs>, path: Text, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.delete_subvolume(path.path("path")?)?))
}

/// Makes a subvolume read-only if `read_only` is not 0, otherwise writable. The change is durable on return.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_subvolume_set_read_only(
    fs: Handle<UbtrfsFs>,
    path: Text,
    read_only: c_int,
    error: ErrorPlace,
) -> c_int {
    answer(error, || Ok(fs.get()?.set_subvolume_read_only(path.path("path")?, read_only != 0)?))
}

/// Describes the subvolume at a path. Free `subvolume` with `ubtrfs_free`, which also frees its path.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_subvolume_info(
    fs: Handle<UbtrfsFs>,
    path: Text,
    subvolume: ResultPlace<OwnedAddress<UbtrfsSubvolume>>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        subvolume.set(OwnedAddress::NULL);
        subvolume.needed("the place for the subvolume")?;
        let found = fs.get()?.subvolume(path.path("path")?)?;
        subvolume.set(shown(&[found]));
        Ok(())
    })
}

/// Describes all subvolumes of the filesystem in the order of their ids, also the top level. Free the array `subvolumes`
/// with `ubtrfs_free`, which also frees its paths.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_subvolume_list(
    fs: Handle<UbtrfsFs>,
    subvolumes: ResultPlace<OwnedAddress<UbtrfsSubvolume>>,
    nr_subvolumes: ResultPlace<usize>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        subvolumes.set(OwnedAddress::NULL);
        nr_subvolumes.set(0);
        subvolumes.needed("the place for the subvolumes")?;
        nr_subvolumes.needed("nr_subvolumes")?;
        let found = fs.get()?.subvolumes()?;
        nr_subvolumes.set(found.len());
        subvolumes.set(shown(&found));
        Ok(())
    })
}

/// Returns the id of the subvolume that is opened if none is named.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_subvolume_default(fs: Handle<UbtrfsFs>, id: ResultPlace<u64>, error: ErrorPlace) -> c_int {
    answer(error, || {
        id.needed("id")?;
        id.set(fs.get()?.default_subvolume()?);
        Ok(())
    })
}

/// Sets the subvolume that is opened if none is named.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_subvolume_set_default(fs: Handle<UbtrfsFs>, path: Text, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.set_default_subvolume(path.path("path")?)?))
}

fn shown(found: &[Subvolume]) -> OwnedAddress<UbtrfsSubvolume> {
    let mut texts = KeptTexts::default();
    let one = |subvolume: &Subvolume| UbtrfsSubvolume {
        path: texts.keep(subvolume.path().as_os_str().as_bytes()),
        id: subvolume.id(),
        parent_id: subvolume.parent_id().unwrap_or(0),
        generation: subvolume.generation(),
        created: time_of(subvolume.created()),
        uuid: subvolume.uuid().into_bytes(),
        parent_uuid: subvolume.parent_uuid().unwrap_or_default().into_bytes(),
        received_uuid: subvolume.received_uuid().unwrap_or_default().into_bytes(),
        is_read_only: subvolume.is_read_only().into(),
        reserved: 0,
        more: [0; 4],
    };
    let list = found.iter().map(one).collect();
    give_list(list, texts)
}
