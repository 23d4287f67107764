//! Attributes: owner, permissions, times, extended attributes

use std::ffi::{c_char, c_int, c_void};
use std::time::SystemTime;

use rustix::io::Errno;
use ubtrfs::{FileKind, FileTimes, Metadata, bindings};

use crate::border::{ErrorPlace, Given, GrowingStruct, Memory, OwnedAddress, ResultPlace, Text};
use crate::exports::file::check_mode;
use crate::exports::filesystem::{UbtrfsFs, check_flags};
use crate::failure::{CallFailure, CallResult, answer};
use crate::handles::Handle;
use crate::memory::{give_bytes, give_text};

/// The kind of file is invalid on disk.
pub const UBTRFS_KIND_INVALID: u32 = 0;
/// A FIFO.
pub const UBTRFS_KIND_FIFO: u32 = 1;
/// A character device.
pub const UBTRFS_KIND_CHAR_DEVICE: u32 = 2;
/// A directory, or a subvolume.
pub const UBTRFS_KIND_DIRECTORY: u32 = 4;
/// A block device.
pub const UBTRFS_KIND_BLOCK_DEVICE: u32 = 6;
/// A regular file.
pub const UBTRFS_KIND_FILE: u32 = 8;
/// A symbolic link.
pub const UBTRFS_KIND_SYMLINK: u32 = 10;
/// A socket.
pub const UBTRFS_KIND_SOCKET: u32 = 12;

/// A symbolic link at the end of the path is not followed.
pub const UBTRFS_NOFOLLOW: u32 = 1;

/// As a user or group: it stays.
pub const UBTRFS_UNCHANGED: u32 = 0xffff_ffff;

/// A time: seconds since 1970, negative before, plus nanoseconds.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsTime {
    /// The seconds.
    pub seconds: i64,
    /// The nanoseconds, below 1000000000.
    pub nanoseconds: u32,
    /// 1 if this is a time. 0 if the time on disk cannot be represented, or shall not change.
    pub is_set: u32,
}

/// The attributes of a file.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsMetadata {
    /// The inode number, which is unique in its subvolume only.
    pub ino: u64,
    /// The id of the file's subvolume.
    pub subvolume_id: u64,
    /// The size in bytes.
    pub size: u64,
    /// The space that the file occupies, in units of 512 bytes.
    pub blocks: u64,
    /// The permissions and the bits of the kind of file, as `st_mode` of stat(2).
    pub mode: u32,
    /// The kind of file: `UBTRFS_KIND_...`.
    pub kind: u32,
    /// The number of names; 1 for every directory.
    pub nlink: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The major number of a device file.
    pub device_major: u32,
    /// The minor number of a device file.
    pub device_minor: u32,
    /// Not used: 0.
    pub reserved: u32,
    /// The time of the last access.
    pub accessed: UbtrfsTime,
    /// The time of the last change of the content.
    pub modified: UbtrfsTime,
    /// The time of the last change of the attributes.
    pub changed: UbtrfsTime,
    /// The time of creation.
    pub created: UbtrfsTime,
    /// Not used: 0.
    pub more: [u64; 8],
}

/// Times to set. Begin with `UBTRFS_TIMES_INIT`. A time stays if its `is_set` is 0.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsTimes {
    /// The size of this struct.
    pub struct_size: usize,
    /// The time of the last access.
    pub accessed: UbtrfsTime,
    /// The time of the last change of the content.
    pub modified: UbtrfsTime,
    /// The time of creation, which Linux cannot change.
    pub created: UbtrfsTime,
}

// SAFETY: the struct is `repr(C)`, begins with its size, and consists of numbers.
unsafe impl GrowingStruct for UbtrfsTimes {
    const NAME: &'static str = "ubtrfs_times";
}

pub(crate) fn kind_of(kind: Option<FileKind>) -> u32 {
    match kind {
        None => UBTRFS_KIND_INVALID,
        Some(FileKind::Fifo) => UBTRFS_KIND_FIFO,
        Some(FileKind::CharDevice) => UBTRFS_KIND_CHAR_DEVICE,
        Some(FileKind::Dir) => UBTRFS_KIND_DIRECTORY,
        Some(FileKind::BlockDevice) => UBTRFS_KIND_BLOCK_DEVICE,
        Some(FileKind::File) => UBTRFS_KIND_FILE,
        Some(FileKind::Symlink) => UBTRFS_KIND_SYMLINK,
        Some(FileKind::Socket) => UBTRFS_KIND_SOCKET,
    }
}

pub(crate) fn time_of(time: Option<SystemTime>) -> UbtrfsTime {
    let Some(time) = time else { return UbtrfsTime { seconds: 0, nanoseconds: 0, is_set: 0 } };
    let (seconds, nanoseconds) = match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => (i128::from(after.as_secs()), after.subsec_nanos()),
        Err(before) => {
            let before = before.duration();
            match before.subsec_nanos() {
                0 => (-i128::from(before.as_secs()), 0),
                rest => (-i128::from(before.as_secs()) - 1, 1_000_000_000 - rest),
            }
        }
    };
    match i64::try_from(seconds) {
        Ok(seconds) => UbtrfsTime { seconds, nanoseconds, is_set: 1 },
        Err(_) => UbtrfsTime { seconds: 0, nanoseconds: 0, is_set: 0 },
    }
}

/// The time that a program gives; `None` if it shall stay.
fn given_time(time: UbtrfsTime) -> CallResult<Option<SystemTime>> {
    let UbtrfsTime { seconds, nanoseconds, is_set } = time;
    match is_set {
        0 => return Ok(None),
        1 if nanoseconds < 1_000_000_000 => {}
        _ => return Err(CallFailure::argument(format!("a time has {nanoseconds} nanoseconds and is_set {is_set}"))),
    }
    let time = bindings::system_time(seconds, nanoseconds);
    time.map(Some).ok_or_else(|| CallFailure::argument(format!("a time has {seconds} seconds")))
}

pub(crate) fn metadata_of(found: &Metadata) -> UbtrfsMetadata {
    let (device_major, device_minor) = found.device_number();
    UbtrfsMetadata {
        ino: found.ino(),
        subvolume_id: found.subvolume_id(),
        size: found.len(),
        blocks: found.blocks(),
        mode: found.mode(),
        kind: kind_of(found.kind()),
        nlink: found.nlink(),
        uid: found.uid(),
        gid: found.gid(),
        device_major,
        device_minor,
        reserved: 0,
        accessed: time_of(found.accessed()),
        modified: time_of(found.modified()),
        changed: time_of(found.changed()),
        created: time_of(found.created()),
        more: [0; 8],
    }
}

/// Writes the attributes that `look` returns, which is called only if there is a place for them.
pub(crate) fn put_metadata(
    place: ResultPlace<UbtrfsMetadata>,
    look: impl FnOnce() -> CallResult<Metadata>,
) -> CallResult<()> {
    place.needed("metadata")?;
    place.set(metadata_of(&look()?));
    Ok(())
}

/// Returns the attributes of a file. Symbolic links are followed.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_stat(
    fs: Handle<UbtrfsFs>,
    path: Text,
    metadata: ResultPlace<UbtrfsMetadata>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || put_metadata(metadata, || Ok(fs.get()?.metadata(path.path("path")?)?)))
}

/// Returns the attributes of a file. A symbolic link at the end of the path is not followed.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_lstat(
    fs: Handle<UbtrfsFs>,
    path: Text,
    metadata: ResultPlace<UbtrfsMetadata>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || put_metadata(metadata, || Ok(fs.get()?.symlink_metadata(path.path("path")?)?)))
}

/// Sets the permissions of a file: 12 bits. Symbolic links are followed.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_chmod(fs: Handle<UbtrfsFs>, path: Text, mode: u32, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.set_permissions(path.path("path")?, check_mode(mode)?)?))
}

/// Sets the owner and the group of a file. `UBTRFS_UNCHANGED` leaves one of them. `flags` is `UBTRFS_NOFOLLOW` or 0. As on
/// Linux, this can clear the set-user-id and set-group-id bits, so set permissions afterwards.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_chown(
    fs: Handle<UbtrfsFs>,
    path: Text,
    uid: u32,
    gid: u32,
    flags: u32,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        check_flags(flags, UBTRFS_NOFOLLOW, "flags")?;
        let (fs, path) = (fs.get()?, path.path("path")?);
        let changed = |id| (id != UBTRFS_UNCHANGED).then_some(id);
        match flags & UBTRFS_NOFOLLOW != 0 {
            true => fs.set_owner_nofollow(path, changed(uid), changed(gid))?,
            false => fs.set_owner(path, changed(uid), changed(gid))?,
        }
        Ok(())
    })
}

/// Sets times of a file. `flags` is `UBTRFS_NOFOLLOW` or 0.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_utimes(
    fs: Handle<UbtrfsFs>,
    path: Text,
    times: Given<UbtrfsTimes>,
    flags: u32,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        check_flags(flags, UBTRFS_NOFOLLOW, "flags")?;
        let given = times.read()?;
        let mut times = FileTimes::new();
        if let Some(time) = given_time(given.accessed)? {
            times = times.set_accessed(time);
        }
        if let Some(time) = given_time(given.modified)? {
            times = times.set_modified(time);
        }
        if let Some(time) = given_time(given.created)? {
            times = times.set_created(time);
        }
        let (fs, path) = (fs.get()?, path.path("path")?);
        match flags & UBTRFS_NOFOLLOW != 0 {
            true => fs.set_times_nofollow(path, times)?,
            false => fs.set_times(path, times)?,
        }
        Ok(())
    })
}

/// Returns the value of an extended attribute, such as "user.comment". Fails with ENODATA if it does not exist. A symbolic
/// link at the end of the path is not followed. Free `value` with `ubtrfs_free`. A zero byte follows the `len` bytes.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_getxattr(
    fs: Handle<UbtrfsFs>,
    path: Text,
    name: Text,
    value: ResultPlace<OwnedAddress<c_void>>,
    len: ResultPlace<usize>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        value.set(OwnedAddress::NULL);
        len.set(0);
        value.needed("the place for the value")?;
        len.needed("len")?;
        let found = fs.get()?.xattr(path.path("path")?, name.bytes("name")?)?;
        let found = found
            .ok_or_else(|| CallFailure::plain(Errno::NODATA, "the extended attribute does not exist".to_owned()))?;
        len.set(found.len());
        value.set(give_bytes(found));
        Ok(())
    })
}

/// Returns the names of all extended attributes. A zero byte ends each name, and `len` is the length of all names with
/// their zero bytes. A symbolic link at the end of the path is not followed. Free `names` with `ubtrfs_free`.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_listxattr(
    fs: Handle<UbtrfsFs>,
    path: Text,
    names: ResultPlace<OwnedAddress<c_char>>,
    len: ResultPlace<usize>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        names.set(OwnedAddress::NULL);
        len.set(0);
        names.needed("the place for the names")?;
        len.needed("len")?;
        let mut found = Vec::new();
        for name in fs.get()?.xattr_names(path.path("path")?)? {
            found.extend_from_slice(&name);
            found.push(0);
        }
        len.set(found.len());
        names.set(give_text(found));
        Ok(())
    })
}

/// Sets an extended attribute, or replaces its value. A symbolic link at the end of the path is not followed.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_setxattr(
    fs: Handle<UbtrfsFs>,
    path: Text,
    name: Text,
    value: Memory,
    len: usize,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        let value = value.bytes(len, "value")?;
        Ok(fs.get()?.set_xattr(path.path("path")?, name.bytes("name")?, value)?)
    })
}

/// Removes an extended attribute. Fails with ENODATA if it does not exist. A symbolic link at the end of the path is not
/// followed.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_removexattr(fs: Handle<UbtrfsFs>, path: Text, name: Text, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.remove_xattr(path.path("path")?, name.bytes("name")?)?))
}
