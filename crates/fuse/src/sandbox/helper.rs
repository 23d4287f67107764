//! [`PrivilegedHelper`]: the process that acts for a confined server, which has given up the rights to act itself.
//!
//! ```text
//! server: starts the helper --> mounts --MOUNTED--> confines itself --questions--> ends
//! helper: limits itself -----------------> remembers the mount ----answers-------> ends with the server
//! ```
//!
//! If the mount shows one subvolume of several (`subtree.rs`), the server starts the helper after it has made the
//! mount, and the helper puts the mount on its directory before it limits itself. The helper gets the mount as its
//! standard error, so that no other process inherits the mount.
//!
//! A crafted image may have taken over the server, so questions are untrusted.
//!
//! - H1. The helper unmounts only mounts of one filesystem: the filesystem of the mount that was on the directory when
//!   the server asked [`MOUNTED`], or that the helper put there. It unmounts no other mount: neither a mount that
//!   covers a mount of this filesystem, nor a mount that later has the directory or the number of such a mount. A
//!   device number does not identify a filesystem, because Linux gives it to another filesystem after the last unmount.
//!   So the helper remembers mounts of the filesystem that it has seen. While one of these mounts exists, all mounts
//!   with the device number belong to the filesystem. It answers [`MOUNTED`] once.
//! - H2. About processes, the helper tells what /proc shows to every user (groups, umask, capabilities, the processor,
//!   a pending kill). About open files, it tells more only for files of the mount; about other files, it tells only
//!   that they are open.
//! - H3. It moves only threads of the server to other processors, and claims only the device that it was started for.
//! - H4. It refuses unknown questions. No question has the effect of another question.
//! - H5. A helper of root keeps only the capabilities [`KEPT`], cannot get others, and its seccomp filter allows only the
//!   calls that it needs. An ordinary user's helper has no rights to give up: it needs the setuid program fusermount3.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::unistd::setgroups;
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CapabilitySet, CapabilitySets, CpuSet};
use ubtrfs_control::{FileId, LocalProcesses, ProcessFile, Processes};

use super::filter;
use crate::lent_device::LentPlace;
use crate::mount::{self, MountError};
use crate::mount_table::{self, MountInfo};
use crate::other_user::MountPoint;
use crate::remaining_mounts;
use crate::subtree::{DetachedMount, PlacedMount};

/// A process that acts for the confined server (X4): it unmounts one mount, claims one block device, moves threads of
/// the server, and looks up groups, umasks, capabilities and open files of processes.
///
/// A question or request consists of one byte for its kind and three numbers of four bytes each. An answer has two
/// bytes; the answers to [`PLACED`] and [`FILE`] have more.
#[derive(Debug)]
pub struct PrivilegedHelper {
    child: Mutex<Child>,
}

/// Request: remember the mount that is on the directory now. The answer is "ok", or [`UNLIMITED`].
const MOUNTED: u8 = b'm';
/// Question: has the helper put the mount on its directory? The answer "ok", or [`UNLIMITED`], is followed by the
/// filesystem's device number and the number of the mount, 8 bytes each. Another answer is an error number.
const PLACED: u8 = b's';
/// Request: look at the mounts of the filesystem, because there are new mounts.
const LOOK: u8 = b'o';
/// Request: unmount lazily.
const LAZY: u8 = b'l';
/// Request: unmount.
const PLAIN: u8 = b'p';
/// Question: is the process in the group, and are all its user ids equal to the given id? With [`ANYBODY`], the user
/// ids do not matter.
const GROUP: u8 = b'g';
/// Question: the umask of the process.
const UMASK: u8 = b'u';
/// Question: does the process have the capability?
const CAPABILITY: u8 = b'c';
/// Question: which file of the mount does the process, of this user or [`ANYBODY`], have open as the descriptor? The
/// answer "ok" is followed by the device, the inode, and the bits [`READABLE`], [`WRITABLE`] and [`READ_ONLY_MOUNT`], 8
/// bytes each.
const FILE: u8 = b'f';
/// Question: is every file that the process has open on the device of the mount (two numbers, the low half first) open
/// through a read-only mount?
const READ_ONLY: u8 = b'r';
/// Question: is the thread being killed?
const DYING: u8 = b'k';
/// Question: on which processor did the thread run last?
const PROCESSOR: u8 = b'n';
/// Request: let the thread of the server run only on the processor or, with [`EVERYWHERE`], on the processors of the
/// server's first thread.
const MOVE: u8 = b'a';
/// Request: claim the block device with this number (the low half first). After the answer "ok", the helper has the
/// claim.
const TAKE_DEVICE: u8 = b'd';
const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
const READ_ONLY_MOUNT: u64 = 4;
/// No user has this id.
const ANYBODY: u32 = u32::MAX;
/// No processor has this number.
const EVERYWHERE: u32 = u32::MAX;
/// How long a thread waits for a helper that is busy before it gives up moving another thread. It may not wait for long:
/// a helper that unmounts may be waiting for this thread.
const MOVE_PATIENCE: Duration = Duration::from_millis(5);
/// The answer "yes"; every umask and every number of a processor is smaller.
const YES: u16 = u16::from_le_bytes(*b"ok");
const NO: u16 = u16::from_le_bytes(*b"no");
/// The answer to an unmount if the filesystem is not mounted.
const GONE: u16 = u16::from_le_bytes(*b"go");
/// The answer to [`FILE`] if the file is not of the mount.
const ELSEWHERE: u16 = u16::from_le_bytes(*b"el");
/// The answer "yes" of a helper that could not give up its rights.
const UNLIMITED: u16 = u16::from_le_bytes(*b"un");
const UNKNOWN: u16 = u16::from_le_bytes(*b"??");

/// Stands for a file about which the helper tells nothing. No device has this number.
const NOT_OF_MOUNT: ProcessFile = ProcessFile {
    id: FileId { device: u64::MAX, ino: 0 },
    is_readable: false,
    is_writable: false,
    is_read_only_mount: true,
};

/// The capabilities of root's helper: to unmount, to see the descriptors of other users' processes, to reach the device
/// and the mount point, and to move the threads of a server that runs as another user.
const KEPT: CapabilitySet = CapabilitySet::SYS_ADMIN
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::SYS_NICE);

impl PrivilegedHelper {
    /// Starts the process; `command` must run a program that calls [`serve_unmounts`]. With `placement`, the process puts
    /// the mount on its directory, and gets the path of its subvolume with the option `--subtree`.
    pub fn start(mut command: Command, placement: Option<DetachedMount>) -> io::Result<Self> {
        let stderr = match placement {
            Some(DetachedMount { top, path, .. }) => {
                let mut option = OsString::from("--subtree=");
                option.push(OsStr::from_bytes(&path));
                command.arg(option);
                Stdio::from(top)
            }
            None => Stdio::null(),
        };
        // The helper gets a process group of its own, because signals from the terminal are meant for the server.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr);
        Ok(Self { child: Mutex::new(command.spawn()?) })
    }

    /// Tells the process that the directory is mounted now, so that it can unmount this mount later. Must be called
    /// before confinement. Returns what the process could not give up.
    pub(crate) fn mounted(&self) -> Result<(), String> {
        match self.ask(MOUNTED, [0; 3]) {
            Ok(YES) => Ok(()),
            Ok(UNLIMITED) => Err(UNLIMITED_TEXT.to_owned()),
            Ok(_) => Err("its helper process does not find the mount, so it will not unmount".to_owned()),
            Err(error) => Err(format!("its helper process has ended: {error}")),
        }
    }

    /// Waits until the process has put the mount on its directory. Calls `asked` when no other question can come before.
    /// Returns the number of the mount, and what the process could not give up.
    pub(crate) fn placed(&self, asked: impl FnOnce()) -> io::Result<(u64, Vec<String>)> {
        let mut child = self.child.lock();
        asked();
        let answer = ask(&mut child, PLACED, [0; 3])?;
        if !matches!(answer, YES | UNLIMITED) {
            let failed = || io::Error::other("its helper process did not mount it");
            return Err(if answer == NO { failed() } else { io::Error::from_raw_os_error(answer.into()) });
        }
        let missing = (answer == UNLIMITED).then(|| UNLIMITED_TEXT.to_owned());
        let [_, key] = read_numbers(&mut child).ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok((key, missing.into_iter().collect()))
    }

    /// Tells the process that there are new mounts of the filesystem.
    pub(crate) fn note_mounts(&self) {
        let _ = self.ask(LOOK, [0; 3]);
    }

    /// Unmounts all mounts of the filesystem on behalf of the server.
    pub(crate) fn unmount(&self, dir: &Path, lazy: bool) -> Result<(), MountError> {
        let failed = |source| MountError::Session { dir: dir.display().to_string(), source };
        match self.ask(if lazy { LAZY } else { PLAIN }, [0; 3]) {
            Ok(YES) => Ok(()),
            Ok(GONE) => Err(MountError::NotMounted(dir.display().to_string())),
            Ok(_) => Err(failed(io::Error::other("it is in use, or may not be unmounted"))),
            Err(source) => Err(failed(source)),
        }
    }

    /// Whether a process is in the supplementary group `gid` and, if `uid` is given, whether all its user ids are
    /// `uid`.
    pub(crate) fn is_in_group(&self, pid: u32, gid: u32, uid: Option<u32>) -> bool {
        self.ask(GROUP, [pid, gid, uid.unwrap_or(ANYBODY)]).is_ok_and(|answer| answer == YES)
    }

    /// Whether a process has a capability; `None` if the answer is unknown.
    pub(crate) fn has_capability(&self, pid: u32, capability: u32) -> Option<bool> {
        self.ask_whether(CAPABILITY, [pid, capability, 0])
    }

    /// Whether every file that a process has open on a device is open through a read-only mount; `None` if the process
    /// has no such file, or if the answer is unknown.
    pub(crate) fn is_read_only_for(&self, pid: u32, device: u64) -> Option<bool> {
        let [low, high] = halves(device);
        self.ask_whether(READ_ONLY, [pid, low, high])
    }

    /// Whether a thread is being killed; `None` if the answer is unknown.
    pub(crate) fn is_dying(&self, pid: u32) -> Option<bool> {
        self.ask_whether(DYING, [pid, 0, 0])
    }

    /// The processor on which a thread ran last; `None` if it is unknown, or if the helper is busy. A helper that
    /// unmounts may be waiting for the thread that asks.
    pub(crate) fn processor_of(&self, thread: u32) -> Option<usize> {
        if thread == 0 {
            return None;
        }
        let answer = ask(&mut *self.child.try_lock()?, PROCESSOR, [thread, 0, 0]).ok()?;
        (answer != UNKNOWN).then_some(usize::from(answer))
    }

    /// Lets a thread of this process run only on `processors`: one processor, or the processors of the first thread of
    /// the process. Returns false if the thread does not move, for example because the helper is busy.
    pub(crate) fn move_thread(&self, thread: Pid, processors: &CpuSet) -> bool {
        let only = (0..CpuSet::MAX_CPU).find(|nr| processors.is_set(*nr)).filter(|_| processors.count() == 1);
        let place = only.and_then(|nr| u32::try_from(nr).ok()).unwrap_or(EVERYWHERE);
        let is_everywhere = || rustix::thread::sched_getaffinity(Some(rustix::process::getpid())) == Ok(*processors);
        if place == EVERYWHERE && !is_everywhere() {
            return false;
        }
        let thread = thread.as_raw_nonzero().get().cast_unsigned();
        let Some(mut child) = self.child.try_lock_for(MOVE_PATIENCE) else { return false };
        ask(&mut child, MOVE, [thread, place, 0]).is_ok_and(|answer| answer == YES)
    }

    /// Claims the block device, or keeps the mount that has the claim, until this value is dropped.
    pub(crate) fn take_device(&self, rdev: u64) -> io::Result<()> {
        let [low, high] = halves(rdev);
        match self.ask(TAKE_DEVICE, [0, low, high])? {
            YES => Ok(()),
            _ => Err(io::Error::from(io::ErrorKind::ResourceBusy)),
        }
    }

    /// The umask of a process.
    pub(crate) fn umask_of(&self, pid: u32) -> Option<u32> {
        self.ask(UMASK, [pid, 0, 0]).ok().map(u32::from).filter(|umask| *umask <= 0o777)
    }

    /// The file that a process of this user has open under a descriptor number; [`NOT_OF_MOUNT`] for files outside the
    /// mount.
    pub(crate) fn file_of(&self, pid: u32, descriptor: u32, uid: Option<u32>) -> Option<ProcessFile> {
        let mut child = self.child.lock();
        match ask(&mut child, FILE, [pid, descriptor, uid.unwrap_or(ANYBODY)]).ok()? {
            YES => {}
            ELSEWHERE => return Some(NOT_OF_MOUNT),
            _ => return None,
        }
        let [device, ino, bits] = read_numbers(&mut child)?;
        Some(ProcessFile {
            id: FileId { device, ino },
            is_readable: bits & READABLE != 0,
            is_writable: bits & WRITABLE != 0,
            is_read_only_mount: bits & READ_ONLY_MOUNT != 0,
        })
    }

    fn ask_whether(&self, kind: u8, numbers: [u32; 3]) -> Option<bool> {
        match self.ask(kind, numbers).ok()? {
            YES => Some(true),
            NO => Some(false),
            _ => None,
        }
    }

    /// Asks one question at a time, so other questions wait while the helper unmounts. This cannot deadlock: while
    /// programs use the mount, unmounting fails within a second, and otherwise no program makes requests.
    fn ask(&self, kind: u8, numbers: [u32; 3]) -> io::Result<u16> {
        ask(&mut self.child.lock(), kind, numbers)
    }
}

fn ask(child: &mut Child, kind: u8, numbers: [u32; 3]) -> io::Result<u16> {
    let (Some(to), Some(from)) = (&mut child.stdin, &mut child.stdout) else {
        return Err(io::Error::from(io::ErrorKind::BrokenPipe));
    };
    let mut question = [kind; 13];
    question[1..].copy_from_slice(numbers.map(u32::to_le_bytes).as_flattened());
    to.write_all(&question)?;
    let mut answer = [0; 2];
    from.read_exact(&mut answer)?;
    Ok(u16::from_le_bytes(answer))
}

/// The numbers that follow an answer.
/// A file as the numbers of the answer to [`FILE`].
fn numbers_of(file: &ProcessFile) -> Vec<u64> {
    let flags =
        [(file.is_readable, READABLE), (file.is_writable, WRITABLE), (file.is_read_only_mount, READ_ONLY_MOUNT)];
    let bits = flags.iter().filter(|(is_set, _)| *is_set).fold(0, |bits, (_, bit)| bits | bit);
    vec![file.id.device, file.id.ino, bits]
}

fn read_numbers<const N: usize>(child: &mut Child) -> Option<[u64; N]> {
    let mut numbers = [[0; 8]; N];
    child.stdout.as_mut()?.read_exact(numbers.as_flattened_mut()).ok()?;
    Some(numbers.map(u64::from_le_bytes))
}

const UNLIMITED_TEXT: &str = "its helper process keeps all rights of root";

fn halves(number: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = number.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}

/// Runs the helper process for the mount of `device` on `dir`: answers questions from standard input on standard output
/// until the server, which must be the parent process, is gone. If `subtree` is given, standard error is a mount of the top
/// level, and the helper first puts its subvolume with this path on `dir`.
pub fn serve_unmounts(device: &Path, dir: &Path, subtree: Option<&OsStr>) {
    let placed = match subtree.map(|path| place(path, dir)) {
        // The mount must not stay open (P1 of `subtree.rs`).
        Some(Err(PlaceError::StillOpen)) => return,
        Some(Err(PlaceError::Failed(error))) => Some(Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))),
        Some(Ok(placed)) => Some(Ok(placed)),
        None => None,
    };
    let Some(mut helper) = HelperState::new(device, dir, placed) else { return };
    let (mut ask, mut answer) = (io::stdin().lock(), io::stdout().lock());
    let mut kind = [0];
    let mut numbers = [[0; 4]; 3];
    while ask.read_exact(&mut kind).and_then(|()| ask.read_exact(numbers.as_flattened_mut())).is_ok() {
        let [kind] = kind;
        let (answered, more) = helper.answer(kind, numbers.map(u32::from_le_bytes));
        let mut bytes = answered.to_le_bytes().to_vec();
        more.iter().for_each(|number| bytes.extend(number.to_le_bytes()));
        if answer.write_all(&bytes).and_then(|()| answer.flush()).is_err() {
            return;
        }
    }
}

enum PlaceError {
    StillOpen,
    Failed(io::Error),
}

/// Puts the mount that is standard error on its directory.
fn place(path: &OsStr, dir: &Path) -> Result<PlacedMount, PlaceError> {
    // The kernel takes a mount apart that is on no directory when its first open file is closed, so another open does not
    // keep it.
    let top = io::stderr().as_fd().try_clone_to_owned();
    let null = rustix::fs::open("/dev/null", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
    null.and_then(rustix::stdio::dup2_stderr).map_err(|_| PlaceError::StillOpen)?;
    let top = top.map_err(PlaceError::Failed)?;
    DetachedMount { top, path: path.as_bytes().to_vec(), dir: dir.to_owned() }.place().map_err(PlaceError::Failed)
}

/// The state of the helper process.
#[derive(Debug)]
struct HelperState {
    device: PathBuf,
    /// The number of the device, if it is a block device.
    rdev: Option<u64>,
    dir: PathBuf,
    server: Pid,
    is_limited: bool,
    filesystem: Option<OwnFilesystem>,
    /// The mount that this process put on its directory, until the server is told.
    placed: Option<Result<PlacedMount, Errno>>,
    /// The claim of the device, or the mount that has it.
    taken: Option<std::fs::File>,
}

/// The filesystem whose mounts the helper may unmount (H1).
#[derive(Debug)]
struct OwnFilesystem {
    /// The number of the filesystem (`st_dev`).
    device: u64,
    /// The mounts that were there when the helper looked last.
    known: Vec<PlacedMount>,
}

/// The mounts of the filesystem that the helper finds.
enum Seen {
    /// The mounts of the filesystem.
    Mounts(Vec<MountInfo>),
    /// Other mounts cover the mounts that the helper knows.
    Covered,
    /// No mount that the helper knows is left.
    Nothing,
}

impl HelperState {
    /// Gives up what the process does not need (H5).
    fn new(device: &Path, dir: &Path, placed: Option<Result<PlacedMount, Errno>>) -> Option<Self> {
        let rdev = std::fs::metadata(device).ok().map(|meta| meta.rdev()).filter(|rdev| *rdev != 0);
        let (device, dir, server) = (device.to_owned(), dir.to_owned(), rustix::process::getppid()?);
        let is_limited = !mount::is_root() || limit().is_ok();
        let own = placed.and_then(Result::ok);
        let filesystem = own.map(|placed| OwnFilesystem { device: placed.device, known: vec![placed] });
        Some(Self { device, rdev, dir, server, is_limited, filesystem, placed, taken: None })
    }

    /// The answer to a question, and the numbers that follow it.
    fn answer(&mut self, kind: u8, numbers: [u32; 3]) -> (u16, Vec<u64>) {
        let [pid, number, user] = numbers;
        let yes = |is_so: bool| if is_so { YES } else { NO };
        let known = |is_so: Option<bool>| is_so.map_or(UNKNOWN, yes);
        let long = u64::from(user) << 32 | u64::from(number);
        let is_of_mount = |device: u64| self.filesystem.as_ref().is_some_and(|own| own.device == device);
        let processes = LocalProcesses;
        let answered = match kind {
            MOUNTED => self.mounted(),
            PLACED => match self.placed.take() {
                Some(Ok(placed)) => {
                    return (self.agreed(), vec![placed.device, placed.key()]);
                }
                Some(Err(errno)) => u16::try_from(errno.raw_os_error()).unwrap_or(NO),
                None => NO,
            },
            LOOK => yes(self.filesystem.as_mut().is_some_and(|own| matches!(own.look(), Seen::Mounts(_)))),
            LAZY | PLAIN => self.unmount(kind == LAZY),
            GROUP => yes(processes.is_in_group(pid, number, Some(user).filter(|user| *user != ANYBODY))),
            CAPABILITY => known(processes.has_capability(pid, number)),
            READ_ONLY if is_of_mount(long) => known(processes.is_read_only_for(pid, long)),
            READ_ONLY => UNKNOWN,
            DYING => known(processes.is_dying(pid)),
            PROCESSOR => {
                let number = crate::transport::processor_of(pid).and_then(|number| u16::try_from(number).ok());
                number.filter(|number| *number < NO).unwrap_or(UNKNOWN)
            }
            MOVE => yes(self.move_thread(pid, number)),
            UMASK => processes.umask_of(pid).and_then(|umask| u16::try_from(umask).ok()).unwrap_or(NO),
            FILE => match processes.file_of(pid, number, Some(user).filter(|user| *user != ANYBODY)) {
                Some(file) if is_of_mount(file.id.device) => return (YES, numbers_of(&file)),
                Some(_) => ELSEWHERE,
                None => NO,
            },
            TAKE_DEVICE => yes(self.take_device(long)),
            _ => UNKNOWN,
        };
        (answered, Vec::new())
    }

    /// Remembers the mount.
    fn mounted(&mut self) -> u16 {
        if self.filesystem.is_some() {
            return NO;
        }
        let found = mount_table::find_mount(&self.dir).filter(MountInfo::is_of_ubtrfs);
        let Some((id, device)) = found.and_then(|found| Some((found.id, found.device_number()?))) else { return NO };
        let placed = PlacedMount { id, unique: mount_table::unique_id(&self.dir), device };
        self.filesystem = Some(OwnFilesystem { device, known: vec![placed] });
        self.agreed()
    }

    /// The answer "yes" to the question about the mount.
    fn agreed(&self) -> u16 {
        if self.is_limited { YES } else { UNLIMITED }
    }

    /// Unmounts all mounts of the filesystem where they are now, if no other mount covers them (H1).
    fn unmount(&mut self, lazy: bool) -> u16 {
        let Some(own) = &mut self.filesystem else { return NO };
        let mounts = match own.look() {
            Seen::Mounts(mounts) => mounts,
            Seen::Covered => return NO,
            Seen::Nothing => return GONE,
        };
        // A path through an opened directory leads nowhere else if another process exchanges directories meanwhile. The
        // program fusermount3, which unmounts for ordinary users, needs the plain path.
        let by_descriptor = self.is_limited && mount::is_root();
        match remaining_mounts::unmount_each(&mounts, lazy, by_descriptor) {
            Some(Ok(())) => {
                own.known.clear();
                YES
            }
            Some(Err(_)) => NO,
            None => GONE,
        }
    }

    /// Lets a thread of the server run on the processor with this number, or [`EVERYWHERE`] (H3).
    fn move_thread(&self, thread: u32, processor: u32) -> bool {
        let server = self.server.as_raw_nonzero();
        let Some(thread) = i32::try_from(thread).ok().and_then(Pid::from_raw).filter(|thread| *thread != self.server)
        else {
            return false;
        };
        let is_of_server = std::fs::exists(format!("/proc/{server}/task/{}", thread.as_raw_nonzero()));
        let processors = match usize::try_from(processor) {
            _ if processor == EVERYWHERE => rustix::thread::sched_getaffinity(Some(self.server)).ok(),
            Ok(nr) if nr < CpuSet::MAX_CPU => {
                let mut set = CpuSet::new();
                set.set(nr);
                Some(set)
            }
            _ => None,
        };
        let Some(processors) = processors.filter(|_| is_of_server.unwrap_or(false)) else { return false };
        rustix::thread::sched_setaffinity(Some(thread), &processors).is_ok()
    }

    fn take_device(&mut self, rdev: u64) -> bool {
        if self.taken.is_none() && self.rdev == Some(rdev) {
            let place = LentPlace { device: self.device.clone(), rdev };
            self.taken = place.take().ok();
        }
        self.taken.is_some() && self.rdev == Some(rdev)
    }
}

impl OwnFilesystem {
    /// If a mount that the helper knows is still there, finds and remembers all mounts of the filesystem.
    fn look(&mut self) -> Seen {
        let is_it = |mount: &MountInfo| mount.is_of_ubtrfs() && mount.device_number() == Some(self.device);
        let mounts: Vec<MountInfo> = mount_table::mounts().into_iter().filter(is_it).collect();
        let (mut is_covered, mut is_ours) = (false, false);
        for mount in &mounts {
            let Some(known) = self.known.iter().find(|known| known.id == mount.id) else { continue };
            match MountPoint::open(mount) {
                Ok(point) => is_ours |= known.unique.is_none() || mount_table::unique_id(&point.path()) == known.unique,
                Err(_) => is_covered = true,
            }
        }
        if !is_ours {
            return if is_covered { Seen::Covered } else { Seen::Nothing };
        }
        let unique = |mount: &MountInfo| MountPoint::open(mount).ok().and_then(|at| mount_table::unique_id(&at.path()));
        let seen = |mount: &MountInfo| {
            let known = self.known.iter().find(|known| known.id == mount.id).and_then(|known| known.unique);
            let unique = unique(mount).or(known);
            // Without its unique number, a mount could be taken for a later one with its number.
            (unique.is_some() || self.known.iter().all(|known| known.unique.is_none())).then_some(PlacedMount {
                id: mount.id,
                unique,
                device: self.device,
            })
        };
        self.known = mounts.iter().filter_map(seen).collect();
        Seen::Mounts(mounts)
    }
}

/// Gives up the rights of root that the helper does not need (H5).
fn limit() -> Result<(), String> {
    let failed = |errno: rustix::io::Errno| errno.to_string();
    // As in a container whose root may not mount. Only the setuid program fusermount3 can unmount then.
    if !rustix::thread::capabilities(None).map_err(failed)?.effective.contains(CapabilitySet::SYS_ADMIN) {
        return Err("root has no CAP_SYS_ADMIN".to_owned());
    }
    setgroups(&[]).map_err(|error| error.to_string())?;
    rustix::thread::clear_ambient_capability_set().map_err(failed)?;
    for bit in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << bit);
        if !KEPT.contains(capability) && rustix::thread::capability_is_in_bounding_set(capability) == Ok(true) {
            rustix::thread::remove_capability_from_bounding_set(capability).map_err(failed)?;
        }
    }
    let sets = CapabilitySets { effective: KEPT, permitted: KEPT, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets).map_err(failed)?;
    rustix::thread::set_no_new_privs(true).map_err(failed)?;
    filter::filter_helper()
}
