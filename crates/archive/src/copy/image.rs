//! An open image as the source or target of a copy.
//!
//! Invariants:
//! - I1. Content copied to a symbolic link goes to the file that the link leads to, inside the image: `/` and excess
//!   `..` mean the image's root directory. A link that this copy made is not followed.

use std::cell::RefCell;
use std::collections::HashSet;

use anyhow::{Context, bail};
use rustix::io::Errno;
use ubtrfs_format::item::InodeFlags;
use ubtrfs_fs::{
    Attr, Caller, Error, Fs, InodeId, NewInode, RenameFlags, SetAttr, SetTime, XattrFlags, mode, rdev_from_parts,
    rdev_parts,
};

use super::dir_chain::DirChain;
use super::new_flags::{NewFlags, flags_at};
use super::new_subvolume::{self, CopiedSubvolume};
use super::{CopiedAttributes, CopySource, CopyTarget, PieceCallback, SourceInfo, Times, XattrList};
use crate::walk::{
    child_path, data_ranges, join, normal_names, printable, read_names, read_pieces, temporary_name, type_of,
};

/// The files of an image.
pub struct ImageFiles<'f> {
    fs: &'f Fs,
    /// The text before paths in messages.
    place: String,
    /// The owner of new files.
    caller: Caller,
    /// The path of the copy's target.
    top: Vec<u8>,
    /// Directories looked up last.
    dirs: RefCell<DirChain<InodeId>>,
    /// Directories that become subvolumes.
    subvolumes: &'f [CopiedSubvolume],
    /// Flags of new files.
    flags: &'f [NewFlags],
    /// A temporary path, and the path that messages have in its place.
    shown_as: Option<(Vec<u8>, Vec<u8>)>,
    /// Symbolic links that this copy made.
    made_links: RefCell<HashSet<InodeId>>,
}

/// The place to write content to: a name in a directory, and the inode that currently has the name.
struct ContentPlace {
    dir: InodeId,
    name: Vec<u8>,
    old: Option<Attr>,
}

impl<'f> ImageFiles<'f> {
    /// The files of a filesystem. Paths in messages begin with `place`, such as `disk.img:`. New files belong to the user
    /// and group `owner` if their owner is not kept.
    pub fn new(fs: &'f Fs, place: String, owner: (u32, u32)) -> Self {
        Self {
            fs,
            place,
            caller: Caller { uid: owner.0, gid: owner.1, umask: 0 },
            top: b"/".to_vec(),
            dirs: RefCell::new(DirChain::new(usize::MAX)),
            subvolumes: &[],
            flags: &[],
            shown_as: None,
            made_links: RefCell::default(),
        }
    }

    /// Sets the path of the copy's target; by default, the root directory.
    pub fn below(self, top: &[u8]) -> Self {
        Self { top: top.to_vec(), ..self }
    }

    /// Sets a temporary path that messages show as another path.
    pub fn with_temporary(self, temporary: &[u8], shown: &[u8]) -> Self {
        Self { shown_as: Some((temporary.to_vec(), shown.to_vec())), ..self }
    }

    /// Sets the directories that become subvolumes, and the flags of new files.
    pub fn with_new(self, subvolumes: &'f [CopiedSubvolume], flags: &'f [NewFlags]) -> Self {
        Self { subvolumes, flags, ..self }
    }

    /// Finishes the new subvolumes when everything is copied.
    pub(super) fn finish_subvolumes(&self) -> anyhow::Result<()> {
        new_subvolume::finish(self.subvolumes, self.fs)
    }

    /// Follows the symbolic links at the end of a path. Returns the path of the file that they lead to.
    pub(super) fn followed(&self, path: &[u8]) -> anyhow::Result<Vec<u8>> {
        let shown = || format!("'{}'", printable(path));
        let found = self.fs.lookup_path(path, true).with_context(shown)?;
        let mut path = path.to_vec();
        for _ in 0..=MAX_LINKS {
            let attr = self.attr(&path, false)?;
            if attr.id == found.id {
                return Ok(path);
            }
            if type_of(attr.mode) != mode::SYMLINK {
                break;
            }
            let target = self.fs.readlink(attr.id)?;
            let dir_len = path.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
            path = if target.starts_with(b"/") { target } else { child_path(&path[..dir_len], &target) };
        }
        bail!("{} leads to a file by '.' or '..' behind a symbolic link; name the file itself", shown())
    }

    fn attr(&self, path: &[u8], follow: bool) -> anyhow::Result<Attr> {
        self.find(path, follow)?.ok_or(Error::NotFound).with_context(|| format!("'{}'", printable(path)))
    }

    /// Works like [`attr`](Self::attr); `None` if the last name does not exist, as of most targets.
    fn find(&self, path: &[u8], follow: bool) -> anyhow::Result<Option<Attr>> {
        let is_special = |name: &[u8]| matches!(name, b"" | b"." | b"..");
        let mut names = path.strip_prefix(b"/").unwrap_or(path).split(|byte| *byte == b'/');
        let found = match () {
            () if follow && names.any(is_special) => self.fs.lookup_path(path, true),
            () => match self.parent(path)? {
                Some((dir, name)) => self.fs.lookup(dir, &name),
                None => self.fs.getattr(self.fs.root()),
            },
        };
        let found = match found {
            Ok(attr) if follow && type_of(attr.mode) == mode::SYMLINK => self.fs.lookup_path(path, true),
            found => found,
        };
        match found {
            Ok(attr) => Ok(Some(attr)),
            Err(Error::NotFound) => Ok(None),
            Err(error) => Err(error).with_context(|| format!("'{}'", printable(path))),
        }
    }

    /// Returns the directory of a path and the last name; `None` for the root.
    fn parent(&self, path: &[u8]) -> anyhow::Result<Option<(InodeId, Vec<u8>)>> {
        let whole;
        let (dir, name) = match path.iter().rposition(|byte| *byte == b'/') {
            Some(at) if !matches!(&path[at + 1..], b"" | b"." | b"..") => (&path[..at], &path[at + 1..]),
            _ => {
                let names = normal_names(path);
                let Some((name, dirs)) = names.split_last() else { return Ok(None) };
                whole = join(dirs);
                (whole.strip_suffix(b"/").unwrap_or(&whole), *name)
            }
        };
        // A symbolic link, and a name that does not exist, are left to the lookup of the whole path.
        let enter = |at: &InodeId, name: &[u8]| match self.fs.lookup(*at, name) {
            Ok(attr) => Ok(attr.is_dir().then_some(attr.id)),
            Err(Error::NotFound) => Ok(None),
            Err(error) => Err(error.into()),
        };
        let from_top = || {
            let dir = if dir.is_empty() { b"/" } else { dir };
            let attr = self.fs.lookup_path(dir, true).with_context(|| format!("'{}'", printable(dir)))?;
            if !attr.is_dir() {
                bail!("'{}' is not a directory", printable(dir));
            }
            Ok(attr.id)
        };
        Ok(Some((self.dirs.borrow_mut().find(dir, enter, from_top)?, name.to_vec())))
    }

    /// Follows the links at the end of a path (I1).
    fn content_place(&self, path: &[u8]) -> anyhow::Result<ContentPlace> {
        let Some((mut dir, mut name)) = self.parent(path)? else { bail!("the root directory exists") };
        let mut dir_path = join(normal_names(path).split_last().map_or(&[][..], |(_, dirs)| dirs));
        for nr_links in 0..=MAX_LINKS {
            let old = match self.fs.lookup(dir, &name) {
                Ok(old) => old,
                Err(Error::NotFound) if nr_links == 0 => return Ok(ContentPlace { dir, name, old: None }),
                Err(Error::NotFound) => {
                    bail!("'{}' is a symbolic link that leads nowhere; remove it first", printable(path))
                }
                Err(error) => return Err(error.into()),
            };
            if type_of(old.mode) != mode::SYMLINK {
                return Ok(ContentPlace { dir, name, old: Some(old) });
            }
            if self.made_links.borrow().contains(&old.id) {
                bail!("'{}' is a symbolic link that this command copied; copy to another directory", printable(path));
            }
            let target = self.fs.readlink(old.id)?;
            let target = if target.starts_with(b"/") { target } else { child_path(&dir_path, &target) };
            let cut = target.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
            name = target[cut + 1..].to_vec();
            if matches!(&name[..], b"" | b"." | b"..") {
                bail!("'{}' leads to a directory; name a file", printable(path));
            }
            dir_path = target[..=cut].to_vec();
            dir = match self.fs.lookup_path(&dir_path, true) {
                Ok(attr) => attr.id,
                Err(Error::NotFound | Error::NotDirectory) => {
                    bail!("'{}' is a symbolic link that leads nowhere; remove it first", printable(path))
                }
                Err(error) => return Err(error.into()),
            };
        }
        Err(Error::SymlinkLoop.into())
    }

    fn create(&self, path: &[u8], new: NewInode<'_>) -> anyhow::Result<InodeId> {
        let Some((dir, name)) = self.parent(path)? else { bail!("the root directory exists") };
        Ok(self.fs.create(dir, &name, new, &self.caller)?.id)
    }

    fn fill_file(
        &self,
        id: InodeId,
        info: &SourceInfo,
        fill: &mut dyn FnMut(PieceCallback<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        if let Some(from) = info.id
            && self.share(from, id, info.size)?
        {
            return Ok(());
        }
        let mut end = 0;
        fill(&mut |offset, bytes| {
            end = offset + bytes.len() as u64;
            Ok(self.fs.write_all(id, offset, bytes)?)
        })?;
        if end < info.size {
            self.fs.setattr(id, &SetAttr { size: Some(info.size), ..SetAttr::default() }, &Caller::ROOT)?;
        }
        Ok(())
    }

    fn set_attributes_of(&self, id: InodeId, attributes: &CopiedAttributes) -> anyhow::Result<()> {
        if let Some(owner) = attributes.owner {
            self.set_owner_of(id, owner, attributes.mode)?;
        }
        self.set_xattrs_of(id, &attributes.xattrs)?;
        attributes.times.map_or(Ok(()), |times| self.set_times_of(id, times))
    }

    fn set_flags(&self, id: InodeId, flags: InodeFlags) -> anyhow::Result<()> {
        if flags.is_empty() {
            return Ok(());
        }
        self.fs.set_flags_of(id, flags, flags).context("cannot set its flags")
    }

    fn set_owner_of(&self, id: InodeId, owner: (u32, u32), bits: u32) -> anyhow::Result<()> {
        let mode = (type_of(bits) != mode::SYMLINK).then_some(bits & mode::PERMISSIONS);
        let set = SetAttr { uid: Some(owner.0), gid: Some(owner.1), mode, ..SetAttr::default() };
        self.fs.setattr(id, &set, &Caller::ROOT)?;
        Ok(())
    }

    fn set_xattrs_of(&self, id: InodeId, xattrs: &XattrList) -> anyhow::Result<()> {
        for (name, value) in xattrs {
            self.fs
                .setxattr(id, name, value, XattrFlags::empty(), &Caller::ROOT)
                .with_context(|| format!("cannot set {}", printable(name)))?;
        }
        Ok(())
    }

    fn set_times_of(&self, id: InodeId, times: Times) -> anyhow::Result<()> {
        let (atime, mtime) = (Some(SetTime::At(times.0)), Some(SetTime::At(times.1)));
        let set = SetAttr { atime, mtime, ..SetAttr::default() };
        self.fs.setattr(id, &set, &Caller::ROOT)?;
        Ok(())
    }

    /// Makes a new file share all data of an existing file. Returns `false` if sharing is impossible.
    fn share(&self, from: InodeId, to: InodeId, size: u64) -> anyhow::Result<bool> {
        if size == 0 {
            return Ok(true);
        }
        match self.fs.clone_range(from, 0, to, 0, 0) {
            Ok(()) => Ok(true),
            // For example, only one of the files has checksums.
            Err(Error::CrossDevice | Error::InvalidArgument(_) | Error::NotSupported(_)) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

impl CopySource for ImageFiles<'_> {
    fn info(&self, path: &[u8], follow: bool) -> anyhow::Result<Option<SourceInfo>> {
        let attr = match self.find(path, follow) {
            Ok(Some(attr)) => attr,
            Ok(None) => return Ok(None),
            // A directory on the way does not exist.
            Err(error) if matches!(error.downcast_ref(), Some(Error::NotFound)) => return Ok(None),
            Err(error) => return Err(error),
        };
        let (major, minor) = rdev_parts(attr.rdev);
        Ok(Some(SourceInfo {
            mode: attr.mode,
            uid: attr.uid,
            gid: attr.gid,
            major,
            minor,
            size: attr.size,
            nlink: attr.nlink.into(),
            atime: attr.atime,
            mtime: attr.mtime,
            identity: (attr.id.root.0, attr.id.ino.0),
            id: Some(attr.id),
        }))
    }

    fn names(&self, path: &[u8]) -> anyhow::Result<Vec<Vec<u8>>> {
        let dir = self.attr(path, false)?;
        Ok(read_names(self.fs, dir.id)?.into_iter().map(|name| name.name).collect())
    }

    fn read_link(&self, path: &[u8]) -> anyhow::Result<Vec<u8>> {
        Ok(self.fs.readlink(self.attr(path, false)?.id)?)
    }

    fn xattrs(&self, path: &[u8]) -> anyhow::Result<XattrList> {
        let id = self.attr(path, false)?.id;
        let names = self.fs.listxattr(id)?;
        names
            .into_iter()
            .map(|name| {
                let value = self.fs.getxattr(id, &name)?;
                Ok((name, value))
            })
            .collect()
    }

    fn data(&self, path: &[u8], info: &SourceInfo, piece: PieceCallback<'_>) -> anyhow::Result<()> {
        let id = match info.id {
            Some(id) => id,
            None => self.attr(path, true)?.id,
        };
        let mut buf = Vec::new();
        for range in data_ranges(self.fs, id, info.size)? {
            read_pieces(self.fs, id, range, &mut buf, &mut *piece)?;
        }
        Ok(())
    }

    fn shown_source(&self, path: &[u8]) -> String {
        let shown = self.shown_as.as_ref().and_then(|(temporary, shown)| {
            let rest = path.strip_prefix(&temporary[..])?;
            Some([shown, rest].concat())
        });
        format!("{}{}", self.place, printable(shown.as_deref().unwrap_or(path)))
    }
}

impl CopyTarget for ImageFiles<'_> {
    fn top(&self) -> Vec<u8> {
        self.top.clone()
    }

    fn there(&self, path: &[u8], _named: bool, follow: bool) -> anyhow::Result<Option<SourceInfo>> {
        self.info(path, follow)
    }

    fn make_dir(&self, path: &[u8], mode: u32) -> anyhow::Result<Option<InodeId>> {
        let made = match self.subvolumes.iter().any(|new| new.is_at(path)) {
            false => self.create(path, NewInode::dir(mode))?,
            true => {
                let Some((dir, name)) = self.parent(path)? else { bail!("the root directory exists") };
                self.fs.create_subvolume(dir, &name, &self.caller)?
            }
        };
        self.set_flags(made, flags_at(self.flags, path, true))?;
        Ok(Some(made))
    }

    fn make_link(&self, path: &[u8], target: &[u8]) -> anyhow::Result<()> {
        let made = self.create(path, NewInode::symlink(target))?;
        self.made_links.borrow_mut().insert(made);
        Ok(())
    }

    fn make_special(&self, path: &[u8], info: &SourceInfo) -> anyhow::Result<()> {
        let is_device = matches!(type_of(info.mode), mode::CHAR | mode::BLOCK);
        let rdev = if is_device { rdev_from_parts(info.major, info.minor) } else { 0 };
        self.create(path, NewInode { mode: info.mode, rdev, symlink_target: None, ..NewInode::default() }).map(|_| ())
    }

    /// Makes a file. If a file exists at the path, the new file has a temporary name until it is complete, and then
    /// replaces the existing file. The owner and mode of the existing file are kept, as when cp writes into it.
    fn make_file(
        &self,
        path: &[u8],
        info: &SourceInfo,
        _named: bool,
        attributes: &CopiedAttributes,
        fill: &mut dyn FnMut(PieceCallback<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let ContentPlace { dir, name, old } = self.content_place(path)?;
        let temporary = temporary_name();
        let made = if old.is_some() { &temporary } else { &name };
        let id = self.fs.create(dir, made, NewInode::file(info.mode), &self.caller)?.id;
        // Flags about data only take effect on an empty file.
        self.set_flags(id, flags_at(self.flags, path, false))?;
        self.fs.open_inode(id)?;
        let finished = self.fill_file(id, info, fill).and_then(|()| {
            if let Some(old) = old.as_ref().filter(|old| type_of(old.mode) == mode::REGULAR) {
                self.set_owner_of(id, (old.uid, old.gid), old.mode)?;
            }
            self.set_attributes_of(id, attributes)
        });
        self.fs.release_inode(id);
        let done = finished.and_then(|()| match old {
            Some(_) => Ok(self.fs.rename(dir, made, dir, &name, RenameFlags::empty())?),
            None => Ok(()),
        });
        if done.is_err() {
            // An error of this call is ignored, because the earlier error is reported.
            let _ = self.fs.unlink(dir, made);
        }
        done
    }

    fn hard_link(&self, old: &[u8], new: &[u8]) -> anyhow::Result<()> {
        // `old` is the path at which the file was copied first. It may be a symbolic link through which the data was
        // written. As with cp, the new name is then a hard link to that symbolic link.
        let old = self.attr(old, false)?;
        let Some((dir, name)) = self.parent(new)? else { bail!("the root directory exists") };
        Ok(self.fs.link(old.id, dir, &name).map(|_| ())?)
    }

    fn unlink(&self, path: &[u8]) -> anyhow::Result<()> {
        let Some((dir, name)) = self.parent(path)? else { bail!("the root directory cannot be replaced") };
        Ok(self.fs.unlink(dir, &name)?)
    }

    fn set_owner(&self, path: &[u8], owner: (u32, u32), bits: u32) -> anyhow::Result<()> {
        self.set_owner_of(self.attr(path, false)?.id, owner, bits)
    }

    fn set_xattrs(&self, path: &[u8], xattrs: &XattrList) -> anyhow::Result<()> {
        if xattrs.is_empty() {
            return Ok(());
        }
        self.set_xattrs_of(self.attr(path, false)?.id, xattrs)
    }

    fn set_times(&self, path: &[u8], times: Times) -> anyhow::Result<()> {
        self.set_times_of(self.attr(path, false)?.id, times)
    }

    fn takes_no_more(&self, error: &anyhow::Error) -> bool {
        let errnos = [Errno::NOSPC, Errno::IO, Errno::ROFS].map(Errno::raw_os_error);
        error.chain().any(|cause| cause.downcast_ref::<Error>().is_some_and(|error| errnos.contains(&error.errno())))
    }

    fn shown_path(&self, path: &[u8]) -> String {
        self.shown_source(path)
    }
}

/// Limit for symbolic links on one path, as on Linux.
const MAX_LINKS: usize = 40;
