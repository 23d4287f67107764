//! `ubtrfs cp`: copies between the host and images, and inside an image, where data is shared instead of copied.
//!
//! A copy has two ends, each the host or an open image: `From` reads and `To` writes. This module walks the source.

mod beneath;
mod dir_chain;
mod host;
mod image;
pub(crate) mod new_flags;
pub(crate) mod new_subvolume;
pub(crate) mod owners;
mod read_ahead;

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use rustix::io::Errno;
use ubtrfs_format::clock::fixed_clock;
use ubtrfs_format::item::Timespec;
use ubtrfs_fs::{Fs, InodeId, mode};

use self::host::{HostFiles, HostTarget};
use self::image::Image;
use self::new_flags::NewFlags;
use self::new_subvolume::CopiedSubvolume;
use self::owners::OwnerMap;
use super::text::printable;
use super::{
    ImageOptions, ImagePath, ImageUse, PATTERNS_HELP, VisitedDirs, child_path, identity_of, is_same_image, join,
    normal_names, push_name, type_of, with_image,
};
use crate::common::{Shown, each, print_error, warn};

/// Copy files between this system and images, or inside of an image
#[derive(clap::Args)]
#[command(after_help = PATTERNS_HELP)]
pub(crate) struct Args {
    /// Files to copy, then the target; each is IMAGE:/PATH or a path of this system
    #[arg(value_name = "PATH", required = true, num_args = 2..)]
    paths: Vec<OsString>,
    /// Copy directories and their content; symbolic links stay links
    #[arg(short, long, visible_short_alias = 'R')]
    recursive: bool,
    /// Copy symbolic links as links also without -r
    #[arg(short = 'P', long)]
    no_dereference: bool,
    /// Keep owner, times, extended attributes and hard links
    #[arg(short, long)]
    preserve: bool,
    /// Same as -r -p
    #[arg(short, long)]
    archive: bool,
    /// Owner of the copies
    #[arg(long, value_name = "UID:GID", value_parser = super::import::parse_owner)]
    owner: Option<(u32, u32)>,
    #[command(flatten)]
    image: ImageOptions,
}

impl Args {
    /// The options of `cp -a`.
    fn archive() -> Self {
        Self {
            paths: Vec::new(),
            recursive: true,
            no_dereference: true,
            preserve: true,
            archive: true,
            owner: None,
            image: ImageOptions::default(),
        }
    }
}

/// One end of a copy.
#[derive(Clone, Debug)]
enum CopyEnd {
    Host(PathBuf),
    Image(ImagePath),
}

impl CopyEnd {
    fn of(text: &OsString) -> Self {
        ImagePath::split(text).map_or_else(|| Self::Host(PathBuf::from(text)), Self::Image)
    }

    fn image(&self) -> Option<&Path> {
        match self {
            Self::Host(_) => None,
            Self::Image(at) => Some(&at.image),
        }
    }

    fn path(&self) -> Vec<u8> {
        match self {
            Self::Host(path) => path.as_os_str().as_bytes().to_vec(),
            Self::Image(at) => at.path.clone(),
        }
    }
}

/// Attributes of a file that a copy needs.
#[derive(Clone, Debug)]
struct SourceInfo {
    mode: u32,
    uid: u32,
    gid: u32,
    major: u32,
    minor: u32,
    size: u64,
    nlink: u64,
    atime: Timespec,
    mtime: Timespec,
    /// Device or subvolume, and inode: equal for all names of a file.
    identity: (u64, u64),
    /// The inode, if the file is in an image.
    id: Option<InodeId>,
}

impl SourceInfo {
    fn is_dir(&self) -> bool {
        type_of(self.mode) == mode::DIRECTORY
    }
}

/// Names and values of extended attributes.
type XattrList = Vec<(Vec<u8>, Vec<u8>)>;

/// Times of the last access and of the last modification.
type Times = (Timespec, Timespec);

/// Attributes to set on the copy. An attribute that is `None` or empty keeps the value that a new file has.
struct CopiedAttributes {
    /// Owner and group, which are set together with the mode.
    owner: Option<(u32, u32)>,
    mode: u32,
    xattrs: XattrList,
    times: Option<Times>,
}

impl CopiedAttributes {
    fn is_nothing(&self) -> bool {
        self.owner.is_none() && self.xattrs.is_empty() && self.times.is_none()
    }
}

/// Receives a piece of a file: its offset and bytes.
type PieceCallback<'p> = &'p mut dyn FnMut(u64, &[u8]) -> anyhow::Result<()>;

/// The source of a copy.
trait From {
    fn info(&self, path: &[u8], follow: bool) -> anyhow::Result<Option<SourceInfo>>;
    /// The paths that a path with patterns leads to. The shell has expanded host patterns.
    fn expand(&self, path: Vec<u8>) -> anyhow::Result<Vec<Vec<u8>>> {
        Ok(vec![path])
    }
    /// Whether the copy reads the content of this special file, as cp does without -r.
    fn is_stream(&self, _info: &SourceInfo) -> bool {
        false
    }
    fn names(&self, path: &[u8]) -> anyhow::Result<Vec<Vec<u8>>>;
    fn read_link(&self, path: &[u8]) -> anyhow::Result<Vec<u8>>;
    fn xattrs(&self, path: &[u8]) -> anyhow::Result<XattrList>;
    /// Passes the file's data to `piece`, without holes.
    fn data(&self, path: &[u8], info: &SourceInfo, piece: PieceCallback<'_>) -> anyhow::Result<()>;
    /// Formats a path for messages.
    fn shown_source(&self, path: &[u8]) -> String;
}

/// The target of a copy. `named` means that the user named the file itself; other files were found by walking a
/// directory.
trait To {
    /// The target's path; all other paths are below it.
    fn top(&self) -> Vec<u8>;
    /// Returns the file at a path, if there is one. With `follow`, a symbolic link at the path is resolved, as far as
    /// the invariant I1 of the module `host` or `image` permits.
    fn there(&self, path: &[u8], named: bool, follow: bool) -> anyhow::Result<Option<SourceInfo>>;
    /// Makes a directory; returns its inode if it is in an image.
    fn make_dir(&self, path: &[u8], mode: u32) -> anyhow::Result<Option<InodeId>>;
    fn make_link(&self, path: &[u8], target: &[u8]) -> anyhow::Result<()>;
    fn make_special(&self, path: &[u8], info: &SourceInfo) -> anyhow::Result<()>;
    /// Makes a file with the data that `fill` produces, and replaces an existing file. On error, an existing regular
    /// file stays unchanged.
    fn make_file(
        &self,
        path: &[u8],
        info: &SourceInfo,
        named: bool,
        attributes: &CopiedAttributes,
        fill: &mut dyn FnMut(PieceCallback<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()>;
    fn hard_link(&self, old: &[u8], new: &[u8]) -> anyhow::Result<()>;
    fn unlink(&self, path: &[u8]) -> anyhow::Result<()>;
    fn set_owner(&self, path: &[u8], owner: (u32, u32), mode: u32) -> anyhow::Result<()>;
    fn set_xattrs(&self, path: &[u8], xattrs: &XattrList) -> anyhow::Result<()>;
    fn set_times(&self, path: &[u8], times: Times) -> anyhow::Result<()>;
    /// Sets the attributes of a directory, symbolic link or special file. ([`To::make_file`] sets those of the file
    /// that it makes.)
    fn set_attributes(&self, path: &[u8], attributes: &CopiedAttributes) -> anyhow::Result<()> {
        self.set_each_attribute(path, attributes)
    }
    fn set_each_attribute(&self, path: &[u8], attributes: &CopiedAttributes) -> anyhow::Result<()> {
        if let Some(owner) = attributes.owner {
            self.set_owner(path, owner, attributes.mode)?;
        }
        self.set_xattrs(path, &attributes.xattrs)?;
        attributes.times.map_or(Ok(()), |times| self.set_times(path, times))
    }
    /// Formats a path for messages.
    fn shown_path(&self, path: &[u8]) -> String;
}

pub(crate) fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    args.recursive |= args.archive;
    args.preserve |= args.archive;
    let Some((target, sources)) = args.paths.split_last() else { bail!("cp needs a source and a target") };
    let target = CopyEnd::of(target);
    let sources: Vec<CopyEnd> = sources.iter().map(CopyEnd::of).collect();
    if target.image().is_none() && sources.iter().all(|source| source.image().is_none()) {
        bail!("neither source nor target is in an image; write IMAGE:/path for one of them");
    }
    let mut all_done = true;
    let opened = each(sources.chunk_by(|one, other| one.image() == other.image()), |sources| {
        all_done &= copy_from_one_place(&args, sources, &target)?;
        Ok(())
    });
    Ok(if all_done { opened } else { ExitCode::FAILURE })
}

/// Opens both ends and copies the sources, which are all on the host or all in one image. Returns whether everything
/// was copied. If the target is in the sources' image, that image is opened once.
fn copy_from_one_place(args: &Args, sources: &[CopyEnd], target: &CopyEnd) -> anyhow::Result<bool> {
    let copy =
        |from: &dyn From, to: &dyn To, shared: bool| CopyOperation::new(args, from, to, shared).run(sources, target);
    let options = &args.image;
    match (sources[0].image(), target) {
        (None, CopyEnd::Host(_)) => {
            bail!("neither source nor target is in an image; write IMAGE:/path for one of them")
        }
        (None, CopyEnd::Image(to)) => with_image(&to.image, options, ImageUse::Write, |fs| {
            let (host, image) = (HostFiles::default(), Image::target(fs, to));
            let mut copy = CopyOperation::new(args, &host, &image, false);
            copy.image = identity_of(&to.image);
            copy.run(sources, target)
        }),
        (Some(from), CopyEnd::Host(to)) => with_image(from, options, ImageUse::Read, |fs| {
            let to = HostTarget::open(to)?;
            copy(&Image::new(fs, from), &to, false)
        }),
        (Some(from), CopyEnd::Image(to)) if is_same_image(from, &to.image) => {
            with_image(from, options, ImageUse::Write, |fs| copy(&Image::new(fs, from), &Image::target(fs, to), true))
        }
        (Some(from), CopyEnd::Image(to)) => with_image(from, options, ImageUse::Read, |source| {
            with_image(&to.image, options, ImageUse::Write, |fs| {
                copy(&Image::new(source, from), &Image::target(fs, to), false)
            })
        }),
    }
}

/// How the content of a new filesystem differs from its source.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FillOptions<'a> {
    /// Directories that become subvolumes.
    pub(crate) subvolumes: &'a [CopiedSubvolume],
    /// Flags of files.
    pub(crate) flags: &'a [NewFlags],
    /// The owner of every file.
    pub(crate) owner: Option<(u32, u32)>,
    /// The owners of files otherwise.
    pub(crate) owners: OwnerMap<'a>,
}

/// Copies the content of a directory of the host to the root of an image, as `cp -a DIR/. IMAGE:/` does. Prints each
/// file that cannot be copied, and returns the number of these files. Fails if the image accepts no more data.
/// Messages name the image by `shown_image`, because a new image has a temporary path.
pub(crate) fn fill(
    fs: &Fs,
    image: &Path,
    shown_image: &Path,
    dir: &Path,
    options: FillOptions<'_>,
) -> anyhow::Result<u64> {
    let args = Args { owner: options.owner, ..Args::archive() };
    let path = dir.as_os_str().as_bytes().to_vec();
    let mut to = Image::new(fs, shown_image);
    (to.subvolumes, to.flags) = (options.subvolumes, options.flags);
    let host = HostFiles::default();
    let info = host.info(&path, true)?.with_context(|| format!("{} does not exist", dir.shown()))?;
    let mut copy = CopyOperation::new(&args, &host, &to, false);
    copy.image = identity_of(image);
    copy.ends_with_target = true;
    copy.owners = options.owners;
    copy.tree(path, b"/".to_vec(), info)?;
    let nr_failed = copy.nr_failed;
    new_subvolume::finish(options.subvolumes, fs)?;
    Ok(nr_failed)
}

/// Copies a file or directory of an image to a temporary path of the image, as `cp -a` does. Prints each file that
/// cannot be copied, and returns the number of these files. Messages show the temporary path as `shown`.
pub(super) fn copy_for_move(fs: &Fs, source: &ImagePath, temporary: &[u8], shown: &[u8]) -> anyhow::Result<u64> {
    let (args, image) = (Args::archive(), Image::with_temporary(fs, &source.image, temporary, shown));
    let info = image.info(&source.path, false)?.context("it is gone")?;
    let mut copy = CopyOperation::new(&args, &image, &image, true);
    copy.tree(source.path.clone(), temporary.to_vec(), info)?;
    Ok(copy.nr_failed)
}

fn is_in_another_subvolume(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(ubtrfs_fs::Error::CrossDevice))
}

struct CopyOperation<'a> {
    args: &'a Args,
    from: &'a dyn From,
    to: &'a dyn To,
    /// Whether source and target are in one image.
    shared: bool,
    /// How the source's owners are changed, if they are kept.
    owners: OwnerMap<'a>,
    /// The image that is written to, which cannot be a source.
    image: Option<(u64, u64)>,
    /// Directories of the source image that the copy has visited.
    passed: VisitedDirs,
    /// If source and target are in one image, the directories that the copy made. In a crafted image, a walk of the
    /// source may lead into these copied directories.
    made: HashSet<InodeId>,
    /// The first copy of each file with several names.
    first_names: HashMap<(u64, u64), Vec<u8>>,
    /// Whether the user knows that a file with several names becomes several files.
    has_told_of_links: bool,
    /// Whether to stop when the target accepts no more data, because a partial copy is useless.
    ends_with_target: bool,
    /// Files below a source that were not copied.
    nr_failed: u64,
}

/// Work that is left. The paths of the directory are the parts of the current paths with these lengths, because paths of
/// their own would take memory that grows with the square of the depth.
struct PendingCopy {
    lens: (usize, usize),
    work: DirStep,
}

enum DirStep {
    /// Copies the entry with this name in the directory.
    Enter(Vec<u8>),
    /// Sets the attributes of the directory.
    Finish(SourceInfo),
}

impl<'a> CopyOperation<'a> {
    fn new(args: &'a Args, from: &'a dyn From, to: &'a dyn To, shared: bool) -> Self {
        let (first_names, passed) = (HashMap::new(), VisitedDirs::default());
        Self {
            args,
            from,
            to,
            shared,
            owners: OwnerMap::default(),
            image: None,
            passed,
            made: HashSet::new(),
            first_names,
            has_told_of_links: false,
            ends_with_target: false,
            nr_failed: 0,
        }
    }

    fn run(mut self, sources: &[CopyEnd], target: &CopyEnd) -> anyhow::Result<bool> {
        let to_path = self.to.top();
        // A symbolic link that leads to itself does not count as a directory. The copy fails later, when it opens the
        // link.
        let there = self.to.there(&to_path, true, true).or_else(|_| self.to.there(&to_path, true, false))?;
        let is_dir = there.as_ref().is_some_and(SourceInfo::is_dir);
        let wants_dir = target.path().ends_with(b"/");
        let mut paths = Vec::new();
        let expanded = each(sources, |source| {
            paths.extend(self.from.expand(source.path())?);
            Ok(())
        });
        if !is_dir && (self.args.paths.len() > 2 || paths.len() > 1 || (there.is_some() && wants_dir)) {
            bail!(
                "'{}' is not a directory; give a directory as the target of several files",
                self.to.shown_path(&to_path)
            );
        }
        let copied = each(paths, |path| {
            let from = self.from.shown_source(&path);
            let at = || format!("cannot copy '{from}'");
            let info = self.from.info(&path, !self.args.recursive && !self.args.no_dereference).with_context(at)?;
            let info = info.with_context(|| format!("'{from}' does not exist; check the path"))?;
            let new_path = match normal_names(&path).last() {
                // `DIR/.` means the content of the directory.
                Some(_) if is_dir && path.ends_with(b"/.") => to_path.clone(),
                Some(name) if is_dir => child_path(&to_path, name),
                _ if wants_dir && !is_dir && !info.is_dir() => {
                    bail!("the directory '{}' does not exist; make it first", self.to.shown_path(&to_path));
                }
                _ => to_path.clone(),
            };
            if info.is_dir() && self.shared && is_inside(&new_path, &path) {
                bail!("'{from}' cannot be copied into itself; choose another target");
            }
            let to = self.to.shown_path(&new_path);
            let at = || format!("cannot copy '{from}' to '{to}'");
            self.tree(path, new_path, info).with_context(at)
        });
        Ok(expanded == ExitCode::SUCCESS && copied == ExitCode::SUCCESS && self.nr_failed == 0)
    }

    /// Copies a file, or a directory and everything below it. The depth is limited by memory, not by the stack. If a
    /// file inside the directory cannot be copied, the copy continues with the other files. A directory gets its
    /// attributes after the last change in it.
    fn tree(&mut self, mut path: Vec<u8>, mut new_path: Vec<u8>, info: SourceInfo) -> anyhow::Result<()> {
        let mut todo = Vec::new();
        let done = self.step(&path, &new_path, Some(info), &mut todo).with_context(|| printable(&path));
        let mut failure = done.err();
        while let Some(PendingCopy { lens, work }) = todo.pop() {
            path.truncate(lens.0);
            new_path.truncate(lens.1);
            let done = match work {
                DirStep::Finish(info) => self.finish(&path, &new_path, &info),
                // After a failure that ends the copy, only the attributes of directories are left to do.
                DirStep::Enter(_) if failure.is_some() => Ok(()),
                DirStep::Enter(name) => {
                    push_name(&mut path, &name);
                    push_name(&mut new_path, &name);
                    self.step(&path, &new_path, None, &mut todo)
                }
            };
            if let Err(error) = done.or_else(|error| self.failed(&path, &new_path, error)) {
                failure.get_or_insert(error);
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// Copies a file, or makes a directory and queues its entries.
    fn step(
        &mut self,
        path: &[u8],
        new_path: &[u8],
        info: Option<SourceInfo>,
        todo: &mut Vec<PendingCopy>,
    ) -> anyhow::Result<()> {
        let named = info.is_some();
        let info = match info {
            Some(info) => info,
            None => self.from.info(path, false)?.context("it is gone")?,
        };
        if let Err(error) = self.one(path, new_path, &info, named) {
            // The file's other names must not become links to a copy that was not made.
            if self.first_names.get(&info.identity).is_some_and(|first| first == new_path) {
                self.first_names.remove(&info.identity);
            }
            return Err(error);
        }
        if info.is_dir() {
            let dir = info.id;
            let lens = (path.len(), new_path.len());
            todo.push(PendingCopy { lens, work: DirStep::Finish(info) });
            dir.map_or(Ok(()), |dir| self.passed.pass(dir))?;
            let mut names = self.from.names(path)?;
            names.sort_unstable();
            todo.extend(names.into_iter().rev().map(|name| PendingCopy { lens, work: DirStep::Enter(name) }));
        }
        Ok(())
    }

    /// Reports a file that could not be copied. Fails only if the other files could not be copied either.
    fn failed(&mut self, path: &[u8], new_path: &[u8], error: anyhow::Error) -> anyhow::Result<()> {
        let (from, to) = (self.from.shown_source(path), self.to.shown_path(new_path));
        let error = error.context(format!("cannot copy '{from}' to '{to}'"));
        if self.ends_with_target && is_fatal(&error) {
            return Err(error);
        }
        print_error(&error);
        self.nr_failed += 1;
        Ok(())
    }

    fn one(&mut self, path: &[u8], new_path: &[u8], info: &SourceInfo, named: bool) -> anyhow::Result<()> {
        if self.image == Some(info.identity) {
            bail!("it is the image that the files are copied to");
        }
        let is_stream = named && !self.args.recursive && self.from.is_stream(info);
        let is_content = is_stream || type_of(info.mode) == mode::REGULAR;
        // As in GNU cp, content is written through an existing symbolic link, but a copied link or special file
        // replaces the existing link.
        let follow = is_content || (info.is_dir() && new_path == self.to.top());
        let there = self.to.there(new_path, named, follow)?;
        if let Some(there) = &there {
            if self.shared && there.identity == info.identity {
                bail!("source and target are the same file");
            }
            if there.is_dir() != info.is_dir() {
                let what = if there.is_dir() { "a directory" } else { "no directory" };
                bail!("'{}' exists and is {what}; remove it first", self.to.shown_path(new_path));
            }
        }
        if info.is_dir() {
            if !self.args.recursive {
                bail!("it is a directory; copy it with -r");
            }
            if info.id.is_some_and(|id| self.made.contains(&id)) {
                bail!("it is part of the copy itself, which is damage; check the image with: ubtrfs check");
            }
            let made = if there.is_none() { self.to.make_dir(new_path, info.mode)? } else { None };
            self.made.extend(made.filter(|_| self.shared));
            return Ok(());
        }
        let is_again = self.args.preserve && info.nlink > 1 && self.first_names.contains_key(&info.identity);
        if there.is_some() && (is_again || !is_content) {
            self.to.unlink(new_path)?;
        }
        if self.args.preserve && info.nlink > 1 {
            if let Some(first) = self.first_names.get(&info.identity) {
                match self.to.hard_link(first, new_path) {
                    // Links do not cross subvolumes. Further names link to this copy.
                    Err(error) if is_in_another_subvolume(&error) => {
                        if !self.has_told_of_links {
                            self.has_told_of_links = true;
                            let (first, other) = (printable(first), printable(new_path));
                            warn(&format!(
                                "{first} and {other} are one file in the source, and two in the copy, because they are in two \
                                 subvolumes; other such files are not named"
                            ));
                        }
                    }
                    done => return done,
                }
            }
            self.first_names.insert(info.identity, new_path.to_vec());
        }
        match type_of(info.mode) {
            _ if is_content => {
                // The target can only use the source's inode if source and target are in one image.
                let id = info.id.filter(|_| self.shared);
                let size = if is_stream { 0 } else { info.size };
                let told =
                    SourceInfo { id, size, mode: mode::REGULAR | (info.mode & mode::PERMISSIONS), ..info.clone() };
                let attributes = self.attributes(path, info)?;
                return self
                    .to
                    .make_file(new_path, &told, named, &attributes, &mut |piece| self.from.data(path, info, piece));
            }
            mode::SYMLINK => self.to.make_link(new_path, &self.from.read_link(path)?)?,
            _ => self.to.make_special(new_path, info)?,
        }
        self.finish(path, new_path, info)
    }

    fn finish(&self, path: &[u8], new_path: &[u8], info: &SourceInfo) -> anyhow::Result<()> {
        self.to.set_attributes(new_path, &self.attributes(path, info)?)
    }

    fn attributes(&self, path: &[u8], info: &SourceInfo) -> anyhow::Result<CopiedAttributes> {
        let preserve = self.args.preserve;
        let owner = match self.args.owner {
            None if preserve => Some(self.owners.owner_of((info.uid, info.gid))?),
            owner => owner,
        };
        Ok(CopiedAttributes {
            owner,
            mode: info.mode,
            xattrs: if preserve { self.from.xattrs(path)? } else { XattrList::new() },
            times: preserve.then(|| kept_times(info)),
        })
    }
}

/// The times of a copy. With a fixed clock, reading the source changes nothing, and no time is later than the clock's.
fn kept_times(info: &SourceInfo) -> (Timespec, Timespec) {
    match fixed_clock() {
        None => (info.atime, info.mtime),
        Some(latest) => {
            let is_later = (info.mtime.sec, info.mtime.nsec) > (latest.sec, latest.nsec);
            let time = if is_later { latest } else { info.mtime };
            (time, time)
        }
    }
}

/// Whether every further file would fail with this error, because the image is full, broken or read-only.
fn is_fatal(error: &anyhow::Error) -> bool {
    let errnos = [Errno::NOSPC, Errno::IO, Errno::ROFS].map(Errno::raw_os_error);
    error
        .chain()
        .any(|cause| cause.downcast_ref::<ubtrfs_fs::Error>().is_some_and(|error| errnos.contains(&error.errno())))
}

/// Whether one path of an image equals another or is below it.
fn is_inside(path: &[u8], dir: &[u8]) -> bool {
    let (path, dir) = (join(&normal_names(path)), join(&normal_names(dir)));
    path == dir || dir == b"/" || path.strip_prefix(&dir[..]).is_some_and(|rest| rest.starts_with(b"/"))
}
