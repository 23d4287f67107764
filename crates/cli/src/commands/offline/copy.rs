//! `ubtrfs cp`: copies between the host and images, and inside an image, by [`ubtrfs_archive::copy`]. This module opens
//! the ends of a copy, and finds the target of each operand.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};
use ubtrfs_archive::copy::{
    CopyMessage, CopyOperation, CopyOptions, CopySource, CopyTarget, CopyWatch, HostFiles, HostTarget, ImageFiles,
    SourceInfo,
};
use ubtrfs_fs::Fs;

use super::pattern::expand;
use super::text::printable;
use super::{
    ImageOptions, ImagePath, ImageUse, PATTERNS_HELP, child_path, identity_of, is_same_image, join, normal_names,
    with_image,
};
use crate::common::{Shown, calling_user, each, print_error, warn};

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
    fn copy_options(&self) -> CopyOptions {
        CopyOptions {
            keep_owner: self.preserve,
            keep_times: self.preserve,
            keep_xattrs: self.preserve,
            keep_hard_links: self.preserve,
            owner: self.owner,
            ..CopyOptions::default()
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
    let (options, watch) = (&args.image, printer());
    let watch: CopyWatch<'_> = &watch;
    match (sources[0].image(), target) {
        (None, CopyEnd::Host(_)) => {
            bail!("neither source nor target is in an image; write IMAGE:/path for one of them")
        }
        (None, CopyEnd::Image(to)) => with_image(&to.image, options, ImageUse::Write, |fs| {
            let (host, image) = (HostFiles::default(), image_of(fs, &to.image).below(&to.path));
            let own_files: Vec<(u64, u64)> = identity_of(&to.image).into_iter().collect();
            let ends = OpenEnds { from: &host, source: None, to: &image, shared: false, own_files: &own_files };
            ends.copy(args, sources, target, watch)
        }),
        (Some(from), CopyEnd::Host(to)) => with_image(from, options, ImageUse::Read, |fs| {
            let (image, to) = (image_of(fs, from), HostTarget::open(to, watch)?);
            OpenEnds::of_image(&image, fs, &to, false).copy(args, sources, target, watch)
        }),
        (Some(from), CopyEnd::Image(to)) if is_same_image(from, &to.image) => {
            with_image(from, options, ImageUse::Write, |fs| {
                let (image, to) = (image_of(fs, from), image_of(fs, &to.image).below(&to.path));
                OpenEnds::of_image(&image, fs, &to, true).copy(args, sources, target, watch)
            })
        }
        (Some(from), CopyEnd::Image(to)) => with_image(from, options, ImageUse::Read, |source| {
            with_image(&to.image, options, ImageUse::Write, |fs| {
                let (image, to) = (image_of(source, from), image_of(fs, &to.image).below(&to.path));
                OpenEnds::of_image(&image, source, &to, false).copy(args, sources, target, watch)
            })
        }),
    }
}

/// The files of an image, in whose messages paths begin with the image.
pub(crate) fn image_of<'f>(fs: &'f Fs, image: &Path) -> ImageFiles<'f> {
    ImageFiles::new(fs, format!("{}:", image.shown()), calling_user())
}

/// Returns a function that prints the messages of one copy on stderr.
pub(crate) fn printer() -> impl Fn(CopyMessage<'_>) + Sync {
    let has_told_of_links = AtomicBool::new(false);
    move |message| match message {
        CopyMessage::Failed(error) => drop(print_error(error)),
        CopyMessage::LostAttribute { path, name } => {
            warn(&format!("{}: attribute {} cannot be set here", path.shown(), printable(name)));
        }
        CopyMessage::SplitFile { first, other } if !has_told_of_links.swap(true, Ordering::Relaxed) => {
            let (first, other) = (printable(first), printable(other));
            warn(&format!(
                "{first} and {other} are one file in the source, and two in the copy, because they are in two subvolumes; \
                 other such files are not named"
            ));
        }
        CopyMessage::SplitFile { .. } | CopyMessage::Bytes(_) | CopyMessage::File(_) => {}
    }
}

/// The open ends of a copy.
struct OpenEnds<'a> {
    from: &'a dyn CopySource,
    /// The filesystem of the sources, unless they are on the host.
    source: Option<&'a Fs>,
    to: &'a dyn CopyTarget,
    /// Whether source and target are in one image.
    shared: bool,
    /// The image that is written to.
    own_files: &'a [(u64, u64)],
}

impl<'a> OpenEnds<'a> {
    fn of_image(from: &'a ImageFiles<'a>, fs: &'a Fs, to: &'a dyn CopyTarget, shared: bool) -> Self {
        Self { from, source: Some(fs), to, shared, own_files: &[] }
    }

    /// The paths that the path of a source with patterns leads to.
    fn expand(&self, source: &CopyEnd) -> anyhow::Result<Vec<Vec<u8>>> {
        match (source, self.source) {
            (CopyEnd::Image(at), Some(fs)) => Ok(expand(fs, at)?.into_iter().map(|at| at.path).collect()),
            // The shell has expanded host patterns.
            _ => Ok(vec![source.path()]),
        }
    }

    /// Copies the sources. Returns whether everything was copied.
    fn copy(&self, args: &Args, sources: &[CopyEnd], target: &CopyEnd, watch: CopyWatch<'_>) -> anyhow::Result<bool> {
        let options = args.copy_options();
        let mut copy = CopyOperation::new(&options, self.from, self.to, watch);
        (copy.shared, copy.recursive, copy.own_files) = (self.shared, args.recursive, self.own_files);
        let to_path = self.to.top();
        // A symbolic link that leads to itself does not count as a directory. The copy fails later, when it opens the
        // link.
        let there = self.to.there(&to_path, true, true).or_else(|_| self.to.there(&to_path, true, false))?;
        let is_dir = there.as_ref().is_some_and(SourceInfo::is_dir);
        let wants_dir = target.path().ends_with(b"/");
        let mut paths = Vec::new();
        let expanded = each(sources, |source| {
            paths.extend(self.expand(source)?);
            Ok(())
        });
        if !is_dir && (args.paths.len() > 2 || paths.len() > 1 || (there.is_some() && wants_dir)) {
            bail!(
                "'{}' is not a directory; give a directory as the target of several files",
                self.to.shown_path(&to_path)
            );
        }
        let copied = each(paths, |path| {
            let from = self.from.shown_source(&path);
            let at = || format!("cannot copy '{from}'");
            let info = self.from.info(&path, !args.recursive && !args.no_dereference).with_context(at)?;
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
            copy.tree(path, new_path, info).with_context(at)
        });
        Ok(expanded == ExitCode::SUCCESS && copied == ExitCode::SUCCESS && copy.report().failed == 0)
    }
}

/// Whether one path of an image equals another or is below it.
fn is_inside(path: &[u8], dir: &[u8]) -> bool {
    let (path, dir) = (join(&normal_names(path)), join(&normal_names(dir)));
    path == dir || dir == b"/" || path.strip_prefix(&dir[..]).is_some_and(|rest| rest.starts_with(b"/"))
}
