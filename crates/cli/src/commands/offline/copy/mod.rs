//! `ubtrfs cp`: between the host and images, and inside of an image, where data is shared instead of copied.
//!
//! A copy has two ends, each the host or an open image: `From` reads, `To` writes; this page walks.

mod host;
mod image;

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use ubtrfs_format::item::Timespec;
use ubtrfs_fs::{Fs, InodeId, mode};

use self::host::Host;
use self::image::Image;
use super::text::printable;
use super::{ImageOptions, ImagePath, Use, child_path, join, normal_names, type_of, with_image};

/// Copy files between this system and images, or inside of an image
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Files to copy, and where to: IMAGE:/PATH or a path of this system
    #[arg(value_name = "PATH", required = true, num_args = 2..)]
    paths: Vec<OsString>,
    /// Copy directories with all that is in them; symbolic links stay links
    #[arg(short, long, visible_short_alias = 'R')]
    recursive: bool,
    /// Keep owner, times, extended attributes and hard links
    #[arg(short, long)]
    preserve: bool,
    /// As -r -p
    #[arg(short, long)]
    archive: bool,
    /// Owner of the copies
    #[arg(long, value_name = "UID:GID", value_parser = super::import::parse_owner)]
    owner: Option<(u32, u32)>,
    #[command(flatten)]
    image: ImageOptions,
}

/// One end of a copy.
#[derive(Clone, Debug)]
enum Place {
    Host(PathBuf),
    Image(ImagePath),
}

impl Place {
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

/// What a copy needs to know of a file.
#[derive(Clone, Debug)]
struct Info {
    mode: u32,
    uid: u32,
    gid: u32,
    major: u32,
    minor: u32,
    size: u64,
    nlink: u64,
    atime: Timespec,
    mtime: Timespec,
    /// Device or subvolume, and inode: equal for names of one file.
    identity: (u64, u64),
    /// In an image.
    id: Option<InodeId>,
}

impl Info {
    fn is_dir(&self) -> bool {
        type_of(self.mode) == mode::DIRECTORY
    }
}

/// Takes a piece of a file: its offset and bytes.
type Piece<'p> = &'p mut dyn FnMut(u64, &[u8]) -> anyhow::Result<()>;

/// Where a copy reads.
trait From {
    fn info(&self, path: &[u8], follow: bool) -> anyhow::Result<Option<Info>>;
    fn names(&self, path: &[u8]) -> anyhow::Result<Vec<Vec<u8>>>;
    fn read_link(&self, path: &[u8]) -> anyhow::Result<Vec<u8>>;
    fn xattrs(&self, path: &[u8]) -> anyhow::Result<Vec<(Vec<u8>, Vec<u8>)>>;
    /// Hands out the data; holes are left out.
    fn data(&self, path: &[u8], info: &Info, piece: Piece<'_>) -> anyhow::Result<()>;
}

/// Where a copy writes. Paths are those of [`From::info`] of the same end.
trait To {
    fn make_dir(&self, path: &[u8], mode: u32) -> anyhow::Result<()>;
    fn make_link(&self, path: &[u8], target: &[u8]) -> anyhow::Result<()>;
    fn make_special(&self, path: &[u8], info: &Info) -> anyhow::Result<()>;
    /// Makes a file, or empties the one there, and fills it with what `fill` hands out.
    fn make_file(
        &self,
        path: &[u8],
        info: &Info,
        fill: &mut dyn FnMut(Piece<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()>;
    fn hard_link(&self, old: &[u8], new: &[u8]) -> anyhow::Result<()>;
    fn unlink(&self, path: &[u8]) -> anyhow::Result<()>;
    fn set_owner(&self, path: &[u8], owner: (u32, u32), mode: u32) -> anyhow::Result<()>;
    fn set_xattrs(&self, path: &[u8], xattrs: &[(Vec<u8>, Vec<u8>)]) -> anyhow::Result<()>;
    fn set_times(&self, path: &[u8], info: &Info) -> anyhow::Result<()>;
}

/// An end that can be both.
trait End: From + To {}
impl<T: From + To> End for T {}

pub(crate) fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    args.recursive |= args.archive;
    args.preserve |= args.archive;
    let Some((target, sources)) = args.paths.split_last() else { bail!("cp needs a source and a target") };
    let target = Place::of(target);
    let sources: Vec<Place> = sources.iter().map(Place::of).collect();
    if target.image().is_none() && sources.iter().all(|source| source.image().is_none()) {
        bail!("neither source nor target is in an image; write IMAGE:/path for one of them");
    }
    for sources in sources.chunk_by(|one, other| one.image() == other.image()) {
        copy_from_one_place(&args, sources, &target)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Opens the ends and copies. Sources and target may lie in one image, which is opened once.
fn copy_from_one_place(args: &Args, sources: &[Place], target: &Place) -> anyhow::Result<()> {
    let copy = |from: &dyn From, to: &dyn End, shared: bool| Copy::new(args, from, to, shared).run(sources, target);
    let options = &args.image;
    match (sources[0].image(), target.image()) {
        (None, None) => bail!("neither source nor target is in an image; write IMAGE:/path for one of them"),
        (None, Some(to)) => with_image(to, options, Use::Write, |fs| copy(&Host, &Image::new(fs), false)),
        (Some(from), None) => with_image(from, options, Use::Read, |fs| copy(&Image::new(fs), &Host, false)),
        (Some(from), Some(to)) if is_same_file(from, to) => {
            with_image(to, options, Use::Write, |fs| copy(&Image::new(fs), &Image::new(fs), true))
        }
        (Some(from), Some(to)) => with_image(from, options, Use::Read, |source| {
            with_image(to, options, Use::Write, |fs| copy(&Image::new(source), &Image::new(fs), false))
        }),
    }
}

/// Copies what is in a directory of the host to the root of an image, as `cp -a DIR/. IMAGE:/` does.
pub(crate) fn fill(fs: &Fs, dir: &Path) -> anyhow::Result<()> {
    let args = Args {
        paths: Vec::new(),
        recursive: true,
        preserve: true,
        archive: true,
        owner: None,
        image: ImageOptions::default(),
    };
    let path = dir.as_os_str().as_bytes().to_vec();
    let image = Image::new(fs);
    let info = Host.info(&path, true)?.with_context(|| format!("{} does not exist", dir.display()))?;
    let mut copy = Copy::new(&args, &Host, &image, false);
    copy.tree(path, b"/".to_vec(), info)?;
    copy.finish_dirs()
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (std::fs::metadata(one), std::fs::metadata(other)) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => one == other,
    }
}

struct Copy<'a> {
    args: &'a Args,
    from: &'a dyn From,
    to: &'a dyn End,
    /// Both ends are one image.
    shared: bool,
    /// Copies of files with several names.
    first_names: HashMap<(u64, u64), Vec<u8>>,
    /// Directories that are finished at the end, when nothing changes in them any more.
    dirs: Vec<(Vec<u8>, Vec<u8>, Info)>,
}

impl<'a> Copy<'a> {
    fn new(args: &'a Args, from: &'a dyn From, to: &'a dyn End, shared: bool) -> Self {
        Self { args, from, to, shared, first_names: HashMap::new(), dirs: Vec::new() }
    }

    fn run(mut self, sources: &[Place], target: &Place) -> anyhow::Result<()> {
        let to_path = target.path();
        let there = self.to.info(&to_path, true)?;
        let is_dir = there.as_ref().is_some_and(Info::is_dir);
        if !is_dir && (self.args.paths.len() > 2 || (there.is_some() && to_path.ends_with(b"/"))) {
            bail!("'{}' is not a directory; name one for several files", printable(&to_path));
        }
        for source in sources {
            let path = source.path();
            let at = || format!("cannot copy '{}'", printable(&path));
            let info = self.from.info(&path, !self.args.recursive).with_context(at)?;
            let info = info.with_context(|| format!("'{}' does not exist; check the path", printable(&path)))?;
            let new_path = match normal_names(&path).last() {
                Some(name) if is_dir => child_path(&to_path, name),
                _ => to_path.clone(),
            };
            if info.is_dir() && self.shared && is_inside(&new_path, &path) {
                bail!("'{}' cannot be copied into itself; choose another target", printable(&path));
            }
            self.tree(path.clone(), new_path, info).with_context(at)?;
        }
        self.finish_dirs()
    }

    /// What is said about directories, when nothing changes in them any more.
    fn finish_dirs(&mut self) -> anyhow::Result<()> {
        for (path, new_path, info) in std::mem::take(&mut self.dirs).into_iter().rev() {
            self.finish(&path, &new_path, &info)?;
        }
        Ok(())
    }

    /// Copies a file, or a directory and all below it; its depth is limited by memory, not by the stack.
    fn tree(&mut self, path: Vec<u8>, new_path: Vec<u8>, info: Info) -> anyhow::Result<()> {
        let mut todo = vec![(path, new_path, Some(info))];
        while let Some((path, new_path, info)) = todo.pop() {
            let at = || printable(&path);
            let info = match info {
                Some(info) => info,
                None => self.from.info(&path, false).with_context(at)?.with_context(|| format!("{} is gone", at()))?,
            };
            self.one(&path, &new_path, &info).with_context(at)?;
            if info.is_dir() {
                let mut names = self.from.names(&path).with_context(at)?;
                names.sort_unstable();
                let below = names.iter().rev();
                todo.extend(below.map(|name| (child_path(&path, name), child_path(&new_path, name), None)));
                self.dirs.push((path, new_path, info));
            }
        }
        Ok(())
    }

    fn one(&mut self, path: &[u8], new_path: &[u8], info: &Info) -> anyhow::Result<()> {
        let there = self.to.info(new_path, false)?;
        if let Some(there) = &there {
            if self.shared && there.identity == info.identity {
                bail!("source and target are the same file");
            }
            if there.is_dir() != info.is_dir() {
                let what = if there.is_dir() { "a directory" } else { "no directory" };
                bail!("'{}' exists and is {what}; remove it first", printable(new_path));
            }
        }
        if info.is_dir() {
            if !self.args.recursive {
                bail!("it is a directory; copy it with -r");
            }
            return if there.is_none() { self.to.make_dir(new_path, info.mode) } else { Ok(()) };
        }
        if there.is_some() {
            self.to.unlink(new_path)?;
        }
        if self.args.preserve && info.nlink > 1 {
            if let Some(first) = self.first_names.get(&info.identity) {
                return self.to.hard_link(first, new_path);
            }
            self.first_names.insert(info.identity, new_path.to_vec());
        }
        match type_of(info.mode) {
            mode::REGULAR => {
                // Only inside of one image does the source's inode mean anything to the target.
                let id = info.id.filter(|_| self.shared);
                let told = Info { id, ..info.clone() };
                self.to.make_file(new_path, &told, &mut |piece| self.from.data(path, info, piece))?;
            }
            mode::SYMLINK => self.to.make_link(new_path, &self.from.read_link(path)?)?,
            _ => self.to.make_special(new_path, info)?,
        }
        self.finish(path, new_path, info)
    }

    fn finish(&self, path: &[u8], new_path: &[u8], info: &Info) -> anyhow::Result<()> {
        let kept = self.args.preserve.then_some((info.uid, info.gid));
        if let Some(owner) = self.args.owner.or(kept) {
            self.to.set_owner(new_path, owner, info.mode)?;
        }
        if self.args.preserve {
            self.to.set_xattrs(new_path, &self.from.xattrs(path)?)?;
            self.to.set_times(new_path, info)?;
        }
        Ok(())
    }
}

/// Whether a path of an image is another one or lies below it.
fn is_inside(path: &[u8], dir: &[u8]) -> bool {
    let (path, dir) = (join(&normal_names(path)), join(&normal_names(dir)));
    path == dir || dir == b"/" || path.strip_prefix(&dir[..]).is_some_and(|rest| rest.starts_with(b"/"))
}
