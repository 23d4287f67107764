//! Filesystems: making, opening, space, closing

use std::ffi::{c_char, c_int};

use ubtrfs::format::{CompatRo, Timespec};
use ubtrfs::{Caller, Filesystem, MkfsOptions, MountOptions, Uuid, bindings};

use crate::border::{ErrorPlace, Given, GrowingStruct, HandleList, OwnedAddress, ResultPlace, Text, TextList};
use crate::exports::device::{UbtrfsDevice, devices_of};
use crate::failure::{CallFailure, CallResult, answer, engine_failure};
use crate::handles::{Handle, HandleKind, HandleTable};
use crate::memory::give_text;

/// An open filesystem.
#[derive(Debug)]
pub enum UbtrfsFs {}

impl HandleKind for UbtrfsFs {
    type Object = Filesystem;
    const WHAT: &'static str = "the filesystem";
    fn table() -> &'static HandleTable<Filesystem> {
        static TABLE: HandleTable<Filesystem> = HandleTable::new();
        &TABLE
    }
}

/// Opens for reading only.
pub const UBTRFS_OPEN_READ_ONLY: u32 = 1;

/// How a filesystem is opened. Begin with `UBTRFS_OPEN_OPTIONS_INIT`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsOpenOptions {
    /// The size of this struct.
    pub struct_size: usize,
    /// `UBTRFS_OPEN_...`, or 0.
    pub flags: u32,
    /// The number of `devices`.
    pub nr_devices: u32,
    /// Mount options of btrfs, separated by commas, such as "compress=zstd:3,noatime"; or null.
    pub mount_options: Text,
    /// The subvolume to open, as a path from the top level; null for the default subvolume.
    pub subvolume: Text,
    /// More devices of the filesystem; or null. Devices beside the first one and in /dev are found without it.
    pub devices: TextList,
    /// Bytes of memory for caches and data that is not written yet; 0 for the usual amount.
    pub memory_bytes: u64,
}

// SAFETY: the struct is `repr(C)`, begins with its size, and consists of numbers and pointers.
unsafe impl GrowingStruct for UbtrfsOpenOptions {
    const NAME: &'static str = "ubtrfs_open_options";
}

impl Given<UbtrfsOpenOptions> {
    fn mount_options(&self) -> CallResult<MountOptions> {
        let given = self.read()?;
        check_flags(given.flags, UBTRFS_OPEN_READ_ONLY, "the flags of ubtrfs_open_options")?;
        let text = given.mount_options.str("mount_options")?.unwrap_or_default();
        let mut options = MountOptions::parse(text).map_err(|error| engine_failure("open", &error))?;
        options.read_only |= given.flags & UBTRFS_OPEN_READ_ONLY != 0;
        if let Some(name) = given.subvolume.optional() {
            options.subvol = Some(name.to_vec());
        }
        let devices = given.devices.paths(given.nr_devices as usize, "devices")?;
        options.devices.extend(devices.into_iter().map(ToOwned::to_owned));
        if given.memory_bytes != 0 {
            options.memory_bytes = given.memory_bytes;
        }
        Ok(options)
    }
}

/// Fails if a flag is unknown.
pub(crate) fn check_flags(flags: u32, known: u32, what: &str) -> CallResult<()> {
    if flags & !known == 0 {
        return Ok(());
    }
    Err(CallFailure::argument(format!("{what} have unknown bits: {:#x}", flags & !known)))
}

/// Overwrites what the devices contain.
pub const UBTRFS_MKFS_FORCE: u32 = 1;
/// Data and metadata share block groups, for small filesystems.
pub const UBTRFS_MKFS_MIXED: u32 = 2;
/// Puts the block group items into a tree of their own.
pub const UBTRFS_MKFS_BLOCK_GROUP_TREE: u32 = 4;
/// Does not discard the devices first.
pub const UBTRFS_MKFS_NO_DISCARD: u32 = 8;
/// Uses `seconds` and `nanoseconds` as the time of creation.
pub const UBTRFS_MKFS_TIME: u32 = 16;

/// Options of a new filesystem. Begin with `UBTRFS_MKFS_OPTIONS_INIT`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsMkfsOptions {
    /// The size of this struct.
    pub struct_size: usize,
    /// `UBTRFS_MKFS_...`, or 0.
    pub flags: u32,
    /// Bytes of a tree block; 0 for 16384.
    pub nodesize: u32,
    /// Bytes of a sector; 0 for 4096.
    pub sectorsize: u32,
    /// The owner of the root directory.
    pub root_uid: u32,
    /// The group of the root directory.
    pub root_gid: u32,
    /// The nanoseconds of the time of creation.
    pub nanoseconds: u32,
    /// The seconds of the time of creation since 1970.
    pub seconds: i64,
    /// The label, at most 255 bytes; or null.
    pub label: Text,
    /// The UUID, in the usual form with 36 characters; null for a random one.
    pub uuid: Text,
    /// The algorithm of checksums: "crc32c", "xxhash", "sha256" or "blake2"; null for "crc32c".
    pub csum: Text,
    /// The profile of data: "single", "dup", "raid0", "raid1", "raid1c3", "raid1c4" or "raid10"; null for the usual one.
    pub data_profile: Text,
    /// The profile of metadata; null for the usual one.
    pub metadata_profile: Text,
}

// SAFETY: the struct is `repr(C)`, begins with its size, and consists of numbers and pointers.
unsafe impl GrowingStruct for UbtrfsMkfsOptions {
    const NAME: &'static str = "ubtrfs_mkfs_options";
}

impl Given<UbtrfsMkfsOptions> {
    pub(crate) fn mkfs_options(&self, nr_devices: usize) -> CallResult<MkfsOptions> {
        const KNOWN: u32 = UBTRFS_MKFS_FORCE
            | UBTRFS_MKFS_MIXED
            | UBTRFS_MKFS_BLOCK_GROUP_TREE
            | UBTRFS_MKFS_NO_DISCARD
            | UBTRFS_MKFS_TIME;
        let given = self.read()?;
        check_flags(given.flags, KNOWN, "the flags of ubtrfs_mkfs_options")?;
        let has = |flag| given.flags & flag != 0;
        let mut options = MkfsOptions {
            label: given.label.optional().unwrap_or_default().to_vec(),
            mixed: has(UBTRFS_MKFS_MIXED),
            root_owner: (given.root_uid, given.root_gid),
            force: has(UBTRFS_MKFS_FORCE),
            discard: !has(UBTRFS_MKFS_NO_DISCARD),
            ..MkfsOptions::default()
        };
        if given.nodesize != 0 {
            options.nodesize = given.nodesize;
        }
        if given.sectorsize != 0 {
            options.sectorsize = given.sectorsize;
        }
        if let Some(name) = given.csum.str("csum")? {
            options.csum_type = bindings::csum_type(name).map_err(CallFailure::argument)?;
        }
        let (data, metadata) =
            (given.data_profile.str("data_profile")?, given.metadata_profile.str("metadata_profile")?);
        options = bindings::set_profiles(options, nr_devices, data, metadata).map_err(CallFailure::argument)?;
        if let Some(text) = given.uuid.str("uuid")? {
            options.fsid = Uuid::parse_str(text).map_err(|error| CallFailure::argument(format!("uuid: {error}")))?;
        }
        if has(UBTRFS_MKFS_BLOCK_GROUP_TREE) {
            options.compat_ro |= CompatRo::BLOCK_GROUP_TREE;
        }
        if has(UBTRFS_MKFS_TIME) {
            if given.nanoseconds >= 1_000_000_000 {
                return Err(CallFailure::argument(format!("{} nanoseconds are a second or more", given.nanoseconds)));
            }
            options.now = Timespec { sec: given.seconds, nsec: given.nanoseconds };
        }
        Ok(options)
    }
}

/// The space of a filesystem in bytes, as `df` shows it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsSpaceUsage {
    /// The size of the devices, divided by the number of copies of data.
    pub total_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
    /// Bytes that are available for data.
    pub available_bytes: u64,
}

/// Opens an image file, a block device, or an export of an NBD server. `options` may be null. Close the filesystem with
/// `ubtrfs_close`.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_open(
    path: Text,
    options: Given<UbtrfsOpenOptions>,
    fs: ResultPlace<Handle<UbtrfsFs>>,
    error: ErrorPlace,
) -> c_int {
    opened(fs, error, || Ok(Filesystem::open_image_with(path.path("path")?, options.mount_options()?)?))
}

/// Opens the filesystem on devices of the program: all devices of one filesystem. `options` may be null. The handles of
/// the devices may be closed afterwards. If all devices refuse writes, the filesystem is read-only.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_open_devices(
    devices: HandleList<UbtrfsDevice>,
    nr_devices: usize,
    options: Given<UbtrfsOpenOptions>,
    fs: ResultPlace<Handle<UbtrfsFs>>,
    error: ErrorPlace,
) -> c_int {
    opened(fs, error, || {
        let devices = devices_of(devices, nr_devices)?;
        Ok(Filesystem::open_devices(devices, options.mount_options()?)?)
    })
}

/// Makes a filesystem and opens it. With a size in bytes, `path` is the name of a new, sparse image file. With the size
/// 0, it names an existing image file or block device, whose content is lost if `UBTRFS_MKFS_FORCE` is set. The options
/// may be null. Close the filesystem with `ubtrfs_close`.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_make(
    path: Text,
    size: u64,
    options: Given<UbtrfsMkfsOptions>,
    open_options: Given<UbtrfsOpenOptions>,
    fs: ResultPlace<Handle<UbtrfsFs>>,
    error: ErrorPlace,
) -> c_int {
    opened(fs, error, || {
        let paths = [path.path("path")?];
        let (options, mount) = (options.mkfs_options(1)?, open_options.mount_options()?);
        Ok(Filesystem::make_images(&paths, (size != 0).then_some(size), &options, mount)?)
    })
}

/// Makes a filesystem in memory, which disappears when it is closed. `size` is in bytes. Memory is allocated as the
/// filesystem is written to.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_make_in_memory(size: u64, fs: ResultPlace<Handle<UbtrfsFs>>, error: ErrorPlace) -> c_int {
    opened(fs, error, || Ok(Filesystem::make_in_memory(size)?))
}

/// Makes a filesystem on devices of the program, without opening it. `options` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_make_devices(
    devices: HandleList<UbtrfsDevice>,
    nr_devices: usize,
    options: Given<UbtrfsMkfsOptions>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        let devices = devices_of(devices, nr_devices)?;
        let refs: Vec<_> = devices.iter().map(AsRef::as_ref).collect();
        Filesystem::make_on_devices(&refs, &options.mkfs_options(devices.len())?)?;
        Ok(())
    })
}

/// Makes another handle of the filesystem, whose new files belong to a user and a group. The bits of `umask` are removed
/// from their permissions. Close the handle with `ubtrfs_fs_release`.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_with_owner(
    fs: Handle<UbtrfsFs>,
    uid: u32,
    gid: u32,
    umask: u32,
    other: ResultPlace<Handle<UbtrfsFs>>,
    error: ErrorPlace,
) -> c_int {
    opened(other, error, || Ok(fs.get()?.with_caller(Caller { uid, gid, umask: umask & 0o777 })))
}

/// Makes all changes so far durable.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_sync(fs: Handle<UbtrfsFs>, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.sync()?))
}

/// Makes all changes durable, and closes the filesystem. The handle is closed also if the function fails. Then the devices
/// may lack the changes since the last commit. Later changes through other handles of the filesystem, and through its
/// open files, fail.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_close(fs: Handle<UbtrfsFs>, error: ErrorPlace) -> c_int {
    answer(error, || Ok(Filesystem::clone(&*fs.take()?).close()?))
}

/// Closes a handle of `ubtrfs_with_owner`. The filesystem stays open as long as it has another handle.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_fs_release(fs: Handle<UbtrfsFs>, error: ErrorPlace) -> c_int {
    answer(error, || fs.take().map(drop))
}

/// Returns the total, free and available space.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_usage(fs: Handle<UbtrfsFs>, usage: ResultPlace<UbtrfsSpaceUsage>, error: ErrorPlace) -> c_int {
    answer(error, || {
        usage.needed("usage")?;
        let found = fs.get()?.usage()?;
        usage.set(UbtrfsSpaceUsage {
            total_bytes: found.total_bytes,
            free_bytes: found.free_bytes,
            available_bytes: found.available_bytes,
        });
        Ok(())
    })
}

/// Returns the label, which is empty if the filesystem has none. Free it with `ubtrfs_free`.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_label(
    fs: Handle<UbtrfsFs>,
    label: ResultPlace<OwnedAddress<c_char>>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        label.set(OwnedAddress::NULL);
        label.needed("label")?;
        label.set(give_text(fs.get()?.label()));
        Ok(())
    })
}

/// Returns why the filesystem is read-only, or a null pointer if it is not. Free the text with `ubtrfs_free`.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_read_only_reason(
    fs: Handle<UbtrfsFs>,
    reason: ResultPlace<OwnedAddress<c_char>>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        reason.set(OwnedAddress::NULL);
        reason.needed("reason")?;
        let found = fs.get()?.read_only_reason();
        reason.set(found.map_or(OwnedAddress::NULL, |text| give_text(text.into_bytes())));
        Ok(())
    })
}

/// Begins a transaction: the changes until `ubtrfs_commit`, of all threads, become durable together. In it, `ubtrfs_sync`
/// and `ubtrfs_file_sync` fail, and so do new subvolumes, snapshots, and a second transaction. If the program ends before
/// the commit, the devices keep the state before the transaction.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_begin(fs: Handle<UbtrfsFs>, error: ErrorPlace) -> c_int {
    answer(error, || {
        let begun = fs.get()?.engine().begin_atomic();
        begun.map_err(|failure| engine_failure("begin a transaction", &failure))
    })
}

/// Ends the transaction. Its changes are durable on return. Fails with EINVAL if none runs.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_commit(fs: Handle<UbtrfsFs>, error: ErrorPlace) -> c_int {
    answer(error, || {
        let done = fs.get()?.engine().commit_atomic();
        done.map_err(|failure| engine_failure("commit a transaction", &failure))
    })
}

/// Gives up the changes of the transaction, of all threads. The filesystem cannot be changed afterwards: close it, which
/// fails, and open it again. If nothing was changed, it goes on. Fails with EINVAL if no transaction runs.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_abort(fs: Handle<UbtrfsFs>, error: ErrorPlace) -> c_int {
    answer(error, || {
        let given_up = fs.get()?.engine().abort_atomic("the program aborted a transaction".to_owned());
        given_up.map_err(|failure| engine_failure("abort a transaction", &failure))
    })
}

/// Opens a filesystem, and returns its handle.
fn opened(
    place: ResultPlace<Handle<UbtrfsFs>>,
    error: ErrorPlace,
    open: impl FnOnce() -> CallResult<Filesystem>,
) -> c_int {
    answer(error, || {
        place.set(Handle::NULL);
        place.needed("the place for the filesystem")?;
        place.set(Handle::add(open()?)?);
        Ok(())
    })
}
