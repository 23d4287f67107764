//! Files: content

use std::ffi::{c_int, c_void};
use std::io::{Read, Seek, SeekFrom, Write};
use std::sync::Arc;

use parking_lot::RwLock;
use rustix::io::Errno;
use ubtrfs::{File, Filesystem, OpenOptions};

use crate::border::{ErrorPlace, Memory, MemoryRoom, OwnedAddress, ResultPlace, Text};
use crate::exports::attributes::{UbtrfsMetadata, put_metadata};
use crate::exports::filesystem::{UbtrfsFs, check_flags};
use crate::failure::{CallFailure, CallResult, answer};
use crate::handles::{Handle, HandleKind, HandleTable};
use crate::memory::give_bytes;

/// An open file. It has a position, which `ubtrfs_file_read`, `ubtrfs_file_write` and `ubtrfs_file_seek` use.
#[derive(Debug)]
pub enum UbtrfsFile {}

impl HandleKind for UbtrfsFile {
    type Object = FileOfProgram;
    const WHAT: &'static str = "the file";
    fn table() -> &'static HandleTable<Self::Object> {
        static TABLE: HandleTable<FileOfProgram> = HandleTable::new();
        &TABLE
    }
}

/// A file that a program has open.
#[derive(Debug)]
pub struct FileOfProgram {
    /// Reads and writes at given offsets share the lock; what uses the position holds it alone.
    pub(crate) file: RwLock<File>,
    fs: Filesystem,
    pub(crate) may_read: bool,
    pub(crate) may_write: bool,
}

impl FileOfProgram {
    /// Whether both files are on one filesystem.
    pub(crate) fn is_on_filesystem_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(self.fs.engine(), other.fs.engine())
    }
}

/// Allows reading.
pub const UBTRFS_READ: u32 = 1;
/// Allows writing.
pub const UBTRFS_WRITE: u32 = 2;
/// Allows writing at the end of the file. Appends of several threads do not overwrite each other.
pub const UBTRFS_APPEND: u32 = 4;
/// Makes the file if it does not exist. Needs `UBTRFS_WRITE` or `UBTRFS_APPEND`.
pub const UBTRFS_CREATE: u32 = 8;
/// Makes the file, and fails with EEXIST if the name exists. Needs `UBTRFS_WRITE` or `UBTRFS_APPEND`.
pub const UBTRFS_EXCLUSIVE: u32 = 16;
/// Truncates the file to length 0. Needs `UBTRFS_WRITE` or `UBTRFS_APPEND`.
pub const UBTRFS_TRUNCATE: u32 = 32;

/// As the mode of a new file: 0666 without the umask of the handle, and 0644 for a handle without one.
pub const UBTRFS_DEFAULT_MODE: u32 = 0xffff_ffff;

/// `offset` counts from the begin of the file.
pub const UBTRFS_SEEK_SET: u32 = 0;
/// `offset` counts from the position.
pub const UBTRFS_SEEK_CUR: u32 = 1;
/// `offset` counts from the end of the file.
pub const UBTRFS_SEEK_END: u32 = 2;

/// Opens a regular file. `flags` are `UBTRFS_READ` and others. `mode` has the permissions of a new file, or is
/// `UBTRFS_DEFAULT_MODE`. Symbolic links are followed. Close the file with `ubtrfs_file_close`.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_file_open(
    fs: Handle<UbtrfsFs>,
    path: Text,
    flags: u32,
    mode: u32,
    file: ResultPlace<Handle<UbtrfsFile>>,
    error: ErrorPlace,
) -> c_int {
    const KNOWN: u32 = UBTRFS_READ | UBTRFS_WRITE | UBTRFS_APPEND | UBTRFS_CREATE | UBTRFS_EXCLUSIVE | UBTRFS_TRUNCATE;
    answer(error, || {
        file.set(Handle::NULL);
        file.needed("the place for the file")?;
        check_flags(flags, KNOWN, "flags")?;
        let has = |flag| flags & flag != 0;
        let mut options = OpenOptions::new();
        options.read(has(UBTRFS_READ)).write(has(UBTRFS_WRITE)).append(has(UBTRFS_APPEND));
        options.create(has(UBTRFS_CREATE)).create_new(has(UBTRFS_EXCLUSIVE)).truncate(has(UBTRFS_TRUNCATE));
        if mode != UBTRFS_DEFAULT_MODE {
            options.mode(check_mode(mode)?);
        }
        let fs = Filesystem::clone(&*fs.get()?);
        let opened = FileOfProgram {
            file: RwLock::new(fs.open_with(path.path("path")?, &options)?),
            fs,
            may_read: has(UBTRFS_READ),
            may_write: has(UBTRFS_WRITE | UBTRFS_APPEND),
        };
        file.set(Handle::add(opened)?);
        Ok(())
    })
}

/// The 12 bits of permissions.
pub(crate) fn check_mode(mode: u32) -> CallResult<u32> {
    if mode & !0o7777 == 0 { Ok(mode) } else { Err(CallFailure::argument(format!("mode is {mode:#o}; give 12 bits"))) }
}

/// Reads at most `len` bytes at `offset`. `nr_read` gets their number, which is less than `len` only at the end of the
/// file. The position stays.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_file_pread(
    file: Handle<UbtrfsFile>,
    data: MemoryRoom,
    len: usize,
    offset: u64,
    nr_read: ResultPlace<usize>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        nr_read.set(0);
        nr_read.needed("nr_read")?;
        data.check(len, "data")?;
        let file = file.get()?;
        let file = file.file.read();
        let len = len_in_file(&file, offset, len)?;
        let mut data = data;
        nr_read.set(file.read_at(offset, data.bytes(len, "data")?)?);
        Ok(())
    })
}

/// Reads at most `len` bytes at the position, and moves it. `nr_read` gets their number, which is less than `len` only at
/// the end of the file.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_file_read(
    file: Handle<UbtrfsFile>,
    data: MemoryRoom,
    len: usize,
    nr_read: ResultPlace<usize>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        nr_read.set(0);
        nr_read.needed("nr_read")?;
        data.check(len, "data")?;
        let file = file.get()?;
        let mut file = file.file.write();
        let position = file.stream_position()?;
        let len = len_in_file(&file, position, len)?;
        let mut data = data;
        nr_read.set(file.read(data.bytes(len, "data")?)?);
        Ok(())
    })
}

/// How many of `len` bytes at `offset` the file has. A program may ask for more than it has room for, if the file ends
/// before.
fn len_in_file(file: &File, offset: u64, len: usize) -> CallResult<usize> {
    let rest = file.metadata()?.len().saturating_sub(offset);
    Ok(usize::try_from(rest).map_or(len, |rest| rest.min(len)))
}

/// Writes all `len` bytes at `offset`. The position stays. After a failure, a part may be written.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_file_pwrite(
    file: Handle<UbtrfsFile>,
    data: Memory,
    len: usize,
    offset: u64,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        let bytes = data.bytes(len, "data")?;
        let file = file.get()?;
        let file = file.file.read();
        Ok(file.write_all_at(offset, bytes)?)
    })
}

/// Writes all `len` bytes at the position, and moves it. With `UBTRFS_APPEND`, writes at the end of the file. After a
/// failure, a part may be written.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_file_write(file: Handle<UbtrfsFile>, data: Memory, len: usize, error: ErrorPlace) -> c_int {
    answer(error, || {
        let bytes = data.bytes(len, "data")?;
        let file = file.get()?;
        let mut file = file.file.write();
        Ok(file.write_all(bytes)?)
    })
}

/// Moves the position. `whence` is `UBTRFS_SEEK_SET` or another `UBTRFS_SEEK_...`. `position` gets the new position, and
/// may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_file_seek(
    file: Handle<UbtrfsFile>,
    offset: i64,
    whence: u32,
    position: ResultPlace<u64>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        let to = match (whence, u64::try_from(offset)) {
            (UBTRFS_SEEK_SET, Ok(offset)) => SeekFrom::Start(offset),
            (UBTRFS_SEEK_SET, Err(_)) => return Err(CallFailure::argument(format!("offset is {offset}"))),
            (UBTRFS_SEEK_CUR, _) => SeekFrom::Current(offset),
            (UBTRFS_SEEK_END, _) => SeekFrom::End(offset),
            _ => return Err(CallFailure::argument(format!("whence is {whence}; give UBTRFS_SEEK_..."))),
        };
        let file = file.get()?;
        let moved = file.file.write().seek(to)?;
        position.set(moved);
        Ok(())
    })
}

/// Finds the next range with data at or after `offset`. Without one, `start` and `end` get the size of the file.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_file_next_data(
    file: Handle<UbtrfsFile>,
    offset: u64,
    start: ResultPlace<u64>,
    end: ResultPlace<u64>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        start.needed("start")?;
        end.needed("end")?;
        let file = file.get()?;
        let file = file.file.read();
        let (first, last) = match file.next_data(offset)? {
            Some(range) => range,
            None => {
                let len = file.metadata()?.len();
                (len, len)
            }
        };
        start.set(first);
        end.set(last);
        Ok(())
    })
}

/// Calls the library for an open file.
fn on_file<T>(file: Handle<UbtrfsFile>, work: impl FnOnce(&File) -> ubtrfs::Result<T>) -> CallResult<T> {
    let file = file.get()?;
    let done = work(&file.file.read());
    Ok(done?)
}

/// Truncates the file to `size` bytes, or extends it by a hole.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_file_truncate(file: Handle<UbtrfsFile>, size: u64, error: ErrorPlace) -> c_int {
    answer(error, || on_file(file, |file| file.set_len(size)))
}

/// Makes content and attributes of the file durable, and for a new file also its names.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_file_sync(file: Handle<UbtrfsFile>, error: ErrorPlace) -> c_int {
    answer(error, || on_file(file, |file| file.sync_all()))
}

/// Makes the content of the file durable, and the attributes that reading it needs.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_file_sync_data(file: Handle<UbtrfsFile>, error: ErrorPlace) -> c_int {
    answer(error, || on_file(file, |file| file.sync_data()))
}

/// Returns the attributes of the file, which may have no name any more.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_file_stat(
    file: Handle<UbtrfsFile>,
    metadata: ResultPlace<UbtrfsMetadata>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || put_metadata(metadata, || on_file(file, File::metadata)))
}

/// Closes a file. Its changes stay, and become durable with the next commit.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_file_close(file: Handle<UbtrfsFile>, error: ErrorPlace) -> c_int {
    answer(error, || file.take().map(drop))
}

/// Reads the whole content of a file. Free `data` with `ubtrfs_free`. A zero byte follows the `len` bytes, so a text is a
/// string of C.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_read_file(
    fs: Handle<UbtrfsFs>,
    path: Text,
    data: ResultPlace<OwnedAddress<c_void>>,
    len: ResultPlace<usize>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        data.set(OwnedAddress::NULL);
        len.set(0);
        data.needed("the place for the data")?;
        len.needed("len")?;
        let content = content_of(&fs.get()?.open(path.path("path")?)?)?;
        len.set(content.len());
        data.set(give_bytes(content));
        Ok(())
    })
}

/// The whole content of a file, with room for one more byte. Memory for all of it is asked for first: the size on disk is
/// not trusted, and a hole of any size needs no space there.
fn content_of(file: &File) -> CallResult<Vec<u8>> {
    const STEP: usize = 1 << 20;
    let size = file.metadata()?.len();
    let mut content = Vec::new();
    let room = usize::try_from(size).ok().and_then(|size| size.checked_add(STEP + 1));
    room.and_then(|room| content.try_reserve_exact(room).ok())
        .ok_or_else(|| CallFailure::plain(Errno::NOMEM, format!("memory cannot hold the {size} bytes of the file")))?;
    loop {
        let done = content.len();
        content.resize(done + STEP, 0);
        let count = file.read_at(done as u64, &mut content[done..])?;
        content.truncate(done + count);
        // A file that grows meanwhile is read as far as there is room.
        if count < STEP || content.capacity() - content.len() <= STEP {
            return Ok(content);
        }
    }
}

/// Replaces the content of a file, or makes the file.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_write_file(
    fs: Handle<UbtrfsFs>,
    path: Text,
    data: Memory,
    len: usize,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        let bytes = data.bytes(len, "data")?;
        Ok(fs.get()?.write(path.path("path")?, bytes)?)
    })
}

/// Makes `to` a copy of the file `from` that shares its extents instead of copying data.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_reflink(fs: Handle<UbtrfsFs>, from: Text, to: Text, error: ErrorPlace) -> c_int {
    answer(error, || Ok(fs.get()?.reflink(from.path("from")?, to.path("to")?)?))
}
