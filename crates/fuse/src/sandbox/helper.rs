//! [`PrivilegedHelper`]: the process that acts for a confined server, which has given up the rights to act itself.

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::Pid;
use rustix::thread::CpuSet;
use ubtrfs_control::{FileId, LocalProcesses, Processes};

use crate::lent_device::Place;
use crate::mount::{self, MountError};

/// A process that acts for the confined server (X4): it unmounts one directory, claims one block device, and looks up
/// groups, umasks, capabilities and open files of processes.
///
/// A question consists of one byte for its kind and three numbers of four bytes each. An answer has two bytes; the
/// answer to [`FILE`] has more.
#[derive(Debug)]
pub struct PrivilegedHelper {
    child: Mutex<Child>,
}

const LAZY: u8 = b'l';
const PLAIN: u8 = b'p';
/// Question: is the process in the group, and are all its user ids equal to the given id? With [`ANYBODY`], the user
/// ids do not matter.
const GROUP: u8 = b'g';
/// Question: the umask of the process.
const UMASK: u8 = b'u';
/// Question: does the process have the capability?
const CAPABILITY: u8 = b'c';
/// Question: the file that the process has open as the descriptor. The answer "ok" is followed by the device and the
/// inode, 8 bytes each.
const FILE: u8 = b'f';
/// Question: is every file that the process has open on the device (two numbers, the low half first) open through a
/// read-only mount?
const READ_ONLY: u8 = b'r';
/// Question: is the thread being killed?
const DYING: u8 = b'k';
/// Question: the processor on which the thread ran last.
const PROCESSOR: u8 = b'n';
/// Question: let the thread of the server run only on the processor, or, with [`EVERYWHERE`], on those of the server's
/// first thread.
const MOVE: u8 = b'a';
/// Question: can the block device with this number (the low half first) be claimed? If so, the helper keeps the claim.
const TAKE_DEVICE: u8 = b'd';
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
/// The answer to an unmount of what is not mounted.
const GONE: u16 = u16::from_le_bytes(*b"go");
const UNKNOWN: u16 = u16::from_le_bytes(*b"??");

impl PrivilegedHelper {
    /// Starts the process; `command` must run a program that calls [`serve_unmounts`].
    pub fn start(mut command: Command) -> io::Result<Self> {
        // The helper gets a process group of its own, because signals from the terminal are meant for the server.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        Ok(Self { child: Mutex::new(command.spawn()?) })
    }

    /// Unmounts on behalf of the server.
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

    /// Lets a thread of this process run only on `processors`: one processor, or those of the first thread of the process.
    /// Returns false if it stays where it is, also if the helper is busy.
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

    /// The file that a process has open under a descriptor number.
    pub(crate) fn file_of(&self, pid: u32, descriptor: u32) -> Option<FileId> {
        let mut child = self.child.lock();
        let answer = ask(&mut child, FILE, [pid, descriptor, 0]).ok().filter(|answer| *answer == YES);
        let mut numbers = [[0; 8]; 2];
        child.stdout.as_mut().filter(|_| answer.is_some())?.read_exact(numbers.as_flattened_mut()).ok()?;
        let [device, ino] = numbers.map(u64::from_le_bytes);
        Some(FileId { device, ino })
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

fn halves(number: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = number.to_le_bytes();
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}

/// Runs the helper process for the mount of `device` on `dir`: answers questions from standard input on standard output
/// until the server is gone.
pub fn serve_unmounts(device: &Path, dir: &Path) {
    let server = rustix::process::getppid();
    let mut taken = Vec::new();
    let (mut ask, mut answer) = (io::stdin().lock(), io::stdout().lock());
    let mut kind = [0];
    let mut numbers = [[0; 4]; 3];
    while ask.read_exact(&mut kind).and_then(|()| ask.read_exact(numbers.as_flattened_mut())).is_ok() {
        let [pid, number, user] = numbers.map(u32::from_le_bytes);
        let yes = |is_so: bool| if is_so { YES } else { NO };
        let processes = LocalProcesses;
        let [kind] = kind;
        let file = if kind == FILE { processes.file_of(pid, number) } else { None };
        let answered = match kind {
            GROUP => yes(processes.is_in_group(pid, number, Some(user).filter(|user| *user != ANYBODY))),
            CAPABILITY => processes.has_capability(pid, number).map_or(UNKNOWN, yes),
            READ_ONLY => {
                let device = u64::from(user) << 32 | u64::from(number);
                processes.is_read_only_for(pid, device).map_or(UNKNOWN, yes)
            }
            DYING => processes.is_dying(pid).map_or(UNKNOWN, yes),
            PROCESSOR => {
                let number = crate::transport::processor_of(pid).and_then(|number| u16::try_from(number).ok());
                number.filter(|number| *number < NO).unwrap_or(UNKNOWN)
            }
            MOVE => yes(server.is_some_and(|server| move_thread(server, pid, number))),
            UMASK => processes.umask_of(pid).and_then(|umask| u16::try_from(umask).ok()).unwrap_or(NO),
            FILE => yes(file.is_some()),
            TAKE_DEVICE => {
                let rdev = u64::from(user) << 32 | u64::from(number);
                taken.extend(Place { device: device.to_owned(), rdev, dir: dir.to_owned() }.take());
                yes(!taken.is_empty())
            }
            kind => match mount::unmount(dir, kind == LAZY) {
                Err(MountError::NotMounted(_)) => GONE,
                unmounted => yes(unmounted.is_ok()),
            },
        };
        let mut bytes = answered.to_le_bytes().to_vec();
        if let Some(file) = file {
            bytes.extend([file.device, file.ino].map(u64::to_le_bytes).as_flattened());
        }
        if answer.write_all(&bytes).and_then(|()| answer.flush()).is_err() {
            return;
        }
    }
}

/// Lets a thread of the server run on the processor with this number, or [`EVERYWHERE`].
fn move_thread(server: Pid, thread: u32, processor: u32) -> bool {
    let Some(thread) = Pid::from_raw(thread.cast_signed()).filter(|thread| *thread != server) else {
        return false;
    };
    let is_of_server = std::fs::exists(format!("/proc/{}/task/{}", server.as_raw_nonzero(), thread.as_raw_nonzero()));
    let processors = match usize::try_from(processor) {
        _ if processor == EVERYWHERE => rustix::thread::sched_getaffinity(Some(server)).ok(),
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
