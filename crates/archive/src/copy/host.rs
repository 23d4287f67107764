//! Files of the host as the source or target of a copy.
//!
//! Invariants:
//! - I1. A copy to the host stays below the directory that the user named, for all names in the image and all links on
//!   the host ([`Beneath`]). Links are followed only for the target that the user named.
//! - I2. A copy from the host reads nothing outside of the directory that the user named ([`SourceTree`]). So root can copy
//!   the tree of a user who changes it meanwhile.

use std::cell::RefCell;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use rustix::fs::{AtFlags, CWD, Dev, FileType, Gid, Mode, OFlags, SeekFrom, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;
use ubtrfs_format::item::Timespec;
use ubtrfs_fs::{InodeId, mode};

use super::beneath::{Beneath, SourceTree, open_regular};
use super::read_ahead::ReadAhead;
use super::{
    CopiedAttributes, CopyMessage, CopySource, CopyTarget, CopyWatch, PieceCallback, SourceInfo, Times, XattrList,
};
use crate::host_file::{self, HostFile};
use crate::walk::{COPY_LEN, normal_names, os_string, printable, shown, type_of};

/// Files of the host as the source.
#[derive(Default)]
pub struct HostFiles {
    /// The file that the user named and that was looked at last.
    named: RefCell<Option<NamedSource>>,
    /// The directory that is copied. Everything below it is reached through it (I2).
    tree: RefCell<Option<SourceTree>>,
    /// Reads that directory.
    ahead: RefCell<Option<ReadAhead>>,
}

struct NamedSource {
    path: Vec<u8>,
    info: SourceInfo,
    /// Whether a link at the path was followed.
    follow: bool,
}

impl HostFiles {
    /// Calls `read` with the directory that is copied, if the path is below it and was not named by the user.
    fn in_tree<T>(&self, path: &[u8], read: impl FnOnce(&SourceTree) -> T) -> Option<T> {
        if self.named.borrow().as_ref().is_some_and(|named| named.path == path && !named.info.is_dir()) {
            return None;
        }
        self.tree.borrow().as_ref().filter(|tree| tree.has(path)).map(read)
    }
}

fn host_path(path: &[u8]) -> PathBuf {
    PathBuf::from(os_string(path))
}

/// The attributes of the file at a path; `None` if there is no file.
pub(super) fn info_at(path: &[u8], follow: bool) -> anyhow::Result<Option<SourceInfo>> {
    let path = host_path(path);
    match if follow { fs::metadata(&path) } else { fs::symlink_metadata(&path) } {
        Ok(meta) => Ok(Some(info_of(&meta))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| shown(&path)),
    }
}

pub(super) fn xattrs_at(path: &[u8]) -> anyhow::Result<XattrList> {
    let path = host_path(path);
    // Most files have few, so the list is short first.
    let mut list = vec![0; XATTR_LIST_LEN];
    let len = loop {
        match rustix::fs::llistxattr(&path, &mut list[..]) {
            Ok(len) => break len,
            Err(Errno::NOTSUP) => break 0,
            Err(Errno::RANGE) if list.len() < XATTR_MAX => list.resize(XATTR_MAX, 0),
            Err(error) => return Err(error).context("cannot list its attributes"),
        }
    };
    list.truncate(len);
    if list.is_empty() {
        return Ok(XattrList::new());
    }
    let mut xattrs = Vec::new();
    let mut value = vec![0; XATTR_MAX];
    for name in list.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        match rustix::fs::lgetxattr(&path, os_string(name), &mut value[..]) {
            Ok(len) => xattrs.push((name.to_vec(), value[..len].to_vec())),
            // Some attributes are listed but not readable (`trusted.*` for ordinary users), or were removed after
            // listing.
            Err(Errno::NODATA | Errno::PERM | Errno::NOTSUP) => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read its attribute {}", printable(name)));
            }
        }
    }
    Ok(xattrs)
}

/// Calls `copy` for the data of a file: an offset and a number of bytes, which holes and the end may cut short. It returns
/// how many bytes it read there; zero ends the copy. The file may grow or shrink meanwhile, so it is copied up to its
/// current end.
pub(super) fn each_data(
    file: &File,
    size: u64,
    copy: &mut dyn FnMut(u64, usize) -> anyhow::Result<usize>,
) -> anyhow::Result<()> {
    // Some files in /proc and /sys have content although their size is 0.
    let piece_len = if size == 0 { COPY_LEN } else { usize::try_from(size).unwrap_or(COPY_LEN).min(COPY_LEN) };
    let mut at = 0;
    loop {
        match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => at = start,
            Err(Errno::NXIO) => return Ok(()),
            Err(Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
        let end = rustix::fs::seek(file, SeekFrom::Hole(at)).unwrap_or(u64::MAX);
        while at < end {
            let count = copy(at, piece_len.min(usize::try_from(end - at).unwrap_or(usize::MAX)))?;
            if count == 0 {
                return Ok(());
            }
            at += count as u64;
        }
    }
}

impl CopySource for HostFiles {
    fn info(&self, path: &[u8], follow: bool) -> anyhow::Result<Option<SourceInfo>> {
        if !follow
            && let Some(ahead) = &mut *self.ahead.borrow_mut()
            && let Some(info) = ahead.enter(path).and_then(|entry| entry.info())
        {
            return Ok(Some(info));
        }
        if !follow && let Some(info) = self.in_tree(path, |tree| tree.info(path)) {
            return info;
        }
        let info = info_at(path, follow)?;
        *self.named.borrow_mut() = info.clone().map(|info| NamedSource { path: path.to_vec(), info, follow });
        Ok(info)
    }

    fn is_stream(&self, info: &SourceInfo) -> bool {
        matches!(type_of(info.mode), mode::FIFO | mode::CHAR | mode::BLOCK)
    }

    /// Begins to read ahead below a directory that the user named.
    fn names(&self, path: &[u8]) -> anyhow::Result<Vec<Vec<u8>>> {
        let mut ahead = self.ahead.borrow_mut();
        if let Some(names) = ahead.as_mut().and_then(|ahead| ahead.at(path)?.take_names()) {
            return Ok(names);
        }
        if let Some(named) = self.named.borrow().as_ref().filter(|named| named.path == path) {
            let tree = SourceTree::open(path, &named.info, named.follow)?;
            let names = tree.names(path)?;
            *ahead = ReadAhead::below(tree.again(), path, &names);
            *self.tree.borrow_mut() = Some(tree);
            return Ok(names);
        }
        self.in_tree(path, |tree| tree.names(path)).context("a path outside of the source")?
    }

    fn read_link(&self, path: &[u8]) -> anyhow::Result<Vec<u8>> {
        let by_path = || Ok(fs::read_link(host_path(path))?.into_os_string().into_vec());
        self.in_tree(path, |tree| tree.read_link(path)).unwrap_or_else(by_path)
    }

    fn xattrs(&self, path: &[u8]) -> anyhow::Result<XattrList> {
        let read = self.ahead.borrow_mut().as_mut().and_then(|ahead| ahead.at(path)?.take_xattrs());
        let read = read.map(Ok).or_else(|| self.in_tree(path, |tree| tree.xattrs(path)));
        read.unwrap_or_else(|| xattrs_at(path))
    }

    fn data(&self, path: &[u8], info: &SourceInfo, piece: PieceCallback<'_>) -> anyhow::Result<()> {
        if let Some(ahead) = &mut *self.ahead.borrow_mut()
            && ahead.at(path).is_some()
            && ahead.data(piece)?
        {
            return Ok(());
        }
        let file = match self.in_tree(path, |tree| tree.open_file(path, info)) {
            Some(file) => file?,
            None if self.is_stream(info) => return stream(&mut File::open(host_path(path))?, piece),
            None => open_regular(CWD, path, info, OFlags::empty())?,
        };
        let mut buf = Vec::new();
        each_data(&file, info.size, &mut |at, len| {
            buf.resize(len, 0);
            let count = file.read_at(&mut buf, at)?;
            if count > 0 {
                piece(at, &buf[..count])?;
            }
            Ok(count)
        })
    }

    fn shown_source(&self, path: &[u8]) -> String {
        printable(path)
    }
}

/// Reads a file without offsets, such as a pipe, to its end.
fn stream(file: &mut File, piece: PieceCallback<'_>) -> anyhow::Result<()> {
    let mut buf = vec![0; COPY_LEN];
    let mut at = 0;
    loop {
        match file.read(&mut buf) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                piece(at, &buf[..count])?;
                at += count as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn info_of(meta: &fs::Metadata) -> SourceInfo {
    let time = |sec, nsec: i64| Timespec { sec, nsec: u32::try_from(nsec).unwrap_or_default() };
    SourceInfo {
        mode: meta.mode(),
        uid: meta.uid(),
        gid: meta.gid(),
        major: rustix::fs::major(meta.rdev()),
        minor: rustix::fs::minor(meta.rdev()),
        size: meta.size(),
        nlink: meta.nlink(),
        atime: time(meta.atime(), meta.atime_nsec()),
        mtime: time(meta.mtime(), meta.mtime_nsec()),
        identity: (meta.dev(), meta.ino()),
        id: None,
    }
}

/// A directory of the host as the target. Paths begin with a slash, which stands for this directory.
pub struct HostTarget<'w> {
    beneath: Beneath,
    /// The directory as the user named it.
    shown: PathBuf,
    /// The target's name in the directory, if the user named no directory.
    name: Option<Vec<u8>>,
    /// Whether files replace devices, FIFOs and sockets.
    replaces_special: bool,
    watch: CopyWatch<'w>,
}

impl<'w> HostTarget<'w> {
    /// Opens the directory at `target`, or the directory that contains it.
    pub fn open(target: &Path, watch: CopyWatch<'w>) -> anyhow::Result<Self> {
        let (dir, name) = match fs::metadata(target).is_ok_and(|meta| meta.is_dir()) {
            true => (target, None),
            false => {
                let name = target.file_name().with_context(|| format!("{} does not exist", shown(target)))?;
                let dir = target.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
                (dir, Some(name.as_bytes().to_vec()))
            }
        };
        let beneath = Beneath::new(Arc::new(host_file::open_dir(dir)?));
        Ok(Self { beneath, shown: dir.to_owned(), name, replaces_special: false, watch })
    }

    /// Lets files replace devices, FIFOs and sockets, instead of being written into them as by cp. Such a file may come
    /// from another copy, and its device may be any.
    pub fn replacing_special(self) -> Self {
        Self { replaces_special: true, ..self }
    }

    fn place<'p>(&self, path: &'p [u8]) -> anyhow::Result<(Arc<OwnedFd>, &'p [u8])> {
        self.beneath.place(path)
    }

    fn set_file_attributes(&self, file: &File, path: &[u8], attributes: &CopiedAttributes) -> anyhow::Result<()> {
        if let Some(owner) = attributes.owner {
            let (uid, gid) = ids_of(owner)?;
            let has_owner = is_permitted(rustix::fs::fchown(file, Some(uid), Some(gid)))?;
            rustix::fs::fchmod(file, kept_mode(attributes.mode, has_owner)).context("cannot set its mode")?;
        }
        for (name, value) in &attributes.xattrs {
            let done = rustix::fs::fsetxattr(file, os_string(name), value, XattrFlags::empty());
            self.attribute_done(path, name, done)?;
        }
        if let Some(times) = attributes.times {
            rustix::fs::futimens(file, &timestamps(times)).context("cannot set its times")?;
        }
        Ok(())
    }

    /// Handles the result of setting an attribute. The host's filesystem or the user's rights may not allow some
    /// attributes.
    fn attribute_done(&self, path: &[u8], name: &[u8], done: rustix::io::Result<()>) -> anyhow::Result<()> {
        match done {
            Ok(()) => Ok(()),
            Err(Errno::PERM | Errno::NOTSUP | Errno::ACCESS) => {
                (self.watch)(CopyMessage::LostAttribute { path: &self.shown(path), name });
                Ok(())
            }
            Err(error) => Err(error).with_context(|| format!("cannot set {}", printable(name))),
        }
    }

    /// Formats a path for messages, as the user would write it.
    fn shown(&self, path: &[u8]) -> PathBuf {
        let below = normal_names(path).join(&b'/');
        self.shown.join(os_string(&below))
    }
}

/// Whether the user may set an owner. As with cp -p, the copy keeps only the attributes that the user may set.
fn is_permitted(owned: rustix::io::Result<()>) -> rustix::io::Result<bool> {
    match owned {
        Ok(()) => Ok(true),
        Err(Errno::PERM) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The mode of a copy. Without its owner, a copy does not run programs as the user who made it.
fn kept_mode(bits: u32, has_owner: bool) -> Mode {
    let lost = if has_owner { 0 } else { mode::SETUID | mode::SETGID };
    Mode::from_raw_mode(bits & mode::PERMISSIONS & !lost)
}

fn timestamps((atime, mtime): Times) -> Timestamps {
    let time = |time: Timespec| rustix::fs::Timespec { tv_sec: time.sec, tv_nsec: time.nsec.into() };
    Timestamps { last_access: time(atime), last_modification: time(mtime) }
}

impl CopyTarget for HostTarget<'_> {
    fn top(&self) -> Vec<u8> {
        let mut path = vec![b'/'];
        path.extend(self.name.iter().flatten());
        path
    }

    /// Follows a symbolic link only if the user named it as the target (I1).
    fn there(&self, path: &[u8], named: bool, follow: bool) -> anyhow::Result<Option<SourceInfo>> {
        if (named && follow) || path == b"/" {
            return info_at(self.shown(path).as_os_str().as_bytes(), true);
        }
        self.beneath.info(path)
    }

    fn make_dir(&self, path: &[u8], mode: u32) -> anyhow::Result<Option<InodeId>> {
        let (dir, name) = self.place(path)?;
        // The directory stays writable until it is complete, and then gets its final mode.
        rustix::fs::mkdirat(&*dir, name, Mode::from_raw_mode((mode & 0o777) | 0o700))?;
        Ok(None)
    }

    fn make_link(&self, path: &[u8], target: &[u8]) -> anyhow::Result<()> {
        let (dir, name) = self.place(path)?;
        Ok(rustix::fs::symlinkat(target, &*dir, name)?)
    }

    fn make_special(&self, path: &[u8], info: &SourceInfo) -> anyhow::Result<()> {
        let kind = match type_of(info.mode) {
            mode::CHAR => FileType::CharacterDevice,
            mode::BLOCK => FileType::BlockDevice,
            mode::SOCKET => FileType::Socket,
            _ => FileType::Fifo,
        };
        let dev: Dev = match kind {
            FileType::CharacterDevice | FileType::BlockDevice => rustix::fs::makedev(info.major, info.minor),
            _ => 0,
        };
        let (dir, name) = self.place(path)?;
        let mode = Mode::from_raw_mode(info.mode & 0o777);
        rustix::fs::mknodat(&*dir, name, kind, mode, dev).context("cannot make the special file")
    }

    fn make_file(
        &self,
        path: &[u8],
        info: &SourceInfo,
        named: bool,
        attributes: &CopiedAttributes,
        fill: &mut dyn FnMut(PieceCallback<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut file = match named {
            true => HostFile::named(&self.shown(path), info.mode)?,
            false => {
                let (dir, name) = self.place(path)?;
                match self.replaces_special {
                    true => HostFile::replacing(&dir, name, info.mode)?,
                    false => HostFile::in_dir(&dir, name, info.mode)?,
                }
            }
        };
        let mut end = 0;
        fill(&mut |offset, bytes| {
            end = offset + bytes.len() as u64;
            Ok(file.write_at(offset, bytes)?)
        })?;
        // Set the size, because the file may end in a hole.
        file.set_size(info.size.max(end))?;
        // If the target is a device, its attributes are not changed.
        if !file.is_direct() {
            self.set_file_attributes(file.file(), path, attributes)?;
        }
        Ok(file.keep()?)
    }

    fn hard_link(&self, old: &[u8], new: &[u8]) -> anyhow::Result<()> {
        let ((old_dir, old_name), (dir, name)) = (self.place(old)?, self.place(new)?);
        Ok(rustix::fs::linkat(&*old_dir, old_name, &*dir, name, AtFlags::empty())?)
    }

    fn unlink(&self, path: &[u8]) -> anyhow::Result<()> {
        let (dir, name) = self.place(path)?;
        // If the file cannot be opened, it is removed without the check that no process uses it as an image.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        if let Ok(file) = rustix::fs::openat(&*dir, name, flags, Mode::empty()) {
            host_file::refuse_in_use(&File::from(file), &self.shown(path))?;
        }
        Ok(rustix::fs::unlinkat(&*dir, name, AtFlags::empty())?)
    }

    fn set_owner(&self, path: &[u8], owner: (u32, u32), bits: u32) -> anyhow::Result<()> {
        let (dir, name) = self.place(path)?;
        let (uid, gid) = ids_of(owner)?;
        let owned = rustix::fs::chownat(&*dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW);
        let has_owner = is_permitted(owned)?;
        if type_of(bits) != mode::SYMLINK {
            let file =
                rustix::fs::openat(&*dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
            let opened = format!("/proc/self/fd/{}", file.as_raw_fd());
            if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) == FileType::Symlink {
                bail!("it was replaced by a symbolic link during the copy");
            }
            rustix::fs::chmod(opened, kept_mode(bits, has_owner)).context("cannot set its mode")?;
        }
        Ok(())
    }

    fn set_xattrs(&self, path: &[u8], xattrs: &XattrList) -> anyhow::Result<()> {
        for (name, value) in xattrs {
            let set = |path: PathBuf| rustix::fs::lsetxattr(path, os_string(name), value, XattrFlags::empty());
            let done = self.beneath.with_path(path, set)?;
            self.attribute_done(path, name, done)?;
        }
        Ok(())
    }

    fn set_times(&self, path: &[u8], times: Times) -> anyhow::Result<()> {
        let (dir, name) = self.place(path)?;
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::utimensat(&*dir, name, &timestamps(times), flags).context("cannot set its times")
    }

    /// Sets attributes by the file's name. The directory that the user named has no name below itself, so it is opened
    /// again.
    fn set_attributes(&self, path: &[u8], attributes: &CopiedAttributes) -> anyhow::Result<()> {
        if path == b"/" && self.name.is_none() {
            if attributes.is_nothing() {
                return Ok(());
            }
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let dir = rustix::fs::openat(&**self.beneath.base(), ".", flags, Mode::empty())?;
            return self.set_file_attributes(&dir.into(), path, attributes);
        }
        self.set_each_attribute(path, attributes)
    }

    fn takes_no_more(&self, error: &anyhow::Error) -> bool {
        let is_of_all = |errno: Errno| matches!(errno, Errno::NOSPC | Errno::DQUOT | Errno::ROFS);
        let errno = |cause: &(dyn std::error::Error + 'static)| {
            let of_host = || Errno::from_io_error(cause.downcast_ref::<io::Error>()?);
            cause.downcast_ref::<Errno>().copied().or_else(of_host)
        };
        error.chain().filter_map(errno).any(is_of_all)
    }

    fn shown_path(&self, path: &[u8]) -> String {
        shown(&self.shown(path))
    }
}

/// The length of the list of attributes that is tried first.
const XATTR_LIST_LEN: usize = 256;

/// Linux's limit for an attribute, and for the list of attributes.
const XATTR_MAX: usize = 64 << 10;

/// A file was not copied to the host, because an image may contain the number that means "do not change" to chown(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidOwner {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

impl fmt::Display for InvalidOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "its owner {}:{} is not a valid user and group", self.uid, self.gid)
    }
}

impl std::error::Error for InvalidOwner {}

/// Checks a user and a group.
fn ids_of((uid, gid): (u32, u32)) -> Result<(Uid, Gid), InvalidOwner> {
    if uid == u32::MAX || gid == u32::MAX {
        return Err(InvalidOwner { uid, gid });
    }
    Ok((Uid::from_raw(uid), Gid::from_raw(gid)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> SourceInfo {
        let time = Timespec { sec: 1, nsec: 0 };
        let (uid, gid) = (0, 0);
        SourceInfo {
            mode: mode::REGULAR | 0o644,
            uid,
            gid,
            major: 0,
            minor: 0,
            size: 3,
            nlink: 1,
            atime: time,
            mtime: time,
            identity: (0, 1),
            id: None,
        }
    }

    /// Even names that the tree checker should have refused do not lead out of the target.
    #[test]
    fn no_call_leaves_the_target() {
        let dir = tempfile::tempdir().unwrap();
        let (outside, target) = (dir.path().join("outside"), dir.path().join("target"));
        fs::create_dir(&outside).unwrap();
        fs::create_dir(&target).unwrap();
        std::os::unix::fs::symlink(&outside, target.join("way")).unwrap();
        std::os::unix::fs::symlink("../outside", target.join("short")).unwrap();
        fs::write(outside.join("there"), "old").unwrap();
        let before = fs::metadata(outside.join("there")).unwrap();
        let to = HostTarget::open(&target, &|_| {}).unwrap();
        let plain = CopiedAttributes { owner: None, mode: 0o644, xattrs: Vec::new(), times: None };
        let names = ["/../outside/there", "/way/there", "/short/there", "/.", "/..", "/", "/a/../../outside/there"];
        for path in names.map(str::as_bytes) {
            assert!(to.make_dir(path, 0o755).is_err());
            assert!(to.make_link(path, b"x").is_err());
            assert!(to.make_special(path, &SourceInfo { mode: mode::FIFO | 0o644, ..info() }).is_err());
            assert!(to.make_file(path, &info(), false, &plain, &mut |piece| piece(0, b"new")).is_err());
            assert!(to.hard_link(path, b"/link").is_err() && to.hard_link(b"/way", path).is_err());
            assert!(to.unlink(path).is_err());
            assert!(to.set_owner(path, (1, 1), 0o4777).is_err());
            assert!(to.set_xattrs(path, &vec![(b"user.a".to_vec(), b"b".to_vec())]).is_err());
            assert!(to.set_times(path, (info().atime, info().mtime)).is_err());
            assert!(path == b"/" || to.there(path, false, true).is_err());
        }
        let after = fs::metadata(outside.join("there")).unwrap();
        assert_eq!(fs::read(outside.join("there")).unwrap(), b"old");
        assert_eq!((before.mode(), before.uid(), before.mtime()), (after.mode(), after.uid(), after.mtime()));
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
        // A link at the last name is replaced, not followed.
        to.make_file(b"/way", &info(), false, &plain, &mut |piece| piece(0, b"new")).unwrap();
        assert!(fs::symlink_metadata(target.join("way")).unwrap().is_file());
    }
}
