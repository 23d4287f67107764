//! [`Beneath`]: a directory of the host, and what is below it. [`SourceTree`]: such a directory as the source of a copy.
//!
//! Invariants:
//! - E1. No call leaves the directory, for all names and all links in it, also if its owner changes it meanwhile. openat2
//!   with `RESOLVE_BENEATH` opens each directory without following links, and the last name is never `.` or `..`.
//! - E2. The content of a file is read only if the file that was opened is the one whose attributes were read. Opening
//!   never waits for the other end of a pipe.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, bail};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use ubtrfs_format::item::Timespec;

use super::dir_chain::DirChain;
use super::host::xattrs_at;
use super::{SourceInfo, XattrList};
use crate::walk::{check_name, os_string};

/// A directory, with the directories below it that were opened last.
pub(super) struct Beneath {
    base: Arc<OwnedFd>,
    dirs: RefCell<DirChain<Arc<OwnedFd>>>,
}

impl Beneath {
    pub(super) fn new(base: Arc<OwnedFd>) -> Self {
        Self { base, dirs: RefCell::new(DirChain::new(OPEN_MAX)) }
    }

    pub(super) fn base(&self) -> &Arc<OwnedFd> {
        &self.base
    }

    /// Opens the directory of a path (E1). Returns the directory and the last name. A path may begin with a slash, which
    /// stands for this directory.
    pub(super) fn place<'p>(&self, path: &'p [u8]) -> anyhow::Result<(Arc<OwnedFd>, &'p [u8])> {
        let path = path.strip_prefix(b"/").unwrap_or(path);
        let (dir, name) = match path.iter().rposition(|byte| *byte == b'/') {
            Some(at) => (&path[..at], &path[at + 1..]),
            None => (&b""[..], path),
        };
        check_name(name)?;
        if dir.is_empty() {
            return Ok((Arc::clone(&self.base), name));
        }
        let enter = |at: &Arc<OwnedFd>, name: &[u8]| Ok(Some(Arc::new(open_beneath(at, name)?)));
        let from_top = || Ok::<_, anyhow::Error>(Arc::new(open_beneath(&self.base, dir)?));
        Ok((self.dirs.borrow_mut().find(dir, enter, from_top)?, name))
    }

    /// Opens the directory of `path`, and calls `call` with a path that leads through the open directory in
    /// `/proc/self/fd` to the last name. Needed for system calls that take no directory descriptor.
    pub(super) fn with_path<T>(&self, path: &[u8], call: impl FnOnce(PathBuf) -> T) -> anyhow::Result<T> {
        let (dir, name) = self.place(path)?;
        Ok(call(path_through(&dir).join(os_string(name))))
    }

    /// The attributes of the file at a path; `None` if there is no file.
    pub(super) fn info(&self, path: &[u8]) -> anyhow::Result<Option<SourceInfo>> {
        let (dir, name) = self.place(path)?;
        info_in(&dir, name)
    }
}

/// The attributes of the file with a name in a directory; `None` if there is no file.
fn info_in(dir: &OwnedFd, name: &[u8]) -> anyhow::Result<Option<SourceInfo>> {
    match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(info_of_stat(&stat))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A path to an open directory.
fn path_through(dir: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()))
}

/// Opens a directory below another one. Follows no symbolic links, because a link on the way may have been copied from
/// an image, or put there by the owner of the tree.
fn open_beneath(base: &OwnedFd, path: &[u8]) -> anyhow::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match rustix::fs::openat2(base, path, flags, Mode::empty(), resolve) {
        // Open name by name on Linux before 5.6, if a seccomp filter denies openat2, and for paths longer than Linux
        // accepts.
        Err(Errno::NOSYS | Errno::PERM | Errno::NAMETOOLONG) => {
            let mut dir: Option<OwnedFd> = None;
            for name in path.split(|byte| *byte == b'/') {
                check_name(name)?;
                dir = Some(rustix::fs::openat(dir.as_ref().unwrap_or(base), name, flags, Mode::empty())?);
            }
            dir.context("no path")
        }
        opened => Ok(opened?),
    }
}

fn info_of_stat(stat: &Stat) -> SourceInfo {
    let time = |sec, nsec| Timespec { sec, nsec };
    #[allow(clippy::useless_conversion, reason = "32 bits on other processors")]
    let nlink = stat.st_nlink.into();
    SourceInfo {
        mode: stat.st_mode,
        uid: stat.st_uid,
        gid: stat.st_gid,
        major: rustix::fs::major(stat.st_rdev),
        minor: rustix::fs::minor(stat.st_rdev),
        size: u64::try_from(stat.st_size).unwrap_or_default(),
        nlink,
        atime: time(stat.st_atime, stat.st_atime_nsec.try_into().unwrap_or_default()),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec.try_into().unwrap_or_default()),
        identity: (stat.st_dev, stat.st_ino),
        id: None,
    }
}

/// A directory of the host that is copied. Its owner may change it meanwhile (E1, E2).
pub(super) struct SourceTree {
    /// The path of the directory, as paths of the copy begin.
    top: Vec<u8>,
    beneath: Beneath,
}

impl SourceTree {
    /// Opens the directory at a path that the user named, and that has these attributes. A link is followed if it was
    /// followed when the attributes were read.
    pub(super) fn open(path: &[u8], info: &SourceInfo, follow: bool) -> anyhow::Result<Self> {
        let mut flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        flags.set(OFlags::NOFOLLOW, !follow);
        let dir = opened(rustix::fs::openat(CWD, path, flags, Mode::empty()))?;
        let stat = rustix::fs::fstat(&dir)?;
        if info.identity != (stat.st_dev, stat.st_ino) {
            bail!(REPLACED);
        }
        Ok(Self { top: path.to_vec(), beneath: Beneath::new(Arc::new(dir)) })
    }

    /// Returns the same directory for another thread.
    pub(super) fn again(&self) -> Self {
        Self { top: self.top.clone(), beneath: Beneath::new(Arc::clone(self.beneath.base())) }
    }

    /// The part of a path below this directory; empty for the directory. `None` for a path outside of it.
    fn rest<'p>(&self, path: &'p [u8]) -> Option<&'p [u8]> {
        let rest = path.strip_prefix(self.top.as_slice())?;
        (rest.is_empty() || rest.starts_with(b"/") || self.top.ends_with(b"/")).then_some(rest)
    }

    /// Whether a path is this directory or below it.
    pub(super) fn has(&self, path: &[u8]) -> bool {
        self.rest(path).is_some()
    }

    /// The directory of a path, and the last name, which is `.` for the directory itself.
    fn place<'p>(&self, path: &'p [u8]) -> anyhow::Result<(Arc<OwnedFd>, &'p [u8])> {
        match self.rest(path).context("a path outside of the source")? {
            b"" => Ok((Arc::clone(self.beneath.base()), b".")),
            rest => self.beneath.place(rest).map_err(|error| match error.downcast_ref() {
                Some(&(Errno::LOOP | Errno::NOTDIR)) => {
                    anyhow::anyhow!("its directory was replaced during the copy; copy it again")
                }
                _ => error,
            }),
        }
    }

    /// The attributes of the file at a path; `None` if there is no file.
    pub(super) fn info(&self, path: &[u8]) -> anyhow::Result<Option<SourceInfo>> {
        let (dir, name) = self.place(path)?;
        info_in(&dir, name)
    }

    /// The names in a directory.
    pub(super) fn names(&self, path: &[u8]) -> anyhow::Result<Vec<Vec<u8>>> {
        let (dir, name) = self.place(path)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = opened(rustix::fs::openat(&*dir, name, flags, Mode::empty()))?;
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::new(opened)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                names.push(name.to_vec());
            }
        }
        Ok(names)
    }

    /// The target of a symbolic link.
    pub(super) fn read_link(&self, path: &[u8]) -> anyhow::Result<Vec<u8>> {
        let (dir, name) = self.place(path)?;
        match rustix::fs::readlinkat(&*dir, name, Vec::new()) {
            // It is no link any more.
            Err(Errno::INVAL) => bail!(REPLACED),
            target => Ok(target?.into_bytes()),
        }
    }

    /// The extended attributes of a file.
    pub(super) fn xattrs(&self, path: &[u8]) -> anyhow::Result<XattrList> {
        let (dir, name) = self.place(path)?;
        let through = path_through(&dir);
        // A small root directory may have no /proc. Then the path has to do, and the attributes of another file may be read.
        match through.exists() {
            true => xattrs_at(through.join(os_string(name)).as_os_str().as_bytes()),
            false => xattrs_at(path),
        }
    }

    /// Opens a regular file for reading (E2).
    pub(super) fn open_file(&self, path: &[u8], info: &SourceInfo) -> anyhow::Result<File> {
        let (dir, name) = self.place(path)?;
        open_regular(&dir, name, info, OFlags::NOFOLLOW)
    }
}

/// Opens a regular file for reading, if it is the one with these attributes (E2).
pub(super) fn open_regular(
    dir: impl std::os::fd::AsFd,
    name: &[u8],
    info: &SourceInfo,
    more: OFlags,
) -> anyhow::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | more;
    let file = File::from(opened(rustix::fs::openat(dir, name, flags, Mode::empty()))?);
    let meta = file.metadata()?;
    if !meta.is_file() || (meta.dev(), meta.ino()) != info.identity {
        bail!(REPLACED);
    }
    Ok(file)
}

/// The result of opening something that was looked at before.
fn opened(file: rustix::io::Result<OwnedFd>) -> anyhow::Result<OwnedFd> {
    match file {
        // A link, something else than a directory, a socket, and a device without a driver.
        Err(Errno::LOOP | Errno::NOTDIR | Errno::NXIO | Errno::NODEV) => bail!(REPLACED),
        Err(Errno::AGAIN) => bail!("another program has a lease on it; try again when that program has closed it"),
        opened => Ok(opened?),
    }
}

const REPLACED: &str = "it was replaced during the copy; copy it again";

/// The largest number of directories that stay open.
const OPEN_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::super::CopySource;
    use super::super::host::HostFiles;
    use super::*;

    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    /// A tree of a user, and the secret of somebody else.
    fn with_secret() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let (tree, secret) = (dir.path().join("tree"), dir.path().join("secret"));
        fs::create_dir_all(tree.join("sub/deep")).unwrap();
        fs::create_dir_all(secret.join("deep")).unwrap();
        for path in ["sub/file", "sub/deep/file"] {
            fs::write(tree.join(path), "ordinary").unwrap();
        }
        for path in ["file", "deep/file"] {
            fs::write(secret.join(path), "secret!!").unwrap();
        }
        (dir, tree, secret)
    }

    fn bytes(path: &Path) -> &[u8] {
        path.as_os_str().as_bytes()
    }

    fn open(tree: &Path) -> SourceTree {
        let info = HostFiles::default().info(bytes(tree), false).unwrap().unwrap();
        SourceTree::open(bytes(tree), &info, false).unwrap()
    }

    #[test]
    fn a_file_that_was_replaced_is_not_read() {
        let (_dir, top, secret) = with_secret();
        let (tree, file) = (open(&top), top.join("sub/file"));
        let info = tree.info(bytes(&file)).unwrap().unwrap();
        assert!(tree.open_file(bytes(&file), &info).is_ok());
        type Replace<'a> = &'a dyn Fn();
        let replacements: [Replace<'_>; 4] = [
            &|| symlink(secret.join("file"), &file).unwrap(),
            &|| rustix::fs::mkfifoat(CWD, &file, Mode::RWXU).unwrap(),
            &|| fs::write(&file, "another").unwrap(),
            &|| drop(std::os::unix::net::UnixListener::bind(&file).unwrap()),
        ];
        for replace in replacements {
            // The old file stays, so that its number is not used again.
            fs::rename(&file, top.join(format!("old{}", fs::read_dir(&top).unwrap().count()))).unwrap();
            replace();
            let error = tree.open_file(bytes(&file), &info).unwrap_err();
            assert!(error.to_string().contains("replaced during the copy"), "{error}");
            assert!(open_regular(CWD, bytes(&file), &info, OFlags::empty()).is_err());
        }
    }

    #[test]
    fn a_directory_that_became_a_link_is_not_entered() {
        let (_dir, top, secret) = with_secret();
        let (tree, fresh) = (open(&top), open(&top));
        let below = |path: &str| top.join(path);
        let info = tree.info(bytes(&below("sub/deep/file"))).unwrap().unwrap();
        fs::rename(below("sub"), below("old")).unwrap();
        symlink(&secret, below("sub")).unwrap();
        // A tree that had opened the directory may go on in it, wherever it is by now. It does not see the link's target.
        let read = tree.open_file(bytes(&below("sub/deep/file")), &info);
        assert!(read.is_err() || std::io::read_to_string(read.unwrap()).unwrap() == "ordinary");
        for path in ["sub/deep/file", "sub/file", "sub/deep"].map(below) {
            assert!(fresh.info(bytes(&path)).is_err() && fresh.names(bytes(&path)).is_err());
            assert!(fresh.xattrs(bytes(&path)).is_err() && fresh.open_file(bytes(&path), &info).is_err());
        }
        assert!(fresh.names(bytes(&below("sub"))).unwrap_err().to_string().contains("replaced during the copy"));
        assert_eq!(fresh.read_link(bytes(&below("sub"))).unwrap(), bytes(&secret));
        // The directory that the user named.
        let info = HostFiles::default().info(bytes(&top), false).unwrap().unwrap();
        fs::rename(&top, below("../moved")).unwrap();
        symlink(&secret, &top).unwrap();
        assert!(
            SourceTree::open(bytes(&top), &info, false).is_err() && SourceTree::open(bytes(&top), &info, true).is_err()
        );
    }
}
