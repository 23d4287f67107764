//! The commands of ubtrfs on a filesystem and its files: subvolumes, sync, usage, label, balance, shared ranges, send,
//! receive and so on.
//!
//! Each command has one implementation, [`execute`]. The command line calls `execute` in its own process for an image,
//! and through the control socket for a mount; ioctls on the mount call `execute` too.
//!
//! ```text
//! command line --> Channel::image --------------------------------> execute --> fs
//!              \-> Channel::mount --> socket --> Server (in mount) --^  ^
//! ioctl(2) ------> kernel --------> fuse ------------------------------/
//! ```
//!
//! | module       | contents                                                                |
//! |--------------|-------------------------------------------------------------------------|
//! | `execute`    | [`execute`], and the [`CommandContext`] that a command gets             |
//! | `subvolume`, `filesystem`, `device`, `balance`, `scrub`, `defragment`, `disk_usage`, `search`, `file`, `quota`, `receive`, `send`, `resolve`, `join` | the commands, each module with a table of its permission rules |
//! | `caller`     | the user who runs a command, and their rights                           |
//! | `access`     | whether a caller may list, search or change a directory                 |
//! | `message`    | the messages on the socket                                              |
//! | `wire`       | frames: a length, JSON, descriptors                                     |
//! | `server`     | the mount's end of the socket                                           |
//! | `sent_files` | the files of a request, which may never answer                          |
//! | `open_image` | the socket of an image that a process has opened without mounting it    |
//! | `dir_part`   | walks through directories, in parts                                     |
//! | `stream`     | the stream that a command reads or writes                               |
//! | `byte_queue` | the bytes of a stream between two threads                               |
//! | `server_stream` | streams and progress, at the mount's end of a connection             |
//! | `client`     | the command line's end of the socket                                    |
//! | `mount_file` | files of a mount, opened for a command without leaving the mount        |
//! | `peer`       | whose process may answer a client                                       |
//! | `relay`      | streams between a command's input or output and a server                |
//!
//! # How to add a command
//!
//! 1. Add a variant to the `Request` of a module, or add a module with its own `Request` and `Response` enums and a
//!    variant for the module in [`Request`] and [`Response`]. A request names the files that it works on by their index
//!    ([`FileNr`]) among the files sent with it, never by path.
//! 2. Add a line to the table of permissions at the head of the module, and a function that first checks this
//!    permission and then makes one call of `fs`. The function takes a [`CommandContext`]; long work passes
//!    `context.job` down and calls [`Job::check`](ubtrfs_transaction::Job::check) between its steps.
//! 3. Add an arm to the module's `execute`. For a new kind of command, also answer [`Request::is_long`] (it runs long
//!    and shows progress), [`Request::ends_with_client`] (it stops when its client goes away) and [`Request::changes`]
//!    (it may change the filesystem).
//! 4. In the command line, open a [`Channel`], open the files with [`Channel::open`], and call [`Channel::call`].
//! 5. Bound the memory of the request: any user can run [`ControlServer`]'s commands in parallel, and memory use has to
//!    stay within `--memory`. An answer holds at most about a quarter of a MiB. A longer list is answered in pages, or
//!    written to a stream while it is made. `cli/tests/it/worst_requests.rs` sends every request in its worst form: add
//!    yours.
//! 6. Add tests: a line for each permission in `tests/it/permissions.rs`, and a run on a mount and on an image that must
//!    give equal output.
//!
//! For a command that reads or writes a stream, [`Request::stream`] tells the direction. The client calls
//! [`Channel::call_with_input`] or [`Channel::call_with_output`], which copy between the stream and the connection. The
//! command finds the stream in [`CommandContext::stream`].
//!
//! Fields that are added to a request later need `#[serde(default)]`, because older clients do not send them. An older
//! server refuses fields and commands that it does not know and names them in the error.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod access;
pub mod balance;
mod byte_queue;
mod bytes;
mod caller;
mod client;
mod connection;
pub mod defragment;
pub mod device;
mod dir_part;
pub mod disk_usage;
mod execute;
mod failure;
pub mod file;
pub mod filesystem;
pub mod join;
mod message;
mod mount_file;
mod open_image;
mod peer;
mod process;
pub mod quota;
pub mod receive;
mod relay;
pub mod replace;
pub mod resolve;
pub mod scrub;
pub mod search;
pub mod send;
mod sent_files;
mod server;
mod server_limits;
mod server_stream;
mod stream;
pub mod subvolume;
mod wire;

pub use byte_queue::ByteQueue;
pub use caller::CommandCaller;
pub use client::{Channel, ConnectError, CreatedFile, MountChannel, OpenedFile, unexpected};
pub use connection::{await_unmount, connect_to_unmount, connect_to_unmount_within};
pub use execute::{CommandContext, FileNr, Host, OpenFile, PlainHost, execute, open_device};
pub use failure::{CommandFailure, Result};
pub use message::{Direction, Request, Response};
#[doc(hidden)]
pub use mount_file::unchecked_mount_file;
pub use mount_file::{InMountOfOther, MountFile, Way, find_file, open_image, reopen};
pub use open_image::{ImageId, ImageWork, OpenImage};
pub use peer::Peers;
pub use process::{FileId, LocalProcesses, ProcessFile, Processes, is_of_user, stopped_process};
pub use server::{Canceller, ControlServer};
pub use stream::CommandStream;

/// The extended attribute, on every file of a mount, that holds the name of the control socket. This is the only
/// attribute that the server adds; all other information comes through the socket.
pub const CONTROL_XATTR: &str = "ubtrfs.control";
