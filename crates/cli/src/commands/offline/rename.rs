//! `ubtrfs mv`: renames files and subvolumes of an image.
//!
//! Invariants:
//! - I1. A file that moves to another subvolume is copied first, sharing its data. The copy gets its name when it is
//!   complete, and only then the source is removed. So the source or the copy is complete at any time.

use std::collections::HashSet;
use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::{Context, bail};
use ubtrfs_archive::copy::{CopyOperation, CopyOptions, CopySource};
use ubtrfs_format::RootId;
use ubtrfs_format::item::RootFlags;
use ubtrfs_fs::{Attr, Error, Fs, InodeId, RenameFlags};

use super::copy::{image_of, printer};
use super::edit::remove_tree;
use super::operands::worst;
use super::pattern::expand;
use super::target::OperandTarget;
use super::text::printable;
use super::walk::walk;
use super::{
    ImageOptions, ImagePath, ImageUse, child_path, is_same_image, lookup_parent, read_names, refuse_dots,
    temporary_name, with_image,
};
use crate::common::{Shown, each};

/// Rename files of an image, or move them to another directory
#[derive(clap::Args)]
#[command(
    after_help = "All paths are in one image. A file that exists at the target is replaced. Files that move to another subvolume \
                        are copied, sharing their data, and then removed. Sources may have patterns: 'disk.img:/etc/*.conf'."
)]
pub(crate) struct Args {
    /// Files to move, then the new name or the directory to move them to
    #[arg(value_name = "IMAGE:/PATH", required = true, num_args = 2..)]
    paths: Vec<OsString>,
    /// Leave files whose target exists as they are
    #[arg(short, long, overrides_with = "force")]
    no_clobber: bool,
    /// Replace files that exist, which is the default
    #[arg(short, long, overrides_with = "no_clobber")]
    force: bool,
    /// Take the target as a name even if it is a directory
    #[arg(short = 'T', long)]
    no_target_directory: bool,
    #[command(flatten)]
    image: ImageOptions,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let [sources @ .., target] = args.paths.as_slice()
        && ImagePath::split(target).is_none()
        && let Some(source) = sources.iter().find_map(|source| ImagePath::split(source))
    {
        let target = target.shown();
        bail!(
            "{target} is in no image; copy {source} out with: ubtrfs cp -a {source} {target}, or name {source}'s new path as IMAGE:/path"
        );
    }
    let paths: Vec<ImagePath> = args.paths.iter().map(|path| ImagePath::parse(path)).collect::<Result<_, _>>()?;
    let Some((target, sources)) = paths.split_last() else { bail!("mv needs a source and a target") };
    if let Some(other) = sources.iter().find(|source| !is_same_image(&source.image, &target.image)) {
        bail!(
            "{other} is in another image than {target}; copy it with: ubtrfs cp -a, and then remove it with: ubtrfs rm -r"
        );
    }
    with_image(&target.image, &args.image, ImageUse::Write, |fs| {
        let mut files = Vec::new();
        let expanded = each(sources, |source| {
            files.extend(expand(fs, source)?);
            Ok(())
        });
        let place = OperandTarget::find(fs, target, true, args.no_target_directory)?;
        if (files.len() > 1 || sources.len() > 1) && !place.is_dir() {
            bail!("{target} is not a directory; give a directory as the target of several files");
        }
        let mut moves = RenameOperation { fs, args: &args, target, place, made: HashSet::new() };
        let moved = each(&files, |source| moves.one(source));
        Ok(worst(expanded, moved))
    })
}

struct RenameOperation<'m> {
    fs: &'m Fs,
    args: &'m Args,
    target: &'m ImagePath,
    place: OperandTarget<'m>,
    /// The names that this command has made. Another source must not replace them.
    made: HashSet<Vec<u8>>,
}

impl RenameOperation<'_> {
    fn one(&mut self, source: &ImagePath) -> anyhow::Result<()> {
        refuse_dots(source, "move")?;
        let fs = self.fs;
        let (parent, name) = lookup_parent(fs, source)?;
        let attr = fs.lookup(parent, name).with_context(|| source.to_string())?;
        if source.path.ends_with(b"/") && !attr.is_dir() {
            bail!("cannot move {source}: it is not a directory; omit the final slash");
        }
        let (dir, new_name) = self.place.of(name)?;
        let to = self.place.shown(self.target, new_name);
        if !self.place.is_dir() && self.target.path.ends_with(b"/") && !attr.is_dir() {
            bail!("cannot move {source} to {to}: the directory does not exist; make it first");
        }
        let cannot = || format!("cannot move {source} to {to}");
        let there = match fs.lookup(dir, new_name) {
            Ok(there) => Some(there),
            Err(Error::NotFound) => None,
            Err(error) => return Err(error).with_context(cannot),
        };
        if let Some(there) = &there {
            if self.args.no_clobber {
                return Ok(());
            }
            if there.id == attr.id {
                bail!("cannot move {source} to {to}: both are the same file");
            }
            if self.made.contains(new_name) {
                bail!("cannot move {source} to {to}: this command has just moved another file there");
            }
            if there.is_dir() != attr.is_dir() {
                let what = if there.is_dir() { "a directory" } else { "no directory" };
                bail!("cannot move {source} to {to}: the target exists and is {what}; remove it first");
            }
        }
        match fs.rename(parent, name, dir, new_name, RenameFlags::empty()) {
            Err(Error::CrossDevice) => {
                let path = source.split_name().map_or_else(Vec::new, |(dir, name)| child_path(&dir, name));
                let source = ImagePath { image: source.image.clone(), path };
                self.to_other_subvolume((&source, parent, name, &attr), (dir, new_name, there.as_ref()))
            }
            done => Ok(done?),
        }
        .with_context(cannot)?;
        self.made.insert(new_name.to_vec());
        Ok(())
    }

    /// Copies a file or directory to another subvolume, and removes it (I1).
    fn to_other_subvolume(
        &self,
        (source, parent, name, attr): (&ImagePath, InodeId, &[u8], &Attr),
        (dir, new_name, there): (InodeId, &[u8], Option<&Attr>),
    ) -> anyhow::Result<()> {
        let fs = self.fs;
        if is_read_only(fs, parent.root)? {
            return Err(Error::ReadOnlySubvolume.into());
        }
        if let Some(there) = there.filter(|there| there.is_dir())
            && !read_names(fs, there.id)?.is_empty()
        {
            return Err(Error::NotEmpty.into());
        }
        refuse_nested_subvolumes(fs, source, attr)?;
        let temporary = temporary_name();
        let copy = child_path(&self.place.dir_path(self.target), &temporary);
        let shown = self.place.shown(self.target, new_name).path;
        let copied = copy_to_temporary(fs, source, &copy, &shown).and_then(|nr_failed| match nr_failed {
            0 => Ok(fs.rename(dir, &temporary, dir, new_name, RenameFlags::empty())?),
            nr_failed => bail!("{nr_failed} files could not be copied to the other subvolume, so nothing was moved"),
        });
        if let Err(error) = copied {
            if let Ok(copy) = fs.lookup(dir, &temporary) {
                // An error of this call is ignored, because the earlier error is reported.
                let _ = remove(fs, dir, &temporary, &copy);
            }
            return Err(error);
        }
        remove(fs, parent, name, attr).context("it was copied to the other subvolume, but the source remains")
    }
}

/// Copies a file or directory to a temporary path of the image, as `cp -a` does. Prints each file that cannot be copied,
/// and returns the number of these files. Messages show the temporary path as `shown`.
fn copy_to_temporary(fs: &Fs, source: &ImagePath, temporary: &[u8], shown: &[u8]) -> anyhow::Result<u64> {
    let (options, watch) = (CopyOptions::default(), printer());
    let image = image_of(fs, &source.image).with_temporary(temporary, shown);
    let info = image.info(&source.path, false)?.context("it is gone")?;
    let mut copy = CopyOperation::new(&options, &image, &image, &watch);
    copy.shared = true;
    copy.tree(source.path.clone(), temporary.to_vec(), info)?;
    Ok(copy.report().failed)
}

fn remove(fs: &Fs, dir: InodeId, name: &[u8], attr: &Attr) -> anyhow::Result<()> {
    if attr.is_dir() { remove_tree(fs, dir, name, attr) } else { Ok(fs.unlink(dir, name)?) }
}

fn is_read_only(fs: &Fs, id: RootId) -> anyhow::Result<bool> {
    let all = fs.subvolumes()?;
    Ok(all.iter().any(|subvolume| subvolume.id == id && subvolume.flags.contains(RootFlags::RDONLY)))
}

/// Fails if a directory contains subvolumes, because a copy would turn them into directories.
fn refuse_nested_subvolumes(fs: &Fs, source: &ImagePath, attr: &Attr) -> anyhow::Result<()> {
    let home = attr.id.root;
    walk(fs, (source, attr.clone()), usize::MAX, "read", |file| match file.attr.id.root == home {
        true => Ok(Ok(())),
        false => bail!(
            "it contains the subvolume {}:{}, which cannot become part of another subvolume; move that subvolume first",
            source.image.shown(),
            printable(file.path)
        ),
    })
    .and_then(|status| match status == ExitCode::SUCCESS {
        true => Ok(()),
        false => bail!("a part of it cannot be read"),
    })
}
