//! `ubtrfs ln`: hard and symbolic links.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use anyhow::{Context, bail};
use ubtrfs_fs::{Attr, Caller, Error, Fs, InodeId, NewInode, RenameFlags};

use super::target::OperandTarget;
use super::{ImageOptions, ImagePath, ImageUse, is_same_image, lookup, lookup_parent, temporary_name, with_image};
use crate::common::{Shown, calling_user, each};

/// Make links in an image
#[derive(clap::Args)]
#[command(
    after_help = "The target of a hard link is IMAGE:/PATH in the same image and subvolume. The target of a symbolic link is a text \
                        that is stored as it is, for example ../lib/x. If LINK is a directory, links with the names of the \
                        targets are made in it."
)]
pub(crate) struct Args {
    /// The targets, then the link
    #[arg(value_name = "TARGET|IMAGE:/LINK", required = true, num_args = 2..)]
    paths: Vec<OsString>,
    /// Make symbolic links
    #[arg(short, long)]
    symbolic: bool,
    /// Replace an existing file
    #[arg(short, long)]
    force: bool,
    /// Take LINK as a name even if it is a symbolic link to a directory
    #[arg(short, long)]
    no_dereference: bool,
    /// Take LINK as a name even if it is a directory
    #[arg(short = 'T', long)]
    no_target_directory: bool,
    /// Owner of symbolic links: the current user, by default
    #[arg(long, value_name = "UID:GID", value_parser = super::import::parse_owner)]
    owner: Option<(u32, u32)>,
    #[command(flatten)]
    image: ImageOptions,
}

pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Some((link, targets)) = args.paths.split_last() else { bail!("ln needs a target and a link") };
    let link = ImagePath::parse(link)?;
    if !args.symbolic {
        check_targets(targets, &link)?;
    }
    with_image(&link.image, &args.image, ImageUse::Write, |fs| {
        let place = OperandTarget::find(fs, &link, !args.no_dereference, args.no_target_directory)?;
        if !place.is_dir() && (targets.len() > 1 || link.path.ends_with(b"/")) {
            bail!("{link} is not a directory; make it first, or omit the slash at its end");
        }
        Ok(each(targets, |target| {
            let (dir, name) = place.of(last_name(target)?)?;
            let at = place.shown(&link, name);
            let done = match args.symbolic {
                true => {
                    let (uid, gid) = args.owner.unwrap_or_else(calling_user);
                    let (new, caller) = (NewInode::symlink(target.as_bytes()), Caller { uid, gid, umask: 0 });
                    put(fs, (dir, name), None, args.force, |name| fs.create(dir, name, new, &caller))
                }
                false => {
                    let target = ImagePath::parse(target)?;
                    let of = lookup(fs, &target, false)?.id;
                    let is_same_name = lookup_parent(fs, &target).is_ok_and(|place| place == (dir, name));
                    let linked = Some((of, is_same_name));
                    put(fs, (dir, name), linked, args.force, |name| fs.link(of, dir, name))
                }
            };
            done.with_context(|| format!("cannot make the link {at}"))
        }))
    })
}

/// Fails unless all targets of hard links are in the image of the link.
fn check_targets(targets: &[OsString], link: &ImagePath) -> anyhow::Result<()> {
    for target in targets {
        match ImagePath::split(target) {
            Some(at) if is_same_image(&at.image, &link.image) => {}
            Some(at) => {
                bail!("{at} is in another image than {link}, and hard links do not leave an image; copy the file")
            }
            None => bail!(
                "'{}' names no file in an image; write {}:/path, or make a symbolic link with -s",
                target.shown(),
                link.image.shown()
            ),
        }
    }
    Ok(())
}

/// The last name of a target, which is the name of a link in a directory.
fn last_name(target: &OsStr) -> anyhow::Result<&[u8]> {
    let name = target.as_bytes().rsplit(|byte| *byte == b'/').find(|name| !name.is_empty());
    name.with_context(|| format!("'{}' has no last name; name the link", target.shown()))
}

/// Makes a link with a name. With `replaces`, the link gets a temporary name first and then replaces an existing file.
/// `linked` is the inode of a hard link, and whether the link would have the name that leads to it.
fn put(
    fs: &Fs,
    (dir, name): (InodeId, &[u8]),
    linked: Option<(InodeId, bool)>,
    replaces: bool,
    make: impl FnOnce(&[u8]) -> ubtrfs_fs::Result<Attr>,
) -> anyhow::Result<()> {
    let old = match fs.lookup(dir, name) {
        Err(Error::NotFound) => return Ok(make(name).map(|_| ())?),
        found => found?,
    };
    if old.is_dir() {
        bail!("it is a directory; choose another name");
    }
    if !replaces {
        bail!("it exists; replace it with -f");
    }
    match linked {
        Some((_, true)) => bail!("both are the same file"),
        // As with ln, another name of the file is replaced by itself.
        Some((of, false)) if of == old.id => return Ok(()),
        _ => {}
    }
    let temporary = temporary_name();
    make(&temporary)?;
    let done = fs.rename(dir, &temporary, dir, name, RenameFlags::empty());
    if done.is_err() {
        // An error of this call is ignored, because the earlier error is reported.
        let _ = fs.unlink(dir, &temporary);
    }
    Ok(done?)
}
