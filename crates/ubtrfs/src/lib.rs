//! Read and write btrfs filesystems in your own process.
//!
//! This crate, the library of ubtrfs, offers the engine of the `ubtrfs` command and its FUSE mount through an interface
//! that follows [`std::fs`]. The library needs no root, no loop device and no btrfs in the kernel. The disk format is
//! that of Linux's btrfs: Linux mounts images that this crate makes, and this crate opens images that Linux makes.
//!
//! ```
//! use std::io::Write;
//! use ubtrfs::Filesystem;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let scratch = tempfile::tempdir()?;
//! # let image = scratch.path().join("disk.img");
//! // A new image file of 256 MiB.
//! let fs = Filesystem::make_image(&image, 256 << 20)?;
//! fs.create_subvolume("/home")?;
//! fs.write("/home/hello.txt", "hello from btrfs\n")?;
//!
//! // A snapshot shares its blocks with the source until one of them changes.
//! fs.snapshot("/home", "/home-monday", ubtrfs::SnapshotAccess::ReadOnly)?;
//! let mut file = fs.open_with("/home/hello.txt", &ubtrfs::OpenOptions::new().append(true))?;
//! writeln!(file, "and again")?;
//! drop(file);
//!
//! assert_eq!(fs.read("/home-monday/hello.txt")?, b"hello from btrfs\n");
//! assert_eq!(fs.read("/home/hello.txt")?, b"hello from btrfs\nand again\n");
//! // Commits all changes, and returns an error if that fails.
//! fs.close()?;
//! # Ok(()) }
//! ```
//!
//! # Overview
//!
//! | task | items |
//! |---|---|
//! | opening, making, paths, directories, attributes | [`Filesystem`] |
//! | file content: [`Read`](std::io::Read), [`Write`](std::io::Write), [`Seek`](std::io::Seek), positioned I/O | [`File`] |
//! | subvolumes and snapshots | [`Filesystem::create_subvolume`], [`Filesystem::snapshot`], [`Filesystem::subvolumes`] |
//! | subvolumes as streams, whole or as differences | [`Filesystem::send`], [`Filesystem::receive`] |
//! | balance, scrub, devices, quotas, defragmentation, space | [`manage`] |
//! | your own storage instead of an image file | [`Device`], [`Filesystem::make_on`], [`Filesystem::open_devices`] |
//! | options of a new or an opened filesystem | [`MkfsOptions`], [`MountOptions`] |
//! | checking a filesystem without changing it | [`check()`] |
//! | unpacking and writing tar archives (feature `import`) | `Filesystem::import`, `Filesystem::export` |
//! | copying trees from and to the host (feature `import`) | `Filesystem::copy_from_host`, `Filesystem::copy_to_host` |
//! | mounting a filesystem through FUSE (feature `fuse`) | `Filesystem::mount`, `fuse` |
//! | types of the disk format in options, reports and errors | [`mod@format`] |
//!
//! Sizes, lengths and offsets are in bytes.
//!
//! # Durability
//!
//! A change is durable after [`Filesystem::sync`], [`Filesystem::close`] or [`File::sync_all`] returned without an
//! error. Dropping the last handle of a [`Filesystem`] also closes it, but cannot report an error. After a crash or a
//! power cut, the filesystem has everything that was durable, and [`check()`] finds it clean.
//!
//! # Paths and permissions
//!
//! A path starts at the subvolume that was opened. A leading `/` makes no difference, `..` does not lead above the
//! subvolume, and symbolic links are followed inside the filesystem only. Permissions are not checked: a process that
//! can open the device can read and write everything. New files belong to [`Filesystem::caller`], by default root with
//! no umask.
//!
//! # Untrusted input
//!
//! The content of a device is never trusted. A damaged or crafted filesystem gives an [`Error`] that names the tree,
//! the block and the slot. Names in a filesystem can be any bytes: check them before you use them as paths of the host.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]
#![warn(missing_docs, clippy::missing_errors_doc)]

#[cfg(feature = "import")]
mod archive;
mod attributes;
#[doc(hidden)]
pub mod bindings;
#[cfg(feature = "import")]
mod copy;
mod dir;
mod error;
mod file;
mod filesystem;
pub mod format;
#[cfg(feature = "fuse")]
pub mod fuse;
mod in_use;
pub mod manage;
mod metadata;
mod names;
mod path;
mod receive;
mod reexports;
mod send;
mod subvolume;
mod tree;
mod verify;

#[cfg(feature = "import")]
pub use archive::ArchiveEvent;
#[cfg(feature = "import")]
pub use copy::CopyEvent;
pub use dir::{DirEntry, ReadDir};
pub use error::{Error, Result};
pub use file::{File, OpenOptions};
pub use filesystem::{Filesystem, Usage};
pub use metadata::{FileKind, FileTimes, Metadata};
#[doc(inline)]
pub use reexports::*;
pub use send::SendOptions;
pub use subvolume::{SnapshotAccess, Subvolume};
pub use verify::{check, check_images};
