//! Questions to mounts whose servers may answer late or never, as those of other users.
//!
//! A thread that waits for such an answer cannot be ended, and its process cannot end either. Therefore a child process
//! asks:
//!
//! - Q1. The parent waits for the answer for at most [`PATIENCE`], then kills the child and continues without an answer.
//! - Q2. The child enters a copy of the mount that belongs to no directory, so the mount itself is not busy even if the
//!   child waits forever.
//! - Q3. While a server is asked, its user may unmount the mount and replace a directory of the path by another
//!   directory or a symbolic link. The owner of a directory above root's own mount may do that too. Therefore root
//!   unmounts and remounts in a directory that was opened before ([`MountPoint`]), and only if the same mount is still
//!   there.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use ubtrfs_control::CONTROL_XATTR;
use ubtrfs_device::ask_mount;

use crate::mount;
use crate::mount_table::{self, MountInfo};
use crate::remaining_mounts::DetachedCopy;

/// Makes the command of the child process for a mount point. The command must run [`tell_control_name`].
pub type HelperCommand<'h> = &'h dyn Fn(&Path) -> io::Result<Command>;

/// How long another user's server may take to answer a question.
const PATIENCE: Duration = Duration::from_secs(3);

/// The user who made a mount, if this is neither the user of this process nor root.
pub(crate) fn other_user_of(mount: &MountInfo) -> Option<u32> {
    let is_other = |uid: &Uid| *uid != rustix::process::geteuid() && !uid.is_root();
    mount.user().map(|(uid, _)| uid).filter(is_other).map(Uid::as_raw)
}

/// A mount point of another user, opened before its server is asked (Q3).
#[derive(Debug)]
pub(crate) struct MountPoint {
    parent: OwnedFd,
    name: OsString,
    id: u64,
}

impl MountPoint {
    /// Opens the directory that holds the mount point. Fails if the mount is not there any more.
    pub(crate) fn open(found: &MountInfo) -> io::Result<Self> {
        let (Some(parent), Some(name)) = (found.dir.parent(), found.dir.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let parent = rustix::fs::open(parent, flags, Mode::empty())?;
        let point = Self { parent, name: name.to_owned(), id: found.id };
        point.check()?;
        Ok(point)
    }

    /// Fails if another mount, or no mount, is on the mount point now. Does not ask the server.
    pub(crate) fn check(&self) -> io::Result<()> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let top = rustix::fs::openat(&self.parent, &self.name, flags, Mode::empty())?;
        if mount_id_of(&top)? == self.id { Ok(()) } else { Err(io::Error::other("its mount point changed meanwhile")) }
    }

    /// A path of the mount point that leads through the opened directory.
    pub(crate) fn path(&self) -> PathBuf {
        Path::new("/proc/self/fd").join(self.parent.as_raw_fd().to_string()).join(&self.name)
    }
}

/// The number of an open file's mount in the table of mounts. Does not ask the server.
pub(crate) fn mount_id_of(file: impl AsFd) -> io::Result<u64> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_fd().as_raw_fd()))?;
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| io::Error::other("/proc does not tell the number of its mount"))
}

/// Text of another user for root's terminal: without control characters, and not longer than a few lines.
pub(crate) fn harmless(text: &str) -> String {
    const MAX_CHARS: usize = 500;
    let mut out = String::new();
    for char in text.chars().take(MAX_CHARS) {
        if char.is_control() {
            out.extend(char.escape_default());
        } else {
            out.push(char);
        }
    }
    out
}

/// The full path of a directory, found without entering the mount of another user on it.
pub(crate) fn full_path(dir: &Path) -> io::Result<PathBuf> {
    let place = without_entering(dir);
    match place.as_ref().and_then(|place| mount_table::find_mount(place)).and_then(|found| other_user_of(&found)) {
        Some(_) => place.ok_or_else(|| io::ErrorKind::NotFound.into()),
        None => std::fs::canonicalize(dir),
    }
}

/// The full path of a directory that is not a symbolic link, found without entering the directory.
pub(crate) fn without_entering(dir: &Path) -> Option<PathBuf> {
    let parent = dir.parent()?;
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    Some(std::fs::canonicalize(parent).unwrap_or_else(|_| parent.to_owned()).join(dir.file_name()?))
}

/// The name of the control socket of the mount at this directory. If there is a helper, it asks another user's mount
/// (Q1). The wait for its answer ends at `until`.
pub(crate) fn control_name(dir: &Path, helper: Option<HelperCommand<'_>>, until: Instant) -> io::Result<Vec<u8>> {
    let uid = mount_table::find_mount(dir).and_then(|found| other_user_of(&found));
    match (uid, helper) {
        (Some(uid), Some(helper)) => ask(helper(dir)?, uid, until),
        _ => read_control_name(dir, dir),
    }
}

/// Whether the server of the mount at this directory answers, whoever made the mount. The helper asks it (Q1).
pub fn server_answers(dir: &Path, helper: HelperCommand<'_>) -> bool {
    let asked =
        helper(dir).and_then(|command| ask(command, rustix::process::geteuid().as_raw(), Instant::now() + PATIENCE));
    !matches!(asked, Err(error) if error.kind() == io::ErrorKind::TimedOut)
}

/// Runs the child process and returns its answer (Q1).
fn ask(mut command: Command, uid: u32, until: Instant) -> io::Result<Vec<u8>> {
    let end = until.min(Instant::now() + PATIENCE);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let answer =
        child.stdout.take().ok_or_else(|| io::ErrorKind::BrokenPipe.into()).and_then(|out| read_until(out, end));
    if answer.is_err() {
        let _ = child.kill();
    } else {
        // The child has closed its output, so it ends without waiting for the mount.
        let _ = child.wait();
    }
    let answer = answer.map_err(|error| match error.kind() {
        io::ErrorKind::TimedOut => {
            let seconds = PATIENCE.as_secs();
            let text = format!("its server, run by user {uid}, did not name its control socket within {seconds} s");
            io::Error::new(io::ErrorKind::TimedOut, text)
        }
        _ => error,
    })?;
    match answer.split_first() {
        Some((&NAME, name)) => Ok(name.to_vec()),
        Some((&ERROR, text)) => Err(io::Error::other(String::from_utf8_lossy(text).into_owned())),
        _ => Err(io::Error::other("the process that should ask the server ended without an answer")),
    }
}

/// Reads to the end of the stream. Fails with `TimedOut` at the time `end`.
fn read_until(mut out: ChildStdout, end: Instant) -> io::Result<Vec<u8>> {
    let mut answer = Vec::new();
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&out, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
            Ok(_) => {}
        }
        let mut piece = [0; 512];
        match out.read(&mut piece)? {
            0 => return Ok(answer),
            len => answer.extend_from_slice(piece.get(..len).unwrap_or_default()),
        }
    }
}

/// The work of the child process: prints the name of the control socket of the mount at this directory (Q2).
pub fn tell_control_name(dir: &Path) {
    // Without a copy, the mount itself is entered.
    let copy = DetachedCopy::of(dir);
    let way = copy.as_ref().map_or_else(|| dir.to_owned(), DetachedCopy::way);
    let answer = match read_control_name(dir, &way) {
        Ok(name) => [&[NAME], &name[..]].concat(),
        Err(error) => [&[ERROR], error.to_string().as_bytes()].concat(),
    };
    let _ = io::stdout().write_all(&answer).and_then(|()| io::stdout().flush());
}

/// The first byte of an answer: the name follows.
const NAME: u8 = b'n';
/// The first byte of an answer: the text of an error follows.
const ERROR: u8 = b'e';

/// Reads the name of the control socket of the mount at `dir`, by the path `way` into the mount. Root can read it even
/// in a mount that admits only the user who mounted it.
fn read_control_name(dir: &Path, way: &Path) -> io::Result<Vec<u8>> {
    match read_name(way) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && mount::is_root() => {
            match mount_table::find_mount(dir).and_then(|found| found.admitted_user()) {
                Some((uid, gid)) => as_user(uid, gid, || read_name(way)),
                None => Err(error),
            }
        }
        named => named,
    }
}

/// Calls `work` in a new thread with the credentials of this user, because FUSE admits a thread by its credentials. All
/// other threads stay root.
fn as_user<T: Send>(uid: Uid, gid: Gid, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let worker = scope.spawn(|| {
            rustix::thread::set_thread_res_gid(gid, gid, gid)?;
            rustix::thread::set_thread_res_uid(uid, uid, uid)?;
            work()
        });
        worker.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
    })
}

fn read_name(dir: &Path) -> io::Result<Vec<u8>> {
    let mut name = vec![0; 256];
    match rustix::fs::getxattr(dir, CONTROL_XATTR, &mut name) {
        Ok(len) => name.truncate(len),
        // Without extended attributes (`noxattr`), an ioctl tells the name.
        Err(Errno::OPNOTSUPP) => name = ask_mount(std::fs::File::open(dir)?)?,
        Err(errno) => return Err(errno.into()),
    }
    Ok(name)
}
