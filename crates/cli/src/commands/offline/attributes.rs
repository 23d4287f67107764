//! `ubtrfs chmod` and `ubtrfs chown`.
//!
//! As on Linux, a change of the owner clears the set-id bits and capabilities of a file (`Fs::setattr`).

use std::process::ExitCode;

use anyhow::Context;
use ubtrfs_fs::{Attr, Caller, Fs, InodeId, SetAttr, mode};

use super::mode_change::ModeChange;
use super::operands::{Patterns, for_each_file, worst};
use super::owner::NewOwner;
use super::walk::walk;
use super::{ImageOptions, ImagePath, ImagePathParser, ImageUse, lookup, type_of};

/// Change the permissions of files in an image
#[derive(clap::Args)]
#[command(
    after_help = "MODE is octal (755) or a list of changes (u+rwx,g-w, a=rX, +t, u+s), as in chmod. Without one of the letters \
                        ugoa, a change leaves the bits of the umask. Directories keep their set-user-id and set-group-id \
                        bits unless MODE names them. PATH may have patterns: 'disk.img:/bin/*'."
)]
pub(crate) struct ChmodArgs {
    /// The new mode, or changes of the mode
    #[arg(allow_hyphen_values = true, value_parser = ModeChange::parse)]
    mode: ModeChange,
    /// Files in images
    #[arg(value_name = "IMAGE:/PATH", value_parser = ImagePathParser::default(), required = true)]
    paths: Vec<ImagePath>,
    /// Also change everything below directories; symbolic links below them are left as they are
    #[arg(short = 'R', long)]
    recursive: bool,
    #[command(flatten)]
    image: ImageOptions,
}

/// Change the owner and group of files in an image
#[derive(clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "OWNER is USER, USER:GROUP, USER: (the user's own group) or :GROUP. Users and groups are numbers, or names in \
                        /etc/passwd and /etc/group of this system, not of the image. As on Linux, a new owner clears the \
                        set-user-id and set-group-id bits and the capabilities of files. PATH may have patterns."
)]
pub(crate) struct ChownArgs {
    /// The new owner
    #[arg(value_name = "OWNER[:GROUP]", value_parser = NewOwner::parse)]
    owner: NewOwner,
    /// Files in images
    #[arg(value_name = "IMAGE:/PATH", value_parser = ImagePathParser::default(), required = true)]
    paths: Vec<ImagePath>,
    /// Also change everything below directories, and symbolic links themselves
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Change symbolic links instead of their targets
    #[arg(short = 'h', long)]
    no_dereference: bool,
    #[command(flatten)]
    image: ImageOptions,
    /// Print help
    #[arg(long, action = clap::ArgAction::Help)]
    help: Option<bool>,
}

pub(crate) fn run_chmod(args: ChmodArgs) -> anyhow::Result<ExitCode> {
    let umask = current_umask();
    let set = |attr: &Attr| SetAttr { mode: Some(args.mode.apply(attr.mode, umask)), ..SetAttr::default() };
    let mut below = ExitCode::SUCCESS;
    let done = for_each_file(&args.paths, &args.image, ImageUse::Write, Patterns::Match, |fs, path| {
        let start = lookup(fs, path, true)?;
        if !args.recursive {
            return change(fs, start.id, &set(&start)).with_context(|| format!("cannot change the mode of {path}"));
        }
        // The mode of a symbolic link has no meaning.
        let walked = walk(fs, (path, start), usize::MAX, "change the mode of", |file| {
            match type_of(file.attr.mode) == mode::SYMLINK {
                true => Ok(Ok(())),
                false => Ok(change(fs, file.attr.id, &set(file.attr))),
            }
        });
        below = worst(below, walked?);
        Ok(())
    });
    Ok(worst(done, below))
}

pub(crate) fn run_chown(args: ChownArgs) -> anyhow::Result<ExitCode> {
    let set = SetAttr { uid: args.owner.uid, gid: args.owner.gid, ..SetAttr::default() };
    let mut below = ExitCode::SUCCESS;
    let done = for_each_file(&args.paths, &args.image, ImageUse::Write, Patterns::Match, |fs, path| {
        // As with chown, -R changes symbolic links themselves.
        let start = lookup(fs, path, !(args.no_dereference || args.recursive))?;
        if !args.recursive {
            return change(fs, start.id, &set).with_context(|| format!("cannot change the owner of {path}"));
        }
        let walked =
            walk(fs, (path, start), usize::MAX, "change the owner of", |file| Ok(change(fs, file.attr.id, &set)));
        below = worst(below, walked?);
        Ok(())
    });
    Ok(worst(done, below))
}

fn change(fs: &Fs, id: InodeId, set: &SetAttr) -> anyhow::Result<()> {
    Ok(fs.setattr(id, set, &Caller::ROOT).map(|_| ())?)
}

/// The umask of this process.
pub(super) fn current_umask() -> u32 {
    // The umask can only be read by setting it. No other thread makes files meanwhile.
    let umask = rustix::process::umask(rustix::fs::Mode::RWXU | rustix::fs::Mode::RWXG | rustix::fs::Mode::RWXO);
    rustix::process::umask(umask);
    umask.bits()
}
