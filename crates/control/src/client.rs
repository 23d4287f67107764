//! The client: [`Channel`] runs commands on a mount or on an image through one interface.
//!
//! - L1. Any file of a mount leads to the mount's socket. If the file is not readable, its parent directories in the
//!   mount are tried.
//! - L2. The client opens the files and sends their descriptors, so the kernel checks that the user may reach them.
//! - L3. The server may be a stranger. The client sends it files of its mount (F4 of `mount_file`), and no other
//!   descriptor: the bytes of a stream go through the connection (`relay`).
//! - L4. Before the client sends anything, it checks whose process answers (`peer`).
//!
//! `connection` has the rest of the way to the server.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::Errno;
use ubtrfs_device::ask_mount;
use ubtrfs_format::RootId;
use ubtrfs_fs::{Fs, InodeId, NewInode, SubvolumeInfo};
use ubtrfs_transaction::Job;

use crate::caller::CommandCaller;
use crate::connection::{
    CONNECT_PATIENCE, RETRY_PAUSE, answer_of, await_continued, connect, connect_to_unmount, connect_within, lost,
    pid_of,
};
use crate::execute::{CommandContext, OpenFile, PlainHost, execute};
use crate::failure::{CommandFailure, Result};
use crate::message::{Request, Response, encode_request};
use crate::mount_file::{ContentAccess, MountFile, MountId, NewMountFile, find};
use crate::open_image::{ImageWork, Sockets, sockets_of};
use crate::peer::Peers;
use crate::process::mount_maker;
use crate::relay::{self, ClientSide};
use crate::server_limits::{Limited, ServerLimits};
use crate::stream::CommandStream;
use crate::wire::Wire;
use crate::{CONTROL_XATTR, filesystem, subvolume};

/// The reason why a mount cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The path is not in a mount of ubtrfs.
    #[error("it is not in a mount of ubtrfs")]
    NotOurs,
    /// The path cannot be opened.
    #[error(transparent)]
    Open(io::Error),
    /// The server does not accept the connection.
    #[error("the mount's server does not answer: {0}")]
    Server(io::Error),
}

/// The way to run commands on a filesystem: a mount, or an image that is open in this process.
#[derive(Debug)]
pub enum Channel<'f> {
    /// A mount, reached through its control socket.
    Mount(MountChannel),
    /// An image that is open in this process.
    Image {
        /// The filesystem.
        fs: &'f Fs,
        /// The owner of new files.
        caller: CommandCaller,
    },
}

/// A mount, or an image that a process has open without a mount, reached through its control socket.
#[derive(Debug)]
pub struct MountChannel {
    name: Vec<u8>,
    /// An open file of the mount, or the image. Its descriptor is sent with a request that names no file, as proof that
    /// the user may enter the mount.
    file: MountFile,
    /// The mount; `None` for an image.
    id: Option<MountId>,
    peers: Peers,
    /// Bytes of messages of another user's server (L5).
    received: AtomicU64,
}

impl MountChannel {
    fn new(name: Vec<u8>, file: MountFile, id: Option<MountId>, peers: Peers) -> Self {
        Self { name, file, id, peers, received: AtomicU64::new(0) }
    }
}

/// A file that commands of one [`Channel`] can work on.
#[derive(Debug)]
pub enum OpenedFile {
    /// A file of a mount.
    Descriptor(MountFile),
    /// A file of an image.
    Inode(InodeId),
}

impl<'f> Channel<'f> {
    /// Returns the channel to the mount that holds a path.
    pub fn mount(path: &Path) -> Result<Self, ConnectError> {
        let (id, file, name) = enter(path)?;
        let peers = Peers::of_mount(&file);
        Ok(Self::Mount(MountChannel::new(name, file, Some(id), peers)))
    }

    /// Returns the channel to the process that has this image open without a mount and serves commands on it; `None` if
    /// there is none. Only commands that name no file work on this channel. `writes` tells whether commands will change
    /// something.
    pub fn open_image(path: &Path, writes: bool) -> Option<Self> {
        let Sockets { image, names, peers } = sockets_of(path, writes).ok()?;
        let end = Instant::now() + FIND_PATIENCE;
        loop {
            let mut is_queue_full = false;
            for name in &names {
                // Any user can make a socket with such a name, so no single one may hold this up.
                match connect_within(name, Duration::ZERO) {
                    Ok(stream) if peers.include(&stream) => {
                        return Some(Self::Mount(MountChannel::new(name.clone(), image, None, peers)));
                    }
                    Ok(_) => {}
                    Err(error) => is_queue_full |= error.kind() == io::ErrorKind::TimedOut,
                }
            }
            if !is_queue_full || Instant::now() >= end {
                return None;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// The work for which the process at the other end has the image open; `None` for a mount, and for an image that is
    /// open in this process.
    pub fn image_work(&self) -> Option<ImageWork> {
        match self {
            Self::Mount(mount) if mount.id.is_none() => ImageWork::of_socket(&mount.name),
            _ => None,
        }
    }

    /// Asks the server of this channel to report its end. Returns `None` for an image that is open in this process.
    pub fn connect_to_end(&self) -> Option<io::Result<UnixStream>> {
        match self {
            Self::Mount(mount) => Some(connect_to_unmount(&mount.name, &mount.peers)),
            Self::Image { .. } => None,
        }
    }

    /// The process at the other end; `None` for an image that is open in this process, and if the process cannot be reached
    /// or is in another pid namespace.
    pub fn server(&self) -> Option<u32> {
        match self {
            Self::Mount(mount) => connect(&mount.name)
                .ok()
                .filter(|stream| mount.peers.include(stream))
                .and_then(|stream| pid_of(&stream)),
            Self::Image { .. } => None,
        }
    }

    /// Whether the channel leads to the server that listens on the socket `name`.
    pub fn is_at(&self, name: &[u8]) -> bool {
        matches!(self, Self::Mount(mount) if mount.name == name)
    }

    /// Returns the channel to the server that listens on the socket `name`, through a detached copy of its mount, opened
    /// with `O_PATH`. It keeps no mount point busy.
    ///
    /// # Errors
    /// The copy cannot be opened for reading, or is of no FUSE filesystem.
    pub fn through_copy(copy: &OwnedFd, name: &[u8], peers: Peers) -> Result<Self, ConnectError> {
        let id = MountId::of(copy).map_err(ConnectError::Open)?;
        if !id.is_fuse() {
            return Err(ConnectError::NotOurs);
        }
        let file = id.open_found(copy, ContentAccess::Read).map_err(ConnectError::Open)?;
        Ok(Self::Mount(MountChannel::new(name.to_vec(), file, Some(id), peers)))
    }

    /// Returns a channel to the server that listens on the socket `name`; `file` stands for an open file of its mount.
    /// For tests of the server.
    #[doc(hidden)]
    pub fn at(name: &[u8], file: MountFile) -> Self {
        let id = MountId::of(&file).ok();
        Self::Mount(MountChannel::new(name.to_vec(), file, id, Peers::of_owner(None)))
    }

    /// Returns the channel to an image that is open in this process. New files get the owner `uid` and the group `gid`.
    pub fn image(fs: &'f Fs, uid: u32, gid: u32) -> Self {
        Self::Image { fs, caller: CommandCaller::of_image(uid, gid) }
    }

    /// Opens a file for commands. A path in an image starts at the image's root.
    pub fn open(&self, path: &Path) -> Result<OpenedFile> {
        self.open_for(path, ContentAccess::Read)
    }

    /// Opens a file for commands that write to it.
    pub fn open_writable(&self, path: &Path) -> Result<OpenedFile> {
        self.open_for(path, ContentAccess::Write)
    }

    fn open_for(&self, path: &Path, access: ContentAccess) -> Result<OpenedFile> {
        match self {
            Self::Mount(mount) => Ok(OpenedFile::Descriptor(mount.open(path, access)?)),
            Self::Image { fs, .. } => {
                Ok(OpenedFile::Inode(fs.lookup_path(path.as_os_str().as_encoded_bytes(), true)?.id))
            }
        }
    }

    /// Creates the empty file `path` and opens it for writing. `None` for an image that is open in this process.
    ///
    /// # Errors
    /// The path exists, also as a link, or its directory is not in the mount.
    pub fn create_file(&self, path: &Path, mode: u32) -> Option<Result<(CreatedFile, OpenedFile)>> {
        let Self::Mount(mount) = self else { return None };
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let create = || {
            let name =
                path.file_name().ok_or_else(|| CommandFailure::new(Errno::INVAL, "the path does not end in a name"))?;
            let (created, file) = mount.id_of_dir(dir)?.create(dir, name, mode).map_err(failure_of)?;
            Ok((CreatedFile(created), OpenedFile::Descriptor(file)))
        };
        Some(create())
    }

    /// Creates the directory `path`. In a mount, the umask of this process applies, and in an image `umask`.
    ///
    /// # Errors
    /// The path exists, also as a link, or its directory is missing or not in the mount.
    pub fn create_dir(&self, path: &Path, umask: u32) -> Result<()> {
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let name =
            path.file_name().ok_or_else(|| CommandFailure::new(Errno::INVAL, "the path does not end in a name"))?;
        match self {
            Self::Mount(mount) => mount.id_of_dir(dir)?.create_dir(dir, name).map_err(failure_of),
            Self::Image { fs, caller } => {
                let dir = fs.lookup_path(dir.as_os_str().as_encoded_bytes(), true)?.id;
                fs.create(dir, name.as_encoded_bytes(), NewInode::dir(0o777), &caller.with_umask(umask))?;
                Ok(())
            }
        }
    }

    /// Whether a path is a directory; `None` if the path does not exist.
    pub fn is_dir(&self, path: &Path) -> Result<Option<bool>> {
        let found = match self {
            Self::Mount(mount) if mount.id.is_none() => Err(busy_image()),
            Self::Mount(_) => std::fs::metadata(path).map(|meta| meta.is_dir()).map_err(failure_of),
            Self::Image { fs, .. } => {
                let found = fs.lookup_path(path.as_os_str().as_encoded_bytes(), true);
                found.map(|attr| attr.is_dir()).map_err(CommandFailure::from)
            }
        };
        match found {
            Err(failure) if failure.errno() == Errno::NOENT => Ok(None),
            found => found.map(Some),
        }
    }

    /// Whether the channel leads to a mount.
    pub fn is_mount(&self) -> bool {
        matches!(self, Self::Mount(mount) if mount.id.is_some())
    }

    /// Makes the kernel send all dirty pages of the file's filesystem to the server.
    pub fn flush(&self, file: &OpenedFile) -> Result<()> {
        match file {
            OpenedFile::Descriptor(file) => rustix::fs::syncfs(file).map_err(|errno| failure_of(errno.into())),
            OpenedFile::Inode(_) => Ok(()),
        }
    }

    /// Makes the kernel send the dirty pages of this file to the server.
    pub fn flush_file(&self, file: &OpenedFile) -> Result<()> {
        match file {
            OpenedFile::Descriptor(file) => rustix::fs::fdatasync(file).map_err(|errno| failure_of(errno.into())),
            OpenedFile::Inode(_) => Ok(()),
        }
    }

    /// Runs a command.
    pub fn call(&self, request: Request, files: &[&OpenedFile]) -> Result<Response> {
        self.call_with(request, files, &Job::new())
    }

    /// Runs a command that reads a send stream from `input`. With `only_first`, nothing after the first end command is
    /// read from the input.
    pub fn call_with_input(
        &self,
        request: Request,
        files: &[&OpenedFile],
        input: BorrowedFd<'_>,
        only_first: bool,
        job: &Job,
    ) -> Result<Response> {
        match self {
            Self::Mount(mount) => {
                let files = mount.descriptors(files)?;
                relay::with_input(input, only_first, |feeder| {
                    mount.call(&request, &files, ClientSide::Input(feeder), job)
                })
            }
            Self::Image { .. } => self.call_in_process(request, files, Some(CommandStream::File(input)), job),
        }
    }

    /// Runs a command that writes a stream to `output`. With `replaces`, `output` is a file whose old content is replaced
    /// when the first bytes of the stream arrive, so it keeps its content if the command is refused.
    pub fn call_with_output(
        &self,
        request: Request,
        files: &[&OpenedFile],
        output: BorrowedFd<'_>,
        replaces: bool,
        job: &Job,
    ) -> Result<Response> {
        match self {
            Self::Mount(mount) => {
                let files = mount.descriptors(files)?;
                relay::with_output(output, replaces, |queue| {
                    mount.call(&request, &files, ClientSide::Output(queue, job), job)
                })
            }
            Self::Image { .. } if replaces => relay::with_output(output, replaces, |queue| {
                self.call_in_process(request, files, Some(CommandStream::Queue(queue)), job)
            }),
            Self::Image { .. } => self.call_in_process(request, files, Some(CommandStream::File(output)), job),
        }
    }

    /// Runs a command. `job` receives the command's progress and can cancel the command.
    pub fn call_with(&self, request: Request, files: &[&OpenedFile], job: &Job) -> Result<Response> {
        match self {
            Self::Mount(mount) => mount.call(&request, &mount.descriptors(files)?, ClientSide::None, job),
            Self::Image { .. } => self.call_in_process(request, files, None, job),
        }
    }

    fn call_in_process(
        &self,
        request: Request,
        files: &[&OpenedFile],
        stream: Option<CommandStream<'_>>,
        job: &Job,
    ) -> Result<Response> {
        let Self::Image { fs, caller } = self else { return Err(elsewhere()) };
        let inode = |file: &&OpenedFile| match file {
            OpenedFile::Inode(id) => Ok(OpenFile::of_image(*id)),
            OpenedFile::Descriptor(_) => Err(elsewhere()),
        };
        let mut files = files.iter().map(inode).collect::<Result<Vec<_>>>()?;
        if files.is_empty() {
            files.push(OpenFile::of_image(fs.root()));
        }
        execute(&CommandContext { fs, host: &PlainHost, caller, files: &files, stream, job }, request)
    }

    /// Makes everything written so far durable: first the kernel hands over its dirty pages, then the server commits.
    pub fn sync(&self) -> Result<()> {
        // syncfs(2) may report a writeback error of any file, even one that happened long ago. This error is returned
        // only after everything else is committed.
        let handed_over = match self {
            Self::Mount(mount) => rustix::fs::syncfs(&mount.file),
            Self::Image { .. } => Ok(()),
        };
        self.call(Request::Filesystem(filesystem::Request::Sync), &[])?;
        handed_over.map_err(|errno| {
            let pages = "the kernel could not hand over what was written to some file, now or earlier";
            CommandFailure::new(errno, format!("{pages} ({}); the file's fsync fails", io::Error::from(errno)))
        })
    }

    /// Runs a command on subvolumes.
    pub fn subvolume(&self, request: subvolume::Request, files: &[&OpenedFile]) -> Result<subvolume::Response> {
        match self.call(Request::Subvolume(request), files)? {
            Response::Subvolume(response) => Ok(response),
            _ => Err(unexpected()),
        }
    }

    /// Lists all subvolumes in order of id, the top level first.
    pub fn subvolumes(&self) -> Result<Vec<SubvolumeInfo>> {
        self.pages(|from| subvolume::Request::List { from })
    }

    /// Lists deleted subvolumes whose space is not free yet, in order of id.
    pub fn deleted_subvolumes(&self) -> Result<Vec<SubvolumeInfo>> {
        self.pages(|from| subvolume::Request::ListDeleted { from })
    }

    fn pages(&self, request: impl Fn(u64) -> subvolume::Request) -> Result<Vec<SubvolumeInfo>> {
        let (mut list, mut from) = (Vec::new(), 0);
        loop {
            let subvolume::Response::Page(page) = self.subvolume(request(from), &[])? else {
                return Err(unexpected());
            };
            let Some(last) = page.last() else { return Ok(list) };
            from = last.id.checked_add(1).filter(|next| *next > from).ok_or_else(unexpected)?;
            list.extend(page.into_iter().map(SubvolumeInfo::from));
        }
    }

    /// Returns the id of the default subvolume.
    pub fn default_subvolume(&self) -> Result<RootId> {
        match self.subvolume(subvolume::Request::Default, &[])? {
            subvolume::Response::Default { id } => Ok(RootId(id)),
            _ => Err(unexpected()),
        }
    }

    /// Returns the subvolume that holds a file, and whether the file is its root directory.
    pub fn subvolume_of(&self, file: &OpenedFile) -> Result<(SubvolumeInfo, bool)> {
        match self.subvolume(subvolume::Request::Info { of: 0 }, &[file])? {
            subvolume::Response::Info { is_root, subvolume } => Ok((subvolume.into(), is_root)),
            _ => Err(unexpected()),
        }
    }
}

impl Channel<'_> {
    /// Sends a request to a mount and returns the connection without reading the answer. For tests of the server.
    #[doc(hidden)]
    pub fn send_only(&self, request: &Request) -> io::Result<UnixStream> {
        let Self::Mount(mount) = self else { return Err(io::ErrorKind::Unsupported.into()) };
        let wire = Wire::without_files(connect(&mount.name)?)?;
        let files = [mount.file.as_fd()];
        wire.send(&encode_request(request, &files).map_err(io::Error::other)?, &files)?;
        Ok(wire.into_stream())
    }
}

impl MountChannel {
    /// The mount. Fails for an image, whose files have no descriptors.
    fn id(&self) -> Result<MountId> {
        self.id.ok_or_else(busy_image)
    }

    /// Opens a file of the mount, or of another mount of the same server (F5 of `mount_file.rs`).
    fn open(&self, path: &Path, access: ContentAccess) -> Result<MountFile> {
        let (found, id) = self.find(path, OFlags::empty())?;
        id.open_found(&found, access).map_err(failure_of)
    }

    fn id_of_dir(&self, dir: &Path) -> Result<MountId> {
        self.find(dir, OFlags::DIRECTORY).map(|(_, id)| id)
    }

    fn find(&self, path: &Path, flags: OFlags) -> Result<(OwnedFd, MountId)> {
        let find_once = || {
            let found = find(rustix::fs::CWD, path.as_os_str(), flags).map_err(failure_of)?;
            self.id_for(&found).map(|id| (found, id))
        };
        // As in `enter`.
        find_once().or_else(|failure| if failure.errno() == Errno::STALE { find_once() } else { Err(failure) })
    }

    /// The mount of this file if the server serves it, else the mount of this channel.
    fn id_for(&self, found: &OwnedFd) -> Result<MountId> {
        let own = self.id()?;
        let (maker, own_maker) = (mount_maker(found.as_raw_fd()), mount_maker(self.file.as_fd().as_raw_fd()));
        let other = MountId::of(found).map_err(failure_of)?;
        if other == own || !other.is_fuse() || maker.is_none() || maker != own_maker {
            return Ok(own);
        }
        let is_ours = || {
            let file = other.open_found(found, ContentAccess::Read).ok()?;
            Some(control_name(&file).ok()? == self.name)
        };
        Ok(if is_ours() == Some(true) { other } else { own })
    }

    /// The descriptors to send with a request that works on these files (L3).
    fn descriptors<'d>(&'d self, files: &[&'d OpenedFile]) -> Result<Vec<&'d MountFile>> {
        let descriptor = |file: &&'d OpenedFile| match file {
            OpenedFile::Descriptor(file) => Ok(file),
            OpenedFile::Inode(_) => Err(elsewhere()),
        };
        match files {
            [] => Ok(vec![&self.file]),
            files => files.iter().map(descriptor).collect(),
        }
    }

    fn call(&self, request: &Request, files: &[&MountFile], side: ClientSide<'_>, job: &Job) -> Result<Response> {
        self.call_within(CONNECT_PATIENCE, request, files, side, job)
    }

    /// Repeats the request for `patience` while the server has no room for another connection.
    fn call_within(
        &self,
        patience: Duration,
        request: &Request,
        files: &[&MountFile],
        side: ClientSide<'_>,
        job: &Job,
    ) -> Result<Response> {
        let descriptors: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let frame = encode_request(request, &descriptors)?;
        let waits = request.is_long() && !request.ends_other();
        let end = Instant::now() + patience;
        loop {
            let stream = connect(&self.name).map_err(lost)?;
            self.peers.check(&stream)?;
            let limits = Peers::is_foreign(&stream).then(ServerLimits::default);
            let server = pid_of(&stream);
            // A request that a stopped server receives would be executed when the server continues.
            await_continued(server)?;
            let server = server.filter(|_| !waits);
            let wire = Wire::without_files(stream).map_err(lost)?;
            // Sending fails if the server has already refused the connection, but the server's answer can still be
            // read.
            let sent = wire.send(&frame, &descriptors);
            let limited = limits.map(|limits| Limited::new(limits, side, &self.received));
            match side.talk(&wire, |heard| answer_of(&wire, job, server, limited, heard)) {
                Err(failure) if failure.errno() == Errno::AGAIN && Instant::now() < end => thread::sleep(RETRY_PAUSE),
                Err(failure) if failure.errno() == Errno::CONNRESET => return Err(sent.err().map_or(failure, lost)),
                answer => return answer,
            }
        }
    }
}

/// A file that [`Channel::create_file`] made.
#[derive(Debug)]
pub struct CreatedFile(NewMountFile);

impl CreatedFile {
    /// Removes the file, unless another file has its name by now.
    pub fn remove(self) -> io::Result<()> {
        self.0.remove()
    }
}

fn busy_image() -> CommandFailure {
    CommandFailure::new(Errno::BUSY, "another command has the image open; wait for its end")
}

/// Finds the mount that holds a path, an open file of the mount, and the name of its control socket (L1).
fn enter(path: &Path) -> Result<(MountId, MountFile, Vec<u8>), ConnectError> {
    match enter_once(path) {
        // With `submounts`, the first try mounts the subvolume.
        Err(ConnectError::Open(error)) if is_stale(&error) => enter_once(path),
        entered => entered,
    }
}

fn is_stale(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::STALE)
}

fn enter_once(path: &Path) -> Result<(MountId, MountFile, Vec<u8>), ConnectError> {
    let found = find(rustix::fs::CWD, path.as_os_str(), OFlags::empty()).map_err(ConnectError::Open)?;
    let id = MountId::of(&found).map_err(ConnectError::Open)?;
    if !id.is_fuse() {
        return Err(ConnectError::NotOurs);
    }
    let named = |file: MountFile| control_name(&file).map(|name| (id, file, name));
    let error = match id.open_found(&found, ContentAccess::Read) {
        Ok(file) => return named(file),
        Err(error) => error,
    };
    if !matches!(Errno::from_io_error(&error), Some(Errno::ACCESS | Errno::INVAL)) {
        return Err(ConnectError::Open(error));
    }
    let full = std::fs::canonicalize(path).map_err(ConnectError::Open)?;
    let dir = full.ancestors().skip(1).find_map(|dir| id.open(dir, ContentAccess::Read).ok());
    named(dir.ok_or(ConnectError::Open(error))?)
}

/// The name of the control socket of the mount that holds this file.
fn control_name(file: &MountFile) -> Result<Vec<u8>, ConnectError> {
    let mut name = vec![0; 256];
    match rustix::fs::fgetxattr(file, CONTROL_XATTR, &mut name) {
        // A mount with `noxattr` has no extended attributes, so ask for the name with an ioctl.
        Err(Errno::OPNOTSUPP) => return ask_mount(file).map_err(|_| ConnectError::NotOurs),
        Err(Errno::NODATA) => return Err(ConnectError::NotOurs),
        Err(errno) => return Err(ConnectError::Open(errno.into())),
        Ok(len) => name.truncate(len),
    }
    Ok(name)
}

fn failure_of(error: io::Error) -> CommandFailure {
    let errno = error.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
    let text = match Errno::from_raw_os_error(errno) {
        Errno::XDEV => "it is not in this mount; name paths in one mount or one image".to_owned(),
        Errno::INVAL => "it is neither a regular file nor a directory".to_owned(),
        _ => return CommandFailure { errno, text: error.to_string(), has_advice: false },
    };
    CommandFailure { errno, text, has_advice: true }
}

fn elsewhere() -> CommandFailure {
    CommandFailure::new(Errno::XDEV, "the files are not in the same filesystem")
}

/// Makes the failure for an answer that does not fit its request.
pub fn unexpected() -> CommandFailure {
    CommandFailure::new(
        Errno::PROTO,
        "the server's answer is not understood; unmount and mount with this version of ubtrfs",
    )
}

/// How long to look for the server of an image while the queue of a socket is full.
const FIND_PATIENCE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};

    use super::*;
    use crate::message::{ServerMessage, encode_answer};
    use crate::unchecked_mount_file;

    #[test]
    fn a_request_for_which_a_server_has_no_room_is_repeated_until_patience_ends() {
        let frame = |errno| encode_answer(&ServerMessage::Failed(CommandFailure::new(errno, "a test"))).unwrap();
        let (full, other) = (frame(Errno::AGAIN), frame(Errno::NOENT));
        let hour = Duration::from_secs(3600);
        for (patience, answers, errno) in
            [(hour, vec![full.clone(), full.clone(), other], Errno::NOENT), (Duration::ZERO, vec![full], Errno::AGAIN)]
        {
            let name = format!("ubtrfs-test-full-{}-{}", std::process::id(), answers.len()).into_bytes();
            let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
            let file = unchecked_mount_file(tempfile::tempfile().unwrap().into());
            let channel = MountChannel::new(name, file, None, Peers::of_owner(None));
            // The listener is gone after the last answer, so one more attempt fails with another error.
            thread::spawn(move || {
                for answer in answers {
                    let wire = Wire::new(listener.accept().unwrap().0).unwrap();
                    wire.send(&answer, &[]).unwrap();
                }
            });
            let request = Request::Filesystem(filesystem::Request::Sync);
            let called = channel.call_within(patience, &request, &[&channel.file], ClientSide::None, &Job::new());
            let failure = called.unwrap_err();
            assert_eq!(failure.errno(), errno, "{failure}");
        }
    }
}
