//! Send, receive
//!
//! The functions of the program that write and read a stream are called by one thread at a time, which may be another
//! thread than the caller's. They must not call this library on the same filesystem.

use std::ffi::{c_int, c_void};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use ubtrfs::{ReceiveOptions, ReceiveReport, SendOptions};

use crate::border::{ErrorPlace, Given, GrowingStruct, ResultPlace, Text, TextList, UserPointer, own_descriptor};
use crate::callback::{CallbackReader, CallbackWriter};
use crate::exports::filesystem::{UbtrfsFs, check_flags};
use crate::exports::job::{UbtrfsJob, job_of};
use crate::failure::{CallFailure, CallResult, answer};
use crate::handles::Handle;

/// Writes all `len` bytes. Returns 0, or a negative errno, which ends the operation. -EINTR counts as -ECANCELED.
pub type UbtrfsWriteFn = Option<unsafe extern "C" fn(user: UserPointer, data: *const c_void, len: usize) -> c_int>;
/// Reads at most `len` bytes, and writes their number into `nr_read`; 0 at the end. Returns 0, or a negative errno, which
/// ends the operation. -EINTR counts as -ECANCELED.
pub type UbtrfsReadFn =
    Option<unsafe extern "C" fn(user: UserPointer, data: *mut c_void, len: usize, nr_read: *mut usize) -> c_int>;

/// Sends compressed extents in their compressed form. Needs version 2.
pub const UBTRFS_SEND_COMPRESSED_DATA: u32 = 1;
/// Sends which ranges changed, without their data. Such a stream cannot be received.
pub const UBTRFS_SEND_NO_DATA: u32 = 2;

/// Options of a send. Begin with `UBTRFS_SEND_OPTIONS_INIT`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsSendOptions {
    /// The size of this struct.
    pub struct_size: usize,
    /// `UBTRFS_SEND_...`, or 0.
    pub flags: u32,
    /// The version of the stream, 1 or 2; 0 for 1.
    pub version: u32,
    /// A read-only subvolume that the receiver has. The stream is the difference to it. Or null.
    pub parent: Text,
    /// More read-only subvolumes that the receiver has; or null.
    pub clone_sources: TextList,
    /// The number of `clone_sources`.
    pub nr_clone_sources: usize,
}

// SAFETY: the struct is `repr(C)`, begins with its size, and consists of numbers and pointers.
unsafe impl GrowingStruct for UbtrfsSendOptions {
    const NAME: &'static str = "ubtrfs_send_options";
}

impl Given<UbtrfsSendOptions> {
    fn send_options(&self) -> CallResult<SendOptions> {
        let given = self.read()?;
        check_flags(
            given.flags,
            UBTRFS_SEND_COMPRESSED_DATA | UBTRFS_SEND_NO_DATA,
            "the flags of ubtrfs_send_options",
        )?;
        let clone_sources = given.clone_sources.paths(given.nr_clone_sources, "clone_sources")?;
        Ok(SendOptions {
            parent: given.parent.optional().map(|path| crate::border::as_path(path).to_owned()),
            clone_sources: clone_sources.into_iter().map(Path::to_owned).collect(),
            version: if given.version == 0 { 1 } else { given.version },
            compressed_data: given.flags & UBTRFS_SEND_COMPRESSED_DATA != 0,
            no_data: given.flags & UBTRFS_SEND_NO_DATA != 0,
        })
    }
}

/// Ends at the first end of a stream. Otherwise streams are received until the input ends.
pub const UBTRFS_RECEIVE_ONLY_FIRST: u32 = 1;
/// Keeps an incomplete subvolume after a failure, so that a later receive of the same stream resumes it.
pub const UBTRFS_RECEIVE_KEEP: u32 = 2;
/// Deletes what a killed receive of the same stream left, and begins again.
pub const UBTRFS_RECEIVE_REPLACE: u32 = 4;
/// Reads each subvolume again and compares it before it becomes complete.
pub const UBTRFS_RECEIVE_VERIFY: u32 = 8;
/// Shares data with the sent subvolume if this filesystem has it.
pub const UBTRFS_RECEIVE_SHARE: u32 = 16;
/// Decompresses all data.
pub const UBTRFS_RECEIVE_DECOMPRESS: u32 = 32;
/// Continues after any number of failed commands. Otherwise the first one ends the receive.
pub const UBTRFS_RECEIVE_ALL_ERRORS: u32 = 64;

/// The result of a receive.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct UbtrfsReceiveReport {
    /// The number of received subvolumes.
    pub nr_subvolumes: u64,
    /// Commands that were applied or failed.
    pub nr_commands: u64,
    /// Commands that failed.
    pub nr_errors: u64,
    /// Bytes of the input.
    pub nr_bytes: u64,
    /// Not used: 0.
    pub more: [u64; 4],
}

/// Sends the read-only subvolume at `path` as a stream, for `ubtrfs_receive` or for `btrfs receive`. `write` gets the
/// bytes. `options` and `job` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_send(
    fs: Handle<UbtrfsFs>,
    path: Text,
    options: Given<UbtrfsSendOptions>,
    write: UbtrfsWriteFn,
    user: UserPointer,
    job: Handle<UbtrfsJob>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || send(fs, path, options, &mut CallbackWriter::new(write, user)?, job))
}

/// Sends as `ubtrfs_send`, into a file, pipe or socket. The descriptor stays open. As write(2) does, a pipe or socket that
/// nobody reads sends SIGPIPE to the program; a program that ignores the signal gets EPIPE.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_send_fd(
    fs: Handle<UbtrfsFs>,
    path: Text,
    options: Given<UbtrfsSendOptions>,
    fd: c_int,
    job: Handle<UbtrfsJob>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || send(fs, path, options, &mut DescriptorStream(own_descriptor(fd)?), job))
}

/// Makes the subvolumes of a stream in the directory `to`. `read` brings the bytes. The stream is not trusted: it changes
/// nothing outside of its subvolumes. `flags` are `UBTRFS_RECEIVE_...`. `report` and `job` may be null.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_receive(
    fs: Handle<UbtrfsFs>,
    to: Text,
    flags: u32,
    read: UbtrfsReadFn,
    user: UserPointer,
    job: Handle<UbtrfsJob>,
    report: ResultPlace<UbtrfsReceiveReport>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || receive(fs, to, flags, CallbackReader::new(read, user)?, job, report))
}

/// Receives as `ubtrfs_receive`, from a file, pipe or socket. The descriptor stays open.
#[unsafe(no_mangle)]
pub extern "C" fn ubtrfs_receive_fd(
    fs: Handle<UbtrfsFs>,
    to: Text,
    flags: u32,
    fd: c_int,
    job: Handle<UbtrfsJob>,
    report: ResultPlace<UbtrfsReceiveReport>,
    error: ErrorPlace,
) -> c_int {
    answer(error, || receive(fs, to, flags, DescriptorStream(own_descriptor(fd)?), job, report))
}

/// A copy of a descriptor of the program.
pub(crate) struct DescriptorStream(pub(crate) OwnedFd);

impl Write for DescriptorStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(&self.0, buf)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for DescriptorStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(&self.0, buf)?)
    }
}

fn send(
    fs: Handle<UbtrfsFs>,
    path: Text,
    options: Given<UbtrfsSendOptions>,
    output: &mut (dyn Write + Send),
    job: Handle<UbtrfsJob>,
) -> CallResult<()> {
    let options = options.send_options()?;
    Ok(fs.get()?.send(path.path("path")?, &options, output, &*job_of(job)?)?)
}

fn receive(
    fs: Handle<UbtrfsFs>,
    to: Text,
    flags: u32,
    input: impl Read + Send,
    job: Handle<UbtrfsJob>,
    report: ResultPlace<UbtrfsReceiveReport>,
) -> CallResult<()> {
    let options = receive_options(flags)?;
    let found = fs.get()?.receive(to.path("to")?, input, &options, &*job_of(job)?)?;
    let ReceiveReport { subvolumes, nr_commands, nr_errors, nr_bytes, .. } = found;
    let nr_subvolumes = subvolumes.len() as u64;
    report.set(UbtrfsReceiveReport { nr_subvolumes, nr_commands, nr_errors, nr_bytes, more: [0; 4] });
    Ok(())
}

fn receive_options(flags: u32) -> CallResult<ReceiveOptions> {
    const ALL: u32 = UBTRFS_RECEIVE_ONLY_FIRST
        | UBTRFS_RECEIVE_KEEP
        | UBTRFS_RECEIVE_REPLACE
        | UBTRFS_RECEIVE_VERIFY
        | UBTRFS_RECEIVE_SHARE
        | UBTRFS_RECEIVE_DECOMPRESS
        | UBTRFS_RECEIVE_ALL_ERRORS;
    check_flags(flags, ALL, "flags")?;
    let has = |flag| flags & flag != 0;
    if has(UBTRFS_RECEIVE_KEEP) && has(UBTRFS_RECEIVE_REPLACE) {
        return Err(CallFailure::argument(
            "UBTRFS_RECEIVE_KEEP and UBTRFS_RECEIVE_REPLACE exclude each other".to_owned(),
        ));
    }
    Ok(ReceiveOptions {
        only_first: has(UBTRFS_RECEIVE_ONLY_FIRST),
        max_errors: if has(UBTRFS_RECEIVE_ALL_ERRORS) { 0 } else { 1 },
        keep: has(UBTRFS_RECEIVE_KEEP),
        replaces: has(UBTRFS_RECEIVE_REPLACE),
        force_decompress: has(UBTRFS_RECEIVE_DECOMPRESS),
        verify: has(UBTRFS_RECEIVE_VERIFY),
        shares: has(UBTRFS_RECEIVE_SHARE),
        ..ReceiveOptions::default()
    })
}
