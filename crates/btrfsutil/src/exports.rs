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
use crate::image::FileInImage;
use crate::info::UtilSubvolumeInfo;
use crate::iterator::{FoundSubvolume, SubvolumeWalk, WalkOrder};
use crate::path::split;
use crate::place::{self, OpenPlace};
use crate::qgroup::QgroupsToJoin;
use crate::{search, subvolume};

/// The opaque `struct btrfs_util_subvolume_iterator` of C programs.
#[derive(Debug)]
pub(crate) struct UtilIterator {
    state: IteratorState,
    fd: c_int,
    /// The file of `fd`, if this library opened it.
    _own: Option<OwnedFd>,
}

/// The source of an iterator's subvolumes.
#[derive(Debug)]
enum IteratorState {
    /// Subvolumes that are searched while the caller asks for them.
    Walk(SubvolumeWalk),
    /// The subvolumes of an image.
    List(std::vec::IntoIter<FoundSubvolume>),
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

/// Does work on the file at a path of the caller, or on the file in an image that the path names.
///
/// # Safety
/// As [`text`].
unsafe fn at<T>(
    path: *const c_char,
    work: impl FnOnce(OpenPlace<'_>) -> Result<T>,
    in_image: impl FnOnce(&FileInImage) -> Result<T>,
) -> Result<T> {
    // SAFETY: the caller keeps the rule of `text`.
    let path = unsafe { text(path) }?;
    match place::open(path) {
        Ok(fd) => match FileInImage::opened(path, OpenPlace::of(&fd)) {
            Some(file) => in_image(&file),
            None => work(OpenPlace::of(&fd)),
        },
        Err(failure) => in_image(&FileInImage::missing(path, failure.errno).ok_or(failure)?),
    }
}

/// Does work on the directory and the name of a path of the caller, or on the file in an image that the path names.
///
/// # Safety
/// As [`text`].
unsafe fn in_dir(
    path: *const c_char,
    work: impl FnOnce(OpenPlace<'_>, &[u8]) -> Result<()>,
    in_image: impl FnOnce(&FileInImage) -> Result<()>,
) -> Result<()> {
    // SAFETY: the caller keeps the rule of `text`.
    let path = unsafe { text(path) }?;
    let (dir, name) = split(path.to_bytes());
    match place::open_dir(dir) {
        Ok(dir) => work(OpenPlace::of(&dir), name),
        Err(failure) => in_image(&FileInImage::missing(path, failure.errno).ok_or(failure)?),
    }
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
        unsafe { at(path, subvolume::sync, |file| file.generation().map(drop)) }
    }

    fn btrfs_util_sync_fd = btrfs_util_fs_sync_fd(fd: c_int) {
        // SAFETY: see above.
        subvolume::sync(unsafe { place(fd) })
    }

    fn btrfs_util_start_sync = btrfs_util_fs_start_sync(path: *const c_char, transid: *mut u64) {
        // SAFETY: see above.
        unsafe { put_optional(transid, at(path, subvolume::start_sync, FileInImage::generation)?) }
    }

    fn btrfs_util_start_sync_fd = btrfs_util_fs_start_sync_fd(fd: c_int, transid: *mut u64) {
        // SAFETY: see above.
        unsafe { put_optional(transid, subvolume::start_sync(place(fd))?) }
    }

    fn btrfs_util_wait_sync = btrfs_util_fs_wait_sync(path: *const c_char, transid: u64) {
        // SAFETY: see above.
        unsafe { at(path, |place| subvolume::wait_sync(place, transid), |file| file.wait_sync(transid)) }
    }

    fn btrfs_util_wait_sync_fd = btrfs_util_fs_wait_sync_fd(fd: c_int, transid: u64) {
        // SAFETY: see above.
        subvolume::wait_sync(unsafe { place(fd) }, transid)
    }

    fn btrfs_util_is_subvolume = btrfs_util_subvolume_is_valid(path: *const c_char) {
        // SAFETY: see above.
        let path = unsafe { text(path) }?;
        let file = match place::check_subvolume_path(path) {
            Err(failure) if failure.error == UtilError::NotBtrfs => {
                place::open(path).ok().and_then(|fd| FileInImage::opened(path, OpenPlace::of(&fd)))
            }
            Err(failure) => FileInImage::missing(path, failure.errno),
            Ok(()) => return Ok(()),
        };
        match file {
            Some(file) => file.check_subvolume(),
            None => place::check_subvolume_path(path),
        }
    }

    fn btrfs_util_is_subvolume_fd = btrfs_util_subvolume_is_valid_fd(fd: c_int) {
        // SAFETY: see above.
        unsafe { place(fd) }.check_subvolume()
    }

    fn btrfs_util_subvolume_id = btrfs_util_subvolume_get_id(path: *const c_char, id: *mut u64) {
        // SAFETY: see above.
        unsafe { put(id, at(path, subvolume::id, FileInImage::id)?) }
    }

    fn btrfs_util_subvolume_id_fd = btrfs_util_subvolume_get_id_fd(fd: c_int, id: *mut u64) {
        // SAFETY: see above.
        unsafe { put(id, subvolume::id(place(fd))?) }
    }

    fn btrfs_util_subvolume_path = btrfs_util_subvolume_get_path(
        path: *const c_char, id: u64, found: *mut *mut c_char
    ) {
        // SAFETY: see above.
        unsafe { put_text(found, &at(path, |place| subvolume::path(place, id), |file| file.subvolume_path(id))?) }
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
        unsafe { put_optional(info, at(path, |place| subvolume::info(place, id), |file| file.info(id))?) }
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
        unsafe { put(read_only, at(path, subvolume::is_read_only, FileInImage::is_read_only)?) }
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
        unsafe { at(path, |place| subvolume::set_read_only(place, read_only), |file| file.set_read_only(read_only)) }
    }

    fn btrfs_util_set_subvolume_read_only_fd = btrfs_util_subvolume_set_read_only_fd(fd: c_int, read_only: bool) {
        // SAFETY: see above.
        subvolume::set_read_only(unsafe { place(fd) }, read_only)
    }

    fn btrfs_util_get_default_subvolume = btrfs_util_subvolume_get_default(path: *const c_char, id: *mut u64) {
        // SAFETY: see above.
        unsafe { put(id, at(path, search::default_subvolume, FileInImage::default_subvolume)?) }
    }

    fn btrfs_util_get_default_subvolume_fd = btrfs_util_subvolume_get_default_fd(fd: c_int, id: *mut u64) {
        // SAFETY: see above.
        unsafe { put(id, search::default_subvolume(place(fd))?) }
    }

    fn btrfs_util_set_default_subvolume = btrfs_util_subvolume_set_default(path: *const c_char, id: u64) {
        // SAFETY: see above.
        unsafe { at(path, |place| subvolume::set_default(place, id), |file| file.set_default(id)) }
    }

    fn btrfs_util_set_default_subvolume_fd = btrfs_util_subvolume_set_default_fd(fd: c_int, id: u64) {
        // SAFETY: see above.
        subvolume::set_default(unsafe { place(fd) }, id)
    }

    fn btrfs_util_create_subvolume = btrfs_util_subvolume_create(
        path: *const c_char, flags: c_int, _unused: *mut u64, inherit: *mut QgroupsToJoin
    ) {
        // SAFETY: see above.
        let inherit = unsafe { qgroups(inherit) };
        let in_image = |file: &FileInImage| check_no_flags(flags).and_then(|()| file.create(inherit));
        // SAFETY: see above.
        unsafe { in_dir(path, |dir, name| create(dir, name, flags, inherit), in_image) }
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
        // SAFETY: see above.
        let inherit = unsafe { qgroups(inherit) };
        let of_place = |source: OpenPlace<'_>| {
            // SAFETY: see above.
            unsafe { in_dir(path, |dir, name| snapshot(source, dir, name, flags, inherit), |_| Err(elsewhere())) }
        };
        let of_image = |source: &FileInImage| {
            let made = |file: &FileInImage| source.snapshot(file, SnapshotKind::of_flags(flags)?, inherit);
            // SAFETY: see above.
            unsafe { in_dir(path, |_, _| Err(elsewhere()), made) }
        };
        // SAFETY: see above.
        unsafe { at(source, of_place, of_image) }
    }

    fn btrfs_util_create_snapshot_fd = btrfs_util_subvolume_snapshot_fd(
        source: c_int, path: *const c_char, flags: c_int, _unused: *mut u64, inherit: *mut QgroupsToJoin
    ) {
        // SAFETY: see above.
        unsafe { in_dir(
            path,
            |dir, name| snapshot(place(source), dir, name, flags, qgroups(inherit)),
            |_| Err(elsewhere()),
        ) }
    }

    fn btrfs_util_create_snapshot_fd2 = btrfs_util_subvolume_snapshot_fd2(
        source: c_int, dir: c_int, name: *const c_char, flags: c_int, _unused: *mut u64, inherit: *mut QgroupsToJoin
    ) {
        // SAFETY: see above.
        unsafe { snapshot(place(source), place(dir), text(name)?.to_bytes(), flags, qgroups(inherit)) }
    }

    fn btrfs_util_delete_subvolume = btrfs_util_subvolume_delete(path: *const c_char, flags: c_int) {
        // SAFETY: see above.
        unsafe { in_dir(path, |dir, name| delete(dir, name, flags), |file| file.delete(is_recursive(flags)?)) }
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
        unsafe { put_iterator(iterator, iterator_at(text(path)?, top, flags)?) }
    }

    fn btrfs_util_create_subvolume_iterator_fd = btrfs_util_subvolume_iter_create_fd(
        fd: c_int, top: u64, flags: c_int, iterator: *mut *mut UtilIterator
    ) {
        let order = order(flags)?;
        // SAFETY: see above.
        let walk = SubvolumeWalk::new(unsafe { place(fd) }, top, order)?;
        // SAFETY: see above.
        unsafe { put_iterator(iterator, UtilIterator { state: IteratorState::Walk(walk), fd, _own: None }) }
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
        unsafe {
            let of_image = |file: &FileInImage| put(count, 0).and_then(|()| file.deleted());
            put_ids(ids, count, &at(path, |place| deleted(place, count), of_image)?)
        }
    }

    fn btrfs_util_deleted_subvolumes_fd = btrfs_util_subvolume_list_deleted_fd(
        fd: c_int, ids: *mut *mut u64, count: *mut usize
    ) {
        // SAFETY: see above.
        unsafe { put_ids(ids, count, &deleted(place(fd), count)?) }
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

/// Lists deleted subvolumes. As in the original, the count is 0 if the search fails.
///
/// # Safety
/// As [`put`].
unsafe fn deleted(place: OpenPlace<'_>, count: *mut usize) -> Result<Vec<u64>> {
    // SAFETY: the caller keeps the rule of `put`.
    unsafe { put(count, 0)? };
    search::deleted(place)
}

/// Writes the address of a copy of ids, and their count.
///
/// # Safety
/// As [`put`], for both addresses.
unsafe fn put_ids(ids: *mut *mut u64, count: *mut usize, found: &[u64]) -> Result<()> {
    if ids.is_null() {
        return Err(UtilFailure::invalid());
    }
    let bytes: Vec<u8> = found.iter().flat_map(|id| id.to_ne_bytes()).collect();
    let address = if found.is_empty() { ptr::null_mut() } else { allocated(&bytes, 0)? };
    // SAFETY: the caller keeps the rule of `put`. Memory of malloc is aligned for every type.
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
    let found = match &mut iterator.state {
        IteratorState::Walk(walk) => walk.next(place, with_info)?,
        IteratorState::List(list) => list.next(),
    };
    found.ok_or_else(|| UtilError::StopIteration.with(Errno::NOENT))
}

/// Makes an iterator for a path.
fn iterator_at(path: &CStr, top: u64, flags: c_int) -> Result<UtilIterator> {
    let list = |file: &FileInImage| Ok(IteratorState::List(file.walk(top, order(flags))?.into_iter()));
    let (state, file) = match place::open(path) {
        Ok(fd) => match FileInImage::opened(path, OpenPlace::of(&fd)) {
            Some(file) => (list(&file)?, fd),
            None => (IteratorState::Walk(SubvolumeWalk::new(OpenPlace::of(&fd), top, order(flags)?)?), fd),
        },
        Err(failure) => {
            let file = FileInImage::missing(path, failure.errno).ok_or(failure)?;
            (list(&file)?, file.open_host()?)
        }
    };
    Ok(UtilIterator { state, fd: file.as_raw_fd(), _own: Some(file) })
}

fn order(flags: c_int) -> Result<WalkOrder> {
    match flags {
        0 => Ok(WalkOrder::Pre),
        1 => Ok(WalkOrder::Post),
        _ => Err(UtilFailure::invalid()),
    }
}

fn create(dir: OpenPlace<'_>, name: &[u8], flags: c_int, qgroups: Option<&QgroupsToJoin>) -> Result<()> {
    check_no_flags(flags)?;
    edit::create(dir, name, qgroups)
}

fn check_no_flags(flags: c_int) -> Result<()> {
    if flags == 0 { Ok(()) } else { Err(UtilFailure::invalid()) }
}

/// The source and the place of a snapshot are in different filesystems.
fn elsewhere() -> UtilFailure {
    UtilError::SubvolCreateFailed.with(Errno::XDEV)
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
    edit::delete(dir, name, is_recursive(flags)?)
}

fn is_recursive(flags: c_int) -> Result<bool> {
    match flags {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(UtilFailure::invalid()),
    }
}
