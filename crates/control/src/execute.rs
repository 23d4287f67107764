//! [`execute`] runs every command: for the command line on an image, for the control socket of a mount, and for ioctls.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;
use ubtrfs_device::{Access, Device, FileDevice, NamedDevice, OpenError};
use ubtrfs_format::print::escaped;
use ubtrfs_format::{Profile, RootId};
use ubtrfs_fs::{Fs, InodeId};
use ubtrfs_transaction::Job;

use crate::caller::{CommandCaller, permit};
use crate::failure::{CommandFailure, Result};
use crate::message::{Request, Response};
use crate::open_image::ImageId;
use crate::process::ProcessFile;
use crate::stream::CommandStream;
use crate::{
    balance, defragment, device, disk_usage, file, filesystem, join, quota, receive, replace, resolve, scrub, search,
    send, subvolume,
};

/// The index of a file among the files sent with a request.
pub type FileNr = u8;

/// A file that a command works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFile {
    /// The inode.
    pub id: InodeId,
    /// Whether the file is open for reading.
    pub is_readable: bool,
    /// Whether the file is open for writing.
    pub is_writable: bool,
    /// Whether the file was opened through a read-only mount of a writable filesystem, for example a read-only bind
    /// mount.
    pub is_read_only_mount: bool,
}

impl OpenFile {
    /// A file of an image that is open in this process.
    pub fn of_image(id: InodeId) -> Self {
        Self { id, is_readable: true, is_writable: true, is_read_only_mount: false }
    }
}

/// The program around the engine that `execute` works for: the server of a mount, or a command that opened an image.
pub trait Host: Send + Sync {
    /// The filesystem that a control socket serves; `None` once it is closed, and for a host without a socket.
    fn filesystem(&self) -> Option<Arc<Fs>> {
        None
    }

    /// Shows the filesystem that `open` opens, which was made on this one, a seed, in place of it. Returns false if the seed
    /// stays: always for an image that is not mounted.
    fn show(&self, _open: &mut dyn FnMut() -> ubtrfs_fs::Result<Arc<Fs>>) -> ubtrfs_fs::Result<bool> {
        Ok(false)
    }

    /// The user who mounted and may administer the mount; `None` for an image.
    fn owner(&self) -> Option<u32>;

    /// The mount options as the user gave them; none for an image.
    fn mount_options(&self) -> Vec<String> {
        Vec::new()
    }

    /// Gives the options that can change ([`ubtrfs_fs::MountOptions::can_change`]) these values in [`Host::mount_options`].
    fn note_options(&self, _options: &[String]) {}

    /// The root directory of what the host shows.
    fn root(&self, fs: &Fs) -> InodeId {
        fs.root()
    }

    /// The inode number that `stat` shows for an inode; `None` if there is no mount.
    fn st_ino(&self, _id: InodeId) -> Option<u64> {
        None
    }

    /// Whether each subvolume has a mount of its own (`submounts`).
    fn has_submounts(&self) -> bool {
        false
    }

    /// Unmounts the submounts that are not in use.
    fn leave_submounts(&self) {}

    /// Remembers a further mount of the filesystem by its number.
    fn note_mount(&self, _mount: u64) {}

    /// The numbers of the mounts of the filesystem that were made one by one, also of those that are unmounted by now.
    fn mounts(&self) -> Vec<u64> {
        Vec::new()
    }

    /// Whether users may see other owners than the filesystem stores (idmapped mounts). A client's user id then does
    /// not show which files the client owns.
    fn may_map_owners(&self) -> bool {
        false
    }

    /// Finds the file behind a descriptor that a client sent.
    fn file(&self, file: BorrowedFd<'_>) -> Result<OpenFile>;

    /// Finds the file that a client has open, as /proc shows it.
    fn file_of_process(&self, _file: ProcessFile) -> Result<OpenFile> {
        Err(CommandFailure::new(Errno::PERM, "only root and the user who opened the image may do this"))
    }

    /// Called before a command that changes something.
    fn note_change(&self) {}

    /// Makes all earlier changes durable.
    fn sync(&self, fs: &Fs) -> ubtrfs_fs::Result<()> {
        fs.sync()
    }

    /// Makes the kernel's caches forget a name that changed. `deleted` is the subvolume that has or had the name, if it
    /// may have been deleted.
    fn forget_name(&self, _dir: InodeId, _name: &[u8], _deleted: Option<RootId>) {}

    /// Makes the kernel's page cache drop a file whose content changed.
    fn forget_data(&self, _id: InodeId) {}

    /// Makes the kernel read the attributes of an inode again.
    fn forget_attributes(&self, _id: InodeId) {}

    /// Whether the kernel keeps the sizes of files itself and ignores the server's sizes (`writeback_cache`), so that
    /// only the kernel makes files longer.
    fn keeps_sizes(&self) -> bool {
        false
    }

    /// Whether the kernel writes an append at the file size that it knows from its own changes and from the attributes
    /// that it requested last. Such a kernel does not notice if the server makes the file longer, so a client must
    /// extend a file through the mount (`file::Response::GrowFirst`).
    fn appends_by_own_size(&self) -> bool {
        false
    }

    /// Waits until the kernel has dropped from its cache the names that commands on this thread changed. Must not be called while the kernel holds
    /// the lock of a directory.
    fn settle(&self) {}

    /// Opens a device that is to join the filesystem, with the rights of this process. `id` is `None` for an NBD export.
    /// Fails if `path` does not lead to the device that the client found there, or, without `force`, if it is a file or an
    /// export with content ([`NamedDevice::has_content`]).
    fn open_device(&self, path: &Path, id: Option<ImageId>, force: bool) -> Result<Arc<dyn Device>> {
        open_device(path, id, force)
    }

    /// Whether the host can open no further device.
    fn is_confined(&self) -> bool {
        false
    }

    /// The host's own counters, as Prometheus text. `names_files` tells whether the text may name files.
    fn stats(&self, _names_files: bool) -> String {
        String::new()
    }
}

/// Opens a device that is to join the filesystem, as [`Host::open_device`] does.
pub fn open_device(path: &Path, id: Option<ImageId>, force: bool) -> Result<Arc<dyn Device>> {
    let shown = escaped(path.as_os_str().as_encoded_bytes());
    let cannot = |text: String| CommandFailure::new(Errno::INVAL, text);
    let device = NamedDevice::open(path, Access::ReadWrite).map_err(|error| match error {
        OpenError::OpenHere { .. } => cannot(format!("{shown} is a device of this filesystem already")),
        error => cannot(error.to_string()),
    })?;
    let place = device.file().map(FileDevice::place).transpose();
    if !place.is_ok_and(|found| found == id.map(ImageId::place)) {
        return Err(cannot(format!(
            "{shown} leads to another file for the server than for you; run the command where the filesystem was mounted"
        )));
    }
    let has_content = || device.has_content().map_err(|error| cannot(format!("cannot read {shown}: {error}")));
    if !force && ubtrfs_transaction::detect(&device).is_ok_and(|found| found.is_none()) && has_content()? {
        let kind = if id.is_some() { "a file" } else { "an export" };
        return Err(CommandFailure::new(
            Errno::EXIST,
            format!("{shown} is {kind} with content; to overwrite it, use -f"),
        ));
    }
    Ok(Arc::new(device))
}

/// An image that is open in this process, without a mount.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlainHost;

impl Host for PlainHost {
    fn owner(&self) -> Option<u32> {
        None
    }

    fn file(&self, _file: BorrowedFd<'_>) -> Result<OpenFile> {
        Err(CommandFailure::new(Errno::BADF, "an image cannot be used with descriptors of other programs"))
    }
}

/// Everything that a command works with.
pub struct CommandContext<'c> {
    /// The filesystem.
    pub fs: &'c Fs,
    /// The mount, or [`PlainHost`] for an image.
    pub host: &'c dyn Host,
    /// The user who runs the command.
    pub caller: &'c CommandCaller,
    /// The files that came with the request.
    pub files: &'c [OpenFile],
    /// The stream that the command reads or writes.
    pub stream: Option<CommandStream<'c>>,
    /// Reports progress and tells whether the command was cancelled.
    pub job: &'c Job,
}

impl std::fmt::Debug for CommandContext<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CommandContext")
            .field("caller", self.caller)
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}

impl CommandContext<'_> {
    /// A file of the request.
    pub fn file(&self, nr: FileNr) -> Result<OpenFile> {
        let missing = || CommandFailure::new(Errno::BADF, format!("the request lacks its file {nr}"));
        self.files.get(usize::from(nr)).copied().ok_or_else(missing)
    }

    /// The inode of a file of the request.
    pub fn inode(&self, nr: FileNr) -> Result<InodeId> {
        self.file(nr).map(|file| file.id)
    }

    /// Whether the caller is the ordinary user who mounted.
    pub fn is_mount_owner(&self) -> bool {
        self.caller.uid() != 0 && self.host.owner() == Some(self.caller.uid())
    }

    /// Whether the caller may administer this filesystem: it has CAP_SYS_ADMIN, or is the ordinary user who mounted.
    pub fn is_admin(&self) -> bool {
        self.caller.is_admin() || self.is_mount_owner()
    }

    /// Succeeds if the caller may administer this filesystem.
    pub fn require_admin(&self) -> Result<()> {
        permit(self.is_admin(), "only root and the user who mounted it may do this")
    }
}

/// Executes a request if its caller has the rights. As on Linux, nothing changes through a read-only mount.
pub fn execute(context: &CommandContext<'_>, request: Request) -> Result<Response> {
    if context.host.may_map_owners() && !context.is_admin() {
        let text = "this mount has the option idmap, so only root and the user who mounted it may run commands";
        return Err(CommandFailure::new(Errno::OPNOTSUPP, text));
    }
    // A device that is added to a seed changes another filesystem.
    let makes_sprout = matches!(request, Request::Device(device::Request::Add(_))) && context.fs.is_seed();
    let is_refused =
        |(nr, file): (usize, &OpenFile)| file.is_read_only_mount && !makes_sprout && request.changes_through(nr);
    if context.files.iter().enumerate().any(is_refused) {
        let has_parity = |flags| Profile::of(flags).is_some_and(Profile::has_parity);
        let text = match context.fs.space_usage().groups.iter().any(|group| has_parity(group.flags)) {
            true => {
                "ubtrfs only reads RAID5 and RAID6, so this filesystem is always read-only; use Linux to change or scrub it"
            }
            false => "this mount of the filesystem is read-only; use a writable one",
        };
        return Err(CommandFailure::new(Errno::ROFS, text));
    }
    if request.changes() {
        context.host.note_change();
    }
    let done = match request {
        Request::Subvolume(request) => subvolume::execute(context, request).map(Response::Subvolume),
        Request::Filesystem(request) => filesystem::execute(context, request).map(Response::Filesystem),
        Request::Device(request) => device::execute(context, request).map(Response::Device),
        Request::Defragment(request) => defragment::execute(context, &request).map(Response::Defragment),
        Request::DiskUsage(request) => disk_usage::execute(context, &request).map(Response::DiskUsage),
        Request::Balance(request) => balance::execute(context, request).map(Response::Balance),
        Request::Scrub(request) => scrub::execute(context, request).map(Response::Scrub),
        Request::Search(request) => search::execute(context, request).map(Response::Search),
        Request::File(request) => file::execute(context, request).map(Response::File),
        Request::Quota(request) => quota::execute(context, request).map(Response::Quota),
        Request::Receive(request) => receive::execute(context, &request).map(Response::Receive),
        Request::Replace(request) => replace::execute(context, request).map(Response::Replace),
        Request::Send(request) => send::execute(context, request).map(Response::Send),
        Request::Resolve(request) => resolve::execute(context, request).map(Response::Resolve),
        Request::Join(request) => join::execute(context, request).map(Response::Join),
        Request::AwaitUnmount => {
            Err(CommandFailure::new(Errno::INVAL, "only the server of a mount can report the end of an unmount"))
        }
    };
    done.map_err(|failure| failure.explained(context.fs))
}
