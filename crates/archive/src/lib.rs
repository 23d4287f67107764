//! Archives, and copies from and to the host: files of a filesystem from outside, and for outside.
//!
//! - `import`: makes the files of an archive's members, and applies layers of OCI images.
//! - `export`: writes a directory or file as an archive.
//! - [`copy`]: copies between the host and filesystems, and inside of a filesystem.
//! - `tar`: the archive format (ustar, GNU, pax), and compression.
//! - [`glob`]: patterns of names, shared with the command line.
//! - [`host_file`]: files of the host that are written, shared with the command line; [`unfinished`]: their temporary
//!   names.
//! - [`walk`]: paths, names and data of files, shared with the command line.
//!
//! Archives and images are untrusted input: `import` changes nothing outside of its target directory, and `export`
//! writes no name that leads out of the directory in which the archive is unpacked. A copy writes nothing outside of its
//! target, and reads nothing outside of its source.

#![forbid(unsafe_code)]

pub mod copy;
mod export;
pub mod glob;
pub mod host_file;
mod import;
mod tar;
pub mod unfinished;
pub mod walk;

pub use export::{ExportOptions, ExportReport, export};
pub use import::{Archive, ImportOptions, ImportReport, import};
pub use tar::compressor::{ArchiveCompression, Compressor};

/// A message to the caller of [`import()`] or [`export()`].
#[derive(Debug)]
pub enum ArchiveMessage<'e> {
    /// The number of bytes so far: for an import, bytes read from the archive file; for an export, bytes of file data
    /// written to the archive.
    Bytes(u64),
    /// The member with this path is unpacked next.
    Member(&'e [u8]),
    /// A member or file was skipped, or is incomplete in the archive.
    Failed(&'e anyhow::Error),
    /// The socket at this path was left out, because tar cannot store sockets.
    Socket(&'e [u8]),
}

/// Receives the messages, from any thread.
pub type Watch<'w> = &'w (dyn Fn(ArchiveMessage<'_>) + Sync);
