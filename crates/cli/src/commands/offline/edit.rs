//! `ubtrfs rm` and `ubtrfs mkdir`.

use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use ubtrfs_fs::{Attr, Caller, Error, Fs, InodeId, NewInode};

use super::operands::{Patterns, for_each_file};
use super::text::printable;
use super::{
    ImageOptions, ImagePath, ImagePathParser, ImageUse, VisitedDirs, child_path, join, lookup_parent, read_names,
    refuse_dots,
};
use crate::common::{Shown, calling_user};

/// Remove files from an image
#[derive(clap::Args)]
#[command(after_help = super::PATTERNS_HELP)]
pub(crate) struct RmArgs {
    /// Files in images
    #[arg(value_name = "IMAGE:/PATH", value_parser = ImagePathParser::default(), required = true)]
    paths: Vec<ImagePath>,
    /// Remove directories and their content
    #[arg(short, long)]
    recursive: bool,
    /// Ignore files that do not exist
    #[arg(short, long)]
    force: bool,
    #[command(flatten)]
    image: ImageOptions,
}

/// Make directories in an image
#[derive(clap::Args)]
pub(crate) struct MkdirArgs {
    /// Directories in images
    #[arg(value_name = "IMAGE:/PATH", value_parser = ImagePathParser::default(), required = true)]
    paths: Vec<ImagePath>,
    /// Make missing parents, and accept a directory that exists
    #[arg(short, long)]
    parents: bool,
    /// Mode of the new directory
    #[arg(short, long, value_name = "OCTAL", default_value = "755", value_parser = parse_mode)]
    mode: u32,
    /// Owner of new directories: the current user, by default
    #[arg(long, value_name = "UID:GID", value_parser = super::import::parse_owner)]
    owner: Option<(u32, u32)>,
    #[command(flatten)]
    image: ImageOptions,
}

fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o7777);
    mode.ok_or_else(|| format!("'{text}' is not a mode; write octal digits, for example 755"))
}

pub(crate) fn run_rm(args: RmArgs) -> anyhow::Result<ExitCode> {
    // As with rm, -f also ignores a pattern that matches nothing.
    let patterns = if args.force { Patterns::MatchAny } else { Patterns::Match };
    Ok(for_each_file(&args.paths, &args.image, ImageUse::Write, patterns, |fs, path| remove(fs, path, &args)))
}

pub(crate) fn run_mkdir(args: MkdirArgs) -> anyhow::Result<ExitCode> {
    Ok(for_each_file(&args.paths, &args.image, ImageUse::Write, Patterns::AsNames, |fs, path| {
        make_dir(fs, path, &args)
    }))
}

fn remove(fs: &Fs, path: &ImagePath, args: &RmArgs) -> anyhow::Result<()> {
    refuse_dots(path, "remove")?;
    let found = lookup_parent(fs, path).and_then(|(parent, name)| {
        let attr = fs.lookup(parent, name).with_context(|| format!("{path}"))?;
        Ok((parent, name, attr))
    });
    let (parent, name, attr) = match found {
        Err(error) if args.force && matches!(error.downcast_ref(), Some(Error::NotFound)) => return Ok(()),
        found => found?,
    };
    if !attr.is_dir() {
        if path.path.ends_with(b"/") {
            bail!("cannot remove {path}: it is not a directory; omit the final slash");
        }
        return fs.unlink(parent, name).with_context(|| format!("cannot remove {path}"));
    }
    if !args.recursive {
        bail!("{path} is a directory; remove it with -r");
    }
    remove_tree(fs, parent, name, &attr).with_context(|| format!("cannot remove {path}"))
}

/// Removes a directory and everything below it. The depth is limited by memory, not by the stack.
pub(super) fn remove_tree(fs: &Fs, parent: InodeId, name: &[u8], dir: &Attr) -> anyhow::Result<()> {
    struct RemovalDir {
        parent: InodeId,
        name: Vec<u8>,
        id: InodeId,
        path: Vec<u8>,
        left: Vec<super::DirName>,
    }
    let mut passed = VisitedDirs::default();
    let mut open = |parent: InodeId, name: &[u8], id: InodeId, path: Vec<u8>| -> anyhow::Result<RemovalDir> {
        passed.pass(id).with_context(|| format!("'{}'", printable(&path)))?;
        let mut left = read_names(fs, id).with_context(|| format!("'{}'", printable(&path)))?;
        left.reverse();
        Ok(RemovalDir { parent, name: name.to_vec(), id, path, left })
    };
    let mut levels = vec![open(parent, name, dir.id, b"/".to_vec())?];
    while let Some(level) = levels.last_mut() {
        let at = level.path.clone();
        match level.left.pop() {
            Some(entry) => {
                let path = child_path(&at, &entry.name);
                let here = || format!("'{}'", printable(&path));
                if fs.getattr(entry.id).with_context(here)?.is_dir() {
                    let next = open(level.id, &entry.name, entry.id, path)?;
                    levels.push(next);
                } else {
                    fs.unlink(level.id, &entry.name).with_context(here)?;
                }
            }
            None => {
                fs.rmdir(level.parent, &level.name).with_context(|| format!("'{}'", printable(&at)))?;
                levels.pop();
            }
        }
    }
    Ok(())
}

fn make_dir(fs: &Fs, path: &ImagePath, args: &MkdirArgs) -> anyhow::Result<()> {
    let (uid, gid) = args.owner.unwrap_or_else(calling_user);
    let caller = Caller { uid, gid, umask: 0 };
    if !args.parents {
        let (parent, name) = lookup_parent(fs, path).map_err(|error| match error.downcast_ref() {
            Some(Error::NotFound) => anyhow!("{error:#}; make the directories above it too with -p"),
            _ => error,
        })?;
        let made = fs.create(parent, name, NewInode::dir(args.mode), &caller);
        return made.map(|_| ()).with_context(|| format!("cannot make {path}"));
    }
    let names = path.names();
    let mut dir = fs.root();
    for end in 1..=names.len() {
        let at = join(&names[..end]);
        let here = || format!("cannot make {}:{}", path.image.shown(), printable(&at));
        dir = match fs.lookup_path(&at, true) {
            Ok(attr) if attr.is_dir() => attr.id,
            Ok(_) => return Err(Error::NotDirectory).with_context(here),
            Err(Error::NotFound) => {
                let mode = if end == names.len() { args.mode } else { 0o755 };
                fs.create(dir, names[end - 1], NewInode::dir(mode), &caller).with_context(here)?.id
            }
            Err(error) => return Err(error).with_context(here),
        };
    }
    Ok(())
}
