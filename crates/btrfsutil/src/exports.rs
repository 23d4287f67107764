//! The functions that C programs call. They only convert arguments and results; the other modules do the work.
//!
//! - E1. A null pointer fails with EINVAL where a value is needed. The original crashes.
//! - E2. A result is written only if the function succeeds. `errno` is set only if it fails.
//! - E3. Memory that the caller frees comes from `malloc`.
//! - E4. No panic leaves the library.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use rustix::io::Errno;

use crate::edit::{self, SnapshotKind};
use crate::failure::{Result, UtilError, UtilFailure};
use crate::info::UtilSubvolumeInfo;
use crate::iterator::{FoundSubvolume, SubvolumeWalk, WalkOrder};
use crate::path::split;
use crate::place::{self, OpenPlace};
use crate::qgroup::QgroupsToJoin;
use crate::{search, subvolume};

/// The opaque `struct btrfs_util_subvolume_iterator` of C programs.
#[derive(Debug)]
pub(crate) struct UtilIterator {
    walk: SubvolumeWalk,
    fd: c_int,
    /// The file of `fd`, if this library opened it.
    _own: Option<OwnedFd>,
}

/// Defines functions that return `enum btrfs_util_error`. After `=` stands a newer name of the same function.
macro_rules! functions {
    ($(fn $name:ident $(= $alias:ident)? ($($args:tt)*) $body:block)*) => {
        $(functions!(@one $name ($($args)*) $body [$($alias)?]);)*
    };
    (@one $name:ident ($($arg:ident: $type:ty),*) $body:block []) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $type),*) -> u32 {
            answer(|| $body)
        }
    };
    (@one $name:ident ($($arg:ident: $type:ty),*) $body:block [$alias:ident]) => {
        functions!(@one $name ($($arg: $type),*) $body []);

        #[unsafe(no_mangle)]
        unsafe extern "C" fn $alias($($arg: $type),*) -> u32 {
            // SAFETY: the caller keeps the rules of the function with the older name.
            unsafe { $name($($arg),*) }
        }
    };
}

/// Runs a function, sets `errno` if it fails, and returns its number (E2, E4).
fn answer(function: impl FnOnce() -> Result<()>) -> u32 {
    let panicked = |_| Err(UtilError::InvalidArgument.with(Errno::IO));
    match catch_unwind(AssertUnwindSafe(function)).unwrap_or_else(panicked) {
        Ok(()) => 0,
        Err(UtilFailure { error: UtilError::StopIteration, .. }) => UtilError::StopIteration as u32,
        Err(UtilFailure { error, errno }) => {
            // SAFETY: the address is that of this thread's errno.
            unsafe { *libc::__errno_location() = errno.raw_os_error() };
            error as u32
        }
    }
}

/// The text at an address.
///
/// # Safety
/// The address is null or that of a text that ends in a zero byte and lives long enough.
unsafe fn text<'a>(address: *const c_char) -> Result<&'a CStr> {
    if address.is_null() {
        return Err(UtilFailure::invalid());
    }
    // SAFETY: the caller keeps the rule above.
    Ok(unsafe { CStr::from_ptr(address) })
}

/// The place of a descriptor.
///
/// # Safety
/// Nobody closes the descriptor during the call.
unsafe fn place<'a>(fd: c_int) -> OpenPlace<'a> {
    // SAFETY: the number is not -1. A number that is not open only makes system calls fail.
    OpenPlace::new((fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) }))
}

/// Writes a result to an address that must not be null (E1).
///
/// # Safety
/// The address is null or that of memory for a `T`.
unsafe fn put<T>(address: *mut T, value: T) -> Result<()> {
    if address.is_null() {
        return Err(UtilFailure::invalid());
    }
    // SAFETY: the caller keeps the rule above.
    unsafe { address.write(value) };
    Ok(())
}

/// Copies bytes to memory of `malloc` (E3), with `zeros` bytes of 0 after them.
fn allocated(bytes: &[u8], zeros: usize) -> Result<*mut c_void> {
    // SAFETY: malloc has no rules. An address that it returns has room for the length, and the bytes do not overlap it.
    unsafe {
        let address = libc::malloc(bytes.len() + zeros);
        if address.is_null() {
            return Err(UtilError::NoMemory.with(Errno::NOMEM));
        }
        ptr::copy_nonoverlapping(bytes.as_ptr(), address.cast::<u8>(), bytes.len());
        ptr::write_bytes(address.cast::<u8>().add(bytes.len()), 0, zeros);
        Ok(address)
    }
}

/// Writes the address of a copy of a text.
///
/// # Safety
/// As [`put`].
unsafe fn put_text(address: *mut *mut c_char, bytes: &[u8]) -> Result<()> {
    if address.is_null() {
        return Err(UtilFailure::invalid());
    }
    // SAFETY: the caller keeps the rule of `put`.
    unsafe { put(address, allocated(bytes, 1)?.cast::<c_char>()) }
}

/// The quota groups at an address, or none.
///
/// # Safety
/// The address is null or comes from `btrfs_util_create_qgroup_inherit`.
unsafe fn qgroups<'a>(address: *const QgroupsToJoin) -> Option<&'a QgroupsToJoin> {
    // SAFETY: the caller keeps the rule above.
    unsafe { address.as_ref() }
}

/// Does work on the file at a path of the caller.
///
/// # Safety
/// As [`text`].
unsafe fn at<T>(path: *const c_char, work: impl FnOnce(OpenPlace<'_>) -> Result<T>) -> Result<T> {
    // SAFETY: the caller keeps the rule of `text`.
    let fd = place::open(unsafe { text(path) }?)?;
    work(OpenPlace::of(&fd))
}

/// Does work on the directory and the name of a path of the caller.
///
/// # Safety
/// As [`text`].
unsafe fn in_dir(path: *const c_char, work: impl FnOnce(OpenPlace<'_>, &[u8]) -> Result<()>) -> Result<()> {
    // SAFETY: the caller keeps the rule of `text`.
    let (dir, name) = split(unsafe { text(path) }?.to_bytes());
    let dir = place::open_dir(dir)?;
    work(OpenPlace::of(&dir), name)
}

// SAFETY of all functions below: a C program keeps the rules of the original header. A path is null or a text that ends
// in a zero byte; an address of a result is null or has room for it; an open descriptor stays open during the call; an
// iterator or a list of quota groups comes from the function that creates it and is not used by two threads at once.

/// Returns the text of a number, or null.
#[unsafe(no_mangle)]
extern "C" fn btrfs_util_strerror(error: u32) -> *const c_char {
    UtilError::text(error).map_or(ptr::null(), CStr::as_ptr)
}

functions! {
    fn btrfs_util_sync = btrfs_util_fs_sync(path: *const c_char) {
        // SAFETY: see above.
        unsafe { at(path, subvolume::sync) }
    }

    fn btrfs_util_sync_fd = btrfs_util_fs_sync_fd(fd: c_int) {
        // SAFETY: see above.
        subvolume::sync(unsafe { place(fd) })
    }

    fn btrfs_util_start_sync = btrfs_util_fs_start_sync(path: *const c_char, transid: *mut u64) {
        // SAFETY: see above.
        unsafe { at(path, |place| put_optional(transid, subvolume::start_sync(place)?)) }
    }

    fn btrfs_util_start_sync_fd = btrfs_util_fs_start_sync_fd(fd: c_int, transid: *mut u64) {
        // SAFETY: see above.
        unsafe { put_optional(transid, subvolume::start_sync(place(fd))?) }
    }

    fn btrfs_util_wait_sync = btrfs_util_fs_wait_sync(path: *const c_char, transid: u64) {
        // SAFETY: see above.
        unsafe { at(path, |place| subvolume::wait_sync(place, transid)) }
    }

    fn btrfs_util_wait_sync_fd = btrfs_util_fs_wait_sync_fd(fd: c_int, transid: u64) {
        // SAFETY: see above.
        subvolume::wait_sync(unsafe { place(fd) }, transid)
    }

    fn btrfs_util_is_subvolume = btrfs_util_subvolume_is_valid(path: *const c_char) {
        // SAFETY: see above.
        place::check_subvolume_path(unsafe { text(path) }?)
    }

    fn btrfs_util_is_subvolume_fd = btrfs_util_subvolume_is_valid_fd(fd: c_int) {
        // SAFETY: see above.
        unsafe { place(fd) }.check_subvolume()
    }

    fn btrfs_util_subvolume_id = btrfs_util_subvolume_get_id(path: *const c_char, id: *mut u64) {
        // SAFETY: see above.
        unsafe { at(path, |place| put(id, subvolume::id(place)?)) }
    }

    fn btrfs_util_subvolume_id_fd = btrfs_util_subvolume_get_id_fd(fd: c_int, id: *mut u64) {
        // SAFETY: see above.
        unsafe { put(id, subvolume::id(place(fd))?) }
    }

    fn btrfs_util_subvolume_path = btrfs_util_subvolume_get_path(
        path: *const c_char, id: u64, found: *mut *mut c_char
    ) {
        // SAFETY: see above.
        unsafe { at(path, |place| put_text(found, &subvolume::path(place, id)?)) }
    }

    fn btrfs_util_subvolume_path_fd = btrfs_util_subvolume_get_path_fd(
        fd: c_int, id: u64, found: *mut *mut c_char
    ) {
        // SAFETY: see above.
        unsafe { put_text(found, &subvolume::path(place(fd), id)?) }
    }

    fn btrfs_util_subvolume_info = btrfs_util_subvolume_get_info(
        path: *const c_char, id: u64, info: *mut UtilSubvolumeInfo
    ) {
        // SAFETY: see above.
        unsafe { at(path, |place| put_optional(info, subvolume::info(place, id)?)) }
    }

    fn btrfs_util_subvolume_info_fd = btrfs_util_subvolume_get_info_fd(
        fd: c_int, id: u64, info: *mut UtilSubvolumeInfo
    ) {
        // SAFETY: see above.
        unsafe { put_optional(info, subvolume::info(place(fd), id)?) }
    }

    fn btrfs_util_get_subvolume_read_only = btrfs_util_subvolume_get_read_only(
        path: *const c_char, read_only: *mut bool
    ) {
        // SAFETY: see above.
        unsafe { at(path, |place| put(read_only, subvolume::is_read_only(place)?)) }
    }

    fn btrfs_util_get_subvolume_read_only_fd = btrfs_util_subvolume_get_read_only_fd(
        fd: c_int, read_only: *mut bool
    ) {
        // SAFETY: see above.
        unsafe { put(read_only, subvolume::is_read_only(place(fd))?) }
    }

    fn btrfs_util_set_subvolume_read_only = btrfs_util_subvolume_set_read_only(
        path: *const c_char, read_only: bool
    ) {
        // SAFETY: see above.
        unsafe { at(path, |place| subvolume::set_read_only(place, read_only)) }
    }

    fn btrfs_util_set_subvolume_read_only_fd = btrfs_util_subvolume_set_read_only_fd(fd: c_int, read_only: bool) {
        // SAFETY: see above.
        subvolume::set_read_only(unsafe { place(fd) }, read_only)
    }

    fn btrfs_util_get_default_subvolume = btrfs_util_subvolume_get_default(path: *const c_char, id: *mut u64) {
        // SAFETY: see above.
        unsafe { at(path, |place| put(id, search::default_subvolume(place)?)) }
    }

    fn btrfs_util_get_default_subvolume_fd = btrfs_util_subvolume_get_default_fd(fd: c_int, id: *mut u64) {
        // SAFETY: see above.
        unsafe { put(id, search::default_subvolume(place(fd))?) }
    }

    fn btrfs_util_set_default_subvolume = btrfs_util_subvolume_set_default(path: *const c_char, id: u64) {
        // SAFETY: see above.
        unsafe { at(path, |place| subvolume::set_default(place, id)) }
    }

    fn btrfs_util_set_default_subvolume_fd = btrfs_util_subvolume_set_default_fd(fd: c_int, id: u64) {
        // SAFETY: see above.
        subvolume::set_default(unsafe { place(fd) }, id)
    }

    fn btrfs_util_create_subvolume = btrfs_util_subvolume_create(
        path: *const c_char, flags: c_int, _unused: *mut u64, inherit: *mut QgroupsToJoin
    ) {
        // SAFETY: see above.
        unsafe { in_dir(path, |dir, name| create(dir, name, flags, qgroups(inherit))) }
    }

    fn btrfs_util_create_subvolume_fd = btrfs_util_subvolume_create_fd(
        dir: c_int, name: *const c_char, flags: c_int, _unused: *mut u64, inherit: *mut QgroupsToJoin
    ) {
        // SAFETY: see above.
        unsafe { create(place(dir), text(name)?.to_bytes(), flags, qgroups(inherit)) }
    }

    fn btrfs_util_create_snapshot = btrfs_util_subvolume_snapshot(
        source: *const c_char, path: *const c_char, flags: c_int, _unused: *mut u64, inherit: *mut QgroupsToJoin
    ) {
        let snapshot = |source: OpenPlace<'_>| {
            // SAFETY: see above.
            unsafe { in_dir(path, |dir, name| snapshot(source, dir, name, flags, qgroups(inherit))) }
        };
        // SAFETY: see above.
        unsafe { at(source, snapshot) }
    }

    fn btrfs_util_create_snapshot_fd = btrfs_util_subvolume_snapshot_fd(
        source: c_int, path: *const c_char, flags: c_int, _unused: *mut u64, inherit: *mut QgroupsToJoin
    ) {
        // SAFETY: see above.
        unsafe { in_dir(path, |dir, name| snapshot(place(source), dir, name, flags, qgroups(inherit))) }
    }

    fn btrfs_util_create_snapshot_fd2 = btrfs_util_subvolume_snapshot_fd2(
        source: c_int, dir: c_int, name: *const c_char, flags: c_int, _unused: *mut u64, inherit: *mut QgroupsToJoin
    ) {
        // SAFETY: see above.
        unsafe { snapshot(place(source), place(dir), text(name)?.to_bytes(), flags, qgroups(inherit)) }
    }

    fn btrfs_util_delete_subvolume = btrfs_util_subvolume_delete(path: *const c_char, flags: c_int) {
        // SAFETY: see above.
        unsafe { in_dir(path, |dir, name| delete(dir, name, flags)) }
    }

    fn btrfs_util_delete_subvolume_fd = btrfs_util_subvolume_delete_fd(
        dir: c_int, name: *const c_char, flags: c_int
    ) {
        // SAFETY: see above.
        unsafe { delete(place(dir), text(name)?.to_bytes(), flags) }
    }

    fn btrfs_util_delete_subvolume_by_id_fd = btrfs_util_subvolume_delete_by_id_fd(fd: c_int, id: u64) {
        // SAFETY: see above.
        subvolume::delete_by_id(unsafe { place(fd) }, id)
    }

    fn btrfs_util_create_subvolume_iterator = btrfs_util_subvolume_iter_create(
        path: *const c_char, top: u64, flags: c_int, iterator: *mut *mut UtilIterator
    ) {
        // SAFETY: see above.
        let file = place::open(unsafe { text(path) }?)?;
        let walk = SubvolumeWalk::new(OpenPlace::of(&file), top, order(flags)?)?;
        let fd = file.as_raw_fd();
        // SAFETY: see above.
        unsafe { put_iterator(iterator, UtilIterator { walk, fd, _own: Some(file) }) }
    }

    fn btrfs_util_create_subvolume_iterator_fd = btrfs_util_subvolume_iter_create_fd(
        fd: c_int, top: u64, flags: c_int, iterator: *mut *mut UtilIterator
    ) {
        let order = order(flags)?;
        // SAFETY: see above.
        let walk = SubvolumeWalk::new(unsafe { place(fd) }, top, order)?;
        // SAFETY: see above.
        unsafe { put_iterator(iterator, UtilIterator { walk, fd, _own: None }) }
    }

    fn btrfs_util_subvolume_iterator_next = btrfs_util_subvolume_iter_next(
        iterator: *mut UtilIterator, path: *mut *mut c_char, id: *mut u64
    ) {
        // SAFETY: see above.
        unsafe {
            let found = next(iterator, false)?;
            put_path(path, &found)?;
            put_optional(id, found.id)
        }
    }

    fn btrfs_util_subvolume_iterator_next_info = btrfs_util_subvolume_iter_next_info(
        iterator: *mut UtilIterator, path: *mut *mut c_char, info: *mut UtilSubvolumeInfo
    ) {
        // SAFETY: see above.
        unsafe {
            let found = next(iterator, true)?;
            put_path(path, &found)?;
            found.info.map_or(Ok(()), |value| put_optional(info, value))
        }
    }

    fn btrfs_util_deleted_subvolumes = btrfs_util_subvolume_list_deleted(
        path: *const c_char, ids: *mut *mut u64, count: *mut usize
    ) {
        // SAFETY: see above.
        unsafe { at(path, |place| put_deleted(place, ids, count)) }
    }

    fn btrfs_util_deleted_subvolumes_fd = btrfs_util_subvolume_list_deleted_fd(
        fd: c_int, ids: *mut *mut u64, count: *mut usize
    ) {
        // SAFETY: see above.
        unsafe { put_deleted(place(fd), ids, count) }
    }

    fn btrfs_util_create_qgroup_inherit = btrfs_util_qgroup_inherit_create(
        flags: c_int, inherit: *mut *mut QgroupsToJoin
    ) {
        if flags != 0 || inherit.is_null() {
            return Err(UtilFailure::invalid());
        }
        // SAFETY: see above.
        unsafe { put(inherit, Box::into_raw(Box::default())) }
    }

    fn btrfs_util_qgroup_inherit_add_group(inherit: *mut *mut QgroupsToJoin, qgroupid: u64) {
        // SAFETY: see above.
        let inherit = unsafe { inherit.as_ref().and_then(|inherit| inherit.as_mut()) };
        inherit.ok_or_else(UtilFailure::invalid)?.groups.push(qgroupid);
        Ok(())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn btrfs_util_destroy_subvolume_iterator(iterator: *mut UtilIterator) {
    if !iterator.is_null() {
        // SAFETY: the address comes from `put_iterator`, and the caller does not use it again.
        drop(unsafe { Box::from_raw(iterator) });
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn btrfs_util_subvolume_iter_destroy(iterator: *mut UtilIterator) {
    // SAFETY: the caller keeps the rules of the function with the older name.
    unsafe { btrfs_util_destroy_subvolume_iterator(iterator) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn btrfs_util_subvolume_iterator_fd(iterator: *const UtilIterator) -> c_int {
    // SAFETY: see above.
    unsafe { iterator.as_ref() }.map_or(-1, |iterator| iterator.fd)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn btrfs_util_subvolume_iterator_get_fd(iterator: *const UtilIterator) -> c_int {
    // SAFETY: the caller keeps the rules of the function with the older name.
    unsafe { btrfs_util_subvolume_iterator_fd(iterator) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn btrfs_util_destroy_qgroup_inherit(inherit: *mut QgroupsToJoin) {
    if !inherit.is_null() {
        // SAFETY: the address comes from `btrfs_util_create_qgroup_inherit`, and the caller does not use it again.
        drop(unsafe { Box::from_raw(inherit) });
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn btrfs_util_qgroup_inherit_destroy(inherit: *mut QgroupsToJoin) {
    // SAFETY: the caller keeps the rules of the function with the older name.
    unsafe { btrfs_util_destroy_qgroup_inherit(inherit) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn btrfs_util_qgroup_inherit_get_groups(
    inherit: *const QgroupsToJoin,
    groups: *mut *const u64,
    count: *mut usize,
) {
    // SAFETY: see above.
    let found = unsafe { qgroups(inherit) }.map_or(&[][..], |inherit| &inherit.groups);
    // SAFETY: see above. A null pointer fails, and there is nobody to tell.
    let _ = unsafe { put(groups, found.as_ptr()).and_then(|()| put(count, found.len())) };
}

/// Writes a result to an address; null if the caller does not want it.
///
/// # Safety
/// As [`put`].
unsafe fn put_optional<T>(address: *mut T, value: T) -> Result<()> {
    if address.is_null() {
        return Ok(());
    }
    // SAFETY: the caller keeps the rule of `put`.
    unsafe { put(address, value) }
}

/// # Safety
/// As [`put`].
unsafe fn put_path(address: *mut *mut c_char, found: &FoundSubvolume) -> Result<()> {
    if address.is_null() {
        return Ok(());
    }
    // SAFETY: the caller keeps the rule of `put`.
    unsafe { put_text(address, &found.path) }
}

/// # Safety
/// As [`put`].
unsafe fn put_iterator(address: *mut *mut UtilIterator, iterator: UtilIterator) -> Result<()> {
    if address.is_null() {
        return Err(UtilFailure::invalid());
    }
    // SAFETY: the caller keeps the rule of `put`.
    unsafe { put(address, Box::into_raw(Box::new(iterator))) }
}

/// Writes the ids of deleted subvolumes.
///
/// # Safety
/// As [`put`], for both addresses.
unsafe fn put_deleted(place: OpenPlace<'_>, ids: *mut *mut u64, count: *mut usize) -> Result<()> {
    if ids.is_null() {
        return Err(UtilFailure::invalid());
    }
    // SAFETY: the caller keeps the rule of `put`.
    unsafe { put(count, 0)? };
    let found = search::deleted(place)?;
    let bytes: Vec<u8> = found.iter().flat_map(|id| id.to_ne_bytes()).collect();
    let address = if found.is_empty() { ptr::null_mut() } else { allocated(&bytes, 0)? };
    // SAFETY: as above. Memory of malloc is aligned for every type.
    unsafe { put(ids, address.cast::<u64>()).and_then(|()| put(count, found.len())) }
}

/// Finds the next subvolume of an iterator.
///
/// # Safety
/// The address is null or comes from [`put_iterator`], and the descriptor of the iterator is open.
unsafe fn next(iterator: *mut UtilIterator, with_info: bool) -> Result<FoundSubvolume> {
    // SAFETY: the caller keeps the rules above.
    let (iterator, place) = unsafe {
        let iterator = iterator.as_mut().ok_or_else(UtilFailure::invalid)?;
        let place = place(iterator.fd);
        (iterator, place)
    };
    iterator.walk.next(place, with_info)?.ok_or_else(|| UtilError::StopIteration.with(Errno::NOENT))
}

fn order(flags: c_int) -> Result<WalkOrder> {
    match flags {
        0 => Ok(WalkOrder::Pre),
        1 => Ok(WalkOrder::Post),
        _ => Err(UtilFailure::invalid()),
    }
}

fn create(dir: OpenPlace<'_>, name: &[u8], flags: c_int, qgroups: Option<&QgroupsToJoin>) -> Result<()> {
    if flags != 0 {
        return Err(UtilFailure::invalid());
    }
    edit::create(dir, name, qgroups)
}

fn snapshot(
    source: OpenPlace<'_>,
    dir: OpenPlace<'_>,
    name: &[u8],
    flags: c_int,
    qgroups: Option<&QgroupsToJoin>,
) -> Result<()> {
    edit::snapshot(source, dir, name, SnapshotKind::of_flags(flags)?, qgroups)
}

fn delete(dir: OpenPlace<'_>, name: &[u8], flags: c_int) -> Result<()> {
    match flags {
        0 => edit::delete(dir, name, false),
        1 => edit::delete(dir, name, true),
        _ => Err(UtilFailure::invalid()),
    }
}
