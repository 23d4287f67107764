//! Directories: lists of entries

use std::ffi::{CString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;

use parking_lot::Mutex;
use rustix::io::Errno;
use ubtrfs::{DirEntry, ReadDir};

use crate::border::{Address, ErrorPlace, ResultPlace, Text};
use crate::exports::attributes::{UbtrfsMetadata, kind_of, metadata_of};
use crate::exports::filesystem::UbtrfsFs;
use crate::failure::{CallFailure, answer, c_text};
use crate::handles::{Handle, HandleKind, HandleTable};

/// An open directory.
#[derive(Debug)]
pub enum UbtrfsDir {}

impl HandleKind for UbtrfsDir {
    type Object = Mutex<DirectoryList>;
    const WHAT: &'static str = "the directory";
    fn table() -> &'static HandleTable<Self::Object> {
        static TABLE: HandleTable<Mutex<DirectoryList>> = HandleTable::new();
        &TABLE
    }
}

/// A directory that is being listed, and its last entry.
#[derive(Debug)]
pub struct DirectoryList {
    entries: ReadDir,
    last: Option<ListedEntry>,
}

/// An entry, and what the program sees of it.
#[derive(Debug)]
struct ListedEntry {
    entry: DirEntry,
    shown: Box<UbtrfsDirEntry>,
    _name: CString,
}

impl ListedEntry {
    fn new(entry: DirEntry) -> Self {
        let bytes = entry.file_name().as_bytes();
        let name = c_text(bytes);
        let shown = Box::new(UbtrfsDirEntry {
            name: Address::of(name.as_ptr()),
            name_len: bytes.len(),
            kind: kind_of(entry.kind()),
            is_subvolume: entry.is_subvolume().into(),
        });
        Self { entry, shown, _name: name }
    }
}

/// An entry of a directory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsDirEntry {
    /// The name, without its directory. It can have any byte except '/' and zero.
    pub name: Address<c_char>,
    /// The length of the name in bytes.
    pub name_len: usize,
    /// The kind of file: `UBTRFS_KIND_...`.
    pub kind: u32,
    /// 1 if the entry is a subvolume, otherwise 0.
    pub is_subvolume: u32,
}

/// Opens a directory for listing. Close it with `ubtrfs_dir_close`.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_dir_open(
    fs: Handle<UbtrfsFs>,
    path: Text,
    dir: ResultPlace<Handle<UbtrfsDir>>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        dir.set(Handle::NULL);
        dir.needed("the place for the directory")?;
        let entries = fs.get()?.read_dir(path.path("path")?)?;
        dir.set(Handle::add(Mutex::new(DirectoryList { entries, last: None }))?);
        Ok(())
    })
}

/// Returns the next entry, without "." and "..". `entry` gets a null pointer at the end. The entry is valid until the next
/// call for this directory. An iteration returns every entry once; only entries that are made or removed meanwhile may be
/// missing.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_dir_next(
    dir: Handle<UbtrfsDir>,
    entry: ResultPlace<Address<UbtrfsDirEntry>>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        entry.set(Address::NULL);
        entry.needed("the place for the entry")?;
        let dir = dir.get()?;
        let mut list = dir.lock();
        list.last = None;
        if let Some(next) = list.entries.next().transpose()? {
            let listed = list.last.insert(ListedEntry::new(next));
            entry.set(Address::of(&*listed.shown));
        }
        Ok(())
    })
}

/// Returns the attributes of the last entry. A symbolic link is not followed.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_dir_stat(
    dir: Handle<UbtrfsDir>,
    metadata: ResultPlace<UbtrfsMetadata>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        metadata.needed("metadata")?;
        let dir = dir.get()?;
        let list = dir.lock();
        let Some(last) = &list.last else {
            return Err(CallFailure::new(Errno::INVAL, "the directory has no last entry; call ubtrfs_dir_next"));
        };
        metadata.set(metadata_of(&last.entry.metadata()?));
        Ok(())
    })
}

/// Closes a directory.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_dir_close(dir: Handle<UbtrfsDir>, error: ErrorPlace) -> c_int {
    answer(error, || dir.take().map(drop))
}
