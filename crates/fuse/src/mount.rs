//! Mounting and unmounting: by mount(2) if this process is permitted to, otherwise through the setuid helper
//! fusermount3.
//!
//! M1. [`check`] runs before the image is opened, and checks the mount point and whether FUSE can be used. M2. The
//! kernel decides who may enter the mount (`allow_other`). The kernel also checks permissions inside the mount
//! (`default_permissions`) unless that is pointless ([`MountConfig::checks_permissions`]). The server answers every
//! request that arrives, including requests of the kernel's own writeback.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg, socketpair,
};

use ubtrfs_device::Device;

use crate::mount_table::{MountInfo, find_mount, mounts};
use crate::other_user;
use crate::submounts;
use crate::subtree;
use crate::transport::{IdlePolling, Transport};

/// The subtype of mounts. `mount` and /proc/mounts show the type `fuse.ubtrfs` or `fuseblk.ubtrfs`.
pub const SUBTYPE: &str = "ubtrfs";

/// The options of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountConfig {
    /// The device in the output of `mount`.
    pub fsname: String,
    /// The part of the type after `fuse.` or `fuseblk.` in the output of `mount`.
    pub subtype: &'static str,
    /// Let other users access the mount.
    pub allow_other: bool,
    /// Have the kernel check permissions even if only root may enter.
    pub default_permissions: bool,
    /// Mount over a directory that is not empty.
    pub nonempty: bool,
    /// Mount read-only.
    pub read_only: bool,
    /// Ignore device files.
    pub nodev: bool,
    /// Ignore set-user-id bits.
    pub nosuid: bool,
    /// Run no programs.
    pub noexec: bool,
    /// Do not update access times.
    pub noatime: bool,
    /// Allow no symbolic link on a way through the mount.
    pub nosymfollow: bool,
    /// Make changes of directories synchronous.
    pub dirsync: bool,
    /// Make writes durable before they return: the kernel adds an fsync to each.
    pub sync: bool,
    /// Options of SELinux, such as `context=...`, for a kernel that has it.
    pub selinux: Vec<String>,
    /// Threads that read requests from /dev/fuse; 0 for the default.
    pub nr_threads: usize,
    /// How requests arrive.
    pub transport: Transport,
    /// Keep a processor awake while requests follow each other closely. In a virtual machine, the polling makes answers
    /// faster, and costs the time of one processor; by default, at most a quarter of its time.
    pub idle_poll: IdlePolling,
    /// Let the kernel collect small writes before it sends them. Off by default, so that a write without space fails at
    /// once. With the writeback cache, the kernel accepts writes without reserving space, and a failure is reported
    /// only at fsync and close.
    pub writeback_cache: bool,
    /// No extended attributes: the kernel then does not ask for `security.capability` before it writes to a file or
    /// changes its owner. Capabilities of files and ACLs have no effect in such a mount.
    pub no_xattrs: bool,
    /// Files are opened and closed without requests. Files that are immutable, append-only or in read-only subvolumes
    /// can then be opened for writing, but the server refuses writes to them (to append-only files: writes without
    /// O_APPEND).
    pub no_open: bool,
    /// Allow idmapped mounts of this mount. Most requests then do not contain the caller's user, so ioctls that need
    /// the caller's user, such as the ioctls on subvolumes, are refused to all users but root.
    pub idmap: bool,
    /// Each subvolume has a mount, and so a device number, of its own (`submounts`). Only root can mount so, and the server
    /// is not confined.
    pub submounts: bool,
    /// The server will be confined: see [`Session::confine`](crate::Session::confine).
    pub sandbox: bool,
    /// The options as the user gave them. A remount compares its options with these.
    pub given: Vec<String>,
}

impl Default for MountConfig {
    fn default() -> Self {
        Self {
            fsname: SUBTYPE.to_owned(),
            subtype: SUBTYPE,
            allow_other: false,
            default_permissions: false,
            nonempty: false,
            read_only: false,
            nodev: false,
            nosuid: false,
            noexec: false,
            noatime: false,
            nosymfollow: false,
            dirsync: false,
            sync: false,
            selinux: Vec::new(),
            nr_threads: 0,
            transport: Transport::Auto,
            idle_poll: IdlePolling::Auto,
            writeback_cache: false,
            no_xattrs: false,
            no_open: false,
            idmap: false,
            submounts: false,
            sandbox: false,
            given: Vec::new(),
        }
    }
}

impl MountConfig {
    /// Whether the kernel checks permissions. A kernel that checks permissions requests a directory's attributes after
    /// each name made or removed in the directory, which is one more request for every file. If only root may enter,
    /// the check is pointless, because root is allowed everything.
    pub fn checks_permissions(&self) -> bool {
        // I3 of `submounts`
        self.allow_other || self.default_permissions || self.submounts || !is_root()
    }

    /// Whether idmapped mounts of this mount are possible. The kernel allows them only if it checks permissions itself.
    pub(crate) fn allows_idmap(&self) -> bool {
        self.idmap && self.checks_permissions()
    }
}

/// The reason why mounting or unmounting failed, as one line that says what to do.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// This kernel or container has no FUSE.
    #[error("/dev/fuse does not exist; load the module with: modprobe fuse (in a container, pass --device /dev/fuse)")]
    NoFuse,
    /// The device node cannot be opened.
    #[error("cannot open /dev/fuse: {0}; ask for access to it, or mount as root")]
    FuseDenied(io::Error),
    /// The helper for ordinary users is missing.
    #[error(
        "fusermount3 was not found, which is needed to mount as an ordinary user; install the package fuse3, or mount as root"
    )]
    NoFusermount,
    /// The helper needs the user's name, but the user has none.
    #[error(
        "fusermount3 refused: user id {0} has no entry in /etc/passwd, which fusermount3 needs; add one, or mount as root"
    )]
    UnknownUser(u32),
    /// The helper fusermount3 refused to mount or unmount.
    #[error("fusermount3 refused: {0}")]
    Fusermount(String),
    /// The mount point does not exist.
    #[error("the mount point {0} does not exist; make it with: mkdir {0}")]
    NoDirectory(String),
    /// The mount point is not a directory.
    #[error("the mount point {0} is not a directory; give an empty directory")]
    NotDirectory(String),
    /// The mount point is not empty.
    #[error("the mount point {0} is not empty; choose an empty directory, or mount over it with -o nonempty")]
    NotEmpty(String),
    /// A filesystem of ubtrfs is mounted on the mount point.
    #[error("{mounted} is mounted on {dir} already; choose another directory, or unmount it with: ubtrfs umount {dir}")]
    Occupied {
        /// The mount point.
        dir: String,
        /// The mounted device.
        mounted: String,
    },
    /// The option `submounts` cannot work.
    #[error("submounts: {0}")]
    Submounts(&'static str),
    /// The mount's server has ended.
    #[error("{0} is a FUSE mount whose server has ended; unmount it first, with: ubtrfs umount {0}, or umount {0}")]
    Dead(String),
    /// The system refused to mount.
    #[error("cannot mount on {dir}: {source}")]
    Mount {
        /// The mount point.
        dir: String,
        /// The reason.
        source: io::Error,
    },
    /// The system refused to change the flags of a mount.
    #[error("cannot change the mount on {dir}: {source}{advice}")]
    Remount {
        /// The mount point.
        dir: String,
        /// The reason.
        source: io::Error,
        /// What to do, as the end of the message, or nothing.
        advice: String,
    },
    /// The kernel and the server did not agree on a protocol.
    #[error("the FUSE session on {dir} failed: {source}")]
    Session {
        /// The mount point.
        dir: String,
        /// The reason.
        source: io::Error,
    },
    /// A path cannot be opened.
    #[error("cannot open {path}: {source}")]
    Open {
        /// The path.
        path: String,
        /// The reason.
        source: io::Error,
    },
    /// The mount admits only the user who mounted it.
    #[error(
        "cannot open {path}: only user {uid}, who mounted {dir}, may enter it; run the command as that user, for example \
         with setpriv --reuid={uid} --regid={gid} --clear-groups, or mount it with -o allow_other"
    )]
    OfOtherUser {
        /// The path.
        path: String,
        /// The mount point.
        dir: String,
        /// The user who mounted.
        uid: u32,
        /// The group of that user.
        gid: u32,
    },
    /// No ubtrfs is mounted on the directory.
    #[error("{0} is not a mount of ubtrfs; see: findmnt -t fuse.ubtrfs,fuseblk.ubtrfs")]
    NotMounted(String),
    /// Another device is mounted on the directory.
    #[error("{mounted} is mounted on {dir}, not {given}; give that device")]
    OtherDevice {
        /// The mount point.
        dir: String,
        /// The mounted device.
        mounted: String,
        /// The device that the caller named.
        given: String,
    },
    /// The mount is in use.
    #[error("{0} is busy; end the programs that use it (see: fuser -vm {0}), or detach it with --lazy")]
    Busy(String),
    /// A mount inside this one is in use, so this one stays too.
    #[error(
        "{dir} is busy: {inside} is mounted inside and in use; end the programs that use it (see: fuser -vm {inside}), \
             unmount it, or detach all with --lazy"
    )]
    BusyInside {
        /// The directory of the mount.
        dir: String,
        /// The directory of the mount inside.
        inside: String,
    },
    /// The system refused to unmount.
    #[error("cannot unmount {dir}: {source}")]
    Unmount {
        /// The mount point.
        dir: String,
        /// The reason.
        source: io::Error,
    },
    /// The filesystem is also in use elsewhere, so the server continues.
    #[error("{dir} is unmounted, but {used}; {committed}; {remedy}")]
    InUseElsewhere {
        /// The mount point.
        dir: String,
        /// The other use.
        used: String,
        /// Whether the server has committed.
        committed: String,
        /// How to end the other use.
        remedy: String,
    },
    /// The final commit failed, or its result is unknown.
    #[error("{dir} is unmounted, but its last changes may be lost: {reason}")]
    NotDurable {
        /// The mount point.
        dir: String,
        /// The reason.
        reason: String,
    },
}

/// Checks whether mounting on `dir` can work, without doing anything (M1). Returns the directory's full path.
pub fn check(dir: &Path, config: &MountConfig) -> Result<PathBuf, MountError> {
    let shown = dir.display().to_string();
    if let Some(reason) = submounts::impossible(config, false) {
        return Err(MountError::Submounts(reason));
    }
    let full = match other_user::full_path(dir) {
        Ok(full) => full,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(MountError::NoDirectory(shown)),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => return Err(MountError::NotDirectory(shown)),
        Err(source) => return Err(unusable(dir, source)),
    };
    let occupied = |mount: Option<MountInfo>| match mount.filter(MountInfo::is_of_ubtrfs) {
        Some(mount) => {
            let mounted = other_user::harmless(&mount.source.display().to_string());
            MountError::Occupied { dir: shown.clone(), mounted }
        }
        None => MountError::NotEmpty(shown.clone()),
    };
    match find_mount(&full).filter(|mount| other_user::other_user_of(mount).is_some()) {
        // The server of another user's mount need not answer, so the mount is not entered.
        Some(mount) if !config.nonempty => return Err(occupied(Some(mount))),
        Some(_) => {}
        None => {
            let metadata = std::fs::metadata(&full).map_err(|source| unusable(dir, source))?;
            if !metadata.is_dir() {
                return Err(MountError::NotDirectory(shown));
            }
            let entries = || std::fs::read_dir(&full).map_err(|source| unusable(dir, source));
            if !config.nonempty && entries()?.next().is_some() {
                return Err(occupied(find_mount(&full)));
            }
        }
    }
    match File::options().read(true).write(true).open("/dev/fuse") {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(MountError::NoFuse),
        Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::NODEV | Errno::NXIO)) => {
            return Err(MountError::NoFuse);
        }
        // An ordinary user need not be able to open the device node, because fusermount3 opens it.
        Err(_) if !is_root() => {}
        Err(error) => return Err(MountError::FuseDenied(error)),
    }
    if !is_root() && find_fusermount().is_none() {
        return Err(MountError::NoFusermount);
    }
    Ok(full)
}

fn unusable(dir: &Path, source: io::Error) -> MountError {
    let dir = dir.display().to_string();
    match source.kind() {
        io::ErrorKind::NotConnected => MountError::Dead(dir),
        _ => MountError::Mount { dir, source },
    }
}

/// Whether this process is root, and so can probably call mount(2).
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Mounts, and returns the descriptor that carries the requests.
pub fn mount(dir: &Path, config: &MountConfig) -> Result<OwnedFd, MountError> {
    Ok(mount_device(dir, config, None, false)?.requests)
}

/// A new mount.
#[derive(Debug)]
pub(crate) struct NewMount {
    /// The descriptor that carries the requests.
    pub(crate) requests: OwnedFd,
    /// The root directory of a mount that is on no directory yet.
    pub(crate) detached: Option<OwnedFd>,
    /// Whether the mount has the type `fuseblk`; if not, although a block device was given, the reason.
    pub(crate) is_fuseblk: Result<bool, String>,
}

/// Mounts. A mount of a block device gets the type `fuseblk` if possible; `fsname` must then be the device's path. With
/// `detached`, the new mount is on no directory yet, and `dir` only appears in errors.
pub(crate) fn mount_device(
    dir: &Path,
    config: &MountConfig,
    block_device: Option<&dyn Device>,
    detached: bool,
) -> Result<NewMount, MountError> {
    if is_root() || detached {
        match mount_directly(dir, config, block_device, detached) {
            // Root may lack the capability to mount, as in some containers; then fusermount3 is tried.
            Err(MountError::Mount { source, .. })
                if source.kind() == io::ErrorKind::PermissionDenied && !detached && find_fusermount().is_some() => {}
            other => return other,
        }
    }
    let requests = mount_by_helper(dir, config)?;
    let is_fuseblk = block_device.map_or(Ok(false), |_| Err("fusermount3 cannot mount with this type".to_owned()));
    Ok(NewMount { requests, detached: None, is_fuseblk })
}

/// Returns those flags of `config` that the kernel itself enforces.
fn mount_flags(config: &MountConfig) -> MountFlags {
    let mut flags = MountFlags::empty();
    for (wanted, flag) in [
        (config.read_only, MountFlags::RDONLY),
        (config.nodev, MountFlags::NODEV),
        (config.nosuid, MountFlags::NOSUID),
        (config.noexec, MountFlags::NOEXEC),
        (config.noatime, MountFlags::NOATIME),
        (config.nosymfollow, MountFlags::NOSYMFOLLOW),
        (config.dirsync, MountFlags::DIRSYNC),
        (config.sync, MountFlags::SYNCHRONOUS),
    ] {
        flags.set(flag, wanted);
    }
    flags
}

/// The device, flags and options of an existing mount.
#[derive(Debug)]
pub struct Mounted {
    /// The mount point.
    pub dir: PathBuf,
    /// The mount's flags; other fields have default values.
    pub config: MountConfig,
    /// The user who mounted, if this is neither the user of this process nor root. The server of such a mount need not
    /// answer.
    pub other_user: Option<u32>,
    info: MountInfo,
}

/// Which flags a remount changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemountScope {
    /// The flags of one mount.
    Mount,
    /// These, and those that all mounts of the filesystem share: ro, sync and dirsync.
    Filesystem,
}

/// The flags of a mount; other fields have default values.
fn config_of(info: &MountInfo) -> MountConfig {
    let has = |flag: &str| info.options.iter().any(|option| option == flag);
    MountConfig {
        read_only: has("ro"),
        nodev: has("nodev"),
        nosuid: has("nosuid"),
        noexec: has("noexec"),
        noatime: has("noatime"),
        nosymfollow: has("nosymfollow"),
        dirsync: has("dirsync"),
        sync: has("sync"),
        ..MountConfig::default()
    }
}

impl Mounted {
    /// Finds the mount of ubtrfs at `dir`.
    ///
    /// # Errors
    ///
    /// Fails if something else or nothing is mounted on `dir`.
    pub fn find(dir: &Path) -> Result<Self, MountError> {
        let not_mounted = || MountError::NotMounted(dir.display().to_string());
        let full = other_user::full_path(dir).map_err(|source| unusable(dir, source))?;
        let info = find_mount(&full).filter(MountInfo::is_of_ubtrfs).ok_or_else(not_mounted)?;
        let config = config_of(&info);
        let other_user = other_user::other_user_of(&info);
        Ok(Self { dir: full, config, other_user, info })
    }

    /// The device, as the table of mounts names it.
    pub fn source(&self) -> PathBuf {
        PathBuf::from(&self.info.source)
    }

    /// Whether /proc/mounts shows this option.
    pub fn shows(&self, option: &str) -> bool {
        self.info.options.iter().any(|shown| shown == option)
    }

    /// Changes the flags of the mount to the flags of `config`, as `mount -o remount` does. The server's own settings
    /// stay unchanged. `scope` says whether flags of the whole filesystem change too.
    ///
    /// # Errors
    ///
    /// Fails if another device is mounted, or if the kernel refuses the change.
    pub fn remount(&self, device: &Path, scope: RemountScope) -> Result<(), MountError> {
        let same_file = || std::fs::canonicalize(device).is_ok_and(|full| full.as_os_str() == self.info.source);
        if device.as_os_str() != self.info.source && !same_file() {
            return Err(MountError::OtherDevice {
                dir: self.dir.display().to_string(),
                mounted: other_user::harmless(&Path::new(&self.info.source).display().to_string()),
                given: device.display().to_string(),
            });
        }
        let failed = |source: io::Error| {
            let dir = self.dir.display().to_string();
            let is_busy = Errno::from_io_error(&source) == Some(Errno::BUSY);
            let advice = if is_busy { submounts::open_for_writing(&dir) } else { String::new() };
            MountError::Remount { dir, source, advice }
        };
        // Q3 of `other_user.rs`
        let point = other_user::MountPoint::open(&self.info).map_err(failed)?;
        let bind = match scope {
            RemountScope::Mount => MountFlags::BIND,
            RemountScope::Filesystem => MountFlags::empty(),
        };
        let remount = |config: &MountConfig| {
            rustix::mount::mount_remount(point.path(), mount_flags(config) | bind, c"").map_err(io::Error::from)
        };
        let undo = || drop(remount(&config_of(&self.info)));
        submounts::remount(&self.info, self.config.read_only, || remount(&self.config), undo).map_err(failed)
    }
}

fn mount_directly(
    dir: &Path,
    config: &MountConfig,
    block_device: Option<&dyn Device>,
    detached: bool,
) -> Result<NewMount, MountError> {
    let failed = |source: io::Error| MountError::Mount { dir: dir.display().to_string(), source };
    let device = File::options().read(true).write(true).open("/dev/fuse").map_err(MountError::FuseDenied)?;
    let data = kernel_options(&device, config);
    let mount_as = |kind: &str, data: String| {
        if detached {
            return subtree::mount_detached(kind, &data, config).map(Some).map_err(failed);
        }
        let data = CString::new(data).map_err(|_| failed(io::ErrorKind::InvalidInput.into()))?;
        let kind = format!("{kind}.{}", config.subtype);
        rustix::mount::mount(config.fsname.as_str(), dir, kind.as_str(), mount_flags(config), data.as_c_str())
            .map_err(|errno| failed(errno.into()))?;
        Ok(None)
    };
    let mut is_fuseblk = Ok(false);
    if let Some(block_device) = block_device {
        block_device.release_claim();
        // Retry while the device is busy, because device managers and losetup claim block devices for short times.
        let mut nr_tries = 0;
        let mounted = loop {
            match mount_as("fuseblk", format!("{data},blksize={BLOCK_BYTES}")) {
                Err(MountError::Mount { source, .. })
                    if Errno::from_io_error(&source) == Some(Errno::BUSY) && nr_tries < BUSY_TRIES => {}
                mounted => break mounted,
            }
            nr_tries += 1;
            std::thread::sleep(BUSY_PAUSE);
        };
        is_fuseblk = match mounted {
            Ok(detached) => return Ok(NewMount { requests: device.into(), detached, is_fuseblk: Ok(true) }),
            // Some kernels refuse to mount a device that any process has open for writing.
            Err(error) => Err(error.to_string()),
        };
        block_device.claim().map_err(failed)?;
    }
    let detached = mount_as("fuse", data)?;
    Ok(NewMount { requests: device.into(), detached, is_fuseblk })
}

/// The options of a mount for the kernel's FUSE. `device` is the open /dev/fuse that carries the requests.
pub(crate) fn kernel_options(device: impl AsFd, config: &MountConfig) -> String {
    let mut data = format!(
        "fd={},rootmode=40000,user_id={},group_id={}",
        device.as_fd().as_raw_fd(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    if config.checks_permissions() {
        data.push_str(",default_permissions");
    }
    if config.allow_other {
        data.push_str(",allow_other");
    }
    config.selinux.iter().for_each(|option| data.extend([",", option]));
    data
}

/// Size of the blocks in which the kernel would access the device of a `fuseblk` mount. The size has no effect, because
/// the kernel does not access the device.
const BLOCK_BYTES: u32 = 4096;

fn mount_by_helper(dir: &Path, config: &MountConfig) -> Result<OwnedFd, MountError> {
    let failed = |source: io::Error| MountError::Mount { dir: dir.display().to_string(), source };
    let helper = find_fusermount().ok_or(MountError::NoFusermount)?;
    // The helper inherits `theirs` on purpose: it sends the descriptor of /dev/fuse through this socket to `ours`.
    let (theirs, ours) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::empty(), None)
        .map_err(|errno| failed(errno.into()))?;
    rustix::io::fcntl_setfd(&ours, rustix::io::FdFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
    let child = Command::new(helper)
        .arg("-o")
        .arg(helper_options(config))
        .arg("--")
        .arg(dir)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    drop(theirs);
    let device = receive_descriptor(&ours);
    let output = child.wait_with_output().map_err(failed)?;
    match device {
        Ok(Some(device)) if output.status.success() => Ok(device),
        _ => {
            let text = String::from_utf8_lossy(&output.stderr);
            let line = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no reason given");
            Err(refused_by_helper(line))
        }
    }
}

fn helper_options(config: &MountConfig) -> String {
    // fusermount3 separates options by commas, and a backslash in a name escapes the next character.
    let fsname = config.fsname.replace('\\', "\\\\").replace(',', "\\,");
    let mut options = format!("fsname={fsname},subtype={}", config.subtype);
    for (wanted, option) in [
        (config.checks_permissions(), ",default_permissions"),
        (config.allow_other, ",allow_other"),
        (config.read_only, ",ro"),
        (config.noexec, ",noexec"),
        (config.noatime, ",noatime"),
        (config.nosymfollow, ",nosymfollow"),
        (config.dirsync, ",dirsync"),
        (config.sync, ",sync"),
    ] {
        if wanted {
            options.push_str(option);
        }
    }
    config.selinux.iter().for_each(|option| options.extend([",", option]));
    options
}

fn receive_descriptor(socket: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0];
    let mut space = [const { MaybeUninit::<u8>::uninit() }; rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let found = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Ok(found)
}

/// Finds the setuid helper, also in the usual directories that PATH may lack.
fn find_fusermount() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let fixed = ["/usr/bin", "/bin", "/usr/local/bin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(fixed).map(|dir| dir.join("fusermount3")).find(|file| file.is_file())
}

/// Unmounts. With `lazy`, the mount disappears from the directory at once, and ends when no program uses it any more.
///
/// Retries for half a second while the mount is busy: a process that has been forked and has not called exec yet keeps
/// its parent's files open.
pub(crate) fn unmount(dir: &Path, lazy: bool) -> Result<(), MountError> {
    for _ in 0..BUSY_TRIES {
        match unmount_once(dir, lazy) {
            Err(MountError::Busy(_)) => std::thread::sleep(BUSY_PAUSE),
            done => return done,
        }
    }
    unmount_once(dir, lazy)
}

pub(crate) const BUSY_TRIES: u32 = 10;
pub(crate) const BUSY_PAUSE: std::time::Duration = std::time::Duration::from_millis(50);

/// Tries once to unmount.
pub(crate) fn unmount_once(dir: &Path, lazy: bool) -> Result<(), MountError> {
    let shown = || dir.display().to_string();
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(dir, flags | UnmountFlags::NOFOLLOW) {
        Ok(()) => return Ok(()),
        Err(rustix::io::Errno::BUSY) => return Err(MountError::Busy(shown())),
        // Another process has unmounted it meanwhile.
        Err(rustix::io::Errno::INVAL) => return Err(MountError::NotMounted(shown())),
        Err(rustix::io::Errno::PERM) => {}
        Err(errno) => return Err(MountError::Unmount { dir: shown(), source: errno.into() }),
    }
    let helper = find_fusermount().ok_or(MountError::NoFusermount)?;
    let mut command = Command::new(helper);
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    let output = command
        .arg("--")
        .arg(dir)
        .stdin(Stdio::null())
        .env("LC_ALL", "C")
        .output()
        .map_err(|source| MountError::Unmount { dir: shown(), source })?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if text.contains("busy") { Err(MountError::Busy(shown())) } else { Err(refused_by_helper(&text)) }
}

fn refused_by_helper(text: &str) -> MountError {
    if text.contains("could not determine username") {
        return MountError::UnknownUser(rustix::process::getuid().as_raw());
    }
    if text.contains("not found in /etc/mtab") {
        return MountError::Fusermount("another user mounted it; do it as that user or as root".to_owned());
    }
    MountError::Fusermount(text.trim_start_matches("fusermount3: ").to_owned())
}

/// Makes the error for a path that cannot be opened. The error tells if the path is in a mount whose server has ended, or
/// that admits only another user.
pub fn cannot_open(path: &Path, source: io::Error) -> MountError {
    if has_server_ended(&source) {
        return failed_in_mount(path, source);
    }
    if source.kind() == io::ErrorKind::PermissionDenied
        && let Some(found) = fuse_mount_of(path)
        && let Some((uid, gid)) = found.admitted_user().filter(|(uid, _)| *uid != rustix::process::geteuid())
    {
        let (path, dir) = (path.display().to_string(), found.dir.display().to_string());
        return MountError::OfOtherUser { path, dir, uid: uid.as_raw(), gid: gid.as_raw() };
    }
    MountError::Open { path: path.display().to_string(), source }
}

/// The FUSE mount that holds a path, found without entering the mount.
fn fuse_mount_of(path: &Path) -> Option<MountInfo> {
    let full = std::path::absolute(path).ok()?;
    // The directories above the mount point may be symbolic links.
    let known = full.ancestors().find_map(|dir| Some((std::fs::canonicalize(dir).ok()?, full.strip_prefix(dir).ok()?)));
    let full = known.map(|(dir, rest)| dir.join(rest))?;
    let found = mounts().into_iter().filter(|mount| full.starts_with(&mount.dir) && mount.kind.starts_with("fuse"));
    found.max_by_key(|mount| mount.dir.as_os_str().len())
}

/// Makes the error for a failed call on a path in a mount. The error tells whether the mount's server has ended.
pub(crate) fn failed_in_mount(path: &Path, source: io::Error) -> MountError {
    if !has_server_ended(&source) {
        return MountError::Session { dir: path.display().to_string(), source };
    }
    let dir = fuse_mount_of(path).map_or_else(|| path.to_owned(), |mount| mount.dir);
    MountError::Dead(dir.display().to_string())
}

/// Whether the error of a call in a mount means that its server has ended.
pub(crate) fn has_server_ended(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotConnected | io::ErrorKind::ConnectionAborted)
}

/// Raises the kernel's read-ahead from 128 KiB, so that sequential reads need fewer requests: the kernel sends one
/// request for each piece that it reads ahead. Only root may set the read-ahead, and only after the kernel knows the
/// server's limits. A failure only makes reading slower, so it is logged and ignored. `device` is the filesystem's number
/// (`st_dev`).
pub(crate) fn set_read_ahead(device: u64, is_fuseblk: bool) {
    let kind = if is_fuseblk { "-fuseblk" } else { "" };
    let name = format!("{}:{}{kind}", rustix::fs::major(device), rustix::fs::minor(device));
    let file = Path::new("/sys/class/bdi").join(name).join("read_ahead_kb");
    if let Err(error) = std::fs::write(&file, READ_AHEAD_KIB.to_string()) {
        tracing::debug!("{}: {error}", file.display());
    }
}

/// The read-ahead to set: the size of the largest request that kernels make by default.
const READ_AHEAD_KIB: u32 = crate::server::MAX_WRITE >> 10;

/// The largest write request that the kernel makes: 1 MiB, or up to 4 MiB if root raised the limit for all FUSE servers
/// (`sysctl fs.fuse.max_pages_limit`, Linux 6.13).
pub(crate) fn max_write() -> u32 {
    max_write_by(&std::fs::read_to_string("/proc/sys/fs/fuse/max_pages_limit").unwrap_or_default())
}

fn max_write_by(max_pages_limit: &str) -> u32 {
    const MAX: u32 = 4 << 20;
    let pages: u32 = max_pages_limit.trim().parse().unwrap_or(0);
    pages.saturating_mul(4096).clamp(crate::server::MAX_WRITE, MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_mounts_are_refused_in_advance() {
        let config = MountConfig::default();
        let missing = check(Path::new("/nonexistent/dir"), &config).unwrap_err().to_string();
        assert!(missing.contains("mkdir /nonexistent/dir"), "{missing}");
        let file = check(Path::new("/etc/passwd"), &config).unwrap_err().to_string();
        assert!(file.contains("not a directory"), "{file}");
        let full = check(Path::new("/etc"), &config).unwrap_err().to_string();
        assert!(full.contains("nonempty"), "{full}");
    }

    #[test]
    fn requests_are_as_large_as_the_kernel_allows() {
        let limits = ["", "16\n", "256\n", "512\n", "65535\n"].map(max_write_by);
        assert_eq!(limits, [1 << 20, 1 << 20, 1 << 20, 2 << 20, 4 << 20]);
    }

    #[test]
    fn commas_in_names_are_escaped_for_the_helper() {
        let config = MountConfig { fsname: "a,b\\c".into(), ..MountConfig::default() };
        assert!(helper_options(&config).starts_with("fsname=a\\,b\\\\c,subtype=ubtrfs"));
    }
}
