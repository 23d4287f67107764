//! [`MountFile`]: a file of a mount, opened for a command.
//!
//! The user who made a mount controls its server and its names. A name that root gives may lead through a link to a file of
//! root, and the server would receive its descriptor. Therefore:
//!
//! - F1. A path is first opened with `O_PATH`, which has no effect on a device or a FIFO. The file is opened for
//!   reading or writing only after it was found to be in the mount, and through the descriptor, not through the path. So
//!   a name that changes meanwhile has no effect.
//! - F2. A file is in a mount if it has the mount's `st_dev` and its type of filesystem. The kernel sets both; a server
//!   cannot. An overlay shows the `st_dev` of a lower filesystem for some files, but has a type of its own.
//! - F3. Only regular files and directories are opened. Opening a device file of an image would open the device of this
//!   machine.
//! - F4. This module makes every descriptor of a file that is sent to a server: files of the server's mount, and images
//!   for the process that has the image open.
//! - F5. With `submounts`, a server has several mounts. A file of another mount belongs to the server if the same user made
//!   that mount, and its control socket has the same name. So a server of another user cannot claim files of root.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, fstat, fstatfs, mkdirat, openat};
use rustix::io::Errno;

use crate::process::mount_maker;

/// A file of a mount, open for reading, writing or both.
#[derive(Debug)]
pub struct MountFile {
    file: OwnedFd,
}

impl AsFd for MountFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// What commands do with the content of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContentAccess {
    /// They read it.
    Read,
    /// They change it.
    Write,
}

impl ContentAccess {
    fn flags(self) -> OFlags {
        match self {
            Self::Read => OFlags::RDONLY,
            Self::Write => OFlags::WRONLY,
        }
    }
}

/// The filesystem that a mount shows, however many mount points it has (F2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MountId {
    device: u64,
    kind: u64,
}

/// The type of all FUSE filesystems in `statfs`.
const FUSE_MAGIC: u64 = 0x6573_5546;

impl MountId {
    pub(crate) fn of(file: impl AsFd) -> io::Result<Self> {
        let device = fstat(&file)?.st_dev;
        Ok(Self { device, kind: u64::try_from(fstatfs(&file)?.f_type).unwrap_or_default() })
    }

    pub(crate) fn is_fuse(self) -> bool {
        self.kind == FUSE_MAGIC
    }

    /// Opens the file at `path`, following links.
    ///
    /// # Errors
    /// `EXDEV` if the file is not in this mount; `EINVAL` if it is neither a regular file nor a directory.
    pub(crate) fn open(self, path: &Path, access: ContentAccess) -> io::Result<MountFile> {
        self.open_found(&find(CWD, path.as_os_str(), OFlags::empty())?, access)
    }

    /// Opens a file that [`find`] found.
    pub(crate) fn open_found(self, found: &OwnedFd, access: ContentAccess) -> io::Result<MountFile> {
        self.check(found)?;
        let file = again(found, access.flags())?;
        // Holds unless /proc is not what it seems to be.
        self.check(&file)?;
        Ok(MountFile { file })
    }

    /// Creates the regular file `name` in a directory of this mount, and opens it for writing.
    ///
    /// # Errors
    /// `EEXIST` if the name exists, also as a link; `EXDEV` if the directory is not in this mount.
    pub(crate) fn create(self, dir: &Path, name: &OsStr, mode: u32) -> io::Result<(NewMountFile, MountFile)> {
        let dir = find(CWD, dir.as_os_str(), OFlags::DIRECTORY)?;
        self.check(&dir)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | ContentAccess::Write.flags() | FLAGS;
        let file = openat(&dir, name, flags, Mode::from_raw_mode(mode))?;
        // A filesystem may have been mounted on the name by now.
        let ino = self.check(&file)?.st_ino;
        Ok((NewMountFile { id: self, dir, name: name.into(), ino }, MountFile { file }))
    }

    /// Creates the directory `name` in a directory of this mount.
    ///
    /// # Errors
    /// `EEXIST` if the name exists, also as a link; `EXDEV` if the directory is not in this mount.
    pub(crate) fn create_dir(self, dir: &Path, name: &OsStr) -> io::Result<()> {
        let dir = find(CWD, dir.as_os_str(), OFlags::DIRECTORY)?;
        self.check(&dir)?;
        Ok(mkdirat(&dir, name, Mode::from_raw_mode(0o777))?)
    }

    /// Fails if the file is not in this mount (F2) or of another type (F3).
    fn check(self, file: &OwnedFd) -> io::Result<Stat> {
        if Self::of(file)? != self {
            return Err(Errno::XDEV.into());
        }
        let stat = fstat(file)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile | FileType::Directory => Ok(stat),
            _ => Err(Errno::INVAL.into()),
        }
    }
}

/// A regular file that [`MountId::create`] made.
#[derive(Debug)]
pub(crate) struct NewMountFile {
    id: MountId,
    dir: OwnedFd,
    name: Box<OsStr>,
    ino: u64,
}

impl NewMountFile {
    /// Removes the file, unless another one has its name by now.
    pub(crate) fn remove(&self) -> io::Result<()> {
        let now = find(&self.dir, &self.name, OFlags::NOFOLLOW)?;
        if self.id.check(&now)?.st_ino == self.ino {
            rustix::fs::unlinkat(&self.dir, &*self.name, AtFlags::empty())?;
        }
        Ok(())
    }
}

/// Finds a file without opening it (F1).
pub(crate) fn find(dir: impl AsFd, path: &OsStr, flags: OFlags) -> io::Result<OwnedFd> {
    Ok(openat(dir, path, OFlags::PATH | OFlags::CLOEXEC | flags, Mode::empty())?)
}

/// Opens a file again that is open with `O_PATH` (F1).
fn again(found: &OwnedFd, flags: OFlags) -> io::Result<OwnedFd> {
    let opened = match flags {
        OFlags::RDONLY if FileType::from_raw_mode(fstat(found)?.st_mode).is_dir() => {
            openat(found, c".", flags | FLAGS, Mode::empty())
        }
        _ => {
            let path = format!("/proc/self/fd/{}", found.as_raw_fd());
            match openat(CWD, path, flags | FLAGS, Mode::empty()) {
                Err(Errno::NOENT) => return Err(io::Error::other("/proc is not mounted, and is needed to open it")),
                opened => opened,
            }
        }
    };
    Ok(opened?)
}

const FLAGS: OFlags = OFlags::CLOEXEC.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// Opens an image without an effect on any other file (F1).
///
/// # Errors
/// `EINVAL` if it is neither a regular file nor a block device; `EPERM` if the way to it leads through a mount of another
/// user.
pub fn open_image(path: &Path, writes: bool) -> io::Result<OwnedFd> {
    let found = match find_file(path, InMountOfOther::Refuse)? {
        Way::To(found) => found,
        Way::Nowhere => {
            // Tells why.
            find(CWD, path.as_os_str(), OFlags::empty())?;
            return Err(Errno::NOENT.into());
        }
        Way::OfOther(_) => return Err(Errno::PERM.into()),
    };
    match FileType::from_raw_mode(fstat(&found)?.st_mode) {
        FileType::RegularFile | FileType::BlockDevice => {}
        _ => return Err(Errno::INVAL.into()),
    }
    again(&found, if writes { OFlags::RDWR } else { OFlags::RDONLY })
}

/// Opens an image for the process that has the image open.
pub(crate) fn open_image_to_send(path: &Path, writes: bool) -> io::Result<MountFile> {
    open_image(path, writes).map(|file| MountFile { file })
}

/// The end of the way to a path.
#[derive(Debug)]
pub enum Way {
    /// A file, open with `O_PATH` (F1).
    To(OwnedFd),
    /// Nothing, because a name is missing or cannot be entered.
    Nowhere,
    /// Unknown: the way leads through names in a FUSE mount of this user; `None` if the mount is not visible in this mount
    /// namespace.
    OfOther(Option<u32>),
}

/// How far the way to a path is followed in a FUSE mount of a user other than root and the current user. Such a user can
/// make the names lead anywhere at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InMountOfOther {
    /// Not at all.
    Refuse,
    /// To regular files and directories of that mount, and through no link.
    StayInside,
}

/// Finds a file as the kernel does, and opens nothing on the way (F1). [`reopen`] opens the file that was found, whatever
/// its names lead to by then.
///
/// # Errors
/// It cannot be found out in whose mount a name is.
pub fn find_file(path: &Path, how: InMountOfOther) -> io::Result<Way> {
    let names = |path: &Path| path.components().rev().map(|part| part.as_os_str().to_owned()).collect::<Vec<_>>();
    let directory = |name: &str| find(CWD, OsStr::new(name), OFlags::DIRECTORY);
    let mut at = directory(if path.is_absolute() { "/" } else { "." })?;
    let (mut left, mut nr_links) = (names(path), 0);
    // `components` leaves out the end of such a path.
    let names_directory = [&b"/"[..], b"/."].iter().any(|end| path.as_os_str().as_bytes().ends_with(end));
    // The mount of another user that the way has entered.
    let mut inside: Option<(MountId, Option<u32>)> = None;
    loop {
        // Every directory is checked before one of its names is looked up.
        match (inside, other_maker(&at)?) {
            (None, Some(maker)) if how == InMountOfOther::Refuse => return Ok(Way::OfOther(maker)),
            (None, Some(maker)) => inside = Some((MountId::of(&at)?, maker)),
            _ => {}
        }
        if let Some((id, maker)) = inside
            && id.check(&at).is_err()
        {
            return Ok(Way::OfOther(maker));
        }
        let Some(name) = left.pop() else {
            let is_dir = || fstat(&at).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_dir());
            return Ok(if names_directory && !is_dir() { Way::Nowhere } else { Way::To(at) });
        };
        if name == "/" {
            if let Some((_, maker)) = inside {
                return Ok(Way::OfOther(maker));
            }
            at = directory("/")?;
            continue;
        }
        let Ok(found) = find(&at, &name, OFlags::NOFOLLOW) else { return Ok(Way::Nowhere) };
        if inside.is_some() || other_maker(&found)?.is_some() {
            at = found;
            continue;
        }
        if !FileType::from_raw_mode(fstat(&found)?.st_mode).is_symlink() {
            at = found;
            continue;
        }
        nr_links += 1;
        if nr_links > LINKS_MAX {
            return Ok(Way::Nowhere);
        }
        // The text of a link in /proc need not be its target.
        if MountId::of(&found)?.kind == PROC_MAGIC {
            let Ok(found) = find(&at, &name, OFlags::empty()) else { return Ok(Way::Nowhere) };
            at = found;
        } else {
            let target = rustix::fs::readlinkat(&found, c"", Vec::new())?;
            left.extend(names(Path::new(OsStr::from_bytes(target.as_bytes()))));
        }
    }
}

/// Opens a file that [`find_file`] found. Without /proc, opens `path` again.
///
/// # Errors
/// Without /proc, the path leads to another file by now.
pub fn reopen(found: &OwnedFd, path: &Path, options: &OpenOptions) -> io::Result<File> {
    match options.open(format!("/proc/self/fd/{}", found.as_raw_fd())) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        opened => return opened,
    }
    let file = options.open(path)?;
    let (one, other) = (fstat(&file)?, fstat(found)?);
    match (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino) {
        true => Ok(file),
        false => Err(io::Error::other("its path was changed by another program; try again")),
    }
}

/// The user who made the FUSE mount of a file, if it is neither root nor the current user; `Some(None)` if the mount is
/// not visible. The server of a visible mount is not asked anything, because it need not answer.
fn other_maker(found: &OwnedFd) -> io::Result<Option<Option<u32>>> {
    match mount_maker(found.as_raw_fd()) {
        Some(maker) if maker == 0 || maker == rustix::process::geteuid().as_raw() => Ok(None),
        Some(maker) => Ok(Some(Some(maker))),
        None => Ok(MountId::of(found)?.is_fuse().then_some(None)),
    }
}

/// The number of links that Linux follows on the way to a file.
const LINKS_MAX: u32 = 40;
/// The type of procfs in `statfs`.
const PROC_MAGIC: u64 = 0x9fa0;

/// Takes any descriptor for a file of a mount. For tests of the server.
#[doc(hidden)]
pub fn unchecked_mount_file(file: OwnedFd) -> MountFile {
    MountFile { file }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn errno(opened: io::Result<MountFile>) -> Errno {
        Errno::from_io_error(&opened.unwrap_err()).unwrap()
    }

    #[test]
    fn only_files_and_directories_of_the_mount_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let here = MountId::of(std::fs::File::open(dir.path()).unwrap()).unwrap();
        std::fs::write(dir.path().join("file"), "text").unwrap();
        symlink("file", dir.path().join("inside")).unwrap();
        symlink("/proc/self/status", dir.path().join("outside")).unwrap();
        rustix::fs::mknodat(CWD, dir.path().join("fifo"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        let open = |name: &str, access| here.open(&dir.path().join(name), access);
        let flags = |file: MountFile| rustix::fs::fcntl_getfl(file).unwrap() & OFlags::RWMODE;
        assert_eq!(flags(open("inside", ContentAccess::Read).unwrap()), OFlags::RDONLY);
        assert_eq!(flags(open("file", ContentAccess::Write).unwrap()), OFlags::WRONLY);
        assert_eq!(flags(open(".", ContentAccess::Read).unwrap()), OFlags::RDONLY);
        assert_eq!(errno(open("outside", ContentAccess::Read)), Errno::XDEV);
        assert_eq!(errno(open("fifo", ContentAccess::Write)), Errno::INVAL);
        assert_eq!(errno(open("nothing", ContentAccess::Read)), Errno::NOENT);
        assert!(!here.is_fuse());
    }

    #[test]
    fn the_way_to_a_file_is_followed_as_the_kernel_does() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("d")).unwrap();
        std::fs::write(dir.path().join("file"), "text").unwrap();
        symlink("../file", dir.path().join("d/up")).unwrap();
        symlink(dir.path().join("d"), dir.path().join("absolute")).unwrap();
        symlink("loop", dir.path().join("loop")).unwrap();
        let way = |name: &str| match find_file(&dir.path().join(name), InMountOfOther::StayInside).unwrap() {
            Way::To(found) => Some(fstat(found).unwrap().st_ino),
            Way::Nowhere => None,
            Way::OfOther(user) => panic!("{name} is in a mount of {user:?}"),
        };
        let ino = fstat(std::fs::File::open(dir.path().join("file")).unwrap()).unwrap().st_ino;
        for name in ["file", "d/up", "absolute/up", "d/../absolute/./up"] {
            assert_eq!(way(name), Some(ino), "{name}");
        }
        assert!(matches!(find_file(Path::new("/proc/self/cwd"), InMountOfOther::Refuse), Ok(Way::To(_))));
        assert_eq!(way("loop"), None, "whatever opens it says so");
        assert_eq!(way("absolute/none"), None);
        for name in ["file/", "file/.", "d/up/"] {
            assert_eq!(way(name), None, "{name} is no directory");
        }
        assert!(way("d/").is_some() && way("absolute/.").is_some());
    }

    #[test]
    fn a_file_that_was_found_is_opened_although_its_name_leads_elsewhere_by_then() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "found").unwrap();
        let Way::To(found) = find_file(&path, InMountOfOther::Refuse).unwrap() else { panic!("it is there") };
        std::fs::rename(&path, dir.path().join("moved")).unwrap();
        std::fs::write(&path, "another").unwrap();
        let mut text = String::new();
        let mut file = reopen(&found, &path, File::options().read(true)).unwrap();
        io::Read::read_to_string(&mut file, &mut text).unwrap();
        assert_eq!(text, "found");
    }

    #[test]
    fn a_new_file_is_made_and_removed_in_the_mount_alone() {
        let dir = tempfile::tempdir().unwrap();
        let here = MountId::of(std::fs::File::open(dir.path()).unwrap()).unwrap();
        symlink("/proc/self", dir.path().join("elsewhere")).unwrap();
        symlink("missing", dir.path().join("link")).unwrap();
        let create = |parent: &str, name: &str| here.create(&dir.path().join(parent), name.as_ref(), 0o600);
        let (made, _file) = create(".", "new").unwrap();
        for (parent, name, expected) in
            [(".", "new", Errno::EXIST), (".", "link", Errno::EXIST), ("elsewhere", "x", Errno::XDEV)]
        {
            assert_eq!(Errno::from_io_error(&create(parent, name).unwrap_err()), Some(expected), "{parent}/{name}");
        }
        std::fs::rename(dir.path().join("new"), dir.path().join("moved")).unwrap();
        std::fs::write(dir.path().join("new"), "of somebody else").unwrap();
        made.remove().unwrap();
        assert!(dir.path().join("new").exists(), "another file has the name");
        std::fs::rename(dir.path().join("moved"), dir.path().join("new")).unwrap();
        made.remove().unwrap();
        assert!(!dir.path().join("new").exists());
    }
}
