//! Archives: tar
//!
//! Archives are read compressed and uncompressed, and written uncompressed. The functions of the program keep the rules for
//! streams.

use std::ffi::{CString, c_char, c_int};
use std::io::{Read, Write};

use ubtrfs::{ArchiveEvent, ExportOptions, ExportReport, ImportOptions, ImportReport};

use crate::border::{ErrorPlace, Given, GrowingStruct, ResultPlace, Text, TextList, UserPointer, own_descriptor};
use crate::callback::{CallbackReader, CallbackWriter, MessageTeller, ReaderGate};
use crate::exports::filesystem::{UbtrfsFs, check_flags};
use crate::exports::stream::{DescriptorStream, UbtrfsReadFn, UbtrfsWriteFn};
use crate::failure::{CallResult, answer, c_text};
use crate::handles::Handle;

/// Learns that a member or file is left out or incomplete, by a text that is valid until the function returns.
pub type UbtrfsMessageFn = Option<unsafe extern "C" fn(user: UserPointer, text: *const c_char)>;

/// The archive is a layer of an OCI image, whose whiteouts remove existing files.
pub const UBTRFS_IMPORT_OCI_LAYER: u32 = 1;
/// All files belong to `uid` and `gid` in place of the owners in the archive.
pub const UBTRFS_IMPORT_OWNER: u32 = 2;

/// Options of an import. Begin with `UBTRFS_IMPORT_OPTIONS_INIT`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsImportOptions {
    /// The size of this struct.
    pub struct_size: usize,
    /// `UBTRFS_IMPORT_...`, or 0.
    pub flags: u32,
    /// The number of leading names to remove from each path.
    pub strip_components: u32,
    /// The owner of all files, with `UBTRFS_IMPORT_OWNER`.
    pub uid: u32,
    /// The group of all files, with `UBTRFS_IMPORT_OWNER`.
    pub gid: u32,
    /// Patterns of members that are left out, such as "*.o"; or null.
    pub exclude: TextList,
    /// The number of `exclude`.
    pub nr_exclude: usize,
    /// Learns what is left out; or null.
    pub tell: UbtrfsMessageFn,
    /// The first argument of `tell`.
    pub tell_user: UserPointer,
}

// SAFETY: the struct is `repr(C)`, begins with its size, and consists of numbers and pointers.
unsafe impl GrowingStruct for UbtrfsImportOptions {
    const NAME: &'static str = "ubtrfs_import_options";
}

/// Keeps holes of files as holes.
pub const UBTRFS_EXPORT_SPARSE: u32 = 1;
/// Leaves out extended attributes and ACLs.
pub const UBTRFS_EXPORT_NO_XATTRS: u32 = 2;

/// Options of an export. Begin with `UBTRFS_EXPORT_OPTIONS_INIT`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsExportOptions {
    /// The size of this struct.
    pub struct_size: usize,
    /// `UBTRFS_EXPORT_...`, or 0.
    pub flags: u32,
    /// Not used: 0.
    pub reserved: u32,
    /// Learns what is left out; or null.
    pub tell: UbtrfsMessageFn,
    /// The first argument of `tell`.
    pub tell_user: UserPointer,
}

// SAFETY: the struct is `repr(C)`, begins with its size, and consists of numbers and pointers.
unsafe impl GrowingStruct for UbtrfsExportOptions {
    const NAME: &'static str = "ubtrfs_export_options";
}

/// The result of an import or an export.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsArchiveReport {
    /// Unpacked members; 0 for an export.
    pub nr_members: u64,
    /// Unpacked regular files; 0 for an export.
    pub nr_files: u64,
    /// Bytes of file data.
    pub nr_bytes: u64,
    /// Members or files that are left out or incomplete.
    pub nr_failed: u64,
    /// Not used: 0.
    pub more: [u64; 4],
}

/// Unpacks an archive into the directory `to`, which is made if it does not exist. `read` brings the bytes, compressed or
/// not. A member that cannot be unpacked is left out, and counts as failed. `options` and `report` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_import(
    fs: Handle<UbtrfsFs>,
    to: Text,
    options: Given<UbtrfsImportOptions>,
    read: UbtrfsReadFn,
    user: UserPointer,
    report: ResultPlace<UbtrfsArchiveReport>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || {
        let gate = ReaderGate::new(CallbackReader::new(read, user)?);
        import(fs, to, options, gate.reader(), report)
    })
}

/// Unpacks as `ubtrfs_import`, from a file, pipe or socket. The descriptor stays open.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_import_fd(
    fs: Handle<UbtrfsFs>,
    to: Text,
    options: Given<UbtrfsImportOptions>,
    fd: c_int,
    report: ResultPlace<UbtrfsArchiveReport>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || import(fs, to, options, DescriptorStream(own_descriptor(fd)?), report))
}

/// Writes the directory or file `from` as an archive. `write` gets the bytes. A file that cannot be read is left out, and
/// counts as failed. `options` and `report` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_export(
    fs: Handle<UbtrfsFs>,
    from: Text,
    options: Given<UbtrfsExportOptions>,
    write: UbtrfsWriteFn,
    user: UserPointer,
    report: ResultPlace<UbtrfsArchiveReport>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || export(fs, from, options, CallbackWriter::new(write, user)?, report))
}

/// Writes as `ubtrfs_export`, into a file, pipe or socket. The descriptor stays open. SIGPIPE: see `ubtrfs_send_fd`.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_export_fd(
    fs: Handle<UbtrfsFs>,
    from: Text,
    options: Given<UbtrfsExportOptions>,
    fd: c_int,
    report: ResultPlace<UbtrfsArchiveReport>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || export(fs, from, options, DescriptorStream(own_descriptor(fd)?), report))
}

fn import(
    fs: Handle<UbtrfsFs>,
    to: Text,
    options: Given<UbtrfsImportOptions>,
    input: impl Read + Send + 'static,
    report: ResultPlace<UbtrfsArchiveReport>,
) -> CallResult<()> {
    let given = options.read()?;
    check_flags(given.flags, UBTRFS_IMPORT_OCI_LAYER | UBTRFS_IMPORT_OWNER, "the flags of ubtrfs_import_options")?;
    let exclude = given.exclude.paths(given.nr_exclude, "exclude")?;
    let options = ImportOptions {
        strip_components: given.strip_components as usize,
        owner: (given.flags & UBTRFS_IMPORT_OWNER != 0).then_some((given.uid, given.gid)),
        oci_layer: given.flags & UBTRFS_IMPORT_OCI_LAYER != 0,
        exclude: exclude.into_iter().map(|name| name.as_os_str().as_encoded_bytes().to_vec()).collect(),
        ..ImportOptions::default()
    };
    let tell = MessageTeller::new(given.tell, given.tell_user);
    let found = fs.get()?.import(input, to.path("to")?, &options, &|event| tell_event(&tell, event))?;
    let ImportReport { entries, files, bytes, failed, .. } = found;
    report.set(archive_report(entries, files, bytes, failed));
    Ok(())
}

fn export(
    fs: Handle<UbtrfsFs>,
    from: Text,
    options: Given<UbtrfsExportOptions>,
    output: impl Write,
    report: ResultPlace<UbtrfsArchiveReport>,
) -> CallResult<()> {
    let given = options.read()?;
    check_flags(given.flags, UBTRFS_EXPORT_SPARSE | UBTRFS_EXPORT_NO_XATTRS, "the flags of ubtrfs_export_options")?;
    let options = ExportOptions {
        sparse: given.flags & UBTRFS_EXPORT_SPARSE != 0,
        no_xattrs: given.flags & UBTRFS_EXPORT_NO_XATTRS != 0,
    };
    let tell = MessageTeller::new(given.tell, given.tell_user);
    let (_, ExportReport { bytes, failed }) =
        fs.get()?.export(from.path("from")?, output, &options, &|event| tell_event(&tell, event))?;
    report.set(archive_report(0, 0, bytes, failed));
    Ok(())
}

fn archive_report(nr_members: u64, nr_files: u64, nr_bytes: u64, nr_failed: u64) -> UbtrfsArchiveReport {
    UbtrfsArchiveReport { nr_members, nr_files, nr_bytes, nr_failed, more: [0; 4] }
}

fn tell_event(tell: &MessageTeller, event: ArchiveEvent) {
    let text: CString = match event {
        ArchiveEvent::Failed(text) => c_text(text),
        ArchiveEvent::Socket(path) => c_text([b"a socket is left out: ", path.as_slice()].concat()),
        _ => return,
    };
    tell.tell(&text);
}
